"""From examples to batches, in HuggingFace's way."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset, default_collate

from trainformer.adapters.base import is_adapted, unwrapped


def collator_for(given: Callable[[list[Any]], Any] | None, processing_class: Any) -> Callable[[list[Any]], Any]:
    """The user's collator; else one that pads, if there is a tokenizer; else one that stacks."""
    if given is not None:
        return given
    try:
        from transformers import DataCollatorWithPadding, default_data_collator
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase
    except ImportError:
        return default_collate
    if isinstance(processing_class, PreTrainedTokenizerBase):
        return DataCollatorWithPadding(processing_class)

    def stack(examples: list[Any]) -> Any:
        return default_data_collator(examples) if isinstance(examples[0], Mapping) else default_collate(examples)

    return stack


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
    inner: Any = unwrapped(model)
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
