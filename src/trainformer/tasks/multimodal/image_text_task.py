"""What tasks on images with text share: a processor, which is saved beside the weights.

Owns when the processor is loaded, and that `AutoProcessor` opens a checkpoint. What it is used for is left to
the tasks.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any

from trainformer.models.language import ensure_pad_token
from trainformer.tasks.language.base import LanguageTask
from trainformer.tasks.multimodal.processing import load_processor


class ProcessorTask(LanguageTask):
    """Base of tasks whose model has a processor. A subclass is a dataclass with the field annotated here."""

    processor: Any

    def _begin(self) -> None:
        super()._begin()
        self._processor: Any = None

    @property
    def preprocessor(self) -> Any:
        """The processor: what the model wants its images and texts to look like."""
        if self._processor is None:
            self._processor = load_processor(self.model_name if self.processor is None else self.processor)
            ensure_pad_token(self._processor.tokenizer)
        return self._processor

    @property
    def text(self) -> Any:
        """The tokenizer."""
        return self.preprocessor.tokenizer

    def save_assets(self, folder: Path) -> list[str]:
        """What `from_pretrained` looks for beside the weights: configuration and processor, or the adapter."""
        names, before = super().save_assets(folder), set(folder.iterdir())
        self.preprocessor.save_pretrained(folder)
        return sorted({*names, *(path.name for path in folder.iterdir() if path not in before and path.is_file())})

    def config_dict(self) -> dict[str, Any]:
        """The arguments, as far as they can be written down."""
        written = {f.name: getattr(self, f.name) for f in fields(self) if f.init}  # type: ignore[arg-type]
        for name in ("model_name", "processor"):
            if written[name] is not None and not isinstance(written[name], str | Path):
                written[name] = type(written[name]).__name__
        return written | {"adapter": None if self.adapter is None else repr(self.adapter)}
