"""The arguments of HF for distributed training: the rank of this process, and the options of the strategy."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from trainformer.core.errors import BadArgument, TrainformerError, did_you_mean, expected
from trainformer.distributed import Launch, TorchProcessGroup, make_strategy

if TYPE_CHECKING:
    from trainformer.hf.arguments import BaseTrainingArguments


@dataclass
class AcceleratorConfig:
    """Options of HF's `accelerator_config`.

    >>> AcceleratorConfig.read({"dispatch_batches": True}).even_batches
    True
    """

    split_batches: bool = False  # batch sizes are those of all ranks together
    dispatch_batches: bool | None = None  # rank 0 reads the data
    even_batches: bool = True  # uneven last batches are computed exactly, with either value
    use_seedable_sampler: bool = True  # the order of the data is always a function of the seed
    non_blocking: bool = False  # transfers always are, where memory is pinned
    gradient_accumulation_kwargs: dict | None = None
    use_configured_state: bool = False

    @classmethod
    def read(cls, value: Any) -> AcceleratorConfig:
        """The config from None, a dict, the path of a JSON file, or the class of transformers."""
        if isinstance(value, type):
            raise NotImplementedError(
                "Tried passing in a callable to `accelerator_config`: pass an instance, not the class."
            )
        if isinstance(value, cls):
            return value
        if isinstance(value, (str, os.PathLike)):
            value = json.loads(Path(value).expanduser().read_text(encoding="utf-8"))
        values = value.to_dict() if hasattr(value, "to_dict") else dict(value or {})
        known = {f.name for f in fields(cls)}
        for name in values:
            if name not in known:
                raise BadArgument(expected("options of accelerator_config", name, did_you_mean(name, known)))
        config = cls(**values)
        if config.use_configured_state and not _has_accelerator_state():
            do = "Create an Accelerator first, or leave it out."
            raise BadArgument(expected("an Accelerator for use_configured_state=True", "none", do))
        return config

    def to_dict(self) -> dict[str, Any]:
        """All options."""
        return asdict(self)


def _has_accelerator_state() -> bool:
    state = sys.modules.get("accelerate.state")
    return state is not None and bool(state.AcceleratorState._shared_state or state.PartialState._shared_state)


def join(args: Any) -> TorchProcessGroup:
    """Join the process group of a run with these arguments."""
    return TorchProcessGroup.join(chosen_device(args), args.ddp_timeout)


def chosen_device(args: Any) -> str | None:
    """The device that the user chose, or None: that of this process."""
    return "cpu" if args.use_cpu else getattr(args, "_chosen_device", None)


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
    chosen: Any = args.strategy_options or {}
    given = dict(chosen)
    if not isinstance(strategy, (str, Mapping)):  # a strategy object or an Accelerator
        if given:
            do = "Set them where you create the strategy."
            raise BadArgument(expected("no strategy_options for a strategy object", given, do))
        return strategy
    options = {"name": strategy} if isinstance(strategy, str) else dict(strategy)
    kind = make_strategy(options["name"]).name
    names = ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")
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
