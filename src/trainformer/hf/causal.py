"""Causal language models as Forgather's projects train them: tokenised datasets, a collator, and the loss."""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from trainformer.core.errors import BadArgument, expected
from trainformer.hf.outputs import logits_from_outputs

logger = logging.getLogger("trainformer")

IGNORE_INDEX = -100


class CausalLoss:
    """The mean cross-entropy of predicting each next token; labels of -100 are not predicted.

    It gets logits, or outputs that have them.

    >>> loss = CausalLoss()(torch.zeros(1, 3, 4), torch.tensor([[0, 1, -100]]))
    >>> round(loss.item(), 4)  # log(4)
    1.3863
    """

    def __call__(self, outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        logits = logits_from_outputs(outputs)[..., :-1, :]
        targets = labels[..., 1:]
        total = F.cross_entropy(
            logits.reshape(-1, logits.shape[-1]).float(),
            targets.reshape(-1),
            ignore_index=IGNORE_INDEX,
            reduction="mean" if num_items_in_batch is None else "sum",
        )
        return total if num_items_in_batch is None else total / num_items_in_batch

    def __repr__(self) -> str:
        return "CausalLoss()"


class DataCollatorForCausalLM:
    """Pads sequences on the right, and makes labels of the input ids: those of padding are `ignore_index`.

    Args:
        tokenizer: Pads; one without a padding token pads with its end-of-sequence token.
        truncation: Cut sequences to `max_length`, by default the most that the tokenizer allows.
        ignore_index: Label of padding.
        input_name: The key of the input ids.
        labels_name: The key of the labels; with None a batch is the tuple (inputs, labels).
        packed_sequences: Also make position ids that restart with every document: at the positions in
            `document_starts` of an example, else after each end-of-sequence token. By default if there are any.
        pad_kwargs: Arguments of the tokenizer's `pad`, such as `padding` and `pad_to_multiple_of`.
    """

    def __init__(
        self,
        tokenizer: Any,
        truncation: bool = False,
        ignore_index: int = IGNORE_INDEX,
        input_name: str = "input_ids",
        labels_name: str | None = "labels",
        packed_sequences: bool | None = None,
        **pad_kwargs: Any,
    ) -> None:
        self.tokenizer = copy.deepcopy(tokenizer)  # changed below
        if self.tokenizer.pad_token is None:
            logger.warning("the tokenizer has no padding token: its end-of-sequence token is used")
            self.tokenizer.pad_token = self.tokenizer.eos_token
        self.tokenizer.padding_side = self.tokenizer.truncation_side = "right"
        most = self.tokenizer.model_max_length
        self.max_length = pad_kwargs.get("max_length", most)
        if self.max_length > most:
            raise BadArgument(
                expected(f"max_length of at most {most}, the tokenizer's model_max_length", self.max_length)
            )
        if pad_kwargs.get("padding") != "max_length":
            pad_kwargs.pop("max_length", None)
        self.truncation, self.ignore_index, self.input_name = truncation, ignore_index, input_name
        self.labels_name, self.packed_sequences = labels_name, packed_sequences
        self.pad_kwargs = {"return_tensors": "pt", **pad_kwargs}

    def __call__(self, features: Sequence[Mapping[str, Any]]) -> Any:
        """Examples as a batch."""
        examples = [dict(example) for example in features]
        starts = [example.pop("document_starts", None) for example in examples]
        if self.truncation:
            examples = [{key: value[: self.max_length] for key, value in example.items()} for example in examples]
        labels = [example.pop("labels", None) for example in examples]
        input_ids = self.tokenizer.pad(examples, **self.pad_kwargs)["input_ids"]
        batch = {self.input_name: input_ids}
        targets = self._labels(input_ids, labels)
        if self.labels_name is None:
            return batch, targets
        batch[self.labels_name] = targets
        has_starts = any(start is not None for start in starts)
        if has_starts if self.packed_sequences is None else self.packed_sequences:
            ends = input_ids == self.tokenizer.eos_token_id
            batch["position_ids"] = torch.stack(
                [_positions(row, start) for row, start in zip(ends, starts, strict=True)]
            )
        return batch

    def _labels(self, input_ids: Tensor, given: list[Any]) -> Tensor:
        if given[0] is None:
            return torch.where(input_ids == self.tokenizer.pad_token_id, self.ignore_index, input_ids)
        rows = torch.full_like(input_ids, self.ignore_index)
        for row, labels in zip(rows, given, strict=True):
            row[: len(labels)] = torch.as_tensor(labels)
        return rows


def _positions(ends: Tensor, starts: Sequence[int] | None) -> Tensor:
    """Positions within the documents of a sequence, which begin at `starts`, else after each end."""
    count = torch.arange(len(ends), device=ends.device)
    begins = torch.zeros_like(count)
    if starts is None:
        begins[1:] = torch.where(ends[:-1], count[1:], 0)
    else:
        wanted = [start for start in starts if 0 <= start < len(ends)]
        begins[wanted] = torch.as_tensor(wanted, device=ends.device)
    return count - begins.cummax(0).values


def tokenize(examples: Mapping[str, Any], tokenizer: Any, feature: str, **kwargs: Any) -> dict[str, Any]:
    """The input ids of a batch of examples."""
    return {"input_ids": tokenizer(examples[feature], **kwargs)["input_ids"]}


def preprocess_dataset(
    dataset: Any,
    tokenizer: Any,
    *,
    select_range: Any = None,
    to_iterable: bool = False,
    feature: str = "text",
    shuffle: bool = False,
    num_shards: int = 256,
    distributed_environment: Any = None,
    desc: str = "Tokenizing Dataset",
    seed: int = 42,
    shuffle_buffer_size: int = 10_000,
    map_fn: Callable[..., Any] = tokenize,
    map_kwargs: Mapping[str, Any] | None = None,
    fn_kwargs: Mapping[str, Any] | None = None,
) -> Any:
    """A dataset of `datasets`, tokenised.

    Args:
        dataset: The dataset, also a streaming one.
        tokenizer: Passed to `map_fn`, with `feature` and `fn_kwargs`.
        select_range: Which records: a number of them, a fraction, or (first, end) of either.
        to_iterable: Turn it into a stream of `num_shards` shards.
        feature: The column with the text.
        shuffle: Shuffle with `seed`; a stream in a buffer of `shuffle_buffer_size` records.
        distributed_environment: Take the part of its rank only.
        desc: The title of the progress bar.
        map_fn: Turns a batch of examples into columns.
        map_kwargs: More arguments of `map`.
        fn_kwargs: More arguments of `map_fn`, such as `truncation` and `max_length`.
    """
    options = {
        "batched": True,
        "remove_columns": dataset.column_names,
        "fn_kwargs": {"tokenizer": tokenizer, "feature": feature, **(fn_kwargs or {})},
    }
    if select_range is not None:
        dataset = dataset.select(_range_of(select_range, len(dataset)))
    if to_iterable and hasattr(dataset, "to_iterable_dataset"):
        dataset = dataset.to_iterable_dataset(num_shards=min(num_shards, len(dataset)))
    is_map_style = hasattr(dataset, "to_iterable_dataset")
    if is_map_style:
        options["desc"] = desc
    if shuffle:
        dataset = dataset.shuffle(seed=seed, **({} if is_map_style else {"buffer_size": shuffle_buffer_size}))
    if distributed_environment is not None:
        from datasets.distributed import split_dataset_by_node

        world = {"rank": distributed_environment.rank, "world_size": distributed_environment.world_size}
        dataset = split_dataset_by_node(dataset, **world)
    return dataset.map(map_fn, **{**options, **(map_kwargs or {})})


def _range_of(wanted: Any, length: int) -> range:
    """A range of records.

    >>> _range_of(0.25, 1000), _range_of([100, 0.9], 1000), _range_of(20, 10)
    (range(0, 250), range(100, 900), range(0, 10))
    """
    if isinstance(wanted, range):
        return wanted
    ends = list(wanted) if isinstance(wanted, Sequence) else [wanted]
    if not 1 <= len(ends) <= 3 or not all(isinstance(end, int | float) and end >= 0 for end in ends):
        raise BadArgument(expected("select_range to be a number, a fraction, or (first, end)", wanted))
    return range(*(min(length, int(end * length) if isinstance(end, float) else end) for end in ends[:2]), *ends[2:])
