"""Splitting a model into pipeline stages, and running one of them.

Owns finding the chain of layers in a model, splitting it, and running a part of it. The model is not rebuilt: a stage
runs the model's own forward pass, called by the task in its own way. Layers of other stages are skipped; the
activations received from the previous stage replace their output; and the forward pass is left where the next stage
begins. So masks, positions, packed documents and the loss are those of the model and the task. `strategy` does the
communication.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, did_you_mean, expected

#: Names of the layer between the last block and the head in Hugging Face decoders.
_FINAL_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")
_SPLITTABLE = (
    "Models that can be split into stages: a torch.nn.Sequential, a model whose parameters are all in one, and a "
    "Hugging Face decoder of embeddings, layers, a norm and a head (Llama, Mistral, Qwen2, Qwen3, GPT-2, ...)."
)


class ModuleSlot(NamedTuple):
    """A position in the module tree."""

    parent: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        """The module there now."""
        return self.parent._modules[self.name]  # type: ignore[return-value]

    def put(self, module: nn.Module) -> None:
        """Replace the module."""
        self.parent._modules[self.name] = module


class StagedModel:
    """A model as a chain of layers in calling order, split into stages.

    `places` are the positions of the layers, `before` those of embeddings, `after` those of the final norm and the
    head. `boundaries` has the first layer of each stage and the number of layers; `own` are the stages of this rank.
    """

    def __init__(self, model: nn.Module) -> None:
        if any(isinstance(module, StageStub) for module in model.modules()):
            raise BadArgument(
                "Expected an unsplit model, received one that another trainer has split into stages. Build or load it "
                "again; its weights are in that trainer's checkpoints."
            )
        self.model = model
        self.places, self.before, self.after = _find(model)
        self.layers = [place.module for place in self.places]
        self.boundaries: list[int] = [0, len(self.layers)]
        self.own: set[int] = {0}
        self._stubs = [StageStub(layer) for layer in self.layers]
        #: Modules that other ranks hold, on the meta device, with their positions.
        self._removed: list[tuple[ModuleSlot, nn.Module]] = []
        self._received: Tensor | None = None
        self._entered = 0

    # -- splitting -----------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.boundaries) - 1

    def tied(self) -> nn.Parameter | None:
        """The parameter that embeddings and head share, if any."""
        first = {id(p) for place in self.before for p in place.module.parameters()}
        shared = {id(p): p for place in self.after for p in place.module.parameters() if id(p) in first}
        if len(shared) > 1:
            what = "at most one parameter that the first and the last stage share"
            raise BadArgument(expected(what, f"{len(shared)} of them"))
        return next(iter(shared.values()), None)

    def split(self, stages: int, split: Sequence[Any] | None) -> None:
        """Set where stages begin: balanced by parameters, by numbers of layers, or at layers given by name."""
        if split is None:
            sizes = [_numel(layer) for layer in self.layers]
            sizes[0] += sum(_numel(place.module) for place in self.before)
            sizes[-1] += sum(_numel(place.module) for place in self.after)
            self.boundaries = balanced_boundaries(sizes, [_is_trainable(layer) for layer in self.layers], stages)
        else:
            self.boundaries = self._boundaries_from(split, stages)
        for stage in range(self.count):
            low, high = self.boundaries[stage : stage + 2]
            if not any(_is_trainable(layer) for layer in self.layers[low:high]):
                raise BadArgument(
                    f"Expected every stage to have parameters to train, received stage {stage} (layers {low} to "
                    f"{high - 1}) without any. Use fewer processes, or pass another split."
                )

    def _boundaries_from(self, split: Sequence[Any], stages: int) -> list[int]:
        if all(isinstance(part, int) and not isinstance(part, bool) and part > 0 for part in split):
            boundaries = [sum(split[:i]) for i in range(len(split) + 1)]
            if len(split) != stages or boundaries[-1] != len(self.layers):
                what = f"split to be {stages} numbers whose sum is {len(self.layers)}, the layers"
                raise BadArgument(expected(what, list(split)))
            return boundaries
        found = {id(module): name for name, module in self.model.named_modules()}
        names = [found[id(layer)] for layer in self.layers]
        for part in split:
            if part not in names:
                close = did_you_mean(str(part), names)
                what = "split to be numbers of layers, or names of layers"
                raise BadArgument(expected(what, part, close or f"Like {names[0]!r}."))
        begins = [names.index(part) for part in split]
        begins = begins if begins[:1] == [0] else [0, *begins]
        if len(begins) != stages or begins != sorted(set(begins)):
            what = f"split to name the first layers of {stages} stages, in their order"
            raise BadArgument(expected(what, list(split)))
        return [*begins, len(self.layers)]

    def keep_stages(self, own: set[int]) -> None:
        """Keep the parameters of these stages and free the others. Parameter names do not change."""
        self.own = own
        for stage in range(self.count):
            if stage not in own:
                for i in range(self.boundaries[stage], self.boundaries[stage + 1]):
                    self._remove(self.places[i], self._stubs[i])
        if 0 not in own:
            for place in self.before:
                self._remove(place, EmbeddingStub(place.module))
        if self.count - 1 not in own:
            for place in self.after:
                self._remove(place, StageStub(place.module))

    def _remove(self, place: ModuleSlot, instead: nn.Module) -> None:
        """Replace a module, whose weights move to the meta device, by a stub."""
        for part in place.module.modules():
            for name, p in part._parameters.items():
                if p is not None:
                    part._parameters[name] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
            for name, buffer in part._buffers.items():
                # Non-persistent buffers stay: no checkpoint could fill them.
                if buffer is not None and name not in part._non_persistent_buffers_set:
                    part._buffers[name] = buffer.to("meta")
        self._removed.append((place, place.module))
        place.put(instead)

    def restore_modules(self) -> Callable[[], None]:
        """Put the modules of other ranks back, without weights. Returns a function that puts their stubs back."""
        stubs = [(place, place.module) for place, _ in self._removed]
        for place, module in self._removed:
            place.put(module)

        def undo() -> None:
            for place, module in stubs:
                place.put(module)

        return undo

    # -- running -------------------------------------------------------------------------------------------

    def run(self, stage: int, function: Callable[[Any], Any], batch: Any, received: Tensor | None) -> Any:
        """Run a function of the task, such as `train_step`, on one stage.

        Returns its result on the last stage, and on the others the activations to send. `received` are the activations
        of the previous stage, None on the first.
        """
        low, high = self.boundaries[stage : stage + 2]
        is_last = stage == self.count - 1
        before = [place.module for place in self.places]
        self._received, self._entered = received, 0
        for i, (place, stub) in enumerate(zip(self.places, self._stubs, strict=True)):
            stub.action = self._enter if i == low - 1 else self._leave if i == high else _skip
            place.put(self.layers[i] if low <= i < high else stub)
        try:
            output = function(batch)
        except _LeaveForward as left:
            return left.hidden
        finally:
            self._received = None
            for place, stub, module in zip(self.places, self._stubs, before, strict=True):
                stub.action = _refuse
                place.put(module)
        if not is_last or (received is not None and not self._entered):
            raise BadArgument(
                f"Expected {getattr(function, '__name__', 'the task')} to call the model, received a result without "
                "it. A pipeline needs every batch to pass through the model once."
            )
        return output

    def _enter(self, hidden: Any) -> Tensor:
        self._entered += 1
        if self._entered > 1:
            raise BadArgument(
                "Expected the task to call the model once per batch, received a second call. A pipeline sends each "
                "batch through its stages once; train this task with another strategy."
            )
        assert self._received is not None
        return self._received

    @staticmethod
    def _leave(hidden: Any) -> Any:
        if not isinstance(hidden, Tensor):
            raise BadArgument(expected("a tensor between two stages", type(hidden).__name__, "Pass another split."))
        raise _LeaveForward(hidden)


class StageStub(nn.Module):
    """Stands in for a module of another stage: no parameters, but the attributes of that module."""

    action: Callable[[Any], Any]

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.__dict__["like"] = like  # not as a submodule: its parameters are not ours
        self.action = _refuse

    def __getattr__(self, name: str) -> Any:
        if "like" not in self.__dict__:  # while being copied
            raise AttributeError(name)
        return getattr(self.__dict__["like"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.action(args[0] if args else next(iter(kwargs.values())))


class EmbeddingStub(StageStub):
    """Stands in for the embeddings on later stages: returns zeros of their shape, which are not used."""

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        weight = self.like.weight
        return torch.zeros(*ids.shape, weight.shape[1], dtype=weight.dtype, device=ids.device)


class _LeaveForward(BaseException):
    """Ends the forward pass of a stage. Not an error, and nothing that a task should catch."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _skip(hidden: Any) -> Any:
    return hidden


def _refuse(hidden: Any) -> Any:
    raise BadArgument(
        "This part of the model is on another rank. With strategy='pipeline' the model runs only in train_step and "
        "eval_step; export the full model with the trainer."
    )


def balanced_boundaries(sizes: Sequence[int], trainable: Sequence[bool], stages: int) -> list[int]:
    """Boundaries that minimise the largest stage, with something to train in each.

    >>> balanced_boundaries([5, 1, 1, 1, 1, 1], [True] * 6, 2)
    [0, 1, 6]
    >>> balanced_boundaries([4, 0, 4, 0, 2], [True, False, True, False, True], 3)
    [0, 1, 3, 5]
    """
    if sum(trainable) < stages:
        what = f"a model with at least {stages} layers that have parameters to train, one for each stage"
        do = "Use fewer processes, or fewer stages_per_rank."
        raise BadArgument(expected(what, f"one with {sum(trainable)}", do))
    cumulative = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    trained = [sum(trainable[:i]) for i in range(len(sizes) + 1)]
    # Dynamic programming: for the first `end` layers, (size of the largest stage, where the last stage begins).
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for _ in range(stages):
        row: dict[int, tuple[float, int]] = {}
        for end in range(1, len(sizes) + 1):
            ways = [
                (max(largest, cumulative[end] - cumulative[begin]), begin)
                for begin, (largest, _) in best[-1].items()
                if begin < end and trained[end] > trained[begin]
            ]
            if ways:
                row[end] = min(ways)
        best.append(row)
    boundaries = [len(sizes)]
    for row in reversed(best[1:]):
        boundaries.append(row[boundaries[-1]][1])
    return boundaries[::-1]


def _numel(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _is_trainable(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _has_state(module: nn.Module) -> bool:
    return bool(module.state_dict())


def _find(model: nn.Module) -> tuple[list[ModuleSlot], list[ModuleSlot], list[ModuleSlot]]:
    """Positions of the layers, of the embeddings before them, and of what comes after them."""
    if isinstance(model, nn.Sequential):
        return _places(model), [], []
    if hasattr(model, "base_model_prefix") and hasattr(model, "config"):
        return _find_in_decoder(model)
    parts = [module for module in model.children() if _has_state(module)]
    if len(parts) == 1 and isinstance(parts[0], nn.Sequential) and not any(True for _ in model.parameters(False)):
        return _places(parts[0]), [], []
    raise BadArgument(expected("a model that can be split into stages", type(model).__name__, _SPLITTABLE))


def _find_in_decoder(model: Any) -> tuple[list[ModuleSlot], list[ModuleSlot], list[ModuleSlot]]:
    base = getattr(model, model.base_model_prefix, model)
    lists = [m for m in base.children() if isinstance(m, nn.ModuleList) and len(m) == model.config.num_hidden_layers]
    direct = [name for part in {base, model} for name, _ in part.named_parameters(recurse=False)]
    if len(lists) != 1 or direct or getattr(model.config, "is_encoder_decoder", False):
        raise BadArgument(expected("a model that can be split into stages", type(model).__name__, _SPLITTABLE))
    if getattr(model.config, "output_router_logits", False):
        raise BadArgument(
            "Expected output_router_logits to be off: the router loss needs all layers, and a stage has only its own. "
            "Load the model with output_router_logits=False, or use another strategy."
        )
    before, after = [], []
    for name, part in base.named_children():
        if part is lists[0] or not _has_state(part):
            continue
        if isinstance(part, nn.Embedding):
            before.append(ModuleSlot(base, name))
        elif name in _FINAL_NORMS:
            after.append(ModuleSlot(base, name))
        else:
            do = f"It has {name!r} beside its layers. {_SPLITTABLE}"
            raise BadArgument(expected("a model that can be split into stages", type(model).__name__, do))
    if base is not model:
        after += [
            ModuleSlot(model, name) for name, part in model.named_children() if part is not base and _has_state(part)
        ]
    for layer in lists[0]:
        layer.register_forward_hook(_check_output)
    return _places(lists[0]), before, after


def _check_output(layer: nn.Module, args: Any, output: Any) -> None:
    if not isinstance(output, Tensor):
        raise BadArgument(expected(f"{type(layer).__name__} to return a tensor", type(output).__name__, _SPLITTABLE))


def _places(layers: nn.Module) -> list[ModuleSlot]:
    return [ModuleSlot(layers, name) for name in layers._modules]
