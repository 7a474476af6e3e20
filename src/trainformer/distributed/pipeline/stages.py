"""A model as a chain of layers that is cut into stages, and how one stage of it is computed.

Owns finding the chain in a model, dividing it, and running a part of it. A stage runs the model's
own forward pass, called by the task in its own way. Layers of other stages are passed by; what the stage before sent
takes the place of what they would have computed; and where the next stage begins the forward pass is left. So masks,
positions, packed documents and the loss are as the model and the task make them. Sending is left to `pipeline`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, did_you_mean, expected

#: What the layer between the last block and the output is called in the decoders of transformers.
_LAST_NORMS = ("norm", "ln_f", "final_layernorm", "final_layer_norm")
_SPLITTABLE = (
    "What can be cut into stages is a torch.nn.Sequential, a model whose parameters are all in one, and a decoder of "
    "transformers that is made of embeddings, layers, a norm and a head (Llama, Mistral, Qwen2, Qwen3, GPT-2, ...)."
)


class Place(NamedTuple):
    """Where a module is in its model."""

    parent: nn.Module
    name: str

    @property
    def module(self) -> nn.Module:
        """What is there now."""
        return self.parent._modules[self.name]  # type: ignore[return-value]

    def put(self, module: nn.Module) -> None:
        """Put something else there."""
        self.parent._modules[self.name] = module


class Chain:
    """The layers of a model in the order in which they are called, and what is called before and after them.

    `places` are those of the layers, `before` those of embeddings, `after` those of the last norm and the head.
    `edges` has the first layer of each stage, and one number more; `own` are the stages of this rank.
    """

    def __init__(self, model: nn.Module) -> None:
        if any(isinstance(module, Slot) for module in model.modules()):
            raise BadArgument(
                "Expected a whole model, received one that is cut into stages already, by another trainer. Build or "
                "load it anew; the weights are in that trainer's checkpoints."
            )
        self.model = model
        self.places, self.before, self.after = _find(model)
        self.layers = [place.module for place in self.places]
        self.edges: list[int] = [0, len(self.layers)]
        self.own: set[int] = {0}
        self._slots = [Slot(layer) for layer in self.layers]
        #: Modules that other ranks hold, without their weights, and where they belong.
        self._elsewhere: list[tuple[Place, nn.Module]] = []
        self._received: Tensor | None = None
        self._entered = 0

    # -- dividing ------------------------------------------------------------------------------------------

    @property
    def count(self) -> int:
        """Number of stages."""
        return len(self.edges) - 1

    def names(self) -> list[str]:
        """Full names of the layers in the model."""
        found = {id(module): name for name, module in self.model.named_modules()}
        return [found[id(layer)] for layer in self.layers]

    def tied(self) -> nn.Parameter | None:
        """The parameter that embeddings and head share, if they do."""
        first = {id(p) for place in self.before for p in place.module.parameters()}
        shared = {id(p): p for place in self.after for p in place.module.parameters() if id(p) in first}
        if len(shared) > 1:
            raise BadArgument(
                expected("at most one parameter that the first and the last stage share", f"{len(shared)} of them")
            )
        return next(iter(shared.values()), None)

    def divide(self, stages: int, split: Sequence[Any] | None) -> None:
        """Say where stages begin: balanced by parameters, by numbers of layers, or at layers given by name."""
        if split is None:
            self.edges = balanced(self._sizes(), [_learns(layer) for layer in self.layers], stages)
        else:
            self.edges = self._given(split, stages)
        for stage in range(self.count):
            low, high = self.edges[stage : stage + 2]
            if not any(_learns(layer) for layer in self.layers[low:high]):
                raise BadArgument(
                    f"Expected every stage to have parameters to train, received stage {stage} (layers {low} to "
                    f"{high - 1}) without any. Use fewer processes, or pass another split."
                )

    def _sizes(self) -> list[int]:
        sizes = [_elements(layer) for layer in self.layers]
        sizes[0] += sum(_elements(place.module) for place in self.before)
        sizes[-1] += sum(_elements(place.module) for place in self.after)
        return sizes

    def _given(self, split: Sequence[Any], stages: int) -> list[int]:
        if all(isinstance(part, int) and not isinstance(part, bool) and part > 0 for part in split):
            edges = [sum(split[:i]) for i in range(len(split) + 1)]
            if len(split) != stages or edges[-1] != len(self.layers):
                raise BadArgument(
                    expected(f"split to be {stages} numbers whose sum is {len(self.layers)}, the layers", list(split))
                )
            return edges
        names = self.names()
        for part in split:
            if part not in names:
                close = did_you_mean(str(part), names)
                raise BadArgument(
                    expected("split to be numbers of layers, or names of layers", part, close or f"Like {names[0]!r}.")
                )
        begins = [names.index(part) for part in split]
        begins = begins if begins[:1] == [0] else [0, *begins]
        if len(begins) != stages or begins != sorted(set(begins)):
            raise BadArgument(
                expected(f"split to name the first layers of {stages} stages, in their order", list(split))
            )
        return [*begins, len(self.layers)]

    def keep(self, own: set[int]) -> None:
        """Keep the parameters of these stages, and let go of the others. Every name stays what it was."""
        self.own = own
        for stage in range(self.count):
            if stage not in own:
                for i in range(self.edges[stage], self.edges[stage + 1]):
                    self._let_go(self.places[i], self._slots[i])
        if 0 not in own:
            for place in self.before:
                self._let_go(place, Vacant(place.module))
        if self.count - 1 not in own:
            for place in self.after:
                self._let_go(place, Slot(place.module))

    def _let_go(self, place: Place, instead: nn.Module) -> None:
        self._elsewhere.append((place, emptied(place.module)))
        place.put(instead)

    def put_back(self) -> Callable[[], None]:
        """Put the modules of other ranks back, without weights; what comes back puts their stand-ins there again."""
        stand_ins = [(place, place.module) for place, _ in self._elsewhere]
        for place, module in self._elsewhere:
            place.put(module)

        def undo() -> None:
            for place, module in stand_ins:
                place.put(module)

        return undo

    # -- running -------------------------------------------------------------------------------------------

    def run(self, stage: int, function: Callable[[Any], Any], batch: Any, received: Tensor | None) -> Any:
        """What a function of the task (`train_step`, say) gives on the last stage; on the others, what goes on.

        `received` is what the stage before gave, None on the first.
        """
        low, high = self.edges[stage : stage + 2]
        is_last = stage == self.count - 1
        at_rest = [place.module for place in self.places]
        self._received, self._entered = received, 0
        for i, (place, slot) in enumerate(zip(self.places, self._slots, strict=True)):
            slot.meet = self._enter if i == low - 1 else self._leave if i == high else _pass_by
            place.put(self.layers[i] if low <= i < high else slot)
        try:
            output = function(batch)
        except _Left as left:
            return left.hidden
        finally:
            self._received = None
            for place, slot, module in zip(self.places, self._slots, at_rest, strict=True):
                slot.meet = _absent
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
            raise BadArgument(
                expected("a tensor to go from one stage to the next", type(hidden).__name__, "Pass another split.")
            )
        raise _Left(hidden)


class Slot(nn.Module):
    """What stands for a module of another stage. It has no parameters, yet the attributes of that module."""

    meet: Callable[[Any], Any]

    def __init__(self, like: nn.Module) -> None:
        super().__init__()
        self.__dict__["like"] = like  # not as a part of this one: its parameters are not ours
        self.meet = _absent

    def __getattr__(self, name: str) -> Any:
        if "like" not in self.__dict__:  # a copy that is being made
            raise AttributeError(name)
        return getattr(self.__dict__["like"], name)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Do what is to be done here in this pass."""
        return self.meet(args[0] if args else next(iter(kwargs.values())))


class Vacant(Slot):
    """What stands for the embeddings on later stages: zeros of their shape, which nobody uses."""

    def forward(self, ids: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        """Zeros."""
        weight = self.like.weight
        return torch.zeros(*ids.shape, weight.shape[1], dtype=weight.dtype, device=ids.device)


class _Left(BaseException):
    """The forward pass ends here for this stage. No error, and nothing that a task should catch."""

    def __init__(self, hidden: Tensor) -> None:
        super().__init__()
        self.hidden = hidden


def _pass_by(hidden: Any) -> Any:
    return hidden


def _absent(hidden: Any) -> Any:
    raise BadArgument(
        "This part of the model is on another rank. With strategy='pipeline' the model runs in train_step and "
        "eval_step; export the whole of it with the trainer."
    )


def emptied(module: nn.Module) -> nn.Module:
    """The same module without the memory of its weights. Buffers that no checkpoint holds stay: nothing fills them."""
    for part in module.modules():
        for name, p in part._parameters.items():
            if p is not None:
                part._parameters[name] = nn.Parameter(p.detach().to("meta"), requires_grad=p.requires_grad)
        for name, buffer in part._buffers.items():
            if buffer is not None and name not in part._non_persistent_buffers_set:
                part._buffers[name] = buffer.to("meta")
    return module


def balanced(sizes: Sequence[int], learns: Sequence[bool], stages: int) -> list[int]:
    """Where stages begin so that the largest is as small as can be, and each has something to train.

    >>> balanced([5, 1, 1, 1, 1, 1], [True] * 6, 2)
    [0, 1, 6]
    >>> balanced([4, 0, 4, 0, 2], [True, False, True, False, True], 3)
    [0, 1, 3, 5]
    """
    if sum(learns) < stages:
        raise BadArgument(
            expected(
                f"a model with at least {stages} layers that have parameters to train, one for each stage",
                f"one with {sum(learns)}",
                "Use fewer processes, or fewer stages_per_rank.",
            )
        )
    upto = [sum(sizes[:i]) for i in range(len(sizes) + 1)]
    trained = [sum(learns[:i]) for i in range(len(sizes) + 1)]
    # The best for the first `end` layers in so many stages: (largest stage, where the last of them begins).
    best: list[dict[int, tuple[float, int]]] = [{0: (0.0, 0)}]
    for _ in range(stages):
        row: dict[int, tuple[float, int]] = {}
        for end in range(1, len(sizes) + 1):
            ways = [
                (max(largest, upto[end] - upto[begin]), begin)
                for begin, (largest, _) in best[-1].items()
                if begin < end and trained[end] > trained[begin]
            ]
            if ways:
                row[end] = min(ways)
        best.append(row)
    edges = [len(sizes)]
    for row in reversed(best[1:]):
        edges.append(row[edges[-1]][1])
    return edges[::-1]


def _elements(module: nn.Module) -> int:
    return sum(p.numel() for p in module.parameters())


def _learns(module: nn.Module) -> bool:
    return any(p.requires_grad for p in module.parameters())


def _has_state(module: nn.Module) -> bool:
    return bool(module.state_dict())


def _find(model: nn.Module) -> tuple[list[Place], list[Place], list[Place]]:
    """The places of layers, of embeddings before them and of what comes after them."""
    if isinstance(model, nn.Sequential):
        return _places(model), [], []
    if hasattr(model, "base_model_prefix") and hasattr(model, "config"):
        return _find_in_decoder(model)
    parts = [module for module in model.children() if _has_state(module)]
    if len(parts) == 1 and isinstance(parts[0], nn.Sequential) and not any(True for _ in model.parameters(False)):
        return _places(parts[0]), [], []
    raise BadArgument(expected("a model that can be cut into stages", type(model).__name__, _SPLITTABLE))


def _find_in_decoder(model: Any) -> tuple[list[Place], list[Place], list[Place]]:
    base = getattr(model, model.base_model_prefix, model)
    lists = [m for m in base.children() if isinstance(m, nn.ModuleList) and len(m) == model.config.num_hidden_layers]
    direct = [name for part in {base, model} for name, _ in part.named_parameters(recurse=False)]
    if len(lists) != 1 or direct or getattr(model.config, "is_encoder_decoder", False):
        raise BadArgument(expected("a model that can be cut into stages", type(model).__name__, _SPLITTABLE))
    if getattr(model.config, "output_router_logits", False):
        raise BadArgument(
            "Expected output_router_logits to be off: the loss of the routers is made of all layers, and a stage sees "
            "its own alone. Load the model with output_router_logits=False, or use another strategy."
        )
    before, after = [], []
    for name, part in base.named_children():
        if part is lists[0] or not _has_state(part):
            continue
        if isinstance(part, nn.Embedding):
            before.append(Place(base, name))
        elif name in _LAST_NORMS:
            after.append(Place(base, name))
        else:
            do = f"It has {name!r} beside its layers. {_SPLITTABLE}"
            raise BadArgument(expected("a model that can be cut into stages", type(model).__name__, do))
    if base is not model:
        after += [Place(model, name) for name, part in model.named_children() if part is not base and _has_state(part)]
    for layer in lists[0]:
        layer.register_forward_hook(_gives_tensor)
    return _places(lists[0]), before, after


def _gives_tensor(layer: nn.Module, args: Any, output: Any) -> None:
    if not isinstance(output, Tensor):
        raise BadArgument(expected(f"{type(layer).__name__} to give a tensor", type(output).__name__, _SPLITTABLE))


def _places(layers: nn.Module) -> list[Place]:
    return [Place(layers, name) for name in layers._modules]
