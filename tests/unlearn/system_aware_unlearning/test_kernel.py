import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.kernel_ridge import KernelRidge
from sklearn.metrics.pairwise import pairwise_kernels

from heedful.errors import HeedfulWarning, InputError, ParameterError
from heedful.unlearn import KernelSelectiveSamplingClassifier, SelectiveSamplingClassifier
from heedful.unlearn.system_aware_unlearning import kernel as module

KERNELS = {
    "linear": {},
    "rbf": {"gamma": 2.0},
    "laplacian": {"gamma": 0.5},
    "poly": {"gamma": 1.5, "degree": 2, "coef0": 0.5},
}


@pytest.mark.parametrize("normalize", ["sample", "unit", None])
@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("n_classes", [2, 3])
@pytest.mark.filterwarnings("ignore:The largest norm of a sample")
def test_with_the_linear_kernel_it_is_the_linear_classifier(draw, seed, normalize, fit_intercept, n_classes):
    X, y = draw(1500, 6, seed)
    X = X * np.random.default_rng(seed).uniform(0.5, 1.5, size=(1500, 1))
    y = y + (n_classes == 3) * (X[:, 0] > 0.3)
    settings = {"kappa": 0.3, "ridge": 0.5, "normalize": normalize, "fit_intercept": fit_intercept}
    linear = SelectiveSamplingClassifier(**settings).fit(X, y, ids=np.arange(1500))
    kernel = KernelSelectiveSamplingClassifier(kernel="linear", **settings).fit(X, y, ids=np.arange(1500))
    np.testing.assert_array_equal(kernel.core_ids_, linear.core_ids_)
    np.testing.assert_allclose(kernel.decision_function(X), linear.decision_function(X), rtol=0, atol=1e-8)
    np.testing.assert_array_equal(kernel.predict(X), linear.predict(X))
    gone = linear.core_ids_[::3]
    assert linear.unlearn(gone).removed == kernel.unlearn(gone).removed == len(gone)
    np.testing.assert_allclose(kernel.decision_function(X), linear.decision_function(X), rtol=0, atol=1e-8)


@pytest.mark.parametrize("kernel", KERNELS)
def test_it_selects_by_kernel_leverage_and_learns_by_kernel_ridge(draw, seed, kernel):
    X, y = draw(250, 3, seed)
    settings = {"kernel": kernel, **KERNELS[kernel]}
    model = KernelSelectiveSamplingClassifier(kappa=0.25, ridge=0.8, fit_intercept=False, normalize=None, **settings)
    K = pairwise_kernels(X, metric=kernel, **KERNELS[kernel])
    if kernel == "poly":  # longer than 1
        with pytest.warns(HeedfulWarning, match=r"The largest norm of a sample is 2"):
            model.fit(X, y, ids=np.arange(250))
    else:
        model.fit(X, y, ids=np.arange(250))
    kept = []
    for row in range(250):
        inverse = np.linalg.inv(K[np.ix_(kept, kept)] + 0.8 * np.eye(len(kept)))
        if (K[row, row] - K[row, kept] @ inverse @ K[kept, row]) / 0.8 > model.threshold_:
            kept.append(row)
    assert model.core_ids_.tolist() == kept
    peer = KernelRidge(alpha=0.8, kernel=kernel, **{"gamma": None, **KERNELS[kernel]}).fit(X[kept], 2.0 * y[kept] - 1)
    np.testing.assert_allclose(model.decision_function(X), peer.predict(X), rtol=0, atol=1e-9)


def test_the_size_of_blocks_is_nothing(draw, seed, monkeypatch):
    X, y = draw(300, 3, seed)
    model = KernelSelectiveSamplingClassifier(kappa=0.3, gamma=4.0).fit(X, y)
    for size in (1, 7, 299, 5000):
        monkeypatch.setattr(module, "_BLOCK", size)
        other = clone(model).fit(X, y)
        assert other.state_digest() == model.state_digest()
        np.testing.assert_allclose(other.decision_function(X), model.decision_function(X), rtol=0, atol=1e-12)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("layout", [np.asarray, sparse.csr_matrix])
def test_after_a_deletion_the_state_is_that_of_a_system_that_never_saw_the_samples(draw, seed, kernel, layout):
    X, y = draw(800, 4, seed)
    settings = {"kernel": kernel, **KERNELS[kernel], "kappa": 0.25, "horizon": 800}
    model = KernelSelectiveSamplingClassifier(**settings).fit(layout(X), y, ids=np.arange(800))
    rng = np.random.default_rng(seed)
    while len(model.core_y_) > 2:
        gone = rng.random(len(model.core_ids_)) < 0.5
        gone[rng.integers(len(gone))], gone[-1] = True, False
        fresh = clone(model).fit(model.core_X_[~gone], model.core_y_[~gone], ids=model.core_ids_[~gone], classes=[0, 1])
        assert model.unlearn(np.r_[model.core_ids_[gone], 10_000]).removed == gone.sum()
        assert model.state_digest() == fresh.state_digest()
        assert model.audit(strict=True)
    model.unlearn(model.core_ids_)
    np.testing.assert_array_equal(model.decision_function(layout(X)), np.zeros(800))
    np.testing.assert_array_equal(model.predict(layout(X)), np.ones(800))
    assert model.audit(strict=True)


def test_parts_give_what_the_whole_gives(draw, seed):
    X, y = draw(800, 4, seed)
    settings = {"gamma": 3.0, "kappa": 0.25, "horizon": 800}
    whole = KernelSelectiveSamplingClassifier(**settings).fit(X, y, ids=np.arange(800))
    parts = KernelSelectiveSamplingClassifier(**settings)
    for rows in np.split(np.arange(800), [5, 300, 301]):
        parts.partial_fit(X[rows], y[rows], ids=rows, classes=[0, 1])
    assert parts.state_digest() == whole.state_digest()


def test_it_bends_where_the_linear_one_cannot():
    rng = np.random.default_rng(0)
    X = rng.uniform(-1, 1, size=(2000, 2))
    y = X[:, 0] * X[:, 1] > 0
    bent = KernelSelectiveSamplingClassifier(gamma=4.0).fit(X, y)
    assert bent.score(X, y) > 0.9 > 0.7 > SelectiveSamplingClassifier().fit(X, y).score(X, y)
    assert len(bent.core_y_) < 400


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kernel": "cosine"}, "kernel must be one of 'linear', 'rbf', 'laplacian', 'poly'; got 'cosine'"),
        ({"gamma": 0}, "gamma must be a number > 0; got 0"),
        ({"gamma": "scale"}, "gamma must be a number > 0; got 'scale'"),
        ({"degree": 0}, "degree must be an int >= 1; got 0"),
        ({"degree": 2.5}, "degree must be an int >= 1; got 2.5"),
        ({"coef0": -1}, "coef0 must be a number >= 0; got -1"),
        ({"kappa": 2}, "kappa must be a number > 0 and <= 1; got 2"),
        ({"ridge": 0}, "ridge must be a number > 0"),
    ],
)
def test_parameters_out_of_range_are_refused(settings, message):
    with pytest.raises(ParameterError, match=f"^{message}"):
        KernelSelectiveSamplingClassifier(**settings).fit(np.eye(2), [0, 1])


def test_bad_data_are_refused():
    model = KernelSelectiveSamplingClassifier()
    with pytest.raises(InputError, match="Input X contains NaN"):
        model.fit([[np.nan], [1.0]], [0, 1])
    with pytest.raises(InputError, match="needs at least two classes; got one class"):
        model.fit([[0.0], [1.0]], [1, 1])
    with pytest.raises(InputError, match="ids must be unique"):
        model.fit([[0.0], [1.0]], [0, 1], ids=["a", "a"])
