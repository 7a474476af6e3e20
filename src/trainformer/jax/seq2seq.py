"""Sequence-to-sequence training on JAX: translation, summarisation and other text-to-text tasks with T5 and mT5.

Pairs are tokenised in `data.text.source_target`; the model and its greedy generation are in `models.jax.t5`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainformer.core.errors import BadArgument, DataError, check_count, expected
from trainformer.core.types import Loss
from trainformer.data.ids import sample_ids
from trainformer.data.labels import is_stream
from trainformer.data.text.collate import token_batch
from trainformer.data.text.prepare import has_tokens
from trainformer.data.text.records import StandardRecords
from trainformer.data.text.source_target import PairDataset, PairEncoder, SourceEncoder, source_key
from trainformer.data.text.sources import load_text, records_of
from trainformer.data.text.store import tokenize
from trainformer.jax.text_arguments import TextArguments, refuse_values
from trainformer.jax.text_trainer import TextTrainer, build_model, perplexity, valid_labels, valid_rows
from trainformer.losses.jax.tokens import IGNORE_INDEX, RowSums, row_sums
from trainformer.models.jax.huggingface import check_family
from trainformer.models.jax.t5 import T5, T5Config

_LENGTH_MULTIPLE = 16  # batch lengths are rounded up to it


@dataclass(kw_only=True)
class Seq2SeqConfig(TextArguments):
    """Arguments of `Seq2SeqTrainer`. `prefix` is prepended to each source, as in ``"summarize: "``.

    >>> Seq2SeqConfig(output_dir="run", max_target_length=32).max_source_length
    512
    """

    max_source_length: int = 512
    max_target_length: int = 128
    prefix: str = ""
    label_smoothing: float = 0.0
    generate_metrics: bool = False  # generate a target for each source of an evaluation: exact_match

    def check(self) -> None:
        super().check()
        self._integer("max_source_length", 2)
        self._integer("max_target_length", 2)
        if not isinstance(self.prefix, str):
            raise BadArgument(expected("prefix to be a text", self.prefix))
        self._number("label_smoothing", lambda v: 0 <= v < 1, "at least 0 and below 1")
        refuse_values(self, "Pass max_source_length and max_target_length.", max_sequence_length=(None,))
        do = "Records are pairs of a source and a target, which are truncated if they are too long."
        fixed: dict[str, Any] = {"prompt_template": (None,), "train_on_inputs": (None,), "packing": (False,)}
        refuse_values(self, do, **fixed, truncation=("auto", "truncate"))


class Seq2SeqTrainer(TextTrainer):
    """Trains an encoder-decoder on pairs of a source and a target.

    `model` is the folder (or hub name) of a T5 or mT5, a `T5Config` for random weights, a `T5`, or a function that
    builds one. Records are pairs (``source`` and ``target``, or other common names), prompts with completions, Alpaca
    instructions, or tokens (`input_ids` and `labels`). Long sources are truncated but keep the tokenizer's closing
    token; long targets are truncated without EOS, so the model does not learn to stop there.

    Evaluation computes loss, accuracy and perplexity per target token, and with `generate_metrics` the share of targets
    that greedy generation reproduces exactly.

    >>> from trainformer.models.jax import T5Config
    >>> config = T5Config(vocab_size=8, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=2)
    >>> arguments = Seq2SeqConfig(max_steps=1, log="none", output_dir="pairs", total_batch_size=8)
    >>> tokens = [{"input_ids": [3, 4, 1], "labels": [5, 1]}] * 8
    >>> trainer = Seq2SeqTrainer(arguments, config, train_dataset=tokens)
    >>> int(trainer.train().step)
    1
    """

    arguments_type: ClassVar[type[TextArguments]] = Seq2SeqConfig
    masks_padding = True
    model_types = (T5,)

    def load_model(self, model: Any) -> Any:
        if isinstance(model, T5Config):
            check_family(model)
            model = partial(build_model, model)
        return super().load_model(model)

    def _inspect_model(self, model: Any) -> None:
        super()._inspect_model(model)
        self._lengths = [0, 0]  # of the longest source and target
        ours, theirs = self.model_config.eos_token_id, getattr(self.text, "eos_token_id", None)
        if theirs is not None and theirs != ours:
            do = "Set eos_token_id in the configuration of the model: generation ends with it."
            raise BadArgument(expected(f"a model with the eos_token_id of the tokenizer ({theirs})", ours, do))

    # -- data ----------------------------------------------------------------------------------------------------

    @property
    def pairs(self) -> PairEncoder:
        """The encoder that tokenises records."""
        arguments = self.arguments
        return PairEncoder(self.text, arguments.max_source_length, arguments.max_target_length, prefix=arguments.prefix)

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Sources and targets, tokenised once."""
        data = load_text(dataset) if isinstance(dataset, (str, Path)) else dataset
        if is_stream(data):
            do = "Pass a list of the first records, or the files."
            raise DataError(expected("pairs with a length", type(data).__name__, do))
        records: Any = data if has_tokens(data) else StandardRecords(data)
        tokens = PairDataset(tokenize(records, self.pairs, **self.token_options(train)))
        limits = self.arguments.max_source_length, self.arguments.max_target_length
        for place, name in enumerate(("input_ids", "labels")):
            longest = max(len(tokens[index][name]) for index in range(len(tokens)))
            padded = self.padded_length(longest, limits[place], _LENGTH_MULTIPLE)
            self._lengths[place] = max(self._lengths[place], padded)
        return tokens

    def create_collect_function(self, *args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
        """`collect_pairs`: sources and targets were truncated when they were tokenised."""
        return self.collect_pairs

    def collect_pairs(self, samples: list[Any]) -> dict[str, np.ndarray]:
        """Rows of the lengths of the longest source and the longest target of all datasets."""
        sources, targets = (
            self.check_token_ids(token_batch([{"input_ids": sample[name]} for sample in samples], length, self.pad_id))
            for name, length in zip(("input_ids", "labels"), self._lengths, strict=True)
        )
        return {**{name: sources[name] for name in ("input_ids", "attention_mask")}, "labels": targets["labels"]}

    # -- steps ---------------------------------------------------------------------------------------------------

    def token_sums(self, model: Any, batch: Mapping[str, Any], key: Any = None, **options: Any) -> RowSums:
        """Loss, target tokens and correct predictions of each row. With a key, dropout is active."""
        labels = valid_labels(batch)
        inputs = batch["input_ids"], batch["attention_mask"], model.shift_right(batch["labels"])
        states = model.hidden_states(*inputs, deterministic=key is None, key=key)
        return row_sums(states, labels, model.head, chunks=self._chunks(labels.shape), shift=False, **options)

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        return self.token_sums(model, batch, key, label_smoothing=self.arguments.label_smoothing).total()

    def compute_metrics(self, model: Any, batch: Mapping[str, Any], key: Any) -> Loss:
        """Loss and accuracy without dropout and label smoothing; with `generate_metrics` also exact matches."""
        found = self.token_sums(model, batch).total()
        if not self.arguments.generate_metrics:
            return found
        labels = batch["labels"]
        tokens = model.generate(batch["input_ids"], labels.shape[1], batch["attention_mask"])
        valid = valid_rows(batch)
        match = jnp.sum(jnp.all((tokens == labels) | (labels == IGNORE_INDEX), axis=1) * valid), jnp.sum(valid)
        return Loss(found.sum, found.weight, {**(found.metrics or {}), "exact_match": match}, found.per_sample)

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Perplexity, from the mean loss over all target tokens of the dataset."""
        return perplexity(metrics)

    # -- generation ----------------------------------------------------------------------------------------------

    def generate(self, prompts: Any, max_new_tokens: int | None = None, **options: Any) -> Any:
        """Greedy targets for some sources, as text. The encoder runs once per source."""
        if options:
            raise BadArgument(
                expected("no options: targets are generated greedily", ", ".join(options), "Leave it out.")
            )
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        if not texts or any(not isinstance(text, str) or not text for text in texts):
            raise BadArgument(expected("sources of at least one character", prompts))
        found = self._generate_rows(self._pairs_encoder().sources(texts), max_new_tokens)
        return found[0] if isinstance(prompts, str) else found

    def predicted_columns(
        self, data: Any, batch_size: int | None = None, *, max_new_tokens: int | None = None, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """The `prompt`, which is the source, and the `text` generated for each record, as `generate` does.

        `data` is the path of a file, or a list of sources or of records; targets are not needed.
        """
        self.no_options(options)
        check_count("batch_size", batch_size or 1)
        records, size = records_of(data, None), batch_size or self.evaluation_batch_size
        arguments, key, ids = self.arguments, source_key(records[0]), sample_ids(records)
        encoder = SourceEncoder(self._pairs_encoder().tokenizer, arguments.max_source_length, key, arguments.prefix)
        rows = [piece.input_ids for (piece,) in encoder.encode_all([records[i] for i in range(len(records))])]
        for first in range(0, len(rows), size):
            chosen = rows[first : first + size]
            filled = chosen + chosen[-1:] * (size - len(chosen))  # one shape: nothing is compiled again
            texts = self._generate_rows(filled, max_new_tokens, max(map(len, rows)))[: len(chosen)]
            index = list(range(first, first + len(chosen)))
            prompts = self.text.batch_decode([row.tolist() for row in chosen], skip_special_tokens=True)
            yield {"index": index, "id": [next(ids) for _ in index], "prompt": prompts, "text": texts}

    def _pairs_encoder(self) -> PairEncoder:
        if self.text is None:
            raise BadArgument(expected("a tokenizer (processing_class) to generate with", None))
        return self.pairs

    def _generate_rows(self, rows: Sequence[Any], count: int | None, longest: int = 0) -> list[str]:
        """The texts generated for tokens, with room for a source of `longest` tokens."""
        longest = max(longest, *map(len, rows))
        length = self.padded_length(longest, self.arguments.max_source_length, _LENGTH_MULTIPLE)
        batch = token_batch([{"input_ids": row} for row in rows], length, self.pad_id)
        ids, mask = jnp.asarray(batch["input_ids"]), jnp.asarray(batch["attention_mask"])
        with self.eval_mode():
            count = count or self.arguments.max_target_length
            tokens = np.asarray(self.model_state.model.generate(ids, count, mask))
        texts: list[str] = self.text.batch_decode(tokens, skip_special_tokens=True)
        return texts
