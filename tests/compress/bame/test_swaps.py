"""The core of BAME against hand counts, a naive twin, a quadratic whose losses are known, and the symmetries of masks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful._masks import nm_mask
from heedful.compress import swap_scores
from heedful.compress.bame.swaps import Oscillation, SwapScores, best_share, swapped_indices
from heedful.errors import InputError, ParameterError
from tests.conformance.typechecks import as_users_have_it

WEIGHT = torch.tensor([[0.8, 0, -0.1, 0], [0, 0.5, 0.4, 0], [-0.3, 0, 0, 0.2]])
GRAD = torch.tensor([[0.2, 1.5, -0.5, 0.3], [2, 0.01, -0.02, -0.1], [0.1, -0.05, 0.04, 0.3]])


def sparse(shape, n, m, seed, *, dim=1, dtype=torch.float64):
    """A masked weight, its gradient and its mask; no ties."""
    generator = torch.Generator().manual_seed(seed)
    weight, grad, order = (torch.randn(shape, generator=generator, dtype=dtype) for _ in range(3))
    mask = nm_mask(order, n, m, dim=dim)
    return weight * mask, grad, mask


def naive_scores(weight, grad, mask, m, *, lr, gain, dim, rank=0):
    """One block after the other."""
    lines = [x.movedim(dim, -1).reshape(-1, m) for x in (weight, grad, mask)]
    rows = []
    for w, g, active in zip(*lines, strict=True):
        costs = sorted((abs(float(g[i] * w[i])), i) for i in range(m) if active[i])
        gains = sorted((-abs(float(g[j])), j) for j in range(m) if not active[j])
        (cost, prune), (slope, grow) = costs[rank], gains[rank]
        rows.append((prune, grow, cost - lr * (slope**2 if gain == "sgd" else -slope)))
    prune, grow, delta = zip(*rows, strict=True)
    return SwapScores(torch.tensor(prune), torch.tensor(grow), torch.tensor(delta, dtype=weight.dtype))


def assert_equal(left, right):
    assert torch.equal(left.prune, right.prune)
    assert torch.equal(left.grow, right.grow)
    torch.testing.assert_close(left.delta, right.delta)


# Scores.


def test_scores_equal_the_hand_case():
    scores = swap_scores(WEIGHT, GRAD, WEIGHT != 0, 2, 4, lr=0.1)
    assert scores.prune.tolist() == [2, 1, 0]
    assert scores.grow.tolist() == [1, 0, 1]
    # |−.5 · −.1| − .1 · 1.5², |.01 · .5| − .1 · 2², |.1 · −.3| − .1 · .05²
    torch.testing.assert_close(scores.delta, torch.tensor([-0.175, -0.395, 0.02975]))
    adam = swap_scores(WEIGHT, GRAD, WEIGHT != 0, 2, 4, lr=0.1, gain="adam")
    torch.testing.assert_close(adam.delta, torch.tensor([0.05 - 0.15, 0.005 - 0.2, 0.03 - 0.005]))


@pytest.mark.parametrize("shape", [(6, 8), (3, 16, 3, 2), (4, 2, 8)])
@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 8), (5, 8)])
@pytest.mark.parametrize("gain", ["sgd", "adam"])
def test_scores_equal_those_of_a_loop_over_blocks(shape, n, m, gain, seed):
    dim = 2 if len(shape) == 3 else 1
    weight, grad, mask = sparse(shape, n, m, seed, dim=dim)
    for rank in range(min(n, m - n)):
        ours = swap_scores(weight, grad, mask, n, m, lr=0.3, gain=gain, dim=dim, rank=rank)
        assert_equal(ours, naive_scores(weight, grad, mask, m, lr=0.3, gain=gain, dim=dim, rank=rank))


def test_scores_do_not_depend_on_how_many_blocks_are_looked_at_together(seed):
    weight, grad, mask = sparse((300, 512), 2, 4, seed, dtype=torch.float32)  # more than one chunk
    whole = swap_scores(weight, grad, mask, 2, 4, lr=0.1)
    rows = [swap_scores(w[None], g[None], k[None], 2, 4, lr=0.1) for w, g, k in zip(weight, grad, mask, strict=True)]
    for left, right in zip(whole, zip(*rows, strict=True), strict=True):
        assert torch.equal(left, torch.cat(right))


def test_of_equal_candidates_the_first_is_taken():
    weight = torch.tensor([[0.0, 1.0, 1.0, 0.0, 0.0, -1.0, 1.0, 0.0]])
    scores = swap_scores(weight, torch.ones(1, 8), weight != 0, 4, 8, lr=0.1)
    assert (int(scores.prune), int(scores.grow)) == (1, 0)
    second = swap_scores(weight, torch.ones(1, 8), weight != 0, 4, 8, lr=0.1, rank=1)
    assert (int(second.prune), int(second.grow)) == (2, 3)


def test_with_nothing_to_grow_no_swap_is_worth_it():
    scores = swap_scores(torch.randn(2, 4), torch.randn(2, 4), torch.ones(2, 4, dtype=torch.bool), 4, 4, lr=0.1)
    assert (scores.delta == math.inf).all()


def test_without_gradient_on_inactive_entries_no_swap_is_worth_it(seed):
    weight, grad, mask = sparse((8, 16), 2, 8, seed)
    for gain in ("sgd", "adam"):
        assert (swap_scores(weight, grad * mask, mask, 2, 8, lr=0.5, gain=gain).delta >= 0).all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_scored_in_single(dtype, seed):
    weight, grad, mask = (x.to(dtype) if x.is_floating_point() else x for x in sparse((8, 16), 2, 4, seed))
    scores = swap_scores(weight, grad, mask, 2, 4, lr=1e-4)
    assert scores.delta.dtype == torch.float32
    assert_equal(scores, swap_scores(weight.float(), grad.float(), mask, 2, 4, lr=1e-4))


def test_scores_of_nothing():
    empty = torch.zeros(0, 8)
    assert swap_scores(empty, empty, empty != 0, 2, 4, lr=0.1).delta.shape == (0,)


@given(scale=st.floats(1e-3, 1e3))
def test_a_loss_in_other_units_changes_the_scores_alike_at_a_learning_rate_in_its_units(scale):
    weight, grad, mask = sparse((4, 8), 2, 4, 0)
    base = swap_scores(weight, grad, mask, 2, 4, lr=0.1)
    scaled = swap_scores(weight, grad * scale, mask, 2, 4, lr=0.1 / scale)
    assert torch.equal(base.prune, scaled.prune)
    assert torch.equal(base.grow, scaled.grow)
    torch.testing.assert_close(scaled.delta, base.delta * scale, rtol=1e-9, atol=1e-9 * scale)


def test_permuting_rows_blocks_or_the_inputs_of_a_block_permutes_the_swaps(seed):
    weight, grad, mask = sparse((6, 16), 2, 4, seed)
    generator = torch.Generator().manual_seed(seed)
    rows, blocks = torch.randperm(6, generator=generator), torch.randperm(4, generator=generator)
    base = [x.view(6, 4) for x in swap_scores(weight, grad, mask, 2, 4, lr=0.2)]

    def scores(permute):
        return [x.view(6, 4) for x in swap_scores(permute(weight), permute(grad), permute(mask), 2, 4, lr=0.2)]

    for left, right in zip(scores(lambda x: x[rows]), base, strict=True):
        assert torch.equal(left, right[rows])
    for left, right in zip(scores(lambda x: x.view(6, 4, 4)[:, blocks].reshape(6, 16)), base, strict=True):
        assert torch.equal(left, right[:, blocks])
    inside = torch.stack([torch.randperm(4, generator=generator) for _ in range(4)])
    columns = (inside + 4 * torch.arange(4)[:, None]).flatten()
    prune, grow, delta = scores(lambda x: x[:, columns])
    assert torch.equal(delta, base[2])
    for left, right in ((prune, base[0]), (grow, base[1])):  # position k now holds what was at inside[k]
        assert torch.equal(inside.expand(6, 4, 4).gather(2, left[..., None]).squeeze(2), right)


def test_on_a_separable_quadratic_predictions_are_off_by_the_known_second_order(seed):
    """L = Σ ½ h (w − t)²: G = h (w − t), and both halves of ΔL are the first order of exact changes."""
    weight, target, mask = sparse((3, 8), 2, 4, seed)
    curvature, lr = torch.rand_like(weight) + 0.5, 0.05

    def loss(row, w):
        return (0.5 * curvature[row] * (w - target[row]) ** 2).sum()

    grad = curvature * (weight - target)
    scores = swap_scores(weight, grad, mask, 2, 4, lr=lr)
    pruned, grown = swapped_indices(weight.shape, scores, torch.arange(6), 4)
    for (row, i), (_, j) in zip(zip(*pruned, strict=True), zip(*grown, strict=True), strict=True):
        g, h = grad[row, j], curvature[row, j]
        step = weight[row].clone()
        step[j] -= lr * g
        gained = loss(row, step) - loss(row, weight[row])
        torch.testing.assert_close(gained, -lr * g**2 * (1 - 0.5 * lr * h))
        cut = weight[row].clone()
        cut[i] = 0
        lost = loss(row, cut) - loss(row, weight[row])
        torch.testing.assert_close(lost, -grad[row, i] * weight[row, i] + 0.5 * curvature[row, i] * weight[row, i] ** 2)
    i, j = pruned, grown
    torch.testing.assert_close(scores.delta, (grad[i] * weight[i]).abs() - lr * grad[j] ** 2)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"n": 0}, ParameterError, r"^n must be an int >= 1; got 0\.$"),
        ({"n": 5}, ParameterError, r"^n must be at most m: n entries of every m are kept; got n=5, m=4\.$"),
        ({"lr": -0.1}, ParameterError, r"^lr must be a number >= 0; got -0\.1\.$"),
        ({"rank": 2}, ParameterError, r"^rank must be an int >= 0 and <= 1; got 2\.$"),
        ({"dim": 2}, ParameterError, r"^dim must be an int >= -2 and <= 1; got 2\.$"),
        ({"gain": "lion"}, ParameterError, r"^gain must be one of 'sgd', 'adam'; got 'lion'\.$"),
        ({"n": 1}, InputError, r"^mask must have n=1 of every m=4 entries True; block 0 has 2\.$"),
        (
            {"mask": torch.tensor([[1, 1, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]], dtype=torch.bool)},
            InputError,
            r"^mask must have n=2 of every m=4 entries True; block 1 has 4\.$",
        ),
        ({"m": 3, "n": 1}, InputError, r"^4 entries along dimension 1 cannot be cut into blocks of m=3\.$"),
        (
            {"grad": GRAD[:2]},
            InputError,
            r"^weight, grad and mask must have one shape; got \(3, 4\), \(2, 4\) and \(3, ",
        ),
    ],
)
def test_bad_input_is_refused(change, error, message):
    given = {"weight": WEIGHT, "grad": GRAD, "mask": WEIGHT != 0, "n": 2, "m": 4, "lr": 0.1, **change}
    with as_users_have_it(), pytest.raises(error, match=message):
        swap_scores(given.pop("weight"), given.pop("grad"), given.pop("mask"), given.pop("n"), given.pop("m"), **given)


# Where swaps lie.


@pytest.mark.parametrize(("shape", "dim"), [((6, 8), 1), ((6, 8), -1), ((8, 6), 0), ((3, 8, 3, 2), 1), ((2, 3, 8), 2)])
def test_indices_point_at_what_the_scores_speak_of(shape, dim, seed):
    weight, grad, mask = sparse(shape, 2, 4, seed, dim=dim)
    scores = swap_scores(weight, grad, mask, 2, 4, lr=0.1, dim=dim)
    blocks = torch.tensor([0, 3, len(scores.delta) - 1])
    pruned, grown = swapped_indices(weight.shape, scores, blocks, 4, dim=dim)
    assert mask[pruned].all()
    assert not mask[grown].any()
    expected = (grad[pruned] * weight[pruned]).abs() - 0.1 * grad[grown] ** 2
    torch.testing.assert_close(expected, scores.delta[blocks])


def test_blocks_of_a_convolution_run_along_input_channels_at_each_place_of_the_kernel(seed):
    weight, grad, mask = sparse((4, 8, 3, 2), 2, 4, seed)
    assert torch.equal(mask, nm_mask(torch.where(mask, 1.0, 0.0), 2, 4, dim=1))

    def flat(x):  # (out · kh · kw, in)
        return x.permute(0, 2, 3, 1).reshape(-1, 8)

    assert torch.equal(flat(nm_mask(weight, 2, 4, dim=1)), nm_mask(flat(weight), 2, 4, dim=1))
    assert_equal(
        swap_scores(weight, grad, mask, 2, 4, lr=0.1), swap_scores(flat(weight), flat(grad), flat(mask), 2, 4, lr=0.1)
    )


# Oscillation.


def swap(state, mask, block, prune, grow):
    """Swap by hand in one block of a (2, 4) mask."""
    position = torch.zeros(2, dtype=torch.int64)
    scores = SwapScores(position.clone(), position.clone(), torch.zeros(2))
    scores.prune[block], scores.grow[block] = prune, grow
    blocks = torch.tensor([block])
    pruned, grown = swapped_indices(mask.shape, scores, blocks, 4)
    assert mask[pruned]
    assert not mask[grown]
    mask[pruned], mask[grown] = False, True
    return int(state.record_(pruned, grown, blocks))


def test_events_are_regrowths_of_what_was_pruned_last_and_the_second_freezes_its_block_alone():
    mask = torch.tensor([[1, 1, 0, 0], [1, 1, 0, 0]], dtype=torch.bool)
    state = Oscillation.none(mask, 4)
    counts = []
    for adaptation, (prune, grow) in enumerate([(0, 2), (2, 0), (0, 2)], start=1):
        counts.append(swap(state, mask, 0, prune, grow))
        swap(state, mask, 1, *[(0, 2), (1, 3), (2, 0)][adaptation - 1])
        state.freeze_(adaptation, 0.1)
        assert state.frozen.tolist() == [adaptation == 3, False]
    assert counts == [0, 1, 1]
    assert state.events.tolist() == [2, 1]  # block 1 regrew weight 0 once; weight 3 was never pruned
    assert state.last_change.tolist() == [[-1, 0, 1, 0], [1, -1, -1, 1]]


def test_a_block_freezes_only_if_it_oscillates_often_enough_and_then_stays_frozen():
    state = Oscillation.none(torch.zeros(1, 8, dtype=torch.bool), 4)
    state.events[:] = torch.tensor([2, 1], dtype=torch.int16)
    state.freeze_(20, 0.1)  # 2 of 20 is not more than a tenth
    assert not state.frozen.any()
    state.freeze_(1, math.inf)
    assert not state.frozen.any()
    state.freeze_(19, 0.1)
    assert state.frozen.tolist() == [True, False]  # one event never freezes
    state.freeze_(1000, 0.1)
    assert state.frozen.tolist() == [True, False]


def test_a_share_takes_the_blocks_that_gain_most():
    delta = torch.tensor([-1.0, -3.0, 2.0, -2.0, -4.0])
    candidates = torch.tensor([True, True, False, True, False])
    assert best_share(delta, candidates, 1.0).tolist() == candidates.tolist()
    assert best_share(delta, candidates, 0.4).tolist() == [False, True, False, True, False]
    assert best_share(delta, candidates, 0.01).tolist() == [False, True, False, False, False]
    assert not best_share(delta, candidates, 0.0).any()
    assert best_share(torch.zeros(4), torch.ones(4, dtype=torch.bool), 0.5).tolist() == [True, True, False, False]
