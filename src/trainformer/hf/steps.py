"""The steps of a `Trainer` that users override: `training_step`, `compute_loss`, `prediction_step`."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from trainformer.core.optional import require
from trainformer.hf.accelerator import accelerator_arguments, make_accelerator
from trainformer.hf.collate import inner_model
from trainformer.hf.dataloaders import LoadingTrainer, labels_of_model
from trainformer.hf.outputs import labels_of, logits_of
from trainformer.hf.task import ModelTask, accepts_num_items, are_class_labels, default_loss, shifts_labels

if TYPE_CHECKING:
    from trainformer.hf.run import HfRun

logger = logging.getLogger("trainformer")


class SteppingTrainer(LoadingTrainer):
    """A trainer whose training and prediction steps can be overridden."""

    _run: HfRun | None
    _warned_of_smoothing = False
    _accelerator: Any = None
    _label_names: list[str] | None = None
    _accepts_loss_kwargs: bool | None = None
    #: Whether the model returns a loss without labels by default (`return_loss=True` in its signature).
    can_return_loss: bool
    #: HF's `LabelSmoother` for the arguments; None without label smoothing.
    label_smoother: Any
    preprocess_logits_for_metrics: Callable[[Any, Any], Any] | None
    #: The number of micro-batches of the current optimizer step.
    current_gradient_accumulation_steps: int = 1

    # -- what follows from the model -----------------------------------------------------------------------

    @property
    def label_names(self) -> list[str]:  # type: ignore[override]
        """The inputs that are labels: `label_names` of the arguments, or those in the signature of the model."""
        if self._label_names is None:
            given = self.args.label_names
            self._label_names = labels_of_model(self.make_model()) if given is None else list(given)
        return self._label_names

    @label_names.setter
    def label_names(self, names: list[str]) -> None:
        self._label_names = list(names)

    @property
    def model_accepts_loss_kwargs(self) -> bool:
        """Whether the model receives `num_items_in_batch`. Set it to False for one that accepts but ignores it."""
        if self._accepts_loss_kwargs is None:
            self._accepts_loss_kwargs = accepts_num_items(self.make_model())
        return self._accepts_loss_kwargs

    @model_accepts_loss_kwargs.setter
    def model_accepts_loss_kwargs(self, accepts: bool) -> None:
        self._accepts_loss_kwargs = bool(accepts)

    @property
    def _loss_shifts_labels(self) -> bool:
        return shifts_labels(self.make_model())

    def _inspect_model(self) -> None:
        """Set the attributes that follow from the model; subclasses may change them."""
        inner = inner_model(self.make_model())
        parameter = inspect.signature(inner.forward).parameters.get("return_loss")
        self.can_return_loss = parameter is not None and parameter.default is True
        self.label_smoother = None
        if self.args.label_smoothing_factor:
            module = require("transformers.trainer_pt_utils", "hf", "for label_smoothing_factor")
            self.label_smoother = module.LabelSmoother(epsilon=self.args.label_smoothing_factor)

    @property
    def model_wrapped(self) -> Any:
        """The model as the run calls it: wrapped by DDP, for instance. Without a wrapper, the model."""
        return self.make_model() if self._run is None else self._run.task.model

    def get_tp_size(self) -> int:
        """The number of ranks that share one replica of the model."""
        replicas = self._num_replicas()
        assert self._process_group is not None
        return self._process_group.world_size // replicas

    def get_cp_size(self) -> int:
        """1: there is no context parallelism."""
        return 1

    get_sp_size = get_cp_size

    def get_total_train_batch_size(self, args: Any) -> int:
        """Samples of an optimizer step on all ranks."""
        return args.train_batch_size * args.gradient_accumulation_steps * self._num_replicas()

    is_deepspeed_enabled = is_fsdp_enabled = is_model_parallel = False  # strategies of our own instead

    def floating_point_ops(self, inputs: Any) -> float:
        """Floating point operations of a step, estimated as 6 per input and parameter without embeddings.

        0 for models without `num_parameters`. Override it to count those.
        """
        model: Any = inner_model(self.make_model())
        main = inputs.get(getattr(model, "main_input_name", "input_ids"))
        if main is None or not hasattr(model, "num_parameters"):
            return 0
        return 6 * main.numel() * model.num_parameters(exclude_embeddings=True)

    # -- accelerator ---------------------------------------------------------------------------------------

    @property
    def accelerator(self) -> Any:
        """An `Accelerator` of accelerate, for `backward`, `gather`, `unwrap_model` and the like.

        It prepares nothing: the run places data and model. `backward` runs the backward pass of the current step.
        """
        if self._accelerator is None:
            self.create_accelerator_and_postprocess()
        return self._accelerator

    def create_accelerator_and_postprocess(self) -> None:
        """Create the `accelerator`, on first use."""
        if self._process_group is None:
            self._join_strategy()
        self._accelerator = make_accelerator(self, self._build_accelerator_args())

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """The arguments of the `Accelerator`."""
        return {**accelerator_arguments(self.args), **kwargs}

    # -- inputs --------------------------------------------------------------------------------------------

    def _prepare_input(self, data: Any) -> Any:
        """A nested input with its tensors on the device of the model."""
        if isinstance(data, Tensor):
            return data if self._run is None else data.to(self._run.backend.device, non_blocking=True)
        if isinstance(data, Mapping):
            return type(data)({name: self._prepare_input(part) for name, part in data.items()})  # type: ignore[call-arg]
        if isinstance(data, (tuple, list)):
            return type(data)(self._prepare_input(part) for part in data)
        return data

    def _prepare_inputs(self, inputs: Any) -> Any:
        """The inputs of a step, on the device of the model. Override it to change them."""
        return self._prepare_input(inputs)

    def compute_loss_context_manager(self) -> AbstractContextManager[Any]:
        """The context of a forward pass: that of `autocast_smart_context_manager`."""
        stack = ExitStack()
        stack.enter_context(self.autocast_smart_context_manager())
        return stack

    def autocast_smart_context_manager(self, cache_enabled: bool | None = True) -> AbstractContextManager[Any]:
        """The context of the precision of the run, also outside of a step."""
        return nullcontext() if self._run is None else self._run.backend.precision.forward()

    # -- training ------------------------------------------------------------------------------------------

    def training_step(self, model: nn.Module, inputs: Any, num_items_in_batch: Any = None) -> Tensor:
        """Forward and backward pass of a micro-batch; returns its share of the loss of the step.

        `num_items_in_batch` counts the items of all micro-batches of the step. Override it to change the inputs, the
        loss, or what surrounds the backward pass (single process; otherwise override `compute_loss`).
        """
        model.train()
        inputs, share = self._prepare_inputs(inputs), 1.0
        if self._run is not None and self._run.window_weight is not None:
            # The loss is a mean over this micro-batch; together, the shares of a step are 1.
            num_items_in_batch = self._run.task.items_of(inputs)
            share = self._run.task.weight_of(inputs) / self._run.window_weight
        with self.compute_loss_context_manager():
            loss = self.compute_loss(model, inputs, num_items_in_batch=num_items_in_batch) * share
        self.accelerator.backward(loss)
        return loss.detach()

    def _get_num_items_in_batch(self, batch_samples: list[Any], device: Any = None) -> Any:
        """The supervised items of several batches; None if neither model nor `compute_loss_func` uses them."""
        counts = self.model_accepts_loss_kwargs or self.compute_loss_func is not None
        if not batch_samples or "labels" not in batch_samples[0] or not counts:
            return None
        task = self._task_for(self.make_model())
        return sum(torch.as_tensor(task.items_of(batch), device=device) for batch in batch_samples)

    def compute_loss(
        self, model: nn.Module, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """The loss of a batch: its sum over `num_items_in_batch`, or its mean. Override it to use your own."""
        name, smoothing = (self.label_names or ["labels"])[0], self.args.label_smoothing_factor
        if smoothing and isinstance(inputs, Mapping) and not are_class_labels(name, inputs.get(name)):
            if not self._warned_of_smoothing:
                logger.warning("label_smoothing_factor has no effect: %s are not classes", name)
            self._warned_of_smoothing = True
        passes_items = self.model_accepts_loss_kwargs
        loss, outputs = default_loss(
            model, inputs, name, smoothing, self.compute_loss_func, num_items_in_batch, passes_items
        )
        return (loss, outputs) if return_outputs else loss

    # -- prediction ----------------------------------------------------------------------------------------

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None
    ) -> tuple[Any, Any, Any]:
        """Loss, logits and labels of a batch; the loss is None without labels. Override it to use your own."""
        inputs = self._prepare_inputs(inputs)
        labels = self._labels_in(inputs)
        with torch.no_grad():
            if labels or self._returns_loss(inputs):
                items = self._task_for(model).items_of(inputs)
                with self.compute_loss_context_manager():
                    loss, outputs = self.compute_loss(model, inputs, return_outputs=True, num_items_in_batch=items)
                loss = loss.detach().mean()
            else:
                loss = None
                with self.compute_loss_context_manager():
                    outputs = model(**inputs) if isinstance(inputs, Mapping) else model(_first(inputs))
        if prediction_loss_only:
            return loss, None, None
        return loss, logits_of(outputs, model, ignore_keys, with_loss=loss is not None), labels_of(labels)

    def _labels_in(self, inputs: Any) -> list[Any]:
        """The labels of a batch; empty unless all are there."""
        if not isinstance(inputs, Mapping):
            return [inputs[1]] if isinstance(inputs, (list, tuple)) and len(inputs) > 1 else []
        labels = [inputs.get(name) for name in self.label_names or ["labels"]]
        return labels if all(label is not None for label in labels) else []

    def _returns_loss(self, inputs: Any) -> bool:
        """Whether a model without label parameters returns a loss for this batch."""
        if self.label_names or not isinstance(inputs, Mapping):
            return False
        wanted = inputs.get("return_loss")
        return self.can_return_loss if wanted is None else bool(wanted)

    def _task_for(self, model: nn.Module) -> ModelTask:
        """The task of the current run; without one, a task for a model."""
        return self._run.task if self._run is not None else ModelTask(self, model)  # type: ignore[arg-type]


def _first(inputs: Any) -> Any:
    return inputs[0] if isinstance(inputs, (list, tuple)) else inputs
