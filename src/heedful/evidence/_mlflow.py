"""A copy of finished trials for an MLflow tracking server, written by the parent process."""

import re
from urllib.parse import urlparse

from heedful.errors import MissingExtraError, ParameterError
from heedful.evidence._result import StudyResult, TrialRecord

_SCHEMES = ("http", "https", "sqlite", "postgresql", "mysql", "mssql", "databricks")


def check_uri(uri: str) -> None:
    """Raise ``ParameterError`` unless ``uri`` names a tracking server or a database."""
    scheme = urlparse(uri).scheme.split("+")[0]
    if scheme not in _SCHEMES:
        raise ParameterError(
            f"An MLflow store is named by a URI such as http://localhost:5000 or sqlite:///mlflow.db; got {uri!r}. "
            "A bare path is not accepted: MLflow no longer keeps runs in plain folders."
        )


def copy_to_mlflow(result: StudyResult, uri: str) -> int:
    """Copy the trials of ``result`` to the MLflow store at ``uri``; return how many were new.

    One experiment ``heedful/<slug>``, one run per trial. A trial already there is not copied again.
    """
    check_uri(uri)
    try:
        from mlflow import MlflowClient
    except ImportError as error:
        raise MissingExtraError('A copy to MLflow needs MLflow: pip install "heedful[mlflow]".') from error
    client = MlflowClient(tracking_uri=uri)
    name = f"heedful/{result.study.slug}"
    experiment = client.get_experiment_by_name(name)
    experiment_id = experiment.experiment_id if experiment else client.create_experiment(name)
    present = _present(client, experiment_id)
    new = [record for record in (*result.tuning, *result.trials) if record.key not in present]
    for record in new:
        _copy(client, experiment_id, record)
    return len(new)


def _present(client, experiment_id: str) -> set[str]:
    names: set[str] = set()
    token = None
    while True:
        page = client.search_runs([experiment_id], max_results=1000, page_token=token)
        # A copy that was interrupted is still "RUNNING": it is made again.
        names |= {run.info.run_name for run in page if run.info.status in ("FINISHED", "FAILED")}
        token = page.token
        if not token:
            return names


def _copy(client, experiment_id: str, record: TrialRecord) -> None:
    from mlflow.entities import Metric, Param, RunTag

    tags = {"task": record.task, "arm": record.arm, "split": record.split, "code": record.code, "reason": record.reason}
    run = client.create_run(experiment_id, run_name=record.key)
    values = {**record.metrics, **{f"cost/{name}": value for name, value in record.costs.items()}}
    points = [Metric(_allowed(key), value, 0, 0) for key, value in values.items()]
    for name, curve in record.curves.items():
        key = f"curve/{name}"
        whole = all(point[0].is_integer() for point in curve)
        for i, (x, *ys) in enumerate(curve):
            step = int(x) if whole else i
            points += [Metric(_allowed(f"{key}/{j}" if len(ys) > 1 else key), y, 0, step) for j, y in enumerate(ys)]
    params = [Param(key, str(value)) for key, value in {**record.settings, "seed": record.seed}.items()]
    client.log_batch(run.info.run_id, params=params, tags=[RunTag(key, value[:5000]) for key, value in tags.items()])
    for start in range(0, len(points), 1000):  # MLflow takes at most 1000 metrics at a time.
        client.log_batch(run.info.run_id, metrics=points[start : start + 1000])
    client.set_terminated(run.info.run_id, status="FINISHED" if record.status == "done" else "FAILED")


def _allowed(name: str) -> str:
    """``name`` with what MLflow does not take in the name of a metric replaced."""
    return re.sub(r"[^\w.\- /]", "_", name)
