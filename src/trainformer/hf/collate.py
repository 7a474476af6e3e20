"""Datasets and collators: which columns a model receives, and how examples become batches."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any

from torch import nn
from torch.utils.data import IterableDataset, default_collate

from trainformer.adapters.base import is_adapted, unwrap_model
from trainformer.data.mixture.mixture import Mixture


def collator_for(given: Callable[[list[Any]], Any] | None, processing_class: Any) -> Callable[[list[Any]], Any]:
    """The given collator; by default one that pads if there is a tokenizer, otherwise one that stacks."""
    if given is not None:
        return given
    try:
        from transformers import DataCollatorWithPadding
        from transformers.feature_extraction_sequence_utils import SequenceFeatureExtractor
        from transformers.tokenization_utils_base import PreTrainedTokenizerBase
    except ImportError:
        return default_collate
    if isinstance(processing_class, (PreTrainedTokenizerBase, SequenceFeatureExtractor)):
        return DataCollatorWithPadding(processing_class)  # type: ignore[arg-type]
    return stack_examples


def stack_examples(examples: list[Any]) -> Any:
    """Stack examples of one shape, dicts to a dict and tuples to a tuple."""
    from transformers import default_data_collator

    return default_data_collator(examples) if isinstance(examples[0], Mapping) else default_collate(examples)


class Collator:
    """Drops columns that the model does not accept, then collates.

    It holds no model or trainer, because spawned DataLoader workers receive it pickled.
    """

    def __init__(self, collate: Callable[[list[Any]], Any], accepted: Collection[str] | None) -> None:
        self.collate = collate
        self.accepted = accepted

    def __call__(self, examples: list[Any]) -> Any:
        if self.accepted is not None:
            examples = [
                {name: value for name, value in example.items() if name in self.accepted}
                if isinstance(example, Mapping)
                else example
                for example in examples
            ]
        return self.collate(examples)


def inner_model(model: nn.Module) -> nn.Module:
    """The model inside the wrappers of torch and peft."""
    inner: Any = unwrap_model(model)
    return inner.get_base_model() if is_adapted(inner) else inner


class Stream(IterableDataset):
    """Wraps an iterable of examples that is not a torch dataset, such as a streaming `datasets` dataset."""

    def __init__(self, examples: Any) -> None:
        self.examples = examples
        if hasattr(examples, "state_dict") and hasattr(examples, "load_state_dict"):
            self.state_dict = examples.state_dict
            self.load_state_dict = examples.load_state_dict

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on, for shuffling."""
        if hasattr(self.examples, "set_epoch"):
            self.examples.set_epoch(epoch)

    def __iter__(self) -> Any:
        return iter(self.examples)


def as_dataset(data: Any) -> Any:
    """A dataset as runs accept it. An iterable yields examples here, not batches."""
    if (
        data is None
        or isinstance(data, IterableDataset | Mixture)
        or (hasattr(data, "__getitem__") and hasattr(data, "__len__"))
    ):
        return data
    return Stream(data)
