"""`TBLogger`: what is logged, as TensorBoard scalars, with what the run was made of as texts."""

from __future__ import annotations

from typing import Any

from trainformer.callbacks.compat.huggingface_types import TrainerCallback, TrainerControl, TrainerState
from trainformer.hf.callbacks.arguments import all_arguments
from trainformer.hf.callbacks.names import as_tags, numbers
from trainformer.hf.callbacks.writers import WriterHandle


class TBLogger(TrainerCallback):
    """Metrics, arguments, the model's configuration, and what you say about the experiment, in TensorBoard.

    `summary_writer` is a `SummaryWriter`, or a folder. Scalars are named as transformers names them (``train/loss``,
    ``train/learning_rate``, ``eval/loss``). Texts at the beginning: ``experiment_info`` (the keyword arguments),
    ``args`` and ``model_config``. A folder's writer is closed when training ends, and a resumed run hides what was
    written after the step it goes on from; a writer that you made is only flushed.
    """

    sets_control = False

    def __init__(self, summary_writer: Any, **experiment_info: Any) -> None:
        self.experiment_info = experiment_info
        self._writer = WriterHandle(summary_writer, "TBLogger")

    def on_train_begin(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Say what this run is."""
        if not state.is_world_process_zero:
            return
        self._writer.open(state)
        if self.experiment_info:
            self._writer.add_record("experiment_info", self.experiment_info, state.global_step)
        self._writer.add_record("args", all_arguments(args), state.global_step)
        config = getattr(kwargs.get("model"), "config", None)
        if config is not None:
            content = config.to_dict() if callable(getattr(config, "to_dict", None)) else config
            self._writer.add_record("model_config", content, state.global_step)

    def on_log(self, args: Any, state: TrainerState, control: TrainerControl, logs: Any = None, **kwargs: Any) -> None:
        """Write the numbers of a record; texts among them go to the texts."""
        if not state.is_world_process_zero or not logs:
            return
        tags = as_tags(logs)
        self._writer.add_scalars(numbers(tags), state.global_step)
        for name, value in tags.items():
            if isinstance(value, str):
                self._writer.add_text(name, value, state.global_step)

    def on_train_end(self, args: Any, state: TrainerState, control: TrainerControl, **kwargs: Any) -> None:
        """Everything is written."""
        self._writer.close()
