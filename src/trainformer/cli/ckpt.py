"""`trainformer ckpt`: inspect checkpoints of runs on torch and on JAX. See `trainformer.checkpoint`."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.cli.app import Command, add_action
from trainformer.cli.output import check_free, print_json, print_result, print_rich, print_table

if TYPE_CHECKING:
    from trainformer.checkpointing import Checkpoint

_PATH = "a checkpoint's folder, a run's folder or name under runs/ (its newest one), or a file"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", title="actions")
    listing = add_action(actions, "list", "the checkpoints of a run, oldest first")
    listing.add_argument("run", metavar="RUN", help="the folder of a run or its name, or a folder of checkpoints")
    inspect = add_action(actions, "inspect", "the content of a checkpoint; only headers are read")
    inspect.add_argument("path", metavar="PATH", help=_PATH)
    verify = add_action(actions, "verify", "compare every file with its digest; exit code 1 if any differs")
    paths = "checkpoints, files, or runs (all of their checkpoints)"
    verify.add_argument("paths", metavar="PATH", nargs="+", help=paths)
    compare = add_action(actions, "compare", "the differences between two checkpoints")
    compare.add_argument("a", metavar="A", help=_PATH)
    compare.add_argument("b", metavar="B", help="the same")
    only = "compare this component only, such as model; can be repeated"
    compare.add_argument("--component", action="append", metavar="NAME", help=only)
    export = add_action(actions, "export", "the weights alone, as a file that other programs can read")
    export.add_argument("path", metavar="PATH", help=_PATH)
    export.add_argument("out", metavar="OUT", type=Path, help="a file that ends in .safetensors or .pt")
    ema = "the average of the EMA callback instead; KEY says which, if there are several"
    export.add_argument("--ema", nargs="?", const=True, default=False, metavar="KEY", help=ema)
    export.add_argument("--force", action="store_true", help="overwrite the file")
    for name, purpose in (
        ("protect", "never delete a checkpoint, whatever the run's retention settings say"),
        ("unprotect", "let the run's retention settings apply again"),
    ):
        add_action(actions, name, purpose).add_argument("path", metavar="PATH", help=_PATH)


def path_or_run(path: str) -> Path:
    """A path, or the name of a run under ``runs/``."""
    from trainformer.live.runs import RUNS, is_run

    return RUNS / path if not Path(path).exists() and is_run(RUNS / path) else Path(path)


def _list(args: argparse.Namespace) -> None:
    from trainformer.checkpoint import list_checkpoints
    from trainformer.checkpointing.tools.summary import in_words

    folder = path_or_run(args.run)
    found = list_checkpoints(folder)
    if args.json or not found:
        print_result(args, list(map(_as_json, found)), f"no complete checkpoint in {folder}")
        return
    columns = dict.fromkeys(("checkpoint", "step", "epochs", "saved", "size", "metrics"), "right")
    rows = []
    for checkpoint in found:
        manifest = checkpoint.manifest
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items())
        name = checkpoint.path.name + (" (protected)" if checkpoint.is_protected else "")
        rows.append([name, checkpoint.step, manifest.epoch, saved, in_words(_size(checkpoint)), metrics])
    print_table(columns | {"checkpoint": "left", "metrics": "fold"}, rows, title=str(found[0].path.parent))


def _size(checkpoint: Checkpoint) -> int:
    return sum(file.size for files in checkpoint.manifest.components.values() for file in files)


def _as_json(checkpoint: Checkpoint) -> dict[str, Any]:
    manifest = checkpoint.manifest
    return {
        "path": str(checkpoint.path),
        "step": checkpoint.step,
        "epoch": manifest.epoch,
        "time": manifest.time,
        "size": _size(checkpoint),
        "metrics": manifest.metrics,
        "components": list(manifest.components),
        "world_size": manifest.world_size,
        "versions": manifest.versions,
        "protected": checkpoint.is_protected,
    }


def _inspect(args: argparse.Namespace) -> None:
    from trainformer.checkpoint import inspect

    summary = inspect(path_or_run(args.path))
    if args.json:
        print_json({**dataclasses.asdict(summary), "path": str(summary.path), "size": summary.size})
    else:
        print_rich(summary)


def _verify(args: argparse.Namespace) -> int:
    from trainformer.checkpoint import verify

    problems = {path: verify(path_or_run(path)) for path in args.paths}
    blocks = [
        "\n  ".join([f"{path}: damaged" if found else f"{path}: intact", *found]) for path, found in problems.items()
    ]
    print_result(args, {"ok": not any(problems.values()), "problems": problems}, "\n".join(blocks))
    return 1 if any(problems.values()) else 0


def _compare(args: argparse.Namespace) -> None:
    from trainformer.checkpoint import compare

    comparison = compare(path_or_run(args.a), path_or_run(args.b), args.component)
    if args.json:
        print_json({"equal": comparison.equal, **dataclasses.asdict(comparison)})
        return
    print_rich(comparison)
    print("they are bitwise identical" if comparison.equal else "they differ")


def _export(args: argparse.Namespace) -> None:
    from trainformer.checkpoint import export_weights

    check_free(args.out, args.force)
    out = export_weights(path_or_run(args.path), args.out, args.ema)
    print_result(args, {"path": str(out), "size": out.stat().st_size}, f"wrote the weights to {out}")


def _mark(args: argparse.Namespace) -> None:
    from trainformer import checkpoint as checkpoints

    found = (checkpoints.protect if args.action == "protect" else checkpoints.unprotect)(path_or_run(args.path))
    text = f"{found.path} is {'protected' if found.is_protected else 'not protected any more'}"
    print_result(args, {"path": str(found.path), "protected": found.is_protected}, text)


_ACTIONS: dict[str, Callable[[argparse.Namespace], int | None]] = {
    "list": _list,
    "inspect": _inspect,
    "verify": _verify,
    "compare": _compare,
    "export": _export,
    "protect": _mark,
    "unprotect": _mark,
}

COMMANDS = {"ckpt": Command(_add_arguments, lambda args: _ACTIONS[args.action](args))}
