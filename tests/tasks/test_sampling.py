"""Sampling with random numbers per row: the right distribution, and rows that depend on nothing but themselves."""

import copy

import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM

from trainformer.core import BadArgument
from trainformer.models.generation import SamplingOptions
from trainformer.tasks.language.rollouts.sampling import completion_mask, row_numbers, sample_tokens

PAD, STOP = 0, 3


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=24, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
    )
    made = LlamaForCausalLM(config).double()
    for parameter in made.parameters():
        parameter.data.mul_(8)  # a distribution that is not flat
    return made


def prompts(*rows):
    width = max(map(len, rows))
    ids = torch.tensor([[PAD] * (width - len(row)) + list(row) for row in rows])
    return ids, torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in rows])


def sample(model, rows, seeds, drawn=None, **options):
    options = SamplingOptions(**{"max_new_tokens": 12, **options})
    return sample_tokens(model, *prompts(*rows), torch.tensor(seeds), options, stop_ids=[STOP], pad_id=PAD, drawn=drawn)


def test_a_row_depends_on_its_prompt_and_seed_alone(model):
    rows, seeds = [[5, 6, 7], [8], [9, 10], [5, 6, 7]], [1, 2, 3, 4]
    torch.manual_seed(1)
    state = torch.get_rng_state()
    together = sample(model, rows, seeds)
    assert torch.equal(torch.get_rng_state(), state)
    assert not torch.equal(together[0], together[3])
    for row, seed, found in zip(rows, seeds, together, strict=True):
        alone = sample(model, [row], [seed])[0]
        mask = completion_mask(found[None], [STOP])[0]
        assert torch.equal(alone, found[: len(alone)])
        assert not mask[len(alone) :].any()
        assert (found[~mask] == PAD).all()


def test_tokens_have_the_probabilities_of_the_model(model):
    count = 20_000
    found = sample(model, [[5, 6, 7]] * count, list(range(count)), max_new_tokens=1, temperature=1.3)[:, 0]
    with torch.no_grad():
        wanted = (model(torch.tensor([[5, 6, 7]])).logits[0, -1] / 1.3).softmax(-1)
    got = torch.bincount(found, minlength=24) / count
    assert ((got - wanted).abs() <= 5 * (wanted * (1 - wanted) / count).sqrt() + 1e-9).all()


def test_top_k_and_greedy_never_leave_the_most_likely_tokens(model):
    with torch.no_grad():
        order = model(torch.tensor([[5, 6, 7]])).logits[0, -1].argsort(descending=True)
    rows, seeds = [[5, 6, 7]] * 200, list(range(200))
    top = sample(model, rows, seeds, max_new_tokens=1, top_k=3)[:, 0]
    assert set(top.tolist()) == set(order[:3].tolist())
    assert set(sample(model, rows, seeds, max_new_tokens=1, temperature=0)[:, 0].tolist()) == {int(order[0])}


def test_a_later_turn_goes_on_with_the_random_numbers(model):
    whole = sample(model, [[5, 6]], [7])[0]
    first = sample(model, [[5, 6]], [7], max_new_tokens=4)[0]
    assert torch.equal(first, whole[:4])
    assert len(whole) > 6
    rest = sample(model, [[5, 6, *first.tolist()]], [7], drawn=torch.tensor([4]), max_new_tokens=len(whole) - 4)[0]
    assert torch.equal(rest, whole[4:])


def test_the_models_own_generation_config_is_neither_used_nor_changed(model):
    plain = sample(model, [[5, 6]], [7])
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.top_k = 1
    try:
        assert torch.equal(sample(model, [[5, 6]], [7]), plain)
        assert model.generation_config.repetition_penalty == 5.0
    finally:
        model.generation_config.repetition_penalty = model.generation_config.top_k = None
    penalised = sample(model, [[5, 6]], [7], repetition_penalty=5.0)
    assert penalised.shape != plain.shape or not torch.equal(penalised, plain)


def test_an_adapted_model_samples_like_the_plain_one_it_equals(model):
    plain = sample(model, [[5, 6], [9]], [7, 8])
    adapted = get_peft_model(copy.deepcopy(model), LoraConfig(target_modules=["q_proj"], task_type="CAUSAL_LM"))
    assert torch.equal(sample(adapted.train(), [[5, 6], [9]], [7, 8]), plain)
    assert adapted.training


def test_numbers_are_uniform_and_bad_options_are_refused():
    numbers = row_numbers(torch.arange(100), 100)
    assert abs(float(numbers.mean()) - 0.5) < 0.02
    assert float(numbers.min()) >= 0
    assert float(numbers.max()) < 1
    for wrong in ({"temperature": -1}, {"top_p": 0}, {"top_k": 0}, {"min_p": 2}, {"repetition_penalty": 0}):
        with pytest.raises(BadArgument, match=next(iter(wrong))):
            SamplingOptions(**wrong)
    with pytest.raises(BadArgument, match="one seed per prompt"):
        sample_tokens(None, *prompts([1], [2]), torch.tensor([1]), SamplingOptions(), stop_ids=[3], pad_id=0)
