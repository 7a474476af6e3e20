"""Tar shards: finding them by path or pattern, and reading the undecoded samples in one.

Python's `tarfile` parses the headers, but iteration is ours: `TarFile.next` takes a damaged header for the end of the
file, and would silently lose the rest. The meaning of a sample's files is up to `webdataset`.

Nothing is extracted: files are read into memory, and names only group them, so an absolute path or `..` in a name leads
nowhere. Links, devices and other special members are skipped, never followed.
"""

from __future__ import annotations

import bz2
import glob
import gzip
import hashlib
import logging
import lzma
import os
import re
import tarfile
import zlib
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

from trainformer.core.errors import DataError, expected

logger = logging.getLogger("trainformer")

_OPENERS: dict[str, Callable[..., Any]] = {
    ".tar": open,
    **dict.fromkeys((".tar.gz", ".tgz"), gzip.open),
    **dict.fromkeys((".tar.bz2", ".tbz2"), bz2.open),
    **dict.fromkeys((".tar.xz", ".txz"), lzma.open),
}
# ValueError: from numbers in extended headers that are none, or too large.
_DAMAGE = (tarfile.TarError, OSError, EOFError, ValueError, OverflowError, lzma.LZMAError, zlib.error)
_MAX_BYTES = 1 << 30  # of a file in a shard: a compressed one could otherwise fill the memory
_PART_BYTES = 1 << 22
_RANGE = re.compile(r"\{(\d+)\.\.(\d+)\}")
_CHOICE = re.compile(r"\{([^{}]*,[^{}]*)\}")


class RawSample(NamedTuple):
    """The undecoded files of one sample, its shard and offsets, and all extensions it has."""

    shard: int
    offset: int
    end: int
    key: str
    files: dict[str, bytes]
    endings: set[str]


def read_samples(path: str, shard: int, offset: int, wanted: set[str]) -> Iterator[RawSample]:
    """Groups of consecutive files with one key, from the offset of a sample on; contents of the `wanted` extensions."""
    group: RawSample | None = None
    with _OPENERS[_ending(path)](path, "rb") as stream:
        try:
            tar = tarfile.TarFile(fileobj=stream)
        except _DAMAGE as error:
            raise DataError(f"Expected a tar file, received '{path}', which is not one: {error}.") from error
        for member in _members(tar, path, offset):
            folder, name = os.path.split(member.name)
            stem, _, ending = name.partition(".")
            if not member.isreg() or not stem or "__MACOSX" in folder:
                continue
            key, ending = os.path.join(folder, stem), ending.lower()
            if group is None or group.key != key:
                if group is not None:
                    yield group
                group = RawSample(shard, member.offset, tar.offset, key, {}, set())
            elif ending in group.endings:
                raise DataError(f"Expected one file '{key}.{ending}' per sample in '{path}', received two.")
            group = group._replace(end=tar.offset)
            group.endings.add(ending)
            if ending in wanted:
                group.files[ending] = _content(tar, member, path)
        if group is not None:
            yield group


def _members(tar: Any, path: str, offset: int) -> Iterator[tarfile.TarInfo]:
    while True:
        try:
            tar.fileobj.seek(offset)
            member = tarfile.TarInfo.fromtarfile(tar)
        except tarfile.EOFHeaderError:  # type: ignore[attr-defined]
            return
        except tarfile.EmptyHeaderError:  # type: ignore[attr-defined]
            logger.warning("shard '%s' has no end-of-archive marker: it may be truncated", path)
            return
        except _DAMAGE as error:
            raise DataError(
                f"Expected a whole tar file, received '{path}', which is damaged at byte {offset}: {error}. "
                "Recreate it."
            ) from error
        offset = tar.offset
        yield member


def _content(tar: Any, member: tarfile.TarInfo, path: str) -> bytes:
    if not 0 <= member.size <= _MAX_BYTES:
        size = f"{member.size:,} bytes in '{member.name}'"
        raise DataError(expected(f"at most 1 GiB per file in shard '{path}'", size, "Recreate the shard."))
    try:
        tar.fileobj.seek(member.offset_data)
        # In parts: `read` allocates as many bytes as it is asked for, and the header of a short file may claim any.
        parts, left = [], member.size
        while left > 0 and (part := tar.fileobj.read(min(left, _PART_BYTES))):
            parts.append(part)
            left -= len(part)
        data = b"".join(parts)
    except _DAMAGE as error:
        raise DataError(f"Expected to read '{member.name}' of shard '{path}', received: {error}.") from error
    if len(data) < member.size:
        raise DataError(
            f"Expected {member.size} bytes of '{member.name}' in shard '{path}', received {len(data)}: the shard is "
            "truncated. Recreate it."
        )
    return data


def sample_id(shard: str, key: str) -> int:
    """A number for a sample that depends on neither its folder nor its position."""
    digest = hashlib.blake2b(
        f"{os.path.basename(shard)}\n{key}".encode("utf-8", "surrogateescape"), digest_size=8
    ).digest()
    return int.from_bytes(digest, "little")


# -- finding shards ----------------------------------------------------------------------------------------


def find_shards(urls: str | Path | Iterable[str | Path]) -> list[str]:
    """All shards of paths, patterns and folders, in order.

    >>> expand_braces("x-{08..10}.tar")
    ['x-08.tar', 'x-09.tar', 'x-10.tar']
    """
    found: list[str] = []
    for url in [urls] if isinstance(urls, str | Path) else urls:
        if "://" in str(url) or str(url).startswith("pipe:"):
            do = "Download the shards, or mount their store."
            raise DataError(expected("paths of local tar files", str(url), do))
        for name in expand_braces(os.path.expanduser(url)):
            found += _existing(name)
    missing = [path for path in found if not os.path.isfile(path)]
    if missing:
        shown = ", ".join(f"'{path}'" for path in missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise DataError(f"Expected tar files, received paths of which {len(missing)} do not exist: {shown}.")
    wrong = next((path for path in found if _ending(path) not in _OPENERS), None)
    if wrong is not None:
        raise DataError(expected(f"tar files ({', '.join(_OPENERS)})", wrong))
    if not found:
        raise DataError(expected("tar files", str(urls), "No file matches; check the path."))
    return found


def _existing(name: str) -> list[str]:
    if os.path.isdir(name):
        return sorted(os.path.join(name, other) for other in os.listdir(name) if _ending(other) in _OPENERS)
    return sorted(glob.glob(name)) if glob.has_magic(name) and not os.path.exists(name) else [name]


def expand_braces(pattern: str) -> list[str]:
    """Expand {000..012} and {a,b} in a pattern.

    >>> expand_braces("{train,val}-{0..1}.tar")
    ['train-0.tar', 'train-1.tar', 'val-0.tar', 'val-1.tar']
    """
    matches = filter(None, (_RANGE.search(pattern), _CHOICE.search(pattern)))
    match = min(matches, key=lambda found: found.start(), default=None)
    if match is None:
        return [pattern]
    if match.re is _CHOICE:
        values = match[1].split(",")
    else:
        first, last = match[1], match[2]
        width = max(len(first), len(last)) if "0" in (first[0], last[0]) else 0
        values = [str(number).zfill(width) for number in range(int(first), int(last) + 1)]
    rest = expand_braces(pattern[match.end() :])
    return [pattern[: match.start()] + value + end for value in values for end in rest]


def is_shard_path(name: str | Path) -> bool:
    """Whether a path or pattern names tar shards, or a folder that contains some.

    >>> is_shard_path("train-{000..012}.tar"), is_shard_path("train.csv")
    (True, False)
    """
    path = os.path.expanduser(name)
    if os.path.isdir(path):
        return any(_ending(other) in _OPENERS for other in os.listdir(path))
    return _ending(path) in _OPENERS


def _ending(path: str) -> str:
    name = os.path.basename(path).lower()
    return next((ending for ending in _OPENERS if name.endswith(ending)), "")
