"""Semantic segmentation: data, joint augmentation, losses and metrics against torch and torchmetrics."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from promise_toys import Pixelwise, settings
from torch import nn
from torchmetrics.classification import MulticlassAccuracy, MulticlassJaccardIndex
from torchvision.transforms import v2

from trainformer import Trainer
from trainformer.core import BadArgument, DataError
from trainformer.data.coco import rasterize
from trainformer.data.segmentation import CocoSegmentation, load_segmentation, mask_array
from trainformer.data.shapes import draw_shapes
from trainformer.losses.segmentation import dice_losses, pixel_loss
from trainformer.tasks import SemanticSegmentation
from trainformer.tasks.vision.joint_augment import JointTransform

SIZES = [(40, 52), (31, 64), (64, 33), (48, 48), (17, 90), (64, 64), (50, 20)]


def write_folder(root: Path, names: bool = True) -> list[np.ndarray]:
    """Pictures of unequal sizes with masks, and pixels to ignore in each; returns the masks."""
    (root / "images").mkdir(parents=True)
    (root / "masks").mkdir()
    masks = []
    for number, (height, width) in enumerate(SIZES):
        picture = draw_shapes(number, 96)
        mask = picture.mask[:height, :width].copy()
        mask[number : number + 3] = 255
        Image.fromarray(picture.image[:height, :width]).save(root / "images" / f"{number}.jpg")
        Image.fromarray(mask).save(root / "masks" / f"{number}.png")
        masks.append(mask)
    if names:
        (root / "classes.txt").write_text("background\ncircle\nsquare\ntriangle\n")
    return masks


@pytest.mark.parametrize("batch_size", [1, 3])
def test_metrics_are_those_of_torchmetrics_on_the_predictions(tmp_path, batch_size):
    masks = write_folder(tmp_path)
    task = SemanticSegmentation(Pixelwise(), image_size=(48, 40))
    trainer = Trainer(task, str(tmp_path), val_data=str(tmp_path), **settings(eval_batch_size=batch_size, lr=0.1)).fit()
    found, rows = trainer.evaluate(), trainer.predict(str(tmp_path / "images"))
    predicted = [row["mask"] for row in rows]
    assert [tuple(mask.shape) for mask in predicted] == SIZES
    guesses = torch.cat([mask.flatten() for mask in predicted]).long()
    labels = torch.cat([torch.from_numpy(mask).flatten() for mask in masks]).long()
    options = {"num_classes": 4, "ignore_index": 255}
    assert found["val/miou"] == pytest.approx(MulticlassJaccardIndex(**options)(guesses, labels).item(), abs=1e-6)
    each = MulticlassJaccardIndex(average="none", **options)(guesses, labels).tolist()
    assert [found.get(f"val/iou/{name}", 0) for name in task.class_names] == pytest.approx(each, abs=1e-6)
    accuracy = MulticlassAccuracy(average="micro", **options)(guesses, labels).item()
    assert found["val/pixel_accuracy"] == pytest.approx(accuracy, abs=1e-6)


def test_the_loss_is_the_mean_over_valid_pixels():
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(5, 3, 6, 7, generator=generator, dtype=torch.float64)
    masks = torch.randint(0, 3, (5, 6, 7), generator=generator)
    masks[0, :4], masks[3] = 255, 255
    weights = torch.tensor([1.0, 3.0, 0.5], dtype=torch.float64)
    loss = pixel_loss(logits, masks, class_weights=weights)
    assert torch.isclose(loss.sum / loss.weight, F.cross_entropy(logits, masks, weights, ignore_index=255))
    parts = [pixel_loss(logits[i : i + 1], masks[i : i + 1], ce=0.5, dice=2.0) for i in range(5)]
    whole = pixel_loss(logits, masks, ce=0.5, dice=2.0)
    assert torch.isclose(sum(part.sum for part in parts), whole.sum)
    assert sum(part.weight for part in parts) == whole.weight == (masks != 255).sum()


def test_dice_by_hand():
    logits = torch.zeros(1, 3, 1, 4, dtype=torch.float64)
    logits[0, 1, 0, 0] = 100.0  # sure of class 1 in the first pixel, undecided elsewhere
    masks = torch.tensor([[[1, 0, 1, 255]]])
    third = 1 / 3
    first = (2 * third + 1) / ((2 * third) + 1 + 1)  # class 0: overlap 1/3, predicted 2/3, drawn 1
    second = (2 * (1 + third) + 1) / ((1 + 2 * third) + 2 + 1)  # class 1
    assert dice_losses(logits, masks).item() == pytest.approx(1 - (first + second) / 2)


@pytest.mark.parametrize("augment", ["flip", "basic", "strong"])
def test_picture_and_mask_are_augmented_together(augment):
    picture = draw_shapes(7)
    levels = torch.tensor([0, 80, 160, 240], dtype=torch.uint8)
    mask = torch.from_numpy(picture.mask)
    transform = JointTransform((48, 40), augment, train=True, ignore_index=255)
    seen = []
    for seed in range(6):
        torch.manual_seed(seed)
        image, drawn = transform(levels[mask.long()].expand(3, -1, -1), mask)
        seen.append(drawn)
        assert image.shape == (3, 48, 40)
        assert drawn.shape == (48, 40)
        if augment != "strong":  # which changes the levels
            inside = drawn != 255
            here, there = (image[0] > 40) & inside, (drawn > 0) & inside
            assert (here & there).sum() >= 0.8 * (here | there).sum()  # all but the edges
            assert (image[0][~inside] == 0).all()
    assert len({tuple(one.flatten().tolist()) for one in seen}) > 1


def test_samples_do_not_depend_on_the_batch(tmp_path):
    write_folder(tmp_path)

    def samples(batch_size):
        task = SemanticSegmentation(Pixelwise(), image_size=32)
        trainer = Trainer(task, str(tmp_path), **settings(batch_size=batch_size))
        from trainformer.run import run_of

        batches = [batch.data for batch in run_of(trainer).train_source.batches(1)]
        return [torch.cat([batch[key] for batch in batches]) for key in ("image", "mask")]

    for one, other in zip(samples(1), samples(4), strict=True):
        assert torch.equal(one, other)


def test_a_transform_of_torchvision_is_an_augmentation():
    augment = v2.Compose([v2.RandomRotation(10), v2.RandomVerticalFlip(p=1.0)])
    image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    image[:, :4] = 200
    flipped = JointTransform((8, 8), v2.RandomVerticalFlip(p=1.0), train=True, ignore_index=255)
    pixels, mask = flipped(image, (image[0] > 0).to(torch.uint8))
    assert torch.equal(pixels, image.flip(1))
    assert torch.equal(mask, (image[0] > 0).to(torch.uint8).flip(0))
    task = SemanticSegmentation(Pixelwise(), 4, augment=augment)
    Trainer(task, "shapes", **settings(max_steps=1)).fit()
    with pytest.raises(BadArgument, match="return the image and the mask"):
        JointTransform((8, 8), lambda image, mask: image, train=True, ignore_index=255)(image, mask)


# -- data ------------------------------------------------------------------------------------------------------------


def test_a_folder_without_class_names_is_scanned(tmp_path):
    write_folder(tmp_path, names=False)
    trainer = Trainer(SemanticSegmentation("resnet10t", pretrained=False), str(tmp_path), val_split=2, **settings())
    assert trainer.task.num_classes == 4
    assert trainer.task.model.classifier.out_channels == 4


def test_masks_with_a_palette_or_three_equal_channels_are_indices(tmp_path):
    indices = np.array([[0, 1], [2, 255]], np.uint8)
    image = Image.fromarray(indices, mode="P")
    image.putpalette(np.random.default_rng(0).permutation(256).repeat(3).tolist())
    image.save(tmp_path / "palette.png")
    with Image.open(tmp_path / "palette.png") as palette:
        assert mask_array(palette, "x").tolist() == indices.tolist()
    assert mask_array(np.stack([indices] * 3, -1), "x").tolist() == indices.tolist()
    with pytest.raises(DataError, match="one class index per pixel, received 'shape"):
        mask_array(np.random.default_rng(0).integers(0, 255, (4, 4, 3), np.uint8), "'x.png'")


def test_masks_of_0_and_255_need_mask_values(tmp_path):
    images = torch.zeros(4, 3, 16, 16, dtype=torch.uint8)
    masks = torch.zeros(4, 16, 16, dtype=torch.uint8)
    masks[:, 4:9] = 255
    with pytest.raises(DataError, match=r"pass mask_values=\[0, 255\]"):
        Trainer(SemanticSegmentation("resnet10t", pretrained=False), (images, masks), **settings())
    task = SemanticSegmentation("resnet10t", pretrained=False, mask_values=[0, 255], augment="none")
    trainer = Trainer(task, (images, masks), val_data=(images, masks), **settings(max_steps=1))
    assert task.num_classes == 2
    trainer.fit()
    assert "val/iou/1" in trainer.evaluate()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda root: (root / "masks" / "3.png").unlink(), "received none for 1 of 7: 3"),
        (lambda root: (root / "classes.txt").write_text("a\nb\n"), r"masks/\d.png' to hold 0 to 1 or 255"),
        (lambda root: Image.new("L", (9, 9)).save(root / "masks" / "3.png"), r"3.png' to have the size of its picture"),
        (lambda root: (root / "masks" / "3.png").write_bytes(b"no"), r"3.png', which cannot be decoded"),
        (lambda root: (root / "masks").rename(root / "drawn"), "Expected pictures with masks to train on"),
    ],
)
def test_broken_folders_are_refused_with_the_file(tmp_path, change, match):
    write_folder(tmp_path)
    change(tmp_path)
    with pytest.raises(DataError, match=match):
        Trainer(SemanticSegmentation(Pixelwise(), None, image_size=32), str(tmp_path), **settings()).fit()


def coco(root: Path) -> Path:
    """A COCO file with polygons, both kinds of run lengths, and an image without annotations."""
    (root / "images").mkdir()
    for name in ("a", "b"):
        Image.new("RGB", (60, 40), (90, 10, 10)).save(root / "images" / f"{name}.png")
    annotations = [
        {"id": 1, "image_id": 1, "category_id": 7, "segmentation": [[5, 5, 50, 5, 50, 35, 5, 35]]},
        {"id": 2, "image_id": 1, "category_id": 3, "segmentation": {"size": [40, 60], "counts": [800, 80, 1520]}},
    ]
    data = {
        "images": [
            {"id": 1, "file_name": "a.png", "height": 40, "width": 60},
            {"id": 2, "file_name": "b.png", "height": 40, "width": 60},
        ],
        "categories": [{"id": 7, "name": "square"}, {"id": 3, "name": "line"}],
        "annotations": annotations,
    }
    (root / "annotations.json").write_text(json.dumps(data))
    return root / "annotations.json"


def test_coco_files(tmp_path):
    file = coco(tmp_path)
    data = load_segmentation(str(file))
    assert isinstance(data, CocoSegmentation)
    assert data.classes == ["background", "line", "square"]
    mask = data.mask(0)
    assert mask.shape == (40, 60)
    assert (mask[:, 20:22] == 1).all()  # 800 / 40 columns of background, then two of the smaller object on top
    assert (mask[6:34, 25:49] == 2).all()
    assert mask[0, 0] == 0
    assert not data.mask(1).any()
    other = data.remap_classes(["background", "dot", "square", "line"]).mask(0)
    assert np.array_equal(np.array([0, 3, 2])[mask], other)
    Trainer(SemanticSegmentation(Pixelwise(3), image_size=32), str(tmp_path), **settings(max_steps=1)).fit()
    broken = json.loads(file.read_text())
    broken["annotations"][0]["category_id"] = 5
    file.write_text(json.dumps(broken))
    with pytest.raises(DataError, match=r"annotation 1 of .* to have a category of the file, received 5"):
        load_segmentation(str(file))


def test_a_misspelt_sample_is_refused():
    with pytest.raises(DataError, match="Did you mean 'shapes'"):
        load_segmentation("shape")


def test_compressed_run_lengths():
    """What pycocotools writes for a disc."""
    counts = "ad03Q18J4M2N2N2N2N2O0O2O00000O2O0001N1000001N101N2N2N2N2N3L6H[b0"
    y, x = np.mgrid[:40, :60]
    disc = (x - 30) ** 2 + (y - 18) ** 2 < 200
    annotation = {"segmentation": {"size": [40, 60], "counts": counts}}
    assert np.array_equal(rasterize(annotation, (40, 60), "x"), disc)
    with pytest.raises(DataError, match="2400 pixels for an image of 9 x 9"):
        rasterize(annotation, (9, 9), "x")


def test_hf_datasets(tmp_path):
    datasets = pytest.importorskip("datasets")
    pictures = [draw_shapes(number, 32) for number in range(6)]
    rows = {
        "image": [Image.fromarray(p.image) for p in pictures],
        "annotation": [Image.fromarray(p.mask) for p in pictures],
    }
    data = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    data = data.cast_column("annotation", datasets.Image())
    task = SemanticSegmentation(Pixelwise(), 4, image_size=32)
    trainer = Trainer(task, data, val_data=data, **settings(max_steps=1)).fit()
    assert 0 <= trainer.evaluate()["val/miou"] <= 1
    with pytest.raises(BadArgument, match="Pass num_classes"):
        Trainer(SemanticSegmentation("resnet10t", pretrained=False), data, **settings())


# -- models ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["lraspp_mobilenet_v3_large", "deeplabv3_mobilenet_v3_large"])
def test_models_of_torchvision_train_with_one_sample_too(name):
    aux = {"aux_loss": 0.4} if name.startswith("deeplab") else {}
    task = SemanticSegmentation(name, pretrained=False, image_size=32, **aux)
    trainer = Trainer(task, "shapes", **settings(batch_size=1, max_steps=1)).fit()
    assert trainer.predict([draw_shapes(0).image])[0]["mask"].shape == (64, 64)


class WithLogits(nn.Module):
    """Returns what models of transformers return, at a quarter of the size."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Conv2d(3, 4, 4, stride=4)

    def forward(self, images):
        return type("Output", (), {"logits": self.layer(images)})


def test_coarse_logits_are_resized():
    task = SemanticSegmentation(WithLogits(), 4)
    images = torch.rand(2, 3, 16, 24)
    logits = F.interpolate(task.model.layer(images), size=(16, 24), mode="bilinear")
    masks = torch.randint(0, 4, (2, 16, 24))
    loss = task.train_step((images, masks))
    assert torch.isclose(loss.sum / loss.weight, F.cross_entropy(logits, masks))
    assert torch.equal(task.predict_step(images)["mask"][1].long(), logits[1].argmax(0))


@pytest.mark.parametrize("backbone", ["resnet10t", "vit_tiny_patch16_224"])
def test_backbones_of_timm_get_a_pyramid(backbone):
    task = SemanticSegmentation(backbone, 5, pretrained=False, image_size=(64, 96), in_chans=1)
    assert task.model(torch.zeros(2, 1, 64, 96)).shape == (2, 5, 64, 96)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"backbone": "deeplabv3_resnet5"}, "Models of torchvision: deeplabv3_mobilenet"),
        ({"loss": "focal"}, "loss to be one of"),
        ({"augment": "basics"}, "Did you mean 'basic'"),
        ({"num_classes": 3, "ignore_index": 2}, "ignore_index to be none of the 3 classes"),
        ({"mask_values": [0, 0]}, "different pixel values"),
        ({"num_classes": 3, "mask_values": [0, 255]}, "for each of 3 classes"),
        ({"num_classes": 2, "class_weights": [1, 2, 3]}, "class_weights to be 2 numbers"),
        ({"in_chans": 1}, "in_chans=3 with a model of torchvision"),
        ({"backbone": "resnet10t", "aux_loss": 0.4}, "aux_loss=0 with other models"),
    ],
)
def test_plausible_mistakes(options, match):
    with pytest.raises(BadArgument, match=match):
        SemanticSegmentation(**{"pretrained": False, **options})


class Small(nn.Module):
    """A few dilated convolutions at a quarter of the size."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        layers = [nn.Conv2d(3, width, 4, stride=4), nn.BatchNorm2d(width), nn.ReLU()]
        for dilation in (1, 2, 4, 1):
            convolution = nn.Conv2d(width, width, 3, padding=dilation, dilation=dilation)
            layers += [convolution, nn.BatchNorm2d(width), nn.ReLU()]
        self.layers = nn.Sequential(*layers, nn.Conv2d(width, 4, 1))

    def forward(self, images):
        return self.layers(images)


def test_quality_on_the_sample():
    """A mean IoU of 0.5 after 70 steps was seen; the background alone gives 0.21."""
    torch.manual_seed(0)
    task = SemanticSegmentation(Small(), 4, augment="none")
    options = settings(max_steps=70, batch_size=16, lr=5e-3, optimizer="adamw")
    trainer = Trainer(task, "shapes", val_data="shapes:test", **options).fit()
    assert trainer.evaluate()["val/miou"] > 0.35
