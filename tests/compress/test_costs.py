"""Operations and bytes, by hand."""

import pytest
import torch
from torch import nn

from heedful.compress._costs import DENSE, Passes, layer_flops, mean_share, stored_bytes, training_passes


def test_a_layer_that_is_called_twice_counts_twice_and_groups_count_once():
    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.grouped, self.idle = nn.Linear(6, 6), nn.Conv2d(4, 8, 3, groups=2), nn.Linear(2, 2)

        def forward(self, x):
            y = self.inner(self.inner(x))
            return y, self.grouped(x.new_zeros(1, 4, 5, 5))

    # Of the convolution, 8 · 3 · 3 outputs see 2 channels of 3 · 3 each.
    assert layer_flops(Twice(), torch.zeros(5, 6)) == {"inner": 2 * 5 * 2 * 36, "grouped": 2 * 72 * 18}


def test_tokens_count_each():
    model = nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 3))
    assert layer_flops(model, torch.zeros(2, 7, dtype=torch.int64)) == {"1": 2 * 14 * 12}


def test_hooks_are_removed_when_the_model_fails():
    model = nn.Linear(4, 4)
    with pytest.raises(RuntimeError):
        layer_flops(model, torch.zeros(2, 5))
    assert not model._forward_hooks


def test_passes_add_up_over_layers():
    flops = {"a": 10, "b": 100}
    assert training_passes(flops, {"b": Passes(0.1, 0.2, 0.3)}) == (20, 30, 40)
    assert training_passes(flops, {}) == tuple(110 * share for share in DENSE)


def test_mean_share_of_steps_that_are_dense_or_not():
    assert mean_share(0.25, 1) == 1
    assert mean_share(0.25, 1 / 3) == pytest.approx((1 + 0.25 + 0.25) / 3)


@pytest.mark.parametrize(
    ("layout", "settings", "expected"),
    [
        ("dense", {}, (96 * 4, 0)),
        ("csr", {}, (24 * 4, 4 * (24 + 13))),
        ("diagonal", {}, (24 * 4, 4 * 3)),
        ("nm", {"m": 4}, (24 * 4, 24 * 2 // 8)),
        ("nm", {"m": 16, "itemsize": 2}, (24 * 2, 24 * 4 // 8)),
        ("nm", {"m": 1}, (24 * 4, 0)),
        ("nm", {"m": 5}, (24 * 4, 24 * 3 // 8)),
    ],
)
def test_bytes_of_a_12_by_8_weight_with_24_entries(layout, settings, expected):
    assert stored_bytes((12, 8), 24, layout=layout, **settings) == expected
