"""What a path or name stands for: a run, a folder with a model or an adapter, or a model of the hub, and its task."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainformer.adapters.base import kind_of_name, kind_of_task_type
from trainformer.adapters.saved import SavedAdapters
from trainformer.adapters.state import CONFIG_FILE as ADAPTER_CONFIG
from trainformer.checkpointing.tools.listing import existing, is_checkpoint
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require
from trainformer.data.metadata import DatasetInfo
from trainformer.run.torch.record import TaskRecord
from trainformer.tasks import find_task
from trainformer.utils.files import decode_json

HUB = "hf:"
CONFIG = "config.json"
_HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# The task that opens a model of transformers of which nothing else is known.
_TASKS = {
    "causal_lm": "CausalLM",
    "seq2seq": "Seq2Seq",
    "masked_lm": "MaskedLM",
    "sequence_classification": "TextClassification",
    "token_classification": "TokenClassification",
}


def hub_name(name: str) -> str | None:
    """The name of a model of the hub: ``hf:name``, or ``owner/name`` where there is no folder `owner`; else None.

    >>> hub_name("hf:gpt2"), hub_name("some/model"), hub_name("model")
    ('gpt2', 'some/model', None)
    """
    if os.path.exists(name):
        return None
    if name.startswith(HUB):
        return name.removeprefix(HUB)
    # A mistyped path must not become a request: `runs/pest` is a path, if there is a folder `runs`.
    is_name = _HUB_NAME.fullmatch(name) and not os.path.isdir(name.partition("/")[0])
    return name if is_name else None


def find_model(path: str | Path) -> Path | str:
    """The path, or the name of a model of the hub."""
    name = hub_name(path) if isinstance(path, str) else None
    return existing(Path(path).expanduser()) if name is None else name


def is_finalized(place: Path) -> bool:
    """Whether a folder holds a model of its own, and is no checkpoint."""
    names = ("finalized.json", CONFIG)
    return (
        place.is_dir()
        and not is_checkpoint(place)
        and bool(list(place.glob("*.safetensors")))
        and any((place / name).is_file() for name in names)
        and not is_adapter_folder(place)
    )


def is_adapter_folder(place: Path) -> bool:
    """Whether a folder holds an adapter of peft, and is no checkpoint."""
    return place.is_dir() and not is_checkpoint(place) and (place / ADAPTER_CONFIG).is_file()


def guess_record(source: Path | str, task: Any, base: str | Path | None = None) -> TaskRecord:
    """A record for what has none: a model of transformers, an adapter of peft, or a task that the user made."""
    if task is not None:
        return TaskRecord(type(task).__name__, type(task).__module__, {}, {}, DatasetInfo(), {}, {})
    if isinstance(source, Path) and (source / ADAPTER_CONFIG).is_file():
        return _record_of_adapter(source, base)
    if base is not None:
        raise BadArgument(expected("a base for an adapter alone", str(base), "This folder holds a whole model."))
    config = _hub_config(source) if isinstance(source, str) else _config_in(source)
    kind = _kind_in(config, source)
    if kind not in _TASKS:
        raise DataError(
            f"Expected task.json in {source}, which describes the task, received none: the model was trained by "
            "another entry point, or by an older version. Pass the task: trainformer.load(folder, task=...)."
        )
    return _record(kind, {"model_name": str(source), **(_classes(config) if "classification" in kind else {})})


def _record(kind: str, arguments: dict[str, Any]) -> TaskRecord:
    found: Any = find_task(_TASKS[kind])
    given = {"tokenizer": None, "dtype": None, **arguments}
    return TaskRecord(found.__name__, found.__module__, given, {}, DatasetInfo(), {}, {})


def _record_of_adapter(folder: Path, base: str | Path | None) -> TaskRecord:
    saved = SavedAdapters.read(folder)
    assert saved is not None
    kind = kind_of_task_type(saved.config.get("task_type"))
    if kind not in _TASKS:
        what = f"an adapter of a known task type in {folder}"
        do = "Pass the task: trainformer.load(folder, task=...)."
        raise DataError(expected(what, saved.config.get("task_type"), do))
    arguments: dict[str, Any] = {"model_name": str(folder), "base": None if base is None else str(base)}
    if "classification" in kind:
        head = saved.load_options(kind)
        names = head.get("id2label") or {i: f"LABEL_{i}" for i in range(head.get("num_labels", 2))}
        of_tokens = "ForTokenClassification" if kind == "token_classification" else ""
        arguments |= _classes({"id2label": names, "architectures": [of_tokens]})
    return _record(kind, arguments)


def _kind_in(config: Mapping[str, Any], source: Path | str) -> str | None:
    try:
        name = str((config.get("architectures") or [""])[0])
    except (TypeError, KeyError, IndexError) as error:
        raise DataError(f"Expected the configuration of a model in {source}: {error!r}") from error
    is_seq2seq = name.endswith("ForConditionalGeneration") and "vision_config" not in config
    return "seq2seq" if is_seq2seq else kind_of_name(name)


def _config_in(folder: Path) -> dict[str, Any]:
    return _read_json(folder / CONFIG) if (folder / CONFIG).is_file() else {}


def _read_json(file: Path) -> dict[str, Any]:
    try:
        content = decode_json(file.read_bytes())
    except ValueError as error:
        raise DataError(f"Expected the configuration of a model in {file}: {error}") from error
    if not isinstance(content, dict):
        raise DataError(expected(f"the configuration of a model in {file}", type(content).__name__))
    return content


def _hub_config(name: str) -> dict[str, Any]:
    """The configuration of a model of the hub, or of its cache."""
    transformers = require("transformers", "text", "for language models")
    try:
        return transformers.AutoConfig.from_pretrained(name, trust_remote_code=False).to_dict()
    except Exception as error:  # anything that the hub may raise
        first = (str(error).strip().splitlines() or [""])[0]
        what = "the folder of a run or of a model, or the name of a model on the Hugging Face Hub"
        raise DataError(expected(what, name, f"{type(error).__name__}: {first}")) from error


def _classes(config: Mapping[str, Any]) -> dict[str, Any]:
    """The classes in the configuration of a model of transformers; without names, there are two."""
    names = config.get("id2label") or {"0": "LABEL_0", "1": "LABEL_1"}
    given = [str(name) for _, name in sorted(names.items(), key=lambda item: int(item[0]))]
    problems = {"multi_label_classification": "multi", "regression": "regression"}
    problem = problems.get(str(config.get("problem_type")), "regression" if len(given) == 1 else "single")
    if str(config.get("architectures")).find("ForTokenClassification") >= 0:
        return {"class_names": given}
    return {"problem": problem, **({"num_classes": len(given)} if problem == "regression" else {"class_names": given})}
