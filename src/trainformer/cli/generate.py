"""`trainformer generate RUN --prompt TEXT | --file FILE`: texts that a language model generates, as text or rows.

Texts are continued as they are; with `--chat`, or a system prompt, each is a user's message that is answered.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from trainformer.cli.app import Command
from trainformer.cli.output import check_free, note, stdout_to_stderr
from trainformer.cli.predict import track_rows
from trainformer.cli.sampling import add_sampling_arguments, sampling_of
from trainformer.cli.trained import Trained, add_batch_size_argument, add_model_arguments, load_text_model
from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require
from trainformer.run.predictions import SUFFIXES, WRITERS, write_file

_STDIN = "-"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--prompt", action="append", metavar="TEXT", help="a text to continue; can be repeated")
    lines = "prompts or conversations: lines of a .txt file (- reads lines from stdin), records of a .jsonl, .csv, ..."
    source.add_argument("--file", metavar="FILE", help=lines)
    out = "the file to write: .jsonl, .csv or .parquet; without it, --prompt prints the text, and --file JSON lines"
    parser.add_argument("-o", "--out", metavar="OUT", type=Path, help=out)
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument("--json", action="store_true", help="print JSON lines, also with --prompt")
    chat = "texts are messages of a user, to be answered with the chat template"
    parser.add_argument("--chat", action="store_true", help=chat)
    parser.add_argument("--system", metavar="TEXT", help="the system prompt; implies --chat")
    add_batch_size_argument(parser)
    add_sampling_arguments(parser, 256, "0")


def _parse(parser: argparse.ArgumentParser, words: list[str]) -> argparse.Namespace:
    args = parser.parse_args(words)
    if args.out is not None and args.out.suffix.lower() not in SUFFIXES:
        parser.error(f"--out: expected a file that ends in {', '.join(SUFFIXES)}; received {str(args.out)!r}")
    if args.out is not None and args.json:
        parser.error("--json: expected no --out, which writes the rows to a file")
    return args


def _run(args: argparse.Namespace) -> None:
    form = None if args.out is None else SUFFIXES[args.out.suffix.lower()]
    if args.out is not None:
        check_free(args.out, args.force)
    if form == "parquet":
        require("pyarrow", "datasets", "to write Parquet")
    printed = sys.stdout
    with stdout_to_stderr():
        trained = load_text_model(args)
        records = list(_records(args, trained))
        options = {**sampling_of(args), "seed": args.seed or 0}
        if args.chat or args.system is not None:
            records = [_as_chat(record, args.system, index) for index, record in enumerate(records)]
        kwargs = options.pop("chat_template_kwargs", None)
        if kwargs is not None:
            records = [_with_kwargs(record, kwargs, index) for index, record in enumerate(records)]
        batches = track_rows(trained.predicted_columns(records, **options), len(records), trained.is_main)
        if args.out is not None:
            assert form is not None
            count = trained.consume_on_main(batches, lambda found: write_file(found, args.out, form))
            if trained.is_main:
                note(f"wrote {count} texts of {trained.weights} to {args.out}")
        elif args.file is not None or args.json:
            trained.consume_on_main(batches, lambda found: WRITERS["jsonl"](found, printed))
        else:
            trained.consume_on_main(batches, lambda found: _print_texts(found, printed))


def _records(args: argparse.Namespace, trained: Trained) -> Iterator[Any]:
    if args.prompt is not None:
        yield from args.prompt
        return
    if args.file == _STDIN:
        found = [line.rstrip("\r\n") for line in sys.stdin if line.strip()]
    else:
        loaded = trained.load_prompts(args.file)
        if not hasattr(loaded, "__len__"):
            raise DataError(expected("a file of prompts", f"the stream {args.file}", "Name a file."))
        found = [loaded[index] for index in range(len(loaded))]
    if not found:
        raise DataError(expected("at least one prompt", f"none in {args.file}"))
    yield from found


def _as_chat(record: Any, system: str | None, index: int) -> Any:
    """A text as a user's message; a conversation gets the system prompt, unless it has one."""
    from trainformer.data.text.generation import read_prompt

    prompt = read_prompt(record, index)
    turns = list(prompt.messages) if prompt.text is None else [{"role": "user", "content": prompt.text}]
    if system is not None and turns[0]["role"] != "system":
        turns.insert(0, {"role": "system", "content": system})
    known = dict(record) if isinstance(record, dict) else {}
    rest = {name: value for name, value in known.items() if name not in ("prompt", "text", "messages", "instruction")}
    target = {} if prompt.target is None else {"completion": prompt.target}
    return {**rest, **target, "messages": turns}


def _with_kwargs(record: Any, kwargs: dict[str, Any], index: int) -> Any:
    if not isinstance(record, dict):
        what = "conversations with --chat-template-kwargs"
        raise BadArgument(expected(what, f"a text as prompt {index}", "Pass --chat."))
    return {**record, "chat_template_kwargs": {**kwargs, **(record.get("chat_template_kwargs") or {})}}


def _print_texts(batches: Any, file: Any) -> int:
    count = 0
    for columns in batches:
        for text in columns["text"]:
            print(text, file=file, flush=True)
            count += 1
    return count


COMMANDS = {"generate": Command(_add_arguments, _run, _parse)}
