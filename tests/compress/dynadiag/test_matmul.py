"""Every backend is the dense product with the same matrix, forward and backward."""

import importlib.util
import json
import subprocess
import sys

import pytest
import torch
from torch.nn.functional import linear

from heedful.compress import diagonal_indices, diagonal_matmul, tune_backend
from heedful.compress.dynadiag import _backends, _tuning, matmul
from heedful.errors import HeedfulWarning, InputError, MissingExtraError, ParameterError
from tests.conformance.typechecks import as_users_have_it

ON_CPU = ["dense", "csr", "bcsr", "numba", "auto"]
SHAPES = [(130, 70, 9), (70, 130, 9), (66, 66, 7), (1, 9, 3), (9, 1, 3), (2, 3, 3)]  # out, in, k


def draw(out_features, in_features, k, batch, *, dtype=torch.float32, seed=0):
    generator = torch.Generator().manual_seed(seed)
    offsets = torch.randperm(max(out_features, in_features), generator=generator)[:k]
    values = torch.randn(k, min(out_features, in_features), generator=generator, dtype=torch.float64)
    x = torch.randn(*batch, in_features, generator=generator, dtype=torch.float64)
    return x.to(dtype).requires_grad_(), values.to(dtype).requires_grad_(), offsets


def dense_product(x, values, offsets, out_features):
    indices = diagonal_indices(out_features, x.shape[-1], offsets)
    return linear(x, values.new_zeros(out_features, x.shape[-1]).index_put(indices, values))


def with_gradients(product, x, values, offsets, out_features):
    y = product(x, values, offsets, out_features)
    weights = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view(y.shape)
    return y, *torch.autograd.grad((weights * y).sum(), (x, values))


@pytest.mark.parametrize("backend", ON_CPU)
@pytest.mark.parametrize(("out_features", "in_features", "k"), SHAPES)
@pytest.mark.parametrize("batch", [(0,), (1,), (7,), (256,), (2, 3, 4), ()])
def test_every_backend_equals_the_dense_product_and_its_gradients(backend, out_features, in_features, k, batch, seed):
    given = *draw(out_features, in_features, k, batch, seed=seed), out_features
    for ours, theirs in zip(
        with_gradients(lambda *a: diagonal_matmul(*a, backend=backend), *given),
        with_gradients(dense_product, *given),
        strict=True,
    ):
        # Sums of up to 256 terms of size 1 in another order: a few roundings of their size, not of the sum's.
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=5e-5)


@pytest.mark.parametrize("backend", ["dense", "csr", "bcsr", "numba"])
@pytest.mark.parametrize(("out_features", "in_features"), [(3, 5), (5, 3), (4, 4)])
def test_gradients_are_those_of_finite_differences(backend, out_features, in_features):
    x, values, offsets = draw(out_features, in_features, 2, (2,), dtype=torch.float64)
    assert torch.autograd.gradcheck(
        lambda x, values: diagonal_matmul(x, values, offsets, out_features, backend=backend), (x, values)
    )


def test_examples_done_by_hand():
    values, offsets = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 2])
    assert diagonal_matmul(torch.tensor([1.0, 10.0, 100.0]), values, offsets, 2).tolist() == [301, 24]
    assert diagonal_matmul(torch.tensor([1.0, 10.0]), values, offsets, 3).tolist() == [41, 20, 3]


@pytest.mark.parametrize("backend", ON_CPU)
def test_exchanging_the_roles_applies_the_transpose(backend):
    _, values, offsets = draw(70, 130, 9, (5,))
    weight = torch.zeros(70, 130)
    weight[diagonal_indices(70, 130, offsets)] = values.detach()
    y = torch.randn(5, 70, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(diagonal_matmul(y, values, offsets, 130, backend=backend), y @ weight)


@pytest.mark.parametrize("backend", ON_CPU)
def test_any_strides_are_taken(backend):
    x, values, offsets = draw(130, 70, 9, (16,))
    slanted = x.detach().T.contiguous().T
    expected = diagonal_matmul(x, values, offsets, 130, backend="dense")
    every_other = torch.stack([values, values], -1).detach().flatten(1)[:, ::2]
    torch.testing.assert_close(diagonal_matmul(slanted, every_other, offsets, 130, backend=backend), expected)
    torch.testing.assert_close(diagonal_matmul(slanted, values, offsets.int(), 130, backend=backend), expected)


@pytest.mark.parametrize("backend", ON_CPU)
def test_bfloat16_is_rounded_once(backend):
    x, values, offsets = draw(130, 70, 9, (16,), dtype=torch.bfloat16)
    y, *gradients = with_gradients(lambda *a: diagonal_matmul(*a, backend=backend), x, values, offsets, 130)
    exact = with_gradients(dense_product, x.double(), values.double(), offsets, 130)
    for ours, theirs in zip((y, *gradients), exact, strict=True):
        assert ours.dtype == torch.bfloat16
        # The gradient is that of rounded weights; two roundings of 2^-9, of numbers up to about 16.
        torch.testing.assert_close(ours.double(), theirs, rtol=2**-7, atol=0.1)


def test_float16_on_a_cpu_warns_and_is_computed_in_float32():
    x, values, offsets = draw(130, 70, 9, (16,), dtype=torch.float16)
    with pytest.warns(HeedfulWarning, match="float16 on a CPU"):
        y = diagonal_matmul(x, values, offsets, 130)
    exact = dense_product(x.double(), values.double(), offsets, 130)
    assert y.dtype == torch.float16
    torch.testing.assert_close(y.double(), exact, rtol=2**-10, atol=1e-5)


def test_autocast_casts_as_for_linear():
    x, values, offsets = draw(130, 70, 9, (16,))
    with torch.autocast("cpu", torch.bfloat16):
        y = diagonal_matmul(x, values, offsets, 130)
        assert diagonal_matmul(x.double(), values.double(), offsets, 130).dtype == torch.float64
    assert y.dtype == torch.bfloat16
    y.float().sum().backward()
    assert x.grad.dtype == values.grad.dtype == torch.float32


def test_the_meta_device_gets_shapes():
    y = diagonal_matmul(
        torch.ones(2, 3, 70, device="meta"), torch.ones(9, 70, device="meta"), torch.ones(9, device="meta").long(), 130
    )
    assert y.shape == (2, 3, 130)
    assert y.device.type == "meta"


def test_ops_keep_torchs_rules_for_custom_ops():
    x, values, offsets = draw(5, 3, 2, (4,))
    torch.library.opcheck(matmul._product, (x, values, offsets, 5, True, "auto"))
    torch.library.opcheck(matmul._value_gradient, (torch.ones(4, 5), x.detach(), offsets, True, "auto"))


def test_a_second_derivative_is_refused():
    x, values, offsets = draw(5, 3, 2, (4,))
    y = diagonal_matmul(x, values, offsets, 5).square().sum()
    for wanted in (x, values):
        (gradient,) = torch.autograd.grad(y, wanted, create_graph=True)
        with pytest.raises(ParameterError, match="differentiable once"):
            gradient.sum().backward()


def test_only_wanted_gradients_are_computed(monkeypatch):
    x, values, offsets = draw(5, 3, 2, (4,))
    monkeypatch.setattr(_backends, "value_gradient", None)
    diagonal_matmul(x, values.detach(), offsets, 5).sum().backward()
    monkeypatch.undo()
    y = diagonal_matmul(x.detach(), values, offsets, 5)
    monkeypatch.setattr(_backends, "product", None)
    y.sum().backward()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"x": torch.ones(2, 4)}, r"need \(2, 4\)"),
        ({"x": torch.ones(2, 0)}, "at least one feature"),
        ({"x": torch.ones(2, 3, dtype=torch.float64)}, "Convert them to one floating-point type"),
        ({"x": torch.ones(2, 3).int(), "values": torch.ones(2, 3).int()}, "Convert them to one floating-point type"),
        ({"offsets": torch.tensor([0.2, 0.7])}, r"offsets are torch\.float32\. Convert them to int64"),
        ({"offsets": torch.tensor([False, True])}, r"offsets are torch\.bool"),
        ({"x": torch.ones(2, 3, device="meta")}, "Move them to one device"),
        ({"offsets": torch.tensor([0, 5])}, "offsets 0 to 4"),
        ({"offsets": torch.tensor([1, 1])}, "offset 1 is given twice"),
    ],
)
def test_what_does_not_fit_is_refused(change, message):
    given = {"x": torch.ones(2, 3), "values": torch.ones(2, 3), "offsets": torch.tensor([0, 4])} | change
    with as_users_have_it(), pytest.raises(InputError, match=message):
        diagonal_matmul(**given, out_features=5)


def test_bad_settings_are_refused():
    x, values, offsets = draw(5, 3, 2, (4,))
    with pytest.raises(ParameterError, match="out_features"):
        diagonal_matmul(x, values, offsets, 0)
    with pytest.raises(ParameterError, match="CUDA device"):
        diagonal_matmul(x, values, offsets, 5, backend="triton")
    with pytest.raises(ParameterError, match="runs on the CPU"):
        _backends.require_usable("numba", torch.device("cuda"))
    with pytest.raises(ParameterError, match="densities"):
        tune_backend(densities=[0.0])
    with pytest.raises(ParameterError, match="nothing to measure"):
        tune_backend(batches=[])
    with pytest.raises(ParameterError, match=r"^device='gpu' cannot be used here"):
        tune_backend(device="gpu")


@pytest.mark.parametrize("package", ["numba", "triton"])
def test_without_its_package_a_backend_names_the_extra_and_auto_does_without(package, monkeypatch):
    find = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == package else find(name))
    x, values, offsets = draw(130, 70, 9, (16,))
    with pytest.raises(MissingExtraError, match=r'pip install "heedful\[kernels\]"'):
        diagonal_matmul(x, values, offsets, 130, backend=package)
    assert package not in _backends.usable(torch.device("cpu")) + _backends.usable(torch.device("cuda"))


@pytest.fixture
def table(tmp_path, monkeypatch):
    """A user's cache folder of its own."""
    monkeypatch.setattr(_tuning.platformdirs, "user_cache_path", lambda app: tmp_path / app)
    forget()
    yield tmp_path / "heedful" / "dynadiag" / "cpu.json"
    forget()


def forget():
    _tuning._table.cache_clear()
    _tuning._choose.cache_clear()


def chosen(operation="product", shape=(130, 70), k=9, batch=16):
    return _tuning.choose_backend(operation, torch.ones(batch, shape[1]), shape, k)


def test_tuning_measures_every_usable_backend_and_decides_from_then_on(table):
    measured = tune_backend(sizes=[16, 64], densities=[0.5], batches=[2], n_timings=1)
    assert len(measured) == 4  # two operations, two sizes
    assert set(measured.columns) == {"operation", "out", "in", "k", "batch", *_backends.usable(torch.device("cpu"))}
    assert (measured[_backends.usable(torch.device("cpu"))] > 0).all(axis=None)
    nearest = measured[(measured["operation"] == "product") & (measured["out"] == 64)]
    assert chosen() == nearest[_backends.usable(torch.device("cpu"))].iloc[0].astype(float).idxmin()


def test_the_nearest_measured_case_decides(table):
    def row(size, batch, fastest):
        seconds = {name: 1.0 + (name != fastest) for name in ("dense", "csr", "bcsr")}
        case = {"operation": "product", "out": size, "in": size, "k": 10, "batch": batch}
        return {**case, "seconds": seconds}

    table.parent.mkdir(parents=True)
    _tuning._write(torch.device("cpu"), [row(100, 1, "csr"), row(100, 256, "dense"), row(4000, 1, "bcsr")])
    assert chosen(shape=(90, 110), k=10, batch=2) == "csr"
    assert chosen(shape=(90, 110), k=10, batch=100) == "dense"
    assert chosen(shape=(3000, 5000), k=10, batch=1) == "bcsr"


def test_where_nothing_was_measured_the_first_call_measures(table, monkeypatch):
    calls = []

    def measure(operation, device, dtype, n_timings, **case):
        calls.append(case)
        return {"csr": 1.0, "dense": 2.0}

    with monkeypatch.context() as patch:
        patch.setattr(_tuning, "_table", lambda device: [])
        patch.setattr(_tuning, "_measure", measure)
        assert [chosen(batch=batch) for batch in (9, 16, 17)] == ["csr"] * 3
    assert calls == [{"out": 130, "in": 70, "k": 9, "batch": batch} for batch in (16, 32)]


@pytest.mark.parametrize("text", ["not json", "[]", '{"format": 1}'])
def test_a_damaged_table_is_ignored_with_a_warning(table, text):
    table.parent.mkdir(parents=True)
    table.write_text(text)
    with pytest.warns(HeedfulWarning, match="was ignored"):
        assert chosen() in _backends.BACKENDS


@pytest.mark.parametrize(
    "damage",
    [{"operation": "sum"}, {"out": 0}, {"k": "9"}, {"batch": None}, {"seconds": {"fast": 1.0}}, {"seconds": []}],
)
def test_a_table_with_a_damaged_row_is_ignored_with_a_warning(table, damage):
    table.parent.mkdir(parents=True)
    row = {"operation": "product", "out": 130, "in": 70, "k": 9, "batch": 16, "seconds": {"dense": 1.0}}
    _tuning._write(torch.device("cpu"), [row])
    assert chosen() == "dense"
    _tuning._write(torch.device("cpu"), [row, row | damage])
    with pytest.warns(HeedfulWarning, match="was ignored"):
        assert chosen() in _backends.BACKENDS


def test_tuning_fails_before_it_measures_where_the_folder_cannot_be(table, monkeypatch):
    (table.parent.parent).write_text("a file")
    monkeypatch.setattr(_tuning, "_measure", None)
    with pytest.raises(OSError, match="heedful"):
        tune_backend(sizes=[16])


def test_measurements_of_another_processor_are_not_used(table):
    table.parent.mkdir(parents=True)
    table.write_text(json.dumps({"format": 1, "processor": "another", "rows": []}))
    assert chosen() in _backends.BACKENDS


def test_the_table_that_ships_covers_both_operations_and_every_backend():
    rows = _tuning._table("cpu")
    for operation in ("product", "value_gradient"):
        cases = [row for row in rows if row["operation"] == operation]
        assert {row["batch"] for row in cases} == {1, 16, 256}
        assert all(set(row["seconds"]) == {"dense", "csr", "bcsr", "numba"} for row in cases)


def test_numba_is_imported_only_when_asked_for():
    code = """if True:
        import sys, torch
        from heedful.compress import diagonal_matmul
        diagonal_matmul(torch.ones(2, 3), torch.ones(1, 3), torch.tensor([1]), 4, backend="csr")
        assert not {"numba", "llvmlite"} & set(sys.modules)
    """
    subprocess.run([sys.executable, "-c", code], check=True)


def test_where_numbers_are_all_that_is_wanted_the_operator_is_spared(monkeypatch):
    x, values, offsets = torch.randn(3, 8), torch.randn(2, 8), torch.tensor([1, 6])
    expected = matmul._product(x, values, offsets, 12, True, "dense")
    monkeypatch.setattr(matmul, "_product", None)
    assert torch.equal(diagonal_matmul(x, values, offsets, 12, backend="dense"), expected)
    with torch.no_grad():
        assert torch.equal(diagonal_matmul(x, values.requires_grad_(), offsets, 12, backend="dense"), expected)
    with pytest.raises(TypeError):
        diagonal_matmul(x, values, offsets, 12, backend="dense")
