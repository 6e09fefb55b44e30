"""What a fitted model holds: a function of the core and public parameters, and nothing else."""

import numpy as np
import pytest
import sklearn
from scipy import sparse
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression, RidgeClassifier
from sklearn.preprocessing import StandardScaler

from heedful.errors import InputError
from heedful.unlearn import (
    AuditReport,
    KernelSelectiveSamplingClassifier,
    SelectiveSamplingClassifier,
    SystemAwareUnlearner,
)
from heedful.unlearn.system_aware_unlearning._digest import digest_of

MODELS = {
    "rebuild": SelectiveSamplingClassifier(kappa=0.3, horizon=1000),
    "downdate": SelectiveSamplingClassifier(kappa=0.3, horizon=1000, update="downdate"),
    "kernel": KernelSelectiveSamplingClassifier(kappa=0.2, horizon=1000),
    "wrapper": SystemAwareUnlearner(RidgeClassifier(random_state=0), kappa=0.3, horizon=1000),
}


@pytest.fixture(params=MODELS)
def model(request):
    return clone(MODELS[request.param])


def arrays_in(value, seen=None):
    """Every array that can be reached from an object through attributes, containers and bases."""
    seen = set() if seen is None else seen
    if id(value) in seen:
        return
    seen.add(id(value))
    if isinstance(value, np.ndarray):
        yield value
        if value.dtype.hasobject:
            yield from arrays_in(value.tolist(), seen)
    elif isinstance(value, dict):
        for item in value.values():
            yield from arrays_in(item, seen)
    elif isinstance(value, (list, tuple, set)):
        for item in value:
            yield from arrays_in(item, seen)
    elif hasattr(value, "__dict__"):
        yield from arrays_in(vars(value), seen)


def test_no_size_depends_on_how_many_came_or_went(draw, model, seed):
    X, y = draw(300, 5, seed)
    few = clone(model).fit(X, y, ids=np.arange(300))
    outside = np.setdiff1d(np.arange(300), few.core_ids_)
    more = np.r_[np.arange(300), np.repeat(outside, 2)]  # those who were not kept come again and again
    many = clone(model).fit(X[more], y[more], ids=np.r_[np.arange(300), np.arange(2 * len(outside)) + 1000])
    assert {k: v.shape for k, v in many.state().items()} == {k: v.shape for k, v in few.state().items()}
    assert many.state_digest() == few.state_digest()
    many.unlearn(np.arange(1000, 1000 + 2 * len(outside)))
    assert digest_of(vars(many)) == digest_of(vars(few))


def test_arrays_hold_no_memory_beyond_their_values(draw, model):
    X, y = draw(400, 5, 0)
    model.fit(X, y, ids=[f"p{row}" for row in range(400)])
    model.unlearn(model.core_ids_[::2])
    m = len(model.core_y_)
    arrays = list(arrays_in(model))
    assert len(arrays) >= 5
    for array in arrays:
        assert array.base is None or memoryview(array.base).nbytes == array.nbytes
        assert max(array.shape, default=0) <= max(m, 6)


def test_a_string_that_is_gone_leaves_no_width_behind(draw, model):
    X, y = draw(400, 5, 0)
    names = np.array([f"p{row}" for row in range(400)], dtype=object)
    plain = clone(model).fit(X, y, ids=names)
    kept, left = plain.core_ids_[3], next(name for name in names if name not in set(plain.core_ids_))
    names[names == left] = left + "x" * 100
    assert clone(model).fit(X, y, ids=names).state_digest() == plain.state_digest()
    names[names == kept] = kept + "x" * 100
    model.fit(X, y, ids=names)
    assert model.core_ids_.dtype.itemsize > 400
    model.unlearn([kept + "x" * 100])
    plain.unlearn([kept])
    assert model.core_ids_.dtype == plain.core_ids_.dtype <= np.dtype("<U4")
    assert model.state_digest() == plain.state_digest()


def test_sparse_rows_are_stored_without_zeros_and_old_buffers(draw, model):
    X, y = draw(400, 5, 0)
    X[np.abs(X) < 0.4] = 0.0
    matrix = sparse.csr_matrix(X)
    # The first row, which is always kept, begins with a zero and has its last entry in two halves.
    data, indices, n = matrix.data, matrix.indices, matrix.indptr[1]
    untidy = sparse.csr_matrix(
        (
            np.r_[0.0, data[: n - 1], data[n - 1] / 2, data[n - 1] / 2, data[n:]],
            np.r_[np.setdiff1d(np.arange(5), indices[:n])[0], indices[:n], indices[n - 1], indices[n:]],
            np.r_[0, matrix.indptr[1:] + 2],
        )
    )
    untidy.indices, untidy.indptr = untidy.indices.astype(np.int64), untidy.indptr.astype(np.int64)
    tidy = clone(model).fit(matrix, y, ids=np.arange(400))
    model.fit(untidy, y, ids=np.arange(400))
    assert model.state_digest() == tidy.state_digest()
    model.unlearn(model.core_ids_[1::2])
    core = model.core_X_
    assert len(core.data) == len(core.indices) == core.nnz == np.count_nonzero(core.toarray())
    for array in (core.data, core.indices, core.indptr):
        assert array.base is None or array.base.nbytes == array.nbytes
    assert model.audit(strict=True).passed


def test_the_digest_sees_every_part(draw, model):
    X, y = draw(400, 5, 0)
    model.fit(X, y, ids=np.arange(400))
    digest = model.state_digest()
    assert len(digest) == 64
    assert clone(model).fit(X, y, ids=np.arange(400)).state_digest() == digest
    one_less_bit = X.copy()
    one_less_bit[model.core_ids_[-1], 0] = np.nextafter(X[model.core_ids_[-1], 0], 2)
    flipped = y.copy()
    flipped[model.core_ids_[0]] ^= 1
    for other in (
        clone(model).fit(X, y),
        clone(model).fit(X, y, ids=np.arange(400) + 1),
        clone(model).fit(X, flipped, ids=np.arange(400)),
        clone(model).fit(one_less_bit, y, ids=np.arange(400)),
        clone(model).set_params(kappa=0.29999).fit(X, y, ids=np.arange(400)),
        clone(model).set_params(horizon=1001).fit(X, y, ids=np.arange(400)),
        clone(model).fit(X, y, ids=np.arange(400), classes=[0, 1, 2]),
    ):
        assert other.state_digest() != digest


def test_state_hands_out_copies(draw, model):
    X, y = draw(400, 5, 0)
    digest = model.fit(X, y, ids=np.arange(400)).state_digest()
    for array in model.state().values():
        array[...] = 0
    assert model.state_digest() == digest


def test_an_honest_model_passes_its_audit(draw, model):
    X, y = draw(400, 5, 0)
    model.fit(X, y, ids=np.arange(400))
    report = model.audit(strict=True)
    assert report == AuditReport(True, True, 0.0, model.state_digest(), ())
    assert report.to_dict()["findings"] == []
    model.unlearn(model.core_ids_[:5])
    assert model.audit(strict=True)


def test_an_audit_finds_what_has_no_business_there(draw, model):
    X, y = draw(400, 5, 0)
    model.fit(X, y, ids=np.arange(400))
    model.n_seen_ = 400
    report = model.audit()
    assert not report
    assert not report.bitwise
    assert report.findings == ("n_seen_ is not part of a model.",)
    del model.n_seen_
    model.classes_seen = None
    assert model.audit().findings == ("classes_seen is not part of a model.",)


def test_an_audit_finds_a_threshold_that_is_not_declared(draw, model):
    X, y = draw(400, 5, 0)
    model.fit(X, y, ids=np.arange(400))
    model.threshold_ *= 0.5
    assert model.audit().findings == ("threshold_ is not what learning from the core gives.",)
    model.fit(X, y, ids=np.arange(400))
    model.horizon_ += 1
    assert model.audit().findings == ("horizon_ is not what learning from the core gives.",)


def test_an_audit_finds_weights_that_were_learned_from_others(draw):
    X, y = draw(400, 5, 0)
    for name in ("rebuild", "downdate"):
        model = clone(MODELS[name]).fit(X, y, ids=np.arange(400))
        model.coef_[0, 0] += 1e-6
        report = model.audit()
        assert not report
        assert report.max_deviation == pytest.approx(1e-6)
        assert report.findings[0] == "coef_ is not what learning from the core gives."
    kernel = clone(MODELS["kernel"]).fit(X, y)
    kernel.dual_coef_[0] = np.nextafter(kernel.dual_coef_[0], 2)
    assert kernel.audit().findings == ("dual_coef_ is not what learning from the core gives.",)
    wrapper = clone(MODELS["wrapper"]).fit(X, y)
    wrapper.estimator_ = RidgeClassifier(random_state=0).fit(X, y)
    assert wrapper.audit().findings == ("estimator_ is not what learning from the core gives.",)
    assert np.isnan(wrapper.audit().max_deviation)


def test_an_audit_finds_hoarded_samples(draw):
    """A core of everything learns consistently, but selection would not have kept it."""
    X, y = draw(400, 5, 0)
    hoarder = SelectiveSamplingClassifier(kappa=1.0, horizon=10**9).fit(X, y)
    hoarder.set_params(kappa=0.3, horizon=1000).threshold_ = 1000**-0.3
    hoarder.horizon_ = 1000
    (finding,) = hoarder.audit().findings
    assert finding.endswith("of the 400 stored samples.")
    assert finding.startswith("Selection would keep ")


def test_an_audit_finds_a_view_of_what_was_deleted(draw):
    X, y = draw(400, 5, 0)
    model = clone(MODELS["rebuild"]).fit(X, y)
    whole = np.vstack([model.core_X_, model.core_X_[:1]])
    object.__setattr__(model._core, "X", whole[:-1])
    assert model.audit().findings == ("core_X is a view of a larger buffer.",)


def test_an_audit_finds_a_prototype_that_was_fitted_to_all(draw):
    X, y = draw(400, 5, 0)
    fitted = LogisticRegression(random_state=0).fit(X, y)
    assert not SystemAwareUnlearner(fitted, horizon=1000).fit(X, y).audit()
    scaler = StandardScaler().fit(X)
    model = SystemAwareUnlearner(RidgeClassifier(random_state=0), feature_map=scaler, horizon=1000).fit(X, y)
    assert model.audit().findings == ("feature_map is not what learning from the core gives.",)
    np.testing.assert_array_equal(model.feature_map_.mean_, 0)  # what is used knows nothing of X


def test_an_audit_finds_the_model_that_a_clone_was_made_of(draw):
    """scikit-learn's metadata requests know their owner, and its clone copies them, fitted owner and all."""
    X, y = draw(400, 5, 0)
    with sklearn.config_context(enable_metadata_routing=True):
        model = SelectiveSamplingClassifier(horizon=1000).set_fit_request(ids=True).fit(X, y, ids=np.arange(400))
        assert model.audit()
        other = clone(model).fit(-X, y, ids=np.arange(400))
    if getattr(other._metadata_request.owner, "_core", None) is None:
        pytest.skip("this scikit-learn's requests hold no estimator")
    (finding,) = other.audit().findings
    assert finding.startswith("_metadata_request holds another fitted model")


def test_a_strict_audit_wants_a_horizon_from_before(draw):
    X, y = draw(400, 5, 0)
    model = SelectiveSamplingClassifier().fit(X, y)
    assert model.audit()
    assert model.audit(strict=True).findings == (
        "horizon was not declared: the threshold tells how many samples fit was given.",
    )


@pytest.mark.parametrize(
    "wrong",
    [
        {"ids": np.zeros(400, dtype=int)},
        {"ids": np.arange(399)},
        {"classes": [5, 6]},
        {"classes": [0]},
    ],
    ids=["same ids", "few ids", "other classes", "one class"],
)
def test_a_refit_that_fails_leaves_the_model_as_it_was(draw, model, wrong):
    X, y = draw(400, 5, 0)
    model.fit(X, y, ids=np.arange(400))
    digest, held = model.state_digest(), digest_of(vars(model))
    with pytest.raises(InputError):
        model.fit(X[:, :3], y, **{"ids": np.arange(400), **wrong})
    assert (model.state_digest(), digest_of(vars(model))) == (digest, held)
    assert model.audit(strict=True)
    assert model.unlearn(model.core_ids_[:3]).removed == 3
    fresh = clone(model)
    with pytest.raises(InputError):
        fresh.fit(X[:, :3], y, **{"ids": np.arange(400), **wrong})
    assert vars(fresh).keys() == fresh.get_params(deep=False).keys()


def test_a_deletion_that_fails_leaves_the_model_as_it_was(draw, model, monkeypatch):
    X, y = draw(400, 5, 0)
    model.fit(X, y, ids=np.arange(400))
    digest, names = model.state_digest(), model.core_ids_

    def out_of_memory(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(type(model), "_learn", out_of_memory)
        patch.setattr(type(model), "_learn_without", out_of_memory)
        with pytest.raises(MemoryError):
            model.unlearn(names[:3])
        with pytest.raises(MemoryError):
            model.partial_fit(-3 * X, y, ids=np.arange(400) + 1000)
    assert model.state_digest() == digest
    assert model.audit()
    assert model.unlearn(names[:3]).removed == 3
