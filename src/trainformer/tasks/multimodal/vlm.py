"""Vision-language models: answering questions about images, and describing them.

Owns the task: its arguments, what a step computes, what is measured, and generating. How records become tokens and
pixels is in `vlm_encode`, batches in `vlm_data`, which parameters are trained in `vlm_parts`, the loss in
`losses.tokens`. The loss is a sum over supervised tokens and their number, never a model's own mean.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from trainformer.adapters.base import Adapter, unwrap_model
from trainformer.core import BadArgument
from trainformer.core.errors import did_you_mean, expected
from trainformer.data.labels import is_stream
from trainformer.data.multimodal import ImageTextDataset
from trainformer.data.text.encode import IGNORE_INDEX, TRAIN_ON
from trainformer.eval.generation import exact_match
from trainformer.losses.tokens import TokenLoss, linear_cross_entropy, token_cross_entropy
from trainformer.models.language import OutputStates
from trainformer.models.modes import eval_mode
from trainformer.tasks.language.prediction import TokenPrediction
from trainformer.tasks.multimodal.image_text_records import open_image
from trainformer.tasks.multimodal.image_text_task import ProcessorTask
from trainformer.tasks.multimodal.pairs import EncodedStream
from trainformer.tasks.multimodal.vlm_data import ImageTextExamples, collate, flat_pixels, with_image
from trainformer.tasks.multimodal.vlm_encode import Block, ImageTextEncoder
from trainformer.tasks.multimodal.vlm_parts import (
    check_parts,
    freeze_parts,
    parameters_without_gradient,
    seeing_parameters,
)

logger = logging.getLogger("trainformer")

_TYPES = "mm_token_type_ids"  # which tokens are images: models that count positions in height and width want to know
_NEW_TOKENS = 64
_BLANK_SIDE = 56


@dataclass(eq=False)
class VLM(ProcessorTask, TokenPrediction):
    """Train a vision-language model (LLaVA, Qwen2-VL, Qwen2.5-VL, ...) of transformers, from scratch or further.

    `model_name` is a name on the hub, a folder, a configuration (random weights) or a model; the processor is that of
    the same name unless `processor` says otherwise. Data are those of `ImageTextDataset`, or any data set of records
    with `image` or `images` and `messages`, `prompt` and `completion`, or a caption under `text`; records without
    images may be among them. `train_on` says which tokens are learned: ``"auto"`` means the answers. Tokens of images
    are never learned and never cut; `image_options` (`max_pixels`, `size`, ...) say how many there are.

    `freeze` names parts that stay as they are: "vision", "projector", "language". ``"auto"`` freezes the vision tower
    of a model that is loaded by name, and nothing of others. An adapter freezes everything but itself.

    Evaluation gives loss, accuracy and perplexity by token. With `generate_metrics` it also generates an answer to each
    record's last question and counts how many are right to the letter: `exact_match`. `generate_options` are those of
    transformers (`max_new_tokens`, `num_beams`, ...).
    """

    model_name: Any = "llava-hf/llava-1.5-7b-hf"
    adapter: Adapter | None = None
    max_length: int = 2048
    _: KW_ONLY
    processor: Any = None
    train_on: str = "auto"
    freeze: str | Sequence[str] = "auto"
    image_options: dict[str, Any] = field(default_factory=dict)
    generate_metrics: bool = False
    generate_options: dict[str, Any] = field(default_factory=dict)
    chunk_tokens: int | None = None
    label_smoothing: float = 0.0
    dtype: str | None = None  # of the weights: fp32 unless it says bf16 or fp16
    attention: str | None = None  # eager, sdpa, flash_attention_2, ...
    model_kwargs: dict[str, Any] = field(default_factory=dict)

    kind = "vlm"
    shifted = True

    def __post_init__(self) -> None:
        self._begin()
        if self.train_on not in TRAIN_ON:
            hint = did_you_mean(str(self.train_on), TRAIN_ON)
            raise BadArgument(expected(f"train_on to be one of {', '.join(TRAIN_ON)}", self.train_on, hint))
        if self.chunk_tokens is not None and self.chunk_tokens < 0:
            raise BadArgument(expected("chunk_tokens to be at least 0, or None", self.chunk_tokens))
        self._frozen = self._parts_to_freeze()
        if self.adapter is not None:
            self.adapter.check(kind=self.kind, model=self.model_name)
        self._states = OutputStates(chunked=self.chunk_tokens != 0)
        self._encoder: ImageTextEncoder | None = None
        self._blank: Block | None = None
        self._sees = False  # whether anything is trained that only images give gradients to

    def _parts_to_freeze(self) -> tuple[str, ...]:
        if self.freeze == "auto":
            return ("vision",) if isinstance(self.model_name, str | Path) and self.adapter is None else ()
        names = check_parts(self.freeze)
        if names and self.adapter is not None:
            what = "freeze='auto' with an adapter, which freezes everything but itself"
            raise BadArgument(expected(what, self.freeze, "target_modules of the adapter say what is trained."))
        return names

    # -- the model -----------------------------------------------------------------------------------------

    def _load(self) -> nn.Module:
        model = super()._load()
        freeze_parts(model, self._frozen)
        if seeing_parameters(model):
            self._freeze_unused(model)
        self._sees = bool(seeing_parameters(model))
        return model

    def _freeze_unused(self, model: nn.Module) -> None:
        """Parameters that want gradients and never get any would stop distributed training, which waits for them."""
        unused = parameters_without_gradient(model, self._blank_image().pixels)
        for name in unused:
            model.get_parameter(name).requires_grad_(False)
        if unused:
            logger.info(
                "%d parameters of the vision tower are of no use to the model and are not trained: %s, ...",
                len(unused), unused[0],
            )  # fmt: skip

    # -- data ----------------------------------------------------------------------------------------------

    def load_data(self, path: str) -> Any:
        """Images with text by path or name; see `ImageTextDataset`."""
        return ImageTextDataset(path)

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Records as tokens and pixels; without prompts in training."""
        if is_stream(dataset):
            encode = self.encoder.encode if train else self.encoder.encode_asked
            return EncodedStream(dataset, encode, shuffle=train)
        name = "training data" if train else "validation data"
        return ImageTextExamples(dataset, self.encoder, asked=not train, name=name)

    @property
    def encoder(self) -> ImageTextEncoder:
        """What makes tokens and pixels of records."""
        if self._encoder is None:
            self._encoder = ImageTextEncoder(
                self.preprocessor,
                max_length=self.max_length,
                train_on=self.train_on,
                image_options=self.image_options,
            )
        return self._encoder

    def collate_fn(self, examples: list[Any]) -> dict[str, Any]:
        """Padded tokens, and pixels by sample.

        The last sample always has an image where the vision tower learns, if need be a blank one behind its end: with
        several processes each must give gradients to the same parameters, also if its texts are without images.
        """
        assert self.model is not None  # which is loaded by now, and tells what is trained
        if self._sees and "prompt" not in examples[-1] and not examples[-1]["pixels"]:
            examples = [*examples[:-1], with_image(examples[-1], self._blank_image())]
        typed = _TYPES in self.preprocessor.model_input_names
        return collate(examples, self.text.pad_token_id, image_id=self.encoder.image_id if typed else None)

    def _blank_image(self) -> Block:
        if self._blank is None:
            self._blank = self.encoder.block(open_image(torch.full((3, _BLANK_SIDE, _BLANK_SIDE), 128).byte()))
        return self._blank

    # -- steps ---------------------------------------------------------------------------------------------

    def eval_step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Loss and accuracy by token; with `generate_metrics` also the tokens of answers."""
        metrics = super().eval_step(batch)
        if not self.generate_metrics:
            return metrics
        # One more than can be generated: an answer that is longer must not look equal.
        return {**metrics, **self.predict_step(batch), "wanted": _to_width(batch["answers"], self._new_tokens + 1)}

    def predict_step(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """The tokens that are generated for each prompt, filled up with padding."""
        made = self._generated(batch, **self.generate_options)
        return {"generated": _to_width(made, self._new_tokens, self.text.pad_token_id)}

    def on_eval_end(self, rows: dict[str, Any]) -> dict[str, float]:
        """The share of answers that are right to the letter."""
        wanted = self.text.batch_decode([row[row != IGNORE_INDEX] for row in rows["wanted"]], skip_special_tokens=True)
        return {"exact_match": exact_match(self._decoded(rows["generated"]), wanted)}

    def _training_options(self) -> dict[str, Any]:
        return {"label_smoothing": self.label_smoothing}

    def _loss(self, batch: Mapping[str, Any], **options: Any) -> TokenLoss:
        inputs = {"input_ids": batch["input_ids"], **flat_pixels(batch)}
        if _TYPES in batch:
            # Else no mask: padding is on the right, where no token of a causal model looks, and has no labels.
            inputs |= {_TYPES: batch[_TYPES], "attention_mask": batch["attention_mask"]}
        states, head = self._states(self.model, inputs)
        if head is None:
            return token_cross_entropy(states, batch["labels"], **options)
        chunk = self.chunk_tokens or None
        return linear_cross_entropy(states, head.weight, batch["labels"], bias=head.bias, chunk_tokens=chunk, **options)

    # -- generating ----------------------------------------------------------------------------------------

    def generate(
        self, images: Any, prompts: str | Sequence[str] = "", max_new_tokens: int | None = None, **options: Any
    ) -> list[str]:
        """Answers to prompts about images; `options` go to transformers' `generate` (`do_sample`, `num_beams`, ...).

        `images` has an image, a list of images, or None for each prompt. One prompt may go with many images.
        """
        shown = list(images) if isinstance(images, list | tuple) else [images]
        asked = [prompts] * len(shown) if isinstance(prompts, str) else list(prompts)
        if not shown or len(shown) != len(asked):
            raise BadArgument(expected(f"an image, or a list of images, for each of {len(asked)} prompts", len(shown)))
        records = [{"images": _as_list(image), "prompt": prompt} for image, prompt in zip(shown, asked, strict=True)]
        batch = self.collate_fn(
            [self.encoder.encode_asked(record, f"prompt {place}") for place, record in enumerate(records)]
        )
        options = {**self.generate_options, **options}
        if max_new_tokens is not None:
            options["max_new_tokens"] = max_new_tokens
        return self._decoded(self._generated(batch, **options))

    @property
    def _new_tokens(self) -> int:
        return int(self.generate_options.get("max_new_tokens", _NEW_TOKENS))

    def _decoded(self, tokens: Tensor) -> list[str]:
        return [text.strip() for text in self.text.batch_decode(tokens, skip_special_tokens=True)]

    @torch.no_grad()
    def _generated(self, batch: Mapping[str, Any], **options: Any) -> Tensor:
        """New tokens, without the prompts."""
        model: Any = unwrap_model(self.model)
        inputs = {"input_ids": batch["prompt_ids"], "attention_mask": batch["prompt_mask"], **flat_pixels(batch)}
        if "prompt_types" in batch:
            inputs[_TYPES] = batch["prompt_types"]
        ends = getattr(model.generation_config, "eos_token_id", None)
        defaults = {
            "max_new_tokens": _NEW_TOKENS,
            "do_sample": False,
            "pad_token_id": self.text.pad_token_id,
            "eos_token_id": self.text.eos_token_id if ends is None else ends,
        }
        with eval_mode(model):
            made = model.generate(
                **{name: value.to(model.device) for name, value in inputs.items()}, **{**defaults, **options}
            )
        return made[:, batch["prompt_ids"].shape[1] :]


def _as_list(image: Any) -> list[Any]:
    if image is None:
        return []
    return list(image) if isinstance(image, list | tuple) else [image]


def _to_width(rows: Tensor, width: int, value: int = IGNORE_INDEX) -> Tensor:
    """Rows of tokens, cut or filled up: those of a whole set are stacked.

    >>> _to_width(torch.tensor([[5, 6]]), 3, 0).tolist(), _to_width(torch.tensor([[5, 6]]), 1).tolist()
    ([[5, 6, 0]], [[5]])
    """
    return F.pad(rows, (0, width - rows.shape[1]), value=value)
