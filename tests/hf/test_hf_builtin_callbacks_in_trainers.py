"""The built-in callbacks in `hf.Trainer` and in the Trainer of transformers."""

import io
import json
import logging
from pathlib import Path

import pytest
import torch
import transformers
from rich.console import Console

from text_toys import chat_tokenizer, gpt2, sentences
from toys import same
from trainformer import hf
from trainformer.hf.callbacks import (
    DivergenceDetector,
    GradLogger,
    InfoCallback,
    JsonLogger,
    PeakMemory,
    ProgressCallback,
    TBLogger,
    TextgenCallback,
)


def run(module, *callbacks, resume=None, **options):
    """Six steps with a log record every 2 and an evaluation every 3."""
    tokenizer = chat_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    ids = [tokenizer(text)["input_ids"][:4] for text in sentences()]
    rows = [{"input_ids": row, "labels": row} for row in ids if len(row) == 4]
    torch.manual_seed(0)
    defaults = {
        "output_dir": "out", "per_device_train_batch_size": 4, "max_steps": 6, "logging_steps": 2, "use_cpu": True,
        "eval_strategy": "steps", "eval_steps": 3, "save_strategy": "no", "report_to": "none", "disable_tqdm": True,
    }  # fmt: skip
    trainer = module.Trainer(
        model=transformers.GPT2LMHeadModel(gpt2()),
        args=module.TrainingArguments(**{**defaults, **options}),
        train_dataset=rows,
        eval_dataset=rows[:4],
        processing_class=tokenizer,
        callbacks=list(callbacks) or None,
    )
    trainer.output = trainer.train(resume_from_checkpoint=resume)
    return trainer


def weights(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def records(path):
    return [json.loads(line) for line in Path(path).read_text().splitlines()]


# -- ours --------------------------------------------------------------------------------------------------


def test_gradient_norms_are_those_before_clipping():
    watcher = GradLogger(log_frequency=1, track_layers=["h.0"])
    run(hf, watcher, logging_steps=1, max_grad_norm=0.1, logging_dir="logs")
    logged = [r for r in records("logs/metrics.jsonl") if "train/loss" in r]
    assert len(logged) == 6
    for record in logged:
        assert record["grad_norm_total"] == pytest.approx(record["train/grad_norm"], rel=1e-5)
        assert record["grad_norm_total"] > 1
        assert 0.1 < record["grad_norm/h.0"] < record["grad_norm_total"]


def test_generated_texts_do_not_affect_training_and_reach_the_loggers():
    plain = run(hf, output_dir="plain")
    options = {"generation_config": {"temperature": 0.7}, "generation_steps": 3}
    watched = run(hf, TextgenCallback(["the quick"], **options), logging_dir="logs")
    assert same(weights(plain), weights(watched))
    texts = [r for r in records("logs/metrics.jsonl") if "text/generated/1" in r]
    assert [r["step"] for r in texts] == [3, 6]


def test_a_progress_callback_replaces_the_default_one_and_a_second_one_prints_nothing(capsys):
    file, other = io.StringIO(), io.StringIO()
    run(hf, ProgressCallback(console=Console(file=file)), ProgressCallback(output_stream=other), disable_tqdm=False)
    shown = [line.split()[0] for line in file.getvalue().splitlines() if "  loss " in line]
    assert (shown.count("step"), shown.count("val")) == (3, 2)
    assert other.getvalue() == ""
    assert "  loss " not in capsys.readouterr().out


def test_the_callback_that_ends_a_run_is_named():
    class Spoil(hf.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logs["loss"] = float("nan")

    trainer = run(hf, Spoil(), DivergenceDetector(), save_strategy="steps", save_steps=1)
    assert trainer.output.global_step == 2
    assert trainer.stopped_by == "DivergenceDetector"
    assert [path.name for path in Path("out").glob("checkpoint-*")] == [
        "checkpoint-1"
    ]  # aborted before the second save


def test_a_resumed_run_continues_its_file_in_another_logging_dir():
    class Cut(hf.TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 5:
                raise KeyboardInterrupt

    saving = {"save_strategy": "steps", "save_steps": 3, "logging_steps": 1}
    with pytest.raises(KeyboardInterrupt):
        run(hf, JsonLogger(), Cut(), **saving)
    (path,) = Path("out").rglob("trainer_logs.jsonl")
    assert records(path)[-1]["global_step"] == 4
    run(hf, JsonLogger(), resume=True, **saving)
    assert list(Path("out").rglob("trainer_logs.jsonl")) == [path]
    steps = [r["global_step"] for r in records(path) if "loss" in r["metrics"]]
    assert steps == [1, 2, 3, 4, 5, 6]


# -- transformers' -----------------------------------------------------------------------------------------


@pytest.mark.slow
def test_all_callbacks_together(caplog):
    file = io.StringIO()
    options = {"prompts": ["the quick"], "generation_config": {"temperature": 0.7}, "generation_steps": 3}
    with caplog.at_level(logging.INFO, logger="trainformer"):
        trainer = run(
            transformers,
            InfoCallback(), GradLogger(log_frequency=2, track_layers=["h.0"]), PeakMemory(), TBLogger("tb", name="x"),
            JsonLogger(name="x"), TextgenCallback("tb", **options), DivergenceDetector(),
            ProgressCallback(Console(file=file, force_terminal=True)),
        )  # fmt: skip
    found = records("out/trainer_logs.jsonl")
    losses = [(r["global_step"], r["metrics"]["loss"]) for r in found if "loss" in r["metrics"]]
    assert losses == [(r["step"], r["loss"]) for r in trainer.state.log_history if "loss" in r]
    evaluated = [r["metrics"]["eval_loss"] for r in found if r["event"] == "on_evaluate"]
    assert evaluated == [r["eval_loss"] for r in trainer.state.log_history if "eval_loss" in r]
    # transformers does not expose the norm before clipping; norms are those after clipping to 1.
    totals = [r["metrics"]["grad_norm_total"] for r in found if "grad_norm_total" in r["metrics"]]
    clipped = [min(1.0, r["grad_norm"]) for r in trainer.state.log_history if "grad_norm" in r]
    assert totals == pytest.approx(clipped, rel=1e-3)
    assert "GPT2LMHeadModel, 37,760 parameters" in caplog.text
    assert "step     6" in file.getvalue()


@pytest.mark.slow
def test_training_in_transformers_is_bitwise_the_same_with_textgen():
    plain = run(transformers)
    watched = run(
        transformers, TextgenCallback(["the quick"], generation_config={"temperature": 0.7}, generation_steps=1)
    )
    assert same(weights(plain), weights(watched))


@pytest.mark.slow
def test_a_control_that_cannot_abort_stops():
    class Spoil(transformers.TrainerCallback):
        def on_log(self, args, state, control, logs=None, **kwargs):
            logs["loss"] = float("nan")

    assert run(transformers, Spoil(), DivergenceDetector()).state.global_step == 2
