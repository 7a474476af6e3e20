"""The progress bar: on terminals only, and always closed."""

import io
import re
import time
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from toys import MeanTask, classes
from trainformer import Trainer, hf
from trainformer.callbacks import ProgressBar, progress
from trainformer.engine import LazyScalar


def run(terminal, task=None, **options):
    file = io.StringIO()
    bar = ProgressBar(Console(file=file, force_terminal=terminal, width=120))
    trainer = Trainer(
        task or MeanTask(), classes(), val_data=classes(16), batch_size=8, epochs=2, log="none", log_every=4,
        run_dir="run", callbacks=[bar], **options,
    )  # fmt: skip
    return trainer, bar, file


def test_it_shows_epoch_steps_and_values_on_a_terminal():
    trainer, bar, file = run(True)
    trainer.fit()
    text = file.getvalue()
    for part in ("epoch 2", "16/16", "loss", "lr", "samples/s", "evaluating"):
        assert part in text
    assert not bar.is_open


def test_it_prints_nothing_to_files():
    trainer, _, file = run(False)
    trainer.fit()
    trainer.evaluate()
    assert file.getvalue() == ""


def test_the_bar_of_a_separate_evaluation_disappears():
    trainer, bar, file = run(True)
    trainer.evaluate()
    assert "evaluating" in file.getvalue()
    assert not bar.is_open


@pytest.mark.parametrize("where", ["train_step", "eval_step"])
def test_the_bar_is_closed_after_an_error(where):
    task = MeanTask()

    def fail(batch):
        raise RuntimeError("broken")

    setattr(task, where, fail)
    trainer, bar, file = run(True, task)
    with pytest.raises(RuntimeError, match="broken"):
        trainer.fit()
    assert not bar.is_open
    assert file.getvalue().endswith("\x1b[?25h")  # the cursor is visible again


class Clock:
    """Replaces the clock of the bar: a step takes as long as the test says."""

    def __init__(self, monkeypatch):
        self.now = 100.0
        monkeypatch.setattr(progress.time, "perf_counter", lambda: self.now)


def shown(file):
    """The last line that was drawn for training, without colours."""
    drawn = [
        line for line in re.split(r"[\r\n]", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", file.getvalue())) if line.strip()
    ]
    return [line for line in drawn if "epoch" in line][-1]


def stepping(bar, clock, losses, seconds=0.5, lr=1e-3, width=4):
    """Steps of a run of 100 steps, each with the loss it is given; returns what a trainer looks like to the bar."""
    state = SimpleNamespace(step=0, samples=0, tokens=0)
    trainer = SimpleNamespace(state=state, total_steps=100, current_lr=lr)
    bar.on_train_begin(trainer)
    bar.on_epoch_begin(trainer, 0)
    for loss in losses:
        clock.now += seconds
        state.step, state.samples, state.tokens = state.step + 1, state.samples + 8, state.tokens + 8 * width
        bar.on_step_end(trainer, state.step, loss)
    return trainer


def arriving(value, after):
    """A loss on a device: it can be polled, arrives after some polls, and must not be read."""
    polls = [0]

    def poll():
        polls[0] += 1
        return value if polls[0] > after else None

    def read():
        raise AssertionError("the bar waited for the device")

    return LazyScalar(read, lambda: poll)


def test_it_shows_the_newest_loss_that_has_arrived_and_never_waits(monkeypatch):
    clock, (_, bar, file) = Clock(monkeypatch), run(True)
    stepping(bar, clock, [arriving(5.0, after=0), arriving(4.0, after=2), arriving(3.0, after=0)])
    bar._bar.refresh()
    assert "loss 5.0000" in shown(file)  # that of step 2 is on its way
    stepping(bar, clock, [arriving(5.0, after=0), arriving(4.0, after=1), arriving(3.0, after=0)])
    bar._bar.refresh()
    assert "loss 4.0000" in shown(file)
    bar.on_error(None, RuntimeError())


def test_throughput_is_recent_and_the_time_left_counts_evaluations(monkeypatch):
    clock, (_, bar, file) = Clock(monkeypatch), run(True)
    trainer = stepping(bar, clock, [1.0] * 40, seconds=0.5)
    for _ in range(40):  # twice as fast from now on
        clock.now += 0.25
        trainer.state.step, trainer.state.samples = trainer.state.step + 1, trainer.state.samples + 8
        trainer.state.tokens += 32
        bar.on_step_end(trainer, trainer.state.step, 1.0)
    clock.now += 79  # an evaluation: a second per step so far
    bar.on_validation_cleanup(trainer)
    clock.now += 0.25
    trainer.state.step += 1
    trainer.state.samples += 8
    trainer.state.tokens += 32
    bar.on_step_end(trainer, trainer.state.step, 1.0)
    bar._bar.refresh()
    line = shown(file)
    assert "81/100" in line
    assert "lr 1.0e-03" in line
    assert "128 tok/s" in line  # 32 tokens in 0.25 s
    assert "0:23 left" in line  # 19 steps of 0.25 s, and as much evaluation as before: 79 s in 80 steps
    bar.on_error(None, RuntimeError())


@pytest.mark.parametrize("width", [40, 60, 80, 120])
def test_one_line_fits_any_terminal(monkeypatch, width):
    file, clock = io.StringIO(), Clock(monkeypatch)
    bar = ProgressBar(Console(file=file, force_terminal=True, width=width))
    stepping(bar, clock, [arriving(0.5, after=0)] * 9)
    bar._bar.refresh()
    line = shown(file)
    assert len(line) <= width
    assert "9/100" in line
    assert "left" in line
    assert ("loss 0.5000" in line) == (width >= 60)
    assert "…" not in line
    bar.on_error(None, RuntimeError())


def test_the_loss_of_a_run_is_that_of_its_last_step():
    seen = []

    class Look:
        def on_step_end(self, trainer, step, loss):
            seen.append((loss.start_read()(), float(loss), float(trainer.current_loss), trainer.current_lr))

    trainer, _, _ = run(False)
    trainer.add_callback(Look())
    trainer.fit()
    assert len({loss for _, loss, _, _ in seen}) == 16
    assert all(polled == loss == last for polled, loss, last, _ in seen)
    assert len({lr for *_, lr in seen}) == 16


def test_the_bar_of_hf_shows_the_current_loss():
    file = io.StringIO()
    console = Console(file=file, force_terminal=True, width=120)
    args = hf.TrainingArguments(
        "run", max_steps=3, logging_steps=100, per_device_train_batch_size=4, save_strategy="no", report_to="none"
    )

    class Waits(hf.TrainerCallback):  # longer than the bar waits between two updates
        def on_step_begin(self, args, state, control, **kwargs):
            time.sleep(0.11)

    model = torch.nn.Linear(4, 1)
    trainer = hf.Trainer(
        model=model, args=args, train_dataset=[{"input": torch.ones(4)}] * 16,
        compute_loss_func=lambda outputs, labels, **kwargs: outputs.square().mean(),
        callbacks=[Waits(), hf.ProgressCallback(console=console)],
    )  # fmt: skip
    trainer.train()
    assert "loss" in shown(file)
    assert "samples/s" in shown(file)


def test_a_dumb_terminal_gets_lines_instead(monkeypatch):
    from trainformer.loggers import ConsoleLogger

    monkeypatch.setenv("TERM", "dumb")
    trainer, _, file = run(True)
    trainer.fit()
    assert "━" not in file.getvalue()
    lines = io.StringIO()
    logger = ConsoleLogger(Console(file=lines, force_terminal=True))
    logger.init({})
    logger.log({"train/loss": 0.5}, 10)
    assert "loss 0.5" in lines.getvalue()
