"""Where the tensors of a checkpoint are: folders, indexes, single files, pickles that need no code, state dicts."""

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful._checkpoints._adapter import apply_adapter
from heedful._checkpoints._safetensors import SafetensorsFile, TensorInfo, parse_json_object, read_regular
from heedful._checkpoints._source import TensorSource
from heedful.errors import FileFormatError, InputError

_WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in this order, as transformers looks for them
_HELD = 2**28  # bytes handed out before a pickle's mapping is made anew, which lets go of the pages read


def open_checkpoint(
    source: str | os.PathLike | Mapping[str, Tensor], *, base: TensorSource | None = None
) -> TensorSource:
    """The tensors of a checkpoint, each read when it is asked for and mapped from its file.

    Parameters
    ----------
    source : path or mapping of name to Tensor
        A Hugging Face folder (``model.safetensors``, or shards and their index, or the same as ``pytorch_model.bin``),
        one ``.safetensors`` or ``.bin`` file, a state dict, or the folder of a LoRA adapter as PEFT saves it. A folder
        that holds both a model and an adapter is the model.
    base : TensorSource, optional
        What an adapter changes: its tensors are then W + scale · B A, computed in float32 and rounded once to the dtype of
        W. Other sources do not need it.

    Raises
    ------
    FileNotFoundError
        If the path does not exist.
    FileFormatError
        If a file is damaged, points outside of its folder, or would need code to be unpickled; the message names it.
    InputError
        If an adapter comes without ``base`` or does not fit it, or a state dict holds what is no plain tensor.

    Notes
    -----
    Memory: the headers, and the tensors that the caller holds. Files of ``torch.save`` before torch 1.6 cannot be mapped
    and are held whole. A tied output matrix is compared with the embedding, which reads both once.
    """
    if isinstance(source, Mapping):
        return _open_state_dict(source)
    path = Path(source)
    if path.is_dir():
        return _open_folder(path, base)
    if not path.exists():
        raise FileNotFoundError(f"{path} does not exist. Give a local file or folder; download a model first.")
    file = _open_file(path)
    return TensorSource(str(path), file.infos, file.get, tied=file.tied)


def _open_state_dict(tensors: Mapping[str, Tensor]) -> TensorSource:
    tensors = dict(tensors)
    for name, tensor in tensors.items():
        if reason := _not_plain(name, tensor):
            raise InputError(f"the state dict holds {reason}. Give named dense tensors that have values.")
    infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in tensors.items()}
    return TensorSource("the state dict", infos, lambda name: tensors[name].detach(), tied=_shared(tensors))


def _open_folder(folder: Path, base: TensorSource | None) -> TensorSource:
    for weights in _WEIGHTS:
        if os.path.lexists(folder / weights):
            files = [_open_file(folder / weights)]
            break
        if os.path.lexists(index := folder / f"{weights}.index.json"):
            files = _open_shards(index)
            break
    else:
        if os.path.lexists(folder / "adapter_config.json"):
            return _open_adapter(folder, base)
        raise FileFormatError(
            f"{folder} holds no checkpoint. It needs model.safetensors, or model.safetensors.index.json and its shards, "
            "or pytorch_model.bin, or an adapter."
        )
    home = {name: file for file in files for name in file.infos}
    return TensorSource(
        str(folder),
        {name: info for file in files for name, info in file.infos.items()},
        lambda name: home[name].get(name),
        folder=folder,
        config=_read_json(folder / "config.json") if os.path.lexists(folder / "config.json") else None,
        tied={name: first for file in files for name, first in file.tied.items()},
    )


def _open_adapter(folder: Path, base: TensorSource | None) -> TensorSource:
    if base is None:
        raise InputError(
            f"{folder} is an adapter, which changes another model. Give that as the base, or in a recipe model+adapter."
        )
    settings = _read_json(folder / "adapter_config.json")
    for weights in ("adapter_model.safetensors", "adapter_model.bin"):
        if os.path.lexists(folder / weights):
            file = _open_file(folder / weights)
            return apply_adapter(folder, settings, file.infos, file.get, base)
    raise FileFormatError(
        f"{folder} has an adapter_config.json but no adapter_model.safetensors. Fetch or save it again."
    )


def _open_shards(index: Path) -> list["SafetensorsFile | _PickledFile"]:
    homes = _read_json(index).get("weight_map")
    if not isinstance(homes, dict) or not homes or not all(isinstance(home, str) for home in homes.values()):
        raise FileFormatError(f"{index} has no weight_map from tensors to files. Fetch or save it again.")
    files = []
    for home in sorted(set(homes.values())):
        if home in ("", ".", "..") or any(sign in home for sign in "/\\:\0"):
            raise FileFormatError(
                f"{index} points to {home!r}, which is no file beside it. Do not trust this checkpoint."
            )
        file = _open_file(index.parent / home)
        listed = {name for name in homes if homes[name] == home}
        if odd := sorted(listed ^ file.infos.keys()):
            raise FileFormatError(
                f"{index} and {home} disagree about {len(odd)} tensors, the first {odd[0]!r}, which only "
                f"{'the index' if odd[0] in listed else 'the file'} has. Fetch or save the checkpoint again."
            )
        files.append(file)
    return files


def _open_file(path: Path) -> "SafetensorsFile | _PickledFile":
    return _PickledFile(path) if path.suffix == ".bin" else SafetensorsFile(path)


def _read_json(path: Path) -> dict[str, Any]:
    with read_regular(path) as file:
        return parse_json_object(path, file.read())


class _PickledFile:
    """Tensors that ``torch.save`` wrote, read without running any code."""

    def __init__(self, path: Path):
        with read_regular(path) as file:
            self._mapped = file.read(4) == b"PK\3\4"  # an archive, as torch has written since 1.6; others have no map
        self._path, self._handed_out = path, 0
        self._tensors = self._load()
        self.infos = {name: TensorInfo(tuple(tensor.shape), tensor.dtype) for name, tensor in self._tensors.items()}
        self.tied = _shared(self._tensors)

    def get(self, name: str) -> Tensor:
        if self._mapped and self._handed_out > _HELD:
            self._tensors, self._handed_out = self._load(), 0
        self._handed_out += self.infos[name].nbytes
        return self._tensors[name].detach()

    def _load(self) -> dict[str, Tensor]:
        try:
            tensors = torch.load(self._path, map_location="cpu", weights_only=True, mmap=self._mapped)
        except Exception as error:  # whatever bytes can make the unpickler raise
            raise FileFormatError(
                f"{self._path} cannot be read without running what code it may contain ({type(error).__name__}: "
                f"{error!s:.200}). If you trust it, load it with torch and save it as safetensors."
            ) from error
        if not isinstance(tensors, dict):
            raise FileFormatError(f"{self._path} holds a {type(tensors).__name__}, where named tensors are needed.")
        for name, tensor in tensors.items():
            if reason := _not_plain(name, tensor):
                raise FileFormatError(f"{self._path} holds {reason}, where named dense tensors are needed.")
        return tensors


def _not_plain(name: object, tensor: object) -> str | None:
    """In words, why this is no named tensor with values; None if it is one."""
    if not isinstance(name, str):
        return f"the name {name!r}, a {type(name).__name__}"
    if not isinstance(tensor, Tensor):
        return f"a {type(tensor).__name__} as {name}"
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.is_meta:
        return f"a tensor without plain values ({tensor.layout}, {tensor.dtype}, on {tensor.device}) as {name}"
    return None


def _shared(tensors: Mapping[str, Tensor]) -> dict[str, str]:
    """Name -> the first name that stands for the same memory."""
    first: dict[tuple, str] = {}
    for name, tensor in tensors.items():
        if tensor.numel():
            first.setdefault(_memory(tensor), name)
    return {
        name: home for name, tensor in tensors.items() if tensor.numel() and (home := first[_memory(tensor)]) != name
    }


def _memory(tensor: Tensor) -> tuple:
    return tensor.device, tensor.data_ptr(), tensor.dtype, tensor.shape, tensor.stride()
