"""Images with text: every file format gives the same items, lazily, and errors name the line."""

from __future__ import annotations

import csv
import io
import json
import pickle
import random
import subprocess
import sys
import tarfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from torch.utils.data import IterableDataset

from tasks import shapes
from trainformer.core import BadArgument, DataError
from trainformer.data.fetcher import Fetcher
from trainformer.data.loader import stream_source
from trainformer.data.multimodal import ImageTextDataset, ImageTextStream, has_captions

SCENES = shapes.scenes(("red", "blue"), ("circle", "ring"))[:12]
CAPTIONS = [scene.caption for scene in SCENES]
LLAVA = [
    {"from": "human", "value": "<image>\nWhat is this?"},
    {"from": "gpt", "value": "A circle."},
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    shapes.write_images(tmp_path, SCENES)
    return tmp_path


def names() -> list[str]:
    return [f"{number:05d}.png" for number in range(len(SCENES))]


def contents(data: Any) -> list[tuple[str, str, bytes, bool]]:
    """Text, mode and pixels of each item, and whether it has nothing else."""
    known = {"image", "text", "captions"}
    items = [data[number] for number in range(len(data))]
    return [
        (item["text"], item["image"].mode, np.asarray(item["image"]).tobytes(), set(item) <= known) for item in items
    ]


def wanted(captions: list[str] = CAPTIONS) -> list[tuple[str, str, bytes, bool]]:
    """What was written, pixel for pixel."""
    return [
        (said, "RGB", np.asarray(SCENES[number].draw(number)).tobytes(), True) for number, said in enumerate(captions)
    ]


def written(path: Path, records: list[Any]) -> Path:
    text = json.dumps(records) if path.suffix == ".json" else "".join(json.dumps(r) + "\n" for r in records)
    path.write_text(text, "utf-8")
    return path


# -- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["pairs.json", "pairs.jsonl", "pairs.ndjson"])
def test_json_with_the_keys_of_the_plan(folder: Path, name: str) -> None:
    records = [{"image": file, "text": said} for file, said in zip(names(), CAPTIONS, strict=True)]
    assert contents(ImageTextDataset(str(written(folder / name, records)))) == wanted()


def test_other_keys_and_another_folder(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    records = [{"pic": file, "says": said, "text": "no"} for file, said in zip(names(), CAPTIONS, strict=True)]
    path = written(elsewhere / "a.jsonl", records)
    assert contents(ImageTextDataset(path, image_key="pic", text_key="says", image_dir=folder)) == wanted()
    with pytest.raises(DataError, match=r"does not exist. Paths are relative to image_dir, which is"):
        ImageTextDataset(path, "pic", "says")


@pytest.mark.parametrize("form", ["list", "mapping", "lines", "coco"])
def test_a_folder_with_captions_json(folder: Path, form: str) -> None:
    pairs = list(zip(names(), CAPTIONS, strict=True))
    content: Any = [{"image": file, "text": said} for file, said in pairs]
    if form == "mapping":
        content = dict(pairs)
    if form == "coco":
        images = [{"id": number, "file_name": file} for number, (file, _) in enumerate(pairs)]
        notes = [{"image_id": number, "id": 0, "caption": said} for number, (_, said) in enumerate(pairs)]
        content = {"images": [*images, {"id": 99, "file_name": "none.png"}], "annotations": notes[::-1]}
    text = "\n".join(map(json.dumps, content)) if form == "lines" else json.dumps(content)
    (folder / "captions.json").write_text(text)
    assert contents(ImageTextDataset(folder)) == wanted()


@pytest.mark.parametrize("name", ["captions.jsonl", "metadata.jsonl", "metadata.csv"])
def test_a_folder_with_a_table_as_imagefolder_has_it(folder: Path, name: str) -> None:
    rows = [{"file_name": file, "caption": said} for file, said in zip(names(), CAPTIONS, strict=True)]
    if name.endswith("csv"):
        with open(folder / name, "w", newline="") as file:
            writer = csv.DictWriter(file, list(rows[0]))
            writer.writeheader()
            writer.writerows(rows)
    else:
        written(folder / name, rows)
    assert contents(ImageTextDataset(folder)) == wanted()


def test_datasets_that_hf_saved_and_parquet(folder: Path) -> None:
    datasets = pytest.importorskip("datasets")
    rows = {"image": [str(folder / file) for file in names()], "caption": CAPTIONS}
    made = datasets.Dataset.from_dict(rows).cast_column("image", datasets.Image())
    made.save_to_disk(str(folder / "saved"))
    assert contents(ImageTextDataset(folder / "saved")) == wanted()
    made.to_parquet(str(folder / "rows.parquet"))
    assert contents(ImageTextDataset(folder / "rows.parquet")) == wanted()


def test_paths_with_captions_are_recognised(folder: Path) -> None:
    assert not has_captions(folder)
    assert not has_captions(folder / "nowhere")
    written(folder / "captions.json", [])
    assert has_captions(folder)
    assert has_captions("a-{0..3}.tar")
    assert has_captions("a.jsonl.gz")


def test_exif_grey_and_transparent_images_become_rgb(tmp_path: Path) -> None:
    picture = Image.fromarray(np.random.default_rng(0).integers(0, 255, (4, 6), dtype=np.uint8))
    exif = Image.Exif()
    exif[0x0112] = 6  # to be turned by a quarter
    picture.save(tmp_path / "turned.png", exif=exif)
    Image.new("LA", (3, 3)).save(tmp_path / "grey.png")
    data = ImageTextDataset([{"image": str(tmp_path / n), "text": n} for n in ("turned.png", "grey.png")])
    assert ImageTextDataset([{"image": picture, "text": "in memory"}])[0]["image"].mode == "RGB"
    assert data[0]["image"].size == (4, 6)
    assert data[0]["image"].mode == data[1]["image"].mode == "RGB"


# -- lazily ------------------------------------------------------------------------------------------------

MEASURE = """
import os, resource, sys
from trainformer.data.multimodal import ImageTextDataset
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
data = ImageTextDataset(sys.argv[1])
texts = [data[i]["text"] for i in range(0, len(data), len(data) // 50)]
assert all(text.startswith("number") for text in texts), texts
print(len(data), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)
"""


def test_a_large_file_is_not_loaded(folder: Path) -> None:
    """100 MB of records: what is read to find the lines, and fifty of them, must not stay in memory."""
    records = [{"image": names()[number % 12], "text": f"number {number} " + "x" * 900} for number in range(1000)]
    path, block, times = folder / "large.jsonl", "".join(json.dumps(record) + "\n" for record in records), 100
    with open(path, "w") as file:
        for _ in range(times):
            file.write(block)
    made = subprocess.run([sys.executable, "-c", MEASURE, str(path)], capture_output=True, text=True, check=True)
    count, grown = map(int, made.stdout.split()[-2:])
    assert count == times * len(records)
    assert grown < 30_000 < path.stat().st_size / 3000, f"{grown} kB more in memory for a file of 100 MB"


def test_copies_for_worker_processes_are_small_and_equal(folder: Path) -> None:
    path = shapes.write_jsonl(folder, SCENES)
    data = ImageTextDataset(path)
    sent = pickle.dumps(data)
    assert contents(pickle.loads(sent)) == wanted()
    assert len(sent) < 10_000


# -- several captions --------------------------------------------------------------------------------------


def several(folder: Path) -> ImageTextDataset:
    records = [{"image": f, "text": s.captions} for f, s in zip(names(), SCENES, strict=True)]
    return ImageTextDataset(written(folder / "several.jsonl", records))


def test_one_of_several_captions_depends_on_seed_epoch_and_sample_alone(folder: Path) -> None:
    data = several(folder)
    assert data.has_several_captions
    assert data[3]["captions"] == SCENES[3].captions
    order = np.arange(len(data))

    def drawn(seed: int, epoch: int, draws: np.ndarray = order) -> list[str]:
        random.seed(int(draws[0]))  # what is drawn elsewhere does not matter
        fetched = Fetcher(data, lambda items: [item["text"] for item in items], seed)(epoch, draws)
        return fetched.data

    first = drawn(0, 0)
    assert drawn(0, 0, order[::-1].copy())[::-1] == first
    assert [drawn(0, 0, order[i : i + 1])[0] for i in order] == first
    epochs = [drawn(0, epoch) for epoch in range(20)]
    assert all(set(texts) == set(SCENES[i].captions) for i, texts in enumerate(zip(*epochs, strict=True)))
    assert drawn(1, 0) != first


def test_a_folder_with_lists_of_captions(folder: Path) -> None:
    mapping = {file: scene.captions for file, scene in zip(names(), SCENES, strict=True)}
    (folder / "captions.json").write_text(json.dumps(mapping, indent=1))
    data = ImageTextDataset(folder)
    assert data.has_several_captions
    assert data[2]["captions"] == SCENES[2].captions
    assert data[2]["text"] in SCENES[2].captions


# -- conversations and questions ---------------------------------------------------------------------------


def test_chat_records(folder: Path) -> None:
    records = [
        {"image": names()[0], "conversations": LLAVA, "text": "left aside"},
        {"image": names()[1], "question": "Colour?", "answer": "red"},
        {"image": names()[2], "prompt": "<image>Colour?", "completion": "red"},
        {"images": names()[:2], "messages": [{"role": "user", "content": "<image> and <image>"}, *LLAVA[1:]]},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]},
    ]
    data = ImageTextDataset(written(folder / "talk.jsonl", records))
    assert data[0]["messages"] == [
        {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "What is this?"}]},
        {"role": "assistant", "content": "A circle."},
    ]
    assert set(data[0]) == {"image", "messages"}
    assert (data[1]["prompt"], data[1]["completion"]) == ("Colour?", "red")
    assert set(data[2]) >= {"image", "prompt"}
    parts = data[3]["messages"][0]["content"]
    assert [part["type"] for part in parts] == ["image", "text", "image"]
    assert len(data[3]["images"]) == 2
    assert data[4]["images"] == []
    assert data[4]["messages"][1]["content"] == "Hello"


def test_images_named_in_messages(folder: Path) -> None:
    parts = [{"type": "image", "image": names()[5]}, {"type": "text", "text": "Colour?"}]
    turns = [{"role": "user", "content": parts}, {"role": "assistant", "content": "red"}]
    item = ImageTextDataset([{"messages": turns}], image_dir=folder)[0]
    assert np.array_equal(np.asarray(item["image"]), np.asarray(SCENES[5].draw(5)))
    assert item["messages"][0]["content"] == [{"type": "image"}, {"type": "text", "text": "Colour?"}]


def test_an_explicit_key_wins(folder: Path) -> None:
    records = [{"image": names()[0], "question": "Colour?", "answer": "red", "title": "a thing"}]
    assert ImageTextDataset(records, text_key="title", image_dir=folder)[0]["text"] == "a thing"


# -- errors ------------------------------------------------------------------------------------------------

GOOD = {"image": "00000.png", "text": "a"}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ('{"image": "00000.png", "text": ', "line 4: Expected one JSON object per line"),
        ('{"image": "00000.png", "txt": "a"}', r"line 4: Expected the key 'text'.*'image', 'txt'"),
        ('{"picture": "00000.png", "text": "a"}', "line 4: Expected the key 'image'"),
        ('{"image": "00000.png", "text": 7}', "line 4: Expected a text in 'text', received 7"),
        ('{"image": "00000.png", "text": []}', "line 4: Expected at least one caption"),
        ('{"image": 7, "text": "a"}', "line 4: Expected a text in 'image', received 7"),
        ('{"image": "http://x/1.png", "text": "a"}', "line 4: Expected the path of a local file"),
        ('{"image": "none.png", "text": "a"}', "line 4: Expected an image file, received '.*none.png'"),
        ('{"image": "00000.png", "messages": [{"role": "king", "content": "a"}]}', "line 4: message 0.*known role"),
        (
            '{"image": "00000.png", "prompt": "<image><image>", "completion": "a"}',
            "line 4: .*Expected 2 images, one for each <image>",
        ),
    ],
)
def test_errors_name_the_line(folder: Path, bad: str, message: str) -> None:
    path = folder / "bad.jsonl"
    path.write_text(f"{json.dumps(GOOD)}\n\n{json.dumps(GOOD)}\n{bad}\n")
    with pytest.raises(DataError, match=message):
        ImageTextDataset(path)
    path.write_text((json.dumps(GOOD) + "\n") * 150 + f"{bad}\n")
    data = ImageTextDataset(path)  # what comes late is found when it is read
    with pytest.raises(DataError, match=message.replace("line 4", "line 151")):
        data[150]


def test_a_corrupt_image_is_named(folder: Path) -> None:
    data = ImageTextDataset(shapes.write_jsonl(folder, SCENES))
    (folder / names()[3]).write_bytes(b"no image")
    with pytest.raises(DataError, match=rf"data.jsonl, line 4: .*{names()[3]}', which cannot be decoded"):
        data[3]


def test_missing_folders_and_files_raise(folder: Path) -> None:
    with pytest.raises(DataError, match=r"Expected a folder with one of captions.json, .*00000.png"):
        ImageTextDataset(folder)
    with pytest.raises(DataError, match="does not exist"):
        ImageTextDataset(folder / "pairs.jsonl")
    with pytest.raises(DataError, match="at least one record"):
        ImageTextDataset([])


# -- shards ------------------------------------------------------------------------------------------------


def write_shards(folder: Path, *, several: bool = False, bad: int | None = None) -> str:
    for shard in range(3):
        with tarfile.open(folder / f"s-{shard}.tar", "w") as tar:
            for number in range(shard, 12, 3):
                buffer = io.BytesIO()
                SCENES[number].draw(number).save(buffer, "png")
                said: tuple[str, bytes] = ("txt", CAPTIONS[number].encode())
                if several:
                    said = ("json", json.dumps({"caption": SCENES[number].captions, "id": number}).encode())
                if number == bad:
                    said = ("json", b"{")
                for ending, content in (("png", buffer.getvalue()), said):
                    info = tarfile.TarInfo(f"{number:05d}.{ending}")
                    info.size = len(content)
                    tar.addfile(info, io.BytesIO(content))
    return str(folder / "s-{0..2}.tar")


def test_shards_are_a_stream_of_the_same_items(tmp_path: Path) -> None:
    urls = write_shards(tmp_path)
    for path in (urls, tmp_path):
        data: Any = ImageTextDataset(path)
        assert isinstance(data, IterableDataset)
        assert isinstance(data, ImageTextStream)
        items = list(data)
        assert sorted(item["text"] for item in items) == sorted(CAPTIONS)
        number = CAPTIONS.index(items[5]["text"])
        assert np.array_equal(np.asarray(items[5]["image"]), np.asarray(SCENES[number].draw(number)))
    assert len(ImageTextDataset(urls).scan()) == 12
    with pytest.raises(BadArgument, match="no image_dir"):
        ImageTextDataset(urls, image_dir=tmp_path)


def test_a_resumed_stream_draws_the_same_captions(tmp_path: Path) -> None:
    urls = write_shards(tmp_path, several=True)

    def texts(stream: Any, epoch: int = 0) -> list[str]:
        stream.set_epoch(epoch)
        return [item["text"] for item in stream]

    whole = texts(ImageTextStream(urls, shuffle=4, seed=3))
    assert Counter(SCENES_OF[text] for text in whole) == Counter(range(12))
    stream = ImageTextStream(urls, shuffle=4, seed=3)
    iterator = iter(stream)
    begun = [next(iterator)["text"] for _ in range(5)]
    other = ImageTextStream(urls, shuffle=4, seed=3)
    other.load_state_dict(pickle.loads(pickle.dumps(stream.state_dict())))
    assert begun + [item["text"] for item in other] == whole
    drawn = {text for epoch in range(12) for text in texts(stream, epoch)}
    assert len(drawn) == 24  # each of the two captions of every image comes up
    source = stream_source(stream, 4, seed=0, collate=lambda items: [item["text"] for item in items], num_workers=0)
    assert sum(len(batch.data) for batch in source.batches(0)) == 12


SCENES_OF = {text: number for number, scene in enumerate(SCENES) for text in scene.captions}


def test_a_bad_sample_of_a_shard_is_an_error_or_skipped(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    urls = write_shards(tmp_path, bad=4)
    with pytest.raises(DataError, match=r"sample '00004' of shard '.*s-1.tar': Expected UTF-8 text or JSON"):
        list(ImageTextDataset(urls))
    assert len(list(ImageTextStream(urls, skip_bad=True))) == 11
    assert "00004" in caplog.text


def test_a_record_with_an_image_passes_its_system_prompt_and_tools_on() -> None:
    from trainformer.tasks.multimodal.image_text_records import read_record

    passed = {"tools": [{"name": "eye"}], "chat_template_kwargs": {"enable_thinking": False}}
    system = {"role": "system", "content": "be brief"}
    for record in (
        {"image": "a.png", "question": "Who?", "answer": "Me."},
        {"image": "a.png", "messages": [{"role": "user", "content": "Who?"}, {"role": "assistant", "content": "Me."}]},
        {"question": "Who?", "answer": "Me."},
    ):
        content = read_record({**record, "system": "be brief", **passed}, str)
        assert {name: content.parts[name] for name in passed} == passed
        roles = [(turn["role"], turn["content"]) for turn in content.parts["messages"]]
        assert roles == [("system", system["content"]), ("user", "Who?"), ("assistant", "Me.")]
