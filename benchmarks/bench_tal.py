"""What predicting weights costs beside copying and using them, for several sizes and ranks; and a step of training.

python benchmarks/bench_tal.py
"""

import copy
import functools

import torch
from torch.nn.functional import cross_entropy

from heedful._machine import peak_memory
from heedful.merge import ArchitecturePool, TaskAwareLearngene, VisionTransformer, ViTSpace, computation_graph
from heedful.merge.tal.train import CONFIGS
from measure import ratio, record, side_by_side

IMAGES = torch.randn(8, 3, 224, 224, generator=torch.Generator().manual_seed(0))
SIZES = {"ViT-S": (12, 384, 6), "ViT-B": (12, 768, 12)}  # layers, width, heads


def vit(size: str) -> VisionTransformer:
    depth, width, n_heads = SIZES[size]
    return VisionTransformer(depth=depth, width=width, n_heads=n_heads)


def prediction(size: str, rank: int) -> dict[str, dict[str, float]]:
    """All weights of a network, beside copying them and running eight images through it."""
    learngene = TaskAwareLearngene({**CONFIGS["base"], "rank": rank}, random_state=0)
    model, source = vit(size), vit(size)
    graph = computation_graph(model, IMAGES[:1])

    def predict() -> None:
        for _ in learngene.hypernet.predict(graph):
            pass

    @torch.no_grad()
    def run() -> None:
        model(IMAGES)

    contestants = {"prediction": predict, "copy": lambda: model.load_state_dict(source.state_dict()), "forward": run}
    seconds = side_by_side(contestants, rounds=7)
    per_million = [s / (graph.n_parameters / 1e6) for s in seconds["prediction"]]
    return {
        f"prediction of {size}, rank {rank}, to its forward pass on 8 images": ratio(seconds, "prediction", "forward"),
        f"prediction of {size}, rank {rank}, to copying its weights": ratio(seconds, "prediction", "copy"),
        f"seconds per million weights, {size}, rank {rank}": sorted(per_million)[len(per_million) // 2],
    }


def largest_tensors_of_memory() -> float:
    """Peak memory of ``initialize`` beyond the network itself, in copies of its largest tensor."""
    learngene, model = TaskAwareLearngene(random_state=0), vit("ViT-B")
    learngene.initialize(model, None, example_inputs=IMAGES[:1])
    with peak_memory() as peak:
        learngene.initialize(model, None, example_inputs=IMAGES[:1])
    return peak.mib / (max(p.numel() for p in model.parameters()) * 4 / 2**20)


def graph_from_cache() -> dict[str, float]:
    """The graph of a member of a pool, made and remembered."""
    space = ViTSpace("vits+-1k")
    member = {"depth": 12, "width": 768, "n_heads": 12, "patch": 16, "image_size": 224}
    pool = ArchitecturePool(VisionTransformer, [member], space.example_inputs)
    contestants = {
        "made": lambda: ArchitecturePool(VisionTransformer, [member], space.example_inputs)[0],
        "remembered": lambda: pool[0],
    }
    return ratio(side_by_side(contestants, rounds=5, warmup=1), "made", "remembered")


def training_step() -> dict[str, float]:
    """A step of the tiny hypernetwork with a network of the tiny pool, beside a step of the network alone."""
    build = functools.partial(VisionTransformer, depth=3, width=64, n_heads=4, patch=4, image_size=32, n_classes=10)
    x, y = torch.randn(64, 3, 32, 32, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 10
    model, learngene = build(), TaskAwareLearngene("tiny", random_state=0)
    graph = computation_graph(model, x[:1])
    theirs, ours = (torch.optim.AdamW(m.parameters(), lr=1e-4) for m in (model, learngene.hypernet))
    student = copy.deepcopy(model)

    def alone() -> None:
        theirs.zero_grad()
        cross_entropy(model(x), y).backward()
        theirs.step()

    def predicted() -> None:
        ours.zero_grad()
        (weights,) = learngene.hypernet(graph)
        cross_entropy(torch.func.functional_call(student, weights, (x,)), y).backward()
        ours.step()

    return ratio(side_by_side({"predicted": predicted, "alone": alone}), "predicted", "alone")


if __name__ == "__main__":
    torch.set_num_threads(1)
    record(
        "tal",
        {
            **prediction("ViT-B", 90),
            **prediction("ViT-B", 30),
            **prediction("ViT-S", 90),
            "memory of initialize beyond the network, in its largest tensors": largest_tensors_of_memory(),
            "graph of a 12-layer ViT, made to remembered": graph_from_cache(),
            "training step of a hypernetwork (tiny) to that of its network": training_step(),
        },
    )
