"""States out of checkpoints and files, a component at a time. Nothing that is read is executed."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from trainformer.checkpointing import Checkpoint
from trainformer.checkpointing.sharing import files_for
from trainformer.checkpointing.snapshot import read_snapshot
from trainformer.checkpointing.tools.arrays import read_arrays
from trainformer.checkpointing.torch_components import read_component
from trainformer.core.errors import DataError, expected
from trainformer.distributed.strategy import unsharded
from trainformer.utils.tensor_files import read_tensors, read_weights
from trainformer.utils.tree_files import read_tree


class States(Mapping[str, Any]):
    """The components of a checkpoint or file by key. A checkpoint's are verified and read when they are asked for."""

    def __init__(self, source: Checkpoint | Path) -> None:
        self._source = source
        if isinstance(source, Checkpoint):
            self._keys = [key for key in source.manifest.components if key in source.manifest.formats]
        else:
            self._loaded = read_file(source)
            self._keys = list(self._loaded)

    @property
    def path(self) -> Path:
        """Where it is."""
        return self._source.path if isinstance(self._source, Checkpoint) else self._source

    def __iter__(self) -> Iterator[str]:
        return iter(self._keys)

    def __contains__(self, key: object) -> bool:
        return key in self._keys  # without reading it

    def __len__(self) -> int:
        return len(self._keys)

    def __getitem__(self, key: str) -> Any:
        if key not in self._keys:
            raise KeyError(key)
        source = self._source
        if not isinstance(source, Checkpoint):
            return self._loaded[key]
        records = source.manifest.components[key]
        dataclasses.replace(source.manifest, components={key: records}).verify(source.path)
        names = files_for(key, [r.name for r in records], rank=0)
        format = source.manifest.formats[key]
        if format == "orbax":
            return read_arrays(source.path / key)
        if format == "tree":
            return read_tree(source.path, names)
        return unsharded(read_component(source.path, names, format))


def read_file(path: Path) -> dict[str, Any]:
    """The components of a file that `Trainer.save` wrote; of a file of weights, the one component ``model``."""
    if path.suffix == ".safetensors":
        return {"model": read_weights(path.parent, [path.name])}
    content = read_tensors(path)
    if isinstance(content, dict) and "components" in content and "format" in content:
        return read_snapshot(path)
    if isinstance(content, dict) and content and all(isinstance(value, Tensor) for value in content.values()):
        return {"model": dict(content)}
    raise DataError(expected("a file written by Trainer.save, or one of weights by name", f"{path} with other content"))
