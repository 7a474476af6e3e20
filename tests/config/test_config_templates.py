"""Templates: what Jinja may and may not do in a config, and the configs of the callbacks document, unchanged."""

import json
import sys
from pathlib import Path

import pytest
import torch
import yaml
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch.utils.tensorboard import SummaryWriter

from trainformer import hf
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


def test_text_without_template_syntax_is_unchanged(write):
    text = "a: '}} %} #}'  # {x}\nb:   [1,  2]  \n\n\n"
    assert load_config(write(text)).pp_config == text
    assert str(load_config("run.yaml").where("b")) == "run.yaml:2"


def test_raw_blocks_are_text(write):
    config = load_config(write("a: '{% raw %}{{ x }} {% y %}{% endraw %}'\nb: \"{{ '{{' }}\"\n"))
    assert config == {"a": "{{ x }} {% y %}", "b": "{{"}


@pytest.mark.parametrize(
    "value", [None, True, False, 3, 1e-05, -2.5, "text", [1, "a", 2.5], {"a": [1, None], "b": True}]
)
def test_a_variable_is_passed_unchanged(write, value):
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
        ("{% extends 'run.yaml' %}", "in a cycle, received one: run.yaml"),
        ("a: 1\n{% include 'run.yaml' %}", "in a cycle, received one: run.yaml"),
        ("{% extends 'base.yaml' %}", "in a cycle, received one: (run.yaml and base|base.yaml and run).yaml"),
        ("{% include 'bad.yaml' %}", r"bad.yaml:3"),
        ("x: 1\n{% if true %}\n{% endif %}\nx: 2\n", r"each key once \(run.yaml, line 2 after preprocessing\)"),
        ("x: 1\n{# note #}\ny: [1\nz: 2", "run.yaml, line [34] after preprocessing"),
    ],
)
def test_errors_name_the_line(write, text, match):
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


# -- the blocks of the page on callbacks, with the modules that have these names here ---------------------------------

MODULES = {
    "forgather.ml.tb_logger": "trainformer.hf",
    "forgather.ml.json_logger": "trainformer.hf",
    "forgather.ml.textgen_callback": "trainformer.hf",
    "forgather.ml.grad_logger": "trainformer.hf",
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
OWN_CALLBACKS = """\
import transformers

from trainformer.hf import TrainerCallback

class ModelCheckpointCallback(TrainerCallback):
    def __init__(self, output_dir, metric="eval_loss", mode="min"):
        self.output_dir, self.metric, self.mode = output_dir, metric, mode

class EarlyStoppingCallback(transformers.EarlyStoppingCallback):
    def __init__(self, patience, threshold):
        super().__init__(patience, threshold)
"""


class Line(torch.nn.Module):
    """A model with the layer names that the document tracks."""

    def __init__(self):
        super().__init__()
        self.layer = torch.nn.Sequential(*(torch.nn.Linear(2, 2) for _ in range(12)))

    def forward(self, x, labels):
        return {"loss": torch.nn.functional.mse_loss(self.layer(x), labels)}


@pytest.fixture
def page(write, tmp_path, monkeypatch):
    """Read and build a block of the document; writers are closed at the end."""
    write(OWN_CALLBACKS, "my_module/callbacks.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    writers = []

    def built(text):
        for theirs, ours in MODULES.items():
            text = text.replace(theirs, ours)
        made = materialize(load_config(write(text)), trust="my_module")
        writers.extend([made["summary_writer"]] if "summary_writer" in made else [])
        return made

    yield built
    for writer in writers:
        writer.close()
    for name in [name for name in sys.modules if name.split(".")[0] == "my_module"]:
        del sys.modules[name]


def train(callbacks, steps=2):
    """Train with them, and nothing else."""
    data = [{"x": torch.full((2,), float(n)), "labels": torch.zeros(2)} for n in range(4)]
    settings = {"max_steps": steps, "per_device_train_batch_size": 2, "logging_steps": 1, "report_to": "none"}
    arguments = hf.TrainingArguments(output_dir="out", save_strategy="no", use_cpu=True, **settings)
    hf.Trainer(model=Line(), args=arguments, train_dataset=data, callbacks=callbacks).train()


def events(folder):
    """Names of the scalars and texts in a folder of event files."""
    found = EventAccumulator(str(folder)).Reload()
    return {*found.Tags()["scalars"], *found.Tags()["tensors"]}


def test_the_block_of_default_callbacks(page):
    assert page(DEFAULT) == {}
    kinds = {type(callback) for callback in hf.Trainer.default_callbacks()}
    assert {hf.ProgressCallback, hf.InfoCallback} <= kinds


def test_the_block_of_tensorboard(page):
    built = page(TB_LOGGER)
    (callback,) = built["trainer_callbacks"]
    assert type(callback) is hf.TBLogger
    assert callback.experiment_info == built["experiment_info"]
    assert callback.experiment_info["date"] == "2024-01-01"
    assert type(built["summary_writer"]) is SummaryWriter
    train(built["trainer_callbacks"])
    assert {"train/loss", "experiment_info/text_summary"} <= events("runs/experiment_001")


def test_the_block_of_json(page):
    (callback,) = callbacks = page(JSON_LOGGER)["trainer_callbacks"]
    assert type(callback) is hf.JsonLogger
    train(callbacks)
    (file,) = Path().rglob("trainer_logs.jsonl")
    records = [json.loads(line) for line in file.read_text().splitlines()]
    assert [record["global_step"] for record in records if record["event"] == "on_log"][:2] == [1, 2]
    text = Path("run.yaml").read_text()
    meta = {"name": "My Experiment", "description": "Experiment description", "config": text}
    assert records[0]["meta"] == meta


def test_the_block_of_generated_text(page):
    built = page(WRITER + TEXTGEN)
    (callback,) = built["trainer_callbacks"]
    assert type(callback) is hf.TextgenCallback
    assert list(callback.prompts) == ["The weather today is", "Machine learning is", "In the future, we will"]
    assert built["generation_config"] == {"do_sample": True, "max_new_tokens": 50, "temperature": 0.7, "top_p": 0.9}
    assert callback.generation_steps == 1000


def test_the_block_of_gradients(page):
    built = page(WRITER + GRAD_LOGGER.replace("log_frequency: 100", "log_frequency: 1"))
    (callback,) = built["trainer_callbacks"]
    assert type(callback) is hf.GradLogger
    train(built["trainer_callbacks"])
    assert {"grad_norm_total", "grad_norm_max", "grad_norm_min", "grad_norm_mean"} <= names_of(built["summary_writer"])
    assert {"grad_norm/layer.0", "grad_norm/layer.11"} <= names_of(built["summary_writer"])
    assert "grad_norm/layer.1" not in names_of(built["summary_writer"])
    assert page(WRITER + GRAD_LOGGER)["trainer_callbacks"][0].log_frequency == 100


def names_of(writer):
    writer.flush()
    return events(writer.log_dir)


def test_the_block_of_ones_own_callbacks(page):
    best, stopping = callbacks = page(OWN)["trainer_callbacks"]
    assert (best.output_dir, best.metric, best.mode) == ("./best_models", "eval_loss", "min")
    assert (stopping.early_stopping_patience, stopping.early_stopping_threshold) == (3, 0.001)
    with pytest.raises(AssertionError, match="metric_for_best_model"):  # it is really asked, and wants evaluations
        train(callbacks)
