"""The readers of `fuzz.py` for data: text, tables, images, shards, caches, and folders of models."""

from __future__ import annotations

import contextlib
import io
import json
import os
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from fuzz_helpers import logged_warnings, shared
from PIL import Image

from trainformer.core.errors import DataError, TrainformerError

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
