"""Weights & Biases. Owns resuming a wandb run, and that wandb never prompts for a login.

wandb keeps one row per step and only moves forward: a row is complete when a later step arrives. A resumed run
therefore skips the steps that are already logged. Online, the server knows them; for an offline run the last complete
step is kept in a small file next to the run's data.
"""

from __future__ import annotations

import netrc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from urllib.parse import urlsplit

from trainformer.context.jsonable import jsonable
from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.core.secrets import mask
from trainformer.loggers.base import BaseLogger, LoggerError, as_numbers

MODES = ("online", "offline", "disabled", "shared")
#: 255 is what wandb itself reports for Ctrl-C. Everything not named here is a failure.
_EXIT_CODES = {"finished": 0, "stopped": 0, "interrupted": 255}


class WandbLogger(BaseLogger):
    """Logs to Weights & Biases.

    `mode` is ``"online"``, ``"offline"``, ``"disabled"`` or ``"shared"``; without it, the environment variable
    ``WANDB_MODE`` and wandb's own settings apply. If a run is already active (from `wandb.init` or a wandb sweep), it
    is used, and left open at the end.
    """

    remote: ClassVar[bool] = True

    def __init__(
        self,
        project: str = "trainformer",
        name: str | None = None,
        entity: str | None = None,
        tags: list[str] | None = None,
        dir: str | os.PathLike[str] | None = None,
        mode: str | None = None,
    ) -> None:
        if mode is not None and mode not in MODES:
            raise BadArgument(expected(f"mode to be one of {', '.join(MODES)}, or None", mode))
        self.project = project
        self.name = name
        self.entity = entity
        self.tags = tags
        self.dir = dir
        self.mode = mode
        self._run: Any = None
        self._run_id: str | None = None
        self._resume_id: str | None = None
        self._is_external = False
        self._complete = -1  # the last step that is completely logged
        self._latest = -1  # the step that still receives values
        self._step_file: Path | None = None

    def init(self, config: dict[str, Any]) -> None:
        wandb = require("wandb", "wandb", "to log to Weights & Biases")
        resume_id, self._resume_id = self._resume_id, None
        self._is_external = wandb.run is not None
        if self._is_external:
            self._run = wandb.run
            self._run.config.update(jsonable(config), allow_val_change=True)
        else:
            self._run = self._start(wandb, jsonable(config), resume_id)
        self._run_id = self._run.id
        self._complete = self._latest = self._last_step(resumed=resume_id == self._run_id)

    def log(self, metrics: dict[str, float], step: int) -> None:
        self._log(as_numbers(metrics), step)

    def log_text(self, key: str, text: str, step: int) -> None:
        self._log({f"text/{key}": text}, step)

    def finish(self, status: str = "finished") -> None:
        if self._run is None:
            return
        run, self._run = self._run, None
        if not self._is_external:
            run.finish(exit_code=_EXIT_CODES.get(status, 1))
        self._save_complete_step(self._latest)

    def state_dict(self) -> dict[str, Any]:
        run_id = self._resume_id or self._run_id
        return {"run_id": run_id} if run_id else {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._resume_id = state.get("run_id")

    def _start(self, wandb: ModuleType, config: dict[str, Any], resume_id: str | None) -> Any:
        settings = wandb.setup().settings
        # wandb reads the environment once per process; this also honours what was set later.
        mode = self.mode or os.environ.get("WANDB_MODE") or settings.mode
        if mode in ("online", "shared", "run") and not _has_credentials(settings):
            raise LoggerError(
                f"Expected a Weights & Biases API key for {settings.base_url}, received none. Run `wandb login` once "
                "on this machine, or log to local files with WANDB_MODE=offline or WandbLogger(mode='offline')."
            )
        if self.dir is not None:
            Path(self.dir).mkdir(parents=True, exist_ok=True)
        options: dict[str, Any] = {}
        if mode == "offline" and "x_transaction_log_flush_interval" in getattr(wandb.Settings, "model_fields", ()):
            # Without it, a killed offline run loses its last 15 seconds.
            options["settings"] = wandb.Settings(x_transaction_log_flush_interval=1.0)
        with _masked_command():
            return wandb.init(
                project=self.project,
                name=self.name,
                entity=self.entity,
                tags=self.tags,
                dir=None if self.dir is None else str(self.dir),
                mode=mode,
                config=config,
                id=resume_id,
                resume="allow" if resume_id else None,
                **options,
            )

    def _log(self, values: dict[str, Any], step: int) -> None:
        run = self._started(self._run)
        if step <= self._complete:
            return  # logged before the run was resumed
        if step > self._latest:
            self._save_complete_step(self._latest)
            self._latest = step
        run.log(values, step=step)

    def _last_step(self, resumed: bool) -> int:
        """The last step an earlier process logged to this run, or -1."""
        self._step_file = None
        if self._run.offline and not self._is_external:
            # run.dir is wandb/offline-run-<time>-<id>/files; <time> differs between the processes of a run.
            self._step_file = Path(self._run.dir).parents[1] / f"last-step-{self._run.id}.txt"
            if resumed and self._step_file.exists():
                return int(self._step_file.read_text())
        return self._run.starting_step - 1 if resumed else -1

    def _save_complete_step(self, step: int) -> None:
        if self._step_file is not None and step >= 0:
            # Renamed into place, so a killed process leaves no partial number. No fsync: this runs at every log point.
            temporary = self._step_file.with_suffix(".tmp")
            temporary.write_text(str(step))
            os.replace(temporary, self._step_file)


@contextmanager
def _masked_command() -> Iterator[None]:
    """Without secrets in `sys.argv`, which wandb records."""
    before, sys.argv = sys.argv, mask(sys.argv)
    try:
        yield
    finally:
        sys.argv = before


def _has_credentials(settings: Any) -> bool:
    """Whether wandb finds an API key, so that it does not prompt for one."""
    if os.environ.get("WANDB_API_KEY") or os.environ.get("WANDB_IDENTITY_TOKEN_FILE"):
        return True
    if settings.api_key or getattr(settings, "identity_token_file", None):
        return True
    hosts = {urlsplit(settings.base_url).netloc}
    if any(host.endswith((".wandb.ai", ".coreweave.com")) for host in hosts):
        hosts.add("api.wandb.ai")  # newer versions use another address with the same keys
    return any(_in_netrc(host) for host in hosts)


def _in_netrc(host: str) -> bool:
    names = [os.environ["NETRC"]] if os.environ.get("NETRC") else ["~/.netrc", "~/_netrc"]
    for name in names:
        try:
            if netrc.netrc(os.path.expanduser(name)).authenticators(host) is not None:
                return True
        except (OSError, netrc.NetrcParseError):
            continue
    return False
