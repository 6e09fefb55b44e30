"""Graphs of networks against graphs worked out by hand, networkx, and other ways to write the same network."""

import copy
import inspect
import re
import warnings

import networkx
import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import layer_norm, scaled_dot_product_attention

from heedful.errors import HeedfulWarning, InputError, ParameterError, UnsupportedModelError
from heedful.merge.tal._students import with_classes
from heedful.merge.tal.ghn import GraphHyperNetwork
from heedful.merge.tal.graph import PRIMITIVES, ComputationGraph, Target, computation_graph
from heedful.merge.tal.pools import VisionTransformer
from tests.conformance.typechecks import as_users_have_it

IMAGE = torch.zeros(1, 3, 32, 32)
ROW = torch.zeros(1, 4)
VIT = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "image_size": 32,
    "patch_size": 8,
}


def vit(**options):
    return transformers.ViTForImageClassification(transformers.ViTConfig(**VIT, **options))


def edges(graph):
    return {(i, j) for i, j in (graph.distances == 1).nonzero().tolist()}


def named_edges(graph):
    """Edges between labels that say kind and targets, for graphs whose nodes are all different."""
    labels = [
        f"{kind} {' '.join(t.name for t in targets)}".strip()
        for kind, targets in zip(graph.kinds, graph.targets, strict=True)
    ]
    assert len(set(labels)) == len(labels)
    return {(labels[i], labels[j]) for i, j in edges(graph)}


def n_parameters(model):
    return sum(parameter.numel() for parameter in model.parameters())


def assert_same(a, b):
    assert a.digest == b.digest
    assert (a.kinds, a.unbounded, a.n_classes) == (b.kinds, b.unbounded, b.n_classes)
    assert torch.equal(a.shapes, b.shapes)
    assert torch.equal(a.distances, b.distances)


class Net(nn.Module):
    """A module whose forward is ``run(self, *inputs)``, with parts given by keyword."""

    def __init__(self, run, **parts):
        super().__init__()
        self.run = run
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *inputs):
        return self.run(self, *inputs)


# What is a node, and what is not ------------------------------------------------------------------------------------


def test_graph_of_a_convolutional_net_is_the_one_drawn_by_hand():
    net = nn.Sequential(
        nn.Conv2d(3, 8, (3, 5), bias=False),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, groups=8),
        nn.Dropout(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 5),
    )
    graph = computation_graph(net, IMAGE)
    assert graph.kinds == (
        *("input", "conv", "batch_norm", "max_pool", "depthwise", "bias", "global_pool", "linear", "bias"),
    )
    assert edges(graph) == {(i, i + 1) for i in range(8)}
    assert graph.shapes.tolist() == [
        [0, 0, 0, 0],
        [8, 3, 3, 5],
        [8, 1, 1, 1],
        [0, 0, 0, 0],
        [8, 1, 3, 3],
        [8, 1, 1, 1],
        [0, 0, 0, 0],
        [5, 8, 1, 1],
        [5, 1, 1, 1],
    ]
    assert graph.targets[2] == (Target("1.weight", (8,), "norm"), Target("1.bias", (8,), "norm"))
    assert graph.targets[4] == (Target("4.weight", (8, 1, 3, 3), "weight"),)
    assert graph.targets[8] == (Target("8.bias", (5,), "bias"),)
    assert [i for i, unbounded in enumerate(graph.unbounded) if not unbounded] == [1]  # the ReLU follows its norm
    assert (graph.head, graph.n_classes) == ("8", 5)
    assert graph.kept == ("1.running_mean", "1.running_var")


def test_graph_of_a_residual_block_is_the_one_drawn_by_hand():
    def run(net, x):
        y = net.one(x).relu()
        return net.two(torch.cat([net.skip(x) + net.main(y), y], dim=1))

    net = Net(run, one=nn.Linear(4, 6), skip=nn.Linear(4, 8), main=nn.Linear(6, 8), two=nn.Linear(14, 2, bias=False))
    graph = computation_graph(net, ROW)
    assert named_edges(graph) == {
        ("input", "linear one.weight"),
        ("linear one.weight", "bias one.bias"),
        ("input", "linear skip.weight"),
        ("linear skip.weight", "bias skip.bias"),
        ("bias one.bias", "linear main.weight"),
        ("linear main.weight", "bias main.bias"),
        ("bias skip.bias", "sum"),
        ("bias main.bias", "sum"),
        ("sum", "concat"),
        ("bias one.bias", "concat"),
        ("concat", "linear two.weight"),
    }
    assert graph.head == "two"


def test_queries_keys_and_values_are_told_apart():
    graph = computation_graph(vit(), IMAGE)
    for part in ("query", "key", "value"):
        names = sorted(
            t.name for kind, targets in zip(graph.kinds, graph.targets, strict=True) if kind == part for t in targets
        )
        assert names == [f"vit.layers.{i}.attention.{part[0]}_proj.weight" for i in range(2)]
    i = graph.kinds.index("attention")
    biases = {graph.targets[j][0].name for j, k in edges(graph) if k == i}
    assert biases == {f"vit.layers.0.attention.{part}_proj.bias" for part in "qkv"}


def test_one_layer_that_makes_queries_keys_and_values_stays_linear():
    graph = computation_graph(nn.TransformerEncoderLayer(8, 2, 16), torch.zeros(3, 1, 8))
    kinds = ("input", "linear", "bias", "attention", "linear", "bias", "sum", "layer_norm")
    assert graph.kinds == (*kinds, "linear", "bias", "linear", "bias", "sum", "layer_norm")
    assert [t.name for t in graph.targets[1]] == ["self_attn.in_proj_weight"]


def test_cross_attention_predicts_its_packed_projection_once():
    attention = nn.MultiheadAttention(8, 2)
    net = Net(lambda net, x, y: net.attention(x, y, y)[0], attention=attention)
    graph = computation_graph(net, (torch.zeros(3, 1, 8), torch.zeros(5, 1, 8)))
    assert graph.n_parameters == n_parameters(attention)
    assert graph.kept == ()
    assert graph.kinds.count("attention") == 1


def test_token_and_positions_lie_on_the_path_of_the_patches():
    graph = computation_graph(vit(), IMAGE)
    assert graph.kinds[:6] == ("input", "conv", "bias", "token", "position", "layer_norm")
    assert edges(graph) >= {(i, i + 1) for i in range(5)}
    assert graph.targets[3] == (Target("vit.embeddings.cls_token", (1, 1, 32), "token"),)
    assert graph.targets[4] == (Target("vit.embeddings.position_embeddings", (1, 17, 32), "position"),)
    assert graph.shapes[3:5].tolist() == [[32, 1, 1, 1], [1, 32, 4, 4]]


def test_embeddings_are_looked_up_by_inputs_and_positions_by_constants():
    net = Net(
        lambda net, ids: net.words(ids) + net.places(torch.arange(ids.shape[1])),
        words=nn.Embedding(11, 6),
        places=nn.Embedding(9, 6),
    )
    graph = computation_graph(net, torch.zeros(1, 7, dtype=torch.long))
    assert graph.kinds == ("input", "embedding", "position")
    assert graph.targets[1:] == (
        (Target("words.weight", (11, 6), "embedding"),),
        (Target("places.weight", (9, 6), "position"),),
    )


def test_a_bias_of_attention_scores_is_a_position_and_attention_is_found_behind_it():
    def run(net, x):
        query, key, value = (part(x).view(1, 3, 2, 2).transpose(1, 2) for part in (net.query, net.key, net.value))
        bias = net.table[torch.zeros(3, 3, dtype=torch.long)].permute(2, 0, 1)
        return (query @ key.mT / 2 + bias).softmax(-1) @ value

    parts = {part: nn.Linear(4, 4) for part in ("query", "key", "value")}
    net = Net(run, **parts, table=nn.Parameter(torch.zeros(5, 2)))
    graph = computation_graph(net, torch.zeros(1, 3, 4))
    position, attention = graph.kinds.index("position"), graph.kinds.index("attention")
    assert graph.targets[position] == (Target("table", (5, 2), "position"),)
    preds = {graph.targets[i][0].name for i, j in edges(graph) if j == attention}
    assert preds == {"table", "value.bias"}
    assert {"query", "key", "value"} <= set(graph.kinds)


@pytest.mark.parametrize(
    ("layer", "inputs", "shape"),
    [
        (nn.Conv1d(3, 8, 5), torch.zeros(1, 3, 9), [8, 3, 5, 1]),
        (nn.Conv2d(3, 8, 5), IMAGE, [8, 3, 5, 5]),
        (nn.Conv3d(3, 8, (2, 3, 4)), torch.zeros(1, 3, 5, 5, 5), [8, 3, 2, 12]),
        (nn.ConvTranspose2d(3, 8, 2), IMAGE, [3, 8, 2, 2]),
        (nn.Linear(4, 8), ROW, [8, 4, 1, 1]),
    ],
)
def test_shapes_of_layers(layer, inputs, shape):
    graph = computation_graph(layer, inputs)
    assert graph.shapes[1].tolist() == shape
    assert graph.shapes[1].prod() == layer.weight.numel()
    assert graph.shapes[2].tolist() == [len(layer.bias), 1, 1, 1]


@pytest.mark.parametrize(
    ("layer", "kind"),
    [
        (nn.BatchNorm2d(8), "batch_norm"),
        (nn.InstanceNorm2d(8, affine=True), "batch_norm"),
        (nn.GroupNorm(2, 8), "group_norm"),
        (nn.LayerNorm([30, 30]), "layer_norm"),
        (nn.MaxPool2d(2), "max_pool"),
        (nn.AvgPool2d(2), "avg_pool"),
        (nn.AdaptiveAvgPool2d(2), "avg_pool"),
        (nn.AdaptiveAvgPool2d(1), "global_pool"),
        (nn.AdaptiveMaxPool2d(1), "global_pool"),
        (nn.AvgPool2d(30), "global_pool"),
        (nn.Flatten(), None),
        (nn.Dropout(), None),
        (nn.GELU(), None),
        (nn.Softmax(1), None),
    ],
)
def test_kinds_of_layers_between_two_others(layer, kind):
    with warnings.catch_warnings():
        warnings.filterwarnings("error")
        kinds = computation_graph(nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), layer), IMAGE).kinds
    assert kinds == ("input", "conv", *([kind] if kind else []))
    assert set(kinds) <= set(PRIMITIVES)


@pytest.mark.parametrize("pool", [lambda x: x.mean(1), lambda x: x.amax(1), lambda x: nn.AdaptiveAvgPool1d(1)(x.mT)])
def test_pooling_of_tokens_is_global(pool):
    net = Net(lambda net, x: pool(net.layer(x)), layer=nn.Linear(4, 8))
    assert computation_graph(net, torch.zeros(1, 5, 4)).kinds == ("input", "linear", "bias", "global_pool")


def test_norms_written_out_are_scales():
    def run(net, x):
        x = net.first(x)
        return net.last(net.gain * (x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)))

    net = Net(run, first=nn.Linear(4, 8), last=nn.Linear(8, 2), gain=nn.Parameter(torch.ones(8)))
    builtin = nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.Linear(8, 2))
    inputs = torch.zeros(1, 5, 4)
    graph = computation_graph(net, inputs)
    assert graph.kinds == ("input", "linear", "bias", "scale", "linear", "bias")
    assert graph.targets[3] == (Target("gain", (8,), "norm"),)
    assert_same(graph, computation_graph(builtin, inputs))


# Gain before nonlinearities -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "activation",
    [
        *(nn.ReLU(), nn.ReLU(inplace=True), nn.ReLU6(), nn.LeakyReLU(), nn.ELU(), nn.SELU(), nn.GELU(), nn.SiLU()),
        *(nn.Mish(), nn.Hardswish(), nn.Softplus()),
        Net(lambda _, x: x * torch.sigmoid(1.702 * x)),  # GELU as CLIP writes it
        Net(lambda _, x: 0.5 * x * (1 + torch.tanh(0.8 * (x + 0.04 * x**3)))),  # as GPT-2 does
        Net(lambda _, x: x.clamp_min(0)),
    ],
)
def test_a_layer_before_a_rectifier_is_bounded(activation):
    graph = computation_graph(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), activation, nn.Linear(4, 4)), ROW)
    assert graph.kinds == ("input", "linear", "bias", "layer_norm", "linear", "bias")
    assert [i for i, unbounded in enumerate(graph.unbounded) if not unbounded] == [1]


@pytest.mark.parametrize("bend", [nn.Identity(), nn.Tanh(), nn.Sigmoid(), nn.Softmax(-1)])
def test_a_layer_before_anything_else_is_unbounded(bend):
    assert all(computation_graph(nn.Sequential(nn.Linear(4, 4), bend, nn.Linear(4, 4)), ROW).unbounded)


def test_only_the_last_layer_before_a_rectifier_is_bounded():
    net = Net(
        lambda net, x: net.c(torch.relu(net.a(x) + net.b(x))), a=nn.Linear(4, 4), b=nn.Linear(4, 4), c=nn.Linear(4, 4)
    )
    assert all(computation_graph(net, ROW).unbounded)  # a sum lies between


# Distances ------------------------------------------------------------------------------------------------------------


def shortest_paths(graph, cutoff):
    """As networkx finds them along the edges of ``graph``."""
    known = networkx.DiGraph(edges(graph))
    known.add_nodes_from(range(len(graph)))
    distances = torch.zeros(len(graph), len(graph), dtype=torch.int16)
    for i, lengths in networkx.all_pairs_shortest_path_length(known, cutoff=cutoff):
        for j, length in lengths.items():
            distances[i, j] = length
    return distances


@pytest.mark.parametrize("cutoff", [1, 3, 50, 400])
def test_distances_are_the_shortest_paths_of_networkx_up_to_the_cutoff(cutoff):
    for net, inputs in [
        (VisionTransformer(depth=4, width=12, n_heads=3, patch=16, image_size=32), IMAGE),
        (transformers.ResNetForImageClassification(small_resnet()), torch.zeros(1, 3, 64, 64)),
    ]:
        graph = computation_graph(net, inputs, cutoff=cutoff)
        assert torch.equal(graph.distances, shortest_paths(graph, cutoff))
        assert graph.distances.dtype == torch.int16
        assert graph.distances.max() <= cutoff


def test_order_is_topological_and_starts_at_the_input():
    graph = computation_graph(transformers.ResNetForImageClassification(small_resnet()), torch.zeros(1, 3, 64, 64))
    assert graph.kinds[0] == "input"
    assert all(i < j for i, j in edges(graph))
    assert (computation_graph(vit(), IMAGE, cutoff=500).distances[0, 1:] > 0).all()  # everything depends on the input


@given(st.lists(st.sets(st.integers(0, 5), min_size=1), min_size=1, max_size=6))
@settings(max_examples=40)
def test_wiring_of_any_network_of_linear_layers_is_found(wiring):
    wiring = [sorted({source % (i + 1) for source in sources}) for i, sources in enumerate(wiring)]
    layers = nn.ModuleList(nn.Linear(4, 4, bias=False) for _ in wiring)

    def run(net, x):
        outputs = [x]
        for layer, sources in zip(net.layers, wiring, strict=True):
            outputs.append(layer(sum(outputs[source] for source in sources)))
        return sum(outputs)

    expected = networkx.DiGraph()
    last = 0  # sums are numbered like layers, from "sum 1"; the last one adds up all outputs
    for i, sources in enumerate([*wiring, range(len(wiring) + 1)], start=1):
        # Python's sum adds one after the other, each time a node.
        before = f"layer {sources[0]}"
        for source in sources[1:]:
            last += 1
            expected.add_edges_from([(before, f"sum {last}"), (f"layer {source}", f"sum {last}")])
            before = f"sum {last}"
        if i <= len(wiring):
            expected.add_edge(before, f"layer {i}")

    graph = computation_graph(Net(run, layers=layers), ROW)
    found = networkx.DiGraph(edges(graph))
    for i, kind in enumerate(graph.kinds):
        found.nodes[i]["name"] = graph.targets[i][0].name if kind == "linear" else kind
    for node in expected:
        kind, number = node.split()
        named = {"sum": "sum", "layer": "input" if number == "0" else f"layers.{int(number) - 1}.weight"}
        expected.nodes[node]["name"] = named[kind]
    same = networkx.algorithms.isomorphism.categorical_node_match("name", None)
    assert networkx.is_isomorphic(found, expected, node_match=same)


# What the graph does not depend on ------------------------------------------------------------------------------------


class Residual(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.main, self.skip, self.norm = nn.Linear(4, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8)

    def forward(self, x):
        x = self.stem(x)
        return self.norm(self.main(x).relu() + self.skip(x))


class ResidualInOtherWords(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.zeta = nn.LayerNorm(8), nn.Linear(8, 8)
        self.inner = nn.ModuleDict({"x": nn.Linear(8, 8), "w": nn.Linear(4, 8)})

    def forward(self, y):
        y = self.inner["w"](y)
        straight = self.zeta(y)
        return layer_norm(straight + torch.relu(self.inner["x"](y)), (8,), self.a.weight, self.a.bias)


def test_names_registration_and_branch_order_do_not_matter():
    a, b = computation_graph(Residual(), ROW), computation_graph(ResidualInOtherWords(), ROW)
    assert_same(a, b)
    translated = {"inner.w": "stem", "inner.x": "main", "zeta": "skip", "a": "norm"}
    for one, other in zip(a.targets, b.targets, strict=True):
        names = [translated[t.name.rpartition(".")[0]] + "." + t.name.rpartition(".")[2] for t in other]
        assert [t.name for t in one] == names


def test_networks_that_differ_in_names_alone_get_equal_predictions(seed):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        hypernet = GraphHyperNetwork(hidden=16, n_layers=1, n_heads=2, rank=3, max_side=64)
    graphs = [computation_graph(net, ROW) for net in (Residual(), ResidualInOtherWords())]
    one, other = (hypernet(graph)[0] for graph in graphs)
    for a, b in zip(graphs[0].targets, graphs[1].targets, strict=True):
        for t, u in zip(a, b, strict=True):
            assert torch.equal(one[t.name], other[u.name])


def test_the_way_attention_is_computed_does_not_matter():
    eager, fused = (computation_graph(vit(attn_implementation=way), IMAGE) for way in ("eager", "sdpa"))
    assert_same(eager, fused)
    assert eager.targets == fused.targets


@pytest.mark.parametrize(
    ("net", "inputs"),
    [
        (vit(), IMAGE),
        (
            nn.TransformerEncoder(
                nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 2, enable_nested_tensor=False
            ),
            torch.ones(1, 3, 8),
        ),
        (nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.SiLU(), nn.AdaptiveMaxPool2d(1)), IMAGE),
        (nn.Sequential(nn.Linear(4, 8), nn.RMSNorm(8), nn.GroupNorm(2, 8)), ROW),
    ],
)
def test_following_shapes_and_data_give_the_same_graph(net, inputs):
    shapes, data = (computation_graph(net, inputs, follow=way) for way in ("shapes", "data"))
    assert_same(shapes, data)
    assert shapes.targets == data.targets


def test_a_second_graph_is_equal_and_an_input_of_another_batch_size_too():
    net = vit()
    assert_same(computation_graph(net, IMAGE), computation_graph(net, torch.zeros(2, 3, 32, 32)))


def test_one_input_a_sequence_and_keywords_are_all_accepted():
    net = vit()
    graph = computation_graph(net, IMAGE)
    assert_same(graph, computation_graph(net, (IMAGE,)))
    assert_same(graph, computation_graph(net, {"pixel_values": IMAGE}))


# What it does depend on -----------------------------------------------------------------------------------------------


def node_labels(graph):
    return sorted(zip(graph.kinds, map(tuple, graph.shapes.tolist()), graph.unbounded, strict=True))


def test_one_more_layer_of_a_transformer_adds_exactly_its_nodes():
    sizes = {"width": 12, "n_heads": 3, "patch": 16, "image_size": 32}
    short, long = (computation_graph(VisionTransformer(depth=depth, **sizes), IMAGE) for depth in (2, 3))
    added = node_labels(long)
    for label in node_labels(short):
        added.remove(label)
    square, vector = (12, 12, 1, 1), (12, 1, 1, 1)
    nothing = (0, 0, 0, 0)
    assert sorted(added) == sorted(
        [
            *[("layer_norm", vector, True)] * 2,
            *[(kind, square, True) for kind in ("query", "key", "value", "linear")],
            *[("bias", vector, True)] * 5,
            ("attention", nothing, True),
            *[("sum", nothing, True)] * 2,
            ("linear", (48, 12, 1, 1), False),
            ("bias", (48, 1, 1, 1), True),
            ("linear", (12, 48, 1, 1), True),
        ]
    )
    common = len(short) - 3  # norm and head with its bias come last
    assert short.kinds[:common] == long.kinds[:common]
    assert torch.equal(short.distances[:common, :common], long.distances[:common, :common])
    assert short.kinds[common:] == long.kinds[-3:]


@pytest.mark.parametrize(
    "other",
    [
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 4)),  # another head
        nn.Sequential(nn.Linear(4, 9), nn.ReLU(), nn.Linear(9, 3)),  # width
        nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)),  # gain
        nn.Sequential(nn.Linear(4, 8, bias=False), nn.ReLU(), nn.Linear(8, 3)),
        nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3), nn.ReLU()),  # no head
    ],
)
def test_digest_tells_architectures_apart(other):
    net = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3))
    assert computation_graph(net, ROW).digest != computation_graph(other, ROW).digest


def test_digest_tells_wirings_apart():
    parts = {name: nn.Linear(4, 4, bias=False) for name in "abc"}
    long = computation_graph(Net(lambda net, x: net.c(net.b(net.a(x)) + x), **parts), ROW)
    short = computation_graph(Net(lambda net, x: net.c(net.b(y := net.a(x)) + y), **parts), ROW)
    assert long.kinds == short.kinds
    assert long.digest != short.digest


# Real architectures ---------------------------------------------------------------------------------------------------


def small_resnet():
    return transformers.ResNetConfig(
        embedding_size=8, hidden_sizes=[8, 16], depths=[1, 2], layer_type="basic", num_labels=5
    )


@pytest.mark.parametrize(("layers", "width", "heads"), [(12, 768, 12), (24, 1024, 16)], ids=["ViT-B/16", "ViT-L/16"])
def test_every_parameter_of_a_large_vision_transformer_is_predicted(layers, width, heads):
    sizes = {"hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads}
    config = transformers.ViTConfig(**sizes, intermediate_size=4 * width, num_labels=1000)
    with torch.device("meta"):
        net = transformers.ViTForImageClassification(config)
    graph = computation_graph(net, torch.zeros(1, 3, 224, 224))
    assert graph.n_parameters == n_parameters(net)
    assert (graph.kept, graph.head, graph.n_classes) == ((), "classifier", 1000)


IDS = {"input_ids": torch.ones(1, 7, dtype=torch.long)}
TEXT = {"vocab_size": 50, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}


@pytest.mark.parametrize(
    ("make", "inputs", "head"),
    [
        (lambda: transformers.ViTModel(transformers.ViTConfig(**VIT)), IMAGE, None),
        (lambda: transformers.DeiTForImageClassification(transformers.DeiTConfig(**VIT)), IMAGE, "classifier"),
        (
            lambda: transformers.DeiTForImageClassificationWithTeacher(transformers.DeiTConfig(**VIT)),
            IMAGE,
            "cls_classifier",
        ),
        (lambda: transformers.ResNetForImageClassification(small_resnet()), torch.zeros(1, 3, 64, 64), "classifier.1"),
        (
            lambda: transformers.SwinForImageClassification(
                transformers.SwinConfig(
                    image_size=32, patch_size=2, embed_dim=8, depths=[2], num_heads=[2], window_size=4
                )
            ),
            IMAGE,
            "classifier",
        ),
        (
            lambda: transformers.ConvNextForImageClassification(
                transformers.ConvNextConfig(hidden_sizes=[8, 16], depths=[1, 1], num_stages=2)
            ),
            torch.zeros(1, 3, 64, 64),
            "classifier",
        ),
        (
            lambda: transformers.EfficientNetForImageClassification(
                transformers.EfficientNetConfig(
                    width_coefficient=0.25, depth_coefficient=0.3, hidden_dim=320, depthwise_padding=[5, 10]
                )
            ),
            torch.zeros(1, 3, 64, 64),
            "classifier",
        ),
        (lambda: transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT)), IDS, "classifier"),
    ],
    ids=lambda value: "" if callable(value) or not isinstance(value, str) else value,
)
def test_every_parameter_of_a_hugging_face_model_is_predicted(make, inputs, head):
    net = make()
    graph = computation_graph(net, inputs)
    statistics = {name for name, _ in net.named_buffers() if "running" in name}
    assert graph.n_parameters == n_parameters(net)
    assert set(graph.kept) == statistics
    assert graph.head == head
    assert {t.name: t.shape for targets in graph.targets for t in targets} == {
        name: tuple(parameter.shape) for name, parameter in net.named_parameters()
    }


@pytest.mark.parametrize("way", ["eager", "sdpa"])
def test_a_mask_adds_nothing_to_the_graph(way):
    net = transformers.BertForSequenceClassification(transformers.BertConfig(**TEXT, attn_implementation=way))
    masked = {**IDS, "attention_mask": torch.tensor([[1, 1, 1, 1, 1, 0, 0]])}
    plain, hidden = (computation_graph(net, inputs, follow="data") for inputs in (IDS, masked))
    assert_same(plain, hidden)


def test_products_of_inputs_are_no_masks():
    net = Net(lambda net, x: net.layer(x @ x.mT + x.mean()), layer=nn.Linear(5, 3))
    graph = computation_graph(net, torch.zeros(1, 5, 4))
    assert graph.kinds == ("input", "linear", "bias")


def test_batch_norms_of_any_size_have_their_statistics_kept():
    net = nn.Sequential(nn.Conv1d(3, 8, 3), nn.BatchNorm1d(8), nn.BatchNorm1d(8, track_running_stats=False))
    graph = computation_graph(net, torch.zeros(1, 3, 9))
    assert graph.kept == ("1.running_mean", "1.running_var")


# The head -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("tail", "head"),
    [
        ([nn.Linear(8, 3)], "1"),
        ([nn.Linear(8, 3, bias=False)], "1"),
        ([nn.Linear(8, 3), nn.LogSoftmax(-1)], "1"),
        ([nn.Linear(8, 3), nn.ReLU()], None),
        ([nn.Linear(8, 3), nn.Tanh()], None),
        ([nn.Linear(8, 3), nn.LayerNorm(3)], None),
        ([nn.Linear(8, 3), nn.Unflatten(1, (3, 1))], None),
    ],
)
def test_head_is_the_linear_layer_whose_output_is_returned(tail, head):
    graph = computation_graph(nn.Sequential(nn.Linear(4, 8), *tail), ROW)
    assert (graph.head, graph.n_classes) == (head, 3 if head else None)


def test_head_is_known_where_rows_are_picked_by_the_input():
    def run(net, ids):
        return net.score(net.words(ids))[torch.arange(len(ids)), (ids != 0).sum(-1) - 1]

    net = Net(run, words=nn.Embedding(11, 6), score=nn.Linear(6, 3, bias=False))
    assert computation_graph(net, torch.ones(2, 7, dtype=torch.long)).head == "score"


def test_head_may_be_the_model_itself():
    assert computation_graph(nn.Linear(4, 3), ROW).head == ""


def test_a_matrix_that_is_no_module_is_no_head_and_takes_nothing_beside_it_along():
    net = Net(lambda net, x: nn.functional.linear(x + net.shift, net.matrix), shift=nn.Parameter(ROW[0] + 1))
    net.matrix = nn.Parameter(torch.ones(3, 4))
    graph = computation_graph(net, ROW)
    assert (graph.head, graph.n_classes) == (None, None)
    assert graph.kept == ()
    net = Net(lambda net, x: nn.functional.linear(x + net.shift, net.weight), shift=nn.Parameter(ROW[0] + 1))
    net.weight = nn.Parameter(torch.ones(3, 4))
    wider = with_classes(computation_graph(net, ROW), 7)
    assert [target.shape for targets in wider.targets for target in targets] == [(4,), (7, 4)]


# Parameters that are shared, or that no node predicts -----------------------------------------------------------------


def test_tied_weights_are_predicted_once():
    net = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    net[2].weight = net[0].weight
    graph = computation_graph(net, ROW)
    assert graph.tied == {"2.weight": "0.weight"}
    assert graph.kinds == ("input", "linear", "bias", "linear", "bias")
    assert [tuple(t.name for t in targets) for targets in graph.targets] == [
        *((), ("0.weight",), ("0.bias",), (), ("2.bias",)),
    ]
    assert graph.shapes[3].tolist() == [0, 0, 0, 0]
    assert graph.n_parameters == n_parameters(net)
    assert graph.n_classes == 4  # the head is known, whoever predicts it


def test_tied_embeddings_of_a_language_model_are_predicted_once():
    net = transformers.GPT2LMHeadModel(
        transformers.GPT2Config(vocab_size=50, n_positions=16, n_embd=8, n_layer=1, n_head=2)
    )
    graph = computation_graph(net, IDS)
    assert graph.tied == {"transformer.wte.weight": "lm_head.weight"}
    assert graph.n_parameters == n_parameters(net)


def test_scalars_slopes_and_what_is_never_used_are_kept():
    net = Net(
        lambda net, x: net.bend(net.layer(x)) * net.scale,
        layer=nn.Linear(4, 4),
        bend=nn.PReLU(4),
        scale=nn.Parameter(torch.ones(())),
        idle=nn.Linear(2, 2),
    )
    graph = computation_graph(net, ROW)
    assert graph.kept == ("bend.weight", "idle.bias", "idle.weight", "scale")


def test_layers_with_a_single_output_are_predicted_and_what_scales_by_one_number_is_not():
    net = Net(
        lambda net, x: net.norm(net.layer(x)) * net.scale,
        layer=nn.Linear(4, 1),
        norm=nn.LayerNorm(1),
        scale=nn.Parameter(torch.ones(1)),
    )
    graph = computation_graph(net, ROW)
    assert graph.kept == ("scale",)
    assert graph.n_parameters == 4 + 1 + 2


def test_an_unknown_operation_is_other_and_named_in_a_warning():
    net = nn.Sequential(
        nn.Linear(4, 4), Net(lambda net, x: torch.atan2(x, net.angle), angle=nn.Parameter(torch.ones(4)))
    )
    with pytest.warns(HeedfulWarning) as caught:
        graph = computation_graph(net, ROW)
    assert str(caught[0].message) == (
        "Parameters of Sequential enter operations in ways that have no kind of node: 1.angle (in atan2). Those nodes are "
        "'other', and the parameters are kept as they are."
    )
    assert graph.kinds == ("input", "linear", "bias", "other")
    assert graph.kept == ("1.angle",)


def test_a_parameter_added_in_more_than_tokens_and_channels_is_kept():
    net = Net(lambda net, x: net.conv(x + net.picture), conv=nn.Conv2d(3, 8, 3), picture=nn.Parameter(IMAGE + 1))
    with pytest.warns(HeedfulWarning, match=r"picture \(in add\)"):
        graph = computation_graph(net, IMAGE)
    assert graph.kinds == ("input", "other", "conv", "bias")
    assert graph.kept == ("picture",)


def test_weights_made_of_several_parameters_are_kept():
    net = nn.utils.parametrizations.weight_norm(nn.Linear(4, 3))
    with pytest.warns(HeedfulWarning, match=r"weight\.original0 \(in linear\), parametrizations\.weight\.original1"):
        graph = computation_graph(net, ROW)
    assert graph.kinds == ("input", "other", "bias")
    assert graph.kept == ("parametrizations.weight.original0", "parametrizations.weight.original1")


def test_weights_made_of_one_parameter_are_predicted():
    def run(net, x):
        weight = net.conv.weight
        weight = (weight - weight.mean((1, 2, 3), keepdim=True)) / weight.std((1, 2, 3), keepdim=True)
        return nn.functional.conv2d(x, weight, net.conv.bias)

    graph = computation_graph(Net(run, conv=nn.Conv2d(3, 8, 3)), IMAGE)
    assert graph.kinds == ("input", "conv", "bias")
    assert graph.targets[1] == (Target("conv.weight", (8, 3, 3, 3), "weight"),)


def test_what_is_written_into_a_buffer_comes_out_of_it():
    def run(net, x):
        both = torch.zeros(1, 2, 4)
        both[:, 0] = net.a(x)
        both[:, 1] = x
        return net.b(both)

    for follow in ("shapes", "data"):
        graph = computation_graph(Net(run, a=nn.Linear(4, 4), b=nn.Linear(4, 3)), ROW, follow=follow)
        assert edges(graph) == {(0, 1), (1, 2), (2, 3), (0, 3), (3, 4)}


# What cannot be followed ----------------------------------------------------------------------------------------------


class Undecided(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(4, 4), nn.Linear(4, 3)

    def forward(self, x):
        if x.sum() > 0:
            return self.up(x)
        return self.down(x)


def test_a_path_that_depends_on_values_is_refused_with_its_line():
    with pytest.raises(UnsupportedModelError) as caught:
        computation_graph(Undecided(), ROW)
    line = inspect.getsourcelines(Undecided.forward)[1] + 1
    assert str(caught.value) == (
        "The path through Undecided depends on values, or has an operation without a rule for shapes, at\n"
        f"  {__file__}:{line}: if x.sum() > 0:\n"
        "Make it depend on shapes alone, or pass follow='data': the forward pass is then computed on example_inputs, and "
        "the graph is that of the path they take. (RuntimeError: Tensor.item() cannot be called on meta tensors)"
    )


@pytest.mark.parametrize("look", [lambda x: x.nonzero(), lambda x: x.numpy(), lambda x: x.tolist(), lambda x: x[x > 0]])
def test_every_way_to_look_at_values_is_recognised(look):
    with pytest.raises(UnsupportedModelError, match="follow='data'"):
        computation_graph(Net(lambda _, x: look(x)), ROW)


@pytest.mark.parametrize(("value", "layer"), [(1.0, "up"), (-1.0, "down")])
def test_following_data_gives_the_path_that_they_take(value, layer):
    net = Undecided()
    graph = computation_graph(net, torch.full((1, 4), value), follow="data")
    assert [t.name for targets in graph.targets for t in targets] == [f"{layer}.weight", f"{layer}.bias"]
    assert graph.head == layer
    assert len(graph.kept) == 2


def test_integers_may_be_looked_at():
    net = Net(lambda net, ids: net.words(ids) if ids.max() < 11 else None, words=nn.Embedding(11, 6))
    assert computation_graph(net, torch.zeros(1, 7, dtype=torch.long)).kinds == ("input", "embedding")


def test_what_is_no_input_is_refused():
    message = r"must be a tensor, a sequence of arguments or a mapping .*; got NoneType"
    with pytest.raises(InputError, match=message), as_users_have_it():
        computation_graph(nn.Linear(4, 3), None)


def test_inputs_that_do_not_fit_are_an_input_error():
    with pytest.raises(
        InputError, match=re.escape("Linear fails on example_inputs, at\n  a layer of torch\nRuntimeError: ")
    ):
        computation_graph(nn.Linear(4, 3), torch.zeros(1, 5))


def test_data_cannot_be_followed_through_a_model_without_values():
    with torch.device("meta"):
        net = nn.Linear(4, 3)
    assert computation_graph(net, ROW).n_parameters == 15
    with pytest.raises(InputError) as caught:
        computation_graph(net, ROW, follow="data")
    assert str(caught.value) == (
        "follow='data' needs values, and Linear or example_inputs are on the meta device. Give them some first "
        "(model.to_empty(device='cpu') and an initialisation), or take follow='shapes'."
    )


@pytest.mark.parametrize("cutoff", [0, 2**15, True])
def test_cutoff_must_fit(cutoff):
    with pytest.raises(ParameterError, match="cutoff must be an int >= 1 and <= 32767"):
        computation_graph(nn.Linear(4, 3), ROW, cutoff=cutoff)


@pytest.mark.parametrize("follow", ["shapes", "data"])
def test_the_model_is_left_as_it_was(follow):
    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.Dropout(0.5), nn.Flatten(), nn.Linear(8 * 30 * 30, 2))
    net[1].eval()
    before, modes = copy.deepcopy(net.state_dict()), [module.training for module in net.modules()]
    random, fused = torch.random.get_rng_state(), torch.backends.mha.get_fastpath_enabled()
    computation_graph(net, IMAGE, follow=follow)
    with pytest.raises(InputError):
        computation_graph(net, ROW, follow=follow)
    assert [module.training for module in net.modules()] == modes
    assert torch.backends.mha.get_fastpath_enabled() == fused
    assert torch.equal(torch.random.get_rng_state(), random)
    for name, tensor in net.state_dict().items():
        assert torch.equal(tensor, before[name])
    assert all(parameter.requires_grad and not parameter.is_meta for parameter in net.parameters())


@pytest.mark.parametrize("follow", ["shapes", "data"])
def test_what_the_model_writes_into_stays_as_it_was(follow):
    def run(net, x):
        net.count += 1
        return net.layer(x.relu_())

    net = Net(run, layer=nn.Linear(4, 3))
    net.register_buffer("count", torch.zeros(()))
    x = -torch.ones(1, 4)
    computation_graph(net, x, follow=follow)
    assert net.count == 0
    assert (x == -1).all()


def test_fused_attention_is_attention():
    net = Net(
        lambda net, x: scaled_dot_product_attention(net.q(x), net.k(x), net.v(x)), **{p: nn.Linear(4, 4) for p in "qkv"}
    )
    for follow in ("shapes", "data"):
        graph = computation_graph(net, torch.zeros(1, 2, 5, 4), follow=follow)
        assert sorted(graph.kinds) == sorted(["input", "query", "key", "value", "bias", "bias", "bias", "attention"])


def test_graphs_are_hashable_and_have_a_length():
    graph = computation_graph(nn.Linear(4, 3), ROW)
    assert isinstance(graph, ComputationGraph)
    assert len(graph) == 3
    assert graph in {graph}
