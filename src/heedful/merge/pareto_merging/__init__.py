"""Pareto merging.

Merging returns one compromise between models and is blind to who needs which of them. Pareto merging is fitted once and
heeds a preference γ over the models ever after: to one merged model it adds, in every matrix, a small tensor that is linear
in the preference,

    W(γ) = W_base + A (Σ_k γ_k G_k) Bᵀ,      min over A, B, G of E_γ μ log Σ_k exp(γ_k S_k(W(γ)) / μ),

where S_k is the distance to model k, or the entropy of its task's predictions on unlabelled inputs.

Chen and Kwok: Pareto Merging: Multi-Objective Optimization for Preference-Aware Model Merging, ICML 2025, arXiv:2408.12105.
"""

from heedful.merge.pareto_merging._data_free import fit_pareto_set
from heedful.merge.pareto_merging._modules import PreferenceLinear
from heedful.merge.pareto_merging._scalarization import smooth_tchebycheff
from heedful.merge.pareto_merging._set import ParetoSet
from heedful.merge.pareto_merging._tucker import Tucker, fit_tucker
from heedful.merge.pareto_merging._unlabelled import fit_pareto_set_unlabelled

__all__ = [
    "ParetoSet",
    "PreferenceLinear",
    "Tucker",
    "fit_pareto_set",
    "fit_pareto_set_unlabelled",
    "fit_tucker",
    "smooth_tchebycheff",
]
