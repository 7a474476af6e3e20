"""Image datasets: every kind of image becomes a uint8 tensor; anything else is a clear error."""

from __future__ import annotations

import gzip
import logging
import os
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import Dataset, Subset, TensorDataset

from trainformer.core import BadArgument, DataError
from trainformer.data import ImageDataset, extract_info, find_corrupt_images, load_images
from trainformer.data.builtin import builtin_names, load_builtin, read_idx
from trainformer.data.folder import ImageFiles, ImageFolder
from trainformer.data.image import hf_images, images_in_memory
from trainformer.data.pixels import ImageTensors, image_tensor, tensor_channels, with_channels


def pixels(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)


def save(path: Path, array: np.ndarray) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(array).save(path)
    return path


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two classes, three images of cats (one of them nested), two of dogs."""
    for i, name in enumerate(["dog/b.png", "dog/a.png", "cat/2.png", "cat/1.png", "cat/kittens/3.png"]):
        save(tmp_path / name, pixels(6, 5, 3, seed=i))
    return tmp_path


# -- one image ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["L", "RGB", "RGBA", "LA", "P", "1", "CMYK", "YCbCr", "HSV"])
@pytest.mark.parametrize("channels", [1, 3])
def test_pil_modes_become_the_wanted_channels(mode: str, channels: int) -> None:
    image = Image.fromarray(pixels(5, 7, 3)).convert(mode)
    got = image_tensor(with_channels(image, channels))
    want = np.asarray(image.convert({1: "L", 3: "RGB"}[channels])).reshape(5, 7, channels).transpose(2, 0, 1)
    assert got.dtype == torch.uint8
    assert np.array_equal(got.numpy(), want)


def test_palette_with_transparency_is_converted_without_a_warning() -> None:
    image = Image.fromarray(pixels(5, 7, 3)).convert("P")
    image.info["transparency"] = bytes(range(256))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert image_tensor(with_channels(image, 3)).shape == (3, 5, 7)


def test_sixteen_bits_are_scaled_not_clipped() -> None:
    deep = np.array([[0, 257, 32768, 65535]], dtype=np.uint16)
    want = [0, 1, 128, 255]
    assert image_tensor(Image.fromarray(deep)).flatten().tolist() == want
    assert image_tensor(Image.fromarray(deep.astype(np.int32))).flatten().tolist() == want
    assert image_tensor(deep).flatten().tolist() == want
    assert image_tensor(torch.from_numpy(deep)).flatten().tolist() == want


def test_alpha_is_dropped_and_gray_stays_gray_when_nothing_is_asked_for() -> None:
    assert image_tensor(with_channels(Image.fromarray(pixels(4, 4, 4)))).shape == (3, 4, 4)
    assert image_tensor(with_channels(Image.fromarray(pixels(4, 4)))).shape == (1, 4, 4)


def test_luma_of_tensors_is_that_of_pil_bit_for_bit() -> None:
    array = pixels(64, 64, 3)
    want = np.asarray(Image.fromarray(array).convert("L"))
    got = tensor_channels(image_tensor(array), 1)
    assert np.array_equal(got[0].numpy(), want)


@pytest.mark.parametrize("have", [1, 2, 4])
def test_tensors_get_three_channels(have: int) -> None:
    image = torch.from_numpy(pixels(have, 5, 6))
    got = tensor_channels(image, 3)
    assert got.shape == (3, 5, 6)
    assert torch.equal(got, image[:3] if have == 4 else image[:1].repeat(3, 1, 1))


def test_orders_of_dimensions_and_dtypes() -> None:
    array = pixels(8, 9, 3)
    want = torch.from_numpy(array).permute(2, 0, 1)
    assert torch.equal(image_tensor(array), want)
    assert torch.equal(image_tensor(np.ascontiguousarray(array.transpose(2, 0, 1))), want)
    assert torch.equal(image_tensor(array[::-1]), want.flip(1))  # negative strides
    assert torch.equal(image_tensor(torch.from_numpy(array)), want)  # a tensor with its channels last
    assert image_tensor(pixels(8, 9)).shape == (1, 8, 9)
    assert image_tensor(array.astype(np.float64) / 255).dtype == torch.float32
    assert image_tensor(np.array([[True, False]])).tolist() == [[[255, 0]]]


@pytest.mark.parametrize(
    ("image", "message"),
    [
        (np.zeros((4, 4), dtype=np.int64), r"received 'torch.int64'.*astype\('uint8'\)"),
        (torch.zeros(2, 3, 4, 4, dtype=torch.uint8), r"shape \(2, 3, 4, 4\)"),
        ("cat.png", "PIL image, a tensor or a NumPy array, received 'str'"),
        (Image.fromarray(np.zeros((2, 2), dtype=np.float32)), "32-bit floats"),
    ],
)
def test_values_that_are_not_images_raise(image: Any, message: str) -> None:
    with pytest.raises(DataError, match=message):
        image_tensor(image)


def test_impossible_channel_conversions_raise() -> None:
    with pytest.raises(DataError, match=r"images with 3 channels.*in_chans=5"):
        tensor_channels(torch.zeros(5, 2, 2), 3)
    with pytest.raises(DataError, match="1, 3 or 4 for images from files, received 7"):
        with_channels(Image.fromarray(pixels(2, 2)), 7)


# -- folders -----------------------------------------------------------------------------------------------


def test_folder_agrees_with_torchvision(folder: Path) -> None:
    from torchvision.datasets import ImageFolder as Reference

    ours, theirs = ImageFolder(folder), Reference(str(folder))
    assert ours.classes == theirs.classes == ["cat", "dog"]
    assert ours.samples == theirs.samples
    assert ours.targets == theirs.targets == [0, 0, 0, 1, 1]
    for (image, label), (want, target) in zip(ours, theirs, strict=True):
        assert label == target
        assert np.array_equal(np.asarray(image), np.asarray(want))


def test_folder_knows_its_classes_without_decoding(folder: Path) -> None:
    for path in folder.rglob("*.png"):
        if path.name != "1.png":  # the first, which is read for its shape
            path.write_bytes(b"not an image")
    info = extract_info(load_images(folder))
    assert (info.num_classes, info.class_names, info.class_counts) == (2, ["cat", "dog"], [3, 2])
    assert info.input_shape == (3, 6, 5)


@pytest.mark.parametrize("extension", ["png", "jpg", "JPEG", "bmp", "gif", "tiff", "webp", "ppm"])
def test_every_format_of_pil_is_found(tmp_path: Path, extension: str) -> None:
    save(tmp_path / "a" / f"x.{extension}", pixels(4, 4, 3))
    save(tmp_path / "b" / f"x.{extension}", pixels(4, 4, 3))
    data = load_images(tmp_path)
    assert len(data) == 2
    assert data[0][0].size == (4, 4)


def test_flat_folder_gives_images_in_order_without_labels(tmp_path: Path) -> None:
    for i, name in enumerate(["b.png", "a.png", "c.png"]):
        save(tmp_path / name, np.full((2, 2), i, dtype=np.uint8))
    (tmp_path / "notes.txt").write_text("not an image")
    data = load_images(tmp_path)
    assert isinstance(data, ImageFiles)
    assert [(image.getpixel((0, 0))[0], label) for image, label in data] == [(1, None), (0, None), (2, None)]
    assert extract_info(data).num_classes is None
    assert [int(x[0, 0, 0]) for x in ImageDataset(data)] == [1, 0, 2]  # no label: the tensor alone, which collates


def test_labels_can_be_left_out_on_purpose(folder: Path) -> None:
    data = load_images(folder, labels=False)
    assert isinstance(data, ImageFiles)
    assert [label for _, label in data] == [None] * 5


def test_hidden_files_and_folders_are_ignored(folder: Path) -> None:
    save(folder / ".ipynb_checkpoints" / "x.png", pixels(2, 2))
    save(folder / "cat" / ".hidden" / "x.png", pixels(2, 2))
    (folder / "cat" / "._1.png").write_bytes(b"macOS")
    assert ImageFolder(folder).targets == [0, 0, 0, 1, 1]


def test_link_to_a_folder_above_is_not_followed(folder: Path) -> None:
    os.symlink(folder, folder / "cat" / "loop", target_is_directory=True)
    os.symlink(folder / "dog", folder / "wolf", target_is_directory=True)
    data = ImageFolder(folder)
    assert data.classes == ["cat", "dog", "wolf"]
    assert data.targets == [0, 0, 0, 1, 1, 2, 2]


def test_exif_orientation_is_applied(tmp_path: Path) -> None:
    image = Image.fromarray(pixels(4, 6, 3))
    exif = image.getexif()
    exif[0x0112] = 6  # rotated by a quarter
    (tmp_path / "a").mkdir()
    image.save(tmp_path / "a" / "x.png", exif=exif)
    assert ImageFolder(tmp_path)[0][0].size == (4, 6)


def test_images_outside_class_folders_are_reported(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    save(folder / "preview.png", pixels(2, 2))
    with caplog.at_level(logging.WARNING, logger="trainformer"):
        assert len(ImageFolder(folder)) == 5
    assert "ignoring 1 images directly in" in caplog.text


def test_a_missing_folder_error_lists_alternatives(folder: Path) -> None:
    with pytest.raises(DataError, match=r"does not exist. Did you mean 'cat'.*has the folders: cat, dog"):
        load_images(folder / "cta" / "deeper")
    with pytest.raises(DataError, match="has no folders"):
        load_images(folder / "dog" / "puppies")


def test_file_instead_of_folder(folder: Path) -> None:
    with pytest.raises(DataError, match=r"received 'the file .*1.png'. Pass the folder: '.*cat'"):
        load_images(folder / "cat" / "1.png")


def test_folder_without_classes_explains_the_layout(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"images lie directly in it.*root/cat/1.png"):
        load_images(folder / "dog", labels=True)
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DataError, match=r"received none. The expected layout"):
        load_images(empty, labels=True)
    with pytest.raises(DataError, match="received an empty folder"):
        load_images(empty)


def test_empty_class_folder_is_named(folder: Path) -> None:
    (folder / "bird").mkdir()
    with pytest.raises(DataError, match="received none in: bird"):
        load_images(folder)
    only = folder / "bird"
    (only / "x").mkdir()
    with pytest.raises(DataError, match="no image at all"):
        load_images(only, labels=True)


def test_splits_are_not_classes(tmp_path: Path) -> None:
    for name in ("train/cat/1.png", "train/dog/1.png", "val/cat/1.png", "val/dog/1.png"):
        save(tmp_path / name, pixels(2, 2))
    with pytest.raises(DataError, match=r"splits train, val. Pass one of them: data='.*train', val_data='.*val'"):
        load_images(tmp_path)
    assert load_images(tmp_path / "train").classes == ["cat", "dog"]  # type: ignore[attr-defined]


def test_corrupt_images_are_named_when_read_and_listed_up_front(folder: Path) -> None:
    text, cut, empty = folder / "cat" / "text.png", folder / "cat" / "cut.jpg", folder / "dog" / "empty.png"
    text.write_text("I am not an image")
    save(cut, pixels(64, 64, 3))
    cut.write_bytes(cut.read_bytes()[:600])
    empty.touch()
    data = load_images(folder)
    paths = [path for path, _ in data.samples]  # type: ignore[attr-defined]
    for path in (text, cut, empty):
        with pytest.raises(DataError, match=f"{path.name}.*cannot be decoded.*find_corrupt_images"):
            data[paths.index(str(path))]
    found = find_corrupt_images(folder)
    assert [bad.path for bad in found] == [str(cut), str(text), str(empty)]
    assert "truncated" in found[0].reason.lower()


# -- the wrapper -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("make", [lambda x, y: (x, y), lambda x, y: [x, y], lambda x, y: {"img": x, "labels": y}])
@pytest.mark.parametrize("kind", [lambda a: a, torch.from_numpy, Image.fromarray])
def test_samples_of_every_structure(make: Any, kind: Any) -> None:
    array = pixels(6, 7, 3)
    image, label = ImageDataset([make(kind(array), 4)])[0]
    assert label == 4
    assert torch.equal(image, torch.from_numpy(array).permute(2, 0, 1))


def test_bare_images_have_no_label() -> None:
    got = ImageDataset([torch.ones(3, 4, 4)])[0]
    assert isinstance(got, torch.Tensor)
    assert got.dtype == torch.float32


def test_float_images_pass_through_untouched() -> None:
    image = torch.randn(3, 5, 5)
    assert torch.equal(ImageDataset([(image, 0)])[0][0], image)


def test_transform_sees_pil_or_uint8_and_its_result_becomes_a_tensor() -> None:
    seen: list[str] = []

    def note(image: Any) -> Any:
        seen.append(type(image).__name__)
        return image

    array = pixels(4, 4)
    for source in (Image.fromarray(array), torch.from_numpy(array)):
        assert ImageDataset([(source, 0)], note, channels=3)[0][0].shape == (3, 4, 4)
    assert seen == ["Image", "Tensor"]


def test_a_sample_without_an_image_raises() -> None:
    with pytest.raises(DataError, match=r"one of the keys image, img.*received \['text', 'label'\]"):
        ImageDataset([{"text": "x", "label": 1}])[0]
    with pytest.raises(DataError, match=r"received \(\)"):
        ImageDataset([()])[0]


class Unreadable(Dataset):
    """Knows its labels, and fails if an image is read."""

    targets = (2, 0, 1, 2)
    classes = ("a", "b", "c")

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("an image was read")


def test_labels_and_classes_are_known_without_reading_images() -> None:
    data = ImageDataset(Unreadable())
    assert list(data.targets) == [2, 0, 1, 2]
    assert data.classes == ["a", "b", "c"]
    part = ImageDataset(Subset(Unreadable(), [3, 1]))
    assert list(part.targets) == [2, 0]
    assert part.classes == ["a", "b", "c"]


def test_unknown_labels_are_absent() -> None:
    data = ImageDataset([torch.zeros(1, 2, 2)])
    assert not hasattr(data, "targets")
    assert not hasattr(data, "classes")


def test_hf_datasets_are_read() -> None:
    datasets = pytest.importorskip("datasets")
    images = [Image.fromarray(pixels(4, 4, 3, seed=i)) for i in range(3)]
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])})
    data = ImageDataset(datasets.Dataset.from_dict({"image": images, "label": [0, 1, 1]}, features=features))
    assert list(data.targets) == [0, 1, 1]
    assert data.classes == ["x", "y"]
    image, label = data[2]
    assert label == 1
    assert np.array_equal(image.permute(1, 2, 0).numpy(), np.asarray(images[2]))


# -- HF datasets by name -----------------------------------------------------------------------------------


def hf_data(images: str = "image", labels: str = "label", names: bool = True, size: int = 4) -> Any:
    """Pictures of which the first is gray, with labels 1, 0, 1, ..., as numbers with names or as names."""
    datasets = pytest.importorskip("datasets")
    pictures = [Image.fromarray(pixels(4, 5, 3, seed=i)) for i in range(size)]
    pictures[0] = pictures[0].convert("L")
    label = datasets.ClassLabel(names=["x", "y"]) if names else datasets.Value("string")
    features = datasets.Features({images: datasets.Image(), "id": datasets.Value("int64"), labels: label})
    values = [(i + 1) % 2 for i in range(size)]
    rows = {images: pictures, "id": list(range(size)), labels: values if names else ["xy"[v] for v in values]}
    return datasets.Dataset.from_dict(rows, features=features)


def assert_is_hf_data(data: Any, size: int = 4) -> None:
    info = extract_info(data)
    assert (info.num_samples, info.num_classes, info.class_names) == (size, 2, ["x", "y"])
    assert info.class_counts == [size // 2, size - size // 2]
    assert info.input_shape == (3, 4, 5)  # though the first picture is gray
    for i in range(size):
        image, label = ImageDataset(data)[i]
        assert label == (i + 1) % 2
        assert i == 0 or np.array_equal(image.permute(1, 2, 0).numpy(), pixels(4, 5, 3, seed=i))
    part = Subset(data, [0, 2])
    assert extract_info(part).class_counts == [0, 2]
    assert ImageDataset(part).classes == ["x", "y"]


@pytest.mark.parametrize(
    ("images", "labels", "names"),
    [("image", "label", True), ("img", "fine_label", True), ("photo", "species", True), ("image", "class", False)],
)
def test_hf_columns_of_any_name_become_image_and_label(images: str, labels: str, names: bool) -> None:
    assert_is_hf_data(hf_images(hf_data(images, labels, names)))


def test_hf_images_with_other_channels_and_without_labels() -> None:
    assert hf_images(hf_data(), channels=1)[1]["image"].mode == "L"
    assert [image["image"].mode for image in hf_images(hf_data(), channels=None)] == ["L", "RGB", "RGB", "RGB"]
    bare = hf_images(hf_data(), labels=False)
    assert list(bare[0]) == ["image"]
    assert extract_info(bare).num_classes is None


def test_hf_columns_that_cannot_be_guessed() -> None:
    data = hf_data("a")
    with pytest.raises(DataError, match=r"one column of images, received \['a', 'b'\].*Rename"):
        hf_images(data.add_column("b", [None] * 4).cast_column("b", data.features["a"]))
    with pytest.raises(DataError, match=r"a column of images, received \['id', 'label'\]"):
        hf_images(data.remove_columns("a"))
    with pytest.raises(DataError, match=r"a column of labels, received \['a', 'id'\]"):
        hf_images(data.remove_columns("label"), labels=True)
    assert list(hf_images(data.remove_columns("label"))[0]) == ["image"]


def test_folders_saved_by_hf_datasets(tmp_path: Path) -> None:
    data = hf_data("img")
    data.save_to_disk(tmp_path / "one")
    assert_is_hf_data(load_images(tmp_path / "one"))
    datasets = pytest.importorskip("datasets")
    datasets.DatasetDict(train=data, test=data.select([1])).save_to_disk(tmp_path / "two")
    with pytest.raises(DataError, match=r"one split, received \['train', 'test'\]. Pass one of them: '.*two/train'"):
        load_images(tmp_path / "two")
    assert_is_hf_data(load_images(tmp_path / "two" / "train"))


def test_hf_datasets_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A folder of Parquet files is a dataset to HF: the same function loads it and datasets of the hub."""
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    hf_data().to_parquet(tmp_path / "set" / "train.parquet")
    hf_data(size=6).to_parquet(tmp_path / "set" / "test.parquet")
    assert_is_hf_data(load_images(f"hf:{tmp_path / 'set'}"))
    assert_is_hf_data(load_images(f"hf:{tmp_path / 'set'}:test"), 6)
    with pytest.raises(DataError, match=r"split 'valid', of the .* received ValueError: Unknown split"):
        load_images(f"hf:{tmp_path / 'set'}:valid")


def test_a_hub_that_cannot_be_reached() -> None:
    pytest.importorskip("datasets")
    with pytest.raises(
        DataError, match=r"'nobody/nothing' of the Hugging Face hub, received .*Check the name and the connection"
    ):
        load_images("hf:nobody/nothing")


# -- torchvision by name -----------------------------------------------------------------------------------


def write_idx(path: Path, array: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    header = bytes([0, 0, 8, array.ndim]) + np.array(array.shape, dtype=">u4").tobytes()
    data = header + array.astype(np.uint8).tobytes()
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def write_mnist(folder: Path, part: str, size: int, ending: str = "") -> tuple[np.ndarray, np.ndarray]:
    images, labels = pixels(size, 28, 28, seed=size), np.arange(size) % 10
    write_idx(folder / f"{part}-images-idx3-ubyte{ending}", images)
    write_idx(folder / f"{part}-labels-idx1-ubyte{ending}", labels)
    return images, labels


def test_torchvision_datasets_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    train, _ = write_mnist(tmp_path / "data" / "FashionMNIST" / "raw", "train", 20)
    write_mnist(tmp_path / "data" / "FashionMNIST" / "raw", "t10k", 10)
    data = load_images("torchvision:FashionMNIST")
    info = extract_info(data)
    assert (info.num_samples, info.num_classes, info.class_counts) == (20, 10, [2] * 10)
    assert info.class_names is not None
    assert info.class_names[9] == "Ankle boot"
    assert info.input_shape == (3, 28, 28)
    assert np.array_equal(np.asarray(data[3][0])[..., 0], train[3])
    assert len(load_images("torchvision:fashionmnist:test")) == 10
    assert load_images("torchvision:FashionMNIST", channels=1)[0][0].mode == "L"
    monkeypatch.setenv("TRAINFORMER_DATA", str(tmp_path / "data"))
    monkeypatch.chdir("/")
    assert len(load_images("torchvision:FashionMNIST:train")) == 20
    assert len(load_images("torchvision:FakeData")) == 1000


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "torchvision:CIFAR10",
            r"files of torchvision's CIFAR10 below 'data', received: .*CIFAR10\('data', .*download=True",
        ),
        ("torchvision:Food101", "files of torchvision's Food101 below 'data'"),
        ("torchvision:CIFAR", "torchvision dataset, received 'CIFAR'. Did you mean 'CIFAR10"),
        ("torchvision:CIFAR10:valid", "the split 'train' or 'test' of torchvision's CIFAR10, received 'valid'"),
        ("torchvision:SVHN:valid", "a split of torchvision's SVHN, received 'valid'"),
        ("torchvision:Caltech101:test", "no split, since torchvision's Caltech101 has none"),
        ("torchvision:EMNIST", "received EMNIST, which needs split"),
        ("torchvison:CIFAR10", "Did you mean 'torchvision:CIFAR10'"),
    ],
)
def test_torchvision_datasets_that_cannot_be_loaded(name: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        load_images(name)


# -- in memory ---------------------------------------------------------------------------------------------


def test_images_in_memory_are_found_through_subsets() -> None:
    images, labels = torch.from_numpy(pixels(10, 6, 6)), torch.arange(10)
    got = images_in_memory(Subset(Subset(TensorDataset(images, labels), [1, 3, 5, 7]), [2, 0]), channels=3)
    assert got is not None
    assert got.targets.tolist() == [5, 1]
    assert torch.equal(got.images, images[[5, 1]].unsqueeze(1).repeat(1, 3, 1, 1))


def test_channels_last_arrays_are_permuted() -> None:
    images = torch.from_numpy(pixels(4, 8, 9, 3))
    got = images_in_memory(TensorDataset(images))
    assert got is not None
    assert torch.equal(got.images, images.permute(0, 3, 1, 2))
    assert not hasattr(got, "targets")


@pytest.mark.parametrize(
    "data", [TensorDataset(torch.zeros(2, 3, 4, 4)), [(torch.zeros(1, 2, 2, dtype=torch.uint8), 0)]]
)
def test_other_data_are_not_images_in_memory(data: Any) -> None:
    assert images_in_memory(data) is None


def test_in_memory_datasets_are_recognised(folder: Path) -> None:
    assert ImageDataset(load_builtin("digits")).in_memory
    assert not ImageDataset(load_images(folder)).in_memory


# -- samples -----------------------------------------------------------------------------------------------


def test_digits_are_those_of_sklearn() -> None:
    from sklearn.datasets import load_digits

    data, want = load_images("digits"), load_digits()
    assert isinstance(data, ImageTensors)
    assert data.images.shape == (1797, 1, 8, 8)
    assert data.images.dtype == torch.uint8
    assert (int(data.images.min()), int(data.images.max())) == (0, 255)
    assert np.array_equal(np.round(data.images[:, 0].numpy() / 255 * 16), want.images)
    assert np.array_equal(data.targets.numpy(), want.target)
    assert data.classes == list("0123456789")
    assert extract_info(data).input_shape == (1, 8, 8)


FASHION = Path("/usr/share/datasets/fashion-mnist")


@pytest.mark.skipif(not FASHION.is_dir(), reason="needs the Debian package dataset-fashion-mnist")
def test_fashion_mnist_is_that_of_torchvision(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from torchvision.datasets import FashionMNIST

    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("TRAINFORMER_DATA", raising=False)
    raw = tmp_path / "FashionMNIST" / "raw"
    raw.mkdir(parents=True)
    for path in FASHION.glob("*.gz"):
        (raw / path.stem).write_bytes(gzip.decompress(path.read_bytes()))
    for name, train in (("fashion-mnist", True), ("fashion-mnist:test", False)):
        data, theirs = load_images(name), FashionMNIST(tmp_path, train=train)
        assert torch.equal(data.images[:, 0], theirs.data)
        assert torch.equal(data.targets, theirs.targets)
        assert data.classes == theirs.classes
        info = extract_info(data)
        assert (info.num_classes, info.input_shape) == (10, (1, 28, 28))
        assert info.class_counts == [len(theirs) // 10] * 10


def test_fashion_mnist_is_found_in_a_custom_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images, labels = write_mnist(tmp_path / "mine" / "fashion-mnist", "train", 12, ".gz")
    monkeypatch.setenv("TRAINFORMER_DATA", str(tmp_path / "mine"))
    data = load_builtin("fashion-mnist")
    assert np.array_equal(data.images[:, 0].numpy(), images)
    assert data.targets.tolist() == labels.tolist()
    monkeypatch.delenv("TRAINFORMER_DATA")
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / ".cache").mkdir()
    (tmp_path / "mine").rename(tmp_path / ".cache" / "trainformer")
    assert len(load_builtin("fashion-mnist")) == 12


def test_missing_fashion_mnist_error_says_where_to_get_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(Path, "is_file", lambda self: False)
    monkeypatch.setenv("TRAINFORMER_DATA", str(tmp_path))
    with pytest.raises(DataError, match=r"t10k-images.*dataset-fashion-mnist.*zalandoresearch"):
        load_builtin("fashion-mnist:test")
    assert builtin_names() == ["digits", "fashion-mnist", "fashion-mnist:test"]


@pytest.mark.parametrize("shape", [(5,), (2, 3), (3, 4, 5), (0, 28, 28)])
@pytest.mark.parametrize("name", ["x", "x.gz"])
def test_idx_files(tmp_path: Path, shape: tuple[int, ...], name: str) -> None:
    array = pixels(*shape)
    write_idx(tmp_path / name, array)
    got = read_idx(tmp_path / name)
    assert np.array_equal(got, array)
    assert got.flags.writeable


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("x", b"", "start like an IDX file"),
        ("x", b"\0\0\x0d\1\0\0\0\1\0", "start like an IDX file"),  # floats
        ("x", b"\0\0\x08\2\0\0\0\1", "start like an IDX file"),  # one of two sizes
        ("x", b"\0\0\x08\1\0\0\0\3\1\2", r"3 values of shape \(3,\).*received 2"),
        ("x.gz", b"not compressed", "cannot be read"),
        ("x.gz", gzip.compress(bytes(1000), mtime=0)[:-9], "cannot be read"),
    ],
)
def test_invalid_idx_files(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(DataError, match=message):
        read_idx(tmp_path / name)


def test_unknown_builtin_names() -> None:
    with pytest.raises(BadArgument, match=r"received 'digit'. Did you mean 'digits'[?] Built-in datasets: 'digits'"):
        load_builtin("digit")
    with pytest.raises(DataError, match="Did you mean 'digits'"):
        load_images("digts")
    with pytest.raises(DataError, match="Did you mean 'fashion-mnist:test'"):
        load_images("fashion-mnist:tets")


def test_a_folder_may_have_the_name_of_a_builtin_dataset(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "cat").rename(folder / "digits")
    monkeypatch.chdir(folder)
    assert isinstance(load_images("digits"), ImageTensors)
    assert isinstance(load_images("./digits"), ImageFolder)
    assert isinstance(load_images(Path("digits")), ImageFolder)
