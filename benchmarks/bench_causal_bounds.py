"""What covariate-aware bounds cost beside the transport problems that they are made of, and beside dualbounds.

python benchmarks/bench_causal_bounds.py
"""

import importlib.util
import tracemalloc

import numpy as np
import ot
import pandas as pd
import torch

from heedful.causal import covariate_bounds
from heedful.causal.causal_bounds.estimands import make_estimand
from heedful.causal.causal_bounds.transport import Transport
from heedful.causal.causal_bounds.trial import read_trial, squared_distances
from measure import ratio, record, side_by_side

DUALBOUNDS = importlib.util.find_spec("dualbounds") is not None
ETAS = np.concatenate([[0.0], np.geomspace(0.1, 1000, 13)])


def trial(n: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Outcomes 0.6 Z + ε of n controls and 1.6 Z + ε of n treated units."""
    rng = np.random.default_rng(0)
    treated, z = np.arange(2 * n) % 2, rng.normal(size=2 * n)
    return np.where(treated, 1.6, 0.6) * z + rng.normal(size=2 * n), treated, z


def problem(n: int) -> Transport:
    units = read_trial(*trial(n), covariate_scale="standardize")
    h = make_estimand("effect_variance", units.y0, units.y1, units.a, units.b).cost(units.y0, units.y1)
    return Transport(h, squared_distances(units.z0, units.z1), units.a, units.b)


def assert_equal_results(n: int) -> None:
    """What is timed gives what POT alone gives."""
    ours = problem(n)
    for eta in ETAS:
        expected = ot.emd2(ours.a, ours.b, ours.h + eta * ours.d2, numItermax=10**7)
        value, mismatch, _ = ours.solve(eta)
        np.testing.assert_allclose(value + eta * mismatch, expected, rtol=1e-9)
    y, treated, _ = trial(n)
    found = covariate_bounds(y, treated)
    np.testing.assert_allclose([found.lower, found.upper], [ours.solve(0.0).value, ours.solve(0.0, sign=-1).value])


def path(n: int, *, rounds: int) -> dict:
    """Paths over 14 prices: one work matrix for all of them, against POT on a sum made anew for each."""
    ours = problem(n)

    def warm_started():
        start = None
        for eta in ETAS:
            _, log = ot.emd(ours.a, ours.b, ours.h + eta * ours.d2, 10**7, log=True, potentials_init=start)
            start = log["u"], log["v"]

    y, treated, z = trial(n)
    seconds = side_by_side(
        {
            "path": lambda: [ours.solve(eta) for eta in ETAS],
            "pot": lambda: [ot.emd(ours.a, ours.b, ours.h + eta * ours.d2, 10**7) for eta in ETAS],
            "pot_warm_start": warm_started,
            "auto": lambda: covariate_bounds(y, treated, z, random_state=0),
            "auto_confidence": lambda: covariate_bounds(y, treated, z, confidence=0.95, random_state=0),
            "fixed": lambda: covariate_bounds(y, treated, z, eta=10.0),
        },
        rounds=rounds,
        warmup=1,
    )
    figures = {
        "path of one side / 14 ot.emd": ratio(seconds, "path", "pot"),
        "14 ot.emd, each from the potentials before / 14 ot.emd": ratio(seconds, "pot_warm_start", "pot"),
        "eta='auto', both sides / 14 ot.emd": ratio(seconds, "auto", "pot"),
        "eta='auto' with confidence, both sides / 14 ot.emd": ratio(seconds, "auto_confidence", "pot"),
        "eta=10, both sides / 14 ot.emd": ratio(seconds, "fixed", "pot"),
    }
    return {f"arms of {n}: {name}": figure for name, figure in figures.items()}


def blind(n: int, *, rounds: int) -> dict:
    y, treated, _ = trial(n)
    ours = problem(n)
    seconds = side_by_side(
        {"sort": lambda: covariate_bounds(y, treated), "emd": lambda: [ours.solve(0.0, sign=sign) for sign in (1, -1)]},
        rounds=rounds,
    )
    return {f"arms of {n}: blind bounds by sorting / by ot.emd": ratio(seconds, "sort", "emd")}


def memory(n: int) -> dict:
    """NumPy's arrays; what POT holds besides is about three matrices more."""
    y, treated, z = trial(n)
    figures = {}
    for name, eta in (("eta=10", 10.0), ("eta='auto'", "auto")):
        tracemalloc.start()
        covariate_bounds(y, treated, z, eta=eta, random_state=0)
        figures[f"arms of {n}: peak memory of {name} / one matrix of pairs"] = tracemalloc.get_traced_memory()[1] / (
            8 * n**2
        )
        tracemalloc.stop()
    return figures


def beside_dualbounds(n: int, *, rounds: int) -> dict:
    """The second moment of the effect, bounded below and above by both."""
    if not DUALBOUNDS:
        return {"dualbounds": "not installed in this environment"}
    from dualbounds.generic import DualBounds

    y, treated, z = trial(n)

    def regression_based():
        return DualBounds(
            f=lambda y0, y1, x: (y1 - y0) ** 2,
            covariates=pd.DataFrame({"z": z}),
            treatment=pd.Series(treated),
            outcome=pd.Series(y),
            propensities=pd.Series(np.full(2 * n, 0.5)),
            outcome_model="ridge",
        ).fit()

    seconds = side_by_side(
        {
            "auto": lambda: covariate_bounds(y, treated, z, estimand="effect_second_moment", random_state=0),
            "dualbounds_ridge": regression_based,
        },
        rounds=rounds,
        warmup=1,
    )
    return {f"arms of {n}: eta='auto' / dualbounds with ridge": ratio(seconds, "auto", "dualbounds_ridge")}


def main() -> None:
    torch.set_num_threads(1)
    assert_equal_results(200)
    figures = path(1000, rounds=5) | path(250, rounds=9) | blind(1000, rounds=9) | memory(1000)
    record("causal_bounds", figures | beside_dualbounds(500, rounds=3))


if __name__ == "__main__":
    main()
