"""fp8 training and quantization-aware training (QAT) of linear layers, with torchao.

Owns the names of the recipes, which layers each applies to, and converting a model in place. Parameters stay the same
objects under the same names, so optimizers, tied weights and checkpoints are unaffected. Deployment is handled by
`trainformer.checkpoint.finalize`.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from trainformer.adapters.base import is_adapted, kind_of, unwrap_model
from trainformer.adapters.targets import head_names, linear_names
from trainformer.backends.torch.state import capture_random, restore_random
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require

if TYPE_CHECKING:
    from trainformer.run.torch.settings import RunSettings

#: From the fastest to the most accurate.
FP8_RECIPES = ("tensorwise", "rowwise", "rowwise_with_gw_hp")
#: Set to 1 to emulate fp8 on devices without it: slowly, to try things out.
EMULATE = "TRAINFORMER_FP8_EMULATE"
_FP8_CAPABILITY = (8, 9)
_INT4: torch.dtype = torch.int4  # type: ignore[attr-defined]
_FP8_MULTIPLE = 16  # the kernels need multiples of this in both sizes of a layer


@dataclass(frozen=True)
class Recipe:
    """A quantization recipe; `group` is how many weights of a row share a scale, None: all of them."""

    name: str
    group: int | None
    make: Callable[[ModuleType, int | None], Any] = field(repr=False)
    needs_gpu: bool = False

    def base(self) -> Any:
        """A new torchao configuration."""
        return self.make(torchao(), self.group)


def _int8_activations(ao: ModuleType, group: int | None, bits: torch.dtype = _INT4) -> Any:
    return ao.Int8DynamicActivationIntxWeightConfig(weight_dtype=bits, weight_granularity=_granularity(ao, group))


def _weight_only(ao: ModuleType, group: int | None, bits: torch.dtype = _INT4) -> Any:
    return ao.IntxWeightOnlyConfig(weight_dtype=bits, granularity=_granularity(ao, group))


def _granularity(ao: ModuleType, group: int | None) -> Any:
    return ao.PerAxis(0) if group is None else ao.PerGroup(group)


#: By name. The first four quantize symmetrically, with one byte per weight until a runtime packs them.
RECIPES = {
    recipe.name: recipe
    for recipe in (
        Recipe("int8-dynamic-act-int4-weight", 32, _int8_activations),
        Recipe("int8-dynamic-act-int8-weight", None, lambda ao, group: _int8_activations(ao, group, torch.int8)),
        Recipe("intx-int4-weight-only", 32, _weight_only),
        Recipe("int8-weight-only", None, lambda ao, group: _weight_only(ao, group, torch.int8)),
        Recipe("int4-weight-only", 32, lambda ao, group: ao.Int4WeightOnlyConfig(group_size=group), True),
        Recipe(
            "float8-dynamic-act-float8-weight",
            None,
            lambda ao, group: ao.Float8DynamicActivationFloat8WeightConfig(granularity=ao.PerRow()),
            True,
        ),
        Recipe(
            "float8-dynamic-act-int4-weight", 128, lambda ao, group: ao.Float8DynamicActivationInt4WeightConfig(), True
        ),
    )
}


@dataclass(frozen=True)
class Layers:
    """Names of the layers that a recipe applies to, and of the others by reason."""

    chosen: tuple[str, ...]
    skipped: dict[str, tuple[str, ...]]

    def __str__(self) -> str:
        """
        >>> str(Layers(("0", "1"), {"an output layer": ("head",)}))
        '2 linear layers; left unchanged: 1 (an output layer)'
        """
        text = f"{len(self.chosen)} linear layer{'' if len(self.chosen) == 1 else 's'}"
        left = ", ".join(f"{len(names)} ({reason})" for reason, names in self.skipped.items())
        return f"{text}; left unchanged: {left}" if left else text


# -- names -------------------------------------------------------------------------------------------------


def recipe_named(name: str, argument: str) -> Recipe:
    """The recipe of that name.

    >>> recipe_named("int8-weights-only", "qat_recipe")
    Traceback (most recent call last):
    ...
    trainformer.core.errors.BadArgument: Expected qat_recipe to be the name of a recipe, received 'int8-weights-only'. \
Did you mean 'int8-weight-only' or 'int4-weight-only' or 'intx-int4-weight-only'?
    """
    if not isinstance(name, str) or name not in RECIPES:
        hint = did_you_mean(str(name), RECIPES) or f"Known: {', '.join(RECIPES)}."
        raise BadArgument(expected(f"{argument} to be the name of a recipe", name, hint))
    return RECIPES[name]


def fp8_recipe_of(precision: str, fp8_recipe: str | None) -> str | None:
    """The fp8 recipe of the settings; None without fp8.

    >>> fp8_recipe_of("fp8", None), fp8_recipe_of("auto", None)
    ('tensorwise', None)
    """
    return fp8_recipe or ("tensorwise" if precision == "fp8" else None)


def check_recipes(precision: str, fp8_recipe: str | None, qat_recipe: str | None) -> None:
    """Raise for unknown names and incompatible settings."""
    if fp8_recipe is not None and fp8_recipe not in FP8_RECIPES:
        hint = did_you_mean(str(fp8_recipe), FP8_RECIPES)
        raise BadArgument(expected(f"fp8_recipe to be one of {', '.join(FP8_RECIPES)} or None", fp8_recipe, hint))
    if qat_recipe is not None:
        recipe_named(qat_recipe, "qat_recipe")
    fp8 = fp8_recipe_of(precision, fp8_recipe)
    if fp8 and qat_recipe:
        raise BadArgument(
            f"Expected fp8 or qat_recipe, received both ({fp8!r} and {qat_recipe!r}): each replaces the linear layers. "
            "Train in bf16 for quantization (precision='bf16'), or leave out qat_recipe."
        )
    if fp8 and precision in ("fp16", "float16", "16"):
        do = "fp8 layers have their own gradient scaling; leave out precision, or pass 'fp8'."
        raise BadArgument(expected("fp8 in a bf16 run", precision, do))


# -- which layers ------------------------------------------------------------------------------------------


def layers_for(model: nn.Module, recipe: Recipe) -> Layers:
    """Layers that a recipe applies to. Depends on the model structure only, so it is the same after training."""
    reason = f"width not divisible by {recipe.group}"
    return _select_layers(model, lambda layer: reason if recipe.group and layer.in_features % recipe.group else None)


def _select_layers(model: nn.Module, reason: Callable[[nn.Linear], str | None]) -> Layers:
    """Linear layers to replace, and why the others are not."""
    usual = set(linear_names(model))
    heads = head_names(model, kind_of(model))
    adapters: list[str] = []
    if is_adapted(model):
        kinds = sys.modules["peft.tuners.tuners_utils"].BaseTunerLayer
        adapters = [name for name, part in model.named_modules() if isinstance(part, kinds)]
    chosen: list[str] = []
    skipped: dict[str, list[str]] = {}
    for name, layer in model.named_modules():
        if not isinstance(layer, nn.Linear):
            continue
        parent = model.get_submodule(name.rpartition(".")[0])
        if type(layer) is not nn.Linear or (name not in usual and isinstance(parent, nn.MultiheadAttention)):
            why: str | None = f"a {type(layer).__name__}"
        elif not name or name not in usual or _is_inside(name, heads):
            why = "an output layer"
        elif _is_inside(name, adapters):
            why = "in an adapter"
        else:
            why = reason(layer)
        if why is None:
            chosen.append(name)
        else:
            skipped.setdefault(why, []).append(name)
    return Layers(tuple(chosen), {why: tuple(names) for why, names in skipped.items()})


def _is_inside(name: str, parts: list[str]) -> bool:
    return any(name == part or name.startswith(f"{part}.") for part in parts)


# -- conversion ------------------------------------------------------------------------------------------


def check_fp8_device(device: torch.device) -> None:
    """Raise if the device does not support fp8."""
    if is_emulated():
        return
    received = str(device)
    if device.type == "cuda":
        capability = torch.cuda.get_device_capability(device)
        if capability >= _FP8_CAPABILITY:
            return
        received = f"{torch.cuda.get_device_name(device)}, which has {'.'.join(map(str, capability))}"
    raise BadArgument(
        f"Expected a GPU of compute capability {'.'.join(map(str, _FP8_CAPABILITY))} or more for fp8 (Ada, Hopper, "
        f"Blackwell), received {received}. Pass precision='bf16'. To try a run out elsewhere, slowly, set {EMULATE}=1."
    )


def is_emulated() -> bool:
    """Whether fp8 is emulated."""
    return os.environ.get(EMULATE, "0") not in ("", "0")


def replace_layers(model: nn.Module, settings: RunSettings, fp8: str | None) -> str:
    """Replace linear layers by fp8 or fake-quantized ones, as the settings say. Returns a description."""
    if fp8 is not None:
        return f"fp8 ({fp8}) in {use_fp8(model, fp8, settings.fp8_dim_alignment)}"
    if settings.qat_recipe is not None:
        recipe = recipe_named(settings.qat_recipe, "qat_recipe")
        return f"quantization-aware training for {recipe.name}: {prepare_qat(model, recipe)}"
    return ""


def use_fp8(model: nn.Module, recipe: str, alignment: int = _FP8_MULTIPLE) -> Layers:
    """Convert linear layers to fp8 matmuls, in place. Weights keep their dtype; both operands are cast every time."""
    float8 = require("torchao.float8", "quantization", "for fp8")
    if alignment % _FP8_MULTIPLE and not is_emulated():
        raise BadArgument(expected(f"fp8_dim_alignment to be a multiple of {_FP8_MULTIPLE}", alignment))

    def reason(layer: nn.Linear) -> str | None:
        if layer.in_features % alignment or layer.out_features % alignment:
            return f"size not divisible by {alignment}"
        return None if layer.weight.requires_grad else "frozen"

    with _converting(model) as inner:
        layers = _select_layers(inner, reason)
        wanted = _modules(inner, layers, f"fp8_recipe={recipe!r}")
        config = dataclasses.replace(float8.Float8LinearConfig.from_recipe_name(recipe), emulate=is_emulated())
        float8.convert_to_float8_training(inner, config=config, module_filter_fn=lambda part, name: id(part) in wanted)
        if is_emulated():
            for part in inner.modules():
                if type(part).__name__ == "Float8Linear":
                    part.register_forward_pre_hook(_apply_autocast)
    return layers


def prepare_qat(model: nn.Module, recipe: Recipe) -> Layers:
    """Insert fake quantization into linear layers, in place: they round weights and inputs as the recipe will."""
    if is_adapted(model):
        raise BadArgument(
            "Expected qat_recipe or an adapter, received both: quantization applies to the merged weight, which does "
            "not exist while the adapter is trained. Train without an adapter, or without qat_recipe and quantize the "
            "merged model: trainformer finalize RUN OUT --quantize RECIPE."
        )
    qat = require("torchao.quantization.qat", "quantization", "for quantization-aware training")
    with _converting(model) as inner:
        layers = layers_for(inner, recipe)
        wanted = _modules(inner, layers, f"the recipe {recipe.name!r}")
        config = qat.QATConfig(recipe.base(), step="prepare")
        torchao().quantize_(inner, config, filter_fn=lambda part, name: id(part) in wanted)
        for part in inner.modules():
            for name in ("activation_fake_quantizer", "weight_fake_quantizer"):
                quantizer = getattr(part, name, None)
                config = getattr(quantizer, "config", None)
                types = (getattr(config, "dtype", None), getattr(config, "activation_dtype", None))
                if quantizer is not None and torch.float8_e4m3fn in types:
                    setattr(part, name, _StraightThrough(quantizer))
    return layers


def restore_linear(model: nn.Module) -> None:
    """Convert back to plain linear layers, in place, with the same parameters."""
    for name, part in list(model.named_modules(remove_duplicate=False)):
        if name and type(part).__name__ in ("FakeQuantizedLinear", "Float8Linear"):
            with torch.device("meta"):
                plain = nn.Linear(part.in_features, part.out_features, bias=False)  # type: ignore[arg-type]
            plain.weight, plain.bias = part.weight, part.bias  # type: ignore[assignment]
            model.set_submodule(name, plain.train(part.training))


def _apply_autocast(layer: nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    """Cast inputs like autocast: torchao's layer honours it on a GPU only."""
    kind = inputs[0].device.type
    if kind == "cuda" or not torch.is_autocast_enabled(kind):
        return inputs
    return (inputs[0].to(torch.get_autocast_dtype(kind)), *inputs[1:])


class _PassGradient(torch.autograd.Function):
    """Straight-through estimator: rounds in the forward pass and passes the gradient through."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, rounded: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return rounded(values)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        return gradients[0], None


class _StraightThrough(nn.Module):
    """Wraps a float8 fake quantizer of torchao 0.18, whose gradient is zero for all but the largest values."""

    def __init__(self, quantizer: Any) -> None:
        super().__init__()
        self.quantizer = quantizer
        self.config = quantizer.config

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        return _PassGradient.apply(values, self.quantizer)


@contextmanager
def _converting(model: nn.Module) -> Iterator[nn.Module]:
    """Context of a conversion: undoes an earlier one, and preserves random state and training modes."""
    inner, random = unwrap_model(model), capture_random()  # new layers draw weights that are discarded
    restore_linear(inner)
    yield inner
    restore_random(random)
    for part in inner.modules():
        for child in part.children():
            if isinstance(child, nn.Linear):
                child.train(part.training)
        if isinstance(part, nn.TransformerEncoderLayer):
            # Its fast path for evaluation uses the weights of its layers without calling them.
            part.activation_relu_or_gelu = 0


def _modules(model: nn.Module, layers: Layers, setting: str) -> set[int]:
    """Ids of the chosen modules: one that appears under two names is replaced under both."""
    if not layers.chosen:
        raise BadArgument(
            f"Expected a model with linear layers for {setting}, received {type(model).__name__}, none of whose layers "
            f"qualifies ({layers}). Leave it out."
        )
    return {id(model.get_submodule(name)) for name in layers.chosen}


def torchao() -> ModuleType:
    """The torchao quantization package."""
    return require("torchao.quantization", "quantization", "to quantize")
