"""Sweeps in this process: sampling, storage, pruning. Results are compared with what Optuna itself reads."""

import fcntl
import itertools
import json
import math
import signal
import socket
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import optuna
import pytest
import torch
from sweep_victims import QUIET, trials_of

from trainformer.cli import app
from trainformer.core.errors import BadArgument
from trainformer.core.secrets import MASK
from trainformer.sweep import (
    choice,
    current_trial,
    grid,
    int_uniform,
    list_sweeps,
    log_uniform,
    read_sweep,
    sweep,
    uniform,
)
from trainformer.sweep.reading import is_stale

FAIL = optuna.trial.TrialState.FAIL


class Kind:
    """Something that Optuna cannot store."""


@sweep(lr=log_uniform(1e-5, 1e-1), layers=int_uniform(1, 4), kind=choice("plain", Kind, (1, 2)), scale=2)
def experiment(lr, layers, kind, scale):
    if kind is Kind:
        raise RuntimeError("no such kind")
    if kind == (1, 2) and layers < 3:
        return math.nan
    return scale * layers - abs(math.log10(lr) + 3)


def optuna_trials(folder, name="experiment"):
    return optuna.load_study(study_name=name, storage=f"sqlite:///{folder}/study.db").trials


def test_results_are_sorted_and_agree_with_optuna():
    results = experiment.run(n_trials=16, **QUIET)
    assert len(results) == 16
    assert [row["status"] for row in results] == sorted(row["status"] for row in results)  # completed, failed
    completed = [row for row in results if row["status"] == "completed"]
    failed = [row for row in results if row["status"] == "failed"]
    assert [row["metric"] for row in completed] == sorted((row["metric"] for row in completed), reverse=True)
    assert {row["error"] for row in failed if row["config"]["kind"] is Kind} == {"RuntimeError: no such kind"}
    assert any("to be a number, received nan" in row["error"] for row in failed), "no trial gave NaN"
    for row in completed:
        assert row["metric"] == experiment(**row["config"])
        assert row["config"]["scale"] == 2

    ours = {row["number"]: row for row in results}
    theirs = {trial.number: trial for trial in optuna_trials("sweeps/experiment")}
    assert ours.keys() == theirs.keys()
    for number, row in ours.items():
        trial = theirs[number]
        assert trial.state.name == {"completed": "COMPLETE", "failed": "FAIL"}[row["status"]]
        assert trial.value == row["metric"]
        assert {key: trial.params[key] for key in ("lr", "layers")} == {
            key: row["config"][key] for key in ("lr", "layers")
        }
    assert Path(f"sweeps/experiment/trials/{failed[0]['number']:04d}/error.txt").read_text().startswith("Traceback")


def test_a_complete_sweep_returns_at_once_and_can_be_extended():
    calls = []

    @sweep(x=uniform(0, 1))
    def counted(x):
        calls.append(x)
        return x

    first = counted.run(n_trials=3, **QUIET)
    assert counted.run(n_trials=3, **QUIET) == first
    assert len(calls) == 3
    more = counted.run(n_trials=5, **QUIET)
    assert len(calls) == 5
    whole = counted.run(n_trials=5, name="whole", **QUIET)
    assert [row["config"] for row in more] == [row["config"] for row in whole]
    other = counted.run(n_trials=5, name="other", seed=1, **QUIET)
    assert {row["config"]["x"] for row in other}.isdisjoint(row["config"]["x"] for row in whole)


def test_minimize_and_infinite_metrics():
    @sweep(x=grid(3, 1, 2, 0))
    def loss(x):
        return math.inf if x == 0 else x

    results = loss.run(method="grid", direction="minimize", **QUIET)
    assert [row["metric"] for row in results] == [1, 2, 3, math.inf]
    assert trials_of("loss")[0].metric == 1


def test_grid_tries_every_combination_once():
    @sweep(a=grid(1, 2, 3), b=choice("p", Kind), x=uniform(0, 1))
    def point(a, b, x):
        return a + x

    results = point.run(method="grid", **QUIET)
    by_number = sorted(results, key=lambda row: row["number"])
    tried = [(row["config"]["a"], row["config"]["b"]) for row in by_number]
    assert tried == list(itertools.product((1, 2, 3), ("p", Kind)))
    assert len({row["config"]["x"] for row in results}) == 6  # ranges are sampled for each point
    assert len(point.run(method="grid", n_trials=2, name="capped", **QUIET)) == 2


def test_return_values_of_the_function():
    values = {
        "tensor": torch.tensor(2.0, requires_grad=True),
        "array": np.array([5.0]),
        "many": torch.ones(2),
        "no": None,
    }

    @sweep(kind=grid(*values))
    def returned(kind):
        return values[kind]

    results = returned.run(method="grid", **QUIET)
    assert [row["metric"] for row in results] == [5, 2, None, None]


def test_a_nested_sweep_is_separate_in_each_trial():
    @sweep(factor=grid(1, 2))
    def outer(factor):
        (current_trial().folder / "mine.txt").write_text("the folder exists")
        inner = sweep(x=uniform(0, 1))(lambda x: factor * x)
        return inner.run(n_trials=2, **QUIET)[0]["metric"]

    results = outer.run(method="grid", **QUIET)
    assert results[0]["metric"] == 2 * results[1]["metric"]
    assert Path("sweeps/outer/trials/0001/sweeps/lambda/study.db").exists()
    assert [path.name for path in list_sweeps()] == ["outer"]


def test_sigterm_in_a_nested_sweep_stops_both():
    @sweep(x=grid(1, 2))
    def inner(x):
        signal.raise_signal(signal.SIGTERM)

    outer = sweep(a=grid(1, 2))(lambda a: inner.run(method="grid", **QUIET))
    with pytest.raises(SystemExit) as ended:
        outer.run(method="grid", name="outer", **QUIET)
    assert ended.value.code == 128 + signal.SIGTERM
    assert [trial.status for trial in trials_of("outer")] == ["waiting"]


def test_bayes_is_better_than_random():
    @sweep(x=uniform(-10, 10), y=uniform(-10, 10))
    def bowl(x, y):
        return -((x - 3) ** 2) - (y + 4) ** 2

    found = {
        method: bowl.run(method=method, n_trials=20, name=method, storage="studies.log", **QUIET)
        for method in ("random", "bayes")
    }
    assert found["bayes"][0]["metric"] > found["random"][0]["metric"]
    # In a process of its own: for a report, Optuna's own importances take scikit-learn, SciPy and pandas along.
    program = (
        "import json, sys; from trainformer.report import write_report; from trainformer.sweep import read_sweep;"
        "write_report('bayes', storage='studies.log');"
        "found = {name for name in ('torch', 'sklearn', 'scipy', 'pandas', 'jax') if name in sys.modules};"
        "print(json.dumps([sorted(found), read_sweep('bayes', 'studies.log').importances]))"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    imported, importances = json.loads(done.stdout)
    assert imported == []
    backend = optuna.storages.journal.JournalFileBackend("studies.log")
    study = optuna.load_study(study_name="bayes", storage=optuna.storages.JournalStorage(backend))
    evaluator = optuna.importance.PedAnovaImportanceEvaluator()
    assert importances == pytest.approx(optuna.importance.get_param_importances(study, evaluator=evaluator))


# -- pruning -------------------------------------------------------------------------------------------------


@sweep(quality=grid(5, 6, 7, 8, 9, 1, 10, 2))
def curve(quality):
    trial = current_trial()
    for step in range(1, 10):
        trial.report(quality * step)
        if trial.should_stop:
            return None  # the return value of a pruned trial is ignored
    return quality * 9


def test_the_median_pruner_prunes_below_the_median():
    results = curve.run(method="grid", pruner="median", **QUIET)  # it starts pruning after five trials
    status = {row["config"]["quality"]: row["status"] for row in results}
    assert status == {5: "completed", 6: "completed", 7: "completed", 8: "completed", 9: "completed",
                      1: "pruned", 10: "completed", 2: "pruned"}  # fmt: skip
    assert [row["metric"] for row in results] == [90, 81, 72, 63, 54, 45, 2, 1]  # pruned ones with their last report
    trials = {trial.config["quality"]: trial for trial in trials_of("curve")}
    assert trials[1].intermediate == {1: 1.0}
    assert trials[10].intermediate == {step: 10.0 * step for step in range(1, 10)}
    theirs = {trial.params["quality"]: trial for trial in optuna_trials("sweeps/curve", "curve")}
    assert {q: t.state.name for q, t in theirs.items() if q in (1, 2, 10)} == {1: "PRUNED", 2: "PRUNED", 10: "COMPLETE"}
    assert curve(3) == 27  # outside a sweep reports are ignored


def test_hyperband_prunes_and_keeps_the_best():
    @sweep(quality=uniform(0, 10))
    def learner(quality):
        trial = current_trial()
        for step in range(1, 13):
            trial.report(quality * step, step)
            if trial.should_stop:
                raise optuna.TrialPruned
        return quality * 12

    results = learner.run(method="hyperband", n_trials=16, storage="study.log", **QUIET)
    pruned = [row for row in results if row["status"] == "pruned"]
    assert 3 <= len(pruned) < 16
    assert max(results, key=lambda row: row["config"]["quality"])["status"] == "completed"
    assert all(len(t.intermediate) < 12 for t in trials_of("learner", "study.log") if t.status == "pruned")


# -- the folder ----------------------------------------------------------------------------------------------


def test_a_different_sweep_in_the_same_folder_is_refused_or_archived():
    def fn(x):
        return x

    sweep(x=uniform(0, 1))(fn).run(n_trials=2, **QUIET)
    for high in (2, 1.0000001):
        with pytest.raises(BadArgument, match=rf"x was uniform\(0, 1\) and is now uniform\(0, {high}\)"):
            sweep(x=uniform(0, high))(fn).run(n_trials=2, **QUIET)
    with pytest.raises(BadArgument, match=r"seed was 42 and is now 1.*resume=False"):
        sweep(x=uniform(0, 1))(fn).run(n_trials=2, seed=1, **QUIET)
    with pytest.raises(BadArgument, match="name was 'fn' and is now 'gn'"):
        sweep(x=uniform(0, 1))(fn).run(n_trials=2, name="gn", folder="sweeps/fn", **QUIET)
    assert len(sweep(x=uniform(0, 2))(fn).run(n_trials=1, resume=False, **QUIET)) == 1
    assert len(optuna_trials("sweeps/fn/previous/001", "fn")) == 2
    assert [path.name for path in list_sweeps()] == ["fn"]
    assert json.loads(Path("sweeps/fn/sweep.json").read_text())["spaces"] == {"x": "uniform(0, 2)"}


def test_a_journal_file_as_storage_and_secrets():
    @sweep(x=uniform(0, 1))
    def fn(x):
        return x

    results = fn.run(n_trials=3, storage="shared/study.log", **QUIET)
    backend = optuna.storages.journal.JournalFileBackend("shared/study.log")
    theirs = optuna.load_study(study_name="fn", storage=optuna.storages.JournalStorage(backend)).trials
    assert sorted(trial.value for trial in theirs) == sorted(row["metric"] for row in results)
    assert [trial.metric for trial in trials_of("fn", "shared/study.log")] == [row["metric"] for row in results]
    with pytest.raises(BadArgument, match="choose another name"):
        fn.run(storage="shared/study.log", resume=False, **QUIET)
    with pytest.raises(BadArgument, match=r"sqlite:///study\.txt"):
        fn.run(storage="study.txt", name="other", **QUIET)


def files_with(*secrets):
    found = [(path, path.read_bytes()) for path in Path().rglob("*") if path.is_file()]
    return [(str(path), secret) for path, content in found for secret in secrets if secret.encode() in content]


def test_no_secret_reaches_a_file_or_the_console(capfd):
    received = []

    @sweep(x=uniform(0, 1), hub_token="hunter2", db=["redis://:swordfish@host"])
    def fn(x, hub_token, db):
        received.append((hub_token, db))
        if len(received) == 2:
            raise RuntimeError(f"{db[0]} refused {hub_token}")
        return x

    Path("shared").mkdir()
    storage = f"sqlite:///file:{Path('shared/study.db').absolute()}?uri=true&password=open-sesame"
    results = fn.run(n_trials=3, storage=storage)
    assert received == [("hunter2", ["redis://:swordfish@host"])] * 3  # the function gets them
    assert results[0]["config"]["hub_token"] == "hunter2"
    assert Path("sweeps/fn/trials/0001/error.txt").read_text().endswith(f"redis://:{MASK}@host refused {MASK}\n")
    assert json.loads(Path("sweeps/fn/sweep.json").read_text())["constants"]["hub_token"] == MASK
    assert app.main(["sweep", "show", "fn", "--storage", storage]) == 0
    assert app.main(["sweep", "show", "fn", "--storage", storage, "--json"]) == 0
    assert files_with("hunter2", "swordfish", "open-sesame") == []
    shown = "".join(capfd.readouterr())
    assert [secret for secret in ("hunter2", "swordfish", "open-sesame") if secret in shown] == []
    assert MASK in shown

    fn.spaces["hub_token"] = "another-2"  # another secret is the same sweep
    assert fn.run(n_trials=4, storage=storage, **QUIET)
    assert received[-1][0] == "another-2"
    with pytest.raises(BadArgument, match=r"If this storage is yours, name it: --storage URL"):
        read_sweep("fn")


@pytest.mark.parametrize("url", ["postgresql://me:sword@fish@host/db", "mysql://host/db?user=me&passwd=sword@fish"])
def test_the_error_of_a_storage_does_not_contain_its_password(url):
    @sweep(x=uniform(0, 1))
    def fn(x):
        return x

    with pytest.raises(BadArgument, match="a storage that can be opened") as caught:
        fn.run(storage=url, **QUIET)
    assert "sword" not in str(caught.value)
    assert "fish" not in str(caught.value)
    assert files_with("fish") == []


def test_secrets_are_not_searched():
    @sweep(api_key=choice("one-1", "two-2"))
    def fn(api_key):
        return 1

    with pytest.raises(BadArgument, match="api_key to be no secret") as caught:
        fn.run(**QUIET)
    assert "one-1" not in str(caught.value)


def test_a_trial_whose_process_died_is_retried_once():
    @sweep(x=uniform(0, 1), y=uniform(0, 1))
    def fn(x, y):
        return x + y

    reference = fn.run(n_trials=4, name="reference", **QUIET)
    fn.run(n_trials=2, **QUIET)
    study = optuna.load_study(study_name="fn", storage="sqlite:///sweeps/fn/study.db")
    dead = {"host": socket.gethostname(), "process": 2**22 + 1, "identity": "gone", "call": ""}
    study.enqueue_trial({}, user_attrs={"owner": dead})  # as left by a process killed in the third trial
    study.ask().suggest_float("x", 0, 1)  # halfway through sampling: y is missing
    assert [trial.status for trial in trials_of("fn")] == ["completed"] * 2 + ["waiting"]
    results = fn.run(n_trials=3, **QUIET)
    assert [row["attempt"] for row in sorted(results, key=lambda row: row["number"])] == [1, 1, 2]
    results = fn.run(n_trials=4, **QUIET)
    assert [(r["number"], r["config"], r["metric"]) for r in results] == [
        (r["number"], r["config"], r["metric"]) for r in reference
    ]
    assert [trial.earlier for trial in trials_of("fn") if trial.attempt == 2] == [["the process of the sweep died"]]
    with sqlite3.connect("sweeps/fn/study.db") as database:
        assert database.execute("select count(*) from trials").fetchone() == (5,)


@pytest.mark.parametrize(("is_isolated", "status"), [(True, "completed"), (False, "failed")])
def test_a_worker_is_not_to_blame_for_the_end_of_the_sweep(is_isolated, status):
    @sweep(x=uniform(0, 1))
    def fn(x):
        return x

    fn.run(n_trials=1, **QUIET)
    study = optuna.load_study(study_name="fn", storage="sqlite:///sweeps/fn/study.db")
    dead = {"host": socket.gethostname(), "process": 2**22 + 1, "identity": "gone", "call": ""}
    study.enqueue_trial({}, user_attrs={"owner": dead, "attempt": 2, "is_isolated": is_isolated})
    study.ask()  # the second attempt, and the sweep was killed
    results = fn.run(n_trials=2, **QUIET)
    assert {row["number"]: (row["status"], row["attempt"]) for row in results} == {0: ("completed", 1), 1: (status, 2)}


def test_trials_left_by_an_earlier_call_in_this_process_are_retried(monkeypatch):
    @sweep(x=grid(1, 2))
    def fn(x):
        return x

    def interrupted(*arguments):
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr("trainformer.sweep.runner.Progress.trial_started", interrupted)
        patched.setattr(
            "trainformer.sweep.study.SweepStudy.requeue", interrupted
        )  # as in a notebook, at the worst moment
        with pytest.raises(KeyboardInterrupt):
            fn.run(method="grid", **QUIET)
    assert len(optuna_trials("sweeps/fn", "fn")) == 1
    assert [row["metric"] for row in fn.run(method="grid", **QUIET)] == [2, 1]


@pytest.mark.parametrize("write", ["ask", "tell"])
def test_ctrl_c_waits_for_a_write_to_the_storage(monkeypatch, write):
    fn = sweep(x=grid(1, 2))(lambda x: x)
    storing, begun, ended = getattr(optuna.Study, write), [], []

    def interrupted(self, *args, **kwargs):
        begun.append(write)
        if len(begun) == 1:  # inside a transaction it would leave the database locked
            signal.raise_signal(signal.SIGINT)
        ended.append(storing(self, *args, **kwargs))
        return ended[-1]

    with monkeypatch.context() as patched:
        patched.setattr(optuna.Study, write, interrupted)
        with pytest.raises(KeyboardInterrupt):
            fn.run(method="grid", name="fn", **QUIET)
    assert len(begun) == len(ended) == 1
    assert [trial.status for trial in trials_of("fn")] == [{"ask": "waiting", "tell": "completed"}[write]]
    assert [row["metric"] for row in fn.run(method="grid", name="fn", **QUIET)] == [2, 1]


def test_trials_are_taken_under_a_file_lock(monkeypatch):
    ask, refused = optuna.Study.ask, []

    def watched(self):
        with open("sweeps/fn/study.db.lock") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                refused.append("another")
        return ask(self)

    monkeypatch.setattr(optuna.Study, "ask", watched)
    assert len(sweep(x=grid(1, 2))(lambda x: x).run(method="grid", name="fn", **QUIET)) == len(refused) == 2


def test_a_trial_that_another_process_took_for_dead_is_not_counted(caplog):
    @sweep(x=grid(1, 2))
    def fn(x):
        if x == 1 and current_trial().attempt == 1:
            optuna.load_study(study_name="fn", storage="sqlite:///sweeps/fn/study.db").tell(0, state=FAIL)
            current_trial().report(x)
            return 100 * current_trial().should_stop
        return x

    results = fn.run(method="grid", **QUIET)
    assert [(row["number"], row["metric"], row["status"]) for row in results] == [
        (1, 2, "completed"),
        (0, None, "failed"),
    ]
    assert "took this one for dead" in caplog.text


def test_heartbeats_for_other_machines(monkeypatch):
    monkeypatch.setattr("trainformer.sweep.runner.HEARTBEAT_SECONDS", 0.05)

    @sweep(x=grid(1))
    def fn(x):
        began = time.time()
        while trial_of("fn").user_attrs["heartbeat"] < began + 0.2:
            assert time.time() < began + 300
            time.sleep(0.05)
        return x

    def trial_of(name):
        backend = optuna.storages.journal.JournalFileBackend("shared.log")
        return optuna.load_study(study_name=name, storage=optuna.storages.JournalStorage(backend)).trials[0]

    assert fn.run(method="grid", storage="shared.log", **QUIET)[0]["status"] == "completed"
    trial = trial_of("fn")
    for age, stale in ((30, False), (1000, True)):
        elsewhere = trial.user_attrs["owner"] | {"host": "another"}
        trial.user_attrs |= {"owner": elsewhere, "heartbeat": time.time() - age}
        assert is_stale(trial) is stale


def test_no_trial_starts_after_the_timeout():
    clock = []

    @sweep(x=uniform(0, 1))
    def slow(x):
        time.sleep(0.2)
        clock.append(x)
        return x

    assert len(slow.run(n_trials=50, timeout=0.1, **QUIET)) == len(clock) == 1


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"method": "baies"}, "Did you mean 'bayes'"),
        ({"direction": "max"}, "maximize, minimize"),
        ({"n_trials": -1}, "n_trials"),
        ({"n_parallel": 0}, "n_parallel"),
        ({"timeout": -3}, "timeout"),
        ({"backend": "dask"}, "'local' or 'ray'"),
        ({"pruner": "mediann"}, "Did you mean 'median'"),
        ({"sampler": "tpe"}, "an Optuna sampler"),
        ({"name": ".."}, "a valid folder name"),
        ({"storage": "sqlite:///no/such/folder.db"}, "unable to open"),
        ({"n_parallel": 2, "gpus_per_trial": 0.5}, "gpus_per_trial"),
    ],
)
def test_bad_arguments(options, words):
    with pytest.raises(BadArgument, match=words):
        experiment.run(**options, **QUIET)


def test_unknown_and_broken_sweeps_are_reported():
    Path("sweeps/near").mkdir(parents=True)
    Path("sweeps/near/sweep.json").write_text("{}")
    with pytest.raises(BadArgument, match="Did you mean 'near'"):
        read_sweep("neat")
    with pytest.raises(BadArgument, match="lacks name, direction"):
        read_sweep("near")
