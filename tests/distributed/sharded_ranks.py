"""States written by some ranks and read by others: four processes, of which one, two or four take part."""

from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from trainformer.distributed.process_group import TorchProcessGroup
from trainformer.distributed.sharded_state import ShardedState, resharded, write_sharded

COUNTS = (1, 2, 4)


def truth():
    """Whole tensors by name: rows that no number divides, fewer rows than ranks, nothing at all, short types."""
    g = torch.Generator().manual_seed(0)
    return {
        "uneven": torch.randn(7, 3, generator=g, dtype=torch.float64),
        "few": torch.randn(3, generator=g),
        "columns": torch.randn(5, 8, generator=g).bfloat16(),
        "empty": torch.randn(0, 4, generator=g),
        "copied": torch.randn(6, generator=g),
        "counts": torch.arange(12).reshape(6, 2),
    }


def divided(values, world, meshes):
    """The same tensors as a group of ranks holds them, in a tree with plain values and a tied tensor."""
    flat, grid = meshes
    how = {"columns": [Shard(1)], "copied": [Replicate()]}
    tensors = {name: distribute_tensor(value, flat, how.get(name, [Shard(0)])) for name, value in values.items()}
    if world == 4:  # two replicas, each on two ranks
        tensors["counts"] = distribute_tensor(values["counts"], grid, [Replicate(), Shard(0)])
    tensors["tied"] = tensors["uneven"].detach()
    return {"tensors": tensors, "plain": torch.tensor(2.5), "note": {"steps": 3, "names": ("a", None)}}


def as_expected(state):
    """How many tensors of this rank are not what they should be; the division is worked out by hand."""
    wrong = 0
    for name, value in {**truth(), "tied": truth()["uneven"]}.items():
        here = state["tensors"][name]
        mine = value
        for placement, size, at in zip(
            here.placements, here.device_mesh.shape, here.device_mesh.get_coordinate(), strict=True
        ):
            if placement.is_shard():
                pieces = value.chunk(size, placement.dim)
                mine = pieces[at] if at < len(pieces) else value.narrow(placement.dim, 0, 0)
        wrong += not torch.equal(here.to_local(), mine)
    return wrong + (state["plain"].item() != 2.5)


def every_pair(rank, world, folder):
    """Write on n and read on m ranks, for all pairs; how much was wrong, and how many files each rank wrote."""
    folder, wrong, wrote = Path(folder), 0, []
    groups = {n: list(range(n)) for n in COUNTS}
    flat = {n: DeviceMesh("cpu", members, mesh_dim_names=("shard",)) for n, members in groups.items()}
    grid = DeviceMesh("cpu", [[0, 1], [2, 3]])
    for n in COUNTS:
        (folder / str(n)).mkdir(exist_ok=True)
        if rank < n:
            state = divided(truth(), n, (flat[n], grid))
            wrote.append(len(write_sharded(folder / str(n), "model", state, TorchProcessGroup(rank, n))))
    dist.barrier()
    for n in COUNTS:
        for m in COUNTS:
            if rank < m:
                blank = {name: torch.zeros_like(value) for name, value in truth().items()}
                state = divided(blank, m, (flat[m], grid))
                saved = ShardedState(folder / str(n), [path.name for path in (folder / str(n)).iterdir()])
                wrong += as_expected(resharded(saved, state))
                whole = resharded({"tensors": {**truth(), "tied": truth()["uneven"]}, "plain": state["plain"]}, state)
                wrong += as_expected(whole) + sum(not isinstance(t, DTensor) for t in whole["tensors"].values())
    return {"wrong": torch.tensor(wrong), "wrote": torch.tensor(wrote)}
