"""What happens when a loss or gradient is not finite. No policy lets such a step reach the weights."""

from __future__ import annotations

import logging
import re
from collections.abc import Sequence

import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, NonFiniteError, expected

logger = logging.getLogger("trainformer")

_INF = float("inf")
_DEFAULT_RETRIES = 3


class NonFiniteGuard:
    """Watches losses and gradient norms on the device.

    ``raise``: the bad step and all after it are not applied, and the error comes at the next log point, with the
    number of the bad step; this needs no synchronisation. ``skip``: the bad step is not applied, training goes on.
    ``retry`` (or ``retry:5``): the same batch is computed again, with the random numbers that come next, up to three
    (five) times; this looks at the flag after every step.
    """

    def __init__(self, policy: str, device: torch.device) -> None:
        self.policy, self.retries = parse_policy(policy)
        # 1.0 where the update must not happen. Float, because that is what fused optimizers read as `found_inf`.
        self.flag = torch.zeros((), device=device)
        self._count = torch.zeros((), device=device)
        self._attempts = 0
        self.skipped = 0

    def inspect(self, norm: Tensor, losses: Sequence[Tensor]) -> None:
        """Raise the flag, on the device, unless norm and losses are all finite."""
        probe = norm
        for loss in losses:
            probe = torch.add(probe, loss, alpha=0)  # 0 * inf and 0 * nan are nan
        bad = torch.logical_not(probe < _INF)
        if self.policy == "raise":
            self.flag.masked_fill_(bad, 1.0)  # sticky: what follows a bad step is not applied either
        else:
            self.flag.copy_(bad)
        self._count.add_(self.flag)

    def must_repeat(self) -> bool:
        """Whether the window is to be computed again. Waits for the device; asked under ``retry`` only."""
        if not self.flag.item():
            self._attempts = 0
            return False
        self._attempts += 1
        if self._attempts <= self.retries:
            logger.warning("non-finite loss or gradient: repeating the step (%d of %d)", self._attempts, self.retries)
            return True
        attempts, self._attempts = self._attempts, 0
        raise NonFiniteError(f"Loss or gradients were not finite in {attempts} attempts at the same step. {_ADVICE}")

    def reset(self) -> None:
        """Forget what was seen."""
        self.flag.zero_()
        self._count.zero_()
        self._attempts = 0

    def verify(self, step: int) -> dict[str, float]:
        """Raise under ``raise`` if a step was bad; else the number of steps dropped since the last call."""
        bad = int(self._count.item())
        if not bad:
            return {}
        self._count.zero_()
        if self.policy == "raise":
            self.flag.zero_()
            raise NonFiniteError(
                f"Loss or gradients became non-finite at step {step - bad + 1}. That step and the {bad - 1} after it "
                f"were not applied: the weights are those after step {step - bad}. {_ADVICE}"
            )
        if self.policy == "retry":
            return {}
        self.skipped += bad
        logger.warning("%d steps with a non-finite loss or gradient were skipped (%d in all)", bad, self.skipped)
        return {"skipped_steps": float(self.skipped)}


_ADVICE = (
    "Lower lr, clip gradients, look at the data of that step, or use precision='bf16'; "
    "nonfinite='skip' drops such steps and goes on."
)


def parse_policy(policy: str) -> tuple[str, int]:
    """The kind of policy and its number of retries.

    >>> parse_policy("retry:5")
    ('retry', 5)
    """
    match = re.fullmatch(r"(raise|skip|retry)(?::(\d+))?", policy)
    if match is None or (match[2] is not None and (match[1] != "retry" or int(match[2]) < 1)):
        raise BadArgument(expected("nonfinite to be 'raise', 'skip', 'retry' or 'retry:N'", policy))
    retries = int(match[2] or _DEFAULT_RETRIES) if match[1] == "retry" else 0
    return match[1], retries
