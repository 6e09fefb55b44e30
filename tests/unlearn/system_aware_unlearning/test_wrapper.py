import functools

import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.decomposition import PCA
from sklearn.dummy import DummyClassifier
from sklearn.ensemble import RandomForestClassifier
from sklearn.frozen import FrozenEstimator
from sklearn.kernel_approximation import RBFSampler
from sklearn.linear_model import LinearRegression, LogisticRegression, RidgeClassifier, SGDClassifier
from sklearn.model_selection import KFold, ShuffleSplit
from sklearn.naive_bayes import GaussianNB
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import Normalizer, PolynomialFeatures, StandardScaler
from sklearn.random_projection import SparseRandomProjection
from sklearn.svm import SVC
from sklearn.tree import DecisionTreeClassifier

from heedful.errors import InputError, ParameterError
from heedful.unlearn import SelectiveSamplingClassifier, SystemAwareUnlearner, select_core_set

ESTIMATORS = {
    "ridge": RidgeClassifier(random_state=0),
    "logistic": LogisticRegression(random_state=0),
    "sgd": SGDClassifier(random_state=0),
    "tree": DecisionTreeClassifier(random_state=0),
    "forest": RandomForestClassifier(5, random_state=0),
    "svc": SVC(random_state=0),
    "calibrated": CalibratedClassifierCV(GaussianNB(), cv=KFold(3)),
    "neighbours": KNeighborsClassifier(3, algorithm="brute"),
    "pipeline": make_pipeline(PolynomialFeatures(2), LogisticRegression(random_state=0)),
}


@pytest.mark.parametrize("estimator", ESTIMATORS.values(), ids=ESTIMATORS)
def test_any_deterministic_classifier_forgets_exactly(draw, seed, estimator):
    X, y = draw(600, 5, seed)
    y = y + (X[:, 0] > 0.3)
    model = SystemAwareUnlearner(estimator, kappa=0.35, horizon=600).fit(X, y, ids=np.arange(600))
    digest = model.state_digest()
    assert model.unlearn(np.setdiff1d(np.arange(600), model.core_ids_)).removed == 0
    assert model.state_digest() == digest
    keep = np.random.default_rng(seed).random(len(model.core_ids_)) < 0.7
    never = clone(model).fit(model.core_X_[keep], model.core_y_[keep], ids=model.core_ids_[keep], classes=[0, 1, 2])
    assert model.unlearn(model.core_ids_[~keep]).removed == (~keep).sum() > 0
    assert model.state_digest() == never.state_digest() != digest
    np.testing.assert_array_equal(model.predict(X), never.predict(X))
    assert model.audit(strict=True).bitwise


def test_with_ridge_it_is_the_linear_classifier(draw, seed):
    X, y = draw(800, 5, seed)
    linear = SelectiveSamplingClassifier(fit_intercept=False).fit(X, y, ids=np.arange(800))
    ridge = RidgeClassifier(alpha=1.0, fit_intercept=False, random_state=0)
    model = SystemAwareUnlearner(ridge, fit_intercept=False).fit(X, y, ids=np.arange(800))
    np.testing.assert_array_equal(model.core_ids_, linear.core_ids_)
    np.testing.assert_allclose(model.decision_function(X), linear.decision_function(X), rtol=0, atol=1e-9)


def test_the_prototype_stays_as_it_was(draw):
    X, y = draw(100, 3, 0)
    tree = DecisionTreeClassifier(random_state=0)
    SystemAwareUnlearner(tree).fit(X, y)
    assert not hasattr(tree, "tree_")


@pytest.mark.parametrize(
    ("feature_map", "n_features"),
    [
        (RBFSampler(n_components=20, random_state=0), 20),
        (PolynomialFeatures(2), 15),
        (lambda X: np.hstack([X, X**2]), 8),
    ],
    ids=["fourier", "polynomial", "callable"],
)
def test_leverages_and_estimator_see_the_features(draw, feature_map, n_features):
    X, y = draw(500, 4, 0)
    model = SystemAwareUnlearner(
        RidgeClassifier(random_state=0), feature_map=feature_map, fit_intercept=False, kappa=0.3, normalize="unit"
    ).fit(X, y, ids=np.arange(500))
    mapped = model._mapped(X)
    assert mapped.shape == (500, n_features)
    unit = mapped / np.linalg.norm(mapped, axis=1, keepdims=True)
    np.testing.assert_array_equal(model.core_ids_, select_core_set(unit, kappa=0.3))
    np.testing.assert_array_equal(model.core_X_, X[model.core_ids_])
    peer = RidgeClassifier(random_state=0).fit(mapped[model.core_ids_], y[model.core_ids_])
    np.testing.assert_array_equal(model.predict(X), peer.predict(mapped))
    model.unlearn(model.core_ids_[:4])
    assert model.audit()
    assert clone(model).fit(X, y).audit()


def test_a_feature_map_cannot_know_the_data(draw):
    X, y = draw(300, 4, 0)
    sampler = RBFSampler(gamma="scale", n_components=5, random_state=0)  # the scale of zeros, not of X
    model = SystemAwareUnlearner(RidgeClassifier(random_state=0), feature_map=sampler).fit(X, y)
    other = clone(model).fit(100 * X + 3, y)
    np.testing.assert_array_equal(model.feature_map_.random_weights_, other.feature_map_.random_weights_)
    zeros = clone(sampler).fit(np.zeros((1, 4)))
    np.testing.assert_array_equal(model.feature_map_.random_weights_, zeros.random_weights_)
    assert not hasattr(sampler, "random_weights_")
    public = FrozenEstimator(PCA(2).fit(np.random.default_rng(1).normal(size=(50, 4))))  # made elsewhere
    frozen = SystemAwareUnlearner(RidgeClassifier(random_state=0), feature_map=public).fit(X, y)
    assert frozen.estimator_.n_features_in_ == 2
    assert frozen.audit()


@pytest.mark.parametrize(
    "method",
    [
        lambda X: StandardScaler().fit(X).transform,
        lambda X: make_pipeline(StandardScaler(), PCA(2)).fit(X).transform,
        lambda X: functools.partial(StandardScaler().fit(X).transform, copy=True),
    ],
    ids=["scaler", "pipeline", "partial"],
)
def test_a_method_of_a_fitted_transformer_is_refused(draw, method):
    X, y = draw(300, 4, 0)
    model = SystemAwareUnlearner(RidgeClassifier(random_state=0), feature_map=method(X), horizon=300)
    with pytest.raises(ParameterError, match=r"feature_map is a method of a fitted .*FrozenEstimator\(transformer\)"):
        model.fit(X, y)


def test_the_digest_tells_feature_maps_of_one_name_apart(draw):
    X, y = draw(300, 4, 0)

    def shifted(by):
        return lambda X: X + 0 * by

    def digest(by):
        return SystemAwareUnlearner(RidgeClassifier(random_state=0), feature_map=shifted(by)).fit(X, y).state_digest()

    assert digest(X[0]) == digest(X[0]) != digest(X[1])
    stateless = SystemAwareUnlearner(RidgeClassifier(random_state=0), feature_map=Normalizer().transform, horizon=300)
    assert stateless.fit(X, y).audit(strict=True)
    assert clone(stateless).fit(X, y).state_digest() == stateless.state_digest()


def test_sparse_features_are_selected_and_learned_from(draw):
    X, y = draw(300, 4, 0)
    X[np.abs(X) < 0.3] = 0
    dense = SystemAwareUnlearner(LogisticRegression(random_state=0)).fit(X, y, ids=np.arange(300))
    thin = SystemAwareUnlearner(LogisticRegression(random_state=0)).fit(sparse.csr_matrix(X), y, ids=np.arange(300))
    np.testing.assert_array_equal(thin.core_ids_, dense.core_ids_)
    np.testing.assert_array_equal(thin.predict(X), dense.predict(X))
    sparsely = SystemAwareUnlearner(LogisticRegression(random_state=0), feature_map=sparse.csr_array).fit(X, y)
    np.testing.assert_array_equal(sparsely.predict(X), dense.predict(X))


def test_wide_sparse_samples_pass_where_the_map_makes_them_narrow(draw):
    narrow = SparseRandomProjection(20, random_state=0)
    X, y = sparse.random_array((300, 6000), density=0.01, format="csr", rng=0), np.arange(300) % 2
    model = SystemAwareUnlearner(RidgeClassifier(random_state=0), feature_map=narrow, horizon=300).fit(X, y)
    assert model.estimator_.n_features_in_ == 20
    assert model.audit()
    with pytest.raises(InputError, match="X is sparse with 6000 columns"):
        SystemAwareUnlearner(RidgeClassifier(random_state=0)).fit(X, y)


@pytest.mark.parametrize("n_classes", [2, 3])
def test_scores_have_a_column_for_each_class_whoever_has_left(draw, n_classes):
    X, y = draw(400, 4, 0)
    y = y + (n_classes == 3) * (X[:, 0] > 0.3)
    model = SystemAwareUnlearner(LogisticRegression(random_state=0), kappa=0.4).fit(X, y, ids=np.arange(400))
    shape = (400,) if n_classes == 2 else (400, 3)
    for left in (n_classes, n_classes - 1, 1, 0):
        model.unlearn(model.core_ids_[model.core_y_ >= left])
        P, scores = model.predict_proba(X), model.decision_function(X)
        assert P.shape == (400, n_classes)
        np.testing.assert_allclose(P.sum(axis=1), 1)
        assert scores.shape == shape
        if n_classes == 3 and left:
            assert (scores[:, left:] == (-1 if left == 1 else -np.inf)).all()
        if left:
            assert not P[:, left:].any()
            np.testing.assert_array_equal(model.predict(X), P.argmax(axis=1))
            np.testing.assert_array_equal(model.predict(X), model._decide(scores))
            assert isinstance(model.estimator_, DummyClassifier) == (left == 1)
        else:
            np.testing.assert_allclose(P, 1 / n_classes)
            np.testing.assert_array_equal(scores, np.zeros(shape))
            assert set(model.predict(X)) == {1 if n_classes == 2 else 0}
            assert model.estimator_ is None
        assert model.audit()


def test_methods_are_there_if_the_estimator_has_them():
    assert not hasattr(SystemAwareUnlearner(RidgeClassifier(random_state=0)), "predict_proba")
    assert not hasattr(SystemAwareUnlearner(KNeighborsClassifier()), "decision_function")
    assert not hasattr(SystemAwareUnlearner(KNeighborsClassifier()), "save")


@pytest.mark.parametrize(
    ("estimator", "message"),
    [
        (
            DecisionTreeClassifier(),
            r"estimator must be deterministic, and its random_state is None: .* Set every random_state to an int",
        ),
        (SGDClassifier(random_state=np.random.RandomState(0)), r"its random_state is RandomState"),
        (make_pipeline(RandomForestClassifier()), r"its randomforestclassifier__random_state is None"),
        (CalibratedClassifierCV(GaussianNB(), cv=KFold(3, shuffle=True)), r"its cv\.random_state is None"),
        (CalibratedClassifierCV(GaussianNB(), cv=ShuffleSplit(3)), r"its cv\.random_state is None"),
        (DecisionTreeClassifier, r"estimator must be a scikit-learn classifier, an instance; got <class"),
        ("tree", r"estimator must be a scikit-learn classifier, an instance; got 'tree'"),
        (PolynomialFeatures(), r"estimator must be a scikit-learn classifier, an instance"),
    ],
)
def test_what_is_no_deterministic_classifier_is_refused(draw, estimator, message):
    X, y = draw(50, 3, 0)
    with pytest.raises(ParameterError, match=message):
        SystemAwareUnlearner(estimator).fit(X, y)


def test_an_audit_finds_a_counter_of_questions(draw):
    """A ball tree counts how often it was asked, which is no function of the core."""
    X, y = draw(300, 3, 0)
    model = SystemAwareUnlearner(KNeighborsClassifier(3, algorithm="ball_tree"), horizon=300).fit(X, y)
    assert model.audit()
    model.predict(X)
    assert model.audit().findings == ("estimator_ is not what learning from the core gives.",)


def test_regressors_are_refused(draw):
    X, y = draw(50, 3, 0)
    with pytest.raises(ParameterError, match="estimator must be a scikit-learn classifier"):
        SystemAwareUnlearner(LinearRegression()).fit(X, y)


@pytest.mark.parametrize(
    ("feature_map", "kind", "message"),
    [
        (RBFSampler(), ParameterError, r"feature_map must be deterministic, and its random_state is None"),
        ("fourier", ParameterError, r"feature_map must be a transformer, a callable or None; got 'fourier'"),
        (
            lambda X: X[:1],
            InputError,
            r"feature_map must give a row for each sample; it made shape \(1, 3\) of 50 samples",
        ),
        (lambda X: X / 0.0, InputError, r"feature_map\(X\) has 3 entries that are NaN or infinite"),
    ],
    ids=["random", "text", "rows", "infinite"],
)
@pytest.mark.filterwarnings("ignore:divide by zero:RuntimeWarning")
def test_a_feature_map_that_is_none_is_refused(draw, feature_map, kind, message):
    X, y = draw(50, 3, 0)
    with pytest.raises(kind, match=message):
        SystemAwareUnlearner(RidgeClassifier(random_state=0), feature_map=feature_map).fit(X[:50], y)


def test_scores_of_pairs_are_refused(draw):
    X, y = draw(300, 3, 0)
    y = y + (X[:, 0] > 0.3)
    svc = SVC(decision_function_shape="ovo", random_state=0)
    with pytest.raises(ParameterError, match="scores pairs of classes, not classes"):
        SystemAwareUnlearner(svc).fit(X, y).decision_function(X)
