"""Tasks, steps, metrics, optimizers and callbacks: objects that almost fit, and values of another kind."""

import copy

import pytest
import torch
from mistake_table import build, fit, row, text_for
from torch import nn
from torch.nn import functional as F

from toys import MeanTask, mlp
from trainformer import Loss
from trainformer.callbacks import EarlyStopping
from trainformer.core import BadArgument

loss_of = MeanTask.train_step


def task(base=MeanTask, **members):
    """A task with these methods or class attributes."""
    return type("Own", (base,), members)()


def training(step, **settings):
    return fit(task(train_step=step), **settings)


# -- tasks and models --------------------------------------------------------------------------------------


class Unnamed(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = mlp()

    def train_step(self, batch):
        return F.cross_entropy(self.net(batch[0]), batch[1])

    def eval_step(self, batch):
        return {"loss": self.train_step(batch)}


class Lightning(nn.Module):
    def training_step(self, batch, batch_idx): ...

    def validation_step(self, batch, batch_idx): ...


def model_of(model):
    made = MeanTask()
    made.model = model
    return made


def frozen():
    made = MeanTask()
    made.model.requires_grad_(False)
    return made


def outside(register):
    """A task with a layer that is used by the loss, and not part of the model."""
    made = task(train_step=lambda self, batch: F.cross_entropy(register.get(self)(self.model(batch[0])), batch[1]))
    register.set(made)
    return made


class Attribute:
    def set(self, made):
        made.head = nn.Linear(3, 3, dtype=torch.float64)

    def get(self, made):
        return made.head


class Listed(Attribute):
    def set(self, made):
        made.model.heads = [nn.Linear(3, 3, dtype=torch.float64)]

    def get(self, made):
        return made.model.heads[0]


def frozen_norm():
    """A BatchNorm that was frozen in eval mode keeps its statistics."""
    norm = nn.BatchNorm1d(4, dtype=torch.float64).requires_grad_(False).eval()
    before = norm.running_mean.clone()
    fit(MeanTask(nn.Sequential(norm, mlp())))
    return torch.equal(before, norm.running_mean) and not norm.training


def frozen_teacher():
    """A frozen teacher in eval mode stays there; the student does not."""
    made = MeanTask(nn.Sequential(mlp(), nn.Dropout(0.1)))
    made.teacher = nn.Sequential(mlp(), nn.Dropout(0.5)).requires_grad_(False).eval()
    fit(made)
    return not made.teacher[1].training and made.model[1].training


TASKS = [
    row("no model", lambda: build(Unnamed()), BadArgument, "Unnamed to have a `model`", "self.model = self.net"),
    row("a model as a class", lambda: build(model_of(nn.Identity)), BadArgument, "the class Identity", "Identity(...)"),
    row(
        "a model as a function",
        lambda: build(model_of(lambda x: x)),
        BadArgument,
        "model to be an nn.Module",
        "function",
    ),
    row(
        "a model alone", lambda: build(mlp()), BadArgument, "Sequential", "A model alone does not say what its loss is"
    ),
    row("a task as a class", lambda: build(MeanTask), BadArgument, "the class MeanTask", "Write MeanTask(...)"),
    row("a task of Lightning", lambda: build(Lightning()), BadArgument, "Rename training_step to train_step(batch)"),
    row(
        "batch_idx",
        lambda: build(task(train_step=lambda self, batch, batch_idx: 0)),
        BadArgument,
        "Own.train_step to take (batch)",
        "received train_step(batch, batch_idx)",
    ),
    row(
        "a hook with other arguments",
        lambda: build(task(on_epoch_end=lambda self, epoch: None)),
        BadArgument,
        "Own.on_epoch_end to take (epoch, metrics)",
        "on_epoch_end(epoch)",
    ),
    row(
        "a hook that is never called",
        lambda: build(task(on_train_start=lambda self: None)),
        "warns",
        "Own.on_train_start is never called",
        "'on_train_begin'",
    ),
    row("all parameters frozen", lambda: build(frozen()), BadArgument, "every parameter has requires_grad=False"),
    row(
        "settings that do not exist",
        lambda: build(task(training_defaults=lambda self, s, c: {"learning_rate": 1})),
        BadArgument,
        "training_defaults",
        "learning_rate",
    ),
    row(
        "a layer beside the model",
        lambda: fit(outside(Attribute())),
        "warns",
        "2 trainable tensors that no optimizer holds",
        "head.weight, head.bias",
    ),
    row("layers in a plain list", lambda: fit(outside(Listed())), "warns", "one of shape (3, 3)", "nn.ModuleList"),
    row(
        "check() of a layer beside the model",
        lambda: "head.weight" in str(build(outside(Attribute())).check().warnings),
        "warns",
        "head.weight",
    ),
    row("a frozen BatchNorm", frozen_norm, "works"),
    row("a frozen teacher", frozen_teacher, "works"),
]


# -- optimizers --------------------------------------------------------------------------------------------


def sgd(parameters):
    return torch.optim.SGD(list(parameters), lr=0.1)


def replaced_model():
    made = MeanTask()
    optimizer = sgd(made.model.parameters())
    made.model = copy.deepcopy(made.model)
    return build(made, optimizer=optimizer)


def with_optimizer(choose, run=build):
    made = MeanTask()
    return run(made, optimizer=sgd(choose(made.model)))


OPTIMIZERS = [
    row(
        "an optimizer of another model",
        lambda: build(optimizer=sgd(mlp().parameters())),
        BadArgument,
        "parameters of the model that is trained",
        "SGD over 4 others",
        "would never change",
    ),
    row("an optimizer of a copied model", replaced_model, BadArgument, "SGD over 4 others"),
    row(
        "a factory that ignores the groups",
        lambda: build(optimizer=lambda groups: sgd(mlp().parameters())),
        BadArgument,
        "SGD over 4 others",
    ),
    row(
        "an optimizer with parameters of another model",
        lambda: with_optimizer(lambda model: [*model.parameters(), *mlp().parameters()]),
        "warns",
        "SGD holds 4 tensors that no module of MeanTask has",
    ),
    row(
        "an optimizer of the last layer",
        lambda: with_optimizer(lambda model: model[2].parameters()),
        "warns",
        "SGD holds 2 of the 4 trainable tensors",
        "0.weight, 0.bias",
    ),
    row("an optimizer of all parameters", lambda: with_optimizer(lambda model: model.parameters(), fit), "works"),
    row(
        "no optimizer", lambda: build(optimizer=None), BadArgument, "optimizer to be a name, a factory or an Optimizer"
    ),
    row("an option that does not exist", lambda: build(optimizer={"name": "adamw", "beta": 1}), BadArgument, "'betas'"),
    row(
        "the learning rate as an option", lambda: build(optimizer={"name": "adamw", "lr": 1}), BadArgument, "Pass lr to"
    ),
    row(
        "a scheduler factory that returns nothing",
        lambda: fit(scheduler=lambda optimizer: None),
        BadArgument,
        "scheduler",
        "None",
    ),
]


# -- steps -------------------------------------------------------------------------------------------------


def backward(self, batch):
    loss = loss_of(self, batch)
    loss.backward()
    return loss


def unreduced(self, batch):
    return F.cross_entropy(self.model(batch[0]), batch[1], reduction="none")


TRAIN_STEPS = [
    row(
        "a dict", lambda: training(lambda s, b: {"loss": loss_of(s, b)}), BadArgument, "'dict'", "Return output['loss']"
    ),
    row("a tuple", lambda: training(lambda s, b: (loss_of(s, b), 1)), BadArgument, "'tuple'", "Return the loss alone"),
    row("nothing", lambda: training(lambda s, b: None), BadArgument, "'NoneType'", "lack a return"),
    row("loss.item()", lambda: training(lambda s, b: loss_of(s, b).item()), BadArgument, "'float'", "not loss.item()"),
    row("a detached loss", lambda: training(lambda s, b: loss_of(s, b).detach()), BadArgument, "require gradients"),
    row(
        "a loss under no_grad",
        lambda: training(torch.no_grad()(lambda self, batch: loss_of(self, batch))),
        BadArgument,
        "under no_grad",
    ),
    row("a loss per sample", lambda: training(unreduced), BadArgument, "a tensor of shape (8,)", "Take the mean"),
    row("backward()", lambda: training(backward), RuntimeError, "the trainer calls backward() itself"),
    row(
        "a metric per sample",
        lambda: training(lambda s, b: Loss(loss_of(s, b) * 8, 8, {"hits": torch.ones(8)})),
        BadArgument,
        "metric 'hits' of the loss to be a scalar",
        "(8,)",
    ),
    row(
        "a metric called loss",
        lambda: training(lambda s, b: Loss(loss_of(s, b), 8, {"loss": 1.0})),
        BadArgument,
        "'loss'",
    ),
    row(
        "a loss that is NaN", lambda: training(lambda s, b: loss_of(s, b) * float("nan")), ArithmeticError, "at step 1"
    ),
]


# -- callbacks ---------------------------------------------------------------------------------------------


def callback(**members):
    return type("Own", (), members)()


def nothing(self, trainer, *args):
    """A hook with any arguments."""


CALLBACKS = [
    row("a single callback", lambda: len(run_callbacks(EarlyStopping())) == 1, "works"),
    row("a name instead of a list", lambda: len(run_callbacks("early_stopping")) == 1, "works"),
    row("a callback as a class", lambda: build(callbacks=[EarlyStopping]), BadArgument, "Write EarlyStopping()"),
    row("a misspelled name", lambda: build(callbacks=["early_stoping"]), BadArgument, "'early_stopping'"),
    row(
        "a hook of Lightning",
        lambda: build(callbacks=[callback(on_train_start=nothing, on_log=nothing)]),
        "warns",
        "Own.on_train_start is never called",
        "'on_train_begin'",
    ),
    row(
        "a misspelled hook",
        lambda: build(callbacks=[callback(on_step_ends=nothing, on_log=nothing)]),
        "warns",
        "Own.on_step_ends is never called",
        "'on_step_end'",
    ),
    row(
        "only hooks of Lightning",
        lambda: build(callbacks=[callback(on_train_batch_end=nothing)]),
        BadArgument,
        "a callback with at least one of",
        "It has on_train_batch_end. Did you mean 'on_step_end'?",
    ),
    row(
        "a hook that fails at the end",
        lambda: build(callbacks=[callback(on_train_end=lambda self: None)]),
        BadArgument,
        "Own.on_train_end to take (trainer)",
        "received on_train_end()",
    ),
    row("a function", lambda: build(callbacks=[lambda trainer: None]), BadArgument, "a callback with at least one of"),
    row(
        "compute_metrics returns a vector",
        lambda: fit(callbacks=[callback(compute_metrics=lambda s, t, m: {"x": torch.ones(2)})], val_split=0.25),
        BadArgument,
        "Own.compute_metrics to return a number as 'x'",
    ),
    row(
        "a metric that is not there",
        lambda: fit(callbacks=[EarlyStopping("val/acc", mode="max")], val_split=0.25),
        BadArgument,
        "'val/acc'",
        "Did you mean 'val/accuracy'",
    ),
]


def run_callbacks(callbacks):
    from trainformer.run import run_of

    return run_of(build(callbacks=callbacks, val_split=0.25)).callbacks


@pytest.mark.parametrize("mistake", [*TASKS, *OPTIMIZERS, *TRAIN_STEPS, *CALLBACKS])
def test_mistake(mistake, caplog):
    text = text_for(mistake, caplog)
    assert [words for words in mistake.words if words not in text] == [], text
