"""Choosing layers, masks as parametrizations, the protocol of drivers, ERK and schedules."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.utils import parametrizations, parametrize

from heedful.compress._sparsity import (
    Mask,
    MaskedTraining,
    SparseTraining,
    anneal,
    clear_moments,
    csr_matrix,
    erk_densities,
    select_layers,
)
from heedful.errors import ClosureError, HeedfulWarning, InputError, ParameterError, UnsupportedModelError
from tests.conformance.typechecks import as_users_have_it


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding = nn.Embedding(5, 4)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.Conv2d(4, 4, 1))] * 1)
        self.blocks.append(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4)))
        self.head = nn.Linear(4, 2)


def names(model, *args, **kwargs):
    return list(select_layers(model, *args, **kwargs))


# Which layers.


def test_layers_come_in_order_of_registration_without_the_ends_of_the_model():
    assert names(Net()) == ["blocks.0.0", "blocks.1.0"]
    assert names(Net(), (nn.Linear, nn.Conv2d)) == ["blocks.0.0", "blocks.0.2", "blocks.1.0"]
    assert names(Net(), exclude=()) == ["blocks.0.0", "blocks.1.0", "head"]


def test_first_and_last_are_those_of_the_whole_model_whatever_their_kind():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Conv2d(4, 4, 1))
    assert names(model) == ["1"]
    assert names(model, exclude=("last",)) == ["0", "1"]
    assert names(model, exclude=("first",)) == ["1"]


@pytest.mark.parametrize("pattern", ["blocks.1.0", "blocks.1*", r"re:blocks\.[1-9]\.\d"])
def test_a_layer_is_named_by_itself_by_a_glob_or_by_an_expression(pattern):
    assert names(Net(), include=[pattern]) == ["blocks.1.0"]
    assert names(Net(), exclude=[pattern, "last"]) == ["blocks.0.0"]


def test_a_pattern_that_matches_nothing_is_refused_with_the_names_there_are():
    with pytest.raises(
        ParameterError,
        match=r"^exclude: 'blocs\.\*' matches no layer; there are 'blocks\.0\.0', 'blocks\.1\.0', 'head'\.$",
    ):
        select_layers(Net(), exclude=["blocs.*"])
    with pytest.raises(ParameterError, match=r"^include must be a sequence of patterns; got the string 'head'\."):
        select_layers(Net(), include="head")
    with pytest.raises(ParameterError, match=r"^exclude: 're:\(' is not a regular expression: missing \)"):
        select_layers(Net(), exclude=["re:("])
    with (
        as_users_have_it(),
        pytest.raises(ParameterError, match=r"^exclude must hold names of layers, globs or re:…; got 1"),
    ):
        select_layers(Net(), exclude=[1])


def test_an_empty_choice_is_refused():
    with pytest.raises(UnsupportedModelError, match=r"^No Conv1d layer is left to work on: the model has none; "):
        select_layers(Net(), (nn.Conv1d,))
    with pytest.raises(
        UnsupportedModelError,
        match=r"the model has 'blocks\.0\.0', 'blocks\.1\.0', 'head'; included are 'head', excluded 'first', 'last'\. "
        r"Exclude less, say exclude=\(\)\.$",
    ):
        select_layers(Net(), include=["head"])


def test_shared_weights_are_refused_by_the_names_of_both_modules():
    model = Net()
    model.blocks[1][0].weight = model.blocks[0][0].weight
    with pytest.raises(
        UnsupportedModelError,
        match=r"^Modules 'blocks\.0\.0', 'blocks\.1\.0' share one weight\. Exclude 'blocks\.0\.0', or untie them\.$",
    ):
        select_layers(model)
    model.blocks[1][0].weight = model.embedding.weight = nn.Parameter(torch.ones(4, 4))
    with pytest.raises(UnsupportedModelError, match=r"^Modules 'blocks\.1\.0', 'embedding' share one weight"):
        select_layers(model)
    assert names(model, exclude=["blocks.1.0", "last"]) == ["blocks.0.0"]


def test_one_module_in_two_places_is_one_layer():
    layer = nn.Linear(4, 4)
    assert names(nn.Sequential(layer, layer), exclude=()) == ["0"]


@pytest.mark.parametrize("wrap", [parametrizations.spectral_norm, parametrizations.weight_norm])
def test_parametrized_weights_are_refused(wrap):
    model = Net()
    wrap(model.blocks[0][0])
    with pytest.raises(UnsupportedModelError, match=r"^The weight of layer 'blocks\.0\.0' is parametrized already\."):
        select_layers(model)
    assert names(model, exclude=["blocks.0.0", "last"]) == ["blocks.1.0"]


# Masks.


def test_a_mask_zeroes_weight_and_gradient_and_with_dense_grad_the_weight_alone(seed):
    generator = torch.Generator().manual_seed(seed)
    weight = torch.randn(3, 4, generator=generator, requires_grad=True)
    x, mask = torch.randn(4, generator=generator), Mask(torch.rand(3, 4, generator=generator) < 0.5)
    (masked,) = torch.autograd.grad(mask(weight).matmul(x).sum(), weight)
    mask.dense_grad = True
    assert torch.equal(mask(weight), weight * mask.mask)
    (dense,) = torch.autograd.grad(mask(weight).matmul(x).sum(), weight)
    assert torch.equal(dense, x.expand(3, 4))
    assert torch.equal(masked, dense * mask.mask)


# The protocol of drivers.


class Counting(SparseTraining):
    """It writes down what is called, and how many steps were counted then."""

    def __init__(self, *args, **kwargs):
        self.calls = []
        super().__init__(*args, **kwargs)

    def _begin_step(self):
        self.calls.append(("begin", self.steps_taken))

    def _before_step(self):
        assert not torch.is_grad_enabled()
        self.calls.append(("before", self.steps_taken))

    def _after_step(self):
        self.calls.append(("after", self.steps_taken))


def two_layers():
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    return model, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def counting(**kwargs):
    model, optimizer = two_layers()
    return model, optimizer, Counting(model, optimizer, total_steps=10, layers={"0": model[0]}, **kwargs)


def backward(model):
    model(torch.ones(2, 4)).square().sum().backward()


def test_hooks_stand_around_the_optimizers_step_and_step_counts_it():
    model, optimizer, driver = counting()
    backward(model)
    optimizer.step()
    driver.step()
    assert driver.calls == [("before", 0), ("after", 0), ("begin", 1)]


def test_step_counts_only_where_the_optimizer_stepped():
    model, optimizer, driver = counting()
    driver.step()
    assert driver.steps_taken == 0
    backward(model)
    optimizer.step()
    driver.step()
    driver.step()
    assert driver.steps_taken == 1


def test_a_forgotten_step_is_noticed():
    model, optimizer, _ = counting()
    backward(model)
    optimizer.step()
    with pytest.raises(InputError, match=r"^optimizer\.step\(\) was called twice without Counting\.step\(\)\."):
        optimizer.step()


def test_closures_are_refused():
    model, optimizer, _ = counting()
    backward(model)
    with pytest.raises(ClosureError, match=r"^Counting needs the gradients before optimizer\.step\(\) begins"):
        optimizer.step(lambda: None)
    with pytest.raises(ClosureError):
        optimizer.step(closure=lambda: None)


def test_a_finalized_driver_leaves_the_optimizer_alone():
    model, optimizer, driver = counting()
    assert driver.finalize() is model
    backward(model)
    optimizer.step()
    assert driver.calls == []
    with pytest.raises(
        InputError, match=r"^Counting\.step\(\): finalize\(\) has ended this driver\. Make a new one\.$"
    ):
        driver.step()


def test_the_optimizer_must_own_every_weight():
    model, _ = two_layers()
    optimizer = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with pytest.raises(ParameterError, match=r"^The optimizer does not own the weight of layer '0'\. Make"):
        SparseTraining(model, optimizer, total_steps=1, layers={"1": model[1], "0": model[0]})
    backward(model)
    optimizer.step()  # no hook was left behind


@pytest.mark.parametrize("steps", [0, 1.5, True, None])
def test_total_steps_must_be_a_count(steps):
    model, optimizer = two_layers()
    with as_users_have_it(), pytest.raises(ParameterError, match=r"^total_steps must be an int >= 1; got "):
        SparseTraining(model, optimizer, total_steps=steps, layers={"0": model[0]})
    with pytest.raises(TypeError, match="total_steps"):
        SparseTraining(model, optimizer, layers={})


def test_a_state_resumes_the_count_and_the_generator_and_fits_its_driver_alone():
    model, optimizer, driver = counting(generator=torch.Generator().manual_seed(3))
    backward(model)
    optimizer.step()
    driver.step()
    state = driver.state_dict()
    expected = torch.rand(4, generator=driver.generator)
    _, _, other = counting()
    other.load_state_dict(state)
    assert other.steps_taken == 1
    assert torch.equal(torch.rand(4, generator=other.generator), expected)
    wrong = SparseTraining(model, optimizer, total_steps=10, layers={"0": model[0]})
    with pytest.raises(
        InputError, match=r"^This state does not fit: its driver is 'Counting', this driver's is 'SparseTraining'\."
    ):
        wrong.load_state_dict(state)


# Drivers with masks.


class Alternating(MaskedTraining):
    """It turns every mask into its opposite, and keeps the gradients that it was given."""

    def __init__(self, *args, **kwargs):
        self.seen = []
        super().__init__(*args, **kwargs)

    def _adapt(self, gradients):
        self.seen.append((self.steps_taken, {name: gradient.clone() for name, gradient in gradients.items()}))
        for name in gradients:
            self._activate(name, ~self.masks()[name])


def alternating(optimizer_class=torch.optim.SGD, *, interval=None, mask=None, start=0.0, end=1.0, **settings):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = optimizer_class(model.parameters(), **(settings or {"lr": 0.1, "momentum": 0.9}))
    masks = {"0": torch.eye(4, dtype=torch.bool) if mask is None else mask}
    driver = Alternating(
        model,
        optimizer,
        total_steps=10,
        layers={"0": model[0]},
        masks=masks,
        interval=interval,
        start=start,
        end=end,
    )
    return model, optimizer, driver


def train(model, optimizer, driver, steps):
    for _ in range(steps):
        optimizer.zero_grad()
        backward(model)
        optimizer.step()
        driver.step()


class Restless(torch.optim.SGD):
    """An optimizer that moves every weight, whatever its gradient."""

    def step(self, closure=None):
        super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.data.add_(0.01)


@pytest.mark.parametrize("optimizer", [Restless, torch.optim.AdamW])
def test_inactive_weights_are_exactly_zero_after_every_step_whatever_the_optimizer_adds(optimizer):
    model, optimizer, driver = alternating(optimizer, interval=2, lr=0.1, weight_decay=0.1)
    for _ in range(6):
        train(model, optimizer, driver, 1)
        assert (driver.weights()["0"][~driver.masks()["0"]] == 0).all()


def test_adaptation_falls_on_multiples_of_the_interval_inside_its_window_and_never_on_the_first_step():
    model, optimizer, driver = alternating(interval=2, start=0.4, end=0.8)
    train(model, optimizer, driver, 10)
    assert [step for step, _ in driver.seen] == [4, 6]
    model, optimizer, driver = alternating(interval=3)
    train(model, optimizer, driver, 10)
    assert [step for step, _ in driver.seen] == [3, 6, 9]


def test_adaptation_sees_the_dense_gradient_and_every_other_step_a_masked_one():
    model, optimizer, driver = alternating(interval=2)
    for step in range(5):
        optimizer.zero_grad()
        x = torch.ones(2, 4)
        hidden = nn.functional.linear(x, driver.weights()["0"].detach() * driver.masks()["0"], model[0].bias)
        slope = 2 * model[1](hidden).detach() @ model[1].weight.detach()
        dense, mask = slope.T @ x, driver.masks()["0"].clone()
        backward(model)
        if step in (2, 4):
            torch.testing.assert_close(driver.weights()["0"].grad, dense)
        else:
            torch.testing.assert_close(driver.weights()["0"].grad, dense * mask)
        optimizer.step()
        if step in (2, 4):
            torch.testing.assert_close(driver.seen[-1][1]["0"], dense)
            torch.testing.assert_close(driver.weights()["0"].grad, dense * ~mask)  # it was masked for the optimizer
        driver.step()


def test_what_a_new_mask_changes_begins_at_zero_and_without_momentum():
    model, optimizer, driver = alternating(torch.optim.AdamW, interval=3, lr=0.1, amsgrad=True)
    train(model, optimizer, driver, 2)
    weight, mask = driver.weights()["0"], torch.eye(4, dtype=torch.bool)
    assert (optimizer.state[weight]["exp_avg_sq"][mask] > 0).all()
    new = mask.clone()
    new[0, 0], new[0, 1] = False, True
    before = weight.detach().clone()
    with torch.no_grad():
        driver._activate("0", new)
    assert torch.equal(driver.masks()["0"], new)
    for name in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
        assert optimizer.state[weight][name][0, 0] == optimizer.state[weight][name][0, 1] == 0
        assert optimizer.state[weight][name][1, 1] != 0
    assert weight[0, 0] == weight[0, 1] == 0
    assert torch.equal(weight[1:], before[1:])
    assert float(optimizer.state[weight]["step"]) == 2


def test_clear_moments_takes_a_mask_or_indices():
    weight = nn.Parameter(torch.ones(2, 2))
    optimizer = torch.optim.SGD([weight], lr=0.1, momentum=0.9)
    clear_moments(optimizer, weight, torch.ones(2, 2, dtype=torch.bool))  # no state yet
    assert weight not in optimizer.state
    optimizer.state[weight] = {"momentum_buffer": torch.ones(2, 2), "step": torch.tensor(3.0), "flag": True}
    clear_moments(optimizer, weight, torch.tensor([[True, False], [False, False]]))
    clear_moments(optimizer, weight, (torch.tensor([1]), torch.tensor([0])))
    assert torch.equal(optimizer.state[weight]["momentum_buffer"], torch.tensor([[0.0, 1.0], [0.0, 1.0]]))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_an_adaptation_with_a_gradient_that_is_not_finite_is_skipped_with_a_warning(bad):
    model, optimizer, driver = alternating(interval=1)
    train(model, optimizer, driver, 1)
    backward(model)
    driver.weights()["0"].grad[2, 1] = bad
    with pytest.warns(
        HeedfulWarning, match=r"^Alternating adapted no mask at step 1: a gradient is NaN or infinite\.$"
    ):
        optimizer.step()
    assert driver.seen == []


def test_a_step_before_backward_is_refused():
    _, optimizer, _ = alternating()
    with pytest.raises(InputError, match=r"^optimizer\.step\(\) found no gradient in any sparse layer\. Call loss\."):
        optimizer.step()


def test_a_layer_that_the_loss_does_not_reach_is_left_out():
    torch.manual_seed(0)
    model = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    masks = dict.fromkeys(("0", "1"), torch.eye(4, dtype=torch.bool))
    layers = dict(model.named_children())
    driver = Alternating(model, optimizer, total_steps=9, layers=layers, masks=masks, interval=1)
    for _ in range(2):
        model[1](torch.ones(1, 4)).sum().backward()
        optimizer.step()
        driver.step()
    assert set(driver.seen[0][1]) == {"1"}


def test_finalize_leaves_plain_layers_and_the_parameters_that_the_optimizer_knows():
    model, optimizer, driver = alternating(interval=2)
    order = [name for name, _ in nn.Linear(4, 4).named_parameters()]
    train(model, optimizer, driver, 5)
    weight, x = driver.weights()["0"], torch.randn(3, 4)
    expected = model(x)
    driver.finalize()
    assert type(model[0]) is nn.Linear
    assert not parametrize.is_parametrized(model[0])
    assert model[0].weight is weight
    assert [name for name, _ in model[0].named_parameters()] == order
    assert torch.equal(model(x), expected)
    zeros = model[0].weight[model[0].weight == 0]
    assert len(zeros) == 12
    assert not zeros.signbit().any()
    driver.finalize()  # again is harmless


@pytest.mark.parametrize(
    ("setting", "value", "message"),
    [
        ("interval", 0, r"^interval must be an int >= 1; got 0\.$"),
        ("start", -0.1, r"^start must be a number >= 0 and <= 1; got -0\.1\.$"),
        ("end", 1.5, r"^end must be a number >= 0 and <= 1; got 1\.5\.$"),
    ],
)
def test_settings_out_of_range_are_refused(setting, value, message):
    with pytest.raises(ParameterError, match=message):
        alternating(**{setting: value})


def test_a_gradient_scaler_that_skips_a_step_delays_the_adaptation():
    model, optimizer, driver = alternating(interval=1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        optimizer.zero_grad()
        scaler.scale(model(torch.ones(2, 4)).square().sum()).backward()
        if step == 1:
            driver.weights()["0"].grad[0, 0] = math.inf
        scaler.step(optimizer)
        scaler.update()
        driver.step()
    assert driver.steps_taken == 3
    assert [step for step, _ in driver.seen] == [1, 2]


def test_fused_optimizers_that_unscale_gradients_themselves_show_them_unscaled():
    seen = []
    for scale in (1.0, 8.0):
        model, optimizer, driver = alternating(torch.optim.SGD, interval=1, lr=0.01, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale)
        for _ in range(2):
            optimizer.zero_grad()
            scaler.scale(mse_loss(model(torch.ones(2, 4)), torch.zeros(2, 4))).backward()
            scaler.step(optimizer)
            scaler.update()
            driver.step()
        seen.append(driver.seen[0][1]["0"])
    torch.testing.assert_close(*seen)


# Densities and schedules.


def test_erk_gives_the_densities_of_its_definition():
    shapes = {"wide": (64, 128), "square": (64, 64), "conv": (16, 32, 3, 3)}
    densities = erk_densities(shapes, 0.9)
    kept = sum(densities[name] * math.prod(shape) for name, shape in shapes.items())
    assert kept == pytest.approx(0.1 * sum(math.prod(shape) for shape in shapes.values()), rel=1e-12)
    scale = {name: densities[name] * math.prod(shape) / sum(shape) for name, shape in shapes.items()}
    assert max(scale.values()) == pytest.approx(min(scale.values()), rel=1e-12)


def test_erk_fills_small_layers_and_shares_the_rest():
    shapes = {"small": (4, 4), "large": (100, 100)}
    densities = erk_densities(shapes, 0.9)
    assert densities["small"] == 1.0
    assert densities["large"] == pytest.approx((0.1 * 10016 - 16) / 10000)


@given(
    sizes=st.lists(st.tuples(st.integers(1, 64), st.integers(1, 64)), min_size=1, max_size=5),
    sparsity=st.floats(0, 1),
)
def test_erk_keeps_the_budget_with_densities_of_shares(sizes, sparsity):
    shapes = {str(i): size for i, size in enumerate(sizes)}
    densities = erk_densities(shapes, sparsity)
    assert all(0 <= density <= 1 for density in densities.values())
    total = sum(math.prod(size) for size in sizes)
    kept = sum(densities[name] * math.prod(shape) for name, shape in shapes.items())
    assert kept == pytest.approx((1 - sparsity) * total, rel=1e-9, abs=1e-9)


def test_erk_refuses_what_is_no_share():
    with pytest.raises(ParameterError, match=r"^sparsity must be a number >= 0 and <= 1; got 1\.5\.$"):
        erk_densities({"a": (2, 2)}, 1.5)


@pytest.mark.parametrize("schedule", ["cosine", "linear", "exponential"])
def test_schedules_run_from_start_to_end_and_stay_there(schedule):
    values = [anneal(fraction, 5.0, 0.05, schedule) for fraction in (-1.0, 0.0, 0.25, 0.5, 1.0, 2.0)]
    assert values[:2] == [5.0, 5.0]
    assert values[-2:] == [0.05, 0.05]
    assert values == sorted(values, reverse=True)


def test_schedules_have_their_middles():
    assert anneal(0.5, 4.0, 1.0, "linear") == 2.5
    assert anneal(0.5, 4.0, 1.0, "exponential") == pytest.approx(2.0)
    assert anneal(1 / 3, 4.0, 0.0, "cosine") == pytest.approx(3.0)
    assert anneal(0.5, 4.0, 1.0, "constant") == 4.0
    listed = r"^schedule must be one of 'cosine', 'linear', 'exponential', 'constant'; got 'cubic'\.$"
    with as_users_have_it(), pytest.raises(ParameterError, match=listed):
        anneal(0.5, 4.0, 1.0, "cubic")


def test_a_csr_matrix_is_made_without_a_warning():
    dense = csr_matrix(torch.tensor([0, 1, 2]), torch.tensor([1, 0]), torch.tensor([2.0, 3.0]), (2, 2)).to_dense()
    assert torch.equal(dense, torch.tensor([[0.0, 2.0], [3.0, 0.0]]))
