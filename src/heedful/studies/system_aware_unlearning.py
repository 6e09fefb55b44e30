"""Can a model that stores a chosen part of its rows follow exact retraining through 40 % deletions, in less time?

Every arm learns from the same rows and is sent the same requests: two fifths of the rows, in twenty batches, drawn at
random, or all of the larger class before any other, or group by group (all mails of a sender's domain, all rows of a
cluster). After each batch it is scored on rows that no arm learns from; its accuracy is the mean over the course, and its
time is CPU time. All learners are ridge classifiers on features of unit norm that are functions of the row and of what is
public: a scale or a projection that was fitted to the rows would keep a trace of those that are deleted. Each arm chooses
among three points: how much it stores, or the ridge penalty.
"""

import dataclasses
import email.utils
import functools
import time
from collections.abc import Callable, Sequence
from email.parser import HeaderParser
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Int, Shaped
from scipy.integrate import trapezoid
from sklearn.feature_extraction.text import HashingVectorizer
from sklearn.linear_model import RidgeClassifier

from heedful import data
from heedful._files import digest_file
from heedful.data import synthetic
from heedful.evidence import Arm, Budget, Claim, Metric, Outcome, Study, Task
from heedful.studies._kept import kept
from heedful.unlearn import SelectiveSamplingClassifier, SISAClassifier

Split = Literal["validation", "test"]
Stream = Literal["uniform", "label", "group"]

BATCHES = 20
DELETED = 0.4  # share of the rows that all batches take together
SHARDS = 20  # of SISA


@runtime_checkable
class UnlearningTask(Protocol):
    """What the arms learn from, what they must forget, and what they are scored by.

    ``batches`` are numbers of rows of ``X``, each row in at most one of them. For arrays in memory, ``Requests`` is one
    already::

        # my_tasks.py
        import numpy as np
        from heedful.studies.system_aware_unlearning import Requests, deletion_batches


        def build(*, split, seed):
            X, y = my_rows()  # float (n, d), best of norm <= 1, and classes 0, 1, ...; keep a test set apart
            order = np.random.default_rng(seed).permutation(len(y))
            learned, held_out = order[: int(0.8 * len(y))], order[int(0.8 * len(y)) :]
            X_score, y_score = (X[held_out], y[held_out]) if split == "validation" else my_test_rows()
            batches = deletion_batches(np.zeros(len(learned)), seed=seed)  # uniform: all rows have one rank
            return Requests(X[learned], y[learned], batches, X_score, y_score)

    With ``split="validation"`` the scored rows must not be those of the test; the same seed must give the same rows.
    """

    X: Float[np.ndarray, "n d"]
    y: Int[np.ndarray, " n"]
    batches: Sequence[Int[np.ndarray, " _"]]
    X_score: Float[np.ndarray, "m d"]
    y_score: Int[np.ndarray, " m"]


@dataclasses.dataclass(frozen=True, eq=False)
class Requests:
    """An ``UnlearningTask`` of arrays."""

    X: Float[np.ndarray, "n d"]
    y: Int[np.ndarray, " n"]
    batches: Sequence[Int[np.ndarray, " _"]]
    X_score: Float[np.ndarray, "m d"]
    y_score: Int[np.ndarray, " m"]


def deletion_batches(rank: Shaped[np.ndarray, " n"], *, seed: int) -> list[Int[np.ndarray, " _"]]:
    """Numbers of the rows to delete, batch after batch: those of a lower rank first, those of one in a random order."""
    order = np.random.default_rng([seed, 1]).permutation(len(rank))
    order = order[np.argsort(rank[order], kind="stable")]
    return np.array_split(order[: round(DELETED * len(rank))], BATCHES)


# Arms: one flat loop; they differ in what they store, and so in what a deletion costs.

_without_intercept = functools.partial(SelectiveSamplingClassifier, fit_intercept=False)  # as it was published


def system_aware_unlearning(task: UnlearningTask, *, budget: Budget, seed: int, kappa: float) -> Outcome:
    """Rows in directions that the stored ones do not cover are stored, the others are not."""
    return _forget(task, _without_intercept(kappa=kappa), np.arange(len(task.y)))


def random_core(task: UnlearningTask, *, budget: Budget, seed: int, kappa: float) -> Outcome:
    """Equally many rows, drawn at random: blind to what they are."""
    size = len(_without_intercept(kappa=kappa).fit(task.X, task.y).core_y_)
    rows = np.sort(np.random.default_rng([seed, 2]).choice(len(task.y), size, replace=False))
    everything = _without_intercept(kappa=1.0, horizon=10**12)  # its threshold is 0 but for rounding
    return _forget(task, everything, rows)


def sisa(task: UnlearningTask, *, budget: Budget, seed: int, ridge: float) -> Outcome:
    """Classifiers of shards of the rows vote; a deletion retrains those whose shard it touches."""
    classifier = SISAClassifier(RidgeClassifier(ridge), n_shards=SHARDS, random_state=seed)
    return _forget(task, classifier, np.arange(len(task.y)))


def retrain(task: UnlearningTask, *, budget: Budget, seed: int, ridge: float) -> Outcome:
    """A classifier of all rows, trained anew on those that remain."""
    return _forget(task, _Retrained(ridge), np.arange(len(task.y)))


class _Retrained:
    """Ridge regression on the rows whose numbers have not been deleted."""

    def __init__(self, ridge: float):
        self.classifier = RidgeClassifier(ridge)

    def fit(self, X: Float[np.ndarray, "n d"], y: Int[np.ndarray, " n"], *, ids: Int[np.ndarray, " n"]) -> None:
        self.X, self.y, self.ids = X, y, ids
        self.classifier.fit(X, y)

    def unlearn(self, ids: Int[np.ndarray, " k"]) -> None:
        remain = ~np.isin(self.ids, ids)
        self.fit(self.X[remain], self.y[remain], ids=self.ids[remain])

    def predict(self, X: Float[np.ndarray, "m d"]) -> Int[np.ndarray, " m"]:
        return self.classifier.predict(X)


def _forget(task: UnlearningTask, classifier: Any, rows: Int[np.ndarray, " k"]) -> Outcome:
    """Learn from ``rows``, delete batch after batch, and score after each."""
    start = time.process_time()
    classifier.fit(task.X[rows], task.y[rows], ids=rows)
    fit_seconds = time.process_time() - start
    stored = len(classifier.core_y_ if isinstance(classifier, SelectiveSamplingClassifier) else rows)
    accuracies = [_accuracy(task, classifier)]
    deletion_seconds = 0.0
    for batch in task.batches:
        start = time.process_time()
        classifier.unlearn(batch)
        deletion_seconds += time.process_time() - start
        accuracies.append(_accuracy(task, classifier))
    deleted = np.cumsum([0, *map(len, task.batches)])
    metrics = {
        "accuracy": float(trapezoid(accuracies, deleted) / deleted[-1]),
        "last_accuracy": accuracies[-1],
        "deletion_seconds": deletion_seconds,
        "fit_seconds": fit_seconds,
        "stored": 100 * stored / len(task.y),
    }
    course = [(100 * gone / len(task.y), value) for gone, value in zip(deleted, accuracies, strict=True)]
    return Outcome(
        metrics=metrics,
        costs={"deleted_rows": int(deleted[-1]), "stored_rows": stored},
        curves={"accuracy against deleted rows (%)": course},
    )


def _accuracy(task: UnlearningTask, classifier: Any) -> float:
    return 100 * float((classifier.predict(task.X_score) == task.y_score).mean())


# Tasks: data × order of the deletions.


class Rows(NamedTuple):
    """Features of unit norm, classes and groups of the rows of a seed, and what the test takes.

    ``n_learned`` of the rows are learned, and the others scored while settings are chosen.
    """

    X: Float[np.ndarray, "n d"]
    y: Int[np.ndarray, " n"]
    groups: Int[np.ndarray, " n"]
    X_test: Float[np.ndarray, "m d"]
    y_test: Int[np.ndarray, " m"]
    n_learned: int


def _task(*, load: Callable[[int], Rows], stream: Stream, split: Split, seed: int) -> Requests:
    """Other rows to learn from with every seed, and always the same ones to test."""
    rows = load(seed)
    order = np.random.default_rng([seed, 0]).permutation(len(rows.y))
    learned, held_out = np.split(order, [rows.n_learned])
    batches = deletion_batches(_rank(rows, stream, seed)[learned], seed=seed)
    scored = (rows.X[held_out], rows.y[held_out]) if split == "validation" else (rows.X_test, rows.y_test)
    return Requests(rows.X[learned], rows.y[learned], batches, *scored)


def _rank(rows: Rows, stream: Stream, seed: int) -> np.ndarray:
    """What is deleted first has the lowest: anything, the most frequent class, or one group and then another."""
    if stream == "label":
        return rows.y != np.bincount(rows.y).argmax()
    if stream == "group":
        return np.random.default_rng([seed, 5]).permutation(rows.groups.max() + 1)[rows.groups]
    return np.zeros(len(rows.y))


def _margin(seed: int, *, n: int, n_score: int = 5000) -> Rows:
    """New points of one problem for every seed."""
    test = synthetic.margin(n_score, 50, gap=0.1, random_state=0)
    rng = np.random.default_rng([seed, 3])
    own = synthetic.margin(n + n_score, 50, gap=0.1, direction=test.direction, random_state=rng)
    return Rows(own.X, (own.y > 0).astype(int), np.zeros(len(own.y), int), test.X, (test.y > 0).astype(int), n)


def _breast_cancer(seed: int) -> Rows:
    """Standardised by the moments of 69 patients who are neither learned from nor scored, and ask for nothing."""
    table = data.load("breast_cancer")
    public, others = np.split(np.random.default_rng(0).permutation(len(table.y)), [69])
    moments = table.X[public].mean(axis=0), table.X[public].std(axis=0)
    X = _unit((table.X[others] - moments[0]) / moments[1])
    return _parted(X, table.y[others], _clusters(X))


def _digits(seed: int, *, binary: bool) -> Rows:
    table = data.load("digits")
    X = _unit(table.X)
    return _parted(X, _halved(table.y) if binary else table.y, _clusters(X))


def _fashion(seed: int, *, binary: bool) -> Rows:
    X, y, X_test, y_test = _projected_fashion()
    rows = np.random.default_rng([seed, 4]).choice(len(y), 12_000, replace=False)
    y, y_test = (_halved(y), _halved(y_test)) if binary else (y, y_test)
    return Rows(X[rows], y[rows], _clusters(X[rows]), X_test, y_test, 10_000)


@functools.lru_cache(maxsize=1)
def _projected_fashion() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Hundred random projections of the pixels; the test has the first 5000 of its images."""
    images = data.load("fashion_mnist")
    projection = np.random.default_rng(0).standard_normal((784, 100), dtype=np.float32)
    X, X_test = (_unit(x.reshape(-1, 784) @ projection).astype(float) for x in (images.x_train, images.x_test[:5000]))
    return X, images.y_train, X_test, images.y_test[:5000]


def _spam(seed: int) -> Rows:
    mails = _projected_mails()
    return _parted(mails["X"], mails["y"], mails["groups"])


@functools.lru_cache(maxsize=1)
def _projected_mails() -> dict[str, np.ndarray]:
    """Made once and kept: hashing 30 MB of text takes longer than any arm."""
    depends = [digest_file(__file__), data.checksums("spam_assassin")]
    return kept("projected_mails", depends, lambda: _project(data.load("spam_assassin")))


def _project(mails: data.Texts) -> dict[str, np.ndarray]:
    """Hashed counts of the words of subject and body, in 200 random projections; groups are domains of senders.

    Of the head only the subject counts: the rest tells one mailing list from another.
    """
    parsed = [HeaderParser().parsestr(text) for text in mails.texts]
    words = [f"{mail.get('Subject', '')} {mail.get_payload()}" for mail in parsed]
    counts = HashingVectorizer(n_features=2**14, norm=None, alternate_sign=False).transform(words)
    senders = [email.utils.parseaddr(str(mail.get("From", "")))[1].rpartition("@")[2].lower() for mail in parsed]
    projection = np.random.default_rng(0).standard_normal((2**14, 200))
    return {"X": _unit(counts @ projection), "y": mails.y, "groups": np.unique(senders, return_inverse=True)[1]}


def _parted(X: np.ndarray, y: np.ndarray, groups: np.ndarray) -> Rows:
    """Three tenths of the rows are for the test; of the others four fifths are learned."""
    test, own = np.split(np.random.default_rng(1).permutation(len(y)), [round(0.3 * len(y))])
    return Rows(X[own], y[own], groups[own], X[test], y[test], round(0.8 * len(own)))


def _unit(X: np.ndarray) -> np.ndarray:
    return X / np.maximum(np.linalg.norm(X, axis=1, keepdims=True), 1e-12)


def _halved(y: np.ndarray) -> np.ndarray:
    return (y >= 5).astype(int)


def _clusters(X: np.ndarray, n_clusters: int = 20) -> np.ndarray:
    """By the nearest of so many rows."""
    centres = X[np.random.default_rng(0).choice(len(X), n_clusters, replace=False)]
    return (X @ centres.T).argmax(axis=1)


_LOADERS: dict[str, tuple[Callable[[int], Rows], tuple[str, ...]]] = {
    "margin_5k": (functools.partial(_margin, n=5_000), ()),
    "margin_20k": (functools.partial(_margin, n=20_000), ()),
    "margin_200k": (functools.partial(_margin, n=200_000), ()),
    "breast_cancer": (_breast_cancer, ("breast_cancer",)),
    "digits": (functools.partial(_digits, binary=False), ("digits",)),
    "digits_binary": (functools.partial(_digits, binary=True), ("digits",)),
    "fashion": (functools.partial(_fashion, binary=False), ("fashion_mnist",)),
    "fashion_binary": (functools.partial(_fashion, binary=True), ("fashion_mnist",)),
    "spam": (_spam, ("spam_assassin",)),
}

_TASKS: tuple[tuple[str, Stream], ...] = (
    ("margin_5k", "uniform"),
    ("margin_20k", "uniform"),
    ("margin_200k", "uniform"),
    ("margin_20k", "label"),
    ("breast_cancer", "uniform"),
    ("breast_cancer", "label"),
    ("digits", "uniform"),
    ("digits", "group"),
    ("digits_binary", "label"),
    ("fashion", "uniform"),
    ("fashion", "group"),
    ("fashion_binary", "uniform"),
    ("fashion_binary", "label"),
    ("spam", "uniform"),
    ("spam", "label"),
    ("spam", "group"),
)

study = Study(
    slug="system_aware_unlearning",
    question="Can a model that stores a chosen part of its rows follow exact retraining through 40 % deletions, in less time?",
    tasks={
        f"{name}_{stream}": Task(
            functools.partial(_task, load=_LOADERS[name][0], stream=stream), data=data.checksums(*_LOADERS[name][1])
        )
        for name, stream in _TASKS
    },
    arms={
        "system_aware_unlearning": Arm(system_aware_unlearning, grid={"kappa": [0.1, 0.2, 0.3]}, aware=True),
        "random_core": Arm(random_core, grid={"kappa": [0.1, 0.2, 0.3]}),
        "sisa": Arm(sisa, grid={"ridge": [0.01, 0.1, 1.0]}),
        "retrain": Arm(retrain, grid={"ridge": [0.01, 0.1, 1.0]}),
    },
    metrics=[
        Metric("accuracy", "%", better="higher"),
        Metric("last_accuracy", "%", better="higher"),
        Metric("deletion_seconds", "s", better="lower", timing=True),
        Metric("fit_seconds", "s", better="lower", timing=True),
        Metric("stored", "%", better="lower"),
    ],
    claims=[
        Claim("system_aware_unlearning", beats="sisa", on="deletion_seconds"),
        Claim("system_aware_unlearning", beats="retrain", on="deletion_seconds"),
        Claim("system_aware_unlearning", beats="retrain", on="accuracy", margin=2.0),
        Claim(
            "system_aware_unlearning",
            beats="sisa",
            on="accuracy",
            tasks=[f"{name}_{stream}" for name, stream in _TASKS if stream == "label"],
        ),
        Claim("system_aware_unlearning", beats="random_core", on="accuracy", pairs="tasks"),
    ],
    budgets={
        "quick": Budget(seeds=3, tasks=("margin_5k_uniform", "breast_cancer_label", "digits_binary_label")),
        "full": Budget(seeds=10),
    },
    protocol=UnlearningTask,
    unit="deleted_rows",
)
