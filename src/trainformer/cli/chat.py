"""`trainformer chat RUN`: talk to a model in the terminal, or line by line through a pipe.

Answers go to stdout and everything else to stderr, so that the output of a pipe has the answers alone.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from trainformer.cli.app import Command
from trainformer.cli.output import stdout_to_stderr
from trainformer.cli.sampling import SAMPLING_TYPES, add_sampling_arguments, sampling_of
from trainformer.cli.trained import add_model_arguments, load_text_model
from trainformer.core.errors import BadArgument, TrainformerError, did_you_mean, expected

if TYPE_CHECKING:
    from trainformer.inference.conversation import Conversation

_HELP = """\
/help              this list
/reset             begin a new conversation
/undo              remove the last question and its answer
/retry             answer the last question again
/system [TEXT]     show or set the system prompt; none removes it
/set [NAME VALUE]  show or set max_new_tokens, temperature, top_p, top_k,
                   min_p, repetition_penalty, seed; none removes a value
/history           the conversation so far
/save FILE         append the conversation to a .jsonl file, to train on
/quit              leave; so does Ctrl-D
End a line with \\ to continue it on the next one, or put \"\"\" around a message.
Write // for a message that begins with /. Ctrl-C stops an answer."""
_NONE = ("none", "null", "default")
# Control characters that a model may write: in a terminal they could move the cursor, or worse.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument("--system", metavar="TEXT", help="the system prompt")
    plain = "continue the text so far, for a model without a chat template"
    parser.add_argument("--no-template", action="store_true", help=plain)
    add_sampling_arguments(parser, 512, "a new one each time; /set shows it")


def _run(args: argparse.Namespace) -> None:
    from trainformer.inference.conversation import Conversation

    with stdout_to_stderr():
        trained = load_text_model(args)
        model: Any = trained.predictor
    if not args.no_template and not model.has_template:
        raise BadArgument(
            f"{trained.weights} has no chat template: it continues text, and was not trained to answer. Pass "
            "--no-template to have it continue what you write."
        )
    seed = int.from_bytes(os.urandom(4)) if args.seed is None else args.seed
    conversation = Conversation(model, args.system, template=not args.no_template, seed=seed, **sampling_of(args))
    terminal = Terminal()
    if terminal.is_interactive:
        context = "" if model.context_length is None else f", context of {model.context_length:,} tokens"
        terminal.note(f"{trained.weights}: {trained.description}{context}")
        terminal.note("/help lists the commands. Ctrl-C stops an answer, Ctrl-D leaves.")
    Chat(conversation, terminal).run()


class Terminal:
    """Reads messages from stdin and writes answers to stdout and notes to stderr."""

    def __init__(self) -> None:
        self.is_interactive = sys.stdin.isatty()
        if self.is_interactive:
            with contextlib.suppress(ImportError):  # not on Windows
                import readline  # noqa: F401  (input() gets line editing and a history)

    def messages(self) -> Iterator[str]:
        """What the user writes, until the end of the input."""
        while (line := self._line("> ")) is not None:
            yield self._rest_of(line) if self.is_interactive else line

    def _line(self, prompt: str) -> str | None:
        if not self.is_interactive:
            line = sys.stdin.readline()
            return line.rstrip("\r\n") if line else None
        while True:
            try:
                return input(prompt)
            except EOFError:
                print()
                return None
            except KeyboardInterrupt:
                print()
                self.note("Ctrl-D or /quit leaves.")

    def _rest_of(self, line: str) -> str:
        """A message of several lines."""
        if line.strip().startswith('"""'):
            lines = [line.strip().removeprefix('"""')]
            while not lines[-1].endswith('"""') and (more := self._line("  ")) is not None:
                lines.append(more)
            return "\n".join(lines).removesuffix('"""').strip("\n")
        while line.endswith("\\") and (more := self._line("  ")) is not None:
            line = f"{line[:-1]}\n{more}"
        return line

    def write(self, text: str) -> None:
        """Write a piece of an answer at once."""
        sys.stdout.write(_CONTROL.sub("\N{REPLACEMENT CHARACTER}", text) if sys.stdout.isatty() else text)
        sys.stdout.flush()

    def note(self, text: str) -> None:
        """Write something that is not part of an answer."""
        from rich.console import Console

        style = None if os.environ.get("NO_COLOR") else "dim"
        Console(stderr=True, highlight=False, markup=False).print(text, style=style, soft_wrap=True)


class Chat:
    """The loop: messages are answered, commands are carried out."""

    def __init__(self, conversation: Conversation, terminal: Terminal) -> None:
        self.conversation = conversation
        self.terminal = terminal
        self.commands: dict[str, Callable[[str], None]] = {
            "help": lambda _: self.terminal.note(_HELP),
            "reset": self._reset,
            "undo": self._undo,
            "retry": lambda _: self._answer(self.conversation.retry()),
            "system": self._system,
            "set": self._set,
            "history": self._history,
            "save": self._save,
            "quit": self._quit,
        }
        self.commands |= {"clear": self._reset, "exit": self._quit}
        self._left = False

    def run(self) -> None:
        """Until the user leaves. In a pipe, a mistake ends the program."""
        for message in self.terminal.messages():
            if not message.strip():
                continue
            try:
                self._do(message)
            except (TrainformerError, OSError) as error:
                if not self.terminal.is_interactive:
                    raise
                self.terminal.note(f"error: {error}")
            if self._left:
                return

    def _do(self, message: str) -> None:
        if message.startswith("/") and not message.startswith("//"):
            name, _, rest = message[1:].partition(" ")
            if name not in self.commands:
                hint = did_you_mean(name, self.commands) or "/help lists them."
                do = f"{hint} Write // to send a message that begins with /."
                raise BadArgument(expected("a command of the chat", f"/{name}", do))
            self.commands[name](rest.strip())
        else:
            self._answer(self.conversation.ask(message.removeprefix("/") if message.startswith("//") else message))

    def _answer(self, pieces: Iterator[str]) -> None:
        try:
            for piece in pieces:
                self._show_notices()
                self.terminal.write(piece)
        except KeyboardInterrupt:
            if not self.terminal.is_interactive:
                raise
            pieces.close()  # type: ignore[attr-defined]
        self.terminal.write("\n")
        self._show_notices()

    def _show_notices(self) -> None:
        while self.conversation.notices:
            self.terminal.note(f"[{self.conversation.notices.pop(0)}]")

    # -- commands ----------------------------------------------------------------------------------------------

    def _reset(self, _: str) -> None:
        self.conversation.reset()
        self.terminal.note("[a new conversation]")

    def _undo(self, _: str) -> None:
        question = self.conversation.undo()
        self.terminal.note("[there is nothing to remove]" if question is None else f"[removed: {question}]")

    def _system(self, text: str) -> None:
        if text:
            if not self.conversation.template:
                raise BadArgument("Expected a chat template for a system prompt, received --no-template.")
            self.conversation.system = None if text.lower() in _NONE else text
        self.terminal.note(f"system: {self.conversation.system}")

    def _set(self, text: str) -> None:
        from trainformer.inference.conversation import check_sampling

        options = self.conversation.options
        if text:
            name, _, value = text.replace("=", " ", 1).partition(" ")
            name, value = name.strip().replace("-", "_"), value.strip()
            if name not in SAMPLING_TYPES:
                what = f"one of {', '.join(SAMPLING_TYPES)}"
                raise BadArgument(expected(what, name, did_you_mean(name, SAMPLING_TYPES)))
            changed: Any = None if value.lower() in _NONE else _parsed(name, value)
            if changed is None and name in ("seed", "max_new_tokens"):
                raise BadArgument(expected(f"a number for {name}", value))
            if name == "seed":
                self.conversation.seed = changed
            else:
                new = {**options, name: changed}
                check_sampling(new)
                self.conversation.options = {key: each for key, each in new.items() if each is not None}
                options = self.conversation.options
        shown = {**{name: options.get(name) for name in SAMPLING_TYPES}, "seed": self.conversation.seed}
        self.terminal.note("\n".join(f"{name:<18} {value}" for name, value in shown.items()))

    def _history(self, _: str) -> None:
        for message in self.conversation.messages:
            self.terminal.note(f"{message['role']}: {_CONTROL.sub(' ', message['content'])}")

    def _save(self, file: str) -> None:
        if not file:
            raise BadArgument("Expected the name of a file, received none. Write /save FILE.jsonl.")
        if not self.conversation.turns:
            raise BadArgument("There is no conversation yet to save.")
        self.terminal.note(f"[appended to {self.conversation.save(file)}]")

    def _quit(self, _: str) -> None:
        self._left = True


def _parsed(name: str, text: str) -> Any:
    try:
        return SAMPLING_TYPES[name](text)
    except (ValueError, argparse.ArgumentTypeError) as error:
        raise BadArgument(expected(f"a number for {name}", text)) from error


COMMANDS = {"chat": Command(_add_arguments, _run)}
