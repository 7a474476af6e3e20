"""Supervised fine-tuning of causal language models on JAX: texts, prompts with completions, conversations.

The loss is a (sum, weight) over supervised tokens, so that padding, packing and gradient accumulation do not change it.
"""

from __future__ import annotations

import logging
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
from trainformer.data.text.encode import Encoder
from trainformer.data.text.prepare import causal_tokens
from trainformer.data.text.records import TextDataset
from trainformer.data.text.sources import load_text
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.text_trainer import TextArguments, TextTrainer
from trainformer.models.jax.decoder import generate

logger = logging.getLogger("trainformer")

_MAX_EXPONENT = 700.0  # exp overflows a float beyond it


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
    generation_interval: int | None = None  # print completions of generation_prompts every so many steps
    generation_prompts: list[str] | None = None
    generation_max_new_tokens: int | None = None  # None: 32
    generation_num_prompts: int | None = (
        None  # at most so many; None: all, and one of the training data if they are used
    )
    generation_use_train_prompts: bool = False  # also complete prompts of the training data
    generation_dataset_prompt_field: str | None = "prompt"  # their column
    generation_seed: int | None = None  # of their choice

    def check(self) -> None:
        super().check()
        self.dataset_text_field = self.dataset_text_field or "text"
        for name in ("generation_interval", "generation_max_new_tokens", "generation_num_prompts"):
            self._integer(name, 1, or_none=True)
        self._integer("num_of_sequences", 1)
        if self.eval_packing not in (None, True, False):
            raise BadArgument(expected("eval_packing to be True, False or None", self.eval_packing))
        prompts = self.generation_prompts
        has_texts = all(isinstance(prompt, str) for prompt in prompts or ())
        if self.generation_interval is not None and not (has_texts and (prompts or self.generation_use_train_prompts)):
            do = "Pass generation_prompts=['...'], or generation_use_train_prompts=True."
            raise BadArgument(expected("texts to complete with generation_interval", prompts, do))
        self._integer("generation_seed", 0, or_none=True)
        if self.completion_only_loss not in (None, True, False):
            raise BadArgument(expected("completion_only_loss to be True, False or None", self.completion_only_loss))
        for name, limit in (("label_smoothing", 1.0), ("z_loss", math.inf)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 <= value < limit:
                raise BadArgument(expected(f"{name} of at least 0" + (" and below 1" * (limit == 1)), value))
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
        config: Any = self.arguments_type.from_arguments(arguments)
        if config.generation_interval is not None:
            options["callbacks"] = [*(options.get("callbacks") or ()), Previews(config)]
        super().__init__(config, model, processing_class, **options)

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
        loss = self.token_sums(model, batch, key, probe=probe, **options).total()
        return self.with_router_loss(loss, probe, batch)

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Any:
        """Loss and accuracy without dropout and label smoothing."""
        probe = self.router_probe(batch, train=False)
        return self.with_router_rows(self.token_sums(model, batch, probe=probe).total(), probe, batch)

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Perplexity, from the mean loss over all supervised tokens of the dataset."""
        return {"perplexity": math.exp(min(metrics["loss"], _MAX_EXPONENT))} if "loss" in metrics else {}

    def generate(self, prompts: str | list[str], max_new_tokens: int = 32) -> Any:
        """Greedy continuations of some prompts, as text: for inspecting samples, not for serving."""
        if self.text is None:
            raise BadArgument(expected("a tokenizer (processing_class) to generate with", None))
        if not self._is_decoder:
            raise BadArgument(expected("a model of trainformer.models.jax to generate with", type(self.model).__name__))
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not all(isinstance(text, str) for text in texts):
            do = "Convert messages with apply_chat_template(messages, add_generation_prompt=True, tokenize=False)."
            raise BadArgument(expected("prompts to be texts", [type(text).__name__ for text in texts], do))
        rows = [self.text(text)["input_ids"] for text in texts]
        if not all(rows):
            raise BadArgument(expected("prompts with at least one token each", texts))
        length = max(map(len, rows))
        ids, mask = np.zeros((2, len(rows), length), np.int32)
        for number, row in enumerate(rows):
            ids[number, length - len(row) :], mask[number, length - len(row) :] = row, 1
        with self._run.backend.run_context():
            output = np.asarray(generate(self.model_state.model, jnp.asarray(ids), max_new_tokens, jnp.asarray(mask)))
        completions, end = [], self.text.eos_token_id
        for ids in output[:, length:].tolist():
            ids = ids[: ids.index(end)] if end in ids else ids
            completions.append(self.text.decode(ids, skip_special_tokens=True))
        return completions[0] if isinstance(prompts, str) else completions


class Previews:
    """A callback that prints completions of some prompts every few steps. All processes generate, the first prints."""

    def __init__(self, arguments: SFTConfig) -> None:
        self.interval = arguments.generation_interval or 1
        self.prompts = (arguments.generation_prompts or [])[: arguments.generation_num_prompts]
        self.tokens = arguments.generation_max_new_tokens or 32
        self.field = arguments.generation_dataset_prompt_field or "prompt"
        self.seed = arguments.generation_seed or 0
        wanted = arguments.generation_num_prompts or len(self.prompts) + 1
        self.missing = wanted - len(self.prompts) if arguments.generation_use_train_prompts else 0

    def on_train_begin(self, trainer: Any) -> None:
        if self.missing > 0:
            self.prompts = [*self.prompts, *self._of_training_data(trainer.dataset_train)]
            self.missing = 0

    def _of_training_data(self, data: Any) -> list[str]:
        records = load_text(data) if isinstance(data, (str, Path)) else data
        if not hasattr(records, "__getitem__") or isinstance(records, Mapping):
            do = "Pass generation_prompts instead."
            raise BadArgument(expected("training data with an index for generation_use_train_prompts", type(data), do))
        chosen = np.random.default_rng(self.seed).choice(len(records), min(self.missing, len(records)), replace=False)
        found = [records[int(index)] for index in chosen]
        for record in found:
            if not isinstance(record, Mapping) or not isinstance(record.get(self.field), str):
                what = f"records with the text {self.field!r} (generation_dataset_prompt_field)"
                raise BadArgument(expected(what, list(record) if isinstance(record, Mapping) else record))
        return [record[self.field] for record in found]

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        if step % self.interval:
            return
        for prompt, completion in zip(self.prompts, trainer.generate(self.prompts, self.tokens), strict=True):
            if trainer.is_main:
                logger.info("step %d: %s", step, prompt + completion)


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
