"""Muon: the update, which parameters it applies to, and runs that use it by name."""

import math

import pytest
import torch
from torch import nn

from toys import MeanTask, classes, same, weights
from trainformer import Trainer
from trainformer.backends.torch.muon import Muon, hidden_matrices, split_for_muon
from trainformer.core.errors import BadArgument


class Net(nn.Module):
    """An embedding, hidden matrices of two shapes, stacked experts, a convolution, a norm and a head."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(11, 6)
        self.up, self.up2, self.down = nn.Linear(6, 10), nn.Linear(6, 10), nn.Linear(10, 6)
        self.experts = nn.Module()
        self.experts.num_experts = 3
        self.experts.gate = nn.Parameter(torch.randn(3, 4, 6))
        self.conv = nn.Conv1d(6, 6, 3)
        self.norm = nn.LayerNorm(6)
        self.head = nn.Linear(6, 11)


def by_hand(weight, gradient, buffer, lr, decay, momentum=0.95):
    """The update of one matrix, as in the papers."""
    buffer = momentum * buffer + (1 - momentum) * gradient
    x = (1 - momentum) * gradient + momentum * buffer
    rows, columns = x.shape
    x = x if rows <= columns else x.T
    x = x / torch.linalg.norm(x)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x - 4.7750 * a @ x + 2.0315 * a @ a @ x
    x = x if rows <= columns else x.T
    return weight * (1 - lr * decay) - lr * 0.2 * math.sqrt(max(rows, columns)) * x, buffer


def test_hidden_matrices_get_the_update_of_the_papers_and_everything_else_adamw():
    torch.manual_seed(0)
    net = Net().double()
    hidden = {name for name, p in net.named_parameters() if id(p) in hidden_matrices(net)}
    assert hidden == {"up.weight", "up2.weight", "down.weight", "experts.gate"}

    groups = split_for_muon([{"params": list(net.parameters()), "weight_decay": 0.1}], net)
    optimizer = Muon(groups, lr=0.01)
    others = {name: p.detach().clone().requires_grad_() for name, p in net.named_parameters() if name not in hidden}
    adamw = torch.optim.AdamW(others.values(), lr=0.01, weight_decay=0.1)
    wanted = {name: p.detach().clone() for name, p in net.named_parameters() if name in hidden}
    buffers = {name: torch.zeros_like(p) for name, p in wanted.items()}
    for _ in range(3):
        for name, p in net.named_parameters():
            p.grad = torch.randn_like(p)
            if name in others:
                others[name].grad = p.grad.clone()
            elif p.ndim == 3:
                done = [by_hand(*parts, 0.01, 0.1) for parts in zip(wanted[name], p.grad, buffers[name], strict=True)]
                wanted[name], buffers[name] = (torch.stack(part) for part in zip(*done, strict=True))
            else:
                wanted[name], buffers[name] = by_hand(wanted[name], p.grad, buffers[name], 0.01, 0.1)
        optimizer.step()
        adamw.step()
    for name, p in net.named_parameters():
        torch.testing.assert_close(p.detach(), wanted.get(name, others.get(name, p)).detach(), atol=1e-12, rtol=1e-10)


def test_it_is_close_to_the_muon_of_torch_which_iterates_in_bf16():
    torch.manual_seed(0)
    first = nn.Parameter(torch.randn(24, 16))
    second = nn.Parameter(first.detach().clone())
    ours = Muon([{"params": [first], "muon": True}], lr=0.02, weight_decay=0.1)
    theirs = torch.optim.Muon([second], lr=0.02, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    start = first.detach().clone()
    for _ in range(5):
        first.grad = torch.randn_like(first)
        second.grad = first.grad.clone()
        ours.step()
        theirs.step()
    moved = (first - start).norm()
    assert (first - second).norm() < 0.05 * moved


def test_a_step_with_found_inf_changes_nothing_and_needs_no_host():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    optimizer = Muon(split_for_muon([{"params": list(net.parameters())}], net), lr=0.1, fused=True)
    for p in net.parameters():
        p.grad = torch.randn_like(p)
    optimizer.step()
    before = [p.detach().clone() for p in net.parameters()]
    buffer = optimizer.state[net[0].weight]["momentum_buffer"].clone()
    for p in net.parameters():
        p.grad = torch.full_like(p, math.nan)
    optimizer.found_inf = torch.ones(())
    optimizer.step()
    assert all(torch.equal(p, b) for p, b in zip(net.parameters(), before, strict=True))
    assert torch.equal(optimizer.state[net[0].weight]["momentum_buffer"], buffer)


def test_by_name_a_run_learns_and_resumes_bitwise(tmp_path):
    def run(folder, steps, resume=None):
        torch.manual_seed(0)
        task = MeanTask()
        options = {"optimizer": {"name": "muon", "momentum": 0.9}, "scheduler": None, "lr": 1e-2, "log": "none"}
        trainer = Trainer(task, classes(32), max_steps=steps, batch_size=8, run_dir=folder, resume=resume, **options)
        trainer.fit()
        return task, trainer

    whole, trainer = run(tmp_path / "whole", 8)
    run(tmp_path / "parts", 4)
    parts, _ = run(tmp_path / "parts", 8, "auto")
    assert isinstance(trainer.active_optimizer, Muon)
    assert any(group["muon"] for group in trainer.active_optimizer.param_groups)
    assert same(weights(whole), weights(parts))


@pytest.mark.parametrize(
    ("options", "words"),
    [({"momentum": 1.5}, "momentum from 0"), ({"ns_steps": 0}, "ns_steps"), ({"beta": 1}, "options that muon takes")],
)
def test_mistakes_are_named(options, words):
    with pytest.raises(BadArgument, match=words):
        Trainer(MeanTask(), classes(8), optimizer={"name": "muon", **options}, max_steps=1, log="none")


def test_a_group_for_muon_takes_only_matrices():
    with pytest.raises(BadArgument, match="matrices in a group with muon=True"):
        Muon([{"params": [nn.Parameter(torch.zeros(3))], "muon": True}])
