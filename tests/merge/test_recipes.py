import contextlib
import copy
import re

import pytest
import torch
import yaml
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from heedful.errors import FileFormatError, ParameterError
from heedful.merge import available_methods
from heedful.merge._recipes import ModelReference, layer_depths, read_recipe

RECIPE = """
models:
  - model: org/base
  - model: org/math@main
    parameters:
      density: 0.25
      weight:
        - filter: mlp
          value: [0.2, 0.8]
        - filter: self_attn
          value: [0, 1, 0]
        - value: 1.5
  - model: org/code+org/code-lora
    parameters: {n: 32, weight: 1e-1}
merge_method: cabs
base_model: org/base
parameters: {lambda: 1.2, m: 128, int8_mask: true, weight: [{filter: norm, value: 7}]}
dtype: float32
out_dtype: bfloat16
exclude: ["score.*"]
"""


def write(tmp_path, text, name="recipe.yaml"):
    (tmp_path / name).write_text(text)
    return tmp_path / name


def recipe_of(**changes):
    return {
        "models": [{"model": "a", "parameters": {"weight": 1.0}}, {"model": "b", "parameters": {"weight": 0.5}}],
        "merge_method": "task_arithmetic",
        "base_model": "base",
        **changes,
    }


def with_parameters(**parameters):
    return recipe_of(models=[{"model": "a", "parameters": parameters}])


def test_a_recipe_says_what_every_model_and_tensor_gets(tmp_path):
    recipe = read_recipe(write(tmp_path, RECIPE))
    assert (recipe.method, recipe.base, recipe.dtype) == ("cabs", ModelReference("org/base"), torch.bfloat16)
    assert recipe.models == (ModelReference("org/math@main"), ModelReference("org/code", "org/code-lora"))
    assert recipe.exclude == ("score.*",)
    assert recipe.text == RECIPE
    assert recipe.warnings == ()
    settings = recipe.settings("model.layers.1.mlp.up_proj.weight", 0.25)
    assert settings["weight"] == [0.75 * 0.2 + 0.25 * 0.8, 0.1]
    assert settings["scale"] == [1.2, 1.2]
    assert settings["density"] == [0.25, None]
    assert settings["n"] == [64, 32]  # the first is what density stands in for
    assert settings["m"] == 128
    assert recipe.settings("model.layers.1.self_attn.q_proj.weight", 0.75)["weight"] == [0.5, 0.1]
    assert recipe.settings("model.norm.weight", 0.0)["weight"] == [1.5, 0.1]  # a model's own rules come first


def test_rules_that_hold_for_no_tensor_leave_it_to_the_recipes_own_parameters():
    recipe = with_parameters(weight=[{"filter": "mlp", "value": 0.5}]) | {"parameters": {"weight": 2.0}}
    assert read_recipe(recipe).settings("a.mlp.b", 0)["weight"] == [0.5]
    assert read_recipe(recipe).settings("a.attn.b", 0)["weight"] == [2.0]
    with pytest.raises(ParameterError, match=r"weight: no rule holds for the tensor a.attn.b. End the rules with"):
        read_recipe(recipe | {"parameters": {}}).settings("a.attn.b", 0)


@pytest.mark.parametrize(
    ("gradient", "depth", "expected"),
    [([1, 3], 0.0, 1.0), ([1, 3], 1.0, 3.0), ([1, 3], 0.5, 2.0), ([0, 1, 0], 0.75, 0.5), ([5], 0.3, 5.0)],
)
def test_gradients_run_linearly_over_the_depth(gradient, depth, expected):
    assert read_recipe(with_parameters(weight=gradient)).settings("x", depth)["weight"] == [expected]


def test_gradients_of_words_and_switches_take_the_value_before_and_counts_are_rounded():
    recipe = recipe_of(merge_method="cabs", parameters={"tail": ["drop", "keep"], "n": [10, 13], "m": 32})
    assert read_recipe(recipe).settings("x", 0.99)["tail"] == "drop"
    assert read_recipe(recipe).settings("x", 1.0)["tail"] == "keep"
    assert read_recipe(recipe).settings("x", 0.5)["n"] == [12, 12]  # 11.5, and round half to even
    ties = recipe_of(merge_method="ties", parameters={"normalize": [True, False]})
    assert [read_recipe(ties).settings("x", depth)["normalize"] for depth in (0.5, 1.0)] == [True, False]


def test_depth_counts_the_layers_of_each_stack_apart():
    names = [f"encoder.block.{i}.0.w" for i in range(3)] + [
        "decoder.block.0.w",
        "decoder.block.1.w",
        "embed.w",
        "h.0.w",
    ]
    assert list(layer_depths(names).values()) == [0.0, 0.5, 1.0, 0.0, 1.0, 0.0, 1.0]
    assert layer_depths(["0.weight", "1.weight", "2.weight", "layer1.weight"])["1.weight"] == 0.5


def test_a_slice_of_whole_models_is_a_list_of_models():
    sources = [{"model": name, "layer_range": [0, 3], "parameters": {"weight": w}} for name, w in (("a", 1), ("b", 2))]
    piece = {"sources": sources, "parameters": {"weight": 9, "lambda": 0.5}}
    recipe = read_recipe({"slices": [piece], "merge_method": "ties", "base_model": "base", "parameters": {"lambda": 3}})
    assert recipe.models == (ModelReference("a"), ModelReference("b"))
    assert recipe.n_layers == 3
    assert recipe.settings("x", 0)["weight"] == [1.0, 2.0]
    assert recipe.settings("x", 0)["scale"] == [0.5, 0.5]


def test_settings_of_the_whole_may_stand_beside_every_model():
    models = [{"model": name, "parameters": {"n": 4, "m": 16}} for name in "ab"]
    assert read_recipe(recipe_of(models=models, merge_method="cabs")).settings("x", 0)["m"] == 16
    models[1]["parameters"]["m"] = 32
    with pytest.raises(ParameterError, match=r"the models' parameters.m differ, and cabs takes one"):
        read_recipe(recipe_of(models=models, merge_method="cabs"))


def test_linear_counts_the_base_among_the_models_as_mergekit_does():
    recipe = {"models": [{"model": "a", "parameters": {"weight": 1}}], "merge_method": "linear", "base_model": "base"}
    assert read_recipe(recipe | {"parameters": {"weight": 2}}).settings("x", 0)["weight"] == [1.0, 2.0]
    with pytest.raises(ParameterError, match=r"base_model: base has no weight. List it among the models"):
        read_recipe(recipe)


def test_settings_without_effect_are_said():
    recipe = read_recipe(with_parameters(weight=1, density=0.5) | {"parameters": {"int8_mask": True, "tail": "drop"}})
    assert recipe.warnings == (
        "parameters.tail has no effect: task_arithmetic has no such setting.",
        "models[0].parameters.density has no effect: task_arithmetic has no such setting.",
    )


def test_long_forms_of_models_and_tokenizers(tmp_path):
    (tmp_path / "a+b").mkdir()
    models = [{"model": {"model": {"path": "x+y", "revision": "v1"}, "lora": "z"}}, {"model": tmp_path / "a+b"}]
    recipe = read_recipe(recipe_of(models=models, tokenizer={"source": "base"}))
    assert recipe.models == (ModelReference("x+y@v1", "z"), ModelReference(str(tmp_path / "a+b")))
    assert recipe.tokenizer == ModelReference("base")
    assert str(tmp_path / "a+b") in recipe.text
    assert read_recipe(recipe_of(tokenizer_source="a")).tokenizer == ModelReference("a")


WRONG = [
    (recipe_of(merge_metod="ties"), "merge_metod: there is no such key. Did you mean merge_method?"),
    (with_parameters(densty=0.5), "models[0].parameters.densty: there is no such key. Did you mean density?"),
    (
        recipe_of(models=[{"model": "a", "weight": 1}]),
        "models[0].weight: there is no such key. Known are model, parameters.",
    ),
    (recipe_of(merge_method="tie"), "merge_method must be one of linear, task_arithmetic"),
    (recipe_of(merge_method="tie"), "got 'tie'. Did you mean ties?"),
    (recipe_of(merge_method="slerp"), "bs_only, ca_only, pareto; got 'slerp'."),
    (recipe_of(merge_method=None), "merge_method must be one of"),
    (
        recipe_of(base_model=None),
        "base_model is missing: task_arithmetic merges what models add to it. Name their base.",
    ),
    (recipe_of(models=[]), "models must be a list of at least one model; got []."),
    (recipe_of(models={"model": "a"}), "models must be a list of at least one model"),
    (recipe_of(models=["a"]), "models[0] must be a mapping of model, parameters; got 'a'."),
    (recipe_of(models=None), "the recipe needs models: a list of model and parameters; it has none."),
    (recipe_of(models=None, modules={"x": 1}), "the recipe needs models: a list of model and parameters; got modules."),
    (recipe_of(models=[{"model": "a"}, {"model": "a"}]), "models[1].model is a a second time."),
    (recipe_of(models=[{"model": "a+b+c"}]), "models[0].model must be a model or model+adapter; got 'a+b+c'."),
    (recipe_of(models=[{"model": 3}]), "models[0].model must be the folder of a model, or its name on the hub; got 3."),
    (recipe_of(models=[{}]), "models[0].model must be the folder of a model, or its name on the hub; got None."),
    (
        recipe_of(models=None, slices=[{"sources": [{"model": "a", "layer_range": [0, 4]}]}, {}]),
        "slices: heedful merges",
    ),
    (
        recipe_of(models=None, slices=[{"sources": [{"model": "a", "layer_range": [2, 4]}]}]),
        "slices[0].sources: heedful merges whole models, so every layer_range must be [0, number of layers].",
    ),
    (with_parameters(weight="heavy"), "models[0].parameters.weight must be a number; got 'heavy'."),
    (with_parameters(weight=True), "models[0].parameters.weight must be a number; got True."),
    (with_parameters(weight=float("nan")), "models[0].parameters.weight must be a number; got nan."),
    (with_parameters(weight=[]), "models[0].parameters.weight is an empty list."),
    (with_parameters(weight=[1, "x"]), "models[0].parameters.weight[1] must be a number; got 'x'."),
    (
        with_parameters(weight=[{"filter": 3, "value": 1}]),
        "models[0].parameters.weight[0].filter must be a part of tensor",
    ),
    (with_parameters(weight=[{"value": {}}]), "models[0].parameters.weight[0].value must be a number; got {}."),
    (
        with_parameters(weight=[{"value": 1}, 2]),
        "models[0].parameters.weight[1] must be a mapping of filter, value; got 2.",
    ),
    (with_parameters(**{"lambda": 1, "scale": 2}), "models[0].parameters.scale: scale is set twice."),
    (
        with_parameters(n=1, density=0.5) | {"merge_method": "cabs"},
        "models[0].parameters has n and density, which say the same.",
    ),
    (with_parameters(n=1.5), "models[0].parameters.n must be a whole number; got 1.5."),
    (recipe_of(parameters={"normalize": 1}), "parameters.normalize must be true or false; got 1."),
    (recipe_of(parameters={"tail": 1}), "parameters.tail must be a word such as 'proportional'; got 1."),
    (recipe_of(parameters=[1]), "parameters must be a mapping of"),
    (recipe_of(dtype="int64"), "dtype must be one of float32, float16, bfloat16, float64; got 'int64'."),
    (recipe_of(exclude=[1]), "exclude must be a list of names, globs or re:…; got [1]."),
    (recipe_of(chat_template="chatml"), "chat_template must be Jinja text; got 'chatml'."),
    (recipe_of(tokenizer={"tokens": {"<x>": {}}}), "tokenizer: heedful changes no vocabulary"),
    (recipe_of(tokenizer={}, tokenizer_source="base"), "tokenizer and tokenizer_source say the same."),
    ({3: 4}, "3: there is no such key."),
]


@pytest.mark.parametrize(("recipe", "message"), WRONG)
def test_wrong_recipes_are_refused_with_the_path_of_the_key(recipe, message):
    with pytest.raises(ParameterError, match=re.escape(message)):
        read_recipe(recipe)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: 1\na: 2", "line 2 has the key 'a' again"),
        ("models: &x [*x]", "line 1 holds a cyclic anchor"),
        ("? [1]\n: 2", "line 1 has a key that is not a word"),
        ("a: !!python/object/apply:os.system ['true']", "not the YAML of a recipe"),
        ("a: !mine 1", "not the YAML of a recipe"),
        ("a: [1", "not the YAML of a recipe"),
        ("a: 2024-13-45", "not the YAML of a recipe"),
        ("a: !!int x", "not the YAML of a recipe"),
        ("a: 1\n---\nb: 2", "not the YAML of a recipe"),
        ("a: " + "[" * 100 + "]" * 100, "nests deeper than 40 levels"),
        ("[" * 100_000, "nests deeper"),
        (
            "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(30)),
            "more than",
        ),
        (
            "a0: &a0 {x: 1}\n"
            + "".join(f"a{i + 1}: &a{i + 1} {{<<: [{', '.join([f'*a{i}'] * 9)}]}}\n" for i in range(30)),
            "more",
        ),
        ("\0", "not the YAML of a recipe"),
        ("x" * 2**21, "no recipe needs more than"),
    ],
)
def test_yaml_that_no_recipe_needs_is_refused_at_once(text, message, tmp_path):
    with pytest.raises(FileFormatError, match=re.escape(message)):
        read_recipe(write(tmp_path, text))  # it would take for ever, where anchors were written out


@pytest.mark.parametrize("text", ["", "[]", "words", "3", "- a\n- b", "null"])
def test_documents_that_are_no_mapping_are_refused(text, tmp_path):
    with pytest.raises(ParameterError, match="the recipe must be a mapping of merge_method"):
        read_recipe(write(tmp_path, text))


def test_files_that_are_no_text_or_are_missing(tmp_path):
    (tmp_path / "recipe.yaml").write_bytes(b"\xff\xfe\x00\x01")
    with pytest.raises(FileFormatError, match="is not UTF-8 text"):
        read_recipe(tmp_path / "recipe.yaml")
    with pytest.raises(FileNotFoundError, match=r"none.yaml does not exist or is not a file"):
        read_recipe(tmp_path / "none.yaml")


def test_harmless_anchors_and_merge_keys_are_read(tmp_path):
    text = """
    models:
      - model: a
        parameters: &half {weight: 0.5}
      - model: b
        parameters: {<<: *half, density: 0.5}
    merge_method: ties
    base_model: base
    """
    assert read_recipe(write(tmp_path, text)).settings("x", 0)["weight"] == [0.5, 0.5]


WORDS = st.sampled_from(
    [*available_methods(), "weight", "n", "m", "base", "a", "a+b", "*", "mlp", "float32", "{x}", ""]
)
LEAVES = st.none() | st.booleans() | st.integers() | st.floats() | WORDS | st.text(max_size=5)
KEYS = st.sampled_from(
    [
        "models",
        "model",
        "parameters",
        "merge_method",
        "base_model",
        "slices",
        "sources",
        "layer_range",
        "value",
        "filter",
    ]
) | st.sampled_from(["weight", "density", "lambda", "n", "m", "normalize", "dtype", "tokenizer", "exclude", "x"])
ANY = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(KEYS, inner, max_size=4), max_leaves=12
)


def read_or_refuse(source):
    """A recipe whose settings can be asked for, or one of the errors that say what is wrong."""
    with contextlib.suppress(ParameterError, FileFormatError):
        read_recipe(source).settings("model.layers.0.mlp.weight", 0.5)


@given(ANY)
def test_any_nested_structure_is_a_recipe_or_refused(structure):
    read_or_refuse(structure if isinstance(structure, dict) else {"models": structure})


@given(st.data())
def test_any_mutation_of_a_recipe_is_a_recipe_or_refused(data):
    recipe = yaml.safe_load(RECIPE)
    for _ in range(data.draw(st.integers(1, 3))):
        place = recipe
        while True:  # a random place; there, a value is replaced, or a key added
            keys = list(place) if isinstance(place, dict) else list(range(len(place)))
            key = data.draw(st.sampled_from(keys)) if keys else None
            if key is None or not isinstance(place[key], (dict, list)) or data.draw(st.booleans()):
                break
            place = place[key]
        if isinstance(place, dict):
            place[data.draw(KEYS) if key is None or data.draw(st.booleans()) else key] = data.draw(ANY)
        elif key is not None:
            place[key] = data.draw(ANY)
    read_or_refuse(copy.deepcopy(recipe))


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.text(max_size=80)
    | st.builds(lambda text, i, c: text[:i] + c + text[i + 1 :], st.just(RECIPE), st.integers(0, 700), st.characters())
)
@example("- &a\n  *a")
def test_any_text_is_a_recipe_or_refused(tmp_path, text):
    (tmp_path / "recipe.yaml").write_bytes(text.encode("utf-8", "surrogatepass"))
    read_or_refuse(tmp_path / "recipe.yaml")
