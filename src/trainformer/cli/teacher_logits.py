"""`trainformer teacher-logits TEACHER DATA... --out FOLDER`: store the top-k logits of a teacher for distillation.

The same command again continues after an interruption, and adds what is missing.
"""

from __future__ import annotations

import argparse
import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from trainformer.cli.app import Command
from trainformer.cli.output import positive, print_result, stdout_to_stderr


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("teacher", metavar="TEACHER", help="the name or folder of a causal language model")
    parser.add_argument("data", metavar="DATA", nargs="+", help="files or names, as for --task=CausalLM")
    parser.add_argument(
        "--out", metavar="FOLDER", type=Path, required=True, help="where to write; may have some already"
    )
    parser.add_argument("--k", type=positive, default=64, metavar="K", help="tokens per position (default: 64)")
    soft = "temperature of the probabilities, as in Distillation (default: 1)"
    parser.add_argument("--temperature", type=float, default=1.0, metavar="T", help=soft)
    stored = "dtype of the log probabilities: fp16 (default), bf16 or fp32"
    parser.add_argument("--stored-dtype", choices=("fp16", "bf16", "fp32"), default="fp16", help=stored)
    parser.add_argument("--tokenizer", metavar="NAME", help="default: that of the teacher")
    alike = parser.add_argument_group("tokenisation", "as in the task that will train on the logits")
    alike.add_argument("--max-length", type=positive, default=2048, metavar="N", help="tokens of a sequence at most")
    alike.add_argument("--train-on", choices=("auto", "completion", "assistant", "all"), default="auto")
    alike.add_argument("--truncation", choices=("auto", "drop", "truncate", "split"), default="auto")
    alike.add_argument("--prompt-template", metavar="TEXT", help="a format string over the fields of a record")
    alike.add_argument("--cache-dir", type=Path, metavar="FOLDER", help="of tokenised data")
    parser.add_argument("--batch-size", type=positive, default=8, metavar="N", help="sequences per forward pass")
    parser.add_argument("--dtype", choices=("fp32", "bf16", "fp16"), help="of the teacher's weights (default: fp32)")
    parser.add_argument("--bits", type=int, choices=(4, 8), help="quantise the teacher with bitsandbytes")
    parser.add_argument("--device", metavar="DEVICE", help="default: a GPU if there is one")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _run(args: argparse.Namespace) -> None:
    from trainformer.tasks.language.teacher_logits import save_teacher_logits

    names = ("k", "temperature", "stored_dtype", "tokenizer", "max_length", "train_on", "truncation", "prompt_template")
    options = {name: getattr(args, name) for name in (*names, "batch_size", "dtype", "bits", "device", "cache_dir")}
    with stdout_to_stderr(), _messages():
        found = save_teacher_logits(args.teacher, tuple(args.data), args.out, **options)
    rank, world = (int(os.environ.get(name, default)) for name, default in (("RANK", "0"), ("WORLD_SIZE", "1")))
    if rank:
        return  # of several processes one reports
    size = sum(path.stat().st_size for path in args.out.glob("part-*"))
    said = {"folder": str(args.out), "sequences": len(found), "tokens": found.tokens, "k": found.info.k, "bytes": size}
    there = "so far (other processes may still write)" if world > 1 else "in all"
    text = (
        f"{args.out}: {len(found):,} sequences, {found.tokens:,} tokens x {found.info.k}, {size / 1e6:,.1f} MB {there}"
    )
    print_result(args, said, text)


@contextmanager
def _messages() -> Iterator[None]:
    """Show what is to be computed and how large it will be, on stderr."""
    logger, handler = logging.getLogger("trainformer"), logging.StreamHandler()
    before = logger.level
    logger.setLevel(logging.INFO)
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
        logger.setLevel(before)


COMMANDS = {"teacher-logits": Command(_add_arguments, _run)}
