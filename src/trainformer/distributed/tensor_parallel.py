"""Tensor parallelism: the layers of one model are divided over ranks, which compute the same samples together.

Owns dividing the layers that a plan names (`tp_plans`), and the exchange of gradients between models where there are
more ranks than one model needs. The exchange inside of a layer is that of `torch.distributed.tensor.parallel`. State
and copies of what is divided are the business of `divided`.

Ranks of one model draw the same random numbers. Dropout on whole activations is thus the same on all of them, as it has
to be. On divided ones (the heads of attention, the inner width of an MLP) each rank drops the same places of its own
part: a valid dropout, but neither independent between parts nor that of a single process.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.parallel import parallelize_module

from trainformer.backends.torch import gradients
from trainformer.backends.torch.optimizers import named_parameters
from trainformer.core.errors import BadArgument, expected
from trainformer.distributed.mesh import REPLICA, SHARD, divisors
from trainformer.distributed.process_group import Group
from trainformer.distributed.sharded_base import ShardedStrategy, all_reduce_gradients, is_sharded, materialize
from trainformer.distributed.step_module import StepModule
from trainformer.distributed.tp_plans import (
    Plan,
    PlannedLayer,
    check_plan,
    plan_layers,
    tied_parameters,
)
from trainformer.utils.distributed import set_data_parallel_group


class TensorParallel(ShardedStrategy):
    """Layers divided over ranks of neighbouring numbers; further ranks hold further copies and other samples.

    Args:
        size: How many ranks hold one model; all of them unless it is given.
        plan: Which layers are divided, and how. ``None`` or ``"auto"`` takes the plan that models of transformers have.
            For others it is a mapping of names, in which ``*`` stands for any one part, to styles: ``"colwise"``,
            ``"rowwise"``, the other names that transformers uses, or objects of `torch.distributed.tensor.parallel`.
            What is not in the plan is whole on every rank.
        sync_batchnorm: Take BatchNorm statistics over all ranks that have other samples.
    """

    name = "tp"

    def __init__(self, *, size: int | None = None, plan: Plan = None, sync_batchnorm: bool = True) -> None:
        super().__init__(sync_batchnorm=sync_batchnorm)
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

    def setup_environment(self, device: Any, timeout: float) -> torch.device:
        """Meet the other ranks. Those of one model compute the same part of the data."""
        found = super().setup_environment(device, timeout)
        process_group = self.process_group
        size = self.size or process_group.world_size
        if process_group.world_size % size:
            do = f"With {process_group.world_size} processes, it can be {divisors(process_group.world_size)}."
            raise BadArgument(expected("size to divide the number of processes", size, do))
        self.size = size
        process_group.dp_rank, place = divmod(process_group.rank, size)
        process_group.dp_world_size = process_group.world_size // size
        process_group.groups = {
            "model": Group(process_group.dp_rank, place == 0),
            "data": Group(place, process_group.dp_rank == 0),
        }
        return found

    def describe(self) -> str:
        """Name, number of processes, and how many of them hold one model."""
        text = super().describe()
        if not self._layers:
            return text
        divided = sum(layer.style is not None for layer in self._layers)
        models = (
            f"{self.process_group.dp_world_size} models, each" if self.process_group.dp_world_size > 1 else "one model,"
        )
        return f"{text}: {models} divided by {self.size} in {divided} layers"

    def _arrange(self, task: Any) -> DeviceMesh:
        if self.precision in ("fp16", "fp8"):
            what = "a precision that layers divided over ranks can be trained in"
            raise BadArgument(expected(what, self.precision, "Pass precision='bf16' or 'no', or use strategy='fsdp'."))
        self._layers = plan_layers(task.model, self.plan, self.size)
        grid = (self.process_group.dp_world_size, self.size)
        mesh = init_device_mesh(self._device.type, grid, mesh_dim_names=(REPLICA, SHARD))
        set_data_parallel_group(mesh.get_group(REPLICA))
        return mesh

    def _divide(self, root: StepModule) -> None:
        """Divide the layers that the plan names; all else stays whole."""
        planned = {id(p) for layer in self._layers if layer.style is not None for p in layer.module.parameters()}
        self._place_alike([p for p in root.parameters() if id(p) not in planned], root)
        self._divide_layers(self.task.model, self._layers)
        self._parameters_here = list(root.parameters())
        self._summed = {id(p) for layer in self._layers if layer.style is None for p in layer.module.parameters()}

    def _divide_copy(self, made: nn.Module) -> nn.Module:
        self._divide_layers(made, plan_layers(made, self.plan, self.size))
        materialize(made, self._device)
        return made

    def _divide_layers(self, model: nn.Module, layers: list[PlannedLayer]) -> None:
        """Divide layer by layer: one at a time is on the device in full."""
        planned = {id(layer.module) for layer in layers if layer.style is not None}
        ties = [[place for place in places if id(place[0]) in planned] for places in tied_parameters(model)]
        for layer in layers:
            if layer.style is None:
                continue
            whole = [p for p in layer.module.parameters() if not (p.is_meta or gradients.is_dtensor(p))]
            for p in whole:
                p.data = p.data.to(self._device)
                dist.broadcast(p.data, src=0)
            parallelize_module(layer.module, self._mesh[SHARD], layer.style, src_data_rank=0 if whole else None)
            for name, buffer in layer.module._buffers.items():
                if gradients.is_dtensor(buffer):  # torch makes one of each, which nobody else can compute with
                    layer.module._buffers[name] = buffer.to_local()  # type: ignore[operator,union-attr]
            if type(layer.module) is nn.Linear:
                layer.module.__class__ = ShardedLinear
        for places in ties:
            for module, name in places[1:]:
                first, its_name = places[0]
                module.register_parameter(name, getattr(first, its_name))

    # -- a step --------------------------------------------------------------------------------------------

    def piggyback_stats(self, loss: Any, values: Tensor) -> Any:
        """Weights and losses count once for each model; what ranks ask for is added up over all of them."""
        own = values.clone()
        if not self.process_group.group("model").is_first:
            own[:-1] = 0
        return super().piggyback_stats(loss, own)

    @torch.no_grad()
    def _average_rest(self) -> None:
        """Make gradients the means over models, and the same on all ranks that hold the same."""
        trained = [p for p in self._parameters_here if p.requires_grad]
        for p in trained:
            if p.grad is None and self.process_group.dp_world_size > 1:  # other models' samples may have needed it
                p.grad = torch.zeros_like(p)
            if gradients.is_dtensor(p) and p.grad is not None and p.grad.placements != p.placements:  # type: ignore[attr-defined]
                p.grad = p.grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        used = [p for p in trained if p.grad is not None]
        in_parts = [p.grad for p in used if is_sharded(p)]
        whole = {id(p): p.grad for p in used if not is_sharded(p)}
        if not self._is_checked:
            self._is_checked = True
            self._check_alike({key: grad for key, grad in whole.items() if key not in self._summed})
        # Whole gradients are equal on the ranks of a model, but for what a device may round at random. Added up over
        # all ranks, they stay equal; it costs no more than over one rank of each model.
        all_reduce_gradients(
            [g for key, g in whole.items() if key not in self._summed], None, self.process_group.world_size
        )
        all_reduce_gradients(
            [g for key, g in whole.items() if key in self._summed], None, self.process_group.dp_world_size
        )
        if self.process_group.dp_world_size > 1:
            all_reduce_gradients(in_parts, self._mesh.get_group(REPLICA), self.process_group.dp_world_size)

    def _check_alike(self, whole: dict[int, Any]) -> None:
        """Raise, in the first step, if a layer that is whole got other gradients on other ranks of its model."""
        if not whole or self.size == 1:
            return
        grads = gradients.local_tensors(list(whole.values()))
        means = [grad.clone() for grad in grads]
        all_reduce_gradients(means, self._mesh.get_group(SHARD), self.size)
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


class ShardedLinear(nn.Linear):
    """A linear layer of which each rank has a part, made of one in place.

    Whoever computes with the weight of a plain `nn.Linear` instead of calling it, as losses over chunks of tokens do,
    can tell by the class that here this is not possible.
    """
