"""KTO on JAX: the first step and evaluations are those of the torch task, however a step is divided."""

import numpy as np
import pytest
from step_zero import ON_TORCH, ONE_STEP, assert_same_gradients, assert_same_metrics, metrics_of
from text_trainer_toys import batch_of, devices, make_folder, save_changed, trainer_of

import text_toys as toys
from trainformer.core.errors import BadArgument, DataError
from trainformer.jax import KTOConfig, KTOTrainer, LoRAConfig
from trainformer.tasks.language.kto import KTO

ANSWERS = [
    {"prompt": pair["prompt"], "completion": pair[kind], "label": kind == "chosen"}
    for number, pair in enumerate(toys.preferences())
    for kind in (("chosen", "rejected") if number % 3 else ("chosen",))
][:24]
OPTIONS = {"desirable_weight": 0.8, "undesirable_weight": 1.2, "beta": 0.3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("llama"))


@pytest.fixture(scope="module")
def other(folder, tmp_path_factory):
    """The reference: with another one than the model the KL divergence is not 0."""
    return save_changed(folder, tmp_path_factory.mktemp("other"))


class Stream:
    def __iter__(self):
        return iter(ANSWERS)


def kto(folder, where, data=ANSWERS, **given):
    return trainer_of(KTOTrainer, KTOConfig, folder, data, where, **given)


@pytest.fixture(scope="module", params=["kto", "apo_zero_unpaired"])
def both(request, folder, other, tmp_path_factory):
    """The torch run and the JAX run of one step, with the metrics of an evaluation before it."""
    where = tmp_path_factory.mktemp(request.param)
    task = KTO(str(folder), loss=request.param, max_length=32, cache_dir=where / "t", reference=str(other), **OPTIONS)
    theirs = toys.trainer_for(task, ANSWERS, **_torch_options(where))
    before = theirs.evaluate()
    theirs.fit()
    return request.param, theirs, before


def _torch_options(where):
    rest = {"batch_size": len(ANSWERS), "optimizer": "sgd", "scheduler": None, "weight_decay": 0.0}
    return {**rest, **ON_TORCH, "run_dir": str(where / "run"), "val_data": ANSWERS}


def test_the_first_step_is_that_of_torch(both, folder, other, tmp_path):
    loss, theirs, before = both
    options = {"reference_model": other, "eval_dataset": ANSWERS}
    mine = kto(folder, tmp_path, loss_type=loss, **ONE_STEP, **OPTIONS, options=options)
    evaluated = {name.removeprefix("eval_"): value for name, value in mine.eval().items()}
    assert_same_metrics(evaluated, {name.removeprefix("val/"): value for name, value in before.items()})
    if loss == "kto":
        assert evaluated["kl"] > 0.01
    assert_same_gradients(mine.train(), folder, theirs.task.model)
    assert_same_metrics(metrics_of(mine), metrics_of(theirs))


def test_meshes_accumulation_and_padding_change_nothing(both, folder, other, tmp_path):
    loss, theirs, before = both
    sizes = {"gradient_accumulation_steps": 3, "eval_batch_size": 16}  # the last evaluation batch has padding
    options = {"reference_model": other, "eval_dataset": ANSWERS, "mesh": devices((2, 2, 1, 1))}
    mine = kto(folder, tmp_path, loss_type=loss, **ONE_STEP, **OPTIONS, **sizes, options=options)
    evaluated = {name.removeprefix("eval_"): value for name, value in mine.eval().items()}
    assert_same_metrics(evaluated, {name.removeprefix("val/"): value for name, value in before.items()})
    assert_same_gradients(mine.train(), folder, theirs.task.model)
    assert_same_metrics(metrics_of(mine), metrics_of(theirs))


@pytest.mark.slow
def test_a_resumed_run_is_the_same(folder, tmp_path):
    sizes = {"total_batch_size": 8, "num_train_epochs": 3, "optimizer": "adamw", "learning_rate": 1e-2}
    whole = kto(folder, tmp_path / "whole", max_steps=4, **sizes).train()
    kto(folder, tmp_path / "cut", max_steps=2, resume="auto", **sizes).train()
    resumed = kto(folder, tmp_path / "cut", max_steps=4, resume="auto", **sizes).train()
    for name in ("norm", "embed_tokens"):
        for key, value in whole.params[name].items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(resumed.params[name][key]))


def test_with_lora_only_the_adapter_is_trained(folder, tmp_path):
    trainer = kto(folder, tmp_path, options={"lora": LoRAConfig(r=2, targets="all-linear"), "eval_dataset": ANSWERS})
    before = trainer.eval()
    state = trainer.train()
    assert before["eval_kl"] == pytest.approx(0.0, abs=1e-5)  # the reference is the model without the adapter
    assert trainer.eval()["eval_loss"] < before["eval_loss"]
    assert all(path.endswith(("lora_a", "lora_b")) for path in state.trainable)


def test_pairs_count_as_two_answers(folder, tmp_path):
    trainer = kto(folder, tmp_path, toys.preferences(), total_batch_size=32, shuffle=False)
    batch = batch_of(trainer)
    assert batch["desirable"].tolist() == [True] * 16 + [False] * 16
    assert batch["reference"].shape == (32, 2)


def test_invalid_arguments_and_data_are_refused(folder, tmp_path):
    for wrong, words in (
        ({"loss_type": "ktoo"}, "Did you mean 'kto'"),
        ({"beta": -1.0}, "beta to be a positive number"),
        ({"desirable_weight": -0.1}, "desirable_weight to be a number of at least 0"),
        ({"packing": True}, "packing=False"),
    ):
        with pytest.raises(BadArgument, match=words):
            KTOConfig(**wrong)
    with pytest.raises(DataError, match="label"):
        kto(folder, tmp_path, [{"prompt": "a", "completion": "b"}])
    with pytest.raises(DataError, match="at least two records"):
        kto(folder, tmp_path, ANSWERS[:1])
    with pytest.raises(DataError, match="a stream"):
        kto(folder, tmp_path, options={"train_dataset": Stream()})
