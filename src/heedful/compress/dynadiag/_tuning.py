"""Which backend is fastest: measured, kept in a table, looked up by the nearest case; never guessed."""

import functools
import itertools
import json
import math
import warnings
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any, Literal

import pandas as pd
import platformdirs
import torch
from torch import Tensor

from heedful._files import write_atomic
from heedful._machine import fingerprint, time_call
from heedful._results import track
from heedful._validation import require_number
from heedful.compress.dynadiag import _backends
from heedful.errors import HeedfulWarning, ParameterError

Operation = Literal["product", "value_gradient"]
_OPERATIONS: tuple[Operation, ...] = ("product", "value_gradient")
_FORMAT = 1


def tune_backend(
    *,
    device: str = "cpu",
    sizes: Sequence[int] = (128, 512, 2048),
    densities: Sequence[float] = (1.0, 0.5, 0.2, 0.1, 0.05),
    batches: Sequence[int] = (1, 16, 256),
    n_timings: int = 5,
) -> pd.DataFrame:
    """Measure the backends of ``diagonal_matmul`` on this machine; ``backend="auto"`` goes by the result from then on.

    Square matrices are measured with random offsets, forward and for the gradient of the values, with torch's present
    number of threads, in float32 on a CPU and in bfloat16 on a GPU. The table is written to the user's cache folder and
    replaces the one that comes with heedful for this processor and device.

    Parameters
    ----------
    device : str
        "cpu", "cuda", ...
    sizes, densities, batches : sequences
        What is measured: all combinations of features >= 1, shares of active diagonals in (0, 1] and rows of x >= 1.
        A case that lies between them goes by the nearest, in ratios of sizes.
    n_timings : int
        Calls per measurement, >= 1; the fastest counts.

    Returns
    -------
    pandas.DataFrame
        A row for each operation ("product", "value_gradient") and case, with the seconds of each backend.

    Raises
    ------
    ParameterError
        If a number is out of its range, there is nothing to measure, or the device cannot be used.
    OSError
        If the cache folder cannot be written to; nothing is measured then.

    Notes
    -----
    *Cost.* About a minute on one core with the usual cases; 2 × sizes × densities × batches measurements.
    """
    where = _device(device)
    dtype = torch.float32 if where.type == "cpu" else torch.bfloat16
    for size in (*sizes, *batches):
        require_number(size, "sizes and batches", low=1, integer=True)
    for density in densities:
        require_number(density, "densities", low=0.0, open_low=True, high=1.0)
    cases = list(itertools.product(_OPERATIONS, sizes, densities, batches))
    if not cases:
        raise ParameterError("sizes, densities and batches must each hold a number, or there is nothing to measure.")
    _table_path(where.type).parent.mkdir(parents=True, exist_ok=True)  # If it cannot be, say so before the minute.
    rows = []
    for operation, size, density, batch in track(cases, "tune", len(cases)):
        case = _case(operation, (size, size), max(1, round(density * size)), batch)
        rows.append({**case, "seconds": _measure(**case, device=where, dtype=dtype, n_timings=n_timings)})
    _write(where, rows)
    return pd.DataFrame([{**{name: row[name] for name in row if name != "seconds"}, **row["seconds"]} for row in rows])


def choose_backend(operation: Operation, x: Tensor, shape: tuple[int, int], k: int) -> str:
    """The fastest backend that is usable here in the nearest measured case."""
    return _choose(operation, *shape, k, _rounded(x.shape[0]), x.device, x.dtype)


@functools.lru_cache(maxsize=4096)
def _choose(
    operation: Operation,
    out_features: int,
    in_features: int,
    k: int,
    batch: int,
    device: torch.device,
    dtype: torch.dtype,
) -> str:
    case = _case(operation, (out_features, in_features), k, batch)
    rows = [row for row in _table(device.type) if row["operation"] == operation]
    seconds = (
        min(rows, key=lambda row: _distance(row, case))["seconds"]
        if rows
        else _measure(**case, device=device, dtype=dtype, n_timings=5)
    )
    usable = [name for name in seconds if name in _backends.usable(device)]
    return min(usable, key=seconds.__getitem__)


def _case(operation: Operation, shape: tuple[int, int], k: int, batch: int) -> dict[str, Any]:
    return {"operation": operation, "out": shape[0], "in": shape[1], "k": k, "batch": batch}


def _rounded(batch: int) -> int:
    """To a power of two, up: so that few cases are kept, and few measured where there is no table."""
    return 1 << max(0, batch - 1).bit_length()


def _distance(row: dict[str, Any], case: dict[str, Any]) -> float:
    return math.hypot(*(math.log(row[name] / max(1, case[name])) for name in ("out", "in", "k", "batch")))


def _measure(
    operation: Operation, device: torch.device, dtype: torch.dtype, n_timings: int, **case: int
) -> dict[str, float]:
    """Seconds of each usable backend on random numbers and offsets of its own generator."""
    out_features, in_features, k, batch = case["out"], case["in"], case["k"], case["batch"]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(*shape, generator=generator).to(device, dtype)

    x, grad = draw(batch, in_features), draw(batch, out_features)
    values = draw(k, min(out_features, in_features))
    offsets = torch.randperm(max(out_features, in_features), generator=generator)[:k].to(device)
    tall = out_features >= in_features
    seconds = {}
    for backend in _backends.usable(device):

        def call(backend=backend):
            if operation == "product":
                _backends.product(x, values, offsets, out_features, tall=tall, backend=backend)
            else:
                _backends.value_gradient(grad, x, offsets, tall=tall, backend=backend)
            if device.type == "cuda":
                torch.cuda.synchronize(device)

        seconds[backend] = time_call(call, n_timings=n_timings, warmup=2).fastest
    return seconds


def _table_path(device: str) -> Path:
    return platformdirs.user_cache_path("heedful") / "dynadiag" / f"{device}.json"


@functools.cache
def _table(device: str) -> list[dict[str, Any]]:
    """The user's measurements if they are of this processor, else those that come with heedful, which are of a CPU."""
    path = _table_path(device)
    if path.is_file():
        try:
            table = json.loads(path.read_text())
            if table["format"] == _FORMAT and table["processor"] == _processor(device):
                _require_measurements(table["rows"])
                return table["rows"]
        except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
            warnings.warn(
                f"{path} is not a table of backends ({error!r}) and was ignored. Run tune_backend() again.",
                HeedfulWarning,
                stacklevel=2,
            )
    if device != "cpu":
        return []
    return json.loads(resources.files("heedful.compress.dynadiag").joinpath("backends_cpu.json").read_text())["rows"]


def _require_measurements(rows: list[dict[str, Any]]) -> None:
    """Raise some error unless ``choose_backend`` can go by these rows."""
    for row in rows:
        seconds = row["seconds"]
        if (
            row["operation"] not in _OPERATIONS
            or _distance(row, row)
            or "dense" not in seconds
            or min(seconds.values()) <= 0
        ):
            raise ValueError(row)


def _write(device: torch.device, rows: list[dict[str, Any]]) -> None:
    path = _table_path(device.type)
    text = json.dumps({"format": _FORMAT, "processor": _processor(device.type), "rows": rows}, indent=1)
    with write_atomic(path) as temporary:
        temporary.write_text(text + "\n")
    _table.cache_clear()
    _choose.cache_clear()


def _device(name: str) -> torch.device:
    try:
        return torch.empty(0, device=name).device
    except (RuntimeError, AssertionError) as error:
        raise ParameterError(f"device={name!r} cannot be used here: {error}") from error


def _processor(device: str) -> str:
    return torch.cuda.get_device_name() if device == "cuda" else fingerprint()["processor"]
