"""Select the layers that an adapter adapts, and the modules that are trained in full.

Owns the defaults by architecture, "all-linear", the language model inside a vision-language model, the head of a
classifier, and the errors for unknown names.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require

ALL_LINEAR = "all-linear"
Targets = str | Sequence[str] | None

# Layers that LoRA supports. transformers' Conv1D (GPT-2) is a linear layer with a transposed weight.
_LAYERS = (nn.Linear, nn.Embedding, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.MultiheadAttention)
# Usual names of the classifier in models outside timm and transformers (torchvision).
_HEADS = ("head", "heads", "fc", "classifier")


def resolve_targets(
    model: nn.Module, wanted: Targets, kind: str | None = None, full: Sequence[str] = ()
) -> list[str] | str:
    """Targets as peft takes them: a list of full names or suffixes, or a regular expression.

    "all-linear" leaves out the modules in `full`, which are trained in full. On a vision-language model the defaults,
    "all-linear" and names without a dot refer to the language model: LLaVA's vision tower has a ``q_proj`` too.
    """
    inside = language_model_name(model) if kind == "vlm" else None
    if wanted is None:
        wanted = _defaults(model, kind)
    if wanted == ALL_LINEAR:
        return _all_linear(model, inside, full)
    if isinstance(wanted, str):
        try:
            matched = _matching(model, re.compile(wanted))
        except re.error as error:
            do = 'Pass a list of names, "all-linear", or an expression that fits full names of modules.'
            what = f"target_modules to be a regular expression ({error})"
            raise BadArgument(expected(what, wanted, do)) from error
        if matched:
            _check_layers(model, matched)
            return wanted
        wanted = [wanted]  # peft would read "q_proj" as a regular expression, and find nothing
    names = list(wanted or ())
    found = {target: _named(model, target) for target in names}
    if inside is not None and not any("." in name for name in names):
        found = {target: _inside(full_names, inside) for target, full_names in found.items()}
        for target in [target for target, full_names in found.items() if not full_names]:
            do = "Pass a regular expression over full names to adapt other parts."
            raise BadArgument(expected(f"target_modules to name layers of the language model ({inside})", target, do))
        _check_layers(model, [name for full_names in found.values() for name in full_names])
        return rf"{re.escape(inside)}\.(?:.*\.)?(?:{'|'.join(map(re.escape, names))})"
    _check_layers(model, [name for full_names in found.values() for name in full_names])
    return names


def resolve_parameters(model: nn.Module, wanted: Sequence[str] | str | None) -> list[str] | None:
    """Parameters as peft takes them: suffixes of names. "experts" stands for the stacked weights of all experts.

    >>> resolve_parameters(nn.Linear(1, 1), None)
    """
    if wanted is None:
        return None
    stacked = [name for name, p in model.named_parameters() if p.ndim == 3 and _owner_has_experts(model, name)]
    names = [wanted] if isinstance(wanted, str) else list(wanted)
    if names == ["experts"]:
        names = sorted({".".join(name.split(".")[-2:]) for name in stacked})
    if not stacked or not names:
        do = "Leave it out for attention and other linear layers alone."
        raise BadArgument(expected("a model with stacked expert weights for target_parameters", wanted, do))
    for name in names:
        if not any(_matches(full, name) for full in stacked):
            known = sorted({".".join(full.split(".")[-2:]) for full in stacked})
            do = did_you_mean(name, known) or f"It has {', '.join(known)}."
            raise BadArgument(expected("target_parameters to name stacked weights of experts", name, do))
    return names


def _owner_has_experts(model: nn.Module, name: str) -> bool:
    return hasattr(model.get_submodule(name.rpartition(".")[0]), "num_experts")


def adapted_layers(model: nn.Module, targets: Sequence[str] | str) -> list[nn.Module]:
    """The modules that resolved targets refer to."""
    if isinstance(targets, str):
        return [model.get_submodule(name) for name in _matching(model, re.compile(targets))]
    modules = dict(model.named_modules())
    # Look up full names: a mixture of experts has tens of thousands.
    ends = tuple(f".{target}" for target in targets if target not in modules)
    wanted = set(targets)
    return [module for name, module in modules.items() if name in wanted or (ends and name.endswith(ends))]


def linear_names(model: nn.Module) -> list[str]:
    """Full names of all linear layers, except the output layer of a language model.

    Layers inside `nn.MultiheadAttention` are left out: it reads their weights without calling them.

    >>> linear_names(nn.Sequential(nn.Linear(2, 2), nn.ReLU(), nn.Sequential(nn.Linear(2, 1))))
    ['0', '2.0']
    """
    skipped = {
        id(part) for module in model.modules() if isinstance(module, nn.MultiheadAttention) for part in module.modules()
    } | {id(_call(model, "get_output_embeddings"))}
    return [
        name
        for name, module in model.named_modules()
        if (isinstance(module, nn.Linear) or is_conv1d(type(module))) and id(module) not in skipped
    ]


def is_conv1d(given: type | None) -> bool:
    """Whether a class is transformers' Conv1D, a linear layer with a transposed weight (GPT-2)."""
    return given is not None and given.__name__ == "Conv1D" and given.__module__ == "transformers.pytorch_utils"


def head_names(model: nn.Module, kind: str | None) -> list[str]:
    """Modules of the task head, which are newly initialised and therefore trained in full.

    timm models report their classifier. In a transformers model for classification, it is everything but the encoder
    (DistilBERT has a ``pre_classifier`` too), and what its files did not have (`new_weights`: a pooler in the encoder).
    Language models have no head: their output layer is pretrained.

    >>> head_names(nn.Sequential(), "causal_lm")
    []
    """
    heads = _call(model, "get_classifier")
    if heads is not None:
        heads = heads if isinstance(heads, tuple) else (heads,)
        return [name for name, part in model.named_modules() if _has_weights(part) and any(part is h for h in heads)]
    if kind not in ("sequence_classification", "token_classification", "vision"):
        return []
    encoder = getattr(model, "base_model_prefix", None)
    if hasattr(getattr(model, "config", None), "model_type"):
        names = [name for name, part in model.named_children() if name != encoder and _has_weights(part)]
        new = dict.fromkeys(key.rpartition(".")[0] for key in getattr(model, "new_weights", ()))
        return [*names, *(name for name in new if name.partition(".")[0] not in names)]
    return [name for name, part in model.named_children() if name in _HEADS and _has_weights(part)]


def tied_embeddings(model: nn.Module) -> list[nn.Module]:
    """Input and output embeddings if they are tied, else nothing."""
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config
    pair = [_call(model, "get_input_embeddings"), _call(model, "get_output_embeddings")]
    tied = getattr(text, "tie_word_embeddings", False) and all(isinstance(part, nn.Module) for part in pair)
    return pair if tied else []


def names_of(model: nn.Module, modules: Sequence[nn.Module], among: Sequence[str]) -> list[str]:
    """The names (or suffixes) in `among` that refer to one of the modules.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1))
    >>> names_of(model, [model[1]], ["0", "1"])
    ['1']
    """
    own = [name for name, part in model.named_modules() if any(part is module for module in modules)]
    return [name for name in among if any(_matches(full, name) for full in own)]


def check_names(model: nn.Module, names: Sequence[str], argument: str) -> None:
    """Reject names of modules that a model does not have."""
    for name in names:
        _named(model, name, argument)


def language_model_name(model: nn.Module) -> str:
    """Full name of the language model inside a vision-language model."""
    names = [name for name, _ in model.named_modules() if _matches(name, "language_model")]
    if names:
        return min(names, key=len)
    decoder = _call(model, "get_decoder")
    for name, module in model.named_modules():
        if name and module is decoder:
            return name
    what = "a vision-language model whose language model can be found (language_model, or get_decoder())"
    do = "Pass target_modules as a regular expression over full names of modules."
    raise BadArgument(expected(what, type(model).__name__, do))


def _defaults(model: nn.Module, kind: str | None) -> Targets:
    """peft's defaults for the architecture (query and value, as in the LoRA paper), else all linear layers."""
    config = getattr(model, "config", None)
    if kind == "vlm":
        config = getattr(config, "text_config", config)
    constants = require("peft.utils.constants", "adapters", "for adapters")
    known = constants.TRANSFORMERS_MODELS_TO_LORA_TARGET_MODULES_MAPPING.get(getattr(config, "model_type", None))
    names = [name for name, _ in model.named_modules()]
    if isinstance(known, list) and all(any(_matches(name, target) for name in names) for target in known):
        return known
    return ALL_LINEAR


def _all_linear(model: nn.Module, inside: str | None, full: Sequence[str]) -> list[str] | str:
    names = linear_names(model)
    if inside is not None:
        names = _inside(names, inside)
    names = [name for name in names if not any(_matches(name, part) or f".{part}." in f".{name}" for part in full)]
    if names:
        return _exactly(model, names)
    layers = {type(module).__name__ for module in model.modules() if isinstance(module, _LAYERS)}
    received = f"none (it has {', '.join(sorted(layers)) or 'no layers that LoRA supports'})"
    do = 'Name the layers to adapt, convolutions for instance: target_modules=["conv1", "conv2"].'
    raise BadArgument(expected(f"linear layers besides the head in {type(model).__name__}", received, do))


def _exactly(model: nn.Module, names: list[str]) -> list[str] | str:
    """Names that select exactly these modules: peft also matches each name as a suffix.

    >>> model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.BatchNorm1d(1)))
    >>> _exactly(model, ["0"])  # '1.0' also ends in '0'
    '(?:0)'
    """
    chosen = set(names)
    for name, _ in model.named_modules():
        parts = name.split(".")
        if name not in chosen and any(".".join(parts[start:]) in chosen for start in range(1, len(parts))):
            return f"(?:{'|'.join(map(re.escape, names))})"
    return names


def _inside(names: Sequence[str], module: str) -> list[str]:
    return [name for name in names if name.startswith(f"{module}.")]


def _matching(model: nn.Module, pattern: re.Pattern[str]) -> list[str]:
    return [name for name, _ in model.named_modules() if name and pattern.fullmatch(name)]


def _named(model: nn.Module, target: str, argument: str = "target_modules") -> list[str]:
    """Full names that equal a name or end in it."""
    names = [name for name, _ in model.named_modules() if name]
    found = [name for name in names if _matches(name, target)]
    if not found:
        short = sorted({name.rsplit(".", 1)[-1] for name in names} - {str(number) for number in range(1000)})
        linear = sorted({name.rsplit(".", 1)[-1] for name in linear_names(model)})
        hint = did_you_mean(target, names if "." in target else short)
        hint = hint or f"Linear layers end in: {', '.join(linear[:12])}."
        raise BadArgument(expected(f"{argument} to name modules of {type(model).__name__}", target, hint))
    return found


def _check_layers(model: nn.Module, names: Sequence[str]) -> None:
    tied = tied_embeddings(model)
    for name in names:
        module = model.get_submodule(name)
        if any(module is embedding for embedding in tied):
            # peft's merge would add the update to the shared weight twice.
            what = "target_modules without embeddings whose weight the output layer shares"
            full = f"modules_to_save=[{name.rsplit('.', 1)[-1]!r}]"
            do = f"Train them in full ({full}), or some rows of them (trainable_token_indices)."
            raise BadArgument(expected(what, name, do))
        if not isinstance(module, _LAYERS) and not is_conv1d(type(module)):
            below = sorted({child.rsplit(".", 1)[-1] for child in linear_names(module)})
            do = f"Name layers in it: {', '.join(below[:8])}." if below else 'Pass "all-linear", for instance.'
            what = "target_modules to name linear, embedding or convolution layers"
            raise BadArgument(expected(what, f"{name} ({type(module).__name__})", do))


def _matches(name: str, target: str) -> bool:
    return name == target or name.endswith(f".{target}")


def _has_weights(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None


def _call(model: nn.Module, method: str) -> Any:
    """The result of a method without arguments; None if the model does not implement it."""
    function: Callable[[], Any] | None = getattr(model, method, None)
    try:
        return function() if callable(function) else None
    except (NotImplementedError, AttributeError):  # transformers declares both getters for every model
        return None
