"""CABS against its own theory, brute force, the official rule, and the methods that it becomes at the limits."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful._masks import top_mask
from heedful.errors import InputError, ParameterError
from heedful.merge import cabs_delta, cabs_masks, sparsity_report
from heedful.merge.cabs import report_on
from tests.conformance.typechecks import as_users_have_it

entry = st.one_of(st.sampled_from([0.0, 1.0, -1.0, 2.0]), st.floats(-4, 4, width=32, allow_subnormal=False))


@st.composite
def vectors(draw, max_models=4, max_size=40):
    """K vectors of one size, with zeros and ties."""
    size = draw(st.integers(1, max_size))
    lists = draw(st.lists(st.lists(entry, min_size=size, max_size=size), min_size=1, max_size=max_models))
    return [torch.tensor(values) for values in lists]


@st.composite
def patterns(draw, n_models, fits):
    """n for each model and m, the n summing to at most m if ``fits``."""
    m = draw(st.integers(1, 12))
    if not fits:
        return [draw(st.integers(0, m)) for _ in range(n_models)], m
    cuts = sorted(draw(st.integers(0, m)) for _ in range(n_models))
    return [b - a for a, b in itertools.pairwise([0, *cuts])], m


def deltas(k, *shape, seed, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(*shape, generator=generator, dtype=dtype) for _ in range(k)]


def blocks(x, m):
    """The full blocks."""
    return x.flatten()[: x.numel() // m * m].view(-1, m)


# Masks.


@given(data=st.data(), taus=vectors())
def test_masks_are_disjoint_where_the_n_fit_into_a_block(data, taus):
    n, m = data.draw(patterns(len(taus), fits=True))
    tail = data.draw(st.sampled_from(["proportional", "drop", "keep"]))
    masks = cabs_masks(taus, n, m, tail=tail)
    held = torch.stack([mask & (tau != 0) for mask, tau in zip(masks, taus, strict=True)])
    assert (held.sum(0) <= 1).all()


@given(data=st.data(), taus=vectors())
def test_each_full_block_keeps_n_of_whatever_is_free(data, taus):
    n, m = data.draw(patterns(len(taus), fits=True))
    free = torch.ones(len(taus[0]), dtype=torch.bool)
    for count, tau, mask in zip(n, taus, cabs_masks(taus, n, m), strict=True):
        assert torch.equal(blocks(mask, m).sum(1), blocks(free, m).sum(1).clamp(max=count))
        # Non-zeros first: as many as there are.
        assert torch.equal(blocks(mask & (tau != 0), m).sum(1), blocks(free & (tau != 0), m).sum(1).clamp(max=count))
        free &= ~(mask & (tau != 0))


@pytest.mark.parametrize(("tail", "rest"), [("proportional", [6, 4, 1]), ("drop", [0, 0, 0]), ("keep", [11, 0, 0])])
def test_total_kept_is_known_beforehand(tail, rest, seed):
    """Three blocks of 32 and a tail of 11 entries, where ⌊n · 11/32 + 1/2⌋ is 6, 4 and 1, and where the first may take all."""
    taus = deltas(3, 107, seed=seed)
    kept = [int(mask.sum()) for mask in cabs_masks(taus, [16, 12, 4], 32, tail=tail)]
    assert kept == [3 * n + more for n, more in zip([16, 12, 4], rest, strict=True)]


@given(data=st.data(), taus=vectors())
def test_overlap_is_the_least_possible(data, taus):
    """Each vector takes n; the union has all entries that so many can reach."""
    n, m = data.draw(patterns(len(taus), fits=False))
    taus = [torch.where(tau == 0, 1.0, tau) for tau in taus]
    masks = torch.stack(cabs_masks(taus, n, m, tail="drop"))
    if len(taus[0]) >= m:
        union = blocks(masks.any(0), m).sum(1)
        assert (union == min(m, sum(n))).all()
        for mask, count in zip(masks, n, strict=True):
            assert (blocks(mask, m).sum(1) == count).all()


@pytest.mark.parametrize("n", range(9))
def test_two_vectors_overlap_in_2n_minus_m_entries_of_a_block(n, seed):
    one, other = cabs_masks(deltas(2, 40, seed=seed), n, 8)
    assert (blocks(one & other, 8).sum(1) == max(0, 2 * n - 8)).all()
    assert (blocks(one | other, 8).sum(1) == min(8, 2 * n)).all()


def test_overlapping_entries_are_the_largest_of_those_held(seed):
    taus = deltas(2, 64, seed=seed)
    first, second = (blocks(mask, 8) for mask in cabs_masks(taus, 6, 8))
    for tau, held, kept in zip(blocks(taus[1], 8).abs(), first, second, strict=True):
        assert kept[~held].all()
        assert tau[kept & held].min() > tau[~kept & held].max()


def test_masks_of_96_in_128_agree_with_the_official_rule(seed):
    """The 7B script: the first vector keeps 96 of 128, the second the 32 left over and its 64 largest of the others."""
    one, other = taus = deltas(2, 16, 128, seed=seed)
    first, second = cabs_masks(taus, 96, 128)
    top = one.abs().topk(96, dim=1).indices
    expected_first = torch.zeros(16, 128, dtype=torch.bool).scatter_(1, top, True)
    among_held = torch.where(expected_first, other.abs(), -1.0).topk(64, dim=1).indices
    assert torch.equal(first, expected_first)
    assert torch.equal(second, (~expected_first).scatter(1, among_held, True))


@given(data=st.data(), taus=vectors(), factors=st.lists(st.sampled_from([0.25, 2.0, 8.0]), min_size=4, max_size=4))
def test_masks_do_not_depend_on_the_size_of_a_vector(data, taus, factors):
    n, m = data.draw(patterns(len(taus), fits=False))
    scaled = [tau * factor for tau, factor in zip(taus, factors, strict=False)]
    for before, after in zip(cabs_masks(taus, n, m), cabs_masks(scaled, n, m), strict=True):
        assert torch.equal(before, after)


@given(data=st.data(), taus=vectors(max_models=3))
def test_the_first_mask_does_not_depend_on_the_others(data, taus):
    n, m = data.draw(patterns(len(taus), fits=False))
    first = data.draw(st.integers(0, len(taus) - 1))
    order = [first, *(k for k in range(len(taus)) if k != first)]
    assert torch.equal(cabs_masks(taus, n, m, order=order)[first], cabs_masks([taus[first]], n[first], m)[0])


def test_order_is_that_of_the_vectors_permuted(seed):
    taus, n = deltas(3, 96, seed=seed), [4, 8, 12]
    permuted = cabs_masks([taus[2], taus[0], taus[1]], [n[2], n[0], n[1]], 32)
    for k, mask in zip((2, 0, 1), permuted, strict=True):
        assert torch.equal(cabs_masks(taus, n, 32, order=[2, 0, 1])[k], mask)


def test_swapping_two_equal_vectors_swaps_their_masks(seed):
    tau = deltas(1, 64, seed=seed)[0]
    one, other = cabs_masks([tau, tau], 3, 8)
    swapped = cabs_masks([tau, tau], 3, 8, order=[1, 0])
    assert torch.equal(one, swapped[1])
    assert torch.equal(other, swapped[0])
    assert torch.equal(cabs_delta([tau, tau], n=3, m=8), cabs_delta([tau, tau], n=3, m=8, order=[1, 0]))


def test_one_block_is_magnitude_pruning_of_the_tensor(seed):
    one, other = taus = deltas(2, 10, 11, seed=seed)
    first, second = cabs_masks(taus, 30, 110)
    assert torch.equal(first, top_mask(one, 30))
    assert torch.equal(second, top_mask(other.where(~first, 0.0), 30))


def test_a_zero_that_is_kept_holds_nothing():
    empty, full = torch.zeros(8), torch.arange(8.0, 0.0, -1.0)
    for mask in cabs_masks([empty, full], 4, 8):  # the same places
        assert mask.tolist() == [True] * 4 + [False] * 4


# Merged deltas.


@given(data=st.data(), taus=vectors())
def test_keeping_everything_is_task_arithmetic(data, taus):
    m = data.draw(st.integers(1, 12))
    scale = data.draw(st.lists(st.floats(-2, 2), min_size=len(taus), max_size=len(taus)))
    expected = sum(factor * tau for factor, tau in zip(scale, taus, strict=True))
    torch.testing.assert_close(cabs_delta(taus, n=m, m=m, scale=scale), expected, rtol=1e-6, atol=1e-6)  # float32 sums


def test_the_squared_norm_is_the_sum_of_those_of_disjoint_parts(seed):
    taus, scale = deltas(4, 1000, seed=seed, dtype=torch.float64), [0.5, 1.0, 1.5, -2.0]
    masks = cabs_masks(taus, 16, 64)
    parts = [(tau * mask).square().sum() for tau, mask in zip(taus, masks, strict=True)]
    expected = sum(factor**2 * part for factor, part in zip(scale, parts, strict=True))
    merged = cabs_delta(taus, n=16, m=64, scale=scale)
    torch.testing.assert_close(merged.square().sum(), expected, rtol=1e-6, atol=0)


def test_the_result_is_linear_in_the_scales(seed):
    taus = deltas(3, 100, seed=seed, dtype=torch.float64)
    settings = {"n": 12, "m": 32, "overlap": "sum"}
    units = [cabs_delta(taus, scale=unit, **settings) for unit in np.eye(3).tolist()]
    merged = cabs_delta(taus, scale=[0.3, -1.0, 2.0], **settings)
    torch.testing.assert_close(merged, 0.3 * units[0] - units[1] + 2.0 * units[2], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("others", [0, 2])
def test_without_others_it_is_n_of_every_m_of_the_first(others, seed):
    taus = deltas(1 + others, 128, seed=seed)
    alone = taus[0] * cabs_masks(taus[:1], 4, 16)[0]
    assert torch.equal(cabs_delta(taus, n=4, m=16, scale=[1.0] + [0.0] * others), alone)


def test_overlap_may_be_added_elected_or_left_to_the_first():
    one, other = torch.tensor([3.0, 2.0, 1.0, 0.5]), torch.tensor([-4.0, 1.0, 0.5, 0.25])
    for overlap, expected in {
        "sum": [-1.0, 2.0, 1.0, 0.25],
        "ties": [-4.0, 2.0, 1.0, 0.25],
        "first": [3.0, 2.0, 1.0, 0.25],
    }.items():
        assert cabs_delta([one, other], n=[3, 2], m=4, overlap=overlap).tolist() == expected
    # The election weighs: at a scale of 0.5 the first one's sign wins.
    assert cabs_delta([one, other], n=[3, 2], m=4, overlap="ties", scale=[1.0, 0.5]).tolist() == [3.0, 2.0, 1.0, 0.125]


def test_blocks_are_independent_of_each_other(seed):
    """So that a tensor may be cut at any multiple of m."""
    taus = deltas(2, 6, 32, seed=seed)
    merged = cabs_delta(taus, n=5, m=32)
    rows = [cabs_delta([tau[i] for tau in taus], n=5, m=32) for i in range(6)]
    assert torch.equal(merged, torch.stack(rows))
    shuffled = [5, 3, 1, 0, 2, 4]
    assert torch.equal(cabs_delta([tau[shuffled] for tau in taus], n=5, m=32), merged[shuffled])


def test_inputs_stay_as_they_are(seed):
    taus = deltas(2, 64, seed=seed)
    before = [tau.clone() for tau in taus]
    cabs_delta(taus, n=60, m=64, overlap="ties", scale=2.0)
    for tau, copy in zip(taus, before, strict=True):
        assert torch.equal(tau, copy)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": [1, 2, 3], "m": 4}, r"^n must be one value, or one for each of the 2 models; got 3 values\.$"),
        ({"n": 5, "m": 4}, r"^n must be at most m: n entries of every m are kept; got n=5, m=4\.$"),
        ({"n": -1, "m": 4}, r"^n must be an int >= 0; got -1\.$"),
        ({"n": 0, "m": 0}, r"^m must be an int >= 1; got 0\.$"),
        ({"n": 1, "m": 4, "order": [0, 0]}, r"^order must name each of 0 to 1 once; got \[0, 0\]\.$"),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ParameterError, match=message):
        cabs_masks([torch.ones(8), torch.ones(8)], **settings)
    with pytest.raises(ParameterError, match=message):
        cabs_delta([torch.ones(8), torch.ones(8)], **settings)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"scale": "1.0"}, r"^scale must be a number; got '1\.0'\.$"),
        ({"scale": [1.0, np.nan]}, r"^scale must be a number; got nan\.$"),
        ({"n": "3"}, r"^n must be an int >= 0; got '3'\.$"),
        ({"m": "4"}, r"^m must be an int >= 1; got '4'\.$"),
    ],
)
def test_settings_that_are_no_numbers_are_refused(settings, message):
    with as_users_have_it(), pytest.raises(ParameterError, match=message):
        cabs_delta([torch.ones(8), torch.ones(8)], **({"n": 1, "m": 4} | settings))


def test_vectors_of_different_shapes_are_refused():
    with pytest.raises(InputError, match=r"^deltas must be tensors of one shape; got \[\(4,\), \(2, 2\)\]\.$"):
        cabs_masks([torch.ones(4), torch.ones(2, 2)], 1, 2)
    with pytest.raises(InputError, match=r"^deltas must be tensors of one shape; got \[\]\.$"):
        cabs_delta([])


# The report.


def test_report_counts_what_can_be_counted_by_hand():
    base = {"w": torch.zeros(2, 4), "b": torch.zeros(3)}
    one = {"w": torch.tensor([[1.0, 2, 0, 0], [0, 0, 0, 0]]), "b": torch.tensor([1.0, 0, 1])}
    other = {"w": torch.tensor([[-1.0, 2, 3, 0], [0, 0, 0, 1]]), "b": torch.tensor([0.0, 1, 1])}
    report = sparsity_report(base, [one, other], m=4).set_index("tensor")
    assert report.entries.to_dict() == {"w": 8, "b": 3, "total": 11}
    assert report.density.to_dict() == pytest.approx({"w": (2 + 4) / 16, "b": 2 / 3, "total": (4 + 6) / 22})
    assert report.overlap.to_dict() == pytest.approx({"w": 2 / 4, "b": 1 / 3, "total": 3 / 7})
    assert report.sign_conflict.to_dict() == pytest.approx({"w": 1 / 2, "b": 0, "total": 1 / 3})
    # Blocks and rows of w hold 2 and 0 of one, 3 and 1 of the other: means 1 and 2, deviations 1 and 1.
    assert report.block_imbalance["w"] == report.row_imbalance["w"] == pytest.approx((1 + 1 / 2) / 2)
    assert report.block_mass_imbalance["w"] == pytest.approx((1 + 2.5 / 3.5) / 2)  # masses 3 and 0, 6 and 1
    assert report[["block_imbalance", "row_imbalance", "tensor_imbalance"]].loc["b"].isna().all()
    # Densities 1/4 and 2/3, 1/2 and 2/3: half their difference over their mean.
    assert report.tensor_imbalance["total"] == pytest.approx(((5 / 12) / (11 / 12) + (1 / 6) / (7 / 6)) / 2)


def test_cabs_leaves_no_overlap_and_no_imbalance(seed):
    base = {"a": torch.zeros(32, 64), "b": torch.zeros(512)}
    models = [dict(zip(base, deltas(1, 32, 64, seed=seed + k) + deltas(1, 512, seed=k), strict=True)) for k in range(3)]
    masks = [{}, {}, {}]
    for name in base:
        for mask, chosen in zip(masks, cabs_masks([m[name] for m in models], 64, 256), strict=True):
            mask[name] = chosen
    before = sparsity_report(base, models).iloc[-1]
    after = sparsity_report(base, models, masks=masks).iloc[-1]
    assert (before.tensor, before.density, before.overlap) == ("total", 1.0, 1.0)
    assert (after.density, after.overlap) == (0.25, 0.0)
    assert np.isnan(after.sign_conflict)
    assert after.block_imbalance == after.tensor_imbalance == 0.0


def test_report_of_one_model_and_of_empty_tensors_has_nothing_to_compare():
    report = report_on([("none", [torch.zeros(0)]), ("w", [torch.ones(4)])], m=2)
    assert list(report.tensor) == ["w", "total"]
    assert report.overlap.isna().all()
    assert (report.block_imbalance == 0).all()


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"masks": [{}]}, r"^masks must be a mapping for each of the 2 models; got 1\.$"),
        (
            {"masks": [{}, {"v": torch.ones(4).bool()}]},
            r"^masks of models\[1\]: v must be a tensor of the base, and its ",
        ),
        (
            {"masks": [{"w": torch.ones(2).bool()}, {}]},
            r"^masks of models\[0\]: w must be a tensor of the base, and its ",
        ),
        ({"masks": [{"w": torch.ones(4)}, {}]}, r"^masks of models\[0\]: w must .* and its mask bool, of its shape\.$"),
        ({"m": 0}, r"^m must be an int >= 1; got 0\.$"),
    ],
)
def test_reports_on_what_does_not_fit_are_refused(settings, message):
    base = {"w": torch.zeros(4)}
    with pytest.raises((InputError, ParameterError), match=message):
        sparsity_report(base, [{"w": torch.ones(4)}, {"w": torch.ones(4)}], **settings)
