"""What users of EasyDeL know: fields of its arguments, names, and the programs of its pages."""

from __future__ import annotations

import itertools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from backend_toys import are_equal, assert_close
from flax import nnx
from jax.sharding import PartitionSpec
from jax_toys import MeanTrainer, Mlp, StepsTrainer, arguments, losses, mean_loss, mesh_on, mlp_trainer, samples
from text_trainer_toys import devices, make_folder, trainer_of
from transformers import GPT2Config

import text_toys
import trainformer.jax as ed
from trainformer.core.errors import BadArgument
from trainformer.jax import TrainingArguments
from trainformer.models.jax import model_from_config
from trainformer.run import run_of

#: Fields without a counterpart here, with their defaults in EasyDeL.
ACCEPTED = {
    **dict.fromkeys(("dataloader_pin_memory", "generation_preview_print", "generation_use_train_prompts"), False),
    **dict.fromkeys(
        ("merge_lora_before_tpu_preemption_save", "esurge_runner_verbose", "force_step_start_point"), False
    ),
    **dict.fromkeys(("report_metrics", "generation_shard_inputs", "generation_log_to_wandb", "use_grain"), True),
    **dict.fromkeys(("log_training_generations_to_wandb", "use_esurge_generation", "esurge_use_tqdm"), True),
    **dict.fromkeys(("esurge_silent_mode", "merge_lora_before_save", "save_tpu_preemption_checkpoints"), True),
    **dict.fromkeys(("grain_shard_index", "grain_shard_count", "lmhead_chunksize", "quantization_mode"), None),
    **dict.fromkeys(("quantization_group_size", "quantization_bits", "quantization_block", "model_parameters"), None),
    **dict.fromkeys(("tensor_straight_through", "straight_through_emulator", "generation_top_p"), None),
    **dict.fromkeys(("generation_top_k", "generation_presence_penalty", "generation_frequency_penalty"), None),
    **dict.fromkeys(("generation_repetition_penalty", "generation_temperature", "generation_do_sample"), None),
    **dict.fromkeys(("generation_num_return_sequences", "generation_max_new_tokens", "generation_interval"), None),
    **dict.fromkeys(("generation_extra_kwargs", "generation_config_overrides", "generation_seed"), None),
    **dict.fromkeys(("benchmark_interval", "esurge_max_num_seqs", "esurge_max_num_seq_buckets"), None),
    **dict.fromkeys(("esurge_min_input_pad", "esurge_max_num_batched_tokens", "esurge_enable_prefix_caching"), None),
    **dict.fromkeys(("esurge_data_parallelism_axis", "state_apply_fn_kwarguments_to_model"), None),
    **dict.fromkeys(("save_interval_minutes", "custom_scheduler"), None),
    "generation_prompts": [],
    "benchmarks": [],
    "generation_num_prompts": 1,
    "generation_dataset_prompt_field": "prompt",
    "esurge_hbm_utilization": 0.45,
    "esurge_page_size": 32,
    "offload_device_type": "cpu",
    "offload_device_index": 0,
    "sparse_module_type": "bcoo",
    "step_partition_spec": PartitionSpec(("dp", "fsdp"), "sp"),
    "weight_distribution_pattern": ".*",
    "weight_distribution_log_steps": 500,
}
#: Fields that work, with their defaults in EasyDeL.
WORKING = {
    **dict.fromkeys(("per_epoch_training_steps", "per_epoch_evaluation_steps", "max_evaluation_steps"), None),
    **dict.fromkeys(("trainer_prefix", "tx_mu_dtype", "training_time_limit", "max_training_steps"), None),
    "ids_to_pop_from_dataset": [],
    "report_steps": 5,
    "shuffle_seed_train": 64871,
}


def test_defaults_of_easydel_are_accepted_and_change_nothing():
    for name, value in ACCEPTED.items():
        assert TrainingArguments(**{name: value}) == TrainingArguments(), name
    assert TrainingArguments(**ACCEPTED) == TrainingArguments()
    made = TrainingArguments(**ACCEPTED, **WORKING)
    assert (made.logging_steps, made.shuffle_seed_train) == (5, 64871)


def test_arguments_can_be_read_under_every_name():
    made = TrainingArguments(log_steps=7, save_directory="there", max_training_steps=9)
    assert (made.log_steps, made.save_directory, made.max_training_steps, made.clip_grad) == (7, "there", 9, 1.0)
    assert (made.esurge_page_size, made.quantization_mode, made.use_grain) == (32, None, True)
    with pytest.raises(AttributeError, match="no attribute 'esurge_pagesize'"):
        made.esurge_pagesize  # noqa: B018


@pytest.mark.parametrize(
    ("name", "value", "advice"),
    [
        ("quantization_mode", "nf4", "qat_recipe"),
        ("quantization_config", {"dtype": "nf4"}, "SFTConfig.quantization='nf4'"),
        ("generation_temperature", 0.7, "language models: SFTConfig"),
        ("esurge_page_size", 64, "no such inference engine"),
        ("benchmark_interval", 10, "in a callback"),
        ("step_partition_spec", PartitionSpec("dp"), "sharding_array"),
        ("save_tpu_preemption_checkpoints", False, "always saves"),
        ("lmhead_chunksize", 64, "SFTConfig"),
        ("training_time_limit", "soon", "'2h30m'"),
        ("per_epoch_training_steps", 0, "at least 1"),
        ("report_steps", 0, "positive integers"),
    ],
)
def test_other_values_are_refused_with_advice(name, value, advice):
    with pytest.raises(BadArgument, match=advice):
        TrainingArguments(**{name: value})


# -- fields that work --------------------------------------------------------------------------------------------


def test_intervals_of_loggers_and_checkpoints():
    assert TrainingArguments(report_steps=4).logging_steps == 4
    assert TrainingArguments(report_steps=20, log_steps=5).logging_steps == 5
    assert TrainingArguments(report_metrics=False).log == "console"
    by_time = TrainingArguments(save_interval_minutes=0.5)
    assert (by_time.save_steps, by_time.save_strategy) == ("0.5min", "steps")
    assert TrainingArguments.from_json(by_time.to_json()) == by_time
    with pytest.raises(BadArgument, match="save_interval_minutes to be a positive number"):
        TrainingArguments(save_interval_minutes=0)


def test_checkpoints_are_also_saved_every_so_many_minutes():
    trainer = mlp_trainer(save_steps=100, save_interval_minutes=1e-7, num_train_epochs=1)
    trainer.train()
    assert len(list(Path("run/checkpoints").glob("step_*"))) == trainer.state.step == 4


def test_the_name_of_a_run_has_the_prefix():
    trainer = mlp_trainer(trainer_prefix="SFT", model_name="small")
    assert run_of(trainer).settings.name == "SFT-small"


def test_steps_of_an_epoch_and_batches_of_an_evaluation_are_limited():
    limits = {"per_epoch_training_steps": 3, "max_evaluation_steps": 2, "shuffle": False}
    trainer = mlp_trainer(dataset_eval=samples(64, seed=1), evaluation_strategy="epoch", **limits)
    assert (trainer.steps_per_epoch, trainer.max_training_steps) == (3, 6)
    trainer.train()
    assert trainer.state.step == 6
    assert trainer.state.epoch == 2
    first = samples(64, seed=1)
    first = {name: column[:16] for name, column in first.items()}
    assert trainer.eval()["eval_loss"] == pytest.approx(float(mean_loss(trainer.model, first)), rel=1e-5)


def test_a_limited_run_resumes_in_the_middle_of_an_epoch():
    limits = {"per_epoch_training_steps": 3, "num_train_epochs": 3, "save_steps": 4, "scheduler": "constant"}
    whole = mlp_trainer(output_dir="whole", **limits)
    whole.train()
    mlp_trainer(output_dir="half", max_steps=4, **limits).train()
    again = mlp_trainer(output_dir="half", max_steps=9, **limits)
    again.train()
    assert are_equal(again.model_state.params, whole.model_state.params)


def test_a_run_ends_when_its_time_is_over():
    for step in (1, 2):  # the same command resumes
        trainer = mlp_trainer(training_time_limit=1e-6, num_train_epochs=50, save_steps=100)
        trainer.train()
        assert trainer.state.step == step
        assert "training_time_limit" in trainer.control.stop_reason


def test_columns_can_be_dropped():
    data = [{"x": x, "y": y, "words": "not a number"} for x, y in zip(*list(samples(16).values())[:2], strict=True)]
    trainer = mlp_trainer(data=data, ids_to_pop_from_dataset=["words"], num_train_epochs=1)
    assert next(iter(trainer.dataloader_train)).keys() == {"x", "y"}
    trainer.train()
    assert trainer.state.step == 2


def test_the_order_of_the_data_has_its_own_seed():
    def order(**options):
        return [batch["index"].tolist() for batch in mlp_trainer(**options).dataloader_train]

    assert order(shuffle_seed_train=3) == order(seed=3)
    assert order(shuffle_seed_train=3) != order()


def test_the_first_moment_may_be_smaller():
    trainer = mlp_trainer(tx_mu_dtype=jnp.bfloat16)
    dtypes = {leaf.dtype for leaf in jax.tree.leaves(trainer.model_state.opt_state) if leaf.ndim}
    assert dtypes == {jnp.dtype("bfloat16"), jnp.dtype("float32")}
    trainer.train()
    plain = mlp_trainer(output_dir="plain")
    plain.train()
    assert_close(trainer.model_state.params, plain.model_state.params, atol=5e-3)
    with pytest.raises(BadArgument, match="options that sgd takes"):
        TrainingArguments(optimizer="sgd", tx_mu_dtype=jnp.bfloat16)


def test_a_custom_scheduler_is_a_function_of_the_step():
    trainer = mlp_trainer(custom_scheduler=lambda step: 0.5 / (step + 1))
    assert [float(trainer.scheduler(step)) for step in (0, 1)] == [0.5, 0.25]


# -- the documents -----------------------------------------------------------------------------------------------


def test_the_arguments_of_the_document_train_on_one_device():
    document = {
        "model_name": "MyFineTunedModel",
        "num_train_epochs": 3,
        "learning_rate": 2e-2,
        "total_batch_size": 32,
        "per_device_train_batch_size": 8,
        "per_device_eval_batch_size": 8,
        "gradient_accumulation_steps": 1,
        "max_steps": -1,
        "gradient_checkpointing": "nothing_saveable",
        "sharding_array": (1, -1, 1, 1),
    }
    options = {"data": samples(64), "mesh": mesh_on((1, -1, 1, 1), 1)}
    trainer = mlp_trainer(**document, **options)
    assert trainer.batch_sizes.total == 32
    assert trainer.batch_sizes.accumulation == 4
    trainer.train()
    whole = mlp_trainer(**{**document, "per_device_train_batch_size": 32}, **options, output_dir="whole")
    whole.train()
    assert trainer.state.step == whole.state.step == 6
    assert_close(trainer.model_state.params, whole.model_state.params, atol=1e-6)


def test_arguments_of_the_current_page_of_easydel():
    made = TrainingArguments(
        model_name="MyFineTunedModel",
        total_batch_size=32,
        eval_batch_size=32,
        gradient_accumulation_steps=1,
        max_training_steps=None,
        log_steps=10,
        save_steps=100,
        save_total_limit=2,
        do_eval=True,
        evaluation_steps=100,
        save_directory="runs/my_model_run",
    )
    assert (made.evaluation_strategy, made.eval_steps, made.max_steps) == ("steps", 100, -1)


@pytest.mark.parametrize(
    "name", ["create_collect_function", "create_grain_collect_function", "create_tfds_collect_function"]
)
@pytest.mark.parametrize("takes", ["anything", "its arguments", "nothing"])
def test_collect_functions_under_every_name(name, takes):
    seen = []

    def collect(batch):
        return [{"x": row["x"] * 0, "y": row["y"]} for row in batch]

    def make_any(self, *args, **kwargs):
        seen.append(kwargs)
        return collect

    def make(self, max_sequence_length, truncation_mode):
        seen.append((max_sequence_length, truncation_mode))
        return collect

    made = {"anything": make_any, "its arguments": make, "nothing": lambda self: collect}[takes]
    trainer = mlp_trainer(kind=type("Own", (MeanTrainer,), {name: made}), max_sequence_length=5)
    trainer.train()
    assert losses(trainer)[0] == pytest.approx(np.log(3), rel=0.2)  # nothing is known of x
    wanted = {
        "anything": [{"max_sequence_length": 5, "truncation_mode": "keep_end"}],
        "its arguments": [(5, "keep_end")],
    }
    assert seen == wanted.get(takes, [])


def test_the_collect_function_of_the_base_class_stacks_and_truncates():
    trainer = mlp_trainer()
    rows = [{"input_ids": np.arange(4)}, {"input_ids": np.arange(4) + 1}]
    end = trainer.create_collect_function(3, "keep_end")(rows)
    start = trainer.create_grain_collect_function(max_sequence_length=3, truncation_mode="keep_start")(rows)
    assert end["input_ids"].tolist() == [[1, 2, 3], [2, 3, 4]]
    assert start["input_ids"].tolist() == [[0, 1, 2], [1, 2, 3]]
    with pytest.raises(BadArgument, match="'keep_end' or 'keep_start'"):
        trainer.create_collect_function(3, "keep_middle")(rows)


def test_loaders_and_step_functions_are_there_at_any_time():
    data = samples(20)
    trainer = mlp_trainer(data=data, shuffle=False, dataset_eval=samples(5, seed=1))
    batches = list(trainer.dataloader_train)
    assert len(trainer.dataloader_train) == len(batches) == 3
    np.testing.assert_array_equal(np.concatenate([b["index"] for b in batches])[:20], np.arange(20))
    again = trainer.configure_dataloaders()
    assert [b["index"].tolist() for b in again.dataloader_train] == [b["index"].tolist() for b in batches]
    assert len(list(trainer.dataloader_eval)) == 1
    before = trainer.configure_functions()
    trainer.train()
    metrics = trainer.configure_functions().eval_step_fn(trainer.model_state, batches[0])
    assert callable(before.train_step_fn)
    assert callable(trainer.eval_step_fn)
    assert float(metrics["loss"][0] if isinstance(metrics["loss"], tuple) else metrics["loss"]) > 0


def test_a_trainer_may_return_any_iterable_as_its_loader():
    class Loader:
        def __iter__(self):
            return iter([{name: column[:8] for name, column in samples().items()}] * 3)

    class Own(MeanTrainer):
        def configure_dataloaders(self):
            return ed.TrainerConfigureDataloaderOutput(dataloader_train=Loader(), dataloader_eval=None)

    trainer = Own(arguments(max_steps=5), model=Mlp(nnx.Rngs(0)), mesh=mesh_on((1, 1, 1, 1), 1))
    trainer.train()
    assert trainer.state.step == 5
    assert isinstance(trainer.dataloader_train, Loader)


def test_the_protocol():
    assert issubclass(ed.SFTTrainer, ed.BaseTrainerProtocol)
    trainer = mlp_trainer()
    assert trainer.param_dtype == jnp.float32
    assert isinstance(trainer.optimizer, optax.GradientTransformation)
    assert (trainer.training_batch_size, trainer.evaluation_batch_size, trainer.is_process_zero) == (8, 8, True)
    assert trainer._model_state is trainer.model_state
    trainer.arguments.save_arguments("arguments.json")
    assert TrainingArguments.load_arguments("arguments.json") == trainer.arguments
    with pytest.raises(TypeError, match="abstract"):
        type("Half", (ed.BaseTrainerProtocol,), {"train": lambda self: None})()

    class Own(ed.BaseTrainerProtocol):
        """Brings its own loop."""

        def __init__(self, batches):
            self.model, self._model_state = self.configure_model()[:2]
            self.dataloader_train, self.dataloader_eval, _ = ed.TrainerConfigureDataloaderOutput(batches)
            self.train_step_fn, self.eval_step_fn = self.configure_functions()

        def configure_model(self):
            model = Mlp(nnx.Rngs(0))
            return ed.TrainerConfigureModelOutput(model=model, state=ed.EasyDeLState.create(model, optax.sgd(0.1), 0))

        def configure_dataloaders(self):
            return ed.TrainerConfigureDataloaderOutput(self.dataloader_train, self.dataloader_eval)

        def configure_functions(self):
            return StepsTrainer.configure_functions(self)

        def train(self, state=None):
            for batch in self.dataloader_train:
                self._model_state, _ = self.train_step_fn(self._model_state, batch)
            return self._model_state

        def evaluate(self, state=None):
            return {}

        def save_pretrained(self, ckpt_path, state=None):
            return None

    assert int(Own([samples(8)] * 3).train().step) == 3


# -- Trainer -----------------------------------------------------------------------------------------------------


class Regression(nnx.Module):
    """Computes its own loss, in one of the allowed forms."""

    def __init__(self, form):
        self.weight, self.form = nnx.Param(jnp.zeros(())), form

    def compute_loss(self, x, y):
        loss = jnp.mean((self.weight[...] * x - y) ** 2)
        output = type("Output", (), {"loss": loss})
        return {"scalar": loss, "output": output, "pair": (output, {"loss": loss})}[self.form]


@pytest.mark.parametrize("form", ["scalar", "output", "pair"])
def test_the_trainer_uses_the_loss_of_the_model(form):
    x = np.linspace(-1, 1, 32, dtype=np.float32)
    trainer = ed.Trainer(
        arguments(num_train_epochs=20, learning_rate=0.2, scheduler="constant"),
        model=Regression(form),
        dataset_train={"x": x, "y": 2 * x},
        mesh=mesh_on((1, 1, 1, 1), 1),
    )
    assert float(trainer.train().model.weight[...]) == pytest.approx(2, abs=0.05)


def test_the_trainer_needs_a_loss():
    with pytest.raises(BadArgument, match=r"Define compute_loss\(\*\*batch\)"):
        ed.Trainer(arguments(), model=Mlp(nnx.Rngs(0)), dataset_train=samples()).train()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("easydel") / "llama")


def test_the_trainer_trains_language_models_on_tokens_as_sft_does(folder, tmp_path):
    tokens = [{"input_ids": list(range(2, 6 + i % 3)), "attention_mask": [1] * (4 + i % 3)} for i in range(8)]
    found = {}
    for kind, config in ((ed.Trainer, TrainingArguments), (ed.SFTTrainer, ed.SFTConfig)):
        sizes = {"total_batch_size": 8, "max_steps": 2, "learning_rate": 0.1, "max_sequence_length": 32}
        quiet = {
            "log": "none",
            "save_strategy": "no",
            "scheduler": "constant",
            "output_dir": str(tmp_path / kind.__name__),
        }
        model = ed.AutoEasyDeLModelForCausalLM.from_pretrained(folder, dtype=jnp.float32)
        trainer = kind(config(**sizes, **quiet), model=model, dataset_train=tokens, mesh=devices())
        found[kind.__name__] = trainer.train().params
    assert are_equal(found["Trainer"], found["SFTTrainer"])


# -- the pages of SFT and DPO ------------------------------------------------------------------------------------


def test_the_blocks_of_the_sft_page(folder, monkeypatch):
    monkeypatch.setenv("WANDB_MODE", "disabled")
    ed.SFTConfig(
        model_name="SFTTrainer",
        learning_rate=2e-5,
        dataset_text_field=None,
        add_special_tokens=False,
        packing=False,
        num_of_sequences=1024,
        dataset_num_proc=None,
        dataset_batch_size=1000,
        dataset_kwargs=None,
        eval_packing=None,
        total_batch_size=16,
        num_train_epochs=3,
    )
    ed.SFTConfig(
        learning_rate=2e-5,
        learning_rate_end=5e-6,
        scheduler=ed.EasyDeLSchedulers.COSINE,
        warmup_steps=500,
        optimizer=ed.EasyDeLOptimizers.ADAMW,
        weight_decay=0.01,
    )
    config = ed.SFTConfig(
        model_name="sft_example",
        save_directory="sft_checkpoints",
        dataset_text_field="chosen",
        packing=True,
        learning_rate=2e-5,
        learning_rate_end=5e-6,
        total_batch_size=1,
        num_train_epochs=3,
        use_wandb=False,
        num_of_sequences=512,
        max_length=32,
    )
    trainer = ed.SFTTrainer(
        arguments=config,
        model=ed.AutoEasyDeLModelForCausalLM.from_pretrained(folder, dtype=jnp.bfloat16),
        train_dataset=[{"chosen": pair["prompt"] + pair["chosen"]} for pair in text_toys.preferences()],
        processing_class=text_toys.chat_tokenizer(),
        mesh=devices(),
    )
    state = trainer.train()
    assert int(state.step) == trainer.max_training_steps > 3
    assert Path("sft_checkpoints/checkpoints").is_dir()


def test_the_blocks_of_the_preference_pages(folder):
    document = {"beta": 0.1, "max_length": 32, "max_prompt_length": 4, "total_batch_size": 8, "num_train_epochs": 1}
    limits = {"max_completion_length": 16, "disable_dropout": True, "label_pad_token_id": -100, "padding_value": None}
    dpo = {"sync_ref_model": False, "ref_model_sync_steps": 64, "reference_free": False, "loss_type": "sigmoid"}
    orpo = {"generate_during_eval": False, "dataset_num_proc": None}
    kinds = ((ed.DPOTrainer, ed.DPOConfig, dpo), (ed.ORPOTrainer, ed.ORPOConfig, orpo))
    for kind, config, options in kinds:
        model = ed.AutoEasyDeLModelForCausalLM.from_pretrained(folder, dtype=jnp.bfloat16)
        reference = (
            {}
            if kind is ed.ORPOTrainer
            else {"reference_model": ed.AutoEasyDeLModelForCausalLM.from_pretrained(folder, param_dtype=jnp.bfloat16)}
        )
        trainer = kind(
            arguments=config(**document, **limits, **options, log="none", save_directory=kind.__name__),
            model=model,
            train_dataset=text_toys.preferences(),
            processing_class=text_toys.chat_tokenizer(),
            mesh=devices(),
            **reference,
        )
        assert int(trainer.train().step) == 2
        assert trainer.arguments.learning_rate == 1e-6
    assert trainer.arguments.loss_type == "orpo"
    with pytest.raises(BadArgument, match="The reference is evaluated once, before training"):
        ed.DPOConfig(sync_ref_model=True, ref_model_sync_steps=128, ref_model_mixup_alpha=0.9)


def test_prompts_lose_their_beginning_and_answers_their_end(folder, tmp_path):
    pairs = [{"prompt": "one two three four", "chosen": " five six seven", "rejected": " two"}] * 4
    pairs = [{**pair, "chosen": pair["chosen"] + " one" * i} for i, pair in enumerate(pairs)]
    options = {"options": {"processing_class": text_toys.chat_tokenizer()}, "loss_type": "orpo"}

    def rows(**limits):
        trainer = trainer_of(ed.DPOTrainer, ed.DPOConfig, str(folder), pairs, tmp_path, **limits, **options)
        chosen = run_of(trainer).train_source.dataset[0]["chosen"]
        trained = np.asarray(chosen["labels"]) != -100
        ids = np.asarray(chosen["input_ids"])
        return ids[~trained].tolist(), ids[trained].tolist()

    prompt, answer = rows()
    short_prompt, short_answer = rows(max_prompt_length=2, max_completion_length=3)
    assert short_prompt == prompt[-2:]
    assert short_answer == answer[:3]
    assert len(prompt) > 2
    assert len(answer) > 3


def test_evaluation_data_may_be_packed_or_not(folder, tmp_path):
    data = [{"text": pair["prompt"] + pair["chosen"]} for pair in text_toys.preferences()]
    found = []
    for packing, eval_packing in ((True, None), (True, False), (False, True)):
        options = {"packing": packing, "eval_packing": eval_packing, "eval_batch_size": 1}
        trainer = trainer_of(
            ed.SFTTrainer, ed.SFTConfig, str(folder), data, tmp_path, options={"eval_dataset": data}, **options
        )
        found.append((len(run_of(trainer).val_source.dataset), trainer.eval()["eval_loss"]))
    sizes = [size for size, _ in found]
    assert sizes[1] == len(data) > sizes[0] == sizes[2]
    assert max(loss for _, loss in found) == pytest.approx(min(loss for _, loss in found), rel=1e-5)


def test_previews_are_printed_at_intervals(folder, tmp_path, caplog):
    caplog.set_level("INFO")
    data = [{"text": pair["prompt"]} for pair in text_toys.preferences()]
    options = {"generation_interval": 2, "generation_prompts": ["one two", "three"], "generation_max_new_tokens": 3}
    trainer_of(
        ed.SFTTrainer, ed.SFTConfig, str(folder), data, tmp_path, max_steps=4, generation_num_prompts=1, **options
    ).train()
    shown = [m for m in caplog.messages if m.startswith("step ") and "one two" in m]
    assert [m.split(":")[0] for m in shown] == ["step 2", "step 4"]
    assert not any(m.startswith("step 2: three") for m in caplog.messages)
    caplog.clear()
    of_data = {"generation_interval": 4, "generation_use_train_prompts": True, "generation_num_prompts": 2}
    rows = text_toys.preferences()
    trainer_of(
        ed.SFTTrainer,
        ed.SFTConfig,
        str(folder),
        [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows],
        tmp_path,
        max_steps=4,
        **of_data,
    ).train()
    shown = [m.removeprefix("step 4: ") for m in caplog.messages if m.startswith("step 4: ")]
    assert len(shown) == 2
    assert all(any(text.startswith(row["prompt"]) for row in rows) for text in shown)
    with pytest.raises(BadArgument, match="texts or messages to complete with generation_interval"):
        ed.SFTConfig(generation_interval=2)


def test_lm_head_chunks_by_their_name_in_easydel():
    assert ed.SFTConfig(lmhead_chunksize=64).chunk_tokens == 64
    assert ed.SFTConfig(lmhead_chunksize=None).chunk_tokens is None
    assert ed.SFTConfig().learning_rate == 2e-5


def test_dropout_is_off_in_preference_tuning_unless_asked_for():
    rows = list(itertools.islice(text_toys.preferences(), 4))
    sizes = {"n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64, "vocab_size": len(text_toys.chat_tokenizer())}

    for disabled in (True, False):
        model = model_from_config(GPT2Config(embd_pdrop=0.5, **sizes).to_dict())
        made = ed.ORPOConfig(
            max_steps=1, total_batch_size=4, log="none", output_dir=f"run{disabled}", disable_dropout=disabled
        )
        trainer = ed.ORPOTrainer(made, model, text_toys.chat_tokenizer(), train_dataset=rows, mesh=devices())
        batch = next(iter(trainer.dataloader_train))
        loss = jax.jit(
            lambda key, trainer=trainer, model=model, batch=batch: trainer.compute_loss(model, batch, key).sum
        )
        first, second = (float(loss(jax.random.key(number))) for number in (1, 2))
        assert (first == second) is disabled


def test_args_and_no_model_name():
    with pytest.raises(BadArgument, match=r"keywords of MeanTrainer, received 'args'\. It is called arguments here"):
        MeanTrainer(args=arguments(), model=Mlp(nnx.Rngs(0)))
    assert mlp_trainer(model_name=None, max_steps=1).train().step == 1
