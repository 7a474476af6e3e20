"""A mini trainer on several ranks; each returns its results."""

import torch
import torch.distributed as dist
from mini_toys import Classifier, Keeper
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler, TensorDataset

from toys import classes, mlp
from trainformer.mini import BaseHook, CheckpointingHook, LoggingHook, ProgressHook

STEPS = 3


class Distributed(Classifier):
    """Data sharded over the ranks; counts gradient all-reduces."""

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


class Sharded(Distributed):
    """The model sharded with FSDP2."""

    def build_model(self):
        model = mlp()
        for part in (*(layer for layer in model if isinstance(layer, nn.Linear)), model):
            fully_shard(part)
        return model


class DryRuns(BaseHook):
    """Records which logs are not dry runs."""

    def __init__(self):
        self.dry, self.losses, self.all = [], [], []

    def on_log(self, trainer, records, dry_run):
        self.dry.append(dry_run)
        self.losses.append(records["train"]["loss"])
        self.all.append(records["train"])


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
        "own": torch.tensor([float(info["loss"]) for info in keeper.infos]),
        "seen": torch.cat(quiet.seen),
        "drawn": torch.tensor([resumed.step]),
    }


def divided_by_the_user(rank, world):
    """Clipped runs with FSDP2 and DDP; the former also resumed from a full state dict."""
    clipped = {"gradient_accumulation_steps": 4, "grad_clip": 0.05}
    replicated, logs = Distributed(STEPS + 2, **clipped), DryRuns()
    replicated.train()
    options = {**clipped, "workspace": "divided"}
    Sharded(STEPS, hooks=[CheckpointingHook(2)], **options).train()
    options["state_dict_options"] = StateDictOptions(full_state_dict=True)  # what is done anyway
    taken_up = Sharded(STEPS + 2, hooks=[CheckpointingHook(2), LoggingHook(1), logs], **options)
    taken_up.train()
    norms = [r["grad_norm"] for r in logs.all]
    return {"weights": flat(replicated.model), "divided": flat(taken_up.model), "norms": torch.tensor(norms)}


def flat(model: nn.Module):
    """All parameters, gathered if they are sharded."""
    whole = [p.full_tensor() if hasattr(p, "full_tensor") else p for p in model.parameters()]
    return torch.cat([p.detach().flatten() for p in whole])
