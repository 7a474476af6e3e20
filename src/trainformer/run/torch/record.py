"""``task.json`` in every checkpoint: what it takes, besides the weights, to build the task again without its data.

That is the name and the arguments of the task, the metadata of the data, what the task learned from them, and the
settings that affect predictions. Nothing in the file is executed: it names a task that is installed, and has values.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from trainformer import adapters
from trainformer.adapters.base import Adapter
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.secrets import mask
from trainformer.core.types import HostBatch
from trainformer.data.metadata import DatasetInfo
from trainformer.tasks import find_task, task_names
from trainformer.tasks.base import provides
from trainformer.utils.files import decode_json

if TYPE_CHECKING:
    from trainformer.run.torch.run import TorchRun

FILE = "task.json"
_VERSION = 1
# Settings that affect what a model predicts.
_SETTINGS = ("precision", "channels_last", "matmul_precision", "sdpa_backend", "seed", "batch_size", "eval_batch_size")
_FROM_DATA = ("num_classes", "class_names", "problem")  # arguments that may be left to the data
_TUPLE, _ADAPTER = "tuple", "adapter"
_ADAPTERS = ("LoRA", "QLoRA", "PrefixTuning")


class NeedsTrainingData(BadArgument):
    """The task can only be built with the training data."""


@dataclass(frozen=True)
class TaskRecord:
    """What is recorded of a task. `opaque` names the arguments that are no plain values, such as a module."""

    task: str
    module: str
    arguments: dict[str, Any]
    opaque: dict[str, str]
    info: DatasetInfo
    learned: dict[str, Any]
    settings: dict[str, Any]

    @classmethod
    def of(cls, run: TorchRun) -> TaskRecord:
        """What is to be recorded of a run."""
        task, settings = run.task, run.settings.values()
        fields = dataclasses.fields(task) if dataclasses.is_dataclass(task) else ()
        arguments, opaque = {}, {}
        for name in (field.name for field in fields if field.init):
            value = getattr(task, name)
            try:
                arguments[name] = _encoded(value)
            except TypeError:
                opaque[name] = type(value).__name__
        return cls(
            type(task).__name__,
            type(task).__module__,
            mask(arguments, "task"),
            opaque,
            run.info,
            task.learned() if provides(task, "learned") else {},
            {name: settings[name] for name in _SETTINGS if _is_plain(settings.get(name))},
        )

    def write(self, folder: Path) -> str:
        """Write the file; returns its name."""
        content = {"version": _VERSION, **dataclasses.asdict(self)}
        (folder / FILE).write_text(json.dumps(content, indent=1, default=list), encoding="utf-8")
        return FILE

    @classmethod
    def read(cls, folder: Path) -> TaskRecord | None:
        """The record in a folder, from anybody; None if there is none."""
        file = folder / FILE
        if not file.is_file():
            return None
        try:
            content = decode_json(file.read_bytes())
            if content.pop("version") != _VERSION:
                raise BadArgument(
                    expected(f"{file} of version {_VERSION}", "another", "Use the trainformer it is from.")
                )
            info = content.pop("info")
            known = {field.name for field in dataclasses.fields(DatasetInfo)}
            metadata = DatasetInfo(**{name: value for name, value in info.items() if name in known})
            if metadata.input_shape is not None:
                metadata.input_shape = tuple(metadata.input_shape)
            content["settings"] = {name: value for name, value in content["settings"].items() if name in _SETTINGS}
            return cls(info=metadata, **content)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            if isinstance(error, BadArgument):
                raise
            raise DataError(f"Expected the record of a task in {file}, received something else ({error}).") from error

    def build(self, **changes: Any) -> Any:
        """Build the task, with `changes` to its arguments."""
        kind: Any = find_task(self.task) if self.task in task_names() else None
        if kind is None or kind.__module__ != self.module:
            raise BadArgument(
                f"Expected a task of trainformer or of an installed package, received {self.module}.{self.task}. Make "
                f"it yourself and pass it: trainformer.load(folder, task={self.task}(...))."
            )
        stand_ins = kind.stand_ins(self.opaque) if hasattr(kind, "stand_ins") else {}
        changes = {**stand_ins, **changes}
        missing = {name: what for name, what in self.opaque.items() if name not in changes}
        if missing:
            listed = ", ".join(f"{name} (a {what})" for name, what in missing.items())
            raise BadArgument(
                f"Expected arguments of {self.task} that can be written to a file, received {listed}. Make the task "
                f"yourself and pass it: trainformer.load(folder, task={self.task}(...))."
            )
        try:
            arguments = {name: _decoded(value) for name, value in self.arguments.items()}
            return kind(**{**arguments, **changes})
        except TypeError as error:
            raise DataError(f"Expected arguments of {self.task} in {FILE}, received others ({error}).") from error


@dataclass(frozen=True)
class RecordedData:
    """Stands for training data that are not there: their metadata, and what the task learned from them."""

    record: TaskRecord

    @property
    def batches_per_epoch(self) -> int | None:
        """Unknown."""
        return None

    def batches(self, epoch: int, batch: int = 0, position: int = 0) -> Iterator[HostBatch]:
        """There are none."""
        raise BadArgument("Expected training data, received a record of them. Make a Trainer with the data to train.")

    def configure(self, task: Any) -> None:
        """Configure a task as the data did."""
        if provides(task, "inspect_dataset") and not provides(task, "use_learned"):
            raise NeedsTrainingData(
                f"{type(task).__name__} reads the training data (inspect_dataset), and does not say what it learned "
                "from them. Define learned() and use_learned(learned) on the task; see docs/tasks.md."
            )
        for name in _FROM_DATA:
            value = self.record.arguments.get(name)
            if value is not None and getattr(task, name, value) is None:
                setattr(task, name, _decoded(value))
        if provides(task, "use_learned") and self.record.learned:
            try:
                task.use_learned(self.record.learned)
            except (KeyError, TypeError, AttributeError) as error:
                raise DataError(f"{type(task).__name__} did not learn this from its data: {error!r}.") from error
        if provides(task, "configure"):
            task.configure(self.record.info)


def with_record(run: TorchRun, save_assets: Callable[[Path], list[str]] | None) -> Callable[[Path], list[str]]:
    """Write the record along with the other files of a checkpoint."""

    def write(folder: Path) -> list[str]:
        names = [] if save_assets is None else save_assets(folder)
        return [*names, TaskRecord.of(run).write(folder)]

    return write


# -- values ------------------------------------------------------------------------------------------------


def _encoded(value: Any) -> Any:
    """An argument in JSON types; raises TypeError if it has no such form."""
    if isinstance(value, Path):
        return str(value)
    if isinstance(value, np.generic):
        return _encoded(value.item())
    if isinstance(value, Adapter) and type(value).__name__ in _ADAPTERS:
        fields: Any = dataclasses.fields(value)  # type: ignore[arg-type]
        arguments = {field.name: _encoded(getattr(value, field.name)) for field in fields if field.init}
        return {_ADAPTER: type(value).__name__, "arguments": arguments}
    if isinstance(value, tuple):
        return {_TUPLE: [_encoded(item) for item in value]}
    if isinstance(value, list):
        return [_encoded(item) for item in value]
    if isinstance(value, Mapping) and all(isinstance(key, str) for key in value):
        return {key: _encoded(item) for key, item in value.items()}
    if value is None or type(value) in (str, int, float, bool):
        return value
    raise TypeError(type(value).__name__)


def _decoded(value: Any) -> Any:
    if isinstance(value, Mapping):
        if set(value) == {_TUPLE}:
            return tuple(_decoded(item) for item in value[_TUPLE])
        if set(value) == {_ADAPTER, "arguments"} and value[_ADAPTER] in _ADAPTERS:
            return getattr(adapters, value[_ADAPTER])(**_decoded(value["arguments"]))
        return {key: _decoded(item) for key, item in value.items()}
    return [_decoded(item) for item in value] if isinstance(value, list) else value


def _is_plain(value: Any) -> bool:
    return isinstance(value, str | int | float | bool | None | Sequence)
