"""Base class of the tasks that learn from pairs of answers: data, batches, and a supervised loss beside the preference.

Both answers of a pair share one forward pass. The loss is a sum over pairs. The supervised loss is a mean over the
tokens of all chosen answers of a step, whose number `step_totals` counts before the step; so padding, gradient
accumulation and several processes change neither.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from trainformer.core import BadArgument, Loss
from trainformer.core.errors import expected
from trainformer.data.text.collate import pad
from trainformer.data.text.encode import IGNORE_INDEX
from trainformer.data.text.prepare import PairEncoder, preference_tokens
from trainformer.losses.preference import PreferenceRewards
from trainformer.losses.tokens import SequenceLogProbs
from trainformer.tasks.language.base import GenerationMixin, data_name
from trainformer.tasks.language.router import RouterLossMixin


class PairTerms(NamedTuple):
    """Per pair: the preference loss, the supervised loss of the chosen answer, its tokens, and the rewards."""

    losses: Tensor
    nll: Tensor  # summed over tokens
    tokens: Tensor
    rewards: PreferenceRewards


@dataclass(eq=False)
class PreferenceTask(RouterLossMixin, GenerationMixin):
    """Train a causal language model on pairs of answers. A subclass defines the loss of a pair."""

    model_name: Any = "gpt2"
    max_length: int = 1024
    _: KW_ONLY
    truncation: str = "auto"
    prompt_template: str | None = None
    chunk_tokens: int | None = None

    kind = "causal_lm"
    groups_by_length = True

    def _init_pairs(self) -> None:
        """Validate shared arguments. Call it from `__post_init__`."""
        self._init_task()
        check_truncation(self.truncation)
        self._totals: Tensor | None = None

    @property
    def nll_weight(self) -> float:
        """The weight of the supervised loss of chosen answers, a mean over their tokens."""
        return 0.0

    @abstractmethod
    def _terms(self, batch: Mapping[str, Tensor], train: bool) -> PairTerms:
        """The losses of a batch; `train` enables label smoothing."""

    # -- data ----------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokenise both answers of each record once; streams on the fly."""
        encoder = PairEncoder(
            self.text_tokenizer,
            max_length=self.max_length,
            train_on="completion",
            truncation=self.truncation,
            prompt_template=self.prompt_template,
        )
        return preference_tokens(dataset, encoder, cache_dir=self.cache_dir, name=data_name(train))

    def collate_fn(self, examples: list[Any]) -> dict[str, Tensor]:
        return pad_pairs(examples, self.text_tokenizer.pad_token_id, self.max_length)

    # -- steps ---------------------------------------------------------------------------------------------

    @property
    def wants_window(self) -> bool:
        """Whether the loss depends on totals over the whole step."""
        return bool(self.nll_weight) or super().wants_window

    def step_totals(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Numbers of pairs, and of tokens of their chosen answers."""
        labels = batch["labels"]
        tokens = (labels[:, 0, 1:] != IGNORE_INDEX).sum()
        return torch.stack([torch.full_like(tokens, len(labels)), tokens]).double()

    def use_step_totals(self, totals: Tensor | None) -> None:
        """Use these totals until the end of the step; None: those of each batch."""
        self._totals = totals

    def on_step_end(self, step: int, max_steps: int) -> None:
        super().on_step_end(step, max_steps)
        self._totals = None

    def train_step(self, batch: Mapping[str, Tensor]) -> Loss:
        """The loss summed over pairs, and rewards."""
        with self._noisy(batch):
            terms = self._terms(batch, train=True)
        losses, metrics = terms.losses, _reward_metrics(terms.rewards)
        if self.nll_weight:
            pairs, tokens = (self.step_totals(batch) if self._totals is None else self._totals).unbind()
            # The engine divides by the number of pairs; this term is to be divided by that of tokens.
            losses = losses + self.nll_weight * terms.nll * (pairs / tokens.clamp(min=1))
            metrics["nll_loss"] = (terms.nll.detach().sum(), terms.tokens.sum())
        loss = Loss(losses.sum(), len(losses), metrics=metrics, per_sample=losses.detach())
        return self._with_router_loss(loss, batch)

    def _router_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.tensor(len(batch["labels"]), device=batch["labels"].device)

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Loss without label smoothing, and rewards."""
        terms = self._terms(batch, train=False)
        self._evaluate_router(batch)
        loss, metrics = (terms.losses.sum(), len(terms.losses)), _reward_metrics(terms.rewards)
        if not self.nll_weight:
            return {"loss": loss, **metrics}
        return {"preference_loss": loss, "nll_loss": (terms.nll.sum(), terms.tokens.sum()), **metrics}

    def derive_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """The whole loss, from the means over pairs and over tokens."""
        derived = super().derive_metrics(metrics)
        if "preference_loss" in metrics:
            derived["loss"] = metrics["preference_loss"] + self.nll_weight * metrics["nll_loss"]
        return derived

    def check_batch(self, batch: Any) -> list[str]:
        supervised = (batch["labels"][..., 1:] != IGNORE_INDEX).any(-1)
        return [] if bool(supervised.all()) else ["An answer of the batch has no token to learn: all labels are -100."]


def pad_pairs(pairs: list[Any], pad_id: int, max_length: int) -> dict[str, Tensor]:
    """A batch (B, 2, T), the chosen answer first; so it can be split between any two pairs."""
    both = [pair[part] for pair in pairs for part in ("chosen", "rejected")]
    return {name: tensor.unflatten(0, (-1, 2)) for name, tensor in pad(both, pad_id, max_length=max_length).items()}


def flat_pairs(batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The answers of a batch of pairs as rows (2 B, T)."""
    return {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "labels")}


def of_pairs(found: SequenceLogProbs, per_token: bool) -> Tensor:
    """Log probabilities (B, 2): sums over the tokens of an answer, or means."""
    values = found.sum / found.tokens.clamp(min=1) if per_token else found.sum
    return values.unflatten(0, (-1, 2))


def check_truncation(truncation: str) -> None:
    """Reject splitting: an answer is one sequence."""
    if truncation == "split":
        raise BadArgument(expected("truncation to be 'auto', 'truncate' or 'drop'", "split"))


def _reward_metrics(rewards: PreferenceRewards) -> dict[str, Any]:
    found = {
        "rewards/chosen": rewards.chosen,
        "rewards/rejected": rewards.rejected,
        "rewards/margin": rewards.margin,
        "rewards/accuracy": rewards.correct,
    }
    return {name: (values.sum(), len(values)) for name, values in found.items()}
