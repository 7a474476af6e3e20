"""From the words of a command line to a command, and from what happens there to an exit code.

0: done. 1: failed, with one paragraph that says why. 2: the command line makes no sense. 128 + n: ended by signal n.

A command is a module of this package with its name, imported when it is called and not before. It has
`add_arguments(parser)` and `run(args)`, which returns an exit code; one whose options depend on other options has also
`parse(parser, words)`, which takes the place of `parser.parse_args(words)`. `--debug` is the frame's, and may stand
anywhere after the command.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType, ModuleType
from typing import Any

from trainformer import __version__

COMMANDS = {
    "train": "train a task on data; every setting is an option",
    "check": "see in seconds whether a training will work",
    "evaluate": "metrics of a run's model, on its validation data or other data",
    "predict": "what a run's model predicts, as JSON lines, CSV or Parquet",
    "export": "a run's model for deployment: PyTorch, ONNX, TorchScript or torch.export",
    "resume": "go on with a run that was cut short",
    "run": "build what a config describes, and run it: fit(), train(), or a call",
    "launch": "run a script, a module or a command of trainformer in several processes that train together",
    "sweep": "search for good settings, and look at searches",
    "tasks": "what can be trained, adapted, observed and logged",
    "runs": "the runs in a folder, and how they went",
    "report": "one HTML file about runs and sweeps: curves, settings, events",
    "ckpt": "list, look into, verify and export checkpoints",
    "ctl": "list runs, and ask a running one to save, stop or evaluate",
    "config": "look at a config: its values, its objects, or the Python that builds them",
    "finalize": "make a folder to deploy from a run: adapters merged, quantised if wanted, read back and compared",
    "doctor": "versions, devices, and what is missing",
    "completion": "a script that lets the shell complete commands and options",
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command; the exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0].startswith("-"):
        return _without_command(words)
    name = words[0]
    if name not in COMMANDS:
        return _unknown(name)
    debug = "--debug" in words
    # torchao warns of its own enums when it is imported, for an adapter too; nobody can do anything about it.
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)
    try:
        with _ending_on_request():
            args = _parse(name, words[1:])
            debug = args.debug
            code = args.execute(args)
            sys.stdout.flush()  # who reads no more is noticed here, not when Python ends
            return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except _Ended:
        print("ended by SIGTERM", file=sys.stderr)
        return 128 + signal.SIGTERM
    except BrokenPipeError:  # whoever read the output has gone; Python would complain again when it ends
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except Exception as error:
        if debug:
            raise
        print(paragraph(error), file=sys.stderr)
        return 1


class _Ended(BaseException):
    """Somebody asked this process to end; what is half done is cleared away on the way out."""


@contextmanager
def _ending_on_request() -> Iterator[None]:
    """SIGTERM as an exception meanwhile, unless somebody has plans for it already. A run that trains has its own."""
    usual = signal.SIG_DFL
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not usual:
        yield
        return
    process = os.getpid()

    def end(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            raise _Ended
        signal.signal(number, usual)  # in a child that was forked: end as it would have without us
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, usual)


def command(name: str) -> ModuleType:
    """The module of a command."""
    return importlib.import_module(f"trainformer.cli.{name}")


def complete_parser() -> argparse.ArgumentParser:
    """A parser of everything, for which all commands are imported."""
    parser, subparsers = _overview()
    for name in COMMANDS:
        _fill(subparsers.choices[name], command(name))
    return parser


def add_action(actions: Any, name: str, purpose: str) -> argparse.ArgumentParser:
    """One more action of a command that has several, such as `show` in `config show`."""
    return actions.add_parser(name, help=purpose, description=_sentence(purpose))


def actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The parsers inside a parser, by name."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: inner for group in groups for name, inner in group.choices.items()}


def paragraph(error: BaseException) -> str:
    """An error for whoever did not ask for the traceback."""
    from trainformer.core.errors import TrainformerError

    known = isinstance(error, TrainformerError | OSError)
    text = str(error) if known else f"{type(error).__name__}: {error} (--debug shows where it came from)"
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    return textwrap.fill(f"error: {' '.join(text.split())}", width, break_long_words=False, break_on_hyphens=False)


def _parse(name: str, words: list[str]) -> argparse.Namespace:
    module = command(name)
    # Without abbreviations: an option that is added later would change what they mean.
    parser = argparse.ArgumentParser(
        prog=f"trainformer {name}", description=_sentence(COMMANDS[name]), allow_abbrev=False
    )
    _fill(parser, module)
    args = module.parse(parser, words) if hasattr(module, "parse") else parser.parse_args(words)
    args.execute = module.run
    args.debug = getattr(args, "debug", False)  # of a command with a parser of its own, perhaps not there
    return args


def _fill(parser: argparse.ArgumentParser, module: ModuleType) -> None:
    module.add_arguments(parser)
    parser.add_argument("--debug", action="store_true", help="show where an error came from")
    _fill_actions(parser)


def _fill_actions(parser: argparse.ArgumentParser) -> None:
    """What is true of a command is true of its actions."""
    for nested in actions_of(parser).values():
        nested.allow_abbrev = False
        # Left out, it must not undo one that stood before the action.
        nested.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        _fill_actions(nested)


def _overview() -> tuple[argparse.ArgumentParser, argparse._SubParsersAction]:
    parser = argparse.ArgumentParser(prog="trainformer", description="One training engine for deep learning.")
    parser.add_argument("--version", action="version", version=f"trainformer {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, purpose in COMMANDS.items():
        subparsers.add_parser(name, help=purpose, description=_sentence(purpose), allow_abbrev=False)
    return parser, subparsers


def _without_command(words: list[str]) -> int:
    parser, _ = _overview()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if words[0] in ("-h", "--help", "--version"):
        parser.parse_args(words[:1])  # which ends here
    do = "It stands after the command." if words[0] == "--debug" else "`trainformer --help` shows what there is."
    print(f"error: Expected a command first, received {words[0]!r}. {do}", file=sys.stderr)
    return 2


def _unknown(name: str) -> int:
    from trainformer.core.errors import did_you_mean

    hint = ("" if name == "help" else did_you_mean(name, COMMANDS)) or "`trainformer --help` lists them."
    print(f"error: trainformer has no command {name!r}. {hint}", file=sys.stderr)
    return 2


def _sentence(purpose: str) -> str:
    return f"{purpose[0].upper()}{purpose[1:]}."
