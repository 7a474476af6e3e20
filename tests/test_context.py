"""Configuration with provenance, and shared state with lifecycles."""

from __future__ import annotations

import functools
import io
import json
import subprocess
import sys
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from trainformer.context import ConfigSource, Lifecycle, PipelineConfig, PipelineContext, record_arguments
from trainformer.core.errors import BadArgument, TrainformerError

# -- configuration -----------------------------------------------------------------------------------------


@pytest.fixture
def config() -> PipelineConfig:
    config = PipelineConfig()
    config.set_user("lr", 0.1, filterable=True)
    config.set_default("epochs", 3)
    config.set_from_data("num_classes", 10, filterable=True)
    config.set_derived("total_steps", 30, depends_on=("epochs", "num_gpus"))
    config.set_env("torch_version", "2.8")
    return config


def test_every_setter_records_its_source(config: PipelineConfig) -> None:
    sources = {key: config.source(key) for key in ("lr", "epochs", "num_classes", "total_steps", "torch_version")}

    assert sources == {
        "lr": ConfigSource.USER,
        "epochs": ConfigSource.DEFAULT,
        "num_classes": ConfigSource.DATA,
        "total_steps": ConfigSource.DERIVED,
        "torch_version": ConfigSource.ENV,
    }


def test_reading(config: PipelineConfig) -> None:
    assert config["lr"] == 0.1
    assert config.get("epochs") == 3
    assert config.get("nothing") is None
    assert config.get("nothing", 7) == 7
    assert "lr" in config
    assert "nothing" not in config


def test_views_select_by_purpose(config: PipelineConfig) -> None:
    everything = {"lr": 0.1, "epochs": 3, "num_classes": 10, "total_steps": 30, "torch_version": "2.8"}

    assert config.to_wandb_config() == everything
    assert config.get_filter_dimensions() == {"lr": 0.1, "num_classes": 10}
    assert config.to_checkpoint() == {k: v for k, v in everything.items() if k != "torch_version"}
    assert config.user_overrides() == {"lr": 0.1}


def test_a_default_never_overwrites(config: PipelineConfig) -> None:
    config.set_default("lr", 5.0)

    assert config["lr"] == 0.1
    assert config.source("lr") is ConfigSource.USER


def test_a_default_of_none_still_counts_as_set() -> None:
    config = PipelineConfig()
    config.set_user("clip", None)
    config.set_default("clip", 1.0)

    assert config.get("clip", 9) is None


def test_an_unknown_key_suggests_similar_ones(config: PipelineConfig) -> None:
    for access in (config.__getitem__, config.source, config.explain):
        with pytest.raises(KeyError) as caught:
            access("epoch")
        assert isinstance(caught.value, TrainformerError)
        assert str(caught.value) == "'epoch' is not set. Did you mean 'epochs'?"


def test_explain_is_one_line(config: PipelineConfig) -> None:
    config.set_from_data("class_names", ["a\nb"] * 1000)

    assert config.explain("lr") == "lr = 0.1 (set by the user)"
    assert config.explain("total_steps") == "total_steps = 30 (derived from epochs = 3, num_gpus (not set))"
    assert "\n" not in config.explain("class_names")
    assert len(config.explain("class_names")) < 130


def test_cycles_are_refused_and_name_their_members() -> None:
    config = PipelineConfig()
    config.set_derived("a", 1, depends_on=("b",))
    config.set_derived("b", 1, depends_on=("c", "d"))

    with pytest.raises(BadArgument, match="d -> a -> b -> d"):
        config.set_derived("d", 1, depends_on=("x", "a"))
    with pytest.raises(BadArgument, match="e -> e"):
        config.set_derived("e", 1, depends_on=("e",))
    assert "d" not in config
    config.set_derived("a", 2, depends_on=("c",))  # replaces its edges: there is no cycle any more
    config.set_derived("d", 1, depends_on=("a",))
    assert config["d"] == 1


def test_a_string_is_not_a_list_of_dependencies() -> None:
    with pytest.raises(BadArgument, match=r"\('epochs',\)"):
        PipelineConfig().set_derived("steps", 1, depends_on="epochs")


def test_json_round_trip_keeps_values_and_provenance(config: PipelineConfig) -> None:
    restored = PipelineConfig.from_json(json.loads(json.dumps(config.to_json())))

    assert restored.to_json() == config.to_json()
    assert restored.to_checkpoint() == config.to_checkpoint()
    assert restored.get_filter_dimensions() == config.get_filter_dimensions()
    assert restored.explain("total_steps") == config.explain("total_steps")


def test_to_json_has_value_source_and_dependencies(config: PipelineConfig) -> None:
    record = config.to_json()["total_steps"]

    assert record == {"value": 30, "source": "derived", "depends_on": ["epochs", "num_gpus"]}


@pytest.mark.parametrize("record", [{"value": 1}, {"source": "user"}, {"value": 1, "source": "me"}, 3])
def test_from_json_refuses_malformed_records(record: Any) -> None:
    with pytest.raises(BadArgument, match="'lr'"):
        PipelineConfig.from_json({"lr": record})


class Point(NamedTuple):
    x: int
    y: int


class Thing:
    def __call__(self) -> None: ...


@pytest.mark.parametrize(
    ("value", "written"),
    [
        (Path("a") / "b", "a/b"),
        ((1, (2, 3)), [1, [2, 3]]),
        (Point(1, 2), [1, 2]),
        ({3, 1, 2}, [1, 2, 3]),
        ({1: Path("x")}, {"1": "x"}),
        (torch.tensor([1.0, 2.0]), [1.0, 2.0]),
        (torch.tensor(3), 3),
        (torch.zeros(3, 224, 224), "Tensor(shape=(3, 224, 224), dtype=torch.float32)"),
        (torch.zeros(2, device="meta"), "Tensor(shape=(2,), dtype=torch.float32)"),
        (torch.bfloat16, "torch.bfloat16"),
        (torch.device("cpu"), "cpu"),
        (torch.Size([2, 3]), [2, 3]),
        (np.float64(0.5), 0.5),
        (np.int64(4), 4),
        (np.bool_(True), True),
        (np.str_("s"), "s"),
        (np.dtype("int8"), "int8"),
        (float("nan"), "NaN"),
        (-np.inf, "-Infinity"),
        (Lifecycle.RUN, "RUN"),
        (torch.nn.functional.relu, "torch.nn.functional.relu"),
        (torch.nn.Linear, "torch.nn.modules.linear.Linear"),
        (functools.partial(torch.nn.functional.relu, inplace=True), "partial(torch.nn.functional.relu)"),
        (Thing(), f"{__name__}.Thing"),
        (object(), "object"),
        (len, "len"),
    ],
    ids=lambda item: type(item).__name__,
)
def test_exported_values_are_readable_json(value: Any, written: Any) -> None:
    config = PipelineConfig()
    config.set_user("it", value, filterable=True)

    outputs = [
        config.to_wandb_config(),
        config.get_filter_dimensions(),
        config.to_checkpoint(),
        config.user_overrides(),
    ]
    for output in outputs:
        assert json.loads(json.dumps(output, allow_nan=False)) == {"it": written}
    assert config.to_json()["it"]["value"] == written
    assert config["it"] is value


def test_passed_or_different_means_user() -> None:
    config = PipelineConfig()
    defaults = {"lr": 0.1, "epochs": 3, "clip": 1.0, "callbacks": None}
    values = {"task": "t", "lr": 0.1, "epochs": 5, "clip": 1.0, "callbacks": None}

    record_arguments(config, values, defaults, passed={"clip"}, filterable={"lr", "epochs"})

    assert config.user_overrides() == {"task": "t", "epochs": 5, "clip": 1.0}
    assert config.source("lr") is ConfigSource.DEFAULT
    assert config.source("callbacks") is ConfigSource.DEFAULT
    assert config.get_filter_dimensions() == {"lr": 0.1, "epochs": 5}


def test_arguments_that_cannot_be_compared_count_as_set_by_the_user() -> None:
    config = PipelineConfig()
    weights = torch.ones(3)

    record_arguments(config, {"a": torch.ones(3), "b": weights}, {"a": torch.ones(3), "b": weights})

    assert config.source("a") is ConfigSource.USER
    assert config.source("b") is ConfigSource.DEFAULT


# -- lifecycles --------------------------------------------------------------------------------------------


@pytest.fixture
def context() -> PipelineContext:
    context = PipelineContext()
    for lifecycle in Lifecycle:
        context.set(lifecycle.name, lifecycle.name, lifecycle)
        context.register_buffer(lifecycle.name, torch.ones(2), lifecycle)
    return context


def alive(context: PipelineContext) -> tuple[set[str], set[str]]:
    names = [lifecycle.name for lifecycle in Lifecycle]
    return {n for n in names if context.get(n)}, {n for n in names if context.get_buffer(n) is not None}


def test_step_end_drops_only_step_values(context: PipelineContext) -> None:
    context.on_step_end()

    assert alive(context) == ({"EPOCH", "RUN", "CACHED"},) * 2


def test_epoch_end_drops_epoch_values(context: PipelineContext) -> None:
    context.on_step_end()
    context.on_epoch_end()

    assert alive(context) == ({"RUN", "CACHED"},) * 2


def test_cached_values_stay_until_invalidated(context: PipelineContext) -> None:
    assert context.invalidate("CACHED") is True
    assert alive(context) == ({"STEP", "EPOCH", "RUN"},) * 2
    assert context.invalidate("CACHED") is False
    with pytest.raises(BadArgument, match=r"'RUN' to be CACHED.*delete\('RUN'\)"):
        context.invalidate("RUN")
    assert context.get("RUN") == "RUN"


def test_delete(context: PipelineContext) -> None:
    assert context.delete("STEP") is True
    assert context.delete("STEP") is False
    assert alive(context) == ({"EPOCH", "RUN", "CACHED"},) * 2
    context.on_step_end()
    assert alive(context) == ({"EPOCH", "RUN", "CACHED"},) * 2


def test_setting_again_changes_the_lifecycle() -> None:
    context = PipelineContext()
    context.set("x", 1, Lifecycle.STEP)
    context.set("x", 2, Lifecycle.RUN)
    context.on_step_end()
    assert context.get("x") == 2

    context.set("x", 3, Lifecycle.STEP)
    context.on_step_end()
    assert context.get("x", "gone") == "gone"


@given(st.lists(st.tuples(st.sampled_from("abc"), st.sampled_from([*Lifecycle, "step", "epoch", "delete"]))))
def test_lifecycles_match_a_naive_model(actions: list[tuple[str, Any]]) -> None:
    context, model = PipelineContext(), {}
    for number, (key, action) in enumerate(actions):
        if isinstance(action, Lifecycle):
            context.set(key, number, action)
            model[key] = (number, action)
        elif action == "delete":
            assert context.delete(key) == (model.pop(key, None) is not None)
        else:
            ended = Lifecycle.STEP if action == "step" else Lifecycle.EPOCH
            (context.on_step_end if action == "step" else context.on_epoch_end)()
            model = {k: v for k, v in model.items() if v[1] is not ended}
        assert {k: context.get(k) for k in "abc"} == {k: model.get(k, (None,))[0] for k in "abc"}


def test_entry_has_owner_and_lifecycle() -> None:
    context = PipelineContext()
    context.set("x", 1, Lifecycle.EPOCH, owner="ema")

    entry = context.entry("x")
    assert (entry.value, entry.lifecycle, entry.owner) == (1, Lifecycle.EPOCH, "ema")
    with pytest.raises(KeyError, match="'y' is not set"):
        context.entry("y")


# -- buffers -----------------------------------------------------------------------------------------------


def test_accumulate_appends_detached_tensors() -> None:
    context = PipelineContext()
    rows = torch.arange(6.0, requires_grad=True).reshape(3, 2)
    context.accumulate("rows", rows)
    context.accumulate("rows", rows * 10)

    result = context.get_buffer("rows")
    assert result is not None
    assert not result.requires_grad
    assert torch.equal(result, torch.cat([rows, rows * 10]).detach())


def test_accumulate_creates_epoch_buffers_and_keeps_the_lifecycle_of_existing_ones() -> None:
    context = PipelineContext()
    context.register_buffer("queue", torch.zeros(1), Lifecycle.RUN, owner="moco")
    context.accumulate("queue", torch.ones(1))
    context.accumulate("rows", torch.ones(1))
    assert context.entry("rows").lifecycle is Lifecycle.EPOCH

    context.on_epoch_end()

    assert context.get_buffer("rows") is None
    assert torch.equal(context.get_buffer("queue"), torch.tensor([0.0, 1.0]))
    assert context.entry("queue").owner == "moco"


@given(
    sizes=st.lists(st.integers(0, 7), min_size=1, max_size=6),
    max_size=st.integers(1, 8) | st.none(),
    dim=st.sampled_from([0, 1, -1]),
)
def test_accumulate_keeps_the_newest_even_of_the_first_tensor(sizes: list[int], max_size: int | None, dim: int) -> None:
    context = PipelineContext()
    pieces = torch.arange(float(sum(sizes))).split(sizes)
    shape = (-1, 1) if dim == 0 else (1, -1)
    for count in range(len(pieces)):
        context.accumulate("x", pieces[count].reshape(shape), dim=dim, max_size=max_size)
        seen = list(range(sum(sizes[: count + 1])))
        assert context.get_buffer("x").flatten().tolist() == (seen if max_size is None else seen[-max_size:])


def test_accumulate_does_not_alias_the_callers_tensor() -> None:
    context = PipelineContext()
    batch = torch.ones(100)
    context.accumulate("x", batch, max_size=3)
    batch.zero_()

    assert context.get_buffer("x").tolist() == [1.0, 1.0, 1.0]
    assert context.get_buffer("x").untyped_storage().nbytes() == 3 * 4  # and does not keep the whole batch alive


def test_accumulate_refuses_a_size_of_zero() -> None:
    with pytest.raises(BadArgument, match="max_size"):
        PipelineContext().accumulate("x", torch.ones(1), max_size=0)


# -- events ------------------------------------------------------------------------------------------------


def test_subscribers_are_called_in_order_with_the_data() -> None:
    context, calls = PipelineContext(), []
    context.subscribe("saved", lambda data: calls.append(("first", data)))
    context.subscribe("saved", lambda data: calls.append(("second", data)))

    context.publish("saved", {"step": 3})
    context.publish("no subscriber")
    context.publish("saved")

    assert calls == [("first", {"step": 3}), ("second", {"step": 3}), ("first", {}), ("second", {})]


def test_a_subscriber_may_unsubscribe_while_it_is_called() -> None:
    context, calls = PipelineContext(), []

    def once(data: dict[str, Any]) -> None:
        calls.append("once")
        assert context.unsubscribe("x", once) is True

    context.subscribe("x", once)
    context.subscribe("x", lambda data: calls.append("always"))
    context.publish("x")
    context.publish("x")

    assert calls == ["once", "always", "always"]
    assert context.unsubscribe("x", once) is False
    assert context.unsubscribe("no such event", once) is False


def test_bound_methods_can_be_unsubscribed() -> None:
    context, calls = PipelineContext(), []
    context.subscribe("x", calls.append)
    context.unsubscribe("x", calls.append)
    context.publish("x", {"a": 1})

    assert calls == []


def test_an_exception_of_a_subscriber_propagates() -> None:
    context = PipelineContext()
    context.subscribe("x", lambda data: 1 / 0)

    with pytest.raises(ZeroDivisionError):
        context.publish("x")


def test_epoch_end_is_published_after_clearing() -> None:
    context, seen = PipelineContext(), []
    context.set("count", 5, Lifecycle.EPOCH)

    def restart(data: dict[str, Any]) -> None:
        seen.append(context.get("count"))
        context.set("count", 0, Lifecycle.EPOCH)

    context.subscribe("epoch_end", restart)
    context.on_epoch_end()

    assert seen == [None]
    assert context.get("count") == 0


# -- scopes ------------------------------------------------------------------------------------------------


def test_a_scope_prefixes_keys_and_owns_what_it_sets() -> None:
    context = PipelineContext()
    context.set("best", "global")
    ema, swa = context.scope("ema"), context.scope("swa")
    ema.set("best", 1)
    swa.set("best", 2, Lifecycle.CACHED)
    ema.buffer("shadow", torch.ones(1))
    ema.accumulate("rows", torch.ones(3), max_size=2)

    assert (context.get("best"), ema.get("best"), swa.get("best")) == ("global", 1, 2)
    assert context.entry("ema/best").owner == "ema"
    assert context.entry("ema/shadow").lifecycle is Lifecycle.EPOCH
    assert context.entry("ema/rows").owner == "ema"
    assert ema.get_buffer("rows").tolist() == [1.0, 1.0]
    assert swa.get_buffer("rows") is None
    assert swa.invalidate("best") is True
    assert ema.delete("best") is True
    assert (context.get("best"), ema.get("best", 0)) == ("global", 0)
    assert ema.config is context.config


def test_scopes_share_events() -> None:
    context, calls = PipelineContext(), []
    scope = context.scope("ema")
    scope.subscribe("x", calls.append)
    context.publish("x", {"n": 1})
    scope.publish("x", {"n": 2})
    scope.unsubscribe("x", calls.append)
    scope.publish("x", {"n": 3})

    assert calls == [{"n": 1}, {"n": 2}]


# -- checkpoints -------------------------------------------------------------------------------------------

plain = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.sets(st.integers()),
    lambda inner: st.lists(inner) | st.tuples(inner, inner) | st.dictionaries(st.text() | st.integers(), inner),
    max_leaves=8,
)


def through_a_file(state: dict[str, Any]) -> dict[str, Any]:
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def with_types(value: Any) -> Any:
    """A value with the types inside it: True == 1 == 1.0, but they are not the same state."""
    if isinstance(value, list | tuple):
        return type(value), [with_types(item) for item in value]
    if isinstance(value, dict):
        return [(with_types(key), with_types(item)) for key, item in value.items()]
    return type(value), value


@given(plain)
def test_plain_state_survives_a_file_exactly(value: Any) -> None:
    context, restored = PipelineContext(), PipelineContext()
    context.set("x", value, owner="me")

    restored.load_state_dict(through_a_file(context.state_dict()))

    assert with_types(restored.get("x")) == with_types(value)
    assert restored.entry("x").owner == "me"
    assert restored.entry("x").lifecycle is Lifecycle.RUN


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.complex64])
def test_buffers_survive_a_file_exactly(dtype: torch.dtype) -> None:
    context, restored = PipelineContext(), PipelineContext()
    queue = torch.arange(6).reshape(2, 3).T.to(dtype)
    context.register_buffer("queue", queue, owner="moco")
    context.set("nested", {"centre": [queue]})

    restored.load_state_dict(through_a_file(context.state_dict()))

    for tensor in (restored.get_buffer("queue"), restored.get("nested")["centre"][0]):
        assert tensor.dtype == dtype
        assert torch.equal(tensor, queue)
    assert restored.entry("queue").owner == "moco"
    assert restored.entry("queue").lifecycle is Lifecycle.RUN


def test_only_run_values_are_saved(context: PipelineContext) -> None:
    state = context.state_dict()

    assert state["state"] == {"RUN": "RUN"}
    assert list(state["buffers"]) == ["RUN"]


def test_the_saved_config_is_plain_too() -> None:
    context = PipelineContext()
    context.config.set_user("folder", Path("runs"))
    context.config.set_user("name", np.str_("x"))
    context.config.set_env("gpu", "H100")

    assert through_a_file(context.state_dict())["config"] == {"folder": "runs", "name": "x"}


def test_a_snapshot_does_not_follow_later_changes() -> None:
    context = PipelineContext()
    tensor, history = torch.zeros(2), [1]
    context.register_buffer("t", tensor)
    context.set("history", history)
    state = context.state_dict()
    tensor.add_(1)
    history.append(2)

    assert state["buffers"]["t"].tolist() == [0.0, 0.0]
    assert state["state"]["history"] == [1]

    other = PipelineContext()
    other.load_state_dict(state)
    other.get("history").append(3)
    assert state["state"]["history"] == [1]


def test_loading_replaces_run_values_only() -> None:
    context = PipelineContext()
    context.set("kept", 1)
    state = context.state_dict()
    context.set("kept", 2)
    context.set("newer", 3)
    context.set("cache", 4, Lifecycle.CACHED)

    context.load_state_dict(state)

    assert (context.get("kept"), context.get("newer"), context.get("cache")) == (1, None, 4)


@pytest.mark.parametrize(
    "value", [np.float64(1.0), np.ones(2), Path("x"), Point(1, 2), {"deep": [frozenset([1])]}, b"", Lifecycle.RUN]
)
def test_values_that_would_not_load_safely_are_refused(value: Any) -> None:
    context = PipelineContext()
    context.set("fine", 1)
    context.set("ema/odd", value)

    with pytest.raises(BadArgument, match=r"'ema/odd'.*plain Python values"):
        context.state_dict()


def test_restored_buffers_keep_accumulating() -> None:
    context, restored = PipelineContext(), PipelineContext()
    context.register_buffer("rows", torch.ones(2))
    restored.load_state_dict(through_a_file(context.state_dict()))
    restored.accumulate("rows", torch.zeros(2), max_size=3)
    restored.on_epoch_end()

    assert restored.get_buffer("rows").tolist() == [1.0, 0.0, 0.0]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_gpu_buffers_are_saved_on_the_cpu_and_keep_accumulating() -> None:
    context, restored = PipelineContext(), PipelineContext()
    context.register_buffer("rows", torch.ones(2, device="cuda"))
    state = context.state_dict()
    assert state["buffers"]["rows"].device.type == "cpu"
    restored.load_state_dict(through_a_file(state))
    restored.accumulate("rows", torch.zeros(2, device="cuda"))

    assert restored.get_buffer("rows").device.type == "cuda"
    assert restored.get_buffer("rows").tolist() == [1.0, 1.0, 0.0, 0.0]


def test_importing_the_context_does_not_import_torch() -> None:
    code = "import sys, trainformer.context as c; c.PipelineContext().state_dict(); sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
