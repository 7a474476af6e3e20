"""What `fuzz.py` reads: for each reader, valid files that are made on the spot, and the calls a user would make.

A reader raises for what it refuses, returns False for what it skipped with a warning, and anything else otherwise. It
asserts what must hold for what it accepts.
"""

from __future__ import annotations

import contextlib
import hashlib
import io
import json
import logging
import os
import random
import socket
import tarfile
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fuzz_mutations import mutate, mutate_png
from PIL import Image
from torch import nn
from torch.nn import functional as F

from trainformer.cli import main
from trainformer.core.errors import DataError, TrainformerError

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


# -- text ------------------------------------------------------------------------------------------------------------


def make_text(folder: Path) -> None:
    rows = [{"text": f"a text, number {n}", "label": n, "title": "é"} for n in range(4)]
    (folder / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "list.json").write_text(json.dumps(rows))
    (folder / "wrapped.json").write_text(json.dumps({"version": 1, "data": rows}))
    chat = {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}], "tools": "[]"}
    (folder / "chat.jsonl").write_text((json.dumps(chat) + "\n") * 3)
    shared_gpt = {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]}
    (folder / "gpt.jsonl").write_text((json.dumps(shared_gpt) + "\n") * 3)
    alpaca = {"instruction": "Say", "input": "x", "output": "y"}
    (folder / "alpaca.json").write_text(json.dumps([alpaca] * 3))
    pairs = {"prompt": "a", "chosen": "b", "rejected": "c"}
    (folder / "pairs.jsonl").write_text((json.dumps(pairs) + "\n") * 3)
    for ending, delimiter in (("csv", ","), ("tsv", "\t")):
        lines = [
            delimiter.join(("text", "label", "title")),
            *(delimiter.join((f"t{n}", str(n), "é")) for n in range(4)),
        ]
        (folder / f"table.{ending}").write_text("\n".join(lines) + "\n")
    (folder / "plain.txt").write_text("one\n\ntwo é\nthree\n")
    import bz2
    import gzip
    import lzma

    content = (folder / "train.jsonl").read_bytes()
    (folder / "train.jsonl.gz").write_bytes(gzip.compress(content, mtime=0))
    (folder / "train.jsonl.bz2").write_bytes(bz2.compress(content))
    (folder / "train.jsonl.xz").write_bytes(lzma.compress(content))


def read_text(folder: Path, changed: str) -> Any:
    from trainformer.data.text import ChatDataset, JSONLDataset, TextDataset
    from trainformer.data.text.records import StandardRecords
    from trainformer.data.text.store import fingerprint

    path = folder / changed
    refused: list[TrainformerError] = []
    kinds: list[Callable[[], Any]] = [lambda: TextDataset(path), lambda: StandardRecords(path)]
    if "json" in changed:
        kinds.append(lambda: JSONLDataset(path, label_key="label"))
    if changed.startswith(("chat", "gpt", "alpaca")):
        kinds.append(lambda: ChatDataset(path))
    if changed.endswith(".txt"):
        kinds += [lambda: TextDataset(path, split="line"), lambda: TextDataset(path, split="paragraph")]
    for kind in kinds:
        try:
            records = kind()
            fingerprint(records)
            for index in range(len(records)):
                records[index]
        except TrainformerError as error:
            refused.append(error)
    if len(refused) == len(kinds):
        raise refused[0]


# -- images ----------------------------------------------------------------------------------------------------------


def _picture(kind: str, size: int = 6) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(np.arange(3 * size * size, dtype=np.uint8).reshape(size, size, 3)).save(buffer, kind)
    return buffer.getvalue()


def make_images(folder: Path) -> None:
    for kind in ("png", "jpeg", "gif", "bmp", "tiff", "webp", "ppm", "tga", "ico", "jp2"):
        (folder / "cat").mkdir(exist_ok=True)
        with contextlib.suppress(OSError, KeyError):  # not in every build of PIL
            (folder / f"cat/1.{kind}").write_bytes(_picture("JPEG2000" if kind == "jp2" else kind.upper(), 16))


def read_images(folder: Path, changed: str) -> Any:
    from trainformer.data import find_corrupt_images
    from trainformer.data.folder import ImageFolder, read_image

    ImageFolder(folder)
    read_image(folder / changed)
    assert not find_corrupt_images((folder / changed).parent)


def make_lists(folder: Path) -> None:
    (folder / "a.png").write_bytes(_picture("PNG"))
    rows = [{"image": "a.png", "label": name, "caption": "a text"} for name in ("cat", "dog", "cat")]
    (folder / "list.json").write_text(json.dumps(rows))
    (folder / "columns.json").write_text(json.dumps({"image": ["a.png"] * 2, "label": [0, 1]}))
    (folder / "list.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (folder / "captions.json").write_text(json.dumps({"a.png": "a cat"}))
    coco = {"images": [{"id": 1, "file_name": "a.png"}], "annotations": [{"image_id": 1, "caption": "a cat"}]}
    (folder / "coco.json").write_text(json.dumps(coco))
    llava = {
        "image": "a.png",
        "conversations": [{"from": "human", "value": "<image>\nWhat?"}, {"from": "gpt", "value": "A"}],
    }
    (folder / "llava.json").write_text(json.dumps([llava] * 2))
    parts = [{"type": "image", "path": "a.png"}, {"type": "text", "text": "What?"}]
    chat = {"messages": [{"role": "user", "content": parts}, {"role": "assistant", "content": "A"}]}
    (folder / "chat.jsonl").write_text((json.dumps(chat) + "\n") * 2)
    for ending, delimiter in (("csv", ","), ("tsv", "\t")):
        lines = [delimiter.join(row.values()) for row in ({"a": "image", "b": "label", "c": "caption"}, *rows)]
        (folder / f"list.{ending}").write_text("\n".join(lines) + "\n")


def read_lists(folder: Path, changed: str) -> Any:
    from trainformer.data import ImageList, ImageTextDataset

    refused: list[TrainformerError] = []
    for kind in (ImageList, ImageTextDataset):
        try:
            items = kind(folder / changed)
            for index in range(len(items)):
                items[index]
        except TrainformerError as error:
            refused.append(error)
    if len(refused) == 2:
        raise refused[0]


def make_parquet(folder: Path) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    (folder / "a.png").write_bytes(_picture("PNG"))
    parquet.write_table(
        pa.table({"image": ["a.png"] * 3, "label": ["cat", "dog", "cat"], "text": ["a", "b", "c"]}),
        folder / "paths.parquet",
    )
    images = [{"bytes": _picture("PNG"), "path": "a.png"}] * 3
    features = {"label": {"names": ["cat", "dog"], "_type": "ClassLabel"}}
    table = pa.table({"image": images, "label": [0, 1, 0]})
    table = table.replace_schema_metadata({"huggingface": json.dumps({"info": {"features": features}})})
    parquet.write_table(table, folder / "images.parquet")


def read_parquet(folder: Path, changed: str) -> Any:
    from trainformer.data import ImageList

    items = ImageList(folder / changed)
    for index in range(len(items)):
        items[index]


def read_text_parquet(folder: Path, changed: str) -> Any:
    import datasets

    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    from trainformer.data.text import TextDataset

    datasets.disable_progress_bars()
    records = TextDataset(folder / changed)
    for index in range(len(records)):
        records[index]


def make_shard(folder: Path) -> None:
    import bz2
    import gzip
    import lzma

    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        for number in range(3):
            record = json.dumps({"label": number, "caption": "a text"}).encode()
            for ending, data in (
                ("png", _picture("PNG")),
                ("cls", str(number).encode()),
                ("json", record),
                ("txt", b"a cat"),
            ):
                member = tarfile.TarInfo(f"{number:04d}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
    (folder / "train.tar").write_bytes(out.getvalue())
    (folder / "train.tar.gz").write_bytes(gzip.compress(out.getvalue(), mtime=0))
    (folder / "train.tar.bz2").write_bytes(bz2.compress(out.getvalue()))
    (folder / "train.tar.xz").write_bytes(lzma.compress(out.getvalue()))


def read_shard(folder: Path, changed: str) -> Any:
    from trainformer.data import ImageTextDataset, WebDataset

    before = sorted(folder.rglob("*"))
    refused: list[TrainformerError] = []
    calls: tuple[Callable[[], Any], ...] = (
        lambda: list(WebDataset(folder / changed)),
        lambda: list(WebDataset(folder / changed, skip_bad=True, label_key="json:label")),
        lambda: WebDataset(folder / changed).scan(),
        lambda: list(ImageTextDataset(folder / changed)),
    )
    for call in calls:
        try:
            call()
        except TrainformerError as error:
            refused.append(error)
    assert sorted(folder.rglob("*")) == before, "a member was written to disk"
    if len(refused) == len(calls):
        raise refused[0]


# -- caches ----------------------------------------------------------------------------------------------------------


def _records() -> Any:
    rng = np.random.default_rng(0)
    return [
        {
            "input_ids": rng.integers(0, 99, n).tolist(),
            "labels": [-100] * n if n % 2 else rng.integers(0, 99, n).tolist(),
        }
        for n in rng.integers(2, 9, 12)
    ]


def _tokenized(folder: Path) -> Any:
    from trainformer.data.text.encode import Encoder
    from trainformer.data.text.store import tokenize

    return tokenize(_records(), Encoder(None, max_length=None), cache_dir=folder, workers=0, progress=False)


def make_tokens(folder: Path) -> None:
    _tokenized(folder)


def read_tokens(folder: Path, changed: str) -> Any:
    from trainformer.data.text.store import TokenStore

    def content(store: Any) -> list[Any]:
        return [(item["input_ids"].tolist(), item["labels"].tolist()) for item in (store[i] for i in range(len(store)))]

    wanted = shared("tokens", lambda: content(_tokenized(folder.parent / "original-tokens")))
    refused = False
    try:
        assert content(TokenStore((folder / changed).parent)) == wanted, "other tokens were accepted"
    except DataError:
        refused = True
    assert content(_tokenized(folder)) == wanted, "the cache was not rebuilt"
    return not refused


def make_lines(folder: Path) -> None:
    from trainformer.data.text import files

    path = folder / "text.txt"
    path.write_text("".join(f"line {n}\n" + "\n" * (n % 3) for n in range(50)))
    _with_cached_index(path, folder / "cache", files.LineIndex)


def _with_cached_index(path: Path, cache: Path, kind: Any) -> list[str]:
    """The lines, with an index that is cached however fast it was made."""
    from trainformer.data.text import files

    before, os.environ["TRAINFORMER_CACHE"] = os.environ.get("TRAINFORMER_CACHE", ""), str(cache)
    files._CACHE_AFTER_SECONDS = -1.0
    try:
        lines = kind(path)
        return [lines.text(index) for index in range(len(lines))] + [str(lines.number(i)) for i in range(len(lines))]
    finally:
        os.environ["TRAINFORMER_CACHE"] = before


def read_lines(folder: Path, changed: str) -> Any:
    from trainformer.data.text.files import LineIndex

    wanted = shared("lines", lambda: _with_cached_index(folder / "text.txt", folder.parent / "lines", LineIndex))
    with logged_warnings() as found:
        assert _with_cached_index(folder / "text.txt", folder / "cache", LineIndex) == wanted, "a wrong index was used"
    return not found


# -- folders of models -----------------------------------------------------------------------------------------------


def make_model(folder: Path) -> None:
    llama = {
        "model_type": "llama", "vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 1,
        "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 4, "hidden_act": "silu", "rms_norm_eps": 1e-5,
        "max_position_embeddings": 64, "rope_theta": 1e4, "rope_scaling": {"rope_type": "linear", "factor": 2.0},
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": True, "torch_dtype": "float32",
    }  # fmt: skip
    vit = {
        "model_type": "vit",
        "hidden_size": 8,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "image_size": 16,
        "patch_size": 8,
        "num_channels": 3,
        "hidden_act": "gelu",
        "layer_norm_eps": 1e-6,
        "id2label": {"0": "cat", "1": "dog"},
    }
    gpt2 = {
        "model_type": "gpt2",
        "vocab_size": 32,
        "n_embd": 8,
        "n_layer": 1,
        "n_head": 2,
        "n_positions": 16,
        "activation_function": "gelu_new",
        "layer_norm_epsilon": 1e-5,
    }
    for config in (llama, vit, gpt2):
        path = folder / str(config["model_type"])
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
    state = {
        "global_step": 3,
        "epoch": 1.5,
        "log_history": [{"loss": 1.0, "step": 1}],
        "best_metric": None,
        "max_steps": 9,
    }
    (folder / "trainer_state.json").write_text(json.dumps(state))


def read_model(folder: Path, changed: str) -> Any:
    from trainformer.callbacks.compat.huggingface_types import TrainerState
    from trainformer.models.jax.huggingface import read_model_config

    if changed == "trainer_state.json":
        TrainerState.load_from_json(folder / changed)
    else:
        read_model_config((folder / changed).parent)


# -- helpers ---------------------------------------------------------------------------------------------------------

_SHARED: dict[str, Any] = {}


def shared(name: str, make: Callable[[], Any]) -> Any:
    """What a process makes once."""
    if name not in _SHARED:
        _SHARED[name] = make()
    return _SHARED[name]


class _Collector(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(record.getMessage())


@contextlib.contextmanager
def logged_warnings() -> Any:
    """The warnings that are logged meanwhile."""
    handler, logger = _Collector(), logging.getLogger("trainformer")
    logger.addHandler(handler)
    try:
        yield handler.found
    finally:
        logger.removeHandler(handler)


def cli(*words: str) -> None:
    """Run a command of `trainformer`; an error that is not ours is raised."""
    with contextlib.redirect_stdout(io.TextIOWrapper(io.BytesIO(), "utf-8")) as out, contextlib.redirect_stderr(out):
        code = main([*words, "--debug"])
        out.flush()
    assert code in (0, 1), out.buffer.getvalue()


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
