"""Causal language models: pretraining on text, and fine-tuning on prompts and conversations.

Tokenisation is in `data.text`, the loss in `losses.tokens`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

import torch
from torch import Tensor

from trainformer.core import BadArgument, Loss
from trainformer.data.text.collate import collate_packed
from trainformer.data.text.encode import IGNORE_INDEX, Encoder
from trainformer.data.text.prepare import causal_tokens
from trainformer.data.text.tokenizer import token_bytes
from trainformer.losses.tokens import TokenLoss
from trainformer.models.language import OutputStates
from trainformer.models.modes import eval_mode
from trainformer.tasks.language.base import GenerationMixin, TokenPredictionTask, data_name
from trainformer.tasks.language.router import RouterLossMixin

# No attention mask: padding is on the right, where no token of a causal model attends, and has no labels. With a mask,
# transformers synchronises in each step to see whether anything is masked, and does not use the fastest kernels.
INPUTS = ("input_ids", "position_ids")
_PACKING_TOLERANCE = 1e-3  # between packed and unpacked logits: other kernels, other summation order


@dataclass(eq=False)
class CausalLM(RouterLossMixin, GenerationMixin, TokenPredictionTask):
    """Train a causal language model of transformers (GPT, Llama, Mistral, Qwen, ...), pretrained or from scratch.

    `model_name` is a hub name, a folder, a config (random weights) or a model; `tokenizer` defaults to the one of
    `model_name`. Data is plain text, prompts with completions, Alpaca records or conversations, in files, folders, HF
    `datasets` or lists; see `trainformer.data.text`. `train_on` selects the supervised tokens: `"auto"` means all
    tokens of a text, the completion of a prompt, and the assistant turns of a conversation.

    `packing` fills sequences of `max_length` with whole documents that do not attend to each other. The loss computes
    logits in chunks of `chunk_tokens`, so the logits of a whole batch are never in memory; `0` turns chunking off.
    """

    model_name: Any = "gpt2"
    max_length: int = 2048
    _: KW_ONLY
    train_on: str = "auto"
    truncation: str = "auto"
    packing: bool = False
    prompt_template: str | None = None
    chunk_tokens: int | None = None
    z_loss: float = 0.0
    label_smoothing: float = 0.0

    kind = "causal_lm"
    groups_by_length = True
    shifted = True

    def __post_init__(self) -> None:
        self._init_task()
        self._token_bytes: Tensor | None = None
        self._states = OutputStates(self.chunk_tokens)

    def configure(self, info: Any) -> None:
        """Load the model, and check that it supports packing if requested."""
        super().configure(info)
        if self.packing:
            self._check_packing()

    # -- data ----------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokenise once (streams: on the fly), and pack training data if requested."""
        encoder = Encoder(
            self.text_tokenizer,
            max_length=self.max_length,
            train_on=self.train_on,
            truncation=self.truncation,
            prompt_template=self.prompt_template,
        )
        packing = train and self.packing
        return causal_tokens(dataset, encoder, packing=packing, cache_dir=self.cache_dir, name=data_name(train))

    def collate_fn(self, examples: list[Any]) -> dict[str, Tensor]:
        if "position_ids" in examples[0]:
            return collate_packed(examples, self.text_tokenizer.pad_token_id, length=self.max_length)
        return super().collate_fn(examples)

    # -- steps ---------------------------------------------------------------------------------------------

    def train_step(self, batch: Mapping[str, Tensor]) -> Loss:
        """Cross-entropy, summed over the supervised tokens; with the router loss of a mixture of experts."""
        with self._noisy(batch):
            loss = super().train_step(batch)
        return self._with_router_loss(loss, batch)

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Loss, accuracy, and bits per byte of text, which is comparable across vocabularies."""
        loss = self._loss(batch)
        self._evaluate_router(batch)
        return {**self._metrics(loss), **self._bits_per_byte(batch["labels"], loss.sum)}

    def _bits_per_byte(self, labels: Tensor, loss: Tensor) -> dict[str, Any]:
        """From the summed loss of the supervised tokens."""
        labels = labels[..., 1:]
        if self._token_bytes is None or self._token_bytes.device != labels.device:
            self._token_bytes = torch.from_numpy(token_bytes(self.text_tokenizer)).to(labels.device)
        size = torch.where(labels == IGNORE_INDEX, 0, self._token_bytes[labels.clamp(min=0)]).sum()
        return {"bits_per_byte": (loss / math.log(2), size)}

    def _training_options(self) -> dict[str, Any]:
        return {**super()._training_options(), "z_loss": self.z_loss}

    def _loss(self, batch: Mapping[str, Tensor], **options: Any) -> TokenLoss:
        inputs = {name: batch[name] for name in INPUTS if name in batch}
        return self._causal_loss(self._states, inputs, batch["labels"], **options)

    # -- checks --------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _check_packing(self) -> None:
        """Raise if documents packed into one sequence attend to each other in this model."""
        model: Any = self.model
        device = next(model.parameters()).device
        rows = model.get_input_embeddings().weight.shape[0]
        generator = torch.Generator().manual_seed(0)
        first, second = (torch.randint(0, rows, (1, size), generator=generator).to(device) for size in (5, 7))
        together = torch.cat([first, second], dim=1)
        positions = torch.cat([torch.arange(5), torch.arange(7)])[None].to(device)
        with eval_mode(model):
            packed = model(input_ids=together, position_ids=positions, use_cache=False).logits[:, 5:]
            alone = model(input_ids=second, use_cache=False).logits
        difference = (packed.float() - alone.float()).abs().max().item()
        if not difference < _PACKING_TOLERANCE * max(1.0, alone.float().abs().max().item()):
            raise BadArgument(
                f"Expected a model that keeps packed documents apart, received {type(model).__name__}, in which they "
                f"attend to each other (logits differ by {difference:.2g}). Pass packing=False, or attention='sdpa'."
            )
