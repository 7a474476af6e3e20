"""Token classification: a tag per word, as in named entity recognition and part-of-speech tagging.

Finding the classes is in `classifying` and `labels`, tagging schemes are in `eval.classification`.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from trainformer.core import BadArgument, DataError
from trainformer.core.errors import expected
from trainformer.data.ids import sample_ids
from trainformer.data.text.encode import IGNORE_INDEX, Encoded, Encoder, EncodingReport, ErrorContext
from trainformer.data.text.labelled import column_values
from trainformer.data.text.labels import Labels
from trainformer.data.text.schemas import expected_value, require_key
from trainformer.data.text.sources import records_of
from trainformer.data.text.store import StoreView, tokenize
from trainformer.data.text.token_records import find_keys, is_indexed, only_columns
from trainformer.eval.classification import EntityScores, TagScheme, entity_scores
from trainformer.losses.tokens import TokenLoss, token_cross_entropy
from trainformer.models.modes import eval_mode
from trainformer.tasks.classification_report import confusion_record
from trainformer.tasks.language.base import TokenPredictionTask
from trainformer.tasks.language.classifying import ClassifyingTask

_VERSION = "tags-1"  # of the output of `TagEncoder`: raise it when that changes, to invalidate cached tokens
_TOKENS = (("tokens",), ("words",))
_TAGS = tuple((name,) for name in ("ner_tags", "tags", "labels", "tag", "pos_tags", "chunk_tags"))
_LONG = ("split", "truncate")
_MOST_TAGS = 64  # no confusion matrix beyond: an evaluation keeps one per window until it ends
_UNTAGGED = -1  # the label of a word without a tag


@dataclass(eq=False)
class TokenClassification(TokenPredictionTask, ClassifyingTask):
    """Train a token classifier of transformers (BERT, RoBERTa, DeBERTa, ...).

    `model_name` is a hub name, a folder, a config (random weights) or a model; `tokenizer`, which must be a fast one,
    defaults to the one of `model_name`. Records have `tokens` (words) and as many `tags` (`ner_tags`, `labels`, ...;
    or pass `tag_column`), as names or indices. The first token of a word carries its tag; with
    `label_all_subtokens` the others too, in training (`I-PER` after `B-PER`).

    Texts of more than `max_length` tokens are split between words into windows (`long="split"`), or truncated
    (`"truncate"`). Evaluation reports loss and accuracy per word, and entity-level precision, recall and F1 over the
    whole dataset (IOB, IOBES, BILOU, or plain entity tags); for other tags the macro F1 of words. After an evaluation,
    `per_type` holds the metrics of each type, and `confusion` the confusion matrix of words for up to 64 tags.
    Predictions have one row per record, with a tag per word; words beyond the end of a truncated record have None.
    """

    model_name: Any = "bert-base-cased"
    max_length: int = 512
    _: KW_ONLY
    num_classes: int | None = None
    class_names: list[str] | None = None
    tag_column: str | None = None
    label_all_subtokens: bool = False
    long: str = "split"
    label_smoothing: float = 0.0

    per_type: dict[str, EntityScores] = field(init=False, default_factory=dict, repr=False)
    confusion: Tensor | None = field(init=False, default=None, repr=False)  # of the latest evaluation, labels as rows

    kind = "token_classification"
    groups_by_length = True

    def __post_init__(self) -> None:
        self._init_task()
        self._init_classes("single")
        if self.long not in _LONG:
            raise BadArgument(expected("long to be 'split' or 'truncate'", self.long))

    # -- data ----------------------------------------------------------------------------------------------

    def _label_values(self, dataset: Any) -> tuple[Iterable[Any], list[str] | None]:
        records = records_of(dataset, None)
        key = _find_tag_key(records[0], self.tag_column)
        if key is None:
            return (), None
        values, names = column_values(records, key)
        return (tag for tags in values if _is_list(tags) for tag in tags), names

    def _encoder(self, first: Any, train: bool) -> TagEncoder:
        all_subtokens = self.label_all_subtokens and train
        columns = Columns.of(first, _find_tag_key(first, self.tag_column), train)
        return TagEncoder(self.text_tokenizer, self.max_length, self.labels, columns, all_subtokens, self.long)

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokenise words with their tags once."""
        if isinstance(dataset, Windows):
            return dataset
        records = records_of(dataset, None)
        encoder = self._encoder(records[0], train)
        columns = [key for key in encoder.columns if key is not None]
        return self._tokenize(only_columns(records, columns), encoder, train)

    def prediction_data(self, dataset: Any) -> Any:
        """Tokenise the words of records, which need no tags. Loaders and streams stay as they are."""
        if not is_indexed(dataset):
            return dataset
        records = records_of(dataset, None)
        columns = Columns.of(records[0], None, train=False)
        encoder = WordEncoder(self.text_tokenizer, self.max_length, self.labels, columns, False, self.long)
        store = tokenize(only_columns(records, columns[:1]), encoder, cache_dir=self.cache_dir, name="prediction data")
        return Windows(store, list(islice(sample_ids(dataset), len(records))))

    def collate_fn(self, examples: list[Any]) -> dict[str, Tensor]:
        batch = super().collate_fn(examples)
        if "window" in examples[0]:
            batch["first_token"] = batch.pop("labels") != IGNORE_INDEX
            batch["window"] = torch.tensor([example["window"] for example in examples])
            return batch
        if not bool((batch["labels"] == _UNTAGGED).any()):
            return batch
        batch["first_token"] = batch.pop("labels") != IGNORE_INDEX  # prediction data: which tokens will get a tag
        return batch

    # -- steps ---------------------------------------------------------------------------------------------

    def _logits(self, batch: Mapping[str, Tensor]) -> Tensor:
        return self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits

    def _loss(self, batch: Mapping[str, Tensor], **options: Any) -> TokenLoss:
        return token_cross_entropy(self._logits(batch), batch["labels"], shift=False, **options)

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Loss and accuracy per word, and counts of correct, predicted and true entities of each type."""
        if "labels" not in batch:
            raise DataError(expected("a tag with every word", "words without", "To predict tags, call predict()."))
        logits, labels = self._logits(batch), batch["labels"]
        loss = token_cross_entropy(logits, labels, shift=False)
        scheme = TagScheme(self._names())
        predicted, target = logits.argmax(-1).cpu(), labels.cpu()
        counts = [self._counts(*rows, scheme) for rows in zip(predicted, target, strict=True)]
        found = {
            "loss": (loss.sum, loss.weight),
            "accuracy": (loss.correct, loss.weight),
            "counts": torch.from_numpy(np.stack(counts)),
        }
        return found | ({"confusion": self._confusions(predicted, target)} if self.labels.count <= _MOST_TAGS else {})

    def _confusions(self, predicted: Tensor, target: Tensor) -> Tensor:
        """The flat confusion matrix of each window, at most 8 KiB each."""
        windows, cells = len(target), self.labels.count**2
        mask = target != IGNORE_INDEX
        window = torch.arange(windows)[:, None].expand_as(target)[mask]
        cell = target[mask].long() * self.labels.count + predicted[mask]
        return torch.bincount(window * cells + cell, minlength=windows * cells).reshape(windows, cells).to(torch.int16)

    def _counts(self, predicted: Tensor, target: Tensor, scheme: TagScheme) -> np.ndarray:
        """Numbers of correct, predicted and true entities of each type; without entities, of words with each tag."""
        mask = target != IGNORE_INDEX
        predicted, target = predicted[mask], target[mask]
        if scheme.types:
            return scheme.counts(*([self.labels.name(tag) for tag in row.tolist()] for row in (predicted, target)))
        several = (target[predicted == target], predicted, target)
        return torch.stack([tags.bincount(minlength=self.labels.count) for tags in several], dim=1).int().numpy()

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """Precision, recall and F1 of all entities, or the macro F1 of plain tags. Sets `per_type`."""
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
        return confusion_record(self.confusion, self._names())

    def derive_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        return {}

    def predict_step(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Tag and probability at the first token of each word, elsewhere -100 and 0; padded to `max_length`."""
        probability, tags = self._logits(batch).float().softmax(-1).max(-1)
        first = batch["first_token"] if "first_token" in batch else batch["labels"] != IGNORE_INDEX
        padding = (0, self.max_length - tags.shape[1])
        rows = {
            "prediction": F.pad(tags.masked_fill(~first, IGNORE_INDEX), padding, value=IGNORE_INDEX),
            "probability": F.pad(probability.masked_fill(~first, 0.0), padding),
        }
        return rows | ({"window": batch["window"]} if "window" in batch else {})

    def merge_predictions(self, batches: Iterable[Mapping[str, Any]]) -> Iterator[Mapping[str, Any]]:
        """The predictions of windows as those of records: `tags`, with their index and probability, one per word.

        Words beyond the end of a truncated record have the tag None, the index -100 and the probability 0.
        """
        record: list[tuple[Tensor, Tensor]] = []
        words = 0
        for batch in batches:
            if "window" not in batch:  # of a loader
                yield batch
                continue
            done = []
            for tags, probability, (is_first, count) in zip(
                batch["prediction"], batch["probability"], batch["window"].tolist(), strict=True
            ):
                if is_first and record:
                    done.append(self._merged(record, words))
                record, words = ([] if is_first else record), count
                record.append((tags[tags != IGNORE_INDEX], probability[tags != IGNORE_INDEX]))
            if done:
                yield {name: [row[name] for row in done] for name in done[0]}
        if record:
            yield {name: [value] for name, value in self._merged(record, words).items()}

    def _merged(self, windows: list[tuple[Tensor, Tensor]], words: int) -> dict[str, Any]:
        tags, probability = (torch.cat(parts)[:words] for parts in zip(*windows, strict=True))
        missing = (0, words - len(tags))
        names = [self.labels.name(tag) for tag in tags.tolist()]
        return {
            "tags": [*names, *[None] * missing[1]],
            "prediction": F.pad(tags, missing, value=IGNORE_INDEX),
            "probability": F.pad(probability, missing),
        }

    @torch.no_grad()
    def tag(self, texts: Any, *, batch_size: int = 32) -> list[list[tuple[str, str]]]:
        """Return (word, tag) pairs for each text: a list of words, or a string to split at whitespace."""
        several = [texts] if isinstance(texts, str) else list(texts)
        words = [text.split() if isinstance(text, str) else list(text) for text in several]
        encoder = self._encoder({"tokens": []}, train=False)
        windows = [(index, piece) for index, text in enumerate(words) for piece in encoder.encode({"tokens": text})]
        found: list[list[str]] = [[] for _ in several]
        rows: list[list[int]] = []
        with eval_mode(self.model):
            for batch in self._batches([piece._asdict() for _, piece in windows], batch_size):
                rows += self.predict_step(batch)["prediction"].tolist()
        for (index, _), row in zip(windows, rows, strict=True):
            found[index] += [self.labels.name(tag) for tag in row if tag != IGNORE_INDEX]
        # Words beyond the end of a truncated text have no tag.
        return [[*zip(text, tags, strict=False)] for text, tags in zip(words, found, strict=True)]

    def _names(self) -> list[str]:
        return [self.labels.name(index) for index in range(self.labels.count)]


class Windows(StoreView):
    """A token store of `WordEncoder`: `window` says whether it is the first of its record, and how many words that has.

    `ids` are those of the records.
    """

    def __init__(self, store: Any, ids: list[Any]) -> None:
        super().__init__(store)
        self.ids = ids

    @property
    def lengths(self) -> np.ndarray:
        return self.store.lengths - 2

    def __getitem__(self, index: int) -> dict[str, Any]:
        item = self.store[index]
        window = item["input_ids"][-2:].tolist()
        return {"input_ids": item["input_ids"][:-2], "labels": item["labels"][:-2], "window": window}


class Columns(NamedTuple):
    """The columns of words and tags. Prediction data may have no tags."""

    tokens: str
    tags: str | None

    @classmethod
    def of(cls, record: Any, tags: str | None, train: bool) -> Columns:
        tokens = find_keys(record, _TOKENS)
        if tokens is None or (tags is None and train):
            received = list(record) if isinstance(record, Mapping) else type(record).__name__
            do = "Rename the columns, or pass tag_column."
            raise DataError(expected("records with tokens (a list of words) and tags", received, do))
        return cls(tokens[0], tags)


def _find_tag_key(record: Any, column: str | None) -> str | None:
    if column is not None and isinstance(record, Mapping) and record:
        return column if column in record else None
    keys = find_keys(record, _TAGS)
    return None if keys is None else keys[0]


def _is_list(value: Any) -> bool:
    return isinstance(value, list | tuple | np.ndarray)


class TagEncoder(Encoder):
    """Tokenise words, with the index of the tag as label of a word's first token, and -100 elsewhere.

    Untagged words, in prediction data, have the label -1. Words without any token become the unknown token, so each
    word keeps its position.
    """

    def __init__(
        self, tokenizer: Any, max_length: int, labels: Labels, columns: Columns, all_subtokens: bool, long: str
    ) -> None:
        super().__init__(tokenizer, max_length=max_length, add_eos=False)
        if not getattr(tokenizer, "is_fast", False):
            do = "Use the fast tokenizer of the model."
            raise BadArgument(expected("a fast tokenizer, which has word_ids()", type(tokenizer).__name__, do))
        self.labels = labels
        self.columns = columns
        self.all_subtokens = all_subtokens
        self.long = long
        self._unknown = tokenizer.unk_token or "?"
        self._room = max_length - tokenizer.num_special_tokens_to_add()
        if self._room < 1:
            raise BadArgument(expected("max_length above the number of special tokens", max_length))
        # The tag of a word's further tokens: I-X after B-X.
        names = [labels.name(index) for index in range(labels.count)]
        inside = [f"I-{name[2:]}" if name.startswith("B-") else name for name in names]
        indices = {name: index for index, name in enumerate(names)}
        self._inside_tag = [indices.get(name, index) for index, name in enumerate(inside)]

    def fingerprint(self) -> str:
        own = (self.labels, tuple(self.columns), self.all_subtokens, self.long)
        return f"{super().fingerprint()} {_VERSION} {own}"

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
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
        """Windows of as many words as fit."""
        tokenizer = self._require()
        plain = tokenizer(words, is_split_into_words=True, add_special_tokens=False, verbose=False)
        sizes = np.bincount([word for word in plain.word_ids() if word is not None], minlength=len(words))
        words = [word if size else self._unknown for word, size in zip(words, sizes, strict=True)]
        sizes = sizes.clip(min=1)
        begin = 0
        while begin < len(words):
            # At least one word, which is truncated if it is too long.
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
            elif word is not None and self.all_subtokens and tags[word] >= 0:
                labels[place] = self._inside_tag[tags[word]]
            before = word
        return Encoded(np.asarray(made["input_ids"], dtype=np.int32), labels)


class WordEncoder(TagEncoder):
    """Tokenise words to predict tags for. Two numbers follow the tokens of a window, see `Windows`.

    A record without words has one window, so that it has a prediction.
    """

    def fingerprint(self) -> str:
        return f"words {super().fingerprint()}"

    def _pieces_of(self, records: Sequence[Any], report: EncodingReport, context: ErrorContext) -> list[list[Encoded]]:
        found = super()._pieces_of(records, report, context)
        pieces = []
        for record, windows in zip(records, found, strict=True):
            if not windows:
                report.dropped -= 1
                report.pieces += 1
                windows = [Encoded(np.asarray([self._require().pad_token_id]), np.asarray([IGNORE_INDEX]))]
            words = len(record[self.columns.tokens])
            pieces.append([_with_numbers(window, int(place == 0), words) for place, window in enumerate(windows)])
        return pieces


def _with_numbers(window: Encoded, is_first: int, words: int) -> Encoded:
    ids = np.concatenate([window.input_ids, [is_first, words]]).astype(np.int32)
    return Encoded(ids, np.concatenate([window.labels, [IGNORE_INDEX] * 2]).astype(np.int32))
