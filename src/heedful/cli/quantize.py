"""``heedful quantize``: a language model in 2 to 8 bits a weight, calibrated on texts."""

import dataclasses
import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from heedful.errors import FileFormatError, MissingExtraError, ParameterError

if TYPE_CHECKING:
    from heedful.compress import QuantizedModel


def quantize(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A Hugging Face folder.")],
    out: Annotated[Path, typer.Option("--out", "-o", metavar="DIR", help="The folder of the quantized model.")],
    calibration: Annotated[
        Path, typer.Option("--calibration", metavar="TEXTS", help='A .txt file, or .jsonl with a "text" in each line.')
    ],
    method: Annotated[
        str, typer.Option("--method", help="boa heeds attention; gptq, each layer alone; rtn, nothing.")
    ] = "boa",
    bits: Annotated[int, typer.Option("--bits", help="Bits a weight, 2 to 8.")] = 4,
    group_size: Annotated[int, typer.Option("--group-size", help="Inputs that share a scale; -1 is a whole row.")] = -1,
    symmetric: Annotated[bool, typer.Option("--symmetric", help="Zero at the middle code.")] = False,
    grid: Annotated[str, typer.Option("--grid", help="How scales are chosen: hessian, mse or minmax.")] = "hessian",
    act_order: Annotated[str, typer.Option("--act-order", help="off, rows, columns, both or auto.")] = "off",
    value_hessian: Annotated[
        str, typer.Option("--value-hessian", help="per-head, or shared: less memory, values heed attention less.")
    ] = "per-head",
    rows_per_step: Annotated[int, typer.Option("--rows-per-step", help="Rows of a head at a time.")] = 1,
    damping: Annotated[float, typer.Option("--damping", help="Added to diagonals, relative to their mean.")] = 0.01,
    exclude: Annotated[
        str, typer.Option("--exclude", metavar="NAMES", help="Layers that stay: names, globs, re:…, with commas.")
    ] = "lm_head",
    rotate: Annotated[bool, typer.Option("--rotate", help="Spread outliers over all channels before.")] = False,
    n_samples: Annotated[int, typer.Option("--n-samples", help="Stretches of text to calibrate on.")] = 128,
    length: Annotated[int, typer.Option("--length", help="Tokens of each.")] = 2048,
    format: Annotated[
        str, typer.Option("--format", help="compressed-tensors, which servers open, or dequantized.")
    ] = "compressed-tensors",
    device: Annotated[str, typer.Option("--device", help="Where the model runs, such as cpu or cuda.")] = "cpu",
    work: Annotated[
        Path | None, typer.Option("--work", metavar="DIR", help="Keeps finished blocks, to go on from.")
    ] = None,
    fresh: Annotated[bool, typer.Option("--fresh", help="Do not go on from blocks in --work.")] = False,
    overwrite: Annotated[bool, typer.Option("--overwrite", help="Replace the checkpoint in DIR.")] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, help="Draws the texts and the rotation.")] = 0,
    as_json: Annotated[bool, typer.Option("--json", help="Print the report as JSON.")] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="No progress bars.")] = False,
) -> None:
    """Quantize the linear layers of a language model, block by block, without gradients.

    Prints what each block loses, relative to leaving its layers out, beside rounding to nearest and GPTQ at the same bits.
    DIR also holds quantize_report.json, with every layer.

    Example: heedful quantize llama -o llama-3bit --calibration texts.jsonl --bits 3
    """
    from heedful._files import write_atomic
    from heedful._validation import require_choice
    from heedful.cli._progress import messages
    from heedful.cli._tables import refuse_existing
    from heedful.compress import QuantConfig, rotate_model
    from heedful.compress import quantize as quantize_model
    from heedful.compress._texts import calibration_tokens

    modes: dict[str, Any] = {"method": method, "grid": grid, "act_order": act_order}
    modes["value_hessian"] = value_hessian.replace("-", "_")
    config = QuantConfig(
        bits=bits,
        group_size=group_size,
        symmetric=symmetric,
        damping=damping,
        rows_per_step=rows_per_step,
        exclude=tuple(filter(None, exclude.split(","))),
        **modes,
    )
    require_choice(format, "--format", ("compressed-tensors", "dequantized"))
    refuse_existing(out, overwrite=overwrite)
    with messages(quiet=quiet):
        network, tokenizer = _load(model, device)
        tokens = calibration_tokens(calibration, tokenizer, n_samples=n_samples, length=length, random_state=seed)
        if rotate:
            rotate_model(network, random_state=seed)
        if fresh and work is not None:
            for block in work.glob("block-*.safetensors"):
                block.unlink()
        quantized = quantize_model(network, tokens, config, work_dir=work)
        quantized.save_pretrained(out, format=format, overwrite=overwrite)
    report = quantized.report.to_dict() | {"rotated": rotate, "config": dataclasses.asdict(config), "out": str(out)}
    with write_atomic(out / "quantize_report.json", overwrite=True) as file:
        file.write_text(json.dumps(report, indent=2) + "\n")
    if as_json:
        print(json.dumps(report, indent=2))
    else:
        _show(quantized, out)


def _load(folder: Path, device: str) -> tuple[Any, Any]:
    """The model in its own dtype, and its tokenizer."""
    try:
        from transformers import AutoModelForCausalLM, AutoTokenizer
        from transformers.utils import logging
    except ImportError as error:
        raise MissingExtraError('Quantizing a model needs transformers: pip install "heedful[llm]".') from error
    import torch

    if not (folder / "config.json").is_file():
        if not folder.exists():
            raise FileNotFoundError(f"{folder} does not exist. Give the folder of a model; download it first.")
        raise FileFormatError(f"{folder} holds no model: it has no config.json.")
    try:
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:  # torch asserts that it was built for a device
        raise ParameterError(
            f"--device: there is no {device!r} here ({str(error).splitlines()[0]}). Try cpu."
        ) from error
    logging.disable_progress_bar()
    try:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype="auto", local_files_only=True)
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except (ValueError, OSError) as error:  # an unknown family, or files that are missing or damaged
        raise FileFormatError(f"{folder} cannot be loaded: {error!s:.500}") from error
    return model.to(device), tokenizer


def _show(quantized: "QuantizedModel", out: Path) -> None:
    """A line for each block: mean losses over its layers."""
    from statistics import mean

    from rich.console import Console
    from rich.table import Table

    report = quantized.report
    table = Table(box=None, pad_edge=False, header_style="bold")
    columns = {report.method: "loss"} | ({"gptq": "loss_gptq"} if report.method == "boa" else {})
    columns |= {} if report.method == "rtn" else {"rtn": "loss_rtn"}
    for name in ("block", *columns):
        table.add_column(name, justify="right", no_wrap=True)
    for block in sorted({layer.block for layer in report.layers}):
        layers = [layer for layer in report.layers if layer.block == block]
        table.add_row(
            str(block), *(f"{mean(getattr(layer, name) for layer in layers):.3%}" for name in columns.values())
        )
    Console().print(table)
    n = len(quantized.layers)
    print(f"{report.method}: {n} layers in {report.bits} bits, {report.seconds:.0f} s, written to {out}")
