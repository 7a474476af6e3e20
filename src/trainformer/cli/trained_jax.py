"""What the commands do with the model of a run on JAX. Imports no torch.

The trainer is built from the record in the checkpoint, without the training data; from the recipe of the run, if it is
to evaluate on the validation data of the run, or if the record does not suffice.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainformer.checkpointing import Checkpoint
from trainformer.cli.output import check_free, variables_of
from trainformer.cli.recipes import FILE as RECIPE
from trainformer.cli.recipes import trainer_of
from trainformer.cli.trained import JAX_FORMATS, Trained
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.text.generation import load_prompts
from trainformer.inference.jax_models import evaluate, generates, make_predictor
from trainformer.inference.opening import refuse_torch_options
from trainformer.jax.recorded import open_trainer
from trainformer.jax.saving import export_trainer
from trainformer.run import run_of

_OPTIONS = ("base", "device", "dtype", "quantize")


class JaxTrained(Trained):
    """A trainer on JAX with the weights of a checkpoint."""

    on_jax = True

    @property
    def predictor(self) -> Any:
        return make_predictor(self.trainer, Path(self.run), self.checkpoint)

    @property
    def trained_task(self) -> str:
        return type(self.trainer).__name__

    @property
    def description(self) -> str:
        model = self.predictor
        return f"{self.trained_task} on {model.device}, {model.dtype}"

    @property
    def generates(self) -> bool:
        return generates(self.trainer)

    @property
    def predicts_records(self) -> bool:
        return self.generates

    def evaluate(self, data: Any = None) -> dict[str, float]:
        if self.trainer.val_dataloader is None:
            raise DataError(f"{self.run} was trained without evaluation data. Name some: --data DATA.")
        return evaluate(self.trainer)

    def export(self, out: Path, args: argparse.Namespace) -> tuple[str, str]:
        form = args.format or ("safetensors" if out.suffix == ".safetensors" else "huggingface")
        given = {"format": args.format, "input_shape": args.input_shape, "preprocess": args.preprocess or None}
        if form not in JAX_FORMATS or out.suffix in (".onnx", ".pt", ".pt2"):
            do = "transformers exports the folder that huggingface writes, if it has a torch model of this kind."
            received = form if form not in JAX_FORMATS else out.name
            raise BadArgument(expected(f"{' or '.join(JAX_FORMATS)} as the format of a run on JAX", received, do))
        for name in ("input_shape", "preprocess"):
            if given[name] is not None:
                raise BadArgument(expected(f"no --{name.replace('_', '-')} for a run on JAX", given[name]))
        if form == "safetensors":
            out = out if out.suffix == ".safetensors" else out.with_name(f"{out.name}.safetensors")
            check_free(out, args.force)
        return export_trainer(self.trainer, out), form

    def predicted_columns(self, data: Any, **options: Any) -> Any:
        return self.trainer.predicted_columns(data, **options)

    def consume_on_main(self, batches: Any, write: Callable[[Any], int]) -> Any:
        return write(batches)

    def load_prompts(self, file: str) -> Any:
        return load_prompts(file)


def load_jax(args: argparse.Namespace, run: Path, checkpoint: Checkpoint, validates: bool, data: Any) -> JaxTrained:
    """The trainer of a run on JAX that `args` name, with the weights of the checkpoint; see `load_trained`."""
    refuse_torch_options({name: getattr(args, name, None) for name in _OPTIONS})
    rows, has_recipe = getattr(args, "batch_size", None), (run / RECIPE).is_file()
    if validates and not has_recipe:
        what = "it was started by a Python program, which chose the evaluation data"
        raise DataError(f"{run} has no {RECIPE}: {what}. Name some: --data DATA.")
    if not validates:
        try:
            return JaxTrained(open_trainer(checkpoint, data, rows), run, checkpoint)
        except (BadArgument, DataError):
            if not has_recipe:
                raise
    changes: dict[str, Any] = {"log": "none", "resume": None}
    changes |= {} if rows is None else {"eval_batch_size": rows}
    changes |= {} if data is None else {"dataset_eval": data}
    trainer = trainer_of(str(run), trust=args.trust, changes=changes, variables=variables_of(args))
    run_of(trainer).load(checkpoint.path)
    return JaxTrained(trainer, run, checkpoint)
