"""Building: the registry, sections with `type`, tags, shared objects, and wrong arguments."""

import functools
import importlib
from pathlib import Path

import pytest
import torch

import toys
from trainformer.config import REGISTRY, Call, Config, Registry, build_from_cfg, load_config, materialize
from trainformer.core.errors import BadArgument, MissingDependency
from trainformer.mini import BaseTrainer, CheckpointingHook, ProgressHook


@pytest.fixture
def registry(monkeypatch):
    """The global registry, empty for one test."""
    monkeypatch.setattr(REGISTRY, "_things", {})
    return REGISTRY


# -- the registry --------------------------------------------------------------------------------------------


def test_names_for_classes_and_functions():
    registry = Registry("models")

    @registry.register()
    class First: ...

    @registry.register("other")
    def second(): ...

    @registry.register
    class Third: ...

    assert (registry["First"], registry["other"], registry["Third"]) == (First, second, Third)
    assert (list(registry), len(registry), "second" in registry) == (["First", "other", "Third"], 3, False)
    with pytest.raises(BadArgument, match=r"a name in the models, received 'Fist'. Did you mean 'First'"):
        registry["Fist"]
    with pytest.raises(BadArgument, match="a class or function to register as 'x'"):
        registry.register("x")(3)
    with pytest.raises(BadArgument, match="would hide"):
        registry.register("torch.optim.AdamW")(First)


def test_a_name_is_unique_but_a_module_may_be_reloaded(lab, write):
    registry = Registry()
    registry.register()(lab.Net)
    registry.register()(lab.Net)
    again = importlib.reload(lab)
    registry.register()(again.Net)
    assert registry["Net"] is again.Net
    with pytest.raises(BadArgument, match=r"received 'Net' for lab\.Trainer: it is lab\.Net"):
        registry.register("Net")(lab.Trainer)
    assert registry["Net"] is again.Net


# -- the example of mini -------------------------------------------------------------------------------------

TRAIN = """
config = {
    "trainer": {
        "type": "MyTrainer",
        "max_steps": 10_000,
        "grad_clip": 1.0,
        "mixed_precision": "bf16",
        "gradient_accumulation_steps": 4,
        "workspace": "./runs/experiment_1",
        "device": "cpu",
    },
    "data": {"type": "MyData", "batch_size": 32, "num_workers": 4},
    "model": {"type": "MyModel", "hidden_size": 128},
    "optimizer": {"type": "torch.optim.AdamW", "lr": 3e-4},
}
"""


def test_the_example_of_mini(write, registry):
    """As printed in the plan, except for the device, and with data and a model, which it leaves open."""

    @registry.register()
    class MyTrainer(BaseTrainer):
        def __init__(self, data_cfg, model_cfg, optimizer_cfg, **kwargs):
            super().__init__(**kwargs)
            self.data_cfg = data_cfg
            self.model_cfg = model_cfg
            self.optimizer_cfg = optimizer_cfg

        def build_data_loader(self):
            return build_from_cfg(self.data_cfg, recursive=True)

        def build_model(self):
            model = build_from_cfg(self.model_cfg, recursive=True)
            return model.to(self.device)

        def build_optimizer(self):
            return build_from_cfg(
                self.optimizer_cfg,
                params=self.model.parameters(),
            )

        def forward(self, input):
            x, y = input
            x, y = x.to(self.device), y.to(self.device)
            logits = self.model(x)
            loss = torch.nn.functional.cross_entropy(logits, y)
            acc = (logits.argmax(1) == y).float().mean().item()
            return loss, {"accuracy": acc}

        def build_hooks(self):
            return [
                ProgressHook(interval=10, with_records=True),
                CheckpointingHook(interval=1000, path=self.workspace / "checkpoints"),
            ]

    @registry.register()
    class MyModel(torch.nn.Sequential):
        def __init__(self, hidden_size):
            super().__init__(torch.nn.Linear(8, hidden_size), torch.nn.ReLU(), torch.nn.Linear(hidden_size, 4))

    @registry.register("MyData")
    def data(batch_size, num_workers):
        samples = torch.utils.data.TensorDataset(*toys.classes(320, inputs=8, dtype=torch.float32))
        return torch.utils.data.DataLoader(samples, batch_size=batch_size, num_workers=num_workers)

    cfg = load_config(write(TRAIN, "configs/train.py"), ["trainer.max_steps=12", "data.num_workers=0"])
    trainer = build_from_cfg(cfg["trainer"], recursive=True)
    assert trainer.model_cfg is cfg["model"]
    assert (trainer.max_steps, trainer.grad_clip, trainer.gradient_accumulation_steps) == (12, 1.0, 4)
    trainer.train()
    assert trainer.step == 12
    assert trainer.model[0].weight.shape == (128, 8)
    assert type(trainer.optimizer) is torch.optim.AdamW
    assert trainer.optimizer.param_groups[0]["lr"] == 3e-4
    assert trainer.optimizer.param_groups[0]["params"][0] is trainer.model[0].weight
    assert {state["step"].item() for state in trainer.optimizer.state.values()} == {12}  # it really was used
    assert Path("runs/experiment_1/checkpoints/checkpoint_step_12.pt").is_file()


def test_sections_of_the_root(lab, write):
    config = load_config(
        write("t: {type: lab.Trainer}\nmodel: {type: nowhere.X}\noptimizer: !factory:lab:Thing {a: 1}\n")
    )
    trainer = build_from_cfg(config["t"])
    assert trainer.model_cfg is config["model"]
    assert isinstance(trainer.optimizer_cfg, Call)
    assert build_from_cfg(trainer.optimizer_cfg).kwargs == {"a": 1}
    assert build_from_cfg(config["t"], model_cfg=3).model_cfg == 3
    own = load_config("run.yaml", ["+t.model_cfg=5"])
    assert build_from_cfg(own["t"]).model_cfg == 5
    assert materialize([own["t"]])[0].optimizer_cfg is own["optimizer"]
    del config["optimizer"]
    with pytest.raises(BadArgument, match=r"lab.Trainer needs \(run.yaml:1\), also optimizer_cfg.*section 'optimizer'"):
        build_from_cfg(config["t"])
    with pytest.raises(BadArgument, match="also model_cfg, optimizer_cfg"):
        build_from_cfg({"type": "lab.Trainer"})


# -- sections with type --------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", ["torch.nn.Linear", "torch.nn:Linear", "torch.nn.modules.linear:Linear"])
def test_paths(path):
    layer = build_from_cfg({"type": path, "in_features": 2, "out_features": 3, "bias": False})
    assert (type(layer), layer.weight.shape, layer.bias) == (torch.nn.Linear, (3, 2), None)


def test_class_methods_and_objects_as_type(lab):
    assert build_from_cfg({"type": "lab.Net.wide", "depth": 5}).depth == 5
    assert build_from_cfg({"type": "lab:Net.wide"}).hidden_size == 1024
    assert build_from_cfg({"type": lab.Net, "hidden_size": 3}).hidden_size == 3


def test_sections_in_sections(lab):
    head = {"type": "lab.Thing", "parts": [{"type": "lab.Thing", "n": 1}, ({"type": "lab.Thing"}, 2)], "data": {"x": 1}}
    cfg = {"type": "lab.Net", "hidden_size": 8, "head": head}
    net = build_from_cfg(cfg)
    parts = net.head.kwargs["parts"]
    assert [type(part) for part in parts] == [lab.Thing, tuple]
    assert (parts[0].kwargs, type(parts[1][0]), parts[1][1], net.head.kwargs["data"]) == (
        {"n": 1},
        lab.Thing,
        2,
        {"x": 1},
    )
    assert type(parts) is list
    assert type(net.head.kwargs["data"]) is dict
    assert build_from_cfg(cfg, recursive=False).head == head
    config = Config({"n": cfg, "c": Call("singleton", "lab:Thing")})
    assert build_from_cfg(config["n"], False).head is config["n"]["head"]
    assert build_from_cfg({"type": "lab.Thing", "x": config["c"]}, False).kwargs["x"] is config["c"]
    assert cfg["head"] is head


def test_extra_arguments_are_passed_unchanged_and_override(lab):
    section = {"type": "lab.Broken"}
    thing = build_from_cfg({"type": "lab.Thing", "a": section, "b": 1}, a=section, c={"d": section})
    assert thing.kwargs == {"a": section, "b": 1, "c": {"d": section}}
    call = Call("factory", "lab:Net", args=[1, 2, 3])
    net = build_from_cfg(call, depth=7)
    assert (net.hidden_size, net.depth, net.head) == (1, 7, 3)
    assert build_from_cfg(call, hidden_size=9, head=4).__dict__ == {"hidden_size": 9, "depth": 2, "head": 4}
    with pytest.raises(BadArgument, match=r"an argument that lab:Net takes, received 'dept'. Did you mean 'depth'"):
        build_from_cfg(call, dept=7)


def test_data_that_has_a_key_type(lab, write):
    config = load_config(write("a: !dict {type: linear, factor: 2}\nb: {type: 3}\nc: !factory:lab:Thing {type: x}\n"))
    built = materialize(config)
    assert (built["a"], built["b"]) == ({"type": "linear", "factor": 2}, {"type": 3})
    assert built["c"].kwargs == {"type": "x"}
    with pytest.raises(BadArgument, match=r"something registered.*received 'linear'.*!dict"):
        materialize({"a": {"type": "linear"}})


@pytest.mark.parametrize(
    ("section", "match"),
    [
        ("hidden_size: 1\n  dpth: 3", r"lab\.Net takes \(run.yaml:4\), received 'dpth'. Did you mean 'depth'"),
        ("hidden_size: 1\n  zzz: 3", "It takes: hidden_size, depth, head"),
        ("depth: 1", r"lab\.Net needs \(run.yaml:2\), also hidden_size, received \['depth'\]"),
        (
            "hidden_size: {type: lab.Broken}",
            r"lab\.Broken to be built \(run.yaml:3\), received RuntimeError: no such size",
        ),
        ("hidden_size: {type: lab.Nett}", r"a name in lab \(run.yaml:3\), received 'Nett'. Did you mean 'Net'"),
        ("hidden_size: {type: lab.BUILT}", r"a class or function \(run.yaml:3\), received 'lab.BUILT'. It is a list"),
        ("hidden_size: {type: lab.nn.Net}", "a name in lab"),
        ("hidden_size: {type: 'lab.nn:Net'}", "a module that can be imported.*received 'lab.nn'"),
        ("hidden_size: {type: Net}", "something registered"),
        ("hidden_size: {type: lab..Net}", "a path such as"),
        ("hidden_size: {type: 'a b.c'}", "a path such as"),
    ],
)
def test_errors_name_the_line(lab, write, section, match):
    config = load_config(write(f"net:\n  type: lab.Net\n  {section}\n"))
    with pytest.raises(BadArgument, match=match):
        build_from_cfg(config["net"])


def test_positional_arguments_are_checked(lab, write):
    config = load_config(
        write("a: !factory:lab:Net [1, 2, 3, 4]\nb: !factory:lab:Net\n  args: [1]\n  kwargs: {hidden_size: 2}\n")
    )
    with pytest.raises(BadArgument, match=r"at most 3 positional arguments of lab:Net \(run.yaml:1\), received 4"):
        build_from_cfg(config["a"])
    with pytest.raises(BadArgument, match=r"each argument of lab:Net once \(run.yaml:4\), received 'hidden_size'"):
        build_from_cfg(config["b"])


def test_a_section_that_does_not_say_what_to_build(write):
    config = load_config(write("data: {batch_size: 32}\nlist: [1]"))
    with pytest.raises(
        BadArgument, match=r"what to build \(run.yaml:1\), received \['batch_size'\]. Add the key `type`"
    ):
        build_from_cfg(config["data"])
    with pytest.raises(BadArgument, match="what to build"):
        build_from_cfg(config["list"])
    with pytest.raises(BadArgument, match="what to build"):
        build_from_cfg("torch.nn.ReLU")


def test_a_missing_package_keeps_its_pip_command(lab, write, registry):
    @registry.register()
    def needs():
        raise MissingDependency("pip install x")

    with pytest.raises(MissingDependency, match="pip install x"):
        build_from_cfg({"type": "needs"})


def test_a_cycle_made_in_python():
    section = {"type": "torch.nn.Sequential"}
    section["self"] = [section]
    with pytest.raises(BadArgument, match="contains itself"):
        materialize(section)


# -- tags ----------------------------------------------------------------------------------------------------

TAGS = """
one: &one !singleton:lab:Thing@first [1]
copies: [*one, *one]
many: &many !factory:lab:Thing
  of: *one
  fresh: !factory:lab:Thing
twice: [*many, *many]
later: &later !partial:lab:Thing
  args: [*one]
  kwargs: {a: 1}
both: &both !list:@both [*one, {type: lab.Thing, x: *one}]
pair: {x: *both, y: *both, z: &plain [1]}
plain: *plain
empty: [!list , !dict , !list:@a , !dict:@b , !singleton:lab.Thing ]
"""


def test_shared_objects_are_built_once(lab, write):
    config = load_config(write(TAGS))
    built = materialize(config)
    one = built["one"]
    assert one.args == (1,)
    assert built["copies"] == [one, one]
    first, second = built["twice"]
    assert len({first, second, built["many"]}) == 3
    assert first.kwargs["of"] is second.kwargs["of"] is one
    assert first.kwargs["fresh"] is not second.kwargs["fresh"]
    assert isinstance(built["later"], functools.partial)
    assert (built["later"](2, b=3).args, built["later"](b=3).kwargs) == ((one, 2), {"a": 1, "b": 3})
    assert built["both"] is built["pair"]["x"] is built["pair"]["y"]
    assert built["both"][1].kwargs["x"] is one
    assert built["pair"]["z"] is not built["plain"]
    assert built["empty"][:4] == [[], {}, [], {}]
    assert (built["empty"][4].args, built["empty"][4].kwargs) == ((), {})
    assert type(built) is dict
    assert sum(thing.args == (1,) for thing in lab.BUILT) == 1
    assert materialize(config)["one"] is not one


def test_a_partial_may_lack_arguments_but_not_have_others(lab, write):
    config = load_config(write("a: !partial:lab:Net {depth: 3}\nb: !partial:lab:Net {dpth: 3}"))
    assert materialize(config["a"])(4).depth == 3
    with pytest.raises(BadArgument, match=r"lab:Net takes \(run.yaml:2\), received 'dpth'"):
        materialize(config["b"])


def test_tags_and_sections_are_the_same(lab, write):
    write(
        "a: {type: lab.Net, hidden_size: 1, head: {type: lab.Thing}}\n"
        "b: !factory:lab.Net {hidden_size: 1, head: !factory:lab:Thing }"
    )
    config = load_config("run.yaml")
    by_section, by_tag = build_from_cfg(config["a"], depth=9), build_from_cfg(config["b"], depth=9)
    assert type(by_section) is type(by_tag) is lab.Net
    assert (by_section.depth, type(by_section.head)) == (by_tag.depth, type(by_tag.head)) == (9, lab.Thing)


def test_variables_may_be_objects_and_sections(lab, write):
    tokenizer = object()
    text = (
        'a: !var "tokenizer"\nb: !var {name: size, default: !factory:lab:Thing [1]}\n'
        "c: !var section\nd: !var pp_config\n"
    )
    section = {"type": "lab.Thing", "n": 2}
    config = load_config(write(text), tokenizer=tokenizer, section=section)
    built = materialize(config)
    assert built["a"] is tokenizer
    assert (built["b"].args, built["c"].kwargs) == ((1,), {"n": 2})
    assert built["d"] == text == config.pp_config
    assert load_config("run.yaml", variables={"size": 4, "tokenizer": 1, "section": 2})["b"] == 4
    with pytest.raises(BadArgument, match=r"received 'tokenizer'. Did you mean 'tokeniser'"):
        load_config("run.yaml", tokeniser=1)


def test_arguments_are_checked_behind_a_generic_new():
    with pytest.raises(BadArgument, match=r"trainformer\.Trainer takes, received 'learning_rat'"):
        build_from_cfg({"type": "trainformer.Trainer", "learning_rat": 1}, task=None, data=None)
    with pytest.raises(BadArgument, match=r"trainformer\.Trainer needs, also task, data"):
        build_from_cfg({"type": "trainformer.Trainer"})


def test_another_registry(lab):
    mine = Registry()
    mine.register("thing")(lab.Thing)
    assert type(materialize({"type": "thing"}, registry=mine)) is lab.Thing
    with pytest.raises(BadArgument, match="something registered"):
        materialize({"type": "thing"})
