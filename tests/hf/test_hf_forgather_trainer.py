"""What programs for Forgather's trainer use beyond the HF Trainer."""

import io
import logging
import os
from pathlib import Path

import pytest
import torch
from hf_toys import Classifier, examples, losses, make, parameters

from trainformer import hf
from trainformer.core.errors import BadArgument, DataError


class Custom(hf.BaseTrainer[hf.BaseTrainingArguments]):
    """A trainer with its own loop, which sets everything up in `_prepare`."""

    def _prepare(self, train_dataset, eval_dataset):
        self.state = hf.TrainerState(
            logging_steps=10, eval_steps=10, train_batch_size=8, max_steps=3, num_train_epochs=1
        )
        self.control = hf.TrainerControl()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=0.1)
        self.lr_scheduler = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=1)

    def _train_loop(self):
        self._dispatch_event("on_train_begin")
        while self.state.global_step < self.state.max_steps and not self.control.should_training_stop:
            self.optimizer.zero_grad()
            self.model(**{k: v[None] for k, v in examples(1)[0].items() if k != "labels"})["logits"].sum().backward()
            self.optimizer.step()
            self.lr_scheduler.step()
            self.state.global_step += 1
            self._dispatch_event("on_step_end")
            self._dispatch_event("on_sample", value=self.state.global_step)
        return hf.TrainOutput(self.state.global_step, 0.0, {})

    def _eval_loop(self):
        return {"eval_loss": 0.5}


def custom(folder, kind=Custom, **options):
    return kind(hf.BaseTrainingArguments(str(folder)), Classifier(), **options)


# -- trainers with their own loop --------------------------------------------------------------------------------------


def test_state_control_and_callbacks_can_be_set(tmp_path):
    trainer = custom(tmp_path)
    assert trainer.train().global_step == 3
    assert trainer.state.max_steps == 3
    mine = hf.TrainerControl(should_save=True)
    trainer.control = mine
    assert trainer.control is mine
    first, second = hf.TrainerCallback(), hf.TrainerCallback()
    trainer.callbacks = [first]
    trainer.callbacks.append(second)
    assert trainer.callbacks == [first, second]
    trainer.callbacks.insert(0, trainer.callbacks.pop())
    assert trainer.callbacks == [second, first]
    trainer.callbacks.remove(first)
    assert [*trainer.callbacks] == [second]
    assert trainer.callbacks[:1] == [second]


class Listener:
    """Knows only an event of its own, and names only what it needs."""

    def __init__(self):
        self.seen = []

    def on_sample(self, value, state, **kwargs):
        self.seen.append((value, state.global_step, kwargs["control"].should_training_stop))


def test_a_callback_that_listens_to_events_of_its_own(tmp_path):
    listener = Listener()
    custom(tmp_path, callbacks=[listener]).train()
    assert listener.seen == [(1, 1, False), (2, 2, False), (3, 3, False)]


def test_callbacks_with_arguments_by_name_work_in_the_trainer(tmp_path):
    steps = []

    class Named:
        def on_step_end(self, state, model, **kwargs):
            steps.append((state.global_step, type(model)))

        def on_log(self, *, logs, **kwargs):
            steps.append(sorted(logs))

    make(tmp_path, max_steps=2, logging_steps=2, callbacks=[Named()]).train()
    assert steps[:2] == [(1, Classifier), (2, Classifier)]
    assert "loss" in steps[2]


class Both(hf.TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        control.should_training_stop = True
        return hf.TrainerControl(should_abort_without_save=True)


def test_abort_wins_over_stop(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="trainformer")
    trainer = custom(tmp_path / "own", callbacks=[Both()])
    assert trainer.train().global_step == 1
    assert trainer._stop_requested_by == ("Both", "on_step_end", "abort")
    assert "Both asked to abort in on_step_end" in caplog.text
    trainer = make(tmp_path / "ours", max_steps=4, save_strategy="steps", save_steps=1, callbacks=[Both()])
    trainer.train()
    assert trainer.stop_reason == "it set should_abort_without_save in on_step_end"
    assert trainer.stopped_by == "Both"
    assert not [*Path(tmp_path / "ours").glob("checkpoint-*")]


class Default(Custom):
    @classmethod
    def default_callbacks(cls):
        return [Listener()]


def test_an_empty_list_of_callbacks_means_none(tmp_path):
    assert len(custom(tmp_path, Default).callbacks) == 1
    assert custom(tmp_path, Default, callbacks=[]).callbacks == []
    assert [type(c) for c in custom(tmp_path, Default, callbacks=[Both()]).callbacks] == [Both]
    trainer = hf.Trainer(Classifier(), {"output_dir": str(tmp_path)}, callbacks=[])
    assert trainer.callbacks == []
    info = hf.InfoCallback(verbose=True)
    trainer = hf.Trainer(Classifier(), {"output_dir": str(tmp_path)}, callbacks=[info])
    assert [type(c) for c in trainer.callbacks] == [hf.ProgressCallback, hf.InfoCallback]
    assert trainer.callbacks[1] is info


def test_callbacks_of_a_running_trainer_can_be_changed(tmp_path):
    trainer, listener = make(tmp_path, max_steps=2), Both()
    trainer.callbacks.append(listener)
    assert trainer.train().global_step == 1
    trainer.callbacks.remove(listener)
    assert trainer.train().global_step == 2


# -- checkpoints -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("with_manager", [False, True])
def test_checkpoints_of_an_own_loop(tmp_path, with_manager, caplog):
    class Managed(Custom):
        def _prepare(self, train_dataset, eval_dataset):
            super()._prepare(train_dataset, eval_dataset)
            if with_manager:
                config = hf.CheckpointConfig(output_dir=self.args.output_dir, save_total_limit=2)
                env = hf.StaticDistributedEnvironment()
                self.checkpoint_manager = hf.CheckpointManager(
                    config=config, dist=env, stateful_provider=self, model=self.model
                )

    trainer = custom(tmp_path, Managed)
    trainer.train()
    path = trainer.save_checkpoint()
    assert Path(path) == tmp_path / "checkpoint-3"
    assert [c.key for c in trainer.get_state_components()] == ["model", "optimizer", "scheduler", "trainer", "rng"]
    again = custom(tmp_path, Managed)
    again._prepare(None, None)
    again.load_checkpoint()
    assert again.state.global_step == 3
    assert again.lr_scheduler.last_epoch == 3
    for name, value in parameters(trainer.model).items():
        assert torch.equal(value, again.model.get_parameter(name))
    (tmp_path / "checkpoint-3" / "scheduler.pt").unlink()
    again._prepare(None, None)
    again.load_checkpoint()
    assert (again.state.global_step, again.lr_scheduler.last_epoch) == (3, 0)
    assert "scheduler.pt was deleted" in caplog.text


def test_the_checkpoint_manager(tmp_path, caplog):
    trainer = custom(tmp_path)
    trainer._prepare(None, None)
    config = hf.CheckpointConfig(output_dir=str(tmp_path), save_total_limit=1)
    manager = hf.CheckpointManager(config, None, trainer, trainer.model)
    assert isinstance(manager, hf.CheckpointInterface)
    assert isinstance(trainer, hf.StatefulProvider)
    assert isinstance(trainer, hf.ExtensibleTrainer)
    assert manager.resolve_checkpoint_path(None) is None
    assert "there is no checkpoint" in caplog.text
    with pytest.raises(DataError, match="a checkpoint to load"):
        manager.load_checkpoint()
    first = manager.save_checkpoint()
    manager.set_best_checkpoint(first)
    for step in (1, 2):
        trainer.state.global_step = step
        newest = manager.save_checkpoint()
    kept = sorted(path.name for path in tmp_path.glob("checkpoint-*"))
    assert kept == ["checkpoint-0", "checkpoint-2"]  # the best one, and one more
    assert manager.resolve_checkpoint_path(None) == newest == hf.find_latest_checkpoint(tmp_path)
    assert manager.resolve_checkpoint_path(str(tmp_path / "no")) is None
    assert hf.validate_checkpoint(newest)
    assert not hf.validate_checkpoint(tmp_path)
    manager.save_model(tmp_path / "model")
    with pytest.raises(DataError, match="would be overwritten"):
        manager.save_model(tmp_path / "model")
    manager.save_model(tmp_path / "model", overwrite_output_dir=True)
    with pytest.raises(DataError, match="a single process"):
        hf.CheckpointManager(config, hf.StaticDistributedEnvironment(world_size=2), trainer, trainer.model)


def test_the_checkpoint_manager_of_a_trainer(tmp_path):
    trainer = make(tmp_path, max_steps=2, save_strategy="steps", save_steps=1, save_total_limit=1)
    trainer.train()
    manager = trainer.checkpoint_manager
    assert isinstance(manager, hf.CheckpointInterface)
    newest = str(tmp_path / "checkpoint-2")
    assert manager.resolve_checkpoint_path(None) == newest
    assert manager.save_checkpoint() == newest
    manager.save_model(tmp_path / "model")
    assert (tmp_path / "model" / "model.safetensors").exists()
    again = make(tmp_path, max_steps=3)
    again.checkpoint_manager.load_checkpoint()
    assert again.state.global_step == 2


DELETED = {"optimizer": "optimizer.pt", "scheduler": "scheduler.pt", "rng": "rng_state.pth"}


@pytest.mark.parametrize("name", DELETED)
def test_a_component_whose_file_was_deleted_is_skipped(tmp_path, name, caplog):
    options = {"save_strategy": "steps", "save_steps": 2, "logging_steps": 1, "learning_rate": 0.1}
    make(tmp_path, max_steps=4, **options).train()
    newest = tmp_path / "checkpoint-4"
    (newest / DELETED[name]).unlink()
    trainer = make(tmp_path, max_steps=6, **options)
    assert trainer.train(resume_from_checkpoint=True).global_step == 6
    assert [r["step"] for r in trainer.state.log_history if "loss" in r] == [1, 2, 3, 4, 5, 6]  # not from step 2
    assert f"{DELETED[name]} was deleted from {newest}" in caplog.text
    state = trainer.optimizer.state[next(iter(trainer.model.parameters()))]
    assert int(state["step"]) == (2 if name == "optimizer" else 6)


def test_without_the_progress_training_starts_afresh_with_the_weights(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 4, "learning_rate": 0.1}
    first = make(tmp_path, max_steps=4, **options)
    first.train()
    (tmp_path / "checkpoint-4" / "run.json").unlink()
    again = make(tmp_path, Classifier(), max_steps=1, **options)
    again.args.learning_rate = 0.0
    (tmp_path / "checkpoint-4" / "optimizer.pt").unlink()
    assert again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4")).global_step == 1
    for name, value in parameters(first.model).items():
        assert torch.equal(value, again.model.get_parameter(name))


@pytest.mark.parametrize("name", ["model.safetensors"])
def test_the_weights_are_required(tmp_path, name):
    make(tmp_path, max_steps=2, save_strategy="steps", save_steps=2).train()
    (tmp_path / "checkpoint-2" / name).unlink()
    with pytest.raises(DataError, match=r"model.safetensors is missing|No valid checkpoint|weights"):
        make(tmp_path, max_steps=3).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))


def test_the_components_of_a_trainer_have_forgathers_names(tmp_path):
    trainer = make(tmp_path)
    names = [c.key for c in trainer.get_state_components()]
    assert names[:3] == ["model", "optimizer", "scheduler"]
    assert {"trainer", "rng"} <= set(names)
    assert [c.key for c in trainer.get_state_components() if c.required] == ["model"]


# -- factories and arguments -------------------------------------------------------------------------------------------


def test_factories_make_optimizer_and_scheduler(tmp_path):
    seen = []

    def optimizer(parameters):
        seen.extend(name for name, _ in parameters)
        return torch.optim.SGD([p for _, p in parameters], lr=0.5)

    def scheduler(optimizer):
        return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    more = {"optimizer_factory": optimizer, "lr_scheduler_factory": scheduler}
    trainer = make(tmp_path, max_steps=3, logging_steps=1, more=more)
    trainer.train()
    assert seen == [name for name, _ in trainer.model.named_parameters()]
    assert isinstance(trainer.optimizer, torch.optim.SGD)
    rates = [r["learning_rate"] for r in trainer.state.log_history if "learning_rate" in r]
    assert rates in ([0.5, 0.25, 0.125], [0.25, 0.125, 0.0625])
    with pytest.raises(BadArgument, match="either optimizer_factory or optimizers"):
        make(tmp_path, more={**more, "optimizers": (trainer.optimizer, None)})


def test_the_distributed_environment_has_to_be_that_of_the_launcher(tmp_path):
    make(tmp_path, more={"distributed_env": hf.DistributedEnvironment()})
    with pytest.raises(BadArgument, match=r"distributed_env to have rank 0 of 1, received 'rank 1 of 2'"):
        make(tmp_path, more={"distributed_env": hf.StaticDistributedEnvironment(rank=1, world_size=2)})


def test_a_loss_of_logits(tmp_path):
    plain = make(tmp_path / "a", max_steps=3, logging_steps=1)
    plain.train()
    more = {"compute_loss_func": lambda logits, labels: torch.nn.functional.cross_entropy(logits, labels)}
    given = make(tmp_path / "b", max_steps=3, logging_steps=1, more=more)
    given.train()
    assert losses(given) == pytest.approx(losses(plain))


def test_arguments_of_forgathers_trainer(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="trainformer")
    args = hf.TrainingArguments(str(tmp_path), save_safetensors=False, max_grad_norm=None, seed=-1, gc_threshold=0.5)
    assert "save_safetensors=False has no effect" in caplog.text
    assert args.max_grad_norm == 0
    assert args.seed >= 0
    with pytest.raises(BadArgument, match="fuse_optim_with_backward to be False"):
        hf.TrainingArguments(str(tmp_path), fuse_optim_with_backward=True)
    with pytest.raises(BadArgument, match="torch_compile with activation_memory_budget"):
        hf.TrainingArguments(str(tmp_path), activation_memory_budget=0.5)


# -- callbacks ---------------------------------------------------------------------------------------------------------


def test_progress_goes_to_the_stream(tmp_path):
    stream = io.StringIO()
    callback = hf.ProgressCallback(use_tqdm=False, output_stream=stream)
    make(tmp_path, max_steps=2, logging_steps=1, disable_tqdm=False, callbacks=[callback]).train()
    lines = [line for line in stream.getvalue().splitlines() if line.startswith("step")]
    assert len(lines) == 3  # two records, and the summary
    with pytest.raises(BadArgument, match="output_stream to be 'stdout', 'stderr'"):
        hf.ProgressCallback(output_stream="file")


def test_a_verbose_summary_has_every_argument(tmp_path, caplog):
    caplog.set_level(logging.INFO, logger="trainformer")
    make(tmp_path, max_steps=1, callbacks=[hf.InfoCallback(verbose=True), hf.TrainerControlCallback()]).train()
    assert "adam_beta1=0.9" in caplog.text
    assert "Linear(" in caplog.text
    assert "trainformer ctl" in caplog.text


def test_max_new_tokens_of_generated_texts():
    made = hf.TextgenCallback(prompts=["a"], generation_config={"top_k": 2}, max_new_tokens=7)
    assert made.generate_kwargs(0)["max_new_tokens"] == 7
    given = {"max_new_tokens": 3}
    assert hf.TextgenCallback(prompts=["a"], generation_config=given, max_new_tokens=7).generate_kwargs(0) == {
        "max_new_tokens": 7, "do_sample": False, "pad_token_id": 0,
    }  # fmt: skip
    assert given == {"max_new_tokens": 3}


class Counter:
    """A component of a user."""

    def __init__(self):
        self.count = 0

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


class WithComponent(hf.Trainer):
    def __init__(self, *args, **kwargs):
        self.counter, self.other = Counter(), Counter()
        super().__init__(*args, **kwargs)

    def get_state_components(self):
        return [*super().get_state_components(), hf.StateComponent("counter", self.counter, required=False)]

    def get_statefuls_for_save(self):
        return {**super().get_statefuls_for_save(), "other": self.other}


class CustomWithComponent(Custom):
    counter = other = None

    def get_state_components(self):
        self.counter, self.other = self.counter or Counter(), self.other or Counter()
        return [*super().get_state_components(), hf.StateComponent("counter", self.counter, required=False)]

    def get_statefuls_for_save(self):
        return {**super().get_statefuls_for_save(), "other": self.other}


def test_components_of_a_subclass_are_saved_and_loaded(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2}
    first = make(tmp_path, trainer=WithComponent, max_steps=2, **options)
    first.counter.count, first.other.count = 7, 8
    first.train()
    again = make(tmp_path, trainer=WithComponent, max_steps=3, **options)
    again.train(resume_from_checkpoint=True)
    assert (again.counter.count, again.other.count) == (7, 8)


def test_components_of_an_own_loop_are_saved_and_loaded(tmp_path):
    first = custom(tmp_path, CustomWithComponent)
    first.train()
    first.get_state_components()
    first.counter.count, first.other.count = 7, 8
    first.save_checkpoint()
    again = custom(tmp_path, CustomWithComponent)
    again._prepare(None, None)
    again.load_checkpoint()
    assert (again.counter.count, again.other.count) == (7, 8)


def test_states_that_are_not_saved_or_not_restored(tmp_path):
    options = {"save_strategy": "steps", "save_steps": 2, "learning_rate": 0.1}
    make(tmp_path / "a", max_steps=2, save_optimizer_state=False, save_rng_state=False, **options).train()
    names = {path.name for path in (tmp_path / "a" / "checkpoint-2").iterdir()}
    assert "scheduler.pt" in names
    assert not {"optimizer.pt", "rng_state.pth"} & names
    make(tmp_path / "b", max_steps=2, **options).train()
    trainer = make(tmp_path / "b", max_steps=3, restore_optimizer_state=False, **options)
    assert trainer.train(resume_from_checkpoint=True).global_step == 3
    assert int(trainer.optimizer.state[next(iter(trainer.model.parameters()))]["step"]) == 1


class Position:
    """A loader that knows its position, but cannot be set to one."""

    def state_dict(self):
        return {"index": 3}


def test_statefuls_by_name(tmp_path, caplog):
    trainer = custom(tmp_path)
    trainer._prepare(None, None)
    trainer.train_dataloader = Position()
    assert list(trainer.get_statefuls_for_save()) == ["optimizer", "scheduler", "trainer", "dataset", "rng"]
    assert "dataset" not in trainer.get_statefuls_for_load()
    assert "dataset has no method load_state_dict" in caplog.text
    trainer.train_dataloader = [1, 2]
    assert "dataset" not in trainer.get_statefuls_for_save()
    assert "train_dataloader has no method state_dict" in caplog.text
    trainer.args.save_dataset_state = False
    assert list(trainer.get_statefuls_for_save()) == ["optimizer", "scheduler", "rng"]


def test_checkpoints_that_forgather_wrote(tmp_path):
    """Weights, and one file per component, in a folder below `checkpoints`."""
    torch.manual_seed(3)
    model = Classifier()
    optimizer = torch.optim.Adam(model.parameters(), lr=0.25)
    for number, step in enumerate((9, 4)):
        folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        torch.save(model.state_dict(), folder / "pytorch_model.bin")
        torch.save(optimizer.state_dict(), folder / "optimizer_state.pt")
        torch.save({"global_step": step}, folder / "trainer_state.pt")
        torch.save({"torch_rng_state": torch.get_rng_state(), "initial_seed": 3}, folder / "rng_state.pt")
        os.utime(folder, (number + 1, number + 1))
    (tmp_path / "checkpoints" / "checkpoint-99").mkdir()
    drawn = torch.rand(1)
    trainer = custom(tmp_path)
    trainer._prepare(None, None)
    config = hf.CheckpointConfig(output_dir=str(tmp_path))
    manager = hf.CheckpointManager(config, None, trainer, trainer.model)
    assert manager.resolve_checkpoint_path(None) == str(folder)  # written last
    manager.load_checkpoint()
    assert trainer.state.global_step == 4
    assert trainer.optimizer.param_groups[0]["lr"] == 0.25
    assert torch.equal(torch.rand(1), drawn)
    for name, value in parameters(model).items():
        assert torch.equal(value, trainer.model.get_parameter(name))
