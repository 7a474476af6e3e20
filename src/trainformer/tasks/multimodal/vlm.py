"""Vision-language models: visual question answering and captioning.

Encoding records is in `vlm_encode`, datasets and batches in `vlm_data`.
"""

from __future__ import annotations

import inspect
import logging
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.adapters.base import is_adapted, unwrap_model
from trainformer.adapters.targets import language_model_name
from trainformer.core import BadArgument
from trainformer.core.errors import check_choice, expected
from trainformer.data.labels import is_stream
from trainformer.data.multimodal import ImageTextDataset
from trainformer.data.text.encode import IGNORE_INDEX, TRAIN_ON
from trainformer.eval.generation import exact_match
from trainformer.losses.tokens import TokenLoss
from trainformer.models.language import OutputStates
from trainformer.models.modes import eval_mode
from trainformer.tasks.language.base import TokenPredictionTask, data_name, to_width
from trainformer.tasks.multimodal.image_text_records import open_image
from trainformer.tasks.multimodal.pairs import EncodedStream
from trainformer.tasks.multimodal.processor import ProcessorTask
from trainformer.tasks.multimodal.vlm_data import ImageTextExamples, collate, flat_pixels, with_image
from trainformer.tasks.multimodal.vlm_encode import Block, ImageTextEncoder

logger = logging.getLogger("trainformer")

_TYPES = "mm_token_type_ids"  # which tokens are images: for models with 2D positions
PARTS = ("vision", "projector", "language")
_TOWERS = ("vision_tower", "visual", "vision_model", "vision_encoder", "image_tower")  # transformers' names
_PROJECTORS = ("projector", "merger", "connector", "aligner")
_NEW_TOKENS = 64
_BLANK_SIDE = 56


@dataclass(eq=False)
class VLM(ProcessorTask, TokenPredictionTask):
    """Train a vision-language model of transformers (LLaVA, Qwen2-VL, Qwen2.5-VL, ...), pretrained or from scratch.

    `model_name` is a hub name, a folder, a config (random weights) or a model; `processor` defaults to the one of
    `model_name`. Data comes from `ImageTextDataset`, or any dataset of records with `image` or `images` and
    `messages`, `prompt` and `completion`, or a caption in `text`; records without images can be mixed in. `train_on`
    selects the supervised tokens: ``"auto"`` means the answers. Image tokens are never supervised and never truncated;
    `image_options` (`max_pixels`, `size`, ...) determine their number.

    `freeze` lists frozen parts: "vision", "projector", "language". ``"auto"`` freezes the vision tower of a model that
    is loaded by name, and nothing otherwise. An adapter freezes everything but itself.

    Evaluation reports loss, accuracy and perplexity per token. With `generate_metrics` it also generates an answer to
    the last question of each record and reports `exact_match`. `generate_options` are passed to transformers'
    `generate` (`max_new_tokens`, `num_beams`, ...).
    """

    model_name: Any = "llava-hf/llava-1.5-7b-hf"
    max_length: int = 2048
    _: KW_ONLY
    train_on: str = "auto"
    freeze: str | Sequence[str] = "auto"
    image_options: dict[str, Any] = field(default_factory=dict)
    generate_metrics: bool = False
    generate_options: dict[str, Any] = field(default_factory=dict)
    chunk_tokens: int | None = None
    label_smoothing: float = 0.0

    kind = "vlm"
    shifted = True

    def __post_init__(self) -> None:
        self._init_task()
        check_choice("train_on", self.train_on, TRAIN_ON)
        self._frozen = self._parts_to_freeze()
        if self.adapter is not None:
            self.adapter.check(kind=self.kind, model=self.model_name)
        self._states = OutputStates(self.chunk_tokens)
        self._trains_vision = False  # whether there are trainable parameters that only images give gradients to

    def _parts_to_freeze(self) -> tuple[str, ...]:
        if self.freeze == "auto":
            return ("vision",) if isinstance(self.model_name, str | Path) and self.adapter is None else ()
        names = check_parts(self.freeze)
        if names and self.adapter is not None:
            what = "freeze='auto' with an adapter, which freezes everything but itself"
            raise BadArgument(expected(what, self.freeze, "Set target_modules of the adapter instead."))
        return names

    # -- the model -----------------------------------------------------------------------------------------

    def _load(self) -> nn.Module:
        model = super()._load()
        frozen = self._frozen if self.freeze != "auto" or not is_adapted(model) else ()
        for name, part in parts_of(model).items() if frozen else ():
            if part in frozen:
                model.get_parameter(name).requires_grad_(False)
        if vision_parameters(model):
            # Freeze parameters that never receive a gradient: DDP would wait for it.
            unused = parameters_without_gradient(model, self._blank_image.pixels)
            for name in unused:
                model.get_parameter(name).requires_grad_(False)
            if unused:
                what = "parameters of the vision tower never receive a gradient and are frozen"
                logger.info("%d %s: %s, ...", len(unused), what, unused[0])
        self._trains_vision = bool(vision_parameters(model))
        return model

    # -- data ----------------------------------------------------------------------------------------------

    def load_data(self, path: str) -> Any:
        return ImageTextDataset(path)

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Encode records as tokens and pixels, with prompts for evaluation."""
        if is_stream(dataset):
            encode = self.encoder.encode if train else self.encoder.encode_with_prompt
            return EncodedStream(dataset, encode, shuffle=train)
        return ImageTextExamples(dataset, self.encoder, prompts=not train, name=data_name(train))

    @cached_property
    def encoder(self) -> ImageTextEncoder:
        """The encoder of records, built on first access."""
        options = {"train_on": self.train_on, "image_options": self.image_options}
        return ImageTextEncoder(self.preprocessor, max_length=self.max_length, **options)  # type: ignore[arg-type]

    def collate_fn(self, examples: list[Any]) -> dict[str, Any]:
        # If the vision tower is trained, the last sample always has an image, if need be a blank one after its end:
        # all ranks must give gradients to the same parameters, also if their texts have no images.
        assert self.model is not None  # loading it sets _trains_vision
        if self._trains_vision and "prompt" not in examples[-1] and not examples[-1]["pixels"]:
            examples = [*examples[:-1], with_image(examples[-1], self._blank_image)]
        typed = _TYPES in self.preprocessor.model_input_names
        return collate(examples, self.text_tokenizer.pad_token_id, image_id=self.encoder.image_id if typed else None)

    @cached_property
    def _blank_image(self) -> Block:
        return self.encoder.block(open_image(torch.full((3, _BLANK_SIDE, _BLANK_SIDE), 128).byte()))

    # -- steps ---------------------------------------------------------------------------------------------

    def eval_step(self, batch: Mapping[str, Any]) -> dict[str, Any]:
        """Loss and token accuracy; with `generate_metrics` also generated answers."""
        metrics = super().eval_step(batch)
        if not self.generate_metrics:
            return metrics
        # One more token than can be generated, so that a longer answer does not match.
        return {**metrics, **self.predict_step(batch), "target": to_width(batch["answers"], self._new_tokens + 1)}

    def predict_step(self, batch: Mapping[str, Any]) -> dict[str, Tensor]:
        """Generated tokens for each prompt, padded to a fixed width."""
        tokens = self._generate_tokens(batch, **self.generate_options)
        return {"generated": to_width(tokens, self._new_tokens, self.text_tokenizer.pad_token_id)}

    def on_eval_end(self, rows: dict[str, Any]) -> dict[str, float]:
        """The fraction of answers that match exactly."""
        targets = self.text_tokenizer.batch_decode(
            [row[row != IGNORE_INDEX] for row in rows["target"]], skip_special_tokens=True
        )
        return {"exact_match": exact_match(self._decode(rows["generated"]), targets)}

    def _loss(self, batch: Mapping[str, Any], **options: Any) -> TokenLoss:
        inputs = {"input_ids": batch["input_ids"], **flat_pixels(batch)}
        if _TYPES in batch:
            # Otherwise no mask: padding is on the right, where no token of a causal model attends, and has no labels.
            inputs |= {_TYPES: batch[_TYPES], "attention_mask": batch["attention_mask"]}
        return self._causal_loss(self._states, inputs, batch["labels"], **options)

    # -- generation ----------------------------------------------------------------------------------------

    def generate(
        self, images: Any, prompts: str | Sequence[str] = "", max_new_tokens: int | None = None, **options: Any
    ) -> list[str]:
        """Answer prompts about images; `options` are passed to transformers' `generate` (`do_sample`, ...).

        `images` has an image, a list of images, or None for each prompt. A single prompt applies to all images.
        """
        inputs = list(images) if isinstance(images, list | tuple) else [images]
        texts = [prompts] * len(inputs) if isinstance(prompts, str) else list(prompts)
        if not inputs or len(inputs) != len(texts):
            raise BadArgument(expected(f"an image, or a list of images, for each of {len(texts)} prompts", len(inputs)))
        records = [{"images": _as_list(image), "prompt": prompt} for image, prompt in zip(inputs, texts, strict=True)]
        batch = self.collate_fn(
            [self.encoder.encode_with_prompt(record, f"prompt {index}") for index, record in enumerate(records)]
        )
        options = {**self.generate_options, **options}
        if max_new_tokens is not None:
            options["max_new_tokens"] = max_new_tokens
        return self._decode(self._generate_tokens(batch, **options))

    @property
    def _new_tokens(self) -> int:
        return int(self.generate_options.get("max_new_tokens", _NEW_TOKENS))

    def _decode(self, tokens: Tensor) -> list[str]:
        return [text.strip() for text in self.text_tokenizer.batch_decode(tokens, skip_special_tokens=True)]

    def _generate_tokens(self, inputs: Mapping[str, Any], **options: Any) -> Tensor:
        """Generated tokens without the prompts of a batch."""
        model: Any = unwrap_model(self.model)
        prompts = {"input_ids": inputs["prompt_ids"], "attention_mask": inputs["prompt_mask"], **flat_pixels(inputs)}
        if "prompt_types" in inputs:
            prompts[_TYPES] = inputs["prompt_types"]
        ends = getattr(model.generation_config, "eos_token_id", None)
        end = self.text_tokenizer.eos_token_id if ends is None else ends
        options = {"max_new_tokens": _NEW_TOKENS, "eos_token_id": end, **options}
        return super()._generate_tokens(prompts, **options)[:, inputs["prompt_ids"].shape[1] :]


def _as_list(image: Any) -> list[Any]:
    if image is None:
        return []
    return list(image) if isinstance(image, list | tuple) else [image]


# -- parts of the model ------------------------------------------------------------------------------------


def check_parts(freeze: str | Sequence[str]) -> tuple[str, ...]:
    """Validate the names of parts to freeze.

    >>> check_parts("vision")
    ('vision',)
    """
    names = (freeze,) if isinstance(freeze, str) else tuple(freeze)
    for name in names:
        check_choice("freeze, if not 'auto',", name, PARTS)
    if set(names) == set(PARTS):
        raise BadArgument(expected("freeze to leave something to train", list(names), "Leave one of them out."))
    return names


def parts_of(model: nn.Module) -> dict[str, str]:
    """Return the part that each parameter belongs to, by name.

    Whatever is neither language model nor vision tower is the projector. In Qwen-VL it is inside the vision tower.
    """
    language = language_model_name(model)
    get = getattr(model, "get_output_embeddings", None)
    head = get() if callable(get) else None
    in_head = {id(parameter) for parameter in head.parameters()} if isinstance(head, nn.Module) else set()
    return {
        name: "language" if name.startswith(f"{language}.") or id(parameter) in in_head else _part(name)
        for name, parameter in model.named_parameters()
    }


def _part(name: str) -> str:
    if "prompt_encoder" in name.split("."):  # peft's prefix tuning
        return "language"
    if any(word in name for word in _PROJECTORS):
        return "projector"
    return "vision" if any(step in _TOWERS for step in name.split(".")) else "projector"


def vision_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trainable parameters of vision tower and projector, which only images give gradients to."""
    parts = parts_of(model)
    return {n: p for n, p in model.named_parameters() if p.requires_grad and parts[n] != "language"}


def parameters_without_gradient(model: nn.Module, pixels: Mapping[str, Tensor]) -> list[str]:
    """Names of trainable vision parameters that receive no gradient, found by one backward pass.

    LLaVA, for example, reads its vision tower before the last layer, so that layer is unused.
    """
    trained = vision_parameters(model)
    get_features: Any = getattr(unwrap_model(model), "get_image_features", None)
    if not trained or get_features is None:
        return []
    device = next(iter(trained.values())).device
    known = inspect.signature(get_features).parameters
    inputs = {name: value.to(device) for name, value in pixels.items() if name in known}
    with eval_mode(model), torch.enable_grad():
        features = get_features(**inputs)
        features = getattr(features, "pooler_output", features)
        features = features if isinstance(features, Tensor) else torch.cat([part.flatten() for part in features])
        gradients = torch.autograd.grad(features.float().sum(), list(trained.values()), allow_unused=True)
    return [name for name, gradient in zip(trained, gradients, strict=True) if gradient is None]
