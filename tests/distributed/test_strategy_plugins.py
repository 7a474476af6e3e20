"""Strategies from other packages, registered as entry points."""

import pytest

from plugins import installed
from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.core.errors import BadArgument
from trainformer.distributed import make_strategy, strategy_names
from trainformer.run import run_of

SOURCE = """
from trainformer.distributed import Strategy

class Counting(Strategy):
    name = "counting"

    def __init__(self, *, start: int = 0):
        super().__init__()
        self.backward_passes = start

    def backward(self, loss, scaler):
        super().backward(loss, scaler)
        self.backward_passes += 1

def no_strategy():
    return None
"""
POINTS = {"trainformer.strategies": {"counting": "extension:Counting", "wrong": "extension:no_strategy"}}


@pytest.fixture
def _extension(tmp_path):
    with installed(tmp_path, SOURCE, POINTS):
        yield


@pytest.mark.usefixtures("_extension")
def test_a_registered_strategy_trains(tmp_path):
    strategy = {"name": "counting", "start": 10}
    trainer = Trainer(
        MeanTask(), classes(16), max_steps=3, batch_size=4, strategy=strategy, run_dir=tmp_path / "run"
    ).fit()
    assert run_of(trainer).backend.strategy.backward_passes == 13
    assert "counting" in strategy_names()


@pytest.mark.usefixtures("_extension")
def test_errors_name_registered_strategies():
    with pytest.raises(BadArgument, match=r"'counting'.*Did you mean 'counting'"):
        make_strategy("countin")
    with pytest.raises(BadArgument, match=r"received 'strat'. Did you mean 'start'"):
        make_strategy({"name": "counting", "strat": 1})
    with pytest.raises(BadArgument, match=r"'wrong' .* a subclass of trainformer\.distributed\.Strategy"):
        make_strategy("wrong")


def test_nothing_is_registered_without_the_package():
    assert "counting" not in strategy_names()
