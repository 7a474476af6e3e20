"""Arguments of the CLIP task: what is allowed, and which tokenizers fit the model."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

from trainformer.core.errors import BadArgument, expected

if TYPE_CHECKING:
    from trainformer.tasks.multimodal.clip import CLIP

# The parts of a model that make an embedding of an image, or of a text.
TOWERS = {"image": ("vision_model", "visual_projection"), "text": ("text_model", "text_projection")}


def check_arguments(task: CLIP) -> None:
    """Refuse what cannot work, whatever the model and the data."""
    if task.same_caption not in ("ignore", "negative"):
        raise BadArgument(expected("same_caption to be 'ignore' or 'negative'", task.same_caption))
    if task.freeze is not None and task.freeze not in TOWERS:
        raise BadArgument(expected("freeze to be 'image', 'text' or None", task.freeze))
    if isinstance(task.augment, str) and task.augment != "crop":
        raise BadArgument(expected("augment to be 'crop', None or a module for batches of images", task.augment))
    if task.max_scale is not None and not 0 < task.max_scale < math.inf:
        raise BadArgument(expected("max_scale to be a positive number or None", task.max_scale))
    counts = (*task.recall_at, task.eval_captions)
    if not task.recall_at or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in counts):
        raise BadArgument(
            expected(
                "recall_at and eval_captions to be whole numbers of at least 1", (task.recall_at, task.eval_captions)
            )
        )
    forms = [task.templates] if isinstance(task.templates, str) else task.templates
    if not forms or any("{}" not in form for form in forms):
        raise BadArgument(expected("templates with {} in the place of the class", task.templates))
    if isinstance(task.classes, str) or (task.classes is not None and not len(task.classes)):
        raise BadArgument(expected("classes to be a list of names", task.classes))


def check_end(tokens: Sequence[int], end: int | None) -> None:
    """CLIP reads a text off at its end token: at the first one, or (in its first configurations) at the largest."""
    place = tokens.index(max(tokens)) if end == 2 else tokens.index(end) if end in tokens else None
    if place != len(tokens) - 1:
        raise BadArgument(
            expected(
                f"a tokenizer that ends texts with the model's end token ({end}), where they are read off",
                f"one that makes {list(tokens)} of 'a'",
                "Let the tokenizer add its end token, and set text_config.eos_token_id to that.",
            )
        )
