"""FLOPs of N:M training: the oracle of one layer, and torch's own counter."""

import json

import pytest
import torch
from torch import nn
from torch.utils.flop_counter import FlopCounterMode

from heedful.compress import training_flops
from heedful.errors import ParameterError
from tests.conformance.typechecks import as_users_have_it

METHODS = ("dense", "static", "sr_ste", "nm_rigl", "bi_mask", "bame")


def cnn():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1),
        nn.BatchNorm2d(8),
        nn.ReLU(),
        nn.Conv2d(8, 16, 3, stride=2, padding=1, bias=False),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * 4 * 4, 32),
        nn.Linear(32, 5),
    )


@pytest.mark.parametrize(
    ("method", "dx", "relative"),
    [
        ("dense", "sparse", 1.0),
        ("static", "sparse", 1 / 16),
        ("sr_ste", "sparse", 0.375),
        ("sr_ste", "dense", 0.6875),
        ("bame", "sparse", 0.065625),
        ("bame", "dense", 0.378125),
        ("nm_rigl", "dense", 0.378125),
        ("bi_mask", "sparse", 0.375),
        ("bi_mask", "dense", 0.375),  # its backward mask is made for the transposed weight
    ],
)
def test_one_sparse_layer_of_1_in_16(method, dx, relative):
    report = training_flops(nn.Linear(64, 64), (64,), n=1, m=16, method=method, interval=100, dx=dx, exclude=())
    assert report.relative == pytest.approx(relative, rel=1e-12)
    assert report.dense == 3 * 2 * 64 * 64


def test_2_of_4_by_hand():
    reports = {method: training_flops(nn.Linear(8, 8), (8,), n=2, m=4, method=method, exclude=()) for method in METHODS}
    assert reports["sr_ste"].relative == pytest.approx(2 / 3)
    assert reports["bame"].relative == pytest.approx((0.5 + 0.5 + 0.505) / 3)
    assert reports["bame"].weight_gradient == pytest.approx(0.505 * 128)
    assert reports["bame"].forward == reports["bame"].input_gradient == 64
    assert reports["static"].total == 1.5 * 128


def test_dense_counts_equal_those_of_torch():
    model, x = cnn(), torch.randn(3, 3, 8, 8, requires_grad=True)
    with FlopCounterMode(display=False) as counter:
        model(x).sum().backward()
    report = training_flops(model, (3, 8, 8), n=2, m=4, method="dense")
    assert counter.get_total_flops() == 3 * report.total == 3 * report.dense
    with FlopCounterMode(display=False) as forward, torch.no_grad():
        model(x)
    assert forward.get_total_flops() == 3 * report.forward


def test_layers_that_stay_dense_cost_what_they_did():
    report = training_flops(cnn(), (3, 8, 8), n=2, m=8, method="static")
    assert report.sparse_layers == ("3", "6")
    dense = 2 * (8 * 64 * 27 + 32 * 5)  # outputs times inputs of each, of the ends
    sparse = 2 * (16 * 16 * 72 + 256 * 32)
    assert report.forward == dense + sparse / 4
    assert report.dense == 3 * (dense + sparse)
    assert training_flops(cnn(), (3, 8, 8), n=2, m=8, method="static", include=["6"]).sparse_layers == ("6",)


def test_n_equal_to_m_is_dense_training():
    for method in METHODS:
        assert training_flops(cnn(), (3, 8, 8), n=4, m=4, method=method, dx="dense").relative == pytest.approx(1)


def test_bytes_of_values_and_of_their_places():
    report = training_flops(nn.Linear(64, 32), (64,), n=2, m=4, method="bame", exclude=())
    assert (report.weight_bytes, report.index_bytes, report.dense_bytes) == (1024 * 4, 1024 * 2 // 8, 2048 * 4)
    report = training_flops(nn.Linear(64, 32).bfloat16(), (64,), n=1, m=16, method="bame", exclude=())
    assert (report.weight_bytes, report.index_bytes, report.dense_bytes) == (128 * 2, 128 * 4 // 8, 2048 * 2)
    report = training_flops(nn.Linear(64, 32), (64,), n=1, m=16, method="dense", exclude=())
    assert (report.weight_bytes, report.index_bytes) == (2048 * 4, 0)


def test_counting_changes_nothing_and_computes_nothing():
    model = cnn().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    training_flops(model, (3, 8, 8), n=2, m=4, method="bame")
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert torch.equal(state, torch.get_rng_state())
    assert model.training
    assert not any(layer._forward_hooks for layer in model.modules())


def test_the_report_is_json():
    report = training_flops(nn.Linear(8, 8), (8,), n=2, m=4, method="bame", exclude=())
    assert json.loads(json.dumps(report.to_dict()))["relative"] == report.relative


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"n": 5}, "n must be at most m: n entries of every m are kept; got n=5, m=4."),
        ({"n": 0}, "n must be an int >= 1; got 0."),
        ({"interval": 0}, "interval must be an int >= 1; got 0."),
        ({"dx": "transposed"}, "dx must be one of 'sparse', 'dense'; got 'transposed'."),
        (
            {"method": "rigl"},
            "method must be one of 'dense', 'static', 'sr_ste', 'nm_rigl', 'bi_mask', 'bame'; got 'rigl'.",
        ),
    ],
)
def test_bad_settings_are_refused(changes, message):
    settings = {"n": 2, "m": 4, "method": "bame"} | changes
    with as_users_have_it(), pytest.raises(ParameterError) as error:
        training_flops(nn.Linear(8, 8), (8,), exclude=(), **settings)
    assert str(error.value) == message
