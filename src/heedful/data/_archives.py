"""Members of wheels, tarballs and Debian packages, read as plain files: nothing is executed, nothing escapes."""

import fnmatch
import io
import tarfile
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath, PureWindowsPath

from heedful.errors import FileFormatError

_DEB, _ZIP = b"!<arch>\n", b"PK\x03\x04"


def members(file: io.BufferedIOBase) -> Iterator[tuple[PurePosixPath, bytes]]:
    """Path and contents of each regular file of a zip (wheel), a tar of any compression, or a ``.deb``.

    Folders, links and devices are left out.

    Raises
    ------
    FileFormatError
        At a member whose path is absolute or climbs by ``..``, whatever the system's way to write that.
    """
    magic = file.read(8)
    file.seek(0)
    if magic.startswith(_ZIP):
        with zipfile.ZipFile(file) as archive:
            for entry in archive.infolist():
                if not entry.is_dir():
                    yield _inside(entry.filename), archive.read(entry)
        return
    with tarfile.open(fileobj=_data_of_deb(file) if magic == _DEB else file) as archive:
        for member in archive:
            path = _inside(member.name)
            if member.isreg() and (contents := archive.extractfile(member)) is not None:
                yield path, contents.read()


def unpack(archive: Path, folder: Path, *, root: str, patterns: Sequence[str]) -> None:
    """Write the files below ``root`` in ``archive`` whose path from there matches a pattern to ``folder``."""
    with archive.open("rb") as file:
        for path, contents in members(file):
            if path.is_relative_to(root) and any(fnmatch.fnmatch(str(path.relative_to(root)), p) for p in patterns):
                target = folder / path.relative_to(root)
                target.parent.mkdir(parents=True, exist_ok=True)
                target.write_bytes(contents)


def _inside(name: str) -> PurePosixPath:
    windows = PureWindowsPath(name)  # knows drives and both kinds of slash
    if windows.anchor or ".." in windows.parts:
        raise FileFormatError(
            f"the archive has a member {name!r} that would be written outside of its folder. It is not what was "
            "published: delete it and fetch it again."
        )
    return PurePosixPath(name)


def _data_of_deb(file: io.BufferedIOBase) -> io.BufferedIOBase:
    """The tarball with the installed files: a ``.deb`` is an ar archive, members behind headers of 60 bytes."""
    file.seek(len(_DEB))
    while header := file.read(60):
        size = int(header[48:58])
        if header.startswith(b"data.tar"):
            return io.BytesIO(file.read(size))
        file.seek(size + size % 2, io.SEEK_CUR)
    raise FileFormatError("the Debian package holds no data.tar. Delete it and fetch it again.")
