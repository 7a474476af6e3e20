"""Synchronised BatchNorm: statistics over the samples of all ranks, so that the world size does not change the result.

Owns converting a model's BatchNorm layers in place, and an implementation for devices that `torch.nn.SyncBatchNorm`
does not support, above all the CPU. A converted layer keeps its identity: its class becomes a subclass of what it was,
with the same parameters, buffers, hooks and `isinstance`. In evaluation, and with one rank, it behaves as before.

Ranks may have different numbers of samples, and padding (see `utils.distributed.padding`) counts as none.
"""

from __future__ import annotations

import logging
from functools import cache
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

from trainformer.core.errors import DataError, expected
from trainformer.utils.distributed import data_parallel_group, is_padding, world_size

logger = logging.getLogger("trainformer")


def convert_sync_batchnorm(module: nn.Module) -> int:
    """Make every BatchNorm layer in a module compute its statistics over all ranks, in place. Returns their number.

    Call it when the module is on its device: on CUDA `torch.nn.SyncBatchNorm` does the work.

    >>> model = nn.Sequential(nn.Linear(2, 4), nn.BatchNorm1d(4))
    >>> convert_sync_batchnorm(model), type(model[1]).__name__, isinstance(model[1], nn.BatchNorm1d)
    (1, 'SyncBatchNorm1d', True)
    """
    converted = 0
    for layer in list(module.modules()):
        if not isinstance(layer, _BatchNorm):
            continue
        if not isinstance(layer, nn.SyncBatchNorm | _HostSync):
            home = next(chain(layer.parameters(), layer.buffers(), module.parameters()), torch.empty(0)).device.type
            original: Any = type(layer)
            made = _sync_class(original, _TorchSync if home in ("cuda", "xpu") else _HostSync)
            if made is None:
                logger.warning(
                    "%s does not call the BatchNorm it derives from: its statistics stay per rank.", original.__name__
                )
                continue
            layer.__class__ = made
        converted += 1
    return converted


class _Picklable:
    """Copies and pickles a converted layer by the two classes its generated class was made from."""

    _original: type
    _implementation: type
    #: Read and set by `models.heads.single_sample_batchnorm`.
    syncs_statistics = True
    single_sample = False

    def __reduce_ex__(self, _: Any) -> tuple[Any, ...]:
        return _new_layer, (self._original, self._implementation), self.__dict__.copy()


class _HostSync(_Picklable, _BatchNorm):
    """In plain tensor operations, with one collective in the forward and one in the backward pass."""

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or world_size() == 1:
            return super().forward(input)
        self._check_input_dim(input)
        # 2 means "many": all that matters is whether all ranks together have a single sample.
        samples = 0 if is_padding() else 1 if self.single_sample else 2
        mean, square, count, samples = _statistics(input.detach(), samples)
        if samples == 1 and self.running_mean is not None:
            return F.batch_norm(input, self.running_mean, self.running_var, self.weight, self.bias, eps=self.eps)
        if count < 2:
            raise DataError(expected("more than one value per channel on all ranks together, to normalise", count))
        if self.track_running_stats:
            self._track(mean, square / (count - 1))
        inverse = (square / count + self.eps).rsqrt()
        return _Normalise.apply(input, self.weight, self.bias, mean, inverse, count)

    @torch.no_grad()
    def _track(self, mean: Tensor, variance: Tensor) -> None:
        assert self.running_mean is not None
        assert self.running_var is not None
        assert self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        share = 1 / self.num_batches_tracked.item() if self.momentum is None else self.momentum
        self.running_mean.lerp_(mean.to(self.running_mean), share)
        self.running_var.lerp_(variance.to(self.running_var), share)


def _statistics(rows: Tensor, samples: int) -> tuple[Tensor, Tensor, int, int]:
    """Mean and sum of squared deviations per channel over all ranks, and the number of values and samples.

    Ranks exchange means and deviations: a difference of sums of squares would lose precision to cancellation.
    """
    rows = rows.to(torch.promote_types(rows.dtype, torch.float32))
    channels = rows.shape[1]
    count = rows.numel() // channels if samples else 0
    packed = rows.new_zeros(2 * channels + 2)
    if count:
        variance, mean = torch.var_mean(rows, _all_but_channels(rows), correction=0)
        packed[:-2] = torch.cat([mean, variance * count])
    packed[-2], packed[-1] = count, samples
    gathered = [torch.empty_like(packed) for _ in range(world_size())]
    dist.all_gather(gathered, packed, group=data_parallel_group())
    means, squares, sizes = torch.stack(gathered).split([channels, channels, 2], dim=1)
    counts, total = sizes[:, :1], sizes.sum(0)
    mean = (means * counts).sum(0) / total[0].clamp(min=1)
    square = (squares + counts * (means - mean).square()).sum(0)
    return mean, square, int(total[0]), int(total[1])


class _Normalise(torch.autograd.Function):
    """(x - mean) / deviation * weight + bias, with gradients through the mean and deviation of all ranks."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, inverse: Tensor, count: int
    ) -> Tensor:
        ctx.save_for_backward(rows, weight, mean, inverse)
        ctx.count = 0 if is_padding() else count  # the statistics do not depend on padding
        ctx.group = data_parallel_group()
        scale = inverse if weight is None else inverse * weight
        made = (rows.to(mean.dtype) - _shaped(mean, rows)) * _shaped(scale, rows)
        return (made if bias is None else made + _shaped(bias, rows)).to(rows.dtype)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        rows, weight, mean, inverse = ctx.saved_tensors
        others = _all_but_channels(rows)
        gradient = gradient.to(mean.dtype)
        unit = (rows.to(mean.dtype) - _shaped(mean, rows)) * _shaped(inverse, rows)
        by_bias, by_weight = gradient.sum(others), (gradient * unit).sum(others)
        by_rows = None
        if ctx.needs_input_grad[0]:
            total = torch.cat([by_bias, by_weight])
            dist.all_reduce(total, group=ctx.group)
            if ctx.count:
                through_mean, through_deviation = (_shaped(part, rows) for part in (total / ctx.count).chunk(2))
                gradient = gradient - through_mean - unit * through_deviation
            by_rows = (gradient * _shaped(inverse if weight is None else inverse * weight, rows)).to(rows.dtype)
        # Gradients of weight and bias cover this rank's samples; DDP averages them with all the others.
        own = zip((by_weight, by_bias), ctx.needs_input_grad[1:3], strict=True)
        return by_rows, *(part.to(weight.dtype) if wanted else None for part, wanted in own), None, None, None


class _TorchSync(_Picklable, nn.SyncBatchNorm):
    """`torch.nn.SyncBatchNorm` that ignores padding. (It syncs with the device in every forward pass.)"""

    process_group = property(lambda self: data_parallel_group())  # type: ignore[assignment]  # a group cannot be pickled

    def forward(self, input: Tensor) -> Tensor:
        if not self.training or world_size() == 1 or not (is_padding() or self.single_sample):
            return super().forward(input)
        # All ranks together may have a single value, whose unbiased variance is undefined.
        kept = [None if buffer is None else buffer.clone() for buffer in (self.running_mean, self.running_var)]
        if is_padding():
            # No rows, in the dtype in which the other ranks send their statistics (torch takes it from the input).
            empty = super().forward(input[:0].to(torch.promote_types(input.dtype, torch.float32)))
            # Output of ordinary magnitude: it has weight 0, but 0 * inf would be NaN.
            if kept[0] is None:
                output = F.group_norm(input, 1, self.weight, self.bias, self.eps)
            else:
                output = F.batch_norm(input, kept[0], kept[1], self.weight, self.bias, eps=self.eps)
            output = output + empty.sum().to(input.dtype)
        else:
            output = super().forward(input)
        if self.running_mean is not None and self.running_var is not None:
            exists = self.running_var.isfinite()
            self.running_mean.copy_(torch.where(exists, self.running_mean, kept[0]))  # type: ignore[arg-type]
            self.running_var.copy_(torch.where(exists, self.running_var, kept[1]))  # type: ignore[arg-type]
        return output


class _TimmActivation:
    """For timm's BatchNorm with activation, which copies torch's code instead of calling it."""

    def forward(self: Any, input: Tensor) -> Tensor:
        return self.act(self.drop(self._implementation.forward(self, input)))


@cache
def _sync_class(original: Any, implementation: Any) -> Any:
    """A subclass of a BatchNorm class with synchronised statistics; None if its `forward` does not call torch's.

    `implementation` comes after `original` in the MRO and before torch's `forward`, so what a user's class adds to
    BatchNorm still applies.
    """
    bases: tuple[type, ...] = (original, implementation)
    forward = original.forward
    if forward is not _BatchNorm.forward:
        if forward.__qualname__ == "BatchNormAct2d.forward":
            bases = (_TimmActivation, original, implementation)
        elif "super" not in getattr(getattr(forward, "__code__", None), "co_names", ()):
            return None
    members = {"_original": original, "_implementation": implementation, "__module__": __name__}
    return type(f"Sync{original.__name__}", bases, members)


def _new_layer(original: type, implementation: type) -> Any:
    made = _sync_class(original, implementation)
    return made.__new__(made)


def _all_but_channels(rows: Tensor) -> list[int]:
    return [0, *range(2, rows.ndim)]


def _shaped(values: Tensor, rows: Tensor) -> Tensor:
    """Per-channel values in a shape that broadcasts against the rows."""
    return values.view(1, -1, *[1] * (rows.ndim - 2))
