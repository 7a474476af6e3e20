"""The run behind a `trainformer.hf.Trainer`, and the API of it that native callbacks receive as `trainer`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainformer.callbacks.compat.huggingface import Bridge, HuggingFaceCallback, add_new_entries, to_hf_metrics
from trainformer.hf.distributed import this_process
from trainformer.run import TorchRun
from trainformer.run.torch.api import TorchTrainerApi

if TYPE_CHECKING:
    from trainformer.hf.arguments import BaseTrainingArguments
    from trainformer.hf.trainer import Trainer


class HfRun(TorchRun):
    """A run that evaluates as HF arguments say: several datasets, a delay, a limit."""

    owner: HfHandle

    def evaluate(self) -> dict[str, float]:
        """Evaluate on all evaluation datasets, unless `eval_delay` has not passed."""
        front = self.owner.front
        if self.val_source is not None and self._is_delayed(front.args):
            return {}
        if self.val_source is None or front.evaluates_as_usual():
            return super().evaluate()
        self._last_metrics = metrics = front.evaluate_during_training()
        return metrics

    def _is_delayed(self, args: BaseTrainingArguments) -> bool:
        done = self.state.epoch if args.eval_strategy == "epoch" else self.state.step
        return done < args.eval_delay

    def _attach(self, callback: Any) -> None:
        # HF callbacks receive `on_init_end` once, when the trainer is built, not with every run.
        if not isinstance(callback, HuggingFaceCallback):
            super()._attach(callback)


class HfHandle(TorchTrainerApi):
    """The API of a run for native callbacks; `hf.Trainer` itself has HF's names for most of it."""

    def __init__(self, front: Trainer, run: HfRun | None = None) -> None:
        self.front = front
        self._run = run  # type: ignore[assignment]

    args = property(lambda self: self.front.args)
    processing_class = property(lambda self: self.front.processing_class)
    task = property(lambda self: self._run.task)
    lr = property(lambda self: self._run.settings.lr)
    monitor_metric = property(lambda self: self._run.settings.monitor_metric)

    def was_set(self, name: str) -> bool:
        """True: every setting is derived from the arguments."""
        return True


class RankedBridge(Bridge):
    """A bridge that knows the rank of this process before a run exists."""

    def __init__(self) -> None:
        super().__init__()
        self._read_rank()

    def _read_rank(self) -> None:
        process = this_process()
        self._is_main, self._is_local_main = process.rank == 0, process.local_rank == 0
        self._set_rank()

    def _set_rank(self) -> None:
        self.state.is_world_process_zero, self.state.is_local_process_zero = self._is_main, self._is_local_main

    def begin(self, trainer: Any) -> None:
        super().begin(trainer)
        self._read_rank()  # the process group exists by now

    def refresh(self, trainer: Any) -> None:
        super().refresh(trainer)
        self._set_rank()


class LogRelay:
    """First callback of a trainer that overrides `log`: passes every log record of the run through it."""

    sets_control = False

    def __init__(self, front: Trainer) -> None:
        self._front = front

    def on_log(self, trainer: Any, metrics: dict[str, Any]) -> None:
        add_new_entries(metrics, self._front.logs_of_override(to_hf_metrics(metrics)))
