"""Installs throw-away packages with entry points: a real dist-info on `sys.path`, as pip would leave it."""

import sys
from pathlib import Path

import pytest

from trainformer.core import plugins


@pytest.fixture
def install(tmp_path, monkeypatch):
    """``install(package, code, kind, **names)``: a package whose entry points are ``name="object"`` of its module."""

    def install(package: str, code: str, kind: str, **names: str) -> None:
        site = tmp_path / f"site-{package}"
        info = site / f"{package}-1.0.dist-info"
        info.mkdir(parents=True)
        (site / f"{package}.py").write_text(code)
        (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {package}\nVersion: 1.0\n")
        lines = [f"{name} = {package}:{target}" for name, target in names.items()]
        (info / "entry_points.txt").write_text("\n".join([f"[trainformer.{kind}]", *lines, ""]))
        monkeypatch.syspath_prepend(str(site))
        monkeypatch.delitem(sys.modules, package, raising=False)
        plugins._registered.cache_clear()

    plugins._registered.cache_clear()
    yield install
    plugins._registered.cache_clear()
    for path in Path(tmp_path).glob("site-*/*.py"):
        sys.modules.pop(path.stem, None)
