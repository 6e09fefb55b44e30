import dataclasses
import json
import pickle
from fractions import Fraction

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.numpy import save_file

from heedful.data import _loaders
from heedful.data._cache import content_checksum, fill_cache, read_cached, to_arrays
from heedful.data._registry import datasets
from heedful.errors import FileFormatError
from tests.data.toys import tarball


def test_idx_reads_any_number_of_axes(tmp_path):
    (tmp_path / "x").write_bytes(b"\0\0\x08\x02" + b"\0\0\0\x02" + b"\0\0\0\x03" + bytes(range(6)))
    np.testing.assert_array_equal(_loaders._idx(tmp_path, "x"), [[0, 1, 2], [3, 4, 5]])


@pytest.mark.parametrize("contents", [b"", b"\x80\x04\x95", b"\0\0\x0d\x01\0\0\0\x01\0\0\0\0"])
def test_idx_refuses_what_is_not_an_array_of_bytes(tmp_path, contents):
    (tmp_path / "x").write_bytes(contents)
    with pytest.raises(FileFormatError, match=r"^x is not an idx file of bytes: it starts with b'"):
        _loaders._idx(tmp_path, "x")


def test_cifar10_takes_an_image_from_each_row_of_a_batch(tmp_path):
    draw = np.random.default_rng(0)
    batches = draw.integers(0, 256, (6, 2, 1024, 3), np.uint8)
    for batch, name in zip(batches, [*(f"data_batch_{i}" for i in range(1, 6)), "test_batch"], strict=True):
        Image.fromarray(batch).save(tmp_path / f"{name}.png")
    (tmp_path / "train_lables.json").write_text("[0,1,2,3,4,5,6,7,8,9]")
    (tmp_path / "test_lables.json").write_text("[9,8]")
    images = _loaders.cifar10(tmp_path)
    np.testing.assert_array_equal(images.x_train, batches[:5].reshape(10, 32, 32, 3))
    np.testing.assert_array_equal(images.x_test, batches[5].reshape(2, 32, 32, 3))
    assert images.y_test.tolist() == [9, 8]


def test_a_table_of_openml_becomes_the_same_images(monkeypatch):
    draw = np.random.default_rng(0)
    colour = draw.integers(0, 256, (10_002, 32, 32, 3), np.uint8)
    labels = draw.integers(0, 10, 10_002)
    rows = colour.transpose(0, 3, 1, 2).reshape(-1, 3072).astype(np.float64)  # planes of red, green and blue
    images = _loaders.cifar10_of_openml(rows, labels.astype(str).astype(object))
    np.testing.assert_array_equal(images.x_train, colour[:2])
    np.testing.assert_array_equal(images.x_test, colour[2:])
    np.testing.assert_array_equal(images.y_train, labels[:2])
    grey = colour[:, :28, :28, 0]
    for read in (_loaders.mnist_of_openml, _loaders.fashion_mnist_of_openml):
        np.testing.assert_array_equal(read(grey.reshape(-1, 784).astype(float), labels.astype(str)).x_test, grey[2:])


def test_brown_drops_tags_keeps_slashes_inside_words_and_reads_the_genre_off_the_name(tmp_path):
    (tmp_path / "cr01").write_text("\n\n\tA/at 1/2/cd joke/nn ./.\n\n\tTwo/cd\tlines/nns\n")
    (tmp_path / "ca44").write_text("News/nn\n")
    (tmp_path / "cats.txt").write_text("not a text")
    texts = _loaders.brown(tmp_path)
    assert texts.texts == ("News", "A 1/2 joke .\nTwo lines")
    assert [texts.class_names[label] for label in texts.y] == ["news", "humor"]


def test_mails_that_are_not_utf8_are_read_as_latin1(tmp_path):
    for folder, contents in {
        "easy-ham-1": "für".encode(),
        "hard-ham-1": "für".encode("latin-1"),
        "spam-2": b"buy",
    }.items():
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "1.txt").write_bytes(contents)
    mails = _loaders.spam_assassin(tmp_path)
    assert mails.texts == ("für", "für", "buy")
    assert [mails.class_names[label] for label in mails.y] == ["ham", "ham", "spam"]


def test_news_are_classed_by_folder(tmp_path):
    for folder in ("tech", "business"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "001.txt").write_text(folder)
    news = _loaders.bbc_news(tmp_path)
    assert (news.texts, news.class_names) == (("business", "tech"), ("business", "tech"))
    assert news.y.tolist() == [0, 1]


def test_addresses_come_in_the_order_of_their_years(tmp_path):
    for year, name, party in ((1961, "John F Kennedy", "Democratic"), (1790, "George Washington", "none")):
        row = {"year": year, "name": name, "party": party, "text": f"It’s {year}."}
        (tmp_path / f"{year}_{name}.json").write_text(json.dumps(row, ensure_ascii=False), "utf-8")
    speeches = _loaders.sotu(tmp_path)
    assert speeches.years.tolist() == [1790, 1961]
    assert speeches.texts == ("It’s 1790.", "It’s 1961.")
    assert speeches.names == ("George Washington", "John F Kennedy")
    assert speeches.parties == ("none", "Democratic")


def sentiment(folder, **more):
    tables = {
        f"hutto/{stem}_GroundTruth.txt": f"1\t-{number}.5\tcliché {number}\r\n2\t1\tlast".encode()
        for number, stem in enumerate(_loaders._SENTIMENT.values())
    }
    (folder / "hutto_ICWSM_2014.tar.gz").write_bytes(tarball(tables | {"hutto/paper.pdf": b"\xff"} | more))


def test_sentiment_tables_are_joined_in_the_order_of_domains(tmp_path):
    sentiment(tmp_path)
    rated = _loaders.sentiment4(tmp_path)
    assert rated.ratings.tolist() == [-0.5, 1, -1.5, 1, -2.5, 1, -3.5, 1]
    assert rated.domain.tolist() == [0, 0, 1, 1, 2, 2, 3, 3]
    assert rated.texts[:2] == ("cliché 0", "last")
    assert rated.domain_names == ("movie", "tweets", "amazon", "nyt")


def test_an_inner_archive_that_climbs_out_is_refused(tmp_path):
    sentiment(tmp_path, **{"hutto/../../x_GroundTruth.txt": b""})
    with pytest.raises(FileFormatError, match="would be written outside of its folder"):
        _loaders.sentiment4(tmp_path)


def test_the_last_column_of_mfeat_is_the_class_and_no_feature(tmp_path):
    for name in ("fac", "fou", "kar", "mor", "pix", "zer"):
        (tmp_path / f"mfeat-{name}.csv").write_text("0,1,2\n0.5,1.5,0.0\n2.5,3.5,9.0\n")
    digits = _loaders.mfeat(tmp_path)
    np.testing.assert_array_equal(digits.views["zer"], [[0.5, 1.5], [2.5, 3.5]])
    assert digits.y.tolist() == [0, 9]


def test_half_precision_vectors_are_widened_exactly(tmp_path):
    vectors = np.linspace(-2, 2, 12).astype(np.float16).reshape(4, 3)
    for folder in ("weights", "tokenizers"):
        (tmp_path / folder).mkdir()
    save_file({"embedding.weight": vectors}, tmp_path / "weights/l2_supercat_256.safetensors")
    (tmp_path / "tokenizers/l2_supercat_tokenizer_config.json").write_text("{}")
    tokens = _loaders.wordllama(tmp_path)
    assert tokens.vectors.dtype == np.float32
    np.testing.assert_array_equal(tokens.vectors, vectors)
    assert tokens.tokenizer_file.read_text() == "{}"


def test_a_state_dict_that_torch_saved_keeps_its_names_and_types(tmp_path):
    state = {"conv.weight": torch.randn(2, 3), "bn.num_batches_tracked": torch.tensor(7)}
    torch.save(state, tmp_path / "efficientnet-lite0-57934424.pth")
    weights = _loaders.efficientnet_lite0(tmp_path)
    assert list(weights.tensors) == list(state)
    np.testing.assert_array_equal(weights.tensors["conv.weight"], state["conv.weight"])
    assert weights.tensors["bn.num_batches_tracked"].dtype == np.int64


def test_a_state_dict_that_needs_code_is_refused(tmp_path):
    torch.save({"weight": Fraction(1, 2)}, tmp_path / "efficientnet-lite0-57934424.pth")
    with pytest.raises(pickle.UnpicklingError, match="Weights only load failed"):
        _loaders.efficientnet_lite0(tmp_path)


def ts_files(folder, name, train, test):
    (folder / name).mkdir()
    for part, lines in (("TRAIN", train), ("TEST", test)):
        text = "\n".join([f"# {name}: first\n@problemName {name}", "@classLabel true b a", "@data", *lines, ""])
        (folder / name / f"{name}_{part}.ts").write_text(text)


def test_ts_files_become_sets_whose_short_cases_end_in_nan(tmp_path):
    for name in _loaders.UCR:
        ts_files(tmp_path, name, ["1,2.5,-3e-1:4,5,6:b", "7,8:9,0:a"], ["1,1,1,1:2,2,2,2:a"])
    sets = _loaders.ucr(tmp_path)
    assert sets.names == _loaders.UCR
    np.testing.assert_array_equal(sets.x_train["GunPoint"][1], [[7, 8, np.nan], [9, 0, np.nan]])
    one = sets["GunPoint"]
    assert one.class_names == ("a", "b")
    assert (one.y_train.tolist(), one.y_test.tolist()) == ([1, 0], [0])
    np.testing.assert_array_equal(one.x_train[0], [[1, 2.5, -0.3], [4, 5, 6]])
    np.testing.assert_array_equal(one.x_train[1], [[7, 8], [9, 0]])
    assert one.x_test.shape == (1, 2, 4)
    with pytest.raises(KeyError, match="there is no set 'Gunpoint'; there are ACSF1, ArrowHead, "):
        sets["Gunpoint"]


def test_series_sets_come_back_from_the_cache_as_they_were(tmp_path):
    for name in _loaders.UCR:
        ts_files(tmp_path, name, ["1,2.5,3:b", "7,8:a"], ["1,1,1,1:a"])
    sets = _loaders.ucr(tmp_path)
    row = dataclasses.replace(datasets["ucr"], checksum=content_checksum(to_arrays(sets)))
    fill_cache(row, tmp_path / "cache", lambda work: sets)
    back = read_cached(row, tmp_path / "cache")
    for before, after in zip(sets["OSULeaf"], back["OSULeaf"], strict=True):
        for a, b in zip(before, after, strict=True):
            np.testing.assert_array_equal(a, b)


def test_tables_of_series_have_their_class_first(tmp_path):
    for name in ("Coffee", "PigCVP"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"{name}_TRAIN.txt").write_text("  1.0e+01  0.5  1.5  2.5\n  2.0e+00  3.5  4.5  5.5\n")
        (tmp_path / name / f"{name}_TEST.txt").write_text("  2.0e+00  6.5  7.5  8.5\n  1.0e+01  0.0  0.0  1.0\n")
    coffee = _loaders.ucr_coffee_pigcvp(tmp_path)["Coffee"]
    np.testing.assert_array_equal(coffee.x_train, [[[0.5, 1.5, 2.5]], [[3.5, 4.5, 5.5]]])
    assert coffee.class_names == ("2", "10")
    assert coffee.y_train.tolist() == [1, 0]


def test_arrays_with_the_channel_last_are_turned(tmp_path):
    X = np.arange(12.0).reshape(2, 6, 1)
    np.savez(tmp_path / "Trace.npz", X_train=X, X_test=-X, y_train=np.array([4, 1]), y_test=np.array([1, 4]))
    trace = _loaders.ucr_trace(tmp_path)["Trace"]
    np.testing.assert_array_equal(trace.x_train, X.transpose(0, 2, 1))
    assert trace.y_train.tolist() == [1, 0]


def test_arrays_that_need_unpickling_are_refused(tmp_path):
    np.savez(tmp_path / "Trace.npz", X_train=np.array([object()]))
    with pytest.raises(ValueError, match="allow_pickle=False"):
        _loaders.ucr_trace(tmp_path)


def table(monkeypatch, **columns):
    """The next pickle of a table has these columns."""
    monkeypatch.setattr(_loaders, "numeric_columns", lambda file: {k: np.array(v, float) for k, v in columns.items()})


def test_people_without_a_test_are_left_out_of_the_trial_of_incentives(tmp_path, monkeypatch):
    rows = {"distvct": [1, 2, 3, 4], "age": [30, 40, np.nan, 60], "hiv2004": [0, np.nan, 1, 0]}
    table(monkeypatch, got=[1, np.nan, 0, 1], any=[1, 0, 0, np.nan], **rows)
    trial = _loaders.thornton_hiv(tmp_path)
    assert trial.y.tolist() == [1, 0]
    assert trial.treatment.tolist() == [True, False]
    assert trial.feature_names == ("age", "distvct", "hiv2004")
    np.testing.assert_array_equal(trial.X, [[30, 1, 0], [np.nan, 3, 1]])


def test_the_first_year_of_each_person_counts_in_the_trial_of_insurance(tmp_path, monkeypatch):
    covariates = (
        "xage",
        "female",
        "black",
        "educdec",
        "linc",
        "num",
        "mhi",
        "disea",
        "physlm",
        "hlthg",
        "hlthf",
        "hlthp",
    )
    rows = {name: [k, 100 + k, k] for k, name in enumerate(covariates)}
    table(monkeypatch, year=[1, 2, 1], coins=[0, 0, 25], mdvis=[5, 6, 7], **rows)
    trial = _loaders.rand_hie(tmp_path)
    assert (trial.y.tolist(), trial.treatment.tolist()) == ([5, 7], [True, False])
    np.testing.assert_array_equal(trial.X, [range(12), range(12)])


def test_categories_become_a_column_a_level_beside_ten_simulations(tmp_path):
    (tmp_path / "x.csv").write_text('"x_1","x_2","x_3"\n29,"C",1.5\n27,"A",2\n')
    for i in range(1, 11):
        (tmp_path / f"zymu_{i}.csv").write_text(f'"z","y0","y1","mu0","mu1"\n0,{i},1,2,3\n1,4,5,6,7\n')
    births = _loaders.acic2016(tmp_path)
    assert births.feature_names == ("x_1", "x_3", "x_2=A", "x_2=C")
    np.testing.assert_array_equal(births.X, [[29, 1.5, 0, 1], [27, 2, 1, 0]])
    np.testing.assert_array_equal(births.y0, [[i, 4] for i in range(1, 11)])
    np.testing.assert_array_equal(births.mu1, [[3, 7]] * 10)
    assert births.treatment.tolist() == [[False, True]] * 10
