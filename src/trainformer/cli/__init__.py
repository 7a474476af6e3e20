"""The command `trainformer`. One module per command; none of them imports torch before it is called."""

from trainformer.cli.frame import main

__all__ = ["main"]
