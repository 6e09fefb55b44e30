"""The safetensors format: headers that are checked before they are believed, and tensors that are views of the file.

A file is the length of its header (8 bytes, little-endian), the header (JSON: name -> dtype, shape, place), and the
tensors one after another, without a gap.
"""

import contextlib
import json
import math
import mmap
import os
import stat
import sys
import weakref
from collections.abc import Mapping
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import torch
from torch import Tensor

from heedful.errors import FileFormatError

DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8,
    "I8": torch.int8,
    "U16": torch.uint16,
    "I16": torch.int16,
    "U32": torch.uint32,
    "I32": torch.int32,
    "U64": torch.uint64,
    "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F32": torch.float32,
    "F64": torch.float64,
    "C64": torch.complex64,
}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_HEADER = 100_000_000  # bytes; what other readers of the format allow
_MAP_NORESERVE = 0x4000  # Linux: pages are not promised memory beforehand, since a file may be larger than that
_MADV_POPULATE_READ = 22  # Linux 5.14: all pages of a range at once, several times faster than a fault for each


class TensorInfo(NamedTuple):
    """Shape and dtype of a tensor that has not been read."""

    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize


class SafetensorsFile:
    """One file: ``infos`` by name, in the order of the file, and ``get``."""

    def __init__(self, path: Path):
        self.tied: dict[str, str] = {}  # the format has no shared tensors
        with read_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            self._places, self._start = _read_header(path, file, size)
            self._map = _map_privately(file)
        self.infos = {name: info for name, (info, _) in self._places.items()}

    def get(self, name: str) -> Tensor:
        """The tensor as a view of the file, which nothing that is done to the tensor changes."""
        info, offset = self._places[name]
        if info.nbytes == 0:
            return torch.empty(info.shape, dtype=info.dtype)
        start = self._start + offset
        view = memoryview(self._map)[start : start + info.nbytes]
        self._hold(view, start, info.nbytes)
        raw = torch.frombuffer(view, dtype=torch.uint8)
        if raw.data_ptr() % info.dtype.itemsize:
            raw = raw.clone()  # allowed by the format, but torch computes on aligned numbers only
        return raw.view(info.dtype).view(info.shape)

    def _hold(self, view: memoryview, start: int, length: int) -> None:
        """Read the pages that lie wholly in the range now, and let go of them when the tensor is no more."""
        first, end = -(-start // mmap.PAGESIZE) * mmap.PAGESIZE, (start + length) // mmap.PAGESIZE * mmap.PAGESIZE
        if first < end and sys.platform == "linux":
            with contextlib.suppress(OSError):
                self._map.madvise(mmap.MADV_WILLNEED, first, end - first)
                self._map.madvise(_MADV_POPULATE_READ, first, end - first)
            release = weakref.finalize(view, self._map.madvise, mmap.MADV_DONTNEED, first, end - first)
            release.atexit = False


def _map_privately(file: BinaryIO) -> mmap.mmap:
    """The file as memory that may be written to, which the file never sees."""
    if sys.platform != "linux":
        return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    flags = mmap.MAP_PRIVATE | _MAP_NORESERVE
    return mmap.mmap(file.fileno(), 0, flags=flags, prot=mmap.PROT_READ | mmap.PROT_WRITE)


def read_regular(path: Path) -> BinaryIO:
    """Open for reading what is a file; a pipe or a device could keep us waiting for ever."""
    try:
        if stat.S_ISREG(path.stat().st_mode):
            return path.open("rb")
    except (FileNotFoundError, NotADirectoryError):
        raise FileFormatError(f"{path} does not exist, or links to what does not. Fetch or save it again.") from None
    raise FileFormatError(f"{path} is not a regular file. Give a file, or a link to one.")


def bits(tensor: Tensor) -> Tensor:
    """The values of a tensor as bytes in their order, without a copy where that is possible."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8)


def encode_header(infos: Mapping[str, TensorInfo]) -> tuple[bytes, dict[str, int]]:
    """The head of a file that holds ``infos``, and where in the file each tensor starts.

    Wide dtypes come first, so that every tensor is aligned whatever the sizes are; else the order is kept.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    offsets, end = {}, 0
    for name, info in sorted(infos.items(), key=lambda item: -item[1].dtype.itemsize):
        offsets[name], end = end, end + info.nbytes
        header[name] = {
            "dtype": DTYPE_NAMES[info.dtype],
            "shape": list(info.shape),
            "data_offsets": [offsets[name], end],
        }
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    head = len(text).to_bytes(8, "little") + text
    return head, {name: len(head) + offset for name, offset in offsets.items()}


def _read_header(path: Path, file: BinaryIO, size: int) -> tuple[dict[str, tuple[TensorInfo, int]], int]:
    """Name -> (info, offset), and where the tensors start; refuses whatever the format does not allow."""
    length = int.from_bytes(file.read(8), "little")
    if not 2 <= length <= min(size - 8, MAX_HEADER):
        raise _damaged(path, f"its header would have {length} bytes, of the {size} in the file")
    header = parse_json_object(path, file.read(length))
    header.pop("__metadata__", None)
    places = {}
    for name, entry in header.items():
        require_tensor_name(path, name)
        places[name] = _parse_entry(path, name, entry)
    end = 0
    for name, (info, offset) in sorted(places.items(), key=lambda item: (item[1][1], item[1][0].nbytes)):
        if offset != end:
            raise _damaged(path, f"{name} starts at byte {offset} of the data, and what is before it ends at {end}")
        end += info.nbytes
    if 8 + length + end != size:
        raise _damaged(path, f"it has {size} bytes where its header announces {8 + length + end}")
    return places, 8 + length


def _parse_entry(path: Path, name: str, entry: Any) -> tuple[TensorInfo, int]:
    match entry:
        case {"dtype": str(dtype), "shape": [*shape], "data_offsets": [int(start), int(end)], **rest} if not rest:
            if dtype not in DTYPES:
                raise _damaged(path, f"{name} has dtype {dtype[:40]}, of which we know {', '.join(DTYPES)}")
            # What has no values may still announce sides that overflow.
            if all(type(side) is int and side >= 0 for side in shape) and math.prod(filter(None, shape)) < 2**63:
                info = TensorInfo(tuple(shape), DTYPES[dtype])
                if 0 <= start <= end and end - start == info.nbytes:
                    return info, start
    raise _damaged(path, f"the entry of {name} is no dtype, shape and place that agree: {str(entry)[:200]}")


def parse_json_object(path: Path, content: bytes) -> dict[str, Any]:
    """The JSON object in ``content``, with each name once; ``path`` is what messages call it."""

    def once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise ValueError("a name occurs twice")
        return found

    try:
        parsed = json.loads(content.decode(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        raise _damaged(path, f"its JSON cannot be read ({error})") from error
    if not isinstance(parsed, dict):
        raise _damaged(path, "its JSON is no object")
    return parsed


def require_tensor_name(path: Path, name: str) -> None:
    """Refuse names that no tensor can have: empty, with a NUL, or no Unicode."""
    if not name or "\0" in name or any("\ud800" <= letter <= "\udfff" for letter in name):
        raise _damaged(path, f"it holds a tensor with the name {ascii(name)[:200]}")


def _damaged(path: Path, reason: str) -> FileFormatError:
    return FileFormatError(f"{path} is not a readable checkpoint file: {reason}. Fetch or save it again.")
