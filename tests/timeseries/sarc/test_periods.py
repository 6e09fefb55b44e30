import sys

import numpy as np
import pytest
import pywt
from hypothesis import given
from hypothesis import strategies as st
from scipy.signal import periodogram
from statsmodels.tsa.filters.hp_filter import hpfilter

from heedful.errors import HeedfulWarning, InputError, MissingExtraError, ParameterError
from heedful.timeseries import prominent_periods
from heedful.timeseries.sarc.periods import components, hp_trend, multiples, strongest_periods
from tests.conformance.typechecks import as_users_have_it

LENGTHS = [3, 4, 5, 7, 8, 13, 14, 50, 200, 427]


def walk(length, seed):
    rng = np.random.default_rng(seed)
    return rng.normal(size=length).cumsum() + rng.normal(size=length)


@pytest.mark.parametrize("length", LENGTHS)
def test_trend_solves_its_linear_system(length, seed):
    series = walk(length, seed)
    trend = hp_trend(series, 1600.0)
    D = np.diff(np.eye(length), n=2, axis=0)
    residual = (np.eye(length) + 1600.0 * D.T @ D) @ trend - series
    assert np.abs(residual).max() <= 1e-8


@pytest.mark.parametrize("hp_lambda", [6.25, 1600.0, 129600.0])
def test_trend_equals_statsmodels(hp_lambda, seed):
    series = walk(200, seed)
    _, expected = hpfilter(series, hp_lambda)
    np.testing.assert_allclose(hp_trend(series, hp_lambda), expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("length", LENGTHS)
def test_a_straight_line_is_all_trend(length):
    line = 3.0 - 0.2 * np.arange(length)
    np.testing.assert_allclose(hp_trend(line, 1600.0), line, rtol=0, atol=1e-8)


@pytest.mark.parametrize("wavelet", ["db4", "haar", "sym8"])
@pytest.mark.parametrize("length", LENGTHS)
def test_components_add_up_to_the_series(length, wavelet, seed):
    series = walk(length, seed)
    trend, *bands = components(series, wavelet, 1600.0)
    np.testing.assert_allclose(np.sum(bands, axis=0), series - trend, rtol=0, atol=1e-8)


@pytest.mark.parametrize("length", [14, 27, 28, 200, 427])
def test_there_are_as_many_bands_as_the_length_allows(length):
    depth = int(np.log2(length / 7))
    assert len(components(walk(length, 0), "db4", 1600.0)) == 1 + 1 + depth  # the trend, A_J, D_J .. D_1


def test_a_sine_has_its_period_and_multiples():
    base, extended = prominent_periods(np.sin(2 * np.pi * np.arange(200) / 20))
    assert 20 in base
    assert [p for p in extended if p % 20 == 0] == [20, 40, 60, 80]
    assert set(base) <= set(extended)


def test_periods_are_those_of_the_definition(seed):
    """Step by step as the method is written, with frequencies where the code counts bins."""
    series = walk(150, seed)
    series = series - series.mean()
    expected = set()
    for part in components(series, "db4", 1600.0):
        frequencies, power = periodogram(part)
        for f in frequencies[np.argsort(power)[::-1][:2]]:
            if f >= 1 / (150 - 1):
                expected.add(round(1 / f))
    base, extended = prominent_periods(series, n_frequencies=2)
    assert base == sorted(expected)
    below = {p: min(150, 100) if p <= 150 / 5 else 150 for p in base}
    assert extended == sorted({m for p in base for m in range(p, 150) if m % p == 0 and (m < below[p] or m == p)})


@given(
    series=st.lists(st.floats(-1e3, 1e3), min_size=3, max_size=60),
    n_frequencies=st.integers(1, 40),
    extend_to=st.integers(1, 200),
)
@pytest.mark.filterwarnings("ignore:The series, or the mean of the series, is constant:heedful.errors.HeedfulWarning")
def test_periods_lie_within_the_series_and_long_multiples_come_from_long_periods(series, n_frequencies, extend_to):
    length = len(series)
    base, extended = prominent_periods(np.array(series), n_frequencies=n_frequencies, extend_to=extend_to)
    assert base == sorted(set(base))
    assert extended == sorted(set(extended))
    assert base
    assert set(base) <= set(extended) <= set(range(1, length))
    for p in set(extended) - set(base):
        if p >= extend_to:
            assert any(p % q == 0 for q in base if 5 * q > length)


def test_a_period_beyond_the_limit_stays_and_its_multiples_do_not():
    assert multiples([120], 600, 100) == [120]
    assert multiples([121], 600, 100) == [121, 242, 363, 484]
    assert multiples([30], 150, 100) == [30, 60, 90]
    assert multiples([31], 150, 100) == [31, 62, 93, 124]


def test_half_periods_round_to_even():
    series = np.cos(2 * np.pi * 40 * np.arange(100) / 100)  # 40 cycles in 100 steps: 2.5 steps each
    assert strongest_periods(series, 1) == [2]


@given(scale=st.floats(1e-3, 1e3), offset=st.floats(-1e3, 1e3))
def test_scale_and_offset_of_the_series_are_nothing(scale, offset):
    series = walk(120, 0)
    assert prominent_periods(scale * series + offset) == prominent_periods(series)


def test_the_rounding_errors_of_a_straight_line_are_no_cycles():
    line = np.arange(100) / 7
    assert np.abs(line - hp_trend(line, 1600.0)).max() > 0
    assert strongest_periods(line, 1) == []  # one rise over the whole length is no cycle either
    assert prominent_periods(line) == ([*range(1, 10)], [*range(1, 10)])


@pytest.mark.parametrize(("length", "expected"), [(3, [1, 2]), (6, [1, 2, 3, 4, 5]), (100, [*range(1, 10)])])
def test_a_constant_series_falls_back_with_a_warning(length, expected):
    with pytest.warns(HeedfulWarning, match=f"constant and has no spectrum: the periods are 1 to {expected[-1]}"):
        assert prominent_periods(np.full(length, 0.1)) == (expected, expected)


def test_three_points_are_too_few_for_a_spectrum():
    assert prominent_periods(np.array([0.0, 1.0, 5.0])) == ([1, 2], [1, 2])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_frequencies": 0}, "n_frequencies must be an int >= 1; got 0."),
        ({"extend_to": 0}, "extend_to must be an int >= 1; got 0."),
        ({"hp_lambda": -1.0}, r"hp_lambda must be a number >= 0 and <= 1e\+12; got -1.0."),
        ({"hp_lambda": np.nan}, r"hp_lambda must be a number >= 0 and <= 1e\+12; got nan."),
        ({"wavelet": "db99"}, "wavelet must be one of bior1.1, .*haar.*; got 'db99'."),
        ({"wavelet": "morl"}, "wavelet must be one of bior1.1"),  # continuous
    ],
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ParameterError, match=message):
        prominent_periods(walk(50, 0), **settings)


@pytest.mark.parametrize(
    ("series", "message"),
    [
        (np.zeros(2), r"at least 3 time points; got shape \(2,\)"),
        (np.array([0.0, np.nan, 1.0]), r"series has 1 entries that are NaN or infinite, the first at \(1,\)"),
    ],
)
def test_series_that_have_no_spectrum_are_refused(series, message):
    with pytest.raises(InputError, match=message):
        prominent_periods(series)


def test_a_series_of_text_is_refused():
    with as_users_have_it(), pytest.raises(InputError, match="series must be a vector of numbers; could not convert"):
        prominent_periods(["a", "b", "c"])


def test_without_pywavelets_the_extra_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "pywt", None)
    with pytest.raises(MissingExtraError, match=r'pip install "heedful\[timeseries\]". Or name the periods yourself.'):
        prominent_periods(walk(50, 0))


def test_every_wavelet_that_is_listed_works():
    for wavelet in pywt.wavelist(kind="discrete"):
        trend, *bands = components(walk(64, 0), wavelet, 1600.0)
        np.testing.assert_allclose(np.sum(bands, axis=0) + trend, walk(64, 0), rtol=0, atol=1e-6)  # dmey is approximate
