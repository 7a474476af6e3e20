"""Sequence-to-sequence models: translation, summarisation and other text-to-text tasks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Any

import numpy as np
from torch import Tensor

from trainformer.adapters.base import unwrap_model
from trainformer.core import BadArgument, DataError
from trainformer.core.errors import check_count, expected
from trainformer.data.ids import sample_ids
from trainformer.data.text.collate import pad
from trainformer.data.text.encode import IGNORE_INDEX, Encoded, Encoder, EncodingReport, ErrorContext
from trainformer.data.text.fields import require_key, require_text
from trainformer.data.text.schemas import schema_of, source_keys
from trainformer.data.text.sources import records_of
from trainformer.data.text.store import StoreView, tokenize
from trainformer.eval.generation import bleu, chrf, exact_match, rouge
from trainformer.losses.tokens import TokenLoss, token_cross_entropy
from trainformer.tasks.language.base import TextTask, TokenPredictionTask, standard_records, to_width
from trainformer.tasks.language.token_records import find_keys, is_indexed

_VERSION = "pairs-2"  # of the output of `PairEncoder`: raise it when that changes, to invalidate cached tokens
_SOURCES = {"pairs": "source", "completion": "prompt", "alpaca": "instruction"}
_SIDES = (("source", "target"), ("prompt", "completion"), ("instruction", "output"))


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
        encoder = SourceEncoder(self.text_tokenizer, self.max_source_length, _source_key(records[0]), self.prefix)
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


class PairEncoder(Encoder):
    """Tokenise pairs: the source with labels -100, followed by the target with its tokens as labels.

    A target ends with EOS, unless it was truncated.
    """

    def __init__(self, tokenizer: Any, max_source_length: int, max_target_length: int, *, prefix: str = "") -> None:
        super().__init__(tokenizer, max_length=None)
        self.max_source_length = max_source_length
        self.max_target_length = max_target_length
        self.prefix = prefix

    def fingerprint(self) -> str:
        return f"{super().fingerprint()} {_VERSION} {self.max_source_length} {self.max_target_length} {self.prefix!r}"

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        whole: list[tuple[Any, Any]] = []
        for place, record in enumerate(records):
            with context(place):
                source, target = _pair_of(record)
                if not isinstance(source, str):
                    source, target = (self._encode_tokens({"input_ids": ids}).input_ids for ids in (source, target))
                whole.append((source, target))
        texts = [place for place, (source, _) in enumerate(whole) if isinstance(source, str)]
        if texts:
            sources = self._ids(text=[self.prefix + whole[place][0] for place in texts])
            targets = self._ids(text_target=[whole[place][1] for place in texts])
            for place, source, target in zip(texts, sources, targets, strict=True):
                # An empty text stays empty: with closing tokens alone the model would learn to generate nothing.
                source_text, target_text = whole[place]
                whole[place] = (
                    self._truncate_source(source, self.prefix + source_text) if source_text else [],
                    self._add_eos(np.asarray(target, dtype=np.int32)) if target_text else [],
                )
        return [self._piece(source, target, report) for source, target in whole]

    def sources(self, texts: Sequence[str]) -> list[list[int]]:
        """Tokenise sources for generation."""
        whole = [self.prefix + text for text in texts]
        truncated = [self._truncate_source(ids, text) for ids, text in zip(self._ids(text=whole), whole, strict=True)]
        return [ids[: self.max_source_length] for ids in truncated]

    def _ids(self, **texts: Any) -> list[list[int]]:
        return self._require()(**texts, return_attention_mask=False, verbose=False)["input_ids"]

    def _truncate_source(self, ids: list[int], text: str) -> list[int]:
        """Truncate a long source with the tokenizer, which keeps its closing token.

        The result has one token too many, so that the report counts it as truncated.
        """
        if len(ids) <= self.max_source_length:
            return ids
        return [*self._require()(text, truncation=True, max_length=self.max_source_length)["input_ids"], ids[-1]]

    def _piece(self, source: Any, target: Any, report: EncodingReport) -> list[Encoded]:
        report.records += 1
        if len(source) == 0 or len(target) == 0:
            report.add_outcome("empty source" if len(source) == 0 else "empty target", "dropped")
            return []
        for name, ids, limit in (
            ("source", source, self.max_source_length),
            ("target", target, self.max_target_length),
        ):
            if len(ids) > limit:
                report.add_outcome(f"{name} longer than {limit} tokens", "truncated")
        source = np.asarray(source, dtype=np.int32)[: self.max_source_length]
        target = np.asarray(target, dtype=np.int32)[: self.max_target_length]
        labels = np.concatenate([np.full(len(source), IGNORE_INDEX, np.int32), target])
        report.pieces += 1
        report.tokens += len(labels)
        report.supervised += len(target)
        return [Encoded(np.concatenate([source, target]), labels)]


class SourceEncoder(PairEncoder):
    """Tokenise the sources of records to predict for, one sequence per record, also of an empty source."""

    def __init__(self, tokenizer: Any, max_source_length: int, key: str | None, prefix: str) -> None:
        super().__init__(tokenizer, max_source_length, max_source_length, prefix=prefix)
        self.key = key

    def fingerprint(self) -> str:
        return f"sources {self.key!r} {super().fingerprint()}"

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        pieces = []
        for place, record in enumerate(records):
            with context(place):
                source = _source_of(record, self.key)
                ids: Any
                if isinstance(source, str):
                    (ids,) = self.sources([source]) if source else self._ids(text=[""])
                else:
                    ids = self._encode_tokens({"input_ids": source}).input_ids[: self.max_source_length]
                tokens = np.asarray(ids if len(ids) else [self._require().pad_token_id], dtype=np.int32)
                report.add(EncodingReport(1, 1, len(tokens), len(tokens)))
                pieces.append([Encoded(tokens, tokens)])
        return pieces


class SourceDataset(StoreView):
    """A token store of `SourceEncoder` that returns `input_ids`, and the ids of the records."""

    def __init__(self, store: Any, ids: list[Any]) -> None:
        super().__init__(store)
        self.ids = ids

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return {"input_ids": self.store[index]["input_ids"]}


class PairDataset(StoreView):
    """A token store of `PairEncoder` that returns `input_ids` of the source and `labels` of the target."""

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        item = self.store[index]
        size = int(np.count_nonzero(item["labels"] == IGNORE_INDEX))
        return {"input_ids": item["input_ids"][:size], "labels": item["labels"][size:]}


def _pair_of(record: Any) -> tuple[Any, Any]:
    """Return source and target of a record: two texts, or two lists of tokens.

    >>> _pair_of({"instruction": "Add.", "input": "1 1", "output": "2"})
    ('Add.\\n1 1', '2')
    """
    if not isinstance(record, Mapping):
        raise DataError(expected("a pair of texts (source and target)", type(record).__name__))
    if "input_ids" in record:
        if record.get("labels") is None:
            raise DataError(expected("labels, the tokens of the target, beside input_ids", "none"))
        labels = np.asarray(record["labels"])
        return record["input_ids"], labels[labels != IGNORE_INDEX]
    for source, target in _SIDES:
        if source in record and target in record:
            pair = record[source], record[target]
            if not all(isinstance(side, str) for side in pair):
                received = " and ".join(type(side).__name__ for side in pair)
                raise DataError(expected(f"{source} and {target} to be texts", received, "Join messages first."))
            for field in ("tools", "chat_template_kwargs"):
                if record.get(field):
                    do = "Remove the field, or write it into the source."
                    raise DataError(expected(f"no {field!r}, which only chat templates use", "a record with it", do))
            context = record.get("input") if source == "instruction" else None
            return _joined(pair[0], context, record.get("system")), pair[1]
    do = "Rename the columns to source and target."
    raise DataError(expected("a pair of texts (source and target, or prompt and completion)", list(record), do))


def _source_key(record: Any) -> str | None:
    """The key of the source in records that may have no target; None for texts.

    >>> _source_key({"id": 1, "question": "Who?"}), _source_key({"article": "long", "highlights": "short"})
    ('question', 'article')
    """
    if not isinstance(record, Mapping):
        return None
    if "input_ids" in record:
        return "input_ids"
    if (schema := schema_of(record)) is not None and schema.name in _SOURCES:  # as in training
        return schema.keys[_SOURCES[schema.name]]
    known = find_keys(record, source_keys())
    if known is None:
        do = "Rename the column to source."
        raise DataError(expected("records with a source (or a prompt, an instruction, a text)", list(record), do))
    return known[-1]


def _source_of(record: Any, key: str | None) -> Any:
    """The source of a record: a text, or tokens.

    >>> _source_of({"instruction": "Add.", "input": "1 1"}, "instruction")
    'Add.\\n1 1'
    """
    if key is None or isinstance(record, str):
        return require_text(record, "source")
    value = require_key(record, key)
    if isinstance(value, Mapping) and value:  # a translation, by language
        value = next(iter(value.values()))
    context = record.get("input") if key.lower() == "instruction" else None
    return value if key == "input_ids" else _joined(require_text(value, key), context, record.get("system"))


def _joined(source: str, context: str | None, system: str | None) -> str:
    """An instruction with its input, after the system prompt."""
    return "\n".join(part for part in (system, source, context) if part)
