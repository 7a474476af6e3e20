"""Text embeddings for semantic search and similarity.

The losses are in `losses.contrastive`, the metrics in `eval`. Checkpoints open with transformers and with
sentence-transformers.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trainformer.adapters.base import unwrap_model
from trainformer.core import BadArgument, DataError, Loss
from trainformer.core.errors import check_choice, expected
from trainformer.data.text.sources import records_of
from trainformer.eval.classification import pearson, spearman
from trainformer.eval.retrieval import ranking_metrics, retrieval_metrics
from trainformer.losses.contrastive import TextKeys, cosine_similarity_loss, multiple_negatives_loss
from trainformer.losses.metric_learning import make_pair_loss
from trainformer.losses.numerics import check_positive, l2_normalize, no_autocast, upcast
from trainformer.models.modes import eval_mode
from trainformer.tasks.language.base import TextTask
from trainformer.tasks.language.embedding_data import EmbeddingDataset, EmbeddingEncoder, Roles, collate, infer_roles

LOSSES = ("auto", "multiple_negatives", "cosine", "supcon")
POOLINGS = {"mean": "mean", "cls": "cls", "max": "max", "last": "lasttoken"}  # sentence-transformers' names


@dataclass(eq=False)
class TextEmbedding(TextTask):
    """Train text embeddings with a transformers encoder (BERT, MPNet, ...) or decoder (Qwen, ...).

    `model_name` is a hub name, a folder, a config (random weights) or a model; `tokenizer` defaults to the one of
    `model_name`. Records are pairs (`anchor` and `positive`, `query` and `passage`, `sentence1` and `sentence2`, ...),
    optionally with `negative` texts; pairs with a `score` from -1 to 1; or texts with a `label`. `loss="auto"` selects
    `"multiple_negatives"`, `"cosine"` or `"supcon"`, respectively.

    With multiple negatives, the positives of the whole batch (of all ranks) are negatives for each other anchor, so
    larger batches are better. Equal texts are not negatives of each other. `symmetric` adds the loss from positives to
    anchors. `matryoshka_dims` trains prefixes of the embedding with these lengths.

    `pooling` is `"mean"`, `"cls"`, `"max"` or `"last"` (for decoders). `query_prompt` is prepended to anchors,
    `passage_prompt` to all other texts.
    """

    model_name: Any = "sentence-transformers/all-MiniLM-L6-v2"
    max_length: int = 256
    _: KW_ONLY
    pooling: str = "mean"
    normalize: bool = True
    loss: str = "auto"
    temperature: float = 0.05
    symmetric: bool = False
    query_prompt: str = ""
    passage_prompt: str = ""
    matryoshka_dims: Sequence[int] | None = None
    recall_at: tuple[int, ...] = (1, 5, 10)

    kind = "embedding"
    groups_by_length = False  # batches of similar length would have other negatives than random ones

    def __post_init__(self) -> None:
        self._init_task()
        check_choice("pooling", self.pooling, POOLINGS)
        check_choice("loss", self.loss, LOSSES)
        check_positive("temperature", self.temperature, "0.05 is usual.")
        dims = self.matryoshka_dims
        if dims is not None and (not dims or any(not isinstance(d, int) or d < 1 for d in dims)):
            raise BadArgument(expected("matryoshka_dims to be positive whole numbers", dims, "Pass [256, 128, 64]."))

    # -- the model -----------------------------------------------------------------------------------------

    def _load(self) -> nn.Module:
        model = super()._load()
        inner: Any = unwrap_model(model)
        config = getattr(inner, "config", None)
        if getattr(config, "is_encoder_decoder", False):
            do = "Use an encoder or a decoder."
            raise BadArgument(expected("an encoder-only or decoder-only model", type(inner).__name__, do))
        width = getattr(getattr(config, "get_text_config", lambda: config)(), "hidden_size", None)
        if self.matryoshka_dims is not None and width is not None and max(self.matryoshka_dims) > width:
            raise BadArgument(expected(f"matryoshka_dims of at most {width}, the width", list(self.matryoshka_dims)))
        pooler = getattr(inner, "pooler", None)
        if isinstance(pooler, nn.Module):  # unused: it would never receive gradients
            pooler.requires_grad_(False)
        return model

    def training_defaults(self, settings: Any, chosen: Collection[str]) -> dict[str, Any]:
        """Never split a batch when out of memory: its texts are each other's negatives."""
        defaults = {**super().training_defaults(settings, chosen), "oom": "raise"}
        if self.loss == "supcon" and not {"monitor_metric", "monitor_mode"} & set(chosen):
            defaults |= {"monitor_metric": "val/map@r", "monitor_mode": "max"}
        return defaults

    # -- data ----------------------------------------------------------------------------------------------

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """Tokenise all texts of each record once."""
        records = records_of(dataset, None)
        roles = self._check_roles(infer_roles(records[0], self.loss), train)
        prompts = self.query_prompt, self.passage_prompt
        encoder = EmbeddingEncoder(self.text_tokenizer, self.max_length, roles, prompts, labelled=train)
        return EmbeddingDataset(self._tokenize(encoder.needed(records), encoder, train), roles)

    def _check_roles(self, roles: Roles, train: bool) -> Roles:
        """Check that training records fit the loss; evaluation and prediction accept any."""
        loss = roles.loss if self.loss == "auto" else self.loss
        fits = {
            "multiple_negatives": len(roles.texts) > 1,
            "cosine": len(roles.texts) == 2 and roles.target is not None,
            "supcon": len(roles.texts) == 1 and roles.target is not None,
        }
        if train and not fits[loss]:
            needed = {
                "multiple_negatives": "pairs of texts (anchor and positive)",
                "cosine": "two texts and a score (sentence1, sentence2, score)",
                "supcon": "a text and a label",
            }
            raise DataError(expected(f"records of {needed[loss]} for loss={loss!r}", [*roles.texts, roles.target]))
        return roles._replace(loss=loss if fits[loss] else "none")

    def collate_fn(self, examples: list[Any]) -> dict[str, Tensor]:
        return collate(examples, self.text_tokenizer.pad_token_id, self.max_length)

    # -- steps ---------------------------------------------------------------------------------------------

    def _embed_role(self, batch: Mapping[str, Tensor], role: str = "") -> Tensor:
        """Embeddings of one role: (B, D), or (B, N, D) for negatives. In float32, not normalised."""
        ids, mask = batch[f"{role}input_ids"], batch[f"{role}attention_mask"]
        hidden = self.model(input_ids=ids.flatten(0, -2), attention_mask=mask.flatten(0, -2)).last_hidden_state
        return pool(hidden, mask.flatten(0, -2), self.pooling).unflatten(0, ids.shape[:-1])

    def _widths(self, embeddings: Tensor) -> list[int]:
        return [embeddings.shape[-1]] if self.matryoshka_dims is None else list(self.matryoshka_dims)

    def _normalize(self, embeddings: Tensor) -> Tensor:
        return l2_normalize(embeddings) if self.normalize else embeddings

    def train_step(self, batch: Mapping[str, Tensor]) -> Loss:
        """The loss, summed over anchors (and over `matryoshka_dims`)."""
        anchors = self._embed_role(batch)
        if "labels" in batch:
            labels = batch["labels"]
            means = [self._supcon(anchors[:, :width], labels) for width in self._widths(anchors)]
            return Loss(torch.stack(means).sum() * len(labels), len(labels))
        positives = self._embed_role(batch, "positive_")
        negatives = self._embed_role(batch, "negative_") if "negative_input_ids" in batch else None
        total = torch.zeros((), device=anchors.device)
        for width in self._widths(anchors):
            first, second = anchors[:, :width], positives[:, :width]
            if "scores" in batch:
                total = total + cosine_similarity_loss(first, second, batch["scores"], reduction="sum")
            else:
                total = total + multiple_negatives_loss(
                    first,
                    second,
                    None if negatives is None else negatives[..., :width],
                    keys=TextKeys(batch["key"], batch["positive_key"], batch.get("negative_key")),
                    temperature=self.temperature,
                    symmetric=self.symmetric,
                    reduction="sum",
                )
        return Loss(total, len(anchors))

    @cached_property
    def _supcon(self) -> nn.Module:
        return make_pair_loss("supcon", temperature=self.temperature)

    def eval_step(self, batch: Mapping[str, Tensor]) -> dict[str, Any]:
        """Embeddings for the dataset-level metrics."""
        rows: dict[str, Any] = {"embedding": self._normalize(self._embed_role(batch)), "key": batch["key"]}
        if "positive_input_ids" in batch:
            positives = self._embed_role(batch, "positive_")
            rows |= {"positive": self._normalize(positives), "positive_key": batch["positive_key"]}
        if "scores" in batch:
            losses = cosine_similarity_loss(rows["embedding"], rows["positive"], batch["scores"], reduction="sum")
            rows |= {"loss": (losses, len(batch["scores"])), "score": batch["scores"]}
        return rows | ({"label": batch["labels"]} if "labels" in batch else {})

    def on_eval_end(self, rows: dict[str, Any]) -> Mapping[str, float]:
        """Retrieval metrics over all distinct texts, or correlations of cosines with scores."""
        if "label" in rows:
            return retrieval_metrics(rows["embedding"].float(), rows["label"], recall_at=self.recall_at)
        if "positive" not in rows:
            raise DataError(expected("pairs of texts, or texts with labels, to evaluate on", "single texts"))
        if "score" in rows:
            cosines = (l2_normalize(rows["embedding"]) * l2_normalize(rows["positive"])).sum(1)
            return {
                "pearson": pearson(cosines, rows["score"]).item(),
                "spearman": spearman(cosines, rows["score"]).item(),
            }
        queries, query = distinct(rows["key"])
        passages, passage = distinct(rows["positive_key"])
        return ranking_metrics(
            rows["embedding"][queries],
            rows["positive"][passages],
            torch.stack([query, passage], dim=1),
            recall_at=self.recall_at,
            temperature=self.temperature,
        )

    def predict_step(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Embeddings of the (first) texts, and labels if the data has them."""
        rows = {"embedding": self._normalize(self._embed_role(batch))}
        return rows | ({"label": batch["labels"]} if "labels" in batch else {})

    # -- inference -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def embed(self, texts: Any, *, prompt: str = "", dim: int | None = None, batch_size: int = 32) -> Tensor:
        """Return embeddings (N, D) on the CPU. `prompt` is prepended to each text; `dim` truncates the embeddings."""
        several = [texts] if isinstance(texts, str) else list(texts)
        if not several:
            raise BadArgument(expected("at least one text", texts))
        roles = Roles(("text",), None, "none")
        encoder = EmbeddingEncoder(self.text_tokenizer, self.max_length, roles, (prompt, prompt), labelled=False)
        items = [roles.split_item(encoder.encode({"text": text})[0]._asdict()) for text in several]
        order = sorted(range(len(items)), key=lambda place: -len(items[place]["input_ids"]))  # less padding
        with eval_mode(self.model):
            batches = self._batches([items[place] for place in order], batch_size)
            found = [self._embed_role(batch).cpu() for batch in batches]
        rows = torch.cat(found)[torch.tensor(order).argsort(), :dim]
        return self._normalize(rows)

    def similarity(self, queries: Any, passages: Any) -> Tensor:
        """Return cosine similarities (Q, P) of queries and passages, with their prompts."""
        sides = (queries, self.query_prompt), (passages, self.passage_prompt)
        first, second = (l2_normalize(self.embed(texts, prompt=prompt)) for texts, prompt in sides)
        return first @ second.T

    # -- checks and assets ---------------------------------------------------------------------------------

    def check_batch(self, batch: Any) -> list[str]:
        if "positive_key" not in batch or "scores" in batch:
            return []
        if len(batch["key"]) == 1:
            return ["A batch of one pair has no negatives: pass a larger batch_size."]
        if bool((batch["positive_key"] == batch["positive_key"][0]).all()):
            return ["All positives of the batch are the same text: there are no negatives."]
        return []

    def save_assets(self, folder: Path) -> list[str]:
        """Write the files for `from_pretrained`, and those for `SentenceTransformer` (pooling, prompts)."""
        names = super().save_assets(folder)
        kinds = ["Transformer", "Pooling", *(["Normalize"] if self.normalize else [])]
        paths = ["", *(f"{place}_{kind}" for place, kind in enumerate(kinds) if place)]
        modules = [
            {"idx": place, "name": str(place), "path": path, "type": f"sentence_transformers.models.{kind}"}
            for place, (kind, path) in enumerate(zip(kinds, paths, strict=True))
        ]
        config: Any = unwrap_model(self.model).config
        modes = {f"pooling_mode_{mode}": mode.startswith(POOLINGS[self.pooling]) for mode in _MODES}
        files = {
            "modules.json": modules,
            "sentence_bert_config.json": {"max_seq_length": self.max_length, "do_lower_case": False},
            "config_sentence_transformers.json": {
                "prompts": {"query": self.query_prompt, "document": self.passage_prompt},
                "default_prompt_name": None,
                "similarity_fn_name": "cosine",
            },
            "1_Pooling/config.json": {"word_embedding_dimension": config.get_text_config().hidden_size, **modes},
        }
        for name, content in files.items():
            (folder / name).parent.mkdir(exist_ok=True)
            (folder / name).write_text(json.dumps(content, indent=2))
        for path in paths[2:]:
            (folder / path).mkdir(exist_ok=True)
        return sorted({*names, *(name for name in files if "/" not in name)})  # the manifest lists top-level files


_MODES = ("cls_token", "max_tokens", "mean_tokens", "lasttoken")


def pool(hidden: Tensor, mask: Tensor, how: str) -> Tensor:
    """Pool token vectors (N, T, D) to (N, D) in float32, ignoring padding on either side.

    >>> hidden = torch.tensor([[[1.0], [3.0], [9.0]]])
    >>> [pool(hidden, torch.tensor([[1, 1, 0]]), how).item() for how in ("mean", "cls", "max", "last")]
    [2.0, 1.0, 3.0, 3.0]
    """
    with no_autocast(hidden):
        hidden = upcast(hidden)
        there = mask.bool().unsqueeze(-1)
        if how == "mean":
            # masked_fill instead of a product: padding may hold NaN.
            return hidden.masked_fill(~there, 0.0).sum(1) / there.sum(1).clamp(min=1)
        if how == "max":
            return hidden.masked_fill(~there, -torch.inf).amax(1)
        places = torch.arange(mask.shape[1], device=mask.device)
        chosen = mask.argmax(1) if how == "cls" else (places * mask).argmax(1)
        return hidden[torch.arange(len(hidden), device=hidden.device), chosen]


def distinct(keys: Tensor) -> tuple[Tensor, Tensor]:
    """Return the first position of each distinct key, and the index of each key among the distinct ones.

    >>> distinct(torch.tensor([7, 5, 7]))
    (tensor([1, 0]), tensor([1, 0, 1]))
    """
    _, first, place = np.unique(keys.numpy(), return_index=True, return_inverse=True)
    return torch.from_numpy(first), torch.from_numpy(place)
