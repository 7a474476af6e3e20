"""Supervised fine-tuning of causal language models on JAX: texts, prompts with completions, conversations.

The loss is a (sum, weight) over supervised tokens, so that padding, packing and gradient accumulation do not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from flax import nnx

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import Loss
from trainformer.data.dataset import IndexedDataset
from trainformer.data.labels import is_stream
from trainformer.data.text.encode import Encoder
from trainformer.data.text.prepare import causal_tokens
from trainformer.data.text.records import TextDataset
from trainformer.data.text.sources import load_text
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.text_arguments import TextArguments
from trainformer.jax.text_trainer import TextTrainer, perplexity


@dataclass(kw_only=True)
class SFTConfig(TextArguments):
    """Arguments of `SFTTrainer`.

    By default the loss covers whole texts, the completions of prompts, and all assistant messages of conversations.
    """

    learning_rate: float = 2e-5
    dataset_text_field: str | None = "text"  # None: "text"
    eval_packing: bool | None = None  # None: as packing
    num_of_sequences: int = 1024  # of EasyDeL's packing buffer; all records are packed together here
    completion_only_loss: bool | None = None  # True: only completions, and the last message of a conversation
    assistant_only_loss: bool = False  # True: only assistant messages
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def check(self) -> None:
        super().check()
        self.dataset_text_field = self.dataset_text_field or "text"
        self._integer("num_of_sequences", 1)
        self._number("label_smoothing", lambda v: 0 <= v < 1, "at least 0 and below 1")
        self._weight("z_loss")
        asked = {
            "train_on_inputs": {None: None, True: "all", False: "assistant"}[self.train_on_inputs],
            "completion_only_loss": {None: None, True: "completion", False: "all"}[self.completion_only_loss],
            "assistant_only_loss": "assistant" if self.assistant_only_loss else None,
        }
        passed = {name: kind for name, kind in asked.items() if kind is not None}
        if len({kind == "all" for kind in passed.values()}) > 1:
            given = ", ".join(f"{name}={getattr(self, name)}" for name in passed)
            raise BadArgument(f"Expected one setting for training on prompts, received {given}. Keep one of them.")

    @property
    def train_on(self) -> str:
        """Which tokens are supervised, as `data.text.encode` names it."""
        if self.train_on_inputs or self.completion_only_loss is False:
            return "all"
        if self.completion_only_loss:
            return "completion"
        return "assistant" if self.assistant_only_loss or self.train_on_inputs is False else "auto"


class SFTTrainer(TextTrainer):
    """Trains a causal language model on texts, prompts with completions, or conversations.

    Data are paths or names that `trainformer.data.text.load_text` knows, HF `datasets`, streams, or lists of records:
    ``{"text"}``, ``{"prompt", "completion"}``, ``{"messages"}``, Alpaca records, or tokens (`input_ids`).
    `formatting_func` converts each record to a text or such a record. The other arguments are those of `TextTrainer`.

    Evaluation computes the loss per supervised token, the token accuracy and the perplexity.
    """

    arguments_type: ClassVar[type[TextArguments]] = SFTConfig
    masks_padding = True
    has_router_loss = True

    def __init__(
        self,
        arguments: TrainingArguments,
        model: Any = None,
        processing_class: Any = None,
        *,
        formatting_func: Callable[[Any], Any] | None = None,
        **options: Any,
    ) -> None:
        self.formatting_func = formatting_func
        super().__init__(arguments, model, processing_class, **options)

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokenised once, or on the fly for a stream; packed into full sequences with `packing`."""
        arguments, encoder = self.arguments, self.encoder(Encoder, self.arguments.train_on)
        if self.formatting_func is not None:
            data = load_text(dataset) if isinstance(dataset, (str, Path)) else dataset
            dataset = (_FormattedStream if is_stream(data) else _Formatted)(data, self.formatting_func)
        elif arguments.dataset_text_field != "text":
            dataset = TextDataset(dataset, arguments.dataset_text_field)
        packing = arguments.packing if train or arguments.eval_packing is None else arguments.eval_packing
        tokens = causal_tokens(dataset, encoder, packing=packing, **self.token_options(train))
        return tokens if packing else self.update_batch_length(tokens)

    def create_collect_function(self, *args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
        """`collect_tokens`: records were truncated when they were tokenised."""
        return self.collect_tokens

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        options = {"label_smoothing": self.arguments.label_smoothing, "z_loss": self.arguments.z_loss}
        probe = self.router_probe(batch)
        return self.with_router_loss(self.token_loss(model, batch, key, probe=probe, **options), probe, batch)

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Any:
        """Loss and accuracy without dropout and label smoothing."""
        probe = self.router_probe(batch, train=False)
        return self.with_router_rows(self.token_loss(model, batch, probe=probe), probe, batch)

    def recorded_options(self) -> dict[str, Any]:
        own = {} if self.formatting_func is None else {"formatting_func": self.formatting_func}
        return {**super().recorded_options(), **own}

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Perplexity, from the mean loss over all supervised tokens of the dataset."""
        return perplexity(metrics)


class _Formatted(IndexedDataset):
    """Records converted by a function on access."""

    def __init__(self, records: Any, function: Callable[[Any], Any]) -> None:
        self.records = records if hasattr(records, "__getitem__") else list(records)
        self.function = function

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return _as_record(self.function(self.records[index]))


class _FormattedStream:
    """The same for records that can only be iterated."""

    def __init__(self, records: Any, function: Callable[[Any], Any]) -> None:
        self.records = records
        self.function = function

    def __iter__(self) -> Iterator[Any]:
        return (_as_record(self.function(record)) for record in self.records)


def _as_record(value: Any) -> Any:
    if isinstance(value, str):
        return {"text": value}
    if isinstance(value, Mapping):
        return value
    do = "It receives one record at a time."
    raise DataError(expected("formatting_func to return a text or a record", type(value).__name__, do))
