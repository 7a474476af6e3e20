"""`trainformer train --task=CausalLM --model=gpt2 --data=data/text --adapter=LoRA --r=8`: train."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from trainformer.cli import options


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """What the command takes, as far as it does not depend on the task."""
    shown = "print the config that these options mean, and do nothing"
    parser.add_argument("--dry-run", action="store_true", help=shown)
    options.add_arguments(parser)


def parse(parser: argparse.ArgumentParser, words: Sequence[str]) -> argparse.Namespace:
    """With the options of the task that they name."""
    return options.parse(parser, words)


def run(args: argparse.Namespace) -> int:
    """Build the trainer and train; a run that was cut short goes on."""
    from trainformer.cli import recipes

    if args.dry_run:
        print(recipes.text_of(args.config), end="")
        return 0
    trainer = recipes.build(args.config["trainer"], trust=args.trust)
    recipes.keep(trainer, args.config)
    trainer.fit()
    return 0
