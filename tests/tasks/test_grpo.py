"""GRPO and Online DPO: the same run however it is sliced, killed or distributed; rewards, environments, tools."""

import json
import math

import grpo_toys as toys
import pytest
import torch
from grpo_toys import CASES, PROMPTS, make_task, make_trainer
from safetensors.torch import load_file
from transformers import LlamaConfig, LlamaForSequenceClassification

import text_toys
from forking import SERVER
from ranks import on_ranks
from trainformer.adapters import LoRA
from trainformer.callbacks import RolloutSamples
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.order import sample_key, set_sample_key
from trainformer.tasks import GRPO, OnlineDPO
from trainformer.tasks.language.rollouts.rewards import Rewards, overlong_penalty
from trainformer.tasks.language.rollouts.task import Scored


def close(a, b):
    assert a.keys() == b.keys()
    for name in a:
        torch.testing.assert_close(a[name].double(), b[name].double(), rtol=1e-8, atol=1e-9, msg=name)


def batch_of(task, records=None, train=True):
    """All records as one batch, with the seeds of the first epoch."""
    task.configure(None)
    prepared = task.prepare_dataset(PROMPTS[:4] if records is None else records, train=train)
    samples = []
    for i in range(len(prepared)):
        set_sample_key(sample_key(0, 0, i))
        samples.append(prepared[i])
    return task.collate_fn(samples)


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
    assert float(empty.sum) == float(empty.weight) == 0
    empty.sum.backward()


def test_predictions_and_evaluation():
    trainer = make_trainer("dapo", task=make_task("dapo", eval_generations=2, eval_temperature=1.0))
    found = trainer.predict([{"prompt": record["prompt"]} for record in PROMPTS[:3]])
    assert [len(row["generated"]) for row in found] == [8, 8, 8]
    first, again = trainer.evaluate(), trainer.evaluate()
    assert first == again
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
        assert float(judge(ids).logits) == pytest.approx(float(score), abs=1e-5)
    assert scored.total.std() > 0
    names = {name for name, _ in vars(task).items()}
    assert "judge" in task.config_dict()["rewards"]
    assert "_scorer" in names


def test_the_overlong_penalty_is_that_of_dapo():
    penalty = overlong_penalty(max_length=8, buffer=3)
    assert penalty(completion_ids=[[0] * n for n in (1, 5, 6, 7, 8, 9)]) == [0, 0, -1 / 3, -2 / 3, -1, -1]
    assert math.copysign(1, penalty(completion_ids=[[0]])[0]) == 1
    assert Rewards([penalty]).names == ["overlong"]


# -- environments and tools --------------------------------------------------------------------------------


class Guess:
    """Says how many letters were wrong, and pays for each turn; over after three turns."""

    def reset(self, prompt, columns):
        self.turns = 0
        self.hint = columns["bonus"]
        return f" hint {self.hint}"

    def step(self, completion):
        self.turns += 1
        observation = None if self.turns == 3 else f" wrong {self.turns}"
        return observation, self.turns + self.hint


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_an_environment_answers_and_its_words_are_not_trained_on(kind):
    records = [
        {**record, "prompt": record["prompt"] if kind == "text" else [{"role": "user", "content": record["prompt"]}]}
        for record in PROMPTS[:4]
    ]
    task = make_task("dapo", rewards=None, environment=Guess, max_completion_length=40, beta=0.0)
    batch = batch_of(task, records)
    rollouts = task.rollouts(batch)
    tokenizer = task.text_tokenizer
    full = [rollout for rollout in rollouts if rollout.turns == 3]
    assert len(full) > 3
    for rollout in full:
        assert rollout.reward == 6 + 3 * rollout.environment.hint
        seen = [token for token, own in zip(rollout.tokens, rollout.mask, strict=True) if not own]
        shown = tokenizer.decode(seen)
        if kind == "text":
            assert shown == " wrong 1 wrong 2"
            assert rollout.prompt.prompt.endswith(f"hint {rollout.environment.hint}")
        else:
            assert shown == "<|user|> wrong 1</s><|assistant|><|user|> wrong 2</s><|assistant|>"
            assert [message["role"] for message in rollout.completion] == ["assistant", "user"] * 2 + ["assistant"]
            assert rollout.prompt.prompt[-1]["content"].endswith(f"hint {rollout.environment.hint}")
    rows = task.rows_of(rollouts)
    assert int(rows.mask.sum()) == sum(rollout.length for rollout in rollouts) < int((rows.input_ids > -1).sum())
    # Turn by turn, the same tokens as a conversation that one knew beforehand: random numbers go on.
    assert [r.tokens for r in task.rollouts(batch)] == [r.tokens for r in rollouts]
    limited = make_task("dapo", rewards=None, environment=Guess(), max_completion_length=40, max_turns=1)
    assert {rollout.turns for rollout in limited.rollouts(batch_of(limited, records))} == {1}
    loss = task.train_step(batch)
    assert loss.metrics["turns"][0] == sum(rollout.turns for rollout in rollouts)
    assert int(loss.weight) == int(rows.mask.sum())


TOOL_TEMPLATE = (
    "{% if tools %}<|system|>{{ tools | length }} tools</s>{% endif %}"
    "{% for m in messages %}<|{{ m['role'] if m['role'] != 'tool' else 'user' }}|>{{ m['content'] }}"
    "{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def add(a: int, b: int) -> int:
    """Add two numbers.

    Args:
        a: The first.
        b: The second.
    """
    return a + b


class Scripted:
    """A generator that calls a tool twice, once wrongly, and then answers."""

    def __init__(self, tokenizer):
        self.tokenizer = tokenizer
        self.synced = 0

    def update_weights(self, model):
        self.synced += 1

    def generate(self, prompts, seeds, options, *, stop_ids, drawn):
        from trainformer.tasks.language.rollouts.generation import Generated

        texts = []
        for ids in prompts:
            text = self.tokenizer.decode(ids)
            b = '"b": 2' if "error" not in text else '"b": 3'
            wrong = '{"name": "add", "arguments": {"a": 1}}'
            right = '{"name": "add", "arguments": {"a": 1, ' + b + "}}"
            call = wrong if "tool_call" not in text and "error" not in text else right
            texts.append(
                "It is 4.</s>" if text.endswith("4</s><|assistant|>") else f"<tool_call>{call}</tool_call></s>"
            )
        tokens = [self.tokenizer(text)["input_ids"] for text in texts]
        return Generated(tokens, [[-1.5] * len(ids) for ids in tokens])


def test_tools_run_and_another_engine_may_sample():
    tokenizer = text_toys.chat_tokenizer(TOOL_TEMPLATE)
    config = text_toys.llama(max_position_embeddings=512)
    answers = []

    def right(completions):
        answers.extend(completions)
        return [float("4" in messages[-1]["content"]) + i % 2 for i, messages in enumerate(completions)]

    task = GRPO(
        config, tokenizer=tokenizer, rewards=right, tools=[add], generator=Scripted(tokenizer), num_generations=2,
        max_completion_length=400, cache_dir="tokens",
    )  # fmt: skip
    records = [{"prompt": [{"role": "user", "content": "1 + 3?"}]}]
    batch = batch_of(task, records)
    assert tokenizer.decode(batch["prompts"][0].ids).startswith("<|system|>1 tools</s><|user|>1 + 3?</s>")
    loss = task.train_step(batch)
    messages = answers[0]
    assert [message["role"] for message in messages] == ["assistant", "tool", "assistant", "tool", "assistant"]
    assert messages[0]["tool_calls"][0]["function"] == {"name": "add", "arguments": {"a": 1}}
    assert "error" in messages[1]["content"]
    assert messages[3]["content"] == "4"
    assert messages[4]["content"] == "It is 4."
    assert loss.metrics["tools/calls"] == (4.0, 2)
    assert loss.metrics["tools/failures"] == (2.0, 4)
    rollout = task.rollouts(batch)[0]
    ids = torch.tensor([[*rollout.prompt.ids, *rollout.tokens]])
    logs = task.model(ids).logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    own = torch.tensor([False] * (len(rollout.prompt.ids) - 1) + rollout.mask)
    wanted = (logs[own] + 1.5).abs().mean()
    total, count = loss.metrics["sampling/logp_difference"]
    assert float(total / count) == pytest.approx(float(wanted), rel=1e-4)
    weight = float((logs[own] + 1.5).sum().exp().clamp(max=3.0))
    total, count = loss.metrics["sampling/correction"]
    assert float(total / count) == pytest.approx(weight, abs=1e-6)
    assert task.generator.synced == 1  # the weights have not changed since


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


def test_training_raises_the_reward():
    """Both learn to write short completions."""

    def short(completion_ids):
        return [-float(len(ids)) for ids in completion_ids]

    for case, options in (("dapo", {"num_generations": 6}), ("online", {"missing_eos_penalty": None})):
        task = make_task(case, toys.model(torch.float32), rewards=short, **options)
        trainer = make_trainer(case, task=task, batch_size=8, max_steps=20, lr=5e-3, run_dir=case).fit()
        rewards = [record["train/reward"] for record in trainer.state.log_history if "train/reward" in record]
        assert sum(rewards[-5:]) / 5 > sum(rewards[:3]) / 3 + 1.5


# -- mistakes ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"rewards": None}, "rewards, or an environment"),
        ({"rewards": 3}, "a function, a reward model"),
        ({"rewards": int}, "a function, a reward model"),
        ({"rewards": "missing.py:reward"}, "the file of a function"),
        ({"reward_weights": [1.0, 2.0]}, "one number in reward_weights"),
        ({"num_generations": 1}, "num_generations"),
        ({"loss": "dappo"}, "Did you mean 'dapo'"),
        ({"temperature": 0}, "temperature to be positive"),
        ({"temperature": -1.0}, "temperature"),
        ({"epsilon": 0}, "epsilon"),
        ({"epsilon_high": -1}, "epsilon_high"),
        ({"delta": 1.1}, "delta greater than"),
        ({"beta": -0.1}, "beta to be 0"),
        ({"beta": 0.0, "reference": "other"}, "no reference with beta=0"),
        ({"scale_rewards": "groups"}, "scale_rewards"),
        ({"importance_level": "word"}, "importance_level"),
        ({"mini_batches": 0}, "mini_batches"),
        ({"max_turns": 2}, "max_turns with tools"),
        ({"tools": [add], "environment": Guess}, "tools or an environment"),
        ({"tools": [lambda x: x]}, "type hint"),
        ({"tools": ["add"]}, "Python functions"),
        ({"environment": 3}, "reset"),
        ({"environment": dict}, "reset and step"),
        ({"generator": object()}, "generate"),
        ({"top_entropy_quantile": 0.0}, "top_entropy_quantile"),
        ({"max_completion_length": 0}, "max_completion_length"),
        ({"log_samples": -1}, "log_samples"),
    ],
)
def test_wrong_arguments(options, words):
    with pytest.raises(BadArgument, match="Expected") as error:
        make_task("dapo", **options)
    assert words in str(error.value)


@pytest.mark.parametrize(
    ("records", "words"),
    [
        ([{"text": "a"}], "records with a prompt"),
        ([{"prompt": "a"}, {"question": "b"}], "record 1"),
        ([{"prompt": "a"}, {"prompt": [{"role": "user", "content": "b"}]}], "prompts of one kind"),
        ([{"prompt": "a"}, {"prompt": ""}], "at least one character"),
        ([{"prompt": 3}], "a text or a list of messages"),
        ([{"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}], "an answer"),
        ([{"prompt": "word " * 80}], "at most 56 tokens"),
    ],
)
def test_wrong_records(records, words):
    task = make_task("dapo", rewards=lambda completions: [0.0] * len(completions))
    with pytest.raises(DataError) as error:
        batch_of(task, records)
    assert words in str(error.value)


def test_wrong_settings_rewards_and_judges():
    for settings, words in (
        ({"strategy": "pipeline"}, "strategy 'ddp' or 'fsdp'"),
        ({"accumulation_steps": 2, "task": make_task("batch")}, "no gradient accumulation"),
        ({"batch_size": 1, "task": make_task("several")}, "mini_batches"),
    ):
        with pytest.raises(BadArgument) as error:
            make_trainer("dapo", **settings)
        assert words in str(error.value)
    for function, words in (
        (lambda completions: [1.0], "a list of 12 numbers"),
        (lambda completions: 1.0, "a list of 12 numbers"),
        (lambda completions: [math.nan] * len(completions), "finite numbers"),
        (lambda completions: ["good"] * len(completions), "finite numbers"),
        (lambda completions, answer: [1.0] * len(completions), "columns of the data"),
    ):
        task = make_task("dapo", rewards=function)
        with pytest.raises(DataError) as error:
            task.train_step(batch_of(task))
        assert words in str(error.value)
    for judge, words in (
        (lambda prompts, pairs: [0], "a list of 4"),
        (lambda prompts, pairs: [2] * 4, "0, 1, or None"),
    ):
        task = OnlineDPO(toys.model(), tokenizer=text_toys.chat_tokenizer(), judge=judge, max_completion_length=4)
        with pytest.raises(DataError) as error:
            task.train_step(batch_of(task))
        assert words in str(error.value)
    with pytest.raises(BadArgument, match="a judge alone"):
        OnlineDPO(toys.model(), judge=lambda prompts, pairs: [0], rewards=toys.length)
    with pytest.raises(BadArgument, match="positions"):
        make_trainer("dapo", task=make_task("dapo", max_prompt_length=60))


def test_long_prompts_are_left_out_of_training(caplog):
    records = [*PROMPTS[:3], {"prompt": "word " * 80, "bonus": 0.0}]
    batch = batch_of(make_task("dapo"), records)
    assert len(batch["prompts"]) == 3
    assert "1 of 4 prompts" in caplog.text


def test_a_function_in_a_file_is_imported_when_it_is_needed(tmp_path, monkeypatch):
    (tmp_path / "my_rewards.py").write_text(
        "def short(completion_ids):\n    return [-len(ids) for ids in completion_ids]\n"
    )
    task = make_task("dapo", rewards="my_rewards.py:short")
    batch = batch_of(task)
    with pytest.raises(BadArgument, match="not approved"):
        task.train_step(batch)
    monkeypatch.setenv("TRAINFORMER_TRUST", "my_rewards")
    loss = task.train_step(batch)
    total, count = loss.metrics["reward"]
    assert float(total / count) < 0
    assert task.config_dict()["rewards"] == "my_rewards.py:short"
