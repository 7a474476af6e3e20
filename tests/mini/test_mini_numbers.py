"""A mini trainer matches a hand-written loop and `trainformer.Trainer`."""

import math

import pytest
import torch
from mini_toys import Classifier, Keeper, batches_of, by_hand, shuffled_loader
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR, ReduceLROnPlateau

from toys import MeanTask, largest_difference, mlp, same, weights
from trainformer import Trainer
from trainformer.core.errors import BadArgument, NonFiniteError
from trainformer.mini import LoggingHook, NonFiniteGradients, ProgressHook


@pytest.mark.parametrize("grad_clip", [None, 0.05])
@pytest.mark.parametrize("schedule", [None, lambda o: LambdaLR(o, lambda step: 1 / (1 + step))])
def test_bitwise_equal_to_a_hand_written_loop(grad_clip, schedule):
    keeper = Keeper()
    trainer = Classifier(10, grad_clip=grad_clip, schedule=schedule, hooks=[keeper])
    trainer.train()
    model, losses = by_hand(batches_of(), 10, grad_clip=grad_clip, schedule=schedule)
    assert same(weights(trainer), dict(model.named_parameters()))
    assert [float(info["loss"]) for info in keeper.infos] == losses


def test_four_micro_batches_are_one_step():
    trainer = Classifier(5, gradient_accumulation_steps=4)
    trainer.train()
    model, _ = by_hand(batches_of(), 5, accumulation=4)
    assert largest_difference(weights(trainer), dict(model.named_parameters())) < 1e-12


def test_micro_batches_of_different_size_have_equal_weight():
    batches = [batches_of(size=8)[0], batches_of(size=3)[1]]
    trainer = Classifier(3, batches=batches, gradient_accumulation_steps=2)
    trainer.train()
    model, _ = by_hand(batches, 3, accumulation=2)
    assert largest_difference(weights(trainer), dict(model.named_parameters())) < 1e-12


def test_bitwise_equal_to_the_main_trainer_on_the_same_order():
    torch.manual_seed(11)
    trainer = Classifier(10, batches=shuffled_loader(), grad_clip=1.0)
    trainer.train()
    task = MeanTask()
    optimizer = torch.optim.SGD(task.model.parameters(), lr=0.1, momentum=0.9)
    Trainer(
        task, shuffled_loader(), max_steps=10, optimizer=optimizer, scheduler=None, seed=11, log="none", device="cpu"
    ).fit()
    assert same(weights(trainer), weights(task))


def test_the_global_seed_decides_the_order_and_is_not_changed():
    def run(seed):
        torch.manual_seed(seed)
        trainer = Classifier(4, batches=shuffled_loader())
        trainer.train()
        return torch.cat(trainer.seen), torch.rand(3)

    order, drawn = run(5)
    again, drawn_again = run(5)
    other, _ = run(6)
    torch.manual_seed(5)
    mlp()  # seeds torch itself
    assert torch.equal(order, again)
    assert torch.equal(drawn, drawn_again)
    assert torch.equal(drawn, torch.rand(3))
    assert not torch.equal(order, other)


class Moody(Classifier):
    """Returns no loss for some batches."""

    def __init__(self, *args, dislikes=(), **kwargs):
        super().__init__(*args, **kwargs)
        self.dislikes = dislikes

    def forward(self, input):
        loss, records = super().forward(input)
        return (None if len(self.seen) in self.dislikes else loss), records


def test_a_batch_without_a_loss_is_skipped():
    keeper = Keeper()
    trainer = Moody(4, dislikes=(2, 3), hooks=[keeper])
    trainer.train()
    batches = batches_of()
    model, losses = by_hand([batches[0], batches[3]], 2)
    assert same(weights(trainer), dict(model.named_parameters()))
    assert [[loss.item() for loss in i["loss"]] for i in keeper.infos] == [[losses[0]], [], [], [losses[1]]]
    assert keeper.infos[1]["grad_norm"] is None
    assert all("accuracy" in info["records"][0] for info in keeper.infos)


def test_a_step_averages_over_the_micro_batches_with_a_loss():
    trainer = Moody(1, dislikes=(1, 3), gradient_accumulation_steps=4)
    trainer.train()
    batches = batches_of()
    model, _ = by_hand([batches[1], batches[3]], 1, accumulation=2)
    assert largest_difference(weights(trainer), dict(model.named_parameters())) < 1e-12


def test_records_are_averaged_over_micro_batches():
    logged = []

    class Logs(Classifier):
        def log(self, records, dry_run=False):
            logged.append(records["train"])

    keeper = Keeper()
    batches = [batches_of(size=8)[0], batches_of(size=4)[1]]
    Logs(1, batches=batches, gradient_accumulation_steps=2, hooks=[keeper, LoggingHook(1)]).train()
    model = mlp()
    expected = [(model(x).argmax(-1) == y).double().mean().item() for x, y in batches]
    info = keeper.infos[0]
    assert [record["nested"] for record in info["records"]] == [{"rows": 8}, {"rows": 4}]
    assert [record["accuracy"].item() for record in info["records"]] == expected
    assert len(info["loss"]) == len(info["data_time"]) == 2
    assert logged[0]["nested"] == {"rows": 6}
    assert logged[0]["accuracy"] == pytest.approx(sum(expected) / 2)
    assert logged[0]["loss"] == pytest.approx(float(info["loss"]))


def test_learning_rates_are_those_of_the_step_and_of_every_group():
    class TwoGroups(Classifier):
        def build_optimizer(self):
            first, last = self.model[0].parameters(), self.model[2].parameters()
            return torch.optim.SGD([{"params": first}, {"params": last, "lr": 0.5}], lr=0.1)

    keeper = Keeper()
    TwoGroups(3, schedule=lambda o: LambdaLR(o, lambda step: 2.0**-step), hooks=[keeper]).train()
    assert [info["lr_0"] for info in keeper.infos] == [0.1, 0.05, 0.025]
    assert [info["lr_1"] for info in keeper.infos] == [0.5, 0.25, 0.125]


def test_without_a_scheduler_hooks_may_change_learning_rates():
    class Halving(Keeper):
        def on_after_step(self, trainer):
            super().on_after_step(trainer)
            trainer.optimizer.param_groups[0]["lr"] /= 2

    hook = Halving()
    Classifier(3, hooks=[hook]).train()
    assert [info["lr_0"] for info in hook.infos] == [0.1, 0.05, 0.025]


def test_a_scheduler_that_needs_a_metric_is_refused():
    with pytest.raises(BadArgument, match=r"ReduceLROnPlateau, which needs a metric.*in a hook"):
        Classifier(3, schedule=ReduceLROnPlateau).train()
    with pytest.raises(BadArgument, match="LRScheduler or None, received 'int'"):
        Classifier(3, schedule=lambda o: 3).train()


def test_a_torch_scheduler_is_stepped_once_per_step():
    trainer = Classifier(6, gradient_accumulation_steps=2, schedule=lambda o: OneCycleLR(o, 0.3, total_steps=7))
    trainer.train()
    assert trainer.lr_scheduler.last_epoch == 6


class Unlucky(Classifier):
    """Some calls of `forward` return NaN; every call draws a random number."""

    def __init__(self, *args, bad=(), **kwargs):
        super().__init__(*args, **kwargs)
        self.bad, self.drawn = bad, []

    def forward(self, input):
        loss, records = super().forward(input)
        self.drawn.append(torch.rand(1).item())
        if len(self.seen) in self.bad:
            loss = loss * math.nan
        return loss, records


def test_a_retry_uses_the_same_data_and_new_random_numbers():
    keeper = Keeper()
    trainer = Unlucky(3, bad=(2, 3), max_non_finite_grad_retries=2, hooks=[keeper])
    trainer.train()
    seen = trainer.seen
    assert len(seen) == 5
    assert all(torch.equal(seen[1], other) for other in seen[2:4])
    assert not torch.equal(seen[3], seen[4])
    assert len(set(trainer.drawn)) == 5
    model, losses = by_hand(batches_of(), 3)
    assert same(weights(trainer), dict(model.named_parameters()))
    assert [float(info["loss"]) for info in keeper.infos] == losses


def test_a_retry_repeats_all_micro_batches_and_drops_the_first_attempt():
    keeper = Keeper()
    trainer = Unlucky(1, bad=(2,), max_non_finite_grad_retries=1, gradient_accumulation_steps=2, hooks=[keeper])
    trainer.train()
    assert torch.equal(trainer.seen[0], trainer.seen[2])
    assert torch.equal(trainer.seen[1], trainer.seen[3])
    _, losses = by_hand(batches_of(), 1, accumulation=2)
    assert float(keeper.infos[0]["loss"]) == pytest.approx(losses[0])


def test_exhausted_retries_raise_and_keep_the_last_good_weights():
    trainer = Unlucky(5, bad=range(3, 99), max_non_finite_grad_retries=3)
    with pytest.raises(RuntimeError, match=r"not finite in 4 attempts.*grad_clip") as caught:
        trainer.train()
    assert isinstance(caught.value, NonFiniteGradients)
    assert isinstance(caught.value, NonFiniteError)
    assert "nonfinite=" not in str(caught.value)
    assert len(trainer.seen) == 2 + 4
    model, _ = by_hand(batches_of(), 2)
    assert same(weights(trainer), dict(model.named_parameters()))


@pytest.mark.parametrize("retries", [None, 0])
def test_without_retries_nan_raises_and_never_reaches_the_weights(retries):
    trainer = Unlucky(5, bad=(3,), max_non_finite_grad_retries=retries)
    with pytest.raises(RuntimeError, match="became non-finite at step 3"):
        trainer.train()
    model, _ = by_hand(batches_of(), 2)
    assert same(weights(trainer), dict(model.named_parameters()))


class Halves(Classifier):
    """Records the dtype in which the model computes."""

    def __init__(self, *args, **kwargs):
        super().__init__(*args, model=mlp(dtype=torch.float32), **kwargs)
        self.dtypes = set()

    def forward(self, input):
        x, y = input
        logits = self.model(x.float())
        self.dtypes.add(logits.dtype)
        return F.cross_entropy(logits.float(), y), {}


@pytest.mark.parametrize(
    ("precision", "dtype", "scales"),
    [(None, torch.float32, False), ("bf16", torch.bfloat16, False), ("fp16", torch.float16, True)],
)
def test_mixed_precision_and_its_scaler(precision, dtype, scales):
    trainer = Halves(4, mixed_precision=precision)
    trainer.train()
    assert trainer.dtypes == {dtype}
    assert trainer.grad_scaler.is_enabled() is scales
    assert all(p.dtype == torch.float32 for p in trainer.model.parameters())
    model = mlp(dtype=torch.float32)
    assert 0 < largest_difference(weights(trainer), dict(model.named_parameters())) < 1.0


def test_a_user_scaler_is_used():
    class Scaled(Halves):
        def build_grad_scaler(self):
            return torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    trainer = Scaled(4, mixed_precision="fp16")
    trainer.train()
    assert trainer.grad_scaler.get_scale() == 32.0  # doubled twice
    assert trainer.state_dict()["backend"]["scaler"]["scale"] == 32.0


def test_a_scaler_can_be_disabled_or_used_without_autocast():
    class Off(Halves):
        def build_grad_scaler(self):
            return torch.amp.GradScaler("cpu", enabled=False)

    class On(Classifier):
        def build_grad_scaler(self):
            return torch.amp.GradScaler("cpu", init_scale=4.0)

    off = Off(2, mixed_precision="fp16")
    off.train()
    on = On(4)
    on.train()
    model, _ = by_hand(batches_of(), 4)
    assert off.state_dict()["backend"]["scaler"] == {}
    assert on.state_dict()["backend"]["scaler"]["scale"] == 4.0
    assert largest_difference(weights(on), dict(model.named_parameters())) < 1e-12


class Watched(torch.Tensor):
    """A tensor that counts its reads."""

    reads = 0

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        reading = torch.Tensor.item, torch.Tensor.tolist, torch.Tensor.__float__, torch.Tensor.__bool__
        cls.reads += func in reading
        return super().__torch_function__(func, types, args, kwargs or {})


def test_there_is_no_device_sync_between_intervals():
    class Recording(Classifier):
        def forward(self, input):
            loss, records = super().forward(input)
            return loss, {"watched": records["accuracy"].as_subclass(Watched), **records}

        def log(self, records, dry_run=False):
            pass

    class Counting(Keeper):
        def on_after_step(self, trainer):
            self.infos.append(Watched.reads)

    counting = Counting()
    hooks = [counting, ProgressHook(interval=5), LoggingHook(interval=5)]
    Recording(9, hooks=hooks, gradient_accumulation_steps=2).train()
    reads = counting.infos
    assert reads[:5] == [0] * 5
    assert reads[5] > 0
    assert reads[5:] == [reads[5]] * 4


def test_the_model_is_trained_as_it_was_wrapped():
    inner = mlp()
    model = nn.DataParallel(inner)
    trainer = Classifier(3, model=model)
    trainer.train()
    by, _ = by_hand(batches_of(), 3)
    assert trainer.model is model
    assert trainer.unwrapped_model is inner
    assert trainer.state_dict()["model"].keys() == by.state_dict().keys()
    assert same(dict(inner.named_parameters()), dict(by.named_parameters()))
