"""Teachers of distillation: a frozen model of transformers, the model without its adapter, or logits from disk."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.core import BadArgument, DataError
from trainformer.core.errors import expected
from trainformer.core.optional import require
from trainformer.data.text.logits_store import LogitsStore, is_logits_folder, open_logits
from trainformer.data.text.tokenizer import check_same_tokenizer, check_stored_tokenizer
from trainformer.losses.divergence import TeacherStates, TopLogProbs, check_tail
from trainformer.models.language import OutputStates, load_tokenizer
from trainformer.tasks.language.base import DTYPES
from trainformer.tasks.language.pretrained import load_whole
from trainformer.tasks.language.reference import ReferenceMixin, is_base, model_digest

logger = logging.getLogger("trainformer")

_HOW = "a model, the name or folder of one, 'base', or a folder of teacher logits"
_LATER = ""  # the digest of a teacher that was not loaded
_LOADING = ("teacher_dtype", "teacher_bits", "teacher_device", "teacher_kwargs")


class TeacherMixin(ReferenceMixin):
    """Base class of tasks with a teacher: a reference model with options of its own, or logits from disk.

    Call `_init_teacher` from `__post_init__`.
    """

    teacher: Any
    teacher_dtype: str | None
    teacher_bits: int | None
    teacher_device: str | None
    teacher_kwargs: dict[str, Any]
    chunk_tokens: int | None
    beta: float
    temperature: float
    tail: str

    def _init_teacher(self) -> None:
        self._reference: nn.Module | None = None
        self._initial: list[Tensor] | None = None
        self._reference_digest: str | None = None
        self._saved_digest: str | None = None  # of the teacher of a run whose model is only used
        self._elsewhere: list[nn.Module] = []  # in a list: a trainer moves and shards modules that a task holds itself
        self._logits: LogitsStore | None = None
        self._teacher_states = OutputStates(self.chunk_tokens)
        self._check_teacher()
        check_tail(self.tail, self.beta)
        if is_logits_folder(self.teacher):
            self._logits = open_logits(self.teacher, self.temperature)
        elif self.tail != "bucket":
            raise BadArgument(expected("tail with a folder of teacher logits only", self.tail, "Leave it out."))

    def _check_teacher(self) -> None:
        if self.teacher is None or not isinstance(self.teacher, str | Path | nn.Module):
            received = None if self.teacher is None else type(self.teacher).__name__
            raise BadArgument(expected(f"teacher to be {_HOW}", received))
        if isinstance(self.teacher, nn.Module) and self.teacher is self.model_name:
            do = "Pass teacher='base' for a frozen copy of it."
            raise BadArgument(expected("a teacher other than the model that is trained", "the same object", do))
        if self.teacher_dtype is not None and self.teacher_dtype not in DTYPES:
            raise BadArgument(expected(f"teacher_dtype to be one of {', '.join(DTYPES)} or None", self.teacher_dtype))
        if self.teacher_bits not in (None, 4, 8):
            raise BadArgument(expected("teacher_bits to be 4, 8 or None", self.teacher_bits))
        named = (
            isinstance(self.teacher, str | Path) and not is_base(self.teacher) and not is_logits_folder(self.teacher)
        )
        for name in () if named else _LOADING:
            if getattr(self, name) and not (name == "teacher_device" and isinstance(self.teacher, nn.Module)):
                do = f"Leave out {name}."
                raise BadArgument(expected(f"{name} for a teacher that is loaded by name or folder", self.teacher, do))
        if is_base(self.teacher) and getattr(self.adapter, "bias", "none") != "none":
            raise BadArgument(
                "Expected an adapter that can be disabled for teacher='base', received one that trains biases of the "
                "model itself. Pass bias='none', or the name or folder of the teacher."
            )

    # -- reference -----------------------------------------------------------------------------------------

    @property
    def reference(self) -> Any:  # type: ignore[override]
        """The teacher is the reference model."""
        return self.teacher

    @property
    def needs_reference(self) -> bool:
        """Whether the teacher is a model in memory."""
        return self._logits is None

    def forget_reference(self) -> None:
        """Load the teacher only if it is asked something, since a model that only predicts needs none."""
        self._reference_digest = _LATER

    def _build_later(self) -> None:
        if self._reference_digest != _LATER:
            return
        if is_base(self.teacher):
            raise BadArgument(
                "Expected the model before training as the teacher, received a trained model alone, which predicts. To "
                "evaluate it, make the task as in training and pass it: trainformer.load(folder, task=...)."
            )
        self._reference_digest = None
        self._build_reference(self.model)
        if self._reference is not None:
            device = next(self.model.parameters()).device
            self._elsewhere, self._reference = [self._reference.to(device)], None
        self.check_state({"reference": self._saved_digest})

    def _build_reference(self, model: nn.Module) -> None:
        """Load the teacher once, and compare its vocabulary with the student's."""
        if self._reference_digest is not None:
            return
        if self._logits is not None:
            self._check_stored(self._logits)
            self._reference_digest = self._logits.info.teacher
        elif is_base(self.teacher):
            super()._build_reference(model)
        else:
            teacher = self._load_teacher(model)
            self._check_teacher_vocabulary(teacher)
            self._reference_digest = model_digest(teacher)
            if self.teacher_device is None:
                self._reference = teacher
            else:
                self._elsewhere = [teacher.to(self.teacher_device)]

    def _load_teacher(self, model: nn.Module) -> nn.Module:
        like = next(p.dtype for p in model.parameters() if p.is_floating_point())
        dtype = like if self.teacher_dtype is None else DTYPES[self.teacher_dtype]
        options = {**self._load_options(), **quantization(self.teacher_bits, dtype), **self.teacher_kwargs}
        try:
            teacher = load_whole(self.teacher, self.kind, dtype=dtype, **options)
        except BadArgument as error:
            raise BadArgument(str(error).replace("model_name", "teacher")) from error
        return teacher.requires_grad_(False).eval()

    def check_state(self, state: dict[str, Any]) -> None:
        if self._reference_digest == _LATER:
            self._saved_digest = state.get("reference")
            return
        if state.get("reference") not in (None, self._reference_digest):
            raise DataError(
                "Expected the teacher that the run started with, received another one. Pass the same teacher, with the "
                "same weights and dtype."
            )

    def config_dict(self) -> dict[str, Any]:
        config = super().config_dict()
        config.pop("reference", None)
        if isinstance(self.teacher, nn.Module):
            config["teacher"] = type(self.teacher).__name__
        return config

    @contextmanager
    def reference_model(self) -> Iterator[nn.Module]:
        """The teacher in eval mode. Use it before the student's forward pass, without gradients."""
        self._build_later()
        if self._elsewhere:
            yield self._elsewhere[0]
            return
        with super().reference_model() as model:
            yield model

    # -- output --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _teacher_output(self, inputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> TeacherStates | TopLogProbs:
        """What the teacher says about the tokens of a batch."""
        if self._logits is not None:
            vocabulary = self._logits.info.vocabulary
            return TopLogProbs(batch["teacher_ids"], batch["teacher_log_probs"], vocabulary, self.tail)
        with self.reference_model() as model:
            if self.teacher_device is not None:
                inputs = {name: value.to(self.teacher_device) for name, value in inputs.items()}
            states, head = self._teacher_states(model, inputs)
            return TeacherStates(states) if head is None else TeacherStates(states, head.weight, head.bias)

    # -- vocabularies --------------------------------------------------------------------------------------

    def _check_teacher_vocabulary(self, teacher: Any) -> None:
        """Refuse a teacher with another tokenizer. Rows beyond the tokenizer, which padding adds, may differ."""
        rows, size = teacher.get_output_embeddings().weight.shape[0], len(self.text_tokenizer)
        if teacher.get_input_embeddings().weight.shape[0] < size or rows < size:
            do = "Pass a teacher with the same tokenizer."
            raise BadArgument(expected(f"a teacher with at least {size} tokens, as the tokenizer has", rows, do))
        source = self.teacher if isinstance(self.teacher, str | Path) else getattr(teacher, "name_or_path", "")
        if not isinstance(self.teacher, str | Path) and not Path(str(source) or "-").is_dir():
            return  # a model that was passed, whose tokenizer is unknown
        try:
            tokenizer = load_tokenizer(source)
        except BadArgument:
            logger.info("the teacher %s has no tokenizer to compare with the student's", source)
            return
        check_same_tokenizer(self.text_tokenizer, tokenizer)

    def _check_stored(self, logits: LogitsStore) -> None:
        check_stored_tokenizer(logits.info.tokenizer, self.text_tokenizer)


def quantization(bits: int | None, dtype: torch.dtype) -> dict[str, Any]:
    """Arguments of `from_pretrained` that load a model in 4 or 8 bits; products are in `dtype`."""
    if bits is None:
        return {}
    require("bitsandbytes", "adapters", "to load a model in 4 or 8 bits")
    make = require("transformers", "text", "for language models").BitsAndBytesConfig
    if bits == 8:
        return {"quantization_config": make(load_in_8bit=True)}
    return {"quantization_config": make(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)}
