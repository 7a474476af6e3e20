"""The arguments of HF for distributed training: the rank of this process, and the options of the strategy."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from trainformer.core.errors import BadArgument, TrainformerError, expected
from trainformer.distributed import Launch, TorchProcessGroup, make_strategy

if TYPE_CHECKING:
    from trainformer.hf.arguments import BaseTrainingArguments

#: Options of `accelerator_config` besides `dispatch_batches`, and the values that match what we do anyway.
_ACCEPTED: dict[str, tuple[Any, ...]] = {
    "split_batches": (False,),
    "even_batches": (True, False),  # uneven last batches are computed exactly
    "use_seedable_sampler": (True, False),
    "non_blocking": (True, False),
    "data_seed": (None,),
    "gradient_accumulation_kwargs": (None,),
    "use_configured_state": (False,),
}


def this_process() -> Launch:
    """Rank and world size of this process, by its process group or else by the launcher."""
    if dist.is_available() and dist.is_initialized():
        return Launch(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    return Launch.find()


@contextmanager
def run_first(process_group: TorchProcessGroup, is_first: bool) -> Iterator[None]:
    """Run a block on the ranks with `is_first`, then on the others. If it fails on the former, all ranks raise."""
    if not is_first:
        failures = [failure for failure in process_group.all_gather_object(None) if failure is not None]
        if failures:
            raise TrainformerError(f"The block failed on the processes that run it first. {'; '.join(failures)}")
    failure: str | None = None
    try:
        yield
    except BaseException as error:
        failure = f"rank {process_group.rank}: {type(error).__name__}: {error}"
        raise
    finally:
        if is_first:
            process_group.all_gather_object(failure)


def strategy_spec(strategy: Any, args: BaseTrainingArguments) -> Any:
    """The strategy of a trainer class with the options in its arguments, as `make_strategy` accepts it."""
    given = dict(args.strategy_options or {})
    if not isinstance(strategy, (str, Mapping)):  # a strategy object or an Accelerator
        if given:
            do = "Set them where you create the strategy."
            raise BadArgument(expected("no strategy_options for a strategy object", given, do))
        return strategy
    options = {"name": strategy} if isinstance(strategy, str) else dict(strategy)
    kind = make_strategy(options["name"]).name
    names = ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers")
    ddp = {name: value for name in names if (value := getattr(args, f"ddp_{name}")) is not None}
    if kind == "ddp":
        if "broadcast_buffers" in ddp:
            # Buffers are either broadcast from rank 0, or computed over the global batch and equal anyway.
            ddp["sync_batchnorm"] = not ddp.pop("broadcast_buffers")
        options |= {"name": kind, **ddp}
    elif kind != "single" and ddp:
        name, value = next(iter(ddp.items()))
        do = "Use DDPTrainer, or strategy_options."
        raise BadArgument(expected(f"no ddp_{name} with the strategy {kind!r}", value, do))
    options |= given
    return strategy if set(options) == {"name"} else options


def read_accelerator_config(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """The arguments with `dispatch_batches` in place of HF's `accelerator_config`."""
    config: Any = given.get("accelerator_config")
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping) or "dispatch_batches" not in known:
        return dict(given)
    for name, value in values.items():
        if name != "dispatch_batches" and value not in _ACCEPTED.get(name, ()):
            do = "Set per_device_train_batch_size instead." if name == "split_batches" else "Remove it."
            what = "accelerator_config to set dispatch_batches only"
            raise BadArgument(expected(what, f"{name}={value!r}", do))
    rest = {name: value for name, value in given.items() if name != "accelerator_config"}
    return {"dispatch_batches": bool(values.get("dispatch_batches")), **rest}
