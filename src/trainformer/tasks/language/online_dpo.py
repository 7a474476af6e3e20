"""Online DPO: preferences between completions that the model has just written, judged by rewards or a judge."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import check_choice, check_count, expected
from trainformer.losses.numerics import check_positive
from trainformer.losses.preference import dpo_loss, preference_rewards
from trainformer.tasks.language.rollouts.rewards import Rewards
from trainformer.tasks.language.rollouts.rollout import Rollout
from trainformer.tasks.language.rollouts.rows import Scored
from trainformer.tasks.language.rollouts.task import RolloutTask

_LOSSES = ("sigmoid", "ipo", "hinge")


@dataclass(eq=False)
class OnlineDPO(RolloutTask):
    """Train a causal language model to prefer the better of its own completions.

    Records have a `prompt`, a text or messages, and any other columns. In each step the model writes `num_generations`
    completions of each prompt (two by default). The one with the highest reward is the chosen answer of DPO, the one
    with the lowest the rejected one. `rewards` are those of `GRPO`. Instead of them, `judge` compares two completions:
    ``judge(prompts, completions)``, with a pair of completions for each prompt, returns 0 if the first is better, 1 if
    the second is, and None (or -1) to skip the pair.

    `loss` is `"sigmoid"`, `"ipo"` or `"hinge"`; `beta` and `reference` are those of `DPO`. `missing_eos_penalty` is
    subtracted from the reward of a completion that was cut off. `skip_ties` leaves out pairs of equal rewards.

    >>> OnlineDPO("gpt2", rewards=lambda completions: [len(text) for text in completions]).num_generations
    2
    """

    _: KW_ONLY
    num_generations: int = 2
    loss: str = "sigmoid"
    beta: float = 0.1
    judge: Any = None
    missing_eos_penalty: float | None = None
    skip_ties: bool = False

    def __post_init__(self) -> None:
        check_choice("loss", self.loss, _LOSSES)
        check_positive("beta", self.beta, "0.1 is usual.")
        check_count("num_generations", self.num_generations, least=2)
        if self.missing_eos_penalty is not None:
            check_positive("missing_eos_penalty", self.missing_eos_penalty)
        self._init_rollouts()
        self._choose_step()

    def _make_scorer(self) -> Rewards:
        if self.judge is None:
            return super()._make_scorer()
        if self.rewards is not None or self.environment is not None or self.missing_eos_penalty is not None:
            what = "a judge alone, or rewards, an environment and missing_eos_penalty"
            raise BadArgument(expected(what, "a judge and one of them"))
        if self.num_generations != 2:
            raise BadArgument(expected("num_generations=2 with a judge of pairs", self.num_generations))
        if not callable(self.judge) and not callable(getattr(self.judge, "judge", None)):
            raise BadArgument(expected("judge to be a function of (prompts, completions)", type(self.judge).__name__))
        return Rewards(None)

    @property
    def policy_temperature(self) -> float:
        """The loss is that of DPO, at whatever temperature answers were sampled."""
        return 1.0

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """With a judge, evaluations have no reward to monitor; only how many completions were cut off."""
        defaults = super().training_defaults(settings, chosen)
        if self.judge is not None and "monitor_metric" in defaults:
            defaults |= {"monitor_metric": "val/truncated", "monitor_mode": "min"}
        return defaults

    @classmethod
    def stand_ins(cls, opaque: Collection[str]) -> dict[str, Any]:
        """Also of a judge."""
        found = super().stand_ins(opaque)
        return {**found, "judge": lambda prompts, completions: [None] * len(prompts)} if "judge" in opaque else found

    # -- steps ---------------------------------------------------------------------------------------------

    def _losses(self, batch: Mapping[str, Any]) -> Iterator[Loss]:
        rollouts = self.rollouts(batch)
        scored = self.score(rollouts)
        self._keep_samples(self._samples, rollouts, scored)
        pairs, counts = self._pairs(scored)
        rows = self.rows_of(rollouts).take(pairs.flatten())
        reference = self.reference_log_probs(rows)
        assert reference is not None
        policy = self.policy_scores(rows)
        lengths = rows.mask.sum(-1).clamp(min=1)
        sums = [(values * rows.mask).sum(-1) for values in (policy.log_probs, reference)]
        if self.loss == "ipo":  # with sums, long and short answers would share one target
            sums = [total / lengths for total in sums]
        (chosen, rejected), (ref_chosen, ref_rejected) = (total.view(-1, 2).unbind(1) for total in sums)
        variant: Any = self.loss
        losses = dpo_loss(
            chosen, rejected, ref_chosen, ref_rejected, self.beta, variant=variant, reduction="none"
        )  # fmt: skip
        weights = counts.to(losses)
        found = preference_rewards(chosen, rejected, ref_chosen, ref_rejected, self.beta)
        named = {"margin": found.margin, "accuracy": found.correct, "chosen": found.chosen, "rejected": found.rejected}
        kl = ((policy.log_probs.detach() - reference) * rows.mask).sum()
        self._log(
            {
                **self._rollout_metrics(rollouts, scored),
                **{f"implicit_rewards/{name}": ((v * weights).sum(), weights.sum()) for name, v in named.items()},
                "kl": (kl, rows.mask.sum()),
                "entropy": ((policy.entropy * rows.mask).sum(), rows.mask.sum()),
                "skipped_pairs": ((1 - weights).sum(), len(weights)),
            }
        )
        yield Loss((losses * weights).sum(), weights.sum())

    def score(self, rollouts: Sequence[Rollout]) -> Scored:
        """Rewards, less the penalty of completions that were cut off; with a judge, 1 for the better of a pair."""
        if self.judge is not None:
            better = self._judged(rollouts)
            values = [[None, None] if first is None else [1.0 - first, float(first)] for first in better]
            flat = torch.tensor([float("nan") if v is None else v for pair in values for v in pair]).double()
            return Scored(flat[:, None], flat)
        scored = super().score(rollouts)
        if self.missing_eos_penalty is None:
            return scored
        cut = torch.tensor([rollout.is_truncated for rollout in rollouts], dtype=torch.float64)
        return scored._replace(total=scored.total - self.missing_eos_penalty * cut)

    @property
    def reward_names(self) -> list[str]:
        return ["judge"] if self.judge is not None else super().reward_names

    def eval_step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Mean rewards; a judge has nothing to say about single completions, so only their lengths."""
        if self.judge is None:
            return super().eval_step(batch)
        rollouts = self.rollouts(batch, self.eval_temperature)
        unknown = torch.full((len(rollouts),), float("nan"), dtype=torch.float64)
        found = self._rollout_metrics(rollouts, Scored(unknown[:, None], unknown))
        return {name: pair for name, pair in found.items() if name in ("completion_length", "truncated", "turns")}

    def _pairs(self, scored: Scored) -> tuple[Tensor, Tensor]:
        """The rows of the chosen and the rejected completion of each prompt (B, 2), and which pairs count (B,)."""
        rewards = scored.total.unflatten(0, (-1, self.num_generations))
        best = torch.where(rewards.isnan(), -torch.inf, rewards).argmax(1)
        others = torch.where(rewards.isnan(), torch.inf, rewards)
        others = others.scatter(1, best[:, None], torch.inf)  # of equal ones, the first is chosen and the second not
        worst = others.argmin(1)
        first = torch.arange(len(rewards)) * self.num_generations
        rows = torch.arange(len(rewards))
        margin = rewards[rows, best] - rewards[rows, worst]
        counts = ~margin.isnan() & ((margin > 0) | (not self.skip_ties))
        device = next(self.model.parameters()).device
        return torch.stack([first + best, first + worst], dim=1).to(device), counts.to(device)

    def _judged(self, rollouts: Sequence[Rollout]) -> list[int | None]:
        """Which of the two completions of each prompt is better; None to skip the pair."""
        judge: Callable[..., Any] = getattr(self.judge, "judge", self.judge)
        prompts = [rollout.prompt.prompt for rollout in rollouts[::2]]
        pairs = [[a.completion, b.completion] for a, b in zip(rollouts[::2], rollouts[1::2], strict=True)]
        found = judge(prompts, pairs)
        found = found.tolist() if hasattr(found, "tolist") else found
        if not isinstance(found, list | tuple) or len(found) != len(prompts):
            received = len(found) if isinstance(found, list | tuple) else type(found).__name__
            raise DataError(expected(f"the judge to return a list of {len(prompts)} numbers", received))
        for choice in found:
            if choice not in (None, -1, 0, 1):
                raise DataError(expected("the judge to return 0, 1, or None (or -1) for no decision", choice))
        return [None if choice in (None, -1) else int(choice) for choice in found]
