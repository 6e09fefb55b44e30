"""How to quantize: the settings of ``quantize`` and ``kron_quantize``."""

import dataclasses
from collections.abc import Sequence
from typing import Literal

from heedful._validation import require_choice, require_number
from heedful.errors import ParameterError


@dataclasses.dataclass(frozen=True)
class QuantConfig:
    """How weights are quantized.

    Parameters
    ----------
    bits : int
        Bits a weight, 2 to 8. Attention heeded pays most at 2 and 3.
    group_size : int
        How many inputs of a row share a scale, a divisor of their number, usually 128; -1 for the whole row.
    symmetric : bool
        Whether the zero point is fixed at the middle code, 2^(bits−1), or follows the range of the weights.
    method : {"boa", "gptq", "rtn"}
        Errors measured at the output of attention; at the output of each layer; or rounding to nearest.
    grid : {"hessian", "mse", "minmax"}
        How scales are chosen, before the weights are: those of least layer output error, of least weight error, or such
        that every weight is within the range.
    damping : float
        What is added to the diagonals of both factors, relative to their mean, 0 to 1; usually 0.01.
    rows_per_step : int
        Rows of a head that are quantized before the next ones compensate for them, >= 1. 1 is BoA; 16 takes fewer steps;
        as many as the head has are GPTQ.
    act_order : {"off", "rows", "columns", "both", "auto"}
        Begin with the rows or columns of largest curvature. "auto" tries what applies and keeps the least error.
    value_rows : {"out_proj", "identity"}
        The row factor of the value projection: W_outᵀ W_out, as in the paper, or none, as in the authors' code.
    value_hessian : {"per_head", "shared"}
        The column factor of the value projection: X AᵀA Xᵀ for each head (heads · d² numbers), or X Xᵀ.
    exclude : sequence of str
        Linear layers that stay as they are, each a name, a glob or ``re:…``.
    """

    bits: int = 4
    group_size: int = -1
    symmetric: bool = False
    method: Literal["boa", "gptq", "rtn"] = "boa"
    grid: Literal["hessian", "mse", "minmax"] = "hessian"
    damping: float = 0.01
    rows_per_step: int = 1
    act_order: Literal["off", "rows", "columns", "both", "auto"] = "off"
    value_rows: Literal["out_proj", "identity"] = "out_proj"
    value_hessian: Literal["per_head", "shared"] = "per_head"
    exclude: Sequence[str] = ("lm_head",)

    def __post_init__(self):
        require_number(self.bits, "bits", low=2, high=8, integer=True)
        if self.group_size != -1:
            require_number(self.group_size, "group_size", low=1, integer=True)
        if not isinstance(self.symmetric, bool):
            raise ParameterError(f"symmetric must be True or False; got {self.symmetric!r}.")
        require_choice(self.method, "method", ("boa", "gptq", "rtn"))
        require_choice(self.grid, "grid", ("hessian", "mse", "minmax"))
        require_number(self.damping, "damping", low=0, high=1)
        require_number(self.rows_per_step, "rows_per_step", low=1, integer=True)
        require_choice(self.act_order, "act_order", ("off", "rows", "columns", "both", "auto"))
        require_choice(self.value_rows, "value_rows", ("out_proj", "identity"))
        require_choice(self.value_hessian, "value_hessian", ("per_head", "shared"))
        names = self.exclude
        if (
            isinstance(names, str)
            or not isinstance(names, Sequence)
            or not all(isinstance(name, str) for name in names)
        ):
            raise ParameterError(
                f"exclude must be a sequence of names or patterns, such as ['lm_head']; got {names!r}."
            )
        if self.group_size != -1 and self.act_order in ("columns", "both"):
            raise ParameterError(
                f"act_order={self.act_order!r} and groups are incompatible: neighbouring inputs that share a scale would be "
                "torn apart. Choose group_size=-1, or act_order 'off', 'rows' or 'auto'."
            )
