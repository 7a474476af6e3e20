"""Tensor parallelism: the layers of one model are divided over ranks, which compute the same samples together.

Owns dividing the layers that a plan names (`tp_plans`), the exchange of gradients between models where there are more
ranks than one model needs, and what gradients need of which some are divided and some are whole. The exchange inside
of a layer is that of `torch.distributed.tensor.parallel`. State is divided as with `fsdp`, and written as there.

Ranks of one model draw the same random numbers. Dropout on whole activations is thus the same on all of them, as it has
to be. On divided ones (the heads of attention, the inner width of an MLP) each rank drops the same places of its own
part: a valid dropout, but neither independent between parts nor that of a single process.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate
from torch.distributed.tensor.parallel import parallelize_module

from trainformer.backends.torch import gradients
from trainformer.backends.torch.distribution.fsdp import _SHORT, FSDP, _copy_buffers, _materialize, _outline
from trainformer.backends.torch.distribution.mesh import REPLICA, SHARD
from trainformer.backends.torch.distribution.ranks import Group
from trainformer.backends.torch.distribution.step_module import StepModule
from trainformer.backends.torch.distribution.strategy import Strategy
from trainformer.backends.torch.distribution.tp_plans import (
    Plan,
    PlannedLayer,
    check_plan,
    plan_layers,
    tied_parameters,
)
from trainformer.backends.torch.optimizers import named_parameters
from trainformer.core.errors import BadArgument, expected
from trainformer.utils.distributed import use_group

logger = logging.getLogger("trainformer")

#: Gradients are exchanged in messages of about so many bytes; as much memory is needed beside them.
_MESSAGE = 64 << 20


class TensorParallel(FSDP):
    """Layers divided over ranks of neighbouring numbers; further ranks hold further copies and other samples.

    Args:
        size: How many ranks hold one model; all of them unless it is given.
        plan: Which layers are divided, and how. ``None`` or ``"auto"`` takes the plan that models of transformers have.
            For others it is a mapping of names, in which ``*`` stands for any one part, to styles: ``"colwise"``,
            ``"rowwise"``, the other names that transformers uses, or objects of `torch.distributed.tensor.parallel`.
            What is not in the plan is whole on every rank.
        share_batchnorm: Take BatchNorm statistics over all ranks that have other samples.
    """

    name = "tp"

    def __init__(self, *, size: int | None = None, plan: Plan = None, share_batchnorm: bool = True) -> None:
        super().__init__(share_batchnorm=share_batchnorm)
        if size is not None and (not isinstance(size, int) or isinstance(size, bool) or size < 1):
            raise BadArgument(expected("size to be a number of ranks", size))
        check_plan(plan)
        self.size = size or 0
        self.plan = plan
        self._layers: list[PlannedLayer] = []
        self._parameters_here: list[nn.Parameter] = []
        self._summed: set[int] = set()
        self._is_checked = False

    # -- set-up --------------------------------------------------------------------------------------------

    def join(self, device: Any, timeout: float) -> torch.device:
        """Meet the other ranks. Those of one model compute the same part of the data."""
        found = super().join(device, timeout)
        ranks = self.ranks
        size = self.size or ranks.world
        if ranks.world % size:
            fit = ", ".join(str(n) for n in range(1, ranks.world + 1) if ranks.world % n == 0)
            do = f"With {ranks.world} processes, it can be {fit}."
            raise BadArgument(expected("size to divide the number of processes", size, do))
        self.size = size
        ranks.index, place = divmod(ranks.rank, size)
        ranks.count = ranks.world // size
        ranks.groups = {"model": Group(ranks.index, place == 0), "data": Group(place, ranks.index == 0)}
        return found

    def prepare(self, task: Any, device: torch.device) -> None:
        """Divide the layers of the task's model; its other modules stay whole. Weights are those of rank 0."""
        if self.ranks.is_alone:
            super().prepare(task, device)
            return
        if self.precision in ("fp16", "fp8"):
            what = "a precision that layers divided over ranks can be trained in"
            raise BadArgument(expected(what, self.precision, "Pass precision='bf16' or 'no', or use strategy='fsdp'."))
        self._refuse_quantized(task)
        self._layers = plan_layers(task.model, self.plan, self.size)
        self.task, self._device = task, device
        self._mesh = init_device_mesh(device.type, (self.ranks.count, self.size), mesh_dim_names=(REPLICA, SHARD))
        use_group(self._mesh.get_group(REPLICA))
        self._outline = _outline(task.model)
        self._share_statistics(task)
        self._root = StepModule(task)
        planned = {id(p) for layer in self._layers if layer.style is not None for p in layer.module.parameters()}
        self._place_alike([p for p in self._root.parameters() if id(p) not in planned], self._root)
        self._divide_layers(task.model, self._layers)
        self._parameters_here = list(self._root.parameters())
        self._summed = {id(p) for layer in self._layers if layer.style is None for p in layer.module.parameters()}
        if self.ranks.is_main:
            logger.info("%s", self.describe())

    def describe(self) -> str:
        """Name, number of processes, and how many of them hold one model."""
        text = f"{self.name} over {self.ranks.world} processes"
        if not self._layers:
            return text
        divided = sum(layer.style is not None for layer in self._layers)
        models = f"{self.ranks.count} models, each" if self.ranks.count > 1 else "one model,"
        return f"{text}: {models} divided by {self.size} in {divided} layers"

    def _divide_layers(self, model: nn.Module, layers: list[PlannedLayer]) -> None:
        """Divide layer by layer: one at a time is on the device in full."""
        planned = {id(layer.module) for layer in layers if layer.style is not None}
        ties = [[place for place in places if id(place[0]) in planned] for places in tied_parameters(model)]
        for layer in layers:
            if layer.style is None:
                continue
            whole = [p for p in layer.module.parameters() if not (p.is_meta or gradients.is_divided(p))]
            for p in whole:
                p.data = p.data.to(self._device)
                dist.broadcast(p.data, src=0)
            parallelize_module(layer.module, self._mesh[SHARD], layer.style, src_data_rank=0 if whole else None)
            for name, buffer in layer.module._buffers.items():
                if gradients.is_divided(buffer):  # torch makes one of each, which nobody else can compute with
                    layer.module._buffers[name] = buffer.to_local()  # type: ignore[operator,union-attr]
            if type(layer.module) is nn.Linear:
                layer.module.__class__ = DividedLinear
        for places in ties:
            for module, name in places[1:]:
                first, its_name = places[0]
                module.register_parameter(name, getattr(first, its_name))

    # -- a step --------------------------------------------------------------------------------------------

    def apart(self) -> AbstractContextManager[Any]:
        """Nothing is exchanged between models before the last micro-batch of a step."""
        return Strategy.apart(self)

    def send(self, loss: Tensor, values: Tensor) -> Tensor:
        """Weights and losses count once for each model; what ranks ask for is added up over all of them."""
        own = values.clone()
        if not self.ranks.group("model").is_first:
            own[:-1] = 0
        return super().send(loss, own)

    @torch.no_grad()
    def _average_undivided(self) -> None:
        """Make gradients the means over models, and the same on all ranks that hold the same."""
        if self._root is None:
            return
        trained = [p for p in self._parameters_here if p.requires_grad]
        for p in trained:
            if p.grad is None and self.ranks.count > 1:  # other models' samples may have needed it
                p.grad = torch.zeros_like(p)
            if gradients.is_divided(p) and p.grad is not None and p.grad.placements != p.placements:  # type: ignore[attr-defined]
                p.grad = p.grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        used = [p for p in trained if p.grad is not None]
        in_parts = [p.grad for p in used if _is_in_parts(p)]
        whole = {id(p): p.grad for p in used if not _is_in_parts(p)}
        if not self._is_checked:
            self._is_checked = True
            self._check_alike({key: grad for key, grad in whole.items() if key not in self._summed})
        # Whole gradients are equal on the ranks of a model, but for what a device may round at random. Added up over
        # all ranks, they stay equal; it costs no more than over one rank of each model.
        _add_up([g for key, g in whole.items() if key not in self._summed], None, self.ranks.world)
        _add_up([g for key, g in whole.items() if key in self._summed], None, self.ranks.count)
        if self.ranks.count > 1:
            _add_up(in_parts, self._mesh.get_group(REPLICA), self.ranks.count)

    def _check_alike(self, whole: dict[int, Any]) -> None:
        """Raise, in the first step, if a layer that is whole got other gradients on other ranks of its model."""
        if not whole or self.size == 1:
            return
        grads = gradients.local_parts(list(whole.values()))
        means = [grad.clone() for grad in grads]
        _add_up(means, self._mesh.get_group(SHARD), self.size)
        sizes = torch.stack([torch.linalg.vector_norm(mean.double()) for mean in means])
        apart = torch.stack([torch.linalg.vector_norm((g - m).double()) for g, m in zip(grads, means, strict=True)])
        both = torch.stack([apart, sizes])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        apart, sizes = both.cpu()
        # A gradient that is nothing but rounding, as that of a bias before a softmax, may be anything.
        wrong = ((apart > 0.05 * sizes) & (apart > 1e-4 * sizes.max())).tolist()
        if any(wrong):
            names = {id(p): name for name, p in named_parameters(self.task).items()}
            found = [names.get(key, "a parameter") for key, is_wrong in zip(whole, wrong, strict=True) if is_wrong]
            what = "the same gradient on all ranks of a model for every layer that is not divided"
            do = (
                "They compute with parts of activations: put them into the plan, as 'replicated_with_grad_allreduce' "
                "if they are to stay whole."
            )
            raise BadArgument(expected(what, f"others for {', '.join(found[:4])}", do))

    def total_norm(self, grads: list[Tensor], uniform: bool) -> Tensor:
        """The norm of all gradients; what is whole on every rank counts once."""
        counted = [g if _is_in_parts(g) or not gradients.is_divided(g) else g.to_local() for g in grads]  # type: ignore[attr-defined]
        return super().total_norm(counted, uniform)

    # -- state ---------------------------------------------------------------------------------------------

    def model_state(self, plain: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """The weights, of which this rank has its parts; of equal parts the first model's are written."""
        return self._of_all_models(super().model_state(plain))

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The same of the optimizer's state."""
        return self._of_all_models(super().optimizer_state(optimizer))

    def load_model_state(self, state: Any, plain: Callable[[Any], Any]) -> None:
        """Take weights back, from files or as `model_state` gave them."""
        super().load_model_state(self._of_this_model(state), plain)

    def load_optimizer_state(self, optimizer: torch.optim.Optimizer, state: Any) -> None:
        """The same of the optimizer's state."""
        super().load_optimizer_state(optimizer, self._of_this_model(state))

    def _of_all_models(self, state: Any) -> Any:
        """Tensors that say of themselves that every model has them. The memory is the same."""
        if isinstance(state, dict):
            return {key: self._of_all_models(value) for key, value in state.items()}
        return _placed(state, self._mesh, (Replicate(), *state.placements)) if gradients.is_divided(state) else state

    def _of_this_model(self, state: Any) -> Any:
        """The way back; states in files are left alone."""
        if isinstance(state, dict):
            return {key: self._of_this_model(value) for key, value in state.items()}
        has_all = gradients.is_divided(state) and state.device_mesh.ndim == 2
        return _placed(state, self._mesh[SHARD], state.placements[1:]) if has_all else state

    @torch.no_grad()
    def copy_model(self) -> nn.Module:
        """A second model with the same weights, at least in fp32, divided like the first."""
        model = self.task.model
        if self._root is None:
            return copy.deepcopy(model)
        made = copy.deepcopy(self._outline_of_model())
        for p in made.parameters():
            p.data = p.data.float() if p.dtype in _SHORT else p.data
        self._divide_layers(made, plan_layers(made, self.plan, self.size))
        ties = tied_parameters(made)
        _materialize(made, self._device)
        for places in ties:
            for module, name in places[1:]:
                module.register_parameter(name, getattr(places[0][0], places[0][1]))
        weights = dict(model.named_parameters())
        for name, p in made.named_parameters():
            p.copy_(weights[name])
        _copy_buffers(made, model)
        return made


class DividedLinear(nn.Linear):
    """A linear layer of which each rank has a part, made of one in place.

    Whoever computes with the weight of a plain `nn.Linear` instead of calling it, as losses over chunks of tokens do,
    can tell by the class that here this is not possible.
    """


def _placed(tensor: Any, mesh: DeviceMesh, placements: Sequence[Placement]) -> DTensor:
    """The same part of a tensor, seen from other ranks."""
    local, shape, stride = tensor.detach().to_local(), tensor.shape, tensor.stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=shape, stride=stride)


def _is_in_parts(tensor: Any) -> bool:
    return gradients.is_divided(tensor) and any(not how.is_replicate() for how in tensor.placements)


def _add_up(grads: Iterable[Any], group: Any, divisor: int) -> None:
    """Replace gradients by their sums over the ranks of a group, divided by a number."""
    for bucket in _buckets(gradients.local_parts(list(grads))):
        flat = torch.cat([grad.reshape(-1) for grad in bucket])
        dist.all_reduce(flat, group=group)
        flat /= divisor
        pieces = flat.split([grad.numel() for grad in bucket])
        torch._foreach_copy_(bucket, [piece.view(grad.shape) for piece, grad in zip(pieces, bucket, strict=True)])


def _buckets(tensors: list[Tensor]) -> Iterator[list[Tensor]]:
    """Tensors of one type and one message at a time. Every rank makes the same of the same shapes."""
    for dtype in sorted({t.dtype for t in tensors}, key=str):
        bucket: list[Tensor] = []
        for tensor in tensors:
            if tensor.dtype != dtype:
                continue
            if bucket and sum(t.nbytes for t in bucket) + tensor.nbytes > _MESSAGE:
                yield bucket
                bucket = []
            bucket.append(tensor)
        yield bucket
