"""Merge checkpoints on disk as a recipe says: read tensor by tensor, write shard by shard.

Each input byte is read once and each output byte written once, and memory holds the tensors of one name, however large the
models are. The result is that of ``merge_state_dicts``, bit for bit.
"""

import contextlib
import dataclasses
import json
import math
import os
import re
import secrets
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from heedful._checkpoints import CheckpointWriter, TensorInfo, TensorSource, companions, open_checkpoint
from heedful._random import spawn
from heedful._results import Report, track
from heedful.errors import FileFormatError, HeedfulWarning, InputError, ParameterError
from heedful.merge._methods import MergeMethod, merge_tensor, tensor_generator
from heedful.merge._recipes import ModelReference, Recipe, layer_depths, method_of, read_dtype, read_recipe
from heedful.merge._task_vectors import norm_order, read, require_same_tensors, warn_of_copies
from heedful.merge.cabs import report_on


@dataclasses.dataclass(frozen=True)
class MergeReport(Report):
    """What ``merge_checkpoints`` wrote.

    Parameters
    ----------
    method : str
        The merge method.
    models : tuple of str
        What was merged, in the recipe's order.
    out : Path
        The folder of the merged model.
    n_tensors, n_merged : int
        Tensors in it, and those that were merged; the others are the base's.
    n_parameters, n_bytes : int
        Numbers in all tensors, and the bytes that they take.
    """

    method: str
    models: tuple[str, ...]
    out: Path
    n_tensors: int
    n_merged: int
    n_parameters: int
    n_bytes: int


class Inputs(NamedTuple):
    """A recipe with its checkpoints open: ``reference`` gives names, types and files, ``base`` what vectors start from."""

    recipe: Recipe
    method: MergeMethod
    reference: TensorSource
    base: TensorSource | None
    models: Mapping[str, TensorSource]
    settings: Mapping[str, Mapping[str, Any]]  # of each tensor that is merged


def merge_checkpoints(
    recipe: str | os.PathLike | Mapping,
    out: str | os.PathLike,
    *,
    device: str = "cpu",
    shard_size: str | int = "5GB",
    dtype: str | torch.dtype | None = None,
    work_dir: str | os.PathLike | None = None,
    fresh: bool = False,
    overwrite: bool = False,
    random_state: int | np.random.Generator | np.random.RandomState | None = 0,
) -> MergeReport:
    """Merge the models of a mergekit recipe into a new Hugging Face folder.

    Parameters
    ----------
    recipe : path or mapping
        A mergekit YAML file, or what such a file holds. Models are folders in the Hugging Face layout, ``.safetensors``
        files, ``model+adapter`` pairs with a LoRA adapter, or hub names that are in the local cache.
    out : path
        The folder to make. It appears when all is complete.
    device : str
        Where tensors are merged, one at a time.
    shard_size : int or str
        Largest size of a file, in bytes or as "5GB".
    dtype : str or torch.dtype, optional
        Type of the output; None leaves it to the recipe's ``out_dtype`` or ``dtype`` or, without them, to the base.
    work_dir : path, optional
        Where shards wait until all are complete, on the file system of ``out``; by default beside it.
    fresh : bool
        Whether to begin anew where an interrupted merge could be continued.
    overwrite : bool
        Whether a checkpoint at ``out`` may be replaced.
    random_state : int, RandomState, Generator or None
        For methods that draw at random (DARE). Only with an int is an interrupted merge continued.

    Returns
    -------
    MergeReport
        What was written. The folder holds sharded safetensors, ``config.json``, the tokenizer and generation settings of
        the base, the recipe as ``mergekit_config.yml``, and a model card.

    Raises
    ------
    FileFormatError, ParameterError
        If the recipe is no YAML or says what it cannot; the path of the key is named.
    InputError
        If models are not there, or differ in names or shapes of tensors, are quantised, or not finite.
    FileExistsError
        If ``out`` is there and may not be replaced.

    Notes
    -----
    A merge that was interrupted goes on after its last complete shard when it is asked for again with the same recipe
    and unchanged inputs, and ends with the same bytes. Memory: the mapped tensors of one name and the merged one; for
    methods that look at whole tensors (all but linear, task_arithmetic, cabs and bs_only) some ten float32 copies besides.
    """
    checked = read_recipe(recipe)
    out_dtype = checked.dtype if dtype is None else read_dtype(dtype, "dtype")
    seed = spawn(random_state, 1)[0]
    _require_device(device)
    with open_inputs(checked) as inputs:
        plan = {name: _planned(inputs.reference.info(name), out_dtype) for name in inputs.reference.names}
        key = _key(inputs, out_dtype, device, seed) + (secrets.token_hex() if fresh else "")
        writing: dict[str, Any] = {"key": key, "shard_size": shard_size, "work_dir": work_dir, "overwrite": overwrite}
        config, files = _config(inputs.reference, out_dtype), _files(inputs, Path(out).name)
        if inputs.method.name == "pareto":
            _fit_pareto(inputs, out, device=device, dtype=out_dtype, seed=seed, files=files, **writing)
        else:
            with CheckpointWriter(out, plan, **writing) as writer:
                for name in track(writer.pending, "merge"):
                    writer.add(name, _merged(inputs, name, plan[name].dtype, device, seed))
                writer.finish(config=config, files=files)
    return MergeReport(
        method=inputs.method.name,
        models=tuple(inputs.models),
        out=Path(out),
        n_tensors=len(plan),
        n_merged=len(inputs.settings),
        n_parameters=sum(math.prod(info.shape) for info in plan.values()),
        n_bytes=sum(info.nbytes for info in plan.values()),
    )


def report_recipe(recipe: str | os.PathLike | Mapping, *, random_state: Any = 0):  # a DataFrame
    """``sparsity_report`` of the task vectors as the recipe's method prunes them, tensor by tensor; nothing is written."""
    seed = spawn(random_state, 1)[0]
    with open_inputs(read_recipe(recipe)) as inputs:
        prune, base = inputs.method.prune, inputs.base
        if prune is None or base is None:
            raise ParameterError(
                f"merge_method {inputs.method.name} prunes no task vectors: there is nothing to report."
            )

        if not inputs.settings:
            raise ParameterError("no tensor is merged: every model is the base, or everything is excluded.")

        def pruned(name: str) -> tuple[str, list[torch.Tensor]]:
            tensors = [read(model, name, label) for label, model in inputs.models.items()]
            generator, settings = tensor_generator(seed, name), inputs.settings[name]
            return name, list(prune(read(base, name, base.origin), tensors, generator=generator, **settings))

        blocks = next(iter(inputs.settings.values()), {}).get("m", 256)
        return report_on(map(pruned, track(inputs.settings, "report")), m=blocks)


@contextlib.contextmanager
def open_inputs(recipe: Recipe) -> Iterator[Inputs]:
    """Open what the recipe names, and check all that can be checked before anything is computed.

    Raises
    ------
    InputError, FileFormatError
        If a model is not there or cannot be read, or the models do not fit together.
    ParameterError
        If a setting is out of range for some tensor.
    """
    for message in recipe.warnings:
        warnings.warn(message, HeedfulWarning, stacklevel=3)
    method = method_of(recipe.method)
    with contextlib.ExitStack() as stack:

        def opened(reference: ModelReference, base: TensorSource | None = None) -> TensorSource:
            source = stack.enter_context(open_checkpoint(locate(reference.path), base=base))
            if reference.adapter is not None:
                folder = locate(reference.adapter)
                if not (folder / "adapter_config.json").is_file():
                    raise InputError(f"{reference}: {folder} is no adapter. Give the folder of one after the +.")
                source = stack.enter_context(open_checkpoint(folder, base=source))
            return source

        base = None if recipe.base is None else opened(recipe.base)
        sources = [
            base if base is not None and model == recipe.base else opened(model, base) for model in recipe.models
        ]
        models = dict(zip(map(str, recipe.models), sources, strict=True))
        reference = sources[0] if base is None else base
        _require_layers(recipe, reference)
        _require_one_vocabulary(recipe)
        settings: dict[str, dict[str, Any]] = {}
        if models:
            names = require_same_tensors(reference, models, recipe.exclude)
            settings = _settings(recipe, method, names, layer_depths(reference.names))
        else:
            warnings.warn(f"every model is the base {recipe.base}, which is copied.", HeedfulWarning, stacklevel=3)
        if method.needs_base:
            warn_of_copies(reference, models, settings)
            order = None
            for each in settings.values():
                if each.get("order") == "norm":
                    order = order or norm_order(reference, models, settings)
                    each["order"] = order
        yield Inputs(recipe, method, reference, base if method.needs_base else None, models, settings)


def locate(path: str) -> Path:
    """The local folder or file of a model: ``path`` itself, or what the Hugging Face cache holds under that name."""
    if os.path.exists(path):
        return Path(path)
    name, _, revision = path.partition("@")
    if re.fullmatch(r"[\w.-]+(/[\w.-]+)?", name):
        with contextlib.suppress(ImportError, OSError, ValueError):  # not installed, not in the cache, no such name
            from huggingface_hub import snapshot_download

            return Path(snapshot_download(name, revision=revision or None, local_files_only=True))
    raise InputError(
        f"{path} is neither a folder nor a model in the local Hugging Face cache, and heedful downloads nothing. Check the "
        f"path, or fetch it first: hf download {name}"
    )


def _settings(
    recipe: Recipe, method: MergeMethod, names: list[str], depths: Mapping[str, float]
) -> dict[str, dict[str, Any]]:
    """The settings of each tensor. Most tensors share theirs, which are then checked once."""
    checked: dict[str, dict[str, Any]] = {}
    settings = {}
    for name in names:
        given = recipe.settings(name, depths[name])
        known = repr(given)
        if known not in checked:
            try:
                checked[known] = method.settings(len(recipe.models), **given)
            except ParameterError as error:
                raise ParameterError(f"{name}: {error}") from None
        settings[name] = checked[known]
    return settings


def _merged(inputs: Inputs, name: str, dtype: torch.dtype, device: str, seed: int) -> torch.Tensor:
    if name not in inputs.settings:
        return inputs.reference.get(name).to(dtype)
    return merge_tensor(
        inputs.method, name, inputs.base, inputs.models, inputs.settings[name], seed=seed, dtype=dtype, device=device
    )


def _fit_pareto(inputs: Inputs, out: str | os.PathLike, *, device: str, seed: int, **options: Any) -> None:
    """A Pareto set in the place of one model. Preferences name the models by the last part of their paths."""
    from heedful.merge._pareto_files import fit_files

    if device != "cpu" or inputs.base is None:
        raise ParameterError(f"merge_method pareto computes on the CPU; got device={device!r}.")
    told = list({id(settings): settings for settings in inputs.settings.values()}.values()) or [{}]
    if len(told) > 1:
        raise ParameterError("parameters: pareto takes one value for the whole model, and no rules or gradients.")
    models = {}
    for path, source in inputs.models.items():
        name = re.split(r"[/+]", path.rstrip("/"))[-1]
        models[path if name in models else name] = source
    parameters = {**told[0], "random_state": seed}
    fit_files(inputs.base, models, out, parameters=parameters, exclude=inputs.recipe.exclude, **options)


def _planned(info: TensorInfo, dtype: torch.dtype | None) -> TensorInfo:
    return info if dtype is None or not info.dtype.is_floating_point else TensorInfo(info.shape, dtype)


def _key(inputs: Inputs, dtype: torch.dtype | None, device: str, seed: int) -> str:
    """What decides the bytes of the output: the recipe, its settings, and which files hold the models."""
    recipe = dataclasses.replace(inputs.recipe, text="", warnings=())
    paths = [
        locate(path) for model in {recipe.base, *recipe.models} if model for path in (model.path, model.adapter) if path
    ]
    files = sorted(file for path in paths for file in (path.iterdir() if path.is_dir() else [path]) if file.is_file())
    stamps = [(str(file), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
    return repr((recipe, dtype, device, seed, stamps))


def _require_device(device: str) -> None:
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for a device
        raise ParameterError(f"device: there is no {device!r} here ({str(error).splitlines()[0]}). Try cpu.") from error


def _require_layers(recipe: Recipe, reference: TensorSource) -> None:
    """A slice must hold all layers of the models."""
    layers = {int(match[1]) for name in reference.names if (match := re.search(r"(?:^|\.)(\d+)(?:\.|$)", name))}
    if recipe.n_layers not in (None, len(layers)):
        raise ParameterError(
            f"slices[0].sources: layer_range ends at {recipe.n_layers}, and {reference.origin} has {len(layers)} layers. "
            "heedful merges whole models: write models, or let mergekit cut them."
        )


def _require_one_vocabulary(recipe: Recipe) -> None:
    """Where a tokenizer is asked for, all models must have its vocabulary: heedful moves no rows of embeddings."""
    if recipe.tokenizer is None:
        return
    wanted = _vocabulary(locate(recipe.tokenizer.path))
    for model in filter(None, (recipe.base, *recipe.models)):
        found = _vocabulary(locate(model.path))
        if None not in (wanted, found) and found != wanted:
            raise InputError(
                f"tokenizer_source: {model.path} has another vocabulary than {recipe.tokenizer.path}, and heedful moves no "
                "rows of embeddings. Leave the key out if token numbers mean the same, or let mergekit align them."
            )


def _vocabulary(path: Path) -> Any:
    """What tells which number a token has; None if the folder does not say."""
    if (path / "tokenizer.json").is_file():
        try:
            content = json.loads((path / "tokenizer.json").read_bytes())
            added = {token["content"]: token["id"] for token in content.get("added_tokens", [])}
            return content["model"].get("vocab"), content["model"].get("merges"), added
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise FileFormatError(f"{path / 'tokenizer.json'} cannot be read as a tokenizer: {error!r}.") from error
    for name in ("tokenizer.model", "vocab.json", "vocab.txt"):
        if (path / name).is_file():
            return (path / name).read_bytes()
    return None


def _config(reference: TensorSource, dtype: torch.dtype | None) -> dict[str, Any] | None:
    config = None if reference.config is None else dict(reference.config)
    if config is not None and dtype is not None:
        for key in {"torch_dtype", "dtype"} & config.keys() or {"torch_dtype"}:
            config[key] = str(dtype).removeprefix("torch.")
    return config


def _files(inputs: Inputs, title: str) -> dict[str, Path | str]:
    """What stands beside the weights: tokenizer and generation settings, the recipe, a model card."""
    recipe = inputs.recipe
    donor = locate((recipe.tokenizer or recipe.base or recipe.models[0]).path)
    files: dict[str, Path | str] = {**companions(donor)}
    if recipe.chat_template is not None:
        files["chat_template.jinja"] = recipe.chat_template
    return files | {"mergekit_config.yml": recipe.text, "README.md": _model_card(inputs, title)}


def _model_card(inputs: Inputs, title: str) -> str:
    """Front matter as the Hugging Face hub reads it, and the recipe in full."""
    import yaml

    recipe = inputs.recipe
    names = [
        path for model in filter(None, (recipe.base, *recipe.models)) for path in (model.path, model.adapter) if path
    ]
    on_hub = [
        name for name in dict.fromkeys(names) if re.fullmatch(r"[\w.-]+/[\w.-]+", name) and not os.path.exists(name)
    ]
    matter: dict[str, Any] = {"library_name": "transformers", "tags": ["mergekit", "merge"]}
    if on_hub:
        matter["base_model"] = on_hub
    base = f" on the base {recipe.base}" if inputs.base is not None else ""
    fence = "`" * max(3, 1 + max(map(len, re.findall("`+", recipe.text)), default=0))
    return (
        f"---\n{yaml.safe_dump(matter, sort_keys=False)}---\n\n# {title}\n\n"
        f"A merge by {inputs.method.title}{base}, made with heedful, of\n\n"
        + "".join(f"* {model}\n" for model in recipe.models)
        + f"\nfrom this recipe:\n\n{fence}yaml\n{recipe.text.strip()}\n{fence}\n"
    )
