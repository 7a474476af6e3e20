"""Creating the optimizer and the scheduler of a `Trainer`, in the way of HF: same groups, names and options."""

from __future__ import annotations

import re
from typing import Any

import torch
from torch import nn

from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.hf.settings import parse_optim_args, scheduler_factory
from trainformer.run import RunSettings

# Parameters without weight decay: biases and norms, by their names.
_NO_DECAY = re.compile(r"bias|layernorm|rmsnorm|(?:^|[._])norm(?:$|\.)")


def decay_parameter_names(model: nn.Module) -> list[str]:
    """The parameters that weight decay applies to: all but biases and norms.

    >>> decay_parameter_names(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)))
    ['0.weight']
    """
    norms = {
        f"{prefix}.{name}" if prefix else name
        for prefix, module in model.named_modules()
        if isinstance(module, nn.LayerNorm)
        for name, _ in module.named_parameters(recurse=False)
    }
    return [name for name, _ in model.named_parameters() if name not in norms and not _NO_DECAY.search(name.lower())]


def optimizer_class(args: Any, model: nn.Module | None = None) -> tuple[Any, dict[str, Any]]:
    """The class and the options of the optimizer that the arguments name."""
    name = str(getattr(args.optim, "value", args.optim))
    options: dict[str, Any] = {"lr": args.learning_rate}
    if name in ("adamw_torch", "adamw_torch_fused"):
        options |= {"betas": (args.adam_beta1, args.adam_beta2), "eps": args.adam_epsilon, "fused": True}
        return torch.optim.AdamW, options | parse_optim_args(args)
    if name == "sgd":
        return torch.optim.SGD, options | parse_optim_args(args)
    # About forty more names, most of them of other packages.
    trainer = require("transformers", "hf", f"for the optimizer {name!r}").Trainer
    return trainer.get_optimizer_cls_and_kwargs(args, model)


class OptimizerMixin:
    """Methods of the HF Trainer that create and describe its optimizer and scheduler."""

    args: Any
    optimizer: Any
    lr_scheduler: Any
    optimizer_cls_and_kwargs: tuple[Any, dict[str, Any]] | None
    make_model: Any
    _overrides: Any
    _given_optimizer: Any
    _given_scheduler: Any

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Create the optimizer of the arguments, unless there is one. Override it to use your own."""
        if self.optimizer is None:
            model = self.make_model() if model is None else model
            self.optimizer = self._make_optimizer(model)
        return self.optimizer

    def _make_optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        kind, options = self.optimizer_cls_and_kwargs or self.get_optimizer_cls_and_kwargs(self.args, model)
        options = dict(options)
        if not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
            return kind()(model, **options)  # a factory, for optimizers that need the whole model
        decayed = set(self.get_decay_parameter_names(model))
        trainable = [(name, p) for name, p in model.named_parameters() if p.requires_grad]
        groups: Any = [
            {"params": [p for name, p in trainable if name in decayed], "weight_decay": self.args.weight_decay},
            {"params": [p for name, p in trainable if name not in decayed], "weight_decay": 0.0},
        ]
        for own in ("params", "model", "optimizer_dict"):  # of optimizers that choose the parameters themselves
            groups = options.pop(own, groups)
        made = kind(groups, **options)
        if options.get("optim_bits") == 8:
            _keep_embeddings_in_32_bits(model)
        return made

    @staticmethod
    def get_optimizer_cls_and_kwargs(args: Any, model: nn.Module | None = None) -> tuple[Any, dict[str, Any]]:
        """The class of the optimizer, and its options. Override it to use another."""
        return optimizer_class(args, model)

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """The parameters that weight decay applies to. Override it to choose others."""
        return decay_parameter_names(model)

    def create_scheduler(self, num_training_steps: int, optimizer: Any = None) -> Any:
        """Create the scheduler of the arguments, unless there is one. Override it to use your own."""
        if self.lr_scheduler is None:
            optimizer = self.optimizer if optimizer is None else optimizer
            self.lr_scheduler = scheduler_factory(self.args)(optimizer, num_training_steps)
        return self.lr_scheduler

    def create_optimizer_and_scheduler(self, num_training_steps: int) -> None:
        """Create both. Override it to use your own."""
        self.create_optimizer()
        self.create_scheduler(num_training_steps)

    def get_learning_rates(self) -> list[float]:
        """The learning rate of each parameter group."""
        return [group["lr"] for group in self._existing_optimizer().param_groups]

    def get_optimizer_group(self, param: nn.Parameter | None = None) -> Any:
        """The group of a parameter; without one, the parameters of each group."""
        groups = self._existing_optimizer().param_groups
        if param is None:
            return [group["params"] for group in groups]
        return next((group for group in groups if any(p is param for p in group["params"])), None)

    def _existing_optimizer(self) -> Any:
        if self.optimizer is None:
            do = "Call create_optimizer() or train() first."
            raise BadArgument(expected("an optimizer", "none yet", do))
        return self.optimizer

    def _set_optimizer(self, settings: RunSettings, total: int | None) -> None:
        """Let a run use what was passed or created before it, or what the methods above create."""
        given, scheduler = self._given_optimizer or self.optimizer, self._given_scheduler or self.lr_scheduler
        self.optimizer, self.lr_scheduler = given, scheduler
        if self._overrides("create_optimizer_and_scheduler"):
            self.create_optimizer_and_scheduler(total or -1)
            settings.optimizer, settings.scheduler = self.optimizer, self.lr_scheduler
            return
        # The model may be wrapped or sharded before its optimizer is created.
        settings.optimizer = given if given is not None else lambda groups: self.create_optimizer()
        if scheduler is not None:
            settings.scheduler = scheduler
        else:
            settings.scheduler = lambda optimizer, steps: self.create_scheduler(steps, optimizer) or self.lr_scheduler


def _keep_embeddings_in_32_bits(model: nn.Module) -> None:
    """8-bit states of bitsandbytes are unstable for embeddings, whose gradients are sparse."""
    optim = require("bitsandbytes.optim", "adapters", "for 8-bit optimizers")
    manager = optim.GlobalOptimManager.get_instance()
    for module in model.modules():
        if isinstance(module, nn.Embedding):
            manager.register_module_override(module, "weight", {"optim_bits": 32})
