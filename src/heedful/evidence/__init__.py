"""The study harness: says whether heeding pays. Knows no method by name.

A ``Study`` declares tasks, arms, metrics and claims; ``run_study`` runs it and judges.
"""

from typing import TYPE_CHECKING

from heedful._lazy import attach

if TYPE_CHECKING:
    from heedful.evidence._console import verdict_table as verdict_table
    from heedful.evidence._mlflow import copy_to_mlflow as copy_to_mlflow
    from heedful.evidence._report import result_to_json as result_to_json
    from heedful.evidence._report import to_markdown as to_markdown
    from heedful.evidence._report import write_report as write_report
    from heedful.evidence._result import StudyResult as StudyResult
    from heedful.evidence._result import TrialRecord as TrialRecord
    from heedful.evidence._runner import run_study as run_study
    from heedful.evidence._runner import stored_result as stored_result
    from heedful.evidence._store import Store as Store
    from heedful.evidence._study import Arm as Arm
    from heedful.evidence._study import Budget as Budget
    from heedful.evidence._study import Claim as Claim
    from heedful.evidence._study import Metric as Metric
    from heedful.evidence._study import Outcome as Outcome
    from heedful.evidence._study import Study as Study
    from heedful.evidence._study import Task as Task
    from heedful.evidence._user_tasks import load_task as load_task
    from heedful.evidence._verdicts import Verdict as Verdict
    from heedful.evidence._verdicts import judge as judge

__getattr__, __dir__, __all__ = attach(
    "heedful.evidence",
    {
        "_study": ["Arm", "Budget", "Claim", "Metric", "Outcome", "Study", "Task"],
        "_runner": ["run_study", "stored_result"],
        "_result": ["StudyResult", "TrialRecord"],
        "_store": ["Store"],
        "_verdicts": ["Verdict", "judge"],
        "_user_tasks": ["load_task"],
        "_mlflow": ["copy_to_mlflow"],
        "_report": ["result_to_json", "to_markdown", "write_report"],
        "_console": ["verdict_table"],
    },
)
