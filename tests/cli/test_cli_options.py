"""Options compared with the objects that the same arguments build in Python, for every task, adapter and setting."""

import dataclasses
import re
import sys
import textwrap
from pathlib import Path

import jsonargparse
import pytest
import torch
from cli_toys import Clash, Plain, parsed

from trainformer import Trainer, adapters, tasks
from trainformer.callbacks import EMA, EarlyStopping
from trainformer.cli import app
from trainformer.cli.components import REQUIRED, default_text, find_component, find_components
from trainformer.cli.options import OptionTable, Word, as_flag
from trainformer.config import materialize
from trainformer.core import plugins
from trainformer.core.errors import BadArgument
from trainformer.tasks.vision.ssl.options import DEFAULTS

CLASSES = [
    name
    for name in tasks.__all__
    if dataclasses.is_dataclass(getattr(tasks, name)) and name not in ("DatasetInfo", "OptimizerConfig")
]
METHODS = ["simclr", "moco", "byol", "dino", "mae"]
ADAPTERS = ["LoRA", "QLoRA", "PrefixTuning"]


def task_of(*words):
    return materialize(parsed(*words, "--data=d").kwargs["task"], trust=("cli_toys",))


def settings_of(*words):
    """The arguments of the trainer except for the task."""
    kwargs = dict(parsed("--task=cli_toys:Fit", *words).kwargs)
    return {name: materialize(value) for name, value in kwargs.items() if name != "task"}


def fields_of(thing):
    return {f.name: getattr(thing, f.name) for f in dataclasses.fields(thing)}


def refused(*words, capsys):
    with pytest.raises(SystemExit) as caught:
        app.main(["train", *words])
    assert caught.value.code == 2
    text = capsys.readouterr().err
    assert "Traceback" not in text
    return " ".join(text.split("error: ", 1)[1].split())


# -- the plan's commands -----------------------------------------------------------------------------------


def test_the_plans_commands_build_the_same_objects_as_python():
    line = "--task=CausalLM --model=gpt2 --data=data/text --adapter=LoRA --r=8"
    trainer = parsed(*line.split())
    assert fields_of(materialize(trainer.kwargs["task"])) == fields_of(
        tasks.CausalLM("gpt2", adapter=adapters.LoRA(r=8))
    )
    assert trainer.target == "trainformer:Trainer"
    assert {name: value for name, value in trainer.kwargs.items() if name != "task"} == {"data": "data/text"}

    line = "--task=MetricLearning --model=efficientnet_b0 --data=data/sop --loss=arcface"
    trainer = parsed(*line.split())
    assert fields_of(materialize(trainer.kwargs["task"])) == fields_of(
        tasks.MetricLearning("efficientnet_b0", loss="arcface")
    )

    line = "--task=SSL.dino --model=vit_small --data=data/imagenet --epochs=100"
    trainer = parsed(*line.split())
    assert fields_of(materialize(trainer.kwargs["task"])) == fields_of(tasks.SSL.dino("vit_small"))
    assert trainer.kwargs["epochs"] == 100  # given on purpose, though it is the default


# -- every field is an option ------------------------------------------------------------------------------


def components():
    yield from (("task", name, getattr(tasks, name)) for name in CLASSES)
    yield from (("adapter", name, getattr(adapters, name)) for name in ADAPTERS)
    yield "trainer", "Trainer", Trainer


def options_of(role, name):
    return (find_components("CausalLM", None)[-1] if role == "trainer" else find_component(role, name)).options


@pytest.mark.parametrize(("role", "name", "kind"), components())
def test_every_field_has_an_option_with_its_default(role, name, kind):
    options = options_of(role, name)
    fields = {f.name: f for f in dataclasses.fields(kind) if f.init and f.name not in ("task", "adapter")}
    assert options.keys() == fields.keys()
    for field in fields.values():
        default = field.default
        if field.default_factory is not dataclasses.MISSING:
            default = field.default_factory()
        assert options[field.name].default == (REQUIRED if default is dataclasses.MISSING else default)


@pytest.mark.parametrize(("role", "name", "kind"), components())
def test_a_typed_default_equals_the_default(role, name, kind):
    chosen = [find_component(role, name)] if role != "trainer" else [find_components("CausalLM", None)[-1]]
    table = OptionTable(chosen, {})
    given = {option: "d" if option.is_required else default_text(option.default) for option in table.by_key.values()}
    values = table.values(Word(f"--{option.key}", option.key, text) for option, text in given.items() if text)
    assert len(values[role]) > 1
    for option in given:
        if not option.is_required and option.default != "":
            value = values[role][option.name]
            assert value == option.default or tuple(value) == option.default, option


@pytest.mark.parametrize("method", METHODS)
def test_a_self_supervised_method_has_only_its_own_options(method):
    options = options_of("task", f"SSL.{method}")
    make = getattr(tasks.SSL, method)
    own = {name: value for name, value in DEFAULTS[method].items() if value is not None}
    assert own.keys() < options.keys()
    assert {name: options[name].shown for name in own} == {name: default_text(value) for name, value in own.items()}
    assert fields_of(make(**own)) == fields_of(make())
    others = {f.name for f in dataclasses.fields(tasks.SSL) if f.init} - options.keys() - {"method"}
    assert others
    for name in others:
        with pytest.raises(BadArgument):
            make(**{name: 1})


# -- spellings ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "name", "value"),
    [
        (["--batch-size", "4"], "batch_size", 4),
        (["--batch_size=4"], "batch_size", 4),
        (["--trainer.batch-size=4"], "batch_size", 4),
        (["--lr=1e-3"], "lr", 0.001),
        (["--lr=1"], "lr", 1.0),
        (["--log-every=10"], "log_every", 10),
        (["--log-every=10min"], "log_every", "10min"),
        (["--log-every=None"], "log_every", None),
        (["--val-split=2"], "val_split", 2),
        (["--val-split=0.5"], "val_split", 0.5),
        (["--name=7"], "name", "7"),
        (["--name=null"], "name", None),
        (["--log=none"], "log", "none"),
        (["--log=[console, tensorboard]"], "log", ["console", "tensorboard"]),
        (["--scheduler=None"], "scheduler", None),
        (["--optimizer={name: adamw, betas: [0.9, 0.95]}"], "optimizer", {"name": "adamw", "betas": [0.9, 0.95]}),
        (["--data=2024"], "data", "2024"),
        (["--load-components=model"], "load_components", ["model"]),
        (["--load-components=model,task"], "load_components", ["model", "task"]),
        (["--load-components", "[model]"], "load_components", ["model"]),
        (["--save-async"], "save_async", True),
        (["--save-async", "--epochs=3"], "save_async", True),
        (["--save-async=true"], "save_async", True),
        (["--save-async", "false"], "save_async", False),
        (["--no-save-async"], "save_async", False),
        (["--trainer.no-save-async"], "save_async", False),
        (["--no-exit-on-signal"], "exit_on_signal", False),
        (["--pin-memory=None"], "pin_memory", None),
        (["--compile"], "compile", True),
        (["--compile=max-autotune"], "compile", "max-autotune"),
        (["--compile", "max-autotune"], "compile", "max-autotune"),
        (["--compile.mode=default", "--compile.dynamic=true"], "compile", {"mode": "default", "dynamic": True}),
        (["--epochs=3", "--epochs=5"], "epochs", 5),
        (["--gradient-clip=-1"], "gradient_clip", -1.0),
    ],
)
def test_values_are_read_by_their_types(words, name, value):
    found = settings_of("--data=8", *words)[name]
    assert found == value
    assert type(found) is type(value)


def test_values_of_tasks_and_adapters():
    task = task_of(
        "--task=MetricLearning", "--recall-at=1,2", "--image-size=[32, 48]", "--no-pretrained", "--margin=0.3"
    )
    by_hand = tasks.MetricLearning(recall_at=(1, 2), image_size=(32, 48), pretrained=False, margin=0.3)
    assert fields_of(task) == fields_of(by_hand)
    task = task_of("--task=ImageClassification", "--class-weights=balanced", "--tta=flip", "--topk=[1, 3]", "--tta=2")
    assert fields_of(task) == fields_of(tasks.ImageClassification(class_weights="balanced", tta=2, topk=[1, 3]))
    line = "--task=CausalLM --adapter=LoRA --target-modules=[c_attn] --init=gaussian --trainable-token-indices=[3,4]"
    task = task_of(*line.split(), "--packing", "--model-kwargs.rope.type=linear", "--model-kwargs.depth=2")
    made = adapters.LoRA(target_modules=["c_attn"], init="gaussian", trainable_token_indices=[3, 4])
    options = {"rope": {"type": "linear"}, "depth": 2}
    assert fields_of(task) == fields_of(tasks.CausalLM(adapter=made, packing=True, model_kwargs=options))


def test_no_adapter_can_be_given_explicitly():
    assert parsed("--task=CausalLM", "--data=d", "--adapter=None") == parsed("--task=CausalLM", "--data=d")


def test_a_class_knows_which_options_were_given():
    # A recipe does not override what was passed, even if it is the default.
    task = task_of("--task=ImageClassification", "--recipe=modern", "--mixup=0.0")
    by_hand = tasks.ImageClassification(recipe="modern", mixup=0.0)
    assert task.mixup == 0.0
    assert fields_of(task) == fields_of(by_hand)
    assert task_of("--task=ImageClassification", "--recipe=modern").mixup > 0


# -- objects -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        "EarlyStopping(patience=3), EMA(decay=0.9, warmup=false)",
        "[EarlyStopping(patience=3), EMA(decay=0.9, warmup=False)]",
        "[{type: trainformer.callbacks.EarlyStopping, patience: 3}, {type: trainformer.callbacks:EMA, decay: 0.9, "
        "warmup: false}]",
        "[!factory:trainformer.callbacks:EarlyStopping {patience: 3}, "
        "!factory:trainformer.callbacks:EMA {decay: 0.9, warmup: false}]",
    ],
)
def test_callbacks_can_be_written(text):
    stopping, ema = settings_of("--data=8", f"--callbacks={text}")["callbacks"]
    assert (type(stopping), stopping.patience) == (EarlyStopping, 3)
    assert (type(ema), ema.decay, ema.warmup) == (EMA, 0.9, False)


def test_one_callback_by_its_name():
    (stopping,) = settings_of("--data=8", "--callbacks=EarlyStopping")["callbacks"]
    assert (type(stopping), stopping.patience) == (EarlyStopping, EarlyStopping().patience)


@pytest.fixture
def plugin(tmp_path, monkeypatch):
    """An installed package that registers a task and a callback."""
    code = """
        from cli_toys import Fit
        class Plane(Fit): pass
        class Beep:
            def __init__(self, volume=1): self.volume = volume
            def on_train_end(self, trainer): print("beep" * self.volume)
    """
    (tmp_path / "planes.py").write_text(textwrap.dedent(code))
    info = tmp_path / "planes-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: planes\nVersion: 1.0\n")
    points = "[trainformer.tasks]\nPlane = planes:Plane\n[trainformer.callbacks]\nbeep = planes:Beep\n"
    (info / "entry_points.txt").write_text(points)
    monkeypatch.syspath_prepend(str(tmp_path))
    plugins._registered.cache_clear()
    yield
    plugins._registered.cache_clear()
    sys.modules.pop("planes", None)


def test_tasks_and_callbacks_of_plugins(plugin, capsys):
    line = "train --task=Plane --width=3 --data=8 --max-steps=1 --name=plane --log=none --callbacks=beep(volume=2)"
    assert app.main(line.split()) == 0
    assert capsys.readouterr().out == "beepbeep\n"
    assert "!factory:planes:Plane" in Path("runs/plane/recipe.yaml").read_text()
    assert app.main(["tasks"]) == 0
    listed = capsys.readouterr().out
    assert "Plane " in listed
    assert "beep " in listed


def test_a_module_is_built_by_the_rules_of_configs():
    task = task_of("--task=MetricLearning", "--loss={type: torch.nn.CrossEntropyLoss, label_smoothing: 0.1}")
    assert task.loss.label_smoothing == 0.1
    Path("here").mkdir()
    with pytest.raises(BadArgument, match="importing it would run code of 'os'"):
        task_of("--task=MetricLearning", "--loss={type: os.rmdir, path: here}")
    assert Path("here").is_dir()


# -- ambiguous and unknown options ------------------------------------------------------------------------------------


def test_an_ambiguous_name_must_be_spelled_in_full(capsys):
    clash = ["--task=cli_toys:Clash", "--data=8"]
    assert (
        refused(*clash, "--lr=1", capsys=capsys)
        == "--lr is an option of the task and the trainer. Write --task.lr or --trainer.lr."
    )
    text = refused(*clash, "--adapter=LoRA", "--dropout=0.1", capsys=capsys)
    assert "Write --task.dropout or --adapter.dropout." in text
    trainer = parsed(*clash, "--adapter=LoRA", "--task.lr=2", "--trainer.lr=0.5", "--adapter.dropout=0.25")
    task = materialize(trainer.kwargs["task"], trust=("cli_toys",))
    assert (type(task), task.lr, task.dropout, task.adapter) == (Clash, 2.0, 0.5, adapters.LoRA(dropout=0.25))
    assert trainer.kwargs["lr"] == 0.5
    assert parsed(*clash, "--dropout=0.1").kwargs["task"].kwargs == {"dropout": 0.1}  # no adapter, no question


def test_a_class_that_is_not_a_dataclass(capsys):
    plain = ["--task=cli_toys:Plain", "--data=8"]
    text = refused(*plain, capsys=capsys)
    assert text == "Expected --kind (YAML), --rate (float) for cli_toys:Plain, received none."
    task = task_of(*plain, "--kind=[1, x]", "--depth=3", "--rate=2", "--names=[a, b]")
    assert (type(task), task.kind, task.depth, task.rate, task.names) == (Plain, [1, "x"], 3, 2.0, ["a", "b"])
    assert (
        refused(*plain, "--kind=1", "--rate=1", "--depth=deep", capsys=capsys)
        == "Expected --depth to be int, received 'deep'."
    )


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("--data=d", "expected --task=TASK, received none; there is CLIP, CPO, CausalLM"),
        ("--tas=DPO --data=d", "expected --task=TASK, received --tas; there is"),
        ("--task --lr=1 --data=d", "expected --task=TASK, received none"),
        ("--task=CausalML --data=d", "received 'CausalML'. Did you mean 'CausalLM'?"),
        ("--task=SSL.dyno --data=d", "Did you mean 'SSL.dino'"),
        ("--task=no_such_module:Task --data=d", "Expected --task to name a module that exists"),
        ("--task=../toys:Task --data=d", "Expected --task to name your own class as module:Class"),
        ("--task=cli_toys:Fitt --data=d", "Did you mean 'Fit'?"),
        ("--task=DPO", "Expected --data (str or object) to train on, received none."),
        ("--task=DPO --data=d --bta=1", "There is no option --bta. Did you mean --beta"),
        ("--task=DPO --data=d --epoch=1", "Here it is --epochs"),
        ("--task=DPO --data=d --trainer.epoch=1", "Here it is --epochs"),
        ("--task=DPO --data=d --learning-rate=1", "There is no option --learning-rate. Here it is --lr."),
        ("--task=DPO --data=d --lerning-rate=1", "There is no option --lerning-rate. Did you mean --lr?"),
        ("--task=DPO --data=d --num-epochs=1", "There is no option --num-epochs. Here it is --epochs."),
        ("--task=DPO --data=d --batch=1", "There is no option --batch. Here it is --batch-size."),
        ("--task=DPO --data=d --qqqq=1", "There is no option --qqqq. `--task=DPO --help` lists all."),
        ("--task=DPO --data=d --r=1", "--r is an option of an adapter: add --adapter=LoRA."),
        ("--task=DPO --data=d --adapter=LoRA --num-virtual-tokens=1", "is an option of PrefixTuning, not of LoRA."),
        ("--task=DPO --data=d --margin=1", "--margin is an option of MetricLearning, not of DPO."),
        ("--task=SSL.dino --data=d --mask-ratio=0.5", "--mask-ratio is an option of SSL.mae, not of SSL.dino."),
        ("--task=DPO --data=d --adapter=Lora", "Did you mean 'LoRA'?"),
        ("--task=MetricLearning --data=d --adapter=LoRA", "MetricLearning takes no adapter. Tasks that do: CLIP,"),
        ("--task=DPO --data=d --lr=fast", "Expected --lr to be float, received 'fast'."),
        ("--task=DPO --data=d --epochs=1.5", "Expected --epochs to be int, received '1.5'."),
        (
            "--task=DPO --data=d --save-strategy=step",
            "to be steps|epochs|seconds, received 'step'. Did you mean 'steps'",
        ),
        ("--task=DPO --data=d --epochs", "Expected --epochs to be int, received nothing."),
        ("--task=DPO --data=d --epochs --lr=1", "Expected --epochs to be int, received nothing."),
        ("--task=DPO --data=d --no-save-async=1", "Expected --no-save-async without a value, received '1'."),
        ("--task=DPO --data=d --no-epochs", "There is no option --no-epochs. Did you mean --epochs"),
        ("--task=DPO data/text", "Expected options such as --epochs=3, received 'data/text'."),
        ("--task=DPO --data=d --callbacks=EarlyStop", "Did you mean 'EarlyStopping'?"),
        ("--task=DPO --data=d --callbacks={type:", "--callbacks"),
    ],
)
def test_wrong_options_are_refused_with_a_hint(words, says, capsys):
    assert says in refused(*words.split(), capsys=capsys)


# -- help --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("width", [80, 120])
def test_the_help_of_a_task_lists_all_options(width, monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", str(width))
    with pytest.raises(SystemExit) as caught:
        app.main(["train", "--task=CausalLM", "--adapter=LoRA", "--help"])
    assert caught.value.code == 0
    text = capsys.readouterr().out
    assert max(map(len, text.splitlines())) <= width
    shown = set(re.findall(r"--[a-z0-9-]+", text))
    chosen = find_components("CausalLM", "LoRA")
    assert {as_flag(name) for component in chosen for name in component.options} <= shown
    squeezed = " ".join(text.split())
    assert "--model TEXT, --model-name TEXT" in squeezed
    assert "--r N Rank. Each adapted layer of size (n, m) gets r * (n + m) parameters. (int; default: 8)" in squeezed
    assert "--max-steps N overrides epochs (int or None; default: None)" in squeezed
    assert [line for line in text.splitlines() if line.endswith(":") and not line.startswith(" ")][:4] == [
        "options:", "what to train:", "task CausalLM:", "adapter LoRA:",
    ]  # fmt: skip


def test_the_meaning_of_a_field_is_the_comment_beside_it():
    assert options_of("trainer", "Trainer")["max_steps"].about == "overrides epochs"
    assert options_of("trainer", "Trainer")["max_steps"].section == "Length and batches"
    assert options_of("task", "cli_toys:Fit")["width"].about == "of the hidden layer"


# -- what jsonargparse cannot read ------------------------------------------------------------------------------------


@dataclasses.dataclass
class Base:
    model: "only_for_type_checkers.Model" = None  # noqa: F821


@dataclasses.dataclass
class Annotated(Base):
    width: "int" = 3


def test_the_reasons_why_parameters_are_read_here_still_hold(monkeypatch):
    """docs/design.md names them. If this fails, `add_class_arguments` may be able to replace `components.py`."""

    def added(kind):
        parser = jsonargparse.ArgumentParser(exit_on_error=False)
        return parser, parser.add_class_arguments(kind, "x", fail_untyped=False)

    assert added(Trainer)[1] == []  # it reads __new__(*args, **kwargs)
    assert added(tasks.ImageClassification)[1] == []
    # One annotation of a base class that cannot be evaluated turns off all types of the class.
    assert added(Annotated)[0].parse_args(["--x.width=long"]).x.width == "long"
    # A required parameter without a type is no longer required.
    assert added(Plain)[0].parse_args(["--x.rate=1"]).x.kind is None
    # An option that takes an object imports any module that is named.
    Path("stranger.py").write_text("import pathlib\nclass Loss: pathlib.Path('imported').touch()\n")
    parser = jsonargparse.ArgumentParser(exit_on_error=False)
    parser.add_argument("--loss", type=torch.nn.Module)
    monkeypatch.syspath_prepend(".")  # as the command does, to find the user's own task
    with pytest.raises(jsonargparse.ArgumentError):
        parser.parse_args(["--loss=stranger.Loss"])
    assert Path("imported").exists()
