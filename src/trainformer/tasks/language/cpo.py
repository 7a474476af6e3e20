"""Contrastive preference optimisation of causal language models: preferences without a reference model."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, get_args

from torch import Tensor

from trainformer.core import BadArgument
from trainformer.core.errors import check_choice, expected
from trainformer.losses.numerics import check_positive
from trainformer.losses.preference import (
    CPOVariant,
    alpha_rewards,
    check_gamma,
    check_label_smoothing,
    check_weight,
    cpo_loss,
    preference_rewards,
)
from trainformer.models.language import OutputStates
from trainformer.tasks.language.preference import PairTerms, PreferenceTask, flat_pairs, of_pairs
from trainformer.tasks.language.reference import AnswerScorer

_PER_TOKEN = ("ipo", "simpo")  # these use the mean log probability per token, the others the sum


@dataclass(eq=False)
class CPO(PreferenceTask):
    """Train a causal language model to prefer the chosen of two answers, and to imitate it, without a reference model.

    Records are those of `DPO`. `loss` is `"sigmoid"` (CPO), `"hinge"`, `"ipo"` or `"simpo"`, which has the target
    margin `gamma`. `cpo_alpha` weighs the supervised loss of the chosen answers, a mean over their tokens; with 0 and
    `"simpo"` this is SimPO. With `alpha`, log probabilities are replaced by (1 - p^-alpha) / alpha (AlphaPO).
    """

    _: KW_ONLY
    loss: str = "sigmoid"
    beta: float = 0.1
    cpo_alpha: float = 1.0
    gamma: float = 0.5
    alpha: float = 0.0
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        self._init_pairs()
        check_choice("loss", self.loss, get_args(CPOVariant))
        check_positive("beta", self.beta, "0.1 is usual.")
        check_weight("cpo_alpha", self.cpo_alpha)
        check_gamma(self.gamma)
        if isinstance(self.alpha, bool) or not isinstance(self.alpha, int | float) or not math.isfinite(self.alpha):
            raise BadArgument(expected("alpha to be a number", self.alpha, "0 is usual."))
        check_label_smoothing(self.label_smoothing, "sigmoid" if self.loss == "simpo" else self.loss)
        self._scores = AnswerScorer(self.chunk_tokens)

    @property
    def nll_weight(self) -> float:
        return self.cpo_alpha

    @property
    def _router_states(self) -> OutputStates:
        return self._scores.states

    def _terms(self, batch: Mapping[str, Tensor], train: bool) -> PairTerms:
        found = self._scores(self.model, flat_pairs(batch))
        chosen, rejected = of_pairs(found, self.loss in _PER_TOKEN).unbind(1)
        options: Any = {"variant": self.loss, "gamma": self.gamma, "alpha": self.alpha, "reduction": "none"}
        smoothing = self.label_smoothing if train else 0.0
        losses = cpo_loss(chosen, rejected, self.beta, label_smoothing=smoothing, **options)
        good, bad = alpha_rewards(chosen, self.alpha), alpha_rewards(rejected, self.alpha)
        rewards = preference_rewards(good, bad, beta=self.beta)
        return PairTerms(losses, -found.sum[::2], found.tokens[::2], rewards)
