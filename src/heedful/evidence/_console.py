"""The verdicts as the terminal shows them."""

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from heedful.evidence._report._summary import advantage, interval, p_value, result_to_json
from heedful.evidence._result import StudyResult

_STYLES = {"holds": "bold green", "contradicted": "bold red", "inconclusive": "yellow"}


def verdict_table(results: Sequence[StudyResult]) -> RenderableType:
    """A table for each result: its verdicts, with the reason where one stays open, and the plain answer below.

    Parameters
    ----------
    results : sequence of StudyResult
        In the order in which they are shown.

    Returns
    -------
    rich renderable
        For ``rich.console.Console.print``. Names are shown as they are, never read as markup.
    """
    tables = [_table(result) for result in results]
    return Group(*(Padding(table, (0, 0, 1, 0)) for table in tables[:-1]), *tables[-1:])


def _table(result: StudyResult) -> Table:
    data = result_to_json(result)
    table = Table(
        title=Text(f"{data['study']}, budget {data['budget']['name']}", style="bold"),
        caption=Text(data["answer"]),
        title_justify="left",
        caption_justify="left",
        box=None,
        padding=(0, 1, 0, 0),
    )
    table.add_column("Claim", min_width=16)
    table.add_column("Task", overflow="fold")
    table.add_column("Verdict", no_wrap=True)
    table.add_column("Advantage", justify="right", no_wrap=True)
    table.add_column("Interval", justify="right", no_wrap=True)
    table.add_column("p", justify="right", no_wrap=True, min_width=5)
    for verdict in data["verdicts"]:
        claim = Text(verdict["claim"] + " (exploratory)" * verdict["exploratory"])
        if verdict["outcome"] == "inconclusive" or verdict["missing"]:  # else the interval says it all
            claim.append("\n" + verdict["reason"], style="dim")
        table.add_row(
            claim,
            Text(verdict["task"] or "all tasks"),
            Text(verdict["outcome"], style=_STYLES[verdict["outcome"]]),
            advantage(verdict),
            interval(verdict),
            p_value(verdict["p"] if verdict["exploratory"] else verdict["p_holm"]),
        )
    return table
