"""`trainformer lm-eval RUN --tasks ...`: benchmarks of lm-evaluation-harness.

Results of a run are written to its folder: a file for each checkpoint, and a record in ``metrics.jsonl``.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.cli.app import Command
from trainformer.cli.output import check_free, note, positive, print_json, print_table, stdout_to_stderr, whole_number
from trainformer.cli.trained import Trained, add_model_arguments, load_text_model
from trainformer.core.errors import BadArgument, expected

if TYPE_CHECKING:
    from trainformer.eval import LMEvalResults

FOLDER = "lm_eval"


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--tasks", required=True, metavar="NAMES", help="tasks, groups or patterns, separated by commas"
    )
    parser.add_argument("--include-path", metavar="FOLDER", help="a folder with tasks of your own, as YAML files")
    parser.add_argument("--num-fewshot", type=whole_number(0), metavar="N", help="examples in the prompt")
    parser.add_argument("--limit", type=float, metavar="N", help="samples per task; below 1, a fraction of them")
    parser.add_argument("--batch-size", type=_batch_size, default=8, metavar="N", help="or auto (default: 8)")
    parser.add_argument("--chat", action="store_true", help="apply the chat template to the prompts")
    parser.add_argument("--system", metavar="TEXT", help="the system prompt; implies --chat")
    parser.add_argument("-o", "--out", metavar="OUT", type=Path, help="the file of the results, instead of one in RUN")
    parser.add_argument("--no-save", action="store_true", help="write nothing")
    parser.add_argument("--force", action="store_true", help="overwrite the file")
    parser.add_argument("--confirm-run-unsafe-code", action="store_true", help="for tasks that run generated code")
    parser.add_argument("--json", action="store_true", help="print JSON")


def _batch_size(text: str) -> int | str:
    return text if text.partition(":")[0] == "auto" else positive(text)


def _run(args: argparse.Namespace) -> None:
    from trainformer.eval.lm_harness import check_tasks, lm_eval_package, lm_evaluate

    names = check_tasks(args.tasks)
    if args.limit is not None and args.limit <= 0:
        raise BadArgument(expected("--limit to be positive", args.limit))
    if args.out is not None:
        check_free(args.out, args.force)
    chosen, args.batch_size = args.batch_size, None  # the trainer has none to evaluate with
    with stdout_to_stderr():
        lm_eval_package()
        trained = load_text_model(args)
        if trained.on_jax:
            do = f"Write a folder for it: trainformer finalize {args.run} OUT, then trainformer lm-eval OUT."
            raise BadArgument(expected("a model of torch, which lm-evaluation-harness calls", "a run on JAX", do))
        model: Any = trained.predictor
        found = lm_evaluate(
            model.model,
            model.tokenizer,
            names,
            num_fewshot=args.num_fewshot,
            limit=int(args.limit) if args.limit is not None and args.limit >= 1 else args.limit,
            batch_size=chosen,
            include_path=args.include_path,
            apply_chat_template=args.chat or args.system is not None,
            system_instruction=args.system,
            confirm_run_unsafe_code=args.confirm_run_unsafe_code,
            progress=sys.stderr.isatty(),
        )
    content = {**trained.source, "tasks": names, "limit": args.limit, "chat": args.chat, **found.as_dict()}
    if args.json:
        print_json(content)
    else:
        _print(found, str(trained.weights))
    if not args.no_save:
        _save(args, trained, found, content)


def _print(found: LMEvalResults, title: str) -> None:
    columns = {
        "task": "left",
        "samples": "right",
        "few-shot": "right",
        "metric": "left",
        "value": "right",
        "stderr": "right",
    }
    rows = []
    for name, value in found.metrics.items():
        task, _, metric = name.partition("/")
        shots = found.fewshot.get(task)
        rows.append([task, found.samples.get(task), shots, metric, value, found.stderr.get(name)])
    print_table(columns, rows, title)


def _save(args: argparse.Namespace, trained: Trained, found: LMEvalResults, content: dict[str, Any]) -> None:
    """Write the results: to the file that was named, or to the folder of the run."""
    from trainformer.context.jsonable import jsonable

    text = json.dumps(jsonable(content), indent=2, ensure_ascii=False, default=str)
    if args.out is not None:
        args.out.write_text(text + "\n", encoding="utf-8")
        note(f"wrote {args.out}")
    elif trained.checkpoint is None or not isinstance(trained.run, Path) or trained.run == trained.checkpoint.path:
        note("nothing was written: this is no run. Name a file with --out.")
    else:
        folder = trained.run / FOLDER
        folder.mkdir(exist_ok=True)
        moment = time.strftime("%Y%m%d-%H%M%S")
        file = folder / f"step_{trained.checkpoint.step:08d}_{moment}.json"
        file.write_text(text + "\n", encoding="utf-8")
        _append_metrics(trained.run / "metrics.jsonl", trained.checkpoint.step, found.logged())
        note(f"wrote {file}, and a record to metrics.jsonl")


def _append_metrics(file: Path, step: int, metrics: dict[str, float]) -> None:
    """Append one record, in one write: the run may be logging to the same file."""
    from trainformer.context.jsonable import jsonable

    line = json.dumps(jsonable({"step": step, "time": time.time(), **metrics})) + "\n"
    with file.open("ab+") as out:
        if out.seek(0, os.SEEK_END) > 0:
            out.seek(-1, os.SEEK_END)
            line = line if out.read(1) == b"\n" else "\n" + line  # a run that was killed left half a line
        out.write(line.encode())


COMMANDS = {"lm-eval": Command(_add_arguments, _run)}
