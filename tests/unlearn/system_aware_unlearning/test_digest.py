import functools

import numpy as np
import pytest
from scipy import sparse
from sklearn.ensemble import RandomForestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

from heedful.unlearn.system_aware_unlearning._digest import digest_of

DIFFERENT = [
    None,
    0,
    0.0,
    -0.0,
    False,
    "",
    "0",
    b"0",
    1,
    1.0,
    np.float64(1.0),
    np.float32(1.0),
    [],
    (),
    {},
    set(),
    [1, 2],
    [2, 1],
    [[1], 2],
    [1, [2]],
    (1, 2),
    {1: 2},
    {2: 1},
    {1, 2},
    np.array([1, 2]),
    np.array([1.0, 2.0]),
    np.array([[1, 2]]),
    np.array([1, 2], dtype=object),
    np.array(["1", "2"]),
    np.array(["1", "2"], dtype="<U2"),
    np.array([(1, 2.0)], dtype=[("a", "i1"), ("b", "f8")]),
    sparse.csr_array(np.eye(2)),
    sparse.csr_matrix(np.eye(2)),
    len,
    int,
    functools.partial(int, base=2),
    np.random.RandomState(0),
    np.random.RandomState(1),
]


def test_different_things_have_different_digests():
    digests = [digest_of(value) for value in DIFFERENT]
    assert len(set(digests)) == len(DIFFERENT)
    assert digests == [digest_of(value) for value in DIFFERENT]


def test_where_things_lie_in_memory_is_nothing():
    column = np.arange(12.0).reshape(3, 4)
    assert digest_of(np.asfortranarray(column)) == digest_of(column)
    assert digest_of(column[:, ::2]) == digest_of(column[:, ::2].copy())
    assert digest_of({"a": 1, "b": 2}) == digest_of({"b": 2, "a": 1})
    assert digest_of({"x", "y", "z"}) == digest_of({"z", "y", "x"})
    assert digest_of(["".join(["a", "b"]), "ab"]) == digest_of(["ab", "ab"])


def test_what_lies_between_the_fields_of_a_record_is_nothing():
    kind = np.dtype({"names": ["a", "b"], "formats": ["i1", "f8"], "offsets": [0, 8], "itemsize": 16})
    zeros, ones = np.frombuffer(bytes(16), dtype=kind), np.frombuffer(b"\0" + b"\1" * 7 + bytes(8), dtype=kind)
    assert digest_of(zeros) == digest_of(ones)


def test_cycles_end():
    first, second = [1], [1]
    first.append(first)
    second.append(second)
    assert digest_of(first) == digest_of(second) != digest_of([1, [1]])


@pytest.mark.parametrize(
    "estimator",
    [
        DecisionTreeClassifier(random_state=0),
        RandomForestClassifier(5, random_state=0),
        make_pipeline(MinMaxScaler(), SVC(random_state=0)),
    ],
    ids=["tree", "forest", "pipeline"],
)
def test_two_fits_to_the_same_have_one_digest(estimator):
    rng = np.random.default_rng(0)
    X, y = rng.normal(size=(80, 3)), np.arange(80) % 3
    digest = digest_of(estimator.fit(X, y))
    estimator.fit(-X[::-1], y)
    assert digest_of(estimator) != digest
    assert digest_of(estimator.fit(X, y)) == digest
