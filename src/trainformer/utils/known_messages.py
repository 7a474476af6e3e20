"""Messages of other libraries that say nothing to a user, and cannot be avoided by importing less."""

from __future__ import annotations

import logging

# Loggers, and how their message is recognised.
_KNOWN = {
    # transformers imports torchao with its models; torchao registers two of its enums in a way that torch deprecates.
    "torch.utils._pytree": "Calling register_constant() on Enum subclasses",
    # peft and accelerate import bitsandbytes, which looks for a faster kernel.
    "bitsandbytes.backends.cpu.ops": "Failed to load CPU gemm_4bit_forward",
}


def hide_known_messages() -> None:
    """Drop them. Everything else that these loggers say stays."""
    for name, text in _KNOWN.items():
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Without) for known in logger.filters):
            logger.addFilter(_Without(text))


class _Without(logging.Filter):
    def __init__(self, text: str) -> None:
        super().__init__()
        self._text = text

    def filter(self, record: logging.LogRecord) -> bool:
        return self._text not in record.getMessage()
