"""Tensor parallelism: ranks shard the layers of one model and compute the same samples together.

Owns the plan (which layers are sharded, and how), sharding them, and averaging gradients between model replicas if
there are more ranks than one model needs. `torch.distributed.tensor.parallel` communicates inside a layer;
`sharded_base` owns state and copies.

Ranks of one model draw the same random numbers, so dropout on full activations is the same on all of them, as it must
be. On sharded activations (attention heads, the inner width of an MLP) each rank drops the same positions of its own
shard: a valid dropout, but neither independent between shards nor equal to that of a single process.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trainformer.backends.torch.optimizers import named_parameters
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.distributed.ddp import all_reduce_gradients
from trainformer.distributed.process_group import Subgroup
from trainformer.distributed.sharded_base import (
    REPLICA,
    SHARD,
    ShardedStrategy,
    divisors,
    is_sharded,
    materialize,
)
from trainformer.distributed.strategy import StepModule
from trainformer.utils.distributed import is_dtensor, local_tensors, set_data_parallel_group

Plan = Mapping[str, str | ParallelStyle] | str | None


class TensorParallel(ShardedStrategy):
    """Layers sharded over consecutive ranks; further ranks hold model replicas and compute other samples.

    Args:
        size: Number of ranks that hold one model; all of them by default.
        plan: Which layers are sharded, and how. ``None`` or ``"auto"`` uses the plan that Hugging Face models come
            with. For other models, a mapping of layer names, in which ``*`` matches one component, to styles:
            ``"colwise"``, ``"rowwise"``, the other names of transformers, or objects of
            `torch.distributed.tensor.parallel`. Layers outside the plan are replicated.
        sync_batchnorm: Compute BatchNorm statistics over all data-parallel ranks.
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
        self._local_parameters: list[nn.Parameter] = []
        self._summed: set[int] = set()
        self._is_checked = False

    # -- set-up --------------------------------------------------------------------------------------------

    def setup_environment(self, device: Any, timeout: float) -> torch.device:
        """Join the process group. Ranks of one model compute the same shard of the data."""
        found = super().setup_environment(device, timeout)
        group = self.process_group
        size = self.size or group.world_size
        if group.world_size % size:
            do = f"With {group.world_size} processes, it can be {divisors(group.world_size)}."
            raise BadArgument(expected("size to divide the number of processes", size, do))
        self.size = size
        group.dp_rank, tp_rank = divmod(group.rank, size)
        group.dp_world_size = group.world_size // size
        group.groups = {
            "model": Subgroup(group.dp_rank, tp_rank == 0),
            "data": Subgroup(tp_rank, group.dp_rank == 0),
        }
        return found

    def describe(self) -> str:
        text = super().describe()
        if not self._layers:
            return text
        sharded = sum(layer.style is not None for layer in self._layers)
        replicas = self.process_group.dp_world_size
        models = f"{replicas} models, each" if replicas > 1 else "one model,"
        return f"{text}: {models} sharded over {self.size} ranks in {sharded} layers"

    def _make_mesh(self, task: Any) -> DeviceMesh:
        if self.precision in ("fp16", "fp8"):
            do = "Pass precision='bf16' or 'no', or use strategy='fsdp'."
            raise BadArgument(expected("a precision that tensor parallelism supports", self.precision, do))
        self._layers = plan_layers(task.model, self.plan, self.size)
        grid = (self.process_group.dp_world_size, self.size)
        mesh = init_device_mesh(self._device.type, grid, mesh_dim_names=(REPLICA, SHARD))
        set_data_parallel_group(mesh.get_group(REPLICA))
        return mesh

    def _shard(self, root: StepModule) -> None:
        """Shard the layers of the plan; everything else is replicated."""
        planned = {id(p) for layer in self._layers if layer.style is not None for p in layer.module.parameters()}
        self._broadcast_from_rank_0([p for p in root.parameters() if id(p) not in planned], root)
        self._shard_layers(self.task.model, self._layers)
        self._local_parameters = list(root.parameters())
        self._summed = {id(p) for layer in self._layers if layer.style is None for p in layer.module.parameters()}

    def _shard_copy(self, made: nn.Module) -> nn.Module:
        self._shard_layers(made, plan_layers(made, self.plan, self.size))
        materialize(made, self._device)
        return made

    def _shard_layers(self, model: nn.Module, layers: list[PlannedLayer]) -> None:
        """Shard layer by layer: only one at a time is on the device in full."""
        planned = {id(layer.module) for layer in layers if layer.style is not None}
        ties = [[place for place in places if id(place[0]) in planned] for places in tied_parameters(model)]
        for layer in layers:
            if layer.style is None:
                continue
            full = [p for p in layer.module.parameters() if not (p.is_meta or is_dtensor(p))]
            for p in full:
                p.data = p.data.to(self._device)
                dist.broadcast(p.data, src=0)
            parallelize_module(layer.module, self._mesh[SHARD], layer.style, src_data_rank=0 if full else None)
            for name, buffer in layer.module._buffers.items():
                if is_dtensor(buffer):  # torch makes DTensors of buffers, which plain operations cannot use
                    layer.module._buffers[name] = buffer.to_local()  # type: ignore[operator,union-attr]
            if type(layer.module) is nn.Linear:
                layer.module.__class__ = ShardedLinear
        for places in ties:
            for module, name in places[1:]:
                first, its_name = places[0]
                module.register_parameter(name, getattr(first, its_name))

    # -- a step --------------------------------------------------------------------------------------------

    def piggyback_stats(self, loss: Any, stats: Tensor) -> Any:
        """Weights and losses count once per model; requests are summed over all ranks."""
        own = stats.clone()
        if not self.process_group.group("model").is_first:
            own[:-1] = 0
        return super().piggyback_stats(loss, own)

    @torch.no_grad()
    def _reduce_remaining_gradients(self) -> None:
        """Average gradients over replicas, and make replicated ones identical on all ranks that hold them."""
        world_size, replicas = self.process_group.world_size, self.process_group.dp_world_size
        trained = [p for p in self._local_parameters if p.requires_grad]
        for p in trained:
            if p.grad is None and replicas > 1:  # the samples of other replicas may have used it
                p.grad = torch.zeros_like(p)
            if is_dtensor(p) and p.grad is not None and p.grad.placements != p.placements:  # type: ignore[attr-defined]
                p.grad = p.grad.redistribute(placements=p.placements)  # type: ignore[attr-defined]
        used = [p for p in trained if p.grad is not None]
        sharded = [p.grad for p in used if is_sharded(p)]
        replicated = {id(p): p.grad for p in used if not is_sharded(p) and id(p) not in self._summed}
        summed = [p.grad for p in used if not is_sharded(p) and id(p) in self._summed]
        if not self._is_checked:
            self._is_checked = True
            self._check_replicated(replicated)
        # Replicated gradients are equal on the ranks of a model, except for non-deterministic rounding on a device.
        # Averaged over all ranks they stay equal; it costs no more than over one rank of each model.
        all_reduce_gradients(replicated.values(), None, world_size)
        all_reduce_gradients(summed, None, replicas)
        if replicas > 1:
            all_reduce_gradients(sharded, self._mesh.get_group(REPLICA), replicas)

    def _check_replicated(self, gradients: dict[int, Any]) -> None:
        """Raise, in the first step, if a replicated layer got different gradients on the ranks of one model."""
        if not gradients or self.size == 1:
            return
        grads = local_tensors(list(gradients.values()))
        means = [grad.clone() for grad in grads]
        all_reduce_gradients(means, self._mesh.get_group(SHARD), self.size)
        norms = torch.stack([torch.linalg.vector_norm(mean.double()) for mean in means])
        errors = torch.stack([torch.linalg.vector_norm((g - m).double()) for g, m in zip(grads, means, strict=True)])
        both = torch.stack([errors, norms])
        dist.all_reduce(both, dist.ReduceOp.MAX)
        errors, norms = both.cpu()
        # A gradient that is pure rounding noise, such as that of a bias before a softmax, may differ.
        wrong = ((errors > 0.05 * norms) & (errors > 1e-4 * norms.max())).tolist()
        if any(wrong):
            names = {id(p): name for name, p in named_parameters(self.task).items()}
            found = [names.get(key, "a parameter") for key, is_wrong in zip(gradients, wrong, strict=True) if is_wrong]
            what = "the same gradient on all ranks of a model for every replicated layer"
            do = (
                "They see sharded activations: add them to the plan, as 'replicated_with_grad_allreduce' to keep them "
                "replicated."
            )
            raise BadArgument(expected(what, f"different ones for {', '.join(found[:4])}", do))


class ShardedLinear(nn.Linear):
    """A linear layer sharded over ranks, converted in place.

    Code that uses the weight of a plain `nn.Linear` directly, such as chunked losses over the vocabulary, can tell by
    the class that it must call this layer instead.
    """


# -- plans -------------------------------------------------------------------------------------------------

#: A replicated layer that sees sharded activations: its gradients are summed over ranks.
SUMMED = "replicated_with_grad_allreduce"
_REPLICATED = "replicate"
# Columns and rows of A in y = x A; the weight of a layer is A transposed.
_STYLES: dict[str, Callable[[], ParallelStyle]] = {
    "colwise": ColwiseParallel,
    "rowwise": RowwiseParallel,
    **dict.fromkeys(
        ("colwise_gather_output", "colwise_rep", "embedding_colwise"),
        partial(ColwiseParallel, output_layouts=Replicate()),
    ),
    **dict.fromkeys(
        ("rowwise_split_input", "rowwise_rep", "embedding_rowwise"), partial(RowwiseParallel, input_layouts=Replicate())
    ),
}
# Styles with replicated inputs and outputs, by layer class and sharded dimension of the weight.
_REPLICATED_IO = {
    (nn.Embedding, 0): "embedding_rowwise",
    (nn.Embedding, 1): "embedding_colwise",
    (nn.Linear, 0): "colwise_gather_output",
    (nn.Linear, 1): "rowwise_split_input",
}


@dataclass(frozen=True)
class PlannedLayer:
    """A layer and its style; None for a replicated layer whose gradients are summed."""

    name: str
    module: nn.Module
    style: ParallelStyle | None


def plan_layers(model: nn.Module, plan: Plan, size: int) -> list[PlannedLayer]:
    """The layers of a model that the plan shards over `size` ranks. Does not change the model."""
    if any(is_dtensor(p) for p in model.parameters()):
        do = "Build or load it without tp_plan or distributed_config: the strategy shards it."
        raise BadArgument(expected("an unsharded model", "one that is already sharded", do))
    found = {layer.name: layer for layer in _matching(model, plan)}
    for name, module, dim in _tied_layers(model, found):
        found[name] = PlannedLayer(name, module, _STYLES[_REPLICATED_IO[_kind(name, module), dim]]())
    for layer in found.values():
        _check_sizes(model, layer, size)
    return list(found.values())


def check_plan(plan: Plan) -> None:
    """Raise if a plan is malformed or names an unknown style."""
    if plan is None or plan == "auto":
        return
    if not isinstance(plan, Mapping) or not plan:
        do = "For instance {'layers.*.up': 'colwise', 'layers.*.down': 'rowwise'}."
        raise BadArgument(expected("plan to be 'auto' or a mapping of layer name patterns to styles", plan, do))
    for pattern, style in plan.items():
        known = (*_STYLES, SUMMED, _REPLICATED)
        if not isinstance(style, ParallelStyle) and style not in known:
            what = f"the style of {pattern} to be one of {', '.join(known)}, or a ParallelStyle of torch"
            raise BadArgument(expected(what, style, did_you_mean(str(style), known)))


def tied_parameters(model: nn.Module) -> list[list[tuple[nn.Module, str]]]:
    """Parameters shared by several layers: for each, the layers and its name in them."""
    holders: dict[int, list[tuple[nn.Module, str]]] = {}
    for module in model.modules():
        for name, p in module._parameters.items():
            if p is not None:
                holders.setdefault(id(p), []).append((module, name))
    return [places for places in holders.values() if len(places) > 1]


def _matching(model: nn.Module, plan: Plan) -> Iterator[PlannedLayer]:
    is_custom = isinstance(plan, Mapping)
    rules = dict(plan) if isinstance(plan, Mapping) else _built_in_plan(model)
    check_plan(rules)
    modules = dict(model.named_modules())
    found = 0
    for pattern, style in rules.items():
        matching = [name for name in modules if name and _matches(name, pattern)]
        if not matching and is_custom:
            layers = [name for name, module in modules.items() if isinstance(module, (nn.Linear, nn.Embedding))]
            have = f"Its layers are {', '.join(layers[:6])}{', ...' if len(layers) > 6 else ''}."
            what = f"layers of {type(model).__name__} that match {pattern!r} of the plan"
            raise BadArgument(expected(what, "none", did_you_mean(pattern, layers) or have))
        found += len(matching)
        for name in matching if style != _REPLICATED else ():
            made = None if style == SUMMED else style if isinstance(style, ParallelStyle) else _STYLES[style]()
            yield PlannedLayer(name, modules[name], made)
    if not found:
        raise _no_plan(model, f"a plan for other layers ({', '.join(list(rules)[:3])})")


def _built_in_plan(model: nn.Module) -> dict[str, Any]:
    """The plan that a Hugging Face model comes with, for all of its layers or those of its base model."""
    plan = getattr(model, "_tp_plan", None)
    if not plan:
        inner = getattr(getattr(model, "config", None), "base_model_tp_plan", None) or {}
        prefix = getattr(model, "base_model_prefix", "")
        within = f"{prefix}." if prefix and hasattr(model, prefix) else ""
        plan = {f"{within}{pattern}": style for pattern, style in inner.items()}
    if not plan:
        raise _no_plan(model, "a model without one")
    return dict(plan)


def _no_plan(model: nn.Module, received: str) -> BadArgument:
    do = "Pass plan={pattern of layers: 'colwise' or 'rowwise', ...}, or use strategy='fsdp', which needs none."
    return BadArgument(expected(f"a tensor-parallel plan for the layers of {type(model).__name__}", received, do))


def _matches(name: str, pattern: str) -> bool:
    """Whether a pattern matches a layer name; ``*`` matches within one component.

    >>> _matches("layers.3.up", "layers.*.up"), _matches("layers.3.mlp.up", "layers.*.up")
    (True, False)
    """
    parts, wanted = name.split("."), pattern.split(".")
    return len(parts) == len(wanted) and all(map(fnmatchcase, parts, wanted))


def _tied_layers(model: nn.Module, found: Mapping[str, PlannedLayer]) -> Iterator[tuple[str, nn.Module, int]]:
    """Layers outside the plan whose weight is tied to a planned one, and the dimension it is sharded in."""
    names = {id(module): name for name, module in model.named_modules()}
    for places in tied_parameters(model):
        layers = [(names[id(module)], module) for module, _ in places]
        planned = {name: _sharded_dim(found[name]) for name, _ in layers if name in found}
        dims = {dim for dim in planned.values() if dim is not None}
        if not dims:
            continue
        if len(dims) > 1 or None in planned.values():
            both = " and ".join(planned)
            raise BadArgument(expected(f"{both}, which share a weight, to be sharded alike", "different styles"))
        for name, module in layers:
            if name not in found:
                yield name, module, min(dims)


def _sharded_dim(layer: PlannedLayer) -> int | None:
    """The sharded dimension of the weight; None if it is replicated or the style is unknown."""
    if not isinstance(layer.style, (ColwiseParallel, RowwiseParallel)):
        return None
    # The weight of a linear layer is transposed, that of an embedding is not.
    return int(isinstance(layer.style, ColwiseParallel) == isinstance(layer.module, nn.Embedding))


def _check_sizes(model: nn.Module, layer: PlannedLayer, size: int) -> None:
    """Layers whose neighbours use sharded activations need equal shards; gathered outputs may be uneven."""
    style, module, name = layer.style, layer.module, layer.name
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        return
    _kind(name, module)
    if isinstance(style, ColwiseParallel) and style.output_layouts != (Replicate(),):
        width: Any = module.out_features if isinstance(module, nn.Linear) else module.embedding_dim
        # Of an attention projection, from the head size of the module around it.
        around: Any = model.get_submodule(name.rpartition(".")[0])
        each = getattr(around, "head_dim", None) or getattr(around, "head_size", None)
        heads = width // each if isinstance(each, int) and width % each == 0 else 0
        if heads % size:
            what = f"{name} to have a number of heads that {size} divides"
            raise BadArgument(expected(what, f"{heads} heads", _sizes_for(heads)))
    elif isinstance(style, RowwiseParallel) and isinstance(module, nn.Linear) and style.input_layouts == (Shard(-1),):
        width = module.in_features
    else:
        return
    if width % size:
        raise BadArgument(expected(f"{name} to have a width that {size} divides", width, _sizes_for(width)))


def _sizes_for(number: int) -> str:
    fit = [str(n) for n in range(2, min(number, 64) + 1) if number % n == 0]
    return f"{', '.join(fit)} ranks could hold one model." if fit else "Leave the layer out of the plan."


def _kind(name: str, module: nn.Module) -> type[nn.Module]:
    for kind in (nn.Linear, nn.Embedding):
        if isinstance(module, kind):
            return kind
    do = "Leave it out of the plan; use adapters and quantization with strategy='ddp' or 'fsdp'."
    raise BadArgument(expected(f"{name} to be a Linear or an Embedding, to shard it", type(module).__name__, do))
