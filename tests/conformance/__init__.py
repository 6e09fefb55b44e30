"""Checks that every method of a kind must pass: written once, run over rows. A new method is a new row.

A check is a function ``check_<what>(row)`` that raises when the object a row makes breaks the promise. A row says how
to make the object and lists its exclusions, each with a reason; an excluded check must fail, or the exclusion is stale.
"""

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest

pytest.register_assert_rewrite(*(f"{__name__}.{kind}" for kind in ("estimators", "files", "modules", "optimizers")))


def cases(rows: Iterable[Any], checks: Sequence[Callable[[Any], None]]) -> list:
    """Every (check, row) as a pytest parameter; exclusions become strict expected failures."""
    rows = list(rows)
    known = {check.__name__ for check in checks}
    for row in rows:
        if unknown := set(row.exclusions) - known:
            raise ValueError(f"row {row.name} excludes {', '.join(sorted(unknown))}, which is no check of this kind.")
    return [
        pytest.param(
            check,
            row,
            id=f"{row.name}-{check.__name__.removeprefix('check_')}",
            marks=[pytest.mark.xfail(reason=row.exclusions[check.__name__], strict=True)]
            if check.__name__ in row.exclusions
            else [],
        )
        for row in rows
        for check in checks
    ]
