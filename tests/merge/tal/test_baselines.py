"""Weights selected from a larger network, against slices written out by hand."""

import pytest
import torch
from torch import nn

from heedful.errors import InputError
from heedful.merge.tal.baselines import weight_selection
from heedful.merge.tal.pools import VisionTransformer


def vit(depth, width, n_classes=10):
    return VisionTransformer(depth=depth, width=width, n_heads=4, patch=4, image_size=16, n_classes=n_classes)


def test_leading_channels_of_the_first_layers_are_plain_slices():
    small, large = vit(2, 16), vit(5, 32)
    assert weight_selection(small, large, channels="leading") is small
    assert torch.equal(small.layers[1].query.weight, large.layers[1].query.weight[:16, :16])
    assert torch.equal(small.layers[1].mlp[2].weight, large.layers[1].mlp[2].weight[:16, :64])
    assert torch.equal(small.positions, large.positions[..., :16])
    assert torch.equal(small.patches.weight, large.patches.weight[:16])


def test_even_layers_and_channels_keep_both_ends():
    small, large = vit(3, 16), vit(5, 32)
    weight_selection(small, large, layers="even", channels="even")
    rows = torch.linspace(0, 31, 16).round().long()
    assert rows[0] == 0
    assert rows[-1] == 31
    for own, other in ((0, 0), (1, 2), (2, 4)):
        assert torch.equal(small.layers[own].out.weight, large.layers[other].out.weight[rows][:, rows])


def test_a_network_of_the_same_size_becomes_the_source():
    small, large = vit(3, 16), vit(3, 16)
    weight_selection(small, large, layers="even")
    for own, other in zip(small.parameters(), large.parameters(), strict=True):
        assert torch.equal(own, other)


def test_queries_keys_and_values_in_one_matrix_are_selected_apart():
    small, large = (nn.MultiheadAttention(width, 2) for width in (4, 6))
    weight_selection(small, large, channels="leading")
    for part in range(3):
        assert torch.equal(
            small.in_proj_weight[4 * part : 4 * part + 4], large.in_proj_weight[6 * part : 6 * part + 4, :4]
        )
        assert torch.equal(small.in_proj_bias[4 * part : 4 * part + 4], large.in_proj_bias[6 * part : 6 * part + 4])


def test_what_is_excluded_stays():
    small, large = vit(2, 16, n_classes=20), vit(2, 16, n_classes=10)
    before = small.head.weight.clone()
    weight_selection(small, large, exclude=["head.*"])
    assert torch.equal(small.head.weight, before)


@pytest.mark.parametrize(
    ("small", "large", "message"),
    [
        (lambda: vit(3, 16), lambda: vit(2, 16), r"no parameter 'layers\.2\..*at least as deep"),
        (lambda: vit(2, 32), lambda: vit(2, 16), r"has shape .* cannot be taken from one of shape .*at least as long"),
    ],
)
@pytest.mark.parametrize("layers", ["first", "even"])
def test_a_source_that_is_too_small_is_refused_and_nothing_changed(small, large, message, layers):
    model = small()
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(InputError, match=message):
        weight_selection(model, large(), layers=layers)
    for parameter, old in zip(model.parameters(), before, strict=True):
        assert torch.equal(parameter, old)
