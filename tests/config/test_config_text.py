"""A config as text: YAML that round-trips, JSON, trees, graphs, and Python that builds the same."""

import datetime
import functools
import json
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from trainformer.config import (
    Call,
    Config,
    ConfigList,
    load_config,
    materialize,
    to_dot,
    to_json,
    to_python,
    to_tree,
    to_yaml,
)
from trainformer.core.errors import BadArgument

SETTINGS = settings(
    derandomize=True,
    database=None,
    deadline=None,
    max_examples=50,
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
TEXT = st.text(max_size=10) | st.sampled_from(
    [
        "{{ x }}",
        "{% raw %}",
        "{#",
        "{{%",
        "1e-4",
        "yes",
        "null",
        "=",
        "<<",
        "~",
        "a\nb\n",
        " a\n b",
        "\n",
        "x: y",
        "\u2028",
        "#",
    ]
)
SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | TEXT | st.dates()
KEYS = TEXT.filter(lambda key: key != "type")


@st.composite
def configs(draw):
    """Values and calls, some of which are shared."""
    shared = []

    def values(calls):
        leaves = SCALARS
        if shared:
            leaves = leaves | st.sampled_from(shared)
        return st.recursive(
            leaves,
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(KEYS, inner, max_size=3)
                | st.builds(section, st.dictionaries(KEYS, inner, max_size=2))
                | st.builds(
                    call,
                    st.sampled_from(["factory", "partial"]),
                    st.lists(inner, max_size=2),
                    st.dictionaries(KEYS | st.sampled_from(["args", "kwargs"]), inner, max_size=2),
                )
            ),
            max_leaves=6,
        )

    for number in range(draw(st.integers(0, 3))):
        if draw(st.booleans()):
            made = call(
                "singleton",
                draw(st.lists(values(True), max_size=2)),
                draw(st.dictionaries(KEYS, values(True), max_size=2)),
            )
            made.name = draw(st.sampled_from([None, "name", f"n{number}"]))
        else:
            made = ConfigList([Config({"k": draw(values(True))}), *draw(st.lists(values(True), max_size=2))])
            made.tagged, made.name = True, draw(st.sampled_from([None, "name"]))
        shared.append(made)
    return Config(
        draw(
            st.dictionaries(
                st.sampled_from(["a", "b", "class", "Thing", "x-y", "datetime", "partial", "1"]),
                values(True),
                max_size=5,
            )
        )
    )


def section(arguments):
    return {"type": "lab.Thing", **{key: value for key, value in arguments.items() if key}}


def call(kind, args, kwargs):
    return Call(kind, "lab:Thing", ConfigList(args), Config(kwargs))


def picture(value, seen=None):
    """A comparable form of a value: objects by their arguments and by identity."""
    seen = {} if seen is None else seen
    if isinstance(value, dict):
        return {key: picture(item, seen) for key, item in value.items()}
    if isinstance(value, list):
        if id(value) in seen:
            return ("again", seen[id(value)])
        seen[id(value)] = len(seen)
        return [picture(item, seen) for item in value]
    if not hasattr(value, "kwargs") and not hasattr(value, "keywords"):
        return (type(value).__name__, value)
    if id(value) in seen:
        return ("again", seen[id(value)])
    seen[id(value)] = len(seen)
    named = value.keywords if hasattr(value, "keywords") else value.kwargs
    kind = "partial" if isinstance(value, functools.partial) else type(value).__name__
    return (kind, [picture(item, seen) for item in value.args], picture(dict(named), seen))


@SETTINGS
@given(config=configs())
def test_yaml_round_trips(lab, config):
    Path("again.yaml").write_text(to_yaml(config), encoding="utf-8", newline="")
    again = load_config("again.yaml")
    assert again == config
    assert picture(materialize(again)) == picture(materialize(config))
    assert to_yaml(again) == to_yaml(config)


@SETTINGS
@given(config=configs())
def test_the_program_builds_the_same(lab, config):
    built = materialize(config)
    names = {}
    exec(to_python(config), names)
    variables = [name for name in names if name != "__builtins__"]
    safe = {key: key for key in config if key in variables and key not in ("Thing", "partial", "datetime", "class")}
    assert len(variables) >= len(config)
    assert picture({key: names[key] for key in safe}) == picture({key: built[key] for key in safe})


TAGS = """\
writer: &writer !singleton:lab:Thing@w [runs]
model:
  type: lab.Net
  hidden_size: 8
  head: {type: Head, "odd key": 1}
callbacks: !list:@callbacks
- !singleton:lab:Thing {writer: *writer}
- &twice !singleton:lab:Thing
  args: [*writer]
  kwargs: {lr: 1e-4}
- *twice
job: !partial:lab:job {n: 3}
plain: [1, 2]
"""


@pytest.mark.parametrize("named", [{"args": [1]}, {"kwargs": {"a": 1}}, {"args": [1], "kwargs": {"a": 1}}])
def test_arguments_named_args_and_kwargs(lab, write, named):
    config = Config({"x": call("factory", [], named)})
    again = load_config(write(to_yaml(config)))
    assert again == config
    assert materialize(again)["x"].kwargs == named


def test_the_tree(write):
    assert to_tree(load_config(write(TAGS))).splitlines() == [
        "writer: singleton lab:Thing (w)",
        "model: lab.Net",
        "  head: Head",
        "callbacks: list",
        "  0: singleton lab:Thing",
        "    writer: -> writer",
        "  1: singleton lab:Thing (twice)",
        "    0: -> writer",
        "  2: -> twice",
        "job: partial lab:job",
    ]


def test_anchors_keep_their_names(write):
    text = to_yaml(load_config(write(TAGS)))
    assert [text.count(mark) for mark in ("&twice", "*twice", "&w ", "*w")] == [1, 1, 1, 2]


def test_the_graph(write):
    text = to_dot(load_config(write(TAGS)))
    edges = [line.strip() for line in text.splitlines() if "->" in line]
    assert edges == [
        'n1 -> n2 [label="head"];',
        'n3 -> n4 [label="0"];',
        'n4 -> n0 [label="writer"];',
        'n3 -> n5 [label="1"];',
        'n5 -> n0 [label="0"];',
        'n3 -> n5 [label="2"];',
    ]
    assert r'n0 [label="writer\nsingleton lab:Thing (w)"];' in text
    assert text.startswith("digraph config {")
    assert text.endswith("}")


def test_json(write):
    shown = json.loads(to_json(load_config(write(TAGS + "odd: [.inf, 2024-01-01, !!set {c, a, d, b}]\n"))))
    writer = {"!singleton": "lab:Thing", "name": "writer", "args": ["runs"], "kwargs": {}}
    twice = {"!singleton": "lab:Thing", "name": "twice", "args": [{"!ref": "writer"}], "kwargs": {"lr": 1e-4}}
    first = {"!singleton": "lab:Thing", "args": [], "kwargs": {"writer": {"!ref": "writer"}}}
    assert shown["writer"] == writer
    assert shown["callbacks"] == [first, twice, {"!ref": "twice"}]
    assert shown["model"]["head"] == {"type": "Head", "odd key": 1}
    assert shown["odd"] == ["inf", "2024-01-01", ["a", "b", "c", "d"]]


def test_python(write):
    assert to_python(load_config(write(TAGS))).splitlines() == [
        "from functools import partial",
        "from lab import Net",
        "from lab import Thing",
        "from lab import job as job_2",
        "from trainformer.config import REGISTRY",
        "",
        "writer = Thing('runs')",
        "model = Net(hidden_size=8, head=REGISTRY['Head'](**{'odd key': 1}))",
        "twice = Thing(writer, lr=0.0001)",
        "callbacks = [Thing(writer=writer), twice, twice]",
        "job = partial(job_2, n=3)",
        "plain = [1, 2]",
    ]


def test_python_of_all_that_python_configs_hold(lab, write):
    text = (
        "import datetime, lab\nfrom pathlib import Path\n"
        "config = {'a': {'type': lab.Net.wide, 'depth': (1,)}, 'b': Path('x'), 'c': datetime.datetime(2024, 1, 2, 3), "
        "'d': {1, 2}, 'e': lab.Net, 'f': float('inf'), 'g': (1, [2]), 'h': {'type': 'lab.Net.wide'}, 'i': 'x' * 120}\n"
    )
    config = load_config(write(text, "c.py"))
    names = {}
    exec(to_python(config), names)
    built = materialize(config)
    assert {key: names[key] for key in "bcdefgi"} == {key: built[key] for key in "bcdefgi"}
    assert vars(names["a"]) == vars(built["a"])
    assert vars(names["h"]) == vars(built["h"])
    assert "from lab import Net\n" in to_python(config)
    with pytest.raises(BadArgument, match=r"written as Python.*received a object"):
        to_python(Config({"a": object()}))


def test_yaml_of_all_that_python_configs_hold():
    class Number(float): ...

    values = {"a": (1, 2), "b": Path("x/y"), "c": Number(0.5), "d": len, "e": {1, 2}, "f": datetime.date(2024, 1, 2)}
    Path("c.yaml").write_text(to_yaml(Config({**values, "g": {"h": frozenset([1])}, "i": 3j})))
    again = load_config("c.yaml")
    assert again == {**values, "a": [1, 2], "b": "x/y", "d": "builtins.len", "g": {"h": [1]}, "i": "3j"}
