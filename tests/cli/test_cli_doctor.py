"""The findings of `doctor` on this machine, and with missing, old or broken packages."""

import json
import os
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path

import pytest
import torch

from trainformer import __version__
from trainformer.cli import doctor, main
from trainformer.cli.doctor import requirements_of


def answer(capsys, *words, code=0):
    assert main(["doctor", "--json", *words]) == code
    return json.loads(capsys.readouterr().out)


@pytest.fixture
def package(tmp_path, monkeypatch):
    """Install a fake package at the front of the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def install(name, version="1.0", requires=(), extras=(), code=None):
        folder = tmp_path / f"{name}-{version}.dist-info"
        folder.mkdir()
        lines = [f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}"]
        lines += [f"Requires-Dist: {each}" for each in requires] + [f"Provides-Extra: {each}" for each in extras]
        (folder / "METADATA").write_text("\n".join(lines) + "\n")
        if code is not None:
            (folder / "top_level.txt").write_text(name)
            (tmp_path / f"{name}.py").write_text(code)

    return install


def test_this_machine(capsys):
    found = answer(capsys)
    assert found["versions"]["trainformer"] == __version__
    assert found["versions"]["torch"] == torch.__version__
    assert found["versions"]["python"].startswith(".".join(map(str, sys.version_info[:3])))
    assert found["machine"]["processors"] == len(os.sched_getaffinity(0))
    assert [device["device"] for device in found["devices"] if device["device"].startswith("cuda")] == [
        f"cuda:{number}" for number in range(torch.cuda.device_count())
    ]
    assert {extra["name"] for extra in found["extras"]} == set(
        metadata.metadata("trainformer").get_all("Provides-Extra")
    )
    assert not any(problem["broken"] for problem in found["problems"])


def test_the_text_output(capsys, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    assert main(["doctor"]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert f"torch {torch.__version__}" in lines
    assert "HF_HUB_OFFLINE yes" in lines
    assert lines[-1] == "nothing is broken"


def test_extras_of_a_package(package, capsys, monkeypatch):
    """Missing, partly installed, too old, or required through another extra."""
    package("present", "2.3")
    package(
        "trainformer",
        requires=[
            "present>=2.0",
            "present>=2.0; extra == 'one'",
            "nowhere-to-be-found>=1; extra == 'one'",
            'nowhere-to-be-found; extra == "two"',
            "present>=9.1; extra == 'old'",
            "trainformer[one,old]; extra == 'all'",
        ],
        extras=["one", "two", "old", "all"],
    )
    found = answer(capsys)
    extras = {extra["name"]: (extra["status"], extra["missing"]) for extra in found["extras"]}
    assert extras == {
        "one": ("in part", ["nowhere-to-be-found>=1"]),
        "two": ("missing", ["nowhere-to-be-found"]),
        "old": ("missing", ["present>=9.1"]),
        "all": ("in part", ["nowhere-to-be-found>=1", "present>=9.1"]),
    }
    assert {extra["install"] for extra in found["extras"]} == {f"pip install 'trainformer[{name}]'" for name in extras}
    (told,) = {(problem["do"], problem["broken"]) for problem in found["problems"] if "2.3" in problem["what"]}
    assert told == ("Upgrade it: pip install --upgrade 'present>=9.1'", False)
    assert [str(requirement) for requirement in requirements_of("trainformer")] == ["present>=2.0"]


def test_a_missing_core_requirement_is_broken(package, capsys):
    package("trainformer", requires=["nowhere-to-be-found>=1"])
    found = answer(capsys, code=1)
    (broken,) = [problem for problem in found["problems"] if problem["broken"]]
    assert "nowhere-to-be-found>=1, but it is not installed" in broken["what"]
    assert broken["do"] == "Install it: pip install 'nowhere-to-be-found>=1'"


def test_a_package_that_cannot_be_imported_is_a_finding(package, capsys):
    package("cracked", code="raise OSError('libcracked.so.3: no such file')")
    package("trainformer", requires=["cracked>=1; extra == 'glass'"], extras=["glass"])
    assert not any(problem["broken"] for problem in answer(capsys)["problems"])  # it is not imported
    (broken,) = [problem for problem in answer(capsys, "--imports", code=1)["problems"] if problem["broken"]]
    assert "cracked cannot be imported (OSError: libcracked.so.3: no such file)" in broken["what"]
    assert main(["doctor", "--imports"]) == 1
    assert capsys.readouterr().out.endswith("something is broken\n")


def test_a_broken_torch_is_a_finding(capsys, monkeypatch):
    monkeypatch.setitem(sys.modules, "torch", None)  # importing it raises
    found = answer(capsys, code=1)
    assert found["versions"]["torch"] is None
    (broken,) = [problem for problem in found["problems"] if problem["broken"]]
    assert broken["what"].startswith("torch cannot be imported (ModuleNotFoundError")


def test_low_limits_are_warnings(capsys, monkeypatch):
    for name in ("LOW_DISK", "LOW_SHARED_MEMORY", "FEW_OPEN_FILES"):
        monkeypatch.setattr(doctor, name, 1 << 60)
    found = answer(capsys)
    told = " ".join(problem["what"] + problem["do"] for problem in found["problems"])
    assert all(word in told for word in ("free for runs", "--shm-size", "ulimit -n"))


def test_the_extras_of_the_project_can_all_be_read():
    """The requirements in pyproject.toml are of a simple form."""
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    lines = [line for needed in project["optional-dependencies"].values() for line in needed] + project["dependencies"]
    pattern = r"[\w.-]+(\[[\w,-]+\])?(>=[\d.]+(,<[\d.]+)?)?"
    assert [line for line in lines if not re.fullmatch(pattern, line)] == []
