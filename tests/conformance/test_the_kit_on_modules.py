"""The module checks pass what is right and catch what is wrong: each has at least one object that it must refuse."""

from functools import partial

import pytest
import torch
from torch import nn

from tests.conformance import cases
from tests.conformance.modules import CHECKS, ModuleRow


def vectors(n, generator):
    return (torch.randn(n, 4, generator=generator),)


def tokens(n, generator):
    return (torch.randint(7, (n, 6), generator=generator),)


class Scaled(nn.Module):
    """A right one: a linear map and a buffer."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 3)
        self.register_buffer("scale", torch.full((3,), 2.0))

    def forward(self, x):
        return self.linear(x) * self.scale


class ForgetsABuffer(Scaled):
    def __init__(self):
        super().__init__()
        self.register_buffer("scale", torch.full((3,), 2.0), persistent=False)


class ForgetsARandomOne(Scaled):
    def __init__(self):
        super().__init__()
        self.mask = torch.rand(3)

    def forward(self, x):
        return super().forward(x) * self.mask


class Upcasts(Scaled):
    def forward(self, x):
        return super().forward(x).float()


class LeavesATensorBehind(Scaled):
    def __init__(self):
        super().__init__()
        del self.scale
        self.scale = torch.full((3,), 2.0)


class DetachesUnderAutocast(Scaled):
    def forward(self, x):
        weight = self.linear.weight
        weight = weight.detach() if torch.is_autocast_enabled("cpu") else weight
        return nn.functional.linear(x, weight, self.linear.bias) * self.scale


class MixesDtypesUnderAutocast(Scaled):
    def forward(self, x):
        return x.new_zeros(len(x), 3).index_add_(0, torch.arange(len(x)), self.linear(x))


class BreaksTheGraph(Scaled):
    def forward(self, x):
        return super().forward(x) if x.sum().item() > -1e9 else x


class _WrongSquare(torch.autograd.Function):
    @staticmethod
    def forward(context, x):
        context.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(context, grad):
        return context.saved_tensors[0] * grad  # lacks the 2


class WrongGradient(Scaled):
    def forward(self, x):
        return _WrongSquare.apply(super().forward(x))


class WritesIntoItsInput(Scaled):
    def forward(self, x):
        return super().forward(x.mul_(2))


class CountsInEvalMode(Scaled):
    def forward(self, x):
        self.scale += 1
        return super().forward(x)


class DropsOutInEvalMode(Scaled):
    def forward(self, x):
        return nn.functional.dropout(super().forward(x), 0.5, training=True)


class SqueezesABatchOfOne(Scaled):
    def forward(self, x):
        return super().forward(x).squeeze()


class LooksAtItsNeighbours(Scaled):
    def forward(self, x):
        return super().forward(x - x.mean(0))


def embedding():
    return nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 2))


GOOD = (
    ModuleRow("layer_norm", partial(nn.LayerNorm, 4), vectors),
    ModuleRow("batch_norm", partial(nn.BatchNorm1d, 4), vectors),
    ModuleRow("scaled", Scaled, vectors),
    ModuleRow("embedding", embedding, tokens),
)
WRONG = {
    "state_dict_holds_all_state": {
        ForgetsABuffer: "state_dict lacks a part",
        ForgetsARandomOne: "state_dict lacks a part",
    },
    "dtype_is_followed": {Upcasts: "float32 out", LeavesATensorBehind: "float32 out"},
    "device_is_followed": {LeavesATensorBehind: "device"},
    "autocast": {DetachesUnderAutocast: "gets no gradient", MixesDtypesUnderAutocast: "same dtype|scalar type"},
    "compiles_as_one_graph": {BreaksTheGraph: "item"},
    "gradients": {WrongGradient: "Jacobian mismatch"},
    "inputs_and_state_stay": {
        WritesIntoItsInput: "changed its inputs",
        CountsInEvalMode: "changed the module",
        DropsOutInEvalMode: "two calls in eval mode differ",
    },
    "batches_of_none_and_of_one": {
        SqueezesABatchOfOne: "a batch of one has an output of another shape",
        LooksAtItsNeighbours: "among others",
    },
}


@pytest.mark.parametrize(("check", "row"), cases(GOOD, CHECKS))
def test_right_modules_pass(check, row):
    check(row)


@pytest.mark.parametrize(
    ("check", "wrong", "message"),
    [
        pytest.param(f"check_{name}", wrong, message, id=f"{wrong.__name__}-{name}")
        for name, table in WRONG.items()
        for wrong, message in table.items()
    ],
)
def test_wrong_modules_are_caught(check, wrong, message):
    with pytest.raises((AssertionError, RuntimeError), match=message):
        {check.__name__: check for check in CHECKS}[check](ModuleRow(wrong.__name__, wrong, vectors))


def test_every_check_is_known_to_fail():
    assert {f"check_{name}" for name in WRONG} == {check.__name__ for check in CHECKS}
