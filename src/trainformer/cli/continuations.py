"""What a language model writes on: `trainformer predict` for tasks that generate text and predict nothing else.

Owns which part of a record is the prompt. Reading records is for `trainformer.data.text`, writing on for the task.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import DataError, expected

if TYPE_CHECKING:
    from trainformer import Trainer


def writes_on(task: Any) -> bool:
    """Whether there is nothing to predict but text that follows a prompt."""
    return not hasattr(task, "predict_step") and callable(getattr(task, "generate", None))


def continuations(trainer: Trainer, data: str, batch_size: int, max_new_tokens: int) -> Iterator[dict[str, str]]:
    """The prompts of a file and what follows each, in their order; a line of a text file is a prompt."""
    from rich.console import Console
    from rich.progress import track

    from trainformer.data.text import load_text

    task = trainer.task
    is_text = Path(data).suffix == ".txt"
    records = load_text(data, split="line" if is_text else None)
    prompts = [_prompt(record, task, place) for place, record in enumerate(records)]
    batches = [prompts[first : first + batch_size] for first in range(0, len(prompts), batch_size)]
    shown = track(batches, "writing", console=Console(stderr=True), transient=True, disable=not trainer.is_main)
    with trainer.eval_mode():
        for batch in shown:
            for prompt, text in zip(batch, task.generate(batch, max_new_tokens=max_new_tokens), strict=True):
                yield {"prompt": prompt, "text": text}


def _prompt(record: Any, task: Any, place: int) -> str:
    """What is to be written on: a prompt, a text, or a conversation up to the assistant's turn."""
    if isinstance(record, Mapping):
        for name in ("prompt", "text"):
            if isinstance(record.get(name), str) and record[name]:
                return record[name]
        if isinstance(record.get("messages"), list) and getattr(task.text_tokenizer, "chat_template", None):
            return task.text_tokenizer.apply_chat_template(record["messages"], tokenize=False, add_generation_prompt=True)
    do = 'Write prompts as lines of a .txt file, or as {"prompt": ...} in a .jsonl file.'
    found = sorted(record) if isinstance(record, Mapping) else type(record).__name__
    raise DataError(expected(f"record {place} to have a prompt, a text or messages", found, do))
