"""Train linear layers that are sparse along whole diagonals, forward and backward.

Unstructured dynamic sparse training (RigL, SET) picks single weights and is blind to what hardware can run. DynaDiag
selects whole wrapped diagonals P_o diag(V_o) by importances α that it learns with them,

    W = Σ_{o ∈ I} α̃_o P_o diag(V_o),    α̃ = min(K softmax(α / T), 1),    I = top-K(α̃),

so that forward and backward need the same cheap pattern, and every input can still reach every output.

Dynamic Sparse Training of Diagonally Sparse Networks, ICML 2025, arXiv:2506.11449.
"""

from heedful._lazy import attach

__getattr__, __dir__, __all__ = attach(
    "heedful.compress.dynadiag",
    {
        "driver": ["DynaDiag"],
        "layer": ["DiagonalLinear", "soft_topk", "add_lora_fa"],
        "matmul": ["diagonal_matmul", "tune_backend"],
        "pattern": ["diagonal_indices", "block_fill", "to_bcsr"],
        "convert": ["convert_to_diagonal", "diagonal_to_dense", "prune_diagonal"],
        "baselines": ["RigL", "SET", "DiagonalRigL"],
    },
)
