"""Hints for errors of torch in a step: what the batch holds, which sample is to blame, and what usually helps.

Nothing here runs before a step has failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainformer.core.errors import DataError, TrainformerError
from trainformer.data.shapes_in_words import shape_of

Describe = Callable[[int], str]


def explain(
    error: Exception,
    step: str,
    data: Any,
    model: nn.Module,
    samples: Any,
    describe: Describe,
    recent: Sequence[tuple[Any, Tensor]] = (),
) -> None:
    """Add notes to an error of a step. Raises `DataError` if a label of a known sample is out of range.

    `samples` are the indices of the batch, if they are known; `describe` names one. `recent` are indices and labels of
    the last batches that a GPU received: it reports errors late, and cannot be read afterwards.
    """
    if isinstance(error, (TrainformerError, torch.OutOfMemoryError)):
        return
    text = str(error)
    out_of_range = re.search(r"Target (-?\d+) is out of bounds", text)
    if out_of_range:
        _blame_label(error, int(out_of_range[1]), data, samples, describe)
    error.add_note(f"({step} received {shape_of(data)})")
    for pattern, hint in _HINTS:
        match = re.search(pattern, text)
        if match:
            note = ""
            with suppress(Exception):  # the error itself must reach the user
                note = hint(match, data, model)
            if note:
                error.add_note(f"Hint: {note}")
            break
    if "device-side assert" in text and recent:
        error.add_note(_label_range(recent, describe))


def _tensors(data: Any) -> Iterator[Tensor]:
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _tensors(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from _tensors(value)


def _integers(data: Any) -> Iterator[Tensor]:
    return (t for t in _tensors(data) if not t.is_floating_point() and t.dtype != torch.bool and t.ndim > 0)


def _blame_label(error: Exception, label: int, data: Any, samples: Any, describe: Describe) -> None:
    """Raise an error that names the samples of the batch with this label."""
    for tensor in _integers(data):
        rows = (tensor == label).reshape(len(tensor), -1).any(1).nonzero().flatten().tolist()
        if not rows:
            continue
        names = [describe(int(samples[row])) if _knows(samples, row) else f"row {row} of the batch" for row in rows[:4]]
        more = f" and {len(rows) - 4} more" if len(rows) > 4 else ""
        count = "" if label < 0 else " Does the data count classes from 1, or have more classes than the model?"
        ignore = " Pass ignore_index=-1 to the loss if it means 'no label'." if label == -1 else ""
        raise DataError(
            f"Expected labels from 0 to the number of classes minus 1, received {label} in {', '.join(names)}{more}."
            f"{count}{ignore}"
        ) from error


def _label_range(recent: Sequence[tuple[Any, Tensor]], describe: Describe) -> str:
    """The smallest and the largest label of recent batches, and where they are."""
    found = [
        (int(label), int(index))
        for samples, labels in recent
        if len(samples) == len(labels)
        for index, label in zip(samples, labels.tolist(), strict=True)
    ]
    if not found:
        return "Hint: Trainer(device='cpu') names the sample."
    (least, first), (most, last) = min(found), max(found)
    return f"Hint: labels of the last batches are from {least} ({describe(first)}) to {most} ({describe(last)})."


def _knows(samples: Any, row: int) -> bool:
    return isinstance(samples, np.ndarray) and row < len(samples)


def _dtypes(match: re.Match[str], data: Any, model: nn.Module) -> str:
    wanted = next((p.dtype for p in model.parameters() if p.is_floating_point()), None)
    others = {t.dtype for t in _tensors(data) if t.is_floating_point()} - {wanted}
    if wanted is None or (not others and not any(True for _ in _integers(data))):
        return ""
    name = str(wanted).removeprefix("torch.")
    if not others:
        return f"the model computes in {name}; convert integer inputs with .float() (and divide images by 255)."
    received = ", ".join(sorted(str(o).removeprefix("torch.") for o in others))
    numpy = " NumPy's default is float64." if "float64" in received else ""
    return f"the batch is {received}, the model {name}.{numpy} Convert the data, e.g. x.to({wanted})."


def _channels(match: re.Match[str], data: Any, model: nn.Module) -> str:
    wanted, received = int(match[1]), int(match[2])
    image = next((t for t in _tensors(data) if t.ndim == 4), None)
    if image is not None and image.shape[-1] == wanted:
        return "images are (N, H, W, C); torch expects (N, C, H, W): use x.permute(0, 3, 1, 2)."
    if received == 1:
        return f"the images have one channel, the model expects {wanted}: use x.expand(-1, {wanted}, -1, -1)."
    return f"the model expects {wanted} channels, the images have {received}."


def _embedding(match: re.Match[str], data: Any, model: nn.Module) -> str:
    tables = [(name, m.num_embeddings) for name, m in model.named_modules() if isinstance(m, nn.Embedding)]
    ids = [(int(t.max()), int(t.min())) for t in _integers(data) if t.numel()]
    if not tables or not ids:
        return ""
    listed = ", ".join(f"{name or 'the model'} has {rows} rows" for name, rows in tables[:4])
    length = max((t.shape[1] for t in _integers(data) if t.ndim > 1), default=0)
    long = f" Sequences have up to {length} tokens: a table of positions must be as long." if length else ""
    return (
        f"an embedding was asked for a row it does not have: {listed}; the batch has ids from "
        f"{min(i[1] for i in ids)} to {max(i[0] for i in ids)}.{long} Does the tokenizer fit the model?"
    )


def _always(text: str) -> Callable[..., str]:
    return lambda match, data, model: text


_INTEGER_LABELS = "class labels have to be integers: convert them with y.long()."
_HINTS: list[tuple[str, Callable[[re.Match[str], Any, nn.Module], str]]] = [
    (r"target dtype to be Long|scalar type Long|nll_loss\w*\" not implemented", _always(_INTEGER_LABELS)),
    (
        r"floating point type for target with class probabilities",
        _always("one-hot labels have to be floats (y.float()), or pass the class: y.argmax(-1)."),
    ),
    (r"0D or 1D target|multi-target not supported", _always("labels need the shape (N,): use y.squeeze(1).")),
    (
        r"argument 'target' .*must be Tensor, not (tuple|list|str)",
        _always("labels are not numbers: map them to integers, e.g. with classes.index(label), in the dataset."),
    ),
    (
        r"backward through the graph a second time",
        _always(
            "the trainer calls backward() itself: train_step only returns the loss. A tensor kept from an earlier step "
            "has to be detached."
        ),
    ),
    (r"to have (\d+) channels, but got (\d+) channels", _channels),
    (r"index out of range in self", _embedding),
    (r"same dtype|expected scalar type|Input type .* should be the same", _dtypes),
    (
        r"tensors to be on the same device|not on the expected device",
        _always(
            "model and batch are on the same device; create other tensors there, too (device=x.device), and hold other "
            "modules as attributes of the task."
        ),
    ),
    (
        r"more than 1 value per channel when training",
        _always("BatchNorm cannot train on a batch of one sample: pass drop_last=True, or another batch_size."),
    ),
    (
        r"device-side assert",
        _always("usually a label or a token id is out of range; the GPU reports that late."),
    ),
    (
        r"cannot reshape|shapes cannot be multiplied",
        _always("a layer expects inputs of another size than those above; images need nn.Flatten() before nn.Linear."),
    ),
]
