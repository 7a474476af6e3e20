"""`trainformer export RUN OUT`: a run's model for deployment. Every file is read back and compared with the model."""

from __future__ import annotations

import argparse
from pathlib import Path

from trainformer.cli.output import print_json
from trainformer.cli.row_files import check_free
from trainformer.cli.trained import add_run_arguments, load_trained, only_the_result_on_stdout

# Written down here, so that asking for help takes no torch; a test compares them with those there are.
FORMATS = {"pytorch": ".pt", "onnx": ".onnx", "torchscript": ".pt", "torch.export": ".pt2"}
_BY_ENDING = {ending: name for name, ending in reversed(FORMATS.items())}  # .pt alone means pytorch


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    add_run_arguments(parser)
    parser.add_argument("out", metavar="OUT", type=Path, help="the file to write; the ending is added if it lacks")
    formats = "by default as the ending of OUT says, else pytorch (the weights alone)"
    parser.add_argument("--format", choices=FORMATS, help=formats)
    shape = "of one sample, without the batch, such as 3,224,224; taken from the data where they have one"
    parser.add_argument("--input-shape", metavar="SIZES", type=_shape, help=shape)
    parser.add_argument("--force", action="store_true", help="replace the file if it is there")
    parser.add_argument("--json", action="store_true", help="answer in JSON")


def _shape(text: str) -> tuple[int, ...]:
    sizes = text.split(",")
    if not all(size.strip().isdecimal() and int(size) > 0 for size in sizes):
        raise argparse.ArgumentTypeError(f"expected sizes with commas between, such as 3,224,224; received {text!r}")
    return tuple(map(int, sizes))


def run(args: argparse.Namespace) -> int:
    """Write the file, and say where it is."""
    form = args.format or _BY_ENDING.get(args.out.suffix, "pytorch")
    out = args.out if args.out.suffix == FORMATS[form] else args.out.with_name(args.out.name + FORMATS[form])
    check_free(out, args.force)
    with only_the_result_on_stdout():
        trained = load_trained(args)
        path = trained.trainer.export(out, form, args.input_shape)
    if not trained.trainer.is_main:
        return 0
    if args.json:
        print_json({**trained.source, "path": path, "format": form})
    else:
        print(f"{trained.checkpoint.path} was exported as {form} to {path}")
    return 0
