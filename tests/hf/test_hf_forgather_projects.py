"""Projects that train a language model: what their configs build, and a whole one from the command line."""

import json
import os
import time
from pathlib import Path

import pytest
import torch
import transformers
from hf_models import chat_tokenizer, sentences

from trainformer import hf
from trainformer.cli import main
from trainformer.config import Project
from trainformer.core.errors import BadArgument

# -- files -------------------------------------------------------------------------------------------------------------


def test_a_target_is_built_once_and_again_when_a_prerequisite_is_newer(tmp_path):
    target, source, built = tmp_path / "out/target", tmp_path / "source", []

    def recipe():
        built.append(1)
        target.write_text(str(len(built)))

    def make():
        return hf.build_rule(target, recipe, target.read_text, prerequisites=[source, tmp_path / "missing"])

    assert [make(), make()] == ["1", "1"]
    source.touch()
    later = time.time() + 10
    os.utime(source, (later, later))
    assert make() == "2"


def test_a_recipe_that_fails_leaves_nothing_behind(tmp_path):
    with pytest.raises(ZeroDivisionError):
        hf.build_rule(tmp_path / "x", lambda: 1 // 0, lambda: "loaded")
    assert hf.build_rule(tmp_path / "x", (tmp_path / "x").touch, lambda: "loaded") == "loaded"


def test_dependencies_are_passed_over():
    assert hf.dependency_list(1, 2, 3) == 1
    with pytest.raises(BadArgument, match="at least one"):
        hf.dependency_list()


class Recorder:
    def __init__(self):
        self.calls = []

    def __getattr__(self, name):
        return lambda *args: self.calls.append((name, *args))


def test_a_script_does_what_its_fields_say():
    trainer = Recorder()
    meta = {"output_dir": "out", "config_name": "tiny"}
    hf.TrainingScript(trainer=trainer, meta=meta, do_eval=True, do_save=True).run()
    assert trainer.calls == [("train",), ("evaluate",), ("save_model", "out")]
    trainer.calls.clear()
    hf.TrainingScript(trainer=trainer, do_train=False).run()
    assert trainer.calls == []


# -- texts -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def tokenizer():
    made = chat_tokenizer()
    made.pad_token, made.model_max_length = made.eos_token, 64
    return made


def test_the_loss_is_that_of_transformers():
    torch.manual_seed(0)
    logits, labels = torch.randn(2, 5, 7), torch.randint(0, 7, (2, 5))
    labels[0, 3:] = -100
    theirs = transformers.loss.loss_utils.ForCausalLMLoss(logits, labels, vocab_size=7)
    assert torch.allclose(hf.CausalLoss()(logits, labels), theirs)
    outputs = transformers.modeling_outputs.CausalLMOutput(logits=logits)
    whole = transformers.loss.loss_utils.ForCausalLMLoss(logits, labels, vocab_size=7, num_items_in_batch=11)
    assert torch.allclose(hf.CausalLoss()(outputs, labels, num_items_in_batch=11), whole)


def test_batches_are_padded_on_the_right_and_labelled(tokenizer):
    tokenizer.padding_side = "left"
    rows = [{"input_ids": [5, 6, 7, 8]}, {"input_ids": [9]}]
    batch = hf.DataCollatorForCausalLM(tokenizer, truncation=True, max_length=3)(rows)
    pad = tokenizer.pad_token_id
    assert batch["input_ids"].tolist() == [[5, 6, 7], [9, pad, pad]]
    assert batch["labels"].tolist() == [[5, 6, 7], [9, -100, -100]]
    assert rows[0]["input_ids"] == [5, 6, 7, 8]
    assert tokenizer.padding_side == "left"
    inputs, labels = hf.DataCollatorForCausalLM(tokenizer, labels_name=None, pad_to_multiple_of=8)(rows)
    assert inputs["input_ids"].shape == labels.shape == (2, 8)
    given = hf.DataCollatorForCausalLM(tokenizer)(
        [{"input_ids": [5, 6], "labels": [-100, 6]}, {"input_ids": [7], "labels": [7]}]
    )
    assert given["labels"].tolist() == [[-100, 6], [7, -100]]
    with pytest.raises(BadArgument, match="max_length of at most 64"):
        hf.DataCollatorForCausalLM(tokenizer, max_length=65)


def test_positions_restart_with_every_document(tokenizer):
    end = tokenizer.eos_token_id
    rows = [
        {"input_ids": [5, 6, 7, 8], "document_starts": [0, 2]},
        {"input_ids": [5, 6, 7, 8], "document_starts": [0, 1, 3]},
    ]
    batch = hf.DataCollatorForCausalLM(tokenizer)(rows)
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1], [0, 0, 1, 0]]
    batch = hf.DataCollatorForCausalLM(tokenizer, packed_sequences=True)([{"input_ids": [5, end, 7, 8]}])
    assert batch["position_ids"].tolist() == [[0, 1, 0, 1]]
    assert "position_ids" not in hf.DataCollatorForCausalLM(tokenizer, packed_sequences=False)(rows)


def test_datasets_are_tokenised(tokenizer):
    datasets = pytest.importorskip("datasets")
    texts = sentences()[:10]
    data = datasets.Dataset.from_dict({"text": texts, "other": list(range(10))})
    made = hf.preprocess_dataset(data, tokenizer, select_range=0.5, fn_kwargs={"truncation": True, "max_length": 4})
    assert made.column_names == ["input_ids"]
    assert made["input_ids"][:] == [tokenizer(text)["input_ids"][:4] for text in texts[:5]]
    stream = hf.preprocess_dataset(data, tokenizer, to_iterable=True, select_range=[2, 4])
    assert [row["input_ids"] for row in stream] == [tokenizer(text)["input_ids"] for text in texts[2:4]]
    shuffled = hf.preprocess_dataset(data, tokenizer, shuffle=True, seed=1)
    assert sorted(shuffled["input_ids"]) == sorted(tokenizer(text)["input_ids"] for text in texts)
    half = hf.preprocess_dataset(
        data, tokenizer, distributed_environment=hf.StaticDistributedEnvironment(rank=1, world_size=2)
    )
    assert len(half) == 5
    with pytest.raises(BadArgument, match="select_range"):
        hf.preprocess_dataset(data, tokenizer, select_range="all")


# -- schedules ---------------------------------------------------------------------------------------------------------


def rates(steps, **options):
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = hf.InfiniteLRScheduler(optimizer, **options)
    found = []
    for _ in range(steps):
        found.append(schedule.get_last_lr()[0])
        optimizer.step()
        schedule.step()
    return found


def test_the_schedule_without_an_end():
    assert rates(4, warmup_steps=2) == [0.0, 0.5, 1.0, 1.0]
    found = rates(8, warmup_steps=1, cooldown_steps=2, constant_lr=0.5, checkpoint_step=5, min_lr=0.0, tau=1.0)
    assert found == pytest.approx([0.0, 1.0, 0.75, 0.5, 0.5, 0.5, 0.5 / 2.718281828, 0.5 / 7.389056099])
    for wrong in ({"warmup_steps": -1}, {"tau": 0}, {"cooldown_steps": 5, "checkpoint_step": 4}):
        with pytest.raises(BadArgument, match=next(iter(reversed(wrong)))):
            rates(1, **wrong)


# -- a whole project ---------------------------------------------------------------------------------------------------

META = 'name: "Tiny Llama"\ndefault_config: "train.yaml"\n'

DATASET = """\
-- set folder = project_dir
-- macro split(name)
!call:trainformer.hf:preprocess_dataset@{{ name }}
    dataset: !call:datasets:load_dataset
        arg0: json
        data_files: "{{ joinpath(folder, 'texts.jsonl') }}"
        split: "train"
    tokenizer: !var "tokenizer"
    fn_kwargs: !var "preprocess_args"
-- endmacro
train_dataset: &train {{ split("train_dataset") }}
eval_dataset: {{ split("eval_dataset") }}
    select_range: 4
main: *train
"""

BASE = """\
-- set ns = namespace()
-- filter trim()
-- block config_metadata
    -- set ns.config_name = "Base"
    -- set ns.output_dir = joinpath(project_dir, "output_models", "tiny")
-- endblock config_metadata
-- endfilter
distributed_env: &distributed_env !singleton:trainformer.hf:DistributedEnvironment@distributed_env
tokenizer: &tokenizer !singleton:transformers:AutoTokenizer.from_pretrained@tokenizer
    - "{{ joinpath(project_dir, 'tokenizer') }}"

[model]
model_config: &model_config !call:transformers:LlamaConfig
    vocab_size: !call:len [ *tokenizer ]
    pad_token_id: !singleton:getattr [ *tokenizer, "pad_token_id" ]
    hidden_size: 64
    intermediate_size: 32
    num_attention_heads: 2
    num_key_value_heads: 2
    num_hidden_layers: 1
pretrained_config: &pretrained_config !singleton:trainformer.hf:build_rule
    target: "{{ ns.output_dir }}/config.json"
    recipe: !partial:trainformer.hf:dependency_list
        - !singleton:call [ !singleton:getattr [ *model_config, "save_pretrained" ], "{{ ns.output_dir }}" ]
    loader: !partial:transformers:AutoConfig.from_pretrained [ "{{ ns.output_dir }}" ]
model: &model !partial:transformers:AutoModelForCausalLM.from_config
    arg0: *pretrained_config
    latent_args: !var {name: "model_constructor_args", default: {attn_implementation: "sdpa"}}

[data]
.define: &dataset_dict !call:trainformer.hf:from_project
    project_dir: "{{ joinpath(project_dir, '../data') }}"
    targets: [train_dataset, eval_dataset]
    tokenizer: *tokenizer
    preprocess_args: !dict {truncation: true, max_length: 16}
data_collator: &data_collator !singleton:trainformer.hf:DataCollatorForCausalLM
    tokenizer: *tokenizer
    return_tensors: pt

[callbacks]
.define: &summary_writer !singleton:torch.utils.tensorboard:SummaryWriter ["{{ joinpath(ns.output_dir, 'runs') }}"]
experiment_info: &experiment_info !dict:@experiment_info
    name: "{{ ns.config_name }}"
    config: !var "pp_config"
trainer_callbacks: &trainer_callbacks !dlist:@trainer_callbacks
    progress: !singleton:trainformer.hf:ProgressCallback { use_tqdm: false, output_stream: "stderr" }
    info: !singleton:trainformer.hf:InfoCallback { verbose: False }
    json_logger: !singleton:trainformer.hf:JsonLogger
        <<: *experiment_info
    tb_logger: !singleton:trainformer.hf:TBLogger
        arg0: *summary_writer
        <<: *experiment_info
    texts: !singleton:trainformer.hf:TextgenCallback
        summary_writer: *summary_writer
        prompts: !list:@prompts ["the quick"]
        generation_config: !dict { do_sample: True, top_k: 5, repitition_penalty: 1.1 }
        max_new_tokens: 3
        generation_steps: 2
    control: !singleton:trainformer.hf:TrainerControlCallback
    none: ~

[optimizer]
optimizer: &optimizer !partial:torch:optim.AdamW
    lr: 1.0e-2
lr_scheduler: &lr_scheduler !lambda:trainformer.hf:InfiniteLRScheduler@lr_scheduler
    warmup_steps: 2

[trainer_args]
trainer_args: &trainer_args !singleton:trainformer.hf:TrainingArguments@trainer_args
    output_dir: "{{ ns.output_dir }}"
    logging_dir: "{{ joinpath(ns.output_dir, 'runs') }}"
    save_strategy: "no"
    save_safetensors: False
    use_cpu: True
    max_steps: {{ max_steps | default(-1) | toyaml }}

[trainer]
trainer: &trainer !singleton:trainformer.hf:Trainer@trainer
    args: *trainer_args
    model_init: !partial:call [ *model ]
    data_collator: *data_collator
    train_dataset: !call:getitem [ *dataset_dict, 'train_dataset' ]
    eval_dataset: !call:getitem [ *dataset_dict, 'eval_dataset' ]
    processing_class: *tokenizer
    callbacks: *trainer_callbacks
    compute_loss_func: !singleton:trainformer.hf:CausalLoss
    distributed_env: *distributed_env
    optimizer_factory: *optimizer
    lr_scheduler_factory: *lr_scheduler
dynamic_args: !dlist
    null: ~
    max_steps: { names: "--max-steps", type: "int" }
meta: &meta_output !dict:@meta { config_name: "{{ ns.config_name }}", output_dir: "{{ ns.output_dir }}" }
main: !singleton:trainformer.hf:TrainingScript@training_script
    meta: *meta_output
    do_save: True
    distributed_env: *distributed_env
    trainer: *trainer
"""

TRAIN = """\
-- extends "base.yaml"

[config_metadata]
    == super()
    -- set ns.config_name = "Tiny Llama"

[trainer_args]
    == super()
    # overrides
    save_strategy: "steps"
    save_steps: 2
    logging_steps: 1
    eval_strategy: "steps"
    eval_steps: 2
    per_device_train_batch_size: 4
"""


@pytest.fixture
def tiny(write_all, tokenizer):
    write_all(
        {
            "llama/meta.yaml": META,
            "llama/templates/base.yaml": BASE,
            "llama/templates/configs/train.yaml": TRAIN,
            "data/meta.yaml": "name: data\n",
            "data/templates/configs/texts.yaml": DATASET,
            "data/texts.jsonl": "\n".join(json.dumps({"text": text}) for text in sentences()[:16]),
        }
    )
    tokenizer.save_pretrained("llama/tokenizer")
    return "llama"


@pytest.fixture
def write_all():
    def write(files):
        for name, text in files.items():
            Path(name).parent.mkdir(parents=True, exist_ok=True)
            Path(name).write_text(text)

    return write


def test_a_tiny_llama_trains_from_the_command_line(tiny, capsys):
    pytest.importorskip("datasets")
    assert main(["run", tiny, "--var", "max_steps=4", "--trust", "datasets"]) == 0
    out = Path("llama/output_models/tiny")
    assert {"checkpoint-2", "checkpoint-4", "model.safetensors", "config.json", "tokenizer.json"} <= set(
        os.listdir(out)
    )
    state = hf.TrainerState.load_from_json(out / "checkpoint-4" / "trainer_state.json")
    trained = [record for record in state.log_history if "loss" in record]
    assert [record["step"] for record in trained] == [1, 2, 3, 4]
    assert [record["step"] for record in state.log_history if "eval_loss" in record] == [2, 4]
    assert trained[-1]["learning_rate"] == pytest.approx(1e-2)  # the factories: after two steps of warm-up
    assert "step" in capsys.readouterr().err
    model = transformers.AutoModelForCausalLM.from_pretrained(out)
    assert type(model).__name__ == "LlamaForCausalLM"
    lines = [json.loads(line) for line in (out / "runs" / "trainer_logs.jsonl").read_text().splitlines()]
    assert lines[0]["meta"]["config"].lstrip().startswith("distributed_env:")


def test_without_trust_nothing_is_imported(tiny, capsys):
    assert main(["run", tiny, "--var", "max_steps=4"]) != 0
    assert "importing it would run code of 'datasets'" in " ".join(capsys.readouterr().err.split())
    assert not Path("llama/output_models/tiny/checkpoint-2").exists()


def test_targets_of_a_project_are_built_alone(tiny):
    project = Project(project_dir=tiny)
    model = project("model")()
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config._attn_implementation == "sdpa"
    eager = project("model", model_constructor_args={"attn_implementation": "eager"})()
    assert eager.config._attn_implementation == "eager"
    assert project("dynamic_args") == [{"names": "--max-steps", "type": "int"}]
