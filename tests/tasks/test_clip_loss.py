"""CLIP's loss: that of transformers, whatever the ranks and equal captions, with a temperature within limits."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import clip_toys
import pytest
import shapes
import torch
import torch.nn.functional as F
from clip_toys import SCENES, batch_of, make, trainer_for
from torch import Tensor

from ranks import on_ranks
from trainformer.run import run_of
from trainformer.tasks.multimodal.contrastive import clip_loss


@pytest.mark.parametrize("family", ["clip", "siglip", "chinese_clip"])
def test_loss_and_gradients_are_those_of_transformers(family: str) -> None:
    """From the files' pixels and texts on: transformers gets its own processor's inputs, masks included."""
    data = shapes.Pairs(SCENES, side=41)
    task = make(family)
    task.model.train()
    loss, weight, metrics = task.train_step(batch_of(task, data))
    (loss / weight).backward()
    mine = {name: p.grad for name, p in task.model.named_parameters()}
    task.model.zero_grad()
    padding: Any = {"padding": "max_length", "max_length": 16} if family == "siglip" else {"padding": True}
    texts = [scene.caption for scene in SCENES]
    inputs = task.preprocessor(text=texts, images=data.images, return_tensors="pt", **padding)
    if family == "siglip":
        inputs.pop("attention_mask")  # its own tokenizer makes none
    theirs = task.model(**inputs, return_loss=True).loss
    theirs.backward()
    assert weight == len(SCENES)
    torch.testing.assert_close(loss / weight, theirs)
    assert metrics["logit_scale"] == pytest.approx(task.model.logit_scale.exp().item())
    for name, p in task.model.named_parameters():
        if p.grad is None:
            assert mine[name] is None, name
        else:
            torch.testing.assert_close(mine[name], p.grad, rtol=1e-4, atol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("family", "freeze"), [("clip", None), ("clip", "image"), ("siglip", None), ("siglip", "text")]
)
def test_every_parameter_is_trained_or_frozen(family: str, freeze: str | None) -> None:
    task = make(family, freeze=freeze)
    task.train_step(batch_of(task, shapes.Pairs(SCENES))).sum.backward()
    frozen = set()
    for name, p in task.model.named_parameters():
        assert p.requires_grad == (p.grad is not None and bool(p.grad.any())), name
        frozen |= set() if p.requires_grad else {name.split(".")[0]}
    towers = {"image": {"vision_model", "visual_projection"}, "text": {"text_model", "text_projection"}, None: set()}
    present = {name for name, _ in task.model.named_children()}
    assert frozen == towers[freeze] & present


def by_hand(images: Tensor, texts: Tensor, scale: float, captions: list[int]) -> float:
    """CLIP's loss written out pair by pair; others with an equal caption are passed over."""
    total = 0.0
    for rows, others in ((images, texts), (texts, images)):
        for i in range(len(rows)):
            logits = [scale * float(F.cosine_similarity(rows[i], other, dim=0)) for other in others]
            against = [logits[j] for j in range(len(others)) if j == i or captions[j] != captions[i]]
            total += (math.log(sum(map(math.exp, against))) - logits[i]) / 2
    return total / len(images)


def by_hand_siglip(images: Tensor, texts: Tensor, scale: float, bias: float, captions: list[int]) -> float:
    """The same for SigLIP: a yes for one's own, a no for all others."""
    total = 0.0
    for i, text in enumerate(texts):
        for j, image in enumerate(images):
            if j == i or captions[j] != captions[i]:
                logit = scale * float(F.cosine_similarity(text, image, dim=0)) + bias
                total += math.log(1 + math.exp(-logit if j == i else logit))
    return total / len(images)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_equal_captions_are_no_negatives_unless_asked_for(family: str) -> None:
    scenes = [SCENES[0], SCENES[1], SCENES[0], SCENES[2], SCENES[0]]
    task = make(family)
    batch = batch_of(task, shapes.Pairs(scenes))
    numbers = [scene.caption for scene in scenes]
    kinds = [numbers.index(caption) for caption in numbers]
    assert (batch["caption"] == batch["caption"].T).tolist() == [[a == b for b in kinds] for a in kinds]
    losses = {}
    with torch.no_grad():
        output = task.model(pixel_values=task._normalize(batch["pixel_values"]), input_ids=batch["input_ids"][:, 0])
        for same in ("ignore", "negative"):
            task.same_caption = same
            losses[same] = float(task.train_step(batch).sum) / 5
    model: Any = task.model
    pair = output.image_embeds.double(), output.text_embeds.double()
    for same, captions in (("ignore", kinds), ("negative", list(range(5)))):
        if family == "clip":
            want = by_hand(*pair, model.logit_scale.exp().item(), captions)
        else:
            want = by_hand_siglip(*pair, model.logit_scale.exp().item(), model.logit_bias.item(), captions)
        assert losses[same] == pytest.approx(want, rel=1e-5)
    assert losses["ignore"] < losses["negative"] - 1e-4


def test_two_ranks_compute_what_one_computes(tmp_path: Path) -> None:
    together, alone = on_ranks(clip_toys.results, 2, tmp_path), clip_toys.results(0, 1)
    for name, want in alone.items():
        if name.startswith("alone"):
            assert not torch.allclose(together[0][name], want, rtol=1e-3), name
        else:
            torch.testing.assert_close(together[0][name], want, rtol=1e-8, atol=1e-10, msg=name)
    assert {"clip.scale", "siglip_same.bias", "siglip.text_tower"} < set(alone)
    assert min(alone[f"{loss}.image_tower"].abs().max() for loss in ("clip", "clip_same", "siglip")) > 1e-2


def test_half_precision_does_not_reach_the_loss() -> None:
    rows = torch.randn(6, 8, generator=torch.Generator().manual_seed(0))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = clip_loss(rows, rows.flip(1), torch.tensor(4.6))
    assert torch.equal(loss, clip_loss(rows, rows.flip(1), torch.tensor(4.6)))


# -- the temperature ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("family", "largest", "want"), [("clip", None, 100.0), ("clip", 50.0, 50.0), ("siglip", None, 200.0)]
)
def test_the_temperature_is_learned_within_limits(family: str, largest: float | None, want: float) -> None:
    task = make(family, max_scale=largest)
    with torch.no_grad():
        task.model.logit_scale.fill_(math.log(200.0))
    trainer_for(task, max_steps=1, lr=1e-7).fit()
    assert task.model.logit_scale.exp().item() == pytest.approx(want, rel=1e-4)
    with torch.no_grad():
        task.model.logit_scale.fill_(2.0)
    before = task.model.logit_scale.clone()
    task.on_step_end(1, 1)
    assert torch.equal(task.model.logit_scale, before)


def test_the_temperature_is_trained_and_not_decayed() -> None:
    trainer = trainer_for(make(), max_steps=2, weight_decay=0.1)
    before = trainer.task.model.logit_scale.item()
    trainer.fit()
    assert trainer.task.model.logit_scale.item() != before
    groups = run_of(trainer).backend.optimizer.param_groups
    mine = [group for group in groups if any(p is trainer.task.model.logit_scale for p in group["params"])]
    assert [group["weight_decay"] for group in mine] == [0.0]
