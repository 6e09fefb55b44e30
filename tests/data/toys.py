"""A tiny data set, its archive, and a stand-in for npm that serves it and keeps a log."""

import gzip
import hashlib
import io
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import numpy as np

from heedful.data import Images
from heedful.data._cache import content_checksum, to_arrays
from heedful.data._loaders import mnist
from heedful.data._registry import Archive, DataSet

ARCHIVE = "toy-data-1.0.0.tgz"
NAMES = ("train-images-idx3-ubyte", "train-labels-idx1-ubyte", "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte")

_NPM = """#!{python}
import os, pathlib, shutil, time
with open({log!r}, "a") as log:
    log.write("fetched\\n")
pathlib.Path({name!r}).write_bytes(b"half of it")
time.sleep(float(os.environ.get("TOY_SECONDS", "0")))
shutil.copy({archive!r}, {name!r})
"""


def content() -> Images:
    draw = np.random.default_rng(0)
    x, y = draw.integers(0, 256, (8, 3, 3), np.uint8), np.array([0, 1, 2, 3, 4, 5, 6, 7])
    return Images(x[:6], y[:6], x[6:], y[6:], tuple("0123456789"))


def files() -> dict[str, bytes]:
    """The content as the four files of the idx format."""
    images = content()
    arrays = images.x_train, images.y_train, images.x_test, images.y_test
    return dict(zip(NAMES, map(_idx, arrays), strict=True))


def _idx(array: np.ndarray) -> bytes:
    return bytes([0, 0, 8, array.ndim]) + np.array(array.shape, ">i4").tobytes() + array.astype(np.uint8).tobytes()


def tarball(members: dict[str, bytes]) -> bytes:
    """A tar.gz that has the same bytes whenever it is made."""
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for name, contents in members.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(contents)
            archive.addfile(entry, io.BytesIO(contents))
    return gzip.compress(plain.getvalue(), mtime=0)


def archive() -> bytes:
    return tarball({f"package/data/{name}": contents for name, contents in files().items()})


def dataset(**changes) -> DataSet:
    """Its row; ``changes`` are of the archive's."""
    declared = {
        "client": "npm",
        "package": "toy-data",
        "version": "1.0.0",
        "file": ARCHIVE,
        "sha256": hashlib.sha256(archive()).hexdigest(),
        "root": "data",
        "files": tuple(f"{name}*" for name in NAMES),
        "read": mnist,
    }
    return DataSet(
        name="toy",
        what="a toy",
        form=Images,
        shapes="6 + 2 x 3 x 3",
        licence="none",
        checksum=content_checksum(to_arrays(content())),
        source=Archive(**(declared | changes)),
    )


def serve(folder: Path, contents: bytes | None = None) -> None:
    """An ``npm`` in ``folder/bin`` that hands out ``contents``, by default the archive, and logs every call."""
    (folder / "bin").mkdir(exist_ok=True)
    (folder / "served").write_bytes(archive() if contents is None else contents)
    program = folder / "bin" / "npm"
    program.write_text(
        _NPM.format(python=sys.executable, log=str(folder / "log"), archive=str(folder / "served"), name=ARCHIVE)
    )
    program.chmod(0o755)


def fetches(folder: Path) -> int:
    """How often the stand-in was asked."""
    log = folder / "log"
    return len(log.read_text().splitlines()) if log.exists() else 0


def load_in_new_process(seconds: float) -> subprocess.Popen:
    """Start a Python that loads the toy, served ``seconds`` after it was asked for, and prints its first labels."""
    code = (
        "from heedful import data; from tests.data import toys; "
        "data.datasets = {'toy': toys.dataset()}; print(data.load('toy').y_train)"
    )
    return subprocess.Popen(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parents[2],
        env=os.environ | {"TOY_SECONDS": str(seconds)},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,  # so that killing it takes the stand-in along
    )
