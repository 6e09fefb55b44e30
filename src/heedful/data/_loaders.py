"""One small function per data set: from its files, as they were published, to its form."""

import gzip
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from heedful.data._archives import members
from heedful.data._forms import (
    Addresses,
    Images,
    PotentialOutcomes,
    PretrainedModel,
    RandomizedTrial,
    RatedTexts,
    SeriesSets,
    Table,
    Texts,
    TokenEmbeddings,
    Views,
    Weights,
)
from heedful.data._frames import numeric_columns
from heedful.data._gguf import convert_llama
from heedful.errors import FileFormatError

_DIGITS = tuple("0123456789")
_CLOTHES = ("T-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")
_CIFAR = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
_BROWN = {
    "a": "news",
    "b": "editorial",
    "c": "reviews",
    "d": "religion",
    "e": "hobbies",
    "f": "lore",
    "g": "belles lettres",
    "h": "government",
    "j": "learned",
    "k": "fiction",
    "l": "mystery",
    "m": "science fiction",
    "n": "adventure",
    "p": "romance",
    "r": "humor",
}
_SENTIMENT = {
    "movie": "movieReviewSnippets",
    "tweets": "tweets",
    "amazon": "amazonReviewSnippets",
    "nyt": "nytEditorialSnippets",
}


def digits() -> Table:
    """The digits that scikit-learn carries."""
    from sklearn.datasets import load_digits

    return _table(load_digits())


def breast_cancer() -> Table:
    """The Wisconsin diagnostic data that scikit-learn carries."""
    from sklearn.datasets import load_breast_cancer

    return _table(load_breast_cancer())


def mnist(folder: Path) -> Images:
    """Images of digits from the four files of the idx format."""
    return _idx_images(folder, _DIGITS)


def fashion_mnist(folder: Path) -> Images:
    """Images of clothes from the four files of the idx format."""
    return _idx_images(folder, _CLOTHES)


def cifar10(folder: Path) -> Images:
    """Colour photographs: a batch is one picture with an image per row, and labels are lists in JSON."""
    train = np.concatenate([_rows_as_images(folder / f"data_batch_{batch}.png") for batch in range(1, 6)])
    labels = [
        np.array(json.loads((folder / f"{part}_lables.json").read_text()), np.int64) for part in ("train", "test")
    ]
    return Images(train, labels[0], _rows_as_images(folder / "test_batch.png"), labels[1], _CIFAR)


def mnist_of_openml(pixels: np.ndarray, labels: np.ndarray) -> Images:
    """The table of 70 000 rows that OpenML keeps of it."""
    return _openml_images(pixels.reshape(-1, 28, 28), labels, _DIGITS)


def fashion_mnist_of_openml(pixels: np.ndarray, labels: np.ndarray) -> Images:
    """The table of 70 000 rows that OpenML keeps of it."""
    return _openml_images(pixels.reshape(-1, 28, 28), labels, _CLOTHES)


def cifar10_of_openml(pixels: np.ndarray, labels: np.ndarray) -> Images:
    """The table of 60 000 rows that OpenML keeps of it: the red plane, the green one, the blue one."""
    return _openml_images(pixels.reshape(-1, 3, 32, 32).transpose(0, 2, 3, 1), labels, _CIFAR)


def brown(folder: Path) -> Texts:
    """Words of the tagged corpus, a sentence per line; the second letter of a file's name is its genre."""
    files = sorted(folder.glob("c[a-r][0-9][0-9]"))
    texts = [
        "\n".join(_untagged(line) for line in file.read_text("ascii").splitlines() if line.strip()) for file in files
    ]
    letters = list(_BROWN)
    return _texts(texts, [letters.index(file.name[1]) for file in files], tuple(_BROWN.values()))


def spam_assassin(folder: Path) -> Texts:
    """Whole mails, headers included, from folders of ham and spam."""
    files = sorted(folder.glob("*/*.txt"))
    return _texts([_read_text(file) for file in files], ["spam" in file.parent.name for file in files], ("ham", "spam"))


def bbc_news(folder: Path) -> Texts:
    """Articles, a folder per class."""
    files = sorted(folder.glob("*/*.txt"))
    classes = sorted({file.parent.name for file in files})
    return _texts(
        [_read_text(file) for file in files], [classes.index(file.parent.name) for file in files], tuple(classes)
    )


def sentiment4(folder: Path) -> RatedTexts:
    """Tables of identifier, mean rating and text, one per domain, in an archive inside of the archive."""
    with (folder / "hutto_ICWSM_2014.tar.gz").open("rb") as file:
        tables = {path.stem: contents for path, contents in members(file)}
    rows = [
        (float(rating), domain, text)
        for domain, stem in enumerate(_SENTIMENT.values())
        for _, rating, text in (line.split("\t") for line in tables[f"{stem}_GroundTruth"].decode().split("\r\n"))
    ]
    ratings, domains, texts = zip(*rows, strict=True)
    return RatedTexts(texts, np.array(ratings), np.array(domains, np.int64), tuple(_SENTIMENT))


def sotu(folder: Path) -> Addresses:
    """A file an address, whose name begins with the year."""
    rows = [json.loads(file.read_text("utf-8")) for file in sorted(folder.glob("*.json"))]
    texts, names, parties = (tuple(row[key] for row in rows) for key in ("text", "name", "party"))
    return Addresses(texts, np.array([row["year"] for row in rows], np.int64), names, parties)


def mfeat(folder: Path) -> Views:
    """Six tables of features of the same digits, whose last column is the class."""
    tables = {name: _csv(folder / f"mfeat-{name}.csv") for name in ("fac", "fou", "kar", "mor", "pix", "zer")}
    return Views({name: table[:, :-1].copy() for name, table in tables.items()}, tables["fac"][:, -1].astype(np.int64))


def wordllama(folder: Path) -> TokenEmbeddings:
    """Half-precision vectors, widened, and the tokenizer's own file."""
    from safetensors import safe_open

    with safe_open(folder / "weights/l2_supercat_256.safetensors", framework="numpy") as file:
        vectors = file.get_tensor("embedding.weight").astype(np.float32)
    return TokenEmbeddings(vectors, folder / "tokenizers/l2_supercat_tokenizer_config.json")


def smollm2_135m(folder: Path) -> PretrainedModel:
    """One GGUF file, written anew in the layout of Hugging Face."""
    convert_llama(folder / "SmolLM2-135M-Instruct.Q4_1.gguf", folder / "model")
    return PretrainedModel(folder / "model")


def efficientnet_lite0(folder: Path) -> Weights:
    """A state dict that torch saved."""
    import torch

    weights = torch.load(folder / "efficientnet-lite0-57934424.pth", map_location="cpu", weights_only=True)
    return Weights({name: tensor.numpy() for name, tensor in weights.items()})


UCR = ("ACSF1", "ArrowHead", "BasicMotions", "GunPoint", "ItalyPowerDemand", "JapaneseVowels", "OSULeaf")


def ucr(folder: Path) -> SeriesSets:
    """A folder a set, with two files in the ts format."""
    return _series_sets(
        {name: [_ts(folder / name / f"{name}_{part}.ts") for part in ("TRAIN", "TEST")] for name in UCR}
    )


def ucr_coffee_pigcvp(folder: Path) -> SeriesSets:
    """A folder a set, with two tables whose first column is the class."""
    sets = {}
    for name in ("Coffee", "PigCVP"):
        tables = [np.loadtxt(folder / name / f"{name}_{part}.txt") for part in ("TRAIN", "TEST")]
        sets[name] = [(list(table[:, None, 1:]), table[:, 0].astype(np.int64)) for table in tables]
    return _series_sets(sets)


def ucr_trace(folder: Path) -> SeriesSets:
    """Arrays whose last axis is the channel."""
    with np.load(folder / "Trace.npz", allow_pickle=False) as arrays:
        parts = [(list(arrays[f"X_{part}"].transpose(0, 2, 1)), arrays[f"y_{part}"]) for part in ("train", "test")]
    return _series_sets({"Trace": parts})


def _series_sets(sets: Mapping[str, Sequence[tuple[list[np.ndarray], np.ndarray]]]) -> SeriesSets:
    """From cases (channels, length) and labels of the train and the test part of each set."""
    classes = {name: np.unique(np.concatenate([labels for _, labels in parts])) for name, parts in sets.items()}
    x_train, x_test = ({name: _padded(parts[i][0]) for name, parts in sets.items()} for i in range(2))
    y_train, y_test = (
        {name: np.searchsorted(classes[name], parts[i][1]) for name, parts in sets.items()} for i in range(2)
    )
    names = tuple(tuple(map(str, classes[name])) for name in sets)
    return SeriesSets(tuple(sets), x_train, y_train, x_test, y_test, names)


def _ts(file: Path) -> tuple[list[np.ndarray], np.ndarray]:
    """Cases and labels: behind a header, a case a line, whose channels and label stand between colons."""
    lines = _read_text(file).partition("@data")[2].split()
    rows = [line.split(":") for line in lines]
    cases = [np.array([channel.split(",") for channel in row[:-1]], dtype=np.float64) for row in rows]
    return cases, np.array([row[-1] for row in rows])


def _padded(cases: Sequence[np.ndarray]) -> np.ndarray:
    longest = max(case.shape[1] for case in cases)
    return np.stack([np.pad(case, ((0, 0), (0, longest - case.shape[1])), constant_values=np.nan) for case in cases])


def nsw(folder: Path) -> RandomizedTrial:
    """Earnings in dollars of 1978 by a programme of supported work (the sample of Dehejia and Wahba)."""
    columns = numeric_columns(folder / "nsw_mixtape.pkl.compress")
    covariates = ("age", "educ", "black", "hisp", "marr", "nodegree", "re74", "re75")
    return _trial(columns, outcome="re78", treatment=columns["treat"] == 1, covariates=covariates)


def thornton_hiv(folder: Path) -> RandomizedTrial:
    """Whether the result of one's test was fetched (0, 1), by an incentive; people who were not tested are left out."""
    columns = numeric_columns(folder / "thornton_hiv.pkl.compress")
    columns = _rows(columns, ~np.isnan(columns["got"]) & ~np.isnan(columns["any"]))
    return _trial(columns, outcome="got", treatment=columns["any"] == 1, covariates=("age", "distvct", "hiv2004"))


def social_insure(folder: Path) -> RandomizedTrial:
    """Whether a household took up the insurance (0, 1), by an intensive information session."""
    columns = numeric_columns(folder / "social_insure.pkl.compress")
    covariates = (
        "default",
        "age",
        "agpop",
        "ricearea_2010",
        "disaster_prob",
        "male",
        "risk_averse",
        "literacy",
        "pre_takeup_rate",
    )
    return _trial(columns, outcome="takeup_survey", treatment=columns["intensive"] == 1, covariates=covariates)


def rand_hie(folder: Path) -> RandomizedTrial:
    """Visits to a doctor in the first year of a person, by free care, as against any coinsurance rate."""
    columns = numeric_columns(folder / "RandHIE.pkl.compress")
    columns = _rows(columns, columns["year"] == 1)
    covariates = ("xage", "female", "black", "educdec", "linc", "num", "mhi", "disea", "physlm", "hlthg", "hlthf")
    return _trial(columns, outcome="mdvis", treatment=columns["coins"] == 0, covariates=(*covariates, "hlthp"))


def acic2016(folder: Path) -> PotentialOutcomes:
    """One table of covariates, and ten of treatment and outcomes."""
    import pandas as pd

    X = pd.get_dummies(pd.read_csv(folder / "x.csv"), prefix_sep="=", dtype=np.float64)
    simulated = np.stack([_csv(folder / f"zymu_{i}.csv") for i in range(1, 11)])
    treatment, y0, y1, mu0, mu1 = simulated.transpose(2, 0, 1).copy()
    return PotentialOutcomes(X.to_numpy(np.float64), y0, y1, mu0, mu1, treatment == 1, tuple(X.columns))


def _rows(columns: Mapping[str, np.ndarray], which: np.ndarray) -> dict[str, np.ndarray]:
    return {name: values[which] for name, values in columns.items()}


def _trial(
    columns: Mapping[str, np.ndarray], *, outcome: str, treatment: np.ndarray, covariates: tuple[str, ...]
) -> RandomizedTrial:
    X = np.column_stack([columns[name] for name in covariates])
    return RandomizedTrial(X, treatment, columns[outcome], covariates)


def _table(bunch) -> Table:
    names = tuple(str(name) for name in bunch.feature_names), tuple(str(name) for name in bunch.target_names)
    return Table(bunch.data.astype(np.float64), bunch.target.astype(np.int64), *names)


def _idx_images(folder: Path, class_names: tuple[str, ...]) -> Images:
    return Images(
        x_train=_idx(folder, "train-images-idx3-ubyte"),
        y_train=_idx(folder, "train-labels-idx1-ubyte").astype(np.int64),
        x_test=_idx(folder, "t10k-images-idx3-ubyte"),
        y_test=_idx(folder, "t10k-labels-idx1-ubyte").astype(np.int64),
        class_names=class_names,
    )


def _idx(folder: Path, name: str) -> np.ndarray:
    """An array of bytes behind a header: 0, 0, 8 (bytes), the number of axes, and each length in four bytes."""
    plain, packed = folder / name, folder / f"{name}.gz"
    contents = plain.read_bytes() if plain.is_file() else gzip.decompress(packed.read_bytes())
    if contents[:3] != b"\0\0\x08":
        raise FileFormatError(f"{name} is not an idx file of bytes: it starts with {contents[:3]!r}.")
    shape = np.frombuffer(contents, ">i4", count=contents[3], offset=4)
    return np.frombuffer(contents, np.uint8, offset=4 + 4 * contents[3]).reshape(shape)


def _rows_as_images(picture: Path) -> np.ndarray:
    from PIL import Image

    with Image.open(picture) as image:
        return np.asarray(image.convert("RGB")).reshape(-1, 32, 32, 3)


def _openml_images(pixels: np.ndarray, labels: np.ndarray, class_names: tuple[str, ...]) -> Images:
    """One table, whose last 10 000 rows are the published test set."""
    x, y = np.ascontiguousarray(pixels, np.uint8), labels.astype(np.int64)
    return Images(x[:-10_000], y[:-10_000], x[-10_000:], y[-10_000:], class_names)


def _texts(texts: Sequence[str], y: Sequence[int], class_names: tuple[str, ...]) -> Texts:
    return Texts(tuple(texts), np.array(y, np.int64), class_names)


def _untagged(line: str) -> str:
    return " ".join(token.rpartition("/")[0] for token in line.split())


def _read_text(file: Path) -> str:
    """As UTF-8, or as Latin-1, which has a character for every byte, where it is not."""
    contents = file.read_bytes()
    try:
        return contents.decode()
    except UnicodeDecodeError:
        return contents.decode("latin-1")


def _csv(file: Path) -> np.ndarray:
    return np.loadtxt(file, delimiter=",", skiprows=1)
