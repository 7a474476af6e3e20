"""Reads texts of every kind and makes batches of them: run as a program, where torch cannot be imported.

The same function runs in a test beside torch; both must give the same batches.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import json
import sys
from pathlib import Path
from typing import Any


class Forbidden(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """torch as a package that is there but cannot be imported: those who only look for it find it."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> Any:
        return importlib.util.spec_from_loader(name, self) if name.split(".")[0] == "torch" else None

    def create_module(self, spec: Any) -> Any:
        raise ImportError(f"{spec.name} was imported")

    def exec_module(self, module: Any) -> None:
        raise AssertionError


def import_all() -> list[str]:
    """The names of the modules that JAX shares with torch, or has to itself; all of them are imported."""
    import trainformer.data

    alone = "builtin collate dataset fetcher hub labels metadata numpy_loader order samplers sharding"
    names = [f"trainformer.data.{name}" for name in f"{alone} source split".split()]
    folder = Path(trainformer.data.__file__).parent / "text"
    names += [f"trainformer.data.text.{path.stem}" for path in sorted(folder.glob("*.py")) if path.stem != "__init__"]
    for name in names:
        importlib.import_module(name)
    return names


def plain(batches: Any) -> list[Any]:
    return [[b.size, b.origin.samples.tolist(), {k: v.tolist() for k, v in b.data.items()}] for b in batches]


def read(folder: Path) -> dict[str, Any]:
    """Batches of what lies in a folder: chats.jsonl, texts/*.txt, pairs.json, table.csv, and a tokenizer."""
    from trainformer.data.builtin import builtin_arrays
    from trainformer.data.numpy_loader import numpy_source
    from trainformer.data.split import split_dataset
    from trainformer.data.text.collate import LengthGroupedSampler, pair_batch, token_batch
    from trainformer.data.text.encode import Encoder
    from trainformer.data.text.prepare import PairEncoder, causal_tokens, preference_tokens
    from trainformer.data.text.tokenizer import open_tokenizer

    tokenizer = open_tokenizer(folder / "tokenizer")
    encoder = Encoder(tokenizer, max_length=32)
    options: dict[str, Any] = {"cache_dir": folder / f"cache-{'torch' in sys.modules}"}

    def tokens(samples: list[Any]) -> Any:
        return token_batch(samples, 32, tokenizer.pad_token_id)

    chats = causal_tokens(folder / "chats.jsonl", encoder, **options)
    packed = causal_tokens(folder / "texts", encoder, packing=True, **options)
    pairs = preference_tokens(folder / "pairs.json", PairEncoder(tokenizer, max_length=32), **options)
    stream = causal_tokens(f"stream:{folder}/chats.jsonl", encoder, packing=True)
    kinds = {
        "chats": numpy_source(chats, 4, shuffle=True, seed=3, collate=tokens, pad_last=True),
        "packed": numpy_source(packed, 2, shuffle=True, seed=3, collate=tokens, drop_last=True),
        "pairs": numpy_source(pairs, 4, shuffle=True, collate=lambda found: pair_batch(found, 32, None)),
        "stream": numpy_source(stream, 4, collate=tokens, pad_last=True),
        "split": numpy_source(split_dataset(builtin_arrays("digits"), 20, seed=1)[1], 8, pad_last=True),
        "table": numpy_source(
            folder / "table.csv", 2, collate=lambda rows: tokens([encoder.encode(row)[0]._asdict() for row in rows])
        ),
    }
    found: dict[str, Any] = {name: plain(source.batches(1)) for name, source in kinds.items()}
    found["order"] = LengthGroupedSampler(chats.lengths, 4).order(1).tolist()  # type: ignore[union-attr]
    return found


if __name__ == "__main__":
    sys.meta_path.insert(0, Forbidden())
    print(json.dumps(read(Path(sys.argv[1])) if len(sys.argv) > 1 else import_all()))
    assert "torch" not in sys.modules
