"""The optimizer checks pass what is right and catch what is wrong: each has at least one object that it must refuse."""

from functools import partial

import pytest
import torch
from torch.optim import SGD, Adam, AdamW, Optimizer

from heedful.errors import ClosureError
from tests.conformance import cases
from tests.conformance.optimizers import CHECKS, OptimizerRow


class Climber(Optimizer):
    """A right one of two evaluations: climb along the gradient, take the gradient there, come home, step."""

    def __init__(self, params, *, lr, rho=0.05, **base_settings):
        self.rho, self.base = rho, SGD(params, lr=lr, momentum=0.9, **base_settings)
        super().__init__(self.base.param_groups, self.base.defaults)
        self._share()

    @torch.no_grad()
    def step(self, closure=None):
        loss = self.evaluate(closure)
        params = self.climbers()
        if not params:
            raise ClosureError("the closure left no gradient")
        home = [p.clone() for p in params]
        try:
            self.climb(params, loss)
            self.evaluate(closure)
        finally:
            self.come_home(params, home)
        self.base.step()
        return loss

    def evaluate(self, closure):
        if closure is None:
            raise ClosureError("a closure is needed")
        return torch.enable_grad()(closure)()

    def climbers(self):
        return [p for group in self.param_groups for p in group["params"] if p.grad is not None]

    def climb(self, params, loss):
        norm = torch.nn.utils.get_total_norm([p.grad for p in params])
        for p in params:
            p.add_(p.grad * self.rho / norm)

    def come_home(self, params, home):
        for p, value in zip(params, home, strict=True):
            p.copy_(value)

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict)
        self._share()

    def _share(self):
        self.base.param_groups, self.base.state = self.param_groups, self.state


class ReturnsNothing(SGD):
    def step(self, closure=None):
        super().step(closure)


class ReturnsTheLastLoss(Climber):
    def evaluate(self, closure):
        self.last = super().evaluate(closure)
        return self.last

    def step(self, closure=None):
        super().step(closure)
        return self.last


class EvaluatesTwice(SGD):
    def step(self, closure=None):
        closure()
        return super().step(closure)


class EvaluatesWithoutGradients(Climber):
    def evaluate(self, closure):
        return closure()


class DoesNothingWithoutClosure(SGD):
    def step(self, closure=None):
        return None if closure is None else super().step(closure)


class DoesNotMissItsClosure(Climber):
    def step(self, closure=None):
        return None if closure is None else super().step(closure)


class DropsGradients(SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        self.zero_grad()
        return loss


class SubtractsItsClimb(Climber):
    def climb(self, params, loss):
        before = [p.clone() for p in params]
        super().climb(params, loss)
        self.moves = [p - value for p, value in zip(params, before, strict=True)]

    def come_home(self, params, home):
        for p, move in zip(params, self.moves, strict=True):
            p.sub_(move)


class ForgetsVanishedGradients(Climber):
    def come_home(self, params, home):
        kept = [(p, value) for p, value in zip(params, home, strict=True) if p.grad is not None]
        super().come_home(*zip(*kept, strict=True))


class StaysAway(Climber):
    def come_home(self, params, home):
        if all(p.grad is not None for p in params):  # they are None after zero_grad, when the evaluation has failed
            super().come_home(params, home)


class ClimbsWithFrozen(Climber):
    def climbers(self):
        return [p for group in self.param_groups for p in group["params"]]

    def climb(self, params, loss):
        for p in params:
            p.add_(self.rho)


class DecaysTheUnused(SGD):
    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                p.mul_(0.9 if p.requires_grad else 1.0)
        return super().step(closure)


class StepsByItsDefaults(SGD):
    @torch.no_grad()
    def step(self, closure=None):
        loss = torch.enable_grad()(closure)()
        for group in self.param_groups:
            for p in group["params"]:
                p.sub_(self.defaults["lr"] * p.grad)
        return loss


class KeepsItsFirstGroups(Climber):
    def _share(self):
        super()._share()
        self.base.param_groups = list(self.param_groups)


class CopiesTheSettings(Climber):
    def _share(self):
        super()._share()
        self.base.param_groups = [dict(group) for group in self.param_groups]


class ClimbsGroupByGroup(Climber):
    def climb(self, params, loss):
        for group in self.param_groups:
            super().climb(group["params"], loss)


class StepsThroughItsParent(SGD):
    def step(self, closure=None):
        super().step(closure)
        return torch.zeros(())


class SumsItsGradients(Climber):
    def climb(self, params, loss):
        super().climb(params, loss)
        self.first = [p.grad.clone() for p in params]

    def come_home(self, params, home):
        super().come_home(params, home)
        for p, grad in zip(params, self.first, strict=True):
            p.grad.add_(grad)


class Ascends(SGD):
    def __init__(self, params, *, lr):
        super().__init__(params, lr=lr, maximize=True)


class WidensTheWeights(SGD):
    def step(self, closure=None):
        loss = super().step(closure)
        for group in self.param_groups:
            for p in group["params"]:
                p.grad, p.data = None, p.data.float()
        return loss


class ForgetsItsMomentum(Climber):
    def state_dict(self):
        return super().state_dict() | {"state": {}}


class ForgetsToShareAfterLoading(Climber):
    def load_state_dict(self, state_dict):
        self.base.load_state_dict(state_dict)
        Optimizer.load_state_dict(self, state_dict)


class DrawsFromTheGlobalGenerator(Climber):
    def climb(self, params, loss):
        for p in params:
            p.add_(torch.randn_like(p))


class DrawsWithoutSeed(Climber):
    def climb(self, params, loss):
        generator = torch.Generator()
        generator.seed()
        for p in params:
            p.add_(torch.randn(p.shape, generator=generator, dtype=p.dtype))


class SwallowsTypingErrors(SGD):
    def __init__(self, params, *, lr, **unknown):
        super().__init__(params, lr=lr)


class ClimbsByTheLocalLoss(Climber):
    def climb(self, params, loss):
        for p in params:
            p.add_(p.grad * loss)


CLIMBER = OptimizerRow("climber", Climber, evaluations=2, closure_required=True)
GOOD = (
    OptimizerRow("sgd", partial(SGD, momentum=0.9)),
    OptimizerRow("adam", Adam),
    OptimizerRow("adamw", partial(AdamW, weight_decay=0.1)),
    CLIMBER,
)
WRONG = {
    "closure_runs_as_often_as_documented": {
        ReturnsNothing: "must return the loss",
        ReturnsTheLastLoss: "the loss at the weights",
        EvaluatesTwice: "another number of times",
        EvaluatesWithoutGradients: "runs without gradients",
    },
    "missing_closure": {DoesNothingWithoutClosure: "is not step", DoesNotMissItsClosure: "DID NOT RAISE"},
    "gradients_are_left": {DropsGradients: "gradient at None"},
    "lr_zero_leaves_weights_exact": {
        SubtractsItsClimb: "lr=0 moved",
        ForgetsVanishedGradients: "lr=0 moved",
    },
    "weights_come_home_when_the_closure_raises": {StaysAway: "stayed away"},
    "frozen_and_unused_parameters": {
        ClimbsWithFrozen: "frozen parameter was perturbed",
        DecaysTheUnused: "unused parameter moved",
    },
    "groups_keep_their_own_settings": {
        StepsByItsDefaults: "a group of lr=0 moved",
        CopiesTheSettings: "was raised stayed",
    },
    "a_group_can_be_added": {KeepsItsFirstGroups: "an added group stayed"},
    "grouping_alone_changes_nothing": {ClimbsGroupByGroup: "split into groups"},
    "schedulers_are_heard": {StepsByItsDefaults: "the weights moved", CopiesTheSettings: "the weights moved"},
    "step_hooks_run_once": {StepsThroughItsParent: "once a step"},
    "clipping_in_the_closure_holds": {SumsItsGradients: "exceeds the clipping bound"},
    "autocast": {Ascends: "does not fall"},
    "low_precision_weights": {WidensTheWeights: "changed the dtype"},
    "resumes_exactly": {ForgetsItsMomentum: "not training straight on", ForgetsToShareAfterLoading: "no longer rule"},
    "repeats_and_leaves_global_generators_alone": {
        DrawsFromTheGlobalGenerator: "a step moved the global generator of torch",
        DrawsWithoutSeed: "two equal runs differ",
    },
    "refuses_nonsense": {SwallowsTypingErrors: "DID NOT RAISE"},
    "distributed": {ClimbsByTheLocalLoss: "half of the batch"},
}


@pytest.mark.parametrize(("check", "row"), cases(GOOD, CHECKS))
def test_right_optimizers_pass(check, row):
    check(row)


@pytest.mark.parametrize(
    ("check", "wrong", "message"),
    [
        pytest.param(f"check_{name}", wrong, message, id=f"{wrong.__name__}-{name}")
        for name, table in WRONG.items()
        for wrong, message in table.items()
    ],
)
def test_wrong_optimizers_are_caught(check, wrong, message):
    climbs = issubclass(wrong, Climber)
    row = OptimizerRow(wrong.__name__, wrong, evaluations=1 + climbs, closure_required=climbs)
    with pytest.raises((AssertionError, pytest.fail.Exception), match=message):
        {check.__name__: check for check in CHECKS}[check](row)


def test_every_check_is_known_to_fail():
    assert {f"check_{name}" for name in WRONG} == {check.__name__ for check in CHECKS}
