"""Ranks that write checkpoints together, of which one fails now and then."""

import threading
from pathlib import Path

import torch

from trainformer.checkpointing import CheckpointStore, Manifest
from trainformer.checkpointing.multi_rank import MultiRankWriter
from trainformer.core.errors import TrainformerError
from trainformer.distributed import TorchProcessGroup


def writing(rank, world):
    """How each save ended here: 0 for well, 1 if the reason was told, 2 for anything else."""
    ranks = TorchProcessGroup(rank, world, rank)
    store = CheckpointStore(Path("checkpoints").absolute())
    shared = MultiRankWriter(store, ranks, timeout=600)
    ended = []
    for step, who in enumerate((None, 1, 0, None), start=1):

        def fill(folder, step=step, who=who):
            (folder / f"own.rank{rank}.txt").write_text(f"{rank} at {step}")
            if rank == who:
                raise OSError("no space left here")
            return {"own": [f"own.rank{rank}.txt"]}

        try:
            shared.write(shared.begin(step), Manifest(step=step, components={}, world_size=world), fill)
            ended.append(0)
        except OSError as error:
            ended.append(1 if f"rank {who}: no space left here" in str(error) else 2)
        ranks.all_gather_object(None)
    return {"ended": torch.tensor(ended), "told": told_by_main(ranks)}


def ended_early(rank, world):
    """Whether rank 0 gives up a background save that another rank never joins, once the run has ended."""
    ranks = TorchProcessGroup(rank, world, rank)
    shared = MultiRankWriter(CheckpointStore(Path("checkpoints").absolute()), ranks, timeout=600)
    problems = []

    def save(draft):
        try:
            shared.write(draft, Manifest(step=1, components={}, world_size=world), lambda folder: {})
        except OSError as error:
            problems.append(str(error))

    with ranks.monitoring(timeout=600):
        draft = shared.begin(1)
        thread = threading.Thread(target=save, args=(draft,), daemon=True)
        if rank == 0:
            thread.start()
        ranks.all_gather_object(None)
    if rank == 0:
        thread.join(300)
    ranks.all_gather_object(None)
    return {"given up": torch.tensor("the run ended" in "".join(problems)), "draft": torch.tensor(draft.exists())}


def told_by_main(ranks):
    """The number that rank 0 found, and whether its failure reached this rank in its own words."""
    found = ranks.run_on_main(lambda: 7 + ranks.rank)
    try:
        ranks.run_on_main(lambda: [].pop())
    except (IndexError, TrainformerError) as error:
        return torch.tensor([found, "pop from empty list" in str(error)])
