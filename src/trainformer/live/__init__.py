"""Control of a run from outside its process: who is training, and what is asked of them.

Owns the address that a run publishes in its folder, the server that listens there, the client, and the reading of run
folders. Needs no torch, so that `trainformer ctl` is there at once. When and how a request is carried out is the
business of the session, see `trainformer.run.live_control`.
"""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.live.client": ["ControlError", "ask"],
        "trainformer.live.runs": ["RunInfo", "describe", "list_runs"],
    },
)
