"""`Trainer`: for models that compute their own loss, and for causal language models on tokenised data."""

from __future__ import annotations

import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any

from flax import nnx

from trainformer.core.errors import BadArgument, expected
from trainformer.core.types import Loss, Mean
from trainformer.data.text.encode import Encoder
from trainformer.data.text.prepare import causal_tokens
from trainformer.jax.text_trainer import TextTrainer


class Trainer(TextTrainer):
    """Trains a model on its own loss: ``model.compute_loss(**batch)``, or a causal language model on tokens.

    `compute_loss` returns a scalar, a scalar and a dict of metrics, a `Loss`, or (as in EasyDeL) a pair of an object
    with the attribute `loss` and metrics. The batches of such a model are the stacked samples. The data of a language
    model of `trainformer.models.jax` are records with `input_ids` (and `labels`), or anything else that `SFTTrainer`
    takes.

    >>> import jax.numpy as jnp
    >>> from trainformer.jax import TrainingArguments
    >>> class Line(nnx.Module):
    ...     def __init__(self):
    ...         self.weight = nnx.Param(jnp.zeros(()))
    ...     def compute_loss(self, x, y):
    ...         return jnp.mean((self.weight[...] * x - y) ** 2)
    >>> arguments = TrainingArguments(
    ...     num_train_epochs=20, learning_rate=0.1, total_batch_size=8, weight_decay=0.0, log="none", output_dir="own"
    ... )
    >>> x = jnp.linspace(-1, 1, 32)
    >>> trainer = Trainer(arguments, model=Line(), dataset_train={"x": x, "y": 3 * x})
    >>> round(float(trainer.train().model.weight[...]), 1)
    3.0
    """

    not_causal = ()  # a model may compute its own loss

    def _inspect_model(self, model: Any) -> None:
        super()._inspect_model(model)
        self.masks_padding = self._is_decoder

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokens for a language model; any other model gets the samples as they are."""
        if not self._is_decoder:
            return dataset
        packing = self.arguments.packing
        tokens = causal_tokens(dataset, self.encoder(Encoder, "auto"), packing=packing, **self.token_options(train))
        return tokens if packing else self.update_batch_length(tokens)

    def create_collect_function(self, *args: Any, **kwargs: Any) -> Any:
        return self.collect_tokens if self._is_decoder else super().create_collect_function(*args, **kwargs)

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Any:
        return self.token_loss(model, batch, key) if self._is_decoder else _own_loss(model, batch)

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss | Any:
        return self.token_loss(model, batch) if self._is_decoder else _own_loss(model, batch)


def _own_loss(model: Any, batch: Mapping[str, Any]) -> Any:
    if not hasattr(model, "compute_loss"):
        do = "Define compute_loss(**batch) there, or derive from BaseTrainer and define the loss in the trainer."
        raise BadArgument(expected("a language model, or one that computes its loss", type(model).__name__, do))
    try:
        inspect.signature(model.compute_loss).bind(**batch)
    except TypeError as error:
        what = f"{type(model).__name__}.compute_loss to take the columns of the batch ({error})"
        do = "Rename its arguments or the columns; ids_to_pop_from_dataset drops columns, **kwargs takes any."
        raise BadArgument(expected(what, list(batch), do)) from error
    output = model.compute_loss(**batch)
    if not isinstance(output, tuple) or isinstance(output, (Loss, Mean)):
        return getattr(output, "loss", output)
    if len(output) != 2 or not hasattr(output[0], "loss"):
        return output  # the step checks it
    loss, metrics = output[0].loss, output[1]
    if dataclasses.is_dataclass(metrics):
        metrics = vars(metrics)
    if not isinstance(metrics, Mapping):
        return loss, metrics
    return loss, {name: value for name, value in metrics.items() if name != "loss" and value is not None}
