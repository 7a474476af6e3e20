"""The manifest: what makes a folder a checkpoint."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from trainformer.core.errors import DataError
from trainformer.utils.files import decode_json
from trainformer.utils.run_folders import MANIFEST as MANIFEST

logger = logging.getLogger("trainformer")

FORMAT = 2


class InvalidCheckpoint(DataError):
    """A folder that is not a complete, undamaged checkpoint. The message names the file and what is wrong with it."""


@dataclass(frozen=True)
class FileRecord:
    """A file of a checkpoint: its name inside the folder, its size and its SHA-256."""

    name: str
    size: int
    sha256: str

    @classmethod
    def parsed(cls, content: Any) -> FileRecord:
        """The record that was read from a manifest, which may be forged: the file must be inside of the folder."""
        _check_kinds(content, "a file", {"name": str, "size": int, "sha256": str})
        _check_name(content["name"], "the name of a file")
        return cls(**content)

    @classmethod
    def of(cls, folder: Path, name: str) -> FileRecord:
        """Compute the record of a file."""
        path = folder / name
        return cls(name, path.stat().st_size, digest(path))


@dataclass(frozen=True)
class Manifest:
    """What is known about a checkpoint without opening its files."""

    step: int
    components: dict[str, list[FileRecord]]
    epoch: int = 0
    world_size: int = 1
    metrics: dict[str, float] = field(default_factory=dict)
    versions: dict[str, str] = field(default_factory=dict)
    formats: dict[str, str] = field(default_factory=dict)
    time: float = 0.0
    format: int = FORMAT

    def to_bytes(self) -> bytes:
        """As JSON, with a digest of its own content: a flipped digit would still be valid JSON."""
        content = asdict(self)
        return json.dumps({**content, "sha256": _digest_of(content)}, indent=2).encode()

    @classmethod
    def read(cls, folder: Path) -> Manifest:
        """The manifest of a folder. Anything wrong with it makes the folder not a checkpoint."""
        path = folder / MANIFEST
        try:
            content = decode_json(path.read_bytes())
            stated = content.pop("sha256")
        except FileNotFoundError as error:
            raise InvalidCheckpoint(f"{folder} is not a complete checkpoint: it has no {MANIFEST}.") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidCheckpoint(f"{path} is damaged: it cannot be read ({error}).") from error
        if stated != _digest_of(content):
            raise InvalidCheckpoint(f"{path} is damaged: its content does not match its digest.")
        if isinstance(content.get("format"), int) and content["format"] > FORMAT:
            raise InvalidCheckpoint(
                f"{folder} was written by a newer trainformer (format {content['format']}); please upgrade."
            )
        try:
            return cls.parsed(content)
        except (ValueError, TypeError) as error:
            raise InvalidCheckpoint(f"{path} is not a manifest that trainformer wrote: {error}.") from error

    @classmethod
    def parsed(cls, content: dict[str, Any]) -> Manifest:
        """The manifest with this content, whatever somebody may have written; `ValueError` says what is wrong."""
        defaults: dict[str, Any] = {
            "epoch": 0,
            "world_size": 1,
            "metrics": {},
            "versions": {},
            "formats": {},
            "time": 0.0,
        }
        content = defaults | content
        _check_kinds(content, "the manifest", _KINDS)
        for name, kind in (("metrics", (int, float)), ("versions", str), ("formats", str), ("components", list)):
            _check_kinds(content[name], name, dict.fromkeys(content[name], kind))
        if not 0 <= content["time"] < 1e11:
            raise ValueError(f"time is {content['time']!r}, not a Unix time")
        for key in content["components"]:
            _check_name(key, "a component")
        files = {key: [FileRecord.parsed(one) for one in records] for key, records in content["components"].items()}
        return cls(**{**content, "components": files})

    def files(self) -> list[FileRecord]:
        """All files, each once."""
        return list({f.name: f for records in self.components.values() for f in records}.values())

    def without_deleted(self, folder: Path, required: Collection[str] = ("model",)) -> Manifest:
        """Without components of which somebody deleted a file, each with a warning. Required ones are kept."""
        deleted = {
            key: next((record.name for record in records if not (folder / record.name).exists()), None)
            for key, records in self.components.items()
            if key not in required
        }
        for key, name in deleted.items():
            if name is not None:
                logger.warning("%s was deleted from %s: %r keeps its initial state", name, folder, key)
        kept = {key: records for key, records in self.components.items() if deleted.get(key) is None}
        return replace(self, components=kept)

    def verify(self, folder: Path, digests: bool = True) -> None:
        """Compare the files with their records; raises for the first that differs."""
        for record in self.files():
            path = folder / record.name
            if not path.is_file():
                raise InvalidCheckpoint(f"{path} is missing.")
            size = path.stat().st_size
            if size != record.size:
                raise InvalidCheckpoint(f"{path} is damaged: it has {size} bytes instead of {record.size}.")
            if digests and digest(path) != record.sha256:
                raise InvalidCheckpoint(f"{path} is damaged: its content does not match its digest.")


_KINDS: dict[str, Any] = {
    **dict.fromkeys(("step", "epoch", "world_size", "format"), int),
    **dict.fromkeys(("components", "metrics", "versions", "formats"), dict),
    "time": (int, float),
}


def _check_kinds(content: Any, what: str, kinds: Mapping[str, Any]) -> None:
    """Whether the content has exactly these fields, of these types; integers are counts."""
    if not isinstance(content, dict) or content.keys() != kinds.keys():
        received = sorted(map(str, content))[:12] if isinstance(content, dict) else type(content).__name__
        raise ValueError(f"{what} should have the fields {', '.join(kinds)} and has {received}")
    for name, kind in kinds.items():
        value = content[name]
        fits = isinstance(value, kind) and not isinstance(value, bool)
        if not fits or (kind is int and not 0 <= value < 1 << 63):
            raise ValueError(f"{name} of {what} is {repr(value)[:60]}")


def _check_name(name: str, what: str) -> None:
    parts = name.replace("\\", "/").split("/")
    if len(name) > 1024 or not name.isprintable() or any(part in ("", ".", "..") or len(part) > 200 for part in parts):
        raise ValueError(f"{what} is {name[:60]!r}, which is not inside of the folder")


def digest(path: Path) -> str:
    """SHA-256 of a file. Hashing releases the GIL, so a background save does not slow the loop."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
