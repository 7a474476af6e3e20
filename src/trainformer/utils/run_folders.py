"""The names of checkpoints in the folder of a run, and where it keeps them."""

from __future__ import annotations

import re
from pathlib import Path

from trainformer.utils.files import decode_json

MANIFEST = "manifest.json"
NAME = re.compile(r"(?:step_|checkpoint-)(\d+)")


def is_named(path: Path) -> bool:
    """Whether a folder is named like a checkpoint.

    >>> is_named(Path("runs/a/checkpoints/step_00000040"))
    True
    """
    return NAME.fullmatch(path.name) is not None


def step_of(path: Path) -> int:
    """The step in the name of a checkpoint.

    >>> step_of(Path("checkpoint-40"))
    40
    """
    match = NAME.fullmatch(path.name)
    assert match is not None, path
    return int(match[1])


def checkpoints_folder(path: Path) -> Path:
    """Where a run keeps its checkpoints, according to its config; any other folder stands for itself."""
    try:
        save_dir = decode_json((path / "config.json").read_bytes())["save_dir"]["value"]
    except (OSError, ValueError, KeyError, TypeError):
        save_dir = "checkpoints"
    return path / save_dir if (path / save_dir).is_dir() else path


def newest_checkpoint(path: Path) -> Path | None:
    """The newest complete checkpoint of a run folder or a checkpoints folder; None if there is none."""
    found = [p for p in checkpoints_folder(path).iterdir() if is_named(p) and (p / MANIFEST).is_file()]
    return max(found, key=step_of, default=None)
