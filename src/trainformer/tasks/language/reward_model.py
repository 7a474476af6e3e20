"""Reward models: a score for each text or conversation, learned from pairs of answers.

The model is transformers' classifier with one output. The loss is a sum over pairs, so padding and gradient
accumulation do not change it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.adapters.base import unwrap_model
from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import check_count, expected
from trainformer.data.labels import is_stream
from trainformer.data.text.collate import pad
from trainformer.data.text.encode import Encoder
from trainformer.data.text.preferences import (
    SCORED_SCHEMAS,
    RewardEncoder,
    not_scored,
    reward_tokens,
    scored_examples,
)
from trainformer.data.text.records import StandardRecords
from trainformer.data.text.sources import records_of
from trainformer.losses.numerics import upcast
from trainformer.losses.preference import check_weight, reward_model_loss
from trainformer.models.modes import eval_mode
from trainformer.tasks.language.base import TextTask, data_name
from trainformer.tasks.language.preference import check_truncation, pad_pairs


@dataclass(eq=False)
class RewardModel(TextTask):
    """Train a model that scores texts and conversations, so that the chosen of two answers scores higher.

    Records have a `chosen` and a `rejected` answer, with or without a `prompt`, as texts or messages. `margin`, a
    number per record, says by how much the chosen answer should at least score higher. `center_rewards_coefficient`
    keeps the rewards of a pair around zero.

    `model_name` is a hub name, a folder, a config (random weights) or a model, loaded with a head of one output, which
    is new if the model has none. The score is that of the last token before the padding. Answers of more than
    `max_length` tokens are dropped, with `truncation="truncate"` cut. Data to predict for are single texts or
    conversations; `score` takes them directly.
    """

    model_name: Any = "gpt2"
    max_length: int = 1024
    _: KW_ONLY
    center_rewards_coefficient: float | None = None
    truncation: str = "auto"
    prompt_template: str | None = None

    kind = "sequence_classification"
    groups_by_length = True

    def __post_init__(self) -> None:
        self._init_task()
        check_truncation(self.truncation)
        if self.center_rewards_coefficient is not None:
            check_weight("center_rewards_coefficient", self.center_rewards_coefficient)
        if self.model_kwargs.get("num_labels", 1) != 1:
            raise BadArgument(expected("a reward model to have one output", self.model_kwargs["num_labels"]))

    # -- the model -----------------------------------------------------------------------------------------

    def _load(self) -> nn.Module:
        """Load the model with one output, and the padding token in its config: it finds the last token by it."""
        task = copy.copy(self)
        task.__dict__.pop("pretrained", None)  # found for another `model_name`
        if isinstance(self.model_name, str | Path):
            task.model_kwargs = {"num_labels": 1, **self.model_kwargs}
        elif not isinstance(self.model_name, nn.Module):
            task.model_name = copy.deepcopy(self.model_name)
            task.model_name.num_labels = 1
        model: Any = TextTask._load(task)
        config: Any = unwrap_model(model).config
        if config.num_labels != 1:
            do = "Load it with AutoModelForSequenceClassification and num_labels=1, or pass its name."
            raise BadArgument(expected("a model with one output", f"{config.num_labels} outputs", do))
        for inner in {id(c): c for c in (config, config.get_text_config())}.values():
            inner.pad_token_id = self.text_tokenizer.pad_token_id
        return model

    # -- data ----------------------------------------------------------------------------------------------

    def _options(self) -> dict[str, Any]:
        truncation = "drop" if self.truncation == "auto" else self.truncation
        given = {"max_length": self.max_length, "prompt_template": self.prompt_template}
        return {**given, "train_on": "all", "truncation": truncation}

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokenise both answers of each record once (streams: on the fly); to predict, single texts."""
        if not train and not is_stream(dataset):
            records = records_of(dataset, None)
            if not (isinstance(records[0], Mapping) and {"chosen", "rejected"} & records[0].keys()):
                return self._texts(dataset)
        encoder = RewardEncoder(self.text_tokenizer, **self._options())
        return reward_tokens(dataset, encoder, cache_dir=self.cache_dir, name=data_name(train))

    def _texts(self, dataset: Any) -> Any:
        """Tokenised single texts, one for each record."""
        records = StandardRecords(dataset)
        if records.schema.name not in SCORED_SCHEMAS:
            what = "texts, conversations, or prompts with completions to score"
            raise DataError(expected(what, f"records of the schema '{records.schema.name}'"))
        store = self._tokenize(records, Encoder(self.text_tokenizer, **self._options()), train=False)
        if len(store) != len(records):
            raise DataError(not_scored(str(store.report)))
        return store

    def collate_fn(self, examples: list[Any]) -> dict[str, Tensor]:
        pad_id = self.text_tokenizer.pad_token_id
        if "chosen" not in examples[0]:
            batch = pad(examples, pad_id, max_length=self.max_length)
        else:
            batch = pad_pairs(examples, pad_id, self.max_length)
            batch["margin"] = torch.tensor([example["margin"] for example in examples])
        del batch["labels"]
        return batch

    # -- steps ---------------------------------------------------------------------------------------------

    def _rewards(self, batch: Mapping[str, Tensor]) -> Tensor:
        """The score of each row, (B,) or (B, 2) for pairs."""
        ids, mask = batch["input_ids"], batch["attention_mask"]
        # Models with a cache would otherwise fill it.
        options = {"use_cache": False} if hasattr(unwrap_model(self.model).config, "use_cache") else {}
        inputs: dict[str, Any] = {"input_ids": ids.flatten(0, -2), "attention_mask": mask.flatten(0, -2), **options}
        logits = self.model(**inputs).logits
        if logits.ndim != 2 or logits.shape[1] != 1:
            do = "Use a model of AutoModelForSequenceClassification."
            raise BadArgument(expected("a model with one score per text", f"logits {tuple(logits.shape)}", do))
        return upcast(logits).view(ids.shape[:-1])

    def _pair_rewards(self, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        if batch["input_ids"].ndim != 3:
            what = "pairs of answers ('chosen' and 'rejected')"
            raise DataError(expected(what, "single texts", "To score these, call predict()."))
        chosen, rejected = self._rewards(batch).unbind(1)
        return chosen, rejected

    def _losses(self, chosen: Tensor, rejected: Tensor, batch: Mapping[str, Tensor], center: float) -> Tensor:
        return reward_model_loss(chosen, rejected, batch["margin"], center=center, reduction="none")

    def train_step(self, batch: Mapping[str, Tensor]) -> Loss:
        """The loss summed over pairs, with accuracy, margin and mean reward."""
        chosen, rejected = self._pair_rewards(batch)
        losses = self._losses(chosen, rejected, batch, self.center_rewards_coefficient or 0.0)
        metrics = _metrics(chosen.detach(), rejected.detach())
        return Loss(losses.sum(), len(losses), metrics=metrics, per_sample=losses.detach())

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """The loss, and the rewards for their extremes."""
        chosen, rejected = self._pair_rewards(batch)
        losses = self._losses(chosen, rejected, batch, self.center_rewards_coefficient or 0.0)
        rows = {"chosen_reward": chosen, "rejected_reward": rejected}
        return {"loss": (losses.sum(), len(losses)), **_metrics(chosen, rejected), **rows}

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """The lowest and the highest reward."""
        rewards = torch.cat([rows["chosen_reward"], rows["rejected_reward"]])
        return {"min_reward": rewards.min().item(), "max_reward": rewards.max().item()}

    def predict_step(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The `reward` of each text; of pairs, those of both answers and whether the chosen one scores higher."""
        rewards = self._rewards(batch)
        if rewards.ndim == 1:
            return {"reward": rewards}
        chosen, rejected = rewards.unbind(1)
        return {"chosen_reward": chosen, "rejected_reward": rejected, "correct": chosen > rejected}

    @torch.no_grad()
    def score(self, inputs: Any, batch_size: int = 32) -> list[float]:
        """The reward of each input: a text, a conversation (a list of messages), or a record; or a list of them.

        >>> from transformers import LlamaConfig
        >>> from trainformer.data import train_tokenizer
        >>> sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
        >>> tokenizer = train_tokenizer(["a good answer"], vocabulary=270)
        >>> task = RewardModel(LlamaConfig(vocab_size=300, **sizes), tokenizer=tokenizer)
        >>> len(task.score(["a good answer", "a bad answer"]))
        2
        """
        check_count("batch_size", batch_size)
        examples = scored_examples(inputs, Encoder(self.text_tokenizer, **self._options()))
        order = sorted(range(len(examples)), key=lambda i: len(examples[i]["input_ids"]))  # less padding
        found: list[float] = []
        with eval_mode(self.model):
            for batch in self._batches([examples[i] for i in order], batch_size):
                found += self._rewards(batch).tolist()
        scores = dict(zip(order, found, strict=True))
        return [scores[i] for i in range(len(examples))]

    def check_batch(self, batch: Any) -> list[str]:
        return [] if batch["input_ids"].ndim == 3 else ["The batch has single texts instead of pairs of answers."]


def _metrics(chosen: Tensor, rejected: Tensor) -> dict[str, Any]:
    pairs = len(chosen)
    return {
        "accuracy": ((chosen > rejected).sum(), pairs),
        "margin": ((chosen - rejected).sum(), pairs),
        "mean_reward": (chosen.sum() + rejected.sum(), 2 * pairs),
    }
