"""Batch sizes of a run on JAX, from whichever of them were passed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from trainformer.core.errors import BadArgument, expected

if TYPE_CHECKING:
    from trainformer.jax.arguments import TrainingArguments


@dataclass(frozen=True)
class BatchSizes:
    """Batch sizes in rows: `total` = `per_device` * `data_shards` * `accumulation`.

    `total` is one optimizer step and `evaluation` one evaluation batch, over all devices.
    """

    total: int
    per_device: int
    accumulation: int
    data_shards: int
    evaluation: int


def resolve_batch_sizes(arguments: TrainingArguments, data_shards: int) -> BatchSizes:
    """Batch sizes on a mesh with `data_shards` = dp * fsdp * ep.

    Sizes that were not passed follow from those that were. A default never contradicts a passed value, and neither
    does ``gradient_accumulation_steps=1``: if `total_batch_size` has more rows than the devices, they are accumulated.
    """
    names = ("total_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    passed = arguments.passed
    total, per_device, accumulation = (getattr(arguments, name) if name in passed else None for name in names)
    if total is None:
        per_device = per_device or arguments.per_device_train_batch_size
        accumulation = accumulation or arguments.gradient_accumulation_steps
        total = per_device * data_shards * accumulation
    elif per_device is None:
        accumulation = accumulation or arguments.gradient_accumulation_steps
        per_device, rest = divmod(total, data_shards * accumulation)
        if rest:
            raise _not_divisible(total, "gradient_accumulation_steps", accumulation, data_shards)
    elif accumulation is None:
        accumulation, rest = divmod(total, data_shards * per_device)
        if rest:
            raise _not_divisible(total, "per_device_train_batch_size", per_device, data_shards)
    elif accumulation == 1 and total > per_device * data_shards and total % (per_device * data_shards) == 0:
        accumulation = total // (per_device * data_shards)
    elif total != per_device * data_shards * accumulation:
        raise _contradiction(total, per_device, accumulation, data_shards)
    return BatchSizes(total, per_device, accumulation, data_shards, _eval_size(arguments, data_shards))


def _eval_size(arguments: TrainingArguments, data_shards: int) -> int:
    per_device, total = arguments.per_device_eval_batch_size, arguments.eval_batch_size
    if total is None:
        return per_device * data_shards
    if "per_device_eval_batch_size" in arguments.passed and per_device * data_shards != total:
        raise BadArgument(
            f"Expected eval_batch_size = per_device_eval_batch_size * (dp * fsdp * ep), received {total} and "
            f"{per_device} * {data_shards} = {per_device * data_shards}. Pass one of the two."
        )
    if total % data_shards:
        what = f"eval_batch_size to be a multiple of the {data_shards} data shards (dp * fsdp * ep)"
        raise BadArgument(expected(what, total))
    return total


def _not_divisible(total: int, name: str, value: int, data_shards: int) -> BadArgument:
    unit = value * data_shards
    nearest = f"{unit}" if total < unit else f"{total // unit * unit} or {(total // unit + 1) * unit}"
    return BadArgument(
        f"Expected total_batch_size to be a multiple of {name} * (dp * fsdp * ep) = {value} * {data_shards} = {unit}, "
        f"received {total}. Pass total_batch_size={nearest}, or another {name} or sharding_array."
    )


def _contradiction(total: int, per_device: int, accumulation: int, data_shards: int) -> BadArgument:
    product = per_device * data_shards * accumulation
    fixes = [f"total_batch_size={product}"]
    if total % (data_shards * accumulation) == 0:
        fixes.append(f"per_device_train_batch_size={total // (data_shards * accumulation)}")
    if total % (data_shards * per_device) == 0:
        fixes.append(f"gradient_accumulation_steps={total // (data_shards * per_device)}")
    if total % (per_device * accumulation) == 0:
        fixes.append(f"a sharding_array with dp * fsdp * ep = {total // (per_device * accumulation)}")
    return BadArgument(
        "Expected total_batch_size = per_device_train_batch_size * (dp * fsdp * ep) * gradient_accumulation_steps, "
        f"received {total} on the left and {per_device} * {data_shards} * {accumulation} = {product} on the right. "
        f"Pass {', or '.join(fixes)}; or leave one of them out to have it computed."
    )
