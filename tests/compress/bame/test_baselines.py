"""SR-STE, N:M RigL, Bi-Mask and static masks against their definitions."""

import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

from heedful._masks import nm_mask
from heedful.compress import SRSTE, BiMask, NMRigL, StaticMask, check_nm
from heedful.compress.bame.baselines import surviving
from heedful.errors import InputError, ParameterError, UnsupportedModelError
from tests.compress.bame.nets import batches, cnn, mlp, sgd, train
from tests.conformance.typechecks import as_users_have_it


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


DRIVERS = {
    "sr_ste": lambda model, optimizer: SRSTE(model, optimizer, total_steps=40),
    "nm_rigl": lambda model, optimizer: NMRigL(model, optimizer, total_steps=40, interval=4),
    "bi_mask": lambda model, optimizer: BiMask(
        model, optimizer, total_steps=40, interval=4, n_permutations=3, generator=seeded()
    ),
    "static": lambda model, optimizer: StaticMask(model, optimizer, pattern="2:4", total_steps=40, generator=seeded()),
}


@pytest.mark.parametrize("kind", DRIVERS)
@pytest.mark.parametrize("make", [mlp, cnn])
def test_masks_keep_the_pattern_and_finalize_bakes_it(kind, make):
    model, plain = make(), make()
    optimizer = sgd(model)
    driver = DRIVERS[kind](model, optimizer)
    for batch in batches(model, 9):
        train(model, optimizer, driver, [batch])
        for mask in driver.masks().values():
            assert (mask.movedim(1, -1).reshape(-1, 4).sum(1) == 2).all()
    model.eval(), plain.eval()
    x = next(iter(batches(model, 1)))[0]
    expected = model(x)
    driver.finalize()
    torch.testing.assert_close(model(x), expected)
    assert [type(layer) for layer in model] == [type(layer) for layer in plain]
    assert list(model.state_dict()) == list(plain.state_dict())
    for name in driver.masks():
        assert check_nm(model.get_submodule(name).weight, 2, 4, dim=1)
    assert driver.stats().density == 0.5


@pytest.mark.parametrize("kind", DRIVERS)
@pytest.mark.parametrize("steps", [8, 10])  # just after and between the changes that come every four steps
def test_resuming_is_bit_for_bit(kind, steps):
    data = list(batches(mlp(), 20))
    runs = []
    for interrupted in (False, True):
        model = mlp()
        optimizer = sgd(model)
        driver = DRIVERS[kind](model, optimizer)
        train(model, optimizer, driver, data[:steps])
        if interrupted:
            states = model.state_dict(), optimizer.state_dict(), driver.state_dict()
            model = mlp(5)
            optimizer = sgd(model)
            driver = DRIVERS[kind](model, optimizer)
            for restored, state in zip((model, optimizer, driver), states, strict=True):
                restored.load_state_dict(state)
        train(model, optimizer, driver, data[steps:])
        runs.append([p.detach().clone() for p in model.parameters()])
        stats = driver.stats()
        runs[-1].append(torch.tensor([stats.density, stats.adaptations, stats.swaps]))
    assert all(torch.equal(a, b) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("kind", DRIVERS)
def test_a_state_of_another_pattern_is_refused(kind):
    model, other = mlp(), mlp()
    state = DRIVERS[kind](model, sgd(model)).state_dict()
    with pytest.raises(InputError, match=r"^This state does not fit: its pattern is '1:4', this driver's is '2:4'\."):
        DRIVERS[kind](other, sgd(other)).load_state_dict({**state, "pattern": "1:4"})


# SR-STE.


def naive_sr_ste(model, optimizer, data, *, n, m, decay):
    """Published: prune in the forward pass, dense gradients, and the decay of what is pruned."""
    names = ("2", "4")
    for x, y in data:
        optimizer.zero_grad()
        dense = {name: model.get_submodule(name).weight.detach().clone() for name in names}
        masks = {name: nm_mask(weight, n, m, dim=1) for name, weight in dense.items()}
        with torch.no_grad():
            for name in names:
                model.get_submodule(name).weight.mul_(masks[name])
        cross_entropy(model(x), y).backward()
        with torch.no_grad():
            for name in names:
                weight = model.get_submodule(name).weight
                weight.copy_(dense[name])
                weight.grad += decay * ~masks[name] * dense[name]
        optimizer.step()


def test_sr_ste_equals_its_published_form():
    ours, twin = mlp(dtype=torch.float64), mlp(dtype=torch.float64)
    data = list(batches(ours, 25, dtype=torch.float64))
    optimizer = sgd(ours, lr=0.3)
    driver = SRSTE(ours, optimizer, 2, 4, total_steps=25, decay=0.02)
    train(ours, optimizer, driver, data)
    naive_sr_ste(twin, sgd(twin, lr=0.3), data, n=2, m=4, decay=0.02)
    for name in ("2", "4"):
        torch.testing.assert_close(driver.weights()[name], twin.get_submodule(name).weight)
    assert driver.stats().swaps > 0
    assert driver.stats().adaptations == 25


def test_sr_stes_decay_is_scaled_as_the_gradients_of_a_fused_optimizer_are():
    model = mlp()
    optimizer = sgd(model)
    driver = SRSTE(model, optimizer, 2, 4, total_steps=5, decay=0.02)
    weight = driver.weights()["2"]
    pull = 0.02 * weight.detach() * ~driver.masks()["2"]
    for weights in driver.weights().values():
        weights.grad = torch.zeros_like(weights)
    optimizer.grad_scale = torch.tensor(8.0)
    with torch.no_grad():
        driver._before_step()
    assert pull.any()
    torch.testing.assert_close(weight.grad, 8 * pull)


# N:M RigL.


def test_nm_rigl_replaces_the_smallest_weight_of_the_first_blocks_by_the_steepest():
    model = mlp()
    driver = NMRigL(model, sgd(model), total_steps=100, interval=1, drop_fraction=0.3)
    weight, mask = driver.weights()["2"], driver.masks()["2"].clone()
    sizes = weight.detach().abs().clone()
    gradient = torch.randn(32, 16, generator=seeded())
    with torch.no_grad():
        driver._adapt({"2": gradient})
    smallest = sizes.masked_fill(~mask, math.inf).view(128, 4).min(1)
    steepest = gradient.abs().masked_fill(mask, -1).view(128, 4).argmax(1)
    chosen = smallest.values.argsort()[: math.ceil(0.6 * 128)]  # 0.3 of the two active weights a block has
    expected = mask.view(128, 4).clone()
    expected[chosen, smallest.indices[chosen]] = False
    expected[chosen, steepest[chosen]] = True
    assert torch.equal(driver.masks()["2"], expected.view(32, 16))
    assert driver.stats().swaps == 77
    assert driver.stats().adaptations == 1


def test_the_drop_fraction_falls_to_nothing_by_a_cosine():
    model = mlp()
    driver = NMRigL(model, sgd(model), 1, 4, total_steps=100, interval=10, end=0.75, drop_fraction=0.4)
    swaps = []
    for step in (0, 25, 50, 74):
        driver.steps_taken = step
        before = driver.stats().swaps
        with torch.no_grad():
            driver._adapt({"2": torch.randn(32, 16, generator=seeded(step))})
        swaps.append(driver.stats().swaps - before)
    shares = [0.2 * (1 + math.cos(math.pi * step / 75)) for step in (0, 25, 50, 74)]
    assert swaps == [math.ceil(share * 128) for share in shares]


def test_nm_rigl_with_n_equal_to_m_changes_nothing():
    model = mlp()
    optimizer = sgd(model)
    driver = NMRigL(model, optimizer, 4, 4, total_steps=20, interval=2)
    train(model, optimizer, driver, batches(model, 6))
    assert driver.stats().swaps == 0


# Bi-Mask.


def bi_mask(model, **settings):
    return BiMask(model, sgd(model), **{"total_steps": 40, "n_permutations": 5, "generator": seeded(), **settings})


@pytest.mark.parametrize(("make", "name", "shape"), [(mlp, "2", (4, 16)), (cnn, "3", (4, 8, 4, 4))])
def test_bi_mask_goes_forward_by_one_weight_and_back_by_another(make, name, shape):
    model = make()
    driver = bi_mask(model)
    layer, weight = model.get_submodule(name), driver.weights()[name].detach()
    x = torch.randn(shape, generator=seeded(), requires_grad=True)
    operation = nn.functional.linear if make is mlp else nn.functional.conv2d
    forward = (weight * driver.masks()[name]).requires_grad_()
    expected = operation(x, forward, layer.bias)
    slope = torch.randn(expected.shape, generator=seeded(1))
    y = layer(x)
    assert torch.equal(y, expected)
    y.backward(slope)
    backward_mask = driver._masks[name].backward_mask
    assert (driver.masks()[name] & ~backward_mask).any()
    expected_dx = torch.autograd.grad(operation(x, weight * driver.masks()[name] * backward_mask), x, slope)[0]
    torch.testing.assert_close(x.grad, expected_dx)
    torch.testing.assert_close(driver.weights()[name].grad, torch.autograd.grad(expected, forward, slope)[0])
    torch.testing.assert_close(layer.bias.grad, slope.transpose(0, 1).flatten(1).sum(1))


@pytest.mark.parametrize("make", [mlp, cnn])
def test_the_backward_weight_is_nm_along_outputs_in_the_chosen_order(make):
    model = make()
    optimizer = sgd(model)
    driver = BiMask(model, optimizer, total_steps=40, interval=3, n_permutations=5, generator=seeded())
    train(model, optimizer, driver, batches(model, 7))
    for name, module in driver._masks.items():
        back = (driver.weights()[name].detach() * (module.mask & module.backward_mask))[module.rows]
        assert check_nm(back, 2, 4, dim=0)
        assert torch.equal(back[module.rows.argsort()] != 0, module.mask & module.backward_mask)


def test_the_order_is_the_best_of_those_drawn_and_changes_every_interval():
    model = mlp()
    optimizer = sgd(model)
    driver = BiMask(model, optimizer, total_steps=40, interval=2, n_permutations=20, generator=seeded(3))
    mask = driver.masks()["2"]
    orders = [torch.randperm(32, generator=generator) for generator in [seeded(3)] for _ in range(20)]
    counts = [surviving(mask[order], 2, 4) for order in orders]
    assert max(counts) > min(counts)
    rows = driver._masks["2"].rows.clone()
    assert torch.equal(rows, orders[counts.index(max(counts))])
    orders_seen = []
    for batch in batches(model, 5):
        train(model, optimizer, driver, [batch])
        orders_seen.append(driver._masks["2"].rows.clone())
    changed = [not torch.equal(a, b) for a, b in zip([rows, *orders_seen], orders_seen, strict=False)]
    assert changed == [False, True, False, True, False]


def test_surviving_counts_what_a_mask_along_the_other_dimension_leaves():
    mask = torch.tensor([[1, 1, 0], [1, 0, 0], [1, 0, 1], [0, 0, 1], [1, 0, 1]], dtype=torch.bool)
    # Rows 0 to 3: columns hold 3, 1, 2 True, of which 2 each may stay; row 4 is a block of its own.
    assert int(surviving(mask, 2, 4)) == 2 + 1 + 2 + 1 + 0 + 1


def test_bi_mask_takes_layers_whose_outputs_are_no_multiple_of_m():
    model = nn.Sequential(nn.Linear(6, 8), nn.ReLU(), nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    driver = bi_mask(model)
    model[2](torch.randn(2, 8, requires_grad=True)).sum().backward()
    module = driver._masks["2"]
    back = (module.mask & module.backward_mask)[module.rows].float()
    assert check_nm(back, 2, 4, dim=0)  # the last two rows are a block of their own


# Static masks.


@pytest.mark.parametrize("selection", ["random", "magnitude"])
@pytest.mark.parametrize(
    ("settings", "active"),
    [
        ({"pattern": "1:8"}, {"2": 64, "4": 64}),
        ({"pattern": "unstructured", "sparsity": 0.9}, {"2": 51, "4": 51}),
        ({"pattern": "diagonal", "sparsity": 0.9}, {"2": 4 * 16, "4": 4 * 16}),  # ⌈0.1 · 32⌉ diagonals of 16
    ],
)
def test_static_masks_never_change_and_have_the_size_they_were_asked_for(settings, active, selection):
    model = mlp()
    optimizer = sgd(model)
    driver = StaticMask(model, optimizer, total_steps=20, selection=selection, generator=seeded(), **settings)
    before = {name: mask.clone() for name, mask in driver.masks().items()}
    assert {name: int(mask.sum()) for name, mask in before.items()} == active
    train(model, optimizer, driver, batches(model, 5))
    for name, mask in driver.masks().items():
        assert torch.equal(mask, before[name])
        assert (driver.weights()[name][~mask] == 0).all()
    assert driver.stats().adaptations == driver.stats().swaps == 0


def test_selection_by_magnitude_takes_the_largest():
    dense, model = mlp()[2].weight.detach().abs(), mlp()
    driver = StaticMask(model, sgd(model), total_steps=9, pattern="unstructured", sparsity=0.75, selection="magnitude")
    mask = driver.masks()["2"]
    assert dense[mask].min() >= dense[~mask].max()
    model = mlp()
    driver = StaticMask(model, sgd(model), total_steps=9, pattern="diagonal", sparsity=0.9, selection="magnitude")
    rows, columns = driver.masks()["2"].nonzero(as_tuple=True)
    offsets = (rows - columns) % 32
    norms = torch.stack([dense[(torch.arange(16) + o) % 32, torch.arange(16)].norm() for o in range(32)])
    assert set(offsets.tolist()) == set(norms.topk(4).indices.tolist())


def test_random_selection_is_that_of_the_generator():
    masks = []
    for seed in (0, 0, 1):
        model = mlp()
        driver = StaticMask(model, sgd(model), total_steps=9, pattern="2:4", generator=seeded(seed))
        masks.append(driver.masks()["2"])
    assert torch.equal(masks[0], masks[1])
    assert not torch.equal(masks[0], masks[2])


def test_initial_weights_are_rescaled_by_what_is_left():
    model, dense = mlp(), mlp()
    driver = StaticMask(model, sgd(model), total_steps=9, pattern="unstructured", sparsity=0.75, generator=seeded())
    mask = driver.masks()["2"]
    torch.testing.assert_close(driver.weights()["2"][mask], 2 * dense[2].weight[mask])
    assert driver.stats().rescaled["2"] == 2.0


def test_diagonals_leave_convolutions_dense():
    model = cnn()
    driver = StaticMask(model, sgd(model), total_steps=9, pattern="diagonal", sparsity=0.5, generator=seeded())
    assert list(driver.masks()) == ["6"]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"pattern": "diagonal"}, r"^pattern='diagonal' needs sparsity; got sparsity=None\.$"),
        ({"pattern": "2:4", "sparsity": 0.5}, r"^pattern='2:4' says all, and takes no sparsity; got sparsity=0\.5\.$"),
        ({"pattern": "dense"}, r'^a pattern reads n:m, such as "2:4": n of every m weights are kept; got \'dense\'\.$'),
        ({"pattern": "0:4"}, r"^n must be an int >= 1; got 0\.$"),
        ({"pattern": "5:4"}, r"^n must be at most m"),
        ({"pattern": "unstructured", "sparsity": 1.0}, r"^sparsity must be below 1"),
        ({"pattern": "2:4", "selection": "best"}, r"^selection must be one of 'random', 'magnitude'; got 'best'\.$"),
    ],
)
def test_bad_settings_of_static_masks_are_refused(settings, message):
    model = mlp()
    with as_users_have_it(), pytest.raises(ParameterError, match=message):
        StaticMask(model, sgd(model), total_steps=9, **settings)


@pytest.mark.parametrize(
    ("cls", "settings", "message"),
    [
        (SRSTE, {"decay": -1}, r"^decay must be a number >= 0; got -1\.$"),
        (NMRigL, {"drop_fraction": 2}, r"^drop_fraction must be a number >= 0 and <= 1; got 2\.$"),
        (BiMask, {"interval": 0}, r"^interval must be an int >= 1; got 0\.$"),
        (BiMask, {"n_permutations": 0}, r"^n_permutations must be an int >= 1; got 0\.$"),
    ],
)
def test_bad_settings_are_refused(cls, settings, message):
    model = mlp()
    with pytest.raises(ParameterError, match=message):
        cls(model, sgd(model), total_steps=9, **settings)


@pytest.mark.parametrize("kind", DRIVERS)
def test_layers_that_cannot_be_cut_are_listed(kind):
    model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6))
    with pytest.raises(
        UnsupportedModelError, match=r"^2:4 sparsity needs layers whose number of inputs is .*'1' \(6\)"
    ):
        DRIVERS[kind](model, sgd(model))
