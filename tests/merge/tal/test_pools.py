"""Spaces against the rules that define them, pools against what they draw."""

import pickle

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from heedful.errors import ParameterError
from heedful.merge.tal.graph import computation_graph
from heedful.merge.tal.pools import (
    ArchitecturePool,
    ConvNetSpace,
    MLPSpace,
    Space,
    VisionTransformer,
    ViTSpace,
    convnet,
    mlp,
)
from tests.conformance.typechecks import as_users_have_it

FAMILIES = [(VisionTransformer, ViTSpace("tiny")), (mlp, MLPSpace(12)), (convnet, ConvNetSpace(16, 1))]


def draws(space, n=3000):
    generator = np.random.default_rng(0)
    return [space.draw(generator) for _ in range(n)]


@pytest.mark.parametrize(
    ("name", "depths", "widths"),
    [
        (
            "vits-1k",
            range(3, 10),
            lambda depth: range(256, 769, 32) if depth > 5 else range(192 if depth == 3 else 256, 513, 32),
        ),
        ("vits+-1k", range(3, 13), lambda depth: range(192, 769, 64)),
        ("tiny", range(2, 6), lambda depth: range(32, 97, 16)),
    ],
)
def test_vit_spaces_hold_exactly_the_depths_and_widths_of_their_definition(name, depths, widths):
    drawn = {(configuration["depth"], configuration["width"]) for configuration in draws(ViTSpace(name))}
    # Of 3000 draws, the rarest of at most 119 pairs is missed with a probability below 119 · exp(-3000/119) < 2e-9.
    assert drawn == {(depth, width) for depth in depths for width in widths(depth)}


@pytest.mark.parametrize(
    ("width", "heads"),
    [(192, {3, 6, 12}), (256, {4, 8}), (288, {3, 6, 12}), (320, {4, 8}), (48, {3, 6, 12}), (80, {4, 8})],
)
def test_heads_follow_the_divisors_of_the_width(width, heads):
    pools = [*draws(ViTSpace("vits-1k")), *draws(ViTSpace("tiny"))]
    assert {c["n_heads"] for c in pools if c["width"] == width} == heads
    assert all(c["width"] % c["n_heads"] == 0 for c in pools)


@pytest.mark.parametrize(("builder", "space"), FAMILIES)
def test_every_member_runs_and_has_all_of_its_parameters_in_its_graph(builder, space):
    pool = ArchitecturePool.from_space(builder, space, n=6, random_state=0)
    generator = torch.Generator().manual_seed(0)
    for i in range(len(pool)):
        build, graph = pool[i]
        net = build()
        assert graph.n_parameters == sum(parameter.numel() for parameter in net.parameters())
        assert graph.kept == ()
        assert net.get_submodule(graph.head).out_features == graph.n_classes
        weights = {
            t.name: 0.1 * torch.randn(t.shape, generator=generator) for targets in graph.targets for t in targets
        }
        logits = torch.func.functional_call(net, weights, torch.ones(2, *space.example_inputs.shape[1:]))
        assert logits.shape == (2, graph.n_classes)
        assert logits.isfinite().all()


@pytest.mark.slow
@pytest.mark.parametrize("name", ["vits-1k", "vits+-1k"])
def test_every_parameter_of_the_published_pools_is_predicted(name):
    pool = ArchitecturePool.from_space(VisionTransformer, ViTSpace(name), n=20, random_state=0)
    with as_users_have_it():  # a hundred thousand calls
        for build, graph in (pool[i] for i in range(len(pool))):
            with torch.device("meta"):
                net = build()
            assert graph.n_parameters == sum(parameter.numel() for parameter in net.parameters())


def test_spaces_are_spaces():
    assert all(isinstance(space, Space) for _, space in FAMILIES)
    with pytest.raises(ParameterError, match=r"name must be one of 'vits-1k', 'vits\+-1k', 'tiny'; got 'huge'"):
        ViTSpace("huge")


@pytest.mark.parametrize(("builder", "space"), FAMILIES)
def test_the_same_seed_draws_the_same_pool(builder, space):
    one, same, other = (ArchitecturePool.from_space(builder, space, n=50, random_state=seed) for seed in (3, 3, 4))
    assert len(one) == 50
    assert one.configurations == same.configurations
    assert one.configurations != other.configurations


def test_graphs_are_made_on_first_use_shared_by_equal_members_and_take_no_draw():
    built = []

    def builder(**sizes):
        built.append(sizes)
        return mlp(**sizes)

    small, large = ({"depth": 1, "width": width, "n_features": 4} for width in (8, 16))
    pool = ArchitecturePool(builder, [small, large, dict(reversed(small.items()))], torch.zeros(1, 4))
    assert built == []
    state = torch.random.get_rng_state()
    assert pool[0].graph is pool[2].graph
    assert pool[0].graph.digest != pool[1].graph.digest
    assert pool[-1].graph is pool[0].graph
    assert built == [small, large]
    assert torch.equal(torch.random.get_rng_state(), state)


def test_each_build_has_weights_of_its_own():
    build, _ = ArchitecturePool.from_space(mlp, MLPSpace(4), n=1, random_state=0)[0]
    one, other = build(), build()
    assert not any(parameter.is_meta for parameter in one.parameters())
    assert not torch.equal(one[1].weight, other[1].weight)


def test_sampling_reaches_every_member_and_is_repeatable():
    configurations = [{"depth": 1, "width": width, "n_features": 4} for width in range(1, 6)]
    pool = ArchitecturePool(mlp, configurations, torch.zeros(1, 4))

    def widths(seed):
        generator = torch.Generator().manual_seed(seed)
        return [pool.sample(generator).build.keywords["width"] for _ in range(100)]

    assert set(widths(0)) == {1, 2, 3, 4, 5}  # 100 draws miss one of five with probability 5 · 0.8^100 < 1e-9
    assert widths(0) == widths(0) != widths(1)


def test_members_travel_to_other_processes():
    build, graph = pickle.loads(pickle.dumps(ArchitecturePool.from_space(mlp, MLPSpace(4), n=1, random_state=0)))[0]
    assert computation_graph(build(), torch.zeros(1, 4)).digest == graph.digest


def test_a_builder_that_does_not_take_the_configurations_is_refused_at_the_door():
    with pytest.raises(ParameterError) as caught:
        ArchitecturePool.from_space(lambda depth, width: nn.Identity(), MLPSpace(4), n=3)
    assert str(caught.value) == (
        "The builder must take depth, width, n_features as keyword arguments: got an unexpected keyword argument "
        "'n_features'. Wrap it in a function that translates them."
    )


def test_an_empty_pool_is_refused():
    with pytest.raises(ParameterError, match="A pool needs at least one architecture"):
        ArchitecturePool(mlp, [], torch.zeros(1, 4))
    with pytest.raises(ParameterError, match="n must be an int >= 1; got 0"):
        ArchitecturePool.from_space(mlp, MLPSpace(4), n=0)


# The builders ---------------------------------------------------------------------------------------------------------


def test_our_vision_transformer_has_the_graph_of_hugging_faces():
    ours = VisionTransformer(depth=3, width=48, n_heads=3, patch=4, image_size=32, n_classes=7)
    config = transformers.ViTConfig(
        hidden_size=48,
        num_hidden_layers=3,
        num_attention_heads=3,
        intermediate_size=192,
        image_size=32,
        patch_size=4,
        num_labels=7,
    )
    image = torch.zeros(1, 3, 32, 32)
    one, other = (computation_graph(net, image) for net in (ours, transformers.ViTForImageClassification(config)))
    assert one.digest == other.digest
    assert torch.equal(one.distances, other.distances)


def test_our_vision_transformer_computes_what_hugging_faces_does(seed):
    sizes = {"hidden_size": 12, "num_hidden_layers": 2, "num_attention_heads": 3, "intermediate_size": 48}
    config = transformers.ViTConfig(**sizes, image_size=8, patch_size=4, num_labels=5, layer_norm_eps=1e-5)
    theirs = transformers.ViTForImageClassification(config).eval()
    ours = VisionTransformer(depth=2, width=12, n_heads=3, patch=4, image_size=8, n_classes=5)
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(4, 3, 8, 8, generator=generator)
    graphs = [computation_graph(net, images[:1]) for net in (ours, theirs)]
    outputs = []
    for net, graph in zip((ours, theirs), graphs, strict=True):
        generator = torch.Generator().manual_seed(seed)
        weights = {t.name: torch.randn(t.shape, generator=generator) for ts in graph.targets for t in ts}
        outputs.append(torch.func.functional_call(net, weights, images))
    torch.testing.assert_close(outputs[0], outputs[1].logits, rtol=1e-4, atol=1e-4)  # float32, other orders of sums


def test_sizes_that_do_not_divide_are_refused():
    with pytest.raises(ParameterError) as caught:
        VisionTransformer(depth=1, width=10, n_heads=3, patch=4, image_size=32)
    assert str(caught.value) == (
        "width must be a multiple of n_heads and image_size one of patch; got width=10, n_heads=3, image_size=32, patch=4."
    )


def test_mlp_and_convnet_are_what_they_say():
    assert [type(layer) for layer in mlp(depth=2, width=8, n_features=4)] == [
        *(nn.Flatten, nn.Linear, nn.ReLU, nn.Linear, nn.ReLU, nn.Linear),
    ]
    layers = convnet(depth=4, width=8, kernel=5, norm="batch", n_channels=1, n_classes=3)
    convolutions = [layer for layer in layers if isinstance(layer, nn.Conv2d)]
    assert [(c.in_channels, c.out_channels, c.stride[0]) for c in convolutions] == [
        *((1, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2)),
    ]
    assert layers(torch.zeros(2, 1, 12, 12)).shape == (2, 3)
    with (
        as_users_have_it(),
        pytest.raises(ParameterError, match="norm must be one of 'none', 'group', 'batch'; got 'lay"),
    ):
        convnet(depth=1, width=8, norm="layer")
