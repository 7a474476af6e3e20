"""The model of a `Trainer` as a task: training and evaluation steps, and the default loss.

A loss is a mean over the supervised items of a micro-batch: labels other than -100 if there is one label per token,
otherwise samples. It is weighted by their number, so gradient accumulation and batch size do not change the result.
"""

from __future__ import annotations

import inspect
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from trainformer.adapters.base import is_adapted, unwrap_model
from trainformer.adapters.state import adapter_state_dict, load_adapter_state_dict, save_adapter_beside
from trainformer.core.errors import BadArgument
from trainformer.core.types import Mean
from trainformer.data.sharding import batch_length
from trainformer.hf.checkpoints import write_trainer_files
from trainformer.hf.collate import Collator, accepted_names, inner_model
from trainformer.hf.outputs import EvalPrediction, arrays, logits_from_outputs, loss_from_outputs
from trainformer.models.language import declare_packing
from trainformer.tasks.base import TaskBase

if TYPE_CHECKING:
    from trainformer.hf.evaluation import EvaluatingTrainer

IGNORE_INDEX = -100


class ModelTask(TaskBase):
    """The task that trains the model of a trainer."""

    def __init__(self, front: EvaluatingTrainer, model: nn.Module, label_names: Sequence[str]) -> None:
        self.front = front
        self.model = model
        self.title = type(inner_model(model)).__name__
        self.label_names = list(label_names)
        self.collects_rows = False
        self.rows: dict[str, Tensor] = {}
        self._accepted = accepted_names(model, label_names) if front.args.remove_unused_columns else None
        self._shifts = shifts_labels(model)
        self._began = 0.0
        self._ignored_keys: list[str] = []
        self._evaluated = (0, 0)  # batches and samples of the current evaluation

    # -- data ----------------------------------------------------------------------------------------------

    @property
    def collate_fn(self) -> Collator:
        collator = self.front.data_collator
        assert collator is not None  # every trainer with data has one
        return Collator(collator, self._accepted)

    # -- steps ---------------------------------------------------------------------------------------------

    def train_step(self, batch: Any) -> Mean:
        weight = self.weight_of(batch)
        items = weight.clamp(min=1) if isinstance(weight, Tensor) else max(weight, 1)
        with _single_document(batch):
            loss = self.front.compute_loss(self.model, _shallow_copy(batch), num_items_in_batch=items)
        return Mean(loss, weight)

    def eval_step(self, batch: Any) -> dict[str, Any]:
        """The loss; and logits and labels as rows, if metrics or predictions need them."""
        size = batch_length(batch)
        if self._evaluated[0] == 0:
            self._began = time.perf_counter()
        self._evaluated = self._evaluated[0] + 1, self._evaluated[1] + size
        ignored = self._ignored_keys or None
        loss, logits, labels = self.front.prediction_step(
            self.model, _shallow_copy(batch), not self.collects_rows, ignore_keys=ignored
        )
        metrics: dict[str, Any] = {}
        if loss is not None:
            weight = self.weight_of(batch)
            metrics["loss"] = loss * weight, weight
        if self.collects_rows:
            metrics |= _rows("logits", logits) | _rows("labels", labels)
            wanted = self.front.args.include_for_metrics
            if "inputs" in wanted and isinstance(batch, Mapping):
                metrics |= _rows("inputs", batch.get(getattr(inner_model(self.model), "main_input_name", "input_ids")))
            if "loss" in wanted and loss is not None:
                metrics |= _rows("losses", loss.detach().repeat(size))
        return metrics

    def weight_of(self, batch: Any) -> Any:
        """The number of items that the loss of a batch averages over: supervised tokens, or samples."""
        labels = batch.get(self.label_names[0]) if isinstance(batch, Mapping) and self.label_names else None
        if not isinstance(labels, Tensor) or labels.ndim < 2 or labels.is_floating_point():
            return batch_length(batch)
        shifted = batch.get("shift_labels")
        if shifted is None:
            shifted = labels[..., 1:] if self._shifts else labels
        return shifted.ne(IGNORE_INDEX).sum()

    # -- evaluation ----------------------------------------------------------------------------------------

    @contextmanager
    def collecting(self) -> Iterator[dict[str, Tensor]]:
        """Collect the logits and labels of an evaluation in this block."""
        before, self.collects_rows = self.collects_rows, True
        self.rows = {}
        try:
            yield self.rows
        finally:
            self.collects_rows = before
            self.rows = {}

    @contextmanager
    def ignoring(self, keys: Iterable[str]) -> Iterator[None]:
        """Do not collect these outputs in evaluations in this block."""
        before, self._ignored_keys = self._ignored_keys, list(keys)
        try:
            yield
        finally:
            self._ignored_keys = before

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """What `compute_metrics` returns for the rows of an evaluation."""
        self.rows.clear()
        self.rows.update(rows)
        logits, labels, inputs, losses = (arrays(rows, name) for name in ("logits", "labels", "inputs", "losses"))
        if self.front.compute_metrics is None or logits is None or labels is None:
            return {}
        metrics = self.front.compute_metrics(EvalPrediction(logits, labels, inputs, losses))
        return {name.removeprefix("eval_"): value for name, value in metrics.items()}

    def derive_metrics(self, metrics: Mapping[str, float]) -> dict[str, float]:
        """Duration and throughput."""
        seconds = max(time.perf_counter() - self._began, 1e-9)
        batches, samples = self._evaluated
        self._evaluated = 0, 0
        assert self.front._run is not None
        ranks = self.front._run.process_group
        # Of all ranks; those that shard one model compute the same samples.
        total = ranks.all_reduce_sum([float(samples)])[0] * ranks.dp_world_size / ranks.world_size
        return {
            "runtime": seconds,
            "samples_per_second": total / seconds,
            "steps_per_second": batches / seconds,
        }

    def join_rows(self, pieces: list[Tensor]) -> Tensor:
        """Concatenate batches that were padded to different lengths, padding with -100."""
        ndims = {piece.ndim for piece in pieces}
        if len({piece.shape[1:] for piece in pieces}) == 1 or len(ndims) > 1:
            return torch.cat(pieces)
        longest = [max(sizes) for sizes in zip(*(piece.shape[1:] for piece in pieces), strict=True)]
        padded = []
        for piece in pieces:
            missing = [most - have for most, have in zip(longest, piece.shape[1:], strict=True)]
            margins = [margin for extra in reversed(missing) for margin in (0, extra)]
            padded.append(F.pad(piece, margins, value=IGNORE_INDEX))
        return torch.cat(padded)

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
    weights = folder / "model.safetensors"
    inner: Any = unwrap_model(model)
    if is_adapted(model):
        save_adapter_beside(model, weights)
    elif hasattr(getattr(inner, "config", None), "save_pretrained"):
        inner.config.save_pretrained(folder)
        if getattr(inner, "generation_config", None) is not None and inner.can_generate():
            inner.generation_config.save_pretrained(folder)
    if hasattr(processing_class, "save_pretrained"):
        processing_class.save_pretrained(folder)


def default_loss(
    model: nn.Module, inputs: Any, labels_name: str, smoothing: float, function: Any, items: Any
) -> tuple[Tensor, Any]:
    """Loss and outputs of a model: by the user's loss function, by the model itself, or cross-entropy of its logits."""
    if not isinstance(inputs, Mapping):
        labels = inputs[1] if isinstance(inputs, (list, tuple)) and len(inputs) > 1 else None
        outputs = model(inputs[0] if isinstance(inputs, (list, tuple)) else inputs)
        return _loss_of(outputs, labels, model, smoothing, function, items), outputs
    inputs = dict(inputs)
    smooth = smoothing and are_class_labels(labels_name, inputs.get(labels_name))
    own = function is None and not smooth and accepts(model, labels_name)
    if own and inputs.get(labels_name) is not None:
        if _accepts_num_items(model):
            inputs["num_items_in_batch"] = items
        outputs = model(**inputs)
        return loss_from_outputs(outputs), outputs
    labels = inputs.pop(labels_name, None)
    if smooth and labels is not None:
        # Derive the decoder inputs from the labels, as encoder-decoders do if they receive labels.
        make = getattr(inner_model(model), "prepare_decoder_input_ids_from_labels", None)
        if make is not None and "decoder_input_ids" not in inputs and "decoder_inputs_embeds" not in inputs:
            inputs["decoder_input_ids"] = make(labels=labels)
    outputs = model(**inputs)
    return _loss_of(outputs, labels, model, smoothing if smooth else 0.0, function, items), outputs


def are_class_labels(name: str, labels: Any) -> bool:
    """Whether labels are classes: not regression targets, multi-label vectors or answer positions."""
    return name == "labels" and isinstance(labels, Tensor) and not labels.is_floating_point()


def _loss_of(outputs: Any, labels: Any, model: nn.Module, smoothing: float, function: Any, items: Any) -> Tensor:
    if function is not None:
        counts = accepts(function, "num_items_in_batch")
        return function(outputs, labels, num_items_in_batch=items) if counts else function(outputs, labels)
    if labels is None:
        raise BadArgument(
            "Expected labels in the batch, or a model that returns its loss, received neither. Add 'labels' to the "
            "examples, name them in label_names, or pass compute_loss_func."
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


def _accepts_num_items(model: nn.Module) -> bool:
    """Whether the forward of a model accepts `num_items_in_batch`, the denominator of its loss."""
    inner: Any = inner_model(model)
    declared = getattr(inner, "accepts_loss_kwargs", None)
    if declared is not None:
        return bool(declared)
    parameters = parameters_of(inner.forward).values()
    return hasattr(inner, "loss_function") and any(p.kind is p.VAR_KEYWORD for p in parameters)


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
