"""Reward models on JAX: a score for each text or conversation, learned from pairs of answers.

The loss is a (sum, weight) over pairs, so that padding and gradient accumulation do not change it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from trainformer.backends.jax.step import EvalOutput
from trainformer.core.errors import BadArgument, DataError, check_count, expected
from trainformer.core.types import Loss
from trainformer.data.ids import sample_ids
from trainformer.data.text.collate import pair_batch, token_batch
from trainformer.data.text.encode import Encoder
from trainformer.data.text.preferences import RewardEncoder, not_scored, reward_tokens, scored_examples
from trainformer.data.text.sources import records_of
from trainformer.jax.preference import AnswerArguments
from trainformer.jax.text_arguments import LoRAConfig, TextArguments, refuse_values
from trainformer.jax.text_trainer import TextTrainer, valid_rows
from trainformer.losses.jax.preference import reward_model_loss
from trainformer.models.jax.decoder import Decoder, DecoderConfig
from trainformer.models.jax.families.family import SCORED
from trainformer.models.jax.huggingface import check_family, find_folder, read_model_config
from trainformer.models.jax.reward import RewardModel, last_tokens, scored

_HEAD = "score"
_PAIR = {"chosen", "rejected"}


@dataclass(kw_only=True)
class RewardConfig(AnswerArguments):
    """Arguments of `RewardTrainer`."""

    center_rewards_coefficient: float | None = None  # keeps the rewards of a pair around zero

    def check(self) -> None:
        super().check()
        refuse_values(self, "A reward model scores texts and writes none: leave it out.", generation_interval=(None,))
        if self.center_rewards_coefficient is not None:
            self._weight("center_rewards_coefficient")


class RewardTrainer(TextTrainer):
    """Trains a model that scores texts and conversations, so that the chosen of two answers scores higher.

    Records have a `chosen` and a `rejected` answer, with or without a `prompt`, as texts or messages. `margin`, a
    number per record, says by how much the chosen answer should at least score higher. Answers of more than
    `max_sequence_length` tokens are dropped, with ``truncation="truncate"`` cut.

    `model` is the folder of a decoder, with or without a head of one output (it is new if there is none), a
    `DecoderConfig`, or a `RewardModel`. The score is that of the last token before the padding. Models are saved as
    transformers' ``...ForSequenceClassification`` with one label. With `lora` the head is trained in full.
    """

    arguments_type: ClassVar[type[TextArguments]] = RewardConfig
    masks_padding = True

    def __init__(self, arguments: Any, model: Any = None, processing_class: Any = None, **options: Any) -> None:
        lora = LoRAConfig.parse(options.get("lora"))
        if lora is not None and lora.folder is None and not lora.modules_to_save:
            options["lora"] = replace(lora, modules_to_save=(_HEAD,))
        super().__init__(arguments, model, processing_class, **options)

    # -- the model ---------------------------------------------------------------------------------------------

    @property
    def pad_id(self) -> int:
        """The padding token, else EOS: the score is that of the rightmost other token, as in transformers."""
        text = self.text
        found = None if text is None else text.eos_token_id if text.pad_token_id is None else text.pad_token_id
        if found is None:
            what = "a tokenizer (processing_class) with a padding or an end-of-text token"
            raise BadArgument(expected(what, None if text is None else "one with neither"))
        return int(found)

    def build_decoder(self, config: DecoderConfig) -> Callable[[nnx.Rngs], Decoder]:
        config = scored(config, self.pad_id)
        check_family(config)
        return lambda rngs: RewardModel(config, rngs=rngs)

    def read_folder(self, folder: str | Path, **options: Any) -> nnx.Module:
        path = find_folder(folder)
        kind = read_model_config(path, scored=True)[1].model_type
        if not kind.endswith(SCORED):
            raise BadArgument(expected(f"the folder of a decoder for {type(self).__name__}", kind))
        model: Any = super().read_folder(path, **{"num_labels": 1, "seed": self.arguments.seed, **options})
        if isinstance(model, RewardModel):
            model.config = scored(model.config, self.pad_id)
        return model

    def _inspect_model(self, model: Any) -> None:
        shape = model if isinstance(model, nnx.Module) else nnx.eval_shape(lambda: model(nnx.Rngs(0)))
        if not isinstance(shape, RewardModel):
            do = "Pass its folder, or open it with load_model(folder, num_labels=1)."
            raise BadArgument(expected("a reward model, or the folder of a decoder", type(shape).__name__, do))
        super()._inspect_model(model)

    # -- data --------------------------------------------------------------------------------------------------

    def _encoder(self, kind: Callable[..., Encoder]) -> Any:
        truncation = "drop" if self.arguments.truncation == "auto" else self.arguments.truncation
        template = self.arguments.prompt_template
        given: dict[str, Any] = {"max_length": self.max_length, "prompt_template": template}
        return kind(self.text, train_on="all", truncation=truncation, **given)

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Both answers of each record, tokenised once; on the fly for a stream."""
        tokens = reward_tokens(dataset, self._encoder(RewardEncoder), **self.token_options(train))
        return self.update_batch_length(tokens)

    def create_collect_function(self, *args: Any, **kwargs: Any) -> Callable[[list[Any]], Any]:
        """Pairs (rows, 2, length), the chosen answer first, with their margins."""

        def collate(samples: list[Any]) -> dict[str, np.ndarray]:
            batch = self.check_token_ids(pair_batch(samples, self.batch_length, self.pad_id))
            batch["margin"] = np.array([sample["margin"] for sample in samples], np.float32)
            del batch["labels"]
            return batch

        return collate

    # -- steps -------------------------------------------------------------------------------------------------

    def _rewards(self, model: Any, ids: jax.Array, key: Any = None) -> tuple[jax.Array, jax.Array]:
        """The scores of the chosen and of the rejected answers, from one forward pass."""
        flat = ids.reshape(-1, ids.shape[-1])
        rewards = model(flat, last_tokens(flat, self.pad_id), deterministic=key is None, key=key).reshape(-1, 2)
        return rewards[:, 0], rewards[:, 1]

    def _loss(self, chosen: jax.Array, rejected: jax.Array, batch: Mapping[str, Any]) -> Loss:
        center = self.arguments.center_rewards_coefficient or 0.0
        valid = valid_rows(batch)
        losses, weight = reward_model_loss(chosen, rejected, batch["margin"], center=center) * valid, jnp.sum(valid)
        metrics = {
            "accuracy": (jnp.sum((chosen > rejected) * valid), weight),
            "margin": (jnp.sum((chosen - rejected) * valid), weight),
            "mean_reward": (jnp.sum((chosen + rejected) * valid), 2 * weight),
        }
        return Loss(jnp.sum(losses), weight, metrics, (losses, valid))

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Loss:
        key = None if self.arguments.disable_dropout else key
        return self._loss(*self._rewards(model, batch["input_ids"], key), batch)

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> EvalOutput:
        """The loss, and the rewards for their extremes."""
        chosen, rejected = self._rewards(model, batch["input_ids"])
        rows = {"chosen_reward": chosen, "rejected_reward": rejected}
        return EvalOutput(self._loss(chosen, rejected, batch), rows)

    def summarize_rows(self, rows: dict[str, Any]) -> dict[str, float]:
        """The lowest and the highest reward."""
        rewards = np.concatenate([rows["chosen_reward"], rows["rejected_reward"]])
        return {"min_reward": float(rewards.min()), "max_reward": float(rewards.max())}

    # -- use ---------------------------------------------------------------------------------------------------

    def score(self, inputs: Any, batch_size: int = 32) -> list[float]:
        """The reward of each input: a text, a conversation (a list of messages), or a record; or a list of them."""
        check_count("batch_size", batch_size)
        return self._scored(scored_examples(inputs, self._encoder(Encoder)), batch_size)

    def predicted_columns(self, data: Any, batch_size: int | None = None, **options: Any) -> Iterator[dict[str, Any]]:
        """The `reward` of texts, conversations and prompts with completions.

        Of records with a `chosen` and a `rejected` answer, those of both and whether the chosen one scores higher
        (`correct`). `data` is the path of a file or a list.
        """
        self.no_options(options)
        check_count("batch_size", batch_size or 1)
        records, size = records_of(data, None), batch_size or self.evaluation_batch_size
        ids, has_pairs = sample_ids(records), isinstance(records[0], Mapping) and _PAIR & records[0].keys()
        if has_pairs:
            pairs: Any = reward_tokens(records, self._encoder(RewardEncoder), **self.token_options(False))
            if len(pairs) != len(records):
                raise DataError(not_scored(f"{len(records) - len(pairs)} records"))
            examples = [pairs[i][part] for i in range(len(pairs)) for part in ("chosen", "rejected")]
            rewards = np.array(self._scored(examples, 2 * size)).reshape(-1, 2)
        else:
            listed = [records[i] for i in range(len(records))]
            rewards = np.array(self._scored(scored_examples(listed, self._encoder(Encoder)), size))
        for first in range(0, len(rewards), size):
            part = rewards[first : first + size]
            index = list(range(first, first + len(part)))
            columns = {"reward": part}
            if has_pairs:
                better = part[:, 0] > part[:, 1]
                columns = {"chosen_reward": part[:, 0], "rejected_reward": part[:, 1], "correct": better}
            yield {"index": index, "id": [next(ids) for _ in index], **columns}

    def _scored(self, examples: Sequence[Any], batch_size: int) -> list[float]:
        """The rewards of tokenised texts."""
        order = sorted(range(len(examples)), key=lambda i: len(examples[i]["input_ids"]))  # less padding
        found: dict[int, float] = {}
        with self.eval_mode():
            graph, state = nnx.split(self.model_state.model)
            for begin in range(0, len(order), batch_size):
                places = order[begin : begin + batch_size]
                rows = [examples[i] for i in places]
                length = self.padded_length(len(rows[-1]["input_ids"]), self.max_length)
                rows += [rows[-1]] * (batch_size - len(rows))  # batches of few shapes
                ids = self.check_token_ids(token_batch(rows, length, self.pad_id))["input_ids"]
                values = np.asarray(_scores(graph, state, jnp.asarray(ids), self.pad_id))
                found |= dict(zip(places, values.tolist(), strict=False))
        return [found[i] for i in range(len(examples))]


@partial(jax.jit, static_argnums=(0, 3))
def _scores(graph: Any, state: Any, ids: jax.Array, pad_id: int) -> jax.Array:
    return nnx.merge(graph, state)(ids, last_tokens(ids, pad_id))
