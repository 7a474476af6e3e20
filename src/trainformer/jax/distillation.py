"""Knowledge distillation of causal language models on JAX: from a teacher beside the student, or from logits on disk.

The loss is in `losses.jax.divergence`, a (sum, weight) over supervised tokens; logits on disk are in
`data.text.logits_store`. The teacher is no part of the state: it is in no optimizer and no checkpoint.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

from trainformer.backends.jax.compilation import JittedStep
from trainformer.backends.jax.precision import cast_floating
from trainformer.backends.jax.sharding import make_sharded
from trainformer.backends.jax.state import TrainState
from trainformer.backends.jax.step import eval_model
from trainformer.checkpointing.tools.jax_models import TrainerRecord
from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import Loss
from trainformer.data.text.logits_store import LogitsStore, is_logits_folder, open_logits
from trainformer.data.text.tokenizer import check_same_tokenizer, check_stored_tokenizer, open_tokenizer
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.base_trainer import BaseTrainer
from trainformer.jax.preference import model_before_training, recorded_model
from trainformer.jax.reference import ReferenceDigest, params_digest, without_adapter
from trainformer.jax.sft import SFTConfig, SFTTrainer
from trainformer.jax.text_arguments import TextArguments
from trainformer.jax.text_trainer import POSITION_INPUTS, perplexity, valid_labels
from trainformer.jax.trainer_protocol import TrainerConfigureModelOutput
from trainformer.losses.jax.divergence import (
    DistillationSums,
    TeacherStates,
    TopLogProbs,
    check_divergence,
    check_tail,
    distillation_sums,
)
from trainformer.losses.jax.tokens import Head
from trainformer.models.jax.decoder import Decoder

_BASE = "base"
_HOW = "a model, the name or folder of one, 'base', or a folder of teacher logits"


@dataclass(kw_only=True)
class DistillationConfig(SFTConfig):
    """Arguments of `DistillationTrainer`, and those of SFT: data, packing, which tokens are supervised.

    The loss is ``alpha * divergence + (1 - alpha) * cross_entropy`` of the supervised tokens.
    """

    beta: float = 0.0  # 0: forward KL, 1: reverse KL, between them the generalised Jensen-Shannon divergence
    temperature: float = 1.0  # divides the logits of both
    alpha: float = 1.0  # 1: distillation alone
    tail: str = "bucket"  # of logits on disk: tokens outside of the top k are one event, or "renormalize"

    def check(self) -> None:
        super().check()
        check_divergence(self.beta, self.temperature, self.alpha)
        check_tail(self.tail, self.beta)
        for name in ("label_smoothing", "z_loss"):
            if getattr(self, name):
                raise BadArgument(expected(f"no {name} in distillation", getattr(self, name), f"Leave out {name}."))


class DistillationTrainer(SFTTrainer):
    """Trains a causal language model, the student, to predict the next-token probabilities of a teacher.

    `teacher_model` is a model (its folder, a module, or a function that builds one), `"base"` (the student before
    training; with LoRA the model without the adapter, which costs no memory), or a folder that
    ``trainformer teacher-logits`` has written. It has the student's tokenizer. A resumed run checks that it is the
    same. Data are those of `SFTTrainer`.

    Evaluation computes the loss, its parts (`kl`, `ce`; with `beta` also `divergence`), the token accuracy, how often
    student and teacher agree, and the student's perplexity.
    """

    arguments_type: ClassVar[type[TextArguments]] = DistillationConfig
    has_router_loss = False

    def __init__(
        self,
        arguments: TrainingArguments,
        model: Any = None,
        processing_class: Any = None,
        *,
        teacher_model: Any = None,
        callbacks: Iterable[Any] | None = None,
        **options: Any,
    ) -> None:
        arguments = self.arguments_type.from_arguments(arguments)
        if teacher_model is None or (isinstance(teacher_model, nnx.Module) and teacher_model is model):
            received = None if teacher_model is None else "the student"
            raise BadArgument(expected(f"teacher_model to be {_HOW}", received))
        self.teacher_model = teacher_model
        self._logits: LogitsStore | None = None
        if is_logits_folder(teacher_model):
            self._logits = open_logits(teacher_model, arguments.temperature)  # type: ignore[attr-defined]
        elif arguments.tail != "bucket":  # type: ignore[attr-defined]
            raise BadArgument(
                expected("tail with a folder of teacher logits only", str(teacher_model), "Leave it out.")
            )
        self._teacher: TrainState | None = None
        self._traced: TrainState | None = None  # the same, as an argument of the step that is being traced
        self._digest = ReferenceDigest("teacher", "teacher_model")
        super().__init__(arguments, model, processing_class, callbacks=[*(callbacks or ()), self._digest], **options)

    # -- the teacher -------------------------------------------------------------------------------------------

    @property
    def _is_base(self) -> bool:
        return isinstance(self.teacher_model, str) and self.teacher_model == _BASE

    def configure_model(self) -> TrainerConfigureModelOutput:
        """The student; and the teacher, with its weights in the compute dtype."""
        output = super().configure_model()
        lora = getattr(output.state.model, "lora", None)
        if self._logits is not None:
            self._check_tokenizer()
            self._digest.digest = self._logits.info.teacher
            return output
        if self._is_base and lora is not None:
            if lora.modules_to_save:
                do = "Pass the folder of the teacher."
                what = "teacher_model='base' with an adapter that can be disabled"
                raise BadArgument(expected(what, f"one that replaces {', '.join(lora.modules_to_save)}", do))
            self._digest.digest = params_digest(output.state.params, self.mesh)
            return output
        teacher = self._copy(output.state) if self._is_base else self._load_teacher()
        self._digest.digest = params_digest(teacher.params, self.mesh)
        self._teacher = teacher.replace(params=cast_floating(teacher.params, self.dtype))
        return output

    def _copy(self, state: TrainState) -> TrainState:
        """The student before training, in memory of its own: the step donates that of the student."""
        copies = {name: jax.tree.map(jnp.copy, getattr(state, name)) for name in ("step", "params", "variables", "rng")}
        tx = optax.identity()
        return state.replace(**copies, opt_state=tx.init(copies["params"]), tx=tx)

    def _load_teacher(self) -> TrainState:
        model, key = BaseTrainer.load_model(self, self.teacher_model), jax.random.key(self.arguments.seed)
        state = make_sharded(model, self.prepare_model, optax.identity(), key, self.mesh)
        shape: Any = state.model
        tokens = getattr(getattr(shape, "config", None), "vocab_size", None)
        if self.text is not None and tokens is not None and tokens < len(self.text):
            do = "Pass a teacher with the same tokenizer."
            what = f"a teacher with at least {len(self.text)} tokens, as the tokenizer has"
            raise BadArgument(expected(what, tokens, do))
        if self.arguments.packing and not isinstance(shape, Decoder):
            what = "a teacher that supports packing (segment_ids)"
            raise BadArgument(expected(what, type(shape).__name__, "Pass packing=False."))
        self._check_tokenizer()
        return state

    def _check_tokenizer(self) -> None:
        """Refuse a teacher with another tokenizer, if that is known."""
        if self.text is None:
            return
        if self._logits is not None:
            check_stored_tokenizer(self._logits.info.tokenizer, self.text)
        elif isinstance(self.teacher_model, (str, Path)) and (Path(self.teacher_model) / "tokenizer.json").is_file():
            check_same_tokenizer(self.text, open_tokenizer(self.teacher_model))

    def jit_step(self, step: Callable[..., Any], shardings: Any, train: bool) -> JittedStep:
        """The step with the teacher as a further argument."""
        if self._teacher is None:
            return super().jit_step(step, shardings, train)

        def with_teacher(state: Any, batch: Any, teacher: TrainState, **options: Any) -> Any:
            self._traced = teacher
            try:
                return step(state, batch, **options)
            finally:
                self._traced = None

        return JittedStep(with_teacher, self.mesh, shardings, train=train, constants=self._teacher)

    def _teacher_of(self, model: Any) -> Any:
        """The teacher's module, whose weights are an argument while a step is traced."""
        state = self._teacher if self._traced is None else self._traced
        if state is not None:
            return eval_model(state, self.dtype)
        teacher = without_adapter(nnx.merge(*nnx.split(model)))  # the student without its adapter
        teacher.eval()
        return teacher

    # -- to be built again from a checkpoint ---------------------------------------------------------------------

    def recorded_options(self) -> dict[str, Any]:
        return {**super().recorded_options(), **recorded_model("teacher_model", self.teacher_model)}

    @classmethod
    def options_to_evaluate(cls, record: TrainerRecord, arguments: Any) -> dict[str, Any]:
        """The teacher; ``"base"`` is the model that training began with."""
        is_base = record.options.get("teacher_model") == _BASE
        return model_before_training("teacher_model", record) if is_base else {}

    # -- data --------------------------------------------------------------------------------------------------

    def _encoding(self) -> dict[str, Any]:
        arguments = self.arguments
        return {
            "max_length": self.max_length,
            "train_on": arguments.train_on,
            "truncation": arguments.truncation,
            "prompt_template": arguments.prompt_template,
        }

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """The tokens of SFT. With logits on disk, all sequences must be there."""
        tokens = super().prepare_dataset(dataset, train)
        if self._logits is not None and hasattr(tokens, "__len__"):
            self._logits.check_sequences(tokens, self._encoding(), self.token_options(train)["name"])
        return tokens

    def create_collect_function(self, *args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
        """Tokens; with logits on disk, also those of each position that predicts a supervised token."""

        def collate(samples: list[Any]) -> dict[str, np.ndarray]:
            batch = self.collect_tokens(samples)
            if self._logits is not None:
                found = self._logits.rows(samples, batch["labels"].shape[1], self._encoding())
                batch["teacher_ids"], batch["teacher_log_probs"] = found.ids.astype(np.int32), found.log_probs
            return batch

        return collate

    # -- steps -------------------------------------------------------------------------------------------------

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        return self._distil(model, batch, key)

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        """The loss and its parts without dropout."""
        return self._distil(model, batch, None)

    def _distil(self, model: Any, batch: Mapping[str, Any], key: Any) -> Loss:
        arguments, labels = self.arguments, valid_labels(batch)
        teacher: TeacherStates | TopLogProbs
        if self._logits is not None:
            given = batch["teacher_ids"], batch["teacher_log_probs"]
            teacher = TopLogProbs(*given, self._logits.info.vocabulary, arguments.tail)
        else:
            teacher = TeacherStates(*_states(self._teacher_of(model), batch, None))
        states, head = _states(model, batch, key)
        sums = distillation_sums(
            states,
            labels,
            teacher,
            head,
            beta=arguments.beta,
            temperature=arguments.temperature,
            alpha=arguments.alpha,
            chunks=min(labels.shape[1], 2 * chunks) if (chunks := self._chunks(labels.shape)) > 1 else 1,
        )
        return self._loss_of(sums)

    def _loss_of(self, sums: DistillationSums) -> Loss:
        weight = jnp.sum(sums.tokens)
        parts = {"kl": sums.kl, "ce": sums.cross_entropy, "accuracy": sums.correct, "agreement": sums.agree}
        if self.arguments.beta != 0:
            parts = {"divergence": sums.divergence, **parts}
        metrics = {name: (jnp.sum(value), weight) for name, value in parts.items()}
        return Loss(jnp.sum(sums.loss), weight, metrics, (sums.loss, sums.tokens))

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Perplexity of the student on the data."""
        return perplexity(metrics, "ce")


def _states(model: Any, batch: Mapping[str, Any], key: Any) -> tuple[jax.Array, Head | None]:
    """Hidden states and the head of a model, or its logits and None. With a key, dropout is active."""
    if not hasattr(model, "hidden_states") or not hasattr(model, "head"):
        return model(batch["input_ids"]), None
    positions = {name: batch[name] for name in POSITION_INPUTS if name in batch}
    return model.hidden_states(batch["input_ids"], **positions, deterministic=key is None, key=key), model.head
