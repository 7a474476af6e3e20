"""Hostile and broken clients: they get no reply, and neither the run nor other clients are affected."""

import json
import os
import socket
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from controlled import asked, control_file, ctl, launch_gated, start_ctl
from harness import differences, finish
from victim import Case

from forking import SERVER
from trainformer.live import address
from trainformer.live.server import MAX_BYTES, MAX_CONNECTIONS, MAX_SILENT, ControlServer


def connected(path):
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(path)  # waits; with a timeout it would fail while the backlog is full
    connection.settimeout(300)
    return connection


def reply_to(path, message):
    """Everything received until the server closes the connection."""
    with connected(path) as connection:
        try:
            connection.sendall(message)
            connection.shutdown(socket.SHUT_WR)
            received = b""
            while part := connection.recv(4096):
                received += part
        except (BrokenPipeError, ConnectionResetError):
            return b""
    return received


def line(**values):
    return json.dumps(values).encode() + b"\n"


GARBAGE = {
    "nothing": b"",
    "half a message": b'{"token": "',
    "no JSON": b"GET / HTTP/1.1\r\nHost: localhost\r\n\r\n",
    "no object": b"[1, 2, 3]\n",
    "binary": bytes(range(256)) * 10 + b"\n",
    "deeply nested": b"[" * 50_000 + b"\n",
    "huge": b'{"token": "' + b"a" * (4 * MAX_BYTES) + b'"}\n',
    "endless": b"a" * (64 * MAX_BYTES),
    "no token": line(verb="stop"),
    "a wrong token": line(verb="stop", token="0" * 64),
    "an empty token": line(verb="stop", token=""),
    "a token that is no text": line(verb="stop", token=[1]),
    "a token that cannot be encoded": b'{"verb": "stop", "token": "\\ud800"}\n',
}


def test_garbage_gets_no_reply_and_the_run_continues(tmp_path, undisturbed):
    process = launch_gated(Case(), tmp_path, {5: 1})
    known = control_file(tmp_path / "run")
    almost = known["token"][:-1] + ("0" if known["token"][-1] != "0" else "1")
    replies = {name: reply_to(known["path"], message) for name, message in GARBAGE.items()}
    replies["an almost right token"] = reply_to(known["path"], line(verb="stop", token=almost))
    assert set(replies.values()) == {b""}, replies
    hanging = [connected(known["path"]) for _ in range(MAX_CONNECTIONS // 2)]  # connect and send nothing
    hanging[0].sendall(b'{"token": ')
    assert asked(tmp_path, "save", "run")["step"] == 5
    assert finish(process, tmp_path) == 0
    assert differences(undisturbed, tmp_path, retention=False) == []
    assert [c.recv(1) for c in hanging] == [b""] * len(hanging)
    for connection in hanging:
        connection.close()


def test_a_request_outlives_its_client(tmp_path):
    process = launch_gated(Case(), tmp_path, {5: 2})
    client = start_ctl(tmp_path, "save", "run")
    known = control_file(tmp_path / "run")
    with connected(known["path"]) as connection:
        connection.sendall(line(verb="save", token=known["token"], by="a\nforged line\x1b[31m" + "x" * 500))
    assert client.wait(300) == 0
    assert finish(process, tmp_path) == 0
    log = (tmp_path / "run" / "log.txt").read_text()
    assert log.count("save at step 5: requested by ") == 2
    assert "requested by a?forged line?[31mxxx" in log
    assert max(map(len, log.splitlines())) < 400


def test_an_unknown_verb_with_a_valid_token(tmp_path):
    process = launch_gated(Case(), tmp_path, {5: 1})
    known = control_file(tmp_path / "run")
    reply = json.loads(reply_to(known["path"], line(verb="exec", token=known["token"])))
    assert reply == {"ok": False, "error": "Expected one of status, save, stop, abort, eval, received 'exec'."}
    assert asked(tmp_path, "abort", "run")["step"] == 5
    assert finish(process, tmp_path) == 0


@pytest.mark.skipif(not hasattr(os, "geteuid") or os.geteuid() != 0, reason="only root can become another user")
def test_another_user_cannot_control_the_run(tmp_path):
    process = launch_gated(Case(), tmp_path, {5: 1})
    for folder in (tmp_path, *tmp_path.parents):
        if not folder.stat().st_mode & 0o001:
            folder.chmod(0o755)
    code = (  # import everything before dropping privileges: Python itself may be unreadable afterwards
        "import os, socket, sys; from trainformer.cli import main\n"
        "main(['ctl', 'stop', 'nowhere']); main(['ctl', 'status', 'run']); sys.stdout.flush()\n"
        "os.setgid(65534); os.setuid(65534)\n"
        "try:\n    socket.socket(socket.AF_UNIX).connect(sys.argv[1])\n"
        "except PermissionError:\n    print('no entry')\n"
        "sys.exit(main(['ctl', 'stop', 'run']))"
    )
    command = [sys.executable, "-c", code, control_file(tmp_path / "run")["path"]]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout.endswith("\nno entry\n")
    assert "control.json belongs to root: only the user who started a run can control it." in " ".join(
        done.stderr.split()
    )
    assert asked(tmp_path, "save", "run")["step"] == 5
    assert finish(process, tmp_path) == 0


# -- the server alone --------------------------------------------------------------------------------------


class Listening:
    """A server that records requests and does not reply by itself."""

    def __init__(self):
        listener, self.address = address.listen()
        self.tickets = []
        self.arrived = threading.Semaphore(0)
        self.server = ControlServer(listener, self.address.token, self._take, lambda: {"step": 3})

    def _take(self, ticket):
        self.tickets.append(ticket)
        self.arrived.release()

    def __enter__(self):
        self.server.start()
        return self

    def __exit__(self, *error):
        self.server.close("It is over.")
        address.withdraw(Path(), self.address)

    def connect(self, **message):
        connection = address.connect(self.address, 300)
        connection.sendall(line(token=self.address.token, **message))
        return connection

    def ask(self, **message):
        with self.connect(**message) as connection:
            return json.loads(connection.makefile().readline())


def test_too_many_connections_are_closed_and_later_ones_served(monkeypatch):
    monkeypatch.setattr("trainformer.live.server.READ_SECONDS", 600.0)  # no connection is closed for being silent
    with Listening() as run:
        waiting = [run.connect(verb="save") for _ in range(MAX_CONNECTIONS)]
        for _ in waiting:
            run.arrived.acquire(timeout=300)
        with address.connect(run.address, 300) as refused:
            assert refused.recv(1) == b""
        for ticket in run.tickets:
            ticket.answer(step=1)
        assert [json.loads(c.makefile().readline()) for c in waiting] == [{"ok": True, "step": 1}] * MAX_CONNECTIONS
        assert [c.recv(1) for c in waiting] == [b""] * MAX_CONNECTIONS
        assert run.ask(verb="status") == {"ok": True, "step": 3}
        for connection in waiting:
            connection.close()


def test_silent_connections_do_not_keep_others_out(monkeypatch):
    """200 of them, which are never closed for being silent. The oldest are closed, and requests are answered."""
    monkeypatch.setattr("trainformer.live.server.READ_SECONDS", 600.0)
    with Listening() as run:
        waiting = run.connect(verb="save")
        run.arrived.acquire(timeout=300)
        idle = [address.connect(run.address, 300) for _ in range(200)]
        assert run.ask(verb="status") == {"ok": True, "step": 3}
        for connection in idle[: 200 - MAX_SILENT]:
            assert connection.recv(1) == b""
        run.tickets[0].answer(step=1)  # it had sent its request, and is not among the silent ones
        assert json.loads(waiting.makefile().readline()) == {"ok": True, "step": 1}
        assert run.ask(verb="status") == {"ok": True, "step": 3}
        for connection in (*idle, waiting):
            connection.close()


def _sit_there(folder, path, count, ready, end):
    os.chdir(folder)  # the path of the socket is relative
    kept = [connected(path) for _ in range(count)]
    ready.set()
    end.wait(300)
    assert kept


def test_a_process_with_many_connections_closes_only_its_own(monkeypatch):
    monkeypatch.setattr("trainformer.live.server.READ_SECONDS", 600.0)
    ready, end = SERVER.Event(), SERVER.Event()
    with Listening() as run:
        mine = [address.connect(run.address, 300) for _ in range(3)]
        other = SERVER.Process(target=_sit_there, args=(os.getcwd(), run.address.path, 200, ready, end), daemon=True)
        other.start()
        assert ready.wait(300)
        assert run.ask(verb="status") == {"ok": True, "step": 3}
        for connection in mine:  # older than all of the 200, and still served
            connection.sendall(line(token=run.address.token, verb="status"))
            assert json.loads(connection.makefile().readline())["ok"]
            connection.close()
        end.set()
        other.join(300)


def test_a_silent_client_is_disconnected(monkeypatch):
    monkeypatch.setattr("trainformer.live.server.READ_SECONDS", 0.05)
    with Listening() as run, address.connect(run.address, 300) as silent:
        assert silent.recv(1) == b""


def test_clients_that_wait_at_the_end_get_an_error():
    with Listening() as run:
        waiting = run.connect(verb="stop")
        run.arrived.acquire(timeout=300)
    assert json.loads(waiting.makefile().readline()) == {"ok": False, "error": "It is over."}
    run.tickets[0].answer(step=1)  # too late: ignored
    waiting.close()
    assert not Path(run.address.path).parent.exists()


def test_an_error_in_the_snapshot_does_not_end_the_thread():
    with Listening() as run:
        run.server._snapshot = lambda: 1 / 0
        assert "ZeroDivisionError" in run.ask(verb="status")["error"]
        run.server._snapshot = lambda: {"step": 4}
        assert run.ask(verb="status")["step"] == 4


def test_without_unix_sockets_a_local_port_is_used(monkeypatch):
    def refuse(root):
        raise OSError("no sockets in this file system")

    monkeypatch.setattr(address, "_listen_in", refuse)
    with Listening() as run:
        assert run.address.path is None
        assert run.ask(verb="status") == {"ok": True, "step": 3}
        with address.connect(run.address, 300) as stranger:
            assert stranger.getpeername()[0] == "127.0.0.1"
            stranger.sendall(line(verb="status", token="guess"))
            assert stranger.recv(1) == b""


def test_a_long_temporary_folder_is_not_used(tmp_path, monkeypatch):
    long = tmp_path / ("long" * 30)
    long.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(long))
    with Listening() as run:
        assert run.address.path.startswith("/tmp/trainformer-")
        assert run.ask(verb="status")["ok"]
    assert list(long.iterdir()) == []


def test_the_file_is_never_readable_by_others(tmp_path, monkeypatch):
    """Not for an instant: it is made with these rights, not given them afterwards.

    Also with the most generous umask, and where somebody has put a link in its place.
    """
    target = tmp_path / "elsewhere"
    target.write_text("precious")
    (tmp_path / "control.json").symlink_to(target)
    opened = []
    sys.addaudithook(lambda event, args: opened.append(args) if event == "open" and _is_control(args[0]) else None)
    monkeypatch.setattr(os, "fchmod", lambda descriptor, mode: None)
    before = os.umask(0)
    try:
        known = address.Address(token="t", process=os.getpid(), identity=None, host="h")
        address.publish(tmp_path, known)
    finally:
        os.umask(before)
    written = [flags for _, _, flags in opened if flags & os.O_WRONLY]
    assert written == [flags for flags in written if flags & os.O_EXCL]
    assert len(written) == 1
    assert (tmp_path / "control.json").stat().st_mode & 0o777 == 0o600
    assert target.read_text() == "precious"
    assert address.read(tmp_path) == known
    address.withdraw(tmp_path, address.Address(token="another", process=1, identity=None, host="h"))
    assert address.read(tmp_path) == known  # the file of another run stays
    address.withdraw(tmp_path, known)
    assert address.read(tmp_path) is None


def _is_control(path):
    return isinstance(path, str | os.PathLike) and os.fspath(path).endswith("control.json")


def test_a_stale_file_cannot_cause_the_removal_of_other_files(tmp_path):
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "control").write_text("keep")
    stale = address.Address(token="t", process=2**22 + 1, identity="gone", host="h", path=str(precious / "control"))
    (tmp_path / "control.json").write_text(json.dumps(vars(stale)))
    address.publish(tmp_path, address.Address(token="new", process=1, identity=None, host="h"))
    assert (precious / "control").read_text() == "keep"
    assert address.read(tmp_path).token == "new"


def test_usage_errors_have_exit_code_2(tmp_path):
    for words in (["explode", "run"], ["save"], ["save", "run", "--timeout", "-1"], ["stop", "a", "b"]):
        assert ctl(tmp_path, *words).returncode == 2, words
