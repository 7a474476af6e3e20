"""`trainformer train` and `check` end to end: the plan's commands on small models, signals, and resuming."""

import contextlib
import json
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from cli_toys import last_weights
from transformers import GPT2LMHeadModel

from forking import SERVER
from text_toys import chat_tokenizer, gpt2, sentences
from toys import same
from trainformer import Trainer, tasks
from trainformer.adapters import LoRA
from trainformer.cli import app
from trainformer.loggers import read_jsonl


def pictures(folder, count=4):
    from PIL import Image

    generator = torch.Generator().manual_seed(0)
    for number, name in enumerate(("cat", "dog")):
        place = Path(folder, name)
        place.mkdir(parents=True)
        for i in range(count):
            pixels = torch.randint(100 * number, 100 * number + 100, (40, 48, 3), generator=generator)
            Image.fromarray(pixels.to(torch.uint8).numpy()).save(place / f"{i}.png")


# -- the plan's commands -----------------------------------------------------------------------------------


@pytest.fixture
def language():
    """A small model and texts, by the names of the plan."""
    tokenizer = chat_tokenizer()
    torch.manual_seed(0)
    GPT2LMHeadModel(gpt2(vocab_size=len(tokenizer))).save_pretrained("gpt2")
    tokenizer.save_pretrained("gpt2")
    Path("data/text").mkdir(parents=True)
    Path("data/text/train.txt").write_text("\n".join(sentences()[:6]))


@pytest.mark.slow
@pytest.mark.usefixtures("language")
def test_a_language_model_with_an_adapter(capsys):
    line = "train --task=CausalLM --model=gpt2 --data=data/text --adapter=LoRA --r=8 --epochs=2 --max-length=16"
    assert app.main([*line.split(), "--name=lora"]) == 0
    assert "epoch 2.00" in capsys.readouterr().out
    made = json.loads(Path("runs/lora/checkpoints/step_00000002/adapter_config.json").read_text())
    assert (made["r"], made["peft_type"]) == (8, "LORA")

    Path("prompts.jsonl").write_text('{"prompt": "the cat"}\n{"text": "a dog"}\n{"prompt": "where"}\n')
    options = ["--batch-size=2", "--max-new-tokens=5", "--out=written.jsonl"]
    assert app.main(["predict", "lora", "prompts.jsonl", *options]) == 0
    rows = read_jsonl(Path("written.jsonl"))
    prompts = ["the cat", "a dog", "where"]
    assert [(row["index"], row["prompt"]) for row in rows] == list(enumerate(prompts))
    task = tasks.CausalLM("gpt2", adapter=LoRA(r=8), max_length=16)
    Trainer(task, "data/text", log="none", resume=None).load("runs/lora", ["model"])
    assert [row["text"] for row in rows] == [task.generate(prompt, max_new_tokens=5)[0] for prompt in prompts]
    Path("wrong.jsonl").write_text('{"words": 1}\n')
    assert app.main(["predict", "lora", "wrong.jsonl"]) == 1
    assert "record 0 to have a prompt, a text or messages" in " ".join(capsys.readouterr().err.split())


@pytest.mark.slow
def test_images_with_and_without_labels():
    pictures("data/sop")
    line = "train --task=MetricLearning --model=resnet10t --data=data/sop --loss=arcface"
    small = "--image-size=32 --batch-size=4 --max-steps=2 --log=none --num-workers=0"
    assert app.main(f"{line} {small} --no-pretrained --name=typed".split()) == 0
    task = tasks.MetricLearning("resnet10t", loss="arcface", pretrained=False, image_size=32)
    Trainer(task, "data/sop", batch_size=4, max_steps=2, num_workers=0, log="none", name="by hand").fit()
    assert same(last_weights("typed"), last_weights("by-hand"))

    line = "train --task=SSL.dino --model=vit_tiny --data=data/sop --epochs=100 --out-dim=16 --num-local=1"
    assert app.main(f"{line} {small} --model-kwargs.depth=1 --name=dino".split()) == 0
    assert read_jsonl(Path("runs/dino/metrics.jsonl"))[-1]["step"] == 2


# -- what it does ------------------------------------------------------------------------------------------


def test_a_dry_run_prints_the_recipe_and_does_nothing(capsys):
    line = "train --task=cli_toys:Fit --data=16 --epochs=1 --name=real --log=none"
    assert app.main([*line.split(), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert not Path("runs").exists()
    assert app.main(line.split()) == 0
    assert Path("runs/real/recipe.yaml").read_text() == shown


def test_a_task_in_the_current_folder(monkeypatch):
    monkeypatch.setattr(sys, "path", [place for place in sys.path if place])
    Path("lab_of_mine").mkdir()
    Path("lab_of_mine/parts.py").write_text("from cli_toys import Fit\n\nclass Mine(Fit):\n    pass\n")
    line = "train --task=lab_of_mine.parts:Mine --width=3 --data=8 --max-steps=1 --name=mine --log=none"
    assert app.main(line.split()) == 0
    assert Path("runs/mine/status.json").exists()
    # It is the project's own, so that the recipe needs no trust.
    assert app.main(["run", "runs/mine/recipe.yaml"]) == 0


def test_several_validation_sets_and_schedulers(capsys):
    line = "train --task=cli_toys:Fit --data=32 --val clean=8 --val shifted=12 --epochs=2 --batch-size=8 --name=sets"
    line += " --eval-every.shifted=3steps --monitor-metric=val/shifted/loss --log=none"
    schedulers = "[{name: StepLR, step_size: 1, interval: epoch}, {name: plateau, monitor: val/clean/loss}]"
    assert app.main([*line.split(), "--scheduler", schedulers]) == 0
    lines = [json.loads(text) for text in Path("runs/sets/metrics.jsonl").read_text().splitlines()]
    steps = {name: [one["step"] for one in lines if f"val/{name}/loss" in one] for name in ("clean", "shifted")}
    assert steps == {"clean": [4, 8], "shifted": [3, 6, 8]}
    assert app.main(["run", "runs/sets/recipe.yaml", "--trust=cli_toys", "--set", "trainer.name=again"]) == 0
    again = [json.loads(text) for text in Path("runs/again/metrics.jsonl").read_text().splitlines()]
    assert again[-1]["val/shifted/loss"] == lines[-1]["val/shifted/loss"]
    capsys.readouterr()
    assert app.main(["evaluate", "runs/sets", "--trust=cli_toys", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)["metrics"]
    assert metrics == {name: lines[-1][name] for name in ("val/clean/loss", "val/shifted/loss")}
    more = ["--data", "a=8", "--data", "b=12", "--json"]
    assert app.main(["evaluate", "runs/sets", "--trust=cli_toys", *more]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == {
        "val/a/loss": metrics["val/clean/loss"],
        "val/b/loss": metrics["val/shifted/loss"],
    }


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--val", "8", "--val", "12"], "Give each its own name"),
        (["--val", "a=8", "--val", "a=12"], "Give each its own name"),
        (["--val", "a=8", "--val-data", "12"], "received both"),
        (["--val", "a=8", "--monitor-metric", "val/loss"], "'val/a/loss'"),
        (["--val", "a=8", "--eval-every.b=2"], "There is a"),
        (["--scheduler", "{name: StepLR, interval: epochs}"], "Did you mean 'epoch'"),
    ],
)
def test_mistakes_with_sets_and_schedulers_are_one_message(words, message, capsys):
    with contextlib.suppress(SystemExit):
        assert app.main(["train", "--task=cli_toys:Fit", "--data=8", "--epochs=1", *words]) == 1
    assert message in " ".join(capsys.readouterr().err.split())
    assert not Path("runs").exists()


def test_a_failure_is_one_paragraph(capsys):
    assert (
        app.main(["train", "--task=ImageClassification", "--data=nowhere", "--model=resnet10t", "--no-pretrained"]) == 1
    )
    text = capsys.readouterr().err
    assert text.startswith("error: Expected a folder of images")  # and not where in a config, which nobody has written
    assert "nowhere" in text
    assert "Traceback" not in text


# -- check -------------------------------------------------------------------------------------------------


def test_check_returns_1_if_the_run_will_not_work(capsys):
    assert app.main(["check", "--task=cli_toys:Fit", "--data=16"]) == 0
    assert "gradients" in capsys.readouterr().out
    assert app.main(["check", "--task=cli_toys:Idle", "--data=16"]) == 1
    assert "idle" in capsys.readouterr().out
    assert app.main(["check", "--task=cli_toys:Idle", "--data=16", "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["ok"] is False
    failed = [finding["question"] for finding in report["findings"] if finding["status"] == "failed"]
    assert failed == ["gradients"]
    assert not Path("runs").exists()


# -- signals -----------------------------------------------------------------------------------------------


def start(words):
    """The command in its own process, forked from one that has imported torch."""
    process = SERVER.Process(target=app.main, args=(words,))
    process.start()
    return process


@pytest.mark.slow
def test_the_same_command_resumes_after_sigterm_with_the_same_weights():
    line = ["train", "--task=cli_toys:Fit", "--data=64", "--batch-size=4", "--epochs=3", "--log=none", "--log-every=1"]
    assert app.main([*line, "--name=undisturbed"]) == 0

    slow = [*line, "--name=disturbed", "--pause=0.02"]
    process, metrics = start(slow), Path("runs/disturbed/metrics.jsonl")
    until = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_bytes().splitlines()) > 4):
        assert process.is_alive()
        assert time.monotonic() < until
        time.sleep(0.01)
    os.kill(process.pid, signal.SIGTERM)
    process.join(120)
    assert process.exitcode == 128 + signal.SIGTERM
    assert json.loads(Path("runs/disturbed/status.json").read_bytes())["status"] == "interrupted"
    before = Path("runs/disturbed/recipe.yaml").read_bytes()

    assert app.main(slow) == 0
    steps = [record["step"] for record in read_jsonl(metrics) if "train/loss" in record]
    assert steps == list(range(1, 49))
    assert same(last_weights("disturbed"), last_weights("undisturbed"))
    assert Path("runs/disturbed/recipe.yaml").read_bytes() == before


def test_a_mixture_of_data_is_trained_and_resumed(capsys):
    line = "train --task=cli_toys:Fit --data.sources.small='8' --data.sources.large='40' --data.weights.small=1"
    line += " --data.weights.large=3 --epochs=1 --batch-size=4 --log=none"
    assert app.main([*line.split(), "--name=mixed"]) == 0
    assert app.main(["resume", "runs/mixed", "--epochs=2", "--trust=cli_toys"]) == 0
    (*_, last) = read_jsonl(Path("runs/mixed/metrics.jsonl"))
    assert (last["train/passes/large"], last["train/epoch"]) == (pytest.approx(2, abs=0.06), 2.0)
    assert json.loads(Path("runs/mixed/config.json").read_text())["mixture"]["value"]["weights"] == {
        "small": 1.0,
        "large": 3.0,
    }
    capsys.readouterr()
    assert app.main([*line.replace("weights.large", "weights.lage").split(), "--name=other"]) != 0
    assert "Did you mean 'large'?" in capsys.readouterr().err
