"""Registering objects of a test module as entry points, as an installed package does."""

import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import pytest

from trainformer.core import plugins


@contextmanager
def installed(folder: Path, source: str, points: Mapping[str, Mapping[str, str]]) -> Iterator[None]:
    """A distribution with a module ``extension`` and entry points, by group and name, on the path."""
    (folder / "extension.py").write_text(source)
    info = folder / "extension-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: extension\nVersion: 1.0\n")
    sections = [f"[{group}]\n" + "\n".join(f"{k} = {v}" for k, v in names.items()) for group, names in points.items()]
    (info / "entry_points.txt").write_text("\n".join(sections))
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(folder)
        patch.delitem(sys.modules, "extension", raising=False)
        plugins._registered.cache_clear()
        yield
    plugins._registered.cache_clear()
