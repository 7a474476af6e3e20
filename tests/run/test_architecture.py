"""The architecture that docs/design.md describes, held against traces of real runs."""

import inspect
import re
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest

import trainformer
from toys import MeanTask, classes
from trainformer import Trainer

ROOT = Path(__file__).parents[2]
PACKAGE = Path(trainformer.__file__).parent
WALK = re.compile(r"^\d+\. `([\w.]+)`", re.M)


@contextmanager
def traced():
    """Qualified names of all trainformer functions called inside, in order, e.g. ``run.fit.fit``."""
    calls = []

    def profile(frame, event, argument):
        if event == "call" and (code := frame.f_code).co_filename.startswith(str(PACKAGE)):
            module = Path(code.co_filename).relative_to(PACKAGE).with_suffix("")
            calls.append(".".join((*module.parts, code.co_qualname)))

    before = sys.getprofile()
    sys.setprofile(profile)
    try:
        yield calls
    finally:
        sys.setprofile(before)


def walk_through(title):
    """The functions that a section of docs/design.md lists, in order."""
    text = (ROOT / "docs/design.md").read_text(encoding="utf-8")
    section = re.search(rf"^### {re.escape(title)}\n(.*?)(?=^##)", text, re.M | re.S)
    assert section, f"docs/design.md has no section {title!r}"
    return WALK.findall(section[1])


def assert_in_order(listed, calls):
    """Every listed function is called, each after the one before it."""
    assert len(listed) >= 5
    at = 0
    for name in listed:
        assert name in calls[at:], f"{name} is not called after {listed[: listed.index(name)][-1:]}"
        at = calls.index(name, at)


def trainer(**options):
    return Trainer(MeanTask(), classes(), run_dir="runs/traced", log="none", max_steps=4, **options)


def test_set_up_is_as_documented():
    with traced() as calls:
        trainer()
    assert_in_order(walk_through("One set-up"), calls)


def test_a_step_is_as_documented():
    with traced() as calls:
        trainer().fit()
    assert_in_order(walk_through("One step"), calls)


def test_a_save_is_as_documented():
    with traced() as calls:
        trainer(save_every=2).fit()
    assert_in_order(walk_through("One save"), calls)


def test_resuming_is_as_documented():
    trainer(save_every=2).fit()
    with traced() as calls:
        again = trainer(save_every=2)
        again.max_steps = 6
        again.fit()
    assert again.state.step == 6
    assert_in_order(walk_through("One resume"), calls)


def test_every_documented_function_exists():
    for title in ("One set-up", "One step", "One save", "One resume"):
        for name in walk_through(title):
            path = PACKAGE.joinpath(*name.split("."))
            while not path.with_suffix(".py").exists():
                path = path.parent
                assert path != PACKAGE, f"docs/design.md names {name}, which is in no module"


def test_a_save_stays_within_two_packages(monkeypatch):
    """Whenever a file of a checkpoint is fsynced, all frames below the loop are in run/ or checkpointing/."""
    from trainformer.checkpointing import store

    packages, sync = set(), store.sync

    def recording_sync(path):
        for frame in inspect.stack()[1:]:
            if frame.filename.endswith("engine/loop.py"):
                break
            if frame.filename.startswith(str(PACKAGE)):
                packages.add(Path(frame.filename).relative_to(PACKAGE).parts[0])
        sync(path)

    monkeypatch.setattr(store, "sync", recording_sync)
    trainer(save_every=2).fit()
    assert packages == {"run", "checkpointing"}


@pytest.mark.parametrize("accumulation", [1, 2])
def test_at_most_six_frames_from_fit_to_train_step(accumulation):
    depth = []

    class Look(MeanTask):
        def train_step(self, batch):
            frames = [frame for frame in inspect.stack() if frame.filename.startswith(str(PACKAGE))]
            names = [(Path(frame.filename).name, frame.function) for frame in frames]
            depth.append(names.index(("trainer.py", "fit")))
            return super().train_step(batch)

    Trainer(Look(), classes(), max_steps=1, accumulation_steps=accumulation, log="none").fit()
    assert depth
    assert max(depth) <= 6


def test_run_is_small():
    """`Run` keeps what the loop asks for; setting up, fitting and reporting have rooms of their own."""
    assert len((PACKAGE / "run/run.py").read_text().splitlines()) <= 300
