"""EMA, LRFinder, GradientMonitor, probes, samples and profiler on JAX, against numbers made without them."""

from __future__ import annotations

import base64
import io
import json
import logging
import re
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import torch
from backend_toys import Net, Noisy, are_equal, assert_close, on_host
from flax import nnx
from jax_toys import (
    CLASSES,
    Crash,
    CrashAt,
    MeanTrainer,
    Mlp,
    StepsTrainer,
    TokenTrainer,
    arguments,
    llama,
    logged,
    mesh_on,
    mlp_trainer,
    samples,
    texts,
    token_loss,
)
from PIL import Image
from safetensors.numpy import load_file
from sklearn.neighbors import KNeighborsClassifier
from text_trainer_toys import trainer_of

from text_toys import chat_tokenizer
from trainformer.backends.jax.probes import LinearProbe, knn_accuracy
from trainformer.backends.torch.probes import LinearProbe as TorchProbe
from trainformer.callbacks import (
    EMA,
    GradientMonitor,
    ImageSamples,
    LRFinder,
    LRMonitor,
    OnlineKNN,
    OnlineLinear,
    Profiler,
    TextSamples,
    Throughput,
)
from trainformer.checkpoint import export_weights
from trainformer.core.errors import BadArgument, DataError
from trainformer.jax import ImageClassificationTrainer, SFTConfig, SFTTrainer, TrainingArguments
from trainformer.models.jax import DecoderConfig, ViTConfig


class States:
    """Keeps the state after every step, before the next one donates it."""

    def __init__(self):
        self.params, self.variables = [], []

    def on_step_end(self, trainer, step, loss):
        self.params.append(on_host(trainer.model_state.params))
        self.variables.append(on_host(trainer.model_state.variables))


class Features(MeanTrainer):
    """With features and labels."""

    num_classes = CLASSES

    def predict_step(self, model, batch):
        return {"embedding": model.inner(batch["x"]), "label": batch["y"]}


def are_same(state, other):
    """Whether all arrays of two states are equal, bit for bit."""
    return are_equal(jax.tree.leaves(state), jax.tree.leaves(other))


# -- EMA -----------------------------------------------------------------------------------------------------------


def averaged(states, first, decay, start=0, every=1, warmup=False):
    """By hand, in float64."""
    average, updates = jax.tree.map(np.float64, first), 0
    for step, state in enumerate(states, start=1):
        now = decay if not warmup else min(decay, (1 + updates) / (10 + updates))
        if step <= start:
            now = 0.0
        elif step % every:
            continue
        else:
            updates += 1
        average = jax.tree.map(lambda a, b, now=now: now * a + (1 - now) * b, average, state)
    return average


@pytest.mark.parametrize(
    "options",
    [
        {"decay": 0.9, "warmup": False},
        {"decay": 0.5, "start_step": 3, "update_every": 2, "warmup": False},
        {"decay": 0.9, "warmup": True},
    ],
)
def test_the_average_equals_one_by_hand(options):
    ema, states = EMA(**options), States()
    trainer = mlp_trainer(callbacks=[ema, states], mesh=mesh_on((1, 2, 2, 1)), learning_rate=0.1)
    first = on_host(trainer.model_state.params)
    trainer.train()
    names = {"start_step": "start", "update_every": "every"}
    want = averaged(states.params, first, **{names.get(name, name): value for name, value in options.items()})
    assert_close(ema.average.arrays["params"], want, rtol=1e-5, atol=1e-7)
    kernel = trainer.model_state.params["inner"]["kernel"]
    assert ema.average.arrays["params"]["inner"]["kernel"].sharding == kernel.sharding


def test_running_statistics_are_averaged_and_frozen_weights_are_not_kept():
    data = {"x": samples()["x"][:, :1] * np.ones((1, 8), np.float32), "y": samples()["y"]}
    ema, states = EMA(decay=0.8, warmup=False), States()
    trainer = mlp_trainer(
        data=data, model=Noisy(nnx.Rngs(0)), callbacks=[ema, states], frozen_parameters="outer", max_steps=3
    )
    first = on_host(trainer.model_state.variables)
    trainer.train()
    chosen = on_host(ema.average.arrays["variables"])
    assert "outer" not in ema.average.arrays["params"]
    want = averaged(states.variables, first, 0.8)
    assert_close(chosen["norm"]["mean"], want["norm"]["mean"], rtol=1e-5)
    assert_close(ema.model.outer.kernel[...], trainer.model_state.params["outer"]["kernel"])


def test_only_the_chosen_modules_are_averaged():
    ema = EMA(decay=0.9, modules=["outer"])
    trainer = mlp_trainer(callbacks=[ema], max_steps=2)
    trainer.train()
    assert list(ema.average.arrays["params"]) == ["outer"]
    assert np.array_equal(ema.model.inner.kernel[...], trainer.model_state.params["inner"]["kernel"])
    with pytest.raises(BadArgument, match=r"to be parts of the model, received 'outr'\. Did you mean 'outer'"):
        mlp_trainer(callbacks=[EMA(modules=["outr"])])


def test_evaluations_files_and_exports_use_the_average():
    ema = EMA(decay=0.9, compare=True)
    trainer = mlp_trainer(callbacks=[ema], dataset_eval=samples(13, seed=1), eval_steps=8, learning_rate=0.1)
    state = trainer.train()
    record = trainer.state.log_history[-1]
    average = state.replace(params=ema.average.arrays["params"])
    assert trainer.eval()["eval_loss"] == trainer.eval(average)["eval_loss"] == record["val/loss"]
    assert trainer.eval(state)["eval_loss"] == record["val/without_ema/loss"] != record["val/loss"]
    weights = load_file(Path(trainer.save_pretrained("saved")) / "model.safetensors")
    assert np.array_equal(weights["inner/kernel"], ema.average.arrays["params"]["inner"]["kernel"])
    exported = load_file(export_weights("run", "average.safetensors", ema=True))
    assert np.array_equal(exported["outer/bias"], ema.average.arrays["params"]["outer"]["bias"])
    assert are_equal(state.params, trainer.model_state.params)


@pytest.mark.parametrize("save_async", [False, True])
def test_a_failed_run_resumes_with_its_average_bit_for_bit(save_async):
    options = {"save_steps": 3, "save_async": save_async}
    whole, rest = EMA(decay=0.9), EMA(decay=0.9)
    mlp_trainer(callbacks=[whole], output_dir="whole").train()
    with pytest.raises(Crash):
        mlp_trainer(callbacks=[EMA(decay=0.9), CrashAt(at=5)], **options).train()
    mlp_trainer(callbacks=[rest, CrashAt(at=99)], **options).train()
    assert rest.updates == whole.updates == 8
    assert are_equal(rest.average.arrays, whole.average.arrays)


def test_an_average_is_read_on_another_mesh():
    first, second = EMA(decay=0.9), EMA(decay=0.9)
    data = {"x": samples()["x"][:, [0, 1, 2, 3, 4, 5, 0, 1]], "y": samples()["y"]}
    for ema, mesh in ((first, mesh_on((1, 4, 1, 1))), (second, mesh_on((1, 1, 2, 1), 2))):
        trainer = mlp_trainer(data=data, model=Net(nnx.Rngs(0)), callbacks=[ema], mesh=mesh, max_steps=2)
        trainer.train()  # the second run has nothing left to train
        placed, kept = trainer.model_state.params["layers"]["kernel"], ema.average.arrays["params"]["layers"]["kernel"]
        assert placed.sharding == kept.sharding
        assert not kept.sharding.is_fully_replicated
    assert are_equal(second.average.arrays, first.average.arrays)


def test_the_average_of_bf16_weights_is_kept_in_float32():
    ema = EMA(decay=0.9)
    trainer = mlp_trainer(callbacks=[ema], param_dtype="bf16", max_steps=2)
    trainer.train()
    assert {leaf.dtype for leaf in jax.tree.leaves(ema.average.arrays)} == {jnp.dtype("float32")}
    weights = load_file(Path(trainer.save_pretrained("saved")) / "model.safetensors")
    assert str(weights["inner/kernel"].dtype) == "bfloat16"


# -- LRFinder ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dims", [(1, 1, 1, 1), (1, 2, 2, 1)])
def test_a_search_leaves_the_run_as_it_was(dims):
    finder = LRFinder(num_steps=12)
    mesh = mesh_on(dims, int(np.prod(dims)))
    searched = mlp_trainer(callbacks=[finder], output_dir="a", mesh=mesh, max_grad_norm=0.1)
    before, where = on_host(searched.model_state.params), searched.model_state.params["inner"]["kernel"].sharding

    class Begin:
        def on_train_begin(self, trainer):
            assert are_equal(trainer.model_state.params, before)
            assert trainer.model_state.params["inner"]["kernel"].sharding == where

    searched.add_callback(Begin())
    plain = mlp_trainer(output_dir="b", mesh=mesh, max_grad_norm=0.1).train()
    assert are_same(searched.train(), plain)
    assert len(finder.lrs) > 3
    assert searched.context.config["suggested_lr"] == finder.suggested_lr
    assert searched.lr == 1e-2  # it was passed


def test_the_losses_of_a_search_are_those_of_a_loop_by_hand():
    finder = LRFinder(num_steps=10, min_lr=1e-3, max_lr=1.0, smoothing=1.0, divergence_factor=1e9)
    trainer = mlp_trainer(callbacks=[finder], optimizer="sgd", max_grad_norm=0, shuffle=False, max_steps=1)
    graph, params, rest = nnx.split(trainer.model, nnx.Param, ...)
    params = jax.tree.map(jnp.copy, params)  # the run donates its own
    trainer.train()
    momentum, data, found = jax.tree.map(jnp.zeros_like, params), samples(), []
    for step, lr in enumerate(finder.lrs):
        rows = slice(step % 4 * 8, step % 4 * 8 + 8)

        def loss(params, rows=rows):
            logits = nnx.merge(graph, params, rest)(data["x"][rows])
            return optax.softmax_cross_entropy_with_integer_labels(logits, data["y"][rows]).mean()

        value, grads = jax.value_and_grad(loss)(params)
        found.append(float(value))
        momentum = jax.tree.map(lambda m, g: 0.9 * m + g, momentum, grads)
        params = jax.tree.map(lambda p, m, lr=lr: p - lr * m, params, momentum)
    np.testing.assert_allclose(finder.losses, found, rtol=1e-5)


def search(stop=99, folder="run", epochs=2):
    """A run whose learning rate is found."""
    made = TrainingArguments(
        output_dir=folder, save_steps=3, total_batch_size=8, num_train_epochs=epochs, logging_steps=1, log="none"
    )
    finder = LRFinder(num_steps=12, min_lr=1e-4, max_lr=0.5)
    callbacks, mesh = [finder, CrashAt(at=stop)], mesh_on((1, 1, 1, 1), 1)
    return finder, MeanTrainer(made, Mlp(nnx.Rngs(0)), dataset_train=samples(), callbacks=callbacks, mesh=mesh)


def test_a_suggestion_is_used_and_survives_a_failure():
    finder, whole = search(folder="whole")
    whole.train()
    assert whole.lr == finder.suggested_lr
    np.testing.assert_allclose(
        logged(whole, "train/lr"), [finder.suggested_lr * (1 - step / 8) for step in range(8)], rtol=1e-6
    )
    with pytest.raises(Crash):
        search(stop=5)[1].train()
    again, resumed = search()
    resumed.train()
    assert not again.lrs  # it did not search again
    assert resumed.lr == finder.suggested_lr
    assert are_same(resumed.model_state, whole.model_state)


def test_a_longer_run_reports_no_change_of_the_learning_rate(caplog):
    caplog.set_level(logging.INFO, "trainformer")
    finder, first = search()
    first.train()
    _, longer = search(epochs=3)
    caplog.clear()
    longer.train()
    (changes,) = [message for message in caplog.messages if "different from last time" in message]
    assert "lr " not in changes
    config = json.loads((longer.run_folder / "config.json").read_text())
    assert config["lr"]["value"] == finder.suggested_lr


def test_runs_without_a_learning_rate_to_vary_are_refused():
    for options, received in (
        ({"optimizer": optax.sgd(0.1)}, "an optax optimizer with its own"),
        ({"scheduler": lambda step: 0.1}, "a scheduler that is a function"),
    ):
        with pytest.raises(BadArgument, match=f"learning rate follows from learning_rate, for LRFinder.*{received}"):
            mlp_trainer(callbacks=[LRFinder()], **options).train()


def test_step_functions_of_the_user_are_searched_too():
    finder = LRFinder(num_steps=10)
    assert are_same(
        mlp_trainer(StepsTrainer, callbacks=[finder], output_dir="a", max_steps=2).train(),
        mlp_trainer(StepsTrainer, output_dir="b", max_steps=2).train(),
    )
    assert len(finder.lrs) > 3


# -- monitors ------------------------------------------------------------------------------------------------------


def test_gradient_norms_are_those_of_single_layers(caplog):
    """Of a model with stacked layers, whatever the mesh and the micro-batches are."""
    data, found = texts(8), {}
    model = llama(nnx.Rngs(0))

    def loss(model):
        total, weight = token_loss(model, data)
        return total / weight

    grads = nnx.jit(nnx.grad(loss))(model).to_pure_dict()
    parts = []
    for path, grad in jax.tree_util.tree_leaves_with_path(grads):
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        parts += list(grad) if name.startswith("layers/") else [grad]
    norms = [float(jnp.linalg.norm(part)) for part in parts]
    for dims, micro in (((1, 1, 1, 1), 1), ((1, 2, 2, 1), 2)):
        monitor = GradientMonitor(log_every=1, explosion_threshold=1e-6)
        trainer = mlp_trainer(
            TokenTrainer, data, llama(nnx.Rngs(0)), callbacks=[monitor], mesh=mesh_on(dims, int(np.prod(dims))),
            total_batch_size=8, max_steps=1, gradient_accumulation_steps=micro, max_grad_norm=0.01,
            output_dir=f"micro{micro}",
        )  # fmt: skip
        trainer.train()
        found[dims] = trainer.state.log_history[-1]
        assert found[dims]["train/grad_norm_largest_parameter"] == pytest.approx(max(norms), rel=1e-4)
        assert found[dims]["train/grad_norm_max"] == pytest.approx(np.linalg.norm(norms), rel=1e-4)
    assert "the largest gradient in the last one belongs to" in caplog.text


def test_a_monitor_added_later_compiles_the_step_again_and_resumes():
    trainer = mlp_trainer(save_steps=3, logging_steps=100)

    class Later:
        def on_step_end(self, trainer, step, loss):
            if step == 2:
                trainer.add_callback(GradientMonitor(log_every=4))
            if step == 7:
                raise Crash

    trainer.add_callback(Later())
    with pytest.raises(Crash):
        trainer.train()
    again = mlp_trainer(callbacks=[GradientMonitor(log_every=4)], save_steps=3)
    again.train()  # from step 6
    plain = mlp_trainer(output_dir="plain")
    plain.train()
    assert logged(again, "train/grad_norm_max")[-1] == max(logged(plain, "train/grad_norm")[-4:])


def test_gradients_of_a_users_step_are_refused():
    with pytest.raises(BadArgument, match="a step made from compute_loss to compute gradient norms in"):
        mlp_trainer(StepsTrainer, callbacks=[GradientMonitor()])


def test_learning_rates_of_an_optimizer_of_the_user_are_read_from_its_state():
    tx = optax.inject_hyperparams(optax.sgd)(learning_rate=lambda count: 0.1 / (count + 1))
    trainer = mlp_trainer(max_steps=1)
    state = trainer.model_state
    own = MeanTrainer(
        arguments(max_steps=3, output_dir="own"),
        model_state=state.replace(tx=tx, opt_state=tx.init(state.params)),
        dataset_train=samples(),
        callbacks=[LRMonitor()],
        mesh=mesh_on((1, 1, 1, 1), 1),
    )
    own.train()
    np.testing.assert_allclose(logged(own, "train/lr"), [0.1, 0.05, 0.1 / 3], rtol=1e-6)


def test_an_unknown_learning_rate_is_an_error():
    state, tx = mlp_trainer(max_steps=1).model_state, optax.sgd(0.1)
    state = state.replace(tx=tx, opt_state=tx.init(state.params))
    options = {"dataset_train": samples(), "callbacks": [LRMonitor()], "mesh": mesh_on((1, 1, 1, 1), 1)}
    with pytest.raises(BadArgument, match="an optimizer whose learning rate is known, for LRMonitor"):
        MeanTrainer(arguments(max_steps=1), model_state=state, **options).train()


def test_flops_of_stacked_layers_and_micro_batches():
    """Those of the matrix products, however the step is divided."""
    found = []
    for micro in (1, 2):
        meter = Throughput()
        mlp_trainer(
            TokenTrainer, texts(16), llama(nnx.Rngs(0)), callbacks=[meter], max_steps=1,
            gradient_accumulation_steps=micro, optimizer="sgd", output_dir=f"micro{micro}",
        ).train()  # fmt: skip
        found.append(meter.flops_per_sample)
    width, inner, tokens, vocabulary = 32, 64, 7, 64
    layer = 4 * width * width + 3 * width * inner  # weights of attention and MLP
    attention = 2 * tokens * width  # scores and values, per token
    assert found == [6 * tokens * (2 * (layer + attention) + width * vocabulary)] * 2


# -- probes --------------------------------------------------------------------------------------------------------


def test_knn_accuracy_equals_that_of_scikit_learn():
    rng = np.random.default_rng(0)
    centres = rng.standard_normal((5, 12))
    labels, wanted = rng.integers(0, 5, 600), rng.integers(0, 5, 300)
    rows = [(centres[y] + 1.2 * rng.standard_normal((len(y), 12))).astype(np.float32) for y in (labels, wanted)]
    theirs = KNeighborsClassifier(
        7, metric="cosine", weights=lambda distance: np.exp((1 - distance) / 0.1), algorithm="brute"
    ).fit(rows[0], labels * 3)
    gallery = {"embedding": rows[0], "label": labels * 3}
    mine = knn_accuracy({"embedding": rows[1], "label": wanted * 3}, gallery, k=7, temperature=0.1)
    assert mine == theirs.score(rows[1], wanted * 3)
    assert 0.3 < mine < 0.99


def test_online_knn_equals_scikit_learn_on_the_same_features():
    trainer = mlp_trainer(
        Features, samples(50), callbacks=[OnlineKNN(k=5, max_train=31)], mesh=mesh_on((2, 2, 1, 1)),
        dataset_eval=samples(13, seed=1), eval_steps=4, max_steps=4,
    )  # fmt: skip
    trainer.train()
    bank, queries = trainer.embed("train", 31), trainer.embed("val")
    assert len(bank["label"]) == 31
    np.testing.assert_array_equal(queries["label"], samples(13, seed=1)["y"])
    weights = KNeighborsClassifier(5, metric="cosine", weights=lambda d: np.exp((1 - d) / 0.07), algorithm="brute")
    weights.fit(bank["embedding"], bank["label"])
    assert logged(trainer, "val/online_knn") == [weights.score(queries["embedding"], queries["label"])]


def test_the_linear_probe_equals_that_of_torch():
    rng, mine, theirs = (
        np.random.default_rng(0),
        LinearProbe(0.1, 0.9, 0.01, mesh_on((2, 1, 1, 1), 2)),
        TorchProbe(0.1, 0.9, 0.01),
    )
    for _ in range(12):
        features = (3 + 5 * rng.standard_normal((16, 6))).astype(np.float32)
        labels = features[:, :3].argmax(1).astype(np.int32)
        features[5] = np.nan if rng.random() < 0.3 else 1.0
        # Rows of padding, which torch does not have.
        mine.train(np.concatenate([features, features[:4]]), np.concatenate([labels, np.full(4, -1)]), 3)
        theirs.train(torch.tensor(features), torch.tensor(labels), 3)
    np.testing.assert_allclose(mine.classifier["kernel"].T, theirs.classifier[1].weight.detach(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(mine.classifier["mean"], theirs.classifier[0].running_mean, rtol=1e-4)
    np.testing.assert_allclose(mine.classifier["var"], theirs.classifier[0].running_var, rtol=1e-4)
    assert mine.accuracy(features, labels) == theirs.accuracy(torch.tensor(features), torch.tensor(labels))


def test_online_linear_learns_and_resumes_without_affecting_the_run():
    data, options = samples(64), {"dataset_eval": samples(40, seed=1), "eval_steps": 12, "num_train_epochs": 3}
    plain = mlp_trainer(Features, data, output_dir="plain", **options).train()
    whole = OnlineLinear()
    run = mlp_trainer(Features, data, callbacks=[whole], output_dir="whole", **options)
    assert are_same(run.train(), plain)
    assert logged(run, "val/online_linear")[-1] > 0.6
    with pytest.raises(Crash):
        mlp_trainer(Features, data, callbacks=[OnlineLinear(), CrashAt(at=8)], save_steps=5, **options).train()
    rest = OnlineLinear()
    mlp_trainer(Features, data, callbacks=[rest, CrashAt(at=99)], save_steps=5, **options).train()
    assert are_equal(rest.classifier, whole.classifier)


def test_probes_ask_for_what_they_need():
    options = {"dataset_eval": samples(8), "max_steps": 1, "eval_steps": 1}
    with pytest.raises(BadArgument, match="MeanTrainer has no predict_step"):
        mlp_trainer(callbacks=[OnlineKNN()], **options).train()
    with pytest.raises(BadArgument, match="OnlineLinear needs features and labels of each step"):
        mlp_trainer(callbacks=[OnlineLinear()], output_dir="other", **options).train()
    trainer = mlp_trainer(Features, **options)
    with pytest.raises(BadArgument, match=r"the data to embed, received 'test'\. There is train, val"):
        trainer.embed("test")
    with pytest.raises(DataError, match="a dataset with a length and an index"):
        trainer.embed(lambda: iter([]))


# -- samples -------------------------------------------------------------------------------------------------------


def records(kind, folder="run"):
    lines = [json.loads(line) for line in Path(folder, "records.jsonl").read_text().splitlines()]
    return [line for line in lines if line["kind"] == kind]


def test_images_are_recorded_with_true_and_predicted_class():
    channels = 1
    images = np.random.default_rng(0).integers(0, 256, (20, 8, 8, channels), dtype=np.uint8)
    labels = np.arange(20) % 2
    tiny = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    trainer = ImageClassificationTrainer(
        arguments(max_steps=2, eval_steps=2, total_batch_size=8),
        ViTConfig(image_size=8, patch_size=4, num_channels=channels, **tiny),
        dataset_train={"image": images, "label": labels},
        dataset_eval={"image": images[..., 0], "label": labels},
        callbacks=[ImageSamples(n=5), OnlineKNN(k=3), OnlineLinear()],
        mesh=mesh_on((2, 1, 1, 1), 2),
    )
    trainer.train()
    (record,) = records("images")
    places = np.linspace(0, 19, 5).round().astype(int)
    chances = trainer.predict(images[places])
    for shown, place, chance in zip(record["images"], places, chances, strict=True):
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(shown["png"]))))
        assert np.array_equal(pixels.reshape(8, 8, channels), images[place])
        want = f"true {labels[place]}, predicted {chance.argmax()} ({chance.max():.2f})"
        assert shown["caption"] == want
    assert {"val/online_knn", "val/online_linear"} <= trainer.state.log_history[-1].keys()


def test_texts_are_generated_with_the_average(tmp_path):
    tokenizer = chat_tokenizer()
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = DecoderConfig(vocab_size=len(tokenizer), **sizes)
    ema, sampler = EMA(decay=0.5), TextSamples(["one two", "three"], max_new_tokens=3)
    data = [{"text": f"{number} and {number}"} for number in range(8)]
    options = {"processing_class": tokenizer, "eval_dataset": data, "callbacks": [ema, sampler]}
    trainer = trainer_of(SFTTrainer, SFTConfig, config, data, tmp_path, options=options, eval_steps=2)
    state = trainer.train()
    (record,) = records("text", tmp_path / "run")
    with_average = trainer.generate(["one two", "three"], max_new_tokens=3)
    assert [sample["text"] for sample in record["samples"]] == with_average
    averaged = SFTTrainer(
        trainer.arguments.replace(output_dir=str(tmp_path / "other")), processing_class=tokenizer,
        model_state=state.replace(params=jax.tree.map(jnp.copy, ema.average.arrays["params"])), train_dataset=data,
    )  # fmt: skip
    assert averaged.generate(["one two", "three"], max_new_tokens=3) == with_average
    with pytest.raises(BadArgument, match=r"TextSamples do not fit SFTTrainer.generate.*sampling, received 'beams'"):
        trainer.add_callback(TextSamples(["a"], options={"beams": 2}))


@pytest.mark.parametrize(
    ("data", "warning"),
    [
        (None, "OnlineKNN does nothing: .*no validation data"),
        (samples(8), "OnlineKNN has done nothing: .*there was none"),
    ],
)
def test_a_callback_that_waits_for_evaluations_says_that_there_are_none(data, warning, caplog):
    mlp_trainer(callbacks=[OnlineKNN(k=2)], dataset_eval=data).train()
    (record,) = [record for record in caplog.records if record.name == "trainformer" and record.levelname == "WARNING"]
    assert re.match(warning, record.getMessage())


def test_text_samples_need_a_trainer_that_generates():
    with pytest.raises(BadArgument, match=r"a task with generate\(prompts\) for TextSamples, received 'MeanTrainer'"):
        mlp_trainer(callbacks=[TextSamples(["a"])])


# -- profiler ------------------------------------------------------------------------------------------------------


def traces(folder="run"):
    found = Path(folder, "profile").rglob("*.xplane.pb")
    return sorted(path.relative_to(Path(folder, "profile")).parts[0] for path in found)


def test_traces_of_runs_that_end_fail_and_resume(caplog):
    caplog.set_level(logging.INFO, "trainformer")
    with pytest.raises(Crash):
        mlp_trainer(callbacks=[Profiler(steps=(3, 6)), CrashAt(at=5)], save_steps=4).train()
    assert traces() == ["steps_3-6"]
    assert "wrote a trace of steps up to 5, where the run failed; run `xprof --logdir" in caplog.text
    mlp_trainer(callbacks=[Profiler(steps=(3, 6)), CrashAt(at=99)], save_steps=4).train()
    assert traces() == ["steps_3-6", "steps_5-6"]
    mlp_trainer(callbacks=[Profiler(steps=(8, 20))], output_dir="short").train()
    assert traces("short") == ["steps_8-20"]
    mlp_trainer(callbacks=[Profiler()], output_dir="none").train()
    assert "Profiler: the run ended at step 8, before step 10" in caplog.text


@pytest.mark.parametrize("steps", [(0, 3), (5, 4), (1,), 3, ("1", "2"), (True, 2)])
def test_steps_to_trace_are_checked(steps):
    with pytest.raises(BadArgument, match="Profiler's steps to be the first and the last step"):
        Profiler(steps=steps)


# -- remote folders ------------------------------------------------------------------------------------------------


def test_urls_are_refused_and_leave_no_folder():
    trainer = mlp_trainer()
    for make in (
        lambda: mlp_trainer(output_dir="gs://bucket/run"),
        lambda: mlp_trainer(resume="gs://bucket/run"),
        lambda: trainer.save_pretrained("gs://bucket/run"),
        lambda: trainer.train(ckpt_path="gs://bucket/run"),
    ):
        with pytest.raises(BadArgument, match=r"to be a path of this machine, received 'gs:/.*Remote storage"):
            make()
    assert not list(Path().iterdir())
