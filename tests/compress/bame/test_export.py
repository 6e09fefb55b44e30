"""One-shot pruning, and weights for sparse tensor cores."""

import pytest
import torch
from torch import nn

from heedful._masks import nm_mask
from heedful.compress import BAME, StaticMask, check_nm, prune_nm, to_semi_structured
from heedful.compress.bame.export import prune_weight
from heedful.errors import HeedfulWarning, ParameterError, UnsupportedModelError
from tests.compress.bame.nets import batches, cnn, mlp, sgd, train


def test_pruning_keeps_the_largest_of_every_block_untouched(seed):
    weight = torch.randn(5, 8, generator=torch.Generator().manual_seed(seed))
    pruned = prune_weight(weight, 2, 4)
    for row, dense in zip(pruned.view(-1, 4), weight.view(-1, 4), strict=True):
        kept = row != 0
        assert kept.sum() == 2
        assert torch.equal(row[kept], dense[kept])
        assert dense[kept].abs().min() >= dense[~kept].abs().max()
    assert not pruned[pruned == 0].signbit().any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_pruning_keeps_the_type(dtype):
    assert prune_weight(torch.randn(4, 8).to(dtype), 1, 8).dtype == dtype


def test_a_model_is_pruned_in_place_but_for_its_ends():
    model, dense = cnn(), cnn()
    assert prune_nm(model, 2, 4) is model
    for name in ("0", "8"):
        assert torch.equal(model.get_submodule(name).weight, dense.get_submodule(name).weight)
    for name in ("3", "6"):
        weight = dense.get_submodule(name).weight.detach()
        assert torch.equal(model.get_submodule(name).weight, weight * nm_mask(weight, 2, 4, dim=1))
    model = mlp()
    prune_nm(model, 1, 4, exclude=["4", "first", "last"])
    assert [check_nm(layer.weight, 1, 4, dim=1) for layer in (model[2], model[4])] == [True, False]
    model = mlp()
    prune_nm(model, 1, 4, include=["4"])
    assert [check_nm(layer.weight, 1, 4, dim=1) for layer in (model[2], model[4])] == [False, True]


def test_pruning_twice_is_pruning_once():
    once = prune_nm(mlp(), 2, 8).state_dict()
    twice = prune_nm(prune_nm(mlp(), 2, 8), 2, 8).state_dict()
    assert all(torch.equal(value, twice[key]) for key, value in once.items())


def test_fine_tuning_with_a_static_mask_finds_what_pruning_kept():
    model = prune_nm(mlp(), 2, 4)
    optimizer = sgd(model)
    before = model[2].weight.detach().clone()
    driver = StaticMask(model, optimizer, pattern="2:4", total_steps=5, selection="magnitude", rescale_init=False)
    assert torch.equal(driver.weights()["2"], before)
    train(model, optimizer, driver, batches(model, 5))
    driver.finalize()
    assert torch.equal(model[2].weight != 0, before != 0)


def test_bad_patterns_and_models_are_refused():
    with pytest.raises(ParameterError, match=r"^n must be at most m"):
        prune_nm(mlp(), 5, 4)
    with pytest.raises(ParameterError, match=r"^n must be an int >= 1; got 0\.$"):
        prune_nm(mlp(), 0, 4)
    with pytest.raises(UnsupportedModelError, match=r"^2:5 sparsity needs layers .*: '2' \(16\), '4' \(32\)\. Exclude"):
        prune_nm(mlp(), 2, 5)
    model = mlp()
    BAME(model, sgd(model), total_steps=3)
    with pytest.raises(UnsupportedModelError, match=r"^The weight of layer '2' is parametrized already"):
        prune_nm(model, 2, 4)


def test_semi_structured_refuses_models_that_are_not_24():
    model = mlp()
    with pytest.raises(
        UnsupportedModelError, match=r"^No linear layer has at most 2 of every 4 weights along its inputs"
    ):
        to_semi_structured(model)
    BAME(model, sgd(model), total_steps=3)
    with pytest.raises(
        UnsupportedModelError, match=r"^Layer '2' is masked still by a driver; finalize\(\) that first\.$"
    ):
        to_semi_structured(model)


def test_semi_structured_says_what_hardware_it_needs_and_changes_nothing():
    model = prune_nm(mlp(), 2, 4)
    weight = model[2].weight
    with pytest.raises(
        UnsupportedModelError,
        match=r"^Layer '2' is on cpu; 2:4 products need an NVIDIA GPU of compute capability 8\.0 or more\. Move the model",
    ):
        to_semi_structured(model)
    assert model[2].weight is weight


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_semi_structured_multiplies_as_the_masked_layer_does():
    torch.manual_seed(0)
    layers = [nn.Conv2d(4, 64, 3), nn.Conv2d(64, 64, 3), nn.Flatten(), nn.Linear(256, 256), nn.Linear(256, 8)]
    model = nn.Sequential(*layers).cuda().bfloat16()
    prune_nm(model, 2, 4, exclude=["0", "4"])
    x = torch.randn(128, 4, 6, 6, device="cuda", dtype=torch.bfloat16)
    expected = model(x)
    with pytest.warns(HeedfulWarning, match=r"^Convolutions stay dense in memory and in speed, .*: '1'\.$"):
        to_semi_structured(model)
    assert isinstance(model[3].weight, torch.sparse.SparseSemiStructuredTensor)
    torch.testing.assert_close(model(x), expected, rtol=2e-2, atol=2e-2)  # bfloat16 has eight bits
    with pytest.raises(UnsupportedModelError, match=r"is torch\.float32; 2:4 products need float16 or bfloat16"):
        to_semi_structured(prune_nm(mlp(), 2, 4).cuda())
