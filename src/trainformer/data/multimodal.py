"""Images with text: captions, conversations about images, questions with answers.

`ImageTextDataset` finds the records, knows the common names of their fields, and yields one standard item for tasks.
Records are parsed and images decoded when a sample is read; of a JSON Lines file only line offsets are in memory.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch.utils.data import Dataset

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.data.folder import decode_image, read_image
from trainformer.data.hub import is_hf_saved
from trainformer.data.lists import IMAGE_COLUMNS
from trainformer.data.order import sample_key
from trainformer.data.pixels import is_pil, with_channels
from trainformer.data.tar_shards import RawSample, is_shard_path
from trainformer.data.text.files import TextFile, content_suffix
from trainformer.data.text.schemas import Schema, conversation, expected_value, require_text
from trainformer.data.text.sources import load_text
from trainformer.data.text.tables import JSON, MAX_PARSED_BYTES, RecordList, location_of, normalize_index
from trainformer.data.webdataset import WebDataset
from trainformer.utils.files import decode_json

if TYPE_CHECKING:
    from PIL import Image

IMAGE_MARK = "<image>"  # the placeholder of an image in a text, as in LLaVA
TEXT_COLUMNS = ("text", "caption", "captions", "texts", "sentence", "sentences", "title", "alt_text", "description")
_MESSAGES = ("messages", "conversations", "conversation")
_PROMPT_KEYS = (
    *(("prompt", "completion"), ("prompt", "response"), ("prompt", "answer"), ("question", "answer")),
    *(("query", "response"), ("query", "answer"), ("instruction", "output"), ("instruction", "response")),
)
_CAPTION_FILES = (
    *("captions.json", "captions.jsonl", "captions.csv", "captions.tsv"),
    *("metadata.jsonl", "metadata.csv", "metadata.parquet"),
)
_CHECKED = 100  # records checked when a dataset is opened: a millisecond

Opener = Callable[[Any], Any]


class ImageTextDataset(Dataset):
    """Images with text: ``{"image": PIL image (RGB), "text": str}``, from the common file formats:

    - `.jsonl`, `.json` (a list of records), `.csv`, `.tsv`, `.parquet`: records with the path of an image under
      `image_key`, relative to `image_dir` (the file's folder by default), and a text under `text_key`. JSON Lines are
      read lazily, so 10 GB are fine; JSON and CSV files are limited to 1 GB.
    - a `.json` file that maps files to captions, ``{"1.jpg": "a cat"}``, or COCO captions;
    - a folder of images with `captions.json` (any of these formats), `captions.jsonl`, `captions.csv`, or with
      `metadata.jsonl` or `metadata.csv` and the column `file_name`, as in HF's "imagefolder";
    - tar shards (see `WebDataset`) with an image and a `.txt` or `.json` per sample: a stream without a length;
    - a folder written by HF's `save_to_disk`, a dataset of the hub as `"hf:name:split"`, or a list of records.

    If the default keys are missing, other common names (`caption`, `file_name`, ...) are tried. A text may be a list of
    captions: the item then has all of them in `captions`, and a random one, different in every epoch, in `text`. (The
    loader seeds Python's generator by seed, epoch and sample.)

    For chat models, records have `messages` (or LLaVA's `conversations`), or `prompt` and `completion` (or `question`
    and `answer`) instead of `text`. Messages are in the format of transformers: ``<image>`` in a text becomes a part
    ``{"type": "image"}``. Several images are a list in `images`. Errors name file and line.
    """

    def __new__(cls, path: Any = "", *args: Any, **options: Any) -> Any:
        """Shards become an `ImageTextStream`. (Copies and worker processes call this without a path.)"""
        if isinstance(path, str | Path) and is_shard_path(path) and _caption_file(path) is None:
            return ImageTextStream(path, *args, **options)
        return super().__new__(cls)

    def __init__(
        self,
        path: str | Path | Sequence[Mapping[str, Any]],
        image_key: str = "image",
        text_key: str = "text",
        image_dir: str | Path | None = None,
    ) -> None:
        self.path = path
        self.image_key = image_key
        self.text_key = text_key
        self._records, folder = _open_records(path, image_key, text_key)
        self.image_dir = Path(folder if image_dir is None else image_dir).expanduser()
        if not len(self._records):
            raise DataError(f"Expected at least one record in '{path}', received none.")
        self._reader = RecordReader(image_key, text_key)
        # Check the first records without decoding images; HF datasets, without `location`, would decode one for each.
        count = _CHECKED if hasattr(self._records, "location") else 1
        items = [self._converted(index, self._find) for index in range(min(len(self), count))]
        self.has_several_captions = any("captions" in item for item in items)

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = normalize_index(index, len(self))
        item = self._converted(index, self._open)
        if "captions" in item:
            item["text"] = random.choice(item["captions"])
        return item

    def without_decoding(self, index: int) -> dict[str, Any]:
        """The item with image paths instead of images where possible: to scan many items."""
        return self._converted(normalize_index(index, len(self)), self._find)

    def location(self, index: int) -> str:
        """Where a record is, for error messages: file and line if known."""
        return location_of(self._records, index)

    def _converted(self, index: int, opener: Opener) -> dict[str, Any]:
        record = self._records[index]
        try:
            return self._reader.item(record, opener)
        except DataError as error:
            raise DataError(f"{self.location(index)}: {error}") from error.__cause__

    def _open(self, image: Any) -> Any:
        """The image of a record: a path, an image, or encoded bytes as in HF datasets."""
        if is_pil(image):
            return with_channels(image, 3)
        if isinstance(image, Mapping) and isinstance(image.get("bytes"), bytes):
            return decode_image(image["bytes"], 3, f"the image '{image.get('path') or '(bytes)'}'")
        if isinstance(image, bytes):
            return decode_image(image, 3, "the image in the record")
        return read_image(self._find(image), 3)

    def _find(self, image: Any) -> Any:
        if isinstance(image, Mapping) and isinstance(image.get("path"), str) and not image.get("bytes"):
            image = image["path"]
        if isinstance(image, Mapping | bytes) or is_pil(image):
            return image
        name = require_text(image, self.image_key)
        if "://" in name:
            raise DataError(expected("the path of a local file", name, "Download the images first."))
        path = os.path.join(self.image_dir, os.path.expanduser(name))
        if not os.path.isfile(path):
            do = f"Paths are relative to image_dir, which is '{self.image_dir}'."
            raise DataError(f"Expected an image file, received '{path}', which does not exist. {do}")
        return path


class ImageTextStream(WebDataset):
    """`ImageTextDataset` for tar shards: a stream of items, with the order and position of `WebDataset`.

    A sample is an image with a `.txt` (its caption) or a `.json` (a record, as in a JSON Lines file). `options` are
    those of `WebDataset`: `shuffle`, `seed`, `length`, `skip_bad`. Seed, epoch and sample decide which of several
    captions is used.
    """

    def __init__(
        self,
        urls: Any,
        image_key: str = "image",
        text_key: str = "text",
        image_dir: str | Path | None = None,
        **options: Any,
    ) -> None:
        if image_dir is not None:
            raise BadArgument(expected("no image_dir with tar shards, which contain their images", str(image_dir)))
        super().__init__(urls, **options | {"label_key": ("txt", "text", "caption", "json"), "channels": 3})
        self._reader = RecordReader(image_key, text_key)
        self.has_several_captions = "captions" in self.first()

    def scan(self) -> ImageTextStream:
        """Count the samples by reading all headers."""
        self.length = sum(1 for shard in range(len(self.shards)) for _ in self._samples(shard, 0, set()))
        return self

    def _with_ids(self, cursor: Any) -> Iterator[tuple[int, Any]]:
        items: Iterator[tuple[int, Any]] = super()._with_ids(cursor)
        for identity, item in items:
            if "captions" in item:
                key = sample_key(self.seed, self.epoch, identity)
                item["text"] = item["captions"][key % len(item["captions"])]
            yield identity, item

    def _item(self, image: Image.Image, raw: RawSample) -> dict[str, Any]:
        try:
            return self._reader.item({**self._record(raw), self._reader.image_key: image}, lambda found: found)
        except DataError as error:
            raise DataError(f"{self._where(raw)}: {error}") from error.__cause__

    def _record(self, raw: RawSample) -> dict[str, Any]:
        """The fields of the JSON file and the text file; the text file wins."""
        record: dict[str, Any] = {}
        for ending in (ending for ending in reversed(self.label_keys) if ending in raw.files):
            try:
                text = raw.files[ending].decode("utf-8")
                value = decode_json(text) if ending == "json" else text.strip()
            except ValueError as error:
                raise DataError(f"Expected UTF-8 text or JSON in '.{ending}', received: {error}.") from error
            record |= value if isinstance(value, Mapping) else {self._reader.text_key: value}
        return record


@dataclass(frozen=True)
class RecordReader:
    """Converts records to items. The caller passes the function that opens an image."""

    image_key: str
    text_key: str

    def item(self, record: Any, opener: Opener) -> dict[str, Any]:
        """The checked item of a record."""
        if not isinstance(record, Mapping):
            raise DataError(expected_value("a record with an image and a text", record))
        images = self._images(record)
        text = self._text_fields(record, images)
        contents = [message["content"] for message in text.get("messages", [])]
        marks = sum(part["type"] == "image" for content in contents if isinstance(content, list) for part in content)
        marks += str(text.get("prompt", "")).count(IMAGE_MARK)
        if marks and marks != len(images):
            raise DataError(expected(f"{marks} images, one for each {IMAGE_MARK}", len(images)))
        if not images and "text" in text:
            raise DataError(self._missing(record, "image", self.image_key, IMAGE_COLUMNS))
        opened = [opener(image) for image in images]
        one = len(opened) == 1 and not isinstance(record.get("images"), list)
        return {"image": opened[0], **text} if one else {"images": opened, **text}

    def _images(self, record: Mapping[str, Any]) -> list[Any]:
        key = _key(record, self.image_key, "image", IMAGE_COLUMNS)
        value = None if key is None else record[key]
        return list(value) if isinstance(value, list) else [] if value is None or value == "" else [value]

    def _text_fields(self, record: Mapping[str, Any], images: list[Any]) -> dict[str, Any]:
        """Text, messages or prompt and completion; images named in messages are added to `images`."""
        if not (self.text_key != "text" and self.text_key in record):  # a key chosen by the user wins
            for key in _MESSAGES:
                if isinstance(record.get(key), list):
                    return {"messages": _messages(record[key], images)}
            for question, answer in _PROMPT_KEYS:
                if question in record and answer in record:
                    prompt, completion = require_text(record[question], question), require_text(record[answer], answer)
                    return {"prompt": prompt, "completion": completion}
        found = _key(record, self.text_key, "text", TEXT_COLUMNS)
        if found is None:
            raise DataError(self._missing(record, "text", self.text_key, TEXT_COLUMNS))
        if not isinstance(record[found], list):
            return {"text": require_text(record[found], found)}
        captions = [require_text(caption, found) for caption in record[found]]
        if not captions:
            raise DataError(f"Expected at least one caption in {found!r}, received an empty list.")
        return {"text": captions[0], "captions": captions}

    @staticmethod
    def _missing(record: Mapping[str, Any], what: str, wanted: str, common: Sequence[str]) -> str:
        others = f", or one of {', '.join(common[:4])}, ..." if wanted == common[0] else ""
        keys = ", ".join(map(repr, record)) or "no key"
        do = f"{did_you_mean(wanted, map(str, record))} Pass {what}_key='...'.".strip()
        return f"Expected the key {wanted!r}{others}, received a record with: {keys}. {do}"


def _key(record: Mapping[str, Any], wanted: str, default: str, common: Sequence[str]) -> str | None:
    """The wanted key, or if it is the default, the first common name in the record."""
    return next((name for name in (wanted, *(common if wanted == default else ())) if name in record), None)


# -- conversations -----------------------------------------------------------------------------------------


def _messages(raw: Sequence[Any], images: list[Any]) -> list[dict[str, Any]]:
    """Messages with standard roles. Contents are texts, or lists of parts if there are images.

    They are checked by `schemas.conversation` as texts with a mark for every image.
    """
    as_text = [_as_text(message, images) for message in raw]
    checked = conversation({"messages": as_text}, Schema("chat", {"messages": "messages"}))["messages"]
    return [{**message, "content": image_parts(message["content"])} for message in checked]


def _as_text(message: Any, images: list[Any]) -> Any:
    content = message.get("content") if isinstance(message, Mapping) else None
    if not isinstance(content, list):
        return message
    pieces = []
    for part in content:
        if isinstance(part, Mapping) and part.get("type") == "image":
            pieces.append(IMAGE_MARK)
            named = next((part[key] for key in ("image", "path", "url") if part.get(key) is not None), None)
            if named is not None:
                images.append(named)
        elif isinstance(part, Mapping) and part.get("type") == "text":
            pieces.append(require_text(part.get("text"), "text"))
        else:
            raise DataError(expected_value("parts of the type text or image", part))
    return {**message, "content": "".join(pieces)}


def image_parts(content: str) -> str | list[dict[str, str]]:
    """A text with image marks as parts; without marks unchanged. LLaVA's line break around a mark is dropped."""
    if IMAGE_MARK not in content:
        return content
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(IMAGE_MARK)):
        if number:
            parts.append({"type": "image"})
        if text := text.strip("\n"):
            parts.append({"type": "text", "text": text})
    return parts


# -- files -------------------------------------------------------------------------------------------------


def has_captions(path: str | Path) -> bool:
    """Whether a path names images with text, by its file name.

    >>> has_captions("pairs.jsonl"), has_captions("nowhere")
    (True, False)
    """
    if _caption_file(path) is not None or is_shard_path(path):
        return True
    path = Path(path).expanduser()
    return content_suffix(path) != "" if not path.is_dir() else is_hf_saved(path)


def _caption_file(path: str | Path) -> Path | None:
    """The file with captions in a folder of images."""
    folder = Path(path).expanduser()
    if not str(path) or not folder.is_dir():
        return None
    return next((folder / name for name in _CAPTION_FILES if (folder / name).is_file()), None)


def _open_records(path: Any, image_key: str, text_key: str) -> tuple[Any, Path]:
    """The records, and the folder their image paths are relative to."""
    if not isinstance(path, str | Path):
        return RecordList(list(path)), Path()
    found = _caption_file(path)
    file = Path(path).expanduser() if found is None else found
    if found is None and file.is_dir() and not is_hf_saved(file):
        content = ", ".join(sorted(name for name in islice(os.listdir(file), 5))) or "nothing"
        raise DataError(
            f"Expected a folder with one of {', '.join(_CAPTION_FILES)}, received '{file}', which contains {content}."
        )
    if content_suffix(file) in JSON and file.is_file():
        records = _parse_mapping(TextFile(file), image_key, text_key)
        if records is not None:
            return records, file.parent
    # Names such as "hf:name:split" are not paths.
    records = load_text(file if file.exists() else path)
    return records, file if file.is_dir() else file.parent


def _parse_mapping(file: TextFile, image_key: str, text_key: str) -> RecordList | None:
    """The records of a JSON file that maps files to captions, or of COCO captions; None for other files."""
    head = file.read(file.begin, min(file.size, file.begin + 4096)).lstrip()
    if not head.startswith(b"{") or file.size > MAX_PARSED_BYTES or _is_json_lines(head):
        return None
    try:
        content = decode_json(file.decode(file.read(file.begin, file.size), file.begin))
    except json.JSONDecodeError:
        return None  # JSON Lines, or an error that is reported with its line later
    if isinstance(content.get("images"), list) and isinstance(content.get("annotations"), list):
        return RecordList(_coco_records(content, image_key, text_key), file)
    is_record = image_key in content or text_key in content or any(key in content for key in _MESSAGES)
    captions = [caption for value in content.values() for caption in (value if isinstance(value, list) else [value])]
    if is_record or not all(isinstance(caption, str) for caption in captions):
        return None
    return RecordList([{image_key: name, text_key: caption} for name, caption in content.items()], file)


def _is_json_lines(head: bytes) -> bool:
    """Whether a .json file contains JSON Lines: the first line is an object, and another line follows."""
    first, _, rest = head.partition(b"\n")
    try:
        return bool(rest.strip()) and isinstance(decode_json(first), Mapping)
    except ValueError:
        return False


def _coco_records(content: Mapping[str, Any], image_key: str, text_key: str) -> list[dict[str, Any]]:
    """The images with captions, each with all of its captions."""
    captions: dict[Any, list[str]] = {}
    try:
        for note in content["annotations"]:
            captions.setdefault(note["image_id"], []).append(note["caption"])
        named = [(image["file_name"], image["id"]) for image in content["images"]]
        return [{image_key: name, text_key: captions[number]} for name, number in named if number in captions]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"Expected images with 'id' and 'file_name', and annotations with 'image_id' and 'caption', as in COCO, "
            f"received some without {error}."
        ) from error
