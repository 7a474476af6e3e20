"""Kahneman-Tversky optimisation: tuning on single answers that are desirable or not.

The loss compares each answer with an estimate of the KL divergence from the reference: the mean log ratio of prompts
with the answers of other records. Which answer belongs to which prompt depends on the data alone, and the mean is taken
over all micro-batches and processes of a step (`step_totals`), before its first update; so it is the same however a
step is divided, and nothing has to be saved to resume.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from trainformer.core import Loss
from trainformer.core.errors import check_choice
from trainformer.data.text.collate import pad
from trainformer.data.text.encode import IGNORE_INDEX
from trainformer.data.text.preferences import Unpaired, UnpairedEncoder, check_balance, unpaired_tokens
from trainformer.losses.numerics import check_positive
from trainformer.losses.preference import KTOVariant, check_weight, kto_loss
from trainformer.models.language import OutputStates
from trainformer.models.modes import eval_mode
from trainformer.tasks.language.base import GenerationMixin, data_name
from trainformer.tasks.language.preference import check_truncation
from trainformer.tasks.language.reference import AnswerScorer, ReferenceMixin
from trainformer.tasks.language.router import RouterLossMixin

_INPUTS = ("input_ids", "labels")


@dataclass(eq=False)
class KTO(RouterLossMixin, ReferenceMixin, GenerationMixin):
    """Train a causal language model on answers of which each is desirable or not.

    Records have a `prompt`, a `completion` (texts or messages) and a `label`: true if the completion is desirable. They
    may have `messages` and a `label` instead, whose last answer is judged. Records of `DPO` count as two: the chosen
    answer is desirable, the rejected one is not. Prompts are not trained on.

    `loss` is `"kto"`, or `"apo_zero_unpaired"`, which needs no estimate of the KL divergence. `desirable_weight` and
    `undesirable_weight` balance unequal numbers of both. `reference` is that of `DPO`.
    """

    model_name: Any = "gpt2"
    max_length: int = 1024
    _: KW_ONLY
    loss: str = "kto"
    beta: float = 0.1
    desirable_weight: float = 1.0
    undesirable_weight: float = 1.0
    reference: Any = "start"
    truncation: str = "auto"
    prompt_template: str | None = None
    chunk_tokens: int | None = None

    kind = "causal_lm"
    groups_by_length = True

    def __post_init__(self) -> None:
        self._init_task()
        check_truncation(self.truncation)
        check_choice("loss", self.loss, get_args(KTOVariant))
        check_positive("beta", self.beta, "0.1 is usual.")
        check_weight("desirable_weight", self.desirable_weight)
        check_weight("undesirable_weight", self.undesirable_weight)
        self._init_reference()
        self._policy_scores = AnswerScorer(self.chunk_tokens)
        self._reference_scores = AnswerScorer(self.chunk_tokens)
        self._totals: Tensor | None = None

    # -- data ----------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokenise each answer once (streams: on the fly), and pair prompts with the answers of other records."""
        encoder = UnpairedEncoder(
            self.text_tokenizer,
            max_length=self.max_length,
            train_on="completion",
            truncation=self.truncation,
            prompt_template=self.prompt_template,
        )
        options: Any = {"cache_dir": self.cache_dir, "name": data_name(train)}
        tokens = unpaired_tokens(dataset, encoder, kl=self.needs_divergence, **options)
        if train and isinstance(tokens, Unpaired):
            check_balance(tokens.label_counts(), (self.desirable_weight, self.undesirable_weight))
        return tokens

    def collate_fn(self, examples: list[Any]) -> dict[str, Tensor]:
        pad_id = self.text_tokenizer.pad_token_id
        batch = pad(examples, pad_id, max_length=self.max_length)
        batch["desirable"] = torch.tensor([bool(example["label"]) for example in examples])
        if "kl_input_ids" in examples[0]:
            others = [{name: example[f"kl_{name}"] for name in _INPUTS} for example in examples]
            padded = pad(others, pad_id, max_length=self.max_length)
            batch |= {f"kl_{name}": padded[name] for name in _INPUTS}
        return batch

    # -- steps ---------------------------------------------------------------------------------------------

    @property
    def wants_window(self) -> bool:
        """Whether the loss depends on totals over the whole step: the KL divergence, and the load of experts."""
        return self.needs_divergence or super().wants_window

    @property
    def needs_divergence(self) -> bool:
        """Whether the loss depends on the KL divergence, an estimate over the whole step."""
        return self.loss == "kto"

    def step_totals(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The log ratios of the mismatched answers, summed, and their number."""
        if not self.needs_divergence:
            return torch.zeros(2, dtype=torch.float64, device=batch["input_ids"].device)
        with eval_mode(self.model):
            ratios = self._kl_log_ratios(batch).double()
        return torch.stack([ratios.sum(), torch.full_like(ratios[0], len(ratios))])

    def use_step_totals(self, totals: Tensor | None) -> None:
        """Use these totals until the end of the step; None: those of each batch."""
        self._totals = totals

    def on_step_end(self, step: int, max_steps: int) -> None:
        super().on_step_end(step, max_steps)
        self._totals = None

    @torch.no_grad()
    def _kl_log_ratios(self, batch: Mapping[str, Tensor]) -> Tensor:
        others = {name: batch[f"kl_{name}"] for name in _INPUTS}
        reference = self._reference_log_probs(others)
        return self._policy_scores(self.model, others).sum - reference

    def _divergence(self, batch: Mapping[str, Tensor]) -> Tensor | float:
        """The estimated KL divergence: of the whole step, or of the batch if it is a step of its own."""
        if not self.needs_divergence:
            return 0.0
        total, count = (self.step_totals(batch) if self._totals is None else self._totals).unbind()
        return (total / count).clamp(min=0)

    @torch.no_grad()
    def _reference_log_probs(self, batch: Mapping[str, Tensor]) -> Tensor:
        with self.reference_model() as model:
            return self._reference_scores(model, batch).sum

    def _loss(self, policy: Tensor, reference: Tensor, desirable: Tensor, kl: Tensor | float) -> Tensor:
        return kto_loss(
            policy, reference, desirable, kl, self.beta, desirable_weight=self.desirable_weight,
            undesirable_weight=self.undesirable_weight, variant=self.loss, reduction="none",  # type: ignore[arg-type]
        )  # fmt: skip

    def train_step(self, batch: Mapping[str, Tensor]) -> Loss:
        """The loss summed over answers, the rewards of both kinds, and the KL divergence."""
        kl = self._divergence(batch)
        reference, desirable = self._reference_log_probs(batch), batch["desirable"]
        with self._noisy(batch):
            policy = self._policy_scores(self.model, batch).sum
        losses = self._loss(policy, reference, desirable, kl)
        rewards = self.beta * (policy.detach() - reference)
        metrics: dict[str, Any] = {
            "rewards/chosen": ((rewards * desirable).sum(), desirable.sum()),
            "rewards/rejected": ((rewards * ~desirable).sum(), (~desirable).sum()),
        }
        if self.needs_divergence:
            metrics["kl"] = (kl * len(losses), len(losses))
        loss = Loss(losses.sum(), len(losses), metrics=metrics, per_sample=losses.detach())
        return self._with_router_loss(loss, batch)

    @property
    def _router_states(self) -> OutputStates:
        return self._policy_scores.states

    def _router_weight(self, batch: Mapping[str, Tensor]) -> Tensor:
        return torch.tensor(len(batch["labels"]), device=batch["labels"].device)

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """What `on_eval_end` computes the loss from, per answer."""
        reference = self._reference_log_probs(batch)
        rows = {"log_prob": self._policy_scores(self.model, batch).sum, "reference_log_prob": reference}
        self._evaluate_router(batch)
        if self.needs_divergence:
            rows["kl_log_ratio"] = self._kl_log_ratios(batch)
        return {**rows, "desirable": batch["desirable"]}

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """Loss and rewards, with the KL divergence estimated over the whole dataset."""
        policy, reference = rows["log_prob"].double(), rows["reference_log_prob"].double()
        desirable = rows["desirable"]
        metrics = {}
        kl = 0.0
        if "kl_log_ratio" in rows:
            kl = metrics["kl"] = max(0.0, rows["kl_log_ratio"].double().mean().item())
        metrics["loss"] = self._loss(policy, reference, desirable, kl).mean().item()
        rewards = self.beta * (policy - reference)
        for name, chosen in (("rewards/chosen", desirable), ("rewards/rejected", ~desirable)):
            if chosen.any():
                metrics[name] = rewards[chosen].mean().item()
        if "rewards/chosen" in metrics and "rewards/rejected" in metrics:
            metrics["rewards/margin"] = metrics["rewards/chosen"] - metrics["rewards/rejected"]
        return metrics

    def check_batch(self, batch: Any) -> list[str]:
        supervised = (batch["labels"][..., 1:] != IGNORE_INDEX).any(-1)
        return [] if bool(supervised.all()) else ["An answer of the batch has no token to learn: all labels are -100."]
