"""Seeds, parameter counts, memory records and moving batches."""

from __future__ import annotations

import logging
import mmap
import os
import random
import subprocess
import sys
from collections import OrderedDict, UserDict, defaultdict
from collections.abc import Iterator
from dataclasses import FrozenInstanceError, dataclass, field
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import psutil
import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

import trainformer
from trainformer import utils
from trainformer.core.errors import BadArgument
from trainformer.utils import count_parameters, get_device, move_to_device, profile_memory, seed_everything
from trainformer.utils.processes import is_alive

# -- seeds -------------------------------------------------------------------------------------------------


@pytest.fixture(autouse=True)
def put_back(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Seeding changes the whole process; a test must not."""
    monkeypatch.setenv("PYTHONHASHSEED", os.environ.get("PYTHONHASHSEED", "random"))
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", False)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", True)
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(states[0])
    np.random.set_state(states[1])
    torch.set_rng_state(states[2])


def draws() -> tuple[float, float, float]:
    return random.random(), float(np.random.rand()), float(torch.rand(()))


@pytest.mark.parametrize("seed", [0, 42, 2**32 - 1, np.int64(7)])
def test_a_seed_fixes_every_generator(seed: int) -> None:
    seed_everything(seed)
    first = draws()
    seed_everything(seed)

    assert draws() == first
    assert os.environ["PYTHONHASHSEED"] == str(int(seed))
    seed_everything((int(seed) + 1) % 2**32)
    assert all(a != b for a, b in zip(draws(), first, strict=True))


def test_only_deterministic_changes_the_cudnn_settings() -> None:
    seed_everything(1, deterministic=False)
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (False, True)

    seed_everything(1)
    assert (torch.backends.cudnn.deterministic, torch.backends.cudnn.benchmark) == (True, False)


@pytest.mark.parametrize("seed", [-1, 2**32, 1.5, "1", True, None])
def test_a_bad_seed_is_refused_before_anything_is_seeded(seed: Any) -> None:
    state = random.getstate()

    with pytest.raises(BadArgument, match="seed"):
        seed_everything(seed)
    assert random.getstate() == state


# -- parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [(0, "0"), (999, "999"), (1000, "1.00K"), (25_557, "25.56K"), (1_000_000, "1.00M"), (7_241_732_096, "7.24B")],
)
def test_counts_are_readable(count: int, text: str) -> None:
    model = nn.Module()
    model.weight = nn.Parameter(torch.empty(count, device="meta"))

    assert count_parameters(model) == text


def test_frozen_parameters_count_on_request_and_shared_ones_once() -> None:
    model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False), nn.Linear(3, 2, bias=False))
    model[1].weight = model[0].weight
    model[2].weight.requires_grad = False

    assert count_parameters(model) == "9"
    assert count_parameters(model, trainable_only=False) == "15"


# -- memory ------------------------------------------------------------------------------------------------


@pytest.mark.skipif(torch.cuda.is_available(), reason="measures the CPU")
def test_cpu_memory_is_that_of_the_process() -> None:
    process, size = psutil.Process(), 64 * 2**20
    before = process.memory_info().rss
    with profile_memory("allocate") as record:
        # New pages: memory that the allocator has left over would not count as growth.
        block = mmap.mmap(-1, size)
        block.write(bytes(1) * size)
        assert record.delta_bytes == 0
        grown = process.memory_info().rss - before

    assert record.delta_bytes == pytest.approx(grown, abs=8 * 2**20)
    assert record.delta_bytes > 0.8 * size
    assert record.peak_bytes >= process.memory_info().rss - 8 * 2**20
    assert (record.label, record.device) == ("allocate", "cpu")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_cuda_peaks_are_those_of_the_block_also_when_nested() -> None:
    mib = 2**20
    base = torch.cuda.memory_allocated()
    with profile_memory("outer") as outer:
        torch.empty(64 * mib, dtype=torch.uint8, device="cuda")  # freed at once
        with profile_memory("inner") as inner:
            kept = torch.empty(8 * mib, dtype=torch.uint8, device="cuda")
        with profile_memory("empty") as empty:
            pass

    assert (inner.delta_bytes, inner.peak_bytes - base) == (kept.nbytes, kept.nbytes)
    assert (empty.delta_bytes, empty.peak_bytes - base) == (0, kept.nbytes)
    assert (outer.delta_bytes, outer.peak_bytes - base) == (kept.nbytes, 64 * mib)


def test_memory_is_also_logged_after_an_exception(caplog: pytest.LogCaptureFixture) -> None:
    with (
        caplog.at_level(logging.INFO, logger="trainformer"),
        pytest.raises(ZeroDivisionError),
        profile_memory("failing") as record,
    ):
        1 / 0  # noqa: B018

    assert [message.split(":")[0] for message in caplog.messages] == ["failing"]
    assert record.peak_bytes > 0


# -- devices -----------------------------------------------------------------------------------------------


def test_get_device_prefers_an_accelerator() -> None:
    best = "cuda" if torch.cuda.is_available() else "mps" if torch.backends.mps.is_available() else "cpu"

    assert get_device() == torch.device(best)


class Pair(NamedTuple):
    x: torch.Tensor
    y: Any


@dataclass(frozen=True)
class Frozen:
    x: torch.Tensor
    name: str


@dataclass
class WithExtras:
    x: torch.Tensor
    total: torch.Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.total = self.x.sum()


class OwnList(list):
    pass


class MovesItself:
    """A third-party batch with a `to` method that works in place, as in graph libraries."""

    def __init__(self) -> None:
        self.x = torch.zeros(1)

    def to(self, device: Any, non_blocking: bool = False) -> MovesItself:
        self.x = self.x.to(device, non_blocking=non_blocking)
        return self


def one() -> torch.Tensor:
    return torch.zeros(1)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """All tensors, found independently of the code under test."""
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict | UserDict | MappingProxyType):
        return [t for item in value.values() for t in tensors_in(item)]
    if isinstance(value, list | tuple):
        return [t for item in value for t in tensors_in(item)]
    return [t for item in vars(value).values() for t in tensors_in(item)] if hasattr(value, "__dict__") else []


@pytest.mark.parametrize(
    "batch",
    [
        one(),
        {"x": one(), "name": "a"},
        OrderedDict(b=one(), a=one()),
        defaultdict(list, x=[one()]),
        UserDict(x=one()),
        MappingProxyType({"x": one()}),
        [one(), "a", 3],
        (one(), None),
        Pair(one(), {"deep": [one(), (Pair(one(), 1),)]}),
        Frozen(one(), "a"),
        WithExtras(one()),
        OwnList([one()]),
        MovesItself(),
        {"a": Frozen(one(), "x"), "b": [WithExtras(one()), MovesItself()]},
    ],
    ids=lambda batch: type(batch).__name__,
)
@pytest.mark.parametrize("non_blocking", [False, True])
def test_every_container_keeps_its_type(batch: Any, non_blocking: bool) -> None:
    moved = move_to_device(batch, torch.device("meta"), non_blocking=non_blocking)

    assert type(moved) is type(batch)
    assert {t.device.type for t in tensors_in(moved)} == {"meta"}
    assert len(tensors_in(moved)) == len(tensors_in(batch))
    assert {t.device.type for t in tensors_in(batch)} == {"cpu"}, "the batch passed in was changed"


def test_other_objects_are_kept() -> None:
    marker = object()
    moved = move_to_device({"a": marker, "b": [marker, (marker,)], "c": Pair(one(), marker), "d": torch.Tensor}, "meta")

    assert moved["a"] is marker
    assert moved["b"][0] is marker
    assert moved["b"][1][0] is marker
    assert moved["c"].y is marker
    assert moved["d"] is torch.Tensor


def test_containers_keep_their_attributes() -> None:
    assert move_to_device(defaultdict(list, x=one()), "meta")["new"] == []
    assert list(move_to_device(OrderedDict(b=one(), a=one()), "meta")) == ["b", "a"]
    with pytest.raises(FrozenInstanceError):
        move_to_device(Frozen(one(), "a"), "meta").name = "b"
    assert move_to_device(torch.Size([2, 3]), "meta") == torch.Size([2, 3])


def test_packed_sequences() -> None:
    packed = pack_sequence([torch.ones(3), torch.ones(2)])
    moved = move_to_device([packed], "meta")[0]

    assert isinstance(moved, PackedSequence)
    assert moved.data.device.type == "meta"
    assert moved.batch_sizes.device.type == "cpu"


def test_huggingface_batches() -> None:
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_outputs import SequenceClassifierOutput

    encoding = transformers.BatchEncoding({"input_ids": torch.ones(2, 3), "text": ["a", "b"], "more": [one()]})
    moved = move_to_device(encoding, "meta")
    assert isinstance(moved, transformers.BatchEncoding)
    assert moved.input_ids.device.type == moved["more"][0].device.type == "meta"
    assert moved["text"] == ["a", "b"]
    assert encoding["input_ids"].device.type == "cpu"

    output = move_to_device(SequenceClassifierOutput(logits=one(), hidden_states=(one(),)), "meta")
    assert isinstance(output, SequenceClassifierOutput)
    assert output.logits.device.type == output["logits"].device.type == output.hidden_states[0].device.type == "meta"


# -- names -------------------------------------------------------------------------------------------------


def test_public_names() -> None:
    assert utils.__all__ == [
        "MemoryRecord",
        "count_parameters",
        "get_device",
        "move_to_device",
        "profile_memory",
        "seed_everything",
    ]
    assert all(hasattr(utils, name) for name in utils.__all__)
    assert trainformer.seed_everything is seed_everything


# -- processes ---------------------------------------------------------------------------------------------


@pytest.mark.skipif(not os.path.exists("/proc/self/stat"), reason="needs /proc")
def test_a_zombie_is_not_alive() -> None:
    """What a killed process left is removed by the next one, even if nobody has waited for the killed one."""
    child = subprocess.Popen([sys.executable, "-S", "-c", "input()"], stdin=subprocess.PIPE)
    assert is_alive(child.pid)
    child.kill()
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)  # it has ended, and stays a zombie
    assert not is_alive(child.pid)
    child.wait()
    assert not is_alive(child.pid)
