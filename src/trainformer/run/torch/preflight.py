"""The pre-flight check: finds in seconds what would otherwise fail after hours.

Every check is one small function that adds to the report. All of them run inside the sandbox of the run, so model,
optimizer, random numbers and data position are unchanged afterwards.
"""

from __future__ import annotations

import io
import math
import time
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from trainformer.backends.torch import capture_random, restore_random
from trainformer.backends.torch.coverage import unoptimized_message
from trainformer.backends.torch.several_optimizers import SeveralOptimizers
from trainformer.backends.torch.state import cloned
from trainformer.core.errors import TrainformerError
from trainformer.core.types import DeviceBatch
from trainformer.run.cadences import never_due
from trainformer.run.check_report import CheckReport, Status, some, words
from trainformer.run.torch.dry_run import DryRun
from trainformer.run.torch.monitors import callback_metrics, monitored, unknown_metric
from trainformer.run.torch.run import TorchRun
from trainformer.tasks.base import provides
from trainformer.utils.text import duration

_MANY_PASSES = 100  # over a source of a mixture


def check_run(run: TorchRun, raise_on_failure: bool = True) -> CheckReport:
    """Run every check, print the report, and raise if one failed."""
    report = CheckReport()
    random = capture_random()
    try:
        watching = run.process_group.monitoring(run.settings.rank_timeout)
        with watching, run.backend.run_context(), run.sandbox() as dry_run:
            _arguments(run, report)
            batch = _data(run, dry_run, report)
            if batch is not None and _training(run, dry_run, batch, report):
                _exactness(run, dry_run, batch, report)
                _costs(run, dry_run, batch, report)
            _coverage(run, report)
            _evaluation(run, report)
    finally:
        restore_random(random)
        run.backend.begin_training()
    report.print_to(run.console)
    if raise_on_failure:
        report.raise_failures()
    return report


def _arguments(run: TorchRun, report: CheckReport) -> None:
    s, notes = run.settings, []
    total, per_epoch = run.total_steps(), run.steps_per_epoch()
    batches = run.train_source.batches_per_epoch
    if batches is not None and s.accumulation_steps > batches:
        notes.append(
            f"accumulation_steps={s.accumulation_steps} is more than the {batches} batches of an epoch: "
            f"every step will hold {batches} micro-batches only."
        )
    if run.info.num_samples and s.batch_size > run.info.num_samples:
        notes.append(f"batch_size={s.batch_size} is more than the {run.info.num_samples} samples.")
    if run.backend.precision.name == "fp16" and run.backend.device.type == "cpu":
        notes.append("precision='fp16' is slow on a CPU; 'no' or 'bf16' suits it.")
    monitors = [getattr(cb, "monitor", None) for cb in run.callbacks]
    if run.val_source is None and any(monitors):
        notes.append(
            "a callback monitors a validation metric, but there is no val_data or val_split: it will never act."
        )
    notes += never_due(s, run.passed, bool(run.val_sources), total, per_epoch).values()
    notes += _mixture_notes(run, total)
    if s.max_steps is not None and per_epoch and run.passed >= {"epochs"}:
        notes.append(f"max_steps={s.max_steps} overrides epochs={s.epochs}.")
    report.add("arguments", notes, "they agree with each other and with the data", "warning")


def _mixture_notes(run: TorchRun, total: int | None) -> list[str]:
    """Sources of a mixture that the run repeats often, or does not read."""
    drawn_by = getattr(run.train_source, "drawn_by", None)
    passes = {} if drawn_by is None or total is None else drawn_by(total)
    often = [f"{name!r} {count:.0f} times" for name, count in passes.items() if count > _MANY_PASSES]
    never = [repr(name) for name, count in passes.items() if count == 0]
    notes = [f"the run repeats {', '.join(often)}: give it less weight, or train for fewer steps."] if often else []
    return notes + ([f"the run draws nothing from {', '.join(never)}, whose weight is 0."] if never else [])


def _data(run: TorchRun, dry_run: DryRun, report: CheckReport) -> DeviceBatch | None:
    batch, unread = None, []
    try:
        batch = next(dry_run.batches())
    except Exception as error:
        unread = [f"the first batch cannot be read: {words(error)}"]
    unread = _of_all_ranks(run, unread)
    if unread or batch is None:
        report.add("data", unread, "")
        return None
    problems = run.task.check_batch(batch.data) if provides(run.task, "check_batch") else []
    size = batch.size if batch.global_size is None else batch.global_size
    fine = f"a batch of {size} samples, labels and inputs fit the task"
    report.add("data", _of_all_ranks(run, problems), fine)
    return batch


def _training(run: TorchRun, dry_run: DryRun, batch: DeviceBatch, report: CheckReport) -> bool:
    """Forward and backward of one batch: finite losses, and a gradient for every trainable parameter."""
    if provides(run.task, "manual_step"):
        return _manual_training(run, dry_run, batch, report)
    try:
        losses, found = _backward(run, dry_run, batch)
    except Exception as error:
        if not run.process_group.is_single_process:
            raise  # the other ranks may wait for this one; failure detection reports it
        report.add("forward and backward", [words(error)], "")
        return False
    problems = [f"the {name} of the first batch is {x}." for name, (x, _) in losses.items() if not math.isfinite(x)]
    if any(weight == 0 for _, weight in losses.values()):
        problems = ["nothing in the first batch is supervised: the weight of its loss is 0. Are all labels masked?"]
    report.add("forward and backward", problems, ", ".join(f"{name} {x:.4g}" for name, (x, _) in losses.items()))
    _optimizers(run, [name.removesuffix(" loss") for name in losses], report)
    backend = run.backend
    unused = {id(p) for p in run.task.unused_parameters()} if provides(run.task, "unused_parameters") else {}
    unused_names = {backend.names.get(key) for key in unused}
    without = [name for name, kind in found.items() if kind == "none" and name not in unused_names]
    broken = [name for name, kind in found.items() if kind == "broken"]
    zero = [name for name, kind in found.items() if kind == "zero"]
    if zero:
        # Many models begin with branches switched off by a zero weight.
        dry_run.step(batch)
        _, later = _backward(run, dry_run, batch)
        zero = [name for name in zero if later[name] == "zero"]
    problems = []
    if without:
        problems.append(
            f"{len(without)} trainable parameters get no gradient: {some(without)}. They would never be trained; "
            "use them in train_step, or set requires_grad=False."
        )
    if broken and backend.precision.scaler is None:
        problems.append(f"gradients of {some(broken)} are not finite.")
    problems = _of_all_ranks(run, problems)
    report.add("gradients", problems, f"all {len(found)} trainable tensors get one")
    if zero and not problems:
        report.add(
            "zero gradients", [f"the gradient of {some(zero)} is all zero, before and after a step."], "", "warning"
        )
    return not problems


def _optimizers(run: TorchRun, updated: list[str], report: CheckReport) -> None:
    """Several optimizers: is each of them updated?"""
    if not isinstance(run.backend, SeveralOptimizers):
        return
    never = run.backend.idle.never_due(run.total_steps())
    problems = never or _of_all_ranks(run, run.backend.idle.without(updated))
    names = ", ".join(run.backend.optimizers)
    report.add("optimizers", problems, f"{names}: each is updated", "failed" if never else "warning")


def _manual_training(run: TorchRun, dry_run: DryRun, batch: DeviceBatch, report: CheckReport) -> bool:
    """One call of `manual_step`, which should change every trainable parameter."""
    before = cloned(run.backend.parameters)
    try:
        dry_run.step(batch)
    except Exception as error:
        if not run.process_group.is_single_process:
            raise
        report.add("manual_step", [words(error)], "")
        return False
    names = [run.backend.names[id(p)] for p, old in zip(run.backend.parameters, before, strict=True) if _same(p, old)]
    problems = [f"{len(names)} trainable parameters did not change in the first step: {some(names)}."] if names else []
    report.add(
        "manual_step", _of_all_ranks(run, problems), f"it changes all {len(before)} trainable tensors", "warning"
    )
    return True


def _backward(
    run: TorchRun, dry_run: DryRun, batch: DeviceBatch
) -> tuple[dict[str, tuple[float, float]], dict[str, str]]:
    """Losses with their weights, and whether each parameter's gradient is none, zero, broken or ok."""
    backend = run.backend
    order = ("none", "zero", "ok", "broken")
    losses: dict[str, tuple[float, float]] = {}
    kinds: dict[str, str] = {}
    for optimizer, loss in dry_run.gradients(batch):
        losses[f"{optimizer} loss".strip()] = loss, backend.window_weight()
        for p in backend.active.parameters:
            if id(p) not in backend.names:
                continue
            grad = backend.strategy.full_gradient(p)
            if grad is None:
                kind = "none"
            elif not bool(torch.isfinite(grad).all()):
                kind = "broken"
            else:
                kind = "ok" if bool(grad.any()) else "zero"
            name = backend.names[id(p)]
            kinds[name] = max(kind, kinds.get(name, "none"), key=order.index)
    return losses, kinds


def _exactness(run: TorchRun, dry_run: DryRun, batch: DeviceBatch, report: CheckReport) -> None:
    """Save, step, load, step: both steps must give the same weights, or resuming will not be exact."""
    buffer = io.BytesIO()
    state, problems = run.trained_state(), []
    try:
        torch.save(state, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, map_location="cpu", weights_only=True)
    except Exception as error:
        problems = [f"the state cannot be saved and read back safely: {words(error)}"]
    problems = _of_all_ranks(run, problems)
    if problems:
        report.add("save and load", problems, "")
        return
    ends: list[dict[str, Any]] = []
    for _ in range(2):
        run.restore_trained(cloned(saved))  # a sharded optimizer keeps the tensors that it is given
        dry_run.step(batch)
        dry_run.step(batch)  # the first step of Adam is nearly the sign of the gradient, and hides small differences
        ends.append(cloned(run.task.model.state_dict() | _beside_model(run)))
    run.restore_trained(saved)
    first, second = ends
    differing = [k for k in first if isinstance(first[k], Tensor) and not _same(first[k], second[k])]
    status: Status = "failed" if run.backend.device.type == "cpu" else "warning"
    advice = "Does the task keep state outside state_dict(), or use a random generator of its own?"
    problems = [f"after save, load and two steps these differ: {some(differing)}. {advice}"] if differing else []
    problems = _of_all_ranks(run, problems)
    report.add("save and load", problems, "two steps after loading give bitwise the same weights", status)


def _beside_model(run: TorchRun) -> dict[str, Tensor]:
    """Trained parameters that are not part of the model."""
    inside = {id(p) for p in run.task.model.parameters()}
    others = [p for p in run.backend.parameters if id(p) not in inside]
    return {run.backend.names.get(id(p), f"parameter {i}"): p.detach() for i, p in enumerate(others)}


def _costs(run: TorchRun, dry_run: DryRun, batch: DeviceBatch, report: CheckReport) -> None:
    """Seconds and memory of a step, and what that makes for the whole run."""
    backend, settings = run.backend, run.settings
    cuda = backend.device.type == "cuda"
    dry_run.step(batch)
    saved: dict[int, int] = {}  # bytes that autograd keeps for the backward pass, by storage: the activations

    def pack(tensor: Tensor) -> Tensor:
        for part in _with_memory(tensor):
            saved.setdefault(part.untyped_storage().data_ptr(), part.untyped_storage().nbytes())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        dry_run.step(batch)
    if cuda:
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    dry_run.step(batch)
    if cuda:
        torch.cuda.synchronize()
    report.seconds_per_step = (time.perf_counter() - began) * settings.accumulation_steps
    report.peak_bytes = torch.cuda.max_memory_allocated() if cuda else sum(saved.values()) + _state_bytes(run)
    unit, size = next((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if report.peak_bytes >= s or u == "kB")
    memory = f"{report.peak_bytes / size:.2f} {unit}"
    text = f"{report.seconds_per_step * 1e3:,.1f} ms per step, about {memory} of memory"
    total = run.total_steps()
    if total is not None:
        report.estimated_seconds = report.seconds_per_step * (total - run.state.step)
        text += f", {duration(report.estimated_seconds)} for {total - run.state.step:,} steps without evaluations"
    report.add("cost", [], text)


def _coverage(run: TorchRun, report: CheckReport) -> None:
    """Parameters that the loss depends on, and that no optimizer holds. Only reported if there are any."""
    found = run.backend.checks.unoptimized
    if found:
        report.add("optimizer", [unoptimized_message(found)], "", "warning")


def _evaluation(run: TorchRun, report: CheckReport) -> None:
    """One validation batch: the metrics are there, finite, and those that are monitored are among them."""
    if run.val_source is None:
        return
    metrics, problem = _first_metrics(run)
    if metrics is None:
        report.add("evaluation", [problem], "")
        return
    problems = [f"{name} is {value}." for name, value in metrics.items() if not math.isfinite(value)]
    measured = callback_metrics(run)
    for name, who in monitored(run).items():
        if name not in metrics and name not in measured and not run.measures_more:
            problems.append(unknown_metric(name, who, metrics))
    report.add("evaluation", problems, "metrics: " + ", ".join(sorted(metrics)))


def _first_metrics(run: TorchRun) -> tuple[dict[str, float] | None, str]:
    """Metrics of as few validation batches as will do: some need samples that belong together, which may lie apart."""
    lengths = [source.batches_per_epoch for source in run.val_sources.values()]
    total, problem = None if None in lengths else max(length or 0 for length in lengths), ""
    for most in (1, 8, 64):
        try:
            return run.evaluate_first_batches(most), ""
        except Exception as error:
            problem = words(error)
            if not run.process_group.is_single_process and not isinstance(error, TrainformerError):
                raise  # the other ranks may wait for this one; failure detection reports it
            if not isinstance(error, TrainformerError) or (total is not None and total <= most):
                break
    return None, problem


def _of_all_ranks(run: TorchRun, problems: list[str]) -> list[str]:
    """The problems of any rank, with the ranks where not all have them: all ranks then run the same checks."""
    gathered = run.process_group.all_gather_object(problems)
    texts = dict.fromkeys(text for one in gathered for text in one)
    where = {text: [str(rank) for rank, one in enumerate(gathered) if text in one] for text in texts}
    return [t if len(n) == len(gathered) else f"{t} (on rank {', '.join(n)})" for t, n in where.items()]


def _with_memory(tensor: Any) -> list[Tensor]:
    """What is inside of a tensor that only wraps others: one that is divided, or still on its way from other ranks."""
    if not is_traceable_wrapper_subclass(tensor):
        return [tensor]
    inside = [getattr(tensor, name) for name in tensor.__tensor_flatten__()[0]]
    return [part for inner in inside if isinstance(inner, Tensor) for part in _with_memory(inner)]


def _state_bytes(run: TorchRun) -> int:
    """Parameters and buffers, gradients, optimizer state."""
    backend = run.backend
    tensors = [*run.task.model.state_dict().values()]
    tensors += backend.parameters  # as many gradients
    for o in backend.optimizers.values():
        tensors += [v for state in o.optimizer.state.values() for v in state.values()]
    return sum(t.numel() * t.element_size() for t in tensors if isinstance(t, Tensor))


def _same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a, b) or (a.shape == b.shape and bool(((a == b) | (a.isnan() & b.isnan())).all()))
