"""`Seq2SeqTrainer`: a `Trainer` that evaluates with generated texts."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.hf.outputs import PredictionOutput
from trainformer.hf.trainer import Trainer


class Seq2SeqTrainer(Trainer):
    """A `Trainer` for models that generate. With ``predict_with_generate``, predictions are generated tokens.

    Options of `generate` come from, in order of precedence: the arguments of `evaluate` and `predict`, those of
    `prediction_step`, ``generation_max_length`` and ``generation_num_beams``, and the generation config of the model,
    which ``generation_config`` replaces.

    >>> import tempfile, torch
    >>> from transformers import T5Config, T5ForConditionalGeneration
    >>> from trainformer.hf import Seq2SeqTrainingArguments
    >>> sizes = {"d_model": 8, "d_ff": 8, "d_kv": 4, "num_layers": 1, "num_heads": 2, "decoder_start_token_id": 0}
    >>> model = T5ForConditionalGeneration(T5Config(vocab_size=16, **sizes))
    >>> data = [{"input_ids": torch.tensor([3, 4, 1]), "labels": torch.tensor([5, 1])} for _ in range(4)]
    >>> args = Seq2SeqTrainingArguments(tempfile.mkdtemp(), predict_with_generate=True, use_cpu=True)
    >>> Seq2SeqTrainer(model, args).predict(data, max_length=6).predictions.shape  # padded to the limit of the model
    (4, 20)
    """

    _gen_kwargs: dict[str, Any] | None = None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        wanted = getattr(self.args, "generation_config", None)
        if wanted is not None:
            model: Any = self.make_model()
            model.generation_config = self.load_generation_config(wanted)

    @staticmethod
    def load_generation_config(gen_config_arg: Any) -> Any:
        """A `GenerationConfig` from one, from a folder, from a file, or from the name of a model."""
        generation = require("transformers", "hf", "for generation_config")
        if isinstance(gen_config_arg, generation.GenerationConfig):
            config = copy.deepcopy(gen_config_arg)
        else:
            path = Path(gen_config_arg)
            where = (str(path.parent), path.name) if path.is_file() else (str(gen_config_arg),)
            config = generation.GenerationConfig.from_pretrained(*where)
        try:
            config.validate(strict=True)
        except ValueError as error:
            do = "Correct it: a model with such a config cannot be saved."
            raise BadArgument(expected("a valid generation_config", f"one with problems: {error}", do)) from error
        return config

    def evaluate(
        self,
        eval_dataset: Any = None,
        ignore_keys: Any = None,
        metric_key_prefix: str = "eval",
        **gen_kwargs: Any,
    ) -> dict[str, Any]:
        """Evaluate; `gen_kwargs` are options of `generate`, such as `max_length` and `num_beams`."""
        self._gen_kwargs = self._with_defaults(gen_kwargs)
        return super().evaluate(eval_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def predict(
        self, test_dataset: Any, ignore_keys: Any = None, metric_key_prefix: str = "test", **gen_kwargs: Any
    ) -> PredictionOutput:
        """Predictions for a dataset; `gen_kwargs` are options of `generate`."""
        self._gen_kwargs = self._with_defaults(gen_kwargs)
        return super().predict(test_dataset, ignore_keys=ignore_keys, metric_key_prefix=metric_key_prefix)

    def _with_defaults(self, options: dict[str, Any]) -> dict[str, Any]:
        """Options of `generate`, with those of the arguments where they are not given."""
        options, args = dict(options), self.args
        length = getattr(args, "generation_max_length", None)
        if options.get("max_length") is None and options.get("max_new_tokens") is None and length is not None:
            options["max_length"] = length
        beams = getattr(args, "generation_num_beams", None)
        if options.get("num_beams") is None and beams is not None:
            options["num_beams"] = beams
        return options

    def prediction_step(
        self,
        model: nn.Module,
        inputs: Any,
        prediction_loss_only: bool,
        ignore_keys: Any = None,
        **gen_kwargs: Any,
    ) -> tuple[Any, Any, Any]:
        """Loss, generated tokens and labels of a batch; without ``predict_with_generate``, logits as in `Trainer`."""
        if not getattr(self.args, "predict_with_generate", False) or prediction_loss_only:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys=ignore_keys)
        inputs = self._prepare_inputs(inputs)
        options = gen_kwargs or self._gen_kwargs or self._with_defaults({})
        options = {name: value for name, value in options.items() if value is not None}
        tokens = self._generate(model, inputs, options)
        loss, labels = super().prediction_step(model, inputs, True)[0], inputs.get("labels")
        limits = self._generation_limits(model)
        return loss, self._padded(tokens, *limits), None if labels is None else self._padded(labels, *limits)

    def _generate(self, model: Any, inputs: Any, options: dict[str, Any]) -> Tensor:
        given = dict(inputs)
        labels, decoder = given.get("labels"), given.get("decoder_input_ids")
        if labels is not None and decoder is not None and labels.shape == decoder.shape:
            # Made from the labels by the collator: generation would continue the labels.
            given = {n: v for n, v in given.items() if n not in ("decoder_input_ids", "decoder_attention_mask")}
        inner = self.accelerator.unwrap_model(model) if hasattr(model, "module") else model
        with torch.no_grad():
            return inner.generate(**given, **options)

    def _generation_limits(self, model: Any) -> tuple[int, int | None]:
        """`max_length` and `max_new_tokens` of the generation config; without a limit, 20 from now on, as in HF."""
        config = getattr(model, "module", model).generation_config
        if config.max_length is None:
            config.max_length = 20
        return config.max_length, config.max_new_tokens

    def _padded(self, tokens: Tensor, max_length: int, max_new_tokens: int | None) -> Tensor:
        """Tokens padded to the length limit of the generation config, so that batches have one length."""
        if tokens.shape[-1] < max_length:
            return self._pad_tensors_to_max_len(tokens, max_length)
        if max_new_tokens is not None and tokens.shape[-1] < max_new_tokens + 1:
            return self._pad_tensors_to_max_len(tokens, max_new_tokens + 1)
        return tokens

    def _pad_tensors_to_max_len(self, tensor: Tensor, max_length: int) -> Tensor:
        """Tokens padded to a length with the pad token (or else the eos token) of the tokenizer, or of the model."""
        source = self.processing_class if hasattr(self.processing_class, "pad_token_id") else None
        pad = getattr(source, "pad_token_id", None)
        if pad is None:
            pad = getattr(source, "eos_token_id", None)
        if pad is None:
            pad = getattr(getattr(self.model, "config", None), "pad_token_id", None)
        if pad is None:
            do = "Set pad_token_id in the config of the model."
            raise BadArgument(expected("a pad token to pad generated tokens with", "none", do))
        padded = torch.full((tensor.shape[0], max_length), pad, dtype=tensor.dtype, device=tensor.device)
        padded[:, : tensor.shape[-1]] = tensor
        return padded
