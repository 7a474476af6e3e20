"""Mixed precision: autocast and loss scaling, one class per precision."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch

from trainformer.core.errors import BadArgument, expected

_NAMES = {
    "auto": "auto",
    **dict.fromkeys(("no", "fp32", "float32", "32"), "fp32"),
    **dict.fromkeys(("bf16", "bfloat16"), "bf16"),
    **dict.fromkeys(("fp16", "float16", "16"), "fp16"),
    "fp8": "fp8",
}


class Precision:
    """fp32: no autocast, no loss scaling."""

    name = "fp32"

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.scaler: torch.amp.GradScaler | None = None

    def forward(self) -> AbstractContextManager[object]:
        """The context of a forward pass."""
        return nullcontext()


class BFloat16(Precision):
    """Autocast to bfloat16. It has the exponent range of float32, so losses need no scaling."""

    name = "bf16"

    def forward(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.bfloat16)


class Float8(BFloat16):
    """bfloat16 autocast around fp8 linear layers (see `quantize.use_fp8`)."""

    name = "fp8"


class Float16(Precision):
    """Autocast to float16 with dynamic loss scaling."""

    name = "fp16"

    def __init__(self, device: torch.device) -> None:
        super().__init__(device)
        self.scaler = torch.amp.GradScaler(device.type)

    def forward(self) -> AbstractContextManager[object]:
        return torch.autocast(self.device.type, dtype=torch.float16)


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
    return {"fp32": Precision, "bf16": BFloat16, "fp16": Float16, "fp8": Float8}[kind](device)
