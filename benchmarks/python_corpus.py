"""A corpus without a download: the Python sources of this installation, as rows of tokens of one length.

Files of the standard library and of the installed packages are read once each (equal files count once). Whole packages
are held out for validation. A BPE tokenizer is trained on a part of the training files; documents are tokenised with
`trainformer.data`, shuffled, joined with an end token after each, and cut into rows.
"""

from __future__ import annotations

import hashlib
import json
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from trainformer.data import train_tokenizer
from trainformer.data.text.encode import Encoder
from trainformer.data.text.store import tokenize

_SMALLEST, _LARGEST = 200, 1_000_000  # bytes of a file
_VAL_SHARE = 0.02
_MAX_VAL_PACKAGE = 0.01  # share of the corpus: a large package belongs to training


def prepare(folder: Path, *, length: int, vocabulary: int, corpus_mb: float, tokenizer_mb: float, seed: int) -> dict:
    """Write `train.npy`, `val.npy` and the tokenizer, unless they are there with the same settings; return facts."""
    settings = {
        "length": length, "vocabulary": vocabulary, "corpus_mb": corpus_mb, "tokenizer_mb": tokenizer_mb, "seed": seed,
    }  # fmt: skip
    facts = folder / "corpus.json"
    if facts.exists() and (found := json.loads(facts.read_text()))["settings"] == settings:
        return found
    began = time.perf_counter()
    folder.mkdir(parents=True, exist_ok=True)
    packages = _packages(int(corpus_mb * 1e6))
    train, val, held_out = _split(packages)
    say(f"{len(train):,} files to train on, {len(val):,} held out ({', '.join(held_out)})", began)
    order = np.random.default_rng(seed).permutation(len(train))
    train = [train[i] for i in order]
    tokenizer = train_tokenizer(_first(train, int(tokenizer_mb * 1e6)), vocabulary=vocabulary)
    tokenizer.save_pretrained(folder / "tokenizer")
    say(f"tokenizer of {len(tokenizer):,} tokens", began)
    rows = {}
    for name, texts in (("train", train), ("val", val)):
        rows[name] = _rows(texts, tokenizer, length, folder / "tokens", name)
        np.save(folder / f"{name}.npy", rows[name])
        say(f"{name}: {len(rows[name]):,} rows of {length:,} tokens", began)
    found = {
        "settings": settings,
        "files": {"train": len(train), "val": len(val)},
        "megabytes": {"train": _megabytes(train), "val": _megabytes(val)},
        "tokens": {name: int(values.size) for name, values in rows.items()},
        "packages": len(packages),
        "held_out": held_out,
        "seconds": time.perf_counter() - began,
    }
    facts.write_text(json.dumps(found, indent=1))
    return found


def say(message: str, began: float) -> None:
    print(f"[{time.perf_counter() - began:6.1f} s] {message}", flush=True)


def _packages(most: int) -> dict[str, list[str]]:
    """The texts of each package, up to about `most` bytes in all, in an order that looks random but is always the same.

    Files with the same content are taken once.
    """
    found: dict[str, list[Path]] = {}
    for root in _roots():
        for path in sorted(root.rglob("*.py")):
            inside = path.relative_to(root)
            if "site-packages" not in inside.parts and "__pycache__" not in inside.parts:
                found.setdefault(inside.parts[0].removesuffix(".py"), []).append(path)
    seen: set[bytes] = set()
    texts: dict[str, list[str]] = {}
    total = 0
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        if total >= most:
            break
        kept = [text for path in found[name] if (text := _read(path, seen)) is not None]
        if kept:
            texts[name] = kept
            total += sum(map(len, kept))
    return texts


def _roots() -> list[Path]:
    paths = {sysconfig.get_paths()[name] for name in ("stdlib", "purelib", "platlib")}
    # With a virtual environment, packages may also lie in that of the interpreter.
    paths |= {entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))}
    return sorted(Path(path) for path in paths if Path(path).is_dir())


def _read(path: Path, seen: set[bytes]) -> str | None:
    try:
        raw = path.read_bytes()
        text = raw.decode()
    except (OSError, UnicodeDecodeError):
        return None
    digest = hashlib.sha256(raw.strip()).digest()
    if digest in seen or not _SMALLEST <= len(raw) <= _LARGEST:
        return None
    seen.add(digest)
    return text


def _split(packages: dict[str, list[str]]) -> tuple[list[str], list[str], list[str]]:
    """Training texts, validation texts, and the names of the packages that are held out."""
    sizes = {name: sum(map(len, texts)) for name, texts in packages.items()}
    total, held, names = sum(sizes.values()), 0, []
    for name, size in sizes.items():
        if held < _VAL_SHARE * total and size <= max(_MAX_VAL_PACKAGE * total, min(sizes.values())):
            names.append(name)
            held += size
    train = [text for name, texts in packages.items() if name not in names for text in texts]
    return train, [text for name in names for text in packages[name]], names


def _first(texts: list[str], most: int) -> Iterator[str]:
    total = 0
    for text in texts:
        if total >= most:
            return
        total += len(text)
        yield text


def _rows(texts: list[str], tokenizer: Any, length: int, cache: Path, name: str) -> np.ndarray:
    encoder = Encoder(tokenizer, max_length=None, train_on="all")
    store = tokenize([{"text": text} for text in texts], encoder, cache_dir=cache, name=name)
    stream = np.concatenate([store[i]["input_ids"] for i in range(len(store))])
    return stream[: len(stream) // length * length].reshape(-1, length).astype(np.int32)


def _megabytes(texts: list[str]) -> float:
    return round(sum(len(text.encode()) for text in texts) / 1e6, 1)
