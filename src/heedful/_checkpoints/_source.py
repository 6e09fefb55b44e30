"""What every checkpoint is once it is open: named tensors that are read when they are asked for."""

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful._checkpoints._safetensors import TensorInfo, bits

# What the usual models call the matrix that gives the logits.
_HEADS = ("lm_head.weight", "embed_out.weight", "cls.predictions.decoder.weight")


class TensorSource:
    """The tensors of a checkpoint, made by ``open_checkpoint``; it has a length and iterates over the names.

    Attributes
    ----------
    origin : str
        What messages call it.
    folder : Path or None
        The Hugging Face folder, if it is one.
    config : dict or None
        The contents of ``config.json``, if there is one.
    names : tuple of str
        The tensors, in the order of the files. A tensor that several names share is here once.
    tied : mapping of str to str
        The other names of shared tensors, each with the one in ``names`` that it shares its values with.
    """

    def __init__(
        self,
        origin: str,
        infos: Mapping[str, TensorInfo],
        read: Callable[[str], Tensor],
        *,
        folder: Path | None = None,
        config: dict[str, Any] | None = None,
        tied: Mapping[str, str] | None = None,
    ):
        self.origin, self.folder, self.config = origin, folder, config
        self.tied: dict[str, str] = dict(tied or {})
        if not self.tied and (config or {}).get("tie_word_embeddings") is True:
            self.tied = _tied_head(infos, read)
        self.names = tuple(name for name in infos if name not in self.tied)
        self._infos = {name: infos[name] for name in self.names}
        self._read: Callable[[str], Tensor] | None = read

    @property
    def quantization(self) -> str | None:
        """What says that the weights are stored as codes, in words; None if they are plain numbers."""
        if (self.config or {}).get("quantization_config"):
            return "config.json has a quantization_config"
        for name, (_, dtype) in self._infos.items():
            floating = dtype.is_floating_point or dtype.is_complex
            if (floating and dtype.itemsize == 1) or (not floating and name.endswith("weight")):
                return f"{name} has dtype {str(dtype).removeprefix('torch.')}"
        return None

    def info(self, name: str) -> TensorInfo:
        """Shape and dtype of a tensor, without reading it."""
        return self._infos[name]

    def get(self, name: str) -> Tensor:
        """The tensor in its own dtype. It may be a view of a file or of the state dict: do not write to it."""
        if self._read is None:
            raise ValueError(f"{self.origin} has been closed.")
        if name not in self._infos:
            raise KeyError(f"{self.origin} has no tensor {name}")
        return self._read(name)

    def __contains__(self, name: object) -> bool:
        return name in self._infos

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)

    def close(self) -> None:
        """Let go of the files. Tensors that were handed out stay valid."""
        self._read = None

    def __enter__(self) -> "TensorSource":
        return self

    def __exit__(self, *exception) -> None:
        self.close()


def _tied_head(infos: Mapping[str, TensorInfo], read: Callable[[str], Tensor]) -> dict[str, str]:
    """The output matrix, if it repeats another tensor bit for bit.

    One that differs is a tensor of its own, and the usual loaders take it for that, whatever the configuration says.
    """
    for head in filter(infos.__contains__, _HEADS):
        for name, info in infos.items():
            if name != head and info == infos[head] and torch.equal(bits(read(name)), bits(read(head))):
                return {head: name}
    return {}
