import errno
import json
import os
import shutil
import signal
import subprocess
import sys
import warnings
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import save_file

import heedful
from heedful.errors import FileFormatError, HeedfulWarning, InputError, ParameterError
from heedful.merge import available_methods, merge_checkpoints, merge_state_dicts
from tests.merge.llamas import HIDDEN, VOCABULARY, mergekit, read_tensors, write_llama, write_state, write_tokenizer

FILES = {
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "README.md",
    "mergekit_config.yml",
}


@pytest.fixture(scope="module")
def llamas(tmp_path_factory):
    """Folders ``base``, ``math`` and ``code``; the same ``tied_…``, and in bfloat16 ``half_…``."""
    folder = tmp_path_factory.mktemp("llamas")
    for prefix, options in {"": {}, "tied_": {"tied": True}, "half_": {"dtype": torch.bfloat16}}.items():
        base = write_llama(folder / f"{prefix}base", **options)
        write_llama(folder / f"{prefix}math", seed=1, base=base, **options)
        write_llama(folder / f"{prefix}code", seed=2, base=base, **options)
    write_adapter(folder / "adapter")
    return folder


def write_adapter(folder, rank=2):
    generator = torch.Generator().manual_seed(5)
    modules = {f"model.layers.{i}.self_attn.q_proj": (HIDDEN, HIDDEN) for i in range(3)}
    state = {}
    for name, (rows, columns) in modules.items():
        state[f"base_model.model.{name}.lora_A.weight"] = torch.randn(rank, columns, generator=generator)
        state[f"base_model.model.{name}.lora_B.weight"] = 0.1 * torch.randn(rows, rank, generator=generator)
    folder.mkdir()
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    settings = {"peft_type": "LORA", "r": rank, "lora_alpha": 3, "target_modules": ["q_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps({**settings, "task_type": "CAUSAL_LM"}))


def recipe_of(folder, method="cabs", *, prefix="", math=None, code=None, **more):
    models = [
        {"model": str(folder / f"{prefix}{name}"), "parameters": {"weight": 1.0, **(parameters or {})}}
        for name, parameters in (("math", math), ("code", code))
    ]
    return {"models": models, "merge_method": method, "base_model": str(folder / f"{prefix}base"), **more}


def in_memory(folder, method="cabs", *, prefix="", **params):
    base, *models = (read_tensors(folder / f"{prefix}{name}") for name in ("base", "math", "code"))
    return merge_state_dicts(base, models, method=method, **params)


def assert_same(one, other):
    assert one.keys() == other.keys()
    assert [name for name in one if not torch.equal(one[name], other[name])] == []
    assert {name: x.dtype for name, x in one.items()} == {name: x.dtype for name, x in other.items()}


# What mergekit makes of the same recipes

_RULES = [{"filter": "mlp", "value": [0.2, 0.9]}, {"filter": "self_attn", "value": [0.0, 1.0, 0.3]}, {"value": 0.7}]
RECIPES = {
    "task_arithmetic": ("task_arithmetic", "", {"weight": _RULES}, {"weight": -0.3}, {"parameters": {"lambda": 1.2}}),
    "normalized": ("task_arithmetic", "", {"weight": 0.5}, {"weight": 0.25}, {"parameters": {"normalize": True}}),
    "tied": ("task_arithmetic", "tied_", {"weight": _RULES}, {"weight": 0.4}, {"tokenizer_source": "base"}),
    "ties": ("ties", "", {"weight": _RULES, "density": [0.3, 0.8]}, {"weight": 0.6, "density": 0.5}, {}),
    "ties_sum": (
        "ties", "", {"density": 0.3}, {"weight": 0.5},
        {"parameters": {"normalize": False, "density": 0.6, "lambda": [0.5, 1.5], "int8_mask": True}},
    ),
    "breadcrumbs": ("breadcrumbs", "", {"density": 0.5, "gamma": 0.1}, {"weight": 0.5, "density": 0.9, "gamma": 0.2}, {}),
    "dare_linear": ("dare_linear", "", {"density": 0.5}, {"weight": 0.0}, {}),
    "dare_ties": ("dare_ties", "", {"density": 0.5}, {"weight": 0.0}, {}),
    "half": ("task_arithmetic", "half_", {"weight": 0.5}, {"weight": 0.3}, {"dtype": "bfloat16"}),
    "half_from_float": ("ties", "", {"density": 0.5}, {"density": 0.5}, {"dtype": "float32", "out_dtype": "bfloat16"}),
}  # fmt: skip


@pytest.fixture(scope="module")
def recipes(llamas):
    found = {
        name: recipe_of(llamas, method, prefix=prefix, math=math, code=code, dtype="float32") | more
        for name, (method, prefix, math, code, more) in RECIPES.items()
    }
    linear = recipe_of(llamas, "linear", math={"weight": _RULES}, code={"weight": 0.4})
    found["linear"] = {key: value for key, value in linear.items() if key != "base_model"}
    found["linear_with_base"] = linear | {"parameters": {"weight": 0.25, "normalize": False}}
    sources = [
        {**model, "layer_range": [0, 3]}
        for model in [*recipe_of(llamas, math={"weight": [0, 1]})["models"], {"model": str(llamas / "base")}]
    ]
    found["slice"] = {"slices": [{"sources": sources}], "merge_method": "ties", "base_model": str(llamas / "base")}
    found["slice"] |= {"parameters": {"density": 0.5}}
    found["adapter"] = recipe_of(llamas, "task_arithmetic")
    found["adapter"]["models"][1] = {"model": f"{llamas / 'base'}+{llamas / 'adapter'}", "parameters": {"weight": 0.5}}
    return {name: yaml.safe_dump(recipe, sort_keys=False) for name, recipe in found.items()}


@pytest.fixture(scope="module")
def theirs(recipes, tmp_path_factory):
    return mergekit(recipes, tmp_path_factory.mktemp("mergekit"))


def ours(name, recipes, tmp_path, **options):
    (tmp_path / "recipe.yaml").write_text(recipes[name])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        merge_checkpoints(tmp_path / "recipe.yaml", tmp_path / "out", **options)
    return read_tensors(tmp_path / "out")


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "task_arithmetic",
        "normalized",
        "tied",
        "ties",
        "ties_sum",
        "breadcrumbs",
        "linear",
        "linear_with_base",
        "slice",
        "adapter",
    ],
)
def test_a_mergekit_recipe_gives_what_mergekit_gives(name, recipes, theirs, tmp_path):
    merged = ours(name, recipes, tmp_path)
    assert merged.keys() == theirs[name].keys()
    assert ("lm_head.weight" in merged) == (name != "tied")
    for tensor, expected in theirs[name].items():
        assert merged[tensor].dtype == torch.float32
        torch.testing.assert_close(
            merged[tensor], expected, rtol=0, atol=1e-6, msg=lambda text, t=tensor: f"{t}: {text}"
        )


@pytest.mark.slow
@pytest.mark.parametrize("name", ["dare_linear", "dare_ties"])
def test_dare_drops_at_random_as_mergekit_does(name, recipes, theirs, llamas, tmp_path):
    base, model = read_tensors(llamas / "base"), read_tensors(llamas / "math")
    for merged in (ours(name, recipes, tmp_path), theirs[name]):
        kept = total = 0
        for tensor, start in base.items():
            delta, full = merged[tensor] - start, model[tensor] - start
            support = delta != 0
            kept, total = kept + int(support.sum()), total + support.numel()
            # The draws differ, yet each keeps the L1 norm of the vector, and the proportions of what is left.
            torch.testing.assert_close(delta.abs().sum(), full.abs().sum(), rtol=1e-4, atol=0)
            ratio = (delta / full)[support & (full.abs() > 1e-3)]
            torch.testing.assert_close(ratio, ratio.median().expand_as(ratio), rtol=2e-3, atol=0)
        assert abs(kept / total - 0.5) < 0.03  # eight standard deviations of 17640 draws


@pytest.mark.slow
def test_in_half_precision_ours_is_the_merge_in_float32_rounded_once(recipes, theirs, llamas, tmp_path):
    """mergekit computes in the recipe's dtype: its result is off by up to a step of the numbers that it was made of."""
    merged = ours("half", recipes, tmp_path)
    exact = in_memory(llamas, "task_arithmetic", prefix="half_", weight=[0.5, 0.3], dtype=torch.float32)
    inputs = [read_tensors(llamas / f"half_{name}") for name in ("base", "math", "code")]
    for name, tensor in merged.items():
        assert torch.equal(tensor, exact[name].bfloat16())
        size = torch.stack([exact[name], *(state[name].float() for state in inputs)]).abs().amax(dim=0)
        step = 2.0 ** (size.log2().floor() - 7)
        assert ((theirs["half"][name].float() - tensor.float()).abs() <= step).all()
    shutil.rmtree(tmp_path / "out")
    assert_same(ours("half_from_float", recipes, tmp_path), theirs["half_from_float"])


# What is written, and that nothing else changes it


@pytest.mark.parametrize("method", sorted(available_methods()))
def test_the_folder_holds_what_merging_in_memory_gives_bit_for_bit(method, llamas, tmp_path):
    recipe = recipe_of(llamas, method, math={"weight": 0.7}, code={"weight": 0.4})
    whole = {"density": 0.5} if "density" in available_methods()[method].model_defaults else {}
    if method == "linear":
        del recipe["base_model"]
    report = merge_checkpoints(recipe | {"parameters": whole}, tmp_path / "out", random_state=3, shard_size="30KB")
    merged = read_tensors(tmp_path / "out")
    assert_same(merged, in_memory(llamas, method, weight=[0.7, 0.4], random_state=3, **whole))
    assert report.out == tmp_path / "out"
    assert report.n_tensors == report.n_merged == len(merged) == 30
    assert report.n_parameters == sum(x.numel() for x in merged.values())
    assert report.to_dict()["n_bytes"] == 4 * report.n_parameters


@pytest.mark.parametrize("prefix", ["", "tied_"])
def test_the_merged_model_loads_with_strict_keys_and_computes_what_the_one_in_memory_does(prefix, llamas, tmp_path):
    from transformers import AutoModelForCausalLM, AutoTokenizer

    merge_checkpoints(recipe_of(llamas, prefix=prefix), tmp_path / "out", shard_size="20KB")
    loaded, info = AutoModelForCausalLM.from_pretrained(
        tmp_path / "out", local_files_only=True, output_loading_info=True
    )
    assert not any(info.values())
    expected = AutoModelForCausalLM.from_pretrained(llamas / f"{prefix}base", local_files_only=True)
    state = in_memory(llamas, prefix=prefix)
    expected.load_state_dict(state if not prefix else state | {"lm_head.weight": state["model.embed_tokens.weight"]})
    tokens = torch.arange(2, 14)[None]
    with torch.no_grad():
        assert torch.equal(loaded(tokens).logits, expected(tokens).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out", local_files_only=True).encode("w7 w3") == [7, 3]


@pytest.mark.parametrize("method", ["cabs", "ties", "task_arithmetic"])
def test_a_merge_of_the_base_with_itself_is_the_base_bit_for_bit(method, llamas, tmp_path):
    base = str(llamas / "half_base")
    recipe = {"models": [{"model": base}], "merge_method": method, "base_model": base}
    with pytest.warns(HeedfulWarning, match="every model is the base .*half_base, which is copied"):
        report = merge_checkpoints(recipe, tmp_path / "out")
    assert report.n_merged == 0
    assert_same(read_tensors(tmp_path / "out"), read_tensors(llamas / "half_base"))
    shutil.copytree(base, tmp_path / "copy")
    recipe["models"][0]["model"] = str(tmp_path / "copy")
    with pytest.warns(HeedfulWarning, match="copy equals .*half_base: its task vector is zero"):
        merge_checkpoints(recipe, tmp_path / "again")
    assert_same(read_tensors(tmp_path / "again"), read_tensors(llamas / "half_base"))


def test_the_folder_is_laid_out_as_hugging_face_does(llamas, tmp_path):
    recipe = recipe_of(llamas, chat_template="{{ messages }}", dtype="bfloat16")
    (tmp_path / "recipe.yaml").write_text(text := yaml.safe_dump(recipe) + "# ``` as written\n")
    merge_checkpoints(tmp_path / "recipe.yaml", tmp_path / "out", shard_size="20KB")
    names = {path.name for path in (tmp_path / "out").iterdir()}
    shards = {name for name in names if name.endswith(".safetensors")}
    assert len(shards) > 1
    assert names - shards == FILES | {"model.safetensors.index.json", "chat_template.jinja"}
    assert (tmp_path / "out" / "mergekit_config.yml").read_text() == text
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ messages }}"
    assert (tmp_path / "out" / "tokenizer.json").read_bytes() == (llamas / "base" / "tokenizer.json").read_bytes()
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config == json.loads((llamas / "base" / "config.json").read_text()) | {"torch_dtype": "bfloat16"}
    assert all(tensor.dtype == torch.bfloat16 for tensor in read_tensors(tmp_path / "out").values())
    _, matter, card = (tmp_path / "out" / "README.md").read_text().split("---\n", 2)
    assert yaml.safe_load(matter) == {"library_name": "transformers", "tags": ["mergekit", "merge"]}
    assert f"````yaml\n{text}````" in card


def test_shard_size_changes_no_values_and_dtype_rounds_them_once(llamas, tmp_path):
    one = merge_checkpoints(recipe_of(llamas), tmp_path / "one", shard_size=10**9).out
    many = merge_checkpoints(recipe_of(llamas), tmp_path / "many", shard_size=5000).out
    assert len(list(one.glob("*.safetensors"))) == 1
    assert len(list(many.glob("*.safetensors"))) > 10
    assert_same(read_tensors(one), read_tensors(many))
    half = merge_checkpoints(recipe_of(llamas), tmp_path / "half", dtype="bfloat16").out
    assert_same(read_tensors(half), {name: x.bfloat16() for name, x in read_tensors(one).items()})


def test_models_may_be_files(llamas, tmp_path):
    recipe = recipe_of(llamas)
    for entry in recipe["models"]:
        entry["model"] += "/model.safetensors"
    recipe["base_model"] += "/model.safetensors"
    merge_checkpoints(recipe, tmp_path / "out")
    assert_same(read_tensors(tmp_path / "out"), in_memory(llamas))
    assert set(os.listdir(tmp_path / "out")) == {"model.safetensors", "README.md", "mergekit_config.yml"}


def test_order_by_norm_puts_the_longer_vector_first(llamas, tmp_path):
    recipe = recipe_of(llamas, parameters={"order": "norm", "n": 200})
    merge_checkpoints(recipe, tmp_path / "out")
    assert_same(read_tensors(tmp_path / "out"), in_memory(llamas, order="norm", n=200))
    one, other = (in_memory(llamas, n=200, order=order)["model.norm.weight"] for order in ([0, 1], [1, 0]))
    assert not torch.equal(one, other)  # so the order matters


def test_excluded_tensors_stay_the_bases_and_may_differ(llamas, tmp_path):
    base = read_tensors(llamas / "base")
    longer = read_tensors(llamas / "math")
    longer["lm_head.weight"] = torch.zeros(VOCABULARY + 3, HIDDEN)
    write_state(tmp_path / "longer", longer | {"score.weight": torch.zeros(2, 2)})
    recipe = recipe_of(llamas)
    recipe["models"][0]["model"] = str(tmp_path / "longer")
    with pytest.raises(InputError, match=r"longer has besides score.weight"):
        merge_checkpoints(recipe, tmp_path / "out")
    with pytest.raises(InputError, match=r"lm_head.weight has shape \(43, 24\) in .*longer, and \(40, 24\) in .*base"):
        merge_checkpoints(recipe | {"exclude": ["score.*"]}, tmp_path / "out")
    report = merge_checkpoints(recipe | {"exclude": ["score.*", "re:lm_head"]}, tmp_path / "out")
    merged = read_tensors(tmp_path / "out")
    assert torch.equal(merged["lm_head.weight"], base["lm_head.weight"])
    assert (report.n_tensors, report.n_merged) == (30, 29)
    expected = in_memory(llamas, exclude=["lm_head.weight"])
    assert_same(merged, expected)


def test_what_stands_after_the_plus_must_be_an_adapter(llamas, tmp_path):
    recipe = recipe_of(llamas)
    recipe["models"][0]["model"] = f"{llamas / 'base'}+{llamas / 'math'}"
    refused(recipe, tmp_path, InputError, r"base\+.*math: .*math is no adapter\. Give the folder of one after the \+\.")


def test_names_of_the_hub_are_found_in_the_local_cache(llamas, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    snapshot = tmp_path / "cache" / "models--org--math" / "snapshots" / ("0" * 40)
    shutil.copytree(llamas / "math", snapshot)
    (snapshot.parents[1] / "refs").mkdir()
    (snapshot.parents[1] / "refs" / "main").write_text("0" * 40)
    recipe = recipe_of(llamas)
    recipe["models"][0]["model"] = "org/math"
    merge_checkpoints(recipe, tmp_path / "out")
    assert_same(read_tensors(tmp_path / "out"), in_memory(llamas))
    assert "base_model:\n- org/math\n" in (tmp_path / "out" / "README.md").read_text()
    recipe["models"][1]["model"] = "org/absent"
    with pytest.raises(InputError, match=r"org/absent is neither a folder nor .* hf download org/absent"):
        merge_checkpoints(recipe, tmp_path / "out2")


# Interrupted merges

KILLED = """
import os, signal, sys
import heedful
from heedful.merge import merge_checkpoints

def sink(event):
    if event.done == int(sys.argv[3]):
        os.kill(os.getpid(), signal.SIGKILL)

with heedful.progress(sink):
    merge_checkpoints(sys.argv[1], sys.argv[2], shard_size="15KB", random_state=1)
"""


def killed_after(n_tensors, recipe, out):
    done = subprocess.run([sys.executable, "-c", KILLED, str(recipe), str(out), str(n_tensors)], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr
    assert not out.exists()


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def resumed(recipe, out, **options):
    """Merge again, and say how many tensors were still to be done."""
    events = []
    with heedful.progress(events.append):
        merge_checkpoints(recipe, out, shard_size="15KB", **{"random_state": 1, **options})
    return events[-1].total


@pytest.mark.slow
def test_a_merge_that_was_killed_goes_on_and_ends_with_the_same_bytes(llamas, tmp_path):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(llamas, "dare_ties", parameters={"density": 0.3})))
    whole, broken = tmp_path / "whole" / "out", tmp_path / "broken" / "out"
    whole.parent.mkdir()
    broken.parent.mkdir()
    merge_checkpoints(recipe, whole, shard_size="15KB", random_state=1)
    killed_after(17, recipe, broken)
    assert resumed(recipe, broken) < 30
    assert contents(broken) == contents(whole)
    assert os.listdir(broken.parent) == ["out"]


@pytest.mark.slow
def test_what_was_left_by_another_merge_is_not_taken(llamas, tmp_path):
    shutil.copytree(llamas, tmp_path / "llamas")
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(text := yaml.safe_dump(recipe_of(tmp_path / "llamas")))
    killed_after(17, recipe, tmp_path / "out")

    def still_to_do(case, **options):
        """When the same merge, but for ``options`` and what the caller changed, finds what was left."""
        shutil.copytree(tmp_path / ".out.partial", tmp_path / case / ".out.partial")
        return resumed(recipe, tmp_path / case / "out", **options)

    assert still_to_do("same") < 30
    assert still_to_do("seed", random_state=2) == 30
    assert still_to_do("dtype", dtype="float16") == 30
    assert still_to_do("fresh", fresh=True) == 30
    recipe.write_text(text.replace("weight: 1.0", "weight: 0.5"))
    assert still_to_do("recipe") == 30
    recipe.write_text(f"# a comment changes nothing\n{text}")
    assert still_to_do("comment") < 30
    (tmp_path / "llamas" / "code" / "model.safetensors").touch()
    assert still_to_do("input") == 30


# Bad input


def damaged(llamas, tmp_path, change):
    """A recipe whose second model is ``code`` after ``change(state)``."""
    state = read_tensors(llamas / "code")
    change(state)
    write_state(tmp_path / "damaged", state)
    recipe = recipe_of(llamas)
    recipe["models"][1]["model"] = str(tmp_path / "damaged")
    return recipe


def refused(recipe, tmp_path, error, message, **options):
    with pytest.raises(error, match=message):
        merge_checkpoints(recipe, tmp_path / "out", **options)
    assert not (tmp_path / "out").exists()


def test_models_that_do_not_fit_are_refused(llamas, tmp_path):
    recipe = damaged(llamas, tmp_path, lambda state: state.pop("model.norm.weight"))
    refused(recipe, tmp_path, InputError, r"damaged lacks model.norm.weight. Are they of one architecture\?")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_numbers_that_are_not_finite_are_refused_with_their_tensor_and_model(value, llamas, tmp_path):
    recipe = damaged(llamas, tmp_path, lambda state: state["model.norm.weight"][3:5].fill_(value))
    refused(recipe, tmp_path, InputError, r"model.norm.weight of .*damaged has .*entries that are NaN or infinite")


def test_quantised_checkpoints_are_refused(llamas, tmp_path):
    def quantise(state):
        state["lm_head.weight"] = torch.ones(VOCABULARY, HIDDEN, dtype=torch.int8)

    refused(
        damaged(llamas, tmp_path, quantise),
        tmp_path,
        InputError,
        r"damaged is quantised: lm_head.weight has dtype int8",
    )


def test_pickles_that_need_code_are_refused(llamas, tmp_path):
    shutil.copytree(llamas / "code", tmp_path / "pickled")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save({"model.norm.weight": Path("x")}, tmp_path / "pickled" / "pytorch_model.bin")
    recipe = recipe_of(llamas)
    recipe["models"][1]["model"] = str(tmp_path / "pickled")
    refused(recipe, tmp_path, FileFormatError, r"pickled")


def test_a_full_disk_is_said_and_what_is_complete_is_kept(llamas, tmp_path, monkeypatch):
    left = [20]

    class Full:
        def __init__(self, file):
            self._file = file

        def __getattr__(self, name):
            return getattr(self._file, name)

        def write(self, content):
            left[0] -= 1
            if left[0] < 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return self._file.write(content)

    opened = Path.open
    monkeypatch.setattr(
        Path,
        "open",
        lambda path, mode="r", **more: Full(opened(path, mode, **more)) if mode == "wb" else opened(path, mode, **more),
    )
    refused(recipe_of(llamas), tmp_path, OSError, "the disk is full: .*out needs .* more bytes", shard_size="15KB")
    monkeypatch.undo()
    assert resumed(recipe_of(llamas), tmp_path / "out", random_state=0) < 30


def test_an_output_that_is_there_is_refused_unless_told(llamas, tmp_path):
    merge_checkpoints(recipe_of(llamas), tmp_path / "out")
    before = contents(tmp_path / "out")
    with pytest.raises(FileExistsError, match=r"out exists. Choose another name, or say overwrite"):
        merge_checkpoints(recipe_of(llamas, "ties"), tmp_path / "out")
    assert contents(tmp_path / "out") == before
    merge_checkpoints(recipe_of(llamas, "ties"), tmp_path / "out", overwrite=True)
    assert_same(read_tensors(tmp_path / "out"), in_memory(llamas, "ties"))


def test_a_slice_of_some_layers_is_refused(llamas, tmp_path):
    sources = [{"model": str(llamas / name), "layer_range": [0, 2]} for name in ("math", "code")]
    recipe = {"slices": [{"sources": sources}], "merge_method": "ties", "base_model": str(llamas / "base")}
    refused(recipe, tmp_path, ParameterError, r"layer_range ends at 2, and .*base has 3 layers")


def test_a_tokenizer_is_taken_where_all_vocabularies_are_one(llamas, tmp_path):
    shutil.copytree(llamas / "math", tmp_path / "chatty")
    (tmp_path / "chatty" / "chat_template.jinja").write_text("{{ chatty }}")
    recipe = recipe_of(llamas, tokenizer_source=str(tmp_path / "chatty"))
    recipe["models"][0]["model"] = str(tmp_path / "chatty")
    merge_checkpoints(recipe, tmp_path / "out")
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "{{ chatty }}"
    write_tokenizer(tmp_path / "chatty", n_words=VOCABULARY - 1)
    shutil.rmtree(tmp_path / "out")
    refused(
        recipe, tmp_path, InputError, r"tokenizer_source: .* has another vocabulary than .*chatty, and heedful moves no"
    )
    refused(recipe | {"tokenizer_source": "base"}, tmp_path, InputError, r"tokenizer_source: .*chatty has another")
    (tmp_path / "chatty" / "tokenizer.json").write_text("{}")
    refused(recipe, tmp_path, FileFormatError, r"tokenizer.json cannot be read as a tokenizer")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"parameters": {"n": 300}}, "weight: n must be at most m"),
        ({"parameters": {"density": 1.5}}, "weight: density must be a number > 0 and <= 1; got 1.5"),
        ({"parameters": {"tail": "half"}}, "tail must be one of 'proportional', 'drop', 'keep'; got 'half'"),
        ({"parameters": {"density": [{"filter": "norm", "value": -1}]}}, "layernorm.weight: density must be a number"),
        ({"parameters": {"n": -1}}, "n must be an int >= 0; got -1"),
        ({"parameters": {"m": 0}}, "m must be an int >= 1; got 0"),
    ],
)
def test_settings_out_of_range_are_refused_with_the_tensor_before_anything_is_written(
    change, message, llamas, tmp_path
):
    refused(recipe_of(llamas) | change, tmp_path, ParameterError, message)
    assert os.listdir(tmp_path) == []


def test_devices_that_are_not_there_are_refused(llamas, tmp_path):
    refused(
        recipe_of(llamas),
        tmp_path,
        ParameterError,
        r"device: there is no 'abacus' here \(.*\). Try cpu",
        device="abacus",
    )


def test_settings_without_effect_are_warned_of(llamas, tmp_path):
    recipe = recipe_of(llamas, "ties", code={"density": 0.5}, parameters={"tail": "drop"})
    with pytest.warns(HeedfulWarning, match=r"parameters.tail has no effect: ties has no such setting"):
        merge_checkpoints(recipe, tmp_path / "out")
