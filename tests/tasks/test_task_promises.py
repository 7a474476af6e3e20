"""What holds for each task: the same numbers however it is sliced, bitwise resume, and the pre-flight check."""

from __future__ import annotations

import pytest
import torch
from promise_toys import CASES, trained

from ranks import on_ranks


class Cut:
    """A callback that stops the run as a power cut would."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer, step, loss):
        if step == self.step:
            raise RuntimeError("power cut")


def weights(trainer):
    return {name: value.clone() for name, value in trainer.task.model.state_dict().items()}


def furthest(a, b):
    return max((a[name].double() - b[name].double()).abs().max().item() for name in a)


@pytest.mark.parametrize("name", CASES)
def test_accumulation_changes_nothing(name):
    whole = CASES[name](batch_size=8, run_dir="whole")
    before = weights(whole)
    after = weights(whole.fit())
    sliced = CASES[name](batch_size=2, accumulation_steps=4, run_dir="sliced").fit()
    assert furthest(before, after) > 1e-4
    assert furthest(after, weights(sliced)) < 1e-9
    first, second = whole.evaluate(), sliced.evaluate()
    assert first == pytest.approx(second, abs=1e-9)


@pytest.mark.parametrize("name", CASES)
def test_a_cut_run_resumes_bitwise(name):
    options = {"max_steps": 6, "batch_size": 8, "save_every": 2, "resume": "auto", "optimizer": "adamw"}
    whole = CASES[name](run_dir="whole", **options).fit()
    with pytest.raises(RuntimeError, match="power cut"):
        CASES[name](run_dir="cut", callbacks=[Cut(3)], **options).fit()
    again = CASES[name](run_dir="cut", **options).fit()
    assert furthest(weights(whole), weights(again)) == 0
    assert whole.evaluate() == again.evaluate()


@pytest.mark.parametrize("name", CASES)
def test_the_check_passes(name):
    assert CASES[name](run_dir="checked").check(raise_on_failure=False).failures == []


def test_two_processes_train_as_one(tmp_path):
    alone = trained(0, 1)
    for found in on_ranks(trained, 2, tmp_path):
        assert found.keys() == alone.keys()
        for name, value in alone.items():
            assert torch.allclose(found[name].double(), value.double(), rtol=0, atol=1e-8), name
