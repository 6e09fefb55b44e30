"""Every merge method against mergekit's, and what all of them promise. CABS itself is in test_cabs."""

import logging
import math
import warnings

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful._checkpoints import open_checkpoint
from heedful.errors import HeedfulWarning, InputError, ParameterError
from heedful.merge import MergeMethod, available_methods, cabs_delta, merge_state_dicts
from heedful.merge._methods import merge_tensor, tensor_generator
from tests.conformance.typechecks import as_users_have_it

METHODS = sorted(available_methods())
SHAPES = {"embed.weight": (40, 16), "layer.weight": (16, 33), "layer.bias": (33,), "norm.weight": (16,), "one": (1,)}


def state_dict(seed, *, near=None, std=0.1, dtype=torch.float32):
    """Random tensors, or those of ``near`` with something added."""
    generator = torch.Generator().manual_seed(seed)
    drawn = {name: torch.randn(shape, generator=generator) for name, shape in SHAPES.items()}
    return {name: (x if near is None else near[name] + std * x).to(dtype) for name, x in drawn.items()}


def family(k, seed=0, dtype=torch.float32):
    """A base and k models."""
    base = state_dict(seed)
    models = [state_dict(1000 * seed + i + 1, near=base, dtype=dtype) for i in range(k)]
    return {name: x.to(dtype) for name, x in base.items()}, models


def by_mergekit(name, base, tensors, **parameters):
    """The same merge of one tensor by mergekit; what is a list there has one value for each model."""
    from mergekit.merge_methods import registry
    from mergekit.merge_methods.base import PerInputValues, TensorGroup
    from mergekit.merge_methods.generalized_task_arithmetic import GeneralizedTaskArithmeticMerge
    from mergekit.sparsify import SparsificationMethod

    if name == "magnitude":  # TIES without its elections, which mergekit can do but has no name for
        method = GeneralizedTaskArithmeticMerge(None, SparsificationMethod.magnitude, False, False, name, None, None)
    else:
        method = registry.get(name)
    labels = [f"model{k}" for k in range(len(tensors))]
    if base is None:
        group = TensorGroup.from_tensors(tensors, ids=labels)
    else:
        group = TensorGroup.from_tensors([base, *tensors], ids=["base", *labels], base_index=0)
    bound = {
        key: PerInputValues(list(zip(labels, value, strict=True))) if isinstance(value, list) else value
        for key, value in parameters.items()
    }
    return method([group], parameters=bound)[0]


SETTINGS = [
    ("linear", {"weight": [0.5, 1.0, 0.3]}),
    ("linear", {"weight": [0.5, 1.0, -0.3], "normalize": False}),
    ("task_arithmetic", {"weight": [0.5, 1.0, -0.3]}),
    ("task_arithmetic", {"weight": [0.5, 1.0, 0.3], "normalize": True, "lambda": 1.3}),
    ("task_arithmetic", {"weight": [0.5, -0.5, 0.0], "normalize": True}),
    ("magnitude", {"weight": [1.0, 1.0, 0.5], "density": [0.1, 0.5, 1.0]}),
    ("magnitude", {"weight": [1.0, 1.0, 0.5], "density": [0.1, 0.5, 0.3], "rescale": True}),
    ("ties", {"weight": [0.5, 1.0, 0.3], "density": [0.2, 0.5, 1.0]}),
    ("ties", {"weight": [0.5, 1.0, -0.3], "density": [0.2, 0.5, 0.9], "normalize": False, "lambda": 0.7}),
    ("ties", {"weight": [1.0, 1.0, 1.0], "density": [0.01, 0.01, 0.01], "rescale": True}),
    ("dare_linear", {"weight": [0.5, 1.0, 0.3], "density": [0.2, 0.5, 1.0]}),
    ("dare_linear", {"weight": [0.5, 1.0, 0.3], "density": [0.2, 0.5, 0.9], "rescale": False, "lambda": 1.2}),
    ("dare_ties", {"weight": [0.5, 1.0, 0.3], "density": [0.2, 0.5, 0.9]}),
    ("dare_ties", {"weight": [0.5, 1.0, 0.3], "density": [0.2, 0.5, 0.9], "normalize": True}),
    ("breadcrumbs", {"weight": [0.5, 1.0, 0.3], "density": [0.2, 0.5, 1.0]}),
    ("breadcrumbs", {"weight": [0.5, 1.0, 0.3], "density": [0.2, 0.5, 0.95], "gamma": [0.1, 0.02, 0.2], "lambda": 2.0}),
]


@pytest.mark.parametrize(("name", "parameters"), SETTINGS)
def test_methods_agree_with_mergekit_tensor_by_tensor(name, parameters, seed, monkeypatch):
    method = available_methods()[name]
    ours = {{"lambda": "scale", "gamma": "drop_largest"}.get(key, key): value for key, value in parameters.items()}
    settings = method.settings(3, **ours)
    base, models = family(3, seed)
    draws = torch.Generator()
    monkeypatch.setattr(  # mergekit's DARE draws as ours does
        torch, "bernoulli", lambda p: torch.empty(p.shape).bernoulli_(float(p.view(-1)[0]), generator=draws)
    )
    for tensor in SHAPES:
        start, others = None if name == "linear" else base[tensor], [model[tensor] for model in models]
        merged = method.merge(start, others, generator=torch.Generator().manual_seed(seed), **settings)
        draws.manual_seed(seed)
        expected = by_mergekit(name, start, others, **parameters)
        # Float32 sums of three terms in another order, some of which mergekit scales afterwards; entries are of size 1.
        torch.testing.assert_close(merged, expected, rtol=1e-6, atol=1e-6)


def test_breadcrumbs_keep_the_density_where_outliers_leave_too_little(seed):
    """As mergekit does, where its versions before 0.1.4 kept less."""
    method = available_methods()["breadcrumbs"]
    start, delta = torch.zeros(100), torch.randn(100, generator=torch.Generator().manual_seed(seed))
    settings = method.settings(1, density=0.9, drop_largest=0.3)
    assert method.merge(start, [delta], **settings).count_nonzero() == 90


# What all methods promise.


def merged_by(method, base, models, **params):
    return merge_state_dicts(base, models, method=method, random_state=0, **params)


@pytest.mark.parametrize("method", METHODS)
def test_a_merge_of_the_base_with_itself_is_the_base_bit_for_bit(method):
    base = {"w": torch.tensor([-0.0, 1.0, 1e-40, -3.0]), "half": torch.tensor([0.1, -0.0]).bfloat16()}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", HeedfulWarning)
        merged = merged_by(method, base, [base, base])
    assert torch.equal(merged["w"].view(torch.int32), base["w"].view(torch.int32))
    assert torch.equal(merged["half"].view(torch.int16), base["half"].view(torch.int16))


@pytest.mark.parametrize("method", METHODS)
def test_no_tensor_depends_on_which_others_there_are(method, seed):
    base, models = family(3, seed)
    whole = merged_by(method, base, models)
    for name in SHAPES:
        part = merged_by(method, {name: base[name]}, [{name: model[name]} for model in models])
        assert torch.equal(part[name], whole[name])
    assert list(whole) == list(base)


@pytest.mark.parametrize("method", METHODS)
def test_inputs_stay_as_they_are_and_outputs_are_new(method, seed):
    base, models = family(2, seed)
    base["steps"] = models[0]["steps"] = models[1]["steps"] = torch.tensor(7)
    models[0]["one"] = models[1]["one"] = base["one"].clone()
    before = [{name: x.clone() for name, x in state.items()} for state in (base, *models)]
    for x in merged_by(method, base, models, exclude=["norm.*"]).values():
        x.zero_()
    for state, copy in zip((base, *models), before, strict=True):
        for name, x in state.items():
            assert torch.equal(x, copy[name])


@pytest.mark.parametrize("method", [name for name in METHODS if available_methods()[name].needs_base])
def test_scale_multiplies_what_is_added(method, seed):
    base, models = family(2, seed)
    single = merged_by(method, base, models)
    for scale in (2.0, [2.0, 2.0]):
        double = merged_by(method, base, models, scale=scale)
        for name in SHAPES:  # float32 sums of size 1
            torch.testing.assert_close(double[name] - base[name], 2 * (single[name] - base[name]), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("method", METHODS)
def test_models_of_half_precision_are_merged_in_float32_and_rounded_once(method, seed):
    base, models = family(2, seed, dtype=torch.bfloat16)
    wide = [{name: x.float() for name, x in state.items()} for state in (base, *models)]
    merged = merged_by(method, base, models)
    exact = merged_by(method, wide[0], wide[1:])
    for name in SHAPES:
        assert merged[name].dtype == torch.bfloat16
        assert torch.equal(merged[name], exact[name].bfloat16())
    widened = merged_by(method, base, models, dtype=torch.float32)
    assert all(torch.equal(widened[name], exact[name]) for name in SHAPES)


def test_float64_stays_float64(seed):
    base, models = family(2, seed, dtype=torch.float64)
    merged = merged_by("task_arithmetic", base, models, scale=0.1)
    expected = base["one"] + 0.1 * (models[0]["one"] - base["one"]) + 0.1 * (models[1]["one"] - base["one"])
    torch.testing.assert_close(merged["one"], expected, rtol=1e-14, atol=1e-14)


# CABS, its ablations and what they become.


def test_cabs_is_the_base_plus_the_delta_of_each_tensor(seed):
    base, models = family(3, seed)
    merged = merge_state_dicts(base, models, n=4, m=16, scale=[0.5, 1.0, 1.5], weight=2.0)
    for name in SHAPES:
        taus = [model[name] - base[name] for model in models]
        expected = base[name] + cabs_delta(taus, n=4, m=16, scale=[1.0, 2.0, 3.0])
        torch.testing.assert_close(merged[name], expected, rtol=1e-6, atol=1e-6)  # one float32 rounding


def test_cabs_of_one_model_is_bs_only_and_ca_only_is_magnitude(seed):
    base, models = family(2, seed)
    settings = {"n": 3, "m": 32}
    pairs = [
        (merged_by("cabs", base, models[:1], **settings), merged_by("bs_only", base, models[:1], **settings)),
        (
            merged_by("cabs", base, models, scale=[1.0, 0.0], **settings),
            merged_by("bs_only", base, models, scale=[1.0, 0.0], **settings),
        ),
    ]
    # On tensors of several entries: of a single one, magnitude pruning keeps it.
    big = {name: x for name, x in base.items() if x.numel() > 1}
    one = [{name: models[0][name] for name in big}]
    pairs.append((merged_by("ca_only", big, one, density=0.2), merged_by("magnitude", big, one, density=0.2)))
    for left, right in pairs:
        assert all(torch.equal(left[name], right[name]) for name in left)


def test_methods_that_keep_everything_are_task_arithmetic(seed):
    base, models = family(3, seed)
    expected = merged_by("task_arithmetic", base, models, scale=0.4)
    everything = {
        "cabs": {"n": 8, "m": 8},
        "bs_only": {"density": 1.0},
        "magnitude": {},
        "dare_linear": {},
        "breadcrumbs": {},
    }
    for method, settings in everything.items():
        merged = merged_by(method, base, models, scale=0.4, **settings)
        for name in SHAPES:
            torch.testing.assert_close(merged[name], expected[name], rtol=1e-6, atol=1e-6)
    assert merged_by("ca_only", base, models, density=1.0, overlap="first")["one"] == models[0]["one"]


def test_a_density_stands_for_n_of_every_m(seed):
    base, models = family(2, seed)
    for settings in ({"density": 0.25}, {"n": 64}, {"density": 0.25, "m": 256, "n": 1}):
        merged = merged_by("cabs", base, models, **settings)
        assert all(torch.equal(merged[name], merged_by("cabs", base, models)[name]) for name in SHAPES)
    each = merged_by("cabs", base, models, density=[0.5, 0.125], m=16)
    expected = merged_by("cabs", base, models, n=[8, 2], m=16)
    assert all(torch.equal(each[name], expected[name]) for name in SHAPES)


def test_order_by_norm_is_that_of_the_whole_vectors(seed):
    base = state_dict(seed)
    models = [state_dict(seed + k, near=base, std=std) for k, std in enumerate((0.1, 0.3, 0.2), start=1)]
    merged = merged_by("cabs", base, models, order="norm")
    expected = merged_by("cabs", base, models, order=[1, 2, 0])
    assert all(torch.equal(merged[name], expected[name]) for name in SHAPES)
    method = available_methods()["cabs"]
    settings = method.settings(1, order="norm")
    with pytest.raises(ParameterError, match=r"^order='norm' needs the whole vectors"):
        method.merge(base["one"], [base["one"]], **settings)


def test_pruned_vectors_are_what_the_merge_adds_up(seed):
    base, models = family(2, seed)
    start, others = base["layer.weight"], [model["layer.weight"] for model in models]
    for name in ("cabs", "bs_only", "ca_only", "magnitude", "dare_linear", "breadcrumbs", "task_arithmetic"):
        method = available_methods()[name]
        settings = method.settings(2, **({"density": 0.3} if "density" in method.model_defaults else {}))
        pruned = method.prune(start, others, generator=tensor_generator(0, "w"), **settings)
        merged = method.merge(start, others, generator=tensor_generator(0, "w"), **settings)
        torch.testing.assert_close(start + sum(pruned), merged, rtol=1e-6, atol=1e-6)


def test_overlap_beyond_a_block_is_told(caplog):
    base, models = family(3)
    with caplog.at_level(logging.INFO, logger="heedful"):
        merged_by("cabs", base, models, n=100, m=200)
        merged_by("cabs", base, models, n=50, m=200)
    assert caplog.messages == ["cabs: n sums to 300, and 100 of every m=200 entries overlap."]


# What is random.


def test_every_tensor_has_a_stream_of_its_own():
    draws = {
        (seed, name): float(torch.rand((), generator=tensor_generator(seed, name)))
        for seed in (0, 1)
        for name in ("a", "b")
    }
    assert len(set(draws.values())) == 4
    assert float(torch.rand((), generator=tensor_generator(1, "b"))) == draws[1, "b"]


def test_dare_keeps_the_sum_on_average():
    """Rescaled to the norm that the vector had, the mean over many draws is the vector; equal entries make that exact."""
    method = available_methods()["dare_linear"]
    settings = method.settings(1, density=0.1)
    kept = method.merge(torch.zeros(10_000), [torch.ones(10_000)], generator=tensor_generator(0, "w"), **settings)
    assert float(kept.sum()) == pytest.approx(10_000, rel=1e-5)
    assert 0.09 < float((kept != 0).float().mean()) < 0.11  # ten thousand draws: three standard errors
    again = method.merge(torch.zeros(10_000), [torch.ones(10_000)], generator=tensor_generator(0, "w"), **settings)
    assert torch.equal(kept, again)


def test_random_state_decides_and_the_global_generator_is_left_alone(seed):
    base, models = family(2)
    before = torch.random.get_rng_state()
    one, same, other = (
        merge_state_dicts(base, models, method="dare_linear", density=0.5, random_state=state)["embed.weight"]
        for state in (seed, seed, seed + 1)
    )
    assert torch.equal(one, same)
    assert not torch.equal(one, other)
    assert torch.equal(before, torch.random.get_rng_state())


# The dictionary.


def test_excluded_and_integer_tensors_are_the_bases(seed):
    base, models = family(2, seed)
    base |= {"head.weight": torch.ones(3, 16), "steps": torch.tensor(7), "mask": torch.ones(2, 2, dtype=torch.bool)}
    for k, model in enumerate(models):
        model |= {"head.weight": torch.ones(5 + k, 16), "steps": torch.tensor(8 + k), "mask": base["mask"]}
    models[1]["extra_head.bias"] = torch.ones(4)
    merged = merged_by("cabs", base, models, exclude=["head.*", "re:extra"], dtype=torch.bfloat16)
    assert list(merged) == list(base)
    assert torch.equal(merged["head.weight"], base["head.weight"].bfloat16())
    assert torch.equal(merged["steps"], torch.tensor(7))
    assert merged["mask"].dtype == torch.bool


def test_tied_tensors_are_merged_once_and_stay_tied(seed):
    base, models = family(2, seed)
    for state in (base, *models):
        state["lm_head.weight"] = state["embed.weight"]
    merged = merged_by("dare_linear", base, models, density=0.5)
    assert merged["lm_head.weight"].data_ptr() == merged["embed.weight"].data_ptr()
    models[1]["lm_head.weight"] = models[1]["embed.weight"].clone()  # a copy loses the tie, and nothing else
    again = merged_by("dare_linear", base, models, density=0.5)
    assert torch.equal(again["lm_head.weight"], merged["lm_head.weight"])
    models[1]["lm_head.weight"] += 1
    message = (
        r"^lm_head\.weight shares the values of embed\.weight in the base, and has its own in models\[1\]\. Untie it"
    )
    with pytest.raises(InputError, match=message):
        merged_by("dare_linear", base, models)
    assert "lm_head.weight" in merged_by("dare_linear", base, models, exclude=["lm_head.*"])


def test_models_may_have_names_and_averaging_needs_no_base(seed):
    base, models = family(2, seed)
    named = dict(zip(("math", "code"), models, strict=True))
    for states in (models, named):
        merged = merge_state_dicts(None, states, method="linear")
        for name in SHAPES:
            torch.testing.assert_close(merged[name], (models[0][name] + models[1][name]) / 2, rtol=1e-6, atol=1e-7)
    with pytest.raises(
        ParameterError, match=r"^base is None, and cabs merges what models add to it\. Give its state dict\.$"
    ):
        merge_state_dicts(None, models)
    models[1]["one"] = torch.tensor([math.nan])
    with pytest.raises(InputError, match=r"^one of code has 1 entries that are NaN or infinite\."):
        merge_state_dicts(base, named | {"code": models[1]})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("method", METHODS)
def test_a_merge_is_made_where_the_base_is(method, seed):
    base, models = family(2, seed)
    base["steps"] = models[0]["steps"] = models[1]["steps"] = torch.tensor(7)
    there, *others = ({name: x.cuda() for name, x in state.items()} for state in (base, *models))
    merged, expected = merged_by(method, there, others), merged_by(method, base, models)
    for name, x in merged.items():
        assert x.is_cuda
        torch.testing.assert_close(x.cpu(), expected[name], rtol=1e-6, atol=1e-6)  # float32 sums in another order


def test_merging_tensor_by_tensor_is_merging_all_at_once(seed):
    base, models = family(2, seed)
    sources = {f"models[{k}]": open_checkpoint(model) for k, model in enumerate(models)}
    method = available_methods()["cabs"]
    settings = method.settings(2)
    whole = merged_by("cabs", base, models)
    for name in reversed(SHAPES):
        assert torch.equal(merge_tensor(method, name, open_checkpoint(base), sources, settings), whole[name])


def test_a_method_of_ones_own_is_merged_with_like_the_others(seed):
    base, models = family(3, seed)

    def median(base, tensors, *, generator, weight):
        return torch.stack(list(tensors)).median(dim=0).values

    method = MergeMethod("median", "Median", False, {}, {"weight": 1.0}, merge=median)
    merged = merge_state_dicts(base, models, method=method, exclude=["embed.*"])
    assert torch.equal(merged["one"], torch.stack([model["one"] for model in models]).median(dim=0).values)
    assert torch.equal(merged["embed.weight"], base["embed.weight"])


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("m", [1, 7, 48])
def test_cutting_tensors_into_pieces_changes_nothing(method, m, seed, monkeypatch):
    base, models = family(2, seed)
    models[1]["layer.weight"] = models[0]["layer.weight"] = base["layer.weight"].clone()
    models[1]["layer.weight"][-1, -1] += 1.0  # some pieces are the base's
    settings = {"m": m, "n": 1 + m // 3} if "m" in available_methods()[method].defaults else {}
    whole = merged_by(method, base, models, **settings)
    monkeypatch.setattr("heedful.merge._methods._PIECE", 20)
    cut = merged_by(method, base, models, **settings)
    assert all(torch.equal(cut[name], whole[name]) for name in SHAPES)


@pytest.mark.parametrize("method", METHODS)
def test_single_numbers_and_empty_tensors_are_merged_too(method):
    base = {"scalar": torch.tensor(1.0), "empty": torch.zeros(0, 3)}
    merged = merged_by(method, base, [{"scalar": torch.tensor(2.0), "empty": torch.zeros(0, 3)}])
    assert merged["scalar"] in (1.0, 2.0)  # kept or pruned
    assert merged["empty"].shape == (0, 3)


# Bad settings.


@pytest.mark.parametrize(
    ("method", "settings", "message"),
    [
        ("cab", {}, r"^method must be one of 'linear', .*'ca_only'; got 'cab'\.$"),
        ("ties", {"densty": 0.5}, r"^ties has no setting densty\. Did you mean density\?$"),
        ("linear", {"zzz": 1}, r"^linear has no setting zzz\. It has normalize, weight\.$"),
        ("ties", {"density": 0.0}, r"^density must be a number > 0 and <= 1; got 0\.0\.$"),
        ("ties", {"density": [0.5, 1.5]}, r"^density must be a number > 0 and <= 1; got 1\.5\.$"),
        ("ties", {"density": None}, r"^density must be a number > 0 and <= 1; got None\.$"),
        ("ties", {"weight": [1.0]}, r"^weight must be one value, or one for each of the 2 models; got 1 values\.$"),
        ("ties", {"weight": math.nan}, r"^weight must be a number >= -3\.40282e\+38 and <= 3\.40282e\+38; got nan\.$"),
        ("ties", {"normalize": 3}, r"^normalize must be one of True, False; got 3\.$"),
        ("breadcrumbs", {"drop_largest": -0.1}, r"^drop_largest must be a number >= 0 and <= 1; got -0\.1\.$"),
        ("cabs", {"n": 65, "m": 64}, r"^n must be at most m: n entries of every m are kept; got n=65, m=64\.$"),
        ("cabs", {"n": -1}, r"^n must be an int >= 0; got -1\.$"),
        ("cabs", {"m": 0}, r"^m must be an int >= 1; got 0\.$"),
        ("cabs", {"density": 1e-3}, r"^density=0\.001 keeps nothing of blocks of m=256\. Raise the density or m\.$"),
        ("cabs", {"order": [0, 2]}, r"^order must name each of 0 to 1 once; got \[0, 2\]\.$"),
        ("cabs", {"order": 1}, r"^order must name each of 0 to 1 once; got 1\.$"),
        ("cabs", {"order": "size"}, r"^order must be one of 'given', 'norm'; got 'size'\.$"),
        ("cabs", {"overlap": "last"}, r"^overlap must be one of 'sum', 'ties', 'first'; got 'last'\.$"),
        ("cabs", {"dtype": torch.int8}, r"^dtype must be a type of floating-point numbers, .*; got torch\.int8\.$"),
        ("cabs", {"tail": "error"}, r"^tail must be one of 'proportional', 'drop', 'keep'; got 'error'\.$"),
    ],
)
def test_settings_out_of_range_are_refused(method, settings, message):
    base, models = family(2)
    with pytest.raises(ParameterError, match=message):
        merge_state_dicts(base, models, method=method, **settings)


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"method": None}, r"^method must be one of 'linear', .*; got None\.$"),
        ({"dtype": "bfloat16"}, r"^dtype must be .*, such as torch\.bfloat16; got 'bfloat16'\.$"),
    ],
)
def test_what_is_no_method_and_no_type_is_refused(params, message):
    base, models = family(2)
    with as_users_have_it(), pytest.raises(ParameterError, match=message):
        merge_state_dicts(base, models, **params)


@given(
    name=st.sampled_from(METHODS),
    k=st.integers(1, 3),
    size=st.integers(0, 9),
    density=st.floats(0.05, 1),
    scale=st.floats(-2, 2),
)
def test_merges_of_any_size_are_finite_and_of_the_right_shape(name, k, size, density, scale):
    method = available_methods()[name]
    wanted = {"density": density, "scale": scale, "m": 8 if density > 0.1 else 32, "n": 1}
    settings = method.settings(k, **{key: value for key, value in wanted.items() if key in method.settings(k)})
    tensors = [torch.full((size,), float(i)) for i in range(k)]
    merged = method.merge(torch.zeros(size), tensors, generator=tensor_generator(0, "x"), **settings)
    assert merged.shape == (size,)
    assert merged.isfinite().all()
