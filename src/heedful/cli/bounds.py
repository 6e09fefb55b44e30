"""``heedful bounds``: what a trial says of effects on individuals, with covariates and without."""

import json
import math
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import typer

from heedful.errors import InputError, ParameterError

if TYPE_CHECKING:
    from heedful.causal import Bounds


def bounds(
    table: Annotated[Path, typer.Argument(metavar="TABLE", help="A row a unit: CSV, Parquet or npz.")],
    outcome: Annotated[
        str, typer.Option("--outcome", metavar="NAMES", help="The column of the outcome; of several, with commas.")
    ],
    treatment: Annotated[
        str, typer.Option("--treatment", metavar="NAME", help="The column that is 1 of treated units and 0 of others.")
    ],
    covariates: Annotated[
        str | None,
        typer.Option("--covariates", metavar="NAMES", help="Columns known before treatment, with commas: a,b"),
    ] = None,
    estimand: Annotated[
        str,
        typer.Option(
            "--estimand",
            help="effect_variance, effect_second_moment, correlation, prob_benefit, prob_harm, effect_cdf, "
            "neyman_variance or product.",
        ),
    ] = "effect_variance",
    threshold: Annotated[
        float, typer.Option("--threshold", help="Of effect_cdf, the share of effects up to it.")
    ] = 0.0,
    eta: Annotated[
        str, typer.Option("--eta", help="Price of unlike covariates: auto, a number, or numbers to choose from: 0,1,5")
    ] = "auto",
    propensity: Annotated[
        str | None,
        typer.Option(
            "--propensity", help="Probability of treatment: a column, or a number. Default: the same for all units."
        ),
    ] = None,
    scale: Annotated[
        Literal["standardize", "mahalanobis", "none"],
        typer.Option("--covariate-scale", help="What makes distances of covariates comparable."),
    ] = "standardize",
    confidence: Annotated[
        float | None, typer.Option("--confidence", help="Of an interval around both bounds, such as 0.95.")
    ] = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="FILE", help="A page (.html) that shows the bounds against η.")
    ] = None,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the page if it is there.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Draws folds and subsamples.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the result as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Bound what depends on both outcomes of a unit, of which a trial shows one: how effects vary, how many it harms.

    Example: heedful bounds trial.csv --outcome gpa --treatment w --covariates gpa_before,age --plot bounds.html
    """
    from heedful.cli._progress import messages
    from heedful.cli._tables import read_table, refuse_existing, take_columns

    prices, known = _parse_eta(eta), [] if covariates is None else _names(covariates)
    if clash := set(known) & {treatment, *_names(outcome)}:
        raise ParameterError(f"--covariates must be known before treatment; {', '.join(sorted(clash))} is not.")
    if plot is not None:
        drawn = prices == "auto" or (isinstance(prices, list) and sum(0 < price < math.inf for price in prices) > 1)
        if not known or not drawn:
            raise ParameterError(
                "--plot draws bounds against η: it needs --covariates, and --eta auto or several numbers > 0."
            )
        if plot.suffix.lower() not in (".html", ".htm"):
            raise ParameterError(f"--plot writes a page, whose name ends in .html; got {plot}.")
        refuse_existing(plot, overwrite=overwrite)
    frame = read_table(table)
    from heedful.causal import covariate_bounds

    with messages(quiet=quiet):
        found = covariate_bounds(
            take_columns(frame, _names(outcome), path=table).to_numpy(),
            _read_treatment(frame, treatment, path=table),
            take_columns(frame, known, path=table) if known else None,
            estimand=estimand.replace("-", "_"),
            threshold=threshold,
            eta=prices,
            propensity=_read_propensity(frame, propensity, path=table),
            covariate_scale=None if scale == "none" else scale,
            confidence=confidence,
            random_state=seed,
        )
    if plot is not None:
        _write_page(found, confidence, plot, table=table, outcome=outcome, covariates=known, overwrite=overwrite)
    if as_json:
        blind = found.upper_blind - found.lower_blind
        more = {"width": found.width, "width_blind": blind, "width_ratio": found.width / blind if blind else None}
        text = json.dumps({**found.to_dict(), **more, "plot": None if plot is None else str(plot)})
        print(json.dumps(json.loads(text, parse_constant=str), indent=2))  # JSON has no number for an infinite price
    else:
        _show(found, confidence, plot)


def _names(text: str) -> list[str]:
    return [name.strip() for name in text.split(",")]


def _parse_eta(text: str) -> float | list[float] | Literal["auto"]:
    if text == "auto":
        return "auto"
    try:
        prices = [float(part) for part in text.split(",")]
    except ValueError:
        raise ParameterError(f"--eta must be auto, a number, or numbers with commas; got {text!r}.") from None
    return prices[0] if len(prices) == 1 else prices


def _read_treatment(frame: Any, name: str, *, path: Path) -> Any:
    from heedful.cli._tables import take_columns

    column = take_columns(frame, [name], path=path)[name]
    if not column.isin([0, 1]).all():
        seen = column.drop_duplicates().tolist()
        shown = ", ".join(map(str, seen[:5])) + (", …" if len(seen) > 5 else "")
        raise InputError(f"{path}: column {name!r} must be 1 of treated units and 0 of others; its values are {shown}.")
    return column.to_numpy()


def _read_propensity(frame: Any, given: str | None, *, path: Path) -> Any:
    """A number for all units, or a column; a column may be called like a number."""
    from heedful.cli._tables import take_columns

    if given is None:
        return None
    if given not in frame:
        try:
            return float(given)
        except ValueError:
            pass  # take_columns says what there is
    return take_columns(frame, [given], path=path)[given].to_numpy()


def _rows(found: "Bounds", confidence: float | None) -> list[list[str]]:
    """Name, ends, width and prices of the blind interval, of the covariate-aware one, and of the one around it."""
    intervals: list[tuple[str, float, float, list[float]]] = [
        ("blind", found.lower_blind, found.upper_blind, [0.0, 0.0]),
        ("covariate-aware", found.lower, found.upper, [found.eta_lower, found.eta_upper]),
    ]
    if confidence is not None and found.confidence_interval is not None:
        intervals.append((f"{100 * confidence:g}% confidence", *found.confidence_interval, []))
    return [
        [name, *map(_number, [low, high, high - low, *prices]), *[""] * (2 - len(prices))]
        for name, low, high, prices in intervals
    ]


def _number(value: float) -> str:
    return "∞" if value == math.inf else f"{value:.4g}".replace("-", "−")


def _show(found: "Bounds", confidence: float | None, plot: Path | None) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(found.estimand)
    for name in ("lower", "upper", "width", "η of lower", "η of upper"):
        table.add_column(name, justify="right", no_wrap=True)
    for row in _rows(found, confidence):
        table.add_row(*row)
    console, blind = Console(), found.upper_blind - found.lower_blind
    console.print(table)
    if blind:
        ratio = f"{found.width / blind:.3f} of the blind width"
        console.print(f"{ratio}, from {found.n_control} control and {found.n_treated} treated units")
    for note in found.notes:
        console.print(note, markup=False)
    if plot is not None:
        console.print(f"The bounds against η, written to {plot}", markup=False)


def _write_page(
    found: "Bounds",
    confidence: float | None,
    path: Path,
    *,
    table: Path,
    outcome: str,
    covariates: list[str],
    overwrite: bool,
) -> None:
    """One HTML file that asks the network for nothing, drawn as the page of the evidence is."""
    import jinja2
    from markupsafe import Markup

    from heedful._files import write_atomic

    loader = jinja2.ChoiceLoader(
        [jinja2.PackageLoader("heedful.cli"), jinja2.PackageLoader("heedful.evidence._report")]
    )
    environment = jinja2.Environment(
        loader=loader, autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.filters["number"] = _number
    prices = {name: values.tolist() for name, values in found.path.items() if values is not None}
    page = environment.get_template("bounds.html").render(
        bounds=found,
        rows=_rows(found, confidence),
        columns=list(prices),
        cells=list(zip(*prices.values(), strict=True)),
        figure=_figure(found),
        table=table.name,
        outcome=outcome,
        covariates=covariates,
        style=Markup(loader.get_source(environment, "page.css")[0]),
    )
    with write_atomic(path, overwrite=overwrite) as temporary:
        temporary.write_bytes(page.encode("utf-8", errors="replace"))


def _figure(found: "Bounds") -> Any:
    """Both bounds over the positive prices, each marked at the price that was chosen; 0 has no logarithm."""
    import numpy as np

    from heedful.evidence._report._figures import Axis, Plot, _path, _place

    path = np.column_stack([found.path[name] for name in ("eta", "lower", "upper")])
    path = path[(path[:, 0] > 0) & np.isfinite(path[:, 0])]
    if not len(path):
        raise InputError("--plot has nothing to draw: outcomes or covariates do not vary, and no η changes the bounds.")
    x, blind = Axis.over(path[:, 0], log=True), [found.lower_blind, found.upper_blind]
    y = Axis.over([*path[:, 1:].ravel(), *blind])

    def mark(price: float, value: float) -> tuple[float, float]:
        return _place((min(max(price, x.low), x.high), value), x, y)

    chosen = [("lower bound", found.eta_lower, found.lower), ("upper bound", found.eta_upper, found.upper)]
    words = ", ".join(f"{name} {_number(value)} at {_number(price)}" for name, price, value in chosen)
    return Plot(
        title=f"{found.estimand} against η",
        x_label="η",
        x=x,
        y=y,
        means={name: mark(price, value) for name, price, value in chosen}
        | {"blind bounds": mark(path[-1, 0], blind[0])},
        description=f"bounds against η: {words}; blind bounds {_number(blind[0])} and {_number(blind[1])}.",
        mean_lines={
            "lower bound": _path(path[:, [0, 1]], x, y),
            "upper bound": _path(path[:, [0, 2]], x, y),
            "blind bounds": _path(np.column_stack([path[:, 0], np.tile(blind, (len(path), 1))]), x, y),
        },
    )
