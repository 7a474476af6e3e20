"""`trainformer launch --nproc 4 script.py ...`: run the same program in several processes, with torch's launcher.

Rendezvous, monitoring and restarts of the processes are `torch.distributed.run`'s (torchrun).
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from trainformer.cli.app import Command
from trainformer.cli.output import positive, whole_number
from trainformer.core.errors import BadArgument, TrainformerError, did_you_mean, expected

#: Commands that can run in several processes.
LAUNCHABLE = ("train", "check", "resume", "run", "evaluate", "predict", "teacher-logits")
_EXAMPLE = "trainformer launch --nproc 4 script.py --its-own arguments"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.epilog = f"example: {_EXAMPLE}; or: trainformer launch --nproc 4 train --task=..."
    count = whole_number(0)
    nproc = "processes on this machine (default: one per GPU, else 1)"
    parser.add_argument("--nproc", type=positive, metavar="N", help=nproc)
    parser.add_argument("--nnodes", type=positive, default=1, metavar="N", help="machines (default: 1)")
    parser.add_argument("--node-rank", type=count, metavar="R", help="rank of this machine, from 0")
    parser.add_argument("--master-addr", metavar="HOST", help="address of the machine with rank 0")
    port = "a free port there (default: 29500)"
    parser.add_argument("--master-port", type=positive, default=29500, metavar="PORT", help=port)
    restarts = "how often all processes are restarted after one has failed (default: 0); they resume their run"
    parser.add_argument("--max-restarts", type=count, default=0, metavar="K", help=restarts)
    parser.add_argument("-m", action="store_true", dest="is_module", help="what follows is a module, as in python -m")
    parser.add_argument("program", nargs=argparse.REMAINDER, metavar="...", help="script, module or command; arguments")


def _run(args: argparse.Namespace) -> int:
    """Start the processes and wait for them; the exit code of the one that failed first, else 0."""
    rendezvous = _rendezvous(args)
    program = _program(args)
    nproc = args.nproc
    if nproc is None:
        import torch

        nproc = torch.cuda.device_count() or 1
    # Otherwise torchrun sets it to 1 and logs a long warning.
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // nproc)))
    options = ["--nproc-per-node", str(nproc), "--max-restarts", str(args.max_restarts), *rendezvous]
    return _launch([*options, *program], nproc * args.nnodes)


def _rendezvous(args: argparse.Namespace) -> list[str]:
    if args.nnodes == 1:
        return ["--standalone"]
    missing = [name for name in ("node_rank", "master_addr") if getattr(args, name) is None]
    if missing:
        names = " and ".join(f"--{name.replace('_', '-')}" for name in missing)
        raise BadArgument(f"Expected {names} with --nnodes {args.nnodes}: the machines have to find each other.")
    if args.node_rank >= args.nnodes:
        raise BadArgument(expected(f"--node-rank to be below --nnodes ({args.nnodes})", args.node_rank))
    master = ["--master-addr", args.master_addr, "--master-port", str(args.master_port)]
    return ["--nnodes", str(args.nnodes), "--node-rank", str(args.node_rank), *master]


def _program(args: argparse.Namespace) -> list[str]:
    """The arguments of torchrun that name the program; after the dashes it reads no options of its own."""
    if not args.program:
        raise BadArgument(
            f"Expected a script, a module (-m) or a command to launch, received none. Example: {_EXAMPLE}"
        )
    name, rest = args.program[0], args.program[1:]
    if args.is_module:
        return ["-m", "--", name, *rest]
    if name in LAUNCHABLE:
        return ["-m", "--", "trainformer.cli", name, *rest]
    if not Path(name).is_file():
        do = did_you_mean(name, LAUNCHABLE) or f"Commands that can be launched are {', '.join(LAUNCHABLE)}."
        raise BadArgument(expected("a script that exists, or a command of trainformer", name, do))
    return ["--", name, *rest]


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
        how = f"was killed by signal {-code}" if code < 0 else f"exited with code {code}"
        text = (
            f"Rank {rank} of {world_size} (process {failure.pid}) {how}; its output is above. The others were stopped."
        )
        print(f"error: {text}", file=sys.stderr)
        return 128 - code if code < 0 else code
    except SignalException as error:
        return 128 + int(error.sigval)
    except (OSError, RuntimeError) as error:
        raise TrainformerError(f"The processes could not be started together: {error}") from error
    return 0


COMMANDS = {"launch": Command(_add_arguments, _run)}
