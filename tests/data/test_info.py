"""Metadata of datasets, checked against reading all samples."""

from __future__ import annotations

import os
import random
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset, random_split

from trainformer.core.errors import DataError
from trainformer.data.labels import labels_of
from trainformer.data.metadata import DatasetInfo, extract_info

os.environ.setdefault("HF_HUB_OFFLINE", "1")
datasets = pytest.importorskip("datasets")
torchvision = pytest.importorskip("torchvision")


class Unreadable(Dataset):
    """Has labels, and must not be read."""

    def __init__(self, **attributes: Any) -> None:
        self.size = 4
        vars(self).update(attributes)

    def __len__(self) -> int:
        return self.size

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("a sample was loaded")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, count in (("ant", 3), ("bee", 1), ("cat", 2)):
        (tmp_path / name).mkdir()
        for number in range(count):
            Image.new("RGB", (8, 6), color=(number, 0, 0)).save(tmp_path / name / f"{number}.png")
    return tmp_path


def counted(dataset: Any, label: Any = lambda sample: sample[1]) -> Counter[int]:
    return Counter(int(label(dataset[index])) for index in range(len(dataset)))


def assert_counts(info: DatasetInfo, counts: Counter[int]) -> None:
    assert info.class_counts is not None
    assert {label: n for label, n in enumerate(info.class_counts) if n} == counts
    assert info.num_samples == counts.total()


# -- where labels are kept ---------------------------------------------------------------------------------


@pytest.mark.parametrize("attribute", ["targets", "labels", "y", "_labels"])
@pytest.mark.parametrize(
    "values",
    [
        [1, 0, 2, 1],
        (1, 0, 2, 1),
        np.array([1, 0, 2, 1], dtype=np.uint8),
        np.array([1, 0, 2, 1], dtype=object),
        torch.tensor([1, 0, 2, 1]),
        [torch.tensor(1), torch.tensor(0), torch.tensor(2), torch.tensor(1)],
        [np.int64(1), np.int32(0), 2, True],
    ],
    ids=lambda values: type(values).__name__,
)
def test_labels_in_attributes(attribute: str, values: Any) -> None:
    labels = labels_of(Unreadable(**{attribute: values}))

    assert labels is not None
    assert labels.dtype == np.int64
    assert labels.tolist() == [1, 0, 2, 1]


@pytest.mark.parametrize(
    "values",
    [
        [1, 0, -1, 1],
        [1.0, 0.0, 2.0, 1.0],
        torch.tensor([0.5, 1.0, 2.0, 3.0]),
        ["a", "b", "a", "c"],
        [1, 0, 2],  # not one per sample
        torch.zeros(4, 2, dtype=torch.int64),
        [[1], [0, 2], [1], [2]],
        [{"boxes": 1}] * 4,
        [1, None, 2, 1],
        {"a": 0, "b": 1, "c": 2, "d": 3},
        "abcd",
        None,
        lambda: [0, 1, 2, 3],
    ],
    ids=lambda values: type(values).__name__,
)
def test_values_that_are_not_class_labels(values: Any) -> None:
    assert labels_of(Unreadable(targets=values)) is None


def test_the_first_attribute_with_labels_wins() -> None:
    dataset = Unreadable(targets=["a", "b", "c", "d"], labels=[0, 1, 0, 1])

    assert labels_of(dataset).tolist() == [0, 1, 0, 1]


@pytest.mark.parametrize("attribute", ["samples", "imgs", "_samples"])
def test_lists_of_paths_and_labels(attribute: str) -> None:
    assert labels_of(Unreadable(**{attribute: [("a.png", 1), ("b.png", 0)] * 2})).tolist() == [1, 0, 1, 0]
    assert labels_of(Unreadable(**{attribute: ["a line", "two", "of", "text"]})) is None


def test_image_folder(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder)
    info = extract_info(dataset)

    assert info.class_names == ["ant", "bee", "cat"]
    assert info.num_classes == 3
    assert info.input_shape == (3, 6, 8)
    assert_counts(info, counted(dataset))
    assert labels_of(dataset).tolist() == [label for _, label in dataset]


def test_target_transforms_are_applied(folder: Path) -> None:
    """Labels are those that samples show, and names that no longer fit are dropped."""
    merged = torchvision.datasets.ImageFolder(folder, target_transform=lambda label: int(label == 2))
    info = extract_info(merged)
    assert labels_of(merged).tolist() == [label for _, label in merged]
    assert (info.num_classes, info.class_names, info.class_counts) == (2, None, [4, 2])

    one_hot = torchvision.datasets.ImageFolder(folder, target_transform=lambda label: np.eye(3)[label])
    assert extract_info(one_hot).class_names == ["ant", "bee", "cat"]
    assert labels_of(one_hot).tolist() == [int(np.argmax(row)) for _, row in one_hot]

    same = torchvision.datasets.ImageFolder(folder, target_transform=torch.tensor)
    assert extract_info(same).class_names == ["ant", "bee", "cat"]

    failing = torchvision.datasets.ImageFolder(folder, target_transform=lambda label: label["no"])
    assert labels_of(failing).tolist() == failing.targets


def test_fake_data_declares_its_number_of_classes() -> None:
    info = extract_info(torchvision.datasets.FakeData(size=5, image_size=(1, 4, 7), num_classes=6))

    assert (info.num_samples, info.num_classes, info.class_counts) == (5, 6, None)
    assert info.input_shape == (1, 4, 7)


def test_tensor_dataset() -> None:
    labels = torch.tensor([3, 0, 3, 1])
    dataset = TensorDataset(torch.zeros(4, 3, 2, 2), labels)
    info = extract_info(dataset)

    assert_counts(info, counted(dataset))
    assert info.num_classes == 4
    assert info.class_names is None
    assert info.input_shape == (3, 2, 2)
    assert info.num_targets is None


def test_a_single_tensor_is_an_input() -> None:
    info = extract_info(TensorDataset(torch.arange(4)))

    assert (info.num_classes, info.num_targets) == (None, None)


@pytest.mark.parametrize(
    "samples",
    [
        [("a", 2), ("b", 0)],
        (["a", 2], ["b", 0]),
        [(torch.zeros(1), torch.tensor(2)), (torch.zeros(1), torch.tensor(0))],
        np.array([("a", 2), ("b", 0)], dtype=object),
        [{"text": "a", "label": 2}, {"text": "b", "label": 0}],
    ],
    ids=["tuples", "lists", "tensors", "array", "records"],
)
def test_samples_in_memory(samples: Any) -> None:
    assert labels_of(samples).tolist() == [2, 0]
    assert extract_info(samples).class_counts == [1, 0, 1]


@pytest.mark.parametrize(
    "samples",
    [[1, 2, 3], ["ab", "cd"], [("a", 0.5), ("b", 1.5)], [("a", 1), "b"], [np.array([1, 2])] * 3, np.zeros((3, 2)), []],
    ids=repr,
)
def test_samples_in_memory_without_classes(samples: Any) -> None:
    assert labels_of(samples) is None
    assert extract_info(samples).num_classes is None


# -- HF datasets -------------------------------------------------------------------------------------------


def hf(column: str = "label", names: list[str] | None = None, **more: list[Any]) -> Any:
    data = {"text": ["a", "b", "c", "d"], column: [1, 0, 1, 1], **more}
    dataset = datasets.Dataset.from_dict(data)
    return dataset.cast_column(column, datasets.ClassLabel(names=names)) if names else dataset


@pytest.mark.parametrize("column", ["label", "labels", "target", "targets", "fine_label", "class", "y"])
def test_hf_columns(column: str) -> None:
    dataset = hf(column)
    assert labels_of(dataset).tolist() == list(dataset[column])
    assert extract_info(dataset).class_names is None
    assert extract_info(dataset).num_classes == 2

    named = extract_info(hf(column, names=["no", "yes", "never"]))
    assert named.class_names == ["no", "yes", "never"]
    assert named.num_classes == 3
    assert_counts(named, Counter(dataset[column]))


def test_hf_columns_of_other_names_need_class_names() -> None:
    assert labels_of(hf("intent")) is None
    assert labels_of(hf("intent", names=["x", "y"])).tolist() == [1, 0, 1, 1]


def test_hf_columns_without_classes() -> None:
    assert labels_of(datasets.Dataset.from_dict({"label": ["a", "b"]})) is None
    assert labels_of(datasets.Dataset.from_dict({"label": [0.5, 1.5]})) is None
    assert labels_of(datasets.Dataset.from_dict({"label": [[1, 0], [0, 1]]})) is None
    assert labels_of(datasets.Dataset.from_dict({"label": [1, None]})) is None
    assert labels_of(datasets.Dataset.from_dict({"label": [-1, 1]})) is None
    assert labels_of(datasets.Dataset.from_dict({"text": ["a", "b"]})) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda d: d.select([3, 1]),
        lambda d: d.shuffle(seed=1),
        lambda d: d.filter(lambda row: row["text"] != "b"),
        lambda d: d.with_format("torch"),
        lambda d: d.with_format("numpy", columns=["text"]),
        lambda d: d.with_transform(lambda rows: {"n": [1] * len(rows["text"])}),
        lambda d: datasets.concatenate_datasets([d, d.select([1])]),
    ],
    ids=["select", "shuffle", "filter", "torch", "columns", "transform", "concatenate"],
)
def test_hf_views_keep_labels_and_samples_together(change: Any) -> None:
    dataset = change(hf(names=["no", "yes"]))

    assert labels_of(dataset).tolist() == [int(row["label"]) for row in dataset.with_format(None)]
    assert extract_info(dataset).class_names == ["no", "yes"]


def test_hf_images_are_decoded_for_the_first_sample_only(monkeypatch: pytest.MonkeyPatch) -> None:
    images = [Image.new("L", (5, 4)) for _ in range(4)]
    dataset = hf(names=["no", "yes"], image=images).cast_column("image", datasets.Image())
    decoded = []
    original = datasets.Image.decode_example
    monkeypatch.setattr(
        datasets.Image, "decode_example", lambda self, *a, **k: decoded.append(1) or original(self, *a, **k)
    )

    assert labels_of(dataset.select([0, 2])).tolist() == [1, 1]
    assert decoded == []
    assert extract_info(dataset).input_shape == (1, 4, 5)
    assert decoded == [1]


def test_hf_lengths_are_the_longest_and_not_the_first() -> None:
    dataset = datasets.Dataset.from_dict({"input_ids": [[1, 2], [1, 2, 3, 4], [1]]})

    assert extract_info(dataset).max_length == 4
    assert extract_info(dataset.select([0, 2])).max_length == 2
    assert extract_info(Subset(dataset, [2])).max_length == 1
    assert extract_info(ConcatDataset([Subset(dataset, [2]), Subset(dataset, [0])])).max_length == 2


def test_hf_streams_know_their_class_names() -> None:
    stream = hf(names=["no", "yes"]).to_iterable_dataset()
    info = extract_info(stream)

    assert (info.class_names, info.num_classes, info.class_counts) == (["no", "yes"], 2, None)
    assert len(list(stream)) == 4


# -- parts and sums ----------------------------------------------------------------------------------------


def test_nested_subsets_keep_all_classes(folder: Path) -> None:
    dataset = torchvision.datasets.ImageFolder(folder)
    outer = Subset(dataset, [5, 4, 0, 1])
    inner = Subset(outer, torch.tensor([2, 0]))
    info = extract_info(inner)

    assert labels_of(inner).tolist() == [inner[0][1], inner[1][1]]
    assert (info.num_classes, info.class_names) == (3, ["ant", "bee", "cat"])
    assert_counts(info, counted(inner))
    assert len(info.class_counts) == 3


def test_a_subset_keeps_classes_without_samples() -> None:
    whole = TensorDataset(torch.zeros(3, 1), torch.tensor([0, 1, 2]))

    assert extract_info(Subset(whole, [0, 1])).class_counts == [1, 1, 0]


def test_random_split() -> None:
    dataset = TensorDataset(torch.zeros(20, 1), torch.arange(20) % 3)
    for part in random_split(dataset, [15, 5]):
        assert labels_of(part).tolist() == [int(label) for _, label in part]


def test_concatenation(folder: Path) -> None:
    images = torchvision.datasets.ImageFolder(folder)
    both = ConcatDataset([images, Subset(images, [1, 5])])
    info = extract_info(both)

    assert_counts(info, counted(both))
    assert info.class_names == ["ant", "bee", "cat"]


def test_concatenation_of_different_datasets() -> None:
    labelled = TensorDataset(torch.zeros(2, 1), torch.tensor([0, 1]))
    more = TensorDataset(torch.zeros(2, 1), torch.tensor([4, 1]))
    floats = TensorDataset(torch.zeros(2, 1), torch.zeros(2))

    assert extract_info(ConcatDataset([labelled, more])).class_counts == [1, 2, 0, 0, 1]
    assert labels_of(ConcatDataset([labelled, floats])) is None
    assert extract_info(ConcatDataset([labelled, floats])).num_classes is None


def test_labels_beyond_the_named_classes_are_an_error() -> None:
    dataset = Unreadable(targets=[1, 2, 3, 1], classes=["a", "b", "c"])

    with pytest.raises(DataError, match=r"from 0 to 2 .* received 3.*Number labels from 0"):
        extract_info(dataset)


def test_identifiers_are_not_counted_as_classes() -> None:
    dataset = [("a", 2**60), ("b", 5)]

    assert labels_of(dataset).tolist() == [2**60, 5]
    assert extract_info(dataset).num_classes is None


def test_class_names_may_be_synonyms() -> None:
    dataset = torchvision.datasets.FakeData(size=2)
    dataset.classes = [("tench", "Tinca tinca"), ("goldfish",)]

    assert extract_info(dataset).class_names == ["tench, Tinca tinca", "goldfish"]


# -- regression --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(50,), (50, 3), (50, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_regression_targets(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    targets = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) * 3 + 1).to(dtype)
    whole = TensorDataset(torch.zeros(50, 2), targets)
    part = Subset(whole, range(0, 50, 2))
    for dataset, values in ((whole, targets), (part, targets[::2])):
        info = extract_info(dataset)
        assert info.num_targets == (shape[1] if len(shape) > 1 else 1)
        assert info.target_mean == pytest.approx(float(values.double().mean()))
        assert info.target_std == pytest.approx(float(values.double().std(correction=0)))
        assert info.num_classes is None


# -- inputs ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sample", "shape"),
    [
        ((torch.zeros(3, 4, 5), 0), (3, 4, 5)),
        (torch.zeros(3, 4, 5), (3, 4, 5)),
        (torch.zeros(3, 4, 5, dtype=torch.uint8), (3, 4, 5)),
        ({"image": torch.zeros(3, 4, 5)}, (3, 4, 5)),
        ({"img": Image.new("RGB", (5, 4))}, (3, 4, 5)),
        ({"pixel_values": np.zeros((3, 4, 5), dtype=np.float32)}, (3, 4, 5)),
        ({"x": torch.zeros(7)}, (7,)),
        ({"input": torch.zeros(2, 3, 4, 5)}, (2, 3, 4, 5)),
        (({"x": torch.zeros(3, 4, 5)}, 1), (3, 4, 5)),
        ((Image.new("L", (5, 4)), 0), (1, 4, 5)),
        ((Image.new("RGBA", (5, 4)), 0), (4, 4, 5)),
        ((np.zeros((4, 5, 3), dtype=np.uint8), 0), (3, 4, 5)),
        ((np.zeros((3, 4, 5), dtype=np.uint8), 0), (3, 4, 5)),
        ({"text": "a"}, None),
        (("text", 0), None),
        ((torch.tensor([1, 2, 3]), 0), None),
        ((torch.tensor(1.0), 0), None),
        ((), None),
    ],
    ids=lambda value: re.sub(r" at 0x\w+", "", repr(value)),  # the same in every process
)
def test_shape_of_the_first_sample(sample: Any, shape: tuple[int, ...] | None) -> None:
    assert extract_info([sample]).input_shape == shape


@pytest.mark.parametrize(
    ("samples", "longest"),
    [
        ([{"input_ids": [1, 2]}, {"input_ids": [1, 2, 3]}], 3),
        ([{"input_ids": torch.zeros(1, 6)}], 6),
        ([{"input_ids": None}], None),
        ([{"text": "a"}], None),
    ],
)
def test_lengths_of_sequences(samples: list[Any], longest: int | None) -> None:
    assert extract_info(samples).max_length == longest


class Tokens(Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"input_ids": torch.zeros(5 + index, dtype=torch.int64)}


def test_without_known_lengths_the_first_sample_counts() -> None:
    assert extract_info(Tokens()).max_length == 5


class Noise(Dataset):
    def __len__(self) -> int:
        return 3

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        value = random.random() + np.random.rand()
        return torch.rand(3, 4, 4) + value, 0


def test_reading_a_sample_preserves_the_generators() -> None:
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    info = extract_info(Noise())

    assert info.input_shape == (3, 4, 4)
    assert random.getstate() == states[0]
    assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), states[1], strict=True))
    assert torch.equal(torch.get_rng_state(), states[2])


def test_an_unreadable_sample_is_named_and_its_cause_kept() -> None:
    with pytest.raises(DataError, match="first sample of Unreadable") as caught:
        extract_info(Unreadable())
    assert isinstance(caught.value.__cause__, AssertionError)


# -- streams and empty sets --------------------------------------------------------------------------------


class Stream(IterableDataset):
    classes = ("a", "b")

    def __iter__(self) -> Any:
        raise AssertionError("the stream was consumed")


class LongStream(Stream):
    def __len__(self) -> int:
        return 12


def test_streams_are_not_consumed() -> None:
    assert extract_info(Stream()) == DatasetInfo(num_samples=0, num_classes=2, class_names=["a", "b"])
    assert extract_info(LongStream()).num_samples == 12
    assert labels_of(Stream()) is None


class CountedStream(LongStream):
    class_counts = (5, 7)
    input_shape = (3, 4, 4)


def test_streams_may_declare_their_metadata() -> None:
    info = extract_info(CountedStream())
    assert (info.num_samples, info.class_counts, info.input_shape) == (12, [5, 7], (3, 4, 4))
    assert info.class_weights is not None


def test_loaders_and_generators_have_no_metadata() -> None:
    numbers = iter(range(3))

    assert extract_info(numbers) == DatasetInfo()
    assert list(numbers) == [0, 1, 2]
    assert extract_info(torch.utils.data.DataLoader([1, 2, 3], batch_size=2)) == DatasetInfo()


def test_empty_datasets() -> None:
    assert extract_info([]) == DatasetInfo()
    info = extract_info(Subset(Unreadable(targets=[0, 1, 2, 1], classes=["a", "b", "c"]), []))
    assert (info.num_samples, info.num_classes, info.class_counts) == (0, 3, [0, 0, 0])


# -- weights -----------------------------------------------------------------------------------------------


def test_class_weights_match_scikit_learn_and_never_divide_by_zero() -> None:
    from sklearn.utils.class_weight import compute_class_weight

    labels = np.repeat([0, 1, 2], [5, 1, 14])
    info = extract_info([(0, int(label)) for label in labels])
    balanced = compute_class_weight("balanced", classes=np.arange(3), y=labels)
    assert info.class_weights.tolist() == pytest.approx(balanced.tolist())

    assert DatasetInfo(class_counts=[2, 0]).class_weights.tolist() == [0.5, 0.0]
    assert DatasetInfo(class_counts=[0, 0]).class_weights.tolist() == [0.0, 0.0]
    assert DatasetInfo().class_weights is None


def test_optional_packages_are_not_imported() -> None:
    code = (
        "import sys; from trainformer.data.metadata import DatasetInfo, extract_info\n"
        "assert 'torch' not in sys.modules\n"
        "assert extract_info([('a', 1)]).num_classes == 2\n"
        "sys.exit(any(name in sys.modules for name in ('torchvision', 'datasets', 'PIL', 'pyarrow')))"
    )

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
