"""CausalLM: one loss, however tokens are padded, packed, sliced or adapted, and checkpoints that others can open."""

import math
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import nn
from torchmetrics.text import Perplexity
from transformers import AutoModelForCausalLM, AutoTokenizer, GPT2Config, LlamaConfig, PreTrainedTokenizerFast

from trainformer import Trainer
from trainformer.adapters import LoRA, PrefixTuning
from trainformer.core.errors import BadArgument, DataError
from trainformer.tasks import CausalLM

WORDS = [
    "the",
    "quick",
    "brown",
    "fox",
    "jumps",
    "over",
    "a",
    "lazy",
    "dog",
    "while",
    "seven",
    "wizards",
    "bake",
    "pies",
]
TEXTS = [" ".join(WORDS[(i * k) % len(WORDS)] for k in range(1, 4 + i % 9)) for i in range(1, 25)]
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.fixture(scope="module")
def tokenizer():
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    special = ["<s>", "</s>", "<|user|>", "<|assistant|>"]
    plain.train_from_iterator(
        TEXTS, trainers.BpeTrainer(vocab_size=320, special_tokens=special, show_progress=False,
                                   initial_alphabet=pre_tokenizers.ByteLevel.alphabet())
    )  # fmt: skip
    made = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>")
    made.chat_template = CHATML
    return made


def llama(**options):
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaConfig(**{**sizes, **heads, "bos_token_id": 0, "eos_token_id": 1, **options})


@pytest.fixture
def task(tokenizer, tmp_path):
    def make(model=None, **options):
        defaults = {"max_length": 32, "tokenizer": tokenizer, "cache_dir": tmp_path / "tokens"}
        return CausalLM(llama() if model is None else model, **{**defaults, **options})

    return make


def trainer_for(task, data=TEXTS, **options):
    defaults = {"batch_size": 4, "max_steps": 6, "lr": 1e-2, "log": "none", "save_best": 0, "num_workers": 0}
    return Trainer(task, list(data), **{**defaults, **options})


def batches_of(trainer, train=True):
    source = trainer._session.train_source if train else trainer._session.val_source
    return [batch.data for batch in source.batches(0)]


def plain_sum(model, batch):
    """The loss written out: log-probabilities of the next tokens, document by document, without padding."""
    total, count = 0.0, 0
    for row, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        size = int(mask.sum())
        logits = model(input_ids=row[None, :size], use_cache=False).logits[0].double()
        chosen = logits[:-1].log_softmax(-1)[torch.arange(size - 1), row[1:size]]
        wanted = labels[1:size] != -100
        total, count = total - (chosen * wanted).sum(), count + int(wanted.sum())
    return total, count


@pytest.mark.parametrize("chunk_tokens", [None, 7, 0])
def test_the_loss_is_that_of_single_documents(task, chunk_tokens):
    trainer = trainer_for(task(chunk_tokens=chunk_tokens))
    made = trainer.task
    for batch in batches_of(trainer)[:3]:
        made.model.zero_grad()
        loss = made.train_step(batch)
        (loss.sum / loss.weight).backward()
        found = {name: p.grad.clone() for name, p in made.model.named_parameters()}
        made.model.zero_grad()
        total, count = plain_sum(made.model, batch)
        (total / count).backward()
        assert loss.weight == count
        torch.testing.assert_close(loss.sum.double(), total, rtol=1e-5, atol=1e-5)
        for name, p in made.model.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("accumulation", [1, 4])
def test_training_is_that_of_a_loop_over_sums_and_tokens(task, accumulation):
    trainer = trainer_for(
        task(), accumulation_steps=accumulation, max_steps=3, optimizer="sgd", scheduler=None, gradient_clip=None,
        weight_decay=0.0,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(trainer.task.model.config)
    model.load_state_dict(trainer.task.model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    batches = [b for epoch in range(3) for b in (x.data for x in trainer._session.train_source.batches(epoch))]
    windows, start, per_epoch = [], 0, -(-len(TEXTS) // 4)
    for epoch in range(3):
        mine = batches[epoch * per_epoch : (epoch + 1) * per_epoch]
        windows += [mine[i : i + accumulation] for i in range(start, len(mine), accumulation)]
    for window in windows[:3]:
        optimizer.zero_grad()
        pairs = [plain_sum(model, batch) for batch in window]
        (sum(total for total, _ in pairs) / sum(count for _, count in pairs)).backward()
        optimizer.step()
    trainer.fit()
    for mine, theirs in zip(trainer.task.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=1e-6)


def gpt2():
    sizes = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2Config(**sizes, bos_token_id=0, eos_token_id=1)


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
    assert len(packed._session.train_source.dataset) < len(TEXTS)
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

    with pytest.raises(BadArgument, match="packed documents do not see each other"):
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


def checkpoint_of(trainer) -> Path:
    return max((trainer.run_folder / "checkpoints").glob("step_*"))


def test_a_checkpoint_opens_with_transformers(task, tmp_path, tokenizer):
    made = task(llama(tie_word_embeddings=True))
    trainer = trainer_for(made, run_dir=tmp_path / "run").fit()
    folder = checkpoint_of(trainer)
    opened = AutoModelForCausalLM.from_pretrained(folder)
    ids = torch.arange(12)[None]
    made.model.eval()
    assert torch.equal(opened(ids).logits, made.model(ids).logits)
    assert AutoTokenizer.from_pretrained(folder)("the fox")["input_ids"] == tokenizer("the fox")["input_ids"]
    again = CausalLM(folder, max_length=32, cache_dir=tmp_path / "tokens")
    assert torch.equal(again.model.eval()(ids).logits, opened(ids).logits)


def test_an_adapter_is_all_that_is_trained_and_saved(task, tmp_path):
    base = AutoModelForCausalLM.from_config(llama())
    base.save_pretrained(tmp_path / "base")

    def run(folder, **options):
        made = task(str(tmp_path / "base"), adapter=LoRA(r=4, dropout=0.0))
        return trainer_for(made, run_dir=tmp_path / folder, save_every=2, save_last=5, **options)

    whole = run("whole").fit()
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
    assert torch.equal(opened(ids).logits, whole.task.model(ids).logits)

    class Cut:
        def on_step_end(self, trainer, step, loss):
            if step == 3:
                raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run("cut", callbacks=[Cut()]).fit()
    again = run("cut").fit()
    assert again.state.step == 6
    for (name, mine), theirs in zip(again.task.model.named_parameters(), whole.task.model.parameters(), strict=True):
        assert torch.equal(mine, theirs), name


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
        assert CausalLM(llama()).text
