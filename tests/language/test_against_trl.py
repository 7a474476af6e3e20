"""Fine-tuning on conversations as TRL's `SFTTrainer` does it: the same tokens, losses and weights."""

import pytest
import torch
from datasets import Dataset
from peers import distance, moved, order_of, settings, twin
from trl import SFTConfig, SFTTrainer

import text_toys as toys
from trainformer.run import run_of
from trainformer.tasks import CausalLM

CHATS = [*toys.conversations()[:10], *toys.conversations(turns=2)[10:20]]


@pytest.fixture(scope="module")
def tokenizer():
    """TRL asks the template where the assistant speaks; we do too, where it can tell."""
    return toys.chat_tokenizer(toys.MARKED_CHATML)


@pytest.fixture
def ours(tokenizer, tmp_path):
    def make(**options):
        task_options = {name: options.pop(name) for name in ("packing", "chunk_tokens") if name in options}
        tokens = {"tokenizer": tokenizer, "max_length": 64, "cache_dir": tmp_path / "tokens"}
        task = CausalLM(toys.llama(), **tokens, **task_options)
        return toys.trainer_for(task, CHATS, **{"batch_size": len(CHATS), **options})

    return make


def trl(trainer, folder, records=CHATS, **options):
    """TRL's trainer with the weights and settings of ours."""
    arguments = settings(trainer, folder, max_length=64, assistant_only_loss=True, dataset_num_proc=None, **options)
    model = twin(trainer.task.model)
    return SFTTrainer(
        model, SFTConfig(**arguments), train_dataset=Dataset.from_list(records), processing_class=trainer.task.text_tokenizer
    )


def loss_of(theirs):
    """The mean over all supervised tokens of all records."""
    (batch,) = theirs.get_train_dataloader()
    with torch.no_grad():
        return theirs.compute_loss(theirs.model, batch).item()


def loss_of_ours(trainer):
    (batch,) = toys.batches_of(trainer)
    with torch.no_grad():
        loss = trainer.task.train_step(batch)
    return (loss.sum / loss.weight).item(), int(loss.weight)


@pytest.mark.parametrize("packing", [False, True], ids=["padded", "packed"])
def test_the_loss_matches_trl(ours, tmp_path, packing):
    trainer = ours(packing=packing)
    found, tokens = loss_of_ours(trainer)
    theirs = trl(trainer, tmp_path / "trl", packing=packing, packing_strategy="bfd")
    (batch,) = theirs.get_train_dataloader()
    assert int((batch["labels"] != -100).sum()) == tokens
    assert ("position_ids" in batch) == packing
    if packing:
        assert len(theirs.train_dataset) == len(run_of(trainer).train_source.dataset) < len(CHATS)
    assert found == pytest.approx(loss_of(theirs), rel=1e-5)


def test_wrong_packing_would_change_the_loss(ours, tmp_path):
    """TRL's other way to pack: one long text, cut into pieces, in which conversations see each other."""
    trainer = ours(packing=True)
    found, _ = loss_of_ours(trainer)
    assert abs(found - loss_of(trl(trainer, tmp_path / "trl", packing=True, packing_strategy="wrapped"))) > 1e-4


@pytest.mark.parametrize("accumulation", [1, 2])
def test_the_weights_match_trl(ours, tmp_path, accumulation):
    trainer = ours(
        batch_size=2, accumulation_steps=accumulation, max_steps=20 // accumulation, lr=1e-3, weight_decay=0.1,
        gradient_clip=0.5, scheduler="linear", warmup_ratio=0.0, optimizer={"name": "adamw", "eps": 1e-5},
    )  # fmt: skip
    before = twin(trainer.task.model)
    ordered = [CHATS[i] for i in order_of(trainer, epochs=2)]
    theirs = trl(trainer, tmp_path / "trl", ordered, lr_scheduler_type="linear", adam_epsilon=1e-5)
    theirs.train()
    trainer.fit()
    model = trainer.task.model
    assert theirs.state.global_step == trainer.state.step
    assert moved(model, before)
    assert distance(model, before) > 1e-3
    assert distance(model, theirs.model) < 1e-6
