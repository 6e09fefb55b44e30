"""Two fine-tunes of a language model to merge: of SmolLM2-135M, to news and to fiction.

The upper two layers are trained; the lower ones stay as they are, and what they make of the texts is kept. Everything is
made once: the first seed takes about two minutes of one core, every further one about one.
"""

import functools
import itertools
import math
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from heedful import data
from heedful._random import spawn
from heedful.errors import MissingExtraError
from heedful.studies._kept import made_once

DOMAINS = ("news", "fiction")

_made_once = functools.partial(made_once, "language_suite", __file__, ("smollm2_135m", "bbc_news", "brown"))

_N_UPPER, _N_TOKENS = 2, 48
_SIZES = {"test": 32, "validation": 32, "training": 160}  # pieces of text, of _N_TOKENS tokens each
_GENRES = ("fiction", "mystery", "science fiction", "adventure", "romance")
_PIECES = {"news": 2, "fiction": 8}  # at most, of a text: there are fewer of fiction, and they are longer
_State = dict[str, Tensor]


class _Pieces(NamedTuple):
    """Pieces of text: their tokens, and what the lower layers make of them."""

    ids: Tensor
    states: Tensor


class LanguageSuite(NamedTuple):
    """A base, by domain a fine-tune, what it scores itself, and the pieces of the split."""

    base: _State
    models: dict[str, _State]
    own: dict[str, float]
    pieces: dict[str, _Pieces]

    def score(self, state: Mapping[str, Tensor]) -> dict[str, float]:
        """By domain, the inverse of the perplexity of the model whose upper layers are ``state``."""
        upper = _upper(state)
        return {domain: _inverse_perplexity(upper, pieces) for domain, pieces in self.pieces.items()}


def news_and_fiction(*, split: str, seed: int) -> LanguageSuite:
    """SmolLM2-135M fine-tuned to 96 pieces of BBC news, or of the fiction in the Brown corpus."""
    base = _parts().base
    made = _made_once({f"{domain} {seed}": functools.partial(_fine_tune, domain, seed) for domain in DOMAINS})
    models = dict(zip(DOMAINS, made, strict=True))
    own = {domain: model[split].item() for domain, model in models.items()}
    pieces = {domain: _pieces(domain, split) for domain in DOMAINS}
    return LanguageSuite(
        base, {domain: {name: model[name] for name in base} for domain, model in models.items()}, own, pieces
    )


def _fine_tune(
    domain: str, seed: int, *, n: int = 96, epochs: int = 2, batch_size: int = 8, lr: float = 3e-4
) -> _State:
    pieces = _pieces(domain, "training")
    choice, order = spawn(seed, 2)
    chosen = torch.from_numpy(np.random.default_rng(choice).choice(len(pieces.ids), n, replace=False))
    upper = _upper(_parts().base)
    optimizer = AdamW(upper.model.layers.parameters(), lr=lr, weight_decay=0.01)
    scheduler = OneCycleLR(optimizer, lr, total_steps=epochs * n // batch_size)
    generator = torch.Generator().manual_seed(order)
    for _ in range(epochs):
        for batch in chosen[torch.randperm(n, generator=generator)].split(batch_size):
            optimizer.zero_grad()
            _loss(upper, pieces.ids[batch], pieces.states[batch]).backward()
            optimizer.step()
            scheduler.step()
    scores = {
        split: torch.tensor(_inverse_perplexity(upper, _pieces(domain, split))) for split in ("validation", "test")
    }
    return {**{name: w.clone() for name, w in upper.model.layers.state_dict().items()}, **scores}


@torch.no_grad()
def _inverse_perplexity(upper: nn.Module, pieces: _Pieces) -> float:
    """Over all tokens; every piece has as many."""
    batches = zip(pieces.ids.split(8), pieces.states.split(8), strict=True)
    loss = sum(len(ids) * float(_loss(upper, ids, states)) for ids, states in batches) / len(pieces.ids)
    return math.exp(-loss)


def _loss(upper: nn.Module, ids: Tensor, states: Tensor) -> Tensor:
    """Nats a token, of each token given those before it."""
    logits = upper(inputs_embeds=states, use_cache=False).logits[:, :-1]
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class _Parts(NamedTuple):
    """The lower layers, from tokens to states; the upper ones, from states to logits; the published weights of these."""

    lower: nn.Module
    upper: nn.Module
    base: _State


@functools.cache
def _parts() -> _Parts:
    try:
        from transformers import AutoModelForCausalLM
    except ImportError as error:
        raise MissingExtraError('SmolLM2 needs: pip install "heedful[llm]".') from error
    folder = data.load("smollm2_135m").folder
    lower, upper = (AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval() for _ in range(2))
    lower.model.layers = lower.model.layers[:-_N_UPPER]
    lower.model.norm = nn.Identity()
    upper.model.layers = upper.model.layers[-_N_UPPER:]
    upper.requires_grad_(False)
    upper.model.layers.requires_grad_(True)
    return _Parts(lower.model, upper, {name: w.clone() for name, w in upper.model.layers.state_dict().items()})


def _upper(state: Mapping[str, Tensor]) -> Any:
    """The upper part with these weights: one module, whose weights every call replaces."""
    upper: Any = _parts().upper
    upper.model.layers.load_state_dict(state)
    return upper


def _pieces(domain: str, part: str) -> _Pieces:
    (made,) = _made_once({f"{domain} {part}": functools.partial(_lower_states, domain, part)})
    return _Pieces(**made)


@torch.no_grad()
def _lower_states(domain: str, part: str) -> _State:
    from tokenizers import Tokenizer

    texts = _texts(domain)
    tokenizer = Tokenizer.from_file(str(data.load("smollm2_135m").folder / "tokenizer.json"))
    rows = [
        row.ids for row in tokenizer.encode_batch([texts[i] for i in np.random.default_rng(0).permutation(len(texts))])
    ]
    starts = range(0, _N_TOKENS * _PIECES[domain], _N_TOKENS)
    pieces = [row[start : start + _N_TOKENS] for row in rows for start in starts if start + _N_TOKENS <= len(row)]
    end = dict(zip(_SIZES, itertools.accumulate(_SIZES.values()), strict=True))[part]
    ids = torch.tensor(pieces[end - _SIZES[part] : end])
    lower = _parts().lower
    return {"ids": ids, "states": torch.cat([lower(x, use_cache=False).last_hidden_state for x in ids.split(8)])}


def _texts(domain: str) -> list[str]:
    if domain == "news":
        return list(data.load("bbc_news").texts)
    brown = data.load("brown")
    genres = [brown.class_names.index(name) for name in _GENRES]
    return [text for text, genre in zip(brown.texts, brown.y, strict=True) if genre in genres]
