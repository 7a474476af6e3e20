"""Masked language models (BERT and others). The masks are drawn in `data.text.masking`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from typing import Any

from torch import Tensor

from trainformer.core import BadArgument
from trainformer.core.errors import expected
from trainformer.data.text.masking import WordEncoder, masked_dataset
from trainformer.losses.tokens import TokenLoss, token_cross_entropy
from trainformer.tasks.language.base import TextTask, TokenPredictionTask, standard_records


@dataclass(eq=False)
class MaskedLM(TokenPredictionTask, TextTask):
    """Train a masked language model of transformers (BERT, RoBERTa, DistilBERT, ...), pretrained or from scratch.

    `model_name` is a hub name, a folder, a config (random weights) or a model; `tokenizer` defaults to the one of
    `model_name`. Data is plain text; texts of more than `max_length` tokens are split, and each piece gets the
    tokenizer's special tokens.

    The model predicts a fraction `mask_prob` of the tokens (with `whole_word`, of the words), at least one per piece:
    80 % of them are masked, 10 % replaced by random tokens, and 10 % unchanged. Special tokens are never selected.
    Each epoch draws new masks. Evaluations always use the same masks, whatever the seed, so runs are comparable.
    Evaluation reports loss, accuracy and perplexity of the selected tokens.
    """

    model_name: Any = "bert-base-uncased"
    max_length: int = 512
    _: KW_ONLY
    mask_prob: float = 0.15
    whole_word: bool = False

    kind = "masked_lm"
    groups_by_length = True

    def __post_init__(self) -> None:
        self._init_task()
        if not 0 < self.mask_prob < 1:
            raise BadArgument(expected("mask_prob between 0 and 1", self.mask_prob, "0.15 is usual."))

    # -- data ----------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokenise once, mask each time a sample is read."""
        encoder = WordEncoder(self.text_tokenizer, self.max_length, whole_word=self.whole_word)
        store = self._tokenize(standard_records(dataset), encoder, train)
        return masked_dataset(store, self.text_tokenizer, self.mask_prob, fixed=not train)

    # -- steps ---------------------------------------------------------------------------------------------

    def _loss(self, batch: Mapping[str, Tensor], **options: Any) -> TokenLoss:
        # Compute all logits although one in seven is used: selecting them would synchronise with the device.
        logits = self.model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits
        return token_cross_entropy(logits, batch["labels"], shift=False, **options)
