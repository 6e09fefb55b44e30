"""``heedful prune``: zeros in the linear layers of a checkpoint, in one shot and without data."""

import json
from pathlib import Path
from typing import Annotated, Literal

import typer

from heedful.errors import ParameterError


def prune(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder, or a file of weights.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder of the pruned model.")],
    pattern: Annotated[
        str | None, typer.Option("--pattern", metavar="N:M", help="Keep the N largest of every M weights, such as 2:4.")
    ] = None,
    method: Annotated[
        Literal["magnitude", "diagonal"],
        typer.Option("--method", help="magnitude (with --pattern), or diagonal (with --sparsity)."),
    ] = "magnitude",
    sparsity: Annotated[
        float | None, typer.Option("--sparsity", help="Share of zeros that diagonals leave, such as 0.9.")
    ] = None,
    exclude: Annotated[
        str | None,
        typer.Option("--exclude", metavar="NAMES", help="Layers to leave alone: names, globs, re:…, with commas."),
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint in DIR.")] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Prune the linear layers of a model, in one shot; embeddings and heads stay. Fine-tune it afterwards.

    The files are ordinary ones, with zeros in place. To train with a mask, see heedful.compress.BAME and DynaDiag.

    Example: heedful prune llama -o llama-2-4 --pattern 2:4
    """
    if (pattern is not None) != (method == "magnitude") or (sparsity is not None) != (method == "diagonal"):
        raise ParameterError("say how: --pattern 2:4, or --method diagonal --sparsity 0.9.")
    from heedful.cli._progress import messages
    from heedful.compress._prune_checkpoint import prune_checkpoint

    with messages(quiet=quiet):
        report = prune_checkpoint(
            model,
            out,
            pattern=pattern,
            sparsity=sparsity,
            exclude=() if exclude is None else exclude.split(","),
            overwrite=overwrite,
        )
    print(
        json.dumps(report.to_dict(), indent=2)
        if as_json
        else f"{report.n_pruned} of {report.n_tensors} tensors pruned: {report.sparsity:.1%} of them zero, "
        f"{report.kept_energy:.1%} of their energy kept, written to {report.out}"
    )
