"""Generation with a KV cache: against transformers and the forward pass without one, over buckets, meshes and texts."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from jax_family_toys import family_configs
from jax_model_toys import configs, furthest, logits, pairs_of, tokens, torch_logits
from text_trainer_toys import devices, make_folder, pairs, trainer_of
from transformers import AutoModelForCausalLM, MixtralConfig

import text_toys
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.text.generation import GenerationPrompt
from trainformer.jax import SFTConfig, SFTTrainer
from trainformer.models.generation import SamplingOptions
from trainformer.models.jax import apply_lora, generate, model_from_config
from trainformer.models.jax.block import Model
from trainformer.models.jax.decoder import Decoder
from trainformer.models.jax.generation import _generate, _limits, bucket
from trainformer.models.jax.sampling import Sampler
from trainformer.tasks.language.generation import generate_texts as torch_texts
from trainformer.tasks.language.rollouts.sampling import InverseSampling, warpers

SIZES = {"vocab_size": 320, "hidden_size": 32, "intermediate_size": 24, "num_hidden_layers": 2}
EXPERTS = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 64}
CONFIGS = {**family_configs(), **configs(), "mixtral": MixtralConfig(**SIZES, **EXPERTS, sliding_window=6)}
MASK = np.asarray([[1] * 9, [0] * 4 + [1] * 5, [0] * 8 + [1]])


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    return pairs_of(CONFIGS, tmp_path_factory)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


def greedy(theirs, ids, mask, count, stops=None):
    """New tokens of transformers' `generate`, and 0 after the end."""
    options = {"max_new_tokens": count, "do_sample": False, "eos_token_id": stops, "pad_token_id": 0}
    found = theirs.generate(torch.as_tensor(ids), attention_mask=torch.as_tensor(mask), **options)[:, ids.shape[1] :]
    return np.pad(found.numpy(), ((0, 0), (0, count - found.shape[1])))


# -- against transformers and the forward pass -------------------------------------------------------------------


# Mixtral's window is 6. Layers of Gemma have different windows, rotary embeddings and soft-caps.
@pytest.mark.parametrize("name", ["llama", "gpt2", "gemma2", "gemma3", "mixtral"])
def test_greedy_tokens_and_their_log_probs(pair, name):
    theirs, ours, _ = pair(name)
    ids = tokens(3, 9)
    found = generate(ours, ids, 12, MASK)
    assert np.array_equal(found.tokens, greedy(theirs, ids, MASK, 12))
    assert found.lengths.tolist() == [12] * 3
    # Stop tokens: one row ends at its third token, one at its seventh, the last row not.
    stops = [int(found.tokens[0, 2]), int(found.tokens[1, 6])]
    wanted = greedy(theirs, ids, MASK, 12, stops)
    stopped = generate(ours, ids, 12, MASK, stop_ids=stops)
    assert np.array_equal(stopped.tokens, wanted)
    ends = [next((n + 1 for n, token in enumerate(row) if token in stops), 12) for row in found.tokens.tolist()]
    assert stopped.lengths.tolist() == ends
    assert stopped.finished.tolist() == [bool(set(row) & set(stops)) for row in found.tokens.tolist()]
    # The log probabilities are those of a forward pass without cache.
    whole, mask = np.concatenate([ids, found.tokens], 1), np.concatenate([MASK, np.ones_like(found.tokens)], 1)
    logs = jax.nn.log_softmax(logits(ours, whole, attention_mask=mask)[:, 8:-1], axis=-1)
    scores = np.take_along_axis(np.asarray(logs), found.tokens[..., None], -1)[..., 0]
    assert furthest(scores, found.log_probs) <= 1e-5
    for row, end in enumerate(ends):
        assert furthest(stopped.log_probs[row, :end], scores[row, :end]) <= 1e-5
        assert not stopped.log_probs[row, end:].any()


def test_a_text_that_grows_beyond_the_short_frequencies_of_longrope_is_read_again():
    """All of its tokens have the long frequencies then; rows get there at different steps, or began there."""
    scaling = {"type": "longrope", "short_factor": [1.0, 1.1, 1.2, 1.3], "long_factor": [4.0, 6.0, 8.0, 10.0]}
    sizes = {**SIZES, "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    more = {"model_type": "phi3", "original_max_position_embeddings": 8, "rope_scaling": scaling}
    model = model_from_config({**sizes, **more, "initializer_range": 0.3})
    prompts = [list(range(5, 5 + count)) for count in (3, 7, 8, 9)]
    found = generate(model, prompts, max_new_tokens=10)
    for prompt, row in zip(prompts, found.tokens.tolist(), strict=True):
        text = list(prompt)
        for _ in range(10):
            text.append(int(logits(model, np.asarray([text]))[0, -1].argmax()))
        assert row == text[len(prompt) :]


def test_log_probs_of_samples_are_those_at_the_temperature(pair):
    _, ours, _ = pair("llama")
    ids = tokens(3, 9)
    found = generate(ours, ids, 12, MASK, temperature=0.7, top_k=5, seed=1)
    whole, mask = np.concatenate([ids, found.tokens], 1), np.concatenate([MASK, np.ones_like(found.tokens)], 1)
    scores = logits(ours, whole, attention_mask=mask)[:, 8:-1]
    logs = np.asarray(jax.nn.log_softmax(scores / 0.7, axis=-1))
    assert furthest(np.take_along_axis(logs, found.tokens[..., None], -1)[..., 0], found.log_probs) <= 1e-5
    rank = np.argsort(np.argsort(-scores, axis=-1), axis=-1)
    assert np.take_along_axis(rank, found.tokens[..., None], -1).max() < 5


OPTIONS = [
    {"temperature": 0.6},
    {"top_k": 7},
    {"top_p": 0.8, "temperature": 1.3},
    {"min_p": 0.1},
    {"temperature": 0.8, "top_k": 40, "top_p": 0.7, "min_p": 0.05},
    {"top_k": 1000},
]


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_filters_and_draws_are_those_on_torch(options):
    rng = np.random.default_rng(3)
    given = rng.normal(0, 3, (64, 50)).astype(np.float32)
    made = SamplingOptions(4, **options)
    processors = warpers(made)
    ids = torch.zeros(64, 1, dtype=torch.long)
    wanted = processors(ids, torch.tensor(given))
    sampler = Sampler.of(made)
    found = np.asarray(sampler.filtered(sampler.scaled(jnp.asarray(given))))
    assert np.array_equal(np.isfinite(found), np.isfinite(wanted.numpy()))
    kept = np.isfinite(found)
    assert furthest(found[kept], wanted.numpy()[kept]) <= 1e-5
    drawn = InverseSampling(torch.tensor(rng.random((64, 1))), 1)(ids, wanted).argmax(-1).numpy()
    # In the middle of its interval a number draws the same token, whatever the rounding.
    weights = wanted.double().softmax(-1)
    middles = (weights.cumsum(-1) - weights / 2).numpy()[np.arange(64), drawn]
    assert np.array_equal(np.asarray(sampler.choose(jnp.asarray(given), jnp.asarray(middles))), drawn)


def test_draws_follow_the_distribution_and_never_leave_it():
    given = jnp.asarray([[0.3, -1.0, 2.0, 0.0, -jnp.inf, 1.0]])
    sampler = Sampler.of(SamplingOptions(4, temperature=0.9, top_k=4))
    numbers = (jnp.arange(10_000) + 0.5) / 10_000
    drawn = np.asarray(sampler.choose(jnp.broadcast_to(given, (10_000, 6)), numbers))
    weights = np.asarray(jax.nn.softmax(sampler.filtered(sampler.scaled(given))))[0]
    assert furthest(np.bincount(drawn, minlength=6) / 10_000, weights) <= 2e-4
    assert (weights == 0).sum() == 2
    # Also at the ends of the interval, which numbers in float32 reach.
    wide = jnp.where(jnp.arange(5_000) % 7 == 3, 0.0, -jnp.inf)[None]
    edges = jnp.asarray([0.0, 1.0 - 2**-24, 1.0])
    assert (np.asarray(sampler.choose(jnp.broadcast_to(wide, (3, 5_000)), edges)) % 7 == 3).all()


def test_the_repetition_penalty_is_that_of_transformers(pair):
    theirs, ours, _ = pair("llama")
    ids = tokens(2, 6)
    options = {"max_new_tokens": 10, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = theirs.generate(torch.as_tensor(ids), repetition_penalty=1.5, **options)[:, 6:].numpy()
    assert np.array_equal(generate(ours, ids, 10, repetition_penalty=1.5).tokens, wanted)
    assert not np.array_equal(generate(ours, ids, 10).tokens, wanted)


# -- rows and buckets ------------------------------------------------------------------------------------------------


def test_a_row_does_not_depend_on_the_others_and_one_program_serves_a_bucket(pair):
    _, ours, _ = pair("llama")
    rows = [row[kept > 0].tolist() for row, kept in zip(tokens(3, 9), MASK, strict=True)]
    options = {"temperature": 0.9, "top_k": 5, "min_p": 0.01}
    before = _generate._cache_size()
    together = generate(ours, rows, 12, seed=[7, 8, 9], **options)
    assert _generate._cache_size() == before + 1
    again = generate(ours, rows[::-1], [5, 12, 11], seed=[9, 8, 7], **options)
    generate(ours, [*rows, rows[1] * 2][1:], 16, temperature=0.3, top_k=9, min_p=0.1, stop_ids=[3, 4])
    assert _generate._cache_size() == before + 1
    assert again.rows() == [row[:limit] for row, limit in zip(together.rows()[::-1], [5, 12, 11], strict=True)]
    alone = generate(ours, rows[1:2], 12, seed=[8], **options)  # a smaller bucket of rows
    assert alone.rows() == together.rows()[1:2]
    assert _generate._cache_size() == before + 2
    # The random numbers go on where those of the first tokens ended.
    head, tail = together.rows()[1][:3], together.rows()[1][3:]
    assert generate(ours, [[*rows[1], *head]], 9, seed=[8], drawn=[3], **options).rows() == [tail]
    assert [bucket(n) for n in (1, 2, 3, 9)] == [1, 2, 4, 16]


def test_the_loop_ends_with_the_last_row(pair, monkeypatch):
    _, ours, _ = pair("qwen3")
    calls = []
    head = Decoder.head

    def counted(self, states):
        jax.debug.callback(lambda: calls.append(1))
        return head(self, states)

    monkeypatch.setattr(Decoder, "head", counted)
    first = generate(ours, tokens(2, 3), 40).tokens
    jax.effects_barrier()
    assert len(calls) == 40
    calls.clear()
    stops = [int(first[0, 1]), int(first[1, 3])]
    lengths = generate(ours, tokens(2, 3), 40, stop_ids=stops).lengths
    jax.effects_barrier()
    assert len(calls) == lengths.max() <= 4


def test_meshes_and_adapters_give_the_same_tokens(pair):
    _, ours, _ = pair("llama")
    model = nnx.merge(*nnx.split(ours))
    apply_lora(model, r=2, alpha=32.0, targets=["q_proj", "v_proj"])
    for _, layer in nnx.iter_graph(model):
        if getattr(layer, "lora_b", None) is not None:
            layer.lora_b[...] = jax.random.normal(jax.random.key(1), layer.lora_b.shape)
    ids = tokens(3, 9)
    wanted = generate(model, ids, 6, MASK, temperature=0.8, top_k=3, seed=4)
    # The adapter has an effect, and what is generated is what the model computes without a cache.
    assert not np.array_equal(wanted.tokens, generate(ours, ids, 6, MASK, temperature=0.8, top_k=3, seed=4).tokens)
    with jax.set_mesh(devices((2, 2, 2, 1))):
        found = generate(model, ids, 6, MASK, temperature=0.8, top_k=3, seed=4)
    assert np.array_equal(found.tokens, wanted.tokens)
    assert furthest(found.log_probs, wanted.log_probs) <= 1e-5


def test_16_bit_weights_and_wrong_inputs(pair):
    theirs, ours, _ = pair("gpt2")
    low = generate(ours, tokens(2, 5), 3, dtype="bfloat16")
    scores = torch_logits(theirs, tokens(2, 5))[:, -1]
    logs = np.asarray(jax.nn.log_softmax(scores, axis=-1))
    chosen = np.take_along_axis(logs, low.tokens[:, :1], -1)[:, 0]
    assert furthest(chosen, low.log_probs[:, 0]) <= 0.2  # 8 bits of mantissa
    for given, message in (
        (([[]], 3), "at least one integer token"),
        ((np.ones((2, 2, 2), int), 3), "input_ids \\(rows, tokens\\)"),
        (([[1]], 0), "max_new_tokens to be a positive integer"),
        (([[1]], [2, 3]), "a number, or 1 of them"),
        (([[1] * 60], 5), "at most 64 tokens, the number of learned positions"),
    ):
        with pytest.raises(BadArgument, match=message):
            generate(ours, *given)
    with pytest.raises(BadArgument, match="top_p to be greater than 0"):
        generate(ours, [[1]], 3, top_p=0.0)
    with pytest.raises(BadArgument, match="seed to be an integer, or a list of 1"):
        generate(ours, [[1]], 3, temperature=1.0, seed=[1, 2])
    with pytest.raises(BadArgument, match="a decoder of trainformer"):
        generate(Model(ours.config), [[1]], 3)
    assert _limits(ours, [np.ones(60, int)], 4) == [4]


# -- texts and conversations -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def trainer(folder, tmp_path_factory):
    return trainer_of(SFTTrainer, SFTConfig, str(folder), pairs(), tmp_path_factory.mktemp("run"))


def test_texts_and_conversations_are_those_of_torch(folder, trainer):
    model = AutoModelForCausalLM.from_pretrained(folder)
    tokenizer = text_toys.chat_tokenizer()
    tokenizer.pad_token = tokenizer.eos_token
    chat = [{"role": "user", "content": "the quick fox"}]
    prompts = ["the lazy dog", chat, "a"]
    made = [GenerationPrompt("the lazy dog"), GenerationPrompt(messages=chat), GenerationPrompt("a")]
    for options in ({}, {"temperature": 1.5, "top_k": 3, "seed": 3}):
        wanted = torch_texts(model, tokenizer, made, 12, **{"seed": 0, **options})
        assert trainer.generate(prompts, 12, **options) == [each.text for each in wanted]
        assert trainer.generate_texts(made, 12, **options) == wanted
    assert trainer.generate(chat, 12) == trainer.generate(prompts, 12, batch_size=1)[1]
    assert trainer.generate({"messages": chat}, 12) == trainer.generate(chat, 12)
    assert trainer.generate(chat, 12, do_sample=True, seed=1) != trainer.generate(chat, 12, do_sample=True, seed=2)


def test_a_text_ends_at_the_end_of_the_context(trainer, caplog):
    prompt = GenerationPrompt(" ".join(["the"] * 30))
    size = len(prompt.encode(trainer.text))
    limit = trainer.model.config.max_position_embeddings
    assert 0 < limit - size < 64
    (found,) = trainer.generate_texts([prompt], 200, stop_ids=[])
    assert (found.tokens, found.finished) == (limit - size, False)
    assert "at the end of the model's context" in caplog.text
    with pytest.raises(DataError, match="a prompt of fewer than"):
        trainer.generate("the lazy dog " * 100)


def test_options_that_cannot_work_are_refused(trainer):
    for options, message in (
        ({"temprature": 1.0}, "Did you mean 'temperature'"),
        ({"num_beams": 2}, "options of sampling"),
        ({"do_sample": False, "top_k": 3}, "do_sample=True with top_k"),
        ({"do_sample": True, "temperature": 0}, "a positive temperature"),
        ({"tools": [{}]}, "a conversation with tools"),
    ):
        with pytest.raises(BadArgument, match=message):
            trainer.generate("the", 2, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"generation_prompts": 3}, "generation_prompts to be a list or None"),
        ({"generation_prompts": ["a", 3]}, "texts or messages to complete"),
        ({"generation_temperature": "hot"}, "temperature to be a number, received 'hot'"),
        ({"generation_top_p": True}, "top_p to be a number"),
        ({"generation_config_overrides": 3}, "generation_config_overrides to be a dict or None"),
        ({"generation_do_sample": "yes"}, "generation_do_sample to be True, False or None"),
    ],
)
def test_options_of_previews_of_the_wrong_type_are_refused(options, message):
    with pytest.raises(BadArgument, match=message):
        SFTConfig(generation_interval=1, **{"generation_prompts": ["a"], **options})


def test_prompts_without_an_interval_have_no_effect_which_is_said(caplog):
    SFTConfig(generation_prompts=["a"])
    assert "no effect without generation_interval" in caplog.text


def test_previews_sample_as_easydel_does(folder, tmp_path, caplog):
    caplog.set_level("INFO")
    options = {
        "generation_interval": 2,
        "generation_prompts": ["the quick", [{"role": "user", "content": "hello"}]],
        "generation_max_new_tokens": 5,
        "generation_temperature": 1.3,
        "generation_top_p": 0.99,
        "generation_num_return_sequences": 2,
        "generation_seed": 5,
        "generation_config_overrides": {"min_p": 0.001},
    }
    made = trainer_of(SFTTrainer, SFTConfig, str(folder), pairs(), tmp_path, **options)
    made.train()
    shown = [m.removeprefix("step 2: ") for m in caplog.messages if m.startswith("step 2: ")]
    prompts = [prompt for prompt in options["generation_prompts"] for _ in range(2)]
    wanted = made.generate(prompts, 5, temperature=1.3, top_p=0.99, min_p=0.001, seed=5)
    assert shown == [start + text for start, text in zip(["the quick"] * 2 + ["hello -> "] * 2, wanted, strict=True)]
    assert len(set(shown)) == 4
    prompted = {"generation_interval": 1, "generation_prompts": ["a"]}
    for wrong, message in (
        ({"generation_top_p": 1.5}, "top_p to be greater than 0"),
        ({"generation_config_overrides": {"num_beams": 4}}, "options of sampling"),
        ({"generation_num_return_sequences": 3}, "sampling with generation_num_return_sequences"),
        ({"generation_do_sample": False, "generation_top_k": 3}, "do_sample=True with top_k"),
        ({"generation_presence_penalty": 0.5}, "generation_repetition_penalty"),
    ):
        with pytest.raises(BadArgument, match=message):
            SFTConfig(**prompted, **wrong)
