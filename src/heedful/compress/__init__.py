"""Make a trained model smaller or faster, or train it sparse."""

from typing import TYPE_CHECKING

from heedful._lazy import attach

if TYPE_CHECKING:
    from heedful._masks import check_nm as check_nm
    from heedful._masks import nm_mask as nm_mask
    from heedful.compress._grids import QuantGrid as QuantGrid
    from heedful.compress._saved import load_compressed as load_compressed
    from heedful.compress._saved import save_compressed as save_compressed
    from heedful.compress.bame import BAME as BAME
    from heedful.compress.bame import SRSTE as SRSTE
    from heedful.compress.bame import BiMask as BiMask
    from heedful.compress.bame import NMRigL as NMRigL
    from heedful.compress.bame import StaticMask as StaticMask
    from heedful.compress.bame import SwapScores as SwapScores
    from heedful.compress.bame import TrainingFlops as TrainingFlops
    from heedful.compress.bame import prune_nm as prune_nm
    from heedful.compress.bame import swap_scores as swap_scores
    from heedful.compress.bame import to_semi_structured as to_semi_structured
    from heedful.compress.bame import training_flops as training_flops
    from heedful.compress.boa import AttentionFactors as AttentionFactors
    from heedful.compress.boa import QuantConfig as QuantConfig
    from heedful.compress.boa import QuantizedModel as QuantizedModel
    from heedful.compress.boa import QuantizedWeight as QuantizedWeight
    from heedful.compress.boa import attention_factors as attention_factors
    from heedful.compress.boa import fake_quantize_activations as fake_quantize_activations
    from heedful.compress.boa import find_grid as find_grid
    from heedful.compress.boa import kron_quantize as kron_quantize
    from heedful.compress.boa import quantize as quantize
    from heedful.compress.boa import rotate_model as rotate_model
    from heedful.compress.boa import smooth_model as smooth_model
    from heedful.compress.dynadiag import SET as SET
    from heedful.compress.dynadiag import DiagonalLinear as DiagonalLinear
    from heedful.compress.dynadiag import DiagonalRigL as DiagonalRigL
    from heedful.compress.dynadiag import DynaDiag as DynaDiag
    from heedful.compress.dynadiag import RigL as RigL
    from heedful.compress.dynadiag import add_lora_fa as add_lora_fa
    from heedful.compress.dynadiag import block_fill as block_fill
    from heedful.compress.dynadiag import convert_to_diagonal as convert_to_diagonal
    from heedful.compress.dynadiag import diagonal_indices as diagonal_indices
    from heedful.compress.dynadiag import diagonal_matmul as diagonal_matmul
    from heedful.compress.dynadiag import diagonal_to_dense as diagonal_to_dense
    from heedful.compress.dynadiag import prune_diagonal as prune_diagonal
    from heedful.compress.dynadiag import soft_topk as soft_topk
    from heedful.compress.dynadiag import to_bcsr as to_bcsr
    from heedful.compress.dynadiag import tune_backend as tune_backend

__getattr__, __dir__, __all__ = attach(
    "heedful.compress",
    {
        "boa": [
            "quantize",
            "QuantConfig",
            "QuantizedModel",
            "QuantizedWeight",
            "kron_quantize",
            "find_grid",
            "AttentionFactors",
            "attention_factors",
            "rotate_model",
            "smooth_model",
            "fake_quantize_activations",
        ],
        "_grids": ["QuantGrid"],
        "_saved": ["save_compressed", "load_compressed"],
        "dynadiag": [
            "DynaDiag",
            "DiagonalLinear",
            "diagonal_matmul",
            "soft_topk",
            "convert_to_diagonal",
            "diagonal_to_dense",
            "prune_diagonal",
            "add_lora_fa",
            "diagonal_indices",
            "block_fill",
            "to_bcsr",
            "tune_backend",
            "RigL",
            "SET",
            "DiagonalRigL",
        ],
        "bame": [
            "BAME",
            "SRSTE",
            "NMRigL",
            "BiMask",
            "StaticMask",
            "swap_scores",
            "SwapScores",
            "prune_nm",
            "to_semi_structured",
            "training_flops",
            "TrainingFlops",
        ],
        "._masks": ["nm_mask", "check_nm"],
    },
)
