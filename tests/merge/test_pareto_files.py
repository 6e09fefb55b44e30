"""Pareto sets on disk: what memory gives, from shards to an ordinary model, bit for bit."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file

from heedful._checkpoints import open_checkpoint
from heedful._machine import peak_memory
from heedful.errors import FileFormatError, HeedfulWarning, InputError, ParameterError
from heedful.merge import ParetoSet, fit_pareto_set
from heedful.merge._pareto_files import FACTORS_FILE, fit_files, open_set, pick_files

NAMES = ("math", "code")
SETTINGS = {"rank": 4, "random_state": 0}


def tiny_llama(seed, *, tie=False, dtype=torch.float32):
    """A Llama of two layers and 16 channels."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=32,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        tie_word_embeddings=tie,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LlamaForCausalLM(config).to(dtype)


@pytest.fixture
def folders(tmp_path, request):
    """A base and two models near it, as Hugging Face folders."""
    options = getattr(request, "param", {})
    base = tiny_llama(0, **options)
    base.save_pretrained(tmp_path / "base")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    generator = torch.Generator().manual_seed(1)
    for name in NAMES:
        model = tiny_llama(0, **options)
        with torch.no_grad():
            for p in model.parameters():
                p.add_(0.1 * torch.randn(p.shape, generator=generator).to(p.dtype))
        model.save_pretrained(tmp_path / name)
    return tmp_path


def fit(folder, out="set", *, parameters=SETTINGS, **settings):
    base = open_checkpoint(folder / "base")
    models = {name: open_checkpoint(folder / name) for name in NAMES}
    settings = {"files": {"tokenizer.json": folder / "base" / "tokenizer.json"}, **settings}
    return fit_files(base, models, folder / out, key="test", parameters=parameters, **settings)


def fit_in_memory(folder, **settings):
    states = {name: load_file(folder / name / "model.safetensors") for name in ("base", *NAMES)}
    return fit_pareto_set(states.pop("base"), states, **{**SETTINGS, **settings})


@pytest.mark.parametrize(
    "folders", [{}, {"tie": True}, {"dtype": torch.bfloat16}], indirect=True, ids=["plain", "tied", "half"]
)
@pytest.mark.parametrize("shard_size", ["5GB", 3000])
def test_what_is_picked_is_the_state_dict_of_the_set_bit_for_bit(folders, shard_size):
    report = fit(folders, shard_size=shard_size)
    pareto = fit_in_memory(folders)
    assert report.models == NAMES
    assert report.n_extra_parameters == pareto.n_extra_parameters
    assert report.n_matrices == len(pareto.factors) == (14 if "lm_head.weight" not in pareto.base else 15)
    assert report.n_parameters == sum(tensor.numel() for tensor in pareto.base.values())
    for preference in ({"math": 1}, {"math": 0.7, "code": 0.3}):
        picked = pick_files(folders / "set", preference, folders / "picked", shard_size=shard_size, overwrite=True)
        expected = pareto.state_dict(preference)
        with open_checkpoint(picked) as source:
            assert set(source.names) == set(expected)
            for name in source.names:
                assert torch.equal(source.get(name), expected[name]), name


@pytest.mark.parametrize("folders", [{}, {"tie": True}], indirect=True, ids=["plain", "tied"])
@pytest.mark.parametrize("shard_size", ["5GB", 3000])
def test_both_folders_load_as_ordinary_models_and_keep_the_tokenizer(folders, shard_size):
    from transformers import LlamaForCausalLM

    fit(folders, shard_size=shard_size)
    pick_files(folders / "set", {"code": 1}, folders / "picked", shard_size=shard_size)
    pareto = ParetoSet.load(folders / "set")
    tokens = torch.arange(8)[None]
    for folder, state in {"set": dict(pareto.base), "picked": pareto.state_dict({"code": 1})}.items():
        model = LlamaForCausalLM.from_pretrained(folders / folder).eval()
        twin = tiny_llama(5, tie=model.config.tie_word_embeddings).eval()
        twin.load_state_dict(state, strict=not model.config.tie_word_embeddings)
        twin.tie_weights()
        with torch.no_grad():
            assert torch.equal(model(tokens).logits, twin(tokens).logits)
        assert (folders / folder / "tokenizer.json").read_text() == "{}"
    assert not (folders / "picked" / FACTORS_FILE).exists()


def test_a_folder_loads_as_the_set_in_memory_does(folders):
    fit(folders, parameters={"rank": 3, "lambda": 0.4, "scalarization": "linear"})
    loaded, expected = (
        ParetoSet.load(folders / "set"),
        fit_in_memory(folders, rank=3, start_scale=0.4, scalarization="linear"),
    )
    assert loaded.names == expected.names
    for name, tensor in expected.state_dict([1, 3]).items():
        assert torch.equal(loaded.state_dict([1, 3])[name], tensor)


def test_the_dtype_asked_for_is_written_and_excluded_tensors_stay_the_base(folders):
    fit(folders, dtype=torch.bfloat16, exclude=["lm_head.*"])
    with open_checkpoint(folders / "set") as source, open_checkpoint(folders / "base") as base:
        assert {source.info(name).dtype for name in source.names} == {torch.bfloat16}
        assert torch.equal(source.get("lm_head.weight"), base.get("lm_head.weight").bfloat16())
    assert "lm_head.weight" not in open_set(folders / "set").factors


def test_an_interrupted_fit_goes_on_and_ends_with_the_same_bytes(folders, monkeypatch):
    fit(folders, "whole", shard_size=3000)
    from heedful.merge.pareto_merging._data_free import DataFreeFit

    added, add = [], DataFreeFit.add

    def failing(self, name):
        if len(added) == 12:
            raise KeyboardInterrupt
        added.append(name)
        return add(self, name)

    with monkeypatch.context() as patch:
        patch.setattr(DataFreeFit, "add", failing)
        with pytest.raises(KeyboardInterrupt):
            fit(folders, "broken", shard_size=3000)
    assert not (folders / "broken").exists()
    kept = {path.name: path.stat().st_ino for path in folders.glob(".broken.partial/*/*.safetensors")}
    assert kept
    fit(folders, "broken", shard_size=3000)
    contents = {path.name: path.read_bytes() for path in (folders / "whole").iterdir()}
    assert contents == {path.name: path.read_bytes() for path in (folders / "broken").iterdir()}
    assert kept.items() <= {path.name: path.stat().st_ino for path in (folders / "broken").iterdir()}.items()
    fit(folders, "broken", parameters={"rank": 2}, overwrite=True)  # other settings: another set
    assert open_set(folders / "broken").factors["lm_head.weight"].A.shape[1] == 2


def test_another_base_than_the_fitted_one_is_found_out(folders):
    fit(folders)
    path = folders / "set" / "model.safetensors"
    tensors = load_file(path)
    tensors["model.norm.weight"] += 1
    save_file(tensors, path, metadata={"format": "pt"})
    message = (
        r"^model\.norm\.weight in .*set is not the tensor that pareto\.safetensors belongs to: its digest differs\."
    )
    with pytest.raises(InputError, match=message):
        pick_files(folders / "set", {"math": 1}, folders / "picked")
    with pytest.raises(InputError, match=message):
        ParetoSet.load(folders / "set")
    assert not (folders / "picked").exists()
    del tensors["model.norm.weight"]
    save_file(tensors, path, metadata={"format": "pt"})
    with pytest.raises(InputError, match=r"holds other tensors than its pareto\.safetensors belongs to\. Fit again\.$"):
        pick_files(folders / "set", {"math": 1}, folders / "picked")


def test_what_is_no_set_is_refused(folders, tmp_path):
    with pytest.raises(
        FileNotFoundError, match=r"base has no pareto\.safetensors, so it is no Pareto set\. Write one with"
    ):
        pick_files(folders / "base", {"math": 1}, folders / "picked")
    fit(folders)
    with pytest.raises(InputError, match=r"^The preference speaks of maths; the models are math, code\.$"):
        pick_files(folders / "set", {"maths": 1}, folders / "picked")
    fit_in_memory(folders).save(tmp_path / "alone.safetensors")
    (folders / "set" / FACTORS_FILE).write_bytes((tmp_path / "alone.safetensors").read_bytes())
    with pytest.raises(FileFormatError, match=r"pareto\.safetensors lacks or garbles a part of a Pareto set"):
        open_set(folders / "set")
    fit(folders, "other")
    with pytest.raises(FileFormatError, match=r"belongs to the other files of its folder; load the folder"):
        ParetoSet.load(folders / "other" / FACTORS_FILE)


def test_outputs_are_refused_where_something_is(folders):
    fit(folders)
    with pytest.raises(FileExistsError, match="exists"):
        fit(folders)
    fit(folders, overwrite=True)
    pick_files(folders / "set", {"math": 1}, folders / "picked")
    with pytest.raises(FileExistsError, match="exists"):
        pick_files(folders / "set", {"math": 1}, folders / "picked")
    with pytest.raises(
        ParameterError, match=r"is the folder of the set, which one of its models would replace\. Choose another"
    ):
        pick_files(folders / "set", {"math": 1}, folders / "picked" / ".." / "set", overwrite=True)
    assert ParetoSet.load(folders / "set").names == NAMES


def test_the_card_of_a_picked_model_tells_its_preference(folders):
    fit(folders, files={"README.md": "# A set\n"})
    pick_files(folders / "set", {"math": 3, "code": 1}, folders / "picked")
    told = "This is the model of that Pareto set for the preference math 0.75, code 0.25."
    assert (folders / "picked" / "README.md").read_text() == f"# A set\n\n{told}\n"


def test_bad_settings_are_explained(folders):
    with pytest.raises(
        ParameterError, match=r"^Pareto merging has no setting density\. It has start, start_scale, include, rank"
    ):
        fit(folders, parameters={"density": 0.2})
    base, math = open_checkpoint(folders / "base"), open_checkpoint(folders / "math")
    with pytest.raises(InputError, match=r"^A Pareto set needs two models or more, got 1"):
        fit_files(base, {"math": math}, folders / "one", key="", parameters={})
    with pytest.warns(HeedfulWarning, match=r"^rank 16 is more than"):
        fit(folders, parameters={"rank": 16, "include": ["*k_proj*"]})


def test_the_report_has_json_types(folders):
    report = fit(folders).to_dict()
    assert json.loads(json.dumps(report)) == report


def test_memory_is_that_of_a_few_copies_of_the_largest_tensor(tmp_path):
    """Ten matrices of 4 MiB in each of three checkpoints: 120 MiB in all."""
    generator = torch.Generator().manual_seed(0)
    for name in ("base", *NAMES):
        (tmp_path / name).mkdir()
        rows = torch.randn(
            30, 1024, 1, generator=generator
        )  # of rank 1 beside the others, which is fitted in few sweeps
        save_file({f"layers.{i}.weight": rows[i] * rows[i].T for i in range(10)}, tmp_path / name / "model.safetensors")
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    fit(tmp_path, "first", shard_size="8MB")  # imports and thread pools
    with peak_memory() as peak:
        fit(tmp_path, shard_size="8MB")
    # (K + 3) copies of 4 MiB, and room for allocators; the second run can use what the first has let go.
    assert peak.mib < 50
    with peak_memory() as peak:
        pick_files(tmp_path / "set", {"math": 1}, tmp_path / "picked", shard_size="8MB")
    assert peak.mib < 50
