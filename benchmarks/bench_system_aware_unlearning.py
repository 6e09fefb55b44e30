"""What selection, deletion and storage cost beside a loop over rows, SISA and full retraining.

OMP_NUM_THREADS=1 python benchmarks/bench_system_aware_unlearning.py
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before NumPy starts its threads

import statistics
import time
from collections.abc import Callable

import numpy as np
from sklearn.linear_model import RidgeClassifier, SGDClassifier

from heedful.unlearn import SelectiveSamplingClassifier, SISAClassifier, select_core_set
from measure import ratio, record, side_by_side

REQUESTS = 80_000  # single requests, one after another
ROUNDS = 5
SERVED = 4  # requests that SISA and Ridge serve in a round; their mean stands for all of that round


def margin_problem(n: int, d: int, *, margin: float = 0.1) -> tuple[np.ndarray, np.ndarray]:
    """Unit vectors at least ``margin`` away from the plane that divides the classes."""
    rng = np.random.default_rng(0)
    normal = rng.normal(size=d)
    normal /= np.linalg.norm(normal)
    found = [np.empty((0, d))]
    while sum(map(len, found)) < n:
        X = rng.normal(size=(100_000, d))
        X /= np.linalg.norm(X, axis=1, keepdims=True)
        found.append(X[np.abs(X @ normal) >= margin])
    X = np.concatenate(found)[:n]
    return X, (X @ normal > 0).astype(int)


def loop_over_rows(X: np.ndarray, kappa: float) -> list[int]:
    """Selection as it is written down: a leverage and, if it is large, a Sherman-Morrison step, row by row."""
    inverse, threshold, kept = np.eye(X.shape[1]), len(X) ** -kappa, []
    for row, x in enumerate(X):
        v = inverse @ x
        leverage = x @ v
        if leverage > threshold:
            kept.append(row)
            inverse -= np.outer(v, v) / (1 + leverage)
    return kept


def seconds_of(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def selection(n: int, d: int, kappa: float, *, rounds: int) -> dict:
    X, _ = margin_problem(n, d)
    assert select_core_set(X, kappa=kappa).tolist() == loop_over_rows(X, kappa)
    contestants = {"blocks": lambda: select_core_set(X, kappa=kappa), "loop": lambda: loop_over_rows(X, kappa)}
    seconds = side_by_side(contestants, rounds=rounds, warmup=1)
    return ratio(seconds, "blocks", "loop")


def deletions(n: int, d: int, kappa: float, *, n_test: int = 5000) -> dict:
    """Samples leave one by one, in random order, until REQUESTS, or 40 % of T, are gone.

    In each round a fifth of all requests reach our model, and SISA and Ridge serve a few, whose mean stands for as many.
    """
    X, y = margin_problem(n + n_test, d)
    X, X_test, y, y_test = X[:n], X[n:], y[:n], y[n:]
    order = np.random.default_rng(1).permutation(n)[: min(REQUESTS, int(0.4 * n))]
    models = {
        "ours": SelectiveSamplingClassifier(kappa=kappa, horizon=n),
        "sisa": SISAClassifier(SGDClassifier(random_state=0), n_shards=20, random_state=0),
        "ridge": RidgeClassifier(),
    }
    fits = {
        "ours": lambda: models["ours"].fit(X, y, ids=np.arange(n)),
        "sisa": lambda: models["sisa"].fit(X, y, ids=np.arange(n)),
        "ridge": lambda: models["ridge"].fit(X, y),
    }
    first_fit = {name: seconds_of(fit) for name, fit in fits.items()}
    stored, stored_mib = len(models["ours"].core_y_), models["ours"].core_X_.nbytes / 2**20

    seconds: dict[str, list[float]] = {name: [] for name in models}
    remaining = np.ones(n, dtype=bool)
    for part in np.array_split(order, ROUNDS):
        requests = [[name] for name in part.tolist()]
        seconds["ours"].append(seconds_of(lambda requests=requests: list(map(models["ours"].unlearn, requests))))
        remaining[part] = False
        X_left, y_left = X[remaining], y[remaining]
        for name, serve in {
            "sisa": lambda requests=requests: list(map(models["sisa"].unlearn, requests[:SERVED])),
            "ridge": lambda X=X_left, y=y_left: [models["ridge"].fit(X, y) for _ in range(SERVED)],
        }.items():
            seconds[name].append(seconds_of(serve) / SERVED * len(part))
        models["sisa"].unlearn(part)  # the others, at once, so that all models have forgotten the same
    assert models["ours"].audit()
    touched = stored - len(models["ours"].core_y_)
    return {
        f"{len(order)} deletions, sisa / ours": ratio(seconds, "sisa", "ours"),
        f"{len(order)} deletions, ridge / ours": ratio(seconds, "ridge", "ours"),
        "ms per deletion": {name: 1e3 * sum(times) / len(order) for name, times in seconds.items()},
        "deletions that touched our model, %": 100 * touched / len(order),
        "samples stored at first, %": {"ours": 100 * stored / n, "sisa": 100.0, "ridge": 100.0},
        "samples stored at first, MiB": {"ours": stored_mib, "sisa": X.nbytes / 2**20, "ridge": X.nbytes / 2**20},
        "first fit, s": first_fit,
        "test accuracy in the end, %": {
            name: 100 * float(model.score(X_test, y_test)) for name, model in models.items()
        },
    }


def batch(core: int, d: int, *, rounds: int) -> float:
    """Seconds to serve one batch that takes a tenth of a core set away."""
    X, y = margin_problem(core, d, margin=0.0)
    gone, settings = list(range(0, core, 10)), {"kappa": 1.0, "horizon": 10**9}
    models = [SelectiveSamplingClassifier(**settings).fit(X, y, ids=np.arange(core)) for _ in range(rounds)]
    assert all(len(model.core_y_) == core for model in models)
    return statistics.median(seconds_of(lambda model=model: model.unlearn(gone)) for model in models)


def main() -> None:
    figures: dict = {"selection, T=200000, d=100: blocks / loop": selection(200_000, 100, 0.2, rounds=9)}
    for title, n, d in [
        ("T=200000, d=100", 200_000, 100),  # the paper's Margin
        ("T=10000, d=50", 10_000, 50),
        ("T=100000, d=50", 100_000, 50),
        ("T=1000000, d=50", 1_000_000, 50),
    ]:
        figures |= {f"{title}: {name}": figure for name, figure in deletions(n, d, 0.2).items()}
    figures["one batch of 500 from a core of 5000, d=200, s"] = batch(5000, 200, rounds=7)
    figures["how deletions were timed"] = (
        f"ours: every request, in {ROUNDS} rounds; SISA (20 shards, SGDClassifier) and RidgeClassifier: {SERVED} requests "
        "in each round, their mean times the number of requests"
    )
    record("system_aware_unlearning", figures)


if __name__ == "__main__":
    main()
