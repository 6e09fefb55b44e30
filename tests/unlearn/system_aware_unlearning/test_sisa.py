import numpy as np
import pytest
from scipy import sparse
from sklearn.base import clone
from sklearn.ensemble import RandomForestClassifier
from sklearn.linear_model import LogisticRegression, RidgeClassifier, SGDClassifier
from sklearn.naive_bayes import GaussianNB
from sklearn.neural_network import MLPClassifier

from heedful.errors import InputError, NotFittedError, ParameterError
from heedful.unlearn import SISAClassifier
from heedful.unlearn.system_aware_unlearning._digest import digest_of


def weights(model):
    """A digest of the models of each shard."""
    return [digest_of(shard.models) for shard in model.shards_]


def shard_of(model):
    """Shard of each id."""
    return {name: place for place, shard in enumerate(model.shards_) for name in shard.data.ids.tolist()}


@pytest.mark.parametrize("estimator", [RidgeClassifier(), LogisticRegression(), SGDClassifier(random_state=0)], ids=str)
def test_one_shard_of_one_slice_is_exact_retraining(draw, seed, estimator):
    X, y = draw(400, 5, seed)
    model = SISAClassifier(estimator, n_shards=1, random_state=0).fit(X, y, ids=np.arange(400))
    rest = np.setdiff1d(np.arange(400), np.arange(0, 400, 3))
    model.unlearn(np.arange(0, 400, 3))
    order = model.shards_[0].data.ids
    np.testing.assert_array_equal(np.sort(order), rest)
    peer = clone(estimator).fit(X[order], y[order])
    (shard,) = model.shards_
    assert shard.models[-1].coef_.tobytes() == peer.coef_.tobytes()
    np.testing.assert_array_equal(model.predict(X), peer.predict(X))


def test_shards_are_disjoint_even_and_isolated(draw, seed):
    X, y = draw(400, 5, seed)
    model = SISAClassifier(LogisticRegression(), n_shards=7, random_state=seed).fit(X, y, ids=np.arange(400))
    parts = [shard.data.ids for shard in model.shards_]
    np.testing.assert_array_equal(np.sort(np.concatenate(parts)), np.arange(400))
    assert {len(part) for part in parts} == {57, 58}
    for part, shard in zip(parts, model.shards_, strict=True):
        peer = LogisticRegression().fit(X[part], y[part])
        assert shard.models[0].coef_.tobytes() == peer.coef_.tobytes()
    votes = np.mean([shard.models[0].predict(X) for shard in model.shards_], axis=0)
    np.testing.assert_array_equal(model.predict(X), (votes > 0.5).astype(int))


def test_a_deletion_leaves_other_shards_bitwise_alone_and_retrains_its_own(draw, seed):
    X, y = draw(400, 5, seed)
    model = SISAClassifier(LogisticRegression(), n_shards=8, random_state=0).fit(X, y, ids=np.arange(400))
    before, shard = weights(model), shard_of(model)[17]
    models = [each.models for each in model.shards_]
    report = model.unlearn([17, 17, 1000])
    assert (report.removed, report.requested, report.touched) == (1, 3, True)
    after = weights(model)
    assert [place for place in range(8) if before[place] != after[place]] == [shard]
    assert all(
        each.models is old
        for place, (each, old) in enumerate(zip(model.shards_, models, strict=True))
        if place != shard
    )
    rest = model.shards_[shard].data.ids
    assert 17 not in rest
    assert model.shards_[shard].models[0].coef_.tobytes() == LogisticRegression().fit(X[rest], y[rest]).coef_.tobytes()
    assert model.unlearn([17]).touched is False


def test_training_starts_again_at_the_first_slice_that_lost_a_sample(draw):
    X, y = draw(300, 5, 0)
    model = SISAClassifier(SGDClassifier(random_state=0), n_shards=2, n_slices=5, random_state=0)
    model.fit(X, y, ids=np.arange(300))
    shard = model.shards_[1]
    assert shard.ends == (30, 60, 90, 120, 150)
    model.unlearn(shard.data.ids[[149, 90]])  # the last of slice 4, the first of slice 3
    after = model.shards_[1]
    assert after.ends == (30, 60, 90, 119, 148)
    assert all(after.models[r] is shard.models[r] for r in range(3))
    assert all(digest_of(after.models[r]) != digest_of(shard.models[r]) for r in (3, 4))
    # What is trained again is what training would have given without them.
    expected = after.models[2]
    for r in (3, 4):
        rows = slice(0, after.ends[r])
        continued = clone(expected).set_params(warm_start=True)
        vars(continued).update({k: v for k, v in vars(expected).items() if k not in continued.get_params()})
        continued.fit(after.data.X[rows], model.classes_[after.data.codes[rows]])
        np.testing.assert_array_equal(after.models[r].coef_, continued.coef_)
        expected = after.models[r]


def test_a_slice_goes_on_from_the_checkpoint_before_it(draw):
    X, y = draw(300, 5, 0)
    model = SISAClassifier(MLPClassifier((4,), max_iter=3, random_state=0), n_shards=1, n_slices=3, random_state=0)
    with pytest.warns(UserWarning, match="Maximum iterations"):
        model.fit(X, y)
    assert [each.t_ for each in model.shards_[0].models] == [300, 900, 1800]  # 3 epochs of 100, 200, 300 more


def test_slices_that_lack_a_class_start_afresh_when_it_comes():
    X = np.arange(12.0)[:, None]
    model = SISAClassifier(LogisticRegression(), n_shards=1, n_slices=3, random_state=0)
    model.fit(X, np.arange(12) % 3, ids=np.arange(12))
    model.unlearn([name for name in model.shards_[0].data.ids[:4] if name % 3])  # the first slice knows one class
    known = [each.classes_.tolist() for each in model.shards_[0].models]
    assert known[0] == [0]
    assert known[-1] == [0, 1, 2]
    model.unlearn(np.arange(0, 12, 3))  # now that slice is empty
    assert model.shards_[0].models[0] is None
    assert set(model.predict(X)) <= {1, 2}
    model.unlearn(np.arange(12))
    assert set(model.predict(X)) == {0}  # nobody votes


def test_soft_voting_averages_probabilities(draw, seed):
    X, y = draw(300, 5, seed)
    y = y + (X[:, 0] > 0.3)
    model = SISAClassifier(GaussianNB(), n_shards=4, voting="soft", random_state=0).fit(X, y)
    P = np.mean([shard.models[0].predict_proba(X) for shard in model.shards_], axis=0)
    np.testing.assert_allclose(model.predict_proba(X), P)
    np.testing.assert_array_equal(model.predict(X), P.argmax(axis=1))
    assert not hasattr(SISAClassifier(GaussianNB()), "predict_proba")
    model.unlearn_samples(X, y)
    np.testing.assert_allclose(model.predict_proba(X), 1 / 3)


@pytest.mark.parametrize("layout", [np.asarray, sparse.csr_matrix])
def test_samples_are_deleted_by_value(draw, layout):
    X, y = draw(200, 5, 0)
    by_value = SISAClassifier(RidgeClassifier(), n_shards=5, random_state=0).fit(layout(X), y)
    by_name = SISAClassifier(RidgeClassifier(), n_shards=5, random_state=0).fit(layout(X), y, ids=np.arange(200))
    assert by_value.unlearn_samples(X[:9], y[:9]).removed == by_name.unlearn(np.arange(9)).removed == 9
    assert weights(by_value) == weights(by_name)
    assert by_value.unlearn_samples(X[:9], y[:9]).removed == 0


def test_a_name_that_samples_share_deletes_them_all(draw):
    X, y = draw(200, 5, 0)
    people = [f"p{row % 20}" for row in range(200)]
    model = SISAClassifier(RidgeClassifier(), n_shards=5, unique_ids=False, random_state=0).fit(X, y, ids=people)
    assert model.unlearn(["p3", "nobody"]).removed == 10
    assert sum(len(shard.data) for shard in model.shards_) == 190


def test_a_refit_that_fails_leaves_the_model_as_it_was(draw, monkeypatch):
    X, y = draw(100, 4, 0)
    model = SISAClassifier(RidgeClassifier(), n_shards=4, random_state=0).fit(X, y, ids=np.arange(100))
    held = digest_of(vars(model))
    for wrong in ({"ids": np.zeros(100, dtype=int)}, {"classes": [5, 6]}):
        with pytest.raises(InputError):
            model.fit(X[:, :3], y, **wrong)
        assert digest_of(vars(model)) == held
    train, calls = SISAClassifier._train, []

    def fails(self, *args):
        calls.append(args)
        if len(calls) == 3:
            raise MemoryError
        return train(self, *args)

    monkeypatch.setattr(SISAClassifier, "_train", fails)
    with pytest.raises(MemoryError):
        model.fit(X[:, :3], y)
    assert digest_of(vars(model)) == held
    assert model.unlearn([3]).removed == 1


def test_a_deletion_that_fails_leaves_the_model_as_it_was(draw, monkeypatch):
    X, y = draw(200, 5, 0)
    model = SISAClassifier(RidgeClassifier(), n_shards=5, random_state=0).fit(X, y, ids=np.arange(200))
    before, calls = weights(model), []
    fit = RidgeClassifier.fit

    def fit_twice(self, X, y):
        calls.append(1)
        if len(calls) > 2:
            raise MemoryError
        return fit(self, X, y)

    monkeypatch.setattr(RidgeClassifier, "fit", fit_twice)
    with pytest.raises(MemoryError):
        model.unlearn(np.arange(50))
    assert weights(model) == before
    assert sum(len(shard.data) for shard in model.shards_) == 200


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n_shards": 0}, "n_shards must be an int >= 1; got 0"),
        ({"n_slices": 0}, "n_slices must be an int >= 1; got 0"),
        ({"voting": "loud"}, "voting must be one of 'hard', 'soft'; got 'loud'"),
        ({"unique_ids": 2}, "unique_ids must be one of True, False; got 2"),
        ({"n_slices": 2}, "n_slices=2 needs an estimator whose warm_start goes on with the same weights"),
        (
            {"estimator": RandomForestClassifier(), "n_slices": 2},
            "n_slices=2 needs an estimator whose warm_start goes on",
        ),
        ({"voting": "soft"}, "voting='soft' needs predict_proba, which RidgeClassifier"),
        ({"estimator": None}, "estimator must be a scikit-learn classifier, an instance; got None"),
    ],
)
def test_parameters_out_of_range_are_refused(settings, message):
    with pytest.raises(ParameterError, match=f"^{message}"):
        SISAClassifier(**{"estimator": RidgeClassifier(), **settings}).fit(np.eye(2), [0, 1])


def test_bad_data_and_requests_are_refused(draw):
    X, y = draw(50, 3, 0)
    model = SISAClassifier(RidgeClassifier(), random_state=0)
    with pytest.raises(NotFittedError):
        model.unlearn([1])
    with pytest.raises(InputError, match="needs at least two classes"):
        model.fit(X, np.zeros(50))
    with pytest.raises(InputError, match="ids must be unique"):
        model.fit(X, y, ids=np.zeros(50, dtype=int))
    with pytest.raises(InputError, match="Input X contains NaN"):
        model.fit(X * np.nan, y)
    with pytest.raises(InputError, match="was fitted without ids"):
        model.fit(X, y).unlearn([1])
    with pytest.raises(InputError, match="ids that are ints, and the request has strings"):
        model.fit(X, y, ids=np.arange(50)).unlearn(["1"])
