"""What every module must do: keep all of its state, follow dtype and device, and live with autocast and compilation."""

import copy
import dataclasses
import io
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from tests.conformance.distributed import in_new_process


@dataclasses.dataclass(frozen=True)
class ModuleRow:
    """A module to check.

    Parameters
    ----------
    name : str
        What the test is called.
    make : callable
        ``make()`` gives a new float32 module on the CPU; two calls may differ in their initial weights. Like
        ``inputs``, it is a function at the top of a module, or a ``partial`` of one: it travels to another process.
    inputs : callable
        ``inputs(n, generator)`` gives the positional arguments for a batch of n: tensors whose first axis is the batch,
        float32 where they are real.
    rows_are_independent : bool
        Whether, in eval mode, the output for a row depends on that row alone.
    differentiable_inputs : bool
        Whether gradcheck includes the real inputs, or the parameters alone.
    exclusions : mapping
        Name of a check that must fail -> reason.
    """

    name: str
    make: Callable[[], nn.Module]
    inputs: Callable[[int, torch.Generator], tuple[Tensor, ...]]
    rows_are_independent: bool = True
    differentiable_inputs: bool = True
    exclusions: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def batch(self, n: int = 5, seed: int = 0) -> tuple[Tensor, ...]:
        return self.inputs(n, torch.Generator().manual_seed(seed))


def _outputs(module: nn.Module, inputs: tuple) -> list[Tensor]:
    return [leaf for leaf in tree_leaves(module(*inputs)) if isinstance(leaf, Tensor)]


def _real(tree: Any, change: Callable[[Tensor], Tensor]) -> Any:
    """The same structure, its floating-point tensors changed."""
    return tree_map(lambda leaf: change(leaf) if isinstance(leaf, Tensor) and leaf.is_floating_point() else leaf, tree)


def _same(left: list[Tensor], right: list[Tensor]) -> bool:
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


def check_state_dict_holds_all_state(row: ModuleRow) -> None:
    """Parameters *and* buffers are changed before saving, so that a loader that makes them anew is found out."""
    module, inputs = row.make().eval(), row.batch()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.mul_(1 + 0.1 * torch.rand(tensor.shape, generator=generator))
    expected = _outputs(module, inputs)
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    loaded = row.make().eval()
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert _same(_outputs(loaded, inputs), expected), "state_dict lacks a part of what the output depends on"
    assert _same(_outputs(copy.deepcopy(module), inputs), expected), "a deep copy gives other outputs"


def check_dtype_is_followed(row: ModuleRow) -> None:
    """float64 and bfloat16 in give the same out, with the values that float32 gives."""
    module, inputs = row.make().eval(), row.batch()
    expected = _outputs(module, inputs)
    # float32 differs from float64 in its last bits; bfloat16 has 8 bits, and a few dozen of its errors may add up.
    for dtype, tolerance in ((torch.float64, 1e-4), (torch.bfloat16, 0.1)):
        twin = copy.deepcopy(module).to(dtype)
        outputs = _outputs(twin, _real(inputs, lambda leaf, dtype=dtype: leaf.to(dtype)))
        for output, reference in zip(outputs, expected, strict=True):
            if reference.is_floating_point():
                assert output.dtype == dtype, f"{dtype} in, {output.dtype} out"
                torch.testing.assert_close(output.float(), reference, rtol=tolerance, atol=tolerance)


def check_device_is_followed(row: ModuleRow) -> None:
    """On the meta device, where every tensor that was left on the CPU is an error; and on CUDA if there is one."""
    for device in ("meta", *(["cuda"] if torch.cuda.is_available() else [])):
        module = row.make().eval().to(device)
        outputs = _outputs(module, tree_map(lambda leaf, device=device: leaf.to(device), row.batch()))
        assert {output.device.type for output in outputs} == {device}, "an output is on another device than the inputs"


def check_autocast(row: ModuleRow) -> None:
    module, inputs = row.make().eval(), row.batch()
    expected = _outputs(copy.deepcopy(module), inputs)
    with torch.autocast("cpu", torch.bfloat16):
        outputs = _outputs(module, inputs)
    for output, reference in zip(outputs, expected, strict=True):  # bfloat16 keeps 8 bits
        torch.testing.assert_close(output.to(reference.dtype), reference, rtol=0.1, atol=0.1)
    trained = {name: p for name, p in module.named_parameters() if p.requires_grad}
    if trained:
        _loss(outputs).backward()
    for name, p in trained.items():
        assert p.grad is not None, f"{name} gets no gradient under autocast"
        assert p.grad.dtype == torch.float32, f"{name} gets a {p.grad.dtype} gradient under autocast"


def check_compiles_as_one_graph(row: ModuleRow) -> None:
    """Forward and backward equal the eager ones.

    The backend traces both and runs them eagerly (``aot_eager``): a graph break or a change of the module's own state
    is found without the minute that generating and compiling C++ would take. In a process of its own, since the type
    checks of the test run cannot be traced.
    """
    in_new_process(_compile, row)


def _compile(row: ModuleRow) -> None:
    module, inputs = row.make().eval(), row.batch()
    twin = copy.deepcopy(module)
    compiled = torch.compile(twin, backend="aot_eager", fullgraph=True)
    expected, outputs = _outputs(module, inputs), _outputs(compiled, inputs)
    for output, reference in zip(outputs, expected, strict=True):
        torch.testing.assert_close(output, reference, msg="compiled, the module gives other outputs")
    if any(p.requires_grad for p in module.parameters()):
        _loss(expected).backward()
        _loss(outputs).backward()
    for p, q in zip(module.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(q.grad, p.grad, msg="compiled, the module gives other gradients")


def check_gradients(row: ModuleRow) -> None:
    """Against finite differences in float64, of outputs by parameters and by real inputs."""
    module = row.make().eval().double()
    inputs = _real(row.batch(2), torch.Tensor.double)
    names = [name for name, p in module.named_parameters() if p.requires_grad]
    real = [i for i, leaf in enumerate(inputs) if leaf.is_floating_point()] if row.differentiable_inputs else []

    def outputs(*leaves):
        parameters, moved = dict(zip(names, leaves, strict=False)), list(inputs)
        for i, leaf in zip(real, leaves[len(names) :], strict=True):
            moved[i] = leaf
        result = tree_leaves(torch.func.functional_call(module, parameters, tuple(moved)))
        return tuple(leaf for leaf in result if isinstance(leaf, Tensor) and leaf.is_floating_point())

    state = dict(module.named_parameters())
    leaves = [state[name].detach().clone() for name in names] + [inputs[i].clone() for i in real]
    assert torch.autograd.gradcheck(outputs, [leaf.requires_grad_() for leaf in leaves])


def check_inputs_and_state_stay(row: ModuleRow) -> None:
    """In eval mode a call changes neither its inputs nor the module, and repeats bit for bit."""
    module, inputs = row.make().eval(), row.batch()
    before, state = tree_map(torch.clone, inputs), {k: v.clone() for k, v in module.state_dict().items()}
    first, second = _outputs(module, inputs), _outputs(module, inputs)
    assert _same(list(inputs), list(before)), "a call changed its inputs"
    assert _same(list(module.state_dict().values()), list(state.values())), "a call in eval mode changed the module"
    assert _same(first, second), "two calls in eval mode differ"


def check_batches_of_none_and_of_one(row: ModuleRow) -> None:
    """A batch of zero gives zero rows; a batch of one gives what the row gives among others."""
    module, inputs = row.make().eval(), row.batch(3)
    expected = _outputs(module, inputs)
    for output, reference in zip(_outputs(module, row.batch(0)), expected, strict=True):
        assert output.shape == (0, *reference.shape[1:]), "a batch of none has an output of another shape"
    for output, reference in zip(_outputs(module, tuple(leaf[:1] for leaf in inputs)), expected, strict=True):
        assert output.shape == (1, *reference.shape[1:]), "a batch of one has an output of another shape"
        if row.rows_are_independent:
            torch.testing.assert_close(output, reference[:1], msg="a row alone gives another output than among others")


def _loss(outputs: list[Tensor]) -> Tensor:
    return torch.stack([output.float().square().mean() for output in outputs if output.requires_grad]).sum()


CHECKS = (
    check_state_dict_holds_all_state,
    check_dtype_is_followed,
    check_device_is_followed,
    check_autocast,
    check_compiles_as_one_graph,
    check_gradients,
    check_inputs_and_state_stay,
    check_batches_of_none_and_of_one,
)
