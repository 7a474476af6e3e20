"""MLflow. Owns the mapping of our names and values to what MLflow accepts, and how a run is found again.

Metrics are sent in the background and in batches: one request takes some 20 ms with a local database, and minutes
when a server is down, since MLflow retries by itself. Only `MlflowClient` is used, so the "active run" of the
process, which may be the user's own, is left alone.
"""

from __future__ import annotations

import posixpath
import re
import time
import warnings
import zlib
from types import ModuleType
from typing import Any, ClassVar

from trainformer.core.optional import require
from trainformer.loggers.base import BaseLogger
from trainformer.loggers.sender import Sender
from trainformer.loggers.values import as_numbers, flatten

# MLflow's own limits for one request and one name. A value may be as long as the installed version allows, see below.
METRICS_PER_REQUEST = 1000
PARAMS_PER_REQUEST = 100
MAX_NAME = 250
#: Everything not named here is FAILED.
_STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}


class MLflowLogger(BaseLogger):
    """Logs to an MLflow tracking server or a local store.

    Without `tracking_uri`, the environment variable ``MLFLOW_TRACKING_URI`` and MLflow's own default decide.
    """

    remote: ClassVar[bool] = True

    def __init__(
        self,
        experiment_name: str = "trainformer",
        run_name: str | None = None,
        tracking_uri: str | None = None,
    ) -> None:
        self.experiment_name = experiment_name
        self.run_name = run_name
        self.tracking_uri = tracking_uri
        self._mlflow: ModuleType | None = None
        self._client: Any = None
        self._sender: Sender[Any] | None = None
        self._run_id: str | None = None
        self._resume_id: str | None = None
        self._names: dict[str, str] = {}
        self._logged: dict[str, int] = {}  # the last step each metric had when the run was resumed

    def init(self, config: dict[str, Any]) -> None:
        self._mlflow = require("mlflow", "mlflow", "to log to MLflow")
        self._client = self._mlflow.MlflowClient(tracking_uri=self.tracking_uri)
        resume_id, self._resume_id = self._resume_id, None
        self._names, self._logged = {}, {}
        run = self._find_run(resume_id) if resume_id else None
        if run is None:
            run = self._client.create_run(self._experiment_id(), run_name=self.run_name)
        else:
            self._client.update_run(resume_id, status="RUNNING")
            for name in run.data.metrics:
                history = self._client.get_metric_history(resume_id, name)
                self._logged[name] = max(metric.step for metric in history)
        self._run_id = run.info.run_id
        self._sender = Sender(self._send, batch_size=METRICS_PER_REQUEST)
        self._log_params(config, known=run.data.params)

    def log(self, metrics: dict[str, float], step: int) -> None:
        sender = self._started(self._sender)
        assert self._mlflow is not None
        now = int(time.time() * 1000)
        new = []
        for key, value in as_numbers(metrics).items():
            name = self._name(key)
            if step > self._logged.get(name, -1):
                new.append(self._mlflow.entities.Metric(name, float(value), now, step))
        sender.put(new)

    def log_text(self, key: str, text: str, step: int) -> None:
        self._started(self._sender)
        # The step in the name makes a repeated step overwrite its own file.
        self._client.log_text(self._run_id, text, f"text/{self._name(key)}/step-{step:08d}.txt")

    def flush(self) -> None:
        if self._sender is not None:
            self._sender.flush(timeout=10)

    def finish(self, status: str = "finished") -> None:
        if self._sender is None:
            return
        sender, self._sender = self._sender, None
        try:
            sender.close(timeout=60)
        finally:
            if sender.dropped:
                warnings.warn(f"{sender.dropped} values did not reach MLflow.", RuntimeWarning, stacklevel=2)
            self._client.set_terminated(self._run_id, _STATUS.get(status, "FAILED"))

    def state_dict(self) -> dict[str, Any]:
        run_id = self._resume_id or self._run_id
        return {"run_id": run_id} if run_id else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resume_id = state.get("run_id")

    def _send(self, metrics: list[Any]) -> None:
        self._client.log_batch(self._run_id, metrics=metrics)

    def _experiment_id(self) -> str:
        experiment = self._client.get_experiment_by_name(self.experiment_name)
        if experiment is None:
            try:
                return self._client.create_experiment(self.experiment_name)
            except Exception:
                # Another process of a sweep may have created it in between.
                experiment = self._client.get_experiment_by_name(self.experiment_name)
                if experiment is None:
                    raise
        return experiment.experiment_id

    def _find_run(self, run_id: str) -> Any:
        """The run to go on with, or None if this tracking store does not have it any more."""
        assert self._mlflow is not None
        try:
            run = self._client.get_run(run_id)
        except self._mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            run = None
        if run is not None and run.info.lifecycle_stage == "active":
            return run
        warnings.warn(
            f"Expected to go on with MLflow run {run_id}, but the tracking store does not have it. A new run is "
            "started. To go on with the old one, use the tracking_uri it was logged to.",
            RuntimeWarning,
            stacklevel=3,
        )
        return None

    def _log_params(self, config: dict[str, Any], known: dict[str, str]) -> None:
        assert self._mlflow is not None
        validation = require("mlflow.utils.validation", "mlflow", "to log to MLflow")
        longest = getattr(validation, "MAX_PARAM_VAL_LENGTH", 500)
        params = []
        for key, value in flatten(config).items():
            name, text = self._name(key), str(value)
            # MLflow refuses to change a parameter: the values a run was started with stay.
            if name not in known:
                text = text if len(text) <= longest else text[: longest - 1] + "…"
                params.append(self._mlflow.entities.Param(name, text))
        for start in range(0, len(params), PARAMS_PER_REQUEST):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMS_PER_REQUEST])

    def _name(self, key: str) -> str:
        """A name MLflow accepts, and another one for every other key."""
        if key not in self._names:
            name = safe_name(key)
            if name in self._names.values():
                name = f"{name[: MAX_NAME - 9]}_{zlib.crc32(key.encode()):08x}"
            self._names[key] = name
        return self._names[key]


def safe_name(key: str) -> str:
    """The nearest name MLflow accepts: letters, digits, ``_-. /`` in a path without empty or dotted parts.

    >>> safe_name("val/recall@5"), safe_name("loss (λ)"), safe_name("/a//../b")
    ('val/recall_at_5', 'loss _λ_', 'b')
    """
    name = re.sub(r"[^\w\-. /]", "_", key.replace("@", "_at_"))[:MAX_NAME]
    return posixpath.normpath("/" + name).lstrip("/") or "_"
