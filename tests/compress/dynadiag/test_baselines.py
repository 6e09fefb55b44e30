"""Drop and grow: by hand, and through training."""

import copy
import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from heedful.compress import SET, DiagonalRigL, RigL
from heedful.compress._patterns import diagonal_mask, random_mask
from heedful.compress._sparsity import erk_densities
from heedful.compress.dynadiag.baselines import drop_and_grow
from heedful.errors import InputError, ParameterError, UnsupportedModelError
from tests.conformance.typechecks import as_users_have_it

DRIVERS = (RigL, SET, DiagonalRigL)
OPTIMIZERS = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=1e-2),
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
}


def net(seed=0):
    """Two sparse layers, one wide and one tall, between dense ends."""
    torch.manual_seed(seed)
    return nn.Sequential(
        nn.Linear(6, 20), nn.ReLU(), nn.Linear(20, 12), nn.ReLU(), nn.Linear(12, 20), nn.ReLU(), nn.Linear(20, 3)
    )


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def batch(step):
    x = torch.randn(16, 6, generator=generator(step))
    return x, x[:, :3].argmax(1)


def train(model, optimizer, driver, steps, watch=lambda: None):
    for step in steps:
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
        watch()
        driver.step()


# The core.


def test_drops_the_smallest_and_grows_where_growth_is_largest():
    weight = torch.tensor([0.5, -0.1, 0.0, 0.9, 0.0, 0.0])
    gradient = torch.tensor([9.0, 0.3, -0.2, 9.0, 0.1, -0.4])
    active = weight != 0
    # Of the active 0, 1, 3 the smallest is 1. It competes with 2, 4, 5 for growth 0.3, 0.2, 0.1, 0.4: 5 is grown.
    assert drop_and_grow(weight, gradient, active, 1).nonzero().flatten().tolist() == [0, 3, 5]
    # Two dropped, 0 and 1: 0 has the largest growth and comes back at once, and 5 follows.
    assert drop_and_grow(weight, gradient, active, 2).nonzero().flatten().tolist() == [0, 3, 5]
    assert torch.equal(drop_and_grow(weight, gradient, active, 0), active)


def test_of_equal_ones_the_lowest_index_is_kept_and_grown():
    active = torch.tensor([True, True, True, False, False, False])
    new = drop_and_grow(torch.ones(6), torch.tensor([0.0, 0, 0, 1, 1, 1]), active, 1)
    assert new.nonzero().flatten().tolist() == [0, 1, 3]


@given(numel=st.integers(1, 40), share=st.floats(0, 1), drop=st.floats(0, 1), seed=st.integers(0, 2**20))
def test_as_many_are_active_as_before(numel, share, drop, seed):
    g = generator(seed)
    active = torch.rand(numel, generator=g) < share
    n = round(drop * int(active.sum()))
    new = drop_and_grow(torch.randn(numel, generator=g), torch.randn(numel, generator=g), active, n)
    assert new.sum() == active.sum()
    assert int((active & ~new).sum()) <= n


# The drivers.


@pytest.mark.parametrize("optimizer_name", OPTIMIZERS)
@pytest.mark.parametrize("kind", DRIVERS)
def test_every_layer_has_exactly_its_count_after_every_step(kind, optimizer_name):
    model = net()
    optimizer = OPTIMIZERS[optimizer_name](model.parameters())
    driver = kind(model, optimizer, sparsity=0.8, total_steps=24, interval=2, generator=generator())
    counts = {name: int(mask.sum()) for name, mask in driver.masks().items()}
    assert counts == {"2": 48, "4": 48}  # 0.2 · 20 · 12, and 4 of 20 diagonals with 12 entries each
    seen = []

    def watch():
        for name, mask in driver.masks().items():
            assert int(mask.sum()) == counts[name]
            weight = model.get_submodule(name).weight
            assert not weight[~mask].any()
            assert not driver.weights()[name][~mask].any()
        seen.append(torch.cat([mask.flatten().clone() for mask in driver.masks().values()]))

    train(model, optimizer, driver, range(24), watch)
    changed = [i for i in range(1, 24) if not torch.equal(seen[i], seen[i - 1])]
    assert changed
    assert set(changed) <= set(range(2, 18, 2))  # at steps 2, 4 … before 0.75 · 24
    assert driver.stats().adaptations == 8
    assert driver.stats().density == 0.2
    plain = driver.finalize()
    assert set(plain.state_dict()) == set(net().state_dict())
    assert int(plain[2].weight.count_nonzero()) <= 48


def one_layer(kind, weight, mask, **settings):
    """A driver whose single layer, without bias, has this weight and mask, due at its next step."""
    model = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0, momentum=0.9)
    settings = {"total_steps": 100, "interval": 1, "exclude": (), "rescale_init": False, **settings}
    driver = kind(model, optimizer, sparsity=1 - mask.double().mean().item(), **settings)
    with torch.no_grad():
        driver.masks()[""].copy_(mask)
        driver.weights()[""].copy_(weight)
    optimizer.zero_grad()
    (0.0 * model(torch.ones(1, weight.shape[1]))).sum().backward()
    optimizer.step()
    driver.step()
    return model, optimizer, driver


def step_with_gradient(model, optimizer, gradient):
    """One step whose dense gradient is this."""
    optimizer.zero_grad()
    (model.weight * gradient).sum().backward()
    optimizer.step()


def test_rigl_exchanges_single_weights_by_hand():
    weight = torch.tensor([[0.5, 0.0, -0.2], [0.0, 0.8, 0.0]])
    gradient = torch.tensor([[0.01, 0.3, 0.02], [-0.5, 0.03, 0.4]])
    model, optimizer, driver = one_layer(RigL, weight, weight != 0, drop_fraction=0.35)
    optimizer.state[driver.weights()[""]]["momentum_buffer"].fill_(7.0)
    step_with_gradient(model, optimizer, gradient)
    # round(0.35 · 3) = 1: −0.2 is dropped, and grown is where |gradient| is largest, at (1, 0). It starts at 0 without
    # momentum, so its first value is −gradient; the others take a step with momentum 0.9 · 7.
    expected = torch.tensor([[0.5 - 6.31, 0.0, 0.0], [0.5, 0.8 - 6.33, 0.0]])
    torch.testing.assert_close(model.weight.detach(), expected)
    assert driver.stats().exchanged_fraction == pytest.approx(1 / 3)


def test_diagonal_rigl_exchanges_whole_diagonals_by_hand():
    # Offsets 0, 1 of a 3 × 3 weight: entries (0,0) (1,1) (2,2) and (1,0) (2,1) (0,2). Means of |W|: 0.7, 0.2; of W: 0.1, 0.2.
    weight = torch.tensor([[0.9, 0.0, 0.1], [0.4, -0.9, 0.0], [0.0, 0.1, 0.3]])
    mask = diagonal_mask((3, 3), torch.tensor([0, 1]))
    outside = torch.tensor([[0.0, -0.25, 0.0], [0.0, 0.0, 0.25], [0.25, 0.0, 0.0]])  # its mean is 0.25 / 3
    gradient = outside - mask * 0.125
    model, optimizer, driver = one_layer(DiagonalRigL, weight, mask, drop_fraction=0.5)
    step_with_gradient(model, optimizer, gradient)
    assert torch.equal(driver.masks()[""], diagonal_mask((3, 3), torch.tensor([0, 2])))
    expected = torch.eye(3) * (weight + 0.125) - outside
    torch.testing.assert_close(model.weight.detach(), expected)


def test_set_grows_by_its_generator_alone_and_rigl_by_the_gradient_alone():
    weight = torch.linspace(0.1, 1.0, 100).view(10, 10) * random_mask((10, 10), 0.3, generator=generator(1))
    gradient = torch.randn(10, 10, generator=generator(2))

    def grown(kind, gradient, seed):
        torch.manual_seed(seed)  # must not matter, a generator is given
        model, optimizer, driver = one_layer(kind, weight, weight != 0, generator=generator(seed))
        step_with_gradient(model, optimizer, gradient)
        return driver.masks()[""]

    assert torch.equal(grown(SET, gradient, 3), grown(SET, -2 * gradient.flip(0), 3))
    assert not torch.equal(grown(SET, gradient, 3), grown(SET, gradient, 4))
    assert torch.equal(grown(RigL, gradient, 3), grown(RigL, -2 * gradient, 4))
    assert not torch.equal(grown(RigL, gradient, 3), grown(RigL, gradient.flip(0), 3))


def test_the_share_dropped_falls_by_a_cosine_to_zero_at_the_end():
    weight = torch.rand(100, 10, generator=generator()) + 0.1
    mask = random_mask((100, 10), 0.5, generator=generator(1))
    model, optimizer, driver = one_layer(SET, weight, mask, total_steps=20, drop_fraction=0.6, end=0.5)
    exchanged, noise = [], generator(2)
    for t in range(1, 20):
        before = driver.masks()[""].clone()
        kept = before.clone()
        order = driver.weights()[""].detach().abs().where(before, math.inf).flatten().argsort()
        n = round(500 * 0.3 * (1 + math.cos(math.pi * t / 10))) if t < 10 else 0
        kept.view(-1)[order[:n]] = False
        step_with_gradient(model, optimizer, torch.zeros(100, 10))
        assert (driver.masks()[""] & kept).sum() == 500 - n  # the n smallest made way, nothing else did
        exchanged.append(int((before & ~driver.masks()[""]).sum()))
        with torch.no_grad():
            driver.weights()[""].add_(driver.masks()[""] * torch.rand(100, 10, generator=noise) * 1e-3)  # no ties
        driver.step()
    assert exchanged[0] > 100  # 293 were dropped, and about 293 · 293 / 793 of them drawn again
    assert not any(exchanged[9:])


def test_a_grown_weight_has_no_moments_of_adam():
    weight = torch.tensor([[0.5, 0.0, -0.2], [0.0, 0.8, 0.0]])
    model = nn.Linear(3, 2, bias=False)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.0)
    driver = RigL(model, optimizer, sparsity=0.5, total_steps=10, interval=1, drop_fraction=0.35, exclude=())
    with torch.no_grad():
        driver.masks()[""].copy_(weight != 0)
        driver.weights()[""].copy_(weight)
    step_with_gradient(model, optimizer, torch.ones(2, 3))
    driver.step()
    step_with_gradient(model, optimizer, torch.tensor([[1.0, 0, 1], [3, 1, 0]]))
    first, second = (optimizer.state[driver.weights()[""]][key] for key in ("exp_avg", "exp_avg_sq"))
    torch.testing.assert_close(first, torch.tensor([[0.19, 0, 0], [0.3, 0.19, 0]]))  # 0.1 g and 0.9 · 0.1 + 0.1
    torch.testing.assert_close(second[1, 0], torch.tensor(0.009))


@pytest.mark.parametrize("kind", DRIVERS)
def test_training_resumes_bitwise(kind):
    def start(seed):
        model = net(seed)
        optimizer = OPTIMIZERS["adam"](model.parameters())
        settings = {"sparsity": 0.8, "total_steps": 12, "interval": 2, "generator": generator(seed)}
        return model, optimizer, kind(model, optimizer, **settings)

    whole = start(0)
    train(*whole, range(12))
    for cut in (4, 5):  # before a step that adapts, and before one that does not
        first = start(0)
        train(*first, range(cut))
        saved = [copy.deepcopy(part.state_dict()) for part in first]
        again = start(1)
        for part, state in zip(again, saved, strict=True):
            part.load_state_dict(state)
        train(*again, range(cut, 12))
        for ours, theirs in zip(again[0].state_dict().values(), whole[0].state_dict().values(), strict=True):
            assert torch.equal(ours, theirs)
        assert again[2].stats() == whole[2].stats()


@pytest.mark.parametrize(
    ("other", "settings", "message"),
    [
        (RigL, {"sparsity": 0.8}, "its sparsity is 0.9, this driver's is 0.8"),
        (RigL, {"distribution": "erk"}, "its distribution is 'uniform', this driver's is 'erk'"),
        (SET, {}, "its driver is 'RigL', this driver's is 'SET'"),
    ],
)
def test_a_state_of_another_driver_is_refused(other, settings, message):
    def make(kind, **settings):
        model = net()
        return kind(model, OPTIMIZERS["sgd"](model.parameters()), total_steps=4, **settings)

    with pytest.raises(InputError, match=message):
        make(other, **settings).load_state_dict(make(RigL).state_dict())


@pytest.mark.parametrize("kind", DRIVERS)
def test_erk_keeps_small_layers_denser(kind):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(20, 20), nn.Linear(20, 200), nn.Linear(200, 100))
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    driver = kind(model, optimizer, sparsity=0.9, total_steps=10, distribution="erk", exclude=())
    densities = erk_densities({"0": (20, 20), "1": (200, 20), "2": (100, 200)}, 0.9)
    for name, mask in driver.masks().items():
        rounding = 1 / max(mask.shape) if kind is DiagonalRigL else 1 / mask.numel()
        assert mask.double().mean().item() == pytest.approx(densities[name], abs=rounding)
    assert densities["0"] > densities["1"] > densities["2"]
    assert driver.stats().density == pytest.approx(0.1, abs=0.01)


def test_outputs_keep_the_variance_of_the_dense_start():
    x = torch.randn(2000, 400, generator=generator(1))
    for kind in DRIVERS:
        torch.manual_seed(0)
        model = nn.Linear(400, 400, bias=False)
        dense = model(x).std().item()
        kind(model, OPTIMIZERS["sgd"](model.parameters()), total_steps=10, exclude=(), generator=generator())
        assert model(x).std().item() == pytest.approx(dense, rel=0.05)  # 16,000 weights: 1 % of noise


def test_rigl_takes_convolutions_and_diagonals_leave_them_dense():
    def convolutional():
        return nn.Sequential(nn.Conv2d(1, 4, 3), nn.Conv2d(4, 8, 3), nn.Flatten(), nn.Linear(8, 8), nn.Linear(8, 2))

    for kind, layers in ((RigL, {"1", "3"}), (SET, {"1", "3"}), (DiagonalRigL, {"3"})):
        model = convolutional()
        driver = kind(model, OPTIMIZERS["sgd"](model.parameters()), sparsity=0.75, total_steps=4, interval=1)
        assert set(driver.masks()) == layers
        model(torch.randn(2, 1, 5, 5)).sum().backward()
        driver.optimizer.step()
        driver.step()


def test_stats_are_json():
    model = net()
    driver = RigL(model, OPTIMIZERS["sgd"](model.parameters()), total_steps=4)
    assert json.loads(json.dumps(driver.stats().to_dict())) == {
        "adaptations": 0,
        "exchanged_fraction": 0.0,
        "density": 0.1,
    }


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1.0}, "sparsity must be below 1: nothing would be left to train; got 1."),
        ({"sparsity": -0.1}, "sparsity must be a number >= 0 and <= 1; got -0.1."),
        ({"distribution": "even"}, "distribution must be one of 'uniform', 'erk'; got 'even'."),
        ({"drop_fraction": 1.5}, "drop_fraction must be a number >= 0 and <= 1; got 1.5."),
        ({"interval": 0}, "interval must be an int >= 1; got 0."),
    ],
)
@pytest.mark.parametrize("kind", DRIVERS)
def test_settings_out_of_range_are_refused_and_leave_the_model_alone(kind, settings, message):
    model = net()
    before = copy.deepcopy(model.state_dict())
    with as_users_have_it(), pytest.raises(ParameterError) as error:
        kind(model, OPTIMIZERS["sgd"](model.parameters()), total_steps=4, **settings)
    assert str(error.value) == message
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


@pytest.mark.parametrize("kind", DRIVERS)
def test_a_second_driver_is_refused(kind):
    model = net()
    optimizer = OPTIMIZERS["sgd"](model.parameters())
    kind(model, optimizer, total_steps=4)
    with pytest.raises(UnsupportedModelError, match="The weight of layer '2' is parametrized already"):
        kind(model, optimizer, total_steps=4)
