"""The options of `train --backend jax`: those that `jax.tasks` maps. Imports neither jax nor torch.

The config that they become describes the trainer on JAX itself, so that its recipe is one of a run on JAX.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

from trainformer.cli.components import Component
from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.jax.tasks import ADAPTERS, TASKS, Settings, plan, refuse

BACKENDS = ("torch", "jax")
_TASKS = "trainformer.jax.tasks"


def backend_in(words: Sequence[str]) -> str:
    """The backend that the words of a command name; torch by default."""
    found = "torch"
    for place, word in enumerate(words):
        if word == "--backend":
            found = "".join(words[place + 1 : place + 2])
        elif word.startswith("--backend="):
            found = word.partition("=")[2]
    if found not in BACKENDS:
        raise BadArgument(expected(f"--backend to be {' or '.join(BACKENDS)}", found, did_you_mean(found, BACKENDS)))
    return found


def settings_component() -> Component:
    """The settings of a run on JAX."""
    return Component("trainer", "Settings", f"{_TASKS}:Settings", Settings)


def find_components(task: str, adapter: str | None) -> list[Component]:
    """The task, the adapter if there is one, and the settings."""
    found = [_find("task", task, TASKS)]
    if adapter not in (None, "None", "null", "~"):
        found.append(_find("adapter", str(adapter), ADAPTERS))
    return [*found, settings_component()]


def summary(name: str) -> str:
    """What a task does on JAX."""
    return (inspect.getdoc(TASKS[name]) or "").partition("\n")[0]


def _find(role: str, name: str, known: Mapping[str, Any]) -> Component:
    if name not in known:
        hint = f"On JAX there is {', '.join(known)}."
        raise BadArgument(expected(f"--{role} to be a name known on JAX", name, hint))
    return Component(role, name, f"{_TASKS}:{name}", known[name])


def refuse_unknown(typed: str, name: str, table: Any) -> NoReturn:
    """Raise for an option that there is not on JAX."""
    owner = table.task.name
    close = did_you_mean(name, [*table.by_name, "task", "adapter", *table.command])
    raise refuse(name, owner) or BadArgument(
        f"There is no option {typed}. {close or f'`--backend=jax --task={owner} --help` lists all.'}"
    )


def config_of(components: Sequence[Component], values: Mapping[str, Mapping[str, Any]]) -> Any:
    """The config that describes the trainer on JAX."""
    from trainformer.config import Call, Config

    made = plan(components[0].name, values["task"], values["trainer"], values.get("adapter"))
    arguments = Call("factory", f"trainformer.jax:{made.arguments_type}", kwargs=Config(_without_none(made.arguments)))
    keywords = {"arguments": arguments, **made.keywords}
    if made.ema is not None:
        average = Call("factory", "trainformer.callbacks:EMA", kwargs=Config({"decay": made.ema}))
        keywords["callbacks"] = [*(keywords.get("callbacks") or ()), average]
    # model=None means a small model: it stays in the recipe.
    kept = {name: value for name, value in keywords.items() if value is not None or name == "model"}
    return Config({"trainer": Call("singleton", f"trainformer.jax:{made.trainer}", kwargs=Config(kept))})


def _without_none(values: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments without those that are None by default, so that the recipe stays short."""
    none = (
        *("output_dir", "max_sequence_length", "cache_dir", "prompt_template", "chunk_tokens", "beta", "eval_steps"),
        *("save_steps", "gradient_checkpointing"),
    )
    empty = ("optimizer_kwargs", "scheduler_kwargs")
    return {
        name: value
        for name, value in values.items()
        if not (value is None and name in none) and not (name in empty and not value)
    }
