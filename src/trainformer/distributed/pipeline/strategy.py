"""Pipeline parallelism: every rank holds some of the layers, and micro-batches pass through the ranks in turn.

`torch.distributed.pipelining` orders forward and backward passes; `stages` and `microbatches` define what a stage
computes, and `state` gathers checkpoints. Owns assigning stages to ranks, building a schedule for the shapes of a
batch, and what ranks exchange besides activations.

All ranks read the same batches and call the task's `train_step` with them, each as far as its own layers.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import pairwise
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe, ScheduleInterleaved1F1B

from trainformer.backends.torch import gradients
from trainformer.backends.torch.optimizers import named_parameters
from trainformer.backends.torch.placement import map_tensors
from trainformer.backends.torch.state import check_fits
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.types import BackwardDone
from trainformer.distributed.pipeline.microbatches import (
    ActivationSpec,
    LossTerms,
    MicroBatch,
    StageModule,
    autocast_dtype,
    current_autocast,
    loss_terms,
    receive_activations,
    send_activations,
    split_batch,
)
from trainformer.distributed.pipeline.stages import StagedModel
from trainformer.distributed.pipeline.state import GatheredOptimizer, gather_on_main
from trainformer.distributed.process_group import TorchProcessGroup
from trainformer.distributed.strategy import Strategy, unsharded
from trainformer.models.modes import eval_mode
from trainformer.utils.distributed import set_data_parallel_group

_SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B}
#: Schedules to cache, one per batch shape: they hold receive buffers.
_MAX_SCHEDULES = 4


class Pipeline(Strategy):
    """Layers distributed over ranks.

    Args:
        schedule: ``"1f1b"`` (one forward, one backward: the least memory), ``"gpipe"`` (all forward passes, then all
            backward passes) or ``"interleaved"`` (1f1b with several stages per rank: a smaller bubble).
        microbatches: Number of micro-batches per batch; by default the number of stages. More of them shrink the
            pipeline bubble, which takes about (ranks - 1) / (microbatches + ranks - 1) of the time.
        stages_per_rank: Stages of each rank, for ``"interleaved"``; 2 by default.
        split: Number of layers of each stage, or the names of the layers at which stages begin. By default stages are
            balanced by parameters.
    """

    name = "pipeline"

    def __init__(
        self,
        *,
        schedule: str = "1f1b",
        microbatches: int | None = None,
        stages_per_rank: int | None = None,
        split: Sequence[int] | Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        _check_options(schedule, microbatches, stages_per_rank, split)
        self.schedule = schedule
        self.microbatches = microbatches or 0
        self.stages_per_rank = stages_per_rank or (2 if schedule == "interleaved" else 1)
        self.split = split
        self.device = torch.device("cpu")
        self.model: StagedModel | None = None
        self._names: dict[int, str] = {}
        self._keys: list[str] = []
        self._aliases: dict[str, str] = {}
        self._tied: nn.Parameter | None = None
        self._tied_group: Any = None
        self._metrics: list[str] = []
        self._activations: dict[int, ActivationSpec] = {}
        self._probed: tuple[bool, torch.dtype | None] = False, None
        self._schedules: OrderedDict[Any, tuple[list[StageModule], Any]] = OrderedDict()
        self._skip_sync = False
        self._sums: Tensor | None = None

    # -- set-up --------------------------------------------------------------------------------------------

    def setup_environment(self, device: Any, timeout: float) -> torch.device:
        """Join the process group. All ranks compute the same batches."""
        if self.process_group.is_single_process:
            self.process_group = TorchProcessGroup.join(device, timeout)
            self.process_group.dp_rank, self.process_group.dp_world_size = 0, 1
        return self.process_group.local_device(device)

    def prepare(self, task: Any, device: torch.device) -> None:
        """Split the model into stages, and keep those of this rank."""
        rank, world_size = self.process_group.rank, self.process_group.world_size
        self.device = device
        model = task.model
        _check_task(task, self.precision)
        staged = self.model = StagedModel(model)
        stages = world_size * self.stages_per_rank
        staged.split(stages, self.split)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._keys = list(model.state_dict())
        self._aliases = _aliases(model)
        tied = staged.tied()
        self.microbatches = self.microbatches or stages
        count = self.microbatches
        if self.schedule == "1f1b" and count < stages:
            what = f"microbatches to be at least {stages}, one for each stage"
            raise BadArgument(expected(what, count, "Or pass schedule='gpipe'."))
        if self.schedule == "interleaved" and count % max(1, count // world_size):
            what = "microbatches to be a multiple of the number of ranks"
            raise BadArgument(expected(what, count, f"Pass a multiple of {world_size}."))
        if tied is not None and tied.requires_grad and not self.process_group.is_single_process:
            self._tied_group = dist.new_group([0, world_size - 1])
            self._tied = tied if rank in (0, world_size - 1) else None
        staged.keep_stages(set(range(rank, stages, world_size)))
        # All ranks have the same samples, and only the last one computes losses: losses must not gather rows.
        set_data_parallel_group(None if self.process_group.is_single_process else dist.new_subgroups(1)[0])
        super().prepare(task, device)

    @property
    def random_stream(self) -> int:
        """Every rank has its own layers and draws its own random numbers for them."""
        return self.process_group.rank

    def count_parameters(self, parameters: Iterable[Tensor]) -> int:
        """Over all stages; a tied parameter counts once."""
        own = [p for p in parameters if p is not self._tied or self.process_group.is_main]
        return sum(self.process_group.all_gather_object(super().count_parameters(own)))

    def describe(self) -> str:
        if self.model is None:
            return f"{self.name} over {self.process_group.world_size} processes"
        sizes = [high - low for low, high in pairwise(self.model.boundaries)]
        return (
            f"{self.name} ({self.schedule}) over {self.process_group.world_size} processes: {self.model.count} stages "
            f"of {', '.join(map(str, sizes))} layers, {self.microbatches} micro-batches"
        )

    # -- a step --------------------------------------------------------------------------------------------

    def train_step(self) -> Callable[[Any], Any] | None:
        """Forward and backward passes of a batch through all ranks."""
        return None if self.process_group.is_single_process else self._train

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradient of a tied parameter locally until the last batch of a step."""
        self._skip_sync = True
        try:
            yield
        finally:
            self._skip_sync = False

    def _train(self, batch: Any) -> BackwardDone:
        microbatches = split_batch(batch, self.microbatches)
        stages, schedule = self._schedule_for(microbatches)
        context = current_autocast(self.device)
        for stage in stages:
            stage.begin(self.task.train_step, microbatches, self.reference, context)
        # Backward passes run without autocast; each stage enables it for its forward passes.
        with torch.autocast(self.device.type, enabled=False):
            order = torch.arange(self.microbatches)
            schedule.step(*((order,) if stages[0].stage == 0 else ()), target=order)
        results = [result for stage in stages for result in stage.end()]
        if self._tied is not None and not self._skip_sync:
            if self._tied.grad is None:
                self._tied.grad = torch.zeros_like(self._tied)
            dist.all_reduce(self._tied.grad, group=self._tied_group)
        return self._broadcast_results(results)

    def _broadcast_results(self, results: list[LossTerms]) -> BackwardDone:
        """What the last stage computed, on every rank, without waiting for the device."""
        if self._has_last_stage:
            columns: list[list[Any]] = [[r.sum for r in results], [r.weight for r in results]]
            for name in self._metrics:
                pairs = [r.metrics[name] for r in results if name in r.metrics]
                columns += [[pair[0] for pair in pairs], [pair[1] for pair in pairs]]
            vector = torch.stack([self._wide_sum(values) for values in columns])
        else:
            vector = torch.zeros(2 + 2 * len(self._metrics), dtype=torch.float64, device=self.device)
        dist.broadcast(vector, src=self.process_group.world_size - 1)
        total, weight, *rest = vector.unbind()
        metrics = dict(zip(self._metrics, zip(rest[::2], rest[1::2], strict=True), strict=True))
        # Metrics are summed over ranks later: only rank 0 may report them.
        return BackwardDone(total, weight, metrics if self.process_group.is_main else None)

    def _wide_sum(self, values: list[Any]) -> Tensor:
        numbers = sum(v for v in values if not isinstance(v, Tensor))
        total = torch.full((), float(numbers), dtype=torch.float64, device=self.device)
        return sum((v.detach().double() for v in values if isinstance(v, Tensor)), start=total)

    def piggyback_stats(self, loss: Any, stats: Tensor) -> Any:
        """Weight and loss are the same on all ranks and count once; requests are summed."""
        if not self.process_group.is_single_process:
            own = stats.clone()
            if not self.process_group.is_main:
                own[:2] = 0
            dist.all_reduce(own)
            self._sums = own
        return loss

    def reduced_stats(self, scaler: torch.amp.GradScaler | None) -> Tensor | None:
        sums, self._sums = self._sums, None
        return sums

    def total_norm(self, grads: list[Tensor], uniform: bool) -> Tensor:
        """The norm over all stages; a tied parameter counts once."""
        if self.process_group.is_single_process:
            return super().total_norm(grads, uniform)
        if self._tied is not None and not self.process_group.is_main:
            grads = [grad for grad in grads if grad is not self._tied.grad]
        own = gradients.total_norm(grads, uniform)
        square = own.double() ** 2
        dist.all_reduce(square)
        return square.sqrt().to(own.dtype)

    # -- schedules -----------------------------------------------------------------------------------------

    @property
    def _has_last_stage(self) -> bool:
        return self.process_group.rank == self.process_group.world_size - 1

    def _schedule_for(self, microbatches: list[MicroBatch]) -> tuple[list[StageModule], Any]:
        """This rank's stages and the schedule for batches of this shape.

        All ranks see the same batch, so they all decide the same.
        """
        assert self.model is not None
        largest = max(microbatches, key=lambda microbatch: microbatch.rows)
        # Everything that the shapes of activations may depend on.
        key = largest.rows, _shapes(largest.data), autocast_dtype(self.device)
        if key not in self._schedules:
            if not self._infer_activations(largest):
                self._probe(largest)
            stages = [StageModule(self.model, i, self._activations.get(i)) for i in sorted(self.model.own)]
            self._schedules[key] = stages, self._make_schedule(stages, largest.rows)
            while len(self._schedules) > _MAX_SCHEDULES:
                self._schedules.popitem(last=False)
        self._schedules.move_to_end(key)
        return self._schedules[key]

    def _make_schedule(self, stages: list[StageModule], rows: int) -> Any:
        assert self.model is not None
        made = []
        for stage in stages:
            # Known shapes save torch a run of every stage to infer them.
            received = torch.empty(1, dtype=torch.int64, device="meta")
            if stage.stage > 0:
                received = self._activations[stage.stage - 1].zeros(rows, "meta")
            sent = stage.output.zeros(rows, "meta") if stage.output is not None else torch.empty(1, device="meta")
            made.append(PipelineStage(stage, stage.stage, self.model.count, self.device, (received,), (sent,)))
        argument = made if self.schedule == "interleaved" else made[0]
        # The last stage has already computed the loss.
        return _SCHEDULES[self.schedule](
            argument, self.microbatches, lambda output, target: output.sum(), scale_grads=False
        )

    def _infer_activations(self, microbatch: MicroBatch) -> bool:
        """Activations of a decoder are (rows, tokens, width): another sequence length needs no probing."""
        assert self.model is not None
        data = microbatch.data
        ids = data.get("input_ids") if isinstance(data, Mapping) and self.model.before else None
        if not isinstance(ids, Tensor) or self._probed != (True, autocast_dtype(self.device)):
            return False
        self._activations = {
            stage: ActivationSpec((ids.shape[1], *spec.shape[1:]), spec.dtype)
            for stage, spec in self._activations.items()
        }
        return True

    def _probe(self, microbatch: MicroBatch) -> None:
        """Send a micro-batch through the stages once, to learn the shapes of activations and the metrics."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad(), eval_mode(self.task.model):
            before, drew = _rng_states(self.device), [False]

            def check_rng() -> None:
                drew[0] |= not all(map(torch.equal, before, _rng_states(self.device)))

            output = self._forward(self.task.train_step, microbatch.data, check_rng)
            metrics = list(loss_terms(output, microbatch.rows)[1].metrics) if self._has_last_stage else []
        if self.process_group.any_rank(drew)[0]:
            raise BadArgument(
                f"Expected {type(self.task).__name__}.train_step to draw no random numbers before it calls the model "
                "(to mix images and labels, for instance), received one that does: every rank would draw its own. Turn "
                "that off, do it in the dataset, or use another strategy."
            )
        self._probed = True, autocast_dtype(self.device)
        self._metrics = self.process_group.broadcast(metrics, self.process_group.world_size - 1)

    def _forward(
        self, function: Callable[[Any], Any], batch: Any, after_stage: Callable[[], None] | None = None
    ) -> Any:
        """One batch through all stages, forward only. Only the last rank gets the function's result."""
        assert self.model is not None
        rank, world_size = self.process_group.rank, self.process_group.world_size
        output = None
        for stage in sorted(self.model.own):
            received = None
            if stage > 0:
                received = receive_activations((rank - 1) % world_size, self.device)
                self._activations[stage - 1] = ActivationSpec(tuple(received.shape[1:]), received.dtype)
            output = self.model.run(stage, function, batch, received)
            if stage < self.model.count - 1:
                if after_stage is not None:
                    after_stage()
                self._activations[stage] = ActivationSpec(tuple(output.shape[1:]), output.dtype)
                send_activations(output, (rank + 1) % world_size)
        return output

    # -- evaluation ----------------------------------------------------------------------------------------

    def infer(self, function: Callable[[Any], Any], batch: Any) -> Any:
        """Run the batch through all stages; the last one broadcasts the result."""
        if self.process_group.is_single_process:
            return function(batch)
        kept = dict(self._activations)
        output = self._forward(function, batch)
        self._activations = kept
        found = map_tensors(lambda t: t.detach().cpu(), output) if self._has_last_stage else None
        return self.process_group.broadcast(found, self.process_group.world_size - 1)

    # -- state ---------------------------------------------------------------------------------------------

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """Collect the param groups of all ranks' optimizers."""
        if not self.process_group.is_single_process:
            named = {self._names[id(p)]: p for p in self.task.model.parameters() if p.requires_grad}
            order = list(self._names.values())
            gathered = GatheredOptimizer(self.process_group, optimizer, named, order)
            self.optimizer_states[id(optimizer)] = gathered
        return optimizer

    def model_state(self, state_dict: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The weights of the full model on rank 0; the others return their own. A collective."""
        if self.process_group.is_single_process:
            return state_dict()
        found = gather_on_main(self.process_group, state_dict())
        found |= {alias: found[name] for alias, name in self._aliases.items() if name in found}
        return {key: found[key] for key in self._keys if key in found}

    def load_model_state(self, state: Any, load: Callable[[Any], Any]) -> None:
        """Load this rank's part of the weights of the full model."""
        state, own = unsharded(state), self.task.model.state_dict()
        load({key: value for key, value in state.items() if key in own})

    def check_model_state(self, state: Any, state_dict: Callable[[], dict[str, Any]]) -> None:
        """Raise if weights do not fit. Of those on other ranks only the names are known here."""
        own, every_key = state_dict(), set(self._keys)
        state = {key: value for key, value in unsharded(state).items() if key in own or key not in every_key}
        check_fits(own, state, "model")

    def copy_model(self) -> nn.Module:
        """Refused: a copy of one rank's layers cannot be evaluated."""
        if self.process_group.is_single_process:
            return super().copy_model()
        raise BadArgument(
            "Expected no weight averaging (EMA) in a pipeline: the average could be neither evaluated nor saved. "
            "Leave it out, or use strategy='ddp', 'fsdp' or 'tp'."
        )

    def unsharded_model(self) -> nn.Module:
        """A copy of the model on the host; on rank 0 with all of its weights. A collective."""
        model = self.task.model
        if self.process_group.is_single_process or self.model is None:
            return model
        state = self.model_state(model.state_dict)
        undo = self.model.restore_modules()
        try:
            # Parameters stay on the meta device until the state is assigned.
            meta = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
            made = copy.deepcopy(model, meta)
        finally:
            undo()
        if self.process_group.is_main:
            made.load_state_dict(state, assign=True)
            if self._aliases and hasattr(made, "tie_weights"):
                made.tie_weights()
        return made


def _check_options(schedule: Any, microbatches: Any, stages_per_rank: Any, split: Any) -> None:
    if schedule not in _SCHEDULES:
        names = ", ".join(map(repr, _SCHEDULES))
        raise BadArgument(expected(f"schedule to be one of {names}", schedule, did_you_mean(str(schedule), _SCHEDULES)))
    for name, value in (("microbatches", microbatches), ("stages_per_rank", stages_per_rank)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise BadArgument(expected(f"{name} to be an integer of at least 1", value))
    if stages_per_rank not in (None, 1) and schedule != "interleaved":
        raise BadArgument(expected("stages_per_rank to be 1", stages_per_rank, "Or pass schedule='interleaved'."))
    if split is not None and (isinstance(split, str) or not isinstance(split, Sequence) or not split):
        raise BadArgument(expected("split to be a list of layer counts or of layer names", split))


def _check_task(task: Any, precision: str) -> None:
    model = task.model
    inside = {id(p) for p in model.parameters()}
    outside = [name for name, p in named_parameters(task).items() if id(p) not in inside]
    if outside:
        what = "all trainable parameters to be in the model, for a pipeline"
        raise BadArgument(expected(what, outside, "Use another strategy."))
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise BadArgument("Expected compile=False: a pipeline stage leaves the model's forward pass midway.")
    if precision == "fp16":
        raise BadArgument(expected("precision to be 'bf16' or 'no' in a pipeline", precision))


def _aliases(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters, mapped to the first name of each."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in first:
            aliases[name] = first[id(p)]
        first.setdefault(id(p), name)
    return aliases


def _shapes(data: Any) -> Any:
    """Shapes and dtypes of all tensors in a batch, as a key."""
    if isinstance(data, Tensor):
        return tuple(data.shape), data.dtype
    if isinstance(data, Mapping):
        return tuple((key, _shapes(value)) for key, value in data.items())
    return tuple(map(_shapes, data)) if isinstance(data, (list, tuple)) else None


def _rng_states(device: torch.device) -> list[Tensor]:
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states
