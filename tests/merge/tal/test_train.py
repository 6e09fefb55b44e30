"""Losses against closed forms, training against what it must change and leave, and initialisation of real networks."""

import functools
import math

import numpy as np
import pytest
import scipy.stats
import torch
import transformers
from torch import nn
from torch.nn.functional import cross_entropy

from heedful import _results
from heedful.errors import (
    ConvergenceError,
    FileFormatError,
    HeedfulWarning,
    InputError,
    ParameterError,
    UnsupportedModelError,
)
from heedful.merge.tal import _students, _training
from heedful.merge.tal._training import feature_matching, task_probabilities
from heedful.merge.tal.graph import computation_graph
from heedful.merge.tal.pools import ArchitecturePool, convnet, mlp
from heedful.merge.tal.train import TaskAwareLearngene, TaskData, task_embedding
from tests.conformance.typechecks import as_users_have_it

SMALL = {"hidden": 16, "n_layers": 1, "n_heads": 2, "rank": 6, "max_side": 256}
EXAMPLE = torch.zeros(1, 6)
build_mlp = functools.partial(mlp, n_features=6, n_classes=3)
POOL = ArchitecturePool(build_mlp, [{"depth": d, "width": w} for d in (1, 2) for w in (8, 12)], EXAMPLE)


def learngene(random_state=0, **settings):
    return TaskAwareLearngene(settings.pop("config", SMALL), random_state=random_state, **settings)


def blobs(n=60, n_classes=3, seed=0):
    """Three clouds in six dimensions, in batches of 20."""
    generator = torch.Generator().manual_seed(seed)
    y = torch.arange(n) % n_classes
    x = torch.randn(n, 6, generator=generator) + 3 * torch.eye(6)[y]
    return [(x[i : i + 20], y[i : i + 20]) for i in range(0, n, 20)]


def teacher(x):
    return torch.cat([x, x.square()[:, :2]], dim=1)


EMBEDDING = task_embedding(teacher, blobs())


def state_of(gene):
    return {name: value.clone() for name, value in gene.hypernet.state_dict().items()}


@functools.cache
def tuned():
    """Pretrained, and tuned on two tasks."""
    gene = learngene().pretrain(POOL, blobs(), teacher, steps=3)
    tasks = {"blobs": (blobs(), 3, EMBEDDING), "pairs": TaskData(blobs(n_classes=2), 2, 2 * EMBEDDING)}
    return gene.tune(POOL, tasks, steps=4, lr=1e-2)


# Losses --------------------------------------------------------------------------------------------------------------


def test_matching_is_zero_just_where_features_differ_by_a_constant_per_row(seed):
    generator = torch.Generator().manual_seed(seed)
    t = torch.randn(5, 7, generator=generator, dtype=torch.float64)
    shift = torch.randn(5, 1, generator=generator, dtype=torch.float64)
    assert feature_matching(t + shift, t, n_classes=4, temperature=3.0).item() == pytest.approx(0, abs=1e-13)
    assert feature_matching(t.flip(1), t, n_classes=4, temperature=3.0) > 0


def test_matching_is_its_formula(seed):
    generator = torch.Generator().manual_seed(seed)
    s, t = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    p, q = (t / 3).softmax(1), (s / 3).softmax(1)
    naive = 9 * (p * (p / q).log()).sum() / (5 * 4)
    torch.testing.assert_close(feature_matching(s, t, n_classes=4, temperature=3.0), naive, rtol=1e-12, atol=1e-12)


def test_hot_matching_has_the_gradient_of_squared_distances_of_centred_features(seed):
    generator = torch.Generator().manual_seed(seed)
    s, t = torch.randn(2, 5, 7, generator=generator, dtype=torch.float64)
    s.requires_grad_()
    (hot,) = torch.autograd.grad(feature_matching(s, t, n_classes=4, temperature=1e4), s)
    gap = t - s
    squares = (gap - gap.mean(1, keepdim=True)).square().sum() / (2 * 7 * 5 * 4)
    (limit,) = torch.autograd.grad(squares, s)
    torch.testing.assert_close(hot, limit, rtol=0.01, atol=1e-6)


def test_the_loss_is_the_weighted_sum_of_its_terms_for_one_network():
    gene = learngene(norm_weight=1e-3, teacher_weight=0.3)
    ((x, y), *_) = blobs()
    pool = ArchitecturePool(build_mlp, [{"depth": 1, "width": 8}], EXAMPLE)
    events = []
    gene.pretrain(pool, [(x, y)], teacher, steps=1, callback=lambda event: events.append(event))
    values = events[0].values
    fresh = learngene()
    graph = _students.with_projector(pool[0].graph, 8)
    (weights,) = fresh.hypernet(graph)
    norm = sum(float(w.detach().norm()) for w in weights.values())
    projector = weights.pop(_students.PROJECTOR)
    model = pool[0].build()
    hidden = torch.func.functional_call(model[:-1], {n: w for n, w in weights.items() if n[0] != "3"}, (x,))
    logits = hidden @ weights["3.weight"].T + weights["3.bias"]
    entropy = float(cross_entropy(logits, y, label_smoothing=0.1).detach())
    matching = float(feature_matching(hidden @ projector.T, teacher(x), n_classes=3, temperature=3.0).detach())
    assert values["norm"] == pytest.approx(norm, rel=1e-5)
    assert values["cross_entropy"] == pytest.approx(entropy, rel=1e-5)
    assert values["matching"] == pytest.approx(matching, rel=1e-5)
    assert values["loss"] == pytest.approx(0.3 * matching + 0.7 * entropy + 1e-3 * norm, rel=1e-5)


# Sampling, schedule --------------------------------------------------------------------------------------------------


def test_tasks_are_drawn_with_the_root_of_their_size():
    sizes = {"small": 20, "middle": 60, "large": 180}
    generator = torch.Generator().manual_seed(0)
    drawn = dict.fromkeys(sizes, 0)

    class Counted(list):
        def __init__(self, name, batches):
            super().__init__(batches)
            self.name = name

        def __iter__(self):
            for batch in super().__iter__():
                drawn[self.name] += counting
                yield batch

    counting = 0
    tasks = {name: (Counted(name, blobs(n)), 3) for name, n in sizes.items()}
    gene = learngene(config={**SMALL, "hidden": 4, "rank": 1})
    sizes_seen = [_training.size(task[0], name)[0] for name, task in tasks.items()]
    assert sizes_seen == [20, 60, 180]
    chosen = torch.multinomial(task_probabilities(sizes_seen, 2.0), 6000, replacement=True, generator=generator)
    expected = np.sqrt([20, 60, 180]) / np.sqrt([20, 60, 180]).sum() * 6000
    assert scipy.stats.chisquare(torch.bincount(chosen).numpy(), expected).pvalue > 0.01
    counting = 1
    gene.tune(POOL, tasks, steps=300)
    observed = np.array(list(drawn.values()))
    observed[:] -= [n // 20 for n in sizes.values()]  # the pass that counts rows
    assert observed.sum() == 300
    assert scipy.stats.chisquare(observed, expected / 20).pvalue > 0.01


def test_the_temperature_of_sampling_goes_from_proportional_to_uniform():
    torch.testing.assert_close(task_probabilities([10, 30], 1.0), torch.tensor([0.25, 0.75], dtype=torch.float64))
    torch.testing.assert_close(task_probabilities([10, 30], math.inf), torch.tensor([0.5, 0.5], dtype=torch.float64))


def test_the_learning_rate_rises_then_falls_along_a_cosine():
    rates = [_training.learning_rate(step, 1000, lr=3e-4, warmup_fraction=0.1) for step in range(1000)]
    assert rates[0] == 1e-5
    assert max(rates) == rates[100] == 3e-4
    assert rates[50] == pytest.approx((1e-5 + 3e-4) / 2)
    assert rates[550] == pytest.approx(1.5e-4)
    assert rates[-1] < 1e-8
    assert _training.learning_rate(0, 1, lr=1e-3, warmup_fraction=1 / 15) == 1e-3


# Task embeddings -----------------------------------------------------------------------------------------------------


def test_an_embedding_is_the_mean_whatever_the_batches_and_the_labels(seed):
    x = torch.randn(50, 6, generator=torch.Generator().manual_seed(seed))
    whole = teacher(x).mean(0)
    for size in (1, 7, 50):
        unlabelled, labelled = list(x.split(size)), [(part, object()) for part in x.split(size)]
        torch.testing.assert_close(task_embedding(teacher, unlabelled), whole, rtol=1e-5, atol=1e-6)
        assert torch.equal(task_embedding(teacher, labelled), task_embedding(teacher, unlabelled))


def test_a_teacher_is_asked_in_eval_mode_and_left_as_it_was():
    net = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.BatchNorm1d(4))
    net[2].eval()
    torch.testing.assert_close(task_embedding(net, [torch.ones(3, 4)]), torch.ones(4), rtol=1e-4, atol=1e-4)
    assert [module.training for module in net] == [True, True, False]


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (lambda x: x[:, :, None], r"features of shape \(n, d\), a tensor; got shape \(20, 6, 1\)"),
        (lambda x: transformers.modeling_outputs.ImageClassifierOutput(logits=x), "got a ImageClassifierOutput"),
        (lambda x: x * math.nan, "NaN or infinite"),
    ],
)
def test_a_teacher_that_gives_no_features_is_refused(bad, message):
    with pytest.raises(InputError, match=message):
        task_embedding(bad, blobs())


def test_an_embedding_of_nothing_is_refused():
    with pytest.raises(InputError, match="batches has none"):
        task_embedding(teacher, iter([]))


# Training ------------------------------------------------------------------------------------------------------------


def test_training_is_adamw_on_clipped_gradients_at_the_rates_of_the_schedule():
    gene, twin = learngene(), learngene().hypernet
    pool = ArchitecturePool(build_mlp, [{"depth": 1, "width": 8}], EXAMPLE)
    ((x, y),) = blobs(20)
    gene.tune(pool, {"t": ([(x, y)], 3)}, steps=4, lr=1e-2, weight_decay=0.1, warmup_fraction=0.25, clip_norm=0.1)
    build, graph = pool[0]
    optimizer = torch.optim.AdamW(twin.parameters(), weight_decay=0.1)
    for step in range(4):
        optimizer.param_groups[0]["lr"] = _training.learning_rate(step, 4, lr=1e-2, warmup_fraction=0.25)
        (weights,) = twin(graph)
        logits = torch.func.functional_call(build(), weights, (x,))
        loss = cross_entropy(logits, y, label_smoothing=0.1) + 3e-5 * sum(w.norm() for w in weights.values())
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        optimizer.step()
    for left, right in zip(gene.hypernet.parameters(), twin.parameters(), strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-5)  # Adam's quotients make roundings larger


def test_a_teacher_teaches_in_eval_mode():
    asked = []

    class Asked(nn.Dropout):
        def forward(self, x):
            asked.append(self.training)
            return super().forward(x)

    net = nn.Sequential(Asked(), nn.Linear(6, 5))
    learngene().pretrain(POOL, blobs(), net, steps=2)
    assert asked
    assert not any(asked)
    assert net.training
    assert net[0].training


def test_training_learns_to_start_networks_that_it_never_saw():
    gene = learngene(config={**SMALL, "n_layers": 2, "rank": 8}).tune(POOL, {"blobs": (blobs(), 3)}, steps=250, lr=3e-3)
    model = build_mlp(depth=2, width=10)
    gene.initialize(model, "blobs", example_inputs=EXAMPLE)
    (x, y), *_ = blobs(seed=1)
    assert (model(x).argmax(1) == y).float().mean() > 0.9


def test_stage_two_starts_where_stage_one_ended():
    before = learngene().pretrain(POOL, blobs(), teacher, steps=2)
    (expected,) = before.hypernet(POOL[0].graph)
    before.hypernet.add_task_modulation(len(EMBEDDING))
    (modulated,) = before.hypernet(POOL[0].graph, EMBEDDING)
    assert all(torch.equal(expected[name], modulated[name]) for name in expected)


@pytest.mark.parametrize("projector", ["predicted", "shared", "random"])
def test_every_projector_lets_the_teacher_teach(projector):
    values = []
    kept = lambda event: values.append(event.values) and None  # noqa: E731
    gene = learngene(projector=projector, teacher_weight=1.0, norm_weight=0.0)
    before = state_of(gene)
    gene.pretrain(POOL, blobs(), teacher, steps=3, callback=kept)
    assert all(value["loss"] == pytest.approx(value["matching"], rel=1e-6) for value in values)
    assert any(not torch.equal(before[name], value) for name, value in gene.hypernet.state_dict().items())


def test_features_in_the_batches_replace_the_teacher():
    triples = [(x, y, teacher(x)) for x, y in blobs()]
    with_teacher = learngene().pretrain(POOL, blobs(), teacher, steps=3)
    with_features = learngene().pretrain(POOL, triples, None, steps=3)
    for name, value in with_teacher.hypernet.state_dict().items():
        assert torch.equal(value, with_features.hypernet.state_dict()[name])


def test_without_a_teacher_only_labels_count():
    values = []
    gene = learngene(teacher_weight=0.0, norm_weight=0.0)
    gene.pretrain(POOL, blobs(), None, steps=2, callback=lambda event: values.append(event.values) and None)
    assert all("matching" not in value and value["loss"] == value["cross_entropy"] for value in values)


def test_tuning_the_task_alone_leaves_the_graph_network():
    gene = learngene(trainable="task")
    before = state_of(gene)
    gene.tune(POOL, {"blobs": (blobs(), 3, EMBEDDING)}, steps=3)
    changed = {
        name for name, value in gene.hypernet.state_dict().items() if not torch.equal(before.get(name, value), value)
    }
    assert changed
    assert all(name.startswith("decoder") for name in changed)
    assert any(bool(layer.modulation.gain.weight.any()) for layer in gene.hypernet.layers)
    assert all(parameter.requires_grad for parameter in gene.hypernet.parameters())


def test_the_same_random_state_gives_the_same_learngene_and_moves_no_global_generator():
    state = torch.get_rng_state()
    one, other = (learngene(3).tune(POOL, {"blobs": (blobs(), 3)}, steps=3) for _ in range(2))
    assert torch.equal(torch.get_rng_state(), state)
    for name, value in one.hypernet.state_dict().items():
        assert torch.equal(value, other.hypernet.state_dict()[name])
    assert not torch.equal(learngene(4).hypernet.primitive.weight, learngene(3).hypernet.primitive.weight)


def test_epochs_are_passes_over_all_batches_and_a_callback_may_stop():
    events = []
    with _results.progress(events.append):
        learngene().tune(POOL, {"a": (blobs(), 3), "b": (blobs(100), 3)}, epochs=2)
    assert [event.done for event in events] == list(range(1, 17))  # twice 3 + 5 batches
    assert events[0].total == 16
    seen = []
    learngene(teacher_weight=0.0).pretrain(
        POOL, blobs(), None, epochs=5, callback=lambda event: seen.append(event) or len(seen) == 2
    )
    assert len(seen) == 2
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(torch.zeros(45, 6), torch.zeros(45).long()), 20)
    assert _training.size(loader, "loader") == (45, 3)


def test_several_networks_a_step_give_the_mean_of_their_losses():
    pool = ArchitecturePool(build_mlp, [{"depth": 1, "width": 8}, {"depth": 2, "width": 12}], EXAMPLE)
    alone = []
    for member in range(2):
        single = ArchitecturePool(build_mlp, [pool.configurations[member]], EXAMPLE)
        learngene().tune(single, {"t": (blobs(20), 3)}, steps=1, callback=lambda event: alone.append(event.values))
    together = []
    learngene().tune(
        pool,
        {"t": (blobs(20), 3)},
        steps=1,
        n_architectures=2,
        callback=lambda event: together.append(event.values) and None,
    )
    for name, value in together[0].items():
        assert value == pytest.approx((alone[0][name] + alone[1][name]) / 2, rel=1e-5)


def test_heads_fit_the_classes_of_the_task_and_of_pretraining():
    pool = ArchitecturePool(functools.partial(mlp, n_features=6), [{"depth": 1, "width": 8}], EXAMPLE)  # ten classes
    graph = _students.with_classes(pool[0].graph, 3)
    assert {target.shape[0] for targets in graph.targets for target in targets if target.name.startswith("3.")} == {3}
    assert torch.equal(graph.shapes, computation_graph(build_mlp(depth=1, width=8), EXAMPLE).shapes)
    learngene(teacher_weight=0.0).pretrain(pool, blobs(), None, n_classes=3, steps=1)
    with pytest.raises(InputError, match=r"run from 0 to 2; with 2 classes"):
        learngene(teacher_weight=0.0).pretrain(pool, blobs(), None, n_classes=2, steps=1)


def test_networks_are_built_once_as_long_as_there_is_room(monkeypatch):
    built = []

    def build(width):
        built.append(width)
        return mlp(depth=1, width=width, n_features=6, n_classes=3)

    members = [(functools.partial(build, width), POOL[0].graph if width == 8 else POOL[1].graph) for width in (40, 8)]
    monkeypatch.setattr(_students, "_KEPT_IN_MEMORY", 100)  # an MLP of width 8 has 83 parameters
    students = _students.Students(members, 2, torch.Generator().manual_seed(0), torch.device("cpu"))
    for _ in range(3):
        assert all(student.model.training for student in students.draw(3, None))  # dropout acts while training
    assert sorted(built) == [8, 40, 40, 40]


def test_a_projector_stands_where_the_head_stands():
    graph = POOL[1].graph
    wider = _students.with_projector(graph, 8)
    head = next(i for i, targets in enumerate(graph.targets) if targets and targets[0].name == "3.weight")
    assert torch.equal(wider.distances[:-1, -1], graph.distances[:, head])
    assert not wider.distances[-1].any()
    assert wider.unbounded[-1]  # nothing bends features
    assert wider.targets[-1][0].shape == (8, 12)


def test_hugging_face_networks_can_be_students():
    config = transformers.ViTConfig(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, image_size=8, patch_size=4
    )

    def build(depth):
        config.num_hidden_layers = depth
        return transformers.ViTForImageClassification(config)

    images = torch.randn(4, 3, 8, 8, generator=torch.Generator().manual_seed(0))
    pool = ArchitecturePool(build, [{"depth": 1}], images[:1])
    batches = [(images, torch.arange(4) % 2)]
    learngene().pretrain(pool, batches, lambda x: x.flatten(1)[:, :7], steps=1)


# Initialisation ------------------------------------------------------------------------------------------------------


def test_in_place_and_functional_predictions_are_equal_and_every_parameter_is_predicted():
    gene, model = tuned(), build_mlp(depth=3, width=10)
    assert gene.initialize(model, "blobs", example_inputs=EXAMPLE, noise=0.0) is model
    (expected,) = gene.hypernet(computation_graph(model, EXAMPLE), EMBEDDING)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter, expected[name], rtol=1e-5, atol=1e-6)
    report = gene.last_report
    assert set(report.predicted) == {name for name, _ in model.named_parameters()}
    assert report.n_predicted == sum(p.numel() for p in model.parameters())
    assert (report.kept, report.n_kept, report.task) == ((), 0, "blobs")
    assert report.to_dict()["n_kept"] == 0


def test_the_same_seed_gives_the_same_start_with_noise_as_strong_as_asked():
    gene = tuned()
    plain, noisy, again = (build_mlp(depth=2, width=60) for _ in range(3))
    gene.initialize(plain, "blobs", example_inputs=EXAMPLE, noise=0.0)
    for model in (noisy, again):
        gene.initialize(model, "blobs", example_inputs=EXAMPLE, noise=0.1)
    difference = torch.cat([(a - b).flatten() for a, b in zip(noisy.parameters(), plain.parameters(), strict=True)])
    assert float(difference.detach().std()) == pytest.approx(0.1, rel=0.05)  # of 7500 numbers: six standard errors
    for one, other in zip(noisy.parameters(), again.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_task_can_be_named_given_as_embedding_or_as_batches():
    gene = learngene().pretrain(POOL, blobs(), teacher, steps=1)
    gene.tune(POOL, {"blobs": (blobs(), 3, EMBEDDING)}, steps=2, lr=1e-2)
    states = []
    for task in ("blobs", EMBEDDING, blobs(), None):
        model = build_mlp(depth=1, width=8)
        states.append(gene.initialize(model, task, example_inputs=EXAMPLE).state_dict())
    for other in states[1:3]:
        for name, value in states[0].items():
            torch.testing.assert_close(other[name], value)
    assert not torch.allclose(states[3]["1.weight"], states[0]["1.weight"])


def test_tasks_without_embeddings_share_one_start():
    gene = learngene().tune(POOL, {"a": (blobs(), 3), "b": (blobs(seed=1), 3)}, steps=2)
    assert gene.hypernet.task_dim is None
    one, other = (gene.initialize(build_mlp(depth=1, width=8), task, example_inputs=EXAMPLE) for task in "ab")
    for left, right in zip(one.parameters(), other.parameters(), strict=True):
        assert torch.equal(left, right)


@pytest.mark.parametrize("frozen", [False, True])
def test_a_hugging_face_vit_is_started_and_saved_as_ever(tmp_path, frozen):
    config = transformers.ViTConfig(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=2, intermediate_size=48, image_size=8, patch_size=4
    )
    model = transformers.ViTForImageClassification(config).requires_grad_(not frozen)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    gene = learngene()
    gene.initialize(model, None, example_inputs=torch.zeros(1, 3, 8, 8))
    assert all(not torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    assert all(parameter.requires_grad is not frozen for parameter in model.parameters())
    model.save_pretrained(tmp_path)
    loaded = transformers.ViTForImageClassification.from_pretrained(tmp_path)
    for name, value in model.state_dict().items():
        assert torch.equal(loaded.state_dict()[name], value)
    x = torch.randn(2, 3, 8, 8)
    assert model(x).logits.isfinite().all()


def test_tied_weights_are_predicted_once():
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.z, self.a = nn.Linear(6, 6), nn.Linear(6, 6)
            self.a.weight = self.z.weight

        def forward(self, x):
            return self.a(self.z(x).relu())

    model = Tied()
    gene = learngene()
    gene.initialize(model, None, example_inputs=EXAMPLE)
    assert model.a.weight is model.z.weight
    assert len(gene.last_report.predicted) == 3


def test_what_cannot_be_predicted_is_refused_or_kept():
    model = build_mlp(depth=2, width=300)
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    gene = tuned()
    with pytest.raises(UnsupportedModelError, match=r"5 parameters .*max_side=256.*strict=False"):
        gene.initialize(model, None, example_inputs=EXAMPLE)
    assert all(torch.equal(before[name], parameter) for name, parameter in model.named_parameters())
    gene.initialize(model, None, example_inputs=EXAMPLE, strict=False)
    assert gene.last_report.predicted == ("5.bias",)
    assert gene.last_report.n_kept == sum(p.numel() for p in before.values()) - 3
    assert torch.equal(before["3.weight"], model[3].weight)


def test_a_network_whose_path_depends_on_values_is_traced_on_the_example():
    class Either(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(6, 3)

        def forward(self, x):
            return self.layer(x) if x.sum() >= 0 else self.layer(-x)

    with pytest.raises(UnsupportedModelError, match="follow='data'"):
        learngene().initialize(Either(), None, example_inputs=EXAMPLE)
    gene = learngene()
    gene.initialize(Either(), None, example_inputs=EXAMPLE, follow="data")
    assert gene.last_report.n_kept == 0


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_networks_of_every_precision_are_started(dtype):
    single, other = build_mlp(depth=1, width=8), build_mlp(depth=1, width=8).to(dtype)
    tuned().initialize(single, "blobs", example_inputs=EXAMPLE)
    tuned().initialize(other, "blobs", example_inputs=EXAMPLE.to(dtype))
    for left, right in zip(single.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(left.to(dtype), right, rtol=1e-2, atol=1e-4)  # the noise is added after rounding


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_network_may_be_on_another_device_than_the_learngene():
    here, there = build_mlp(depth=1, width=8), build_mlp(depth=1, width=8).cuda()
    for model in (here, there):
        tuned().initialize(model, "blobs", example_inputs=EXAMPLE)
    for left, right in zip(here.parameters(), there.parameters(), strict=True):
        torch.testing.assert_close(left, right.cpu())


def test_batch_normalisation_is_warned_about():
    model = convnet(depth=2, width=8, norm="batch", n_classes=3)
    with pytest.warns(HeedfulWarning, match="running statistics"):
        learngene().initialize(model, None, example_inputs=torch.zeros(1, 3, 8, 8))
    assert torch.equal(model[1].running_mean, torch.zeros(8))


@pytest.mark.parametrize(
    ("task", "n_classes", "error", "message"),
    [
        ("cats", 3, ParameterError, r"not tuned on a task 'cats'\. It knows 'blobs', 'pairs'"),
        ("pairs", 3, InputError, r"has 3 classes, the task 'pairs' has 2\. Build the model with 2"),
        (torch.zeros(3), 3, InputError, r"must have shape \(8,\); got \(3,\)"),
        (np.zeros(8), 3, InputError, r"an embedding \(a tensor\), batches of inputs, or None; got ndarray"),
    ],
)
def test_a_task_that_does_not_fit_is_refused(task, n_classes, error, message):
    model = mlp(depth=1, width=8, n_features=6, n_classes=n_classes)
    with pytest.raises(error, match=message):
        tuned().initialize(model, task, example_inputs=EXAMPLE)


def test_a_model_without_weights_is_refused():
    with torch.device("meta"):
        model = build_mlp(depth=1, width=8)
    with pytest.raises(InputError, match=r"meta device.*to_empty"):
        tuned().initialize(model, None, example_inputs=EXAMPLE)


# Bad input of training -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda g: g.pretrain(POOL, blobs(), None, steps=1), ParameterError, r"needs a teacher.*teacher_weight=0"),
        (
            lambda g: g.pretrain(POOL, blobs(), lambda x: x[:, :3], steps=1),
            InputError,
            "as many as there are classes: these look like logits",
        ),
        (lambda g: g.pretrain(POOL, iter(blobs()), teacher, steps=1), InputError, "only once"),
        (lambda g: g.pretrain(POOL, [], teacher, steps=1), InputError, "batches has no batches"),
        (
            lambda g: g.pretrain(POOL, [(x, y, teacher(x)[:, 0]) for x, y in blobs()], None, steps=1),
            InputError,
            r"features of shape \(n, d\), a tensor; got shape \(20,\)",
        ),
        (
            lambda g: g.pretrain(POOL, [(x, y, teacher(x)[:9]) for x, y in blobs()], None, steps=1),
            InputError,
            r"got shapes \(20, 6\), \(20,\), \(9, 8\)",
        ),
        (
            lambda g: g.tune(POOL, {"a": ([(x, y[:, None]) for x, y in blobs()], 3)}, steps=1),
            InputError,
            r"a label for each input; got shapes \(20, 6\), \(20, 1\)",
        ),
        (lambda g: g.pretrain(POOL, blobs(), teacher), ParameterError, "either epochs or steps"),
        (lambda g: g.pretrain(POOL, blobs(), teacher, steps=1, epochs=1), ParameterError, "either epochs or steps"),
        (lambda g: g.pretrain(POOL, blobs(), teacher, steps=1, lr=0.0), ParameterError, "lr must be a number > 0"),
        (lambda g: g.pretrain(POOL, blobs(), teacher, steps=1, amp=True), ParameterError, "CUDA; it is on cpu"),
        (
            lambda g: g.pretrain(POOL, blobs(), teacher, steps=1, n_architectures=5),
            ParameterError,
            "has 4 architectures, and n_architectures=5",
        ),
        (lambda g: g.tune(POOL, {}, steps=1), InputError, "at least one task"),
        (
            lambda g: g.tune(POOL, {"a": (blobs(), 3), "b": ([], 3)}, steps=1),
            InputError,
            r"tasks\['b'\] has no batches",
        ),
        (
            lambda g: g.tune(POOL, {"a": (blobs(), 3, EMBEDDING.numpy())}, steps=1),
            InputError,
            "'a' must be a tensor, a vector of finite numbers; got ndarray",
        ),
        (
            lambda g: g.tune(POOL, {"a": (blobs(), 3, EMBEDDING), "b": (blobs(), 3)}, steps=1),
            InputError,
            "'b' has none",
        ),
        (lambda g: g.tune(POOL, {"a": (blobs(), 3, EMBEDDING[None])}, steps=1), InputError, r"got shape \(1, 8\)"),
        (
            lambda g: g.tune(POOL, {"a": (blobs(), 3, EMBEDDING), "b": (blobs(), 3, EMBEDDING[:5])}, steps=1),
            ParameterError,
            "of size 8; got size 5",
        ),
        (
            lambda g: g.tune(POOL, {"a": ([(x * math.nan, y) for x, y in blobs()], 3)}, steps=1),
            ConvergenceError,
            r"tune, step 1: .*cross_entropy",
        ),
    ],
)
def test_what_training_cannot_use_is_named(call, error, message):
    with pytest.raises(error, match=message):
        call(learngene())


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"config": "huge"}, "config must be one of 'base', 'tiny'"),
        ({"config": 3}, "config must be one of 'base', 'tiny'"),
        ({"teacher_weight": 1.5}, "teacher_weight must be a number >= 0 and <= 1"),
        ({"temperature": 0.0}, "temperature must be a number > 0"),
        ({"trainable": "none"}, "trainable must be one of 'all', 'task'"),
        ({"projector": "fixed"}, "projector must be one of"),
    ],
)
def test_settings_out_of_range_are_named(settings, message):
    with pytest.raises(ParameterError, match=message), as_users_have_it():
        learngene(**settings)


def test_a_pool_without_class_heads_is_refused():
    pool = ArchitecturePool(lambda width: nn.Sequential(nn.Linear(6, width), nn.ReLU()), [{"width": 4}], EXAMPLE)
    with pytest.raises(UnsupportedModelError, match="must end in a linear layer"):
        learngene().tune(pool, {"a": (blobs(), 3)}, steps=1)


# Files ---------------------------------------------------------------------------------------------------------------


def test_a_loaded_learngene_starts_networks_as_the_saved_one(tmp_path):
    gene = tuned()
    gene.save(tmp_path / "gene.safetensors")
    loaded = TaskAwareLearngene.load(tmp_path / "gene.safetensors")
    for task in ("blobs", "pairs"):
        n_classes = gene.tasks[task].n_classes
        one, other = (
            g.initialize(mlp(depth=1, width=8, n_features=6, n_classes=n_classes), task, example_inputs=EXAMPLE)
            for g in (gene, loaded)
        )
        for left, right in zip(one.parameters(), other.parameters(), strict=True):
            assert torch.equal(left, right)
    with pytest.raises(ParameterError, match="a saved learngene does not hold"):
        loaded.initialize(build_mlp(depth=1, width=8), blobs(), example_inputs=EXAMPLE)


def test_a_learngene_in_half_precision_is_kept_in_single_precision(tmp_path):
    gene = learngene()
    gene.hypernet.bfloat16()
    gene.save(tmp_path / "gene.safetensors")
    loaded = TaskAwareLearngene.load(tmp_path / "gene.safetensors")
    for name, value in gene.hypernet.state_dict().items():
        assert torch.equal(loaded.hypernet.state_dict()[name], value.float())


def test_a_file_of_another_shape_is_refused(tmp_path):
    from heedful._files import load_arrays, save_arrays

    path = tmp_path / "gene.safetensors"
    learngene().save(path)
    arrays, meta = load_arrays(path)
    arrays["hypernet.norm.weight"] = arrays["hypernet.norm.weight"][:3]
    save_arrays(path, arrays, meta)
    with pytest.raises(FileFormatError, match="garbles"):
        TaskAwareLearngene.load(path)


def test_a_diverged_hypernetwork_leaves_the_model_as_it_was():
    gene = learngene()
    with torch.no_grad():
        list(gene.hypernet.parameters())[-1].fill_(math.nan)
    model = build_mlp(depth=1, width=8)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with pytest.raises(ConvergenceError, match=r"has diverged: .* The model is as it was\."):
        gene.initialize(model, None, example_inputs=EXAMPLE)
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
