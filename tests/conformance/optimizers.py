"""What every optimizer must do: step with a closure, leave weights exact, resume, and live with its surroundings."""

import dataclasses
import io
from collections.abc import Callable, Mapping

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Optimizer

from heedful.errors import ClosureError
from tests.conformance.distributed import WORLD, on_two_ranks
from tests.conformance.generators import global_generators_stay


@dataclasses.dataclass(frozen=True)
class OptimizerRow:
    """An optimizer to check.

    Parameters
    ----------
    name : str
        What the test is called.
    make : callable
        ``make(params, *, lr, **unknown)``, a function at the top of a module (it travels to other processes), with a
        generator of its own if the optimizer draws.
    evaluations : int
        Closure calls per step, as documented.
    closure_required : bool
        Whether ``step()`` without a closure is refused.
    returns_first_loss : bool
        Whether ``step`` returns what the first call of the closure returned; otherwise any finite scalar will do.
    exclusions : mapping
        Name of a check that must fail -> reason.
    """

    name: str
    make: Callable[..., Optimizer]
    evaluations: int = 1
    closure_required: bool = False
    returns_first_loss: bool = True
    exclusions: Mapping[str, str] = dataclasses.field(default_factory=dict)


class Problem:
    """A small classification: a network, its data, and closures. Equal for equal dtype."""

    def __init__(self, dtype: torch.dtype = torch.float32):
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            self.model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)
            self.x, self.y = torch.randn(16, 4).to(dtype), torch.randint(3, (16,))

    @property
    def params(self) -> list[nn.Parameter]:
        return list(self.model.parameters())

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for p in self.model.parameters()]

    def loss(self) -> Tensor:
        return cross_entropy(self.model(self.x), self.y)

    def closure(self, optimizer: Optimizer, loss: Callable[[], Tensor] | None = None) -> Callable[[], Tensor]:
        def closure():
            optimizer.zero_grad()
            value = (loss or self.loss)()
            value.backward()
            return value

        return closure

    def train(self, optimizer: Optimizer, steps: int) -> list[Tensor]:
        for _ in range(steps):
            optimizer.step(self.closure(optimizer))
        return self.weights()


def same(left: list[Tensor], right: list[Tensor]) -> bool:
    """Bit for bit."""
    return len(left) == len(right) and all(map(torch.equal, left, right))


def check_closure_runs_as_often_as_documented(row: OptimizerRow) -> None:
    problem, losses = Problem(), []
    optimizer = row.make(problem.params, lr=0.1)

    def loss():
        assert torch.is_grad_enabled(), "the closure runs without gradients"
        losses.append(problem.loss())
        return losses[-1]

    returned = optimizer.step(problem.closure(optimizer, loss))
    assert len(losses) == row.evaluations, "the closure ran another number of times than documented"
    assert isinstance(returned, Tensor), "step(closure) must return the loss"
    assert returned.shape == (), "step(closure) must return a scalar"
    assert torch.isfinite(returned), "step(closure) must return a finite loss"
    if row.returns_first_loss:
        assert torch.equal(returned.detach(), losses[0].detach()), "step(closure) must return the loss at the weights"


def check_missing_closure(row: OptimizerRow) -> None:
    """Refused where the method needs one, else ``step()`` is ``step(closure)`` on the gradients already there."""
    problem, other = Problem(), Problem()
    optimizer = row.make(problem.params, lr=0.1)
    start = problem.weights()
    if not row.closure_required:
        problem.closure(optimizer)()
        optimizer.step()
        assert same(problem.weights(), other.train(row.make(other.params, lr=0.1), 1)), "step() is not step(closure)"
        return
    for call in (lambda: optimizer.step(), lambda: optimizer.step(None), lambda: optimizer.step(problem.loss)):
        with pytest.raises((ClosureError, TypeError), match="closure"):  # absent, None, and one without backward()
            call()
        assert same(problem.weights(), start), "a refused step moved the weights"


def check_gradients_are_left(row: OptimizerRow) -> None:
    """Loggers and tests of convergence read ``.grad`` after a step."""
    problem = Problem()
    problem.train(row.make(problem.params, lr=0.1), 2)
    for p in problem.params:
        assert p.grad is not None, "step left a gradient at None"
        assert p.grad.shape == p.shape, "step left a gradient of another shape"
        assert p.grad.dtype == p.dtype, "step left a gradient of another dtype"
        assert torch.isfinite(p.grad).all(), "step left a gradient that is not finite"
        assert not p.grad.requires_grad, "step left a gradient with a graph"


def check_lr_zero_leaves_weights_exact(row: OptimizerRow) -> None:
    """Even when a parameter has a gradient in one evaluation and none in the next."""
    problem = Problem()
    problem.model.sometimes = nn.Parameter(torch.full((3,), 0.1))
    optimizer = row.make(problem.params, lr=0.0)
    start, calls = problem.weights(), []

    def loss():
        calls.append(None)
        scale = problem.model.sometimes if len(calls) % 2 else 1.0
        return cross_entropy(problem.model(problem.x) * scale, problem.y)

    for _ in range(3):
        optimizer.step(problem.closure(optimizer, loss))
        assert same(problem.weights(), start), "a step of lr=0 moved the weights"


def check_weights_come_home_when_the_closure_raises(row: OptimizerRow) -> None:
    for fatal in range(row.evaluations):
        problem, calls = Problem(), []
        optimizer = row.make(problem.params, lr=0.1)
        start = problem.weights()

        def loss(problem=problem, calls=calls, fatal=fatal):
            calls.append(None)
            return problem.loss() / (1 if len(calls) != fatal + 1 else 1 // 0)

        with pytest.raises(ZeroDivisionError):
            optimizer.step(problem.closure(optimizer, loss))
        assert same(problem.weights(), start), f"evaluation {fatal + 1} raised and the weights stayed away"
        moved = problem.train(optimizer, 1)
        assert all(torch.isfinite(p).all() for p in moved), "the step after a failed one spoils the weights"
        assert not same(moved, start), "the step after a failed one does nothing"


def check_frozen_and_unused_parameters(row: OptimizerRow) -> None:
    """Frozen ones are not even perturbed; those that the loss does not use end where they were."""
    problem = Problem()
    frozen = problem.model.frozen = nn.Parameter(torch.full((3,), 0.1), requires_grad=False)
    unused = problem.model.unused = nn.Parameter(torch.full((3,), 0.1))
    optimizer = row.make(problem.params, lr=0.1)
    start = frozen.clone()

    def loss():
        assert torch.equal(frozen, start), "a frozen parameter was perturbed"
        return cross_entropy(problem.model(problem.x) + frozen, problem.y)

    before = problem.weights()
    for _ in range(3):
        optimizer.step(problem.closure(optimizer, loss))
    assert torch.equal(frozen, start), "a frozen parameter moved"
    assert frozen.grad is None, "a frozen parameter got a gradient"
    assert torch.equal(unused.detach(), torch.full((3,), 0.1)), "an unused parameter moved"
    assert not same(before, problem.weights()), "nothing moved"


def check_groups_keep_their_own_settings(row: OptimizerRow) -> None:
    problem = Problem()
    first, second = problem.model[0], problem.model[2]
    groups = [{"params": list(first.parameters()), "lr": 0.0}, {"params": list(second.parameters())}]
    optimizer = row.make(groups, lr=0.1)
    assert [group["lr"] for group in optimizer.param_groups] == [0.0, 0.1], "param_groups do not show the lr given"
    start = problem.weights()
    problem.train(optimizer, 2)
    assert same(problem.weights()[:2], start[:2]), "a group of lr=0 moved"
    assert not same(problem.weights()[2:], start[2:]), "a group of lr=0.1 stayed"
    for group, lr in zip(optimizer.param_groups, (0.1, 0.0), strict=True):
        group["lr"] = lr
    start = problem.weights()
    problem.train(optimizer, 2)
    assert not same(problem.weights()[:2], start[:2]), "a group whose lr was raised stayed"
    assert same(problem.weights()[2:], start[2:]), "a group whose lr was set to 0 moved"


def check_a_group_can_be_added(row: OptimizerRow) -> None:
    """As when layers are thawed in the midst of training."""
    problem = Problem()
    first, second = list(problem.model[0].parameters()), list(problem.model[2].parameters())
    optimizer = row.make(second, lr=0.1)
    start = problem.weights()
    problem.train(optimizer, 1)
    assert same(problem.weights()[:2], start[:2]), "a parameter that the optimizer was not given moved"
    optimizer.add_param_group({"params": first, "lr": 0.2})
    problem.train(optimizer, 1)
    assert not same(problem.weights()[:2], start[:2]), "an added group stayed"


def check_grouping_alone_changes_nothing(row: OptimizerRow) -> None:
    """Two groups of equal settings are one group: norms and noise span groups."""
    one, two = Problem(torch.float64), Problem(torch.float64)
    whole = one.train(row.make(one.params, lr=0.1), 3)
    parts = two.train(row.make([{"params": two.params[:1]}, {"params": two.params[1:]}], lr=0.1), 3)
    for left, right in zip(whole, parts, strict=True):  # float64: sums in another order, a few roundings a step
        torch.testing.assert_close(left, right, rtol=1e-10, atol=1e-12, msg="the split into groups changed the step")


def check_schedulers_are_heard(row: OptimizerRow) -> None:
    problem = Problem()
    optimizer = row.make(problem.params, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda epoch: 1.0 if epoch < 1 else 0.0)
    start = problem.weights()
    moved = problem.train(optimizer, 1)
    scheduler.step()
    assert not same(moved, start), "nothing moved at lr=0.1"
    assert same(problem.train(optimizer, 1), moved), "the scheduler set lr=0 and the weights moved"


def check_step_hooks_run_once(row: OptimizerRow) -> None:
    problem, calls = Problem(), []
    optimizer = row.make(problem.params, lr=0.1)
    optimizer.register_step_pre_hook(lambda *_: calls.append("pre"))
    optimizer.register_step_post_hook(lambda *_: calls.append("post"))
    problem.train(optimizer, 2)
    assert calls == ["pre", "post", "pre", "post"], "step hooks must run once a step"


def check_clipping_in_the_closure_holds(row: OptimizerRow) -> None:
    """Whatever gradients a step combines, all were clipped, so the gradient that it leaves is within the bound."""
    problem, bound = Problem(), 1e-3
    optimizer = row.make(problem.params, lr=0.1)

    def closure():
        optimizer.zero_grad()
        (loss := problem.loss()).backward()
        assert nn.utils.clip_grad_norm_(problem.params, bound) > bound
        return loss

    optimizer.step(closure)
    norm = nn.utils.get_total_norm([p.grad for p in problem.params])
    assert norm <= bound * (1 + 1e-5), "the gradient left by a step exceeds the clipping bound"  # float32 norm


def check_autocast(row: OptimizerRow) -> None:
    """bfloat16 inside the closure; weights and gradients stay float32, and the loss falls."""
    problem = Problem()
    optimizer = row.make(problem.params, lr=0.05)
    seen = []

    def loss():
        with torch.autocast("cpu", torch.bfloat16):
            logits = problem.model(problem.x)
        seen.append(logits.dtype)
        return cross_entropy(logits.float(), problem.y)

    before = problem.loss().item()
    for _ in range(10):
        optimizer.step(problem.closure(optimizer, loss))
    assert set(seen) == {torch.bfloat16}, "autocast did not reach the closure"
    assert {p.dtype for p in problem.params} | {p.grad.dtype for p in problem.params} == {torch.float32}
    assert problem.loss().item() < before, "the loss does not fall under autocast"


def check_low_precision_weights(row: OptimizerRow) -> None:
    problem = Problem(torch.bfloat16)
    start = problem.weights()
    optimizer = row.make(problem.params, lr=0.1)
    for _ in range(3):
        moved = problem.train(optimizer, 1)
        assert {p.dtype for p in moved} == {torch.bfloat16}, "a step changed the dtype of the weights"
    assert all(torch.isfinite(p).all() for p in moved), "a step on bfloat16 weights is not finite"
    assert not same(moved, start), "bfloat16 weights do not move"


def check_resumes_exactly(row: OptimizerRow) -> None:
    """Six steps are three steps, a checkpoint, and three steps in a new process with other settings."""
    problem = Problem()
    optimizer = row.make(problem.params, lr=0.1)
    problem.train(optimizer, 3)
    file = io.BytesIO()
    torch.save({"model": problem.model.state_dict(), "optimizer": optimizer.state_dict()}, file)
    straight = problem.train(optimizer, 3)
    file.seek(0)
    checkpoint = torch.load(file, weights_only=True)

    resumed = Problem()
    fresh = row.make(resumed.params, lr=0.7)
    resumed.train(fresh, 1)  # what it did before loading must not matter
    resumed.model.load_state_dict(checkpoint["model"])
    fresh.load_state_dict(checkpoint["optimizer"])
    assert fresh.param_groups[0]["lr"] == 0.1, "load_state_dict did not restore the lr"
    assert same(resumed.train(fresh, 3), straight), "training after a checkpoint is not training straight on"
    fresh.param_groups[0]["lr"] = 0.0
    assert same(resumed.train(fresh, 1), straight), "after load_state_dict, param_groups no longer rule the step"


def check_repeats_and_leaves_global_generators_alone(row: OptimizerRow) -> None:
    first, second = Problem(), Problem()
    with global_generators_stay("a step"):
        runs = [p.train(row.make(p.params, lr=0.1), 3) for p in (first, second)]
    assert same(*runs), "two equal runs differ"


def check_refuses_nonsense(row: OptimizerRow) -> None:
    with pytest.raises(ValueError, match="empty parameter list"):
        row.make([], lr=0.1)
    with pytest.raises(ValueError, match=r"lr|learning rate"):
        row.make(Problem().params, lr=-1.0)
    with pytest.raises(TypeError, match="weigth_decay"):
        row.make(Problem().params, lr=0.1, weigth_decay=0.1)


def check_distributed(row: OptimizerRow) -> None:
    """Two gloo processes with half of the batch each are one process with the whole batch."""
    problem = Problem(torch.float64)
    whole = problem.train(row.make(problem.params, lr=0.1), 3)
    for rank, weights in enumerate(on_two_ranks(_train_on_half, row.make)):
        for left, right in zip(whole, weights, strict=True):  # float64 sums in another order, over three steps
            message = f"rank {rank}, with half of the batch, has other weights than one process with the whole"
            torch.testing.assert_close(torch.from_numpy(right), left, rtol=1e-9, atol=1e-11, msg=message)


def _train_on_half(rank: int, make: Callable[..., Optimizer]) -> list[np.ndarray]:
    problem = Problem(torch.float64)
    optimizer = make(problem.params, lr=0.1)
    parallel = DistributedDataParallel(problem.model)
    x, y = problem.x[rank::WORLD], problem.y[rank::WORLD]
    for _ in range(3):
        optimizer.step(problem.closure(optimizer, lambda: cross_entropy(parallel(x), y)))
    return [p.numpy() for p in problem.weights()]


CHECKS = (
    check_closure_runs_as_often_as_documented,
    check_missing_closure,
    check_gradients_are_left,
    check_lr_zero_leaves_weights_exact,
    check_weights_come_home_when_the_closure_raises,
    check_frozen_and_unused_parameters,
    check_groups_keep_their_own_settings,
    check_a_group_can_be_added,
    check_grouping_alone_changes_nothing,
    check_schedulers_are_heard,
    check_step_hooks_run_once,
    check_clipping_in_the_closure_holds,
    check_autocast,
    check_low_precision_weights,
    check_resumes_exactly,
    check_repeats_and_leaves_global_generators_alone,
    check_refuses_nonsense,
    check_distributed,
)
