"""Architectures to learn from: spaces of networks, networks drawn from them, and their graphs."""

import functools
import inspect
import itertools
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from heedful._random import numpy_generator
from heedful._validation import require_choice, require_number
from heedful.errors import ParameterError
from heedful.merge.tal.graph import ComputationGraph, computation_graph

__all__ = [
    "ArchitecturePool",
    "ConvNetSpace",
    "MLPSpace",
    "Member",
    "Space",
    "ViTSpace",
    "VisionTransformer",
    "convnet",
    "mlp",
]

Configuration = dict[str, Hashable]


@runtime_checkable
class Space(Protocol):
    """Where the architectures of a pool come from."""

    @property
    def example_inputs(self) -> Any:
        """What its networks take, a batch of one."""

    def draw(self, generator: np.random.Generator) -> Configuration:
        """Arguments of a builder, at random."""


class Member(NamedTuple):
    """One architecture: ``build()`` makes a network with weights of its own, ``graph`` is its computation graph."""

    build: Callable[[], nn.Module]
    graph: ComputationGraph


class ArchitecturePool:
    """Networks of one family in many sizes: ``len(pool)`` of them, and ``pool[i]`` is a ``Member``.

    Graphs are made on first use, on the meta device, and shared by
    equal architectures.

    Parameters
    ----------
    builder : callable
        ``builder(**configuration)`` returns a new ``nn.Module``; it is also called under ``torch.device("meta")``.
    configurations : sequence of Mapping
        Arguments of the builder for each architecture, hashable. At least one.
    example_inputs
        What the networks take, as ``computation_graph`` wants it.

    Raises
    ------
    ParameterError
        If there are no configurations, or the builder does not take one of them.

    Examples
    --------
    >>> pool = ArchitecturePool.from_space(VisionTransformer, ViTSpace("tiny"), n=20, random_state=0)
    >>> build, graph = pool[3]
    >>> sum(p.numel() for p in build().parameters()) == graph.n_parameters
    True
    """

    def __init__(
        self, builder: Callable[..., nn.Module], configurations: Sequence[Mapping[str, Hashable]], example_inputs: Any
    ):
        if not configurations:
            raise ParameterError("A pool needs at least one architecture; got no configurations.")
        for configuration in configurations:
            try:
                inspect.signature(builder).bind(**configuration)
            except TypeError as error:
                raise ParameterError(
                    f"The builder must take {', '.join(configuration)} as keyword arguments: {error}. Wrap it in a "
                    "function that translates them."
                ) from error
        self.builder, self.configurations, self.example_inputs = builder, tuple(configurations), example_inputs
        self._graphs: dict[Hashable, ComputationGraph] = {}

    @classmethod
    def from_space(
        cls, builder: Callable[..., nn.Module], space: Space, *, n: int = 1000, random_state=None
    ) -> "ArchitecturePool":
        """A pool of ``n`` >= 1 architectures drawn from ``space``, with replacement."""
        require_number(n, "n", low=1, integer=True)
        generator = numpy_generator(random_state)
        return cls(builder, [space.draw(generator) for _ in range(n)], space.example_inputs)

    def __len__(self) -> int:
        """Number of architectures."""
        return len(self.configurations)

    def __getitem__(self, index: int) -> Member:
        """Architecture ``index``, counted from the end if negative."""
        configuration = self.configurations[index]
        build = functools.partial(self.builder, **configuration)
        key = tuple(sorted(configuration.items()))
        if key not in self._graphs:
            with torch.device("meta"):  # no memory, and no draw from torch's generator
                model = build()
            self._graphs[key] = computation_graph(model, self.example_inputs)
        return Member(build, self._graphs[key])

    def sample(self, generator: torch.Generator | None = None) -> Member:
        """One architecture, each as probable; None draws from torch's default generator."""
        return self[int(torch.randint(len(self), (), generator=generator))]


@dataclass(frozen=True)
class ViTSpace:
    """Vision transformers in many sizes.

    Parameters
    ----------
    name : {"vits-1k", "vits+-1k", "tiny"}
        "vits-1k": 3 to 9 layers, widths in steps of 32 from 256 (192 for 3 layers) to 768 (512 for up to 5 layers).
        "vits+-1k": 3 to 12 layers, widths from 192 to 768 in steps of 64, independent of each other. Both for images
        of 224 × 224 in patches of 16. "tiny": 2 to 5 layers, widths from 32 to 96 in steps of 16, 32 × 32 in patches
        of 4.

    Notes
    -----
    Configurations have ``depth``, ``width``, ``n_heads``, ``patch`` and ``image_size``: what ``VisionTransformer``
    takes. Heads: 3, 6 or 12 if 12 divides the width, 3 or 6 if only 6 does, 3 if only 3 does, else 4 or 8. MLPs are
    four times as wide as the model.

    References
    ----------
    *Learngene Tells You How to Customize*, ICML 2025; the first space is that of LoGAH, arXiv:2405.16287.
    """

    name: str

    def __post_init__(self):
        require_choice(self.name, "name", ("vits-1k", "vits+-1k", "tiny"))

    @property
    def image_size(self) -> int:
        """Height and width of the images, in pixels."""
        return 32 if self.name == "tiny" else 224

    @property
    def example_inputs(self) -> Float[Tensor, "1 3 size size"]:
        """An image of zeros."""
        return torch.zeros(1, 3, self.image_size, self.image_size)

    def widths(self, depth: int) -> range:
        """The widths of networks of ``depth`` layers."""
        if self.name == "tiny":
            return range(32, 97, 16)
        if self.name == "vits+-1k":
            return range(192, 769, 64)
        return range(256 if depth > 3 else 192, 769 if depth > 5 else 513, 32)

    def draw(self, generator: np.random.Generator) -> Configuration:
        """Depth, then width, then heads, each uniform over what is possible."""
        depths = {"vits-1k": range(3, 10), "vits+-1k": range(3, 13), "tiny": range(2, 6)}[self.name]
        depth = _choose(depths, generator)
        width = _choose(self.widths(depth), generator)
        return {
            "depth": depth,
            "width": width,
            "n_heads": _choose(_head_counts(width), generator),
            "patch": 4 if self.name == "tiny" else 16,
            "image_size": self.image_size,
        }


@dataclass(frozen=True)
class MLPSpace:
    """Multi-layer perceptrons of 1 to 4 hidden layers, all 32 to 256 wide, in steps of 32; what ``mlp`` takes.

    Parameters
    ----------
    n_features : int
        Size of an input, >= 1.
    """

    n_features: int

    @property
    def example_inputs(self) -> Float[Tensor, "1 features"]:
        """A row of zeros."""
        return torch.zeros(1, self.n_features)

    def draw(self, generator: np.random.Generator) -> Configuration:
        """Depth, then width, each uniform."""
        depth, width = _choose(range(1, 5), generator), _choose(range(32, 257, 32), generator)
        return {"depth": depth, "width": width, "n_features": self.n_features}


@dataclass(frozen=True)
class ConvNetSpace:
    """Plain convolutional networks of 2 to 6 layers, 16 to 64 channels wide at first, in steps of 16; for ``convnet``.

    Kernels have side 3 or 5. Layers have group norms or none: batch norms need running statistics, which cannot be
    predicted.

    Parameters
    ----------
    image_size : int
        Height and width of the images, in pixels.
    n_channels : int
        Channels of the images.
    """

    image_size: int = 32
    n_channels: int = 3

    @property
    def example_inputs(self) -> Float[Tensor, "1 channels size size"]:
        """An image of zeros."""
        return torch.zeros(1, self.n_channels, self.image_size, self.image_size)

    def draw(self, generator: np.random.Generator) -> Configuration:
        """Depth, width, kernel and norm, each uniform."""
        return {
            "depth": _choose(range(2, 7), generator),
            "width": _choose(range(16, 65, 16), generator),
            "kernel": _choose((3, 5), generator),
            "norm": _choose(("none", "group"), generator),
            "n_channels": self.n_channels,
        }


class VisionTransformer(nn.Module):
    """A plain vision transformer: class token, learned positions, pre-norm layers, GELU.

    Its computation graph is that of Hugging Face's ``ViTForImageClassification`` of the same sizes. Layers start as
    torch's do, token and positions from N(0, 0.02²).

    Parameters
    ----------
    depth, width, n_heads : int
        Layers, features of a token (a multiple of ``n_heads``), attention heads.
    patch, image_size : int
        Sides of patches and images in pixels; the second is a multiple of the first.
    n_channels, n_classes : int
        Channels of the images, and rows of the head.

    Examples
    --------
    >>> VisionTransformer(depth=2, width=32, n_heads=4, patch=4, image_size=32, n_classes=10)(
    ...     torch.zeros(1, 3, 32, 32)
    ... ).shape
    torch.Size([1, 10])
    """

    def __init__(
        self,
        *,
        depth: int,
        width: int,
        n_heads: int,
        patch: int = 16,
        image_size: int = 224,
        n_channels: int = 3,
        n_classes: int = 1000,
    ):
        super().__init__()
        if width % n_heads or image_size % patch:
            raise ParameterError(
                f"width must be a multiple of n_heads and image_size one of patch; got width={width}, n_heads={n_heads}, "
                f"image_size={image_size}, patch={patch}."
            )
        self.patches = nn.Conv2d(n_channels, width, patch, patch)
        self.token = nn.Parameter(0.02 * torch.randn(1, 1, width))
        self.positions = nn.Parameter(0.02 * torch.randn(1, 1 + (image_size // patch) ** 2, width))
        self.layers = nn.Sequential(*(_Layer(width, n_heads) for _ in range(depth)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, n_classes)

    def forward(self, images: Float[Tensor, "n channels height width"]) -> Float[Tensor, "n classes"]:
        patches = self.patches(images).flatten(2).mT
        tokens = torch.cat([self.token.expand(len(images), -1, -1), patches], dim=1) + self.positions
        return self.head(self.norm(self.layers(tokens)[:, 0]))


class _Layer(nn.Module):
    def __init__(self, width: int, n_heads: int):
        super().__init__()
        self.n_heads = n_heads
        self.norm_attention, self.norm_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Float[Tensor, "n tokens width"]) -> Float[Tensor, "n tokens width"]:
        y = self.norm_attention(x)
        heads = (
            part(y).unflatten(-1, (self.n_heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        x = x + self.out(scaled_dot_product_attention(*heads).transpose(1, 2).flatten(2))
        return x + self.mlp(self.norm_mlp(x))


def mlp(*, depth: int, width: int, n_features: int, n_classes: int = 10) -> nn.Sequential:
    """A perceptron with ``depth`` hidden layers of ``width`` ReLUs each, for inputs (n, ...) of ``n_features`` numbers."""
    widths = [n_features] + [width] * depth
    hidden = [layer for pair in itertools.pairwise(widths) for layer in (nn.Linear(*pair), nn.ReLU())]
    return nn.Sequential(nn.Flatten(), *hidden, nn.Linear(widths[-1], n_classes))


def convnet(
    *,
    depth: int,
    width: int,
    kernel: int = 3,
    norm: Literal["none", "group", "batch"] = "none",
    n_channels: int = 3,
    n_classes: int = 10,
) -> nn.Sequential:
    """Convolutions of odd side ``kernel`` with ReLU, global average pooling, and a linear head.

    Every second layer has stride 2 and twice as many channels as those before it; the first has ``width``.
    """
    require_choice(norm, "norm", ("none", "group", "batch"))
    layers: list[nn.Module] = []
    channels = n_channels
    for i in range(depth):
        out, stride = width * 2 ** ((i + 1) // 2), 1 + i % 2
        layers.append(nn.Conv2d(channels, out, kernel, stride, padding=kernel // 2))
        if norm != "none":
            layers.append(nn.GroupNorm(8, out) if norm == "group" else nn.BatchNorm2d(out))
        layers.append(nn.ReLU())
        channels = out
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, n_classes))


def _choose(options: Sequence, generator: np.random.Generator) -> Any:
    return options[int(generator.integers(len(options)))]


def _head_counts(width: int) -> tuple[int, ...]:
    if width % 3:
        return 4, 8
    return (3, 6, 12) if width % 12 == 0 else (3, 6) if width % 6 == 0 else (3,)
