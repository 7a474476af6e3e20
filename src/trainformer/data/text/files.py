"""Random access to large text files: lines, paragraphs and chunks of characters, read one at a time.

A file is never loaded: the index takes eight bytes per piece, built in one pass with a buffer of 1 MiB. Pieces are read
with `pread` instead of a memory map, for two reasons: pages that were read do not count as memory of the process (a
10 GB file read once through a map shows as 10 GB in `top`), and a truncated file raises an error instead of a bus
error, which kills the process.
"""

from __future__ import annotations

import bz2
import gzip
import hashlib
import logging
import lzma
import os
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.data.dataset import IndexedDataset, normalize_index
from trainformer.utils.tree_files import read_array

logger = logging.getLogger("trainformer")

_BLOCK = 1 << 20  # larger blocks are not faster (1 GB/s from memory on one core), and cost memory
_CACHE_AFTER_SECONDS = 1.0
_VERSION = 2  # of the cached index files
_DIGEST_BYTES = 32
_MAX_SMALL, _MAX_RATIO = 1 << 30, 250  # text shrinks by a factor of 3 to 50; what shrinks by more could fill the disk
_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")  # UTF-16, and UTF-32, which starts the same way
_IS_SPACE = np.isin(np.arange(256), np.frombuffer(b" \t\n\r\x0b\x0c", np.uint8))
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_UNSUPPORTED = {".zst": "zstd -d", ".zstd": "zstd -d", ".lz4": "lz4 -d", ".zip": "unzip", ".7z": "7z x"}


def cache_dir() -> Path:
    """The cache folder: `$TRAINFORMER_CACHE`, else `trainformer` in the user's cache folder."""
    if own := os.environ.get("TRAINFORMER_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "trainformer"


def content_suffix(path: str | Path) -> str:
    """The extension of a file without that of a compression.

    >>> content_suffix("train.JSONL.gz"), content_suffix("notes.txt"), content_suffix("folder")
    ('.jsonl', '.txt', '')
    """
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    while suffixes and (suffixes[-1] in _OPENERS or suffixes[-1] in _UNSUPPORTED):
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


class TextFile:
    """A UTF-8 file, read by byte ranges; each process opens it when first needed.

    A file compressed with gzip, bzip2 or xz is decompressed once, into the cache folder: compressed streams have no
    random access. Other compressions are an error.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = path = Path(path).expanduser()
        if not path.is_file():
            what = "a folder" if path.is_dir() else "which does not exist"
            names = [entry.name for entry in path.parent.iterdir() if entry.is_file()] if path.parent.is_dir() else []
            close = did_you_mean(path.name, names) if not path.is_dir() else ""
            raise DataError(f"Expected a file, received '{path}', {what}. {close}".strip())
        status = self.path.stat()
        self.fingerprint = digest(str(self.path.resolve()), status.st_size, status.st_mtime_ns)
        self._plain = _decompressed(self.path, self.fingerprint)
        plain = self._plain.stat()
        self.size, self._changed_at = plain.st_size, plain.st_mtime_ns
        self._descriptor: int | None = None
        self.begin = self._after_bom()

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` up to `end`."""
        if self._descriptor is None and _OpenFiles.count < _OpenFiles.limit:
            self._descriptor = self._open()
            _OpenFiles.count += 1
        if self._descriptor is not None:
            data = _read(self._descriptor, start, end)
        else:
            descriptor = self._open()
            try:
                data = _read(descriptor, start, end)
            finally:
                os.close(descriptor)
        if len(data) < end - start:
            raise self._changed_error()
        return data

    def decode(self, data: bytes, start: int) -> str:
        """Decode bytes that start at `start`; an error names the line of the first invalid byte."""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}, line {self.line_at(start + error.start)}: Expected UTF-8 text, received the byte "
                f"0x{data[error.start]:02x} ({error.reason}). Convert the file, for instance with: "
                "iconv -f latin1 -t utf-8."
            ) from error

    def line_at(self, offset: int) -> int:
        """The line number, from 1, of an offset. Reads everything before it: for error messages only."""
        blocks = range(0, offset, _BLOCK)
        return 1 + sum(self.read(at, min(at + _BLOCK, offset)).count(b"\n") for at in blocks)

    def open_plain(self) -> Any:
        """The decompressed file as a byte stream, positioned after a byte order mark."""
        stream = open(self._plain, "rb", buffering=0)  # noqa: SIM115 - the caller closes it
        stream.seek(self.begin)
        return stream

    def _open(self) -> int:
        descriptor = os.open(self._plain, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        status = os.fstat(descriptor)
        if (status.st_size, status.st_mtime_ns) != (self.size, self._changed_at):
            os.close(descriptor)
            raise self._changed_error()
        return descriptor

    def _after_bom(self) -> int:
        with open(self._plain, "rb") as file:
            head = file.read(3)
        if head[:2] in _WIDE_BOMS:
            raise DataError(
                f"Expected UTF-8 text, received '{self.path}', which starts like UTF-16. Convert it, for instance "
                "with: iconv -f utf-16 -t utf-8."
            )
        return len(_BOM) if head == _BOM else 0

    def _changed_error(self) -> DataError:
        return DataError(
            f"Expected '{self.path}' to stay unchanged while it is open, received a changed file. Open it again; "
            "write new data under a new name."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None}

    def __del__(self) -> None:
        descriptor = self.__dict__.get("_descriptor")
        if descriptor is not None:
            os.close(descriptor)
            _OpenFiles.count -= 1


class _OpenFiles:
    """Counts the files this process keeps open (1,024 is a common limit); more are opened per read, in 10 us."""

    count = 0
    limit = 256 if hasattr(os, "pread") else 0  # without pread (Windows) threads share the file position


def _read(descriptor: int, start: int, end: int) -> bytes:
    """Bytes of an open file, fewer only at its end. Linux reads at most 2 GiB at once."""
    parts = []
    while start < end:
        if hasattr(os, "pread"):
            part = os.pread(descriptor, end - start, start)
        else:
            os.lseek(descriptor, start, os.SEEK_SET)
            part = os.read(descriptor, end - start)
        if not part:
            break
        parts.append(part)
        start += len(part)
    return parts[0] if len(parts) == 1 else b"".join(parts)


class Spans(IndexedDataset):
    """Consecutive pieces of a file: piece `i` is the bytes from ``starts[i]`` to ``starts[i + 1]``.

    As a dataset its items are documents ``{"text"}``.
    """

    def __init__(self, file: TextFile, starts: np.ndarray) -> None:
        self.file = file
        self.starts = starts
        self.fingerprint = digest(file.fingerprint, type(self).__name__)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> dict[str, str]:
        return {"text": self.text(normalize_index(index, len(self))).replace("\r\n", "\n").rstrip()}

    def text(self, index: int) -> str:
        start, end = int(self.starts[index]), int(self.starts[index + 1])
        return self.file.decode(self.file.read(start, end), start)

    def location(self, index: int) -> str:
        """File and line of a piece, for error messages."""
        return f"{self.file.path}, line {self.file.line_at(int(self.starts[index]))}"


class LineIndex(Spans):
    r"""The non-blank lines of a file; blank lines count in line numbers.

    Only ``\n`` and ``\r\n`` end a line: other Unicode separators may occur inside a JSON string. Indexing reads the
    file once, at about 1 GB/s. An index that took more than a second is cached, and valid as long as path, size and
    modification time are the same; worker processes receive its path instead of its content.

    >>> import pathlib
    >>> path = pathlib.Path("three.txt")
    >>> _ = path.write_text("one\n\ntwo\r\nthree")
    >>> lines = LineIndex(path)
    >>> [lines.text(i) for i in range(len(lines))], lines.number(2)
    (['one', 'two', 'three'], 4)
    """

    def __init__(self, path: str | Path | TextFile) -> None:
        file = path if isinstance(path, TextFile) else TextFile(path)
        name = f"{digest(file.path.resolve())}-{digest(file.fingerprint, _VERSION)}.npy"
        cached = cache_dir() / "lines" / name
        found, is_cached = _load_index(cached, file), True
        if found is None:
            started = time.perf_counter()
            found = _index_lines(file)
            slow = time.perf_counter() - started > _CACHE_AFTER_SECONDS
            is_cached = slow and _save_index(cached, *found)
        self._cached = cached if is_cached else None
        starts, self._blanks = found
        super().__init__(file, starts)

    def text(self, index: int) -> str:
        """A line without its line break."""
        start = int(self.starts[index])
        # The range includes blank lines that follow: the line itself ends at the first line break.
        line = self.file.read(start, int(self.starts[index + 1])).partition(b"\n")[0]
        return self.file.decode(line.removesuffix(b"\r"), start)

    def number(self, index: int) -> int:
        """The line number in the file, from 1, including blank lines."""
        return index + 1 + int(np.searchsorted(self._blanks, index, side="right"))

    def location(self, index: int) -> str:
        return f"{self.file.path}, line {self.number(index)}"

    def paragraphs(self) -> Spans:
        """The paragraphs: lines between blank lines."""
        begins = np.unique(np.concatenate(([0], self._blanks)))
        begins = begins[begins < len(self)]
        return Spans(self.file, np.append(self.starts[begins], self.starts[-1]))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__
        return state if self._cached is None else {**state, "starts": None, "_blanks": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.starts is None:
            assert self._cached is not None
            self.starts, self._blanks = _load_index(self._cached, self.file) or _index_lines(self.file)


def character_spans(file: TextFile, length: int) -> Spans:
    """Chunks of `length` characters (the last may be shorter); no character is split."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise BadArgument(expected("chunk_size to be a positive number of characters", length))
    starts: list[np.ndarray] = []
    offset, seen = file.begin, 0
    with file.open_plain() as stream:
        while block := stream.read(_BLOCK):
            data = np.frombuffer(block, np.uint8)
            # Bytes of the form 10xxxxxx continue a character; all others start one.
            begins = None if block.isascii() else np.flatnonzero((data & 0xC0) != 0x80)
            count = len(block) if begins is None else len(begins)
            wanted = np.arange(-seen % length, count, length, dtype=np.int64)
            starts.append(offset + (wanted if begins is None else begins[wanted]))
            offset, seen = offset + len(block), seen + count
    return Spans(file, np.concatenate([*starts, [file.size]]).astype(np.int64))


# -- indexing ----------------------------------------------------------------------------------------------


def _index_lines(file: TextFile) -> tuple[np.ndarray, np.ndarray]:
    """Offsets of the non-blank lines and of the end of the file; the number of such lines before each blank line."""
    starts: list[np.ndarray] = []
    blanks: list[np.ndarray] = []
    buffer, carried, offset, seen = bytearray(_BLOCK), 0, file.begin, 0
    with file.open_plain() as stream:
        while True:
            got = stream.readinto(memoryview(buffer)[carried:])
            filled = carried + got
            view = np.frombuffer(buffer, np.uint8)[:filled]
            ends = np.flatnonzero(view == ord("\n"))
            if not got and carried:
                ends = np.array([carried])  # the last line, without a line break
            if len(ends):
                begins = np.concatenate(([0], ends[:-1] + 1))
                blank = _is_blank(view, begins, ends)
                starts.append(offset + begins[~blank])
                blanks.append(seen + np.cumsum(~blank)[blank])
                seen += len(starts[-1])
            if not got:
                break
            done = int(ends[-1]) + 1 if len(ends) else 0
            carried, offset = filled - done, offset + done
            rest = buffer[done:filled]
            if carried > len(buffer) // 2:  # a line longer than a block
                buffer = bytearray(2 * len(buffer))
            buffer[:carried] = rest
    none = np.empty(0, np.int64)
    return np.concatenate([none, *starts, [file.size]]).astype(np.int64), np.concatenate([none, *blanks])


def _is_blank(data: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> np.ndarray:
    """Which lines are blank. The first and last byte decide almost always, so few lines are inspected."""
    lengths = ends - begins
    blank = _IS_SPACE[data[begins]] & _IS_SPACE[data[np.maximum(ends - 1, begins)]]  # of an empty line, its line break
    for line in np.flatnonzero(blank & (lengths > 2)):
        blank[line] = not data[begins[line] : ends[line]].tobytes().strip()
    return blank


# -- the cache ---------------------------------------------------------------------------------------------


def digest(*parts: object) -> str:
    """A short digest of the parts.

    >>> digest("a", 1) == digest("a", 1), digest("a", 1) == digest("a", 2), len(digest())
    (True, False, 24)
    """
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


def _load_index(path: Path, file: TextFile) -> tuple[np.ndarray, np.ndarray] | None:
    """A memory-mapped index, so that processes share its memory. None if there is none, or not one of this file.

    The digest at its end is compared (1.8 GB/s, of 8 bytes per line), and offsets must lie in the file.
    """
    if not path.exists():
        return None
    try:
        # A plain array over the same memory: indexing np.memmap takes 1 us per number.
        table = np.asarray(read_array(path, mmap_mode="r"))
        with path.open("rb") as stream:
            stream.seek(-_DIGEST_BYTES, os.SEEK_END)
            stated = stream.read()
        if table.dtype != np.int64 or table.ndim != 1 or hashlib.sha256(table.data).digest() != stated:
            raise DataError(f"{path} is damaged: its content does not match its digest.")
        blanks, starts = table[1 : 1 + int(table[0])], table[1 + int(table[0]) :]
        ordered = all(bool((part[1:] >= part[:-1]).all()) for part in (blanks, starts))
        if not 0 <= int(table[0]) < len(table) - 1 or not ordered or starts[0] < file.begin or starts[-1] != file.size:
            raise DataError(f"{path} is damaged: it is not an index of {file.path}.")
    except (DataError, OSError) as error:
        logger.warning("the cached line index cannot be used, the file is read again: %s", error)
        return None
    return starts, blanks


def _save_index(path: Path, starts: np.ndarray, blanks: np.ndarray) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _atomic_write(path) as file:
            table = np.concatenate(([len(blanks)], blanks, starts)).astype(np.int64)
            np.save(file, table)
            file.write(hashlib.sha256(table.data).digest())
    except OSError as error:  # a full disk or a read-only home must not stop the run
        logger.info("cannot cache the line index in '%s': %s", path.parent, error)
        return False
    return True


def _decompressed(path: Path, fingerprint: str) -> Path:
    suffix = path.suffix.lower()
    if suffix in _UNSUPPORTED:
        raise DataError(
            expected(f"a plain file or one of {', '.join(_OPENERS)}", str(path), f"Unpack it: {_UNSUPPORTED[suffix]}.")
        )
    if suffix not in _OPENERS:
        return path
    plain = cache_dir() / "plain" / f"{digest(path.resolve())}-{fingerprint}-{path.stem}"
    if plain.exists():
        return plain
    logger.info("decompressing '%s' once, to '%s'", path, plain)
    plain.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _atomic_write(plain) as target, _OPENERS[suffix](path, "rb") as source:
            written, most = 0, max(_MAX_SMALL, _MAX_RATIO * path.stat().st_size)
            while block := source.read(1 << 22):
                target.write(block)
                written += len(block)
                if written > most:
                    do = "Decompress it yourself if it is meant to be so large."
                    raise DataError(expected(f"'{path}' to hold at most {_MAX_RATIO} times its size", "more", do))
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise DataError(f"Expected a file that can be decompressed, received '{path}': {error}.") from error
    return plain


@contextmanager
def _atomic_write(path: Path) -> Iterator[Any]:
    """Write to a temporary file and rename it at the end, so that other processes see all of it or nothing.

    Cache entries of earlier versions of the same file, whose names start with the same digest, are removed.
    """
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name[:24], suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())  # or a power cut could leave the name without the content
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise
    for other in path.parent.glob(f"{path.name.partition('-')[0]}-*"):
        if other.name != path.name and not other.name.endswith(".tmp"):
            other.unlink(missing_ok=True)
