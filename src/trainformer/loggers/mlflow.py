"""MLflow. Owns the mapping of metric names and values to what MLflow accepts, and resuming an MLflow run.

Metrics are sent in batches by a background thread: a request takes about 20 ms with a local database, and minutes when
a server is down, since MLflow retries by itself. Only `MlflowClient` is used, so the process-wide "active run", which
may be the user's own, is not touched.
"""

from __future__ import annotations

import posixpath
import re
import time
import warnings
import zlib
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from types import ModuleType
from typing import Any, ClassVar, Generic, TypeVar

from trainformer.core.optional import require
from trainformer.loggers.base import BaseLogger, as_numbers, flatten

Item = TypeVar("Item")

# MLflow's limits for one request and one name. The limit for values depends on the installed version, see below.
METRICS_PER_REQUEST = 1000
PARAMS_PER_REQUEST = 100
MAX_NAME = 250
#: Everything else is FAILED.
_STATUS = {"finished": "FINISHED", "stopped": "FINISHED", "interrupted": "KILLED"}


class MLflowLogger(BaseLogger):
    """Logs to an MLflow tracking server or a local store.

    Without `tracking_uri`, the environment variable ``MLFLOW_TRACKING_URI`` and MLflow's own default apply.
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
        # With the step in its name, a repeated step overwrites its own file.
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
                # Another process may have created it in the meantime.
                experiment = self._client.get_experiment_by_name(self.experiment_name)
                if experiment is None:
                    raise
        return experiment.experiment_id

    def _find_run(self, run_id: str) -> Any:
        """The run to resume, or None if this tracking store does not have it."""
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
            f"Expected to resume MLflow run {run_id}, but the tracking store does not have it. A new run is started. "
            "To resume the old one, use the tracking_uri it was logged to.",
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
            # MLflow refuses to change a parameter: a resumed run keeps its original values.
            if name not in known:
                text = text if len(text) <= longest else text[: longest - 1] + "…"
                params.append(self._mlflow.entities.Param(name, text))
        for start in range(0, len(params), PARAMS_PER_REQUEST):
            self._client.log_batch(self._run_id, params=params[start : start + PARAMS_PER_REQUEST])

    def _name(self, key: str) -> str:
        """A name that MLflow accepts, different for every key."""
        if key not in self._names:
            name = safe_name(key)
            if name in self._names.values():
                name = f"{name[: MAX_NAME - 9]}_{zlib.crc32(key.encode()):08x}"
            self._names[key] = name
        return self._names[key]


def safe_name(key: str) -> str:
    """The closest name that MLflow accepts: letters, digits, ``_-. /`` in a path without empty or dotted parts.

    >>> safe_name("val/recall@5"), safe_name("loss (λ)"), safe_name("/a//../b")
    ('val/recall_at_5', 'loss _λ_', 'b')
    """
    name = re.sub(r"[^\w\-. /]", "_", key.replace("@", "_at_"))[:MAX_NAME]
    return posixpath.normpath("/" + name).lstrip("/") or "_"


class Sender(Generic[Item]):
    """Sends items in batches from a background thread, so that the training loop never waits for a server.

    One batch is in flight at a time. A failed batch is sent again after `pause` seconds and dropped after `tries`
    failures, since a batch that the server rejects would block all others. `dropped` counts the dropped items. All
    state belongs to the calling thread; the worker thread only runs `send`.

    >>> received: list[int] = []
    >>> sender = Sender(received.extend, batch_size=10)
    >>> sender.put([1, 2])
    >>> sender.close(timeout=10)
    >>> received
    [1, 2]
    """

    def __init__(
        self,
        send: Callable[[list[Item]], object],
        *,
        batch_size: int,
        keep: int = 100_000,
        pause: float = 30.0,
        tries: int = 5,
    ) -> None:
        self.dropped = 0
        self._send = send
        self._batch_size = batch_size
        self._keep = keep
        self._pause = pause
        self._tries = tries
        self._waiting: list[Item] = []
        self._batch: list[Item] = []
        self._future: Future[object] | None = None
        self._failed = 0
        self._not_before = 0.0
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="trainformer-sender")

    def put(self, items: Iterable[Item]) -> None:
        """Queue items. Raises the error of an earlier batch, if there is one; the new items are queued anyway."""
        self._waiting.extend(items)
        excess = max(0, len(self._waiting) - self._keep)
        del self._waiting[:excess]
        self.dropped += excess
        if self._future is None or self._future.done():
            self._collect()
            if time.monotonic() >= self._not_before:
                self._start()

    def flush(self, timeout: float) -> None:
        """Wait until everything is sent. Raises if a batch fails, or after `timeout` seconds."""
        deadline = time.monotonic() + timeout
        while True:
            self._collect()
            self._start()
            if self._future is None:
                return
            if not wait([self._future], deadline - time.monotonic()).done:
                left = len(self._batch) + len(self._waiting)
                raise TimeoutError(f"{left} items were not sent within {timeout:g} s; the receiver does not answer.")

    def close(self, timeout: float) -> None:
        """Send what is left, if possible, and stop the worker."""
        try:
            self.flush(timeout)
        finally:
            self._pool.shutdown(wait=False, cancel_futures=True)

    def _start(self) -> None:
        if self._future is None and self._waiting:
            self._batch = self._waiting[: self._batch_size]
            del self._waiting[: self._batch_size]
            self._future = self._pool.submit(self._send, self._batch)

    def _collect(self) -> None:
        """Handle the result of the last batch, if it is done."""
        if self._future is None or not self._future.done():
            return
        error, self._future = self._future.exception(), None
        if error is None:
            self._failed = 0
            return
        self._failed += 1
        self._not_before = time.monotonic() + self._pause
        if self._failed < self._tries:
            self._waiting[:0] = self._batch
        else:
            self.dropped += len(self._batch)
            self._failed = 0
        raise error
