"""Reading: the same values from every kind of file, their positions, what is refused, and overrides."""

import copy
import datetime
import json
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from trainformer.config import Config, ConfigList, load_config
from trainformer.core.errors import BadArgument, DataError, MissingDependency

VALUES = {"lr": 0.5, "name": "x", "sizes": [1, 2], "model": {"type": "Net", "deep": {"on": True}}}


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("c.yaml", yaml.safe_dump(VALUES)),
        ("c.YML", yaml.safe_dump(VALUES)),
        ("c.json", json.dumps(VALUES)),
        ("c.toml", 'lr = 0.5\nname = "x"\nsizes = [1, 2]\n[model]\ntype = "Net"\n[model.deep]\non = true\n'),
        ("c.py", f"other = 3\nconfig = {VALUES}\n"),
        (
            "d.py",
            "import os\nfrom math import pi as _pi\n_hidden = 1\ndef f(): pass\nclass C: pass\n"
            "lr, name, sizes, model = " + ", ".join(map(repr, VALUES.values())),
        ),
    ],
)
def test_all_kinds_of_files_give_the_same_values(write, name, text):
    config = load_config(write(text, name))
    assert config == VALUES
    assert (config.file, config["model"].file) == (name, name)
    assert isinstance(config["model"]["deep"], Config)
    assert config["model"]["deep"].root is config
    assert config.where("model.deep.on").file == name


def test_a_yaml_config_knows_its_lines(write):
    text = "a: 1\nb:\n  c:\n    - x\n    - {d: 2,\n       e: 3}\nf: !factory:lab:Thing\n  - 1\n  - 2\n"
    config = load_config(write(text))
    lines = {
        path: config.where(path).line
        for path in ["a", "b", "b.c", "b.c.0", "b.c.1", "b.c.1.d", "b.c.1.e", "f", "f.0", "f.1"]
    }
    assert list(lines.values()) == [1, 2, 3, 4, 5, 5, 6, 7, 8, 9]
    assert str(config.where("b.c.1.e")) == "run.yaml:6"
    with pytest.raises(BadArgument, match=r"'b\.x'.*There is c\."):
        config.where("b.x")


def is_word(text):
    """Whether PyYAML does not write it without quotes because it takes the number for text."""
    try:
        float(text.replace("_", ""))
    except ValueError:
        return True
    return False


WORDS = st.text(max_size=8).filter(is_word)
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | WORDS | st.dates(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(WORDS, inner, max_size=4),
    max_leaves=12,
)
QUIET = settings(derandomize=True, database=None, deadline=None, max_examples=150)


@QUIET
@given(st.dictionaries(WORDS, PLAIN, max_size=5), st.booleans())
def test_plain_yaml_reads_as_with_pyyaml(values, flow):
    text = yaml.safe_dump(values, default_flow_style=flow)
    Path("plain.yaml").write_text("{% raw %}" + text + "{% endraw %}" if "{" in text else text, encoding="utf-8")
    assert load_config("plain.yaml") == yaml.safe_load(text) == values


SURPRISES = """
base: &base {a: 1, b: [1, 2]}
more: &more {b: 0, c: 2}
merged: {<<: *base, a: 7}
both: {<<: [*base, *more]}
again: *base
block: |
  two
  lines
folded: >-
  one
  line
words: [yes, no, ~, null, 0x10, 0o17, 010, 1_000, .inf, "1e-4", 2024-01-02]
"""


def test_merges_aliases_and_words_read_as_with_pyyaml(write):
    config = load_config(write(SURPRISES))
    assert config == yaml.safe_load(SURPRISES)
    assert config["words"][-1] == datetime.date(2024, 1, 2)


@pytest.mark.parametrize("text", ["1e-4", "1E5", "-1e+5", "+2.e3", ".5", "-.5e-3", "3_0e2", "6.02e23"])
def test_python_number_formats_are_numbers(write, text):
    assert load_config(write(f"x: {text}\ny: '{text}'\n")) == {"x": float(text), "y": text}


@pytest.mark.parametrize("text", ["1e", "e5", "1.2.3", "1e-4x", "0x1e5g", "--1", "1e5.0"])
def test_what_only_resembles_a_number_is_text(write, text):
    assert load_config(write(f"x: {text}\n")) == {"x": text}


def test_an_alias_to_plain_data_is_a_copy(write):
    config = load_config(write("a: &a {x: [1, {y: 2}]}\nb: *a\n"), ["b.x.1.y=3", "b.x.0=9"])
    assert config == {"a": {"x": [1, {"y": 2}]}, "b": {"x": [9, {"y": 3}]}}


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: 1\nb: 2\na: 3", r"each key once \(run.yaml:3\), received 'a'. It is also in line 1"),
        ("a: {x: 1, 'x': 2}", r"each key once \(run.yaml:1\)"),
        ("1: a\n0x1: b", "each key once"),
        ("a: &x\n  b: *x", r"does not contain it \(run.yaml:2\), received '\*x'"),
        ("a: &x\n  <<: *x\n  b: 1", r"does not contain it \(run.yaml:2\)"),
        ("a: &x !singleton:lab:Thing\n  - [*x]", r"does not contain it \(run.yaml:2\)"),
        ("a: 1\nb: *nowhere", "run.yaml:2: found undefined alias 'nowhere'"),
        ("a: !!python/object/apply:os.system [echo]", "run.yaml:1.*python/object"),
        ("a: !!python/name:os.system", "a known tag"),
        ("a: !singelton:lab:Thing", "received '!singelton:lab:Thing'. There is: !singleton:module:Class"),
        ("a: !singleton", "There is: !singleton:module:Class"),
        ("a: !singleton:@name", "!singleton:module:Class@name"),
        ("a: !singleton:lab:Thing@", "!singleton:module:Class@name"),
        ("a: !factory:lab:Thing 3", r"a list or a mapping as the arguments of lab:Thing.*\[3\]"),
        ("a: !factory:lab:Thing {args: 3}", r"kwargs: \{args: \.\.\.\}"),
        ("a: !factory:lab:Thing {1: 2}", "names of arguments"),
        ("a: !list {b: 1}", "items below !list"),
        ("a: !dict [1]", "keys and values below !dict"),
        ("a: !list:name [1]", "!list:@name"),
        ("a: !var {nam: x}", "!var"),
        ("a: !var {name: x, defualt: x}", "!var"),
        ("a: !var [x]", "!var"),
        ("a: 1\nb: !var x", r"a variable that has a value \(run.yaml:2\), received 'x'.*--var x=value"),
        ("a: !!timestamp soon", r"a date or a time \(run.yaml:1\), received 'soon'"),
        ("a: 0x1" + "0" * 5000, "a number that can be written in decimal"),
        ("a: [1", "run.yaml:1"),
        ("a: 1\n b: 2", "run.yaml:2: mapping values"),
        ("? [a]\n: 1", "a key that is a string"),
        ("- 1\n- 2", "keys and values at the top"),
        ("a: 1\n---\nb: 2", "run.yaml:2.*single document"),
        ("a: \x01", "run.yaml: unacceptable character"),
        ("a: " + "[" * 3000, "nested too deeply"),
        (
            "a0: &a0 [x]\n" + "".join(f"a{i + 1}: &a{i + 1} [{', '.join([f'*a{i}'] * 9)}]\n" for i in range(8)),
            "at most",
        ),
    ],
)
def test_yaml_that_is_refused(write, text, match):
    with pytest.raises(BadArgument, match=match):
        load_config(write(text))


@pytest.mark.parametrize(
    ("name", "text", "match"),
    [
        ("c.json", '{"a": 1,\n "b" 2}', "c.json:2"),
        ("c.json", '{"a": 1, "b": {"a": 2, "a": 3}}', r"each key once \(c.json\), received 'a'"),
        ("c.json", "[1]", "keys and values"),
        ("c.json", "[" * 100_000, "nested too deeply"),
        ("c.toml", "a = \n", "c.toml.*line 1"),
        ("c.py", "config = (\n", "c.py:1"),
        ("c.py", "x = 1\nconfig = {'a': x / 0}", "c.py:2, received ZeroDivisionError"),
        ("c.py", "config = 3", "keys and values"),
        ("c.py", "config = {}\nconfig['a'] = [config]", "contains itself"),
        ("c.ini", "[a]", "a .py, .yaml, .yml, .json or .toml file"),
    ],
)
def test_other_files_that_are_refused(write, name, text, match):
    with pytest.raises(BadArgument, match=match):
        load_config(write(text, name))


def test_a_missing_file(write):
    write("a: 1", "train.yaml")
    with pytest.raises(DataError, match=r"'trian\.yaml'\. Did you mean 'train\.yaml'"):
        load_config("trian.yaml")
    Path("folder").mkdir()
    with pytest.raises(DataError, match=r"received 'folder'\. It is a folder\."):
        load_config("folder")
    with pytest.raises(DataError, match="nowhere"):
        load_config("nowhere/train.yaml")
    Path("b.yaml").write_bytes(b"a: \xff\xfe")
    with pytest.raises(DataError, match="UTF-8"):
        load_config("b.yaml")


def test_python_values_are_unchanged(write):
    config = load_config(
        write("from pathlib import Path\nconfig = {'a': (1, {'b': 2}), 'p': Path('x'), 'f': len}", "c.py")
    )
    assert config == {"a": (1, {"b": 2}), "p": Path("x"), "f": len}
    assert isinstance(config["a"][1], Config)


def test_only_python_is_executed_and_not_as_a_program(write):
    text = "import sys\nif __name__ == '__main__': raise SystemExit\nconfig = {'n': __name__}"
    assert load_config(write(text, "c.py"))["n"] != "__main__"
    touch = "!!python/object/apply:os.mkdir [made]"
    for name, text in (("c.yaml", f"a: {touch}"), ("c.json", f'{{"a": "{touch}"}}'), ("c.toml", f'a = "{touch}"')):
        try:
            load_config(write(text, name))
        except BadArgument:
            pass
    assert not Path("made").exists()


def test_overrides(write):
    text = "a: {b: 1, c: [1, {d: 2}]}\n5: x\nt: !singleton:lab:Thing\n  args: [1]\n  kwargs: {lr: 1}\nu: !dict {v: 1}\n"
    overrides = ["a.b=[1e-4, two]", "a.c.1.d=null", "5=y", "t.0=7", "t.lr={x: 1}", "u.v=", "+a.new.deep=1", "+a.c.2=z"]
    config = load_config(write(text), [*overrides, "+t.momentum=0.9", "+t.1=8", "+w=!partial:lab:job {n: 2}"])
    assert config["a"] == {"b": [1e-4, "two"], "c": [1, {"d": None}, "z"], "new": {"deep": 1}}
    assert (config[5], config["u"]) == ("y", {"v": None})
    assert (config["t"].args, config["t"].kwargs) == ([7, 8], {"lr": {"x": 1}, "momentum": 0.9})
    assert (config["w"].target, config["w"].kwargs) == ("lab:job", {"n": 2})
    assert config["a"]["new"].root is config
    assert str(config.where("a.b")) == "override a.b=[1e-4, two]"
    assert str(config.where("a.c.2")) == "override +a.c.2=z"
    assert config.where("a.c.0").line == 1
    assert load_config("run.yaml", {"a.b": {"type": (1,)}})["a"]["b"].root["u"] == {"v": 1}
    assert load_config("run.yaml", "a.b=2")["a"]["b"] == 2


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ("model.hiden=3", "'model.hiden'.*received 'hiden'. Did you mean 'hidden'.*--set [+]model.hiden"),
        ("modle.hidden=3", "received 'modle'. Did you mean 'model'"),
        ("model.other=3", "There is hidden, layers.*[+]model.other"),
        ("model.hidden.x=3", "'model.hidden' to have parts"),
        ("+model.hidden.x=3", "'model.hidden' to have parts"),
        ("model.layers.2=3", "received '2'"),
        ("model.layers.-1=3", "received '-1'"),
        ("+model.layers.5=3", "2 for a new one"),
        ("+model.layers.x=3", "2 for a new one"),
        ("model.hidden", "an override such as"),
        ("=3", "an override such as"),
        ("model.hidden=[1", "override model.hidden"),
        ("model.hidden=!!python/name:os.system", "a known tag"),
    ],
)
def test_overrides_that_are_refused(write, change, match):
    with pytest.raises(BadArgument, match=match):
        load_config(write("model: {hidden: 8, layers: [1, 2]}"), [change])


def test_inserted_values_become_nodes():
    config = Config({"a": {"b": 1}})
    config["c"] = {"d": [{"e": 1}]}
    config.update(f={"g": 1})
    config |= {"h": {}}
    assert config.setdefault("i", {"j": 2}) == {"j": 2}
    assert config.setdefault("a", 3) == {"b": 1}
    made = [config["a"], config["c"], config["c"]["d"][0], config["f"], config["h"], config["i"], config.copy()]
    assert all(type(part) is Config and part.root is config for part in made)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda config: pickle.loads(pickle.dumps(config))])
def test_a_copy_is_independent(write, copied):
    config = load_config(write("a: {b: &b !singleton:lab:Thing [1]}\nc: [*b, !list [2]]\n"), trust=["x"])
    twin = copied(config)
    assert twin == config
    assert twin["a"].root is twin
    assert twin["a"]["b"] is twin["c"][0] is not config["c"][0]
    assert (twin.source.trust, twin.where("c.1").line, type(twin["c"])) == (("x",), 2, ConfigList)


def test_variables_are_for_yaml_alone(write):
    with pytest.raises(BadArgument, match=r"no variables for c\.json, received \['width'\]"):
        load_config(write("{}", "c.json"), width=3)
    with pytest.raises(BadArgument, match="the name of a package to trust, received 'a b'"):
        load_config("c.json", trust="a b")


def test_yaml_is_an_extra(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "yaml", None)
    monkeypatch.delitem(sys.modules, "trainformer.config.yaml_format", raising=False)
    with pytest.raises(MissingDependency, match=r"pip install 'trainformer\[config\]'"):
        load_config(write("a: 1"))
    assert load_config(write('{"a": 1}', "c.json")) == {"a": 1}


def test_reading_imports_neither_torch_nor_what_is_named(write):
    write("a: !singleton:torch.nn:Linear [2, 2]\nb: {type: torch.nn.ReLU}\nc: {{ 1 + 1 }}\n")
    code = (
        "import sys; from trainformer.config import *; c = load_config('run.yaml'); "
        "to_yaml(c), to_json(c), to_tree(c), to_dot(c), to_python(c); print('torch' in sys.modules, c['c'])"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "2"]


@pytest.mark.parametrize(
    ("name", "text"),
    [("a.yaml", "n: " + "9" * 5_000), ("a.yaml", "day: 2001-02-30"), ("a.json", '{"n": ' + "9" * 5_000 + "}")],
)
def test_values_that_python_cannot_hold_are_refused(tmp_path, name, text):
    (tmp_path / name).write_text(text)
    with pytest.raises(BadArgument, match="that can be read"):
        load_config(tmp_path / name)
