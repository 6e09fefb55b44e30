import itertools
import sys

import numpy as np
import pandas as pd
import pytest
from aeon.datasets import load_classification
from sklearn.base import clone
from sklearn.linear_model import LogisticRegression, RidgeClassifier, RidgeClassifierCV
from sklearn.model_selection import GridSearchCV, StratifiedKFold, cross_val_score
from sklearn.neighbors import KNeighborsClassifier
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC

import heedful
from heedful.errors import FileFormatError, InputError, MissingExtraError, NotFittedError, ParameterError
from heedful.timeseries import SARCClassifier, SpectralReservoir

GRID = {
    "input_scaling": (0.5, 1.0, 2.0, 4.0),
    "spectral_radius": (0.4, 0.6, 0.8),
    "cycle_radius": (0.4, 0.6, 0.8),
    "leak": (0.0, 0.2, 0.4, 0.6, 0.8),
    "ridge": (0.5, 1.0),
}


def cycles(n=40, length=60, n_classes=2, seed=0):
    """Classes are sines of period 6, 8, 10 ... under noise."""
    rng = np.random.default_rng(seed)
    y = np.arange(n) % n_classes
    phase = rng.uniform(0, 6, size=(n, 1))
    X = np.sin(2 * np.pi * np.arange(length) / (6 + 2 * y[:, None]) + phase) + 0.7 * rng.normal(size=(n, length))
    return X, y


def small(**settings):
    """A classifier that is quick to fit."""
    return SARCClassifier(**{"n_units": 3, "periods": [6, 8], "random_state": 0, **settings})


def test_it_is_a_ridge_on_the_features_of_the_reservoir():
    X, y = cycles()
    fitted = SARCClassifier(random_state=0).fit(X, y)
    features = fitted.transformer_.transform(X).astype(float)
    expected = RidgeClassifierCV(alphas=np.logspace(-3, 3, 10)).fit(features, y)
    np.testing.assert_array_equal(fitted.decision_function(X), expected.decision_function(features))
    np.testing.assert_array_equal(fitted.predict(X), expected.predict(features))
    assert fitted.best_params_ == {
        "input_scaling": 1.0, "spectral_radius": 0.8, "cycle_radius": 0.8, "leak": 0.0, "ridge": 1.0
    }  # fmt: skip
    own, theirs = fitted.get_params(), fitted.transformer_.get_params()
    assert {k: v for k, v in theirs.items() if k != "random_state"}.items() <= own.items()
    assert isinstance(fitted.transformer_, SpectralReservoir)


def test_every_setting_reaches_the_reservoir():
    settings = {
        "periods": "spectral-base", "n_frequencies": 2, "wavelet": "haar", "hp_lambda": 100.0, "extend_to": 30,
        "spectral_radius": 0.5, "cycle_radius": 0.4, "leak": 0.2, "input_scaling": 2.0, "ridge": 0.5,
        "reservoir": "esn", "cyclic": False, "max_pool": False, "normalize": False, "dtype": "float64",
        "max_memory": 64, "n_jobs": 2, "n_units": 4,
    }  # fmt: skip
    names = set(SpectralReservoir().get_params())
    assert names == set(settings) | {"random_state"}
    assert names <= set(SARCClassifier().get_params())
    fitted = SARCClassifier(**settings, random_state=0).fit(*cycles())
    assert settings.items() <= fitted.transformer_.get_params().items()


def test_defaults_are_those_of_the_reservoir():
    defaults = SARCClassifier().get_params()
    assert {name: defaults[name] for name in SpectralReservoir().get_params()} == SpectralReservoir().get_params()
    assert defaults == {
        "n_units": 10, "estimator": None, "tune": None, "n_candidates": 20, "cv": 5, "periods": "spectral",
        "n_frequencies": 1, "wavelet": "db4", "hp_lambda": 1600.0, "extend_to": 100, "spectral_radius": 0.8,
        "cycle_radius": 0.8, "leak": 0.0, "input_scaling": 1.0, "ridge": 1.0, "reservoir": "biesn", "cyclic": True,
        "max_pool": True, "normalize": True, "dtype": "float32", "max_memory": 256, "n_jobs": 1, "random_state": None,
    }  # fmt: skip


@pytest.mark.parametrize(
    "estimator",
    [LogisticRegression(), KNeighborsClassifier(), make_pipeline(StandardScaler(), RidgeClassifier())],
    ids=str,
)
def test_any_classifier_may_follow(estimator):
    X, y = cycles()
    fitted = small(estimator=estimator).fit(X, y)
    expected = clone(estimator).fit(fitted.transformer_.transform(X).astype(float), y)
    features = fitted.transformer_.transform(X).astype(float)
    np.testing.assert_array_equal(fitted.predict(X), expected.predict(features))
    assert hasattr(fitted, "decision_function") == hasattr(estimator, "decision_function")
    if hasattr(estimator, "predict_proba"):
        np.testing.assert_array_equal(fitted.predict_proba(X), expected.predict_proba(features))


def test_labels_keep_their_names_and_type():
    X, y = cycles(n_classes=3)
    names = np.array(["ten", "six", "eight"])[y]
    fitted = small().fit(X, names)
    assert fitted.classes_.tolist() == ["eight", "six", "ten"]
    assert set(fitted.predict(X)) <= set(names)
    assert fitted.decision_function(X).shape == (40, 3)


def test_series_of_different_lengths_and_several_channels_are_classified():
    X, y = cycles(60)
    ragged = [np.stack([x[: 60 - i % 20], x[i % 20 :]]) for i, x in enumerate(X)]
    fitted = small(n_units=6).fit(ragged[:40], y[:40])
    assert fitted.score(ragged[40:], y[40:]) > 0.8
    assert (fitted.n_channels_in_, fitted.n_timepoints_in_) == (2, None)


def test_pipeline_and_search():
    X, y = cycles()
    search = GridSearchCV(small(), {"ridge": [0.5, 1.0], "cyclic": [True, False]}, cv=2).fit(X, y)
    assert search.best_score_ > 0.6
    frame = pd.DataFrame(X, columns=[f"t{i}" for i in range(60)])
    fitted = small().fit(frame, y)
    assert list(fitted.feature_names_in_) == list(frame.columns)
    np.testing.assert_array_equal(fitted.predict(frame), small().fit(X, y).predict(X))


def test_random_states_decide_alone():
    X, y = cycles()
    scores = small().fit(X, y).decision_function(X)
    np.testing.assert_array_equal(small().fit(X, y).decision_function(X), scores)
    assert not np.array_equal(small(random_state=1).fit(X, y).decision_function(X), scores)
    generator = small(random_state=np.random.default_rng(0))
    assert not np.array_equal(generator.fit(X, y).decision_function(X), generator.fit(X, y).decision_function(X))


# Tuning


def test_the_grid_is_the_papers_and_the_best_point_wins(monkeypatch):
    """Against cross-validation of each point, fitted apart: the shared products must change nothing."""
    X, y = cycles(30, length=20)
    grid = {**GRID, "input_scaling": (1.0, 4.0), "spectral_radius": (0.4,), "leak": (0.0, 0.8)}
    monkeypatch.setattr("heedful.timeseries.sarc.classifier._GRID", grid)
    seen = []

    def spy(estimator, features, *args, **settings):
        seen.append(features)
        return cross_val_score(estimator, features, *args, **settings)

    monkeypatch.setattr("heedful.timeseries.sarc.classifier.cross_val_score", spy)
    fitted = small(tune="grid", cv=3).fit(X, y)
    scores = {}
    for point, shared in zip(itertools.product(*grid.values()), seen, strict=True):
        settings = dict(zip(grid, point, strict=True))
        features = fitted.transformer_.set_params(**settings).fit(X).transform(X).astype(float)
        np.testing.assert_array_equal(shared, features)
        ridge = RidgeClassifierCV(alphas=np.logspace(-3, 3, 10))
        scores[point] = cross_val_score(ridge, features, y, cv=StratifiedKFold(3)).mean()
    assert len(set(scores.values())) > 1
    assert tuple(fitted.best_params_.values()) == max(scores, key=scores.__getitem__)


def test_the_grid_has_360_points():
    from heedful.timeseries.sarc import classifier

    assert classifier._GRID == GRID
    assert np.prod([len(values) for values in GRID.values()]) == 360


def test_random_candidates_are_points_of_the_grid_and_reproducible():
    X, y = cycles(30, length=20)
    events = []
    with heedful.progress(events.append):
        fitted = small(tune="random", n_candidates=4, cv=2).fit(X, y)
    assert next(e.total for e in events if e.phase == "candidates") in (2, 3, 4)  # neighbours in ridge share one
    assert all(fitted.best_params_[name] in values for name, values in GRID.items())
    assert fitted.transformer_.get_params().items() >= fitted.best_params_.items()
    assert small(tune="random", n_candidates=4, cv=2).fit(X, y).best_params_ == fitted.best_params_
    others = [small(tune="random", n_candidates=1, cv=2, random_state=s).fit(X, y).best_params_ for s in range(6)]
    assert len({tuple(found.values()) for found in others}) > 3


def test_tuned_settings_do_not_touch_the_parameters():
    X, y = cycles(30, length=20)
    classifier = small(tune="random", n_candidates=2, cv=2)
    before = classifier.get_params()
    assert classifier.fit(X, y).get_params() == before


def test_a_small_class_has_fewer_folds(monkeypatch):
    X, y = cycles(30, length=20)
    y[:] = 0
    y[:3] = 1
    seen = []
    original = heedful.timeseries.sarc.classifier.cross_val_score

    def spy(*args, cv, **settings):
        seen.append(len(cv))
        return original(*args, cv=cv, **settings)

    monkeypatch.setattr("heedful.timeseries.sarc.classifier.cross_val_score", spy)
    small(tune="random", n_candidates=1).fit(X, y)
    small(tune="random", n_candidates=1, cv=StratifiedKFold(2)).fit(X, y)
    assert seen == [3, 2]


def test_an_unknown_way_to_tune_is_refused():
    for settings, message in [
        ({"tune": "bayes"}, "tune must be one of None, 'random', 'grid'; got 'bayes'."),
        ({"tune": "random", "n_candidates": 0}, "n_candidates must be an int >= 1; got 0."),
        ({"tune": "grid", "cv": 1}, "cv must be an int >= 2; got 1."),
        ({"leak": 1.0}, "leak must be a number >= 0 and < 1; got 1.0"),
        ({"tune": "random", "leak": 1.0}, "leak must be a number >= 0 and < 1; got 1.0"),
        ({"tune": "grid", "ridge": 0.0}, "ridge must be a number > 0"),
        ({"cv": 2.5}, "cv must be an int >= 2, a splitter or an iterable of splits; got 2.5."),
        ({"cv": None}, "cv must be an int >= 2, a splitter or an iterable of splits; got None."),
        ({"cv": "five"}, "cv must be an int >= 2, a splitter or an iterable of splits; got 'five'."),
    ]:
        with pytest.raises(ParameterError, match=message):
            small(**settings).fit(*cycles())


def test_splits_may_be_given_one_by_one():
    X, y = cycles(30, length=20)
    splits = list(StratifiedKFold(2).split(X, y))
    found = [small(tune="random", n_candidates=3, cv=cv).fit(X, y).best_params_ for cv in (splits, 2)]
    assert found[0] == found[1]


@pytest.mark.parametrize("cv", [5, StratifiedKFold(2)], ids=["int", "splitter"])
def test_a_class_of_one_case_cannot_be_tuned_for(cv):
    X, y = cycles(20, length=20)
    names = np.where(np.arange(20) == 4, "rare", np.array(["six", "eight"])[y])
    with pytest.raises(InputError, match=r"tune needs at least two cases of every class; class rare has 1."):
        small(tune="random", n_candidates=1, cv=cv).fit(X, names)
    assert small().fit(X, names).classes_.tolist() == ["eight", "rare", "six"]


# Files


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"estimator": RidgeClassifier(alpha=3.0)},
        {"estimator": LogisticRegression(C=0.3)},
        {"estimator": LinearSVC(random_state=0), "periods": np.array([6, 9])},
        {"estimator": RidgeClassifierCV(alphas=np.logspace(-2, 2, 5))},
        {"tune": "random", "n_candidates": 2, "cv": StratifiedKFold(2), "random_state": np.random.default_rng(0)},
    ],
    ids=["default", "ridge", "logistic", "svc", "alphas", "tuned"],
)
@pytest.mark.parametrize("n_classes", [2, 3])
def test_saved_and_loaded_it_decides_bit_for_bit(settings, n_classes, tmp_path):
    X, y = cycles(30, n_classes=n_classes)
    names = np.array(["zero", "one", "two"], dtype=object)[y]
    fitted = small(**settings).fit(X, names)
    fitted.save(tmp_path / "model.safetensors")
    for loaded in (SARCClassifier.load(tmp_path / "model.safetensors"), heedful.load(tmp_path / "model.safetensors")):
        np.testing.assert_array_equal(loaded.decision_function(X), fitted.decision_function(X))
        np.testing.assert_array_equal(loaded.predict_proba(X), fitted.predict_proba(X))
        np.testing.assert_array_equal(loaded.predict(X), fitted.predict(X))
        assert loaded.best_params_ == fitted.best_params_
        assert {k for k in vars(loaded) if k.endswith("_")} == {k for k in vars(fitted) if k.endswith("_")}
        assert loaded.tune == fitted.tune
        assert loaded.ridge == fitted.ridge
        assert type(loaded.estimator) is type(fitted.estimator)
        clone(loaded).fit(X, names)


@pytest.mark.parametrize(
    "labels", [np.array([3, 7]), np.array([False, True]), np.array([1.0, 2.0]), np.array(["a", "b"])]
)
def test_labels_of_any_type_come_back(labels, tmp_path):
    X, y = cycles(20)
    fitted = small().fit(X, labels[y])
    fitted.save(tmp_path / "model.safetensors")
    predicted = SARCClassifier.load(tmp_path / "model.safetensors").predict(X)
    assert predicted.dtype == labels.dtype
    np.testing.assert_array_equal(predicted, fitted.predict(X))


def test_the_same_model_twice_gives_the_same_bytes(tmp_path):
    for name in ("one", "two"):
        small().fit(*cycles()).save(tmp_path / f"{name}.safetensors")
    assert (tmp_path / "one.safetensors").read_bytes() == (tmp_path / "two.safetensors").read_bytes()


def test_what_cannot_be_kept_is_refused_before_anything_is_written(tmp_path):
    X, y = cycles()
    for estimator, message in [
        (KNeighborsClassifier(), "only RidgeClassifierCV, RidgeClassifier, LogisticRegression, LinearSVC can be saved"),
        (LogisticRegression(class_weight={0: 1.0, 1: 2.0}), "class_weight of LogisticRegression.* cannot be saved"),
    ]:
        with pytest.raises(ParameterError, match=message):
            small(estimator=estimator).fit(X, y).save(tmp_path / "model.safetensors")
    assert not list(tmp_path.iterdir())


def test_a_file_of_something_else_is_refused(tmp_path):
    X, y = cycles()
    small().fit(X, y).transformer_.save(tmp_path / "reservoir.safetensors")
    with pytest.raises(FileFormatError, match="holds a SpectralReservoir, not a SARCClassifier"):
        SARCClassifier.load(tmp_path / "reservoir.safetensors")


# aeon


def test_as_an_aeon_classifier_it_predicts_the_same():
    X, y = load_classification("BasicMotions", "train")
    X_test, _ = load_classification("BasicMotions", "test")
    classifier = small(periods=[5, 10])
    aeon = classifier.to_aeon().fit(X[::2], y[::2])
    fitted = classifier.fit(X[::2], y[::2])
    np.testing.assert_array_equal(aeon.predict(X_test), fitted.predict(X_test))
    np.testing.assert_array_equal(aeon.predict_proba(X_test), fitted.predict_proba(X_test))


def test_an_aeon_classifier_takes_series_of_different_lengths():
    X, y = cycles(20)
    ragged = [x[None, : 60 - i % 9] for i, x in enumerate(X)]
    assert small().to_aeon().fit(ragged, y).predict(ragged).shape == (20,)


def test_without_aeon_the_extra_is_named(monkeypatch):
    monkeypatch.delitem(sys.modules, "heedful.timeseries.sarc._aeon", raising=False)
    monkeypatch.setitem(sys.modules, "aeon.classification.base", None)
    with pytest.raises(MissingExtraError, match=r'to_aeon needs aeon: pip install "heedful\[timeseries\]".'):
        SARCClassifier().to_aeon()


# Bad input


@pytest.mark.parametrize(
    ("y", "message"),
    [
        (None, "SARCClassifier requires y to be passed, but the target y is None."),
        (np.zeros(40), r"y must hold at least two classes; got 1 class"),
        (np.arange(39), "X has 40 cases and y has 39 labels; they must be as many."),
        (np.linspace(0, 1, 40), "Unknown label type"),
        (np.where(np.arange(40) == 3, np.nan, 1.0), "Input y contains NaN"),
    ],
    ids=["none", "one class", "too few", "continuous", "nan"],
)
def test_labels_that_are_none_are_refused(y, message):
    with pytest.raises(ValueError, match=message):
        small().fit(cycles()[0], y)


def test_a_case_with_nan_is_named():
    X, y = cycles()
    X[7, 3] = np.nan
    with pytest.raises(InputError, match="case 7 of X has 1 values that are NaN or infinite"):
        small().fit(X, y)
    fitted = small().fit(*cycles())
    with pytest.raises(InputError, match="case 7 of X"):
        fitted.predict(X)


def test_no_case_is_no_class():
    with pytest.raises(InputError, match="X has no cases"):
        small().fit(np.empty((0, 60)), np.empty(0))


def test_fit_comes_first():
    for ask in ("predict", "predict_proba", "decision_function"):
        with pytest.raises(NotFittedError, match="SARCClassifier instance is not fitted yet"):
            getattr(SARCClassifier(), ask)(cycles()[0])
    with pytest.raises(NotFittedError, match="SARCClassifier"):
        SARCClassifier().save("model.safetensors")
