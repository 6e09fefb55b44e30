"""DynaDiag beside an optimizer: what it converts, when it freezes, and that training resumes bit for bit."""

import copy
import io
import json
import math
from functools import partial

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from heedful.compress import DiagonalLinear, DynaDiag, convert_to_diagonal
from heedful.errors import ClosureError, InputError, ParameterError, UnsupportedModelError
from tests.conformance.distributed import on_two_ranks
from tests.conformance.generators import global_generators_stay
from tests.conformance.typechecks import as_users_have_it


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def network(seed=0, *, hidden=16, dtype=torch.float32):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [
            nn.Linear(6, hidden),
            nn.Tanh(),
            nn.Linear(hidden, hidden),
            nn.Tanh(),
            nn.Linear(hidden, 12),
            nn.Tanh(),
        ]
        return nn.Sequential(*layers, nn.Linear(12, 3)).to(dtype)


def rows(n=16, dtype=torch.float32, seed=1):
    x = torch.randn(n, 6, generator=seeded(seed), dtype=dtype)
    return x, x[:, :3].argmax(1)


def sgd(params):
    return torch.optim.SGD(params, lr=0.1, momentum=0.9)


def adam(params):
    return torch.optim.AdamW(params, lr=0.01, amsgrad=True)


class Training:
    """A network, its optimizer and its driver; ``run`` takes steps on batches that the step number decides."""

    def __init__(
        self, optimizer=adam, *, total_steps=8, sparsity=0.7, dtype=torch.float32, scheduler=False, **settings
    ):
        self.model = network(dtype=dtype)
        self.optimizer = optimizer(self.model.parameters())
        self.driver = DynaDiag(
            self.model,
            self.optimizer,
            total_steps=total_steps,
            sparsity=sparsity,
            generator=seeded(),
            backend="dense",
            **settings,
        )
        self.scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, 3, gamma=0.5) if scheduler else None
        self.dtype, self.step_number = dtype, 0

    def loss(self):
        x, y = rows(dtype=self.dtype, seed=10 * self.step_number)
        return cross_entropy(self.model(x), y) + self.driver.penalty()

    def run(self, steps):
        for _ in range(steps):
            self.optimizer.zero_grad()
            self.loss().backward()
            self.optimizer.step()
            self.driver.step()
            if self.scheduler:
                self.scheduler.step()
            self.step_number += 1
        return self

    def save(self):
        parts = [self.model, self.optimizer, self.driver] + ([self.scheduler] if self.scheduler else [])
        file = io.BytesIO()
        torch.save([part.state_dict() for part in parts], file)
        return file.getvalue(), self.step_number

    def load(self, saved, order=(0, 1, 2)):
        states = torch.load(io.BytesIO(saved[0]), weights_only=True)
        parts = [self.model, self.optimizer, self.driver, self.scheduler]
        for i in (*order, *range(3, len(states))):
            parts[i].load_state_dict(states[i])
        self.step_number = saved[1]
        return self

    @property
    def layers(self):
        return self.driver.layers

    def state(self):
        return copy.deepcopy([self.model.state_dict(), self.optimizer.state_dict(), self.driver.state_dict()])


def same(left, right):
    if isinstance(left, torch.Tensor):
        return torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, (list, tuple)):
        return len(left) == len(right) and all(map(same, left, right))
    return left == right


# --- conversion


def test_inner_layers_become_diagonal_in_place():
    training = Training()
    assert list(training.layers) == ["2", "4"]
    assert [type(layer) for layer in training.model if not isinstance(layer, nn.Tanh)] == [
        nn.Linear,
        DiagonalLinear,
        DiagonalLinear,
        nn.Linear,
    ]
    assert [(layer.in_features, layer.out_features, layer.k) for layer in training.layers.values()] == [
        (16, 16, 5),
        (16, 12, 5),
    ]


@pytest.mark.parametrize("settings", [{}, {"mask_values": "ste"}, {"selection": "soft"}])
def test_weights_are_those_of_the_dense_start_scaled_to_keep_the_variance(settings):
    start = network()
    layers = Training(**settings).layers
    for name in ("2", "4"):
        weight, dense = layers[name].dense_weight().detach(), start[int(name)].weight.detach()
        scale = 1.0 if settings == {"selection": "soft"} else math.sqrt(16 / 5)
        torch.testing.assert_close(weight[weight != 0], scale * dense[weight != 0])
        assert torch.equal(layers[name].bias, start[int(name)].bias)


def test_the_optimizer_has_the_new_parameters_in_the_places_of_the_old():
    model = network()
    optimizer = torch.optim.SGD(
        [{"params": model[0].parameters(), "lr": 0.5}, {"params": model[2:].parameters(), "weight_decay": 0.1}], lr=0.2
    )
    DynaDiag(model, optimizer, total_steps=4, score_lr_scale=3.0)
    first, second, scores = optimizer.param_groups
    assert same([id(p) for p in first["params"]], [id(p) for p in model[0].parameters()])
    expected = [model[2].values, model[2].bias, model[4].values, model[4].bias, model[6].weight, model[6].bias]
    assert [id(p) for p in second["params"]] == [id(p) for p in expected]
    assert [id(p) for p in scores["params"]] == [id(model[2].scores), id(model[4].scores)]
    assert (scores["lr"], scores["weight_decay"]) == (pytest.approx(0.6), 0.0)


def test_named_parameters_stay_named():
    model = network()
    optimizer = torch.optim.AdamW(model.named_parameters(), lr=0.1)
    driver = DynaDiag(model, optimizer, total_steps=1, backend="dense")
    assert optimizer.param_groups[0]["param_names"] == [name for name, _ in network().named_parameters()]
    assert optimizer.param_groups[1]["param_names"] == ["2.scores", "4.scores"]
    model(rows()[0]).sum().backward()
    optimizer.step()
    driver.step()
    assert driver.frozen
    assert optimizer.param_groups[1]["param_names"] == []


def test_layers_converted_before_are_taken_as_they_are():
    model = convert_to_diagonal(network(), sparsity=0.5, include=["4"], generator=seeded())
    weight = model[4].dense_weight().detach().clone()
    optimizer = sgd(model.parameters())
    driver = DynaDiag(model, optimizer, total_steps=4)
    assert list(driver.layers) == ["4"]
    assert driver.layers["4"] is model[4]
    assert model[4].k == 8
    assert torch.equal(model[4].dense_weight(), weight)
    assert [id(p) for p in optimizer.param_groups[1]["params"]] == [id(model[4].scores)]
    assert all(p is not model[4].scores for p in optimizer.param_groups[0]["params"])


def test_the_driver_sets_the_first_temperature_of_layers_converted_before():
    model = convert_to_diagonal(network(), sparsity=0.5, temperature=1.0)
    DynaDiag(model, sgd(model.parameters()), total_steps=4, temperature=(3.0, 0.1))
    assert [model[2].temperature.item(), model[4].temperature.item()] == [3.0, 3.0]


def test_erk_keeps_small_layers_denser_at_the_same_total():
    model = network(hidden=60)
    driver = DynaDiag(model, sgd(model.parameters()), total_steps=1, sparsity=0.8, distribution="erk", exclude=())
    kept = {name: layer.k / layer.n_diagonals for name, layer in driver.layers.items()}
    assert kept["2"] == min(kept.values())
    assert kept["6"] == max(kept.values())
    assert driver.stats().sparsity == pytest.approx(0.8, abs=0.02)  # diagonals are rounded up


def test_what_cannot_become_diagonal_is_listed_and_left_alone():
    class Mixed(nn.Module):
        def __init__(self):
            super().__init__()
            self.stem = nn.Conv2d(1, 4, 3)
            self.attention = nn.MultiheadAttention(8, 2)
            self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
            self.twin = self.down
            self.table = nn.Embedding(3, 8)

        def forward(self, x):
            return self.twin(self.up(self.attention(x, x, x)[0]))

    model = Mixed()
    driver = DynaDiag(model, sgd(model.parameters()), total_steps=2, exclude=(), backend="dense")
    assert list(driver.layers) == ["up", "down"]
    assert driver.stats().skipped == ("stem", "attention.out_proj")
    assert model.twin is model.down  # one module under two names stays one
    assert model(torch.randn(5, 2, 8)).shape == (5, 2, 8)


def test_only_the_generator_draws():
    model = network()
    optimizer = sgd(model.parameters())
    with global_generators_stay("DynaDiag"):
        DynaDiag(model, optimizer, total_steps=4, generator=seeded(7))
    other = network()
    DynaDiag(other, sgd(other.parameters()), total_steps=4, generator=seeded(7))
    assert same(model.state_dict(), other.state_dict())


# --- temperature, penalty and freezing


@pytest.mark.parametrize(
    ("schedule", "middle"),
    [
        ("cosine", 0.1 + 4.9 * (1 + math.cos(math.pi / 3)) / 2),
        ("linear", 5 - 4.9 / 3),
        ("exponential", 5 * (0.1 / 5) ** (1 / 3)),
        ("constant", 5.0),
    ],
)
def test_temperature_follows_the_schedule_and_meets_both_ends(schedule, middle):
    training = Training(total_steps=8, temperature=(5.0, 0.1), schedule=schedule)  # six steps until freezing
    assert training.driver.stats().temperature == 5.0
    training.run(2)
    assert training.driver.stats().temperature == pytest.approx(middle)
    assert [float(layer.temperature) for layer in training.layers.values()] == pytest.approx([middle] * 2)
    training.run(6)
    end = 5.0 if schedule == "constant" else 0.1
    assert training.driver.stats().temperature == end
    assert [float(layer.temperature) for layer in training.layers.values()] == [torch.tensor(end).item()] * 2


@pytest.mark.parametrize(("freeze_at", "step"), [(0.75, 6), (1.0, 8), (0.01, 1)])
def test_diagonals_freeze_at_their_fraction_of_the_steps(freeze_at, step):
    training = Training(freeze_at=freeze_at).run(step - 1)
    assert not training.driver.frozen
    assert training.driver.penalty().item() > 0
    training.run(1)
    assert training.driver.frozen
    assert all(layer.values.shape == (5, min(16, layer.out_features)) for layer in training.layers.values())
    assert training.driver.penalty().item() == 0


def test_the_penalty_is_the_l1_norm_of_all_scores():
    training = Training(l1_weight=0.5)
    expected = 0.5 * sum(layer.scores.abs().sum().item() for layer in training.layers.values())
    assert training.driver.penalty().item() == pytest.approx(expected)
    training.driver.penalty().backward()
    for layer in training.layers.values():
        assert torch.equal(layer.scores.grad, 0.5 * layer.scores.sign())


def test_freezing_does_not_change_the_function():
    training = Training(total_steps=8, freeze_at=1.0, dtype=torch.float64).run(7)
    before = copy.deepcopy(training.model)
    training.driver.finalize()
    x, _ = rows(dtype=torch.float64)
    torch.testing.assert_close(training.model(x), before(x))
    assert not training.optimizer._optimizer_step_pre_hooks


@pytest.mark.parametrize("mask_values", ["soft", "ste"])
@pytest.mark.parametrize("optimizer", [sgd, adam])
def test_the_optimizer_remembers_the_diagonals_that_stay(optimizer, mask_values):
    training = Training(optimizer, freeze_at=1.0, temperature=(5.0, 1.0), mask_values=mask_values).run(7)
    offsets = {name: layer.offsets() for name, layer in training.layers.items()}
    factors = {name: layer._folding()[:, None] for name, layer in training.layers.items()}
    assert any((factor < 0.9).any() for factor in factors.values()) == (mask_values == "soft")
    memory = {name: dict(training.optimizer.state[layer.values]) for name, layer in training.layers.items()}
    training.driver.finalize()
    powers = {"momentum_buffer": 1, "exp_avg": 1, "exp_avg_sq": 2, "max_exp_avg_sq": 2}
    for name, layer in training.layers.items():
        now = training.optimizer.state[layer.values]
        assert now.keys() == memory[name].keys()
        for key in now.keys() & powers.keys():
            torch.testing.assert_close(now[key], memory[name][key][offsets[name]] / factors[name] ** powers[key])
        if "step" in now:
            assert now["step"] == memory[name]["step"]
    assert len(training.optimizer.state) == 8  # two parameters of each of four layers: what is gone is forgotten
    assert training.optimizer.param_groups[1]["params"] == []


def test_momentum_in_folded_units_makes_the_step_that_adam_would_have_made():
    """An Adam step does not depend on the units of its gradients, so the folded one is the same step times importance."""
    live = Training(partial(torch.optim.Adam, lr=0.01, eps=1e-30), freeze_at=1.0, dtype=torch.float64).run(6)
    frozen = Training(partial(torch.optim.Adam, lr=0.01, eps=1e-30), freeze_at=1.0, dtype=torch.float64).run(6)
    layer, factor, offsets = live.layers["2"], live.layers["2"]._folding()[:, None], live.layers["2"].offsets()
    frozen.driver.finalize()
    before, before_folded = layer.values[offsets].detach(), frozen.layers["2"].values.detach().clone()
    for training in (live, frozen):
        training.optimizer.zero_grad()
        training.loss().backward()
        training.optimizer.step()
    moved, moved_folded = layer.values[offsets] - before, frozen.layers["2"].values - before_folded
    torch.testing.assert_close(moved, moved_folded)
    torch.testing.assert_close(before_folded, before * factor)


def test_freezing_waits_until_the_optimizer_steps():
    training = Training(total_steps=4).run(2)  # it would freeze at the third step
    for _ in range(3):  # of an accumulated gradient, or skipped by a GradScaler
        training.loss().backward()
        training.driver.step()
    assert training.driver.steps_taken == 2
    assert not training.driver.frozen
    assert all(layer.values.grad is not None for layer in training.layers.values())
    training.optimizer.step()
    training.driver.step()
    assert training.driver.frozen


def test_a_step_that_a_grad_scaler_skips_does_not_count():
    training = Training(total_steps=4).run(2)  # it would freeze at the third step
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    for overflow in (True, False):
        training.optimizer.zero_grad()
        scaler.scale(training.loss()).backward()
        if overflow:
            training.layers["2"].scores.grad[0] = math.inf
        scaler.step(training.optimizer)
        scaler.update()
        training.driver.step()
        assert training.driver.frozen != overflow
    assert training.driver.steps_taken == 3
    assert all(p.isfinite().all() for p in training.model.parameters())


def test_a_gradient_accumulated_over_half_batches_gives_the_same_training():
    whole, halves = Training(sgd, dtype=torch.float64), Training(sgd, dtype=torch.float64)
    for step in range(8):
        x, y = rows(dtype=torch.float64, seed=step)
        for training, parts in ((whole, [slice(16)]), (halves, [slice(8), slice(8, 16)])):
            training.optimizer.zero_grad()
            for part in parts:
                loss = cross_entropy(training.model(x[part]), y[part]) + training.driver.penalty()
                (loss / len(parts)).backward()
            training.optimizer.step()
            training.driver.step()
    for p, q in zip(whole.model.parameters(), halves.model.parameters(), strict=True):
        torch.testing.assert_close(p, q)


def test_training_chooses_other_diagonals_than_at_the_start_and_lowers_the_loss():
    training = Training(partial(torch.optim.Adam, lr=0.03), total_steps=60, score_lr_scale=10.0)
    before = training.loss().item()
    training.run(60)
    stats = training.driver.stats()
    training.step_number = 0
    assert training.loss().item() < before
    assert sum(layer.replaced for layer in stats.layers.values()) > 0


def test_stats_say_where_training_stands():
    training = Training().run(3)
    stats = training.driver.stats()
    assert (stats.steps_taken, stats.frozen, stats.sparsity) == (3, False, pytest.approx(1 - 5 / 16))
    layer = training.layers["4"]
    assert stats.layers["4"].to_dict() == {
        "candidates": 16,
        "active": 5,
        "replaced": stats.layers["4"].replaced,
        "importance": pytest.approx(layer.importance()[layer.offsets()].mean().item()),
        "parameters": 16 * 12 + 16,
    }
    training.run(5)
    stats = training.driver.stats()
    assert stats.frozen
    assert (stats.layers["4"].importance, stats.layers["4"].parameters) == (1.0, 5 * 12)
    json.dumps(stats.to_dict())


# --- resuming


@pytest.mark.parametrize("optimizer", [sgd, adam])
@pytest.mark.parametrize("stop", [3, 6, 7])  # diagonals freeze at 6
@pytest.mark.parametrize("order", [(0, 1, 2), (0, 2, 1)])
def test_training_resumes_bit_for_bit(optimizer, stop, order):
    straight = Training(optimizer, scheduler=True).run(8)
    saved = Training(optimizer, scheduler=True).run(stop).save()
    resumed = Training(optimizer, scheduler=True).load(saved, order).run(8 - stop)
    assert same(resumed.state(), straight.state())


def test_a_new_optimizer_trains_the_layers_that_were_loaded():
    saved = Training().run(7).save()
    training = Training().load(saved, (0, 2))
    owned = [p for group in training.optimizer.param_groups for p in group["params"]]
    assert {id(p) for p in training.model.parameters()} == {id(p) for p in owned}


def test_a_resumed_driver_counts_what_was_replaced_since_the_first_start():
    training = Training(score_lr_scale=100.0).run(7)
    other = Training(score_lr_scale=100.0)
    other.driver._first_offsets = {name: [] for name in other.layers}  # as if another seed had made it
    assert other.load(training.save()).driver.stats() == training.driver.stats()


def test_training_goes_back_from_frozen_to_live():
    training = Training(sgd)
    saved = training.run(3).save()
    straight = training.run(5).state()
    assert training.driver.frozen
    training.load(saved)
    assert not training.driver.frozen
    assert same(training.run(5).state(), straight)


def test_the_model_must_be_loaded_before_the_driver():
    saved = Training().run(7).save()
    with pytest.raises(
        InputError,
        match=r"^The diagonal layers are live, but were frozen when this state was saved\. Load the state of the model first",
    ):
        Training().load(saved, order=(2, 0, 1))


def test_a_state_of_another_sparsity_or_choice_of_layers_is_refused():
    state = Training().driver.state_dict()
    with pytest.raises(
        InputError, match=r"^This state does not fit: its active is \[5, 5\], this driver's is \[2, 2\]\."
    ):
        Training(sparsity=0.9).driver.load_state_dict(state)
    with pytest.raises(InputError, match=r"^This state does not fit: its layers is"):
        Training(exclude=("last",)).driver.load_state_dict(state)


# --- surroundings


def test_autocast_trains_in_bfloat16_with_float32_parameters():
    training = Training()
    x, y = rows()
    for _ in range(8):
        training.optimizer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            output = training.model(x)
            loss = cross_entropy(output.float(), y) + training.driver.penalty()
        assert output.dtype == torch.bfloat16
        loss.backward()
        training.optimizer.step()
        training.driver.step()
    assert {p.dtype for p in training.model.parameters()} == {torch.float32}
    assert all(p.isfinite().all() for p in training.model.parameters())


def _train_on_half_the_rows(rank, freeze_at):
    training = Training(sgd, total_steps=8, freeze_at=freeze_at, dtype=torch.float64)
    model, driver = DistributedDataParallel(training.model), training.driver
    for step in range(8):
        x, y = rows(dtype=torch.float64, seed=10 * step)
        half = slice(8 * rank, 8 * rank + 8)
        training.optimizer.zero_grad()
        (cross_entropy(model(x[half]), y[half]) + driver.penalty()).backward()
        training.optimizer.step()
        was_frozen = driver.frozen
        driver.step()
        if driver.frozen and not was_frozen:
            model = DistributedDataParallel(training.model)  # of the parameters that are there now
    return [p.detach().numpy() for p in driver.finalize().parameters()]  # tensors do not outlive their process


@pytest.mark.parametrize("freeze_at", [0.75, 1.0])
def test_two_ranks_train_as_one_process_does(freeze_at):
    first, second = on_two_ranks(_train_on_half_the_rows, freeze_at)
    assert all(map(np.array_equal, first, second))
    alone = Training(sgd, total_steps=8, freeze_at=freeze_at, dtype=torch.float64).run(8).driver.finalize()
    for p, expected in zip(first, alone.parameters(), strict=True):
        torch.testing.assert_close(torch.from_numpy(p), expected.detach())


# --- bad input


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"sparsity": 1.0}, "sparsity must be below 1"),
        ({"total_steps": 0}, "total_steps must be an int >= 1"),
        ({"temperature": (5.0, 0.0)}, "the end of temperature must be a number > 0; got 0.0."),
        ({"temperature": (-1.0, 0.1)}, "the start of temperature must be a number > 0; got -1.0."),
        ({"temperature": 5.0}, "temperature must be two numbers, T at the start and at the end; got 5.0."),
        ({"temperature": (1.0,)}, "temperature must be two numbers, T at the start and at the end; got (1.0,)."),
        ({"schedule": "cubic"}, "schedule must be one of 'cosine', 'linear', 'exponential', 'constant'; got 'cubic'."),
        ({"freeze_at": 0.0}, "freeze_at must be a number > 0 and <= 1; got 0.0."),
        ({"freeze_at": 1.5}, "freeze_at must be a number > 0 and <= 1; got 1.5."),
        ({"l1_weight": -1.0}, "l1_weight must be a number >= 0; got -1.0."),
        ({"score_lr_scale": 0.0}, "score_lr_scale must be a number > 0; got 0.0."),
        ({"distribution": "even"}, "distribution must be one of 'uniform', 'erk'; got 'even'."),
        ({"selection": "top"}, "selection must be one of 'hard', 'soft'; got 'top'."),
        ({"groups": 3}, "groups must divide the number of diagonals"),
        ({"exclude": ("nine",)}, "exclude: 'nine' matches no layer"),
    ],
)
def test_settings_out_of_range_are_refused_and_nothing_is_converted(settings, message):
    model = network()
    optimizer = sgd(model.parameters())
    with as_users_have_it(), pytest.raises(ParameterError) as caught:
        DynaDiag(model, optimizer, **{"total_steps": 4, **settings})
    assert str(caught.value).startswith(message)
    assert same(model.state_dict(), network().state_dict())
    assert not optimizer._optimizer_step_pre_hooks


def test_a_weight_that_the_optimizer_does_not_own_is_named():
    model = network()
    with pytest.raises(ParameterError, match=r"^The optimizer does not own the weight of layer '2'\."):
        DynaDiag(model, sgd(model[4:].parameters()), total_steps=4)


def test_scores_must_stay_with_the_optimizer():
    training = Training().run(1)
    training.optimizer.param_groups[1]["params"] = training.optimizer.param_groups[1]["params"][:1]
    with pytest.raises(InputError, match=r"^The optimizer does not own the scores of layer '4'"):
        training.run(1)


def test_broken_scores_are_named():
    training = Training()
    training.loss().backward()
    training.optimizer.step()
    with torch.no_grad():
        training.layers["4"].scores[3] = math.nan
    with pytest.raises(InputError, match=r"^Scores of '4' are NaN or infinite after step 1\. Lower the learning rate"):
        training.driver.step()


def test_tied_weights_are_refused_with_the_names_of_both():
    model = network()
    model.append(nn.Linear(16, 16))
    model[-1].weight = model[2].weight
    with pytest.raises(UnsupportedModelError, match=r"^Modules '2', '7' share one weight\."):
        DynaDiag(model, sgd(model.parameters()), total_steps=4, exclude=())


def test_converting_twice_is_refused_where_nothing_is_live():
    training = Training().run(8)
    with pytest.raises(UnsupportedModelError, match="frozen already"):
        DynaDiag(training.model, training.optimizer, total_steps=4)


def test_parameters_are_not_exchanged_once_others_have_counted_them():
    model = network()
    optimizer = sgd(model.parameters())
    optimizer.zero_grad()
    model(rows()[0]).sum().backward()
    optimizer.step()
    remembers = pytest.raises(ParameterError, match=r"^The optimizer remembers the dense weight of '2' already")
    with remembers:
        DynaDiag(model, optimizer, total_steps=4)
    with remembers:
        DynaDiag(model, torch.optim.Adagrad(model.parameters()), total_steps=4)
    optimizer = sgd(model.parameters())
    torch.optim.lr_scheduler.StepLR(optimizer, 2)
    with pytest.raises(ParameterError, match=r"^A learning-rate scheduler has counted"):
        DynaDiag(model, optimizer, total_steps=4)


def test_a_model_that_is_one_linear_layer_is_refused():
    model = nn.Linear(8, 8)
    with pytest.raises(UnsupportedModelError, match=r"^The model is itself a linear layer"):
        DynaDiag(model, sgd(model.parameters()), total_steps=4, exclude=())


def test_loops_that_a_driver_cannot_see_into_are_refused():
    training = Training().run(1)
    with pytest.raises(ClosureError, match="DynaDiag needs the gradients before"):
        training.optimizer.step(lambda: training.loss())
    training.driver.finalize()
    with pytest.raises(InputError, match=r"finalize\(\) has ended this driver"):
        training.driver.step()
