"""Cadence, scalars, metrics, state."""

import math
import numbers

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.fakes import CountingScalar, FakeBackend
from trainformer.core.errors import BadArgument, DataError
from trainformer.core.types import Entry
from trainformer.engine import Cadence, LazyScalar, RunningMetrics, RunState
from trainformer.engine.evaluation import evaluate
from trainformer.engine.state import is_better


@pytest.mark.parametrize(
    ("text", "every", "unit"),
    [
        ("500steps", 500, "steps"), ("1 step", 1, "steps"), ("2epochs", 2, "epochs"), ("1epoch", 1, "epochs"),
        ("10min", 600, "seconds"), ("90s", 90, "seconds"), ("1.5h", 5400, "seconds"), (7, 7, "epochs"),
    ],
)  # fmt: skip
def test_cadence_reads_what_people_write(text, every, unit):
    cadence = Cadence.parse(text, "epochs")
    assert (cadence.every, cadence.unit) == (every, unit)


@pytest.mark.parametrize("bad", [0, -1, "0steps", "1.5steps", "ten steps", "5 parsecs", "", 2.5, True])
def test_cadence_refuses_the_rest_and_says_how(bad):
    with pytest.raises(BadArgument, match=r"eval_every.*'500steps'"):
        Cadence.parse(bad, "steps", "eval_every")


def test_lazy_scalar_is_a_number_in_every_way():
    lazy = LazyScalar(lambda: 2.5)
    assert isinstance(lazy, numbers.Real)
    assert (lazy + 1, 1 + lazy, lazy - 1, 1 - lazy, lazy * 2, 5 / lazy, lazy**2, -lazy, abs(lazy)) == (
        3.5, 3.5, 1.5, -1.5, 5.0, 2.0, 6.25, -2.5, 2.5,
    )  # fmt: skip
    assert lazy == 2.5
    assert lazy > 2
    assert max(lazy, 1.0) == 2.5
    assert math.isfinite(lazy)
    assert f"{lazy:.2f} {lazy}" == "2.50 2.5"
    assert (int(lazy), round(lazy, 0), bool(lazy), lazy.item()) == (2, 2.0, True, 2.5)
    assert sum([lazy, lazy]) == 5.0
    assert hash(lazy) == hash(2.5)


entries = st.lists(st.tuples(st.floats(-100, 100), st.integers(0, 50), st.booleans()), min_size=1, max_size=60)


@given(entries)
def test_running_metrics_are_sums_over_sums(items):
    metrics = RunningMetrics(FakeBackend())
    metrics.extend(Entry("m", CountingScalar(v), w, mean) for v, w, mean in items)
    # A sum of no weight (mean False, weight 0) does not count either.
    total = sum(w for _, w, _ in items)
    got = metrics.drain()
    if total == 0:
        assert got == {}
    else:
        want = math.fsum((v * w if mean else v) for v, w, mean in items if w) / total
        assert got["m"] == pytest.approx(want, rel=1e-12, abs=1e-12)
    assert metrics.drain() == {}


def test_folding_a_long_window_changes_nothing_and_reads_nothing():
    metrics = RunningMetrics(FakeBackend())
    CountingScalar.reads = 0
    metrics.extend(Entry("m", CountingScalar(float(i)), 2, True) for i in range(5000))
    assert CountingScalar.reads == 0
    assert metrics.drain() == {"m": pytest.approx(4999 / 2)}


def test_nan_is_seen_not_hidden():
    metrics = RunningMetrics(FakeBackend())
    metrics.extend([Entry("m", float("nan"), 1, True), Entry("m", 1.0, 1, True)])
    assert math.isnan(metrics.drain()["m"])
    metrics.extend([Entry("m", float("inf"), 1, True), Entry("m", float("-inf"), 1, True)])
    assert math.isnan(metrics.drain()["m"])


def test_evaluation_keeps_rows_only_when_wanted():
    from trainformer.core.types import EvalResult, HostBatch

    def step(batch):
        return EvalResult([Entry("n", 1.0, batch.size, True)], {"row": list(batch.data)})

    batches = [HostBatch([1, 2], 2), HostBatch([3], 1)]
    assert evaluate(FakeBackend(), iter(batches), step, keep_rows=True) == ({"n": 1.0}, {"row": [1, 2, 3]})
    assert evaluate(FakeBackend(), iter(batches), step, keep_rows=False) == ({"n": 1.0}, {})


def test_state_survives_a_round_trip_and_is_a_copy():
    state = RunState(step=3, best_metrics={"val/loss": 0.0}, log_history=[{"step": 1}])
    saved = state.state_dict()
    state.log_history.append({"step": 2})
    state.best_metrics["val/loss"] = 9.0
    assert RunState().load_state_dict(saved) == RunState(
        step=3, best_metrics={"val/loss": 0.0}, log_history=[{"step": 1}]
    )


@pytest.mark.parametrize(
    ("value", "than", "mode", "delta", "answer"),
    [
        (0.0, 0.1, "min", 0.0, True), (0.1, 0.1, "min", 0.0, False), (0.09, 0.1, "min", 0.05, False),
        (0.2, 0.1, "max", 0.0, True), (math.nan, 0.1, "min", 0.0, False), (1.0, math.nan, "min", 0.0, True),
        (1.0, None, "max", 0.0, True),
    ],
)  # fmt: skip
def test_better(value, than, mode, delta, answer):
    assert is_better(value, than, mode, delta) is answer


@pytest.mark.parametrize(
    "state", [{"step": "7"}, {"epoch": None}, {"seconds": []}, {"best_metrics": []}, {"step": True}]
)
def test_a_forged_state_is_refused_and_changes_nothing(state):
    mine = RunState(step=3, epoch=1)
    with pytest.raises(DataError, match="of the run's state"):
        mine.load_state_dict(state)
    assert (mine.step, mine.epoch) == (3, 1)
