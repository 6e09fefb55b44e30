"""Masks against brute force, a full sort and their own counts."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from heedful._masks import _select, _select_by_sorting, check_nm, nm_mask, top_mask
from heedful.errors import InputError, ParameterError

floats = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
# Few distinct sizes, so that ties stand everywhere, and both zeros.
tied = st.lists(st.sampled_from([-2.0, -1.0, -0.0, 0.0, 1.0, 2.0, 1e-40, torch.inf]), max_size=70)


def randn(*shape, seed, dtype=torch.float32):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def by_sorting(values, n, m, *, available=None, fill=False, tail="proportional"):
    """The definition, block by block in Python: available ones first, then larger ones, then those that come first."""
    flat = values.flatten().abs().tolist()
    free = [True] * len(flat) if available is None else available.flatten().tolist()
    kept = []
    for start in range(0, len(flat), m):
        block = range(start, min(start + m, len(flat)))
        share = {"proportional": int(n * len(block) / m + 0.5), "drop": 0, "keep": len(block)}[tail]
        count = n if len(block) == m else share
        ranked = sorted(block, key=lambda i: (not free[i], -flat[i], i))[:count]
        kept += [i for i in ranked if free[i] or fill]
    return torch.tensor([i in set(kept) for i in range(len(flat))], dtype=torch.bool).view(values.shape)


@given(
    values=tied,
    free=st.lists(st.booleans(), min_size=70, max_size=70),
    pattern=st.sampled_from([(0, 1), (1, 1), (1, 4), (2, 4), (3, 8), (7, 8), (5, 64), (64, 64)]),
    fill=st.booleans(),
    tail=st.sampled_from(["proportional", "drop", "keep"]),
    dtype=st.sampled_from(floats),
)
def test_mask_is_the_definition_written_out_block_by_block(values, free, pattern, fill, tail, dtype):
    x = torch.tensor(values, dtype=dtype)
    available = torch.tensor(free[: len(values)], dtype=torch.bool)
    assert torch.equal(nm_mask(x, *pattern, tail=tail), by_sorting(x, *pattern, tail=tail))
    ours = nm_mask(x, *pattern, available=available, fill=fill, tail=tail)
    assert torch.equal(ours, by_sorting(x, *pattern, available=available, fill=fill, tail=tail))


@pytest.mark.parametrize("m", range(1, 9))
def test_mask_has_the_largest_sum_of_all_subsets(m, seed):
    values = randn(5 * m, seed=seed)
    for n in range(m + 1):
        for block, mask in zip(values.view(-1, m).abs(), nm_mask(values, n, m).view(-1, m), strict=True):
            best = max(sum(block[i] for i in subset) for subset in itertools.combinations(range(m), n))
            assert mask.sum() == n
            # The same n float32 numbers added in another order.
            assert float(block[mask].sum()) == pytest.approx(float(best), rel=1e-6)


@pytest.mark.parametrize("dtype", floats)
@pytest.mark.parametrize("m", [4, 256, 1000, 70_000])  # 70,000: one block is more than is looked at at once
def test_many_blocks_agree_with_a_stable_sort(m, dtype, seed):
    values = (randn(3 * 70_000, seed=seed) * 8).round().to(dtype)  # some fifty distinct sizes: ties in every block
    values = values[: len(values) // m * m]
    order = values.view(-1, m).abs().sort(dim=1, descending=True, stable=True).indices
    n = m // 4
    expected = torch.zeros(len(order), m, dtype=torch.bool).scatter_(1, order[:, :n], True)
    assert torch.equal(nm_mask(values, n, m), expected.flatten())


@given(values=st.lists(st.integers(-3, 3), min_size=12, max_size=12), n=st.integers(1, 6))
def test_other_devices_select_what_the_cpu_does(values, n):
    keys = torch.tensor(values, dtype=torch.int32).view(2, 6)
    assert torch.equal(torch.from_numpy(_select(keys.numpy(), n)), _select_by_sorting(keys, n))


@given(values=tied, scale=st.sampled_from([2.0, 0.25, -1.0]), n=st.integers(0, 4))
def test_mask_does_not_depend_on_scale_and_sign(values, scale, n):
    x = torch.tensor(values, dtype=torch.float64)
    assert torch.equal(nm_mask(x, n, 4, tail="proportional"), nm_mask(x * scale, n, 4, tail="proportional"))


def test_zeros_are_kept_only_for_want_of_others():
    x = torch.tensor([0.0, -3.0, 0.0, 1e-45])
    assert nm_mask(x, 2, 4).tolist() == [False, True, False, True]
    assert nm_mask(x, 3, 4).tolist() == [True, True, False, True]


def test_fill_takes_all_that_is_available_first():
    x = torch.tensor([9.0, 8.0, 1.0, 2.0])
    available = torch.tensor([False, False, True, False])
    assert nm_mask(x, 2, 4, available=available).tolist() == [False, False, True, False]
    assert nm_mask(x, 2, 4, available=available, fill=True).tolist() == [True, False, True, False]


@pytest.mark.parametrize(("tail", "kept"), [("proportional", [1, 1, 2, 2]), ("drop", [0] * 4), ("keep", [2, 3, 4, 5])])
def test_tail_keeps_what_is_asked(tail, kept):
    for rest, expected in zip((2, 3, 4, 5), kept, strict=True):  # of six: 3/8 of them is 0.75, 1.125, 1.5 and 1.875
        assert nm_mask(torch.ones(16 + rest), 3, 8, tail=tail)[16:].sum() == expected


def test_blocks_run_along_the_dimension_asked(seed):
    conv = randn(6, 8, 3, 3, seed=seed)
    flat = conv.permute(0, 2, 3, 1).reshape(-1, 8)
    expected = nm_mask(flat, 2, 4).view(6, 3, 3, 8).permute(0, 3, 1, 2)
    assert torch.equal(nm_mask(conv, 2, 4, dim=1), expected)
    assert torch.equal(nm_mask(conv, 2, 4, dim=-3), expected)
    lines = nm_mask(conv, 1, 4, dim=0, tail="proportional")  # six channels: a block of four, and half of one
    assert (lines[:4].sum(0) == 1).all()
    assert (lines[4:].sum(0) == 1).all()


@pytest.mark.parametrize("shape", [(), (0,), (3, 0), (0, 3), (1,)])
def test_empty_and_single_entries(shape):
    x = torch.ones(shape)
    assert torch.equal(nm_mask(x, 1, 4, tail="keep"), torch.ones(shape, dtype=torch.bool))
    if shape:
        assert nm_mask(x, 0, 1, dim=len(shape) - 1).shape == shape
    assert torch.equal(top_mask(x, x.numel()), torch.ones(shape, dtype=torch.bool))


def test_inputs_stay_as_they_are_and_layout_does_not_matter(seed):
    x = randn(32, 48, seed=seed).requires_grad_()
    before = x.detach().clone()
    mask = nm_mask(x, 3, 16)
    assert torch.equal(x.detach(), before)
    assert not mask.requires_grad
    assert torch.equal(nm_mask(x.T.contiguous().T, 3, 16), mask)


def test_top_mask_keeps_the_largest_of_the_whole_tensor(seed):
    x = randn(7, 11, seed=seed)
    mask = top_mask(x, 20)
    assert mask.sum() == 20
    assert x[mask].abs().min() > x[~mask].abs().max()
    assert not top_mask(x, 0).any()
    assert top_mask(torch.ones(5), 2).tolist() == [True, True, False, False, False]


def test_check_nm_finds_a_block_with_too_many():
    x = torch.tensor([[1.0, 0, 0, 2, 3, 0, 4, 0, 5]])
    assert check_nm(x, 2, 4)
    assert not check_nm(x, 1, 4)
    assert check_nm(x, 0, 1) is False
    assert not check_nm(torch.tensor([0.0] * 8 + [1, 1]), 1, 4)  # what is left at the end counts too
    assert check_nm(x.T, 2, 4, dim=0)
    assert check_nm(x.T.expand(9, 4), 4, 4)
    assert check_nm(torch.zeros(0), 1, 4)


@pytest.mark.parametrize(
    ("n", "m", "message"),
    [
        (5, 4, r"^n must be at most m: n entries of every m are kept; got n=5, m=4\.$"),
        (-1, 4, r"^n must be an int >= 0; got -1\.$"),
        (0, 0, r"^m must be an int >= 1; got 0\.$"),
    ],
)
def test_patterns_that_are_none_are_refused(n, m, message):
    with pytest.raises(ParameterError, match=message):
        nm_mask(torch.ones(8), n, m)
    with pytest.raises(ParameterError, match=message):
        check_nm(torch.ones(8), n, m)


def test_what_cannot_be_cut_into_blocks_is_refused_unless_a_tail_is_chosen():
    with pytest.raises(
        InputError, match=r"^10 entries cannot be cut into blocks of m=4, 2 are left over\. Choose another m or tail\.$"
    ):
        nm_mask(torch.ones(2, 5), 1, 4)
    with pytest.raises(InputError, match=r"^5 entries along dimension 1 cannot be cut into blocks of m=4, 1 are left"):
        nm_mask(torch.ones(2, 5), 1, 4, dim=1)
    with pytest.raises(ParameterError, match=r"^k must be an int >= 0 and <= 10; got 11\.$"):
        top_mask(torch.ones(2, 5), 11)


def test_available_must_fit():
    with pytest.raises(InputError, match=r"^available must have the shape of values, \(4,\); got \(8,\)\.$"):
        nm_mask(torch.ones(4), 1, 4, available=torch.ones(8, dtype=torch.bool))
    with pytest.raises(InputError, match=r"^values must be floating-point numbers of 16 to 64 bits; got torch.float8"):
        nm_mask(torch.ones(4).to(torch.float8_e4m3fn), 1, 4)


def test_a_pattern_along_another_dimension_is_checked():
    assert check_nm(torch.eye(4), 1, 4, dim=0)
    assert not check_nm(torch.eye(4) + torch.eye(4).roll(1, 0), 1, 4, dim=0)
