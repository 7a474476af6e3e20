"""The model of a `Trainer` as a task: training and evaluation steps, and the default loss.

A loss is a mean over the supervised items of a micro-batch: labels other than -100 if there is one label per token,
otherwise samples. It is weighted by their number, so gradient accumulation and batch size do not change the result.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainformer.adapters.base import is_adapted, unwrap_model
from trainformer.adapters.state import adapter_file, adapter_state_dict, load_adapter_state_dict, save_adapter_beside
from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import BackwardDone, Mean
from trainformer.data.sharding import batch_length
from trainformer.hf.checkpoints import write_trainer_files
from trainformer.hf.collate import inner_model
from trainformer.hf.collecting import EvalScope
from trainformer.hf.outputs import has_loss, logits_from_outputs, loss_from_outputs
from trainformer.models.language import declare_packing
from trainformer.tasks.base import TaskBase
from trainformer.utils.distributed import is_padding

if TYPE_CHECKING:
    from trainformer.hf.steps import SteppingTrainer

logger = logging.getLogger("trainformer")

IGNORE_INDEX = -100


class ModelTask(TaskBase):
    """The task that trains the model of a trainer."""

    def __init__(self, front: SteppingTrainer, model: nn.Module) -> None:
        self.front = front
        self.model = model
        self.title = type(inner_model(model)).__name__
        self._shifts = shifts_labels(model)
        self._scope = EvalScope(loss_only=True)
        self._steps_by_user = front._overrides("training_step")
        self._wraps_loss = front._overrides("compute_loss_context_manager", "autocast_smart_context_manager")
        self._prepares = front._overrides("_prepare_inputs", "_prepare_input")
        self.window_weight: Any = None  # of the current step; known if the user has overridden `training_step`
        self.flos = 0.0  # floating point operations of the run, as HF estimates them
        self._flos_per_input: float | None = None
        self._counts_by_user = front._overrides("floating_point_ops")

    # -- data ----------------------------------------------------------------------------------------------

    @property
    def collate_fn(self) -> Any:
        return self.front._get_collator_with_removed_columns(self.front.data_collator)

    # -- training ------------------------------------------------------------------------------------------

    def train_step(self, batch: Any) -> Mean | BackwardDone:
        inputs = _shallow_copy(batch)
        self._count_flos(inputs)
        if self._steps_by_user:
            return self._user_step(inputs)
        if self._prepares:
            inputs = self.front._prepare_inputs(inputs)
        weight = self.weight_of(inputs)
        context = self.front.compute_loss_context_manager() if self._wraps_loss else nullcontext()
        with _single_document(inputs), context:
            loss = self.front.compute_loss(self.model, inputs, num_items_in_batch=_at_least_one(weight))
        return Mean(loss, weight)

    def _user_step(self, inputs: Any) -> BackwardDone:
        """A step of the user's own, including the backward pass."""
        weight = self.weight_of(inputs)
        front = self.front
        counts = front.model_accepts_loss_kwargs or front.compute_loss_func is not None
        with _single_document(inputs):
            loss = front.training_step(self.model, inputs, self.window_weight if counts else None)
        if not isinstance(loss, Tensor) or loss.numel() != 1:
            received = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
            do = "Return loss.detach() after self.accelerator.backward(loss)."
            raise BadArgument(expected("training_step to return its loss as a scalar tensor", received, do))
        # The losses of all micro-batches add up to that of the step.
        return BackwardDone(loss.detach().reshape(()) * self.window_weight, weight)

    def _count_flos(self, inputs: Any) -> None:
        """Count operations. They are proportional to the size of the main input: the model is asked only once."""
        name = getattr(inner_model(self.model), "main_input_name", "input_ids")
        main = inputs.get(name) if isinstance(inputs, Mapping) else None
        size = main.numel() if isinstance(main, Tensor) else 0
        run = self.front._run
        ranks = 1 if run is None else run.process_group.dp_world_size
        if self._counts_by_user:
            self.flos += ranks * self.front.floating_point_ops(inputs)
        elif size:
            if self._flos_per_input is None:
                self._flos_per_input = ranks * self.front.floating_point_ops(inputs) / size
            self.flos += self._flos_per_input * size

    def begin_window(self, batches: Sequence[Any], sizes: Sequence[int]) -> None:
        """The batches of the next step, if `wants_window`: `training_step` needs to know their weight."""
        self.window_weight = _at_least_one(sum(self.weight_of(batch) for batch in batches))
        self.front.current_gradient_accumulation_steps = len(batches)

    @property
    def wants_window(self) -> bool:
        """Whether the batches of a step must be known before it begins."""
        return self._steps_by_user

    def items_of(self, batch: Any) -> Any:
        """`num_items_in_batch` for a batch: its weight, at least 1."""
        return _at_least_one(self.weight_of(batch))

    def weight_of(self, batch: Any) -> Any:
        """The number of items that the loss of a batch averages over: supervised tokens, or samples."""
        names = self.front.label_names or ["labels"]
        labels = batch.get(names[0]) if isinstance(batch, Mapping) else None
        if not isinstance(labels, Tensor) or labels.ndim < 2 or labels.is_floating_point():
            return batch_length(batch)
        shifted = batch.get("shift_labels")
        if shifted is None:
            shifted = labels[..., 1:] if self._shifts else labels
        return shifted.ne(IGNORE_INDEX).sum()

    # -- evaluation ----------------------------------------------------------------------------------------

    @contextmanager
    def evaluating(self, scope: EvalScope) -> Iterator[None]:
        """Evaluate as `scope` says, and collect the outputs there."""
        before, self._scope = self._scope, scope
        try:
            yield
        finally:
            self._scope = before

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """The loss of a batch. Logits and labels go to the current scope, if it wants them."""
        front, scope = self.front, self._scope
        loss, logits, labels = front.prediction_step(
            self.model, _shallow_copy(batch), scope.loss_only, ignore_keys=scope.ignore_keys
        )
        size = 0 if is_padding() else batch_length(batch)
        scope.count(size)
        if not scope.loss_only:
            if logits is not None and front.preprocess_logits_for_metrics is not None:
                logits = front.preprocess_logits_for_metrics(logits, labels)
            wanted = front.args.include_for_metrics
            main = getattr(inner_model(self.model), "main_input_name", "input_ids")
            scope.add(
                logits=logits,
                labels=labels,
                inputs=batch.get(main) if "inputs" in wanted and isinstance(batch, Mapping) else None,
                losses=loss.detach().repeat(size) if "loss" in wanted and loss is not None else None,
            )
        if loss is None:
            return {}
        weight = self.weight_of(batch)
        return {"loss": (loss * weight, weight)}

    def predict_step(self, batch: Any) -> dict[str, Any]:
        """Logits and labels with one row per sample, for native callbacks that look at predictions."""
        _, logits, labels = self.front.prediction_step(self.model, _shallow_copy(batch), False)
        return _rows("logits", logits) | _rows("labels", labels)

    # -- state ---------------------------------------------------------------------------------------------

    def model_state_dict(self) -> dict[str, Tensor]:
        """The weights for checkpoints; of a peft model, those of the adapter."""
        return adapter_state_dict(self.model) if is_adapted(self.model) else self.model.state_dict()

    def load_model_state_dict(self, state: dict[str, Tensor]) -> None:
        if is_adapted(self.model):
            load_adapter_state_dict(self.model, state)
        else:
            self.model.load_state_dict(state)

    def save_assets(self, folder: Path) -> list[str]:
        """Write what `from_pretrained` needs besides the weights, and HF's trainer state and arguments."""
        names = self.front.save_checkpoint_assets(folder)
        return sorted({*names, *write_trainer_files(self.front, folder)})


def save_pretrained_assets(model: nn.Module, processing_class: Any, folder: Path) -> None:
    """Write configs, tokenizer, and the peft config of an adapter, next to the weights."""
    inner: Any = unwrap_model(model)
    if is_adapted(model):
        save_adapter_beside(model, folder / adapter_file(model))
    elif hasattr(getattr(inner, "config", None), "save_pretrained"):
        inner.config.architectures = [type(inner).__name__]  # as `model.save_pretrained` does
        inner.config.dtype = str(next(inner.parameters()).dtype).removeprefix("torch.")
        inner.config.save_pretrained(folder)
        if getattr(inner, "generation_config", None) is not None and inner.can_generate():
            inner.generation_config.save_pretrained(folder)
    if hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(folder)


def align_special_tokens(model: nn.Module, processing_class: Any) -> None:
    """Give the configs of a model the eos, bos and pad tokens of its tokenizer, where the tokenizer has them.

    A generation config may have several eos tokens: that of the tokenizer becomes the first.
    """
    tokenizer = getattr(processing_class, "tokenizer", processing_class)  # a processor has one
    config: Any = getattr(inner_model(model), "config", None)
    if not hasattr(tokenizer, "eos_token_id") or not hasattr(config, "get_text_config"):
        return
    generation = getattr(inner_model(model), "generation_config", None)
    for name in ("eos_token_id", "bos_token_id", "pad_token_id"):
        wanted = getattr(tokenizer, name, None)
        if wanted is None:
            continue
        for part in (config.get_text_config(), generation):
            have = None if part is None else getattr(part, name, None)
            known = have if isinstance(have, list) else [have]
            if part is None or known[0] == wanted:
                continue
            keeps = part is generation and name == "eos_token_id"
            others = [token for token in known if token not in (None, wanted)] if keeps else []
            setattr(part, name, [wanted, *others] if others else wanted)
            logger.info("%s of the model's %s was %s; now that of the tokenizer, %s", name, type(part).__name__, have,
                        wanted)  # fmt: skip


def default_loss(
    model: nn.Module,
    inputs: Any,
    labels_name: str,
    smoothing: float,
    function: Any,
    items: Any,
    passes_items: bool = True,
) -> tuple[Tensor, Any]:
    """Loss and outputs of a model: by the user's loss function, by the model itself, or cross-entropy of its logits."""
    if not isinstance(inputs, Mapping):
        labels = inputs[1] if isinstance(inputs, (list, tuple)) and len(inputs) > 1 else None
        outputs = model(inputs[0] if isinstance(inputs, (list, tuple)) else inputs)
        return _loss_of(outputs, labels, model, smoothing, function, items), outputs
    inputs = dict(inputs)
    labels = inputs.get(labels_name)
    smooth = smoothing and are_class_labels(labels_name, labels)
    withheld = function is not None or smooth or not takes(model, labels_name)
    if withheld:
        inputs.pop(labels_name, None)
    elif passes_items and items is not None and inputs.get("labels") is not None:
        inputs["num_items_in_batch"] = items
    if smooth:
        # Derive the decoder inputs from the labels, as encoder-decoders do if they receive labels.
        make = getattr(inner_model(model), "prepare_decoder_input_ids_from_labels", None)
        if make is not None and "decoder_input_ids" not in inputs and "decoder_inputs_embeds" not in inputs:
            inputs["decoder_input_ids"] = make(labels=labels)
    outputs = model(**inputs)
    own = function is None and not smooth
    if own and labels is not None and accepts(model, labels_name):
        return loss_from_outputs(outputs), outputs
    if own and has_loss(outputs):
        return loss_from_outputs(outputs), outputs
    return _loss_of(outputs, labels, model, smoothing if smooth else 0.0, function, items), outputs


def takes(model: nn.Module, name: str) -> bool:
    """Whether the forward of a model takes an argument, by name or in its ``**kwargs``."""
    parameters = parameters_of(inner_model(model).forward)
    return name in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def are_class_labels(name: str, labels: Any) -> bool:
    """Whether labels are classes: not regression targets, multi-label vectors or answer positions."""
    return name == "labels" and isinstance(labels, Tensor) and not labels.is_floating_point()


def _loss_of(outputs: Any, labels: Any, model: nn.Module, smoothing: float, function: Any, items: Any) -> Tensor:
    if function is not None:
        counts = accepts(function, "num_items_in_batch")
        return function(outputs, labels, num_items_in_batch=items) if counts else function(outputs, labels)
    if labels is None:
        names = f" (it returns {', '.join(map(str, outputs))})" if isinstance(outputs, Mapping) else ""
        raise BadArgument(
            f"Expected labels in the batch, or a model that returns its loss, received neither{names}. Add 'labels' to "
            "the examples, name them in label_names, or pass compute_loss_func."
        )
    logits = logits_from_outputs(outputs)
    if labels.is_floating_point():
        return F.mse_loss(logits.reshape(labels.shape), labels)
    if labels.ndim > 1 and shifts_labels(model):
        logits, labels = logits[..., :-1, :], labels[..., 1:]
    counts = labels.ndim > 1 and items is not None
    total = F.cross_entropy(
        logits.reshape(-1, logits.shape[-1]).float(),
        labels.reshape(-1),
        ignore_index=IGNORE_INDEX,
        reduction="sum" if counts else "mean",
        label_smoothing=smoothing,
    )
    return total / items if counts else total


def shifts_labels(model: nn.Module) -> bool:
    """Whether a model predicts the next token, so that its loss shifts the labels by one."""
    inner: Any = inner_model(model)
    if not hasattr(inner, "loss_type") or getattr(inner.config, "is_encoder_decoder", False):
        return False
    from transformers.loss.loss_utils import LOSS_MAPPING, ForCausalLMLoss
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    if inner.loss_type is None:  # not derivable from the class name, as for GPT2LMHeadModel
        return type(inner).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
    return LOSS_MAPPING.get(inner.loss_type) is ForCausalLMLoss


def accepts_num_items(model: nn.Module) -> bool:
    """Whether a model receives `num_items_in_batch`, the denominator of its loss, in its ``**kwargs``."""
    inner: Any = inner_model(model)
    declared = getattr(inner, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = parameters_of(inner.forward)
    return "num_items_in_batch" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def accepts(function: Any, name: str) -> bool:
    """Whether a function, or the forward of a model, has a parameter of a name."""
    return name in parameters_of(inner_model(function).forward if isinstance(function, nn.Module) else function)


_PARAMETERS: WeakKeyDictionary[Any, Mapping[str, inspect.Parameter]] = WeakKeyDictionary()


def parameters_of(function: Any) -> Mapping[str, inspect.Parameter]:
    """The parameters of a function. Needed in every step and costs 20 us to inspect, hence cached."""
    function = getattr(function, "__func__", function)
    try:
        if function not in _PARAMETERS:
            _PARAMETERS[function] = inspect.signature(function).parameters
        return _PARAMETERS[function]
    except (TypeError, ValueError):  # a builtin, or not weakly referenceable
        return {}


def _single_document(batch: Any) -> AbstractContextManager[None]:
    """A sequence without position ids is one document. To find out, transformers would sync in every step."""
    texts = isinstance(batch, Mapping) and "input_ids" in batch and "position_ids" not in batch
    return declare_packing(packed=False) if texts else nullcontext()


def _at_least_one(weight: Any) -> Any:
    return weight.clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1)


def _shallow_copy(batch: Any) -> Any:
    """A batch that users may pop entries from."""
    return dict(batch) if isinstance(batch, Mapping) else batch


def _rows(name: str, value: Any) -> dict[str, Tensor]:
    """Flatten nested outputs to named tensors."""
    if value is None:
        return {}
    if isinstance(value, Tensor):
        return {name: value.float() if value.dtype in (torch.bfloat16, torch.float16) else value}
    parts = value.items() if isinstance(value, Mapping) else enumerate(value)
    found: dict[str, Tensor] = {}
    for key, part in parts:
        found |= _rows(f"{name}.{key}", part)
    return found
