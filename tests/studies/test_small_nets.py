"""The networks of the studies: what they are made of, and that a seed repeats them."""

import functools

import pytest
import torch
from torch import nn

from heedful.studies._small_nets import ByteTransformer, mixer, resnet8

MIXER = functools.partial(mixer, 5, patches=6, pixels=9, width=12, hidden=16, token_hidden=8, n_blocks=2)
RESNET = functools.partial(resnet8, 5, channels=(4, 8, 16))
BYTES = functools.partial(ByteTransformer, length=10, width=12, n_heads=3, n_blocks=2)


def draw(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("build", [MIXER, RESNET, BYTES])
def test_the_same_seed_gives_the_same_weights_and_moves_no_global_generator(build):
    state = torch.get_rng_state()
    one, same, other = build(seed=1), build(seed=1), build(seed=2)
    assert torch.equal(state, torch.get_rng_state())
    assert all(torch.equal(a, b) for a, b in zip(one.parameters(), same.parameters(), strict=True))
    assert not all(torch.equal(a, b) for a, b in zip(one.parameters(), other.parameters(), strict=True))


def test_resnet8_has_seven_convolutions_one_linear_layer_and_halves_twice():
    net = RESNET(seed=0)
    kinds = [type(module) for module in net.modules() if isinstance(module, (nn.Conv2d, nn.Linear))]
    assert kinds == [nn.Conv2d] * 7 + [nn.Linear]
    assert net[:-3](draw(2, 1, 14, 14)).shape == (2, 16, 4, 4)
    assert net(draw(2, 1, 14, 14)).shape == (2, 5)
    assert RESNET(stem_stride=2, seed=0)[:-3](draw(2, 1, 14, 14)).shape == (2, 16, 2, 2)


def test_a_residual_block_of_zeros_passes_its_input_on():
    net = RESNET(seed=0).eval()
    block = net[4]
    nn.init.zeros_(block.conv2.weight)
    x = draw(2, 4, 6, 6).relu()
    expected = torch.cat([x[:, :, ::2, ::2], torch.zeros(2, 4, 3, 3)], dim=1)
    torch.testing.assert_close(block(x), expected)


def test_the_mixer_tells_patches_apart_by_their_place():
    net, x = MIXER(seed=0), draw(3, 6, 9)
    assert net(x).shape == (3, 5)
    assert not torch.allclose(net(x), net(x.flip(1)))


def test_the_transformer_sees_nothing_of_what_comes_later():
    net = BYTES(seed=0)
    ids = torch.randint(256, (2, 10), generator=torch.Generator().manual_seed(0))
    changed = ids.clone()
    changed[:, 6:] = (changed[:, 6:] + 1) % 256
    assert net(ids).shape == (2, 10, 256)
    torch.testing.assert_close(net(ids)[:, :6], net(changed)[:, :6])
    assert not torch.allclose(net(ids)[:, 6:], net(changed)[:, 6:])


def test_the_transformer_attends_to_what_came_before():
    net = BYTES(seed=0)
    ids = torch.zeros(1, 10, dtype=torch.int64)
    changed = ids.clone()
    changed[0, 0] = 65
    assert not torch.allclose(net(ids)[:, -1], net(changed)[:, -1])


def test_all_matrices_of_the_transformer_are_linear_layers():
    shapes = {
        name: tuple(layer.weight.shape) for name, layer in BYTES(seed=0).named_modules() if type(layer) is nn.Linear
    }
    assert shapes["blocks.0.qkv"] == (36, 12)
    assert shapes["blocks.1.up"] == (48, 12)
    assert list(shapes)[-1] == "head"
    assert len(shapes) == 9
