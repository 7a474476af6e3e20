"""Master weights: fp32 updates of 16-bit weights, and their state."""

import copy

import pytest
import torch
from optimizer_toys import BF16, FP32, STEPS, Upcast, Watch, batches, bytes_of, equal, make, net
from timm.optim import Lion
from torch import nn

from toys import classes, same, weights
from trainformer import Trainer
from trainformer.backends.torch import master_weights
from trainformer.backends.torch.gradients import total_norm
from trainformer.backends.torch.master_weights import MasterWeights
from trainformer.callbacks import EMA
from trainformer.core.errors import BadArgument
from trainformer.run import run_of


def groups_of(parameters, decay=0.1):
    matrices, rest = [p for p in parameters if p.ndim > 1], [p for p in parameters if p.ndim < 2]
    return [{"params": matrices, "weight_decay": decay}, {"params": rest, "weight_decay": 0.0}]


def by_hand(task, optimizer_of, scheduler_of, clip=1.0):
    """Training in fp32 whose forward pass sees the weights rounded to what the model keeps; the fp32 weights."""
    parameters = list(task.model.parameters())
    full = [p.detach().float().clone().requires_grad_() for p in parameters]
    optimizer = optimizer_of(groups_of(full))
    scheduler = scheduler_of(optimizer)
    for batch in batches():
        for p, w in zip(parameters, full, strict=True):
            p.data = w.detach().to(p.dtype)
            p.grad = None
        task.train_step(batch).backward()
        norm = torch.stack([p.grad.float().norm() for p in parameters]).norm()
        for p in parameters:
            p.grad.mul_((clip / (norm + 1e-6)).clamp(max=1.0))
        for p, w in zip(parameters, full, strict=True):
            w.grad = p.grad.float()
        optimizer.step()
        scheduler.step()
    return full


@pytest.mark.parametrize("pieces", ["whole", "one by one"])
@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FP32), (torch.float16, BF16)])
@pytest.mark.parametrize(
    ("name", "reference"),
    [
        ("adamw", lambda groups: torch.optim.AdamW(groups, lr=3e-3, fused=True)),
        ("adam", lambda groups: torch.optim.Adam(groups, lr=3e-3, fused=True)),
        ("sgd", lambda groups: torch.optim.SGD(groups, lr=3e-3, momentum=0.9, fused=True)),
        ("adafactor", lambda groups: torch.optim.Adafactor(groups, lr=3e-3)),
        ("radam", lambda groups: torch.optim.RAdam(groups, lr=3e-3)),
        ("lion", lambda groups: Lion(groups, lr=3e-3)),
    ],
)
def test_master_weights_are_training_in_fp32_with_rounded_weights(name, reference, dtypes, pieces, monkeypatch):
    if pieces == "one by one":
        monkeypatch.setattr(master_weights, "MAX_CHUNK", 1)
    hand = Upcast(net(*dtypes))
    full = by_hand(
        hand, reference, lambda o: torch.optim.lr_scheduler.OneCycleLR(
            o, 3e-3, total_steps=STEPS, pct_start=0.1, cycle_momentum=False)
    )  # fmt: skip
    task = Upcast(net(*dtypes))
    trainer = make(task, optimizer=name, warmup_ratio=0.1)
    trainer.fit()
    optimizer = trainer.active_optimizer
    assert [p.dtype for p in task.model.parameters()] == [dtypes[0]] * 2 + [dtypes[1]] * 2
    for p, w in zip(task.model.parameters(), full, strict=True):
        assert torch.equal(p, w.to(p.dtype))
        assert torch.equal(optimizer.state[p].get("master", p), w)
    assert {id(p) for group in optimizer.param_groups for p in group["params"]} == {
        id(p) for p in task.model.parameters()
    }
    # Moments are in fp32; rates and decays are where everybody looks for them.
    assert all(v.dtype == FP32 for s in optimizer.state.values() for v in s.values() if isinstance(v, torch.Tensor))
    assert [group["weight_decay"] for group in optimizer.param_groups] == [0.1, 0.0]


def test_without_master_weights_small_updates_are_lost():
    ends = {}
    for masters in (True, False):
        model = nn.Linear(32, 3, dtype=BF16)
        nn.init.constant_(model.weight, 1.0)
        task = Upcast(nn.Sequential(model))
        trainer = make(task, optimizer={"name": "adamw", "master_weights": masters}, lr=1e-4, scheduler=None,
                       weight_decay=0.0)  # fmt: skip
        for _ in range(3):
            trainer.max_steps = trainer.state.step + STEPS
            trainer.fit()
        assert isinstance(trainer.active_optimizer, MasterWeights) == masters
        ends[masters] = task.model[0].weight.detach().float()
        if masters:
            moved = (trainer.active_optimizer.state[task.model[0].weight]["master"] - 1.0).abs()
            assert moved.mean() > 5e-4
    assert torch.equal(ends[False], torch.ones(3, 32))
    assert not torch.equal(ends[True], torch.ones(3, 32))


def test_only_named_optimizers_of_16bit_parameters_get_master_weights():
    assert type(make(Upcast(net())).active_optimizer) is torch.optim.AdamW
    assert type(make(Upcast(net(BF16, BF16)), optimizer=torch.optim.AdamW).active_optimizer) is torch.optim.AdamW
    plain = {"name": "adamw", "master_weights": False}
    assert type(make(Upcast(net(BF16, BF16)), optimizer=plain).active_optimizer) is torch.optim.AdamW
    full = make(Upcast(net(BF16, FP32))).active_optimizer
    assert isinstance(full, MasterWeights)
    assert full._step_supports_amp_scaling  # a bad step is skipped on the device, without asking there
    assert (
        isinstance(make(Upcast(net(torch.float16, FP32)), optimizer="lamb").active_optimizer.inner, nn.Module) is False
    )


def step(optimizer, gradient=1.0):
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = torch.full_like(p, gradient)
    optimizer.step()


def sgd_on(*values, dtype=BF16, **options):
    parameters = [nn.Parameter(torch.full((2, 2), value, dtype=dtype)) for value in values]
    make = lambda groups: torch.optim.SGD(groups, lr=0.001, **options)  # noqa: E731
    return parameters, MasterWeights([{"params": parameters}], make, elementwise=True)


def test_copies_follow_loaded_weights_and_keep_the_low_bits_of_the_rest():
    (p, _), optimizer = sgd_on(1.0, 1.0)
    step(optimizer)
    assert torch.equal(p, torch.ones(2, 2))  # 0.999 rounds to 1
    with torch.no_grad():
        p[0, 0] = 3.0
    step(optimizer)
    copy = optimizer.state_dict()["master_weights"]
    assert copy[0][0, 0].item() == pytest.approx(2.999, abs=1e-6)
    assert copy[0][1, 1].item() == pytest.approx(0.998, abs=1e-6)
    assert torch.equal(p[0, 0], torch.tensor(2.999).to(BF16))
    assert copy[1].unique().item() == pytest.approx(0.998, abs=1e-6)


def test_a_parameter_without_gradient_stays_and_gradients_are_left_as_they_were(monkeypatch):
    monkeypatch.setattr(master_weights, "MAX_CHUNK", 1)
    (p, q), optimizer = sgd_on(1.0, 1.0)
    r = nn.Parameter(torch.ones(2))
    make_sgd = lambda groups: torch.optim.SGD(groups, lr=0.5)  # noqa: E731
    optimizer = MasterWeights([{"params": [p, q, r]}], make_sgd, elementwise=True)
    p.grad, r.grad = torch.ones_like(p), torch.ones_like(r)
    before = p.grad, r.grad
    optimizer.step()
    assert (p.grad, r.grad) == before
    assert q.grad is None
    assert p.unique().item() == r.unique().item() == 0.5  # once, not once per piece
    assert q.unique().item() == 1.0


def test_settings_of_the_groups_are_those_of_the_step():
    (p,), optimizer = sgd_on(1.0)
    optimizer.param_groups[0]["lr"] = 0.25
    step(optimizer)
    assert p.unique().item() == 0.75
    assert optimizer.state_dict()["param_groups"][0]["lr"] == 0.25
    with pytest.raises(NotImplementedError, match="no further groups"):
        optimizer.add_param_group({"params": [nn.Parameter(torch.ones(1))]})


def test_states_with_and_without_copies_fit_each_other():
    def groups():
        return [{"params": [nn.Parameter(torch.ones(2, 2, dtype=BF16))]}]

    def adamw(groups):
        return torch.optim.AdamW(groups, lr=0.1)

    plain, full = adamw(groups()), MasterWeights(groups(), adamw)
    step(plain)
    step(full)
    saved_plain, saved_full = copy.deepcopy(plain.state_dict()), copy.deepcopy(full.state_dict())
    from_plain, from_full = MasterWeights(groups(), adamw), adamw(groups())
    from_plain.load_state_dict(saved_plain)
    from_full.load_state_dict(saved_full)
    (p,) = from_plain.param_groups[0]["params"]
    assert from_plain.state[p]["exp_avg"].dtype == FP32
    assert torch.equal(from_plain.state[p]["master"], torch.ones(2, 2))  # the parameters', for there were none
    (p,) = from_full.param_groups[0]["params"]
    assert from_full.state[p]["exp_avg"].dtype == BF16
    assert from_full.state[p]["step"].item() == 1


def test_copies_that_do_not_belong_to_the_parameters_do_not_replace_them():
    _, optimizer = sgd_on(1.0)
    (q,), other = sgd_on(5.0)
    step(optimizer)
    step(other)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(other, 0.0)
    assert q.unique().item() == 5.0


def test_loading_only_weights_starts_from_them():
    first = make(Upcast(net(BF16, BF16)), run_dir="first")
    first.fit()
    task = Upcast(net(BF16, BF16))
    trainer = make(task, run_dir="second", resume="first", load_components=["model"], max_steps=1, lr=1e-9,
                   scheduler=None)  # fmt: skip
    trainer.fit()
    assert same(weights(first.task), weights(task))


def test_the_average_of_weights_is_that_of_the_rounded_ones():
    average, seen = EMA(0.5, warmup=False), []

    class Look:
        def on_step_end(self, trainer, step, loss):
            seen.append(trainer.task.model[0].weight.detach().float())

    task = Upcast(net(BF16, BF16))
    expected = task.model[0].weight.detach().float()
    make(task, callbacks=[average, Look()]).fit()
    for weight in seen:
        expected = torch.lerp(expected, weight, 0.5)
    assert torch.equal(average.model[0].weight, expected)


@pytest.mark.parametrize("dtypes", [(BF16, BF16), (BF16, FP32)])
def test_a_loss_scale_works_with_copies(dtypes):
    class Overflows(Upcast):
        calls = 0

        def train_step(self, batch):
            self.calls += 1
            loss = super().train_step(batch)
            return loss * (1e35 if self.calls == 6 else 1.0)  # times the scale that is beyond fp32

    watch, task = Watch(), Overflows(net(*dtypes))
    trainer = make(task, precision="fp16", callbacks=[watch], scheduler=None)
    trainer.fit()
    assert equal(watch.seen[4], watch.seen[5])
    assert not equal(watch.seen[5], watch.seen[6])
    assert run_of(trainer).backend.precision.scaler.get_scale() == 32768.0


@pytest.mark.parametrize(
    ("dtype", "options", "bytes_each"),
    [
        (FP32, {"name": "adamw"}, 16),
        (BF16, {"name": "adamw"}, 16),
        (BF16, {"name": "adamw", "master_weights": False}, 8),
        (FP32, {"name": "adamw_8bit"}, 10),
        (BF16, {"name": "adamw_8bit"}, 10),
        (BF16, {"name": "adamw_8bit", "master_weights": False}, 6),
        (FP32, {"name": "adafactor"}, 8),
        (BF16, {"name": "adafactor"}, 8),
        (BF16, {"name": "adafactor", "master_weights": False}, 4),
        (FP32, {"name": "lion_8bit"}, 9),
        (FP32, {"name": "sgd"}, 12),
    ],
)
def test_bytes_per_parameter_are_those_of_the_documentation(dtype, options, bytes_each):
    """Parameter, gradient and state; the table of docs/optimizers.md."""
    layer = nn.Linear(512, 512, bias=False, dtype=dtype)
    task = Upcast(nn.Sequential(layer))
    trainer = Trainer(task, classes(8, 512, 512, dtype=FP32), max_steps=2, optimizer=options, log="none", save_best=0)
    trainer.fit()
    state = bytes_of(trainer.active_optimizer.state[layer.weight])
    each = (2 * layer.weight.nbytes + state) / layer.weight.numel()
    assert bytes_each <= each < bytes_each + 0.04


def test_the_norm_of_16bit_gradients_is_computed_in_fp32():
    torch.manual_seed(0)
    exact = [torch.randn(300, 40) * 100, torch.randn(70) * 500]
    wanted = torch.cat([g.flatten() for g in exact]).double().norm().item()
    for dtypes in ((BF16, BF16), (torch.float16, torch.float16), (BF16, FP32)):
        grads = [g.to(dtype) for g, dtype in zip(exact, dtypes, strict=True)]
        norm = total_norm(grads, uniform=len(set(dtypes)) == 1)
        assert norm.dtype == FP32
        assert norm.item() == pytest.approx(wanted, rel=1e-4)
    large = [torch.full((1000,), 3000.0, dtype=torch.float16)]
    assert total_norm(large, uniform=True).item() == pytest.approx(3000 * 1000**0.5, rel=1e-4)


def test_fp16_weights_do_not_go_with_a_loss_scale():
    with pytest.raises(BadArgument, match="parameters in fp32 for precision='fp16'"):
        make(Upcast(net(torch.float16, FP32)), precision="fp16")


def test_the_start_message_names_16bit_weights(caplog):
    with caplog.at_level("INFO", logger="trainformer"):
        make(Upcast(net(BF16, FP32)), max_steps=1).fit()
    assert "9,219 trainable parameters (bfloat16), " in caplog.text
