"""Suites of models to merge: made once, real, and scored on rows that never train."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

from heedful import data
from heedful.studies import _merge_suite
from heedful.studies._merge_suite import _Encoder, _Family, _image_rows, _lower_states, _suite, _text_rows


@pytest.fixture(autouse=True)
def home(request, tmp_path, monkeypatch):
    """An empty data folder, except for tests that read real data."""
    if "real" not in request.fixturenames:
        monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    return tmp_path


def toy_body() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh())


def toy_base(seed):
    body = toy_body()
    _merge_suite._initialise(body, 0)
    return body.state_dict()


def toy_rows(task, part, seed):
    """Each task's label is the sign of another coordinate."""
    number = ("training", "validation", "test", "unlabelled").index(part)
    seeds = np.random.SeedSequence([number, seed if part == "training" else 0])
    x = torch.tensor(np.random.default_rng(seeds).normal(size=(200, 4)), dtype=torch.float32)
    return x, (x[:, "ab".index(task)] > 0).long()


TOY = _Family(
    name="toy",
    tasks={"a": 2, "b": 2},
    n_features=8,
    body=toy_body,
    base=toy_base,
    rows=toy_rows,
    recipe={"epochs": 10, "batch_size": 20, "lr": 0.03, "head_lr": 0.03},
)


def same(one, other):
    return all(torch.equal(one[name], other[name]) for name in one)


def test_models_know_their_own_task_and_the_base_none():
    suite = _suite(TOY, "validation", 0, 2)
    assert list(suite.models) == list(suite.heads) == list(suite.rows) == ["a", "b"]
    for task, model in suite.models.items():
        assert suite.accuracy(model, [task]) == {task: suite.fine_tuned[task]}
        assert suite.fine_tuned[task] > 95
        assert not any(p.requires_grad for p in suite.heads[task].parameters())
    assert max(suite.accuracy(suite.base).values()) < 90
    assert suite.accuracy(suite.models["a"])["b"] < 90
    assert same(suite.base, toy_base(0))


def test_what_is_scored_is_the_split_asked_for():
    validation, test = (_suite(TOY, split, 0, 1) for split in ("validation", "test"))
    assert same(validation.models["a"], test.models["a"])
    assert not torch.equal(validation.rows["a"][0], test.rows["a"][0])
    assert test.accuracy(test.models["a"]) == test.fine_tuned
    assert torch.equal(test.unlabelled("a"), toy_rows("a", "unlabelled", 0)[0])


def test_a_suite_of_fewer_tasks_has_the_same_models_and_other_seeds_have_others():
    both, one, other = _suite(TOY, "test", 0, 2), _suite(TOY, "test", 0, 1), _suite(TOY, "test", 1, 1)
    assert same(both.models["a"], one.models["a"])
    assert not same(one.models["a"], other.models["a"])
    assert torch.equal(one.rows["a"][0], other.rows["a"][0])


def test_models_are_trained_once_and_anew_if_damaged(monkeypatch, home):
    trained = []
    train = _merge_suite._train
    monkeypatch.setattr(_merge_suite, "_train", lambda *a, **k: trained.append(None) or train(*a, **k))
    first, again = (_suite(TOY, "test", 0, 2) for _ in range(2))
    assert len(trained) == 2
    assert same(first.models["b"], again.models["b"])
    for file in home.glob("merge_suite/*.safetensors"):
        file.write_bytes(b"damaged")
    assert same(first.models["b"], _suite(TOY, "test", 0, 2).models["b"])
    assert len(trained) == 4


@pytest.fixture
def pictures(monkeypatch):
    draws = np.random.default_rng(0)
    form = SimpleNamespace(
        x_train=draws.integers(0, 256, (5000, 28, 28), np.uint8),
        y_train=draws.integers(0, 10, 5000),
        x_test=draws.integers(0, 256, (1200, 28, 28), np.uint8),
        y_test=draws.integers(0, 10, 1200),
    )
    monkeypatch.setattr(data, "load", lambda name: form)
    return form


def test_no_image_is_in_two_parts_and_scored_ones_are_the_same_for_every_seed(pictures):
    rows = {part: _image_rows("mnist", part, 0) for part in ("training", "validation", "test", "unlabelled")}
    assert {part: len(x) for part, (x, _) in rows.items()} == {
        "training": 3000,
        "validation": 1000,
        "test": 1000,
        "unlabelled": 500,
    }
    seen = [image.numpy().tobytes() for x, _ in rows.values() for image in x]
    assert len(set(seen)) == len(seen)
    other = {part: _image_rows("mnist", part, 1)[0] for part in rows}
    assert {part for part in rows if torch.equal(rows[part][0], other[part])} == {"validation", "test", "unlabelled"}
    held_out = {image.numpy().tobytes() for part in ("validation", "test", "unlabelled") for image in rows[part][0]}
    assert not held_out & {image.numpy().tobytes() for image in other["training"]}


def test_variants_are_the_same_images_turned_or_negative(pictures):
    plain, labels = _image_rows("mnist", "test", 0)
    turned, _ = _image_rows("mnist-turned", "test", 0)
    negative, same_labels = _image_rows("mnist-negative", "test", 0)
    assert torch.equal(turned[0, 0], torch.from_numpy(np.rot90(plain[0, 0].numpy()).copy()))
    torch.testing.assert_close(plain + negative, torch.ones_like(plain))
    assert torch.equal(labels, same_labels)


def test_colour_images_become_grey_ones_of_the_same_size(pictures):
    pictures.x_test = np.repeat(np.random.default_rng(1).integers(0, 256, (1000, 32, 32, 1), np.uint8), 3, axis=3)
    grey, _ = _image_rows("cifar10", "test", 0)
    assert grey.shape == (1000, 1, 28, 28)
    expected = torch.tensor(pictures.x_test[:, 2:30, 2:30, 0] / 255, dtype=torch.float32)
    torch.testing.assert_close(grey[:, 0], expected, rtol=0, atol=1e-6)  # the three weights sum to one


def test_padding_changes_nothing_that_the_encoder_says():
    encoder = _Encoder(2).eval()
    states = torch.randn(3, 10, 384, generator=torch.Generator().manual_seed(0))
    longer = torch.cat([states, torch.zeros(3, 6, 384)], dim=1)
    with torch.no_grad():
        torch.testing.assert_close(encoder(longer), encoder(states), rtol=1e-4, atol=1e-5)  # sums in another order


@pytest.fixture
def real():
    for name in ("minilm_l6", "sentiment4"):
        if not data.is_cached(name):
            pytest.skip(f"the data set {name} is not in the cache of this machine, and tests fetch nothing")


def test_lower_states_and_upper_layers_make_up_the_published_encoder(real, monkeypatch):
    from transformers import AutoModel

    monkeypatch.setattr(_merge_suite, "_SIZES", {"test": 20})
    upper = _Encoder(2).eval()
    upper.load_state_dict(_merge_suite._published_layers(4, 6))
    words = [f"sentence {number}: {'so it goes ' * number}" for number in range(20)]
    monkeypatch.setattr(_merge_suite, "_labelled_texts", lambda task: (words, np.arange(20)))
    order = np.random.default_rng(0).permutation(20)
    tokens = _merge_suite._tokenizer().encode_batch([words[i] for i in order])
    mask = torch.tensor([t.attention_mask for t in tokens])
    whole = AutoModel.from_pretrained(data.load("minilm_l6").folder, local_files_only=True).eval()
    rows = _lower_states("movie", "test")
    with torch.no_grad():
        states = whole(input_ids=torch.tensor([t.ids for t in tokens]), attention_mask=mask).last_hidden_state
        expected = (states * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        torch.testing.assert_close(upper(rows["inputs"]), expected, rtol=1e-3, atol=1e-5)  # float32, six layers
    assert rows["labels"].tolist() == order.tolist()
    assert 0 < mask.sum() < mask.numel()


@pytest.mark.parametrize("task", ["movie", "bbc", "spam", "tweets", "amazon", "nyt"])
def test_no_text_is_in_two_parts_and_the_seed_chooses_among_those_that_train(task, monkeypatch):
    twice = [f"head\n\ntext {i}" for i in range(2000)] * 2
    form = data.Texts(tuple(twice), np.arange(4000) % 2, ("a", "b"))
    names = ("movie", "tweets", "amazon", "nyt")
    rated = data.RatedTexts(form.texts * 4, np.ones(16000), np.repeat(np.arange(4), 4000), names)
    monkeypatch.setattr(data, "load", lambda name: rated if name == "sentiment4" else form)
    monkeypatch.setattr(_merge_suite, "_tokenizer", Numbers)
    monkeypatch.setattr(_merge_suite, "_embedded", lambda ids, mask: ids[..., None].expand(-1, 1, 384).float())
    monkeypatch.setattr(_merge_suite, "_published_layers", lambda start, end: _Encoder(4).state_dict())
    monkeypatch.setattr(_Encoder, "states", lambda self, x: x)
    rows = {part: _text_rows(task, part, 0)[0][:, 0, 0].int().tolist() for part in _merge_suite._SIZES}
    assert {part: len(found) for part, found in rows.items()} == _merge_suite._SIZES | {"training": 480}
    assert len({number for found in rows.values() for number in found}) == 200 + 100 + 500 + 480
    assert _text_rows(task, "training", 1)[0][:, 0, 0].int().tolist() != rows["training"]


class Numbers:
    """A tokenizer of texts that end in a number: the number is the only token."""

    def encode_batch(self, texts):
        return [SimpleNamespace(ids=[int(text.split()[-1]) + 1], attention_mask=[1]) for text in texts]
