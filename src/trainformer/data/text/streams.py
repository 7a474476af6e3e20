"""Streamed corpora: tokenised and packed on the fly, with exact resume.

Data that fit on a disk are better tokenised once (`store`): later epochs then cost nothing, and can be shuffled.
"""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require
from trainformer.data.hub import check_is_dataset, has_state
from trainformer.data.labels import HF_STREAM, is_instance_of
from trainformer.data.tar_shards import is_shard_path
from trainformer.data.text.encode import Encoded, Encoder, EncodingReport
from trainformer.data.text.files import content_suffix
from trainformer.data.text.packing import join_documents
from trainformer.data.text.schemas import Schema, detect_schema, standard
from trainformer.data.text.tar_records import TarRecords

PREFIX = "stream:"
_AHEAD = 32  # records tokenised together
_WAITING = 64  # documents the packer chooses from: sequences are then about 97 % full
_PATIENCE = 1000  # records after which a stream without anything to train on is an error
_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # otherwise: text, line by line


def open_stream(name: str) -> Any:
    """A stream of records by name, through HF `datasets`; nothing is stored.

    `"stream:hf:allenai/c4@en"` is a dataset of the hub (`@configuration` and `:split` as in `load_text`), and
    `"stream:data/*.jsonl.gz"` are files: JSON Lines, CSV, Parquet, or else text with one record per line.
    `"stream:data/{000..012}.tar"` are tar shards with a JSON file for each record.
    """
    spec = name.removeprefix(PREFIX)
    if not spec.startswith("hf:") and is_shard_path(spec):
        return TarRecords(spec)
    datasets = require("datasets", "datasets", "to stream data")
    options: dict[str, Any]
    if spec.startswith("hf:"):
        path, _, split = spec.removeprefix("hf:").partition(":")
        path, _, configuration = path.partition("@")
        check_is_dataset(path)
        what, options = f"the dataset '{path}' of the Hugging Face hub", {"name": configuration or None}
    else:
        files = [spec] if Path(spec).is_file() else sorted(glob.glob(spec, recursive=True))
        if not files:
            raise DataError(expected("a file, or a glob pattern", spec, 'As in "stream:data/*.jsonl".'))
        path, split = _BUILDERS.get(content_suffix(Path(files[0])), "text"), "train"
        what, options = f"{len(files)} files as {path}", {"data_files": files}
    try:
        return datasets.load_dataset(path, split=split or "train", streaming=True, **options)
    except Exception as error:  # of the network, the hub, the file system, or a missing split: many types
        raise DataError(expected(f"to stream {what}", f"{type(error).__name__}: {error}")) from error


@dataclass
class _Cursor:
    """The position of an iteration: the source before the current chunk of records, and what was yielded of it."""

    source: Any = None  # its own state; None: at the start
    records: int = 0  # before the current chunk
    given: int = 0  # sequences of the current chunk that were yielded
    waiting: list[Encoded] = field(default_factory=list)  # sequences that wait to be packed


class TokenStream:
    """A stream of records, tokenised while reading: items are `{"input_ids", "labels"}`.

    With `capacity` items are packed as in `PackedDataset`, from a buffer of waiting documents. `source` is any iterable
    of records that can be iterated again. Its position is saved through its own `state_dict` if that is complete (HF
    `datasets` without a shuffle buffer), otherwise it is read again up to the position. Worker processes take turns
    with the records, unless the source splits them itself.

    >>> from trainformer.data.text.encode import Encoder
    >>> stream = TokenStream([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], Encoder(None, max_length=8), capacity=8)
    >>> [item["position_ids"].tolist() for item in stream]
    [[0, 1, 2, 0, 1]]
    """

    in_memory = True  # read in this process (100,000 tokens/s) to resume exactly; workers are opt-in

    def __init__(self, source: Any, encoder: Encoder, *, capacity: int | None = None) -> None:
        if isinstance(source, Iterator):
            what = "a stream that can be iterated again"
            do = "Pass an IterableDataset, or an object with __iter__."
            raise BadArgument(expected(what, f"a {type(source).__name__}, which can be read only once", do))
        self.source = source
        self.encoder = encoder
        self.capacity = capacity
        self.report = EncodingReport()
        self._schema: Schema | None = None
        if (torch := sys.modules.get("torch.utils.data")) is not None:
            torch.IterableDataset.register(type(self))  # a DataLoader checks the class
        self._cursor = _Cursor()
        self._restored = False

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch to the source, which may shuffle by it."""
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._restored:
            self._cursor = _Cursor()
        self._restored = False
        pieces = self._sequences(self._cursor)
        if self.capacity is None:
            return (piece._asdict() if isinstance(piece, Encoded) else piece for piece in pieces)
        return self._packed(self._cursor, pieces, self.capacity)

    def state_dict(self) -> dict[str, Any]:
        """The position of the current iteration in this process, with the documents that wait to be packed."""
        cursor = self._cursor
        return {
            "source": cursor.source,
            "records": cursor.records,
            "given": cursor.given,
            "waiting": [[part.tolist() for part in piece] for piece in cursor.waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Resume there: the next iteration yields the rest."""
        waiting = [Encoded(*(np.asarray(part, dtype=np.int32) for part in piece)) for piece in state["waiting"]]
        self._cursor = _Cursor(state["source"], state["records"], state["given"], waiting)
        self._restored = True

    # -- reading -------------------------------------------------------------------------------------------

    def _sequences(self, cursor: _Cursor) -> Iterator[Any]:
        """The sequences (or other items) from the cursor on; advances the cursor."""
        records = self._records(cursor)
        done = cursor.given
        while True:
            chunk = list(islice(records, _AHEAD))
            if not chunk:
                self._check_trainable(cursor)
                return
            pieces = self._encoded(chunk, cursor.records)
            for piece in pieces[done:]:
                cursor.given += 1
                yield piece
            done = cursor.given = 0
            cursor.records += len(chunk)
            # Not before the first record: until then the source reports the previous iteration.
            cursor.source = self.source.state_dict() if has_state(self.source) else None
            if cursor.records >= _PATIENCE:
                self._check_trainable(cursor)

    def _records(self, cursor: _Cursor) -> Iterator[Any]:
        if cursor.source is not None:
            self.source.load_state_dict(cursor.source)
            return iter(self.source)
        torch = sys.modules.get("torch.utils.data")
        worker = None if torch is None else torch.get_worker_info()
        records = iter(self.source)
        if worker is not None and not is_instance_of(self.source, HF_STREAM):
            records = islice(records, worker.id, None, worker.num_workers)
        return islice(records, cursor.records, None)

    def _encoded(self, chunk: list[Any], first: int) -> list[Any]:
        if self._schema is None and not (isinstance(chunk[0], Mapping) and "input_ids" in chunk[0]):
            self._schema = self._detect(chunk)
        records = []
        for number, record in enumerate(chunk, first):
            try:
                records.append(record if self._schema is None else self._standard(record, self._schema))
            except DataError as error:
                raise DataError(f"Record {number} of the stream: {error}") from error
        return self._items(records, first)

    def _detect(self, chunk: list[Any]) -> Schema:
        return detect_schema(chunk)

    def _standard(self, record: Any, schema: Schema) -> dict[str, Any]:
        return standard(record, schema)

    def _items(self, records: list[Any], first: int) -> list[Any]:
        """The items of a chunk of records: token sequences."""
        encoded = self.encoder.encode_all(records, self.report, first=first)
        return [sequence for of_record in encoded for sequence in of_record]

    def _check_trainable(self, cursor: _Cursor) -> None:
        if self.report.records and not self.report.pieces:
            raise DataError(
                expected("records with something to train on", f"none in the first {cursor.records:,}: {self.report}")
            )

    # -- packing -------------------------------------------------------------------------------------------

    def _packed(self, cursor: _Cursor, pieces: Iterator[Encoded], capacity: int) -> Iterator[dict[str, Any]]:
        waiting = cursor.waiting
        while True:
            waiting.extend(islice(pieces, _WAITING - len(waiting)))
            if not waiting:
                return
            yield join_documents([piece._asdict() for piece in _pop_bin(waiting, capacity)])


class PairStream(TokenStream):
    """A stream of preference pairs, tokenised while reading: items are `{"chosen", "rejected"}`, each with tokens.

    >>> from trainformer.data.text.prepare import PairEncoder
    >>> records = [{"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"}]
    >>> from trainformer.data import train_tokenizer
    >>> encoder = PairEncoder(train_tokenizer(["1 + 1 = 2"], vocabulary=270), max_length=32)
    >>> [sorted(pair) for pair in PairStream(records, encoder)]
    [['chosen', 'rejected']]
    """

    schemas: ClassVar[tuple[str, ...]] = ("preference",)

    def _detect(self, chunk: list[Any]) -> Schema:
        schema = detect_schema(chunk)
        if schema.name not in self.schemas:
            what = f"a stream of records of the schema {' or '.join(map(repr, self.schemas))}"
            keys = ", ".join(map(repr, chunk[0])) if isinstance(chunk[0], Mapping) else "no keys"
            raise DataError(expected(what, f"'{schema.name}', with {keys}", "Rename the keys."))
        return schema

    def _items(self, records: list[Any], first: int) -> list[Any]:
        pairs = self.encoder.encode_all(records, self.report, first=first)
        return [{"chosen": pair[0]._asdict(), "rejected": pair[1]._asdict()} for pair in pairs if pair]


def _pop_bin(waiting: list[Encoded], capacity: int) -> list[Encoded]:
    """Remove and return the oldest document, and then always the largest that still fits."""
    chosen = [waiting.pop(0)]
    space = capacity - len(chosen[0].input_ids)
    while True:
        sizes = [len(piece.input_ids) for piece in waiting]
        best = max((size for size in sizes if size <= space), default=None)
        if best is None:
            return chosen
        chosen.append(waiting.pop(sizes.index(best)))
        space -= best
