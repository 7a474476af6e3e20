"""Kill it anywhere, lose nothing: after any number of `kill -9` a run ends as if nothing had happened, bit for bit."""

import random
from dataclasses import replace

import pytest
from harness import complete, torment
from victim import Case

pytestmark = [pytest.mark.slow, pytest.mark.timeout(300)]

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
}


@pytest.mark.parametrize("name", CASES)
def test_a_killed_run_ends_like_one_left_in_peace(tmp_path, name):
    case = CASES[name]
    reference = complete(case, tmp_path / "reference")
    tally = torment(
        replace(case, slow=0.02, pause=0.002), tmp_path, reference, random.Random(name), kills=KILLS, most=KILLS
    )
    assert not tally.differences, "\n".join(tally.differences)
    assert tally.kills == KILLS
    assert tally.inside_saves > 0, "no kill hit a half-written checkpoint"
