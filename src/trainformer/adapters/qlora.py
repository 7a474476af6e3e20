"""QLoRA: LoRA on a model whose frozen weights bitsandbytes keeps in 4 bits.

Owns the quantisation settings, the preparation for training, and dequantisation for the merge. bitsandbytes quantises
while a model is loaded, so tasks pass `load_options()` to `from_pretrained`.
"""

from __future__ import annotations

from dataclasses import KW_ONLY, dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.adapters.base import FolderPath, adapted_model, check_kind, is_adapted, peft, unwrap_model
from trainformer.adapters.lora import LoRA, merge_peft_model
from trainformer.adapters.state import active_adapters, adapter_state_dict, load_adapter_state_dict
from trainformer.adapters.targets import is_conv1d
from trainformer.core.errors import BadArgument, check_choice, expected
from trainformer.core.optional import require

_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CLASSIFIERS = ("sequence_classification", "token_classification", "vision")
_HEADS = ("classifier", "pre_classifier", "score", "classification_head", "classification_heads")
_OUTPUTS = ("lm_head", "embed_out", "output_projection", "cls", "vocab_projector", "vocab_transform")
_HALF = (torch.bfloat16, torch.float16)


@dataclass
class QLoRA(LoRA):
    """LoRA on a model in 4 bits: about a quarter of the memory of bf16 weights.

    Args:
        quant_type: "nf4" (optimal for normally distributed weights) or "fp4".
        double_quant: Quantise the scales too, which saves 0.4 bits per parameter.
        compute_dtype: dtype of matrix products. Default: bf16 on GPUs that support it, else fp16; fp32 on the CPU.
        paged_optimizer: Recommend an optimizer that pages its state to host memory when GPU memory is short.

    The other arguments are those of `LoRA`.

    >>> QLoRA(r=16).optimizer
    'paged_adamw_8bit'
    """

    _: KW_ONLY
    quant_type: str = "nf4"
    double_quant: bool = True
    compute_dtype: torch.dtype | str | None = None
    paged_optimizer: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_choice("quant_type", self.quant_type, ("nf4", "fp4"))
        if self.compute_dtype is not None and self.compute_dtype not in {*_DTYPES, *_DTYPES.values()}:
            raise BadArgument(expected(f"compute_dtype to be one of {', '.join(_DTYPES)}", self.compute_dtype))

    @property
    def optimizer(self) -> str | None:
        """The recommended optimizer, under its name in transformers; None for no recommendation."""
        return "paged_adamw_8bit" if self.paged_optimizer else None

    def load_options(self, kind: str | None = None) -> dict[str, Any]:
        """The quantisation config for `from_pretrained`. Skips the output layer and modules that are trained in full.

        Pass the `kind` of a classifier to skip its head, which is trained in full.
        """
        check_kind(kind)
        _bitsandbytes()
        full = [*(self.modules_to_save or ()), *(_HEADS if kind in _CLASSIFIERS else ())]
        transformers = require("transformers", "adapters", "to load a model in 4 bits")
        config = transformers.BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type=self.quant_type,
            bnb_4bit_use_double_quant=self.double_quant,
            bnb_4bit_compute_dtype=self._compute_dtype(),
            # An explicit list replaces the modules that transformers would skip by default.
            llm_int8_skip_modules=[*full, *_OUTPUTS] if full else None,
        )
        return {"quantization_config": config}

    def check(self, *, kind: str | None = None, model: Any = None, **settings: bool) -> None:
        """Reject QLoRA without bitsandbytes, and on models that transformers does not load."""
        super().check(kind=kind, model=model, **settings)
        _bitsandbytes()
        if isinstance(model, nn.Module) and not is_quantised(model):
            raise BadArgument(expected("a model that was loaded in 4 bits", _described(model), _HOW_TO_LOAD))
        if kind == "vision" and not isinstance(model, nn.Module):
            what = "a transformers model, whose weights are quantised while loading"
            raise BadArgument(expected(what, "a vision model", "Use LoRA, which works with any model."))

    def apply(self, model: nn.Module, *, kind: str | None = None) -> nn.Module:
        """Prepare a quantised model for training and add LoRA, in place."""
        self._prepare(model, kind)
        return super().apply(model, kind=kind)

    def load(self, model: nn.Module, folder: FolderPath) -> nn.Module:
        """Load weights into an adapted model, or add the saved adapter to a quantised one."""
        self._prepare(model)
        return super().load(model, folder)

    def _prepare(self, model: nn.Module, kind: str | None = None) -> None:
        if not is_adapted(model):
            self.check(kind=kind, model=unwrap_model(model))
            prepare_quantised(unwrap_model(model))

    def merge(self, model: nn.Module) -> nn.Module:
        """Dequantise, then merge the adapter in full precision. Returns the plain model; the adapted one is consumed.

        Merging into 4-bit weights would round most of a small update away.
        """
        inner = adapted_model(model)
        if not is_quantised(inner):
            return merge_peft_model(inner)
        names = active_adapters(inner)
        configs = {name: inner.peft_config[name] for name in names}
        states = {name: {k: t.clone() for k, t in adapter_state_dict(inner, name=name).items()} for name in names}
        plain = inner.unload()
        transposed = [n for n, part in plain.named_modules() if is_conv1d(getattr(part, "source_cls", None))]
        dtype = _stream_dtype(plain)
        _undo_norms(plain, dtype)
        plain = plain.dequantize(dtype)
        plain.is_loaded_in_4bit = False
        again = peft().get_peft_model(plain, configs[names[0]], adapter_name=names[0])
        for name in names[1:]:
            again.add_adapter(name, configs[name])
        for name in names:
            load_adapter_state_dict(again, states[name], name)
        again.base_model.set_adapter(list(names))
        plain = merge_peft_model(again)
        for name in transposed:
            # bitsandbytes transposed GPT-2's `Conv1D`, and transformers does not undo it.
            layer: Any = plain.get_submodule(name)
            conv = require("transformers.pytorch_utils", "adapters", "for GPT-2").Conv1D(0, 0)
            conv.nf, conv.nx = layer.weight.shape
            conv.weight, conv.bias = nn.Parameter(layer.weight.detach().T.contiguous()), layer.bias
            plain.set_submodule(name, conv)
        return plain

    def _compute_dtype(self) -> torch.dtype:
        if isinstance(self.compute_dtype, str):
            return _DTYPES[self.compute_dtype]
        if self.compute_dtype is not None:
            return self.compute_dtype
        if not torch.cuda.is_available():
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


_HOW_TO_LOAD = (
    "Load it with the adapter's own options: AutoModelForCausalLM.from_pretrained(name, **adapter.load_options()). "
    "A model made from a configuration is saved first (save_pretrained) and loaded from there. Or use LoRA."
)


def is_quantised(model: nn.Module) -> bool:
    """Whether a model has 4-bit weights.

    >>> is_quantised(nn.Linear(2, 2))
    False
    """
    return any(type(parameter).__name__ == "Params4bit" for parameter in model.parameters())


def prepare_quantised(model: nn.Module) -> None:
    """Freeze a quantised model and run its norms in float32, in place.

    peft casts everything that is not quantised to float32, including embeddings and output layer: 2.1 GB more for Llama
    3 8B. Here only norms change, and cast their outputs back, so that the layers in between (which are not under
    autocast during generation) get the dtype they expect. Inputs need no gradients, because gradient checkpointing here
    is non-reentrant.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in model.modules():
        # On CPUs with AVX512-BF16, bitsandbytes 0.50 repacks weights in place at the first evaluation: outputs change
        # (scales are rounded to bf16), and later training steps silently pass no gradient to the layers below. It also
        # fails on widths that are not multiples of 64. The switch is a plain attribute of each layer.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010, mypy infers a tensor
    dtype = _stream_dtype(model)
    if dtype not in _HALF:
        return
    for module in _norms(model):
        if not any(isinstance(hook, _ToDtype) for hook in module._forward_hooks.values()):
            module.float()
            module.register_forward_pre_hook(_to_fp32)
            module.register_forward_hook(_ToDtype(dtype))


class _ToDtype:
    """A forward hook that casts the output of a norm to the dtype of the residual stream."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output.to(self.dtype) if isinstance(output, Tensor) else output


def _to_fp32(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.float() if isinstance(a, Tensor) and a.dtype in _HALF else a for a in args)


def _norms(model: nn.Module) -> list[nn.Module]:
    """Normalisation layers, by class name: each architecture has its own class."""
    return [
        module
        for module in model.modules()
        if "norm" in type(module).__name__.lower()
        and not list(module.children())
        and isinstance(getattr(module, "weight", None), Tensor)
    ]


def _undo_norms(model: nn.Module, dtype: torch.dtype) -> None:
    for module in _norms(model):
        for hooks in (module._forward_hooks, module._forward_pre_hooks):
            for key in [key for key, hook in hooks.items() if isinstance(hook, _ToDtype) or hook is _to_fp32]:
                del hooks[key]
                module.to(dtype)


def _stream_dtype(model: nn.Module) -> torch.dtype:
    """dtype of the weights outside quantised layers, from the configuration."""
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    dtype = _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _described(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    return f"{type(model).__name__} in {parameter.dtype}" if parameter is not None else type(model).__name__


def _bitsandbytes() -> ModuleType:
    return require("bitsandbytes", "adapters", "for QLoRA, whose frozen weights it keeps in 4 bits,")
