"""NEFTune: uniform noise on the input embeddings in training (Jain et al. 2023).

The noise of a token is at most alpha / sqrt(length x width). `hf` draws it from torch's generator and takes the padded
length, as transformers does. Tasks announce their rows (`EmbeddingNoise.rows`): then the length is that of the document
without padding, as in the paper, and the noise is a function of seed, step and tokens, so that neither padding nor
gradient accumulation nor the number of processes change it, and a resumed run draws the same.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

_GOLDEN = -0x61C8864680B583EB  # of splitmix64, as signed 64-bit numbers
_FACTORS = -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15


class _Rows(NamedTuple):
    keys: Tensor  # (B,)
    lengths: Tensor  # (B, T): of the document of each token; 0 at padding
    in_eval: bool


class EmbeddingNoise:
    """A forward hook for an embedding layer.

    >>> layer = nn.Embedding(10, 4)
    >>> hook = layer.register_forward_hook(EmbeddingNoise(alpha=5.0))
    >>> ids = torch.tensor([[1, 2]])
    >>> bool((layer(ids) != layer.weight[ids]).any()), torch.equal(layer.eval()(ids), layer.weight[ids])
    (True, True)
    """

    def __init__(self, alpha: float, seed: int = 0) -> None:
        self.alpha = alpha
        self.seed = seed
        self.step = 0
        self._rows: _Rows | None = None

    @contextmanager
    def rows(self, input_ids: Tensor, lengths: Tensor, in_eval: bool = False) -> Iterator[None]:
        """Announce the rows of the next forward pass, with the length of each token's document (0 at padding).

        With `in_eval` they get the same noise in eval mode.
        """
        self._rows = _Rows(self._keys(input_ids, lengths > 0), lengths, in_eval)
        try:
            yield
        finally:
            self._rows = None

    def _keys(self, ids: Tensor, real: Tensor) -> Tensor:
        """A number for each row, from its tokens, the step and the seed."""
        places = torch.arange(1, ids.shape[1] + 1, device=ids.device)
        found = torch.where(real, _mix(ids + places * _GOLDEN), 0).sum(1)
        return _mix(_mix(found + _wrapped(self.seed * _GOLDEN)) + _wrapped(self.step * _GOLDEN))

    def __call__(self, module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
        rows = self._rows
        if not module.training and (rows is None or not rows.in_eval):
            return output
        width = output.shape[-1]
        if rows is None:
            most = self.alpha / (output.shape[1] * width) ** 0.5
            return output + torch.zeros_like(output).uniform_(-most, most)
        return output + self._draw(rows, width).to(output.dtype)

    @torch.compiler.disable  # inductor on the CPU gave NaN with dynamic shapes (torch 2.13, a mixture of experts)
    def _draw(self, rows: _Rows, width: int) -> Tensor:
        # Row by row: the integers take 8 bytes for each element.
        noise = torch.stack([_uniform(key, rows.lengths.shape[1], width) for key in rows.keys])
        most = torch.where(rows.lengths > 0, self.alpha / (rows.lengths.clamp(min=1) * width).sqrt(), 0.0)
        return noise * most.unsqueeze(-1)


def document_lengths(batch: Any) -> Tensor:
    """The length of the document of each token, 0 at padding, for padded and for packed batches.

    >>> document_lengths({"attention_mask": torch.tensor([[1, 1, 0]])}).tolist()
    [[2, 2, 0]]
    >>> packed = {"position_ids": torch.tensor([[0, 1, 0, 0]]), "labels": torch.tensor([[-100, 5, 6, -100]])}
    >>> document_lengths(packed).tolist()
    [[2, 2, 1, 0]]
    """
    if "position_ids" not in batch:
        mask = real_tokens(batch)
        return mask.sum(-1, keepdim=True) * mask
    documents = (batch["position_ids"] == 0).cumsum(-1)
    sizes = torch.zeros_like(documents).scatter_add(-1, documents - 1, torch.ones_like(documents))
    return sizes.gather(-1, documents - 1) * real_tokens(batch)


def real_tokens(batch: Any) -> Tensor:
    """Which tokens are no padding, as 0 and 1. In a packed row, padding is the last document, without any label.

    >>> real_tokens({"attention_mask": torch.tensor([[1, 1, 0]])}).tolist()
    [[1, 1, 0]]
    """
    if "position_ids" not in batch:
        return batch["attention_mask"] if "attention_mask" in batch else torch.ones_like(batch["input_ids"])
    documents = (batch["position_ids"] == 0).cumsum(-1)
    last = documents == documents[..., -1:]
    is_labelled = ((batch["labels"] != -100) & last).any(-1, keepdim=True)
    return (~last | is_labelled).long()


def input_embeddings(model: nn.Module) -> nn.Module | None:
    """The layer that embeds input tokens, if the model names one."""
    get: Any = getattr(model, "get_input_embeddings", None)
    try:
        found = get() if callable(get) else None
    except NotImplementedError:  # transformers' models without tokens
        return None
    return found if isinstance(found, nn.Module) else None


def _mix(z: Tensor) -> Tensor:
    """The finaliser of splitmix64."""
    z = (z ^ _shifted(z, 30)) * _FACTORS[0]
    z = (z ^ _shifted(z, 27)) * _FACTORS[1]
    return z ^ _shifted(z, 31)


def _wrapped(number: int) -> int:
    """As a signed 64-bit number."""
    return (number + 2**63) % 2**64 - 2**63


def _shifted(z: Tensor, bits: int) -> Tensor:
    return (z >> bits) & ((1 << (64 - bits)) - 1)  # without the sign


def _uniform(key: Tensor, length: int, width: int) -> Tensor:
    """Uniform numbers from -1 to 1; that of a position and dimension does not depend on length or width."""
    places = _mix(key + torch.arange(1, length + 1, device=key.device) * _GOLDEN)
    bits = _mix(places.unsqueeze(1) + torch.arange(1, width + 1, device=key.device) * _GOLDEN)
    return (_shifted(bits, 40).float() + 0.5) * 2.0**-23 - 1.0
