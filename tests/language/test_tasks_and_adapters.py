"""Every task with every adapter: it trains, saves, opens elsewhere, reloads equal and generates, or is rejected.

`ROWS` are the tasks and `ADAPTERS` the columns. Unsupported combinations are in the table too, with a part of the
error message. A new task is one more row.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any

import clip_toys
import pytest
import shapes
import torch
import transformers
import vlm_toys
from peft import PeftModel
from safetensors.torch import load_file
from torch import Tensor

import text_toys as toys
from trainformer.adapters import LoRA, PrefixTuning, QLoRA, merge_and_export
from trainformer.adapters.qlora import prepare_quantised
from trainformer.core.errors import BadArgument
from trainformer.tasks.language.causal_lm import CausalLM
from trainformer.tasks.language.cpo import CPO
from trainformer.tasks.language.dpo import DPO
from trainformer.tasks.language.embedding import TextEmbedding
from trainformer.tasks.language.kto import KTO
from trainformer.tasks.language.masked_lm import MaskedLM
from trainformer.tasks.language.reward_model import RewardModel
from trainformer.tasks.language.seq2seq import Seq2Seq
from trainformer.tasks.language.text_classification import TextClassification
from trainformer.tasks.language.token_classification import TokenClassification
from trainformer.tasks.multimodal.clip import CLIP
from trainformer.tasks.multimodal.vlm import VLM

ADAPTERS = {
    "none": None,
    "lora": LoRA(r=4, dropout=0.0),
    "dora": LoRA(r=4, dropout=0.0, use_dora=True),
    "rslora": LoRA(r=4, dropout=0.0, use_rslora=True),
    "qlora": QLoRA(r=4, dropout=0.0),
    "prefix": PrefixTuning(4),
}
# Names of parameters that belong to an adapter; heads that are trained in full are wrapped by peft.
ADAPTED = ("lora_", "prompt_encoder", "modules_to_save")


Inputs = dict[str, Tensor]


def tokens(tools: Any) -> Inputs:
    """What a model for text is asked."""
    return {"input_ids": torch.arange(5, 17)[None]}


def both_sides(tools: Any) -> Inputs:
    return {**tokens(tools), "decoder_input_ids": torch.arange(6, 12)[None]}


def captioned(tools: Any) -> Inputs:
    shown = [scene.draw() for scene in SCENES[:2]]
    return tools(text=[scene.caption for scene in SCENES[:2]], images=shown, padding=True, return_tensors="pt")


def asked(token: str, tools: Any) -> Inputs:
    return tools(text=[f"{token} which shape is it"], images=[SCENES[0].draw()], return_tensors="pt")


def continued(prompt: str, task: Any, **options: Any) -> list[str]:
    """What follows a prompt, and its beginning."""
    return task.generate([prompt, prompt[:1]], **options)


def answered(task: Any, **options: Any) -> list[str]:
    return task.generate([SCENES[0].draw(), SCENES[1].draw()], "which shape is it?", **options)


@dataclass(frozen=True)
class Row:
    """A task: how it is made of a model's folder, what it learns from, and what opens its checkpoints."""

    task: Any  # its class, called with the folder, the adapter and the options
    config: Callable[[], Any]
    auto: str
    data: Sequence[Any]
    tools: Callable[[], Any]  # the tokenizer or processor
    options: dict[str, Any] = field(default_factory=lambda: {"max_length": 64})
    inputs: Callable[[Any], Inputs] = tokens
    generate: Callable[..., list[str]] | None = None  # where the task can
    rejected: dict[str, str] = field(default_factory=dict)  # adapter: what the error says


SCENES = shapes.scenes()[::25]
TEXTS = toys.sentences()
LABELLED = [{"text": text, "label": "animal" if "dog" in text or "fox" in text else "other"} for text in TEXTS]
TAGGED = [{"tokens": text.split(), "ner_tags": ["B-X" if w == "fox" else "O" for w in text.split()]} for text in TEXTS]
SIMILAR = [{"anchor": text, "positive": " ".join(reversed(text.split()))} for text in TEXTS]

causal = partial(
    Row, CausalLM, auto="AutoModelForCausalLM", data=toys.conversations(), tools=toys.chat_tokenizer,
    generate=partial(continued, "the quick"),
)  # fmt: skip
pairs = partial(
    Row, Seq2Seq, auto="AutoModelForSeq2SeqLM", data=toys.digit_pairs(24), tools=toys.reading_tokenizer,
    options={"max_source_length": 16, "max_target_length": 12}, inputs=both_sides, generate=partial(continued, "1 2"),
)  # fmt: skip
preferring = partial(
    Row, config=toys.llama, auto="AutoModelForCausalLM", data=toys.preferences(), tools=toys.chat_tokenizer,
    generate=partial(continued, "the quick"),
)  # fmt: skip
words = partial(toys.masking_tokenizer, TEXTS)
seeing = partial(
    Row, VLM, auto="AutoModelForImageTextToText", data=shapes.Questions(SCENES), options={"max_length": 128},
    generate=answered,
)  # fmt: skip
QWEN_IMAGE = "<|vision_start|><|image_pad|><|vision_end|>"

ROWS = {
    "causal-llama": causal(toys.llama),
    "causal-gpt2": causal(toys.gpt2),
    "packed-llama": causal(
        toys.llama, options={"max_length": 64, "packing": True}, rejected={"prefix": "prefix tuning or packing"}
    ),
    "seq2seq-t5": pairs(toys.t5),
    "seq2seq-bart": pairs(toys.bart),
    "masked-bert": Row(MaskedLM, toys.bert, "AutoModelForMaskedLM", TEXTS, words),
    "dpo-llama": preferring(DPO),
    "kto-llama": preferring(KTO),
    "cpo-llama": preferring(CPO),
    "reward-llama": Row(
        RewardModel,
        partial(toys.llama, num_labels=1, pad_token_id=1),
        "AutoModelForSequenceClassification",
        toys.preferences(),
        toys.chat_tokenizer,
    ),
    "classes-bert": Row(
        TextClassification,
        toys.bert,
        "AutoModelForSequenceClassification",
        LABELLED,
        words,
        options={"max_length": 64, "class_names": ["animal", "other"]},
    ),
    "tags-bert": Row(
        TokenClassification,
        toys.bert,
        "AutoModelForTokenClassification",
        TAGGED,
        words,
        options={"max_length": 64, "class_names": ["O", "B-X"]},
    ),
    "embedding-bert": Row(TextEmbedding, toys.bert, "AutoModel", SIMILAR, words),
    "clip": Row(
        CLIP,
        clip_toys.config,
        "AutoModel",
        shapes.Pairs(SCENES),
        clip_toys.processor,
        options={},
        inputs=captioned,
        rejected={"prefix": "keys and values from outside"},
    ),
    "vlm-llava": seeing(vlm_toys.config, tools=vlm_toys.processor, inputs=partial(asked, "<image>")),
    "vlm-qwen2": seeing(
        partial(vlm_toys.config, "qwen2_vl"),
        tools=partial(vlm_toys.processor, "qwen2_vl"),
        inputs=partial(asked, QWEN_IMAGE),
        rejected={"prefix": "positions in one dimension"},
    ),
}
# Variants of LoRA differ in the adapter alone, which tests/adapters runs on every architecture: one task is enough.
TABLE = [
    pytest.param(row, adapter, marks=[pytest.mark.slow] if adapter == "qlora" else [])
    for row in ROWS
    for adapter in ADAPTERS
    if adapter not in ("dora", "rslora") or row == "causal-llama"
]


@pytest.fixture(scope="module")
def bases(tmp_path_factory):
    """A model of each row in a folder: bitsandbytes quantises while loading."""
    made: dict[str, Path] = {}

    def base(name: str) -> Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            torch.manual_seed(0)
            getattr(transformers, ROWS[name].auto).from_config(ROWS[name].config()).save_pretrained(folder)
            ROWS[name].tools().save_pretrained(folder)
            made[name] = folder
        return made[name]

    return base


@torch.no_grad()
def outputs_of(model: Any, row: Row) -> Tensor:
    output = model.eval()(**row.inputs(row.tools()))
    for name in ("logits", "logits_per_image"):
        if getattr(output, name, None) is not None:
            return getattr(output, name)
    return output.last_hidden_state


def opened(row: Row, base: Path, checkpoint: Path, choice: str) -> Any:
    """A checkpoint, opened by transformers or by peft, without us."""
    auto = getattr(transformers, row.auto)
    adapter = ADAPTERS[choice]
    if adapter is None:
        return auto.from_pretrained(checkpoint)
    plain = auto.from_pretrained(base, **adapter.load_options(row.task.kind))
    if choice == "qlora":
        prepare_quantised(plain)
    return PeftModel.from_pretrained(plain, checkpoint)


@pytest.mark.parametrize(("name", "choice"), TABLE)
def test_every_task_with_every_adapter(name, choice, bases, tmp_path):
    row, adapter = ROWS[name], ADAPTERS[choice]
    folder = bases(name)

    def run(where: str, **options: Any) -> Any:
        cached = {"cache_dir": tmp_path / "tokens"} if "cache_dir" in {f.name for f in fields(row.task)} else {}
        task = row.task(str(folder), adapter, **cached, **row.options)
        return toys.trainer_for(task, row.data, max_steps=1, run_dir=tmp_path / where, **options)

    if choice in row.rejected:
        with pytest.raises(BadArgument, match=row.rejected[choice]):
            run("run")
        return

    trainer = run("run")
    model = trainer.task.model
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    trainer.fit()
    assert trainer.state.step == 1
    assert math.isfinite(trainer.evaluate(row.data)["val/loss"])

    # The adapter is all that is trained, and the optimizer sees nothing else.
    trained = {name for name, p in model.named_parameters() if p.requires_grad}
    seen = {id(p) for group in trainer.active_optimizer.param_groups for p in group["params"]}
    assert seen == {id(p) for name, p in model.named_parameters() if name in trained}
    changed = {name for name, p in model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert changed <= trained
    if adapter is not None:
        assert trained == {name for name in before if any(part in name for part in ADAPTED)}

    # A checkpoint holds the whole model (shared weights once), or the adapter alone, and opens without us.
    checkpoint = toys.checkpoint_of(trainer)
    saved = load_file(checkpoint / "model.safetensors")
    whole = {tensor.data_ptr(): tensor for tensor in model.state_dict().values()}.values()
    kept = whole if adapter is None else [p for p in model.parameters() if p.requires_grad]
    assert sum(tensor.numel() for tensor in saved.values()) == sum(tensor.numel() for tensor in kept)
    after = outputs_of(model, row)
    torch.testing.assert_close(outputs_of(opened(row, folder, checkpoint, choice), row), after)
    base = getattr(transformers, row.auto).from_pretrained(folder)
    assert not torch.allclose(outputs_of(base, row), after, atol=1e-4)

    # A new task resumes from it.
    again = run("again").load(checkpoint)
    assert again.state.step == 1
    torch.testing.assert_close(outputs_of(again.task.model, row), after)
    if row.generate is not None:
        # A model that knows nothing would end at once.
        options = {"max_new_tokens": 5, "suppress_tokens": trainer.task.text_tokenizer.all_special_ids}
        texts = row.generate(again.task, **options)
        assert texts == row.generate(trainer.task, **options)
        assert any(texts)
    if isinstance(adapter, LoRA):
        merge_and_export(again.task.model, tmp_path / "merged", row.tools())
        merged = getattr(transformers, row.auto).from_pretrained(tmp_path / "merged")
        torch.testing.assert_close(outputs_of(merged, row), after, atol=1e-5, rtol=1e-5)


# Rows whose samples know nothing of each other, and are rows of each tensor (pixels of a batch are not). KTO and CPO
# know totals of their step: tests/language/test_preferences.py.
ALONE = [name for name, row in ROWS.items() if row.task not in (TextEmbedding, CLIP, VLM, KTO, CPO)]


@pytest.mark.parametrize("name", ALONE)
def test_two_micro_batches_equal_one_batch(name, bases, tmp_path):
    row = ROWS[name]
    task = row.task(str(bases(name)), None, cache_dir=tmp_path / "tokens", **row.options)
    trainer = toys.trainer_for(task, row.data, batch_size=8)
    batch = toys.batches_of(trainer)[0]
    task.model.eval()  # GPT-2 has dropout
    halves = [{key: value[part] for key, value in batch.items()} for part in (slice(0, 3), slice(3, None))]
    sums, weights, gradients = [], [], []
    for parts in ([batch], halves):
        task.model.zero_grad()
        losses = [task.train_step(part) for part in parts]
        sum(loss.sum for loss in losses).backward()
        sums.append(sum(loss.sum.item() for loss in losses))
        weights.append(sum(float(loss.weight) for loss in losses))
        gradients.append([p.grad.clone() for p in task.model.parameters() if p.grad is not None])
    assert weights[0] == weights[1] > 1
    assert sums[0] == pytest.approx(sums[1], rel=1e-5)
    for whole, split in zip(*gradients, strict=True):
        torch.testing.assert_close(whole, split, rtol=1e-4, atol=1e-4)
