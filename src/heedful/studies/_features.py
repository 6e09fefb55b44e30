"""What a network that was trained on ImageNet sees in an image: the pooled features of EfficientNet-Lite0.

The network is a stem, sixteen blocks and a head, all of them convolutions; a block widens each pixel (1 × 1), looks around
in each channel (k × k, one filter per channel) and narrows again (1 × 1), and where its output has the shape of its input
the input is added. There is neither squeeze-and-excitation nor swish in the Lite series. In inference batch normalisation
is part of the convolution before it:

    γ (W ∗ x − μ) / √(σ² + ε) + β  =  (s W) ∗ x + (β − s μ)   with   s = γ / √(σ² + ε).

Mingxing Tan, Quoc V. Le: EfficientNet: Rethinking Model Scaling for Convolutional Neural Networks, ICML 2019.
"""

import hashlib
from collections.abc import Mapping
from typing import NamedTuple

import numpy as np
import torch
from jaxtyping import Float, Float32, UInt8
from torch import Tensor
from torch.nn.functional import conv2d, interpolate, linear, pad, relu6

from heedful import data
from heedful._files import digest_file
from heedful.studies._kept import kept

N_FEATURES = 1280
"""Features of an image."""

SIDE = 96
"""Images are scaled to this height and width. The network was trained at 224, which takes five times as long."""

_STRIDES = (1, 2, 1, 2, 1, 2, 1, 1, 1, 1, 1, 2, 1, 1, 1, 1)  # of the blocks
_EPSILON = 1e-3  # of batch normalisation
_BATCH = 64


class _Convolution(NamedTuple):
    weight: Float[Tensor, "c_out c_in k k"]
    bias: Float[Tensor, " c_out"]
    stride: int

    def __call__(self, x: Float[Tensor, "n c_x h w"]) -> Float[Tensor, "n c_out h_out w_out"]:
        """The output has ⌈side / stride⌉ pixels a side; an odd pixel of padding goes to the right and below."""
        groups = x.shape[1] // self.weight.shape[1]
        if self.stride == 1:
            return conv2d(x, self.weight, self.bias, padding="same", groups=groups)
        (above, below), (left, right) = (self._padding(side) for side in x.shape[2:])
        return conv2d(pad(x, (left, right, above, below)), self.weight, self.bias, self.stride, groups=groups)

    def _padding(self, side: int) -> tuple[int, int]:
        total = max((-(-side // self.stride) - 1) * self.stride + self.weight.shape[-1] - side, 0)
        return total // 2, total - total // 2


class EfficientNetLite0:
    """The network, for inference alone.

    Parameters
    ----------
    tensors : mapping of str to ndarray
        ``data.load("efficientnet_lite0").tensors``.
    """

    def __init__(self, tensors: Mapping[str, np.ndarray]):
        weights = {name: torch.tensor(tensor) for name, tensor in tensors.items()}
        self._stem = _folded(weights, "_conv_stem", "_bn0", stride=2)
        self._blocks = [_block(weights, f"_blocks.{i}", stride) for i, stride in enumerate(_STRIDES)]
        self._head = _folded(weights, "_conv_head", "_bn1")
        self._classifier = weights["_fc.weight"], weights["_fc.bias"]

    def features(self, x: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 1280"]:
        """Mean over the pixels of the last activations; ``x`` is (pixel − 127) / 128."""
        x = relu6(self._stem(x.contiguous(memory_format=torch.channels_last)))
        for *inner, last in self._blocks:
            y = x
            for convolution in inner:
                y = relu6(convolution(y))
            y = last(y)
            x = x + y if x.shape == y.shape else y
        return relu6(self._head(x)).mean((2, 3))

    def logits(self, x: Float[Tensor, "n 3 h w"]) -> Float[Tensor, "n 1000"]:
        """Of the classes of ImageNet-1k, in their usual order."""
        return linear(self.features(x), *self._classifier)


def image_features(images: UInt8[np.ndarray, "n height width *rgb"]) -> Float32[np.ndarray, "n 1280"]:
    """Features of grey or colour images, scaled to ``SIDE`` pixels; about 5 ms each on one core.

    They are computed once for the same images, and kept.
    """
    depends = {
        "code": digest_file(__file__),
        "weights": data.checksums("efficientnet_lite0"),
        "shape": images.shape,
        "images": hashlib.sha256(np.ascontiguousarray(images).data).hexdigest(),
    }
    return kept("features", depends, lambda: {"features": _compute(images)})["features"]


@torch.inference_mode()
def _compute(images: UInt8[np.ndarray, "n height width *rgb"]) -> Float32[np.ndarray, "n 1280"]:
    network = EfficientNetLite0(data.load("efficientnet_lite0").tensors)
    pixels = torch.tensor(images).reshape(*images.shape[:3], -1).expand(-1, -1, -1, 3).permute(0, 3, 1, 2)
    batches = [
        network.features(interpolate((batch.float() - 127) / 128, (SIDE, SIDE), mode="bilinear", align_corners=False))
        for batch in pixels.split(_BATCH)
    ]
    return torch.cat(batches).numpy()


def _block(weights: Mapping[str, Tensor], name: str, stride: int) -> list[_Convolution]:
    """Widen (absent from the first block), look around, narrow."""
    layers = [("_expand_conv", "_bn0", 1), ("_depthwise_conv", "_bn1", stride), ("_project_conv", "_bn2", 1)]
    return [
        _folded(weights, f"{name}.{convolution}", f"{name}.{norm}", stride=step)
        for convolution, norm, step in layers
        if f"{name}.{convolution}.weight" in weights
    ]


def _folded(weights: Mapping[str, Tensor], convolution: str, norm: str, *, stride: int = 1) -> _Convolution:
    """A convolution and the batch normalisation behind it, as one."""
    mean, variance = weights[f"{norm}.running_mean"], weights[f"{norm}.running_var"]
    scale = weights[f"{norm}.weight"] / (variance + _EPSILON).sqrt()
    weight = weights[f"{convolution}.weight"] * scale[:, None, None, None]
    return _Convolution(
        weight.contiguous(memory_format=torch.channels_last), weights[f"{norm}.bias"] - mean * scale, stride
    )
