"""Classifiers that keep little and forget exactly.

Unlearning is blind to what a system stores: it must look like retraining on all who remain, so all must be kept. This one
keeps a core set Q that is chosen without looking at labels, x ∈ Q if xᵀ A⁻¹ x > T^(−κ), A = λI + Σ_Q x xᵀ, and learns from it,

    w = A⁻¹ Σ_Q y x.

Who is not in Q is deleted by doing nothing; who is, by leaving Q: the whole state is then, bit for bit, that of a system
which never saw them.

Lu, Sekhari, Sridharan: System-Aware Unlearning Algorithms: Use Lesser, Forget Faster, ICML 2025, arXiv:2506.06073.
"""

from heedful._lazy import attach

__getattr__, __dir__, __all__ = attach(
    "heedful.unlearn.system_aware_unlearning",
    {
        "linear": ["SelectiveSamplingClassifier"],
        "kernel": ["KernelSelectiveSamplingClassifier"],
        "wrapper": ["SystemAwareUnlearner"],
        "sisa": ["SISAClassifier"],
        "reports": ["UnlearnReport", "AuditReport"],
        "selection": ["select_core_set", "core_size_estimate", "kappa_for_budget"],
    },
)
