"""Forgather's projects: `meta.yaml`, search paths, parts of other projects, and what they may build."""

from pathlib import Path

import pytest
import torch

from trainformer import hf
from trainformer.cli import main
from trainformer.config import Project, load_config, materialize
from trainformer.core.errors import BadArgument, DataError

LETTERS = {
    "space/forgather_workspace/defaults.yaml": (
        "-- set ns = namespace()\n"
        "searchdir:\n"
        "-- block own\n"
        "    - \"{{ joinpath(project_dir, 'templates') }}\"\n"
        "-- endblock own\n"
        "    - \"{{ joinpath(workspace_root, 'common') }}\"\n"
        "-- block names\n"
        "-- endblock names\n"
    ),
    "space/common/list_base.yaml": (
        "meta: {folder: '{{ project_dir }}'}\nmain:\n-- block items required\n<< endblock items\n"
    ),
    "space/letters/meta.yaml": (
        '-- extends "defaults.yaml"\n[names]\nname: "Letters"\ndefault_config: "short.yaml"\ndescription: "a, b, c"\n'
    ),
    "space/letters/templates/configs/short.yaml": (
        '-- extends "list_base.yaml"\n[items]\n    - a\n    - {{ second | default("b") }}\n'
    ),
    "space/letters/templates/configs/long/all.yaml": (
        '-- extends "configs/short.yaml"\n[items]\n    == super()\n    - c\n'
    ),
    "space/letters/templates/configs/plain.yaml": "main: [x]\n",
}


@pytest.fixture
def letters(write):
    for name, text in LETTERS.items():
        write(text, name)
    return "space/letters"


def test_main_is_a_list(letters):
    project = Project(project_dir=letters)
    assert project() == ["a", "b"]
    assert project("meta", "main") == ({"folder": letters}, ["a", "b"])
    assert project(["main", "nothing"]) == {"main": ["a", "b"]}
    assert project("meta", asdict=True).meta["folder"] == letters
    assert Project("long/all.yaml", letters)() == ["a", "b", "c"]
    assert Project("", letters, second="z")() == ["a", "z"]
    assert project.config_name == "short.yaml"
    assert project.meta.name == "Letters"
    assert list(project.meta.configs()) == ["long/all.yaml", "plain.yaml", "short.yaml"]
    assert project.meta.workspace_root == str(Path("space").absolute())


def test_load_config_reads_folders_and_files_of_projects(letters):
    assert load_config(letters)["main"] == ["a", "b"]
    assert load_config(f"{letters}/templates/configs/long/all.yaml", second="z")["main"] == ["a", "z", "c"]
    assert load_config(f"{letters}/templates/configs/plain.yaml")["main"] == ["x"]
    assert load_config(letters, ["main.0=q"])["main"] == ["q", "b"]


def test_the_command_line(letters, capsys):
    assert main(["run", letters]) == 0
    assert main(["run", f"{letters}/templates/configs/long/all.yaml", "--var", "second=z"]) == 0
    assert main(["config", "show", letters, "--preprocessed"]) == 0
    assert (
        capsys.readouterr().out
        == f"['a', 'b']\n['a', 'z', 'c']\nmeta: {{folder: '{letters}'}}\nmain:\n    - a\n    - b\n"
    )


def test_a_template_can_be_added(letters):
    project = Project(project_dir=letters)
    project.add_template("configs/short.yaml", "-- set x = 1\nmain: [{{ x }}]")
    project.load_config("short.yaml")
    assert project() == [1]


def test_what_is_missing_is_named(letters, write):
    with pytest.raises(DataError, match=r"received 'shor.yaml'. Did you mean 'short.yaml'"):
        Project("shor.yaml", letters)
    with pytest.raises(BadArgument, match=r"received 'mian'. Did you mean 'main'"):
        Project(project_dir=letters)("mian")
    with pytest.raises(DataError, match=r"a folder with meta.yaml, received 'space/common'"):
        Project(project_dir="space/common")
    write("searchdir: templates\n", "odd/meta.yaml")
    with pytest.raises(BadArgument, match=r"searchdir in .*meta.yaml to be a list"):
        Project(project_dir="odd")
    write("config_prefix: [a]\n", "odd/meta.yaml")
    with pytest.raises(BadArgument, match=r"config_prefix in .*meta.yaml to be a name"):
        Project(project_dir="odd")
    Path("odd/meta.yaml").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(DataError, match="text in UTF-8"):
        Project(project_dir="odd")


def test_a_project_without_a_workspace_or_search_path(write):
    write("name: small\n", "small/meta.yaml")
    write("main: {{ basename(workspace_root) }}\n", "small/templates/configs/only.yaml")
    assert Project(project_dir="small")() == "small"


def test_every_call_builds_new_objects_and_knows_its_variables(write, lab):
    write("name: nets\n", "nets/meta.yaml")
    text = (
        "-- set x = 1\n"
        ".define: &net !call:lab:Net [ !var 'size' ]\n"
        "net: *net\nmain: !call:lab:Thing { net: *net, text: !var 'pp_config' }\n"
    )
    write(text, "nets/templates/configs/net.yaml")
    project = Project(project_dir="nets")
    net, thing = project("net", "main", size=4)
    assert thing.kwargs["net"] is net
    assert (net.hidden_size, thing.kwargs["text"]) == (4, project.pp_config)
    assert project("net", size=5).hidden_size == 5


# -- parts of other projects -------------------------------------------------------------------------------------------


@pytest.fixture
def outer(write, letters):
    write("name: outer\n", "outer/meta.yaml")
    text = (
        "-- set other = normpath(joinpath(project_dir, '../space/letters'))\n"
        "part: &part !call:trainformer.hf:from_project\n"
        "    project_dir: {{ other }}\n    config_template: long/all.yaml\n    targets: [main, meta]\n"
        "    pp_kwargs: {second: y}\n"
        "main: !call:getitem [ *part, main ]\n"
    )
    write(text, "outer/templates/configs/run.yaml")
    return "outer"


def test_a_config_uses_parts_of_another_project(outer):
    assert Project(project_dir=outer)() == ["a", "y", "c"]
    assert materialize(load_config(outer)["part"])["meta"] == {"folder": "space/letters"}
    assert hf.from_project("space/letters", targets="main") == hf.load_from_config("space/letters")


def test_the_other_project_is_trusted_as_far_as_the_config(write, outer, lab):
    write("main: !call:collections:Counter [abc]\n", "space/letters/templates/configs/long/all.yaml")
    with pytest.raises(BadArgument, match="importing it would run code of 'collections'"):
        Project(project_dir=outer)()
    assert Project(project_dir=outer, trust=("collections",))() == {"a": 1, "b": 1, "c": 1}
    assert hf.from_project is not None
    with pytest.raises(BadArgument, match="collections"):
        hf.from_project("space/letters", "long/all.yaml")


def test_a_config_cannot_trust_anything_itself(write, letters):
    text = (
        "-- set x = 1\nmain: !call:trainformer.hf:from_project {project_dir: space/letters, pp_kwargs: {trust: [os]}}\n"
    )
    with pytest.raises(BadArgument, match="trust"):
        materialize(load_config(write(text))["main"])
    for name in ("trainformer.config:Project", "trainformer.hf:Project", "trainformer.config.project:Project"):
        with pytest.raises(BadArgument, match=r"received|Expected"):
            materialize(load_config(write(f"-- set x = 1\nmain: !call:{name} [ '', 'space/letters' ]\n"))["main"])


# -- functions that would reach everything -----------------------------------------------------------------------------

REACHING = {
    "eval": "!call:eval ['1']",
    "open": "!call:open ['x']",
    "a private name": "!call:getattr [ *net, '_modules' ]",
    "a method": "!call:getattr [ *net, 'forward' ]",
    "a class": "!call:getattr [ *net, '__class__' ]",
    "a function of a module": "!call:call [ !call:getattr [ *net, 'register_forward_hook' ], 1 ]",
    "a call of something else": "!call:call [ *net, 1 ]",
    "code by a string": "!partial:exec ['x']",
    "a program": "!lambda:subprocess:run [ls]",
    "an argument that runs code": "!call:call [ !partial:torch:load ['x'], {}, weights_only: false ]",
}


@pytest.mark.parametrize("value", REACHING.values(), ids=REACHING)
def test_what_reaches_too_far_is_refused(write, value):
    text = f"-- set x = 1\n.define: &net !call:torch.nn:Linear [2, 2]\nmain: {value}\n"
    with pytest.raises(BadArgument):
        materialize(load_config(write(text))["main"])


def test_what_a_partial_names_is_checked_before_it_is_called(write):
    config = load_config(write("-- set x = 1\nmain: !lambda:os:system [ls]\n"))
    with pytest.raises(BadArgument, match="importing it would run code of 'os'"):
        materialize(config)


def test_latent_arguments_are_checked_too(write):
    text = "-- set x = 1\nmain: !call:torch:load {arg0: x, latent_args: {weights_only: false}}\n"
    with pytest.raises(BadArgument, match="weights_only"):
        materialize(load_config(write(text))["main"])
    text = "-- set x = 1\nmain: !call:torch:load {arg0: x, weights_only: !var {name: w, default: false}}\n"
    with pytest.raises(BadArgument, match="weights_only"):
        materialize(load_config(write(text))["main"])


def test_a_user_may_trust_them(write):
    net = ".define: &net !call:torch.nn:Linear [2, 2]\n"
    text = f"-- set x = 1\n{net}main: !call:call [ !call:getattr [ *net, requires_grad_ ], false ]\n"
    config = load_config(write(text))
    with pytest.raises(BadArgument, match="--trust getattr"):
        materialize(config["main"])
    built = materialize(config["main"], trust=("getattr", "call"))
    assert isinstance(built, torch.nn.Linear)
    assert not built.weight.requires_grad


def test_methods_of_trusted_code_may_be_called(write, lab):
    made = "!call:lab:Trainer {model_cfg: 1, optimizer_cfg: 2}"
    text = f"-- set x = 1\nmain: !call:call [ !call:getattr [ {made}, train ] ]\n"
    assert materialize(load_config(write(text))["main"]) is None


# -- Forgather itself, where it is installed ---------------------------------------------------------------------------


def test_the_text_is_that_of_forgather(letters):
    theirs = pytest.importorskip("forgather.project")
    for name in ("short.yaml", "long/all.yaml", "plain.yaml"):
        expected = theirs.Project(name, letters)
        ours = Project(name, letters)
        assert ours.pp_config == expected.pp_config
        assert ours() == expected()
