"""Combine models, or initialise them from models."""

from typing import TYPE_CHECKING

from heedful._lazy import attach

if TYPE_CHECKING:
    from heedful._pareto import hypervolume as hypervolume
    from heedful._pareto import pareto_front as pareto_front
    from heedful.merge._merge_checkpoints import MergeReport as MergeReport
    from heedful.merge._merge_checkpoints import merge_checkpoints as merge_checkpoints
    from heedful.merge._methods import MergeMethod as MergeMethod
    from heedful.merge._methods import available_methods as available_methods
    from heedful.merge._methods import merge_state_dicts as merge_state_dicts
    from heedful.merge._scale_search import ScaleSearch as ScaleSearch
    from heedful.merge._scale_search import search_scale as search_scale
    from heedful.merge.cabs import cabs_delta as cabs_delta
    from heedful.merge.cabs import cabs_masks as cabs_masks
    from heedful.merge.cabs import sparsity_report as sparsity_report
    from heedful.merge.pareto_merging import ParetoSet as ParetoSet
    from heedful.merge.pareto_merging import PreferenceLinear as PreferenceLinear
    from heedful.merge.pareto_merging import Tucker as Tucker
    from heedful.merge.pareto_merging import fit_pareto_set as fit_pareto_set
    from heedful.merge.pareto_merging import fit_pareto_set_unlabelled as fit_pareto_set_unlabelled
    from heedful.merge.pareto_merging import fit_tucker as fit_tucker
    from heedful.merge.pareto_merging import smooth_tchebycheff as smooth_tchebycheff
    from heedful.merge.tal import ArchitecturePool as ArchitecturePool
    from heedful.merge.tal import ComputationGraph as ComputationGraph
    from heedful.merge.tal import ConvNetSpace as ConvNetSpace
    from heedful.merge.tal import GraphHyperNetwork as GraphHyperNetwork
    from heedful.merge.tal import MLPSpace as MLPSpace
    from heedful.merge.tal import TaskAwareLearngene as TaskAwareLearngene
    from heedful.merge.tal import TaskData as TaskData
    from heedful.merge.tal import TaskModulation as TaskModulation
    from heedful.merge.tal import VisionTransformer as VisionTransformer
    from heedful.merge.tal import ViTSpace as ViTSpace
    from heedful.merge.tal import computation_graph as computation_graph
    from heedful.merge.tal import convnet as convnet
    from heedful.merge.tal import mlp as mlp
    from heedful.merge.tal import task_embedding as task_embedding

__getattr__, __dir__, __all__ = attach(
    "heedful.merge",
    {
        "cabs": ["cabs_masks", "cabs_delta", "sparsity_report"],
        "_scale_search": ["search_scale", "ScaleSearch"],
        "_methods": ["MergeMethod", "available_methods", "merge_state_dicts"],
        "_merge_checkpoints": ["merge_checkpoints", "MergeReport"],
        "pareto_merging": [
            "fit_pareto_set",
            "fit_pareto_set_unlabelled",
            "ParetoSet",
            "PreferenceLinear",
            "fit_tucker",
            "Tucker",
            "smooth_tchebycheff",
        ],
        "._pareto": ["pareto_front", "hypervolume"],
        "tal": [
            "TaskAwareLearngene",
            "GraphHyperNetwork",
            "TaskModulation",
            "TaskData",
            "ComputationGraph",
            "computation_graph",
            "ArchitecturePool",
            "ViTSpace",
            "ConvNetSpace",
            "MLPSpace",
            "VisionTransformer",
            "convnet",
            "mlp",
            "task_embedding",
        ],
    },
)
