"""Tokenising once: processes, caches, kills and races, against tokenising record by record."""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from torch.utils.data import DataLoader, Subset

from trainformer.core import BadArgument, DataError
from trainformer.data import split_dataset
from trainformer.data.text import store as store_module
from trainformer.data.text.encode import Encoded, Encoder, EncodingReport
from trainformer.data.text.store import TokenStore, fingerprint, tokenize

TEXTS = [f"number {i}: " + "the cat sat on the mat; " * (i % 7) for i in range(300)]


def make_tokenizer() -> Any:
    tokenizers = pytest.importorskip("tokenizers")
    transformers = pytest.importorskip("transformers")
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, special_tokens=["</s>"], initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(TEXTS[:20], trainer)
    return transformers.PreTrainedTokenizerFast(tokenizer_object=model, eos_token="</s>")


def raw_records(size: int = 200, seed: int = 0) -> list[dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return [{"input_ids": rng.integers(0, 99, n).tolist()} for n in rng.integers(2, 20, size)]


def raw(**options: Any) -> Encoder:
    return Encoder(None, **{"max_length": None, **options})


def items(store: TokenStore) -> list[tuple[list[int], list[int]]]:
    return [(item["input_ids"].tolist(), item["labels"].tolist()) for item in (store[i] for i in range(len(store)))]


def listed(pieces: list[Encoded]) -> list[tuple[list[int], list[int]]]:
    return [(piece.input_ids.tolist(), piece.labels.tolist()) for piece in pieces]


class Forbidden(Encoder):
    """The same settings, and so the same cache; but it must not be asked to tokenise anything."""

    def encode_all(self, records: Any, report: EncodingReport | None = None, **options: Any) -> list[list[Encoded]]:
        raise AssertionError("tokenised again")


# -- what is in a store ------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 2, None])
def test_a_store_holds_the_pieces_of_all_records_in_order(workers: int | None, tmp_path: Path) -> None:
    encoder = Encoder(make_tokenizer(), max_length=16)
    records: list[Any] = [{"text": text} for text in TEXTS]
    records[150:160] = [{"prompt": text, "completion": " yes"} for text in TEXTS[150:160]]
    report = EncodingReport()
    pieces = [piece for of_record in encoder.encode_all(records, report) for piece in of_record]
    store = tokenize(records, encoder, cache_dir=tmp_path, workers=workers)
    assert items(store) == listed(pieces)
    assert store.report == report
    assert store.lengths.tolist() == [len(piece.input_ids) for piece in pieces]
    assert store.supervised.tolist() == [piece.supervised for piece in pieces]
    assert (store[-1]["labels"] == store[len(store) - 1]["labels"]).all()
    with pytest.raises(IndexError):
        store[len(store)]


def test_labels_have_a_file_only_where_they_differ(tmp_path: Path) -> None:
    records = raw_records()
    everything = tokenize(records, raw(), cache_dir=tmp_path, workers=0)
    assert not (everything.path / "labels.bin").exists()
    assert items(everything) == [(record["input_ids"], record["input_ids"]) for record in records]
    records[170] = {"input_ids": [1, 2, 3], "labels": [-100, 7, 3]}  # late: what came before is filled in
    mixed = tokenize(records, raw(), cache_dir=tmp_path, workers=0)
    assert items(mixed) == [(record["input_ids"], record.get("labels", record["input_ids"])) for record in records]


def test_stores_pickle_as_a_path_and_work_with_subsets_and_loaders(tmp_path: Path) -> None:
    store = tokenize(raw_records(), raw(), cache_dir=tmp_path, workers=0)
    assert len(pickle.dumps(store)) < 500
    assert items(pickle.loads(pickle.dumps(store))) == items(store)
    assert store.in_memory
    train, val = split_dataset(store, 0.25, seed=0)
    assert isinstance(train, Subset)
    assert (len(train), len(val)) == (150, 50)
    assert train[3]["input_ids"].tolist() == store[train.indices[3]]["input_ids"].tolist()
    loader = DataLoader(store, 7, collate_fn=lambda rows: sum(len(row["labels"]) for row in rows), num_workers=1)
    assert sum(loader) == store.report.tokens
    with pytest.raises(DataError, match="complete token store"):
        TokenStore(tmp_path / "nowhere")


def test_hf_datasets_are_identified_by_their_fingerprint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    datasets = pytest.importorskip("datasets")
    records = raw_records()
    data = datasets.Dataset.from_list(records)
    assert fingerprint(data) != fingerprint(data.select(range(10)))
    store = tokenize(data, raw(), cache_dir=tmp_path, workers=2)
    assert items(store) == items(tokenize(records, raw(), cache_dir=tmp_path, workers=0))
    monkeypatch.setattr(datasets.Dataset, "__getitems__", None)  # known without reading a row
    assert tokenize(data, Forbidden(None, max_length=None), cache_dir=tmp_path).path == store.path


# -- the cache ---------------------------------------------------------------------------------------------


def test_the_second_time_nothing_is_tokenised(tmp_path: Path) -> None:
    records = raw_records(2_000)
    store = tokenize(records, raw(), cache_dir=tmp_path, workers=0)
    again = tokenize(records, Forbidden(None, max_length=None), cache_dir=tmp_path)
    assert (again.path, again.report) == (store.path, store.report)
    for other in (raw(max_length=10), raw(truncation="drop")):
        assert tokenize(records, other, cache_dir=tmp_path).path != store.path
    assert tokenize(records[:-1], raw(), cache_dir=tmp_path).path != store.path
    assert not list(tmp_path.glob("*.writing"))


def test_the_users_cache_is_the_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFORMER_CACHE", str(tmp_path / "mine"))
    assert tokenize(raw_records(), raw()).path.parent == tmp_path / "mine" / "tokens"


def test_contents_make_the_fingerprint() -> None:
    records = raw_records(300)
    as_arrays = [{"input_ids": np.array(record["input_ids"])} for record in records]
    assert fingerprint(records) == fingerprint(tuple(records)) == fingerprint(as_arrays)
    changed = [*records[:-1], {"input_ids": [*records[-1]["input_ids"], 1]}]
    assert fingerprint(records) != fingerprint(changed)
    assert fingerprint(records) != fingerprint(records[::-1])
    subset = Subset(records, [0, 1])
    assert fingerprint(subset) != fingerprint(Subset(records, [1, 0]))

    class Own(list[Any]):
        fingerprint = "v1"

    assert fingerprint(Own(records)) == fingerprint(Own())


def reseal(folder: Path, **changes: Any) -> None:
    """Change the manifest of a store, with the digest of its content."""
    manifest = json.loads((folder / "manifest.json").read_text()) | changes
    del manifest["digest"]
    digest = store_module._digest(json.dumps(manifest, sort_keys=True))
    (folder / "manifest.json").write_text(json.dumps(manifest | {"digest": digest}))


@pytest.mark.parametrize("poison", ["token", "offsets", "dtype", "supervised", "report"])
def test_a_poisoned_store_is_rebuilt(poison: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    records = raw_records()
    store = tokenize(records, raw(), cache_dir=tmp_path, workers=0)
    expected, offsets = items(store), store.offsets
    if poison == "token":
        content = bytearray((store.path / "tokens.bin").read_bytes())
        content[40] ^= 1
        (store.path / "tokens.bin").write_bytes(content)
    elif poison == "offsets":
        np.save(store.path / "offsets.npy", np.concatenate([[0], offsets[1:] - 1]))
    elif poison == "dtype":
        np.save(store.path / "offsets.npy", offsets.astype(np.float64))
    elif poison == "supervised":
        np.save(store.path / "supervised.npy", store.supervised + 1)
    else:
        reseal(store.path, report={"records": "many"})
    with pytest.raises(DataError):
        TokenStore(store.path)
    with caplog.at_level(logging.WARNING):
        assert items(tokenize(records, raw(), cache_dir=tmp_path, workers=0)) == expected
    assert "tokenised again" in caplog.text
    assert items(TokenStore(store.path)) == expected


def test_forged_offsets_never_leave_the_files(tmp_path: Path) -> None:
    """Also if all digests are made to fit."""
    store = tokenize(raw_records(), raw(), cache_dir=tmp_path, workers=0)
    np.save(store.path / "offsets.npy", np.concatenate([store.offsets[:-1], [1 << 40]]))
    digests = {
        name: store_module._digests(store.path / name) for name in ("offsets.npy", "supervised.npy", "tokens.bin")
    }
    reseal(store.path, digests=digests)
    with pytest.raises(DataError, match="offsets do not fit"):
        TokenStore(store.path)


def test_of_a_large_store_a_sample_is_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_BLOCK", 64)
    store = tokenize(raw_records(), raw(), cache_dir=tmp_path, workers=0)
    blocks = sum(len(found) for found in store_module._manifest(store.path)["digests"].values())  # type: ignore[index]
    os.truncate(store.path / "tokens.bin", 0)
    (store.path / "tokens.bin").write_bytes(bytes(4 * int(store.offsets[-1])))
    assert len(store_module._digests(store.path / "tokens.bin")) > blocks / 2 > 10
    monkeypatch.setattr(store_module, "_MAX_CHECKED", blocks // 2)
    with pytest.raises(DataError, match="does not match its digest"):
        TokenStore(store.path)  # half of the blocks, and more than half of all are of the tokens


@pytest.mark.parametrize("damage", ["cut", "lost", "manifest", "format"])
def test_a_damaged_store_is_rebuilt(damage: str, tmp_path: Path) -> None:
    records = raw_records()
    store = tokenize(records, raw(), cache_dir=tmp_path, workers=0)
    expected = items(store)
    if damage == "cut":
        os.truncate(store.path / "tokens.bin", 40)
    elif damage == "lost":
        (store.path / "offsets.npy").unlink()
    elif damage == "manifest":
        (store.path / "manifest.json").write_text("{")
    else:
        manifest = json.loads((store.path / "manifest.json").read_text())
        (store.path / "manifest.json").write_text(json.dumps({**manifest, "format": 0}))
    assert items(tokenize(records, raw(), cache_dir=tmp_path, workers=0)) == expected


PROGRAM = """
import sys, time
from pathlib import Path
from trainformer.data.text.encode import Encoder
from trainformer.data.text.store import tokenize

folder, workers, pause = Path(sys.argv[1]), int(sys.argv[2]), float(sys.argv[3])

class Slow(Encoder):
    def encode_all(self, records, report=None, **options):
        (folder / f"tokenised-{options['first']}").open("a").write("x")
        time.sleep(pause)
        return super().encode_all(records, report, **options)

records = [{"input_ids": [i % 90, 7, 8]} for i in range(640)]
print(tokenize(records, Slow(None, max_length=None), cache_dir=folder / "cache", workers=workers).report.tokens)
"""


def start(folder: Path, workers: int, pause: float) -> subprocess.Popen[str]:
    arguments = [sys.executable, "-c", PROGRAM, str(folder), str(workers), str(pause)]
    return subprocess.Popen(arguments, stdout=subprocess.PIPE, text=True, start_new_session=True)


def alive_in(session: int) -> list[int]:
    """Processes of a session that are still running."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, _, _, of = path.read_text().rpartition(")")[2].split()[:4]
        except OSError:
            continue
        if int(of) == session and state != "Z":
            found.append(int(path.parent.name))
    return found


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="looks for processes in /proc")
@pytest.mark.parametrize("workers", [2, pytest.param(0, marks=pytest.mark.slow)])
def test_a_killed_tokenisation_leaves_no_half_cache_and_no_processes(workers: int, tmp_path: Path) -> None:
    process = start(tmp_path, workers, pause=0.1)
    deadline = time.monotonic() + 300
    while len(list(tmp_path.glob("tokenised-*"))) < 4 and time.monotonic() < deadline:
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    cache = tmp_path / "cache"
    (draft,) = cache.glob(".*.writing")
    assert [path for path in cache.iterdir() if not path.name.startswith(".")] == []
    while alive_in(process.pid) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert alive_in(process.pid) == []
    again = start(tmp_path, workers, pause=0.0)
    assert int(again.communicate(timeout=300)[0]) == 3 * 640
    assert not draft.exists()
    (whole,) = (path for path in cache.iterdir() if not path.name.startswith("."))
    assert items(TokenStore(whole))[639] == ([639 % 90, 7, 8], [639 % 90, 7, 8])


@pytest.mark.slow
def test_processes_that_want_the_same_data_wait_for_the_first(tmp_path: Path) -> None:
    processes = [start(tmp_path, 0, pause=0.01) for _ in range(3)]
    assert [int(process.communicate(timeout=300)[0]) for process in processes] == [3 * 640] * 3
    marks = sorted(tmp_path.glob("tokenised-*"))
    assert len(marks) == 64
    assert {mark.read_text() for mark in marks} == {"x"}  # every chunk was tokenised by one process, once
    assert len([path for path in (tmp_path / "cache").iterdir() if not path.name.startswith(".")]) == 1


def test_without_locks_the_first_to_finish_wins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import fcntl

    def unsupported(*_: Any) -> None:
        raise OSError("no locks on this file system")

    monkeypatch.setattr(fcntl, "flock", unsupported)
    records, nested = raw_records(), []

    class Racing(Encoder):
        def encode_all(self, records_: Any, report: Any = None, **options: Any) -> list[list[Encoded]]:
            if not nested:
                nested.append(True)
                monkeypatch.setattr(os, "getpid", lambda: 1)  # another process, as far as names go
                nested.append(tokenize(records, raw(), cache_dir=tmp_path, workers=0))
                monkeypatch.undo()
            return super().encode_all(records_, report, **options)

    store = tokenize(records, Racing(None, max_length=None), cache_dir=tmp_path, workers=0)
    assert store.path == nested[1].path
    assert items(store) == [(record["input_ids"], record["input_ids"]) for record in records]
    assert not list(tmp_path.glob(".*.writing"))


# -- what goes wrong ---------------------------------------------------------------------------------------


def test_data_without_anything_to_train_on_is_an_error(tmp_path: Path) -> None:
    unlabelled = [{"input_ids": [1, 2], "labels": [-100, -100]}] * 5
    with pytest.raises(
        DataError, match=r"to train on in my data, received nothing: 5 records.*5 dropped \(all labels are -100: 5"
    ):
        tokenize(unlabelled, raw(), cache_dir=tmp_path, workers=0, name="my data")
    assert not [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")]
    with pytest.raises(DataError, match="at least one record in data, received 'none'"):
        tokenize([], raw(), cache_dir=tmp_path)
    with pytest.raises(BadArgument, match="workers to be None, 0 or more, received -1"):
        tokenize(unlabelled, raw(), cache_dir=tmp_path, workers=-1)


@pytest.mark.parametrize("workers", [0, 2])
def test_a_bad_record_is_named_by_its_number(workers: int, tmp_path: Path) -> None:
    records = raw_records()
    records[123] = {"input_ids": [-4]}
    before = set(multiprocessing.active_children())  # other tests' loaders, not yet collected
    with pytest.raises(DataError, match=r"Record 123: .*received -4"):
        tokenize(records, raw(), cache_dir=tmp_path, workers=workers)
    assert not [path for path in tmp_path.iterdir() if not path.name.endswith(".lock")]
    assert set(multiprocessing.active_children()) <= before


def test_a_bad_record_of_a_file_is_named_by_its_line(tmp_path: Path) -> None:
    from trainformer.data.text import JSONLDataset

    path = tmp_path / "data.jsonl"
    path.write_text("\n".join(json.dumps({"text": "the cat"} if i != 12 else {"txt": "the cat"}) for i in range(20)))
    encoder = Encoder(make_tokenizer(), max_length=16)
    with pytest.raises(DataError, match=r"data.jsonl, line 13: .*known schema.*'txt'"):
        tokenize(JSONLDataset(path, text_key=None), encoder, cache_dir=tmp_path / "cache", workers=0)


class Deadly(Encoder):
    """Dies as the system kills a process that takes too much memory."""

    def encode_all(self, records: Any, report: EncodingReport | None = None, **options: Any) -> list[list[Encoded]]:
        if options["first"] > 100:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().encode_all(records, report, **options)


def test_the_death_of_a_worker_is_an_error_that_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"died, often for lack of memory\. Pass fewer workers"):
        tokenize(raw_records(), Deadly(None, max_length=None), cache_dir=tmp_path, workers=2)
    assert not list(tmp_path.glob(".*.writing"))


def test_the_report_is_logged_and_a_large_loss_is_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "trainformer")
    tokenize(raw_records(), raw(), cache_dir=tmp_path, name="good")
    tokenize(raw_records(), raw(max_length=5, truncation="drop"), cache_dir=tmp_path, name="bad")
    good, bad = (record for record in caplog.records if "records, " in record.getMessage())
    assert (good.levelname, bad.levelname) == ("INFO", "WARNING")
    assert good.getMessage().startswith("good: 200 records, 200 pieces")
    assert "longer than 5 tokens" in bad.getMessage()


def test_only_long_work_is_handed_to_processes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1}, raising=False)

    class Where(Encoder):
        def encode_all(self, records: Any, report: EncodingReport | None = None, **options: Any) -> list[list[Encoded]]:
            time.sleep(0.001)
            (tmp_path / f"by-{os.getpid()}").touch()
            return super().encode_all(records, report, **options)

    tokenize(raw_records(), Where(None, max_length=None), cache_dir=tmp_path)
    assert [path.name for path in tmp_path.glob("by-*")] == [f"by-{os.getpid()}"]
    monkeypatch.setattr(store_module, "_SERIAL_SECONDS", 0.01)
    tokenize(raw_records(seed=1), Where(None, max_length=None), cache_dir=tmp_path)
    assert len(list(tmp_path.glob("by-*"))) > 1


def test_a_bar_is_drawn_on_a_terminal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    tokenize(raw_records(), raw(), cache_dir=tmp_path, name="shown")
    assert "tokenising" not in capsys.readouterr().err
    monkeypatch.setenv("FORCE_COLOR", "1")  # rich then takes anything for a terminal
    for wanted in (True, False):
        tokenize(raw_records(seed=2 + wanted), raw(), cache_dir=tmp_path, progress=wanted, name="shown")
        assert ("tokenising shown" in capsys.readouterr().err) == wanted
