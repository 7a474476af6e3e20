"""Feed every reader with damaged and hostile files, and see whether it fails in any way but with our own errors.

Each case is a valid file, made on the spot, with random changes of its bytes or of its structure (fields dropped,
doubled, renamed, of another type; hostile members of archives; sizes of 2^60; nesting of 100,000 levels; digests that
fit the forgery). A case passes if the file is read, refused with an error of trainformer, or skipped with a warning.
Anything else, a hang, a crash, or more than the allowed memory is a failure, and the input is kept for `--replay`.

    python benchmarks/fuzz.py --cases 100000
    python benchmarks/fuzz.py --cases 5000 --only manifests --seed 7
    python benchmarks/fuzz.py --replay fuzz-failures/manifests-123.json
"""

from __future__ import annotations

import argparse
import base64
import faulthandler
import json
import logging
import multiprocessing
import os
import random
import resource
import shutil
import sys
import tempfile
import time
import traceback
import warnings
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent))

from fuzz_mutations import mutate
from fuzz_readers import READERS, Reader
from rich.console import Console
from rich.table import Table

from trainformer.core.errors import TrainformerError

SECONDS = 60.0  # per case: a loaded machine is slow, a hang is for ever
MEMORY = 3 << 30  # address space per reader, in addition to what the process has when it starts
OUTCOMES = ("accepted", "refused", "skipped", "failed")


@dataclass
class Tally:
    """The cases of one reader."""

    outcomes: Counter[str] = field(default_factory=Counter)
    errors: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)
    slowest: float = 0.0
    memory: int = 0
    failures: list[Path] = field(default_factory=list)

    @property
    def cases(self) -> int:
        return self.outcomes.total()


class Folder:
    """A folder with the valid files of a reader, to which each case makes one change that is undone afterwards."""

    def __init__(self, name: str, root: Path) -> None:
        self.reader = READERS[name]
        self.path = root / "case"
        self.path.mkdir(parents=True)
        self.reader.make(self.path)
        self.valid = {str(path.relative_to(self.path)): path.read_bytes() for path in self._files()}
        self.stamps = self._stamps()
        found = {str(p.relative_to(self.path)) for pattern in self.reader.targets for p in self.path.glob(pattern)}
        self.targets = sorted(found & self.valid.keys())
        assert self.targets, name

    def _files(self) -> list[Path]:
        return [path for path in self.path.rglob("*") if path.is_file() and not path.is_symlink()]

    def change(self, rng: random.Random) -> str:
        """Write a mutated file; its name."""
        name = rng.choice(self.targets)
        self.write(name, mutate(name, self.valid[name], rng))
        if self.reader.seal is not None and rng.random() < 0.6:
            self.reader.seal(self.path, name, rng)
        return name

    def write(self, name: str, content: bytes) -> None:
        path = self.path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)

    def _stamps(self) -> dict[str, tuple[int, int]]:
        """Size and time of every file."""
        found, left = {}, [str(self.path)]
        while left:
            for entry in os.scandir(left.pop()):
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)
                elif entry.is_file(follow_symlinks=False):
                    status = entry.stat()
                    found[os.path.relpath(entry.path, self.path)] = status.st_size, status.st_mtime_ns
        return found

    def changed(self) -> list[str]:
        """The files that are not as they were, new, or gone."""
        now = self._stamps()
        return [name for name in now.keys() | self.stamps.keys() if now.get(name) != self.stamps.get(name)]

    def inputs(self) -> dict[str, str | None]:
        """The changed files as text; None for one that is gone."""
        paths = {name: self.path / name for name in self.changed()}
        return {n: base64.b64encode(p.read_bytes()).decode() if p.exists() else None for n, p in paths.items()}

    def restore(self) -> None:
        changed = self.changed()
        for name in changed:
            if name in self.valid:
                self.write(name, self.valid[name])
                status = (self.path / name).stat()
                self.stamps[name] = status.st_size, status.st_mtime_ns
            else:
                (self.path / name).unlink()


def rng_of(seed: int, name: str, number: int) -> random.Random:
    return random.Random(f"{seed}/{name}/{number}")


def outcome_of(reader: Reader, folder: Path, name: str) -> tuple[str, str]:
    """What became of a case, and the error."""
    try:
        return ("skipped" if reader.read(folder, name) is False else "accepted"), ""
    except TrainformerError as error:
        str(error).encode("utf-8", "backslashreplace")
        return "refused", ""
    except (Exception, SystemExit) as error:
        frames = [f for f in traceback.extract_tb(error.__traceback__) if "trainformer" in f.filename]
        where = f"{Path(frames[-1].filename).name}:{frames[-1].lineno}" if frames else "?"
        return "failed", f"{type(error).__name__} at {where}: {str(error)[:120]}"


# -- a process that works through the cases of one reader ------------------------------------------------------------


def _work(name: str, seed: int, numbers: range, root: str, reports: Any, seconds: float) -> None:
    """Run cases and report each. Ended by a hang (with the stack on stderr), or by a crash."""
    faulthandler.enable()
    warnings.simplefilter("ignore")
    logger = logging.getLogger("trainformer")
    logger.addHandler(logging.NullHandler())
    logger.propagate = False
    logging.disable(logging.NOTSET)
    torch_threads()
    folder = Folder(name, Path(root))
    # Once without a change: a valid file is accepted, and everything is imported before memory is limited.
    for target in folder.targets:
        assert folder.reader.read(folder.path, target) is not False, f"{name}: {target} is valid"
    folder.restore()
    resource.setrlimit(resource.RLIMIT_AS, (_address_space() + MEMORY, resource.RLIM_INFINITY))
    reset_peak()
    base = peak_memory()
    for number in numbers:
        target = folder.change(rng_of(seed, name, number))
        inputs = folder.inputs()
        faulthandler.dump_traceback_later(seconds, exit=True)
        began = time.process_time()
        outcome, error = outcome_of(folder.reader, folder.path, target)
        taken = time.process_time() - began
        faulthandler.cancel_dump_traceback_later()
        case = None
        if outcome == "failed":
            case = {"reader": name, "seed": seed, "number": number, "file": target, "error": error, "files": inputs}
        reports.send((number, outcome, error, taken, peak_memory() - base, case))
        folder.restore()
    reports.send(None)


def torch_threads() -> None:
    import torch

    torch.set_num_threads(1)


def _address_space() -> int:
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()


def reset_peak() -> None:
    """Forget the peak of resident memory so far."""
    Path("/proc/self/clear_refs").write_text("5")


def peak_memory() -> int:
    """The peak of resident memory in bytes."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def fuzz(name: str, cases: int, seed: int = 0, keep: Path | None = None, seconds: float = SECONDS) -> Tally:
    """Run the cases of a reader in another process, which is started again where it hangs or dies."""
    tally, number = Tally(), 0
    context = multiprocessing.get_context("fork")
    while number < cases:
        root = tempfile.mkdtemp(prefix="fuzz-", dir="/dev/shm" if os.access("/dev/shm", os.W_OK) else None)
        receiver, sender = context.Pipe(duplex=False)
        arguments = (name, seed, range(number, cases), root, sender, seconds)
        process = context.Process(target=_work, args=arguments, daemon=True)
        process.start()
        sender.close()
        first = number
        try:
            while (report := receiver.recv()) is not None:
                number = report[0] + 1
                _count(tally, name, report, keep)
            number = cases
        except EOFError:
            process.join()
            if number == first == 0:
                raise RuntimeError(f"the valid files of {name!r} cannot be read") from None
            what = f"the process ended with {process.exitcode}: a hang of {seconds:g} s, or a crash"
            case = {"reader": name, "seed": seed, "number": number, "error": what}
            _count(tally, name, (number, "failed", what, 0.0, 0, case), keep)
            number += 1
        finally:
            process.join()
            shutil.rmtree(root, ignore_errors=True)
    return tally


def _count(tally: Tally, name: str, report: tuple[Any, ...], keep: Path | None) -> None:
    number, outcome, error, taken, memory, case = report
    tally.outcomes[outcome] += 1
    tally.slowest, tally.memory = max(tally.slowest, taken), max(tally.memory, memory)
    if outcome != "failed":
        return
    kind, _, example = error.partition(": ")
    tally.errors[kind] += 1
    tally.examples.setdefault(kind, example)
    if keep is not None and len(tally.failures) < 100:
        keep.mkdir(parents=True, exist_ok=True)
        path = keep / f"{name.replace(' ', '-').replace('/', '-')}-{number}.json"
        path.write_text(json.dumps(case))
        tally.failures.append(path)


def replay(file: Path) -> int:
    """Run a kept case again, in this process, and show what happens."""
    case = json.loads(file.read_text())
    with tempfile.TemporaryDirectory() as root:
        folder = Folder(case["reader"], Path(root))
        if "files" in case:
            for name, data in case["files"].items():
                if data is None:
                    (folder.path / name).unlink(missing_ok=True)
                else:
                    folder.write(name, base64.b64decode(data))
            target = case["file"]
        else:  # it ended the process: only its number is known
            target = folder.change(rng_of(case["seed"], case["reader"], case["number"]))
        faulthandler.dump_traceback_later(SECONDS, exit=True)
        print(f"{case['reader']}, {target}: {case['error']}")
        try:
            print("returned", folder.reader.read(folder.path, target))
        except TrainformerError as error:
            print(f"refused: {error}")
        except Exception:
            traceback.print_exc()
            return 1
        finally:
            faulthandler.cancel_dump_traceback_later()
    return 0


def shares(cases: int, names: list[str]) -> dict[str, int]:
    """How many cases each reader gets."""
    total = sum(READERS[name].share for name in names)
    counts = {name: max(1, round(cases * READERS[name].share / total)) for name in names}
    largest = max(counts, key=lambda name: counts[name])
    counts[largest] += cases - sum(counts.values())
    return counts


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=100_000, help="of all readers together (default: 100,000)")
    parser.add_argument("--only", nargs="+", choices=READERS, default=list(READERS), help="these readers")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--keep", type=Path, default=Path("fuzz-failures"), help="the folder for inputs that fail")
    parser.add_argument("--replay", type=Path, metavar="FILE", help="run one kept input again")
    args = parser.parse_args()
    os.environ["TRAINFORMER_CACHE"] = tempfile.mkdtemp(prefix="fuzz-cache-")
    if args.replay is not None:
        return replay(args.replay)
    console = Console(width=None if sys.stdout.isatty() else 120)
    table = Table(
        "reader", *(("cases", *OUTCOMES, "slowest", "peak memory")), title=f"{args.cases:,} cases, seed {args.seed}"
    )
    tallies: dict[str, Tally] = {}
    for name, cases in shares(args.cases, args.only).items():
        began = time.monotonic()
        tally = tallies[name] = fuzz(name, cases, args.seed, args.keep)
        console.print(
            f"{name}: {tally.cases:,} cases, {tally.outcomes['failed']} failed, {time.monotonic() - began:.0f} s"
        )
        for error, count in tally.errors.most_common(30):
            console.print(f"  {count} x {error}: {tally.examples[error]}", markup=False, highlight=False)
        row = [f"{tally.outcomes[outcome]:,}" for outcome in OUTCOMES]
        table.add_row(
            name, f"{tally.cases:,}", *row, f"{tally.slowest * 1e3:,.0f} ms", f"+{tally.memory / 1e6:,.0f} MB"
        )
    total = Counter[str]()
    for tally in tallies.values():
        total += tally.outcomes
    slowest, memory = max(t.slowest for t in tallies.values()), max(t.memory for t in tallies.values())
    table.add_section()
    row = [f"{total[outcome]:,}" for outcome in OUTCOMES]
    table.add_row("all", f"{total.total():,}", *row, f"{slowest * 1e3:,.0f} ms", f"+{memory / 1e6:,.0f} MB")
    console.print(table)
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
