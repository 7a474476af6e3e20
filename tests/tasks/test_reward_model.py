"""Reward models: TRL's loss, scores that padding does not change, checkpoints of transformers, what is learned."""

import copy
import json
import random

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

import text_toys as toys
import trainformer
from text_toys import batches_of, bert, checkpoint_of, gpt2, llama
from toys import weights
from trainformer.adapters import LoRA
from trainformer.cli.app import main
from trainformer.core.errors import BadArgument, DataError
from trainformer.run import run_of
from trainformer.tasks import RewardModel

PAIRS = [{**pair, "margin": 0.1 * i} for i, pair in enumerate(toys.preferences())]
ASK, SAID = {"role": "user", "content": "the fox"}, {"role": "assistant", "content": "jumps"}


@pytest.fixture(scope="module")
def tokenizer():
    return toys.chat_tokenizer()


@pytest.fixture
def task(tokenizer, tmp_path):
    def make(model=None, adapter=None, **options):
        defaults = {"max_length": 32, "tokenizer": tokenizer, "cache_dir": tmp_path / "tokens"}
        return RewardModel(llama() if model is None else model, adapter, **{**defaults, **options})

    return make


def trainer_for(task, data=PAIRS, **options):
    return toys.trainer_for(task, data, **options)


@torch.no_grad()
def alone(model, ids):
    """The score of a text by itself, from the hidden state of its last token that is no padding token."""
    ids = list(ids)
    last = max(i for i, token in enumerate(ids) if token != model.config.pad_token_id)
    states = model.eval().model(input_ids=torch.tensor([ids])).last_hidden_state[0, last]
    return (model.score.weight @ states).item()


def test_the_loss_is_that_of_single_answers(task, tokenizer):
    trainer = trainer_for(task(center_rewards_coefficient=0.1), batch_size=16)
    made = trainer.task
    (batch,) = batches_of(trainer)
    dataset = run_of(trainer).train_source.dataset
    total = 0.0
    for i, pair in enumerate(PAIRS):
        assert tokenizer.decode(dataset[i]["chosen"]["input_ids"]) == f"{pair['prompt']}{pair['chosen']}</s>"
        assert dataset[i]["margin"] == pytest.approx(pair["margin"])
        good, bad = (alone(made.model, dataset[i][part]["input_ids"].tolist()) for part in ("chosen", "rejected"))
        gap = torch.tensor(good - bad - pair["margin"], dtype=torch.float64)
        total += -torch.log(torch.sigmoid(gap)) + 0.1 * (good + bad) ** 2
    found = made.train_step(batch)
    assert found.weight == 16
    assert found.sum.item() == pytest.approx(float(total), rel=1e-5)
    assert trainer.check().ok


@pytest.mark.slow
def test_the_loss_is_trls(task, tokenizer, tmp_path):
    """One batch through TRL's own trainer: texts with margins, and conversations."""
    from datasets import Dataset
    from trl import RewardConfig, RewardTrainer

    chats = [
        {
            "prompt": [{"role": "user", "content": pair["prompt"]}],
            "chosen": [{"role": "assistant", "content": pair["chosen"]}],
            "rejected": [{"role": "assistant", "content": pair["rejected"]}],
        }
        for pair in PAIRS
    ]
    without = [{name: pair[name] for name in ("chosen", "rejected")} for pair in PAIRS]
    for data, center in ((PAIRS, None), (chats, 0.2), (without, None)):
        trainer = trainer_for(task(center_rewards_coefficient=center), data, batch_size=16)
        made = trainer.task
        (batch,) = batches_of(trainer)
        settings = RewardConfig(
            output_dir=str(tmp_path / "trl"), max_length=32, report_to=[], use_cpu=True, bf16=False,
            per_device_train_batch_size=16, gradient_checkpointing=False, center_rewards_coefficient=center,
        )  # fmt: skip
        theirs = RewardTrainer(
            copy.deepcopy(made.model), settings, train_dataset=Dataset.from_list(data),
            processing_class=copy.deepcopy(tokenizer),
        )  # fmt: skip
        wanted = theirs.compute_loss(theirs.model, next(iter(theirs.get_train_dataloader())))
        found = made.train_step(batch)
        torch.testing.assert_close(found.sum / 16, wanted, rtol=1e-5, atol=1e-6)
        logged = theirs._metrics["train"]
        for name in ("accuracy", "margin", "mean_reward"):
            total, weight = found.metrics[name]
            assert float(total) / float(weight) == pytest.approx(logged[name][0], rel=1e-4, abs=1e-6)


@pytest.mark.parametrize("model", [llama, gpt2, bert])
def test_padding_does_not_change_a_score(task, tokenizer, model):
    made = task(model(vocab_size=320))
    texts = [*toys.sentences()[:6], "a"]
    together = made.score(texts)
    apart = [made.score(text)[0] for text in texts]
    assert together == pytest.approx(apart, abs=1e-5)
    assert len({round(score, 6) for score in together}) > 4
    if model is llama:
        ids = [[*tokenizer(text)["input_ids"], tokenizer.eos_token_id] for text in texts]
        assert together == pytest.approx([alone(made.model, row) for row in ids], abs=1e-5)


def test_checkpoints_are_those_of_transformers(task, tokenizer, tmp_path, capsys):
    """A causal model becomes a reward model; its checkpoint opens anywhere, with equal scores."""
    AutoModelForCausalLM.from_config(llama()).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    trainer = trainer_for(
        task(str(tmp_path / "base"), tokenizer=None), val_data=PAIRS, max_steps=3, run_dir=tmp_path / "run"
    ).fit()
    folder = checkpoint_of(trainer)
    config = json.loads((folder / "config.json").read_text())
    assert config["architectures"] == ["LlamaForSequenceClassification"]
    assert config["pad_token_id"] == trainer.task.text_tokenizer.pad_token_id
    texts = toys.sentences()[:5]
    scores = trainer.task.score(texts)
    opened = AutoModelForSequenceClassification.from_pretrained(folder).eval()
    assert opened.config.num_labels == 1
    padded = trainer.task.text_tokenizer([f"{t}</s>" for t in texts], padding=True, return_tensors="pt")
    with torch.no_grad():
        theirs = opened(**padded).logits[:, 0].tolist()
    assert theirs == pytest.approx(scores, abs=1e-5)

    # The same scores from all other entry points.
    assert [row["reward"].item() for row in trainer.predict(texts)] == pytest.approx(scores, abs=1e-5)
    again = trainformer.load(tmp_path / "run")
    assert [row["reward"] for row in again(texts)] == pytest.approx(scores, abs=1e-5)
    assert task(str(folder), tokenizer=None).score(texts) == pytest.approx(scores, abs=1e-5)
    chats = [{"messages": [ASK, SAID]}, {"prompt": [ASK], "completion": [SAID]}, [ASK, SAID]]
    found = [trainer.task.score(chat)[0] for chat in chats] + trainer.task.score(chats)
    assert found == pytest.approx([found[0]] * 6, abs=1e-5)
    assert trainer.task.score("<|user|>the fox</s><|assistant|>jumps</s>") == pytest.approx(found[:1], abs=1e-5)
    (tmp_path / "texts.jsonl").write_text("\n".join(json.dumps({"text": text}) for text in texts))
    capsys.readouterr()
    assert main(["predict", str(tmp_path / "run"), str(tmp_path / "texts.jsonl"), "--out=out.jsonl"]) == 0
    with open("out.jsonl") as lines:
        assert [json.loads(line)["reward"] for line in lines] == pytest.approx(scores, abs=1e-5)
    rows = trainer.predict(PAIRS)
    metrics = trainer.evaluate()
    assert sum(bool(row["correct"]) for row in rows) / 16 == metrics["val/accuracy"]
    rewards = [row[name].item() for row in rows for name in ("chosen_reward", "rejected_reward")]
    assert metrics["val/min_reward"] == pytest.approx(min(rewards), abs=1e-5)
    assert metrics["val/max_reward"] == pytest.approx(max(rewards), abs=1e-5)
    assert metrics["val/mean_reward"] == pytest.approx(sum(rewards) / 32, abs=1e-5)


def test_accumulation_does_not_change_the_result(task):
    ends = []
    for size, accumulation in ((8, 1), (2, 4)):
        trainer = trainer_for(
            task(), batch_size=size, accumulation_steps=accumulation, max_steps=3, optimizer="sgd", precision="no"
        )
        ends.append(weights(trainer.fit().task))
    for name, p in ends[0].items():
        torch.testing.assert_close(ends[1][name], p, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("adapted", [False, True])
def test_resuming_is_exact(task, tmp_path, adapted):
    AutoModelForCausalLM.from_config(gpt2()).save_pretrained(tmp_path / "base")  # with dropout

    def run(folder, **options):
        made = task(str(tmp_path / "base"), LoRA(r=4) if adapted else None)
        return trainer_for(made, run_dir=tmp_path / folder, save_every=2, save_last=5, **options)

    whole, again = toys.check_resuming(run)
    assert again.state.step == 6
    trained = [name for name, p in whole.task.model.named_parameters() if p.requires_grad]
    assert any("score" in name for name in trained)


def test_held_out_pairs_are_ranked(task):
    """Half of the words are good; the better of two answers has more of them. None was seen in training."""
    rng = random.Random(0)
    answers = list({tuple(rng.choices(toys.WORDS, k=4)) for _ in range(600)})
    worth = {answer: sum(toys.WORDS.index(word) < 7 for word in answer) for answer in answers}
    pairs = [
        {"prompt": "say", "chosen": "".join(f" {w}" for w in a), "rejected": "".join(f" {w}" for w in b)}
        for a, b in zip(answers[::2], answers[1::2], strict=False)
        if worth[a] > worth[b]
    ]
    held_out, train = pairs[:30], pairs[30:]
    trainer = trainer_for(task(), train, val_data=held_out, max_steps=60, batch_size=16, lr=5e-3, precision="no")
    before = trainer.evaluate()
    metrics = trainer.fit().evaluate()
    assert metrics["val/accuracy"] > 0.9
    assert metrics["val/margin"] > before["val/margin"] + 1
    assert metrics["val/loss"] < 0.4 < before["val/loss"]


@pytest.mark.parametrize(
    ("record", "message"),
    [
        ({"prompt": "a", "chosen": " b", "rejected": " c", "margin": "wide"}, "'margin' to be a number"),
        ({"prompt": "a", "chosen": " b", "rejected": " c", "margin": float("nan")}, "'margin' to be a number"),
        ({"text": "the fox"}, "preference"),
    ],
)
def test_wrong_records(task, record, message):
    with pytest.raises(DataError, match=message):
        trainer_for(task(), [record] * 4)


def test_wrong_arguments(task):
    made = task()
    trainer = trainer_for(made)
    with pytest.raises(DataError, match="at most max_length tokens"):
        made.score("fox " * 60)
    with pytest.raises(DataError, match="at most max_length tokens"):
        trainer.predict(["the fox", ""])
    with pytest.raises(DataError, match="input 0 to be a text"):
        made.score([PAIRS[0]])
    with pytest.raises(DataError, match=r"pairs of answers .*call predict"):
        trainer.evaluate(["the fox", "a dog"])
    assert len(task(truncation="truncate").score("fox " * 60)) == 1
    assert made.score([]) == []
    with pytest.raises(BadArgument, match="one output"):
        task(model_kwargs={"num_labels": 2})
    two = AutoModelForSequenceClassification.from_config(llama())
    with pytest.raises(BadArgument, match="a model with one output, received '2 outputs'"):
        task(two).score("the fox")
    with pytest.raises(BadArgument, match="center_rewards_coefficient"):
        task(center_rewards_coefficient=-1)
    causal = AutoModelForCausalLM.from_config(llama(num_labels=1))
    with pytest.raises(BadArgument, match="one score per text"):
        task(causal).score("the fox")
