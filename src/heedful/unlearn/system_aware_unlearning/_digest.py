"""One number for everything that an object holds: SHA-256 over its structure, whatever objects it is made of.

Two objects have the same digest if their types, values, array types and shapes agree to the last bit, wherever in memory
they lie. Nothing is compared through ``__eq__`` and nothing is unpickled; ``__reduce_ex__`` only says what an object is
made of. A function is its name, what it runs, and what it holds: whose method it is, defaults, the values it closes over.
Global names and what lies behind them are not looked up.
"""

import hashlib
import inspect
import types
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils._metadata_requests import MethodMetadataRequest
from sklearn.utils.metadata_routing import MetadataRequest

from heedful.errors import ParameterError


def digest_of(value: Any) -> str:
    """64 hexadecimal digits."""
    digest = hashlib.sha256()
    for piece in _pieces(value, {}):
        digest.update(len(piece).to_bytes(8, "little") + piece)
    return digest.hexdigest()


def _pieces(value: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    """What ``value`` is made of, in a fixed order. ``seen`` ends cycles: an object met again is its number."""
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes, np.generic)):
        yield f"{type(value).__name__}:{value!r}".encode()
        return
    if isinstance(value, (type, types.ModuleType)):
        yield f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', value.__name__)}".encode()
        return
    if isinstance(value, np.ufunc):
        yield f"ufunc:{value.__name__}".encode()
        return
    if inspect.isroutine(value):
        yield from _routine_pieces(value, seen)
        return
    if isinstance(value, types.CodeType):
        yield value.co_code
        for part in (*value.co_consts, value.co_names):  # each by itself: compilers share constants as they like
            yield from _pieces(part, {})
        return
    if id(value) in seen:
        yield f"met:{seen[id(value)][0]}".encode()
        return
    seen[id(value)] = len(seen), value  # held, lest its id be given to another
    kind = type(value)
    yield f"{kind.__module__}.{kind.__qualname__}".encode()
    if isinstance(value, np.ndarray):
        yield from _array_pieces(value, seen)
    elif sparse.issparse(value) and value.format == "csr":
        yield str(value.shape).encode()
        for array in (value.data, value.indices, value.indptr):
            yield from _array_pieces(array, seen)
    elif kind.__module__.startswith("torch") and hasattr(value, "detach"):  # whose own pickles tell addresses
        tensor = value.detach().cpu()
        yield str(tensor.dtype).encode()
        yield from _array_pieces((tensor.float() if str(tensor.dtype) == "torch.bfloat16" else tensor).numpy(), seen)
    elif isinstance(value, dict):
        items = [(b"".join(_pieces(key, {})), item) for key, item in value.items()]
        for key, item in sorted(items, key=lambda pair: pair[0]):
            yield key
            yield from _pieces(item, seen)
    elif isinstance(value, (set, frozenset)):
        yield from sorted(b"".join(_pieces(item, {})) for item in value)
    elif isinstance(value, (list, tuple)):
        yield str(len(value)).encode()
        for item in value:
            yield from _pieces(item, seen)
    else:
        try:
            made = value.__reduce_ex__(2)
        except TypeError as error:
            raise ParameterError(
                f"There is no digest of a {kind.__name__}, which cannot be taken apart; {error}."
            ) from error
        if isinstance(made, str):  # the name of something global
            yield made.encode()
            return
        made_by, arguments, *rest = made
        state, items, pairs = (*rest, None, None, None)[:3]
        if isinstance(value, (MetadataRequest, MethodMetadataRequest)):  # whose they are is whoever holds them
            state = {name: part for name, part in vars(value).items() if name != "owner"}
        for part in (made_by, arguments, state, list(items or ()), dict(pairs or ())):
            yield from _pieces(part, seen)


def _routine_pieces(routine: Any, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    """Name, owner, code, and what is remembered between calls."""
    yield f"{getattr(routine, '__module__', None)}.{routine.__qualname__}".encode()
    owner = getattr(routine, "__self__", None)
    if owner is not None and not isinstance(owner, types.ModuleType):
        yield from _pieces(owner, seen)
    function = getattr(routine, "__func__", routine)  # methods are made anew whenever they are looked up
    if not isinstance(function, types.FunctionType):
        yield from _pieces(getattr(function, "__wrapped__", None), seen)  # of a cache
        return
    if id(function) in seen:
        yield f"met:{seen[id(function)][0]}".encode()
        return
    seen[id(function)] = len(seen), function
    for part in (function.__code__, function.__defaults__, function.__kwdefaults__):
        yield from _pieces(part, seen)
    for cell in function.__closure__ or ():
        try:
            held = cell.cell_contents
        except ValueError:  # empty
            yield b"empty"
        else:
            yield from _pieces(held, seen)


def _array_pieces(array: np.ndarray, seen: dict[int, tuple[int, Any]]) -> Iterator[bytes]:
    yield f"{array.dtype.str}{array.shape}".encode()
    if array.dtype.names:  # field by field: what lies between the fields is no value
        for name in array.dtype.names:
            yield from _array_pieces(np.asarray(array[name]), seen)
    elif array.dtype.hasobject:
        for item in array.ravel().tolist():
            yield from _pieces(item, seen)
    else:
        yield array.tobytes()
