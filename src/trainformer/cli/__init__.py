"""The command `trainformer`. None of its modules imports torch before a command runs."""

from trainformer.cli.app import main

__all__ = ["main"]
