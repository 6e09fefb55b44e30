import numpy as np
import pytest
from sklearn.isotonic import IsotonicRegression

from heedful.calibrate.isotonic._pooled import (
    assign_cells,
    cell_bounds,
    cell_weights,
    flattened_isotonic,
    monotone_frequencies,
    quantile_edges,
    row_chunks,
)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("decimals", [2, 12])  # with many ties, and with none
def test_pooled_fit_equals_isotonic_regression_of_all_pairs(draw, seed, decimals):
    P, y = draw(200, 5, seed)
    P = P.round(decimals)
    weight = np.random.default_rng(seed).uniform(0.5, 2, size=200)
    fit = flattened_isotonic(P, y, weight)
    hits = (y[:, None] == np.arange(5)).astype(float).ravel()
    peer = IsotonicRegression().fit(P.ravel(), hits, sample_weight=np.repeat(weight, 5))
    ours = fit.values[assign_cells(P, fit.edges)].ravel()
    np.testing.assert_allclose(ours, peer.predict(P.ravel()), atol=1e-12)  # a mean of at most 1000 numbers
    assert (np.diff(fit.values) > 0).all()


def test_cells_count_the_edges_at_or_below_a_pair():
    cells = assign_cells(np.array([[0.1, 0.9], [0.5, 0.5]]), np.array([0.5, 0.7]))
    assert cells.tolist() == [[0, 2], [1, 1]]
    assert cells.dtype == np.uint8


def test_cell_bounds_and_weights_do_not_depend_on_chunks(draw, monkeypatch):
    P, y = draw(101, 3, 0)
    fit = flattened_isotonic(P, y, np.ones(101))
    cells = assign_cells(P, fit.edges)
    values = np.linspace(1, 2, 101)
    whole = cell_bounds(P, cells, len(fit.values)), cell_weights(cells, values, len(fit.values))
    monkeypatch.setattr("heedful.calibrate.isotonic._pooled._CHUNK", 7)
    again = cell_bounds(P, cells, len(fit.values)), cell_weights(cells, values, len(fit.values))
    np.testing.assert_array_equal(whole[0], again[0])
    np.testing.assert_allclose(whole[1], again[1], rtol=1e-13)
    for b in range(len(fit.values)):
        inside = P[cells == b]
        assert (whole[0][0][b], whole[0][1][b]) == (inside.min(), inside.max())


def test_chunks_cover_every_row_once():
    rows = np.concatenate([np.arange(30_000)[chunk] for chunk in row_chunks(30_000, 30)])
    np.testing.assert_array_equal(rows, np.arange(30_000))
    assert len(list(row_chunks(30_000, 30))) > 1
    assert list(row_chunks(0, 3)) == []


def test_empty_cells_take_the_value_before_them():
    fit = monotone_frequencies(np.array([0.0, 1.0, 0.0, 3.0]), np.array([0.0, 2.0, 0.0, 3.0]))
    assert fit.tolist() == [0.5, 0.5, 0.5, 1.0]


def test_quantile_bins_weigh_the_same_and_keep_equal_values_together():
    x = np.array([3.0, 1.0, 2.0, 4.0])
    assert quantile_edges(x, np.ones(4), 2).tolist() == [3.0]
    assert quantile_edges(x, np.array([1.0, 1.0, 1.0, 3.0]), 2).tolist() == [4.0]
    assert quantile_edges(np.ones(9), np.ones(9), 4).tolist() == []
    doubled = quantile_edges(np.repeat(x, 2), np.ones(8), 3)
    np.testing.assert_array_equal(doubled, quantile_edges(x, np.full(4, 2.0), 3))
