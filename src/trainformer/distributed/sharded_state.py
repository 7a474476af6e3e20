"""Files of sharded state: each rank writes its shards, and any number of ranks can read them.

A state is a tree of mappings and lists with tensors (`DTensor` or not) and plain values. Its files are

    <stem>.tree.pt                            the tree, with meta tensors in place of its tensors
    <stem>.shard-00001-of-00004.safetensors   the shards of rank 1 of 4, and their offsets

`torch.distributed.checkpoint` plans which parts to read. Its own file format is not used: the index is a pickle, which
can execute code when it is read. Nothing here communicates between ranks, so files can be written in the background.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.distributed.process_group import TorchProcessGroup
from trainformer.utils.distributed import is_dtensor
from trainformer.utils.files import decode_json
from trainformer.utils.tensor_files import read_tensors, save, untied

if TYPE_CHECKING:
    from torch.distributed.checkpoint.metadata import TensorStorageMetadata

# torch.distributed.tensor is imported where it is used: it takes most of a second, and few runs need it.
_OFFSETS = "trainformer_offsets"
_TREE, _SHARD = ".tree.pt", ".safetensors"
_FORMAT = 1


def write_sharded(folder: Path, stem: str, state: Any, process_group: TorchProcessGroup) -> list[str]:
    """Write this rank's shards of a state. Returns the file names. Every rank calls it; none waits for another."""
    found = list(named_tensors(state))
    tensors = dict(found)
    if len(tensors) < len(found):
        twice = next(name for name, _ in found if sum(name == other for other, _ in found) > 1)
        raise BadArgument(expected("keys of a state to differ as strings", twice))
    held = {name: piece for name, tensor in tensors.items() if (piece := _own_piece(tensor, process_group)) is not None}
    pieces, aliases = untied({name: piece for name, (piece, _) in held.items()})
    offsets = {name: held[name][1] for name in pieces}
    shard = f"{stem}.shard-{process_group.rank:05d}-of-{process_group.world_size:05d}{_SHARD}"
    written = [save(pieces, folder, shard, {_OFFSETS: json.dumps(offsets)})]
    if process_group.is_main:
        tree = meta_tree(state, tensors)
        content = {"format": _FORMAT, "world": process_group.world_size, "aliases": aliases, "tree": tree}
        torch.save(content, folder / f"{stem}{_TREE}")
        written.append(f"{stem}{_TREE}")
    return written


def resharded(saved: Any, like: Any) -> Any:
    """A saved state with its tensors sharded like those of the same paths in `like`; others are full, on the host.

    `saved` is a `ShardedState`, of which only what this rank needs is read, or a tree of full or sharded tensors.
    """
    targets = dict(named_tensors(like))
    if isinstance(saved, ShardedState):
        return saved.resharded(targets)
    tensors = {name: distributed_like(tensor, targets.get(name)) for name, tensor in named_tensors(saved)}
    return with_tensors(saved, tensors)


def distributed_like(tensor: Tensor, like: Tensor | None) -> Tensor:
    """This rank's shard of a full tensor, as a `DTensor` sharded like the other one. Needs no communication."""
    if like is None or not is_dtensor(like) or is_dtensor(tensor):
        return tensor
    from torch.distributed.tensor import DTensor

    assert isinstance(like, DTensor)
    if tensor.shape != like.shape:
        raise DataError(f"A tensor of shape {tuple(tensor.shape)} was saved where {tuple(like.shape)} is needed.")
    (chunk,) = like.__create_chunk_list__()
    part = tensor.detach()[tuple(slice(o, o + n) for o, n in zip(chunk.offsets, chunk.sizes, strict=True))]
    local = part.to(like.to_local().device, copy=True, memory_format=torch.contiguous_format)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=like.shape, stride=like.stride()
    )


class ShardedState(Mapping[str, Any]):
    """A state in files that any process can read, in full or in part.

    As a mapping it is the saved tree with meta tensors: names, shapes, dtypes and plain values, with no tensor read.
    Files that are damaged, missing or do not belong together are refused here.
    """

    def __init__(self, folder: Path, names: list[str]) -> None:
        self.folder = folder
        trees = [name for name in names if name.endswith(_TREE)]
        if len(trees) != 1:
            raise DataError(f"{folder} lacks the file *{_TREE} that describes its shards; it has {names}.")
        self._path = folder / trees[0]
        content = read_tensors(self._path)
        kinds: dict[str, Any] = {"format": int, "world": int, "aliases": dict, "tree": (dict, list)}
        if not isinstance(content, dict) or not all(isinstance(content.get(key), kind) for key, kind in kinds.items()):
            raise _bad_tree(self._path)
        if content["format"] > _FORMAT:
            what = f"a newer trainformer (format {content['format']})"
            raise DataError(f"{self._path} was written by {what}; please upgrade.")
        self.tree: Any = content["tree"]
        self._meta = dict(named_tensors(self.tree))
        self._aliases: dict[str, str] = content["aliases"]
        if not {*self._aliases, *self._aliases.values()} <= self._meta.keys():
            raise _bad_tree(self._path)
        shards = sorted(name for name in names if name.endswith(_SHARD))
        if len(shards) != content["world"]:
            raise DataError(
                f"{folder} holds a state that {content['world']} processes wrote, but the shards of {len(shards)}: "
                f"{', '.join(shards)}."
            )
        #: In which file each piece of a tensor is, by name and offsets.
        self._places: dict[tuple[str, tuple[int, ...]], str] = {}
        self._index = self._build_index(shards)
        for name, entry in self._index.items():
            there = sum(chunk.sizes.numel() for chunk in entry.chunks)
            if there != entry.size.numel():
                raise DataError(
                    f"The shards in {self.folder} hold {there} of the {entry.size.numel()} values of {name}: "
                    "some of them belong to another checkpoint."
                )

    # -- mapping -------------------------------------------------------------------------------------------

    def __getitem__(self, key: str) -> Any:
        return self.tree[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.tree)

    def __len__(self) -> int:
        return len(self.tree)

    # -- reading -------------------------------------------------------------------------------------------

    def unsharded(self) -> Any:
        """The full state on the host. Needs no other process. Tied tensors are tied again."""
        tensors: dict[str, Tensor] = {}
        for name, meta in self._meta.items():
            same = tensors.get(self._aliases.get(name, ""))
            tensors[name] = torch.empty(meta.shape, dtype=meta.dtype) if same is None else same
        self._fill(tensors)
        return with_tensors(self.tree, tensors)

    def resharded(self, like: Mapping[str, Tensor]) -> Any:
        """The state with its tensors sharded like those of the same paths in `like`, others full."""
        targets: dict[str, Tensor] = {}
        for name, meta in self._meta.items():
            target = like.get(name)
            if target is not None and is_dtensor(target) and target.shape == meta.shape:
                targets[name] = torch.empty_like(target, dtype=meta.dtype, requires_grad=False)
            else:
                targets[name] = torch.empty(meta.shape, dtype=meta.dtype)
        self._fill(targets)
        return with_tensors(self.tree, targets)

    @torch.no_grad()
    def _fill(self, targets: dict[str, Tensor]) -> None:
        from torch.distributed.checkpoint import DefaultLoadPlanner
        from torch.distributed.checkpoint.metadata import Metadata

        planner = DefaultLoadPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
        wanted = {name: target.detach() for name, target in targets.items()}
        planner.set_up_planner(wanted, Metadata(self._index), True)
        with ExitStack() as stack:
            files: dict[str, Any] = {}
            for item in planner.create_local_plan().items:
                name = self._aliases.get(item.storage_index.fqn, item.storage_index.fqn)
                assert item.storage_index.offset is not None
                file = self._places[name, tuple(item.storage_index.offset)]
                try:
                    if file not in files:
                        files[file] = stack.enter_context(safe_open(self.folder / file, framework="pt"))
                    where = tuple(slice(o, o + n) for o, n in zip(item.storage_offsets, item.lengths, strict=True))
                    piece = files[file].get_slice(name)[where] if where else files[file].get_tensor(name)
                except (SafetensorError, OSError) as error:
                    raise _damaged(self.folder / file, error) from error
                target = planner.resolve_tensor(item)
                target.copy_(piece)
                planner.commit_tensor(item, target)

    # -- index ---------------------------------------------------------------------------------------------

    def _build_index(self, shards: list[str]) -> dict[str, Any]:
        from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, TensorProperties, TensorStorageMetadata

        found: dict[str, TensorStorageMetadata] = {}
        for name, meta in self._meta.items():
            found[name] = TensorStorageMetadata(TensorProperties(dtype=meta.dtype), meta.shape, [])
        for shard in shards:
            path = self.folder / shard
            try:
                with safe_open(path, framework="pt") as file:
                    pieces = {
                        name: (found[name], tuple(map(int, offsets)), tuple(file.get_slice(name).get_shape()))
                        for name, offsets in decode_json((file.metadata() or {})[_OFFSETS]).items()
                    }
                for name, (entry, offsets, sizes) in pieces.items():
                    if name in self._aliases:
                        continue  # an empty shard of a tied tensor: empty tensors are not recognised as tied
                    fits = len(offsets) == len(sizes) == len(entry.size)
                    if not fits or any(o < 0 or o + s > n for o, s, n in zip(offsets, sizes, entry.size, strict=True)):
                        raise ValueError(f"a piece of {name} is outside of it")
                    if math.prod(sizes):
                        if (name, offsets) in self._places:
                            raise ValueError(f"a piece of {name} is there twice")
                        self._places[name, offsets] = shard
                        entry.chunks.append(ChunkStorageMetadata(torch.Size(offsets), torch.Size(sizes)))
            except (SafetensorError, OSError, KeyError, ValueError, TypeError, AttributeError) as error:
                raise _damaged(path, error) from error
        return found | {alias: found[name] for alias, name in self._aliases.items()}


def _bad_tree(path: Path) -> DataError:
    return DataError(f"{path} does not describe a sharded state: it is damaged or something else.")


def _own_piece(tensor: Tensor, process_group: TorchProcessGroup) -> tuple[Tensor, list[int]] | None:
    """The piece of a tensor that this rank writes, and its offsets; None if another rank writes it.

    The first of several ranks that hold the same shard writes it. With several meshes (model replicas under tensor
    parallelism), those of rank 0 write.
    """
    if not is_dtensor(tensor):
        return (tensor, [0] * tensor.ndim) if process_group.is_main else None
    sharded: Any = tensor
    mesh = sharded.device_mesh
    coordinate = mesh.get_coordinate()
    if coordinate is None or 0 not in mesh.mesh:
        return None
    if any(at and placement.is_replicate() for at, placement in zip(coordinate, sharded.placements, strict=True)):
        return None
    (chunk,) = sharded.__create_chunk_list__()
    return sharded.to_local(), list(chunk.offsets)


def _damaged(path: Path, error: Exception) -> DataError:
    return DataError(f"{path} cannot be read as a shard of a checkpoint: it is damaged. ({error!r})")


# -- trees -------------------------------------------------------------------------------------------------


def named_tensors(tree: Any, path: str = "") -> Iterator[tuple[str, Tensor]]:
    """All tensors of a tree with their paths."""
    if isinstance(tree, Tensor):
        yield path, tree
        return
    items = tree.items() if isinstance(tree, Mapping) else enumerate(tree) if isinstance(tree, (list, tuple)) else ()
    for key, value in items:
        yield from named_tensors(value, _joined(path, key))


def with_tensors(tree: Any, tensors: Mapping[str, Tensor], path: str = "") -> Any:
    """The same tree with other tensors, given by path."""
    if isinstance(tree, Tensor):
        return tensors[path]
    if isinstance(tree, Mapping):
        return {key: with_tensors(value, tensors, _joined(path, key)) for key, value in tree.items()}
    if isinstance(tree, (list, tuple)):
        values = [with_tensors(value, tensors, _joined(path, i)) for i, value in enumerate(tree)]
        return values if isinstance(tree, list) else tuple(values)
    return tree


def _joined(path: str, key: Any) -> str:
    """A path with one more key. Slashes in keys are escaped as in JSON pointers, so paths are unique."""
    step = str(key).replace("~", "~0").replace("/", "~1")
    return f"{path}/{step}" if path else step


def meta_tree(state: Any, tensors: Mapping[str, Tensor]) -> Any:
    """The same tree with meta tensors, which keep shapes and dtypes."""
    return with_tensors(state, {n: torch.empty(t.shape, dtype=t.dtype, device="meta") for n, t in tensors.items()})
