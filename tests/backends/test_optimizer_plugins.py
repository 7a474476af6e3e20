"""Optimizers from other packages, registered as entry points."""

import pytest
import torch

from plugins import installed
from toys import MeanTask
from trainformer.backends.torch.optimizers import make_optimizer
from trainformer.core.errors import BadArgument

SOURCE = """
import torch

class SignSGD(torch.optim.Optimizer):
    def __init__(self, params, lr=1e-3, weight_decay=0.0, power=1.0):
        super().__init__(params, dict(lr=lr, weight_decay=weight_decay, power=power))

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is not None:
                    p.mul_(1 - group["lr"] * group["weight_decay"]).sub_(p.grad.sign(), alpha=group["lr"])

def nothing(params, **options):
    return None
"""
POINTS = {"trainformer.optimizers": {"signsgd": "extension:SignSGD", "nothing": "extension:nothing"}}


@pytest.fixture(autouse=True)
def _extension(tmp_path):
    with installed(tmp_path, SOURCE, POINTS):
        yield


def test_a_registered_optimizer_gets_groups_and_options():
    task = MeanTask()
    optimizer = make_optimizer({"name": "signsgd", "power": 2.0}, task, lr=0.1, weight_decay=0.5)
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.5, 0.0]
    assert all(group["power"] == 2.0 and group["lr"] == 0.1 for group in optimizer.param_groups)
    bias = optimizer.param_groups[1]["params"][0]
    before = bias.detach().clone()
    bias.grad = torch.ones_like(bias)
    optimizer.step()
    torch.testing.assert_close(bias.detach(), before - 0.1)


def test_errors_name_registered_optimizers():
    with pytest.raises(BadArgument, match=r"Did you mean .*'signsgd'"):
        make_optimizer("signsdg", MeanTask(), 0.1, 0.0)
    with pytest.raises(BadArgument, match=r"options that signsgd takes, received 'pwer'. Did you mean 'power'"):
        make_optimizer({"name": "signsgd", "pwer": 2}, MeanTask(), 0.1, 0.0)
    with pytest.raises(BadArgument, match=r"'nothing' .* to make a torch Optimizer"):
        make_optimizer("nothing", MeanTask(), 0.1, 0.0)
