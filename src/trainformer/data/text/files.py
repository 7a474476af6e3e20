"""Large text files, read a piece at a time.

Owns where the pieces of a file begin (lines, paragraphs, blocks of characters), reading one of them, what is kept in
the cache folder for that, and the errors for files that are missing, changed or not UTF-8. What a line means is left to
`records`.

A file is never loaded: an index is eight bytes per piece, made in one pass through a buffer of 1 MiB. Pieces are read
with `pread` and not through a memory map, for two reasons: what was read does not count as memory of the process
(a 10 GB file read once through a map shows as 10 GB in `top`), and a file cut short by another program ends in an
error and not in a bus error, which kills.
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

logger = logging.getLogger("trainformer")

_BLOCK = 1 << 20  # larger blocks are not faster (1 GB/s from memory on one core), and cost memory
_CACHE_AFTER_SECONDS = 1.0
_VERSION = 1  # of the index files in the cache
_BOM = b"\xef\xbb\xbf"
_WIDE_BOMS = (b"\xff\xfe", b"\xfe\xff")  # UTF-16, and UTF-32 that begins like it
_IS_SPACE = np.isin(np.arange(256), np.frombuffer(b" \t\n\r\x0b\x0c", np.uint8))
_OPENERS: dict[str, Callable[..., Any]] = {".gz": gzip.open, ".bz2": bz2.open, ".xz": lzma.open}
_NOT_OPENED = {".zst": "zstd -d", ".zstd": "zstd -d", ".lz4": "lz4 -d", ".zip": "unzip", ".7z": "7z x"}


def cache_dir() -> Path:
    """The folder for what can be made again: `$TRAINFORMER_CACHE`, else `trainformer` in the user's cache folder."""
    if own := os.environ.get("TRAINFORMER_CACHE"):
        return Path(own).expanduser()
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "trainformer"


def content_suffix(path: str | Path) -> str:
    """The ending that says what is in a file, that of a compression left aside.

    >>> content_suffix("train.JSONL.gz"), content_suffix("notes.txt"), content_suffix("folder")
    ('.jsonl', '.txt', '')
    """
    suffixes = [suffix.lower() for suffix in Path(path).suffixes]
    while suffixes and (suffixes[-1] in _OPENERS or suffixes[-1] in _NOT_OPENED):
        suffixes.pop()
    return suffixes[-1] if suffixes else ""


class TextFile:
    """A UTF-8 file of which byte ranges are read; opened when first needed, in every process anew.

    A file compressed with gzip, bzip2 or xz is decompressed once, into the cache folder, which needs the disk space:
    a place in the middle of a compressed stream cannot be reached without reading all that is before it. Other
    compressions are refused.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = existing_file(path)
        status = self.path.stat()
        self.fingerprint = digest(str(self.path.resolve()), status.st_size, status.st_mtime_ns)
        self._plain = _decompressed(self.path, self.fingerprint)
        plain = self._plain.stat()
        self.size, self._changed_at = plain.st_size, plain.st_mtime_ns
        self._descriptor: int | None = None
        self.begin = self._after_signature()

    def read(self, start: int, end: int) -> bytes:
        """The bytes from `start` up to `end`."""
        if self._descriptor is None and _Kept.may_be_one_more():
            self._descriptor = self._open()
            _Kept.count += 1
        if self._descriptor is not None:
            data = _read(self._descriptor, start, end)
        else:
            descriptor = self._open()
            try:
                data = _read(descriptor, start, end)
            finally:
                os.close(descriptor)
        if len(data) < end - start:
            raise self._was_changed()
        return data

    def decode(self, data: bytes, start: int) -> str:
        """The text of bytes that begin at `start`, or an error that names the line of the first wrong byte."""
        try:
            return data.decode("utf-8")
        except UnicodeDecodeError as error:
            raise DataError(
                f"{self.path}, line {self.line_at(start + error.start)}: Expected UTF-8 text, received the byte "
                f"0x{data[error.start]:02x} ({error.reason}). Convert the file, for instance with: "
                "iconv -f latin1 -t utf-8."
            ) from error

    def line_at(self, offset: int) -> int:
        """The number of the line, from 1, that an offset lies in. Reads all before it: for messages only."""
        blocks = range(0, offset, _BLOCK)
        return 1 + sum(self.read(at, min(at + _BLOCK, offset)).count(b"\n") for at in blocks)

    def open_plain(self) -> Any:
        """The file, decompressed, as a stream of bytes at the beginning of its text."""
        stream = open(self._plain, "rb", buffering=0)  # noqa: SIM115 - the caller closes it
        stream.seek(self.begin)
        return stream

    def _open(self) -> int:
        descriptor = os.open(self._plain, os.O_RDONLY | getattr(os, "O_BINARY", 0))
        status = os.fstat(descriptor)
        if (status.st_size, status.st_mtime_ns) != (self.size, self._changed_at):
            os.close(descriptor)
            raise self._was_changed()
        return descriptor

    def _after_signature(self) -> int:
        """Where the text begins: after the byte order mark, if there is one."""
        with open(self._plain, "rb") as file:
            head = file.read(3)
        if head[:2] in _WIDE_BOMS:
            raise DataError(
                f"Expected UTF-8 text, received '{self.path}', which begins like UTF-16. Convert it, for instance "
                "with: iconv -f utf-16 -t utf-8."
            )
        return len(_BOM) if head == _BOM else 0

    def _was_changed(self) -> DataError:
        return DataError(
            f"Expected '{self.path}' to stay as it was when it was opened, received a changed file. Open it again; "
            "write new data under a new name."
        )

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_descriptor": None}

    def __del__(self) -> None:
        descriptor = self.__dict__.get("_descriptor")
        if descriptor is not None:
            os.close(descriptor)
            _Kept.count -= 1


class _Kept:
    """How many files this process keeps open, of the 1,024 that are usual. Others are opened for every read: 10 us."""

    count = 0
    most = 256 if hasattr(os, "pread") else 0  # without it (Windows) a place in the file is shared by all threads

    @classmethod
    def may_be_one_more(cls) -> bool:
        return cls.count < cls.most


def _read(descriptor: int, start: int, end: int) -> bytes:
    """Bytes of an open file, fewer only where it ends. Linux reads at most 2 GiB at once."""
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


class Spans:
    """Consecutive pieces of a file: piece `i` is the bytes from ``starts[i]`` up to ``starts[i + 1]``."""

    def __init__(self, file: TextFile, starts: np.ndarray) -> None:
        self.file = file
        self.starts = starts

    def __len__(self) -> int:
        return len(self.starts) - 1

    def text(self, index: int) -> str:
        """The text of a piece, exactly."""
        start, end = int(self.starts[index]), int(self.starts[index + 1])
        return self.file.decode(self.file.read(start, end), start)

    def where(self, index: int) -> str:
        """The place of a piece, for messages: file and line."""
        return f"{self.file.path}, line {self.file.line_at(int(self.starts[index]))}"


class LineIndex(Spans):
    r"""Where the lines of a file begin. Lines of nothing but blanks are left out, but counted in line numbers.

    Lines end in ``\n`` or ``\r\n`` and nothing else: the other separators that Unicode knows may stand inside a JSON
    string. Indexing reads the file once, at about 1 GB/s; what took more than a second is kept in the cache folder and
    found again as long as path, size and time of change are the same. Worker processes get the name of that index,
    not its content.

    >>> import pathlib
    >>> path = pathlib.Path("three.txt")
    >>> _ = path.write_text("one\n\ntwo\r\nthree")
    >>> lines = LineIndex(path)
    >>> [lines.text(i) for i in range(len(lines))], lines.number(2)
    (['one', 'two', 'three'], 4)
    """

    def __init__(self, path: str | Path | TextFile) -> None:
        file = path if isinstance(path, TextFile) else TextFile(path)
        self._kept: Path | None = _index_name(file)
        found = _load_index(self._kept)
        if found is None:
            began = time.perf_counter()
            found = _index_lines(file)
            slow = time.perf_counter() - began > _CACHE_AFTER_SECONDS
            if not (slow and _save_index(self._kept, *found)):
                self._kept = None
        starts, self._blanks = found
        super().__init__(file, starts)

    def text(self, index: int) -> str:
        """A line without its end."""
        start = int(self.starts[index])
        # Blank lines that follow are part of the range: the line itself ends at the first end of line.
        line = self.file.read(start, int(self.starts[index + 1])).partition(b"\n")[0]
        return self.file.decode(line.removesuffix(b"\r"), start)

    def number(self, index: int) -> int:
        """The number of a line in the file, from 1, blank lines counted."""
        return index + 1 + int(np.searchsorted(self._blanks, index, side="right"))

    def where(self, index: int) -> str:
        """The place of a line, for messages: file and line."""
        return f"{self.file.path}, line {self.number(index)}"

    def paragraphs(self) -> Spans:
        """The blocks of lines between blank lines."""
        begins = np.unique(np.concatenate(([0], self._blanks)))
        begins = begins[begins < len(self)]
        return Spans(self.file, np.append(self.starts[begins], self.starts[-1]))

    def __getstate__(self) -> dict[str, Any]:
        state = self.__dict__
        return state if self._kept is None else {**state, "starts": None, "_blanks": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        if self.starts is None:
            self.starts, self._blanks = _load_index(self._kept) or _index_lines(self.file)


def character_spans(file: TextFile, length: int) -> Spans:
    """Pieces of `length` characters, the last one perhaps shorter. No character is cut or left out."""
    if isinstance(length, bool) or not isinstance(length, int) or length < 1:
        raise BadArgument(expected("chunk_size to be a positive number of characters", length))
    starts: list[np.ndarray] = []
    offset, seen = file.begin, 0
    with file.open_plain() as stream:
        while block := stream.read(_BLOCK):
            data = np.frombuffer(block, np.uint8)
            # Every byte begins a character but those of the form 10xxxxxx, which continue one.
            begins = None if block.isascii() else np.flatnonzero((data & 0xC0) != 0x80)
            count = len(block) if begins is None else len(begins)
            wanted = np.arange(-seen % length, count, length, dtype=np.int64)
            starts.append(offset + (wanted if begins is None else begins[wanted]))
            offset, seen = offset + len(block), seen + count
    return Spans(file, np.concatenate([*starts, [file.size]]).astype(np.int64))


# -- making the index --------------------------------------------------------------------------------------


def _index_lines(file: TextFile) -> tuple[np.ndarray, np.ndarray]:
    """Where lines that are not blank begin, and the end of the file; how many such lines precede each blank one."""
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
                ends = np.array([carried])  # the last line, which has no end
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
    """Which lines hold blanks only. First and last byte decide nearly all of them, so hardly one is looked at."""
    lengths = ends - begins
    blank = _IS_SPACE[data[begins]] & _IS_SPACE[data[np.maximum(ends - 1, begins)]]  # of an empty line, its end
    for line in np.flatnonzero(blank & (lengths > 2)):
        blank[line] = not data[begins[line] : ends[line]].tobytes().strip()
    return blank


# -- the cache ---------------------------------------------------------------------------------------------


def digest(*parts: object) -> str:
    """A short name for what these parts say.

    >>> digest("a", 1) == digest("a", 1), digest("a", 1) == digest("a", 2), len(digest())
    (True, False, 24)
    """
    return hashlib.sha256("\0".join(map(str, parts)).encode()).hexdigest()[:24]


def _index_name(file: TextFile) -> Path:
    return cache_dir() / "lines" / f"{digest(file.path.resolve())}-{digest(file.fingerprint, _VERSION)}.npy"


def _load_index(path: Path | None) -> tuple[np.ndarray, np.ndarray] | None:
    """An index as `_save_index` wrote it, mapped: processes share its memory."""
    try:
        table = np.load(path, mmap_mode="r", allow_pickle=False) if path is not None else None
    except (OSError, ValueError, EOFError):
        return None
    if table is None:
        return None
    table = np.asarray(table)  # a plain array over the same map: np.memmap takes 1 us for every number
    blanks = int(table[0])
    return table[1 + blanks :], table[1 : 1 + blanks]


def _save_index(path: Path, starts: np.ndarray, blanks: np.ndarray) -> bool:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _renamed(path) as file:
            np.save(file, np.concatenate(([len(blanks)], blanks, starts)).astype(np.int64))
        _remove_others(path)
    except OSError as error:  # a full disk or a read-only home must not stop the run: the index is made again
        logger.info("the index of lines is not kept in '%s': %s", path.parent, error)
        return False
    return True


def _remove_others(path: Path) -> None:
    """What was made of earlier versions of the same file."""
    family = path.name.partition("-")[0]
    for other in path.parent.glob(f"{family}-*"):
        if other.name != path.name and not other.name.endswith(".tmp"):
            other.unlink(missing_ok=True)


def _decompressed(path: Path, fingerprint: str) -> Path:
    suffix = path.suffix.lower()
    if suffix in _NOT_OPENED:
        raise DataError(
            expected(f"a plain file or one of {', '.join(_OPENERS)}", str(path), f"Unpack it: {_NOT_OPENED[suffix]}.")
        )
    if suffix not in _OPENERS:
        return path
    plain = cache_dir() / "plain" / f"{digest(path.resolve())}-{fingerprint}-{path.stem}"
    if plain.exists():
        return plain
    logger.info("decompressing '%s' once, to '%s'", path, plain)
    plain.parent.mkdir(parents=True, exist_ok=True)
    try:
        with _renamed(plain) as target, _OPENERS[suffix](path, "rb") as source:
            while block := source.read(1 << 22):
                target.write(block)
    except (gzip.BadGzipFile, EOFError, zlib.error, lzma.LZMAError, OSError) as error:
        raise DataError(f"Expected a file that can be decompressed, received '{path}': {error}.") from error
    _remove_others(plain)
    return plain


@contextmanager
def _renamed(path: Path) -> Iterator[Any]:
    """A file that gets its name when all of it is written, so that others see the whole of it or nothing."""
    descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=path.name[:24], suffix=".tmp")
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        os.replace(name, path)
    except BaseException:
        os.unlink(name)
        raise


def existing_file(path: str | Path) -> Path:
    """The path of a file that is there, else an error that names similar files."""
    path = Path(path).expanduser()
    if path.is_file():
        return path
    what = "a folder" if path.is_dir() else "which does not exist"
    names = [entry.name for entry in path.parent.iterdir() if entry.is_file()] if path.parent.is_dir() else []
    close = did_you_mean(path.name, names) if not path.is_dir() else ""
    raise DataError(f"Expected a file, received '{path}', {what}. {close}".strip())
