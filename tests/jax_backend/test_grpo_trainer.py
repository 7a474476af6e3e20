"""GRPO on JAX: whole runs against torch, losses against torch, the same run on meshes and after a resume."""

from __future__ import annotations

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax_model_toys import furthest
from text_trainer_toys import devices, furthest_weight, make_folder, torch_run, trainer_of

import text_toys
from trainformer.callbacks import RolloutSamples
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.order import sample_key, set_sample_key
from trainformer.jax import GRPOConfig, GRPOTrainer, LoRAConfig
from trainformer.jax.rollouts import DecoderGenerator, group_advantages
from trainformer.losses import policy as on_torch
from trainformer.losses.jax.policy import POLICY_VARIANTS, policy_loss, token_scores
from trainformer.models.jax.generation import _generate
from trainformer.run import run_of
from trainformer.tasks import GRPO
from trainformer.tasks.language.rollouts import Generated
from trainformer.tasks.language.rollouts import advantages as advantages_on_torch

PROMPTS = [{"prompt": text, "bonus": float(i % 3)} for i, text in enumerate(text_toys.sentences()[:8])]
STOPS = list(range(100, 140))  # so that completions have unequal lengths


def length(completions, bonus):
    """Longer is better; how much better depends on a column."""
    return [len(text) * (1 + extra) for text, extra in zip(completions, bonus, strict=True)]


def unlike(completion_ids):
    """Nothing to say about short completions."""
    return [None if len(ids) < 3 else float(len(set(ids))) for ids in completion_ids]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


def grpo(folder, where, data=PROMPTS, rewards=length, **fields):
    sizes = {"num_generations": 3, "max_completion_length": 8, "stop_tokens": STOPS, "max_sequence_length": None}
    options = {"reward_funcs": rewards, **fields.pop("options", {})}
    fields = {"logging_steps": 1, "optimizer": "sgd", "seed": 0, "max_grad_norm": None, **sizes, **fields}
    return trainer_of(GRPOTrainer, GRPOConfig, str(folder), data, where, options=options, **fields)


@pytest.fixture
def replay(monkeypatch):
    """A generator for torch with the completions that JAX sampled. (A draw at a boundary depends on rounding.)"""
    sampled = {}
    usual = DecoderGenerator.generate

    def recorded(self, prompts, seeds, options, *, stop_ids, drawn):
        found = usual(self, prompts, seeds, options, stop_ids=stop_ids, drawn=drawn)
        for prompt, seed, tokens in zip(prompts, seeds, found.tokens, strict=True):
            sampled.setdefault((tuple(prompt), seed, options.temperature), []).append(tokens)
        return found

    class Replay:
        def update_weights(self, model):
            """Nothing to do: what it gives is known."""

        def generate(self, prompts, seeds, options, *, stop_ids, drawn):
            keys = zip(prompts, seeds, strict=True)
            return Generated([sampled[tuple(prompt), seed, options.temperature].pop(0) for prompt, seed in keys])

    monkeypatch.setattr(DecoderGenerator, "generate", recorded)
    return Replay()


# -- whole runs ------------------------------------------------------------------------------------------------------

CASES = {
    "dapo": {"beta": 0.1, "temperature": 0.9, "top_p": 0.95, "mask_truncated_completions": True},
    "several": {"loss": "grpo", "num_iterations": 2, "mini_batches": 2, "beta": 0.1, "skip_zero_variance": True},
}


@pytest.mark.parametrize(("case", "mesh"), [("dapo", (1, 1, 1, 1)), ("several", (2, 1, 2, 1))])
def test_a_run_is_that_on_torch(folder, tmp_path, case, mesh, replay):
    """The same completions, rewards, losses and weights; one of them on a mesh and with gradient accumulation."""
    options = CASES[case]
    names = {"loss_type" if name == "loss" else name: value for name, value in options.items()}
    rewards = {"length": length, "unlike": unlike}
    common = {"num_generations": 3, "max_completion_length": 8, "stop_tokens": STOPS, "reward_weights": [1.0, 0.5]}
    accumulation = 2 if case == "several" else 1
    mine = grpo(
        folder,
        tmp_path / "jax",
        rewards=rewards,
        gradient_accumulation_steps=accumulation,
        reward_weights=[1.0, 0.5],
        options={"eval_dataset": PROMPTS[:3], "mesh": devices(mesh), "callbacks": [RolloutSamples(n=2)]},
        **names,
    )
    before = _generate._cache_size()
    mine.train()
    assert _generate._cache_size() == before + 1
    found = mine.eval()
    made = {"generator": replay, "cache_dir": str(tmp_path / "tokens")}
    task = GRPO(str(folder), rewards=rewards, **made, **common, **options)
    settings = {"seed": 0, "gradient_clip": None, "log_every": 1, "val_data": PROMPTS[:3], "eval_every": None}
    theirs = torch_run(task, PROMPTS, tmp_path / "torch", precision="no", **settings)
    logged, wanted = (
        [record for record in made.state.log_history if "train/loss" in record] for made in (mine, theirs)
    )
    assert len(logged) == len(wanted) == 2
    same = {name for name in wanted[0] if name.split("/")[-1] not in ("lr", "epoch", "grad_norm", "step")}
    same -= {name for name in wanted[0] if "second" in name or "memory" in name or name.startswith("train/policy")}
    assert {"train/reward", "train/rewards/unlike", "train/kl", "train/entropy", "train/truncated"} <= same
    for step, record in zip(wanted, logged, strict=True):
        for name in same:
            # Smallest and largest ratios are means over micro-batches.
            if name in step and "ratio/m" not in name:
                assert record[name] == pytest.approx(step[name], rel=1e-4, abs=2e-5), name
    assert wanted[0]["train/truncated"] < 1
    assert wanted[1]["train/kl"] > 1e-3
    saved = mine.save_pretrained(tmp_path / "saved")
    assert furthest_weight(saved, theirs.task.model) <= 1e-4
    expected = theirs.evaluate()
    assert {f"val/{name.removeprefix('eval_')}" for name in found} == {n for n in expected if "second" not in n}
    assert all(found[f"eval_{name.removeprefix('val/')}"] == pytest.approx(expected[name]) for name in expected)
    # One step per batch, whatever the updates; some completions are in the records.
    assert int(mine.model_state.step) == 2
    records = [json.loads(line) for line in (Path(mine.run_folder) / "records.jsonl").read_text().splitlines()]
    samples = [record for record in records if record.get("key") == "train/rollouts"]
    assert len(samples) == 2
    assert samples[0]["samples"][0].keys() >= {"prompt", "text", "reward", "rewards", "advantage", "truncated"}


def test_a_resumed_run_with_an_adapter_ends_the_same(folder, tmp_path):
    """Completions depend on seed, epoch and prompt alone, and the reference is the model without the adapter."""

    def run(where, steps):
        made = grpo(
            folder,
            where,
            total_batch_size=4,
            max_steps=4,
            beta=0.1,
            num_iterations=2,
            optimizer="adamw",
            scheduler="linear",
            learning_rate=0.05,
            save_strategy="steps",
            save_steps=2,
            resume="auto",
            options={"lora": LoRAConfig(r=2), "callbacks": [Stop(steps)]},
        )
        if steps < 4:
            with pytest.raises(RuntimeError, match="killed"):
                made.train()
        else:
            made.train()
        return made

    whole = run(tmp_path / "whole", 9)
    run(tmp_path / "cut", 3)
    resumed = run(tmp_path / "cut", 9)
    assert resumed.state.step == int(resumed.model_state.step) == 4
    for mine, wanted in zip(
        jax.tree.leaves(resumed.model_state.params), jax.tree.leaves(whole.model_state.params), strict=True
    ):
        assert np.array_equal(mine, wanted)
    history = [record for record in whole.state.log_history if "train/loss" in record]
    assert [record for record in resumed.state.log_history if "train/loss" in record][-1]["train/loss"] == (
        history[-1]["train/loss"]
    )
    # The divergence is from the model without the adapter, which was zero at first; both updates of a step have its lr.
    assert history[0]["train/kl"] < history[-1]["train/kl"]
    assert [record["train/lr"] for record in history] == pytest.approx([0.05, 0.0375, 0.025, 0.0125])
    assert whole._reference is None
    counts = [leaf for leaf in jax.tree.leaves(whole.model_state.opt_state) if leaf.dtype == jnp.int32]
    assert {int(count) for count in counts} == {8}


class Stop:
    """Ends a run after a step."""

    def __init__(self, step):
        self.step = step

    def on_step_end(self, trainer, step, loss):
        if step == self.step:
            raise RuntimeError("killed")


class Guess:
    """Says how many turns there were, and pays for each; over after three."""

    def reset(self, prompt, columns):
        self.turns = 0
        return f" hint {columns['bonus']}"

    def step(self, completion):
        self.turns += 1
        return (None if self.turns == 3 else f" wrong {self.turns}"), float(self.turns)


def test_environments_play_the_same_turns_as_on_torch(folder, tmp_path, replay):
    sizes = {"max_completion_length": 30, "max_turns": 3}
    mine = grpo(folder, tmp_path, PROMPTS[:4], None, **sizes, options={"environment": Guess})
    batch = next(iter(run_of(mine).train_source.batches(0))).data
    order = np.argsort(batch["index"])
    rollouts = mine.rollouts(mine.model_state, {name: array[order] for name, array in batch.items()}, 1.0)
    made = {"generator": replay, "cache_dir": str(tmp_path / "tokens")}
    task = GRPO(str(folder), environment=Guess, num_generations=3, stop_tokens=STOPS, **made, **sizes)
    task.configure(None)
    prepared, samples = task.prepare_dataset(PROMPTS[:4], train=True), []
    for index in range(4):
        set_sample_key(sample_key(0, 0, index))
        samples.append(prepared[index])
    wanted = task.rollouts(task.collate_fn(samples))
    assert [rollout.tokens for rollout in rollouts] == [rollout.tokens for rollout in wanted]
    assert [rollout.mask for rollout in rollouts] == [rollout.mask for rollout in wanted]
    assert max(rollout.turns for rollout in rollouts) == 3
    parts, total = mine.score(rollouts)
    assert total.tolist() == [rollout.reward for rollout in wanted]
    assert mine._rollout_metrics(rollouts, parts, total)["turns"][0] == sum(rollout.turns for rollout in wanted)


# -- parts -----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scores():
    rng = np.random.default_rng(0)
    new, old, reference = (-np.abs(rng.normal(1, 0.5, (5, 6))).astype(np.float32) for _ in range(3))
    mask = rng.random((5, 6)) < 0.7
    mask[1], mask[2, 0] = False, True
    return new, old, reference, mask, rng.normal(0, 1, 5).astype(np.float32)


@pytest.mark.parametrize("variant", POLICY_VARIANTS)
def test_losses_are_those_on_torch(scores, variant):
    new, old, reference, mask, advantages = scores
    level = "token" if variant == "rloo" else "sequence"
    delta = {} if variant in ("cispo", "sapo") else {"delta": 1.5}
    for options in (
        {"beta": 0.1, "epsilon_high": 0.3},
        {"beta": 0.1, "unbiased_kl": False, "level": level, "token_mask": new > -1.2, **delta},
        {"row_mask": np.asarray([True, True, False, True, True])},
    ):
        given = {"variant": variant, "max_length": 6, **options}
        arrays = {name for name, value in given.items() if isinstance(value, np.ndarray)}
        tensor = torch.tensor(new, requires_grad=True)
        theirs = on_torch.policy_loss(
            tensor,
            torch.tensor(old),
            torch.tensor(advantages),
            torch.tensor(mask),
            reference_log_probs=torch.tensor(reference),
            **{name: torch.tensor(value) if name in arrays else value for name, value in given.items()},
        )
        theirs.sum.backward()

        def loss(new, given=given):
            found = policy_loss(new, old, advantages, mask, reference_log_probs=reference, **given)
            return found.sum, (found, found.per_sample)

        (total, (found, per_sample)), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True))(new)
        assert float(total) == pytest.approx(float(theirs.sum.detach()), rel=1e-5, abs=1e-5)
        assert float(found.weight) == float(theirs.weight)
        np.testing.assert_allclose(gradient, tensor.grad.numpy(), atol=1e-5)
        assert found.metrics.keys() == theirs.metrics.keys()
        for name, pair in theirs.metrics.items():
            assert [float(v) for v in found.metrics[name]] == pytest.approx([float(v) for v in pair], rel=1e-5), name
        losses, weights = per_sample
        assert float(losses.sum()) == pytest.approx(float(total), rel=1e-5, abs=1e-6)
        assert float(weights.sum()) == float(found.weight)


def test_token_scores_are_those_on_torch_whatever_the_chunks():
    rng = np.random.default_rng(1)
    states, head = rng.normal(0, 1, (3, 8, 5)).astype(np.float32), rng.normal(0, 1, (5, 11)).astype(np.float32)
    labels = np.where(rng.random((3, 8)) < 0.3, -100, rng.integers(0, 11, (3, 8)))
    linear = torch.nn.Linear(5, 11, bias=False)
    linear.weight.data = torch.tensor(head.T)
    inputs = torch.tensor(states, requires_grad=True)
    theirs = on_torch.token_scores(inputs[:, :-1], torch.tensor(labels[:, 1:]), linear, temperature=0.7)
    theirs.log_probs.square().sum().backward()

    def loss(states, chunks):
        found = token_scores(states, jnp.asarray(labels), lambda x: x @ head, temperature=0.7, chunks=chunks)
        return jnp.sum(found.log_probs**2) + jnp.sum(found.entropy), found

    for chunks in (1, 3):
        (_, found), gradient = jax.jit(jax.value_and_grad(loss, has_aux=True), static_argnums=1)(states, chunks)
        np.testing.assert_allclose(found.log_probs[:, :-1], theirs.log_probs.detach().numpy(), atol=1e-5)
        np.testing.assert_allclose(found.entropy[:, :-1], theirs.entropy.numpy(), atol=1e-5)
        assert not np.asarray(found.log_probs[:, -1]).any()
        np.testing.assert_allclose(gradient, inputs.grad.numpy(), atol=2e-5)  # none through the entropy


@pytest.mark.parametrize("scale", ["group", "batch", "none"])
@pytest.mark.parametrize("leave_one_out", [False, True])
def test_advantages_are_those_on_torch(scale, leave_one_out):
    rewards = np.asarray([1.0, 0.0, 3.0, 2.0, 2.0, 2.0, np.nan, 1.0, 4.0, np.nan, np.nan, 7.0])
    mine = group_advantages(rewards, 3, scale=scale, leave_one_out=leave_one_out)
    theirs = advantages_on_torch.group_advantages(torch.tensor(rewards), 3, scale=scale, leave_one_out=leave_one_out)
    assert furthest(mine.values, theirs.values.numpy()) <= 1e-6
    assert mine.has_no_variance.tolist() == theirs.has_no_variance.tolist()


# -- mistakes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_generations": 1}, "num_generations to be an integer of at least 2"),
        ({"temperature": 0.0}, "temperature to be positive for training"),
        ({"top_p": 2.0}, "top_p to be greater than 0"),
        ({"loss_type": "gpro"}, "Did you mean 'grpo'"),
        ({"delta": 1.1}, "delta to be greater than 1"),
        ({"delta": 3.0, "loss_type": "sapo"}, "no delta"),
        ({"importance_sampling_level": "sequence", "loss_type": "rloo"}, "It has its own"),
        ({"beta": -1}, "beta to be a number of at least 0"),
        ({"epsilon": None}, "epsilon to be greater than 0"),
        ({"delta": "2"}, "delta to be greater than 1"),
        ({"mask_truncated_completions": "no"}, "mask_truncated_completions to be True or False"),
        ({"packing": True}, "no packing"),
        ({"router_aux_loss_coef": 0.01}, "no router_aux_loss_coef"),
        ({"scale_rewards": "groups"}, "scale_rewards"),
    ],
)
def test_arguments_that_cannot_work_are_refused(fields, message):
    with pytest.raises(BadArgument, match=message):
        GRPOConfig(**fields)
    assert GRPOConfig(loss_type="dr_grpo").scale_rewards == "none"
    assert GRPOConfig(num_return_sequences=4, importance_level="sequence").num_generations == 4


def test_trainers_that_cannot_work_are_refused(folder, tmp_path):
    for options, fields, message in (
        ({"rewards": None}, {}, "Expected reward_funcs"),
        ({"rewards": "some/reward-model"}, {}, "a function that runs the reward model"),
        ({}, {"options": {"reference_model": str(folder)}}, "no reference_model with beta=0"),
        ({}, {"max_turns": 2}, "max_turns with tools or an environment"),
        ({}, {"max_completion_length": 100}, "at most 64 together"),
        ({}, {"options": {"rewards": length}}, "It is called reward_funcs here"),
        ({}, {"mini_batches": 3}, "to divide into 3 mini_batches"),
    ):
        with pytest.raises(BadArgument, match=message):
            grpo(folder, tmp_path, **options, **fields)
    with pytest.raises(BadArgument, match="single tokens of the tokenizer"):
        grpo(folder, tmp_path, stop_tokens=["not a token"]).stop_ids  # noqa: B018

    def wrong(completions):
        return [1.0]

    made = grpo(folder, tmp_path, rewards=wrong, options={"eval_dataset": PROMPTS[:3]})
    with pytest.raises(DataError, match="the reward 'wrong' to return a list of 3 numbers"):
        made.eval()
