"""Delete people's data from a model, provably."""

from typing import TYPE_CHECKING

from heedful._lazy import attach

if TYPE_CHECKING:
    from heedful.unlearn.system_aware_unlearning import AuditReport as AuditReport
    from heedful.unlearn.system_aware_unlearning import (
        KernelSelectiveSamplingClassifier as KernelSelectiveSamplingClassifier,
    )
    from heedful.unlearn.system_aware_unlearning import SelectiveSamplingClassifier as SelectiveSamplingClassifier
    from heedful.unlearn.system_aware_unlearning import SISAClassifier as SISAClassifier
    from heedful.unlearn.system_aware_unlearning import SystemAwareUnlearner as SystemAwareUnlearner
    from heedful.unlearn.system_aware_unlearning import UnlearnReport as UnlearnReport
    from heedful.unlearn.system_aware_unlearning import core_size_estimate as core_size_estimate
    from heedful.unlearn.system_aware_unlearning import kappa_for_budget as kappa_for_budget
    from heedful.unlearn.system_aware_unlearning import select_core_set as select_core_set

__getattr__, __dir__, __all__ = attach(
    "heedful.unlearn",
    {
        "system_aware_unlearning": [
            "SelectiveSamplingClassifier",
            "KernelSelectiveSamplingClassifier",
            "SystemAwareUnlearner",
            "SISAClassifier",
            "UnlearnReport",
            "AuditReport",
            "select_core_set",
            "core_size_estimate",
            "kappa_for_budget",
        ],
    },
)
