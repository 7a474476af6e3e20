"""What tasks that put texts or words into classes share: which classes there are, and a model with a head for them.

Owns when the classes are known: they are the user's, else those of the training data, else those of a model that was
trained before. Their names go into the model's configuration, so that whoever opens a checkpoint reads names.
"""

from __future__ import annotations

import copy
from abc import abstractmethod
from collections.abc import Iterable
from pathlib import Path
from typing import Any, cast

from torch import nn

from trainformer.adapters.base import unwrap_model
from trainformer.core import BadArgument, DataError
from trainformer.core.errors import expected
from trainformer.core.optional import require
from trainformer.data.fetcher import unwrap_subsets
from trainformer.data.metadata import DatasetInfo
from trainformer.tasks.language.base import LanguageTask
from trainformer.tasks.language.labels import PROBLEM_TYPES, Labels, Problem, check_classes, check_names, read_labels


class ClassifyingTask(LanguageTask):
    """Base of the tasks with classes. A subclass says where the labels of its records are."""

    num_classes: int | None
    class_names: list[str] | None

    def _begin_classes(self, problem: str | None) -> None:
        """For `__post_init__`, behind `_begin`."""
        check_names(problem, self.class_names, self.num_classes)
        self._asked: Problem | None = cast("Problem | None", problem)
        self._labels: Labels | None = None
        self._loaded: Any = None  # what was loaded by path, until it is known whether that is the training data

    @abstractmethod
    def _label_values(self, dataset: Any) -> tuple[Iterable[Any], list[str] | None]:
        """All labels of a data set, and the names of the classes where it has them."""

    # -- classes -------------------------------------------------------------------------------------------

    @property
    def labels(self) -> Labels:
        """The classes, once they are known."""
        if self._labels is None:
            if not self._said():
                raise BadArgument(
                    "Expected to know the classes, received no data yet. Pass class_names, or train first."
                )
            self._take(self._read((), None))
        assert self._labels is not None
        return self._labels

    def _said(self) -> bool:
        """Whether the user or the model says what the classes are."""
        said = self.class_names or self.num_classes or self._asked == "regression"
        return bool(said) or self._known_names() is not None

    def inspect_dataset(self, dataset: Any) -> None:
        """Learn the classes from training data, before the model is built. What is known already stays."""
        if self._labels is None and len(dataset):
            base, _ = unwrap_subsets(dataset)  # the part for validation may have classes of its own
            values, names = self._label_values(base)
            self._take(self._read(values, names))

    def _read(self, values: Iterable[Any], names: list[str] | None) -> Labels:
        chosen = self.class_names or names
        return read_labels(values, self._asked, chosen, self.num_classes, self._known_names())

    def _take(self, labels: Labels) -> None:
        check_classes(labels, self.num_classes)
        if self._model is not None and self._outputs(self._model) not in (None, labels.count):
            do = f"Pass class_names={list(labels.names)}." if labels.names else f"Pass num_classes={labels.count}."
            raise BadArgument(
                expected(f"a model with {labels.count} outputs, as the labels need", self._outputs(self._model), do)
            )
        self._labels = labels

    def _known_names(self) -> list[str] | None:
        """Names that the model brings from an earlier training."""
        config = _config_of(self.model_name)
        names = [str(name) for _, name in sorted((getattr(config, "id2label", None) or {}).items())]
        given = names and any(name != f"LABEL_{place}" for place, name in enumerate(names))
        return names if given else None

    def load_data(self, path: str) -> Any:
        """Text by path or name; see `trainformer.data.text.load_text`."""
        data = super().load_data(path)
        self._loaded = data if self._loaded is None else self._loaded
        return data

    def configure(self, info: DatasetInfo) -> None:
        """Find the classes, and load the model with a head for them."""
        loaded, self._loaded = self._loaded, None
        # Data that were loaded by path are those of training, or only for validation: then these are fewer.
        if self._labels is None and loaded is not None and len(loaded) >= info.num_samples:
            self.inspect_dataset(loaded)
        if self._labels is None:
            self._take(self._labels_from(info))
        super().configure(info)
        self.num_classes = self.labels.count
        self.class_names = None if self.labels.names is None else list(self.labels.names)

    def _labels_from(self, info: DatasetInfo) -> Labels:
        """What is known without reading the data."""
        if not self._said() and info.num_classes is None:
            raise BadArgument(
                "Expected to learn the classes before the model is built, received data whose labels are not at hand "
                "without reading them. Pass class_names (in any order you like), or the path of the data."
            )
        found = self._read((), info.class_names)
        if info.num_classes is not None and found.problem == "single":
            found = self._read(range(info.num_classes), info.class_names)
            counts = info.class_counts
            if counts is not None and len(counts) <= found.count:
                counts = counts + [0] * (found.count - len(counts))
            found = Labels(found.problem, found.count, found.names, counts=None if counts is None else tuple(counts))
        return found

    # -- the model -----------------------------------------------------------------------------------------

    def _load(self) -> nn.Module:
        """The model with as many outputs as there are classes, which its configuration names."""
        labels = self.labels
        names = {place: labels.name(place) for place in range(labels.count)}
        wanted = {"id2label": names, "label2id": {name: place for place, name in names.items()}}
        wanted |= {"problem_type": PROBLEM_TYPES[labels.problem]} if self.kind == "sequence_classification" else {}
        task = copy.copy(self)
        if isinstance(self.model_name, str | Path):
            task.model_kwargs = {**wanted, **self.model_kwargs}
        elif not isinstance(self.model_name, nn.Module):
            task.model_name = copy.deepcopy(self.model_name)
            for name, value in wanted.items():
                setattr(task.model_name, name, value)
        model: Any = LanguageTask._load(task)
        inner: Any = unwrap_model(model)
        if isinstance(self.model_name, nn.Module):
            self._adopt(inner, wanted)
        # Models that read the last token find it by the padding behind it.
        for config in {id(c): c for c in (inner.config, inner.config.get_text_config())}.values():
            config.pad_token_id = self.text.pad_token_id
        return model

    def _adopt(self, model: Any, wanted: dict[str, Any]) -> None:
        """A model of the user's, whose head has to fit as it is."""
        if self._outputs(model) not in (None, self.labels.count):
            do = f"Build it with num_labels={self.labels.count}, or pass its name."
            raise BadArgument(expected(f"a model with {self.labels.count} outputs", self._outputs(model), do))
        for name, value in wanted.items():
            setattr(model.config, name, value)

    @staticmethod
    def _outputs(model: nn.Module) -> int | None:
        return getattr(getattr(unwrap_model(model), "config", None), "num_labels", None)

    # -- records -------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The classes: a run that goes on must number them in the same way."""
        names = None if self.labels.names is None else list(self.labels.names)
        return {**super().state_dict(), "classes": {"count": self.labels.count, "names": names}}

    def check_state(self, state: dict[str, Any]) -> None:
        """Refuse the state of a run with other classes."""
        saved = state["classes"]
        own = {"count": self.labels.count, "names": None if self.labels.names is None else list(self.labels.names)}
        if saved != own:
            do = f"Pass class_names={saved['names']}." if saved["names"] else f"Pass num_classes={saved['count']}."
            raise DataError(expected(f"a checkpoint with the classes {own['names'] or own['count']}", saved, do))


def _config_of(source: Any) -> Any:
    """The configuration of a model; None where there is none to be found: loading the model will say why."""
    if not isinstance(source, str | Path):
        return getattr(source, "config", source)
    try:
        return require("transformers", "text", "for language models").AutoConfig.from_pretrained(str(source))
    except (OSError, ValueError):
        return None
