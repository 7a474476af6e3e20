"""Optimizers by name with 8-bit, paged and factored state: updates, memory, and state dicts."""

import pytest
import torch
from optimizer_toys import BF16, FP32, Upcast, Watch, batches, bytes_of, equal, make, net, tensors
from timm.optim import Lion
from torch import nn

from toys import MeanTask, classes, mlp, same, weights
from trainformer.backends.torch.optimizer_names import _ALIASES, BITSANDBYTES_OPTIMIZERS, optimizer_by_name
from trainformer.core.errors import BadArgument, NonFiniteError

# -- names -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [*BITSANDBYTES_OPTIMIZERS, *_ALIASES, "AdamW_8bit"])
def test_every_name_trains_and_large_state_is_in_eight_bits(name):
    task = Upcast(net())
    probe = next(iter(batches()))
    before = task.train_step(probe).item()
    trainer = make(task, optimizer=name, scheduler=None, lr=0.1 if name == "sgd_8bit" else 3e-3)
    trainer.fit()
    assert task.train_step(probe).item() < 0.9 * before
    large, small = (trainer.active_optimizer.state[task.model[i].weight] for i in (0, 2))
    moments = {k: v for k, v in large.items() if k.startswith(("state", "exp_avg"))}
    assert {v.dtype for v in moments.values()} == {torch.uint8 if "8bit" in name else FP32}
    # A byte for each moment, and one fp32 scale for each 256 of them.
    count = sum(v.numel() for v in moments.values())
    if "8bit" in name:
        assert bytes_of(large) == count * (1 + 4 / 256)
        assert small["state1"].dtype == FP32


def test_eight_bit_adamw_follows_adamw():
    torch.manual_seed(0)
    target, start = torch.randn(64, 128), torch.randn(64, 128)
    ends = {}
    for name in ("adamw", "adamw_8bit", "adam_8bit"):
        p = nn.Parameter(start.clone())
        optimizer = optimizer_by_name(name, [{"params": [p], "weight_decay": 0.1}], 0.05, 0.1, {})
        for _ in range(100):
            p.grad = p.detach() - target
            optimizer.step()
        ends[name] = p.detach()
    # It goes where AdamW goes, to 2 % of the way; and what bitsandbytes calls Adam decays as AdamW does.
    way = (ends["adamw"] - start).norm()
    assert (ends["adamw_8bit"] - ends["adamw"]).norm() < 0.02 * way
    assert torch.equal(ends["adam_8bit"], ends["adamw_8bit"])
    assert not torch.equal(ends["adamw_8bit"], ends["adamw"])


def test_an_mlp_learns_in_eight_bits_what_it_learns_in_32():
    losses = {}
    for name in ("adamw", "paged_adamw_8bit"):
        task = Upcast(net())
        make(task, optimizer=name, max_steps=100).fit()
        losses[name] = task.train_step(classes(512, 32, dtype=FP32)).item()
    assert losses["adamw"] < 0.6
    assert losses["paged_adamw_8bit"] == pytest.approx(losses["adamw"], rel=0.03)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": "adamw", "beta": 1}, "Did you mean 'betas'"),
        ({"name": "adamw_8bit", "betsa": (0.9, 0.95)}, "Did you mean 'betas'"),
        ({"name": "sgd_8bit", "nesterov": True}, "It takes min_8bit_size, momentum"),
        ({"name": "paged_lion_8bit", "eps": 1e-8}, "options that paged_lion_8bit takes"),
        ({"name": "lion", "momentun": 1}, "options that lion takes"),
        ({"name": "adamw", "lr": 1.0}, "Pass lr to the Trainer"),
        ({"name": "lion", "weight_decay": 1.0}, "Pass weight_decay to the Trainer"),
        ({"name": "adamw", "master_weights": "yes"}, "master_weights to be True or False"),
        ({"name": "adamw_8bitt"}, "Did you mean 'adamw_8bit'"),
        ({"master_weights": True}, "to have a 'name'"),
    ],
)
def test_bad_options_are_explained(options, message):
    with pytest.raises(BadArgument, match=message):
        make(Upcast(net()), optimizer=options)


def test_what_cannot_run_is_refused_before_training(monkeypatch):
    with pytest.raises(BadArgument, match=r"fp32, bf16 or fp16 for adamw_8bit, received 'torch\.float64'"):
        make(MeanTask(mlp(32)), optimizer="adamw_8bit")
    # An optimizer of bitsandbytes that really fails on the CPU, with an error of its own.
    monkeypatch.setitem(BITSANDBYTES_OPTIMIZERS, "adamw_8bit", ("AdEMAMix32bit", ()))
    with pytest.raises(BadArgument, match=r"a device on which bitsandbytes runs adamw_8bit, received 'cpu'.*Error"):
        make(Upcast(net()), optimizer="adamw_8bit")


def test_options_reach_bitsandbytes_and_timm():
    trainer = make(Upcast(net()), optimizer={"name": "adamw_8bit", "betas": (0.8, 0.9), "min_8bit_size": 1}).fit()
    assert trainer.active_optimizer.param_groups[0]["betas"] == (0.8, 0.9)
    assert all(state["state1"].dtype == torch.uint8 for state in trainer.active_optimizer.state.values())
    trainer = make(Upcast(net()), optimizer={"name": "lion", "betas": (0.8, 0.9)})
    assert type(trainer.active_optimizer) is Lion
    assert trainer.active_optimizer.param_groups[0]["betas"] == (0.8, 0.9)


def test_paging_is_not_mentioned_as_a_warning_where_there_is_nothing_to_page(recwarn, caplog):
    with caplog.at_level("INFO", logger="trainformer"):
        make(Upcast(net()), optimizer="paged_adamw_8bit").fit()
    assert "no GPU memory to page out of" in caplog.text
    assert not [w for w in recwarn if "aged" in str(w.message)]


# -- state -------------------------------------------------------------------------------------------------


class Crash:
    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, step, loss):
        if step == self.step:
            raise RuntimeError("power cut")


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32), (BF16, BF16)])
@pytest.mark.parametrize("name", [*BITSANDBYTES_OPTIMIZERS, "adamw", "sgd", "adafactor", "nadam", "lion", "lamb"])
def test_an_interrupted_run_resumes_bitwise(name, dtypes):
    whole, again = Upcast(net(*dtypes)), Upcast(net(*dtypes))
    first = make(whole, optimizer=name, run_dir="whole", log_every=None).fit()
    options = {"optimizer": name, "run_dir": "cut", "save_every": 5, "log_every": None}
    with pytest.raises(RuntimeError, match="power cut"):
        make(Upcast(net(*dtypes)), callbacks=[Crash(8)], **options).fit()
    second = make(again, **options)
    second.fit()
    assert same(weights(whole), weights(again))
    states = [tensors(trainer.active_optimizer.state_dict()) for trainer in (first, second)]
    assert equal(*states)
    assert any(isinstance(value, torch.Tensor) and value.dtype == FP32 for value in states[0])


@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, BF16)])
@pytest.mark.parametrize("name", ["paged_adamw_8bit", "adafactor", "adamw"])
def test_the_check_finds_saving_and_loading_exact_and_leaves_no_trace(name, dtypes):
    task = Upcast(net(*dtypes))
    before = weights(task)
    trainer = make(task, optimizer=name)
    report = trainer.check()
    assert report.ok
    assert same(before, weights(task))
    plain = Upcast(net(*dtypes))
    make(plain, optimizer=name, run_dir="plain").fit()
    trainer.fit()
    assert same(weights(plain), weights(task))


def test_adafactor_keeps_a_row_and_a_column():
    task = Upcast(net())
    rates = []

    class Rate:
        def on_step_end(self, trainer, step, loss):
            rates.append(trainer.active_optimizer.param_groups[0]["lr"])

    probe = next(iter(batches()))
    before = task.train_step(probe).item()
    trainer = make(task, optimizer="adafactor", lr=0.1, callbacks=[Rate()])
    trainer.fit()
    assert task.train_step(probe).item() < 0.85 * before
    assert max(rates) == pytest.approx(0.1, rel=0.02)  # the trainer's schedule: up and down
    assert rates[0] < max(rates) > rates[-1]
    state = trainer.active_optimizer.state[task.model[0].weight]
    assert {k: v.numel() for k, v in state.items()} == {"step": 1, "row_var": 256, "col_var": 32}


# -- a step that must not happen ---------------------------------------------------------------------------


class Poisoned(Upcast):
    """The gradient is bad in the sixth step."""

    calls = 0

    def train_step(self, batch):
        loss = super().train_step(batch)
        self.calls += 1
        if self.calls == 6:
            loss.register_hook(lambda g: g * float("inf"))
        return loss


@pytest.mark.parametrize("place", ["host", "accelerator"])
@pytest.mark.parametrize("dtypes", [(FP32, FP32), (BF16, FP32)])
@pytest.mark.parametrize("name", ["adamw", "adafactor", "adamw_8bit", "paged_lion_8bit", "lion", "sgd"])
def test_a_bad_gradient_changes_no_parameter_no_copy_and_no_state(name, dtypes, place, monkeypatch):
    if place == "accelerator":  # the flag stays on the device, and fused optimizers read it there
        monkeypatch.setattr("trainformer.backends.torch.nonfinite._HOST", ())
    watch = Watch()
    make(Poisoned(net(*dtypes)), optimizer=name, nonfinite="skip", scheduler=None, callbacks=[watch]).fit()
    assert equal(watch.seen[4], watch.seen[5])
    assert not equal(watch.seen[5], watch.seen[6])
    stopped = Poisoned(net(*dtypes))
    with pytest.raises(NonFiniteError, match="at step 6"):
        make(stopped, optimizer=name, scheduler=None, run_dir="stopped").fit()
    assert equal(watch.seen[4][-4:], list(weights(stopped).values()))
