"""Helpers for nested records (averaging, flattening, one-transfer reads), tensors in structures, and ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from trainformer.backends.torch.placement import map_tensors
from trainformer.core.errors import BadArgument, expected
from trainformer.utils.distributed import world_size


def map_nested_tensor(function: Callable[[Tensor], Any], input: Any) -> Any:
    """Apply `function` to every tensor in a nested structure. Mappings become dicts.

    >>> map_nested_tensor(lambda t: t.sum(), {"x": torch.ones(3), "y": [torch.ones(2), "name"]})
    {'x': tensor(3.), 'y': [tensor(2.), 'name']}
    """
    return map_tensors(function, input)


def key_average(records: Iterable[Mapping[str, Any]], exclude_nan: bool = False) -> dict[str, Any]:
    """The mean of every value over the records that have it, with the same nesting.

    Values are numbers or one-element tensors; None counts as missing, and so does NaN with `exclude_nan`, unless there
    is nothing else. Tensors are read in one transfer.

    >>> key_average([{"loss": 1.0, "metrics": {"f1": 0.5}}, {"loss": 2.0}])
    {'loss': 1.5, 'metrics': {'f1': 0.5}}
    >>> key_average([{"loss": 1.0}, {"loss": float("nan")}], exclude_nan=True)
    {'loss': 1.0}
    """
    found: dict[tuple[str, ...], list[Any]] = {}
    for record in records:
        for path, value in leaves(record):
            if value is not None:
                found.setdefault(path, []).append(value)
    values = iter(as_floats([value for kept in found.values() for value in kept]))
    average: dict[str, Any] = {}
    for path, kept in found.items():
        numbers = [next(values) for _ in kept]
        if exclude_nan:
            numbers = [number for number in numbers if not math.isnan(number)] or [math.nan]
        # fsum is exact but raises for inf - inf, where plain addition gives NaN.
        total = math.fsum(numbers) if all(map(math.isfinite, numbers)) else sum(numbers)
        put(average, path, total / len(numbers))
    return average


def leaves(record: Mapping[str, Any], above: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Any]]:
    """All values of a nested record with their key paths."""
    for key, value in record.items():
        if isinstance(value, Mapping):
            yield from leaves(value, (*above, key))
        else:
            yield (*above, key), value


def put(tree: dict[str, Any], path: tuple[str, ...], value: Any) -> None:
    """Set a value at a key path. Raises if a key is a value in one record and a mapping in another."""
    place = tree
    for key in path[:-1]:
        place = place.setdefault(key, {})
        if not isinstance(place, dict):
            raise BadArgument(expected(f"{key!r} to be a mapping in all records", "a value in some of them"))
    if isinstance(place.get(path[-1]), dict):
        raise BadArgument(expected(f"{path[-1]!r} to be a value in all records", "a mapping in some of them"))
    place[path[-1]] = value


def flattened(record: Mapping[str, Any], separator: str = ".") -> dict[str, Any]:
    """A nested record with joined names.

    >>> flattened({"loss": 1.0, "metrics": {"f1": 0.5}})
    {'loss': 1.0, 'metrics.f1': 0.5}
    """
    return {separator.join(map(str, path)): value for path, value in leaves(record)}


def flatten_nested_dict(d: Mapping[str, Any], parent_key: tuple[str, ...] | None = None) -> dict[tuple[str, ...], Any]:
    """A nested dict with tuples of names as keys.

    >>> flatten_nested_dict({"loss": 1.0, "metrics": {"f1": 0.5}})
    {('loss',): 1.0, ('metrics', 'f1'): 0.5}
    """
    return dict(leaves(d, parent_key or ()))


def as_numbers(record: Mapping[str, Any]) -> dict[str, Any]:
    """The record as floats, with all tensors read in one transfer; None values are dropped."""
    return key_average([record])


def step_values(info: Mapping[str, Any]) -> dict[str, Any]:
    """`step_info` with one number per step: the means over micro-batches, and all of the time spent waiting for data.

    Tensors stay on their device. What hooks added is left out if it is no number.
    """
    values: dict[str, Any] = {
        name: v for name, v in info.items() if isinstance(v, Real) or (isinstance(v, Tensor) and v.numel() == 1)
    }
    values["records"] = mean_records(info.get("records", []))
    losses = info.get("loss", [])
    values["loss"] = _mean(losses) if losses else None
    if "data_time" in info:
        values["data_time"] = sum(info["data_time"])
    return values


def _mean(losses: Sequence[Any]) -> Any:
    if len(losses) == 1:
        return losses[0]
    stacked = torch.stack(list(losses))
    # In double precision (except on MPS), as everywhere: all paths must compute the same mean.
    return stacked.mean() if stacked.device.type == "mps" else stacked.double().mean()


def mean_records(records: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The key-wise mean over micro-batches. Tensors are averaged on their device."""
    if len(records) == 1:
        return dict(records[0])
    average: dict[str, Any] = {}
    for key in dict.fromkeys(key for record in records for key in record):
        values = [record[key] for record in records if record.get(key) is not None]
        if any(isinstance(value, Mapping) for value in values):
            average[key] = mean_records([value for value in values if isinstance(value, Mapping)])
        elif values:
            average[key] = sum(values[1:], start=values[0]) / len(values)
    return average


def as_floats(values: Sequence[Any]) -> list[float]:
    """Numbers and one-element tensors as floats. Tensors of one dtype and device are read in one transfer."""
    kinds: dict[tuple[torch.dtype, torch.device], list[Tensor]] = {}
    for value in values:
        if isinstance(value, Tensor):
            kinds.setdefault((value.dtype, value.device), []).append(value.reshape(()) if value.ndim else value)
    with torch.no_grad():
        read = {kind: iter(torch.stack(tensors).tolist()) for kind, tensors in kinds.items()}
    return [float(next(read[v.dtype, v.device]) if isinstance(v, Tensor) else v) for v in values]


def mean_over_ranks(record: dict[str, Any]) -> dict[str, Any]:
    """The mean of a record over all ranks, which must all call this.

    A value that some ranks lack is averaged over those that have it.
    """
    if world_size() == 1:
        return record
    records: list[Any] = [None] * world_size()
    dist.all_gather_object(records, record)
    return key_average(records)


def max_over_ranks(value: float) -> float:
    """The largest value of all ranks, which must all call this."""
    if world_size() == 1:
        return value
    values: list[Any] = [None] * world_size()
    dist.all_gather_object(values, value)
    return max(values)


def broadcast(value: Any) -> Any:
    """The value of rank 0."""
    if world_size() == 1:
        return value
    box = [value]
    dist.broadcast_object_list(box)
    return box[0]


def barrier() -> None:
    """Wait for all ranks."""
    if world_size() > 1:
        dist.barrier()


def checked_records(records: Any) -> dict[str, Any]:
    """The records of `forward`, detached. Raises if they are not nested dicts of numbers."""
    if records is None:
        return {}
    if not isinstance(records, Mapping):
        do = 'Return (loss, {"accuracy": 0.9}), or (loss, {}) for none.'
        raise BadArgument(expected("forward() to return its records as a dict", type(records).__name__, do))
    return {str(key): _checked(str(key), value) for key, value in records.items()}


def _checked(name: str, value: Any) -> Any:
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.detach().reshape(())
    if isinstance(value, Mapping):
        return {str(key): _checked(f"{name}.{key}", item) for key, item in value.items()}
    if isinstance(value, (Real, type(None))):
        return value
    what = f"a tensor of shape {tuple(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
    do = "Take a mean, or log it with self.log_images() or your own logger."
    raise BadArgument(expected(f"the record {name!r} to be a number or a one-element tensor", what, do))


def check_integer(name: str, value: Any, minimum: int) -> int:
    """The value, if it is an integer of at least `minimum`."""
    if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
        raise BadArgument(expected(f"{name} to be an integer of at least {minimum}", value))
    return value
