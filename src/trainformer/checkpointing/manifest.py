"""The manifest: what makes a folder a checkpoint."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from trainformer.core.errors import DataError

MANIFEST = "manifest.json"
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
            content = json.loads(path.read_bytes())
            stated = content.pop("sha256")
        except FileNotFoundError as error:
            raise InvalidCheckpoint(f"{folder} is not a complete checkpoint: it has no {MANIFEST}.") from error
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise InvalidCheckpoint(f"{path} is damaged: it cannot be read ({error}).") from error
        if stated != _digest_of(content):
            raise InvalidCheckpoint(f"{path} is damaged: its content does not match its digest.")
        if content["format"] > FORMAT:
            raise InvalidCheckpoint(
                f"{folder} was written by a newer trainformer (format {content['format']}); please upgrade."
            )
        files = {key: [FileRecord(**f) for f in records] for key, records in content.pop("components").items()}
        return cls(components=files, **content)

    def files(self) -> list[FileRecord]:
        """All files, each once."""
        return list({f.name: f for records in self.components.values() for f in records}.values())

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


def digest(path: Path) -> str:
    """SHA-256 of a file. Hashing releases the GIL, so a background save does not slow the loop."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _digest_of(content: Mapping[str, Any]) -> str:
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
