"""Real data, offline once they were fetched, each with its source, licence and checksum.

>>> from heedful import data
>>> digits = data.load("digits")
>>> digits.X.shape, digits.class_names[:3]
((1797, 64), ('0', '1', '2'))

Data are kept in the user's cache folder; the environment variable ``HEEDFUL_DATA`` names another one. Nothing is ever
unpickled, and no file is used whose content differs from what this version of heedful declares.
"""

import dataclasses
import functools
import logging
from pathlib import Path
from typing import Any, Literal

from heedful._results import Report
from heedful.data._cache import (
    cache_folder,
    cached_path,
    fill_cache,
    read_cached,
    require_checksum,
    to_arrays,
    verify_cached,
)
from heedful.data._forms import Addresses as Addresses
from heedful.data._forms import Images as Images
from heedful.data._forms import PotentialOutcomes as PotentialOutcomes
from heedful.data._forms import PretrainedModel as PretrainedModel
from heedful.data._forms import RandomizedTrial as RandomizedTrial
from heedful.data._forms import RatedTexts as RatedTexts
from heedful.data._forms import SeriesSet as SeriesSet
from heedful.data._forms import SeriesSets as SeriesSets
from heedful.data._forms import Table as Table
from heedful.data._forms import Texts as Texts
from heedful.data._forms import TokenEmbeddings as TokenEmbeddings
from heedful.data._forms import Views as Views
from heedful.data._forms import Weights as Weights
from heedful.data._registry import Archive, Bundled, DataSet, datasets
from heedful.data._sources import obtain
from heedful.errors import FileFormatError, ParameterError

__all__ = [
    "Addresses",
    "DataInfo",
    "Images",
    "PotentialOutcomes",
    "PretrainedModel",
    "RandomizedTrial",
    "RatedTexts",
    "SeriesSet",
    "SeriesSets",
    "Table",
    "Texts",
    "TokenEmbeddings",
    "Views",
    "Weights",
    "check",
    "checksums",
    "folder",
    "info",
    "is_cached",
    "load",
    "names",
]

logger = logging.getLogger("heedful")


@dataclasses.dataclass(frozen=True)
class DataInfo(Report):
    """What is declared about a data set.

    Parameters
    ----------
    name, what, shapes, licence : str
    form : str
        The class that ``load`` returns, as named in ``heedful.data``.
    source : str
        The package that carries the data, and its registry.
    version : str
        Of that package; "" for data inside of a dependency, whose version does not matter.
    archive_checksum : str
        SHA-256 of the archive as the registry serves it; "" as before.
    checksum : str
        SHA-256 of the parsed content, the same whatever way it came.
    """

    name: str
    what: str
    form: str
    shapes: str
    licence: str
    source: str
    version: str
    archive_checksum: str
    checksum: str


def names() -> tuple[str, ...]:
    """Names of all data sets, in the order of the registry."""
    return tuple(datasets)


def info(name: str) -> DataInfo:
    """What is declared about the data set ``name``; no file is touched."""
    dataset = _dataset(name)
    match dataset.source:
        case Bundled(package):
            origin = {"source": f"{package}, a dependency of heedful", "version": "", "archive_checksum": ""}
        case Archive(package=package, version=version, sha256=sha256, registry=registry):
            origin = {"source": f"{package} from {registry}", "version": version, "archive_checksum": sha256}
    return DataInfo(
        name=dataset.name,
        what=dataset.what,
        form=dataset.form.__name__,
        shapes=dataset.shapes,
        licence=dataset.licence,
        checksum=dataset.checksum,
        **origin,
    )


def checksums(*names: str) -> dict[str, str]:
    """The declared checksum of each data set's content, which a trial's record depends on; no file is touched."""
    return {name: _dataset(name).checksum for name in names}


def folder() -> Path:
    """Where data are kept: the environment variable ``HEEDFUL_DATA``, else the user's cache folder of this platform.

    Files that you supply by hand for the data set ``name`` go to ``folder() / "manual" / name``.
    """
    return cache_folder()


def is_cached(name: str) -> bool:
    """Whether ``name`` loads without a network; its content is not looked at (``check`` does)."""
    dataset = _dataset(name)
    return isinstance(dataset.source, Bundled) or cached_path(dataset, folder()).exists()


def load(name: str) -> Any:
    """The data set ``name``, from the cache, or by the first way to obtain it that works.

    The content is compared with its declared checksum when it is read; later calls in this process return the same
    object. The first use on a machine fetches up to 140 MB, once, even if several processes ask at the same time;
    afterwards no network is needed.

    Parameters
    ----------
    name : str
        One of ``names``.

    Returns
    -------
    Images, Table, Texts, RatedTexts, Addresses, Views, TokenEmbeddings, PretrainedModel, Weights, SeriesSets,
    RandomizedTrial or PotentialOutcomes
        As ``info(name).form`` says. Arrays are read-only.

    Raises
    ------
    ParameterError
        If there is no such data set.
    DataUnavailableError
        If no way to obtain it works; it says what would make each of them work.
    """
    _dataset(name)
    return _load(name, folder())


def check(name: str) -> Literal["sound", "damaged", "absent"]:
    """Whether ``name`` lies in the cache, complete and with the declared checksum; nothing is fetched or repaired.

    Data inside of a dependency are read and compared; they are never absent.
    """
    dataset = _dataset(name)
    try:
        if isinstance(dataset.source, Bundled):
            _read_bundled(dataset, dataset.source)
        else:
            verify_cached(dataset, folder())
    except FileNotFoundError:
        return "absent"
    except FileFormatError:
        return "damaged"
    return "sound"


@functools.lru_cache(maxsize=4)
def _load(name: str, home: Path):
    dataset = datasets[name]
    if isinstance(dataset.source, Bundled):
        return _read_bundled(dataset, dataset.source)
    try:
        return read_cached(dataset, home)
    except FileNotFoundError:
        pass
    except FileFormatError as error:
        logger.warning("%s; it is obtained anew", error)
    archive, by_hand = dataset.source, home / "manual" / name
    fill_cache(dataset, home, lambda work: obtain(dataset, archive, work=work, by_hand=by_hand))
    return read_cached(dataset, home)


def _read_bundled(dataset: DataSet, source: Bundled):
    form = source.read()
    arrays = to_arrays(form)
    require_checksum(dataset, arrays)
    for array in arrays.values():
        array.flags.writeable = False
    return form


def _dataset(name: str) -> DataSet:
    if name not in datasets:
        raise ParameterError(f"there is no data set {name!r}. There are: {', '.join(datasets)}.")
    return datasets[name]
