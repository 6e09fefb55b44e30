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
    Method(
        slug="sarc",
        room="timeseries",
        title="Spectral-aware reservoir computing",
        problem="Classify whole time series from few labelled ones, in seconds, without a GPU.",
        replaces="an echo-state network, which sees the step before and soon forgets the rest",
        heeds="the prominent periods of the series: each reservoir also looks back one full cycle",
        names=(
            "SARCClassifier",
            "SpectralReservoir",
            "ReservoirClassifier",
            "prominent_periods",
            "Periods",
            "frequency_reservoir_states",
            "reservoir_readout",
        ),
        paper="SARC: Spectral-Aware Reservoir Computing for Fast and Accurate Time Series Classification. ICML 2025",
        needs=("timeseries",),
    ),
    Method(
        slug="causal_bounds",
        room="causal",
        title="Covariate-aware causal bounds",
        problem="My trial gives an average effect; I need what it can say about how the effect varies between people.",
        replaces="Fréchet-Hoeffding bounds, which couple anybody with anybody",
        heeds="covariates: only units that look alike may be coupled",
        names=(
            "covariate_bounds",
            "Bounds",
            "CovariateAwareBounds",
            "conditional_bounds",
            "transport_value",
            "TransportValue",
        ),
        paper="Tightening Causal Bounds via Covariate-Aware Optimal Transport. ICML 2025. arXiv:2502.01164",
        needs=("causal",),
    ),
    Method(
        slug="system_aware_unlearning",
        room="unlearn",
        title="System-aware unlearning",
        problem="Delete people's data from my classifier exactly, at once, and be able to prove it.",
        replaces="retraining on all who remain, and SISA, which must keep everybody's data",
        heeds="what the system stores: a small core set, chosen without looking at labels",
        names=(
            "SelectiveSamplingClassifier",
            "KernelSelectiveSamplingClassifier",
            "SystemAwareUnlearner",
            "SISAClassifier",
            "UnlearnReport",
            "AuditReport",
            "select_core_set",
            "core_size_estimate",
            "kappa_for_budget",
        ),
        paper="System-Aware Unlearning Algorithms: Use Lesser, Forget Faster. ICML 2025. arXiv:2506.06073",
    ),
)

methods: Mapping[str, Method] = MappingProxyType({method.slug: method for method in _METHODS})
