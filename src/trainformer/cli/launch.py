"""`trainformer launch --nproc 4 script.py ...`: the same program in several processes, by torch's own launcher.

Owns the words of the command line and what is said at the end. Meeting, watching and restarting the processes is what
`torch.distributed.run` (torchrun) does.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from trainformer.core.errors import BadArgument, TrainformerError, did_you_mean, expected

#: Commands that know what to do where there are several of them.
COMMANDS = ("train", "check", "resume", "run", "evaluate", "predict")
_EXAMPLE = "trainformer launch --nproc 4 script.py --its-own arguments"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes."""
    parser.epilog = f"example: {_EXAMPLE}; or: trainformer launch --nproc 4 train --task=..."
    of_machine = "processes on this machine (default: one per GPU, else 1)"
    parser.add_argument("--nproc", type=_positive, metavar="N", help=of_machine)
    parser.add_argument("--nnodes", type=_positive, default=1, metavar="N", help="machines (default: 1)")
    parser.add_argument("--node-rank", type=_count, metavar="R", help="which of the machines this is, from 0")
    parser.add_argument("--master-addr", metavar="HOST", help="the first of several machines")
    parser.add_argument(
        "--master-port", type=_positive, default=29500, metavar="PORT", help="a free port there (29500)"
    )
    again = "how often all processes are started again after one has failed (default: 0); they go on where they were"
    parser.add_argument("--max-restarts", type=_count, default=0, metavar="K", help=again)
    parser.add_argument("-m", action="store_true", dest="is_module", help="what follows is a module, as in python -m")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="...", help="script, module or command; arguments")


def _positive(text: str) -> int:
    return _whole(text, least=1)


def _count(text: str) -> int:
    return _whole(text, least=0)


def _whole(text: str, least: int) -> int:
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected a whole number of at least {least}, received {text!r}")
    return int(text)


def run(args: argparse.Namespace) -> int:
    """Start the processes and wait for them; the exit code of the one that failed first, else 0."""
    where = _meeting_place(args)
    program = _program(args)
    number = args.nproc or _gpus() or 1
    # Else torchrun says at length that it has set it to 1.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // number)))
    options = ["--nproc-per-node", str(number), "--max-restarts", str(args.max_restarts), *where]
    return _launch([*options, *program], number * args.nnodes)


def _meeting_place(args: argparse.Namespace) -> list[str]:
    if args.nnodes == 1:
        return ["--standalone"]
    missing = [name for name in ("node_rank", "master_addr") if getattr(args, name) is None]
    if missing:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise BadArgument(f"Expected {names} with --nnodes {args.nnodes}: the machines have to find each other.")
    if args.node_rank >= args.nnodes:
        raise BadArgument(expected(f"--node-rank to be below --nnodes ({args.nnodes})", args.node_rank))
    place = ["--master-addr", args.master_addr, "--master-port", str(args.master_port)]
    return ["--nnodes", str(args.nnodes), "--node-rank", str(args.node_rank), *place]


def _program(args: argparse.Namespace) -> list[str]:
    """What torchrun is to run; after the dashes it looks for no options of its own."""
    if not args.program:
        raise BadArgument(
            f"Expected a script, a module (-m) or a command to launch, received none. Example: {_EXAMPLE}"
        )
    name, rest = args.program[0], args.program[1:]
    if args.is_module:
        return ["-m", "--", name, *rest]
    if name in COMMANDS:
        return ["-m", "--", "trainformer.cli", name, *rest]
    if not Path(name).is_file():
        do = did_you_mean(name, COMMANDS) or f"Commands that can be launched are {', '.join(COMMANDS)}."
        raise BadArgument(expected("a script that exists, or a command of trainformer", name, do))
    return ["--", name, *rest]


def _gpus() -> int:
    import torch

    return torch.cuda.device_count()


def _launch(arguments: list[str], world_size: int) -> int:
    import logging

    from torch.distributed import run as torchrun
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    logging.getLogger("torch.distributed").setLevel(logging.ERROR)
    try:
        torchrun.run(torchrun.parse_args(arguments))
    except ChildFailedError as error:
        rank, failure = error.get_first_failure()
        code = failure.exitcode
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        text = (
            f"Rank {rank} of {world_size} (process {failure.pid}) {how}; what it said is above. The others were ended."
        )
        print(f"error: {text}", file=sys.stderr)
        return 128 - code if code < 0 else code
    except SignalException as error:
        return 128 + int(error.sigval)
    except (OSError, RuntimeError) as error:
        raise TrainformerError(f"The processes could not be started together: {error}") from error
    return 0
