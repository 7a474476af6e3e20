"""CausalLM: one loss, however tokens are padded, packed, sliced or adapted, and checkpoints that others can open."""

import math

import pytest
import torch
from peft import PeftModel
from torch import nn
from torchmetrics.text import Perplexity
from transformers import AutoModelForCausalLM, AutoTokenizer

import text_toys as toys
from text_toys import WORDS, batches_of, causal_maker, checkpoint_of, gpt2, llama
from trainformer.adapters import LoRA, PrefixTuning
from trainformer.core.errors import BadArgument, DataError
from trainformer.run import run_of
from trainformer.tasks import CausalLM

TEXTS = toys.sentences()


@pytest.fixture(scope="module")
def tokenizer():
    return toys.chat_tokenizer()


@pytest.fixture
def task(tokenizer, tmp_path):
    return causal_maker(tokenizer, tmp_path)


def trainer_for(task, data=TEXTS, **options):
    return toys.trainer_for(task, data, **options)


@pytest.mark.parametrize("chunk_tokens", [None, 7, 0])
def test_the_loss_is_that_of_single_documents(task, chunk_tokens):
    made = task(chunk_tokens=chunk_tokens)
    assert toys.check_losses(made, batches_of(trainer_for(made))[:3], toys.next_token_sum) == 3


def test_training_is_that_of_a_loop_over_sums_and_tokens(task):
    assert toys.check_training(task(), TEXTS, toys.next_token_sum, 4) == 3


@pytest.mark.parametrize("config", [llama, gpt2])
def test_packed_documents_do_not_see_each_other(task, config):
    loose, packed = trainer_for(task(config()), batch_size=24), trainer_for(task(config(), packing=True), batch_size=24)
    packed.task.model.load_state_dict(loose.task.model.state_dict())
    sums = []
    for trainer in (loose, packed):
        trainer.task.model.eval()  # GPT-2 has dropout
        (batch,) = batches_of(trainer)
        loss = trainer.task.train_step(batch)
        loss.sum.backward()
        sums.append(loss)
    assert len(run_of(packed).train_source.dataset) < len(TEXTS)
    assert sums[0].weight == sums[1].weight
    torch.testing.assert_close(sums[0].sum, sums[1].sum, rtol=1e-5, atol=1e-4)
    for mine, theirs in zip(loose.task.model.parameters(), packed.task.model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-3, atol=1e-4)


def test_packing_is_refused_where_it_is_not_exact(task):
    class Sees(nn.Module):
        """A model that cannot tell documents apart."""

        def __init__(self, model):
            super().__init__()
            self.inner = model
            self.config = model.config

        def get_input_embeddings(self):
            return self.inner.get_input_embeddings()

        def forward(self, position_ids=None, **inputs):
            return self.inner(**inputs)

    with pytest.raises(BadArgument, match="keeps packed documents apart"):
        trainer_for(task(Sees(AutoModelForCausalLM.from_config(llama())), packing=True))
    with pytest.raises(BadArgument, match="pack"):
        task(packing=True, adapter=PrefixTuning(4))
    with pytest.raises(BadArgument, match="checkpointing"):
        trainer_for(task(adapter=PrefixTuning(4)), gradient_checkpointing=True)


def test_evaluation_is_by_tokens_and_does_not_depend_on_the_batch(task):
    made = task()
    results = []
    for size in (1, 5, 24):
        trainer = trainer_for(made, val_data=TEXTS, eval_batch_size=size)
        results.append(trainer.evaluate())
    oracle = Perplexity(ignore_index=-100)
    made.model.eval()
    for batch in batches_of(trainer_for(made, batch_size=3)):
        logits = made.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits.detach()
        oracle.update(logits[:, :-1].double(), batch["labels"][:, 1:])
    for found in results:
        assert found["val/perplexity"] == pytest.approx(float(oracle.compute()), rel=1e-5)
        assert found["val/loss"] == pytest.approx(math.log(found["val/perplexity"]), rel=1e-9)


def test_conversations_teach_the_assistants_turns_alone(task, tokenizer):
    chats = [
        {"messages": [{"role": "user", "content": text}, {"role": "assistant", "content": WORDS[i % len(WORDS)]}]}
        for i, text in enumerate(TEXTS)
    ]
    trainer = trainer_for(task(max_length=64), chats)
    for batch in batches_of(trainer):
        for row, labels in zip(batch["input_ids"], batch["labels"], strict=True):
            learned = tokenizer.decode(row[labels != -100])
            assert learned.endswith("</s>")
            assert learned.removesuffix("</s>") in WORDS
            assert tokenizer.decode(row).count("<s>") <= 1
    assert trainer.check().ok


def test_data_without_anything_to_learn_are_refused(task):
    with pytest.raises(DataError, match=r"assistant|train"):
        trainer_for(task(), [{"messages": [{"role": "user", "content": "hello"}]}] * 4)


def test_padded_prompts_are_continued_like_single_ones(task):
    made = task()
    trainer_for(made).fit()
    prompts = [TEXTS[0], TEXTS[7] + " the", "a"]
    together = made.generate(prompts, max_new_tokens=6)
    assert together == [made.generate(prompt, max_new_tokens=6)[0] for prompt in prompts]
    with pytest.raises(BadArgument, match="at least one character"):
        made.generate(["", "x"])


def test_a_checkpoint_opens_with_transformers(task, tmp_path, tokenizer):
    made = task(llama(tie_word_embeddings=True))
    trainer = trainer_for(made, run_dir=tmp_path / "run").fit()
    folder = checkpoint_of(trainer)
    opened = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(12)[None]
    made.model.eval()
    torch.testing.assert_close(opened(ids).logits, made.model(ids).logits)
    assert AutoTokenizer.from_pretrained(folder)("the fox")["input_ids"] == tokenizer("the fox")["input_ids"]
    again = CausalLM(folder, max_length=32, cache_dir=tmp_path / "tokens")
    torch.testing.assert_close(again.model.eval()(ids).logits, opened(ids).logits)


def test_an_adapter_is_all_that_is_trained_and_saved(task, tmp_path):
    base = AutoModelForCausalLM.from_config(llama())
    base.save_pretrained(tmp_path / "base")

    def run(folder, **options):
        made = task(str(tmp_path / "base"), adapter=LoRA(r=4, dropout=0.0))
        return trainer_for(made, run_dir=tmp_path / folder, save_every=2, save_last=5, **options)

    whole, again = toys.check_resuming(run)
    assert again.state.step == 6
    adapted = {id(p) for n, p in whole.task.model.named_parameters() if "lora_" in n}
    assert {id(p) for group in whole.active_optimizer.param_groups for p in group["params"]} == adapted
    frozen = dict(base.named_parameters())
    for name, p in whole.task.model.named_parameters():
        if "lora_" not in name:
            plain = name.removeprefix("base_model.model.").replace(".base_layer", "")
            assert torch.equal(p, frozen[plain]), name

    folder = checkpoint_of(whole)
    assert (folder / "model.safetensors").stat().st_size < (tmp_path / "base" / "model.safetensors").stat().st_size / 3
    opened = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(tmp_path / "base"), folder).eval()
    ids = torch.arange(12)[None]
    whole.task.model.eval()
    torch.testing.assert_close(opened(ids).logits, whole.task.model(ids).logits)


def test_it_learns(task):
    """Against the entropy of single words and of pairs, counted on the same text."""
    text = [" ".join(WORDS[(start + k) % len(WORDS)] for k in range(12)) for start in range(len(WORDS))] * 2
    made = task(max_length=64)
    before = trainer_for(made, text, val_data=text).evaluate()["val/perplexity"]
    trainer = trainer_for(made, text, val_data=text, max_steps=120, batch_size=8, precision="no").fit()
    assert trainer.evaluate()["val/perplexity"] < min(2.0, before / 50)


def test_wrong_arguments(tokenizer):
    with pytest.raises(BadArgument, match="max_length"):
        CausalLM(llama(), max_length=1)
    with pytest.raises(BadArgument, match="dtype to be one of"):
        CausalLM(llama(), dtype="float32")
    with pytest.raises(BadArgument, match="adapter"):
        CausalLM(llama(), adapter="lora")
    with pytest.raises(BadArgument, match="a folder that exists"):
        assert CausalLM("./no/such/folder", tokenizer=tokenizer).model
    with pytest.raises(BadArgument, match="without the name of one"):
        assert CausalLM(llama()).text_tokenizer
