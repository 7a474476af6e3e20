"""`Trainer`: the main entry point. Thin: it holds the settings and passes everything to a run."""

from __future__ import annotations

import inspect
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any, overload

from trainformer.callbacks.base import CallbackList
from trainformer.callbacks.progress import ProgressBar
from trainformer.core.errors import UnknownArgument, expected
from trainformer.core.synonyms import suggest_setting
from trainformer.distributed import is_main_process
from trainformer.run import RunSettings, TorchRun
from trainformer.run.check_report import CheckReport
from trainformer.run.fit import fit
from trainformer.run.torch.api import TorchTrainerApi
from trainformer.run.torch.preflight import check_run
from trainformer.utils.console import PipeConsole
from trainformer.utils.files import check_local


@dataclass(eq=False, repr=False)
class Trainer(RunSettings, TorchTrainerApi):
    """Trains any task.

    `data` and `val_data` are a path or name that the task can load, a tuple of tensors, a `Dataset`, or a `DataLoader`
    (used as is); several validation sets are a dict with their names. Every other setting is a keyword argument; see
    `RunSettings` for all of them.

    >>> import torch
    >>> class Line:
    ...     def __init__(self):
    ...         self.model = torch.nn.Linear(1, 1)
    ...     def train_step(self, batch):
    ...         x, y = batch
    ...         return torch.nn.functional.mse_loss(self.model(x), y)
    ...     def eval_step(self, batch):
    ...         return {"loss": self.train_step(batch)}
    >>> x = torch.linspace(-1, 1, 64)[:, None]
    >>> trainer = Trainer(Line(), (x, 2 * x + 1), val_split=0.25, epochs=80, lr=0.1, log="none")
    >>> trainer.fit().evaluate()["val/loss"] < 0.01
    True
    """

    task: Any
    data: Any
    val_data: Any = None
    val_split: float | int | None = None
    callbacks: list[Any] | None = None

    def __new__(cls, *args: Any, **kwargs: Any) -> Trainer:
        """Record which arguments were passed: a default that is passed explicitly is the user's choice, too."""
        self = super().__new__(cls)
        signature = inspect.signature(cls.__init__)
        try:
            self.__dict__["_passed"] = frozenset(signature.bind(self, *args, **kwargs).arguments)
        except TypeError:
            known = [name for name in signature.parameters if name != "self"]
            for name in (name for name in kwargs if name not in known):
                what = f"an argument of {cls.__name__}"
                raise UnknownArgument(expected(what, name, suggest_setting(name, known))) from None
            self.__dict__["_passed"] = frozenset()  # __init__ raises the error
        return self

    def __post_init__(self) -> None:
        callbacks = CallbackList(self.callbacks)
        console = PipeConsole(quiet=not is_main_process())
        if is_main_process() and _names_console(self.log) and not any(isinstance(cb, ProgressBar) for cb in callbacks):
            callbacks.add(ProgressBar(console))
        self._run = TorchRun(
            self,
            self.task,
            self,
            data=self.data,
            val_data=self.val_data,
            val_split=self.val_split,
            callbacks=callbacks,
            passed=self.__dict__["_passed"],
            console=console,
        )
        self._run.connect()

    def __repr__(self) -> str:
        return f"Trainer({type(self.task).__name__}, step {self.state.step} of {self.total_steps})"

    # -- training and inference -----------------------------------------------------------------------------

    def fit(self) -> Trainer:
        """Train. Called again, it continues: with more `epochs`, or from where it was stopped."""
        fit(self._run)
        return self

    def check(self, raise_on_failure: bool = True) -> CheckReport:
        """Check in seconds whether this run will work; model, optimizer, RNG state and position are left unchanged."""
        return check_run(self._run, raise_on_failure)

    def evaluate(self, data: Any = None, batch_size: int | None = None) -> dict[str, float]:
        """Metrics named ``val/...`` on the validation data, or on other data; of a dict of data, ``val/NAME/...``."""
        return self._run.evaluate_on(data, batch_size)

    @overload
    def predict(
        self, data: Any, batch_size: int | None = None, out: None = None, **options: Any
    ) -> list[dict[str, Any]]: ...

    @overload
    def predict(self, data: Any, batch_size: int | None = None, *, out: str | Path, **options: Any) -> Path: ...

    def predict(self, data: Any, batch_size: int | None = None, out: Any = None, **options: Any) -> Any:
        """Predictions of the task: one dict per sample, in input order, with its `id` and what the task returns.

        An id is the name of a file relative to its folder, the `id` of a record, or the row number. With `out`, a
        ``.parquet``, ``.jsonl`` or ``.csv`` file, predictions are written there batch by batch, with class names, and
        the path is returned. A file appears complete or not at all.

        A causal language model answers: rows have the `prompt`, the generated `text`, and the `target` if the records
        have one. `options` are then those of `generate`: `max_new_tokens`, `temperature`, `seed`, ...
        """
        if out is None:
            return self._run.predict(data, batch_size, **options)
        self._run.write_predictions(data, Path(out), batch_size, **options)
        return Path(out)

    def load(self, path: str | Path, components: Collection[str] | None = None) -> Trainer:
        """Load a file that `save` wrote, a checkpoint folder, or a run folder (its newest checkpoint).

        `components` loads only some of them, such as ``["model"]``. Nothing that is read is executed, and if anything
        does not fit, nothing is changed.
        """
        self._run.load(Path(path).expanduser(), components)
        return self

    def export(
        self,
        path: str | Path,
        format: str = "pytorch",
        input_shape: tuple[int, ...] | None = None,
        *,
        preprocess: bool = False,
    ) -> str:
        """Export the model: ``pytorch``, ``onnx``, ``torchscript`` or ``torch.export``; returns the path.

        `input_shape` is that of one sample, without the batch dimension; by default that of the data. With
        `preprocess`, the preprocessing of images is part of the graph: it takes uint8 images (N, C, H, W) of any size
        and returns probabilities (or embeddings). How to prepare images for other exports, the classes and the
        activation are in ``preprocessing.json`` beside the file.
        """
        check_local("the file", path)
        exported = self._run.exported(input_shape, preprocess)
        return self._run.process_group.run_on_main(lambda: str(exported.write(Path(path), format)))

    def was_set(self, name: str) -> bool:
        """Whether the user passed a setting, whatever its value."""
        return name in self.__dict__["_passed"]


def _names_console(log: Any) -> bool:
    names = log if isinstance(log, (list, tuple)) else [log]
    return "console" in names
