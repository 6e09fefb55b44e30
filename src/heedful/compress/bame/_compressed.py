"""Linear layers on the CPU that multiply by their active weights only.

The parameter stays dense, so that any optimizer serves it. For a product, its active entries are gathered into a CSR matrix
whose structure is kept until the mask changes.
"""

import dataclasses
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from heedful.compress._sparsity import Mask, csr_matrix, own_weight
from heedful.errors import UnsupportedModelError


def require_compressible(layers: Mapping[str, nn.Module]) -> None:
    """Raise ``UnsupportedModelError`` unless all are plain linear layers on the CPU."""
    for name, layer in layers.items():
        if type(layer) is not nn.Linear or layer.weight.device.type != "cpu":
            raise UnsupportedModelError(
                f'backend="compressed" multiplies nn.Linear layers on the CPU; layer {name!r} is a '
                f'{type(layer).__name__} on {own_weight(layer).device}. Exclude it, or use backend="masked".'
            )


def compress_forward(layer: nn.Module) -> None:
    """Make a linear layer use CSR products once its weight is masked; ``restore_forward`` undoes it."""
    layer.__class__ = CompressedLinear  # before it is parametrized, which makes a subclass of its class


def restore_forward(layer: nn.Module) -> None:
    if isinstance(layer, CompressedLinear):
        layer.__class__ = nn.Linear  # type: ignore[assignment]


@dataclasses.dataclass(frozen=True)  # not a tuple: autocast would take it apart
class Structure:
    """Where the active entries of a weight (out, in) lie, row by row, and where they lie in its transpose."""

    mask: Bool[Tensor, "out in"]  # that it was read from
    version: int  # and its version then
    rows: Int[Tensor, " starts"]
    columns: Int[Tensor, " nnz"]
    entries: Int[Tensor, " nnz"]  # in the flattened weight
    rows_t: Int[Tensor, " starts_t"]
    columns_t: Int[Tensor, " nnz"]
    order_t: Int[Tensor, " nnz"]  # value k of the transpose is value order_t[k] of the weight


_structures: weakref.WeakKeyDictionary[Mask, Structure] = weakref.WeakKeyDictionary()


def structure_of(module: Mask) -> Structure:
    """O(1) as long as the mask stays, else O(nnz log nnz)."""
    known = _structures.get(module)
    if known is None or known.mask is not module.mask or known.version != module.mask._version:
        known = _structures[module] = read_structure(module.mask)
    return known


def read_structure(mask: Bool[Tensor, "out in"]) -> Structure:
    entries = mask.flatten().nonzero().squeeze(1)
    row, column = entries // mask.shape[1], entries % mask.shape[1]
    order = column.argsort(stable=True)
    return Structure(
        mask, mask._version, _starts(mask.sum(dim=1)), column, entries, _starts(mask.sum(dim=0)), row[order], order
    )


def _starts(counts: Tensor) -> Tensor:
    return nn.functional.pad(counts.cumsum(0), (1, 0))


class CompressedLinear(nn.Linear):
    """A masked ``nn.Linear`` whose products skip what is inactive, unless its gradient must be dense."""

    @torch.compiler.disable  # torch.compile leaves it as it is: tracing CSR products crashes
    def forward(self, input: Tensor) -> Tensor:
        weight, mask = self._masked()
        if mask.dense_grad:
            return super().forward(input)
        x = input.reshape(-1, self.in_features)
        y = _SparseProduct.apply(x, weight, structure_of(mask))
        y = y.view(*input.shape[:-1], self.out_features)
        return y if self.bias is None else y + self.bias

    def _masked(self) -> tuple[nn.Parameter, Mask]:
        parametrization: Any = self.parametrizations.weight  # type: ignore[union-attr]
        return parametrization.original, parametrization[0]


class _SparseProduct(torch.autograd.Function):
    """x Wᵀ for the active entries of W; the gradient of the others is 0."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)  # CSR products know no half precision
    def forward(ctx, x: Float[Tensor, "batch in"], weight: Float[Tensor, "out in"], structure: Structure):
        ctx.save_for_backward(x, weight)
        ctx.structure = structure
        values = weight.flatten()[structure.entries]
        ctx.values = values
        return torch.sparse.mm(csr_matrix(structure.rows, structure.columns, values, weight.shape), x.T).T

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx, grad: Float[Tensor, "batch out"]):
        x, weight = ctx.saved_tensors
        s = ctx.structure
        dx = dw = None
        if ctx.needs_input_grad[0]:
            transposed = csr_matrix(s.rows_t, s.columns_t, ctx.values[s.order_t], weight.shape[::-1])
            dx = torch.sparse.mm(transposed, grad.T).T
        if ctx.needs_input_grad[1]:
            pattern = csr_matrix(s.rows, s.columns, torch.zeros_like(ctx.values), weight.shape)
            products = torch.sparse.sampled_addmm(pattern, grad.T, x, beta=0)
            dw = torch.zeros_like(weight)
            dw.view(-1)[s.entries] = products.values()
        return dx, dw, None
