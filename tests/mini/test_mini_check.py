"""`check()` of a mini trainer finds problems and changes nothing."""

import pytest
import torch
from mini_toys import Classifier
from torch import nn

from toys import mlp, same
from trainformer.core.errors import BadArgument, CheckFailed


def parameters(trainer):
    return {name: p.detach().clone() for name, p in trainer.model.named_parameters()}


def test_check_does_not_change_the_run():
    plain, checked = Classifier(grad_clip=1.0), Classifier(grad_clip=1.0)
    torch.manual_seed(0)
    plain.train()
    torch.manual_seed(0)
    report = checked.check()
    assert report.ok
    assert checked.step == 0
    checked.train()
    assert same(parameters(plain), parameters(checked))


def test_an_unused_layer_is_named():
    model = mlp()
    model.add_module("extra", nn.Identity())
    model.extra.forgotten = nn.Parameter(torch.zeros(3, dtype=torch.float64))
    with pytest.raises(CheckFailed, match=r"extra\.forgotten"):
        Classifier(model=model).check()


@pytest.mark.parametrize("name", ["_run_step", "_before_step", "_after_train"])
def test_overriding_methods_of_the_loop_is_refused(name):
    with pytest.raises(BadArgument, match=f"overrides {name}, which the training loop of this library does not call"):
        type("Mine", (Classifier,), {name: lambda self: None})(2)


def test_a_generator_is_not_consumed():
    batches = Classifier().build_data_loader()
    with pytest.raises(BadArgument, match="a generator"):
        Classifier(batches=iter(batches)).check()
