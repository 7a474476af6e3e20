"""The commands `run` and `config`: what they do, print and do not import."""

import json
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import toys
from trainformer import Trainer
from trainformer.checkpoint import compare
from trainformer.cli import main
from trainformer.config import load_config, materialize
from trainformer.run import run_of

RUN = """\
model: {type: lab.Net, hidden_size: 8}
optimizer: {type: torch.optim.SGD, lr: {{ lr | default(0.1) }}}
trainer: {type: lab.Trainer, max_steps: 5}
job: !partial:lab:job {n: !var {name: n, default: 2}}
"""


def test_a_trainer_of_the_project_is_run(lab, write, capsys):
    write(RUN)
    assert main(["run", "run.yaml"]) == 0
    assert capsys.readouterr() == ("trained 5\n", "")
    assert main(["run", "run.yaml", "--set", "trainer.max_steps=7", "--set", "model.depth=1"]) == 1
    assert "--set +model.depth" in " ".join(capsys.readouterr().err.split())
    assert main(["run", "run.yaml", "--set", "trainer.max_steps=7", "--set", "+model.depth=1"]) == 0
    assert main(["run", "run.yaml", "--target", "job", "--var", "n=4"]) == 0
    assert capsys.readouterr().out == "trained 7\njob 4\n"


@pytest.mark.parametrize(
    ("text", "out"),
    [
        ("main: !partial:lab:job {n: 1}\nother: {type: lab.Thing}", "job 1\n"),
        ("main: !partial:lab:job {n: 1}\ntrainer: !partial:lab:job {n: 2}", "job 2\n"),
        ("trainer: {max_steps: 3}\nonly: !partial:lab:job {n: 3}", "job 3\n"),
    ],
)
def test_what_is_run_by_default(lab, write, capsys, text, out):
    assert main(["run", write(text)]) == 0
    assert capsys.readouterr().out == out


@pytest.mark.parametrize(
    ("text", "words", "said"),
    [
        ("a: {type: lab.Net}\nb: {type: lab.Net}", [], "What can be built: a, b. Choose by --target NAME."),
        ("a: 1", [], "What can be built: nothing."),
        ("job: !partial:lab:job", ["--target", "jb"], "received 'jb'. Did you mean 'job'?"),
        ("a: {type: lab.Net, hidden_size: 1}", [], "!partial:module:function"),
        ("a: !singleton:torch.nn:Linear [1, 1]", [], "A model does not train itself"),
        ("a: {type: wave.open}", [], "--trust wave"),
        ("a: {type: lab.Broken}", [], "lab.Broken to be built (run.yaml:1), received RuntimeError: no such size"),
        ("a: !partial:lab:job", ["--var", "x"], "a variable such as --var width=8"),
        ("a: !partial:lab:job", ["--trust", "no-package"], "the name of a package to trust"),
        ("a: {{ x }}", [], "(run.yaml:1): 'x' is undefined"),
    ],
)
def test_a_config_that_cannot_be_run_is_one_paragraph(lab, write, capsys, text, words, said):
    assert main(["run", write(text), *words]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: Expected")
    assert said in " ".join(err.split())


def test_trust_reaches_sections_that_are_built_later(tmp_path_factory, lab, write, monkeypatch, capsys):
    folder = tmp_path_factory.mktemp("elsewhere")
    (folder / "afar.py").write_text("class Thing: pass\n")
    monkeypatch.syspath_prepend(str(folder))
    Path("lab/later.py").write_text(
        "from trainformer.config import build_from_cfg\n"
        "class Late:\n"
        "    def __init__(self, model_cfg): self.model_cfg = model_cfg\n"
        "    def train(self): print(type(build_from_cfg(self.model_cfg)).__name__)\n"
    )
    words = ["run", write("trainer: {type: lab.later.Late}\nmodel: {type: afar.Thing}\n")]
    assert main(words) == 1
    assert "--trust afar" in capsys.readouterr().err
    assert main([*words, "--trust", "afar"]) == 0
    assert capsys.readouterr().out == "Thing\n"
    sys.modules.pop("afar")
    sys.modules.pop("lab.later")


TRAINER = """\
trainer: !singleton:trainformer:Trainer
  task: {type: work.Task}
  data: !factory:work:data [32]
  max_steps: 4
  lr: 1e-2
  batch_size: 8
  log: none
  run_dir: by_config
"""
WORK = """\
import toys

class Task(toys.MeanTask): ...

def data(n): return toys.classes(n)
"""


def run_alone(*words):
    """`trainformer run` in its own process, started in the project's folder, which is not on the path yet."""
    folder = str(Path(toys.__file__).parent)
    code = f"import sys; sys.path.append({folder!r}); from trainformer.cli import main; sys.exit(main())"
    return subprocess.run(
        [sys.executable, "-P", "-c", code, "run", *words, "--trust", "work"],
        capture_output=True,
        text=True,
        check=False,
    )


def by_hand():
    settings = {"max_steps": 4, "lr": 1e-2, "batch_size": 8, "log": "none", "run_dir": "by_hand"}
    Trainer(toys.MeanTask(), toys.classes(32), **settings).fit()
    return "by_hand"


@pytest.mark.slow
def test_a_trainer_of_ours_is_fitted(write):
    """It ends with the weights of the same run in Python."""
    write(WORK, "work.py")
    done = run_alone(write(TRAINER))
    assert (done.returncode, done.stderr) == (0, "")
    assert compare("by_config", by_hand()).parts["model"].equal


@pytest.mark.slow
def test_a_killed_run_is_resumed_by_the_same_command(write):
    write(
        WORK + "import os, signal\nclass Kill:\n    def on_step_end(self, trainer, step, loss):\n"
        "        if step == 3 and not os.path.exists('again'): os.kill(os.getpid(), signal.SIGKILL)\n",
        "work.py",
    )
    text = TRAINER + "  save_every: 2\n  callbacks: [!singleton:work:Kill ]\n"
    assert run_alone(write(text)).returncode == -signal.SIGKILL
    assert json.loads(Path("by_config/status.json").read_text())["status"] == "running"  # as far as it could tell
    Path("again").touch()
    done = run_alone("run.yaml")
    assert (done.returncode, done.stderr) == (0, "")
    assert "resuming from by_config/checkpoints/step_00000002" in Path("by_config/log.txt").read_text()
    assert compare("by_config", by_hand()).parts["model"].equal


HF = """\
trainer: !singleton:trainformer.hf:Trainer
  model: !factory:torch.nn:Linear [4, 3]
  args: !factory:trainformer.hf:TrainingArguments {output_dir: out, max_steps: 5, learning_rate: 1e-3, use_cpu: true}
  callbacks: [!singleton:trainformer.hf:GradLogger {log_frequency: 2}]
  train_dataset: !list [{x: 1}]
"""


def test_the_code_of_real_trainers_builds_the_same(write, capsys, tmp_path, monkeypatch):
    """What `config code` prints is run, and compared with what `run` builds."""
    monkeypatch.syspath_prepend(str(tmp_path))  # where a program of this folder would find its modules
    write(WORK, "work.py")
    for text in (HF, TRAINER):
        config = load_config(write(text))
        assert main(["config", "code", "run.yaml"]) == 0
        names = {}
        exec(capsys.readouterr().out, names)
        built, coded = materialize(config, trust="work")["trainer"], names["trainer"]
        assert type(built) is type(coded)
        assert settings_of(built) == settings_of(coded)


def settings_of(trainer):
    if isinstance(trainer, Trainer):
        names = ("max_steps", "lr", "batch_size", "log", "run_dir", "epochs", "seed")
        return ([getattr(run_of(trainer).settings, name) for name in names], type(trainer.task))
    shown = {
        name: value for name, value in vars(trainer.args).items() if name != "logging_dir"
    }  # it has the time in it
    return (shown, trainer.train_dataset, [type(callback) for callback in trainer.callback_handler.callbacks])


def test_the_config_is_shown(lab, write, capsys):
    write(RUN)
    words = ["run.yaml", "--var", "lr=1e-4", "--set", "model.hidden_size=3"]
    assert main(["config", "show", *words]) == 0
    write(capsys.readouterr().out, "again.yaml")
    assert load_config("again.yaml") == load_config("run.yaml", ["model.hidden_size=3"], lr=1e-4)
    assert main(["config", "show", "--json", *words]) == 0
    assert json.loads(capsys.readouterr().out)["optimizer"] == {"type": "torch.optim.SGD", "lr": 1e-4}
    assert main(["config", "show", "--preprocessed", *words]) == 0
    assert capsys.readouterr().out == RUN.replace("{{ lr | default(0.1) }}", "0.0001")
    assert main(["config", "graph", *words]) == 0
    assert capsys.readouterr().out.splitlines()[2:] == ["trainer: lab.Trainer", "job: partial lab:job"]
    assert main(["config", "graph", "--format", "dot", *words]) == 0
    assert capsys.readouterr().out.startswith("digraph")
    assert main(["config", "code", *words]) == 0
    assert "model = Net(hidden_size=3)" in capsys.readouterr().out


def test_the_rendered_text_is_shown_even_if_it_is_not_yaml(write, capsys):
    write("a: [{{ 1 + 1 }}")
    assert main(["config", "show", "run.yaml"]) == 1
    assert "line 1 after preprocessing" in " ".join(capsys.readouterr().err.split())
    assert main(["config", "show", "run.yaml", "--preprocessed"]) == 0
    assert capsys.readouterr().out == "a: [2\n"
    assert main(["config", "show", write("{}", "c.json"), "--preprocessed"]) == 1


def test_debug_shows_the_traceback_of_a_config_error(write):
    write("a: [")
    for words in (["config", "show", "run.yaml", "--debug"], ["config", "--debug", "show", "run.yaml"]):
        with pytest.raises(ValueError, match=r"run\.yaml"):
            main(words)


@pytest.mark.parametrize(
    "words", [["config"], ["config", "paint"], ["run"], ["config", "graph", "x", "--format", "png"]]
)
def test_wrong_usage_of_config_commands(words, capsys):
    with pytest.raises(SystemExit) as caught:
        main(words)
    assert caught.value.code == 2
    assert "usage: trainformer" in capsys.readouterr().err


def test_showing_imports_nothing_and_help_is_light(write):
    write("import os\nopen('imported', 'w').close()\nclass Thing: ...\n", "noisy.py")
    write("a: !singleton:noisy:Thing\nb: {type: torch.nn.Linear}\nc: !partial:transformers:pipeline\n")
    code = (
        "import sys, contextlib, io\nfrom trainformer.cli import main\n"
        "for words in ('run --help', 'config --help', 'config show --help', 'config show run.yaml', "
        "'config show --json run.yaml', 'config graph run.yaml', 'config code run.yaml'):\n"
        "    with contextlib.redirect_stdout(io.StringIO()):\n"
        "        try: main(words.split())\n"
        "        except SystemExit as end: assert end.code == 0\n"
        "print([m for m in ('torch', 'noisy', 'transformers') if m in sys.modules])\n"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == "[]"
    assert not Path("imported").exists()
