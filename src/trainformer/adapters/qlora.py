"""QLoRA: LoRA on a model whose frozen weights are kept in 4 bits by bitsandbytes.

Owns the quantisation settings, the preparation of a quantised model for training, and its way back to full precision.
bitsandbytes quantises while a model is loaded, so a task passes `load_options()` on to `from_pretrained`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.adapters.base import AnyFolder, adapted_model, check_kind, is_adapted, peft, refuse_adapted, unwrapped
from trainformer.adapters.lora import LoRA, merged
from trainformer.adapters.state import adapter_state_dict, load_adapter_state_dict
from trainformer.adapters.targets import is_conv1d_class
from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require

_QUANT_TYPES = ("nf4", "fp4")
_DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
_CLASSIFIERS = ("sequence_classification", "token_classification", "vision")
_HEADS = ("classifier", "pre_classifier", "score", "classification_head", "classification_heads")
_OUTPUTS = ("lm_head", "embed_out", "output_projection", "cls", "vocab_projector", "vocab_transform")
_HALF = (torch.bfloat16, torch.float16)


@dataclass
class QLoRA(LoRA):
    """LoRA on a model in 4 bits: about a quarter of the memory of bf16 weights.

    Args:
        quant_type: "nf4" (made for weights that are normally distributed, as trained ones are) or "fp4".
        double_quant: Quantise the scales too, which saves 0.4 bits per parameter.
        compute_dtype: Type that products are computed in; by default bf16 on a GPU that has it, fp16 on one that has
            not, fp32 on the CPU.
        paged_optimizer: Advise an optimizer whose state moves to host memory when the GPU's is short.

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
        if self.quant_type not in _QUANT_TYPES:
            raise BadArgument(expected(f"quant_type to be one of {', '.join(_QUANT_TYPES)}", self.quant_type))
        known = self.compute_dtype is None or self.compute_dtype in {*_DTYPES, *_DTYPES.values()}
        if not known:
            raise BadArgument(expected(f"compute_dtype to be one of {', '.join(_DTYPES)}", self.compute_dtype))

    @property
    def optimizer(self) -> str | None:
        """The optimizer that fits, by the name transformers gives it; None for no advice."""
        return "paged_adamw_8bit" if self.paged_optimizer else None

    def load_options(self, kind: str | None = None) -> dict[str, Any]:
        """The quantisation, as an argument of `from_pretrained`. Output layer and modules trained in full are left out.

        Pass the `kind` of a classifier, so that its head, which is trained in full, is left out too.
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
            # Naming any makes transformers forget those it would leave out by itself.
            llm_int8_skip_modules=[*full, *_OUTPUTS] if full else None,
        )
        return {"quantization_config": config}

    def check(
        self,
        *,
        kind: str | None = None,
        packing: bool = False,
        gradient_checkpointing: bool = False,
        model: Any = None,
    ) -> None:
        """Refuse QLoRA without bitsandbytes, and on models that are not loaded by transformers."""
        super().check(kind=kind, packing=packing, gradient_checkpointing=gradient_checkpointing, model=model)
        _bitsandbytes()
        if isinstance(model, nn.Module) and not is_quantised(model):
            raise BadArgument(expected("a model that was loaded in 4 bits", _described(model), _HOW))
        if kind == "vision" and not isinstance(model, nn.Module):
            raise BadArgument(
                expected(
                    "a model that transformers loads, for its weights are quantised while loading",
                    "a vision model",
                    "Use LoRA, which goes onto any model.",
                )
            )

    def apply(self, model: nn.Module, *, kind: str | None = None) -> nn.Module:
        """Prepare a quantised model for training and put LoRA on it, in place."""
        refuse_adapted(model)
        model = unwrapped(model)
        self.check(kind=kind, model=model)
        prepare_quantised(model)
        return super().apply(model, kind=kind)

    def load(self, model: nn.Module, folder: AnyFolder) -> nn.Module:
        """Fill an adapted model from a folder, or adapt a quantised one as the folder says; the adapted model."""
        if not is_adapted(model):
            self.check(model=unwrapped(model))
            prepare_quantised(unwrapped(model))
        return super().load(model, folder)

    def merge(self, model: nn.Module) -> nn.Module:
        """The plain model, dequantised, with the adapter added in full precision. The adapted model is used up.

        Adding to 4-bit weights and rounding again would lose most of a small update.
        """
        inner = adapted_model(model)
        if not is_quantised(inner):
            return merged(inner)
        config, state = inner.peft_config["default"], _copies(adapter_state_dict(inner))
        plain = inner.unload()
        transposed = [n for n, part in plain.named_modules() if is_conv1d_class(getattr(part, "source_cls", None))]
        dtype = _stream_dtype(plain)
        _undo_norms(plain, dtype)
        plain = plain.dequantize(dtype)
        plain.is_loaded_in_4bit = False
        again = peft().get_peft_model(plain, config)
        load_adapter_state_dict(again, state)
        plain = merged(again)
        for name in transposed:
            plain.set_submodule(name, _conv1d(plain.get_submodule(name)))
        return plain

    def _compute_dtype(self) -> torch.dtype:
        if isinstance(self.compute_dtype, str):
            return _DTYPES[self.compute_dtype]
        if self.compute_dtype is not None:
            return self.compute_dtype
        if not torch.cuda.is_available():
            return torch.float32
        return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


_HOW = (
    "Load it with the adapter's own options: AutoModelForCausalLM.from_pretrained(name, **adapter.load_options()). "
    "A model made from a configuration is saved first (save_pretrained) and loaded from there. Or use LoRA."
)


def is_quantised(model: nn.Module) -> bool:
    """Whether weights of a model are in 4 bits.

    >>> is_quantised(nn.Linear(2, 2))
    False
    """
    return any(type(parameter).__name__ == "Params4bit" for parameter in model.parameters())


def prepare_quantised(model: nn.Module) -> None:
    """Freeze a quantised model and let its norms compute in fp32, in place.

    peft turns everything that is not quantised into fp32, embeddings and output layer too: 2.1 GB more for Llama 3 8B.
    Here norms alone change, and give back the type that they were given, so that the layers between them (which are
    not under autocast when text is generated) find what they expect. Inputs need no gradients, because gradient
    checkpointing here is the non-reentrant one, which goes without.
    """
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    for module in model.modules():
        # On CPUs with AVX512-BF16, bitsandbytes 0.50 repacks weights in place at the first evaluation. Their outputs
        # move (scales are rounded to bf16), and training steps after that pass no gradient to the layers below, without
        # a word. It also fails on widths that 64 does not divide. The switch is a plain attribute of each layer.
        if hasattr(module, "support_avx512bf16_for_cpu"):
            setattr(module, "support_avx512bf16_for_cpu", False)  # noqa: B010, mypy takes it for a tensor
    dtype = _stream_dtype(model)
    if dtype not in _HALF:
        return
    for module in _norms(model):
        if not any(isinstance(hook, _ToDtype) for hook in module._forward_hooks.values()):
            module.float()
            module.register_forward_pre_hook(_to_fp32)
            module.register_forward_hook(_ToDtype(dtype))


class _ToDtype:
    """A forward hook that gives the output of a norm the type of the stream around it."""

    def __init__(self, dtype: torch.dtype) -> None:
        self.dtype = dtype

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> Any:
        return output.to(self.dtype) if isinstance(output, Tensor) else output


def _to_fp32(module: nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
    return tuple(a.float() if isinstance(a, Tensor) and a.dtype in _HALF else a for a in args)


def _conv1d(layer: Any) -> nn.Module:
    """A linear layer as GPT-2 has it: bitsandbytes transposed it, and transformers does not turn it back."""
    conv = require("transformers.pytorch_utils", "adapters", "for GPT-2").Conv1D(0, 0)
    conv.nf, conv.nx = layer.weight.shape
    conv.weight, conv.bias = nn.Parameter(layer.weight.detach().T.contiguous()), layer.bias
    return conv


def _norms(model: nn.Module) -> list[nn.Module]:
    """Layer norms of all sorts, by the name of their class: each architecture has its own."""
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
    """The type of a model's weights outside quantised layers, as its configuration has it."""
    dtype = getattr(getattr(model, "config", None), "dtype", None)
    dtype = _DTYPES.get(dtype, dtype) if isinstance(dtype, str) else dtype
    return dtype if isinstance(dtype, torch.dtype) else torch.float32


def _copies(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in state.items()}


def _described(model: nn.Module) -> str:
    parameter = next(model.parameters(), None)
    return f"{type(model).__name__} in {parameter.dtype}" if parameter is not None else type(model).__name__


def _bitsandbytes() -> ModuleType:
    return require("bitsandbytes", "adapters", "for QLoRA, whose frozen weights it keeps in 4 bits,")
