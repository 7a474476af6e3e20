"""MLflow on a local database: what MlflowClient reads back."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from trainformer.loggers import MLflowLogger, MultiLogger
from trainformer.loggers.mlflow import safe_name

pytestmark = pytest.mark.slow  # importing MLflow and creating its tables takes 10 to 20 s, once


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """The address of an empty database, made once for all tests here."""
    folder = tmp_path_factory.mktemp("mlflow")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
        patch.setenv("DO_NOT_TRACK", "true")
        patch.chdir(folder)
        from mlflow import MlflowClient

        uri = f"sqlite:///{folder / 'mlflow.db'}"
        MlflowClient(tracking_uri=uri).search_experiments()
        yield uri


@pytest.fixture
def client(store: str) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=store)


def history(client: Any, run_id: str, name: str) -> list[tuple[int, float]]:
    return sorted((metric.step, metric.value) for metric in client.get_metric_history(run_id, name))


def test_metrics_texts_and_parameters(store: str, client: Any, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    logger = MLflowLogger(experiment_name=request.node.name, run_name="first", tracking_uri=store)
    logger.init({"lr": 0.5, "data": {"size": 32, "crops": [2, 8]}, "none": None})
    for step in range(1, 101):
        logger.log({"train/loss": 1 / step, "train/epoch": step}, step)
    logger.log({"val/recall@5": 0.5, "val/strange": float("nan")}, step=100)
    logger.log_text("sample", "once upon a time", step=100)
    logger.finish()

    experiment = client.get_experiment_by_name(request.node.name)
    (run,) = client.search_runs([experiment.experiment_id])
    assert (run.info.run_name, run.info.status) == ("first", "FINISHED")
    assert run.data.params == {"lr": "0.5", "data.size": "32", "data.crops": "[2, 8]", "none": "None"}
    run_id = run.info.run_id
    assert history(client, run_id, "train/loss") == [(step, 1 / step) for step in range(1, 101)]
    assert history(client, run_id, "val/recall_at_5") == [(100, 0.5)]
    assert math.isnan(history(client, run_id, "val/strange")[0][1])
    assert [file.path for file in client.list_artifacts(run_id, "text/sample")] == ["text/sample/step-00000100.txt"]
    path = client.download_artifacts(run_id, "text/sample/step-00000100.txt", str(tmp_path))
    assert Path(path).read_text() == "once upon a time"


def test_long_and_many_parameters(store: str, client: Any) -> None:
    logger = MLflowLogger(tracking_uri=store)
    config: dict[str, Any] = {f"p{i}": i for i in range(250)}
    config |= {"long": "x" * 100_000, "k" * 300: 1}
    logger.init(config)
    logger.finish()
    params = client.get_run(logger.state_dict()["run_id"]).data.params
    assert len(params) == 252
    assert params["p249"] == "249"
    assert params["long"].endswith("x…")
    assert len(params["long"]) <= 6000
    assert params["k" * 250] == "1"


def test_names_mlflow_refuses_are_mapped_without_mixing_them_up(store: str, client: Any) -> None:
    logger = MLflowLogger(tracking_uri=store)
    logger.init({})
    keys = ["a#b", "a!b", "../up", "/abs//olute/", "", ".", "λ", "x" * 300, "x" * 301]
    logger.log({key: float(index) for index, key in enumerate(keys)}, step=1)
    logger.finish()
    metrics = client.get_run(logger.state_dict()["run_id"]).data.metrics
    assert sorted(metrics.values()) == [float(index) for index in range(len(keys))]
    assert metrics["a_b"] == 0
    assert metrics["up"] == 2
    assert metrics["abs/olute"] == 3
    assert metrics["λ"] == 6


@pytest.mark.parametrize("key", ["a:b", "x/..", "a" * 249 + "/.b", "spaces are fine", "\n", "💡/💡"])
def test_safe_names_pass_mlflows_own_check(key: str) -> None:
    from mlflow.utils.validation import _validate_metric_name

    name = safe_name(key)
    _validate_metric_name(name)
    assert 0 < len(name) <= 250


@pytest.mark.parametrize(
    ("status", "stored"),
    [("finished", "FINISHED"), ("stopped", "FINISHED"), ("interrupted", "KILLED"), ("failed", "FAILED")],
)
def test_status(store: str, client: Any, status: str, stored: str) -> None:
    logger = MLflowLogger(tracking_uri=store)
    logger.init({})
    logger.finish(status)
    logger.finish("finished")
    assert client.get_run(logger.state_dict()["run_id"]).info.status == stored


def test_resuming_goes_on_in_the_same_run_and_repeats_no_step(store: str, client: Any) -> None:
    first = MLflowLogger(tracking_uri=store)
    first.init({"lr": 0.5})
    for step in range(1, 4):
        first.log({"train/loss": float(step)}, step)
    first.log({"val/loss": 3.0}, step=3)
    first.flush()
    state = first.state_dict()  # the checkpoint at step 3
    for step in range(4, 6):
        first.log({"train/loss": float(step)}, step)
    first.finish("failed")

    second = MLflowLogger(tracking_uri=store)
    second.load_state_dict(state)
    second.continue_from(3)
    second.init({"lr": 0.25, "new": 1})
    assert client.get_run(state["run_id"]).info.status == "RUNNING"
    for step in range(4, 8):
        second.log({"train/loss": float(step)}, step)
    second.log({"val/loss": 5.0}, step=5)  # the first process died before it came to this
    second.finish()
    assert second.state_dict() == state
    second.load_state_dict({"run_id": "another"})
    assert second.state_dict() == {"run_id": "another"}
    assert history(client, state["run_id"], "train/loss") == [(step, float(step)) for step in range(1, 8)]
    assert history(client, state["run_id"], "val/loss") == [(3, 3.0), (5, 5.0)]
    run = client.get_run(state["run_id"])
    assert run.data.params == {"lr": "0.5", "new": "1"}
    assert run.info.status == "FINISHED"


def test_a_missing_run_is_replaced_with_a_warning(store: str, client: Any) -> None:
    for gone in ("0" * 32, _deleted_run(store, client)):
        logger = MLflowLogger(tracking_uri=store)
        logger.load_state_dict({"run_id": gone})
        with pytest.warns(RuntimeWarning, match=f"resume MLflow run {gone}.* A new run is started"):
            logger.init({})
        logger.log({"train/loss": 1.0}, step=1)
        logger.finish()
        assert logger.state_dict()["run_id"] != gone
        assert history(client, logger.state_dict()["run_id"], "train/loss") == [(1, 1.0)]


def _deleted_run(store: str, client: Any) -> str:
    logger = MLflowLogger(tracking_uri=store)
    logger.init({})
    logger.finish()
    run_id = logger.state_dict()["run_id"]
    client.delete_run(run_id)
    return run_id


def test_the_active_run_of_the_process_is_left_alone(store: str) -> None:
    import mlflow

    before = mlflow.get_tracking_uri()
    logger = MLflowLogger(tracking_uri=store)
    logger.init({})
    assert mlflow.active_run() is None
    assert mlflow.get_tracking_uri() == before
    logger.finish()


def test_a_failure_while_logging_does_not_end_training(store: str, client: Any) -> None:
    mlflow_logger = MLflowLogger(tracking_uri=store)
    logger = MultiLogger([mlflow_logger])
    logger.init({})
    client.delete_run(mlflow_logger.state_dict()["run_id"])  # from now on the store refuses everything
    logger.log({"train/loss": 1.0}, step=1)
    with pytest.warns(RuntimeWarning, match=r"MLflowLogger\.flush failed: MlflowException"):
        logger.flush()
    state = logger.state_dict()
    with pytest.warns(RuntimeWarning, match="MLflowLogger: 2 calls failed during the run"):
        logger.finish()
    assert state == {"MLflowLogger": mlflow_logger.state_dict()}
    assert logger.failures == {"MLflowLogger": 2}


def test_a_server_that_is_down_is_an_error_in_init() -> None:
    import mlflow

    logger = MultiLogger([MLflowLogger(tracking_uri="http://127.0.0.1:9")])
    with pytest.raises(mlflow.exceptions.MlflowException, match=r"127\.0\.0\.1"):
        logger.init({})
