"""How many rows there are in a batch of the whole run, of a device and of a micro-batch: one equation."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

from trainformer.core.errors import BadArgument


@dataclass(frozen=True)
class BatchSizes:
    """Sizes that fit together: `total` = `per_device` * `data_shards` * `accumulation`.

    `total` are the rows of one optimizer step, `evaluation` those of one batch of an evaluation, on all devices.
    """

    total: int
    per_device: int
    accumulation: int
    data_shards: int
    evaluation: int


def solve_batch_sizes(sizes: Mapping[str, Any], passed: Collection[str], data_shards: int) -> BatchSizes:
    """The sizes on a mesh with so many data shards (dp * fsdp). What was not passed follows from what was.

    `sizes` are fields of the arguments. The default of one never contradicts another that was passed.
    """
    total, per_device, accumulation = (
        sizes[name] if name in passed else None
        for name in ("total_batch_size", "per_device_train_batch_size", "gradient_accumulation_steps")
    )
    if total is None:
        per_device = per_device or sizes["per_device_train_batch_size"]
        accumulation = accumulation or sizes["gradient_accumulation_steps"]
        total = per_device * data_shards * accumulation
    elif per_device is None:
        accumulation = accumulation or sizes["gradient_accumulation_steps"]
        per_device, rest = divmod(total, data_shards * accumulation)
        if rest:
            raise _uneven(total, "gradient_accumulation_steps", accumulation, data_shards)
    elif accumulation is None:
        accumulation, rest = divmod(total, data_shards * per_device)
        if rest:
            raise _uneven(total, "per_device_train_batch_size", per_device, data_shards)
    elif total != per_device * data_shards * accumulation:
        raise _contradiction(total, per_device, accumulation, data_shards)
    return BatchSizes(total, per_device, accumulation, data_shards, _evaluation(sizes, passed, data_shards))


def _evaluation(sizes: Mapping[str, Any], passed: Collection[str], data_shards: int) -> int:
    per_device, whole = sizes["per_device_eval_batch_size"], sizes["eval_batch_size"]
    if whole is None:
        return per_device * data_shards
    if "per_device_eval_batch_size" in passed and per_device * data_shards != whole:
        raise BadArgument(
            f"Expected eval_batch_size = per_device_eval_batch_size * (dp * fsdp), received {whole} and {per_device} * "
            f"{data_shards} = {per_device * data_shards}. Pass one of the two."
        )
    if whole % data_shards:
        raise BadArgument(
            f"Expected eval_batch_size to be a multiple of the {data_shards} data shards (dp * fsdp), received {whole}."
        )
    return whole


def _uneven(total: int, name: str, value: int, data_shards: int) -> BadArgument:
    unit = value * data_shards
    near = f"{unit}" if total < unit else f"{total // unit * unit} or {(total // unit + 1) * unit}"
    return BadArgument(
        f"Expected total_batch_size to be a multiple of {name} * (dp * fsdp) = {value} * {data_shards} = {unit}, "
        f"received {total}. Pass total_batch_size={near}, or another {name} or sharding_array."
    )


def _contradiction(total: int, per_device: int, accumulation: int, data_shards: int) -> BadArgument:
    product = per_device * data_shards * accumulation
    ways = [f"total_batch_size={product}"]
    if total % (data_shards * accumulation) == 0:
        ways.append(f"per_device_train_batch_size={total // (data_shards * accumulation)}")
    if total % (data_shards * per_device) == 0:
        ways.append(f"gradient_accumulation_steps={total // (data_shards * per_device)}")
    if total % (per_device * accumulation) == 0:
        ways.append(f"a sharding_array with dp * fsdp = {total // (per_device * accumulation)}")
    return BadArgument(
        "Expected total_batch_size = per_device_train_batch_size * (dp * fsdp) * gradient_accumulation_steps, received "
        f"{total} on the left and {per_device} * {data_shards} * {accumulation} = {product} on the right. "
        f"Pass {', or '.join(ways)}; or leave one of them out, and it follows from the others."
    )
