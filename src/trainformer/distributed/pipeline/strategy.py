"""Pipeline parallelism: every rank has some of the layers, and micro-batches pass through the ranks one after another.

The order of forward and backward passes is that of `torch.distributed.pipelining`; what a stage computes is in `stages`
and `pipeline_parts`, and how state is put together in `pipeline_state`. Owns deciding who has which stage, setting up a
schedule for the shapes of a batch, and what ranks tell each other beside activations.

All ranks read the same batches: each calls the task's `train_step` with them, as far as its own layers.
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
from trainformer.backends.torch.state import check_fits
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.types import BackwardDone
from trainformer.distributed.ddp import device_of
from trainformer.distributed.pipeline import links
from trainformer.distributed.pipeline.microbatches import Meta, Part, Piece, Result, cut, weighed
from trainformer.distributed.pipeline.stages import Chain
from trainformer.distributed.pipeline.state import GatheredOptimizer, gathered
from trainformer.distributed.process_group import TorchProcessGroup
from trainformer.distributed.strategy import Strategy, unsharded
from trainformer.models.modes import evaluating
from trainformer.utils.distributed import set_data_parallel_group

_SCHEDULES: dict[str, Any] = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe, "interleaved": ScheduleInterleaved1F1B}
#: Schedules that are kept, each for one shape of batches: they hold memory to receive into.
_MOST_PLANS = 4


class Pipeline(Strategy):
    """Layers over ranks.

    Args:
        schedule: ``"1f1b"`` (a backward pass as soon as there can be one: the least memory), ``"gpipe"`` (all forward
            passes, then all backward passes) or ``"interleaved"`` (1f1b with several stages per rank: less waiting).
        microbatches: Into how many micro-batches each batch is cut; as many as there are stages unless it is given.
            More of them leave ranks less time to wait: the share is about (ranks - 1) / (microbatches + ranks - 1).
        stages_per_rank: Stages of each rank, for ``"interleaved"``; 2 unless it is given.
        split: How many layers each stage has, or the names of the layers at which stages begin. None: balanced by
            parameters.
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
        self.chain: Chain | None = None
        self._names: dict[int, str] = {}
        self._keys: list[str] = []
        self._aliases: dict[str, str] = {}
        self._tied: nn.Parameter | None = None
        self._tied_group: Any = None
        self._metrics: list[str] = []
        self._metas: dict[int, Meta] = {}
        self._probed: tuple[bool, torch.dtype | None] = False, None
        self._plans: OrderedDict[Any, _Plan] = OrderedDict()
        self._apart = False
        self._sums: Tensor | None = None
        self._optimizer: GatheredOptimizer | None = None

    # -- set-up --------------------------------------------------------------------------------------------

    def setup_environment(self, device: Any, timeout: float) -> torch.device:
        """Meet the other ranks. All of them compute the same batches."""
        if self.process_group.is_single_process:
            self.process_group = TorchProcessGroup.join(device, timeout)
            self.process_group.dp_rank, self.process_group.dp_world_size = 0, 1
        return device_of(self.process_group, device)

    def prepare(self, task: Any, device: torch.device) -> None:
        """Cut the model into stages, and keep those of this rank."""
        self.device = device
        model = task.model
        _check_task(task, self.precision)
        chain = self.chain = Chain(model)
        stages = self.process_group.world_size * self.stages_per_rank
        chain.divide(stages, self.split)
        self._names = {id(p): name for name, p in model.named_parameters()}
        self._keys = list(model.state_dict())
        self._aliases = _aliases(model)
        tied = chain.tied()
        self.microbatches = self.microbatches or stages
        self._check_microbatches(stages)
        if tied is not None and tied.requires_grad and not self.process_group.is_single_process:
            self._tied_group = dist.new_group([0, self.process_group.world_size - 1])
            self._tied = tied if self.process_group.rank in (0, self.process_group.world_size - 1) else None
        chain.keep(set(range(self.process_group.rank, stages, self.process_group.world_size)))
        # All ranks have the same samples, and the last one alone computes losses: nobody shares rows with another.
        set_data_parallel_group(None if self.process_group.is_single_process else dist.new_subgroups(1)[0])
        super().prepare(task, device)

    def _check_microbatches(self, stages: int) -> None:
        count = self.microbatches
        if self.schedule == "1f1b" and count < stages:
            raise BadArgument(
                expected(
                    f"microbatches to be at least {stages}, one for each stage", count, "Or pass schedule='gpipe'."
                )
            )
        if self.schedule == "interleaved" and count % max(1, count // self.process_group.world_size):
            do = f"Pass a multiple of {self.process_group.world_size}."
            raise BadArgument(expected("microbatches that rounds over all ranks divide", count, do))

    @property
    def random_stream(self) -> int:
        """Every stage has layers of its own, and draws numbers of its own for them."""
        return self.process_group.rank

    def count_parameters(self, parameters: Iterable[Tensor]) -> int:
        """Those of all stages; what two of them share counts once."""
        own = [p for p in parameters if p is not self._tied or self.process_group.is_main]
        return sum(self.process_group.all_gather_object(super().count_parameters(own)))

    def describe(self) -> str:
        """Name, number of processes, and where stages begin."""
        if self.chain is None:
            return f"{self.name} over {self.process_group.world_size} processes"
        sizes = [high - low for low, high in pairwise(self.chain.edges)]
        return (
            f"{self.name} ({self.schedule}) over {self.process_group.world_size} processes: {self.chain.count} stages "
            f"of {', '.join(map(str, sizes))} layers, {self.microbatches} micro-batches"
        )

    # -- a step --------------------------------------------------------------------------------------------

    def train_step(self) -> Callable[[Any], Any] | None:
        """Forward and backward passes of a whole batch through all ranks."""
        return None if self.process_group.is_single_process else self._train

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Gradients are this rank's own until the last batch of a step."""
        self._apart = True
        try:
            yield
        finally:
            self._apart = False

    def _train(self, batch: Any) -> BackwardDone:
        pieces = cut(batch, self.microbatches)
        plan = self._plan(pieces)
        context = links.present_autocast(self.device)
        for part in plan.parts:
            part.begin(self.task.train_step, pieces, self.reference, context)
        # Backward passes are no business of autocast; each stage turns it on for its forward passes.
        with torch.autocast(self.device.type, enabled=False):
            plan.run()
        results = [result for part in plan.parts for result in part.end()]
        if self._tied is not None and not self._apart:
            _add_up(self._tied, self._tied_group)
        return self._told(results)

    def _told(self, results: list[Result]) -> BackwardDone:
        """What the last stage found, on every rank, without waiting for the device."""
        count = 2 + 2 * len(self._metrics)
        if self._has_last:
            vector = torch.stack(self._totals(results))
        else:
            vector = torch.zeros(count, dtype=torch.float64, device=self.device)
        dist.broadcast(vector, src=self.process_group.world_size - 1)
        total, weight, *rest = vector.unbind()
        pairs = zip(rest[::2], rest[1::2], strict=True)
        metrics = dict(zip(self._metrics, pairs, strict=True))
        return BackwardDone(
            total, weight, metrics if self.process_group.is_main else None
        )  # those of ranks are added up

    def _totals(self, results: list[Result]) -> list[Tensor]:
        columns: list[list[Any]] = [[r.sum for r in results], [r.weight for r in results]]
        for name in self._metrics:
            pairs = [r.metrics[name] for r in results if name in r.metrics]
            columns += [[pair[0] for pair in pairs], [pair[1] for pair in pairs]]
        return [self._wide_sum(values) for values in columns]

    def _wide_sum(self, values: list[Any]) -> Tensor:
        numbers = sum(v for v in values if not isinstance(v, Tensor))
        total = torch.full((), float(numbers), dtype=torch.float64, device=self.device)
        for value in values:
            if isinstance(value, Tensor):
                total = total + value.detach().double()
        return total

    def piggyback_stats(self, loss: Any, values: Tensor) -> Any:
        """Weight and loss are the same on all ranks and count once; what ranks ask for is added up."""
        if not self.process_group.is_single_process:
            mine = values.clone()
            if not self.process_group.is_main:
                mine[:2] = 0
            dist.all_reduce(mine)
            self._sums = mine
        return loss

    def reduced_stats(self, scaler: torch.amp.GradScaler | None) -> Tensor | None:
        """The sums."""
        sums, self._sums = self._sums, None
        return sums

    def total_norm(self, grads: list[Tensor], uniform: bool) -> Tensor:
        """The norm over all stages; what two of them share counts once."""
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
    def _has_last(self) -> bool:
        return self.process_group.rank == self.process_group.world_size - 1

    def _plan(self, pieces: list[Piece]) -> _Plan:
        """The schedule for batches of this shape. All ranks see the same batch, and so decide alike."""
        assert self.chain is not None
        largest = max(pieces, key=lambda piece: piece.rows)
        # What the shapes of what goes between stages may depend on.
        key = largest.rows, _shapes(largest.data), links.autocast_dtype(self.device)
        if key not in self._plans:
            if not self._foresee(largest):
                self._probe(largest)
            parts = [Part(self.chain, stage, self._metas.get(stage)) for stage in sorted(self.chain.own)]
            self._plans[key] = _Plan(self, parts, largest.rows)
            while len(self._plans) > _MOST_PLANS:
                self._plans.popitem(last=False)
        self._plans.move_to_end(key)
        return self._plans[key]

    def _foresee(self, piece: Piece) -> bool:
        """Between the layers of a decoder there are rows, tokens and a width: another length need not be tried."""
        assert self.chain is not None
        ids = piece.data.get("input_ids") if isinstance(piece.data, Mapping) and self.chain.before else None
        if not isinstance(ids, Tensor) or self._probed != (True, links.autocast_dtype(self.device)):
            return False
        self._metas = {stage: Meta((ids.shape[1], *m.shape[1:]), m.dtype) for stage, m in self._metas.items()}
        return True

    def _probe(self, piece: Piece) -> None:
        """Send a micro-batch through the stages once, to see what goes from each to the next."""
        devices = [self.device] if self.device.type == "cuda" else []
        with torch.random.fork_rng(devices), torch.no_grad(), evaluating(self.task.model):
            state, drew = links.random_state(self.device), [False]

            def look() -> None:
                drew[0] |= not all(map(torch.equal, state, links.random_state(self.device)))

            output = self._through(self.task.train_step, piece.data, look)
            metrics = list(weighed(output, piece.rows)[1].metrics) if self._has_last else []
        if self.process_group.any_rank(drew)[0]:
            raise BadArgument(
                f"Expected {type(self.task).__name__}.train_step to draw no random numbers before it calls the model "
                "(mixing images and labels, say), received one that does: every rank would draw others. Turn that "
                "off, do it in the data set, or use another strategy."
            )
        self._probed = True, links.autocast_dtype(self.device)
        self._metrics = links.from_rank(self.process_group.world_size - 1, metrics)

    def _through(self, function: Callable[[Any], Any], batch: Any, look: Callable[[], None] | None = None) -> Any:
        """One batch through all stages, forward only. What the function gives is known to the last rank."""
        assert self.chain is not None
        output = None
        for stage in sorted(self.chain.own):
            received = None
            if stage > 0:
                received = links.receive((self.process_group.rank - 1) % self.process_group.world_size, self.device)
                self._metas[stage - 1] = Meta(tuple(received.shape[1:]), received.dtype)
            output = self.chain.run(stage, function, batch, received)
            if look is not None and stage < self.chain.count - 1:
                look()
            if stage < self.chain.count - 1:
                self._metas[stage] = Meta(tuple(output.shape[1:]), output.dtype)
                links.send(output, (self.process_group.rank + 1) % self.process_group.world_size)
        return output

    # -- evaluation ----------------------------------------------------------------------------------------

    def infer(self, function: Callable[[Any], Any], batch: Any) -> Any:
        """The same on every rank: the batch passes through the stages, and the last one tells what came out."""
        if self.process_group.is_single_process:
            return function(batch)
        metas = dict(self._metas)
        output = self._through(function, batch)
        self._metas = metas
        return links.from_rank(self.process_group.world_size - 1, links.on_host(output) if self._has_last else None)

    # -- state ---------------------------------------------------------------------------------------------

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """See which parameters the optimizers of all ranks have."""
        if not self.process_group.is_single_process:
            named = {self._names[id(p)]: p for p in self.task.model.parameters() if p.requires_grad}
            self._optimizer = GatheredOptimizer(self.process_group, optimizer, named, list(self._names.values()))
        return optimizer

    def model_state(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The weights of the whole model on rank 0, on the others those they have. Every rank must take part."""
        if self.process_group.is_single_process:
            return plain()
        found = gathered(self.process_group, plain())
        found |= {alias: found[name] for alias, name in self._aliases.items() if name in found}
        return {key: found[key] for key in self._keys if key in found}

    def load_model_state(self, state: Any, plain: Callable[[Any], Any]) -> None:
        """Take back what is this rank's of the weights of a whole model."""
        state, own = unsharded(state), self.task.model.state_dict()
        plain({key: value for key, value in state.items() if key in own})

    def check_model_state(self, state: Any, plain: Callable[[], dict[str, Any]]) -> None:
        """Raise if weights do not fit. Of those of other ranks only the names are known here."""
        own, elsewhere = plain(), set(self._keys)
        state = {key: value for key, value in unsharded(state).items() if key in own or key not in elsewhere}
        check_fits(own, state, "model")

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of all stages on rank 0, as one process would have it; on the others their own."""
        return super().optimizer_state(optimizer) if self._optimizer is None else self._optimizer.state()

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Take back what is this rank's of it."""
        if self._optimizer is None:
            super().load_optimizer_state(optimizer, state)
        else:
            self._optimizer.load(unsharded(state))

    def check_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """Raise if it does not fit."""
        if self._optimizer is None:
            super().check_optimizer_state(optimizer, state)
        else:
            self._optimizer.check(unsharded(state))

    def copy_model(self) -> nn.Module:
        """Refused: a copy of this rank's layers is of no use to anybody."""
        if self.process_group.is_single_process:
            return super().copy_model()
        raise BadArgument(
            "Expected no average of the weights (EMA) in a pipeline: it could neither be evaluated nor saved as a "
            "whole. Leave it out, or use strategy='ddp', 'fsdp' or 'tp'."
        )

    def unsharded_model(self) -> nn.Module:
        """A copy of the model on the host; on rank 0 with all of its weights. Every rank must take part."""
        model = self.task.model
        if self.process_group.is_single_process or self.chain is None:
            return model
        state = self.model_state(model.state_dict)
        undo = self.chain.put_back()
        try:
            # Without the memory of parameters: they get that of the state.
            meta = {id(p): nn.Parameter(p.detach().to("meta"), p.requires_grad) for p in model.parameters()}
            made = copy.deepcopy(model, meta)
        finally:
            undo()
        if self.process_group.is_main:
            made.load_state_dict(state, assign=True)
            if self._aliases and hasattr(made, "tie_weights"):
                made.tie_weights()
        return made


class _Plan:
    """A schedule for batches of one shape."""

    def __init__(self, strategy: Pipeline, parts: list[Part], most: int) -> None:
        assert strategy.chain is not None
        self.parts = parts
        self._order = torch.arange(strategy.microbatches)
        count, metas = strategy.chain.count, strategy._metas
        stages = []
        for part in parts:
            # The shapes are known: without them torch would run every stage once more to see them.
            first = torch.empty(1, dtype=torch.int64, device="meta")
            received = metas[part.stage - 1].rows(most, "meta") if part.stage > 0 else first
            sent = part.sent.rows(most, "meta") if part.sent is not None else torch.empty(1, device="meta")
            stages.append(PipelineStage(part, part.stage, count, strategy.device, (received,), (sent,)))
        made = _SCHEDULES[strategy.schedule]
        multiple = strategy.schedule == "interleaved"
        self._schedule = made(stages if multiple else stages[0], strategy.microbatches, _itself, scale_grads=False)
        self._is_first = parts[0].stage == 0

    def run(self) -> None:
        """Forward and backward passes of all micro-batches."""
        arguments = (self._order,) if self._is_first else ()
        self._schedule.step(*arguments, target=self._order)


def _itself(output: Tensor, target: Tensor) -> Tensor:
    """The loss of a micro-batch: the last stage has computed it already."""
    return output.sum()


def _check_options(schedule: Any, microbatches: Any, stages_per_rank: Any, split: Any) -> None:
    if schedule not in _SCHEDULES:
        names = ", ".join(map(repr, _SCHEDULES))
        raise BadArgument(expected(f"schedule to be one of {names}", schedule, did_you_mean(str(schedule), _SCHEDULES)))
    for name, value in (("microbatches", microbatches), ("stages_per_rank", stages_per_rank)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < 1):
            raise BadArgument(expected(f"{name} to be a whole number of at least 1", value))
    if stages_per_rank not in (None, 1) and schedule != "interleaved":
        raise BadArgument(expected("stages_per_rank to be 1", stages_per_rank, "Or pass schedule='interleaved'."))
    if split is not None and (isinstance(split, str) or not isinstance(split, Sequence) or not split):
        raise BadArgument(expected("split to be a list of numbers of layers or of names of layers", split))


def _check_task(task: Any, precision: str) -> None:
    model = task.model
    inside = {id(p) for p in model.parameters()}
    outside = [name for name, p in named_parameters(task).items() if id(p) not in inside]
    if outside:
        raise BadArgument(
            expected("all that is trained to be in the model, for a pipeline", outside, "Use another strategy.")
        )
    if getattr(model, "_compiled_call_impl", None) is not None:
        raise BadArgument("Expected compile=False: a stage of a pipeline leaves the model's forward pass midway.")
    if precision == "fp16":
        raise BadArgument(expected("precision to be 'bf16' or 'no' in a pipeline", precision))


def _aliases(model: nn.Module) -> dict[str, str]:
    """Further names of tied parameters, and the first one of each."""
    first: dict[int, str] = {}
    aliases: dict[str, str] = {}
    for name, p in model.named_parameters(remove_duplicate=False):
        if id(p) in first:
            aliases[name] = first[id(p)]
        first.setdefault(id(p), name)
    return aliases


def _add_up(parameter: nn.Parameter, group: Any) -> None:
    if parameter.grad is None:
        parameter.grad = torch.zeros_like(parameter)
    dist.all_reduce(parameter.grad, group=group)


def _shapes(data: Any) -> Any:
    """Shapes and types of all tensors of a batch, by which batches can be told apart."""
    if isinstance(data, Tensor):
        return tuple(data.shape), data.dtype
    if isinstance(data, Mapping):
        return tuple((key, _shapes(value)) for key, value in data.items())
    return tuple(map(_shapes, data)) if isinstance(data, (list, tuple)) else None
