"""Preference tuning of causal language models: DPO, IPO, hinge, ORPO and SimPO.

Both answers of a pair share one forward pass. The reference model never changes. The losses are in
`losses.preference`; the loss is a sum over pairs, so padding and gradient accumulation do not change it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from trainformer.core import BadArgument, Loss
from trainformer.core.errors import check_choice, expected
from trainformer.data.text.collate import pad
from trainformer.data.text.prepare import PairEncoder, Pairs, preference_tokens
from trainformer.losses.numerics import check_positive
from trainformer.losses.preference import (
    check_gamma,
    check_label_smoothing,
    dpo_loss,
    orpo_loss,
    preference_rewards,
    simpo_loss,
)
from trainformer.losses.tokens import SequenceLogProbs
from trainformer.models.language import OutputStates
from trainformer.tasks.language.base import GenerationMixin, data_name
from trainformer.tasks.language.reference import AnswerScorer, ReferenceMixin, is_base
from trainformer.tasks.language.router import RouterLossMixin

_BETAS = {"sigmoid": 0.1, "ipo": 0.1, "hinge": 0.1, "orpo": 0.1, "simpo": 2.0}  # as in their papers
_REFERENCE_FREE = ("orpo", "simpo")
_PER_TOKEN = ("ipo", "orpo", "simpo")  # these use the mean log probability per token, the others the sum


@dataclass(eq=False)
class DPO(RouterLossMixin, ReferenceMixin, GenerationMixin):
    """Train a causal language model to prefer the chosen of two answers.

    Records have a `prompt`, a `chosen` and a `rejected` answer, as texts or messages; if both answers are whole
    conversations, their common prefix is the prompt. Prompts are not trained on. `loss` is `"sigmoid"` (DPO), `"ipo"`
    or `"hinge"`, or, without a reference model, `"orpo"` or `"simpo"`. `beta` defaults to 0.1, for `"simpo"` to 2.

    `reference` is the reference model: `"start"` for the model before this training, `"base"` for the same without the
    adapter that it came with, the name or folder of another model, or a model. With a new adapter, it is the same model
    with the adapter disabled, which costs no memory; see `ReferenceMixin`. The reference is in no optimizer and no
    checkpoint, and always in eval mode. A resumed run checks that its reference is the same as before.
    """

    model_name: Any = "gpt2"
    max_length: int = 1024
    _: KW_ONLY
    loss: str = "sigmoid"
    beta: float | None = None
    gamma: float = 1.0  # SimPO's target margin
    label_smoothing: float = 0.0
    reference: Any = "start"
    truncation: str = "auto"
    prompt_template: str | None = None
    chunk_tokens: int | None = None

    kind = "causal_lm"
    groups_by_length = True

    def __post_init__(self) -> None:
        self._init_task()
        check_choice("loss", self.loss, _BETAS)
        if self.beta is None:
            self.beta = _BETAS[self.loss]
        check_positive("beta", self.beta, f"{_BETAS[self.loss]} is usual.")
        check_gamma(self.gamma)
        check_label_smoothing(self.label_smoothing, "sigmoid" if self.loss == "simpo" else self.loss)
        if self.truncation == "split":
            raise BadArgument(expected("truncation to be 'auto', 'truncate' or 'drop'", "split"))
        self._check_reference_free()
        self._init_reference()
        self._policy_scores = AnswerScorer(self.chunk_tokens)
        self._reference_scores = AnswerScorer(self.chunk_tokens)

    def _check_reference_free(self) -> None:
        if not self.needs_reference and self.reference is not None and not is_base(self.reference):
            raise BadArgument(expected(f"no reference with loss={self.loss!r}", self.reference, "Leave it out."))
        if self.needs_reference and self.reference is None:
            do = "Leave it out, or pass loss='orpo' or 'simpo', which need none."
            raise BadArgument(expected(f"a reference with loss={self.loss!r}", None, do))

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses a reference model."""
        return self.loss not in _REFERENCE_FREE

    # -- data ----------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> Pairs:
        """Tokenise both answers of each record once."""
        encoder = PairEncoder(
            self.text_tokenizer,
            max_length=self.max_length,
            train_on="completion",
            truncation=self.truncation,
            prompt_template=self.prompt_template,
        )
        return preference_tokens(dataset, encoder, cache_dir=self.cache_dir, name=data_name(train))

    def collate_fn(self, examples: list[Any]) -> dict[str, Tensor]:
        # (B, 2, T), the chosen answer first; so a batch can be split between any two pairs.
        answers = [pair[part] for pair in examples for part in ("chosen", "rejected")]
        batch = pad(answers, self.text_tokenizer.pad_token_id, max_length=self.max_length)
        return {name: tensor.unflatten(0, (-1, 2)) for name, tensor in batch.items()}

    # -- steps ---------------------------------------------------------------------------------------------

    def train_step(self, batch: Mapping[str, Tensor]) -> Loss:
        """The loss summed over pairs, and rewards."""
        with self._noisy(batch):
            losses, metrics = self._losses_and_rewards(batch, self.label_smoothing)
        loss = Loss(losses.sum(), len(losses), metrics=metrics, per_sample=losses.detach())
        return self._with_router_loss(loss, batch)

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Loss without label smoothing, and rewards."""
        losses, metrics = self._losses_and_rewards(batch, 0.0)
        self._evaluate_router(batch)
        return {"loss": (losses.sum(), len(losses)), **metrics}

    def _losses_and_rewards(self, batch: Mapping[str, Tensor], label_smoothing: float) -> tuple[Tensor, dict[str, Any]]:
        """The loss of each pair, and rewards, margin and accuracy as (sum, weight)."""
        assert self.beta is not None
        pairs = {name: batch[name].flatten(0, 1) for name in ("input_ids", "attention_mask", "labels")}
        reference = self._reference_log_probs(pairs).unbind(1) if self.needs_reference else (None, None)
        chosen, rejected = self._of_pairs(self._policy_scores(self.model, pairs)).unbind(1)
        options: dict[str, Any] = {"beta": self.beta, "reduction": "none"}
        if self.loss == "orpo":
            losses = orpo_loss(chosen, rejected, **options)
        elif self.loss == "simpo":
            losses = simpo_loss(chosen, rejected, gamma=self.gamma, label_smoothing=label_smoothing, **options)
        else:
            options |= {"variant": self.loss, "label_smoothing": label_smoothing}
            losses = dpo_loss(chosen, rejected, reference[0], reference[1], **options)  # type: ignore[arg-type]
        rewards = preference_rewards(chosen, rejected, reference[0], reference[1], self.beta)
        found = {
            "rewards/chosen": rewards.chosen,
            "rewards/rejected": rewards.rejected,
            "rewards/margin": rewards.margin,
            "rewards/accuracy": rewards.correct,
        }
        return losses, {name: (values.sum(), len(values)) for name, values in found.items()}

    def _of_pairs(self, found: SequenceLogProbs) -> Tensor:
        """Log probabilities (B, 2): sums over the tokens of an answer, or means, depending on the loss."""
        values = found.sum / found.tokens.clamp(min=1) if self.loss in _PER_TOKEN else found.sum
        return values.unflatten(0, (-1, 2))

    @torch.no_grad()
    def _reference_log_probs(self, pairs: Mapping[str, Tensor]) -> Tensor:
        with self.reference_model() as model:
            return self._of_pairs(self._reference_scores(model, pairs))

    @property
    def _router_states(self) -> OutputStates:
        return self._policy_scores.states

    def _router_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.tensor(len(batch["labels"]), device=batch["labels"].device)

    def check_batch(self, batch: Any) -> list[str]:
        supervised = (batch["labels"][..., 1:] != -100).any(-1)
        return [] if bool(supervised.all()) else ["An answer of the batch has no token to learn: all labels are -100."]
