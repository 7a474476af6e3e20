"""safetensors files, single or sharded with an index, read and written as NumPy arrays.

Files are memory-mapped: only the requested arrays are copied.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from trainformer.core.errors import DataError
from trainformer.utils.files import decode_json

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_SHARD = 5 * 10**9


class Weights:
    """Arrays by name, from one or several open files."""

    def __init__(self, folder: Path, names: Iterable[str], opened: ExitStack) -> None:
        self.folder = folder
        self._arrays: dict[str, Callable[[], np.ndarray]] = {}
        for name in names:
            path = folder / name
            if not path.is_file():
                raise DataError(f"Expected the file {path}, which does not exist. Is the download complete?")
            try:
                file = opened.enter_context(safe_open(path, framework="numpy"))
            except (SafetensorError, OSError) as error:
                raise DataError(f"{path} is not a readable safetensors file ({error}); it is damaged.") from error
            self._arrays.update({key: partial(file.get_tensor, key) for key in file.keys()})  # noqa: SIM118

    def __contains__(self, name: str) -> bool:
        return name in self._arrays

    def __iter__(self) -> Iterator[str]:
        return iter(self._arrays)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._arrays[name]()

    def take(self, name: str) -> Callable[[], np.ndarray]:
        """Remove an array; the returned function still reads it."""
        return self._arrays.pop(name)

    def add(self, name: str, read: Callable[[], np.ndarray]) -> None:
        """Add an array that is made of others when it is read."""
        self._arrays[name] = read

    def rename(self, pattern: str, name: str) -> None:
        """Replace a regex in the names of the arrays."""
        self._arrays = {re.sub(pattern, name, saved): read for saved, read in self._arrays.items()}


@contextmanager
def open_weights(folder: Path, name: str | None = None) -> Iterator[Weights]:
    """The weights of an HF folder, or of one file in it. Pickle files are refused: loading them could execute code."""
    with ExitStack() as opened:
        yield Weights(folder, _weight_files(folder) if name is None else [name], opened)


def _weight_files(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if (folder / INDEX).is_file():
        try:
            names = sorted(set(decode_json((folder / INDEX).read_bytes())["weight_map"].values()))
            if any(Path(name).name != name or len(name.encode()) > 255 for name in names):
                raise ValueError("a file is not in the same folder")
        except (ValueError, LookupError, TypeError, AttributeError) as error:
            raise DataError(f"{folder / INDEX} is damaged: it does not map weights to files ({error}).") from error
        return names
    old = sorted(path.name for path in folder.glob("*.bin"))
    do = " Convert them with transformers: from_pretrained(...).save_pretrained(folder)." if old else ""
    raise DataError(f"Expected {SINGLE} or {INDEX} in {folder}, received {old or 'neither'}.{do}")


def write_weights(
    arrays: Iterable[tuple[str, np.ndarray]], folder: Path, largest: int = LARGEST_SHARD, write: bool = True
) -> None:
    """Write arrays in shards of at most `largest` bytes; a single file needs no index.

    ``write=False`` only consumes the arrays: for processes that take part in gathering but do not write.
    """
    shards: list[Path] = []
    names_in: list[list[str]] = []
    buffer: dict[str, np.ndarray] = {}
    total = size = 0

    def flush() -> None:
        path = folder / f".shard-{len(shards) + 1:05d}.tmp"
        write_file(buffer, path)
        shards.append(path)
        names_in.append(list(buffer))

    for name, array in arrays:
        if buffer and size + array.nbytes > largest:
            flush()
            buffer, size = {}, 0
        if write:
            buffer[name] = np.asarray(array, order="C")  # keeps scalars, unlike ascontiguousarray
            size += array.nbytes
            total += array.nbytes
    if write:
        flush()
        _name_shards(shards, names_in, folder, total)


def write_file(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    # transformers refuses a file without a format.
    save_file(dict(arrays), path, {"format": "pt"})
    path.chmod(0o644)  # safetensors creates it with mode 0600


def _name_shards(shards: list[Path], names_in: list[list[str]], folder: Path, total: int) -> None:
    """Rename the shards, now that their number is known, and delete those of an earlier save."""
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    for path, name in zip(shards, names, strict=True):
        os.replace(path, folder / name)
    if len(shards) > 1:
        weight_map = {key: name for name, keys in zip(names, names_in, strict=True) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for old in (*folder.glob("model-*-of-*.safetensors"), folder / SINGLE):
        if old.name not in names:
            old.unlink(missing_ok=True)
