"""Several optimizers per task: the same numbers as a hand-written loop, however a step is sliced or written."""

import dataclasses
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

from several_optimizers import FILES, found, make_trainer
from trainformer import Loss, Mixture, OptimizerConfig, Trainer
from trainformer.callbacks import EMA, GradientMonitor, LRFinder, LRMonitor, Throughput
from trainformer.core.errors import BadArgument, DataError, NonFiniteError
from trainformer.run import run_of
from trainformer.tasks import TaskBase

QUIET = {"log": "none", "device": "cpu", "precision": "no", "resume": None, "save_every": None, "num_workers": 0}
SGD = {"name": "sgd", "momentum": 0.0}


def net(inputs, outputs):
    return nn.Sequential(nn.Linear(inputs, 6), nn.Tanh(), nn.Linear(6, outputs)).double()


class Pair(TaskBase):
    """A critic and a generator, with one loss function each."""

    every = 3

    def __init__(self, **configs):
        torch.manual_seed(3)
        self.model, self.critic = net(2, 4), net(4, 1)
        self.configs = configs

    def configure_optimizers(self):
        return {
            "critic": OptimizerConfig(params=self.critic, **{"optimizer": "adam", "lr": 1e-2} | self.configs),
            "generator": OptimizerConfig(
                params=self.model, optimizer=SGD, lr=0.1, scheduler="linear", gradient_clip=0.05, every=self.every
            ),
        }

    def critic_loss(self, batch):
        real, noise = batch
        fake = self.model(noise).detach()
        losses = F.softplus(self.critic(fake)) + F.softplus(-self.critic(real))
        return Loss(losses.sum(), len(real), {"spread": losses.std()})

    def generator_loss(self, batch):
        return F.softplus(-self.critic(self.model(batch[1]))).mean()

    def eval_step(self, batch):
        return {"loss": self.generator_loss(batch)}


class Functions(Pair):
    def critic_step(self, batch):
        return self.critic_loss(batch)

    def generator_step(self, batch):
        return self.generator_loss(batch)


class Yields(Pair):
    def train_step(self, batch):
        yield "critic", self.critic_loss(batch)
        yield "generator", lambda: self.generator_loss(batch)


class Manual(Pair):
    def configure_optimizers(self):
        configs = super().configure_optimizers()
        # By name, it would be a schedule over as many updates as there are steps.
        configs["generator"] = dataclasses.replace(
            configs["generator"], every=1, scheduler=lambda optimizer: LambdaLR(optimizer, lambda n: 1 - n / 5)
        )
        return configs

    def manual_step(self, batch, optimizers):
        critic, generator = optimizers["critic"], optimizers["generator"]
        critic.backward(self.critic_loss(batch))
        critic.step()
        if critic.updates % self.every == 0:
            generator.backward(self.generator_loss(batch))
            generator.step()
        return {"double": 2.0, "pair": (torch.tensor(3.0), 6)}


def data(samples=60):
    g = torch.Generator().manual_seed(0)
    return TensorDataset(*(torch.randn(samples, n, generator=g, dtype=torch.float64) for n in (4, 2)))


def make(task, **settings):
    settings = {
        "epochs": 2,
        "batch_size": 8,
        "scheduler": "constant",
        "warmup_ratio": 0.0,
        "weight_decay": 0.0,
    } | settings
    return Trainer(task, data(), **{**QUIET, "log_every": 1, **settings})


def weights(task):
    return [p.detach().clone() for module in (task.model, task.critic) for p in module.parameters()]


def largest_difference(ours, theirs):
    return max((a - b).abs().max().item() for a, b in zip(ours, theirs, strict=True))


@pytest.fixture(scope="module")
def by_hand():
    """Weights after two epochs of eight steps, and the losses of each step."""
    task, order = Functions(), make(Functions())
    critic = torch.optim.Adam(task.critic.parameters(), lr=1e-2)
    generator = torch.optim.SGD(task.model.parameters(), lr=0.1)
    schedule = LambdaLR(generator, lambda n: 1 - n / 5)  # 16 steps have five updates
    losses, step = {"critic": [], "generator": []}, 0
    for epoch in range(2):
        for batch in run_of(order).train_source.batches(epoch):
            step += 1
            loss = task.critic_loss(batch.data)
            (loss.sum / loss.weight).backward()
            nn.utils.clip_grad_norm_(task.critic.parameters(), 1.0)
            critic.step()
            critic.zero_grad()
            losses["critic"].append((loss.sum / loss.weight).item())
            if step % 3 == 0:
                loss = task.generator_loss(batch.data)
                loss.backward()
                nn.utils.clip_grad_norm_(task.model.parameters(), 0.05)
                generator.step()
                schedule.step()
                losses["generator"].append(loss.item())
            task.critic.zero_grad()
            task.model.zero_grad()
    return weights(task), losses


@pytest.mark.parametrize("kind", [Functions, Yields, Manual])
def test_a_step_is_that_of_a_hand_written_loop(by_hand, kind):
    trainer = make(kind())
    trainer.fit()
    expected, losses = by_hand
    assert largest_difference(weights(trainer.task), expected) < 1e-12
    logged = trainer.state.log_history
    for name, values in losses.items():
        ours = [record[f"train/{name}/loss"] for record in logged if f"train/{name}/loss" in record]
        assert ours == pytest.approx(values, abs=1e-12)
    assert [r["train/loss"] for r in logged if "train/loss" in r] == pytest.approx(losses["critic"], abs=1e-12)
    last = next(record for record in reversed(logged) if "train/lr" in record)
    assert last["train/lr"] == last["train/critic/lr"] == 1e-2
    assert last["train/generator/lr"] == pytest.approx(0.1 * (1 - 4 / 5))
    assert ("train/double" in last) == (kind is Manual)


@pytest.mark.parametrize("kind", [Functions, Yields])
@pytest.mark.parametrize("accumulation", [2, 4])
def test_accumulation_changes_nothing(by_hand, kind, accumulation):
    trainer = make(kind(), batch_size=8 // accumulation, accumulation_steps=accumulation)
    trainer.fit()
    assert largest_difference(weights(trainer.task), by_hand[0]) < 1e-12


@pytest.mark.parametrize("name", FILES)
def test_accumulation_changes_nothing_in_the_examples(name):
    whole, parts = make_trainer(name), make_trainer(name, batch_size=2, accumulation_steps=4)
    for trainer in (whole, parts):
        trainer.fit()
    ours, theirs = found(whole), found(parts)
    assert ours.keys() == theirs.keys()
    assert len(ours) > 8
    for key, value in ours.items():
        assert (value - theirs[key]).abs().max() < 1e-9, key


@pytest.mark.parametrize("kind", [Functions, Yields, Manual])
@pytest.mark.parametrize("stop", [1, 3, 7])
def test_a_resumed_run_ends_bitwise_the_same(tmp_path, kind, stop):
    settings = {"epochs": 2, "save_every": 1, "scheduler": "cosine", "ema": 0.9}
    whole = make(kind(), **settings, run_dir=str(tmp_path / "whole"))
    whole.fit()
    crash(kind(), stop, **settings, run_dir=str(tmp_path / "cut"))
    resumed = make(kind(), **settings, run_dir=str(tmp_path / "cut"), resume="auto")
    resumed.fit()
    assert resumed.state.step == whole.state.step == 16
    for ours, theirs in zip(weights(resumed.task), weights(whole.task), strict=True):
        assert torch.equal(ours, theirs)
    assert run_of(resumed).backend.state_dict()["updates"] == {"critic": 16, "generator": 5}


class CrashAt:
    def __init__(self, step):
        self.step = step

    def on_step_begin(self, trainer, step):
        if step == self.step:
            raise KeyError("crashed")


def crash(task, step, **settings):
    with pytest.raises(KeyError, match="crashed"):
        make(task, **settings, callbacks=[CrashAt(step)]).fit()


def test_a_scheduler_of_torch_counts_the_updates_of_its_optimizer():
    class Stepped(Functions):
        def configure_optimizers(self):
            made = torch.optim.SGD(self.model.parameters(), lr=1.0)
            config = OptimizerConfig(
                params=self.model,
                optimizer=made,
                every=3,
                scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.1),
            )
            return {"critic": torch.optim.SGD(self.critic.parameters(), lr=0.1), "generator": config}

    trainer = make(Stepped())
    trainer.fit()
    backend = run_of(trainer).backend
    assert backend.optimizers["generator"].lr == pytest.approx(0.01)  # five updates
    assert backend.optimizers["critic"].lr == 0.1


def test_repeat_updates_one_optimizer_several_times_per_step():
    class Repeated(Functions):
        every = 1

        def configure_optimizers(self):
            configs = super().configure_optimizers()
            return {
                "critic": OptimizerConfig(params=self.critic, optimizer="adam", lr=1e-2, repeat=5),
                "generator": configs["generator"],
            }

    trainer = make(Repeated(), max_steps=3)
    trainer.fit()
    assert run_of(trainer).backend.state_dict()["updates"] == {"critic": 15, "generator": 3}


def test_only_the_parameters_of_an_optimizer_get_gradients():
    seen = {}

    class Look:
        def on_before_optimizer_step(self, trainer, step):
            backend = run_of(trainer).backend
            task = trainer.task
            names = {"model": task.model, "critic": task.critic}
            with_gradients = {n for n, m in names.items() if any(p.grad is not None for p in m.parameters())}
            seen.setdefault(backend.active.name, set()).update(with_gradients)

    make(Functions(), max_steps=3, callbacks=[Look()]).fit()
    assert seen == {"critic": {"critic"}, "generator": {"model"}}


@pytest.mark.parametrize("kind", [Functions, Yields])
def test_a_non_finite_update_is_skipped_and_the_others_are_not(kind):
    class Broken(kind):
        calls = 0

        def generator_loss(self, batch):
            self.calls += 1
            return super().generator_loss(batch) * (math.nan if self.calls == 2 else 1.0)

    task = Broken()
    trainer = make(task, max_steps=9, nonfinite="skip")
    trainer.fit()
    backend = run_of(trainer).backend
    assert backend.guard.skipped == 1
    assert all(torch.isfinite(p).all() for p in weights(task))
    assert backend.state_dict()["updates"] == {"critic": 9, "generator": 3}


def test_after_a_non_finite_update_no_optimizer_moves():
    class Broken(Functions):
        def generator_loss(self, batch):
            return super().generator_loss(batch) * math.nan

    task = Broken()
    reference = make(Functions(), max_steps=3)
    kept = []

    class Keep:
        def on_step_end(self, trainer, step, loss):
            kept.append(weights(trainer.task))

    with pytest.raises(NonFiniteError, match="optimizer became non-finite at step 3"):
        make(task, max_steps=8, log_every=8, callbacks=[Keep()]).fit()
    reference.fit()
    assert largest_difference(kept[2][4:], weights(reference.task)[4:]) == 0  # the critic's update was before it
    assert all(largest_difference(later, kept[2]) == 0 for later in kept[3:])


def test_nonfinite_retry_repeats_one_update():
    class Once(Functions):
        failed = False

        def generator_loss(self, batch):
            loss = super().generator_loss(batch)
            if not self.failed:
                self.failed = True
                return loss * math.nan
            return loss

    task, reference = Once(), make(Functions(), max_steps=4)
    make(task, max_steps=4, nonfinite="retry").fit()
    reference.fit()
    assert largest_difference(weights(task), weights(reference.task)) < 1e-12


def test_the_ema_averages_chosen_modules_and_copies_the_others():
    class Both(TaskBase):
        def __init__(self):
            torch.manual_seed(3)
            self.model = nn.ModuleDict({"generator": net(2, 4), "critic": net(4, 1)})

        def configure_optimizers(self):
            return {name: OptimizerConfig(params=module, lr=0.1) for name, module in self.model.items()}

        def critic_step(self, batch):
            return F.softplus(-self.model["critic"](batch[0])).mean()

        def generator_step(self, batch):
            return self.model["generator"](batch[1]).square().mean()

        def eval_step(self, batch):
            return {"loss": self.generator_step(batch)}

    ema, history = EMA(decay=0.5, warmup=False, modules=["generator"]), []

    class Keep:
        def on_step_end(self, trainer, step, loss):
            history.append({k: v.clone() for k, v in trainer.task.model.state_dict().items()})

    task = Both()
    average = {k: v.clone() for k, v in task.model.state_dict().items()}
    make(task, max_steps=4, callbacks=[Keep(), ema]).fit()
    for state in history:
        average = {k: (v + state[k]) / 2 if k.startswith("generator") else state[k] for k, v in average.items()}
    for key, value in ema.model.state_dict().items():
        assert torch.allclose(value, average[key], atol=1e-12), key
    with pytest.raises(BadArgument, match="generator"):
        make(Both(), callbacks=[EMA(modules=["generatr"])]).fit()


@pytest.mark.parametrize("kind", [Functions, Yields])
def test_check_looks_at_every_optimizer(kind, capsys):
    class Unused(kind):
        def __init__(self):
            super().__init__()
            self.critic.extra = nn.Parameter(torch.ones(2, dtype=torch.float64))

    report = make(kind()).check()
    texts = {f.question: f.message for f in report.findings}
    assert "critic loss" in texts["forward and backward"]
    assert "generator loss" in texts["forward and backward"]
    assert "8 trainable tensors" in texts["gradients"]
    failed = make(Unused()).check(raise_on_failure=False).failures
    assert [f.question for f in failed] == ["gradients"]
    assert "critic.extra" in failed[0].message
    assert make(Manual()).check(raise_on_failure=False).warnings[0].question == "manual_step"


def test_state_outside_the_model_is_saved_without_being_asked(tmp_path):
    """A loss with parameters and one optimizer: nothing of it was in a checkpoint unless the task had a state_dict."""

    class Scaled(TaskBase):
        def __init__(self):
            torch.manual_seed(3)
            self.model, self.head = net(4, 3), net(3, 1)
            self.scale = nn.Parameter(torch.ones((), dtype=torch.float64))

        def parameters(self):
            yield from (*self.model.parameters(), *self.head.parameters(), self.scale)

        def train_step(self, batch):
            return (self.head(self.model(batch[0])) * self.scale - 1).square().mean()

        def eval_step(self, batch):
            return {"loss": self.train_step(batch)}

    settings = {"max_steps": 6, "save_every": 1, "lr": 0.1}
    whole = make(Scaled(), **settings, run_dir=str(tmp_path / "whole"))
    whole.fit()
    crash(Scaled(), 3, **settings, run_dir=str(tmp_path / "cut"))
    resumed = make(Scaled(), **settings, run_dir=str(tmp_path / "cut"), resume="auto")
    resumed.fit()
    for ours, theirs in zip(resumed.task.parameters(), whole.task.parameters(), strict=True):
        assert torch.equal(ours, theirs)
    assert resumed.task.scale != 1


# -- mistakes ------------------------------------------------------------------------------------------------


def configured(function, base=Functions):
    """A task whose `configure_optimizers` is a function of it."""
    return type("Configured", (base,), {"configure_optimizers": function})()


def only(**config):
    def configure(task):
        return {"critic": OptimizerConfig(params=[*task.critic.parameters(), *task.model.parameters()], **config)}

    return configure


def named_as(name, **config):
    return lambda task: {name: OptimizerConfig(**{"params": task.critic, **config})}


class NoFunctions(Pair):
    pass


class WrongName(Yields):
    def train_step(self, batch):
        yield "critc", self.critic_loss(batch)


class Uneven(Yields):
    calls = 0

    def train_step(self, batch):
        self.calls += 1
        yield ("critic", self.critic_loss(batch)) if self.calls % 2 else ("generator", self.generator_loss(batch))


class Nothing(Yields):
    def train_step(self, batch):
        yield "generator", self.generator_loss(batch)


class Forgotten(Manual):
    def manual_step(self, batch, optimizers):
        optimizers["critic"].backward(self.critic_loss(batch))


class NoConfiguration(TaskBase):
    def __init__(self):
        self.model = net(4, 1)

    def manual_step(self, batch, optimizers):
        return None

    def train_step(self, batch):
        return self.model(batch[0]).mean()

    def eval_step(self, batch):
        return {}


MISTAKES = {
    "no mapping": (configured(lambda task: [1]), {}, "mapping from names to OptimizerConfig"),
    "a bad name": (configured(named_as("loss")), {}, "identifiers other than"),
    "no config": (configured(lambda task: {"critic": 3}), {}, "OptimizerConfig or a torch optimizer"),
    "not parameters": (configured(named_as("critic", params="critic")), {}, "param groups"),
    "nothing to train": (configured(named_as("critic", params=[])), {}, "trainable parameters"),
    "an unknown module": (configured(named_as("critic", params=net(4, 1))), {}, "hold"),
    "left out": (configured(named_as("critic")), {}, "0.weight.*never be trained"),
    "every=0": (configured(only(every=0)), {}, "every of the optimizer 'critic' to be an integer of at least 1"),
    "nothing every step": (configured(only(every=2)), {}, "every=1"),
    "a negative rate": (configured(only(lr=-1.0)), {}, "lr of the optimizer 'critic'"),
    "a rate beside an instance": (
        configured(lambda task: {
            "critic": OptimizerConfig(params=task.critic, optimizer=torch.optim.SGD(task.critic.parameters()), lr=1.0)
        }), {}, "no lr beside an instance"),
    "other parameters than the instance": (
        configured(lambda task: {
            "critic": OptimizerConfig(params=task.critic, optimizer=torch.optim.SGD(task.model.parameters()))
        }), {}, "params of 'critic' to be those of its optimizer"),
    "no function": (NoFunctions(), {}, r"Define critic_step\(self, batch\), or make train_step yield"),
    "an optimizer for all": (Functions(), {"optimizer": torch.optim.SGD(net(1, 1).parameters())}, "no one optimizer"),
    "layer_decay": (Functions(), {"layer_decay": 0.5}, "no layer_decay"),
    "retry with yields": (Yields(), {"nonfinite": "retry"}, "critic_step, generator_step"),
    "repeat with yields": (configured(only(repeat=2), Yields), {}, "no `step` and no `repeat`"),
    "manual every": (configured(Functions.configure_optimizers, Manual), {}, "no `every`, `repeat` or `step`"),
    "manual accumulation": (Manual(), {"accumulation_steps": 2}, "accumulation_steps=1 with manual_step"),
    "manual without optimizers": (NoConfiguration(), {}, "configure_optimizers on a task with manual_step"),
    "a pipeline": (Functions(), {"strategy": "pipeline"}, "'single', 'ddp' or 'fsdp'"),
}  # fmt: skip

LATE = {
    "a misspelt name": (WrongName(), {}, "critic, generator, received 'critc'. Did you mean 'critic'"),
    "uneven": (Uneven(), {"accumulation_steps": 2, "batch_size": 4}, "same optimizers in the same order"),
    "nothing is due": (Nothing(), {}, "that is due in every step"),
    "a forgotten step": (Forgotten(), {}, r"step\(\) or zero_grad\(\) after backward"),
    "never due": (Functions(), {"max_steps": 2}, r"'generator' \(46 parameters\) .* 2 steps, received 'every=3'"),
    "the learning rate finder": (Functions(), {"callbacks": [LRFinder(num_steps=10)]}, "several optimizers"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_mistakes_are_refused_before_training(name):
    task, settings, message = MISTAKES[name]
    with pytest.raises(BadArgument, match=message):
        make(task, **settings)


@pytest.mark.parametrize("name", LATE)
def test_mistakes_in_a_step_are_explained(name):
    task, settings, message = LATE[name]
    with pytest.raises(BadArgument, match=message):
        make(task, **settings).fit()


class NeverYielded(Yields):
    def train_step(self, batch):
        yield "critic", self.critic_loss(batch)


class NeverStepped(Manual):
    def manual_step(self, batch, optimizers):
        """The optimizer of torch may be stepped itself."""
        critic = optimizers["critic"].optimizer
        critic.zero_grad()
        self.critic_loss(batch).sum.backward()
        critic.step()


@pytest.mark.parametrize("kind", [NeverYielded, NeverStepped])
def test_an_optimizer_that_is_never_updated_is_reported(kind, caplog):
    kind.every = 1
    report = make(kind()).check()
    assert [f.question for f in report.warnings] == ["optimizers" if kind is NeverYielded else "manual_step"]
    make(kind()).fit()
    (warning,) = [r.getMessage() for r in caplog.records if "never updated" in r.getMessage()]
    assert warning.startswith("the optimizer 'generator' (46 parameters) was never updated in 8 steps")


def test_an_optimizer_that_is_never_due_fails_the_check():
    report = make(Functions(), max_steps=2).check(raise_on_failure=False)
    assert ["every=3" in f.message for f in report.failures] == [True]


def test_a_checkpoint_of_other_optimizers_is_refused(tmp_path):
    make(Functions(), run_dir=str(tmp_path), max_steps=3, save_every=1).fit()

    class Renamed(Functions):
        def configure_optimizers(self):
            critic, generator = super().configure_optimizers().values()
            return {"critic": critic, "artist": generator}

        artist_step = Functions.generator_step

    task = Renamed()
    before = weights(task)
    with pytest.raises(DataError, match="artist"):
        make(task, max_steps=4, resume=str(tmp_path)).fit()
    assert largest_difference(weights(task), before) == 0


def test_one_optimizer_may_be_configured_as_in_lightning(by_hand):
    class One(TaskBase):
        def __init__(self, style):
            torch.manual_seed(3)
            self.model, self.style = net(4, 1), style

        def configure_optimizers(self):
            optimizer = torch.optim.SGD(self.model.parameters(), lr=0.1)
            if self.style == "optimizer":
                return optimizer
            schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, 0.1)
            return {"optimizer": optimizer, "lr_scheduler": schedule}

        def train_step(self, batch):
            return self.model(batch[0]).square().mean()

        def eval_step(self, batch):
            return {"loss": self.train_step(batch)}

    for style, lr in (("optimizer", 0.1), ("mapping", 0.01)):
        trainer = make(One(style), max_steps=4)
        trainer.fit()
        assert trainer.active_optimizer.param_groups[0]["lr"] == pytest.approx(lr)


def test_monitors_work_with_several_optimizers():
    """FLOPs of a step with a gradient penalty cannot be counted, which is no reason to fail."""
    trainer = make_trainer("gan", epochs=1, callbacks=[GradientMonitor(), LRMonitor(), Throughput()])
    trainer.fit()
    assert "train/steps_per_second" in trainer.state.log_history[-1]
    assert list(trainer.active_optimizers) == ["critic", "generator"]


def test_several_optimizers_on_a_mixture_with_two_validation_sets():
    class Logged(Functions):
        def critic_step(self, batch):
            self.log("mine", 3.0)
            loss = super().critic_step(batch)
            return Loss(loss.sum, loss.weight, per_sample=loss.sum.expand(len(batch[0])) / len(batch[0]))

    a, b = data(40), data(20)
    trainer = Trainer(
        Logged(scheduler={"name": "ReduceLROnPlateau", "patience": 0, "threshold": 10.0, "monitor": "val/b/loss"}),
        Mixture({"a": a, "b": b}),
        {"a": a, "b": b},
        **{**QUIET, "epochs": 3, "batch_size": 10, "warmup_ratio": 0.0},
    )
    trainer.fit()
    last = next(record for record in reversed(trainer.state.log_history) if "train/loss" in record)
    assert {"train/critic/loss/a", "train/share/a", "train/passes/b", "train/generator/loss"} <= last.keys()
    assert last["train/mine"] == 3.0
    assert last["train/share/a"] == pytest.approx(2 / 3, abs=0.1)
    assert trainer.active_optimizers["critic"].param_groups[0]["lr"] < 1e-2  # the plateau of val/b/loss


@pytest.mark.parametrize("kind", [Functions, Yields, Manual])
def test_a_skipped_update_leaves_no_nan_in_running_statistics(kind):
    class Normed(kind):
        calls = 0

        def __init__(self):
            super().__init__()
            self.critic.insert(0, nn.BatchNorm1d(4).double())

        def critic_loss(self, batch):
            self.calls += 1
            return super().critic_loss((batch[0] * (math.nan if self.calls == 3 else 1.0), batch[1]))

    task = Normed()
    trainer = make(task, max_steps=6, nonfinite="skip")
    trainer.fit()
    assert run_of(trainer).backend.guard.skipped == 1
    assert all(torch.isfinite(value).all() for value in task.critic.state_dict().values())
