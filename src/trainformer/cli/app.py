"""The command `trainformer`: dispatches to the commands and turns what happens there into an exit code.

0: success. 1: failed, with one paragraph that says why. 2: wrong usage. 128 + n: ended by signal n.

A module of this package has one or several commands, each a `Command` in its table `COMMANDS`. It is imported when one
of them is called, and imports torch only when that runs; `train` and `check` do for their help, which lists the
settings of `Trainer`. Every command takes `--debug`, anywhere after its name.
"""

from __future__ import annotations

import argparse
import importlib
import io
import os
import re
import shutil
import signal
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any, NoReturn

from trainformer import __version__
from trainformer.core.secrets import mask_text
from trainformer.utils.known_messages import hide_known_messages

#: The module and the purpose of each command.
COMMANDS = {
    "train": ("train", "train a task on data; every setting is an option"),
    "check": ("train", "check in seconds whether a training run will work"),
    "evaluate": ("trained", "compute the metrics of a run's model, on its validation data or on other data"),
    "predict": ("predict", "write the predictions of a run's model as JSON lines, CSV or Parquet"),
    "export": ("trained", "export a run's model for deployment: PyTorch, ONNX, TorchScript or torch.export"),
    "chat": ("chat", "talk to a language model in the terminal"),
    "generate": ("generate", "continue prompts and answer conversations with a language model"),
    "lm-eval": ("lm_eval", "evaluate a language model on the benchmarks of lm-evaluation-harness"),
    "resume": ("train", "resume a run that was interrupted, or train a finished one for longer"),
    "run": ("configs", "build what a config describes, and run it: fit(), train(), or a call"),
    "launch": ("launch", "run a script, a module or a trainformer command in several processes that train together"),
    "sweep": ("sweep", "run a hyperparameter sweep, or show sweeps"),
    "tasks": ("train", "list tasks, adapters, callbacks, loggers, optimizers and schedulers"),
    "runs": ("runs", "list runs and compare them"),
    "report": ("runs", "write one HTML file about runs and sweeps: curves, settings, events"),
    "ckpt": ("ckpt", "list, inspect, verify, compare and export checkpoints"),
    "ctl": ("runs", "list runs, and ask a running one to save, stop or evaluate"),
    "config": ("configs", "show a config: its values, its objects, or the Python that builds them"),
    "finalize": (
        "trained",
        "prepare a run's model for deployment: merge adapters, quantize, compare with the original",
    ),
    "teacher-logits": ("teacher_logits", "store a teacher's most probable tokens on disk, to distil from"),
    "doctor": ("doctor", "show versions, devices, and what is missing"),
    "completion": ("completion", "print a script that completes commands and options in the shell"),
}


def _parse_args(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    return parser.parse_args(words)


@dataclass(frozen=True)
class Command:
    """`run` returns an exit code, or None for 0. `parse` is for a command whose options depend on others' values.

    With `reads_words`, `add_arguments` also gets the words of the command.
    """

    add_arguments: Callable[..., None]
    run: Callable[[argparse.Namespace], int | None]
    parse: Callable[[argparse.ArgumentParser, list[str]], argparse.Namespace] = _parse_args
    reads_words: bool = False


class _Parser(argparse.ArgumentParser):
    """Masks secrets in its errors, and suggests what was meant."""

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            hint = _meant_options(self, unknown) or f"`{self.prog} --help` lists the options."
            self.error(f"unrecognized arguments: {' '.join(unknown)}. {hint}")
        return parsed

    def error(self, message: str) -> NoReturn:
        choice = re.search(r"invalid choice: '([^']*)' \(choose from (.*)\)$", message)
        if choice is not None:
            from trainformer.core.errors import did_you_mean

            names = re.findall(r"[\w.-]+", choice[2])
            hint = did_you_mean(choice[1], names)
            message = f"{message}. {hint}" if hint else message
        super().error(mask_text(message))


def _meant_options(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> str:
    """Options with names like those that were typed."""
    from trainformer.cli.vocabulary import suggest_option

    parsers = [parser, *actions_of(parser).values()]
    known = [flag[2:] for each in parsers for flag in each._option_string_actions if flag.startswith("--")]
    found = [suggest_option(word[2:].partition("=")[0], known) for word in unknown if word.startswith("--")]
    return " ".join(dict.fromkeys(filter(None, found)))


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if not words or words[0].startswith("-"):
        return _without_command(words)
    name = words[0]
    if name not in COMMANDS:
        return _unknown(name)
    from trainformer.cli.consent import asking

    debug = "--debug" in words
    hide_known_messages()
    if isinstance(sys.stdout, io.TextIOWrapper):  # as stderr does: no character ends a command
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        with _sigterm_raises(), asking():
            args, command = _parse(name, words[1:])
            debug = getattr(args, "debug", False)
            code = command.run(args) or 0
            sys.stdout.flush()  # notice a closed pipe here, not when Python exits
            return code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 128 + signal.SIGINT
    except _Terminated:
        print("ended by SIGTERM", file=sys.stderr)
        return 128 + signal.SIGTERM
    except BrokenPipeError:  # the reader of the output has exited
        from trainformer.utils.console import BROKEN_PIPE, ignore_closed_pipe

        ignore_closed_pipe()
        return BROKEN_PIPE
    except Exception as error:
        if debug:
            raise
        from trainformer.core.optional import missing_torch

        print(paragraph(missing_torch(error, f"for `trainformer {name}` here") or error), file=sys.stderr)
        return 1


class _Terminated(BaseException):
    """SIGTERM arrived; temporary files are removed on the way out."""


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Turn SIGTERM into an exception, unless it has a handler already. A training run installs its own."""
    usual = signal.SIG_DFL
    if threading.current_thread() is not threading.main_thread() or signal.getsignal(signal.SIGTERM) is not usual:
        yield
        return
    process = os.getpid()

    def terminate(number: int, frame: FrameType | None) -> None:
        if os.getpid() == process:
            raise _Terminated
        signal.signal(number, usual)  # in a forked child: die as it would have without us
        os.kill(os.getpid(), number)

    signal.signal(signal.SIGTERM, terminate)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is terminate:
            signal.signal(signal.SIGTERM, usual)


def find_command(name: str) -> Command:
    """A command by its name; its module is imported."""
    return importlib.import_module(f"trainformer.cli.{COMMANDS[name][0]}").COMMANDS[name]


def complete_parser() -> argparse.ArgumentParser:
    """A parser of all commands, for shell completion."""
    parser, subparsers = _overview()
    for name in COMMANDS:
        _add_arguments(subparsers.choices[name], find_command(name))
    return parser


def add_action(actions: Any, name: str, purpose: str, has_json: bool = True) -> argparse.ArgumentParser:
    """Add an action of a command, such as `list` of `ckpt list`."""
    parser = actions.add_parser(name, help=purpose, description=_sentence(purpose))
    if has_json:
        parser.add_argument("--json", action="store_true", help="print JSON")
    return parser


def actions_of(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The subparsers of a parser, by name."""
    groups = [action for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
    return {name: inner for group in groups for name, inner in group.choices.items()}


def paragraph(error: BaseException) -> str:
    """The text of an error without its traceback."""
    from trainformer.core.errors import TrainformerError

    known = isinstance(error, TrainformerError | OSError)
    notes = " ".join(getattr(error, "__notes__", ()))  # which callback raised it, for instance
    said = f"{error} {notes}".strip()
    text = mask_text(said if known else f"{type(error).__name__}: {said} (--debug shows the traceback)")
    width = min(100, shutil.get_terminal_size((100, 24)).columns)
    return textwrap.fill(f"error: {' '.join(text.split())}", width, break_long_words=False, break_on_hyphens=False)


def _parse(name: str, words: list[str]) -> tuple[argparse.Namespace, Command]:
    command = find_command(name)
    # No abbreviations: an option that is added later would change their meaning.
    parser = _Parser(prog=f"trainformer {name}", description=_sentence(COMMANDS[name][1]), allow_abbrev=False)
    _add_arguments(parser, command, words)
    return command.parse(parser, words), command


def _add_arguments(parser: argparse.ArgumentParser, command: Command, words: Sequence[str] = ()) -> None:
    command.add_arguments(parser, *([words] if command.reads_words else []))
    parser.add_argument("--debug", action="store_true", help="show the traceback of an error")
    _complete_actions(parser)


def _complete_actions(parser: argparse.ArgumentParser) -> None:
    """Actions take `--debug` and no abbreviations, like their command."""
    for nested in actions_of(parser).values():
        nested.allow_abbrev = False
        # SUPPRESS, because its default must not override a --debug before the action.
        nested.add_argument("--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS)
        _complete_actions(nested)


def _overview() -> tuple[argparse.ArgumentParser, argparse._SubParsersAction]:
    parser = argparse.ArgumentParser(prog="trainformer", description="One training engine for deep learning.")
    parser.add_argument("--version", action="version", version=f"trainformer {__version__}")
    subparsers = parser.add_subparsers(dest="command", required=True, metavar="COMMAND", title="commands")
    for name, (_, purpose) in COMMANDS.items():
        subparsers.add_parser(name, help=purpose, description=_sentence(purpose), allow_abbrev=False)
    return parser, subparsers


def _without_command(words: list[str]) -> int:
    parser, _ = _overview()
    if not words:
        parser.print_help(sys.stderr)
        return 2
    if words[0] in ("-h", "--help", "--version"):
        parser.parse_args(words[:1])  # exits
    do = "It stands after the command." if words[0] == "--debug" else "`trainformer --help` lists the commands."
    print(f"error: Expected a command first, received {words[0]!r}. {do}", file=sys.stderr)
    return 2


def _unknown(name: str) -> int:
    from trainformer.core.errors import did_you_mean

    hint = ("" if name == "help" else did_you_mean(name, COMMANDS)) or "`trainformer --help` lists them."
    print(f"error: trainformer has no command {name!r}. {hint}", file=sys.stderr)
    return 2


def _sentence(purpose: str) -> str:
    return f"{purpose[0].upper()}{purpose[1:]}."
