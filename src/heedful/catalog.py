"""The one list of methods. Everything that lists methods (command, docs tables, tests) reads it."""

import dataclasses
from collections.abc import Mapping
from types import MappingProxyType


@dataclasses.dataclass(frozen=True)
class Method:
    """One method of heedful.

    Parameters
    ----------
    slug : str
        Its name everywhere: module, study, docs page, benchmark.
    room : str
        The subpackage it lives in, named after the job a user has.
    title : str
        The method's full name.
    problem : str
        The user's problem, in the user's words.
    replaces, heeds : str
        The blind standard component, and what this method is aware of.
    names : tuple of str
        Public names that the room exports for it; the first is the main one.
    paper : str
        The reference.
    needs : tuple of str
        Extras of heedful that it needs beyond the core.
    """

    slug: str
    room: str
    title: str
    problem: str
    replaces: str
    heeds: str
    names: tuple[str, ...]
    paper: str
    needs: tuple[str, ...] = ()

    @property
    def module(self) -> str:
        """Import path of the method's module or folder."""
        return f"heedful.{self.room}.{self.slug}"

    @property
    def study(self) -> str:
        """Import path of its study, as ``module:attribute``."""
        return f"heedful.studies.{self.slug}:study"


_METHODS = (
    Method(
        slug="tsam",
        room="optim",
        title="Tilted sharpness-aware minimisation",
        problem="My network should test better, without touching model or data.",
        replaces="SAM and SGD",
        heeds="the whole neighbourhood of the weights, its high-loss directions most",
        names=("TiltedSAM", "SAM", "closure_step", "tilted_weights", "tilted_loss"),
        paper="Tilted Sharpness-Aware Minimization. ICML 2025. arXiv:2410.22656",
    ),
    Method(
        slug="isotonic",
        room="calibrate",
        title="Normalization-aware isotonic calibration",
        problem="The class probabilities of my classifier should mean what they say.",
        replaces="one-vs-rest isotonic calibration",
        heeds="that the probabilities of a row must add to one",
        names=(
            "CalibratedClassifier",
            "NormalizationAwareIsotonicCalibrator",
            "SortedCumulativeIsotonicCalibrator",
            "FlattenedIsotonicCalibrator",
            "OneVsRestIsotonicCalibrator",
            "TemperatureCalibrator",
            "VectorCalibrator",
            "DirichletCalibrator",
            "expected_calibration_error",
            "reliability_curve",
        ),
        paper=(
            "Improving Multi-Class Calibration through Normalization-Aware Isotonic Techniques. ICML 2025. arXiv:2512.09054"
        ),
    ),
    Method(
        slug="cabs",
        room="merge",
        title="Conflict-aware and balanced sparsification",
        problem="Merge fine-tuned models of one base without their changes colliding.",
        replaces="magnitude and random pruning of each task vector (TIES, DARE)",
        heeds="which weights other task vectors already hold, and that every block keeps the same share",
        names=(
            "merge_checkpoints",
            "MergeReport",
            "merge_state_dicts",
            "available_methods",
            "MergeMethod",
            "cabs_masks",
            "cabs_delta",
            "sparsity_report",
            "search_scale",
            "ScaleSearch",
        ),
        paper=(
            "CABS: Conflict-Aware and Balanced Sparsification for Enhancing Model Merging. ICML 2025. arXiv:2503.01874"
        ),
    ),
    Method(
        slug="pareto_merging",
        room="merge",
        title="Pareto merging",
        problem="One merged model for every preference over my tasks, without storing all the models.",
        replaces="a merge that is one compromise for everybody",
        heeds="the preference over the source models",
        names=(
            "fit_pareto_set",
            "fit_pareto_set_unlabelled",
            "ParetoSet",
            "PreferenceLinear",
            "fit_tucker",
            "Tucker",
            "smooth_tchebycheff",
            "pareto_front",
            "hypervolume",
        ),
        paper=(
            "Pareto Merging: Multi-Objective Optimization for Preference-Aware Model Merging. ICML 2025. arXiv:2408.12105"
        ),
    ),
    Method(
        slug="tal",
        room="merge",
        title="Task-aware learngene",
        problem="Start networks of many sizes well, for many tasks, without pretraining each.",
        replaces="initialisation that sees the shapes of layers only",
        heeds="the graph of the architecture, and the task",
        names=(
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
        ),
        paper="Learngene Tells You How to Customize: Task-Aware Parameter Initialization at Flexible Scales. ICML 2025",
    ),
    Method(
        slug="boa",
        room="compress",
        title="Attention-aware quantization",
        problem="Fit my language model into 2 to 4 bits per weight, without training it.",
        replaces="GPTQ, which quantizes each layer against its own output error",
        heeds="what attention does with the output of each projection",
        names=(
            "quantize",
            "QuantConfig",
            "QuantizedModel",
            "QuantizedWeight",
            "QuantGrid",
            "kron_quantize",
            "find_grid",
            "AttentionFactors",
            "attention_factors",
            "rotate_model",
            "smooth_model",
            "fake_quantize_activations",
            "save_compressed",
            "load_compressed",
        ),
        paper=("BoA: Attention-aware Post-training Quantization without Backpropagation. ICML 2025. arXiv:2406.13474"),
        needs=("llm",),
    ),
    Method(
        slug="dynadiag",
        room="compress",
        title="Dynamic sparse training of diagonals",
        problem="Train linear layers that are 80 to 99 % sparse and faster for it.",
        replaces="unstructured dynamic sparse training (RigL, SET)",
        heeds="which pattern hardware can run, forward and backward: whole diagonals",
        names=(
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
        ),
        paper="Dynamic Sparse Training of Diagonally Sparse Networks. ICML 2025. arXiv:2506.11449",
        needs=("kernels",),
    ),
    Method(
        slug="bame",
        room="compress",
        title="Block-aware mask evolution",
        problem="Train a network that is N:M sparse at the end, without paying for dense training.",
        replaces="SR-STE, which keeps every weight alive through a dense backward pass",
        heeds="whether a swap in a block is expected to lower the loss, and which blocks oscillate",
        names=(
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
            "nm_mask",
            "check_nm",
        ),
        paper="BAME: Block-Aware Mask Evolution for Efficient N:M Sparse Training. ICML 2025",
    ),
)

methods: Mapping[str, Method] = MappingProxyType({method.slug: method for method in _METHODS})
