"""`trainformer ckpt`: look at checkpoints, of runs on torch and on JAX. See `trainformer.checkpoint`."""

from __future__ import annotations

import argparse
import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainformer.cli.frame import add_action
from trainformer.cli.output import print_json, print_rich, print_table

_PATH = "a checkpoint's folder, a run's folder or name under runs/ (its newest one), or a file"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION", title="actions")
    listing = _action(actions, "list", "the checkpoints of a run, oldest first")
    listing.add_argument("run", metavar="RUN", help="the folder of a run or its name, or a folder of checkpoints")
    inspect = _action(actions, "inspect", "what is in a checkpoint; only its headers are read")
    inspect.add_argument("path", metavar="PATH", help=_PATH)
    verify = _action(actions, "verify", "read every file and compare it with its digest; exit code 1 if any differs")
    paths = "checkpoints, files, or runs (all of their checkpoints)"
    verify.add_argument("paths", metavar="PATH", nargs="+", help=paths)
    compare = _action(actions, "compare", "what differs between two checkpoints, and by how much")
    compare.add_argument("a", metavar="A", help=_PATH)
    compare.add_argument("b", metavar="B", help="the same")
    only = "compare this component only, such as model; can be given several times"
    compare.add_argument("--component", action="append", metavar="NAME", help=only)
    export = _action(actions, "export", "the weights alone, as a file that needs no trainformer to be read")
    export.add_argument("path", metavar="PATH", help=_PATH)
    export.add_argument("out", metavar="OUT", type=Path, help="a file that ends in .safetensors or .pt")
    ema = "the average that the EMA callback keeps instead; KEY says which, if there are several"
    export.add_argument("--ema", nargs="?", const=True, default=False, metavar="KEY", help=ema)
    export.add_argument("--force", action="store_true", help="replace the file if it is there")
    for name, purpose in (
        ("protect", "keep a checkpoint for good: no rule of a run deletes it"),
        ("unprotect", "let the rules of the run decide again"),
    ):
        _action(actions, name, purpose).add_argument("path", metavar="PATH", help=_PATH)


def _action(actions: Any, name: str, purpose: str) -> argparse.ArgumentParser:
    parser = add_action(actions, name, purpose)
    parser.add_argument("--json", action="store_true", help="answer in JSON")
    return parser


def run(args: argparse.Namespace) -> int:
    """Do it, and say what came of it."""
    return _ACTIONS[args.action](args)


def _place(path: str) -> Path:
    """A path as it is, or the name of a run under ``runs/``."""
    from trainformer.live.runs import RUNS, is_run

    return RUNS / path if not Path(path).exists() and is_run(RUNS / path) else Path(path)


def _list(args: argparse.Namespace) -> int:
    from trainformer.checkpoint import list_checkpoints
    from trainformer.checkpointing.tools.summary import in_words

    place = _place(args.run)
    found = list_checkpoints(place)
    if args.json:
        print_json([_facts(checkpoint) for checkpoint in found])
        return 0
    if not found:
        print(f"no complete checkpoint in {place}")
        return 0
    columns = dict.fromkeys(("checkpoint", "step", "epochs", "saved", "size", "metrics"), "right")
    rows = []
    for checkpoint in found:
        manifest = checkpoint.manifest
        saved = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(manifest.time))
        metrics = ", ".join(f"{name} {value:.4g}" for name, value in manifest.metrics.items())
        name = checkpoint.path.name + (" (protected)" if checkpoint.is_protected else "")
        rows.append([name, checkpoint.step, manifest.epoch, saved, in_words(_size(checkpoint)), metrics])
    print_table(columns | {"checkpoint": "left", "metrics": "fold"}, rows, title=str(found[0].path.parent))
    return 0


def _size(checkpoint: Any) -> int:
    return sum(file.size for files in checkpoint.manifest.components.values() for file in files)


def _facts(checkpoint: Any) -> dict[str, Any]:
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


def _inspect(args: argparse.Namespace) -> int:
    from trainformer.checkpoint import inspect

    summary = inspect(_place(args.path))
    if args.json:
        print_json({**dataclasses.asdict(summary), "path": str(summary.path), "size": summary.size})
    else:
        print_rich(summary)
    return 0


def _verify(args: argparse.Namespace) -> int:
    from trainformer.checkpoint import verify

    problems = {path: verify(_place(path)) for path in args.paths}
    if args.json:
        print_json({"ok": not any(problems.values()), "problems": problems})
    else:
        for path, found in problems.items():
            print("\n  ".join([f"{path}: damaged" if found else f"{path}: as it was written", *found]))
    return 1 if any(problems.values()) else 0


def _compare(args: argparse.Namespace) -> int:
    from trainformer.checkpoint import compare

    comparison = compare(_place(args.a), _place(args.b), args.component)
    if args.json:
        print_json({"equal": comparison.equal, **dataclasses.asdict(comparison)})
        return 0
    print_rich(comparison)
    print("they are the same, to the bit" if comparison.equal else "they differ")
    return 0


def _export(args: argparse.Namespace) -> int:
    from trainformer.checkpoint import export_weights
    from trainformer.cli.row_files import check_free

    check_free(args.out, args.force)
    out = export_weights(_place(args.path), args.out, args.ema)
    if args.json:
        print_json({"path": str(out), "size": out.stat().st_size})
    else:
        print(f"the weights are in {out}")
    return 0


def _mark(args: argparse.Namespace) -> int:
    from trainformer import checkpoint as checkpoints

    found = (checkpoints.protect if args.action == "protect" else checkpoints.unprotect)(_place(args.path))
    if args.json:
        print_json({"path": str(found.path), "protected": found.is_protected})
    else:
        print(f"{found.path} is {'protected' if found.is_protected else 'not protected any more'}")
    return 0


_ACTIONS: dict[str, Callable[[argparse.Namespace], int]] = {
    "list": _list,
    "inspect": _inspect,
    "verify": _verify,
    "compare": _compare,
    "export": _export,
    "protect": _mark,
    "unprotect": _mark,
}
