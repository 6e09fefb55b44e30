import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy import sparse

from heedful.errors import InputError, ParameterError
from heedful.unlearn import core_size_estimate, kappa_for_budget, select_core_set
from heedful.unlearn.system_aware_unlearning import selection
from heedful.unlearn.system_aware_unlearning.selection import divisors, feature_rows, grow_selection, moments


def naive(X, threshold, ridge=1.0):
    """Row by row, a dense solve for each leverage."""
    A, kept = ridge * np.eye(X.shape[1]), []
    for row, x in enumerate(X):
        if x @ np.linalg.solve(A, x) > threshold:
            kept.append(row)
            A += np.outer(x, x)
    return kept


@pytest.mark.parametrize("n", [1, 2, 511, 512, 513, 1500])
@pytest.mark.parametrize(("kappa", "ridge"), [(0.1, 1.0), (0.3, 1.0), (1.0, 1.0), (0.3, 0.05)])
def test_blocks_select_what_a_loop_over_rows_selects(draw, seed, n, kappa, ridge):
    X, _ = draw(n, 7, seed)
    rows = select_core_set(X, kappa=kappa, ridge=ridge, horizon=2000)
    assert rows.tolist() == naive(X, 2000**-kappa, ridge)


def test_the_size_of_blocks_is_nothing(draw, seed, monkeypatch):
    X, _ = draw(1000, 7, seed)
    rows = select_core_set(X, kappa=0.3)
    for size in (1, 100, 5000):  # a block has at least as many rows as there are columns
        monkeypatch.setattr(selection, "_BLOCK", size)
        np.testing.assert_array_equal(select_core_set(X, kappa=0.3), rows)


@pytest.mark.parametrize("off", [-1e-10, 1e-10])
def test_leverages_equal_dense_solves_to_ten_digits(draw, seed, off):
    """Long rows are kept whatever the threshold; the last row's leverage after them stands against its dense value."""
    X, _ = draw(41, 12, seed)
    X[:40] *= 50
    A = np.eye(12) + X[:40].T @ X[:40]
    leverage = X[40] @ np.linalg.solve(A, X[40])
    rows = grow_selection(41, lambda rows: X[rows], np.eye(12), leverage + off)
    assert (40 in rows) == (off < 0)


@settings(max_examples=20)
@given(seed=st.integers(0, 2**32 - 1), kappa=st.floats(0.05, 0.6))
def test_a_core_set_without_some_of_its_rows_is_chosen_again(seed, kappa):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(1000, 6))
    X /= np.linalg.norm(X, axis=1, keepdims=True)
    core = X[select_core_set(X, kappa=kappa)]
    for _ in range(10):
        remaining = core[rng.random(len(core)) < rng.random()]
        if len(remaining):
            again = select_core_set(remaining, kappa=kappa, horizon=1000)
            np.testing.assert_array_equal(again, np.arange(len(remaining)))


def test_margin_based_selection_is_not_monotone(draw):
    """The blind way to choose: keep what the model is unsure of. It looks at labels, and a deletion changes its choice."""
    X, y = draw(2000, 6, 0)

    def unsure(X, y, width=0.15):
        A, b, kept = np.eye(X.shape[1]), np.zeros(X.shape[1]), []
        for row, (x, label) in enumerate(zip(X, 2 * y - 1, strict=True)):
            if abs(x @ np.linalg.solve(A, b)) <= width:
                kept.append(row)
                A += np.outer(x, x)
                b += label * x
        return np.array(kept)

    kept = unsure(X, y)
    X, y = X[kept], y[kept]
    assert unsure(X, y).tolist() == list(range(len(kept)))  # as long as nobody goes
    broken = [gone for gone in range(len(X)) if len(unsure(np.delete(X, gone, 0), np.delete(y, gone))) < len(X) - 1]
    assert len(broken) > len(X) / 4
    core = X[select_core_set(X, kappa=0.3)]
    for gone in range(len(core)):
        assert len(select_core_set(np.delete(core, gone, 0), kappa=0.3, horizon=len(X))) == len(core) - 1


def test_the_size_is_near_the_estimate_for_directions_without_preference(draw):
    d, T, kappa = 20, 8000, 0.3
    sizes = [len(select_core_set(draw(T, d, seed)[0], kappa=kappa)) for seed in range(5)]
    assert 0.5 < np.mean(sizes) / core_size_estimate(d, T, kappa) < 2


def test_the_size_grows_like_a_power_of_the_horizon(draw):
    horizons, kappa = np.array([1000, 4000, 16_000, 64_000]), 0.3
    sizes = [len(select_core_set(draw(T, 8, 0)[0], kappa=kappa)) for T in horizons]
    slope = np.polyfit(np.log(horizons), np.log(sizes), 1)[0]
    assert kappa - 0.1 < slope < kappa + 0.1 + 1 / math.log(1000)  # log T grows like T^(1/log T)


def test_an_estimate_and_its_kappa_belong_together():
    assert core_size_estimate(50, 20_000, 0.25) == pytest.approx(50 * 20_000**0.25)
    assert core_size_estimate(50, 100, 1.0) == 100
    for budget in (51, 400, 5000):
        assert core_size_estimate(50, 20_000, kappa_for_budget(50, 20_000, budget)) == pytest.approx(budget)
    assert kappa_for_budget(2, 10, 1000) == 1.0


@pytest.mark.parametrize("layout", [sparse.csr_matrix, sparse.csr_array, sparse.csc_array, sparse.coo_array])
def test_sparse_rows_select_as_dense_ones(draw, layout):
    X, _ = draw(700, 9, 0)
    X[np.random.default_rng(0).random(X.shape) < 0.7] = 0
    rows = select_core_set(X, kappa=0.4)
    np.testing.assert_array_equal(select_core_set(layout(X), kappa=0.4), rows)
    np.testing.assert_array_equal(select_core_set(np.asfortranarray(X), kappa=0.4), rows)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"kappa": 0}, "kappa must be a number > 0 and <= 1; got 0."),
        ({"kappa": 1.5}, "kappa must be a number > 0 and <= 1; got 1.5."),
        ({"kappa": 0.2, "ridge": 0}, "ridge must be a number > 0"),
        ({"kappa": 0.2, "ridge": math.inf}, "ridge must be a number > 0"),
        ({"kappa": 0.2, "horizon": 0}, "horizon must be an int >= 1 and <= .*; got 0."),
        ({"kappa": 0.2, "horizon": True}, "horizon must be an int >= 1 and <= .*; got True."),
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ParameterError, match=f"^{message}"):
        select_core_set(np.eye(3), **settings)


def test_data_that_are_no_finite_matrix_are_refused():
    for X in (np.array([[np.nan, 1]]), np.array([[np.inf, 1]]), np.ones(3), np.ones((0, 3))):
        with pytest.raises(InputError):
            select_core_set(X, kappa=0.2)
    wide = sparse.csr_array((3, 5001))
    with pytest.raises(InputError, match=r"X is sparse with 5001 columns.*Hash the features to fewer, or project"):
        select_core_set(wide, kappa=0.2)


def test_a_row_at_the_threshold_is_not_new():
    assert select_core_set([[1.0]], kappa=0.5, horizon=1).size == 0  # its leverage is 1, and so is 1^(-1/2)
    assert select_core_set([[1.0]], kappa=0.5, horizon=2).size == 1


def test_a_budget_that_cannot_be_kept_is_refused():
    with pytest.raises(ParameterError, match="max_points must be larger than n_features, since some 50 rows are kept"):
        kappa_for_budget(50, 1000, 50)
    with pytest.raises(ParameterError, match="horizon must be an int >= 2"):
        kappa_for_budget(50, 1, 60)
    with pytest.raises(ParameterError, match="kappa must be a number > 0"):
        core_size_estimate(50, 1000, 0.0)
    with pytest.raises(ParameterError, match="horizon must be an int >= 1 and <="):
        core_size_estimate(50, 10**400, 0.2)  # no float holds it


@pytest.mark.parametrize("fit_intercept", [True, False])
@pytest.mark.parametrize("normalize", ["sample", "unit", None])
def test_rows_are_scaled_each_by_itself(seed, fit_intercept, normalize):
    rng = np.random.default_rng(seed)
    X = rng.normal(size=(30, 4)) * rng.lognormal(size=(30, 1))
    X[3] = 0
    Z = feature_rows(X, fit_intercept=fit_intercept, normalize=normalize)
    plain = np.column_stack([X, np.ones(30)]) / np.sqrt(2) if fit_intercept else X
    norms = np.linalg.norm(plain, axis=1)
    by = {"sample": np.maximum(1, norms), "unit": np.where(norms > 0, norms, 1), None: np.ones(30)}[normalize]
    np.testing.assert_allclose(Z, plain / by[:, None], rtol=1e-13)
    for row in range(30):
        alone = feature_rows(X[row : row + 1], fit_intercept=fit_intercept, normalize=normalize)
        assert alone.tobytes() == Z[row].tobytes()
    np.testing.assert_array_equal(
        feature_rows(sparse.csr_array(X), fit_intercept=fit_intercept, normalize=normalize).shape, Z.shape
    )
    if normalize == "sample":
        kept = divisors(np.square(X).sum(axis=1), fit_intercept=fit_intercept, normalize="sample")
        assert (kept >= (np.sqrt(2) if fit_intercept else 1)).all()


def test_moments_are_the_sums_they_say(draw):
    X, y = draw(9000, 5, 0)  # more than two blocks
    targets = np.column_stack([y, 1 - y]).astype(float)
    A, B = moments(X, targets, lambda rows: rows, ridge=0.5)
    np.testing.assert_allclose(A, 0.5 * np.eye(5) + X.T @ X, rtol=1e-12)
    np.testing.assert_allclose(B, X.T @ targets, rtol=1e-12, atol=1e-12)
