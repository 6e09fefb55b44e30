"""TiltedSAM and SAM against closed forms, naive twins and each other. What every optimizer must do is in conformance."""

import copy
import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from heedful.errors import ClosureError, ConvergenceError, HeedfulError, InputError, ParameterError
from heedful.optim import SAM, TiltedSAM, closure_step, tilted_loss, tilted_weights
from heedful.optim.tsam import _TiltedMean
from tests.conformance.distributed import WORLD, on_two_ranks
from tests.conformance.typechecks import as_users_have_it

losses_of_any_size = st.lists(st.floats(-1e30, 1e30), min_size=1, max_size=6).map(torch.tensor)
tilts = st.one_of(st.floats(0, 1e6), st.just(math.inf))


def seeded(seed=0):
    return torch.Generator().manual_seed(seed)


def cnn(seed=0, *, dropout=0.0):
    """A small network with batch normalisation."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        layers = [
            nn.Conv2d(1, 4, 3),
            nn.BatchNorm2d(4),
            nn.ReLU(),
            nn.Flatten(),
            nn.Dropout(dropout),
            nn.Linear(144, 3),
        ]
        return nn.Sequential(*layers)


def images(seed=0):
    generator = seeded(seed)
    return torch.randn(8, 1, 8, 8, generator=generator), torch.randint(3, (8,), generator=generator)


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def train(model, optimizer, steps=5, batch=None):
    for _ in range(steps):
        optimizer.step(closure_step(model, batch or images(), cross_entropy))
    return weights_of(model)


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


def point(start, loss):
    """A parameter, and a function that makes closures of ``loss`` and writes down where they were evaluated."""
    w = nn.Parameter(torch.as_tensor(start, dtype=torch.float64).clone())
    visited = []

    def closure():
        w.grad = None
        visited.append(w.detach().clone())
        value = loss(w)
        value.backward()
        return value

    return w, closure, visited


# The functional core.


@given(losses=losses_of_any_size, tilt=tilts)
def test_weights_are_finite_positive_and_sum_to_one(losses, tilt):
    weights = tilted_weights(losses, tilt)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(), torch.tensor(1.0), rtol=1e-6, atol=0)


@given(losses=st.lists(st.floats(-10, 10), min_size=1, max_size=6), shift=st.floats(-100, 100), tilt=st.floats(0, 10))
def test_weights_do_not_change_when_all_losses_rise_alike(losses, shift, tilt):
    losses = torch.tensor(losses, dtype=torch.float64)
    # A shift by 100 rounds the losses at 1e-14, which a tilt of 10 turns into a relative 1e-13.
    torch.testing.assert_close(
        tilted_weights(losses + shift, tilt), tilted_weights(losses, tilt), rtol=1e-12, atol=1e-300
    )


def test_weights_at_the_limits_of_the_tilt():
    losses = torch.tensor([1.0, 3.0, 2.0])
    assert torch.equal(tilted_weights(losses, 0), torch.full((3,), 1 / 3))
    assert torch.equal(tilted_weights(losses, 1e6), torch.tensor([0.0, 1.0, 0.0]))
    assert torch.equal(tilted_weights(losses, math.inf), torch.tensor([0.0, 1.0, 0.0]))
    assert torch.equal(tilted_weights(torch.tensor([3.0, 3.0, 2.0]), math.inf), torch.tensor([0.5, 0.5, 0.0]))
    assert torch.equal(tilted_weights(torch.tensor([1e30, -1e30]), 1e6), torch.tensor([1.0, 0.0]))


@given(losses=losses_of_any_size, tilt=tilts)
def test_tilted_loss_lies_between_mean_and_max_and_near_max(losses, tilt):
    losses = losses.double()
    slack = 1e-14 * losses.abs().max()  # roundings of the mean and of the sum
    value = tilted_loss(losses, tilt)
    assert losses.mean() - slack <= value <= losses.max() + slack
    if tilt > 0:
        assert value >= losses.max() - math.log(len(losses)) / tilt - slack


@given(losses=losses_of_any_size, one=tilts, other=tilts)
def test_tilted_loss_does_not_decrease_in_the_tilt(losses, one, other):
    losses = losses.double()
    low, high = sorted((one, other))
    assert tilted_loss(losses, low) <= tilted_loss(losses, high) + 1e-14 * losses.abs().max()


def test_tilted_loss_is_logsumexp_and_its_gradient_the_weights(seed):
    losses = torch.randn(5, dtype=torch.float64, generator=seeded(seed)).requires_grad_()
    value = tilted_loss(losses, 3.0)
    expected = (torch.logsumexp(3.0 * losses, 0) - math.log(5)) / 3.0
    torch.testing.assert_close(value, expected)
    (gradient,) = torch.autograd.grad(value, losses)
    torch.testing.assert_close(gradient, tilted_weights(losses.detach(), 3.0))


def test_a_small_tilt_adds_half_the_variance(seed):
    losses = torch.randn(7, dtype=torch.float64, generator=seeded(seed))

    def slope(tilt):
        return (tilted_loss(losses, tilt) - losses.mean()) / tilt

    richardson = 2 * slope(1e-4) - slope(2e-4)  # cancels the term linear in the tilt; what is left is O(1e-8)
    torch.testing.assert_close(richardson, 0.5 * losses.var(correction=0), rtol=1e-6, atol=1e-9)
    for nearly_zero in (1e-20, 1e-300, 1e-308, 5e-324):
        assert tilted_loss(losses, nearly_zero) == pytest.approx(float(losses.mean()), rel=1e-12, abs=1e-14)


@pytest.mark.parametrize("tilt", [-1.0, math.nan])
def test_a_tilt_below_zero_is_refused(tilt):
    for function in (tilted_weights, tilted_loss):
        with pytest.raises(ParameterError, match=rf"^tilt must be a number >= 0; got {tilt}\.$"):
            function(torch.ones(2), tilt)
        with pytest.raises(InputError, match=r"^losses is empty; give at least one loss\.$"):
            function(torch.ones(0), 1.0)


def naive_mean(losses, grads, tilt):
    weights = tilted_weights(torch.stack(losses), tilt)
    return [sum(w * g for w, g in zip(weights, per_sample, strict=True)) for per_sample in zip(*grads, strict=True)]


@pytest.mark.parametrize("tilt", [0.0, 1.0, 30.0, math.inf])
@pytest.mark.parametrize("order", ["rising", "falling", "mixed", "tied"])
def test_streamed_mean_equals_the_mean_of_stored_gradients(order, tilt, seed):
    generator = seeded(seed)
    losses = {"rising": [1.0, 2.0, 5.0], "falling": [5.0, 2.0, 1.0], "mixed": [2.0, 5.0, 1.0], "tied": [2.0] * 3}[order]
    losses = [torch.tensor(loss) for loss in losses]
    grads = [[torch.randn(4, 3, generator=generator), torch.randn(2, generator=generator)] for _ in losses]
    mean = _TiltedMean(tilt)
    for loss, sample in zip(losses, grads, strict=True):
        mean.add(loss, {name: grad.clone() for name, grad in enumerate(sample)})
    for streamed, stored in zip(mean.result().values(), naive_mean(losses, grads, tilt), strict=True):
        torch.testing.assert_close(streamed, stored, rtol=1e-6, atol=1e-6)  # a few float32 roundings


def test_streamed_mean_takes_a_missing_gradient_for_zero():
    mean = _TiltedMean(0.0)
    mean.add(torch.tensor(1.0), {"a": torch.ones(2)})
    mean.add(torch.tensor(1.0), {"b": torch.ones(3)})
    result = mean.result()
    assert torch.equal(result["a"], torch.full((2,), 0.5))
    assert torch.equal(result["b"], torch.full((3,), 0.5))


# The step.


@pytest.mark.parametrize("tilt", [0.0, 20.0, math.inf])
def test_one_sample_at_radius_zero_is_sam_bit_for_bit(tilt):
    tilted, plain = cnn(), cnn()
    settings = {"rho": 0.2, "lr": 0.1, "momentum": 0.9}
    left = train(tilted, TiltedSAM(tilted.parameters(), tilt=tilt, n_samples=1, radius=0.0, model=tilted, **settings))
    right = train(plain, SAM(plain.parameters(), model=plain, **settings))
    assert_same(left, right)
    assert_same(list(tilted.buffers()), list(plain.buffers()))


def naive_sam(model, batch, *, rho, lr, momentum, steps, adaptive):
    """The published algorithm, with copies of everything."""
    optimizer = torch.optim.SGD(model.parameters(), lr=lr, momentum=momentum)
    closure = closure_step(model, batch, cross_entropy)
    for _ in range(steps):
        home = weights_of(model)
        closure()
        statistics = [buffer.clone() for buffer in model.buffers()]
        with torch.no_grad():
            sizes = [p.abs() if adaptive else torch.ones_like(p) for p in model.parameters()]
            climbs = [size * p.grad for size, p in zip(sizes, model.parameters(), strict=True)]
            norm = torch.sqrt(sum(climb.square().sum() for climb in climbs))
            for p, climb, size in zip(model.parameters(), climbs, sizes, strict=True):
                p.add_(rho * size * climb / norm)
        closure()
        with torch.no_grad():
            for kept, value in zip([*model.parameters(), *model.buffers()], home + statistics, strict=True):
                kept.copy_(value)
        optimizer.step()
    return weights_of(model)


@pytest.mark.parametrize("adaptive", [False, True])
def test_sam_equals_its_naive_twin(adaptive):
    ours, twin = cnn().double(), cnn().double()
    batch = images()[0].double(), images()[1]
    optimizer = SAM(ours.parameters(), rho=0.2, adaptive=adaptive, model=ours, lr=0.1, momentum=0.9)
    left = train(ours, optimizer, 4, batch) + list(ours.buffers())
    right = naive_sam(twin, batch, rho=0.2, lr=0.1, momentum=0.9, steps=4, adaptive=adaptive) + list(twin.buffers())
    for a, b in zip(left, right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)  # float64, four steps


@pytest.mark.parametrize("n_samples", [1, 3])
@pytest.mark.parametrize("base", [torch.optim.SGD, torch.optim.AdamW, torch.optim.Adagrad])
def test_without_climb_and_noise_it_is_the_base_optimizer(base, n_samples):
    tilted, plain = cnn(), cnn()
    del tilted[1], plain[1]  # A bias before batch normalisation has a gradient of roundings, which Adam enlarges.
    optimizer = TiltedSAM(tilted.parameters(), base, n_samples=n_samples, rho=0.0, radius=0.0, lr=0.01)
    for a, b in zip(train(tilted, optimizer), train(plain, base(plain.parameters(), lr=0.01)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-7)  # the mean of three equal float32 gradients


def test_step_is_along_the_tilted_mean_of_the_gradients_visited(seed):
    """ε₀ of length radius, then rho along the gradient there, then the mean of the gradients at the ends."""
    hessian = torch.diag(torch.tensor([1.0, 4.0, 9.0], dtype=torch.float64))
    start = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)
    w, closure, visited = point(start, lambda w: 0.5 * w @ hessian @ w)
    optimizer = TiltedSAM([w], tilt=2.0, n_samples=4, rho=0.3, radius=0.1, lr=0.01, generator=seeded(seed))
    value = optimizer.step(closure)
    assert len(visited) == 8
    losses, gradients = [], []
    for begin, end in zip(visited[::2], visited[1::2], strict=True):
        # Three normal numbers are shorter than 0.1 once in 4000 draws, and then they are not clipped.
        assert (begin - start).norm() <= 0.1 * (1 + 1e-12)
        climb = hessian @ begin
        torch.testing.assert_close(end, begin + 0.3 * climb / climb.norm(), rtol=1e-12, atol=1e-12)
        losses.append(0.5 * end @ hessian @ end)
        gradients.append([hessian @ end])
    (expected,) = naive_mean(losses, gradients, 2.0)
    torch.testing.assert_close(w.grad, expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(w.detach(), start - 0.01 * expected, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(value, tilted_loss(torch.stack(losses), 2.0))
    torch.testing.assert_close(optimizer.last_losses, torch.stack(losses))
    torch.testing.assert_close(optimizer.last_weights, tilted_weights(torch.stack(losses), 2.0))


def test_monte_carlo_agrees_with_the_gaussian_closed_form():
    """For L = ½ θᵀHθ, ε ~ N(0, σ²I): ∇L^t = H(I − tσ²H)⁻¹θ, L^t = ½ θᵀ∇L^t − log det(I − tσ²H)/2t."""
    h, start = torch.tensor([0.5, 1.0, 2.0], dtype=torch.float64), torch.tensor([1.0, -0.5, 0.3], dtype=torch.float64)
    tilt, std = 0.5, 0.5
    shrink = 1 - tilt * std**2 * h
    gradient = h / shrink * start
    loss = 0.5 * start @ gradient - shrink.log().sum() / (2 * tilt)

    w, closure, visited = point(start, lambda w: 0.5 * (h * w * w).sum())
    optimizer = TiltedSAM(
        [w], tilt=tilt, n_samples=20_000, sampler="none", radius=math.inf, noise_std=std, lr=0.0, generator=seeded()
    )
    with as_users_have_it():  # thousands of calls
        value = optimizer.step(closure)
    samples = torch.stack(visited)
    weights = optimizer.last_weights
    errors = (weights[:, None] * (h * samples - w.grad)).square().sum(0).sqrt()  # of a self-normalised mean
    assert ((w.grad - gradient).abs() < 3 * errors).all()
    relative = (weights * len(weights)).std() / math.sqrt(len(weights))
    assert (value - loss).abs() < 3 * relative / tilt


def test_the_closed_form_adds_half_the_variance_at_small_tilts():
    h, start, std = torch.tensor([0.5, 2.0], dtype=torch.float64), torch.tensor([1.0, 0.3], dtype=torch.float64), 0.5

    def slope(tilt):
        shrink = 1 - tilt * std**2 * h
        tilted = 0.5 * (h / shrink * start**2).sum() - torch.log1p(-tilt * std**2 * h).sum() / (2 * tilt)
        return (tilted - 0.5 * (h * (start**2 + std**2)).sum()) / tilt

    # Var of ½ Σ h (θ + ε)²: Σ h² (θ² σ² + σ⁴/2).
    variance = (h**2 * (start**2 * std**2 + std**4 / 2)).sum()
    torch.testing.assert_close(2 * slope(1e-4) - slope(2e-4), 0.5 * variance, rtol=1e-4, atol=0)


def test_equal_losses_give_the_plain_mean(seed):
    """On a cone L = ‖θ‖ seen from its tip, points at one distance have one loss, whatever their gradients."""
    w, closure, visited = point(torch.zeros(40), lambda w: w.norm())
    optimizer = TiltedSAM([w], tilt=100.0, sampler="none", radius=0.1, lr=0.0, generator=seeded(seed))
    optimizer.step(closure)
    torch.testing.assert_close(w.grad, torch.stack([v / v.norm() for v in visited]).mean(0), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(("size", "n_samples"), [(1, 10_000), (2, 5_000), (10, 1_500)])
def test_uniform_noise_fills_the_ball(size, n_samples):
    """The mean distance from the centre of a ball in d dimensions is d/(d + 1) of its radius."""
    w = nn.Parameter(torch.zeros(size))
    distances = []

    def closure():
        distances.append(w.detach().norm())
        w.grad = torch.zeros(size)
        return torch.zeros(())

    settings = {"sampler": "none", "noise": "uniform", "radius": 3.0, "lr": 0.0}
    with as_users_have_it():  # thousands of calls
        TiltedSAM([w], n_samples=n_samples, generator=seeded(), **settings).step(closure)
    share = torch.stack(distances) / 3.0
    assert share.max() <= 1 + 1e-6
    # 1 %: the standard error of that many draws is at most 0.6 % of the mean.
    assert share.mean() == pytest.approx(size / (size + 1), rel=0.01)


def test_gaussian_noise_is_shortened_to_the_radius_over_all_parameters_together(seed):
    a, b = nn.Parameter(torch.zeros(300)), nn.Parameter(torch.zeros(7, 100))
    spread = {}

    def closure():
        spread[radius] = torch.cat([a.detach(), b.detach().flatten()])
        a.grad, b.grad = torch.zeros(300), torch.zeros(7, 100)
        return torch.zeros(())

    for radius in (0.5, 1e3, math.inf):
        groups = [{"params": [a]}, {"params": [b]}]
        settings = {"n_samples": 1, "sampler": "none", "noise_std": 0.2, "radius": radius, "lr": 0.0}
        TiltedSAM(groups, generator=seeded(seed), **settings).step(closure)
    assert spread[0.5].norm() == pytest.approx(0.5, rel=1e-5)
    assert torch.equal(spread[1e3], spread[math.inf])
    assert spread[math.inf].std() == pytest.approx(0.2, rel=0.15)  # 1000 numbers: six standard errors
    torch.testing.assert_close(spread[0.5], spread[math.inf] * 0.5 / spread[math.inf].norm(), rtol=1e-5, atol=1e-8)


def visits_of_hmc(delta, steps, seed, *, rho=100.0):
    h = torch.tensor([1.0, 5.0, 2.0], dtype=torch.float64)
    w, closure, visited = point([1.0, -1.0, 2.0], lambda w: 0.5 * (h * w * w).sum())
    settings = {"n_samples": 1, "sampler": "hmc", "hmc_step": 0.1, "hmc_std": 0.5, "hmc_steps": steps, "lr": 0.0}
    optimizer = TiltedSAM([w], tilt=9.0, delta=delta, rho=rho, radius=0.3, generator=seeded(seed), **settings)
    optimizer.step(closure)
    return h, visited, optimizer


def test_hmc_takes_euler_steps_in_the_potential_minus_delta_times_loss(seed):
    """The velocity (ε' − ε) σ²/a starts as the momentum drawn plus a δ g, and gains a δ g at every step."""
    h, (start, *still), _ = visits_of_hmc(0.0, 2, seed)
    _, (same_start, *leaning), _ = visits_of_hmc(3.0, 2, seed)
    assert torch.equal(start, same_start)
    drawn = (still[0] - start) * 0.25 / 0.1
    torch.testing.assert_close((still[1] - still[0]) * 0.25 / 0.1, drawn)
    first = (leaning[0] - start) * 0.25 / 0.1
    second = (leaning[1] - leaning[0]) * 0.25 / 0.1
    torch.testing.assert_close(first, drawn + 0.1 * 3.0 * h * start)
    torch.testing.assert_close(second, first + 0.1 * 3.0 * h * leaning[0])


def test_hmc_stays_in_the_ball(seed):
    _, visited, _ = visits_of_hmc(9.0, 4, seed, rho=0.01)
    home = torch.tensor([1.0, -1.0, 2.0], dtype=torch.float64)
    for place in visited[1:]:
        assert (place - home).norm() == pytest.approx(0.01)


def test_hmc_leaves_tilt_minus_delta_to_the_weights(seed):
    w, closure, _ = point([1.0, -1.0], lambda w: (w * w).sum())
    optimizer = TiltedSAM([w], tilt=5.0, delta=3.0, sampler="hmc", n_samples=4, lr=0.0, generator=seeded(seed))
    value = optimizer.step(closure)
    torch.testing.assert_close(optimizer.last_weights, tilted_weights(optimizer.last_losses, 2.0))
    torch.testing.assert_close(value, tilted_loss(optimizer.last_losses, 2.0))


def test_hmc_momentum_has_the_standard_deviation_asked_for(seed):
    w, closure, visited = point(torch.zeros(2000), lambda w: w.sum() * 0)
    settings = {"sampler": "hmc", "hmc_step": 0.1, "hmc_std": 0.5, "rho": 1e6, "lr": 0.0}
    TiltedSAM([w], n_samples=1, radius=0.0, generator=seeded(seed), **settings).step(closure)
    momentum = (visited[1] - visited[0]) * 0.25 / 0.1
    assert momentum.std() == pytest.approx(0.5, rel=0.1)  # 2000 numbers: six standard errors


@pytest.mark.parametrize(
    ("settings", "calls"),
    [
        ({"n_samples": 3}, 6),
        ({"n_samples": 5}, 10),
        ({"n_samples": 4, "sampler": "none"}, 4),
        ({"n_samples": 3, "sampler": "hmc"}, 6),
        ({"n_samples": 3, "sampler": "hmc", "hmc_steps": 4}, 15),
    ],
)
def test_closure_runs_as_often_as_documented(settings, calls):
    w, closure, visited = point([1.0, 2.0], lambda w: (w * w).sum())
    TiltedSAM([w], lr=0.1, generator=seeded(), **settings).step(closure)
    assert len(visited) == calls


@pytest.mark.parametrize("schedule", [lambda step: 20 * step / 4, lambda step: 20 * (1 - step / 4)], ids=["up", "down"])
def test_tilt_follows_its_schedule_also_after_a_checkpoint(schedule):
    w, closure, _ = point([1.0, 2.0], lambda w: (w * w).sum())
    optimizer = TiltedSAM([w], tilt=schedule, lr=0.01, generator=seeded())
    for step in range(4):
        if step == 2:
            checkpoint = optimizer.state_dict()
            optimizer = TiltedSAM([w], tilt=schedule, lr=0.01)
            optimizer.load_state_dict(checkpoint)
        optimizer.step(closure)
        torch.testing.assert_close(optimizer.last_weights, tilted_weights(optimizer.last_losses, schedule(step)))


def test_a_checkpoint_of_the_base_optimizer_can_be_continued():
    w, closure, _ = point([1.0, 2.0], lambda w: (w * w).sum())
    plain = torch.optim.SGD([w], lr=0.1, momentum=0.9)
    plain.step(closure)
    optimizer = SAM([w], lr=0.7, momentum=0.9)
    optimizer.load_state_dict(plain.state_dict())
    assert torch.equal(optimizer.state[w]["momentum_buffer"], plain.state[w]["momentum_buffer"])
    assert optimizer.param_groups[0]["lr"] == optimizer.base.param_groups[0]["lr"] == 0.1


def test_a_copy_of_model_and_optimizer_trains_alike():
    model = cnn(dropout=0.0)
    optimizer = TiltedSAM(model.parameters(), radius=0.1, model=model, lr=0.1, momentum=0.9, generator=seeded())
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 3)
    train(model, optimizer, 2)
    other, its_optimizer = copy.deepcopy((model, optimizer))
    assert_same(train(model, optimizer, 2), train(other, its_optimizer, 2))
    scheduler.step()


def test_named_parameters_and_their_checkpoint():
    model = cnn()
    optimizer = TiltedSAM(model.named_parameters(), radius=0.1, lr=0.1, generator=seeded())
    train(model, optimizer, 1)
    assert optimizer.state_dict()["param_groups"][0]["param_names"] == [name for name, _ in model.named_parameters()]


# What a step leaves behind.


@pytest.mark.parametrize("batch_norm", ["first", "each"])
@pytest.mark.parametrize("sampler", ["ascent", "none"])
def test_weights_come_home_and_statistics_move_as_documented(sampler, batch_norm):
    model, twin = cnn(), cnn()
    model.tied, model.unused = model[0].weight, nn.Parameter(torch.full((3,), 0.1))
    before = weights_of(model)
    settings = {"sampler": sampler, "batch_norm": batch_norm, "n_samples": 3, "lr": 0.0, "generator": seeded()}
    optimizer = TiltedSAM(model.parameters(), rho=0.5, radius=0.5, model=model, **settings)
    optimizer.step(closure_step(model, images(), cross_entropy))
    assert_same(weights_of(model), before)
    updates = {"first": 1, "each": 3}[batch_norm]
    assert model[1].num_batches_tracked == updates
    if batch_norm == "first" and sampler == "ascent":  # at θ + ε₀, hence only near those of the twin
        twin(images()[0])
        torch.testing.assert_close(model[1].running_mean, twin[1].running_mean, atol=0.1, rtol=0)
    assert model[1].track_running_stats


def test_without_the_model_every_evaluation_updates_statistics():
    model = cnn()
    train(model, TiltedSAM(model.parameters(), n_samples=2, lr=0.1, generator=seeded()), 1)
    assert model[1].num_batches_tracked == 4


def test_normalisation_that_tracks_nothing_or_evaluates_is_left_alone():
    untracked, evaluating = nn.BatchNorm2d(4, track_running_stats=False), nn.InstanceNorm2d(4, track_running_stats=True)
    model = nn.Sequential(*cnn()[:1], untracked, evaluating, *cnn()[2:])
    evaluating.eval()
    seen = []
    evaluating.register_forward_pre_hook(lambda module, _: seen.append(module.track_running_stats))
    train(model, TiltedSAM(model.parameters(), model=model, lr=0.1, generator=seeded()), 1)
    assert not untracked.track_running_stats
    assert seen == [True] * 6


def test_frozen_batch_norm_stays_in_evaluation_mode():
    model = cnn()
    model[1].eval()
    before = [buffer.clone() for buffer in model.buffers()]
    train(model, TiltedSAM(model.parameters(), model=model, lr=0.1, generator=seeded()), 1)
    assert_same(list(model.buffers()), before)


def test_parameters_that_the_loss_does_not_reach_are_perturbed_and_come_home():
    used, unused = nn.Parameter(torch.full((3,), 0.1)), nn.Parameter(torch.full((3,), 0.1))
    seen = []

    def closure():
        seen.append(unused.detach().clone())
        (loss := used.square().sum()).backward()
        return loss

    TiltedSAM([used, unused], lr=0.1, generator=seeded()).step(closure)
    assert not any(torch.equal(place, torch.full((3,), 0.1)) for place in seen)
    assert torch.equal(unused.detach(), torch.full((3,), 0.1))
    assert unused.grad is None


def test_a_parameter_frozen_in_the_midst_of_training_stays_whatever_gradient_it_had():
    left, right = nn.Parameter(torch.ones(2)), nn.Parameter(torch.ones(2))
    optimizer = TiltedSAM([left, right], radius=0.1, lr=0.1, generator=seeded())

    def closure():  # clears nothing
        (loss := (left + right).square().sum()).backward()
        return loss

    optimizer.step(closure)
    left.requires_grad_(False)
    before = left.detach().clone()
    optimizer.step(closure)
    assert torch.equal(left, before)


def test_a_base_optimizer_that_begins_with_a_state_keeps_it():
    class Counting(torch.optim.SGD):
        def __init__(self, params, **settings):
            super().__init__(params, **settings)
            self.state["steps"] = {"taken": 0}

        def step(self, closure=None):
            self.state["steps"]["taken"] += 1
            return super().step(closure)

    w, closure, _ = point([1.0], lambda w: w.square().sum())
    optimizer = SAM([w], Counting, lr=0.1)
    optimizer.step(closure)
    assert optimizer.state["steps"]["taken"] == 1


def test_dropout_and_noise_repeat_and_noise_leaves_the_global_generator_alone():
    def run(seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = cnn(dropout=0.5)
            optimizer = TiltedSAM(model.parameters(), radius=0.1, lr=0.1, generator=seeded())
            return train(model, optimizer, 3), torch.get_rng_state()

    def dropout_alone(seed):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            model = cnn(dropout=0.5)
            for _ in range(3 * 6):
                model(images()[0])
            return torch.get_rng_state()

    (first, state), (second, _) = run(1), run(1)
    assert_same(first, second)
    assert not torch.equal(first[0], run(2)[0][0])
    assert torch.equal(state, dropout_alone(1))


def test_without_a_generator_torchs_seed_decides_and_a_checkpoint_goes_on():
    def make(model):
        return TiltedSAM(model.parameters(), radius=0.1, lr=0.1)

    runs = []
    for _ in range(2):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            model = cnn()
            optimizer = make(model)
            train(model, optimizer, 2)
            checkpoint = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
            runs.append(train(model, optimizer, 2))
    assert_same(*runs)
    model = cnn(seed=9)
    optimizer = make(model)
    model.load_state_dict(checkpoint[0])
    optimizer.load_state_dict(checkpoint[1])
    assert_same(train(model, optimizer, 2), runs[0])


def test_clipping_bounds_both_evaluations():
    ours, twin = cnn(), cnn()

    def clipping():
        loss = closure_step(twin, images(), cross_entropy)()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.01)
        return loss

    settings = {"radius": 0.1, "lr": 0.1}
    clipped = TiltedSAM(ours.parameters(), clip_norm=0.01, generator=seeded(), **settings)
    plain = TiltedSAM(twin.parameters(), generator=seeded(), **settings)
    train(ours, clipped, 1)
    plain.step(clipping)
    assert_same(weights_of(ours), weights_of(twin))
    assert nn.utils.get_total_norm([p.grad for p in ours.parameters()]) <= 0.01 * (1 + 1e-5)


def test_hugging_face_batches_are_mappings():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.head = nn.Linear(2, 1)

        def forward(self, features, labels):
            return {"loss": (self.head(features).squeeze() - labels).square().mean()}

    model = Model()
    batch = {"features": torch.ones(4, 2), "labels": torch.ones(4)}
    optimizer = SAM(model.parameters(), lr=0.1)
    first = optimizer.step(closure_step(model, batch, lambda output, batch: output["loss"]))
    assert optimizer.step(closure_step(model, batch, lambda output, batch: output["loss"])) < first


def test_a_compiled_model_trains_as_the_plain_one():
    plain, source = cnn(), cnn()
    compiled = torch.compile(source, backend="aot_eager")
    left, right = (
        train(model, TiltedSAM(model.parameters(), radius=0.1, model=model, lr=0.1, generator=seeded()), 2)
        for model in (plain, compiled)
    )
    for a, b in zip(left + list(plain.buffers()), right + list(source.buffers()), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)  # kernels in another order
    assert source[1].num_batches_tracked == 2


# float16.


def test_gradscaler_recipe_trains_and_survives_an_overflow():
    model = nn.Sequential(nn.Linear(64, 8), nn.Tanh(), nn.Linear(8, 3))
    optimizer = TiltedSAM(model.parameters(), radius=0.1, n_samples=2, lr=0.1, generator=seeded())
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40)  # overflows at first, as a new scaler does
    x, y = images()[0].flatten(1), images()[1]

    def closure():
        optimizer.zero_grad()
        with torch.autocast("cpu", torch.float16):
            loss = cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        scaler.update()
        return loss

    before = weights_of(model)
    with pytest.raises(ConvergenceError, match="with a GradScaler, unscale the gradients inside the closure"):
        optimizer.step(closure)
    assert_same(weights_of(model), before)
    losses = []
    for _ in range(60):
        try:
            losses.append(float(optimizer.step(closure)))
        except ConvergenceError:
            continue
    assert losses
    assert losses[-1] < losses[0]
    assert scaler.get_scale() < 2.0**40


def test_gradscaler_that_steps_by_itself_is_refused():
    model = nn.Linear(4, 3)
    optimizer = SAM(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    with pytest.raises(ClosureError, match=r"^SAM\.step\(\) needs a closure"):
        scaler.step(optimizer)


# Cost.


class _Watch(TorchDispatchMode):
    """Bytes of live tensors made inside the block, at their peak; and how often a number was fetched from the device."""

    def __init__(self):
        super().__init__()
        self.storages, self.peak, self.fetched = {}, 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        self.fetched += "_local_scalar_dense" in str(func)
        for tensor in tree_iter(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                self.storages[storage.data_ptr()] = StorageWeakRef(storage), storage.nbytes()
        self.storages = {key: kept for key, kept in self.storages.items() if not kept[0].expired()}
        self.peak = max(self.peak, sum(size for _, size in self.storages.values()))
        return result


def watched_step(make):
    model = nn.Sequential(nn.Linear(256, 256), nn.Tanh(), nn.Linear(256, 2))  # parameters far larger than activations
    optimizer = make(model.parameters())
    closure = closure_step(model, (torch.ones(2, 256), torch.tensor([0, 1])), cross_entropy)
    with _Watch() as watch:
        optimizer.step(closure)
    copies = watch.peak / sum(p.numel() * p.element_size() for p in model.parameters())
    return copies, watch.fetched


def test_a_step_takes_two_copies_of_the_parameters_whatever_the_number_of_samples():
    plain, _ = watched_step(lambda p: torch.optim.SGD(p, lr=0.1))
    for sampler, copies in {"ascent": 2, "none": 2, "hmc": 3}.items():
        extra = {}
        for n_samples in (2, 9):
            settings = {"sampler": sampler, "n_samples": n_samples, "lr": 0.1}
            extra[n_samples] = watched_step(lambda p, settings=settings: TiltedSAM(p, **settings))[0] - plain
        assert extra[2] == pytest.approx(extra[9], abs=0.01)
        assert extra[9] <= copies * 1.02  # scalars and activations


def test_the_sampling_loop_never_waits_for_the_device():
    _, few = watched_step(lambda p: TiltedSAM(p, n_samples=1, lr=0.1))
    _, many = watched_step(lambda p: TiltedSAM(p, n_samples=8, clip_norm=1.0, lr=0.1, generator=seeded()))
    assert few == 3  # the seed of its own generator, the seed of the step, one check that all is finite
    assert many == 2


# Bad input.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"rho": -0.1}, "rho must be a number >= 0; got -0.1."),
        ({"rho": math.inf}, "rho must be finite; got inf."),
        ({"radius": -1.0}, "radius must be a number >= 0; got -1.0."),
        ({"tilt": -1.0}, "tilt must be a number >= 0; got -1.0."),
        ({"tilt": "high"}, "tilt must be a number >= 0; got 'high'."),
        ({"n_samples": 0}, "n_samples must be an int >= 1; got 0."),
        ({"n_samples": 2.5}, "n_samples must be an int >= 1; got 2.5."),
        ({"noise_std": -1.0}, "noise_std must be a number >= 0; got -1.0."),
        ({"hmc_std": 0.0}, "hmc_std must be a number > 0; got 0.0."),
        ({"hmc_steps": 0}, "hmc_steps must be an int >= 1; got 0."),
        ({"clip_norm": 0.0}, "clip_norm must be a number > 0; got 0.0."),
        ({"noise": "cauchy"}, "noise must be one of 'gaussian', 'uniform'; got 'cauchy'."),
        ({"sampler": "sgld"}, "sampler must be one of 'ascent', 'hmc', 'none'; got 'sgld'."),
        ({"batch_norm": "last"}, "batch_norm must be one of 'first', 'each'; got 'last'."),
        (
            {"tilt": 2.0, "delta": 3.0, "sampler": "hmc"},
            "delta must be at most the tilt; got delta=3.0 and tilt=2.0.",
        ),
        ({"delta": 3.0}, "delta leans the sampler \"hmc\" alone; got delta=3.0 with sampler='ascent'."),
        (
            {"noise": "uniform", "radius": math.inf},
            'noise="uniform" needs a finite radius; got inf. Only noise="gaussian" can do without.',
        ),
    ],
)
def test_a_setting_out_of_range_is_refused_by_name(settings, message):
    with as_users_have_it(), pytest.raises(ParameterError) as error:
        TiltedSAM([nn.Parameter(torch.ones(2))], lr=0.1, **settings)
    assert str(error.value) == message


def test_a_base_optimizer_that_is_no_class_is_shown_the_right_call():
    params = [nn.Parameter(torch.ones(2))]
    call = r"Write SAM\(model\.parameters\(\), torch\.optim\.SGD, lr=0\.1, momentum=0\.9\)\.$"
    with as_users_have_it(), pytest.raises(ParameterError, match=call):
        SAM(params, torch.optim.SGD(params, lr=0.1))
    for needs_closure in (torch.optim.LBFGS, SAM):
        with pytest.raises(ParameterError, match=f"must step without a closure; {needs_closure.__name__} needs one"):
            TiltedSAM(params, needs_closure)


def test_a_delta_above_a_scheduled_tilt_is_refused_before_the_step():
    w, closure, visited = point([1.0], lambda w: w.sum())
    optimizer = TiltedSAM([w], tilt=lambda step: 5.0 - step, delta=5.0, sampler="hmc", lr=0.1, generator=seeded())
    optimizer.step(closure)
    calls = len(visited)
    with pytest.raises(ParameterError, match=r"^delta must be at most the tilt; got delta=5\.0 and tilt=4\.0\.$"):
        optimizer.step(closure)
    assert len(visited) == calls


@pytest.mark.parametrize(
    ("answer", "message"),
    [
        (lambda loss: None, r"^The closure must return the loss, a tensor of one number; it returned None\. Write"),
        (lambda loss: 1.5, r"it returned 1\.5\. Write"),
        (lambda loss: loss.expand(2), r"it returned a tensor of shape \(2,\)\. Write"),
    ],
)
def test_a_closure_that_returns_no_scalar_is_refused(answer, message):
    w = nn.Parameter(torch.full((3,), 0.1))

    def closure():
        (loss := w.square().sum()).backward()
        return answer(loss)

    with pytest.raises(ClosureError, match=message):
        TiltedSAM([w], lr=0.1).step(closure)
    assert torch.equal(w.detach(), torch.full((3,), 0.1))


def test_a_closure_without_backward_is_refused_also_after_a_good_step():
    w, closure, _ = point([1.0, 2.0], lambda w: w.square().sum())
    optimizer = SAM([w], lr=0.1)
    optimizer.step(closure)
    with pytest.raises(
        ClosureError, match=r"^The closure left every \.grad at None; it must call loss\.backward\(\)\. Wr"
    ):
        optimizer.step(lambda: w.square().sum())


def test_a_missing_closure_is_shown_one():
    optimizer = SAM([nn.Parameter(torch.ones(2))], lr=0.1)
    with pytest.raises(
        ClosureError, match=r"(?s)^SAM\.step\(\) needs a closure.*def closure\(\):.*optimizer\.step\(closure\)$"
    ):
        optimizer.step()


def test_nothing_to_train_is_an_error():
    optimizer = SAM([nn.Parameter(torch.ones(2), requires_grad=False)], lr=0.1)
    with pytest.raises(InputError, match=r"^SAM\.step\(\): every parameter has requires_grad=False\. Unfreeze some\.$"):
        optimizer.step(lambda: torch.zeros(()))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("where", ["loss", "gradient"])
@pytest.mark.parametrize("call", [0, 1, 3])
def test_a_number_that_is_not_finite_restores_the_weights_and_raises(call, where, bad):
    w, closure, visited = point([0.1, 0.2], lambda w: w.square().sum())
    optimizer = TiltedSAM([w], n_samples=2, radius=0.1, lr=0.1, momentum=0.9, generator=seeded())
    optimizer.step(closure)
    start, momentum, calls = w.detach().clone(), optimizer.state[w]["momentum_buffer"].clone(), len(visited)

    def spoiled():
        loss = closure()
        if len(visited) - calls == call + 1:
            if where == "loss":
                return loss * bad
            w.grad[0] = bad
        return loss

    if where == "loss" and call == 0:  # The loss where a climb starts is never used.
        optimizer.step(spoiled)
        return
    with pytest.raises(
        ConvergenceError, match=r"^TiltedSAM\.step\(\): a loss or gradient is NaN or infinite; the losses are"
    ):
        optimizer.step(spoiled)
    assert torch.equal(w.detach(), start)
    assert torch.equal(optimizer.state[w]["momentum_buffer"], momentum)
    optimizer.step(closure)
    assert w.isfinite().all()


def test_every_refusal_is_of_heedfuls_family():
    assert all(issubclass(kind, HeedfulError) for kind in (ClosureError, ConvergenceError, InputError, ParameterError))


# Two processes.


def _train_on_a_rank(rank, seed_of_rank, checkpoint):
    """Two steps on half of the batch, with noise seeded otherwise on every rank; all weights, then a checkpoint."""
    torch.manual_seed(rank)
    model = cnn().double().eval()
    generator = None if seed_of_rank is None else seeded(seed_of_rank + rank)
    optimizer = TiltedSAM(model.parameters(), radius=0.1, lr=0.1, momentum=0.9, generator=generator)
    if checkpoint is not None:
        for part, state in zip((model, optimizer), torch.load(io.BytesIO(checkpoint), weights_only=True), strict=True):
            part.load_state_dict(state)
    parallel = DistributedDataParallel(model)
    x, y = images()[0].double()[rank::WORLD], images()[1][rank::WORLD]
    for _ in range(2):
        optimizer.step(closure_step(parallel, (x, y), cross_entropy))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    return [p.numpy() for p in weights_of(model)], file.getvalue()


def test_two_processes_share_the_noise_of_rank_0_and_equal_one_process():
    model = cnn().double().eval()
    optimizer = TiltedSAM(model.parameters(), radius=0.1, lr=0.1, momentum=0.9, generator=seeded(7))
    batch = images()[0].double(), images()[1]
    whole = [train(model, optimizer, 2, batch), train(model, optimizer, 2, batch)]
    first = on_two_ranks(_train_on_a_rank, 7, None)
    resumed = on_two_ranks(_train_on_a_rank, None, first[0][1])
    for expected, ranks in zip(whole, (first, resumed), strict=True):
        for weights, _ in ranks:
            for left, right in zip(weights, expected, strict=True):
                torch.testing.assert_close(torch.from_numpy(left), right, rtol=1e-6, atol=1e-9)


# Found from outside.


def test_an_autocast_around_the_step_sees_the_points_visited():
    def losses(cache_enabled):
        w = nn.Parameter(torch.ones(4, 4))
        optimizer = TiltedSAM([w], rho=1.0, lr=0.1, generator=seeded())

        def closure():
            optimizer.zero_grad()
            loss = (torch.ones(1, 4) @ w).float().square().mean()
            loss.backward()
            return loss

        with torch.autocast("cpu", torch.bfloat16, cache_enabled=cache_enabled):
            optimizer.step(closure)
        return optimizer.last_losses

    assert len(losses(False).unique()) == 3
    assert torch.equal(losses(True), losses(False))


def test_a_closure_may_return_the_same_memory_every_time():
    w, closure, _ = point([3.0, 4.0], lambda w: w.square().sum())
    memory, losses = torch.zeros((), dtype=torch.float64), []

    def in_place():
        losses.append(float(memory.copy_(closure().detach())))
        return memory

    optimizer = TiltedSAM([w], lr=0.1, generator=seeded())
    optimizer.step(in_place)
    assert optimizer.last_losses.tolist() == losses[1::2]


def test_parameters_without_entries_are_let_be():
    w, closure, _ = point([3.0, 4.0], lambda w: w.square().sum() + empty.sum())
    empty = nn.Parameter(torch.empty(0, 3))
    TiltedSAM([w, empty], lr=0.1, generator=seeded()).step(closure)
    assert w.detach().norm() < 5


def test_a_sparse_gradient_is_refused_with_the_weights_restored():
    embedding = nn.Embedding(5, 2, sparse=True)
    before = weights_of(embedding)
    batch = torch.tensor([1, 2]), torch.zeros(2, 2)
    with pytest.raises(ClosureError, match="sparse=False"):
        TiltedSAM(embedding.parameters(), lr=0.1).step(closure_step(embedding, batch, nn.functional.mse_loss))
    assert_same(weights_of(embedding), before)


def test_maximising_is_refused():
    w, closure, _ = point([3.0, 4.0], lambda w: w.square().sum())
    with pytest.raises(ParameterError, match="maximize"):
        SAM([w], lr=0.1, maximize=True).step(closure)


@pytest.mark.parametrize("noise", ["gaussian", "uniform"])
def test_hmc_starts_in_the_ball_too(noise):
    w, closure, visited = point(torch.zeros(8), lambda w: w.sum())
    TiltedSAM([w], lr=0.0, sampler="hmc", noise=noise, rho=0.1, generator=seeded()).step(closure)
    assert max(at.norm() for at in visited) <= 0.1 + 1e-9


def test_without_a_tilt_weights_are_equal_however_far_apart_the_losses():
    assert tilted_weights(torch.tensor([3e38, -3e38]), 0.0).tolist() == [0.5, 0.5]
