"""Mixed precision: autocast and loss scaling."""

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
