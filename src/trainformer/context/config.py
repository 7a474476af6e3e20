"""The configuration of a run, with the source of every value.

Owns provenance: user, default, data, derived, environment. What is logged, saved and shown comes from here; the run
itself reads its arguments.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum, auto
from typing import Any

from trainformer.context.jsonable import jsonable
from trainformer.core.errors import BadArgument, TrainformerError, did_you_mean, expected
from trainformer.core.secrets import find_mask, is_secret_name, mask


class UnknownKey(TrainformerError, KeyError):
    """A key that is not set; the message suggests similar keys."""

    def __init__(self, key: str, known: Iterable[str]) -> None:
        super().__init__(f"{key!r} is not set. {did_you_mean(key, known)}".rstrip())

    def __str__(self) -> str:  # KeyError would show the message in quotes
        return str(self.args[0])


class ConfigSource(Enum):
    """Who set a value."""

    USER = auto()  # passed by the user
    DEFAULT = auto()  # left at its default
    DATA = auto()  # read from the dataset
    DERIVED = auto()  # computed from other values
    ENV = auto()  # the machine: versions, devices


@dataclass(frozen=True, slots=True)
class ConfigValue:
    """A value and its source."""

    value: Any
    source: ConfigSource
    depends_on: tuple[str, ...] = ()
    filterable: bool = False  # useful to group and filter runs by
    checkpoint: bool = True  # saved in checkpoints; the environment is not, since it belongs to the machine


_PHRASES = {
    ConfigSource.USER: "set by the user",
    ConfigSource.DEFAULT: "default",
    ConfigSource.DATA: "read from the data",
    ConfigSource.DERIVED: "derived",
    ConfigSource.ENV: "from the environment",
}


class PipelineConfig:
    """Every value of a run's configuration, with its source.

    `get` and ``[]`` return values as they were set. Exports (`to_json`, `to_wandb_config`, `to_checkpoint`, ...)
    contain JSON types only, and secrets are masked in them.

    >>> config = PipelineConfig()
    >>> config.set_user("epochs", 3)
    >>> config.set_from_data("steps_per_epoch", 10)
    >>> config.set_derived("total_steps", 30, depends_on=("steps_per_epoch", "epochs"))
    >>> config.explain("total_steps")
    'total_steps = 30 (derived from steps_per_epoch = 10, epochs = 3)'
    >>> config.user_overrides()
    {'epochs': 3}
    """

    def __init__(self) -> None:
        self._values: dict[str, ConfigValue] = {}

    # -- setting ---------------------------------------------------------------------------------------------

    def set_user(self, key: str, value: Any, filterable: bool = False) -> None:
        """Record a value that the user chose."""
        self._put(key, value, ConfigSource.USER, filterable)

    def set_default(self, key: str, value: Any, filterable: bool = False) -> None:
        """Record a default. A value that is already set stays."""
        if key not in self:
            self._put(key, value, ConfigSource.DEFAULT, filterable)

    def set_from_data(self, key: str, value: Any, filterable: bool = False) -> None:
        """Record a value that was read from the dataset."""
        self._put(key, value, ConfigSource.DATA, filterable)

    def set_derived(self, key: str, value: Any, depends_on: Sequence[str], filterable: bool = False) -> None:
        """Record a value computed from others. Those may still be unset, but must not depend on this one in turn."""
        if isinstance(depends_on, str):
            do = f"Pass depends_on=({depends_on!r},)."
            raise BadArgument(expected("depends_on to be a tuple of keys", depends_on, do))
        cycle = self._path_to(key, depends_on)
        if cycle:
            raise BadArgument(
                f"Expected derived values without circular dependencies, received a cycle: "
                f"{' -> '.join([key, *cycle])}. Compute one of them from other values."
            )
        self._put(key, value, ConfigSource.DERIVED, filterable, depends_on)

    def set_env(self, key: str, value: Any) -> None:
        """Record a property of the machine. It is logged, but not saved in checkpoints."""
        self._put(key, value, ConfigSource.ENV, filterable=False)

    def _put(
        self, key: str, value: Any, source: ConfigSource, filterable: bool, depends_on: Sequence[str] = ()
    ) -> None:
        if (found := find_mask(value, key)) is not None:
            do = "Pass the secret itself: files of a run do not contain it."
            raise BadArgument(expected(f"a value for {found}", "what stands in place of a secret", do))
        if is_secret_name(key):
            mask(value, key)  # from now on, errors and log messages do not contain it
        saved = source is not ConfigSource.ENV
        self._values[key] = ConfigValue(value, source, tuple(depends_on), filterable=filterable, checkpoint=saved)

    # -- reading ---------------------------------------------------------------------------------------------

    def get(self, key: str, default: Any = None) -> Any:
        """The value as it was set, or `default`."""
        return self._values[key].value if key in self._values else default

    def __getitem__(self, key: str) -> Any:
        return self._entry(key).value

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def source(self, key: str) -> ConfigSource:
        """Who set the value."""
        return self._entry(key).source

    def explain(self, key: str) -> str:
        """One line of text: the value, its source, and what it was computed from."""
        entry = self._entry(key)
        origin = _PHRASES[entry.source]
        if entry.depends_on:
            origin += " from " + ", ".join(
                f"{name} = {_short(name, self._values[name].value)}" if name in self._values else f"{name} (not set)"
                for name in entry.depends_on
            )
        return f"{key} = {_short(key, entry.value)} ({origin})"

    # -- writing out -----------------------------------------------------------------------------------------

    def to_wandb_config(self) -> dict[str, Any]:
        """All values, flat: what loggers show as the configuration of the run."""
        return self._plain()

    def get_filter_dimensions(self) -> dict[str, Any]:
        """The values that are useful to group and filter runs by."""
        return self._plain(lambda entry: entry.filterable)

    def to_checkpoint(self) -> dict[str, Any]:
        """The values that belong to the run, not to the machine."""
        return self._plain(lambda entry: entry.checkpoint)

    def user_overrides(self) -> dict[str, Any]:
        """The values that the user set: enough, with the secrets, to start the same run again."""
        return self._plain(lambda entry: entry.source is ConfigSource.USER)

    def to_json(self) -> dict[str, dict[str, Any]]:
        """All values with their provenance, for `config.json`.

        >>> config = PipelineConfig()
        >>> config.set_user("lr", 0.1)
        >>> config.to_json()
        {'lr': {'value': 0.1, 'source': 'user', 'depends_on': []}}
        """
        # Short: `checkpoint` follows from the source, and most values are not filterable.
        return {
            key: {
                "value": value,
                "source": entry.source.name.lower(),
                "depends_on": list(entry.depends_on),
                **({"filterable": True} if entry.filterable else {}),
            }
            for (key, entry), value in zip(self._values.items(), self._plain().values(), strict=True)
        }

    @classmethod
    def from_json(cls, data: Mapping[str, Mapping[str, Any]]) -> PipelineConfig:
        """Read back what `to_json` returned. Values stay JSON types."""
        config = cls()
        known = {source.name.lower(): source for source in ConfigSource}
        for key, record in data.items():
            if not isinstance(record, Mapping) or "value" not in record or record.get("source") not in known:
                what = f"{key!r} to be a record with a 'value' and a 'source' among {', '.join(known)}"
                raise BadArgument(expected(what, record, "Pass what PipelineConfig.to_json() returned."))
            source, filterable = known[record["source"]], bool(record.get("filterable", False))
            config._put(key, record["value"], source, filterable, record.get("depends_on", ()))
        return config

    # -- inside ----------------------------------------------------------------------------------------------

    def _plain(self, chosen: Callable[[ConfigValue], bool] = lambda entry: True) -> dict[str, Any]:
        """Values as JSON types, without secrets."""
        return mask({key: jsonable(entry.value) for key, entry in self._values.items() if chosen(entry)})

    def _entry(self, key: str) -> ConfigValue:
        if key not in self._values:
            raise UnknownKey(key, self._values)
        return self._values[key]

    def _path_to(self, target: str, start: Iterable[str]) -> list[str]:
        """The chain of dependencies from `start` to `target`, or an empty list."""
        paths = [[name] for name in start]
        seen: set[str] = set()
        while paths:
            path = paths.pop()
            if path[-1] == target:
                return path
            if path[-1] not in seen:
                seen.add(path[-1])
                entry = self._values.get(path[-1])
                paths += [[*path, name] for name in entry.depends_on] if entry else []
        return []


def record_arguments(
    config: PipelineConfig,
    values: Mapping[str, Any],
    defaults: Mapping[str, Any],
    passed: Collection[str] = (),
    filterable: Collection[str] = (),
) -> None:
    """Record arguments as set by the user if they were passed or differ from their default, else as defaults.

    An argument without a default was set by the user.

    >>> config = PipelineConfig()
    >>> record_arguments(config, {"lr": 0.1, "epochs": 3}, {"lr": 0.1, "epochs": 10})
    >>> config.explain("lr"), config.explain("epochs")
    ('lr = 0.1 (default)', 'epochs = 3 (set by the user)')
    """
    for key, value in values.items():
        if key in passed or key not in defaults or not _same(value, defaults[key]):
            config.set_user(key, value, filterable=key in filterable)
        else:
            config.set_default(key, value, filterable=key in filterable)


def _same(value: Any, other: Any) -> bool:
    if value is other:
        return True
    try:
        return bool(value == other)
    except (ValueError, RuntimeError, TypeError):  # arrays and tensors compare elementwise
        return False


def _short(key: str, value: Any, width: int = 80) -> str:
    text = repr(mask(jsonable(value), key))
    return text if len(text) <= width else text[: width - 3] + "..."
