"""Folders from strangers: none of their code is executed, whatever the command, the recipe and the place."""

import json
import logging
import os
import pty
import py_compile
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cli_toys import Fit

from trainformer import Trainer
from trainformer.cli import app
from trainformer.config import build_from_cfg, load_config, materialize
from trainformer.config.own_code import approvals_file, closed_folder, find_code
from trainformer.core.errors import BadArgument

EVIL = """\
import pathlib
pathlib.Path("executed").touch()
def task(*args, **kwargs): pathlib.Path("executed").touch()
class Task(__import__("cli_toys").Fit): ...
"""
COMMANDS = [
    "evaluate {run}",
    "predict {run} 8",
    "export {run} model.pt",
    "resume {run} --max-steps 5",
    "run {run}/recipe.yaml",
    "check --task=Fit --data=8 --callbacks={{type:\x20{target}}}",
    "config show {run}/recipe.yaml",
    "config code {run}/recipe.yaml",
    "ckpt list {run}",
    "runs {run}",
    "report {run}",
    "finalize {run} out",
    "ctl status {run}",
]


@pytest.fixture(autouse=True)
def tidy(request, monkeypatch):
    """Modules of one test are not those of the next, and runs in the checkout are none of theirs."""
    checkout = request.config.rootpath
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path).absolute() != checkout])
    before = set(sys.modules)
    yield
    for name in set(sys.modules) - before:
        if name.split(".")[0] in ("evil", "runs", "work", "peft_none", "store", "lab"):
            del sys.modules[name]


def receive(folder="runs/received", target="runs.received.evil:task", code="evil.py"):
    """Unpack a run that really was one, except for its code and its recipe."""
    Trainer(Fit(), "8", max_steps=1, batch_size=4, run_dir=folder, log="none").fit()
    status = json.loads(Path(folder, "status.json").read_bytes())
    Path(folder, "status.json").write_text(json.dumps({**status, "status": "interrupted"}))
    Path(folder, code).parent.mkdir(parents=True, exist_ok=True)
    Path(folder, code).write_text(EVIL)
    trainer = {"type": "trainformer.Trainer", "task": {"type": target}, "data": "8", "max_steps": 5}
    Path(folder, "recipe.yaml").write_text(json.dumps({"trainer": trainer}))
    return folder


def call(*words):
    try:
        return app.main(list(words))
    except SystemExit as error:
        return error.code


@pytest.mark.parametrize("trust", [[], ["--trust", "runs"], ["--trust", "runs.received.evil"]])
@pytest.mark.parametrize("command", ["evaluate", "predict", "export", "resume", "run"])
def test_a_received_run_executes_nothing(command, trust, capsys):
    run = receive()
    line = next(line for line in COMMANDS if line.startswith(f"{command} "))
    assert call(*line.format(run=run, target="").split(), *trust) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "runs.received.evil:task" in said
    assert "Nothing is ever imported from there. If the code is yours, move it" in said
    assert not Path("executed").exists()
    assert "runs" not in sys.modules
    assert os.getcwd() not in sys.path


def test_no_other_command_executes_it(capsys):
    run = receive()
    for line in COMMANDS:
        call(*(word.replace("\x20", " ") for word in line.format(run=run, target="runs.received.evil.task").split()))
    assert not Path("executed").exists()


@pytest.mark.parametrize(
    ("folder", "target", "code"),
    [
        ("runs/received", "runs.received.code.evil:task", "code/evil.py"),
        ("runs/received", "runs.received:task", "__init__.py"),
        ("Runs/received", "Runs.received.evil:task", "evil.py"),
        ("received", "received.evil:task", "evil.py"),
        ("received", "received.deep.er.evil:task", "deep/er/evil.py"),
        ("got/it", "got.it.evil:task", "evil.py"),
        ("received", "received.checkpoints.evil:task", "checkpoints/evil.py"),
        ("sweeps/s/runs/0", "sweeps.s.runs.evil:task", "../evil.py"),
    ],
)
def test_wherever_it_was_unpacked(folder, target, code, capsys):
    run = receive(folder, target, code)
    for trust in ([], ["--trust", target.partition(":")[0].partition(".")[0]], ["--trust", target.partition(":")[0]]):
        assert call("evaluate", run, *trust) == 1
    assert "Nothing is ever imported" in " ".join(capsys.readouterr().err.split())
    assert not Path("executed").exists()


def test_links_lead_nowhere(capsys):
    run = receive(target="evil:task")
    Path("evil.py").symlink_to("runs/received/evil.py")
    assert call("evaluate", run, "--trust", "evil") == 1
    Path("pack").symlink_to("runs/received")
    assert call("run", f"{run}/recipe.yaml", "--set", "trainer.task.type=pack.evil.task", "--trust", "pack") == 1
    assert capsys.readouterr().err.count("imported from there") == 2
    Path("work.py").write_text(EVIL)  # and a link inside of the run counts where it lies
    Path(run, "evil.py").unlink()
    Path(run, "evil.py").symlink_to(Path("work.py").absolute())
    with pytest.raises(BadArgument, match="Nothing is ever imported"):
        build_from_cfg({"type": "runs.received.evil.task"}, trust="runs")
    assert not Path("executed").exists()


@pytest.mark.parametrize("inside", [".", "sub"])
def test_a_command_that_is_started_inside_of_the_folder(inside, monkeypatch, capsys):
    run = Path(receive(target="evil:task")).absolute()
    (run / "sub").mkdir()
    shutil.copy(run / "evil.py", run / "sub" / "evil.py")
    for folder in (run, run / "sub"):
        (folder / "pyproject.toml").write_text('[tool.trainformer]\ntrust = ["evil"]\n')
    monkeypatch.chdir(run / inside)
    for trust in ([], ["--trust", "evil"]):
        assert call("evaluate", str(run), *trust) == 1
        assert "Nothing is ever imported" in " ".join(capsys.readouterr().err.split())
    assert not list(Path.cwd().rglob("executed"))


def test_a_namespace_package_that_spans_a_run(monkeypatch, tmp_path_factory):
    """One part of the package is the user's; the part in the run is not imported under its name."""
    other = tmp_path_factory.mktemp("other")
    (other / "runs").mkdir()
    (other / "runs" / "fine.py").write_text("def made(): return 3\n")
    monkeypatch.syspath_prepend(str(other))
    assert build_from_cfg({"type": "runs.fine.made"}, trust="runs") == 3
    receive()
    monkeypatch.syspath_prepend(os.getcwd())
    sys.modules.pop("runs.fine")
    sys.modules.pop("runs")
    for target in ("runs.received.evil.task", "runs.fine.made"):
        with pytest.raises(BadArgument, match="Nothing is ever imported"):
            build_from_cfg({"type": target}, trust="runs")
    assert not Path("executed").exists()


@pytest.mark.parametrize("key", ["data", "val_data", "root"])
def test_code_in_a_folder_of_data(key, capsys):
    Path("store").mkdir()
    Path("store/evil.py").write_text(EVIL)
    Path("run.yaml").write_text(f"main: {{type: store.evil.task, {key}: ./store}}\n")
    assert call("run", "run.yaml", "--trust", "store") == 1
    assert "takes data from it" in " ".join(capsys.readouterr().err.split())
    assert not Path("executed").exists()


def test_code_named_like_a_package_that_may_be_built(monkeypatch):
    """A stray file stands in for none of the packages that a config may name."""
    monkeypatch.setattr("trainformer.config.trust.ALLOWED", ("trainformer", "torch", "peft_none"))
    Path("peft_none.py").write_text(EVIL)
    for path in ([*sys.path], [*sys.path, os.getcwd()], [os.getcwd(), *sys.path]):
        monkeypatch.setattr(sys, "path", path)
        with pytest.raises(BadArgument, match=r"would run peft_none\.py .*--trust peft_none"):
            build_from_cfg({"type": "peft_none.task"})
    assert not Path("executed").exists()


def test_the_working_directory_hides_no_package(capsys):
    Path("light.py").write_text("import colorsys\ndef job(): print(colorsys.__file__)\n")
    Path("light.yaml").write_text("main: !partial:light:job\n")
    for name in ("torch", "colorsys", "yaml"):
        Path(f"{name}.py").write_text(EVIL)
    # `-m` would search the current folder first.
    words = [sys.executable, "-m", "trainformer.cli", "run", "light.yaml", "--trust", "light"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert not Path(done.stdout.strip()).is_relative_to(Path.cwd())
    assert not Path("executed").exists()


def test_a_recipe_leads_to_no_program(capsys):
    """Neither by its name nor as a template is a .py file executed."""
    run = receive()
    Path(run, "program.py").write_text(EVIL + "config = {}\n")
    for text in (
        "{% extends 'program.py' %}",
        "trainer: {type: trainformer.config.load_config, path: runs/received/program.py}",
        "trainer: {type: runs.received.program, x: 1}",
        "trainer: {type: runpy.run_path, path_name: runs/received/program.py}",
    ):
        Path(run, "recipe.yaml").write_text(text)
        assert call("evaluate", run) == 1
    assert not Path("executed").exists()


# -- code of the working directory -------------------------------------------------------------------------------------

WORK = "class Task(__import__('cli_toys').Fit): ...\n"
CONFIG = "trainer: {type: trainformer.Trainer, task: {type: work.Task}, data: '8', max_steps: 1, name: mine}\n"
JOB = "import json\ndef job(): print('done')\n"  # imports no torch, so that a process of its own is soon there


@pytest.fixture
def project():
    Path("work.py").write_text(WORK)
    Path("run.yaml").write_text(CONFIG)
    Path("light.py").write_text(JOB)
    Path("light.yaml").write_text("main: !partial:light:job\n")


def forget():
    sys.modules.pop("work", None)


def alone(*words, **options):
    """A command in its own process, which has none of the answers of this one; its exit code."""
    code = "import sys; from trainformer.cli import main; sys.exit(main())"
    command = [sys.executable, "-P", "-c", code, *words]
    return subprocess.run(command, check=False, **({"capture_output": True} | options)).returncode


def test_the_answer_is_remembered_until_the_code_changes(project, capsys):
    assert call("run", "run.yaml") == 1
    out, err = capsys.readouterr()
    said = " ".join(err.split())
    assert "importing it would run work.py (digest" in said
    assert "--trust work" in said
    assert 'trust = ["work"]' in said
    assert out == ""
    assert call("run", "run.yaml", "--trust", "work") == 0
    own = approvals_file()
    assert not own.is_relative_to(Path.cwd())
    assert own.stat().st_mode & 0o777 == 0o600
    forget()
    assert call("evaluate", "mine", "--data=8") == 0


def test_another_process_knows_the_answer(project):
    assert alone("run", "light.yaml") == 1
    assert alone("run", "light.yaml", "--trust", "light") == 0
    assert alone("run", "light.yaml") == 0
    Path("light.py").write_text(JOB + "# changed\n")
    assert alone("run", "light.yaml") == 1
    assert alone("run", "light.yaml", "--trust", "light") == 0
    approvals_file().chmod(0o666)  # answers that others may write do not count
    assert alone("run", "light.yaml") == 1
    approvals_file().chmod(0o600)
    assert alone("run", "light.yaml") == 0


def test_an_answer_holds_for_one_folder(project, monkeypatch, capsys):
    assert call("run", "run.yaml", "--trust", "work") == 0
    forget()
    Path("copy").mkdir()
    for name in ("work.py", "run.yaml"):
        shutil.copy(name, f"copy/{name}")
    monkeypatch.chdir("copy")
    monkeypatch.setattr(sys, "path", [path for path in sys.path if Path(path) != Path.cwd().parent])
    assert call("run", "run.yaml") == 1


def test_trust_in_a_part_is_remembered_as_such(capsys):
    Path("lab").mkdir()
    Path("lab/__init__.py").write_text("")
    for name in "ab":
        Path(f"lab/{name}.py").write_text(f"def job(): print({name!r})\n")
        Path(f"{name}.yaml").write_text(f"main: !partial:lab.{name}:job\n")
    assert call("run", "a.yaml", "--trust", "lab.a") == 0
    assert call("run", "a.yaml") == 0
    assert call("run", "b.yaml") == 1
    assert capsys.readouterr().out == "a\na\n"


def test_the_digest_has_everything_that_can_be_imported():
    Path("lab/sub").mkdir(parents=True)
    Path("lab/data").mkdir()
    for name in ("__init__.py", "sub/a.py", "data/b.py", "notes.txt"):
        Path("lab", name).write_text("x = 1\n")
    Path("beside").mkdir()
    Path("beside/c.py").write_text("x = 1\n")
    Path("lab/linked").symlink_to("../beside")
    Path("lab/around").symlink_to("../lab")
    seen = {find_code("lab").digest}
    for name in ("lab/__init__.py", "lab/sub/a.py", "lab/data/b.py", "beside/c.py", "lab/sub/new.py", "lab/x.pyc"):
        Path(name).write_text("x = 2\n")
        seen.add(find_code("lab").digest)
    assert len(seen) == 7
    Path("lab/notes.txt").write_text("y")
    Path("lab/__pycache__").mkdir()
    Path("lab/__pycache__/a.pyc").write_text("y")
    assert find_code("lab").digest in seen


@pytest.mark.parametrize("name", ["lab/__init__.py", "lab/part.py"])
def test_a_cache_of_something_else_is_not_used(name, capsys):
    Path("lab").mkdir()
    Path("lab/__init__.py").write_text("")
    Path("lab/part.py").write_text("def job(): print('approved')\n")
    Path("job.yaml").write_text("main: !partial:lab.part:job\n")
    source = Path(name).read_bytes()
    Path(name).write_text("import pathlib; pathlib.Path('executed').touch()\ndef job(): print('another')\n")
    cache = Path(py_compile.compile(name, invalidation_mode=py_compile.PycInvalidationMode.UNCHECKED_HASH))
    Path(name).write_bytes(source)
    assert cache.is_file()
    assert call("run", "job.yaml", "--trust", "lab") == 0
    assert capsys.readouterr().out == "approved\n"
    assert not Path("executed").exists()


def test_settings_of_the_project(project, capsys):
    Path("pyproject.toml").write_text('[tool.trainformer]\ntrust = ["work"]\n')
    assert call("run", "run.yaml") == 0
    forget()
    Path("work.py").write_text(WORK + "# changed\n")
    assert materialize(load_config("run.yaml")["trainer"]) is not None  # and never asks
    for text, said in (
        ("[tool.trainformer]\ntrusted = ['work']", "Did you mean 'trust'"),
        ("[tool.trainformer]\ntrust = ['a b']", "the name of a package to trust"),
        ("[tool", "settings that can be read"),
    ):
        Path("pyproject.toml").write_text(text)
        assert call("run", "run.yaml") == 1
        assert said in " ".join(capsys.readouterr().err.split())


def test_settings_of_parent_folders_do_not_count(project, monkeypatch):
    Path("sub").mkdir()
    Path("pyproject.toml").write_text('[tool.trainformer]\ntrust = ["work"]\n')
    shutil.move("work.py", "sub/work.py")
    monkeypatch.chdir("sub")
    with pytest.raises(BadArgument, match="--trust work"):
        build_from_cfg({"type": "work.Task"})


def test_the_environment_names_code_too(project, monkeypatch):
    monkeypatch.setenv("TRAINFORMER_TRUST", "other, work")
    assert build_from_cfg({"type": "work.Task"}) is not None
    with pytest.raises(BadArgument, match="weights_only"):  # arguments are checked unless it is named for the command
        build_from_cfg({"type": "work.Task", "weights_only": False})


@pytest.mark.parametrize("content", ["{", "[]", '{"approved": {"x": 3}}', '{"approved": {"x": {"y": 1}}}', ""])
def test_a_damaged_file_of_answers(project, monkeypatch, tmp_path_factory, caplog, content):
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path_factory.mktemp("broken")))
    approvals_file().parent.mkdir()
    approvals_file().write_text(content)
    approvals_file().chmod(0o600)
    monkeypatch.setattr(logging.getLogger("trainformer"), "propagate", True)
    with caplog.at_level(logging.WARNING, "trainformer"):
        assert call("run", "run.yaml") == 1
    assert "trust.json cannot be used" in caplog.text
    assert call("run", "run.yaml", "--trust", "work") == 0
    assert str(Path.cwd()) in json.loads(approvals_file().read_bytes())["approved"]


@pytest.mark.parametrize(("answer", "code"), [("y\n", 0), ("\n", 1), ("no\n", 1), ("\x04", 1)])
def test_on_a_terminal_the_user_is_asked(project, answer, code):
    """A pseudo-terminal answers."""
    main_end, other_end = pty.openpty()
    os.write(main_end, answer.encode())
    assert (
        alone("run", "light.yaml", stdin=other_end, stderr=other_end, stdout=subprocess.DEVNULL, capture_output=False)
        == code
    )
    os.close(other_end)
    said = b""
    try:
        while block := os.read(main_end, 4096):
            said += block
    except OSError:  # the other end was closed
        pass
    os.close(main_end)
    for part in (b"module  light", b"file    'light.py'", find_code("light").digest.encode(), b"[y/N]"):
        assert part in said
    assert alone("run", "light.yaml") == code  # remembered


def test_python_never_asks(project, monkeypatch):
    class Terminal:
        def isatty(self):
            return True

    monkeypatch.setattr(sys, "stdin", Terminal())
    monkeypatch.setattr(sys, "stderr", Terminal())
    with pytest.raises(BadArgument, match="--trust work"):
        materialize(load_config("run.yaml"))


def test_a_typed_module_is_named(project, capsys):
    assert call(*["train", "--task=work:Task", "--data=8", "--max-steps=1", "--name=typed", "--log=none"]) == 0
    forget()
    assert call("evaluate", "typed", "--data=8") == 0
    Path("runs/typed/evil.py").write_text(EVIL)
    assert call(*["train", "--task=runs.typed.evil:Task", "--data=8", "--max-steps=1"]) == 2
    assert "Nothing is ever imported" in " ".join(capsys.readouterr().err.split())
    assert not Path("executed").exists()


def test_which_folders_are_closed():
    here = Path.cwd()
    assert closed_folder([here / "lab" / "a.py"]) is None
    for name in ("recipe.yaml", "status.json", "metrics.jsonl", "records.jsonl", "sweep.json", "trainer_state.json"):
        Path("x").mkdir()
        Path("x", name).touch()
        assert closed_folder([here / "x" / "y" / "a.py"]) == (here / "x", f"it has {name}")
        shutil.rmtree("x")
    Path("x/checkpoints/step_00000001").mkdir(parents=True)
    assert closed_folder([here / "x" / "a.py"])[1] == "it has checkpoints/"
    Path("x/checkpoints/step_00000001/manifest.json").touch()
    found = closed_folder([here / "x/checkpoints/step_00000001/a.py"])
    assert found[1] == "it has the manifest of a checkpoint"
    shutil.rmtree("x")
    Path("checkpoints").mkdir()  # with weights of other programs
    torch.save({}, "checkpoints/a.pt")
    assert closed_folder([here / "a.py"]) is None
