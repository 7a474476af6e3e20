"""From the words of a command line to values, each with the one who owns it: the task, the adapter or the trainer.

A name that one of them owns goes there. One that several own is refused with the spellings that say whose is meant
(`--task.dropout`, `--adapter.dropout`), which always work. An unknown one is refused with what is close to it, or with
what it would be an option of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from trainformer.cli.flags import catalogue
from trainformer.cli.flags.hints import FALSE, TRUE, YAML, shorthand, value_of
from trainformer.cli.flags.owners import Flag, Owner, all_flags, spelled
from trainformer.config.nodes import Config
from trainformer.core.errors import BadArgument, did_you_mean, expected

Values = dict[str, dict[str, Any]]
_HELP = ("-h", "--help")
# What other trainers call it, where that is not close to our name.
_ELSEWHERE = {
    "learning_rate": "lr", "num_train_epochs": "epochs", "max_epochs": "epochs", "logging_steps": "log_every",
    "per_device_train_batch_size": "batch_size", "gradient_accumulation_steps": "accumulation_steps",
    "accumulate_grad_batches": "accumulation_steps", "max_grad_norm": "gradient_clip", "save_steps": "save_every",
    "gradient_clip_val": "gradient_clip", "eval_steps": "eval_every", "output_dir": "run_dir", "run_name": "name",
    "lr_scheduler_type": "scheduler", "optim": "optimizer", "report_to": "log", "max_seq_length": "max_length",
}  # fmt: skip


@dataclass(frozen=True)
class Word:
    """One option as it stands on the command line, with what stands behind it."""

    typed: str
    name: str  # with underscores, without the dashes before it
    text: str | None = None

    @property
    def plain(self) -> str:
        """For another parser."""
        return spelled(self.name) if self.text is None else f"{spelled(self.name)}={self.text}"


def read_words(words: Sequence[str], stands_alone: Callable[[str, str], bool]) -> Iterator[Word]:
    """The options in order. `stands_alone` tells of a name and the word behind it whether that is not its value."""
    rest = list(words)
    while rest:
        word = rest.pop(0)
        if word in _HELP:
            yield Word(word, "help")
            continue
        if not word.startswith("--") or word == "--":
            raise BadArgument(expected("options such as --epochs=3", word, "Quote values that hold blanks."))
        typed, equals, text = word.partition("=")
        name = typed[2:].replace("-", "_")
        has_value = bool(rest) and not rest[0].startswith("--") and not stands_alone(name, rest[0])
        yield Word(typed, name, text if equals else rest.pop(0) if has_value else None)


def chosen(words: Sequence[str], name: str) -> str | None:
    """The value of an option, wherever it stands; the last one counts."""
    found = None
    for position, word in enumerate(words):
        if word.startswith(f"--{name}="):
            found = word.partition("=")[2]
        elif word == f"--{name}" and position + 1 < len(words) and not words[position + 1].startswith("-"):
            found = words[position + 1]
    return found or None


class Router:
    """Knows whose an option is."""

    def __init__(self, owners: Sequence[Owner], others: Collection[str] = ()) -> None:
        self.owners = owners
        self.others = others  # options that belong to the command itself
        self.by_full_name = {f"{flag.owner}.{flag.name}": flag for flag in all_flags(owners)}
        self.by_name: dict[str, list[Flag]] = {}
        for flag in self.by_full_name.values():
            self.by_name.setdefault(flag.name, []).append(flag)
        task = next(owner for owner in owners if owner.role == "task")
        if task.model is not None and "model" not in self.by_name:
            self.by_name["model"] = [task.flags[task.model]]

    def stands_alone(self, name: str, follows: str) -> bool:
        """Whether an option is a truth value that is not told by the next word."""
        flag = self._find(name) or self._find(_affirmed(name))
        if flag is None or not flag.kind.is_switch:
            return False
        return flag.kind.members == (bool,) and follows not in (*TRUE, *FALSE)

    def values(self, words: Iterable[Word]) -> Values:
        """All that was given, by owner and name."""
        values: Values = {owner.role: {} for owner in self.owners}
        for word in words:
            flag, key, text = self._meant(word)
            mine = values[flag.owner]
            if key is None:
                mine[flag.name] = self._value(flag, text, word)
            else:
                before = mine.get(flag.name)
                mine[flag.name] = _with(before if isinstance(before, Mapping) else {}, key.split("."), text, word)
            if flag.kind.is_mapping:
                mine[flag.name] = _as_data(mine[flag.name])
        return values

    def _find(self, name: str) -> Flag | None:
        if name in self.by_full_name:
            return self.by_full_name[name]
        found = self.by_name.get(name, [])
        return found[0] if len(found) == 1 else None

    def _meant(self, word: Word) -> tuple[Flag, str | None, str]:
        """The flag, the key if only one key of a mapping is given, and the text."""
        for name in (word.name, *_prefixes(word.name)):
            if name not in self.by_full_name and len(self.by_name.get(name, ())) > 1:
                self._refuse_ambiguous(word, name)
            flag, key = self._find(name), word.name[len(name) + 1 :] or None
            if flag is not None and (key is None or flag.kind.is_mapping):
                text = "true" if word.text is None and flag.kind.is_switch else word.text
                if text is None:
                    raise BadArgument(f"Expected {word.typed} to be {flag.kind.words}, received nothing.")
                return flag, key, text
        switch = self._find(_affirmed(word.name))
        if switch is None or not switch.kind.is_switch:
            self._refuse(word)
        if word.text is not None:
            raise BadArgument(expected(f"{word.typed} without a value", word.text, f"{switch.option} takes one."))
        return switch, None, "false"

    def _value(self, flag: Flag, text: str, word: Word) -> Any:
        if flag.owner == "trainer" and flag.name == "callbacks":
            known = [entry.name for entry in catalogue.entries("callbacks")]
            short = shorthand(text, "trainformer.callbacks", known)
            if short is not None:
                return short
        return value_of(flag.kind, text, word.typed)

    def _refuse_ambiguous(self, word: Word, name: str) -> NoReturn:
        owners = self.by_name[name]
        whose = " and ".join(f"the {flag.owner}" for flag in owners)
        spellings = " or ".join(flag.full_option for flag in owners)
        raise BadArgument(f"{word.typed} is an option of {whose}. Write {spellings}.")

    def _refuse(self, word: Word) -> NoReturn:
        name = word.name.rpartition(".")[2] if word.name.split(".")[0] in ("task", "adapter", "trainer") else word.name
        task = next(owner for owner in self.owners if owner.role == "task")
        has_adapter = any(owner.role == "adapter" for owner in self.owners)
        for kind in ("adapters", "tasks"):
            found = [entry.name for entry in catalogue.entries(kind) if name in catalogue.fields_of(entry)]
            if not found or (kind == "adapters" and not has_adapter and not task.takes_adapter):
                continue
            if kind == "adapters" and not has_adapter:
                raise BadArgument(f"{word.typed} is an option of an adapter: add --adapter={found[0]}.")
            some = f"{', '.join(found[:4])}{', ...' if len(found) > 4 else ''}"
            chosen_one = next((owner.name for owner in self.owners if f"{owner.role}s" == kind), task.name)
            raise BadArgument(f"{word.typed} is an option of {some}, not of {chosen_one}.")
        if _ELSEWHERE.get(name) in self.by_name:
            raise BadArgument(f"There is no option {word.typed}. Here it is {spelled(_ELSEWHERE[name])}.")
        close = did_you_mean(name, [*self.by_name, *self.others])
        close = re.sub(r"'(\w+)'", lambda found: spelled(found[1]), close)
        more = f"`--task={task.name} --help` lists all options."
        raise BadArgument(f"There is no option {word.typed}. {close or more}")


def _affirmed(name: str) -> str:
    """The name without the `no_` that denies it.

    >>> _affirmed("no_packing"), _affirmed("task.no_packing"), _affirmed("nonfinite")
    ('packing', 'task.packing', '')
    """
    owner, dot, last = name.rpartition(".")
    return f"{owner}{dot}{last[3:]}" if last.startswith("no_") else ""


def _prefixes(name: str) -> list[str]:
    """What stands before each dot, the longest first."""
    words = name.split(".")
    return [".".join(words[:end]) for end in range(len(words) - 1, 0, -1)]


def _with(holder: Mapping[str, Any], path: Sequence[str], text: str, word: Word) -> dict[str, Any]:
    """A mapping with one more value at a path of keys."""
    first, *rest = path
    if not rest:
        return {**holder, first: value_of(YAML, text, word.typed)}
    inner = holder.get(first)
    return {**holder, first: _with(inner if isinstance(inner, Mapping) else {}, rest, text, word)}


def _as_data(value: Any) -> Any:
    """Plain values, also where a key is called `type`: in a config that would say what to build."""
    if isinstance(value, list):
        return [_as_data(inner) for inner in value]
    if not isinstance(value, Mapping):
        return value
    data = Config({key: _as_data(inner) for key, inner in value.items()})
    data.tagged = "type" in data
    return data
