"""`recipe.yaml`: when it is written, what is built from it, and what is refused."""

import json
from pathlib import Path

import pytest
import torch
from cli_toys import Fit, last_weights

from toys import same
from trainformer import Trainer
from trainformer.callbacks import EarlyStopping
from trainformer.cli import app, recipes
from trainformer.config import load_config, to_yaml
from trainformer.core.errors import BadArgument

LINE = (
    "train --task=cli_toys:Fit --width=3 --data=16 --val-data=8 --max-steps=2 --batch-size=4 --lr=0.0001 --name=fit "
    "--options.type=plain --callbacks=EarlyStopping(patience=2) --log=none"
)
BY_HAND = {"data": "16", "val_data": "8", "max_steps": 2, "batch_size": 4, "lr": 0.0001, "log": "none"}


@pytest.fixture
def run():
    assert app.main(LINE.split()) == 0
    return Path("runs/fit")


def recipe(run):
    return (run / recipes.FILE).read_text()


def test_the_recipe_has_exactly_the_given_options(run):
    config = load_config(run / recipes.FILE)
    assert list(config) == ["trainer"]
    trainer = config["trainer"]
    assert trainer.target == "trainformer:Trainer"
    task = trainer.kwargs.pop("task")
    assert (task.target, task.kwargs) == ("cli_toys:Fit", {"width": 3, "options": {"type": "plain"}})
    stopping = [{"type": "trainformer.callbacks.EarlyStopping", "patience": 2}]
    assert trainer.kwargs == {**BY_HAND, "name": "fit", "callbacks": stopping}


def test_the_run_config_equals_that_of_the_same_python(run):
    Trainer(Fit(3, options={"type": "plain"}), name="hand", callbacks=[EarlyStopping(patience=2)], **BY_HAND).fit()
    typed, written = (
        {key: (entry["value"], entry["source"]) for key, entry in json.loads(path.read_bytes()).items()}
        for path in (run / "config.json", Path("runs/hand/config.json"))
    )
    assert typed.pop("name") != written.pop("name")
    assert typed == written
    assert (typed["lr"], typed["epochs"]) == ((0.0001, "user"), (100, "default"))


def test_the_trainer_of_a_run_is_rebuilt(run):
    trainer = recipes.trainer_of("fit", trust=("cli_toys",), changes={"max_steps": 5, "data": [("as", "it is")]})
    assert isinstance(trainer.task, Fit)
    assert (trainer.task.width, trainer.task.options) == (3, {"type": "plain"})
    assert (trainer.run_dir, trainer.max_steps, trainer.batch_size) == ("runs/fit", 5, 4)
    assert trainer.data == [("as", "it is")]
    assert trainer.was_set("lr")
    assert not trainer.was_set("weight_decay")
    assert recipes.trainer_of(str(run), trust=("cli_toys",)).load(run).state.step == 2


def test_a_rebuilt_trainer_resumes_in_the_same_folder(run):
    assert recipes.trainer_of("fit", trust=("cli_toys",), changes={"max_steps": 4}).fit().state.step == 4
    assert [path.name for path in Path("runs").iterdir()] == ["fit"]


def test_a_recipe_is_a_config_that_can_be_run(run):
    torch.manual_seed(7)  # the model does not depend on earlier random numbers
    assert app.main(["run", str(run / recipes.FILE), "--set", "trainer.name=again", "--trust", "cli_toys"]) == 0
    assert recipe(Path("runs/again")) == recipe(run).replace("name: fit", "name: again")
    assert same(last_weights("again"), last_weights("fit"))


def test_the_recipe_is_written_when_the_run_starts():
    line = ["train", "--task=cli_toys:Fit", "--data=16", "--name=failed", "--log=none"]
    assert app.main([*line, "--callbacks={type: cli_toys.Missing}"]) == 1
    assert not Path("runs").exists()  # no run was started
    assert app.main([*line, "--lr=1e30"]) == 1
    assert "lr: 1.0e+30" in recipe(Path("runs/failed"))


def test_a_run_of_a_program_has_no_recipe():
    Trainer(Fit(), "8", max_steps=1, name="program", log="none").fit()
    assert not Path("runs/program", recipes.FILE).exists()
    with pytest.raises(BadArgument, match="started by a Python program: run that again"):
        recipes.trainer_of("program")


def test_a_recipe_from_a_stranger_runs_no_code(run):
    Path("here").mkdir()
    for text in ("trainer: {type: os.rmdir, path: here}", "trainer: !singleton:os:rmdir [here]"):
        (run / recipes.FILE).write_text(text)
        with pytest.raises(BadArgument, match="importing it would run code of 'os'"):
            recipes.trainer_of("fit", trust=("cli_toys",))
    assert Path("here").is_dir()
    (run / recipes.FILE).write_text("model: 3")
    with pytest.raises(BadArgument, match="to have a key trainer"):
        recipes.trainer_of("fit")
    # A class that was typed is imported because it was typed; in a file it must be trusted.
    assert app.main(LINE.replace("=fit", "=other").split()) == 0
    with pytest.raises(BadArgument, match="--trust cli_toys"):
        recipes.trainer_of("other")


def test_run_writes_the_recipe_under_the_key_trainer(run):
    config = load_config(run / recipes.FILE)
    config["main"] = config.pop("trainer")
    config["main"].kwargs["name"] = "main"
    Path("main.yaml").write_text(to_yaml(config))
    assert app.main(["run", "main.yaml", "--trust", "cli_toys"]) == 0
    assert recipe(Path("runs/main")) == recipe(run).replace("name: fit", "name: main")


def test_a_config_with_python_objects_has_no_recipe(caplog):
    Path("run.py").write_text(
        "from cli_toys import Fit\nfrom trainformer import Trainer\n"
        "config = {'trainer': {'type': Trainer, 'task': Fit(), 'data': '8', 'max_steps': 1, 'name': 'objects'}}\n"
    )
    with caplog.at_level("INFO", logger="trainformer"):
        assert app.main(["run", "run.py"]) == 0
    assert not Path("runs/objects", recipes.FILE).exists()
    assert "no recipe.yaml is kept" in caplog.text


def test_braces_and_comment_marks_survive():
    odd = "{{ 7 * 7 }} # not: a comment"
    assert app.main([*LINE.replace("fit", "odd").split(), f"--options.odd={odd!r}"]) == 0
    trainer = recipes.trainer_of("odd", trust=("cli_toys",))
    assert trainer.task.options == {"type": "plain", "odd": odd}
