"""What every way into the library shares: settings, and the session that runs them."""

from trainformer.session.session import Session
from trainformer.session.settings import RunSettings

__all__ = ["RunSettings", "Session"]
