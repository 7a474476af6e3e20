"""Object detection: data, boxes under augmentation, losses per image, and metrics against pycocotools."""

from __future__ import annotations

import json
import math
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from promise_toys import boxed, detector, settings
from torch import nn
from torch.utils.data import DataLoader
from torchvision.transforms import v2

from trainformer import Trainer
from trainformer.core import BadArgument, DataError
from trainformer.data.detection import checked_target, load_detection
from trainformer.data.shapes import draw_shapes
from trainformer.eval.detection import average_precision
from trainformer.models.detection import build_detector, image_losses
from trainformer.tasks import ObjectDetection
from trainformer.tasks.vision.box_augment import BoxTransform


def random_detections(seed: int, images: int = 30, classes: int = 4):
    """Targets of all sizes, some of them crowds, and detections near them, with ties among the scores."""
    rng = np.random.default_rng(seed)
    predictions, targets = [], []
    for _ in range(images):
        count = rng.integers(0, 7)
        corners, sides = rng.uniform(0, 300, (count, 2)), np.exp(rng.uniform(1.5, 5.5, (count, 2)))
        boxes = np.round(np.concatenate([corners, corners + sides], 1), 1)
        labels = rng.integers(0, classes, count)
        crowd, area = (rng.random(count) < 0.15).astype(int), sides.prod(1) * rng.uniform(0.5, 1, count)
        targets.append({"boxes": boxes, "labels": labels, "iscrowd": crowd, "area": area})
        times = rng.integers(0, 4, count)
        near = np.repeat(boxes, times, 0)
        near = near + rng.normal(0, 1, near.shape) * np.repeat(sides.min(1) * 0.12, times)[:, None]
        guesses = np.where(rng.random(len(near)) < 0.85, np.repeat(labels, times), rng.integers(0, classes, len(near)))
        more = rng.integers(0, 6)
        corners = rng.uniform(0, 300, (more, 2))
        near = np.concatenate([near, np.concatenate([corners, corners + rng.uniform(3, 150, (more, 2))], 1)])
        near[:, 2:] = np.maximum(near[:, 2:], near[:, :2] + 0.5)
        guesses = np.concatenate([guesses, rng.integers(0, classes, more)])
        predictions.append({"boxes": near, "labels": guesses, "scores": np.round(rng.random(len(near)), 2)})
    return predictions, targets


NAMES = ("map", "map_50", "map_75", "map_small", "map_medium", "map_large", "mar_1", "mar_10", "mar_100")


def test_average_precision_is_that_of_pycocotools():
    """What pycocotools 2.0.11 gives for these detections."""
    found = average_precision(*random_detections(7), num_classes=4)
    wanted = [0.20640905037017954, 0.3654920813286916, 0.19212399635087926, 0.2988899247135059, 0.19489238671678594]
    wanted += [0.16464146414641465, 0.2570208261444674, 0.47333326144467447, 0.47333326144467447]
    assert [found[name] for name in NAMES] == pytest.approx(wanted, abs=1e-9)
    each = [0.2529873915172832, 0.17106025913595807, 0.17739355031562967, 0.2241950005118472]
    assert found["per_class"] == pytest.approx(each, abs=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_average_precision_against_pycocotools(seed):
    coco = pytest.importorskip("pycocotools.coco")
    evaluation = pytest.importorskip("pycocotools.cocoeval")

    def boxes(rows, extra):
        for image, row in enumerate(rows):
            for place, (x1, y1, x2, y2) in enumerate(row["boxes"].tolist()):
                entry = {
                    "image_id": image,
                    "category_id": int(row["labels"][place]),
                    "bbox": [x1, y1, x2 - x1, y2 - y1],
                }
                yield {**entry, **{name: row[key][place].item() for name, key in extra.items()}}

    predictions, targets = random_detections(seed)
    truth = coco.COCO()
    annotations = [{**a, "id": n + 1} for n, a in enumerate(boxes(targets, {"iscrowd": "iscrowd", "area": "area"}))]
    images, kinds = ([{"id": number} for number in range(count)] for count in (30, 4))
    truth.dataset = {"images": images, "categories": kinds, "annotations": annotations}
    truth.createIndex()
    reference = evaluation.COCOeval(truth, truth.loadRes(list(boxes(predictions, {"score": "scores"}))), "bbox")
    reference.evaluate()
    reference.accumulate()
    reference.summarize()
    found = average_precision(predictions, targets, num_classes=4)
    ours = [-1 if math.isnan(found[name]) else found[name] for name in NAMES]
    assert ours == pytest.approx(list(reference.stats[:9]), abs=1e-12)


def test_average_precision_by_hand():
    """Two objects, one found with the highest score, one missed: precision 1 up to recall 0.5, that is at 51 of 101."""
    target = {"boxes": [[0, 0, 10, 10], [20, 20, 30, 30]], "labels": [0, 0]}
    guess = {"boxes": [[0, 0, 10, 10], [50, 50, 60, 60]], "labels": [0, 0], "scores": [0.9, 0.8]}
    found = average_precision([guess], [target], num_classes=2)
    assert found["map"] == pytest.approx(51 / 101)
    assert found["mar_100"] == pytest.approx(0.5)
    assert math.isnan(found["per_class"][1])
    nothing = {"boxes": [], "labels": [], "scores": []}
    assert average_precision([nothing], [target], num_classes=1)["map"] == 0


@pytest.mark.parametrize("batch_size", [1, 3])
def test_metrics_are_those_of_the_predictions(tmp_path, batch_size):
    write_coco(tmp_path)
    task = ObjectDetection(detector(), image_size=48, score_threshold=0.01)
    trainer = Trainer(
        task, str(tmp_path), val_data=str(tmp_path), **settings(eval_batch_size=batch_size, lr=0.05)
    ).fit()
    found, rows = trainer.evaluate(), trainer.predict(str(tmp_path))
    data = load_detection(str(tmp_path))
    targets = [checked_target(data.target(i), (200, 300), None, "x") for i in range(len(data))]
    by_hand = average_precision(rows, targets, num_classes=3)
    for name in NAMES:
        assert found.get(f"val/{name}", float("nan")) == pytest.approx(by_hand[name], nan_ok=True)
    for row, (height, width) in zip(rows, SIZES, strict=True):
        limits = torch.tensor([width, height, width, height])
        assert (row["boxes"] >= 0).all()
        assert (row["boxes"] <= limits + 1e-4).all()


@pytest.mark.parametrize(
    "name", ["resnet10t", "fasterrcnn_mobilenet_v3_large_320_fpn", "ssdlite320_mobilenet_v3_large"]
)
def test_the_loss_of_an_image_is_that_of_a_batch_with_this_image_alone(name):
    size = (320, 320) if name != "resnet10t" else (64, 64)
    model = build_detector(name, num_classes=3, image_size=size).train()
    for part in model.modules():
        if isinstance(part, nn.BatchNorm2d):
            part.eval()  # which would see other images
    images = torch.rand(2, 3, *size)
    boxes = torch.tensor([[4.0, 4.0, 40.0, 30.0], [10.0, 20.0, 50.0, 60.0]])
    targets = [{"boxes": boxes, "labels": torch.tensor([1, 2])}, {"boxes": boxes[:0], "labels": boxes[:0, 0].long()}]
    torch.manual_seed(0)
    ours = image_losses(model, images, [dict(target) for target in targets])
    torch.manual_seed(0)
    for place in range(2):
        alone = model([images[place]], [dict(targets[place])])
        assert ours[place].keys() == alone.keys()
        for key, value in alone.items():
            assert torch.allclose(ours[place][key], value, rtol=1e-3, atol=1e-5), key
    assert image_losses(nn.Linear(1, 1), images, targets) is None


# -- data ------------------------------------------------------------------------------------------------------------

SIZES = [(48, 64), (64, 40), (50, 50)]


def write_coco(root: Path, change=None) -> None:
    """Three pictures; the last has no box, the second a crowd."""
    (root / "images").mkdir()
    for number, (height, width) in enumerate(SIZES):
        Image.fromarray(draw_shapes(number, 64).image[:height, :width]).save(root / "images" / f"{number}.png")
    annotations = [
        {"id": 1, "image_id": 10, "category_id": 7, "bbox": [3, 4, 20, 22], "area": 300.0, "iscrowd": 0},
        {"id": 2, "image_id": 10, "category_id": 5, "bbox": [30, 20, 20, 20], "area": 400.0, "iscrowd": 0},
        {"id": 3, "image_id": 11, "category_id": 9, "bbox": [0, 0, 40.5, 30], "area": 1200.0, "iscrowd": 1},
        {"id": 4, "image_id": 11, "category_id": 9, "bbox": [5, 40, 12, 12], "area": 144.0, "iscrowd": 0},
    ]
    data = {
        "images": [{"id": 10 + n, "file_name": f"{n}.png", "height": h, "width": w} for n, (h, w) in enumerate(SIZES)],
        "categories": [{"id": 7, "name": "b"}, {"id": 5, "name": "a"}, {"id": 9, "name": "c"}],
        "annotations": annotations,
    }
    if change is not None:
        change(annotations)
    (root / "instances.json").write_text(json.dumps(data))


def test_coco_files(tmp_path):
    write_coco(tmp_path)
    data = load_detection(str(tmp_path / "instances.json"))
    assert (len(data), data.classes) == (3, ["a", "b", "c"])
    target = data.target(0)
    assert np.asarray(target["boxes"]).tolist() == [[3, 4, 23, 26], [30, 20, 50, 40]]
    assert (target["labels"], target["area"]) == ([1, 0], [300.0, 400.0])
    assert data.remap_classes(["c", "b", "a"]).target(0)["labels"] == [1, 2]
    sample = BoxTransform((64, 64), "none", train=True)(
        torch.zeros(3, 64, 40, dtype=torch.uint8), checked_target(data.target(1), (64, 40), 3, "x")
    )[1]
    assert sample["labels"].tolist() == [2]  # without the crowd


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda a: a[0].update(bbox=[3, 4, 0, 22]), r"x1 < x2 and y1 < y2 in '.*0.png', received .*\(box 0\)"),
        (lambda a: a[1].update(bbox=[30, 20, 90, 20]), r"in the picture of 64 x 48 in '.*0.png'"),
        (lambda a: a[0].pop("bbox"), r"annotation 1 of '.*0.png' to have a bbox"),
        (lambda a: a[0].update(category_id=1), "annotation 1 .* to have a category of the file"),
        (lambda a: a[0].update(image_id=1), "annotation 1 .* to belong to an image"),
    ],
)
def test_broken_coco_files_are_refused_with_the_file(tmp_path, change, match):
    write_coco(tmp_path, change)
    with pytest.raises(DataError, match=match):
        Trainer(ObjectDetection(detector(), image_size=48), str(tmp_path), **settings(batch_size=3)).fit()


def test_pascal_voc(tmp_path):
    (tmp_path / "JPEGImages").mkdir()
    (tmp_path / "Annotations").mkdir()
    Image.new("RGB", (60, 40)).save(tmp_path / "JPEGImages" / "1.jpg")
    thing = "<object><name>{}</name><difficult>{}</difficult><bndbox><xmin>{}</xmin><ymin>6</ymin><xmax>30</xmax>"
    things = "".join(
        thing.format(*values) + "<ymax>20</ymax></bndbox></object>" for values in (("dog", 0, 1), ("cat", 1, 11))
    )
    text = f"<annotation><filename>1.jpg</filename>{things}</annotation>"
    (tmp_path / "Annotations" / "1.xml").write_text(text)
    data = load_detection(str(tmp_path))
    assert data.classes == ["cat", "dog"]
    target = data[0][1]
    assert target == {"boxes": [[0, 5, 30, 20], [10, 5, 30, 20]], "labels": [1, 0], "iscrowd": [0, 1]}
    assert data.remap_classes(["bird", "cat", "dog"]).target(0)["labels"] == [2, 1]
    (tmp_path / "Annotations" / "2.xml").write_text("<annotation>")
    with pytest.raises(DataError, match=r"2\.xml"):
        load_detection(str(tmp_path))


def test_hf_objects():
    row = {"image": np.zeros((20, 20, 3), np.uint8), "objects": {"bbox": [[2, 3, 5, 6]], "category": [1]}}
    trainer = Trainer(ObjectDetection(detector(), 3, image_size=48), [row] * 4, **settings(max_steps=1)).fit()
    assert trainer.task.num_classes == 3


def test_loaders_of_lists(tmp_path):
    samples = [
        (torch.from_numpy(i).permute(2, 0, 1) / 255, {k: torch.as_tensor(v) for k, v in t.items()}) for i, t in boxed(2)
    ]
    loader = DataLoader(samples, batch_size=2, collate_fn=lambda batch: tuple(zip(*batch, strict=True)))
    trainer = Trainer(ObjectDetection(detector(), 3), loader, **settings(max_steps=1)).fit()
    assert trainer.state.samples == 2


def test_boxes_move_with_the_picture():
    for seed in range(8):
        for augment in ("flip", "basic", "strong", v2.RandomVerticalFlip()):
            torch.manual_seed(seed)
            image = torch.zeros(3, 50, 40, dtype=torch.uint8)
            image[:, 10:30, 5:20] = 255
            target = checked_target({"boxes": [[5, 10, 20, 30]], "labels": [2]}, (50, 40), 3, "x")
            pixels, moved = BoxTransform((60, 60), augment, train=True)(image, target)
            assert pixels.shape == (3, 60, 60)
            if augment == "strong" or not len(moved["labels"]):  # other colours, or cropped away
                continue
            rows, columns = (pixels[0] > 128).any(1).nonzero(), (pixels[0] > 128).any(0).nonzero()
            drawn = torch.tensor([columns.min(), rows.min(), columns.max() + 1, rows.max() + 1]).float()
            assert (moved["boxes"][0] - drawn).abs().max() <= 1.5


# -- the task --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"backbone": "fasterrcnn_resnet5_fpn"}, "Detectors of torchvision: fasterrcnn_mobilenet"),
        ({"augment": "basics"}, "Did you mean 'basic'"),
        ({"score_threshold": 2}, "score_threshold to be from 0 to 1"),
        ({"in_chans": 1}, "in_chans=3"),
        ({"backbone": "ssdlite320_mobilenet_v3_large", "image_size": 64}, r"image_size=\(320, 320\)"),
        ({"label_offset": 2}, "label_offset to be"),
    ],
)
def test_plausible_mistakes(options, match):
    with pytest.raises(BadArgument, match=match):
        ObjectDetection(**{"pretrained": False, **options})


def test_labels_out_of_range_and_missing_boxes():
    data = boxed(4)
    data[3][1]["labels"] = data[3][1]["labels"] + 7
    with pytest.raises(DataError, match=r"labels 0 to 2 in sample 3"):
        Trainer(ObjectDetection(detector(), 3, image_size=48), data, **settings()).fit()
    with pytest.raises(DataError, match="received pictures alone"):
        Trainer(ObjectDetection(detector(), 3), [np.zeros((9, 9, 3), np.uint8)], **settings())


def test_a_detector_of_the_user():
    class Whole(nn.Module):
        """As torchvision's: losses in training, detections in evaluation."""

        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, images, targets=None):
            if targets is not None:
                return {"loss": (self.weight * torch.stack([image.mean() for image in images]).mean()).sum()}
            box = torch.tensor([[0.0, 0.0, 8.0, 8.0]])
            return [{"boxes": box, "scores": torch.ones(1), "labels": torch.ones(1).long()} for _ in images]

    task = ObjectDetection(Whole(), 3, label_offset=1, image_size=48)
    trainer = Trainer(task, boxed(4), val_data=boxed(4), **settings(max_steps=1)).fit()
    assert trainer.predict(boxed(1))[0]["labels"].tolist() == [0]
    assert 0 <= trainer.evaluate()["val/map"] <= 1


def test_quality_on_the_sample():
    """A `map_50` of 0.28 after 60 steps was seen; an untrained detector has 0."""
    torch.manual_seed(0)
    task = ObjectDetection(detector(64), augment="flip")
    trainer = Trainer(
        task, "shapes", val_data="shapes:test", **settings(max_steps=60, lr=5e-3, optimizer="adamw")
    ).fit()
    assert trainer.evaluate()["val/map_50"] > 0.12
