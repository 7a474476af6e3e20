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

from trainformer.adapters.base import adapted_model
from trainformer.core import BadArgument, DataError
from trainformer.core.errors import expected
from trainformer.losses.tokens import SequenceLogProbs, sequence_log_probs
from trainformer.models.language import OutputStates, load_model
from trainformer.models.modes import eval_mode
from trainformer.tasks.language.base import LanguageTask

_SAMPLED = 256  # elements of each tensor in the digest of a reference


class ReferenceMixin(LanguageTask):
    """Base class of tasks with a reference model that never changes.

    `reference` is `"base"` for the model before training, the name or folder of another model, or a model. With an
    adapter, `"base"` is the same model with the adapter disabled, which costs no memory; otherwise it is a frozen copy.
    The reference is in no optimizer and no checkpoint, and always in eval mode. A resumed run checks that its reference
    is the same as before. Call `_init_reference` from `__post_init__`.
    """

    reference: Any

    def _init_reference(self) -> None:
        self._reference: nn.Module | None = None
        self._reference_digest: str | None = None
        if not self.needs_reference:
            return
        if not isinstance(self.reference, str | Path | nn.Module):
            received = type(self.reference).__name__
            raise BadArgument(expected("reference to be 'base', a model, or the name or folder of one", received))
        if self.reference is self.model_name and isinstance(self.reference, nn.Module):
            do = "Pass reference='base' for a frozen copy."
            raise BadArgument(expected("a reference other than the model that is trained", "the same object", do))
        if self._disables_adapter and getattr(self.adapter, "bias", "none") != "none":
            raise BadArgument(
                "Expected an adapter that can be disabled for the reference, received one that trains biases of the "
                "model itself. Pass bias='none', or a reference: reference=<name or folder of the model>."
            )

    @property
    def needs_reference(self) -> bool:
        """Whether the loss uses a reference model."""
        return True

    @property
    def _disables_adapter(self) -> bool:
        """Whether the reference is the model with its adapter disabled."""
        return self.needs_reference and self.adapter is not None and is_base(self.reference)

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
        if self._disables_adapter:
            self._reference_digest = model_digest(model, frozen_only=True)
            return
        if is_base(self.reference):
            reference = copy.deepcopy(model)
        else:
            dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
            reference = load_model(self.reference, self.kind, dtype=dtype, **self._load_options())
            self._fit_vocabulary(reference)
        self._reference = reference.requires_grad_(False).eval()
        self._reference_digest = model_digest(reference)

    def set_train_mode(self, train: bool) -> None:
        """Keep the reference in eval mode."""
        self.model.train(train)
        if self._reference is not None:
            self._reference.eval()

    def state_dict(self) -> dict[str, Any]:
        return {"reference": self._reference_digest}

    def check_state(self, state: dict[str, Any]) -> None:
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
        """The reference in eval mode. Use it before the policy's forward pass, without gradients.

        Disabling and enabling an adapter resets requires_grad.
        """
        if not self._disables_adapter:
            assert self._reference is not None, "configure() builds the reference"
            yield self._reference
            return
        with eval_mode(self.model), adapted_model(self.model).disable_adapter():
            yield self.model


class AnswerScorer:
    """Log probabilities of the answers under a model, with logits in chunks if the model allows it."""

    def __init__(self, chunk_tokens: int | None) -> None:
        self._states = OutputStates(chunk_tokens)

    def __call__(self, model: nn.Module, batch: Mapping[str, Tensor]) -> SequenceLogProbs:
        # No attention mask: padding is on the right, where no token of a causal model attends.
        states, head = self._states(model, {"input_ids": batch["input_ids"]})
        layer: dict[str, Any] = {}
        if head is not None:
            layer = {"weight": head.weight, "bias": head.bias, "chunk_tokens": self._states.chunk_tokens}
        return sequence_log_probs(states, batch["labels"], label_weights=batch.get("label_weights"), **layer)


def is_base(reference: Any) -> bool:
    """Whether the reference is the model before training."""
    return isinstance(reference, str) and reference == "base"


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
