"""The progress bar: on terminals only, and always closed."""

import io

import pytest
from rich.console import Console

from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.callbacks import ProgressBar


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


def test_it_does_not_read_the_loss():
    class Unreadable:
        def __float__(self):
            raise AssertionError("the bar read the loss")

    _, bar, _ = run(True)
    assert bar.on_step_end(None, 1, Unreadable()) is None


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
