"""`trainer.accelerator`: an `Accelerator` whose backward pass is that of the run."""

from __future__ import annotations

from typing import Any

from torch import nn

from trainformer.core.optional import require

_CONFIG = ("split_batches", "dispatch_batches", "even_batches", "use_seedable_sampler", "non_blocking")


def accelerator_arguments(args: Any) -> dict[str, Any]:
    """The arguments of an `Accelerator`, as HF derives them from training arguments."""
    accelerate = require("accelerate", "accelerate", "for trainer.accelerator")
    names = ("find_unused_parameters", "bucket_cap_mb", "broadcast_buffers", "static_graph")
    ddp = {name: value for name in names if (value := getattr(args, f"ddp_{name}", None)) is not None}
    arguments: dict[str, Any] = {
        "cpu": bool(args.use_cpu) or str(getattr(args, "device", "")) == "cpu",
        "kwargs_handlers": [accelerate.DistributedDataParallelKwargs(**ddp)],
    }
    config: Any = getattr(args, "accelerator_config", None)
    values = config.to_dict() if hasattr(config, "to_dict") else dict(config or {})
    if "dispatch_batches" not in values and getattr(args, "dispatch_batches", False):
        values["dispatch_batches"] = True
    given = {name: values[name] for name in _CONFIG if values.get(name) is not None}
    loading = {"even_batches": True, "use_seedable_sampler": True, **given}
    arguments["dataloader_config"] = accelerate.DataLoaderConfiguration(**loading)
    plugin = dict(values.get("gradient_accumulation_kwargs") or {})
    arguments["gradient_accumulation_plugin"] = accelerate.utils.GradientAccumulationPlugin(
        **{"num_steps": 1, **plugin}
    )
    return arguments


def make_accelerator(trainer: Any, arguments: dict[str, Any]) -> Any:
    """An `Accelerator` for a trainer. Models, loaders and optimizers stay with the run, so `prepare` returns them."""
    accelerate = require("accelerate", "accelerate", "for trainer.accelerator")

    class RunAccelerator(accelerate.Accelerator):  # type: ignore[misc, name-defined]
        """An `Accelerator` that leaves placement and precision to the run."""

        def backward(self, loss: Any, **kwargs: Any) -> None:
            """The backward pass of a loss, in the current step of the run."""
            run = trainer._run
            if run is None:
                loss.backward(**kwargs)
            else:
                run.backend.strategy.backward(loss, run.backend.precision.scaler)

        def prepare(self, *parts: Any, **kwargs: Any) -> Any:
            """The arguments; models are moved to the device."""
            placed = tuple(self.prepare_model(part) if isinstance(part, nn.Module) else part for part in parts)
            return placed[0] if len(placed) == 1 else placed

        def prepare_model(self, model: Any, *args: Any, **kwargs: Any) -> Any:
            """The model on the device, in eval mode if asked for."""
            return (model.eval() if kwargs.get("evaluation_mode") else model).to(self.device)

        def autocast(self, *args: Any, **kwargs: Any) -> Any:
            """The precision of the run."""
            return trainer.autocast_smart_context_manager()

    return RunAccelerator(**arguments)
