"""Masked language modelling on JAX: BERT, RoBERTa and DistilBERT, pretrained or from scratch.

Masks are drawn in `data.text.masking` when a text is read; the model is in `models.jax.bert`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

from flax import nnx

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.types import Loss
from trainformer.data.labels import is_stream
from trainformer.data.text.masking import WordEncoder, masked_dataset
from trainformer.data.text.packing import PackedDataset
from trainformer.data.text.prepare import has_tokens
from trainformer.data.text.records import StandardRecords, TextDataset
from trainformer.data.text.sources import load_text
from trainformer.data.text.store import tokenize
from trainformer.jax.text_arguments import TextArguments, refuse_values
from trainformer.jax.text_trainer import TextTrainer, build_model, perplexity, valid_labels
from trainformer.losses.jax.tokens import RowSums, row_sums
from trainformer.models.jax.bert import Bert, BertConfig
from trainformer.models.jax.huggingface import check_family

_INPUTS = ("attention_mask", "position_ids", "segment_ids")


@dataclass(kw_only=True)
class MaskedLMConfig(TextArguments):
    """Arguments of `MaskedLMTrainer`.

    `mask_prob` is the share of the tokens that are predicted, or with `whole_word` of the words.

    >>> MaskedLMConfig(output_dir="run", mask_prob=0.3).mask_prob
    0.3
    """

    dataset_text_field: str | None = "text"  # None: "text"
    eval_packing: bool | None = None  # None: as packing
    mask_prob: float = 0.15
    whole_word: bool = False

    def check(self) -> None:
        super().check()
        self.dataset_text_field = self.dataset_text_field or "text"
        self._number("mask_prob", lambda v: 0 < v < 1, "between 0 and 1, such as 0.15")
        do = "Masked language models are trained on texts, which are split where they are too long."
        refuse_values(self, do, prompt_template=(None,), train_on_inputs=(None,), truncation=("auto", "split"))


class MaskedLMTrainer(TextTrainer):
    """Trains a masked language model on texts.

    `model` is the folder (or hub name) of a BERT, RoBERTa or DistilBERT, with any head, a `BertConfig` for random
    weights, a `Bert`, or a function that builds one. The tokenizer needs a mask token. Data are those of `SFTTrainer`
    with a ``text``, or tokens (`input_ids`); texts of more than `max_sequence_length` tokens are split, and each piece
    gets the tokenizer's special tokens.

    At least one token of each piece is predicted: 80 % of the chosen tokens are masked, 10 % replaced by random tokens,
    and 10 % unchanged. Special tokens are never chosen. Each epoch draws new masks, by (seed, epoch, sample);
    evaluations always use the same. With `packing`, several texts share a row and do not attend to each other.

    Evaluation computes loss, accuracy and perplexity of the chosen tokens.

    >>> from tokenizers import Tokenizer, models, pre_tokenizers
    >>> from transformers import PreTrainedTokenizerFast
    >>> words = {word: number for number, word in enumerate(["[PAD]", "[MASK]", "[UNK]", "a", "b", "c"])}
    >>> plain = Tokenizer(models.WordLevel(words, unk_token="[UNK]"))
    >>> plain.pre_tokenizer = pre_tokenizers.Whitespace()
    >>> tokenizer = PreTrainedTokenizerFast(tokenizer_object=plain, mask_token="[MASK]", pad_token="[PAD]")
    >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    >>> config = BertConfig(vocab_size=6, **sizes)
    >>> arguments = MaskedLMConfig(max_steps=1, log="none", output_dir="masked", total_batch_size=8)
    >>> trainer = MaskedLMTrainer(arguments, config, tokenizer, train_dataset=["a b c a b c"] * 8)
    >>> int(trainer.train().step)
    1
    """

    arguments_type: ClassVar[type[TextArguments]] = MaskedLMConfig
    masks_padding = True
    model_types = (Bert,)
    packable = (Bert,)

    def load_model(self, model: Any) -> Any:
        if isinstance(model, BertConfig):
            config = replace(model, head="masked_lm", num_labels=2, label_names=None)
            check_family(config)
            model = partial(build_model, config)
        return super().load_model(model)

    def read_folder(self, folder: str | Path, **options: Any) -> nnx.Module:
        return super().read_folder(folder, head="masked_lm", **options)

    def _inspect_model(self, model: Any) -> None:
        super()._inspect_model(model)
        if self.model_config.head != "masked_lm":
            do = "Build it with head='masked_lm', or pass its folder."
            raise BadArgument(expected("a masked language model", f"head={self.model_config.head!r}", do))

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokenised once, masked each time a text is read; packed into full rows with `packing`."""
        arguments = self.arguments
        if self.text is None:
            raise BadArgument(expected("a tokenizer (processing_class) with a mask token", None))
        data = load_text(dataset) if isinstance(dataset, (str, Path)) else dataset
        if is_stream(data):
            do = "Pass a list of the first records, or the files."
            raise DataError(expected("texts with a length", type(data).__name__, do))
        if arguments.dataset_text_field != "text":
            data = TextDataset(data, arguments.dataset_text_field)
        encoder = WordEncoder(self.text, self.max_length, whole_word=arguments.whole_word)
        records: Any = data if has_tokens(data) else StandardRecords(data)
        store = tokenize(records, encoder, **self.token_options(train))
        masked = masked_dataset(store, self.text, arguments.mask_prob, fixed=not train)
        if arguments.packing if train or arguments.eval_packing is None else arguments.eval_packing:
            return PackedDataset(masked, self.max_length, causal=False)
        return self.update_batch_length(masked)

    def create_collect_function(self, *args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
        """`collect_tokens`: texts were split when they were tokenised."""
        return self.collect_tokens

    def token_sums(self, model: Any, batch: Mapping[str, Any], key: Any = None, **options: Any) -> RowSums:
        """Loss, chosen tokens and correct predictions of each row. With a key, dropout is active."""
        inputs, labels = {name: batch[name] for name in _INPUTS if name in batch}, valid_labels(batch)
        states = model.hidden_states(batch["input_ids"], **inputs, deterministic=key is None, key=key)
        return row_sums(states, labels, model.head, chunks=self._chunks(labels.shape), shift=False, **options)

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        return self.token_sums(model, batch, key).total()

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        """Loss and accuracy without dropout."""
        return self.token_sums(model, batch).total()

    def predicted_columns(self, data: Any, batch_size: int | None = None, **options: Any) -> Iterator[dict[str, Any]]:
        """Nothing: a masked language model fills gaps, which data do not mark."""
        do = "Evaluate it, train a classifier from its folder, or export it for transformers' fill-mask."
        raise BadArgument(expected("a trainer that predicts", f"{type(self).__name__}, which fills masked tokens", do))

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Perplexity, from the mean loss over all chosen tokens of the dataset."""
        return perplexity(metrics)
