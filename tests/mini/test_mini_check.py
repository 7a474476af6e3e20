"""`check()` of a mini trainer: what is wrong is found in seconds, and nothing is changed by looking."""

import pytest
import torch
from mini_toys import Classifier
from torch import nn

from toys import mlp, same
from trainformer.core.errors import BadArgument, CheckFailed


def parameters(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_a_run_that_was_checked_is_the_run_that_was_not():
    plain, checked = Classifier(grad_clip=1.0), Classifier(grad_clip=1.0)
    torch.manual_seed(0)
    plain.train()
    torch.manual_seed(0)
    report = checked.check()
    assert report.ok
    assert checked.step == 0
    checked.train()
    assert same(parameters(plain), parameters(checked))


def test_a_layer_that_is_never_used_is_named():
    model = mlp()
    model.add_module("extra", nn.Identity())
    model.extra.forgotten = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(CheckFailed, match=r"extra\.forgotten"):
        Classifier(model=model).check()


def test_a_step_of_ones_own_would_be_dead_and_is_refused():
    class Own(Classifier):
        def _run_step(self): ...

    with pytest.raises(BadArgument, match="_run_step"):
        Own()


def test_data_that_can_be_read_once_are_not_looked_at():
    batches = Classifier().build_data_loader()
    with pytest.raises(BadArgument, match="a generator"):
        Classifier(batches=iter(batches)).check()
