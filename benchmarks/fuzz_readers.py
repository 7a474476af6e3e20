"""What `fuzz.py` reads: for each reader, valid files that are made on the spot, and the calls a user would make.

A reader raises for what it refuses, returns False for what it skipped with a warning, and anything else otherwise. It
asserts what must hold for what it accepts.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import random
import socket
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_data_readers import (
    make_images,
    make_lines,
    make_lists,
    make_model,
    make_parquet,
    make_shard,
    make_text,
    make_tokens,
    read_images,
    read_lines,
    read_lists,
    read_model,
    read_parquet,
    read_shard,
    read_text,
    read_text_parquet,
    read_tokens,
)
from fuzz_helpers import cli, logged_warnings, shared
from fuzz_mutations import mutate, mutate_png
from torch import nn
from torch.nn import functional as F

Make = Callable[[Path], None]
Read = Callable[[Path, str], Any]


@dataclass(frozen=True)
class Reader:
    """`make` writes valid files into a folder, `read` reads them, given which one was changed.

    `targets` are the files that are changed (a pattern each); `seal` updates digests afterwards, half of the time, so
    that what is behind them is reached. `share` is the part of all cases.
    """

    make: Make
    read: Read
    share: float
    targets: tuple[str, ...] = ("**/*",)
    seal: Callable[[Path, str, random.Random], None] | None = None


# -- checkpoints -----------------------------------------------------------------------------------------------------


class Task:
    """The smallest task."""

    def __init__(self) -> None:
        self.model = nn.Linear(2, 2)

    def train_step(self, batch: Any) -> Any:
        return F.cross_entropy(self.model(batch[0]), batch[1])

    def eval_step(self, batch: Any) -> Any:
        return {"loss": self.train_step(batch)}


def _trainer(folder: Path) -> Any:
    from trainformer import Trainer
    from trainformer.callbacks import EMA

    data = (torch.randn(8, 2), torch.tensor([0, 1] * 4))
    options = {"batch_size": 4, "max_steps": 4, "log": "none", "save_every": 2, "save_last": 2}
    return Trainer(Task(), data, callbacks=[EMA()], run_dir=str(folder / "run"), **options)


def make_run(folder: Path) -> None:
    _trainer(folder).fit()


def seal_manifest(folder: Path, changed: str, rng: random.Random) -> None:
    """Make the digests fit what was changed: a forged checkpoint."""
    path = next(p / "manifest.json" for p in (folder / changed).parents if (p / "manifest.json").exists())
    with contextlib.suppress(Exception):  # no longer a manifest
        content = json.loads(path.read_bytes())
        content.pop("sha256", None)
        for records in content["components"].values():
            for record in records:
                data = (path.parent / record["name"]).read_bytes() if path.name != Path(changed).name else None
                if data is not None:
                    record |= {"size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
        digest = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()
        path.write_bytes(json.dumps({**content, "sha256": digest}).encode())


def read_manifest(folder: Path, changed: str) -> Any:
    from trainformer import checkpoint
    from trainformer.checkpointing import CheckpointStore
    from trainformer.checkpointing.retention import Retention

    with logged_warnings() as found:
        store = CheckpointStore(folder / "run/checkpoints")
        newest = store.newest()
        assert newest is not None, "the older checkpoint is intact"
        skipped = newest.path != store.path_of(4)
        assert not skipped or found, "skipped without a warning"
        Retention(1, 1, 3, "val/loss").to_delete(store.checkpoints())
        checkpoint.list_checkpoints(folder / "run")
        problems = checkpoint.verify(folder / "run")
        assert not skipped or problems, "ckpt verify says nothing"
    checkpoint.inspect(newest.path).facts()
    return not skipped


def read_checkpoint(folder: Path, changed: str) -> Any:
    from trainformer import checkpoint

    trainer = shared("trainer", lambda: _trainer(folder))
    path = folder / "run/checkpoints/step_00000004"
    trainer.load(path)
    checkpoint.inspect(path).facts()
    return None


def make_single_file(folder: Path) -> None:
    trainer = _trainer(folder)
    trainer.save(folder / "all.pt")
    torch.save(trainer.task.model.state_dict(), folder / "weights.pt")


def read_single_file(folder: Path, changed: str) -> Any:
    from trainformer import checkpoint

    problems = checkpoint.verify(folder / changed)
    checkpoint.inspect(folder / changed).facts()
    if changed == "all.pt":
        shared("trainer", lambda: _trainer(folder)).load(folder / changed)
    return not problems


def make_weights(folder: Path) -> None:
    from trainformer.utils.tensor_files import write_weights

    tied = torch.randn(3, 4)
    write_weights(folder, "model", {"weight": torch.randn(2, 3), "bias": torch.ones(2), "a": tied, "b": tied})
    (folder / "sharded").mkdir()
    write_weights(folder / "sharded", "model", {"x": torch.randn(8), "y": torch.randn(8)}, most=40)


def read_weights(folder: Path, changed: str) -> Any:
    from trainformer import checkpoint
    from trainformer.models.jax.weight_files import open_weights
    from trainformer.utils.tensor_files import read_weights

    path = folder / changed
    with open_weights(path.parent) as weights:
        for name in weights:
            weights[name]
    if changed.endswith(".safetensors"):
        read_weights(path.parent, [path.name])
        checkpoint.inspect(path).facts()


def make_tree(folder: Path) -> None:
    from trainformer.utils.tree_files import write_tree

    write_tree(folder, "state", {"step": 3, "arrays": [np.arange(4), np.ones((2, 2), np.float32)], "deep": {"x": [1]}})


def read_tree(folder: Path, changed: str) -> Any:
    from trainformer.utils.tree_files import read_tree

    read_tree(folder, ["state.json", "state.npz"])


def make_shards(folder: Path) -> None:
    from trainformer.distributed import TorchProcessGroup
    from trainformer.distributed.sharded_state import write_sharded

    tied = torch.randn(4, 4)
    state = {"w": tied, "again": tied, "deep": [{"b": torch.ones(3)}, 1, "x"]}
    write_sharded(folder, "model", state, TorchProcessGroup())


def read_shards(folder: Path, changed: str) -> Any:
    from trainformer.distributed.sharded_state import ShardedState

    ShardedState(folder, sorted(path.name for path in folder.iterdir())).unsharded()


# -- folders of runs and sweeps --------------------------------------------------------------------------------------


def make_folder(folder: Path) -> None:
    make_run(folder)
    run = folder / "run"
    lines = [
        {"step": n, "time": 1e9 + n, "train/loss": 1 / n, "train/epoch": n / 4, "val/loss": 2 / n} for n in range(1, 5)
    ]
    texts = [{"step": 4, "time": 1e9, "text/sample": "a text"}, {"step": 4, "time": 1e9, "train/loss": "NaN"}]
    (run / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in [*lines, *texts]))
    with (run / "records.jsonl").open("a") as file:
        for kind in ("resumed", "split", "skipped", "warning", "evaluated"):
            content = {
                "from_step": 2,
                "sizes": {"train": 3, "val": 1},
                "message": "text",
                "count": 1,
                "metrics": {"a": 1.0},
            }
            file.write(json.dumps({"step": 2, "time": 1e9, "kind": kind, "content": content, **content}) + "\n")
    address = {"token": "t", "process": 1, "identity": "none", "host": "elsewhere", "path": "/nowhere", "port": None}
    (run / "control.json").write_text(json.dumps(address))
    (run / "recipe.yaml").write_bytes(RECIPE)


def read_folder(folder: Path, changed: str) -> Any:
    from trainformer.live import list_runs
    from trainformer.loggers import JsonlLogger, read_jsonl
    from trainformer.report import write_report

    run = folder / "run"
    list_runs(folder)
    cli("runs", str(folder))
    cli("runs", str(folder), "--json", "--sort", "best")
    if changed.endswith("control.json"):
        cli("ctl", "status", str(run))
    if changed.endswith(".jsonl"):
        with warnings.catch_warnings(record=True):
            warnings.simplefilter("always")
            read_jsonl(run / changed.split("/")[-1])
            logger = JsonlLogger(run / changed.split("/")[-1])
            logger.continue_from(3)
            logger.init({})
            logger.finish()
    write_report(run, folder / "report.html")


def make_sweep(folder: Path) -> None:
    from trainformer.sweep import choice, sweep

    found = sweep(lr=choice(0.1, 0.2, 0.3))(lambda lr: -lr)
    found.run(n_trials=2, folder=folder / "found", log="none")
    spec = json.loads((folder / "found/sweep.json").read_bytes())
    (folder / "found/sweep.json").write_text(json.dumps(spec))


def read_sweep(folder: Path, changed: str) -> Any:
    from trainformer.sweep.reading import read_spec, read_sweep

    spec = read_spec(folder / "found")
    if not spec.get("storage"):  # a storage elsewhere is not opened here
        read_sweep(folder / "found", with_importances=False)


# -- configs ---------------------------------------------------------------------------------------------------------

RECIPE = b"""# a recipe
seed: 3
shared: &shared {lr: 1e-3, betas: [0.9, 0.99]}
optimizer: *shared
merged: {<<: *shared, lr: 2}
text: |
  two
  lines
trainer: !singleton:trainformer:Trainer
  task: !singleton:trainformer.tasks:ImageClassification {model: resnet18}
  data: !var {name: data, default: digits}
  epochs: {{ 1 + 2 }}
  callbacks: !list
    - !singleton:trainformer.callbacks:EMA {}
"""


def make_configs(folder: Path) -> None:
    (folder / "recipe.yaml").write_bytes(RECIPE)
    values = {"seed": 3, "model": {"width": 8, "layers": [1, 2, {"x": None}]}, "lr": 1e-3, "name": "a", "on": True}
    (folder / "config.json").write_text(json.dumps(values))
    toml = 'seed = 3\nname = "a"\nwhen = 2001-02-03T04:05:06Z\n[model]\nwidth = 8\nlayers = [1, 2]\n[[many]]\nx = 1.5\n'
    (folder / "config.toml").write_text(toml)


def read_configs(folder: Path, changed: str) -> Any:
    from trainformer.cli.recipes import settings_in
    from trainformer.config import load_config, to_yaml

    config = load_config(folder / changed)
    to_yaml(config)
    if changed == "recipe.yaml":
        settings_in(folder)


# -- live control ----------------------------------------------------------------------------------------------------


def make_message(folder: Path) -> None:
    (folder / "message.json").write_text(json.dumps({"token": "@token@", "verb": "save", "by": "ann", "wait": True}))


def _server() -> Any:
    from trainformer.live import address
    from trainformer.live.server import ControlServer

    listener, where = address.listen()
    server = ControlServer(listener, where.token, lambda ticket: ticket.answer(step=1), lambda: {"step": 3})
    server.start()
    return where


def read_message(folder: Path, changed: str) -> Any:
    from trainformer.live import address

    where = shared("server", _server)
    message = (folder / changed).read_bytes().replace(b"@token@", where.token.encode())

    def exchange(sent: bytes) -> bytes:
        with address.connect(where, 60) as connection, contextlib.suppress(BrokenPipeError, ConnectionResetError):
            connection.sendall(sent)
            connection.shutdown(socket.SHUT_WR)
            received = b""
            while part := connection.recv(1 << 16):
                received += part
            return received
        return b""

    reply = exchange(message + b"\n")
    assert not reply or isinstance(json.loads(reply), dict)
    again = exchange(json.dumps({"token": where.token, "verb": "status"}).encode() + b"\n")
    assert json.loads(again) == {"ok": True, "step": 3}, "the server answers the next client"
    return bool(reply) and json.loads(reply)["ok"]


def make_reply(folder: Path) -> None:
    from trainformer.utils.processes import process_identity

    process = os.getpid()
    identity = process_identity(process)
    status = {"status": "running", "process": process, "identity": identity, "fingerprint": "", "time": 1e9}
    (folder / "status.json").write_text(json.dumps(status))
    (folder / "reply.json").write_text(
        json.dumps({"ok": True, "step": 3, "planned_steps": 9, "metrics": {"train/loss": 1.0}})
    )


def read_reply(folder: Path, changed: str) -> Any:
    """Ask a server that sends something else."""
    from trainformer.live import address, client
    from trainformer.utils.processes import process_identity

    process = os.getpid()
    content = (folder / "reply.json").read_bytes() + b"\n"
    status = json.loads((folder / "status.json").read_bytes())
    status |= {"process": process, "identity": process_identity(process)}
    (folder / "status.json").write_text(json.dumps(status))

    def listening() -> tuple[Any, Any, list[bytes]]:
        listener, where = address.listen()
        replies: list[bytes] = []

        def serve() -> None:
            while True:
                connection, _ = listener.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(1 << 16)
                    connection.sendall(replies[-1])

        threading.Thread(target=serve, daemon=True).start()
        return where, serve, replies

    where, _, replies = shared("listener", listening)
    replies[:] = [content]
    address.publish(folder, where)
    client.time = _NoSleep()  # type: ignore[assignment]  # it waits a second for a run that is about to end
    answer = client.ask(folder, "status", timeout=60)
    assert answer["ok"]
    cli("ctl", "status", str(folder))


class _NoSleep:
    """The module `time`, in which sleeping takes no time."""

    def __getattr__(self, name: str) -> Any:
        import time

        return (lambda seconds: None) if name == "sleep" else getattr(time, name)


READERS: dict[str, Reader] = {
    "manifests": Reader(make_run, read_manifest, 6, ("run/checkpoints/step_00000004/manifest.json",), seal_manifest),
    "checkpoints": Reader(make_run, read_checkpoint, 1, ("run/checkpoints/step_00000004/*[!t].*",), seal_manifest),
    "single files": Reader(make_single_file, read_single_file, 0.5, ("*.pt",)),
    "safetensors": Reader(make_weights, read_weights, 20),
    "trees (json, npz)": Reader(make_tree, read_tree, 4),
    "sharded state": Reader(make_shards, read_shards, 0.8),
    "run folders": Reader(make_folder, read_folder, 1.5, ("run/*.json", "run/*.jsonl", "run/recipe.yaml")),
    "sweep.json": Reader(make_sweep, read_sweep, 0.3, ("found/sweep.json",)),
    "configs": Reader(make_configs, read_configs, 3),
    "control messages": Reader(make_message, read_message, 8),
    "control replies": Reader(make_reply, read_reply, 2, ("reply.json",)),
    "text, tables": Reader(make_text, read_text, 12),
    "images": Reader(make_images, read_images, 4),
    "image lists": Reader(make_lists, read_lists, 16, ("*.json", "*.jsonl", "*.csv", "*.tsv")),
    "parquet": Reader(make_parquet, read_parquet, 3, ("*.parquet",)),
    "parquet (datasets)": Reader(make_parquet, read_text_parquet, 0.2, ("paths.parquet",)),
    "tar shards": Reader(make_shard, read_shard, 3),
    "token caches": Reader(make_tokens, read_tokens, 1.5, ("*/*",)),
    "line indexes": Reader(make_lines, read_lines, 2, ("cache/lines/*",)),
    "model configs": Reader(make_model, read_model, 12),
}

__all__ = ["READERS", "Reader", "mutate", "mutate_png"]
