"""Secrets of a run: in no file of its folder, not in its report, not on the console; and given again on resume."""

import json
import logging
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from cli_toys import Fit

from trainformer import Trainer
from trainformer.cli import app, recipes
from trainformer.config import load_config
from trainformer.core.errors import BadArgument
from trainformer.core.secrets import MASK, forget_all

# By their shape, under harmless names.
SHAPES = {
    "url": "postgresql://me:Zq7@p/w@host/db",
    "query": "mysql://host/db?user=me&password=Yx8pw",
    "hub": "hf_" + "aB3" * 11,
    "cloud": "AKIAIOSFODNN7EXAMPLE",
    "code": "ghp_" + "cD4" * 12,
    "llm": "sk-ant-api03-" + "eF5" * 12,
    "chat": "xoxb-1234567890-abcdefghij",
    "maps": "AIza" + "gH6-_" * 7,
    "web": "eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl",
    "pem": "-----BEGIN PRIVATE KEY-----\nMIIEvQIBADANBgkqhkiG9w0BAQ\n-----END PRIVATE KEY-----",
    "wandb_id": "a1b2" * 10,
}
# What must not be found: the secrets, or their secret part.
SECRETS = {
    **SHAPES,
    "url": "Zq7@p/w",
    "query": "Yx8pw",
    "pem": "MIIEvQIBADANBgkqhkiG9w0BAQ",
    "variable": "hunter2",  # --var token=hunter2
    "option": "swordfish-1",  # --set trainer.task.options.password=swordfish-1
    "setting": "open-sesame-3",  # api_key in the config
    "environment": "from-the-env-5",
}
CONFIG = """
trainer:
  type: trainformer:Trainer
  task:
    type: test_cli_secrets:Service
    access: !var token
    api_key: open-sesame-3
    options: OPTIONS
  data: "16"
  max_steps: 2
  batch_size: 4
  run_dir: runs/service
  log: [console, tensorboard]
  callbacks: [{type: test_cli_secrets:Talkative}]
"""


@dataclass(eq=False)
class Service(Fit):
    """Needs secrets, and reports them in an error."""

    access: str = ""
    api_key: str = ""
    options: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self):
        super().__post_init__()
        GIVEN.append((self.access, self.api_key, self.options))

    def config_dict(self):
        return {"access": self.access, "api_key": self.api_key, "options": self.options}


GIVEN: list[Any] = []


class Talkative:
    """Puts all secrets wherever a run can put text, and fails."""

    def on_train_begin(self, trainer):
        everything = {**trainer.task.options, "access": trainer.task.access, "api_key": trainer.task.api_key}
        trainer.record("connected", settings=everything)
        for text in everything.values():
            trainer.logger.log_text("note", f"it is {text}", 0)
            logging.getLogger("trainformer").info("connecting with wandb key %s", text)

    def on_step_end(self, trainer, step, loss):
        if "fail" in trainer.task.options:
            everything = {**trainer.task.options, "access": trainer.task.access, "api_key": trainer.task.api_key}
            texts = "; ".join(f"wandb {text}" for text in everything.values())
            raise ConnectionError(f"{texts} {trainer.task.options['from_env']} were refused")


@pytest.fixture(autouse=True)
def nothing_given():
    GIVEN.clear()


def command(monkeypatch, *words):
    """Run a command as the shell would start it."""
    words = [*words, "--trust", "test_cli_secrets"]
    monkeypatch.setattr(sys, "argv", ["trainformer", *words])
    return app.main(words)


def everything_in(folder):
    return b"\n".join(path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file())


def start(monkeypatch, **options):
    Path("config.yaml").write_text(CONFIG.replace("OPTIONS", json.dumps({"password": "x", **options})))
    words = ["--var", "token=hunter2", "--set", "trainer.task.options.password=swordfish-1"]
    return command(monkeypatch, "run", "config.yaml", *words)


def found_in(content):
    escaped = {name: json.dumps(secret)[1:-1] for name, secret in SECRETS.items()}
    return [name for name in SECRETS if SECRETS[name].encode() in content or escaped[name].encode() in content]


@pytest.mark.parametrize("ends", ["well", "with an error"])
def test_no_secret_reaches_a_file_the_console_or_a_report(monkeypatch, capfd, ends):
    monkeypatch.setenv("SERVICE_PASSWORD", SECRETS["environment"])
    options = {**SHAPES, "from_env": SECRETS["environment"]} | ({} if ends == "well" else {"fail": "yes"})
    assert start(monkeypatch, **options) == (0 if ends == "well" else 1)
    assert GIVEN[0] == ("hunter2", "open-sesame-3", {**options, "password": "swordfish-1"})  # what it was built with
    run = Path("runs/service")
    assert {"config.json", "records.jsonl", "log.txt", "recipe.yaml", "metrics.jsonl", "status.json"} <= {
        path.name for path in run.iterdir()
    }
    assert app.main(["report", str(run)]) == 0
    assert app.main(["runs", "--json"]) == 0
    assert found_in(everything_in(run)) == []
    shown = capfd.readouterr()
    assert found_in((shown.out + shown.err).encode()) == []
    assert MASK in (run / "log.txt").read_text()
    assert MASK in (run / "report.html").read_text()
    assert ("refused" in shown.err) == (ends != "well")


def test_showing_a_config_hides_secrets_and_keeps_it_loadable(monkeypatch, capsys):
    Path("config.yaml").write_text(CONFIG.replace("OPTIONS", json.dumps({"token": "other-1", **SHAPES})))
    for form in (["show"], ["show", "--json"], ["show", "--preprocessed"], ["graph"], ["code"]):
        assert app.main(["config", *form, "config.yaml", "--var", "token=hunter2"]) == 0
        shown = capsys.readouterr().out
        assert form == ["show", "--preprocessed"] or found_in(shown.encode()) == []
        if form == ["show"]:
            Path("shown.yaml").write_text(shown)
        if form == ["code"]:
            assert "os.environ['TRAINFORMER_VAR_API_KEY']" in shown
    assert "api_key: !secret 'api_key'" in Path("shown.yaml").read_text()
    given = {"token": "hunter2", "api_key": "open-sesame-3", "trainer.task.options.token": "other-1", **SHAPES}
    assert load_config("shown.yaml", variables=given) == load_config("config.yaml", variables={"token": "hunter2"})


# -- resume ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(monkeypatch):
    assert start(monkeypatch) == 0
    forget_all()  # as in a new process
    GIVEN.clear()
    return Path("runs/service")


def test_the_recipe_names_the_secrets(run):
    recipe = (run / recipes.FILE).read_text()
    assert all(f"!secret '{name}'" in recipe for name in ("token", "api_key", "password"))
    assert MASK not in recipe


@pytest.mark.parametrize("by", ["options", "environment", "both"])
def test_a_resumed_run_gets_its_secrets_again(run, monkeypatch, by):
    given = {"token": "hunter2", "api_key": "open-sesame-3", "password": "swordfish-1"}
    words = [word for name, value in given.items() for word in ("--var", f"{name}={value}")]
    if by != "options":
        for name, value in given.items():
            monkeypatch.setenv(f"TRAINFORMER_VAR_{name.upper()}", value if by == "environment" else "wrong")
    words = words if by != "environment" else []
    assert command(monkeypatch, "resume", str(run), "--max-steps", "4", *words) == 0
    assert GIVEN == [("hunter2", "open-sesame-3", {"password": "swordfish-1"})]
    assert found_in(everything_in(run)) == []
    assert command(monkeypatch, "evaluate", str(run), "--data", "8", *words) == 0


def test_without_its_secrets_a_run_is_not_resumed(run, monkeypatch, capsys):
    assert command(monkeypatch, "resume", str(run), "--max-steps", "4", "--var", "token=hunter2") == 1
    error = " ".join(capsys.readouterr().err.split())
    assert "Expected a value for the secret api_key (runs/service/recipe.yaml:" in error
    assert "Pass --var api_key=..., or set the environment variable TRAINFORMER_VAR_API_KEY." in error
    assert GIVEN == []


def test_two_secrets_of_one_name_stay_apart():
    Path("two.yaml").write_text("a: {token: first-1}\nb: {token: second-2}\nc: {token: first-1}\n")
    Path("recipe.yaml").write_text(recipes.text_of(load_config("two.yaml")))
    assert load_config("recipe.yaml", variables={"token": "first-1", "b.token": "second-2"}) == load_config("two.yaml")
    with pytest.raises(BadArgument, match="TRAINFORMER_VAR_B_TOKEN"):
        load_config("recipe.yaml", token="first-1")


def test_only_its_own_environment_variables_reach_a_config(monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hunter2")
    Path("theirs.yaml").write_text("url: !secret HF_TOKEN\n")
    with pytest.raises(BadArgument, match="TRAINFORMER_VAR_HF_TOKEN"):
        load_config("theirs.yaml")


def test_what_stands_in_place_of_a_secret_is_never_used():
    Path("copied.yaml").write_text(f"task: {{api_key: '{MASK}'}}\n")
    with pytest.raises(BadArgument, match=r"a value for task\.api_key"):
        load_config("copied.yaml")
    with pytest.raises(BadArgument, match="a value for task/api_key"):
        Trainer(Service(api_key=MASK), "16", max_steps=1, log="none")


def test_another_secret_is_the_same_run():
    def run(key):
        options = {"max_steps": 4 if key == "first-1" else 8, "batch_size": 4, "run_dir": "runs/x", "log": "none"}
        return Trainer(Service(access=key, api_key=key), "16", **options).fit()

    assert run("first-1").state.step == 4
    assert run("second-2").state.step == 8
    records = [json.loads(line)["kind"] for line in Path("runs/x/records.jsonl").read_text().splitlines()]
    assert records.count("resumed") == 1
    assert b"first-1" not in everything_in(Path("runs/x"))
    assert b"second-2" not in everything_in(Path("runs/x"))
