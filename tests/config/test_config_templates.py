"""Templates: what Jinja does to a config, what it may not do, and the configs of the callbacks page as they are."""

import sys
from pathlib import Path

import pytest
import yaml

from trainformer.config import load_config, materialize
from trainformer.core.errors import BadArgument, MissingDependency

BASE = """\
{% block model %}
model: {type: Net, hidden_size: {{ width | default(8) }}}
{% endblock %}
{% include "parts/optimizer.yaml" %}
name: "{{ name }}"
{% for n in sizes %}
layer_{{ n }}: {{ n * 2 }}
{% endfor %}
"""


@pytest.fixture
def templates(write):
    write(BASE, "configs/base.yaml")
    write("optimizer:\n  lr: 1e-3\n", "shared/parts/optimizer.yaml")
    write(
        '{% extends "base.yaml" %}\n{% block model %}\n{{ super() }}\n'
        "more: {% if deep %}yes{% else %}no{% endif %}\n\n{% endblock %}\n",
        "configs/run.yaml",
    )


def test_extends_blocks_includes_loops_and_variables(templates):
    config = load_config("configs/run.yaml", search=["shared"], name="x", sizes=[1, 3], deep=True, width=16)
    values = {"model": {"type": "Net", "hidden_size": 16}, "more": True, "optimizer": {"lr": 1e-3}, "name": "x"}
    assert config == {**values, "layer_1": 2, "layer_3": 6}
    assert yaml.safe_load(config.pp_config).keys() == config.keys()
    lines = config.pp_config.splitlines()
    place = config.where("optimizer.lr")
    assert "lr: 1e-3" in lines[place.line - 1]
    assert str(place) == f"configs/run.yaml, line {place.line} after preprocessing"


def test_text_without_marks_passes_unchanged(write):
    text = "a: '}} %} #}'  # {x}\nb:   [1,  2]  \n\n\n"
    assert load_config(write(text)).pp_config == text
    assert str(load_config("run.yaml").where("b")) == "run.yaml:2"


def test_marks_in_raw_blocks_are_text(write):
    config = load_config(write("a: '{% raw %}{{ x }} {% y %}{% endraw %}'\nb: \"{{ '{{' }}\"\n"))
    assert config == {"a": "{{ x }} {% y %}", "b": "{{"}


@pytest.mark.parametrize(
    "value", [None, True, False, 3, 1e-05, -2.5, "text", [1, "a", 2.5], {"a": [1, None], "b": True}]
)
def test_a_variable_arrives_as_it_is(write, value):
    config = load_config(write("a: {{ x | tojson }}\nb: !var x\n"), x=value)
    assert config == {"a": value, "b": value}
    if not isinstance(value, list | dict):
        assert load_config(write("a: {{ x }}\n"), x=value) == {"a": value}


@pytest.mark.parametrize(
    "expression",
    [
        "''.__class__.__mro__",
        "''['__class__']",
        "(''|attr('__class__')).__base__.__subclasses__()",
        "lipsum.__globals__['os']",
        "cycler.__init__.__globals__",
        "self.__init__.__globals__",
        "'{0.__class__}'.format('')",
        "range.__self__",
        "namespace.__init__",
        "[].append.__self__.__class__.__base__",
    ],
)
def test_python_cannot_be_reached(write, expression):
    with pytest.raises(BadArgument, match=r"run\.yaml:2"):
        load_config(write("a: 1\nb: {{ " + expression + " }}\n"))


def test_a_template_cannot_touch_the_programs_objects(write):
    class Store:
        def wipe(self):
            raise AssertionError("called from a template")

    write("a: {{ store.wipe() }}\nb: {{ stores[0].wipe() }}")
    with pytest.raises(BadArgument, match="'store' is undefined"):
        load_config("run.yaml", store=Store(), stores=[Store()])


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("a: 1\nb: {{ width }}\n", r"run.yaml:2\): 'width' is undefined. There is: other. .*--var"),
        ("a: {{ other.x.y }}", r"run.yaml:1.*has no attribute 'x'"),
        ("a: 1\n\nb: {{ 1 / 0 }}", r"run.yaml:3\), received ZeroDivisionError"),
        ("a: 1\nb: {% if %}", "run.yaml:2"),
        ("a: 1\nb: {{ 1", "run.yaml:2"),
        ("{% block x %}\n\na: {{ zzz }}\n{% endblock %}", "run.yaml:3"),
        ("a: 1\n{% include 'bsae.yaml' %}", r"'bsae.yaml' in one of .*run.yaml:2.* Did you mean 'base.yaml'"),
        ("{% include '../secret.yaml' %}", "secret"),
        ("{% include '/etc/hostname' %}", "hostname"),
        ("{% extends 'run.yaml' %}", "in a circle, received one: run.yaml"),
        ("a: 1\n{% include 'run.yaml' %}", "in a circle, received one: run.yaml"),
        ("{% extends 'base.yaml' %}", "in a circle, received one: (run.yaml and base|base.yaml and run).yaml"),
        ("{% include 'bad.yaml' %}", r"bad.yaml:3"),
        ("x: 1\n{% if true %}\n{% endif %}\nx: 2\n", r"each key once \(run.yaml, line 2 after preprocessing\)"),
        ("x: 1\n{# note #}\ny: [1\nz: 2", "run.yaml, line [34] after preprocessing"),
    ],
)
def test_what_is_wrong_is_named_with_its_line(write, text, match):
    write("{% extends 'run.yaml' %}", "base.yaml")
    write("a: 1\nb: 2\nc: {{ nothing }}", "bad.yaml")
    Path("../secret.yaml").write_text("a: 1")
    with pytest.raises(BadArgument, match=match):
        load_config(write(text), other=1)


def test_jinja_is_needed_by_templates_alone(write, monkeypatch):
    monkeypatch.setitem(sys.modules, "jinja2", None)
    assert load_config(write("a: 1")) == {"a": 1}
    with pytest.raises(MissingDependency, match=r"trainformer\[config\]"):
        load_config(write("a: {{ 1 }}"))


# -- the blocks of the page on callbacks, with the modules that stand in for trainformer.hf ---------------------------

MODULES = {
    "torch.utils.tensorboard": "standins.board",
    "forgather.ml.tb_logger": "standins.hf",
    "forgather.ml.json_logger": "standins.hf",
    "forgather.ml.textgen_callback": "standins.hf",
    "forgather.ml.grad_logger": "standins.hf",
    "my_module.callbacks": "standins.own",
}
WRITER = """\
summary_writer: &summary_writer !singleton:torch.utils.tensorboard:SummaryWriter
    - "./runs/experiment_001"
"""
DEFAULT = """\
# Included by default in Trainer
# No additional configuration needed
"""
TB_LOGGER = f"""\
{WRITER}
experiment_info: &experiment_info !dict:@experiment_info
    name: "My Experiment"
    description: "Testing new architecture"
    date: "2024-01-01"

trainer_callbacks: &trainer_callbacks !list:@trainer_callbacks
    - !singleton:forgather.ml.tb_logger:TBLogger
        args: [*summary_writer]
        kwargs:
            <<: *experiment_info
"""
JSON_LOGGER = """\
trainer_callbacks: &trainer_callbacks !list:@trainer_callbacks
    - !singleton:forgather.ml.json_logger:JsonLogger
        name: "My Experiment"
        description: "Experiment description"
        config: !var "pp_config"  # Preprocessed configuration
"""
TEXTGEN = """\
test_prompts: &test_prompts !list:@test_prompts
    - "The weather today is"
    - "Machine learning is"
    - "In the future, we will"

generation_config: &generation_config !dict:@generation_config
    do_sample: true
    max_new_tokens: 50
    temperature: 0.7
    top_p: 0.9

trainer_callbacks: &trainer_callbacks !list:@trainer_callbacks
    - !singleton:forgather.ml.textgen_callback:TextgenCallback
        summary_writer: *summary_writer
        prompts: *test_prompts
        generation_config: *generation_config
        generation_steps: 1000  # Generate every 1000 steps
"""
GRAD_LOGGER = """\
trainer_callbacks: &trainer_callbacks !list:@trainer_callbacks
    - !singleton:forgather.ml.grad_logger:GradLogger
        summary_writer: *summary_writer
        log_frequency: 100
        track_layers: ["layer.0", "layer.11"]  # Specific layers
"""
OWN = """\
# Custom callback in template
trainer_callbacks: &trainer_callbacks !list:@trainer_callbacks
    - !singleton:my_module.callbacks:ModelCheckpointCallback
        output_dir: "./best_models"
        metric: "eval_loss"
        mode: "min"

    - !singleton:my_module.callbacks:EarlyStoppingCallback
        patience: 3
        threshold: 0.001
"""
STANDINS = {
    "board": "class SummaryWriter:\n    def __init__(self, log_dir): self.log_dir = log_dir\n",
    "hf": """
class TBLogger:
    def __init__(self, summary_writer, **info): self.summary_writer, self.info = summary_writer, info
class JsonLogger:
    def __init__(self, name, description, config): self.__dict__.update(locals())
class TextgenCallback:
    def __init__(self, summary_writer, prompts, generation_config, generation_steps): self.__dict__.update(locals())
class GradLogger:
    def __init__(self, summary_writer, log_frequency, track_layers): self.__dict__.update(locals())
""",
    "own": """
class ModelCheckpointCallback:
    def __init__(self, output_dir, metric="eval_loss", mode="min"): self.__dict__.update(locals())
class EarlyStoppingCallback:
    def __init__(self, patience, threshold): self.__dict__.update(locals())
""",
}


@pytest.fixture
def page(write, tmp_path, monkeypatch):
    """Read and build a block of the page."""
    for name, text in STANDINS.items():
        write(text, f"standins/{name}.py")
    monkeypatch.syspath_prepend(str(tmp_path))

    def built(text):
        for theirs, ours in MODULES.items():
            text = text.replace(theirs, ours)
        return materialize(load_config(write(text)))

    yield built
    for name in [name for name in sys.modules if name.split(".")[0] == "standins"]:
        del sys.modules[name]


def test_the_block_of_callbacks_that_are_there_anyway(page):
    assert page(DEFAULT) == {}


def test_the_block_of_tensorboard(page):
    built = page(TB_LOGGER)
    (callback,) = built["trainer_callbacks"]
    assert callback.summary_writer is built["summary_writer"]
    assert built["summary_writer"].log_dir == "./runs/experiment_001"
    assert callback.info == built["experiment_info"]
    assert callback.info["date"] == "2024-01-01"


def test_the_block_of_json(page):
    (callback,) = page(JSON_LOGGER)["trainer_callbacks"]
    assert (callback.name, callback.description) == ("My Experiment", "Experiment description")
    assert callback.config == Path("run.yaml").read_text()


def test_the_block_of_generated_text(page):
    built = page(WRITER + TEXTGEN)
    (callback,) = built["trainer_callbacks"]
    assert callback.summary_writer is built["summary_writer"]
    assert callback.prompts == ["The weather today is", "Machine learning is", "In the future, we will"]
    assert callback.generation_config is built["generation_config"]
    assert callback.generation_config == {"do_sample": True, "max_new_tokens": 50, "temperature": 0.7, "top_p": 0.9}
    assert callback.generation_steps == 1000


def test_the_block_of_gradients(page):
    built = page(WRITER + GRAD_LOGGER)
    (callback,) = built["trainer_callbacks"]
    assert (callback.log_frequency, callback.track_layers) == (100, ["layer.0", "layer.11"])
    assert callback.summary_writer is built["summary_writer"]


def test_the_block_of_ones_own_callbacks(page):
    best, stopping = page(OWN)["trainer_callbacks"]
    assert (best.output_dir, best.metric, best.mode) == ("./best_models", "eval_loss", "min")
    assert (stopping.patience, stopping.threshold) == (3, 0.001)


def test_the_writer_of_torch_itself(write):
    writer = materialize(load_config(write(WRITER)))["summary_writer"]
    writer.add_scalar("loss", 1.0, 0)
    writer.close()
    assert list(Path("runs/experiment_001").glob("events*"))
