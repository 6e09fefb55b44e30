"""Rooms that load their modules on first use (PEP 562), so that ``import heedful`` stays quick."""

import importlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def attach(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], Callable[[], list[str]], list[str]]:
    """``__getattr__``, ``__dir__`` and ``__all__`` of ``package``, whose names come from ``modules``.

    A module is named relative to ``package``: ``"tsam"`` is in it, ``"._flatness"`` beside it.
    """
    home = {name: module for module, names in modules.items() for name in names}

    def __getattr__(name: str) -> Any:
        if name in home:
            return getattr(importlib.import_module(f".{home[name]}", package), name)
        raise AttributeError(f"module {package!r} has no attribute {name!r}; it has {', '.join(sorted(home))}")

    return __getattr__, lambda: sorted(home), sorted(home)
