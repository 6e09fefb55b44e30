"""Watching a forward pass, operation by operation, and noting what becomes a node of a computation graph."""

import contextlib
import math
import re
import traceback
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeGuard

import jaxtyping
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from heedful.errors import InputError, UnsupportedModelError


class Target(NamedTuple):
    """A parameter that a node stands for.

    ``role``: "weight" (linear and convolution), "bias" (added to the channels), "norm" (of a normalisation first the
    gain, then the bias; of a layer scale the gain alone), "embedding" (rows that are looked up), "position" (added to the
    tokens; (T, d), perhaps behind axes of length 1), "token" (joined to them). Biases and norms are vectors, perhaps with
    axes of length 1.
    """

    name: str
    shape: tuple[int, ...]
    role: str


class Node(NamedTuple):
    """An operation. ``weight`` names the weight of a layer even where another node predicts it."""

    kind: str
    preds: frozenset[int]
    targets: tuple[Target, ...] = ()
    weight: str | None = None


class Value(NamedTuple):
    """What is known of a tensor: the nodes it comes from; or, if none, the parameters it is made of; or a constant."""

    sources: frozenset[int] = frozenset()
    params: frozenset[str] = frozenset()
    operands: tuple[frozenset[int], frozenset[int]] | None = None  # of a product of two such tensors: queries and keys
    softmaxed: bool = False
    bent: bool = False  # by a nonlinearity since the last node


_CONSTANT = Value()
_INPUT = frozenset([0])
_MATMULS = {"mm": 0, "bmm": 0, "mv": 0, "addmm": 1, "baddbmm": 1, "addmv": 1}  # where the first factor stands
_NORMS = {  # kind, and where the gain stands; the bias follows it
    "native_batch_norm": ("batch_norm", 1),
    "cudnn_batch_norm": ("batch_norm", 1),
    "native_layer_norm": ("layer_norm", 2),
    "native_group_norm": ("group_norm", 1),
}
_RELU_LIKE = frozenset(
    (
        *("relu", "leaky_relu", "prelu_kernel", "rrelu_with_noise", "threshold", "clamp_min", "hardtanh"),
        *("gelu", "silu", "mish", "elu", "hardswish", "softplus", "glu"),
    )
)
_GATES = frozenset(("tanh", "sigmoid", "hardsigmoid", "erf"))
_REDUCTIONS = frozenset(("mean", "sum", "amax", "max"))
_LOOKUPS = frozenset(("index", "index_select", "gather"))
_ARITHMETIC = {"add": "sum", "sub": "sum", "mul": "product", "div": "product"}


class Recorder(TorchDispatchMode):
    """Notes nodes while the operations of a network run under it.

    It sees ATen operations, to which modules, functions and fused attention all come down. Values belong to storages, not
    to tensors: a view has the value of its base, and writing into one changes both.
    """

    def __init__(self, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor], inputs: Any):
        super().__init__()
        self.nodes = [Node("input", frozenset())]
        self.bent: set[int] = set()  # nodes whose output meets a nonlinearity like ReLU
        self.feeds: dict[int, set[str]] = {}  # node -> which inputs of attentions its output is
        self.predicted: set[str] = set()
        self.statistics: set[str] = set()  # running statistics of batch norms
        self.unknown: dict[str, str] = {}  # parameter -> the operation that it enters in a way that has no kind
        self._shapes = {name: tuple(tensor.shape) for name, tensor in parameters.items()}
        self._buffers = {id(tensor.untyped_storage()): name for name, tensor in buffers.items()}
        self._values: dict[int, tuple[Any, Value]] = {}  # by id of the storage, which is held lest the id be reused
        for name, tensor in parameters.items():
            self._assign(tensor, Value(params=frozenset([name])))
        self._assign(inputs, Value(_INPUT))

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        tensors = [leaf for leaf in tree_leaves((args, kwargs)) if _is_tensor(leaf)]
        out = _run(func, args, kwargs, abstract=any(tensor.is_meta for tensor in tensors))
        values = [self.value(tensor) for tensor in tensors]
        flows = [value for value in values if value.sources]
        if any(flow.operands for flow in flows):  # what comes straight from the input, beside scores, is a mask
            flows = [flow for flow in flows if flow.operands or flow.sources != _INPUT]
        params = [tensor for tensor, value in zip(tensors, values, strict=True) if value.params]
        if flows:
            self._assign(out, self._step(func.overloadpacket.__name__.strip("_"), args, out, flows, params))
        elif params:
            self._assign(out, Value(params=_union(value.params for value in values)))
        return out

    def value(self, tensor: Tensor | None) -> Value:
        """What is known of ``tensor``; of None, that it is a constant."""
        return _CONSTANT if tensor is None else self._values.get(id(tensor.untyped_storage()), (None, _CONSTANT))[1]

    def head(self, outputs: Any) -> tuple[str, int] | None:
        """Weight and rows of the linear layer that makes the first output of shape (batch, n), if nothing bends it.

        It is called "weight" in a module: other parameters cannot be told from those of the network around it.
        """
        for output in filter(_is_tensor, tree_leaves(outputs)):
            value = self.value(output)
            if output.ndim == 2 and len(value.sources) == 1 and not value.bent:
                node = self.nodes[next(iter(value.sources))]
                if node.kind == "bias":
                    node = self.nodes[next(iter(node.preds))]
                weight = node.weight or ""
                if node.kind == "linear" and weight.rpartition(".")[2] == "weight":
                    return weight, self._shapes[weight][0]
        return None

    def _assign(self, tensors: Any, value: Value) -> None:
        for tensor in filter(_is_tensor, tree_leaves(tensors)):
            storage = tensor.untyped_storage()
            self._values[id(storage)] = (storage, value)

    def _step(self, name: str, args: Sequence, out: Any, flows: list[Value], params: list[Tensor]) -> Value:
        """The value of what operation ``name`` makes of at least one tensor that comes from the input."""
        flow = Value(
            _union(value.sources for value in flows),
            operands=next((value.operands for value in flows if value.operands), None),
            softmaxed=any(value.softmaxed for value in flows),
            bent=any(value.bent for value in flows),
        )
        first = self.value(args[0]) if _is_tensor(args[0]) else _CONSTANT
        # First what takes parameters in places of its own, then elementwise parameters, then what is left.
        if name in _MATMULS:
            at = _MATMULS[name]
            return self._matmul(flow, args[at], args[at + 1], added=args[0] if at else None)
        if name.startswith("scaled_dot_product"):
            query, key, value = (self.value(tensor).sources for tensor in args[:3])
            return self._attention(query | key | value, query, key, value)
        if name == "convolution" and first.sources and params:
            weight, bias, groups = args[1], args[2], args[8]
            kind = "depthwise" if groups > 1 and weight.shape[1] == 1 else "conv"
            return self._layer(kind, flow, weight, bias)
        if name in _NORMS and first.sources:
            kind, at = _NORMS[name]
            for statistic in filter(_is_tensor, args[at + 2 :]):
                if buffer := self._buffers.get(id(statistic.untyped_storage())):
                    self.statistics.add(buffer)
            return self._node(kind, flow.sources, "norm", args[at], args[at + 1])
        if name in _LOOKUPS and first.sources:  # where something is looked up is not what is looked up
            return first
        if name == "embedding" and params:
            return self._node("embedding", flow.sources, "embedding", args[0])
        if name in ("cat", "stack"):
            return self._join(flow, len({value.sources for value in flows}) > 1, params)
        if name in _RELU_LIKE:
            return self._bend(flow)
        if params:
            return self._shift_or_scale(name, flow, params)
        if name in _ARITHMETIC and len({value.sources for value in flows}) > 1:
            return self._node(_ARITHMETIC[name], flow.sources)._replace(operands=flow.operands)
        if name == "mul" and len(flows) > 1 and flow.bent:  # x · sigmoid(x) and kin: SiLU or GELU, written out
            return self._bend(flow)
        if "pool" in name:
            pooled = out[0] if isinstance(out, tuple) else out
            kind = "global_pool" if math.prod(pooled.shape[2:]) == 1 else "max_pool" if "max" in name else "avg_pool"
            return self._node(kind, flow.sources)
        if name in _REDUCTIONS and _leaves_channels(args):
            return self._node("global_pool", flow.sources)
        return flow._replace(softmaxed=flow.softmaxed or name.endswith("softmax"), bent=flow.bent or name in _GATES)

    def _node(self, kind: str, preds: frozenset[int], role: str = "", *params: Tensor | None) -> Value:
        """A new node. What is made of several parameters, or has been predicted by another node, is not its target.

        Nor is a lone scalar: whatever it scales or shifts is a convention of its network, 0 or 1 or a temperature.
        """
        targets: tuple[Target, ...] = ()
        weight = None
        for name in (self._name(param) for param in params):
            weight = name if role == "weight" else None
            if name is None or name in self.predicted:
                continue
            if math.prod(self._shapes[name]) > 1 or (self._shapes[name] and kind != "scale"):
                targets += (Target(name, self._shapes[name], role),)
                self.predicted.add(name)
        self.nodes.append(Node(kind, preds, targets, weight))
        return Value(frozenset([len(self.nodes) - 1]))

    def _name(self, tensor: Tensor | None) -> str | None:
        """The parameter that ``tensor`` is, or is made of, if that is one alone."""
        names = self.value(tensor).params
        return next(iter(names)) if len(names) == 1 else None

    def _layer(self, kind: str, flow: Value, weight: Tensor, bias: Tensor | None) -> Value:
        if self._name(weight) is None:
            value = self._other(kind, flow, [weight])
        else:
            value = self._node(kind, flow.sources, "weight", weight)
        return self._shift_or_scale("add", value, [bias]) if bias is not None and self.value(bias).params else value

    def _matmul(self, flow: Value, left: Tensor, right: Tensor, added: Tensor | None) -> Value:
        a, b = self.value(left), self.value(right)
        if a.sources and b.sources:
            weights, value = (a, b) if a.softmaxed else (b, a)
            if weights.softmaxed and weights.operands:
                return self._attention(weights.sources | value.sources, *weights.operands, value.sources)
            return Value(flow.sources, operands=(a.sources, b.sources))
        if a.sources and b.params:
            return self._layer("linear", a, right, added)
        if a.params and b.sources:
            return self._layer("linear", b, left, added)
        return flow

    def _attention(
        self, preds: frozenset[int], query: frozenset[int], key: frozenset[int], value: frozenset[int]
    ) -> Value:
        for part, sources in (("query", query), ("key", key), ("value", value)):
            for source in sources:
                self.feeds.setdefault(source, set()).add(part)
        return self._node("attention", preds)

    def _join(self, flow: Value, several: bool, params: Sequence[Tensor]) -> Value:
        value = self._node("concat", flow.sources) if several else flow
        for token in params:
            value = self._node("token", value.sources, "token", token)
        return value

    def _shift_or_scale(self, name: str, flow: Value, params: Sequence[Tensor]) -> Value:
        """An elementwise operation with a parameter. What becomes of attention scores still are scores."""
        parameter = self._name(params[0]) if len(params) == 1 else None
        if parameter is None:
            return self._other(name, flow, params)
        shape = self._shapes[parameter]
        vector = sum(size > 1 for size in shape) <= 1
        match _ARITHMETIC.get(name):
            case "sum" if vector:
                value = self._node("bias", flow.sources, "bias", params[0])
            case "sum" if math.prod(shape[:-2]) == 1:
                value = self._node("position", flow.sources, "position", params[0])
            case "product" if vector:
                value = self._node("scale", flow.sources, "norm", params[0])
            case _:
                return self._other(name, flow, params)
        return value._replace(operands=flow.operands)

    def _other(self, name: str, flow: Value, params: Sequence[Tensor]) -> Value:
        self.unknown |= dict.fromkeys(_union(self.value(param).params for param in params), name)
        return self._node("other", flow.sources)._replace(operands=flow.operands)

    def _bend(self, flow: Value) -> Value:
        self.bent |= flow.sources
        return flow._replace(bent=True)


def record(
    model: nn.Module, names: Sequence[str], example_inputs: Any, *, follow: Literal["shapes", "data"]
) -> tuple[Recorder, Any]:
    """Run ``model`` in evaluation mode under a ``Recorder``, and leave it as it was; the recorder and the outputs.

    ``names`` are those of its parameters, one for each if some are tied.
    """
    all_parameters = dict(model.named_parameters(remove_duplicate=False))
    parameters = {name: all_parameters[name].detach() for name in names}
    buffers = {name: buffer.detach().clone() for name, buffer in model.named_buffers()}
    kwargs = dict(example_inputs) if isinstance(example_inputs, Mapping) else {}
    if not isinstance(example_inputs, Tensor | Mapping | Sequence):
        raise InputError(
            "example_inputs must be a tensor, a sequence of arguments or a mapping of keyword arguments; got "
            f"{type(example_inputs).__name__}."
        )
    args = () if kwargs else (example_inputs,) if _is_tensor(example_inputs) else tuple(example_inputs)
    args, kwargs = tree_map_only(Tensor, lambda tensor: tensor.detach().clone(), (args, kwargs))
    if follow == "shapes":  # integers keep their values: token ids and masks, which models like to look at
        parameters = {name: tensor.to("meta") for name, tensor in parameters.items()}
        args, kwargs = tree_map_only(Tensor, lambda x: x.to("meta") if x.is_floating_point() else x, (args, kwargs))
    elif any(leaf.is_meta for leaf in tree_leaves((parameters, buffers, args, kwargs)) if _is_tensor(leaf)):
        raise InputError(
            f"follow='data' needs values, and {type(model).__name__} or example_inputs are on the meta device. Give them "
            "some first (model.to_empty(device='cpu') and an initialisation), or take follow='shapes'."
        )
    recorder = Recorder(parameters, buffers, (args, kwargs))
    with torch.no_grad(), _evaluating(model), recorder:
        try:
            return recorder, torch.func.functional_call(model, {**parameters, **buffers}, args, kwargs)
        except Exception as error:
            raise _explained(error, model, follow) from error


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode, without the fused kernel that swallows a whole ``nn.MultiheadAttention``."""
    modes = {module: module.training for module in model.modules()}
    fused = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    model.eval()
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fused)
        for module, training in modes.items():
            module.training = training


def _explained(error: Exception, model: nn.Module, follow: str) -> Exception:
    """The error of a forward pass with the line of the model that it comes from."""
    machinery = (torch.__path__[0], jaxtyping.__path__[0], __file__)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if not frame.filename.startswith(machinery)]
    line = f"{frames[-1].filename}:{frames[-1].lineno}: {frames[-1].line}" if frames else "a layer of torch"
    name, said = type(model).__name__, f"{type(error).__name__}: {error}"
    without_values = isinstance(error, NotImplementedError) or re.search(r"\bmeta\b", said, re.IGNORECASE)
    if follow == "shapes" and without_values:
        return UnsupportedModelError(
            f"The path through {name} depends on values, or has an operation without a rule for shapes, at\n  {line}\n"
            "Make it depend on shapes alone, or pass follow='data': the forward pass is then computed on example_inputs, "
            f"and the graph is that of the path they take. ({said.splitlines()[0]})"
        )
    return InputError(f"{name} fails on example_inputs, at\n  {line}\n{said}")


def _run(func: Any, args: Sequence, kwargs: Mapping, *, abstract: bool) -> Any:
    """``func``; on shapes alone as soon as one tensor has nothing else. What is constant is computed as ever."""
    if not abstract:
        return func(*args, **kwargs)
    if func.overloadpacket.__name__.endswith("_") and not args[0].is_meta:
        return args[0]  # written into a constant, whose value as a node is what counts from now on
    return func(*tree_map_only(Tensor, lambda x: x if x.is_meta else x.to("meta"), tuple(args)), **kwargs)


def _leaves_channels(args: Sequence) -> bool:
    """Whether a reduction leaves one number a channel. Of tokens, a mean over features that is kept is a statistic."""
    x, dims, keepdim = (*args, None, None)[:3]
    if dims is None or x.ndim < 3:
        return False
    reduced = {dim % x.ndim for dim in ([dims] if isinstance(dims, int) else dims)}
    statistic = x.ndim == 3 and reduced == {2} and keepdim
    return len(reduced) == x.ndim - 2 and 0 not in reduced and not statistic


def _union(sets: Any) -> frozenset:
    return frozenset().union(*sets)


def _is_tensor(leaf: Any) -> TypeGuard[Tensor]:
    return isinstance(leaf, Tensor)
