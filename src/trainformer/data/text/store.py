"""Tokenise once: records are encoded in several processes into memory-mapped files, and cached.

A cache folder is named by a digest of the records, the tokenizer, the settings and the format. It is written under a
temporary name, synced, and renamed: a folder with its final name is complete, whatever was killed. Processes that need
the same data wait for the first one.

Its manifest has a digest of every block of every file. Opening compares all of them up to 2 GiB (a second), and a
random sample of 2 GiB beyond that. What does not match is tokenised again.
"""

from __future__ import annotations

import hashlib
import json
import logging
import multiprocessing
import os
import random
import shutil
import signal
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.dataset import IndexedDataset, normalize_index
from trainformer.data.fetcher import is_plain_subset, unwrap_subsets
from trainformer.data.text.encode import Encoded, Encoder, EncodingReport
from trainformer.data.text.files import cache_dir as user_cache
from trainformer.utils.files import decode_json, sync
from trainformer.utils.tree_files import read_array

logger = logging.getLogger("trainformer")

_FORMAT = 3  # of the files and of the encoding: increase it when either changes
_MANIFEST = "manifest.json"
_CHUNK = 128  # records per task at most: about 10 ms of work, against 0.3 ms to send them
_CHUNKS = 64  # tasks at least, if there are enough records: spreads long documents evenly
_SERIAL_SECONDS = 1.0  # less work does not pay for starting processes
_MAX_WORKERS = 16
_ORPHANED_SECONDS = 0.5  # how often a worker checks whether its parent is alive
_MANY_DROPPED = 0.1
_BLOCK = 1 << 24  # bytes per digest
_MAX_CHECKED = 128  # blocks that are compared with their digests when a store is opened: a second


class TokenStore(IndexedDataset):
    """Token sequences in memory-mapped files: items are `{"input_ids", "labels"}`, read-only int32 views.

    `lengths` and `supervised` (tokens that enter the loss) have one number per sequence; `report` counts dropped and
    truncated records. Pickles as a path.

    Files that do not match their digests are a `DataError`; `verify=False` checks the offsets and sizes only.
    """

    # Reading is slicing shared pages: receiving a batch from another process would cost more.
    in_memory = True

    def __init__(self, path: str | Path, verify: bool = True) -> None:
        self.path = Path(path)
        manifest = _manifest(self.path)
        if manifest is None:
            raise DataError(expected("a folder with a complete token store", str(path), "Tokenise the data again."))
        if verify:
            _compare(self.path, manifest["digests"])
        self.report = EncodingReport(**manifest["report"])
        self.offsets = read_array(self.path / "offsets.npy")
        self.supervised = read_array(self.path / "supervised.npy")
        self._tokens = _mapped(self.path / "tokens.bin")
        # If every token is trained on, the labels are the tokens.
        self._labels = _mapped(self.path / "labels.bin") if "labels.bin" in manifest["sizes"] else self._tokens
        self._check_offsets()
        self.lengths = np.diff(self.offsets)

    def _check_offsets(self) -> None:
        """Every sequence is inside of the files, however they were made."""
        offsets, supervised = self.offsets, self.supervised
        fits = (
            offsets.dtype == np.int64
            and offsets.ndim == supervised.ndim == 1
            and supervised.dtype.kind == "i"
            and len(offsets) == len(supervised) + 1 > 1
            and offsets[0] == 0
            and bool((offsets[1:] > offsets[:-1]).all())
            and offsets[-1] == len(self._tokens) == len(self._labels)
        )
        if not fits:
            raise DataError(f"The token store {self.path} is damaged: its offsets do not fit its tokens.")

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        index = normalize_index(index, len(self))
        piece = slice(self.offsets[index], self.offsets[index + 1])
        return {"input_ids": self._tokens[piece], "labels": self._labels[piece]}

    def __reduce__(self) -> tuple[Any, ...]:
        return TokenStore, (str(self.path), False)  # it was verified when it was opened first

    def __repr__(self) -> str:
        return f"TokenStore({len(self):,} sequences, {int(self.offsets[-1]):,} tokens)"


class StoreView(IndexedDataset):
    """Base of the datasets that convert the sequences of a store."""

    in_memory = True  # reading is slicing

    def __init__(self, store: Any) -> None:
        self.store = store

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of each item."""
        return self.store.lengths

    def __len__(self) -> int:
        return len(self.store)


def lengths_of(dataset: Any) -> np.ndarray:
    """The number of tokens of every item: of a store, of a `Subset` of one, or of any data with `input_ids`.

    >>> lengths_of([{"input_ids": [1, 2, 3]}, {"input_ids": [4]}]).tolist()
    [3, 1]
    """
    base, chosen = unwrap_subsets(dataset)
    lengths = getattr(base, "lengths", None)
    if lengths is None:
        if len(dataset) and not (isinstance(dataset[0], Mapping) and "input_ids" in dataset[0]):
            raise DataError(expected("tokenised data (input_ids), whose lengths are known", type(base).__name__))
        return np.array([len(dataset[i]["input_ids"]) for i in range(len(dataset))], dtype=np.int64)
    return np.asarray(lengths) if chosen is None else np.asarray(lengths)[chosen]


def tokenize(
    records: Sequence[Any],
    encoder: Encoder,
    *,
    cache_dir: str | Path | None = None,
    workers: int | None = None,
    progress: bool = True,
    name: str = "data",
) -> TokenStore:
    """Tokenise records, or load them from `cache_dir` (by default in the user's cache folder).

    `records` is anything with a length and an index. It is identified by its own `fingerprint` (datasets of
    `trainformer.data.text` and of HF have one), else by reading it. `workers=None` uses one process per core if there
    is more than a second of work; 0 uses none. `name` is for the progress bar and messages.

    Data without anything to train on is an error that says why.
    """
    if workers is not None and (isinstance(workers, bool) or workers < 0):
        raise BadArgument(expected("workers to be None, 0 or more", workers))
    if len(records) == 0:
        raise DataError(expected(f"at least one record in {name}", "none"))
    root = user_cache() / "tokens" if cache_dir is None else Path(cache_dir)
    root.mkdir(parents=True, exist_ok=True)
    key = _digest(fingerprint(records), encoder.fingerprint(), str(_FORMAT))
    target = root / key
    store = _opened(target)
    if store is None:
        with _lock(root / f".{key}.lock", name) as locked:
            store = _opened(target, warn=True)
            if store is None:
                # Drafts of killed processes; with the lock, no other process is writing.
                for draft in root.glob(f".{key}-*.writing") if locked else ():
                    shutil.rmtree(draft, ignore_errors=True)
                chunks = _chunks(records, encoder, workers)
                _write(target, _with_progress_bar(chunks, len(records), name, progress), name)
                store = TokenStore(target, verify=False)
    level = logging.WARNING if store.report.dropped > _MANY_DROPPED * store.report.records else logging.INFO
    logger.log(level, "%s: %s", name, store.report)
    return store


# -- fingerprints --------------------------------------------------------------------------------------------


def fingerprint(records: Any) -> str:
    """A digest of the records: their own `fingerprint`, else of their contents (about 100 MB/s).

    >>> fingerprint([{"text": "a"}]) == fingerprint(({"text": "a"},)), fingerprint(["a", "b"]) == fingerprint(["ab"])
    (True, False)
    """
    if is_plain_subset(records):
        indices = np.asarray(records.indices, dtype="<i8").tobytes()
        return _digest("subset", fingerprint(records.dataset), hashlib.blake2b(indices).hexdigest())
    for attribute in ("fingerprint", "_fingerprint"):
        own = getattr(records, attribute, None)
        own = own() if callable(own) else own
        if isinstance(own, str):
            return _digest(type(records).__name__, own)
    digest = hashlib.blake2b(digest_size=16)
    for begin in range(0, len(records), _CHUNK):
        for record in _read(records, begin, min(begin + _CHUNK, len(records))):
            digest.update(json.dumps(record, sort_keys=True, default=_to_json).encode() + b"\n")
    return digest.hexdigest()


def _to_json(value: Any) -> Any:
    """Arrays, tensors and mappings as JSON values."""
    if hasattr(value, "tolist"):
        return value.tolist()
    return dict(value) if isinstance(value, Mapping) else repr(value)


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\0".join(parts).encode(), digest_size=16).hexdigest()


# -- files ---------------------------------------------------------------------------------------------------


def _opened(path: Path, warn: bool = False) -> TokenStore | None:
    """The store in a folder; None if there is none, or a damaged one."""
    try:
        return TokenStore(path)
    except DataError as error:
        if warn and path.exists():
            logger.warning("the cached tokens cannot be used, the data is tokenised again: %s", error)
        return None


def _manifest(path: Path) -> dict[str, Any] | None:
    """The manifest of a store, if it is intact, and its files exist and have the recorded sizes."""
    try:
        manifest = decode_json((path / _MANIFEST).read_bytes())
        whole = manifest.pop("digest") == _digest(json.dumps(manifest, sort_keys=True))
        if not whole or manifest["format"] != _FORMAT:
            return None
        # A forged manifest must not name files elsewhere, or lack one.
        files = {"offsets.npy", "supervised.npy", "tokens.bin"}
        known = [files, files | {"labels.bin"}]
        if manifest["sizes"].keys() != manifest["digests"].keys() or manifest["sizes"].keys() not in known:
            return None
        EncodingReport().add(EncodingReport(**manifest["report"]))
        whole = all((path / file).stat().st_size == size for file, size in manifest["sizes"].items())
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        return None
    return manifest if whole else None


def _digests(path: Path) -> list[str]:
    """A digest of every block of a file."""
    with path.open("rb") as file:
        return [hashlib.sha256(block).hexdigest() for block in iter(lambda: file.read(_BLOCK), b"")]


def _compare(folder: Path, digests: Mapping[str, Any]) -> None:
    """Compare files with the digests of their blocks: of all, or if there are very many, of a random sample."""
    blocks = [(name, number) for name in digests for number in range(len(digests[name]))]
    for name, number in sorted(random.SystemRandom().sample(blocks, min(len(blocks), _MAX_CHECKED))):
        with (folder / name).open("rb") as file:
            file.seek(number * _BLOCK)
            found = hashlib.sha256(file.read(_BLOCK)).hexdigest()
        if found != digests[name][number]:
            raise DataError(f"{folder / name} is damaged: its content does not match its digest.")


def _mapped(path: Path) -> np.ndarray:
    """A file of tokens, as a plain array over the memory map: slicing it is ten times as fast as slicing a memmap."""
    return np.asarray(np.memmap(path, dtype="<i4", mode="r"))


def _write(target: Path, chunks: Iterator[_Chunk], name: str) -> None:
    draft = target.with_name(f".{target.name}-{os.getpid()}.writing")
    shutil.rmtree(draft, ignore_errors=True)
    draft.mkdir()
    try:
        report = _fill(draft, chunks)
        if report.pieces == 0:
            raise DataError(f"Expected something to train on in {name}, received nothing: {report}.")
        sizes = {path.name: path.stat().st_size for path in sorted(draft.iterdir())}
        digests = {file: _digests(draft / file) for file in sizes}
        manifest = {"format": _FORMAT, "sizes": sizes, "digests": digests, "report": asdict(report)}
        manifest["digest"] = _digest(json.dumps(manifest, sort_keys=True))
        (draft / _MANIFEST).write_text(json.dumps(manifest))
        for path in (*draft.iterdir(), draft):
            _sync(path)
        if target.exists() and _opened(target) is None:
            shutil.rmtree(target)  # damaged: a file was changed, truncated or lost
        try:
            draft.rename(target)
        except OSError:
            if _opened(target) is None:  # otherwise another process was first, on a file system without locks
                raise
        _sync(target.parent)
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def _fill(draft: Path, chunks: Iterator[_Chunk]) -> EncodingReport:
    report = EncodingReport()
    lengths: list[np.ndarray] = []
    supervised: list[np.ndarray] = []
    with ExitStack() as stack:
        tokens = stack.enter_context((draft / "tokens.bin").open("wb"))
        labels: BinaryIO | None = None
        for chunk in chunks:
            if labels is None and chunk.labels is not None:
                tokens.flush()
                shutil.copyfile(draft / "tokens.bin", draft / "labels.bin")
                labels = stack.enter_context((draft / "labels.bin").open("ab"))
            tokens.write(chunk.tokens.data)
            if labels is not None:
                labels.write((chunk.tokens if chunk.labels is None else chunk.labels).data)
            lengths.append(chunk.lengths)
            supervised.append(chunk.supervised)
            report.add(chunk.report)
    np.save(draft / "offsets.npy", np.concatenate([[0], *lengths]).cumsum(dtype=np.int64))
    np.save(draft / "supervised.npy", np.concatenate(supervised))
    return report


def _sync(path: Path) -> None:
    if path.is_file() or os.name != "nt":
        sync(path)


@contextmanager
def _lock(path: Path, name: str) -> Iterator[bool]:
    """Hold a file lock, which the system releases if the process dies; yields False if locks are unavailable."""
    try:
        import fcntl
    except ImportError:
        yield False
        return
    with path.open("a") as file:
        locked = True
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            logger.info("%s: another process is tokenising the same data; waiting for it", name)
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:  # some network file systems
            locked = False
        yield locked


# -- encoding ------------------------------------------------------------------------------------------------


class _Chunk(NamedTuple):
    """Consecutive records, tokenised. Labels are None if they equal the tokens."""

    tokens: np.ndarray
    labels: np.ndarray | None
    lengths: np.ndarray
    supervised: np.ndarray
    report: EncodingReport


def _chunks(records: Sequence[Any], encoder: Encoder, workers: int | None) -> Iterator[_Chunk]:
    """All chunks, in order."""
    size = len(records)
    step = min(_CHUNK, -(-size // _CHUNKS))
    spans = iter([(begin, min(begin + step, size)) for begin in range(0, size, step)])
    if workers is None:
        deadline = time.monotonic() + _SERIAL_SECONDS
        for span in spans:
            yield _encode(records, encoder, span)
            if time.monotonic() > deadline:
                break
        cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
        workers = min(cores, _MAX_WORKERS) if cores > 1 else 0
    if workers == 0 or multiprocessing.current_process().daemon:  # daemonic processes may not have children
        for span in spans:
            yield _encode(records, encoder, span)
    else:
        yield from _in_processes(records, encoder, workers, list(spans))


def _in_processes(
    records: Sequence[Any], encoder: Encoder, workers: int, spans: list[tuple[int, int]]
) -> Iterator[_Chunk]:
    if not spans:
        return
    # A fork shares the records and the tokenizer for free; elsewhere both are pickled, once per process.
    context = multiprocessing.get_context("fork" if sys.platform == "linux" else "spawn")
    pool = ProcessPoolExecutor(
        min(workers, len(spans)),
        mp_context=context,
        initializer=_start_worker,
        initargs=(records, encoder, os.getpid()),
    )
    waiting: deque[Future[_Chunk]] = deque()
    try:
        for span in spans:
            waiting.append(pool.submit(_encode_in_worker, span))
            if len(waiting) > 4 * workers:  # keeps all workers busy, and memory small
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise DataError(
            "A tokenising process died, often for lack of memory. Pass fewer workers, or workers=0 to use none."
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


_encode_span: list[Callable[[tuple[int, int]], _Chunk]] = []  # set in a worker process


def _start_worker(records: Sequence[Any], encoder: Encoder, parent: int) -> None:
    # The thread pool of `tokenizers` does not survive a fork, and every core has a process already.
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Ctrl-C
    _encode_span.append(lambda span: _encode(records, encoder, span))
    threading.Thread(target=_exit_with_parent, args=(parent,), daemon=True).start()


def _exit_with_parent(parent: int) -> None:
    """Exit if the parent is killed: nothing else would end a worker that waits for work."""
    while os.getppid() == parent:
        time.sleep(_ORPHANED_SECONDS)
    os._exit(1)


def _encode_in_worker(span: tuple[int, int]) -> _Chunk:
    return _encode_span[0](span)


def _encode(records: Sequence[Any], encoder: Encoder, span: tuple[int, int]) -> _Chunk:
    report = EncodingReport()
    pieces: list[Encoded] = []
    where = getattr(records, "location", None)  # data from files have line numbers
    for of_record in encoder.encode_all(_read(records, *span), report, first=span[0], where=where):
        pieces += of_record
    tokens = np.concatenate([np.empty(0, np.int32), *(piece.input_ids for piece in pieces)]).astype("<i4")
    labels = np.concatenate([np.empty(0, np.int32), *(piece.labels for piece in pieces)]).astype("<i4")
    return _Chunk(
        tokens,
        None if np.array_equal(tokens, labels) else labels,
        np.array([len(piece.input_ids) for piece in pieces], dtype=np.int64),
        np.array([piece.supervised for piece in pieces], dtype=np.int32),
        report,
    )


def _read(records: Any, begin: int, end: int) -> list[Any]:
    """Consecutive records, with one call if possible: HF datasets are ten times as fast then."""
    if hasattr(records, "__getitems__"):
        return records.__getitems__(list(range(begin, end)))
    return [records[i] for i in range(begin, end)]


def _with_progress_bar(chunks: Iterator[_Chunk], size: int, name: str, wanted: bool) -> Iterator[_Chunk]:
    """The same chunks, with a progress bar on a terminal."""
    console = Console(stderr=True)
    if not wanted or not console.is_terminal:
        yield from chunks
        return
    columns = TextColumn("tokenising {task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn()
    # Without its refresh thread, whose locks a fork would copy in the locked state.
    bar = Progress(*columns, console=console, auto_refresh=False, transient=True)
    with bar:
        task = bar.add_task(name, total=size)
        refreshed = 0.0
        for chunk in chunks:
            bar.advance(task, chunk.report.records)
            if time.monotonic() - refreshed > 0.1:
                bar.refresh()
                refreshed = time.monotonic()
            yield chunk
