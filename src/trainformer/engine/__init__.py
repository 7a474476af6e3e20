"""The engine: the loop, the run's state, events and control, cadence, running metrics.

Knows neither torch nor jax nor any task. What needs a framework is done by a `Backend`; where the data come from
is a `DataSource`'s business; what happens at log, evaluation and save points is decided here and done by `Services`.
"""

from trainformer.core.types import DataSource
from trainformer.engine.cadence import Cadence
from trainformer.engine.control import Control
from trainformer.engine.events import Event, EventBus
from trainformer.engine.loop import Loop, Plan
from trainformer.engine.metrics import RunningMetrics
from trainformer.engine.protocols import Backend, Services
from trainformer.engine.scalar import LazyScalar
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
