"""What `model_name` stands for: a model, with or without adapters, by name, folder, run or object."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn

from trainformer.adapters.base import is_adapted
from trainformer.adapters.export import merge_adapter
from trainformer.adapters.saved import SavedAdapters, open_adapters
from trainformer.adapters.state import CONFIG_FILE, WEIGHTS_FILE
from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require
from trainformer.models.language import load_model
from trainformer.utils.run_folders import checkpoints_folder, newest_checkpoint

_TOKENIZER_FILES = ("tokenizer_config.json", "tokenizer.json", "processor_config.json")


@dataclass(frozen=True)
class Pretrained:
    """Where a model comes from: `source` is what `load_model` takes, `adapters` belong on top of it."""

    source: Any
    adapters: SavedAdapters | None = None
    folder: str | None = None  # the checkpoint that a run stands for, or the folder of the adapters

    @property
    def tokenizer(self) -> Any:
        """The name or folder with the tokenizer: that of the adapters, or else of their base."""
        if self.folder is None:
            return self.source
        has_own = any((Path(self.folder) / name).is_file() for name in _TOKENIZER_FILES)
        return self.folder if has_own or self.adapters is None else self.source


def find_pretrained(model_name: Any, base: Any = None) -> Pretrained:
    """What a name, folder, run, configuration or model stands for. `base` replaces the base model of an adapter."""
    found = _find(model_name, base)
    if base is not None and found.adapters is None:
        received = "a PeftModel" if isinstance(model_name, nn.Module) else str(model_name)
        raise BadArgument(expected("a base for the folder of an adapter alone", received, "Leave base out."))
    return found


def _find(model_name: Any, base: Any) -> Pretrained:
    if isinstance(model_name, nn.Module):
        _check_whole(model_name)
    if not isinstance(model_name, str | Path):
        return Pretrained(model_name)
    name = os.path.expanduser(str(model_name))
    folder = Path(name)
    if folder.is_dir():
        if is_run(folder):
            newest = newest_checkpoint(folder)
            if newest is None:
                do = "Pass another one, or the name of a model."
                raise BadArgument(expected("a run with a complete checkpoint", f"{name}, which has none", do))
            folder, name = newest, str(newest)
        saved = SavedAdapters.read(folder)
    else:
        hub = _hub_adapter(name)
        saved = None if hub is None else SavedAdapters.read(hub)
    if saved is None:
        return Pretrained(name, folder=name if folder.is_dir() else None)
    source = base if base is not None else saved.base
    if source is None:
        raise BadArgument(
            f"Expected the model that the adapter in {saved.folder} belongs to, received none: it was not loaded from "
            "a name or folder in training, so the adapter does not know it. Pass base=, a hub name or a folder."
        )
    local = isinstance(source, str) and (source.startswith((".", "/", "~")) or source.count("/") > 1)
    if local and not Path(source).expanduser().is_dir():
        what = f"the base model of the adapter in {saved.folder} to be a folder that exists"
        raise BadArgument(expected(what, source, "Pass base=, a hub name or the folder where the model is now."))
    return Pretrained(_whole_model(source, saved.folder), saved, str(saved.folder))


def _whole_model(base: Any, folder: Path) -> Any:
    """The base of the adapter in a folder: the newest checkpoint of a run, or itself. It has to be a whole model."""
    if not isinstance(base, str | Path) or not (place := Path(base).expanduser()).is_dir():
        return base
    place = (newest_checkpoint(place) or place) if is_run(place) else place
    if SavedAdapters.read(place) is not None:
        do = "Merge that adapter into its base first (trainformer finalize), and pass the folder as base=."
        raise BadArgument(expected(f"a whole model as the base of the adapter in {folder}", f"{place}, an adapter", do))
    return str(place)


def load_whole(model_name: Any, kind: str, *, fit: Callable[[Any], None] | None = None, **options: Any) -> nn.Module:
    """A model to use and not to train (a reference, a teacher, a judge), with its adapters merged.

    Nothing of it may be new: a head that its files do not have is an error. `fit` may resize the vocabulary before the
    adapters are added. `options` are those of `load_model`.
    """
    found = find_pretrained(model_name)
    saved = {} if found.adapters is None else found.adapters.load_options(kind)
    model = load_model(found.source, kind, **{**saved, **options})
    if fit is not None and not is_adapted(model):
        fit(model)
    if found.adapters is not None:
        return merge_adapter(open_adapters(model, found.adapters))
    if new := getattr(model, "new_weights", ()):
        do = "Pass a model that was trained for this, or train one first."
        raise BadArgument(expected(f"all weights of the model in {model_name}", f"none for {', '.join(new[:3])}", do))
    return model


def is_run(folder: Path) -> bool:
    """Whether a folder is that of a run: it has its checkpoints in a folder of their own."""
    return checkpoints_folder(folder) != folder


def _hub_adapter(name: str) -> Path | None:
    """The local copy of an adapter on the hub; None if the name is not that of an adapter."""
    if name.startswith((".", "/")) or name.count("/") > 1:
        return None
    hub = require("transformers.utils.hub", "text", "for language models")
    quietly = {
        "_raise_exceptions_for_gated_repo": False,
        "_raise_exceptions_for_missing_entries": False,
        "_raise_exceptions_for_connection_errors": False,
    }
    try:
        config = hub.cached_file(name, CONFIG_FILE, **quietly)
        if config is None:
            return None
        weights = hub.cached_file(name, WEIGHTS_FILE)
    except (OSError, ValueError):  # no such repository: loading the model says so
        return None
    return Path(weights).parent


def _check_whole(model: nn.Module) -> None:
    """Reject a model that peft has changed inside, without the `PeftModel` around it that knows how to save it."""
    if is_adapted(model):
        return
    adapted = next((name for name, part in model.named_modules() if hasattr(part, "base_layer")), None)
    if adapted is not None:
        do = (
            "Pass the PeftModel, or the folder of the adapter as model_name "
            "(transformers' from_pretrained of such a folder gives no PeftModel)."
        )
        raise BadArgument(expected("a PeftModel or a model without adapters", f"one with an adapter in {adapted}", do))
