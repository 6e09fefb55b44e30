"""The loop that the studies of sparse training share, and how their tasks are split."""

import functools
import math

import pytest
import torch
from torch import nn
from torch.optim import SGD

from heedful import data
from heedful.studies._small_nets import mlp
from heedful.studies._sparse_training import Supervised, digits, fashion, train


def tiny(split="test", **changes):
    generator = torch.Generator().manual_seed(0)
    x, y = torch.randn(30, 4, generator=generator), torch.randint(3, (30,), generator=generator)
    settings = {
        "build_network": functools.partial(mlp, (4, 8, 8, 3)),
        "inputs": x[:20],
        "targets": y[:20],
        "held_out_inputs": x[20:],
        "held_out_targets": y[20:],
        "batch_size": 8,
    }
    return Supervised(**settings | changes, split=split)


class Recorder:
    """A driver that does nothing but say when it is called, and what it costs."""

    def __init__(self, model, optimizer, *, total_steps, exclude):
        self.model, self.optimizer, self.total_steps, self.exclude, self.calls = (
            model,
            optimizer,
            total_steps,
            exclude,
            [],
        )

    def penalty(self):
        self.calls.append("penalty")
        return 0.1 * self.model[1].weight.square().sum()

    def step(self):
        self.calls.append("step")

    def finalize(self):
        self.calls.append("finalize")
        return self.model


def run(make_driver, **changes):
    make_optimizer = functools.partial(SGD, lr=0.1)
    return train(tiny(), steps=3, seed=1, make_optimizer=make_optimizer, make_driver=make_driver, **changes)


def test_a_driver_is_asked_for_its_penalty_watched_stepped_and_finalized_in_this_order():
    trained = run(Recorder, watch=lambda driver: driver.calls.append("watch"))
    assert trained.driver.calls == ["penalty", "watch", "step"] * 3 + ["finalize"]
    assert (trained.driver.total_steps, trained.driver.exclude) == (3, ("first", "last"))


def test_the_loop_is_gradient_descent_with_a_cosine_on_loss_and_penalty():
    model = tiny().network(1)
    for step, (x, y) in enumerate(tiny().batches(3, 1)):
        loss = nn.functional.cross_entropy(model(x), y) + 0.1 * model[1].weight.square().sum()
        gradients = torch.autograd.grad(loss, list(model.parameters()))
        lr = 0.1 * (1 + math.cos(math.pi * step / 3)) / 2
        with torch.no_grad():
            for parameter, gradient in zip(model.parameters(), gradients, strict=True):
                parameter -= lr * gradient
    for ours, expected in zip(run(Recorder).model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours, expected)


def test_without_a_driver_training_is_dense_and_repeats():
    one, other = run(None), run(None)
    assert one.driver is None
    assert one.losses == other.losses
    assert all(torch.equal(a, b) for a, b in zip(one.model.parameters(), other.model.parameters(), strict=True))


def test_an_epoch_shows_no_example_twice():
    task = tiny(inputs=torch.arange(20.0)[:, None])
    seen = torch.cat([x for x, _ in task.batches(2, seed=0)]).flatten()
    assert len(seen.unique()) == 16
    assert not torch.equal(next(iter(task.batches(1, seed=0)))[0], next(iter(task.batches(1, seed=1)))[0])


def test_score_counts_rows_or_tokens():
    logits = torch.tensor([[2.0, 0.0], [0.0, 2.0], [2.0, 0.0], [0.0, 2.0]])
    task = tiny(held_out_inputs=logits, held_out_targets=torch.tensor([0, 1, 0, 0]))
    score = task.score(nn.Identity())
    assert score.accuracy == 75
    right, wrong = math.log2(1 + math.exp(-2)), math.log2(1 + math.exp(2))
    assert score.bits == pytest.approx((3 * right + wrong) / 4)
    tokens = tiny(held_out_inputs=logits.view(2, 2, 2), held_out_targets=torch.tensor([[0, 1], [0, 0]]))
    assert tokens.score(nn.Identity()) == pytest.approx(score)


def test_digits_are_split_as_declared_and_no_test_image_of_any_seed_trains_or_validates():
    tested, used = set(), set()
    for seed in (0, 1, 1000):
        validation, test = digits(split="validation", seed=seed), digits(split="test", seed=seed)
        assert torch.equal(validation.inputs, test.inputs)
        assert [len(rows) for rows in (test.inputs, validation.held_out_inputs, test.held_out_inputs)] == [
            700,
            300,
            797,
        ]
        tested |= {row.numpy().tobytes() for row in test.held_out_inputs}
        used |= {row.numpy().tobytes() for row in torch.cat([test.inputs, validation.held_out_inputs])}
        assert not {row.numpy().tobytes() for row in test.inputs} & {
            row.numpy().tobytes() for row in validation.held_out_inputs
        }
    assert len(tested) == 797
    assert not used & tested


def test_fashion_is_split_as_declared_and_its_test_images_are_the_same_for_every_seed():
    if not data.is_cached("fashion_mnist"):
        pytest.skip("the data set fashion_mnist is not in the cache of this machine, and tests fetch nothing")
    load = functools.partial(fashion, lambda images: images, n=500)
    validation, test, other = load(split="validation", seed=0), load(split="test", seed=0), load(split="test", seed=1)
    assert [len(rows) for rows in (test.inputs, validation.held_out_inputs, test.held_out_inputs)] == [500, 2000, 4000]
    assert torch.equal(test.held_out_inputs, other.held_out_inputs)
    assert not torch.equal(test.inputs, other.inputs)
    assert test.inputs.mean() == pytest.approx(0, abs=0.1)
    assert test.inputs.std() == pytest.approx(1, abs=0.1)
