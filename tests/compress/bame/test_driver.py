"""BAME in training: its invariants under every optimizer and loop, its limits, its backends, and its refusals."""

import copy
import io
import math

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel

from heedful.compress import BAME, StaticMask, check_nm
from heedful.errors import HeedfulWarning, InputError, ParameterError, UnsupportedModelError
from tests.compress.bame.nets import batches, cnn, mlp, sgd, train
from tests.conformance.distributed import WORLD, on_two_ranks
from tests.conformance.typechecks import as_users_have_it


def bame(model, optimizer, n=2, m=4, **settings):
    return BAME(model, optimizer, n, m, **{"total_steps": 40, "interval": 4, **settings})


def trained(model, steps=30, optimizer=None, n=2, m=4, data=None, **settings):
    optimizer = optimizer or sgd(model)
    driver = bame(model, optimizer, n, m, **settings)
    train(model, optimizer, driver, data or batches(model, steps))
    return driver


def weights_of(model):
    return [p.detach().clone() for p in model.parameters()]


def assert_same(left, right):
    assert len(left) == len(right)
    for a, b in zip(left, right, strict=True):
        assert torch.equal(a, b)


def assert_pattern(driver, n, m):
    """Exactly n active in each block, and zeros elsewhere."""
    for name, mask in driver.masks().items():
        counts = mask.movedim(1, -1).reshape(-1, m).sum(dim=1)
        assert (counts == n).all()
        assert (driver.weights()[name][~mask] == 0).all()


OPTIMIZERS = {
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "nesterov": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "weight_decay": 1e-2}),
    "adam": (torch.optim.Adam, {"lr": 0.01}),
    "adamw": (torch.optim.AdamW, {"lr": 0.01, "weight_decay": 0.1, "amsgrad": True}),
}


@pytest.mark.parametrize("kind", OPTIMIZERS)
@pytest.mark.parametrize("make", [mlp, cnn, lambda seed=0: cnn(seed).to(memory_format=torch.channels_last)])
def test_every_block_has_n_active_weights_after_every_step_and_after_loading(kind, make):
    cls, settings = OPTIMIZERS[kind]
    model = make()
    optimizer = cls(model.parameters(), **settings)
    driver = bame(model, optimizer)
    before = {name: mask.clone() for name, mask in driver.masks().items()}
    for batch in batches(model, 13):
        train(model, optimizer, driver, [batch])
        assert_pattern(driver, 2, 4)
    assert any((mask != before[name]).any() for name, mask in driver.masks().items())
    assert all(value.is_contiguous() for name, value in model.state_dict().items() if name.endswith("mask"))
    other = make(1)
    loaded = bame(other, cls(other.parameters(), **settings))
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(driver.state_dict())
    assert_pattern(loaded, 2, 4)
    assert_same(list(driver.masks().values()), list(loaded.masks().values()))


def test_the_first_mask_keeps_the_largest_weights_scaled_to_the_output_of_the_dense_layer():
    dense, model, auto, pretrained = mlp(), mlp(), mlp(), mlp()
    driver = bame(model, sgd(model), 1, 8)
    weight = driver.weights()["2"]
    blocks = dense[2].weight.view(-1, 8)
    assert torch.equal(weight.view(-1, 8).argmax(1), (blocks * (blocks.abs() == blocks.abs().amax(1, True))).argmax(1))
    torch.testing.assert_close(weight[weight != 0], dense[2].weight[weight != 0] * math.sqrt(8))
    assert driver.stats().rescaled["2"] == math.sqrt(8)
    driver = bame(auto, sgd(auto), 1, 8, rescale_init="auto")
    torch.testing.assert_close(driver.weights()["2"].norm(), dense[2].weight.norm())
    driver = bame(pretrained, sgd(pretrained), 1, 8, rescale_init=False)
    kept = driver.masks()["2"]
    assert torch.equal(driver.weights()["2"][kept], dense[2].weight[kept])


@pytest.mark.parametrize("settings", [{"interval": 41}, {"start": 0.5, "end": 0.5}, {"start": 0.9, "end": 0.1}])
def test_with_no_time_to_adapt_it_is_a_static_mask_bit_for_bit(settings):
    model, static = cnn(), cnn()
    trained(model, **settings)
    optimizer = sgd(static)
    driver = StaticMask(static, optimizer, pattern="2:4", total_steps=40, selection="magnitude")
    train(static, optimizer, driver, batches(static, 30))
    assert_same(weights_of(model), weights_of(static))


def test_with_n_equal_to_m_it_is_dense_training_bit_for_bit():
    model, dense = cnn(), cnn()
    driver = trained(model, n=4, m=4)
    train(dense, sgd(dense), None, batches(dense, 30))
    assert driver.stats().adaptations > 0
    driver.finalize()
    assert_same(weights_of(model), weights_of(dense))


@pytest.mark.parametrize("backend", ["masked", "compressed"])
def test_outside_adaptation_gradients_are_those_of_the_masked_layer(backend, seed):
    model, generator = mlp(), torch.Generator().manual_seed(seed)
    driver = bame(model, sgd(model), backend=backend)
    reference = nn.Linear(16, 32)
    with torch.no_grad():
        reference.weight.copy_(driver.weights()["2"])
        reference.bias.copy_(model[2].bias)
    x = torch.randn(5, 3, 16, generator=generator)
    ours, theirs = x.clone().requires_grad_(), x.clone().requires_grad_()
    slope = torch.randn(5, 3, 32, generator=generator)
    left, right = model[2](ours), reference(theirs)
    torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-5)
    left.backward(slope)
    right.backward(slope)
    mask = driver.masks()["2"]
    gradient = driver.weights()["2"].grad
    torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(gradient, reference.weight.grad * mask, rtol=1e-5, atol=1e-5)
    assert (gradient[~mask] == 0).all()
    torch.testing.assert_close(model[2].bias.grad, reference.bias.grad, rtol=1e-5, atol=1e-5)


class Recording(BAME):
    """It keeps what the optimizer holds just after each adaptation."""

    def _adapt(self, gradients):
        name = next(iter(gradients))
        mask, gradient = self.masks()[name].clone(), gradients[name].clone()
        super()._adapt(gradients)
        state = {k: v.clone() for k, v in self.optimizer.state[self.weights()[name]].items() if torch.is_tensor(v)}
        self.record = mask, self.masks()[name].clone(), gradient, state


def test_a_regrown_weight_has_no_moments_and_its_first_step_is_along_its_gradient():
    model = mlp()
    optimizer = sgd(model)
    driver = Recording(model, optimizer, total_steps=40, interval=4)
    train(model, optimizer, driver, batches(model, 5))
    old, new, gradient, state = driver.record
    grown, pruned = new & ~old, old & ~new
    assert grown.any()
    assert grown.sum() == pruned.sum()
    assert (state["momentum_buffer"][grown | pruned] == 0).all()
    weight = driver.weights()["2"].detach()
    torch.testing.assert_close(weight[grown], -0.1 * gradient[grown], rtol=1e-6, atol=0)
    assert (weight[pruned] == 0).all()


def test_swaps_are_those_that_are_expected_to_lower_the_loss():
    model = mlp()
    optimizer = sgd(model)
    driver = bame(model, optimizer, interval=1)
    deltas = []

    def select(scores, state):
        chosen = BAME._select(driver, scores, state)
        assert torch.equal(chosen, (scores.delta < 0) & ~state.frozen)
        deltas.append(scores.delta[chosen])
        return chosen

    driver._select = select
    train(model, optimizer, driver, batches(model, 6))
    stats = driver.stats()
    assert stats.swaps == sum(map(len, deltas)) > 0
    assert stats.expected_loss_change == pytest.approx(float(torch.cat(deltas).sum()), rel=1e-4)
    assert stats.swapped_fraction == pytest.approx(stats.swaps / (256 * stats.adaptations))


def test_gain_follows_the_kind_of_optimizer():
    for cls, gain in (("SGD", "sgd"), ("ASGD", "sgd"), ("Adam", "adam"), ("AdamW", "adam"), ("RMSprop", "adam")):
        model = mlp()
        assert bame(model, getattr(torch.optim, cls)(model.parameters(), lr=0.1)).stats().gain == gain
    model = mlp()
    assert bame(model, sgd(model), gain="adam").stats().gain == "adam"


def block_by_block(model, optimizer, data, n, m, *, interval, warm, end, threshold):
    """BAME after SR-STE for ``warm`` steps, written down naively; the masks it ends with."""
    weights = [model[2].weight, model[4].weight]
    masks = [torch.zeros(weight.numel() // m, m, dtype=torch.bool) for weight in weights]
    pruned, events, frozen = [
        {(i, layer): set() for layer in (0, 1) for i in range(len(masks[layer]))} for _ in range(3)
    ]
    adaptations = 0

    def choose():
        for weight, mask in zip(weights, masks, strict=True):
            for row, active in zip(weight.detach().view(-1, m), mask, strict=True):
                order = sorted(range(m), key=lambda i: -abs(float(row[i])))
                active[:] = torch.tensor([i in order[:n] for i in range(m)])

    with torch.no_grad():
        for weight in weights:
            weight *= math.sqrt(m / n)
    choose()
    for t, (x, y) in enumerate(data):
        optimizer.zero_grad()
        kept = [torch.where(mask.view_as(w), w, 0).detach() for w, mask in zip(weights, masks, strict=True)]
        own = [weight.data for weight in weights]
        for weight, value in zip(weights, kept, strict=True):
            weight.data = value  # the gradient of a sparse weight is dense
        cross_entropy(model(x), y).backward()
        for weight, value in zip(weights, own, strict=True):
            weight.data = value
        for layer, (weight, mask) in enumerate(zip(weights, masks, strict=True)):
            w, g = weight.data.view(-1, m), weight.grad.view(-1, m)
            moments = [
                v.view(-1, m) for v in optimizer.state[weight].values() if v is not None and v.shape == weight.shape
            ]
            if t < warm:
                g += 2e-4 * torch.where(mask, 0, w)
                continue
            if t == warm:
                for values in (w, *moments):
                    values[~mask] = 0
            if 0 < t < end and t % interval == 0:
                adaptations += layer == 0
                for b in range(len(mask)):
                    i = min((k for k in range(m) if mask[b, k]), key=lambda k: abs(float(g[b, k] * w[b, k])))
                    j = max((k for k in range(m) if not mask[b, k]), key=lambda k: abs(float(g[b, k])))
                    if abs(g[b, i] * w[b, i]) < 0.01 * abs(g[b, j]) and not frozen[b, layer]:
                        mask[b, i], mask[b, j] = False, True
                        for values in (w, *moments):
                            values[b, i] = values[b, j] = 0
                        if j in pruned[b, layer]:
                            events[b, layer].add(t)
                        pruned[b, layer] = (pruned[b, layer] | {i}) - {j}
                    if len(events[b, layer]) >= 2 and len(events[b, layer]) / adaptations > threshold:
                        frozen[b, layer].add(t)
            g *= mask
        optimizer.step()
        for weight, mask in zip(weights, masks, strict=True):
            if t >= warm:
                weight.data.view(-1, m)[~mask] = 0
        if t < warm:
            choose()
    assert sum(map(bool, frozen.values())) > 10
    return [mask.view_as(weight) for weight, mask in zip(weights, masks, strict=True)]


@pytest.mark.parametrize(("warmup", "warm"), [("fixed", 0), ("sr_ste", 5)])
def test_training_equals_that_by_a_loop_over_blocks(warmup, warm):
    naive, model = mlp(dtype=torch.float64), mlp(dtype=torch.float64)
    data = list(batches(model, 40, dtype=torch.float64))
    optimizers = [torch.optim.Adam(each.parameters(), lr=0.01) for each in (naive, model)]
    masks = block_by_block(naive, optimizers[0], data, 1, 4, interval=2, warm=warm, end=30, threshold=0.25)
    settings = {"interval": 2, "warmup": warmup, "start": 0.11 if warm else 0.0, "freeze_threshold": 0.25}  # step 4.4
    driver = trained(model, optimizer=optimizers[1], n=1, data=data, **settings)
    assert_same(masks, list(driver.masks().values()))
    assert_same(weights_of(naive), weights_of(driver.finalize()))


def test_at_most_max_fraction_of_the_blocks_swap():
    driver = trained(mlp(), 5, max_fraction=0.1)
    assert driver.stats().adaptations == 1
    # 2 layers of 128 blocks, 13 each; fewer only if they are no candidates, and here they are
    assert driver.stats().swaps == 26
    assert trained(mlp(), 5, max_fraction=0.0).stats().swaps == 0


def test_two_swaps_per_block_share_no_weight():
    once, twice = trained(mlp(), 5, m=8), trained(mlp(), 5, m=8, swaps_per_block=2)
    assert once.stats().swaps < twice.stats().swaps
    assert_pattern(twice, 2, 8)
    changed = [(a ^ b).view(-1, 8).sum(1) for a, b in zip(once.masks().values(), twice.masks().values(), strict=True)]
    assert all(counts.max() <= 2 for counts in changed)  # beyond the first swap, one more


def test_a_block_that_oscillates_freezes_and_never_changes_again_while_others_go_on():
    model = mlp()
    optimizer = sgd(model, lr=0.01, momentum=0.0)
    driver = bame(model, optimizer, interval=1, total_steps=100, end=1.0)
    state = driver._oscillation["2"]
    first, history = driver.masks()["2"].clone(), []
    active, idle = first[0, :4].nonzero()[0].item(), (~first[0, :4]).nonzero()[0].item()
    for step in range(12):
        mask = driver.masks()["2"]
        gradient = 5.0 * mask  # what is active seems precious
        on, off = (active, idle) if mask[0, active] else (idle, active)
        gradient[0, on], gradient[0, off] = (
            0.0,
            10.0,
        )  # but for one weight of block 0, which changes places with another
        gradient[1 + step, 4:8] = 3.0 * ~mask[1 + step, 4:8]  # and for those of one more block each time
        with torch.no_grad():
            driver._adapt({"2": gradient})
        history.append((int(state.events[0]), bool(state.frozen[0]), driver.masks()["2"][0, :4].clone()))
    events, frozen, masks = zip(*history, strict=True)
    assert events == (0, 1, 2) + (2,) * 9
    assert frozen == (False, False) + (True,) * 10
    assert all(torch.equal(mask, masks[2]) for mask in masks[2:])
    assert not torch.equal(masks[0], masks[1])
    assert all(not torch.equal(driver.masks()["2"][row], first[row]) for row in range(1, 13))
    stats = driver.stats()
    assert (stats.swaps, stats.oscillating_fraction) == (15, 2 / 15)
    assert stats.frozen_fraction == 1 / 256
    assert stats.mean_oscillation == 2 / 256


def test_an_infinite_threshold_freezes_nothing_and_oscillation_is_still_counted():
    free = trained(mlp(), 40, optimizer=None, interval=1, freeze_threshold=math.inf)
    assert free.stats().frozen_fraction == 0
    assert free.stats().oscillating_fraction > 0
    assert trained(mlp(), 40, interval=1, freeze_threshold=0.0).stats().frozen_fraction > 0


# Loops.


def test_resuming_from_a_checkpoint_is_bit_for_bit():
    model = cnn()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    driver = bame(model, optimizer, interval=2)
    data = list(batches(model, 20))
    train(model, optimizer, driver, data[:10])
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict(), driver.state_dict()], file)
    train(model, optimizer, driver, data[10:])
    file.seek(0)
    other = cnn(7)
    other_optimizer = torch.optim.AdamW(other.parameters(), lr=0.01)
    other_driver = bame(other, other_optimizer, interval=2)
    for restored, state in zip(
        (other, other_optimizer, other_driver), torch.load(file, weights_only=True), strict=True
    ):
        restored.load_state_dict(state)
    train(other, other_optimizer, other_driver, data[10:])
    assert_same(weights_of(model), weights_of(other))
    assert_same(list(driver.masks().values()), list(other_driver.masks().values()))
    assert driver.stats() == other_driver.stats()


def test_a_state_of_another_pattern_is_refused():
    model, other = mlp(), mlp()
    state = bame(model, sgd(model), 1, 4).state_dict()
    with pytest.raises(InputError, match=r"^This state does not fit: its pattern is '1:4', this driver's is '2:4'\."):
        bame(other, sgd(other)).load_state_dict(state)


def test_accumulated_gradients_are_those_of_the_whole_batch():
    whole, parts = mlp(dtype=torch.float64), mlp(dtype=torch.float64)
    data = list(batches(whole, 10, dtype=torch.float64))
    one = trained(whole, data=data)
    optimizer = sgd(parts)
    driver = bame(parts, optimizer)
    for x, y in data:
        optimizer.zero_grad()
        for half in range(2):
            (cross_entropy(parts(x[half::2]), y[half::2]) / 2).backward()
        optimizer.step()
        driver.step()
    assert one.stats().swaps == driver.stats().swaps > 0
    assert_same(list(one.masks().values()), list(driver.masks().values()))
    for a, b in zip(weights_of(whole), weights_of(parts), strict=True):
        torch.testing.assert_close(a, b)


def test_clipping_schedules_and_groups_are_the_users():
    model = mlp()
    groups = [{"params": model[2].parameters(), "lr": 0.2}, {"params": model[4].parameters(), "lr": 0.0}]
    rest = [p for i in (0, 6) for p in model[i].parameters()]
    optimizer = torch.optim.SGD([*groups, {"params": rest, "lr": 0.1}], momentum=0.9)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 40)
    driver = bame(model, optimizer)
    first = {name: mask.clone() for name, mask in driver.masks().items()}
    for x, y in batches(model, 20):
        optimizer.zero_grad()
        cross_entropy(model(x), y).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.5)
        optimizer.step()
        scheduler.step()
        driver.step()
    assert not torch.equal(driver.masks()["2"], first["2"])
    assert torch.equal(driver.masks()["4"], first["4"])  # at a learning rate of 0 there is no gain
    assert_pattern(driver, 2, 4)


def test_autocast_with_a_scaler_swaps_by_unscaled_gradients():
    masks = []
    for scale in (None, 2.0**10):
        model = mlp()
        optimizer = sgd(model, momentum=0.0)
        driver = bame(model, optimizer)
        scaler = torch.amp.GradScaler("cpu", init_scale=scale or 1.0, enabled=scale is not None)
        for x, y in batches(model, 10):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = cross_entropy(model(x), y)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            driver.step()
        assert driver.stats().swaps > 0
        assert_pattern(driver, 2, 4)
        masks.append(list(driver.masks().values()))
    assert_same(*masks)  # a scale that is a power of two rounds nothing


def test_an_overflow_at_an_adaptation_delays_it():
    model = mlp()
    optimizer = sgd(model)
    driver = bame(model, optimizer)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step, (x, y) in enumerate(batches(model, 6)):
        optimizer.zero_grad()
        scaler.scale(cross_entropy(model(x), y)).backward()
        if step == 4:
            driver.weights()["2"].grad[0, 0] = math.nan
        scaler.step(optimizer)
        scaler.update()
        driver.step()
        assert driver.stats().adaptations == (step == 5)
    assert driver.steps_taken == 5


def test_a_nan_at_an_adaptation_skips_it_with_a_warning():
    model = mlp()
    optimizer = sgd(model)
    driver = bame(model, optimizer)
    train(model, optimizer, driver, batches(model, 4))
    masks = {name: mask.clone() for name, mask in driver.masks().items()}
    for p in model.parameters():
        p.grad = torch.full_like(p, math.nan)
    with pytest.warns(HeedfulWarning, match=r"^BAME adapted no mask at step 4: a gradient is NaN or infinite\.$"):
        optimizer.step()
    assert all(torch.equal(mask, masks[name]) for name, mask in driver.masks().items())
    assert driver.stats().adaptations == 0


def test_a_learning_rate_of_zero_at_an_adaptation_is_said():
    model = mlp()
    optimizer = sgd(model, lr=0.0)
    driver = bame(model, optimizer)
    with pytest.warns(
        HeedfulWarning, match=r"^BAME swapped nothing at step 4: the learning rate is 0, and so is every"
    ):
        train(model, optimizer, driver, batches(model, 5))
    assert driver.stats().swaps == 0


def test_compiled_models_swap_as_others_do_and_are_compiled_twice():
    eager, model = mlp(), mlp()
    data = list(batches(eager, 14))
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(model, backend=backend)
    optimizer = sgd(model)
    driver = bame(model, optimizer)
    train(compiled, optimizer, driver, data)
    assert trained(eager, data=data).stats() == driver.stats()
    assert driver.stats().adaptations == 3
    assert_same(weights_of(eager), weights_of(model))
    assert len(graphs) == 2


def distributed(rank, steps):
    model = mlp(dtype=torch.float64)
    optimizer = sgd(model)
    driver = BAME(model, optimizer, total_steps=40, interval=2)
    parallel = DistributedDataParallel(model)
    data = [(x[rank::WORLD], y[rank::WORLD]) for x, y in batches(model, steps, dtype=torch.float64)]
    train(parallel, optimizer, driver, data)
    return [p.detach().numpy() for p in model.parameters()], [mask.numpy() for mask in driver.masks().values()]


def test_two_processes_have_the_masks_of_one_with_both_batches():
    single = mlp(dtype=torch.float64)
    driver = trained(single, interval=2, data=batches(single, 11, dtype=torch.float64))
    assert driver.stats().swaps > 0
    (left, left_masks), (right, right_masks) = on_two_ranks(distributed, 11)
    for a, b, c in zip(left_masks, right_masks, driver.masks().values(), strict=True):
        assert (a == b).all()
        assert (a == c.numpy()).all()
    for a, b, c in zip(left, right, single.parameters(), strict=True):
        assert (a == b).all()
        torch.testing.assert_close(torch.from_numpy(a), c.detach())


def test_a_copy_of_the_model_is_on_its_own():
    model = mlp()
    optimizer = sgd(model)
    driver = bame(model, optimizer, backend="compressed")
    train(model, optimizer, driver, batches(model, 3))
    average = copy.deepcopy(model)
    x = next(iter(batches(model, 1)))[0]
    before = average(x)
    train(model, optimizer, driver, batches(model, 6))
    assert torch.equal(average(x), before)
    assert not torch.allclose(model(x), before)


# The end.


@pytest.mark.parametrize("backend", ["masked", "compressed"])
def test_finalize_leaves_a_plain_model_with_equal_outputs(backend):
    model, plain = mlp(), mlp()
    driver = trained(model, backend=backend)
    x = next(iter(batches(model, 1)))[0]
    expected = model(x)
    assert driver.finalize() is model
    torch.testing.assert_close(model(x), expected, rtol=1e-5, atol=1e-6)
    assert [type(layer) for layer in model] == [type(layer) for layer in plain]
    assert list(model.state_dict()) == list(plain.state_dict())
    assert check_nm(model[2].weight, 2, 4, dim=1)
    assert check_nm(model[4].weight, 2, 4, dim=1)
    plain.load_state_dict(model.state_dict())
    assert torch.equal(plain(x), model(x))


# Warm-up.


def test_warmup_by_sr_ste_picks_the_largest_and_then_hands_over_sparse_weights():
    model = mlp()
    optimizer = sgd(model)
    driver = bame(model, optimizer, start=0.25, warmup="sr_ste", interval=3)
    data = list(batches(model, 13))
    train(model, optimizer, driver, data[:9])
    weight, mask = driver.weights()["2"], driver.masks()["2"]
    assert (weight[~mask] != 0).any()  # still alive
    assert driver.stats().adaptations == 0
    assert (weight[mask].view(-1, 2).abs().min(1).values >= weight[~mask].view(-1, 2).abs().max(1).values).all()
    train(model, optimizer, driver, data[9:10])
    assert_pattern(driver, 2, 4)
    assert (optimizer.state[weight]["momentum_buffer"][~driver.masks()["2"]] == 0).all()
    train(model, optimizer, driver, data[10:])
    assert_pattern(driver, 2, 4)
    assert driver.stats().adaptations == 1  # at step 12


def test_a_fixed_warmup_keeps_the_first_mask():
    model, untrained = mlp(), mlp()
    driver = trained(model, 10, start=0.25)
    assert_pattern(driver, 2, 4)
    assert_same(list(driver.masks().values()), list(bame(untrained, sgd(untrained)).masks().values()))


# The compressed backend.


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 16)])
def test_both_backends_train_alike(n, m):
    left, right = mlp(dtype=torch.float64), mlp(dtype=torch.float64)
    data = list(batches(left, 20, dtype=torch.float64))
    masked = trained(left, n=n, m=m, data=data)
    compressed = trained(right, n=n, m=m, data=data, backend="compressed")
    assert masked.stats().swaps == compressed.stats().swaps > 0
    assert_same(list(masked.masks().values()), list(compressed.masks().values()))
    for a, b in zip(weights_of(left), weights_of(right), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)  # sums in another order, float64


def test_the_compressed_backend_stays_as_it_is_in_a_compiled_model():
    eager, model = mlp(), mlp()
    data = list(batches(eager, 10))
    torch._dynamo.reset()
    optimizer = sgd(model)
    driver = bame(model, optimizer, 1, 4, backend="compressed")
    train(torch.compile(model, backend="eager"), optimizer, driver, data)
    assert trained(eager, n=1, data=data, backend="compressed").stats() == driver.stats()
    assert_same(weights_of(eager), weights_of(model))


@pytest.mark.parametrize("shape", [(0, 16), (16,), (2, 3, 4, 16), (1, 16)])
def test_the_compressed_backend_takes_inputs_of_any_shape(shape):
    model = mlp()
    driver = bame(model, sgd(model), backend="compressed")
    x = torch.randn(shape, requires_grad=True)
    expected = nn.functional.linear(x, driver.weights()["2"], model[2].bias)
    y = model[2](x)
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    gradient = torch.autograd.grad(y.square().sum(), x)[0]
    torch.testing.assert_close(gradient, torch.autograd.grad(expected.square().sum(), x)[0], rtol=1e-5, atol=1e-5)
    transposed = torch.randn(16, 5).T  # not contiguous
    torch.testing.assert_close(
        model[2](transposed),
        nn.functional.linear(transposed, driver.weights()["2"], model[2].bias),
        rtol=1e-5,
        atol=1e-5,
    )


def test_the_compressed_backend_computes_in_single_precision_under_autocast():
    model = mlp()
    driver = bame(model, sgd(model), backend="compressed")
    x = torch.randn(4, 16)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = model[2](x.bfloat16())
        assert y.dtype == torch.float32
        y.sum().backward()
    assert driver.weights()["2"].grad.dtype == torch.float32


def test_the_compressed_backend_refuses_what_it_cannot_multiply():
    model = cnn()
    with pytest.raises(
        UnsupportedModelError,
        match=r'^backend="compressed" multiplies nn\.Linear layers on the CPU; layer \'3\' is a Conv2d on cpu\. Exclude',
    ):
        bame(model, sgd(model), backend="compressed")


# Refusals.


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"n": 0}, r"^n must be an int >= 1; got 0\.$"),
        ({"n": 5}, r"^n must be at most m: n entries of every m are kept; got n=5, m=4\.$"),
        ({"interval": 0}, r"^interval must be an int >= 1; got 0\.$"),
        ({"end": 2}, r"^end must be a number >= 0 and <= 1; got 2\.$"),
        ({"freeze_threshold": -1}, r"^freeze_threshold must be a number >= 0; got -1\.$"),
        ({"max_fraction": 1.1}, r"^max_fraction must be a number >= 0 and <= 1; got 1\.1\.$"),
        ({"swaps_per_block": 3}, r"^swaps_per_block must be an int >= 1 and <= 2; got 3\.$"),
        ({"warmup": "dense"}, r"^warmup must be one of 'fixed', 'sr_ste'; got 'dense'\.$"),
        ({"rescale_init": "yes"}, r"^rescale_init must be one of True, False, 'auto'; got 'yes'\.$"),
        ({"gain": "lion"}, r"^gain must be one of 'auto', 'sgd', 'adam'; got 'lion'\.$"),
        ({"backend": "gpu"}, r"^backend must be one of 'masked', 'compressed'; got 'gpu'\.$"),
        ({"total_steps": 0}, r"^total_steps must be an int >= 1; got 0\.$"),
    ],
)
def test_settings_out_of_range_are_refused_and_the_model_stays_as_it_was(settings, message):
    model = mlp()
    before = {key: value.clone() for key, value in model.state_dict().items()}
    with as_users_have_it(), pytest.raises(ParameterError, match=message):
        bame(model, sgd(model), **settings)
    assert list(model.state_dict()) == list(before)
    assert_same(list(model.state_dict().values()), list(before.values()))


def test_total_steps_are_needed():
    with pytest.raises(TypeError, match="total_steps"):
        BAME(mlp(), sgd(mlp()))


def test_layers_that_cannot_be_cut_into_blocks_are_listed():
    model = nn.Sequential(nn.Linear(6, 12), nn.Linear(12, 10), nn.Linear(10, 16), nn.Linear(16, 2))
    with pytest.raises(
        UnsupportedModelError,
        match=r"^2:8 sparsity needs layers whose number of inputs is a multiple of 8; these are not: '1' \(12\), '2' \(10\)"
        r"\. Exclude them, or include others only\.$",
    ):
        bame(model, sgd(model), 2, 8)
    assert list(bame(model, sgd(model), 2, 4, exclude=["2", "first", "last"]).masks()) == ["1"]
    model = mlp()
    assert list(bame(model, sgd(model), include=["4"]).masks()) == ["4"]


def test_weights_that_the_optimizer_does_not_own_are_named_and_the_model_stays_as_it_was():
    model = mlp()
    optimizer = torch.optim.SGD(model[2].parameters(), lr=0.1)
    with pytest.raises(ParameterError, match=r"^The optimizer does not own the weight of layer '4'\."):
        bame(model, optimizer, backend="compressed")
    assert [type(layer) for layer in model] == [type(layer) for layer in mlp()]


def test_a_second_driver_on_the_same_layers_is_refused():
    model = mlp()
    bame(model, sgd(model))
    with pytest.raises(UnsupportedModelError, match=r"^The weight of layer '2' is parametrized already\. Finalize"):
        bame(model, sgd(model))


def test_a_weight_of_two_modules_is_refused():
    model = mlp()
    model[2] = nn.Linear(16, 32)
    model[4] = nn.Linear(32, 16)
    model.append(nn.Linear(16, 32))
    model.append(nn.Linear(32, 2))
    model[7].weight = model[2].weight
    with pytest.raises(UnsupportedModelError, match=r"^Modules '2', '7' share one weight\. Exclude '2', or untie them"):
        bame(model, sgd(model), exclude=["6", "first", "last"])
