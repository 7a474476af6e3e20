"""The same Llama, records, order and settings, through our `Trainer` and that of transformers: the same weights."""

import pytest
import transformers
from peers import distance, moved, order_of, settings, twin
from transformers import DataCollatorForSeq2Seq, TrainingArguments

import text_toys as toys
from trainformer.run import run_of
from trainformer.tasks import CausalLM

EPOCHS, SAMPLES = 2, 16
EPS = 1e-5  # Adam multiplies roundings where a gradient is next to nothing: the less, the larger this is


def cosine(optimizer, total):
    """Theirs: the first step of its warm-up has a rate of 0."""
    return transformers.get_cosine_schedule_with_warmup(optimizer, 2, total)


SCHEDULES = {
    "linear": ({"scheduler": "linear", "warmup_ratio": 0.0}, {"lr_scheduler_type": "linear"}),
    "cosine": ({"scheduler": cosine}, {"lr_scheduler_type": "cosine", "warmup_steps": 2}),
}


def both(tmp_path, accumulation, schedule="linear", chunk_tokens=0, mean_of_means=False):
    """The weights that both end in, and those they began with."""
    mine, yours = SCHEDULES[schedule]
    tokens = {"tokenizer": toys.chat_tokenizer(), "max_length": 64, "cache_dir": tmp_path / "tokens"}
    task = CausalLM(toys.llama(), chunk_tokens=chunk_tokens, **tokens)
    data = toys.conversations()[:SAMPLES]  # few of the tokens are supervised, and not equally many in each batch
    steps = EPOCHS * SAMPLES // (2 * accumulation)
    trainer = toys.trainer_for(
        task, data, batch_size=2, accumulation_steps=accumulation, max_steps=steps, lr=1e-3, weight_decay=0.1,
        gradient_clip=0.5, optimizer={"name": "adamw", "eps": EPS}, **mine,
    )  # fmt: skip
    before, model = twin(task.model), twin(task.model)
    store = run_of(trainer).train_source.dataset
    ordered = [{name: store[i][name].tolist() for name in ("input_ids", "labels")} for i in order_of(trainer, EPOCHS)]
    theirs = transformers.Trainer(
        model,
        TrainingArguments(**settings(trainer, tmp_path / "hf", adam_epsilon=EPS, **yours)),
        train_dataset=ordered,
        data_collator=DataCollatorForSeq2Seq(task.text_tokenizer, pad_to_multiple_of=8),
    )
    if mean_of_means:
        theirs.model_accepts_loss_kwargs = False
    theirs.train()
    trainer.fit()
    assert theirs.state.global_step == trainer.state.step == steps
    return task.model, model, before


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_weights_match_transformers(tmp_path, accumulation, schedule):
    model, theirs, before = both(tmp_path, accumulation, schedule)
    assert moved(model, before)
    assert distance(model, before) > 1e-3
    assert distance(model, theirs) < 1e-6


@pytest.mark.parametrize("accumulation", [1, 4])
def test_the_weights_are_the_same_with_chunked_logits(tmp_path, accumulation):
    model, theirs, _ = both(tmp_path, accumulation, chunk_tokens=None)
    assert distance(model, theirs) < 1e-6


def test_a_mean_of_means_would_change_the_weights(tmp_path):
    """What transformers does with models that take no number of tokens."""
    model, theirs, _ = both(tmp_path, 4, mean_of_means=True)
    assert distance(model, theirs) > 1e-4
