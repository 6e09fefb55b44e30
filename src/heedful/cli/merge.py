"""``heedful merge``: one model out of several that were fine-tuned from the same base."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from heedful.errors import ParameterError

if TYPE_CHECKING:
    import pandas as pd


def merge(
    source: Annotated[
        Path, typer.Argument(metavar="SOURCE", help="A mergekit recipe (YAML), or the folder of a Pareto set.")
    ],
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="DIR", help="The folder of the merged model.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing; print how task vectors overlap, conflict and lie.")
    ] = False,
    prefer: Annotated[
        str | None, typer.Option("--prefer", metavar="NAME=WEIGHT,…", help="Of a Pareto set: what is wanted how much.")
    ] = None,
    device: Annotated[str, typer.Option("--device", help="Where tensors are merged, such as cpu or cuda.")] = "cpu",
    shard_size: Annotated[str, typer.Option("--shard-size", help="Largest size of a file.")] = "5GB",
    dtype: Annotated[
        str | None, typer.Option("--dtype", help="Type of the output, whatever the recipe says, such as bfloat16.")
    ] = None,
    work: Annotated[
        Path | None, typer.Option("--work", metavar="DIR", help="Where shards wait until all are complete.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not continue an interrupted merge.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint in DIR.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="For methods that drop at random (DARE).")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Merge models as a mergekit recipe says, or make the model that a Pareto set has for a preference.

    Example: heedful merge recipe.yaml -o merged
    """
    if dry_run == (out is not None):
        raise ParameterError("say where the model goes, -o DIR, or --dry-run: one of them.")
    if source.is_dir() != (prefer is not None):
        raise ParameterError(
            f"{source} is a folder: if it is a Pareto set, say what you prefer, such as --prefer math=.7,code=.3."
            if source.is_dir()
            else "--prefer chooses from a Pareto set: give its folder as SOURCE."
        )
    from heedful.cli._progress import messages

    with messages(quiet=quiet):
        if out is None:
            from heedful.merge._merge_checkpoints import report_recipe

            _show_report(report_recipe(source, random_state=seed), as_json=as_json)
        elif prefer is not None:
            from heedful.merge._pareto_files import pick_files

            preference = _parse_preference(prefer)
            pick_files(source, preference, out, shard_size=shard_size, overwrite=overwrite, work_dir=work)
            result = {"preference": preference, "out": str(out)}
            print(json.dumps(result, indent=2) if as_json else f"The model for {prefer}, written to {out}")
        else:
            from rich.filesize import decimal

            from heedful.merge import merge_checkpoints

            report = merge_checkpoints(
                source,
                out,
                device=device,
                shard_size=shard_size,
                dtype=dtype,
                work_dir=work,
                fresh=fresh,
                overwrite=overwrite,
                random_state=seed,
            )
            print(
                json.dumps(report.to_dict(), indent=2)
                if as_json
                else f"{report.method} of {len(report.models)} models: {report.n_tensors} tensors, "
                f"{report.n_parameters:,} parameters, {decimal(report.n_bytes)}, written to {report.out}"
            )


def _parse_preference(text: str) -> dict[str, float]:
    preference: dict[str, float] = {}
    for part in text.split(","):
        name, _, weight = map(str.strip, part.partition("="))
        if name in preference:
            raise ParameterError(f"--prefer names {name} twice; got {text!r}. Give each model one weight.")
        try:
            preference[name] = float(weight)
        except ValueError:
            raise ParameterError(f"--prefer must be like math=.7,code=.3; got {text!r}.") from None
    return preference


def _show_report(frame: "pd.DataFrame", *, as_json: bool) -> None:
    if as_json:
        print(json.dumps(json.loads(frame.to_json(orient="records")), indent=2))  # pandas writes NaN as null
        return
    from rich.console import Console
    from rich.table import Table

    columns = {"entries": "entries", "density": "density", "overlap": "overlap", "sign_conflict": "conflict"}
    columns |= {"block_imbalance": "blocks", "row_imbalance": "rows"}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("tensor", overflow="fold")  # names of tensors differ at their ends
    for name in columns.values():
        table.add_column(name, justify="right", no_wrap=True)
    for tensor, entries, *shares in frame[["tensor", *columns]].itertuples(index=False):
        table.add_row(tensor, f"{entries:,}", *("–" if share != share else f"{share:.3f}" for share in shares))
    Console().print(table)
