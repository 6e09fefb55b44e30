"""Quantize the weights of language models, heeding what attention does with the output of each layer.

GPTQ quantizes every linear layer against its own output error, tr(ΔW H ΔWᵀ) with H = 2 X Xᵀ. BoA measures the error of
attention itself: of one head of a projection it is, or is bounded by,

    tr(H_row ΔW H_col ΔWᵀ),    query: Kᵀ K ⊗ X Xᵀ,    key: Qᵀ Q ⊗ X Xᵀ,    value: W_outᵀ W_out ⊗ X Aᵀ A Xᵀ,

and GPTQ's solver, run in both directions, keeps it small without a backward pass.

BoA: Attention-aware Post-training Quantization without Backpropagation, ICML 2025, arXiv:2406.13474.
"""

from heedful._lazy import attach

__getattr__, __dir__, __all__ = attach(
    "heedful.compress.boa",
    {
        "config": ["QuantConfig"],
        "solve": ["QuantizedWeight", "kron_quantize", "find_grid"],
        "factors": ["AttentionFactors", "attention_factors"],
        "model": ["quantize", "QuantizedModel"],
        "transforms": ["rotate_model", "smooth_model", "fake_quantize_activations"],
    },
)
