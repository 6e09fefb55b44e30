import pickle
from fractions import Fraction

import hypothesis
import numpy as np
import pandas as pd
import pytest
import sklearn
from hypothesis import strategies as st
from scipy import sparse
from sklearn.base import clone
from sklearn.linear_model import Ridge
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import FunctionTransformer

from heedful.errors import ConvergenceError, HeedfulWarning, InputError, NotFittedError, ParameterError
from heedful.unlearn import (
    KernelSelectiveSamplingClassifier,
    SelectiveSamplingClassifier,
    UnlearnReport,
    select_core_set,
)
from heedful.unlearn.system_aware_unlearning._digest import digest_of
from heedful.unlearn.system_aware_unlearning.selection import moments
from tests.conformance.typechecks import as_users_have_it

T = 3000


def fitted(draw, *, n=T, d=6, seed=0, ids=True, **settings):
    X, y = draw(n, d, seed)
    model = SelectiveSamplingClassifier(**{"kappa": 0.3, "horizon": T, **settings})
    return model.fit(X, y, ids=np.arange(n) if ids else None), X, y


def relearned(model, keep):
    """A model that was given these stored samples and nothing else, selection on.

    Where none remain: one that was given a stranger, and had to forget him.
    """
    fresh = clone(model).set_params(horizon=model.horizon_)
    X, y, ids = model.core_X_[keep], model.core_y_[keep], None if model.core_ids_ is None else model.core_ids_[keep]
    if X.shape[0]:
        return fresh.fit(X, y, ids=ids, classes=model.classes_)
    stranger = np.full((1, model.n_features_in_), 0.3)
    stranger, name = sparse.csr_array(stranger) if sparse.issparse(X) else stranger, np.zeros(1, dtype=ids.dtype)
    fresh.fit(stranger, model.classes_[:1], ids=name, classes=model.classes_)
    assert fresh.unlearn(name).removed == 1
    return fresh


@pytest.mark.parametrize("update", ["rebuild", "downdate"])
def test_weights_are_the_closed_form_on_the_core(draw, seed, update):
    model, X, y = fitted(draw, seed=seed, fit_intercept=False, ridge=0.7, update=update)
    core = select_core_set(X, kappa=0.3, horizon=T, ridge=0.7)
    np.testing.assert_array_equal(model.core_ids_, core)
    X, t = X[core], 2 * y[core] - 1
    np.testing.assert_allclose(model.coef_[0], np.linalg.solve(0.7 * np.eye(6) + X.T @ X, X.T @ t), rtol=0, atol=1e-10)


def test_with_a_threshold_that_all_exceed_it_is_ridge_regression_on_all_data(draw, seed):
    model, X, y = fitted(draw, n=500, seed=seed, fit_intercept=False, kappa=1.0, horizon=10**12, ridge=2.0)
    assert len(model.core_ids_) == 500
    peer = Ridge(alpha=2.0, fit_intercept=False).fit(X, 2 * y - 1)
    np.testing.assert_allclose(model.coef_[0], peer.coef_, rtol=0, atol=1e-10)


def test_an_intercept_is_a_constant_feature_at_the_price_of_root_two(draw, seed):
    model, X, y = fitted(draw, seed=seed)
    rows = select_core_set(np.column_stack([X, np.ones(T)]) / np.sqrt(2), kappa=0.3)
    np.testing.assert_array_equal(model.core_ids_, rows)
    Z = np.column_stack([X, np.ones(T)]) / np.sqrt(2)
    w = np.linalg.solve(np.eye(7) + Z[rows].T @ Z[rows], Z[rows].T @ (2 * y[rows] - 1))
    np.testing.assert_allclose(np.r_[model.coef_[0], model.intercept_], w, rtol=0, atol=1e-10)
    np.testing.assert_allclose(model.decision_function(X), Z @ w, rtol=0, atol=1e-10)


@pytest.mark.parametrize("classes", [2, 4])
@pytest.mark.parametrize("layout", [np.asarray, sparse.csr_array])
def test_after_a_deletion_the_state_is_that_of_a_system_that_never_saw_the_samples(draw, seed, classes, layout):
    X, y = draw(T, 6, seed)
    y = y + 2 * (X[:, 0] > 0.2) if classes == 4 else y
    names = np.array([f"|person {row}|" for row in range(T)])
    model = SelectiveSamplingClassifier(kappa=0.3, horizon=T).fit(layout(X), y, ids=names)
    rng = np.random.default_rng(seed)
    saved = pickle.dumps(model)
    for request in range(25):
        model = pickle.loads(saved)
        n = len(model.core_ids_)
        share = [0.0, 1.0, *rng.random(23)][request]
        gone = rng.random(n) < share
        wanted = np.r_[model.core_ids_[gone], model.core_ids_[gone][::2], names[~np.isin(names, model.core_ids_)][:7]]
        fresh = relearned(model, ~gone)
        erased = model.core_ids_[gone].tolist()
        report = model.unlearn(rng.permutation(wanted))
        assert (report.removed, report.requested, report.touched) == (gone.sum(), len(wanted), gone.any())
        assert model.state_digest() == fresh.state_digest()
        ours, theirs = model.state(), fresh.state()
        assert ours.keys() == theirs.keys()
        for name in ours:
            assert (ours[name].dtype, ours[name].tobytes()) == (theirs[name].dtype, theirs[name].tobytes()), name
        assert digest_of(vars(model)) == digest_of(vars(fresh))  # whatever else may be in the object
        content = pickle.dumps(model)
        assert not any(name.encode() in content or name.encode("utf-32-le") in content for name in erased)
        assert model.audit(strict=True)


def test_a_sample_outside_of_the_core_might_as_well_not_have_come(draw, seed):
    model, X, y = fitted(draw, n=400, seed=seed)
    outside = np.setdiff1d(np.arange(400), model.core_ids_)
    digest = model.state_digest()
    for gone in (outside[:1], outside[-1:], outside, outside[::3]):
        rest = np.setdiff1d(np.arange(400), gone)
        other = SelectiveSamplingClassifier(kappa=0.3, horizon=T).fit(X[rest], y[rest], ids=rest)
        assert other.state_digest() == digest


def test_to_delete_who_is_not_stored_nothing_is_learned(draw, seed, monkeypatch):
    model, _, _ = fitted(draw, seed=seed)
    outside = np.setdiff1d(np.arange(T), model.core_ids_)
    digest = model.state_digest()
    monkeypatch.setattr(SelectiveSamplingClassifier, "_learn", None)
    report = model.unlearn(outside)
    assert report == UnlearnReport(requested=len(outside), removed=0, seconds=report.seconds, touched=False)
    assert model.unlearn([10**15, -1]).removed == 0  # nobody's
    assert model.unlearn([]).requested == 0
    assert model.state_digest() == digest


@hypothesis.settings(max_examples=25)
@hypothesis.given(data=st.data())
def test_order_batches_and_repetitions_of_requests_do_not_matter(data):
    rng = np.random.default_rng(0)
    X = rng.normal(size=(300, 4))
    model = SelectiveSamplingClassifier(kappa=0.4).fit(X, X[:, 0] > 0, ids=range(300))
    other = pickle.loads(pickle.dumps(model))
    wanted = data.draw(st.lists(st.integers(0, 320), max_size=60))
    model.unlearn(wanted)
    again = data.draw(
        st.permutations(wanted + data.draw(st.lists(st.sampled_from(wanted), max_size=9)) if wanted else [])
    )
    cut = data.draw(st.integers(0, len(again)))
    for batch in (again[:cut], again[cut:], again[:1]):
        other.unlearn(batch)
    assert other.state_digest() == model.state_digest()


@pytest.mark.parametrize("update", ["rebuild", "downdate"])
def test_without_a_core_the_model_knows_nothing_and_says_the_tie(draw, update):
    model, X, _ = fitted(draw, update=update)
    assert model.unlearn(model.core_ids_).removed > 20
    np.testing.assert_array_equal(model.coef_, np.zeros((1, 6)))
    np.testing.assert_array_equal(model.intercept_, [0.0])
    np.testing.assert_array_equal(model.predict(X), np.ones(T))  # 0 counts as positive
    A, B = moments(model.core_X_, np.zeros((0, 1)), model._rows, ridge=model.ridge)
    np.testing.assert_array_equal(A, np.eye(7))
    np.testing.assert_array_equal(B, np.zeros((7, 1)))
    if update == "downdate":
        np.testing.assert_array_equal(model.state()["inverse"], np.eye(7))
    assert model.audit()
    assert model.partial_fit(X, X[:, 0] > 0, ids=range(T)).score(X, X[:, 0] > 0) > 0.9


def test_downdating_agrees_with_rebuilding_after_a_thousand_deletions(draw, seed):
    X, y = draw(2000, 50, seed)
    settings = {"kappa": 0.9, "horizon": 2000}
    exact = SelectiveSamplingClassifier(**settings).fit(X, y, ids=range(2000))
    quick = SelectiveSamplingClassifier(**settings, update="downdate", refresh_every=10_000)
    quick.fit(X, y, ids=range(2000))
    gone = np.random.default_rng(seed).permutation(exact.core_ids_)[:1000]
    exact.unlearn(gone)
    for name in gone:
        quick.unlearn([name])
    assert quick.state()["removals"] == 1000
    np.testing.assert_allclose(quick.coef_, exact.coef_, rtol=0, atol=1e-9)
    assert np.linalg.eigvalsh(quick.state()["inverse"]).min() > 0
    report = quick.audit()
    assert report.passed
    assert not report.bitwise
    assert 0 < report.max_deviation < 1e-9
    assert exact.audit().bitwise


def test_downdating_starts_afresh_when_it_is_time_or_digits_would_be_lost(draw):
    model, _, _ = fitted(draw, update="downdate", refresh_every=3)
    for removals in (1, 2, 0, 1):
        model.unlearn(model.core_ids_[:1])
        assert model.state()["removals"] == removals
    # A row so long that A without it would keep none of A's digits.
    X = np.diag([1.0, 1e6])
    model = SelectiveSamplingClassifier(horizon=2, normalize=None, fit_intercept=False, update="downdate")
    with pytest.warns(
        HeedfulWarning, match=r"The largest norm of a sample is 1e\+06; selection and its guarantees need"
    ):
        model.fit(X, [0, 1], ids=[7, 8])
    model.unlearn([8])
    assert model.state()["removals"] == 0


def test_selection_does_not_look_at_labels(draw, seed):
    model, X, y = fitted(draw, seed=seed)
    rng = np.random.default_rng(seed)
    for labels in (rng.permutation(y), rng.integers(0, 5, size=T), 1 - y):
        other = clone(model).fit(X, labels, ids=np.arange(T))
        np.testing.assert_array_equal(other.core_ids_, model.core_ids_)


def test_two_of_many_classes_are_decided_as_by_the_binary_model(draw, seed):
    X, y = draw(1000, 6, seed)
    binary = SelectiveSamplingClassifier().fit(X, y)
    many = SelectiveSamplingClassifier().fit(X, y, classes=[0, 1, 2])
    np.testing.assert_array_equal(many.predict(X), binary.predict(X))
    scores = many.decision_function(X)
    np.testing.assert_allclose(scores[:, 1], binary.decision_function(X), rtol=0, atol=1e-12)
    np.testing.assert_allclose(scores[:, 0], -scores[:, 1], rtol=0, atol=1e-12)


def test_a_class_may_leave_and_the_columns_stay(draw):
    model, X, _ = fitted(draw)
    y = (X[:, 0] > 0).astype(int) + (X[:, 1] > 0)
    model.fit(X, y, ids=np.arange(T))
    model.unlearn(model.core_ids_[model.core_y_ == 2])
    assert model.decision_function(X).shape == (T, 3)
    assert 2 not in model.predict(X)
    assert model.audit(strict=True)


def test_parts_give_what_the_whole_gives(draw, seed):
    model, X, y = fitted(draw, seed=seed)
    parts = SelectiveSamplingClassifier(kappa=0.3, horizon=T)
    for rows in np.split(np.arange(T), [1, 2, 600, 601, 2000]):
        parts.partial_fit(X[rows], y[rows], ids=rows, classes=[0, 1])
    assert parts.state_digest() == model.state_digest()
    parts.partial_fit(X[:50], y[:50], ids=np.arange(T, T + 50))  # nothing new
    assert parts.state_digest() == model.state_digest()


def test_after_deletions_more_may_come(draw, seed):
    """The state is that of a system to which the deleted had never come, however early they went."""
    X, y = draw(2000, 6, seed)
    model = SelectiveSamplingClassifier(kappa=0.3, horizon=T)
    model.partial_fit(X[:1000], y[:1000], ids=np.arange(1000), classes=[0, 1])
    gone = model.core_ids_[::3]
    rest = np.setdiff1d(model.core_ids_, gone)
    never = SelectiveSamplingClassifier(kappa=0.3, horizon=T)
    never.partial_fit(X[rest], y[rest], ids=rest, classes=[0, 1])
    model.unlearn(gone)
    for each in (model, never):
        each.partial_fit(X[1000:], y[1000:], ids=np.arange(1000, 2000))
    assert model.state_digest() == never.state_digest()
    assert model.audit(strict=True)


def test_samples_are_deleted_by_value(draw, seed):
    model, X, y = fitted(draw, n=500, seed=seed, ids=False)
    named, _, _ = fitted(draw, n=500, seed=seed)
    rows = named.core_ids_[[2, 3, 5]]
    expected = relearned(model, np.delete(np.arange(len(named.core_ids_)), [2, 3, 5]))
    outside = np.setdiff1d(np.arange(500), named.core_ids_)[:4]
    report = model.unlearn_samples(X[np.r_[rows, outside, rows]], y[np.r_[rows, outside, rows]])
    assert (report.requested, report.removed) == (10, 3)
    assert model.state_digest() == expected.state_digest()
    assert model.unlearn_samples(model.core_X_, 1 - model.core_y_).removed == 0  # another label is another sample
    assert model.unlearn_samples(model.core_X_, np.full(len(model.core_y_), 9)).removed == 0  # no class of ours
    assert model.unlearn_samples(np.nextafter(model.core_X_, 2), model.core_y_).removed == 0
    sparse_twin = SelectiveSamplingClassifier(kappa=0.3, horizon=T).fit(sparse.csr_array(X), y)
    assert sparse_twin.unlearn_samples(X[rows], y[rows]).removed == 3
    assert model.unlearn_samples(sparse.csr_array(model.core_X_[:1]), model.core_y_[:1]).removed == 1


def test_equal_samples_go_together():
    X = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, -0.0], [1.0, 0.0]])
    model = SelectiveSamplingClassifier(kappa=1.0, horizon=100).fit(X, [0, 1, 0, 1])
    assert len(model.core_y_) == 4
    assert model.unlearn_samples(np.array([[1.0, 0.0]]), [0]).removed == 2  # −0.0 is 0.0; the other label stays
    np.testing.assert_array_equal(model.core_y_, [1, 1])


def test_a_name_that_samples_share_deletes_them_all(draw):
    X, y = draw(600, 6, 0)
    people = np.array([f"p{row % 50}" for row in range(600)])
    model = SelectiveSamplingClassifier(kappa=0.4, horizon=600, unique_ids=False).fit(X, y, ids=people)
    keep = model.core_ids_ != "p7"
    fresh = relearned(model, keep)
    assert (~keep).sum() > 1
    assert model.unlearn(["p7", "p7", "nobody"]).removed == (~keep).sum()
    assert model.state_digest() == fresh.state_digest()
    model.partial_fit(X, y, ids=people)  # known names may come again


@pytest.mark.parametrize(
    "ids",
    [list("abcdef"), np.array(list("abcdef")), pd.Series(list("abcdef")), np.array(list("abcdef"), dtype=object)],
    ids=["list", "array", "series", "objects"],
)
def test_ids_are_strings_in_any_container(ids):
    X = np.vstack([np.eye(3), -np.eye(3)])
    model = SelectiveSamplingClassifier(kappa=1.0, horizon=100).fit(X, [0, 0, 0, 1, 1, 1], ids=ids)
    assert model.core_ids_.tolist() == list("abcdef")
    assert model.core_ids_.dtype == "<U1"
    assert model.unlearn(pd.Series(["b", "zzz"])).removed == 1


@pytest.mark.parametrize("kind", [np.int8, np.uint64, object, "Int64"])
def test_ids_are_ints_of_any_width(kind):
    X = np.vstack([np.eye(3), -np.eye(3)])
    ids = pd.Series([5, 4, 3, 2, 1, 0], dtype=kind)
    model = SelectiveSamplingClassifier(kappa=1.0, horizon=100).fit(X, [0, 0, 0, 1, 1, 1], ids=ids)
    assert model.core_ids_.dtype == np.int64
    assert model.unlearn(ids[:2]).removed == 2


@pytest.mark.parametrize(
    ("ids", "message"),
    [
        ([1, 2, 3], "ids must hold one id for each sample: X has 4 rows, and ids 3 entries"),
        ([1, 2, 2, 1], "ids must be unique; 2 of them occur more than once, such as 1"),
        (["a", "b", "a", "c"], "ids must be unique; 1 of them occur more than once, such as 'a'"),
        ([1.0, 2.0, 3.0, 4.0], "ids must be all ints of at most 64 bits or all strings"),
        ([1, None, 3, 4], "ids must be all ints of at most 64 bits or all strings, none missing"),
        (np.array(["a", 1, "b", 2], dtype=object), "ids must be all ints of at most 64 bits or all strings"),
        ([True, False, True, False], "ids must be all ints of at most 64 bits or all strings"),
        ([2**64, 1, 2, 3], "ids must be all ints of at most 64 bits or all strings"),
        ([[1], [2], [3], [4]], r"ids must be a flat list, one id for each sample; got an array of shape \(4, 1\)"),
        ([[1], [2, 3], [4], []], "ids must be a flat list of ints or strings"),
        ("abcd", "ids must be a flat list"),
    ],
)
def test_ids_that_name_nobody_are_refused(ids, message):
    with pytest.raises(InputError, match=f"^{message}"):
        SelectiveSamplingClassifier().fit(np.eye(4), [0, 1, 0, 1], ids=ids)


def test_requests_that_could_never_match_are_refused(draw):
    model, X, y = fitted(draw)
    with pytest.raises(
        InputError, match="fitted with ids that are ints, and the request has strings: none would match"
    ):
        model.unlearn(["17"])
    with pytest.raises(InputError, match="ids must be a flat list"):
        model.unlearn(17)
    unnamed = SelectiveSamplingClassifier().fit(X, y)
    with pytest.raises(
        InputError, match=r"was fitted without ids.* Ask by value, unlearn_samples\(X, y\), or fit with ids="
    ):
        unnamed.unlearn([1])
    with pytest.raises(InputError, match="X has 5 features, but SelectiveSamplingClassifier is expecting 6"):
        model.unlearn_samples(X[:, :5], y)


def test_before_fit_nothing_can_be_asked():
    model = SelectiveSamplingClassifier()
    X = np.eye(2)
    for ask in (
        lambda: model.unlearn([1]),
        lambda: model.unlearn_samples(X, [0, 1]),
        lambda: model.predict(X),
        lambda: model.decision_function(X),
        model.state,
        model.state_digest,
        model.audit,
        lambda: model.save("x.safetensors"),
        lambda: model.core_X_,
        lambda: model.core_y_,
        lambda: model.core_ids_,
    ):
        with pytest.raises(NotFittedError, match="is not fitted yet"):
            ask()
    assert not hasattr(model, "core_X_")


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kappa": 0.0}, "kappa must be a number > 0 and <= 1; got 0.0"),
        ({"kappa": 1.01}, "kappa must be a number > 0 and <= 1; got 1.01"),
        ({"ridge": 0}, "ridge must be a number > 0"),
        ({"ridge": -1.0}, "ridge must be a number > 0"),
        ({"horizon": 0}, "horizon must be an int >= 1"),
        ({"horizon": 10**400}, "horizon must be an int >= 1 and <= "),
        ({"normalize": "l2"}, "normalize must be one of 'sample', 'unit', None; got 'l2'"),
        ({"update": "sometimes"}, "update must be one of 'rebuild', 'downdate'; got 'sometimes'"),
        ({"refresh_every": 0}, "refresh_every must be an int >= 1; got 0"),
        ({"fit_intercept": "yes"}, "fit_intercept must be one of True, False; got 'yes'"),
        ({"unique_ids": None}, "unique_ids must be one of True, False; got None"),
    ],
)
def test_parameters_out_of_range_are_refused(settings, message):
    with pytest.raises(ParameterError, match=f"^{message}"):
        SelectiveSamplingClassifier(**settings).fit(np.eye(2), [0, 1])


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_data_that_are_not_finite_are_refused(draw, bad):
    model, X, y = fitted(draw)
    X[3, 2] = bad
    for ask in (lambda: model.predict(X), lambda: model.unlearn_samples(X, y), lambda: clone(model).fit(X, y)):
        with pytest.raises(InputError, match="Input X contains"):
            ask()


def test_one_class_is_refused_unless_the_others_are_named(draw):
    X, _ = draw(100, 4, 0)
    with pytest.raises(InputError, match=r"needs at least two classes; got one class, \[3\]. Pass classes="):
        SelectiveSamplingClassifier().fit(X, np.full(100, 3))
    model = SelectiveSamplingClassifier().fit(X, np.full(100, 3), classes=[3, 5])
    assert set(model.predict(X)) == {3}
    with pytest.raises(InputError, match=r"got one class, \[3\]\.$"):
        SelectiveSamplingClassifier().fit(X, np.full(100, 3), classes=[3])
    with pytest.raises(InputError, match=r"y has labels \[4\] that are not among the classes \[3, 5\]"):
        SelectiveSamplingClassifier().fit(X, np.full(100, 4), classes=[3, 5])


def test_parts_need_a_horizon_and_classes_and_fit_together(draw):
    X, y = draw(100, 4, 0)
    blind = SelectiveSamplingClassifier()
    assert not hasattr(blind, "partial_fit")
    with pytest.raises(AttributeError, match="has no attribute 'partial_fit'") as error:
        blind.partial_fit(X, y, classes=[0, 1])
    assert isinstance(error.value.__cause__, ParameterError)
    assert "partial_fit needs horizon=, the number of samples expected in all" in str(error.value.__cause__)

    model = SelectiveSamplingClassifier(horizon=1000)
    with pytest.raises(InputError, match="The first call of partial_fit needs classes="):
        model.partial_fit(X, y)
    model.partial_fit(X, y, ids=np.arange(100), classes=[0, 1])
    for given, message in (
        ({"ids": None}, "Either all calls have ids, or none has"),
        ({"ids": [str(i) for i in range(100)]}, "ids must be all ints or all strings, in all calls alike"),
        ({"ids": np.arange(100)}, "ids must be unique, and 0 is stored already"),
        (
            {"ids": np.arange(100, 200), "classes": [0, 1, 2]},
            r"classes=\[0, 1, 2\] is not what the first call was given",
        ),
    ):
        with pytest.raises(InputError, match=message):
            model.partial_fit(X, y, **given)
    with pytest.raises(InputError, match=r"y has labels \[7\]"):
        model.partial_fit(X, np.full(100, 7), ids=np.arange(100, 200))


def test_more_samples_than_expected_are_warned_of_and_the_threshold_stays(draw):
    X, y = draw(100, 4, 0)
    with pytest.warns(HeedfulWarning, match=r"^100 samples came where horizon=80 were expected. The threshold stays"):
        model = SelectiveSamplingClassifier(horizon=80).fit(X, y)
    assert model.threshold_ == 80**-0.25
    with pytest.warns(HeedfulWarning, match="^100 samples came"):
        model.partial_fit(X, y)


def test_nothing_kept_is_warned_of(draw):
    X, y = draw(100, 4, 0)
    with pytest.warns(HeedfulWarning, match=r"^No sample was kept: no leverage exceeds 0.316.*ridge=10"):
        model = SelectiveSamplingClassifier(ridge=10).fit(X, y)
    assert len(model.core_y_) == 0
    assert set(model.predict(X)) == {1}


def test_long_samples_are_warned_of_where_nothing_divides_them(draw):
    X, y = draw(100, 4, 0)
    X[5] *= 3
    for fit_intercept in (True, False):
        with pytest.warns(HeedfulWarning, match="^The largest norm of a sample is 3; selection"):
            SelectiveSamplingClassifier(normalize=None, fit_intercept=fit_intercept).fit(X, y)
        SelectiveSamplingClassifier(normalize=None, fit_intercept=fit_intercept).fit(X / 3, y)
        SelectiveSamplingClassifier(fit_intercept=fit_intercept).fit(X, y)


def test_wide_sparse_rows_are_refused(draw):
    with as_users_have_it(), pytest.raises(InputError, match="X is sparse with 5001 columns"):
        SelectiveSamplingClassifier().fit(sparse.csr_array(np.eye(2, 5001)), [0, 1])


def test_a_dataframe_gives_its_names_and_string_labels_come_back(draw):
    X, y = draw(300, 3, 0)
    frame = pd.DataFrame(X, columns=["a", "b", "c"])
    model = SelectiveSamplingClassifier().fit(frame, np.array(["no", "yes"], dtype=object)[y], ids=frame.index)
    assert list(model.feature_names_in_) == ["a", "b", "c"]
    assert set(model.core_y_) == {"no", "yes"}
    assert model.unlearn_samples(frame.loc[model.core_ids_[:2]], model.core_y_[:2]).removed == 2
    assert model.audit()


def test_a_ridge_that_is_lost_to_rounding_is_named(draw):
    X, y = draw(100, 4, 0)
    message = "^ridge is so small beside the norms of the samples that it is lost to rounding"
    for model in (SelectiveSamplingClassifier(ridge=1e-30), KernelSelectiveSamplingClassifier(ridge=1e-30)):
        with pytest.raises(ConvergenceError, match=message):
            model.fit(X[:, :1] * np.ones(4), y)


@pytest.mark.parametrize("dtype", [int, bool, float, str, object])
def test_labels_are_of_any_kind(draw, dtype):
    X, y = draw(300, 4, 0)
    names = ["b", "a"] if dtype in (str, object) else [1, 0]
    labels = np.array(names, dtype=dtype)[y]
    model = SelectiveSamplingClassifier(kappa=0.4).fit(X, labels, classes=names)
    assert set(model.predict(X)) == set(names)
    assert model.unlearn_samples(X, labels).removed == len(
        X[select_core_set(np.c_[X, np.ones(300)] / 2**0.5, kappa=0.4)]
    )
    refused = SelectiveSamplingClassifier(kappa=0.4).fit(X, labels)
    assert refused.unlearn_samples(X, np.full(300, "nobody", dtype=object)).removed == 0


def test_ids_are_routed_as_metadata(draw):
    X, y = draw(300, 4, 0)
    pipeline = make_pipeline(FunctionTransformer(), SelectiveSamplingClassifier())
    pipeline.fit(X, y, selectivesamplingclassifier__ids=np.arange(300))
    with sklearn.config_context(enable_metadata_routing=True):
        model = SelectiveSamplingClassifier().set_fit_request(ids=True)
        routed = make_pipeline(FunctionTransformer(), model).fit(X, y, ids=np.arange(300))
    assert routed[-1].core_ids_.tolist() == pipeline[-1].core_ids_.tolist()
    assert routed[-1].audit()


def test_classes_of_several_kinds_are_refused_in_later_parts_too(draw):
    X, y = draw(100, 3, 0)
    model = SelectiveSamplingClassifier(horizon=200).fit(X, y)
    with pytest.raises(InputError, match=r"^classes must be a flat list of labels of one kind"):
        model.partial_fit(X, y, classes=np.array([0, "one"], dtype=object))


@pytest.mark.parametrize("kind", ["datetime64[D]", "timedelta64[s]", "S3", object])
def test_labels_that_no_file_can_hold_are_refused(draw, kind):
    X, y = draw(100, 3, 0)
    labels = np.array([Fraction(each, 3) for each in y]) if kind is object else y.astype(kind)
    with pytest.raises(InputError, match=r"^Labels must be numbers or text, .* e\.g\. \[str\(label\) for label in y\]"):
        SelectiveSamplingClassifier().fit(X, y, classes=np.unique(labels))


def test_classes_are_a_list_of_labels_and_no_wider_than_they_are(draw):
    X, y = draw(100, 4, 0)
    wide = SelectiveSamplingClassifier().fit(X, np.array(["no", "yes"], dtype="<U40")[y])
    assert wide.classes_.dtype == "<U3"
    for classes in (5, [[0, 1], [2, 3]]):
        with pytest.raises(InputError, match=r"^classes must be a flat list of labels of one kind"):
            SelectiveSamplingClassifier().fit(X, y, classes=classes)


@pytest.mark.parametrize("normalize", ["sample", "unit", None])
@pytest.mark.parametrize("layout", [np.asarray, sparse.csr_array])
def test_samples_beyond_the_range_of_numbers_are_refused(draw, normalize, layout):
    X, y = draw(100, 4, 0)
    X[7] = 1e160
    with pytest.raises(InputError, match=r"^The squared norms of some samples exceed the range of float64"):
        SelectiveSamplingClassifier(normalize=normalize).fit(layout(X), y)
