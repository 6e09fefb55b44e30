"""Calibration tokens out of texts: a file of plain text, a file with one JSON object a line, or a list of strings."""

import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor

from heedful._random import numpy_generator
from heedful._validation import require_number
from heedful.errors import FileFormatError, InputError


def calibration_tokens(
    texts: str | os.PathLike | Sequence[str],
    tokenizer: Callable[..., Any],
    *,
    n_samples: int = 128,
    length: int = 2048,
    random_state: Any = 0,
) -> Int[Tensor, "n length"]:
    """Random stretches of ``length`` tokens, no two of which overlap, from texts that are joined end to end.

    Parameters
    ----------
    texts : path or sequence of str
        A ``.txt`` file, which is one text; a ``.jsonl`` file with a string under ``"text"`` in each line; or texts.
    tokenizer : callable
        A Hugging Face tokenizer. Its end-of-sequence token, if it has one, goes between texts; no other special token is
        added.
    n_samples, length : int
        Stretches, >= 1, and the tokens in each, >= 2; usually 128 and 2048.
    random_state : int, Generator, RandomState or None
        Draws where the stretches lie.

    Raises
    ------
    FileFormatError
        If the file is neither kind, is no UTF-8, or a line is no JSON object with a text; the message says which.
    InputError
        If there are fewer than ``n_samples`` × ``length`` tokens.
    """
    require_number(n_samples, "n_samples", low=1, integer=True)
    require_number(length, "length", low=2, integer=True)
    generator = numpy_generator(random_state)
    # The end of a text is a token of its own; without one, texts follow each other directly.
    end = getattr(tokenizer, "eos_token_id", None)
    tokens = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in _read(texts))
    pieces = [np.asarray(ids if end is None else [*ids, end], dtype=np.int64) for ids in tokens if ids]
    stream = np.concatenate(pieces) if pieces else np.empty(0, np.int64)
    spare = len(stream) - n_samples * length
    if spare < 0:
        raise InputError(
            f"the calibration texts have {len(stream):,} tokens; {n_samples} samples of {length} need "
            f"{n_samples * length:,}. Give more text, or ask for fewer or shorter samples."
        )
    # Every way to place the stretches is as likely as any other: gaps before them are spare tokens, in random order.
    starts = np.sort(generator.choice(spare + n_samples, size=n_samples, replace=False))
    starts += np.arange(n_samples) * (length - 1)
    windows = stream[starts[:, None] + np.arange(length)]
    return torch.from_numpy(generator.permutation(windows))


def _read(texts: str | os.PathLike | Sequence[str]) -> Iterator[str]:
    if not isinstance(texts, (str, os.PathLike)):
        yield from texts
        return
    path = Path(texts)
    if path.suffix not in (".txt", ".jsonl"):
        raise FileFormatError(
            f"{path}: calibration texts are read from .txt and .jsonl files. Convert it to one of them."
        )
    try:
        if path.suffix == ".txt":
            yield path.read_text(encoding="utf-8")
            return
        with path.open(encoding="utf-8") as file:
            for number, line in enumerate(file, start=1):
                if line.strip():
                    yield _text_of(path, number, line)
    except UnicodeDecodeError as error:
        raise FileFormatError(
            f"{path} is not UTF-8 text ({error.reason} at byte {error.start}). Convert it."
        ) from error


def _text_of(path: Path, number: int, line: str) -> str:
    try:
        entry = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise FileFormatError(f"{path}, line {number} is not JSON: {error}.") from error
    if not isinstance(entry, dict) or not isinstance(entry.get("text"), str):
        raise FileFormatError(
            f'{path}, line {number} must be a JSON object with a string under "text"; got {line.strip():.80}'
        )
    return entry["text"]
