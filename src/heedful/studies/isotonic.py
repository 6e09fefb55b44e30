"""Does knowing that a row adds up to one make isotonic calibration beat one-vs-rest?

A task is data, a base model and a number of calibration rows. The base model is fitted once per seed, on rows that are used
for nothing else, and every arm gets the same calibration rows: they are what is spent. While settings are chosen, the
calibration rows are cut into five folds, and each is scored by the calibrator of the other four; afterwards a calibrator of
all of them is scored on the test rows. Every fitted arm chooses among three points that trade flexibility for smoothness.
"""

import dataclasses
import functools
import hashlib
import json
import time
import warnings
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import sklearn
from jaxtyping import Float, Int
from sklearn.base import BaseEstimator
from sklearn.ensemble import RandomForestClassifier
from sklearn.exceptions import ConvergenceWarning
from sklearn.feature_extraction.text import TfidfVectorizer
from sklearn.linear_model import LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import KFold
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.neural_network import MLPClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler

from heedful import data
from heedful._files import digest_file, load_arrays, save_arrays
from heedful.calibrate import (
    DirichletCalibrator,
    FlattenedIsotonicCalibrator,
    NormalizationAwareIsotonicCalibrator,
    OneVsRestIsotonicCalibrator,
    SortedCumulativeIsotonicCalibrator,
    TemperatureCalibrator,
    expected_calibration_error,
)
from heedful.errors import FileFormatError
from heedful.evidence import Arm, Budget, Claim, Metric, Outcome, Study, Task

FOLDS = 5


class Piece(NamedTuple):
    """Probabilities and column numbers of true classes to fit on, and others to score on."""

    P_fit: Float[np.ndarray, "n K"]
    y_fit: Int[np.ndarray, " n"]
    P_score: Float[np.ndarray, "m K"]
    y_score: Int[np.ndarray, " m"]


@runtime_checkable
class CalibrationTask(Protocol):
    """What the arms calibrate, and are scored by: ``pieces()``, a sequence of ``Piece``, whose scores are averaged.

    For probabilities and labels in memory, ``Probabilities`` is one already::

        # my_tasks.py
        import numpy as np
        from heedful.studies.isotonic import Probabilities


        def build(*, split, seed):
            held_out = np.load(
                "held_out.npz"
            )  # what my model said of rows that it was not trained on, and their labels
            P, y = held_out["P"], held_out["y"]  # float (n, K), rows with sum 1; int (n,), column numbers from 0
            order = np.random.default_rng(seed).permutation(len(y))
            fit, test = order[:1000], order[1000:]
            return Probabilities(P[fit], y[fit], P[test], y[test], split=split, seed=seed)

    With ``split="validation"`` the pieces must not touch the test rows; the same seed must give the same pieces.
    """

    def pieces(self) -> Sequence[Piece]: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Probabilities:
    """A calibration set and a test set.

    Parameters
    ----------
    P, P_test : arrays of shape (n, K) and (m, K)
        Probabilities that a model gave to rows it was not trained on.
    y, y_test : int arrays of shape (n,) and (m,)
        Columns of the true classes.
    split : {"validation", "test"}
        Folds of the calibration set alone, or the calibration set against the test set.
    seed : int
        Cuts the folds.
    """

    P: Float[np.ndarray, "n K"]
    y: Int[np.ndarray, " n"]
    P_test: Float[np.ndarray, "m K"]
    y_test: Int[np.ndarray, " m"]
    _: dataclasses.KW_ONLY
    split: str
    seed: int

    def pieces(self) -> list[Piece]:
        """Five for validation, one for the test."""
        if self.split == "test":
            return [Piece(self.P, self.y, self.P_test, self.y_test)]
        folds = KFold(FOLDS, shuffle=True, random_state=self.seed).split(self.P)
        return [Piece(self.P[fit], self.y[fit], self.P[score], self.y[score]) for fit, score in folds]


# Arms: one flat loop; they differ in the calibrator alone.


def raw(task: CalibrationTask, *, budget: Budget, seed: int) -> Outcome:
    """The base model as it is."""
    return _calibrate(task, None)


def temperature(task: CalibrationTask, *, budget: Budget, seed: int, pull: float) -> Outcome:
    return _calibrate(task, TemperatureCalibrator, pull=pull)


def dirichlet(task: CalibrationTask, *, budget: Budget, seed: int, ridge: float) -> Outcome:
    return _calibrate(task, DirichletCalibrator, pull=1.0, ridge=ridge)


def ovr(task: CalibrationTask, *, budget: Budget, seed: int, n_bins: int | None) -> Outcome:
    return _calibrate(task, OneVsRestIsotonicCalibrator, n_bins=n_bins)


def fir(task: CalibrationTask, *, budget: Budget, seed: int, blocks: int | str) -> Outcome:
    return _calibrate(task, FlattenedIsotonicCalibrator, blocks=blocks)


def na_fir(task: CalibrationTask, *, budget: Budget, seed: int, blocks: int | str) -> Outcome:
    return _calibrate(task, NormalizationAwareIsotonicCalibrator, blocks=blocks)


def scir(task: CalibrationTask, *, budget: Budget, seed: int, n_bins: int) -> Outcome:
    return _calibrate(task, SortedCumulativeIsotonicCalibrator, n_bins=n_bins)


def _calibrate(
    task: CalibrationTask, calibrator: Callable[..., Any] | None, *, pull: float = 0.0, **settings: Any
) -> Outcome:
    """Fit and score every piece.

    The isotonic calibrators mix their output with the uniform one by 1/(n + 1), so that no class gets 0. The parametric
    ones take logarithms of what they are given, so ``pull`` mixes their *input*, by pull/(n + pull).
    """
    rows, scores = 0, []
    for piece in task.pieces():
        share, n_classes = pull / (len(piece.y_fit) + pull), piece.P_fit.shape[1]
        piece = piece._replace(
            P_fit=(1 - share) * piece.P_fit + share / n_classes, P_score=(1 - share) * piece.P_score + share / n_classes
        )
        start = time.perf_counter()
        if calibrator is None:
            q = piece.P_score
        else:
            classes = np.arange(piece.P_fit.shape[1])  # a fold may lack some
            fitted = calibrator(**settings).fit(piece.P_fit, piece.y_fit, classes=classes)
            rows += len(piece.y_fit)
        seconds = time.perf_counter() - start
        if calibrator is not None:
            q = fitted.predict_proba(piece.P_score)
        scores.append({**score(piece.y_score, q), "fit_seconds": seconds})
    metrics = {name: float(np.mean([piece[name] for piece in scores])) for name in scores[0]}
    return Outcome(metrics=metrics, costs={"calibration_rows": rows})


def score(y: Int[np.ndarray, " m"], q: Float[np.ndarray, "m K"]) -> dict[str, float]:
    """What calibrated probabilities are worth on rows with these classes; accuracy in %."""
    truth = np.eye(q.shape[1])[y]
    return {
        "nll": float(log_loss(truth, q)),
        "ece": expected_calibration_error(y, q),
        "classwise_ece": expected_calibration_error(y, q, kind="classwise"),
        "brier": float(np.square(q - truth).sum(axis=1).mean()),
        "accuracy": 100 * float((q.argmax(axis=1) == y).mean()),
    }


# Tasks: data × base model × calibration rows.


class Split(NamedTuple):
    """Rows to fit the base model on, rows to calibrate on (the first n of them), rows to test on."""

    X: np.ndarray
    y: np.ndarray
    X_calibration: np.ndarray
    y_calibration: np.ndarray
    X_test: np.ndarray
    y_test: np.ndarray


def _digits(rng: np.random.Generator) -> Split:
    table = data.load("digits")
    noisy = table.X + rng.normal(scale=6.0, size=table.X.shape)  # pixels are 0 to 16; without noise there is no error
    return _three_parts(noisy / 16, table.y, (500, 600), rng)


def _mfeat(rng: np.random.Generator) -> Split:
    form = data.load("mfeat")
    return _three_parts(form.views["fou"], form.y, (500, 600), rng)


def _fashion(rng: np.random.Generator) -> Split:
    images = data.load("fashion_mnist")
    rows, test = rng.choice(60_000, 4_000, replace=False), rng.choice(10_000, 4_000, replace=False)
    X = np.concatenate([images.x_train[rows], images.x_test[test]]).reshape(8_000, -1) / 255
    y = np.concatenate([images.y_train[rows], images.y_test[test]])
    return Split(X[:2000], y[:2000], X[2000:4000], y[2000:4000], X[4000:], y[4000:])


def _bbc_news(rng: np.random.Generator) -> Split:
    return _texts("bbc_news", (500, 600), rng)


def _brown(rng: np.random.Generator) -> Split:
    return _texts("brown", (150, 200), rng)


def _texts(name: str, sizes: tuple[int, int], rng: np.random.Generator) -> Split:
    form = data.load(name)
    split = _three_parts(np.array(form.texts, dtype=object), form.y, sizes, rng)
    words = TfidfVectorizer(sublinear_tf=True, min_df=2, max_features=1000)
    X = words.fit_transform(split.X).toarray()
    calibration, test = (words.transform(texts).toarray() for texts in (split.X_calibration, split.X_test))
    return split._replace(X=X, X_calibration=calibration, X_test=test)


def _three_parts(X: np.ndarray, y: np.ndarray, sizes: tuple[int, int], rng: np.random.Generator) -> Split:
    """Other rows to fit and to calibrate on for every seed, and always the same to test: none of them ever tunes."""
    own, test = np.split(np.random.default_rng(0).permutation(len(y)), [sum(sizes)])
    fit, calibrate = np.split(rng.permutation(own), [sizes[0]])
    return Split(X[fit], y[fit], X[calibrate], y[calibrate], X[test], y[test])


_DATA: dict[str, tuple[Callable[[np.random.Generator], Split], str]] = {
    "digits": (_digits, "digits"),
    "mfeat": (_mfeat, "mfeat"),
    "fashion": (_fashion, "fashion_mnist"),
    "bbc": (_bbc_news, "bbc_news"),
    "brown": (_brown, "brown"),
}


def _base_model(name: str, seed: int) -> BaseEstimator:
    """Over-confident (naive Bayes, network), under-confident (forest), nearly calibrated (logistic), and full of ties."""
    models: dict[str, BaseEstimator] = {
        "bayes": GaussianNB(var_smoothing=1e-3),
        "forest": RandomForestClassifier(100, random_state=seed),
        "mlp": MLPClassifier((100,), alpha=0.0, max_iter=100, tol=0.0, random_state=seed),
        "logistic": make_pipeline(StandardScaler(), LogisticRegression(C=0.1, max_iter=300)),
        "knn": KNeighborsClassifier(15),
    }
    return models[name]


def _task(*, source: str, model: str, n: int, split: str, seed: int) -> Probabilities:
    P, y, P_test, y_test = base_probabilities(source, model, seed)
    return Probabilities(P[:n], y[:n], P_test, y_test, split=split, seed=seed)


@functools.lru_cache(maxsize=32)
def base_probabilities(source: str, model: str, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Probabilities and classes of calibration and test rows, from a base model fitted once.

    They are kept in the data folder under a digest of all that they depend on (data, seed, this file, scikit-learn),
    because every arm and setting asks for them, in whatever process it runs.
    """
    build, registered = _DATA[source]
    depends = [
        source,
        model,
        seed,
        data.checksums(registered),
        digest_file(__file__),
        sklearn.__version__,
        np.__version__,
    ]
    key = hashlib.sha256(json.dumps(depends).encode()).hexdigest()
    path = data.folder() / "base_probabilities" / f"{source}-{model}-{seed}-{key[:16]}.safetensors"
    try:
        kept, _ = load_arrays(path)
    except (FileNotFoundError, FileFormatError):
        kept = _fit_base(build, model, seed)
        path.parent.mkdir(parents=True, exist_ok=True)
        save_arrays(path, kept, {})
    return kept["P"], kept["y"], kept["P_test"], kept["y_test"]


def _fit_base(build: Callable[[np.random.Generator], Split], model: str, seed: int) -> dict[str, np.ndarray]:
    split = build(np.random.default_rng(seed))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ConvergenceWarning)  # the network has so many epochs, converged or not
        fitted = _base_model(model, seed).fit(split.X, split.y)
    classes = np.unique(np.concatenate([split.y, split.y_calibration, split.y_test]))
    kept: dict[str, np.ndarray] = {
        "y": np.searchsorted(classes, split.y_calibration),
        "y_test": np.searchsorted(classes, split.y_test),
    }
    for name, X in (("P", split.X_calibration), ("P_test", split.X_test)):
        kept[name] = np.zeros((len(X), len(classes)))  # a class that the base model never met keeps 0
        kept[name][:, np.searchsorted(classes, fitted.classes_)] = fitted.predict_proba(X)
    return kept


# Thinned by hand: each base model meets several kinds of data, each kind of data several sizes.
_TASKS = (
    ("digits", "bayes", 200),
    ("digits", "bayes", 600),
    ("digits", "forest", 200),
    ("digits", "forest", 600),
    ("digits", "mlp", 200),
    ("digits", "mlp", 600),
    ("digits", "knn", 600),
    ("mfeat", "bayes", 600),
    ("mfeat", "forest", 200),
    ("mfeat", "mlp", 600),
    ("mfeat", "logistic", 200),
    ("fashion", "bayes", 2000),
    ("fashion", "forest", 600),
    ("fashion", "forest", 2000),
    ("fashion", "mlp", 600),
    ("fashion", "mlp", 2000),
    ("fashion", "logistic", 600),
    ("fashion", "knn", 2000),
    ("bbc", "bayes", 200),
    ("bbc", "forest", 200),
    ("bbc", "logistic", 600),
    ("brown", "forest", 200),
    ("brown", "logistic", 200),
    ("brown", "knn", 200),
)

study = Study(
    slug="isotonic",
    question="Does knowing that a row adds up to one make isotonic calibration beat one-vs-rest?",
    tasks={
        f"{source}_{model}_{n}": Task(
            functools.partial(_task, source=source, model=model, n=n), data=data.checksums(_DATA[source][1])
        )
        for source, model, n in _TASKS
    },
    arms={
        "raw": Arm(raw, untuned="nothing is fitted"),
        "temperature": Arm(temperature, grid={"pull": [0.0, 1.0, 10.0]}),
        "dirichlet": Arm(dirichlet, grid={"ridge": [0.1, 3.0, 100.0]}),
        "ovr": Arm(ovr, grid={"n_bins": [None, 30, 15]}),
        "fir": Arm(fir, grid={"blocks": ["all", 30, 15]}),
        "na_fir": Arm(na_fir, grid={"blocks": ["fir", 30, 15]}, aware=True),
        "scir": Arm(scir, grid={"n_bins": [10, 20, 40]}, aware=True),
    },
    metrics=[
        Metric("nll", "nats", better="lower"),
        Metric("ece", better="lower"),
        Metric("classwise_ece", better="lower"),
        Metric("brier", better="lower"),
        Metric("accuracy", "%", better="higher"),
        Metric("fit_seconds", "s", better="lower", timing=True),
    ],
    claims=[
        Claim("na_fir", beats="ovr", on="nll", pairs="tasks"),
        Claim("scir", beats="ovr", on="nll", pairs="tasks"),
        Claim("na_fir", beats="ovr", on="ece", pairs="tasks"),
        Claim("na_fir", beats="fir", on="nll", margin=0.005, pairs="tasks"),
        Claim("na_fir", beats="temperature", on="nll", exploratory=True, pairs="tasks"),
    ],
    budgets={
        "quick": Budget(seeds=3, tasks=("digits_bayes_600", "digits_forest_600", "digits_mlp_600", "digits_knn_600")),
        "full": Budget(seeds=10, tuning_seeds=3),
    },
    protocol=CalibrationTask,
    unit="calibration_rows",
)
