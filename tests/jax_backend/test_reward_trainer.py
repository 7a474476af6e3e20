"""Reward models on JAX: steps and evaluations of the torch task, folders that transformers and peft open."""

import json
from pathlib import Path

import numpy as np
import peft
import pytest
import torch
from flax import nnx
from jax_model_toys import save_random
from step_zero import ON_TORCH, ONE_STEP, assert_same_gradients, assert_same_metrics, metrics_of
from text_trainer_toys import batch_of, devices, make_folder, trainer_of
from transformers import AutoModelForSequenceClassification, MistralConfig, Qwen2Config, Qwen3Config

import text_toys as toys
from trainformer.core.errors import BadArgument, DataError
from trainformer.jax import LoRAConfig, RewardConfig, RewardTrainer
from trainformer.models.jax import Bert, BertConfig, DecoderConfig, load_model, save_model
from trainformer.tasks.language.reward_model import RewardModel

PAIRS = [{**pair, "margin": 0.1 * (number % 3)} for number, pair in enumerate(toys.preferences())]
TEXTS = ["the quick brown fox", "a lazy dog", "seven wizards bake pies while a dog jumps"]
SCORE = {"score/kernel": "score.weight"}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A Llama with a scalar head."""
    made = tmp_path_factory.mktemp("scored")
    torch.manual_seed(0)
    # The tokenizer has no padding token: both sides use EOS.
    save_with_head(toys.llama(pad_token_id=1), made)
    toys.chat_tokenizer().save_pretrained(made)
    return made


def save_with_head(config, folder):
    config.num_labels = 1
    model = AutoModelForSequenceClassification.from_config(config).eval()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.2).add_(1.0 if "norm" in name or "ln_" in name else 0.0)
    model.save_pretrained(folder)
    return model


def reward(folder, where, data=PAIRS, **given):
    return trainer_of(RewardTrainer, RewardConfig, folder, data, where, **given)


@pytest.fixture(scope="module")
def on_torch(folder, tmp_path_factory):
    """The torch run of one step, and the metrics of an evaluation before it."""
    where = tmp_path_factory.mktemp("torch")
    task = RewardModel(str(folder), max_length=32, cache_dir=where / "t", center_rewards_coefficient=0.05)
    rest = {"batch_size": len(PAIRS), "optimizer": "sgd", "scheduler": None, "weight_decay": 0.0}
    trainer = toys.trainer_for(task, PAIRS, **rest, **ON_TORCH, run_dir=str(where / "run"), val_data=PAIRS)
    before = {name.removeprefix("val/"): value for name, value in trainer.evaluate().items()}
    scores = task.score(TEXTS)
    trainer.fit()
    return trainer, before, scores


@pytest.mark.parametrize("dims", [(1, 1, 1, 1), (2, 1, 2, 1)])
def test_the_first_step_is_that_of_torch(folder, on_torch, tmp_path, dims):
    theirs, before, scores = on_torch
    sizes = {} if dims[0] == 1 else {"gradient_accumulation_steps": 2, "eval_batch_size": 6}
    options = {"eval_dataset": PAIRS, "mesh": devices(dims)}
    mine = reward(folder, tmp_path, center_rewards_coefficient=0.05, **ONE_STEP, **sizes, options=options)
    assert_same_metrics({name.removeprefix("eval_"): value for name, value in mine.eval().items()}, before)
    assert before["min_reward"] < before["mean_reward"] < before["max_reward"]
    assert mine.score(TEXTS, batch_size=2) == pytest.approx(scores, abs=1e-5)
    assert_same_gradients(mine.train(), folder, theirs.task.model, SCORE)
    assert_same_metrics(metrics_of(mine), metrics_of(theirs))


def test_a_trained_model_opens_in_transformers_with_equal_scores(tmp_path):
    base = make_folder(tmp_path / "base")  # a causal model: the head is new
    mine = reward(base, tmp_path, truncation="truncate")
    mine.train()
    saved = Path(mine.save_pretrained(tmp_path / "saved"))
    config = json.loads((saved / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["pad_token_id"] == 1
    model = AutoModelForSequenceClassification.from_pretrained(saved, dtype=torch.float32).eval()
    assert model.config.num_labels == 1
    ids, mask = _padded(mine, TEXTS)
    with torch.no_grad():
        wanted = model(input_ids=torch.as_tensor(ids), attention_mask=torch.as_tensor(mask)).logits[:, 0].numpy()
    assert mine.score(TEXTS) == pytest.approx(wanted, abs=1e-5)
    again = reward(saved, tmp_path / "again", truncation="truncate")
    assert again.score(TEXTS) == mine.score(TEXTS)


def _padded(trainer, texts):
    rows = [trainer.text(text)["input_ids"] + [trainer.text.eos_token_id] for text in texts]
    length = max(map(len, rows))
    ids = np.array([row + [trainer.pad_id] * (length - len(row)) for row in rows])
    return ids, np.array([[1] * len(row) + [0] * (length - len(row)) for row in rows])


SMALL = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "pad_token_id": 0}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}


@pytest.mark.parametrize(
    "config",
    [
        toys.gpt2(pad_token_id=0),
        MistralConfig(**SMALL, **HEADS),
        Qwen2Config(**SMALL, **HEADS, tie_word_embeddings=True),
        pytest.param(Qwen3Config(**SMALL, **HEADS, head_dim=16), marks=pytest.mark.slow),
    ],
    ids=["gpt2", "mistral", "qwen2", "qwen3"],
)
def test_families_score_as_transformers_does(config, tmp_path):
    theirs = save_with_head(config, tmp_path / "theirs")
    ids = np.array([[5, 6, 7, 8, 9], [10, 11, 12, 0, 0]])
    mine = load_model(tmp_path / "theirs")
    with torch.no_grad():
        wanted = theirs(torch.as_tensor(ids), attention_mask=torch.as_tensor(ids > 0)).logits[:, 0].numpy()
    np.testing.assert_allclose(np.asarray(mine(ids, np.array([4, 2]))), wanted, atol=2e-5)
    save_model(mine, tmp_path / "mine")
    again = AutoModelForSequenceClassification.from_pretrained(tmp_path / "mine", dtype=torch.float32).state_dict()
    assert again.keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        np.testing.assert_array_equal(again[name].numpy(), value.numpy(), err_msg=name)


def test_lora_trains_the_head_too_and_peft_opens_the_adapter(folder, tmp_path):
    options = {"lora": LoRAConfig(r=2, targets="all-linear"), "eval_dataset": PAIRS}
    mine = reward(folder, tmp_path, learning_rate=1e-3, options=options)
    before = mine.eval()["eval_loss"]
    state = mine.train()
    assert mine.eval()["eval_loss"] < before
    assert {path for path in state.trainable if "lora" not in path} == {"score/kernel"}
    saved = mine.save_pretrained(tmp_path / "adapter")
    base = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32)
    model = peft.PeftModel.from_pretrained(base, saved).eval()
    ids, mask = _padded(mine, TEXTS)
    with torch.no_grad():
        wanted = model(input_ids=torch.as_tensor(ids), attention_mask=torch.as_tensor(mask)).logits[:, 0].numpy()
    assert mine.score(TEXTS) == pytest.approx(wanted, abs=1e-5)


@pytest.mark.slow
def test_a_resumed_run_is_the_same(folder, tmp_path):
    sizes = {"total_batch_size": 8, "num_train_epochs": 3, "optimizer": "adamw", "learning_rate": 1e-2}
    whole = reward(folder, tmp_path / "whole", max_steps=4, **sizes).train()
    reward(folder, tmp_path / "cut", max_steps=2, resume="auto", **sizes).train()
    resumed = reward(folder, tmp_path / "cut", max_steps=4, resume="auto", **sizes).train()
    for name in ("score", "norm"):
        for key, value in whole.params[name].items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(resumed.params[name][key]))


def test_random_weights_and_what_is_refused(folder, tmp_path):
    config = DecoderConfig(**{name: SMALL[name] for name in SMALL if name != "pad_token_id"}, num_attention_heads=4)
    mine = reward(config, tmp_path, options={"processing_class": toys.chat_tokenizer()})
    assert batch_of(mine)["margin"].max() == pytest.approx(0.2)
    saved = mine.save_pretrained(tmp_path / "saved")
    assert AutoModelForSequenceClassification.from_pretrained(saved).config.num_labels == 1
    with pytest.raises(BadArgument, match="center_rewards_coefficient"):
        RewardConfig(center_rewards_coefficient=-1.0)
    save_random(toys.llama(), tmp_path / "causal")
    decoder, tokenizer = load_model(tmp_path / "causal"), {"processing_class": toys.chat_tokenizer()}
    with pytest.raises(BadArgument, match="a reward model, or the folder of a decoder, received 'Decoder'"):
        reward(decoder, tmp_path, options=tokenizer)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 8}
    save_model(Bert(BertConfig(vocab_size=32, **sizes), rngs=nnx.Rngs(0)), tmp_path / "bert")
    with pytest.raises(BadArgument, match="the folder of a decoder for RewardTrainer, received 'bert'"):
        reward(tmp_path / "bert", tmp_path, options=tokenizer)
    with pytest.raises(DataError, match="preference"):
        reward(folder, tmp_path, [{"text": "nothing to compare"}])
    with pytest.raises(DataError, match="at most max_length tokens"):
        mine.score("the quick brown fox " * 40)
    two = toys.llama(pad_token_id=1)
    two.num_labels = 2
    AutoModelForSequenceClassification.from_config(two).save_pretrained(tmp_path / "two")
    with pytest.raises(BadArgument, match="one output, received '2 outputs'"):
        load_model(tmp_path / "two")
