"""Checkpoints that several ranks write: whole or not at all, and every rank knows which."""

import pytest
from writing_ranks import ended_early, writing

from ranks import on_ranks
from trainformer.checkpointing import CheckpointStore


@pytest.mark.slow
def test_a_failure_on_one_rank_fails_on_all_and_leaves_nothing(tmp_path):
    found = on_ranks(writing, 3, tmp_path)
    for rank in found:
        assert rank["ended"].tolist() == [0, 1, 1, 0]
        assert rank["told"].tolist() == [7, 1]
    store = CheckpointStore(tmp_path / "checkpoints")
    kept = store.checkpoints()
    assert [checkpoint.step for checkpoint in kept] == [1, 4]
    for checkpoint in kept:
        checkpoint.verify()
        names = sorted(record.name for record in checkpoint.manifest.components["own"])
        assert names == [f"own.rank{rank}.txt" for rank in range(3)]
        assert (checkpoint.path / names[2]).read_text() == f"2 at {checkpoint.step}"
    assert sorted(path.name for path in store.root.iterdir()) == ["latest", "step_00000001", "step_00000004"]


@pytest.mark.slow
def test_a_background_save_does_not_outlive_its_run(tmp_path):
    main, _ = on_ranks(ended_early, 2, tmp_path)
    assert main["given up"]
    assert not main["draft"]
