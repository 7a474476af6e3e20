"""`Predictor`: a trained task that predicts from raw images and texts. It runs what `Trainer.predict` runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from trainformer.core.errors import BadArgument, check_count, expected
from trainformer.inference.inputs import RawImages, as_images, is_dataset, prompt_of
from trainformer.run import run_of
from trainformer.trainer import Trainer


class Predictor:
    """A trained model, from `trainformer.load`. Calling it is `predict`.

    >>> import torch, trainformer
    >>> from trainformer.tasks import ImageClassification
    >>> images = torch.randint(0, 256, (16, 3, 32, 32), dtype=torch.uint8)
    >>> task = ImageClassification("test_resnet", pretrained=False)
    >>> trainer = trainformer.Trainer(task, (images, torch.arange(16) % 2), run_dir="runs/two", epochs=1, log="none")
    >>> wanted = trainer.fit().predict(images[:1])[0]
    >>> row = trainformer.load("runs/two")(images[0])
    >>> sorted(row), torch.equal(row["probabilities"], wanted["probabilities"])
    (['id', 'prediction', 'probabilities', 'probability'], True)
    """

    def __init__(self, trainer: Trainer, source: Path | str) -> None:
        self.trainer = trainer
        self.task = trainer.task
        self.source = source

    def __repr__(self) -> str:
        return f"{type(self).__name__}({type(self.task).__name__} from {str(self.source)!r} on {self.device})"

    @property
    def class_names(self) -> list[str] | None:
        """The names of the classes, if the task has classes with names."""
        names = getattr(self.task, "class_names", None)
        return None if names is None else list(names)

    @property
    def device(self) -> Any:
        """Where the model is."""
        return run_of(self.trainer).backend.device

    @property
    def generates(self) -> bool:
        """Whether predictions are generated text."""
        return not hasattr(self.task, "predict_step") and callable(getattr(self.task, "generate", None))

    @property
    def _takes_prompts(self) -> bool:
        """Whether `task.generate` takes prompts alone."""
        return callable(getattr(self.task, "generate", None)) and getattr(self.task, "kind", None) != "vlm"

    def __call__(self, inputs: Any, batch_size: int | None = None, **options: Any) -> Any:
        """See `predict`."""
        return self.predict(inputs, batch_size, **options)

    def predict(self, inputs: Any, batch_size: int | None = None, **options: Any) -> Any:
        """The prediction for one input as a dict, or for a list of them as a list of dicts.

        An image is a path, a PIL image, encoded bytes, or uint8 pixels as an array or tensor; a text is a string or a
        record. A folder, a dataset or a DataLoader is predicted for as a whole. Rows are those of `Trainer.predict`,
        with the name of the predicted class as `class` (several: `classes`), or the generated `text`. `options` are
        those of `generate`.
        """
        if batch_size is not None:
            check_count("batch_size", batch_size)
        is_text = isinstance(inputs, str) or (isinstance(inputs, list) and inputs and isinstance(inputs[0], str))
        if self.generates or (is_text and self._takes_prompts):
            return self.generate(inputs, batch_size, **options)
        if options:
            raise BadArgument(expected(f"no options of generate for {type(self.task).__name__}", ", ".join(options)))
        if is_dataset(inputs, of_images=hasattr(self.task, "preprocessing")):
            return self._rows(inputs, batch_size)
        if hasattr(self.task, "preprocessing"):
            images, several = as_images(inputs)
            floats = getattr(self.task, "_trained_on", None) == "floats"
            data: Any = RawImages(images, self.task.in_chans or 3, floats)
        else:
            several = isinstance(inputs, Sequence) and not isinstance(inputs, str)
            data = list(inputs) if several else [inputs]
        rows = self._rows(data, batch_size) if len(data) else []
        return rows if several else rows[0]

    def generate(self, prompts: Any, batch_size: int | None = None, **options: Any) -> Any:
        """Generate text for a prompt or a conversation, or for a list of them: dicts with `prompt` and `text`.

        `options` are `max_new_tokens` and others of the task's `generate`.
        """
        if not self._takes_prompts:
            do = "Call predict(), with records."
            raise BadArgument(expected("a task that generates text for prompts", type(self.task).__name__, do))
        is_chat = (
            isinstance(prompts, list)
            and bool(prompts)
            and all(isinstance(turn, Mapping) and "role" in turn for turn in prompts)
        )
        single = is_chat or isinstance(prompts, str | Mapping)
        records = [{"messages": prompts}] if is_chat else [prompts] if single else list(prompts)
        rows = list(self.generated(records, batch_size, **options))
        return rows[0] if single else rows

    def generated(
        self, records: Sequence[Any], batch_size: int | None = None, **options: Any
    ) -> Iterator[dict[str, Any]]:
        """The prompts of records and the text generated for each, in order, a batch at a time."""
        size = batch_size or self.trainer.eval_batch_size or self.trainer.batch_size
        tokenizer = self.task.text_tokenizer
        with self.trainer.eval_mode():
            for first in range(0, len(records), size):
                chosen = [records[index] for index in range(first, min(first + size, len(records)))]
                prompts = [prompt_of(record, tokenizer, first + place) for place, record in enumerate(chosen)]
                for prompt, text in zip(prompts, self.task.generate(prompts, **options), strict=True):
                    yield {"prompt": prompt, "text": text}

    def evaluate(self, data: Any, batch_size: int | None = None) -> dict[str, float]:
        """Metrics on data with labels; see `Trainer.evaluate`."""
        return self.trainer.evaluate(data, batch_size)

    def export(self, path: str | Path, format: str = "onnx", **options: Any) -> str:
        """Export the model; see `Trainer.export`."""
        return self.trainer.export(path, format, **options)

    def _rows(self, data: Any, batch_size: int | None) -> list[dict[str, Any]]:
        batches = run_of(self.trainer).predicted_columns(data, batch_size)
        rows = []
        for batch in batches:
            names = [name for name in batch if name != "index"]
            values = zip(*(batch[name] for name in names), strict=True)
            rows += [dict(zip(names, row, strict=True)) for row in values]
        return rows
