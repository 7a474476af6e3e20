"""Images with text as tokens, labels and pixels, by the processor of a vision-language model.

Owns where the tokens of an image stand and that they are never cut, what is trained on, and what a prompt is. Words are
rendered and tokenised with one stand-in per image, as text is (`data.text.encode`), so answers are found as they are
found in text. Then each stand-in makes room for the tokens that the processor writes for that image. Reading
records is left to `image_text_records`, batches to `vlm_data`.
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
    Said,
    image_count,
    image_size,
    in_words,
    open_image,
    read_record,
    turns,
)

_STAND_IN = "a"  # for an answer that is not there: what comes before it is the prompt
_PROBE = "zq7Probe7qz"
_MARKS = re.compile(r"(\{%[-+]?\s*)(end)?generation(\s*[-+]?%\})")
_NO_PIXELS = ("input_ids", "attention_mask", "mm_token_type_ids", "token_type_ids")


class Block(NamedTuple):
    """An image as the model reads it: the tokens that stand for it, and its pixels by the names of the model."""

    tokens: np.ndarray
    pixels: dict[str, Tensor]


class ImageTextEncoder:
    """Turns records into examples: `input_ids`, `labels`, and `pixels`, a tensor for each of the model's image inputs.

    `train_on` means what it means for text; tokens of images are never trained on. `image_options` go to the image
    processor (`min_pixels`, `max_pixels`, `size`, ...). A record of more than `max_length` tokens loses the end of its
    text; if tokens of an image are there, or nothing to learn is left, the record cannot be used.
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
        # A processor has the template that knows of images; its tokenizer may have another one, or none.
        self.tokenizer: Any = copy.copy(processor.tokenizer)
        template = getattr(processor, "chat_template", None) or self.tokenizer.chat_template
        self.tokenizer.chat_template = _unmarked(template) if isinstance(template, str) else template
        self.image_id: int = self.tokenizer.convert_tokens_to_ids(self.image_token)
        self._encoder = Encoder(self.tokenizer, max_length=None, train_on=train_on)
        self._asking = Encoder(self.tokenizer, max_length=None) if train_on == "all" else self._encoder
        self._special = frozenset([*self.tokenizer.added_tokens_decoder, *self.tokenizer.all_special_ids])

    # -- records -------------------------------------------------------------------------------------------

    def encode(self, record: Any, place: str = "a record") -> dict[str, Any]:
        """The example of a record, else a `DataError` that names its place and says why there is none."""
        said = self._read(record, open_image, place)
        blocks = [self.block(image) for image in said.images]
        whole, _ = self._whole(said, [block.tokens for block in blocks], place)
        return _example(whole, blocks)

    def encode_asked(self, record: Any, place: str = "a record") -> dict[str, Any]:
        """The same, and of the last answer, if there is one, the tokens before it (`prompt`) and its own (`answer`)."""
        said = self._read(record, open_image, place, asked=True)
        blocks = [self.block(image) for image in said.images]
        tokens = [block.tokens for block in blocks]
        whole, _ = self._whole(said, tokens, place, self._asking)
        begin, end = _last_answer(whole.labels)
        prompt, answer = whole.input_ids[:begin], whole.input_ids[begin:end]
        if not said.answered:
            whole = Encoded(prompt, np.full_like(prompt, IGNORE_INDEX))
        elif self._asking is not self._encoder:
            whole, _ = self._whole(said, tokens, place)
        return {**_example(whole, blocks), "prompt": prompt, "answer": answer if said.answered else answer[:0]}

    def measure(self, record: Any, place: str, report: EncodingReport, *, asked: bool = False) -> int | None:
        """The length of a record without decoding its images, counted in `report`; None if it cannot be used."""
        report.records += 1
        try:
            said = self._read(record, image_size, place, asked)
            tokens = [np.full(count, self.image_id, np.int32) for count in self._counts(said.images)]
            whole, cut = self._whole(said, tokens, place)
        except _Unusable as reason:
            report.add_outcome(reason.why, "dropped")
            return None
        if cut:
            report.add_outcome(f"longer than {self.max_length} tokens", "truncated")
        report.pieces += 1
        report.tokens += len(whole.input_ids)
        report.supervised += whole.supervised if said.answered else 0
        return len(whole.input_ids)

    @property
    def measures(self) -> bool:
        """Whether the processor says how many tokens an image takes from its size alone."""
        return hasattr(self.processor, "_get_num_multimodal_tokens")

    def block(self, image: Any) -> Block:
        """Tokens and pixels of one image."""
        made = self.processor(
            images=[image],
            text=[self.image_token],
            images_kwargs=self.image_options,
            text_kwargs={"add_special_tokens": False},
            return_tensors="pt",
        )
        pixels = {name: value for name, value in made.items() if name not in _NO_PIXELS and isinstance(value, Tensor)}
        return Block(made["input_ids"][0].numpy().astype(np.int32), pixels)

    def _read(self, record: Any, opener: Any, place: str, asked: bool = False) -> Said:
        try:
            said = read_record(record, opener)
        except DataError as error:
            raise DataError(f"{place}: {error}") from error.__cause__
        if not said.answered:
            if not asked:
                raise _Unusable(place, "a prompt without an answer")
            said = said._replace(parts={**said.parts, "completion": _STAND_IN})
        return said

    def _counts(self, sizes: Sequence[tuple[int, int]]) -> list[int]:
        """How many tokens images of these sizes take."""
        if not sizes:
            return []
        return self.processor._get_num_multimodal_tokens(image_sizes=list(sizes), **self.image_options).num_image_tokens

    # -- tokens --------------------------------------------------------------------------------------------

    def _whole(
        self, said: Said, images: Sequence[np.ndarray], place: str, encoder: Encoder | None = None
    ) -> tuple[Encoded, bool]:
        """All tokens of a record with those of its images in their places, and whether its end was cut."""
        worded, count = self._worded(said)
        report = EncodingReport()
        pieces = (encoder or self._encoder).encode_all([worded], report, where=lambda _: place)[0]
        if not pieces:
            raise _Unusable(place, next(iter(report.reasons)))
        piece = self._closed(pieces[0]) if "messages" in worded else pieces[0]
        held = int(np.count_nonzero(piece.input_ids == self.image_id))
        if not held == count == len(images):
            what = f"{len(images)} images in the text, each as one {self.image_token}"
            raise DataError(f"{place}: {expected(what, held, 'Is the mark of images part of what is said?')}")
        whole, stands = _expanded(piece, images, self.image_id)
        limit = self.max_length
        if len(whole.input_ids) <= limit:
            return whole, False
        if stands[limit:].any():
            raise _Unusable(place, f"images that reach beyond {limit} tokens")
        whole = Encoded(whole.input_ids[:limit], whole.labels[:limit])
        if whole.supervised == 0:
            raise _Unusable(place, f"nothing to train on in the first {limit} tokens")
        return whole, True

    def _worded(self, said: Said) -> tuple[dict[str, Any], int]:
        """A record for `Encoder`, with a stand-in for each image, and how many of these there are."""
        parts, images = said.parts, len(said.images)
        if not images and "text" in parts:
            return {"text": parts["text"]}, 0
        if "messages" not in parts and not self.tokenizer.chat_template:
            asked, answer = turns(parts, images)
            prompt = in_words(asked["content"], self.image_token)
            completion = in_words(answer["content"], self.image_token)
            apart = not prompt or prompt[-1].isspace() or completion[:1].isspace()
            return {"prompt": prompt, "completion": completion if apart else f" {completion}"}, image_count([asked])
        messages = turns(parts, images)
        count = image_count(messages)
        if not self._takes_parts:
            messages = [{**turn, "content": in_words(turn["content"], self.image_token)} for turn in messages]
        return {"messages": messages}, count

    def _closed(self, piece: Encoded) -> Encoded:
        """A conversation with the BOS that the tokenizer gives to every text, and EOS behind an answer without an end.

        Templates of LLaVA have neither: the first is added by their processor, and a model that never learned the
        second never stops.
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
        return bos is not None and self.tokenizer(_STAND_IN)["input_ids"][:1] == [bos]

    @cached_property
    def _takes_parts(self) -> bool:
        """Whether the template reads contents as lists of parts, and not as texts."""
        if not self.tokenizer.chat_template:
            return False  # the renderer says so, and what to do
        content = [{"type": "image"}, {"type": "text", "text": _PROBE}]
        for parts in (True, False):
            message = {"role": "user", "content": content if parts else in_words(content, self.image_token)}
            try:
                text = self.tokenizer.apply_chat_template([message], tokenize=False)
            except Exception:  # templates raise what they like
                continue
            if text.count(self.image_token) == 1 and _PROBE in text and "'type'" not in text:
                return parts
        raise BadArgument(
            f"Expected a chat template that writes {self.image_token} for an image, received one that does not. Set "
            "processor.chat_template."
        )


class _Unusable(DataError):
    """A record on which nothing can be trained."""

    def __init__(self, place: str, why: str) -> None:
        self.why = why
        do = "Raise max_length, make images smaller with image_options, or pass bad_samples='skip'."
        super().__init__(f"{place}: {expected('a record to train on', why, do)}")


def stack_rows(tensors: Sequence[Tensor]) -> Tensor:
    """Tensors one behind the other; other dimensions are filled up with zeros, as processors do it.

    >>> stack_rows([torch.ones(1, 2), torch.ones(2, 3)]).shape
    torch.Size([3, 3])
    """
    shapes = [tensor.shape[1:] for tensor in tensors]
    if all(shape == shapes[0] for shape in shapes):
        return torch.cat(list(tensors)) if len(tensors) > 1 else tensors[0]
    made = tensors[0].new_zeros(sum(map(len, tensors)), *(max(sizes) for sizes in zip(*shapes, strict=True)))
    begin = 0
    for tensor in tensors:
        made[(slice(begin, begin + len(tensor)), *map(slice, tensor.shape[1:]))] = tensor
        begin += len(tensor)
    return made


def _example(whole: Encoded, blocks: Sequence[Block]) -> dict[str, Any]:
    names = dict.fromkeys(name for block in blocks for name in block.pixels)
    pixels = {name: stack_rows([block.pixels[name] for block in blocks]) for name in names}
    return {"input_ids": whole.input_ids, "labels": whole.labels, "pixels": pixels}


def _unmarked(template: str) -> str:
    """A template without its marks around answers, whose borders are then found by what it renders.

    LLaVA's marks end with a space, which belongs to no token or to the next one: transformers would train on the next
    user's turn.

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


def _expanded(piece: Encoded, images: Sequence[np.ndarray], image_id: int) -> tuple[Encoded, np.ndarray]:
    """A piece with the tokens of images in the places of their stand-ins, and which tokens these are.

    >>> whole, stands = _expanded(Encoded(np.array([5, 9, 6]), np.array([-100, 9, 6])), [np.array([9, 9])], 9)
    >>> whole.input_ids.tolist(), whole.labels.tolist(), stands.tolist()
    ([5, 9, 9, 6], [-100, -100, -100, 6], [False, True, True, False])
    """
    sizes = np.ones(len(piece.input_ids), dtype=np.int64)
    is_image = piece.input_ids == image_id
    sizes[is_image] = [len(tokens) for tokens in images]
    ids, labels, stands = (np.repeat(values, sizes) for values in (piece.input_ids, piece.labels, is_image))
    if images:
        ids[stands] = np.concatenate(list(images))
    labels[stands] = IGNORE_INDEX
    return Encoded(ids, labels), stands


def _last_answer(labels: np.ndarray) -> tuple[int, int]:
    """Where the last answer begins, not before the second token since something must come first, and where it ends.

    >>> _last_answer(np.array([-100, 4, -100, -100, 7, 2, -100]))
    (4, 6)
    """
    learned = labels != IGNORE_INDEX
    end = int(np.flatnonzero(learned)[-1]) + 1
    before = np.flatnonzero(~learned[:end])
    return max(1, int(before[-1]) + 1 if len(before) else 0), end
