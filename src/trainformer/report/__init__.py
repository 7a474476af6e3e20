"""Reports: one self-contained HTML file about runs and sweeps, with curves, settings, events and trials.

Owns what is shown and how it looks. Reads folders only, so running, killed and copied runs all work. Needs no torch.
"""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(__name__, {"trainformer.report.writing": ["write_report"]})
