import numpy as np
import pytest
from sklearn.decomposition import PCA
from sklearn.linear_model import LogisticRegression, Ridge

from heedful.errors import InputError, NotFittedError, ParameterError
from heedful.timeseries import ReservoirClassifier
from heedful.timeseries.sarc.baseline import next_step_model


def cycles(n=40, length=50, channels=2, seed=0):
    rng = np.random.default_rng(seed)
    y = np.arange(n) % 2
    t = np.arange(length) / (6 + 2 * y[:, None, None])
    X = np.sin(2 * np.pi * t + rng.uniform(0, 6, size=(n, channels, 1)))
    return X + 0.3 * rng.normal(size=X.shape), y


def states_by_hand(fitted, X):
    """(n, L, u): forward, and backward in the order in which it read."""
    if fitted.normalize:
        X = X - X.mean(axis=2, keepdims=True)
        X = X / np.abs(X).max(axis=2, keepdims=True)
    x = fitted.input_scaling * X.transpose(0, 2, 1)
    parts = []
    for series, w_seq in zip((x, x[:, ::-1]), fitted.w_seq_, strict=False):
        h, states = np.zeros((len(X), fitted.n_units)), []
        for t in range(x.shape[1]):
            h = (1 - fitted.leak) * np.tanh(series[:, t] @ fitted.w_in_ + h @ w_seq) + fitted.leak * h
            states.append(h)
        parts.append(np.stack(states, axis=1))
    return np.concatenate(parts, axis=2), x


@pytest.mark.parametrize("bidirectional", [True, False])
@pytest.mark.parametrize("n_components", [None, 4])
@pytest.mark.parametrize("representation", ["last", "mean", "output", "reservoir"])
@pytest.mark.parametrize(
    "inputs",
    [{}, {"input_scaling": 2.0, "normalize": False, "spectral_radius": 0.5}],
    ids=["defaults", "scaled, as they are, with a small radius"],
)
def test_features_are_those_of_the_definition(inputs, representation, n_components, bidirectional, seed):
    """By scikit-learn's PCA over all steps and one scikit-learn Ridge per case."""
    X, y = cycles(seed=seed)
    X = 0.3 + X  # which only normalisation undoes
    settings = {"n_units": 6, "leak": 0.2, "dtype": "float64", "random_state": seed, "ridge": 3.0, **inputs}
    fitted = ReservoirClassifier(
        representation=representation, n_components=n_components, bidirectional=bidirectional, **settings
    ).fit(X, y)
    radius = np.abs(np.linalg.eigvals(fitted.w_seq_)).max(axis=-1)
    np.testing.assert_allclose(radius, inputs.get("spectral_radius", 0.8), rtol=0, atol=1e-8)
    states, x = states_by_hand(fitted, X)
    if n_components is not None:
        peer = PCA(n_components).fit(states.reshape(-1, states.shape[2]))
        signs = np.sign((peer.components_ * fitted.components_).sum(axis=1))
        np.testing.assert_allclose(fitted.components_, peer.components_ * signs[:, None], rtol=0, atol=1e-6)
        states = (states - fitted.mean_) @ fitted.components_.T
    if representation == "last":
        expected = states[:, -1]
    elif representation == "mean":
        expected = states.mean(axis=1)
    else:
        targets = x if representation == "output" else states
        peers = [Ridge(alpha=3.0).fit(r[:-1], t[1:]) for r, t in zip(states, targets, strict=True)]
        expected = np.stack([np.concatenate([p.coef_.T.ravel(), p.intercept_]) for p in peers])
    np.testing.assert_allclose(fitted._read(X), expected, rtol=0, atol=1e-8)


def test_a_next_step_model_without_penalty_finds_the_law_of_a_linear_system(seed):
    rng = np.random.default_rng(seed)
    law, shift = np.array([[0.9, 0.3], [-0.3, 0.9]]), np.array([0.5, -0.2])
    states = [rng.normal(size=2)]
    for _ in range(60):
        states.append(states[-1] @ law + shift)
    states = np.stack(states)[None]
    found = next_step_model(states[:, :-1], states[:, 1:], 1e-10)
    np.testing.assert_allclose(found[0], [*law.ravel(), *shift], rtol=0, atol=1e-6)


@pytest.mark.parametrize("representation", ["last", "mean", "output", "reservoir"])
def test_every_representation_learns_what_it_can_see(representation):
    """Models see how fast a series turns, at any phase; states see which way it went in the end."""
    X, y = cycles(120)
    if representation in ("last", "mean"):
        X[:, :, -12:] += 3 * (2 * y - 1)[:, None, None]
    fitted = ReservoirClassifier(representation=representation, n_units=30, random_state=0).fit(X[:60], y[:60])
    assert fitted.score(X[60:], y[60:]) > 0.8


@pytest.mark.parametrize("representation", ["last", "mean", "output", "reservoir"])
def test_a_short_series_among_long_ones_is_described_as_if_alone(representation):
    X, y = cycles()
    ragged = [x[:, : 50 - i % 7] for i, x in enumerate(X)]
    settings = {"n_units": 5, "dtype": "float64", "random_state": 0}
    fitted = ReservoirClassifier(representation=representation, **settings).fit(ragged, y)
    together = fitted.decision_function(ragged)
    for i in (0, 6, 39):
        np.testing.assert_allclose(fitted.decision_function([ragged[i]]), together[i], rtol=0, atol=1e-9)


def test_any_classifier_may_follow_and_give_its_probabilities():
    X, y = cycles()
    fitted = ReservoirClassifier(estimator=LogisticRegression(), n_units=5, random_state=0).fit(X, y)
    expected = LogisticRegression().fit(fitted._read(X), y)
    np.testing.assert_array_equal(fitted.predict_proba(X), expected.predict_proba(fitted._read(X)))


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        (
            {"representation": "first"},
            "representation must be one of 'last', 'mean', 'output', 'reservoir'; got 'first'.",
        ),
        ({"n_units": 0}, "n_units must be an int >= 1; got 0."),
        ({"bidirectional": "yes"}, "bidirectional must be one of True, False; got 'yes'."),
        ({"n_components": 0}, "n_components must be an int >= 1; got 0."),
        ({"spectral_radius": -1.0}, "spectral_radius must be a number >= 0"),
        ({"leak": 1.0}, "leak must be a number >= 0 and < 1; got 1.0"),
        ({"input_scaling": 0.0}, "input_scaling must be a number > 0"),
        ({"ridge": 0.0}, "ridge must be a number > 0"),
        ({"normalize": None}, "normalize must be one of True, False; got None."),
        ({"dtype": "int8"}, "dtype must be one of 'float32', 'float64'; got 'int8'."),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ParameterError, match=message):
        ReservoirClassifier(**settings).fit(*cycles())


def test_one_class_is_refused_and_fit_comes_first():
    X, _ = cycles()
    with pytest.raises(InputError, match="y must hold at least two classes; got 1 class"):
        ReservoirClassifier().fit(X, np.zeros(40))
    with pytest.raises(NotFittedError, match="ReservoirClassifier instance is not fitted yet"):
        ReservoirClassifier().predict(X)
