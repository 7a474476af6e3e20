"""Sequence-to-sequence models: translation, summarisation and other text-to-text tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Any

from torch import Tensor

from trainformer.adapters.base import unwrap_model
from trainformer.core import BadArgument
from trainformer.core.errors import check_count, expected
from trainformer.data.ids import sample_ids
from trainformer.data.text.collate import pad
from trainformer.data.text.encode import IGNORE_INDEX
from trainformer.data.text.source_target import PairDataset, PairEncoder, SourceDataset, SourceEncoder, source_key
from trainformer.data.text.sources import records_of
from trainformer.data.text.store import tokenize
from trainformer.data.text.token_records import is_indexed
from trainformer.eval.generation import bleu, chrf, exact_match, rouge
from trainformer.losses.tokens import TokenLoss, token_cross_entropy
from trainformer.tasks.language.base import TextTask, TokenPredictionTask, standard_records, to_width


@dataclass(eq=False)
class Seq2Seq(TokenPredictionTask, TextTask):
    """Train an encoder-decoder model of transformers (T5, BART, mBART, Marian, ...), pretrained or from scratch.

    `model_name` is a hub name, a folder, a config (random weights) or a model; `tokenizer` defaults to the one of
    `model_name`. Records are pairs (`source` and `target`, or other common names), prompts with completions, Alpaca
    instructions, or tokens (`input_ids` and `labels`). `prefix` is prepended to each source, e.g. `"summarize: "` for
    T5. Long sources are truncated but keep the tokenizer's closing token; long targets are truncated without EOS, so
    the model does not learn to stop there.

    Evaluation reports loss, accuracy and perplexity per target token. With `generate_metrics` it also generates a text
    for each source and computes `exact_match`, `bleu`, `chrf` and `rougeL` over the dataset; `generate_options` are
    passed to transformers' `generate` (`num_beams`, ...). Predictions need sources alone.
    """

    model_name: Any = "t5-small"
    max_source_length: int = 512
    max_target_length: int = 128
    _: KW_ONLY
    prefix: str = ""
    generate_metrics: bool = False
    generate_options: dict[str, Any] = field(default_factory=dict)
    label_smoothing: float = 0.0

    kind = "seq2seq"
    groups_by_length = True

    def __post_init__(self) -> None:
        for name in ("max_source_length", "max_target_length"):
            check_count(name, getattr(self, name), least=2)
        self._init_task()

    @property
    def max_length(self) -> int:  # type: ignore[override]
        """The larger of the two lengths."""
        return max(self.max_source_length, self.max_target_length)

    def configure(self, info: Any) -> None:
        """Load the model, and check that its config has the decoder's start token."""
        super().configure(info)
        config: Any = getattr(unwrap_model(self.model), "config", None)
        for name in ("decoder_start_token_id", "pad_token_id"):
            if getattr(config, name, None) is None:
                do = f"Set it on the config, as in T5Config({name}=0)."
                raise BadArgument(expected(f"a model with a {name}, needed for the decoder inputs", "none", do))

    # -- data ----------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokenise sources and targets once."""
        if isinstance(dataset, SourceDataset):
            return dataset
        encoder = PairEncoder(self.text_tokenizer, self.max_source_length, self.max_target_length, prefix=self.prefix)
        return PairDataset(self._tokenize(standard_records(dataset), encoder, train))

    def prediction_data(self, dataset: Any) -> Any:
        """Tokenise the sources of records, which need no targets. Loaders and streams stay as they are."""
        if not is_indexed(dataset):
            return dataset
        records = records_of(dataset, None)
        encoder = SourceEncoder(self.text_tokenizer, self.max_source_length, source_key(records[0]), self.prefix)
        store = tokenize(records, encoder, cache_dir=self.cache_dir, name="prediction data")
        return SourceDataset(store, list(islice(sample_ids(dataset), len(records))))

    def collate_fn(self, examples: list[Any]) -> dict[str, Tensor]:
        pad_id = self.text_tokenizer.pad_token_id
        sources = pad([{"input_ids": e["input_ids"]} for e in examples], pad_id, max_length=self.max_source_length)
        if "labels" not in examples[0]:  # data to predict for
            return {name: sources[name] for name in ("input_ids", "attention_mask")}
        targets = pad([{"input_ids": e["labels"]} for e in examples], pad_id, max_length=self.max_target_length)
        return {**sources, "labels": targets["labels"]}

    # -- steps ---------------------------------------------------------------------------------------------

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Loss without label smoothing and token accuracy; with `generate_metrics` also generated tokens."""
        metrics = super().eval_step(batch)
        if not self.generate_metrics:
            return metrics
        return {**metrics, **self.predict_step(batch), "target": to_width(batch["labels"], self.max_target_length)}

    def predict_step(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Generated tokens for each source, padded to `max_target_length`."""
        options = {"max_new_tokens": self.max_target_length, **self.generate_options}
        tokens = self._generate_tokens(batch, **options)
        return {"generated": to_width(tokens, options["max_new_tokens"], self.text_tokenizer.pad_token_id)}

    def on_eval_end(self, rows: dict[str, Any]) -> dict[str, float]:
        """Generation metrics over the whole dataset (not means over batches)."""
        targets = [row[row != IGNORE_INDEX] for row in rows["target"]]
        texts = self.text_tokenizer.batch_decode(rows["generated"], skip_special_tokens=True)
        references = self.text_tokenizer.batch_decode(targets, skip_special_tokens=True)
        return {
            "exact_match": exact_match(texts, references),
            "bleu": bleu(texts, references),
            "chrf": chrf(texts, references),
            **rouge(texts, references, kinds=("rougeL",)),
        }

    def _loss(self, batch: Mapping[str, Tensor], **options: Any) -> TokenLoss:
        labels = batch["labels"]
        inner: Any = unwrap_model(self.model)
        logits = self.model(
            input_ids=batch["input_ids"],
            attention_mask=batch["attention_mask"],
            decoder_input_ids=inner.prepare_decoder_input_ids_from_labels(labels=labels),
            use_cache=False,
        ).logits
        return token_cross_entropy(logits, labels, shift=False, **options)

    # -- generation ----------------------------------------------------------------------------------------

    def generate(self, sources: str | Sequence[str], max_new_tokens: int | None = None, **options: Any) -> list[str]:
        """Generate texts for sources; `options` are passed to transformers' `generate` (`num_beams`, ...)."""
        texts = [sources] if isinstance(sources, str) else list(sources)
        if not texts or any(not isinstance(text, str) or not text for text in texts):
            raise BadArgument(expected("sources of at least one character", sources))
        encoder = PairEncoder(self.text_tokenizer, self.max_source_length, self.max_target_length, prefix=self.prefix)
        examples = [{"input_ids": ids} for ids in encoder.sources(texts)]
        batch = pad(examples, self.text_tokenizer.pad_token_id, multiple_of=1)
        options = {"max_new_tokens": max_new_tokens or self.max_target_length, **self.generate_options, **options}
        return self.text_tokenizer.batch_decode(self._generate_tokens(batch, **options), skip_special_tokens=True)

    def _generate_tokens(self, inputs: Mapping[str, Tensor], **options: Any) -> Tensor:
        """Generated tokens without the decoder's start token."""
        inputs = {name: inputs[name] for name in ("input_ids", "attention_mask")}
        return super()._generate_tokens(inputs, **options)[:, 1:]
