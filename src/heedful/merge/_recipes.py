"""mergekit's recipes: YAML read safely, checked key by key, and what it says of each tensor of each model.

A setting is a number or a word, a list over the depth of the model (a gradient), or rules for names of tensors:

    weight: [{filter: mlp, value: [0.2, 0.8]}, {value: 1.0}]

The first rule whose filter is part of a tensor's name holds. If none does, or a model says nothing, the recipe's own
``parameters`` hold, then the method's default. Gradients run linearly from the first layer (depth 0) to the last
(depth 1); tensors outside of layers have depth 0, and the layer of a model that has only one has depth 1, as in mergekit.
"""

from __future__ import annotations

import dataclasses
import difflib
import inspect
import math
import os
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch

from heedful.errors import FileFormatError, ParameterError
from heedful.merge._methods import MergeMethod, available_methods

Scalar = bool | int | float | str
Setting = tuple[tuple[str | None, tuple[Scalar, ...]], ...]  # rules: a filter (None: every tensor) and its gradient

_INPUTS = ("models", "slices", "modules")
_TOKENS = ("tokenizer_source", "tokenizer", "chat_template")
_KEYS = ("merge_method", "base_model", *_INPUTS, "parameters", "dtype", "out_dtype", *_TOKENS, "exclude")
_ALIASES = {"lambda": "scale", "gamma": "drop_largest"}  # mergekit's names that heedful spells out
_NO_MATTER = ("int8_mask",)  # mergekit's, true or false, of its memory alone
_DTYPES = {name: getattr(torch, name) for name in ("float32", "float16", "bfloat16", "float64")}
_MAX_BYTES, _MAX_NODES, _MAX_NESTING = 2**20, 20_000, 40  # far beyond any recipe, far below what hurts


@dataclasses.dataclass(frozen=True)
class ModelReference:
    """A model as mergekit writes it: a folder or hub name, perhaps ``@revision``, perhaps ``+adapter``."""

    path: str
    adapter: str | None = None

    def __str__(self) -> str:
        return f"{self.path}+{self.adapter}" if self.adapter else self.path


@dataclasses.dataclass(frozen=True)
class Recipe:
    """A checked recipe.

    Parameters
    ----------
    method : str
        Name of the merge method.
    base : ModelReference or None
        The model that task vectors start from.
    models : tuple of ModelReference
        What is merged, in the recipe's order; the base is not among them unless the method treats it as one of them.
    parameters, model_parameters : mapping of name to setting, and one such mapping per model
        As written, under heedful's names.
    dtype : torch.dtype or None
        Type of the output; None keeps that of the inputs.
    exclude : tuple of str
        Tensors that stay the base's: names, globs or ``re:…``.
    tokenizer : ModelReference or None
        Whose tokenizer files the output gets; None means the base's.
    chat_template : str or None
        Jinja text that takes the place of the tokenizer's own.
    n_layers : int or None
        How many layers a slice claims that the models have.
    warnings : tuple of str
        What the recipe says in vain.
    text : str
        The recipe as YAML, for the model card.
    """

    method: str
    base: ModelReference | None
    models: tuple[ModelReference, ...]
    parameters: Mapping[str, Setting]
    model_parameters: tuple[Mapping[str, Setting], ...]
    dtype: torch.dtype | None
    exclude: tuple[str, ...]
    tokenizer: ModelReference | None
    chat_template: str | None
    n_layers: int | None
    warnings: tuple[str, ...]
    text: str

    def settings(self, name: str, depth: float) -> dict[str, Any]:
        """What the method is told of tensor ``name``: settings of the whole, and of the models as lists."""
        method = method_of(self.method)
        whole = {
            key: _evaluate(key, self.parameters.get(key, ()), name, depth, default)
            for key, default in method.defaults.items()
        }
        each = {
            key: [_evaluate(key, own.get(key, ()), name, depth, default) for own in self.model_parameters]
            for key, default in method.model_defaults.items()
        }
        return whole | each


def read_recipe(source: str | os.PathLike | Mapping) -> Recipe:
    """Read a mergekit recipe, as a YAML file or as the mapping that it holds, and check all that needs no model.

    Raises
    ------
    FileNotFoundError
        If ``source`` is the path of no file.
    FileFormatError
        If the file is not YAML, or uses what no recipe needs: duplicate keys, types of its own, cyclic or exploding anchors.
    ParameterError
        If a key is unknown (the nearest known one is suggested) or a value is of the wrong kind; the message begins with
        the path of the key, such as ``models[1].parameters.density``.
    """
    if isinstance(source, Mapping):
        import yaml

        recipe = _checked(source, "")
        return dataclasses.replace(recipe, text=yaml.safe_dump(_plain(source), sort_keys=False, allow_unicode=True))
    path = Path(source)
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist or is not a file. Give a mergekit recipe (YAML).")
    raw = path.read_bytes()
    if len(raw) > _MAX_BYTES:
        raise FileFormatError(f"{path} has {len(raw)} bytes, and no recipe needs more than {_MAX_BYTES}.")
    try:
        text = raw.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise FileFormatError(f"{path} is not UTF-8 text ({error}). Give a mergekit recipe (YAML).") from error
    return _checked(_parse(text, str(path)), text)


def method_of(name: str) -> MergeMethod:
    """What a recipe may say to the method ``name``. Pareto merging has one setting for the whole model, and no ``merge``."""
    if name != "pareto":
        return available_methods()[name]
    from heedful.merge.pareto_merging import fit_pareto_set

    arguments = inspect.signature(fit_pareto_set).parameters.values()
    settings = {item.name: item.default for item in arguments if isinstance(item.default, (bool, int, float, str))}
    return MergeMethod(name, "Pareto merging", True, settings, {}, merge=fit_pareto_set)  # type: ignore[arg-type]


def layer_depths(names: Iterable[str]) -> dict[str, float]:
    """Depth of each tensor in [0, 1]: its layer's number over the last one's, 0 for tensors outside of layers.

    The layer is the first part of the name that is a number; layers are counted apart for each part before it, so that an
    encoder and a decoder have a first and a last layer each.
    """
    places = {name: re.match(r"(?:(.*?)\.)??(\d+)(?:\.|$)", name) for name in names}
    last: dict[str | None, int] = {}
    for place in filter(None, places.values()):
        last[place[1]] = max(last.get(place[1], 0), int(place[2]))
    return {
        name: 0.0 if place is None else int(place[2]) / last[place[1]] if last[place[1]] else 1.0
        for name, place in places.items()
    }


def _parse(text: str, origin: str) -> Any:
    import yaml

    try:
        loader = yaml.SafeLoader(text)
        node = loader.get_single_node()
        if node is None:
            return None
        _check_node(node, (), {})
        return loader.construct_document(node)
    except FileFormatError as error:
        raise FileFormatError(f"{origin}: {error}") from None
    except RecursionError:
        raise FileFormatError(f"{origin}: the YAML nests deeper than any recipe does.") from None
    # A value that its tag or its look promises and it is not, such as the date 2024-13-01, ends in any of these.
    except (yaml.YAMLError, ValueError, TypeError, AttributeError, OverflowError, LookupError) as error:
        raise FileFormatError(f"{origin} is not the YAML of a recipe: {error}") from error


def _check_node(node: Any, above: tuple, sizes: dict[int, int]) -> int:
    """How many nodes ``node`` stands for when its anchors are written out; refuses what no recipe needs."""
    where = f"line {node.start_mark.line + 1}"
    if any(node is other for other in above):
        raise FileFormatError(f"{where} holds a cyclic anchor: it contains itself.")
    if len(above) > _MAX_NESTING:
        raise FileFormatError(f"{where} nests deeper than {_MAX_NESTING} levels.")
    if id(node) in sizes:
        return sizes[id(node)]
    children = node.value if node.id == "sequence" else []
    if node.id == "mapping":
        children, seen = [child for _, child in node.value], set()
        for key, _ in node.value:
            if key.id != "scalar":
                raise FileFormatError(f"{where} has a key that is not a word.")
            if key.value in seen:
                raise FileFormatError(
                    f"line {key.start_mark.line + 1} has the key {key.value!r} again. Keep one of them."
                )
            seen.add(key.value)
    sizes[id(node)] = size = 1 + sum(_check_node(child, (*above, node), sizes) for child in children)
    if size > _MAX_NODES:
        raise FileFormatError(f"{where} begins more than {_MAX_NODES} entries, once its anchors are written out.")
    return size


def _checked(recipe: Any, text: str) -> Recipe:
    recipe = _mapping(recipe, "", _KEYS)
    method = method_of(_choice(recipe.get("merge_method"), "merge_method", (*available_methods(), "pareto")))
    base = None if recipe.get("base_model") is None else _reference(recipe["base_model"], "base_model")
    if method.needs_base and base is None:
        raise ParameterError(f"base_model is missing: {method.name} merges what models add to it. Name their base.")
    items, inner, n_layers = _items(recipe)
    warnings: list[str] = []
    shared = _before(
        _parameters(inner, "slices[0].parameters", method, warnings),
        _parameters(recipe.get("parameters"), "parameters", method, warnings),
    )
    models: dict[ModelReference, dict[str, Setting]] = {}
    for at, item in items:
        reference = _reference(item.get("model"), f"{at}.model")
        if reference in models:
            raise ParameterError(f"{at}.model is {reference} a second time. Keep one of them and add the weights.")
        models[reference] = _parameters(item.get("parameters"), f"{at}.parameters", method, warnings)
    if method.needs_base:
        models = {reference: own for reference, own in models.items() if reference != base}  # it adds nothing to itself
    elif base is not None and base not in models:  # mergekit counts it among the models, if a weight holds for all
        if "weight" not in shared:
            raise ParameterError(
                f"base_model: {base} has no weight. List it among the models, or leave base_model out."
            )
        models[base] = {}
    for key in method.defaults:  # of the whole, yet some write it beside every model
        told = {own.pop(key) for own in models.values() if key in own}
        if len(told) > 1:
            raise ParameterError(
                f"the models' parameters.{key} differ, and {method.name} takes one. Write it once, at the top."
            )
        shared[key] = (*(told.pop() if told else ()), *shared.get(key, ()))
    # heedful computes in float32 at least, whatever dtype says: it is the type of the output where out_dtype is not.
    dtypes = [read_dtype(recipe[key], key) for key in ("out_dtype", "dtype") if recipe.get(key) is not None]
    return Recipe(
        method=method.name,
        base=base,
        models=tuple(models),
        parameters=shared,
        model_parameters=tuple(
            _before(own, {key: rules for key, rules in shared.items() if key != "density" or "n" not in own})
            for own in models.values()
        ),
        dtype=dtypes[0] if dtypes else None,
        exclude=_texts(recipe.get("exclude"), "exclude"),
        tokenizer=_tokenizer(recipe, base or next(iter(models))),
        chat_template=_chat_template(recipe.get("chat_template")),
        n_layers=n_layers,
        warnings=tuple(dict.fromkeys(warnings)),
        text=text,
    )


def _items(recipe: Mapping[str, Any]) -> tuple[list[tuple[str, dict[str, Any]]], Any, int | None]:
    """The entries of the models with their key paths, the parameters of their slice, and how many layers it has."""
    given = [key for key in _INPUTS if recipe.get(key) is not None]
    if given not in (["models"], ["slices"]):
        found = f"got {' and '.join(given)}" if given else "it has none"
        raise ParameterError(f"the recipe needs models: a list of model and parameters; {found}.")
    if given == ["models"]:
        return _entries(recipe["models"], "models", ("model", "parameters")), None, None
    slices = recipe["slices"]
    if not isinstance(slices, list) or len(slices) != 1:
        raise ParameterError(
            "slices: heedful merges whole models and stacks no layers of several. Write models, or use mergekit."
        )
    piece = _mapping(slices[0], "slices[0]", ("sources", "parameters"))
    sources = _entries(piece.get("sources"), "slices[0].sources", ("model", "layer_range", "parameters"))
    ranges = [item.get("layer_range") for _, item in sources]
    last = ranges[0][-1] if isinstance(ranges[0], list) and ranges[0] else None
    if type(last) is not int or any(other != [0, last] for other in ranges):
        raise ParameterError(
            "slices[0].sources: heedful merges whole models, so every layer_range must be [0, number of layers]. Write "
            "models instead, or use mergekit."
        )
    return sources, piece.get("parameters"), last


def _entries(value: Any, at: str, keys: tuple[str, ...]) -> list[tuple[str, dict[str, Any]]]:
    if not isinstance(value, list) or not value:
        raise ParameterError(f"{at} must be a list of at least one model; got {_short(value)}.")
    return [(f"{at}[{i}]", _mapping(item, f"{at}[{i}]", keys)) for i, item in enumerate(value)]


def _mapping(value: Any, at: str, known: Iterable[str]) -> dict[str, Any]:
    """``value`` if it is a mapping whose keys are all known."""
    if not isinstance(value, Mapping):
        raise ParameterError(f"{at or 'the recipe'} must be a mapping of {', '.join(known)}; got {_short(value)}.")
    for key in value:
        if key not in known:
            path = f"{at}.{key}" if at else str(key)
            hint = _nearest(key, known) or f" Known are {', '.join(known)}."
            raise ParameterError(f"{path}: there is no such key.{hint}")
    return dict(value)


def _nearest(word: Any, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(str(word), list(known), n=1)
    return f" Did you mean {near[0]}?" if near else ""


def _choice(value: Any, at: str, known: tuple[str, ...]) -> str:
    if value not in known:
        raise ParameterError(f"{at} must be one of {', '.join(known)}; got {_short(value)}.{_nearest(value, known)}")
    return value


def _parameters(value: Any, at: str, method: MergeMethod, warnings: list[str]) -> dict[str, Setting]:
    """The settings of one ``parameters`` block, under heedful's names."""
    own = _defaults(method)
    likes = {key: like for other in (*available_methods().values(), method) for key, like in _defaults(other).items()}
    settings: dict[str, Setting] = {}
    aliases = {**_ALIASES, "lambda": "start_scale", "scale": "start_scale"} if "start_scale" in own else _ALIASES
    for key, item in _mapping({} if value is None else value, at, (*likes, *_ALIASES, *_NO_MATTER)).items():
        name = aliases.get(key, key)
        if name in settings:
            raise ParameterError(f"{at}.{key}: {name} is set twice. Keep one of them.")
        setting = _setting(item, f"{at}.{key}", likes.get(name, False))
        if name in own:
            settings[name] = setting
        elif name not in _NO_MATTER:
            warnings.append(f"{at}.{key} has no effect: {method.name} has no such setting.")
    if "n" in settings and "density" in settings:
        raise ParameterError(f"{at} has n and density, which say the same. Keep one of them.")
    return settings


def _defaults(method: MergeMethod) -> dict[str, Any]:
    return {**method.defaults, **method.model_defaults}


def _setting(value: Any, at: str, like: Any) -> Setting:
    rules = [value] if isinstance(value, Mapping) else value
    if not isinstance(rules, list) or not any(isinstance(rule, Mapping) for rule in rules):
        return ((None, _gradient(value, at, like)),)
    setting = []
    for i, rule in enumerate(rules):
        rule = _mapping(rule, f"{at}[{i}]", ("filter", "value"))
        pattern = rule.get("filter")
        if pattern is not None and not isinstance(pattern, str):
            raise ParameterError(f"{at}[{i}].filter must be a part of tensor names; got {_short(pattern)}.")
        setting.append((None if pattern == "*" else pattern, _gradient(rule.get("value"), f"{at}[{i}].value", like)))
    return tuple(setting)


def _gradient(value: Any, at: str, like: Any) -> tuple[Scalar, ...]:
    if not isinstance(value, list):
        return (_scalar(value, at, like),)
    if not value:
        raise ParameterError(
            f"{at} is an empty list. Give a value, or the values of a gradient from first to last layer."
        )
    return tuple(_scalar(item, f"{at}[{i}]", like) for i, item in enumerate(value))


def _scalar(value: Any, at: str, like: Any) -> Scalar:
    """``value`` if it is of the kind of the default ``like``; a number may be text, as YAML reads 1e-3."""
    if isinstance(like, bool):
        if isinstance(value, bool):
            return value
        raise ParameterError(f"{at} must be true or false; got {_short(value)}.")
    if isinstance(like, str):
        if isinstance(value, str):
            return value
        raise ParameterError(f"{at} must be a word such as {like!r}; got {_short(value)}.")
    number = _number(value)
    if not math.isfinite(number):
        raise ParameterError(f"{at} must be a number; got {_short(value)}.")
    if not isinstance(like, int):
        return number
    if not number.is_integer():
        raise ParameterError(f"{at} must be a whole number; got {_short(value)}.")
    return int(number)


def _number(value: Any) -> float:
    """``value`` as a float, NaN if it is no number."""
    try:
        return math.nan if isinstance(value, bool) else float(value)
    except (TypeError, ValueError, OverflowError):
        return math.nan


def _evaluate(key: str, setting: Setting, name: str, depth: float, default: Any) -> Any:
    for pattern, values in setting:
        if pattern is None or pattern in name:
            value = _interpolate(values, depth)
            return round(value) if isinstance(default, int) and isinstance(value, float) else value  # between layers
    if setting and key == "weight":  # as in mergekit: who weighs by rules must weigh every tensor
        raise ParameterError(f"weight: no rule holds for the tensor {name}. End the rules with one without a filter.")
    return default


def _interpolate(values: tuple[Scalar, ...], depth: float) -> Scalar:
    place = depth * (len(values) - 1)
    low, high = values[int(place)], values[min(int(place) + 1, len(values) - 1)]
    if isinstance(low, (bool, str)) or isinstance(high, (bool, str)) or low == high:
        return low
    part = place - int(place)
    return (1 - part) * low + part * high


def _before(first: Mapping[str, Setting], second: Mapping[str, Setting]) -> dict[str, Setting]:
    """Rules of both, those of ``first`` asked first."""
    return {key: (*first.get(key, ()), *second.get(key, ())) for key in {**first, **second}}


def _reference(value: Any, at: str) -> ModelReference:
    if isinstance(value, Mapping):  # mergekit's long form, for names with + or @ in them
        parts = _mapping(value, at, ("model", "lora"))
        lora = parts.get("lora")
        return ModelReference(
            _path(parts.get("model"), f"{at}.model"), None if lora is None else _path(lora, f"{at}.lora")
        )
    text = _path(value, at)
    if os.path.exists(text):
        return ModelReference(text)
    path, *adapters = text.split("+")
    if len(adapters) > 1 or not path or adapters == [""]:
        raise ParameterError(f"{at} must be a model or model+adapter; got {_short(text)}.")
    return ModelReference(path, *adapters)


def _path(value: Any, at: str) -> str:
    if isinstance(value, Mapping):
        parts = _mapping(value, at, ("path", "revision"))
        path, revision = _path(parts.get("path"), f"{at}.path"), parts.get("revision")
        return path if revision is None else f"{path}@{_path(revision, f'{at}.revision')}"
    if not isinstance(value, (str, os.PathLike)) or not os.fspath(value).strip():
        raise ParameterError(f"{at} must be the folder of a model, or its name on the hub; got {_short(value)}.")
    return os.fspath(value)


def read_dtype(value: Any, at: str) -> torch.dtype:
    """The floating-point type that ``value`` is or names."""
    return _DTYPES[_choice(str(value).removeprefix("torch."), at, tuple(_DTYPES))]


def _texts(value: Any, at: str) -> tuple[str, ...]:
    texts = [] if value is None else [value] if isinstance(value, str) else value
    if not isinstance(texts, (list, tuple)) or not all(isinstance(text, str) for text in texts):
        raise ParameterError(f"{at} must be a list of names, globs or re:…; got {_short(value)}.")
    return tuple(texts)


def _tokenizer(recipe: Mapping[str, Any], base: ModelReference) -> ModelReference | None:
    source, at = recipe.get("tokenizer_source"), "tokenizer_source"
    if recipe.get("tokenizer") is not None:
        if source is not None:
            raise ParameterError("tokenizer and tokenizer_source say the same. Keep one of them.")
        parts = _mapping(recipe["tokenizer"], "tokenizer", ("source", "tokens", "pad_to_multiple_of"))
        source, at = parts.get("source", "union"), "tokenizer.source"
        if parts.get("tokens") or parts.get("pad_to_multiple_of"):
            raise ParameterError(
                "tokenizer: heedful changes no vocabulary (tokens, pad_to_multiple_of). Use mergekit for it."
            )
    if source is None:
        return None
    return base if source in ("base", "union") else _reference(source, at)


def _chat_template(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or "{" not in value):
        raise ParameterError(
            f"chat_template must be Jinja text; got {_short(value)}. Without the key the tokenizer keeps its own."
        )
    return value


def _plain(value: Any) -> Any:
    """The recipe in types that YAML has."""
    if isinstance(value, Mapping):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return os.fspath(value) if isinstance(value, os.PathLike) else value


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:77]}…"
