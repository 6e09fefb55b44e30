"""Do weights quantized in view of what attention does with them hurt less than weights quantized layer by layer?

Every arm quantizes the same model to the same bits, from the same calibration tokens, without training:

* ``rtn``: each weight is rounded to the nearest value of its row's grid;
* ``gptq``: the rounding errors of a row compensate each other, as far as the layer's own output shows them;
* ``boa``: as far as the output of attention shows them;
* ``boa_identity_v``: the same without the row factor of values, as in the code that the paper's authors released.

All of them but ``rtn`` choose whether to begin with the columns that matter most. A task says the rest: which model; how many
bits; the projections of attention alone, or all linear layers; and whether activations are rounded too, behind a rotation
that spreads their outliers (W3A4: weights of 3 bits, activations of 4). The error of attention is that of each module by
itself, given what reaches it in the model as it was.

The tiny Llama of a seed is trained by whichever trial needs it first, whose seconds are therefore more than its own, and
kept. SmolLM2's weights come from a 4-bit quantization, so they are quantized to fewer bits; and of its 30 blocks the first
four are, since all would take longer than a study may.
"""

import copy
import dataclasses
import functools
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Int
from torch import Tensor, nn

from heedful import data
from heedful._decoders import describe_decoder, run_by_block
from heedful.compress import QuantConfig, QuantizedWeight, fake_quantize_activations, quantize, rotate_model
from heedful.compress._texts import calibration_tokens
from heedful.errors import MissingExtraError
from heedful.evidence import Arm, Budget, Claim, Metric, Outcome, Study, Task
from heedful.studies._byte_llama import Pieces, addresses, bits_per_byte, byte_tokenizer, tiny_llama

_Split = Literal["validation", "test"]

ATTENTION = ("lm_head", "*.mlp.*")
ALL = ("lm_head",)


@runtime_checkable
class QuantizationTask(Protocol):
    """A model to quantize, what it is calibrated with, and what it is scored by.

    ``Quantization`` is one already::

        # my_tasks.py
        from heedful.studies.boa import Pieces, Quantization


        def build(*, split, seed):
            calibration = my_tokens(seed)  # LongTensor (sequences, length)
            ids, n_bytes = my_validation() if split == "validation" else my_test()
            return Quantization(my_model, calibration, Pieces(ids, n_bytes), bits=3)


        def my_model(budget):
            return AutoModelForCausalLM.from_pretrained("my-model").eval()

    ``model(budget)`` makes a new object each time; only that of the shipped tiny Llama depends on the budget, which says how
    long it is trained. ``n_bytes`` is how many bytes all tokens but the first of each sequence spell. ``exclude`` names
    linear layers that stay as they are. ``activation_bits`` is None, or the bits of the inputs of linear layers and of keys
    and values; then the model is rotated first.
    """

    calibration: Int[Tensor, "n length"]
    held_out: Pieces
    bits: int
    exclude: Sequence[str]
    activation_bits: int | None

    def model(self, budget: Budget) -> Any: ...


@dataclasses.dataclass(frozen=True, eq=False)
class Quantization:
    """A ``QuantizationTask``, given how to make its model."""

    model: Callable[[Budget], Any]
    calibration: Int[Tensor, "n length"]
    held_out: Pieces
    _: dataclasses.KW_ONLY
    bits: int
    exclude: Sequence[str] = ALL
    activation_bits: int | None = None


def run(task: QuantizationTask, *, budget: Budget, seed: int, **settings: Any) -> Outcome:
    """The arm of every method: quantize once, then measure. The seed draws the rotation, if there is one."""
    model = task.model(budget)
    if task.activation_bits is not None:
        rotate_model(model, random_state=seed)
    before = copy.deepcopy(model)
    config = QuantConfig(bits=task.bits, exclude=tuple(task.exclude), **settings)
    quantized = quantize(model, task.calibration, config)
    if task.activation_bits is not None:
        fake_quantize_activations(model, task.activation_bits, kv_bits=task.activation_bits)
    errors = attention_errors(before, model, task.held_out.ids, quantized.layers)
    n_bits, n_weights = _size(quantized.layers, task.bits)
    return Outcome(
        metrics={
            "attention_error": sum(errors.values()) / len(errors),
            "bits_per_byte": bits_per_byte(model, task.held_out),
            "quantize_seconds": quantized.report.seconds,
        },
        costs={
            "calibration tokens": task.calibration.numel(),
            "bits a weight": n_bits / n_weights,
            "MB of quantized layers": n_bits / 8e6,
        },
        curves={"error of attention by block, %": list(errors.items())},
    )


@torch.no_grad()
def attention_errors(
    before: Any, after: Any, ids: Int[Tensor, "n length"], changed: Collection[str], *, batch_size: int = 8
) -> dict[int, float]:
    """How far the output of attention moved: 100 ‖MHA_after(X) − MHA_before(X)‖² / ‖MHA_before(X)‖², by number of the block.

    ``X`` is what reaches the block in the model ``before``, so that each module is measured by itself. Measured are the
    blocks of whose attention a layer is named in ``changed``.
    """
    others = describe_decoder(after).layers
    numbers = [
        number
        for number, layer in enumerate(others)
        if not {part.name for part in (layer.q, layer.k, layer.v, layer.o)}.isdisjoint(changed)
    ]
    errors = {}
    for number, block in zip(range(max(numbers) + 1), run_by_block(before, ids.split(batch_size)), strict=False):
        if number in numbers:
            squares: list[tuple[float, float]] = []
            with block.layer.attention.register_forward_hook(
                functools.partial(_compare, others[number].attention, squares), with_kwargs=True
            ):
                for _ in block.run():
                    pass
            moved, size = map(sum, zip(*squares, strict=True))
            errors[number] = 100 * moved / size
    return errors


def _compare(
    other: nn.Module, squares: list[tuple[float, float]], module: nn.Module, args: Any, kwargs: Any, output: Any
) -> None:
    """A hook: what another attention makes of the same inputs, and how far that is from the output."""
    out = output[0]
    squares.append((float((other(*args, **kwargs)[0] - out).square().sum()), float(out.square().sum())))


def _size(layers: Mapping[str, QuantizedWeight], bits: int) -> tuple[int, int]:
    """Bits that the layers take, grids included, and how many weights they have."""
    per_grid = [layer.grid.scale.numel() * (8 * layer.grid.scale.element_size() + bits) for layer in layers.values()]
    n_weights = sum(layer.codes.numel() for layer in layers.values())
    return bits * n_weights + sum(per_grid), n_weights


# Tasks: which model × how many bits × which layers.


def tiny(
    *,
    split: _Split,
    seed: int,
    bits: int,
    exclude: Sequence[str] = ALL,
    activation_bits: int | None = None,
) -> Quantization:
    """The tiny Llama, whose weights and whose 4 KB of calibration text the seed draws; 8 KB are scored."""
    calibration = calibration_tokens(
        addresses("calibration"), byte_tokenizer, n_samples=32, length=128, random_state=seed
    )
    ids = calibration_tokens(addresses(split), byte_tokenizer, n_samples=64, length=128)
    held_out = Pieces(ids, ids[:, 1:].numel())
    return Quantization(
        functools.partial(_tiny_model, seed),
        calibration,
        held_out,
        bits=bits,
        exclude=exclude,
        activation_bits=activation_bits,
    )


def _tiny_model(seed: int, budget: Budget) -> Any:
    return tiny_llama(seed=seed, steps=budget.steps)


def smollm2(*, split: _Split, seed: int, bits: int, exclude: Sequence[str] = ALL, n_blocks: int = 4) -> Quantization:
    """The first blocks of SmolLM2-135M-Instruct, whose 4096 calibration tokens the seed draws.

    Scored are 512 tokens of addresses and 512 of the Brown corpus, a kind of text that it is not calibrated on.
    """
    stay = (*exclude, *(f"*.layers.{number}.*" for number in range(n_blocks, 30)))
    return Quantization(_smollm2_model, _smollm2_calibration(seed), _smollm2_held_out(split), bits=bits, exclude=stay)


@functools.cache
def _smollm2_calibration(seed: int) -> Int[Tensor, "n length"]:
    return calibration_tokens(
        addresses("calibration"), _smollm2().tokenizer, n_samples=16, length=256, random_state=seed
    )


@functools.cache
def _smollm2_held_out(split: _Split) -> Pieces:
    tokenizer = _smollm2().tokenizer
    texts = addresses(split), data.load("brown").texts[0 if split == "test" else 12 :: 25]  # twenty, of many genres
    ids = torch.cat([calibration_tokens(part, tokenizer, n_samples=2, length=256) for part in texts])
    return Pieces(ids, sum(len(tokenizer.decode(row[1:], skip_special_tokens=True).encode()) for row in ids))


def _smollm2_model(budget: Budget) -> Any:
    return copy.deepcopy(_smollm2().model)


def whole_smollm2(*, split: _Split, seed: int) -> Quantization:
    """All linear layers in all blocks of SmolLM2, at 3 bits.

    No task of the study itself, because it takes longer than that may. Run it with
    ``heedful study boa --quick --task heedful.studies.boa:whole_smollm2``.
    """
    return smollm2(split=split, seed=seed, bits=3, n_blocks=30)


class _Pretrained(NamedTuple):
    model: Any
    tokenizer: Any


@functools.cache
def _smollm2() -> _Pretrained:
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
    except ImportError as error:
        raise MissingExtraError('SmolLM2 needs: pip install "heedful[llm]".') from error
    folder = data.load("smollm2_135m").folder
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True).eval()
    # Texts are longer than what it was trained for; pieces of them are not.
    return _Pretrained(model, AutoTokenizer.from_pretrained(folder, local_files_only=True, model_max_length=1 << 30))


_TINY = {
    "tiny_llama_2bit_attention": functools.partial(tiny, bits=2, exclude=ATTENTION),
    "tiny_llama_3bit_attention": functools.partial(tiny, bits=3, exclude=ATTENTION),
    "tiny_llama_2bit_all": functools.partial(tiny, bits=2),
    "tiny_llama_3bit_all": functools.partial(tiny, bits=3),
    "tiny_llama_w3a4_rotated": functools.partial(tiny, bits=3, activation_bits=4),
}
_SMOLLM2 = {f"smollm2_{bits}bit_attention": functools.partial(smollm2, bits=bits, exclude=ATTENTION) for bits in (2, 3)}
_SOURCES = {**dict.fromkeys(_TINY, ("sotu",)), **dict.fromkeys(_SMOLLM2, ("sotu", "brown", "smollm2_135m"))}
_ATTENTION_2BIT = ("tiny_llama_2bit_attention", "smollm2_2bit_attention")
_3BIT = ("tiny_llama_3bit_attention", "tiny_llama_3bit_all", "smollm2_3bit_attention")
_GRID = {"act_order": ["off", "columns"]}


def _arm(**settings: Any) -> Arm:
    return Arm(functools.partial(run, **settings), grid=_GRID, aware=settings["method"] == "boa")


study = Study(
    slug="boa",
    question="Do weights quantized in view of what attention does with them hurt less than those quantized layer by layer?",
    tasks={name: Task(build, data=data.checksums(*_SOURCES[name])) for name, build in {**_TINY, **_SMOLLM2}.items()},
    arms={
        "rtn": Arm(functools.partial(run, method="rtn"), untuned="rounds each weight by itself, in no order"),
        "gptq": _arm(method="gptq"),
        "boa_identity_v": _arm(method="boa", value_rows="identity"),
        "boa": _arm(method="boa"),
    },
    metrics=[
        Metric("attention_error", "%", better="lower"),
        Metric("bits_per_byte", better="lower"),
        Metric("quantize_seconds", "s", better="lower", timing=True),
    ],
    claims=[
        Claim("boa", beats="gptq", on="attention_error", tasks=_ATTENTION_2BIT),
        Claim("boa", beats="gptq", on="bits_per_byte", tasks=_ATTENTION_2BIT),
        Claim("boa", beats="gptq", on="bits_per_byte", tasks=("tiny_llama_2bit_all", "tiny_llama_w3a4_rotated")),
        Claim("boa", beats="gptq", on="bits_per_byte", tasks=_3BIT, exploratory=True),
        Claim("boa", beats="boa_identity_v", on="attention_error", exploratory=True),
        Claim("boa", beats="rtn", on="bits_per_byte", exploratory=True),
    ],
    budgets={
        "quick": Budget(seeds=3, steps=40, tasks=("tiny_llama_2bit_attention",)),
        "full": Budget(seeds=5, steps=450),
    },
    protocol=QuantizationTask,
    unit="calibration tokens",
)
