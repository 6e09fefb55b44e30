"""A small language model that reads bytes, trained on the spot, and texts to train, calibrate and score models on.

The texts are addresses of presidents, divided by the last digit of their year: no address is in two parts.
"""

import functools
import math
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from jaxtyping import Int
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.nn.utils import clip_grad_norm_
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from heedful import data
from heedful._random import spawn
from heedful.errors import MissingExtraError
from heedful.studies._kept import made_once

Part = Literal["training", "calibration", "validation", "test"]

_DIGITS = {"training": range(7), "calibration": (7,), "validation": (8,), "test": (9,)}


class Pieces(NamedTuple):
    """Pieces of text of as many tokens each.

    Parameters
    ----------
    ids : Int[Tensor, "n length"]
        Their tokens.
    n_bytes : int
        What is predicted of them, all tokens but the first of each piece, has as many bytes.
    """

    ids: Int[Tensor, "n length"]
    n_bytes: int


def addresses(part: Part) -> list[str]:
    """The State of the Union addresses of this part, in the order of their years."""
    speeches = data.load("sotu")
    return [text for text, year in zip(speeches.texts, speeches.years, strict=True) if year % 10 in _DIGITS[part]]


@functools.cache
def text_bytes(part: Part) -> Int[Tensor, " n_bytes"]:
    """All addresses of the part, byte by byte."""
    text = " ".join(addresses(part)).encode()
    return torch.from_numpy(np.frombuffer(text, np.uint8).astype(np.int64))


def windows(
    text: Int[Tensor, " n_bytes"], n: int, length: int, *, generator: torch.Generator
) -> Int[Tensor, "n length"]:
    """Windows from anywhere in the text."""
    starts = torch.randint(len(text) - length + 1, (n, 1), generator=generator)
    return text[starts + torch.arange(length)]


def byte_tokenizer(text: str, **_: Any) -> dict[str, list[int]]:
    """A tokenizer whose tokens are the bytes of the text, called as those of ``transformers`` are."""
    return {"input_ids": list(text.encode())}


@torch.no_grad()
def bits_per_byte(model: Any, pieces: Pieces, *, batch_size: int = 8) -> float:
    """What the model would need to store the text: of each token its surprise, given those before it in its piece."""
    nats = 0.0
    for ids in pieces.ids.split(batch_size):
        logits = model(input_ids=ids, use_cache=False).logits[:, :-1]
        nats += float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten(), reduction="sum"))
    return nats / math.log(2) / pieces.n_bytes


def tiny_llama(*, seed: int, steps: int) -> Any:
    """A Llama that reads bytes, of 0.82 M weights in 4 blocks of width 128, trained on addresses of the training part.

    It is trained by whoever first asks for it, at about 0.1 s a step on one core, and kept; every call makes a new object.
    The seed draws the weights that it starts from, and what it reads.
    """
    # In pairs: of two processes that ask for the same one at the same time, each trains one.
    makers = {f"{one} {steps}": functools.partial(_trained, one, steps) for one in (seed, seed ^ 1)}
    state, _ = made_once("tiny_llama", __file__, ("sotu",), makers)
    model = _llama(seed)
    model.load_state_dict(state)
    return model.eval()


def _llama(seed: int) -> Any:
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError as error:
        raise MissingExtraError('A Llama needs: pip install "heedful[llm]".') from error
    config = LlamaConfig(
        vocab_size=256,
        hidden_size=128,
        intermediate_size=344,
        num_hidden_layers=4,
        num_attention_heads=4,
        max_position_embeddings=256,
        tie_word_embeddings=True,  # learns faster
        bos_token_id=None,
        eos_token_id=None,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config)


def _trained(seed: int, steps: int, *, batch_size: int = 8, length: int = 128, lr: float = 3e-3) -> dict[str, Tensor]:
    """The weights after ``steps`` of AdamW, on windows from anywhere in the text."""
    start, order = spawn(seed, 2)
    model, text = _llama(start), text_bytes("training")
    optimizer = AdamW(model.parameters(), lr=lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = OneCycleLR(optimizer, lr, total_steps=steps, pct_start=0.1)
    generator = torch.Generator().manual_seed(order)
    for _ in range(steps):
        ids = windows(text, batch_size, length, generator=generator)
        optimizer.zero_grad()
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
        clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    return model.state_dict()
