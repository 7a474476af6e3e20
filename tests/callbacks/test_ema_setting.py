"""The setting `ema=`, a shortcut for the EMA callback."""

import pytest
import torch

from toys import MeanTask, classes, mlp
from trainformer import Trainer
from trainformer.callbacks import EMA
from trainformer.core.errors import BadArgument


def run(**options):
    task = MeanTask(mlp(dtype=torch.float32))
    data = classes(dtype=torch.float32)
    return Trainer(task, data, val_data=data, epochs=2, batch_size=8, lr=1e-2, log="none", **options).fit()


def test_the_setting_equals_the_callback():
    by_setting, by_callback, without = run(ema=0.9), run(callbacks=[EMA(decay=0.9)]), run()
    assert by_setting.evaluate() == by_callback.evaluate()
    assert by_setting.evaluate() != without.evaluate()
    assert by_setting.evaluate_without_ema() == without.evaluate()


def test_an_explicit_callback_takes_precedence():
    trainer = run(ema=0.5, callbacks=[EMA(decay=0.9)])
    assert trainer.evaluate() == run(callbacks=[EMA(decay=0.9)]).evaluate()


def test_a_decay_of_one_is_rejected():
    with pytest.raises(BadArgument, match="ema to be a number from 0 and below 1"):
        run(ema=1.0)
