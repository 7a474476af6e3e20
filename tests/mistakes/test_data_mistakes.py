"""Data that almost fits: folders, files, datasets, loaders, shapes, dtypes and labels."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from mistake_table import build, fit, row, text_for
from PIL import Image
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

from toys import MeanTask, classes, mlp
from trainformer.core import BadArgument, DataError
from trainformer.data import ImageFolder
from trainformer.data.text import load_text

X, Y = classes()


def labels(**changed):
    """Labels, some of them changed: ``labels(at_37=-1)``."""
    y = Y.clone()
    for place, label in changed.items():
        y[int(place.removeprefix("at_"))] = label
    return y


def loader(x=X, y=Y, **options):
    return DataLoader(TensorDataset(x, y), **{"batch_size": 8, **options})


def one_epoch(data, task=None, **settings):
    return fit(task, data, epochs=1, **settings)


# -- what is passed as data --------------------------------------------------------------------------------

KINDS = [
    row("no data", lambda: build(data=[]), DataError, "at least one sample"),
    row("no rows", lambda: build(data=(X[:0], Y[:0])), DataError, "at least one sample"),
    row("no validation rows", lambda: build(val_data=(X[:0], Y[:0])), DataError, "at least one sample"),
    row("a list of arrays", lambda: build(data=[X, Y]), BadArgument, "a list of 2 arrays of 64 rows", "Pass a tuple"),
    row("a dict of arrays", lambda: build(data={"x": X, "y": Y}), BadArgument, "(x, y)", "Pass a tuple of arrays"),
    row("arrays of two lengths", lambda: build(data=(X, Y[:-1])), DataError, "arrays of one length", "[64, 63]"),
    row("a dataset as a class", lambda: build(data=Dataset), BadArgument, "the class Dataset", "Write Dataset(...)"),
    row("a loader as a class", lambda: build(val_data=DataLoader), BadArgument, "the class DataLoader"),
    row(
        "a dataset without a length",
        lambda: build(data=type("Own", (Dataset,), {"__getitem__": lambda s, i: 0})()),
        BadArgument,
        "Own without __len__",
    ),
    row(
        "a path for a task that reads none",
        lambda: build(data="folder"),
        BadArgument,
        "cannot load data by path",
        "'folder'",
    ),
    row(
        "a generator to validate on",
        lambda: build(val_data=(b for b in [(X, Y)])),
        BadArgument,
        "validation data that can be read again",
        "generator",
    ),
    row(
        "a generator for two epochs",
        lambda: fit(None, iter([(X, Y)] * 2), max_steps=4, scheduler=None),
        DataError,
        "Epoch 1 has no batches",
    ),
    row(
        "a loader without batches",
        lambda: build(data=loader(X[:4], Y[:4], drop_last=True)),
        DataError,
        "the training data to have at least one batch",
        "4 samples, batches of 8 and drop_last=True",
    ),
    row(
        "a validation loader without batches",
        lambda: build(val_data=loader(X[:4], Y[:4], drop_last=True)),
        DataError,
        "the validation data to have at least one batch",
    ),
    row(
        "drop_last with too few samples",
        lambda: build(data=(X[:4], Y[:4]), drop_last=True),
        BadArgument,
        "at least 8 samples",
    ),
    row(
        "a loader that is sorted by class",
        lambda: build(data=loader(*_sorted())),
        "warns",
        "sorted by class",
        "shuffle=True",
    ),
    row("a loader that is shuffled", lambda: build(data=loader(*_sorted(), shuffle=True)), "works"),
    row(
        "one loader for both", lambda: _both(loader(shuffle=True)), "warns", "the validation data is the training data"
    ),
    row(
        "one dataset for both",
        lambda: _both([*zip(X, Y, strict=True)]),
        "warns",
        "the validation data is the training data",
    ),
    row("a batch larger than the data", lambda: "64 samples" in str(build(batch_size=100).check().warnings), "works"),
]


def _sorted():
    order = Y.argsort()
    return X[order], Y[order]


def _batched(x, y):
    """Batches in an order of their own."""
    return DataLoader(TensorDataset(x, y), batch_sampler=torch.arange(64).reshape(8, 8).T.tolist())


def _both(data):
    return build(data=data, val_data=data)


# -- samples and batches -----------------------------------------------------------------------------------

SAMPLES = [
    row("a collate_fn that leaves samples out", lambda: _left_out(), "works"),
    row(
        "a sample that is None",
        lambda: one_epoch(_Own(lambda i, s: None if i == 3 else s)),
        DataError,
        "received None: does _Own.__getitem__ lack a return?",
        "sample 3",
    ),
    row(
        "a sample of another length",
        lambda: one_epoch(_Own(lambda i, s: s[:1] if i == 3 else s)),
        RuntimeError,
        "samples of one batch differ: sample 3 of _Own is a tuple of (float64 [4])",
    ),
    row(
        "a sample of another shape",
        lambda: one_epoch(_Own(lambda i, s: (s[0][:2], s[1]) if i == 3 else s)),
        RuntimeError,
        "sample 3 of _Own is a tuple of (float64 [2], int64 [])",
    ),
    row(
        "a sample that cannot be read",
        lambda: one_epoch(_Own(lambda i, s: 1 / 0 if i == 3 else s)),
        ZeroDivisionError,
        "while reading sample 3 of _Own",
    ),
    row(
        "float64 data",
        lambda: fit(MeanTask(mlp(dtype=torch.float32))),
        RuntimeError,
        "train_step received a tuple of (float64 [8, 4], int64 [8])",
        "the batch is float64, the model float32",
    ),
    row("integer data", lambda: fit(None, (X.long(), Y)), RuntimeError, "convert integer inputs with .float()"),
    row("images of (N, H, W, C)", lambda: _images(torch.rand(8, 6, 6, 3)), RuntimeError, "x.permute(0, 3, 1, 2)"),
    row("gray images", lambda: _images(torch.rand(8, 1, 6, 6)), RuntimeError, "the images have one channel"),
    row(
        "images in a linear layer",
        lambda: _images(torch.rand(8, 3, 6, 6), nn.Linear(108, 3)),
        RuntimeError,
        "nn.Flatten()",
    ),
    row("a batch of one sample for BatchNorm", lambda: _normed(X[:1], Y[:1]), ValueError, "pass drop_last=True"),
    row(
        "inputs without targets",
        lambda: fit(None, X[:, :2].float()),
        ValueError,
        "train_step received a tuple of (float32",
    ),
    row("inputs that are NaN", lambda: fit(None, (X * float("nan"), Y)), ArithmeticError, "at step 1"),
]


class _Own(list):
    """A list of samples, each read with a function."""

    def __init__(self, make):
        super().__init__(zip(X, Y, strict=True))
        self.make = make

    def __getitem__(self, index):
        return self.make(index, super().__getitem__(index))


def _left_out():
    """A popular pattern: samples that cannot be used are None, and collate_fn drops them."""
    collate = staticmethod(lambda samples: torch.utils.data.default_collate([s for s in samples if s is not None]))
    task = type("Own", (MeanTask,), {"collate_fn": collate})()
    return one_epoch(_Own(lambda i, s: None if i == 3 else s), task)


def _images(images, layer=None):
    task = MeanTask(nn.Sequential(layer or nn.Conv2d(3, 3, 3), nn.AdaptiveAvgPool2d(1), nn.Flatten()))
    return fit(task, (images, Y[:8]))


def _normed(x, y):
    return fit(MeanTask(nn.Sequential(nn.BatchNorm1d(4, dtype=torch.float64), mlp())), (x, y))


# -- labels ------------------------------------------------------------------------------------------------


def files(root, label=lambda index: index % 3):
    """A dataset that lists its files, as ImageFolder does."""
    data = _Own(lambda i, s: (s[0], torch.tensor(label(i))))
    data.samples = [(f"{root}/{i}.png", label(i)) for i in range(64)]
    return data


class Embedding(MeanTask):
    def __init__(self):
        super().__init__(nn.Sequential(nn.Embedding(5, 4, dtype=torch.float64), mlp()))


LABELS = [
    row("label -1", lambda: one_epoch((X, labels(at_37=-1))), DataError, "received -1 in sample 37", "ignore_index=-1"),
    row("a label that is too large", lambda: one_epoch((X, labels(at_9=7))), DataError, "received 7 in sample 9"),
    row(
        "a label of a file",
        lambda: one_epoch(files("cats", lambda i: -1 if i == 5 else i % 3)),
        DataError,
        "received -1 in sample 5 (cats/5.png)",
    ),
    row(
        "a label in the validation data",
        lambda: one_epoch(None, val_data=(X, labels(at_37=7))),
        DataError,
        "received 7 in sample 37 of the evaluated data",
        "has what was trained so far",
    ),
    row(
        "a label after a split",
        lambda: one_epoch((X, labels(at_0=-1)), val_split=0.1, seed=1),
        DataError,
        "in sample 0",
    ),
    row(
        "a label of a shuffled loader",
        lambda: one_epoch(loader(y=labels(at_9=7), shuffle=True)),
        DataError,
        "received 7 in sample",
        "of the epoch, in the order of the DataLoader",
    ),
    row("labels from 1", lambda: one_epoch((X, Y + 1)), DataError, "received 3 in sample", "count classes from 1"),
    row(
        "labels from 1 and a class more",
        lambda: build(MeanTask(mlp(outputs=4)), (X, Y + 1)),
        "warns",
        "no sample has label 0",
    ),
    row("labels that are floats", lambda: fit(None, (X, Y.double())), RuntimeError, "convert them with y.long()"),
    row("one-hot labels that are integers", lambda: fit(None, (X, F.one_hot(Y))), RuntimeError, "y.argmax(-1)"),
    row("one-hot labels", lambda: fit(None, (X, F.one_hot(Y).double())), "works"),
    row("labels of shape (N, 1)", lambda: fit(None, (X, Y[:, None])), RuntimeError, "use y.squeeze(1)"),
    row(
        "labels that are words",
        lambda: fit(None, [(x, "abc"[y]) for x, y in zip(X, Y, strict=True)]),
        TypeError,
        "map them to integers",
        "a tuple of 8 str",
    ),
    row(
        "an index beyond the embedding",
        lambda: fit(Embedding(), (torch.full((8,), 7), Y[:8])),
        IndexError,
        "0 has 5 rows",
        "ids from",
    ),
    row("check() names the sample", lambda: "sample 3" in str(_failures((X[:8], labels(at_3=-1)[:8]))), "works"),
]


def _failures(data):
    return build(data=data).check(raise_on_failure=False).failures


# -- folders and files -------------------------------------------------------------------------------------


def folder(*names, images=2):
    """Folders with images of 4 by 4 pixels."""
    for name in names:
        Path("data", name).mkdir(parents=True)
        for number in range(images):
            Image.new("L", (4, 4)).save(f"data/{name}/{number}.png")
    return ImageFolder("data")


def splits(*names):
    return folder(*(f"{name}/{animal}" for name in names for animal in ("cat", "dog")))


def lines(*records, name="data.jsonl"):
    Path(name).write_text("\n".join(r if isinstance(r, str) else json.dumps(r) for r in records))
    return [*load_text(name)]


def overlapping():
    """Two folders that share files, as two trainings of one folder would."""
    return build(Pixels(), folder("cat", "dog"), val_data=ImageFolder("data"), batch_size=2)


class Pixels(MeanTask):
    """Classifies images of 4 by 4 pixels."""

    def collate_fn(self, examples):
        images = torch.stack([torch.tensor(np.asarray(image), dtype=torch.float64) for image, _ in examples])
        return images[:, 0, :, 0], torch.tensor([label for _, label in examples])


FILES = [
    row(
        "train, val and another",
        lambda: splits("train", "val", "extra"),
        DataError,
        "the splits extra, train, val",
        "data='data/train', val_data='data/val'",
    ),
    row("train, val and test", lambda: splits("train", "val", "test"), DataError, "val_data='data/val'"),
    row(
        "Train and valid",
        lambda: splits("Train", "valid", "docs"),
        DataError,
        "data='data/Train', val_data='data/valid'",
    ),
    row("train and dev", lambda: splits("train", "dev"), DataError, "val_data='data/dev'"),
    row("train, val and a hidden folder", lambda: splits("train", "val", ".cache"), DataError, "the splits train, val"),
    row(
        "train and another with the same classes", lambda: splits("train", "extra"), DataError, "val_data='data/extra'"
    ),
    row("train alone", lambda: splits("train"), DataError, "data='data/train'"),
    row("images in splits without classes", lambda: folder("train", "val"), DataError, "the splits train, val"),
    row("a class called train", lambda: folder("bus", "car", "train").classes == ["bus", "car", "train"], "works"),
    row("a class of 200 characters", lambda: folder("a" * 200, "b").classes == ["a" * 200, "b"], "works"),
    row(
        "an empty class",
        lambda: (Path("data/fish").mkdir(parents=True), folder("cat", "dog")),
        DataError,
        "none in: fish",
    ),
    row("a folder that does not exist", lambda: (folder("cat", "dog"), ImageFolder("dta")), DataError, "'data'"),
    row("files in both", overlapping, "warns", "4 files are in the training and the validation data"),
    row(
        "NaN in JSON Lines",
        lambda: lines({"text": "a"}, '{"text": "b", "x": NaN}'),
        DataError,
        "data.jsonl, line 2",
        "NaN is no JSON value; write null",
    ),
    row(
        "infinity in JSON",
        lambda: lines('[{"text": "b", "x": Infinity}]', name="data.json"),
        DataError,
        "Infinity is no JSON",
    ),
    row(
        "a repeated key",
        lambda: lines({"text": "a"}, '{"text": "b", "text": "c"}'),
        DataError,
        "line 2",
        "the key 'text' is repeated",
    ),
    row(
        "half a surrogate pair",
        lambda: lines({"text": "a"}, '{"text": "\\ud83d"}'),
        DataError,
        "line 2",
        "half a surrogate pair",
    ),
    row(
        "a whole surrogate pair", lambda: lines('{"text": "\\ud83d\\ude00"}')[0]["text"] == "\N{GRINNING FACE}", "works"
    ),
    row(
        "a line that was cut",
        lambda: lines({"text": "a"}, '{"text": '),
        DataError,
        "line 2",
        "one JSON object per line",
    ),
    row(
        "a file that does not exist", lambda: (lines({"text": "a"}), load_text("dta.jsonl")), DataError, "'data.jsonl'"
    ),
]


# -- texts -------------------------------------------------------------------------------------------------


def classify(*found):
    from trainformer.data.text.labels import read_labels

    return read_labels(found)


def causal(**options):
    from text_toys import chat_tokenizer, gpt2, sentences
    from trainformer.tasks import CausalLM

    config = gpt2(**options.pop("config", {}))
    task = CausalLM(config, tokenizer=chat_tokenizer(), **options)
    return build(task, sentences(), batch_size=4), task


TEXTS = [
    row("a text label of -1", lambda: classify(0, 1, -1), DataError, "Record 2", "labels from 0 on", "-1"),
    row("an empty label", lambda: classify("good", "bad", ""), DataError, "a label in every record", "an empty one"),
    row("names and numbers as labels", lambda: classify("good", 1), DataError, "labels of one kind", "'good' and 1"),
    row("numbers as strings", lambda: classify("0", 1).count == 2, "works"),
    row("more tokens than positions", lambda: causal(max_length=500), BadArgument, "max_length of at most 64", "500"),
    row("more tokens than positions by default", lambda: causal()[1].max_length == 64, "works"),
    row("a tokenizer of another model", lambda: causal(config={"vocab_size": 50}), "warns", "the model 50 embeddings"),
    row("a tokenizer that is missing", lambda: _without_tokenizer(), BadArgument, "Pass tokenizer="),
    row("a max_length that is a string", lambda: causal(max_length="64"), BadArgument, "max_length", "'64'"),
]


def _without_tokenizer():
    from text_toys import gpt2, sentences
    from trainformer.tasks import CausalLM

    return build(CausalLM(gpt2()), sentences())


@pytest.mark.parametrize("mistake", [*KINDS, *SAMPLES, *LABELS, *FILES, *TEXTS])
def test_mistake(mistake, caplog):
    text = text_for(mistake, caplog)
    assert [words for words in mistake.words if words not in text] == [], text


def test_labels_on_a_gpu_are_named_from_the_host():
    from trainformer.backends.torch.hints import explain

    error = RuntimeError("CUDA error: device-side assert triggered")
    recent = [(np.array([4, 9]), torch.tensor([0, 2])), (np.array([37, 2]), torch.tensor([-1, 1]))]
    explain(error, "train_step", (X, Y), mlp(), None, lambda index: f"sample {index}", recent)
    assert "labels of the last batches are from -1 (sample 37) to 2 (sample 9)" in " ".join(error.__notes__)
