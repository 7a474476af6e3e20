"""Folders of runs written by hand: what a run may leave, also what none that goes well leaves."""

import base64
import json
import math
import struct
import zlib
from pathlib import Path

START = 1_750_000_000.0
EVIL = '</script><script>alert(1)</script><img src=x onerror="alert(2)">'


def lines(path: Path, records, tail: str = "") -> None:
    path.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)


def write_run(folder: Path, metrics=(), records=(), *, status="finished", config=None, log="") -> Path:
    """A folder with what is given; `config` maps names to (value, source) or (value, source, what it depends on)."""
    folder.mkdir(parents=True)
    if status is not None:
        content = {"status": status, "process": 1, "identity": "none", "fingerprint": "", "time": START + 5000}
        (folder / "status.json").write_text(json.dumps(content))
    if metrics:
        lines(folder / "metrics.jsonl", metrics)
    if records:
        lines(folder / "records.jsonl", records)
    if config:
        entries = {
            key: {"value": value, "source": source, "depends_on": list(*inputs)}
            for key, (value, source, *inputs) in config.items()
        }
        (folder / "config.json").write_text(json.dumps(entries))
    if log:
        (folder / "log.txt").write_text(log)
    return folder


def training(steps=200, every=2, offset=0.0, seconds=1.0):
    """Records of `metrics.jsonl` as a training of four epochs writes them."""
    for step in range(every, steps + 1, every):
        loss = 2.3 * math.exp(-step / 60) + 0.1 + offset + 0.08 * math.sin(step * 2.1)
        yield {
            "step": step, "time": START + step * seconds, "train/loss": loss, "train/epoch": 4 * step / steps,
            "train/lr": 1e-3 * math.cos(math.pi * step / 2 / (steps + 1)), "train/grad_norm": 1.5 + math.sin(step),
            "train/samples_per_second": 900 + 50 * math.sin(step / 9), "train/memory_gb": 1.5,
        }  # fmt: skip
        if step % (steps // 4) == 0:
            yield {
                "step": step, "time": START + step * seconds + 0.5, "val/loss": loss + 0.05,
                "val/accuracy": 1 - loss / 3,
            }  # fmt: skip


def happened(steps=200):
    """Records of `records.jsonl` of a run that saw everything."""
    labels = ["cat", "dog", "owl"]
    versions = {"python": "3.11.7", "torch": "2.13.0"}
    half = steps // 2
    return [
        {"time": START, "step": 0, "kind": "began", "epochs": 4, "steps_planned": steps, "device": "cuda:0",
         "precision": "bf16", "world_size": 2, "versions": versions, "command": ["train.py", "--lr", "1e-3"],
         "git": "0f3c" * 10},
        {"time": START + 1, "step": 0, "kind": "lr_finder", "lrs": [10 ** (n / 10 - 6) for n in range(50)],
         "losses": [2.3 - 1.5 * math.exp(-(((n - 36) / 8) ** 2)) for n in range(50)], "suggestion": 2e-3},
        {"time": START + 20, "step": 20, "kind": "split", "parts": 2},
        {"time": START + 31, "step": 31, "kind": "skipped", "reason": "loss or gradient not finite", "loss": "NaN"},
        {"time": START + half, "step": half, "kind": "saved", "checkpoint": f"step_{half:08d}", "seconds": 0.4,
         "reason": "best"},
        {"time": START + 4000 + half, "step": half, "kind": "began", "device": "cuda:0", "versions": versions},
        {"time": START + 4000 + half, "step": half, "kind": "resumed", "from": f"step_{half:08d}", "from_step": half},
        {"time": START + 4000 + half, "step": half, "kind": "images", "key": "wrong", "images": [
            {"png": png(shade), "caption": f"true cat, said dog {shade}"} for shade in (40, 120, 200)]},
        *({"time": START + 4000 + step, "step": step, "kind": "text", "key": "story", "samples": [
            {"prompt": "Once upon", "text": f"a time at step {step}."}]} for step in (half, steps)),
        *({"time": START + 4000 + step, "step": step, "kind": "confusion_matrix", "key": "val", "labels": labels,
           "matrix": [[30 + step // 50, 5, 1], [2, 28, 6], [0, 9, 27]]} for step in (half, steps)),
        {"time": START + 4000 + steps, "step": steps, "kind": "off", "cups": 3},
        {"time": START + 4001 + steps, "step": steps, "kind": "ended", "status": "finished", "error": None},
    ]  # fmt: skip


CONFIG = {
    "lr": (1e-3, "user"),
    "epochs": (4, "default"),
    "num_samples": (3200, "data"),
    "total_steps": (200, "derived", ["num_samples", "epochs"]),
    "device": ("cuda", "env"),
    "task_type": ("ImageClassification", "user"),
    "monitor_metric": ("val/accuracy", "user"),
    "monitor_mode": ("max", "user"),
}


def resumed_times(metrics, after, pause):
    """The same records with a pause after a step."""
    return [{**record, "time": record["time"] + (pause if record["step"] > after else 0)} for record in metrics]


def everything(folder: Path) -> Path:
    """A run that has all a report can show."""
    metrics = resumed_times(training(), after=100, pause=4000)
    metrics[15] = {**metrics[15], "train/loss": "NaN"}
    return write_run(folder, metrics, happened(), config=CONFIG, log="INFO training\nINFO saved step_00000100\n")


def png(shade: int, size: int = 8) -> str:
    """A small grey picture."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = b"".join(b"\0" + bytes((shade + 8 * x) % 256 for x in range(size)) for _ in range(size))
    header = struct.pack(">IIBBBBB", size, size, 8, 0, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")
    return base64.b64encode(b"\x89PNG\r\n\x1a\n" + content).decode()
