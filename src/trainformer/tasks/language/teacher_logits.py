"""Run a teacher over data once, and store its most probable tokens for `Distillation`."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from rich.console import Console
from rich.progress import track
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, check_count, expected
from trainformer.data.text.collate import pad
from trainformer.data.text.encode import IGNORE_INDEX, Encoder
from trainformer.data.text.logits_store import LogitsInfo, LogitsStore, LogitsWriter, sequence_key
from trainformer.data.text.prepare import causal_tokens
from trainformer.data.text.tokenizer import vocabulary_digest
from trainformer.losses.numerics import check_positive, upcast
from trainformer.models.language import OutputStates, ensure_pad_token, load_tokenizer
from trainformer.models.modes import eval_mode
from trainformer.tasks.language.base import DTYPES
from trainformer.tasks.language.pretrained import load_whole
from trainformer.tasks.language.reference import model_digest
from trainformer.tasks.language.teacher import quantization

logger = logging.getLogger("trainformer")

_WINDOW = 32  # batches whose sequences are sorted by length together: less padding
_CHUNK = (256, 2048)  # tokens whose logits are in memory, on a CPU and on a GPU


def save_teacher_logits(
    teacher: Any,
    data: Any,
    folder: str | Path,
    *,
    k: int = 64,
    temperature: float = 1.0,
    stored_dtype: str = "fp16",
    tokenizer: Any = None,
    max_length: int = 2048,
    train_on: str = "auto",
    truncation: str = "auto",
    prompt_template: str | None = None,
    batch_size: int = 8,
    dtype: str | None = None,
    bits: int | None = None,
    device: str | None = None,
    model_kwargs: Mapping[str, Any] | None = None,
    cache_dir: str | Path | None = None,
    progress: bool = True,
) -> LogitsStore:
    """Store the `k` most probable next tokens of a teacher for every supervised token of the data, in `folder`.

    `teacher` is a name, a folder or a model (then pass its `tokenizer`); `data` is what `CausalLM` accepts, or a tuple
    of several. `max_length`, `train_on`, `truncation`, `prompt_template` and `temperature` are those of the task that
    will train on it. A token takes ``4 * k`` bytes (``6 * k`` for vocabularies beyond 65,536; `stored_dtype` may
    also be `"bf16"` or `"fp32"`).

    Sequences that the folder has already are not computed again, so a killed call can be repeated, and data can be
    added later. With several processes (`RANK` and `WORLD_SIZE`, as torchrun sets them) each takes its share. Rows of
    the output layer beyond the tokenizer are left out.

    >>> from transformers import LlamaConfig, LlamaForCausalLM
    >>> from trainformer.data import train_tokenizer
    >>> tokenizer = train_tokenizer(["a b", "b c"], vocabulary=300)
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> teacher = LlamaForCausalLM(LlamaConfig(vocab_size=len(tokenizer), **sizes))
    >>> where = getfixture("tmp_path")
    >>> save_teacher_logits(teacher, ["a b", "b c"], where / "logits", k=4, tokenizer=tokenizer, cache_dir=where)
    LogitsStore(2 sequences, 4 tokens, k=4)
    """
    _check(k, temperature, batch_size, dtype)
    tokens = load_tokenizer(_tokenizer_source(teacher, tokenizer))
    ensure_pad_token(tokens)
    place = torch.device(device or _default_device())
    kind = torch.float32 if dtype is None else DTYPES[dtype]
    options = {**quantization(bits, kind), **(model_kwargs or {})}
    model: Any = load_whole(teacher, "causal_lm", dtype=kind, **options).to(place)
    size = min(len(tokens), model.get_output_embeddings().weight.shape[0])
    if size < len(tokens):
        raise BadArgument(expected(f"a teacher with {len(tokens)} tokens, as the tokenizer has", size))
    info = LogitsInfo(
        model_digest(model), vocabulary_digest(tokens), size, min(k, size), float(temperature), stored_dtype
    )
    encoding: dict[str, Any] = {
        "max_length": max_length, "train_on": train_on, "truncation": truncation, "prompt_template": prompt_template
    }  # fmt: skip
    writer = LogitsWriter(
        folder, info, {**encoding, "teacher": str(teacher) if isinstance(teacher, str | Path) else ""}
    )
    encoder = Encoder(tokens, **encoding)
    scorer = _Scorer(model, info, tokens.pad_token_id, place)
    for number, part in enumerate(data if isinstance(data, tuple) else (data,)):
        store = causal_tokens(part, encoder, cache_dir=cache_dir, name=f"data {number}" if number else "data")
        if not hasattr(store, "__len__"):
            raise BadArgument(expected("data with a length", "a stream", "Save it to a file first."))
        missing = _missing(store, writer)
        _announce(store, missing, info)
        with writer.writing(), eval_mode(model):
            for window in _windows(store, missing, batch_size, progress):
                for key, ids, values in scorer(window, batch_size):
                    writer.add(key, ids, values)
    return LogitsStore(folder, verify=False)


class _Scorer:
    """Computes the most probable tokens of sequences."""

    def __init__(self, model: nn.Module, info: LogitsInfo, pad_id: int, device: torch.device) -> None:
        self.model, self.info, self.pad_id, self.device = model, info, pad_id, device
        self._states = OutputStates()

    def __call__(self, items: list[Any], batch_size: int) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        items = sorted(items, key=lambda item: -len(item["input_ids"]))
        for begin in range(0, len(items), batch_size):
            batch = items[begin : begin + batch_size]
            yield from zip(*self._batch(batch), strict=True)

    @torch.no_grad()
    def _batch(self, batch: list[Any]) -> tuple[list[np.ndarray], list[np.ndarray], list[np.ndarray]]:
        rows = pad(batch, self.pad_id)
        states, head = self._states(self.model, {"input_ids": rows["input_ids"].to(self.device)})
        supervised = (rows["labels"][:, 1:] != IGNORE_INDEX).to(self.device)
        flat = states[:, :-1][supervised]
        found = [self._top(part, head) for part in flat.split(_CHUNK[self.device.type != "cpu"])]
        counts = supervised.sum(1).tolist()
        ids, values = (torch.cat(parts).split(counts) for parts in zip(*found, strict=True))
        keys = [sequence_key(item["input_ids"], item["labels"]) for item in batch]
        return keys, [x.cpu().numpy() for x in ids], [x.cpu().numpy() for x in values]

    def _top(self, states: Tensor, head: nn.Linear | None) -> tuple[Tensor, Tensor]:
        logits = upcast(states if head is None else head(states))[:, : self.info.vocabulary]
        values, ids = (logits / self.info.temperature).log_softmax(-1).topk(self.info.k, -1)
        return ids, values.clamp(min=-1e4).float()


def _missing(store: Any, writer: LogitsWriter) -> list[int]:
    """The sequences of this process that the folder does not have; of equal ones, the first."""
    world = int(os.environ.get("WORLD_SIZE", "1"))
    rank = int(os.environ.get("RANK", "0")) if world > 1 else 0
    missing: dict[bytes, int] = {}
    for index in range(rank, len(store), world):  # not a share of what is missing, which changes meanwhile
        key = sequence_key(store[index]["input_ids"], store[index]["labels"])
        if key not in writer:
            missing.setdefault(key.tobytes(), index)
    return list(missing.values())


def _windows(store: Any, missing: list[int], batch_size: int, progress: bool) -> Iterator[list[Any]]:
    size = batch_size * _WINDOW
    windows = [missing[begin : begin + size] for begin in range(0, len(missing), size)]
    console = Console(stderr=True)
    hidden = not progress or not console.is_terminal
    for window in track(windows, "teacher logits", console=console, transient=True, disable=hidden):
        yield [store[index] for index in window]


def _announce(store: Any, missing: list[int], info: LogitsInfo) -> None:
    tokens = int(store.supervised[missing].sum()) if missing else 0
    logger.info(
        "%s of %s sequences to compute: %s tokens x %d, %s MB on disk", f"{len(missing):,}", f"{len(store):,}",
        f"{tokens:,}", info.k, f"{tokens * info.bytes_per_token / 1e6:,.1f}",
    )  # fmt: skip


def _check(k: int, temperature: float, batch_size: int, dtype: str | None) -> None:
    check_count("k", k)
    check_count("batch_size", batch_size)
    check_positive("temperature", temperature)
    if dtype is not None and dtype not in DTYPES:
        raise BadArgument(expected(f"dtype to be one of {', '.join(DTYPES)} or None", dtype))


def _tokenizer_source(teacher: Any, tokenizer: Any) -> Any:
    if tokenizer is None and not isinstance(teacher, str | Path):
        raise BadArgument(expected("a tokenizer for a teacher that is a model", None, "Pass tokenizer=."))
    return teacher if tokenizer is None else tokenizer


def _default_device() -> str:
    return f"cuda:{os.environ.get('LOCAL_RANK', '0')}" if torch.cuda.is_available() else "cpu"
