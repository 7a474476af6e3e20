"""A mini trainer on several ranks: what each of them found."""

import torch
import torch.distributed as dist
from mini_toys import Classifier, Keeper
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from toys import classes, mlp
from trainformer.mini import BaseHook, CheckpointingHook, LoggingHook, ProgressHook

STEPS = 3


class Distributed(Classifier):
    """Data shared out over the ranks; counts how often gradients are exchanged."""

    exchanges = 0

    def build_data_loader(self):
        data = TensorDataset(*classes(32))
        return DataLoader(data, batch_size=2, sampler=DistributedSampler(data, shuffle=True, seed=1))

    def build_model(self):
        def counting(state, bucket):
            self.exchanges += 1
            return allreduce_hook(state, bucket)

        model = DistributedDataParallel(mlp())
        model.register_comm_hook(dist.group.WORLD, counting)
        return model


class DryRuns(BaseHook):
    """Notes which logs are real."""

    def __init__(self):
        self.dry, self.losses = [], []

    def on_log(self, trainer, records, dry_run):
        self.dry.append(dry_run)
        self.losses.append(records["loss"])


def gradients_exchanged(rank, world):
    """With and without `no_sync_accumulate`; logs and checkpoints of several ranks."""
    logs = DryRuns()
    keeper = Keeper()
    hooks = [LoggingHook(1), ProgressHook(1, sync=True), logs, keeper, CheckpointingHook(2)]
    quiet = Distributed(STEPS, gradient_accumulation_steps=4, hooks=hooks, workspace="ws")
    quiet.train()
    loud = Distributed(STEPS, gradient_accumulation_steps=4, no_sync_accumulate=False)
    loud.train()
    resumed = Distributed(STEPS + 2, gradient_accumulation_steps=4, hooks=[CheckpointingHook(2)], workspace="ws")
    resumed.train()
    whole = Distributed(STEPS + 2, gradient_accumulation_steps=4)
    whole.train()
    return {
        "exchanges": torch.tensor([quiet.exchanges, loud.exchanges]),
        "weights": flat(quiet.model),
        "loud": flat(loud.model),
        "resumed": flat(resumed.model),
        "whole": flat(whole.model),
        "dry": torch.tensor(logs.dry),
        "logged": torch.tensor(logs.losses),
        "own": torch.stack([info["loss"] for info in keeper.infos]),
        "seen": torch.cat(quiet.seen),
        "drawn": torch.tensor([resumed.step]),
    }


def flat(model: nn.Module):
    return torch.cat([p.detach().flatten() for p in model.parameters()])
