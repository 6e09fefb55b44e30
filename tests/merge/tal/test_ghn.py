"""Predictions against naive twins of the decoder, their scale, their gradients, and their independence of batching."""

import dataclasses
import functools
import math

import pytest
import torch
from torch import nn
from torch.func import functional_call
from torch.nn.functional import cross_entropy

from heedful.errors import ConvergenceError, InputError, ParameterError
from heedful.merge.tal import ghn
from heedful.merge.tal.ghn import GraphHyperNetwork, TaskModulation
from heedful.merge.tal.graph import PRIMITIVES, ComputationGraph, Target, computation_graph
from heedful.merge.tal.pools import ArchitecturePool, ConvNetSpace, MLPSpace, VisionTransformer, ViTSpace, convnet, mlp
from tests.conformance.typechecks import as_users_have_it

SMALL = {"hidden": 16, "n_layers": 2, "n_heads": 2, "rank": 6, "max_side": 512}
vit = functools.partial(VisionTransformer, patch=4, image_size=16, n_classes=10)


def hypernet(seed=0, **settings):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return GraphHyperNetwork(**{**SMALL, **settings})


@functools.cache
def graph_of_vit(depth=2, width=24, n_heads=3):
    return computation_graph(vit(depth=depth, width=width, n_heads=n_heads), torch.zeros(1, 3, 16, 16))


def one_node(target, *, kind="linear", unbounded=True, head=None):
    """An input, and behind it one node with this target."""
    targets = target if isinstance(target, list) else [target]
    size = math.prod(targets[0].shape)
    return ComputationGraph(
        kinds=("input", kind),
        shapes=torch.tensor([[0, 0, 0, 0], [min(size, 64), 1, 1, 1]]),
        distances=torch.tensor([[0, 1], [0, 0]], dtype=torch.int16),
        targets=((), tuple(targets)),
        unbounded=(True, unbounded),
        n_classes=None,
        head=head,
        tied={},
        kept=(),
        digest="by hand",
    )


def chain(n):
    """A chain of n nodes whose distances are cut off at 50."""
    gaps = torch.arange(n)[None] - torch.arange(n)[:, None]
    return gaps.where((gaps > 0) & (gaps <= 50), 0).to(torch.int16)


# Task modulation -----------------------------------------------------------------------------------------------------


def test_modulation_starts_as_the_identity_bit_for_bit(seed):
    generator = torch.Generator().manual_seed(seed)
    before, after = hypernet(), hypernet()
    after.add_task_modulation(7)
    (expected,) = before(graph_of_vit())
    for _ in range(3):
        (modulated,) = after(graph_of_vit(), 100 * torch.randn(7, generator=generator))
        for name, tensor in expected.items():
            assert torch.equal(modulated[name], tensor), name


def test_modulation_is_its_formula(seed):
    generator = torch.Generator().manual_seed(seed)
    module = TaskModulation(5, 8, dtype=torch.float64)
    for parameter in module.parameters():
        nn.init.normal_(parameter, generator=generator)
    x, e = (torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in ((3, 8), (5,)))
    expected = (1 + module.gain.weight @ e + module.gain.bias) * x + (module.shift.weight @ e + module.shift.bias)
    torch.testing.assert_close(module(x, e), expected, rtol=1e-12, atol=1e-12)  # float64 roundings


def test_a_task_changes_predictions_once_modulation_has_learnt():
    net = hypernet(task_dim=3)
    for layer in net.layers:
        nn.init.normal_(layer.modulation.gain.weight, generator=torch.Generator().manual_seed(0))
    one, other = (net(graph_of_vit(), torch.eye(3)[i])[0]["head.weight"] for i in (0, 1))
    assert not torch.allclose(one, other)


# Shapes --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("build", "space"),
    [(vit, ViTSpace("tiny")), (mlp, MLPSpace(12)), (convnet, ConvNetSpace(16, 3))],
    ids=["vit", "mlp", "convnet"],
)
@pytest.mark.parametrize("decoder", ["low_rank", "tile"])
def test_every_parameter_of_every_member_is_predicted_in_its_shape_and_the_net_is_finite(build, space, decoder):
    net = hypernet(max_side=2048, decoder=decoder)
    example = torch.zeros(1, 3, 16, 16) if build is vit else space.example_inputs
    if build is vit:
        configurations = [{"depth": d, "width": w, "n_heads": 4} for d, w in ((2, 32), (3, 48), (5, 96))]
        pool = ArchitecturePool(build, configurations, example)
    else:
        pool = ArchitecturePool.from_space(build, space, n=6, random_state=0)
    for i in range(len(pool)):
        builder, graph = pool[i]
        model = builder()
        (weights,) = net(graph)
        assert {n: t.shape for n, t in weights.items()} == {n: p.shape for n, p in model.named_parameters()}
        assert sum(t.numel() for t in weights.values()) == graph.n_parameters
        assert functional_call(model, weights, (torch.randn(2, *example.shape[1:]),)).isfinite().all()


def test_the_decoder_is_the_naive_one_that_computes_all_rows(seed):
    """u of shape (2r, r), Linear on each row, read as 2ck rows of r, halves A and B: exactly as the paper writes it."""
    net = hypernet(seed % 100, max_side=40).double()  # short, so that sides need several rows of u
    decoder = net.decoder
    r, ck = decoder.rank, decoder.max_side
    x = torch.randn(3, 16, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    u = decoder.core(decoder.mlp(x)).relu().view(3, 2 * r, r)
    rows = decoder.expand(u).reshape(3, 2 * ck, r)
    A, B = rows[:, :ck], rows[:, ck:]
    for shape in ((5, 4, 1, 1), (13, 40, 1, 1), (3, 8, 3, 5), (40, 1, 1, 1), (1, 1, 1, 1)):
        c_out, c_in, height, width = shape
        naive = A[:, : c_out * height] @ B[:, : c_in * width].mT
        naive = naive.reshape(3, c_out, height, c_in, width).permute(0, 1, 3, 2, 4)
        longest = max(c_out * height, c_in * width)
        torch.testing.assert_close(decoder(decoder.seed(x, longest), shape, 1.0), naive, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("shape", [(40, 30), (12, 10, 3, 3), (20, 1, 5, 5), (9, 8, 7)])
def test_no_matrix_has_a_higher_rank(shape):
    net = hypernet(rank=3).double()
    (weights,) = net(one_node(Target("w", shape, "weight")))
    w = weights["w"].detach().reshape(*shape, *[1] * (4 - len(shape)))
    if len(shape) == 3:
        w = w.transpose(2, 3)  # the only kernel side is the last
    matrix = w.permute(0, 2, 1, 3).reshape(w.shape[0] * w.shape[2], -1)
    assert int(torch.linalg.matrix_rank(matrix)) == min(3, *matrix.shape)


def test_the_decoder_does_not_grow_with_what_it_predicts():
    net = hypernet(max_side=600)
    before = sum(p.numel() for p in net.parameters())
    for side in (2, 600):
        (weights,) = net(one_node(Target("w", (side, side), "weight")))
        assert weights["w"].shape == (side, side)
    assert sum(p.numel() for p in net.parameters()) == before


def test_positions_are_a_low_rank_grid_behind_a_fixed_small_row_for_the_class_token():
    net = hypernet(weight_norm=False)
    graph = one_node(Target("p", (1, 10, 8), "position"), kind="position")
    (weights,) = net(graph)
    seeds = net.decoder.seed(net.embed([graph])[0][1:], 24)
    grid = net.decoder(seeds, (1, 8, 3, 3), net.gains["position"])[0, 0]
    torch.testing.assert_close(weights["p"][0, 1:], grid.reshape(8, 9).T)
    assert torch.equal(weights["p"], hypernet(weight_norm=False)(graph)[0]["p"])
    drawn = torch.cat(
        [
            ghn._positions(torch.zeros(1, 1, 500, side, side), (1, side**2 + 2 * side, 500))[0, 0, : 2 * side].flatten()
            for side in (3, 4)
        ]
    )
    assert 0.018 < drawn.std() < 0.022  # the standard deviation of 7000 numbers, all but 1 %


def test_kernels_beyond_max_kernel_repeat_and_tiles_repeat_over_channels():
    wide = hypernet(max_kernel=3)(one_node(Target("w", (4, 5, 7, 7), "weight")))[0]["w"]
    torch.testing.assert_close(wide[:, :, 3:6, :], wide[:, :, :3, :])
    torch.testing.assert_close(wide[:, :, :, 6:], wide[:, :, :, :1])
    tiled = hypernet(decoder="tile", max_kernel=3)(one_node(Target("w", (100, 130), "weight")))[0]["w"]
    torch.testing.assert_close(tiled[64:], tiled[:36])
    torch.testing.assert_close(tiled[:, 128:], tiled[:, :2])


def test_smaller_kernels_are_the_central_window_of_a_tile():
    decoder = hypernet(decoder="tile", max_kernel=5).decoder
    x = torch.randn(2, 16, generator=torch.Generator().manual_seed(0))
    whole, part = decoder(x, (6, 7, 5, 5), 1.0), decoder(x, (3, 2, 3, 1), 1.0)
    torch.testing.assert_close(part, whole[:, :3, :2, 1:4, 2:3])


# Scale ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("shape", "role", "unbounded", "beta"),
    [
        ((400, 300), "weight", False, 2),
        ((400, 300), "weight", True, 1),
        ((64, 50, 3, 3), "weight", False, 2),
        ((700, 1, 5, 5), "weight", True, 1),
        ((400, 300), "head", True, 1),
    ],
)
def test_unit_predictions_give_layers_that_keep_the_second_moment_up_to_beta(shape, role, unbounded, beta):
    generator = torch.Generator().manual_seed(0)
    recipe = ghn._Recipe((*shape, 1, 1)[:4], (*shape, 1, 1)[:4], ((shape, role),), unbounded)
    weight = recipe.scale * torch.randn(*shape, generator=generator)
    x = torch.randn(200, math.prod(shape[1:]), generator=generator) * torch.linspace(0.1, 3, math.prod(shape[1:]))
    second_moment = (x @ weight.reshape(shape[0], -1).T).square().mean()
    assert float(second_moment / (beta * x.square().mean())) == pytest.approx(1, rel=0.1)


def test_raw_predictions_start_with_unit_variance():
    """Over hypernetworks: tensors of one are of a few scales."""
    graph = one_node(Target("w", (60, 60), "weight"))
    moments = [hypernet(seed, weight_norm=False, rank=12)(graph)[0]["w"].detach().square().mean() for seed in range(60)]
    assert float(torch.stack(moments).mean()) == pytest.approx(1, rel=0.35)  # its standard error is 0.1


def test_gains_and_biases_stay_inside_their_bounds_and_follow_their_formulas():
    graph = one_node([Target("n.weight", (30,), "norm"), Target("n.bias", (30,), "norm")], kind="layer_norm")
    raw = hypernet(weight_norm=False)(graph)[0]
    scaled = hypernet()(graph)[0]
    torch.testing.assert_close(scaled["n.weight"], 2 * torch.sigmoid(raw["n.weight"] / 2))
    torch.testing.assert_close(scaled["n.bias"], torch.tanh(raw["n.bias"] / 5))
    (bias,) = hypernet()(one_node(Target("b", (30,), "bias"), kind="bias"))
    (raw_bias,) = hypernet(weight_norm=False)(one_node(Target("b", (30,), "bias"), kind="bias"))
    torch.testing.assert_close(bias["b"], torch.tanh(raw_bias["b"] / 5))


@pytest.mark.parametrize("shape", [(1, 1, 48), (48,)])
def test_a_token_has_the_scale_of_its_own_size(shape):
    graph = one_node(Target("t", shape, "token"), kind="token")
    torch.testing.assert_close(hypernet()(graph)[0]["t"], hypernet(weight_norm=False)(graph)[0]["t"] / math.sqrt(48))


# Gradients -----------------------------------------------------------------------------------------------------------


def test_gradients_of_the_target_loss_are_finite_differences():
    net = hypernet(task_dim=4).double()
    for layer in net.layers:
        nn.init.normal_(layer.modulation.gain.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    model, graph = vit(depth=2, width=24, n_heads=3).double(), graph_of_vit()
    x = torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, task = torch.arange(4), torch.tensor([1.0, -1.0, 0.5, 2.0], dtype=torch.float64)

    def loss():
        return cross_entropy(functional_call(model, net(graph, task)[0], (x,)), y)

    loss().backward()
    for parameter in (net.decoder.expand.weight, net.layers[0].qkv.weight, net.layers[1].modulation.gain.weight):
        at = int(parameter.grad.abs().argmax())
        exact, step = parameter.grad.view(-1)[at].item(), 1e-5
        with torch.no_grad():
            flat = parameter.view(-1)
            flat[at] += step
            above = loss().item()
            flat[at] -= 2 * step
            below = loss().item()
            flat[at] += step
        assert (above - below) / (2 * step) == pytest.approx(exact, rel=1e-5, abs=1e-9)


# Batches and memory --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("decoder", ["low_rank", "tile"])
def test_several_graphs_at_once_are_predicted_as_one_at_a_time(decoder):
    net = hypernet(task_dim=3, decoder=decoder)
    for layer in net.layers:
        nn.init.normal_(layer.modulation.shift.weight, generator=torch.Generator().manual_seed(2))
    task = torch.tensor([1.0, 2.0, -1.0])
    graphs = [
        graph_of_vit(2, 24),
        graph_of_vit(4, 24),
        computation_graph(mlp(depth=2, width=9, n_features=4), torch.zeros(1, 4)),
    ]
    together = net(graphs, task)
    for graph, batched in zip(graphs, together, strict=True):
        (alone,) = net(graph, task)
        assert batched.keys() == alone.keys()
        for name in alone:
            torch.testing.assert_close(batched[name], alone[name], rtol=1e-5, atol=1e-5)


def test_one_tensor_after_the_other_is_what_forward_gives():
    net = hypernet()
    (expected,) = net(graph_of_vit())
    streamed = dict(net.predict(graph_of_vit()))
    assert streamed.keys() == expected.keys()
    for name, tensor in streamed.items():
        assert not tensor.requires_grad
        torch.testing.assert_close(
            tensor, expected[name], rtol=1e-5, atol=1e-6
        )  # products of other shapes round otherwise


def test_a_prediction_needs_no_gradient_mode_outside():
    net = hypernet()
    stream = net.predict(graph_of_vit())
    next(stream)
    assert torch.is_grad_enabled()


def test_isomorphic_networks_get_the_same_weights():
    def sequential(*names):
        return nn.Sequential(dict_of(names, [nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 2)]))

    def dict_of(names, layers):
        from collections import OrderedDict

        return OrderedDict(zip(names, layers, strict=True))

    net = hypernet()
    one, other = (
        net(computation_graph(sequential(*names), torch.zeros(1, 6)))[0]
        for names in ("abcde", ("z", "y", "x", "w", "v"))
    )
    for left, right in zip("ace", "zxv", strict=True):
        assert torch.equal(one[f"{left}.weight"], other[f"{right}.weight"])


def test_a_network_without_parameters_has_no_predictions():
    graph = computation_graph(nn.Sequential(nn.Flatten(), nn.ReLU()), torch.zeros(1, 2, 2))
    assert hypernet()(graph) == [{}]
    assert list(hypernet().predict(graph)) == []


# Features of nodes ---------------------------------------------------------------------------------------------------


def test_sizes_take_the_nearest_value_of_their_table_and_of_two_the_smaller():
    sizes = torch.tensor([[0, 1, 2, 5, 12, 13, 100, 104, 105, 9999]])
    near = [ghn.CHANNELS[i] for i in ghn._nearest(sizes, ghn.CHANNELS)[0]]
    assert near == [0, 1, 1, 3, 8, 16, 96, 96, 112, 8192]
    assert [ghn.KERNELS[i] for i in ghn._nearest(torch.tensor([[0, 1, 2, 4, 12, 15, 40]]), ghn.KERNELS)[0]] == [
        0, 1, 1, 3, 11, 14, 16,
    ]  # fmt: skip
    assert len(set(ghn.CHANNELS)) == len(ghn.CHANNELS)


def test_depths_go_on_beyond_the_cutoff():
    assert torch.equal(ghn._depths(chain(170).long()), torch.arange(170))
    unreachable = torch.zeros(3, 3, dtype=torch.long)
    unreachable[0, 1] = 1
    assert ghn._depths(unreachable).tolist() == [0, 1, 0]


def test_the_class_head_looks_the_same_whatever_its_number_of_classes():
    few, many = (mlp(depth=1, width=8, n_features=4, n_classes=n) for n in (3, 40))
    net = hypernet()
    (small,), (large,) = (net(computation_graph(m, torch.zeros(1, 4))) for m in (few, many))
    torch.testing.assert_close(large["3.weight"][:3], small["3.weight"])


def test_attention_bias_is_the_mlp_of_both_distances():
    net = hypernet().double()
    distances = graph_of_vit().distances
    bias = net._attention_bias(distances[None])[0]
    i, j = torch.meshgrid(*[torch.arange(len(distances))] * 2, indexing="ij")
    steps = distances.long()
    naive = net.edge_bias(torch.cat([net.edge(steps[i, j] + 2), net.edge(steps[j, i] + 2)], dim=-1)).permute(2, 0, 1)
    torch.testing.assert_close(bias, naive, rtol=1e-12, atol=1e-12)


def test_embeddings_are_those_of_a_transformer_written_out_node_by_node(seed):
    net = hypernet(seed % 100, task_dim=3).double()
    generator = torch.Generator().manual_seed(seed)
    for parameter in net.parameters():  # what starts at 0, 1 or small must be seen
        parameter.data += 0.1 * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
    graph, task = graph_of_vit(), torch.randn(3, generator=generator, dtype=torch.float64)
    steps, sizes = graph.distances.long(), graph.shapes
    nodes = range(len(graph))
    x = []
    for i in nodes:
        c_out, c_in, height, width = (
            min(range(len(table)), key=lambda k: (abs(table[k] - size), k))
            for size, table in zip(sizes[i].tolist(), [ghn.CHANNELS] * 2 + [ghn.KERNELS] * 2, strict=True)
        )
        if any(target.name in ("head.weight", "head.bias") for target in graph.targets[i]):
            c_out = len(ghn.CHANNELS)
        size = net.channel.weight[c_out], net.channel.weight[c_in], net.kernel.weight[height], net.kernel.weight[width]
        x.append(
            net.primitive.weight[PRIMITIVES.index(graph.kinds[i])]
            + torch.cat(size)
            + net.in_degree.weight[sum(int(steps[j, i]) == 1 for j in nodes)]
            + net.out_degree.weight[sum(int(steps[i, j]) == 1 for j in nodes)]
            + net.depth.weight[steps[0, i]]
        )
    x = torch.stack(x)
    bias = net._attention_bias(graph.distances[None])[0]  # compared with its formula above
    for layer in net.layers:
        y = nn.functional.layer_norm(x, (16,), layer.norm_attention.weight, layer.norm_attention.bias)
        gain, shift = layer.modulation.gain, layer.modulation.shift
        y = (1 + gain.weight @ task + gain.bias) * y + shift.weight @ task + shift.bias
        heads = []
        for h in range(2):
            query, key, value = (layer.qkv(y)[:, 16 * part + 8 * h : 16 * part + 8 * h + 8] for part in range(3))
            heads.append((query @ key.T / math.sqrt(8) + bias[h]).softmax(1) @ value)
        x = x + layer.out(torch.cat(heads, dim=1))
        x = x + layer.mlp(nn.functional.layer_norm(x, (16,), layer.norm_mlp.weight, layer.norm_mlp.bias))
    x = nn.functional.layer_norm(x, (16,), net.norm.weight, net.norm.bias)
    torch.testing.assert_close(net.embed([graph], task)[0], x, rtol=1e-9, atol=1e-9)  # float64 roundings


def test_the_numbers_of_kinds_are_those_of_the_public_tuple():
    kinds, *_ = ghn._features(graph_of_vit())
    assert [PRIMITIVES[i] for i in kinds] == list(graph_of_vit().kinds)


# Bad input -----------------------------------------------------------------------------------------------------------


def test_a_side_beyond_max_side_is_named():
    net = hypernet(max_side=64)
    with pytest.raises(InputError, match=r"w has a side of 65 .*max_side=64.*strict=False"):
        net(one_node(Target("w", (2, 65), "weight")))
    assert net.too_large(one_node(Target("w", (2, 65), "weight"))) == ["w"]
    assert hypernet(decoder="tile").too_large(one_node(Target("w", (2, 6500), "weight"))) == []


def test_embeddings_of_the_wrong_kind_are_refused():
    net = hypernet(task_dim=3)
    with pytest.raises(InputError, match=r"must have shape \(3,\); got \(4,\)"):
        net(graph_of_vit(), torch.zeros(4))
    with pytest.raises(InputError, match="NaN or infinite"):
        net(graph_of_vit(), torch.tensor([0.0, math.nan, 0.0]))
    with pytest.raises(InputError, match="no task modulation"):
        hypernet()(graph_of_vit(), torch.zeros(3))
    with pytest.raises(ParameterError, match=r"of size 3; got size 5"):
        net.add_task_modulation(5)
    net.add_task_modulation(3)  # there already


def test_a_prediction_that_is_not_finite_names_its_node():
    net = hypernet()
    with torch.no_grad():
        net.gains["head"].fill_(math.nan)
    with pytest.raises(ConvergenceError, match=r"head\.weight \(node \d+, linear\)"):
        list(net.predict(graph_of_vit()))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"hidden": 18}, "multiple of 4 and of n_heads"),
        ({"n_heads": 3}, "multiple of 4 and of n_heads"),
        ({"rank": 0}, "rank must be an int >= 1"),
        ({"decoder": "dense"}, "decoder must be one of 'low_rank', 'tile'"),
        ({"task_dim": 0}, "task_dim must be an int >= 1"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ParameterError, match=message), as_users_have_it():
        hypernet(**settings)


def test_a_changed_graph_is_predicted_anew():
    """Work and features are remembered by graph; a changed copy is another one."""
    graph = one_node(Target("w", (4, 5), "weight"))
    net = hypernet()
    net(graph)
    changed = dataclasses.replace(graph, targets=((), (Target("v", (6, 5), "weight"),)))
    assert net(changed)[0]["v"].shape == (6, 5)
