"""A backend, a source and services without any framework: the engine must run on them."""

from trainformer.core.types import DeviceBatch, Entry, EvalResult, HostBatch, StepResult


class CountingScalar:
    """A device scalar that counts how often it is read."""

    reads = 0

    def __init__(self, value):
        self.value = value

    def __float__(self):
        CountingScalar.reads += 1
        return self.value

    def __mul__(self, other):
        return CountingScalar(self.value * getattr(other, "value", other))

    def __add__(self, other):
        return CountingScalar(self.value + getattr(other, "value", other))

    __radd__ = __add__


class FakeSource:
    def __init__(self, batches=6, size=4, known_length=True):
        self.n, self.size, self.known = batches, size, known_length

    @property
    def batches_per_epoch(self):
        return self.n if self.known else None

    def batches(self, epoch, batch=0, position=0):
        for i in range(batch, self.n):
            yield HostBatch((epoch, i), self.size)


class FakeBackend:
    """Loss of step n is n; records what it was asked to do."""

    may_repeat = False
    wants_lookahead = False
    wants_window = False

    def __init__(self):
        self.windows = []
        self._window = []
        self.verified = []

    def feed(self, batches, train):
        return (DeviceBatch(b.data, b.size) for b in batches)

    def begin_training(self):
        pass

    def updates(self, step, window):
        return (None,)

    def accumulate(self, batch):
        self._window.append(batch)
        return True

    def finish(self):
        return True

    def update(self, step):
        samples = sum(b.size for b in self._window)
        self.windows.append([b.data for b in self._window])
        return StepResult([Entry("loss", CountingScalar(float(step)), samples, True)], 0.1, samples, 0)

    def end_step(self):
        self._window = []

    def verify(self, step):
        self.verified.append(step)
        return {}

    def eval_step(self, batch):
        return EvalResult([Entry("loss", CountingScalar(1.0), batch.size, True)], {})

    def read(self, scalars):
        return [float(s) for s in scalars]

    def fold(self, scalars):
        return sum(scalars)

    def join_rows(self, pieces):
        return [row for piece in pieces for row in piece]


class FakeServices:
    def __init__(self, metrics=None, keep=False):
        self.metrics = {"val/loss": 0.5} if metrics is None else metrics
        self.keep = keep
        self.calls = []

    def log(self, metrics, step):
        self.calls.append(("log", step, metrics))

    def evaluate(self):
        self.calls.append(("evaluate",))
        return dict(self.metrics)

    def poll(self):
        pass

    def has_requests(self):
        return False

    def is_worth_keeping(self, metrics):
        return self.keep

    def save(self):
        self.calls.append(("save",))
        return "somewhere"

    def count(self, name):
        return sum(call[0] == name for call in self.calls)
