"""Diagonal layers against dense ones, closed forms and naive twins. The products themselves are in test_matmul."""

import copy
import itertools
import math
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import linear
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from heedful.compress import DiagonalLinear, add_lora_fa, diagonal_indices, soft_topk
from heedful.compress.dynadiag.layer import by_energy, read_diagonals
from heedful.errors import InputError, ParameterError
from tests.conformance import cases
from tests.conformance.distributed import in_new_process
from tests.conformance.generators import global_generators_stay
from tests.conformance.modules import CHECKS, ModuleRow
from tests.conformance.typechecks import as_users_have_it

SHAPES = [(12, 8), (8, 12), (7, 7), (1, 5), (5, 1)]  # in, out


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def spread_scores(layer, seed=0):
    """Scores so far apart that the same diagonals are chosen in bfloat16, and at perturbed scores."""
    n = len(layer.scores)
    with torch.no_grad():
        layer.scores.copy_(torch.linspace(-0.5, 0.5, n)[torch.randperm(n, generator=seeded(seed))])
    return layer


def make(in_features=12, out_features=8, *, frozen=False, rank=0, **settings):
    settings = {"sparsity": 0.5, "temperature": 0.3, "backend": "dense", "generator": seeded(1), **settings}
    layer = spread_scores(DiagonalLinear(in_features, out_features, **settings))
    if frozen:
        layer.freeze()
    if rank:
        add_lora_fa(layer, rank, generator=seeded(2))
        with torch.no_grad():
            layer.lora_b.normal_(generator=seeded(3))
    return layer


def double(*args, **settings):
    return make(*args, dtype=torch.float64, **settings)


def inputs(n, generator):
    return (torch.randn(n, 12, generator=generator),)


def randn(*shape, seed=5):
    return torch.randn(*shape, generator=seeded(seed), dtype=torch.float64)


# --- soft top-k


@pytest.mark.parametrize(
    ("temperature", "expected"),
    [
        (0.5, [1.0, 0.4737656, 0.1742886, 0.0641172]),
        (5.0, [0.5773, 0.5224, 0.4727, 0.4277]),
        (1e-3, [1.0, 0.0, 0.0, 0.0]),
        (1e6, [0.5, 0.5, 0.5, 0.5]),
    ],
)
def test_soft_topk_of_four_scores(temperature, expected):
    importance = soft_topk(torch.tensor([1.0, 0.5, 0.0, -0.5], dtype=torch.float64), 2, temperature)
    torch.testing.assert_close(importance, torch.tensor(expected, dtype=torch.float64), atol=5e-5, rtol=0)  # 4 digits


some_scores = st.lists(st.floats(-1e4, 1e4), min_size=1, max_size=8).map(partial(torch.tensor, dtype=torch.float64))


@given(scores=some_scores, shift=st.floats(-1e4, 1e4), temperature=st.floats(0.05, 10), data=st.data())
def test_importances_are_shares_of_k_whatever_the_origin_of_scores(scores, shift, temperature, data):
    k = data.draw(st.integers(1, len(scores)))
    importance = soft_topk(scores, k, temperature)
    assert ((importance >= 0) & (importance <= 1)).all()
    assert importance.sum() <= k + 1e-9  # roundings of at most eight terms
    # Adding a shift rounds scores by up to 1e-12, and the temperature magnifies that by at most 20.
    torch.testing.assert_close(soft_topk(scores + shift, k, temperature), importance, atol=1e-9, rtol=1e-9)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_soft_topk_is_stable_for_huge_scores(dtype):
    scores = torch.tensor([1e4, -1e4, 0.0], dtype=dtype, requires_grad=True)
    importance = soft_topk(scores, 1, 0.05)
    assert importance.tolist() == [1.0, 0.0, 0.0]
    importance.sum().backward()
    assert scores.grad.isfinite().all()


def test_soft_topk_refuses_what_it_cannot_rank():
    scores = torch.tensor([0.0, math.nan, 1.0, math.inf])
    with pytest.raises(InputError, match=r"^2 of 4 scores are NaN or infinite\. Lower the learning rate"):
        soft_topk(scores, 1, 1.0)
    for k in (0, 4, 1.5):
        with as_users_have_it(), pytest.raises(ParameterError, match=r"^k must be an int >= 1 and <= 3"):
            soft_topk(torch.zeros(3), k, 1.0)
    for temperature in (0.0, -1.0, math.nan):
        with pytest.raises(ParameterError, match=r"^temperature must be a number > 0"):
            soft_topk(torch.zeros(3), 1, temperature)


# --- what a layer computes


@pytest.mark.parametrize(
    "settings", [{}, {"mask_values": "ste"}, {"selection": "soft"}, {"groups": 4}, {"frozen": True}]
)
@pytest.mark.parametrize("shape", [(12, 8), (8, 12)])
def test_output_and_gradients_are_those_of_the_dense_weight(shape, settings):
    layer, twin = double(*shape, **settings), double(*shape, **settings)
    x = randn(2, 3, shape[0]).requires_grad_()
    y = layer(x)
    x_twin = x.detach().clone().requires_grad_()
    y_twin = linear(x_twin, twin.dense_weight(), twin.bias)
    torch.testing.assert_close(y, y_twin)
    y.square().sum().backward()
    y_twin.square().sum().backward()
    torch.testing.assert_close(x.grad, x_twin.grad)
    for (name, p), q in zip(layer.named_parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, msg=name)


def test_weight_is_the_sum_of_weighted_diagonals():
    layer = double(3, 5, sparsity=0.6)
    importance = soft_topk(layer.scores, 2, 0.3)
    expected = torch.zeros(5, 3, dtype=torch.float64)
    for o in importance.argsort(descending=True)[:2].tolist():
        for d in range(3):
            expected[(d + o) % 5, d] = importance[o] * layer.values[o, d]
    torch.testing.assert_close(layer.dense_weight(), expected)


@pytest.mark.parametrize("shape", SHAPES)
def test_without_sparsity_and_straight_through_it_is_nn_linear(shape):
    dense = nn.Linear(*shape, dtype=torch.float64)
    layer = DiagonalLinear.from_linear(dense, sparsity=0.0, mask_values="ste", backend="dense")
    assert torch.equal(layer.dense_weight(), dense.weight)
    layer.bias = nn.Parameter(dense.bias.detach().clone())
    x = randn(4, shape[0])
    twin = x.clone().requires_grad_()
    x.requires_grad_()
    layer(x).square().sum().backward()
    dense(twin).square().sum().backward()
    torch.testing.assert_close(layer(x), dense(twin))
    torch.testing.assert_close(x.grad, twin.grad)
    torch.testing.assert_close(layer.values.grad, read_diagonals(dense.weight.grad))
    torch.testing.assert_close(layer.bias.grad, dense.bias.grad)


@pytest.mark.parametrize("shape", SHAPES)
def test_all_diagonals_are_read_where_their_indices_are(shape):
    weight = randn(shape[1], shape[0])
    rows, cols = diagonal_indices(shape[1], shape[0], range(max(shape)))
    assert torch.equal(read_diagonals(weight), weight[rows, cols])


# --- gradients of scores


def test_scores_outside_get_a_gradient_and_it_is_the_formula():
    temperature = 0.4
    layer = double(12, 8, temperature=temperature)
    importance, share = layer.importance().detach(), torch.softmax(layer.scores / temperature, 0).detach()
    assert 0 < (importance == 1).sum() < layer.k, "some importances must be cut off, and some not"
    x, weights = randn(6, 12), randn(6, 8)
    dense = layer.dense_weight().detach().requires_grad_()
    (linear(x, dense) * weights).sum().backward()
    slope = (layer.values * read_diagonals(dense.grad)).sum(1).detach()  # g_o
    expected = torch.zeros(12, dtype=torch.float64)
    for i, o in itertools.product(range(12), layer.offsets().tolist()):
        if importance[o] < 1:
            expected[i] += slope[o] * importance[o] * (float(i == o) - share[i]) / temperature
    (layer(x) * weights).sum().backward()
    torch.testing.assert_close(layer.scores.grad, expected)
    outside = torch.ones(12, dtype=torch.bool).index_fill(0, layer.offsets(), False)
    assert (layer.scores.grad[outside] != 0).all()
    assert (layer.values.grad[outside] == 0).all()


def test_straight_through_takes_one_forward_and_the_gradient_of_importances():
    layer = double(mask_values="ste", temperature=2.0)
    assert torch.equal(
        layer.dense_weight()[layer.dense_weight() != 0].sort().values,
        layer.values[layer.offsets()].flatten().sort().values,
    )
    soft = double(mask_values="soft", temperature=2.0)
    slope = (layer.values * read_diagonals(torch.ones(8, 12, dtype=torch.float64))).sum(1).detach()
    layer.dense_weight().sum().backward()
    (importance,) = torch.autograd.grad((soft.importance()[soft.offsets()] * slope[soft.offsets()]).sum(), soft.scores)
    torch.testing.assert_close(layer.scores.grad, importance)


def test_soft_selection_trains_every_diagonal():
    layer = double(selection="soft")
    layer(randn(6, 12)).square().sum().backward()
    assert (layer.values.grad != 0).all()


# --- which diagonals


def test_equal_scores_choose_the_lowest_offsets():
    layer = make(sparsity=0.75)
    nn.init.zeros_(layer.scores)
    assert layer.offsets().tolist() == [0, 1, 2]


def test_groups_choose_aligned_runs():
    layer = make(16, 8, sparsity=0.7, groups=4)
    assert layer.k == 8  # 0.3 · 16 = 4.8 is rounded up to runs of 4
    assert layer.scores.shape == (4,)
    best = layer.scores.topk(2).indices.sort().values
    assert layer.offsets().tolist() == [4 * int(run) + i for run in best for i in range(4)]
    assert layer.importance().view(4, 4).std(dim=1).max() == 0


@pytest.mark.parametrize("sparsity", [0.0, 0.05, 0.5, 0.8, 0.9, 0.95, 0.999])
def test_k_is_the_share_of_diagonals_rounded_up(sparsity):
    layer = DiagonalLinear(480, 2, sparsity=sparsity)
    assert layer.k == max(1, math.ceil(round((1 - sparsity) * 480, 6)))
    assert layer.effective_sparsity() == pytest.approx(1 - layer.k / 480)
    assert float((layer.dense_weight() == 0).double().mean()) == pytest.approx(layer.effective_sparsity())


def test_a_cyclic_shift_of_outputs_shifts_offsets_and_rotates_the_output(seed):
    shift = 3
    layer = double(5, 8, bias=False)
    shifted = copy.deepcopy(layer)
    with torch.no_grad():
        shifted.scores.copy_(layer.scores.roll(shift))
        shifted.values.copy_(layer.values.roll(shift, 0))
    x = randn(4, 5, seed=seed)
    torch.testing.assert_close(shifted(x), layer(x).roll(shift, -1))


@pytest.mark.parametrize("n", range(2, 9))
def test_enough_layers_of_two_diagonals_connect_every_input_to_every_output(n):
    for first, second in itertools.combinations(range(n), 2):
        layer = DiagonalLinear(n, n, sparsity=1 - 2 / n, bias=False)
        with torch.no_grad():
            layer.scores.zero_()[[first, second]] = 1.0
            layer.values.fill_(1.0)
        step = (layer.dense_weight() != 0).int()
        reach = torch.eye(n, dtype=torch.int32)
        for _ in range(n - 1):
            reach = (step @ reach > 0).int()
        assert bool(reach.all()) == (math.gcd(first - second, n) == 1)


# --- how it starts


@pytest.mark.parametrize(
    "settings", [{}, {"mask_values": "ste"}, {"selection": "soft"}, {"selection": "soft", "mask_values": "ste"}]
)
def test_weights_start_with_the_variance_that_nn_linear_gives_as_many_inputs(settings):
    layer = DiagonalLinear(200, 400, sparsity=0.9, generator=seeded(), **settings)
    weight = layer.dense_weight().detach()
    n_inputs = float((weight != 0).double().sum(1).mean())  # 20 if 40 diagonals of length 200 lie in 400 rows
    assert n_inputs == pytest.approx(200 if settings == {"selection": "soft"} else 20)
    # Uniform in ±1/√n. 8000 draws: the standard error of their variance is 1 %; importances stray by 0.2 %.
    assert float(weight[weight != 0].var()) * 3 * n_inputs == pytest.approx(1, abs=0.05)


def test_initial_values_are_uniform_in_the_stated_bounds_and_scores_normal():
    layer = DiagonalLinear(200, 400, sparsity=0.9, generator=seeded())
    bound = math.sqrt(1 / 20) * 10
    assert 0.999 * bound < float(layer.values.detach().abs().max()) <= bound  # of 80000 draws
    assert layer.scores.mean().item() == pytest.approx(1 / 400, abs=4 * 0.01 / 20)
    assert layer.scores.std().item() == pytest.approx(0.01, rel=0.15)  # four standard errors of 400 draws


def test_a_generator_decides_alone():
    with global_generators_stay("DiagonalLinear"):
        first, second = (DiagonalLinear(6, 4, generator=seeded(3)) for _ in range(2))
    assert all(map(torch.equal, first.parameters(), second.parameters()))


# --- from and to dense layers


@pytest.mark.parametrize("settings", [{}, {"mask_values": "ste"}, {"groups": 2}])
@pytest.mark.parametrize("shape", [(12, 8), (8, 12), (6, 6)])
def test_a_layer_that_goes_through_a_dense_one_comes_back(shape, settings):
    layer = double(*shape, **settings)
    dense = layer.to_linear()
    assert type(dense) is nn.Linear
    back = DiagonalLinear.from_linear(dense, sparsity=0.5, backend="dense", **settings)
    assert torch.equal(back.offsets(), layer.offsets())
    torch.testing.assert_close(back.dense_weight(), layer.dense_weight())
    x = randn(3, shape[0])
    torch.testing.assert_close(back(x), dense(x))


def test_from_linear_keeps_the_strongest_diagonals_and_all_values(seed):
    dense = nn.Linear(6, 10, dtype=torch.float64)
    layer = DiagonalLinear.from_linear(dense, sparsity=0.7, selection="soft", generator=seeded(seed))
    strongest = read_diagonals(dense.weight.detach()).square().sum(1).topk(3).indices.sort().values
    assert torch.equal(layer.offsets(), strongest)
    torch.testing.assert_close(layer.dense_weight(), dense.weight)  # all diagonals are read, not only those in use
    assert layer.bias is dense.bias


def test_values_of_diagonals_far_from_being_chosen_are_finite():
    layer = DiagonalLinear.from_linear(nn.Linear(6, 10), sparsity=0.7, temperature=1e-4, generator=seeded(0))
    assert (layer.importance() == 0).any()
    assert layer.values.isfinite().all()


def test_from_linear_keeps_mode_and_what_does_not_train():
    layer = DiagonalLinear.from_linear(nn.Linear(6, 10).eval().requires_grad_(False), sparsity=0.7)
    assert not layer.training
    assert not any(p.requires_grad for p in layer.parameters())


def test_equally_strong_diagonals_rank_by_offset():
    assert by_energy(torch.tensor([[0.0, 1.0], [1.0, 1.0], [1.0, 0.0], [-1.0, 1.0]])).tolist() == [1, 3, 0, 2]


# --- freezing


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize(
    "settings", [{}, {"mask_values": "ste"}, {"groups": 4}, {"selection": "soft", "mask_values": "ste"}]
)
def test_freezing_leaves_the_function_and_scales_the_gradients_of_values_by_importance(settings, compact):
    layer = double(**settings)
    x = randn(6, 12)
    before = layer(x)
    before.square().sum().backward()
    offsets, importance, gradient = layer.offsets(), layer.importance().detach(), layer.values.grad[layer.offsets()]
    layer.zero_grad()
    layer.freeze(compact=compact)
    after = layer(x)
    torch.testing.assert_close(after, before)
    after.square().sum().backward()
    folded = layer.values.grad if compact else layer.values.grad[offsets]
    factor = 1.0 if "mask_values" in settings else importance[offsets][:, None]
    torch.testing.assert_close(gradient, folded * factor)
    assert torch.equal(layer.offsets(), offsets)
    assert layer.importance().nonzero().flatten().tolist() == offsets.tolist()


def test_frozen_layers_save_k_diagonals():
    layer = make(12, 8, frozen=True)
    state = {name: tuple(tensor.shape) for name, tensor in layer.state_dict().items()}
    assert state == {"values": (6, 8), "bias": (8,), "temperature": (), "frozen_offsets": (6,)}
    assert sorted(name for name, _ in layer.named_parameters()) == ["bias", "values"]


def test_freezing_without_compacting_keeps_the_parameters_that_an_optimizer_knows():
    layer = make()
    known = {id(p) for p in layer.parameters()}
    layer.freeze(compact=False)
    assert {id(p) for p in layer.parameters()} == known
    assert not layer.scores.requires_grad
    y = layer(inputs(3, seeded())[0])
    layer.freeze()
    assert layer.values.shape == (6, 8)
    assert torch.equal(layer(inputs(3, seeded())[0]), y)


def test_freezing_amid_gradients_is_refused():
    layer = make()
    layer(inputs(3, seeded())[0]).sum().backward()
    with pytest.raises(
        InputError, match=r"^freeze\(\) found gradients .* Call optimizer.step\(\) and optimizer.zero_grad\(\) first\.$"
    ):
        layer.freeze()
    layer.zero_grad()
    layer.freeze()
    layer(inputs(3, seeded())[0]).sum().backward()
    layer.freeze()  # frozen already: nothing to lose
    with pytest.raises(InputError, match=r"^a frozen layer has no scores to draw\."):
        layer.reset_parameters()


def test_freezing_broken_scores_is_refused():
    layer = make()
    with torch.no_grad():
        layer.scores[2] = math.nan
    with pytest.raises(InputError, match=r"^1 of 12 scores are NaN or infinite\."):
        layer.freeze()


# --- state


@pytest.mark.parametrize("assign", [False, True])
@pytest.mark.parametrize("there", [{}, {"frozen": True}, {"frozen": True, "rank": 2}])
@pytest.mark.parametrize("saved", [{}, {"frozen": True}, {"compact": False}, {"frozen": True, "rank": 3}])
def test_any_form_loads_into_any_form(saved, there, assign):
    compact = saved.get("compact", True)
    source, target = make(**{k: v for k, v in saved.items() if k != "compact"}), make(generator=seeded(9), **there)
    if not compact:
        source.freeze(compact=False)
    if "rank" in there and "rank" not in saved:
        with pytest.raises(RuntimeError, match="Missing key"):  # an adapter is not dropped in silence
            target.load_state_dict(source.state_dict())
        return
    with global_generators_stay("load_state_dict"):
        target.load_state_dict(source.state_dict(), assign=assign)
    assert target.frozen == source.frozen
    assert {n: p.requires_grad for n, p in target.named_parameters()} == {
        n: p.requires_grad for n, p in source.named_parameters()
    }
    assert target.state_dict().keys() == source.state_dict().keys()
    (x,) = inputs(3, seeded())
    assert torch.equal(target(x), source(x))


def test_a_state_of_another_sparsity_is_refused():
    with pytest.raises(
        RuntimeError, match=r"frozen_offsets: a layer with 3 diagonals was saved, this one has 6\. Make it with"
    ):
        make().load_state_dict(make(sparsity=0.75, frozen=True).state_dict())


# --- adapters


def test_an_adapter_leaves_the_function_and_trains_b_alone():
    layer = make(frozen=True)
    (x,) = inputs(4, seeded())
    before = layer(x)
    assert add_lora_fa(layer, 3, generator=seeded()) is layer
    assert torch.equal(layer(x), before)
    layer(x).square().sum().backward()
    assert [name for name, p in layer.named_parameters() if p.grad is not None] == ["lora_b"]
    assert layer.lora_a.shape == (3, 12)
    assert layer.lora_b.shape == (8, 3)
    with torch.no_grad():
        layer.lora_b.normal_(generator=seeded(1))
    torch.testing.assert_close(layer(x), linear(x, layer.dense_weight(), layer.bias))
    torch.testing.assert_close(layer(x), layer.to_linear()(x))


def test_an_adapter_needs_a_frozen_layer_and_a_low_rank():
    with pytest.raises(InputError, match=r"^add_lora_fa needs a frozen layer\. Call layer.freeze\(\)"):
        add_lora_fa(make(), 2)
    for rank in (0, 9):
        with pytest.raises(ParameterError, match=r"^rank must be an int >= 1 and <= 8"):
            add_lora_fa(make(frozen=True), rank)


# --- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1.0}, "sparsity must be below 1"),
        ({"sparsity": -0.1}, "sparsity must be a number >= 0"),
        ({"sparsity": math.nan}, "sparsity must be a number >= 0"),
        ({"temperature": 0.0}, "temperature must be a number > 0"),
        ({"temperature": -1.0}, "temperature must be a number > 0"),
        (
            {"groups": 5},
            "groups must divide the number of diagonals, max(in_features, out_features); got groups=5 for 12.",
        ),
        ({"groups": 0}, "groups must be an int >= 1"),
        ({"selection": "top"}, "selection must be one of 'hard', 'soft'; got 'top'."),
        ({"mask_values": "one"}, "mask_values must be one of 'soft', 'ste'; got 'one'."),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with as_users_have_it(), pytest.raises(ParameterError) as caught:
        DiagonalLinear(12, 8, **settings)
    assert str(caught.value).startswith(message)


def test_features_must_match():
    with pytest.raises(InputError, match=r"^this layer takes 12 features; got an input of shape \(2, 8\)\.$"):
        make()(torch.zeros(2, 8))
    with (
        as_users_have_it(),
        pytest.raises(InputError, match=r"^this layer takes 12 features; got an input of shape \(\)"),
    ):
        make()(torch.tensor(1.0))


def test_what_no_diagonals_can_be_read_from_is_refused():
    with pytest.raises(InputError, match=r"^a Conv2d cannot become diagonal\. Give nn\.Linear"):
        DiagonalLinear.from_linear(nn.Conv2d(2, 2, 1))
    linear = nn.Linear(4, 3)
    linear.weight.data[1, 1] = math.nan
    with pytest.raises(InputError, match=r"^a weight of shape \(3, 4\) has 1 entries that are NaN or infinite"):
        DiagonalLinear.from_linear(linear)


def test_a_layer_that_keeps_all_diagonals_says_so(caplog):
    with caplog.at_level("INFO", logger="heedful"):
        DiagonalLinear(12, 8, sparsity=0.0)
    assert caplog.messages == ["a layer of sparsity 0 keeps all of its 12 diagonals: it is dense"]


# --- memory and compilation


class LargestTensor(TorchDispatchMode):
    """The most entries that any operation inside gave."""

    def __init__(self):
        super().__init__()
        self.entries = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        sizes = [leaf.numel() for leaf in tree_leaves(out) if isinstance(leaf, torch.Tensor)]
        self.entries = max([self.entries, *sizes])
        return out


def test_only_the_diagonals_in_use_are_looked_at():
    layer = DiagonalLinear(64, 96, sparsity=0.9, backend="csr")
    x = torch.randn(2, 64, requires_grad=True)
    with LargestTensor() as largest:
        layer(x)
    assert largest.entries <= 10 * 64 < 64 * 96


def _compile_while_the_selection_changes():
    layer = make()
    compiled = torch.compile(layer, backend="aot_eager", fullgraph=True)
    (x,) = inputs(5, seeded())
    chosen = set()
    with torch._dynamo.config.patch(error_on_recompile=True):
        for step in range(4):
            spread_scores(layer, seed=step)
            layer.temperature.fill_(1.0 / (step + 1))
            chosen.add(tuple(layer.offsets().tolist()))
            torch.testing.assert_close(compiled(x), layer(x))
            compiled(x).square().sum().backward()
            compiled_gradients = [p.grad for p in layer.parameters()]
            layer.zero_grad()
            layer(x).square().sum().backward()
            torch.testing.assert_close(compiled_gradients, [p.grad for p in layer.parameters()])
            layer.zero_grad()
    return len(chosen)


def test_a_compiled_layer_is_not_compiled_again_when_the_selection_changes():
    assert in_new_process(_compile_while_the_selection_changes) > 1


ROWS = (
    ModuleRow("DiagonalLinear", make, inputs),
    ModuleRow(
        "DiagonalLinear, tall, ste",
        partial(make, 12, 16, groups=2, mask_values="ste"),
        inputs,
        exclusions={"check_gradients": "the gradient of straight-through is not that of the function, on purpose"},
    ),
    ModuleRow("DiagonalLinear, soft", partial(make, selection="soft"), inputs),
    ModuleRow("DiagonalLinear, frozen, with adapter", partial(make, frozen=True, rank=2), inputs),
)


@pytest.mark.parametrize(("check", "row"), cases(ROWS, CHECKS))
def test_module(check, row):
    check(row)
