"""What ``heedful.data.load`` returns: one small frozen dataclass per kind of data.

Arrays are read-only, since every caller in a process gets the same object: copy before changing (``torch.tensor(x)``
and ``x.astype(...)`` copy, ``torch.from_numpy(x)`` does not).
"""

import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float32, Float64, Int64, Shaped, UInt8


@dataclasses.dataclass(frozen=True, eq=False)
class Images:
    """Labelled images with the split they were published with.

    Parameters
    ----------
    x_train, x_test : ndarray of uint8, shape (n, height, width) or (n, height, width, 3)
        Pixels, 0 to 255; the last axis of colour images is red, green, blue.
    y_train, y_test : ndarray of int64, shape (n,)
        Index into ``class_names``.
    class_names : tuple of str
    """

    x_train: UInt8[np.ndarray, "n height width *rgb"]
    y_train: Int64[np.ndarray, " n"]
    x_test: UInt8[np.ndarray, "m height width *rgb"]
    y_test: Int64[np.ndarray, " m"]
    class_names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Table:
    """Rows of features with a class each; there is no published split.

    Parameters
    ----------
    X : ndarray of float64, shape (n, d)
    y : ndarray of int64, shape (n,)
        Index into ``class_names``.
    feature_names, class_names : tuple of str
        Of length d, and one per class.
    """

    X: Float64[np.ndarray, "n d"]
    y: Int64[np.ndarray, " n"]
    feature_names: tuple[str, ...]
    class_names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Texts:
    """Documents with a class each; there is no published split.

    Parameters
    ----------
    texts : tuple of str, length n
    y : ndarray of int64, shape (n,)
        Index into ``class_names``.
    class_names : tuple of str
    """

    texts: tuple[str, ...]
    y: Int64[np.ndarray, " n"]
    class_names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class RatedTexts:
    """Short texts rated by people, from several domains.

    Parameters
    ----------
    texts : tuple of str, length n
    ratings : ndarray of float64, shape (n,)
        Mean rating, −4 (most negative) to 4 (most positive).
    domain : ndarray of int64, shape (n,)
        Index into ``domain_names``.
    domain_names : tuple of str
    """

    texts: tuple[str, ...]
    ratings: Float64[np.ndarray, " n"]
    domain: Int64[np.ndarray, " n"]
    domain_names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Addresses:
    """Speeches, or messages in writing, in the order of their years.

    Parameters
    ----------
    texts : tuple of str, length n
    years : ndarray of int64, shape (n,)
        Ascending; a year may have two.
    names, parties : tuple of str, length n
        Of whoever gave the address; a party may be "none".
    """

    texts: tuple[str, ...]
    years: Int64[np.ndarray, " n"]
    names: tuple[str, ...]
    parties: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class Views:
    """Several descriptions of the same cases.

    Parameters
    ----------
    views : dict of str to ndarray of float64, shape (n, d) with a d of each view's own
    y : ndarray of int64, shape (n,)
        Classes, numbered from 0.
    """

    views: dict[str, Float64[np.ndarray, "n _"]]
    y: Int64[np.ndarray, " n"]


@dataclasses.dataclass(frozen=True, eq=False)
class TokenEmbeddings:
    """A vector per token, and the tokenizer that splits texts into those tokens.

    Parameters
    ----------
    vectors : ndarray of float32, shape (n_tokens, d)
        Row i belongs to token id i.
    tokenizer_file : Path
        A ``tokenizer.json``: ``tokenizers.Tokenizer.from_file(str(path)).encode(text).ids`` gives token ids.
    """

    vectors: Float32[np.ndarray, "n_tokens d"]
    tokenizer_file: Path


MODEL_FILES = ("config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json")


@dataclasses.dataclass(frozen=True, eq=False)
class PretrainedModel:
    """A pretrained model of the ``transformers`` library, with its tokenizer.

    Parameters
    ----------
    folder : Path
        ``config.json``, ``model.safetensors``, ``tokenizer.json`` and ``tokenizer_config.json``:
        ``AutoModel.from_pretrained(folder, local_files_only=True)`` and ``AutoTokenizer`` alike open it.
        It is the cache itself: save a changed model elsewhere.
    """

    folder: Path


@dataclasses.dataclass(frozen=True, eq=False)
class Weights:
    """The weights of a pretrained network whose architecture is the reader's to build.

    Parameters
    ----------
    tensors : dict of str to ndarray
        Its state dict, by the names that the published code gives.
    """

    tensors: dict[str, Shaped[np.ndarray, "..."]]


class SeriesSet(NamedTuple):
    """One set of labelled time series.

    ``x_train`` and ``x_test`` are arrays of float64 of shape (n, channels, length), or lists of n arrays of shape (channels,
    length) where lengths differ; ``y_train`` and ``y_test`` index ``class_names``.
    """

    x_train: Float64[np.ndarray, "n d L"] | list[Float64[np.ndarray, "d _"]]
    y_train: Int64[np.ndarray, " n"]
    x_test: Float64[np.ndarray, "m d L"] | list[Float64[np.ndarray, "d _"]]
    y_test: Int64[np.ndarray, " m"]
    class_names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class SeriesSets:
    """Several sets of labelled time series, with the splits they were published with.

    ``sets["GunPoint"]`` is one of them, as a ``SeriesSet``.

    Parameters
    ----------
    names : tuple of str
    x_train, x_test : dict of str to ndarray of float64, shape (n, channels, length)
        By name. A case that is shorter than the longest ends in NaN.
    y_train, y_test : dict of str to ndarray of int64, shape (n,)
    class_names : tuple of sequences of str
        In the order of ``names``.
    """

    names: tuple[str, ...]
    x_train: dict[str, Float64[np.ndarray, "_ _ _"]]
    y_train: dict[str, Int64[np.ndarray, " _"]]
    x_test: dict[str, Float64[np.ndarray, "_ _ _"]]
    y_test: dict[str, Int64[np.ndarray, " _"]]
    class_names: tuple[Sequence[str], ...]

    def __getitem__(self, name: str) -> SeriesSet:
        if name not in self.names:
            raise KeyError(f"there is no set {name!r}; there are {', '.join(self.names)}")
        return SeriesSet(
            _cut(self.x_train[name]),
            self.y_train[name],
            _cut(self.x_test[name]),
            self.y_test[name],
            tuple(self.class_names[self.names.index(name)]),
        )


def _cut(x: Float64[np.ndarray, "n d L"]) -> Float64[np.ndarray, "n d L"] | list[Float64[np.ndarray, "d _"]]:
    """The cases without the NaN behind their ends; ``x`` itself if there is none."""
    lengths = (~np.isnan(x[:, 0])).sum(axis=1)
    return x if (lengths == x.shape[2]).all() else [case[:, :length] for case, length in zip(x, lengths, strict=True)]


@dataclasses.dataclass(frozen=True, eq=False)
class RandomizedTrial:
    """What a randomised trial or a field experiment observed of each unit.

    Parameters
    ----------
    X : ndarray of float64, shape (n, d)
        What was known before the treatment; NaN where it is missing.
    treatment : ndarray of bool, shape (n,)
    y : ndarray of float64, shape (n,)
        The outcome.
    feature_names : tuple of str, length d
    """

    X: Float64[np.ndarray, "n d"]
    treatment: Bool[np.ndarray, " n"]
    y: Float64[np.ndarray, " n"]
    feature_names: tuple[str, ...]


@dataclasses.dataclass(frozen=True, eq=False)
class PotentialOutcomes:
    """Real units with simulated outcomes, so that of each unit both outcomes are known.

    Parameters
    ----------
    X : ndarray of float64, shape (n, d)
        Real covariates; a category is one column a level, 0 or 1.
    y0, y1 : ndarray of float64, shape (k, n)
        Outcomes without and with treatment, in k simulations.
    mu0, mu1 : ndarray of float64, shape (k, n)
        Their means given the covariates.
    treatment : ndarray of bool, shape (k, n)
        The simulated choice of treatment, which depends on the covariates.
    feature_names : tuple of str, length d
    """

    X: Float64[np.ndarray, "n d"]
    y0: Float64[np.ndarray, "k n"]
    y1: Float64[np.ndarray, "k n"]
    mu0: Float64[np.ndarray, "k n"]
    mu1: Float64[np.ndarray, "k n"]
    treatment: Bool[np.ndarray, "k n"]
    feature_names: tuple[str, ...]


Form = (
    Images
    | Table
    | Texts
    | RatedTexts
    | Addresses
    | Views
    | TokenEmbeddings
    | PretrainedModel
    | Weights
    | SeriesSets
    | RandomizedTrial
    | PotentialOutcomes
)
