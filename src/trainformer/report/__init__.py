"""One HTML file about runs and sweeps, to look at, send and keep: curves, settings, events, trials.

Owns what is shown and how it looks. Reads folders and nothing else: a run that is going on, one that was killed and one
of another machine are all the same to it. Needs no torch. What is in the folders is decided by `trainformer.run`,
`trainformer.loggers` and `trainformer.sweep`.
"""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"trainformer.report.writing": ["write_report"]})
