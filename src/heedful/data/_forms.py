"""What ``heedful.data.load`` returns: one small frozen dataclass per kind of data.

Arrays are read-only, since every caller in a process gets the same object: copy before changing (``torch.tensor(x)``
and ``x.astype(...)`` copy, ``torch.from_numpy(x)`` does not).
"""

import dataclasses
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Float64, Int64, Shaped, UInt8


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


Form = Images | Table | Texts | RatedTexts | Addresses | Views | TokenEmbeddings | PretrainedModel | Weights
