"""``heedful data``: the real data sets, where they come from, and whether they are here and sound."""

import json
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Real data sets, offline: list, get, check.")

Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


@app.command("list")
def list_datasets(as_json: Json = False) -> None:
    """List the data sets: what they are, under which terms, and which are on this machine.

    Example: heedful data list
    """
    from heedful import data

    rows = [{**data.info(name).to_dict(), "cached": data.is_cached(name)} for name in data.names()]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "here", "what", "shapes", "source", "licence", box=None, pad_edge=False, header_style="bold")
    for row in rows:
        here = "yes" if row["cached"] else "no"
        table.add_row(row["name"], here, row["what"], row["shapes"], row["source"], row["licence"])
    Console().print(table)


@app.command("get")
def get(
    name: Annotated[str, typer.Argument(help="A data set, e.g. mnist. See: heedful data list")], as_json: Json = False
) -> None:
    """Put a data set into the cache, so that it loads without a network from then on.

    Example: heedful data get fashion_mnist
    """
    from rich.console import Console

    from heedful import data

    with Console(stderr=True).status(f"getting {name}"):
        data.load(name)
    info = data.info(name)
    if as_json:
        print(json.dumps({**info.to_dict(), "folder": str(data.folder())}, indent=2))
        return
    print(f"{name} is here and sound: {info.form} of {info.shapes}")


@app.command("check")
def check(as_json: Json = False) -> None:
    """Verify every data set that is on this machine; exit status 1 if one is damaged.

    A damaged one is obtained anew by the next use, or by: heedful data get NAME

    Example: heedful data check
    """
    from heedful import data

    states = {name: data.check(name) for name in data.names()}
    if as_json:
        print(json.dumps(states, indent=2))
    else:
        for name, state in states.items():
            print(f"{state:<8} {name}")
    if "damaged" in states.values():
        raise typer.Exit(1)
