"""Small models with two towers, and what two processes compute of pairs together, or one alone."""

from __future__ import annotations

from typing import Any

import shapes
import torch
from torch import Tensor

from ranks import all_reduced, share_of
from trainformer import Trainer
from trainformer.tasks.multimodal.clip import CLIP
from trainformer.tasks.multimodal.contrastive import clip_loss, siglip_loss

SCENES = shapes.scenes()[::9]  # 23 of them
SIDE, PAIRS = 32, 12
_TOWER = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
_TEXT = {**_TOWER, "vocab_size": 40, "max_position_embeddings": 16}
_VISION = {**_TOWER, "image_size": SIDE, "patch_size": 8}


def processor(family: str = "clip", side: int = SIDE) -> Any:
    """The processor of a family, for words of shapes and images of this size."""
    import shapes
    import transformers

    square = {"height": side, "width": side}
    if family == "siglip":
        images = transformers.SiglipImageProcessor(size=square)
        return transformers.SiglipProcessor(image_processor=images, tokenizer=shapes.word_tokenizer())
    images = transformers.CLIPImageProcessor(size={"shortest_edge": side}, crop_size=square)
    return transformers.CLIPProcessor(image_processor=images, tokenizer=shapes.word_tokenizer())


def config(family: str = "clip") -> Any:
    """A configuration of a few thousand parameters."""
    import transformers

    ends = {"bos_token_id": 2, "eos_token_id": 3, "pad_token_id": 0}
    if family == "clip":
        return transformers.CLIPConfig(text_config={**_TEXT, **ends}, vision_config=_VISION, projection_dim=32)
    if family == "siglip":
        return transformers.SiglipConfig(text_config={**_TEXT, **ends}, vision_config=_VISION)
    quiet = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.ChineseCLIPConfig(text_config={**_TEXT, **quiet}, vision_config=_VISION, projection_dim=32)


def make(family: str = "clip", **options: Any) -> CLIP:
    """A small task with its model built, always the same one."""
    torch.manual_seed(0)
    model = options.pop("model", None) or config(family)
    task = CLIP(model, **{"processor": processor(family), **options})
    assert task.model is not None
    return task


def batch_of(task: CLIP, data: Any, train: bool = True) -> dict[str, Tensor]:
    """All of the data as one batch."""
    prepared = task.prepare_dataset(data, train=train)
    return task.collate_fn([prepared[index] for index in range(len(prepared))])


def trainer_for(task: CLIP, data: Any = None, **options: Any) -> Trainer:
    """Six steps with batches of four."""
    import text_toys  # not for the processes that only compute losses

    return text_toys.trainer_for(task, shapes.Pairs(SCENES) if data is None else data, **{"lr": 1e-3, **options})


def problem() -> dict[str, Tensor]:
    """A linear tower for images and one for texts, pairs, and the numbers of captions, some of which are equal."""
    generator = torch.Generator().manual_seed(3)
    sizes = {"image_tower": (10, 6), "text_tower": (8, 6), "images": (PAIRS, 10), "texts": (PAIRS, 8)}
    numbers = {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in sizes.items()}
    captions = torch.arange(PAIRS) + 100
    captions[[0, 3, 7]] = 5  # within a rank, and across
    captions[[1, 11]] = 6
    numbers["texts"][[3, 7]] = numbers["texts"][[0, 0]]
    numbers["texts"][11] = numbers["texts"][1]
    return numbers | {"captions": captions}


def results(rank: int, world: int) -> dict[str, Tensor]:
    """Losses of one rank's share of the pairs, and their gradients in everything that is learned."""
    whole = problem()
    share = share_of(PAIRS, rank, world)
    learned = {name: whole[name].requires_grad_() for name in ("image_tower", "text_tower")}
    learned |= {
        name: torch.tensor(value, dtype=torch.float64, requires_grad=True)
        for name, value in (("scale", 1.5), ("bias", -2.0))
    }
    images = whole["images"][share] @ learned["image_tower"]
    texts = whole["texts"][share] @ learned["text_tower"]
    scale, bias, captions = learned["scale"], learned["bias"], whole["captions"][share]
    losses = {
        "clip": clip_loss(images, texts, scale, reduction="sum"),
        "clip_same": clip_loss(images, texts, scale, captions, reduction="sum"),
        "siglip": siglip_loss(images, texts, scale, bias, reduction="sum"),
        "siglip_same": siglip_loss(images, texts, scale, bias, captions, reduction="sum"),
        "alone": clip_loss(images, texts, scale, reduction="sum", gather=False),
    }
    found: dict[str, Tensor] = {}
    for name, loss in losses.items():
        gradients = torch.autograd.grad(loss / PAIRS, list(learned.values()), retain_graph=True, allow_unused=True)
        found[name] = loss.detach() / PAIRS
        known = zip(learned, gradients, strict=True)
        found |= {f"{name}.{part}": gradient for part, gradient in known if gradient is not None}
    return all_reduced(found)
