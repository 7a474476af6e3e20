"""A sweep folder from a stranger: it is read, it connects nowhere, and nothing in it is unpickled or changed."""

import hashlib
import json
import pickle
import shutil
import socket
import sqlite3
from pathlib import Path

import optuna
import pytest

from trainformer.cli import main
from trainformer.core.errors import BadArgument
from trainformer.report import write_report
from trainformer.sweep import read_sweep, sweep, uniform
from trainformer.sweep.storages import _RedisJournal

QUIET = {"log": "none"}


@sweep(x=uniform(0.0, 1.0))
def plain(x):
    return x


@pytest.fixture
def received():
    plain.run(n_trials=3, **QUIET)
    return Path("sweeps/plain")


def say(folder, storage):
    spec = json.loads((folder / "sweep.json").read_bytes())
    (folder / "sweep.json").write_text(json.dumps({**spec, "storage": storage}))


@pytest.fixture
def listener():
    """A server that would notice a connection."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.0)
        yield server


def read_everywhere(folder):
    """Every way to read a sweep; the errors."""
    errors = []
    for read in (read_sweep, write_report):
        with pytest.raises(BadArgument) as error:
            read(folder)
        errors.append(str(error.value))
    assert main(["sweep", "show", str(folder)]) == 1
    assert main(["sweep", "show"]) == 0  # lists the others
    assert main(["report", str(folder)]) == 1
    return errors


@pytest.mark.parametrize(
    "url",
    ["redis://127.0.0.1:{}/0", "rediss://127.0.0.1:{}", "postgresql://me@127.0.0.1:{}/db", "mysql://127.0.0.1:{}/x"],
)
def test_it_connects_nowhere(received, listener, url, capsys):
    say(received, url.format(listener.getsockname()[1]))
    for error in read_everywhere(received):
        assert "Only files in the folder are opened" in error
        assert "--storage URL, or storage=..." in error
    with pytest.raises(BadArgument, match="the storage that sweeps/plain was started with"):
        plain.run(n_trials=4, **QUIET)
    with pytest.raises(BlockingIOError):
        listener.accept()


@pytest.mark.parametrize(
    "storage",
    [
        "{outside}/study.db",
        "sqlite:///{outside}/study.db",
        "sqlite:///file:{outside}/study.db?uri=true",
        "../../outside/study.db",
        "sqlite:///../../outside/study.db",
        "{outside}/study.log",
        "../../outside/study.log",
        "linked.db",
        "linked.log",
        "linked/study.db",
        "InMemoryStorage",
        "",
        ["a"],
        {"b": 1},
        7,
        "a\0b",
    ],
)
def test_files_outside_of_the_folder_are_not_opened(received, storage, capsys):
    outside = Path("outside").absolute()
    outside.mkdir()
    shutil.copy(received / "study.db", outside / "study.db")
    plain.run(n_trials=1, name="other", storage="outside/study.log", folder="elsewhere", **QUIET)
    (received / "linked.db").symlink_to(outside / "study.db")
    (received / "linked.log").symlink_to(outside / "study.log")
    (received / "linked").symlink_to(outside)
    before = {path: path.read_bytes() for path in outside.iterdir()}
    say(received, storage.format(outside=outside) if isinstance(storage, str) else storage)
    assert len(read_everywhere(received)) == 2  # which asserts that every way of reading refuses
    assert {path: path.read_bytes() for path in outside.iterdir()} == before


def test_a_database_that_is_a_link(received, capsys):
    shutil.move(received / "study.db", "mine.db")
    (received / "study.db").symlink_to(Path("mine.db").absolute())
    read_everywhere(received)
    with pytest.raises(BadArgument, match=r"study\.db to lie in"):
        plain.run(n_trials=4, **QUIET)


def test_a_storage_that_the_user_names(capsys):
    plain.run(n_trials=2, storage="shared.log", **QUIET)
    with pytest.raises(BadArgument, match="--storage"):
        read_sweep("plain")
    assert len(read_sweep("plain", storage="shared.log").trials) == 2
    assert main(["sweep", "show", "plain", "--storage", "shared.log"]) == 0
    assert main(["report", "plain", "--storage", "shared.log"]) == 0
    with pytest.raises(BadArgument, match="Name it again"):
        plain.run(n_trials=3, **QUIET)
    assert len(plain.run(n_trials=3, storage="shared.log", **QUIET)) == 3


def test_files_inside_of_the_folder_are_opened(received):
    for storage in (None, "study.db", "sqlite:///study.db", str((received / "study.db").absolute())):
        say(received, storage)
        assert len(read_sweep(received).trials) == 3
    plain.run(n_trials=2, name="own", storage="sweeps/own/trials.log", **QUIET)
    assert len(read_sweep("own").trials) == 2


@pytest.mark.parametrize("name", ["a b", "what?", "50%20", "#1", "ü"])
def test_reading_changes_nothing(received, name):
    folder = received.rename(f"sweeps/{name}")

    def state():
        return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir() if path.is_file()}

    before = state()
    for path in folder.iterdir():
        path.chmod(0o444)
    assert len(read_sweep(folder).trials) == 3
    assert state() == before


def test_a_database_of_a_killed_process_is_read(received):
    """It left half a transaction: a journal that has to be rolled back."""
    before = read_sweep(received).trials
    database = sqlite3.connect(received / "study.db", isolation_level=None)
    database.execute("PRAGMA cache_size=1")
    database.execute("BEGIN")
    database.execute("DELETE FROM trial_values")
    database.execute("CREATE TABLE filling AS SELECT randomblob(200000) AS x")  # more than its cache
    for name in ("study.db", "study.db-journal"):
        shutil.copy(received / name, f"{name}.killed")
    database.close()
    for name in ("study.db", "study.db-journal"):
        shutil.move(f"{name}.killed", received / name)
    assert read_sweep(received).trials == before
    assert (received / "study.db-journal").exists()


def test_no_snapshot_is_unpickled(tmp_path):
    """Optuna unpickles snapshots of a journal in redis, even if the user named it."""

    class Payload:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    class Server(_RedisJournal):
        def __init__(self):
            self._redis = {"snapshot": pickle.dumps(Payload())}

        def read_logs(self, log_number_from):
            return iter(())

        def append_logs(self, logs): ...

    optuna.storages.JournalStorage(Server())
    assert not Path("executed").exists()


def test_a_report_shows_no_run_outside_of_the_sweep(received, caplog):
    Path("private").mkdir()
    Path("private/status.json").write_text('{"status": "finished"}')
    Path("private/metrics.jsonl").write_text('{"step": 1, "secret/loss": 7.25}\n')
    Path("sweeps/plain/trials/own").mkdir(parents=True)
    shutil.copy("private/status.json", "sweeps/plain/trials/own/status.json")
    database = optuna.load_study(study_name="plain", storage="sqlite:///sweeps/plain/study.db")
    for trial, run in zip(
        database.trials, ("../../private", str(Path("private").absolute()), "trials/own"), strict=True
    ):
        with sqlite3.connect("sweeps/plain/study.db") as file:
            file.execute(
                "INSERT INTO trial_user_attributes (trial_id, key, value_json) VALUES (?, 'run', ?)",
                (trial._trial_id, json.dumps(run)),
            )
    text = write_report(received, top=3).read_text()
    assert "secret/loss" not in text
    assert caplog.text.count("is left out") == 2
