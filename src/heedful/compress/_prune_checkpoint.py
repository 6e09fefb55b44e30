"""Prune the weights of a checkpoint on their way from file to file, one tensor at a time."""

import dataclasses
import functools
import math
import os
import re
import secrets
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from torch import Tensor

from heedful._checkpoints import CheckpointWriter, TensorSource, companions, open_checkpoint
from heedful._results import Report, track
from heedful.compress._patterns import require_sparsity
from heedful.compress._sparsity import matching
from heedful.compress.bame._nm import parse_pattern
from heedful.compress.bame.export import prune_weight
from heedful.compress.dynadiag.convert import project_to_diagonals
from heedful.errors import InputError, ParameterError

# Matrices that no linear layer multiplies by, and heads, which are usually left dense.
_OTHERS = re.compile(r"\w*embed\w*|wte|wpe|shared|relative_attention_bias|lm_head|classifier|score|qa_outputs")
_TRANSPOSED = ("gpt2", "openai-gpt", "imagegpt", "decision_transformer")  # families whose matrices are (in, out)


@dataclasses.dataclass(frozen=True)
class PruneReport(Report):
    """What ``prune_checkpoint`` wrote.

    Parameters
    ----------
    out : Path
        The folder of the pruned model.
    n_tensors, n_pruned : int
        Tensors in it, and those that were pruned.
    n_parameters : int
        Numbers in all tensors.
    sparsity : float
        Share of zeros in the tensors that were pruned.
    kept_energy : float
        Σ w² of what was kept of them, as a share of that before.
    """

    out: Path
    n_tensors: int
    n_pruned: int
    n_parameters: int
    sparsity: float
    kept_energy: float


def prune_checkpoint(
    source: str | os.PathLike,
    out: str | os.PathLike,
    *,
    pattern: str | None = None,
    sparsity: float | None = None,
    exclude: Sequence[str] = (),
    overwrite: bool = False,
) -> PruneReport:
    """Prune the linear layers of a checkpoint once, by magnitude, without loading the model.

    Parameters
    ----------
    source : path
        A Hugging Face folder, or one file of weights.
    out : path
        The folder to make: the same model with zeros, and the tokenizer and settings beside it.
    pattern : str, optional
        Such as "2:4": keep the n largest of every m weights along the inputs of a layer.
    sparsity : float, optional
        Keep whole diagonals instead, those of largest energy, this share of zeros being the aim; in [0, 1).
    exclude : sequence of str
        Layers to leave alone, besides embeddings and the head: names, globs or ``re:…``.
    overwrite : bool
        Whether a checkpoint at ``out`` may be replaced.

    Raises
    ------
    ParameterError
        If not one of pattern and sparsity is given, or an entry of ``exclude`` matches nothing.
    InputError
        If no linear layer is left, one cannot be cut into blocks, or weights are quantized, NaN or infinite.
    FileFormatError, FileNotFoundError, FileExistsError
        If files cannot be read or written.

    Notes
    -----
    Memory: one tensor and its pruned copy.
    """
    if (pattern is None) == (sparsity is None):
        raise ParameterError("give a pattern, such as 2:4, or a sparsity of diagonals: one of them.")
    if pattern is not None:
        n, m = parse_pattern(pattern)
        prune: Callable[[Tensor], Tensor] = functools.partial(prune_weight, n=n, m=m)
    else:
        assert sparsity is not None
        require_sparsity(sparsity)
        prune = functools.partial(project_to_diagonals, sparsity=sparsity)
    with open_checkpoint(source) as model:
        if model.quantization:
            raise InputError(f"{model.origin} is quantized ({model.quantization}). Prune the original, then quantize.")
        chosen, by_inputs = linear_weights(model, exclude=exclude), orientation(model)
        if pattern is not None:
            _require_blocks(model, chosen, m)
        plan = {name: model.info(name) for name in model.names}
        total, kept, zeros = 0.0, 0.0, 0
        with CheckpointWriter(out, plan, key=secrets.token_hex(), overwrite=overwrite) as writer:
            for name in track(writer.pending, "prune"):
                tensor = model.get(name)
                if name in chosen:
                    if not bool(tensor.isfinite().all()):
                        raise InputError(f"{model.origin}: {name} has entries that are NaN or infinite.")
                    total += _energy(tensor)
                    tensor = by_inputs(prune(by_inputs(tensor)))
                    kept += _energy(tensor)
                    zeros += int((tensor == 0).sum())
                writer.add(name, tensor)
            files = companions(model.folder) if model.folder else {}
            path = writer.finish(config=model.config, files=files)
    sizes = {name: math.prod(info.shape) for name, info in plan.items()}
    share = zeros / sum(sizes[name] for name in chosen)
    return PruneReport(path, len(plan), len(chosen), sum(sizes.values()), share, kept / total if total else 1.0)


def linear_weights(source: TensorSource, *, exclude: Sequence[str] = ()) -> tuple[str, ...]:
    """The matrices of linear layers, by the names and shapes of a checkpoint: no embeddings, and no heads."""
    layers = {
        name.removesuffix(".weight"): name
        for name in source
        if name.endswith(".weight") and len(source.info(name).shape) == 2 and source.info(name).dtype.is_floating_point
    }
    layers = {layer: name for layer, name in layers.items() if not any(map(_OTHERS.fullmatch, layer.split(".")))}
    left_out = matching(exclude, "exclude", layers)
    chosen = tuple(name for layer, name in layers.items() if layer not in left_out)
    if not chosen:
        raise InputError(f"{source.origin} has no weights of linear layers{', but those excluded' if layers else ''}.")
    return chosen


def orientation(source: TensorSource) -> Callable[[Tensor], Tensor]:
    """What turns a matrix of this family to (out, in), and back."""
    transposed = (source.config or {}).get("model_type") in _TRANSPOSED
    return (lambda weight: weight.T) if transposed else (lambda weight: weight)


def _require_blocks(source: TensorSource, names: Sequence[str], m: int) -> None:
    by_inputs = orientation(source)
    for name in names:
        inputs = by_inputs(torch.empty(source.info(name).shape, device="meta")).shape[1]
        if inputs % m:
            layer = name.removesuffix(".weight")
            raise InputError(
                f"{name} has {inputs} inputs, which cannot be cut into blocks of {m}. Exclude it: --exclude {layer}, "
                f"exclude=[{layer!r}]."
            )


def _energy(weight: Tensor) -> float:
    return float(torch.linalg.vector_norm(weight, dtype=torch.float64)) ** 2
