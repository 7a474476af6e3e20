"""`recipe.yaml` in the folder of a run: a config whose key `trainer` rebuilds the trainer of the run.

Owns when it is written and how a trainer is built from it. It follows the rules of all configs, so that a folder from a
stranger runs no code of its own.
"""

from __future__ import annotations

import datetime
import logging
import os
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePath
from typing import Any

from trainformer.cli import jax_recipes
from trainformer.config import Call, Config, build_from_cfg, load_config
from trainformer.config.nodes import as_call, everything_in, hide_secrets
from trainformer.core.errors import BadArgument, DataError

logger = logging.getLogger("trainformer")

FILE = "recipe.yaml"
_HEAD = "# The settings of this run. `trainformer run` starts it again, from the folder in which it was started.\n"
_TRAINERS = ("trainformer:Trainer", "trainformer.Trainer", "trainformer.trainer:Trainer", "trainformer.trainer.Trainer")
_WRITABLE = (str, int, float, bool, bytes, datetime.date, PurePath, Mapping, list, tuple, type(None))


def keep(trainer: Any, config: Config, key: str = "trainer") -> None:
    """Write the recipe when the run starts. `key` is where the config describes the trainer, of torch or of JAX."""
    recipe = config
    if key != "trainer":
        recipe = {**{name: value for name, value in config.items() if name != key}, "trainer": config[key]}  # type: ignore[assignment]
    unwritable = _unwritable(recipe)
    if unwritable is None:
        trainer.add_callback(_RecipeWriter(text_of(recipe)))
    else:
        logger.info("no %s is kept: the config holds a %s, which cannot be written as YAML", FILE, unwritable)


def trainer_of(
    run: str,
    *,
    trust: Sequence[str] = (),
    changes: Mapping[str, Any] | None = None,
    variables: Mapping[str, Any] | None = None,
) -> Any:
    """The trainer of a run, of torch or of JAX, rebuilt from its recipe in the run's folder.

    `changes` override settings of the recipe. `variables` are its secrets, which the file does not contain.

    Paths of data are relative to the current folder, as when the run was started.
    """
    from trainformer.live.runs import RUNS, find_run

    folder = find_run(run)
    file = folder / FILE
    if not file.is_file():
        raise BadArgument(
            f"Expected {file}, which describes the trainer of the run; there is none. The run was started by a "
            "Python program: run that again, which resumes the run, or load its checkpoint there."
        )
    recipe = load_config(file, trust=trust, variables=variables)
    if "trainer" not in recipe:
        raise BadArgument(
            f"Expected {file} to have a key trainer, received {', '.join(map(str, recipe)) or 'nothing'}."
        )
    try:
        make = jax_recipes.build if jax_recipes.arguments_of(recipe["trainer"]) is not None else build
        return make(recipe["trainer"], trust=trust, changes={"run_dir": str(folder), **(changes or {})})
    except (BadArgument, DataError) as error:
        if folder.absolute().parent == Path(RUNS).absolute():
            raise
        where = f"Paths and modules of a run are relative to the folder it was started in; this is {os.getcwd()}."
        raise type(error)(f"{error} {where}") from error


def settings_in(
    folder: Path, trust: Sequence[str] = (), variables: Mapping[str, Any] | None = None
) -> Mapping[str, Any]:
    """The settings in the recipe of a run; none if there is no recipe."""
    file = folder / FILE
    if not file.is_file():
        return {}
    call = as_call(load_config(file, trust=trust, variables=variables).get("trainer"))
    return {} if call is None else call.kwargs


def build(part: Any, *, trust: Sequence[str] = (), changes: Mapping[str, Any] | None = None) -> Any:
    """Build what a part of a config describes, after `seed`. `changes` are arguments, passed as they are."""
    seed(part, changes or {})
    try:
        return build_from_cfg(part, trust=trust, **(changes or {}))
    except (BadArgument, DataError) as error:
        # What was typed is in no file, so that the error of the config would add nothing.
        if part.place is None and isinstance(error.__cause__, type(error)):
            raise error.__cause__ from None
        raise


def seed(part: Any, changes: Mapping[str, Any] | None = None) -> None:
    """Seed all random number generators before the trainer that a part describes is built.

    A trainer seeds them itself, but too late for a task that builds its model in its constructor.
    """
    call = as_call(part)
    if call is None or call.title not in _TRAINERS:
        return
    from trainformer.run import RunSettings
    from trainformer.utils import seed_everything

    number = {"seed": RunSettings.defaults()["seed"], **call.kwargs, **(changes or {})}["seed"]
    if isinstance(number, int):
        seed_everything(number, deterministic=False)


def text_of(config: Mapping[str, Any]) -> str:
    """A recipe as it is written to the file: secrets are `!secret` variables."""
    from trainformer.config import to_yaml

    return f"{_HEAD}{to_yaml(hide_secrets(config))}"


def _unwritable(config: Any) -> str | None:
    """The type of a value that YAML cannot express: a config in Python may hold anything."""
    for value in everything_in(config):
        known = isinstance(value.target, str) if isinstance(value, Call) else isinstance(value, _WRITABLE)
        if not known:
            return type(value.target if isinstance(value, Call) else value).__name__
    return None


class _RecipeWriter:
    """A callback that writes the recipe to the run folder."""

    def __init__(self, text: str) -> None:
        self.text = text

    def on_train_begin(self, trainer: Any) -> None:
        from trainformer.utils.files import write_atomically

        if trainer.run_folder is not None and trainer.is_main:
            write_atomically(trainer.run_folder / FILE, self.text.encode())
