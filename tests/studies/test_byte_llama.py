"""The tiny Llama and its texts, on a few sentences in place of the addresses."""

import itertools
import math

import numpy as np
import pytest
import torch

from heedful import data
from heedful.studies import _byte_llama
from heedful.studies._byte_llama import (
    Pieces,
    addresses,
    bits_per_byte,
    byte_tokenizer,
    text_bytes,
    tiny_llama,
    windows,
)
from tests.data.test_gguf import llama

PARTS = ("training", "calibration", "validation", "test")


@pytest.fixture
def speeches(tmp_path, monkeypatch):
    """Forty years of speeches that say which year it is."""
    years = np.arange(1800, 1840)
    texts = tuple(f"In the year {year} the Union was – as ever – in a good state. " * 20 for year in years)
    form = data.Addresses(texts, years, ("A",) * 40, ("none",) * 40)
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    monkeypatch.setattr(data, "load", {"sotu": form}.__getitem__)
    text_bytes.cache_clear()
    yield form
    text_bytes.cache_clear()


def test_every_address_is_in_one_part(speeches):
    parts = [addresses(part) for part in PARTS]
    assert [len(part) for part in parts] == [28, 4, 4, 4]
    assert sorted(itertools.chain(*parts)) == sorted(speeches.texts)
    assert all("year 18" in text and text[15] == "9" for text in addresses("test"))


def test_tokens_are_bytes(speeches):
    whole = " ".join(addresses("test"))
    assert bytes(text_bytes("test").tolist()).decode() == whole
    assert byte_tokenizer("–", add_special_tokens=False) == {"input_ids": [0xE2, 0x80, 0x93]}


def test_windows_come_from_everywhere_and_move_the_generator():
    text, generator = torch.arange(12), torch.Generator().manual_seed(0)
    drawn = windows(text, 300, 3, generator=generator)
    assert set(drawn[:, 0].tolist()) == set(range(10))  # the last one too: each is missed with probability 2e-13
    assert torch.equal(drawn - drawn[:, :1], torch.arange(3).expand(300, 3))
    assert not torch.equal(windows(text, 300, 3, generator=generator), drawn)


def test_a_model_that_knows_nothing_needs_all_bits():
    model = llama(256)
    torch.nn.init.zeros_(model.lm_head.weight)  # all tokens are as likely
    ids = torch.randint(256, (5, 9), generator=torch.Generator().manual_seed(0))
    assert bits_per_byte(model, Pieces(ids, 40)) == pytest.approx(8)
    assert bits_per_byte(model, Pieces(ids, 80)) == pytest.approx(4)  # tokens of two bytes


def test_bits_are_those_of_the_loss_of_transformers_whatever_the_batches():
    model, ids = llama(256), torch.randint(256, (5, 9), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        expected = float(model(input_ids=ids, labels=ids).loss) / math.log(2)
    for batch_size in (2, 8):
        assert bits_per_byte(model, Pieces(ids, 40), batch_size=batch_size) == pytest.approx(expected, rel=1e-5)


def test_the_tiny_llama_learns_the_text_and_is_kept(speeches, monkeypatch):
    ids = windows(text_bytes("validation"), 16, 64, generator=torch.Generator().manual_seed(0))
    pieces = Pieces(ids, ids[:, 1:].numel())
    model = tiny_llama(seed=0, steps=8)
    assert not model.training
    assert bits_per_byte(model, pieces) < 7  # it begins at 8
    other = tiny_llama(seed=1, steps=8)
    assert not torch.equal(other.lm_head.weight, model.lm_head.weight)
    monkeypatch.setattr(_byte_llama, "_trained", lambda *_: pytest.fail("trained again"))
    again = tiny_llama(seed=0, steps=8)
    assert again is not model
    assert bits_per_byte(again, pieces) == bits_per_byte(model, pieces)


def test_training_leaves_the_global_generator_alone(speeches):
    before = torch.get_rng_state()
    tiny_llama(seed=2, steps=1)
    assert torch.equal(torch.get_rng_state(), before)
