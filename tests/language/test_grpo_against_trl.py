"""GRPO and Online DPO as TRL computes them: the same completions and rewards give the same losses."""

import copy

import pytest
import torch
from datasets import Dataset
from peers import QUIET
from torch.nn import functional as F
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

import text_toys as toys
from trainformer.data.order import sample_key, set_sample_key
from trainformer.tasks import GRPO, OnlineDPO

GENERATIONS, LONGEST = 4, 10
PROMPTS = [{"prompt": toys.sentences()[i], "bonus": float(i)} for i in range(3)]


def length(completions, bonus, **_):
    return [len(text) + extra * (len(text) % 3) for text, extra in zip(completions, bonus, strict=True)]


def vowels(completions, **_):
    """None for some completions, as TRL allows."""
    return [None if len(text) % 5 == 0 else float(sum(c in "aeiou" for c in text)) for text in completions]


@pytest.fixture(scope="module")
def tokenizer():
    made = toys.chat_tokenizer()
    made.pad_token = "<s>"
    return made


@pytest.fixture(scope="module")
def model(tokenizer, tmp_path_factory):
    """With many stop tokens, so that completions have unequal lengths."""
    from transformers import LlamaForCausalLM

    torch.manual_seed(0)
    made = LlamaForCausalLM(toys.llama(initializer_range=0.2)).eval()
    made.generation_config.eos_token_id = [1, *range(100, 150)]
    folder = tmp_path_factory.mktemp("model")  # TRL loads some things by the name of the model
    made.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return LlamaForCausalLM.from_pretrained(folder)


def shaken(model):
    """The weights after an update, the same for both sides."""
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.03 * torch.randn(p.shape, generator=generator))


def our_batch(task):
    prepared = task.prepare_dataset(PROMPTS, train=True)
    samples = []
    for i in range(len(prepared)):
        set_sample_key(sample_key(0, 0, i))
        samples.append(prepared[i])
    return task.collate_fn(samples)


def theirs(kind, config, model, tokenizer, tmp_path, completions, **options):
    """TRL's trainer, which gets these completions instead of sampling."""

    class Given(kind):
        def _generate_single_turn(self, *arguments, **_):
            return completions if kind is RLOOTrainer else (completions, None)

    arguments = {**QUIET, "num_generations": GENERATIONS, "max_completion_length": LONGEST, "shuffle_dataset": False}
    arguments |= {"per_device_train_batch_size": len(completions), "output_dir": str(tmp_path / "trl"), **options}
    arguments.pop("train_sampling_strategy")
    return Given(
        copy.deepcopy(model), [length, vowels], args=config(**arguments), train_dataset=Dataset.from_list(PROMPTS),
        processing_class=copy.deepcopy(tokenizer),
    )  # fmt: skip


CASES = {
    "dapo": {},
    "grpo, kl": {"loss": "grpo", "beta": 0.2},
    "dr_grpo": {"loss": "dr_grpo", "scale_rewards": "none", "delta": 1.5},
    "bnpo, batch": {"loss": "bnpo", "scale_rewards": "batch", "temperature": 0.7},
    "cispo": {"loss": "cispo", "epsilon_high": 1.1, "beta": 0.1, "unbiased_kl": False},
    "gspo": {"loss": "grpo", "importance_level": "sequence", "epsilon_high": 0.3},
    "sapo": {"loss": "sapo"},
    "luspo": {"loss": "luspo", "importance_level": "sequence"},
    "no truncated, entropy": {"mask_truncated_completions": True, "top_entropy_quantile": 0.6},
    "rloo": {"loss": "rloo", "beta": 0.1},
}
NAMES = {"loss": "loss_type", "importance_level": "importance_sampling_level", "unbiased_kl": "use_bias_correction_kl"}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_losses_of_the_first_and_second_update_are_trls(model, tokenizer, tmp_path, case):
    options = CASES[case]
    made = GRPO(
        copy.deepcopy(model), tokenizer=tokenizer, rewards=[length, vowels], reward_weights=[1.0, 0.5],
        num_generations=GENERATIONS, max_completion_length=LONGEST, num_iterations=2, cache_dir=tmp_path, **options,
    )  # fmt: skip
    made.configure(None)
    batch = our_batch(made)
    completions = [rollout.tokens for rollout in made.rollouts(batch)]
    assert len({len(tokens) for tokens in completions}) > 2
    is_rloo = options.get("loss") == "rloo"
    kind, config = (RLOOTrainer, RLOOConfig) if is_rloo else (GRPOTrainer, GRPOConfig)
    same = {NAMES.get(name, name): value for name, value in options.items() if not (is_rloo and name == "loss")}
    other = theirs(
        kind, config, model, tokenizer, tmp_path, completions, reward_weights=[1.0, 0.5], num_iterations=2, **same
    )
    other.current_gradient_accumulation_steps = 1  # set by its loop
    other.model.train()
    prepared = other._prepare_inputs(next(iter(other.get_train_dataloader())))
    losses = made._losses(batch)
    for update in range(2):
        found = next(losses)
        wanted = other.compute_loss(other.model, prepared)
        torch.testing.assert_close(found.sum / found.weight, wanted, rtol=1e-5, atol=1e-5)
        found.sum.backward()
        wanted.backward()
        for mine, their in zip(made.model.parameters(), other.model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad / float(found.weight), their.grad, rtol=1e-3, atol=1e-5)
        assert any(float(p.grad.abs().max()) > 1e-4 for p in made.model.parameters())
        for trained in (made.model, other.model):
            trained.zero_grad()
            if not update:
                shaken(trained)


def test_online_dpo_is_the_formula_of_trl(model, tokenizer, tmp_path):
    """Log probabilities of each answer alone, in float64; the better of two by their rewards."""
    made = OnlineDPO(
        copy.deepcopy(model), tokenizer=tokenizer, rewards=length, max_completion_length=LONGEST, beta=0.3,
        temperature=0.8, missing_eos_penalty=2.0, cache_dir=tmp_path,
    )  # fmt: skip
    made.configure(None)
    shaken(made.model)
    batch = our_batch(made)
    rollouts = made.rollouts(batch)
    found = made.train_step(batch)

    def log_prob(model, rollout):
        ids = torch.tensor([[*rollout.prompt.ids, *rollout.tokens]])
        logs = model(ids).logits[0, :-1].double().log_softmax(-1)
        return logs.gather(1, ids[0, 1:, None])[len(rollout.prompt.ids) - 1 :].sum()

    losses = []
    for pair in zip(rollouts[::2], rollouts[1::2], strict=True):
        rewards = length([r.completion for r in pair], [r.prompt.columns["bonus"] for r in pair])
        rewards = [
            reward - 2.0 * (len(r.tokens) == LONGEST and r.tokens[-1] not in made.stop_ids)
            for reward, r in zip(rewards, pair, strict=True)
        ]
        chosen, rejected = pair if rewards[0] >= rewards[1] else pair[::-1]
        margins = [log_prob(m, chosen) - log_prob(m, rejected) for m in (made.model, model)]
        losses.append(-F.logsigmoid(0.3 * (margins[0] - margins[1])))
    assert found.weight == len(losses) == 3
    torch.testing.assert_close(found.sum.double(), torch.stack(losses).sum(), rtol=1e-5, atol=1e-5)
