"""Distillation on JAX: steps and evaluations of the torch task, with a teacher in memory and with logits on disk."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from flax import nnx
from step_zero import ON_TORCH, ONE_STEP, assert_same_gradients, assert_same_metrics, metrics_of
from text_trainer_toys import devices, make_folder, pairs, save_changed, trainer_of

import text_toys as toys
from trainformer.callbacks import GradientMonitor, Throughput
from trainformer.core.errors import BadArgument, DataError
from trainformer.data import train_tokenizer
from trainformer.jax import DistillationConfig, DistillationTrainer, LoRAConfig
from trainformer.losses import divergence as on_torch
from trainformer.losses.jax.divergence import TeacherStates, TopLogProbs, distillation_sums
from trainformer.models.jax import DecoderConfig, load_model
from trainformer.tasks.language.distillation import Distillation
from trainformer.tasks.language.teacher_logits import save_teacher_logits

TEXTS = pairs()
ROWS, LENGTH, WORDS, K = 3, 6, 11, 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("student"))


@pytest.fixture(scope="module")
def teacher(folder, tmp_path_factory):
    return save_changed(folder, tmp_path_factory.mktemp("teacher"))


@pytest.fixture(scope="module")
def logits(teacher, tmp_path_factory):
    """The five most probable tokens of the teacher, on disk."""
    where = tmp_path_factory.mktemp("logits")
    options = {"k": 5, "temperature": 2.0, "max_length": 32, "cache_dir": where, "progress": False}
    save_teacher_logits(str(teacher), TEXTS, where / "stored", **options)
    return where / "stored"


def distil(folder, where, data=TEXTS, **given):
    return trainer_of(DistillationTrainer, DistillationConfig, folder, data, where, **given)


# -- the loss ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "beta"),
    [
        *(("logits", beta) for beta in (0.0, 0.3, 1.0)),
        *(("bucket", beta) for beta in (0.0, 0.3, 1.0)),
        *(("wider", 0.3), ("narrower", 0.0), ("renormalize", 0.0), ("renormalize", 0.3), ("all", 1.0)),
    ],
)
def test_the_divergence_matches_torch(kind, beta):
    rng = np.random.default_rng(0)
    student = rng.standard_normal((ROWS, LENGTH, WORDS)).astype(np.float32)
    labels = rng.integers(0, WORDS, (ROWS, LENGTH))
    labels[0, :3] = -100
    width = WORDS + {"wider": 2, "narrower": -2}.get(kind, 0)
    theirs = 2 * rng.standard_normal((ROWS, LENGTH, width)).astype(np.float32)
    labels = np.where(labels >= width, 0, labels)
    options = {"beta": beta, "temperature": 1.5, "alpha": 0.7}
    if kind in ("bucket", "renormalize", "all"):
        k = width if kind == "all" else K
        tail = "bucket" if kind == "all" else kind
        values, ids = (torch.tensor(theirs) / 1.5).log_softmax(-1).topk(k, -1)
        of_torch = on_torch.TopLogProbs(ids, values, width, tail)
        mine = TopLogProbs(jnp.asarray(ids.numpy()), jnp.asarray(values.numpy()), width, tail)
    else:
        of_torch, mine = on_torch.TeacherStates(torch.tensor(theirs)), TeacherStates(jnp.asarray(theirs))
    given = torch.tensor(student, requires_grad=True)
    wanted = on_torch.distillation_loss(given, torch.as_tensor(labels), of_torch, **options)
    wanted.sum.backward()

    def loss(states, chunks):
        found = distillation_sums(states, jnp.asarray(labels), mine, chunks=chunks, **options)
        return found.loss.sum(), found

    for chunks in (1, 4) if beta == 0.3 else (4,):
        gradient, found = jax.jit(jax.grad(loss, has_aux=True), static_argnums=1)(student, chunks)
        totals = {name: float(value.sum()) for name, value in found._asdict().items()}
        expected = {"loss": wanted.sum, "tokens": wanted.weight, "divergence": wanted.divergence, "kl": wanted.kl}
        expected |= {"cross_entropy": wanted.cross_entropy, "correct": wanted.correct, "agree": wanted.agree}
        assert totals == pytest.approx({name: float(value.detach()) for name, value in expected.items()}, rel=1e-5)
        np.testing.assert_allclose(gradient, given.grad.numpy(), atol=2e-6)


# -- steps -------------------------------------------------------------------------------------------------


CASES = {
    "forward": {"alpha": 0.6, "temperature": 2.0},
    "between": {"beta": 0.4},
    "reverse": {"beta": 1.0, "alpha": 0.9},
    "stored": {"temperature": 2.0, "beta": 0.5, "alpha": 0.8},
}


@pytest.mark.parametrize("case", ["forward", pytest.param("between", marks=pytest.mark.slow), "reverse", "stored"])
def test_the_first_step_is_that_of_torch(folder, teacher, logits, tmp_path, case):
    source = logits if case == "stored" else teacher
    task = Distillation(str(folder), teacher=str(source), max_length=32, cache_dir=tmp_path / "t", **CASES[case])
    rest = {"batch_size": len(TEXTS), "optimizer": "sgd", "scheduler": None, "weight_decay": 0.0}
    theirs = toys.trainer_for(task, TEXTS, **rest, **ON_TORCH, run_dir=str(tmp_path / "torch"), val_data=TEXTS)
    before = {name.removeprefix("val/"): value for name, value in theirs.evaluate().items()}
    before.pop("bits_per_byte")
    theirs.fit()
    # Chunks, micro-batches, a mesh and padding rows change nothing.
    divided = case in ("between", "stored")
    sizes = {"gradient_accumulation_steps": 2, "eval_batch_size": 6, "chunk_tokens": 50} if divided else {}
    options = {"teacher_model": source, "eval_dataset": TEXTS, "mesh": devices((2, 1, 2, 1) if divided else (1,) * 4)}
    mine = distil(folder, tmp_path, **ONE_STEP, **CASES[case], **sizes, options=options)
    assert_same_metrics({name.removeprefix("eval_"): value for name, value in mine.eval().items()}, before)
    assert_same_gradients(mine.train(), folder, theirs.task.model)
    assert_same_metrics(metrics_of(mine), metrics_of(theirs))


def test_packing_changes_neither_teacher_nor_loss(folder, teacher, logits, tmp_path):
    found = []
    for source in (teacher, logits):
        for packing in (False, True):
            where = tmp_path / f"{source.name}-{packing}"
            options = {"teacher_model": source, "eval_dataset": TEXTS}
            trainer = distil(folder, where, packing=packing, temperature=2.0, total_batch_size=2, options=options)
            found.append(trainer.eval())
    assert found[0] == pytest.approx(found[1], rel=1e-5)
    assert found[2] == pytest.approx(found[3], rel=1e-5)
    assert found[2]["eval_kl"] < found[0]["eval_kl"]  # tokens outside of the top five are one event


@pytest.mark.slow
def test_the_base_as_teacher_and_lora(folder, tmp_path):
    """The model before training: at first there is no divergence, later there is."""
    for lora in (None, LoRAConfig(r=2, targets="all-linear")):
        options = {"teacher_model": "base", "eval_dataset": TEXTS, "lora": lora, "mesh": devices((1, 2, 1, 1))}
        trainer = distil(folder, tmp_path / str(lora is None), alpha=0.1, learning_rate=1e-2, options=options)
        before = trainer.eval()
        assert before["eval_kl"] == pytest.approx(0.0, abs=1e-6)
        assert before["eval_agreement"] == 1.0
        state = trainer.train()
        after = trainer.eval()
        assert after["eval_kl"] > 1e-3
        assert after["eval_ce"] < before["eval_ce"]
        if lora is not None:
            assert all(path.endswith(("lora_a", "lora_b")) for path in state.trainable)


def test_a_teacher_of_another_kind_is_in_eval_mode(tmp_path):
    modes = set()

    class Lookup(nnx.Module):
        def __init__(self, rngs):
            self.embedding, self.dropout = nnx.Embed(8, 8, rngs=rngs), nnx.Dropout(0.5, rngs=rngs)

        def __call__(self, ids):
            modes.add((type(self), self.dropout.deterministic))
            return self.dropout(self.embedding(ids))

    class Teacher(Lookup):
        pass

    data = [{"input_ids": [1, 2, 3], "labels": [1, 2, 3]}] * 8
    arguments = DistillationConfig(max_steps=1, total_batch_size=8, log="none", output_dir=str(tmp_path / "run"))
    models = {"model": lambda rngs: Lookup(rngs), "teacher_model": lambda rngs: Teacher(rngs)}
    DistillationTrainer(arguments, **models, train_dataset=data).train()
    assert modes == {(Lookup, False), (Teacher, True)}


@pytest.mark.slow
def test_checks_and_measurements_of_a_run_with_a_teacher(folder, teacher, tmp_path):
    monitors = [GradientMonitor(log_every=1), Throughput(peak_flops=1e9)]
    options = {"teacher_model": teacher, "callbacks": monitors}
    trainer = distil(folder, tmp_path, max_steps=1, logging_steps=1, options=options)
    assert trainer.check().ok
    trainer.train()
    assert {"train/grad_norm_max", "train/mfu"} <= trainer.state.log_history[-1].keys()


@pytest.mark.slow
def test_a_resumed_run_is_the_same_and_checks_its_teacher(folder, teacher, tmp_path):
    def run(where, steps, source=teacher):
        sizes = {"total_batch_size": 8, "num_train_epochs": 3, "optimizer": "adamw", "learning_rate": 1e-2}
        options = {"teacher_model": source}
        return distil(folder, tmp_path / where, max_steps=steps, resume="auto", **sizes, options=options)

    whole = run("whole", 4).train()
    run("cut", 2).train()
    with pytest.raises(DataError, match="Expected the teacher that the run started with"):
        run("cut", 4, folder).train()
    resumed = run("cut", 4).train()
    for name in ("norm", "embed_tokens"):
        for key, value in whole.params[name].items():
            np.testing.assert_array_equal(np.asarray(value), np.asarray(resumed.params[name][key]))
    (index,) = (tmp_path / "cut" / "run" / "checkpoints" / "step_00000004").glob("*/leaves.json")
    assert len(json.loads(index.read_text())["leaves"]) == len(jax.tree.leaves(resumed))  # the teacher is not saved


def test_invalid_teachers_and_arguments_are_refused(folder, teacher, logits, tmp_path):
    for wrong, words in (
        ({"beta": 1.5}, "beta to be from 0 to 1"),
        ({"temperature": 0.0}, "temperature to be a positive number"),
        ({"beta": 1.0, "tail": "renormalize"}, "beta below 1"),
        ({"tail": "cut"}, "tail to be one of"),
        ({"label_smoothing": 0.1}, "no label_smoothing in distillation"),
    ):
        with pytest.raises(BadArgument, match=words):
            DistillationConfig(**wrong)
    model = load_model(folder)
    for source, options, words in (
        (None, {}, "teacher_model to be a model"),
        (model, {}, "received 'the student'"),
        (teacher, {"tail": "renormalize"}, "a folder of teacher logits only"),
        (logits, {"temperature": 1.0}, "Pass temperature=2"),
    ):
        with pytest.raises(BadArgument, match=words):
            distil(model, tmp_path, **options, options={"teacher_model": source, "processing_class": folder})
    tokenizer = train_tokenizer(["other words"], vocabulary=300)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    small = DecoderConfig(vocab_size=320, max_position_embeddings=64, **sizes)
    with pytest.raises(BadArgument, match="the tokenizer of the student"):
        distil(small, tmp_path, options={"teacher_model": teacher, "processing_class": tokenizer})
    more = [*TEXTS, {"prompt": "seven", "completion": " dogs"}]
    with pytest.raises(DataError, match="none for 1 of 17 sequences"):
        distil(folder, tmp_path, more, temperature=2.0, options={"teacher_model": logits})
