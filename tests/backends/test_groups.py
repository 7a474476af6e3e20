"""Layer-wise rates, schedules of the weight decay, and optimizers with options."""

import math

import pytest
import timm
import torch
from timm.optim import Lars, param_groups_layer_decay
from torch import nn

from toys import MeanTask, classes
from trainformer import Trainer
from trainformer.backends.torch.optimizers import layer_scales, make_optimizer
from trainformer.core.errors import BadArgument


class Wrapped(nn.Module):
    """A timm model inside another, with a head of its own."""

    def __init__(self):
        super().__init__()
        self.backbone = timm.create_model("test_vit", num_classes=0)
        self.proj = nn.Linear(64, 3)


class Holder:
    def __init__(self, model):
        self.model = model


@pytest.mark.parametrize("name", ["test_vit", "test_resnet", "test_efficientnet"])
@pytest.mark.parametrize("decay", [0.65, 0.9])
def test_learning_rates_decay_by_layer_as_in_timm(name, decay):
    model = timm.create_model(name, num_classes=5)
    theirs = {
        id(p): group["lr_scale"]
        for group in param_groups_layer_decay(model, 0.05, layer_decay=decay)
        for p in group["params"]
    }
    optimizer = make_optimizer("adamw", Holder(model), lr=0.01, weight_decay=0.05, layer_decay=decay)
    seen = 0
    for group in optimizer.param_groups:
        for p in group["params"]:
            assert group["lr"] == pytest.approx(0.01 * theirs[id(p)], rel=1e-12)
            seen += 1
    assert seen == len(theirs)
    assert optimizer.param_groups[0]["lr"] == 0.01  # the rate that is reported is the full one
    assert len({group["lr"] for group in optimizer.param_groups}) > 2


def test_a_backbone_inside_a_model_has_its_layers_and_the_rest_is_at_the_top():
    model = Wrapped()
    named = dict(model.named_parameters())
    inner = layer_scales(model.backbone, dict(model.backbone.named_parameters()), 0.5)
    scales = layer_scales(model, named, 0.5)
    assert scales["proj.weight"] == 1.0
    assert all(scales[f"backbone.{name}"] == value for name, value in inner.items())
    assert scales["backbone.patch_embed.proj.weight"] < scales["backbone.blocks.1.mlp.fc1.weight"] < 1.0


def test_layer_decay_is_refused_for_models_without_a_group_matcher():
    with pytest.raises(BadArgument, match="a model that has a group_matcher"):
        Trainer(MeanTask(), classes(), layer_decay=0.7, log="none")
    task = MeanTask()
    with pytest.raises(BadArgument, match="optimizer by name for layer_decay"):
        Trainer(task, classes(), layer_decay=0.7, optimizer=torch.optim.SGD(task.model.parameters(), lr=1), log="none")
    with pytest.raises(BadArgument, match="layer_decay to be a number above 0 and up to 1"):
        Trainer(MeanTask(), classes(), layer_decay=1.5, log="none")


class Watch:
    """Notes the weight decay of each group after each step."""

    def __init__(self):
        self.seen = []

    def on_step_end(self, trainer, step, loss):
        self.seen.append([group["weight_decay"] for group in trainer.active_optimizer.param_groups])


def test_the_weight_decay_follows_a_cosine_and_resumes(tmp_path):
    def run(folder, steps, **more):
        watch = Watch()
        options = {"weight_decay": 0.04, "weight_decay_end": 0.4, "batch_size": 8, "log": "none", "epochs": 2}
        trainer = Trainer(MeanTask(), classes(), callbacks=[watch], run_dir=tmp_path / folder, **options, **more)
        if steps:
            trainer.max_steps = None
        trainer.fit()
        return trainer, watch.seen

    trainer, seen = run("whole", None)
    total = 16
    wanted = [0.04 + 0.36 * (1 - math.cos(math.pi * step / (total - 1))) / 2 for step in range(total)]
    assert [row[0] for row in seen] == pytest.approx(wanted)
    assert all(row[1] == 0.0 for row in seen)  # biases stay without
    assert seen[-1][0] == pytest.approx(0.4)

    class StopAt:
        def on_step_end(self, trainer, step, loss):
            if step == 5:
                trainer.control.should_save = True
                raise KeyboardInterrupt

    first = Trainer(
        MeanTask(), classes(), callbacks=[StopAt()], run_dir=tmp_path / "cut", save_every=4, epochs=2, batch_size=8,
        log="none", weight_decay=0.04, weight_decay_end=0.4,
    )  # fmt: skip
    with pytest.raises(KeyboardInterrupt):
        first.fit()
    again, rest = run("cut", None, save_every=4)
    assert again.state.step == total
    assert [row[0] for row in rest] == pytest.approx(wanted[4:])
    for a, b in zip(trainer.task.model.parameters(), again.task.model.parameters(), strict=True):
        assert torch.equal(a, b)


def test_the_end_of_the_weight_decay_needs_a_number_of_steps():
    def stream():
        while True:
            yield classes(8)

    class Endless:
        def __iter__(self):
            return stream()

    with pytest.raises(BadArgument, match="weight_decay_end needs the number of steps"):
        Trainer(MeanTask(), Endless(), weight_decay_end=0.1, scheduler=None, log="none")


def test_optimizers_by_name_take_options():
    trainer = Trainer(MeanTask(), classes(), optimizer={"name": "adamw", "betas": (0.9, 0.95)}, log="none")
    assert trainer.active_optimizer.param_groups[0]["betas"] == (0.9, 0.95)
    with pytest.raises(BadArgument, match="options that adamw takes, received 'beta'"):
        Trainer(MeanTask(), classes(), optimizer={"name": "adamw", "beta": 1}, log="none")
    with pytest.raises(BadArgument, match="to have a 'name'"):
        Trainer(MeanTask(), classes(), optimizer={"betas": 1}, log="none")


def test_lars_leaves_norms_and_biases_unadapted_as_timm_does():
    ours, theirs = MeanTask().model, MeanTask().model
    x, y = classes(32)
    trainer = Trainer(
        Task(ours), (x, y), batch_size=32, max_steps=3, lr=0.3, weight_decay=1e-2, optimizer="lars", scheduler=None,
        gradient_clip=None, log="none", save_best=0,
    ).fit()  # fmt: skip
    decayed = [p for p in theirs.parameters() if p.ndim > 1]
    others = [p for p in theirs.parameters() if p.ndim <= 1]
    groups = [{"params": decayed, "weight_decay": 1e-2}, {"params": others, "weight_decay": 0.0}]
    optimizer = Lars(groups, lr=0.3, momentum=0.9)
    for _ in range(3):
        optimizer.zero_grad()
        nn.functional.cross_entropy(theirs(x), y).backward()
        optimizer.step()
    assert type(trainer.active_optimizer).__name__ == "Lars"
    for a, b in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-12)


class Task(MeanTask):
    """Sees every sample in one order, so that sums agree to the last bits."""


class Suited(MeanTask):
    """A task with settings of its own."""

    def training_defaults(self, settings, chosen):
        return {"lr": settings.batch_size * 1e-3, "scheduler": "cosine", "gradient_clip": None}


def test_a_task_may_bring_settings_which_count_where_the_user_did_not_choose():
    trainer = Trainer(Suited(), classes(), batch_size=4, scheduler="linear", log="none")
    assert (trainer.lr, trainer.scheduler, trainer.gradient_clip) == (0.004, "linear", None)
    assert trainer.active_optimizer.param_groups[0]["lr"] == 0.004
    config = trainer.context.config.to_json()
    assert config["lr"]["source"] == "derived"
    assert config["scheduler"]["source"] == "user"

    class Wrong(MeanTask):
        def training_defaults(self, settings, chosen):
            return {"learning_rate": 1}

    with pytest.raises(BadArgument, match="settings of the run, received 'learning_rate'"):
        Trainer(Wrong(), classes(), log="none")


def test_fused_sgd_takes_parameters_whose_first_gradient_comes_late():
    class Late(MeanTask):
        """Its last layer rests in the first two steps."""

        steps = 0

        def train_step(self, batch):
            x, y = batch
            self.steps += 1
            hidden = self.model[1](self.model[0](x))
            last = self.model[2]
            weight, bias = (last.weight, last.bias) if self.steps > 2 else (last.weight.detach(), last.bias.detach())
            return nn.functional.cross_entropy(nn.functional.linear(hidden, weight, bias), y)

    data = classes(32)
    task = Late()
    options = {"max_steps": 4, "batch_size": 32, "scheduler": None, "gradient_clip": None, "log": "none"}
    Trainer(task, data, optimizer="sgd", lr=0.1, weight_decay=0.0, save_best=0, **options).fit()
    by_hand = Late()
    optimizer = torch.optim.SGD(by_hand.model.parameters(), lr=0.1, momentum=0.9, foreach=False)
    order = [data]
    for _ in range(4):
        optimizer.zero_grad()
        by_hand.train_step(order[0]).backward()
        optimizer.step()
    for a, b in zip(task.model.parameters(), by_hand.model.parameters(), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
