"""Records of images and text: normalising them to messages, and opening or measuring their images.

The names of the columns are in `data.multimodal` and `data.text.schemas`, tokenisation is in `vlm_encode`.
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
from trainformer.data.text.messages import template_fields, with_system
from trainformer.data.text.rendering import ASSISTANT_ROLES
from trainformer.data.text.schemas import conversation, detect_schema, standard

_READER = RecordReader("image", "text")
_CONVERSATIONS = ("messages", "conversations", "conversation")
_PROMPTS = ("prompt", "question", "query", "instruction")
_ANSWERS = ("completion", "response", "answer", "output")
_ROTATED = (5, 6, 7, 8)  # EXIF orientations that swap height and width


class RecordContent(NamedTuple):
    """Images of a record, and its text parts: messages, prompt and completion, or a text."""

    images: list[Any]
    parts: dict[str, Any]
    answered: bool = True


def read_record(record: Any, opener: Callable[[Any], Any]) -> RecordContent:
    """Return the content of a record with standard names, and its images opened by `opener`.

    A prompt without an answer gets an empty completion and `answered=False`. Messages after the last answer are
    dropped. A `system` prompt is the first message; `tools` and `chat_template_kwargs` are passed on.

    >>> read_record({"image": "a.png", "question": "Who?", "answer": "Me."}, str.upper)
    RecordContent(images=['A.PNG'], parts={'prompt': 'Who?', 'completion': 'Me.'}, answered=True)
    """
    if not isinstance(record, Mapping):
        raise DataError(expected("a record with images and text", type(record).__name__))
    prompt = next((name for name in _PROMPTS if isinstance(record.get(name), str)), None)
    answered = prompt is None or any(record.get(name) is not None for name in (*_ANSWERS, *_CONVERSATIONS))
    if not answered:
        record = {**record, "prompt": record[prompt], "completion": ""}
    values = [record.get(name) for name in (*IMAGE_COLUMNS, *_CONVERSATIONS)]
    passed = template_fields(record.get("tools"), record.get("chat_template_kwargs"))
    if all(value is None or (isinstance(value, str | list) and not value) for value in values):
        return RecordContent([], _text_parts(record) | passed, answered)
    item = _READER.item(record, opener) | passed
    images = item.pop("images") if "images" in item else [item.pop("image")]
    if record.get("system") and "text" not in item:
        prompt, completion = item.pop("prompt", None), item.pop("completion", None)
        turns = [("user", prompt and image_parts(prompt)), ("assistant", completion)]
        messages = item.get("messages") or [{"role": role, "content": content} for role, content in turns]
        item["messages"] = with_system(messages, record["system"])
    if "messages" in item:
        messages = list(item["messages"])
        last = max(place for place, message in enumerate(messages) if message["role"] in ASSISTANT_ROLES)
        item["messages"] = messages[: last + 1]
        images = images[: image_count(item["messages"]) or len(images)]
    return RecordContent(images, item, answered)


def _text_parts(record: Mapping[str, Any]) -> dict[str, Any]:
    """Parts of a record without images. One question with one answer is a prompt with its completion."""
    form = detect_schema([record])
    if form.name not in ("chat", "completion", "alpaca"):
        return standard(record, form)
    messages = conversation(record, form)["messages"]
    if [message["role"] for message in messages] == ["user", "assistant"]:
        return {"prompt": messages[0]["content"], "completion": messages[1]["content"]}
    return {"messages": messages}


# -- images ------------------------------------------------------------------------------------------------


def open_image(image: Any) -> Any:
    """Open an image of any kind (PIL, path, bytes, array, tensor) as a PIL image in RGB."""
    if isinstance(image, Mapping):  # undecoded image of HF `datasets`
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
    """Return height and width of an image as `open_image` would open it; files only have their header read."""
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
            rotated = opened.getexif().get(0x0112) in _ROTATED
            return (opened.width, opened.height) if rotated else (opened.height, opened.width)
    except Exception:  # `open_image` raises a better error
        opened = open_image(image)
        return opened.height, opened.width


# -- conversations -----------------------------------------------------------------------------------------


def to_messages(parts: Mapping[str, Any], images: int) -> list[dict[str, Any]]:
    """Convert a record to messages whose contents are lists of parts, with one part per image.

    Images without a placeholder in the text come first.

    >>> [message["content"] for message in to_messages({"text": "a cat"}, 1)]
    [[{'type': 'image'}], [{'type': 'text', 'text': 'a cat'}]]
    """
    if "messages" in parts:
        messages = parts["messages"]
    else:
        answer = parts["completion"] if "completion" in parts else parts["text"]
        messages = [
            {"role": "user", "content": image_parts(parts.get("prompt", ""))},
            {"role": "assistant", "content": answer},
        ]
    messages = [{**message, "content": _as_parts(message["content"])} for message in messages]
    if images and not image_count(messages):
        first = next((message for message in messages if message["role"] == "user"), messages[0])
        first["content"] = [{"type": "image"}] * images + first["content"]
    return messages


def image_count(messages: Sequence[Mapping[str, Any]]) -> int:
    """Count the images in messages."""
    contents = [message["content"] for message in messages if not isinstance(message["content"], str)]
    return sum(part["type"] == "image" for content in contents for part in content)


def _as_parts(content: Any) -> list[dict[str, Any]]:
    if not isinstance(content, str):
        return [dict(part) for part in content]
    return [{"type": "text", "text": content}] if content else []


def to_text(content: Sequence[Mapping[str, Any]], image_token: str) -> str:
    """Render content as text, with the image token on a separate line for each image.

    >>> to_text([{"type": "image"}, {"type": "text", "text": "Who?"}], "<image>")
    '<image>\\nWho?'
    """
    pieces = [f"{image_token}\n" if part["type"] == "image" else part["text"] for part in content]
    return "".join(pieces)
