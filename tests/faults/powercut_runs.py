"""The programs whose file operations are recorded, and what must hold in every state that a power cut can leave.

    python powercut_runs.py native mini       with LD_PRELOAD, as `powercuts.record` does

A program marks in the log when a save has returned. From then on its checkpoint must survive.
"""

from __future__ import annotations

import ctypes
import json
import logging
import os
import random
import re
import shutil
import sys
import warnings
from collections.abc import Callable, Collection, Iterator
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

sys.path[:0] = [str(Path(__file__).parents[1] / part) for part in ("", "faults", "hf", "mini", "jax_backend")]

import torch  # noqa: E402
from powercuts import Blobs, History, Operation, State, Tally, place_of, read_log, record  # noqa: E402

from trainformer.checkpointing import CheckpointStore, Manifest  # noqa: E402
from trainformer.checkpointing.manifest import MANIFEST  # noqa: E402
from trainformer.checkpointing.store import LATEST, is_named, protect  # noqa: E402
from trainformer.checkpointing.torch_files import read_component, read_single_file  # noqa: E402
from trainformer.core.errors import DataError  # noqa: E402
from trainformer.live.runs import read_status  # noqa: E402
from trainformer.loggers.jsonl import read_jsonl  # noqa: E402

NOISE = {"samples.jsonl", "output.txt", "end.json", "end.pt"}  # written by the test's callbacks, not by the library


# -- programs --------------------------------------------------------------------------------------------------------


def native(**options: Any) -> None:
    import victim

    victim.make_trainer(victim.Case(epochs=2, save_last=2, **options)).fit()


def went_back() -> None:
    """Resumed, sent back to an earlier step, and started again from scratch."""
    small(max_steps=6)
    small(max_steps=12)
    small(max_steps=10, resume="run/checkpoints/step_00000009")
    small(max_steps=6, resume=None)


def small(**options: Any) -> None:
    from torch.utils.data import TensorDataset

    from toys import MeanTask, classes, mlp
    from trainformer import Trainer

    quiet = {"log": "none", "device": "cpu", "precision": "no", "num_workers": 0, "run_dir": "run"}
    settings = {"batch_size": 8, "lr": 0.02, "epochs": 9, "save_every": 3, "save_last": 3, "log_every": 2}
    Trainer(MeanTask(mlp()), TensorDataset(*classes(37)), **{**quiet, **settings, **options}).fit()


def rewritten() -> None:
    """A store in which every step is written twice; one checkpoint is protected, and some are deleted."""
    store = CheckpointStore(Path("run/checkpoints"))
    for number in range(12):
        content = random.Random(number).randbytes(random.Random(number).choice([100, 5000]))

        def fill(folder: Path, content: bytes = content) -> dict[str, list[str]]:
            (folder / "state").mkdir()
            (folder / "state" / "x.bin").write_bytes(content)
            return {"x": ["state/x.bin"]}

        checkpoint = store.write(Manifest(step=number // 2, components={}), fill)
        logging.getLogger("trainformer").info("saved %s", checkpoint.path)
        if number == 3:
            protect(checkpoint)
        for old in store.checkpoints()[:-2]:
            if not old.is_protected:
                store.delete(old)


def hf() -> None:
    from hf_toys import Classifier, examples, make

    make(
        "run", Classifier(dropout=0.3), train=examples(43), evaluation=examples(16, seed=1), max_steps=14,
        learning_rate=1e-2, save_strategy="steps", save_steps=3, save_total_limit=2, eval_strategy="steps",
        eval_steps=5, logging_steps=2, resume_from_checkpoint="auto",
    ).train()  # fmt: skip


def mini() -> None:
    import mini_victim

    torch.set_num_threads(1)
    mini_victim.seed_everything(8)
    mini_victim.Victim(mini_victim.Case()).train()


def jax(**options: Any) -> None:
    import jax_victim

    jax_victim.make_trainer(jax_victim.JaxCase(devices=1, epochs=2, **options)).train()


def sharded() -> None:
    small(strategy="fsdp", max_steps=12, save_async=True)


@dataclass(frozen=True)
class Run:
    """A program, and how to continue it after a power cut."""

    train: Callable[[], None]
    processes: int = 1
    resumes: bool = True  # running it again in the same folder continues it
    protected: str | None = None  # a file that must survive as soon as step 2 is saved


RUNS = {
    "native": Run(native),
    "native, async": Run(lambda: native(save_async=True)),
    "native, unnamed": Run(lambda: native(run_dir=None)),
    "went back": Run(went_back, resumes=False),
    "rewritten": Run(rewritten, resumes=False, protected="run/checkpoints/step_00000001/protected"),
    "hf": Run(hf),
    "mini": Run(mini),
    "jax": Run(jax),
    "jax, async": Run(lambda: jax(save_async=True)),
    "two ranks": Run(sharded, processes=2, resumes=False),
}


class Marks(logging.Handler):
    """Marks in the log of file operations what the library has said. With several ranks, rank 0 completes a save."""

    def emit(self, record: logging.LogRecord) -> None:
        message = record.getMessage()
        if message.startswith(("saved ", "moved ")) and os.environ.get("RANK", "0") == "0":
            ctypes.CDLL(None).powercut_mark(os.fsencode(message))


def recorded(names: Collection[str], folder: Path) -> dict[str, Recording]:
    """Run programs, each in a folder of its name, in one process (if they need no more), and record them."""
    for name in names:
        (folder / name).mkdir(parents=True)
    (processes,) = {RUNS[name].processes for name in names}
    log = record([sys.executable, __file__, *names], folder, processes)
    return {name: Recording(name, read_log(log, folder / name), folder / name) for name in names}


# -- what must hold --------------------------------------------------------------------------------------------------


class Promise(NamedTuple):
    """From an operation on, the newest checkpoint has this content: that of its manifest, or of its single file.

    None: there need not be any, as all were moved away.
    """

    index: int
    step: int | None
    content: bytes | None


class Recording:
    """The operations of a program, and what they promise."""

    def __init__(self, name: str, operations: list[Operation], folder: Path, without: Collection[str] = ()) -> None:
        self.name, self.run, self.folder, self.operations = name, RUNS[name], folder, operations
        self.history = History(operations, folder.stat().st_ino, without)
        self.moments = [i for i, o in enumerate(operations) if o.kind != "mark" and o.path not in NOISE]
        self.promises: list[Promise] = []
        contents: dict[int, bytes] = {}
        for index, operation in enumerate(operations):
            if operation.kind != "mark":
                continue
            what, place = operation.path.split(" ", 1)
            if what == "saved":
                path = Path(folder, place).relative_to(folder).as_posix()
                state = self.history.at(index)
                content = state.files[path if path in state.files else f"{path}/{MANIFEST}"]
                step = int(re.findall(r"\d+", path)[-1])
                contents[step] = content
                self.promises.append(Promise(index, step, content))
            elif back := re.search(r"after step (\d+)", place):
                step = int(back[1])
                self.promises.append(Promise(index, step, contents[step]))
            else:
                self.promises.append(Promise(index, None, None))
        assert any(promise.step is not None for promise in self.promises), "no save was recorded"

    def without(self, *kinds: str) -> Recording:
        """The same program, had it left out some kinds of operations: "sync file" or "sync folder"."""
        return Recording(self.name, self.operations, self.folder, without=kinds)

    def cut(self, rng: random.Random) -> State:
        """A random state after a power cut at a random moment."""
        return self.history.cut(rng.choice(self.moments), rng)

    def around(self, cut: int) -> tuple[Promise | None, Promise | None]:
        """The last promise before a moment, and the first one after it."""
        before = [promise for promise in self.promises if promise.index < cut]
        after = [promise for promise in self.promises if promise.index >= cut]
        return (before[-1] if before else None), (after[0] if after else None)

    def check(self, state: State, folder: Path, tally: Tally) -> None:
        """Look at a state that was written to a folder, as a resume does, and count what is there."""
        place = place_of(self.operations[state.cut])
        tally += Tally(cuts=1, torn=state.torn_files > 0, lost=state.lost_names > 0, places={place: 1})
        before, after = self.around(state.cut)
        tally.before_first += before is None
        with warnings_caught() as messages:
            try:
                found = newest(folder)
                problems = [*self._broken(found, before, after), *self._missing(folder, before), *unreadable(folder)]
            except Exception as error:  # whatever it is, it would have ended a resume
                problems = [f"{type(error).__name__}: {error}"]
        tally.fell_back += any("Falling back" in message for message in messages)
        tally.ahead += not problems and found is not None and (before is None or found != before[1:])
        where = f"{self.name}, operation {state.cut} ({place})"
        tally.failures += [f"{where}: {problem}" for problem in problems]

    def _broken(self, found: Found | None, before: Promise | None, after: Promise | None) -> Iterator[str]:
        """Why a newest checkpoint is not the one of the last save that returned, or of the next."""
        known = {promise[1:] for promise in self.promises}
        if found is not None and found not in known:
            yield f"the newest checkpoint, of step {found[0]}, is not one that was saved"
        allowed = {promise[1:] for promise in (before, after) if promise is not None}
        if before is None or (None, None) in allowed:
            allowed.add((None, None))
        if after is not None and self._moves(after):
            allowed = known | {(None, None)}
        if (found or (None, None)) not in allowed:
            steps = sorted({step or 0 for step, _ in allowed})
            yield f"the newest checkpoint is of step {found and found[0]}, expected one of {steps}"

    def _missing(self, folder: Path, before: Promise | None) -> Iterator[str]:
        """What else must be there when a save returns: metrics up to that step, and by what the run is found again."""
        if before is None or before.step is None:
            return
        if self.run.protected and before.step >= 2 and not (folder / self.run.protected).exists():
            yield f"{self.run.protected} is missing"
        if not self.run.resumes:
            return
        for place in self.folder.glob("**/metrics.jsonl"):
            path = folder / place.relative_to(self.folder)
            wanted = [r for r in read_jsonl(place) if r["step"] <= before.step]
            found = read_jsonl(path) if path.exists() else []
            if any(r not in found for r in wanted):
                yield f"metrics.jsonl lacks records up to step {before.step}"
            for name in ("config.json", "status.json"):
                if not path.with_name(name).exists():
                    yield f"{name} is missing"

    def _moves(self, promise: Promise) -> bool:
        return self.operations[promise.index].path.startswith("moved")


Found = tuple[int, bytes]


def newest(folder: Path) -> Found | None:
    """The newest checkpoint of a run folder, as a resume finds it; raises if another one is damaged."""
    if (folder / "ws").is_dir():  # a mini trainer
        for path in sorted(folder.glob("ws/checkpoints/checkpoint_step_*.pt"), key=_step, reverse=True):
            try:
                read_single_file(path)
            except DataError as error:
                logging.getLogger("trainformer").warning("%s Falling back to the previous checkpoint.", error)
            else:
                return _step(path), path.read_bytes()
        return None
    found = None
    for run in (folder / "run", *folder.glob("runs/*")):
        store = CheckpointStore(run / "checkpoints" if (run / "checkpoints").is_dir() else run)
        store.clean()
        for checkpoint in store.checkpoints():  # a folder with a valid manifest is a checkpoint
            checkpoint.verify()
        if (checkpoint := store.newest()) is not None:
            found = checkpoint.step, (checkpoint.path / MANIFEST).read_bytes()
    return found


def _step(path: Path) -> int:
    return int(path.stem.rpartition("_")[2])


def unreadable(folder: Path) -> list[str]:
    """The files of a run that its readers cannot read; a partial last line counts as read."""
    problems = []
    for run in (folder / "run", folder / "ws", *folder.glob("runs/*")):
        for name in ("metrics.jsonl", "records.jsonl"):
            if (run / name).exists():
                read_jsonl(run / name)
        if (run / "config.json").exists():
            json.loads((run / "config.json").read_bytes())
        if (run / "status.json").exists() and not read_status(run):
            problems.append("status.json is damaged")
        for latest in (run / LATEST, run / "checkpoints" / LATEST):
            if latest.is_file() and not is_named(Path(latest.read_text())):
                problems.append(f"{LATEST} holds {latest.read_bytes()[:40]!r}")
    return problems


@contextmanager
def warnings_caught() -> Iterator[list[str]]:
    """Log messages go to a list instead; warnings go nowhere."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("trainformer")
    propagate, logger.propagate = logger.propagate, False
    logger.addHandler(handler)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield messages
    finally:
        logger.removeHandler(handler)
        logger.propagate = propagate


def cut_power(recording: Recording, cuts: int, rng: random.Random, scratch: Path) -> Tally:
    """Cut the power so many times."""
    tally, blobs = Tally(), Blobs(scratch / "blobs")
    for _ in range(cuts):
        state, folder = recording.cut(rng), scratch / "state"
        folder.mkdir()
        state.write(folder, blobs)
        recording.check(state, folder, tally)
        shutil.rmtree(folder)
    return tally


# -- resuming --------------------------------------------------------------------------------------------------------


def resume(recording: Recording, rng: random.Random, folder: Path) -> Tally:
    """Cut the power once, run the program again, and compare its end with that of the recorded one."""
    tally, state = Tally(resumed=1), recording.cut(rng)
    folder.mkdir(parents=True)
    state.write(folder, Blobs(folder.with_name(f"{folder.name}-blobs"), at_most=10**9))
    where = f"{recording.name}, operation {state.cut} ({place_of(recording.operations[state.cut])})"
    try:
        with chdir(folder), warnings_caught():
            recording.run.train()
        different = differences(recording.folder, folder)
    except Exception as error:
        different = [f"{type(error).__name__}: {error}"]
    tally.failures += [f"{where}, resumed: {difference}" for difference in different]
    return tally


def differences(reference: Path, other: Path) -> list[str]:
    """What differs at the end of two runs: states, apart from times, and metrics."""
    from harness import compare_records, compare_states

    found = compare_states(final_state(reference), final_state(other))
    if list(reference.glob("run/runs/*")):  # of trainformer.hf: each start has a file of its own
        return found
    metrics = [
        [timeless(record) for path in folder.glob("**/metrics.jsonl") for record in read_jsonl(path)]
        for folder in (reference, other)
    ]
    return found + compare_records(*metrics)


def timeless(tree: Any) -> Any:
    """The tree without anything that a clock has measured, and without the folder it was written to."""
    from harness import without_clock

    others = ("_time", "runtime", "recompilations", "save_dir", "run_dir")  # each process compiles for itself
    if isinstance(tree, dict):
        return {k: timeless(v) for k, v in without_clock(tree).items() if not str(k).endswith(others)}
    return type(tree)(map(timeless, tree)) if isinstance(tree, (list, tuple)) else tree


def final_state(folder: Path) -> dict[str, Any]:
    """The components of the newest checkpoint, without times; arrays of JAX as bytes."""
    if (folder / "ws").is_dir():
        path = max(folder.glob("ws/checkpoints/checkpoint_step_*.pt"), key=_step)
        return dict(timeless(read_single_file(path)))
    (root,) = {path.parents[1] for path in folder.glob(f"**/{MANIFEST}")}
    checkpoint = CheckpointStore(root).newest()
    assert checkpoint is not None
    found: dict[str, Any] = {}
    for key, format in checkpoint.manifest.formats.items():
        names = [file.name for file in checkpoint.manifest.components[key]]
        if format == "orbax":
            from trainformer.checkpointing.jax_files import read_arrays

            found |= {name: array.tobytes() for name, array in read_arrays(checkpoint.path / key).items()}
        elif format == "tree":
            from trainformer.utils.tree_files import read_tree

            found[key] = timeless(read_tree(checkpoint.path, names))
        else:
            found[key] = timeless(read_component(checkpoint.path, names, format))
    return found


if __name__ == "__main__":
    torch.set_num_threads(1)
    logger = logging.getLogger("trainformer")
    logger.setLevel(logging.INFO)
    logger.addHandler(Marks())
    for name in sys.argv[1:]:
        with chdir(name):
            RUNS[name].train()
