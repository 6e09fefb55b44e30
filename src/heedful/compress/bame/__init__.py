"""Train networks that are N:M sparse from the first step to the last.

SR-STE keeps every weight alive by a dense backward pass and picks the N largest of each block anew at every step, blind to
whether that helps. BAME changes a block only if a swap of weights i and j is expected to lower the loss,

    ΔL = |G_i W_i| − gain(G_j) < 0,    gain = η G_j² (SGD) or η |G_j| (Adam),

and freezes blocks whose mask keeps oscillating. Forward and backward stay sparse; dense gradients are needed every T-th
step only.

BAME: Block-Aware Mask Evolution for Efficient N:M Sparse Training, ICML 2025.
"""

from heedful._lazy import attach

__getattr__, __dir__, __all__ = attach(
    "heedful.compress.bame",
    {
        "driver": ["BAME"],
        "baselines": ["SRSTE", "NMRigL", "BiMask", "StaticMask"],
        "swaps": ["SwapScores", "swap_scores"],
        "export": ["prune_nm", "to_semi_structured"],
        "flops": ["TrainingFlops", "training_flops"],
    },
)
