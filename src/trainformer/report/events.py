"""What happened in a run besides its numbers: the lines of ``records.jsonl``, sorted into what a page shows of them.

Owns how much of it is kept. A line that makes no sense is passed over: a report is wanted most when something went
wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_EVENTS = 500  # shown; saves and evaluations of long runs are thinned out first
_ROUTINE = ("saved", "evaluated")
_MATRICES, _LARGEST_MATRIX = 12, 64
_IMAGE_STEPS, _IMAGES, _LARGEST_IMAGE = 6, 16, 400_000
_TEXT_STEPS, _LONGEST_TEXT = 40, 4_000
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_SHOWN_ELSEWHERE = ("confusion_matrix", "images", "text", "lr_finder")


def happenings(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Events, confusion matrices, images, texts, tests of the learning rate, starts, and the error at the end."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    usable = [record for record in records if isinstance(record.get("kind"), str)]
    for record in usable:
        kinds.setdefault(record["kind"], []).append(record)
    told = [record for record in usable if record["kind"] not in _SHOWN_ELSEWHERE]
    ended = _last_end(usable)
    began = {key: value for start in kinds.get("began", []) for key, value in start.items() if value is not None}
    return {
        "events": _events(told),
        "event_count": len(told),
        "confusion": _by_key(kinds.get("confusion_matrix", []), _MATRICES, _matrix),
        "images": _by_key(kinds.get("images", []), _IMAGE_STEPS, _images),
        "texts": _by_key(kinds.get("text", []), _TEXT_STEPS, _texts),
        "lr_finder": [test for record in kinds.get("lr_finder", [])[-3:] if (test := _rates(record))],
        "error": ended["error"] if isinstance(ended.get("error"), str) else None,
        "command": [str(word) for word in began["command"]] if isinstance(began.get("command"), list) else None,
        "versions": began["versions"] if isinstance(began.get("versions"), dict) else {},
        "git": began["git"] if isinstance(began.get("git"), str) else None,
        "device": began["device"] if isinstance(began.get("device"), str) else None,
    }


def _last_end(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """How the run ended, if it has not begun again since."""
    for record in reversed(records):
        if record["kind"] in ("ended", "began"):
            return record if record["kind"] == "ended" else {}
    return {}


def texts_in(metrics: Iterable[dict[str, Any]], records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The texts among the metrics (``log_text``), in the form of records; without those that records have, too."""
    known = {record.get("key") for record in records if record.get("kind") == "text"}
    return [
        {"kind": "text", "step": record.get("step"), "key": key, "samples": [{"text": value}]}
        for record in metrics
        for name, value in record.items()
        if name.startswith("text/") and isinstance(value, str)
        if (key := name.removeprefix("text/")) not in known and key.rpartition("/")[0] not in known
    ]


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """Some of many, evenly, the first and the last among them.

    >>> thinned(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= most:
        return list(items)
    return [items[place * (len(items) - 1) // (most - 1)] for place in range(most)]


def _events(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    routine = [n for n, record in enumerate(records) if record["kind"] in _ROUTINE]
    special = [n for n, record in enumerate(records) if record["kind"] not in _ROUTINE]
    special = special[: _EVENTS // 2] + special[max(_EVENTS // 2, len(special) - _EVENTS // 2) :]
    kept = sorted(special + thinned(routine, max(20, _EVENTS - len(special))))
    return [_event(records[number]) for number in kept]


def _event(record: dict[str, Any]) -> dict[str, Any]:
    content = {key: value for key, value in record.items() if key not in ("kind", "step", "time")}
    if len(json.dumps(content, default=str)) > _LONGEST_TEXT:
        content = {key: _short(value) for key, value in content.items()}
    return {"kind": record["kind"], "step": record.get("step"), "time": record.get("time"), "content": content}


def _short(value: Any) -> Any:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return value if len(text) <= 300 else f"{text[:300]}…"


def _by_key(
    records: list[dict[str, Any]], most: int, read: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """What there is of each key, oldest step first. A step that was made again after a resume counts once, as last."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for record in records:
        step, content = record.get("step"), read(record)
        if content is not None and isinstance(step, int):
            found.setdefault(str(record.get("key") or ""), {})[step] = {"step": step, **content}
    return [
        {"key": key, "steps": thinned([steps[step] for step in sorted(steps)], most)} for key, steps in found.items()
    ]


def _matrix(record: dict[str, Any]) -> dict[str, Any] | None:
    """Counts with the true classes as rows. Of very many classes only those that are confused most are kept."""
    matrix, labels = record.get("matrix"), record.get("labels")
    size = len(matrix) if isinstance(matrix, list) else 0
    if not size or not all(isinstance(row, list) and len(row) == size for row in matrix or ()):
        return None
    if not all(isinstance(count, int | float) for row in matrix or () for count in row):
        return None
    assert matrix is not None
    known = isinstance(labels, list) and len(labels) == size
    names = [str(label) for label in labels] if known and labels is not None else [str(n) for n in range(size)]
    totals, kept = _counts(record, "totals", size) or [sum(row) for row in matrix], range(size)
    predicted = _counts(record, "predicted", size) or [sum(row[n] for row in matrix) for n in range(size)]
    classes, accuracy = record.get("classes"), record.get("accuracy")
    if not isinstance(accuracy, float | int):
        accuracy = sum(matrix[n][n] for n in range(size)) / sum(totals) if sum(totals) else None
    if size > _LARGEST_MATRIX:
        wrong = [totals[n] - matrix[n][n] for n in range(size)]
        kept = sorted(sorted(range(size), key=lambda n: -wrong[n])[:_LARGEST_MATRIX])  # type: ignore[assignment]
    return {
        "labels": [names[n] for n in kept],
        "matrix": [[matrix[row][column] for column in kept] for row in kept],
        "totals": [totals[n] for n in kept],
        "predicted": [predicted[n] for n in kept],
        "classes": classes if isinstance(classes, int) else size,
        "accuracy": accuracy,
    }


def _counts(record: dict[str, Any], key: str, size: int) -> list[float] | None:
    """One number for each class, of a record that has only some of all classes."""
    counts = record.get(key)
    if not isinstance(counts, list) or len(counts) != size:
        return None
    return counts if all(isinstance(count, int | float) for count in counts) else None


def _images(record: dict[str, Any]) -> dict[str, Any] | None:
    images = record.get("images")
    if not isinstance(images, list):
        return None
    kept = [
        {"png": image["png"], "caption": str(image.get("caption") or "")}
        for image in images[:_IMAGES]
        if isinstance(image, dict)
        and isinstance(image.get("png"), str)
        and len(image["png"]) <= _LARGEST_IMAGE
        and _BASE64.fullmatch(image["png"])
    ]
    return {"images": kept} if kept else None


def _texts(record: dict[str, Any]) -> dict[str, Any] | None:
    samples = record.get("samples")
    if not isinstance(samples, list):
        return None
    kept = [
        {"prompt": _cut(sample.get("prompt")), "text": _cut(sample["text"])}
        for sample in samples
        if isinstance(sample, dict) and isinstance(sample.get("text"), str)
    ]
    return {"samples": kept} if kept else None


def _cut(text: Any) -> str | None:
    if not isinstance(text, str):
        return None
    return text if len(text) <= _LONGEST_TEXT else f"{text[:_LONGEST_TEXT]}…"


def _rates(record: dict[str, Any]) -> dict[str, Any] | None:
    lrs, losses = record.get("lrs"), record.get("losses")
    if not isinstance(lrs, list) or not isinstance(losses, list) or len(lrs) != len(losses) or not lrs:
        return None
    pairs = [
        (lr, loss) for lr, loss in zip(lrs, losses, strict=True) if isinstance(lr, float | int) and 0 < lr < math.inf
    ]
    suggestion = record.get("suggestion")
    return {
        "step": record.get("step"),
        "lrs": [lr for lr, _ in pairs],
        "losses": [loss if isinstance(loss, float | int) else None for _, loss in pairs],
        "suggestion": suggestion if isinstance(suggestion, float | int) else None,
    }
