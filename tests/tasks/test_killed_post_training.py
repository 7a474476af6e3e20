"""Post-training runs that are killed in an update, and resumed: bitwise the same weights as without the kill."""

import os
import signal

import pytest
import torch

import text_toys as toys
from forking import SERVER
from trainformer.adapters import LoRA
from trainformer.tasks import CPO, DPO, Distillation, OnlineDPO, RewardModel

pytestmark = pytest.mark.slow

PROMPTS = [{"prompt": text} for text in toys.sentences()]


def length(completions):
    return [float(len(text)) for text in completions]


CASES = {
    "dpo": (DPO, {"max_length": 32, "label_smoothing": 0.1}, toys.preferences()),
    "cpo": (CPO, {"max_length": 32}, toys.preferences()),
    "reward model": (RewardModel, {"max_length": 32, "adapter": LoRA(r=2)}, toys.preferences()),
    "online dpo": (OnlineDPO, {"rewards": length, "max_completion_length": 6, "adapter": LoRA(r=2)}, PROMPTS),
    "distillation": (
        Distillation,
        {"max_length": 32, "teacher": "base", "lmbda": 0.5, "max_new_tokens": 6, "beta": 0.5},
        [{"prompt": record["prompt"], "completion": record["chosen"]} for record in toys.preferences()],
    ),
}


class Deadly:
    """Kills its process in the update of one step: the gradients are applied, nothing else is done."""

    def __init__(self, step):
        self.step = step

    def on_after_optimizer_step(self, trainer, step):
        if step == self.step:  # completed before
            os.kill(os.getpid(), signal.SIGKILL)


def train(case, folder, run, dies_at=None):
    os.chdir(folder)
    kind, options, data = CASES[case]
    torch.manual_seed(0)
    task = kind(toys.gpt2(), tokenizer=toys.chat_tokenizer(), cache_dir="tokens", **options)  # with dropout
    settings = {"run_dir": run, "max_steps": 5, "save_every": 1, "lr": 1e-3, "callbacks": [Deadly(dies_at)]}
    trainer = toys.trainer_for(task, data, **settings).fit()
    return {name: value.clone() for name, value in trainer.task.model.state_dict().items()}


@pytest.mark.parametrize("case", CASES)
def test_a_killed_run_ends_as_if_it_had_not_been_killed(case, tmp_path):
    wanted = train(case, tmp_path, "whole")
    process = SERVER.Process(target=train, args=(case, str(tmp_path), "killed", 3))
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert max(path.name for path in (tmp_path / "killed" / "checkpoints").glob("step_*")) == "step_00000003"
    found = train(case, tmp_path, "killed")
    assert found.keys() == wanted.keys()
    for name, value in wanted.items():
        assert torch.equal(found[name], value), name
