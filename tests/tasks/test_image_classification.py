"""Image classification against torch's own loss, timm, torchvision and scikit-learn, and how it takes bad input."""

from __future__ import annotations

import io
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import timm
import torch
from PIL import Image
from rich.console import Console
from torch import Tensor, nn
from torch.utils.data import DataLoader, Subset, TensorDataset, default_collate
from torchvision.transforms import v2

from trainformer.backends.torch.placement import Feeder
from trainformer.core import BadArgument, DataError
from trainformer.data import DatasetInfo, DatasetSource, ImageDataset, extract_info, load_images
from trainformer.data.fetcher import tensors_of
from trainformer.eval.calibration import expected_calibration_error
from trainformer.tasks import ImageClassification
from trainformer.tasks.base import Task, provides
from trainformer.tasks.classification_report import calibration_error
from trainformer.tasks.vision.batch import (
    Mixed,
    Normalize,
    RandomErasing,
    binary_cross_entropy,
    cross_entropy,
    mix,
    tta_views,
)

SMALL = "test_resnet"  # 0.4 million parameters


class Linear(nn.Module):
    """Logits of flattened images; small enough to be computed by hand."""

    def __init__(self, inputs: int = 12, classes: int = 5) -> None:
        super().__init__()
        self.layer = nn.Linear(inputs, classes)

    def forward(self, images: Tensor) -> Tensor:
        return self.layer(images.flatten(1))


def exact_task(**options: Any) -> ImageClassification:
    """A task in double precision over (3, 2, 2) images with five classes."""
    torch.manual_seed(1)
    return ImageClassification(Linear().double(), num_classes=5, **options)


def exact_batch(n: int = 12) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(2)
    return (
        torch.randn(n, 3, 2, 2, dtype=torch.float64, generator=generator),
        torch.randint(0, 5, (n,), generator=generator),
    )


def digits_task(**options: Any) -> ImageClassification:
    task = ImageClassification(options.pop("backbone", SMALL), pretrained=False, **options)
    task.configure(extract_info(load_images("digits")))
    return task


def pixels(*shape: int, seed: int = 0) -> Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes of images of unequal sizes and modes."""
    for i, (name, size) in enumerate(
        [("cat/1.png", (50, 40)), ("cat/2.png", (40, 70)), ("dog/1.png", (33, 33)), ("dog/2.png", (90, 45))]
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        array = np.random.default_rng(i).integers(0, 256, (*size, 3), dtype=np.uint8)
        Image.fromarray(array).convert("L" if i == 1 else "RGB").save(path)
    return tmp_path


# -- the model and its head --------------------------------------------------------------------------------


def test_unknown_backbones_are_refused_at_once() -> None:
    with pytest.raises(BadArgument, match=r"timm model, received 'resnt50'. Did you mean 'resnet50'"):
        ImageClassification("resnt50")
    with pytest.raises(BadArgument, match=r"received 'resnet18.nope'. Known for resnet18: .*a1_in1k"):
        ImageClassification("resnet18.nope", 10)


def test_model_is_there_as_soon_as_its_head_is_known() -> None:
    task = ImageClassification(SMALL, 7, False)
    assert isinstance(task, Task)
    assert task.model(torch.zeros(2, 3, 32, 32)).shape == (2, 7)


def test_without_classes_there_is_no_model_and_never_one_without_a_head() -> None:
    task = ImageClassification(SMALL, pretrained=False)
    assert isinstance(task, Task)
    assert list(task.parameters()) == []
    with pytest.raises(BadArgument, match="number of classes is not known yet"):
        task.train_step((torch.zeros(2, 3, 32, 32), torch.zeros(2, dtype=torch.long)))
    with pytest.raises(BadArgument, match=r"data that does not. Pass num_classes"):
        task.configure(DatasetInfo(num_samples=3, input_shape=(3, 32, 32)))
    with pytest.raises(DataError, match=r"at least two classes.*1 in the data"):
        task.configure(DatasetInfo(num_classes=1))


@pytest.mark.parametrize(
    ("backbone", "options"),
    [
        ("mobilenetv3_small_050", {}),
        ("resnet10t", {}),
        ("vit_tiny_patch16_224", {"image_size": 32}),
        ("vit_tiny_patch16_224", {"model_kwargs": {"img_size": 32}, "drop_path_rate": 0.1}),
        ("test_convnext", {"image_size": (32, 48), "drop_rate": 0.1}),
    ],
)
def test_head_and_channels_come_from_the_data(backbone: str, options: dict[str, Any]) -> None:
    digits = load_images("digits")
    task = ImageClassification(backbone, pretrained=False, augment="crop", **options)
    task.configure(extract_info(digits))
    assert task.class_names == list("0123456789")
    data = task.prepare_dataset(Subset(digits, range(8)), train=True)
    images, labels = default_collate([data[i] for i in range(8)])
    assert images.shape == (8, 1, *((32, 48) if options.get("image_size") == (32, 48) else (32, 32)))
    loss = task.train_step((task.get_train_transforms()(images), labels))
    loss.sum.backward()
    assert loss.sum.isfinite()
    assert loss.weight == 8
    assert all(p.grad is not None for p in task.parameters())
    assert task.eval_step((images, labels))["prediction"].shape == (8,)


def test_configuring_again_keeps_a_trained_model() -> None:
    task = digits_task()
    info = extract_info(load_images("digits"))
    model = task.model
    with torch.no_grad():
        next(iter(model.parameters())).add_(1)
    before = [p.clone() for p in model.parameters()]
    task.configure(info)
    task.configure(DatasetInfo(num_samples=5, num_classes=4, input_shape=(3, 32, 32)))
    assert task.model is model
    assert task.num_classes == 10
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


def test_channels_of_the_data_win_unless_the_weights_were_touched() -> None:
    info = extract_info(load_images("digits"))
    fresh = ImageClassification(SMALL, 10, False)
    fresh.configure(info)
    assert fresh.model(torch.zeros(2, 1, 32, 32)).shape == (2, 10)

    loaded = ImageClassification(SMALL, 10, False)
    loaded.model.load_state_dict(loaded.model.state_dict())
    model = loaded.model
    loaded.configure(info)
    assert loaded.model is model
    images, _ = loaded.prepare_dataset(load_images("digits"), train=False)[:4]
    assert images.shape == (4, 3, 32, 32)  # gray repeated, since the model has three channels
    assert loaded.eval_step((images, torch.zeros(4, dtype=torch.long)))["loss"][0].isfinite()


def test_given_channels_are_final() -> None:
    task = ImageClassification(SMALL, pretrained=False, in_chans=3)
    task.configure(extract_info(load_images("digits")))
    assert task.prepare_dataset(load_images("digits"), train=False)[0][0].shape == (3, 32, 32)


def test_more_classes_in_the_data_than_in_the_head() -> None:
    task = ImageClassification(SMALL, 5, False)
    with pytest.raises(BadArgument, match=r"num_classes to be at least 10.*received 5"):
        task.configure(extract_info(load_images("digits")))
    larger = ImageClassification(SMALL, 20, False)
    larger.configure(extract_info(load_images("digits")))
    assert larger.num_classes == 20


def test_modules_are_taken_as_they_are() -> None:
    module = Linear(classes=5)
    task = ImageClassification(module)
    task.configure(DatasetInfo(num_classes=5, input_shape=(3, 2, 2)))
    assert task.model is module
    assert task.predict_step(torch.zeros(2, 3, 2, 2))["probabilities"].shape == (2, 5)


def test_modules_must_give_as_many_logits_as_there_are_classes() -> None:
    built = timm.create_model(SMALL, num_classes=7)
    assert ImageClassification(built).num_classes == 7
    with pytest.raises(BadArgument, match=r"num_classes=7.*received 5"):
        ImageClassification(built, 5)
    with pytest.raises(BadArgument, match="without a head"):
        ImageClassification(timm.create_model(SMALL, num_classes=0), 5)
    with pytest.raises(BadArgument, match=r"shape \(batch, 9\).*received 'shape \(12, 5\)'"):
        ImageClassification(Linear().double(), 9).train_step(exact_batch())


def test_record_with_logits_is_unpacked() -> None:
    class Record(nn.Module):
        def forward(self, images: Tensor) -> Any:
            return type("Output", (), {"logits": images.flatten(1)[:, :3]})()

    assert ImageClassification(Record(), 3).predict_step(torch.zeros(2, 3, 2, 2))["prediction"].shape == (2,)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"label_smoothing": 1.5}, "label_smoothing to be from 0 to 1, received 1.5"),
        ({"mixup": -1}, "mixup to be at least 0, received -1"),
        ({"random_erasing": 2}, "random_erasing"),
        ({"mixup_prob": 1.5}, "mixup_prob to be from 0 to 1"),
        ({"mixup_off_last": -1}, "mixup_off_last to be at least 0"),
        ({"loss": "bec"}, r"'ce', 'bce', received 'bec'. Did you mean"),
        ({"loss": "bce", "class_weights": "balanced"}, r"class_weights with loss='ce'.*sampler='balanced'"),
        ({"bce_sum": True}, "bce_sum with loss='bce'"),
        ({"bce_target_threshold": 0.2}, "bce_target_threshold and bce_sum with loss='bce'"),
        ({"tta": "flop"}, "tta to be 'flip' or a number of views up to 64"),
        ({"tta": True}, "tta to be 'flip'"),
        ({"topk": (1, 0)}, "topk to be some positive integers"),
        ({"topk": 5}, "topk to be some positive integers"),
        ({"recipe": "modren"}, "recipe to be one of 'modern', received 'modren'. Did you mean 'modern'"),
        ({"num_classes": 0}, "num_classes to be at least 1"),
        ({"augment": "bassic"}, "Did you mean 'basic'"),
        ({"image_size": -3}, "image_size to be a positive integer"),
        ({"image_size": (1, 2, 3)}, "image_size"),
        ({"image_size": 64, "model_kwargs": {"img_size": 32}}, "agree with model_kwargs"),
        ({"class_weights": "balancd"}, "'balanced', a list of numbers or None, received 'balancd'"),
        ({"num_classes": 3, "class_weights": [1, 2]}, "class_weights to be 3 numbers"),
        ({"num_classes": 2, "class_weights": [1, -2]}, "none negative"),
        ({"num_classes": 2, "model_kwargs": {"no_such_option": 1}}, "passed on: no_such_option"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        assert ImageClassification(SMALL, **{"pretrained": False, **options}).model  # built when it is asked for


@pytest.mark.parametrize("channels", [3, 1])
def test_pretrained_weights_are_loaded_and_the_head_replaced(tmp_path: Path, channels: int) -> None:
    """timm's real loading path, from a file: the hub is not reached in tests."""
    source = timm.create_model(SMALL, num_classes=1000)
    torch.save(source.state_dict(), tmp_path / "weights.pth")
    overlay = {"pretrained_cfg_overlay": {"file": str(tmp_path / "weights.pth")}}
    task = ImageClassification(SMALL, in_chans=channels, model_kwargs=overlay)
    task.configure(DatasetInfo(num_classes=4, input_shape=(channels, 32, 32)))
    ours, theirs = task.model.state_dict(), source.state_dict()
    first = next(name for name, value in theirs.items() if value.ndim == 4)
    assert ours["fc.weight"].shape == (4, theirs["fc.weight"].shape[1])
    for name in theirs.keys() - {"fc.weight", "fc.bias"}:
        want = theirs[name].sum(1, keepdim=True) if name == first and channels == 1 else theirs[name]
        assert torch.equal(ours[name], want), name


def test_missing_pretrained_weights_say_what_to_do(tmp_path: Path) -> None:
    overlay = {"pretrained_cfg_overlay": {"file": str(tmp_path / "nowhere.pth")}}
    with pytest.raises(BadArgument, match=r"pretrained weights of 'test_resnet'.*Pass pretrained=False"):
        assert ImageClassification(SMALL, 4, model_kwargs=overlay).model


# -- normalising -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backbone", ["resnet10t", "vit_tiny_patch16_224"])
def test_pixels_are_normalised_as_torchvision_does_it(backbone: str) -> None:
    task = ImageClassification(backbone, 3, False, image_size=32)
    config = timm.data.resolve_model_data_config(task.model)
    want = v2.Compose([v2.ToDtype(torch.float32, scale=True), v2.Normalize(config["mean"], config["std"])])
    images = pixels(4, 3, 8, 8)
    for transform in (task.get_eval_transforms(), task.get_train_transforms()):
        torch.testing.assert_close(transform(images), want(images), rtol=1e-5, atol=1e-6)


def test_normalising_twice_is_normalising_once() -> None:
    normalize = Normalize((0.485, 0.456, 0.406), (0.229, 0.224, 0.225))
    once = normalize(pixels(2, 3, 4, 4))
    assert torch.equal(normalize(once), once)
    assert list(normalize.state_dict()) == []

    task = digits_task()
    task.model.eval()
    data = task.prepare_dataset(load_images("digits"), train=False)
    raw, labels = data[:16]
    assert raw.dtype == torch.uint8
    placed = task.get_eval_transforms()(raw)
    first, second = task.eval_step((raw, labels)), task.eval_step((placed, labels))
    assert torch.equal(first["loss"][0], second["loss"][0])
    assert torch.equal(first["loss"][0], task.eval_step((task.get_eval_transforms()(placed), labels))["loss"][0])


def test_gray_images_get_the_average_statistics() -> None:
    images = pixels(2, 1, 4, 4)
    got = Normalize((0.4, 0.5, 0.6), (0.1, 0.2, 0.3))(images)
    torch.testing.assert_close(got, (images / 255 - 0.5) / 0.2)


def test_float_images_are_ready_and_left_alone() -> None:
    data = TensorDataset(torch.randn(6, 3, 32, 32), torch.arange(6))
    task = ImageClassification(SMALL, 6, False, augment="randaugment")
    assert task.prepare_dataset(data, train=True) is data
    images = data.tensors[0]
    assert task.get_train_transforms()(images) is images


def test_float_images_of_other_forms_become_tensors() -> None:
    task = ImageClassification(SMALL, 6, False)
    image = np.random.default_rng(0).normal(size=(32, 40, 3))
    for sample in ((image, 1), {"pixel_values": image.transpose(2, 0, 1), "label": 1}):
        got, label = task.prepare_dataset([sample], train=True)[0]
        assert label == 1
        assert np.array_equal(got.numpy(), image.transpose(2, 0, 1).astype(np.float32))


# -- datasets ----------------------------------------------------------------------------------------------


def test_evaluation_data_in_memory_are_plain_tensors_of_the_right_size() -> None:
    task, digits = digits_task(), load_images("digits")
    fast = task.prepare_dataset(Subset(digits, range(20, 40)), train=False)
    tensors = tensors_of(fast)
    assert tensors is not None  # read by one index operation per batch
    assert tensors[0].shape == (20, 1, 32, 32)
    assert tensors[0].dtype == torch.uint8
    slow = task.prepare_dataset([digits[i] for i in range(20, 40)], train=False)
    assert isinstance(slow, ImageDataset)
    for i in range(20):
        assert torch.equal(slow[i][0], tensors[0][i])
        assert slow[i][1] == tensors[1][i]


def test_tensors_that_fit_are_not_copied() -> None:
    data = TensorDataset(pixels(10, 3, 40, 40), torch.arange(10) % 2)
    task = ImageClassification(SMALL, 2, False, augment=None)
    prepared = task.prepare_dataset(data, train=True)
    assert tensors_of(prepared)[0].data_ptr() == data.tensors[0].data_ptr()  # type: ignore[index]
    assert prepared.targets is data.tensors[1]


def test_sizes_follow_the_data_unless_given(folder: Path) -> None:
    small, large = TensorDataset(pixels(4, 3, 16, 20)), TensorDataset(pixels(4, 3, 40, 50))

    def size(data: Any, **options: Any) -> tuple[int, int]:
        task = ImageClassification(options.pop("backbone", SMALL), num_classes=2, pretrained=False, **options)
        sample = task.prepare_dataset(data, train=False)[0]
        return tuple((sample[0] if isinstance(sample, tuple) else sample).shape[-2:])

    own = timm.data.resolve_model_data_config(timm.create_model(SMALL))["input_size"][1:]
    assert size(large) == (40, 50)
    assert size(small) == (32, 40)  # enlarged evenly to 32
    assert size(small, backbone=Linear()) == (16, 20)  # a module of the user's: no opinion
    assert size(load_images(folder)) == own
    assert size(large, backbone="vit_tiny_patch16_224") == (224, 224)  # its positions are made for that
    assert size(large, image_size=24) == (24, 24)
    assert size(load_images(folder), image_size=(24, 36)) == (24, 36)


def test_size_of_training_holds_for_files_too(folder: Path) -> None:
    """A model trained on tensors of 32 pixels predicts on files at 32 pixels, in another process as well."""
    task = digits_task()
    task.prepare_dataset(load_images("digits"), train=True)
    assert task.prepare_dataset(load_images(folder, channels=1), train=False)[0][0].shape == (1, 32, 32)
    other = digits_task()
    other.load_state_dict(json.loads(json.dumps(task.state_dict())))
    assert other.prepare_dataset(load_images(folder, channels=1), train=False)[0][0].shape == (1, 32, 32)
    chosen = digits_task(image_size=48)
    chosen.load_state_dict(task.state_dict())
    assert chosen.prepare_dataset(load_images(folder, channels=1), train=False)[0][0].shape == (1, 48, 48)


@pytest.mark.parametrize("size", [64, (48, 80)])
@pytest.mark.parametrize("backbone", ["resnet10t", "vit_tiny_patch16_224"])
def test_files_are_evaluated_as_timm_does_it(folder: Path, backbone: str, size: Any) -> None:
    task = ImageClassification(backbone, 2, False, image_size=size)
    config = timm.data.resolve_model_data_config(task.model)
    config["input_size"] = (3, *((size, size) if isinstance(size, int) else size))
    reference = timm.data.create_transform(**config, is_training=False)
    ours, normalize = task.prepare_dataset(load_images(folder), train=False), task.get_eval_transforms()
    for i, (image, _) in enumerate(load_images(folder)):
        got, want = normalize(ours[i][0]), reference(image)
        assert got.shape == want.shape
        if isinstance(size, int):  # of oblong sizes timm takes another middle
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_folder_by_path_trains_and_predicts(folder: Path) -> None:
    task = ImageClassification(SMALL, pretrained=False, image_size=32)
    data = task.load_data(str(folder))
    task.configure(extract_info(data))
    assert (task.num_classes, task.class_names) == (2, ["cat", "dog"])
    images, labels = next(iter(DataLoader(task.prepare_dataset(data, train=True), batch_size=4)))
    assert images.dtype == torch.uint8
    assert task.train_step((images, labels)).sum.isfinite()
    # No labels: batches of images alone, with torch's own collation.
    flat = task.prepare_dataset(task.load_data(str(folder / "dog")), train=False)
    assert not provides(task, "collate_fn")
    rows = task.predict_step(next(iter(DataLoader(flat, batch_size=2))))
    assert rows["prediction"].shape == (2,)


def test_images_without_labels_cannot_be_trained_or_evaluated_on(folder: Path) -> None:
    task = ImageClassification(SMALL, 2, False)
    with pytest.raises(DataError, match=r"images alone. For a folder: The expected layout"):
        task.prepare_dataset(task.load_data(str(folder / "dog")), train=True)
    with pytest.raises(DataError, match="received images alone"):
        task.eval_step(torch.zeros(2, 3, 32, 32))
    unsized = ImageClassification(SMALL, pretrained=False)
    with pytest.raises(BadArgument, match=r"Pass num_classes, or data with labels. For a folder"):
        unsized.configure(extract_info(task.load_data(str(folder / "dog"))))


def test_preparing_draws_no_random_numbers() -> None:
    class Random(list[Any]):
        def __getitem__(self, index: Any) -> Any:
            return torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8), 0

    task = ImageClassification(SMALL, 2, False)
    assert task.model  # whose weights are random
    before = torch.get_rng_state()
    task.prepare_dataset(Random([0, 1]), train=True)
    assert torch.equal(torch.get_rng_state(), before)


# -- augmentation ------------------------------------------------------------------------------------------


def same_images(channels: int = 3, n: int = 8) -> list[tuple[Tensor, int]]:
    """The same picture n times, so that any difference is the augmentation's."""
    return [(pixels(channels, 40, 40), 0)] * n


@pytest.mark.parametrize("augment", ["basic", "crop", "randaugment", "trivial", v2.RandomCrop(32)])
@pytest.mark.parametrize("channels", [1, 3])
def test_every_sample_has_its_own_augmentation_and_the_seed_decides(augment: Any, channels: int) -> None:
    task = ImageClassification(SMALL, 2, False, image_size=32, augment=augment, in_chans=channels)
    data = task.prepare_dataset(same_images(channels), train=True)

    def epoch(number: int, batch_size: int, seed: int = 5) -> Tensor:
        source = DatasetSource(data, batch_size, seed=seed, num_workers=0)
        return torch.cat([batch.data[0] for batch in source.batches(number)])

    batch = epoch(0, 8)
    assert batch.shape == (8, channels, 32, 32)
    assert batch.dtype == torch.uint8
    assert len({tuple(image.flatten().tolist()) for image in batch}) >= 5  # few policies may agree by chance
    assert torch.equal(batch, epoch(0, 3))  # whatever the batch size
    assert not torch.equal(batch, epoch(1, 8))
    assert not torch.equal(batch, epoch(0, 8, seed=6))


@pytest.mark.parametrize("augment", ["basic", "crop", "randaugment", "trivial"])
def test_randomness_comes_from_torch_alone(augment: str) -> None:
    task = ImageClassification(SMALL, 2, False, image_size=32, augment=augment)
    data = task.prepare_dataset(same_images(), train=True)
    runs = []
    for foreign in (1, 2):
        random.seed(foreign)
        np.random.seed(foreign)
        torch.manual_seed(0)
        runs.append(torch.stack([data[i][0] for i in range(8)]))
    assert torch.equal(*runs)


def test_evaluation_is_never_augmented() -> None:
    task = ImageClassification(SMALL, 2, False, image_size=32, augment="basic")
    data = task.prepare_dataset(same_images(), train=False)
    assert all(torch.equal(data[0][0], data[i][0]) for i in range(8))


@pytest.mark.parametrize("in_memory", [True, False])
def test_crop_shifts_and_never_flips(in_memory: bool) -> None:
    ramp = torch.arange(32, dtype=torch.uint8).expand(1, 32, 32) + 100
    task = ImageClassification(Linear(1024, 2), 2, in_chans=1, augment="crop")
    tensors = TensorDataset(ramp.expand(50, 1, 32, 32), torch.zeros(50))
    data = task.prepare_dataset(tensors if in_memory else list(tensors), train=True)
    images = default_collate([data[i] for i in range(50)])[0]
    assert torch.equal(images, tensors.tensors[0]) == in_memory  # those are augmented on the device
    pixels = task.get_train_transforms()(images) * (0.229 + 0.224 + 0.225) / 3 + (0.485 + 0.456 + 0.406) / 3
    rows = (pixels[:, 0, 16] * 255).round().int()
    for row in rows:
        inside = row[row > 0]
        assert len(inside) >= 28  # an eighth of 32 is 4
        assert (inside.diff() == 1).all()
    assert len({tuple(row.tolist()) for row in rows}) == 9


@pytest.mark.parametrize("augment", ["basic", "crop"])
def test_tensors_in_memory_are_augmented_on_the_device(augment: str) -> None:
    """Views are functions of (seed, epoch, sample): neither of the batch, nor of the order."""
    task = ImageClassification(SMALL, 2, False, augment=augment, random_erasing=0.5)
    images = pixels(1, 3, 40, 40).expand(12, -1, -1, -1)
    data = task.prepare_dataset(TensorDataset(images, torch.zeros(12, dtype=torch.long)), train=True)
    assert tensors_of(data)[0].data_ptr() == images.data_ptr()  # type: ignore[index]
    transform = task.get_train_transforms()

    def epoch(number: int, batch_size: int, seed: int = 5) -> Tensor:
        source = DatasetSource(data, batch_size, seed=seed, num_workers=0)
        feeder = Feeder(torch.device("cpu"), channels_last=False)
        return torch.cat([placed.data[0] for placed in feeder.feed(source.batches(number), transform)])

    batch = epoch(0, 12)
    assert batch.shape == (12, 3, 40, 40)
    assert len({tuple(image.flatten().tolist()) for image in batch}) == 12
    assert torch.equal(batch, epoch(0, 5))
    assert not torch.equal(batch, epoch(1, 12))
    assert not torch.equal(batch, epoch(0, 12, seed=6))
    erased = (batch == 0).all(1).flatten(1).sum(1) > 20  # pixels at the mean of all three channels hardly occur
    assert 1 <= erased.sum() <= 11
    # Policies of single images stay where those are read, and so do the images of evaluation.
    assert isinstance(
        ImageClassification(SMALL, 2, False, augment="trivial").prepare_dataset(data, train=True), ImageDataset
    )
    assert torch.equal(task.get_eval_transforms()(images[:1]), task._normalize(images[:1]))


def test_without_random_numbers_the_device_gives_what_evaluation_sees() -> None:
    """Normalising and resizing agree on both ways; crops are those of torchvision (see the tests of `data.augment`)."""
    digits = load_images("digits")
    task = digits_task(augment="crop")
    data = task.prepare_dataset(digits, train=True)
    view = task.get_train_transforms()
    view.shift = None  # type: ignore[assignment]
    same = task.prepare_dataset(digits, train=False)
    torch.testing.assert_close(view(data[:64][0]), task.get_eval_transforms()(same[:64][0]), rtol=1e-5, atol=1e-5)


def test_function_as_augmentation_gets_the_image_and_is_resized_after(folder: Path) -> None:
    seen: list[Any] = []

    def cut(image: Any) -> Any:
        seen.append(image)
        return v2.functional.center_crop(image, [20, 30])

    task = ImageClassification(SMALL, 2, False, image_size=32, augment=cut)
    assert task.prepare_dataset(load_images(folder), train=True)[0][0].shape == (3, 32, 32)
    assert task.prepare_dataset(same_images(), train=True)[0][0].shape == (3, 32, 32)
    assert isinstance(seen[0], Image.Image)
    assert seen[1].dtype == torch.uint8
    assert task.config_dict()["augment"].endswith("cut")


def test_random_erasing_is_drawn_per_image() -> None:
    erased = RandomErasing(0.5)(torch.ones(200, 3, 20, 20)) == 0
    assert torch.equal(erased[:, :1].expand_as(erased), erased)  # all channels of a pixel
    shares = erased[:, 0].float().mean((1, 2))
    assert 60 < (shares > 0).sum() < 140
    assert len(shares[shares > 0].unique()) > 20
    assert shares.max() < 0.45
    for mask in erased[shares > 0, 0]:  # each is one rectangle
        rows, columns = mask.any(1), mask.any(0)
        assert torch.equal(mask, rows[:, None] & columns[None])
        assert (rows.int().diff() != 0).sum() <= 2
    keys = np.arange(200)
    alone = RandomErasing(0.5)(torch.ones(7, 3, 20, 20), keys[50:57])
    assert torch.equal(alone, RandomErasing(0.5)(torch.ones(200, 3, 20, 20), keys)[50:57])  # by its key alone
    assert not (RandomErasing(0.0)(torch.ones(50, 3, 20, 20)) == 0).any()
    assert (RandomErasing(1.0)(torch.ones(50, 3, 20, 20)) == 0).flatten(1).any(1).all()


def test_random_erasing_is_for_training_only() -> None:
    task = ImageClassification(SMALL, 2, False, random_erasing=1.0)
    images = pixels(4, 3, 32, 32)
    assert not torch.equal(task.get_train_transforms()(images), task.get_eval_transforms()(images))
    assert isinstance(task.get_eval_transforms(), Normalize)


# -- the loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weights", [None, [0.5, 2.0, 1.0, 0.0, 3.0]])
@pytest.mark.parametrize("sizes", [[12], [1, 11], [4, 4, 4], [5, 7]])
def test_loss_is_that_of_torch_however_it_is_sliced(smoothing: float, weights: Any, sizes: list[int]) -> None:
    task = exact_task(label_smoothing=smoothing, class_weights=weights)
    images, labels = exact_batch()
    weight = None if weights is None else torch.tensor(weights, dtype=torch.float64)
    want = nn.CrossEntropyLoss(weight=weight, label_smoothing=smoothing)(task.model(images), labels)
    parts = [task.train_step(pair) for pair in zip(images.split(sizes), labels.split(sizes), strict=True)]
    got = sum(part.sum for part in parts) / sum(part.weight for part in parts)
    assert got.dtype == torch.float64
    torch.testing.assert_close(got, want, rtol=1e-12, atol=0)
    parameter = task.model.layer.weight  # type: ignore[union-attr]
    grads = [torch.autograd.grad(value, parameter, retain_graph=True)[0] for value in (got, want)]
    torch.testing.assert_close(*grads, rtol=1e-10, atol=1e-14)
    right = sum(part.metrics["accuracy"][0] for part in parts)  # type: ignore[index]
    assert right == (task.model(images).argmax(1) == labels).sum()
    assert sum(part.metrics["accuracy"][1] for part in parts) == 12  # type: ignore[index]


def test_balanced_weights_come_from_the_data() -> None:
    info = DatasetInfo(num_samples=10, num_classes=3, class_counts=[6, 3, 1], input_shape=(3, 2, 2))
    task = ImageClassification(Linear(), 5, class_weights="balanced")
    with pytest.raises(BadArgument, match="configure"):
        task.train_step((torch.zeros(2, 3, 2, 2), torch.zeros(2, dtype=torch.long)))
    task.configure(info)
    labels = torch.tensor([0] * 6 + [1] * 3 + [2])
    loss = task.train_step((torch.zeros(10, 3, 2, 2), labels))
    assert float(loss.weight) == pytest.approx(
        10
    )  # the balanced weights of the data's own labels add up to their number
    assert float(task.train_step((torch.zeros(1, 3, 2, 2), labels[-1:])).weight) == pytest.approx(10 / 3)
    with pytest.raises(DataError, match="`targets`"):
        task.configure(DatasetInfo(num_classes=3))


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_mixed_loss_is_that_of_timm(smoothing: float) -> None:
    from timm.data.mixup import mixup_target
    from timm.loss import SoftTargetCrossEntropy

    logits, labels = torch.randn(8, 5, dtype=torch.float64), torch.randint(0, 5, (8,))
    share = torch.rand(8, dtype=torch.float64)
    mixed = Mixed(torch.empty(0), torch.arange(8).flip(0), share)  # timm pairs a batch with itself backwards
    got = cross_entropy(logits, labels, mixed, label_smoothing=smoothing)
    want = SoftTargetCrossEntropy()(logits, mixup_target(labels, 5, share[:, None], smoothing))
    torch.testing.assert_close(got.sum / got.weight, want, rtol=1e-7, atol=0)


@pytest.mark.parametrize("alphas", [{"mixup": 0.4}, {"cutmix": 1.0}])
def test_a_mixed_step_is_the_loss_of_mixed_images_with_soft_labels(alphas: dict[str, float]) -> None:
    task = exact_task(label_smoothing=0.1, **alphas)
    images, labels = exact_batch()
    torch.manual_seed(3)
    got = task.train_step((images, labels))
    torch.manual_seed(3)
    mixed = mix(images, task.mixup, task.cutmix)
    one_hot = nn.functional.one_hot(labels, 5).double()
    share = mixed.share.double()[:, None]
    soft = one_hot * share + one_hot[mixed.partner] * (1 - share)
    want = nn.CrossEntropyLoss(label_smoothing=0.1)(task.model(mixed.images), soft)
    torch.testing.assert_close(got.sum / got.weight, want, rtol=1e-7, atol=0)
    assert 0 <= got.metrics["accuracy"][0] <= 12  # type: ignore[index]


def test_class_weights_of_mixed_labels_count_by_their_share() -> None:
    logits, labels = torch.randn(6, 3), torch.tensor([0, 1, 2, 0, 1, 2])
    weights = torch.tensor([1.0, 2.0, 4.0])
    plain = cross_entropy(logits, labels, class_weights=weights)
    whole = Mixed(torch.empty(0), torch.randperm(6), torch.ones(6))
    for got, want in zip(cross_entropy(logits, labels, whole, class_weights=weights), plain, strict=True):
        torch.testing.assert_close(got, want)
    halves = Mixed(torch.empty(0), torch.tensor([1, 2, 0, 4, 5, 3]), torch.full((6,), 0.5))
    assert float(cross_entropy(logits, labels, halves, class_weights=weights).weight) == pytest.approx(14.0)


def test_mixup_mixes_every_image_by_a_share_of_its_own() -> None:
    images = torch.randn(64, 3, 8, 8)
    mixed = mix(images, 1.0, 0.0)
    assert sorted(mixed.partner.tolist()) == list(range(64))
    assert len(mixed.share.unique()) == 64
    share = mixed.share[:, None, None, None]
    torch.testing.assert_close(mixed.images, images * share + images[mixed.partner] * (1 - share))


def test_cutmix_pastes_one_box_of_the_size_it_says() -> None:
    images = torch.arange(64.0)[:, None, None, None].expand(64, 3, 10, 14)
    mixed = mix(images, 0.0, 1.0)
    assert len(mixed.share.unique()) > 20
    for i, (image, partner, share) in enumerate(zip(*mixed, strict=True)):
        foreign = image[0] == partner
        if partner == i:
            continue
        assert float(foreign.float().mean()) == pytest.approx(1 - float(share), abs=1e-6)
        rows, columns = foreign.any(1), foreign.any(0)
        assert torch.equal(foreign, rows[:, None] & columns[None])


def test_each_image_is_mixed_in_its_own_way() -> None:
    """Of one batch, half by mixup, half by cutmix, each with its own share, and some not at all."""
    torch.manual_seed(0)
    images = torch.arange(400.0)[:, None, None, None].expand(400, 1, 16, 16) * 7
    images = images + torch.rand(400, 1, 1, 1)
    mixed = mix(images, 0.8, 1.0, prob=0.75)
    whole = (mixed.images == images).flatten(1).all(1)
    pasted = ((mixed.images == images) | (mixed.images == images[mixed.partner])).flatten(1).all(1) & ~whole
    blended = ~pasted & ~whole
    assert 60 < whole.sum() < 160  # a quarter, and boxes that fell outside
    assert 100 < pasted.sum() < 200
    assert 100 < blended.sum() < 200
    assert (mixed.share[whole] == 1).all()
    assert len(mixed.share[blended].unique()) == blended.sum()
    share = mixed.share[:, None, None, None]
    want = images * share + images[mixed.partner] * (1 - share)
    torch.testing.assert_close(mixed.images[blended], want[blended])
    # What was pasted has the share of its area, which the mean of the image shows.
    torch.testing.assert_close(mixed.images[pasted].mean((2, 3)), want[pasted][..., 0, 0], rtol=1e-4, atol=1e-2)


@pytest.mark.parametrize(("alphas", "kinds"), [((1.0, 0.0), 1), ((0.0, 1.0), 1), ((1, 1), 2)])
def test_alphas_of_zero_switch_a_kind_off(alphas: tuple[float, float], kinds: int) -> None:
    images = torch.rand(64, 1, 8, 8)
    mixed = mix(images, *alphas)
    blended = (mixed.images != images).flatten(1).all(1)
    assert len(blended.unique()) == kinds
    assert torch.equal(mix(images, *alphas, prob=0.0).images, images)


def test_mixed_targets_of_a_step_are_those_of_timm() -> None:
    """The whole way of a step: images mixed per element, targets by their shares, smoothing."""
    from timm.data.mixup import one_hot
    from timm.loss import SoftTargetCrossEntropy

    task = exact_task(label_smoothing=0.1, mixup=0.8, cutmix=1.0, mixup_prob=0.7)
    images, labels = exact_batch(32)
    torch.manual_seed(3)
    got = task.train_step((images, labels))
    torch.manual_seed(3)
    mixed = mix(images, 0.8, 1.0, 0.7)
    share = mixed.share.double()[:, None]
    own, other = (one_hot(y, 5, on_value=0.92, off_value=0.02).double() for y in (labels, labels[mixed.partner]))
    want = SoftTargetCrossEntropy()(task.model(mixed.images), own * share + other * (1 - share))
    torch.testing.assert_close(got.sum / got.weight, want, rtol=1e-7, atol=0)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("threshold", [None, 0.2])
@pytest.mark.parametrize("sum_classes", [False, True])
@pytest.mark.parametrize("is_mixed", [False, True])
def test_binary_loss_is_that_of_timm(smoothing: float, threshold: Any, sum_classes: bool, is_mixed: bool) -> None:
    from timm.data.mixup import mixup_target
    from timm.loss import BinaryCrossEntropy

    logits = torch.randn(8, 5, dtype=torch.float64, requires_grad=True)
    labels, share = torch.randint(0, 5, (8,)), torch.rand(8, dtype=torch.float64)
    reference = BinaryCrossEntropy(smoothing, threshold, sum_classes=sum_classes)
    mixed = Mixed(torch.empty(0), torch.arange(8).flip(0), share) if is_mixed else None
    target = mixup_target(labels, 5, share[:, None], smoothing) if is_mixed else labels
    want = reference(logits, target)
    got = binary_cross_entropy(
        logits, labels, mixed, label_smoothing=smoothing, target_threshold=threshold, sum_classes=sum_classes
    )
    torch.testing.assert_close(got.sum / got.weight, want, rtol=1e-7, atol=0)
    grads = [torch.autograd.grad(value, logits, retain_graph=True)[0] for value in (got.sum / got.weight, want)]
    torch.testing.assert_close(*grads, rtol=1e-6, atol=1e-12)


@pytest.mark.parametrize("sizes", [[12], [1, 11], [5, 7]])
def test_binary_loss_of_a_step_however_it_is_sliced(sizes: list[int]) -> None:
    from timm.loss import BinaryCrossEntropy

    task = exact_task(loss="bce", label_smoothing=0.1, bce_sum=True)
    images, labels = exact_batch()
    parts = [task.train_step(pair) for pair in zip(images.split(sizes), labels.split(sizes), strict=True)]
    got = sum(part.sum for part in parts) / sum(part.weight for part in parts)
    want = BinaryCrossEntropy(0.1, sum_classes=True)(task.model(images), labels)
    torch.testing.assert_close(got, want, rtol=1e-10, atol=0)
    total, count = task.eval_step((images, labels))["loss"]  # plain: without smoothing
    plain = BinaryCrossEntropy(0.0, sum_classes=True)(task.model(images), labels)
    torch.testing.assert_close(total / count, plain, rtol=1e-10, atol=0)


def test_mixing_stops_with_its_epoch() -> None:
    task = exact_task(mixup=1.0, mixup_off_epoch=2)
    images, labels = exact_batch()
    plain = nn.functional.cross_entropy(task.model(images), labels, reduction="sum")
    for epoch in range(4):
        task.on_epoch_begin(epoch)
        assert torch.allclose(task.train_step((images, labels)).sum, plain) == (epoch >= 2)
    resumed = exact_task(mixup=1.0, mixup_off_epoch=2)
    resumed.load_state_dict(task.state_dict())  # in the middle of an epoch nobody calls on_epoch_begin
    assert torch.allclose(resumed.train_step((images, labels)).sum, plain)


@pytest.mark.gpu
@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize(
    "options",
    [
        {"class_weights": [1.0] * 5},
        {"mixup": 0.4, "cutmix": 1.0, "mixup_prob": 0.5, "tta": 5},
        {"loss": "bce", "cutmix": 1.0, "bce_target_threshold": 0.2, "tta": "flip"},
    ],
)
def test_no_step_waits_for_the_device(options: dict[str, Any], in_memory: bool) -> None:
    task = ImageClassification(Linear(), 5, label_smoothing=0.1, random_erasing=0.5, **options)
    task.model.cuda()
    if in_memory:
        task.prepare_dataset(TensorDataset(pixels(8, 3, 2, 2), torch.arange(8) % 5), train=True)
    transform = task.get_train_transforms().cuda()
    task.get_eval_transforms().cuda()
    images, labels = pixels(8, 3, 2, 2).cuda(), torch.arange(8).cuda() % 5
    task.train_step((transform(images), labels))  # moves the class weights over, once
    torch.cuda.set_sync_debug_mode("error")
    try:
        loss = task.train_step((transform(images), labels))
        metrics = task.eval_step((images, labels))
    finally:
        torch.cuda.set_sync_debug_mode("default")
    assert loss.sum.isfinite()
    assert metrics["loss"][0].isfinite()


def test_logits_in_half_precision_are_taken_up_to_full() -> None:
    class Half(Linear):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images).bfloat16()

    task = ImageClassification(Half(), 5)
    images, labels = torch.randn(6, 3, 2, 2), torch.arange(6) % 5
    loss, logits = task.train_step((images, labels)), task.model(images)
    assert loss.sum.dtype == torch.float32
    assert torch.equal(loss.sum, nn.functional.cross_entropy(logits.float(), labels, reduction="sum"))
    assert task.predict_step(images)["probabilities"].dtype == torch.float32


# -- evaluation and prediction -----------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [[60], [7, 53], [20, 20, 20]])
def test_evaluation_matches_sklearn_however_it_is_sliced(sizes: list[int]) -> None:
    import sklearn.metrics as sk

    torch.manual_seed(0)
    task = ImageClassification(Linear(classes=8).double(), 8, label_smoothing=0.2, class_weights=[1.0] * 7 + [9.0])
    images, labels = torch.randn(60, 3, 2, 2, dtype=torch.float64), torch.randint(0, 8, (60,))
    with torch.no_grad():
        logits = task.model(images)
        parts = [task.eval_step(pair) for pair in zip(images.split(sizes), labels.split(sizes), strict=True)]
    means = {
        name: float(sum(part[name][0] for part in parts)) / sum(part[name][1] for part in parts)
        for name in ("loss", "accuracy", "top5")
    }
    assert means["loss"] == pytest.approx(sk.log_loss(labels, logits.softmax(1), labels=range(8)))
    assert means["accuracy"] == pytest.approx(sk.accuracy_score(labels, logits.argmax(1)))
    assert means["top5"] == pytest.approx(sk.top_k_accuracy_score(labels, logits.numpy(), k=5))
    rows = {name: torch.cat([part[name] for part in parts]) for name in ("prediction", "confidence", "label")}
    final = task.on_eval_end(rows)
    assert final == {
        "f1": pytest.approx(sk.f1_score(labels, logits.argmax(1), average="macro")),
        "ece": pytest.approx(expected_calibration_error(logits.softmax(1), labels)),
    }
    assert task.confusion is not None
    assert task.confusion.tolist() == sk.confusion_matrix(labels, logits.argmax(1), labels=range(8)).tolist()


def test_top5_is_left_out_where_it_is_always_right() -> None:
    assert "top5" not in exact_task().eval_step(exact_batch())


def test_topk_is_for_the_user_to_choose() -> None:
    import sklearn.metrics as sk

    task = exact_task(topk=[2, 3, 5])
    images, labels = exact_batch()
    metrics = task.eval_step((images, labels))
    logits = task.model(images).detach().numpy()
    for k in (2, 3):
        right, count = metrics[f"top{k}"]
        assert float(right) / count == pytest.approx(sk.top_k_accuracy_score(labels, logits, k=k, labels=range(5)))
    assert "top5" not in metrics
    assert "top1" not in metrics  # the accuracy, which is always there


def test_rows_kept_of_an_evaluation_are_three_numbers_per_sample() -> None:
    rows = {k: v for k, v in exact_task().eval_step(exact_batch()).items() if isinstance(v, Tensor)}
    assert {name: row.shape for name, row in rows.items()} == dict.fromkeys(
        ("prediction", "confidence", "label"), torch.Size([12])
    )


@pytest.mark.parametrize("bins", [1, 4, 15])
def test_calibration_error_from_confidences_is_that_from_probabilities(bins: int) -> None:
    generator = torch.Generator().manual_seed(1)
    probabilities = (3 * torch.randn(300, 7, generator=generator)).softmax(1)
    labels = torch.randint(0, 7, (300,), generator=generator)
    confidence, predictions = probabilities.max(1)
    want = expected_calibration_error(probabilities, labels, bins)
    assert want > 0.1
    assert calibration_error(confidence, predictions == labels, bins) == pytest.approx(want, rel=1e-5)


def printed(table: Any) -> str:
    file = io.StringIO()
    Console(file=file, width=100).print(table)
    return file.getvalue()


def test_confusion_table_names_the_classes() -> None:
    task = ImageClassification(Linear(classes=3), 3)
    with pytest.raises(BadArgument, match=r"Call trainer.evaluate\(\) first"):
        task.confusion_table()
    labels = torch.tensor([0, 0, 0, 1, 1, 2])
    task.class_names = ["cat", "[dog]"]  # what rich would take for markup
    task.on_eval_end({"prediction": torch.tensor([0, 0, 1, 1, 1, 1]), "confidence": torch.ones(6), "label": labels})
    lines = [line.split() for line in printed(task.confusion_table()).splitlines()]
    assert ["cat", "│", "2", "│", "1", "│", "·", "│", "66.7%"] in lines
    assert ["[dog]", "│", "·", "│", "2", "│", "·", "│", "100.0%"] in lines
    assert ["2", "│", "·", "│", "1", "│", "0", "│", "0.0%"] in lines
    mistakes = [line.split() for line in printed(task.confusion_table(most=2)).splitlines()]
    assert ["cat", "│", "[dog]", "│", "1", "│", "33.3%"] in mistakes
    assert ["2", "│", "[dog]", "│", "1", "│", "100.0%"] in mistakes


# -- test-time augmentation --------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["ce", "bce"])
def test_flips_average_the_probabilities(loss: Any) -> None:
    task, plain = (exact_task(loss=loss, tta=tta) for tta in ("flip", 0))
    images, labels = exact_batch()
    squash = torch.sigmoid if loss == "bce" else (lambda x: x.softmax(1))
    with torch.no_grad():
        want = (squash(plain.model(images)) + squash(plain.model(images.flip(-1)))) / 2
        got = task._scores(images)
        rows, metrics = task.predict_step(images), task.eval_step((images, labels))
        assert not torch.allclose(rows["probabilities"], plain.predict_step(images)["probabilities"])
    torch.testing.assert_close(squash(got), want, rtol=1e-10, atol=0)
    torch.testing.assert_close(rows["probabilities"].sum(1), torch.ones(12).double())
    assert torch.equal(rows["prediction"], want.argmax(1))
    total = metrics["loss"][0]
    if loss == "ce":
        torch.testing.assert_close(rows["probabilities"], want)
        torch.testing.assert_close(total, nn.functional.nll_loss(want.log(), labels, reduction="sum"))
    else:
        target = nn.functional.one_hot(labels, 5).double()
        torch.testing.assert_close(total, nn.functional.binary_cross_entropy(want, target, reduction="sum") / 5)


def test_views_are_close_to_the_image_and_differ_from_each_other() -> None:
    y, x = torch.meshgrid(torch.linspace(0, 3, 32), torch.linspace(0, 3, 32), indexing="ij")
    images = (x + 2 * y).sin().expand(2, 3, 32, 32)
    looks = list(tta_views(images, 7, flip=False))
    assert torch.equal(looks[0], images)
    for i, look in enumerate(looks):
        assert look.shape == images.shape
        assert (look - images).abs().mean() < 0.35
        assert all((look - other).abs().mean() > 0.02 for other in looks[:i])
    both = list(tta_views(images, 6, flip=True))
    for i in range(0, 6, 2):
        assert torch.equal(both[i].flip(-1), both[i + 1])
    moved = list(tta_views(torch.nn.functional.pad(torch.ones(1, 1, 2, 2), [7] * 4), 2, flip=False))[1]
    assert moved.sum() == pytest.approx(4, abs=0.01)  # moved by a pixel in all, nothing lost


@pytest.mark.parametrize(("augment", "mirrored"), [("basic", True), ("crop", False)])
def test_views_are_mirrored_where_training_mirrors(augment: str, mirrored: bool) -> None:
    task = exact_task(tta=2, augment=augment)
    images, _ = exact_batch()
    assert torch.equal(list(task._views(images))[1], images.flip(-1)) == mirrored
    assert len(list(exact_task(tta=5)._views(images))) == 5


@pytest.mark.parametrize("form", [lambda x, y: x, lambda x, y: (x,), lambda x, y: [x, y], lambda x, y: {"image": x}])
def test_prediction_with_and_without_labels(form: Any) -> None:
    task = exact_task()
    images, labels = exact_batch()
    with torch.no_grad():
        rows = task.predict_step(form(images, labels))
        want = task.model(images).softmax(1)
    assert torch.equal(rows["probabilities"], want)
    assert torch.equal(rows["prediction"], want.argmax(1))
    assert torch.equal(rows["probability"], want.max(1).values)


# -- checks and records ------------------------------------------------------------------------------------


def test_a_good_batch_has_no_problems() -> None:
    task = ImageClassification(SMALL, 5, False)
    assert task.check_batch((pixels(4, 3, 8, 8), torch.arange(4))) == []
    assert task.check_batch((task.get_eval_transforms()(pixels(4, 3, 8, 8)), torch.arange(4))) == []


@pytest.mark.parametrize(
    ("images", "labels", "sentence"),
    [
        (pixels(3, 3, 8, 8), torch.tensor([0, 5, -1]), "0 to 4 for 5 classes, but -1, 5 occur"),
        (pixels(2, 3, 8, 8), torch.tensor([0.0, 1.0]), "should be integers.*torch.float32"),
        (pixels(2, 3, 8, 8), torch.zeros(2, 5, dtype=torch.long), r"shape \(batch,\).*\(2, 5\)"),
        (pixels(2, 3, 8, 8), None, "are missing"),
        (pixels(2, 3, 8, 8), ["cat", "dog"], "but are list"),
        (pixels(2, 8, 8), torch.arange(2), r"but are \(2, 8, 8\)"),
        (pixels(2, 1, 8, 8), torch.arange(2), "3 channels as the model does, but have 1"),
        (torch.zeros(2, 3, 8, 8), torch.arange(2), "2 of 2 images are constant"),
        (pixels(2, 3, 8, 8).float(), torch.arange(2), "treated as normalised, but their values reach 255"),
        (pixels(2, 3, 8, 8).long(), torch.arange(2), "but are torch.int64"),
        (torch.full((2, 3, 8, 8), float("nan")), torch.arange(2), "NaN"),
    ],
)
def test_problems_of_a_batch_are_reported(images: Any, labels: Any, sentence: str) -> None:
    import re

    task = ImageClassification(SMALL, 5, False)
    assert task.model
    problems = task.check_batch((images, labels))
    assert len(problems) == 1
    assert re.search(sentence, problems[0])


def test_config_can_be_written_down() -> None:
    task = digits_task(mixup=0.2)
    task.prepare_dataset(load_images("digits"), train=True)
    config = json.loads(json.dumps(task.config_dict()))
    assert config["backbone"] == SMALL
    assert config["mixup"] == 0.2
    assert config["num_classes"] == 10
    assert config["in_chans"] == 1
    assert config["image_size"] == [32, 32]
    assert config["class_names"] == list("0123456789")
    assert ImageClassification(Linear(), 5).config_dict()["backbone"] == "Linear"


# -- and it learns -----------------------------------------------------------------------------------------


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small kernels on several threads mostly wait for each other on a busy machine: 40 s instead of 1 were seen."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("one_thread")
def test_training_on_digits_lowers_the_loss() -> None:
    torch.manual_seed(0)
    task = digits_task(augment="crop", label_smoothing=0.05, image_size=32)
    source = DatasetSource(task.prepare_dataset(load_images("digits"), train=True), 32, shuffle=True, num_workers=0)
    transform = task.get_train_transforms()
    optimizer = torch.optim.AdamW(task.parameters(), lr=3e-3)
    losses = []
    for _, batch in zip(range(40), source.batches(0), strict=False):
        images, labels = batch.data
        loss = task.train_step((transform(images), labels))
        mean = loss.sum / loss.weight
        optimizer.zero_grad()
        mean.backward()
        optimizer.step()
        losses.append(mean.item())
    assert losses[0] > 2.0
    assert sum(losses[-5:]) / 5 < 0.6 * losses[0]
