"""Fill the pages' placeholders from data, so that no table or figure is typed by hand.

A placeholder stands alone on its line: ``{{ evidence("slug") }}``, ``{{ benchmark("slug") }}``, ``{{ methods() }}``,
``{{ problems() }}``, ``{{ all_evidence() }}``, ``{{ datasets() }}``.
"""

import json
import re
from pathlib import Path

from heedful import data
from heedful.catalog import methods as catalogue
from heedful.evidence import to_markdown

EVIDENCE = Path(__file__).parent / "evidence"
_PLACEHOLDER = re.compile(r'^\{\{ (\w+)\((?:"(\w+)")?\) \}\}$', re.MULTILINE)


def on_page_markdown(markdown: str, page, **_) -> str:
    up = "../" * page.file.src_uri.count("/")

    def fill(match: re.Match) -> str:
        name, slug = match.groups()
        return FILLERS[name](*([slug] if slug else []), up=up)

    return _PLACEHOLDER.sub(fill, markdown)


def evidence(slug: str, *, up: str) -> str:
    """The verdicts of the last committed full run."""
    (study,) = json.loads((EVIDENCE / f"{slug}.json").read_text())["studies"]
    return to_markdown(study)


def benchmark(slug: str, *, up: str) -> str:
    """The figures of the last committed benchmark."""
    result = json.loads((EVIDENCE / "benchmarks" / f"{slug}.json").read_text())
    machine = result["machine"]
    rows = [f"| {name} | {_figure(value)} |" for name, value in result["figures"].items()]
    where = f"{machine['processor']}, {machine['cores']} cores, torch {machine['packages'].get('torch', '–')}"
    return "\n".join(["| figure | measured |", "|---|---|", *rows, "", f"Measured side by side on {where}."])


def _figure(value) -> str:
    if not isinstance(value, dict):
        return f"{value:.3g}" if isinstance(value, float) else str(value)
    if "ratio" in value:
        low, high = value["quartiles"]
        return f"{value['ratio']:.3g} × (quartiles {low:.3g} to {high:.3g})"
    return ", ".join(f"{key} {_figure(item)}" for key, item in value.items())


def methods(*, up: str) -> str:
    """Table of methods by room."""
    rows = [
        f"| [{m.title}]({up}methods/{m.slug}.md) | `{m.room}` | {m.replaces} | {m.heeds} |" for m in catalogue.values()
    ]
    return "\n".join(["| method | room | instead of | heeds |", "|---|---|---|---|", *rows])


def problems(*, up: str) -> str:
    """Table from a user's problem to a method."""
    rows = [
        f"| {m.problem} | [{m.title}]({up}methods/{m.slug}.md) | `heedful.{m.room}.{m.names[0]}` | {m.replaces} |"
        for m in catalogue.values()
    ]
    return "\n".join(["| my problem | method | import | you use today |", "|---|---|---|---|", *rows])


def all_evidence(*, up: str) -> str:
    """The evidence of every method, one after the other."""
    return "\n\n".join(f"## {m.title}\n\n{evidence(m.slug, up=up)}" for m in catalogue.values())


def datasets(*, up: str) -> str:
    """Table of data sets."""
    rows = [f"| `{i.name}` | {i.what} | {i.shapes} | {i.source} | {i.licence} |" for i in map(data.info, data.names())]
    return "\n".join(["| name | what | shapes | source | licence |", "|---|---|---|---|---|", *rows])


FILLERS = {f.__name__: f for f in (evidence, benchmark, methods, problems, all_evidence, datasets)}
