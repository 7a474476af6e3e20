"""The ledger of `benchmarks/chaos.py`: it continues after an interruption, a kill, and beside another process."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import chaos


@pytest.fixture
def ledger(tmp_path):
    return chaos.Ledger(tmp_path / "results" / "chaos.jsonl")


def kill(ledger, turn, phase="step"):
    ledger.append(what="kill", **turn, kind="time", phase=phase, step=3)


def test_the_case_that_was_killed_least_has_the_next_turn(ledger):
    turns = [ledger.begin_turn(["plain", "hf", "jax"], seed=0) for _ in range(5)]
    assert [turn["case"] for turn in turns] == ["plain", "hf", "jax", "plain", "hf"]
    assert [turn["turn"] for turn in turns] == [0, 1, 2, 3, 4]
    again = chaos.Ledger(ledger.path).begin_turn(["plain", "hf", "mini"], seed=0)  # a case that joins later
    assert (again["turn"], again["case"]) == (5, "mini")


def test_only_kills_of_compared_runs_count(ledger):
    first, second = (ledger.begin_turn(["plain", "hf"], seed=0) for _ in range(2))
    for turn in (first, first, second):
        kill(ledger, turn)
    ledger.append(what="comparison", **first, kills=2, seconds=1.0, differences=[])
    assert [line["case"] for line in ledger.kills()] == ["plain", "plain"]
    assert len(ledger.comparisons()) == 1


def test_a_torn_last_line_is_left_behind(ledger):
    turn = ledger.begin_turn(["plain"], seed=0)
    with ledger.path.open("a") as file:
        file.write('{"what": "kill", "tu')
    kill(ledger, turn)
    assert [line["what"] for line in ledger.lines()] == ["turn", "kill"]
    assert ledger.begin_turn(["plain"], seed=0)["turn"] == 1


def test_the_table_counts_differences(ledger, capsys):
    turn = ledger.begin_turn(["plain"], seed=0)
    kill(ledger, turn, "rename")
    ledger.append(what="comparison", **turn, kills=1, seconds=1.0, differences=["optimizer"])
    assert chaos.show(ledger) == 1
    assert "turn 0, plain: optimizer" in capsys.readouterr().out
