import dataclasses
import socket
import subprocess
import sys
import time
import urllib.request

import pytest

from heedful.errors import ParameterError
from heedful.evidence import copy_to_mlflow, run_study
from heedful.evidence._mlflow import check_uri
from tests.evidence import toys

mlflow = pytest.importorskip("mlflow", reason='MLflow is not installed: pip install "heedful[mlflow]"')


@pytest.fixture(scope="module")
def result(tmp_path_factory):
    path = tmp_path_factory.mktemp("store") / "a.sqlite"
    return run_study(toys.study(), budget="quick", engine="inline", store=path)


@pytest.mark.parametrize("uri", ["./runs", "runs.db", "/tmp/runs", "file:///tmp/runs"])
def test_a_bare_path_gets_a_clear_error(uri):
    with pytest.raises(ParameterError, match=r"such as http://localhost:5000 or sqlite:///mlflow.db; got"):
        check_uri(uri)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")  # MLflow's own dependencies warn
def test_trials_are_copied_once_to_a_new_sqlite_store_and_to_a_real_server(result, tmp_path):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    assert copy_to_mlflow(result, uri) == 9
    assert copy_to_mlflow(result, uri) == 0
    check_copied(result, uri)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = (
        f"mlflow server --host 127.0.0.1 --port {port} --workers 1 --backend-store-uri sqlite:///{tmp_path}/server.db"
    )
    server = subprocess.Popen(
        [sys.executable, "-m", *command.split(), "--artifacts-destination", tmp_path / "files"],
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    try:
        url = f"http://127.0.0.1:{port}"
        wait_for(f"{url}/health")
        assert copy_to_mlflow(result, url) == 9
        check_copied(result, url)
    finally:
        server.terminate()
        server.wait(30)


def check_copied(result, uri):
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name("heedful/toy")
    runs = {run.info.run_name: run for run in client.search_runs([experiment.experiment_id])}
    assert len(runs) == 9
    for trial in result.trials:
        run = runs[trial.key]
        assert run.data.metrics["score"] == trial.metrics["score"]
        assert run.data.params["seed"] == str(trial.seed)
        assert run.data.tags["arm"] == trial.arm
        assert run.info.status == "FINISHED"


def wait_for(url, seconds=90):
    deadline = time.monotonic() + seconds
    while True:
        try:
            urllib.request.urlopen(url, timeout=1)
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_a_copy_that_was_interrupted_is_made_again(result, tmp_path, monkeypatch):
    uri = f"sqlite:///{tmp_path}/mlflow.db"
    with monkeypatch.context() as patch:
        patch.setattr(mlflow.MlflowClient, "set_terminated", interrupt)
        with pytest.raises(KeyboardInterrupt):
            copy_to_mlflow(result, uri)
    assert copy_to_mlflow(result, uri) == 9
    assert copy_to_mlflow(result, uri) == 0


def interrupt(*args, **kwargs):
    raise KeyboardInterrupt


@pytest.mark.filterwarnings("ignore")  # MLflow's own dependencies warn
def test_names_and_steps_that_mlflow_does_not_take_are_made_such_that_it_does(result, tmp_path):
    odd = {"error by block, %": [(0.0, 1.0), (1.0, 2.0)], "interval against eta": [(0.1, 1.0, 3.0), (0.2, 2.0, 4.0)]}
    trials = tuple(dataclasses.replace(trial, curves=odd) for trial in result.trials[:1])
    uri = f"sqlite:///{tmp_path / 'odd.db'}"
    assert copy_to_mlflow(dataclasses.replace(result, trials=trials, tuning=()), uri) == 1
    client = mlflow.MlflowClient(tracking_uri=uri)
    experiment = client.get_experiment_by_name(f"heedful/{result.study.slug}")
    (run,) = client.search_runs([experiment.experiment_id])

    def history(key):
        return [(point.step, point.value) for point in client.get_metric_history(run.info.run_id, key)]

    assert history("curve/error by block_ _") == [(0, 1.0), (1, 2.0)]
    assert history("curve/interval against eta/0") == [(0, 1.0), (1, 2.0)]
    assert history("curve/interval against eta/1") == [(0, 3.0), (1, 4.0)]
