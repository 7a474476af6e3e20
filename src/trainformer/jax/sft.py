"""Supervised fine-tuning of causal language models on JAX: texts, prompts with completions, conversations.

Owns the arguments, which tokens are learned, and the loss: always a sum over supervised tokens and their number, so
that padding, packing and accumulation do not change it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import Loss
from trainformer.data.dataset import IndexedDataset
from trainformer.data.labels import is_stream
from trainformer.data.text.collate import token_batch
from trainformer.data.text.encode import Encoder
from trainformer.data.text.prepare import causal_tokens
from trainformer.data.text.records import TextDataset
from trainformer.data.text.sources import load_text
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.text_trainer import TextArguments, TextTrainer
from trainformer.losses.jax.tokens import RowSums
from trainformer.models.jax.decoder import generate

_MOST = 700.0  # e to a larger power is no number


@dataclass(kw_only=True)
class SFTConfig(TextArguments):
    """Arguments of `SFTTrainer`.

    Unless told otherwise all of a text is learned, the completion of a prompt, and every answer of the assistant.
    """

    dataset_text_field: str = "text"
    completion_only_loss: bool | None = None  # True: nothing but completions, and the last answer of a conversation
    assistant_only_loss: bool = False  # True: nothing but the assistant's answers
    label_smoothing: float = 0.0
    z_loss: float = 0.0

    def check(self) -> None:
        """Refuse what cannot work."""
        super().check()
        if self.completion_only_loss not in (None, True, False):
            raise BadArgument(expected("completion_only_loss to be True, False or None", self.completion_only_loss))
        for name, most in (("label_smoothing", 1.0), ("z_loss", math.inf)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < most:
                raise BadArgument(expected(f"{name} of at least 0" + (" and below 1" * (most == 1)), value))
        asked = {
            "train_on_inputs": {None: None, True: "all", False: "assistant"}[self.train_on_inputs],
            "completion_only_loss": {None: None, True: "completion", False: "all"}[self.completion_only_loss],
            "assistant_only_loss": "assistant" if self.assistant_only_loss else None,
        }
        said = {name: kind for name, kind in asked.items() if kind is not None}
        if len({kind == "all" for kind in said.values()}) > 1:
            given = ", ".join(f"{name}={getattr(self, name)}" for name in said)
            raise BadArgument(f"Expected one word on whether prompts are learned, received {given}. Keep one of them.")

    @property
    def train_on(self) -> str:
        """Which tokens are learned, in the words of `data.text.encode`."""
        if self.train_on_inputs or self.completion_only_loss is False:
            return "all"
        if self.completion_only_loss:
            return "completion"
        return "assistant" if self.assistant_only_loss or self.train_on_inputs is False else "auto"


class SFTTrainer(TextTrainer):
    """Trains a causal language model on texts, prompts with completions, or conversations.

    Data are paths or names that `trainformer.data.text.load_text` knows, HF `datasets`, streams, or lists of records:
    ``{"text"}``, ``{"prompt", "completion"}``, ``{"messages"}``, Alpaca's, or tokens (`input_ids`).
    `formatting_func` makes a text or such a record of each record. The other arguments are those of `TextTrainer`.

    Evaluations give the loss per supervised token, the accuracy of predicted tokens, and the perplexity.
    """

    arguments_type: ClassVar[type[TextArguments]] = SFTConfig
    leaves_out_padding = True

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

    # -- data --------------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokenised once, a stream as it is read; in full sequences, with `packing`."""
        arguments, encoder = self.arguments, self.encoder(Encoder, self.arguments.train_on)
        if self.formatting_func is not None:
            dataset = _formatted(dataset, self.formatting_func)
        elif arguments.dataset_text_field != "text":
            dataset = TextDataset(dataset, arguments.dataset_text_field)
        tokens = causal_tokens(dataset, encoder, packing=arguments.packing, **self.token_options(train))
        return tokens if arguments.packing else self.make_room(tokens)

    def create_collect_function(self) -> Callable[[list[Any]], Any]:
        """Rows of one length: that of the longest sequence, or `max_sequence_length` where they are packed."""

        def collect(samples: list[Any]) -> dict[str, np.ndarray]:
            length = self.max_length if "position_ids" in samples[0] else self.batch_length
            return self.within_words(token_batch(samples, length, self.pad_id))

        return collect

    # -- steps -------------------------------------------------------------------------------------------------

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        """Cross-entropy, summed over the supervised tokens."""
        options = {"label_smoothing": self.arguments.label_smoothing, "z_loss": self.arguments.z_loss}
        return _measured(self.token_sums(model, batch, key, **options))

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        """The same without dropout and smoothing."""
        return _measured(self.token_sums(model, batch))

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Perplexity, from the mean over all supervised tokens of the set."""
        return {"perplexity": math.exp(min(metrics["loss"], _MOST))} if "loss" in metrics else {}

    def generate(self, prompts: str | list[str], max_new_tokens: int = 32) -> Any:
        """The likeliest continuations of some prompts, as text: to look at samples, not for serving."""
        if self.text is None:
            raise BadArgument(expected("a tokenizer (processing_class) to write with", None))
        if not self._is_ours:
            raise BadArgument(expected("a model of trainformer.models.jax to write with", type(self.model).__name__))
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not all(isinstance(text, str) for text in texts):
            do = "Of messages apply_chat_template(messages, add_generation_prompt=True, tokenize=False) makes one."
            raise BadArgument(expected("prompts to be texts", [type(text).__name__ for text in texts], do))
        rows = [self.text(text)["input_ids"] for text in texts]
        if not all(rows):
            raise BadArgument(expected("prompts with at least one token each", texts))
        length = max(map(len, rows))
        ids, mask = np.zeros((2, len(rows), length), np.int32)
        for number, row in enumerate(rows):
            ids[number, length - len(row) :], mask[number, length - len(row) :] = row, 1
        with self._run.backend.run_context():
            made = np.asarray(generate(self.model_state.model, jnp.asarray(ids), max_new_tokens, jnp.asarray(mask)))
        written = [self._until_end(row[length:].tolist()) for row in made]
        return written[0] if isinstance(prompts, str) else written

    def _until_end(self, ids: list[int]) -> str:
        end = self.text.eos_token_id
        return self.text.decode(ids[: ids.index(end)] if end in ids else ids, skip_special_tokens=True)


def _measured(sums: RowSums) -> Loss:
    found = sums.total()
    return Loss(found.sum, found.weight, {"accuracy": (found.correct, found.weight)})


# -- records through a function of the user's ------------------------------------------------------------------------


def _formatted(data: Any, function: Callable[[Any], Any]) -> Any:
    data = load_text(data) if isinstance(data, (str, Path)) else data
    return _FormattedStream(data, function) if is_stream(data) else _Formatted(data, function)


class _Formatted(IndexedDataset):
    """Records as a function makes them."""

    def __init__(self, records: Any, function: Callable[[Any], Any]) -> None:
        self.records = records if hasattr(records, "__getitem__") else list(records)
        self.function = function

    def __len__(self) -> int:
        return len(self.records)

    def __getitem__(self, index: int) -> Any:
        return _as_record(self.function(self.records[index]))


class _FormattedStream:
    """The same of records that are only iterated."""

    def __init__(self, records: Any, function: Callable[[Any], Any]) -> None:
        self.records = records
        self.function = function

    def __iter__(self) -> Iterator[Any]:
        return (_as_record(self.function(record)) for record in self.records)


def _as_record(made: Any) -> Any:
    if isinstance(made, str):
        return {"text": made}
    if isinstance(made, Mapping):
        return made
    do = "It is given one record at a time."
    raise DataError(expected("formatting_func to return a text or a record", type(made).__name__, do))
