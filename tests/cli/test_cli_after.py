"""Commands that use a trained run: evaluate, predict, export, resume. Compared with the same in Python."""

import csv
import json
import os
import shutil
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from pyarrow import parquet

from trainformer import Trainer
from trainformer.backends.torch.export import _FORMATS
from trainformer.checkpoint import compare, list_checkpoints
from trainformer.cli import main
from trainformer.cli.trained import EXPORT_FORMATS, format_of
from trainformer.config import load_config
from trainformer.run import predictions, run_of
from trainformer.tasks import ImageClassification
from trainformer.utils.processes import process_identity

CONFIG = """\
trainer:
  type: trainformer.Trainer
  task: {{type: trainformer.tasks.ImageClassification, backbone: test_resnet, pretrained: false, image_size: 32}}
  data: {root}/train
  val_data: {root}/val
  run_dir: {root}/runs/pets
  epochs: 3
  save_every: 2
  save_last: 3
  batch_size: 8
  ema: 0.5
  lr: 1.0e-2
  device: cpu
  precision: fp32
  num_workers: 0
  log: none
"""


def by_hand(root, run_dir, **settings):
    """The same run in Python."""
    task = ImageClassification("test_resnet", pretrained=False, image_size=32)
    usual = {"epochs": 3, "save_every": 2, "save_last": 3, "batch_size": 8, "ema": 0.5, "lr": 1e-2, "num_workers": 0}
    return Trainer(
        task,
        f"{root}/train",
        f"{root}/val",
        run_dir=run_dir,
        device="cpu",
        precision="fp32",
        log="none",
        **usual | settings,
    )


def paint(folder, brightness, count, seed):
    """Small pictures, dark or light."""
    folder.mkdir(parents=True)
    generator = np.random.default_rng(seed)
    for number in range(count):
        pixels = generator.integers(brightness, brightness + 120, (32, 40, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{number}.png")


@dataclass
class Pets:
    root: Path
    trainer: Trainer  # the same in Python

    @property
    def run(self):
        return str(self.root / "runs" / "pets")

    @property
    def test(self):
        return str(self.root / "test")


@pytest.fixture(scope="module")
def pets(tmp_path_factory):
    """A run by `trainformer run`, and the trainer of the same run in Python."""
    root = tmp_path_factory.mktemp("pets")
    for number, (kind, brightness) in enumerate((("cat", 0), ("dog", 130))):
        for folder, count in (("train", 8), ("val", 4), ("test", 3)):
            paint(root / folder / kind, brightness, count, seed=10 * number + count)
    config = root / "run.yaml"
    config.write_text(CONFIG.format(root=root))
    assert main(["run", str(config)]) == 0
    return Pets(root, by_hand(root, root / "by_hand").fit())


def files_of(folder):
    return {path: (path.stat().st_mtime_ns, path.stat().st_size) for path in Path(folder).rglob("*")}


def answer(capsys, *words):
    assert main([*words, "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_evaluate_matches_the_trainer_of_the_run(pets, capsys):
    """It evaluates the EMA weights, as the run does; neither the run nor this folder changes."""
    before = files_of(pets.root)
    found = answer(capsys, "evaluate", pets.run)
    assert found["metrics"] == pytest.approx(pets.trainer.evaluate())
    assert found["step"] == 6
    assert found["metrics"] != pytest.approx(pets.trainer.evaluate_without_ema())
    other = answer(capsys, "evaluate", pets.run, "--data", pets.test, "--batch-size", "5")
    assert other["metrics"] == pytest.approx(pets.trainer.evaluate(pets.test), rel=1e-5)
    assert files_of(pets.root) == before
    assert list(Path().iterdir()) == []


def test_evaluate_uses_the_best_or_a_named_checkpoint(pets, capsys):
    first = list_checkpoints(pets.run)[0]
    named = answer(capsys, "evaluate", str(first.path))
    assert (named["step"], named["metrics"]) == (first.step, pytest.approx(first.manifest.metrics))
    scored = [each for each in list_checkpoints(pets.run) if "val/loss" in each.manifest.metrics]
    best = min(scored, key=lambda each: each.manifest.metrics["val/loss"])
    found = answer(capsys, "evaluate", pets.run, "--which", "best")
    assert (found["step"], found["metrics"]) == (best.step, pytest.approx(best.manifest.metrics))
    assert main(["evaluate", pets.run]) == 0
    out = capsys.readouterr().out
    assert out.splitlines()[0] == f"{pets.run}/checkpoints/step_00000006 on its validation data"
    assert f"  val/loss      {found['metrics']['val/loss']:.5g}" in out.splitlines() or best.step != 6


@pytest.fixture(scope="module")
def wanted(pets):
    """Rows as the trainer in Python predicts them."""
    rows = []
    for index, row in enumerate(pets.trainer.predict(pets.test)):
        name, file = ("cat", "dog")[int(row["prediction"])], row.pop("id")
        values = {key: value.tolist() for key, value in row.items()}
        rows.append({"index": index, "id": file, "class": name, **values})
    assert [row["id"] for row in rows] == [f"{kind}/{number}.png" for kind in ("cat", "dog") for number in range(3)]
    return rows


def assert_same_rows(found, wanted):
    assert [list(row) for row in found] == [list(row) for row in wanted]
    for ours, theirs in zip(found, wanted, strict=True):
        assert [ours[key] for key in ("index", "id", "class", "prediction")] == list(theirs.values())[:4]
        assert ours["probability"] == pytest.approx(theirs["probability"], rel=1e-5)
        assert ours["probabilities"] == pytest.approx(theirs["probabilities"], rel=1e-5)


def test_predictions_are_printed_as_json_lines(pets, wanted, capsys):
    assert main(["predict", pets.run, pets.test, "--batch-size", "4"]) == 0
    out, err = capsys.readouterr()
    assert_same_rows([json.loads(line) for line in out.splitlines()], wanted)
    assert err == ""


def test_predictions_in_files_of_every_kind(pets, wanted, capsys):
    for name in ("out.jsonl", "deep/out.csv", "out.parquet"):
        assert main(["predict", pets.run, pets.test, "--out", name]) == 0
    assert capsys.readouterr().out == ""
    assert_same_rows([json.loads(line) for line in Path("out.jsonl").read_text().splitlines()], wanted)
    assert_same_rows(parquet.read_table("out.parquet").to_pylist(), wanted)
    with open("deep/out.csv", newline="") as file:
        texts = list(csv.DictReader(file))
    rows = [{k: v if k in ("class", "id") else json.loads(v) for k, v in row.items()} for row in texts]
    assert_same_rows(rows, wanted)
    assert sorted(path.name for path in Path().rglob("*") if path.is_file()) == ["out.csv", "out.jsonl", "out.parquet"]
    assert main(["predict", pets.run, pets.test, "--out", "out.jsonl"]) == 1
    assert "--force" in capsys.readouterr().err
    assert main(["predict", pets.run, pets.test, "--out", "out.jsonl", "--format", "csv", "--force"]) == 0
    assert Path("out.jsonl").read_text().startswith("index,id,class,")


@pytest.mark.parametrize(
    ("words", "said"),
    [(["--out", "a.txt"], "a.txt"), (["--format", "parquet"], "--out FILE"), (["--batch-size", "0"], "at least 1")],
)
def test_predict_refuses_impossible_arguments(words, said, capsys):
    with pytest.raises(SystemExit) as caught:
        main(["predict", "run", "data", *words])
    assert caught.value.code == 2
    assert said in capsys.readouterr().err


def test_parquet_knows_the_type_of_lists_that_are_empty():
    names = [[], [], [], [], ["ä"], [], ["b", "c"]]
    batches = [{"index": [place], "classes": [row]} for place, row in enumerate(names)]
    rows = [{"index": place, "classes": row} for place, row in enumerate(names)]
    assert predictions.write_file(iter(batches), Path("late.parquet"), "parquet") == 7
    assert parquet.read_table("late.parquet").to_pylist() == rows
    predictions.write_file(iter(batches[:4]), Path("never.parquet"), "parquet")
    assert parquet.read_table("never.parquet").to_pylist() == rows[:4]


def test_rows_of_other_tasks():
    """Text for tokens, the names of true classes, one class per token without padding, and unchanged values."""

    class Words:
        def decode(self, ids, skip_special_tokens):
            return " ".join(f"w{i}" for i in ids if i > 0 or not skip_special_tokens)

    class Task:
        class_names = ("x", "y", "z")
        text_tokenizer = Words()

    def row(**prediction):
        batch = {name: value[None] for name, value in prediction.items()}
        return predictions.rows_of(next(predictions.named_columns(Task(), [batch])))[0]

    assert row(generated=torch.tensor([3, 4, 0])) == {"index": 0, "id": 0, "text": "w3 w4"}
    assert row(prediction=torch.tensor([True, False, True]))["classes"] == ["x", "z"]
    assert row(prediction=torch.tensor([2, -100, 0]))["classes"] == ["z", "x"]
    assert row(value=torch.tensor(0.5, dtype=torch.bfloat16)) == {"index": 0, "id": 0, "value": 0.5}


def test_the_formats_match_the_exporter():
    assert {name: form[1] for name, form in _FORMATS.items()} == EXPORT_FORMATS
    assert [format_of(Path(f"m{suffix}")) for suffix in (".pt", ".onnx", ".pt2")] == ["pytorch", "onnx", "torch.export"]


def test_export_writes_the_same_file_as_the_trainer(pets, capsys):
    assert main(["export", pets.run, "weights"]) == 0
    assert "was exported as pytorch to weights.pt" in capsys.readouterr().out
    own, theirs = torch.load("weights.pt"), run_of(pets.trainer).unsharded_model().state_dict()
    assert own.keys() == theirs.keys()
    assert all(torch.equal(own[name], theirs[name]) for name in own)
    words = ["--format", "torchscript", "--input-shape", "3,32,32"]
    assert answer(capsys, "export", pets.run, "net", *words)["format"] == "torchscript"
    images = torch.randn(3, 3, 32, 32)
    program = torch.jit.load("net.pt")
    with torch.no_grad():
        assert torch.allclose(program(images), run_of(pets.trainer).unsharded_model().eval()(images), atol=1e-5)
    assert main(["export", pets.run, "weights"]) == 1
    assert "weights.pt" in capsys.readouterr().err


# -- going on ----------------------------------------------------------------------------------------------


@pytest.fixture
def copy(pets):
    """A copy of the run, to be changed."""
    return Path(shutil.copytree(pets.run, "runs/copy"))


def set_status(run, **changes):
    file = run / "status.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | changes))


def test_resume_ends_with_the_weights_of_an_uninterrupted_run(pets, copy, capsys):
    shutil.rmtree(copy / "checkpoints" / "step_00000006")
    set_status(copy, status="interrupted")
    assert main(["resume", "copy"]) == 0
    assert compare(copy, pets.run, ["model", "optimizer"]).equal
    assert json.loads((copy / "status.json").read_text())["status"] == "finished"
    assert capsys.readouterr().err == ""


class Stop:
    """Ends the run after four steps."""

    def on_step_end(self, trainer, step, loss):
        if step == 4:
            trainer.stop("enough")


def test_resume_continues_a_stopped_run(pets):
    """Running the original command again leaves a stopped run alone; resume continues it."""
    by_hand(pets.root, "runs/stopped", callbacks=[Stop()]).fit()
    shutil.copy(f"{pets.run}/recipe.yaml", "runs/stopped")
    assert [each.step for each in list_checkpoints("runs/stopped")][-1] == 4
    assert main(["resume", "stopped"]) == 0
    assert compare("runs/stopped", pets.run, ["model"]).equal


def test_resume_of_a_finished_run_says_how_to_train_longer(pets, copy, capsys):
    before = files_of(copy)
    assert main(["resume", "copy"]) == 0
    assert "trainformer resume copy --epochs N" in capsys.readouterr().out
    assert files_of(copy) == before
    assert main(["resume", "copy", "--epochs", "4", "--set", "log_every=1"]) == 0
    assert list_checkpoints(copy)[-1].step == 8
    # What nobody has set is nobody's, also where going on speaks of it.
    asked = {"epochs": 4, "log_every": 1}
    assert load_config(copy / "recipe.yaml")["trainer"] == load_config(f"{pets.run}/recipe.yaml")["trainer"] | asked
    recorded = json.loads((copy / "config.json").read_text())
    assert {recorded[name]["source"] for name in ("max_steps", "resume", "load_components")} == {"default"}
    assert {recorded[name]["source"] for name in asked} == {"user"}
    # The same in Python: continue the trainer of the run for another epoch.
    longer = by_hand(pets.root, "longer", epochs=4, log_every=1)
    longer.load(list_checkpoints(pets.run)[-1].path).fit()
    assert compare(copy, "longer", ["model"]).equal


def test_changes_are_kept_for_the_next_resume(copy):
    assert main(["resume", "copy", "--max-steps", "8"]) == 0
    shutil.rmtree(copy / "checkpoints" / "step_00000008")
    set_status(copy, status="interrupted")
    assert main(["resume", "copy"]) == 0
    assert list_checkpoints(copy)[-1].step == 8
    assert main(["resume", "copy", "--epochs", "5"]) == 0  # the steps that were asked for before count no more
    assert list_checkpoints(copy)[-1].step == 10


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--set", "run_dir=elsewhere", "--epochs", "4"], "A run is resumed in its folder"),
        (["--set", "batch_sise=3", "--epochs", "4"], "Did you mean 'batch_size'"),
        (["--set", "lr", "--epochs", "4"], "--set batch_size=64"),
    ],
)
def test_resume_refuses(copy, words, said, capsys):
    before = files_of(copy)
    assert main(["resume", "copy", *words]) == 1
    assert said in " ".join(capsys.readouterr().err.split())
    assert files_of(copy) == before


def test_resume_refuses_a_running_job(copy, capsys):
    me = os.getpid()
    set_status(copy, status="running", process=me, identity=process_identity(me), time=time.time())
    assert main(["resume", "copy"]) == 1
    assert f"is running (process {me})" in " ".join(capsys.readouterr().err.split())


def test_missing_data(pets, copy, capsys, monkeypatch):
    recipe = copy / "recipe.yaml"
    usual = recipe.read_text()
    recipe.write_text(usual.replace(f"val_data: {pets.root}/val", "val_data: null"))
    assert main(["evaluate", "copy"]) == 1
    assert "Name some: --data DATA" in capsys.readouterr().err
    recipe.write_text(usual.replace(f"{pets.root}/val", "val"))
    assert main(["evaluate", "copy"]) == 1
    here = " ".join(capsys.readouterr().err.split())
    assert "Name other data: --data DATA" in here
    assert "started in" not in here
    recipe.write_text(usual.replace(f"{pets.root}/train", "train"))
    for words in (["evaluate", "copy"], ["predict", "copy", pets.test], ["export", "copy", "weights"]):
        assert main(words) == 0
    capsys.readouterr()
    Path("elsewhere").mkdir()
    monkeypatch.chdir("elsewhere")
    assert main(["resume", "../runs/copy", "--epochs=4"]) == 1
    said = " ".join(capsys.readouterr().err.split())
    assert "recipe.yaml" in said
    assert f"the folder it was started in; this is {Path.cwd()}." in said


def test_missing_or_incomplete_runs_and_checkpoints(copy, capsys):
    (copy / "recipe.yaml").unlink()
    assert main(["evaluate", "copy"]) == 1
    assert "Python program" in " ".join(capsys.readouterr().err.split())
    shutil.rmtree(copy / "checkpoints")
    assert main(["evaluate", "copy"]) == 1
    assert "no complete checkpoint" in " ".join(capsys.readouterr().err.split())
