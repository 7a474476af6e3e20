"""Tar shards: streamed samples are compared with what was written, and resumed streams with uninterrupted ones."""

from __future__ import annotations

import io
import json
import logging
import pickle
import random
import tarfile
from collections import Counter
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from torch.utils.data import DataLoader, IterableDataset

from trainformer.core import DataError
from trainformer.data import MappedStream, WebDataset, extract_info, load_images
from trainformer.data.labels import align_classes
from trainformer.data.loader import LoaderSource, StatefulLoaderSource, stream_source
from trainformer.data.sharding import Shard
from trainformer.data.tar_shards import expand_braces, find_shards, is_shard_path

SHARDS, SIZE = 5, 8


def pixels(number: int) -> np.ndarray:
    return np.random.default_rng(number).integers(0, 256, (4, 6, 3), dtype=np.uint8)


def png(number: int) -> bytes:
    buffer = io.BytesIO()
    Image.fromarray(pixels(number)).save(buffer, "png")
    return buffer.getvalue()


def write_tar(path: Path, files: list[tuple[str, bytes]], mode: Any = "w", form: int = tarfile.PAX_FORMAT) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(path, mode, format=form) as tar:
        for name, data in files:
            member = tarfile.TarInfo(name)
            member.size = len(data)
            tar.addfile(member, io.BytesIO(data))
    return path


def sample_files(number: int) -> list[tuple[str, bytes]]:
    """The label of sample n is n: so samples can be told apart."""
    return [(f"{number:04}.png", png(number)), (f"{number:04}.cls", str(number).encode())]


def write_shards(folder: Path, sizes: list[int], ending: str = ".tar", mode: Any = "w") -> Path:
    numbers = iter(range(1000))
    for shard, size in enumerate(sizes):
        files = [file for number in islice(numbers, size) for file in sample_files(number)]
        write_tar(folder / f"x-{shard:03}{ending}", files, mode)
    return folder


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "shards", [SIZE] * SHARDS)


def labels(stream: Any) -> list[int]:
    return [label for _, label in stream]


# -- what is in a shard ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("ending", "mode"), [(".tar", "w"), (".tar.gz", "w:gz"), (".tgz", "w:gz"), (".tar.xz", "w:xz")]
)
def test_samples_come_as_they_were_written(tmp_path: Path, ending: str, mode: str) -> None:
    write_shards(tmp_path, [3, 2], ending, mode)
    samples = list(WebDataset(tmp_path))
    assert [label for _, label in samples] == [0, 1, 2, 3, 4]
    for image, number in samples:
        assert image.mode == "RGB"
        assert np.array_equal(np.asarray(image), pixels(number))


@pytest.mark.parametrize(
    ("name", "content", "keys", "want"),
    [
        ("cls", b"7\n", {}, 7),
        ("label", b" 7", {}, 7),
        ("json", b"7", {}, 7),
        ("json", b'{"width": 3, "label": 7}', {}, 7),
        ("json", b'{"class": "7"}', {}, 7),
        ("json", b'{"species": 7, "label": 1}', {"label_key": "json:species"}, 7),
        ("cls", b"bee", {"classes": ["ant", "bee"]}, 1),
        ("txt", b"7", {"label_key": ["txt"]}, 7),
        ("txt", b"a caption", {}, None),
        ("json", b'{"caption": "a cat"}', {}, None),
        ("meta.json", b'{"label": 7}', {"label_key": "meta.json"}, 7),
    ],
)
def test_labels_in_every_format(tmp_path: Path, name: str, content: bytes, keys: Any, want: Any) -> None:
    path = write_tar(tmp_path / "x.tar", [("a/b.png", png(0)), (f"a/b.{name}", content)])
    assert labels(WebDataset(path, **keys)) == [want]


def test_samples_are_what_shares_a_name_up_to_the_first_dot(tmp_path: Path) -> None:
    files = [
        ("README", b"not a sample"),
        ("one/0.1.PNG", png(0)),  # another ending: of no interest
        ("one/0.png", png(1)),
        ("one/0.cls", b"1"),
        ("two/0.jpg", png(2)),  # another folder: another sample; the content decides what it is
        ("two/0.cls", b"2"),
        ("two/._0.jpg", b"macOS"),
        ("__MACOSX/two/0.jpg", b"macOS"),
        ("meta.txt", b"not a sample"),
    ]
    stream = WebDataset(write_tar(tmp_path / "x.tar", files))
    assert labels(stream) == [1, 2]
    assert labels(WebDataset(stream.shards[0], image_key="1.png")) == [1]


@pytest.mark.parametrize("form", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT, tarfile.USTAR_FORMAT])
def test_long_names_survive_resuming(tmp_path: Path, form: int) -> None:
    long = "folder-of-some-length/" * (6 if form == tarfile.USTAR_FORMAT else 12)
    files = [(f"{long}ö{name}", data) for number in range(6) for name, data in sample_files(number)]
    path = write_tar(tmp_path / "x.tar", files, form=form)
    for after in range(6):
        stream = WebDataset(path, shuffle=3)
        whole = labels(stream)
        iterator = iter(stream)
        seen = labels(islice(iterator, after))
        resumed = WebDataset(path, shuffle=3)
        resumed.load_state_dict(stream.state_dict())
        assert seen + labels(resumed) == whole
        assert sorted(whole) == list(range(6))


def test_channels(shards: Path) -> None:
    assert next(iter(WebDataset(shards, channels=1)))[0].mode == "L"


# -- order and position ------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [False, 1, 5, 1000])
def test_every_sample_once_in_an_order_that_is_a_function_of_seed_and_epoch(shards: Path, shuffle: int) -> None:
    orders = {}
    for seed in (0, 1):
        for epoch in (0, 1, 2):
            stream = WebDataset(shards, shuffle=shuffle, seed=seed)
            stream.set_epoch(epoch)
            orders[seed, epoch] = tuple(labels(stream))
            assert sorted(orders[seed, epoch]) == list(range(SHARDS * SIZE))
            assert tuple(labels(stream)) == orders[seed, epoch]
    assert len(set(orders.values())) == (6 if shuffle else 1)
    if shuffle == 1:  # shards in random order, each as it was written
        assert all(order[i + 1] == order[i] + 1 for order in orders.values() for i in range(39) if i % SIZE != SIZE - 1)


def test_the_buffer_mixes_all_that_it_holds(shards: Path) -> None:
    """Mean distance of neighbours: about n / 3 for a permutation, 1 for none."""
    order = np.array(labels(WebDataset(shards, shuffle=True)))
    assert 9 < np.abs(np.diff(order)).mean() < 18
    first = Counter(labels(islice(WebDataset(shards, shuffle=True, seed=seed), 1))[0] // SIZE for seed in range(60))
    assert len(first) == SHARDS


def test_every_draw_from_the_buffer_is_another(tmp_path: Path) -> None:
    write_shards(tmp_path, [40, 40])
    shares = [labels(WebDataset(tmp_path, shuffle=8, num_replicas=2, rank=rank)) for rank in (0, 1)]
    places = [[label % 40 for label in share] for share in shares]
    assert places[0] != places[1]  # each rank, and each worker, has draws of its own
    for share in places:
        assert all(label < number + 8 for number, label in enumerate(share))  # no more than the buffer holds ahead
        assert len({label - number for number, label in enumerate(share[:32])}) > 7


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=5),
    shuffle=st.sampled_from([0, 1, 2, 4, 7, 100]),
    stops=st.lists(st.integers(0, 12), min_size=1, max_size=4),
    epoch=st.integers(0, 2),
)
def test_a_stream_resumes_exactly_anywhere(
    tmp_path_factory: pytest.TempPathFactory, sizes: list[int], shuffle: int, stops: list[int], epoch: int
) -> None:
    folder = write_shards(tmp_path_factory.mktemp("s"), sizes)
    whole = WebDataset(folder, shuffle=shuffle, seed=3)
    whole.set_epoch(epoch)
    want = labels(whole)
    seen: list[int] = []
    state: Any = None
    for stop in stops:
        part = WebDataset(folder, shuffle=shuffle, seed=3)
        part.set_epoch(epoch)
        if state is not None:
            part.load_state_dict(state)
            assert part.state_dict() == state
        iterator = iter(part)
        seen += labels(islice(iterator, stop))
        state = json.loads(json.dumps(part.state_dict()))  # as a checkpoint may write it
    last = WebDataset(folder, shuffle=shuffle, seed=3)
    last.load_state_dict(state)
    last.set_epoch(epoch)  # the loader announces the epoch it resumes in
    assert seen + labels(last) == want
    assert labels(last) == want  # once only: the next iteration is a whole epoch


def test_images_after_resuming_are_bitwise_the_same(shards: Path) -> None:
    stream = WebDataset(shards, shuffle=10)
    whole = [np.asarray(image).tobytes() for image, _ in stream]
    iterator = iter(stream)
    for _ in range(17):
        next(iterator)
    resumed = WebDataset(shards, shuffle=10)
    resumed.load_state_dict(stream.state_dict())
    assert [np.asarray(image).tobytes() for image, _ in resumed] == whole[17:]


def test_resuming_reads_nothing_of_the_shards_that_are_done(shards: Path) -> None:
    stream = WebDataset(shards)
    iterator = iter(stream)
    want = labels(iterator)[2 * SIZE + 3 :]
    iterator = iter(stream)
    labels(islice(iterator, 2 * SIZE + 3))
    for done in stream.shards[:2]:
        Path(done).write_bytes(b"gone")
    resumed = WebDataset(shards)
    resumed.load_state_dict(stream.state_dict())
    assert labels(resumed) == want


def test_another_epoch_drops_the_position(shards: Path) -> None:
    stream = WebDataset(shards, shuffle=4)
    iterator = iter(stream)
    labels(islice(iterator, 11))
    other = WebDataset(shards, shuffle=4)
    other.load_state_dict(stream.state_dict())
    other.set_epoch(1)
    stream.set_epoch(1)
    assert labels(other) == labels(stream)


def test_a_position_for_other_shards_or_ranks_raises(shards: Path) -> None:
    state = WebDataset(shards).state_dict()
    with pytest.raises(DataError, match=r"the 5 shards .* received 1"):
        WebDataset(shards / "x-000.tar").load_state_dict(state)
    other = WebDataset(shards, num_replicas=2, rank=0)
    other.load_state_dict(state)
    with pytest.raises(DataError, match=r"saved with, \(1, 0, 1, 0\), received \(2, 0, 1, 0\)"):
        next(iter(other))
    stream = WebDataset(shards, shuffle=4)
    next(iter(stream))
    state = stream.state_dict()
    write_tar(Path(stream.shards[state["buffer"][0][0]]), [("long-name.png" * 9, png(0)), *sample_files(0)])
    changed = WebDataset(shards, shuffle=4)
    changed.load_state_dict(state)
    with pytest.raises(DataError, match=r"as it was, received one that has changed|damaged"):
        next(iter(changed))


# -- ranks and workers -------------------------------------------------------------------------------------


@pytest.mark.parametrize("shuffle", [0, 6])
@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_ranks_share_the_shards(shards: Path, ranks: int, shuffle: int) -> None:
    shares = []
    for rank in range(ranks):
        stream = WebDataset(shards, shuffle=shuffle, num_replicas=ranks, rank=rank)
        stream.set_epoch(1)
        shares.append(labels(stream))
        assert {label // SIZE for label in shares[-1]}.isdisjoint(x // SIZE for share in shares[:-1] for x in share)
    assert sorted(label for share in shares for label in share) == list(range(SHARDS * SIZE))


@pytest.mark.parametrize("ranks", [2, 7])  # the latter are more than there are shards
def test_ranks_that_are_handed_parts_of_batches_read_all_shards(shards: Path, ranks: int) -> None:
    whole = stream_source(MappedStream(WebDataset(shards, shuffle=4)), 6, seed=1, collate=None, num_workers=0)
    alone = [batch.data[1].tolist() for batch in whole.batches(0)]
    parts = []
    for rank in range(ranks):
        stream = MappedStream(WebDataset(shards, shuffle=4, num_replicas=ranks, rank=rank))
        source = stream_source(stream, 6, seed=1, collate=None, num_workers=0, shard=Shard(rank, ranks))
        parts.append([(batch.data[1].tolist() if batch.size else [], batch.consumed) for batch in source.batches(0)])
    together = [[label for part, _ in batch for label in part] for batch in zip(*parts, strict=True)]
    assert together == alone
    assert sum(consumed for _, consumed in parts[0]) == SHARDS * SIZE


def test_more_ranks_than_shards(shards: Path) -> None:
    with pytest.raises(DataError, match="at least 6 shards for 6 ranks, received 5"):
        next(iter(WebDataset(shards, num_replicas=6, rank=0)))


def test_ranks_are_those_of_the_process_group_in_other_processes_too(shards: Path) -> None:
    from torch.testing._internal.distributed.fake_pg import FakeStore

    stream = WebDataset(shards)  # made before the group, as may happen
    shuffled = stream.shuffled(1)
    torch.distributed.init_process_group("fake", rank=1, world_size=3, store=FakeStore())
    try:
        assert labels(stream) == [*range(8, 16), *range(32, 40)]
        assert len(labels(shuffled)) == 16
        sent = pickle.dumps(stream)
    finally:
        torch.distributed.destroy_process_group()
    assert labels(pickle.loads(sent)) == [*range(8, 16), *range(32, 40)]
    assert labels(stream) == list(range(40))


def note_worker(image: Any) -> Any:
    """A random transform, and one that tells its worker."""
    return torch.tensor([[[torch.utils.data.get_worker_info() is not None, random.random(), np.random.rand()]]])


@pytest.mark.parametrize("workers", [1, 2, 6])
@pytest.mark.filterwarnings("ignore:This DataLoader will create")
def test_workers_share_the_shards_and_random_numbers_stay_with_the_sample(shards: Path, workers: int) -> None:
    stream = MappedStream(WebDataset(shards, shuffle=4), note_worker, seed=5)
    alone = {label: image for image, label in stream}
    loader = DataLoader(stream, batch_size=None, num_workers=workers)
    shared = [(image, label) for image, label in loader]
    assert sorted(label for _, label in shared) == list(range(SHARDS * SIZE))
    for image, label in shared:
        assert image[0, 0, 0] == 1
        assert torch.equal(image[..., 1:], alone[label][..., 1:])
    assert len({tuple(image.flatten().tolist()) for image in alone.values()}) == SHARDS * SIZE


def test_streams_can_be_sent_to_processes(shards: Path) -> None:
    stream = WebDataset(shards, shuffle=3)
    want = labels(stream)
    assert labels(pickle.loads(pickle.dumps(stream))) == want


# -- damage ------------------------------------------------------------------------------------------------


def test_a_corrupt_image_is_named_by_shard_and_key(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    files = [*sample_files(0), ("a/bad.png", png(1)[:60]), ("a/bad.cls", b"1"), *sample_files(2)]
    path = write_tar(tmp_path / "x.tar", files)
    with pytest.raises(DataError, match=r"sample 'a/bad' of shard '.*x.tar', which cannot be decoded"):
        list(WebDataset(path))
    with caplog.at_level(logging.WARNING, logger="trainformer"):
        assert labels(WebDataset(path, skip_bad=True)) == [0, 2]
    assert "skipping a sample" in caplog.text
    assert "a/bad" in caplog.text


@pytest.mark.parametrize(
    ("files", "options", "message"),
    [
        ([("a.png", png(0)), ("a.cls", b"bee")], {}, r"label of sample 'a' .*received 'bee'.*classes=\["),
        ([("a.png", png(0)), ("a.cls", b"wasp")], {"classes": ["bee"]}, "one of the 1 classes .*received 'wasp'"),
        ([("a.png", png(0)), ("a.json", b"{")], {}, r"label in sample 'a' of shard .*received an unreadable file"),
        ([("a.png", png(0)), ("a.json", b"{}")], {"label_key": "json:x"}, "the field 'x' in sample 'a'"),
        ([("a.png", png(0)), ("a.json", b"[1]")], {}, r"a name as the label of sample 'a' .*received \[1\]"),
        ([("a.png", png(0)), ("a.json", b"-1")], {}, "received -1"),
        ([("a.png", png(0)), ("a.png", png(0))], {}, "one file 'a.png' per sample"),
        ([("a.txt", b"x"), ("b.npy", b"y")], {}, r"Expected images in .*files ending in: npy, txt. Pass image_key"),
        ([], {}, "received no files|is none"),
    ],
)
def test_invalid_samples(tmp_path: Path, files: Any, options: Any, message: str) -> None:
    path = write_tar(tmp_path / "x.tar", files)
    with pytest.raises(DataError, match=message):
        list(WebDataset(path, **options))


def test_damaged_shards_are_errors_and_never_a_silent_end(shards: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = shards / "x-000.tar"
    whole = path.read_bytes()
    with tarfile.open(path) as tar:
        third = tar.getmembers()[4]
    path.write_bytes(whole[: third.offset] + b"\x01garbage" * 64 + whole[third.offset + 512 :])
    with pytest.raises(DataError, match=rf"x-000.tar', which is damaged at byte {third.offset}"):
        list(WebDataset(path))
    path.write_bytes(whole[: third.offset_data + 20])
    with pytest.raises(
        DataError, match=r"bytes of '0002.png' in shard '.*x-000.tar', received 20: the shard is truncated"
    ):
        list(WebDataset(path))
    path.write_bytes(whole[: third.offset])
    with caplog.at_level(logging.WARNING, logger="trainformer"):
        assert labels(WebDataset(path)) == [0, 1]
    assert "may be truncated" in caplog.text
    path.write_bytes(b"no tar file at all" * 100)
    with pytest.raises(DataError, match=r"Expected a tar file, received '.*x-000.tar'"):
        list(WebDataset(path))
    zipped = write_shards(shards / "zipped", [3], ".tar.gz", "w:gz") / "x-000.tar.gz"
    zipped.write_bytes(zipped.read_bytes()[:200])
    with pytest.raises(DataError, match=r"x-000.tar.gz"):
        list(WebDataset(zipped))


# -- which shards ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "want"),
    [
        ("a.tar", ["a.tar"]),
        ("a-{8..11}.tar", ["a-8.tar", "a-9.tar", "a-10.tar", "a-11.tar"]),
        ("a-{008..010}.tar", ["a-008.tar", "a-009.tar", "a-010.tar"]),
        ("{x,y}/{0..1}.tar", ["x/0.tar", "x/1.tar", "y/0.tar", "y/1.tar"]),
        ("a-{x}.tar", ["a-{x}.tar"]),
    ],
)
def test_braces(pattern: str, want: list[str]) -> None:
    assert expand_braces(pattern) == want


def test_paths_patterns_and_folders(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    every = [str(shards / f"x-{number:03}.tar") for number in range(SHARDS)]
    assert find_shards(shards) == find_shards(shards / "*.tar") == every
    assert find_shards(f"{shards}/x-{{000..004}}.tar") == every
    assert find_shards([shards / "x-004.tar", f"{shards}/x-00[01].tar"]) == [every[4], *every[:2]]
    monkeypatch.setenv("HOME", str(shards))
    assert find_shards("~/x-001.tar") == [every[1]]
    assert is_shard_path(shards)
    assert not is_shard_path(shards.parent)


@pytest.mark.parametrize(
    ("urls", "message"),
    [
        ("x-{000..007}.tar", r"3 do not exist: 'x-005.tar', 'x-006.tar', 'x-007.tar'\."),
        ("y-*.tar", r"Expected tar files, received 'y-\*.tar'"),
        ("x.txt", r"tar files \(.tar, .*received 'x.txt'"),
        ("https://example.org/x.tar", "local tar files, received 'https.*Download"),
        ("pipe:cat x.tar", "local tar files"),
    ],
)
def test_missing_shards(shards: Path, monkeypatch: pytest.MonkeyPatch, urls: str, message: str) -> None:
    monkeypatch.chdir(shards)
    (shards / "x.txt").touch()
    with pytest.raises(DataError, match=message):
        WebDataset(urls)


# -- what is known of a stream -----------------------------------------------------------------------------


def test_a_stream_knows_only_its_arguments(shards: Path) -> None:
    stream = WebDataset(shards)
    assert not hasattr(stream, "classes")
    with pytest.raises(TypeError, match="unknown"):
        len(stream)
    assert extract_info(stream).num_samples == 0
    told = WebDataset(shards, classes=["a", "b"], length=40)
    info = extract_info(told)
    assert (info.num_samples, info.num_classes, info.class_names) == (40, 2, ["a", "b"])
    assert len(WebDataset(shards, length=40, num_replicas=3, rank=1)) == 14


def test_scanning_counts_without_decoding(tmp_path: Path) -> None:
    names = ["bee", "ant", "bee", "cat", "bee"]
    for shard, part in enumerate([names[:2], names[2:]]):
        files = [(f"{i}.png", png(0) if shard + i == 0 else b"no image") for i in range(len(part))]
        labelled = [
            pair
            for file, name in zip(files, part, strict=True)
            for pair in (file, (file[0][:-3] + "cls", name.encode()))
        ]
        write_tar(tmp_path / f"{shard}.tar", labelled)
    info = extract_info(load_images(tmp_path))
    assert (info.num_samples, info.num_classes, info.class_names) == (5, 3, ["ant", "bee", "cat"])
    assert (info.class_counts, info.input_shape) == ([1, 3, 1], (3, 4, 6))


def test_classes_may_be_called_digits_and_letters(tmp_path: Path) -> None:
    for shard, name in enumerate(["7", "a", "10", "7"]):
        write_tar(tmp_path / f"{shard}.tar", [("x.png", png(0)), ("x.cls", name.encode())])
    stream = WebDataset(tmp_path).scan()
    assert stream.classes == ["10", "7", "a"]
    assert labels(stream) == [1, 2, 0, 1]


def test_validation_shards_are_remapped(tmp_path: Path) -> None:
    for shard, name in enumerate(["dog", "cat", "dog"]):
        write_tar(tmp_path / f"{shard}.tar", [("x.png", png(0)), ("x.cls", name.encode())])
    stream = load_images(tmp_path)
    aligned = align_classes(stream, ["ant", "cat", "dog"])
    assert labels(stream) == [1, 0, 1]
    assert labels(aligned) == [2, 1, 2]
    info = extract_info(aligned)
    assert (info.num_classes, info.class_counts, info.num_samples) == (3, [0, 1, 2], 3)


@pytest.mark.parametrize(("name", "content"), [("json", b"[1]"), ("json", b"1" * 20)])
def test_scanning_names_the_sample_with_a_bad_label(tmp_path: Path, name: str, content: bytes) -> None:
    files = [*sample_files(0), ("bad.png", png(1)), (f"bad.{name}", content), *sample_files(2)]
    path = write_tar(tmp_path / "x.tar", files)
    with pytest.raises(DataError, match=r"label of sample 'bad' of shard '.*x.tar', received .*1"):
        WebDataset(path).scan()
    assert len(WebDataset(path, skip_bad=True).scan()) == 2


def test_a_label_of_thousands_of_digits_is_no_index(tmp_path: Path) -> None:
    path = write_tar(tmp_path / "x.tar", [("bad.png", png(1)), ("bad.cls", b"1" * 5000)])
    with pytest.raises(DataError, match="known class names, for the label of sample 'bad'"):
        list(WebDataset(path))


def test_scanning_numbers(shards: Path) -> None:
    stream = WebDataset(shards).scan()
    assert (len(stream), stream.num_classes, stream.class_counts) == (40, 40, [1] * 40)
    assert not hasattr(stream, "classes")
    assert labels(stream) == list(range(40))


def test_loading_by_name(shards: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(shards)
    for name in (shards, "x-{000..004}.tar", "x-*.tar"):
        stream = load_images(name)
        assert isinstance(stream, WebDataset)
        assert len(stream) == 40
    assert [label for _, label in load_images("x-000.tar", labels=False)] == [None] * SIZE
    assert load_images("x-000.tar", channels=1).first()[0].mode == "L"
    monkeypatch.setattr("trainformer.data.image._MAX_SCANNED_BYTES", 100)
    assert load_images(shards).length is None
    (shards / "cat").mkdir()
    Image.fromarray(pixels(0)).save(shards / "cat" / "1.png")  # archives beside class folders are no shards
    assert load_images(shards).classes == ["cat"]


# -- transforms for streams --------------------------------------------------------------------------------


class Numbers(IterableDataset):
    """A stream of somebody else's, without a state."""

    classes = ("a", "b")

    def __init__(self) -> None:
        self.epochs: list[int] = []

    def set_epoch(self, epoch: int) -> None:
        self.epochs.append(epoch)

    def __iter__(self) -> Any:
        return ((torch.full((1, 2, 2), number, dtype=torch.uint8), number) for number in range(9))


def noisy(image: Any) -> Any:
    return image.float() + torch.rand(1) + random.random() + np.random.rand()


def test_random_transforms_belong_to_seed_epoch_and_sample() -> None:
    def values(seed: int, epoch: int) -> list[float]:
        stream = MappedStream(Numbers(), noisy, seed=seed)
        stream.set_epoch(epoch)
        return [float(image[0, 0, 0]) for image, _ in stream]

    before = random.getstate(), torch.get_rng_state()
    first = values(0, 0)
    assert random.getstate() == before[0]
    assert torch.equal(torch.get_rng_state(), before[1])
    random.seed(3)
    torch.manual_seed(3)
    assert values(0, 0) == first
    assert len({tuple(values(seed, epoch)) for seed in (0, 7) for epoch in (0, 1)}) == 4
    assert len({value % 1 for value in first}) == 9


@pytest.mark.parametrize("after", [0, 4, 9])
@pytest.mark.parametrize("make", [Numbers, lambda: WebDataset("shards", shuffle=6, seed=1)], ids=["plain", "tar"])
def test_mapped_streams_resume_exactly(shards: Path, make: Any, after: int) -> None:
    transform = None if make is not Numbers else noisy
    stream = MappedStream(make(), transform, seed=2)
    stream.set_epoch(1)
    whole = list(stream)
    iterator = iter(stream)
    list(islice(iterator, after))
    state = stream.state_dict()
    resumed = MappedStream(make(), transform, seed=2)
    resumed.load_state_dict(state)
    resumed.set_epoch(1)
    rest = list(resumed)
    assert len(rest) == len(whole) - after
    for (image, label), (want, target) in zip(rest, whole[after:], strict=True):
        assert label == target
        assert torch.equal(image, want)
    assert len(list(resumed)) == len(whole)


def test_attributes_of_the_wrapped_stream(shards: Path) -> None:
    stream = MappedStream(Numbers(), channels=3)
    stream.set_epoch(4)
    assert stream.source.epochs == [4]
    assert stream.classes == ["a", "b"]
    assert stream.num_classes == 2
    assert next(iter(stream))[0].shape == (3, 2, 2)
    with pytest.raises(TypeError):
        len(stream)
    assert not hasattr(MappedStream(WebDataset(shards)), "classes")
    assert len(MappedStream(WebDataset(shards).scan())) == 40
    unlabelled = MappedStream([torch.ones(1, 2, 2), torch.zeros(1, 2, 2)])
    assert [image.shape for image in unlabelled] == [(1, 2, 2)] * 2


def test_shuffling_is_done_by_the_stream(shards: Path) -> None:
    mapped = MappedStream(WebDataset(shards), shuffle=6, seed=3)
    assert labels(mapped) == labels(WebDataset(shards, shuffle=6, seed=3))
    assert labels(WebDataset(shards)) == list(range(40))


def test_hf_streams_are_mapped() -> None:
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.ClassLabel(names=["x", "y"])})
    rows = {"image": [Image.fromarray(pixels(i)) for i in range(7)], "label": [0, 1, 1, 0, 1, 0, 0]}
    source = datasets.Dataset.from_dict(rows, features=features).to_iterable_dataset(num_shards=2)
    stream = MappedStream(source, channels=3)
    assert stream.classes == ["x", "y"]
    whole = list(stream)
    assert [label for _, label in whole] == rows["label"]
    assert np.array_equal(whole[3][0].permute(1, 2, 0).numpy(), pixels(3))
    iterator = iter(stream)
    list(islice(iterator, 3))
    resumed = MappedStream(source, channels=3)
    resumed.load_state_dict(stream.state_dict())
    assert [label for _, label in resumed] == rows["label"][3:]
    shuffled = MappedStream(source, shuffle=4, seed=1)
    assert sorted(label for _, label in shuffled) == sorted(rows["label"])


def test_hf_streams_with_a_shuffle_buffer_resume_exactly() -> None:
    """Their own state lacks the buffer, so the stream is read again up to the position."""
    datasets = pytest.importorskip("datasets")
    features = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    rows = {"image": [Image.fromarray(pixels(i)) for i in range(12)], "label": list(range(12))}
    source = datasets.Dataset.from_dict(rows, features=features).to_iterable_dataset().shuffle(seed=4, buffer_size=5)

    def make() -> LoaderSource:
        return stream_source(source, 3, seed=0, collate=lambda rows: [row["label"] for row in rows], num_workers=0)

    whole = [batch.data for batch in make().batches(0)]
    assert sorted(label for batch in whole for label in batch) == rows["label"]
    assert whole[0] != [0, 1, 2]
    assert not hasattr(make(), "state_dict")
    assert [batch.data for batch in make().batches(0, 2, 6)] == whole[2:]

    mapped = MappedStream(source)
    in_order = [label for _, label in mapped]
    list(islice(iter(mapped), 5))
    resumed = MappedStream(source)
    resumed.load_state_dict(mapped.state_dict())
    assert [label for _, label in resumed] == in_order[5:]


# -- under the engine's sources ----------------------------------------------------------------------------


class Batches:
    """A loader over a stream, that says where the stream is: as an engine may make one."""

    def __init__(self, stream: MappedStream) -> None:
        self.dataset = stream
        self.state_dict, self.load_state_dict = stream.state_dict, stream.load_state_dict

    def __iter__(self) -> Any:
        return iter(DataLoader(self.dataset, batch_size=3))


def batch_labels(batches: Any) -> list[list[int]]:
    return [batch.data[1].tolist() for batch in batches]


def test_epochs_are_announced_and_positions_found_again(shards: Path) -> None:
    def make() -> MappedStream:
        return MappedStream(WebDataset(shards, shuffle=5))

    plain = stream_source(make(), 3, seed=0, collate=None, num_workers=0)
    epochs = [batch_labels(plain.batches(epoch)) for epoch in (0, 1)]
    assert epochs[0] != epochs[1]
    assert sorted(label for batch in epochs[1] for label in batch) == list(range(40))
    assert isinstance(plain, LoaderSource)
    assert batch_labels(plain.batches(1, batch=4, position=12)) == epochs[1][4:]

    source = StatefulLoaderSource(Batches(make()))
    head = batch_labels(islice(source.batches(1), 4))
    state = source.state_dict()
    resumed = StatefulLoaderSource(Batches(make()))
    resumed.load_state_dict(state)
    assert head + batch_labels(resumed.batches(1, batch=4, position=12)) == epochs[1]
    # At the end of an epoch: the next one begins as usual.
    list(source.batches(0))
    resumed.load_state_dict(source.state_dict())
    assert batch_labels(resumed.batches(1)) == epochs[1]


def test_members_are_never_written_or_followed(tmp_path: Path) -> None:
    """Absolute paths and `..` only name samples; links and devices are skipped."""
    folder = tmp_path / "data"
    folder.mkdir()
    (tmp_path / "secret.png").write_bytes(b"not an image")
    picture = sample_files(0)
    with tarfile.open(folder / "x.tar", "w") as tar:
        for name in ("/absolute/1", "../../up/2", "plain/3"):
            for ending, data in ((key.partition(".")[2], data) for key, data in picture):
                member = tarfile.TarInfo(f"{name}.{ending}")
                member.size = len(data)
                tar.addfile(member, io.BytesIO(data))
        for number, kind in enumerate((tarfile.SYMTYPE, tarfile.LNKTYPE, tarfile.CHRTYPE, tarfile.FIFOTYPE)):
            member = tarfile.TarInfo(f"link{number}.png")
            member.type, member.linkname = kind, "../secret.png"
            tar.addfile(member)
    before = sorted(tmp_path.rglob("*"))
    assert len(list(WebDataset(folder / "x.tar"))) == 3
    assert sorted(tmp_path.rglob("*")) == before
    assert not Path("/absolute").exists()


def test_a_claimed_size_is_not_allocated(tmp_path: Path) -> None:
    content = bytearray(write_shards(tmp_path, [1]).joinpath("x-000.tar").read_bytes())
    content[124:136] = b"\x80" + (1 << 40).to_bytes(11, "big")
    content[148:156] = b" " * 8
    content[148:156] = b"%06o\0 " % sum(content[:512])
    (tmp_path / "huge.tar").write_bytes(content)
    with pytest.raises(DataError, match="at most 1 GiB"):
        list(WebDataset(tmp_path / "huge.tar"))


def test_names_that_are_not_utf8_are_read(tmp_path: Path) -> None:
    files = [(name.replace("0000", "\udceb"), data) for name, data in sample_files(0)]
    assert labels(WebDataset(write_tar(tmp_path / "x.tar", files, form=tarfile.GNU_FORMAT))) == [0]


@pytest.mark.parametrize("header", [{"size": "x"}, {"GNU.sparse.map": "\0"}, {"size": "9" * 30}])
def test_a_hostile_extended_header_is_damage(tmp_path: Path, header: dict[str, str]) -> None:
    member = tarfile.TarInfo("0.png")
    member.pax_headers = header
    with tarfile.open(tmp_path / "x.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.addfile(member)
    with pytest.raises(DataError):
        list(WebDataset(tmp_path / "x.tar"))
