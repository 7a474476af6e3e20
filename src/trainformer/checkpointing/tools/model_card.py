"""The model card of a finalized folder: ``README.md`` with the metadata that the Hugging Face Hub reads.

It says what the records of the run say, and nothing else: without metrics it has none. Local folders are given by their
last name alone.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from trainformer.checkpointing import Checkpoint
from trainformer.checkpointing.manifest import digest
from trainformer.core.optional import require
from trainformer.models.auto_classes import AUTO_CLASSES
from trainformer.utils.files import decode_json
from trainformer.utils.run_folders import is_named

FILE = "README.md"
_PIPELINES = {
    "causal_lm": "text-generation",
    "seq2seq": "text2text-generation",
    "masked_lm": "fill-mask",
    "sequence_classification": "text-classification",
    "token_classification": "token-classification",
    "embedding": "feature-extraction",
    "vlm": "image-text-to-text",
}
# What decides the result of a training, in this order.
_SETTINGS = (
    "epochs", "max_steps", "total_steps", "batch_size", "accumulation_steps", "effective_batch_size", "lr", "optimizer",
    "scheduler", "warmup_ratio", "weight_decay", "gradient_clip", "precision_used", "qat_recipe", "ema", "seed",
)  # fmt: skip
# Where things are, what costs memory or time alone, and what has a section of its own.
_UNTOLD = ("model_name", "base", "tokenizer", "processor", "cache_dir", "chunk_tokens", "attention", "reference")
_HUB_NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)?")
_WEIGHTS = (".safetensors", ".gguf")


def write_card(folder: Path, checkpoint: Checkpoint, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> None:
    """Write the card of a model in `folder`.

    `facts` are its `name`, its `kind`, the `base` model and the `adapter`, the `recipe` of its quantisation and the
    `ema` that was taken, each where there is one.
    """
    sections = {
        "Use": _usage(facts),
        "Training data": _data(folder, settings),
        "Training": _table(dict(_training(settings)), "setting", "value"),
        "Metrics": _metrics(checkpoint, facts),
        "Files": _table({p.name: digest(p) for p in _weights(folder)}, "file", "SHA-256"),
        "Versions": _table(_versions(checkpoint), "", "version"),
    }
    text = [f"---\n{_metadata(folder, settings, facts)}\n---\n", f"# {facts['name']}\n", _introduction(settings, facts)]
    text += [f"## {title}\n\n{content}\n" for title, content in sections.items() if content]
    (folder / FILE).write_text("\n".join(text), encoding="utf-8")


def _metadata(folder: Path, settings: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    kind, base, adapter = facts.get("kind"), facts.get("base"), facts.get("adapter")
    method = str(settings.get("task_type") or "")
    tags = ["trainformer", *(tag.lower() for tag in (method, adapter) if tag)]
    names = [str(part["name"]) for part in _recorded_data(folder)]
    datasets = [name.split("hf:", 1)[1].split(":")[0].split("@")[0] for name in names if "hf:" in name]
    fields = {
        "library_name": "transformers" if kind else None,
        "pipeline_tag": _PIPELINES.get(str(kind)),
        "base_model": base if base and is_hub_name(base) else None,
        "tags": list(dict.fromkeys(tags)),
        "datasets": list(dict.fromkeys(datasets)) or None,
    }
    card = require("huggingface_hub", "text", "for the model card").ModelCardData
    text: str = card(**{name: value for name, value in fields.items() if value is not None}).to_yaml()
    return text.strip()


def is_hub_name(name: str) -> bool:
    """Whether a model is named as on the hub, and is no folder.

    >>> is_hub_name("org/model"), is_hub_name("runs/a/checkpoints/step_1")
    (True, False)
    """
    return _HUB_NAME.fullmatch(name) is not None and not Path(name).exists()


def _introduction(settings: Mapping[str, Any], facts: Mapping[str, Any]) -> str:
    task = settings.get("task_type") or "a model"
    parts = [f"`{task}` trained with trainformer"]
    if facts.get("base"):
        parts.append(f"starting from `{_short(facts['base'])}`")
    if facts.get("adapter"):
        parts.append(f"with {facts['adapter']}, merged into the weights")
    if facts.get("ema"):
        parts.append("with the average of its weights")
    if facts.get("recipe"):
        parts.append(f"quantised ({facts['recipe']})")
    return f"{', '.join(parts)}. These are the weights after step {facts['step']:,}.\n"


def _usage(facts: Mapping[str, Any]) -> str:
    auto = AUTO_CLASSES.get(str(facts.get("kind")))
    if auto is None:
        return ""
    reader = "AutoProcessor" if facts["kind"] in ("clip", "vlm") else "AutoTokenizer"
    return (
        f"```python\nfrom transformers import {auto}, {reader}\n\nmodel = {auto}.from_pretrained(folder)\n"
        f"{'processor' if reader == 'AutoProcessor' else 'tokenizer'} = {reader}.from_pretrained(folder)\n```\n\n"
        "`folder` is where this file is."
    )


# -- what the run recorded ---------------------------------------------------------------------------------


def base_model(folder: Path, saved: str | None) -> str | None:
    """The model that the training started from: that of the adapter, or the name in ``task.json``."""
    name = saved or _recorded(folder).get("arguments", {}).get("model_name")
    return name if isinstance(name, str) else None


def _recorded(folder: Path) -> dict[str, Any]:
    try:
        found = decode_json((folder / "task.json").read_bytes())
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _recorded_data(folder: Path) -> list[dict[str, Any]]:
    """What ``task.json`` says of the training data."""
    found = ((_recorded(folder).get("info") or {}).get("extra") or {}).get("training_data") or []
    return [part for part in found if isinstance(part, dict) and isinstance(part.get("name"), str)]


def _data(folder: Path, settings: Mapping[str, Any]) -> str:
    recorded = _recorded_data(folder)
    lines = []
    if recorded:
        lines = ["| data | records | SHA-256 |", "|---|---|---|"]
        for part in recorded:
            digest_of = part.get("sha256") or part.get("fingerprint") or ""
            name = ("hf:" in part["name"] and part["name"]) or _short(part["name"])
            lines.append(f"| {_cell(name)} | {part.get('records', '')} | {_cell(digest_of)} |")
        lines.append("")
    samples = settings.get("num_samples")
    if samples:
        lines.append(f"{samples:,} samples to train on.")
    return "\n".join(lines).strip()


def _training(settings: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in _SETTINGS:
        if settings.get(name) is not None and not (name == "epochs" and settings.get("max_steps") is not None):
            yield name, settings[name]
    for name, value in settings.items():
        own = name.removeprefix("task/")
        if name != own and own not in _UNTOLD and value not in (None, {}, [], ""):
            yield own, value


def _metrics(checkpoint: Checkpoint, facts: Mapping[str, Any]) -> str:
    """Metrics of the evaluation at this step; none if other weights were evaluated than these."""
    averages = [key for key in checkpoint.manifest.components if key.startswith("callback.EMA")]
    if averages and not facts.get("ema"):
        return ""
    found = {name: f"{value:.6g}" for name, value in sorted(checkpoint.manifest.metrics.items())}
    before = "\n\nEvaluated before the weights were quantised." if found and facts.get("recipe") else ""
    return _table(found, f"metric at step {checkpoint.step:,}", "value") + before


def _versions(checkpoint: Checkpoint) -> dict[str, str]:
    return dict(checkpoint.manifest.versions)


def _weights(folder: Path) -> list[Path]:
    return sorted(path for path in folder.iterdir() if path.suffix in _WEIGHTS)


def _table(rows: Mapping[str, Any], *heads: str) -> str:
    if not rows:
        return ""
    lines = [f"| {' | '.join(heads)} |", "|---|---|"]
    return "\n".join([*lines, *(f"| {name} | {_cell(value)} |" for name, value in rows.items())])


def _cell(value: Any) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=str)
    text = _short(text) if Path(text).is_absolute() else text
    return " ".join(text.replace("|", "\\|").split())


def _short(name: str) -> str:
    """A name as it is; of a local folder or file the last part alone, of a checkpoint also its run.

    >>> _short("org/model"), _short("/home/me/runs/sft/checkpoints/step_00000040")
    ('org/model', 'sft/step_00000040')
    """
    path = Path(name)
    if is_hub_name(name):
        return name
    return f"{path.parent.parent.name}/{path.name}" if is_named(path) else path.name
