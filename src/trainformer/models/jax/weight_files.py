"""Files of safetensors, single or in shards with an index, read and written through NumPy.

Reading maps the files into memory: only what is asked for is copied. What the names mean is left to the families.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from trainformer.core.errors import DataError

SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
LARGEST_SHARD = 5 * 10**9


class Weights:
    """Arrays by name, over one or several open files."""

    def __init__(self, folder: Path, names: Iterable[str], opened: ExitStack) -> None:
        self.folder = folder
        self._homes: dict[str, Any] = {}
        for name in names:
            path = folder / name
            if not path.is_file():
                raise DataError(f"Expected the file {path}, which is not there. Is the download complete?")
            try:
                file = opened.enter_context(safe_open(path, framework="numpy"))
            except SafetensorError as error:
                raise DataError(f"{path} cannot be read as safetensors: it is damaged. ({error})") from error
            self._homes.update(dict.fromkeys(file.keys(), file))

    def __contains__(self, name: str) -> bool:
        return name in self._homes

    def __iter__(self) -> Iterator[str]:
        return iter(self._homes)

    def __getitem__(self, name: str) -> np.ndarray:
        return self._homes[name].get_tensor(name)


@contextmanager
def open_weights(folder: Path, name: str | None = None) -> Iterator[Weights]:
    """The weights of an HF folder, or of one file in it. Pickle files are not read: reading them could run code."""
    with ExitStack() as opened:
        yield Weights(folder, _files(folder) if name is None else [name], opened)


def _files(folder: Path) -> list[str]:
    if (folder / SINGLE).is_file():
        return [SINGLE]
    if (folder / INDEX).is_file():
        index = json.loads((folder / INDEX).read_text(encoding="utf-8"))
        return sorted(set(index["weight_map"].values()))
    old = sorted(path.name for path in folder.glob("*.bin"))
    do = " Convert them with transformers: from_pretrained(...).save_pretrained(folder)." if old else ""
    raise DataError(f"Expected {SINGLE} or {INDEX} in {folder}, received {old or 'neither'}.{do}")


def write_weights(
    arrays: Iterable[tuple[str, np.ndarray]], folder: Path, largest: int = LARGEST_SHARD, write: bool = True
) -> None:
    """Write arrays as they come, a file whenever `largest` bytes are together; one file needs no index.

    With ``write=False`` they are only asked for: on the processes that take part in gathering and do not write.
    """
    shards: list[Path] = []
    homes: list[list[str]] = []
    held: dict[str, np.ndarray] = {}
    total = size = 0
    for name, array in arrays:
        if held and size + array.nbytes > largest:
            _flush(held, shards, homes, folder)
            held, size = {}, 0
        if write:
            held[name] = np.ascontiguousarray(array)
            size += array.nbytes
            total += array.nbytes
    if not write:
        return
    _flush(held, shards, homes, folder)
    _name_shards(shards, homes, folder, total)


def write_file(arrays: Mapping[str, np.ndarray], path: Path) -> None:
    # transformers refuses a file that does not say what wrote it.
    save_file(dict(arrays), path, {"format": "pt"})
    path.chmod(0o644)  # safetensors makes it readable by its owner alone, unlike every other file here


def _flush(held: Mapping[str, np.ndarray], shards: list[Path], homes: list[list[str]], folder: Path) -> None:
    path = folder / f".shard-{len(shards) + 1:05d}.tmp"
    write_file(held, path)
    shards.append(path)
    homes.append(list(held))


def _name_shards(shards: list[Path], homes: list[list[str]], folder: Path, total: int) -> None:
    """Only now is their number known. What an earlier save left under other names goes away."""
    names = [SINGLE]
    if len(shards) > 1:
        names = [f"model-{n:05d}-of-{len(shards):05d}.safetensors" for n in range(1, len(shards) + 1)]
    for path, name in zip(shards, names, strict=True):
        os.replace(path, folder / name)
    if len(shards) > 1:
        homes_by_name = {key: name for name, keys in zip(names, homes, strict=True) for key in keys}
        index = {"metadata": {"total_size": total}, "weight_map": dict(sorted(homes_by_name.items()))}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    else:
        (folder / INDEX).unlink(missing_ok=True)
    for old in (*folder.glob("model-*-of-*.safetensors"), folder / SINGLE):
        if old.name not in names:
            old.unlink(missing_ok=True)
