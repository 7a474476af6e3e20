"""A short run of `benchmarks/fuzz.py`: 2,000 damaged and hostile files, a hundred or so for every reader."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]
FUZZER = Path(__file__).parents[2] / "benchmarks" / "fuzz.py"
# The others take some seconds of imports each: a benchmark runs them.
READERS = [
    *("manifests", "safetensors", "trees (json, npz)", "configs", "control messages", "control replies"),
    *("text, tables", "images", "image lists", "tar shards", "token caches", "line indexes"),
]


def test_hostile_files_are_refused_with_our_errors(tmp_path):
    command = [sys.executable, str(FUZZER), "--cases", "2000", "--seed", "1", "--only", *READERS]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "2,000" in done.stdout
    assert not (tmp_path / "fuzz-failures").exists()


def test_a_failing_input_is_kept_and_can_be_replayed(tmp_path):
    """A case that hangs ends its process, and is counted; the next ones are run."""
    program = f"""
import sys, time
sys.path.insert(0, {str(FUZZER.parent)!r})
import fuzz
from pathlib import Path

def make(folder):
    (folder / "a.json").write_text('{{"x": 1}}')

def read(folder, changed):
    content = (folder / changed).read_bytes()
    if content == b'{{"x": 1}}':
        return
    calls.append(1)
    if len(calls) == 3:
        time.sleep(600)
    raise KeyError("raw")

calls = []
fuzz.READERS["toy"] = fuzz.Reader(make, read, 1)
tally = fuzz.fuzz("toy", 5, keep=Path("kept"), seconds=2.0)
print(dict(tally.outcomes), sorted(p.name for p in Path("kept").iterdir()))
print(fuzz.replay(Path("kept/toy-0.json")))
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env=environment, capture_output=True, text=True, check=False
    )
    assert "{'failed': 5} ['toy-0.json', 'toy-1.json'," in done.stdout, done.stdout + done.stderr
    assert "KeyError: 'raw'" in done.stderr
    assert "Timeout (0:00:02)!" in done.stderr
    assert done.stdout.endswith("1\n")
