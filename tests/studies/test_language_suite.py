"""The suite of a language model, on a tiny one and a few sentences."""

import numpy as np
import pytest
import torch

from heedful import data
from heedful.studies import _language_suite
from heedful.studies._language_suite import news_and_fiction
from tests.data.test_gguf import llama, tokenizer

SENTENCES = {"news": "the prices rose again, said the bank. ", "fiction": "He ran! She saw him; and he fell? "}


@pytest.fixture(autouse=True)
def tiny(tmp_path, monkeypatch):
    """A folder with a Llama of two layers, and texts of two domains that differ in their letters."""
    model = llama(len(tokenizer().get_vocab()))
    model.save_pretrained(tmp_path / "model")
    tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    draw = np.random.default_rng(0)
    texts = {
        domain: tuple(" ".join(draw.permutation(words.split())) * 4 for _ in range(100))
        for domain, words in SENTENCES.items()
    }
    brown = data.Texts(("no fiction" * 50, *texts["fiction"]), np.array([0, *[1] * 100]), ("news", "romance", *"abcd"))
    forms = {
        "smollm2_135m": data.PretrainedModel(tmp_path / "model"),
        "bbc_news": data.Texts(texts["news"], np.zeros(100, np.int64), ("business",)),
        "brown": brown,
    }
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path / "kept"))
    monkeypatch.setattr(data, "load", forms.__getitem__)
    monkeypatch.setattr(_language_suite, "_GENRES", ("romance",))
    monkeypatch.setattr(_language_suite, "_N_UPPER", 1)
    monkeypatch.setattr(_language_suite, "_SIZES", {"test": 10, "validation": 12, "training": 130})
    _language_suite._parts.cache_clear()
    yield model
    _language_suite._parts.cache_clear()


def test_a_score_is_the_inverse_perplexity_of_the_whole_model(tiny):
    suite = news_and_fiction(split="validation", seed=0)
    for domain, score in suite.score(suite.base).items():
        ids = suite.pieces[domain].ids
        assert ids.shape == (12, 48)
        with torch.no_grad():
            loss = tiny(ids, labels=ids).loss
        assert score == pytest.approx(float(torch.exp(-loss)), rel=1e-4)  # float32


def test_each_model_is_better_than_the_base_in_its_own_domain_and_leaves_the_base_alone(tiny):
    suite = news_and_fiction(split="validation", seed=0)
    before = suite.score(suite.base)
    for domain, model in suite.models.items():
        assert suite.score(model)[domain] == pytest.approx(suite.own[domain], rel=1e-6)
        assert suite.own[domain] > 1.2 * before[domain]
        assert set(model) == set(suite.base)
    assert suite.score(suite.base) == before
    assert all(torch.equal(suite.base[name], tensor) for name, tensor in tiny.model.layers[1:].state_dict().items())


def test_pieces_of_the_splits_differ_and_are_the_same_for_every_seed():
    pieces = {split: news_and_fiction(split=split, seed=0).pieces for split in ("validation", "test")}
    assert len(pieces["test"]["news"].ids) == 10
    assert not torch.equal(pieces["validation"]["news"].ids[:10], pieces["test"]["news"].ids)
    again = news_and_fiction(split="test", seed=1)
    assert torch.equal(again.pieces["news"].ids, pieces["test"]["news"].ids)
    assert any(not torch.equal(again.models["news"][name], tensor) for name, tensor in again.base.items())
