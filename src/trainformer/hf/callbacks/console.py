"""What a run shows on the console: `InfoCallback` at the start, `ProgressCallback` from then on."""

from __future__ import annotations

import logging
from collections import Counter
from types import SimpleNamespace
from typing import Any

import torch
from rich.console import Console

from trainformer.callbacks.compat import unwrap_callback
from trainformer.callbacks.compat.huggingface_types import TrainerCallback, TrainerControl, TrainerState
from trainformer.callbacks.progress import ProgressBar
from trainformer.core.errors import BadArgument, expected
from trainformer.hf.callbacks.common import (
    all_arguments,
    changed_arguments,
    is_evaluation,
    numbers,
    to_native,
    trainer_api,
)
from trainformer.loggers.console import ConsoleLogger

logger = logging.getLogger("trainformer")

_MAX_LENGTH = 80  # characters of an argument


class ProgressCallback(TrainerCallback):
    """A progress bar for training, a second one for evaluation, and a line for each log record.

    If the output is not a terminal, or with ``args.disable_tqdm``, it prints the lines only. Only the main process
    prints. If a trainer has several progress bars, only the first one is shown.

    Args:
        use_tqdm: Whether to draw bars; by default if the output is a terminal.
        output_stream: "stdout" (default), "stderr" or an open file.
        console: A console of rich, in place of a stream.
    """

    sets_control = False

    def __init__(
        self, use_tqdm: bool | None = None, output_stream: Any = None, *, console: Console | None = None
    ) -> None:
        if isinstance(use_tqdm, Console):
            use_tqdm, console = None, use_tqdm
        self.use_tqdm = use_tqdm
        self.console = console or _console(use_tqdm, output_stream)
        self.bar = ProgressBar(self.console)
        self._lines = ConsoleLogger(self.console, train_lines=True)
        self._is_shown = True
        self._draws = True
        self._is_training = False
        self._evaluated = 0  # batches of the current evaluation

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._is_shown = state.is_world_process_zero and self._is_first(kwargs.get("trainer"))
        self._draws = self._is_shown and not getattr(args, "disable_tqdm", False) and self.use_tqdm is not False
        self._is_training = True
        if self._draws:
            view = _view(state)
            metric = getattr(args, "metric_for_best_model", None) or "loss"
            view.monitor_metric = f"val/{metric.removeprefix('eval_')}"  # plotted in notebooks
            self.bar.on_train_begin(view)

    def on_epoch_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self.bar.on_epoch_begin(_view(state), int(state.epoch or 0))

    def on_step_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        view = _view(state, trainer_api(kwargs.get("trainer")))
        self.bar.on_step_end(view, state.global_step, view.current_loss)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if not self._is_shown or not logs or not state.is_world_process_zero:
            return
        shown_before = {"epoch"} if is_evaluation(logs) else set()  # in the line of the training metrics
        metrics = to_native(numbers({name: value for name, value in logs.items() if name not in shown_before}))
        if "train/loss" in metrics:  # neither an evaluation nor the summary of the run
            self.bar.on_log(_view(state), metrics)
        elif is_evaluation(logs):
            self.bar.on_validation_end(_view(state), metrics)
        self._lines.init({})
        self._lines.log(metrics, state.global_step)

    def on_prediction_step(
        self, args: Any, state: TrainerState, control: TrainerControl, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """Advance the evaluation bar. Outside of training it disappears after the last batch."""
        if not self._draws or not state.is_world_process_zero:
            return
        self._evaluated += 1
        total = _length(eval_dataloader)
        if self._is_training or (total is not None and self._evaluated <= total):
            self.bar.on_validation_batch_end(_view(state), self._evaluated, total)
        if not self._is_training and self._evaluated == total:
            self._evaluation_ended(state)

    def on_evaluate(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._evaluation_ended(state)

    on_predict = on_evaluate

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        self._is_training = False
        self.bar.on_train_end(_view(state))

    def on_error(
        self, args: Any, state: TrainerState, control: TrainerControl, error: BaseException, **kwargs: Any
    ) -> None:
        """Close the bar, so that the terminal is usable again."""
        self._is_training = False
        self.bar.on_error(_view(state), error)

    def _is_first(self, trainer: Any) -> bool:
        present = [unwrap_callback(callback) for callback in getattr(trainer, "_callbacks", None) or ()]
        if any(isinstance(callback, ProgressBar) for callback in present):
            return False
        return next((callback for callback in present if isinstance(callback, ProgressCallback)), self) is self

    def _evaluation_ended(self, state: TrainerState) -> None:
        self._evaluated = 0
        self.bar.on_validation_cleanup(_view(state))


def _console(use_tqdm: bool | None, stream: Any) -> Console:
    streams = {"stdout": False, "stderr": True}
    if stream is not None and stream not in streams and not hasattr(stream, "write"):
        raise BadArgument(expected("output_stream to be 'stdout', 'stderr' or an open file", stream))
    forced = True if use_tqdm else None
    if isinstance(stream, str) or stream is None:
        return Console(stderr=streams[stream or "stdout"], force_terminal=forced)
    return Console(file=stream, force_terminal=forced)


def _view(state: TrainerState, api: Any = None) -> Any:
    """What `ProgressBar` reads of a trainer; `api` is missing in a trainer of another library."""
    run = getattr(api, "state", None)
    counters = {name: getattr(run, name, 0) for name in ("samples", "tokens")}
    return SimpleNamespace(
        total_steps=state.max_steps if state.max_steps > 0 else None,
        state=SimpleNamespace(step=state.global_step, **counters),
        current_loss=getattr(api, "current_loss", None),
        current_lr=getattr(api, "current_lr", None),
    )


def _length(loader: Any) -> int | None:
    try:
        return len(loader)
    except TypeError:
        return None


class PrinterCallback(TrainerCallback):
    """Prints each log record as a dict, on the main process: what a run with ``disable_tqdm=True`` shows."""

    sets_control = False

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        if state.is_local_process_zero and logs:
            shown = {name: value for name, value in logs.items() if name != "total_flos"}
            print({name: f"{value:.4g}" if isinstance(value, float) else value for name, value in shown.items()})


class InfoCallback(TrainerCallback):
    """Logs a summary when training begins, with the logger "trainformer" at level INFO.

    It shows parameters (total, trainable, dtypes), dataset sizes, device, steps, effective batch size, and the
    arguments that differ from their defaults. With `verbose` it also shows all other arguments, and the model.
    """

    sets_control = False

    def __init__(self, verbose: bool = False) -> None:
        self.verbose = verbose

    def on_train_begin(
        self, args: Any, state: TrainerState, control: TrainerControl, model: Any = None, **kwargs: Any
    ) -> None:
        if not state.is_world_process_zero:
            return
        changed = {name: str(value) for name, value in changed_arguments(args, kwargs.get("trainer")).items()}
        shown = {
            name: text if len(text) <= _MAX_LENGTH else f"{text[: _MAX_LENGTH - 3]}..."
            for name, text in changed.items()
        }
        loaders = {"train": kwargs.get("train_dataloader"), "eval": kwargs.get("eval_dataloader")}
        lines = {
            "model": _describe_model(model),
            "data": ", ".join(f"{name} {_size(loader)}" for name, loader in loaders.items() if loader),
            "device": _describe_device(model, args),
            "steps": _describe_steps(args, state, kwargs.get("train_dataloader")),
            "batch": _describe_batch(args, kwargs.get("trainer")),
            "arguments": ", ".join(f"{name}={text}" for name, text in sorted(shown.items())),
        }
        width = max(map(len, lines))
        text = "\n".join(f"  {name:<{width}}  {line}" for name, line in lines.items() if line)
        logger.info("training begins\n%s", text)
        if self.verbose:
            rest = [f"  {name}={value}" for name, value in sorted(all_arguments(args).items()) if name not in shown]
            logger.info("all arguments\n%s\n%s", "\n".join(rest), model)


def _describe_model(model: Any) -> str:
    if model is None:
        return ""
    parameters = list(model.parameters())
    total = sum(p.numel() for p in parameters)
    trained = sum(p.numel() for p in parameters if p.requires_grad)
    kinds = Counter[str]()
    for p in parameters:
        kinds[str(p.dtype).removeprefix("torch.")] += p.numel()
    share = "all trainable" if trained == total else f"{trained:,} trainable ({trained / max(total, 1):.2%})"
    dtypes = ", ".join(f"{name} {count:,}" if len(kinds) > 1 else name for name, count in kinds.most_common())
    return f"{type(model).__name__}, {total:,} parameters, {share}; {dtypes}"


def _size(loader: Any) -> str:
    try:
        return f"{len(loader.dataset):,} samples"
    except (TypeError, AttributeError):
        return "a stream"


def _describe_device(model: Any, args: Any) -> str:
    first = next(iter(model.parameters()), None) if model is not None else None
    device = first.device if first is not None else getattr(args, "device", None)
    if isinstance(device, torch.device) and device.type == "cuda":
        return f"{device} ({torch.cuda.get_device_name(device)})"
    return str(device or "")


def _describe_steps(args: Any, state: TrainerState, train: Any) -> str:
    batches = _length(train)
    per_epoch = None if batches is None else -(-batches // max(1, args.gradient_accumulation_steps))
    parts = [f"{per_epoch:,} per epoch"] if per_epoch is not None else []
    if state.max_steps > 0:
        parts.append(f"{state.max_steps:,} in total")
        if per_epoch:
            parts[-1] += f" ({state.max_steps / per_epoch:g} epochs)"
    if state.global_step:
        parts.append(f"resuming after {state.global_step:,}")
    return ", ".join(parts)


def _describe_batch(args: Any, trainer: Any) -> str:
    size, accumulation = args.per_device_train_batch_size, args.gradient_accumulation_steps
    # Ranks that hold shards of one model compute the same samples.
    process_group = getattr(trainer, "_process_group", None)
    replicas = getattr(args, "world_size", 1) if process_group is None else process_group.dp_world_size
    total = size * accumulation * replicas
    return f"{total:,} samples per step: {size} per device x {accumulation} accumulated x {replicas} processes"


class TrainerControlCallback(TrainerCallback):
    """Logs how to control the run from another terminal when training begins. Every run can be, also without it."""

    sets_control = False

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            folder = getattr(args, "logging_dir", None) or args.output_dir
            logger.info("to control this run: trainformer ctl --help; its folder is %s", folder)
