"""Every arm on a miniature task, and what makes the comparison fair."""

import copy
import functools
import itertools
import pickle
from typing import Any

import numpy as np
import pytest
import torch

from heedful import data
from heedful.errors import InputError
from heedful.evidence import Budget, Task
from heedful.studies import boa
from heedful.studies._byte_llama import Pieces, text_bytes
from heedful.studies.boa import ATTENTION, Quantization, attention_errors, study
from tests.data.test_gguf import llama, tokenizer

BUDGET = Budget(seeds=1, steps=2)
ARMS = [(name, point) for name, arm in study.arms.items() for point in arm.points]


@functools.cache
def model():
    return llama(64)


def ids(n, seed):
    return torch.randint(64, (n, 16), generator=torch.Generator().manual_seed(seed))


def miniature(**changes):
    held_out = Pieces(ids(4, 1), 4 * 15)
    options: dict[str, Any] = {"bits": 2, "exclude": ATTENTION} | changes
    return Quantization(lambda budget: copy.deepcopy(model()), ids(8, 0), held_out, **options)


def build(*, split, seed):
    return miniature()


def metrics(outcome):
    """All but the time."""
    return {name: value for name, value in outcome.metrics.items() if not study.metric(name).timing}


def outcome(number, **changes):
    name, settings = ARMS[number]
    return study.arms[name].run(miniature(**changes), budget=BUDGET, seed=3, **settings)


first_outcome = functools.cache(outcome)


@pytest.mark.parametrize("number", range(len(ARMS)))
def test_arm_quantizes_and_repeats(number):
    first, second = first_outcome(number), outcome(number)
    assert set(first.metrics) == {metric.name for metric in study.metrics}
    assert all(np.isfinite(value) for value in first.metrics.values())
    assert metrics(first) == metrics(second)
    assert (first.costs, first.curves) == (second.costs, second.curves)
    assert first.costs["calibration tokens"] == 8 * 16


def test_arms_differ_in_what_they_make_of_the_model():
    errors = {first_outcome(number).metrics["attention_error"] for number in range(len(ARMS))}
    assert len(errors) == len(ARMS)


@pytest.mark.parametrize("number", [1, len(ARMS) - 1])
def test_activations_are_rounded_on_top_of_weights(number):
    weights = first_outcome(number).metrics["attention_error"]
    assert outcome(number, activation_bits=2).metrics["attention_error"] > weights


def test_the_size_counts_grids():
    costs = study.arms["rtn"].run(miniature(), budget=BUDGET, seed=0).costs
    shapes = [(64, 64), (32, 64), (32, 64), (64, 64)] * 2  # of q, k, v and o, in two blocks
    bits = sum(2 * rows * columns + rows * (32 + 2) for rows, columns in shapes)  # scales are float32
    assert costs["MB of quantized layers"] == pytest.approx(bits / 8e6)
    assert costs["bits a weight"] == pytest.approx(bits / sum(rows * columns for rows, columns in shapes))


def test_the_error_of_attention_is_zero_for_the_same_model_and_a_square_for_a_shrunken_one():
    before, after = model(), copy.deepcopy(model())
    names = {f"model.layers.{number}.self_attn.o_proj" for number in (0, 1)}
    assert attention_errors(before, after, ids(4, 1), names) == {0: 0, 1: 0}
    with torch.no_grad():
        after.model.layers[1].self_attn.o_proj.weight.mul_(0.9)
    # Whatever changed before it, a block is measured on what reaches it in the model as it was.
    after.model.embed_tokens.weight.data.mul_(3)
    errors = attention_errors(before, after, ids(4, 1), names, batch_size=3)
    assert errors[0] == 0
    assert errors[1] == pytest.approx(1.0, rel=1e-4)  # (1 − 0.9)² in %; float32


def test_only_blocks_with_a_quantized_attention_are_measured():
    before, after = model(), copy.deepcopy(model())
    assert list(attention_errors(before, after, ids(2, 1), {"model.layers.1.self_attn.q_proj", "lm_head"})) == [1]


def test_the_model_is_rotated_only_where_activations_are_rounded(monkeypatch):
    rotated = []
    monkeypatch.setattr(boa, "rotate_model", lambda model, *, random_state: rotated.append(random_state))
    for changes in ({}, {"activation_bits": 8}):
        study.arms["rtn"].run(miniature(**changes), budget=BUDGET, seed=5)
    assert rotated == [5]


@pytest.fixture
def small_world(tmp_path, monkeypatch):
    """Addresses and a corpus of a few sentences, and a small language model."""
    years = np.arange(1800, 1840)
    texts = tuple(f"In the year {year} the Union was – as ever – in a good state. " * 80 for year in years)
    llama(len(tokenizer().get_vocab())).save_pretrained(tmp_path / "model")
    tokenizer().save(str(tmp_path / "model" / "tokenizer.json"))
    forms = {
        "sotu": data.Addresses(texts, years, ("A",) * 40, ("none",) * 40),
        "brown": data.Texts(
            tuple(f"text {i} is the one . " * 50 for i in range(50)), np.zeros(50, np.int64), ("news",)
        ),
        "smollm2_135m": data.PretrainedModel(tmp_path / "model"),
    }
    cached = (text_bytes, boa._smollm2, boa._smollm2_calibration, boa._smollm2_held_out)
    monkeypatch.setenv("HEEDFUL_DATA", str(tmp_path))
    monkeypatch.setattr(data, "load", forms.__getitem__)
    for function in cached:
        function.cache_clear()
    yield forms
    for function in cached:
        function.cache_clear()


@pytest.mark.parametrize("name", study.tasks)
def test_tests_are_the_same_for_every_seed_and_on_other_text_than_all_else(small_world, name):
    tasks = {
        (split, seed): study.build_task(name, split=split, seed=seed)
        for split in ("validation", "test")
        for seed in (0, 1)
    }
    for split in ("validation", "test"):
        first, second = (tasks[split, seed] for seed in (0, 1))
        assert torch.equal(first.held_out.ids, second.held_out.ids)
        assert not torch.equal(first.calibration, second.calibration)
    assert torch.equal(tasks["test", 0].calibration, tasks["validation", 0].calibration)
    texts = tasks["test", 0].held_out.ids, tasks["validation", 0].held_out.ids, tasks["test", 0].calibration
    for some, others in itertools.combinations([{tuple(row) for row in text.tolist()} for text in texts], 2):
        assert some.isdisjoint(others)


def test_smollm2_is_scored_on_the_bytes_that_its_tokens_spell(small_world):
    task = study.build_task("smollm2_2bit_attention", split="test", seed=0)
    made = tokenizer()
    spelt = [made.decode(row[1:].tolist()) for row in task.held_out.ids]
    assert task.held_out.n_bytes == sum(len(text.encode()) for text in spelt)
    assert all("9 the Union" in text for text in spelt[:2])  # years that end in 9
    assert all("is the one" in text for text in spelt[2:])


def test_a_task_gives_a_new_model_each_time(small_world):
    for name in ("tiny_llama_2bit_all", "smollm2_2bit_attention"):
        task = study.build_task(name, split="test", seed=0)
        first, second = (task.model(BUDGET) for _ in range(2))
        assert first is not second
        assert all(torch.equal(a, b) for a, b in zip(first.parameters(), second.parameters(), strict=True))
        assert not first.training


def test_the_study_travels_to_other_processes_and_arms_choose_among_as_many_settings():
    again = pickle.loads(pickle.dumps(study))
    assert list(again.tasks) == list(study.tasks)
    assert {name for name, arm in study.arms.items() if arm.grid is None} == {"rtn"}
    assert [name for name, arm in study.arms.items() if arm.aware] == ["boa_identity_v", "boa"]
    assert all(task.data == data.checksums(*task.data) for task in study.tasks.values())


def test_a_task_of_ones_own_takes_the_place_of_the_shipped_ones():
    own = study.with_task("own", Task(build))
    assert own.build_task("own", split="test", seed=0).bits == 2
    with pytest.raises(InputError, match=r"(?s)must build an object with calibration, held_out, .*Quantization"):
        study.with_task("own", Task(lambda *, split, seed: object())).build_task("own", split="test", seed=0)


def test_some_of_smollm2_is_quantized_or_all_but_its_head(small_world):
    part = study.build_task("smollm2_2bit_attention", split="test", seed=0)
    assert part.exclude == ("lm_head", "*.mlp.*", *(f"*.layers.{number}.*" for number in range(4, 30)))
    assert boa.whole_smollm2(split="test", seed=0).exclude == ("lm_head",)
