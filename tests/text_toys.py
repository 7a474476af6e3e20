"""What tests of language tasks share: texts, tokenizers and tiny models, and losses written out to be held against.

Nothing here is loaded from anywhere: tokenizers are trained on the spot, models are made from configurations.
"""

from __future__ import annotations

import copy
import random
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from torch import Tensor, nn
from transformers import BartConfig, BertConfig, GPT2Config, LlamaConfig, PreTrainedTokenizerFast, T5Config

from trainformer import Trainer
from trainformer.run import run_of

Batch = dict[str, Tensor]
PlainSum = Callable[[Any, Batch], tuple[Any, int]]

# -- texts -------------------------------------------------------------------------------------------------

WORDS = [
    *("the", "quick", "brown", "fox", "jumps", "over", "a"),
    *("lazy", "dog", "while", "seven", "wizards", "bake", "pies"),
]
DIGITS = ["zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine"]
# What is behind the role is the turn: its end is trained on too.
CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
# The same text, with the answers marked.
MARKED_CHATML = (
    "{% for m in messages %}<|{{ m['role'] }}|>{% if m['role'] == 'assistant' %}"
    "{% generation %}{{ m['content'] }}</s>{% endgeneration %}{% else %}{{ m['content'] }}</s>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def sentences(words: Sequence[str] = WORDS) -> list[str]:
    """24 texts of 3 to 11 words."""
    return [" ".join(words[(i * k) % len(words)] for k in range(1, 4 + i % 9)) for i in range(1, 25)]


def conversations(turns: int = 1) -> list[dict[str, Any]]:
    """24 of them, with so many questions, of unequal lengths."""
    texts = sentences()
    made = []
    for i in range(len(texts)):
        asked = [{"role": "user", "content": texts[(i + 5 * k) % len(texts)]} for k in range(turns)]
        said = [{"role": "assistant", "content": texts[(3 * i + k) % len(texts)]} for k in range(turns)]
        made.append({"messages": [turn for pair in zip(asked, said, strict=True) for turn in pair]})
    return made


def preferences() -> list[dict[str, str]]:
    """16 prompts with two answers each."""
    return [
        {
            "prompt": " ".join(WORDS[(i * k) % 14] for k in range(1, 3 + i % 5)),
            "chosen": "".join(f" {WORDS[(i + k) % 14]}" for k in range(1 + i % 4)),
            "rejected": "".join(f" {WORDS[(i * 3 + 5 * k + 1) % 14]}" for k in range(2 + i % 3)),
        }
        for i in range(1, 17)
    ]


def digit_pairs(count: int, seed: int = 0, longest: int = 4) -> list[dict[str, str]]:
    """Digits, and the words for them."""
    rng = random.Random(seed)
    made = []
    for _ in range(count):
        digits = [rng.randrange(10) for _ in range(rng.randint(1, longest))]
        made.append({"source": " ".join(map(str, digits)), "target": " ".join(DIGITS[d] for d in digits)})
    return made


# -- tokenizers --------------------------------------------------------------------------------------------


def byte_pairs(texts: Iterable[str], special: Sequence[str], size: int = 320) -> Tokenizer:
    """Byte-level BPE, trained on texts; it can write anything."""
    plain = Tokenizer(models.BPE())
    plain.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    plain.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    plain.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=size, special_tokens=list(special), show_progress=False, initial_alphabet=alphabet
        ),
    )
    return plain


def chat_tokenizer(template: str = CHATML) -> Any:
    """For causal models: a BOS that it does not add, an EOS, no padding token, and turns."""
    plain = byte_pairs(sentences(), ["<s>", "</s>", "<|user|>", "<|assistant|>", "<|system|>"])
    made = PreTrainedTokenizerFast(tokenizer_object=plain, bos_token="<s>", eos_token="</s>")
    made.chat_template = template
    return made


def reading_tokenizer(size: int = 300) -> Any:
    """For encoder-decoders, as T5's: it ends what it reads with EOS."""
    texts = [text for pair in digit_pairs(200) for text in pair.values()]
    plain = byte_pairs(texts, ["<pad>", "</s>", "<s>", "<unk>"], size)
    plain.post_processor = processors.TemplateProcessing(single="$A </s>", special_tokens=[("</s>", 1)])
    names = {"pad_token": "<pad>", "eos_token": "</s>", "unk_token": "<unk>", "bos_token": "<s>"}
    return PreTrainedTokenizerFast(tokenizer_object=plain, **names)


def masking_tokenizer(texts: Iterable[str]) -> Any:
    """For masked models, as BERT's: words in pieces, between [CLS] and [SEP]."""
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    plain = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    plain.pre_tokenizer = pre_tokenizers.Whitespace()
    plain.train_from_iterator(
        texts, trainers.WordPieceTrainer(vocab_size=90, special_tokens=special, show_progress=False)
    )
    around = [("[CLS]", 2), ("[SEP]", 3)]
    plain.post_processor = processors.TemplateProcessing(single="[CLS] $A [SEP]", special_tokens=around)
    names = ("pad_token", "unk_token", "cls_token", "sep_token", "mask_token")
    return PreTrainedTokenizerFast(tokenizer_object=plain, **dict(zip(names, special, strict=True)))


# -- models ------------------------------------------------------------------------------------------------


def llama(**options: Any) -> LlamaConfig:
    sizes = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    return LlamaConfig(**{**sizes, **heads, "bos_token_id": 0, "eos_token_id": 1, **options})


def gpt2(**options: Any) -> GPT2Config:
    """With dropout."""
    sizes = {"vocab_size": 320, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
    return GPT2Config(**{**sizes, "bos_token_id": 0, "eos_token_id": 1, **options})


def t5(**options: Any) -> T5Config:
    sizes = {"vocab_size": 320, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 2, "num_heads": 4}
    ids = {"decoder_start_token_id": 0, "pad_token_id": 0, "eos_token_id": 1}
    return T5Config(**{**sizes, **ids, "dropout_rate": 0.0, **options})


def bart(**options: Any) -> BartConfig:
    sizes = {"vocab_size": 320, "d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "max_position_embeddings": 64}
    heads = {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}
    ids = {"pad_token_id": 0, "eos_token_id": 1, "bos_token_id": 2, "decoder_start_token_id": 1}
    ends = {"forced_eos_token_id": None, "dropout": 0.0}
    return BartConfig(**{**sizes, **heads, **ids, **ends, **options})


def bert(**options: Any) -> BertConfig:
    sizes = {"vocab_size": 96, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    rest = {"num_attention_heads": 4, "max_position_embeddings": 64}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return BertConfig(**{**sizes, **rest, **no_dropout, **options})


# -- runs --------------------------------------------------------------------------------------------------


def trainer_for(task: Any, data: Any, **options: Any) -> Trainer:
    """Six steps with batches of four, quietly, unless the options say otherwise."""
    defaults = {"batch_size": 4, "max_steps": 6, "lr": 1e-2, "log": "none", "save_best": 0, "num_workers": 0}
    return Trainer(task, data if isinstance(data, str) else list(data), **{**defaults, **options})


def batches_of(trainer: Trainer, epoch: int = 0, position: int = 0, train: bool = True) -> list[Batch]:
    """The batches of an epoch as the run gets them, from that sample on."""
    source = run_of(trainer).train_source if train else run_of(trainer).val_source
    assert source is not None
    return [batch.data for batch in source.batches(epoch, position // trainer.batch_size, position)]


def checkpoint_of(trainer: Trainer) -> Path:
    """The folder of the last checkpoint."""
    assert trainer.run_folder is not None
    return max((trainer.run_folder / "checkpoints").glob("step_*"))


class Cut:
    """Ends a run in its fourth step, as Ctrl-C would."""

    def on_step_end(self, trainer: Any, step: int, loss: Any) -> None:
        if step == 3:
            raise KeyboardInterrupt


def causal_maker(tokenizer: Any, folder: Path) -> Callable[..., Any]:
    """Makes `CausalLM` tasks of a small Llama, or of another model."""
    from trainformer.tasks import CausalLM

    def make(model: Any = None, **options: Any) -> Any:
        defaults = {"max_length": 32, "tokenizer": tokenizer, "cache_dir": folder / "tokens"}
        return CausalLM(llama() if model is None else model, **{**defaults, **options})

    return make


# -- what they are held against ----------------------------------------------------------------------------


def next_token_sum(model: Any, batch: Batch) -> tuple[Any, int]:
    """The loss of a causal model: log-probabilities of the next tokens, document by document, without padding."""
    total, count = 0.0, 0
    for row, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        found, wanted = next_token_log_probs(model, row, labels, mask)
        total, count = total - (found * wanted).sum(), count + int(wanted.sum())
    return total, count


def next_token_log_probs(model: Any, row: Tensor, labels: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Of each token but the first of one sequence, alone and in float64; and whether it is supervised."""
    size = int(mask.sum())
    logits = model(input_ids=row[None, :size], use_cache=False).logits[0].double()
    return logits[:-1].log_softmax(-1)[torch.arange(size - 1), row[1:size]], labels[1:size] != -100


def target_sum(model: Any, batch: Batch) -> tuple[Any, int]:
    """The loss of an encoder-decoder: log-probabilities of the target's tokens, pair by pair, without padding."""
    start = model.config.decoder_start_token_id
    total, count = 0.0, 0
    for row, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        source, target = row[: int(mask.sum())], labels[labels != -100]
        begun = torch.cat([torch.tensor([start]), target[:-1]])
        logits = model(input_ids=source[None], decoder_input_ids=begun[None], use_cache=False).logits[0].double()
        total = total - logits.log_softmax(-1)[torch.arange(len(target)), target].sum()
        count += len(target)
    return total, count


def masked_sum(model: Any, batch: Batch) -> tuple[Any, int]:
    """The loss of a masked model: log-probabilities of the hidden tokens, piece by piece, without padding."""
    total, count = 0.0, 0
    for row, labels, mask in zip(batch["input_ids"], batch["labels"], batch["attention_mask"], strict=True):
        size = int(mask.sum())
        scores = model(input_ids=row[None, :size]).logits[0].double().log_softmax(-1)
        for place in range(size):
            if labels[place] != -100:
                total, count = total - scores[place, labels[place]], count + 1
    return total, count


def check_losses(task: Any, batches: Sequence[Batch], plain_sum: PlainSum, atol: float = 1e-6) -> int:
    """Loss and gradients of each batch are those of its sequences one by one; how many batches were compared."""
    for batch in batches:
        task.model.zero_grad()
        loss = task.train_step(batch)
        (loss.sum / loss.weight).backward()
        found = {name: p.grad.clone() for name, p in task.model.named_parameters()}
        task.model.zero_grad()
        total, count = plain_sum(task.model, batch)
        (total / count).backward()
        assert loss.weight == count
        torch.testing.assert_close(loss.sum.double(), total, rtol=1e-5, atol=1e-5)
        for name, p in task.model.named_parameters():
            torch.testing.assert_close(found[name], p.grad, rtol=1e-4, atol=atol)
    return len(batches)


def check_training(task: Any, data: Sequence[Any], plain_sum: PlainSum, accumulation: int, atol: float = 1e-6) -> int:
    """Steps of a run, and how many: they end in the weights of a loop that divides each window's sums by its tokens."""
    trainer = trainer_for(
        task, data, accumulation_steps=accumulation, max_steps=3, optimizer="sgd", scheduler=None, gradient_clip=None,
        weight_decay=0.0,
    )  # fmt: skip
    model = copy.deepcopy(task.model)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
    windows = []
    for epoch in range(3):
        batches = batches_of(trainer, epoch)
        windows += [batches[i : i + accumulation] for i in range(0, len(batches), accumulation)]
    for window in windows[:3]:
        optimizer.zero_grad()
        pairs = [plain_sum(model, batch) for batch in window]
        (sum(total for total, _ in pairs) / sum(count for _, count in pairs)).backward()
        optimizer.step()
    trainer.fit()
    for mine, theirs in zip(task.model.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine, theirs, rtol=1e-5, atol=atol)
    return trainer.state.step


def check_resuming(run: Callable[..., Trainer]) -> tuple[Trainer, Trainer]:
    """A run that is cut and begun again ends in the weights of one that was not; both. ``run(folder, **options)``."""
    whole = run("whole").fit()
    with pytest.raises(KeyboardInterrupt):
        run("cut", callbacks=[Cut()]).fit()
    again = run("cut").fit()
    assert again.state.step == whole.state.step
    check_equal(again.task.model, whole.task.model)
    return whole, again


def check_equal(model: nn.Module, other: nn.Module) -> None:
    """All parameters are equal to the last bit."""
    for (name, mine), theirs in zip(model.named_parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs), name
