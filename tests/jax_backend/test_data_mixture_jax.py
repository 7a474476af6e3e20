"""Mixtures on JAX: the order of torch runs, losses per source, resuming, and no torch."""

import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax_toys import Mlp, samples
from text_trainer_toys import devices, make_folder, pairs

from trainformer import Loss, Mixture
from trainformer.core.errors import BadArgument
from trainformer.jax import BaseTrainer, SFTConfig, SFTTrainer, TrainingArguments
from trainformer.run import run_of


class SampleTrainer(BaseTrainer):
    """Returns the losses of its samples, with weights."""

    def compute_loss(self, model, batch, key):
        assert "_source" not in batch
        losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"])
        weights = 1.0 + batch["y"]
        return Loss(jnp.sum(losses * weights), jnp.sum(weights), per_sample=(losses * weights, weights))


class MeanTrainer(BaseTrainer):
    def compute_loss(self, model, batch, key):
        return optax.softmax_cross_entropy_with_integer_labels(model(batch["x"]), batch["y"]).mean()


def numbered(number, size):
    return samples(size, seed=number) | {"number": np.full(size, number)}


def trainer_of(kind, data, folder, **options):
    defaults = {"num_train_epochs": 2, "total_batch_size": 8, "learning_rate": 1e-12, "log_steps": 1, "log": "none"}
    rest = {"output_dir": str(folder), "resume": None, "weight_decay": 0.0}
    arguments = TrainingArguments(**{**defaults, **rest, **options})
    return kind(arguments, model=Mlp(nnx.Rngs(0)), dataset_train=data, mesh=devices())


def mixture(**options):
    sources = {"few": numbered(0, 5), "many": numbered(1, 21)}
    return Mixture(sources, options.pop("weights", {"few": 1, "many": 2}), **options)


def records(trainer):
    return [record for record in trainer.state.log_history if "train/loss" in record]


def test_the_loss_of_each_source_is_logged(tmp_path):
    trainer = trainer_of(SampleTrainer, mixture(), tmp_path, gradient_accumulation_steps=2)
    trainer.train()
    model = Mlp(nnx.Rngs(0))  # the learning rate is next to 0
    batches = [batch for epoch in range(2) for batch in run_of(trainer).train_source.batches(epoch)]
    assert len(batches) == len(records(trainer)) == 8
    for batch, record in zip(batches, records(trainer), strict=True):
        data = {name: value[: batch.size] for name, value in batch.data.items()}
        losses = optax.softmax_cross_entropy_with_integer_labels(model(data["x"]), data["y"])
        for number, name in enumerate(("few", "many")):
            mine = data["number"] == number
            assert record[f"train/share/{name}"] == pytest.approx(mine.mean())
            weights = 1.0 + data["y"][mine]
            if mine.any():
                wanted = float((losses[mine] * weights).sum() / weights.sum())
                assert record[f"train/loss/{name}"] == pytest.approx(wanted, rel=1e-5)
            else:
                assert f"train/loss/{name}" not in record


def test_a_mean_is_attributed_where_a_step_has_one_source(tmp_path, caplog):
    trainer_of(MeanTrainer, mixture(), tmp_path / "mixed").train()
    assert "the losses of few, many are not logged" in caplog.text
    apart = trainer_of(MeanTrainer, mixture(mix="batch"), tmp_path / "apart")
    apart.train()
    for record in records(apart):
        (name,) = [name for name in record if name.startswith("train/loss/")]
        assert record[name] == pytest.approx(record["train/loss"])


class Stream:
    """The same samples, in another order in each pass, without a length or a state."""

    def __init__(self, number, size):
        self.data, self.size, self.epoch = numbered(number, size), size, 0

    def set_epoch(self, epoch):
        self.epoch = epoch

    def __iter__(self):
        for index in np.random.default_rng(self.epoch).permutation(self.size):
            yield {name: values[index] for name, values in self.data.items()}


@pytest.mark.parametrize("kind", [numbered, Stream])
@pytest.mark.parametrize("steps", [4, 5], ids=["between epochs", "in an epoch"])
def test_resuming_gives_the_same_samples_and_weights(tmp_path, kind, steps):
    options = {"learning_rate": 0.1, "scheduler": "constant", "max_steps": 7}

    def train(name, **changes):
        weights = [(0, {"few": 1, "many": 0}), (6, {"few": 0, "many": 1})]
        data = Mixture({"few": numbered(0, 5), "many": kind(1, 21)}, weights, epoch=32)
        trainer = trainer_of(SampleTrainer, data, tmp_path / name, **options | changes)
        trainer.train()
        return trainer

    whole = train("whole")
    train("run", max_steps=steps)
    resumed = train("run", resume="auto")
    states = [jax.tree.leaves(trainer.model_state.params) for trainer in (whole, resumed)]
    assert all(np.array_equal(one, other) for one, other in zip(*states, strict=True))
    last = [records(trainer)[-1] for trainer in (whole, resumed)]
    same = [name for name in last[0] if not any(word in name for word in ("second", "memory", "recompilations"))]
    assert {name: last[0][name] for name in same} == {name: last[1][name] for name in same}


def test_language_models_count_tokens(tmp_path):
    folder = make_folder(tmp_path / "model")
    data = Mixture({"long": pairs(), "short": [{"prompt": "1 + 1 =", "completion": " 2"}] * 3}, "equal", epoch=24)
    folders = {"output_dir": str(tmp_path / "run"), "cache_dir": str(tmp_path / "tokens")}
    quiet = {"log_steps": 1, "log": "none", "resume": None}
    arguments = SFTConfig(max_steps=3, total_batch_size=8, max_sequence_length=32, **folders, **quiet)
    trainer = SFTTrainer(arguments, folder, dataset_train=data, mesh=devices())
    trainer.train()
    for record, batch in zip(records(trainer), run_of(trainer).train_source.batches(0), strict=True):
        labels = batch.data["labels"][: batch.size, 1:]
        tokens = (labels != -100).sum(axis=1)
        counts = [tokens[batch.sources.numbers == number].sum() for number in (0, 1)]
        losses = [record.get(f"train/loss/{name}", 0.0) for name in ("long", "short")]
        mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / tokens.sum()
        assert mean == pytest.approx(record["train/loss"], rel=1e-5)


def test_a_mixture_is_refused_for_evaluation_and_needs_no_torch(tmp_path):
    with pytest.raises(BadArgument, match="data to evaluate, received 'a Mixture'"):
        SampleTrainer(
            TrainingArguments(log="none", output_dir=str(tmp_path)),
            model=Mlp(nnx.Rngs(0)),
            dataset_train=samples(),
            dataset_eval=mixture(),
        )
    code = "import sys; from trainformer.data.mixture.stream import MixtureStream; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=300)
