"""What a person sees, on a terminal and in a log file."""

from __future__ import annotations

import io

import pytest
from rich.console import Console
from rich.progress import Progress

from trainformer.loggers import ConsoleLogger
from trainformer.loggers.console import format_number

TRAIN = {
    "train/epoch": 1.5,
    "train/loss": 0.231172,
    "train/lr": 9.8e-4,
    "train/grad_norm": 0.8123,
    "train/samples_per_sec": 1234.4,
}


def render(*, terminal: bool, train_lines: bool | None = None, width: int = 80) -> tuple[ConsoleLogger, io.StringIO]:
    stream = io.StringIO()
    console = Console(file=stream, force_terminal=terminal, color_system="standard" if terminal else None, width=width)
    logger = ConsoleLogger(console, train_lines=train_lines)
    logger.init({})
    return logger, stream


def test_plain_line() -> None:
    logger, stream = render(terminal=False)
    logger.log(TRAIN, step=300)
    expected = "step   300  epoch 1.50  loss 0.2312  lr 9.8e-04  grad_norm 0.81  1,234 samples/s\n"
    assert stream.getvalue() == expected


def test_epoch_first_and_speed_last_whatever_the_order() -> None:
    logger, stream = render(terminal=False)
    logger.log(dict(reversed(TRAIN.items())), step=300)
    line = stream.getvalue()
    assert line.startswith("step   300  epoch 1.50  grad_norm")
    assert line.endswith("1,234 samples/s\n")


def test_columns_stay_aligned() -> None:
    logger, stream = render(terminal=False)
    for step, loss in ((1, 12.5), (20, 1234.5), (300, 0.5), (4000, float("nan"))):
        logger.log({"train/loss": loss, "train/lr": 1e-3}, step)
    lines = stream.getvalue().splitlines()
    assert lines[1:] == [
        "step    20  loss 1,234.5  lr 1.0e-03",
        "step   300  loss  0.5000  lr 1.0e-03",
        "step  4000  loss     nan  lr 1.0e-03",
    ]


def test_a_log_file_has_no_control_codes_and_no_wrapped_lines() -> None:
    logger, stream = render(terminal=False, width=20)
    logger.log({f"val/metric_{i}": 0.5 for i in range(30)}, step=1)
    text = stream.getvalue()
    assert text.count("\n") == 1
    assert "\x1b" not in text
    assert "metric_29 0.5000" in text


def test_no_control_codes_off_a_terminal_even_if_the_console_has_colours() -> None:
    stream = io.StringIO()
    logger = ConsoleLogger(Console(file=stream, force_terminal=False, color_system="truecolor"))
    logger.init({})
    logger.log({"val/loss": 0.5}, step=1)
    assert stream.getvalue() == "val      1  loss 0.5000\n"


def test_validation_lines_stand_out_on_a_terminal() -> None:
    logger, stream = render(terminal=True)
    logger.log({"val/loss": 0.21, "val/accuracy": 0.934}, step=300)
    text = stream.getvalue()
    assert "\x1b[1;32mval    300  loss 0.2100  accuracy 0.9340\x1b[0m" in text


def test_train_and_validation_in_one_record_are_two_lines() -> None:
    logger, stream = render(terminal=False)
    logger.log({"train/loss": 0.5, "val/loss": 0.6, "test/loss": 0.7, "gpu/memory": 12}, step=2)
    assert stream.getvalue().splitlines() == [
        "step     2  loss 0.5000  gpu/memory 12",
        "val      2  loss 0.6000",
        "test     2  loss 0.7000",
    ]


@pytest.mark.parametrize(
    ("terminal", "train_lines", "shown"),
    [(True, None, False), (False, None, True), (True, True, True), (False, False, False)],
)
def test_train_lines(terminal: bool, train_lines: bool | None, shown: bool) -> None:
    logger, stream = render(terminal=terminal, train_lines=train_lines)
    logger.log({"train/loss": 0.5}, step=1)
    logger.log({"val/loss": 0.6}, step=1)
    assert ("loss 0.5000" in stream.getvalue()) is shown
    assert "loss 0.6000" in stream.getvalue()


def test_lines_go_above_a_live_bar() -> None:
    logger, stream = render(terminal=True)
    assert logger.console is not None
    with Progress(console=logger.console, auto_refresh=False) as bar:
        bar.add_task("training", total=10)
        bar.refresh()
        before = len(stream.getvalue())
        logger.log({"val/loss": 0.5}, step=3)
        printed = stream.getvalue()[before:]
    assert printed.index("\x1b[2K") < printed.index("val      3") < printed.index("training")


def test_text_is_printed_as_it_is() -> None:
    logger, stream = render(terminal=False)
    logger.log_text("sample", "[bold]not markup[/bold]\nsecond line", step=5)
    assert stream.getvalue() == "text     5  sample\n    [bold]not markup[/bold]\n    second line\n"


def test_without_a_console_the_global_one_is_used(capsys: pytest.CaptureFixture[str]) -> None:
    logger = ConsoleLogger(train_lines=True)
    logger.init({})
    logger.log({"train/loss": 0.5}, step=1)
    assert capsys.readouterr().out == "step     1  loss 0.5000\n"


@pytest.mark.parametrize(
    ("name", "value", "text"),
    [
        ("loss", 0.0, "0.0000"),
        ("loss", -1.25, "-1.2500"),
        ("loss", 2.5e7, "2.50e+07"),
        ("loss", float("-inf"), "-inf"),
        ("lr/group_1", 3e-4, "3.0e-04"),
        ("lr_head", 3e-4, "3.0e-04"),
        ("learning_rate", 0.0, "0.0e+00"),
        ("lrp_score", 0.5, "0.5000"),
        ("grad_norm", 1e-5, "1.00e-05"),
        ("tokens", 1234567, "1,234,567"),
        ("steps_per_second", 2.345, "2.35"),
        ("samples_per_s", float("nan"), "nan"),
    ],
)
def test_format_number(name: str, value: float, text: str) -> None:
    assert format_number(name, value) == text
