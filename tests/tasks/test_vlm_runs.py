"""VLM in runs: evaluation, generating, checkpoints, resuming, adapters, and what a tiny one learns."""

import copy
import json

import pytest
import shapes
import torch
import vlm_toys as toys
from peft import PeftModel
from PIL import Image
from transformers import AutoModelForImageTextToText, AutoProcessor
from vlm_toys import RECORDS, ask, examples_of, trainer_for

import text_toys
from text_toys import batches_of, check_equal, checkpoint_of
from trainformer import Trainer
from trainformer.adapters import LoRA, PrefixTuning, QLoRA
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.multimodal import ImageTextDataset
from trainformer.tasks.multimodal.vlm import VLM

RUN_FAMILIES = ("llava", "qwen2_5_vl")  # qwen2_vl has the same processor and batches as qwen2_5_vl

# -- runs --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", RUN_FAMILIES)
def test_evaluation_does_not_depend_on_the_batch(family):
    task = toys.make(family, generate_metrics=True, generate_options={"max_new_tokens": 5})
    trainer = trainer_for(task, max_steps=12, lr=3e-3)
    trainer.fit()
    results = [trainer_for(task, val_data=RECORDS, eval_batch_size=size).evaluate() for size in (1, 12)]
    for name in ("val/loss", "val/accuracy", "val/perplexity", "val/exact_match"):
        assert [result[name] for result in results] == pytest.approx([results[0][name]] * 2, rel=1e-4)
    answers = [example["answer"] for example in examples_of(task, train=False)]
    wanted = task.text_tokenizer.batch_decode(answers, skip_special_tokens=True)
    found = [task.text_tokenizer.decode(row["generated"], skip_special_tokens=True) for row in trainer.predict(RECORDS)]
    right = sum(a.strip() == b.strip() for a, b in zip(found, wanted, strict=True))
    assert results[0]["val/exact_match"] == pytest.approx(right / len(RECORDS))


@pytest.mark.parametrize("family", RUN_FAMILIES)
def test_padded_prompts_are_answered_like_single_ones(family):
    task = toys.make(family)
    trainer_for(task, max_steps=20, lr=3e-3).fit()
    images = [shapes.scenes()[place].draw(side=side) for place, side in ((3, 32), (50, 64), (120, 40))]
    shown = [images[0], images[1:], None]
    prompts = ["what colour is the shape?", "which shape is it? and where is the shape?", "which shape is it?"]
    together = task.generate(shown, prompts, max_new_tokens=6)
    alone = [task.generate([one], [prompt], max_new_tokens=6)[0] for one, prompt in zip(shown, prompts, strict=True)]
    assert together == alone
    # Transformers alone, with the template's own prompt.
    messages = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": prompts[0]}]}]
    text = task.preprocessor.apply_chat_template(messages, add_generation_prompt=True)
    inputs = task.preprocessor(images=[images[0]], text=text, return_tensors="pt")
    made = task.model.eval().generate(**inputs, max_new_tokens=6, do_sample=False)[0, inputs["input_ids"].shape[1] :]
    assert task.text_tokenizer.decode(made, skip_special_tokens=True).strip() == together[0]
    with pytest.raises(BadArgument, match="each of 2 prompts"):
        task.generate(images[0], prompts[:2])


def test_prompts_without_answers_can_be_predicted_but_not_learned():
    task = toys.make(generate_options={"max_new_tokens": 3})
    asked = [ask(prompt="which shape is it?"), ask(question="what colour is the shape?")]
    rows = trainer_for(task).predict(asked)
    texts = [task.text_tokenizer.decode(row["generated"], skip_special_tokens=True).strip() for row in rows]
    said = ["which shape is it?", "what colour is the shape?"]
    assert texts == task.generate([record["image"] for record in asked], said)
    with pytest.raises(DataError, match="without an answer: 2"):
        task.prepare_dataset(asked, train=True)


@pytest.mark.parametrize("family", RUN_FAMILIES)
def test_a_checkpoint_opens_with_transformers(family, tmp_path):
    task = toys.make(family)
    trainer = trainer_for(task, max_steps=2, run_dir=tmp_path / "run").fit()
    folder = checkpoint_of(trainer)
    model, processor = AutoModelForImageTextToText.from_pretrained(folder), AutoProcessor.from_pretrained(folder)
    check_equal(model, task.model)
    assert processor.chat_template == task.preprocessor.chat_template
    again = VLM(folder, max_length=128, freeze=())
    (batch,) = batches_of(trainer_for(again, batch_size=12))
    task.model.eval()
    again.model.eval()
    torch.testing.assert_close(again.train_step(batch).sum, task.train_step(batch).sum)
    assert again.generate(ask()["image"], "which shape is it?") == task.generate(ask()["image"], "which shape is it?")


def test_an_interrupted_run_ends_with_the_same_weights(tmp_path):
    def run(name, **options):
        return trainer_for(
            toys.make(), run_dir=tmp_path / name, save_every=1, resume="auto", batch_size=3, **options
        )  # fmt: skip

    whole, again = text_toys.check_resuming(run)
    assert whole.state.log_history[-1]["train/loss"] == again.state.log_history[-1]["train/loss"]


def test_workers_read_the_same_batches(tmp_path):
    path = shapes.write_jsonl(tmp_path / "data", shapes.scenes()[::25], questions=True)
    sources = []
    for workers in (0, 2):
        trainer = trainer_for(toys.make("qwen2_vl"), str(path), num_workers=workers)
        sources.append(batches_of(trainer))
    for mine, theirs in zip(*sources, strict=True):
        assert mine["rows"] == theirs["rows"]
        assert torch.equal(mine["input_ids"], theirs["input_ids"])
        assert torch.equal(mine["pixels"]["pixel_values"], theirs["pixels"]["pixel_values"])


def test_a_line_that_is_wrong_is_named(tmp_path):
    path = shapes.write_jsonl(tmp_path / "data", shapes.scenes()[::50], questions=True)
    lines = path.read_text().splitlines()
    lines[2] = json.dumps({"image": "missing.png", "question": "which shape is it?", "answer": "ring"})
    path.write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"data\.jsonl.*3.*missing\.png"):
        trainer_for(toys.make(), ImageTextDataset(path)).fit()


def test_a_check_finds_nothing_wrong():
    report = trainer_for(toys.make()).check()
    assert report.ok, report


# -- adapters ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", RUN_FAMILIES)
def test_lora_trains_the_language_model_and_opens_with_peft(family, tmp_path):
    torch.manual_seed(0)
    base = toys.make(family).model
    base.save_pretrained(tmp_path / "base")
    toys.processor(family).save_pretrained(tmp_path / "base")
    task = VLM(tmp_path / "base", adapter=LoRA(4), max_length=128)
    trainer = trainer_for(task, max_steps=3, lr=1e-2, run_dir=tmp_path / "run").fit()
    trained = [name for name, p in task.model.named_parameters() if p.requires_grad]
    assert trained
    assert all("lora_" in name and "language_model" in name for name in trained)
    folder = checkpoint_of(trainer)
    opened = PeftModel.from_pretrained(AutoModelForImageTextToText.from_pretrained(tmp_path / "base"), folder)
    (batch,) = batches_of(trainer_for(task, batch_size=12))
    plain = VLM(opened, processor=toys.processor(family), max_length=128)
    for model in (task.model, opened, base):
        model.eval()
    mine = task.train_step(batch).sum
    torch.testing.assert_close(plain.train_step(batch).sum, mine)
    unadapted = VLM(base, processor=toys.processor(family), max_length=128)
    assert abs(unadapted.train_step(batch).sum - mine) > 1e-3
    assert len(task.generate(ask()["image"], "which shape is it?", max_new_tokens=4)) == 1


def test_prefix_tuning_works_on_llava_and_is_refused_on_qwen():
    task = toys.make(adapter=PrefixTuning(4))
    before = copy.deepcopy(task.model.state_dict())
    trainer_for(task, max_steps=3, lr=1e-2).fit()
    changed = [name for name, value in task.model.state_dict().items() if not torch.equal(value, before[name])]
    assert changed
    assert all("prompt_encoder" in name for name in changed)
    assert len(task.generate([ask()["image"]] * 2, "which shape is it?", max_new_tokens=4)) == 2
    for family in toys.FAMILIES[1:]:
        with pytest.raises(BadArgument, match="Qwen-VL"):
            toys.make(family, adapter=PrefixTuning(4))


def test_qlora_trains_on_four_bits(tmp_path):
    toys.make().model.save_pretrained(tmp_path / "base")
    task = VLM(tmp_path / "base", adapter=QLoRA(4), processor=toys.processor(), max_length=128)
    trainer = trainer_for(task, max_steps=2, lr=1e-2).fit()
    assert trainer.state.step == 2
    kinds = {type(module).__name__ for module in task.model.modules()}
    assert any("4bit" in kind for kind in kinds)


# -- quality -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_llava_learns_to_answer_questions_about_shapes():
    """Colour, shape and place of 200 scenes that it never saw drawn like that: 450 steps of 16 questions."""
    options = {"generate_metrics": True, "generate_options": {"max_new_tokens": 5}}
    task = toys.make(**options)
    train, held_out = shapes.Questions(times=4, seed=1), shapes.Questions(seed=2)
    trainer = Trainer(
        task, train, val_data=held_out, batch_size=16, eval_batch_size=50, max_steps=450, lr=1e-3,
        eval_every="450steps", num_workers=0, log="none", save_best=0,
    )  # fmt: skip
    before = trainer.evaluate()["val/exact_match"]
    trainer.fit()
    after = trainer.evaluate()["val/exact_match"]
    print(f"exact answers: {before:.3f} before, {after:.3f} after")
    assert before < 0.1
    assert after >= 0.70
    # Without its image a question can only be guessed: most often one of five or of eight.
    blind = [{"image": Image.new("RGB", (32, 32), (120, 120, 120)), **said} for said in map(_words, held_out)]
    assert trainer_for(task, val_data=blind, eval_batch_size=50).evaluate()["val/exact_match"] < 0.4


def _words(record):
    return {name: record[name] for name in ("prompt", "completion")}
