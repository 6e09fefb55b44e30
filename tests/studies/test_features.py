"""EfficientNet-Lite0 as it was published, and its features computed once."""

import numpy as np
import pytest
import torch
from sklearn.datasets import load_sample_image
from torch import nn

from heedful import data
from heedful.studies import _features
from heedful.studies._features import N_FEATURES, EfficientNetLite0, image_features


@pytest.fixture(scope="module")
def network():
    if not data.is_cached("efficientnet_lite0"):
        pytest.skip("the data set efficientnet_lite0 is not in the cache of this machine, and tests fetch nothing")
    return EfficientNetLite0(data.load("efficientnet_lite0").tensors)


@pytest.mark.parametrize(
    ("photograph", "columns", "classes", "logits"),
    [
        ("china.jpg", slice(208, 432), (698, 663, 442), (8.9040, 7.8642, 7.0577)),  # palace, monastery, bell cote
        ("flower.jpg", slice(208, 432), (619, 985, 108), (6.5724, 6.3871, 5.6372)),  # lampshade, daisy, sea anemone
    ],
)
def test_photographs_are_seen_as_the_published_network_sees_them(network, photograph, columns, classes, logits):
    # By efficientnet-lite-pytorch 0.1.0 with torch 2.13 on 30 November 2026; the two differed by less than 1e-5.
    pixels = torch.tensor(load_sample_image(photograph)[101:325, columns]).permute(2, 0, 1)[None]
    found = network.logits((pixels.float() - 127) / 128)[0].topk(3)
    assert tuple(found.indices.tolist()) == classes
    torch.testing.assert_close(found.values, torch.tensor(logits), rtol=0, atol=1e-3)


@pytest.mark.parametrize("side", [1, 4, 5, 7])
@pytest.mark.parametrize("kernel", [3, 5])
@pytest.mark.parametrize("stride", [1, 2])
def test_an_odd_pixel_of_padding_goes_to_the_right_and_below(side, kernel, stride):
    x = torch.arange(float(side * side)).reshape(1, 1, side, side)
    first = torch.zeros(1, 1, kernel, kernel)
    first[..., 0, 0] = 1  # shows what stands at the upper left of each window
    convolution = _features._Convolution(first, torch.zeros(1), stride)
    n_windows = -(-side // stride)
    above = max((n_windows - 1) * stride + kernel - side, 0) // 2
    padded = nn.functional.pad(x, (above, kernel, above, kernel))
    expected = padded[..., : n_windows * stride : stride, : n_windows * stride : stride]
    assert torch.equal(convolution(x), expected)


def test_a_folded_convolution_is_the_convolution_and_its_normalisation(seed):
    torch.manual_seed(seed)
    convolution, norm = nn.Conv2d(4, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6, eps=1e-3).eval()
    for tensor in (norm.weight, norm.bias, norm.running_mean):
        nn.init.normal_(tensor)
    nn.init.uniform_(norm.running_var, 0.5, 2.0)
    weights = {f"c.{name}": tensor for name, tensor in convolution.state_dict().items()}
    weights |= {f"n.{name}": tensor for name, tensor in norm.state_dict().items()}
    x = torch.randn(2, 4, 8, 8)
    # Sums of 36 products in another order: single precision.
    torch.testing.assert_close(_features._folded(weights, "c", "n")(x), norm(convolution(x)), rtol=1e-4, atol=1e-5)


def test_grey_images_are_colour_images_of_three_equal_channels(network, tmp_path, monkeypatch):
    weights = data.load("efficientnet_lite0")
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    monkeypatch.setattr(data, "load", lambda name: weights)
    grey = np.random.default_rng(0).integers(0, 256, (3, 28, 28), np.uint8)
    features = image_features(grey)
    assert features.shape == (3, N_FEATURES)
    np.testing.assert_array_equal(features, image_features(np.repeat(grey[..., None], 3, 3)))
    one_by_one = np.concatenate([image_features(image[None]) for image in grey])
    np.testing.assert_allclose(features, one_by_one, atol=1e-4)  # sums of single precision in another order


def test_features_are_computed_once_for_the_same_images(tmp_path, monkeypatch):
    calls = []

    def compute(images):
        calls.append(images)
        return np.full((len(images), N_FEATURES), images.mean(), np.float32)

    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    monkeypatch.setattr(_features, "_compute", compute)
    images = np.arange(2 * 8 * 8, dtype=np.uint8).reshape(2, 8, 8)
    np.testing.assert_array_equal(image_features(images), image_features(images.copy()))
    assert len(calls) == 1
    image_features(images[::-1])
    image_features(images.reshape(2, 16, 4))  # the same bytes
    assert len(calls) == 3
