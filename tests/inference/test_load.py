"""`trainformer.load`, exports with their preprocessing, and every command where the training data are gone."""

import io
import json
import shutil
from pathlib import Path

import numpy as np
import onnxruntime
import pandas as pd
import pytest
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import trainformer
from toys import MeanTask, classes
from trainformer import OptimizerConfig, Trainer
from trainformer.checkpoint import finalize
from trainformer.cli import main
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.folder import read_image
from trainformer.inference import OnnxPredictor
from trainformer.tasks import SSL, ImageClassification, MetricLearning, TabularClassification

USUAL = {
    "epochs": 2,
    "batch_size": 8,
    "lr": 1e-2,
    "log": "none",
    "num_workers": 0,
    "device": "cpu",
    "precision": "fp32",
}


def photograph(folder, names, count, seed=0):
    """JPEGs of many sizes, with one brightness per class; every other one is rotated by EXIF."""
    generator = np.random.default_rng(seed)
    for number, name in enumerate(names):
        (folder / name).mkdir(parents=True)
        for place in range(count):
            height, width = (int(side) for side in generator.integers(30, 120, 2))
            coarse = generator.integers(90 * number, 90 * number + 160, (6, 6, 3)).astype(np.uint8)
            image = Image.fromarray(coarse).resize((width, height), Image.Resampling.BICUBIC)
            exif = Image.Exif()
            exif[0x0112] = 6 if place % 2 else 1
            image.save(folder / name / f"{place}.jpg", quality=90, exif=exif)


class Moved:
    """A run whose folder was moved, and whose training data are gone; `wanted` is what the trainer predicted."""

    def __init__(self, root, channels):
        self.photos = root / "photos"
        photograph(self.photos, ("cat", "dog"), 4, seed=1)
        photograph(root / "train", ("cat", "dog"), 8)
        task = ImageClassification("test_resnet", pretrained=False, in_chans=channels, image_size=(40, 32))
        trainer = Trainer(task, str(root / "train"), run_dir=root / "run", ema=0.5, **USUAL).fit()
        self.channels = channels
        self.wanted = trainer.predict(str(self.photos))
        self.metrics = trainer.evaluate(str(self.photos))
        self.weights = {name: value.clone() for name, value in trainer._run.inference_model().state_dict().items()}
        shutil.rmtree(root / "train")
        self.run = shutil.move(root / "run", root / "elsewhere")
        self.files = [str(self.photos / row["id"]) for row in self.wanted]

    def differs(self, rows):
        """The largest difference of a probability."""
        pairs = zip(rows, self.wanted, strict=True)
        return max((row["probabilities"] - wanted["probabilities"]).abs().max().item() for row, wanted in pairs)


@pytest.fixture(scope="module", params=[1, 3])
def moved(request, tmp_path_factory):
    return Moved(tmp_path_factory.mktemp("moved"), request.param)


def test_every_form_of_an_image_gives_what_the_trainer_predicts(moved):
    model = trainformer.load(moved.run)
    upright = [np.array(Image.open(file).convert("RGB")) for file in moved.files]
    turned = [np.rot90(image, -1) if number % 2 else image for number, image in enumerate(upright)]
    forms = {
        "paths": moved.files,
        "Paths": [Path(file) for file in moved.files],
        "bytes": [Path(file).read_bytes() for file in moved.files],
        "images": [Image.open(file) for file in moved.files],
        "arrays": turned,
        "tensors": [torch.from_numpy(image.copy()).permute(2, 0, 1) for image in turned],
        "folder": str(moved.photos),
    }
    for name, form in forms.items():
        assert moved.differs(model.predict(form)) == 0, name
        assert moved.differs(model(form, batch_size=3)) < 1e-6, name
    row = model(moved.files[5])
    assert (row["class"], row["id"]) == (("cat", "dog")[int(row["prediction"])], moved.files[5])
    assert model.class_names == ["cat", "dog"]
    assert model.evaluate(str(moved.photos)) == pytest.approx(moved.metrics)
    assert model.predict([]) == []


def test_a_graph_with_the_preprocessing_takes_raw_jpegs(moved, tmp_path, capsys):
    assert main(["export", str(moved.run), str(tmp_path / "raw" / "model.onnx"), "--preprocess"]) == 0
    session = onnxruntime.InferenceSession(tmp_path / "raw" / "model.onnx")
    (taken,) = session.get_inputs()
    assert (taken.name, taken.type) == ("images", "tensor(uint8)")
    assert taken.shape == ["batch", moved.channels, "height", "width"]
    rows = []
    for file in moved.files:
        image = np.asarray(read_image(file, moved.channels))
        batch = image.reshape(*image.shape[:2], moved.channels).transpose(2, 0, 1)[None]
        (probabilities,) = session.run(None, {"images": batch})
        rows.append({"probabilities": torch.from_numpy(probabilities[0])})
    assert moved.differs(rows) < 1e-5
    assert moved.differs(trainformer.load(tmp_path / "raw")(moved.files)) < 1e-5
    scripted = trainformer.load(moved.run).export(tmp_path / "script" / "m", "torchscript", preprocess=True)
    with torch.no_grad():
        found = torch.jit.load(scripted)(torch.tensor(batch))
    assert torch.allclose(found[0], moved.wanted[-1]["probabilities"], atol=1e-5)
    with pytest.raises(BadArgument, match="torch files may hold code"):
        trainformer.load(tmp_path / "script")


@pytest.mark.parametrize("moved", [1], indirect=True)
def test_a_plain_graph_comes_with_a_description_that_suffices(moved, tmp_path):
    model = trainformer.load(moved.run)
    path = model.export(tmp_path / "plain.onnx")
    said = json.loads((tmp_path / "preprocessing.json").read_text())
    assert len(said["mean"]) == len(said["std"]) == said["channels"] == moved.channels
    assert (said["classes"], said["activation"], said["crop"]["size"]) == (["cat", "dog"], "softmax", [40, 32])
    assert said["models"]["plain.onnx"]["input"]["shape"] == ["batch", moved.channels, 40, 32]
    exported = trainformer.load(path)
    assert isinstance(exported, OnnxPredictor)
    assert moved.differs(exported(moved.files, batch_size=3)) < 1e-5
    assert exported(moved.files[0])["class"] == model(moved.files[0])["class"]
    # By hand, as the description says.
    (tall, wide), (height, width) = said["resize"]["size"], said["crop"]["size"]
    image = read_image(moved.files[0], moved.channels)
    size = max(wide, tall * image.width // image.height), max(tall, wide * image.height // image.width)
    image = image.resize(size, getattr(Image.Resampling, said["resize"]["interpolation"].upper()))
    left, top = round((image.width - width) / 2), round((image.height - height) / 2)
    pixels = np.asarray(image.crop((left, top, left + width, top + height)), np.float32)
    pixels = (pixels.reshape(height, width, -1) * said["rescale"] - said["mean"]) / said["std"]
    batch = pixels.transpose(2, 0, 1)[None].astype(np.float32)
    (logits,) = onnxruntime.InferenceSession(path).run(None, {"input": batch})
    assert torch.allclose(torch.tensor(logits).softmax(-1)[0], moved.wanted[0]["probabilities"], atol=1e-5)
    other = ImageClassification("test_resnet", num_classes=3, pretrained=False)
    images = torch.zeros(8, 3, 32, 32, dtype=torch.uint8)
    trainer = Trainer(other, (images, torch.arange(8) % 3), run_dir=tmp_path / "run", **USUAL)
    trainer.export(tmp_path / "other", "torchscript")  # which needs another preprocessing
    assert json.loads((tmp_path / "preprocessing.json").read_text()) == said
    own = json.loads((tmp_path / "other.pt.preprocessing.json").read_text())
    assert (own["channels"], list(own["models"])) == (3, ["other.pt"])


def test_every_command_works_without_the_training_data(moved, tmp_path, capsys):
    run, photos = str(moved.run), str(moved.photos)
    assert main(["evaluate", run, "--data", photos, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"] == pytest.approx(moved.metrics)
    assert main(["evaluate", run]) == 1
    assert "--data DATA" in " ".join(capsys.readouterr().err.split())
    assert main(["predict", run, photos, "--out", str(tmp_path / "out.jsonl")]) == 0
    rows = [json.loads(line) for line in (tmp_path / "out.jsonl").read_text().splitlines()]
    assert [row["id"] for row in rows] == [row["id"] for row in moved.wanted]
    assert moved.differs([{"probabilities": torch.tensor(row["probabilities"])} for row in rows]) < 1e-6
    assert main(["export", run, str(tmp_path / "weights")]) == 0
    exported = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(torch.equal(exported[name], value) for name, value in moved.weights.items())
    assert main(["finalize", run, str(tmp_path / "final")]) == 0
    assert moved.differs(trainformer.load(tmp_path / "final").predict(moved.files)) == 0
    assert main(["evaluate", str(tmp_path / "final"), "--data", photos]) == 0
    assert main(["evaluate", str(tmp_path / "final")]) == 1
    capsys.readouterr()
    alone = shutil.copytree(next((moved.run / "checkpoints").glob("step_*")), tmp_path / "alone")
    assert main(["predict", str(alone), photos]) == 0
    assert moved.differs(trainformer.load(alone).predict(moved.files)) == 0


# -- other models ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32])
def test_gray_images_without_a_dimension_for_channels(dtype, tmp_path):
    """(N, 28, 28): pixels become 3 x 32 x 32, as timm's backbones take them; floats keep their size."""
    images = torch.randint(0, 256, (16, 28, 28)).to(dtype)
    images = images if dtype == torch.uint8 else images / 255
    task = ImageClassification("test_resnet", pretrained=False)
    trainer = Trainer(task, (images, torch.arange(16) % 2), run_dir=tmp_path / "run", **USUAL).fit()
    path = trainer.export(tmp_path / "m", "torchscript")
    shape = (3, 32, 32) if dtype == torch.uint8 else (1, 28, 28)
    assert torch.jit.load(path)(torch.zeros(5, *shape)).shape == (5, 2)
    wanted = trainer.predict(images[:2])
    rows = trainformer.load(tmp_path / "run").predict(list(images[:2]))
    assert all(torch.equal(row["probabilities"], want["probabilities"]) for row, want in zip(rows, wanted, strict=True))
    if dtype == torch.uint8:
        whole = torch.jit.load(trainer.export(tmp_path / "whole", "torchscript", preprocess=True))
        assert torch.allclose(whole(images[:1, None].repeat(1, 3, 1, 1))[0], wanted[0]["probabilities"], atol=1e-5)
    else:
        with pytest.raises(BadArgument, match="trained on float images"):
            trainer.export(tmp_path / "whole", "torchscript", preprocess=True)
        with pytest.raises(DataError, match="a float image as the model was trained on"):
            trainformer.load(tmp_path / "run").predict(Image.new("L", (28, 28)))


def test_a_shape_that_the_model_does_not_take_is_refused(tmp_path):
    trainer = Trainer(
        MeanTask(), classes(dtype=torch.float64), run_dir=tmp_path / "run", **USUAL | {"precision": "auto"}
    )
    with pytest.raises(BadArgument, match=r"takes a batch of shape \(2, 28, 28\).*Pass input_shape"):
        trainer.export(tmp_path / "m", "onnx", input_shape=(28, 28))
    with pytest.raises(BadArgument, match="one prediction per image"):
        trainer.export(tmp_path / "m", "onnx", preprocess=True)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("options", [{"tta": 3}, {"tta": "flip", "loss": "bce"}])
def test_views_and_averages_are_in_the_graph(options, tmp_path):
    images = torch.randint(0, 256, (8, 3, 40, 32), dtype=torch.uint8)
    task = ImageClassification("test_resnet", pretrained=False, augment="none", **options)
    trainer = Trainer(task, (images, torch.arange(8) % 2), run_dir=tmp_path / "run", **USUAL).fit()
    graph = torch.jit.load(trainer.export(tmp_path / "m", "torchscript", preprocess=True))
    wanted = torch.stack([row["probabilities"] for row in trainer.predict(images)])
    assert torch.allclose(graph(images), wanted, atol=1e-5)
    rows = trainformer.load(tmp_path / "run").predict(images)
    assert torch.equal(torch.stack([row["probabilities"] for row in rows]), wanted)


def test_embeddings(tmp_path):
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    data = images, torch.arange(8) % 2
    tasks = (MetricLearning("test_resnet", 8, pretrained=False), SSL.simclr("test_resnet", pretrained=False))
    for task in tasks:
        name = type(task).__name__
        trainer = Trainer(task, data, run_dir=tmp_path / name, **USUAL).fit()
        wanted = torch.stack([row["embedding"] for row in trainer.predict(images)])
        rows = trainformer.load(tmp_path / name).predict(images)
        assert torch.equal(torch.stack([row["embedding"] for row in rows]), wanted)
        graph = torch.jit.load(trainer.export(tmp_path / f"{name}-graph" / "m", "torchscript", preprocess=True))
        assert torch.allclose(graph(images), wanted, atol=1e-5)


class Predicts(MeanTask):
    def predict_step(self, batch):
        return {"logits": self.model(batch[0])}


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3 * 32 * 32, 2)

    def forward(self, images):
        return self.layer(images.flatten(1))


def test_a_module_or_task_of_your_own_is_passed(tmp_path):
    images = torch.randint(0, 256, (8, 3, 32, 32), dtype=torch.uint8)
    loader = DataLoader(TensorDataset(images, torch.arange(8) % 2), batch_size=4)
    trainer = Trainer(ImageClassification(Net()), loader, run_dir=tmp_path / "net", **USUAL | {"batch_size": 4}).fit()
    assert trainer.task.preprocessing.size == (32, 32)  # of the loader
    with pytest.raises(BadArgument, match=r"backbone \(a Net\)\. Make the task yourself"):
        trainformer.load(tmp_path / "net")
    model = trainformer.load(tmp_path / "net", task=ImageClassification(Net()))
    assert torch.equal(model(images[0])["probabilities"], trainer.predict(images)[0]["probabilities"])
    trainer = Trainer(Predicts(), classes(), run_dir=tmp_path / "own", **USUAL | {"precision": "auto"}).fit()
    with pytest.raises(BadArgument, match=r"task=Predicts\(...\)"):
        trainformer.load(tmp_path / "own")
    model = trainformer.load(tmp_path / "own", task=Predicts())
    rows, wanted = model.predict(classes(6)), trainer.predict(classes(6))
    assert [row.keys() for row in rows] == [row.keys() for row in wanted]
    assert all(torch.equal(row["logits"], want["logits"]) for row, want in zip(rows, wanted, strict=True))


def test_what_cannot_be_predicted_from_is_said(moved, tmp_path):
    model = trainformer.load(moved.run)
    with pytest.raises(DataError, match="uint8 pixels from 0 to 255"):
        model(np.zeros((30, 30, 3)))
    with pytest.raises(DataError, match="cannot be decoded"):
        model(b"no image")
    with pytest.raises(DataError, match=r"nowhere\.jpg, which does not exist"):
        model("nowhere.jpg")
    with pytest.raises(DataError, match="an image with pixels, received 'one of 0 x 9'"):
        model(np.zeros((0, 9, 3), np.uint8))
    with pytest.raises(DataError, match="image 1 to be a path, a PIL image"):
        model([moved.files[0], 3])
    with pytest.raises(BadArgument, match="no options of generate"):
        model(moved.files[0], max_new_tokens=3)
    with pytest.raises(BadArgument, match="batch_size"):
        model(moved.files[0], batch_size=0)
    with pytest.raises(BadArgument, match="which to be 'last' or 'best'"):
        trainformer.load(moved.run, which="worst")
    with pytest.raises(DataError, match="nothing at this path"):
        trainformer.load(tmp_path / "nowhere")
    with pytest.raises(DataError, match="no complete checkpoint"):
        trainformer.load(tmp_path)
    with pytest.raises(BadArgument, match=r"trainformer\.load\(folder\)"):
        Trainer(ImageClassification("test_resnet", pretrained=False), None)
    before = torch.rand(1, generator=torch.Generator().manual_seed(0)), torch.get_rng_state()
    trainformer.load(moved.run)(moved.files[0])
    assert torch.equal(torch.get_rng_state(), before[1])


# -- strangers ---------------------------------------------------------------------------------------------


def edited(moved, target, **changes):
    """A copy of a finalized run with another ``task.json``."""
    shutil.rmtree(target, ignore_errors=True)
    finalize(moved.run, target)
    file = target / "task.json"
    content = json.loads(file.read_text())
    arguments = content["arguments"] | changes.pop("arguments", {})
    file.write_text(json.dumps({**content, **changes, "arguments": arguments}))
    return target


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"task": "system", "module": "os"}, "a task of trainformer"),
        ({"module": "evil"}, "a task of trainformer"),
        ({"arguments": {"backbone": "hf-hub:evil/model"}}, "a backbone of timm"),
        ({"arguments": {"backbone": {"adapter": "save_adapter", "arguments": {}}}}, "timm"),
        ({"arguments": {"unknown": 1}}, "received others"),
        ({"version": 9}, "version 1"),
        ({"learned": {"trained_on": "files"}}, "did not learn this"),
        ({"info": 3}, "record of a task"),
        ({"settings": {"precision": "evil"}}, "precision"),
    ],
)
def test_a_record_of_a_stranger_runs_nothing(moved, tmp_path, changes, said):
    with pytest.raises((BadArgument, DataError), match=said):
        trainformer.load(edited(moved, tmp_path / "final", **changes))


def test_a_file_that_timm_would_open_is_not_opened(moved, tmp_path):
    class Trap:
        def __reduce__(self):
            return Path.touch, (tmp_path / "executed",)

    torch.save({"state_dict": Trap()}, tmp_path / "trap.pt")
    options = {"checkpoint_path": str(tmp_path / "trap.pt")}
    arguments = {"model_kwargs": options, "pretrained": True, "checkpoint": str(tmp_path / "trap.pt")}
    folder = edited(moved, tmp_path / "final", arguments=arguments)
    assert moved.differs(trainformer.load(folder).predict(moved.files)) == 0
    assert not (tmp_path / "executed").exists()


def test_damaged_weights_are_refused(moved, tmp_path):
    run = shutil.copytree(moved.run, tmp_path / "run")
    weights = next(run.glob("checkpoints/step_*/model.safetensors"))
    data = bytearray(weights.read_bytes())
    data[-9] ^= 1
    weights.write_bytes(data)
    with pytest.raises(DataError, match=r"model\.safetensors"):
        trainformer.load(run)
    image = io.BytesIO()
    Image.new("RGB", (8, 8)).save(image, "PNG")
    (tmp_path / "m.onnx").write_bytes(image.getvalue())
    with pytest.raises(DataError, match=r"preprocessing\.json beside"):
        trainformer.load(tmp_path / "m.onnx")


class Scheduled(MeanTask):
    def configure_optimizers(self):
        return {"one": OptimizerConfig(params=self.model, step=self.train_step, scheduler="cosine")}


def test_a_task_with_a_schedule_of_its_own_opens_without_its_data():
    trainer = Trainer(Scheduled(), classes(), run_dir="run", **USUAL).fit()
    assert trainformer.load("run", task=Scheduled()).evaluate(classes()) == trainer.evaluate(classes())


def test_a_data_frame_is_predicted_for_as_a_whole():
    frame = pd.DataFrame({"a": np.arange(16.0), "y": ["no", "yes"] * 8})
    trainer = Trainer(TabularClassification(target="y"), frame, run_dir="run", **USUAL).fit()
    wanted = [row["probabilities"] for row in trainer.predict(frame)]
    rows = trainformer.load("run")(frame.drop(columns="y"))
    assert all(torch.equal(row["probabilities"], one) for row, one in zip(rows, wanted, strict=True))
