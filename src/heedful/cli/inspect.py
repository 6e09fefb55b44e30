"""``heedful inspect``: what a checkpoint holds, layer by layer."""

import json
import math
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    import pandas as pd


def inspect(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder, or a file of weights.")],
    pattern: Annotated[
        str | None,
        typer.Option("--pattern", metavar="N:M", help="Check that every linear layer is N:M; exit status 1 if not."),
    ] = None,
    exclude: Annotated[
        str | None,
        typer.Option("--exclude", metavar="NAMES", help="Layers that need not be: names, globs, re:…, with commas."),
    ] = None,
    time: Annotated[
        bool, typer.Option("--time", help="Measure every linear layer: dense, and as sparse as it is.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the rows as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Show the weights of a checkpoint: shape, how they are stored, bits, zeros, bytes, N:M conformance, milliseconds.

    Example: heedful inspect llama-2-4 --pattern 2:4
    """
    from heedful.cli._progress import messages
    from heedful.compress._inspect_checkpoint import inspect_checkpoint

    with messages(quiet=quiet):
        frame = inspect_checkpoint(
            model, pattern=pattern, exclude=() if exclude is None else exclude.split(","), time=time
        )
    if as_json:
        print(json.dumps(json.loads(frame.to_json(orient="records")), indent=2))  # pandas writes NaN as null
    else:
        _show(frame, pattern)
    broken = [] if pattern is None else list(frame.tensor[frame.conforms.eq(False)])
    if broken:
        print(f"heedful: {len(broken)} of the layers are not {pattern}, such as {broken[0]}.", file=sys.stderr)
        raise typer.Exit(1)


def _show(frame: "pd.DataFrame", pattern: str | None) -> None:
    from rich.console import Console
    from rich.filesize import decimal
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensor", overflow="fold")  # names of tensors differ at their ends
    for name in ("shape", "stored", "bits", "zeros", "size"):
        table.add_column(name, justify="right" if name in ("bits", "zeros", "size") else "left", no_wrap=True)
    if pattern is not None:
        table.add_column(pattern)
    if "ms" in frame:
        table.add_column("ms, 16 rows")
    for row in frame.to_dict("records"):
        cells = [row["tensor"], " × ".join(map(str, row["shape"])), row["stored"], f"{row['bits']:.3g}"]
        cells += ["–" if math.isnan(row["zeros"]) else f"{row['zeros']:.1%}", decimal(row["bytes"])]
        if pattern is not None:
            cells.append({True: "yes", False: "NO"}.get(row["conforms"], ""))
        if "ms" in frame:
            cells.append(", ".join(f"{way} {ms:.3g}" for way, ms in (row["ms"] or {}).items()))
        table.add_row(*cells)
    weights = sum(math.prod(shape) for shape in frame["shape"])
    size = int(frame.bytes.sum())
    table.add_row("total", "", "", f"{8 * size / max(weights, 1):.3g}", "", decimal(size), style="bold")
    Console().print(table)
