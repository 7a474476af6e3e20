"""Evaluation, data order, retention, and resuming from folders: exactly or not at all."""

from __future__ import annotations

import json
import logging
import time
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from backend_toys import are_equal, on_host
from flax import nnx
from jax_toys import (
    Crash,
    CrashAt,
    MeanTrainer,
    Mlp,
    SeenSamples,
    StepsTrainer,
    arguments,
    mesh_on,
    mlp_trainer,
    samples,
)
from safetensors.numpy import load_file
from torch.utils.data import TensorDataset

from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.checkpointing import jax_files as state_files
from trainformer.core.errors import BadArgument, DataError
from trainformer.core.types import Loss
from trainformer.jax import TrainingArguments, TrainState

# -- evaluation ----------------------------------------------------------------------------------------------------


def mean_by_numpy(params, data):
    params = on_host(params)
    hidden = np.tanh(data["x"] @ params["inner"]["kernel"] + params["inner"]["bias"])
    logits = hidden @ params["outer"]["kernel"] + params["outer"]["bias"]
    shifted = logits - logits.max(-1, keepdims=True)
    logs = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return -logs[np.arange(len(logits)), data["y"]].mean()


@pytest.mark.parametrize("kind", [MeanTrainer, StepsTrainer])
@pytest.mark.parametrize(("size", "devices"), [(8, 4), (5, 1)])
def test_evaluation_does_not_depend_on_the_batch_size(kind, size, devices):
    """13 rows: the last batch is smaller, and does not divide over four devices."""
    data = samples(13, seed=1)
    mesh = mesh_on((1, -1, 1, 1), devices)
    trainer = mlp_trainer(kind, dataset_eval=data, eval_batch_size=size, mesh=mesh)
    assert trainer.eval()["eval_loss"] == pytest.approx(mean_by_numpy(trainer.model_state.params, data), rel=1e-5)


def test_several_evaluation_datasets():
    """Each has the metrics that it has alone; one of them chooses the best checkpoint."""
    sets = {"near": rows_of(samples(13, seed=1)), "far": samples(7, seed=2)}  # a list of samples, a dict of arrays
    options = {"eval_steps": 2, "save_steps": 2, "metric_for_best_model": "far_loss", "learning_rate": 0.1}
    trainer = mlp_trainer(dataset_eval=sets, evaluation_strategy="steps", **options)
    trainer.train()
    found = trainer.eval()
    for name, data in (("near", samples(13, seed=1)), ("far", samples(7, seed=2))):
        expected = mean_by_numpy(trainer.model_state.params, data)
        assert found[f"eval_{name}_loss"] == pytest.approx(expected, rel=1e-5)
    assert set(found) == {"eval_near_loss", "eval_far_loss"}
    seen = {r["step"]: r["val/far/loss"] for r in trainer.state.log_history if "val/far/loss" in r}
    assert list(seen) == [2, 4, 6, 8]
    assert trainer.state.best_step == min(seen, key=seen.get)
    assert set(trainer.best_metrics) == {"val/near/loss", "val/far/loss"}


def rows_of(data):
    return [{name: column[row] for name, column in data.items()} for row in range(len(data["x"]))]


def test_columns_are_one_dataset_and_other_names_are_refused():
    assert set(mlp_trainer(dataset_eval=samples(8)).eval()) == {"eval_loss"}
    with pytest.raises(BadArgument, match="'val/near/loss'"):
        mlp_trainer(
            dataset_eval={"near": rows_of(samples(8))}, metric_for_best_model="loss", save_steps=2, eval_steps=2
        )
    with pytest.raises(BadArgument, match="letters, digits"):
        mlp_trainer(dataset_eval={"a/b": rows_of(samples(8))})
    with pytest.raises(BadArgument, match="torch only"):
        mlp_trainer(scheduler={"scheduler": "cosine", "interval": "epoch"})
    with pytest.raises(BadArgument, match="one of constant, linear"):
        mlp_trainer(scheduler="ReduceLROnPlateau")


def test_another_state_can_be_evaluated():
    data = samples(13, seed=1)
    trainer = mlp_trainer(dataset_eval=data, eval_batch_size=8)
    other = TrainState.create(Mlp(nnx.Rngs(5)), trainer.tx)
    own = mean_by_numpy(trainer.model_state.params, data)
    given = mean_by_numpy(other.params, data)
    assert abs(own - given) > 1e-3
    assert trainer.eval(other)["eval_loss"] == pytest.approx(given, rel=1e-5)
    assert trainer.eval()["eval_loss"] == pytest.approx(own, rel=1e-5)
    with pytest.raises(BadArgument, match="no evaluation data"):
        mlp_trainer().eval()


class Measuring(MeanTrainer):
    def compute_metrics(self, model, batch, key):
        rows, right = len(batch["y"]), jnp.sum(model(batch["x"]).argmax(-1) == batch["y"])
        return Loss(self.compute_loss(model, batch, key) * rows, rows, {"accuracy": (right, rows)})

    def derive_metrics(self, metrics):
        return {"perplexity": float(np.exp(metrics["loss"]))}


def test_metrics_of_an_evaluation():
    data = samples(13, seed=1)
    trainer = mlp_trainer(Measuring, dataset_eval=data, eval_batch_size=8, evaluation_strategy="epoch")
    state = trainer.train()
    params = on_host(state.params)
    hidden = np.tanh(data["x"] @ params["inner"]["kernel"] + params["inner"]["bias"])
    right = (hidden @ params["outer"]["kernel"] + params["outer"]["bias"]).argmax(-1) == data["y"]
    found = trainer.eval(state)
    assert found["eval_accuracy"] == pytest.approx(right.mean(), abs=1e-6)
    assert found["eval_perplexity"] == pytest.approx(np.exp(mean_by_numpy(params, data)), rel=1e-5)
    assert trainer.state.log_history[-1]["val/accuracy"] == found["eval_accuracy"]


# -- data ----------------------------------------------------------------------------------------------------------


def test_every_epoch_has_its_own_order():
    seen = SeenSamples()
    mlp_trainer(callbacks=[seen], data=samples(27)).train()
    assert sorted(seen.of_epoch(0)) == sorted(seen.of_epoch(1)) == list(range(27))
    assert seen.of_epoch(0) != seen.of_epoch(1)
    assert seen.of_epoch(0) != list(range(27))


def test_resuming_inside_an_epoch_sees_each_sample_once():
    options = {"data": samples(27), "save_steps": 3, "gradient_accumulation_steps": 2}
    whole, first, second = SeenSamples(), SeenSamples(), SeenSamples()
    wanted = mlp_trainer(callbacks=[whole], output_dir="whole", **options).train()
    with pytest.raises(Crash):
        mlp_trainer(callbacks=[first, CrashAt(at=7)], **options).train()
    found = mlp_trainer(callbacks=[second, CrashAt(at=99)], **options).train()
    assert {**first.steps, **second.steps} == whole.steps
    assert min(second.steps) == 7
    assert are_equal((found.params, found.opt_state), (wanted.params, wanted.opt_state))


class EndsEpoch:
    """Cuts the first epoch short."""

    def on_step_end(self, trainer, step, loss):
        trainer.control.should_end_epoch |= step == 2


@pytest.mark.parametrize(("at", "kind"), [(3, MeanTrainer), (5, StepsTrainer)])
def test_a_stream_resumes_at_its_position(at, kind):
    """Also after an epoch that was cut short: the next one starts at the beginning."""
    grain = pytest.importorskip("grain")
    rows = [{name: column[i] for name, column in samples(27).items()} for i in range(27)]
    options = {"data": grain.MapDataset.source(rows).to_iter_dataset(), "save_steps": 2, "max_steps": 7}
    whole, first, second = SeenSamples(), SeenSamples(), SeenSamples()
    wanted = mlp_trainer(kind, callbacks=[whole, EndsEpoch()], output_dir="whole", **options).train()
    with pytest.raises(Crash):
        mlp_trainer(kind, callbacks=[first, EndsEpoch(), CrashAt(at)], **options).train()
    found = mlp_trainer(kind, callbacks=[second, EndsEpoch(), CrashAt(99)], **options).train()
    assert {**first.steps, **second.steps} == whole.steps
    assert min(second.steps) == at
    assert whole.of_epoch(1) == list(range(27))
    assert are_equal((found.params, found.opt_state), (wanted.params, wanted.opt_state))


# -- checkpoints ---------------------------------------------------------------------------------------------------


class Degrading(MeanTrainer):
    """Ruins the weights after the fourth step, so that no later step is better."""

    def on_step_end(self, state, metrics, step):
        return state.replace(params=jax.tree.map(lambda p: p * 50.0, state.params)) if step == 5 else None


def kept(folder):
    return sorted(path.name for path in (Path(folder) / "checkpoints").glob("step_*"))


def test_the_best_and_the_last_are_kept():
    options = {"dataset_eval": samples(16, seed=1), "save_steps": 2, "eval_steps": 2, "num_train_epochs": 3}
    trainer = mlp_trainer(Degrading, save_total_limit=2, metric_for_best_model="eval_loss", **options)
    trainer.train()
    assert kept("run") == ["step_00000004", "step_00000010", "step_00000012"]
    assert trainer.best_metrics["val/loss"] == min(r["val/loss"] for r in trainer.state.log_history if "val/loss" in r)
    mlp_trainer(Degrading, save_total_limit=2, output_dir="last", **options).train()
    assert kept("last") == ["step_00000010", "step_00000012"]


class LiveState:
    """A callback whose state dict is not a copy."""

    def __init__(self):
        self.steps = []

    def on_step_end(self, trainer, step, loss):
        self.steps.append(step)

    def state_dict(self):
        return {"steps": self.steps}

    def load_state_dict(self, state):
        self.steps = state["steps"]


def test_an_async_save_has_the_state_of_its_step(monkeypatch):
    """The file of step 2 is written after step 3, and contains the state of step 2."""
    callback, really = LiveState(), state_files.write_tree

    def write_late(folder, stem, tree):
        until = time.monotonic() + 120
        while stem == "callback.LiveState" and len(callback.steps) == 2 and time.monotonic() < until:
            time.sleep(0.001)
        return really(folder, stem, tree)

    monkeypatch.setattr(state_files, "write_tree", write_late)
    mlp_trainer(callbacks=[callback], save_steps=2, save_async=True, max_steps=4).train()
    written = json.loads(Path("run/checkpoints/step_00000002/callback.LiveState.json").read_text())
    assert written == {"steps": [1, 2]}
    assert callback.steps == [1, 2, 3, 4]


def test_a_run_resumes_from_save_pretrained(tmp_path):
    options = {"data": samples(27), "scheduler": "constant"}
    wanted = mlp_trainer(output_dir="whole", **options).train()
    half = mlp_trainer(output_dir="half", max_steps=5, **options)
    half.train()
    path = half.save_pretrained(tmp_path / "out" / "model")
    assert sorted(p.name for p in (tmp_path / "out").iterdir()) == ["model"]
    assert load_file(f"{path}/model.safetensors").keys() == {
        f"{a}/{b}" for a in ("inner", "outer") for b in ("bias", "kernel")
    }
    assert TrainingArguments.load(f"{path}/training_arguments.json") == half.arguments
    resumed = mlp_trainer(output_dir="resumed", **options)
    state = resumed.train(ckpt_path=path)
    assert int(state.step) == resumed.state.step == 8
    assert resumed.state.samples == 54
    assert are_equal((state.params, state.opt_state), (wanted.params, wanted.opt_state))
    half.save_pretrained(path)  # overwrites itself
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years")
    with pytest.raises(BadArgument, match="a new folder, or one that save_pretrained wrote"):
        half.save_pretrained(tmp_path / "mine")
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years"


def test_resuming_from_a_checkpoint_is_bitwise():
    options = {"data": samples(27), "scheduler": "constant"}
    wanted = mlp_trainer(output_dir="whole", save_steps=3, **options).train()
    state = mlp_trainer(output_dir="resumed", **options).train(ckpt_path="whole/checkpoints/step_00000003")
    assert are_equal((state.params, state.opt_state, state.step), (wanted.params, wanted.opt_state, wanted.step))


# -- checkpoints that cannot be resumed ----------------------------------------------------------------------------


def contents(folder):
    """The files of a folder except its log, which records the attempt."""
    files = (path for path in Path(folder).rglob("*") if path.is_file() and path.name != "log.txt")
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


@pytest.fixture
def old_run():
    mlp_trainer(save_steps=4, output_dir="old").train()
    assert kept("old") == ["step_00000004", "step_00000008"]
    return Path("old")


def damage(folder):
    for name in kept(folder):
        file = max(
            (folder / "checkpoints" / name / "state").rglob("*"), key=lambda p: p.stat().st_size if p.is_file() else -1
        )
        content = bytearray(file.read_bytes())
        content[len(content) // 2] ^= 1
        file.write_bytes(content)


def test_damaged_checkpoints_do_not_start_a_run_from_scratch(old_run):
    damage(old_run)
    before = contents(old_run)
    with pytest.raises(DataError, match="all of them are damaged"):
        mlp_trainer(output_dir="old", num_train_epochs=9).train()
    with pytest.raises(DataError):
        mlp_trainer(output_dir="new").train(ckpt_path=old_run / "checkpoints/step_00000008")
    with pytest.raises(DataError):
        mlp_trainer(output_dir="new2").train(ckpt_path=old_run)
    assert contents(old_run) == before
    assert not kept("new") + kept("new2")


def test_a_damaged_checkpoint_falls_back_to_the_previous_one(old_run, caplog):
    file = old_run / "checkpoints/step_00000008/run.json"
    file.write_text(file.read_text()[:-5])
    trainer = mlp_trainer(output_dir="old", num_train_epochs=3)
    with caplog.at_level(logging.INFO, "trainformer"):
        trainer.train()
    assert "resuming from old/checkpoints/step_00000004" in caplog.text
    assert trainer.state.step == 12


def test_another_model_is_refused(old_run):
    before = contents(old_run)
    other = nnx.Sequential(nnx.Linear(6, 16, rngs=nnx.Rngs(0)), nnx.Linear(16, 3, rngs=nnx.Rngs(0)))
    for resume in ("auto", "old"):
        with pytest.raises(DataError, match="does not fit this run"):
            mlp_trainer(output_dir="old", num_train_epochs=9, model=other, resume=resume).train()
    with pytest.raises(BadArgument, match="optimizer 'adamw' -> 'sgd'"):
        mlp_trainer(output_dir="old", num_train_epochs=9, optimizer="sgd").train()
    with pytest.raises(DataError, match="does not fit this run"):
        mlp_trainer(output_dir="old", num_train_epochs=9, optimizer="sgd", resume="old").train()
    assert contents(old_run) == before


def test_a_torch_checkpoint_is_refused():
    task, data = MeanTask(), TensorDataset(*classes())
    Trainer(task, data, run_dir="torch", epochs=1, batch_size=8, precision="fp32", log="none", device="cpu").fit()
    before = contents("torch")
    with pytest.raises(BadArgument, match="task_type 'MeanTask' -> 'MeanTrainer'"):
        mlp_trainer(output_dir="torch").train()
    with pytest.raises(DataError, match="not a checkpoint of a JAX run"):
        mlp_trainer(output_dir="new").train(ckpt_path="torch")
    assert contents("torch") == before


@pytest.mark.parametrize("path", ["nowhere", "empty", "file.txt"])
def test_paths_without_a_checkpoint_are_refused(path):
    Path("empty").mkdir()
    Path("file.txt").write_text("text")
    with pytest.raises((BadArgument, DataError), match=path):
        mlp_trainer(output_dir="new").train(ckpt_path=path)
    assert not kept("new")


def test_resume_none_starts_from_scratch_and_keeps_the_old_run(old_run):
    trainer = mlp_trainer(output_dir="old", resume=None, max_steps=2)
    trainer.train()
    assert trainer.state.step == 2
    assert kept(old_run / "previous/001") == ["step_00000004", "step_00000008"]
    assert json.loads((old_run / "status.json").read_text())["status"] == "finished"
    assert arguments().resume == "auto"
