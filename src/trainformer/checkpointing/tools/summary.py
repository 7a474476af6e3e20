"""What is in a checkpoint. Of a folder, only the manifest and the headers of the weights are read, without torch."""

from __future__ import annotations

import io
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from math import prod
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from trainformer.checkpointing import Checkpoint, InvalidCheckpoint
from trainformer.checkpointing.tools.listing import AnyPath, find
from trainformer.core.errors import DataError
from trainformer.utils.files import decode_json

_DTYPES = {
    "F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16", "I64": "int64", "I32": "int32",
    "I16": "int16", "I8": "int8", "U8": "uint8", "BOOL": "bool", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
}  # fmt: skip
_KIND = re.compile(r"(\w+)\[([\d, ]*)\]")


class Shown:
    """What is shown as a table, by rich or as text without colours."""

    def table(self) -> Table:
        raise NotImplementedError

    def __rich__(self) -> Table:
        return self.table()

    def __str__(self) -> str:
        file = io.StringIO()
        Console(file=file, width=120).print(self.table())
        return file.getvalue()


@dataclass(frozen=True)
class Part:
    """One component: how it is written, in how many bytes, in which files."""

    key: str
    format: str
    size: int
    files: tuple[str, ...] = ()


@dataclass(frozen=True)
class Summary(Shown):
    """What `inspect` found. `parameters` counts the numbers in the weights: buffers included, tied ones once."""

    path: Path
    step: int | None
    epoch: int | None
    time: float | None
    parts: tuple[Part, ...]
    parameters: int
    dtypes: dict[str, int]
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    world_size: int | None = None
    is_protected: bool = False

    @property
    def size(self) -> int:
        """Bytes of all components."""
        return sum(part.size for part in self.parts)

    def facts(self) -> dict[str, str]:
        """What is known of the whole, in words."""
        saved = "" if self.time is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(self.time))
        everything = {
            "step": "" if self.step is None else f"{self.step:,}",
            "epochs done": "" if self.epoch is None else f"{self.epoch:,}",
            "saved": saved + (", protected" if self.is_protected else ""),
            "metrics": ", ".join(f"{name} {value:.4g}" for name, value in self.metrics.items()),
            "parameters": f"{self.parameters:,} ({', '.join(f'{n:,} {dtype}' for dtype, n in self.dtypes.items())})",
            "processes": "" if self.world_size is None else str(self.world_size),
            "versions": ", ".join(f"{name} {version}" for name, version in self.versions.items()),
            "size": in_words(self.size),
        }
        return {name: text for name, text in everything.items() if text}

    def table(self) -> Table:
        """Facts first, then the components."""
        table = Table(title=str(self.path), title_justify="left", show_edge=False)
        for name in ("what", "size", "in"):
            table.add_column(name, justify="right" if name == "size" else "left", no_wrap=name != "in")
        for name, text in self.facts().items():
            table.add_row(name, "", text)
        table.add_section()
        for part in self.parts:
            files = f"{part.key}/ ({len(part.files)} files)" if part.format == "orbax" else ", ".join(part.files)
            table.add_row(part.key, in_words(part.size), files or part.format)
        return table


def inspect(path: AnyPath) -> Summary:
    """What is in a checkpoint: step, metrics, versions, components and their sizes, parameters and their types.

    Files are not compared with their digests; `verify` does that.
    """
    found = find(path)
    return _of_checkpoint(found) if isinstance(found, Checkpoint) else _of_file(found)


def _of_checkpoint(checkpoint: Checkpoint) -> Summary:
    manifest = checkpoint.manifest
    parts = [
        Part(key, manifest.formats.get(key, "files"), sum(f.size for f in files), tuple(f.name for f in files))
        for key, files in manifest.components.items()
    ]
    counts: Counter[str] = Counter()
    for part in parts:
        if part.key == "model" and part.format in ("weights", "sharded"):
            for name in part.files:
                counts += _weight_counts(checkpoint.path / name)
        elif part.format == "orbax":
            counts += _array_counts(checkpoint.path / part.key)
    return Summary(
        path=checkpoint.path,
        step=manifest.step,
        epoch=manifest.epoch,
        time=manifest.time,
        parts=tuple(parts),
        parameters=counts.total(),
        dtypes=dict(counts.most_common()),
        metrics=manifest.metrics,
        versions=manifest.versions,
        world_size=manifest.world_size,
        is_protected=checkpoint.is_protected,
    )


def _weight_counts(path: Path) -> Counter[str]:
    """Numbers by their type, from the header alone."""
    from safetensors import SafetensorError, safe_open

    counts: Counter[str] = Counter()
    if path.suffix != ".safetensors":
        return counts
    try:
        with safe_open(path, framework="np") as file:
            for key in file.keys():  # noqa: SIM118 - not a mapping
                tensor = file.get_slice(key)
                counts[_DTYPES.get(tensor.get_dtype(), tensor.get_dtype())] += prod(tensor.get_shape())
    except (SafetensorError, OSError) as error:
        raise InvalidCheckpoint(f"{path} is missing or damaged. ({error}) See what `verify` says.") from error
    return counts


def _array_counts(folder: Path) -> Counter[str]:
    """Parameters by dtype, from the index beside the arrays alone."""
    counts: Counter[str] = Counter()
    try:
        leaves = dict(decode_json((folder / "leaves.json").read_bytes())["leaves"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{folder} is missing or damaged. ({error}) See what `verify` says.") from error
    for name, kind in leaves.items():
        match = _KIND.fullmatch(str(kind))
        if name.startswith("params/") and match is not None:
            counts[match[1]] += prod(int(size) for size in match[2].split(",") if size.strip())
    return counts


def _of_file(path: Path) -> Summary:
    from trainformer.checkpointing.tools.states import read_file

    components = read_file(path)
    run = components.get("run", {})
    step = run.get("step")
    records = [record for record in run.get("log_history", ()) if record["step"] == step]
    tensors = {(t.data_ptr(), t.shape): t for t in tensors_in(components.get("model", {}))}.values()
    counts: Counter[str] = Counter()
    for tensor in tensors:
        counts[str(tensor.dtype).removeprefix("torch.")] += tensor.numel()
    return Summary(
        path=path,
        step=step,
        epoch=run.get("epoch"),
        time=path.stat().st_mtime,
        parts=tuple(
            Part(key, "in the file", sum(t.numel() * t.element_size() for t in tensors_in(state)))
            for key, state in components.items()
        ),
        parameters=counts.total(),
        dtypes=dict(counts.most_common()),
        metrics={name: v for record in records for name, v in record.items() if name.startswith("val/")},
    )


def tensors_in(tree: Any) -> Iterable[Any]:
    """Every tensor of a tree."""
    if isinstance(tree, Mapping):
        for value in tree.values():
            yield from tensors_in(value)
    elif isinstance(tree, (list, tuple)):
        for value in tree:
            yield from tensors_in(value)
    elif hasattr(tree, "numel"):
        yield tree


def in_words(size: int) -> str:
    """
    >>> in_words(512), in_words(45_300_000)
    ('512 B', '45.3 MB')
    """
    unit, factor = next((u, f) for u, f in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3), ("B", 1)) if size >= f or f == 1)
    return f"{size / factor:.1f} {unit}" if factor > 1 else f"{size} B"
