"""Teacher logits on disk: for each supervised token the `k` most probable tokens and their log probabilities.

A folder has `logits.json`, which says how they were made, and parts, files that are written to a temporary name, synced
and renamed. The name of a part is a digest of its content. A sequence is found by a digest of its tokens and of which
of them are supervised. So the order of the data, splits, packing and shuffling do not matter; whatever was killed, all
parts are complete; and sequences that are present are not computed again.
"""

from __future__ import annotations

import hashlib
import json
import math
import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save as save_arrays

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.text.encode import IGNORE_INDEX
from trainformer.utils.files import decode_json, write_atomically
from trainformer.utils.processes import is_alive

_FORMAT = 1
_INFO = "logits.json"
_PART = "part-*.safetensors"
_PART_BYTES = 1 << 26  # what a killed process loses at most
_MAX_CHECKED = 1 << 31  # bytes that are compared with their digests when a store is opened: some seconds
STORED_DTYPES = {"fp16": "<f2", "bf16": "<u2", "fp32": "<f4"}  # NumPy has no bf16: its bits


@dataclass(frozen=True)
class LogitsInfo:
    """How the logits were made. All of it must match: what is added later, and what trains on them."""

    teacher: str  # digest of its weights
    tokenizer: str  # digest of its vocabulary
    vocabulary: int  # tokens that the probabilities are normalised over
    k: int
    temperature: float
    dtype: str

    def __post_init__(self) -> None:
        if self.dtype not in STORED_DTYPES:
            raise BadArgument(expected(f"dtype to be one of {', '.join(STORED_DTYPES)}", self.dtype))
        if not 1 <= self.k <= self.vocabulary:
            raise BadArgument(expected(f"k from 1 to {self.vocabulary}, the vocabulary of the teacher", self.k))

    @property
    def id_dtype(self) -> str:
        """dtype of token ids: two bytes if they fit."""
        return "<u2" if self.vocabulary <= 1 << 16 else "<i4"

    @property
    def bytes_per_token(self) -> int:
        """
        >>> LogitsInfo("", "", 50_000, 64, 1.0, "fp16").bytes_per_token
        256
        """
        return self.k * (np.dtype(self.id_dtype).itemsize + np.dtype(STORED_DTYPES[self.dtype]).itemsize)


class TopTokens(NamedTuple):
    """Of the supervised tokens of a sequence: ids (n, k), the most probable first, and log probabilities."""

    ids: np.ndarray
    log_probs: np.ndarray


class _Part(NamedTuple):
    path: Path
    keys: np.ndarray  # (sequences, 2), uint64
    offsets: np.ndarray


class LogitsStore:
    """Logits of a teacher in a folder, found by sequence. Pickles as a path."""

    def __init__(self, folder: str | Path, verify: bool = True) -> None:
        self.folder = Path(folder)
        self.info, self.settings = _read_info(self.folder)
        self._parts = [_open_part(path, self.info) for path in sorted(self.folder.glob(_PART))]
        if verify:
            verify_parts([part.path for part in self._parts])
        # Sorted by the first half of the key.
        sizes = [len(part.keys) for part in self._parts]
        self._keys = np.concatenate([np.empty((0, 2), np.uint64), *(part.keys for part in self._parts)])
        self._part_of = np.repeat(np.arange(len(sizes)), np.asarray(sizes, dtype=np.int64))
        self._row_of = np.concatenate([np.empty(0, np.int64), *map(np.arange, sizes)])
        self._order = np.argsort(self._keys[:, 0], kind="stable")
        self._first = self._keys[self._order, 0]

    @cached_property
    def _files(self) -> dict[int, Any]:
        return {}  # opened when read, in each process

    def __reduce__(self) -> tuple[Any, ...]:
        return LogitsStore, (str(self.folder), False)  # it was verified when it was opened first

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def tokens(self) -> int:
        """The number of supervised tokens."""
        return sum(int(part.offsets[-1]) for part in self._parts)

    def __repr__(self) -> str:
        return f"LogitsStore({len(self):,} sequences, {self.tokens:,} tokens, k={self.info.k})"

    def __contains__(self, key: Any) -> bool:
        return self._place(key) is not None

    def _place(self, key: np.ndarray) -> int | None:
        found = int(np.searchsorted(self._first, key[0]))
        while found < len(self._first) and self._first[found] == key[0]:
            place = int(self._order[found])
            if self._keys[place, 1] == key[1]:
                return place
            found += 1
        return None

    def find(self, input_ids: Any, labels: Any) -> TopTokens | None:
        """What is stored for a sequence; None if it is not in the store."""
        place = self._place(sequence_key(input_ids, labels))
        if place is None:
            return None
        number = int(self._part_of[place])
        part, row = self._parts[number], int(self._row_of[place])
        if number not in self._files:
            self._files[number] = safe_open(part.path, framework="np")
        rows = slice(int(part.offsets[row]), int(part.offsets[row + 1]))
        ids, values = (self._files[number].get_slice(name)[rows] for name in ("ids", "log_probs"))
        return TopTokens(ids.astype(np.int64), _to_float(values, self.info.dtype))

    def rows(self, examples: Sequence[Mapping[str, Any]], length: int, encoding: Mapping[str, Any]) -> TopTokens:
        """The stored tokens of each position that predicts a supervised one: (examples, `length`, k).

        Examples may be packed. `encoding` is how they were tokenised, for the error if one is not stored.
        """
        k = self.info.k
        ids = np.zeros((len(examples), length, k), dtype=np.int64)
        values = np.full(ids.shape, -math.log(k), dtype=np.float32)
        for row, example in enumerate(examples):
            ends = np.cumsum(example.get("lengths", [len(example["input_ids"])]))
            for begin, end in zip([0, *ends[:-1]], ends, strict=True):
                piece = {name: np.asarray(example[name])[begin:end] for name in ("input_ids", "labels")}
                found = self.find(**piece)
                if found is None:
                    raise DataError(self._missing("a sequence", encoding))
                places = begin + np.flatnonzero(piece["labels"][1:] != IGNORE_INDEX)
                ids[row, places], values[row, places] = found
        return TopTokens(ids, values)

    def check_sequences(self, tokens: Any, encoding: Mapping[str, Any], name: str) -> None:
        """Raise if sequences of a dataset, called `name`, are not stored."""
        sequences = getattr(tokens, "store", tokens)  # below the packing
        items = map(sequences.__getitem__, range(len(sequences)))
        missing = sum(sequence_key(item["input_ids"], item["labels"]) not in self for item in items)
        if missing:
            raise DataError(self._missing(f"{missing:,} of {len(sequences):,} sequences of the {name}", encoding))

    def _missing(self, what: str, encoding: Mapping[str, Any]) -> str:
        stored = self.settings
        differ = [f"{name}={stored[name]!r}" for name in encoding if name in stored and stored[name] != encoding[name]]
        why = f"They were stored with {', '.join(differ)}. " if differ else ""
        do = f"Add them: trainformer teacher-logits TEACHER DATA --out {self.folder}, with the settings of the task."
        return expected(f"teacher logits of all sequences in {self.folder}", f"none for {what}", f"{why}{do}")


class LogitsWriter:
    """Adds sequences to a folder. Use it as a context manager; a part is written whenever it is large enough."""

    def __init__(self, folder: str | Path, info: LogitsInfo, settings: Mapping[str, Any]) -> None:
        self.folder, self.info = Path(folder), info
        if (self.folder / _INFO).exists():
            _check_same(self.folder, info)
        else:
            if self.folder.is_dir() and any(self.folder.iterdir()):
                raise BadArgument(expected("an empty folder, or one with teacher logits", str(folder)))
            content = {"format": _FORMAT, **asdict(info), "settings": dict(settings)}
            write_atomically(self.folder / _INFO, json.dumps(content, indent=1).encode())
            _check_same(self.folder, info)  # another process may have been first
        _remove_drafts(self.folder)
        self._known = {key.tobytes() for key in _intact_keys(self.folder, info)}
        self._clear()

    def _clear(self) -> None:
        self._keys: list[np.ndarray] = []
        self._rows: list[TopTokens] = []

    def __contains__(self, key: np.ndarray) -> bool:
        return key.tobytes() in self._known

    def __len__(self) -> int:
        return len(self._known)

    def add(self, key: np.ndarray, ids: np.ndarray, log_probs: np.ndarray) -> None:
        """Add a sequence; `log_probs` are float32."""
        info = self.info
        self._rows.append(TopTokens(ids.astype(info.id_dtype), _from_float(log_probs, info.dtype)))
        self._keys.append(key)
        self._known.add(key.tobytes())
        if sum(len(row.ids) for row in self._rows) * info.bytes_per_token >= _PART_BYTES:
            self.flush()

    def flush(self) -> None:
        """Write what was added as a part."""
        if not self._keys:
            return
        content = save_arrays(
            {
                "keys": np.stack(self._keys),
                "offsets": np.cumsum([0, *(len(row.ids) for row in self._rows)]).astype("<i8"),
                "ids": np.concatenate([row.ids for row in self._rows]),
                "log_probs": np.concatenate([row.log_probs for row in self._rows]),
            }
        )
        write_atomically(self.folder / f"part-{_digest(content)}.safetensors", content)
        self._clear()

    @contextmanager
    def writing(self) -> Iterator[LogitsWriter]:
        """Write the rest at the end, also if something is raised meanwhile."""
        try:
            yield self
        finally:
            self.flush()


def is_logits_folder(path: Any) -> bool:
    """Whether a path is a folder of teacher logits."""
    return isinstance(path, str | Path) and (Path(path).expanduser() / _INFO).is_file()


def open_logits(folder: str | Path, temperature: float) -> LogitsStore:
    """The logits in a folder, for training at a temperature, which must be that of the stored ones."""
    found = LogitsStore(Path(folder).expanduser())
    if not len(found):
        do = "Run `trainformer teacher-logits` first, or again."
        raise DataError(expected(f"teacher logits in {found.folder}", "none", do))
    if found.info.temperature != temperature:
        stored = found.info.temperature
        do = f"Pass temperature={stored:g}, or store the logits again with the other one."
        raise BadArgument(expected(f"temperature={stored:g}, as stored", temperature, do))
    return found


def sequence_key(input_ids: Any, labels: Any) -> np.ndarray:
    """A digest (two uint64) of the tokens of a sequence and of which of them are supervised.

    The first token never is, whatever its label.

    >>> a, b = sequence_key([1, 2, 3], [1, -100, 3]), sequence_key([1, 2, 3], [-100, -100, 3])
    >>> bool((a == b).all()), bool((a == sequence_key([1, 2, 3], [1, 2, 3])).all())
    (True, False)
    """
    supervised = np.packbits(np.asarray(labels)[1:] != IGNORE_INDEX)
    digest = hashlib.blake2b(np.asarray(input_ids).astype("<i4").tobytes(), digest_size=16)
    digest.update(b"\0" + supervised.tobytes())
    return np.frombuffer(digest.digest(), dtype="<u8")


def verify_parts(paths: list[Path]) -> None:
    """Compare files with the digests in their names: all up to 2 GiB, a random sample beyond that."""
    random.SystemRandom().shuffle(paths)
    checked = 0
    for path in paths:
        if checked >= _MAX_CHECKED:
            return
        content = path.read_bytes()
        checked += len(content)
        if path.name != f"part-{_digest(content)}.safetensors":
            raise DataError(
                f"{path} is damaged: its content does not match its digest. Run `trainformer teacher-logits` again: it "
                "computes only what is missing."
            )


def _intact_keys(folder: Path, info: LogitsInfo) -> Iterator[np.ndarray]:
    """The keys of all sequences; removes damaged parts, whose sequences are then computed again."""
    for path in sorted(folder.glob(_PART)):
        try:
            verify_parts([path])
            yield from _open_part(path, info).keys
        except DataError:
            path.unlink()


def _open_part(path: Path, info: LogitsInfo) -> _Part:
    try:
        with safe_open(path, framework="np") as file:
            keys, offsets = file.get_tensor("keys"), file.get_tensor("offsets")
            shapes = [tuple(file.get_slice(name).get_shape()) for name in ("ids", "log_probs")]
        fits = keys.dtype == np.uint64 and offsets.dtype == np.int64 and keys.shape == (len(offsets) - 1, 2)
        fits = fits and offsets[0] == 0 and bool((np.diff(offsets) > 0).all())
        fits = fits and shapes == [(int(offsets[-1]), info.k)] * 2
    except Exception as error:  # of safetensors, of the file system, or a missing tensor
        raise DataError(f"{path} is damaged: {error}.") from error
    if not fits:
        raise DataError(f"{path} is damaged: its offsets do not fit its contents.")
    return _Part(path, keys, offsets)


def _read_info(folder: Path) -> tuple[LogitsInfo, dict[str, Any]]:
    try:
        content = decode_json((folder / _INFO).read_bytes())
        if content.pop("format") != _FORMAT:
            raise DataError(f"{folder} was written in another format. Run `trainformer teacher-logits` again.")
        settings = content.pop("settings")
        return LogitsInfo(**content), dict(settings)
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(
            expected(f"a folder of teacher logits at {folder}", f"{type(error).__name__}: {error}")
        ) from error


def _check_same(folder: Path, info: LogitsInfo) -> None:
    """Refuse to add logits of another teacher, or made in another way."""
    there, _ = _read_info(folder)
    for name, value in asdict(info).items():
        if (found := getattr(there, name)) != value:
            what = "the same teacher" if name == "teacher" else "the same tokenizer" if name == "tokenizer" else None
            detail = what or f"{name}={found!r}"
            raise BadArgument(
                f"Expected {detail} as that of the logits in {folder}, received "
                f"{'another one' if what else repr(value)}. Pass the same, or another folder."
            )


def _remove_drafts(folder: Path) -> None:
    """Remove temporary files of processes that are gone; their names have the process ID."""
    for path in folder.glob(".*.tmp"):
        process = path.name.split(".")[-2]
        if process.isdecimal() and not is_alive(int(process)):
            path.unlink(missing_ok=True)


def _digest(content: bytes) -> str:
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def _from_float(values: np.ndarray, dtype: str) -> np.ndarray:
    """float32 in the dtype of the store.

    >>> _to_float(_from_float(np.array([-1.5, -3.14159], "<f4"), "bf16"), "bf16").tolist()
    [-1.5, -3.140625]
    """
    values = np.ascontiguousarray(values, dtype="<f4")
    if dtype != "bf16":
        return values.astype(STORED_DTYPES[dtype])
    bits = values.view("<u4")
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2")  # to nearest, ties to even


def _to_float(values: np.ndarray, dtype: str) -> np.ndarray:
    return (values.astype("<u4") << 16).view("<f4") if dtype == "bf16" else values.astype("<f4")
