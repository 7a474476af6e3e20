"""RoPE scaling: the model of transformers with the same config, saved and reopened; and errors."""

import math

import pytest
import torch
from moe_toys import mixtral
from transformers import AutoConfig, AutoModelForCausalLM

import trainformer
from text_toys import causal_maker, chat_tokenizer, checkpoint_of, gpt2, llama, preferences, sentences, trainer_for
from trainformer.adapters import LoRA
from trainformer.checkpoint import finalize
from trainformer.core.errors import BadArgument
from trainformer.tasks import DPO

TEXTS = [" ".join(sentences()[i : i + 12]) for i in range(8)]
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LLAMA3 = {**YARN, "rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
# What transformers is told by hand; positions, and the parameters besides rope_theta.
BY_HAND = {
    "linear": (256, {"rope_type": "linear", "factor": 4.0}),
    "dynamic": (64, {"rope_type": "dynamic", "factor": 4.0}),
    "yarn": (256, YARN),
    "llama3": (256, LLAMA3),
}


@pytest.fixture(scope="module")
def tokenizer():
    return chat_tokenizer()


@pytest.fixture
def task(tokenizer, tmp_path):
    return causal_maker(tokenizer, tmp_path)


@pytest.mark.parametrize("name", BY_HAND)
def test_it_is_the_model_that_transformers_builds_and_a_checkpoint_keeps_it(task, tmp_path, name):
    torch.manual_seed(0)
    trainer = trainer_for(
        task(llama(), max_length=256, rope_scaling=name), TEXTS, max_steps=1, run_dir=tmp_path / "run"
    ).fit()
    model = trainer.task.model.eval()
    positions, parameters = BY_HAND[name]
    config = llama(max_position_embeddings=positions, rope_parameters={"rope_theta": 10000.0, **parameters})
    theirs = AutoModelForCausalLM.from_config(config).eval()
    theirs.load_state_dict(model.state_dict())
    plain = AutoModelForCausalLM.from_config(llama()).eval()
    plain.load_state_dict(model.state_dict())
    ids = torch.randint(0, 320, (1, 200), generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        found = model(ids).logits
        assert torch.equal(found, theirs(ids).logits)
        assert (found - plain(ids).logits).abs().max() > 1e-4
        reopened = AutoModelForCausalLM.from_pretrained(checkpoint_of(trainer))
        torch.testing.assert_close(reopened(ids).logits, found)
    assert reopened.config.rope_parameters["factor"] == 4.0
    assert reopened.config.max_position_embeddings == positions
    with torch.no_grad():
        loaded = trainformer.load(tmp_path / "run").task.model.eval()
        torch.testing.assert_close(loaded(ids).logits, found)
    again = task(str(checkpoint_of(trainer)), max_length=256)  # no argument needed
    assert trainer_for(again, TEXTS).task.max_length == 256


def test_factor_and_options_can_be_given(task, tokenizer, tmp_path):
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_config(mixtral()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    given = task(str(folder), max_length=96, rope_scaling="yarn", rope_factor=8).model.config
    assert given.rope_parameters["factor"] == 8.0
    assert given.max_position_embeddings == 512
    assert given.rope_parameters["rope_theta"] == AutoConfig.from_pretrained(folder).rope_parameters["rope_theta"]
    options = {"rope_type": "yarn", "factor": 2.0, "beta_fast": 16.0, "attention_factor": 1.0}
    rope = task(str(folder), rope_scaling=options).model.config.rope_parameters
    assert rope.items() >= options.items()
    assert AutoConfig.from_pretrained(folder).max_position_embeddings == 64  # the source does not change


def test_adapters_and_preferences_train_at_the_longer_length_and_finalize_keeps_it(tokenizer, tmp_path):
    folder = tmp_path / "base"
    AutoModelForCausalLM.from_config(llama()).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    options = {"max_length": 128, "rope_scaling": "linear", "cache_dir": tmp_path / "tokens"}
    task = DPO(str(folder), adapter=LoRA(r=2, dropout=0), **options)
    run = trainer_for(task, preferences()[:4], max_steps=1, run_dir=tmp_path / "run").fit()
    ids = torch.randint(0, 320, (1, 100), generator=torch.Generator().manual_seed(0))
    task.model.eval()
    finalize(tmp_path / "run", tmp_path / "final")
    final = AutoModelForCausalLM.from_pretrained(tmp_path / "final")
    torch.testing.assert_close(final(ids).logits, task.model(ids).logits, rtol=1e-4, atol=1e-5)
    assert final.config.rope_parameters["factor"] == 2.0
    again = DPO(str(checkpoint_of(run)), max_length=128, cache_dir=tmp_path / "tokens")  # the adapter has it, too
    torch.testing.assert_close(again.model.eval()(ids).logits, task.model(ids).logits)
    more = trainer_for(again, preferences()[:4], max_steps=1, run_dir=tmp_path / "more").fit()  # and hands it on
    finalize(tmp_path / "more", tmp_path / "final2")
    third = AutoModelForCausalLM.from_pretrained(tmp_path / "final2")
    torch.testing.assert_close(third(ids).logits, more.task.model.eval()(ids).logits, rtol=1e-4, atol=1e-5)


def test_the_default_length_is_lowered_to_the_positions_and_a_longer_one_is_refused(task):
    assert trainer_for(task(llama(), max_length=64), TEXTS).task.max_length == 64
    with pytest.raises(BadArgument, match=r"at most 64, the positions that the model has, received 65.*rope_scaling"):
        trainer_for(task(llama(), max_length=65), TEXTS)
    default = task(llama(max_position_embeddings=48), max_length=2048)  # as if it was left out
    assert trainer_for(default, TEXTS).task.max_length == 48


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (llama, {"rope_scaling": "yarm"}, "rope_scaling"),
        (llama, {"rope_scaling": 4.0}, "one of linear, dynamic, yarn, llama3"),
        (llama, {"rope_scaling": "yarn", "rope_factor": 0.5}, "rope_factor to be a number above 1"),
        (llama, {"rope_scaling": "yarn", "rope_factor": math.nan}, "rope_factor to be a number above 1"),
        (llama, {"rope_factor": 2.0}, "rope_scaling with rope_factor"),
        (llama, {"rope_scaling": {"rope_type": "yarn", "factor": 2.0}, "rope_factor": 2.0}, "the factor once"),
        (llama, {"rope_scaling": "yarn", "max_length": 32}, "max_length beyond the 64 positions"),
        (
            lambda: llama(rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}),
            {"rope_scaling": "yarn", "max_length": 256},
            "without linear RoPE scaling",
        ),
        (gpt2, {"rope_scaling": "yarn", "max_length": 128}, "rotary position embeddings"),
        (lambda: AutoModelForCausalLM.from_config(llama()), {"rope_scaling": "yarn"}, "still to be loaded"),
    ],
)
def test_mistakes_are_named(task, model, options, words):
    with pytest.raises(BadArgument, match=words):
        trainer_for(task(model(), **options), TEXTS)
