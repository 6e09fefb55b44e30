import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from heedful.data import synthetic
from heedful.errors import InputError, ParameterError


@given(
    n=st.integers(1, 30),
    d=st.integers(2, 60),
    gap=st.sampled_from([0.0, 1e-3, 0.1, 0.5, 0.99]),
    random_state=st.integers(0, 2**32 - 1),
)
def test_margin_gives_unit_vectors_that_the_direction_separates(n, d, gap, random_state):
    X, y, u = synthetic.margin(n, d, gap=gap, random_state=random_state)
    assert X.shape == (n, d)
    # A few roundings of float64, which the length of what is orthogonal to u may amplify near the pole.
    np.testing.assert_allclose(np.linalg.norm(X, axis=1), 1, atol=1e-12)
    assert np.linalg.norm(u) == pytest.approx(1, abs=1e-12)
    assert (y * (X @ u) >= gap - 1e-12).all()
    assert set(y) <= {-1, 1}


def test_margin_is_uniform_on_what_it_leaves_of_the_sphere():
    """Against unit vectors drawn as normals and rejected inside of the gap."""
    d, gap = 7, 0.3
    X, y, u = synthetic.margin(20_000, d, gap=gap, random_state=1)
    normal = np.random.default_rng(2).standard_normal((60_000, d))
    sphere = normal / np.linalg.norm(normal, axis=1, keepdims=True)
    kept = sphere[abs(sphere @ u) >= gap]
    other = np.linalg.svd(u[None])[2][1]  # a direction orthogonal to u
    for along in (u, other, (u + other) / np.sqrt(2)):
        assert stats.ks_2samp(X @ along, kept @ along).pvalue > 1e-3  # the seeds are fixed
    assert abs((y == 1).mean() - 0.5) < 0.02


def test_margin_draws_more_points_of_the_same_problem():
    first = synthetic.margin(10, 5, random_state=3)
    more = synthetic.margin(10, 5, direction=3 * first.direction, random_state=4)
    np.testing.assert_allclose(more.direction, first.direction, atol=1e-15)
    assert not np.array_equal(more.X, first.X)
    again = synthetic.margin(10, 5, random_state=3)
    np.testing.assert_array_equal(again.X, first.X)


def test_margin_refuses_what_no_sphere_has():
    with pytest.raises(ParameterError, match=r"^n_features must be an int >= 2; got 1\.$"):
        synthetic.margin(10, 1)
    with pytest.raises(ParameterError, match=r"^n_samples must be an int >= 1; got 0\.$"):
        synthetic.margin(0)
    with pytest.raises(ParameterError, match=r"^gap must be a number >= 0 and <= 0\.999; got 1\.0\.$"):
        synthetic.margin(10, gap=1.0)
    for direction in (np.zeros(5), np.ones(4)):
        with pytest.raises(InputError, match=r"^direction must be a vector of 5 numbers, not all zero; got shape"):
            synthetic.margin(10, 5, direction=direction)


def occurrences(case, motif_length):
    """Where the motif begins, in a case without noise."""
    sounding = np.flatnonzero(case)
    return sounding[0], sounding[motif_length]


@given(
    n=st.integers(1, 12),
    lags=st.sampled_from([(60, 75), (5, 9, 7), (75, 60)]),
    room=st.integers(0, 40),
    random_state=st.integers(0, 2**32 - 1),
)
def test_long_memory_repeats_a_motif_after_the_lag_of_its_class(n, lags, room, random_state):
    L = max(lags) + 5 + room
    X, y = synthetic.long_memory(n, L, lags=lags, motif_length=5, noise=0.0, random_state=random_state)
    assert X.shape == (n, L)
    assert np.ptp(np.bincount(y, minlength=len(lags))) <= 1
    for case, label in zip(X, y, strict=True):
        first, second = occurrences(case, 5)
        assert second - first == lags[label]
        np.testing.assert_array_equal(case[first : first + 5], case[second : second + 5])
        assert np.count_nonzero(case) == 10


def test_long_memory_tells_nothing_by_shape_or_place():
    X, y = synthetic.long_memory(4000, noise=0.0, random_state=0)
    places = np.array([occurrences(case, 20) for case in X])
    middle = places.mean(axis=1) + 10
    assert stats.ks_2samp(middle[y == 0], middle[y == 1]).pvalue > 1e-3  # the seed is fixed
    loudness = np.square(X).sum(axis=1)
    assert stats.ks_2samp(loudness[y == 0], loudness[y == 1]).pvalue > 1e-3
    assert places[:, 0].min() <= 10  # the whole length is used
    assert places[:, 1].max() + 20 >= 290


def test_long_memory_hides_the_motif_under_noise_of_the_given_size():
    clean, _ = synthetic.long_memory(50, noise=0.0, random_state=0)
    noisy, _ = synthetic.long_memory(50, noise=0.5, random_state=0)
    assert (noisy - clean).std() == pytest.approx(0.5, rel=0.03)  # 15000 draws: a standard error of 0.6 %


def test_long_memory_is_the_same_for_the_same_random_state(seed):
    once, again, other = (synthetic.long_memory(20, random_state=s) for s in (seed, seed, seed + 1))
    np.testing.assert_array_equal(once.X, again.X)
    np.testing.assert_array_equal(once.y, again.y)
    assert not np.array_equal(once.X, other.X)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_samples": 0}, "n_samples must be an int >= 1; got 0."),
        ({"noise": -1.0}, "noise must be a number >= 0; got -1.0."),
        ({"lags": (60,)}, "lags must be at least two, each another; got (60,)."),
        ({"lags": (60, 60, 75)}, "lags must be at least two, each another; got (60, 60, 75)."),
        ({"lags": (10, 75)}, "each of lags must be an int >= 20; got 10."),
        ({"motif_length": 0}, "motif_length must be an int >= 1; got 0."),
        ({"n_timepoints": 94}, "n_timepoints must be an int >= 95; got 94."),
    ],
    ids=str,
)
def test_long_memory_says_what_it_cannot_draw(settings, message):
    with pytest.raises(ParameterError) as error:
        synthetic.long_memory(**({"n_samples": 4} | settings))
    assert str(error.value) == message


TRIALS = (synthetic.trial_linear, synthetic.trial_square, synthetic.trial_scale)


def gauss_hermite(function, n=200):
    """E of a function of a standard normal, by quadrature."""
    z, weights = np.polynomial.hermite_e.hermegauss(n)
    return float(weights @ function(z) / weights.sum())


def test_published_trials_have_the_published_bounds():
    """b = (0.6, 1.6), (0.2, 0.6) and (0.5, 1.1) with k = (-0.35, 0.35): 4.84, 1.92 and 0.70 for E[(Y0 + Y1)²]."""
    assert synthetic.trial_linear(2).lower == pytest.approx(4.84, abs=1e-12)
    assert synthetic.trial_square(2).lower == pytest.approx(1.92, abs=1e-12)
    assert synthetic.trial_scale(2).lower == pytest.approx(0.70, abs=0.005)  # published to two decimals


def test_bounds_of_trials_are_those_of_normals_given_the_covariate():
    """E[(m1 − m0)² + (s1 ∓ s0)²] by quadrature, exact for polynomials."""
    linear = synthetic.trial_linear(2, slopes=(0.3, -0.7), noise=(0.5, 2.0))
    square = synthetic.trial_square(2, slopes=(0.3, -0.7), noise=(0.5, 2.0))
    for sign, edge in ((-1, "lower"), (1, "upper")):
        spread = (2.0 + sign * 0.5) ** 2
        assert getattr(linear, edge) == pytest.approx(gauss_hermite(lambda z: z**2) + spread, abs=1e-12)
        assert getattr(square, edge) == pytest.approx(gauss_hermite(lambda z: z**4) + spread, abs=1e-12)


@pytest.mark.parametrize("slopes", [(0.5, 1.1), (0.5, -1.1), (0.0, 0.8), (0.0, 0.0)])
def test_bounds_of_the_scale_trial_agree_with_a_fine_grid(slopes):
    trial = synthetic.trial_scale(2, slopes=slopes, intercepts=(-0.35, 0.6))
    z = np.linspace(-12, 12, 400_001)
    density = np.exp(-(z**2) / 2) / np.sqrt(2 * np.pi)
    s0, s1 = np.abs(slopes[0] * z - 0.35), np.abs(slopes[1] * z + 0.6)
    for sign, edge in ((-1, "lower"), (1, "upper")):
        # The trapezoidal rule of step 6e-5, at kinks of second differences below 1e-4.
        assert getattr(trial, edge) == pytest.approx(np.trapezoid((s1 + sign * s0) ** 2 * density, z), abs=1e-7)


def test_bounds_add_up_over_covariates_that_are_independent():
    one = synthetic.trial_linear(2, slopes=((-0.6, 0.3), (1.6, -0.8)))
    assert one.lower == pytest.approx(2.2**2 + 1.1**2, abs=1e-12)
    z = np.random.default_rng(0).standard_normal((2_000_000, 2))
    two = synthetic.trial_square(2, slopes=((-0.2, -0.1), (0.6, 0.3)))
    sampled = np.square(z**2 @ [0.8, 0.4])
    assert two.lower == pytest.approx(sampled.mean(), abs=5 * sampled.std() / np.sqrt(len(sampled)))


@pytest.mark.parametrize("draw", TRIALS)
def test_trials_reveal_one_outcome_of_each_unit_and_lie_between_their_bounds(draw):
    trial = draw(20_001, random_state=0)
    assert trial.treatment.sum() == 10_000
    np.testing.assert_array_equal(trial.y, np.where(trial.treatment, trial.y1, trial.y0))
    effect = np.square(trial.y1 - trial.y0)
    error = 5 * effect.std() / np.sqrt(len(effect))
    middle = (trial.lower + trial.upper) / 2  # independent noises: halfway between the two extreme couplings
    assert effect.mean() == pytest.approx(middle, abs=error)
    assert abs(np.corrcoef(trial.treatment, trial.X[:, 0])[0, 1]) < 5 / np.sqrt(len(effect))


@pytest.mark.parametrize("draw", TRIALS)
def test_trials_are_the_same_for_the_same_random_state(draw, seed):
    once, again, other = (draw(30, random_state=s) for s in (seed, seed, seed + 1))
    for left, right in zip(once, again, strict=True):
        np.testing.assert_array_equal(left, right)
    assert not np.array_equal(once.y, other.y)


@pytest.mark.parametrize(
    ("draw", "settings", "message"),
    [
        (synthetic.trial_linear, {"n_samples": 1}, "n_samples must be an int >= 2; got 1."),
        (synthetic.trial_square, {"noise": (1.0, -1.0)}, "noise must be a number >= 0; got -1.0."),
        (
            synthetic.trial_linear,
            {"slopes": (1.0, (1.0, 2.0))},
            "slopes must be two numbers, or two vectors of one length; got (1.0, (1.0, 2.0)).",
        ),
        (
            synthetic.trial_square,
            {"slopes": (1.0, 2.0, 3.0)},
            "slopes must be two numbers, or two vectors of one length; got (1.0, 2.0, 3.0).",
        ),
        (
            synthetic.trial_scale,
            {"intercepts": (1.0,)},
            "intercepts must be two numbers, of the control and of the treated arm; got (1.0,).",
        ),
    ],
)
def test_trials_say_what_they_cannot_draw(draw, settings, message):
    with pytest.raises(ParameterError) as error:
        draw(**({"n_samples": 10} | settings))
    assert str(error.value) == message
