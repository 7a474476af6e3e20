"""Runs inside trials: they have separate folders, report automatically, are pruned, and resume."""

import math
from pathlib import Path

import pytest
from sweep_victims import QUIET, trials_of

import text_toys
import toys
from trainformer import Trainer
from trainformer.core.errors import BadArgument
from trainformer.live.runs import describe, read_status
from trainformer.loggers.jsonl import read_jsonl
from trainformer.sweep import PruneTrial, current_trial, grid, sweep


def train(lr, **options):
    x, y = toys.classes(48)
    settings = {"val_data": (x[:16], y[:16]), "epochs": 3, "batch_size": 16, "log": "none", "save_every": None}
    return Trainer(toys.MeanTask(toys.mlp()), (x, y), lr=lr, **(settings | options)).fit()


def evaluations(run, name="val/loss"):
    return [record[name] for record in read_jsonl(Path(run) / "metrics.jsonl") if name in record]


def test_runs_with_the_same_name_get_separate_folders_and_report():
    @sweep(lr=grid(1e-2, 1.004e-2))
    def experiment(lr):
        trainer = train(lr, name=f"sweep_lr{lr:.0e}")  # the same for both, as in the plan
        return -trainer.best_metrics["val/loss"]

    results = experiment.run(method="grid", **QUIET)
    folders = {row["number"]: row["run"] for row in results}
    assert folders == {n: f"sweeps/experiment/trials/000{n}/sweep_lr1e-02" for n in (0, 1)}
    assert not Path("runs").exists()
    for trial in trials_of("experiment"):
        losses = evaluations(trial.run)
        assert trial.intermediate == {n: -loss for n, loss in enumerate(losses, 1)}  # the sweep maximizes
        assert trial.metric == -min(losses)
        assert describe(trial.run).status == "finished"


def test_one_of_several_validation_sets_is_reported():
    """Evaluations of the other one are neither reported nor counted."""
    x, y = toys.classes(48)
    sets = {"often": (x[:9], y[:9]), "judge": (x[9:30], y[9:30])}

    @sweep(lr=grid(1e-2, 3e-2))
    def experiment(lr):
        options = {"monitor_metric": "val/judge/loss", "eval_every": {"often": "1steps"}, "name": "sets"}
        return -train(lr, val_data=sets, **options).best_metrics["val/judge/loss"]

    experiment.run(method="grid", **QUIET)
    for trial in trials_of("experiment"):
        losses = evaluations(trial.run, "val/judge/loss")
        assert len(losses) == 3
        assert len(evaluations(trial.run, "val/often/loss")) == 9
        assert trial.intermediate == {n: -loss for n, loss in enumerate(losses, 1)}
        assert trial.metric == -min(losses)


def test_a_pruned_run_stops_and_logs_why():
    @sweep(lr=grid(0.05, 0.04, 0.06, 0.05001, 0.04001, 1e-6))
    def experiment(lr):
        train(lr, monitor_metric="val/accuracy", monitor_mode="max", epochs=4)
        return current_trial().reports

    results = experiment.run(method="grid", pruner="median", direction="maximize", **QUIET)
    (pruned,) = [row for row in results if row["status"] == "pruned"]
    assert pruned["config"]["lr"] == 1e-6
    assert pruned["metric"] == evaluations(pruned["run"], "val/accuracy")[-1]  # not what the function returned
    assert len(evaluations(pruned["run"])) < 4
    assert read_status(Path(pruned["run"]))["status"] == "stopped"
    assert "by PruneTrial: val/accuracy" in (Path(pruned["run"]) / "log.txt").read_text()


def test_an_interrupted_trial_resumes_in_its_folder():
    interrupt = [True]

    class Interrupts:
        def on_step_end(self, trainer, step, loss):
            if step == 7 and interrupt and current_trial().number == 1:
                interrupt.clear()
                raise KeyboardInterrupt

    def make():
        @sweep(lr=grid(0.02, 0.05))
        def experiment(lr):
            trainer = train(lr, callbacks=[Interrupts()], save_every=1)  # without a name
            return -trainer.best_metrics["val/loss"]

        return experiment

    with pytest.raises(KeyboardInterrupt):
        make().run(method="grid", **QUIET)
    assert [t.status for t in trials_of("experiment")] == ["completed", "waiting"]
    results = make().run(method="grid", **QUIET)
    reference = make().run(method="grid", name="reference", **QUIET)
    assert [(r["number"], r["metric"]) for r in results] == [(r["number"], r["metric"]) for r in reference]
    folder = Path("sweeps/experiment/trials/0001")
    assert [path.name for path in folder.iterdir()] == ["MeanTask"]
    assert "resuming from" in (folder / "MeanTask/log.txt").read_text()
    (trial,) = [t for t in trials_of("experiment") if t.number == 1]
    assert (trial.attempt, trial.earlier, list(trial.intermediate)) == (1, [], [3])  # it was evaluated twice before


def test_several_runs_in_a_trial_and_explicit_folders(tmp_path):
    @sweep(seed=grid(0, 1))
    def experiment(seed):
        for _ in range(2):
            train(0.01, epochs=1)
        for place in ("runs/a", "out/b", tmp_path / "c", current_trial().folder / "d"):
            train(0.01, epochs=1, run_dir=place, save_dir=str(tmp_path / "saved"))
        return current_trial().reports

    results = experiment.run(method="grid", **QUIET)
    assert [row["metric"] for row in results] == [6, 6]
    found = {str(path.parent) for path in Path().glob("sweeps/*/trials/*/**/status.json")}
    inside = ["MeanTask", "MeanTask-2", "a", "out/b", str(tmp_path / "c")[1:], "d"]
    assert found == {f"sweeps/experiment/trials/{n:04d}/{place}" for n in (0, 1) for place in inside}
    assert not (tmp_path / "saved").exists()
    assert results[0]["run"].endswith("/d")


def test_prune_trial_does_nothing_outside_a_sweep():
    trainer = train(0.01, epochs=1, callbacks=[PruneTrial()], name="plain")
    assert trainer.run_folder == Path("runs/plain")
    with pytest.raises(BadArgument, match="'min' or 'max'"):
        PruneTrial(mode="least")


@pytest.mark.slow
def test_hf_and_jax_trainers_run_inside_the_trial(monkeypatch):
    hf_toys = pytest.importorskip("hf_toys")
    pytest.importorskip("flax")
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "jax_backend"))
    import jax_toys

    @sweep(kind=grid("hf", "jax"))
    def experiment(kind):
        if kind == "hf":
            more = {"eval_strategy": "epoch", "save_strategy": "epoch", "num_train_epochs": 2}
            hf_toys.make("out", evaluation=hf_toys.examples(16), **more).train()
        else:
            more = {"evaluation_steps": 4, "save_steps": 4}
            jax_toys.mlp_trainer(dataset_eval=jax_toys.samples(), **more).train()
        return current_trial().reports

    results = experiment.run(method="grid", **QUIET)
    assert [row["status"] for row in results] == ["completed"] * 2, results
    assert [row["metric"] for row in results] == [2.0] * 2
    assert not Path("out").exists()
    for row in results:
        assert list(Path(row["run"]).glob("*/*/manifest.json")), f"no checkpoint in {row['run']}"


PLAN = """
from trainformer import Trainer
from trainformer.tasks import CausalLM
from trainformer.adapters import LoRA
from trainformer.sweep import sweep, choice, log_uniform

@sweep(
    lr=log_uniform(1e-5, 1e-3),
    r=choice(4, 8, 16, 32),
    alpha=choice(16, 32),
)
def experiment(lr: float, r: int, alpha: int) -> float:
    trainer = Trainer(
        task=CausalLM("gpt2", adapter=LoRA(r=r, alpha=alpha)),
        data="data/text",
        epochs=3,
        lr=lr,
        name=f"sweep_r{r}_lr{lr:.0e}",
    )
    trainer.fit()
    return -trainer.best_metrics.get("val/loss", float("inf"))

# Run sweep
results = experiment.run(method="bayes", n_trials=3)
print(f"Best config: {results[0]}")
"""


@pytest.mark.slow
def test_the_example_of_the_plan(capsys):
    from transformers import AutoModelForCausalLM

    AutoModelForCausalLM.from_config(text_toys.gpt2()).save_pretrained("gpt2")
    text_toys.chat_tokenizer().save_pretrained("gpt2")
    Path("data/text").mkdir(parents=True)
    for number, text in enumerate(text_toys.sentences()):
        Path(f"data/text/{number}.txt").write_text(text)

    exec(compile(PLAN.replace("n_trials=3", "n_trials=1"), "plan", "exec"), {})
    captured = capsys.readouterr()
    assert "'metric': -inf" in captured.out  # it has no validation data
    assert "all metrics are -inf" in captured.err

    program = PLAN.replace("epochs=3,", "epochs=3, val_split=0.25, max_steps=4,").replace("experiment", "tuned")
    space = {}
    exec(compile(program, "plan", "exec"), space)
    results = space["results"]
    assert [row["status"] for row in results] == ["completed"] * 3
    assert all(math.isfinite(row["metric"]) for row in results)
    for row in results:
        assert row["metric"] == -min(evaluations(row["run"]))
        assert Path(row["run"]).parent == Path(f"sweeps/tuned/trials/{row['number']:04d}")
    assert "Best config: {'config': {'lr':" in capsys.readouterr().out
