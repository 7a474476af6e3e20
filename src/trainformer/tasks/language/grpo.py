"""Reinforcement learning of causal language models from rewards of groups of completions: GRPO and its variants."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from trainformer.core import BadArgument, Loss
from trainformer.core.errors import check_choice, check_count, expected
from trainformer.losses.numerics import check_positive
from trainformer.losses.policy import POLICY_VARIANTS, importance_correction, policy_loss
from trainformer.tasks.language.reference import is_base
from trainformer.tasks.language.rollouts.advantages import SCALES, Advantages, group_advantages
from trainformer.tasks.language.rollouts.rollout import Rollout
from trainformer.tasks.language.rollouts.rows import Scored, TokenRows
from trainformer.tasks.language.rollouts.task import RolloutTask
from trainformer.utils.distributed import gather_rows

_SCALES = {"dr_grpo": "none", "rloo": "none"}  # of the variants; otherwise "group"


@dataclass(eq=False)
class GRPO(RolloutTask):
    """Train a causal language model with rewards: group relative policy optimization, and its variants.

    Records have a `prompt`, a text or messages, and any other columns. In each step the model writes `num_generations`
    completions of each prompt, `rewards` score them, and completions that are better than the mean of their group
    become more likely. A reward is a function ``reward(prompts, completions, **columns)`` that returns one number (or
    None) per completion, a reward model, or ``"file.py:function"``; several are added with `reward_weights`.

    `loss` is `"dapo"` (a mean over tokens), `"grpo"` (over sequences of means over tokens), `"dr_grpo"` (constant
    length, rewards not scaled), `"rloo"` (leave-one-out baseline, ratios of sequences), `"bnpo"`, `"cispo"`, `"sapo"`
    or `"luspo"`. ``importance_level="sequence"`` is GSPO. `num_iterations` and `mini_batches` make several updates with
    the completions of a step, with ratios clipped to 1 - `epsilon` and 1 + `epsilon_high`. `beta` weights the KL
    divergence from `reference`, which is the model before training (with a new adapter: the model without it);
    `unbiased_kl` multiplies its terms by the ratios, so that its gradient is right.

    >>> GRPO("gpt2", rewards=lambda completions: [len(text) for text in completions]).loss
    'dapo'
    """

    _: KW_ONLY
    loss: str = "dapo"
    importance_level: str = "token"
    beta: float = 0.0
    unbiased_kl: bool = True
    epsilon: float = 0.2
    epsilon_high: float | None = None
    delta: float | None = None
    num_iterations: int = 1
    mini_batches: int = 1
    scale_rewards: str | None = None  # group, batch or none; None: what suits the loss
    mask_truncated_completions: bool = False
    skip_zero_variance: bool = False
    top_entropy_quantile: float = 1.0
    correction_level: str | None = "sequence"  # of samples of another engine: token, sequence, or None
    correction_maximum: float = 3.0

    def __post_init__(self) -> None:
        check_choice("loss", self.loss, POLICY_VARIANTS)
        check_choice("importance_level", self.importance_level, ("token", "sequence"))
        if self.scale_rewards is None:
            self.scale_rewards = _SCALES.get(self.loss, "group")
        check_choice("scale_rewards", self.scale_rewards, SCALES)
        if self.correction_level is not None:
            check_choice("correction_level", self.correction_level, ("token", "sequence"))
        check_count("num_iterations", self.num_iterations)
        check_count("mini_batches", self.mini_batches)
        self._check_numbers()
        self._init_rollouts()
        self._choose_step()

    def _check_numbers(self) -> None:
        if isinstance(self.beta, bool) or not 0 <= self.beta < float("inf"):
            raise BadArgument(expected("beta to be 0 or a positive number", self.beta))
        if not 0 < self.epsilon < 1:
            raise BadArgument(expected("epsilon greater than 0 and less than 1", self.epsilon, "0.2 is usual."))
        if self.epsilon_high is not None:
            check_positive("epsilon_high", self.epsilon_high, "0.28 in DAPO.")
        if self.delta is not None and not self.delta > 1 + (self.epsilon_high or self.epsilon):
            what = "delta greater than 1 + epsilon_high, above which ratios are clipped anyway"
            raise BadArgument(expected(what, self.delta))
        if self.delta is not None and self.loss in ("cispo", "sapo"):
            raise BadArgument(expected(f"no delta with loss={self.loss!r}, which has no such bound", self.delta))
        if not 0 < self.top_entropy_quantile <= 1:
            raise BadArgument(expected("top_entropy_quantile greater than 0, at most 1", self.top_entropy_quantile))
        if self.importance_level == "sequence" and self.loss == "rloo":
            raise BadArgument(expected("importance_level='token' with loss='rloo'", "sequence", "It has its own."))
        check_positive("correction_maximum", self.correction_maximum)
        if not self.needs_reference and not is_base(self.reference):
            raise BadArgument(expected("no reference with beta=0", self.reference, "Pass beta=0.04, or leave it out."))

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses a reference model."""
        return self.beta > 0

    @property
    def updates_per_step(self) -> int:
        return self.num_iterations * self.mini_batches

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """Also refuses settings with which a statistic of the whole batch would be one of a part of it."""
        over_batch = self.scale_rewards == "batch" or self.top_entropy_quantile < 1
        if over_batch and settings.accumulation_steps > 1:
            name = "scale_rewards='batch'" if self.scale_rewards == "batch" else "top_entropy_quantile"
            do = "Pass accumulation_steps=1 and forward_batch_size=..., which saves as much memory."
            raise BadArgument(expected(f"no gradient accumulation with {name}", settings.accumulation_steps, do))
        if self.mini_batches > settings.batch_size:
            what = f"batch_size of at least {self.mini_batches}, the number of mini_batches"
            raise BadArgument(expected(what, settings.batch_size))
        return super().training_defaults(settings, chosen)

    # -- steps ---------------------------------------------------------------------------------------------

    def _losses(self, batch: Mapping[str, Any]) -> Iterator[Loss]:
        rollouts = self.rollouts(batch)
        scored = self.score(rollouts)
        rows = self._masked(self.rows_of(rollouts), rollouts)
        reference = self.reference_log_probs(rows)
        old = self._old_log_probs(rows)
        advantages = self._advantages(scored, rows, old, reference)
        self._keep_samples(self._samples, rollouts, scored, advantage=advantages.values)
        self._log(self._rollout_metrics(rollouts, scored) | self._group_metrics(scored, advantages))
        keeps: list[Tensor | None] = [None] * self.mini_batches
        for _ in range(self.num_iterations):
            for number in range(self.mini_batches):
                part = self._part(number, len(rollouts), rows.input_ids.device)
                chosen = None if old is None else old[part]
                before = keeps[number] if chosen is None else chosen
                of_reference = None if reference is None else reference[part]
                loss, keeps[number] = self._update_loss(rows.take(part), advantages, part, before, of_reference)
                yield loss if number * self.num_generations < len(rollouts) else Loss(loss.sum * 0, loss.weight * 0)

    def _part(self, number: int, count: int, device: torch.device) -> Tensor:
        """The rows of a mini-batch: every n-th group, so that gradient accumulation does not change it."""
        groups = torch.arange(count, device=device).view(-1, self.num_generations)
        return groups[number % len(groups) :: self.mini_batches].flatten()

    def _masked(self, rows: TokenRows, rollouts: list[Rollout]) -> TokenRows:
        """With `mask_truncated_completions`, tokens of completions that were cut off do not count."""
        if not self.mask_truncated_completions:
            return rows
        cut = torch.tensor([rollout.is_truncated for rollout in rollouts], device=rows.labels.device)
        return rows._replace(labels=rows.labels.masked_fill(cut[:, None], -100))

    @torch.no_grad()
    def _old_log_probs(self, rows: TokenRows) -> Tensor | None:
        """Before any update; None if those of the first update of each mini-batch are the same."""
        of_reward = self.loss == "rloo" and self.needs_reference
        return self.policy_scores(rows).log_probs if self.mini_batches > 1 or of_reward else None

    def _advantages(self, scored: Scored, rows: TokenRows, old: Tensor | None, reference: Tensor | None) -> Advantages:
        assert self.scale_rewards is not None
        rewards = scored.total
        if self.loss == "rloo" and reference is not None and old is not None:
            kl = ((old - reference) * rows.mask).sum(-1)
            self._log({"kl": (kl.sum(), rows.mask.sum())})
            rewards = rewards - self.beta * kl.double().cpu()
        if self.scale_rewards == "batch":  # all-reduced where the process group can
            rewards = rewards.to(rows.input_ids.device)
        leave_one_out = self.loss == "rloo"
        return group_advantages(rewards, self.num_generations, scale=self.scale_rewards, leave_one_out=leave_one_out)

    def _group_metrics(self, scored: Scored, advantages: Advantages) -> dict[str, tuple[Any, Any]]:
        groups = scored.total.unflatten(0, (-1, self.num_generations))
        spread = torch.nan_to_num(groups.std(1))
        return {
            "reward_std": (spread.sum(), len(spread)),
            "frac_reward_zero_std": (advantages.has_no_variance.sum().double(), len(spread)),
        }

    def _update_loss(
        self, rows: TokenRows, advantages: Advantages, part: Tensor, old: Tensor | None, reference: Tensor | None
    ) -> tuple[Loss, Tensor]:
        """The loss of one update, and the log probabilities that later ratios are relative to."""
        scores = self.policy_scores(rows)
        mask, device = rows.mask, rows.input_ids.device
        old = scores.log_probs.detach() if old is None else old
        row_mask = None
        if self.skip_zero_variance:
            useful = ~advantages.has_no_variance.repeat_interleave(self.num_generations)
            row_mask = useful.to(device)[part]
        found = policy_loss(
            scores.log_probs,
            old,
            advantages.values.to(device)[part],
            mask,
            variant=self.loss,
            level=self.importance_level,
            epsilon=self.epsilon,
            epsilon_high=self.epsilon_high,
            delta=self.delta,
            beta=self.beta,
            unbiased_kl=self.unbiased_kl,
            reference_log_probs=reference,
            correction=self._correction(old, rows),
            token_mask=self._entropy_mask(scores.entropy, mask),
            row_mask=row_mask,
            max_length=self.max_completion_length,
        )
        self._log({**found.metrics, "entropy": ((scores.entropy * mask).sum(), mask.sum())})
        return Loss(found.sum, found.weight), old

    def _correction(self, old: Tensor, rows: TokenRows) -> Tensor | None:
        """Importance weights of completions that another engine sampled; its difference to the model is logged."""
        if rows.sampled is None:
            return None
        sampled = rows.sampled.to(old.dtype)
        mask = rows.mask & ~sampled.isnan()
        difference = torch.where(mask, old - sampled, 0.0)
        mean = (difference.abs().sum(), mask.sum())
        self._log({"sampling/logp_difference": mean, "sampling/logp_difference_max": (difference.abs().max(), 1)})
        if self.correction_level is None:
            return None
        options: dict[str, Any] = {"level": self.correction_level, "maximum": self.correction_maximum}
        weights = importance_correction(old, sampled, rows.mask, **options)
        self._log({"sampling/correction": (weights.sum(), weights.numel())})
        return weights

    def _entropy_mask(self, entropy: Tensor, mask: Tensor) -> Tensor | None:
        """The tokens of the highest entropies of the batch, over all processes."""
        if self.top_entropy_quantile == 1:
            return None
        everywhere = gather_rows(entropy[mask])
        if not len(everywhere):
            return mask
        return mask & (entropy >= torch.quantile(everywhere.float(), 1 - self.top_entropy_quantile).to(entropy.dtype))
