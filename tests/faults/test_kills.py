"""Kill it anywhere, lose nothing: after any number of `kill -9` a run ends bitwise as if nothing had happened."""

import random
from dataclasses import replace

import pytest
from harness import complete, kill_repeatedly
from other_victims import FSDP, HF, KTOWithLoRA, PackedLoRA, SeveralOptimizers
from victim import Case

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

KILLS = 6  # per case

CASES = {
    "plain": Case(),
    "workers": Case(workers=2),
    "asynchronous": Case(save_async=True),
    "asynchronous, with workers": Case(save_async=True, workers=2),
    "evaluations and saves do not coincide": Case(epochs=3, eval_every=2, save_every=3, log_every=4),
    "the end is in the middle of an epoch": Case(max_steps=20, save_every=5),
    "stopped early": Case(epochs=12, patience=1, lr=0.1),
    "unnamed": Case(run_dir=None),
    "stream": Case(data="stream", max_steps=30),
    "tar shards": Case(data="tar", max_steps=30),
}

OTHERS = {
    "mixture": Case(data="mixture", max_steps=30),
    "hf": HF(),
    "LoRA with packing": PackedLoRA(),
    "KTO": KTOWithLoRA(),
    "WGAN": SeveralOptimizers(),
    "PPO": SeveralOptimizers(example="ppo", save_async=True),
    "distillation": SeveralOptimizers(example="distillation"),
    "FSDP": FSDP(),
    "FSDP, one rank": FSDP(alone=True, victim=1, save_async=True),
}


@pytest.mark.parametrize("name", [*CASES, *OTHERS])
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path, name):
    """`benchmarks/chaos.py` does this a thousand times."""
    case, wanted = (CASES[name], KILLS) if name in CASES else (OTHERS[name], KILLS // 2)
    reference = complete(case, tmp_path / "reference")
    case = replace(case, pause=0.002)  # steps take a while, so that kills hit them too
    tally = kill_repeatedly(case, tmp_path, reference, random.Random(name), kills=wanted, most=wanted)
    assert not tally.differences, "\n".join(tally.differences)
    assert len(tally.kills) == wanted
    assert any(kill.phase == "save" for kill in tally.kills), "no kill hit a partial checkpoint"
