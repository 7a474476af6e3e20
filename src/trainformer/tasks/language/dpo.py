"""Preference tuning of causal language models relative to a reference model: DPO and its variants; ORPO and SimPO.

The reference model never changes. The losses are in `losses.preference`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from trainformer.core import BadArgument
from trainformer.core.errors import check_choice, expected
from trainformer.data.text.encode import IGNORE_INDEX
from trainformer.losses.numerics import check_positive
from trainformer.losses.preference import (
    check_divergence,
    check_gamma,
    check_label_smoothing,
    check_weight,
    dpo_loss,
    orpo_loss,
    preference_rewards,
    simpo_loss,
)
from trainformer.losses.tokens import SequenceLogProbs
from trainformer.models.language import OutputStates
from trainformer.tasks.language.preference import PairTerms, PreferenceTask, flat_pairs, of_pairs
from trainformer.tasks.language.reference import AnswerScorer, ReferenceMixin, is_base

_BETAS = {  # as in their papers
    **dict.fromkeys(("sigmoid", "ipo", "hinge", "robust", "exo_pair", "nca_pair", "bco_pair", "sppo_hard"), 0.1),
    **dict.fromkeys(("apo_zero", "apo_down", "discopop", "sigmoid_norm", "orpo"), 0.1),
    "simpo": 2.0,
}
_REFERENCE_FREE = ("orpo", "simpo")
_PER_TOKEN = ("ipo", "sigmoid_norm", "orpo", "simpo")  # these use the mean log probability per token, not the sum
_PART_OF_LOSS = ("robust", "exo_pair")  # their label smoothing is no regularisation: evaluation uses it too
_SFT = "sft"


@dataclass(eq=False)
class DPO(ReferenceMixin, PreferenceTask):
    """Train a causal language model to prefer the chosen of two answers.

    Records have a `prompt`, a `chosen` and a `rejected` answer, as texts or messages; if both answers are whole
    conversations, their common prefix is the prompt. Prompts are not trained on. `loss` is `"sigmoid"` (DPO), `"ipo"`,
    `"hinge"`, `"robust"`, `"exo_pair"`, `"nca_pair"`, `"bco_pair"`, `"sppo_hard"`, `"apo_zero"`, `"apo_down"`,
    `"discopop"` or `"sigmoid_norm"`, or, without a reference model, `"orpo"` or `"simpo"`. A list of them is a sum,
    with `loss_weights`; `"sft"` in it is the supervised loss of the chosen answers. `beta` defaults to 0.1, for
    `"simpo"` to 2.

    `f_divergence` replaces the reverse KL divergence from the reference. `ld_alpha` weighs the tokens of the longer
    answer beyond the length of the shorter one (LD-DPO).

    `reference` is the reference model: `"start"` for the model before this training, `"base"` for the same without the
    adapter that it came with, the name or folder of another model, or a model. With a new adapter, it is the same model
    with the adapter disabled, which costs no memory; see `ReferenceMixin`. The reference is in no optimizer and no
    checkpoint, and always in eval mode. A resumed run checks that its reference is the same as before.
    """

    _: KW_ONLY
    loss: str | list[str] = "sigmoid"
    loss_weights: list[float] | None = None  # of the losses, if there are several; all 1 by default
    beta: float | None = None
    gamma: float = 1.0  # SimPO's target margin
    label_smoothing: float = 0.0
    discopop_tau: float = 0.05
    f_divergence: str = "reverse_kl"
    f_alpha: float = 0.5  # the order of the alpha divergence
    ld_alpha: float | None = None
    reference: Any = "start"

    def __post_init__(self) -> None:
        self._init_pairs()
        self._weights = self._weighted_losses()
        first = self.losses[0]
        if self.beta is None:
            self.beta = _BETAS[first]
        check_positive("beta", self.beta, f"{_BETAS[first]} is usual.")
        check_positive("discopop_tau", self.discopop_tau, "0.05 is usual.")
        check_gamma(self.gamma)
        self._check_options()
        self._check_reference_free()
        self._init_reference()
        self._policy_scores = AnswerScorer(self.chunk_tokens)
        self._reference_scores = AnswerScorer(self.chunk_tokens)

    def _weighted_losses(self) -> dict[str, float]:
        """The weight of each loss."""
        if isinstance(self.loss, str):
            check_choice("loss", self.loss, _BETAS)
            if self.loss_weights is not None:
                do = "Pass a list of losses, or leave loss_weights out."
                raise BadArgument(expected("no loss_weights with a single loss", self.loss_weights, do))
            return {self.loss: 1.0}
        if not isinstance(self.loss, Sequence) or not self.loss:
            raise BadArgument(expected("loss to be a name or a list of names", self.loss))
        for name in self.loss:
            check_choice("loss", name, (*_BETAS, _SFT))
        names = list(self.loss)
        weights = [1.0] * len(names) if self.loss_weights is None else list(self.loss_weights)
        if len(set(names)) < len(names) or len(weights) != len(names):
            what = "loss_weights to have one number for each of the losses, which are named once"
            raise BadArgument(expected(what, f"loss={names}, loss_weights={self.loss_weights}"))
        for weight in weights:
            check_weight("loss_weights", weight)
        preferences = [name for name in names if name != _SFT]
        if not preferences:
            raise BadArgument(expected("a preference loss beside 'sft'", names, "To imitate answers, use CausalLM."))
        if len(preferences) > 1 and (free := [name for name in preferences if name in _REFERENCE_FREE]):
            raise BadArgument(expected(f"{free[0]!r} to be the only preference loss", names))
        return dict(zip(names, weights, strict=True))

    def _check_options(self) -> None:
        """Reject options that the losses do not use."""
        for loss in self.losses:
            variant = "sigmoid" if loss in ("simpo", "sigmoid_norm") else loss
            check_label_smoothing(self.label_smoothing, variant)
            check_divergence(self.f_divergence, "ipo" if loss == "sigmoid_norm" else loss)
        if self.ld_alpha is not None:
            number = isinstance(self.ld_alpha, int | float) and not isinstance(self.ld_alpha, bool)
            if not number or not 0 <= self.ld_alpha <= 1:
                raise BadArgument(expected("ld_alpha to be None, or from 0 to 1", self.ld_alpha))
            if not self.needs_reference or _SFT in self._weights:
                what = "ld_alpha=None with 'orpo', 'simpo' or 'sft'"
                raise BadArgument(expected(what, self.ld_alpha, "It belongs to losses with a reference."))
        alpha = isinstance(self.f_alpha, int | float) and not isinstance(self.f_alpha, bool)
        if not alpha or not math.isfinite(self.f_alpha):
            raise BadArgument(expected("f_alpha to be a number", self.f_alpha, "0.5 is usual."))

    def _check_reference_free(self) -> None:
        if not self.needs_reference and self.reference is not None and not is_base(self.reference):
            raise BadArgument(expected(f"no reference with loss={self.loss!r}", self.reference, "Leave it out."))
        if self.needs_reference and self.reference is None:
            do = "Leave it out, or pass loss='orpo' or 'simpo', which need none."
            raise BadArgument(expected(f"a reference with loss={self.loss!r}", None, do))

    @property
    def losses(self) -> list[str]:
        """The names of the preference losses."""
        return [name for name in self._weights if name != _SFT]

    @property
    def nll_weight(self) -> float:
        return self._weights.get(_SFT, 0.0)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses a reference model."""
        return not any(loss in _REFERENCE_FREE for loss in self.losses)

    # -- steps ---------------------------------------------------------------------------------------------

    def _terms(self, batch: Mapping[str, Tensor], train: bool) -> PairTerms:
        assert self.beta is not None
        answers = flat_pairs(batch)
        if self.ld_alpha is not None:
            answers["label_weights"] = _length_weights(batch["labels"], self.ld_alpha).flatten(0, 1)
        reference = self._reference_log_probs(answers) if self.needs_reference else None
        policy = self._policy_scores(self.model, answers)
        losses: Any = 0.0
        for loss in self.losses:
            losses = losses + self._weights[loss] * self._pair_losses(loss, policy, reference, train)
        per_token = self.losses[0] in _PER_TOKEN
        chosen, rejected = of_pairs(policy, per_token).unbind(1)
        theirs: Any = (None, None) if reference is None else of_pairs(reference, per_token).unbind(1)
        rewards = preference_rewards(chosen, rejected, theirs[0], theirs[1], self.beta)
        return PairTerms(losses, -policy.sum[::2], policy.tokens[::2], rewards)

    def _pair_losses(
        self, loss: str, policy: SequenceLogProbs, reference: SequenceLogProbs | None, train: bool
    ) -> Tensor:
        assert self.beta is not None
        chosen, rejected = of_pairs(policy, loss in _PER_TOKEN).unbind(1)
        smoothing = self.label_smoothing if train or loss in _PART_OF_LOSS else 0.0
        options: dict[str, Any] = {"beta": self.beta, "reduction": "none"}
        if loss == "orpo":
            return orpo_loss(chosen, rejected, **options)
        if loss == "simpo":
            return simpo_loss(chosen, rejected, gamma=self.gamma, label_smoothing=smoothing, **options)
        assert reference is not None
        theirs = of_pairs(reference, loss in _PER_TOKEN)
        return dpo_loss(
            chosen,
            rejected,
            theirs[:, 0],
            theirs[:, 1],
            variant="sigmoid" if loss == "sigmoid_norm" else loss,  # type: ignore[arg-type]
            label_smoothing=smoothing,
            discopop_tau=self.discopop_tau,
            f_divergence=self.f_divergence,  # type: ignore[arg-type]
            f_alpha=self.f_alpha,
            **options,
        )

    @property
    def _router_states(self) -> OutputStates:
        return self._policy_scores.states

    @torch.no_grad()
    def _reference_log_probs(self, answers: Mapping[str, Tensor]) -> SequenceLogProbs:
        with self.reference_model() as model:
            return self._reference_scores(model, answers)


def _length_weights(labels: Tensor, alpha: float) -> Tensor:
    """Weights of the labels (B, 2, T): 1 up to the length of the shorter answer of a pair, then `alpha`."""
    places = torch.nn.functional.pad(labels[..., 1:] != IGNORE_INDEX, (1, 0)).cumsum(-1)
    shared = places[..., -1].amin(1)[:, None, None]
    return torch.where(places <= shared, 1.0, alpha)
