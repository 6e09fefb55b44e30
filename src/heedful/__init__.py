"""heedful: methods that heed the structure their standard counterparts are blind to, and evidence whether heeding pays.

Rooms (``heedful.optim``, ``heedful.compress`` and others) hold the methods, ``heedful.data`` real data,
``heedful.evidence`` the harness that studies run on. Everything loads on first use.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from heedful._files import load as load
    from heedful._results import Event as Event
    from heedful._results import progress as progress

__version__ = "0.1.0"
__all__ = [
    "Event",
    "__version__",
    "calibrate",
    "causal",
    "compress",
    "data",
    "errors",
    "evidence",
    "load",
    "merge",
    "optim",
    "progress",
    "timeseries",
    "unlearn",
]

_HOME = {"Event": "_results", "progress": "_results", "load": "_files"}


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(importlib.import_module(f"heedful.{_HOME[name]}"), name)
    if name in __all__:
        return importlib.import_module(f"heedful.{name}")
    raise AttributeError(f"module 'heedful' has no attribute {name!r}; it has {', '.join(__all__)}")


def __dir__() -> list[str]:
    return __all__
