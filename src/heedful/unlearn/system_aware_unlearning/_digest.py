"""One number for everything that an object holds: SHA-256 over its structure, whatever objects it is made of.

Two objects have the same digest if their types, values, array types and shapes agree to the last bit, wherever in memory
they lie. Nothing is compared through ``__eq__`` and nothing is unpickled; ``__reduce_ex__`` only says what an object is
made of.
"""

import hashlib
import inspect
from collections.abc import Iterator
from typing import Any

import numpy as np
from scipy import sparse
from sklearn.utils._metadata_requests import MethodMetadataRequest
from sklearn.utils.metadata_routing import MetadataRequest


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
    if inspect.isroutine(value) or isinstance(value, type):
        yield f"{value.__module__}.{value.__qualname__}".encode()
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
        made_by, arguments, *rest = value.__reduce_ex__(2)
        state, items, pairs = (*rest, None, None, None)[:3]
        if isinstance(value, (MetadataRequest, MethodMetadataRequest)):  # whose they are is whoever holds them
            state = {name: part for name, part in vars(value).items() if name != "owner"}
        for part in (made_by, arguments, state, list(items or ()), dict(pairs or ())):
            yield from _pieces(part, seen)


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
