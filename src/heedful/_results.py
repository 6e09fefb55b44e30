"""What methods hand back besides arrays: reports, and progress while they work."""

import contextlib
import dataclasses
import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sized
from contextvars import ContextVar
from typing import Any, TypeVar

T = TypeVar("T")
logger = logging.getLogger("heedful")


@dataclasses.dataclass(frozen=True)
class Report:
    """Base of reported results: a frozen dataclass whose ``to_dict`` holds JSON types only."""

    def to_dict(self) -> dict[str, Any]:
        """All fields: arrays as lists, NumPy scalars as Python numbers, paths as text; NaN and infinity stay floats."""
        return {field.name: _jsonable(getattr(self, field.name)) for field in dataclasses.fields(self)}


def _jsonable(value: Any) -> Any:
    if hasattr(value, "tolist"):  # arrays, tensors and NumPy scalars
        value = value.tolist()
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Report):
        return value.to_dict()
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _jsonable(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _jsonable(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_jsonable(item) for item in value]
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    raise TypeError(f"a {type(value).__name__} has no JSON form: {value!r}")


@dataclasses.dataclass(frozen=True)
class Event:
    """One step of long work: which phase, how far, of how much (``total`` None if unknown), and numbers of interest."""

    phase: str
    done: int
    total: int | None = None
    values: dict[str, float] = dataclasses.field(default_factory=dict)


_sink: ContextVar[Callable[[Event], Any] | None] = ContextVar("heedful_progress", default=None)


@contextlib.contextmanager
def progress(sink: Callable[[Event], Any]) -> Iterator[None]:
    """Send the progress of everything that runs inside the block to ``sink``, a function of one ``Event``."""
    token = _sink.set(sink)
    try:
        yield
    finally:
        _sink.reset(token)


def report_progress(event: Event) -> None:
    """Tell the sink, if there is one."""
    if (sink := _sink.get()) is not None:
        sink(event)


def track(iterable: Iterable[T], phase: str, total: int | None = None) -> Iterator[T]:
    """Iterate, reporting each completed item as an ``Event`` of ``phase``."""
    if total is None and isinstance(iterable, Sized):
        total = len(iterable)
    for done, item in enumerate(iterable, start=1):
        yield item
        report_progress(Event(phase, done, total))
