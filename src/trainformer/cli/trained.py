"""The model of a run that has been trained, for the commands that use it: evaluate, predict, export.

Owns which checkpoint is meant and what of it is loaded. How the trainer of a run is built again is told by its recipe
(`cli.recipes`). Nothing is written to the folder of the run.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import BadArgument, DataError, expected

if TYPE_CHECKING:
    from trainformer import Trainer
    from trainformer.checkpointing import Checkpoint


@dataclass(frozen=True)
class Trained:
    """A trainer with the weights of a checkpoint."""

    trainer: Trainer
    run: Path
    checkpoint: Checkpoint

    @property
    def source(self) -> dict[str, Any]:
        """Where the weights come from, for a program."""
        return {"run": str(self.run), "checkpoint": str(self.checkpoint.path), "step": self.checkpoint.step}


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Which model is meant."""
    parser.add_argument(
        "run", metavar="RUN", help="the folder of a run or of one of its checkpoints, or its name under runs/"
    )
    parser.add_argument(
        "--which", choices=("last", "best"), default="last", help="which checkpoint of a run (default: last)"
    )
    add_trust_argument(parser)


def add_batch_size_argument(parser: argparse.ArgumentParser) -> None:
    """How many samples at once; it changes no result."""
    parser.add_argument("--batch-size", type=positive, metavar="N", help="samples at once (default: as in the run)")


def add_trust_argument(parser: argparse.ArgumentParser) -> None:
    """As `trainformer run` has it."""
    trust = "a package that may be imported for the run's recipe, besides the usual ones and the project's own"
    parser.add_argument("--trust", action="append", default=[], metavar="PACKAGE", help=trust)


def positive(text: str) -> int:
    """A whole number of at least 1, for an option."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least 1, received {text!r}")
    return int(text)


def load_trained(args: argparse.Namespace) -> Trained:
    """The trainer that `args` name, with the weights of the checkpoint and whatever else decides what it computes."""
    from trainformer.cli.recipes import trainer_of

    run, checkpoint = find_checkpoint(args.run, args.which)
    # A logger would open a run of its own, and there is nothing to resume.
    changes: dict[str, Any] = {"log": "none", "resume": None}
    if getattr(args, "batch_size", None) is not None:
        changes["eval_batch_size"] = args.batch_size
    try:
        trainer = trainer_of(str(run), trust=args.trust, changes=changes)
    except DataError as error:  # on another machine, perhaps
        do = "The data of the run are needed too: the task looks at them when it makes the model."
        raise DataError(f"{error} {do}") from error
    # An average of the weights (EMA) is a callback's; parameters of the loss, centres and class names are the task's.
    parts = [key for key in checkpoint.manifest.components if key in ("model", "task") or key.startswith("callback.")]
    trainer.load(checkpoint.path, parts)
    return Trained(trainer, run, checkpoint)


def find_checkpoint(name: str, which: str) -> tuple[Path, Checkpoint]:
    """The folder of the run that is meant, and the checkpoint."""
    from trainformer.checkpointing import Checkpoint
    from trainformer.checkpointing.retention import Retention
    from trainformer.checkpointing.tools.listing import find, is_checkpoint, list_checkpoints
    from trainformer.live.runs import find_run, is_run

    if is_checkpoint(Path(name)):
        run = next((folder for folder in Path(name).absolute().parents[:3] if is_run(folder)), None)
        if run is None:
            raise BadArgument(expected("a checkpoint in the folder of a run", name, "Its recipe is kept there."))
        found = find(name)
        assert isinstance(found, Checkpoint)
        return run, found
    run = find_run(name)
    checkpoints = list_checkpoints(run)
    if not checkpoints:
        raise DataError(f"{run} has no complete checkpoint yet, so there is no model to use.")
    if which == "last":
        return run, checkpoints[-1]
    monitor, mode = monitored(settings_of(run))
    ranked = Retention(monitor=monitor, mode=mode).ranked(checkpoints)
    if not ranked:
        do = "Take --which last, or name the folder of one checkpoint."
        raise DataError(expected(f"a checkpoint with {monitor} to find the best by", f"none in {run}", do))
    return run, ranked[0]


def settings_of(folder: Path) -> dict[str, Any]:
    """The settings of a run by name, from its ``config.json``; empty if there is none that can be read."""
    try:
        content = json.loads((folder / "config.json").read_bytes())
        return {name: entry["value"] for name, entry in content.items()}
    except (OSError, ValueError, AttributeError, KeyError, TypeError):
        return {}


def monitored(settings: Mapping[str, Any]) -> tuple[str, str]:
    """The metric by which a run tells which of its models is best, and whether that is the least or the most."""
    return settings.get("monitor_metric") or "val/loss", settings.get("monitor_mode") or "min"


@contextlib.contextmanager
def only_the_result_on_stdout() -> Iterator[None]:
    """What libraries print meanwhile goes to stderr."""
    with contextlib.redirect_stdout(sys.stderr):
        yield
