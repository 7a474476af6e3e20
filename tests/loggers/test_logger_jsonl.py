"""metrics.jsonl: exact after any crash and any resume."""

from __future__ import annotations

import json
import math
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainformer.core import BadArgument
from trainformer.loggers import JsonlLogger, read_jsonl


def write(path: Path, steps: list[int]) -> None:
    logger = JsonlLogger(path)
    logger.init({})
    for position, step in enumerate(steps):
        logger.log({"train/position": position}, step)
    logger.finish()


def positions(path: Path) -> list[tuple[int, int]]:
    return [(record["step"], record["train/position"]) for record in read_jsonl(path)]


def test_one_object_per_line(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.init({"lr": 0.1})
    logger.log({"train/loss": 0.25, "train/epoch": 1}, step=300)
    logger.log_text("sample", "línea\nuno\u2028dos", step=300)
    first, second = path.read_text("utf-8").split("\n")[:2]  # readable while the logger is still open
    logger.finish()
    record = json.loads(first)
    assert list(record) == ["step", "time", "train/loss", "train/epoch"]
    assert (record["step"], record["train/loss"], record["train/epoch"]) == (300, 0.25, 1)
    assert record["time"] > 1.7e9
    assert json.loads(second)["text/sample"] == "línea\nuno\u2028dos"
    assert read_jsonl(path)[1]["text/sample"] == "línea\nuno\u2028dos"


def test_nonfinite_numbers_are_valid_json_and_read_back_as_floats(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    logger = JsonlLogger(path)
    logger.init({})
    logger.log({"a": float("nan"), "b": float("inf"), "c": float("-inf")}, step=1)
    logger.log_text("answer", "NaN", step=1)
    logger.finish()

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not JSON")

    raw = [json.loads(line, parse_constant=refuse) for line in path.read_text().splitlines()]
    assert (raw[0]["a"], raw[0]["b"], raw[0]["c"]) == ("NaN", "Infinity", "-Infinity")
    numbers, text = read_jsonl(path)
    assert math.isnan(numbers["a"])
    assert (numbers["b"], numbers["c"]) == (math.inf, -math.inf)
    assert text["text/answer"] == "NaN"


def test_reserved_names_are_refused(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "metrics.jsonl")
    logger.init({})
    with pytest.raises(BadArgument, match=r"other than 'step' and 'time', received \['time'\]"):
        logger.log({"time": 1.0}, step=1)


def test_a_new_start_appends(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    write(path, [3])
    assert positions(path) == [(1, 0), (2, 1), (3, 0)]


def test_partial_last_line_breaks_neither_reading_nor_appending(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    with open(path, "ab") as file:
        file.write(b'{"step": 3, "train/posi')
    assert positions(path) == [(1, 0), (2, 1)]
    write(path, [3])
    assert positions(path) == [(1, 0), (2, 1), (3, 0)]
    assert all(json.loads(line) for line in path.read_text().splitlines())


def test_a_record_that_only_lacks_its_newline_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2])
    path.write_bytes(path.read_bytes().removesuffix(b"\n"))
    assert positions(path) == [(1, 0), (2, 1)]
    write(path, [3])
    assert positions(path) == [(1, 0), (2, 1), (3, 0)]


def test_a_damaged_line_in_the_middle_is_skipped_with_a_warning(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [1])
    with open(path, "ab") as file:
        file.write(b"\x00\x00\xff\n[1, 2]\n")
    write(path, [2])
    with pytest.warns(RuntimeWarning, match=r"line (2|3) of .*metrics\.jsonl") as caught:
        assert positions(path) == [(1, 0), (2, 0)]
    assert len(caught) == 2


def test_continue_from_without_a_file_does_nothing(tmp_path: Path) -> None:
    logger = JsonlLogger(tmp_path / "new" / "metrics.jsonl")
    logger.continue_from(5)
    assert not (tmp_path / "new").exists()


def test_continue_from_leaves_no_temporary_file(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    write(path, [1, 2, 3, 4])
    logger = JsonlLogger(path)
    logger.continue_from(2)
    logger.init({})
    logger.log({"train/position": 10}, step=3)
    logger.flush()
    logger.finish()
    assert positions(path) == [(1, 0), (2, 1), (3, 10)]
    assert [file.name for file in path.parent.iterdir()] == ["metrics.jsonl"]


def test_a_crash_while_rewriting_keeps_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "metrics.jsonl"
    write(path, [1, 2, 3])

    def crash(source: object, target: object) -> None:
        raise OSError("power cut")

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", crash)
        with pytest.raises(OSError, match="power cut"):
            JsonlLogger(path).continue_from(1)
    assert positions(path) == [(1, 0), (2, 1), (3, 2)]
    JsonlLogger(path).continue_from(1)
    assert positions(path) == [(1, 0)]


def test_what_was_logged_survives_a_kill(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = f"""
import os, signal
from trainformer.loggers import JsonlLogger
logger = JsonlLogger({str(path)!r})
logger.init({{}})
for step in range(1, 101):
    logger.log({{"train/position": step}}, step)
os.kill(os.getpid(), signal.SIGKILL)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == -signal.SIGKILL
    assert positions(path) == [(step, step) for step in range(1, 101)]


@given(steps=st.lists(st.integers(0, 50), max_size=30), cut=st.integers(-1, 51), partial=st.binary(max_size=20))
def test_continue_from_keeps_exactly_the_records_up_to_the_step(steps: list[int], cut: int, partial: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        write(path, steps)
        with open(path, "ab") as file:
            file.write(b'{"step": 0, "partial' + partial.replace(b"\n", b""))
        JsonlLogger(path).continue_from(cut)
        wanted = [(step, position) for position, step in enumerate(steps) if step <= cut]
        assert positions(path) == wanted
        before = path.read_bytes()
        JsonlLogger(path).continue_from(cut)
        assert path.read_bytes() == before


@given(values=st.lists(st.floats(), min_size=1, max_size=5), text=st.text(), cut=st.integers(0, 10_000))
def test_a_file_cut_at_any_byte_reads_as_a_prefix(values: list[float], text: str, cut: int) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "metrics.jsonl"
        logger = JsonlLogger(path)
        logger.init({})
        for step, value in enumerate(values):
            logger.log({"train/loss": value}, step)
        logger.log_text("sample", text, len(values))
        logger.finish()
        whole = read_jsonl(path)
        assert len(whole) == len(values) + 1
        assert all(r["train/loss"] == v or math.isnan(v) for r, v in zip(whole, values, strict=False))
        assert whole[-1]["text/sample"] == text
        content = path.read_bytes()
        path.write_bytes(content[:cut])
        part = read_jsonl(path)
        assert repr(part) == repr(whole[: len(part)])
        assert len(part) >= content[:cut].count(b"\n")


@pytest.mark.parametrize("line", ['{"step": "7"}', '{"step": {}}', '{"step": null}', "[" * 100_000, "9" * 5_000])
def test_a_line_without_a_usable_step_is_skipped_with_a_warning(tmp_path: Path, line: str) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(f'{{"step": 1, "a": 1}}\n{line}\n{{"step": 2, "a": 2}}\n')
    with pytest.warns(RuntimeWarning, match="line 2 of"):
        assert [record["a"] for record in read_jsonl(path)] == [1, 2]
    with pytest.warns(RuntimeWarning, match="line 2 of"):
        JsonlLogger(path).continue_from(1)
    assert [record["a"] for record in read_jsonl(path)] == [1]
