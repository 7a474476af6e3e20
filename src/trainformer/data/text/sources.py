"""Records by path or name: `load_text` decides which reader a path, folder or name needs."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.data.builtin import corpus_names, load_corpus
from trainformer.data.hub import is_hf_saved, load_from_hub, load_hf_saved, select_split
from trainformer.data.labels import HF_STREAM, STREAM, is_instance_of
from trainformer.data.text.files import LineIndex, TextFile, content_suffix
from trainformer.data.text.streams import PREFIX, open_stream
from trainformer.data.text.tables import (
    CSV,
    JSON,
    LINES,
    PARQUET,
    RECORD_SUFFIXES,
    TEXT_SUFFIXES,
    JSONLDataset,
    TextFiles,
    concat_records,
    read_csv,
    read_parquet,
)

logger = logging.getLogger("trainformer")

_SPLITS = {"train", "validation", "val", "valid", "test", "dev", "eval"}
_MAX_NAME_LENGTH = 1024
_UNITS = ("document", "paragraph", "line")


def records_of(source: Any, split: str | None) -> Any:
    """The records of a path, name, dataset or iterable: something with an index and at least one record."""
    if isinstance(source, str | Path):
        return load_text(source, split=split)
    if isinstance(source, Mapping):
        source = select_split(source, split)
    elif split is not None:
        raise BadArgument(expected("split only with a path or a name", split, "Choose the split of the data yourself."))
    if is_instance_of(source, STREAM) or is_instance_of(source, HF_STREAM):
        do = "Pass a list of the first records, or the files."
        raise DataError(expected("data with a length", type(source).__name__, do))
    if not (hasattr(source, "__len__") and hasattr(source, "__getitem__")):
        if not isinstance(source, Iterable):
            raise BadArgument(expected("a path, a dataset, or an iterable of texts or records", source))
        source = list(source)
    if not len(source):
        raise DataError(expected("at least one record", "none"))
    return source


def load_text(path_or_name: str | Path, *, split: str | None = None) -> Any:
    """Records by path or name, unchanged (`StandardRecords` converts them to a standard schema):

    - a text file, or a folder of them (`.txt`, `.md`, `.py`, ...; sorted, without hidden files): documents
      ``{"text"}``, one per file, or with `split="line"` or `"paragraph"` one per line or paragraph;
    - `.jsonl`, `.json`, `.csv`, `.tsv` or `.parquet`, or a folder of these, of which `split` selects those whose name
      starts with it; JSON Lines and text may be compressed (`.gz`, `.bz2`, `.xz`);
    - a folder written by HF's `save_to_disk`, or a dataset of the hub: `"hf:name"`, `"hf:name:split"`,
      `"hf:name@configuration"`;
    - a stream, which is never stored: `"stream:hf:name"` or `"stream:data/*.jsonl.gz"`; see `open_stream`;
    - a built-in corpus: `"python-stdlib"`, `"python-stdlib:test"` (write `"./python-stdlib"` for a folder).
    """
    if isinstance(path_or_name, str):
        if path_or_name in corpus_names():
            return load_corpus(path_or_name if split in (None, "train") else f"{path_or_name}:{split}")
        if path_or_name.startswith(PREFIX):
            return open_stream(path_or_name)
        if path_or_name.startswith("hf:") and not os.path.exists(path_or_name):
            name, _, named_split = path_or_name.removeprefix("hf:").partition(":")
            name, _, configuration = name.partition("@")
            return load_from_hub(name, split or named_split or None, configuration or None)
    path = Path(path_or_name).expanduser()
    if not os.path.exists(path):  # Path.exists raises if a name is too long
        _refuse_missing(path_or_name)
    if is_hf_saved(path):
        records = load_hf_saved(path, split)
    elif path.is_dir():
        records = _load_folder(path, split)
    else:
        records = _load_files([path], split)
    if not len(records):
        raise DataError(f"Expected at least one record in '{path}', received none.")
    return records


def _refuse_missing(name: str | Path) -> NoReturn:
    known = ", ".join(map(repr, corpus_names()))
    if isinstance(name, str) and os.sep not in name and (close := did_you_mean(name, corpus_names())):
        raise DataError(expected("a file, a folder or a built-in corpus", name, f"{close} Built-in: {known}."))
    if len(str(name)) > _MAX_NAME_LENGTH or "\n" in str(name):
        raise BadArgument(expected("a path or name", f"{str(name)[:60]}...", "Pass texts themselves as a list."))
    path = Path(name).expanduser()
    names = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
    raise DataError(
        f"Expected a file or folder, received '{path}', which does not exist. {did_you_mean(path.name, names)}".strip()
    )


def _load_folder(folder: Path, split: str | None) -> Any:
    files = []  # those that are not hidden or empty
    for parent, below, names in os.walk(folder):
        below[:] = [name for name in below if not name.startswith((".", "__pycache__"))]
        paths = (Path(parent, name) for name in names if not name.startswith("."))
        files += [path for path in paths if path.is_file() and path.stat().st_size]
    files.sort(key=lambda path: path.relative_to(folder).as_posix())
    tables = [path for path in files if content_suffix(path) in RECORD_SUFFIXES]
    texts = [path for path in files if content_suffix(path) in TEXT_SUFFIXES]
    # A folder of tables often has a README; a folder of source code has JSON settings.
    if tables and all(path.stem.upper().startswith(("README", "LICENSE")) for path in texts):
        return _load_files(_of_split(folder, tables, split), None)
    if not texts:
        endings = ", ".join(sorted({path.suffix for path in files if path.suffix})[:8]) or "none"
        raise DataError(
            f"Expected text files (.txt, .md, .py, ...) or records (.jsonl, .parquet, ...) in '{folder}', received "
            f"{len(files)} files, with the endings: {endings}."
        )
    if tables:
        logger.warning("'%s' contains text files: ignoring its %d files of records", folder, len(tables))
    return _load_files(texts, split)


def _of_split(folder: Path, tables: Sequence[Path], split: str | None) -> list[Path]:
    """The files of a split. Without one, files such as train.jsonl and test.jsonl must not be mixed."""
    # The names of folders and file up to a number or an extension: data/train-00000-of-00002.parquet.
    relative = {path: path.relative_to(folder).parts for path in tables}
    names = {path: {re.split(r"[-_.]", part.lower())[0] for part in parts} for path, parts in relative.items()}
    if split is None:
        splits = set().union(*names.values()) & _SPLITS
        if len(splits) > 1:
            raise DataError(expected("one split", sorted(splits), "Pass split='train', for instance."))
        return list(tables)
    chosen = [path for path in tables if split.lower() in names[path]]
    if not chosen:
        raise DataError(expected(f"a split of '{folder}'", split, f"It contains: {', '.join(map(str, tables[:5]))}."))
    return chosen


def _load_files(paths: Sequence[Path], split: str | None) -> Any:
    kinds = {content_suffix(path) for path in paths}
    if not kinds & RECORD_SUFFIXES:
        return _load_documents(paths, split)
    if split is not None:
        raise BadArgument(expected("no split, since a file of records has none", split))
    if kinds <= PARQUET:
        return read_parquet(paths)
    if kinds <= LINES | JSON:
        return concat_records([JSONLDataset(path, text_key=None) for path in paths])
    if kinds <= CSV:
        return concat_records([read_csv(path) for path in paths])
    raise DataError(expected("files of one kind", sorted(kinds), "Put them into folders of their own."))


def _load_documents(paths: Sequence[Path], split: str | None) -> Any:
    if split is not None and split not in _UNITS:
        raise BadArgument(expected(f"split to be one of {', '.join(_UNITS)}", split, did_you_mean(split, _UNITS)))
    first = TextFile(paths[0])  # text may have any extension; binary files have zero bytes at the start
    if b"\0" in first.read(0, min(first.size, 4096)):
        what = f"text, or records in one of {', '.join(sorted(RECORD_SUFFIXES))}"
        raise DataError(expected(what, str(paths[0]), "It contains binary data."))
    if split in (None, "document"):
        return TextFiles(paths)
    indices = [LineIndex(path) for path in paths]
    spans = [index if split == "line" else index.paragraphs() for index in indices if len(index)]
    if not spans:
        raise DataError(expected("some text", f"{len(paths)} files of blank lines"))
    return concat_records(spans)
