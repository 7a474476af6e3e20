"""The whole way of a user, from a folder of pictures to an ONNX file, with the code of the documentation."""

import json
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image


@pytest.fixture
def pictures(tmp_path):
    """Two classes of noisy pictures, one bright and one dark, and a plain folder to predict."""
    rng = np.random.default_rng(0)
    for name, level in (("bright", 200), ("dark", 50)):
        folder = tmp_path / "data" / "train" / name
        folder.mkdir(parents=True)
        for i in range(10):
            pixels = rng.normal(level, 20, (40 + i, 50, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(folder / f"{i}.png")
    test = tmp_path / "data" / "test"
    test.mkdir()
    for i, level in enumerate((220, 40, 210)):
        Image.fromarray(np.full((30, 30, 3), level, np.uint8)).save(test / f"{i}.png")


@pytest.mark.slow
@pytest.mark.usefixtures("pictures")
def test_from_a_folder_of_pictures_to_an_onnx_file():
    from trainformer import Trainer
    from trainformer.callbacks import EarlyStopping
    from trainformer.tasks import ImageClassification

    trainer = Trainer(
        ImageClassification("resnet10t", pretrained=False, image_size=64), data="data/train", val_split=0.1,
        epochs=2, batch_size=6, lr=1e-3, num_workers=1, callbacks=[EarlyStopping(patience=3)],
    )  # fmt: skip
    assert trainer.check().ok
    trainer.fit()
    metrics = trainer.evaluate()
    assert {"val/loss", "val/accuracy", "val/f1"} <= set(metrics)
    rows = trainer.predict("data/test")
    assert len(rows) == 3
    assert all(row["probabilities"].shape == (2,) for row in rows)
    path = trainer.export("model", format="onnx", input_shape=(3, 64, 64))
    assert path == "model.onnx"
    x = torch.randn(1, 3, 64, 64)
    with torch.no_grad():
        want = trainer.task.model.eval()(x).numpy()
    (got,) = onnxruntime.InferenceSession(path).run(None, {"input": x.numpy()})
    assert np.allclose(got, want, atol=1e-3)
    config = json.loads((trainer.run_folder / "config.json").read_text())
    assert config["class_names"]["value"] == ["bright", "dark"]
    assert Path(trainer.run_folder, "metrics.jsonl").exists()


def test_a_classifier_learns_the_digits():
    """Small enough for every test run; the demo does the same with more epochs."""
    from trainformer import Trainer
    from trainformer.tasks import ImageClassification

    task = ImageClassification(torch.nn.Sequential(
        torch.nn.Conv2d(1, 32, 3, padding=1), torch.nn.BatchNorm2d(32), torch.nn.ReLU(),
        torch.nn.Conv2d(32, 64, 3, padding=1), torch.nn.BatchNorm2d(64), torch.nn.ReLU(), torch.nn.MaxPool2d(2),
        torch.nn.Flatten(), torch.nn.Linear(64 * 16, 10),
    ), num_classes=10, augment="none")  # fmt: skip
    trainer = Trainer(task, data="digits", val_split=0.2, epochs=6, batch_size=64, lr=3e-3, log="none", save_best=0)
    trainer.fit()
    assert trainer.evaluate()["val/accuracy"] >= 0.97
    assert task.confusion.sum() == 359
