"""Models to merge, and rows to score merged models by: one base, and real fine-tunes of it for several tasks.

``images`` and ``texts`` build the suites that the studies of the room ``merge`` share. A fine-tune trains the body, which is
merged afterwards, together with a head of its own, which is not. Every seed has fine-tunes of its own, of other rows in
another order, from one of three bases (of images) or from the published one (of texts). Rows that are scored are the same
for every seed, and no seed trains on them.

Whatever is trained is trained once and kept in the data folder.
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, layer_norm
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from heedful import data
from heedful._random import spawn
from heedful.errors import MissingExtraError
from heedful.studies._kept import made_once

IMAGE_SOURCES = ("mnist", "fashion_mnist", "cifar10")
TEXT_SOURCES = ("minilm_l6", "sentiment4", "bbc_news", "spam_assassin")

Split = Literal["validation", "test"]

_State = dict[str, Tensor]
_Rows = tuple[Tensor, Tensor]  # inputs and labels

_made_once = functools.partial(made_once, "merge_suite", __file__, (*IMAGE_SOURCES, *TEXT_SOURCES))


@dataclasses.dataclass(frozen=True, eq=False)
class MergeSuite:
    """Models of several tasks that share a base, and the rows of one split.

    Parameters
    ----------
    base : dict of str to Tensor
        The body that every model started from.
    models : dict of str to dict of str to Tensor
        By task, the fine-tuned body.
    body : callable
        ``body()`` is a new module of the body's architecture, which such a dict can be loaded into.
    heads : dict of str to Module
        By task, what turns features of the body into logits; never merged.
    fine_tuned : dict of str to float
        By task, the accuracy in % of its own model on ``rows``.
    rows : dict of str to (inputs, labels)
        By task, what merged models are scored on.
    load_unlabelled : callable
        From a task to inputs that neither train nor are scored.
    """

    base: _State
    models: dict[str, _State]
    body: Callable[[], nn.Module]
    heads: dict[str, nn.Module]
    fine_tuned: dict[str, float]
    rows: dict[str, _Rows]
    load_unlabelled: Callable[[str], Tensor]

    def accuracy(self, state: Mapping[str, Tensor], tasks: Sequence[str] | None = None) -> dict[str, float]:
        """Accuracy in % of the body ``state`` on each task's rows, under the task's head; default all tasks."""
        body = self.body()
        body.load_state_dict(state)
        return {task: _accuracy(body, self.heads[task], *self.rows[task]) for task in tasks or self.models}

    def unlabelled(self, task: str) -> Tensor:
        """500 inputs of ``task`` without their labels."""
        return self.load_unlabelled(task)


def images(*, split: Split, seed: int, n_tasks: int = 2) -> MergeSuite:
    """The first ``n_tasks`` of: MNIST, Fashion-MNIST, CIFAR-10 in grey, MNIST turned, Fashion-MNIST negative, CIFAR-10 turned.

    A convolutional network of 0.6 M weights, trained first on images of all three sets at once. 1000 rows of each set
    validate, 1000 of its own test set test.
    """
    return _suite(_IMAGES, split, seed, n_tasks)


def texts(*, split: Split, seed: int, n_tasks: int = 2) -> MergeSuite:
    """The first ``n_tasks`` of: subjects of BBC news, spam, and the sentiment of films, tweets, products and editorials.

    The body is the upper two layers of the sentence encoder MiniLM-L6, 3.5 M weights; its inputs are the states of the
    lower four, which stay as they are, for 20 tokens (zeros where a text is shorter). 100 rows validate, 200 test.
    """
    return _suite(_TEXTS, split, seed, n_tasks)


@dataclasses.dataclass(frozen=True)
class _Family:
    """What ``images`` and ``texts`` differ in.

    ``rows(task, part, seed)`` are those of a part: "training", which alone depends on the seed, "validation", "test" or
    "unlabelled". ``base(seed)`` is the state that fine-tuning starts from. ``recipe`` are the keywords of ``_train``.
    """

    name: str
    tasks: Mapping[str, int]  # and their number of classes
    n_features: int
    body: Callable[[], nn.Module]
    base: Callable[[int], _State]
    rows: Callable[[str, str, int], _Rows]
    recipe: Mapping[str, Any]


def _suite(family: _Family, split: Split, seed: int, n_tasks: int) -> MergeSuite:
    tasks = list(family.tasks)[:n_tasks]
    base = family.base(seed)
    kept = _made_once(
        {f"{family.name} {task} {seed}": functools.partial(_fine_tune, family, task, base, seed) for task in tasks}
    )
    models, fine_tuned = {}, {}
    heads: dict[str, nn.Module] = {}
    for task, state in zip(tasks, kept, strict=True):
        fine_tuned[task] = state.pop(split).item()
        models[task] = {name: state[f"body.{name}"] for name in base}
        heads[task] = _head(family, task)
        heads[task].load_state_dict({name: state[f"head.{name}"] for name in heads[task].state_dict()})
        heads[task].requires_grad_(False)
    return MergeSuite(
        base=base,
        models=models,
        body=family.body,
        heads=heads,
        fine_tuned=fine_tuned,
        rows={task: family.rows(task, split, seed) for task in tasks},
        load_unlabelled=lambda task: family.rows(task, "unlabelled", seed)[0],
    )


# Training.


def _fine_tune(family: _Family, task: str, base: _State, seed: int) -> _State:
    """Body, head, and the accuracy of both on either split. Tasks share no randomness: not even their heads begin alike."""
    own = spawn(seed, len(family.tasks))[list(family.tasks).index(task)]
    rows, order, weights = spawn(own, 3)
    body, head = family.body(), _head(family, task)
    body.load_state_dict(base)
    _initialise(head, weights)
    _train(body, head, *family.rows(task, "training", rows), seed=order, **family.recipe)
    scores = {
        part: torch.tensor(_accuracy(body, head, *family.rows(task, part, seed)), dtype=torch.float64)
        for part in ("validation", "test")
    }
    return {
        **{f"body.{name}": tensor for name, tensor in body.state_dict().items()},
        **{f"head.{name}": tensor for name, tensor in head.state_dict().items()},
        **scores,
    }


def _train(
    body: nn.Module,
    head: nn.Module,
    inputs: Tensor,
    labels: Tensor,
    *,
    seed: int,
    epochs: int,
    batch_size: int,
    lr: float,
    head_lr: float,
) -> None:
    groups = [{"params": list(body.parameters()), "lr": lr}, {"params": list(head.parameters()), "lr": head_lr}]
    optimizer = AdamW(groups, weight_decay=0.01)
    scheduler = OneCycleLR(optimizer, [lr, head_lr], total_steps=epochs * (len(labels) // batch_size))
    body.train()
    for batch in _batches(len(labels), batch_size, epochs, seed):
        optimizer.zero_grad()
        cross_entropy(head(body(inputs[batch])), labels[batch]).backward()
        optimizer.step()
        scheduler.step()


def _batches(n: int, batch_size: int, epochs: int, seed: int) -> Iterator[Tensor]:
    """Epoch after epoch in a new order each; what does not fill a batch is left out of the epoch."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epochs):
        yield from torch.randperm(n, generator=generator)[: n - n % batch_size].split(batch_size)


@torch.no_grad()
def _accuracy(body: nn.Module, head: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    body.eval()
    right = [head(body(x)).argmax(1) == y for x, y in zip(inputs.split(100), labels.split(100), strict=True)]
    return 100 * torch.cat(right).double().mean().item()


def _head(family: _Family, task: str) -> nn.Linear:
    return nn.Linear(family.n_features, family.tasks[task])


def _initialise(module: nn.Module, seed: int) -> None:
    """As torch does, from ``seed`` alone."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        for part in module.modules():
            if isinstance(part, nn.Linear | nn.Conv2d):
                part.reset_parameters()


# Images.

_TURNS: dict[str, Callable[[Tensor], Tensor]] = {
    "turned": lambda x: x.rot90(1, (2, 3)).contiguous(),
    "negative": lambda x: 1 - x,
}


def _image_body() -> nn.Sequential:
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, stride=2, padding=2),
        nn.ReLU(),
        nn.Conv2d(32, 64, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Conv2d(64, 128, 3, stride=2, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(2048, 256),
        nn.ReLU(),
    )


def _image_rows(task: str, part: str, seed: int, n_training: int = 3000) -> _Rows:
    source, _, turn = task.partition("-")
    form = data.load(source)
    if part == "test":
        pixels, labels = form.x_test[:1000], form.y_test[:1000]
    else:
        held_out, others = np.split(np.random.default_rng(0).permutation(len(form.y_train)), [1500])
        parts = {
            "validation": held_out[:1000],
            "unlabelled": held_out[1000:],
            "training": np.random.default_rng(seed).permutation(others)[:n_training],
        }
        chosen = parts[part]
        pixels, labels = form.x_train[chosen], form.y_train[chosen]
    x = torch.tensor(pixels, dtype=torch.float32) / 255
    if x.ndim == 4:  # colour, 32 x 32
        x = (x[:, 2:30, 2:30] * torch.tensor([0.299, 0.587, 0.114])).sum(-1)
    x = x[:, None]
    return (_TURNS[turn](x) if turn else x), torch.tensor(labels)


def _image_base(seed: int) -> _State:
    number = seed % 3
    (base,) = _made_once({f"images base {number}": functools.partial(_pretrain, number)})
    return base


def _pretrain(number: int) -> _State:
    """A body that tells the thirty classes of the three sets apart, a little."""
    rows, order, weights = spawn(2**20 + number, 3)  # no seed of a trial is as large
    body, head = _image_body(), nn.Linear(256, 30)
    _initialise(nn.ModuleList([body, head]), weights)
    sets = [_image_rows(source, "training", rows, n_training=4000) for source in IMAGE_SOURCES]
    inputs = torch.cat([x for x, _ in sets])
    labels = torch.cat([y + 10 * first for first, (_, y) in enumerate(sets)])
    _train(body, head, inputs, labels, seed=order, epochs=1, batch_size=64, lr=2e-3, head_lr=2e-3)
    return body.state_dict()


_IMAGES = _Family(
    name="images",
    tasks=dict.fromkeys([*IMAGE_SOURCES, "mnist-turned", "fashion_mnist-negative", "cifar10-turned"], 10),
    n_features=256,
    body=_image_body,
    base=_image_base,
    rows=_image_rows,
    recipe={"epochs": 2, "batch_size": 50, "lr": 1e-3, "head_lr": 1e-3},
)

# Texts.

_N_TOKENS, _N_LOWER, _N_UPPER = 20, 4, 2
_SIZES = {"test": 200, "validation": 100, "unlabelled": 500, "training": 1000}


class _Encoder(nn.Module):
    """Some layers of MiniLM: from states of tokens, zeros where there is none, to the mean of what they become."""

    def __init__(self, n_layers: int):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(384, 12, 1536, 0.0, "gelu", 1e-12, batch_first=True) for _ in range(n_layers)
        )

    def states(self, x: Tensor) -> Tensor:
        padding = (x == 0).all(-1)
        for layer in self.layers:
            x = layer(x, src_key_padding_mask=padding)
        return x.masked_fill(padding[..., None], 0.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.states(x).sum(1) / (x != 0).any(-1).sum(1, keepdim=True)


def _text_base(seed: int) -> _State:
    """The published upper layers; the same for every seed."""
    (base,) = _made_once({"texts base": functools.partial(_published_layers, _N_LOWER, _N_LOWER + _N_UPPER)})
    return base


def _published_layers(start: int, end: int) -> _State:
    """Layers of MiniLM under the names that torch has for the parts of its own."""
    names = {
        "self_attn.out_proj": "attention.output.dense",
        "norm1": "attention.output.LayerNorm",
        "linear1": "intermediate.dense",
        "linear2": "output.dense",
        "norm2": "output.LayerNorm",
    }
    weights, state = _weights(), {}
    for number, kind in itertools.product(range(start, end), ("weight", "bias")):
        here, there = f"layers.{number - start}", f"encoder.layer.{number}"
        joined = [weights[f"{there}.attention.self.{part}.{kind}"] for part in ("query", "key", "value")]
        state[f"{here}.self_attn.in_proj_{kind}"] = torch.cat(joined)
        state |= {f"{here}.{own}.{kind}": weights[f"{there}.{name}.{kind}"] for own, name in names.items()}
    return state


def _weights() -> _State:
    return load_file(data.load("minilm_l6").folder / "model.safetensors")


def _text_rows(task: str, part: str, seed: int, n_training: int = 480) -> _Rows:
    (kept,) = _made_once({f"texts {task} {part}": functools.partial(_lower_states, task, part)})
    inputs, labels = kept["inputs"], kept["labels"]
    if part == "training":
        chosen = torch.from_numpy(np.random.default_rng(seed).choice(len(labels), n_training, replace=False))
        inputs, labels = inputs[chosen], labels[chosen]
    return inputs, labels


@torch.no_grad()
def _lower_states(task: str, part: str) -> _State:
    """What the lower layers make of the texts of a part; of texts that begin alike, only the first is in any."""
    words, labels = _labelled_texts(task)
    tokens = _tokenizer().encode_batch([text[:500] for text in words])
    first = {tuple(tokens[i].ids): i for i in reversed(range(len(tokens)))}
    order = np.random.default_rng(0).permutation(sorted(first.values()))
    end = dict(zip(_SIZES, itertools.accumulate(_SIZES.values()), strict=True))[part]
    chosen = order[end - _SIZES[part] : end]
    x = _embedded(*(torch.tensor([getattr(tokens[i], kind) for i in chosen]) for kind in ("ids", "attention_mask")))
    lower = _Encoder(_N_LOWER).eval()
    lower.load_state_dict(_published_layers(0, _N_LOWER))
    return {"inputs": torch.cat([lower.states(some) for some in x.split(50)]), "labels": torch.tensor(labels[chosen])}


def _embedded(ids: Tensor, mask: Tensor) -> Tensor:
    """What the first layer gets: token, position and kind of each token, normalised; zeros where there is none."""
    weights = _weights()
    word, position, kind, scale, shift = (
        weights[f"embeddings.{name}"]
        for name in (
            "word_embeddings.weight",
            "position_embeddings.weight",
            "token_type_embeddings.weight",
            "LayerNorm.weight",
            "LayerNorm.bias",
        )
    )
    x = layer_norm(word[ids] + position[: ids.shape[1]] + kind[0], (word.shape[1],), scale, shift, 1e-12)
    return x * mask[..., None]


def _labelled_texts(task: str) -> tuple[Sequence[str], np.ndarray]:
    if task == "bbc":
        news = data.load("bbc_news")
        return news.texts, news.y
    if task == "spam":
        mails = data.load("spam_assassin")
        return [mail.partition("\n\n")[2] for mail in mails.texts], mails.y  # headers would tell at once
    rated = data.load("sentiment4")
    chosen = np.flatnonzero((rated.domain == rated.domain_names.index(task)) & (rated.ratings != 0))
    return [rated.texts[i] for i in chosen], (rated.ratings[chosen] > 0).astype(np.int64)


def _tokenizer():
    try:
        from tokenizers import Tokenizer
    except ImportError as error:
        raise MissingExtraError('The suite of texts needs a tokenizer: pip install "heedful[llm]".') from error
    tokenizer = Tokenizer.from_file(str(data.load("minilm_l6").folder / "tokenizer.json"))
    tokenizer.enable_truncation(_N_TOKENS)
    tokenizer.enable_padding(length=_N_TOKENS)
    return tokenizer


_TEXTS = _Family(
    name="texts",
    tasks={"bbc": 5, "spam": 2, "movie": 2, "tweets": 2, "amazon": 2, "nyt": 2},
    n_features=384,
    body=functools.partial(_Encoder, _N_UPPER),
    base=_text_base,
    rows=_text_rows,
    recipe={"epochs": 2, "batch_size": 16, "lr": 6e-4, "head_lr": 1e-3},
)
