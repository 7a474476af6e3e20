"""The pre-flight check of a run on JAX: finds in seconds what would otherwise fail after hours.

Every check is one small function that adds to the report. Weights, random numbers and the position in the data are as
before afterwards. User's hooks and callbacks are not called.
"""

from __future__ import annotations

import math
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from itertools import islice
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from trainformer.backends.jax.compilation import JittedStep
from trainformer.backends.jax.step import make_gradient_check
from trainformer.checkpointing.jax_files import read_state, write_state
from trainformer.core.types import DeviceBatch, HostBatch
from trainformer.data.mixture.dataset import SOURCE
from trainformer.data.order import preserved_generators
from trainformer.engine.evaluation import evaluate
from trainformer.run.cadences import never_due
from trainformer.run.check_report import CheckReport, Status, some, words
from trainformer.run.jax.dry_run import HostCopy
from trainformer.run.jax.run import JaxRun
from trainformer.run.validation_sets import metric_name
from trainformer.utils.text import duration

_BATCHES = 8  # whose shapes are compared
_NOISE = 1e-2  # added to parameters to find out whether a gradient is zero by chance


def check_run(run: JaxRun, raise_on_failure: bool = True) -> CheckReport:
    """Run every check, print the report, and raise if one failed."""
    report = CheckReport()
    with preserved_generators(), run.backend.run_context(), _preserved(run):
        _arguments(run, report)
        batches = _data(run, report)
        if batches and _training(run, batches[0], report) and _exactness(run, batches[0], report):
            _costs(run, batches[0], report)
            _recompilation(run, batches, report)
    with preserved_generators(), run.backend.run_context():
        _evaluation(run, report)
    report.print_to(run.console)
    if raise_on_failure:
        report.raise_failures()
    return report


@contextmanager
def _preserved(run: JaxRun) -> Iterator[None]:
    """Restore the train state, the counters of the backend and the position in the data."""
    backend, source = run.backend, run.train_source
    before = HostCopy(backend.state)
    flags, skipped, norm = backend._finite_flags, backend.skipped_steps, backend.grad_norm
    position = source.state_dict() if hasattr(source, "state_dict") else None
    try:
        with getattr(source, "preserved_position", nullcontext)():
            yield
    finally:
        backend.state = before.restore()
        backend._finite_flags, backend.skipped_steps, backend.grad_norm = flags, skipped, norm
        if position is not None:
            source.load_state_dict(position)  # type: ignore[attr-defined]


def _arguments(run: JaxRun, report: CheckReport) -> None:
    settings, notes, total = run.settings, [], run.total_steps()
    if run.train_size is not None and settings.batch_size > run.train_size:
        notes.append(f"total_batch_size={settings.batch_size} is more than the {run.train_size} samples.")
    if run.val_source is None and any(getattr(callback, "monitor", None) for callback in run.callbacks):
        notes.append("a callback monitors a validation metric, but there is no dataset_eval: it will never act.")
    notes += never_due(settings, run.passed, bool(run.val_sources), total, run.steps_per_epoch()).values()
    report.add("arguments", notes, "they agree with each other and with the data", "warning")


def _data(run: JaxRun, report: CheckReport) -> list[HostBatch]:
    """The first batches; empty if they cannot be used."""
    try:
        batches = list(islice(run.train_source.batches(0), _BATCHES))
        placed: dict[str, Any] = _placed(run, batches[0]).data if batches else {}
    except Exception as error:
        report.add("data", [f"the first batches cannot be read: {words(error)}"], "")
        return []
    if not batches:
        report.add("data", ["there is no batch to train on: is drop_last set, and the data smaller than a batch?"], "")
        return []
    broken = [name for name, array in placed.items() if _is_float(array) and not np.isfinite(array).all()]
    problems = [f"{some(broken)} of the first batch has values that are not finite."] if broken else []
    columns = ", ".join(f"{name} {list(np.shape(array))}" for name, array in placed.items())
    report.add("data", problems, f"a batch of {batches[0].size} samples: {columns}")
    return [] if problems else batches


def _training(run: JaxRun, batch: HostBatch, report: CheckReport) -> bool:
    """Forward and backward of one batch: a finite loss, and a gradient for every trainable parameter."""
    owner, backend = run.owner, run.backend
    is_ours = isinstance(backend._train_step, JittedStep) and owner._overrides("compute_loss")
    try:
        if not is_ours:
            return _own_step(run, batch, report)
        gradients = jax.jit(make_gradient_check(owner.compute_loss, compute_dtype=owner.dtype))
        part = _micro_batch(run, batch)
        sums, found = jax.device_get(gradients(backend.state, part))
    except Exception as error:
        if not run.process_group.is_single_process:
            raise
        report.add("forward and backward", [words(error)], "")
        return False
    weight = float(sums["weight"])
    loss = float(sums["loss"]) / (weight or 1.0)
    problems = [] if math.isfinite(loss) else [f"the loss of the first batch is {loss}."]
    if weight == 0:
        problems = ["nothing in the first batch is supervised: the weight of its loss is 0. Are all labels masked?"]
    report.add("forward and backward", problems, f"loss {loss:.4g}")
    if problems:
        return False
    broken = [name for name, (_, finite) in found.items() if not finite]
    zero = [name for name, (nonzero, _) in found.items() if not nonzero]
    without: list[str] = []
    if zero:
        # Many models begin with branches switched off by a zero weight: look again after a step, and beside it.
        _step(run, batch)
        later = jax.device_get(gradients(backend.state, part))[1]
        zero = [name for name in zero if not later[name][0]]
        beside = jax.device_get(gradients(_perturbed(backend.state), part))[1]
        without = [name for name in zero if not beside[name][0]]
    problems = []
    if without:
        problems.append(
            f"{len(without)} trainable parameters get no gradient: {some(without)}. They would never be trained; use "
            "them in compute_loss, or name them in frozen_parameters."
        )
    if broken:
        problems.append(f"gradients of {some(broken)} are not finite.")
    report.add("gradients", problems, f"all {len(found)} trainable parameters get one")
    only_zero = [name for name in zero if name not in without]
    if only_zero and not problems:
        text = f"the gradient of {some(only_zero)} is all zero, before and after a step."
        report.add("zero gradients", [text], "", "warning")
    return not problems


def _own_step(run: JaxRun, batch: HostBatch, report: CheckReport) -> bool:
    """One call of the user's train step, which should change every trainable parameter."""
    before = {name: np.array(array) for name, array in _named_params(run.backend.state).items()}
    output = _step(run, batch)
    loss = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    value = None if loss is None or np.ndim(loss) else float(loss)
    problems = [f"the loss of the first batch is {value}."] if value is not None and not math.isfinite(value) else []
    report.add("forward and backward", problems, "the step runs" if value is None else f"loss {value:.4g}")
    after = _named_params(run.backend.state)
    trainable = getattr(run.backend.state, "trainable", None)
    same = [
        name
        for name, array in before.items()
        if (trainable is None or name in trainable) and np.array_equal(array, np.asarray(after[name]))
    ]
    notes = [f"{len(same)} trainable parameters did not change in the first step: {some(same)}."] if same else []
    report.add("gradients", notes, f"the step changes all {len(before)} parameters", "warning")
    return not problems


def _exactness(run: JaxRun, batch: HostBatch, report: CheckReport) -> bool:
    """Save, step, load, step: both steps must give the same weights, or resuming will not be exact."""
    if not run.process_group.is_single_process:
        report.add("save and load", ["not checked with several processes."], "", "warning")
        return True
    with tempfile.TemporaryDirectory(prefix="trainformer-check-") as folder:
        place = Path(folder) / "state"
        try:
            like = jax.tree.map(_shape_of, run.backend.state)
            write_state(place, run.backend.state)
            ends = []
            for _ in range(2):
                run.backend.state = None
                run.backend.state = read_state(place, like)
                for _ in range(2):
                    _step(run, batch)
                ends.append({name: np.asarray(array) for name, array in _named_params(run.backend.state).items()})
        except Exception as error:
            report.add("save and load", [f"the state cannot be saved and read back: {words(error)}"], "")
            return False
    differing = [name for name, array in ends[0].items() if not np.array_equal(array, ends[1][name], equal_nan=True)]
    on_cpu = run.backend.mesh.devices.flat[0].platform == "cpu"
    status: Status = "failed" if on_cpu else "warning"
    advice = "Does the step use random numbers that are not derived from its key?"
    problems = [f"after save, load and two steps these differ: {some(differing)}. {advice}"] if differing else []
    report.add("save and load", problems, "two steps after loading give bitwise the same weights", status)
    return True


def _costs(run: JaxRun, batch: HostBatch, report: CheckReport) -> None:
    """Seconds of a step, and its memory as the compiler plans it."""
    _step(run, batch)
    jax.block_until_ready(run.backend.state)
    began = time.perf_counter()
    _step(run, batch)
    jax.block_until_ready(run.backend.state)
    report.seconds_per_step = time.perf_counter() - began
    report.peak_bytes, limit = _planned_bytes(run, batch), _device_bytes()
    text, problems = f"{report.seconds_per_step * 1e3:,.1f} ms per step", []
    if report.peak_bytes is not None:
        text += f", {_size(report.peak_bytes)} of memory per device"
        text += "" if limit is None else f" of {_size(limit)}"
        if limit is not None and report.peak_bytes > limit:
            problems = [
                f"a step needs {_size(report.peak_bytes)} per device, which has {_size(limit)}: use "
                "gradient_accumulation_steps, gradient_checkpointing, or more fsdp or tp in sharding_array."
            ]
    total = run.total_steps()
    if total is not None:
        report.estimated_seconds = report.seconds_per_step * (total - run.state.step)
        text += f", {duration(report.estimated_seconds)} for {total - run.state.step:,} steps without evaluations"
    report.add("cost", problems, text)


def _recompilation(run: JaxRun, batches: list[HostBatch], report: CheckReport) -> None:
    """Whatever changes the types of a step's arguments, which compiles it again."""
    problems = []
    shapes: dict[str, set[Any]] = {}
    for batch in batches[:-1] if len(batches) > 1 else batches:  # the last may be the smaller one of an epoch
        for name, value in batch.data.items():
            shapes.setdefault(name, set()).add(np.shape(value)[1:])
            if isinstance(value, bool | int | float):
                problems.append(f"{name} of a batch is a Python number, which is weakly typed: make it an array.")
    for name, found in shapes.items():
        if len(found) > 1:
            listed = some([str(list(shape)) for shape in sorted(found)], 4)
            problems.append(f"rows of {name} have {len(found)} shapes ({listed}): each is compiled. Pad them to one.")
    leaves = jax.tree_util.tree_leaves_with_path(run.backend.state)
    weak = [jax.tree_util.keystr(path, simple=True, separator="/") for path, leaf in leaves if _is_weak(leaf)]
    if weak:
        problems.append(f"{some(weak)} of the state is weakly typed after a step (a Python number): give it a dtype.")
    compilations = getattr(run.backend._train_step, "compilations", None)
    sizes = {batch.size for batch in batches[:1]}
    if compilations is not None and compilations.count > len(sizes):
        problems.append(f"{compilations.count} compilations for batches of one shape; the log says what changed.")
    report.add("recompilation", list(dict.fromkeys(problems)), "steps have arguments of one shape and type", "warning")


def _evaluation(run: JaxRun, report: CheckReport) -> None:
    """One batch of each validation set: the metrics are there, finite, and the monitored one is among them."""
    if run.val_source is None:
        return
    metrics: dict[str, float] = {}
    try:
        for name, source in run.val_sources.items():
            batches = islice(source.batches(0), 1)
            found, _ = evaluate(run.backend, batches, run.backend.eval_step, False, None, run.process_group)
            found |= {} if run._derive is None else run._derive(found)
            metrics |= {metric_name(metric, name): value for metric, value in found.items()}
    except Exception as error:
        if not run.process_group.is_single_process:
            raise
        report.add("evaluation", [words(error)], "")
        return
    problems = [f"{name} is {value}." for name, value in metrics.items() if not math.isfinite(value)]
    monitors = {run.settings.monitor_metric: "metric_for_best_model"} if run.settings.save_best else {}
    monitors |= {m: type(cb).__name__ for cb in run.callbacks if isinstance(m := getattr(cb, "monitor", None), str)}
    added = {name for callback in run.callbacks for name in getattr(callback, "metric_names", ())}
    for name, who in monitors.items():
        if name.startswith("val/") and name not in metrics and name not in added:
            problems.append(f"{who} looks for {name!r}, which is not among {sorted(metrics)}.")
    report.add("evaluation", problems, "metrics: " + ", ".join(sorted(metrics)))


# -- trial steps ---------------------------------------------------------------------------------------------------


def _placed(run: JaxRun, batch: HostBatch) -> DeviceBatch:
    return next(run.backend.feed(iter([batch]), train=True))


def _step(run: JaxRun, batch: HostBatch) -> Any:
    """One update on a batch, without hooks; what the step returned besides the state."""
    backend = run.backend
    backend.state, output = backend._train_step(backend.state, _placed(run, batch).data)
    return output


def _micro_batch(run: JaxRun, batch: HostBatch) -> dict[str, Any]:
    """The rows of a batch that are on the devices at once, if gradients are accumulated; without the sources."""
    data = {name: array for name, array in _placed(run, batch).data.items() if name != SOURCE}
    rows = max(1, run.settings.batch_size // run.settings.micro_batches)
    return {name: array[:rows] if np.ndim(array) else array for name, array in data.items()}


def _perturbed(state: Any) -> Any:
    """The state with a little noise on its parameters."""
    random = np.random.default_rng(0)

    def noisy(leaf: Any) -> Any:
        if not jnp.issubdtype(leaf.dtype, jnp.floating):
            return leaf
        noise = (_NOISE * random.standard_normal(leaf.shape)).astype(np.float32)
        return jax.device_put((leaf + noise).astype(leaf.dtype), leaf.sharding)

    return state.replace(params=jax.tree.map(noisy, state.params))


def _shape_of(leaf: Any) -> Any:
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=leaf.sharding)


def _named_params(state: Any) -> dict[str, Any]:
    leaves = jax.tree_util.tree_leaves_with_path(getattr(state, "params", state))
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in leaves}


def _is_weak(leaf: Any) -> bool:
    return bool(getattr(leaf, "weak_type", False))


def _is_float(array: Any) -> bool:
    return bool(jnp.issubdtype(np.asarray(array).dtype if not hasattr(array, "dtype") else array.dtype, jnp.floating))


# -- memory ----------------------------------------------------------------------------------------------------------


def _planned_bytes(run: JaxRun, batch: HostBatch) -> int | None:
    """Bytes of a step per device: arguments, results and temporary buffers; None if the step is not ours."""
    step = run.backend._train_step
    if not isinstance(step, JittedStep):
        return None
    data = _placed(run, batch).data
    compiled = step.compiled(run.backend.state, data)
    planned: Any = compiled.memory_analysis()
    if planned is None:
        return None
    sizes = planned.argument_size_in_bytes + planned.output_size_in_bytes + planned.temp_size_in_bytes
    return int(sizes - planned.alias_size_in_bytes)


def _device_bytes() -> int | None:
    """Memory of a device; of CPUs the part of each in the memory of the machine."""
    device = jax.local_devices()[0]
    if device.platform != "cpu":
        return (device.memory_stats() or {}).get("bytes_limit")
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // len(jax.local_devices())
    except (ValueError, OSError, AttributeError):  # not on Windows
        return None


def _size(count: int) -> str:
    unit, size = next((u, s) for u, s in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)) if count >= s or u == "kB")
    return f"{count / size:.2f} {unit}"
