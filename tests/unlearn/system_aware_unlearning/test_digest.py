import copy
import functools
import threading

import numpy as np
import pytest
from scipy import sparse
from sklearn.ensemble import RandomForestClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import MinMaxScaler, StandardScaler
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

from heedful.errors import ParameterError
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
    np,
    np.log1p,
    np.logaddexp,
    np.logaddexp2,
    str.upper,
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


def adding(shift, *, scale=1.0):
    """A function that closes over ``shift`` and has ``scale`` for a default."""

    def add(X, by=scale, *, and_by=scale):
        return np.add(X * by * and_by, shift)

    return add


def scaling(shift):
    return StandardScaler().fit(np.arange(6.0)[:, None] + shift).transform


def cached(shift):
    return functools.lru_cache(adding(shift))


@pytest.mark.parametrize("make", [adding, scaling, cached, lambda seed: np.random.RandomState(seed).normal])
def test_functions_of_one_name_differ_by_what_they_hold(make):
    assert make(0).__qualname__ == make(1).__qualname__
    assert digest_of(make(0)) == digest_of(make(0)) != digest_of(make(1))
    assert digest_of([make(0)]) == digest_of([make(0)]) != digest_of([make(1)])


def test_functions_of_one_name_differ_by_what_they_run():
    plus, minus, more = (lambda X: X + 1), (lambda X: X - 1), (lambda X: X + 2)
    inner, other = (lambda X: [(lambda: x * 2)() for x in X]), (lambda X: [(lambda: x * 3)() for x in X])
    sine, cosine = (lambda X: np.sin(X)), (lambda X: np.cos(X))
    assert len({digest_of(each) for each in (plus, minus, more, inner, other, sine, cosine)}) == 7
    assert digest_of(adding(0, scale=2.0)) != digest_of(adding(0, scale=3.0))
    library = np
    assert digest_of(lambda X: library.sin(X))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_networks_of_the_same_weights_have_one_digest(dtype):
    torch = pytest.importorskip("torch")
    net = torch.nn.Linear(3, 2, dtype=getattr(torch, dtype))
    twin = copy.deepcopy(net)
    assert digest_of(net) == digest_of(twin) != digest_of(torch.nn.Linear(3, 2, dtype=getattr(torch, dtype)))
    with torch.no_grad():
        twin.bias[1] += 1
    assert digest_of(net.forward) != digest_of(twin.forward)


def test_what_cannot_be_taken_apart_is_refused():
    with pytest.raises(ParameterError, match="There is no digest of a lock, which cannot be taken apart"):
        digest_of(adding(threading.Lock()))


def test_functions_that_hold_themselves_end():
    def turning(start):
        def turn(n):
            return turn(n - 1) if n else start

        return turn

    assert digest_of(turning(0)) == digest_of(turning(0)) != digest_of(turning(1))
    scaler = StandardScaler()
    scaler.again = scaler.transform
    assert digest_of(scaler.transform) == digest_of(scaler.again)


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
