"""Several processes as HuggingFace's arguments know them: which of them this is, and how they are to train together.

Owns the arguments that speak of processes. How ranks meet, and what a strategy does, is the backend's business.
"""

from __future__ import annotations

import os
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist

from trainformer.core.errors import BadArgument, TrainformerError, expected
from trainformer.distributed import Launch, TorchProcessGroup, make_strategy

#: What `accelerator_config` has beside `dispatch_batches`, and the values that ask for what is done anyway.
_AS_USUAL: dict[str, tuple[Any, ...]] = {
    "split_batches": (False,),
    "even_batches": (True, False),  # uneven ends are computed exactly, which is what both are for
    "use_seedable_sampler": (True, False),
    "non_blocking": (True, False),
    "data_seed": (None,),
    "gradient_accumulation_kwargs": (None,),
    "use_configured_state": (False,),
}


def this_process() -> Launch:
    """Which process this is: of the group that it has joined, else of those that were started with it."""
    if dist.is_available() and dist.is_initialized():
        return Launch(dist.get_rank(), dist.get_world_size(), int(os.environ.get("LOCAL_RANK", dist.get_rank())))
    return Launch.find()


@contextmanager
def one_first(process_group: TorchProcessGroup, is_first: bool) -> Iterator[None]:
    """Some processes go first, and the others find their work done. If one of the first fails, all of them do."""
    if not is_first:
        _raise_any(process_group.all_gather_object(None))
    failure: str | None = None
    try:
        yield
    except BaseException as error:
        failure = f"rank {process_group.rank}: {type(error).__name__}: {error}"
        raise
    finally:
        if is_first:
            process_group.all_gather_object(failure)


def _raise_any(failures: list[str | None]) -> None:
    told = [failure for failure in failures if failure is not None]
    if told:
        raise TrainformerError(f"The processes that were to go first failed. {'; '.join(told)}")


def strategy_choice(wanted: Any, args: Any) -> Any:
    """What a trainer's class and its arguments say of a strategy, as `make_strategy` takes it."""
    given = dict(args.strategy_options or {})
    if not isinstance(wanted, (str, Mapping)):  # one that is made already, or an Accelerator
        if given:
            do = "Set them where you make the strategy."
            raise BadArgument(expected("no strategy_options for a strategy that is made already", given, do))
        return wanted
    options = {"name": wanted} if isinstance(wanted, str) else dict(wanted)
    kind = make_strategy(options["name"]).name
    if kind == "ddp":
        options |= {"name": kind, **_ddp_options(args)}
    elif kind != "single" and _ddp_options(args):
        name = next(name for name in _DDP if getattr(args, name) is not None)
        do = "Use DDPTrainer, or say it in strategy_options."
        raise BadArgument(expected(f"no {name} with the strategy {kind!r}", getattr(args, name), do))
    options |= given
    return wanted if set(options) == {"name"} else options


_DDP = ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers")


def _ddp_options(args: Any) -> dict[str, Any]:
    options: dict[str, Any] = {}
    if args.ddp_find_unused_parameters is not None:
        options["find_unused_parameters"] = args.ddp_find_unused_parameters
    if args.ddp_bucket_cap_mb is not None:
        options["bucket_cap_mb"] = args.ddp_bucket_cap_mb
    if args.ddp_broadcast_buffers is not None:
        # Either the ranks' statistics are those of rank 0, or they are taken over all ranks and are equal anyway.
        options["sync_batchnorm"] = not args.ddp_broadcast_buffers
    return options


def check_arguments(args: Any) -> None:
    """Refuse arguments on processes that cannot be obeyed."""
    if args.ddp_backend not in (None, "gloo", "nccl"):
        words = "ddp_backend to be 'gloo' (which CPUs use here), 'nccl' (which GPUs use) or None"
        raise BadArgument(expected(words, args.ddp_backend))
    if not isinstance(args.ddp_timeout, (int, float)) or args.ddp_timeout <= 0:
        raise BadArgument(expected("ddp_timeout to be a positive number of seconds", args.ddp_timeout))
    options = getattr(args, "strategy_options", None)
    if options is not None and not isinstance(options, Mapping):
        raise BadArgument(expected("strategy_options to be a mapping, such as {'cpu_offload': True}", options))


def with_dispatching(given: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """Arguments in which `dispatch_batches` says what HuggingFace's users write into `accelerator_config`."""
    config: Any = given.get("accelerator_config")
    values = config.to_dict() if hasattr(config, "to_dict") else config
    if not isinstance(values, Mapping) or "dispatch_batches" not in known:
        return dict(given)
    for name, value in values.items():
        if name != "dispatch_batches" and value not in _AS_USUAL.get(name, ()):
            do = "Set per_device_train_batch_size instead." if name == "split_batches" else "Leave it out."
            words = "accelerator_config to ask for no more than dispatch_batches"
            raise BadArgument(expected(words, f"{name}={value!r}", do))
    rest = {name: value for name, value in given.items() if name != "accelerator_config"}
    return {"dispatch_batches": bool(values.get("dispatch_batches")), **rest}
