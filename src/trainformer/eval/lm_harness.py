"""Benchmarks of lm-evaluation-harness (the package `lm_eval`) on a model in memory.

The harness asks for log-likelihoods and generated text through its own `HFLM`. Tasks are those it ships with, or your
own YAML files. It downloads the datasets of its tasks, and a YAML file with `!function` runs the code that it names.
"""

from __future__ import annotations

import contextlib
import copy
import io
import logging
import os
import random
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.core.optional import require

_PREFIX = "lm_eval"
_STDERR = "_stderr"


@dataclass(frozen=True)
class LMEvalResults:
    """Results of benchmarks: `metrics` by ``task/metric``, `stderr` likewise, and what the harness says about them."""

    metrics: dict[str, float]
    stderr: dict[str, float]
    samples: dict[str, int] = field(default_factory=dict)  # how many each task has
    versions: dict[str, Any] = field(default_factory=dict)
    fewshot: dict[str, int] = field(default_factory=dict)

    def logged(self) -> dict[str, float]:
        """Metrics as a run logs them: ``lm_eval/task/metric``."""
        return {f"{_PREFIX}/{name}": value for name, value in self.metrics.items()}

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return dict(vars(self))


def lm_eval_package() -> Any:
    """The harness, or an error with the pip command."""
    return require("lm_eval", "lm-eval", "to evaluate on benchmarks")


def check_tasks(tasks: str | Sequence[str]) -> list[str]:
    """Names of tasks as a list; a string may hold several, separated by commas.

    >>> check_tasks("arc_easy, hellaswag")
    ['arc_easy', 'hellaswag']
    """
    names = [name.strip() for name in tasks.split(",")] if isinstance(tasks, str) else list(tasks)
    if not names or not all(isinstance(name, str) and name for name in names):
        raise BadArgument(expected("the names of tasks of lm-evaluation-harness", tasks))
    return names


def lm_evaluate(
    model: nn.Module,
    tokenizer: Any,
    tasks: str | Sequence[str],
    *,
    num_fewshot: int | None = None,
    limit: int | float | None = None,
    batch_size: int | str = 8,
    include_path: str | Path | None = None,
    apply_chat_template: bool = False,
    system_instruction: str | None = None,
    gen_kwargs: Mapping[str, Any] | None = None,
    bootstrap_iters: int = 1000,
    max_length: int | None = None,
    confirm_run_unsafe_code: bool = False,
    progress: bool = False,
) -> LMEvalResults:
    """Evaluate a causal language model of transformers on tasks of the harness.

    `tasks` are names, groups or patterns. `include_path` is a folder with YAML files of your own. `limit` is a number
    of samples per task, or a fraction of them. Few-shot examples and generated text are seeded; random number
    generators, the modes of modules and the tokenizer are left as they were.
    """
    harness = lm_eval_package()
    names = check_tasks(tasks)
    _check_options(num_fewshot, limit, batch_size)
    manager = _task_manager(names, include_path)
    huggingface = require("lm_eval.models.huggingface", "lm-eval", "to evaluate on benchmarks")
    with _preserved(model), _quiet(progress):
        lm = huggingface.HFLM(
            pretrained=model,
            tokenizer=copy.deepcopy(tokenizer),
            backend="causal",
            batch_size=batch_size,
            max_length=max_length,
        )
        found = harness.simple_evaluate(
            model=lm,
            tasks=names,
            num_fewshot=num_fewshot,
            limit=limit,
            task_manager=manager,
            apply_chat_template=apply_chat_template,
            system_instruction=system_instruction,
            gen_kwargs=None if gen_kwargs is None else dict(gen_kwargs),
            bootstrap_iters=bootstrap_iters,
            log_samples=False,
            confirm_run_unsafe_code=confirm_run_unsafe_code,
        )
    return _results(found)


def _check_options(num_fewshot: int | None, limit: int | float | None, batch_size: int | str) -> None:
    if num_fewshot is not None and (not isinstance(num_fewshot, int) or num_fewshot < 0):
        raise BadArgument(expected("num_fewshot to be at least 0, or None", num_fewshot))
    if limit is not None and not limit > 0:
        raise BadArgument(expected("limit to be a positive number of samples, or a fraction of them", limit))
    is_automatic = isinstance(batch_size, str) and batch_size.partition(":")[0] == "auto"
    if not is_automatic and (not isinstance(batch_size, int) or batch_size < 1):
        raise BadArgument(expected("batch_size to be a positive integer or 'auto'", batch_size))


def _task_manager(names: Sequence[str], include_path: str | Path | None) -> Any:
    """The index of tasks. Reading all that the harness ships with takes a while, so own ones are looked at first."""
    kind = require("lm_eval.tasks", "lm-eval", "to evaluate on benchmarks").TaskManager
    if include_path is not None:
        folder = Path(include_path).expanduser()
        if not folder.is_dir():
            raise BadArgument(expected("include_path to be a folder with tasks as YAML files", str(include_path)))
        own = kind(include_path=str(folder), include_defaults=False)
        if set(names) <= set(own.all_tasks):
            return own
        manager = kind(include_path=str(folder))
    else:
        manager = kind()
    for name in names:
        if not manager.match_tasks([name]):
            hint = did_you_mean(name, manager.all_tasks) or "include_path names a folder with your own tasks."
            raise BadArgument(expected("the name of a task of lm-evaluation-harness", name, hint))
    return manager


def _results(found: Mapping[str, Any]) -> LMEvalResults:
    """Numbers by task and metric; ``acc,none`` is ``acc``, and with another filter, its name follows."""
    metrics: dict[str, float] = {}
    stderr: dict[str, float] = {}
    for task, values in {**found["results"], **(found.get("groups") or {})}.items():
        for key, value in values.items():
            name, has_filter, kind = key.partition(",")
            if not has_filter or not isinstance(value, int | float | np.number):
                continue
            is_error = name.endswith(_STDERR)
            named = f"{task}/{name.removesuffix(_STDERR)}" + ("" if kind in ("none", "") else f"/{kind}")
            (stderr if is_error else metrics)[named] = float(value)
    samples = {task: int(each["effective"]) for task, each in (found.get("n-samples") or {}).items()}
    return LMEvalResults(metrics, stderr, samples, dict(found.get("versions") or {}), dict(found.get("n-shot") or {}))


@contextlib.contextmanager
def _preserved(model: nn.Module) -> Iterator[None]:
    """Restore generators and modes. `HFLM` ties weights again, and its results depend on LOCAL_RANK: neither here."""
    python, numpy = random.getstate(), np.random.get_state()
    training = [module for module in model.modules() if module.training]
    rank = os.environ.pop("LOCAL_RANK", None)
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    had_own = "tie_weights" in vars(model)
    own = vars(model).get("tie_weights")
    object.__setattr__(model, "tie_weights", lambda *_, **__: None)
    try:
        with torch.random.fork_rng(devices):
            yield
    finally:
        object.__delattr__(model, "tie_weights")
        if had_own:
            object.__setattr__(model, "tie_weights", own)
        for module in training:
            module.training = True
        if rank is not None:
            os.environ["LOCAL_RANK"] = rank
        random.setstate(python)
        np.random.set_state(numpy)


@contextlib.contextmanager
def _quiet(progress: bool) -> Iterator[None]:
    """Without the harness's log of what it does, and without its progress bars, which it prints on stderr."""
    harness = logging.getLogger("lm_eval")
    evaluator: Any = require("lm_eval.evaluator", "lm-eval", "to evaluate on benchmarks")
    level, commit = harness.level, getattr(evaluator, "get_git_commit_hash", None)
    harness.setLevel(logging.ERROR)
    evaluator.get_git_commit_hash = lambda: None  # it starts git, which complains where there is no repository
    try:
        with contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO()):
            yield
    finally:
        harness.setLevel(level)
        evaluator.get_git_commit_hash = commit
