"""`trainformer finalize RUN OUT`: see `trainformer.checkpoint.finalize`."""

from __future__ import annotations

import argparse
import json

# Written down here, so that asking for help takes no torch; a test compares them with the recipes there are.
RECIPES = (
    "int8-dynamic-act-int4-weight",
    "int8-dynamic-act-int8-weight",
    "intx-int4-weight-only",
    "int8-weight-only",
    "int4-weight-only",
    "float8-dynamic-act-float8-weight",
    "float8-dynamic-act-int4-weight",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.add_argument("run", metavar="RUN", help="the folder of a run, or of one of its checkpoints")
    parser.add_argument("out", metavar="OUT", help="the folder to make; not there yet, or empty")
    recipes = f"a recipe ({', '.join(RECIPES)}) or none; by default the run's qat_recipe"
    parser.add_argument("--quantize", metavar="RECIPE", help=recipes)
    parser.add_argument("--base", metavar="MODEL", help="the model that an adapter belongs to: a hub name or a folder")
    parser.add_argument("--which", choices=("last", "best"), default="last", help="which checkpoint of a run")
    average = parser.add_mutually_exclusive_group()
    average.add_argument("--ema", metavar="KEY", help="which average of the weights to take, if there are several")
    average.add_argument("--no-ema", action="store_true", help="the weights as trained, not their average")
    parser.add_argument("--device", help="where to quantise: cpu or cuda")
    parser.add_argument("--json", action="store_true", help="say what was done in JSON")


def run(args: argparse.Namespace) -> int:
    """Do it, and say what was done."""
    from trainformer.checkpoint import finalize

    result = finalize(
        args.run,
        args.out,
        quantize=args.quantize,
        base=args.base,
        which=args.which,
        ema=False if args.no_ema else args.ema,
        device=args.device,
    )
    print(json.dumps(result.as_dict(), indent=2) if args.json else str(result).rstrip())
    return 0
