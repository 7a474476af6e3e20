"""Rollouts in several turns, with environments and tools; and the mistakes to make with GRPO and OnlineDPO."""

import json
import math
from pathlib import Path

import grpo_toys as toys
import pytest
import torch
from grpo_toys import PROMPTS, batch_of, make_task, make_trainer

import text_toys
from trainformer.cli import app
from trainformer.core.errors import BadArgument, DataError
from trainformer.tasks import GRPO, OnlineDPO

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
    with torch.no_grad():
        logits = task.model(ids).logits
    logs = logits[0, :-1].log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
    own = torch.tensor([False] * (len(rollout.prompt.ids) - 1) + rollout.mask)
    wanted = (logs[own] + 1.5).abs().mean()
    total, count = loss.metrics["sampling/logp_difference"]
    assert float(total / count) == pytest.approx(float(wanted), rel=1e-4)
    weight = float((logs[own] + 1.5).sum().exp().clamp(max=3.0))
    total, count = loss.metrics["sampling/correction"]
    assert float(total / count) == pytest.approx(weight, abs=1e-6)
    assert task.generator.synced == 1  # the weights have not changed since


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


def write_files(rewards):
    """A model, its prompts, and a file with a reward function, in the working directory."""
    toys.model(torch.float32).save_pretrained("model")
    text_toys.chat_tokenizer().save_pretrained("model")
    Path("prompts.jsonl").write_text("\n".join(json.dumps(record) for record in PROMPTS))
    Path(rewards).write_text("def short(completion_ids):\n    return [-len(ids) for ids in completion_ids]\n")


def test_the_command_line_takes_a_function_in_a_file(tmp_path):
    write_files("typed_rewards.py")
    words = ["--task=GRPO", "--model=./model", "--data=prompts.jsonl", "--rewards=typed_rewards.py:short", "--log=none"]
    words += ["--max-completion-length=4", "--num-generations=2", "--max-steps=1", "--batch-size=2", "--run-dir=run"]
    app.main(["train", *words, "--device=cpu", f"--cache-dir={tmp_path / 'tokens'}"])
    lines = [json.loads(line) for line in Path("run/records.jsonl").read_text().splitlines()]
    samples = next(line["samples"] for line in lines if line["kind"] == "text")
    assert all(sample["reward"] == -sample["tokens"] for sample in samples)


CONFIG = """\
trainer:
  type: trainformer.Trainer
  task: {type: trainformer.tasks.GRPO, model_name: model, rewards: "short_rewards.py:short", max_completion_length: 4,
         num_generations: 2, cache_dir: tokens}
  data: prompts.jsonl
  run_dir: runs/short
  max_steps: 1
  batch_size: 2
  device: cpu
  log: none
"""


def test_a_config_needs_trust_in_the_function_of_a_file_before_the_run(capsys):
    write_files("short_rewards.py")
    Path("short.yaml").write_text(CONFIG)
    for trust, message in (([], "was not approved yet"), (["--trust", "short_rewards.py"], "Write short_rewards.")):
        assert app.main(["run", "short.yaml", *trust]) == 1
        assert message in " ".join(capsys.readouterr().err.split())
        assert not Path("runs").exists()
    assert app.main(["run", "short.yaml", "--trust", "short_rewards"]) == 0
    lines = [json.loads(line) for line in Path("runs/short/records.jsonl").read_text().splitlines()]
    assert next(line["samples"] for line in lines if line["kind"] == "text")
