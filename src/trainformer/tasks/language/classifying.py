"""Base class of the text tasks with classes: finding the classes, and building a model with a matching head.

Classes come from the user, else from the training data, else from a pretrained model's config. Their names are written
to the model's config (`id2label`), so they are saved with each checkpoint.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from torch import nn

from trainformer.adapters.base import unwrap_model
from trainformer.core import BadArgument, DataError
from trainformer.core.errors import expected
from trainformer.core.optional import require
from trainformer.data.fetcher import unwrap_subsets
from trainformer.data.metadata import DatasetInfo
from trainformer.data.text.labels import PROBLEM_TYPES, Labels, Problem, check_classes, check_names, read_labels
from trainformer.tasks.language.base import TextTask


class ClassifyingTask(TextTask):
    """Base class of text and token classification. A subclass defines where a record has its labels."""

    num_classes: int | None
    class_names: list[str] | None

    def _init_classes(self, problem: str | None) -> None:
        """Validate the class arguments. Call it from `__post_init__`, after `_init_task`."""
        check_names(problem, self.class_names, self.num_classes)
        self._requested_problem: Problem | None = cast("Problem | None", problem)
        self._labels: Labels | None = None
        self._loaded: Any = None  # data loaded by path, until it is known whether it is the training data

    @abstractmethod
    def _label_values(self, dataset: Any) -> tuple[Iterable[Any], list[str] | None]:
        """Return all labels of a dataset, and the class names if it has them."""

    # -- classes -------------------------------------------------------------------------------------------

    @property
    def labels(self) -> Labels:
        """The classes, once they are known."""
        if self._labels is None:
            if not self._has_classes():
                raise BadArgument("Expected known classes, received no data yet. Pass class_names, or train first.")
            self._set_labels(self._read_labels((), None))
        assert self._labels is not None
        return self._labels

    def _has_classes(self) -> bool:
        """Whether the arguments or the model define the classes."""
        given = self.class_names or self.num_classes or self._requested_problem == "regression"
        return bool(given) or self._pretrained_names() is not None

    def inspect_dataset(self, dataset: Any) -> None:
        """Find the classes in the training data, before the model is built, unless they are known."""
        if self._labels is None and len(dataset):
            base, _ = unwrap_subsets(dataset)  # include the validation split, which may have other classes
            values, names = self._label_values(base)
            self._set_labels(self._read_labels(values, names))

    def _read_labels(self, values: Iterable[Any], names: list[str] | None) -> Labels:
        chosen = self.class_names or names
        return read_labels(values, self._requested_problem, chosen, self.num_classes, self._pretrained_names())

    def _set_labels(self, labels: Labels) -> None:
        check_classes(labels, self.num_classes)
        if self._model is not None and self._outputs(self._model) not in (None, labels.count):
            do = f"Pass class_names={list(labels.names)}." if labels.names else f"Pass num_classes={labels.count}."
            what = f"a model with {labels.count} outputs, one per class"
            raise BadArgument(expected(what, self._outputs(self._model), do))
        self._labels = labels

    def _pretrained_names(self) -> list[str] | None:
        """Class names in the config of a fine-tuned model."""
        found = self.pretrained
        saved = {} if found.adapters is None else found.adapters.model_config
        classes = saved.get("id2label") or getattr(_config_of(found.source), "id2label", None) or {}
        names = [str(name) for _, name in sorted(classes.items(), key=lambda item: int(item[0]))]
        named = names and any(name != f"LABEL_{index}" for index, name in enumerate(names))
        return names if named else None

    def load_data(self, path: str) -> Any:
        data = super().load_data(path)
        self._loaded = data if self._loaded is None else self._loaded
        return data

    def configure(self, info: DatasetInfo) -> None:
        """Find the classes, and load the model with a matching head."""
        loaded, self._loaded = self._loaded, None
        # Data loaded by path is the training data, or only validation data: then it has fewer samples.
        if self._labels is None and loaded is not None and len(loaded) >= info.num_samples:
            self.inspect_dataset(loaded)
        if self._labels is None:
            self._set_labels(self._labels_from(info))
        super().configure(info)
        self.num_classes = self.labels.count
        self.class_names = None if self.labels.names is None else list(self.labels.names)

    def _labels_from(self, info: DatasetInfo) -> Labels:
        """Find the classes without reading the data."""
        if not self._has_classes() and info.num_classes is None:
            raise BadArgument(
                "Expected classes that are known before the model is built, received data whose labels cannot be read "
                "in advance. Pass class_names (in any order), or the path of the data."
            )
        found = self._read_labels((), info.class_names)
        if info.num_classes is not None and found.problem == "single":
            found = self._read_labels(range(info.num_classes), info.class_names)
            counts = info.class_counts
            if counts is not None and len(counts) <= found.count:
                counts = counts + [0] * (found.count - len(counts))
            found = Labels(found.problem, found.count, found.names, counts=None if counts is None else tuple(counts))
        return found

    # -- the model -----------------------------------------------------------------------------------------

    def _load(self) -> nn.Module:
        """Load the model with one output per class, and the class names in its config."""
        labels = self.labels
        names = {index: labels.name(index) for index in range(labels.count)}
        config = {"id2label": names, "label2id": {name: index for index, name in names.items()}}
        config |= {"problem_type": PROBLEM_TYPES[labels.problem]} if self.kind == "sequence_classification" else {}
        task = copy.copy(self)
        task.__dict__.pop("pretrained", None)  # found for another `model_name`
        if isinstance(self.model_name, str | Path):
            task.model_kwargs = {**config, **self.model_kwargs}
        elif not isinstance(self.model_name, nn.Module):
            task.model_name = copy.deepcopy(self.model_name)
            for name, value in config.items():
                setattr(task.model_name, name, value)
        model: Any = TextTask._load(task)
        inner: Any = unwrap_model(model)
        if isinstance(self.model_name, nn.Module):
            if self._outputs(inner) not in (None, labels.count):
                do = f"Build it with num_labels={labels.count}, or pass its name."
                raise BadArgument(expected(f"a model with {labels.count} outputs", self._outputs(inner), do))
            for name, value in config.items():
                setattr(inner.config, name, value)
        # Decoders classify by the last token, which they find by the padding after it.
        for inner_config in {id(c): c for c in (inner.config, inner.config.get_text_config())}.values():
            inner_config.pad_token_id = self.text_tokenizer.pad_token_id
        return model

    @staticmethod
    def _outputs(model: nn.Module) -> int | None:
        return getattr(getattr(unwrap_model(model), "config", None), "num_labels", None)

    # -- state ---------------------------------------------------------------------------------------------

    def learned(self) -> dict[str, Any]:
        """The classes."""
        return asdict(self.labels)

    def use_learned(self, learned: Mapping[str, Any]) -> None:
        tuples = {name: tuple(value) for name, value in learned.items() if isinstance(value, list)}
        self._set_labels(Labels(**{**learned, **tuples}))

    def state_dict(self) -> dict[str, Any]:
        """The classes: a resumed run must number them in the same way."""
        names = None if self.labels.names is None else list(self.labels.names)
        return {**super().state_dict(), "classes": {"count": self.labels.count, "names": names}}

    def check_state(self, state: dict[str, Any]) -> None:
        saved = state["classes"]
        own = self.state_dict()["classes"]
        if saved != own:
            do = f"Pass class_names={saved['names']}." if saved["names"] else f"Pass num_classes={saved['count']}."
            raise DataError(expected(f"a checkpoint with the classes {own['names'] or own['count']}", saved, do))


def _config_of(source: Any) -> Any:
    """The config of a model; None if there is none (loading the model raises the error)."""
    if not isinstance(source, str | Path):
        return getattr(source, "config", source)
    auto = require("transformers", "text", "for language models").AutoConfig
    try:
        return auto.from_pretrained(str(source), trust_remote_code=False)
    except (OSError, ValueError):
        return None
