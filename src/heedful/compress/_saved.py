"""One door for compressed models on disk, whatever compressed them: packed codes, and layers of diagonals."""

import json
import os
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from heedful._checkpoints import open_checkpoint
from heedful._files import write_atomic
from heedful.errors import FileFormatError, InputError, MissingExtraError

__all__ = ["load_compressed", "save_compressed"]

_FORMAT = 1


def save_compressed(model: Any, path: str | os.PathLike, *, overwrite: bool = False) -> None:
    """Write a compressed model without blowing it up.

    Parameters
    ----------
    model : QuantizedModel or nn.Module
        What ``quantize`` returned, or a model with ``DiagonalLinear`` layers.
    path : path
        For a quantized model a folder, as its ``save_pretrained`` writes it; for diagonals a ``.safetensors`` file.
    overwrite : bool
        Whether a checkpoint or file that is there may be replaced.

    Raises
    ------
    InputError
        If nothing in the model is compressed, or the path is of the wrong kind.
    FileExistsError
        If there is something that may not be replaced.

    Notes
    -----
    Models with masks (``BAME``, ``prune_nm``) need no form of their own: save them as ever, with zeros.
    """
    from heedful.compress.boa.model import QuantizedModel
    from heedful.compress.boa.packing import model_config
    from heedful.compress.dynadiag.convert import _diagonal_state, _has_diagonals

    if isinstance(model, QuantizedModel):
        model.save_pretrained(path, overwrite=overwrite)
    elif isinstance(model, torch.nn.Module) and _has_diagonals(model):
        if Path(path).suffix != ".safetensors":
            raise InputError(f"diagonals are saved to a path ending in .safetensors; got {os.fspath(path)!r}.")
        tensors, meta = _diagonal_state(model)
        if hasattr(getattr(model, "config", None), "to_json_string"):  # of transformers, which can build it again
            meta |= {"config": model_config(model)}
        _write(path, tensors, meta, overwrite=overwrite)
    else:
        raise InputError(
            f"a {type(model).__name__} without quantized or diagonal layers has nothing to save in compressed form. Give what "
            "quantize returned, or a model with DiagonalLinear layers; save others as ever."
        )


def load_compressed(source: str | os.PathLike, *, model: Any = None) -> Any:
    """Read what ``save_compressed`` wrote, or a folder of packed codes that compressed-tensors or llm-compressor did.

    Parameters
    ----------
    source : path
        A folder of packed codes, or a file of diagonals. Nothing in it is run or unpickled.
    model : nn.Module, optional
        Takes what is in the file, in place; its own weights do not matter. If None, a model is built as the configuration
        beside the weights says, which only models of transformers have.

    Returns
    -------
    PreTrainedModel or nn.Module
        In evaluation mode. Codes have become the weights that they stand for, in layers of the usual kind; diagonals stay
        diagonals.

    Raises
    ------
    FileNotFoundError
        If there is nothing.
    FileFormatError
        If files are damaged, contradict each other or the model, or hold something else.
    InputError
        If a model is needed.
    """
    path = Path(source)
    if path.is_dir():
        from heedful.compress.boa.packing import read_folder

        packed = read_folder(path)
        if model is None:
            model = _build(str(path), packed.config, packed.tensors)
        else:
            _fill(str(path), model, packed.tensors)
        for name in packed.layers:
            model.get_submodule(name).quantized_bits = packed.bits  # so that nobody quantizes it again
        return model.eval()
    from heedful.compress.dynadiag.convert import _load_diagonals

    tensors, meta = _read(path)
    if model is None:
        if not isinstance(meta.get("config"), dict):
            raise InputError(f"{path} does not say how to build its model. Give one by model=, dense or diagonal.")
        kind, settings = _kind(str(path), meta["config"])
        with torch.device("meta"), warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that nothing is copied there, which is the purpose
            _load_diagonals(kind(settings), tensors, meta)  # a file that does not fit is refused before it costs memory
        model = kind(settings).to(settings.dtype)
    return _load_diagonals(model, tensors, meta).eval()


def _write(path: str | os.PathLike, tensors: Mapping[str, Tensor], meta: Mapping[str, Any], *, overwrite: bool) -> None:
    """One safetensors file; a tensor that several names share is there once, and the metadata say for which."""
    source = open_checkpoint(tensors)
    plain = {name: source.get(name).contiguous() for name in source}
    text = json.dumps({**meta, "class": "diagonals", "format": _FORMAT, "tied": source.tied}, sort_keys=True)
    with write_atomic(path, overwrite=overwrite) as temporary:
        try:
            save_file(plain, temporary, metadata={"heedful": text})
        except SafetensorError as error:
            raise OSError(f"{os.fspath(path)} could not be written: {error}.") from error


def read_metadata(path: Path) -> Any:
    """What heedful wrote beside the tensors of a file; None if it did not write it."""
    try:
        with safe_open(path, framework="pt") as file:
            return json.loads((file.metadata() or {}).get("heedful", "null"))
    except (SafetensorError, ValueError, RecursionError) as error:
        raise FileFormatError(f"{path} has metadata that cannot be read: {error}.") from error


def _read(path: Path) -> tuple[dict[str, Tensor], dict[str, Any]]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist. Give what save_compressed wrote, a file or a folder.")
    source = open_checkpoint(path)
    meta = read_metadata(path)
    if not isinstance(meta, dict) or meta.get("class") != "diagonals" or meta.get("format") != _FORMAT:
        raise FileFormatError(
            f"{path} holds no diagonals that this heedful reads. Give a file that save_compressed wrote; plain weights are "
            "opened by what saved them."
        )
    tensors = {name: source.get(name) for name in source}
    tied = meta.get("tied")
    if not isinstance(tied, dict) or not all(isinstance(home, str) and home in tensors for home in tied.values()):
        raise FileFormatError(f"{path} says of names that share a tensor what it does not hold: {tied!r:.200}.")
    return tensors | {name: tensors[home] for name, home in tied.items()}, meta


def _build(origin: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Any:
    """The model of transformers that ``config`` describes, made of ``tensors``."""
    kind, settings = _kind(origin, config)
    with torch.device("meta"):
        _require_same_tensors(origin, kind(settings), tensors)
    model = kind.from_pretrained(None, config=settings, state_dict=dict(tensors), dtype=settings.dtype)
    if (Path(origin) / "generation_config.json").is_file():
        model.generation_config = _generation_config(origin)
    model.config._name_or_path = origin  # where the tokenizer is, should the model be saved again
    return model


def _generation_config(origin: str) -> Any:
    from transformers import GenerationConfig

    try:
        return GenerationConfig.from_pretrained(origin)
    except Exception as error:  # as for the configuration
        raise FileFormatError(f"{origin} has a generation_config.json that cannot be used: {error!s:.500}") from error


def _kind(origin: str, config: Mapping[str, Any]) -> tuple[Any, Any]:
    """Class and configuration of a model, of those that come with transformers: no code of a checkpoint's own is run."""
    try:
        import transformers
        from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    except ImportError as error:
        raise MissingExtraError('building a model from its configuration needs: pip install "heedful[llm]".') from error
    names, family = config.get("architectures"), config.get("model_type")
    name = names[0] if isinstance(names, list) and len(names) == 1 else None
    kind: Any = getattr(transformers, name, None) if isinstance(name, str) else None
    known = isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel) and isinstance(family, str)
    if not known or family not in CONFIG_MAPPING or kind.config_class is not CONFIG_MAPPING[family]:
        raise FileFormatError(
            f"{origin} says that its model is {names!r:.200} of type {family!r:.80}, which transformers does not have. Load "
            "the model that was compressed and give it by model=."
        )
    try:
        return kind, kind.config_class.from_dict(dict(config))
    except Exception as error:  # whatever the values in the file make its checks raise
        raise FileFormatError(f"{origin} has a configuration that {name} does not take: {error!s:.500}") from error


def _fill(origin: str, model: Any, tensors: Mapping[str, Tensor]) -> None:
    _require_same_tensors(origin, model, tensors)
    model.load_state_dict(dict(tensors), strict=False)  # other names of tied tensors are not there


def _require_same_tensors(origin: str, model: Any, tensors: Mapping[str, Tensor]) -> None:
    """Raise ``FileFormatError`` unless the tensors are those of the model, in name and shape."""
    own = {name: tuple(tensor.shape) for name, tensor in model.state_dict(keep_vars=True).items()}
    first: dict[int, str] = {}
    for name, tensor in model.state_dict(keep_vars=True).items():
        if first.setdefault(id(tensor), name) != name:
            del own[name]
    given = {name: tuple(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(own.keys() | given.keys()):
        if own.get(name) != given.get(name):
            raise FileFormatError(
                f"{origin} has {_shape(given.get(name))} for {name}, and a {type(model).__name__} of its configuration "
                f"{_shape(own.get(name))}. Fetch or save it again, or give the model that was compressed."
            )


def _shape(shape: tuple[int, ...] | None) -> str:
    return "no tensor" if shape is None else f"shape {shape}"
