import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from sklearn.linear_model import Ridge

from heedful.errors import InputError, ParameterError
from heedful.timeseries import frequency_reservoir_states, reservoir_readout
from heedful.timeseries.sarc.reservoir import readouts, recurrent_weights
from tests.conformance.typechecks import as_users_have_it


def draw(n=3, length=40, h=5, periods=(1, 4, 9), seed=0, scale=0.3):
    """Inputs, weights and periods."""
    rng = np.random.default_rng(seed)
    w_seq, w_cyc = rng.normal(size=(h, h)) * scale, rng.normal(size=(len(periods), h, h)) * scale
    return rng.normal(size=(n, length, h)), w_seq, w_cyc, list(periods)


def loop(inputs, w_seq, w_cyc, periods, leak):
    """One case, period and unit after the other, as the equation is written."""
    n, length, h = inputs.shape
    states = np.zeros((n, len(periods), length, h))
    for i in range(n):
        for k, p in enumerate(periods):
            for t in range(length):
                before = states[i, k, t - 1] if t >= 1 else np.zeros(h)
                cycle_ago = states[i, k, t - p] if t >= p else np.zeros(h)
                new = np.tanh(inputs[i, t] + before @ w_seq + cycle_ago @ w_cyc[k])
                states[i, k, t] = (1 - leak) * new + leak * before
    return states


@pytest.mark.parametrize("leak", [0.0, 0.2, 0.8])
@pytest.mark.parametrize("periods", [(1,), (1, 4, 9), (9, 1, 4), (39, 40, 100)])
def test_states_equal_a_triple_loop(periods, leak, seed):
    problem = draw(periods=periods, seed=seed)
    states = frequency_reservoir_states(*problem, leak=leak)
    assert states.shape == (3, len(periods), 40, 5)
    np.testing.assert_allclose(states, loop(*problem, leak), rtol=0, atol=1e-12)


@pytest.mark.parametrize("fixed_seed", range(5))  # such a reservoir may be chaotic: no promise for any draw
def test_float32_stays_close_over_500_steps(fixed_seed):
    rng = np.random.default_rng(fixed_seed)
    w_seq = recurrent_weights("esn", 10, 0.8, rng)
    w_cyc = np.stack([recurrent_weights("esn", 10, 0.8, rng) for _ in range(2)])
    series = np.sin(np.arange(500) / 8) + 0.3 * rng.normal(size=(2, 500))
    inputs = series[..., None] * rng.normal(size=10)
    exact = frequency_reservoir_states(inputs, w_seq, w_cyc, [3, 50])
    states = frequency_reservoir_states(inputs.astype(np.float32), w_seq, w_cyc, [3, 50])
    assert states.dtype == np.float32
    np.testing.assert_allclose(states, exact, rtol=0, atol=1e-4)


@pytest.mark.parametrize("leak", [0.0, 0.5])
def test_without_cycles_it_is_a_leaky_echo_state_network(leak, seed):
    inputs, w_seq, _, periods = draw(seed=seed)
    states = frequency_reservoir_states(inputs, w_seq, None, periods, leak=leak)
    h = np.zeros((3, 5))
    for t in range(40):
        h = (1 - leak) * np.tanh(inputs[:, t] + h @ w_seq) + leak * h
        for k in range(len(periods)):
            np.testing.assert_allclose(states[:, k, t], h, rtol=0, atol=1e-12)


def test_a_cycle_of_one_step_with_the_same_weights_doubles_them(seed):
    inputs, w_seq, _, _ = draw(seed=seed)
    states = frequency_reservoir_states(inputs, w_seq, w_seq[None], [1])
    np.testing.assert_allclose(states, frequency_reservoir_states(inputs, 2 * w_seq, None, [1]), rtol=0, atol=1e-12)


def test_a_period_beyond_the_series_never_looks_back():
    inputs, w_seq, w_cyc, _ = draw(periods=(40,))
    states = frequency_reservoir_states(inputs, w_seq, w_cyc, [40])
    np.testing.assert_array_equal(states, frequency_reservoir_states(inputs, w_seq, None, [40]))


def test_inputs_and_weights_stay():
    problem = draw()
    copies = [np.copy(part) for part in problem]
    states = frequency_reservoir_states(*problem)
    before = states.copy()
    reservoir_readout(states, problem[0], problem[3])
    assert all(np.array_equal(part, copy) for part, copy in zip(problem, copies, strict=True))
    assert np.array_equal(states, before)


@pytest.mark.parametrize("length", [40, 12])  # more rows than states; and fewer, which is solved the other way round
@pytest.mark.parametrize("ridge", [0.5, 1.0, 30.0])
def test_readout_equals_scikit_learns_ridge_case_by_case(length, ridge, seed):
    periods = [1, 4, 9]
    inputs, w_seq, w_cyc, _ = draw(length=length, periods=periods, seed=seed)
    series = inputs[:, :, :2]
    states = frequency_reservoir_states(inputs, w_seq, w_cyc, periods)
    weights = reservoir_readout(states, series, periods, ridge=ridge)
    assert weights.shape == (3, 3, 10, 2)
    for i in range(3):
        for k, p in enumerate(periods):
            rows = np.hstack([states[i, k, p - 1 : length - 1], states[i, k, : length - p]])
            peer = Ridge(alpha=ridge, fit_intercept=False).fit(rows, series[i, p:])
            np.testing.assert_allclose(weights[i, k], peer.coef_.T, rtol=0, atol=1e-8)


def test_a_period_that_is_no_shorter_than_the_series_has_no_weights():
    inputs, w_seq, w_cyc, periods = draw(length=9, periods=(8, 9, 12))
    states = frequency_reservoir_states(inputs, w_seq, w_cyc, periods)
    weights = reservoir_readout(states, inputs, periods)
    assert weights[:, 0].any()
    assert not weights[:, 1:].any()


def test_penalties_share_products_and_nothing_else():
    inputs, w_seq, w_cyc, periods = draw()
    states = frequency_reservoir_states(inputs, w_seq, w_cyc, periods)
    for weights, ridge in zip(readouts(states, inputs, periods, [0.5, 1.0, 2.0]), [0.5, 1.0, 2.0], strict=True):
        assert np.array_equal(weights, reservoir_readout(states, inputs, periods, ridge=ridge))


@given(n=st.integers(0, 4), length=st.integers(1, 12), h=st.integers(1, 4), k=st.integers(1, 3), d=st.integers(1, 3))
def test_any_sizes(n, length, h, k, d):
    inputs, w_seq, w_cyc, periods = draw(n=n, length=length, h=h, periods=range(1, k + 1))
    states = frequency_reservoir_states(inputs, w_seq, w_cyc, periods)
    assert states.shape == (n, k, length, h)
    weights = reservoir_readout(states, np.ones((n, length, d)), periods)
    assert weights.shape == (n, k, 2 * h, d)
    assert np.isfinite(weights).all()


@pytest.mark.parametrize("kind", ["esn", "scr", "crj"])
@pytest.mark.parametrize("n_units", [1, 2, 3, 4, 10, 25, 100])
def test_the_spectral_radius_is_as_asked(kind, n_units, seed):
    weights = recurrent_weights(kind, n_units, 0.7, np.random.default_rng(seed))
    assert weights.shape == (n_units, n_units)
    # A large draw is not normal, and its eigenvalues move by more than a rounding when it is scaled.
    assert np.abs(np.linalg.eigvals(weights)).max() == pytest.approx(0.7, abs=1e-8)


def test_a_large_reservoir_is_sparse_and_a_small_one_dense():
    rng = np.random.default_rng(0)
    assert (recurrent_weights("esn", 10, 0.8, rng) != 0).all()
    assert (recurrent_weights("esn", 200, 0.8, rng) != 0).mean() == pytest.approx(10 / 200, rel=0.1)


def test_ring_and_jumps():
    ring = recurrent_weights("scr", 9, 0.5, np.random.default_rng(0))
    np.testing.assert_allclose(ring, 0.5 * np.roll(np.eye(9), 1, axis=1), rtol=0, atol=1e-12)
    jumps = recurrent_weights("crj", 9, 0.5, np.random.default_rng(0))
    assert {(i, j) for i, j in np.argwhere((jumps != 0) & (ring == 0)).tolist()} == {
        (0, 3), (3, 0), (3, 6), (6, 3), (6, 0), (0, 6),
    }  # fmt: skip
    assert len(np.unique(jumps[jumps != 0])) == 1


@pytest.mark.parametrize("periods", [[], [0], [1, -3]])
def test_periods_below_one_are_refused(periods):
    inputs, w_seq, _, _ = draw()
    with pytest.raises(ParameterError, match=r"periods must be a non-empty sequence of int >= 1; got \["):
        frequency_reservoir_states(inputs, w_seq, None, periods)
    with pytest.raises(ParameterError, match="periods must be"):
        reservoir_readout(np.zeros((3, len(periods), 40, 5)), inputs, periods)


def test_settings_out_of_range_are_refused():
    inputs, w_seq, w_cyc, periods = draw()
    with pytest.raises(ParameterError, match=r"leak must be a number >= 0 and < 1; got 1.0"):
        frequency_reservoir_states(inputs, w_seq, w_cyc, periods, leak=1.0)
    with pytest.raises(ParameterError, match=r"leak must be a number >= 0; got -0.1"):
        frequency_reservoir_states(inputs, w_seq, w_cyc, periods, leak=-0.1)
    with pytest.raises(ParameterError, match=r"ridge must be a number > 0 and <= .*; got 0.0"):
        reservoir_readout(np.zeros((3, 3, 40, 5)), inputs, periods, ridge=0.0)
    with pytest.raises(ParameterError, match=r"ridge must be a number > 0 and <= .*; got inf"):
        reservoir_readout(np.zeros((3, 3, 40, 5)), inputs, periods, ridge=np.inf)
    with pytest.raises(InputError, match="w_cyc has weights for 3 periods and 2 periods are given"):
        frequency_reservoir_states(inputs, w_seq, w_cyc, [1, 2])
    with pytest.raises(InputError, match="states are those of 3 reservoirs and 2 periods are given"):
        reservoir_readout(np.zeros((3, 3, 40, 5)), inputs, [1, 2])
    with pytest.raises(InputError, match="inputs must be float32 or float64; got float16"):
        frequency_reservoir_states(inputs.astype(np.float16), w_seq, w_cyc, periods)


def test_shapes_that_do_not_fit_are_told_apart():
    inputs, w_seq, w_cyc, periods = draw()
    states = np.zeros((3, 3, 40, 5))
    with as_users_have_it():
        for weights in ((w_seq[:4, :4], w_cyc), (w_seq, w_cyc[:, :4, :4]), (w_seq[:4, :4], None)):
            with pytest.raises(InputError, match=r"inputs are those of 5 units, so w_seq must have shape \(5, 5\)"):
                frequency_reservoir_states(inputs, *weights, periods)
        for series in (inputs[:2], inputs[:, :39]):
            with pytest.raises(InputError, match="states are those of 3 series of 40 points; series has shape"):
                reservoir_readout(states, series, periods)


def test_nested_lists_are_arrays():
    inputs, w_seq, w_cyc, periods = draw()
    states = frequency_reservoir_states(inputs, w_seq, w_cyc, periods)
    with as_users_have_it():
        listed = frequency_reservoir_states(inputs.tolist(), w_seq.tolist(), w_cyc.tolist(), periods)
        weights = reservoir_readout(states.tolist(), inputs.tolist(), periods)
    np.testing.assert_array_equal(listed, states)
    np.testing.assert_allclose(weights, reservoir_readout(states, inputs, periods), rtol=0, atol=1e-12)


def test_arrays_of_other_axes_are_refused_by_name():
    inputs, w_seq, w_cyc, periods = draw()
    states = frequency_reservoir_states(inputs, w_seq, w_cyc, periods)
    with as_users_have_it():
        for run, arguments, message in [
            (
                frequency_reservoir_states,
                (inputs[0], w_seq, w_cyc),
                r"inputs .* 3 axes \(cases, time, units\); got shape",
            ),
            (
                frequency_reservoir_states,
                (inputs, w_seq[0], w_cyc),
                r"w_seq .* 2 axes \(units, units\); got shape \(5,\)",
            ),
            (
                frequency_reservoir_states,
                (inputs, w_seq, w_seq),
                r"w_cyc .* 3 axes \(periods, units, units\); got shape",
            ),
            (frequency_reservoir_states, ([[[1.0], [1.0, 2.0]]], w_seq, w_cyc), "inputs .*; setting an array element"),
            (
                frequency_reservoir_states,
                (inputs, w_seq.astype(str), w_cyc),
                "w_seq must be an array of numbers .*; got <U",
            ),
            (frequency_reservoir_states, ([[[1, 2]]], w_seq, w_cyc), "inputs must be float32 or float64; got int64"),
            (reservoir_readout, (states[0], inputs), r"states .* 4 axes \(cases, periods, time, units\); got shape"),
            (reservoir_readout, (states.astype(int), inputs), "states must be float32 or float64; got int64"),
            (reservoir_readout, (states, inputs[..., 0]), r"series .* 3 axes \(cases, time, channels\); got shape"),
        ]:
            with pytest.raises(InputError, match=message):
                run(*arguments, periods)
