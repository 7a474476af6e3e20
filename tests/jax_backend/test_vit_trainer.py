"""Image classification on JAX: it learns, accepts images in many forms, and saves folders for transformers."""

import json
from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from flax import nnx
from text_trainer_toys import QUIET, devices
from transformers import AutoModelForImageClassification

from trainformer.core.errors import BadArgument, DataError
from trainformer.data.builtin import builtin_arrays
from trainformer.data.collate import stack_samples
from trainformer.data.split import split_dataset
from trainformer.jax import ImageClassificationTrainer, TrainingArguments
from trainformer.models.jax import ViTConfig

TINY = ViTConfig(
    hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4, image_size=8, patch_size=2,
    num_channels=1, initializer_range=0.2,
)  # fmt: skip


class Dropping(nnx.Module):
    """A user-defined network with dropout."""

    def __init__(self, rngs):
        self.drop = nnx.Dropout(0.5, rngs=rngs)
        self.out = nnx.Linear(64, 10, rngs=rngs)

    def __call__(self, images):
        return self.out(self.drop(images.reshape(images.shape[0], -1)))


def dropping(rngs):
    return Dropping(rngs)


def trainer_of(data, model=TINY, dims=(1, 1, 1, 1), held_out=None, options=None, **fields):
    defaults = {"total_batch_size": 64, "eval_batch_size": 8, "learning_rate": 3e-3, "max_steps": 2}
    arguments = TrainingArguments(**{**QUIET, **defaults, **fields})
    given = {"dataset_train": data, "dataset_eval": held_out, "mesh": devices(dims), **(options or {})}
    return ImageClassificationTrainer(arguments, model, **given)


@pytest.fixture(scope="module")
def digits():
    found = builtin_arrays("digits").arrays
    return found["image"][:, 0], found["label"]


@pytest.mark.slow
def test_a_tiny_vit_learns_digits():
    train, held_out = split_dataset(builtin_arrays("digits"), 0.2, seed=0)
    fields = {"max_steps": -1, "num_train_epochs": 5, "eval_batch_size": 64, "scheduler": "cosine"}
    trainer = trainer_of(train, held_out=held_out, options={"label_smoothing": 0.1}, **fields)
    trainer.train()
    assert trainer.eval()["eval_accuracy"] > 0.9


def test_images_in_all_forms_are_normalised_the_same(digits):
    images, labels = digits[0][:11], digits[1][:11]
    scaled = ((images[..., None] / 255.0 - 0.25) / 0.5).astype(np.float32)
    trainer = trainer_of("digits", dropping, options={"mean": 0.25, "std": [0.5]})
    forms = [
        {"image": images, "label": labels},
        (images[:, None], labels),
        [{"img": image, "labels": int(label)} for image, label in zip(images, labels, strict=True)],
        list(zip(images[..., None], labels, strict=True)),
        {"pixel_values": scaled, "label": labels},
    ]
    for form in forms:
        data = trainer.prepare_dataset(form, False)
        batch = stack_samples([data[i] for i in range(len(data))])
        np.testing.assert_allclose(trainer.normalize(batch["image"]), scaled, atol=1e-6)
        assert batch["label"].tolist() == labels.tolist()
    assert trainer.num_classes == 10


def test_losses_match_numpy_and_label_smoothing_applies_to_training_only(digits):
    data = {"image": digits[0][:11], "label": digits[1][:11]}
    seen = []

    class Recorder:
        def on_step_end(self, trainer, step, loss):
            seen.append(float(loss))

    options = {"label_smoothing": 0.3, "callbacks": [Recorder()], "num_classes": 10}
    # Eleven images in batches of 16 and 8: padding rows do not count.
    trainer = trainer_of(data, held_out=data, max_steps=1, total_batch_size=16, options=options)
    found, probabilities = trainer.eval(), trainer.predict(data["image"])
    logs, picked = np.log(probabilities), np.log(probabilities[np.arange(11), data["label"]])
    assert found["eval_loss"] == pytest.approx(-picked.mean(), abs=1e-5)
    assert found["eval_accuracy"] == pytest.approx((logs.argmax(-1) == data["label"]).mean(), abs=1e-6)
    trainer.train()
    assert seen == [pytest.approx(-(0.7 * picked + 0.3 * logs.mean(-1)).mean(), abs=1e-5)]


@pytest.mark.slow
def test_a_trained_vit_opens_in_transformers_and_can_be_trained_with_other_classes(digits, tmp_path):
    images = np.repeat(digits[0][..., None], 3, -1)
    config = ViTConfig(
        hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4
    )
    trainer = trainer_of({"image": images, "label": digits[1]}, config)
    assert trainer.num_classes == 10
    start = jax.tree.map(np.array, trainer.model_state.params)
    state = trainer.train()
    assert not np.array_equal(start["classifier"]["kernel"], state.params["classifier"]["kernel"])
    folder = Path(trainer.save_pretrained(tmp_path / "saved"))
    model = AutoModelForImageClassification.from_pretrained(folder)
    recipe = json.loads((folder / "preprocessor_config.json").read_text())
    pixels = (images[:5] * recipe["rescale_factor"] - recipe["image_mean"]) / recipe["image_std"]
    with torch.no_grad():
        wanted = model(torch.tensor(pixels.transpose(0, 3, 1, 2), dtype=torch.float32)).logits.softmax(-1).numpy()
    np.testing.assert_allclose(trainer.predict(images[:5]), wanted, atol=1e-5)
    fewer = trainer_of({"image": images[:64], "label": digits[1][:64] % 3}, folder)
    assert fewer.predict(images[:2]).shape == (2, 3)
    kept, old = fewer.model_state.params["patches"]["kernel"], state.params["patches"]["kernel"]
    np.testing.assert_array_equal(kept, old)


def test_any_network_can_be_trained_and_dropout_is_off_in_evaluation(digits):
    data = {"image": digits[0][:256], "label": digits[1][:256]}
    fields = {"max_steps": 60, "learning_rate": 0.02, "eval_batch_size": 64}
    trainer = trainer_of(data, dropping, held_out=data, **fields)
    assert trainer.eval() == trainer.eval()
    trainer.train()
    assert trainer.eval()["eval_accuracy"] > 0.9


def test_invalid_images_and_labels_are_refused(digits, tmp_path):
    images, labels = digits[0][:16], digits[1][:16]
    with pytest.raises(DataError, match="integer labels"):
        trainer_of({"image": images, "label": labels / 2})
    with pytest.raises(DataError, match="labels from 0 to 9"):
        trainer_of("digits", held_out={"image": images, "label": labels + 5})
    with pytest.raises(DataError, match="'image' and a 'label'"):
        trainer_of({"picture": images, "label": labels})
    with pytest.raises(DataError, match="Expected images"):
        trainer_of(tmp_path)
    with pytest.raises(BadArgument, match="Did you mean"):
        trainer_of("digit")
    with pytest.raises(BadArgument, match="square images"):
        trainer_of({"image": images[:, :6], "label": labels}, None)
    with pytest.raises(BadArgument, match="label_smoothing"):
        trainer_of("digits", options={"label_smoothing": 1.0})
    trainer = trainer_of("digits", lambda rngs: nnx.Conv(1, 4, (8, 8), padding="VALID", rngs=rngs))
    with pytest.raises(BadArgument, match=r"logits \(rows, 10\) from Conv"):
        trainer.train()
