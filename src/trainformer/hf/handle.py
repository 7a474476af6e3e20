"""What native callbacks get as `trainer` in a run of `trainformer.hf`, and the session behind it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from trainformer.callbacks.compat.huggingface import Bridge, HuggingFaceCallback, translated, translated_name
from trainformer.hf.distributed import this_process
from trainformer.run import TorchRun
from trainformer.run.torch.api import TorchTrainerApi

if TYPE_CHECKING:
    from trainformer.hf.trainer import Trainer


class HfRun(TorchRun):
    """A session whose evaluations obey HuggingFace's arguments: several data sets, a delay, a limit."""

    owner: HfHandle

    def evaluate(self) -> dict[str, float]:
        """Evaluate on all evaluation data, unless it is too early."""
        front = self.owner.front
        args = front.args
        if self.val_source is None or self._is_early(args):
            return super().evaluate() if self.val_source is None else {}
        if front.evaluates_as_usual():
            return super().evaluate()
        self._last_metrics = metrics = front.evaluate_all()
        return metrics

    def _is_early(self, args: Any) -> bool:
        done = self.state.epoch if args.eval_strategy == "epoch" else self.state.step
        return done < args.eval_delay

    def _attach(self, callback: Any) -> None:
        # HuggingFace's hear `on_init_end` when the trainer is built, not with every run of it.
        if not isinstance(callback, HuggingFaceCallback):
            super()._attach(callback)


class RankedBridge(Bridge):
    """What HuggingFace's callbacks share, on one of several processes: they ask whether theirs is the first."""

    def __init__(self) -> None:
        super().__init__()
        self._look()

    def _look(self) -> None:
        process = this_process()
        self._is_first, self._is_first_here = process.rank == 0, process.local_rank == 0
        self._say_who()

    def _say_who(self) -> None:
        self.state.is_world_process_zero, self.state.is_local_process_zero = self._is_first, self._is_first_here

    def begin(self, trainer: Any) -> None:
        """Before the first callback hears that training begins. By now the processes have met."""
        super().begin(trainer)
        self._look()

    def refresh(self, trainer: Any) -> None:
        """Bring the state up to where the run is."""
        super().refresh(trainer)
        self._say_who()


class LogRelay:
    """First of the callbacks of a trainer that overrides `log`: every record of the run goes through it."""

    sets_control = False

    def __init__(self, front: Trainer) -> None:
        self._front = front

    def on_log(self, trainer: Any, metrics: dict[str, Any]) -> None:
        """What the trainer adds becomes part of the record."""
        known = {translated_name(name) for name in metrics} | {"epoch"}
        made = self._front.recorded(translated(metrics))
        metrics.update({name: value for name, value in made.items() if name not in known})


class HfHandle(TorchTrainerApi):
    """A run of a `trainformer.hf.Trainer`, which has names of its own for most of this."""

    def __init__(self, front: Trainer, run: HfRun | None = None) -> None:
        self.front = front
        self._run = run  # type: ignore[assignment]

    args = property(lambda self: self.front.args)
    processing_class = property(lambda self: self.front.processing_class)
    task = property(lambda self: self._run.task)
    train_dataloader = property(lambda self: self.front.train_dataloader)
    val_dataloader = property(lambda self: self.front.eval_dataloader)
    lr = property(lambda self: self._run.settings.lr)
    monitor_metric = property(lambda self: self._run.settings.monitor_metric)

    def was_set(self, name: str) -> bool:
        """Every setting follows from the arguments."""
        return True
