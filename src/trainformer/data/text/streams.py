"""Corpora that are only ever streamed: tokenised as they are read, packed on the way, and resumed where they were.

Owns opening such a stream by name, and the stream of tokens made of it. What the tokens of a record are is left to
`encode`. Data that fit on a disk are better tokenised once (`store`): every epoch then costs nothing, and has an order
of its own.
"""

from __future__ import annotations

import glob
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require
from trainformer.data.hub import has_shuffle_buffer
from trainformer.data.labels import HF_STREAM, is_a
from trainformer.data.text.encode import Encoded, Encoder, Report
from trainformer.data.text.files import content_suffix
from trainformer.data.text.packing import join_documents
from trainformer.data.text.schemas import Form, form_of, standard

PREFIX = "stream:"
_AHEAD = 32  # records that are tokenised together
_WAITING = 64  # documents among which the packer chooses: sequences are then some 97 % full
_IN_VAIN = 1000  # records after which a stream that gave nothing to train on is an error
_BUILDERS = {".jsonl": "json", ".json": "json", ".csv": "csv", ".parquet": "parquet"}  # else: text, line by line


def open_stream(name: str) -> Any:
    """A stream of records by name, through HF `datasets`; nothing is downloaded or read as a whole.

    `"stream:hf:allenai/c4@en"` is a data set of the hub (`@configuration` and `:split` as in `load_text`), and
    `"stream:data/*.jsonl.gz"` are files: JSON Lines, CSV, Parquet, or else text, of which every line is a record.
    """
    spec = name.removeprefix(PREFIX)
    datasets = require("datasets", "datasets", "to stream data")
    options: dict[str, Any]
    if spec.startswith("hf:"):
        place, _, split = spec.removeprefix("hf:").partition(":")
        place, _, configuration = place.partition("@")
        what, options = f"the data set '{place}' of the Hugging Face hub", {"name": configuration or None}
    else:
        files = [spec] if Path(spec).is_file() else sorted(glob.glob(spec, recursive=True))
        if not files:
            raise DataError(expected("a file, or a pattern of files", spec, 'As in "stream:data/*.jsonl".'))
        place, split = _BUILDERS.get(content_suffix(Path(files[0])), "text"), "train"
        what, options = f"{len(files)} files as {place}", {"data_files": files}
    try:
        return datasets.load_dataset(place, split=split or "train", streaming=True, **options)
    except Exception as error:  # of the network, the hub, the file system, or a split that is none: many types
        raise DataError(expected(f"to stream {what}", f"{type(error).__name__}: {error}")) from error


def show_to_torch(kind: type) -> None:
    """Let torch, if a program uses it, know a class as one whose data are iterated; it tells by the class alone."""
    if (torch := sys.modules.get("torch.utils.data")) is not None:
        torch.IterableDataset.register(kind)


@dataclass
class _Cursor:
    """Where an iteration is: the source before the records in hand, and what was given out of these."""

    source: Any = None  # as the source itself says it; None: at its beginning
    records: int = 0  # before those in hand
    given: int = 0  # pieces of the records in hand
    waiting: list[Encoded] = field(default_factory=list)  # pieces taken out but not in a sequence yet


class TokenStream:
    """The pieces of a stream of records, tokenised as they are read: items are `{"input_ids", "labels"}`.

    With `capacity` they are packed: items are then those of `PackedDataset`, each filled from some documents that
    wait. `source` is anything that can be iterated again and gives records. Its place is saved by its own `state_dict`
    where it has one that tells all (HF `datasets` do, as long as they shuffle in no buffer), else it is read again up
    to the place. Among worker processes records are dealt out, unless the source does that itself.

    >>> from trainformer.data.text.encode import Encoder
    >>> stream = TokenStream([{"input_ids": [1, 2, 3]}, {"input_ids": [4, 5]}], Encoder(None, max_length=8), capacity=8)
    >>> [item["position_ids"].tolist() for item in stream]
    [[0, 1, 2, 0, 1]]
    """

    in_memory = True  # tokenising some 100,000 tokens a second in this process resumes exactly; workers are for asking

    def __init__(self, source: Any, encoder: Encoder, *, capacity: int | None = None) -> None:
        if isinstance(source, Iterator):
            raise BadArgument(
                expected(
                    "a stream that can be iterated again",
                    f"a {type(source).__name__}, which is used up once it was read",
                    "Pass an IterableDataset, or an object whose __iter__ begins anew.",
                )
            )
        self.source = source
        self.encoder = encoder
        self.capacity = capacity
        self.report = Report()
        self._form: Form | None = None
        show_to_torch(type(self))
        self._cursor = _Cursor()
        self._restored = False

    def set_epoch(self, epoch: int) -> None:
        """Tell the source which epoch it is, where it wants to know (it may shuffle anew)."""
        if hasattr(self.source, "set_epoch"):
            self.source.set_epoch(epoch)

    def __iter__(self) -> Iterator[dict[str, Any]]:
        if not self._restored:
            self._cursor = _Cursor()
        self._restored = False
        pieces = self._pieces(self._cursor)
        if self.capacity is None:
            return (piece._asdict() for piece in pieces)
        return self._packed(self._cursor, pieces, self.capacity)

    def state_dict(self) -> dict[str, Any]:
        """Where the latest iteration in this process is, the documents that wait to be packed included."""
        cursor = self._cursor
        return {
            "source": cursor.source,
            "records": cursor.records,
            "given": cursor.given,
            "waiting": [[part.tolist() for part in piece] for piece in cursor.waiting],
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go there: the next iteration gives the rest."""
        waiting = [Encoded(*(np.asarray(part, dtype=np.int32) for part in piece)) for piece in state["waiting"]]
        self._cursor = _Cursor(state["source"], state["records"], state["given"], waiting)
        self._restored = True

    # -- reading -------------------------------------------------------------------------------------------

    def _pieces(self, cursor: _Cursor) -> Iterator[Encoded]:
        """Tokenised pieces from the cursor on, which follows."""
        records = self._records(cursor)
        done = cursor.given
        while True:
            chunk = list(islice(records, _AHEAD))
            if not chunk:
                self._insist_on_pieces(cursor)
                return
            pieces = self._encoded(chunk, cursor.records)
            for piece in pieces[done:]:
                cursor.given += 1
                yield piece
            done = cursor.given = 0
            cursor.records += len(chunk)
            # Not before the first record: a source that did not begin yet speaks of the iteration before.
            cursor.source = self._place()
            if cursor.records >= _IN_VAIN:
                self._insist_on_pieces(cursor)

    def _records(self, cursor: _Cursor) -> Iterator[Any]:
        """What is left of the source."""
        if cursor.source is not None:
            self.source.load_state_dict(cursor.source)
            return iter(self.source)
        return islice(self._share(iter(self.source)), cursor.records, None)

    def _share(self, records: Iterator[Any]) -> Iterator[Any]:
        torch = sys.modules.get("torch.utils.data")
        worker = None if torch is None else torch.get_worker_info()
        if worker is None or is_a(self.source, HF_STREAM):
            return records
        return islice(records, worker.id, None, worker.num_workers)

    def _place(self) -> Any:
        say = getattr(self.source, "state_dict", None)
        knows = callable(say) and hasattr(self.source, "load_state_dict") and not has_shuffle_buffer(self.source)
        return say() if knows and say is not None else None

    def _encoded(self, chunk: list[Any], first: int) -> list[Encoded]:
        if self._form is None and not (isinstance(chunk[0], Mapping) and "input_ids" in chunk[0]):
            self._form = form_of(chunk)
        known = self._form
        records = chunk if known is None else [_named(record, known, first + i) for i, record in enumerate(chunk)]
        made = self.encoder.encode_all(records, self.report, first=first)
        return [piece for pieces in made for piece in pieces]

    def _insist_on_pieces(self, cursor: _Cursor) -> None:
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
            yield join_documents([piece._asdict() for piece in _taken(waiting, capacity)])


def _taken(waiting: list[Encoded], capacity: int) -> list[Encoded]:
    """The oldest of the documents, and then always the largest that still fits; they are removed from the list."""
    chosen = [waiting.pop(0)]
    space = capacity - len(chosen[0].input_ids)
    while True:
        sizes = [len(piece.input_ids) for piece in waiting]
        best = max((size for size in sizes if size <= space), default=None)
        if best is None:
            return chosen
        chosen.append(waiting.pop(sizes.index(best)))
        space -= best


def _named(record: Any, form: Form, number: int) -> dict[str, Any]:
    try:
        return standard(record, form)
    except DataError as error:
        raise DataError(f"Record {number} of the stream: {error}") from error
