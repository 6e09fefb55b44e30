"""Calibration tokens: where they come from, that none is used twice, and what is refused."""

import json
import re

import numpy as np
import pytest
import torch

from heedful.compress._texts import calibration_tokens
from heedful.errors import FileFormatError, InputError, ParameterError


class Bytes:
    """A tokenizer whose tokens are the bytes of the text."""

    def __init__(self, eos_token_id=None):
        self.eos_token_id = eos_token_id

    def __call__(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return {"input_ids": list(text.encode())}


class Numbers:
    """A tokenizer of texts such as "5-9", which are the tokens 5, 6, 7 and 8."""

    def __call__(self, text, *, add_special_tokens):
        return {"input_ids": list(range(*map(int, text.split("-"))))}


def test_stretches_are_runs_of_the_joined_texts_and_no_two_overlap(seed):
    tokens = calibration_tokens(["0-70", "70-71", "71-100"], Numbers(), n_samples=9, length=11, random_state=seed)
    assert tokens.shape == (9, 11)
    assert tokens.dtype == torch.int64
    assert (tokens.diff(dim=1) == 1).all()
    assert tokens.unique().numel() == 99


def test_samples_that_need_every_token_are_the_whole_text_in_random_order():
    tokens = calibration_tokens(["0-40"], Numbers(), n_samples=8, length=5, random_state=1)
    np.testing.assert_array_equal(np.sort(tokens.flatten()), np.arange(40))
    assert not torch.equal(tokens, torch.arange(40).view(8, 5))


def test_every_placement_of_a_stretch_can_occur():
    starts = {
        int(calibration_tokens(["0-12"], Numbers(), n_samples=1, length=10, random_state=i)[0, 0]) for i in range(40)
    }
    assert starts == {0, 1, 2}


def test_the_same_random_state_gives_the_same_tokens_and_no_global_generator_is_read():
    draw = [calibration_tokens(["0-900"], Numbers(), n_samples=7, length=9, random_state=5) for _ in range(2)]
    assert torch.equal(*draw)
    before = np.random.get_state()[1].copy()
    calibration_tokens(["0-900"], Numbers(), n_samples=7, length=9, random_state=None)
    np.testing.assert_array_equal(before, np.random.get_state()[1])


def test_texts_are_parted_by_the_end_token_if_there_is_one():
    tokens = calibration_tokens(["ab", "", "cd"], Bytes(eos_token_id=0), n_samples=1, length=6)
    assert tokens.tolist() == [[97, 98, 0, 99, 100, 0]]


def test_plain_and_line_files_give_what_the_texts_do(tmp_path):
    texts = ["Grüße an alle. ", 'Say "no" \\ twice.\n']
    plain, lines = tmp_path / "texts.txt", tmp_path / "texts.jsonl"
    plain.write_bytes("".join(texts).encode())
    lines.write_text("\n\n".join(json.dumps({"text": text, "more": 1}) for text in texts))
    settings = {"n_samples": 3, "length": 8}
    expected = calibration_tokens(texts, Bytes(), **settings)
    for given in (plain, str(plain), lines):
        assert torch.equal(calibration_tokens(given, Bytes(), **settings), expected)


def test_a_real_tokenizer_serves():
    pytest.importorskip("transformers")
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    core = Tokenizer(models.WordLevel({"[UNK]": 0, "a": 1, "b": 2, "[END]": 3}, unk_token="[UNK]"))
    core.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=core, unk_token="[UNK]", eos_token="[END]")
    assert calibration_tokens(["a b c"], tokenizer, n_samples=1, length=4).tolist() == [[1, 2, 0, 3]]


def test_too_few_tokens_are_counted_in_the_error():
    message = (
        "the calibration texts have 1,030 tokens; 4 samples of 300 need 1,200. Give more text, or ask for fewer or "
        "shorter samples."
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        calibration_tokens(["0-1030"], Numbers(), n_samples=4, length=300)
    with pytest.raises(InputError, match="have 0 tokens"):
        calibration_tokens([], Numbers(), n_samples=1, length=2)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "t.jsonl",
            b'{"text": "a"}\n{"txt": "b"}\n',
            'line 2 must be a JSON object with a string under "text"; got {"txt"',
        ),
        ("t.jsonl", b'{"text": 3}', "line 1 must be a JSON object"),
        ("t.jsonl", b'["text"]', "line 1 must be a JSON object"),
        ("t.jsonl", b'{"text": "a"}\n\n{"text"', "line 3 is not JSON"),
        ("t.jsonl", b"[" * 100_000, "line 1 is not JSON"),
        ("t.txt", b"ab\xff", r"is not UTF-8 text \(invalid start byte at byte 2\)"),
        ("t.parquet", b"", r"calibration texts are read from \.txt and \.jsonl files"),
    ],
)
def test_files_that_hold_no_texts_are_refused(tmp_path, name, content, message):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(FileFormatError, match=message):
        calibration_tokens(tmp_path / name, Bytes(), n_samples=1, length=2)


def test_what_cannot_be_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError):
        calibration_tokens(tmp_path / "none.txt", Bytes())
    with pytest.raises(ParameterError, match=r"length must be an int >= 2; got 1"):
        calibration_tokens(["0-9"], Numbers(), length=1)
    with pytest.raises(ParameterError, match=r"n_samples must be an int >= 1; got 0"):
        calibration_tokens(["0-9"], Numbers(), n_samples=0)
