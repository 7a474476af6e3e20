"""Events of a run: the lines of ``records.jsonl``, sorted into what a page shows.

Owns how much is kept. Malformed lines are skipped: reports are needed most when something went wrong.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Sequence
from typing import Any

_MAX_EVENTS = 500  # shown; saves and evaluations of long runs are dropped first
_ROUTINE = ("saved", "evaluated")
_MAX_MATRICES, _MAX_CLASSES = 12, 64
_MAX_IMAGE_STEPS, _MAX_IMAGES, _MAX_IMAGE_LENGTH = 6, 16, 400_000
_MAX_TEXT_STEPS, _MAX_TEXT_LENGTH = 40, 4_000
_BASE64 = re.compile(r"[A-Za-z0-9+/]+={0,2}")
_SHOWN_SEPARATELY = ("confusion_matrix", "images", "text", "lr_finder")


def collect_events(records: Iterable[dict[str, Any]]) -> dict[str, Any]:
    """Events, confusion matrices, images, texts, learning rate tests, how the run was started, and its error."""
    kinds: dict[str, list[dict[str, Any]]] = {}
    usable = [record for record in records if isinstance(record.get("kind"), str)]
    for record in usable:
        kinds.setdefault(record["kind"], []).append(record)
    events = [record for record in usable if record["kind"] not in _SHOWN_SEPARATELY]
    # How the run ended, if it has not been started again since.
    last: dict[str, Any] = next((record for record in reversed(usable) if record["kind"] in ("ended", "began")), {})
    error = last.get("error") if last.get("kind") == "ended" else None
    began = {key: value for start in kinds.get("began", []) for key, value in start.items() if value is not None}
    return {
        "events": _select_events(events),
        "event_count": len(events),
        "confusion": _by_key(kinds.get("confusion_matrix", []), _MAX_MATRICES, _matrix),
        "images": _by_key(kinds.get("images", []), _MAX_IMAGE_STEPS, _images),
        "texts": _by_key(kinds.get("text", []), _MAX_TEXT_STEPS, _texts),
        "lr_finder": [test for record in kinds.get("lr_finder", [])[-3:] if (test := _lr_test(record))],
        "error": error if isinstance(error, str) else None,
        "command": [str(word) for word in began["command"]] if isinstance(began.get("command"), list) else None,
        "versions": began["versions"] if isinstance(began.get("versions"), dict) else {},
        "git": began["git"] if isinstance(began.get("git"), str) else None,
        "device": began["device"] if isinstance(began.get("device"), str) else None,
    }


def texts_in_metrics(metrics: Iterable[dict[str, Any]], records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The texts among the metrics (from ``log_text``) as records, except those that the records have too."""
    known = {record.get("key") for record in records if record.get("kind") == "text"}
    return [
        {"kind": "text", "step": record.get("step"), "key": key, "samples": [{"text": value}]}
        for record in metrics
        for name, value in record.items()
        if name.startswith("text/") and isinstance(value, str)
        if (key := name.removeprefix("text/")) not in known and key.rpartition("/")[0] not in known
    ]


def evenly_spaced(items: Sequence[Any], count: int) -> list[Any]:
    """At most `count` of the items, evenly spaced, with the first and the last.

    >>> evenly_spaced(range(10), 4)
    [0, 3, 6, 9]
    """
    if len(items) <= count:
        return list(items)
    return [items[index * (len(items) - 1) // (count - 1)] for index in range(count)]


def _select_events(records: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    routine = [n for n, record in enumerate(records) if record["kind"] in _ROUTINE]
    special = [n for n, record in enumerate(records) if record["kind"] not in _ROUTINE]
    special = special[: _MAX_EVENTS // 2] + special[max(_MAX_EVENTS // 2, len(special) - _MAX_EVENTS // 2) :]
    kept = sorted(special + evenly_spaced(routine, max(20, _MAX_EVENTS - len(special))))
    return [_event(records[number]) for number in kept]


def _event(record: dict[str, Any]) -> dict[str, Any]:
    content = {key: value for key, value in record.items() if key not in ("kind", "step", "time")}
    if len(json.dumps(content, default=str)) > _MAX_TEXT_LENGTH:
        content = {key: shortened(value, 300) for key, value in content.items()}
    return {"kind": record["kind"], "step": record.get("step"), "time": record.get("time"), "content": content}


def shortened(value: Any, length: int = _MAX_TEXT_LENGTH) -> Any:
    """A value that is not too long as it is, the beginning of its text otherwise."""
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    return value if len(text) <= length else f"{text[:length]}…"


def _by_key(
    records: list[dict[str, Any]], count: int, read: Callable[[dict[str, Any]], dict[str, Any] | None]
) -> list[dict[str, Any]]:
    """The content of each key, oldest step first. Of a step that was repeated after a resume, the last one counts."""
    found: dict[str, dict[int, dict[str, Any]]] = {}
    for record in records:
        step, content = record.get("step"), read(record)
        if content is not None and isinstance(step, int):
            found.setdefault(str(record.get("key") or ""), {})[step] = {"step": step, **content}
    return [
        {"key": key, "steps": evenly_spaced([steps[step] for step in sorted(steps)], count)}
        for key, steps in found.items()
    ]


def _matrix(record: dict[str, Any]) -> dict[str, Any] | None:
    """Counts with the true classes as rows. With very many classes, only those with the most errors are kept."""
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
    if size > _MAX_CLASSES:
        wrong = [totals[n] - matrix[n][n] for n in range(size)]
        kept = sorted(sorted(range(size), key=lambda n: -wrong[n])[:_MAX_CLASSES])  # type: ignore[assignment]
    return {
        "labels": [names[n] for n in kept],
        "matrix": [[matrix[row][column] for column in kept] for row in kept],
        "totals": [totals[n] for n in kept],
        "predicted": [predicted[n] for n in kept],
        "classes": classes if isinstance(classes, int) else size,
        "accuracy": accuracy,
    }


def _counts(record: dict[str, Any], key: str, size: int) -> list[float] | None:
    """One number per class, from a record that has a subset of all classes."""
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
        for image in images[:_MAX_IMAGES]
        if isinstance(image, dict)
        and isinstance(image.get("png"), str)
        and len(image["png"]) <= _MAX_IMAGE_LENGTH
        and _BASE64.fullmatch(image["png"])
    ]
    return {"images": kept} if kept else None


def _texts(record: dict[str, Any]) -> dict[str, Any] | None:
    samples = record.get("samples")
    if not isinstance(samples, list):
        return None
    kept = [
        {
            "prompt": shortened(prompt) if isinstance(prompt := sample.get("prompt"), str) else None,
            "text": shortened(sample["text"]),
        }
        for sample in samples
        if isinstance(sample, dict) and isinstance(sample.get("text"), str)
    ]
    return {"samples": kept} if kept else None


def _lr_test(record: dict[str, Any]) -> dict[str, Any] | None:
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
