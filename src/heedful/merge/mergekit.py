"""mergekit with ``merge_method: cabs``: ``python -m heedful.merge.mergekit recipe.yaml OUT``, and mergekit's options.

mergekit looks for methods nowhere but in itself, so this starts its command ``mergekit-yaml`` with CABS registered. A recipe
says what it says to ``heedful merge``: ``n`` or ``density``, ``weight`` and ``lambda`` of each model, ``m``, ``tail`` and
``overlap`` of the whole. ``register()`` does the same for mergekit's functions in a Python program.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from heedful._checkpoints import open_checkpoint
from heedful.errors import MissingExtraError, ParameterError
from heedful.merge._methods import MergeMethod, available_methods, merge_tensor

_NAMES = {"scale": "lambda"}  # ours that mergekit calls otherwise


def register() -> None:
    """Make ``merge_method: cabs`` known to mergekit in this process.

    Raises
    ------
    MissingExtraError
        If mergekit is not installed, or older than 0.1.5.
    """
    try:
        from mergekit.merge_methods import base, registry

        base.GroupMergeMethod  # noqa: B018  (which older ones lack)
    except (ImportError, AttributeError) as error:
        raise MissingExtraError(
            'merge_method cabs in mergekit needs mergekit 0.1.5 or later. Install it: pip install "heedful[bench]"'
        ) from error
    cabs = available_methods()["cabs"]

    def parameter(name: str, default: Any, scope: Any) -> Any:
        kind = type(default) if isinstance(default, (bool, str)) else float | None
        return base.ParameterSpec(_NAMES.get(name, name), kind, scope, default=None if name == "n" else default)

    class Cabs(base.GroupMergeMethod):
        """CABS as mergekit runs it: tensor by tensor, its settings resolved for the tensor."""

        spec = base.MergeMethodSpec(
            name=cabs.name,
            pretty_name=cabs.title,
            reference_url="https://arxiv.org/abs/2503.01874",
            contract=base.InputContract(base=base.BasePolicy.REQUIRED),
            parameters=(
                *(parameter(*item, base.ParameterScope.SHARED) for item in cabs.defaults.items()),
                *(parameter(*item, base.ParameterScope.NON_BASE) for item in cabs.model_defaults.items()),
            ),
        )

        def merge_group(self, group: Any, /, **parameters: Any) -> Any:
            start, models, name = group.base.tensor, group.non_base, group.metadata.name or "tensor"
            if not models:
                return start
            return merge_tensor(
                cabs,
                name,
                open_checkpoint({name: start}),
                {str(model.id): open_checkpoint({name: model.tensor}) for model in models},
                _settings(cabs, parameters, models),
            )

    if "cabs" not in {method.spec.name for method in registry.registered_methods()}:
        registry.register(Cabs())


def _settings(method: MergeMethod, parameters: Mapping[str, Any], models: Sequence[Any]) -> dict[str, Any]:
    """The settings of one tensor, from those that mergekit resolved for it."""
    given = {name: parameters[_NAMES.get(name, name)] for name in method.defaults}
    each = {name: parameters[_NAMES.get(name, name)].values_for(models) for name in method.model_defaults}
    if any(None not in pair for pair in zip(each["n"], each["density"], strict=True)):
        raise ParameterError("n and density hold for the same model, and say the same. Keep one of them.")
    each["n"] = [method.model_defaults["n"] if n is None else round(n) for n in each["n"]]
    return method.settings(len(models), **{**given, "m": round(given["m"])}, **each)


if __name__ == "__main__":
    register()
    from mergekit.scripts.run_yaml import main

    main(prog_name="python -m heedful.merge.mergekit")
