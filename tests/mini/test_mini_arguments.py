"""Arguments and return values of a mini trainer, and errors for invalid ones."""

import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from mini_toys import Classifier, Teller, batches_of
from torch import nn
from torch.optim.swa_utils import AveragedModel
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from toys import classes
from trainformer.core.errors import BadArgument, DataError
from trainformer.mini import BaseTrainer, key_average, map_nested_tensor

# -- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"max_steps": 0}, "max_steps to be an integer of at least 1, received 0"),
        ({"max_steps": 2.5}, "max_steps"),
        ({"grad_clip": -1.0}, "grad_clip to be a positive number or None"),
        ({"max_non_finite_grad_retries": -1}, "max_non_finite_grad_retries"),
        ({"mixed_precision": "fp8"}, "mixed_precision to be 'fp16', 'bf16' or None, received 'fp8'"),
        ({"gradient_accumulation_steps": 0}, "gradient_accumulation_steps"),
        ({"device": "cuda:99"}, "Pass device='cpu', or device='auto'"),
        ({"device": "gpu"}, "device to be available on this machine, received 'gpu'"),
    ],
)
def test_invalid_arguments_are_refused(wrong, message):
    with pytest.raises(BadArgument, match=message):
        Classifier(**wrong)


def test_defaults():
    trainer = BaseTrainer(7, device="cpu")
    assert (trainer.max_steps, trainer.gradient_accumulation_steps, trainer.no_sync_accumulate) == (7, 1, True)
    assert trainer.workspace is trainer.grad_clip is trainer.mixed_precision is trainer.state_dict_options is None
    assert trainer.step == 0
    assert trainer.step_info == {}
    assert isinstance(trainer.logger, logging.Logger)
    assert trainer.device == torch.device("cpu")


def test_the_default_device_is_a_gpu_or_that_of_torch():
    assert BaseTrainer(7).device.type == ("cuda" if torch.cuda.is_available() else "cpu")
    assert BaseTrainer(7, device="auto").device.type in ("cuda", "mps", "cpu")


@pytest.mark.parametrize("method", ["build_data_loader", "build_model", "build_optimizer", "forward"])
def test_missing_methods_are_named(method):
    trainer = type("Mine", (Classifier,), {method: getattr(BaseTrainer, method)})(3)
    with pytest.raises(NotImplementedError, match=f"Expected Mine to implement {method}"):
        trainer.train()


@pytest.mark.parametrize(
    ("method", "value", "message"),
    [
        ("build_model", 3, "build_model\\(\\) to return a Module, received 'int'"),
        ("build_optimizer", None, "build_optimizer\\(\\) to return a Optimizer"),
        ("build_data_loader", 3, "an iterable, received 'int'"),
        ("build_data_loader", "folder", "an iterable, received 'str'"),
        ("build_hooks", None, "a list of hooks, received 'NoneType'"),
        ("build_hooks", [3], "a callback with at least one of"),
        ("build_hooks", [Teller], "the class Teller.*Write Teller"),
        ("forward", 3.0, "forward\\(\\) to return \\(loss, records\\), received 'float'"),
        ("forward", (torch.ones(()), {}, 1), "received 'a tuple of 3'"),
        ("forward", (torch.ones(2, requires_grad=True), {}), "a scalar tensor or None.*shape \\(2,\\)"),
        ("forward", (1.0, {}), "a scalar tensor or None as its loss, received 'float'"),
        ("forward", (None, [1]), "records as a dict, received 'list'"),
        ("forward", (None, {"a": {"b": "word"}}), "the record 'a.b' to be a number.*received 'str'"),
        ("forward", (None, {"a": torch.ones(3)}), "received 'a tensor of shape \\(3,\\)'"),
        ("forward", (torch.ones(()), {}), "depend on a trainable parameter"),
    ],
)
def test_invalid_return_values_are_refused(method, value, message):
    trainer = Classifier(3)
    setattr(trainer, method, lambda *args: value)
    with pytest.raises(BadArgument, match=message):
        trainer.train()


def test_records_may_be_any_numbers():
    trainer = Classifier(1)
    forward = trainer.forward
    records = {"a": 1, "b": np.float32(0.5), "c": True, "d": torch.ones(1, 1), "e": {"f": torch.tensor(2)}, "g": None}
    trainer.forward = lambda input: (forward(input)[0], records)
    trainer.train()
    assert key_average(trainer.step_info["records"]) == {"a": 1.0, "b": 0.5, "c": 1.0, "d": 1.0, "e": {"f": 2.0}}


# -- building ----------------------------------------------------------------------------------------------


def test_parts_are_built_once_in_order_or_on_first_use():
    built = []

    class Notes(Classifier):
        def __getattribute__(self, name):
            if name.startswith("build_"):
                built.append(name.removeprefix("build_"))
            return super().__getattribute__(name)

    trainer = Notes(2)
    trainer.train()
    trainer.max_steps = 3
    trainer.train()
    trainer.state_dict()
    assert built == ["data_loader", "model", "optimizer", "lr_scheduler", "grad_scaler", "hooks"]

    class Backwards(Notes):
        def build_data_loader(self):
            return [(x[:, : self.model[0].in_features], y) for x, y in batches_of()]

    built.clear()
    Backwards(2).train()
    assert built[:3] == ["data_loader", "model", "optimizer"]


def test_a_cycle_of_builders_is_named():
    class Circle(Classifier):
        def build_model(self):
            return nn.Linear(4, len(self.optimizer.param_groups))

    with pytest.raises(BadArgument, match=r"build_model\(\) -> build_optimizer\(\) -> build_model\(\)"):
        Circle(2).train()


def test_unknown_attributes_are_still_unknown():
    trainer = Classifier(2)
    with pytest.raises(AttributeError, match="'Classifier' object has no attribute 'modle'"):
        trainer.modle  # noqa: B018


def test_unwrapping_every_wrapper():
    inner = nn.Linear(2, 2)
    trainer = Classifier(2)
    compiled = torch.compile(nn.DataParallel(inner), backend="eager")
    average = AveragedModel(inner)
    assert trainer.unwrap(compiled) is inner
    assert trainer.unwrap(nn.DataParallel(average)) is average.module
    assert trainer.unwrap(inner) is inner


# -- data --------------------------------------------------------------------------------------------------


class Stream(IterableDataset):
    """Yields whole batches."""

    def __iter__(self):
        return iter(batches_of())


def first_values(trainer):
    return [x.flatten()[0].item() for x in trainer.seen]


@pytest.mark.parametrize(
    "make",
    [
        batches_of,
        lambda: tuple(batches_of()),
        lambda: DataLoader(TensorDataset(*classes(32)), batch_size=8),
        Stream,
        lambda: DataLoader(Stream(), batch_size=None),
        lambda: dict(enumerate(batches_of())).values(),
    ],
    ids=["list", "tuple", "DataLoader", "IterableDataset", "stream in a DataLoader", "view"],
)
def test_any_iterable_is_iterated_again(make):
    trainer = Classifier(7, batches=make(), workspace="ws")
    trainer.train()
    values = [x.flatten()[0].item() for x, _ in batches_of()]
    assert first_values(trainer) == [*values, *values[:3]]


def test_each_epoch_is_announced():
    class Told(list):
        epochs = ()

        def set_epoch(self, epoch):
            self.epochs = (*self.epochs, epoch)

    batches = Told(batches_of())
    Classifier(9, batches=batches).train()
    assert batches.epochs == (0, 1, 2)


def test_a_generator_may_be_endless_but_not_too_short():
    def forever():
        while True:
            yield from batches_of()

    trainer = Classifier(9, batches=forever())
    trainer.train()
    assert trainer.step == 9
    trainer = Classifier(9, batches=iter(batches_of()), workspace="ws")
    with pytest.raises(DataError, match=r"data for 9 steps, received data for 4.*ended after 4 batches"):
        trainer.train()
    assert trainer.step == 4
    assert '"failed"' in Path("ws/status.json").read_text()


def test_no_data_at_all():
    with pytest.raises(DataError, match="no batches"):
        Classifier(9, batches=[]).train()


def test_batches_of_any_form():
    class Odd(Classifier):
        def forward(self, input):
            return super().forward((input.x, input.y))

    class Batch:
        def __init__(self, x, y):
            self.x, self.y = x, y

    trainer = Odd(5, batches=[Batch(x, y) for x, y in batches_of()], workspace="ws")
    trainer.train()
    assert trainer.step == 5


def test_train_and_eval_modes_of_the_model_are_kept():
    class Frozen(nn.BatchNorm1d):
        def train(self, mode=True):
            return super().train(False)

    trainer = Classifier(2, model=nn.Sequential(nn.Linear(4, 3), Frozen(3)).double())
    trainer.train()
    assert trainer.model.training
    assert not trainer.model[1].training
    assert trainer.model[1].num_batches_tracked == 0


# -- utilities ---------------------------------------------------------------------------------------------


def test_averages_of_ragged_records():
    records = [{"a": 1.0, "n": {"x": torch.tensor(1.0)}}, {"a": torch.tensor(2), "b": 4}, {"a": None, "n": {"x": 3.0}}]
    assert key_average(records) == {"a": 1.5, "b": 4.0, "n": {"x": 2.0}}
    assert key_average([]) == {}
    assert np.isnan(key_average([{"a": float("inf")}, {"a": float("-inf")}])["a"])
    with pytest.raises(BadArgument, match="'a' to be a mapping in all records"):
        key_average([{"a": 1.0}, {"a": {"b": 1.0}}])
    with pytest.raises(BadArgument, match="'a' to be a value in all records"):
        key_average([{"a": {"b": 1.0}}, {"a": 1.0}])


def test_averages_are_exact():
    values = torch.randn(1000, dtype=torch.float64)
    mean = key_average([{"a": v} for v in values])["a"]
    assert mean == pytest.approx(values.mean().item(), rel=1e-12)


def test_mapping_over_tensors_keeps_everything_else():
    nested = {"a": (torch.ones(2), "word"), "b": [None, {"c": torch.zeros(1)}]}
    mapped = map_nested_tensor(lambda t: t.dtype, nested)
    assert mapped == {"a": (torch.float32, "word"), "b": [None, {"c": torch.float32}]}
