"""The engine: training loop, run state, events and control, cadences, running metrics. Imports no framework.

A `Backend` computes the steps, a `DataSource` yields the batches, and `Services` log, evaluate and save when the loop
says so.
"""

from trainformer.core.types import DataSource
from trainformer.engine.cadence import Cadence
from trainformer.engine.control import Control
from trainformer.engine.events import Event, EventBus
from trainformer.engine.loop import Loop, Plan
from trainformer.engine.metrics import LazyScalar, RunningMetrics
from trainformer.engine.protocols import Backend, Services
from trainformer.engine.state import RunState

__all__ = [
    "Backend",
    "Cadence",
    "Control",
    "DataSource",
    "Event",
    "EventBus",
    "LazyScalar",
    "Loop",
    "Plan",
    "RunState",
    "RunningMetrics",
    "Services",
]
