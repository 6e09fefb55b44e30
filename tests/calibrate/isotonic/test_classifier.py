import numpy as np
import pandas as pd
import pytest
import sklearn
import sklearn.exceptions
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits, load_iris, make_classification
from sklearn.ensemble import RandomForestClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.linear_model import LinearRegression, LogisticRegression
from sklearn.metrics import log_loss
from sklearn.model_selection import GroupKFold, LeaveOneOut, PredefinedSplit, StratifiedKFold
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.svm import SVC, LinearSVC
from sklearn.utils.estimator_checks import check_estimator

from heedful.calibrate import (
    CalibratedClassifier,
    FlattenedIsotonicCalibrator,
    NormalizationAwareIsotonicCalibrator,
    OneVsRestIsotonicCalibrator,
    SortedCumulativeIsotonicCalibrator,
    TemperatureCalibrator,
)
from heedful.errors import HeedfulWarning, InputError, NotFittedError, ParameterError

METHODS = ["na_fir", "scir", "fir", "ovr", "temperature", "vector", "dirichlet"]


@pytest.fixture(scope="module")
def blobs():
    X, y = make_classification(
        600, n_features=6, n_informative=5, n_redundant=0, n_classes=4, class_sep=0.7, random_state=0
    )
    return X[:400], y[:400], X[400:], y[400:]


@pytest.mark.parametrize("settings", [{}, {"method": "scir"}, {"ensemble": False, "method": "temperature"}], ids=str)
def test_passes_scikit_learns_checks(settings):
    expected = {
        "check_sample_weight_equivalence_on_dense_data": "a row that stands twice can be in two folds, a weight of two in one",
    }
    done = check_estimator(
        CalibratedClassifier(**settings), expected_failed_checks=expected, on_skip=None, on_fail=None
    )
    failed = [f"{check['check_name']}: {check['exception']!r}" for check in done if check["status"] == "failed"]
    assert not failed, "\n".join(failed)


@pytest.mark.parametrize("ensemble", [True, False])
@pytest.mark.parametrize("estimator", [GaussianNB(), KNeighborsClassifier(7)], ids=["nb", "knn"])
def test_equals_scikit_learns_where_the_calibrator_is_the_same(blobs, estimator, ensemble):
    X, y, X_test, _ = blobs
    peer = CalibratedClassifierCV(estimator, method="isotonic", ensemble=ensemble, cv=3).fit(X, y)
    ours = CalibratedClassifier(
        estimator, method=OneVsRestIsotonicCalibrator(smoothing=None), ensemble=ensemble, cv=3
    ).fit(X, y)
    np.testing.assert_allclose(ours.predict_proba(X_test), peer.predict_proba(X_test), atol=1e-9)
    np.testing.assert_array_equal(ours.predict(X_test), ours.classes_[ours.predict_proba(X_test).argmax(axis=1)])
    assert len(ours.calibrated_classifiers_) == (3 if ensemble else 1)


def test_sample_weights_act_as_in_scikit_learn(blobs):
    X, y, X_test, _ = blobs
    weight = np.random.default_rng(0).uniform(0.2, 3, size=len(y))
    peer = CalibratedClassifierCV(GaussianNB(), method="isotonic").fit(X, y, sample_weight=weight)
    ours = CalibratedClassifier(GaussianNB(), method=OneVsRestIsotonicCalibrator(smoothing=None))
    np.testing.assert_allclose(
        ours.fit(X, y, sample_weight=weight).predict_proba(X_test), peer.predict_proba(X_test), atol=1e-6
    )  # scikit-learn normalises the weights elsewhere, which moves the naive Bayes fit in its last bits
    with pytest.warns(HeedfulWarning, match="KNeighborsClassifier.fit takes no sample_weight"):
        CalibratedClassifier(KNeighborsClassifier()).fit(X, y, sample_weight=weight)


@pytest.mark.parametrize("method", METHODS)
def test_every_method_by_name_improves_an_overconfident_model(blobs, method):
    X, y, X_test, y_test = blobs
    repeated = np.repeat(X, 3, axis=1)  # naive Bayes counts each feature three times
    raw = GaussianNB().fit(repeated, y).predict_proba(np.repeat(X_test, 3, axis=1))
    calibrated = CalibratedClassifier(GaussianNB(), method=method).fit(repeated, y)
    assert log_loss(y_test, calibrated.predict_proba(np.repeat(X_test, 3, axis=1))) < log_loss(y_test, raw)


def test_a_frozen_classifier_is_calibrated_on_the_given_rows(blobs):
    X, y, X_test, y_test = blobs
    model = GaussianNB().fit(X, y)
    calibrated = CalibratedClassifier(FrozenEstimator(model)).fit(X_test, y_test)
    direct = NormalizationAwareIsotonicCalibrator().fit(model.predict_proba(X_test), y_test)
    expected = direct.predict_proba(model.predict_proba(X))
    np.testing.assert_allclose(calibrated.predict_proba(X), expected, atol=1e-12)
    assert len(calibrated.calibrated_classifiers_) == 1


@pytest.mark.parametrize("n_classes", [2, 3])
def test_decision_values_pass_through_softmax(blobs, n_classes):
    X, y, X_test, _ = blobs
    rows = y < n_classes
    X, y = X[rows], y[rows]
    model = LinearSVC(random_state=0).fit(X, y)
    calibrated = CalibratedClassifier(FrozenEstimator(model), method="temperature").fit(X, y)
    scores = model.decision_function(X_test)
    z = np.column_stack([np.zeros(len(scores)), scores]) if n_classes == 2 else scores
    temperature = calibrated.calibrated_classifiers_[0].calibrator.temperature_
    expected = np.exp(z / temperature) / np.exp(z / temperature).sum(axis=1, keepdims=True)
    np.testing.assert_allclose(calibrated.predict_proba(X_test), expected, atol=1e-12)


def test_the_default_classifier_is_scikit_learns(blobs):
    X, y, *_ = blobs
    assert isinstance(CalibratedClassifier().fit(X, y).calibrated_classifiers_[0].estimator, LinearSVC)


def test_names_of_classes_and_columns_are_kept(blobs):
    X, y, X_test, _ = blobs
    names = np.array(["delta", "alpha", "bravo", "charlie"])
    frame = pd.DataFrame(X, columns=list("abcdef"))
    named = CalibratedClassifier(GaussianNB()).fit(frame, pd.Series(names[y]))
    plain = CalibratedClassifier(GaussianNB()).fit(X, y)
    assert named.classes_.tolist() == sorted(names)
    assert named.feature_names_in_.tolist() == list("abcdef")
    assert named.n_features_in_ == 6
    P = named.predict_proba(pd.DataFrame(X_test, columns=list("abcdef")))
    np.testing.assert_allclose(P, plain.predict_proba(X_test)[:, np.argsort(names)], atol=1e-6)


def test_an_instance_is_cloned_and_told_what_it_gets(blobs):
    X, y, _, _ = blobs
    method = SortedCumulativeIsotonicCalibrator(n_bins=7, input="logits")
    fitted = CalibratedClassifier(GaussianNB(), method=method).fit(X, y)
    inner = fitted.calibrated_classifiers_[0].calibrator
    assert (inner.n_bins, inner.input) == (7, "proba")
    assert not hasattr(method, "classes_")
    assert clone(fitted).method.input == "logits"


def test_random_state_shuffles_the_folds_and_nothing_else(blobs):
    X, y, X_test, _ = blobs
    fit = lambda state: CalibratedClassifier(GaussianNB(), random_state=state).fit(X, y).predict_proba(X_test)  # noqa: E731
    plain = CalibratedClassifier(GaussianNB(), cv=StratifiedKFold(5)).fit(X, y).predict_proba(X_test)
    np.testing.assert_array_equal(fit(None), plain)
    np.testing.assert_array_equal(fit(3), fit(3))
    assert abs(fit(3) - fit(4)).max() > 1e-4
    state = np.random.get_state()[1].copy()
    fit(5)
    np.testing.assert_array_equal(np.random.get_state()[1], state)


def test_a_fold_without_a_class_leaves_its_column_to_the_guard(blobs):
    X, y, X_test, _ = blobs
    folds = np.where(y == 3, 0, np.arange(len(y)) % 2)  # class 3 is calibrated on but not trained on in fold 0
    model = CalibratedClassifier(GaussianNB(), cv=PredefinedSplit(folds))
    with pytest.warns(HeedfulWarning, match="No row of the calibration set has class 3"):
        P = model.fit(X, y).predict_proba(X_test)
    assert P.shape == (len(X_test), 4)
    np.testing.assert_allclose(P.sum(axis=1), 1, atol=1e-12)


def test_metadata_is_routed_to_classifier_and_splitter(blobs):
    X, y, X_test, _ = blobs
    groups, weight = np.arange(len(y)) % 10, np.linspace(0.5, 2, len(y))
    with sklearn.config_context(enable_metadata_routing=True):
        model = CalibratedClassifier(
            GaussianNB().set_fit_request(sample_weight=True), cv=GroupKFold(3).set_split_request(groups=True)
        )
        routed = model.fit(X, y, sample_weight=weight, groups=groups).predict_proba(X_test)
        unweighted = CalibratedClassifier(GaussianNB().set_fit_request(sample_weight=False), cv=model.cv)
        without = unweighted.fit(X, y, sample_weight=weight, groups=groups).predict_proba(X_test)
        default = CalibratedClassifier().fit(X, y, sample_weight=weight)  # its own classifier asks for the weights
    by_hand = PredefinedSplit(np.array([fold for _, fold in sorted(_folds(X, y, groups).items())]))
    expected = CalibratedClassifier(GaussianNB(), cv=by_hand).fit(X, y, sample_weight=weight).predict_proba(X_test)
    np.testing.assert_allclose(routed, expected, atol=1e-12)
    assert abs(routed - without).max() > 1e-4
    assert default.classes_.tolist() == [0, 1, 2, 3]


def _folds(X, y, groups):
    splits = GroupKFold(3).split(X, y, groups)
    return {int(row): number for number, (_, test) in enumerate(splits) for row in test}


def test_rare_classes_wrong_settings_and_single_row_folds_are_refused(blobs):
    X, y, _, _ = blobs
    rare = y.copy()
    rare[rare == 3] = 0
    rare[:2] = 3
    with pytest.raises(InputError, match="Requesting 5-fold cross-validation but provided less than 5 examples"):
        CalibratedClassifier(GaussianNB(), cv=5).fit(X, rare)
    with pytest.raises(
        InputError, match=r"y must hold at least two classes with positive weight; got one class of \[0, 1, 2, 3\]"
    ):
        CalibratedClassifier(GaussianNB()).fit(X, y, sample_weight=(y == 1).astype(float))
    with pytest.raises(ParameterError, match=r"method must be one of 'na_fir', .* got 'isotonic'"):
        CalibratedClassifier(GaussianNB(), method="isotonic").fit(X, y)
    with pytest.raises(ParameterError, match=r"or a calibrator with fit and predict_proba; got LinearSVC\(\)"):
        CalibratedClassifier(GaussianNB(), method=LinearSVC()).fit(X, y)
    with pytest.raises(ParameterError, match="ensemble must be one of True, False, 'auto'; got 'maybe'"):
        CalibratedClassifier(GaussianNB(), ensemble="maybe").fit(X, y)
    with pytest.raises(InputError, match="Calibration needs at least two rows"):
        CalibratedClassifier(GaussianNB(), cv=LeaveOneOut()).fit(X, y)
    one_out = CalibratedClassifier(GaussianNB(), cv=LeaveOneOut(), ensemble=False, method=TemperatureCalibrator())
    assert one_out.fit(X[:60], y[:60]).classes_.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    "model", [LogisticRegression(), RandomForestClassifier(30, random_state=0)], ids=["lr", "forest"]
)
def test_on_digits_a_pixel_noise_away_every_probability_is_finite(model):
    X, y = load_digits(return_X_y=True)
    X = (X + 6 * np.random.default_rng(0).normal(size=X.shape)) / 16
    fitted = CalibratedClassifier(model).fit(X[:900], y[:900])
    assert np.isfinite(log_loss(y[900:], fitted.predict_proba(X[900:])))
    assert fitted.predict_proba(X[900:]).min() > 0


class Backwards(LogisticRegression):
    """A classifier whose ``classes_`` are not sorted."""

    def fit(self, X, y):
        super().fit(X, y)
        self.sorted_, self.classes_ = self.classes_, self.classes_[::-1]
        return self

    def predict_proba(self, X):
        self.classes_ = self.sorted_
        P = super().predict_proba(X)
        self.classes_ = self.sorted_[::-1]
        return P[:, ::-1]


def test_columns_follow_the_classes_of_the_estimator_whatever_their_order():
    X, y = load_iris(return_X_y=True)
    assert CalibratedClassifier(Backwards(max_iter=500), ensemble=True).fit(X, y).score(X, y) > 0.9
    assert CalibratedClassifier(FrozenEstimator(Backwards(max_iter=500).fit(X, y))).fit(X, y).score(X, y) > 0.9


def test_a_frozen_classifier_keeps_its_classes_and_needs_no_folds():
    X, y = load_iris(return_X_y=True)
    frozen = FrozenEstimator(LogisticRegression(max_iter=500).fit(X, y))
    with pytest.warns(HeedfulWarning, match="No row of the calibration set has class 0"):
        fitted = CalibratedClassifier(frozen).fit(X[y > 0], y[y > 0])
    assert fitted.classes_.tolist() == [0, 1, 2]
    assert fitted.predict_proba(X).shape == (150, 3)
    four = [10, 60, 110, 120]
    assert CalibratedClassifier(frozen, method="temperature").fit(X[four], y[four]).score(X, y) > 0.9
    with pytest.raises(
        InputError, match=r"labels \[3\] that the frozen classifier does not know; its classes are \[0, 1, 2\]"
    ):
        CalibratedClassifier(frozen).fit(X, y + 1)


def test_what_is_no_classifier_is_refused_at_the_door():
    X, y = load_iris(return_X_y=True)
    with pytest.raises(
        ParameterError, match=r"needs a classifier with predict_proba or decision_function; got LinearRegression"
    ):
        CalibratedClassifier(LinearRegression()).fit(X, y)


def test_scores_of_pairs_of_classes_are_refused():
    X, y = load_iris(return_X_y=True)  # three classes have three pairs: the shape would not tell
    with pytest.raises(ParameterError, match="scores pairs of classes"):
        CalibratedClassifier(SVC(decision_function_shape="ovo")).fit(X, y)
    assert CalibratedClassifier(SVC()).fit(X, y).score(X, y) > 0.9


def test_asking_before_fitting_is_heedfuls_error_and_scikit_learns():
    for unfitted in (CalibratedClassifier(), FlattenedIsotonicCalibrator()):
        with pytest.raises(NotFittedError, match="not fitted yet") as caught:
            unfitted.predict_proba([[0.5, 0.5]])
        assert isinstance(caught.value, sklearn.exceptions.NotFittedError)
