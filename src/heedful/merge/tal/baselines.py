"""A blind start to compare with: weights taken from a larger network, whatever the task.

The other blind starts are settings. LoGAH is ``TaskAwareLearngene.tune`` on a single task without an embedding, and GHN-3
the same with ``decoder="tile"`` in its config.

Xu et al.: Initializing Models with Larger Ones, ICLR 2024.
"""

import re
from collections.abc import Collection, Iterable
from fnmatch import fnmatchcase
from typing import Literal

import torch
from torch import Tensor, nn

from heedful._validation import require_choice
from heedful.errors import InputError

_NUMBER = re.compile(r"(?<=\.)\d+(?=\.)")  # of a layer
_PACKED = re.compile(r"in_proj|\bqkv\b")  # queries, keys and values, one above the other


@torch.no_grad()
def weight_selection(
    model: nn.Module,
    source: nn.Module,
    *,
    layers: Literal["first", "even"] = "first",
    channels: Literal["leading", "even"] = "even",
    exclude: Collection[str] = (),
) -> nn.Module:
    """Start a network with a part of the weights of a larger one of the same family, in place.

    Parameters
    ----------
    model, source : nn.Module
        Networks whose parameters are called alike but for the numbers of layers, ``source`` at least as long in every
        axis and at least as deep.
    layers : {"first", "even"}
        Take the first layers of ``source``, or layers at even gaps, the first and the last among them.
    channels : {"leading", "even"}
        Of each axis take the first entries, or entries at even gaps; of queries, keys and values that are one matrix, of
        each a third.
    exclude : collection of str
        Parameters that stay as they are: names, or globs such as ``"head.*"``.

    Returns
    -------
    nn.Module
        ``model``.

    Raises
    ------
    InputError
        If ``source`` lacks a parameter or is too short in an axis; nothing is changed then.

    References
    ----------
    Xu et al.: Initializing Models with Larger Ones, ICLR 2024. They take first layers, and channels at even gaps.

    Examples
    --------
    >>> source = nn.Sequential(nn.Linear(4, 4))
    >>> small = weight_selection(nn.Sequential(nn.Linear(2, 3)), source, channels="leading")
    >>> torch.equal(small[0].weight, source[0].weight[:3, :2])
    True
    """
    require_choice(layers, "layers", ("first", "even"))
    require_choice(channels, "channels", ("leading", "even"))
    given = dict(source.named_parameters())
    wanted = {
        name: parameter
        for name, parameter in model.named_parameters()
        if not any(fnmatchcase(name, glob) for glob in exclude)
    }
    numbers, other_numbers = _numbers(name for name, _ in model.named_parameters()), _numbers(given)

    def origin(name: str) -> str:
        def renumber(match: re.Match) -> str:
            place = _NUMBER.sub("*", name[: match.start()])
            own, other = numbers[place], other_numbers.get(place, [])
            at = own.index(int(match[0]))
            if layers == "even" and 1 < len(own) <= len(other):
                at = round(at * (len(other) - 1) / (len(own) - 1))
            return str(other[at]) if at < len(other) else match[0]

        return _NUMBER.sub(renumber, name)

    selected = {}
    for name, parameter in wanted.items():
        if origin(name) not in given:
            raise InputError(
                f"The source has no parameter {origin(name)!r} to start {name!r} with. Give a network of the same family "
                "that is at least as deep, or exclude the parameter."
            )
        selected[name] = _select(given[origin(name)], parameter, name, channels)
    for name, values in selected.items():
        wanted[name].copy_(values)
    return model


def _numbers(names: Iterable[str]) -> dict[str, list[int]]:
    """Place of a number in names -> the numbers that stand there, ascending."""
    found: dict[str, set[int]] = {}
    for name in names:
        for match in _NUMBER.finditer(name):
            found.setdefault(_NUMBER.sub("*", name[: match.start()]), set()).add(int(match[0]))
    return {place: sorted(numbers) for place, numbers in found.items()}


def _select(given: Tensor, wanted: Tensor, name: str, channels: str) -> Tensor:
    if given.ndim != wanted.ndim or any(more < n for more, n in zip(given.shape, wanted.shape, strict=True)):
        raise InputError(
            f"{name} has shape {tuple(wanted.shape)} and cannot be taken from one of shape {tuple(given.shape)} in the "
            "source. Give a source that is at least as long in every axis, or exclude the parameter."
        )
    for axis, n in enumerate(wanted.shape):
        parts = 3 if axis == 0 and _PACKED.search(name) else 1
        each, of = n // parts, given.shape[axis] // parts
        chosen = torch.arange(each) if channels == "leading" else torch.linspace(0, of - 1, each).round().long()
        rows = torch.cat([chosen + part * of for part in range(parts)])
        given = given.index_select(axis, rows.to(given.device))
    return given
