"""CLIP: pixels are the processor's, recall is counted over the whole set, runs resume bitwise, and it learns."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import shapes
import torch
import torch.nn.functional as F
import transformers
from clip_toys import SCENES, batch_of, config, make, processor, trainer_for
from peft import PeftModel
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader

import text_toys as toys
from trainformer import Trainer
from trainformer.adapters import LoRA, PrefixTuning
from trainformer.core.errors import BadArgument, DataError
from trainformer.data import ImageFolder
from trainformer.tasks.multimodal.clip import CLIP
from trainformer.tasks.multimodal.contrastive import find_matches, retrieval_metrics
from trainformer.tasks.multimodal.pairs import split_pair
from trainformer.tasks.multimodal.processor import Pixels

# -- images and captions -----------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["CLIPImageProcessor", "CLIPImageProcessorPil", "SiglipImageProcessor"])
def test_pixels_are_those_of_the_processor(kind: str) -> None:
    square = {"height": 24, "width": 24}
    sizes = {"size": square} if kind.startswith("Siglip") else {"size": {"shortest_edge": 24}, "crop_size": square}
    images = getattr(transformers, kind)(**sizes)
    task = make(processor=transformers.CLIPProcessor(image_processor=images, tokenizer=shapes.word_tokenizer()))
    rng = np.random.default_rng(0)
    for shape in ((50, 31, 3), (24, 24, 3), (17, 40)):
        image = Image.fromarray(rng.integers(0, 256, shape, dtype=np.uint8))
        pixels = Pixels(images)(image)
        assert pixels.dtype == torch.uint8
        want = images(image.convert("RGB"), return_tensors="pt")["pixel_values"][0]
        torch.testing.assert_close(task.get_eval_transforms()(pixels), want, rtol=1e-5, atol=1e-6)


def test_training_crops_lightly_and_by_sample() -> None:
    task = make()
    pixels = batch_of(task, shapes.Pairs(SCENES[:4]))["pixel_values"]
    augment = task.get_train_transforms()
    plain, first = task.get_eval_transforms()(pixels), augment(pixels, keys=[1, 2, 3, 4])
    assert torch.equal(augment(pixels[2:], keys=[3, 4]), first[2:])
    assert not torch.equal(augment(pixels, keys=[5, 6, 7, 8]), first)
    assert 0.01 < (first - plain).abs().mean() < 0.5
    assert make(augment=None).get_train_transforms()(pixels).equal(plain)
    assert augment(plain) is plain  # what is normalised is ready
    pixels[:, :, :, :16] //= 4
    views = augment(pixels.repeat(8, 1, 1, 1), keys=range(32))
    assert bool((views[..., :8].mean((1, 2, 3)) < views[..., -8:].mean((1, 2, 3))).all())  # left stays left


def test_samples_in_every_form() -> None:
    image = SCENES[0].draw()
    assert split_pair((image, "a cat")).captions == ["a cat"]
    assert split_pair({"image": image, "caption": "a cat"}).text == "a cat"
    several = split_pair({"image": image, "text": "b", "captions": ["a", "b"]})
    assert (several.text, several.captions) == ("b", ["a", "b"])
    assert split_pair((image, 3)).label == 3
    with pytest.raises(DataError, match="one image each"):
        split_pair({"images": [image, image], "text": "two"})


def test_each_epoch_draws_one_of_several_captions() -> None:
    data = [{"image": scene.draw(), "text": scene.captions} for scene in SCENES]
    trainer = trainer_for(make(), data)
    seen = [torch.cat([b["caption"] for b in toys.batches_of(trainer, epoch)]) for epoch in range(2)]
    again = trainer_for(make(), data)
    assert torch.equal(torch.cat([b["caption"] for b in toys.batches_of(again, 1)]), seen[1])
    assert seen[0].shape == (len(SCENES), 1)
    assert len(set(seen[0].flatten().tolist()) & set(seen[1].flatten().tolist())) < len(SCENES)


# -- evaluation --------------------------------------------------------------------------------------------


def brute_force(images: Tensor, captions: list[list[str]], texts: dict[str, Tensor], k: int) -> tuple[float, float]:
    """Recall both ways by sorting lists: an image looks for any of its captions, a caption for any of its images."""
    found = {"image": 0, "text": 0}
    for image, own in zip(images, captions, strict=True):
        order = sorted(texts, key=lambda text, image=image: -float(image @ texts[text]))
        found["image"] += bool(set(order[:k]) & set(own))
    for text, embedding in texts.items():
        order = sorted(range(len(images)), key=lambda i, e=embedding: -float(images[i] @ e))
        found["text"] += any(text in captions[i] for i in order[:k])
    return found["image"] / len(images), found["text"] / len(texts)


@pytest.mark.parametrize("k", [1, 3])
def test_recall_is_that_of_a_brute_force_search(k: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("trainformer.tasks.multimodal.contrastive._CELLS", 100)  # several pieces
    rng = np.random.default_rng(0)
    names = [f"text {i}" for i in range(40)]
    texts = {name: F.normalize(torch.from_numpy(rng.normal(size=8)), dim=0) for name in names}
    captions = [sorted(rng.choice(names, rng.integers(1, 4), replace=False).tolist()) for _ in range(60)]
    captions[7] = [captions[7][0]] * 2  # says the same twice
    used = {text for own in captions for text in own}
    images = F.normalize(
        torch.stack([texts[own[0]] for own in captions]) + torch.from_numpy(rng.normal(0, 0.4, (60, 8)))
    )
    rows, numbers = torch.zeros(60, 3, 8, dtype=torch.float64), torch.zeros(60, 3, dtype=torch.int64)
    for i, own in enumerate(captions):
        for j, text in enumerate(own):
            rows[i, j], numbers[i, j] = texts[text], names.index(text) + 1
    metrics = retrieval_metrics(find_matches(images, rows, numbers), (k,), 10.0)
    want = brute_force(images, captions, {name: texts[name] for name in used}, k)
    assert (metrics[f"image_to_text_recall@{k}"], metrics[f"text_to_image_recall@{k}"]) == pytest.approx(want)
    assert 0.1 < want[0] < 0.95


def test_where_everything_looks_alike_nothing_is_found() -> None:
    rows = torch.ones(20, 4)
    metrics = retrieval_metrics(find_matches(rows, rows.unsqueeze(1), torch.arange(1, 21).unsqueeze(1)), (1, 10))
    assert metrics["image_to_text_recall@10"] == metrics["text_to_image_recall@1"] == 0.0
    assert metrics["image_to_text_median_rank"] == 20.0


def test_the_loss_of_a_set_counts_every_caption_once() -> None:
    rng = torch.Generator().manual_seed(0)
    images, texts = torch.randn(4, 6, generator=rng), torch.randn(3, 6, generator=rng)
    owners = [0, 1, 1, 2]  # two images with one caption
    found = find_matches(images, texts[owners].unsqueeze(1), torch.tensor(owners).unsqueeze(1) + 1)
    logits = 5 * F.normalize(texts) @ F.normalize(images).T
    right = torch.tensor(owners) == torch.arange(3).unsqueeze(1)
    sigmoid = F.binary_cross_entropy_with_logits(logits - 2, right.float(), reduction="sum") / 3
    assert retrieval_metrics(found, (1,), 5.0, -2.0)["loss"] == pytest.approx(sigmoid.item(), rel=1e-5)
    to_text = F.cross_entropy(logits.T, torch.tensor(owners))
    to_image = F.cross_entropy(logits, right / right.sum(1, keepdim=True))
    assert retrieval_metrics(found, (1,), 5.0)["loss"] == pytest.approx((to_text + to_image).item() / 2, rel=1e-5)


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_evaluation_does_not_depend_on_the_batch_size(family: str) -> None:
    """The loss is that of transformers with the whole set as one batch."""
    data = shapes.Pairs(SCENES)
    found = [trainer_for(make(family), val_data=data, eval_batch_size=size).evaluate() for size in (4, len(SCENES))]
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    task = make(family)
    with torch.no_grad():
        batch = batch_of(task, data)
        output = task.model(
            pixel_values=task._normalize(batch["pixel_values"]), input_ids=batch["input_ids"][:, 0], return_loss=True
        )
    assert found[0]["val/loss"] == pytest.approx(output.loss.item(), rel=1e-5)
    right = (output.logits_per_image.argmax(1) == torch.arange(len(SCENES))).double().mean().item()
    assert found[0]["val/image_to_text_recall@1"] == pytest.approx(right)


def test_evaluation_looks_at_all_captions_of_an_image() -> None:
    data = [{"image": s.draw(), "text": s.captions if i % 2 else s.caption} for i, s in enumerate(SCENES[:6][::-1])]
    data.insert(0, {"image": SCENES[9].draw(), "text": [*SCENES[9].captions, "a red ring"]})
    task = make(eval_captions=3)
    batch = batch_of(task, data, train=False)
    assert (batch["caption"] != 0).sum(1).tolist() == [3, 1, 2, 1, 2, 1, 2]
    rows = trainer_for(task, data, val_data=data, eval_batch_size=2).embed()
    assert rows["text_embedding"].shape == (7, 3, 32)
    want = task.embed_texts(SCENES[9].captions)
    torch.testing.assert_close(rows["text_embedding"][0, :2], want, rtol=1e-4, atol=1e-5)


def test_zero_shot_probabilities_are_those_of_transformers() -> None:
    task = make()
    names, images = ["circle", "square", "ring"], [scene.draw(side=37) for scene in SCENES[:5]]
    texts = [f"a red {name}" for name in names]
    inputs = task.preprocessor(text=texts, images=images, return_tensors="pt", padding=True)
    with torch.no_grad():
        want = task.model.eval()(**inputs).logits_per_image.softmax(1)
    task.model.train()
    torch.testing.assert_close(task.zero_shot(images, names, "a red {}"), want, rtol=1e-4, atol=1e-6)
    assert task.model.training


def test_several_templates_are_averaged() -> None:
    task = make(templates=["a red {}", "a blue {}"])
    classifier = task.zero_shot_classifier(["circle", "ring"])
    parts = task.embed_texts(["a red circle", "a blue circle", "a red ring", "a blue ring"])
    want = F.normalize(torch.stack([parts[:2].mean(0), parts[2:].mean(0)]))
    torch.testing.assert_close(classifier, want)
    torch.testing.assert_close(parts.norm(dim=1), torch.ones(4))


def test_zero_shot_accuracy_on_several_sets_with_other_classes(tmp_path: Path) -> None:
    """Each has the classes of its own folder, whichever was prepared last."""
    folders = {"three": ("cross", "ring", "square"), "two": ("circle", "ring")}
    for name, kinds in folders.items():
        for shape in kinds:
            shapes.write_images(tmp_path / name / shape, list(shapes.scenes(shapes=(shape,)))[:5])
    task = make(templates="a {}")
    found = trainer_for(task, val_data={name: str(tmp_path / name) for name in folders}).evaluate()
    for name in folders:
        folder = ImageFolder(tmp_path / name)
        scores = task.zero_shot([image for image, _ in folder], folder.classes)
        right = (scores.argmax(1) == torch.tensor(folder.targets)).double().mean().item()
        assert found[f"val/{name}/zero_shot_accuracy"] == pytest.approx(right)


def test_zero_shot_accuracy_on_a_folder_of_classes(tmp_path: Path) -> None:
    for shape in ("circle", "ring", "square"):
        scenes = list(shapes.scenes(shapes=(shape,)))[:5]
        shapes.write_images(tmp_path / shape, scenes)
    task = make(templates="a {}")
    found = trainer_for(task, val_data=str(tmp_path)).evaluate()
    folder = ImageFolder(tmp_path)
    scores = task.zero_shot([image for image, _ in folder], folder.classes)
    right = (scores.argmax(1) == torch.tensor(folder.targets)).double().mean().item()
    assert found == {"val/zero_shot_accuracy": pytest.approx(right), "val/zero_shot_top5": 1.0}
    named = make(classes=["a", "b"])
    with pytest.raises(DataError, match="labels of the 2 classes, received 2"):
        trainer_for(named, val_data=str(tmp_path)).evaluate()


# -- runs --------------------------------------------------------------------------------------------------


def test_a_run_from_files_that_is_cut_resumes_bitwise_and_opens_with_transformers(tmp_path: Path) -> None:
    path = shapes.write_jsonl(tmp_path / "pairs", SCENES)

    def run(folder: str, **options: Any) -> Trainer:
        torch.manual_seed(0)
        task = CLIP(config(), processor=processor())
        options = {"run_dir": tmp_path / folder, "save_every": 2, "save_last": 5, "num_workers": 1, **options}
        return trainer_for(task, str(path), **options)

    whole, _ = toys.check_resuming(run)
    folder = toys.checkpoint_of(whole)
    opened = transformers.AutoModel.from_pretrained(folder).eval()
    tools = transformers.AutoProcessor.from_pretrained(folder)
    image, text = SCENES[3].draw(side=45), SCENES[3].caption
    inputs = tools(text=[text], images=[image], return_tensors="pt")
    with torch.no_grad():
        output = opened(**inputs)
    torch.testing.assert_close(whole.task.embed_images([image]), output.image_embeds, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(whole.task.embed_texts(text), output.text_embeds, rtol=1e-4, atol=1e-5)
    again = CLIP(str(folder))  # model and processor in one
    torch.testing.assert_close(again.embed_texts(text), whole.task.embed_texts(text))


def test_an_adapter_is_trained_saved_and_loaded(tmp_path: Path) -> None:
    task = make()
    task.model.save_pretrained(tmp_path / "base")
    task.preprocessor.save_pretrained(tmp_path / "base")

    def run(folder: str, **options: Any) -> Trainer:
        made = CLIP(str(tmp_path / "base"), adapter=LoRA(r=4, dropout=0.0))
        return trainer_for(made, run_dir=tmp_path / folder, save_every=2, save_last=5, **options)

    whole, again = toys.check_resuming(run)
    assert all(p.requires_grad == ("lora_" in name) for name, p in again.task.model.named_parameters())
    base = transformers.AutoModel.from_pretrained(tmp_path / "base")
    before = CLIP(str(tmp_path / "base")).embed_texts("a red circle")
    opened = PeftModel.from_pretrained(base, toys.checkpoint_of(whole)).eval()
    inputs = whole.task.preprocessor(text=["a red circle"], return_tensors="pt")
    with torch.no_grad():
        features = opened.get_text_features(**inputs).pooler_output
    mine = whole.task.embed_texts("a red circle")
    torch.testing.assert_close(mine, F.normalize(features), rtol=1e-4, atol=1e-5)
    assert not torch.allclose(mine, before, atol=1e-3)


def test_a_run_from_shards_resumes_bitwise(tmp_path: Path) -> None:
    from data import test_image_text as files

    urls = files.write_shards(tmp_path, several=True)

    def run(folder: str, **options: Any) -> Trainer:
        return trainer_for(make(), urls, run_dir=tmp_path / folder, save_every=2, save_last=5, **options)

    whole, _ = toys.check_resuming(run)
    assert whole.state.step == 6


def test_a_loader_with_the_inputs_of_the_processor() -> None:
    task, data = make(), shapes.Pairs(SCENES)
    texts = [scene.caption for scene in SCENES]
    inputs = task.preprocessor(text=texts, images=data.images, return_tensors="pt", padding=True)
    batches = [{name: rows[i : i + 6] for name, rows in inputs.items()} for i in range(0, 18, 6)]
    want = task.train_step(batch_of(task, shapes.Pairs(SCENES[:6]))).sum.item()
    assert task.train_step(batches[0]).sum.item() == pytest.approx(want, rel=1e-4)
    loader = DataLoader(batches, batch_size=None)  # type: ignore[arg-type]
    assert Trainer(task, loader, max_steps=3, lr=1e-3, log="none", save_best=0).fit().state.step == 3


def test_the_check_before_a_run_passes_and_finds_equal_captions() -> None:
    assert trainer_for(make()).check().ok
    task = make()
    problems = task.check_batch(batch_of(task, shapes.Pairs([SCENES[0]] * 3)))
    assert any("All captions of the batch are equal" in problem for problem in problems)


def test_a_corrupt_image_is_named_by_a_run_with_workers(tmp_path: Path) -> None:
    path = shapes.write_jsonl(tmp_path, SCENES)
    (tmp_path / "00005.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"data.jsonl, line 6: .*00005.png"):
        trainer_for(make(), str(path), num_workers=1).fit()


# -- refusals ----------------------------------------------------------------------------------------------


def test_prefix_tuning_is_refused_at_once() -> None:
    with pytest.raises(BadArgument, match="keys and values from outside"):
        CLIP("no/such-model", PrefixTuning(4))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"same_caption": "soft"}, "same_caption"),
        ({"freeze": "vision"}, "freeze to be 'image', 'text' or None"),
        ({"augment": "basic"}, "augment"),
        ({"max_scale": 0.0}, "max_scale"),
        ({"recall_at": (0,)}, "recall_at"),
        ({"eval_captions": 0}, "eval_captions"),
        ({"templates": "a photo"}, "templates with {}"),
        ({"classes": "cat"}, "classes to be a list"),
        ({"max_length": 1}, "max_length"),
    ],
)
def test_wrong_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        CLIP(config(), **options)


def test_models_and_processors_that_do_not_fit() -> None:
    with pytest.raises(BadArgument, match="Expected a processor, received CLIPConfig"):
        assert CLIP(config()).model
    with pytest.raises(BadArgument, match="received 'BertModel, without get_image_features"):
        make(model=transformers.BertConfig(hidden_size=16, num_attention_heads=2, num_hidden_layers=1, vocab_size=64))
    other = config()
    other.text_config.eos_token_id = 30
    with pytest.raises(BadArgument, match=r"model's EOS token \(30\)"):
        make(model=other)
    small = config()
    small.text_config.vocab_size = 20
    with pytest.raises(BadArgument, match="at most the model's 20 tokens"):
        make(model=small)
    with pytest.raises(BadArgument, match="resizes images to the model's 32 x 32 pixels, received '24 x 24'"):
        trainer_for(make(processor=processor(side=24)))


def test_data_that_do_not_fit() -> None:
    with pytest.raises(DataError, match="images with captions to train on"):
        trainer_for(make(), [(scene.draw(), 0) for scene in SCENES])
    with pytest.raises(DataError, match="received an empty one"):
        batch_of(make(), [{"image": SCENES[0].draw(), "text": " "}])
    with pytest.raises(BadArgument, match="Pass classes="):
        trainer_for(make(), val_data=[(scene.draw(), 0) for scene in SCENES]).evaluate()


def test_what_is_written_down() -> None:
    written = make(adapter=LoRA(r=2)).config_dict()
    assert written["model_name"] == "CLIPConfig"
    assert written["processor"] == "CLIPProcessor"
    assert "LoRA(r=2" in written["adapter"]
    json.dumps(written)


# -- quality -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_new_images_of_shapes_find_their_captions_and_are_found() -> None:
    """200 different captions, ten images of each to train on, and 200 new images: 200 steps of 64 with Muon."""
    torch.set_num_threads(1)
    sharp = config()
    sharp.vision_config.patch_size = 4
    task = CLIP(sharp, processor=processor())
    train, new = shapes.Pairs(times=10, seed=1), shapes.Pairs(seed=2)
    steps: dict[str, Any] = {"max_steps": 200, "batch_size": 64, "optimizer": "muon", "lr": 1e-2}
    trainer = Trainer(task, train, val_data=new, eval_every="200steps", log="none", save_best=0, **steps)
    before = trainer.evaluate()
    trainer.fit()
    found = trainer.evaluate()
    print({name: round(value, 3) for name, value in found.items()})
    for way in ("image_to_text", "text_to_image"):
        assert before[f"val/{way}_recall@1"] < 0.05
        assert found[f"val/{way}_recall@1"] >= 0.45
        assert found[f"val/{way}_recall@5"] >= 0.9
        assert found[f"val/{way}_median_rank"] <= 2
    colours = task.zero_shot(new.images, list(shapes.COLOURS), "a {} circle in the middle").argmax(1)
    right = [list(shapes.COLOURS)[int(c)] == scene.colour for c, scene in zip(colours, new.scenes, strict=True)]
    assert sum(right) >= 0.8 * len(right)
