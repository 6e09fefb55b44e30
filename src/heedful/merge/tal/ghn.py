"""A network that reads the graph of another network's operations and predicts its weights.

A transformer over the nodes of a ``ComputationGraph`` gives every operation an embedding x. A small network turns x into
two factors, of which the weight of any shape (c_out, c_in, k_h, k_w) uses the rows it needs,

    W = A[: c_out k_h] B[: c_in k_w]ᵀ,        W ← W √(β / fan-in),

so that one decoder of fixed size serves layers of every size. Where a task embedding e is given, every layer of the
transformer is modulated by it: x̂ = (1 + W_g e + b_g) · ln(x) + (W_b e + b_b).

Zhang, Ren, Urtasun: Graph HyperNetworks for Neural Architecture Search, ICLR 2019. Knyazev et al.: Can We Scale
Transformers to Predict Parameters of Diverse ImageNet Models? (GHN-3), ICML 2023. Zhou et al.: LoGAH, arXiv:2405.16287.
Learngene Tells You How to Customize: Task-Aware Parameter Initialization at Flexible Scales, ICML 2025.
"""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from torch.nn.functional import linear, pad, scaled_dot_product_attention
from torch.nn.utils.rnn import pad_sequence

from heedful._validation import require_choice, require_number
from heedful.errors import ConvergenceError, InputError, ParameterError
from heedful.merge.tal.graph import PRIMITIVES, ComputationGraph, Target

CHANNELS = (0, 1, 3, *range(8, 64, 8), *range(64, 4096, 16), *range(4096, 8193, 32))
KERNELS = (0, 1, 3, 5, 7, 9, 11, 14, 16)
_MOST_NEIGHBOURS, _FARTHEST, _LONGEST_EDGE = 100, 1000, 254
_TILE = 64
# What raw predictions are multiplied by at first. Constants as large as weights would drown the input, and the first steps
# would shrink whatever is shared, only to be rid of the logits' offset.
_GAINS = {"weight": 1.0, "embedding": 1.0, "token": 1.0, "norm": 1.0, "bias": 0.1, "position": 0.1, "head": 0.1}
_SQUASHED = {"norm": lambda p: 2 * torch.sigmoid(p / 2), "bias": lambda p: torch.tanh(p / 5)}


class GraphHyperNetwork(nn.Module):
    """Predicts the parameters of a network from its computation graph, and from a task if it was told about tasks.

    Parameters
    ----------
    hidden : int
        Width of the transformer, a multiple of 4 and of ``n_heads``. 128 is the usual size, 48 does for small nets.
    n_layers, n_heads : int
        Layers of the transformer, and attention heads of each.
    rank : int
        r >= 1: no predicted matrix has a higher rank. The decoder has O(hidden · r² + r · max_side) weights.
    max_side : int
        Most rows or columns (channels times kernel side) that a predicted tensor may have.
    task_dim : int, optional
        Size T of task embeddings; None builds no task modulation (``add_task_modulation`` can do so later).
    max_kernel : int
        Larger kernels (and grids of positions) are predicted at this side and tiled.
    decoder : {"low_rank", "tile"}
        "low_rank" is described above. "tile" predicts a dense block of 64 × 64 channels, which larger tensors repeat
        and smaller ones cut, as GHN-3 does; ``rank`` and ``max_side`` then mean nothing.
    layer_norm : bool
        Normalise the node embeddings before they are decoded.
    weight_norm : bool
        Bring predictions to the scale that a network needs: weights to variance β / fan-in with β = 2 before a ReLU and
        1 else, norms' gains into (0, 2), biases into (-1, 1). Positions stay as they are.

    Notes
    -----
    *Start.* Raw predictions begin with about unit variance, so that the first weights are scaled like Kaiming's. They are
    multiplied by a learnt number for each role, which begins at 1 for what multiplies inputs, and at 0.1 for biases,
    positions and the class head.

    *Cost* of a graph with N nodes: O(N² hidden) for the embeddings and r · c_out k_h · c_in k_w for
    each tensor.

    References
    ----------
    GHN-3, arXiv:2303.04143; LoGAH, arXiv:2405.16287; *Learngene Tells You How to Customize*, ICML 2025.

    Examples
    --------
    >>> from heedful.merge import computation_graph
    >>> net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 3))
    >>> hypernet = GraphHyperNetwork(hidden=16, n_layers=1, n_heads=2, rank=4, max_side=64)
    >>> (weights,) = hypernet(computation_graph(net, torch.zeros(1, 8)))
    >>> torch.func.functional_call(net, weights, torch.ones(5, 8)).shape
    torch.Size([5, 3])
    """

    def __init__(
        self,
        *,
        hidden: int = 128,
        n_layers: int = 5,
        n_heads: int = 16,
        rank: int = 90,
        max_side: int = 32768,
        task_dim: int | None = None,
        max_kernel: int = 16,
        decoder: Literal["low_rank", "tile"] = "low_rank",
        layer_norm: bool = True,
        weight_norm: bool = True,
    ):
        super().__init__()
        sizes = {"hidden": hidden, "n_layers": n_layers, "n_heads": n_heads, "rank": rank, "max_side": max_side}
        for name, value in {**sizes, "max_kernel": max_kernel}.items():
            require_number(value, name, low=1, integer=True)
        if hidden % 4 or hidden % n_heads:
            raise ParameterError(
                f"hidden must be a multiple of 4 and of n_heads; got hidden={hidden}, n_heads={n_heads}."
            )
        require_choice(decoder, "decoder", ("low_rank", "tile"))
        self.settings: dict[str, Any] = {
            **sizes,
            "max_kernel": max_kernel,
            "decoder": decoder,
            "layer_norm": layer_norm,
            "weight_norm": weight_norm,
        }
        self.max_kernel, self.weight_norm = max_kernel, weight_norm
        self.task_dim: int | None = None
        self.max_side = max_side if decoder == "low_rank" else math.inf
        self.primitive = nn.Embedding(len(PRIMITIVES), hidden)
        self.channel = nn.Embedding(len(CHANNELS) + 1, hidden // 4)  # the last stands for "as many as classes"
        self.kernel = nn.Embedding(len(KERNELS), hidden // 4)
        self.in_degree, self.out_degree = (nn.Embedding(_MOST_NEIGHBOURS + 1, hidden) for _ in range(2))
        self.depth = nn.Embedding(_FARTHEST + 1, hidden)
        self.edge = nn.Embedding(_LONGEST_EDGE + 3, hidden)
        self.edge_bias = nn.Sequential(nn.Linear(2 * hidden, hidden), nn.ReLU(), nn.Linear(hidden, n_heads))
        self.layers = nn.ModuleList(_Layer(hidden, n_heads) for _ in range(n_layers))
        self.norm = nn.LayerNorm(hidden) if layer_norm else nn.Identity()
        self.decoder = (
            _LowRankDecoder(hidden, rank, max_side) if decoder == "low_rank" else _TileDecoder(hidden, max_kernel)
        )
        self.gains = nn.ParameterDict({role: torch.tensor(gain) for role, gain in _GAINS.items()})
        for module in self.modules():
            if isinstance(module, nn.Embedding):
                nn.init.trunc_normal_(module.weight, std=module.embedding_dim**-0.5)
        if task_dim is not None:
            self.add_task_modulation(task_dim)

    def add_task_modulation(self, task_dim: int) -> None:
        """Give every layer a ``TaskModulation`` for embeddings of size ``task_dim``; predictions stay as they are.

        Raises
        ------
        ParameterError
            If there is modulation for embeddings of another size already.
        """
        require_number(task_dim, "task_dim", low=1, integer=True)
        if self.task_dim not in (None, task_dim):
            raise ParameterError(
                f"This hypernetwork is modulated by task embeddings of size {self.task_dim}; got size {task_dim}. Embed "
                "every task with the same teacher."
            )
        if self.task_dim is None:
            weight = self.primitive.weight
            for layer in self.layers:
                layer.modulation = TaskModulation(task_dim, weight.shape[1], device=weight.device, dtype=weight.dtype)
            self.task_dim = task_dim

    def forward(
        self, graphs: ComputationGraph | Sequence[ComputationGraph], task: Float[Tensor, " task_dim"] | None = None
    ) -> list[dict[str, Tensor]]:
        """The parameters of each network by name, differentiable with respect to this one.

        Parameters
        ----------
        graphs : ComputationGraph or sequence of them
            They are predicted together: tensors of equal shape in one product.
        task : Float[Tensor, " task_dim"], optional
            Embedding of the task. None leaves the modulation out.

        Returns
        -------
        list of dict
            One for each graph: name of a parameter -> tensor of its shape, ready for ``torch.func.functional_call``.

        Raises
        ------
        InputError
            If a tensor is too large for ``max_side``, or ``task`` has the wrong size or is not finite.
        """
        graphs = [graphs] if isinstance(graphs, ComputationGraph) else list(graphs)
        predictions: list[dict[str, Tensor]] = [{} for _ in graphs]
        for i, _, name, tensor in self._decode(graphs, self.embed(graphs, task)):
            predictions[i][name] = tensor
        return predictions

    def predict(
        self, graph: ComputationGraph, task: Float[Tensor, " task_dim"] | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        """Name and value of one parameter after the other, without gradients.

        What ``forward`` gives, in little memory: no more than one tensor as large as the largest is alive at a time.

        Raises
        ------
        ConvergenceError
            If a prediction is not finite; the message names the node.
        """
        budget = max((math.prod(t.shape) for targets in graph.targets for t in targets), default=0)
        with torch.no_grad():
            decoded = self._decode([graph], self.embed([graph], task), budget=budget)
        while True:
            with torch.no_grad():  # not around the yield: there the mode is the caller's
                step = next(decoded, None)
            if step is None:
                return
            _, node, name, tensor = step
            if not torch.stack(tensor.aminmax()).isfinite().all():
                raise ConvergenceError(
                    f"The prediction of {name} (node {node}, {graph.kinds[node]}) has entries that are NaN or infinite: "
                    "the hypernetwork has diverged. Train it again with a lower lr or clip_norm."
                )
            yield name, tensor

    def too_large(self, graph: ComputationGraph) -> list[str]:
        """Names of the parameters that have a side beyond ``max_side``."""
        return [
            target.name
            for recipe, _, targets in _work(graph, self.max_kernel)
            for target in targets
            if max(recipe.sides) > self.max_side
        ]

    def embed(
        self, graphs: Sequence[ComputationGraph], task: Tensor | None = None
    ) -> list[Float[Tensor, "nodes hidden"]]:
        """Embeddings of the nodes of each graph; graphs of different sizes are padded, and the padding masked."""
        weight = self.primitive.weight
        if task is not None:
            task = self._checked(task).to(weight)
        features = [_features(graph) for graph in graphs]
        columns = (
            pad_sequence(list(column), batch_first=True).to(weight.device) for column in zip(*features, strict=True)
        )
        kinds, shapes, inward, outward, depth, real = columns
        sizes = self.channel(shapes[..., :2]).flatten(-2), self.kernel(shapes[..., 2:]).flatten(-2)
        x = self.primitive(kinds) + torch.cat(sizes, dim=-1)
        x = x + self.in_degree(inward) + self.out_degree(outward) + self.depth(depth)

        n = kinds.shape[1]
        steps = torch.stack([pad(g.distances, (0, n - len(g.kinds)) * 2) for g in graphs]).to(weight.device)
        bias = self._attention_bias(steps)
        if not real.all():
            bias = bias.masked_fill(~real[:, None, None, :], -math.inf)
        for layer in self.layers:
            x = layer(x, bias, task)
        x = self.norm(x)
        return [x[i, : len(graph.kinds)] for i, graph in enumerate(graphs)]

    def _attention_bias(self, distances: Int[Tensor, "graphs n n"]) -> Float[Tensor, "graphs heads n n"]:
        """b_ij = MLP([E(d_ij + 2); E(d_ji + 2)]), the same for all layers.

        A graph without cycles leads one way at most, so d_ij − d_ji says both, and the MLP need see each value once.
        """
        steps = distances.long().clamp(max=_LONGEST_EDGE)
        steps = steps - steps.mT
        reach = torch.arange(-int(steps.amax()), int(steps.amax()) + 1, device=steps.device)
        pairs = torch.cat([self.edge(reach.clamp(min=0) + 2), self.edge((-reach).clamp(min=0) + 2)], dim=-1)
        return self.edge_bias(pairs)[steps + len(reach) // 2].permute(0, 3, 1, 2)

    def _decode(
        self, graphs: Sequence[ComputationGraph], embedded: Sequence[Tensor], *, budget: int | None = None
    ) -> Iterator[tuple[int, int, str, Tensor]]:
        """Graph, node, name and prediction. Equal shapes share a product of at most ``budget`` numbers, if given."""
        groups: dict[_Recipe, list[tuple[int, int, tuple[Target, ...]]]] = {}
        for i, graph in enumerate(graphs):
            for recipe, node, targets in _work(graph, self.max_kernel):
                groups.setdefault(recipe, []).append((i, node, targets))
        longest = max((max(recipe.sides) for recipe in groups), default=0)
        if longest > self.max_side:
            name = next(members[0][2][0].name for recipe, members in groups.items() if max(recipe.sides) == longest)
            raise InputError(
                f"{name} has a side of {longest} (channels times kernel), and this hypernetwork predicts sides of at most "
                f"max_side={self.max_side}. Build one with a larger max_side, or leave such tensors alone by "
                "initialize(strict=False)."
            )
        starts = [0, *itertools.accumulate(map(len, embedded))]
        seeds = self.decoder.seed(torch.cat(list(embedded)), longest)
        for recipe, members in groups.items():
            numbers = max(math.prod(recipe.shape), self.settings["rank"] * sum(recipe.sides))  # in W, or in A and B
            chunk = len(members) if budget is None else max(1, budget // numbers)
            for first in range(0, len(members), chunk):
                part = members[first : first + chunk]
                rows = seeds[[starts[i] + node for i, node, _ in part]]
                for column, values in enumerate(self._tensors(rows, recipe)):
                    for (i, node, targets), tensor in zip(part, values.unbind(), strict=True):
                        yield i, node, targets[column].name, tensor

    def _tensors(self, seeds: Float[Tensor, "n ..."], recipe: "_Recipe") -> list[Float[Tensor, "n ..."]]:
        """Predictions for n nodes of one recipe: for each of its targets, n tensors in its shape and at its scale."""
        gains = [self.gains[role] for _, role in recipe.targets]
        scale = recipe.scale if self.weight_norm else 1.0
        if len(gains) == 1:
            parts = [_tile(self.decoder(seeds, recipe.predicted, scale * gains[0]), recipe.shape)]
        else:
            together = _tile(self.decoder(seeds, recipe.predicted, scale), recipe.shape).flatten(1)
            sizes = [math.prod(shape) for shape, _ in recipe.targets]
            parts = [gain * part for gain, part in zip(gains, together.split(sizes, dim=1), strict=True)]
        tensors = []
        for part, (shape, role) in zip(parts, recipe.targets, strict=True):
            tensor = _positions(part, shape) if role == "position" else part.reshape(-1, *shape)
            tensors.append(_SQUASHED[role](tensor) if self.weight_norm and role in _SQUASHED else tensor)
        return tensors

    def _checked(self, task: Tensor) -> Tensor:
        if self.task_dim is None:
            raise InputError(
                "A task embedding was given, but this hypernetwork has no task modulation. Build it with task_dim, or "
                "tune the learngene on tasks with embeddings; or pass task=None."
            )
        if task.shape != (self.task_dim,):
            raise InputError(
                f"The task embedding must have shape ({self.task_dim},); got {tuple(task.shape)}. Embed the task with "
                "the teacher that the other tasks were embedded with."
            )
        if not task.isfinite().all():
            raise InputError("The task embedding has entries that are NaN or infinite. Check the teacher's features.")
        return task


class TaskModulation(nn.Module):
    """Scales and shifts features by what a task embedding says: x̂ = (1 + W_g e + b_g) · x + (W_b e + b_b).

    All of its weights start at zero, so that at first it returns exactly what it is given.

    Parameters
    ----------
    task_dim, hidden : int
        Sizes of the task embedding e and of the features x.
    device, dtype
        As for every torch layer.

    Examples
    --------
    >>> x = torch.randn(3, 8)
    >>> torch.equal(TaskModulation(4, 8)(x, torch.randn(4)), x)
    True
    """

    def __init__(self, task_dim: int, hidden: int, *, device=None, dtype=None):
        super().__init__()
        self.gain, self.shift = (nn.Linear(task_dim, hidden, device=device, dtype=dtype) for _ in range(2))
        for parameter in self.parameters():
            nn.init.zeros_(parameter)

    def forward(
        self, x: Float[Tensor, "*batch hidden"], task: Float[Tensor, " task_dim"]
    ) -> Float[Tensor, "*batch hidden"]:
        return (1 + self.gain(task)) * x + self.shift(task)


class _Layer(nn.Module):
    """A pre-norm transformer layer with a bias added to its attention, modulated between norm and attention."""

    def __init__(self, hidden: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(hidden), nn.LayerNorm(hidden)
        self.modulation: TaskModulation | None = None
        self.qkv, self.out = nn.Linear(hidden, 3 * hidden), nn.Linear(hidden, hidden)
        self.mlp = nn.Sequential(nn.Linear(hidden, 4 * hidden), nn.GELU(), nn.Linear(4 * hidden, hidden))
        with torch.no_grad():  # At first nodes mix little: else all of them would be given nearly the same weights.
            for parameter in (*self.out.parameters(), *self.mlp[-1].parameters()):
                parameter.mul_(0.3)

    def forward(self, x: Tensor, bias: Tensor, task: Tensor | None) -> Tensor:
        y = self.norm_attention(x)
        if task is not None and self.modulation is not None:
            y = self.modulation(y, task)
        query, key, value = self.qkv(y).unflatten(-1, (3, self.n_heads, -1)).permute(2, 0, 3, 1, 4)
        attended = scaled_dot_product_attention(query, key, value, attn_mask=bias)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_mlp(x))


class _LowRankDecoder(nn.Module):
    """Factors of any tensor from a node embedding: u = MLP(x) of shape (2r, r), A and B from Linear(r → ck) of its rows.

    The (2r, ck) results are read in row-major order as 2ck rows of r numbers, the first ck of which are A. So the first
    rows of A and of B come from the first ones of either half of u, and the others are not computed.
    """

    def __init__(self, hidden: int, rank: int, max_side: int):
        super().__init__()
        self.rank, self.max_side = rank, max_side
        self.mlp = nn.Sequential(
            _linear(hidden, 4 * hidden, behind_relu=False), nn.ReLU(), _linear(4 * hidden, 8 * hidden), nn.ReLU()
        )
        self.core = _linear(8 * hidden, 2 * rank**2)
        # A Bᵀ, a sum of r products, gets unit variance. A little of A and of B is the same for all nodes: a seed that no
        # ReLU lets through must not end all learning.
        self.expand = _linear(rank, max_side, variance=0.96 * rank**-0.5)
        nn.init.normal_(self.expand.bias, std=0.2 * rank**-0.25)

    def seed(self, x: Float[Tensor, "n hidden"], longest: int) -> Float[Tensor, "n 2 rows rank"]:
        """The rows of u, behind their ReLU, that sides of up to ``longest`` need."""
        rows = self._rows(longest)
        weight, bias = (p.unflatten(0, (2, self.rank, self.rank))[:, :rows] for p in self.core.parameters())
        u = linear(self.mlp(x), weight.flatten(0, 2), bias.flatten())
        return u.relu().unflatten(-1, (2, rows, self.rank))

    def forward(
        self, seed: Float[Tensor, "n 2 rows rank"], shape: tuple[int, int, int, int], scale: float | Tensor
    ) -> Float[Tensor, "n o i h w"]:
        c_out, c_in, height, width = shape
        left, right = scale * self._factor(seed[:, 0], c_out * height), self._factor(seed[:, 1], c_in * width)
        return (left @ right.mT).view(-1, c_out, height, c_in, width).transpose(2, 3)

    def _factor(self, u: Float[Tensor, "n rows rank"], side: int) -> Float[Tensor, "n side rank"]:
        numbers, rows = side * self.rank, self._rows(side)
        columns = numbers if rows == 1 else self.max_side
        values = linear(u[:, :rows], self.expand.weight[:columns], self.expand.bias[:columns])
        return values.flatten(1)[:, :numbers].unflatten(1, (side, self.rank))

    def _rows(self, side: int) -> int:
        return -(-side * self.rank // self.max_side)


class _TileDecoder(nn.Module):
    """A dense block of 64 × 64 channels for each place of a kernel, of which smaller kernels take the central ones."""

    def __init__(self, hidden: int, max_kernel: int):
        super().__init__()
        self.max_kernel = max_kernel
        self.places = _linear(hidden, 4 * hidden * max_kernel**2, behind_relu=False)
        self.mlp = nn.Sequential(
            _linear(4 * hidden, 8 * hidden), nn.ReLU(), _linear(8 * hidden, _TILE**2, variance=1.0)
        )

    def seed(self, x: Float[Tensor, "n hidden"], longest: int) -> Float[Tensor, "n hidden"]:
        return x

    def forward(
        self, seed: Float[Tensor, "n hidden"], shape: tuple[int, int, int, int], scale: float | Tensor
    ) -> Float[Tensor, "n o i h w"]:
        c_out, c_in, *sides = shape
        window = tuple(slice((self.max_kernel - side) // 2, (self.max_kernel + side) // 2) for side in sides)
        weight, bias = (
            p.unflatten(0, (self.max_kernel, self.max_kernel, -1))[window] for p in self.places.parameters()
        )
        places = linear(seed, weight.flatten(0, 2), bias.flatten()).relu().unflatten(1, (*sides, -1))
        blocks = scale * self.mlp(places).unflatten(-1, (_TILE, _TILE))
        return blocks.permute(0, 3, 4, 1, 2)[:, :c_out, :c_in]


class _Recipe(NamedTuple):
    """What a node's tensors are made by; nodes with equal ones are predicted together."""

    shape: tuple[int, int, int, int]
    predicted: tuple[int, int, int, int]  # with kernels of at most max_kernel
    targets: tuple[tuple[tuple[int, ...], str], ...]  # shape and role of each
    unbounded: bool

    @property
    def sides(self) -> tuple[int, int]:
        """Rows and columns of the matrix it is read from."""
        c_out, c_in, height, width = self.predicted
        return c_out * height, c_in * width

    @property
    def scale(self) -> float:
        """√(β / fan-in) of what is multiplied with inputs; else 1."""
        (shape, role), *_ = self.targets
        if role not in ("weight", "head", "embedding", "token"):
            return 1.0
        fan_in = math.prod(shape if role == "token" else shape[1:])
        return math.sqrt((1.0 if self.unbounded else 2.0) / fan_in)


@functools.lru_cache(maxsize=2048)
def _work(graph: ComputationGraph, max_kernel: int) -> list[tuple[_Recipe, int, tuple[Target, ...]]]:
    """Every prediction that a graph needs: how it is made, of which node, for which targets."""
    work = []
    for node, (targets, unbounded) in enumerate(zip(graph.targets, graph.unbounded, strict=True)):
        if targets:
            shape = _grid(targets)
            predicted = (*shape[:2], min(shape[2], max_kernel), min(shape[3], max_kernel))
            roles = [target.role for target in targets]
            if roles == ["norm", "norm"]:
                roles[1] = "bias"
            elif roles == ["weight"] and belongs_to_head(targets[0], graph):
                roles = ["head"]
            made = tuple((target.shape, role) for target, role in zip(targets, roles, strict=True))
            work.append((_Recipe(shape, predicted, made, unbounded), node, targets))
    return work


def belongs_to_head(target: Target, graph: ComputationGraph) -> bool:
    """Whether a parameter is the class head's, weight or bias."""
    module, _, name = target.name.rpartition(".")
    return module == graph.head and name in ("weight", "bias")


def _grid(targets: tuple[Target, ...]) -> tuple[int, int, int, int]:
    """(c_out, c_in, k_h, k_w) of the prediction that a node's tensors are read from: a norm's two from one vector."""
    _, shape, role = targets[0]
    if role == "position":
        side = math.isqrt(shape[-2])
        return 1, shape[-1], side, side
    if role in ("norm", "bias", "token") or len(shape) < 2:
        return sum(math.prod(target.shape) for target in targets), 1, 1, 1
    c_out, c_in, *kernel = shape
    return c_out, c_in, math.prod(kernel[:-1]), (kernel or [1])[-1]


def _tile(values: Float[Tensor, "n o i h w"], shape: tuple[int, int, int, int]) -> Tensor:
    """Repeat along every axis that is too short, and cut."""
    repeats = [-(-wanted // given) for wanted, given in zip(shape, values.shape[1:], strict=True)]
    if max(repeats) > 1:
        values = values.repeat(1, *repeats)
    return values[:, : shape[0], : shape[1], : shape[2], : shape[3]]


def _positions(values: Float[Tensor, "n 1 d side side"], shape: tuple[int, ...]) -> Tensor:
    """A grid of positions, row by row, behind the rows of class tokens: a fixed draw from N(0, 0.02²)."""
    grid = values[:, 0].flatten(2).mT
    extra = shape[-2] - grid.shape[1]
    if extra:
        draw = 0.02 * torch.randn(extra, shape[-1], generator=torch.Generator().manual_seed(0))
        grid = torch.cat([draw.to(grid).expand(len(grid), -1, -1), grid], dim=1)
    return grid.reshape(-1, *shape)


@functools.lru_cache(maxsize=2048)
def _features(graph: ComputationGraph) -> tuple[Tensor, ...]:
    """Kind, places of the four sizes in their tables, neighbours before and behind, depth; and True for every node."""
    kinds = torch.tensor([PRIMITIVES.index(kind) for kind in graph.kinds])
    shapes = torch.cat([_nearest(graph.shapes[:, :2], CHANNELS), _nearest(graph.shapes[:, 2:], KERNELS)], dim=1)
    for node, targets in enumerate(graph.targets):
        if any(belongs_to_head(target, graph) for target in targets):
            shapes[node, 0] = len(CHANNELS)
    linked = graph.distances == 1
    inward, outward = (linked.sum(axis).clamp(max=_MOST_NEIGHBOURS) for axis in (0, 1))
    depth = _depths(graph.distances.long()).clamp(max=_FARTHEST)
    return kinds, shapes, inward, outward, depth, torch.ones(len(kinds), dtype=torch.bool)


def _nearest(values: Int[Tensor, "n k"], table: tuple[int, ...]) -> Int[Tensor, "n k"]:
    """Index of the nearest value of an ascending table, of two the smaller."""
    known = torch.tensor(table, dtype=torch.float64)
    return torch.bucketize(values.double(), (known[1:] + known[:-1]) / 2)


def _depths(distances: Int[Tensor, "n n"]) -> Int[Tensor, " n"]:
    """Length of the shortest path from the input, 0 where there is none, also beyond the cutoff of ``distances``."""
    beyond = len(distances) + 1
    depths = torch.where(distances[0] > 0, distances[0], beyond)
    depths[0] = 0
    onward = torch.where(distances > 0, distances, beyond)
    while True:
        shorter = torch.minimum(depths, (depths[:, None] + onward).amin(0))
        if torch.equal(shorter, depths):
            return torch.where(depths < beyond, depths, 0)
        depths = shorter


def _linear(fan_in: int, fan_out: int, *, variance: float = 2.0, behind_relu: bool = True) -> nn.Linear:
    """A linear layer that starts with outputs of this variance, for inputs with a second moment of 1.

    2 is what the next ReLU brings back to a second moment of 1. Behind a ReLU, whose outputs are positive, rows sum to zero:
    else what all nodes have in common would grow from layer to layer.
    """
    layer = nn.Linear(fan_in, fan_out)
    spread = 1 - 1 / math.pi if behind_relu else 1.0  # variance of a ReLU's outputs
    nn.init.normal_(layer.weight, std=math.sqrt(variance / (fan_in * spread)))
    if behind_relu and fan_in > 1:
        layer.weight.data -= layer.weight.data.mean(1, keepdim=True)
    nn.init.zeros_(layer.bias)
    return layer
