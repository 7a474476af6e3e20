"""Starts training processes, kills and restarts them, and compares the result with an uninterrupted run.

A case is a dataclass with faults (`pause`, `die_at`, `block_in_save`) and two methods: `start(folder)` trains in a
forked process, `differences(reference, other)` compares two finished folders.
"""

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from victim import SAMPLES

from file_operations import BLOCKED, PHASE, is_draft, last_phase, phase_file
from forking import SERVER
from trainformer.checkpointing import CheckpointStore
from trainformer.checkpointing.store import checkpoints_folder
from trainformer.checkpointing.torch_files import read_component
from trainformer.loggers.jsonl import read_jsonl

_TIMEOUT = 280  # below that of the tests, for a better message


# -- processes ---------------------------------------------------------------------------------------------


def launch(case, folder: Path):
    """Start a process that trains in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for path in [*folder.glob(f"{PHASE}*"), folder / BLOCKED]:
        path.unlink(missing_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    process = SERVER.Process(target=case.start, args=(str(folder),))
    process.start()
    return process


def finish(process, folder: Path) -> int:
    """Wait for a process to end; its exit code."""
    process.join(_TIMEOUT)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"the process did not end within {_TIMEOUT} s:\n{output(folder)}")
    return process.exitcode


def complete(case, folder: Path) -> Path:
    """Run a case to its end; if it fails, the error shows the output of the process."""
    code = finish(launch(case, folder), folder)
    assert code == 0, f"exit code {code}:\n{output(folder)}"
    return folder


def output(folder: Path) -> str:
    """The end of the output of the processes of a folder."""
    path = folder / "output.txt"
    return path.read_text()[-4000:] if path.exists() else ""


def wait_for(condition: Callable[[], object], process=None, seconds: float = _TIMEOUT) -> bool:
    """Wait for a condition; False if the process ended before."""
    deadline = time.monotonic() + seconds
    while not condition():
        if process is not None and not process.is_alive():
            return False
        assert time.monotonic() < deadline, "timed out"
        time.sleep(0.002)
    return True


# -- killing -----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kill:
    """One kill: the way it was done, and what the process was doing."""

    way: str
    phase: str
    step: int


@dataclass
class Tally:
    """What was done to the runs of a case."""

    kills: list[Kill] = field(default_factory=list)
    runs: int = 0
    differences: list[str] = field(default_factory=list)


def drafts(folder: Path, kind: str = "writing") -> list[str]:
    """Partial checkpoints that are being written (or deleted), or were when the process was killed."""
    places = [folder / "run", folder / "run/checkpoints", folder / "ws/checkpoints", *folder.glob("runs/*/checkpoints")]
    return [name for place in places if place.is_dir() for name in os.listdir(place) if is_draft(name, kind)]


def phase_of_kill(folder: Path, before: Collection[str] = (), rank: int = 0) -> tuple[str, int]:
    """What a process was doing when it was killed, and in which step; `before`: partial checkpoints of earlier ones."""
    phase, step = last_phase(folder, phase_file(rank))
    if (folder / BLOCKED).exists():  # the other ranks may have deleted the partial checkpoint since then
        return "save", step
    if phase == "start-up":
        return ("resume" if has_checkpoint(folder) else phase), step
    if phase in ("step", "evaluation"):
        for kind, name in (("writing", "save"), ("deleting", "delete")):
            if set(drafts(folder, kind)) - set(before):
                return name, step
    return phase, step


def has_checkpoint(folder: Path) -> bool:
    """Whether there is a checkpoint to resume from."""
    names = "step_*", "checkpoint-*", "checkpoint_step_*"
    places = "run", "run/checkpoints", "ws/checkpoints", "runs/*/checkpoints"
    return any(True for place in places for name in names for _ in folder.glob(f"{place}/{name}"))


def kill_in_step(case, folder: Path, steps: int, seconds: float) -> bool:
    """Run a case and kill it some time after it has made a number of steps; False if it ended before."""
    path = folder / "samples.jsonl"
    size = path.stat().st_size if path.exists() else 0
    process = launch(case, folder)

    def reached() -> bool:
        if not path.exists():
            return False
        with path.open("rb") as file:
            file.seek(size)
            return file.read().count(b"\n") >= steps

    if wait_for(reached, process):
        time.sleep(seconds)
    return _kill(case, process, folder)


def kill_after(case, folder: Path, seconds: float) -> bool:
    """Run a case and kill it after some time; False if it ended before."""
    process = launch(case, folder)
    process.join(seconds)
    return _kill(case, process, folder)


def kill_in_save(case, folder: Path, save: int = 1, sync: int = 1, seconds: float = 0.0) -> bool:
    """Run a case and kill it at the n-th fsync of its k-th save; False if it ended before.

    The process blocks there until it is killed. An asynchronous save blocks in its thread: training continues for some
    `seconds` before the kill.
    """
    process = launch(replace(case, block_in_save=(save, sync)), folder)
    if wait_for((folder / BLOCKED).exists, process):
        time.sleep(seconds)
        assert drafts(folder), "a process that blocks in a save has a partial checkpoint"
    return _kill(case, process, folder)


def kill_at_event(case, folder: Path, event: int | tuple[str, int]) -> bool:
    """Run a case that dies at a file operation or another event, see `Watch`; False if it does not get there."""
    return _is_killed(launch(replace(case, die_at=event, pause=0), folder), folder)


def _kill(case, process, folder: Path) -> bool:
    if process.is_alive():
        getattr(case, "kill", kill)(process.pid, folder)
    return _is_killed(process, folder)


def kill(process: int, folder: Path) -> None:
    """Kill a process."""
    os.kill(process, signal.SIGKILL)


def kill_group(process: int) -> None:
    """Kill a process and its children; it may be too young to have a group."""
    for end in (os.killpg, os.kill):
        with suppress(ProcessLookupError):
            end(process, signal.SIGKILL)


def _is_killed(process, folder: Path) -> bool:
    code = finish(process, folder)
    assert code in (0, -signal.SIGKILL), f"exit code {code}:\n{output(folder)}"
    return code != 0


def kill_somehow(case, folder: Path, rng: random.Random, way: str, events: dict[str, Any]) -> bool:
    """Run a case and kill it at a random moment of one kind; False if it ended before."""
    operations = events["operation"]
    if way == "save":
        sync = rng.randint(1, getattr(case, "syncs", 12))  # there are at least 12 fsyncs in a save
        return kill_in_save(case, folder, rng.randint(1, 2), sync, rng.uniform(0, 0.1))
    if way == "end":  # the last log point, evaluation, save and the status; of a run that was not killed before
        return kill_at_event(case, folder, rng.randint(operations - 50, operations))
    if way == "operation":
        return kill_at_event(case, folder, rng.randint(1, operations // 4))
    if way == "time":
        return kill_after(case, folder, rng.uniform(0, events["seconds"] / 2))
    if way == "step":
        return kill_in_step(case, folder, rng.randint(0, 8), rng.uniform(0, 0.03))
    return kill_at_event(case, folder, (way, rng.randint(1, max(1, min(25, events[way] // 4)))))


WAYS = "save", "operation", "time", "step", "start-up", "rename", "delete", "evaluation"


def kill_run(case, folder: Path, rng: random.Random, most: int, events: dict[str, Any], first="") -> Iterator[Kill]:
    """Kill a run up to `most` times, unless it ends before; then let it end."""
    ways = ["end", *(way for way in WAYS if way in ("save", "time") or events.get(way))]
    ways = list(getattr(case, "ways", ways))
    for number in range(most):
        way = first if first and not number else rng.choice(ways[1:] if number and ways[0] == "end" else ways)
        before = [*drafts(folder), *drafts(folder, "deleting")]
        if not kill_somehow(case, folder, rng, way, events):
            return
        yield Kill(way, *phase_of_kill(folder, before, getattr(case, "victim", 0)))
        if any(json.loads(path.read_text())["status"] == "finished" for path in folder.glob("runs/*/status.json")):
            for lock in folder.glob("runs/*/.lock"):
                lock.unlink()  # held to the very end
            return  # killed after its end; an unnamed run would begin again
    complete(case, folder)


def kill_repeatedly(case, root: Path, reference: Path, rng: random.Random, kills: int, most: int = 6) -> Tally:
    """Kill runs of a case, each up to `most` times, until there were `kills`; compare each with the reference."""
    tally = Tally()
    while len(tally.kills) < kills:
        folder = root / f"run-{tally.runs:04d}"
        # The first kill of all is inside a save, as the rest of the sequence depends on how far each process gets.
        first = "" if tally.runs else "save"
        tally.kills += kill_run(case, folder, rng, min(most, kills - len(tally.kills)), events_of(reference), first)
        found = case.differences(reference, folder)
        tally.runs += 1
        tally.differences += [f"{folder.name}: {difference}" for difference in found]
        if not found:
            shutil.rmtree(folder)
    return tally


def events_of(folder: Path) -> dict[str, Any]:
    """How many events of each kind there were in the last process of a run, see `Watch`, and how long it took."""
    return json.loads((folder / "end.json").read_text())["events"]


# -- comparing ---------------------------------------------------------------------------------------------


def differences(
    reference: Path,
    other: Path,
    retention: bool = True,
    state_of: Callable | None = None,
    samples: int | None = SAMPLES,
) -> list[str]:
    """All differences between two runs, as text, except times.

    `retention`: whether the same checkpoints must have been kept. `state_of` reads the newest checkpoint. `samples` is
    the number of them per epoch.
    """
    state_of = state_of or final_state
    found = compare_states(state_of(reference), state_of(other))
    found += compare_records(records(reference), records(other))
    if trained_on(reference) != trained_on(other):
        found.append("a step was trained on different samples")
    if samples is not None:
        found += check_epochs(other, samples)
    if retention and (kept(reference) != kept(other)):
        found.append(f"kept checkpoints: {kept(reference)} and {kept(other)}")
    # `trainformer.hf` begins a new log folder in every process, and leaves those of others as they are.
    hidden = [p for p in run_folder(other).glob("**/.*") if "dataset" not in p.name]
    leftovers = [p.name for p in hidden if p.parent.parent.name != "runs" or run_folder(other) == p.parent]
    if leftovers:
        found.append(f"left behind: {leftovers}")
    return found


def run_folder(folder: Path) -> Path:
    """The folder of the one run in a working directory that has checkpoints."""
    if (folder / "run").exists():
        return folder / "run"
    begun = [path for path in (folder / "runs").iterdir() if any(path.glob("checkpoints/step_*"))]
    assert len(begun) == 1, f"expected one run with checkpoints, found {[p.name for p in begun]}"
    return begun[0]


def final_state(folder: Path) -> dict:
    """All components of the newest checkpoint, without times."""
    newest = CheckpointStore(checkpoints_folder(run_folder(folder))).newest()
    assert newest is not None, f"there is no checkpoint in {folder}:\n{output(folder)}"
    return {
        key: without_clock(_component(newest.path, [f.name for f in files], newest.manifest.formats.get(key)))
        for key, files in newest.manifest.components.items()
    }


def _component(folder: Path, names: list[str], format: str | None):
    if format is None:  # files that a resume does not read
        return {name: json.loads((folder / name).read_text()) for name in names if name.endswith(".json")}
    if format == "sharded":
        return read_component(folder, names, format).unsharded()
    if format == "weights":
        return read_component(folder, names, format)
    return {name: read_component(folder, [name], format) for name in names}  # one per rank


def records(folder: Path) -> list[dict]:
    """The records of metrics.jsonl, without times."""
    if (run_folder(folder) / "metrics.jsonl").exists():
        return [without_clock(record) for record in read_jsonl(run_folder(folder) / "metrics.jsonl")]
    # One file per process: of a repeated record, the last one counts.
    found = {}
    for path in sorted(run_folder(folder).glob("runs/*/metrics.jsonl")):
        for record in map(without_clock, read_jsonl(path)):
            found[record["step"], *sorted(record)] = record
    return [found[key] for key in sorted(found)]


def kept(folder: Path) -> dict[str, dict]:
    """The checkpoints that exist at the end, with their metrics."""
    return {
        c.path.name: without_clock(c.manifest.metrics)
        for c in CheckpointStore(checkpoints_folder(run_folder(folder))).checkpoints()
    }


def trained_on(folder: Path) -> dict[int, tuple[int, list]]:
    """The epoch and the samples of each step, of all ranks; of a repeated step, the last time counts."""
    found: dict[int, tuple[int, list]] = {}
    for path in sorted(folder.glob("samples*.jsonl")):
        lines = {line["step"]: line for line in map(json.loads, path.read_text().splitlines())}
        for step, line in lines.items():
            found[step] = line["epoch"], found.get(step, (0, []))[1] + line["samples"]
    return found


def check_epochs(folder: Path, samples: int = SAMPLES) -> list[str]:
    """Every epoch saw each sample exactly once, except the last, which may be incomplete."""
    epochs: dict[int, Counter] = {}
    for epoch, seen in trained_on(folder).values():
        epochs.setdefault(epoch, Counter()).update(seen)
    once = Counter(range(samples))
    wrong = [e for e, seen in epochs.items() if (seen != once if e < max(epochs) else bool(seen - once))]
    return [f"in the epochs {wrong} not every sample was seen once"] if wrong else []


def compare_states(ours: dict, theirs: dict) -> list[str]:
    """The components that are not bitwise equal."""
    return [key for key in sorted(ours.keys() | theirs.keys()) if not equal(ours.get(key), theirs.get(key))]


def compare_records(ours: list[dict], theirs: list[dict]) -> list[str]:
    """The first record that differs, and steps that are duplicated or missing."""
    if ours == theirs:
        return []

    def steps(of: list[dict]) -> Counter:
        return Counter((r["step"], "train" if "train/loss" in r else "val") for r in of)

    first = next((i for i, (a, b) in enumerate(zip(ours, theirs, strict=False)) if a != b), min(len(ours), len(theirs)))
    return [
        f"metrics.jsonl: missing {dict(steps(ours) - steps(theirs))}, too many {dict(steps(theirs) - steps(ours))}; "
        f"record {first}: {ours[first : first + 1]} and {theirs[first : first + 1]}"
    ]


def equal(a, b) -> bool:
    """Whether two trees are equal, tensors bitwise."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, Mapping) and isinstance(b, Mapping):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def without_clock(tree):
    """The tree without times, throughput, and memory use."""
    if isinstance(tree, Mapping):
        return {k: without_clock(v) for k, v in tree.items() if not _is_clock(k)}
    return type(tree)(map(without_clock, tree)) if isinstance(tree, (list, tuple)) else tree


def _is_clock(name) -> bool:
    # The number of compilations depends on the process, like times; so does what it resumes from in `trainformer.hf`.
    exactly = ("time", "seconds", "run_dir", "save_dir", "logging_dir", "resume", "train/recompilations")
    ends = ("_per_second", "save_seconds", "memory_gb", "runtime")
    return isinstance(name, str) and (name in exactly or name.endswith(ends))
