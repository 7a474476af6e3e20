"""Image lists: every file format gives the same images and labels, and clear errors."""

from __future__ import annotations

import csv
import json
import pickle
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import Subset

from trainformer.core import BadArgument, DataError
from trainformer.data import extract_info, labels_of, load_images
from trainformer.data.labels import align_classes
from trainformer.data.lists import ImageList

NAMES = ["dog", "cat", "dog", "ant", "cat", "dog"]


def pixels(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (5, 7, 3), dtype=np.uint8)


@pytest.fixture
def images(tmp_path: Path) -> list[str]:
    (tmp_path / "pictures").mkdir()
    paths = [f"pictures/{number}.png" for number in range(6)]
    for number, path in enumerate(paths):
        Image.fromarray(pixels(number)).save(tmp_path / path)
    return paths


def write(path: Path, columns: dict[str, list[Any]]) -> Path:
    rows = [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)]
    if path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="") as file:
            writer = csv.DictWriter(file, list(columns), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(rows)
    elif path.suffix == ".jsonl":
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows))
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.table(columns), path)
    return path


every_kind = pytest.mark.parametrize("suffix", ["csv", "tsv", "json", "jsonl", "parquet"])


@every_kind
def test_every_kind_of_list_gives_the_images_and_labels(tmp_path: Path, images: list[str], suffix: str) -> None:
    path = write(tmp_path / f"train.{suffix}", {"image": images, "label": NAMES, "note": ["a, b"] * 6})
    data = load_images(path)
    assert isinstance(data, ImageList)
    assert data.classes == ["ant", "cat", "dog"]
    assert data.class_to_idx == {"ant": 0, "cat": 1, "dog": 2}
    assert data.targets == labels_of(data).tolist() == [2, 1, 2, 0, 1, 2]
    assert data.samples == [(str(tmp_path / p), label) for p, label in zip(images, data.targets, strict=True)]
    for number, (image, label) in enumerate(data):
        assert np.array_equal(np.asarray(image), pixels(number))
        assert label == data.targets[number]
    info = extract_info(data)
    assert (info.num_samples, info.num_classes, info.class_names) == (6, 3, ["ant", "cat", "dog"])
    assert (info.class_counts, info.input_shape) == ([1, 2, 3], (3, 5, 7))
    part = extract_info(Subset(data, [0, 2]))
    assert (part.class_counts, part.class_names) == ([0, 0, 2], ["ant", "cat", "dog"])


@every_kind
def test_integer_labels_are_used_unchanged(tmp_path: Path, images: list[str], suffix: str) -> None:
    data = ImageList(write(tmp_path / f"l.{suffix}", {"path": images, "target": [3, 0, 0, 1, 3, 10]}))
    assert data.targets == [3, 0, 0, 1, 3, 10]
    assert not hasattr(data, "classes")
    assert extract_info(data).num_classes == 11


@every_kind
def test_a_list_without_labels(tmp_path: Path, images: list[str], suffix: str) -> None:
    path = write(tmp_path / f"l.{suffix}", {"file_name": images})
    data = ImageList(path)
    assert [label for _, label in data] == [None] * 6
    assert not hasattr(data, "targets")
    assert labels_of(data) is None
    with pytest.raises(DataError, match=r"column of labels .*received none with a common name"):
        load_images(path, labels=True)


def test_labels_can_be_ignored(tmp_path: Path, images: list[str]) -> None:
    path = write(tmp_path / "l.csv", {"image": images, "label": ["", *NAMES[1:]]})
    assert [label for _, label in load_images(path, labels=False)] == [None] * 6
    with pytest.raises(DataError, match=r"received none in row 0 \(1 such rows\)"):
        ImageList(path)


@pytest.mark.parametrize(
    ("columns", "image", "label"),
    [
        (["Image", "Label"], "Image", "Label"),
        (["id", "img", "y", "class"], "img", "class"),
        (["label", "path", "image"], "image", "label"),
        (["category_id", "filepath", "name"], "filepath", "category_id"),
    ],
)
def test_columns_are_found_by_common_names(
    tmp_path: Path, images: list[str], columns: list[str], image: str, label: str
) -> None:
    data = ImageList(write(tmp_path / "l.csv", {name: images if name == image else [1] * 6 for name in columns}))
    assert (data.image_key, data.label_key) == (image, label)


def test_columns_can_be_named_and_the_root_be_elsewhere(tmp_path: Path, images: list[str]) -> None:
    (tmp_path / "lists").mkdir()
    columns = {"where": [Path(path).name for path in images], "species": NAMES, "label": [0] * 6}
    path = write(tmp_path / "lists" / "l.csv", columns)
    data = ImageList(path, "where", "species", root=tmp_path / "pictures", channels=1)
    assert data.classes == ["ant", "cat", "dog"]
    assert data[0][0].mode == "L"
    absolute = write(tmp_path / "lists" / "m.csv", {"image": [str(tmp_path / p) for p in images]})
    assert len(ImageList(absolute)) == 6


def test_other_delimiters_byte_order_marks_and_digits_as_names(tmp_path: Path, images: list[str]) -> None:
    lines = ["image; label", *(f"{path}; {name}" for path, name in zip(images, "ab12b1", strict=True)), ""]
    (tmp_path / "l.csv").write_text("\n".join(lines), encoding="utf-8-sig")
    data = ImageList(tmp_path / "l.csv")
    assert data.classes == ["1", "2", "a", "b"]  # letters and digits, as in reading of signs
    assert data.targets == [2, 3, 0, 1, 3, 0]


def test_json_of_columns_and_json_lines_by_another_name(tmp_path: Path, images: list[str]) -> None:
    (tmp_path / "columns.json").write_text(json.dumps({"image": images, "label": NAMES}))
    lines = [json.dumps({"image": path, "label": name}) for path, name in zip(images, NAMES, strict=True)]
    (tmp_path / "lines.json").write_text("\n".join(lines))
    assert ImageList(tmp_path / "columns.json").targets == ImageList(tmp_path / "lines.json").targets


def test_validation_lists_are_remapped(tmp_path: Path, images: list[str]) -> None:
    data = ImageList(write(tmp_path / "val.csv", {"image": images[:3], "label": ["dog", "cat", "dog"]}))
    assert data.targets == [1, 0, 1]
    aligned = align_classes(data, ["ant", "cat", "dog"])
    assert [label for _, label in aligned] == aligned.targets == [2, 1, 2]
    assert data.targets == [1, 0, 1]
    with pytest.raises(DataError, match="received others: dog"):
        align_classes(data, ["ant", "cat"])


# -- images inside a Parquet file --------------------------------------------------------------------------


def test_parquet_written_by_hf_datasets_holds_the_images(tmp_path: Path, images: list[str]) -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["b", "a", "c"])})
    rows = {"image": [Image.fromarray(pixels(i)) for i in range(6)], "label": [0, 2, 0, 2, 2, 0]}
    datasets.Dataset.from_dict(rows, features=features).to_parquet(tmp_path / "x.parquet")
    data = load_images(tmp_path / "x.parquet")
    assert data.classes == ["b", "a", "c"]  # type: ignore[attr-defined]
    assert extract_info(data).class_counts == [3, 0, 3]
    copied = pickle.loads(pickle.dumps(data))  # as worker processes may get it
    for number in range(6):
        for source in (data, copied):
            image, label = source[number]
            assert np.array_equal(np.asarray(image), pixels(number))
            assert label == rows["label"][number]


def test_parquet_with_bare_bytes_or_paths_in_records(tmp_path: Path, images: list[str]) -> None:
    data = [(tmp_path / path).read_bytes() for path in images]
    bare = ImageList(write(tmp_path / "bare.parquet", {"img": data, "label": NAMES}))
    assert np.array_equal(np.asarray(bare[3][0]), pixels(3))
    records: list[Any] = [{"bytes": None, "path": path} for path in images]
    records[2] = {"bytes": data[2], "path": "anything.png"}
    mixed = ImageList(write(tmp_path / "mixed.parquet", {"image": records}))
    for number in (0, 2, 5):
        assert np.array_equal(np.asarray(mixed[number][0]), pixels(number))
    with pytest.raises(DataError, match=r"row 0 of '.*none.parquet', received neither its bytes nor a path"):
        ImageList(write(tmp_path / "none.parquet", {"image": [{"bytes": None, "path": None}, records[2]]}))


def test_images_that_cannot_be_decoded_are_named(tmp_path: Path, images: list[str]) -> None:
    data = ImageList(write(tmp_path / "x.parquet", {"image": [b"no image", b"nor this"]}))
    with pytest.raises(DataError, match=r"received the image in row 1 of '.*x.parquet', which cannot be decoded"):
        data[1]
    (tmp_path / images[1]).write_text("broken")
    listed = ImageList(write(tmp_path / "l.csv", {"image": images}))
    with pytest.raises(DataError, match=r"1.png', which cannot be decoded"):
        listed[1]


# -- what can be wrong -------------------------------------------------------------------------------------


def test_missing_columns_are_named_with_those_that_are_there(tmp_path: Path, images: list[str]) -> None:
    path = write(tmp_path / "l.csv", {"picture": images, "species": NAMES})
    with pytest.raises(DataError, match=r"column of images.*has the columns: 'picture', 'species'. Pass image_key="):
        ImageList(path)
    with pytest.raises(DataError, match=r"image_key to be a column, received 'pictur'. Did you mean 'picture'"):
        ImageList(path, "pictur")
    with pytest.raises(DataError, match=r"label_key to be a column, received 'kind'"):
        ImageList(path, "picture", "kind")


def test_missing_files_are_counted_and_named_up_front(tmp_path: Path, images: list[str]) -> None:
    paths = [*images, *(f"gone/{number}.png" for number in range(5))]
    with pytest.raises(DataError, match=r"5 of 11 do not exist: '.*gone/0.png', .*gone/2.png', \.\.\.\. Pass root="):
        ImageList(write(tmp_path / "l.csv", {"image": paths}))


def test_only_the_first_files_are_checked(tmp_path: Path, images: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainformer.data.lists._MAX_CHECKED", 6)
    data = ImageList(write(tmp_path / "l.csv", {"image": [*images, "gone.png"]}))
    with pytest.raises(DataError, match=r"gone\.png"):
        data[6]


@pytest.mark.parametrize(
    ("labels", "message"),
    [
        (["cat", 1, 2], "labels of one kind .*'cat' and 1"),
        ([0, 1, None], "received none in row 2"),
        ([0, 1, -1], "integers from 0, or names, as labels in 'label' of .*received -1"),
        ([0.5, 1, 2], "received 0.5"),
        ([[1], [2], [3]], r"received \[1\]"),
    ],
)
def test_invalid_labels(tmp_path: Path, images: list[str], labels: list[Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        ImageList(write(tmp_path / "l.jsonl", {"image": images[:3], "label": labels}))


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("l.csv", "", "received an empty list"),
        ("l.csv", "image,label\n", "received an empty list"),
        ("l.csv", "image,label\na.png\n", r"l.csv, line 2: Expected 2 values \(image, label\), received 1"),
        ("l.csv", "image,label\n,cat\n", "path of an image in every row .* received '' in row 0"),
        ("l.csv", "image\nhttp://x/y.png\n", "local files .*Download"),
        ("l.json", "[]", "received an empty list"),
        ("l.json", '{"a": 1}', "one record per image"),
        ("l.jsonl", "[1]\n", "one record per image"),
        ("l.jsonl", "{no\n", "can be read as .jsonl"),
        ("l.parquet", "text", "Expected a Parquet file"),
        ("l.csv", b"image\n\xff\xfe\n", "line 2: Expected UTF-8 text"),
    ],
)
def test_invalid_lists(tmp_path: Path, name: str, content: str | bytes, message: str) -> None:
    (tmp_path / name).write_bytes(content if isinstance(content, bytes) else content.encode())
    with pytest.raises(DataError, match=message):
        ImageList(tmp_path / name)


def test_missing_lists(tmp_path: Path, images: list[str]) -> None:
    write(tmp_path / "train.csv", {"image": images})
    with pytest.raises(DataError, match=r"does not exist. Did you mean 'train.csv'\? '.*' has the lists: train.csv"):
        load_images(tmp_path / "trian.csv")
    with pytest.raises(DataError, match="does not exist"):
        load_images(tmp_path / "nowhere" / "train.csv")
    with pytest.raises(BadArgument, match=r"a list of images \(.csv, .tsv"):
        ImageList(tmp_path / "train.txt")
