"""Token classification: a tag for every word, as in named entity recognition and part-of-speech tagging.

Owns the task: which tokens of a word are labelled, windows of long texts, and the metrics. Classes and their names are
in `classifying` and `labels`, schemes of tags in `eval.classification`. The loss is a sum over labelled words.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainformer.adapters.base import Adapter, unwrap_model
from trainformer.core import BadArgument, DataError
from trainformer.core.errors import expected
from trainformer.data.text.collate import pad
from trainformer.data.text.encode import IGNORE_INDEX, Encoded, Encoder, EncodingReport, ErrorContext
from trainformer.data.text.schemas import expected_value, require_key
from trainformer.data.text.sources import records_of
from trainformer.data.text.store import tokenize
from trainformer.eval.classification import EntityScores, TagScheme, entity_scores
from trainformer.losses.tokens import TokenLoss, token_cross_entropy
from trainformer.models.modes import eval_mode
from trainformer.tasks.confusion import confusion_record
from trainformer.tasks.language.classifying import ClassifyingTask
from trainformer.tasks.language.labels import Labels
from trainformer.tasks.language.prediction import TokenPrediction
from trainformer.tasks.language.text_classification import column_values
from trainformer.tasks.language.token_records import found_keys, only_columns

_VERSION = "tags-1"  # of what `TagEncoder` makes of a record: raise it when that changes, cached tokens are then left
_TOKENS = (("tokens",), ("words",))
_TAGS = tuple((name,) for name in ("ner_tags", "tags", "labels", "tag", "pos_tags", "chunk_tags"))
_LONG = ("split", "truncate")
_MOST_TAGS = 64  # of more there is no confusion matrix: one of each window is kept until the end of an evaluation
_UNTAGGED = -1  # the label of a word whose tag is not known


@dataclass(eq=False)
class TokenClassification(TokenPrediction, ClassifyingTask):
    """Train a tagger of words (BERT, RoBERTa, DeBERTa, ... of transformers).

    `model_name` is a name on the hub, a folder, a configuration (random weights) or a model; the tokenizer, which must
    be a fast one, is that of the same name unless `tokenizer` says otherwise. Records have `tokens` (words) and as many
    `tags` (`ner_tags`, `labels`, ...; `tag_column` names another), which are names or numbers. The first token of a
    word has its tag, and with `label_all_subtokens` in training the others too (`I-PER` behind `B-PER`).

    Texts of more than `max_length` tokens are split between words into windows (`long="split"`), or lose their end
    (`"truncate"`). Evaluation gives loss and accuracy by word, and precision, recall and F1 of entities over the whole
    set (IOB, IOBES, BILOU, or tags without places); of tags that mean no entities, the macro F1 of words. `per_type`
    has the same of each type, of the latest evaluation, and `confusion` how often a word of a tag (row) was given
    another one (column), of up to 64 tags.
    """

    model_name: Any = "bert-base-cased"
    adapter: Adapter | None = None
    max_length: int = 512
    _: KW_ONLY
    num_classes: int | None = None
    class_names: list[str] | None = None
    tag_column: str | None = None
    label_all_subtokens: bool = False
    long: str = "split"
    label_smoothing: float = 0.0
    tokenizer: Any = None
    dtype: str | None = None  # of the weights: fp32 unless it says bf16 or fp16
    attention: str | None = None  # eager, sdpa, flash_attention_2, ...
    cache_dir: str | Path | None = None
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    per_type: dict[str, EntityScores] = field(init=False, default_factory=dict, repr=False)
    confusion: Tensor | None = field(init=False, default=None, repr=False)  # of the latest evaluation: rows are labels

    kind = "token_classification"
    groups_by_length = True

    def __post_init__(self) -> None:
        self._begin()
        self._begin_classes("single")
        if self.long not in _LONG:
            raise BadArgument(expected("long to be 'split' or 'truncate'", self.long))

    # -- data ----------------------------------------------------------------------------------------------

    def _label_values(self, dataset: Any) -> tuple[Iterable[Any], list[str] | None]:
        records = records_of(dataset, None)
        keys = _tag_keys(records[0], self.tag_column)
        if keys is None:
            return (), None
        values, names = column_values(records, keys)
        return (tag for tags in values if _is_list(tags) for tag in tags), names

    def _encoder(self, first: Any, train: bool) -> TagEncoder:
        spread = self.label_all_subtokens and train
        tags = _tag_keys(first, self.tag_column)
        return TagEncoder(self.text, self.max_length, self.labels, Columns.of(first, tags, train), spread, self.long)

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Words and tags, tokenised once."""
        records = records_of(dataset, None)
        encoder = self._encoder(records[0], train)
        name = "training data" if train else "validation data"
        columns = [key for key in encoder.columns if key is not None]
        return tokenize(only_columns(records, columns), encoder, cache_dir=self.cache_dir, name=name)

    def collate_fn(self, examples: list[Any]) -> dict[str, Tensor]:
        """Padded sequences, masked by length. Where words have no tags, `asked` says which tokens would have one."""
        batch = pad(examples, self.text.pad_token_id, max_length=self.max_length)
        if not bool((batch["labels"] == _UNTAGGED).any()):
            return batch
        batch["asked"] = batch.pop("labels") != IGNORE_INDEX
        return batch

    # -- steps ---------------------------------------------------------------------------------------------

    def _training_options(self) -> dict[str, Any]:
        return {"label_smoothing": self.label_smoothing}

    def _logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def _loss(self, batch: Mapping[str, Tensor], **options: Any) -> TokenLoss:
        return token_cross_entropy(self._logits(batch), batch["labels"], shift=False, **options)

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Loss and accuracy by word, and how many entities of each type are found, predicted and wanted."""
        if "labels" not in batch:
            raise DataError(expected("a tag with every word", "words without", "To predict tags, call predict()."))
        logits, labels = self._logits(batch), batch["labels"]
        loss = token_cross_entropy(logits, labels, shift=False)
        scheme = TagScheme(self._names())
        count = self._entity_counts if scheme.types else self._tag_counts
        predicted, wanted = logits.argmax(-1).cpu(), labels.cpu()
        counts = [count(*rows, scheme) for rows in zip(predicted, wanted, strict=True)]
        found = {
            "loss": (loss.sum, loss.weight),
            "accuracy": (loss.correct, loss.weight),
            "counts": torch.from_numpy(np.stack(counts)),
        }
        return found | ({"confusion": self._confusions(predicted, wanted)} if self.labels.count <= _MOST_TAGS else {})

    def _confusions(self, predicted: Tensor, wanted: Tensor) -> Tensor:
        """The confusion matrix of each window, flat; at most 8 KiB each."""
        windows, cells = len(wanted), self.labels.count**2
        asked = wanted != IGNORE_INDEX
        window = torch.arange(windows)[:, None].expand_as(wanted)[asked]
        cell = wanted[asked].long() * self.labels.count + predicted[asked]
        return torch.bincount(window * cells + cell, minlength=windows * cells).reshape(windows, cells).to(torch.int16)

    def _entity_counts(self, predicted: Tensor, wanted: Tensor, scheme: TagScheme) -> np.ndarray:
        asked = wanted != IGNORE_INDEX
        named = [[self.labels.name(tag) for tag in row[asked].tolist()] for row in (predicted, wanted)]
        return scheme.counts(*named)

    def _tag_counts(self, predicted: Tensor, wanted: Tensor, scheme: TagScheme) -> np.ndarray:
        asked = wanted != IGNORE_INDEX
        predicted, wanted = predicted[asked], wanted[asked]
        columns = [torch.bincount(tags, minlength=self.labels.count) for tags in (predicted, wanted)]
        right = torch.bincount(wanted[predicted == wanted], minlength=self.labels.count)
        return torch.stack([right, *columns], dim=1).int().numpy()

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """Precision, recall and F1 of all entities; of plain tags the mean of their F1. Each type is in `per_type`."""
        counts = rows["counts"].long().sum(0)
        types = TagScheme(self._names()).types
        if "confusion" in rows:
            self.confusion = rows["confusion"].long().sum(0).reshape(self.labels.count, -1)
        self.per_type = {
            kind: entity_scores(*row) for kind, row in zip(types or self._names(), counts.tolist(), strict=True)
        }
        if types:
            return entity_scores(*counts.sum(0).tolist())._asdict()
        occurring = [self.per_type[name].f1 for name, row in zip(self._names(), counts, strict=True) if bool(row.any())]
        return {"f1": float(np.mean(occurring)) if occurring else 0.0}

    def evaluation_records(self) -> dict[str, dict[str, Any]]:
        """The confusion matrix of the latest evaluation, for the records of the run."""
        return confusion_record(self.confusion, self._names())

    def derive_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Nothing more."""
        return {}

    def predict_step(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The tag of each token and its probability, filled up to `max_length`; -100 but for the first of a word."""
        probability, tags = self._logits(batch).float().softmax(-1).max(-1)
        asked = batch["asked"] if "asked" in batch else batch["labels"] != IGNORE_INDEX
        room = (0, self.max_length - tags.shape[1])
        return {
            "prediction": torch.nn.functional.pad(tags.masked_fill(~asked, IGNORE_INDEX), room, value=IGNORE_INDEX),
            "probability": torch.nn.functional.pad(probability.masked_fill(~asked, 0.0), room),
        }

    @torch.no_grad()
    def tag(self, texts: Any, *, batch_size: int = 32) -> list[list[tuple[str, str]]]:
        """The words of each text with their tags. A text is a list of words, or a string with spaces between them."""
        several = [texts] if isinstance(texts, str) else list(texts)
        words = [text.split() if isinstance(text, str) else list(text) for text in several]
        encoder = self._encoder({"tokens": []}, train=False)
        windows = [(place, piece) for place, text in enumerate(words) for piece in encoder.encode({"tokens": text})]
        found: list[list[str]] = [[] for _ in several]
        model: Any = unwrap_model(self.model)
        with eval_mode(model):
            for begin in range(0, len(windows), batch_size):
                part = windows[begin : begin + batch_size]
                batch = self.collate_fn([piece._asdict() for _, piece in part])
                moved = {name: value.to(model.device) for name, value in batch.items()}
                for (place, _), row in zip(part, self.predict_step(moved)["prediction"].tolist(), strict=True):
                    found[place] += [self.labels.name(tag) for tag in row if tag != IGNORE_INDEX]
        # Words behind the end of a text that was truncated have no tag.
        return [[*zip(text, tags, strict=False)] for text, tags in zip(words, found, strict=True)]

    def _names(self) -> list[str]:
        return [self.labels.name(place) for place in range(self.labels.count)]


class Columns(NamedTuple):
    """Which keys of a record are its words and tags. There may be no tags where nothing is learned."""

    tokens: str
    tags: str | None

    @classmethod
    def of(cls, record: Any, tags: str | None, train: bool) -> Columns:
        """The keys of a record, else an error."""
        tokens = found_keys(record, _TOKENS)
        if tokens is None or (tags is None and train):
            received = list(record) if isinstance(record, Mapping) else type(record).__name__
            do = "Rename the columns, or pass tag_column."
            raise DataError(expected("records with tokens (a list of words) and tags", received, do))
        return cls(tokens[0], tags)


def _tag_keys(record: Any, wanted: str | None) -> str | None:
    if wanted is not None and isinstance(record, Mapping) and record:
        return wanted if wanted in record else None
    keys = found_keys(record, _TAGS)
    return None if keys is None else keys[0]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


class TagEncoder(Encoder):
    """Turns words and tags into tokens and labels: the number of the tag at the first token of a word, else -100.

    Words without a tag, in data to predict for, have a label of their own. Words that the tokenizer makes nothing of
    are read as unknown: every word has its place.
    """

    def __init__(
        self, tokenizer: Any, max_length: int, labels: Labels, columns: Columns, spread: bool, long: str
    ) -> None:
        super().__init__(tokenizer, max_length=max_length, add_eos=False)
        if not getattr(tokenizer, "is_fast", False):
            do = "Use the fast tokenizer of the model."
            raise BadArgument(expected("a fast tokenizer, which knows words", type(tokenizer).__name__, do))
        self.labels = labels
        self.columns = columns
        self.spread = spread
        self.long = long
        self._unknown = tokenizer.unk_token or "?"
        self._room = max_length - tokenizer.num_special_tokens_to_add()
        if self._room < 1:
            raise BadArgument(expected("max_length above the number of special tokens", max_length))
        # Behind the first token of a word its entity goes on.
        names = [labels.name(place) for place in range(labels.count)]
        inside = [f"I-{name[2:]}" if name.startswith("B-") else name for name in names]
        numbers = {name: place for place, name in enumerate(names)}
        self._following = [numbers.get(name, place) for place, name in enumerate(inside)]

    def fingerprint(self) -> str:
        """A digest of everything the tokens depend on but the records."""
        own = (self.labels, tuple(self.columns), self.spread, self.long)
        return f"{super().fingerprint()} {_VERSION} {own}"

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        """The windows of each record; none of one without words."""
        pieces = []
        for place, record in enumerate(records):
            with context(place):
                words, tags = self._words_of(record)
                found = list(self._windows(words, tags)) if words else []
            report.records += 1
            if not words:
                report.add_outcome("no words", "dropped")
            elif self.long == "truncate" and len(found) > 1:
                report.add_outcome(f"longer than {self.max_length} tokens", "truncated")
                found = found[:1]
            elif len(found) > 1:
                report.add_outcome(f"longer than {self.max_length} tokens", "split")
            report.pieces += len(found)
            report.tokens += sum(len(piece.input_ids) for piece in found)
            report.supervised += sum(int(np.count_nonzero(piece.labels != IGNORE_INDEX)) for piece in found)
            pieces.append(found)
        return pieces

    def _words_of(self, record: Any) -> tuple[list[str], list[int]]:
        words = require_key(record, self.columns.tokens)
        if not _is_list(words) or not all(isinstance(word, str) for word in words):
            raise DataError(expected_value(f"a list of words in {self.columns.tokens!r}", words))
        if self.columns.tags is None:
            return list(words), [_UNTAGGED] * len(words)
        tags = require_key(record, self.columns.tags)
        if not _is_list(tags) or len(tags) != len(words):
            received = f"{len(tags)} tags" if _is_list(tags) else type(tags).__name__
            raise DataError(expected(f"as many tags as words ({len(words)})", received))
        return list(words), [self.labels.index(tag) for tag in tags]

    def _windows(self, words: list[str], tags: list[int]) -> Iterator[Encoded]:
        """As many words at a time as there is room for."""
        tokenizer = self._require()
        plain = tokenizer(words, is_split_into_words=True, add_special_tokens=False, verbose=False)
        sizes = np.bincount([word for word in plain.word_ids() if word is not None], minlength=len(words))
        words = [word if size else self._unknown for word, size in zip(words, sizes, strict=True)]
        sizes = sizes.clip(min=1)
        begin = 0
        while begin < len(words):
            # At least one word, however long: it is cut.
            fitting = int(np.searchsorted(sizes[begin:].cumsum(), self._room, side="right"))
            end = begin + max(1, fitting)
            yield self._window(words[begin:end], tags[begin:end])
            begin = end

    def _window(self, words: list[str], tags: list[int]) -> Encoded:
        made = self._require()(words, is_split_into_words=True, truncation=True, max_length=self.max_length)
        labels = np.full(len(made["input_ids"]), IGNORE_INDEX, dtype=np.int32)
        before = None
        for place, word in enumerate(made.word_ids()):
            if word is not None and word != before:
                labels[place] = tags[word]
            elif word is not None and self.spread and tags[word] >= 0:
                labels[place] = self._following[tags[word]]
            before = word
        return Encoded(np.asarray(made["input_ids"], dtype=np.int32), labels)
