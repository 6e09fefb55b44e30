import numpy as np
import pytest

from heedful.calibrate.isotonic._softmax import fit_softmax


def fit(P, y, **settings):
    return fit_softmax(P, y, np.full(len(y), 1 / len(y)), **settings)


def nll(P, y, found):
    z = np.log(P)
    z = (z @ found.scale.T if found.scale.ndim == 2 else z * found.scale) + found.bias
    z -= np.log(np.exp(z).sum(axis=1, keepdims=True))
    return -z[np.arange(len(y)), y].mean()


def test_temperature_recovers_the_known_distortion(draw):
    P, y = draw(20_000, 4, 0, sharpness=2.5)
    # log-probabilities are 2.5 times too large; the standard error of the estimate is about 0.01 at this n
    assert fit(P, y, family="temperature").scale == pytest.approx(1 / 2.5, abs=0.02)


@pytest.mark.parametrize("family", ["temperature", "vector", "dirichlet"])
def test_fit_is_a_minimum(draw, family):
    P, y = draw(400, 4, 1)
    found = fit(P, y, family=family)
    least, rng = nll(P, y, found), np.random.default_rng(0)
    assert 0 <= found.gap < 1e-9
    for _ in range(20):
        move = found._replace(scale=found.scale + 1e-3 * rng.normal(size=found.scale.shape))
        if family != "temperature":
            move = move._replace(bias=found.bias + 1e-3 * rng.normal(size=4))
        assert nll(P, y, move) >= least - 1e-9


def test_each_freer_family_fits_its_training_data_better(draw):
    P, y = draw(300, 5, 2)
    losses = [nll(P, y, fit(P, y, family=family)) for family in ("temperature", "vector", "dirichlet")]
    assert losses[0] > losses[1] > losses[2]


def test_strong_ridge_turns_dirichlet_into_per_class_scaling_without_bias(draw):
    P, y = draw(300, 3, 0)
    found = fit(P, y, family="dirichlet", ridge=1e6)
    assert abs(found.scale - np.diag(np.diag(found.scale))).max() < 1e-4
    assert abs(found.bias).max() < 1e-4


def test_probabilities_of_zero_and_separable_data_stay_finite():
    P = np.array([[1.0, 0.0], [0.0, 1.0], [1.0, 0.0]])
    for family in ("temperature", "vector", "dirichlet"):
        found = fit(P, np.array([0, 1, 0]), family=family)
        assert np.isfinite(found.scale).all()
        assert np.isfinite(found.bias).all()
