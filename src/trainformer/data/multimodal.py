"""Images with text: captions, conversations about images, questions with answers.

Owns `ImageTextDataset`: which files hold the records, what their parts are called, and the one form of an item that
tasks read. Reading lines and tables is left to `text`, tar shards to `webdataset`, decoding images to `folder`. Of a
JSON Lines file only the places of its lines are in memory; a record is parsed and its image decoded when it is read.
"""

from __future__ import annotations

import json
import logging
import os
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from torch.utils.data import Dataset

from trainformer.core.errors import BadArgument, DataError, did_you_mean, expected
from trainformer.data.folder import decode_image, read_image
from trainformer.data.hub import is_saved_by_hf
from trainformer.data.lists import IMAGE_COLUMNS
from trainformer.data.order import sample_key
from trainformer.data.pixels import is_pil, with_channels
from trainformer.data.shards import RawSample, names_shards
from trainformer.data.text.files import TextFile, content_suffix
from trainformer.data.text.schemas import Form, conversation, expected_value, text_value
from trainformer.data.text.sources import load_text
from trainformer.data.text.tables import JSON, MOST_PARSED, RecordList, position, where
from trainformer.data.webdataset import WebDataset

logger = logging.getLogger("trainformer")

__all__ = ["IMAGE_MARK", "ImageTextDataset", "ImageTextStream", "holds_captions"]

IMAGE_MARK = "<image>"  # where an image belongs in a text, as LLaVA writes it
TEXT_COLUMNS = ("text", "caption", "captions", "texts", "sentence", "sentences", "title", "alt_text", "description")
_MESSAGES = ("messages", "conversations", "conversation")
_ASKED = (
    *(("prompt", "completion"), ("prompt", "response"), ("prompt", "answer"), ("question", "answer")),
    *(("query", "response"), ("query", "answer"), ("instruction", "output"), ("instruction", "response")),
)
_CAPTION_FILES = (
    *("captions.json", "captions.jsonl", "captions.csv", "captions.tsv"),
    *("metadata.jsonl", "metadata.csv", "metadata.parquet"),
)
_LOOKED_AT = 100  # records that are checked when a set is opened: a millisecond

Opener = Callable[[Any], Any]


class ImageTextDataset(Dataset):
    """Images with text: ``{"image": PIL image (RGB), "text": str}``, from nearly any file that people keep them in.

    - `.jsonl`, `.json` (a list of records), `.csv`, `.tsv`, `.parquet`: records with the path of an image under
      `image_key`, relative to `image_dir` (the file's folder by default), and a text under `text_key`. JSON Lines are
      read lazily, so a file of 10 GB may be used; JSON and CSV up to 1 GB.
    - a `.json` file that maps files to captions, ``{"1.jpg": "a cat"}``, or one of COCO's captions;
    - a folder of images with `captions.json` (any of these forms), `captions.jsonl`, `captions.csv`, or with
      `metadata.jsonl` or `metadata.csv` with the column `file_name`, as HF's "imagefolder" has them;
    - tar shards (see `WebDataset`) with an image and a `.txt` or `.json` per sample: a stream, not a set with a length;
    - a folder that HF `datasets` saved, a set of the hub as `"hf:name:split"`, or a list of records.

    Where the default keys are missing, usual other names (`caption`, `file_name`, ...) are looked for. A text may be a
    list of captions: the item then has all of them under `captions`, and one of them, drawn anew in every epoch, under
    `text`. (The loader seeds Python's generator by seed, epoch and sample.)

    Records for models that talk carry, instead of `text`, either `messages` (from `messages`, or LLaVA's
    `conversations`) or `prompt` and `completion` (also from `question` and `answer`). Messages are those of
    transformers: a mark ``<image>`` in a text becomes a part ``{"type": "image"}``. Several images are a list, under
    `images`. Errors name file and line.
    """

    def __new__(cls, path: Any = "", *args: Any, **options: Any) -> Any:
        """Shards are a stream, which is another class. (Copies and worker processes call this without a path.)"""
        if isinstance(path, str | Path) and names_shards(path) and _caption_file(path) is None:
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
        self._records, beside = _open_records(path, image_key, text_key)
        self.image_dir = Path(beside if image_dir is None else image_dir).expanduser()
        if not len(self._records):
            raise DataError(f"Expected at least one record in '{path}', received none.")
        self._reader = RecordReader(image_key, text_key)
        self.has_several_captions = self._look_at_first()

    def __len__(self) -> int:
        return len(self._records)

    def __getitem__(self, index: int) -> dict[str, Any]:
        index = position(index, len(self))
        item = self._converted(index, self._open)
        if "captions" in item:
            item["text"] = random.choice(item["captions"])
        return item

    def undecoded(self, index: int) -> dict[str, Any]:
        """The item with the paths of its images instead of the images, where they have one: to look through many."""
        return self._converted(position(index, len(self)), self._find)

    def where(self, index: int) -> str:
        """The place of a record, for messages: file and line where it is known."""
        return where(self._records, index)

    def _converted(self, index: int, opener: Opener) -> dict[str, Any]:
        record = self._records[index]
        try:
            return self._reader.item(record, opener)
        except DataError as error:
            raise DataError(f"{self.where(index)}: {error}") from error.__cause__

    def _look_at_first(self) -> bool:
        """Check the first records but for the images themselves; whether any of them has several captions."""
        # What says where a record stands is text; HF `datasets` would decode an image for each record.
        most = _LOOKED_AT if hasattr(self._records, "where") else 1
        items = [self._converted(index, self._find) for index in range(min(len(self), most))]
        return any("captions" in item for item in items)

    def _open(self, image: Any) -> Any:
        """The image that a record means: a path, an image, or the bytes of one as HF `datasets` keeps them."""
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
        name = text_value(image, self.image_key)
        if "://" in name:
            raise DataError(expected("the path of a local file", name, "Download the images first."))
        path = os.path.join(self.image_dir, os.path.expanduser(name))
        if not os.path.isfile(path):
            do = f"Paths are relative to image_dir, which is '{self.image_dir}'."
            raise DataError(f"Expected an image file, received '{path}', which does not exist. {do}")
        return path


class ImageTextStream(WebDataset):
    """What `ImageTextDataset` makes of tar shards: items as they come, in the order and with the position of shards.

    A sample is an image with a `.txt` (its caption) or a `.json` (a record, as in a JSON Lines file). `options` are
    those of `WebDataset`: `shuffle`, `seed`, `length`, `skip_bad`. Which of several captions is drawn depends on seed,
    epoch and sample alone.
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
            raise BadArgument(expected("no image_dir with tar shards, which hold their images", str(image_dir)))
        super().__init__(urls, label_key=("txt", "text", "caption", "json"), **options)
        self._reader = RecordReader(image_key, text_key)
        self._text_key = text_key
        self.has_several_captions = "captions" in self.first()

    def scan(self) -> ImageTextStream:
        """Count the samples by reading all headers."""
        self.length = sum(1 for shard in range(len(self.shards)) for _ in self._samples(shard, 0, set()))
        return self

    def _numbered(self, cursor: Any) -> Iterator[tuple[int, Any]]:
        numbered: Iterator[tuple[int, Any]] = super()._numbered(cursor)
        for number, item in numbered:
            if "captions" in item:
                key = sample_key(self.seed, self.epoch, number)
                item["text"] = item["captions"][key % len(item["captions"])]
            yield number, item

    def _read(self, raw: RawSample) -> Any:
        try:
            data = next(raw.files[key] for key in self.image_keys if key in raw.files)
            image = decode_image(data, 3, self._where(raw))
            return self._reader.item({**self._record(raw), self._reader.image_key: image}, lambda found: found)
        except DataError as error:
            place = self._where(raw)
            told = error if place in str(error) else DataError(f"{place}: {error}")
            if not self.skip_bad:
                raise told from error.__cause__
            logger.warning("a sample is left out: %s", told)
            return None

    def _record(self, raw: RawSample) -> dict[str, Any]:
        """What is said of the image: a JSON file as it is, and the text, which goes before one in the JSON file."""
        record: dict[str, Any] = {}
        for ending in (ending for ending in reversed(self.label_keys) if ending in raw.files):
            try:
                said = raw.files[ending].decode("utf-8")
                value = json.loads(said) if ending == "json" else said.strip()
            except ValueError as error:
                raise DataError(f"Expected UTF-8 text or JSON in '.{ending}', received: {error}.") from error
            record |= value if isinstance(value, Mapping) else {self._text_key: value}
        return record


class RecordReader:
    """Records into items. What opening an image means is told by the caller."""

    def __init__(self, image_key: str, text_key: str) -> None:
        self.image_key = image_key
        self.text_key = text_key

    def item(self, record: Any, opener: Opener) -> dict[str, Any]:
        """The item of a record, checked."""
        if not isinstance(record, Mapping):
            raise DataError(expected_value("a record with an image and a text", record))
        images = self._images(record)
        said = self._said(record, images)
        marks = _marks(said)
        if marks and marks != len(images):
            raise DataError(expected(f"as many images as marks {IMAGE_MARK}, which are {marks}", len(images)))
        if not images and "text" in said:
            raise DataError(self._missing(record, "image", self.image_key, IMAGE_COLUMNS))
        opened = [opener(image) for image in images]
        one = len(opened) == 1 and not isinstance(record.get("images"), list)
        return {"image": opened[0], **said} if one else {"images": opened, **said}

    def _images(self, record: Mapping[str, Any]) -> list[Any]:
        key = _key(record, self.image_key, "image", IMAGE_COLUMNS)
        value = None if key is None else record[key]
        if isinstance(value, list):
            return list(value)
        return [] if value is None or value == "" else [value]

    def _said(self, record: Mapping[str, Any], images: list[Any]) -> dict[str, Any]:
        """What is said of the images; images that messages name are added to them."""
        if not (self.text_key != "text" and self.text_key in record):  # a key that the user chose decides
            for key in _MESSAGES:
                if isinstance(record.get(key), list):
                    return {"messages": _messages(record[key], images)}
            for asked, answered in _ASKED:
                if asked in record and answered in record:
                    prompt, completion = text_value(record[asked], asked), text_value(record[answered], answered)
                    return {"prompt": prompt, "completion": completion}
        found = _key(record, self.text_key, "text", TEXT_COLUMNS)
        if found is None:
            raise DataError(self._missing(record, "text", self.text_key, TEXT_COLUMNS))
        if not isinstance(record[found], list):
            return {"text": text_value(record[found], found)}
        captions = [text_value(caption, found) for caption in record[found]]
        if not captions:
            raise DataError(f"Expected at least one caption in {found!r}, received an empty list.")
        return {"text": captions[0], "captions": captions}

    @staticmethod
    def _missing(record: Mapping[str, Any], what: str, wanted: str, usual: Sequence[str]) -> str:
        others = f", nor one of the usual names {', '.join(usual[:4])}, ..." if wanted == usual[0] else ""
        keys = ", ".join(map(repr, record)) or "no key"
        do = f"{did_you_mean(wanted, map(str, record))} Pass {what}_key='...'.".strip()
        return f"Expected the key {wanted!r}{others}, received a record with: {keys}. {do}"


def _key(record: Mapping[str, Any], wanted: str, default: str, usual: Sequence[str]) -> str | None:
    """The key that is meant: the one that is wanted, or where that is the default, the first of the usual names."""
    if wanted in record or wanted != default:
        return wanted if wanted in record else None
    return next((name for name in usual if name in record), None)


# -- conversations -----------------------------------------------------------------------------------------


def _messages(raw: Sequence[Any], images: list[Any]) -> list[dict[str, Any]]:
    """Messages with standard roles, whose contents are texts, or lists of parts where there are images.

    They are checked as texts, with a mark for every image: so a conversation is one and the same thing everywhere.
    """
    as_text = [_as_text(message, images) for message in raw]
    checked = conversation({"messages": as_text}, Form("chat", {"messages": "messages"}))["messages"]
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
            pieces.append(text_value(part.get("text"), "text"))
        else:
            raise DataError(expected_value("parts of the type text or image", part))
    return {**message, "content": "".join(pieces)}


def image_parts(content: str) -> str | list[dict[str, str]]:
    """A text with marks as parts; one without as it is. LLaVA puts the mark on a line of its own, which is dropped."""
    if IMAGE_MARK not in content:
        return content
    parts: list[dict[str, str]] = []
    for number, text in enumerate(content.split(IMAGE_MARK)):
        if number:
            parts.append({"type": "image"})
        if text := text.strip("\n"):
            parts.append({"type": "text", "text": text})
    return parts


def _marks(said: Mapping[str, Any]) -> int:
    contents = [message["content"] for message in said.get("messages", [])]
    found = sum(part["type"] == "image" for content in contents if isinstance(content, list) for part in content)
    return found + str(said.get("prompt", "")).count(IMAGE_MARK)


# -- files -------------------------------------------------------------------------------------------------


def holds_captions(path: str | Path) -> bool:
    """Whether there are images with text behind a path, as far as names tell.

    >>> holds_captions("pairs.jsonl"), holds_captions("nowhere")
    (True, False)
    """
    if _caption_file(path) is not None or names_shards(path):
        return True
    path = Path(path).expanduser()
    return content_suffix(path) != "" if not path.is_dir() else is_saved_by_hf(path)


def _caption_file(path: str | Path) -> Path | None:
    """The file in a folder of images that holds what is said of them."""
    folder = Path(path).expanduser()
    if not str(path) or not folder.is_dir():
        return None
    return next((folder / name for name in _CAPTION_FILES if (folder / name).is_file()), None)


def _open_records(path: Any, image_key: str, text_key: str) -> tuple[Any, Path]:
    """The records, and the folder that the paths of images in them are relative to."""
    if not isinstance(path, str | Path):
        return RecordList(list(path)), Path()
    found = _caption_file(path)
    file = Path(path).expanduser() if found is None else found
    if found is None and file.is_dir() and not is_saved_by_hf(file):
        held = ", ".join(sorted(name for name in islice(os.listdir(file), 5))) or "nothing"
        raise DataError(
            f"Expected a folder with one of {', '.join(_CAPTION_FILES)}, received '{file}', which holds {held}."
        )
    if content_suffix(file) in JSON and file.is_file():
        records = _parse_mapping(TextFile(file), image_key, text_key)
        if records is not None:
            return records, file.parent
    # Names such as "hf:name:split" are no paths, and go through as they are.
    records = load_text(file if file.exists() else path)
    return records, file if file.is_dir() else file.parent


def _parse_mapping(file: TextFile, image_key: str, text_key: str) -> RecordList | None:
    """The records of a JSON file that maps files to captions, or of COCO's; None for all others."""
    head = file.read(file.begin, min(file.size, file.begin + 4096)).lstrip()
    if not head.startswith(b"{") or file.size > MOST_PARSED or _begins_with_a_record(head):
        return None
    try:
        content = json.loads(file.decode(file.read(file.begin, file.size), file.begin))
    except json.JSONDecodeError:
        return None  # JSON Lines by another name, or an error that is told with its line
    if isinstance(content.get("images"), list) and isinstance(content.get("annotations"), list):
        return RecordList(_of_coco(content, image_key, text_key), file)
    is_record = image_key in content or text_key in content or any(key in content for key in _MESSAGES)
    if is_record or not all(_is_caption(value) for value in content.values()):
        return None
    return RecordList([{image_key: name, text_key: said} for name, said in content.items()], file)


def _begins_with_a_record(head: bytes) -> bool:
    """Whether JSON Lines go by the name of JSON: the first line is an object, and not the last one."""
    first, _, rest = head.partition(b"\n")
    try:
        return bool(rest.strip()) and isinstance(json.loads(first), Mapping)
    except ValueError:
        return False


def _is_caption(value: Any) -> bool:
    return isinstance(value, str) or (isinstance(value, list) and all(isinstance(part, str) for part in value))


def _of_coco(content: Mapping[str, Any], image_key: str, text_key: str) -> list[dict[str, Any]]:
    """Every image of COCO's annotations that has captions, with all of them."""
    captions: dict[Any, list[str]] = {}
    try:
        for note in content["annotations"]:
            captions.setdefault(note["image_id"], []).append(note["caption"])
        named = [(image["file_name"], image["id"]) for image in content["images"]]
    except (KeyError, TypeError) as error:
        raise DataError(
            f"Expected images with 'id' and 'file_name', and annotations with 'image_id' and 'caption', as COCO has "
            f"them, received some without {error}."
        ) from error
    return [{image_key: name, text_key: captions[number]} for name, number in named if number in captions]
