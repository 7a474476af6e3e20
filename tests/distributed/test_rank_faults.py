"""Ranks that are killed, signalled or replaced by fewer: nothing is lost, and nothing hangs."""

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
from collections import Counter
from pathlib import Path

import elastic
import pytest
import torch

from forking import SERVER
from trainformer.checkpointing import CheckpointStore

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]

SCRIPT = Path(__file__).with_name("elastic.py")
STEPS = 20  # 4 epochs of 50 samples in batches of 12


def environment(**more):
    return {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **more}


def torchrun(folder, ranks, *arguments, restarts=0):
    """Run to the end under torchrun; what was printed."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks)]
    command += ["--max-restarts", str(restarts), str(SCRIPT), str(folder), *arguments]
    done = subprocess.run(command, env=environment(), capture_output=True, text=True, timeout=900, check=False)
    return done.returncode, done.stdout + done.stderr


def by_hand(folder, ranks, *arguments):
    """Run to the end without a launcher, as a cluster would start processes; exit codes and what each printed."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = str(probe.getsockname()[1])
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(ranks)}
    command = [str(folder), *arguments]
    started = [
        SERVER.Process(target=run_rank, args=(command, environment(**meeting, RANK=str(rank), LOCAL_RANK=str(rank))))
        for rank in range(ranks)
    ]
    for process in started:
        process.start()
    try:
        for process in started:
            process.join(900)
    finally:
        for process in started:
            process.kill()
            process.join()
    printed = [(folder / f"printed-{ranks}-{rank}.txt").read_text() for rank in range(ranks)]
    return [process.exitcode for process in started], printed


def run_rank(arguments, variables):
    """One rank, in a process of the fork server."""
    os.environ.update(variables)
    path = Path(arguments[0]) / f"printed-{variables['WORLD_SIZE']}-{variables['RANK']}.txt"
    output = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    for stream in (1, 2):
        os.dup2(output, stream)
    torch.set_num_threads(1)
    elastic.main(arguments)


def folder_for(tmp_path, name):
    (tmp_path / name).mkdir()
    return tmp_path / name


def end_of(folder, ranks, rank=0):
    return torch.load(folder / f"end-{ranks}-{rank}.pt", weights_only=True)


def same(a, b):
    return all(torch.equal(a["model"][key], b["model"][key]) for key in a["model"])


def lines(folder):
    """What all ranks wrote, in the order of the steps."""
    found = [json.loads(line) for path in folder.glob("seen-*.jsonl") for line in path.read_text().splitlines()]
    return sorted(found, key=lambda line: line["step"])


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    """The whole run in one process."""
    folder = tmp_path_factory.mktemp("alone")
    codes, printed = by_hand(folder, 1)
    assert codes == [0], printed
    return end_of(folder, 1)


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    """A run of four ranks of which one got SIGTERM at step 7, in the middle of the second epoch."""
    folder = tmp_path_factory.mktemp("stopped")
    codes, printed = by_hand(folder, 4, "--signal", "2:7")
    return folder, codes, printed


def test_a_killed_rank_is_restarted_and_the_run_ends_bitwise_the_same(tmp_path):
    chance = random.Random(7)
    place = f"{chance.randrange(2)}:{chance.randrange(5, STEPS)}"
    whole, killed = folder_for(tmp_path, "whole"), folder_for(tmp_path, "killed")
    assert by_hand(whole, 2, "--dropout", "0.3")[0] == [0, 0]
    code, printed = torchrun(killed, 2, "--dropout", "0.3", "--kill", place, restarts=1)
    assert code == 0, printed
    assert (killed / "had-kill").exists()
    assert "resuming from" in printed
    for rank in (0, 1):
        assert same(end_of(whole, 2), end_of(killed, 2, rank))
    assert torch.equal(end_of(whole, 2)["history"], end_of(killed, 2)["history"])


def test_one_signal_makes_all_ranks_save_one_checkpoint_and_exit(stopped):
    folder, codes, printed = stopped
    assert codes == [128 + signal.SIGTERM] * 4, printed
    newest = CheckpointStore(folder / "run" / "checkpoints").newest()
    assert newest is not None
    assert newest.manifest.world_size == 4
    steps = {line["step"] for line in lines(folder)}
    assert newest.step == max(steps)  # whatever was trained is saved
    assert 7 <= newest.step <= 8
    assert {f.name for f in newest.manifest.components["rng"]} == {f"rng.rank{rank}.pt" for rank in range(4)}
    assert "received SIGTERM" in printed[0]
    assert not any(text.strip() for text in printed[1:]), printed[1:]  # only rank 0 prints
    assert not list((folder / "run" / "checkpoints").glob(".*"))


@pytest.mark.parametrize("ranks", [2, 1])
def test_fewer_ranks_resume_and_every_sample_is_seen_once_per_epoch(stopped, alone, tmp_path, ranks):
    folder = tmp_path / "resumed"
    shutil.copytree(stopped[0], folder)
    codes, printed = by_hand(folder, ranks)
    assert codes == [0] * ranks, printed
    seen = lines(folder)
    for epoch in range(4):
        counts = Counter(sample for line in seen if line["epoch"] == epoch for sample in line["samples"])
        # A rank without a sample of its own is lent one, which does not count: batches of 2 for 4 ranks.
        assert set(counts) == set(range(50))
        assert sum(counts.values()) <= 50 + 2
    end = end_of(folder, ranks)
    assert end["step"] == STEPS
    assert torch.allclose(end["history"], alone["history"], rtol=0, atol=1e-6)
    for key, value in alone["model"].items():
        assert torch.allclose(end["model"][key], value, rtol=0, atol=1e-10), key


def test_the_other_ranks_end_and_name_the_lost_one(tmp_path):
    codes, printed = by_hand(folder_for(tmp_path, "lost"), 3, "--kill", "1:6")
    assert codes[1] == -signal.SIGKILL
    for rank in (0, 2):
        assert codes[rank] not in (0, None)
        assert "RankLost: Rank 1 on" in printed[rank], printed[rank]


def test_all_ranks_report_the_error_of_one(tmp_path):
    codes, printed = by_hand(folder_for(tmp_path, "failed"), 2, "--fail", "1:3")
    assert codes == [1, 1]
    assert "this rank has had enough" in printed[1]
    assert "this rank has had enough" in printed[0], printed[0]
