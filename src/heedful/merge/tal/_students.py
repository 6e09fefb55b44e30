"""Networks that training runs with predicted weights, and the changes to their graphs that it needs."""

import dataclasses
from collections.abc import Callable, Collection
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import pad

from heedful._validation import require_number
from heedful.errors import ParameterError, UnsupportedModelError
from heedful.merge.tal.ghn import belongs_to_head
from heedful.merge.tal.graph import ComputationGraph, Target

PROJECTOR = "teacher_projector.weight"
_KEPT_IN_MEMORY = 2**25  # parameters of all networks that are built once and kept: 128 MiB


@runtime_checkable
class Pool(Protocol):
    """``ArchitecturePool``, or any sequence of pairs: a function that builds a network, and the network's graph."""

    def __len__(self) -> int: ...
    def __getitem__(self, index: int) -> Any: ...


class Student(NamedTuple):
    """A network without weights of its own that matter, and the graph to predict them from."""

    model: nn.Module
    graph: ComputationGraph

    def run(self, weights: dict[str, Tensor], x: Tensor) -> tuple[Float[Tensor, "n classes"], Float[Tensor, "n width"]]:
        """Logits with these weights, and what the head was given: the features of the class token, where there is one."""
        seen: list[Tensor] = []
        head = self.model.get_submodule(head_weight(self.graph).name.rpartition(".")[0])
        hook = head.register_forward_pre_hook(lambda _, inputs: seen.append(inputs[0]))
        try:
            output = functional_call(self.model, weights, (x,))
        finally:
            hook.remove()
        return (output if isinstance(output, Tensor) else output.logits), seen[-1]


class Students:
    """Draws different networks of a pool for each step, with the heads and projectors that the step needs."""

    def __init__(self, pool: Pool, n_architectures: int, generator: torch.Generator, device: torch.device):
        require_number(n_architectures, "n_architectures", low=1, integer=True)
        if len(pool) < n_architectures:
            raise ParameterError(
                f"The pool has {len(pool)} architectures, and n_architectures={n_architectures} different ones are to be "
                "drawn for each step. Make the pool larger, or n_architectures smaller."
            )
        self.pool, self.n_architectures, self.generator, self.device = pool, n_architectures, generator, device
        self._models: dict[ComputationGraph, nn.Module] = {}
        self._graphs: dict[tuple[ComputationGraph, int, int | None], ComputationGraph] = {}
        self._room = _KEPT_IN_MEMORY

    @property
    def n_classes(self) -> int:
        """Classes that the networks of the pool are built for."""
        return head_weight(self.pool[0][1]).shape[0]

    @property
    def widest(self) -> int:
        """Most features that a head of the pool is given."""
        return max(head_weight(self.pool[i][1]).shape[1] for i in range(len(self.pool)))

    def draw(self, n_classes: int, n_features: int | None) -> list[Student]:
        """Students with heads for so many classes, and a projector to so many features if not None."""
        drawn = torch.randperm(len(self.pool), generator=self.generator)[: self.n_architectures].tolist()
        members = [self.pool[i] for i in drawn]
        return [Student(self._model(*member), self._graph(member[1], n_classes, n_features)) for member in members]

    def _model(self, build: Callable[[], nn.Module], graph: ComputationGraph) -> nn.Module:
        if graph in self._models:
            return self._models[graph]
        with torch.random.fork_rng(devices=[]):
            model = build().to(self.device).train()
        size = sum(parameter.numel() for parameter in model.parameters())
        if size <= self._room:
            self._room -= size
            self._models[graph] = model
        return model

    def _graph(self, graph: ComputationGraph, n_classes: int, n_features: int | None) -> ComputationGraph:
        key = graph, n_classes, n_features
        if key not in self._graphs:
            changed = with_classes(graph, n_classes)
            self._graphs[key] = changed if n_features is None else with_projector(changed, n_features)
        return self._graphs[key]


def head_weight(graph: ComputationGraph) -> Target:
    """The weight of the class head."""
    return graph.targets[_head_node(graph)][0]


def with_classes(graph: ComputationGraph, n_classes: int) -> ComputationGraph:
    """The graph of the same network with another number of classes."""
    if head_weight(graph).shape[0] == n_classes:
        return graph
    shapes, changed = graph.shapes.clone(), []
    for node, targets in enumerate(graph.targets):
        if any(belongs_to_head(target, graph) for target in targets):
            shapes[node, 0] = n_classes
            targets = tuple(target._replace(shape=(n_classes, *target.shape[1:])) for target in targets)
        changed.append(targets)
    digest = f"{graph.digest}, {n_classes} classes"
    return dataclasses.replace(graph, shapes=shapes, targets=tuple(changed), n_classes=n_classes, digest=digest)


def with_projector(graph: ComputationGraph, n_features: int) -> ComputationGraph:
    """The graph with a second linear layer beside the head, from the same inputs to ``n_features``."""
    node, width = _head_node(graph), head_weight(graph).shape[1]
    distances = pad(graph.distances, (0, 1, 0, 1))
    distances[:-1, -1] = graph.distances[:, node]
    return dataclasses.replace(
        graph,
        kinds=(*graph.kinds, graph.kinds[node]),
        shapes=torch.cat([graph.shapes, graph.shapes.new_tensor([[n_features, width, 1, 1]])]),
        distances=distances,
        targets=(*graph.targets, (Target(PROJECTOR, (n_features, width), "weight"),)),
        unbounded=(*graph.unbounded, True),
        digest=f"{graph.digest}, {n_features} features",
    )


def without(graph: ComputationGraph, names: Collection[str]) -> ComputationGraph:
    """The graph, asked for no prediction of these parameters."""
    targets = tuple(tuple(target for target in targets if target.name not in names) for targets in graph.targets)
    return dataclasses.replace(graph, targets=targets)


def _head_node(graph: ComputationGraph) -> int:
    for node, targets in enumerate(graph.targets):
        if any(belongs_to_head(target, graph) and target.role == "weight" for target in targets):
            return node
    raise UnsupportedModelError(
        "Every network of a pool must end in a linear layer (a module) with a row for each class, and one does not. Build "
        "the pool of networks that return logits."
    )
