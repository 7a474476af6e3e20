"""BatchNorm layers in some processes with unequal shares of a batch, and in one process with all of it."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from timm.layers import BatchNormAct2d
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ranks import all_reduced, share_of
from trainformer.core.errors import DataError
from trainformer.distributed.sync_batchnorm import convert_sync_batchnorm
from trainformer.models.heads import BNNeck, MLPHead, single_sample_batchnorm
from trainformer.models.momentum import MomentumCopy
from trainformer.utils.distributed import padding

BATCH, STEPS = 10, 3
HOME = {"device": "cpu"}
LAYERS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "1d": (lambda: nn.BatchNorm1d(5), ()),
    "sequence": (lambda: nn.BatchNorm1d(5, momentum=0.3, eps=0.1), (4,)),
    "2d": (lambda: nn.BatchNorm2d(5, momentum=None), (3, 2)),
    "3d": (lambda: nn.BatchNorm3d(5, affine=False), (2, 1, 3)),
    "frozen": (lambda: nn.BatchNorm1d(5).requires_grad_(False), ()),
    "untracked": (lambda: nn.BatchNorm2d(5, track_running_stats=False), (2, 2)),
    "neck": (lambda: BNNeck(5), ()),
    "timm": (lambda: BatchNormAct2d(5), (2, 3)),
    "follower": (lambda: MomentumCopy(nn.BatchNorm1d(5)), ()),
}


def images(*sizes: int, seed: int = 0) -> Tensor:
    """A batch far from zero, where sums of squares lose their digits."""
    rows = torch.randn(sizes, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * 2 + 30
    return rows.to(HOME["device"])


def layer_of(name: str) -> nn.Module:
    """A layer whose scale and shift are not those of the beginning."""
    layer = LAYERS[name][0]().to(HOME["device"], torch.float64)
    for place, parameter in enumerate(layer.parameters()):
        parameter.data.copy_(torch.linspace(0.5, 1.5 + place, 5))
    assert convert_sync_batchnorm(layer) == 1
    return layer


def results(rank: int, world: int) -> dict[str, Tensor]:
    """Everything, with one start of the processes."""
    found: dict[str, Tensor] = {}
    for name in LAYERS:
        found |= trained(name, rank, world)
    found |= in_ddp(rank, world) | with_padding(rank, world)
    return found if HOME["device"] == "cuda" else found | with_one_sample(rank, world)


def results_on_cuda(rank: int, world: int) -> dict[str, Tensor]:
    """The same on one GPU, which the processes share: gloo, unlike NCCL, lets them."""
    HOME["device"] = "cuda"
    found = {name: value.cpu() for name, value in results(rank, world).items()}
    layer = layer_of("1d")
    with padding() if rank else single_sample_batchnorm(layer, size=1):
        layer(images(1, 5))
    return found | {
        "finite": layer.running_var.isfinite().all().cpu(),
        "kind": torch.tensor(isinstance(layer, nn.SyncBatchNorm)),
    }


def trained(name: str, rank: int, world: int) -> dict[str, Tensor]:
    """Outputs and gradients of some steps, then the statistics, then an output in evaluation."""
    layer = layer_of(name)
    share = share_of(BATCH, rank, world)
    found: dict[str, Tensor] = {}
    for step in range(STEPS):
        sizes = (BATCH, 5, *LAYERS[name][1])
        rows = images(*sizes, seed=step)[share].requires_grad_()
        output = layer(rows)
        if output.requires_grad:
            (output * images(*sizes, seed=9)[share] + output**3).sum().backward()
            found[f"rows.{name}.{step}.gradient"] = rows.grad  # type: ignore[assignment]
        found[f"rows.{name}.{step}.output"] = output.detach()
    learned = {f"{name}.{key}.gradient": p.grad for key, p in layer.named_parameters() if p.grad is not None}
    found |= all_reduced(learned) | {f"{name}.{key}": value for key, value in layer.state_dict().items()}
    if name == "untracked":
        return found  # evaluates with the statistics of what it is given, as ever
    return found | {f"rows.{name}.evaluated": layer.eval()(rows).detach()}


def network() -> nn.Module:
    """A small network with BatchNorm in it."""
    torch.manual_seed(0)
    model = nn.Sequential(MLPHead([5, 8, 6], last_norm=True), nn.Tanh(), nn.Linear(6, 1))
    model = model.to(HOME["device"], torch.float64)
    assert convert_sync_batchnorm(model) == 2
    return model


def in_ddp(rank: int, world: int) -> dict[str, Tensor]:
    """Weights after steps of two batches each, with torch's own wrapper; its gradients are means over ranks."""
    model = network()
    wrapped = DistributedDataParallel(model) if world > 1 else model
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(STEPS):
        for last in (False, True):
            rows = images(BATCH, 5, seed=2 * step + last)[share_of(BATCH, rank, world)]
            if isinstance(wrapped, DistributedDataParallel) and not last:
                with wrapped.no_sync():
                    (wrapped(rows).square().sum() * world / BATCH).backward()
            else:
                (wrapped(rows).square().sum() * world / BATCH).backward()
        optimizer.step()
        optimizer.zero_grad()
    return {f"ddp.{name}": value for name, value in model.state_dict().items()}


def with_padding(rank: int, world: int) -> dict[str, Tensor]:
    """Gradients and statistics of a batch that has nothing for the last rank."""
    model = network()
    if world == 1 or rank < world - 1:
        share = slice(0, BATCH) if world == 1 else share_of(BATCH, rank, world - 1)
        model(images(BATCH, 5)[share]).square().sum().backward()
    else:
        with padding():
            output = model(images(1, 5) * 7)
        assert output.isfinite().all()
        (output.sum() * 0).backward()
    gradients = {f"padded.{name}.gradient": p.grad for name, p in model.named_parameters()}
    return all_reduced(gradients) | {f"padded.{name}": value for name, value in model.state_dict().items()}  # type: ignore[arg-type]


def with_one_sample(rank: int, world: int) -> dict[str, Tensor]:
    """The statistics, and the output of the first rank, after a batch of a single sample: first a padded one.

    One rank has the sample and the others padding. Then each has one, which makes several.
    """
    model = network()
    model(images(8, 5)[share_of(8, rank, world)])  # gives running statistics
    sample = images(1, 5, seed=5)
    if rank == 0:
        with single_sample_batchnorm(model, size=1):
            output = model(sample)
    else:
        with padding(), single_sample_batchnorm(model, size=1):
            output = model(sample * 3)
    output.sum().backward()
    found = {f"single.{name}": value.clone() for name, value in model.state_dict().items()}
    found["single.output"] = output.detach() if rank == 0 else torch.zeros(1, 1, dtype=torch.float64)
    found = all_reduced(found)
    found = {name: value / (1 if name.endswith("output") else world) for name, value in found.items()}
    if world > 1:
        with single_sample_batchnorm(model, size=1):
            found["several"] = model(images(world, 5, seed=6)[rank : rank + 1]).detach()
        # Not one value per channel more than a variance needs, and nothing to go by: all ranks say so.
        bare = nn.BatchNorm1d(5, track_running_stats=False).double()
        convert_sync_batchnorm(bare)
        if rank == 0:
            with pytest.raises(DataError, match="more than one value per channel"):
                bare(sample)
        else:
            with padding(), pytest.raises(DataError, match="more than one value per channel"):
                bare(sample)
        dist.barrier()
    return found
