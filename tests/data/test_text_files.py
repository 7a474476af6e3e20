"""Random access to text files: the same lines, paragraphs and characters as reading them whole, without the memory."""

from __future__ import annotations

import bz2
import gzip
import hashlib
import json
import lzma
import os
import pickle
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainformer.core import BadArgument, DataError
from trainformer.data.text import files
from trainformer.data.text.files import LineIndex, TextFile, cache_dir, character_spans


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRAINFORMER_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def lines_by_hand(data: bytes) -> list[tuple[int, str]]:
    """Number and text of every line that is not blank, from the whole file."""
    parts = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    return [(n, part.removesuffix(b"\r").decode()) for n, part in enumerate(parts, 1) if part.strip(b" \t\r\x0b\x0c")]


def lines_of(path: Path) -> list[tuple[int, str]]:
    index = LineIndex(path)
    return [(index.number(i), index.text(i)) for i in range(len(index))]


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\n",
        b"\n\n  \n",
        b"one",
        b"one\n",
        b"one\r\n\r\ntwo\r\n",
        b"\n\n one \n\t\ntwo\n\n",
        b"\xef\xbb\xbfone\ntwo",
        b"\xef\xbb\xbf",
        "a\u2028b\x85c\x0bd\x1ce\nf\u2029\n".encode(),  # what str.splitlines would split
        b" \r\n\r\n \r a \r\n",
        "ж\n漢字\n🙂".encode(),
    ],
)
def test_lines_are_those_of_the_whole_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "lines.txt"
    path.write_bytes(data)
    assert lines_of(path) == lines_by_hand(data)


texts = st.lists(
    st.sampled_from(["a", "é", "🙂漢", " ", "\t", "\n", "\r\n", "\n\n", "wordword" * 5, "\u2028"]), max_size=60
)


@settings(max_examples=150, deadline=None)
@given(parts=texts, block=st.integers(1, 40), bom=st.booleans())
def test_lines_and_characters_whatever_the_block(tmp_path_factory, parts, block, bom) -> None:
    """Blocks of a few bytes put every boundary everywhere: inside characters, between the two signs of an end."""
    path = tmp_path_factory.mktemp("lines") / "text.txt"
    text = "".join(parts)
    data = (b"\xef\xbb\xbf" if bom else b"") + text.encode()
    path.write_bytes(data)
    before, files._BLOCK = files._BLOCK, block
    try:
        assert lines_of(path) == lines_by_hand(data)
        for length in (1, 3, 7):
            spans = character_spans(TextFile(path), length)
            pieces = [spans.text(i) for i in range(len(spans))]
            assert pieces == [text[i : i + length] for i in range(0, len(text), length)]
            last = text.rfind("\n") + 1
            at = len(data) - len(text[last:].encode())
            assert TextFile(path).line_at(at) == text.count("\n") + 1
    finally:
        files._BLOCK = before


def test_a_line_longer_than_many_blocks(tmp_path: Path) -> None:
    path = tmp_path / "long.txt"
    data = b"short\n" + b"x" * (5 * files._BLOCK + 17) + b"\n\nlast"
    path.write_bytes(data)
    assert lines_of(path) == lines_by_hand(data)


def test_paragraphs_are_between_blank_lines(tmp_path: Path) -> None:
    path = tmp_path / "p.txt"
    path.write_text("\n\na\nb\n\n  \nc\n\nd\n\n")
    paragraphs = LineIndex(path).paragraphs()
    assert [paragraphs.text(i).strip() for i in range(len(paragraphs))] == ["a\nb", "c", "d"]
    assert [paragraphs.location(i) for i in range(3)] == [f"{path}, line {n}" for n in (3, 7, 9)]
    path.write_text("only\none")
    assert [LineIndex(path).paragraphs().text(0)] == ["only\none"]


@pytest.mark.parametrize("data", ["Grüße".encode("latin1"), b"ok\xf0\x9f", b"\x80"])
def test_wrong_bytes_are_named_with_their_line(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "latin.txt"
    path.write_bytes(b"fine\n\n" + data + b"\nfine\n")
    index = LineIndex(path)
    assert index.text(0) == "fine"
    with pytest.raises(DataError, match=r"latin\.txt, line 3: Expected UTF-8 text, received the byte 0x.*iconv"):
        index.text(1)
    spans = character_spans(TextFile(path), 4)
    with pytest.raises(DataError, match=r"latin\.txt, line 3: "):
        [spans.text(i) for i in range(len(spans))]


def test_utf16_is_refused(tmp_path: Path) -> None:
    (tmp_path / "wide.txt").write_text("some text", encoding="utf-16")
    with pytest.raises(DataError, match=r"starts like UTF-16.*iconv -f utf-16"):
        LineIndex(tmp_path / "wide.txt")


def test_missing_files_and_folders(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text("{}\n")
    with pytest.raises(DataError, match=r"trian\.jsonl', which does not exist\. Did you mean 'train\.jsonl'\?"):
        LineIndex(tmp_path / "trian.jsonl")
    with pytest.raises(DataError, match="a folder"):
        LineIndex(tmp_path)


@pytest.mark.parametrize("size", [0, -1, 2.5, True, "8"])
def test_invalid_chunk_sizes(tmp_path: Path, size: object) -> None:
    (tmp_path / "a.txt").write_text("abc")
    with pytest.raises(BadArgument, match="chunk_size to be a positive number of characters"):
        character_spans(TextFile(tmp_path / "a.txt"), size)  # type: ignore[arg-type]


# -- compression -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("suffix", "opener"), [(".gz", gzip.open), (".bz2", bz2.open), (".xz", lzma.open)])
def test_compressed_files_are_decompressed_once(tmp_path: Path, cache: Path, suffix: str, opener) -> None:
    path = tmp_path / f"data.txt{suffix}"
    with opener(path, "wb") as file:
        file.write(b"one\n\ntwo\n")
    assert lines_of(path) == [(1, "one"), (3, "two")]
    (plain,) = (cache / "plain").iterdir()
    assert plain.read_bytes() == b"one\n\ntwo\n"
    written = plain.stat().st_mtime_ns
    assert LineIndex(path).location(1) == f"{path}, line 3"  # the name that the user knows
    assert plain.stat().st_mtime_ns == written
    with opener(path, "wb") as file:
        file.write(b"another text")
    assert lines_of(path) == [(1, "another text")]
    assert len(list((cache / "plain").iterdir())) == 1  # what the earlier file held is gone


def test_a_broken_archive_leaves_nothing_behind(tmp_path: Path, cache: Path) -> None:
    whole = gzip.compress(os.urandom(5000))
    (tmp_path / "cut.txt.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DataError, match=r"can be decompressed, received '.*cut\.txt\.gz'"):
        LineIndex(tmp_path / "cut.txt.gz")
    assert not list((cache / "plain").iterdir())


def test_other_compressions_are_refused(tmp_path: Path) -> None:
    (tmp_path / "data.jsonl.zst").write_bytes(b"\x28\xb5\x2f\xfd")
    with pytest.raises(DataError, match=r"a plain file or one of \.gz.*Unpack it: zstd -d"):
        LineIndex(tmp_path / "data.jsonl.zst")


# -- the cache, and other processes ------------------------------------------------------------------------


def test_a_slow_index_is_cached(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "big.txt"
    path.write_text("\n".join(f"line {i}" if i % 3 else "" for i in range(1000)))
    quick = LineIndex(path)
    assert not (cache / "lines").exists()  # what is quick is not worth a file

    monkeypatch.setattr(files, "_CACHE_AFTER_SECONDS", -1.0)
    LineIndex(path)
    (kept,) = (cache / "lines").iterdir()

    def never(file: TextFile) -> None:
        raise AssertionError("indexed again")

    with monkeypatch.context() as patch:
        patch.setattr(files, "_index_lines", never)
        found = LineIndex(path)
        assert len(found) == len(quick) == 666
        assert [found.text(i) for i in range(666)] == [quick.text(i) for i in range(666)]
        assert [found.number(i) for i in range(666)] == [quick.number(i) for i in range(666)]
        again = pickle.loads(pickle.dumps(found))  # from the file as well
        assert again.text(600) == quick.text(600)
    assert len(pickle.dumps(found)) < 1500 < len(pickle.dumps(quick))

    kept.write_bytes(kept.read_bytes()[:100])  # damaged: made again
    assert LineIndex(path).text(5) == quick.text(5)
    path.write_text("changed\n")
    os.utime(path, ns=(1, 1))
    assert lines_of(path) == [(1, "changed")]
    assert len(list((cache / "lines").iterdir())) == 1  # the index of the earlier file is gone


def test_a_cache_that_cannot_be_written_does_no_harm(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_text("a file where the folder should be")
    monkeypatch.setattr(files, "_CACHE_AFTER_SECONDS", -1.0)
    (tmp_path / "a.txt").write_text("one\ntwo")
    index = LineIndex(tmp_path / "a.txt")
    assert pickle.loads(pickle.dumps(index)).text(1) == "two"


def test_the_cache_folder(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("TRAINFORMER_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert cache_dir() == tmp_path / "trainformer"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    assert cache_dir() == tmp_path / "home" / ".cache" / "trainformer"


def test_a_file_that_changes_is_an_error_and_no_crash(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_text("one\ntwo\nthree\n" * 5000)
    open_now, pickled = LineIndex(path), pickle.dumps(LineIndex(path))
    assert open_now.text(3) == "one"
    path.write_text("one\n")
    with pytest.raises(DataError, match=r"a\.txt' to stay unchanged .*received a changed file"):
        open_now.text(len(open_now) - 1)
    with pytest.raises(DataError, match="received a changed file"):
        pickle.loads(pickled).text(0)


def test_more_files_than_a_process_may_open(tmp_path: Path) -> None:
    import resource

    paths = [tmp_path / f"{number}.txt" for number in range(600)]
    for number, path in enumerate(paths):
        path.write_text(f"text {number}\n")
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (512, limits[1]))
    try:
        indices = [LineIndex(path) for path in paths]
        for _ in range(2):
            assert [index.text(0) for index in indices] == [f"text {number}" for number in range(600)]
        assert files._OpenFiles.count <= files._OpenFiles.limit
        paths[-1].write_text("another\n")
        with pytest.raises(DataError, match="received a changed file"):
            indices[-1].text(0)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    before = files._OpenFiles.count
    del indices
    assert files._OpenFiles.count <= before - 200  # closed with their owners


def test_reading_a_large_file_takes_no_memory(tmp_path: Path) -> None:
    """In a separate process, since a process never returns memory. 100 MB, 1 in 500 lines read."""
    path = tmp_path / "large.jsonl"
    line = json.dumps({"text": "word " * 400}) + "\n"
    with open(path, "w") as file:
        for _ in range(50):
            file.write(line * 1000)
    script = """if True:
        import resource, sys
        from trainformer.data.text.tables import JSONLDataset
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        data = JSONLDataset(sys.argv[1])
        assert len(data) == 50_000 and len(data[49_999]["text"]) == 2000
        for index in range(0, len(data), 500):
            data[index]
        print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
    """
    done = subprocess.run(
        [sys.executable, "-c", script, str(path)], capture_output=True, text=True, timeout=300, check=True
    )
    assert path.stat().st_size > 100e6
    assert int(done.stdout) < 30_000  # kB


def test_the_index_spans_many_blocks(tmp_path: Path) -> None:
    path = tmp_path / "lines.txt"
    path.write_text("\n".join(["some words in a line of text, " * 8] * 20_000))  # 5 MB: several blocks
    starts, blanks = files._index_lines(TextFile(path))
    assert np.array_equal(np.diff(starts)[:-1], np.full(19_999, 241))
    assert len(blanks) == 0


@pytest.mark.parametrize("poison", ["moved", "beyond", "dtype", "cut", "empty"])
def test_a_poisoned_index_is_built_again(
    poison: str, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(files, "_CACHE_AFTER_SECONDS", -1.0)
    path = tmp_path / "some.txt"
    path.write_text("".join(f"line {i}\n" for i in range(20)))
    LineIndex(path)
    (kept,) = (cache / "lines").iterdir()
    table = np.load(kept)
    if poison == "cut":
        kept.write_bytes(kept.read_bytes()[:-8])
    elif poison == "empty":
        kept.write_bytes(b"")
    else:
        table[3] += 1 << 40 if poison == "beyond" else 2
        with kept.open("wb") as file:
            np.save(file, table.astype(np.float64) if poison == "dtype" else table)
            file.write(hashlib.sha256(table.data if poison == "beyond" else b"").digest())
    found = LineIndex(path)
    assert [found.text(i) for i in range(20)] == [f"line {i}" for i in range(20)]
    assert "the cached line index cannot be used" in caplog.text


def test_a_compressed_file_does_not_fill_the_disk(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "_MAX_SMALL", 1 << 20)
    path = tmp_path / "bomb.txt.gz"
    path.write_bytes(gzip.compress(bytes(20 << 20)))
    with pytest.raises(DataError, match="at most 250 times its size"):
        LineIndex(path)
    assert list((cache / "plain").iterdir()) == []
