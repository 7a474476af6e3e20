"""`trainformer evaluate`, `export` and `finalize`: use the model of a trained run.

Owns which checkpoint is meant and what of it is loaded. The task is built from the record in the checkpoint, or from
the recipe of the run. Nothing is written to the folder of the run.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from trainformer.cli.app import Command
from trainformer.cli.consent import add_trust_argument
from trainformer.cli.named_data import named_data
from trainformer.cli.output import (
    SECRET,
    add_variable_argument,
    check_free,
    lines_of,
    positive,
    print_result,
    stdout_to_stderr,
    variables_of,
)
from trainformer.cli.recipes import FILE as RECIPE
from trainformer.cli.recipes import settings_in, trainer_of
from trainformer.core.errors import BadArgument, DataError, expected

if TYPE_CHECKING:
    from trainformer import Trainer
    from trainformer.checkpointing import Checkpoint

# Written out here so that --help imports no torch; tests compare both with the real ones.
EXPORT_FORMATS = {"pytorch": ".pt", "onnx": ".onnx", "torchscript": ".pt", "torch.export": ".pt2"}
JAX_FORMATS = ("huggingface", "safetensors")
GGUF_TYPES = ("f32", "f16", "bf16", "q8_0")
QUANTIZATION_RECIPES = (
    "int8-dynamic-act-int4-weight",
    "int8-dynamic-act-int8-weight",
    "intx-int4-weight-only",
    "int8-weight-only",
    "int4-weight-only",
    "float8-dynamic-act-float8-weight",
    "float8-dynamic-act-int4-weight",
)


@dataclass(frozen=True)
class Trained:
    """A trainer with the weights of a checkpoint, and what the commands do with it; `trained_jax` has that of JAX."""

    trainer: Any
    run: Path | str  # or a folder that `finalize` made; a string is the name of a model of the hub
    checkpoint: Checkpoint | None
    on_jax: ClassVar[bool] = False

    @property
    def weights(self) -> Path | str:
        """The folder with the weights, or their name on the hub."""
        return self.run if self.checkpoint is None else self.checkpoint.path

    @property
    def predictor(self) -> Any:
        """The same for raw inputs."""
        from trainformer.inference.loading import make_predictor

        return make_predictor(self.trainer, self.run)

    @property
    def is_main(self) -> bool:
        """Whether this process prints and writes."""
        return bool(self.trainer.is_main)

    @property
    def trained_task(self) -> str:
        """What was trained, by the name of its class."""
        return type(self.trainer.task).__name__

    @property
    def description(self) -> str:
        """What was trained, and where it runs."""
        first = next(self.predictor.model.parameters())
        return f"{self.trained_task} on {first.device}, {str(first.dtype)[6:]}"

    @property
    def generates(self) -> bool:
        """Whether it is a causal language model."""
        return hasattr(self.trainer.task, "generate_texts")

    @property
    def predicts_records(self) -> bool:
        """Whether predictions are generated texts."""
        return hasattr(self.trainer.task, "predict_records")

    def evaluate(self, data: Any = None) -> dict[str, float]:
        """Metrics on the validation data of the run, or on other data."""
        if data is None and self.trainer.val_dataloader is None:
            raise DataError(f"{self.run} was trained without validation data. Name some: --data DATA.")
        metrics: dict[str, float] = self.trainer.evaluate(data)
        return metrics

    def export(self, out: Path, args: argparse.Namespace) -> tuple[str, str]:
        """Write the model; its path and its format."""
        form = args.format or format_of(out)
        if form in JAX_FORMATS:
            known = ", ".join(EXPORT_FORMATS)
            do = f"A run on torch is exported as {known}; `trainformer finalize` writes a folder for transformers."
            raise BadArgument(expected("a run on JAX to export in this format", str(self.run), do))
        suffix = EXPORT_FORMATS[form]
        out = out if out.suffix == suffix else out.with_name(out.name + suffix)
        check_free(out, args.force)
        return self.trainer.export(out, form, args.input_shape, preprocess=args.preprocess), form

    def predicted_columns(self, data: Any, **options: Any) -> Any:
        """Predictions as columns, a batch at a time."""
        from trainformer.run import run_of

        return run_of(self.trainer).predicted_columns(data, **options)

    def consume_on_main(self, batches: Any, write: Callable[[Any], int]) -> Any:
        """Write predictions in one process; the others compute their part."""
        from trainformer.run import run_of

        return run_of(self.trainer).consume_on_main(batches, write)

    def load_prompts(self, file: str) -> Any:
        """The records of a file of prompts."""
        return self.trainer.task.load_prompts(file)

    @property
    def source(self) -> dict[str, Any]:
        """Where the weights come from, for JSON output."""
        step = None if self.checkpoint is None else self.checkpoint.step
        return {"run": str(self.run), "checkpoint": str(self.weights), "step": step}


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Options that choose the model."""
    run = "the folder of a run or of one of its checkpoints, its name under runs/, or a finalized folder"
    parser.add_argument("run", metavar="RUN", help=run)
    which = "which checkpoint of a run (default: last)"
    parser.add_argument("--which", choices=("last", "best"), default="last", help=which)
    add_trust_argument(parser)
    add_variable_argument(parser, SECRET)


def add_batch_size_argument(parser: argparse.ArgumentParser) -> None:
    """The batch size of evaluation; it changes no result."""
    parser.add_argument("--batch-size", type=positive, metavar="N", help="samples per batch (default: as in the run)")


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """Options for the model of a run or of any other folder, where it is used as a language model."""
    model = "a run (its folder, or its name under runs/), a checkpoint, a folder with a model or an adapter"
    parser.add_argument("run", metavar="RUN", help=f"{model}, or OWNER/NAME (hf:NAME) of the hub")
    chosen = parser.add_mutually_exclusive_group()
    chosen.add_argument("--which", choices=("last", "best"), default="last", help="which checkpoint (default: last)")
    chosen.add_argument("--checkpoint", type=positive, metavar="STEP", help="the checkpoint of this step")
    parser.add_argument("--base", metavar="MODEL", help="the base model of an adapter: a hub name or a folder")
    parser.add_argument("--device", help="cpu, cuda, cuda:1, mps; by default the best available")
    parser.add_argument(
        "--dtype", choices=("fp32", "bf16", "fp16"), help="of the weights (default: as in the run, fp32)"
    )
    recipes = f"quantize in memory: {', '.join(QUANTIZATION_RECIPES)}"
    parser.add_argument("--quantize", metavar="RECIPE", choices=QUANTIZATION_RECIPES, help=recipes)
    add_trust_argument(parser)
    add_variable_argument(parser, SECRET)


def load_text_model(args: argparse.Namespace) -> Trained:
    """`load_trained` for commands that need a causal language model."""
    try:
        trained = load_trained(args)
    except BadArgument as error:
        if "/" not in args.run and not os.path.exists(args.run):
            error.add_note(f"A model of the hub is hf:{args.run}.")
        raise
    if not trained.generates:
        do = "Use `trainformer predict`."
        raise BadArgument(expected("a causal language model", trained.trained_task, do))
    return trained


def load_trained(args: argparse.Namespace, validates: bool = False, data: Any = None) -> Trained:
    """The trainer that `args` name, with the weights of the checkpoint and everything else that affects its results.

    The training data are not needed, as far as the checkpoint has a record of them. With `validates`, the validation
    data of the run are. `data` are others to evaluate on, which a run on JAX has to know now.
    """
    from trainformer.inference.opening import is_jax_run

    if is_jax_run(_place_of(args.run)):
        from trainformer.cli.trained_jax import load_jax

        run, checkpoint = find_checkpoint(args.run, args.which, getattr(args, "checkpoint", None))
        return load_jax(args, run, checkpoint, validates, data)
    from trainformer.distributed.process_group import Launch
    from trainformer.inference.loading import open_folder
    from trainformer.inference.sources import is_adapter_folder, is_finalized
    from trainformer.run.torch.record import TaskRecord

    # A logger would open a run of its own, and there is nothing to resume.
    changes: dict[str, Any] = {"log": "none", "resume": None}
    if getattr(args, "batch_size", None) is not None:
        changes["eval_batch_size"] = args.batch_size
    if getattr(args, "device", None) is not None:
        changes["device"] = args.device
    chosen: dict[str, Any] = {name: getattr(args, name, None) for name in ("base", "dtype", "quantize")}
    settings = {**changes, "strategy": "auto"}
    named = _find_model(args.run)
    if isinstance(named, str) or is_finalized(named) or is_adapter_folder(named):
        if validates:
            raise DataError(f"{args.run} is no run and has no validation data. Name some: --data DATA.")
        if args.which != "last" or getattr(args, "checkpoint", None) is not None:
            do = "Leave --which and --checkpoint out."
            raise BadArgument(expected("a run, to choose a checkpoint of", f"{args.run}, which is one model", do))
        return Trained(open_folder(named, settings=settings, **chosen).trainer, named, None)
    run, checkpoint = find_checkpoint(args.run, args.which, getattr(args, "checkpoint", None))
    has_recipe = (run / RECIPE).is_file()
    if not validates and not (has_recipe and Launch.find().world_size > 1):  # a recipe knows how it is distributed
        try:
            return Trained(open_folder(checkpoint.path, settings=settings, **chosen).trainer, run, checkpoint)
        except (BadArgument, DataError):
            if not has_recipe or any(chosen.values()):
                raise
    elif not has_recipe:
        what = "it was started by a Python program, which chose the validation data"
        raise DataError(f"{run} has no {RECIPE}: {what}. Name some: --data DATA.")
    trainer = _rebuilt(args, run, TaskRecord.read(checkpoint.path), validates, changes)
    # An average of the weights (EMA) belongs to a callback; parameters of the loss and class names to the task.
    parts = [key for key in checkpoint.manifest.components if key in ("model", "task") or key.startswith("callback.")]
    trainer.load(checkpoint.path, parts)
    return Trained(trainer, run, checkpoint)


def _rebuilt(args: argparse.Namespace, run: Path, record: Any, validates: bool, changes: dict[str, Any]) -> Trainer:
    """The trainer of a run's recipe: without the training data, if there is a record of them and that suffices."""
    from trainformer.run.torch.record import NeedsTrainingData, RecordedData

    variables = variables_of(args)
    recorded: dict[str, Any] = {}
    if record is not None:
        recorded = {"data": RecordedData(record), "val_split": None, "sampler": None, "scheduler": None}
        if not validates:
            recorded["val_data"] = None
        elif settings_in(run, args.trust, variables).get("val_data") is None:
            recorded = {}  # they are a part of the training data
    try:
        try:
            return trainer_of(str(run), trust=args.trust, changes=changes | recorded, variables=variables)
        except NeedsTrainingData:
            return trainer_of(str(run), trust=args.trust, changes=changes, variables=variables)
    except DataError as error:  # on another machine, perhaps
        do = "Name other data: --data DATA." if validates else "The data of the run are needed too."
        raise DataError(f"{error} {do}") from error


def _place_of(name: str) -> Path:
    """The path of a run: a folder, or a name under ``runs/``."""
    from trainformer.live.runs import RUNS

    return RUNS / name if (RUNS / name).exists() else Path(name)


def _find_model(name: str) -> Path | str:
    """The path or name of a run or model; a string is the name of a model of the hub."""
    from trainformer.inference.sources import hub_name
    from trainformer.live.runs import RUNS

    found = None if (RUNS / name).exists() else hub_name(name)
    return Path(name) if found is None else found


def find_checkpoint(name: str, which: str, step: int | None = None) -> tuple[Path, Checkpoint]:
    """The folder of the run, and the checkpoint: of a step, or the last or best."""
    from trainformer.checkpointing import Checkpoint
    from trainformer.checkpointing.retention import Retention
    from trainformer.checkpointing.tools.listing import find, is_checkpoint, list_checkpoints
    from trainformer.live.runs import find_run, is_run

    if is_checkpoint(Path(name)):
        run = next((folder for folder in Path(name).absolute().parents[:3] if is_run(folder)), None)
        found = find(name)
        assert isinstance(found, Checkpoint)
        if step not in (None, found.step):
            raise BadArgument(expected("a run, to choose the checkpoint of a step of", f"{name}, which is one of them"))
        return run or found.path, found
    run = find_run(name)
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise DataError(f"{run} has no complete checkpoint yet, so there is no model to use.")
    if step is not None:
        chosen = next((each for each in checkpoints if each.step == step), None)
        if chosen is None:
            steps = ", ".join(str(each.step) for each in checkpoints)
            raise DataError(expected(f"a step with a checkpoint in {run} ({steps})", step))
        return run, chosen
    if which == "last":
        return run, checkpoints[-1]
    monitor, mode = monitored(settings_of(run))
    ranked = Retention(monitor=monitor, mode=mode).ranked(checkpoints)
    if not ranked:
        do = "Use --which last, or name the folder of one checkpoint."
        raise DataError(expected(f"a checkpoint with {monitor} to find the best by", f"none in {run}", do))
    return run, ranked[0]


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings of a run by name, from its ``config.json``; empty if that cannot be read."""
    from trainformer.live.runs import read_config

    return {name: entry["value"] for name, entry in read_config(folder).items()}


def monitored(settings: Mapping[str, Any]) -> tuple[str, str]:
    """The metric that a run monitors, and whether less or more of it is better."""
    return settings.get("monitor_metric") or "val/loss", settings.get("monitor_mode") or "min"


# -- evaluate --------------------------------------------------------------------------------------------------------


def _add_evaluate_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    data = "other data than the run's validation data: a path or a name; several: --data clean=DATA --data shifted=DATA"
    parser.add_argument("--data", metavar="DATA", action="append", help=data)
    add_batch_size_argument(parser)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _evaluate(args: argparse.Namespace) -> None:
    with stdout_to_stderr():
        data = None if args.data is None else named_data(args.data, "--data")
        trained = load_trained(args, validates=args.data is None, data=data)
        metrics = trained.evaluate(data)
    if not trained.is_main:
        return
    shown = "its validation data" if args.data is None else ", ".join(args.data)
    lines = [f"{trained.weights} on {shown}", *lines_of(metrics)]
    print_result(args, {**trained.source, "data": data, "metrics": metrics}, "\n".join(lines))


# -- export ----------------------------------------------------------------------------------------------------------


def _add_export_arguments(parser: argparse.ArgumentParser) -> None:
    add_run_arguments(parser)
    out = "the file to write; a missing suffix is added. Of a run on JAX, the folder to make, or a .safetensors file"
    parser.add_argument("out", metavar="OUT", type=Path, help=out)
    formats = (
        "by default the format of OUT's suffix, else pytorch (the weights alone); of a run on JAX huggingface (a "
        "folder) or safetensors (the weights alone)"
    )
    parser.add_argument("--format", choices=(*EXPORT_FORMATS, *JAX_FORMATS), help=formats)
    shape = "of one sample, without the batch, such as 3,224,224; by default the shape of the data"
    parser.add_argument("--input-shape", metavar="SIZES", type=_shape, help=shape)
    preprocess = "put the preprocessing in the graph: uint8 images of any size in, probabilities out"
    parser.add_argument("--preprocess", action="store_true", help=preprocess)
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"expected sizes separated by commas, such as 3,224,224; received {text!r}")
    return tuple(map(int, sizes))


def format_of(path: Path) -> str:
    """The format that a suffix stands for; `.pt` and any other are pytorch."""
    return {".onnx": "onnx", ".pt2": "torch.export"}.get(path.suffix, "pytorch")


def _export(args: argparse.Namespace) -> None:
    with stdout_to_stderr():
        trained = load_trained(args)
        path, form = trained.export(args.out, args)
    if not trained.is_main:
        return
    text = f"{trained.weights} was exported as {form} to {path}"
    print_result(args, {**trained.source, "path": path, "format": form}, text)


# -- finalize --------------------------------------------------------------------------------------------------------


def _add_finalize_arguments(parser: argparse.ArgumentParser) -> None:
    run = "the folder of a run or of one of its checkpoints, or its name under runs/"
    parser.add_argument("run", metavar="RUN", help=run)
    parser.add_argument("out", metavar="OUT", help="the folder to create; it must not exist, or be empty")
    recipes = f"a recipe ({', '.join(QUANTIZATION_RECIPES)}) or none; by default the run's qat_recipe"
    parser.add_argument("--quantize", metavar="RECIPE", help=recipes)
    parser.add_argument("--base", metavar="MODEL", help="the base model of an adapter: a hub name or a folder")
    parser.add_argument("--which", choices=("last", "best"), default="last", help="which checkpoint of a run")
    average = parser.add_mutually_exclusive_group()
    average.add_argument("--ema", metavar="KEY", help="which EMA of the weights to use, if there are several")
    average.add_argument("--no-ema", action="store_true", help="the weights as trained, not their EMA")
    parser.add_argument("--device", help="where to quantize: cpu or cuda")
    types = f"also write model.gguf for llama.cpp and Ollama: {', '.join(GGUF_TYPES)} (default: f16)"
    parser.add_argument("--gguf", nargs="?", const="f16", choices=GGUF_TYPES, metavar="TYPE", help=types)
    parser.add_argument("--json", action="store_true", help="print JSON")


def _finalize(args: argparse.Namespace) -> None:
    from trainformer.checkpoint import finalize
    from trainformer.cli.ckpt import path_or_run

    ema = False if args.no_ema else args.ema
    passed = {name: getattr(args, name) for name in ("quantize", "base", "which", "device", "gguf")}
    result = finalize(path_or_run(args.run), args.out, ema=ema, **passed)
    print(json.dumps(result.as_dict(), indent=2) if args.json else str(result).rstrip())


COMMANDS = {
    "evaluate": Command(_add_evaluate_arguments, _evaluate),
    "export": Command(_add_export_arguments, _export),
    "finalize": Command(_add_finalize_arguments, _finalize),
}
