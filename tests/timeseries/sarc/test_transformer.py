import tracemalloc

import numpy as np
import pandas as pd
import pytest
from aeon.datasets import load_classification
from sklearn.base import clone
from threadpoolctl import threadpool_info, threadpool_limits

import heedful
from heedful.errors import FileFormatError, HeedfulWarning, InputError, NotFittedError, ParameterError
from heedful.timeseries import (
    SpectralReservoir,
    frequency_reservoir_states,
    prominent_periods,
    reservoir_readout,
)

EXACT = {"dtype": "float64", "random_state": 0}


def waves(n=5, length=60, channels=1, seed=0):
    """Sines of period 12 under noise, far from mean 0 and deviation 1; two-dimensional if there is one channel."""
    rng = np.random.default_rng(seed)
    X = np.sin(2 * np.pi * np.arange(length) / 12 + rng.uniform(0, 6, size=(n, channels, 1)))
    X = 5 + 3 * (X + 0.5 * rng.normal(size=X.shape))
    return X[:, 0] if channels == 1 else X


def ragged(lengths=(40, 60, 23, 60, 8, 41), channels=2, seed=0):
    return [waves(1, length, channels, seed + i)[0] for i, length in enumerate(lengths)]


def normal_form(X):
    X = X if X.ndim == 3 else X[:, None]
    deviation = X - X.mean(axis=2, keepdims=True)
    return deviation / np.abs(deviation).max(axis=2, keepdims=True)


def by_hand(fitted, X):
    """The features of one length of series, put together from the public functions."""
    x = fitted.input_scaling * normal_form(X).transpose(0, 2, 1)
    drive = x @ fitted.w_in_
    w_cyc = [None, None] if fitted.w_cyc_ is None else fitted.w_cyc_
    settings = {"periods": fitted.periods_, "leak": fitted.leak}
    states = [frequency_reservoir_states(drive, fitted.w_seq_[0], w_cyc[0], **settings)]
    if len(fitted.w_seq_) == 2:
        seen = frequency_reservoir_states(drive[:, ::-1], fitted.w_seq_[1], w_cyc[1], **settings)
        states.append(seen[:, :, ::-1])
    states = np.concatenate(states, axis=-1)
    weights = reservoir_readout(states, x, fitted.periods_, ridge=fitted.ridge)
    return np.hstack([weights.reshape(len(X), -1), states.max(axis=2).reshape(len(X), -1)])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"cyclic": False},
        {"reservoir": "esn", "leak": 0.4},
        {"reservoir": "scr", "input_scaling": 2.0},
        {"reservoir": "crj", "ridge": 0.5},
        {"periods": "all", "extend_to": 5, "n_units": 3},
    ],
    ids=str,
)
def test_features_are_put_together_from_the_public_functions(settings, channels, seed):
    X = waves(channels=channels, seed=seed)
    fitted = SpectralReservoir(**EXACT, **settings).fit(X)
    features = fitted.transform(X)
    np.testing.assert_allclose(features, by_hand(fitted, X), rtol=0, atol=1e-9)
    assert features.shape == (5, len(fitted.get_feature_names_out()))


def test_there_are_60_features_for_each_period_of_a_univariate_series():
    fitted = SpectralReservoir(random_state=0).fit(waves())
    features = fitted.transform(waves())
    assert features.dtype == np.float32
    assert features.shape == (5, 60 * len(fitted.periods_))
    names = fitted.get_feature_names_out()
    assert len(set(names)) == len(names)
    p, last = fitted.periods_[0], fitted.periods_[-1]
    assert [names[0], names[1], names[-1]] == [f"p{p}_w0_c0", f"p{p}_w1_c0", f"p{last}_max19"]


def test_names_of_features_say_what_they_are():
    X = waves(channels=2)
    fitted = SpectralReservoir(2, periods=[3, 12], reservoir="esn", **EXACT).fit(X)
    frame = pd.DataFrame(fitted.transform(X), columns=fitted.get_feature_names_out())
    x = normal_form(X).transpose(0, 2, 1)
    states = frequency_reservoir_states(x @ fitted.w_in_, fitted.w_seq_[0], fitted.w_cyc_[0], [3, 12])
    weights = reservoir_readout(states, x, [3, 12])
    np.testing.assert_allclose(frame["p12_w3_c1"], weights[:, 1, 3, 1], rtol=0, atol=1e-9)
    np.testing.assert_allclose(frame["p3_w0_c1"], weights[:, 0, 0, 1], rtol=0, atol=1e-9)
    np.testing.assert_allclose(frame["p12_max1"], states[:, 1, :, 1].max(axis=1), rtol=0, atol=1e-9)
    without = clone(fitted).set_params(max_pool=False).fit(X)
    assert list(without.get_feature_names_out()) == [c for c in frame.columns if "max" not in c]
    np.testing.assert_array_equal(without.transform(X), frame[without.get_feature_names_out()])


def test_a_flipped_sign_leaves_weights_and_turns_maxima_into_negative_minima(seed):
    X = waves(seed=seed)
    fitted = SpectralReservoir(reservoir="esn", **EXACT).fit(X)
    names = fitted.get_feature_names_out()
    is_max = np.array(["max" in name for name in names])
    features, flipped = fitted.transform(X), fitted.transform(-X)
    np.testing.assert_allclose(flipped[:, ~is_max], features[:, ~is_max], rtol=0, atol=1e-10)
    states = frequency_reservoir_states(
        normal_form(X).transpose(0, 2, 1) @ fitted.w_in_, fitted.w_seq_[0], fitted.w_cyc_[0], fitted.periods_
    )
    np.testing.assert_allclose(flipped[:, is_max], -states.min(axis=2).reshape(5, -1), rtol=0, atol=1e-10)


def test_scale_and_offset_of_a_series_are_nothing():
    X = waves()
    fitted = SpectralReservoir(random_state=0).fit(X)
    scale, offset = np.array([[1e-3], [0.5], [7.0], [1e3], [3.3]]), np.array([[0.1], [-9.0], [70.0], [0.0], [1e3]])
    np.testing.assert_allclose(fitted.transform(scale * X + offset), fitted.transform(X), rtol=0, atol=1e-5)


def test_the_largest_numbers_are_as_good_as_others():
    X = waves() - 5
    features = SpectralReservoir(**EXACT).fit(X * 1e307).transform(X * 1e307)
    np.testing.assert_allclose(features, SpectralReservoir(**EXACT).fit_transform(X), rtol=0, atol=1e-9)


@pytest.mark.parametrize("channels", [1, 3])
def test_a_case_does_not_see_others_nor_chunks_nor_jobs(channels, seed):
    """Bit for bit, in blocks of any fill: 70 cases are three blocks, the last with six."""
    X = waves(70, channels=channels, seed=seed)
    fitted = SpectralReservoir(n_units=4, **EXACT).fit(X)
    features = fitted.transform(X)
    for rows in ([0], [69], [5, 3, 68], list(range(40)), list(range(70))[::-1]):
        np.testing.assert_array_equal(fitted.transform(X[rows]), features[rows])
    for settings in ({"max_memory": 0.01}, {"max_memory": 1.0}, {"n_jobs": 2}, {"n_jobs": 2, "max_memory": 1.0}):
        np.testing.assert_array_equal(fitted.set_params(**settings).transform(X), features)


def test_a_large_reservoir_is_as_exact_about_its_case(seed):
    X = waves(40, length=50, seed=seed)
    fitted = SpectralReservoir(n_units=60, periods=[1, 12], **EXACT).fit(X)
    features = fitted.transform(X)
    np.testing.assert_array_equal(fitted.transform(X[37:38]), features[37:38])
    np.testing.assert_array_equal(fitted.set_params(n_jobs=2).transform(X), features)


def test_memory_layout_is_nothing():
    X = waves(channels=3)
    fitted = SpectralReservoir(n_units=4, **EXACT).fit(X)
    features = fitted.transform(X)
    np.testing.assert_array_equal(fitted.transform(np.asfortranarray(X)), features)
    np.testing.assert_array_equal(fitted.transform(list(X)), features)
    univariate = SpectralReservoir(n_units=4, **EXACT).fit(X[:, 0])
    np.testing.assert_array_equal(univariate.transform(X[:, :1]), univariate.transform(pd.DataFrame(X[:, 0])))


def test_periods_come_from_the_training_series_alone():
    X = waves(8)
    fitted = SpectralReservoir(random_state=0).fit(X)
    expected = prominent_periods(normal_form(X).mean(axis=(0, 1)))
    assert (fitted.base_periods_, fitted.periods_) == expected
    assert all(type(p) is int for p in fitted.periods_)
    fitted.transform(waves(3, seed=9))
    assert (fitted.base_periods_, fitted.periods_) == expected


def test_modes_of_periods():
    X = waves(8)
    base, extended = prominent_periods(normal_form(X).mean(axis=(0, 1)))
    found = {mode: SpectralReservoir(periods=mode).fit(X) for mode in ("spectral", "spectral-base", "all")}
    assert found["spectral"].periods_ == extended
    assert found["spectral-base"].periods_ == base
    assert found["all"].periods_ == list(range(1, 60))  # L - 1 before 100
    assert SpectralReservoir(periods="all", extend_to=7).fit(X).periods_ == [1, 2, 3, 4, 5, 6, 7]
    own = np.array([12, 3, 59, 12])
    assert SpectralReservoir(periods=own).fit(X).periods_ == [3, 12, 59]


def test_named_periods_need_no_pywavelets(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "pywt", None)
    assert SpectralReservoir(periods=[2, 12]).fit(waves()).transform(waves()).shape == (5, 120)


def test_reversed_time_swaps_the_halves_of_the_maxima(seed):
    X = waves(seed=seed)
    fitted = SpectralReservoir(5, **EXACT).fit(X)
    fitted.w_seq_[1], fitted.w_cyc_[1] = fitted.w_seq_[0], fitted.w_cyc_[0]
    K = len(fitted.periods_)
    forward, backward = (
        fitted.transform(given)[:, -K * 10 :].reshape(5, K, 2, 5) for given in (X, np.ascontiguousarray(X[:, ::-1]))
    )
    np.testing.assert_allclose(backward, forward[:, :, ::-1], rtol=0, atol=1e-10)


@pytest.mark.parametrize("reservoir", ["biesn", "esn", "scr", "crj"])
def test_weights_have_the_spectral_radii_that_were_asked_for(reservoir, seed):
    fitted = SpectralReservoir(12, reservoir=reservoir, spectral_radius=0.6, cycle_radius=0.4, random_state=seed).fit(
        waves()
    )
    directions = 2 if reservoir == "biesn" else 1
    K = len(fitted.periods_)
    assert fitted.w_in_.shape == (1, 12)
    assert fitted.w_seq_.shape == (directions, 12, 12)
    assert fitted.w_cyc_.shape == (directions, K, 12, 12)
    for weights, radius in ((fitted.w_seq_, 0.6), (fitted.w_cyc_, 0.4)):
        found = np.abs(np.linalg.eigvals(weights)).max(axis=-1)
        np.testing.assert_allclose(found, radius, rtol=0, atol=1e-8)
    if reservoir in ("biesn", "esn"):
        drawn = fitted.w_cyc_.reshape(-1, 144)
        assert len(np.unique(drawn, axis=0)) == len(drawn), "each period and direction has its own draw"


def test_one_random_state_one_result():
    X = waves()
    features = SpectralReservoir(**EXACT).fit_transform(X)
    fitted = SpectralReservoir(**EXACT)
    for _ in range(2):
        np.testing.assert_array_equal(fitted.fit(X).transform(X), features)
    assert not np.array_equal(fitted.set_params(random_state=1).fit_transform(X), features)


def test_radius_zero_forgets_everything():
    fitted = SpectralReservoir(spectral_radius=0.0, cycle_radius=0.0, periods=[4], **EXACT).fit(waves())
    x = normal_form(waves()).transpose(0, 2, 1)
    np.testing.assert_allclose(
        fitted.transform(waves())[:, -20:-10], np.tanh(x @ fitted.w_in_).max(axis=1), rtol=0, atol=1e-12
    )


def test_without_normalisation_series_enter_as_they_are():
    X = waves() / 10
    fitted = SpectralReservoir(normalize=False, input_scaling=2.0, periods=[3], reservoir="esn", **EXACT).fit(X)
    states = frequency_reservoir_states(2 * X[..., None] * fitted.w_in_[0], fitted.w_seq_[0], fitted.w_cyc_[0], [3])
    np.testing.assert_allclose(fitted.transform(X)[:, -10:], states[:, 0].max(axis=1), rtol=0, atol=1e-12)


def test_without_normalisation_a_loud_series_has_a_louder_say_in_the_periods():
    t = np.arange(60)
    X = np.stack([np.sin(2 * np.pi * t / 20), 100 * np.sin(2 * np.pi * t / 15)])
    quiet, loud = (SpectralReservoir(normalize=normalize).fit(X).base_periods_ for normalize in (True, False))
    assert loud == prominent_periods(X.mean(axis=0)).base != quiet


def test_a_constant_channel_is_silence():
    X = waves(channels=2)
    X[1, 0] = 0.1  # whose mean over 60 points is not 0.1
    fitted = SpectralReservoir(**EXACT).fit(waves(channels=2))
    silent = X.copy()
    silent[1, 0] = -7
    np.testing.assert_array_equal(fitted.transform(X), fitted.transform(silent))
    weights = fitted.transform(X)[1, : len(fitted.periods_) * 80].reshape(-1, 40, 2)
    assert not weights[..., 0].any()
    assert weights[..., 1].any()


def test_constant_series_fall_back_to_nine_periods_with_a_warning():
    with pytest.warns(HeedfulWarning, match="constant and has no spectrum: the periods are 1 to 9"):
        fitted = SpectralReservoir(random_state=0).fit(np.ones((3, 20)))
    assert fitted.periods_ == [*range(1, 10)]
    assert not fitted.transform(np.ones((2, 20))).any()


@pytest.mark.parametrize(
    ("normalize", "other"),
    [(True, lambda s: -s), (True, lambda s: 1 - 3.3 * s), (False, lambda s: -s), (False, lambda s: 0.1 - s)],
    ids=["opposite", "opposite in normal form", "as they are", "as they are with an offset"],
)
def test_series_that_cancel_have_no_periods_whatever_the_rounding(normalize, other, seed):
    series = waves(1, seed=seed)[0]
    fitted = SpectralReservoir(normalize=normalize, random_state=0)
    with pytest.warns(HeedfulWarning, match="the mean of the series, is constant .* the periods are 1 to 9"):
        fitted.fit(np.stack([series, other(series)]))
    assert fitted.base_periods_ == fitted.periods_ == [*range(1, 10)]


def test_what_is_left_of_series_that_nearly_cancel_has_periods(seed):
    t = np.arange(60)
    series = waves(1, seed=seed)[0]
    X = np.stack([series, 1e-6 * np.sin(2 * np.pi * t / 15) - series])
    fitted = SpectralReservoir(normalize=False, random_state=0).fit(X)
    assert 15 in fitted.base_periods_


# Series of different lengths


def test_a_short_series_among_long_ones_is_described_as_if_alone(seed):
    X = ragged(seed=seed)
    fitted = SpectralReservoir(3, periods=[2, 7, 30], **EXACT).fit(X)
    features = fitted.transform(X)
    for i, case in enumerate(X):
        alone = fitted.transform([case])
        np.testing.assert_array_equal(alone[0], features[i])
        np.testing.assert_allclose(alone, by_hand(fitted, case[None]), rtol=0, atol=1e-9)


def test_weights_of_a_period_no_shorter_than_the_series_are_zero():
    fitted = SpectralReservoir(3, periods=[2, 8, 30], **EXACT).fit(ragged())
    weights = fitted.transform(ragged())[4, : 3 * 24].reshape(3, -1)  # of 8 points
    assert weights[0].any()
    assert not weights[1:].any()


def test_periods_of_unequal_series_are_found_at_their_median_length():
    X = ragged((40, 60, 50), channels=1)
    fitted = SpectralReservoir(random_state=0).fit(X)
    stretched = [np.interp(np.linspace(0, 1, 50), np.linspace(0, 1, x.size), normal_form(x[None])[0, 0]) for x in X]
    assert (fitted.base_periods_, fitted.periods_) == prominent_periods(np.mean(stretched, axis=0))
    assert fitted.n_timepoints_in_ is None
    longer = fitted.transform(ragged((200,), channels=1))  # than any in training
    assert np.isfinite(longer).all()


def test_series_of_one_length_must_stay_so():
    fitted = SpectralReservoir(random_state=0).fit(waves())
    with pytest.raises(InputError, match="SpectralReservoir"):
        fitted.transform(waves(length=59))
    with pytest.raises(InputError, match="59 time points, but SpectralReservoir was fitted on cases of 60"):
        fitted.transform(waves(length=59)[:, None])


# Memory and progress


def test_memory_is_bounded_whatever_the_number_of_cases():
    """What is held beside the features; tracemalloc counts NumPy's arrays."""
    fitted = SpectralReservoir(periods="all", extend_to=30, max_memory=4, random_state=0).fit(waves(length=150))
    peaks = []
    for n in (40, 100):
        X = waves(n, length=150)
        tracemalloc.start()
        features = fitted.transform(X)
        peaks.append(tracemalloc.get_traced_memory()[1] - features.nbytes)
        tracemalloc.stop()
    assert max(peaks) < 4.5 * 2**20  # and the input of a block
    assert abs(peaks[1] - peaks[0]) < 2**19


def test_memory_is_bounded_whatever_the_number_of_channels():
    X = waves(40, length=200, channels=50)
    fitted = SpectralReservoir(periods=range(1, 40), max_memory=12, random_state=0).fit(X)
    tracemalloc.start()
    features = fitted.transform(X)
    peak = tracemalloc.get_traced_memory()[1] - features.nbytes
    tracemalloc.stop()
    assert peak < 12.5 * 2**20


def test_jobs_share_the_memory():
    fitted = SpectralReservoir(periods="all", max_memory=32, random_state=0).fit(waves(length=150))
    alone = fitted._periods_at_once(150)
    assert fitted.set_params(n_jobs=2, max_memory=64)._periods_at_once(150) == alone


def test_small_products_get_one_thread_each(monkeypatch):
    """The bits of a product may depend on the threads that share it."""
    seen = []
    original = heedful.timeseries.sarc.transformer.readouts

    def spy(*args):
        seen.extend(library["num_threads"] for library in threadpool_info() if library["user_api"] == "blas")
        return original(*args)

    monkeypatch.setattr("heedful.timeseries.sarc.transformer.readouts", spy)
    with threadpool_limits(2, user_api="blas"):
        SpectralReservoir(random_state=0).fit_transform(waves())
    assert set(seen) == {1}


def test_one_long_series_does_not_make_the_others_as_large():
    X = [*waves(300, length=50)[:, None], waves(1, length=20000)[:, None][0]]
    tracemalloc.start()
    SpectralReservoir(2, periods=[3], random_state=0).fit(X)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 301 * 20000 * 8 / 2


def test_progress_is_reported():
    events = []
    fitted = SpectralReservoir(random_state=0).fit(waves(70))
    with heedful.progress(events.append):
        fitted.transform(waves(70))
    assert [(e.phase, e.done, e.total) for e in events] == [("reservoirs", i, 3) for i in (1, 2, 3)]


# The ecosystem


def test_pandas_out():
    frame = pd.DataFrame(waves(), index=list("abcde"), columns=[f"t{i}" for i in range(60)])
    fitted = SpectralReservoir(2, random_state=0).set_output(transform="pandas").fit(frame)
    out = fitted.transform(frame)
    assert list(out.columns) == list(fitted.get_feature_names_out())
    assert list(out.index) == list("abcde")


def test_saved_and_loaded_it_gives_the_same_bits(tmp_path):
    for settings, X in [
        ({}, waves()),
        ({"cyclic": False, "reservoir": "esn"}, waves(channels=3)),
        ({"periods": np.array([3, 5]), "random_state": np.random.default_rng(0)}, ragged()),
        ({}, pd.DataFrame(waves(), columns=[f"t{i}" for i in range(60)])),
    ]:
        fitted = SpectralReservoir(**settings).fit(X)
        fitted.save(tmp_path / "reservoir.safetensors")
        loaded = SpectralReservoir.load(tmp_path / "reservoir.safetensors")
        np.testing.assert_array_equal(loaded.transform(X), fitted.transform(X))
        assert list(loaded.get_feature_names_out()) == list(fitted.get_feature_names_out())
        assert {k for k in vars(loaded) if k.endswith("_")} == {k for k in vars(fitted) if k.endswith("_")}


@pytest.mark.parametrize("name", ["w_in_", "w_seq_", "w_cyc_"])
def test_a_file_of_another_shape_is_refused(name, tmp_path):
    fitted = SpectralReservoir(random_state=0).fit(waves())
    setattr(fitted, name, getattr(fitted, name)[..., :-1])
    fitted.save(tmp_path / "bad.safetensors")
    with pytest.raises(FileFormatError, match="lacks or garbles a part of a SpectralReservoir"):
        SpectralReservoir.load(tmp_path / "bad.safetensors")


def test_fit_comes_first():
    for ask in (lambda t: t.transform(waves()), lambda t: t.get_feature_names_out(), lambda t: t.save("x.safetensors")):
        with pytest.raises(NotFittedError, match="SpectralReservoir instance is not fitted yet"):
            ask(SpectralReservoir())


@pytest.mark.parametrize("name", ["GunPoint", "OSULeaf"])
def test_real_series_have_as_many_periods_as_were_found_before(name):
    """59 and 44 periods, by a program written apart from this one."""
    X, _ = load_classification(name, "train")
    assert len(SpectralReservoir(random_state=0).fit(X).periods_) == {"GunPoint": 59, "OSULeaf": 44}[name]


# Bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_units": 0}, "n_units must be an int >= 1; got 0."),
        ({"periods": "fourier"}, "periods must be one of 'spectral', 'spectral-base', 'all'; got 'fourier'."),
        ({"periods": []}, r"periods must be a non-empty sequence of int >= 1; got \[\]."),
        ({"periods": [0, 3]}, r"periods must be a non-empty sequence of int >= 1; got \[0, 3\]."),
        ({"periods": [2.5]}, r"periods must be a non-empty sequence of int >= 1; got \[2.5\]."),
        ({"periods": [3, 60]}, r"periods must lie from 1 to L - 1 = 59 .* got 60."),
        ({"periods": None}, "periods must be a non-empty sequence of int >= 1; got None."),
        ({"n_frequencies": 0}, "n_frequencies must be an int >= 1"),
        ({"wavelet": "nope"}, "wavelet must be one of bior1.1, .*db4, .*; got 'nope'."),
        ({"hp_lambda": -1}, "hp_lambda must be a number >= 0"),
        ({"extend_to": 0}, "extend_to must be an int >= 1; got 0."),
        ({"periods": "all", "extend_to": 0}, "extend_to must be an int >= 1; got 0."),
        ({"periods": [3], "n_frequencies": 0}, "n_frequencies must be an int >= 1; got 0."),
        ({"periods": "all", "hp_lambda": np.nan}, r"hp_lambda must be a number >= 0 and <= 1e\+12; got nan."),
        ({"periods": [3], "hp_lambda": 1e13}, r"hp_lambda must be a number >= 0 and <= 1e\+12; got 10000000000000.0."),
        ({"spectral_radius": -0.1}, "spectral_radius must be a number >= 0"),
        ({"cycle_radius": -0.1}, "cycle_radius must be a number >= 0"),
        ({"leak": 1.0}, "leak must be a number >= 0 and < 1; got 1.0"),
        ({"leak": -0.1}, "leak must be a number >= 0; got -0.1"),
        ({"input_scaling": 0}, "input_scaling must be a number > 0"),
        ({"ridge": 0.0}, "ridge must be a number > 0"),
        ({"reservoir": "lstm"}, "reservoir must be one of 'biesn', 'esn', 'scr', 'crj'; got 'lstm'."),
        ({"cyclic": "no"}, "cyclic must be one of True, False; got 'no'."),
        ({"max_pool": None}, "max_pool must be one of True, False; got None."),
        ({"normalize": "z"}, "normalize must be one of True, False; got 'z'."),
        ({"dtype": "float16"}, "dtype must be one of 'float32', 'float64'; got 'float16'."),
        ({"max_memory": np.inf}, "max_memory must be a number > 0 and <= .*; got inf."),
        ({"max_memory": 0}, "max_memory must be a number > 0 and <= .*; got 0."),
        ({"n_jobs": 0}, "n_jobs=0 would do nothing. Give a number of threads, or -1 for all processors."),
        ({"n_jobs": "all"}, "n_jobs must be an int; got 'all'."),
        ({"random_state": -1}, "random_state must be"),
    ],
    ids=str,
)
def test_settings_out_of_range_are_refused(settings, message):
    with pytest.raises(ParameterError, match=message):
        SpectralReservoir(**settings).fit(waves())


@pytest.mark.parametrize(
    ("X", "message"),
    [
        (
            np.where(np.arange(60) == 7, np.nan, waves()),
            "case 0 of X has 1 values that are NaN or infinite.*Impute them",
        ),
        (
            np.where(np.arange(60) == 7, np.inf, waves()),
            "case 0 of X has 1 values that are NaN or infinite.*Impute them",
        ),
        (waves()[:, :2], "at least 3 time points are needed, got n_features = 2"),
        (waves()[:, :1], "at least 3 time points are needed, got n_features = 1"),
        (waves(channels=2)[:, :, :2], "at least 3 time points are needed, got 2"),
        ([np.zeros((1, 5)), np.zeros((1, 2))], "case 1 of X: at least 3 time points are needed"),
        (waves()[0], r"got shape \(60,\)"),
        (np.array([["a", "b", "c"]], dtype=object), "X must hold numbers; got text"),
        (np.zeros((0, 9)), "X has no cases"),
        ([np.zeros((1, 5)), np.zeros((2, 5))], r"case 1 of X has shape \(2, 5\)"),
        ([], "got shape|X has no cases"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_series_that_are_none_are_refused(X, message):
    with pytest.raises(InputError, match=message):
        SpectralReservoir().fit(X)


def test_another_number_of_channels_is_refused():
    fitted = SpectralReservoir(random_state=0).fit(waves(channels=2))
    with pytest.raises(InputError, match="3 channels, but SpectralReservoir was fitted on 2"):
        fitted.transform(waves(channels=3))
