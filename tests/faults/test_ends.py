"""Kills at every moment of the end of a run: the last save, log point and evaluation, and the status."""

import json

import pytest
from harness import complete, differences, kill_at_event
from victim import Case

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

CASES = {
    "finished": Case(epochs=1, save_every=9),
    "evaluated only at the end": Case(epochs=1, save_every=9, eval_every=2),
    "in the middle of an epoch": Case(max_steps=10, save_every=5, log_every=3),
    "stopped early": Case(epochs=12, patience=1, lr=0.1, save_every=9),
}


@pytest.mark.parametrize("name", CASES)
def test_a_kill_at_the_end_of_a_run_changes_nothing(tmp_path, name):
    """The newest checkpoint is already that of the last step, but what follows it is not done."""
    case = CASES[name]
    reference = complete(case, tmp_path / "reference")
    operations = json.loads((reference / "end.json").read_text())["operations"]
    wrong = {}
    first = operations - 30 + list(CASES).index(name)  # each case at other operations
    for operation in range(first, operations, len(CASES)):
        folder = tmp_path / str(operation)
        assert kill_at_event(case, folder, operation)
        complete(case, folder)
        if found := differences(reference, folder):
            wrong[operation - operations] = found
    assert not wrong, json.dumps(wrong, indent=2)


def test_a_finished_run_is_not_trained_again_by_the_same_command(tmp_path):
    for name, case in (("finished", Case(epochs=1)), ("stopped", Case(epochs=12, patience=1, lr=0.1))):
        reference = complete(case, tmp_path / f"{name} once")
        twice = complete(case, complete(case, tmp_path / f"{name} twice"))
        assert differences(reference, twice) == [], name
