"""`recipe.yaml` in the folder of a run: a config whose key `trainer` builds the trainer of the run again.

Owns when it is written and how a trainer is made from it. It is a config like any other: what it names is imported by
the rules of configs, so that a folder from somewhere else runs no code of its own.
"""

from __future__ import annotations

import datetime
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import TYPE_CHECKING, Any

from trainformer.core.errors import BadArgument, DataError

if TYPE_CHECKING:
    from trainformer.config import Config
    from trainformer.trainer import Trainer

logger = logging.getLogger("trainformer")

FILE = "recipe.yaml"
_HEAD = "# The settings of this run: `trainformer run` trains by them again, in the folder that it was started in.\n"
_TRAINERS = ("trainformer:Trainer", "trainformer.Trainer", "trainformer.trainer:Trainer", "trainformer.trainer.Trainer")
_WRITABLE = (str, int, float, bool, bytes, datetime.date, PurePath, Mapping, list, tuple, type(None))


def keep(trainer: Trainer, config: Config, key: str = "trainer") -> None:
    """See to it that the run has its recipe as soon as it begins. `key` is where the config describes the trainer."""
    recipe = config if key == "trainer" else {**without(config, key), "trainer": config[key]}
    odd = _not_writable(recipe)
    if odd is None:
        trainer.add_callback(_Keeper(text_of(recipe)))
    else:
        logger.info("no %s is kept: the config holds a %s, which cannot be written as YAML", FILE, odd)


def trainer_of(run: str, *, trust: Sequence[str] = (), changes: Mapping[str, Any] | None = None) -> Trainer:
    """The trainer of a run, by its recipe, with the run's own folder. `changes` are settings that replace the recipe's.

    Data that it names are looked for from the current folder, as when the run was started.
    """
    from trainformer.config import load_config
    from trainformer.live.runs import RUNS, find_run

    folder = find_run(run)
    file = folder / FILE
    if not file.is_file():
        raise BadArgument(
            f"Expected {file}, which tells how the trainer of the run is made; there is none. The run was started by a "
            "Python program: run that again, or load its checkpoint there with trainer.load()."
        )
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    recipe = load_config(file, trust=trust)
    if "trainer" not in recipe:
        raise BadArgument(
            f"Expected {file} to have a key trainer, received {', '.join(map(str, recipe)) or 'nothing'}."
        )
    try:
        return build(recipe["trainer"], trust=trust, changes={"run_dir": str(folder), **(changes or {})})
    except (BadArgument, DataError) as error:
        if folder.absolute().parent == Path(RUNS).absolute():
            raise
        where = f"Paths and modules of a run are meant from the folder that it was started in; this is {os.getcwd()}."
        raise type(error)(f"{error} {where}") from error


def settings_in(folder: Path, trust: Sequence[str] = ()) -> Mapping[str, Any]:
    """The settings that the recipe of a run has; none if there is no recipe."""
    from trainformer.config import load_config
    from trainformer.config.nodes import as_call

    file = folder / FILE
    call = as_call(load_config(file, trust=trust).get("trainer")) if file.is_file() else None
    return {} if call is None else call.kwargs


def build(part: Any, *, trust: Sequence[str] = (), changes: Mapping[str, Any] | None = None) -> Any:
    """What a part of a config describes, seeded as `seed` says. `changes` are arguments, taken as they are."""
    from trainformer.config import build_from_cfg

    seed(part, changes or {})
    try:
        return build_from_cfg(part, trust=trust, **(changes or {}))
    except (BadArgument, DataError) as error:
        # What was typed stands in no file: there is no place to tell, and the user did not write what is called.
        if part.place is None and isinstance(error.__cause__, type(error)):
            raise error.__cause__ from None
        raise


def seed(part: Any, changes: Mapping[str, Any] | None = None) -> None:
    """Seed everything before the trainer that a part describes is built.

    A trainer seeds itself, but a task that makes its model at once has made it by then; in a program the user would
    have seeded before.
    """
    from trainformer.config.nodes import as_call

    call = as_call(part)
    if call is None or call.title not in _TRAINERS:
        return
    from trainformer.run import RunSettings
    from trainformer.utils import seed_everything

    number = {"seed": RunSettings.defaults()["seed"], **call.kwargs, **(changes or {})}["seed"]
    if isinstance(number, int):
        seed_everything(number, deterministic=False)


def text_of(config: Mapping[str, Any]) -> str:
    """A recipe as it stands in the file."""
    from trainformer.config import to_yaml

    return f"{_HEAD}{to_yaml(config)}"


def without(config: Mapping[str, Any], key: str) -> dict[str, Any]:
    """All but one key."""
    return {name: value for name, value in config.items() if name != key}


def _not_writable(config: Any) -> str | None:
    """What in it YAML has no word for: a config written in Python may hold anything."""
    from trainformer.config.nodes import Call, everything_in

    for value in everything_in(config):
        known = isinstance(value.target, str) if isinstance(value, Call) else isinstance(value, _WRITABLE)
        if not known:
            return type(value.target if isinstance(value, Call) else value).__name__
    return None


class _Keeper:
    """Writes the recipe when the run has its folder."""

    def __init__(self, text: str) -> None:
        self.text = text

    def on_train_begin(self, trainer: Any) -> None:
        """The folder is there by now."""
        from trainformer.utils.files import write_atomically

        folder: Path | None = trainer.run_folder
        if folder is not None and trainer.is_main:
            write_atomically(folder / FILE, self.text.encode())
