"""From examples to batches, in HuggingFace's way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset, default_collate

from trainformer.adapters.base import is_adapted, unwrap_model


def collator_for(given: Callable[[list[Any]], Any] | None, processing_class: Any) -> Callable[[list[Any]], Any]:
    """The user's collator; else one that pads, if there is a tokenizer; else one that stacks."""
    if given is not None:
        return given
    try:
        from transformers import DataCollatorWithPadding
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase
    except ImportError:
        return default_collate
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return DataCollatorWithPadding(processing_class)

    return stacked


def stacked(examples: list[Any]) -> Any:
    """A batch of examples of one shape: a dict of dicts, a tuple of tuples."""
    from transformers import default_data_collator

    return default_data_collator(examples) if isinstance(examples[0], Mapping) else default_collate(examples)


class Collator:
    """Makes batches, without columns that the model does not take.

    It holds nothing else: where workers are not forked it is pickled, and sent to each of them.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], accepted: Collection[str] | None) -> None:
        self.collate = collate
        self.accepted = accepted

    def __call__(self, examples: list[Any]) -> Any:
        """A batch of these."""
        if self.accepted is not None:
            examples = [without_unused(example, self.accepted) for example in examples]
        return self.collate(examples)


def accepted_names(model: nn.Module, label_names: Collection[str]) -> set[str] | None:
    """Columns that a model takes, and the labels; None where it takes whatever it is given."""
    forward = inspect.signature(inner_model(model).forward)
    named = {
        name
        for name, p in forward.parameters.items()
        if p.kind in (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    }
    return named | {"label", "label_ids", *label_names} if named else None


def inner_model(model: nn.Module) -> nn.Module:
    """The model itself, inside the wrappers of torch and of peft."""
    inner: Any = unwrap_model(model)
    return inner.get_base_model() if is_adapted(inner) else inner


def without_unused(example: Any, wanted: Collection[str]) -> Any:
    """An example without the columns that nobody wants (texts, identifiers)."""
    if not isinstance(example, Mapping):
        return example
    return {name: value for name, value in example.items() if name in wanted}


class Stream(IterableDataset):
    """An iterable of examples that torch does not know as a data set: a stream of `datasets`, say."""

    def __init__(self, examples: Any) -> None:
        self.examples = examples
        if hasattr(examples, "state_dict") and hasattr(examples, "load_state_dict"):
            self.state_dict = examples.state_dict
            self.load_state_dict = examples.load_state_dict

    def set_epoch(self, epoch: int) -> None:
        """Tell the examples which epoch it is, where they want to know."""
        if hasattr(self.examples, "set_epoch"):
            self.examples.set_epoch(epoch)

    def __iter__(self) -> Any:
        return iter(self.examples)


def as_dataset(data: Any) -> Any:
    """Data as the session takes them: what can only be iterated yields examples here, not batches."""
    if data is None or isinstance(data, IterableDataset) or (hasattr(data, "__getitem__") and hasattr(data, "__len__")):
        return data
    return Stream(data)
