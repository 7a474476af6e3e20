"""Starts training processes, kills them, starts them again, and compares what comes out with a run left in peace."""

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

from forking import SERVER
from trainformer.checkpointing import CheckpointStore
from trainformer.checkpointing.torch_files import read_component
from trainformer.loggers.jsonl import read_jsonl

_MOST_SECONDS = 120


# -- processes ---------------------------------------------------------------------------------------------


def launch(case: Case, folder: Path):
    """Start a process that trains in a folder."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    process = SERVER.Process(target=start, args=(case, str(folder)))
    process.start()
    return process


def finish(process, folder: Path) -> int:
    """Wait for the end of a process; its exit code."""
    process.join(_MOST_SECONDS)
    if process.exitcode is None:
        process.kill()
        raise AssertionError(f"the process did not end within {_MOST_SECONDS} s:\n{output(folder)}")
    return process.exitcode


def complete(case: Case, folder: Path) -> Path:
    """Run a case to its end; anything but success is an error that shows what the process said."""
    code = finish(launch(case, folder), folder)
    assert code == 0, f"exit code {code}:\n{output(folder)}"
    return folder


def output(folder: Path) -> str:
    """The last words of the processes of a folder."""
    path = folder / "output.txt"
    return path.read_text()[-4000:] if path.exists() else ""


def wait_for(condition: Callable[[], object], process=None, seconds: float = 30.0) -> bool:
    """Wait until something is so; False if the process ended before."""
    until = time.monotonic() + seconds
    while not condition():
        if process is not None and not process.is_alive():
            return False
        assert time.monotonic() < until, "waited in vain"
        time.sleep(0.001)
    return True


# -- killing -----------------------------------------------------------------------------------------------


@dataclass
class Tally:
    """What was done to the victims of one run, or of many."""

    kills: int = 0
    inside_saves: int = 0
    inside_deletions: int = 0
    starts: int = 0
    runs: int = 0
    differences: list[str] = field(default_factory=list)

    def note_kill(self, folder: Path) -> None:
        """Count a kill, and look at what it left behind."""
        self.kills += 1
        self.inside_saves += bool(drafts(folder))
        self.inside_deletions += bool(drafts(folder, "deleting"))

    def __iadd__(self, other: "Tally") -> "Tally":
        for name, value in vars(other).items():
            setattr(self, name, getattr(self, name) + value)
        return self


def drafts(folder: Path, kind: str = "writing") -> list[str]:
    """Names of checkpoints that are being written (or deleted), or were when the process was killed."""
    roots = [folder / "run", *folder.glob("runs/*")]
    names = [name for root in roots if (root / "checkpoints").is_dir() for name in os.listdir(root / "checkpoints")]
    return [name for name in names if name.startswith(f".{kind}-")]


def kill_after(case: Case, folder: Path, seconds: float) -> bool:
    """Run a case and kill it after some time; False if it came to its end before."""
    process = launch(case, folder)
    process.join(seconds)
    return _kill(process, folder)


def kill_in_save(case: Case, folder: Path, seconds: float, number: int = 1) -> bool:
    """Run a case and kill it some time after its n-th save began; False if it came to its end before."""
    process, own = launch(case, folder), set()

    def reached() -> bool:
        # What an earlier victim left is there until the new one clears it away: only drafts of this one count.
        own.update(name for name in drafts(folder) if name.endswith(f"-{process.pid}"))
        return len(own) >= number

    if wait_for(reached, process, _MOST_SECONDS):
        time.sleep(seconds)
    return _kill(process, folder)


def kill_at_operation(case: Case, folder: Path, operation: int) -> bool:
    """Run a case that dies at its n-th file operation; False if it has fewer."""
    code = finish(launch(replace(case, die_at=operation, slow=0, pause=0), folder), folder)
    assert code in (0, -signal.SIGKILL), f"exit code {code}:\n{output(folder)}"
    return code != 0


def _kill(process, folder: Path) -> bool:
    if process.is_alive():
        os.kill(process.pid, signal.SIGKILL)
    code = finish(process, folder)
    assert code in (0, -signal.SIGKILL), f"exit code {code}:\n{output(folder)}"
    return code != 0


def kill_somehow(case: Case, folder: Path, rng: random.Random, way: str, operations: int) -> bool:
    """Run a case and kill it at a random moment of one kind; False if it came to its end before."""
    if way == "save":
        return kill_in_save(case, folder, rng.uniform(0, 10 * case.slow), rng.randint(1, 3))
    if way == "end":  # the last record, evaluation, save and the status; of a run that was not killed before
        return kill_at_operation(case, folder, rng.randint(operations - 50, operations))
    if way == "operation":
        return kill_at_operation(case, folder, rng.randint(1, operations // 2))
    return kill_after(case, folder, rng.uniform(0.05, 0.9))


def torment(case: Case, root: Path, reference: Path, rng: random.Random, kills: int, most: int = 6) -> Tally:
    """Kill runs of a case until there were so many kills, each run up to `most` times; compare each in the end."""
    operations = json.loads((reference / "end.json").read_text())["operations"]
    tally = Tally()
    while tally.kills < kills:
        folder = root / f"run-{tally.runs:04d}"
        tally += _torment_one(case, folder, rng, min(most, kills - tally.kills), operations)
        found = differences(reference, folder)
        tally.differences += [f"{folder.name}: {difference}" for difference in found]
        if not found:
            shutil.rmtree(folder)
    return tally


def _torment_one(case: Case, folder: Path, rng: random.Random, most: int, operations: int) -> Tally:
    tally = Tally(runs=1)
    for number in range(most):
        ways = ("save", "operation", "time") if number else ("end", "save", "operation", "time")
        tally.starts += 1
        if not kill_somehow(case, folder, rng, rng.choice(ways), operations):
            return tally
        tally.note_kill(folder)
    tally.starts += 1
    complete(case, folder)
    return tally


# -- comparing ---------------------------------------------------------------------------------------------


def differences(reference: Path, other: Path, retention: bool = True) -> list[str]:
    """Everything in which two runs differ, in words; nothing that the clock alone decides.

    `retention`: whether the same checkpoints must have been kept.
    """
    found = compare_states(final_state(reference), final_state(other))
    found += compare_records(records(reference), records(other))
    if trained_on(reference) != trained_on(other):
        found.append("a step was trained on other samples")
    found += check_epochs(other)
    if retention and (kept(reference) != kept(other)):
        found.append(f"kept checkpoints: {kept(reference)} and {kept(other)}")
    leftovers = [p.name for p in run_folder(other).glob("**/.*") if "dataset" not in p.name]
    if leftovers:
        found.append(f"left behind: {leftovers}")
    return found


def run_folder(folder: Path) -> Path:
    """The folder of the one run in a working directory that got anywhere."""
    if (folder / "run").exists():
        return folder / "run"
    begun = [path for path in (folder / "runs").iterdir() if any(path.glob("checkpoints/step_*"))]
    assert len(begun) == 1, f"expected one run with checkpoints, found {[p.name for p in begun]}"
    return begun[0]


def final_state(folder: Path) -> dict:
    """All components of the newest checkpoint, without what depends on the clock."""
    newest = CheckpointStore(run_folder(folder) / "checkpoints").newest()
    assert newest is not None, f"there is no checkpoint in {folder}:\n{output(folder)}"
    components = newest.manifest.components.items()
    return {
        key: without_clock(read_component(newest.path, [f.name for f in files], newest.manifest.formats[key]))
        for key, files in components
    }


def records(folder: Path) -> list[dict]:
    """The records of metrics.jsonl, without what depends on the clock."""
    return [without_clock(record) for record in read_jsonl(run_folder(folder) / "metrics.jsonl")]


def kept(folder: Path) -> dict[str, dict]:
    """The checkpoints that are there in the end, with their metrics."""
    return {c.path.name: c.manifest.metrics for c in CheckpointStore(run_folder(folder) / "checkpoints").checkpoints()}


def trained_on(folder: Path) -> dict[int, tuple[int, list[int]]]:
    """For each step its epoch and samples; of a step that was done again, what counts is the last time."""
    lines = [json.loads(line) for line in (folder / "samples.jsonl").read_text().splitlines()]
    return {line["step"]: (line["epoch"], line["samples"]) for line in lines}


def check_epochs(folder: Path) -> list[str]:
    """Every epoch but the last, which may have been cut short, saw each sample once."""
    epochs: dict[int, Counter] = {}
    for epoch, samples in trained_on(folder).values():
        epochs.setdefault(epoch, Counter()).update(samples)
    once = Counter(range(SAMPLES))
    wrong = [e for e, seen in epochs.items() if (seen != once if e < max(epochs) else bool(seen - once))]
    return [f"in the epochs {wrong} not every sample was seen once"] if wrong else []


def compare_states(ours: dict, theirs: dict) -> list[str]:
    """Which components differ, to the last bit."""
    return [key for key in sorted(ours.keys() | theirs.keys()) if not equal(ours.get(key), theirs.get(key))]


def compare_records(ours: list[dict], theirs: list[dict]) -> list[str]:
    """The first record that differs; steps that are there twice or not at all."""
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
    """Whether two trees are the same, tensors to the last bit."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)):
        return len(a) == len(b) and all(equal(x, y) for x, y in zip(a, b, strict=True))
    return type(a) is type(b) and a == b


def without_clock(tree):
    """The tree without times, speeds, durations, and how much memory a process happens to hold."""
    if isinstance(tree, dict):
        return {k: without_clock(v) for k, v in tree.items() if not _is_clock(k)}
    return type(tree)(map(without_clock, tree)) if isinstance(tree, (list, tuple)) else tree


def _is_clock(name) -> bool:
    others = ("_per_second", "save_seconds", "memory_gb")
    return isinstance(name, str) and (name in ("time", "seconds") or name.endswith(others))
