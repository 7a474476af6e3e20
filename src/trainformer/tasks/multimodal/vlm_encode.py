"""Encode records of images and text as tokens, labels and pixels with a vision-language model's processor.

Text is rendered and tokenised with one placeholder per image, so supervised tokens are found as in plain text
(`data.text.encode`). Then each placeholder is replaced by the image tokens of the processor, which are never truncated.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.data.text.encode import IGNORE_INDEX, Encoded, Encoder, EncodingReport
from trainformer.tasks.multimodal.image_text_records import (
    RecordContent,
    image_count,
    image_size,
    open_image,
    read_record,
    to_messages,
    to_text,
)

_DUMMY_ANSWER = "a"  # for a missing answer: everything before it is the prompt
_PROBE = "zq7Probe7qz"
_MARKS = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_NO_PIXELS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


class Block(NamedTuple):
    """An encoded image: its tokens, and its pixel tensors by the model's input names."""

    tokens: np.ndarray
    pixels: dict[str, Tensor]


class ImageTextEncoder:
    """Encode records as `input_ids`, `labels`, and `pixels`, a tensor for each image input of the model.

    `train_on` is that of text tasks; image tokens are never supervised. `image_options` are passed to the image
    processor (`min_pixels`, `max_pixels`, `size`, ...). Records of more than `max_length` tokens are truncated; a
    record is unusable if that would cut an image or leave nothing to learn.
    """

    def __init__(
        self,
        processor: Any,
        *,
        max_length: int,
        train_on: str = "auto",
        image_options: dict[str, Any] | None = None,
    ) -> None:
        self.processor = processor
        self.max_length = max_length
        self.image_options = dict(image_options or {})
        self.image_token: str = _image_token(processor)
        # The processor's chat template supports images; its tokenizer may have another one, or none.
        self.tokenizer: Any = copy.copy(processor.tokenizer)
        template = getattr(processor, "chat_template", None) or self.tokenizer.chat_template
        self.tokenizer.chat_template = _unmarked(template) if isinstance(template, str) else template
        self.image_id: int = self.tokenizer.convert_tokens_to_ids(self.image_token)
        self._encoder = _TextEncoder(self.tokenizer, max_length=None, train_on=train_on)
        self._prompt_encoder = _TextEncoder(self.tokenizer, max_length=None) if train_on == "all" else self._encoder
        self._special = frozenset([*self.tokenizer.added_tokens_decoder, *self.tokenizer.all_special_ids])

    # -- records -------------------------------------------------------------------------------------------

    def encode(self, record: Any, place: str = "a record") -> dict[str, Any]:
        """Encode a record. An unusable one raises a `DataError` with its place and the reason."""
        content = self._read(record, open_image, place)
        blocks = [self.block(image) for image in content.images]
        whole, _ = self._tokenize(content, [block.tokens for block in blocks], place)
        return _example(whole, blocks)

    def encode_with_prompt(self, record: Any, place: str = "a record") -> dict[str, Any]:
        """Encode a record, with the tokens of its last answer (`answer`) and those before it (`prompt`)."""
        content = self._read(record, open_image, place, prompts=True)
        blocks = [self.block(image) for image in content.images]
        tokens = [block.tokens for block in blocks]
        whole, _ = self._tokenize(content, tokens, place, self._prompt_encoder)
        begin, end = _last_answer(whole.labels)
        prompt, answer = whole.input_ids[:begin], whole.input_ids[begin:end]
        if not content.answered:
            whole = Encoded(prompt, np.full_like(prompt, IGNORE_INDEX))
        elif self._prompt_encoder is not self._encoder:
            whole, _ = self._tokenize(content, tokens, place)
        return {**_example(whole, blocks), "prompt": prompt, "answer": answer if content.answered else answer[:0]}

    def measure(self, record: Any, place: str, report: EncodingReport, *, prompts: bool = False) -> int | None:
        """Return the length of a record without decoding its images, and count it; None if it is unusable."""
        report.records += 1
        try:
            content = self._read(record, image_size, place, prompts)
            tokens = [np.full(count, self.image_id, np.int32) for count in self._counts(content.images)]
            whole, cut = self._tokenize(content, tokens, place)
        except _Unusable as reason:
            report.add_outcome(reason.why, "dropped")
            return None
        if cut:
            report.add_outcome(f"longer than {self.max_length} tokens", "truncated")
        report.pieces += 1
        report.tokens += len(whole.input_ids)
        report.supervised += whole.supervised if content.answered else 0
        return len(whole.input_ids)

    @property
    def measures(self) -> bool:
        """Whether the processor can compute the number of image tokens from the image size."""
        return hasattr(self.processor, "_get_num_multimodal_tokens")

    def block(self, image: Any) -> Block:
        """Encode one image."""
        made = self.processor(
            images=[image],
            text=[self.image_token],
            images_kwargs=self.image_options,
            text_kwargs={"add_special_tokens": False},
            return_tensors="pt",
        )
        pixels = {name: value for name, value in made.items() if name not in _NO_PIXELS and isinstance(value, Tensor)}
        return Block(made["input_ids"][0].numpy().astype(np.int32), pixels)

    def _read(self, record: Any, opener: Any, place: str, prompts: bool = False) -> RecordContent:
        try:
            content = read_record(record, opener)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error.__cause__
        if not content.answered:
            if not prompts:
                raise _Unusable(place, "a prompt without an answer")
            content = content._replace(parts={**content.parts, "completion": _DUMMY_ANSWER})
        return content

    def _counts(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """Numbers of tokens of images with these sizes."""
        if not sizes:
            return []
        return self.processor._get_num_multimodal_tokens(image_sizes=list(sizes), **self.image_options).num_image_tokens

    # -- tokens --------------------------------------------------------------------------------------------

    def _tokenize(
        self, content: RecordContent, images: Sequence[np.ndarray], place: str, encoder: Encoder | None = None
    ) -> tuple[Encoded, bool]:
        """Tokens of a record with those of its images inserted, and whether it was truncated."""
        text_record, count = self._with_placeholders(content)
        report = EncodingReport()
        pieces = (encoder or self._encoder).encode_all([text_record], report, where=lambda _: place)[0]
        if not pieces:
            raise _Unusable(place, next(iter(report.reasons)))
        piece = self._add_bos_and_eos(pieces[0]) if "messages" in text_record else pieces[0]
        found = int(np.count_nonzero(piece.input_ids == self.image_id))
        if not found == count == len(images):
            what = f"{len(images)} images in the text, each as one {self.image_token}"
            raise DataError(f"{place}: {expected(what, found, 'Does the text itself contain the image token?')}")
        whole, is_image = _insert_images(piece, images, self.image_id)
        limit = self.max_length
        if len(whole.input_ids) <= limit:
            return whole, False
        if is_image[limit:].any():
            raise _Unusable(place, f"images that reach beyond {limit} tokens")
        whole = Encoded(whole.input_ids[:limit], whole.labels[:limit])
        if whole.supervised == 0:
            raise _Unusable(place, f"nothing to train on in the first {limit} tokens")
        return whole, True

    def _with_placeholders(self, content: RecordContent) -> tuple[dict[str, Any], int]:
        """A text record for `Encoder` with a placeholder per image, and their number."""
        parts, images = content.parts, len(content.images)
        passed: dict[str, Any] = {name: parts[name] for name in ("tools", "chat_template_kwargs") if name in parts}
        if not images and "text" in parts:
            return {"text": parts["text"]}, 0
        if "messages" not in parts and not self.tokenizer.chat_template:
            question, answer = to_messages(parts, images)
            prompt = to_text(question["content"], self.image_token)
            completion = to_text(answer["content"], self.image_token)
            separated = not prompt or prompt[-1].isspace() or completion[:1].isspace()
            completion = completion if separated else f" {completion}"
            return {"prompt": prompt, "completion": completion, **passed}, image_count([question])
        messages = to_messages(parts, images)
        count = image_count(messages)
        if not self._takes_parts:
            messages = [{**turn, "content": to_text(turn["content"], self.image_token)} for turn in messages]
        return {"messages": messages, **passed}, count

    def _add_bos_and_eos(self, piece: Encoded) -> Encoded:
        """Add BOS if the tokenizer always does, and EOS after an answer that has no end token.

        LLaVA's templates have neither: its processor adds BOS, and a model that never sees EOS never stops.
        """
        ids, labels = piece
        bos, eos = self.tokenizer.bos_token_id, self.tokenizer.eos_token_id
        if self._begins_with_bos and ids[0] != bos:
            ids, labels = np.insert(ids, 0, bos), np.insert(labels, 0, IGNORE_INDEX)
        last = int(np.flatnonzero(labels != IGNORE_INDEX)[-1])
        if eos is not None and int(ids[last]) not in self._special:
            ids, labels = np.append(ids[: last + 1], np.int32(eos)), np.append(labels[: last + 1], np.int32(eos))
        return Encoded(ids.astype(np.int32), labels.astype(np.int32))

    @cached_property
    def _begins_with_bos(self) -> bool:
        bos = self.tokenizer.bos_token_id
        return bos is not None and self.tokenizer(_DUMMY_ANSWER)["input_ids"][:1] == [bos]

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the chat template takes content as lists of parts, not as text."""
        if not self.tokenizer.chat_template:
            return False  # the renderer raises the error
        content = [{"type": "image"}, {"type": "text", "text": _PROBE}]
        for parts in (True, False):
            message = {"role": "user", "content": content if parts else to_text(content, self.image_token)}
            try:
                text = self.tokenizer.apply_chat_template([message], tokenize=False)
            except Exception:  # templates can raise anything
                continue
            if text.count(self.image_token) == 1 and _PROBE in text and "'type'" not in text:
                return parts
        raise BadArgument(
            f"Expected a chat template that renders an image as {self.image_token}, received one that does not. Set "
            "processor.chat_template."
        )


class _TextEncoder(Encoder):
    expects_stop = False  # `_add_bos_and_eos` adds it


class _Unusable(DataError):
    """A record without anything to train on."""

    def __init__(self, place: str, why: str) -> None:
        self.why = why
        do = "Raise max_length, make images smaller with image_options, or pass bad_samples='skip'."
        super().__init__(f"{place}: {expected('a record to train on', why, do)}")


def stack_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Concatenate tensors; other dimensions are padded with zeros, as processors do.

    >>> stack_rows([torch.ones(1, 2), torch.ones(2, 3)]).shape
    torch.Size([3, 3])
    """
    shapes = [tensor.shape[1:] for tensor in tensors]
    if all(shape == shapes[0] for shape in shapes):
        return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
    stacked = tensors[0].new_zeros(sum(map(len, tensors)), *(max(sizes) for sizes in zip(*shapes, strict=True)))
    begin = 0
    for tensor in tensors:
        stacked[(slice(begin, begin + len(tensor)), *map(slice, tensor.shape[1:]))] = tensor
        begin += len(tensor)
    return stacked


def _example(whole: Encoded, blocks: Sequence[Block]) -> dict[str, Any]:
    names = dict.fromkeys(name for block in blocks for name in block.pixels)
    pixels = {name: stack_rows([block.pixels[name] for block in blocks]) for name in names}
    return {"input_ids": whole.input_ids, "labels": whole.labels, "pixels": pixels}


def _unmarked(template: str) -> str:
    """Remove the generation markers of a template; the spans of answers are then found by rendering.

    LLaVA's markers include a trailing space, which belongs to no token or to the next one: transformers would train on
    the next user turn.

    >>> _unmarked("{%- generation %}{{ text + ' ' }}{% endgeneration -%}")
    "{%- if true %}{{ text + ' ' }}{% endif -%}"
    """
    return _MARKS.sub(lambda mark: mark[1] + ("endif" if mark[2] else "if true") + mark[3], template)


def _image_token(processor: Any) -> str:
    token = getattr(processor, "image_token", None) or getattr(processor.tokenizer, "image_token", None)
    if token is None:
        raise BadArgument(
            f"Expected a processor with an image token, received {type(processor).__name__}, which has none. LLaVA, "
            "Qwen2-VL and models like them have one."
        )
    return str(token)


def _insert_images(piece: Encoded, images: Sequence[np.ndarray], image_id: int) -> tuple[Encoded, np.ndarray]:
    """Replace image placeholders by image tokens. Also returns which tokens are image tokens.

    >>> whole, mask = _insert_images(Encoded(np.array([5, 9, 6]), np.array([-100, 9, 6])), [np.array([9, 9])], 9)
    >>> whole.input_ids.tolist(), whole.labels.tolist(), mask.tolist()
    ([5, 9, 9, 6], [-100, -100, -100, 6], [False, True, True, False])
    """
    sizes = np.ones(len(piece.input_ids), dtype=np.int64)
    is_image = piece.input_ids == image_id
    sizes[is_image] = [len(tokens) for tokens in images]
    ids, labels, mask = (np.repeat(values, sizes) for values in (piece.input_ids, piece.labels, is_image))
    if images:
        ids[mask] = np.concatenate(list(images))
    labels[mask] = IGNORE_INDEX
    return Encoded(ids, labels), mask


def _last_answer(labels: np.ndarray) -> tuple[int, int]:
    """Return start and end of the last answer. It starts at the second token at the earliest: the prompt is not empty.

    >>> _last_answer(np.array([-100, 4, -100, -100, 7, 2, -100]))
    (4, 6)
    """
    supervised = labels != IGNORE_INDEX
    end = int(np.flatnonzero(supervised)[-1]) + 1
    before = np.flatnonzero(~supervised[:end])
    return max(1, int(before[-1]) + 1 if len(before) else 0), end
