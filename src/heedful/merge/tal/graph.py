"""The graph of a network: what computes, what has parameters of which shape, and what feeds what.

One forward pass is watched operation by operation, below modules and their names, so that networks which compute the same
have the same graph: Hugging Face's ViT and ours, eager and fused attention. By default tensors are replaced by their
shapes: nothing is computed, and the size of the model does not matter.
"""

import hashlib
import itertools
import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from jaxtyping import Int, Int16
from torch import Tensor, nn

from heedful._validation import require_choice, require_number
from heedful.errors import HeedfulWarning
from heedful.merge.tal._recorder import Recorder, Target, record

__all__ = ["PRIMITIVES", "ComputationGraph", "Target", "computation_graph"]

PRIMITIVES: tuple[str, ...] = (
    "input",
    "conv",
    "depthwise",
    "linear",
    "query",
    "key",
    "value",
    "bias",
    "batch_norm",
    "layer_norm",
    "group_norm",
    "scale",
    "embedding",
    "position",
    "token",
    "sum",
    "product",
    "concat",
    "attention",
    "max_pool",
    "avg_pool",
    "global_pool",
    "other",
)
"""Every kind of node, in a fixed order: their numbers are part of a saved hypernetwork. New kinds go to the end.

"query", "key" and "value" are linear layers that feed one of the three inputs of an attention (a layer that makes all
three is "linear"): without them the three would look alike to a graph network and be given the same weights."""

_BETWEEN = ("bias", "batch_norm", "layer_norm", "group_norm", "scale", "max_pool", "avg_pool")


@dataclass(frozen=True, eq=False)
class ComputationGraph:
    """A network as a directed acyclic graph of operations.

    Attributes
    ----------
    kinds : tuple of str
        Kind of each node, from ``PRIMITIVES``; node 0 is "input". Edges lead from lower to higher numbers.
    shapes : Int[Tensor, "nodes 4"]
        (c_out, c_in, k_h, k_w) of each target of the node, 0 where a node has none: (c, 1, 1, 1) for biases, norms and
        tokens, (out, in, 1, 1) for linear layers and embeddings, (1, d, s, s) with s = floor(sqrt(T)) for positions of
        shape (T, d).
    distances : Int16[Tensor, "nodes nodes"]
        Length of the shortest path from i to j if it is between 1 and the cutoff, else 0. Where it is 1 is an edge.
    targets : tuple of tuple of Target
        The parameters of each node: none or one, and two for a norm.
    unbounded : tuple of bool
        False for a convolution or linear layer whose output meets a nonlinearity like ReLU before the next of them (a
        bias, norm or pooling may lie between), so that its weights need gain 2; True for depthwise and everything else.
    n_classes : int or None
        Rows of the class head: a linear module whose output, of shape (batch, n_classes), is what the model returns.
    head : str or None
        Name of the module that is the class head.
    tied : Mapping of str to str
        Parameters that are another one under a second name, and the name that has a target.
    kept : tuple of str
        What no node predicts: parameters that the forward pass does not reach or that enter in a way of their own, lone
        scalars, and running statistics of batch norms.
    digest : str
        Hash of the architecture; names do not enter.
    """

    kinds: tuple[str, ...]
    shapes: Int[Tensor, "nodes 4"]
    distances: Int16[Tensor, "nodes nodes"]
    targets: tuple[tuple[Target, ...], ...]
    unbounded: tuple[bool, ...]
    n_classes: int | None
    head: str | None
    tied: Mapping[str, str]
    kept: tuple[str, ...]
    digest: str

    def __len__(self) -> int:
        """Number of nodes."""
        return len(self.kinds)

    @property
    def n_parameters(self) -> int:
        """Numbers that the targets hold together."""
        return sum(math.prod(target.shape) for targets in self.targets for target in targets)


def computation_graph(
    model: nn.Module, example_inputs: Any, *, cutoff: int = 50, follow: Literal["shapes", "data"] = "shapes"
) -> ComputationGraph:
    """The graph of what ``model`` does with ``example_inputs``, in evaluation mode.

    Parameters
    ----------
    model : nn.Module
        Any network whose path does not depend on values: ``Sequential``s, convolutional nets, transformers, Hugging
        Face models; on any device, "meta" included. It is not changed.
    example_inputs : Tensor, sequence of Tensors, or Mapping of str to Tensor
        What the model takes: one input, positional or keyword arguments, as a batch of one. Of numbers only the shapes
        matter; integers (token ids, masks) keep their values.
    cutoff : int
        Longest distance that is recorded, >= 1.
    follow : {"shapes", "data"}
        "shapes" runs the forward pass without values, in no memory. A model that looks at values (``if x.sum() > 0``)
        cannot be followed so; "data" computes on the inputs as they are and gives the graph of the path they take.

    Raises
    ------
    UnsupportedModelError
        If the forward pass looks at values while shapes are followed. The message has the line.
    InputError
        If the forward pass fails on the example inputs, or data are to be followed through a model without values.

    Warns
    -----
    HeedfulWarning
        If a parameter enters an operation that has no kind. The node is "other", the parameter is kept.

    Notes
    -----
    *Cost.* One forward pass of Python overhead, a tenth of a second for a ViT of 12 layers of any width, and
    O(nodes · edges) for the distances.

    *Same graphs.* Order and names of modules, and the order in which parallel branches are computed, do not matter.
    Recurrent layers are unrolled over the example's steps.

    References
    ----------
    Knyazev et al.: Parameter Prediction for Unseen Deep Architectures, NeurIPS 2021, which reads such graphs from
    autograd; with shortest paths as edges.

    Examples
    --------
    >>> graph = computation_graph(nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 3)), torch.zeros(1, 4))
    >>> graph.kinds
    ('input', 'linear', 'bias', 'linear', 'bias')
    >>> graph.n_parameters, graph.head, graph.n_classes
    (67, '2', 3)
    """
    require_number(cutoff, "cutoff", low=1, high=torch.iinfo(torch.int16).max, integer=True)
    require_choice(follow, "follow", ("shapes", "data"))
    names = _canonical_names(model.named_parameters(remove_duplicate=False))
    recorder, outputs = record(model, sorted(set(names.values())), example_inputs, follow=follow)
    if unknown := sorted(recorder.unknown.keys() - recorder.predicted):
        listed = ", ".join(f"{name} (in {recorder.unknown[name]})" for name in unknown)
        warnings.warn(
            f"Parameters of {type(model).__name__} enter operations in ways that have no kind of node: {listed}. Those "
            "nodes are 'other', and the parameters are kept as they are.",
            HeedfulWarning,
            stacklevel=2,
        )

    nodes = recorder.nodes
    followers: list[list[int]] = [[] for _ in nodes]
    for i, node in enumerate(nodes):
        for pred in node.preds:
            followers[pred].append(i)
    kinds, unbounded = _seen_from_behind(recorder)
    shapes = [_shape(node.targets[0]) if node.targets else (0, 0, 0, 0) for node in nodes]
    labels = [
        repr((kinds[i], shapes[i], unbounded[i], [(target.shape, target.role) for target in node.targets]))
        for i, node in enumerate(nodes)
    ]
    order = _canonical_order(labels, [node.preds for node in nodes], followers)
    place = {node: i for i, node in enumerate(order)}
    edges = [sorted(place[pred] for pred in nodes[i].preds) for i in order]
    weight, n_classes = recorder.head(outputs) or (None, None)
    return ComputationGraph(
        kinds=tuple(kinds[i] for i in order),
        shapes=torch.tensor([shapes[i] for i in order]),
        distances=_distances(edges, cutoff),
        targets=tuple(nodes[i].targets for i in order),
        unbounded=tuple(unbounded[i] for i in order),
        n_classes=n_classes,
        head=None if weight is None else weight.rpartition(".")[0],
        tied={name: first for name, first in names.items() if name != first},
        kept=tuple(sorted({*names.values(), *recorder.statistics} - recorder.predicted)),
        digest=_hash(*(labels[i] for i in order), repr(edges), repr(n_classes)),
    )


def _seen_from_behind(recorder: Recorder) -> tuple[list[str], list[bool]]:
    """Kind of each node, and whether it is unbounded: both depend on what its output meets."""
    kinds = [node.kind for node in recorder.nodes]
    bent, feeds = set(recorder.bent), {node: set(parts) for node, parts in recorder.feeds.items()}
    for i, node in reversed(list(enumerate(recorder.nodes))):
        if node.kind in _BETWEEN:  # what it meets, the layer before it meets
            bent |= node.preds if i in bent else set()
            for pred in node.preds:
                feeds.setdefault(pred, set()).update(feeds.get(i, ()))
        if node.kind == "linear" and len(feeds.get(i, ())) == 1:
            (kinds[i],) = feeds[i]
    return kinds, [node.kind not in ("conv", "linear") or i not in bent for i, node in enumerate(recorder.nodes)]


def _shape(target: Target) -> tuple[int, int, int, int]:
    """(c_out, c_in, k_h, k_w) of a parameter."""
    shape = target.shape
    if target.role == "position":
        side = math.isqrt(shape[-2])
        return 1, shape[-1], side, side
    if target.role in ("bias", "norm", "token") or len(shape) == 1:
        return math.prod(shape), 1, 1, 1
    c_out, c_in, height = (*shape, 1)[:3]
    return c_out, c_in, height, math.prod(shape[3:])


def _canonical_names(parameters: Iterable[tuple[str, nn.Parameter]]) -> dict[str, str]:
    """Each name of a parameter, and of all the names of the same parameter the first in alphabetical order."""
    first: dict[int, str] = {}
    names = {}
    for name, parameter in sorted(parameters, key=lambda item: item[0]):
        names[name] = first.setdefault(id(parameter), name)
    return names


def _canonical_order(
    labels: Sequence[str], preds: Sequence[frozenset[int]], followers: Sequence[list[int]]
) -> list[int]:
    """An order of the nodes, edges leading forward, that depends only on labels and edges, but for equal nodes."""
    nodes = range(len(labels))
    depth, above, below = [0] * len(labels), [""] * len(labels), [""] * len(labels)
    for node in nodes:
        depth[node] = max((depth[pred] + 1 for pred in preds[node]), default=0)
        above[node] = _hash(labels[node], *sorted(above[pred] for pred in preds[node]))
    for node in reversed(nodes):
        below[node] = _hash(labels[node], *sorted(below[follower] for follower in followers[node]))
    at: dict[int, int] = {}
    for _, level in itertools.groupby(sorted(nodes, key=depth.__getitem__), key=depth.__getitem__):
        for node in sorted(
            level, key=lambda i: (labels[i], above[i], below[i], sorted(at[pred] for pred in preds[i]), i)
        ):
            at[node] = len(at)
    return list(at)


def _hash(*parts: str) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def _distances(edges: Sequence[Sequence[int]], cutoff: int) -> Int16[Tensor, "nodes nodes"]:
    """Shortest paths, from the predecessors of each node, which come before it."""
    n = len(edges)
    far = n + 1
    distances = torch.full((n, n), far)
    for node, preds in enumerate(edges):
        if preds:
            distances[:, node] = distances[:, preds].amin(1) + 1
        distances[node, node] = 0
    return distances.where((distances <= cutoff) & (distances < far), 0).to(torch.int16)
