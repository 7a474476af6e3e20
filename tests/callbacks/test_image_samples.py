"""ImageSamples: exact pixels, exact predictions, and no effect on training."""

import base64
import io
import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from toys import MeanTask, classes, same, weights
from trainformer import Trainer
from trainformer.callbacks import ImageSamples
from trainformer.core.errors import BadArgument, DataError
from trainformer.tasks import ImageClassification


def pictures(count=40, size=12, channels=3, seed=0):
    generator = torch.Generator().manual_seed(seed)
    images = torch.randint(0, 256, (count, channels, size, size), generator=generator, dtype=torch.uint8)
    return images, torch.arange(count) * 2 // count  # sorted by class, as folders are


def fit(*callbacks, images=None, channels=3, **options):
    torch.manual_seed(3)
    images = images or pictures(channels=channels)
    size = images[0].shape[-1]
    model = nn.Sequential(nn.Flatten(), nn.Dropout(0.5), nn.Linear(channels * size * size, 2))
    task = ImageClassification(model, num_classes=2, augment="none", image_size=size, in_chans=channels)
    usual = {"batch_size": 8, "epochs": 2, "log": "none", "run_dir": "run", "val_data": images}
    return Trainer(task, images, callbacks=list(callbacks), **{**usual, **options}).fit()


def recorded():
    lines = [json.loads(line) for line in Path("run/records.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == "images"]


def opened(shown):
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(shown["png"]))))


@pytest.mark.parametrize("channels", [1, 3])
def test_images_are_recorded_with_true_and_predicted_class(channels):
    images, labels = pictures(channels=channels)
    trainer = fit(ImageSamples(n=5), channels=channels)
    first, last = recorded()
    assert [first["step"], last["step"]] == [5, 10]
    assert last["key"] == "val"
    rows = trainer.predict(images)
    seen = set()
    for shown in last["images"]:
        pixels = opened(shown)
        pixels = pixels[None] if channels == 1 else pixels.transpose(2, 0, 1)
        place = int((images.float() - torch.tensor(pixels.copy()).float()).abs().flatten(1).amax(1).argmin())
        assert np.array_equal(images[place].numpy(), pixels)  # normalisation is undone exactly
        prediction, sure = int(rows[place]["prediction"]), float(rows[place]["probability"])
        assert shown["caption"] == f"true {int(labels[place])}, predicted {prediction} ({sure:.2f})"
        seen.add(int(labels[place]))
    assert len(last["images"]) == 5
    assert seen == {0, 1}  # evenly over the set


def test_large_images_are_downscaled():
    fit(ImageSamples(n=2, size=16), images=pictures(8, 40), epochs=1)
    assert [opened(shown).shape for shown in recorded()[0]["images"]] == [(16, 16, 3)] * 2


def test_float_images():
    images, labels = pictures()
    fit(ImageSamples(n=2), images=(images.float() / 255, labels), epochs=1)
    assert np.array_equal(opened(recorded()[0]["images"][0]), images[0].permute(1, 2, 0).numpy())


def test_training_is_not_affected():
    without = fit(run_dir="without")
    assert same(weights(without.task), weights(fit(ImageSamples()).task))


def test_every_other_evaluation():
    fit(ImageSamples(every=2), epochs=4)
    assert [record["step"] for record in recorded()] == [10, 20]


@pytest.mark.parametrize("options", [{"n": 0}, {"n": 17}, {"size": 0}, {"every": 0}])
def test_bad_arguments(options):
    with pytest.raises(BadArgument, match=next(iter(options))):
        ImageSamples(**options)


def test_data_other_than_images_is_rejected():
    task = MeanTask()
    task.predict_step = lambda batch: {"prediction": task.model(batch[0]).argmax(-1)}
    trainer = Trainer(task, classes(), val_data=classes(16), max_steps=2, log="none", callbacks=[ImageSamples()])
    with pytest.raises(DataError, match="batches of images"):
        trainer.fit()


def test_each_validation_set_has_its_own_images():
    sets = {"a": pictures(seed=1), "b": pictures(seed=2)}
    fit(ImageSamples(n=3), val_data=sets, eval_every={"b": 2})
    assert [(line["step"], line["key"]) for line in recorded()] == [(5, "val/a"), (10, "val/a"), (10, "val/b")]
    for line in recorded():
        known = sets[line["key"][-1]][0]
        for shown in line["images"]:
            pixels = torch.tensor(opened(shown).transpose(2, 0, 1).copy())
            assert (known == pixels).flatten(1).all(1).any()
