"""Settings that trade memory, speed and accuracy: mixed precision, gradient checkpointing, attention kernels."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainformer.core.errors import BadArgument, expected

if TYPE_CHECKING:
    from trainformer.run.torch.settings import RunSettings

_NAMES = {
    "auto": "auto",
    **dict.fromkeys(("no", "fp32", "float32", "32"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "16"), "fp16"),
    "fp8": "fp8",
}


class Precision:
    """A precision by name: fp32, bf16, fp16, or fp8 (bf16 around fp8 linear layers, see `quantize.use_fp8`).

    Only fp16 needs loss scaling: bf16 has the exponent range of float32.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self.name = name
        self.device = device
        self.scaler = torch.amp.GradScaler(device.type) if name == "fp16" else None
        self._dtype = {"bf16": torch.bfloat16, "fp8": torch.bfloat16, "fp16": torch.float16}.get(name)

    def forward(self) -> AbstractContextManager[object]:
        """The context of a forward pass."""
        return nullcontext() if self._dtype is None else torch.autocast(self.device.type, dtype=self._dtype)


def make_precision(name: str, device: torch.device, fp8: bool = False) -> Precision:
    """The precision of that name; ``"auto"`` is bf16 if the device supports it natively, else fp32.

    With `fp8`, linear layers multiply in fp8, and everything between them runs in bf16 unless the name is ``"no"``.

    >>> make_precision("auto", torch.device("cpu")).name
    'fp32'
    """
    kind = _NAMES.get(name)
    if kind is None:
        raise BadArgument(expected("precision to be 'auto', 'no' (or 'fp32'), 'bf16', 'fp16' or 'fp8'", name))
    if fp8 and kind in ("auto", "bf16"):
        kind = "fp8"
    if kind == "auto":
        native = device.type == "cuda" and torch.cuda.is_bf16_supported(including_emulation=False)
        kind = "bf16" if native else "fp32"
    return Precision(kind, device)


_SDPA = {
    "math": SDPBackend.MATH,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
}
SdpaChoice = str | SDPBackend | Sequence[str | SDPBackend] | None


def enable_gradient_checkpointing(model: Any) -> None:
    """Recompute activations in the backward pass, with the methods of transformers or timm models (or a `backbone`)."""
    if not hasattr(model, "gradient_checkpointing_enable") and not hasattr(model, "set_grad_checkpointing"):
        model = getattr(model, "backbone", model)
    if hasattr(model, "gradient_checkpointing_enable"):
        # The reentrant variant gives no gradients if the inputs need none (frozen embeddings, adapters).
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if hasattr(model, "config"):
            model.config.use_cache = False
    elif hasattr(model, "set_grad_checkpointing"):
        try:
            model.set_grad_checkpointing(True)
        except AssertionError as error:
            raise BadArgument(f"{type(model).__name__} has no gradient checkpointing: {error}") from error
    else:
        what = "a model with gradient_checkpointing_enable() (transformers) or set_grad_checkpointing() (timm)"
        do = "Set gradient_checkpointing=False, or give the model one of these methods."
        raise BadArgument(expected(what, type(model).__name__, do))


def prepare_model(model: Any, settings: RunSettings) -> None:
    """Apply memory format, gradient checkpointing and compilation to a model, in place."""
    if settings.channels_last:
        model.to(memory_format=torch.channels_last)
    if settings.gradient_checkpointing:
        enable_gradient_checkpointing(model)
    if settings.compile:
        # In place: class and state dict keys stay, so checkpoints of compiled and eager runs are the same.
        choice = settings.compile
        given = dict(choice) if isinstance(choice, Mapping) else {"mode": choice} if isinstance(choice, str) else {}
        model.compile(**given)


def sdpa_backends(choice: SdpaChoice) -> list[SDPBackend]:
    """Attention kernels by name or enum; several are tried in the order given.

    >>> [b.name for b in sdpa_backends(["flash", "math"])]
    ['FLASH_ATTENTION', 'MATH']
    """
    if choice is None:
        return []
    names = [choice] if isinstance(choice, (str, SDPBackend)) else list(choice)
    unknown = [n for n in names if not isinstance(n, SDPBackend) and n not in _SDPA]
    if unknown:
        raise BadArgument(expected(f"sdpa_backend to be among {', '.join(_SDPA)}", unknown[0]))
    return [n if isinstance(n, SDPBackend) else _SDPA[n] for n in names]


@contextmanager
def process_settings(sdpa: SdpaChoice = None, matmul_precision: str | None = None) -> Iterator[None]:
    """Process-wide settings for the duration of a run, restored afterwards."""
    if matmul_precision not in (None, "highest", "high", "medium"):
        raise BadArgument(expected("matmul_precision to be 'highest', 'high', 'medium' or None", matmul_precision))
    before = torch.get_float32_matmul_precision()
    backends = sdpa_backends(sdpa)
    with ExitStack() as stack:
        if matmul_precision is not None:
            stack.callback(torch.set_float32_matmul_precision, before)
            torch.set_float32_matmul_precision(matmul_precision)
        if backends:
            stack.enter_context(sdpa_kernel(backends, set_priority=len(backends) > 1))
        yield
