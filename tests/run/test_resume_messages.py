"""What a resumed run says: where it continues, how the last process ended, and what is different."""

import logging
from pathlib import Path

import pytest

from toys import MeanTask, classes
from trainformer import Trainer


class Crash:
    def on_step_end(self, trainer, step, loss):
        if step == 5:
            raise RuntimeError("crash")


def fit(**options):
    usual = {"epochs": 2, "save_last": 5, "batch_size": 8, "save_every": 3, "log": "none", "run_dir": "run"}
    return Trainer(MeanTask(), classes(), **{**usual, **options}).fit()


@pytest.fixture
def said(caplog):
    """The messages of a run, which starts after one that failed at step 5 of 16."""
    with pytest.raises(RuntimeError, match="crash"):
        fit(callbacks=[Crash()])
    caplog.clear()
    caplog.set_level(logging.INFO, "trainformer")

    def run(**options):
        fit(**options)
        return [m for m in caplog.messages if not m.startswith(("saved", "training", "Set random"))]

    return run


def test_the_same_command(said):
    (message,) = said()
    assert message.startswith("resuming from run/checkpoints/step_00000003 (step 3 of 16, epoch 1, saved ")
    assert message.endswith("s ago): the last process failed. To start from scratch, pass resume=None.")


def test_another_length_and_other_workers(said):
    assert said(epochs=3, num_workers=1, name="again")[1:] == [
        "different from last time: epochs 2 -> 3, num_workers None -> 1"
    ]


def test_a_finished_run_that_is_trained_for_longer(said, caplog):
    said()
    caplog.clear()
    messages = said(epochs=3)
    assert "(step 16 of 24, epoch 3, saved " in messages[0]
    assert "): the run had finished." in messages[0]


def test_a_damaged_checkpoint_names_the_one_that_is_used_instead(said, caplog):
    said()
    for step in (16, 15):
        Path(f"run/checkpoints/step_{step:08}/model.safetensors").write_bytes(b"x")
    caplog.clear()
    first, second, third, *_ = said(epochs=3)
    assert "step_00000016/model.safetensors is damaged: it has 1 bytes instead of" in first
    assert first.endswith(". Falling back to the previous checkpoint, step_00000015.")
    assert second.endswith("checkpoint, step_00000012.")
    assert third.startswith("resuming from run/checkpoints/step_00000012")


def test_no_intact_checkpoint(said):
    Path("run/checkpoints/step_00000003/manifest.json").unlink()
    first, second = said()
    assert first.endswith("it has no manifest.json. There is no earlier one: the run starts from scratch.")
    assert second == "moved the checkpoint after step 0, where this run continues, to run/checkpoints/abandoned-1"
