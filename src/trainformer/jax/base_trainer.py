"""`BaseTrainer`: the way in on JAX. Subclass it, say what the loss is, or write the step functions yourself.

Owns how arguments, model, data and functions of a user become a session. The loop, checkpoints, loggers and callbacks
are those of every other way in; meshes, steps and optimizers are the backend's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import jax
from flax import nnx
from jax.sharding import Mesh
from rich.console import Console

from trainformer.backends.jax.backend import JaxBackend, StepHooks
from trainformer.backends.jax.dynamic_batch import AnyRowsStep
from trainformer.backends.jax.mesh import data_shards, make_mesh
from trainformer.backends.jax.precision import attention_kernel, resolve_dtype
from trainformer.backends.jax.processes import join, peers_on, rows_of_process
from trainformer.backends.jax.remat import resolve_remat
from trainformer.backends.jax.sharding import create_sharded, init_sharded
from trainformer.backends.jax.step import JittedStep, jit_eval_step, jit_train_step, make_eval_step, make_train_step
from trainformer.backends.jax.step_metrics import telling
from trainformer.callbacks.base import CallbackList
from trainformer.callbacks.progress import ProgressBar
from trainformer.core.errors import BadArgument, expected
from trainformer.data.numpy_loader import numpy_source
from trainformer.engine import Event
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.naming import refuse_unknown, settings_passed
from trainformer.jax.outputs import (
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
)
from trainformer.jax.saving import save_assets, save_trainer, save_weights
from trainformer.jax.sources import as_source, stacking
from trainformer.jax.validation import (
    check_usable,
    checked_hook,
    kept_as,
    on_mesh,
    refuse_best_of_nothing,
    warn_of_two_optimizers,
)
from trainformer.run.api import TrainerApi
from trainformer.run.fit import fit
from trainformer.run.jax.run import JaxRun, JaxSettings


class BaseTrainer(TrainerApi):
    """Trains a model of flax nnx on a mesh of devices.

    `model` is a module, a function that builds one (``lambda rngs: MyModel(rngs=rngs)``; its weights are then drawn
    where they belong, and no device ever holds all of them), or the folder of a model in HuggingFace's format.
    `model_state` is a state to go on from instead. Data are anything `trainformer.data.numpy_loader.as_data` takes.

    Say what the loss is by `compute_loss`, or return functions of your own from `configure_functions`.

    >>> import jax.numpy as jnp
    >>> from flax import nnx
    >>> class LineTrainer(BaseTrainer):
    ...     def compute_loss(self, model, batch, key):
    ...         return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)
    >>> x = jnp.linspace(-1, 1, 64)[:, None]
    >>> arguments = TrainingArguments(
    ...     num_train_epochs=30, learning_rate=0.1, total_batch_size=16, weight_decay=0.0, log="none", output_dir="line"
    ... )
    >>> line = nnx.Linear(1, 1, rngs=nnx.Rngs(0))
    >>> trainer = LineTrainer(arguments, model=line, dataset_train={"x": x, "y": 2 * x + 1})
    >>> state = trainer.train()
    >>> round(float(state.params["bias"][0]), 2)
    1.0
    """

    #: Whether the loss leaves out rows for which ``batch["_valid"]`` is False. If so, a last batch that is smaller than
    #: the others is filled up with such rows; if not, the step is compiled once more for its size.
    leaves_out_padding = False

    def __init__(
        self,
        arguments: TrainingArguments,
        model: Any = None,
        *,
        model_state: Any = None,
        dataset_train: Any = None,
        dataset_eval: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        callbacks: Iterable[Any] | None = None,
        mesh: Mesh | None = None,
        **unknown: Any,
    ) -> None:
        refuse_unknown(type(self), unknown)
        if not isinstance(arguments, TrainingArguments):
            raise BadArgument(expected("arguments to be TrainingArguments", type(arguments).__name__))
        self.arguments = arguments
        self.dataset_train = _one_of("dataset_train", dataset_train, "train_dataset", train_dataset)
        self.dataset_eval = _one_of("dataset_eval", dataset_eval, "eval_dataset", eval_dataset)
        self.data_collator = data_collator
        join()  # before anything asks for devices
        self.mesh = make_mesh(arguments.sharding_array) if mesh is None else mesh
        self.processes = peers_on(self.mesh)
        self._rows = rows_of_process(self.mesh)
        self.batch_sizes = arguments.resolve(data_shards(self.mesh))
        self.dtype = resolve_dtype(arguments.dtype)
        self._model = model
        self._given_state = model_state
        self._state: Any = None
        self.scheduler: Callable[[Any], Any] | None = None
        self.tx: Any = None
        self._run = self._build(CallbackList(callbacks))
        self._run.connect()
        # What is trained is the backend's alone: beside it there need not be room for another one.
        self._given_state = self._state = None
        if hasattr(self.model_state, "model"):
            self._model = None

    def _build(self, callbacks: CallbackList) -> JaxRun:
        """Everything in the order in which one part needs the other: data, their length, state, functions."""
        arguments, sizes = self.arguments, self.batch_sizes
        loaders = TrainerConfigureDataloaderOutput(*self.configure_dataloaders())
        train = as_source(loaders.dataloader_train, sizes.total, arguments.seed, self._rows)
        val = None
        if loaders.dataloader_eval is not None:
            val = as_source(loaders.dataloader_eval, sizes.evaluation, arguments.seed, self._rows)
        if train is None:
            raise BadArgument("Expected data to train on, received none. Pass dataset_train.")
        if val is None:
            refuse_best_of_nothing(arguments)
        self.steps_per_epoch = train.batches_per_epoch
        self.max_training_steps = loaders.max_training_steps or arguments.planned_steps(self.steps_per_epoch)
        configured = TrainerConfigureModelOutput(*self.configure_model())
        self._model, self.tx = configured.model, configured.tx
        self.scheduler = configured.scheduler
        self._state = configured.state
        functions = TrainerConfigureFunctionOutput(*self.configure_functions())
        pairs: tuple[tuple[Any, Any], ...] = (train, functions.train_step_fn), (val, functions.eval_step_fn)
        for source, function in pairs:
            if hasattr(source, "pad_last") and not getattr(source, "drop_last", False):
                source.pad_last = isinstance(function, JittedStep) and not isinstance(function, AnyRowsStep)
        backend = JaxBackend(
            configured.state,
            functions.train_step_fn,
            functions.eval_step_fn,
            self.mesh,
            accumulation=sizes.accumulation,
            learning_rate=configured.scheduler,
            nonfinite=arguments.nonfinite,
            hooks=self._step_hooks(),
        )
        values = arguments.run_settings(sizes, self.steps_per_epoch)
        if loaders.max_training_steps is not None:
            values["max_steps"] = loaders.max_training_steps
        values |= {"precision": self.dtype.name, "sharding_array": tuple(self.mesh.shape.values())}
        settings = JaxSettings(**{name: value for name, value in values.items() if name in JaxSettings.defaults()})
        console = Console()
        shows = self.processes.is_main and "console" in _as_list(settings.log)
        if shows and not any(isinstance(cb, ProgressBar) for cb in callbacks):
            callbacks.add(ProgressBar(console))
        return JaxRun(
            self,
            settings,
            backend,
            train_source=train,
            val_source=val,
            callbacks=callbacks,
            data=self.dataset_train,
            passed=settings_passed(arguments.passed, values),
            console=console,
            derive=self.derive_metrics,
            process_group=self.processes,
        )

    # -- what a subclass may say otherwise -----------------------------------------------------------------------

    def compute_loss(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Any:
        """The loss of a batch: a mean over its rows, or ``Loss(sum, weight, metrics)``. It is differentiated.

        The model is in training mode. `key` is a random key of its own for each step and micro-batch.
        """
        raise NotImplementedError

    def compute_metrics(self, model: nnx.Module, batch: Mapping[str, Any], key: Any) -> Any:
        """What an evaluation measures, in the same form; the model is in evaluation mode. By default the loss."""
        return self.compute_loss(model, batch, key)

    def derive_metrics(self, metrics: dict[str, float]) -> dict[str, float]:
        """Further metrics from the means of a whole evaluation."""
        return {}

    def create_collect_function(self) -> Callable[[list[Any]], Any] | None:
        """What makes a batch of a list of samples. A list that it returns, and what None stands for, is stacked."""
        return None

    def prepare_dataset(self, dataset: Any, train: bool) -> Any:
        """The data as samples to make batches of."""
        return dataset

    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
        """Batches of the data: those of a whole optimizer step, and those of an evaluation."""
        arguments, sizes = self.arguments, self.batch_sizes
        collect = self.data_collator or self.create_collect_function()

        def source(dataset: Any, train: bool) -> Any:
            if dataset is None:
                return None
            return numpy_source(
                self.prepare_dataset(dataset, train),
                sizes.total if train else sizes.evaluation,
                shuffle=train and arguments.shuffle,
                seed=arguments.seed,
                collate=None if collect is None else stacking(collect),
                drop_last=train and arguments.drop_last,
                shard=self._rows,
                threads=arguments.dataloader_num_workers,
                lookahead=2,  # the backend takes one ahead
            )

        return TrainerConfigureDataloaderOutput(source(self.dataset_train, True), source(self.dataset_eval, False))

    def configure_model(self) -> TrainerConfigureModelOutput:
        """The model and its state on the mesh: weights, optimizer state and random key, each where it belongs."""
        arguments = self.arguments
        tx, scheduler = arguments.get_optimizer_and_scheduler(self.max_training_steps)
        if self._given_state is not None:
            check_usable(self._given_state, self._given_state)
            state = on_mesh(self._given_state, self.mesh)
            if not hasattr(state, "tx"):
                return TrainerConfigureModelOutput(self.model, state, tx, scheduler)
            warn_of_two_optimizers(arguments)
            return TrainerConfigureModelOutput(None, state, state.tx, None)  # nobody knows its learning rate
        model = self.load_model(self.model)
        key, frozen = jax.random.key(arguments.seed), self.frozen_patterns()
        if isinstance(model, nnx.Module):
            self.prepare_model(model)
            state, _ = create_sharded(kept_as(model, arguments), tx, key, self.mesh, frozen=frozen)
        else:

            def build(rngs: nnx.Rngs) -> nnx.Module:
                return kept_as(self.prepare_model(model(rngs)), arguments)

            state, _ = init_sharded(build, tx, key, self.mesh, frozen=frozen)
            model = None
        return TrainerConfigureModelOutput(model, state, tx, scheduler)

    def load_model(self, model: Any) -> Any:
        """A module, or a function that builds one, from what was passed as `model`."""
        if isinstance(model, (str, Path)):
            return self.read_folder(model)
        if isinstance(model, nnx.Module) or (callable(model) and not isinstance(model, type)):
            return model
        do = "Pass a module, a function of nnx.Rngs that builds one, or a folder; or override configure_model."
        raise BadArgument(expected("a model to train", "nothing" if model is None else repr(model), do))

    def read_folder(self, folder: str | Path, **options: Any) -> nnx.Module:
        """The model of a folder, its weights on the host: each device is then sent its own part, and none holds all."""
        from trainformer.models.jax import load_model

        dtype = resolve_dtype(self.arguments.param_dtype)
        return load_model(folder, dtype=dtype, place=lambda _, array: array, **options)

    def frozen_patterns(self) -> list[str]:
        """Regular expressions of the parameters that are not trained."""
        frozen = self.arguments.frozen_parameters
        return [frozen] if isinstance(frozen, str) else list(frozen or [])

    def prepare_model(self, model: nnx.Module) -> nnx.Module:
        """Tell a model that can be told how to compute: rematerialisation, attention, unrolled layers."""
        arguments = self.arguments
        if hasattr(model, "configure"):
            model.configure(
                remat=resolve_remat(arguments.gradient_checkpointing),
                attention=attention_kernel(arguments.use_fast_kernels, self.dtype),
                unroll=_unroll(arguments.unroll_layers, self.mesh),
            )
        return model

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """The two functions of a run, made of `compute_loss` and `compute_metrics`."""
        if type(self).compute_loss is BaseTrainer.compute_loss:
            raise BadArgument(
                f"{type(self).__name__} does not say what to train: define compute_loss(model, batch, key), or return "
                "step functions from configure_functions."
            )
        arguments, state = self.arguments, self._state
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        told = hasattr(type(state.model), "configure")  # it computes its layers again by itself

        def train(accumulation: int) -> Callable[..., Any]:
            step = make_train_step(
                self.compute_loss,
                accumulation=accumulation,
                compute_dtype=self.dtype,
                clip=arguments.max_grad_norm or None,
                remat=None if told else arguments.gradient_checkpointing,
            )
            return telling(step)

        evaluate = make_eval_step(self.compute_metrics, compute_dtype=self.dtype)
        mesh, sizes = self.mesh, self.batch_sizes
        if self.leaves_out_padding:
            return TrainerConfigureFunctionOutput(
                jit_train_step(train(sizes.accumulation), mesh, shardings), jit_eval_step(evaluate, mesh, shardings)
            )
        return TrainerConfigureFunctionOutput(
            AnyRowsStep(train, mesh, shardings, per_device=sizes.per_device, train=True),
            AnyRowsStep(lambda _: evaluate, mesh, shardings, per_device=sizes.per_device, train=False),
        )

    # -- hooks -----------------------------------------------------------------------------------------------------

    def on_step_start(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        """Before a step, with the number of steps done. A state that is returned is the one trained from."""

    def on_step_end(self, state: Any, metrics: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """After a step, with the number of steps done. Return nothing, another state, or (state, metrics).

        The values of `metrics` are on the device; reading one waits for it. Do not keep the state: the next step reuses
        its memory.
        """

    def on_log(self, metrics: dict[str, float], *args: Any, **kwargs: Any) -> Any:
        """When metrics are logged, with the number of steps done. Return nothing, or those to log instead."""

    def _step_hooks(self) -> StepHooks:
        """The hooks that a subclass defines; others cost nothing."""
        return StepHooks(
            checked_hook(self.on_step_start) if type(self).on_step_start is not BaseTrainer.on_step_start else None,
            checked_hook(self.on_step_end) if type(self).on_step_end is not BaseTrainer.on_step_end else None,
        )

    def listeners(self) -> dict[Event, Any]:
        """What the session calls on events, before any callback."""

        def log(metrics: dict[str, float]) -> None:
            changed = self.on_log(metrics, self.state.step)
            if changed is not None and changed is not metrics:
                metrics.clear()
                metrics.update(changed)

        return {Event.LOG: log} if type(self).on_log is not BaseTrainer.on_log else {}

    # -- what one does with a trainer ------------------------------------------------------------------------------

    def train(self, ckpt_path: str | Path | None = None) -> Any:
        """Train to the end, going on where an earlier run of the same command was. Returns the final state.

        `ckpt_path` is a checkpoint, a run's folder, or what `save_pretrained` wrote, to go on from. One that cannot be
        loaded is an error.
        """
        run = self._run
        if ckpt_path is not None:
            if run.folder is None:
                run.settings.resume = str(ckpt_path)
            else:
                run.load(Path(ckpt_path))
        fit(run)
        return self.model_state

    def eval(self, state: Any = None) -> dict[str, float]:
        """Evaluate a state, by default the present one, on the evaluation data: metrics named ``eval_...``."""
        run, backend = self._run, self._run.backend
        if run.val_source is None:
            raise BadArgument("There are no data to evaluate on. Pass dataset_eval.")
        present = backend.state
        if state is not None:
            check_usable(state, present)
        try:
            backend.state = present if state is None else state
            metrics = run.validate()
        finally:
            backend.state = present
        return {f"eval_{name.removeprefix('val/')}": value for name, value in metrics.items()}

    evaluate = eval

    def save_pretrained(self, ckpt_path: str | Path, state: Any = None) -> str:
        """Write the state, the arguments and the model's weights to a folder, all or nothing.

        `train(ckpt_path=...)` goes on from it. The weights of a model that came from HuggingFace open there again.
        """
        return str(save_trainer(self, Path(ckpt_path), state))

    save = save_pretrained  # what callbacks call it

    def save_weights(self, folder: Path, state: Any) -> list[str]:
        """Write the weights of a state to a folder; the names of the files."""
        return save_weights(self, folder, state)

    def save_assets(self, folder: Path) -> list[str]:
        """Write what belongs beside the state of a checkpoint; the names of the files."""
        return save_assets(self, folder)

    @property
    def model(self) -> Any:
        """The module with the present weights; until there is a state, what was passed as `model`."""
        is_made = self._model is None and "_run" in self.__dict__
        return self.model_state.model if is_made else self._model

    @model.setter
    def model(self, model: Any) -> None:
        self._model = model

    @property
    def model_state(self) -> Any:
        """The state that is trained."""
        return self._run.backend.state

    @property
    def task(self) -> BaseTrainer:
        """What callbacks look for a model in."""
        return self

    @property
    def lr(self) -> float:
        """The learning rate that was asked for."""
        return self.arguments.learning_rate

    def was_set(self, name: str) -> bool:
        """Whether the user passed a setting."""
        return name in self._run.passed

    def __getattr__(self, name: str) -> Any:
        """The settings of the run, by the names that all runs share: callbacks look for them."""
        run = self.__dict__.get("_run")
        if run is None or name not in run.settings.defaults():
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
        return getattr(run.settings, name)

    @property
    def active_optimizer(self) -> Any:
        """The optimizer at work."""
        return self.tx

    @property
    def active_scheduler(self) -> Any:
        """The learning rate at work."""
        return Rates(self)


class Rates:
    """The learning rate, as callbacks of other libraries ask for it."""

    def __init__(self, trainer: BaseTrainer) -> None:
        self._trainer = trainer

    def get_last_lr(self) -> list[float]:
        """The rate of the last step."""
        schedule, step = self._trainer.scheduler, self._trainer.state.step
        return [] if schedule is None else [float(schedule(max(0, step - 1)))]


def _one_of(name: str, value: Any, other: str, second: Any) -> Any:
    if value is not None and second is not None:
        raise BadArgument(f"Expected {name} or {other}, which mean the same, received both. Pass one of them.")
    return second if value is None else value


def _unroll(asked: int | bool | None, mesh: Mesh) -> int | bool:
    """How many layers are unrolled: on one GPU all (some 30 % faster), elsewhere none, which compiles faster."""
    if asked is not None:
        return asked
    return True if mesh.size == 1 and mesh.devices.flat[0].platform == "gpu" else 1


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
