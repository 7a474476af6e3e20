"""Knowledge distillation of causal language models: from a teacher's logits, on-policy (GKD), or from logits on disk.

The loss is in `losses.divergence`, a sum over supervised tokens with their number as the weight; the teacher in
`tasks.language.teacher`; generated completions in `tasks.language.on_policy`; logits on disk in
`data.text.logits_store`.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from contextlib import nullcontext
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import torch
from torch import Tensor

from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import expected
from trainformer.data.labels import is_stream
from trainformer.data.text.encode import IGNORE_INDEX, Encoder
from trainformer.data.text.prepare import causal_tokens
from trainformer.data.text.store import tokenize
from trainformer.losses.divergence import DistillationLoss, check_divergence, distillation_loss
from trainformer.tasks.language.base import data_name
from trainformer.tasks.language.causal_lm import INPUTS, CausalLM
from trainformer.tasks.language.on_policy import (
    DATA,
    STUDENT,
    TEACHER,
    OnPolicyDataset,
    PromptEncoder,
    complete_rows,
    has_prompts_only,
)
from trainformer.tasks.language.rollouts.sampling import SamplingOptions
from trainformer.tasks.language.teacher import TeacherMixin

_REFUSED = ("pipeline", "deepspeed", "tensor_parallel", "tp")
_LARGEST_EXPONENT = 700.0  # exp() overflows beyond


@dataclass(eq=False)
class Distillation(TeacherMixin, CausalLM):
    """Train a causal language model, the student, to predict the next-token probabilities of a teacher.

    `teacher` is the name or folder of a model, a model, `"base"` (the student before training; with an adapter, the
    model with the adapter disabled), or a folder that `save_teacher_logits` has written. It has the student's
    tokenizer, is in no optimizer and no checkpoint, and always in eval mode. A resumed run checks that it is the same.

    The loss is ``alpha * divergence + (1 - alpha) * cross_entropy`` of the supervised tokens. `beta` selects the
    divergence: 0 is forward KL, 1 is reverse KL, and between them is the generalised Jensen-Shannon divergence of GKD.
    `temperature` divides the logits of both. `tail` is for logits on disk: the tokens outside of the top k are one
    event (`"bucket"`), or have probability 0 (`"renormalize"`).

    `lmbda` is the share of samples whose completion the student generates (on-policy); with `seq_kd` the teacher
    generates the others. `max_new_tokens`, `sampling_temperature`, `top_k` and `top_p` say how. With ``lmbda=1`` or
    `seq_kd`, records may be prompts alone. Generated tokens of the student have no cross-entropy.

    The other arguments are those of `CausalLM`.

    >>> task = Distillation("gpt2", teacher="gpt2-large", beta=0.5, alpha=0.9)
    >>> task.beta, task.temperature, task.lmbda
    (0.5, 1.0, 0.0)
    """

    _: KW_ONLY
    teacher: Any = None
    beta: float = 0.0
    temperature: float = 1.0
    alpha: float = 1.0
    tail: str = "bucket"
    lmbda: float = 0.0
    seq_kd: bool = False
    max_new_tokens: int = 256
    sampling_temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    teacher_dtype: str | None = None  # of a teacher that is loaded: fp32, bf16 or fp16; default: that of the student
    teacher_bits: int | None = None  # 4 or 8: quantise it with bitsandbytes
    teacher_device: str | None = None  # default: that of the student
    teacher_kwargs: dict[str, Any] = field(default_factory=dict)  # for `from_pretrained`

    def __post_init__(self) -> None:
        super().__post_init__()
        check_divergence(self.beta, self.temperature, self.alpha)
        for name in ("label_smoothing", "z_loss"):
            if getattr(self, name):
                raise BadArgument(expected(f"no {name} in Distillation", getattr(self, name), f"Leave out {name}."))
        self._init_teacher()
        self._check_generation()

    def _check_generation(self) -> None:
        share = self.lmbda
        if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share <= 1:
            do = "0 trains on the data, 1 on the student's own completions."
            raise BadArgument(expected("lmbda to be from 0 to 1", share, do))
        self._sampling = SamplingOptions(self.max_new_tokens, self.sampling_temperature, self.top_k, self.top_p)
        if not self.generates:
            return
        if self._logits is not None:
            do = "Pass lmbda=0 and seq_kd=False, or a model as the teacher."
            raise BadArgument(expected("a teacher in memory, to judge generated tokens", "logits on disk", do))
        if self.packing:
            raise BadArgument(expected("packing=False with lmbda or seq_kd", True, "Completions have to be generated."))
        if self.max_new_tokens >= self.max_length:
            do = "Both a prompt and its completion must fit into max_length."
            raise BadArgument(expected(f"max_new_tokens below max_length={self.max_length}", self.max_new_tokens, do))

    @property
    def generates(self) -> bool:
        """Whether some completions are generated."""
        return self.lmbda > 0 or self.seq_kd

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """As for `CausalLM`. Also refuses strategies that split the model, whose logits are compared in one place."""
        strategy = settings.strategy
        name = strategy.get("name") if isinstance(strategy, Mapping) else getattr(strategy, "name", strategy)
        if name in _REFUSED:
            raise BadArgument(expected("strategy 'ddp' or 'fsdp' with Distillation", name))
        return super().training_defaults(settings, chosen)

    def configure(self, info: Any) -> None:
        """Load student and teacher now, after seeding."""
        super().configure(info)
        self._check_generation()  # max_length may have been lowered to the positions of the model
        if self.generates and self.wants_window:
            what = "router_loss='batch' with generated completions and gradient accumulation"
            raise BadArgument(expected(what, self.router_loss, "Pass it, or accumulation_steps=1."))

    # -- data ----------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokenise once, and look for the logits of each sequence, or prepare for generation."""
        if has_prompts_only(dataset):
            return self._prompts(dataset, train)
        if not self.generates:
            tokens = super().prepare_dataset(dataset, train)
            if self._logits is not None and hasattr(tokens, "__len__"):
                self._logits.check_sequences(tokens, self._encoding(), data_name(train))
            return tokens
        if is_stream(dataset):
            do = "Pass data with a length, or lmbda=0 and seq_kd=False."
            raise BadArgument(expected("indexed data for generated completions", "a stream", do))
        store = causal_tokens(dataset, self.encoder(), cache_dir=self.cache_dir, name=data_name(train))
        return self._on_policy(store, train)

    def encoder(self) -> Encoder:
        """Turns records into tokens and labels."""
        return Encoder(self.text_tokenizer, **self._encoding())

    def _encoding(self) -> dict[str, Any]:
        names = ("max_length", "train_on", "truncation", "prompt_template")
        return {name: getattr(self, name) for name in names}

    def _prompts(self, dataset: Any, train: bool) -> OnPolicyDataset:
        if not (self.lmbda == 1 or self.seq_kd):
            do = "Pass lmbda=1 for completions of the student, seq_kd=True for the teacher's, or add completions."
            raise DataError(expected("prompts with completions", f"prompts alone, with lmbda={self.lmbda:g}", do))
        encoder = PromptEncoder(self.text_tokenizer, **self._encoding())
        return self._on_policy(tokenize(dataset, encoder, cache_dir=self.cache_dir, name=data_name(train)), train)

    def _on_policy(self, store: Any, train: bool) -> OnPolicyDataset:
        limit = self.max_length - self.max_new_tokens
        made = OnPolicyDataset(store, limit, self.lmbda, self.seq_kd, fixed=not train)
        if train:
            OnPolicyDataset(store, limit, 1.0, False)[0]  # fail now if the data have no prompts
        return made

    def collate_fn(self, examples: list[Any]) -> dict[str, Tensor]:
        batch = super().collate_fn(examples)
        if "seed" in examples[0]:
            batch["seeds"] = torch.tensor([example["seed"] for example in examples])
            batch["sources"] = torch.tensor([example["source"] for example in examples])
        if self._logits is not None:
            found = self._logits.rows(examples, batch["labels"].shape[1], self._encoding())
            batch["teacher_ids"], batch["teacher_log_probs"] = map(torch.from_numpy, found)
        return batch

    # -- steps ---------------------------------------------------------------------------------------------

    def train_step(self, batch: Mapping[str, Tensor]) -> Loss:
        """The loss, summed over the supervised tokens; and the parts of it."""
        batch = self._completed(batch)
        found = self._distil(batch, train=True)
        metrics = self._parts(found)
        if "sources" in batch:
            generated = batch["sources"] != DATA
            metrics["generated"] = (generated.sum(), len(generated))
            tokens = (batch["labels"][generated] != IGNORE_INDEX).sum()
            metrics["completion_length"] = (tokens, generated.sum())
        rows = None
        if self.per_sample_losses:
            rows = found.per_token.sum(-1), (batch["labels"][..., 1:] != IGNORE_INDEX).sum(-1)
        return self._with_router_loss(Loss(found.sum, found.weight, metrics=metrics, per_sample=rows), batch)

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """The loss and its parts. `ce` is the student's own loss on the data."""
        batch = self._completed(batch)
        found = self._distil(batch)
        self._evaluate_router(batch)
        labels = batch["labels"]
        if "sources" in batch:
            labels = torch.where(self._is_hard(batch), labels, IGNORE_INDEX)
        bits = self._bits_per_byte(labels, found.cross_entropy)
        return {"loss": (found.sum, found.weight), **self._parts(found), **bits}

    def derive_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Perplexity of the student on the data."""
        derived = super().derive_metrics({name: value for name, value in metrics.items() if name != "loss"})
        return derived | ({"perplexity": math.exp(min(metrics["ce"], _LARGEST_EXPONENT))} if "ce" in metrics else {})

    def _distil(self, batch: Mapping[str, Tensor], train: bool = False) -> DistillationLoss:
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        teacher = self._teacher_output(inputs, batch)  # first: disabling an adapter resets requires_grad
        with self._noisy(batch) if train else nullcontext():
            states, head = self._states(self.model, inputs)
        layer: dict[str, Any] = {} if head is None else {"weight": head.weight, "bias": head.bias}
        return distillation_loss(
            states,
            batch["labels"],
            teacher,
            beta=self.beta,
            temperature=self.temperature,
            alpha=self.alpha,
            hard=self._is_hard(batch) if "sources" in batch else None,
            chunk_tokens=self._states.chunk_tokens,
            **layer,
        )

    def _is_hard(self, batch: Mapping[str, Tensor]) -> Tensor:
        """Tokens that the student did not generate itself."""
        return (batch["sources"] != STUDENT)[:, None].expand_as(batch["labels"])

    def _parts(self, found: DistillationLoss) -> dict[str, Any]:
        parts = {
            "kl": (found.kl, found.weight),
            "ce": (found.cross_entropy, found.hard),
            "accuracy": (found.correct, found.hard),
            "agreement": (found.agree, found.weight),
        }
        return parts if self.beta == 0 else {"divergence": (found.divergence, found.weight), **parts}

    def _completed(self, batch: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Generate the missing completions."""
        if "sources" not in batch:
            return batch
        if self.lmbda > 0:
            batch = complete_rows(batch, STUDENT, self.model, self._sampling, self.text_tokenizer)
        if self.seq_kd:
            with self.reference_model() as teacher:
                batch = complete_rows(batch, TEACHER, teacher, self._sampling, self.text_tokenizer)
        return batch

    def check_batch(self, batch: Any) -> list[str]:
        if "sources" in batch and bool((batch["sources"] != DATA).any()):
            return []  # completions are still to be generated
        return super().check_batch(batch)
