"""Whole runs of image classification: what `recipe="modern"` sets, freezing, when mixing stops, EMA compared."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import numpy as np
import pytest
import timm
import torch
from torch import Tensor, nn
from torch.utils.data import IterableDataset, TensorDataset

from trainformer import Trainer
from trainformer.callbacks import EMA
from trainformer.core import BadArgument
from trainformer.data import DatasetInfo
from trainformer.loggers import read_jsonl
from trainformer.run import RunSettings, run_of
from trainformer.tasks import ImageClassification
from trainformer.tasks.vision.recipes import recipe_arguments, recipe_settings

SMALL = "test_resnet"


class Tiny(nn.Module):
    """Logits of small images, with a BatchNorm."""

    def __init__(self, classes: int = 3) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 4, 3, stride=2), nn.BatchNorm2d(4), nn.ReLU(), nn.AdaptiveAvgPool2d(1))
        self.head = nn.Linear(4, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.head(self.body(images).flatten(1))


def pictures(count: int = 24, side: int = 16, classes: int = 3) -> TensorDataset:
    generator = torch.Generator().manual_seed(3)
    images = torch.randint(0, 256, (count, 3, side, side), dtype=torch.uint8, generator=generator)
    return TensorDataset(images, torch.arange(count) % classes)


def trainer_of(task: Any, data: Any = None, **options: Any) -> Trainer:
    defaults = {"epochs": 2, "batch_size": 8, "log": "none", "save_best": 0, "run_dir": "run", "resume": None}
    return Trainer(task, data if data is not None else pictures(), **{**defaults, **options})


# -- the recipe --------------------------------------------------------------------------------------------


def test_recipe_sets_what_was_left_out() -> None:
    task = ImageClassification("resnet50", 10, False, recipe="modern")
    assert (task.augment, task.mixup, task.cutmix) == ("randaugment", 0.8, 1.0)
    assert (task.random_erasing, task.label_smoothing, task.mixup_off_last) == (0.25, 0.1, 0.1)
    assert ImageClassification("resnet50", 10, False).mixup == 0.0


def test_whatever_was_passed_wins_even_if_it_is_the_default() -> None:
    task = ImageClassification("resnet50", 10, False, recipe="modern", mixup=0.0, augment="trivial")
    assert (task.mixup, task.augment, task.cutmix) == (0.0, "trivial", 1.0)
    task.configure(DatasetInfo(num_classes=10, input_shape=(1, 28, 28)))
    assert (task.mixup, task.augment, task.cutmix) == (0.0, "trivial", 0.0)


def test_what_was_changed_since_wins_too() -> None:
    task = ImageClassification(Tiny(10), 10, recipe="modern")
    task.mixup = 0.5
    task.configure(DatasetInfo(num_classes=10, input_shape=(1, 28, 28)))
    assert (task.mixup, task.augment) == (0.5, "crop")


@pytest.mark.parametrize(
    ("shape", "options", "augment"),
    [
        ((1, 8, 8), {}, "crop"),
        ((28, 28), {}, "crop"),
        ((64, 64, 3), {}, "crop"),
        ((3, 96, 96), {}, "randaugment"),
        ((3, 96, 96), {"image_size": 32}, "crop"),
        (None, {}, "randaugment"),
    ],
)
def test_small_images_are_treated_gently(shape: Any, options: dict[str, Any], augment: str) -> None:
    task = ImageClassification(Tiny(10), 10, recipe="modern", **options)
    task.configure(DatasetInfo(num_classes=10, input_shape=shape))
    assert task.augment == augment
    assert task.mixup == (0.2 if augment == "crop" else 0.8)


@pytest.mark.parametrize(
    ("backbone", "rate"),
    [("test_vit", 0.1), ("test_convnext", 0.1), (SMALL, 0.05), ("vgg11", None), ("mobilenetv3_small_050", None)],
)
def test_drop_path_goes_by_the_kind_of_model(backbone: str, rate: float | None) -> None:
    from timm.layers import DropPath

    task = ImageClassification(backbone, 3, False, recipe="modern", image_size=32 if backbone == "test_vit" else None)
    assert task.drop_path_rate == rate
    if rate is not None:
        found = [part.drop_prob for part in task.model.modules() if isinstance(part, DropPath)]
        assert max(found) == pytest.approx(rate)
    chosen = ImageClassification(backbone, 3, False, recipe="modern", drop_path_rate=None)
    assert chosen.drop_path_rate is None


def test_everything_in_the_recipe_is_an_argument_or_a_setting() -> None:
    names = set(ImageClassification.__dataclass_fields__)
    for size in (None, (32, 32)):
        assert set(recipe_arguments("modern", "resnet50", size)) <= names
    for pretrained in (True, False):
        for backbone in ("resnet50", "vit_small", Tiny()):
            settings = recipe_settings("modern", backbone, pretrained, 64)
            assert set(settings) <= {*RunSettings.defaults(), "ema"}


def test_recipe_sets_the_run_where_the_user_did_not() -> None:
    def run(**options: Any) -> Trainer:
        return trainer_of(ImageClassification(SMALL, 3, False, recipe="modern"), **options)

    trainer = run(batch_size=16, accumulation_steps=4)
    assert trainer.lr == pytest.approx(3e-3 * (64 / 1024) ** 0.5)
    assert (trainer.weight_decay, trainer.scheduler, trainer.warmup_ratio) == (0.05, "cosine", 0.05)
    assert isinstance(trainer.active_optimizer, torch.optim.AdamW)
    assert run(batch_size=4).lr == pytest.approx(trainer.lr / 4)
    chosen = run(lr=1e-4, weight_decay=0.01, scheduler="onecycle")  # defaults, passed on purpose
    assert (chosen.lr, chosen.weight_decay, chosen.scheduler) == (1e-4, 0.01, "onecycle")
    plain = trainer_of(ImageClassification(Tiny(), 3))
    assert {name: getattr(plain, name) for name in ("lr", "weight_decay", "scheduler")} == {
        name: RunSettings.defaults()[name] for name in ("lr", "weight_decay", "scheduler")
    }


def test_what_is_known_already_is_trained_with_care() -> None:
    scratch, known = (recipe_settings("modern", "vit_small", pretrained, 256) for pretrained in (False, True))
    assert known == scratch | {"layer_decay": 0.75}
    scratch, known = (recipe_settings("modern", "resnet50", pretrained, 256) for pretrained in (False, True))
    assert known == scratch | {"lr": pytest.approx(scratch["lr"] / 5)}
    weights = timm.create_model("test_vit", num_classes=0, in_chans=3).state_dict()
    task = ImageClassification("test_vit", 3, False, recipe="modern", checkpoint=weights, augment="none")
    trainer = trainer_of(task, pictures(8, side=160))
    assert len({group["lr"] for group in trainer.active_optimizer.param_groups}) > 2


# -- when mixing stops -------------------------------------------------------------------------------------


class Watched(ImageClassification):
    """Notes for every epoch whether its steps were mixed."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.seen: dict[int, set[bool]] = {}

    def train_step(self, batch: Any) -> Any:
        self.seen.setdefault(self._epoch, set()).add(self._mixes())
        return super().train_step(batch)

    @property
    def mixed(self) -> list[bool]:
        assert all(len(values) == 1 for values in self.seen.values())
        return [next(iter(self.seen[epoch])) for epoch in sorted(self.seen)]


def watched(**options: Any) -> Watched:
    return Watched(Tiny(), 3, mixup=1.0, augment="none", **options)


@pytest.mark.parametrize(
    ("last", "run", "want"),
    [
        (2, {"epochs": 5}, [True] * 3 + [False] * 2),
        (9, {"epochs": 3}, [False] * 3),
        (0.25, {"epochs": 5}, [True] * 3 + [False] * 2),
        (0.1, {"epochs": 3}, [True, True, False]),
        (1, {"max_steps": 9}, [True, True, False]),
        (1, {"max_steps": 7}, [True, True, False]),  # the last epoch is not a whole one
        (1, {"max_steps": 3, "accumulation_steps": 2}, [True, False]),
        (1, {"max_steps": 4, "batch_size": 10, "drop_last": True}, [True, False]),
        (0, {"epochs": 2}, [True, True]),
    ],
)
def test_mixing_stops_for_the_last_epochs(last: float, run: dict[str, Any], want: list[bool]) -> None:
    task = watched(mixup_off_last=last)
    trainer_of(task, **run).fit()
    assert task.mixed == want


def test_a_run_that_is_extended_mixes_again() -> None:
    task = watched(mixup_off_last=1)
    trainer = trainer_of(task, epochs=2).fit()
    assert task.mixed == [True, False]
    trainer.epochs = 5
    trainer.fit()
    assert task.mixed == [True, False, True, True, False]


def test_both_ends_hold() -> None:
    task = watched(mixup_off_epoch=1, mixup_off_last=1)
    trainer_of(task, epochs=4).fit()
    assert task.mixed == [True, False, False, False]


@pytest.mark.parametrize("augment", ["basic", "trivial"])  # on the device, and image by image
def test_a_resumed_run_is_the_same_run(augment: str) -> None:
    tasks = []
    for _ in range(3):
        torch.manual_seed(0)
        tasks.append(Watched(Tiny(), 3, mixup=0.8, cutmix=1.0, mixup_off_last=2, augment=augment, random_erasing=0.5))
    whole, first, rest = tasks
    trainer_of(whole, epochs=4).fit()
    trainer_of(first, epochs=4, run_dir="b", callbacks=[StopAt(4)]).fit().save("four.pt")  # amid the second epoch
    trainer_of(rest, epochs=4, run_dir="c", resume="four.pt").fit()
    assert first.mixed + rest.mixed[1:] == whole.mixed == [True, True, False, False]
    ended, want = rest.model.state_dict(), whole.model.state_dict()
    assert all(torch.equal(ended[name], want[name]) for name in want)


class StopAt:
    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        if step == self.step:
            trainer.stop("enough")


def test_data_without_a_length_need_epochs() -> None:
    class Stream(IterableDataset):
        def __iter__(self) -> Any:
            images, labels = pictures().tensors
            yield from zip(images, labels, strict=True)

    with pytest.raises(BadArgument, match=r"data with a length for mixup_off_last.*Pass mixup_off_epoch"):
        trainer_of(watched(mixup_off_last=1), Stream(), max_steps=4).fit()
    task = watched(mixup_off_last=1)
    trainer_of(task, Stream(), epochs=2, scheduler=None).fit()
    assert task.mixed == [True, False]


def test_a_copy_of_a_task_has_nothing_of_its_run() -> None:
    task = ImageClassification(Tiny(), 3, recipe="modern", mixup=0.3)
    trainer_of(task)
    for twin in (copy.deepcopy(task), pickle.loads(pickle.dumps(task))):
        assert run_of(twin) is None
        assert twin.mixup == 0.3
        assert twin.model is not task.model
        twin.configure(DatasetInfo(num_classes=3, input_shape=(3, 16, 16)))
        assert twin.mixup == 0.3  # what was passed is still known


# -- a frozen backbone -------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_name", [True, False])
def test_a_frozen_backbone_does_not_move(by_name: bool) -> None:
    backbone: Any = SMALL if by_name else timm.create_model(SMALL, num_classes=3)
    task = ImageClassification(backbone, 3, False, freeze_backbone=True, augment="basic")
    trainer = trainer_of(task, val_data=pictures(6), lr=0.1)
    before = {name: value.clone() for name, value in task.model.state_dict().items()}
    assert any("running_mean" in name for name in before)
    optimized = {id(p) for group in trainer.active_optimizer.param_groups for p in group["params"]}
    assert optimized == {id(p) for p in task.model.get_classifier().parameters()}  # type: ignore[operator]
    trainer.fit()
    changed = {name for name, value in task.model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"fc.weight", "fc.bias"}
    assert trainer.check(raise_on_failure=False).ok


def test_modes_of_a_frozen_backbone() -> None:
    task = ImageClassification(SMALL, 3, False, freeze_backbone=True)
    task.set_train_mode(True)
    assert [name for name, part in task.model.named_modules() if part.training] == ["fc"]
    task.set_train_mode(False)
    assert not any(part.training for part in task.model.modules())
    free = ImageClassification(SMALL, 3, False)
    free.set_train_mode(True)
    assert all(part.training for part in free.model.modules())
    free.set_train_mode(False)
    assert not any(part.training for part in free.model.modules())


def test_both_heads_of_a_distilled_model_are_trained() -> None:
    task = ImageClassification("deit_tiny_distilled_patch16_224", 3, False, freeze_backbone=True, image_size=32)
    trained = [name for name, p in task.model.named_parameters() if p.requires_grad]
    assert trained == ["head.weight", "head.bias", "head_dist.weight", "head_dist.bias"]


def test_a_module_without_a_known_classifier_cannot_be_frozen() -> None:
    with pytest.raises(BadArgument, match=r"a model with get_classifier.*'Tiny'.*requires_grad=False"):
        ImageClassification(Tiny(), 3, freeze_backbone=True)


# -- batches -----------------------------------------------------------------------------------------------


def test_a_last_batch_of_one_does_not_kill_batchnorm() -> None:
    task = ImageClassification("resnet10t", 3, False, image_size=32, augment="none")
    task.model.train()
    assert task.model.forward_features(torch.zeros(2, 3, 32, 32)).shape[-2:] == (1, 1)  # type: ignore[operator]
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        task.model(torch.zeros(1, 3, 32, 32))
    trainer = trainer_of(task, pictures(9), batch_size=8, epochs=1).fit()
    assert trainer.state.step == 2
    assert all(value.isfinite().all() for value in task.model.state_dict().values())


class Recording(ImageClassification):
    def __post_init__(self) -> None:
        super().__post_init__()
        self.batches: list[tuple[Tensor, Tensor]] = []

    def train_step(self, batch: Any) -> Any:
        self.batches.append(batch)
        return super().train_step(batch)


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize("augment", ["basic", "crop", "trivial"])
def test_repeated_samples_of_a_batch_are_augmented_in_their_own_ways(augment: str, in_memory: bool) -> None:
    images, _ = pictures(12, side=32).tensors
    data = TensorDataset(images, torch.arange(12))  # the label tells which image it is
    task = Recording(Tiny(12), 12, augment=augment, random_erasing=0.5)
    trainer_of(task, data if in_memory else list(data), epochs=1, sampler="repeated:3", batch_size=12).fit()
    views, labels = task.batches[0]
    found, counts = np.unique(labels.numpy(), return_counts=True)
    assert counts.tolist() == [3, 3, 3, 3]
    for label in found:
        same = views[labels == label]
        assert len({tuple(view.flatten().tolist()) for view in same}) == 3


# -- EMA with its own evaluation ---------------------------------------------------------------------------


def test_ema_is_compared_with_the_trained_weights() -> None:
    val = pictures(12)
    task, ema = ImageClassification(Tiny(), 3, augment="none"), EMA(decay=0.99, warmup=False, compare=True)
    trainer = trainer_of(task, val_data=val, callbacks=[ema], lr=0.1).fit()
    logged = [row for row in read_jsonl(trainer.run_folder / "metrics.jsonl") if "val/loss" in row][-1]  # type: ignore[operator]

    def loss_of(model: nn.Module) -> float:
        judge = ImageClassification(model, 3)
        judge.set_train_mode(False)
        with torch.no_grad():
            total, count = judge.eval_step(tuple(val.tensors))["loss"]
        return float(total) / count

    assert ema.model is not None
    assert logged["val/loss"] == pytest.approx(loss_of(ema.model), rel=1e-5)
    assert logged["val/without_ema/loss"] == pytest.approx(loss_of(task.model), rel=1e-5)
    assert abs(logged["val/without_ema/loss"] - logged["val/loss"]) > 1e-3
    compared = {name.replace("without_ema/", "") for name in logged if "without_ema" in name}
    assert compared == {"val/loss", "val/accuracy", "val/f1", "val/ece"}
    plain = trainer_of(ImageClassification(Tiny(), 3), val_data=val, callbacks=[EMA()], run_dir="b").fit()
    assert not any("without_ema" in name for row in read_jsonl(plain.run_folder / "metrics.jsonl") for name in row)  # type: ignore[operator]


def test_nothing_to_compare_with_is_refused() -> None:
    with pytest.raises(BadArgument, match="EMA's compare with evaluate=True"):
        EMA(evaluate=False, compare=True)


# -- and it learns -----------------------------------------------------------------------------------------


class Digits(nn.Sequential):
    """Small enough for 8 x 8 pixels and for a test."""

    def __init__(self) -> None:
        layers: list[nn.Module] = []
        for before, after, stride in ((1, 16, 1), (16, 32, 2), (32, 64, 2)):
            layers += [nn.Conv2d(before, after, 3, stride, 1, bias=False), nn.BatchNorm2d(after), nn.ReLU()]
        super().__init__(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))


def accuracy_on_digits(task: ImageClassification, **options: Any) -> float:
    defaults = {"val_split": 0.2, "batch_size": 64, "eval_every": None, "callbacks": [EMA(decay=0.98)]}
    return trainer_of(task, "digits", **{**defaults, **options}).fit().evaluate()["val/accuracy"]


@pytest.mark.parametrize(
    ("options", "least"),
    [({"augment": "crop", "loss": "bce"}, 0.975), ({"recipe": "modern"}, 0.97)],
)
def test_digits_are_learned(options: dict[str, Any], least: float) -> None:
    torch.manual_seed(0)
    task = ImageClassification(Digits(), 10, **options)
    run = {} if "recipe" in options else {"lr": 1e-2}
    assert accuracy_on_digits(task, epochs=15, **run) >= least


@pytest.mark.slow
def test_a_backbone_learns_digits() -> None:
    task = ImageClassification(SMALL, pretrained=False, recipe="modern")
    assert accuracy_on_digits(task, epochs=15) >= 0.975
