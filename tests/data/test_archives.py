import io
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest

from heedful.data._archives import members, unpack
from heedful.errors import FileFormatError
from tests.data.toys import tarball

FILES = {"./usr/share/a.txt": b"alpha", "./usr/share/deep/b.txt": b"", "./usr/c.bin": b"\0\1\2"}
UNSAFE = ["/etc/passwd", "../up", "a/../../up", "C:\\windows", "C:up", "a\\..\\..\\up", "\\\\server\\share\\x"]


def wheel(files: dict[str, bytes]) -> bytes:
    made = io.BytesIO()
    with zipfile.ZipFile(made, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.mkdir("folder")
        for name, contents in files.items():
            archive.writestr(name, contents)
    return made.getvalue()


def deb(files: dict[str, bytes]) -> bytes:
    """Three members, the first two of odd length, hence padded: the format's one trap."""
    made = b"!<arch>\n"
    plain = io.BytesIO()
    with tarfile.open(fileobj=plain, mode="w") as archive:
        for name, contents in files.items():
            entry = tarfile.TarInfo(name)
            entry.size = len(contents)
            archive.addfile(entry, io.BytesIO(contents))
    parts = {"debian-binary": b"2.0", "control.tar.xz": b"odd", "data.tar.xz": lzma.compress(plain.getvalue())}
    for name, contents in parts.items():
        made += f"{name:<16}{0:<12}{0:<6}{0:<6}{100644:<8}{len(contents):<10}".encode() + b"`\n" + contents
        made += b"\n" * (len(contents) % 2)
    return made


def read(archive: bytes) -> dict[str, bytes]:
    return {str(path): contents for path, contents in members(io.BytesIO(archive))}


@pytest.mark.parametrize("pack", [wheel, tarball, deb])
def test_every_kind_of_archive_yields_the_same_files(pack):
    expected = {name.removeprefix("./"): contents for name, contents in FILES.items()}
    assert read(pack(FILES)) == expected


@pytest.mark.parametrize("pack", [wheel, tarball, deb])
@pytest.mark.parametrize("name", UNSAFE)
def test_a_member_that_would_land_outside_is_refused(pack, name, tmp_path):
    packed = tmp_path / "packed"
    packed.write_bytes(pack({"fine.txt": b"1", name: b"2"}))
    with pytest.raises(FileFormatError) as error:
        unpack(packed, tmp_path / "here", root="", patterns=["*"])
    assert str(error.value) == (
        f"the archive has a member {name!r} that would be written outside of its folder. It is not what was published: "
        "delete it and fetch it again."
    )
    written = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    assert written == {Path("packed"), Path("here/fine.txt")}


def test_links_are_left_out_so_that_none_can_lead_outside():
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w:gz") as archive:
        for kind in (tarfile.SYMTYPE, tarfile.LNKTYPE):
            link = tarfile.TarInfo("door")
            link.type, link.linkname = kind, "/etc"
            archive.addfile(link)
    assert read(made.getvalue()) == {}


def test_unpack_writes_only_what_was_asked_for_and_without_the_root(tmp_path):
    packed = tmp_path / "packed"
    packed.write_bytes(wheel({"a/x/one.csv": b"1", "a/x/two.py": b"2", "b/x/one.csv": b"3"}))
    unpack(packed, tmp_path / "out", root="a", patterns=["x/*.csv"])
    assert [path.relative_to(tmp_path / "out") for path in (tmp_path / "out").rglob("*.*")] == [Path("x/one.csv")]
    assert (tmp_path / "out/x/one.csv").read_bytes() == b"1"


def test_a_debian_package_without_data_is_refused():
    empty = deb({})
    with pytest.raises(
        FileFormatError, match=r"^the Debian package holds no data\.tar\. Delete it and fetch it again\.$"
    ):
        read(empty[: empty.index(b"data.tar")])
