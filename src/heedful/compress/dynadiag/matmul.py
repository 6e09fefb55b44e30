"""The product with a diagonally sparse matrix, with gradients, by the backend that measured fastest."""

import warnings
from typing import Literal

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.nn import Buffer, Parameter

from heedful._validation import require_choice, require_number
from heedful.compress.dynadiag import _backends
from heedful.compress.dynadiag._tuning import choose_backend, tune_backend
from heedful.compress.dynadiag.pattern import check_offsets, check_values
from heedful.errors import HeedfulWarning, InputError, ParameterError

__all__ = ["diagonal_matmul", "tune_backend"]


def diagonal_matmul(
    x: Float[Tensor, "*batch in"],
    values: Float[Tensor, "k d"],
    offsets: Int[Tensor, " k"],
    out_features: int,
    *,
    backend: Literal["auto", "dense", "csr", "bcsr", "numba", "triton"] = "auto",
) -> Float[Tensor, "*batch out"]:
    """Apply the out × in matrix W that holds ``values`` on its wrapped diagonals ``offsets`` and zeros elsewhere: x Wᵀ.

    With D = min(out, in) and P = max(out, in), diagonal o holds the entries ((d + o) mod P, d) of a tall matrix (out >=
    in) and (d, (d + o) mod P) of a wide one, d = 0 … D - 1. The result is differentiable in ``x`` and ``values``, once.

    Parameters
    ----------
    x : Float[Tensor, "*batch in"]
        Any number of leading dimensions, any of them empty; any strides.
    values : Float[Tensor, "k d"]
        Row k holds the D entries of diagonal ``offsets[k]``. Of the type of ``x``; autocast casts both, as for ``linear``.
    offsets : Int[Tensor, " k"]
        Distinct numbers in [0, P), in any order, on the device of ``x``. They may change from call to call, without
        recompilation under ``torch.compile``; backends keep what they derive from the last few.
    out_features : int
        Rows of W, >= 1.
    backend : {"auto", "dense", "csr", "bcsr", "numba", "triton"}
        How it is computed; all agree up to rounding.

        * "dense": the matrix is filled and multiplied: the only one that allocates out × in numbers.
        * "csr": a sparse matrix of torch (MKL, cuSPARSE), whose pattern is kept while offsets stay.
        * "bcsr": the square blocks of 16, 32 or 64 that the diagonals touch (see ``block_fill``), on a GPU with tensor
          cores; good where offsets come in aligned runs.
        * "numba": kernels for the CPU, with as many threads as torch may use. Extra ``kernels``.
        * "triton": kernels for CUDA devices. Extra ``kernels``.
        * "auto": the fastest in the nearest of the cases that were measured, see ``tune_backend``. On a device without
          measurements, what is fastest at the first call with such sizes.

    Returns
    -------
    Float[Tensor, "*batch out"]
        Of the type of ``x``. Half precision adds up in float32; on a CPU, float16 is computed in float32, with a warning.

    Raises
    ------
    InputError
        If shapes, types or devices do not fit, or an offset is out of range or given twice.
    ParameterError
        If the backend does not run on the device of ``x``, or a gradient of a gradient is asked for.
    MissingExtraError
        If a package that the backend needs is not installed.

    Notes
    -----
    *Cost.* batch · k · D multiplications forward, twice as many backward, where a dense layer has batch · out · in.
    Memory beside the result: a copy of ``values`` and of ``x`` for many rows, nothing of the size of W except for
    "dense".

    Examples
    --------
    >>> values, offsets = torch.tensor([[1.0, 2.0], [3.0, 4.0]]), torch.tensor([0, 2])
    >>> diagonal_matmul(torch.tensor([1.0, 10.0, 100.0]), values, offsets, out_features=2)  # W = [[1, 0, 3], [4, 2, 0]]
    tensor([301.,  24.])
    """
    require_number(out_features, "out_features", low=1, integer=True)
    require_choice(backend, "backend", ("auto", *_backends.BACKENDS))
    if backend != "auto":
        _backends.require_usable(backend, x.device)
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device) and x.dtype != torch.float64:
        x, values = (tensor.to(torch.get_autocast_dtype(device)) for tensor in (x, values))
    _check(x, values, offsets, out_features)
    flat = x.reshape(-1, x.shape[-1])
    compute = _compute if _plain(x, values, offsets) else _product
    return compute(flat, values, offsets, out_features, out_features >= x.shape[-1], backend).view(
        *x.shape[:-1], out_features
    )


def _check(x: Tensor, values: Tensor, offsets: Tensor, out_features: int) -> None:
    if not x.ndim or not x.shape[-1]:
        raise InputError(f"x has shape {tuple(x.shape)}; its last dimension must hold at least one feature.")
    check_values(values, offsets, out_features, x.shape[-1])
    if not x.is_floating_point() or x.dtype != values.dtype:
        raise InputError(f"x is {x.dtype} and values are {values.dtype}. Convert them to one floating-point type.")
    if offsets.dtype not in (torch.int64, torch.int32):
        raise InputError(f"offsets are {offsets.dtype}. Convert them to int64.")
    if len({x.device, values.device, offsets.device}) > 1:
        raise InputError(
            f"x is on {x.device}, values on {values.device} and offsets on {offsets.device}. Move them to one device."
        )
    if x.dtype == torch.float16 and x.device.type == "cpu":
        warnings.warn(
            "float16 on a CPU is computed in float32 and gains nothing. Use float32 or bfloat16.",
            HeedfulWarning,
            stacklevel=3,
        )


def _plain(*tensors: Tensor) -> bool:
    """Whether numbers are all that is wanted: then the operator's way through torch, longer than a small product, is spared."""
    wanted = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    known = all(type(tensor) in (Tensor, Parameter, Buffer) and not tensor.is_meta for tensor in tensors)
    return known and not (wanted or torch.compiler.is_compiling() or torch.jit.is_tracing())


def _compute(x: Tensor, values: Tensor, offsets: Tensor, out_features: int, tall: bool, backend: str) -> Tensor:
    check_offsets(offsets, max(out_features, x.shape[1]))
    if backend == "auto":
        backend = choose_backend("product", x, (out_features, x.shape[1]), offsets.shape[0])
    return _backends.product(x, values, offsets.long(), out_features, tall=tall, backend=backend)


_product = torch.library.custom_op("heedful::diagonal_product", _compute, mutates_args=())


@_product.register_fake
def _(x, values, offsets, out_features, tall, backend):
    return x.new_empty(x.shape[0], out_features)


@torch.library.custom_op("heedful::diagonal_input_gradient", mutates_args=())
def _input_gradient(
    grad: Tensor, values: Tensor, offsets: Tensor, in_features: int, tall: bool, backend: str
) -> Tensor:
    """Grad W: the same product, since the diagonals of W are those of its transpose with the roles exchanged."""
    return _product(grad, values, offsets, in_features, not tall, backend)


@_input_gradient.register_fake
def _(grad, values, offsets, in_features, tall, backend):
    return grad.new_empty(grad.shape[0], in_features)


@torch.library.custom_op("heedful::diagonal_value_gradient", mutates_args=())
def _value_gradient(grad: Tensor, x: Tensor, offsets: Tensor, tall: bool, backend: str) -> Tensor:
    if backend == "auto":
        backend = choose_backend("value_gradient", x, (grad.shape[1], x.shape[1]), offsets.shape[0])
    return _backends.value_gradient(grad, x, offsets.long(), tall=tall, backend=backend)


@_value_gradient.register_fake
def _(grad, x, offsets, tall, backend):
    return x.new_empty(offsets.shape[0], min(grad.shape[1], x.shape[1]))


def _save(ctx, inputs, output):
    x, values, offsets, _, ctx.tall, ctx.backend = inputs
    ctx.in_features = x.shape[1]
    ctx.save_for_backward(x, values, offsets)


def _backward(ctx, grad):
    x, values, offsets = ctx.saved_tensors
    grad_x = grad_values = None
    if ctx.needs_input_grad[0]:
        grad_x = _input_gradient(grad, values, offsets, ctx.in_features, ctx.tall, ctx.backend)
    if ctx.needs_input_grad[1]:
        grad_values = _value_gradient(grad, x, offsets, ctx.tall, ctx.backend)
    return grad_x, grad_values, None, None, None, None


def _refuse(ctx, *grads):
    raise ParameterError(
        "diagonal_matmul is differentiable once, and a gradient of its gradient was asked for. Compute the first gradient "
        "without create_graph=True, or use the dense weight."
    )


_product.register_autograd(_backward, setup_context=_save)
_input_gradient.register_autograd(_refuse)
_value_gradient.register_autograd(_refuse)
