"""Networks small enough for a study on two cores; the same seed gives the same initial weights."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn.functional import gelu, relu, scaled_dot_product_attention


def mlp(widths: Sequence[int], *, seed: int) -> nn.Sequential:
    """Linear layers of these widths, inputs first and outputs last, with ReLU between; inputs are flattened."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers: list[nn.Module] = [nn.Flatten()]
        for fan_in, fan_out in pairwise(widths):
            layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
        return nn.Sequential(*layers[:-1])


def resnet8(
    n_classes: int, *, channels: Sequence[int] = (16, 32, 64), stem_stride: int = 1, seed: int
) -> nn.Sequential:
    """A convolution and a residual block of two for each number of channels, at half the size from the second block on."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        width = channels[0]
        stem = nn.Conv2d(1, width, 3, stride=stem_stride, padding=1, bias=False)
        blocks = [_Residual(width, width, stride=1)]
        blocks += [_Residual(fan_in, fan_out, stride=2) for fan_in, fan_out in pairwise(channels)]
        head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels[-1], n_classes)]
        return nn.Sequential(stem, nn.BatchNorm2d(width), nn.ReLU(), *blocks, *head)


class _Residual(nn.Module):
    """Two convolutions around a shortcut, which subsamples and pads with channels of zeros where sizes differ."""

    def __init__(self, fan_in: int, fan_out: int, *, stride: int):
        super().__init__()
        self.conv1 = nn.Conv2d(fan_in, fan_out, 3, stride=stride, padding=1, bias=False)
        self.norm1 = nn.BatchNorm2d(fan_out)
        self.conv2 = nn.Conv2d(fan_out, fan_out, 3, padding=1, bias=False)
        self.norm2 = nn.BatchNorm2d(fan_out)
        self.stride, self.padding = stride, (0, 0, 0, 0, 0, fan_out - fan_in)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(y + nn.functional.pad(x[:, :, :: self.stride, :: self.stride], self.padding))


def mixer(
    n_classes: int, *, patches: int, pixels: int, width: int, hidden: int, token_hidden: int, n_blocks: int, seed: int
) -> nn.Sequential:
    """An MLP-Mixer of images that are cut into ``patches`` of ``pixels`` each, (batch, patches, pixels)."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        blocks = [_Mixing(patches, width, token_hidden=token_hidden, hidden=hidden) for _ in range(n_blocks)]
        return nn.Sequential(
            nn.Linear(pixels, width), *blocks, nn.LayerNorm(width), _MeanOverTokens(), nn.Linear(width, n_classes)
        )


class _Mixing(nn.Module):
    """A network of two layers over patches, and one over channels, both with a shortcut."""

    def __init__(self, patches: int, width: int, *, token_hidden: int, hidden: int):
        super().__init__()
        self.token_norm, self.norm = nn.LayerNorm(width), nn.LayerNorm(width)
        self.token_up, self.token_down = nn.Linear(patches, token_hidden), nn.Linear(token_hidden, patches)
        self.up, self.down = nn.Linear(width, hidden), nn.Linear(hidden, width)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.token_down(gelu(self.token_up(self.token_norm(x).mT))).mT
        return x + self.down(gelu(self.up(self.norm(x))))


class _MeanOverTokens(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.mean(dim=1)


class ByteTransformer(nn.Module):
    """A causal transformer that reads bytes, and says of each what the next may be: (batch, length) to logits of 256."""

    def __init__(self, *, length: int, width: int, n_heads: int, n_blocks: int, seed: int):
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            self.embedding, self.positions = nn.Embedding(256, width), nn.Embedding(length, width)
            self.blocks = nn.ModuleList(_Attending(width, n_heads) for _ in range(n_blocks))
            self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embedding(ids) + self.positions.weight[: ids.shape[1]]
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class _Attending(nn.Module):
    """Attention to what came before and a network of two layers, both with a shortcut."""

    def __init__(self, width: int, n_heads: int):
        super().__init__()
        self.attention_norm, self.norm, self.n_heads = nn.LayerNorm(width), nn.LayerNorm(width), n_heads
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        heads = self.qkv(self.attention_norm(x)).unflatten(-1, (3 * self.n_heads, -1)).transpose(1, 2)
        query, key, value = heads.chunk(3, dim=1)
        attended = scaled_dot_product_attention(query, key, value, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(gelu(self.up(self.norm(x))))
