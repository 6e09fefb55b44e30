"""Pareto sets on disk: fitted tensor by tensor from checkpoints, and made an ordinary model for one preference.

A folder of a set is a Hugging Face model, the merged one that no preference changes, and beside its shards
``pareto.safetensors`` with what preferences add, and the digest of each tensor that it belongs to.
"""

import dataclasses
import hashlib
import math
import os
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from heedful._checkpoints import CheckpointWriter, TensorInfo, TensorSource, open_checkpoint
from heedful._files import digest_file, load_arrays, save_arrays
from heedful._results import Report, track
from heedful.errors import FileFormatError, InputError, ParameterError
from heedful.merge.pareto_merging._data_free import DataFreeFit
from heedful.merge.pareto_merging._matrices import Sources
from heedful.merge.pareto_merging._scalarization import as_preference
from heedful.merge.pareto_merging._set import Factors, ParetoSet, factors_of, named_parts, packed, unpacked

FACTORS_FILE = "pareto.safetensors"
_INDEX = "model.safetensors.index.json"
_START = {"start": "task_arithmetic", "start_scale": 0.3, "include": None}
_FIT = (
    "rank",
    "scalarization",
    "smoothing",
    "concentration",
    "target_scale",
    "normalize",
    "refine_steps",
    "random_state",
)


@dataclasses.dataclass(frozen=True)
class ParetoReport(Report):
    """What ``fit_files`` wrote.

    Parameters
    ----------
    models : tuple of str
        The names that preferences speak of.
    out : Path
        The folder.
    n_tensors, n_matrices : int
        Tensors of the model, and how many of them follow the preference.
    n_parameters, n_extra_parameters : int
        Numbers in the model, and in what preferences add to it.
    """

    models: tuple[str, ...]
    out: Path
    n_tensors: int
    n_matrices: int
    n_parameters: int
    n_extra_parameters: int


@dataclasses.dataclass(frozen=True)
class StoredSet:
    """A folder of a Pareto set, opened: tensors of the base are read, and compared with their digests, one by one."""

    folder: Path
    source: TensorSource
    names: tuple[str, ...]
    factors: Mapping[str, Factors]
    digests: Mapping[str, str]

    def tensor(self, name: str) -> Tensor:
        """A tensor of the base.

        Raises
        ------
        InputError
            If it is not the one that the set was fitted with.
        """
        tensor = self.source.get(name)
        if _digest(tensor) != self.digests.get(name):
            raise InputError(
                f"{name} in {self.folder} is not the tensor that {FACTORS_FILE} belongs to: its digest differs. Restore the "
                "weights that were written with it, or fit again."
            )
        return tensor

    def in_memory(self) -> ParetoSet:
        """The whole set."""
        base = {name: self.tensor(name).clone() for name in self.source.names}
        return ParetoSet(self.names, base, self.factors)


def fit_files(
    base: TensorSource,
    models: Mapping[str, TensorSource],
    out: str | os.PathLike,
    *,
    key: str,
    parameters: Mapping[str, Any],
    exclude: Sequence[str] = (),
    dtype: torch.dtype | None = None,
    shard_size: str | int = "5GB",
    work_dir: str | os.PathLike | None = None,
    overwrite: bool = False,
    files: Mapping[str, Path | str] | None = None,
) -> ParetoReport:
    """``fit_pareto_set`` from checkpoint to folder.

    Parameters
    ----------
    base : TensorSource
        The checkpoint that all were fine-tuned from.
    models : mapping of str to TensorSource
        The fine-tuned ones, by the names that preferences will use.
    out, shard_size, work_dir, overwrite
        As for ``CheckpointWriter``.
    key : str
        What determines the inputs. The fit of an interrupted run is computed again; its complete shards are kept.
    parameters : mapping
        Settings of ``fit_pareto_set``; ``lambda`` and ``scale`` are other words for ``start_scale``.
    exclude : sequence of str
        Tensors that stay the base's.
    dtype : torch.dtype, optional
        Type of the model's floating-point tensors. If None, the base's.
    files : mapping of str to path or text
        What else belongs in the folder.

    Returns
    -------
    ParetoReport
        Names, sizes and the folder.

    Notes
    -----
    Memory: K + 3 float32 copies of the largest tensor, and the factors.
    """
    settings = _settings(parameters)
    sources = Sources(base, models, **{name: settings[name] for name in _START}, exclude=exclude, dtype=dtype)
    fit = DataFreeFit(sources, **{name: value for name, value in settings.items() if name not in _START})
    plan = {name: TensorInfo(base.info(name).shape, sources.dtype_of(name)) for name in base.names}
    digests = {}
    key = repr((key, sorted(settings.items()), tuple(models), exclude, dtype))
    with (
        CheckpointWriter(out, plan, key=key, shard_size=shard_size, work_dir=work_dir, overwrite=overwrite) as writer,
        tempfile.TemporaryDirectory() as folder,
    ):
        pending = frozenset(writer.pending)
        for name in track(base.names, "fit"):
            tensor = fit.add(name)
            digests[name] = _digest(tensor)
            if name in pending:
                writer.add(name, tensor)
        factors = fit.factors()
        meta = {"class": ParetoSet.__name__, "names": list(models), "digests": digests}
        save_arrays(Path(folder, FACTORS_FILE), *packed(named_parts(factors), meta))
        written = writer.finish(config=base.config, files={**(files or {}), FACTORS_FILE: Path(folder, FACTORS_FILE)})
    return ParetoReport(
        models=tuple(models),
        out=written,
        n_tensors=len(plan),
        n_matrices=len(factors),
        n_parameters=sum(math.prod(info.shape) for info in plan.values()),
        n_extra_parameters=sum(parts.numel for parts in factors.values()),
    )


def pick_files(
    folder: str | os.PathLike,
    preference: Mapping[str, float],
    out: str | os.PathLike,
    *,
    shard_size: str | int = "5GB",
    overwrite: bool = False,
    work_dir: str | os.PathLike | None = None,
) -> Path:
    """The model for one preference, as an ordinary Hugging Face folder; returns ``out``.

    Parameters
    ----------
    folder : path
        What ``fit_files`` wrote.
    preference : mapping of str to float
        Weights >= 0 of the models, in any scale; those left out weigh 0.
    out, shard_size, overwrite, work_dir
        As for ``CheckpointWriter``.

    Notes
    -----
    Tensor by tensor: memory of a few copies of the largest one. The values are those of ``ParetoSet.state_dict``.
    """
    if Path(out).resolve() == Path(folder).resolve():
        raise ParameterError(f"{out} is the folder of the set, which one of its models would replace. Choose another.")
    stored = open_set(folder)
    with stored.source as source:
        weights = as_preference(preference, stored.names)
        plan = {name: source.info(name) for name in source.names}
        key = repr((digest_file(stored.folder / FACTORS_FILE), weights.tolist()))
        with CheckpointWriter(
            out, plan, key=key, shard_size=shard_size, work_dir=work_dir, overwrite=overwrite
        ) as writer:
            for name in track(writer.pending, "pick"):
                tensor = stored.tensor(name)
                writer.add(name, stored.factors[name].added_to(tensor, weights) if name in stored.factors else tensor)
            files = _companions(stored.folder)
            if card := files.get("README.md"):
                shares = ", ".join(
                    f"{name} {weight:.4g}" for name, weight in zip(stored.names, weights.tolist(), strict=True)
                )
                told = f"This is the model of that Pareto set for the preference {shares}."
                files["README.md"] = f"{Path(card).read_text(encoding='utf-8')}\n{told}\n"
            return writer.finish(config=source.config, files=files)


def open_set(folder: str | os.PathLike) -> StoredSet:
    """The folder of a Pareto set.

    Raises
    ------
    FileNotFoundError
        If there is no ``pareto.safetensors`` in it.
    FileFormatError
        If that file is not what ``fit_files`` wrote.
    """
    folder = Path(folder)
    path = folder / FACTORS_FILE
    if not path.is_file():
        raise FileNotFoundError(
            f"{folder} has no {FACTORS_FILE}, so it is no Pareto set. Write one with `heedful merge` and merge_method: pareto."
        )
    arrays, meta = load_arrays(path)
    try:
        factors, names, digests = factors_of(unpacked(arrays, meta)), tuple(meta["names"]), dict(meta["digests"])
    except (LookupError, TypeError, ValueError) as error:
        raise FileFormatError(f"{path} lacks or garbles a part of a Pareto set: {error!r}.") from error
    source = open_checkpoint(folder)
    if set(source.names) != set(digests):
        raise InputError(f"{folder} holds other tensors than its {FACTORS_FILE} belongs to. Fit again.")
    return StoredSet(folder, source, names, factors, digests)


def _settings(parameters: Mapping[str, Any]) -> dict[str, Any]:
    given = {"start_scale" if name in ("lambda", "scale") else name: value for name, value in parameters.items()}
    if unknown := [name for name in given if name not in (*_START, *_FIT)]:
        raise ParameterError(
            f"Pareto merging has no setting {', '.join(unknown)}. It has {', '.join((*_START, *_FIT))}; lambda is start_scale."
        )
    return {**_START, **given}


def _digest(tensor: Tensor) -> str:
    """SHA-256 of the tensor's bytes."""
    return hashlib.sha256(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data).hexdigest()


def _companions(folder: Path) -> dict[str, Path | str]:
    """The files of the folder that are neither weights nor config: tokenizer, generation settings."""
    return {
        path.name: path
        for path in sorted(folder.iterdir())
        if path.is_file() and path.suffix != ".safetensors" and path.name not in ("config.json", _INDEX)
    }
