"""Handling of non-finite losses and gradients. No policy lets such a step reach the weights."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from trainformer.core.errors import BadArgument, NonFiniteError, expected

logger = logging.getLogger("trainformer")

_HOST = ("cpu",)  # reading a scalar needs no sync
_DEFAULT_RETRIES = 3


class NonFiniteGuard:
    """Checks losses and gradient norms.

    ``raise``: the bad step and all after it are not applied; the error comes at the next log point, with the number of
    the bad step. ``skip``: the bad step is not applied, and training continues. ``retry`` (or ``retry:5``): the same
    batch is computed again, with new random numbers, up to three (five) times; this syncs with the device in every
    step.

    On an accelerator the result stays on the device, as a flag that fused optimizers read (`found_inf`), so no step
    syncs. On the CPU reading a value costs half a microsecond and the flag some forty, so the host reads it.
    """

    def __init__(self, policy: str, device: torch.device) -> None:
        self.policy, self.retries = parse_policy(policy)
        self.on_host = device.type in _HOST
        self.skipped = 0
        #: Whether an update is a step; if not, `count_step` is called after each step.
        self.counts_updates = True
        # 1.0 where the update must not happen. Float, because that is what fused optimizers read.
        self.flag = torch.zeros((), device=device)
        self._device_count = torch.zeros((), device=device)
        self._bad = False
        self._host_count = 0
        self._attempts = 0

    def inspect(self, norm: Tensor, losses: Sequence[Tensor]) -> None:
        """Record whether norm and losses are all finite."""
        if self.on_host:
            bad = not all(math.isfinite(value.item()) for value in (norm, *losses))
            self._bad = bad or (self._bad and self.policy == "raise")
            if self.counts_updates or self.policy != "raise":
                self._host_count += self._bad
            return
        probe = norm
        for loss in losses:
            probe = torch.add(probe, loss, alpha=0)  # 0 * inf and 0 * nan are nan
        infinite = torch.logical_not(probe < math.inf)
        if self.policy == "raise":
            self.flag.masked_fill_(infinite, 1.0)  # sticky: steps after a bad one are not applied either
        else:
            self.flag.copy_(infinite)
        if self.counts_updates or self.policy != "raise":
            self._device_count.add_(self.flag)

    def count_step(self) -> None:
        """After a step of several updates: with ``raise``, count it if an update was not applied."""
        if self.policy == "raise":
            self._host_count += self._bad
            if not self.on_host:
                self._device_count.add_(self.flag)

    def forbids(self) -> bool:
        """Whether the update must be skipped. Syncs with an accelerator."""
        return self._bad if self.on_host else bool(self.flag.item())

    def must_repeat(self) -> bool:
        """Whether to repeat the window; for ``retry`` only."""
        if not self.forbids():
            self._attempts = 0
            return False
        self._attempts += 1
        if self._attempts <= self.retries:
            logger.warning("non-finite loss or gradient: repeating the step (%d of %d)", self._attempts, self.retries)
            return True
        attempts, self._attempts = self._attempts, 0
        raise NonFiniteError(f"Loss or gradients were not finite in {attempts} attempts at the same step. {_ADVICE}")

    def require_finite(self, who: str) -> None:
        """Raise if what was inspected last is not finite, after `who` changed it. Syncs with an accelerator."""
        if self.forbids():
            raise NonFiniteError(f"Gradients were finite, but not after {who} had changed them. {_ADVICE}")

    def reset(self) -> None:
        """Reset flags and counters."""
        self.flag.zero_()
        self._device_count.zero_()
        self._bad, self._host_count, self._attempts = False, 0, 0

    def verify(self, step: int) -> dict[str, float]:
        """With ``raise``, raise if a step was bad; else return how many were skipped. Syncs with an accelerator."""
        bad = self._host_count if self.on_host else int(self._device_count.item())
        if not bad:
            return {}
        attempts = self._attempts
        self.reset()
        self._attempts = attempts
        if self.policy == "raise" and not self.counts_updates:
            raise NonFiniteError(
                f"Loss or gradients of an optimizer became non-finite at step {step - bad + 1}. That update and all "
                f"after it were not applied. {_ADVICE}"
            )
        if self.policy == "raise":
            raise NonFiniteError(
                f"Loss or gradients became non-finite at step {step - bad + 1}. That step and the {bad - 1} after it "
                f"were not applied: the weights are those after step {step - bad}. {_ADVICE}"
            )
        if self.policy == "retry":
            return {}
        self.skipped += bad
        unit = "steps" if self.counts_updates else "updates"
        logger.warning("%d %s with a non-finite loss or gradient were skipped (%d in all)", bad, unit, self.skipped)
        return {"skipped_steps": float(self.skipped)}


class RunningStatistics:
    """A backup of BatchNorm's running statistics, to undo the forward pass of a skipped step.

    A NaN in them would stay forever, and make every later evaluation NaN.
    """

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        parts = {id(part): part for module in modules for part in module.modules() if isinstance(part, _BatchNorm)}
        self._live = [buffer for part in parts.values() for buffer in part.buffers(recurse=False)]
        self._kept: list[Tensor] = []
        self._open = False

    def keep(self) -> None:
        """Back them up, before a step; further calls until `settle` change nothing."""
        if self._open:
            return
        if not self._kept:
            self._kept = [buffer.clone() for buffer in self._live]
        elif self._live:
            torch._foreach_copy_(self._kept, self._live)
        self._open = True

    def settle(self, guard: NonFiniteGuard) -> None:
        """After a step: restore them if it was skipped."""
        if guard.on_host:
            if guard.forbids():
                self.restore()
        else:
            bad = guard.flag > 0
            for buffer, before in zip(self._live, self._kept, strict=True):
                buffer.copy_(torch.where(bad, before, buffer))
        self._open = False

    def restore(self) -> None:
        """Restore them if a step has started since the last `settle`."""
        if self._open and self._live:
            torch._foreach_copy_(self._live, self._kept)
        self._open = False


_ADVICE = (
    "Lower lr, clip gradients, inspect the data of that step, or use precision='bf16'; "
    "nonfinite='skip' skips such steps and continues."
)


def parse_policy(policy: str) -> tuple[str, int]:
    """The policy and its number of retries.

    >>> parse_policy("retry:5")
    ('retry', 5)
    """
    match = re.fullmatch(r"(raise|skip|retry)(?::(\d+))?", policy)
    if match is None or (match[2] is not None and (match[1] != "retry" or int(match[2]) < 1)):
        raise BadArgument(expected("nonfinite to be 'raise', 'skip', 'retry' or 'retry:N'", policy))
    retries = int(match[2] or _DEFAULT_RETRIES) if match[1] == "retry" else 0
    return match[1], retries
