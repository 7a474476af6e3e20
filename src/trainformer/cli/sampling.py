"""Options of `chat` and `generate` that say how text is generated."""

from __future__ import annotations

import argparse
from typing import Any

from trainformer.cli.output import positive, whole_number

# Names of options as transformers calls them, with what they are read as.
SAMPLING_TYPES: dict[str, Any] = {
    "max_new_tokens": positive,
    "temperature": float,
    "top_p": float,
    "top_k": positive,
    "min_p": float,
    "repetition_penalty": float,
    "seed": whole_number(0),
}
_HELP = {
    "temperature": "sample at this temperature; 0 takes the most likely token",
    "top_p": "sample from the most likely tokens of this total probability",
    "top_k": "sample from this many of the most likely tokens",
    "min_p": "sample from tokens of at least this probability, relative to the most likely one",
    "repetition_penalty": "above 1, tokens that were used become less likely",
}


def add_sampling_arguments(parser: argparse.ArgumentParser, max_new_tokens: int, seed: str) -> None:
    """Options of sampling. `max_new_tokens` is the default, `seed` describes that of the seed."""
    longest = f"tokens to generate at most (default: {max_new_tokens})"
    parser.add_argument("--max-new-tokens", type=positive, default=max_new_tokens, metavar="N", help=longest)
    for name, text in _HELP.items():
        metavar = "N" if SAMPLING_TYPES[name] is positive else "X"
        parser.add_argument(f"--{name.replace('_', '-')}", type=SAMPLING_TYPES[name], metavar=metavar, help=text)
    parser.add_argument("--seed", type=SAMPLING_TYPES["seed"], metavar="N", help=f"of sampling (default: {seed})")
    parser.add_argument(
        "--chat-template-kwargs",
        type=_mapping,
        metavar="YAML",
        help="passed to the chat template, such as '{enable_thinking: false}'",
    )


def sampling_of(args: argparse.Namespace) -> dict[str, Any]:
    """The options that were given, but for the seed."""
    names = [*(name for name in SAMPLING_TYPES if name != "seed"), "chat_template_kwargs"]
    found = {name: getattr(args, name) for name in names}
    return {name: value for name, value in found.items() if value is not None}


def _mapping(text: str) -> dict[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise argparse.ArgumentTypeError(f"expected YAML such as '{{name: value}}', received {text!r}") from error
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a mapping such as '{{name: value}}', received {text!r}")
    return value
