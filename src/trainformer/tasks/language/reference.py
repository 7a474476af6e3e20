"""Reference models and log probabilities of answers, for tasks that compare the trained model with a fixed one."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.adapters.base import adapted_model, is_adapted
from trainformer.adapters.saved import merged_into
from trainformer.adapters.state import active_adapters
from trainformer.core import BadArgument, DataError
from trainformer.core.errors import expected
from trainformer.losses.tokens import SequenceLogProbs, sequence_log_probs
from trainformer.models.language import OutputStates
from trainformer.models.modes import eval_mode
from trainformer.tasks.language.base import LanguageTask
from trainformer.tasks.language.pretrained import load_whole

_TRAINS_BIASES = (
    "Expected an adapter that can be disabled for the reference, received one that trains biases of the "
    "model itself. Pass bias='none', or a reference: reference=<name or folder of the model>."
)
_FORGOTTEN = ""
_SAMPLED = 256  # elements of each tensor in the digest of a reference


class ReferenceMixin(LanguageTask):
    """Base class of tasks with a reference model that never changes.

    `reference` is one of these:

    - `"start"`: the model before this training. Without an adapter it is a frozen copy. With a new adapter it is the
      same model with the adapter disabled, which costs no memory. If the training continues an adapter, or stacks a new
      one on it, it is that adapter as it was at the start, of which a copy is kept.
    - `"base"`: the same, but with all adapters disabled: the base model of an adapter that the training continues.
    - the name or folder of another model, or a model.

    The reference is in no optimizer and no checkpoint, and always in eval mode. A resumed run checks that its reference
    is the same as before. Call `_init_reference` from `__post_init__`.
    """

    reference: Any

    def _init_reference(self) -> None:
        self._reference: nn.Module | None = None
        self._initial: list[Tensor] | None = None  # the trained weights of an adapter at the start
        self._reference_digest: str | None = None
        if not self.needs_reference:
            return
        if not isinstance(self.reference, str | Path | nn.Module):
            received = type(self.reference).__name__
            what = "reference to be 'base', 'start', a model, or the name or folder of one"
            raise BadArgument(expected(what, received))
        if self.reference is self.model_name and isinstance(self.reference, nn.Module):
            do = "Pass reference='start' for a frozen copy."
            raise BadArgument(expected("a reference other than the model that is trained", "the same object", do))
        if self.adapter is not None and is_base(self.reference) and getattr(self.adapter, "bias", "none") != "none":
            raise BadArgument(_TRAINS_BIASES)

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses a reference model."""
        return True

    @property
    def _disables_adapter(self) -> bool:
        """Whether the reference is the model with its adapters disabled."""
        if not self.needs_reference or not is_base(self.reference):
            return False
        if self._model is None:  # not loaded yet: what the arguments say
            return self.adapter is not None and self.on_adapter is None
        if not is_adapted(self._model):
            return False
        inner = adapted_model(self._model)
        if self.reference == "base":
            return not merged_into(inner.get_base_model())
        return self.adapter is not None and len(active_adapters(inner)) == 1

    def forget_reference(self) -> None:
        """Do without the reference, as a model does that only predicts."""
        self._reference_digest = _FORGOTTEN

    def _load(self) -> nn.Module:
        model = super()._load()
        self._build_reference(model)
        return model

    def configure(self, info: Any) -> None:
        """Load the model and the reference now, after seeding."""
        super().configure(info)
        self._build_reference(self.model)  # if the user has set `model`

    def _build_reference(self, model: nn.Module) -> None:
        """Build the reference once, before the first step."""
        if not self.needs_reference or self._reference_digest is not None:
            return
        self._model = model
        if self._disables_adapter:
            _check_can_be_disabled(model)
            self._reference_digest = model_digest(model, frozen_only=True)
            return
        if self.reference == "start" and is_adapted(model):
            self._initial = [p.detach().clone() for p in model.parameters() if p.requires_grad]
            self._reference_digest = model_digest(model)
            return
        if is_base(self.reference) and not is_adapted(model):
            reference = copy.deepcopy(model)
        else:
            dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
            reference = self._load_reference(dtype)
        self._reference = reference.requires_grad_(False).eval()
        self._reference_digest = model_digest(reference)

    def _load_reference(self, dtype: torch.dtype) -> nn.Module:
        """A model of its own: another one, or the base of adapters that were merged into the trained model."""
        options = {"dtype": dtype, **self._load_options()}
        if not is_base(self.reference):
            return load_whole(self.reference, self.kind, fit=self._fit_vocabulary, **options)
        if self.pretrained.adapters is None:
            do = "Pass the base model as reference=."
            raise BadArgument(expected("a base model that can be loaded as reference='base'", "a merged PeftModel", do))
        return load_whole(self.pretrained.source, self.kind, fit=self._fit_vocabulary, **options)

    def set_train_mode(self, train: bool) -> None:
        """Keep the reference in eval mode."""
        self.model.train(train)
        if self._reference is not None:
            self._reference.eval()

    def state_dict(self) -> dict[str, Any]:
        return {"reference": self._reference_digest}

    def check_state(self, state: dict[str, Any]) -> None:
        if self._reference_digest == _FORGOTTEN:
            return
        if self.needs_reference and state.get("reference") not in (None, self._reference_digest):
            raise DataError(
                "Expected the reference model that the run started with, received another one. Pass the same "
                "model_name and reference, with the same weights."
            )

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Only check the digest: the reference is rebuilt from its source."""
        self.check_state(state)

    def config_dict(self) -> dict[str, Any]:
        config = super().config_dict()
        if isinstance(self.reference, nn.Module):
            config["reference"] = type(self.reference).__name__
        return config

    @contextmanager
    def reference_model(self) -> Iterator[nn.Module]:
        """The reference in eval mode. Use it before the policy's forward pass, without gradients."""
        if self._reference_digest == _FORGOTTEN:
            raise BadArgument(
                "Expected the model before training as the reference, received a trained model alone, which predicts. "
                "To evaluate it, make the task as in training and pass it: trainformer.load(folder, task=...)."
            )
        if self._reference is not None:
            yield self._reference
        elif self._initial is not None:
            with eval_mode(self.model), initial_weights(self.model, self._initial):
                yield self.model
        else:
            assert self._reference_digest is not None, "configure() builds the reference"
            with eval_mode(self.model), disabled_adapters(self.model):
                yield self.model


@contextmanager
def initial_weights(model: nn.Module, initial: list[Tensor]) -> Iterator[None]:
    """Put the trained weights back to what they were at the start, for a forward pass without gradients."""
    trained = [p for p in model.parameters() if p.requires_grad]
    assert len(trained) == len(initial), "the same weights are trained as at the start"
    with torch.no_grad():
        now = [p.detach().clone() for p in trained]
        for position, parameter in enumerate(trained):
            initial[position] = _placed_like(initial[position], parameter)
            parameter.data.copy_(initial[position])
        try:
            yield
        finally:
            for parameter, value in zip(trained, now, strict=True):
                parameter.data.copy_(value)


def _placed_like(value: Tensor, parameter: Tensor) -> Tensor:
    """On the device of a parameter, and sharded as it is."""
    value = value.to(parameter.device)
    placements = getattr(parameter, "placements", None)
    if placements is None or hasattr(value, "placements"):
        return value
    from torch.distributed.tensor import distribute_tensor

    mesh = parameter.device_mesh  # type: ignore[attr-defined]
    return distribute_tensor(value, mesh, placements, src_data_rank=None)  # every rank has all of it


def _check_can_be_disabled(model: nn.Module) -> None:
    configs = adapted_model(model).peft_config.values()
    if any(getattr(config, "bias", "none") != "none" for config in configs):
        raise BadArgument(_TRAINS_BIASES)


@contextmanager
def disabled_adapters(model: nn.Module) -> Iterator[None]:
    """Without any adapter. peft makes all of them trainable afterwards: those that were frozen stay frozen."""
    inner = adapted_model(model)
    frozen = [p for p in inner.parameters() if not p.requires_grad]
    try:
        with inner.disable_adapter():
            yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


class AnswerScorer:
    """Log probabilities of the answers under a model, with logits in chunks if the model allows it."""

    def __init__(self, chunk_tokens: int | None) -> None:
        self.states = OutputStates(chunk_tokens)

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> SequenceLogProbs:
        # No attention mask: padding is on the right, where no token of a causal model attends.
        states, head = self.states(model, {"input_ids": batch["input_ids"]})
        if head is None:
            return sequence_log_probs(states, batch["labels"])
        layer: dict[str, Any] = {"weight": head.weight, "bias": head.bias, "chunk_tokens": self.states.chunk_tokens}
        return sequence_log_probs(states, batch["labels"], **layer)


def is_base(reference: Any) -> bool:
    """Whether the reference is the model before training, with or without the adapters that it came with."""
    return isinstance(reference, str) and reference in ("start", "base")


def model_digest(model: nn.Module, frozen_only: bool = False) -> str:
    """Identify a model by some elements of each parameter, bit by bit. It changes with a training step."""
    digest = hashlib.blake2b(digest_size=16)
    for parameter in model.parameters():
        if (frozen_only and parameter.requires_grad) or not parameter.is_floating_point():
            continue  # adapter weights; and packed 4-bit weights, which devices may round differently
        flat = parameter.detach().reshape(-1)
        some = flat[:: max(1, flat.numel() // _SAMPLED)].contiguous().cpu()
        digest.update(some.view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
