"""Starts training processes, kills and restarts them, and compares the result with an uninterrupted run."""

import json
import os
import random
import shutil
import signal
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch
from victim import SAMPLES, Case, start

from file_operations import BLOCKED
from forking import SERVER
from trainformer.checkpointing import CheckpointStore
from trainformer.checkpointing.torch_files import read_component
from trainformer.loggers.jsonl import read_jsonl

_TIMEOUT = 280  # below that of the tests, for a better message


# -- processes ---------------------------------------------------------------------------------------------


def launch(case: Case, folder: Path):
    """Start a process that trains in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    process = SERVER.Process(target=start, args=(case, str(folder)))
    process.start()
    return process


def finish(process, folder: Path) -> int:
    """Wait for a process to end; its exit code."""
    process.join(_TIMEOUT)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"the process did not end within {_TIMEOUT} s:\n{output(folder)}")
    return process.exitcode


def complete(case: Case, folder: Path) -> Path:
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


@dataclass
class Tally:
    """What was done to one run, or to many."""

    kills: int = 0
    inside_saves: int = 0
    inside_deletions: int = 0
    starts: int = 0
    runs: int = 0
    differences: list[str] = field(default_factory=list)

    def note_kill(self, folder: Path) -> None:
        """Count a kill, and check what it left behind."""
        self.kills += 1
        self.inside_saves += bool(drafts(folder))
        self.inside_deletions += bool(drafts(folder, "deleting"))

    def __iadd__(self, other: "Tally") -> "Tally":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


def drafts(folder: Path, kind: str = "writing") -> list[str]:
    """Names of partial checkpoints that are being written (or deleted), or were when the process was killed."""
    roots = [folder / "run", *folder.glob("runs/*")]
    names = [name for root in roots if (root / "checkpoints").is_dir() for name in os.listdir(root / "checkpoints")]
    return [name for name in names if name.startswith(f".{kind}-")]


def kill_in_step(case: Case, folder: Path, steps: int, seconds: float) -> bool:
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
    return _kill(process, folder)


def kill_in_save(case: Case, folder: Path, save: int = 1, sync: int = 1, seconds: float = 0.0) -> bool:
    """Run a case and kill it at the n-th fsync of its k-th save; False if it ended before.

    The process blocks there until it is killed. An asynchronous save blocks in its thread: training continues for some
    `seconds` before the kill.
    """
    marker = folder / BLOCKED
    marker.unlink(missing_ok=True)
    process = launch(replace(case, block_in_save=(save, sync)), folder)
    if wait_for(marker.exists, process):
        time.sleep(seconds)
        assert drafts(folder), "a process that blocks in a save has a partial checkpoint"
    return _kill(process, folder)


def kill_at_operation(case: Case, folder: Path, operation: int) -> bool:
    """Run a case that dies at its n-th file operation; False if it has fewer."""
    code = finish(launch(replace(case, die_at=operation, pause=0), folder), folder)
    assert code in (0, -signal.SIGKILL), f"exit code {code}:\n{output(folder)}"
    return code != 0


def _kill(process, folder: Path) -> bool:
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    code = finish(process, folder)
    assert code in (0, -signal.SIGKILL), f"exit code {code}:\n{output(folder)}"
    return code != 0


def kill_somehow(case: Case, folder: Path, rng: random.Random, way: str, operations: int) -> bool:
    """Run a case and kill it at a random moment of one kind; False if it ended before."""
    if way == "save":  # there are at least 12 fsyncs in a save
        return kill_in_save(case, folder, rng.randint(1, 3), rng.randint(1, 12), rng.uniform(0, 0.1))
    if way == "end":  # the last log point, evaluation, save and the status; of a run that was not killed before
        return kill_at_operation(case, folder, rng.randint(operations - 50, operations))
    if way == "operation":
        return kill_at_operation(case, folder, rng.randint(1, operations // 2))
    return kill_in_step(case, folder, rng.randint(0, 12), rng.uniform(0, 0.03))


def kill_repeatedly(case: Case, root: Path, reference: Path, rng: random.Random, kills: int, most: int = 6) -> Tally:
    """Kill runs of a case, each up to `most` times, until there were `kills`; compare each with the reference."""
    operations = json.loads((reference / "end.json").read_text())["operations"]
    tally = Tally()
    while tally.kills < kills:
        folder = root / f"run-{tally.runs:04d}"
        first_way = None if tally.runs else "save"
        tally += _kill_run(case, folder, rng, min(most, kills - tally.kills), operations, first_way)
        found = differences(reference, folder)
        tally.differences += [f"{folder.name}: {difference}" for difference in found]
        if not found:
            shutil.rmtree(folder)
    return tally


def _kill_run(
    case: Case, folder: Path, rng: random.Random, most: int, operations: int, first_way: str | None = None
) -> Tally:
    tally = Tally(runs=1)
    for number in range(most):
        ways = ("save", "operation", "step") if number else ("end", "save", "operation", "step")
        # The first kill of all is inside a save, as the rest of the sequence depends on how far each process gets.
        way = rng.choice(ways) if number or first_way is None else first_way
        tally.starts += 1
        if not kill_somehow(case, folder, rng, way, operations):
            return tally
        tally.note_kill(folder)
    tally.starts += 1
    complete(case, folder)
    return tally


# -- comparing ---------------------------------------------------------------------------------------------


def differences(reference: Path, other: Path, retention: bool = True) -> list[str]:
    """All differences between two runs, as text, except times.

    `retention`: whether the same checkpoints must have been kept.
    """
    found = compare_states(final_state(reference), final_state(other))
    found += compare_records(records(reference), records(other))
    if trained_on(reference) != trained_on(other):
        found.append("a step was trained on different samples")
    found += check_epochs(other)
    if retention and (kept(reference) != kept(other)):
        found.append(f"kept checkpoints: {kept(reference)} and {kept(other)}")
    leftovers = [p.name for p in run_folder(other).glob("**/.*") if "dataset" not in p.name]
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
    newest = CheckpointStore(run_folder(folder) / "checkpoints").newest()
    assert newest is not None, f"there is no checkpoint in {folder}:\n{output(folder)}"
    components = newest.manifest.components.items()
    return {
        key: without_clock(read_component(newest.path, [f.name for f in files], newest.manifest.formats[key]))
        for key, files in components
    }


def records(folder: Path) -> list[dict]:
    """The records of metrics.jsonl, without times."""
    return [without_clock(record) for record in read_jsonl(run_folder(folder) / "metrics.jsonl")]


def kept(folder: Path) -> dict[str, dict]:
    """The checkpoints that exist at the end, with their metrics."""
    return {c.path.name: c.manifest.metrics for c in CheckpointStore(run_folder(folder) / "checkpoints").checkpoints()}


def trained_on(folder: Path) -> dict[int, tuple[int, list[int]]]:
    """The epoch and the samples of each step; of a repeated step, the last time counts."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return {line["step"]: (line["epoch"], line["samples"]) for line in lines}


def check_epochs(folder: Path) -> list[str]:
    """Every epoch saw each sample exactly once, except the last, which may be incomplete."""
    epochs: dict[int, Counter] = {}
    for epoch, samples in trained_on(folder).values():
        epochs.setdefault(epoch, Counter()).update(samples)
    once = Counter(range(SAMPLES))
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
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def without_clock(tree):
    """The tree without times, throughput, and memory use."""
    if isinstance(tree, dict):
        return {k: without_clock(v) for k, v in tree.items() if not _is_clock(k)}
    return type(tree)(map(without_clock, tree)) if isinstance(tree, (list, tuple)) else tree


def _is_clock(name) -> bool:
    others = ("_per_second", "save_seconds", "memory_gb")
    return isinstance(name, str) and (name in ("time", "seconds") or name.endswith(others))
