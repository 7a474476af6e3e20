"""What a run records of its training data: their names, and digests where these cost little."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

from trainformer.data.mixture.mixture import Mixture

_MOST_BYTES = 256 << 20  # about a quarter of a second
_MOST_FILES = 64
_MOST_RECORDS = 100_000


def describe_training_data(data: Any) -> list[dict[str, Any]]:
    """The name of each source of the data, and its SHA-256: of a file, or of records as JSON lines.

    That of a folder is the digest of the digests of its files, one per line, in the order of their names. Files beyond
    256 MiB, folders of many files and other objects have no digest.

    >>> describe_training_data(["a", "b"])[0]["records"]
    2
    """
    if isinstance(data, Mixture):
        named = ((name, describe_training_data(source)) for name, source in data.sources.items())
        return [{"source": name, **part} for name, parts in named for part in parts]
    if isinstance(data, str | Path):
        return [_describe_path(str(data))]
    if type(data) is list and data and all(isinstance(record, str | dict) for record in data[:8]):
        return [_describe_records(data)]
    described = {"name": type(data).__name__}
    fingerprint = getattr(data, "_fingerprint", None)  # of a Hugging Face dataset
    return [{**described, "fingerprint": fingerprint}] if isinstance(fingerprint, str) else [described]


def _describe_path(name: str) -> dict[str, Any]:
    path = Path(name).expanduser()
    try:
        if path.is_file():
            files = [path]
        elif path.is_dir():
            files = sorted(file for file in path.iterdir() if file.is_file())
        else:
            return {"name": name}  # of a dataset on the hub, a corpus or a stream
        size = sum(file.stat().st_size for file in files)
        described: dict[str, Any] = {"name": name, "bytes": size}
        if files and len(files) <= _MOST_FILES and size <= _MOST_BYTES:
            digests = [_digest(file) for file in files]
            if path.is_file():
                return {**described, "sha256": digests[0]}
            whole = hashlib.sha256("\n".join(digests).encode()).hexdigest()
            return {**described, "files": len(files), "sha256": whole}
        return {**described, "files": len(files)}
    except OSError:  # deleted, or not readable: loading the data says so
        return {"name": name}


def _digest(file: Path) -> str:
    with file.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()


def _describe_records(data: list[Any]) -> dict[str, Any]:
    described: dict[str, Any] = {"name": "records in memory", "records": len(data)}
    if len(data) > _MOST_RECORDS:
        return described
    digest, size = hashlib.sha256(), 0
    try:
        for record in data:
            line = json.dumps(record, sort_keys=True).encode() + b"\n"
            digest.update(line)
            size += len(line)
            if size > _MOST_BYTES:
                return described
    except (TypeError, ValueError):  # images, arrays
        return described
    return {**described, "sha256": digest.hexdigest()}
