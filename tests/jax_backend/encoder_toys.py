"""Small encoders and encoder-decoders of transformers with random weights, and their logits and gradients."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import torch
import torch.nn.functional as F
import transformers as hf
from flax import nnx

from trainformer.models.jax.families.family import family_of
from trainformer.models.jax.huggingface import flat_paths

VOCABULARY = 64
_SIZES = {"vocab_size": VOCABULARY, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
_BERT = {**_SIZES, "num_attention_heads": 4, "max_position_embeddings": 24, "layer_norm_eps": 1e-3}
_DISTIL = {"vocab_size": VOCABULARY, "dim": 32, "hidden_dim": 48, "n_layers": 2, "n_heads": 4}
_T5 = {"vocab_size": VOCABULARY, "d_model": 32, "d_kv": 6, "d_ff": 48, "num_layers": 2, "num_heads": 4}


def encoder(name: str, **options: Any) -> Any:
    """A model with random weights: a family and the suffix of a class, as in "bert MaskedLM"."""
    family, kind = name.split()
    configs = {
        "bert": lambda: hf.BertConfig(**{**_BERT, "hidden_act": "gelu_new", "type_vocab_size": 3, **options}),
        "roberta": lambda: hf.RobertaConfig(**{**_BERT, "type_vocab_size": 1, "pad_token_id": 3, **options}),
        "distilbert": lambda: hf.DistilBertConfig(**{**_DISTIL, "max_position_embeddings": 20, **options}),
    }
    prefix = {"bert": "Bert", "roberta": "Roberta", "distilbert": "DistilBert"}[family]
    return randomised(getattr(hf, f"{prefix}For{kind}")(configs[family]()))


def t5(kind: str = "t5", **options: Any) -> Any:
    """An encoder-decoder with random weights and decoders of another depth than encoders."""
    given = {**_T5, "num_decoder_layers": 3, "relative_attention_num_buckets": 8, "decoder_start_token_id": 0}
    config, model = {"t5": ("T5Config", "T5"), "mt5": ("MT5Config", "MT5")}[kind]
    made = getattr(hf, config)(**{**given, "relative_attention_max_distance": 10, **options})
    return randomised(getattr(hf, f"{model}ForConditionalGeneration")(made))


def randomised(model: Any) -> Any:
    """No bias is left zero, and no norm one."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.normal_(0.0, 0.2, generator=generator).add_(1.0 if "norm" in name.lower() else 0.0)
    return model.eval()


def saved(model: Any, folder: Path) -> Any:
    model.save_pretrained(folder)
    return model


def batch(rows: int = 4, length: int = 12, seed: int = 0) -> dict[str, np.ndarray]:
    """Tokens with padding on the right, of rows of different lengths."""
    ids = np.random.default_rng(seed).integers(4, VOCABULARY, (rows, length)).astype(np.int32)
    mask = (np.arange(length) < np.linspace(length, 3, rows).astype(int)[:, None]).astype(np.int32)
    return {"input_ids": np.where(mask == 1, ids, 3).astype(np.int32), "attention_mask": mask}


def torch_loss(model: Any, inputs: dict[str, np.ndarray], labels: np.ndarray) -> tuple[np.ndarray, Any]:
    """Logits of transformers, and the mean cross-entropy over the labels that are not -100."""
    given = {name: torch.as_tensor(value).long() for name, value in inputs.items()}
    logits = model(**given).logits
    target = torch.as_tensor(labels).long()
    return logits, F.cross_entropy(logits.reshape(-1, logits.shape[-1]), target.reshape(-1))


def torch_gradients(model: Any, loss: Any, config: Any) -> dict[str, np.ndarray]:
    """The gradients of a model of transformers, by our paths."""
    model.zero_grad()
    loss.backward()
    named = {name: weight.grad for name, weight in model.named_parameters()}
    found = {}
    for weight in family_of(config.model_type).weights(config):
        count = weight.layers or config.num_hidden_layers
        names = [weight.name.format(number) for number in range(count)] if weight.stacked else [weight.name]
        arrays = [weight.from_hf(named[name].numpy()) for name in names]
        found[weight.path] = np.stack(arrays) if weight.stacked else arrays[0]
    return found


def gradients(model: Any, inputs: dict[str, Any], labels: Any) -> tuple[np.ndarray, float, dict[str, np.ndarray]]:
    """Logits, the same loss, and gradients by path of one of our models."""
    graph, params = nnx.split(model)
    (loss, logits), grads = _gradients(graph, params, inputs, labels)
    return (
        np.asarray(logits),
        float(loss),
        {path: np.asarray(x) for path, x in flat_paths(grads.to_pure_dict()).items()},
    )


@partial(jax.jit, static_argnums=0)
def _gradients(graph: Any, params: Any, inputs: dict[str, jax.Array], labels: jax.Array) -> Any:
    def loss(params: Any) -> Any:
        logits = nnx.merge(graph, params)(**inputs)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, jnp.maximum(labels, 0))
        return jnp.sum(jnp.where(labels >= 0, losses, 0.0)) / jnp.sum(labels >= 0), logits

    return jax.value_and_grad(loss, has_aux=True)(params)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference of two arrays, relative to the largest value of the second."""
    return float(np.abs(np.asarray(a) - np.asarray(b)).max() / np.abs(np.asarray(b)).max())
