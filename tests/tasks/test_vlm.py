"""VLM: images keep their tokens, answers are what is learned, and a batch is nothing but its records."""

import logging
from itertools import pairwise

import numpy as np
import pytest
import shapes
import torch
import vlm_toys as toys
from PIL import Image
from vlm_toys import ask, examples_of

import text_toys
from ranks import on_ranks
from trainformer.adapters import LoRA
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.sharding import slice_batch
from trainformer.tasks.multimodal.vlm import VLM
from trainformer.tasks.multimodal.vlm_data import flat_pixels


def learned(task, example):
    return task.text_tokenizer.decode(example["input_ids"][example["labels"] != -100])


def conversation(*turns):
    roles = ("user", "assistant")
    return [{"role": roles[place % 2], "content": turn} for place, turn in enumerate(turns)]


# -- tokens and pixels -------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_tokens_and_pixels_are_those_of_the_processor(family):
    task = toys.make(family)
    images = [shapes.scenes()[place].draw(side=side) for place, side in ((3, 32), (90, 56))]
    parts = [{"type": "image"}, {"type": "text", "text": "which shape is it?"}, {"type": "image"}]
    answer = [{"type": "text", "text": "ring"}]
    messages = [{"role": "user", "content": parts}, {"role": "assistant", "content": answer}]
    (example,) = examples_of(task, [{"images": images, "messages": messages}])
    text = task.preprocessor.apply_chat_template(messages)
    theirs = task.preprocessor(images=images, text=text, return_tensors="pt")
    wanted = theirs["input_ids"][0].tolist()
    found = example["input_ids"].tolist()
    assert found[: len(wanted)] == wanted
    # LLaVA's template does not end the answer: the model would not learn to stop.
    assert found[len(wanted) :] == ([task.text_tokenizer.eos_token_id] if family == "llava" else [])
    for name, pixels in example["pixels"].items():
        torch.testing.assert_close(pixels, theirs[name])
    assert (example["labels"][example["input_ids"] == task.encoder.image_id] == -100).all()


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_answers_are_learned_and_nothing_else(family):
    task = toys.make(family)
    end = "</s>" if family == "llava" else "<|im_end|>"
    told = conversation("what colour is the shape?", "red", "which shape is it?", "ring", "where is the shape?")
    records = [
        ask(prompt="what colour is the shape?", completion="red"),
        ask(question="what colour is the shape?", answer="red"),
        ask(text="a red ring on the left"),
        ask(messages=told),
        {"prompt": "which shape is it?", "completion": "ring"},
        {"text": "a red ring"},
    ]
    examples = examples_of(task, records)
    between = "" if family == "llava" else f"{end} "
    wanted = [f"red {end}"] * 2 + [f"a red ring on the left {end}", f"red {between}ring {end}", f"ring {end}"]
    assert [learned(task, example) for example in examples[:-1]] == wanted
    assert learned(task, examples[-1]) == "<s> a red ring </s>"  # a text without an image is learned as a whole
    for example in examples:
        assert example["input_ids"].tolist().count(task.text_tokenizer.bos_token_id) == 1
    # The last question has no answer: nothing is learned there.
    assert "where" not in task.text_tokenizer.decode(examples[3]["input_ids"])
    everything = toys.make(family, train_on="all").prepare_dataset(records[:1], train=True)[0]
    assert "what colour is the shape" in learned(task, everything)
    assert task.encoder.image_token not in learned(task, everything)
    last = toys.make(family, train_on="completion").prepare_dataset(records[3:4], train=True)[0]
    assert learned(task, last) == f"ring {end}"


def test_without_a_template_prompts_are_taken_as_they_are():
    task = toys.make(chat=False)
    (asked, told) = examples_of(task, [ask(prompt="which shape is it?", completion="ring"), ask(text="a red ring")])
    text = task.text_tokenizer.decode(asked["input_ids"]).replace("<image> ", "")
    assert text == "<s> which shape is it ? ring </s>"
    assert learned(task, told) == "a red ring </s>"
    with pytest.raises(BadArgument, match="chat template"):
        examples_of(task, [ask(messages=conversation("which shape is it?", "ring"))])


def test_templates_that_take_texts_get_texts():
    task = toys.make()
    task.preprocessor.chat_template = text_toys.CHATML
    (example,) = examples_of(task, [ask(prompt="which shape is it?", completion="ring")])
    assert (example["input_ids"] == task.encoder.image_id).sum() == 16
    assert learned(task, example) == "ring </s>"
    task = toys.make()
    task.preprocessor.chat_template = "{% for m in messages %}{{ m['role'] }}{% endfor %}"
    with pytest.raises(BadArgument, match="renders an image as <image>"):
        examples_of(task, [ask(prompt="which shape is it?", completion="ring")])


def test_images_may_be_files_arrays_or_bytes(tmp_path):
    task = toys.make("qwen2_vl")
    image = Image.fromarray(np.arange(48 * 32 * 3, dtype=np.uint8).reshape(48, 32, 3))
    image.save(tmp_path / "one.png")
    array = np.asarray(image)
    kinds = [
        image, str(tmp_path / "one.png"), tmp_path / "one.png", array, torch.from_numpy(array.copy()).permute(2, 0, 1),
        array.astype(np.float32) / 255, {"bytes": (tmp_path / "one.png").read_bytes(), "path": None},
    ]  # fmt: skip
    data = task.prepare_dataset([{"images": [kind], "text": "a ring"} for kind in kinds], train=True)
    assert len(set(data.lengths)) == 1
    for place in range(1, len(kinds)):
        assert data[place]["input_ids"].tolist() == data[0]["input_ids"].tolist()
        assert torch.equal(data[place]["pixels"]["pixel_values"], data[0]["pixels"]["pixel_values"])


def test_a_turned_image_is_measured_as_it_is_shown(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6
    shapes.scenes()[0].draw(side=64).crop((0, 0, 64, 16)).save(tmp_path / "turned.jpg", exif=exif)
    task = toys.make("qwen2_vl", image_options={"min_pixels": 256, "max_pixels": 4096})
    data = task.prepare_dataset([{"image": str(tmp_path / "turned.jpg"), "text": "a ring"}], train=True)
    assert data[0]["pixels"]["image_grid_thw"].tolist() == [[1, 8, 2]]
    assert data.lengths[0] == len(data[0]["input_ids"])


# -- length ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_text_is_cut_and_images_are_not(family, caplog):
    words = " ".join(["a red ring on the left"] * 4)
    records = [
        ask(text=words),
        ask(text="a red ring"),
        ask(messages=conversation("<image>\nwhich shape is it?", words)),
        {"images": [ask()["image"]] * 4, "text": "a red ring"},  # 4 images of 16, or of 4 tokens
        ask(prompt=words, completion="ring"),
        # The first answer fits, and the second image does not.
        {
            "images": [ask()["image"]] * 2,
            "messages": conversation("<image>\nwhich shape is it?", "ring", "<image>\nand the colour?", "red"),
        },
    ]
    limit = 30 if family == "llava" else 20
    task = toys.make(family, max_length=limit)
    with caplog.at_level(logging.INFO, "trainformer"):
        data = task.prepare_dataset(records, train=True)
    assert list(data.indices) == [0, 1, 2]
    assert "3 dropped" in caplog.text
    assert f"images that reach beyond {limit} tokens" in caplog.text
    assert "2 truncated" in caplog.text
    for place in range(3):
        example = data[place]
        images = int((example["input_ids"] == task.encoder.image_id).sum())
        assert images == (16 if family == "llava" else 4)
        assert len(example["input_ids"]) == data.lengths[place] <= limit
        batch = task.collate_fn([example])
        assert torch.isfinite(task.train_step(batch).sum)
    # A text that was cut does not end: the model must not learn to stop there.
    assert data[0]["input_ids"][-1] not in (
        task.text_tokenizer.eos_token_id,
        task.text_tokenizer.convert_tokens_to_ids("<|im_end|>"),
    )


def test_qwen_is_given_fewer_tokens_for_smaller_images():
    record = {"image": shapes.scenes()[0].draw(side=64), "text": "a ring"}
    sizes = []
    for options in ({}, {"max_pixels": 1024, "min_pixels": 256}):
        task = toys.make("qwen2_vl", image_options=options)
        data = task.prepare_dataset([record], train=True)
        assert data.lengths[0] == len(data[0]["input_ids"])
        sizes.append(int((data[0]["input_ids"] == task.encoder.image_id).sum()))
    assert sizes == [16, 4]


def test_bad_records_are_named(tmp_path):
    task = toys.make(max_length=24)
    good = ask(text="a ring")
    broken = tmp_path / "broken.png"
    broken.write_bytes(b"no image")
    cases = [
        ({"image": str(broken), "text": "a"}, r"record 1: .*broken\.png"),
        ({"image": good["image"]}, r"record 1: .*'text'"),
        (ask(messages=conversation("<image> <image> which?", "ring")), r"record 1: .*2"),
        (ask(prompt="<image> which?", completion="<image>"), r"record 1: .*contain the image token"),
        ("text", r"record 1: .*str"),
    ]
    for record, message in cases:
        with pytest.raises(DataError, match=message):
            task.prepare_dataset([good, record], train=True)
    with pytest.raises(DataError, match="nothing to train on in training data"):
        task.prepare_dataset([{"images": [good["image"]] * 3, "text": "a"}], train=True)

    class Slow:
        """If records cannot be measured in advance, an unusable one raises an error when it is read."""

        def __len__(self):
            return 50

        def __getitem__(self, index):
            return {"images": [good["image"]] * 2, "text": "a"} if index == 40 else good

    data = task.prepare_dataset(Slow(), train=True)
    assert data.lengths is None
    with pytest.raises(DataError, match=r"record 40: .*beyond 24 tokens.*bad_samples='skip'"):
        data[40]


def test_data_that_can_be_looked_through_are_not_decoded_for_it(tmp_path):
    names = shapes.write_images(tmp_path, shapes.scenes()[:4], side=64)

    class Files:
        """Says what its records are without opening an image."""

        def __len__(self):
            return 4

        def without_decoding(self, index):
            return {"image": str(tmp_path / names[index]), "text": "a ring " * (1 if index != 2 else 40)}

        def __getitem__(self, index):
            raise AssertionError("an image was decoded")

    data = toys.make("qwen2_vl", max_length=32).prepare_dataset(Files(), train=True)
    assert data.report.truncated == 1
    assert data.lengths.tolist() == [data.lengths[0]] * 2 + [32, data.lengths[0]]


# -- batches -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("family", "chunk_tokens"), [*((name, None) for name in toys.FAMILIES), ("llava", 0)])
def test_the_loss_is_that_of_the_model_record_by_record(family, chunk_tokens):
    task = toys.make(family, chunk_tokens=chunk_tokens, freeze=())
    examples = examples_of(task)
    batch = task.collate_fn(examples)
    loss = task.train_step(batch)
    loss.sum.backward()
    found = {name: p.grad.clone() for name, p in task.model.named_parameters() if p.grad is not None}
    assert set(found) == {name for name, p in task.model.named_parameters() if p.requires_grad}
    task.model.zero_grad()
    total, count = 0.0, 0
    for example in examples:  # without padding, and with the loss that transformers computes
        ids, labels = (torch.from_numpy(example[name]).long()[None] for name in ("input_ids", "labels"))
        types = {} if family == "llava" else {"mm_token_type_ids": (ids == task.encoder.image_id).int()}
        own = int((labels[:, 1:] != -100).sum())
        total = total + task.model(input_ids=ids, labels=labels, **types, **example["pixels"]).loss * own
        count += own
    total.backward()
    assert loss.weight == count
    torch.testing.assert_close(loss.sum, total, rtol=1e-5, atol=1e-4)
    for name, p in task.model.named_parameters():
        if name in found:
            torch.testing.assert_close(found[name], p.grad, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_a_batch_can_be_cut_between_any_two_samples(family):
    task = toys.make(family, freeze=())
    batch = task.collate_fn(examples_of(task))
    whole = task.train_step(batch)
    for edges in ([0, 5, 12], [0, 2, 3, 12], range(13)):
        pieces = [slice_batch(batch, low, high, 12) for low, high in pairwise(edges)]
        losses = [task.train_step(piece) for piece in pieces]
        assert sum(loss.weight for loss in losses) == whole.weight
        torch.testing.assert_close(sum(loss.sum for loss in losses), whole.sum, rtol=1e-5, atol=1e-4)
    assert flat_pixels(slice_batch(batch, 2, 3, 12)) == {}


def test_a_batch_without_images_still_gives_gradients_to_the_tower():
    task = toys.make(freeze=())
    blind = [example for example in examples_of(task) if not example["pixels"]]
    loss = task.train_step(task.collate_fn(blind))
    loss.sum.backward()
    assert all(p.grad is not None for p in task.model.parameters() if p.requires_grad)
    towers = [p for name, p in task.model.named_parameters() if "vision" in name and p.requires_grad]
    assert towers
    assert all(p.grad.abs().max() == 0 for p in towers)
    fixed = toys.make(freeze=("vision", "projector"))
    fixed.model.load_state_dict(task.model.state_dict())
    batch = fixed.collate_fn(blind)
    assert batch["pixels"] == {}
    torch.testing.assert_close(fixed.train_step(batch).sum, loss.sum, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
def test_two_processes_are_one(tmp_path):
    """DDP without `find_unused_parameters`, on LLaVA with all of it trained; one rank has no image."""
    both = on_ranks(toys.results, 2, tmp_path)
    alone = toys.results(0, 1)
    assert set(both[0]) == set(alone)
    for name, gradient in alone.items():
        assert torch.equal(both[0][name], both[1][name])
        torch.testing.assert_close(2 * both[0][name], gradient, rtol=1e-3, atol=1e-5)
    assert alone["model.vision_tower.embeddings.patch_embedding.weight"].abs().max() > 1e-6


# -- what is trained ---------------------------------------------------------------------------------------


def trained_parts(task):
    names = [name for name, p in task.model.named_parameters() if p.requires_grad]
    inside = {"vision": ("vision_tower.", "visual."), "language": ("language_model.", "lm_head.")}
    parts = set()
    for name in names:
        if "projector" in name or "merger" in name:
            parts.add("projector")
        else:
            parts |= {part for part, marks in inside.items() if any(mark in name for mark in marks)}
    return parts


@pytest.mark.parametrize("family", toys.FAMILIES)
def test_parts_are_frozen_by_name(family, tmp_path):
    everything = {"vision", "projector", "language"}
    for frozen in ((), ("vision",), ("language", "vision"), "projector"):
        task = toys.make(family, freeze=frozen)
        assert trained_parts(task) == everything - ({frozen} if isinstance(frozen, str) else set(frozen))
    assert trained_parts(toys.make(family)) == everything  # random weights: nothing to keep
    task.model.save_pretrained(tmp_path / "model")
    task.preprocessor.save_pretrained(tmp_path / "model")
    assert trained_parts(VLM(tmp_path / "model")) == {"projector", "language"}


def test_what_llava_never_uses_is_not_trained(caplog):
    with caplog.at_level(logging.INFO, "trainformer"):
        task = toys.make(freeze=())
        fixed = [name for name, p in task.model.named_parameters() if not p.requires_grad]
    assert len(fixed) == 18
    assert all("layers.2." in name or "post_layernorm" in name for name in fixed)
    assert "18 parameters" in caplog.text
    assert toys.make(freeze="vision").check_batch(task.collate_fn(examples_of(task))) == []


def test_arguments_are_checked():
    for wrong, message in (
        ({"freeze": "visoin"}, "vision"),
        ({"freeze": ("vision", "projector", "language")}, "something to train"),
        ({"freeze": "vision", "adapter": LoRA()}, "adapter"),
        ({"train_on": "answers"}, "train_on"),
        ({"chunk_tokens": -1}, "chunk_tokens"),
        ({"max_length": 1}, "max_length"),
    ):
        with pytest.raises(BadArgument, match=message):
            toys.make(**wrong)
    with pytest.raises(BadArgument, match="processor"):
        assert VLM(toys.config()).preprocessor
