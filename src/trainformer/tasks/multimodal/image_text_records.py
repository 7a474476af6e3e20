"""Records of images with text: what is said in them, and their images, opened or only measured.

Owns images of any kind as PIL images, their sizes without decoding them, and the place of each image in a conversation.
What the parts of a record are called is left to `data.multimodal` and `data.text.forms`, tokens to `vlm_encode`.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from trainformer.core.errors import DataError, expected
from trainformer.core.optional import require
from trainformer.data.folder import decode_image, read_image
from trainformer.data.lists import IMAGE_COLUMNS
from trainformer.data.multimodal import RecordReader, image_parts
from trainformer.data.pixels import image_tensor, is_pil, tensor_channels, with_channels
from trainformer.data.text.chat import ASSISTANT_ROLES
from trainformer.data.text.schemas import conversation, detect_schema, standard

_READER = RecordReader("image", "text")
_TALKS = ("messages", "conversations", "conversation")
_ASKS = ("prompt", "question", "query", "instruction")
_ANSWERS = ("completion", "response", "answer", "output")
_TURNED = (5, 6, 7, 8)  # orientations of EXIF in which height and width change places


class Said(NamedTuple):
    """A record: its images, as far as they are opened, and what is said: messages, prompt and completion, or a text."""

    images: list[Any]
    parts: dict[str, Any]
    answered: bool = True


def read_record(record: Any, opener: Callable[[Any], Any]) -> Said:
    """The parts of a record with the standard names, each image as `opener` gives it.

    A prompt that nobody has answered gets an empty completion, and is marked. What follows the last answer of a
    conversation is left out.

    >>> read_record({"image": "a.png", "question": "Who?", "answer": "Me."}, str.upper)
    Said(images=['A.PNG'], parts={'prompt': 'Who?', 'completion': 'Me.'}, answered=True)
    """
    if not isinstance(record, Mapping):
        raise DataError(expected("a record with images and text", type(record).__name__))
    asked = next((name for name in _ASKS if isinstance(record.get(name), str)), None)
    answered = asked is None or any(record.get(name) is not None for name in (*_ANSWERS, *_TALKS))
    if not answered:
        record = {**record, "prompt": record[asked], "completion": ""}
    if all(_is_missing(record.get(name)) for name in (*IMAGE_COLUMNS, *_TALKS)):
        form = detect_schema([record])
        talks = form.name in ("chat", "completion", "alpaca")
        return Said([], standard(record, form) if not talks else _asked(record, form), answered)
    item = _READER.item(record, opener)
    images = item.pop("images") if "images" in item else [item.pop("image")]
    if "messages" in item:
        item["messages"] = _to_last_answer(item["messages"])
        images = images[: image_count(item["messages"]) or len(images)]
    return Said(images, item, answered)


def _is_missing(value: Any) -> bool:
    return value is None or (isinstance(value, str | list) and not value)


def _to_last_answer(messages: Sequence[Any]) -> list[Any]:
    """Nothing is learned behind it."""
    last = max(place for place, message in enumerate(messages) if message["role"] in ASSISTANT_ROLES)
    return list(messages[: last + 1])


def _asked(record: Mapping[str, Any], form: Any) -> dict[str, Any]:
    """A question without an image: prompt and completion, where it is no more than that."""
    messages = conversation(record, form)["messages"]
    if [message["role"] for message in messages] == ["user", "assistant"]:
        return {"prompt": messages[0]["content"], "completion": messages[1]["content"]}
    return {"messages": messages}


# -- images ------------------------------------------------------------------------------------------------


def open_image(image: Any) -> Any:
    """An image of any kind (PIL, path, bytes, array, tensor) as a PIL image in RGB."""
    if isinstance(image, Mapping):  # as HF `datasets` keeps images
        image = image["path"] if image.get("bytes") is None else image["bytes"]
    if isinstance(image, bytes):
        return decode_image(image, 3, "the image in the record")
    if isinstance(image, str | Path):
        if "://" in str(image):
            raise DataError(expected("the path of a local file", image, "Download the images first."))
        return read_image(image, 3)
    if is_pil(image):
        return with_channels(image, 3)
    pixels = tensor_channels(image_tensor(image), 3)
    if pixels.is_floating_point():
        low, high = float(pixels.min()), float(pixels.max())
        if low < 0 or high > 1:
            raise DataError(expected("floats from 0 to 1 as pixels", f"{low:.3g} to {high:.3g}", "Do not normalise."))
        pixels = (pixels * 255).round().byte()
    pil = require("PIL.Image", "vision", "for images")
    return pil.fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def image_size(image: Any) -> tuple[int, int]:
    """Height and width of an image as `open_image` would give it, read from its header where it is a file."""
    if isinstance(image, Mapping):
        image = image["path"] if image.get("bytes") is None else image["bytes"]
    if is_pil(image):
        return image.height, image.width
    if not isinstance(image, str | Path | bytes):
        height, width = image_tensor(image).shape[-2:]
        return height, width
    pil = require("PIL.Image", "vision", "for images")
    try:
        with pil.open(io.BytesIO(image) if isinstance(image, bytes) else image) as opened:
            turned = opened.getexif().get(0x0112) in _TURNED
            return (opened.width, opened.height) if turned else (opened.height, opened.width)
    except Exception:  # of whatever kind: the same image cannot be opened either, and that says why
        opened = open_image(image)
        return opened.height, opened.width


# -- conversations -----------------------------------------------------------------------------------------


def turns(parts: Mapping[str, Any], images: int) -> list[dict[str, Any]]:
    """A record as messages whose contents are lists of parts, with a part for each of its images.

    Images that no text points at come first.

    >>> [message["content"] for message in turns({"text": "a cat"}, 1)]
    [[{'type': 'image'}], [{'type': 'text', 'text': 'a cat'}]]
    """
    if "messages" in parts:
        said = parts["messages"]
    else:
        answer = parts["completion"] if "completion" in parts else parts["text"]
        said = [
            {"role": "user", "content": image_parts(parts.get("prompt", ""))},
            {"role": "assistant", "content": answer},
        ]
    made = [{**message, "content": _listed(message["content"])} for message in said]
    if images and not image_count(made):
        first = next((message for message in made if message["role"] == "user"), made[0])
        first["content"] = [{"type": "image"}] * images + first["content"]
    return made


def image_count(messages: Sequence[Mapping[str, Any]]) -> int:
    """How many images the contents of messages hold."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return sum(part["type"] == "image" for content in contents for part in content)


def _listed(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return [dict(part) for part in content]
    return [{"type": "text", "text": content}] if content else []


def in_words(content: Sequence[Mapping[str, Any]], image_token: str) -> str:
    """A content as one text: a line of its own for each image, in the place where it is.

    >>> in_words([{"type": "image"}, {"type": "text", "text": "Who?"}], "<image>")
    '<image>\\nWho?'
    """
    pieces = [f"{image_token}\n" if part["type"] == "image" else part["text"] for part in content]
    return "".join(pieces)
