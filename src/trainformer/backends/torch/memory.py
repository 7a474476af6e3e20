"""Settings that trade memory, speed and accuracy: gradient checkpointing, offloading, attention kernels, matmuls."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from trainformer.core.errors import BadArgument, expected

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
