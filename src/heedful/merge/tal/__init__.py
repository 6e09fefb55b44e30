"""Initialise networks of any size, for any task, with weights that one hypernetwork predicts.

Random initialisation sees the shapes of single layers; a graph hypernetwork sees the architecture but not the task. This
one heeds both: from the graph G of a network and the mean feature e of a task under a teacher it predicts all weights,

    W_v = A_v B_vᵀ,   (A_v, B_v) = decoder(h_v),   h = transformer(G, e)   with   x̂ = (1 + W_g e + b_g) · ln(x) + W_b e + b_b.

Learngene Tells You How to Customize: Task-Aware Parameter Initialization at Flexible Scales, ICML 2025.
"""

from heedful._lazy import attach

__getattr__, __dir__, __all__ = attach(
    "heedful.merge.tal",
    {
        "graph": ["ComputationGraph", "computation_graph"],
        "pools": ["ArchitecturePool", "ViTSpace", "VisionTransformer", "MLPSpace", "mlp", "ConvNetSpace", "convnet"],
        "ghn": ["GraphHyperNetwork", "TaskModulation"],
        "train": ["TaskAwareLearngene", "TaskData", "task_embedding"],
    },
)
