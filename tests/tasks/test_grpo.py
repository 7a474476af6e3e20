"""GRPO and Online DPO: the same run however it is sliced, killed or distributed; rewards, environments, tools."""

import importlib.util
import json
import math
from pathlib import Path

import grpo_toys as toys
import pytest
import torch
from grpo_toys import CASES, PROMPTS, batch_of, make_task, make_trainer
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForSequenceClassification

import text_toys
import trainformer
from forking import SERVER
from ranks import on_ranks
from several_optimizers import EXAMPLES
from trainformer.adapters import LoRA
from trainformer.callbacks import RolloutSamples
from trainformer.tasks import OnlineDPO
from trainformer.tasks.language.rollouts.rewards import Rewards, overlong_penalty
from trainformer.tasks.language.rollouts.rows import Scored


def close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name].double(), b[name].double(), rtol=1e-8, atol=1e-9, msg=name)


# -- promises ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", [case for case in CASES if case != "batch"])
def test_accumulation_does_not_change_the_result(case):
    """The same completions, losses and weights, in micro-batches of any size."""
    whole = make_trainer(case, batch_size=8, run_dir="whole").fit()
    parts = make_trainer(case, batch_size=2, accumulation_steps=4, run_dir="parts").fit()
    found = toys.found(whole)
    close(found, toys.found(parts))
    before = toys.model().state_dict()
    assert any(not torch.equal(found[f"weight {name}"], value) for name, value in before.items())


@pytest.mark.slow
def test_ranks_train_as_one_process(tmp_path):
    both, alone = on_ranks(toys.results, 2, tmp_path), toys.results(0, 1)
    for found in both:
        close(found, alone)
    assert {name.split("/")[0] for name in alone} >= {"ddp dapo", "ddp several", "fsdp dapo", "fsdp several"}


@pytest.mark.slow
def test_a_killed_run_ends_as_if_it_had_not_been_killed(tmp_path):
    """Killed while completions are scored, and between two updates of a step; with LoRA."""
    toys.victim("none", "whole", str(tmp_path))
    wanted = torch.load("whole.pt")
    (tmp_path / "deadly").touch()
    for kind in ("generation", "update"):
        process = SERVER.Process(target=toys.victim, args=(kind, kind, str(tmp_path)))
        process.start()
        process.join()
        assert process.exitcode == -9
        assert sorted(p.name for p in (tmp_path / kind / "checkpoints").glob("step_*"))[-1] == "step_00000002"
    (tmp_path / "deadly").unlink()
    for kind in ("generation", "update"):
        toys.victim("none", kind, str(tmp_path))
        found = torch.load(f"{kind}.pt")
        assert found.keys() == wanted.keys()
        assert all(torch.equal(found[name], wanted[name]) for name in wanted)
        assert any(name.endswith("lora_B.default.weight") and value.abs().max() > 0 for name, value in wanted.items())


def test_what_is_sampled_depends_on_prompt_and_seed_alone():
    task = make_task("dapo")
    batch = batch_of(task, PROMPTS[:6])
    together = task.rollouts(batch)
    for i in range(6):
        alone = task.rollouts({"prompts": batch["prompts"][i : i + 1], "seeds": batch["seeds"][i : i + 1]})
        assert [r.tokens for r in alone] == [r.tokens for r in together[3 * i : 3 * i + 3]]
    assert len({tuple(r.tokens) for r in together}) > 12
    task.generation_batch_size = task._own_generator.batch_size = 5
    assert [r.tokens for r in task.rollouts(batch)] == [r.tokens for r in together]


def test_parts_of_a_forward_pass_give_the_same_gradients():
    found = []
    for size in (None, 4):
        task = make_task("dapo", forward_batch_size=size)
        loss = task.train_step(batch_of(task))
        loss.sum.backward()
        found.append({name: p.grad for name, p in task.model.named_parameters()})
    close(*found)
    whole, parts = found
    assert whole.keys() == parts.keys()
    assert all(torch.allclose(whole[name], parts[name], rtol=0, atol=1e-8) for name in whole)
    assert max(float(grad.abs().max()) for grad in whole.values()) > 1e-3


def test_an_adapter_is_trained_and_the_reference_costs_nothing(tmp_path):
    trainer = make_trainer("dapo", task=make_task("dapo", adapter=LoRA(r=2)), save_every=3, run_dir=tmp_path / "run")
    trainer.fit()
    assert trainer.task._reference is None
    assert trainer.state.log_history[-2]["train/kl"] > 0
    saved = load_file(text_toys.checkpoint_of(trainer) / "model.safetensors")
    assert all("lora" in name for name in saved)


# -- what is logged ----------------------------------------------------------------------------------------


def test_logs_and_samples(tmp_path):
    """Metrics of rewards, lengths and ratios; readable samples with rewards in the records and the loggers."""

    def same(completions):
        return [1.0] * len(completions)

    task = make_task("several", rewards={"length": toys.length, "same": same}, reward_weights=[1.0, 0.5])
    trainer = make_trainer(
        "several", task=task, callbacks=[RolloutSamples(n=2)], run_dir=tmp_path / "run", warmup_ratio=0.0,
        scheduler="linear", epochs=1, max_steps=None, monitor_metric="val/reward", monitor_mode="max", eval_every=1,
    ).fit()  # fmt: skip
    logged = [record for record in trainer.state.log_history if "train/loss" in record]
    names = {"reward", "rewards/length", "rewards/same", "reward_std", "frac_reward_zero_std", "kl", "entropy"}
    names |= {"completion_length", "truncated", "importance_ratio/mean", "importance_ratio/min"}
    names |= {"importance_ratio/max", "clip_ratio/low", "clip_ratio/high"}
    assert {f"train/{name}" for name in names} <= logged[-1].keys()
    assert logged[0]["train/rewards/same"] == 1.0
    assert logged[0]["train/reward"] == pytest.approx(logged[0]["train/rewards/length"] + 0.5)
    assert logged[0]["train/importance_ratio/min"] < 1 < logged[0]["train/importance_ratio/max"]
    # A schedule that ends with the last of four updates per step.
    assert logged[-1]["train/lr"] == pytest.approx(1e-2 / (4 * len(logged)))
    assert trainer.best_metrics["val/reward"] == max(
        r["val/reward"] for r in trainer.state.log_history if "val/reward" in r
    )
    lines = [json.loads(line) for line in (trainer.run_folder / "records.jsonl").read_text().splitlines()]
    texts = [line for line in lines if line["kind"] == "text"]
    assert {line["key"] for line in texts} == {"train/rollouts", "val/rollouts"}
    sample = next(line for line in texts if line["key"] == "train/rollouts")["samples"][0]
    assert sample["prompt"] in [record["prompt"] for record in PROMPTS]
    assert sample["reward"] == pytest.approx(sample["rewards"]["length"] + 0.5)
    assert {"text", "advantage", "tokens", "truncated"} <= sample.keys()
    metrics = (trainer.run_folder / "metrics.jsonl").read_text()
    assert sum("train/rollouts/2" in line for line in metrics.splitlines()) == len(logged)


def test_groups_of_equal_rewards_are_counted_and_can_be_left_out():
    def some(completions):
        return [1.0] * 6 + [float(len(text)) for text in completions[6:]]

    options = {"rewards": some, "beta": 0.0, "loss": "dapo", "mask_truncated_completions": False}
    all_of_them = make_task("dr_grpo", **options, skip_zero_variance=False)
    batch = batch_of(all_of_them)
    loss = all_of_them.train_step(batch)
    assert loss.metrics["frac_reward_zero_std"] == (2.0, 4)
    useful = make_task("dr_grpo", **options, skip_zero_variance=True)
    shorter = useful.train_step(batch_of(useful))
    torch.testing.assert_close(shorter.sum, loss.sum)
    lengths = [rollout.length for rollout in all_of_them.rollouts(batch)]
    assert (int(loss.weight), int(shorter.weight)) == (sum(lengths), sum(lengths[6:]))
    nothing = make_task("dr_grpo", rewards=lambda completions: [None] * len(completions), loss="dapo")
    empty = nothing.train_step(batch_of(nothing))
    assert float(empty.sum.detach()) == float(empty.weight) == 0
    empty.sum.backward()


def test_predictions_and_evaluation():
    toys.model(torch.float32).save_pretrained("model")
    text_toys.chat_tokenizer().save_pretrained("model")
    trainer = make_trainer(
        "dapo", task=make_task("dapo", "model", beta=0.0, eval_generations=2, eval_temperature=1.0), save_every=3
    )
    found = trainer.predict([{"prompt": record["prompt"]} for record in PROMPTS[:3]])
    assert [len(row["generated"]) for row in found] == [8, 8, 8]
    first, again = trainer.evaluate(), trainer.evaluate()
    assert first == again
    trainer.fit()
    loaded = trainformer.load(text_toys.checkpoint_of(trainer))  # without the reward function
    texts = [row["text"] for row in loaded.predict([{"prompt": record["prompt"]} for record in PROMPTS[:3]])]
    assert texts == trainer.task.text_tokenizer.batch_decode(
        [row["generated"] for row in trainer.predict(PROMPTS[:3])], skip_special_tokens=True
    )
    assert trainer.check().ok


# -- rewards -----------------------------------------------------------------------------------------------


def test_reward_functions_get_what_they_ask_for():
    seen = {}

    def all_columns(prompts, completions, **columns):
        seen.update(columns, prompts=prompts, completions=completions)
        return torch.arange(len(completions))

    async def later(completion_ids):
        return [len(ids) for ids in completion_ids]

    task = make_task("dapo", rewards=[all_columns, later])
    rollouts = task.rollouts(batch_of(task))
    scored = task.score(rollouts)
    assert scored.parts[:, 0].tolist() == list(range(12))
    assert scored.parts[:, 1].tolist() == [len(rollout.tokens) for rollout in rollouts]
    assert seen["bonus"] == [float(i % 3) for i in range(4) for _ in range(3)]
    assert seen["prompts"][::3] == [record["prompt"] for record in PROMPTS[:4]]
    assert seen["completions"] == [r.completion for r in rollouts]
    assert all(isinstance(c, str) for c in seen["completions"])


def test_a_reward_model_scores_prompt_and_completion(tmp_path):
    tokenizer = text_toys.chat_tokenizer()
    tokenizer.pad_token = "<s>"
    torch.manual_seed(1)
    config = LlamaConfig(**{**text_toys.llama().to_dict(), "num_labels": 1, "pad_token_id": 0})
    judge = LlamaForSequenceClassification(config).eval()
    judge.save_pretrained(tmp_path / "judge")
    tokenizer.save_pretrained(tmp_path / "judge")
    task = make_task("dapo", rewards=str(tmp_path / "judge"))
    rollouts = task.rollouts(batch_of(task))
    scored = task.score(rollouts)
    for rollout, score in zip(rollouts, scored.total, strict=True):
        ids = tokenizer(rollout.prompt.prompt + rollout.completion, return_tensors="pt")["input_ids"]
        assert float(judge(ids).logits.detach()) == pytest.approx(float(score), abs=1e-5)
    assert scored.total.std() > 0
    names = {name for name, _ in vars(task).items()}
    assert "judge" in task.config_dict()["rewards"]
    assert "_scorer" in names


def test_the_overlong_penalty_is_that_of_dapo():
    penalty = overlong_penalty(max_length=8, buffer=3)
    assert penalty(completion_ids=[[0] * n for n in (1, 5, 6, 7, 8, 9)]) == [0, 0, -1 / 3, -2 / 3, -1, -1]
    assert math.copysign(1, penalty(completion_ids=[[0]])[0]) == 1
    assert Rewards([penalty]).names == ["overlong"]


# -- Online DPO --------------------------------------------------------------------------------------------


def test_a_judge_compares_pairs():
    def shorter(prompts, completions):
        return [None if i == 0 else int(len(b) < len(a)) for i, (a, b) in enumerate(completions)]

    task = OnlineDPO(
        toys.model(), tokenizer=text_toys.chat_tokenizer(), judge=shorter, max_completion_length=8, cache_dir="tokens"
    )
    batch = batch_of(task)
    loss = task.train_step(batch)
    assert float(loss.weight) == 3
    assert loss.metrics["skipped_pairs"] == (1.0, 4)
    rollouts = task.rollouts(batch)
    pairs, counts = task._pairs(task.score(rollouts))
    assert counts.tolist() == [False, True, True, True]
    for chosen, rejected in pairs[1:].tolist():
        assert len(rollouts[chosen].completion) <= len(rollouts[rejected].completion)
    assert set(task.eval_step(batch_of(task, train=False))) == {"completion_length", "truncated"}


def test_the_best_and_the_worst_of_several_are_a_pair():
    task = make_task("online", num_generations=4, missing_eos_penalty=None, skip_ties=True)
    batch_of(task)
    rewards = torch.tensor([[1.0, 3.0, math.nan, 0.0], [2.0] * 4, [math.nan] * 3 + [1.0]]).double().flatten()
    pairs, counts = task._pairs(Scored(rewards[:, None], rewards))
    assert pairs[0].tolist() == [1, 3]
    assert counts.tolist() == [True, False, False]
    assert pairs[1, 0] != pairs[1, 1]


@pytest.mark.slow
def test_the_example_reaches_the_bound_of_its_reward():
    """A model that answers with random digits learns arithmetic from rewards alone."""
    spec = importlib.util.spec_from_file_location("grpo_digits", EXAMPLES / "grpo_digits.py")
    example = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(example)
    found = example.main(run_dir="digits", log="none", device="cpu")
    assert found["val/reward"] == 1.0
    lines = [json.loads(line) for line in Path("digits/records.jsonl").read_text().splitlines()]
    shown = [sample for line in lines if line.get("key") == "val/rollouts" for sample in line["samples"]]
    assert {sample["reward"] for sample in shown[:4]} <= {0.0, 1.0}
    assert all(sample["reward"] == 1.0 for sample in shown[-4:])


def test_training_raises_the_reward():
    """Online DPO learns to write short completions; the example shows it for GRPO."""

    def short(completion_ids):
        return [-float(len(ids)) for ids in completion_ids]

    task = make_task("online", toys.model(torch.float32), rewards=short, missing_eos_penalty=None)
    trainer = make_trainer("online", task=task, batch_size=8, max_steps=20, lr=5e-3, eval_every=99).fit()
    rewards = [record["train/reward"] for record in trainer.state.log_history if "train/reward" in record]
    assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 1.5
