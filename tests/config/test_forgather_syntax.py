"""Forgather's syntax: lines that become Jinja, tags, and keys that replace earlier ones."""

import functools
from pathlib import Path

import pytest
import torch

from trainformer.config import Call, ConfigTuple, Var, load_config, materialize, to_json, to_python, to_tree, to_yaml
from trainformer.config.line_syntax import split_templates, translate, uses_line_syntax
from trainformer.core.errors import BadArgument

BASE = """\
-- set ns = namespace()
-- filter trim()
-- block settings
    -- set ns.width = 8
    -- set ns.title = "Base"
<< endblock settings
-- endfilter
## not in the output, not even {{ this }}

# {{ ns.title }}
sizes:
-- block sizes
    - 1
    - {{ ns.width }}
<< endblock sizes

[optimizer]
optimizer: &optimizer !partial:torch.optim:SGD
    lr: 1.0e-1
    momentum: 0.5

[more]
"""

CHILD = """\
-- extends "base.yaml"

[settings]
    == super()
    -- set ns.width = 16  ## wider

[sizes]
    == super()
-- for size in (3, 4)
    - {{ size }}
-- endfor

[optimizer]
    == super()
    lr: 1.0e-2
    nesterov: True

[more]
    -- include "config.more"

#------- config.more -------
-- set name = "inline"
kind: {{ name }}
=> "last: 1"
"""


@pytest.fixture
def child(write):
    write(BASE, "base.yaml")
    return write(CHILD, "child.yaml")


def test_lines_blocks_super_and_templates_in_one_file(child):
    config = load_config(child)
    assert config["sizes"] == [1, 16, 3, 4]
    assert config["optimizer"] == Call("lambda", "torch.optim:SGD", kwargs=config["optimizer"].kwargs)
    assert config["optimizer"].kwargs == {"lr": 0.01, "momentum": 0.5, "nesterov": True}  # later keys replace earlier
    assert (config["kind"], config["last"]) == ("inline", 1)
    assert config.pp_config.startswith("\n# Base") or config.pp_config.startswith("# Base")
    assert "not in the output" not in config.pp_config


def test_the_text_is_that_of_the_same_template_in_jinja(write):
    """The line syntax is only another way to write Jinja."""
    from jinja2 import Environment

    lines = "a: 1\n-- if x\nb: 2\n-- else\nb: 3\n-- endif\n== 'c: ' ~ x\n"
    jinja = "a: 1\n{% if x %}\nb: 2\n{% else %}\nb: 3\n{% endif %}\n{{ 'c: ' ~ x }}"
    assert load_config(write(lines), x=5).pp_config == Environment(trim_blocks=True).from_string(jinja).render(x=5)


@pytest.mark.parametrize(
    ("line", "jinja"),
    [
        ("-- set x = 1", "{% set x = 1 %}"),
        ("    << endblock a", "{%- endblock a %}"),
        (">> if x", "{% if x -%}"),
        ("  == super()", "{{ super() }}"),
        ("=> x", "{{ x|trim('\\n')}}"),
        ("  ## all of it {{ x }} #}", "{##}"),
        ("x: 1 ## rest", "x: 1"),
        ("x: '#one'", "x: '#one'"),
        ("<<: *anchor", "<<: *anchor"),
        ("- -- text", "- -- text"),
        ("--- ", "--- "),
    ],
)
def test_single_lines(line, jinja):
    assert translate(line) == jinja


def test_blocks_end_where_the_next_one_starts():
    text = "[outer]\na: 1\n  [inner!]\n  b: 2\n[next]\nc: 3"
    opened, closed = "{% block inner %}", "{% endblock inner +%}{% endfilter %}"
    assert translate(text).splitlines() == [
        "{% block outer %}",
        "a: 1",
        "{% filter trim %}" + opened,
        "  b: 2{{'\\n'}}" + closed + "{{'\\n'}}{% endblock outer +%}",
        "{% block next %}",
        "c: 3{{'\\n'}}{% endblock next +%}",
    ]


def test_templates_in_one_file():
    main, others = split_templates("a\n#--- one ---\nb\n# ---- two.three ----\nc\n")
    assert (main, others) == ("a", {"one": "b", "two.three": "c\n"})


@pytest.mark.parametrize(
    "text", ["a: 1\n", "x: [1]\n# -- comment\n", "a: |\n  -x-- extends\n", "<<: *a\n", "- == \n", "text: '== x'\n"]
)
def test_other_yaml_is_read_as_before(write, text):
    assert not uses_line_syntax(text)


def test_a_duplicate_key_is_an_error_without_line_syntax(write):
    with pytest.raises(BadArgument, match="each key once"):
        load_config(write("a: 1\na: 2\n"))


def test_text_that_looks_like_line_syntax_is_written_safely():
    config = {"note": "first\n-- set x = 1\n[block]\n"}
    Path("again.yaml").write_text(to_yaml(config))
    assert load_config("again.yaml") == config


# -- tags ------------------------------------------------------------------------------------------------------------

TAGS = """\
-- set x = 3
.define: &shared !call:torch.nn:Linear [2, {{ x }}]
pair: !tuple:@pair [1, *shared]
named: !dict@name {type: int, names: ["--x"]}
plain: {type: str}
items: !dlist:@items
    null: ~
    first: *shared
    gone: ~
    second: !factory:torch.nn:ReLU
make: !lambda:torch.nn:Linear
    arg1: {{ x }}
    arg0: 2
    latent_args: !var {name: options, default: {bias: false}}
layers: !partial:torch.nn:Sequential
    - !factory:torch.nn:Linear [2, 2]
    - *shared
width: !var {name: width, default: 4}
depth: !var "depth"
"""


def test_what_the_tags_become(write):
    config = load_config(write(TAGS))
    assert ".define" not in config
    shared = config["pair"][1]
    assert (shared.kind, list(shared.args)) == ("singleton", [2, 3])
    assert isinstance(config["pair"], ConfigTuple)
    assert [call.target for call in config["items"]] == ["torch.nn:Linear", "torch.nn:ReLU"]
    assert config["items"][0] is shared
    assert (config["items"].name, config["named"].name) == ("items", None)
    assert list(config["make"].args) == [2, 3]
    assert config["width"] == Var("width", 4)


def test_what_they_build(write):
    config = load_config(write(TAGS))
    built = materialize(config, variables={"depth": 2, "options": {"bias": True}})
    assert built["pair"] == (1, built["items"][0])
    assert built["plain"] == {"type": "str"}  # only tags are calls
    assert built["named"] == {"type": "int", "names": ["--x"]}
    assert (built["width"], built["depth"]) == (4, 2)
    assert isinstance(built["make"], functools.partial)
    assert built["make"]().bias is not None
    assert materialize(config["make"])().bias is None  # the default of the variable
    assert built["make"](device="meta").weight.is_meta


def test_a_partial_builds_its_arguments_in_every_call(write):
    make = materialize(load_config(write(TAGS))["layers"])
    first, second = make(), make()
    assert first[0] is not second[0]  # !factory
    assert first[1] is second[1]  # a singleton


def test_a_variable_without_a_value_is_an_error_when_it_is_needed(write):
    config = load_config(write(TAGS))
    with pytest.raises(BadArgument, match=r"a variable that has a value \(run.yaml, line 18 .*received 'depth'"):
        materialize(config["depth"], variables={"dept": 1})
    assert load_config("run.yaml", depth=7)["depth"] == 7


def test_pp_config_is_the_text(write):
    config = load_config(write("-- set x = 1\ntext: !var 'pp_config'\nx: {{ x }}\n"))
    assert materialize(config)["text"] == config.pp_config == "text: !var 'pp_config'\nx: 1"


def test_a_meta_gets_its_arguments_as_nodes(write, lab):
    config = load_config(write("-- set x = 1\nseen: !meta:lab:Thing {obj: !call:lab:Net [{{ x }}], width: !var 'w'}\n"))
    seen = materialize(config["seen"]).kwargs
    assert seen["obj"] == Call("singleton", "lab:Net", config["seen"].kwargs["obj"].args)
    assert seen["width"] == Var("w")


def test_it_is_written_and_shown(write):
    config = load_config(write(TAGS))
    again = Path("again.yaml")
    again.write_text(to_yaml(config))
    read = load_config(again, depth=2)
    assert (read["pair"], read["layers"]) == (config["pair"], config["layers"])
    assert read["make"].kwargs == {"latent_args": {"bias": False}}  # a variable of plain YAML has its default at once
    assert materialize(read)["plain"] == {"type": "str"}
    assert '"!var": "depth"' in to_json(config)
    assert "make: lambda torch.nn:Linear" in to_tree(config).splitlines()
    assert "plain" not in to_tree(config)


def test_the_program_builds_the_same(write):
    config = load_config(write(TAGS), depth=2)
    names = {}
    exec(to_python(config), names)
    assert isinstance(names["pair"][1], torch.nn.Linear)
    assert names["items"][0] is names["pair"][1]
    assert names["make"]().bias is None
    assert names["layers"]()[0] is not names["layers"]()[0]
    with pytest.raises(BadArgument, match="received 'depth'"):
        to_python(load_config("run.yaml"))


def test_functions_without_a_module(write):
    config = load_config(
        write(
            "-- set x = 1\n"
            "sizes: &sizes !list [3, 1, 2]\n"
            "by_name: &by_name !dict {a: 1, b: 2}\n"
            "length: !call:len [ *sizes ]\n"
            "last: !call:getitem [ *sizes, -1 ]\n"
            "keys: !call:list [ !call:keys [ *by_name ] ]\n"
            "width: !call:getattr [ !call:torch.nn:Linear [4, 8], 'out_features' ]\n"
            "made: !call:call [ !partial:torch.nn:Linear [4], 8 ]\n"
        )
    )
    built = materialize(config)
    assert (built["length"], built["last"], built["keys"], built["width"]) == (3, 2, ["a", "b"], 8)
    assert built["made"].out_features == 8
    names = {}
    exec(to_python(config), names)
    assert (names["length"], names["last"], names["keys"], names["width"]) == (3, 2, ["a", "b"], 8)


def test_templates_know_paths_and_times(write):
    lines = [
        "-- set path = joinpath('a', '..', 'b', 'model.py')",
        "path: {{ normpath(path) }}",
        "name: {{ modname_from_path(path) }}",
        "parts: {{ splitext(basename(path)) | list | toyaml }}",
        "here: {{ getcwd() }}",
        'when: "{{ isotime() }}"',
        "nothing: {{ missing | toyaml(none) }}",
        "many: {{ {'b': [1, 'x']} | toyaml }}",
    ]
    text = "\n".join(lines)
    config = load_config(write(text))
    assert (config["path"], config["name"], config["parts"]) == ("b/model.py", "model", ["model", ".py"])
    assert config["here"] == str(Path.cwd())
    assert len(config["when"]) == len("2026-01-01T00:00:00")
    assert (config["nothing"], config["many"]) == (None, {"b": [1, "x"]})


@pytest.mark.parametrize("expression", ["joinpath('a', missing)", "missing | toyaml"])
def test_an_undefined_variable_is_named(write, expression):
    with pytest.raises(BadArgument, match="missing"):
        load_config(write(f"-- set x = 1\na: {{{{ {expression} }}}}\n"))


@pytest.mark.parametrize("expression", ["now.__globals__", "joinpath.__globals__['os']", "uname", "repr.__self__"])
def test_the_functions_open_no_door(write, expression):
    with pytest.raises(BadArgument):
        load_config(write(f'-- set x = 1\na: "{{{{ {expression} }}}}"\n'))


def test_errors_name_the_line_of_the_file(write):
    write("-- set x = 1\n[model]\n## note\nwidth: {{ nothing }}\n", "base.yaml")
    with pytest.raises(BadArgument, match=r"base.yaml:4"):
        load_config(write("-- extends 'base.yaml'\n"))
    with pytest.raises(BadArgument, match=r"run.yaml:2"):
        load_config(write("-- set x = 1\n-- bloc a\n"))


def test_plain_yaml_has_the_new_tags_too(write):
    config = load_config(
        write("a: !tuple [1, 2]\nb: !call:torch.nn:Linear {arg0: 2, arg1: 3}\nc: !lambda:torch.nn:ReLU\n")
    )
    built = materialize(config)
    assert built["a"] == (1, 2)
    assert built["b"].out_features == 3
    assert built["c"]() is not built["c"]()
