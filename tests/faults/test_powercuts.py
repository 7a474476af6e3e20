"""Cut the power anywhere: whatever the disk had not been told to keep may be lost, but never a saved checkpoint."""

import random
from pathlib import Path

import pytest
from powercut_runs import Recording, cut_power, recorded, resume
from powercuts import History, Operation, unavailable

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(600),
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]

CUTS = {"native, async": 120, "rewritten": 60, "went back": 60, "mini": 60}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory) -> dict[str, Recording]:
    """Recorded in one process: importing torch takes longer than all of them."""
    return recorded(CUTS, tmp_path_factory.mktemp("recorded") / "runs")


@pytest.mark.parametrize("name", CUTS)
def test_the_newest_saved_checkpoint_survives(recordings, name, tmp_path):
    tally = cut_power(recordings[name], CUTS[name], random.Random(name), tmp_path)
    assert not tally.failures, "\n".join(tally.failures)
    assert tally.cuts == CUTS[name]
    assert tally.lost > 0, "no state lacked anything: this tests nothing"
    assert tally.before_first < tally.cuts


@pytest.mark.parametrize("without", ["sync file", "sync folder"])
@pytest.mark.parametrize("name", CUTS)
def test_a_program_without_fsync_is_found_out(recordings, name, without, tmp_path):
    tally = cut_power(recordings[name].without(without), 30, random.Random(name), tmp_path)
    assert tally.failures


@pytest.mark.parametrize("name", ["native, async", "mini"])
def test_a_run_resumes_exactly(recordings, name, tmp_path):
    for seed in range(3):
        assert resume(recordings[name], random.Random(seed), tmp_path / str(seed)).failures == []


# -- the simulator itself --------------------------------------------------------------------------------------------


def states(*operations: Operation, cut: int | None = None) -> set[tuple[tuple[str, bytes], ...]]:
    """The states that are found after some operations in a folder with inode 1."""
    history = History(list(operations), root=1)
    cut = len(operations) if cut is None else cut
    return {tuple(sorted(history.cut(cut, random.Random(seed)).files.items())) for seed in range(300)}


def operation(kind: str, inode: int, path: str = "", other: str = "", data: bytes = b"") -> Operation:
    return Operation(kind, inode, 0, data, path, other)


CREATE = operation("open", 2, "a")
WRITE = operation("write", 2, "a", data=b"x" * 1024)
RENAME = operation("rename", 2, "a", "b")
FILE, FOLDER = operation("sync file", 2), operation("sync folder", 1)


def test_nothing_is_durable_without_fsync():
    found = states(CREATE, WRITE)
    contents = {content for state in found for _, content in state}
    assert () in found
    assert {b"", WRITE.data, bytes(1024), b"x" * 512, b"x" * 512 + bytes(512), bytes(512) + b"x" * 512} <= contents


def test_a_file_and_its_name_are_durable_apart():
    whole = (("a", WRITE.data),)
    assert states(CREATE, WRITE, FILE) == {(), whole}
    assert {len(state) for state in states(CREATE, WRITE, FOLDER)} == {1}
    assert states(CREATE, WRITE, FILE, FOLDER) == {whole}


def test_an_fsync_in_progress_has_done_nothing_yet():
    assert () in states(CREATE, WRITE, FILE, FOLDER, cut=3)


def test_a_rename_is_atomic_and_may_be_lost_until_the_folder_is_synced():
    before, after = (("a", WRITE.data),), (("b", WRITE.data),)
    assert states(CREATE, WRITE, FILE, FOLDER, RENAME) == {before, after}
    assert states(CREATE, WRITE, FILE, FOLDER, RENAME, FOLDER) == {after}


def test_later_changes_may_be_durable_before_earlier_ones():
    other = operation("open", 3, "c")
    assert {("c",), ("a",), ("a", "c"), ()} == {tuple(n for n, _ in state) for state in states(CREATE, other)}


def test_a_log_that_does_not_explain_the_files_is_refused(tmp_path: Path):
    (tmp_path / "a").write_bytes(b"written behind its back")
    history = History([CREATE, WRITE], root=1)
    assert history.differences(tmp_path) == ["a"]
