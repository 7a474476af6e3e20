"""`BaseTrainer`: the entry point on JAX. Subclass it and define the loss, or write the step functions yourself.

Turns the user's arguments, model, data and functions into a `JaxRun`. Loop, checkpoints, loggers and callbacks are
those of every other entry point; mesh, steps and optimizers are in `backends.jax`.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, Self

import jax
from flax import nnx
from jax.sharding import Mesh

from trainformer.backends.jax.backend import JaxBackend
from trainformer.backends.jax.compilation import DynamicBatchStep, JittedStep, enable_compilation_cache
from trainformer.backends.jax.precision import resolve_dtype
from trainformer.backends.jax.processes import initialize_distributed, process_group_on, process_shard
from trainformer.backends.jax.sharding import data_shards, make_mesh, make_sharded
from trainformer.backends.jax.step import make_eval_step, make_train_step, resolve_remat
from trainformer.backends.jax.step_metrics import pack_metrics
from trainformer.callbacks.base import CallbackList
from trainformer.callbacks.progress import ProgressBar
from trainformer.checkpointing.tools.jax_models import TrainerRecord
from trainformer.core.errors import BadArgument, expected
from trainformer.data.mixture.mixture import Mixture
from trainformer.data.numpy_loader import numpy_source
from trainformer.data.text.files import cache_dir
from trainformer.engine import Event
from trainformer.jax.aliases import refuse_unknown_keywords, settings_passed
from trainformer.jax.api import JaxTrainerApi
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.hooks import TrainerHooks
from trainformer.jax.limits import FirstBatches
from trainformer.jax.recorded import NoTrainingData
from trainformer.jax.saving import save_trainer, write_weights
from trainformer.jax.serialization import FILE_NAME
from trainformer.jax.trainer_protocol import (
    BaseTrainerProtocol,
    TrainerConfigureDataloaderOutput,
    TrainerConfigureFunctionOutput,
    TrainerConfigureModelOutput,
)
from trainformer.jax.validation import (
    as_source,
    cast_parameters,
    check_eval_arguments,
    check_module,
    check_state,
    checked_hook,
    collect,
    collect_function,
    evaluation_sources,
    keep_sources,
    mixture_sources,
    monitored_metric,
    prepared,
    refuse_other_modules,
    stacked,
    state_on_mesh,
    warn_unused_optimizer_arguments,
)
from trainformer.models.jax.fp8 import check_fp8_device
from trainformer.run.check_report import CheckReport
from trainformer.run.fit import fit
from trainformer.run.jax.preflight import check_run
from trainformer.run.jax.run import JaxRun, JaxSettings
from trainformer.utils.console import PipeConsole

logger = logging.getLogger("trainformer")


class BaseTrainer(TrainerHooks, JaxTrainerApi, BaseTrainerProtocol):
    """Trains a flax nnx model on a mesh of devices.

    `model` is a module, a function that builds one (``lambda rngs: MyModel(rngs=rngs)``; its weights are initialised
    directly in their shards, and no device ever holds all of them), or the folder of a model in HuggingFace format.
    `model_state` is a state to continue from instead. Datasets are anything that
    `trainformer.data.numpy_loader.as_data` takes.

    Define the loss in `compute_loss`, or return step functions of your own from `configure_functions`.

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

    _run: JaxRun

    #: Whether the loss ignores rows for which ``batch["_valid"]`` is False. If so, a smaller last batch is padded with
    #: such rows; if not, the step is compiled once more for its size.
    masks_padding = False

    def __new__(cls, *positional: Any, **keywords: Any) -> Self:
        """Refuse `args=` by its name here, before Python reports that `arguments` is missing."""
        if "args" in keywords and not positional and "arguments" not in keywords:
            refuse_unknown_keywords(cls, ["args"])
        return super().__new__(cls)

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
        refuse_unknown_keywords(type(self), unknown)
        if not isinstance(arguments, TrainingArguments):
            raise BadArgument(expected("arguments to be TrainingArguments", type(arguments).__name__))
        self.arguments = arguments
        given = _one_of("dataset_train", dataset_train, "train_dataset", train_dataset)
        self.dataset_train = Mixture.from_mapping(given)
        self.dataset_eval = _one_of("dataset_eval", dataset_eval, "eval_dataset", eval_dataset)
        self.data_collator = data_collator
        initialize_distributed()  # before anything uses the devices
        enable_compilation_cache(cache_dir() / "jax")
        self.mesh = make_mesh(arguments.sharding_array) if mesh is None else mesh
        self.processes = process_group_on(self.mesh)
        self._shard = process_shard(self.mesh)
        self.batch_sizes = sizes = arguments.resolve(data_shards(self.mesh))
        passed = "gradient_accumulation_steps" in arguments.passed
        if passed and sizes.accumulation != arguments.gradient_accumulation_steps:
            what = "total_batch_size=%d: gradients of %d micro-batches of %d rows per data shard are accumulated"
            logger.info(what, sizes.total, sizes.accumulation, sizes.per_device)
        self.dtype = resolve_dtype(arguments.dtype)
        if arguments.dtype == "fp8":
            check_fp8_device(self.mesh.devices.flat[0])
        self._model = model
        self._initial_state = model_state
        self._state: Any = None
        self.scheduler: Callable[[Any], Any] | None = None
        self.tx: Any = None
        self._run = self._build(CallbackList([*(callbacks or ()), *arguments.timers]))
        self._run.connect()
        # Only the backend keeps the state: there may be no memory for a second one.
        self._initial_state = self._state = None
        if hasattr(self.model_state, "model"):
            self._model = None

    def _build(self, callbacks: CallbackList) -> JaxRun:
        """Build the run: data, its length, state, step functions, in order of dependency."""
        arguments, sizes = self.arguments, self.batch_sizes
        loaders = TrainerConfigureDataloaderOutput(*self.configure_dataloaders())
        self.dataloader_train, self.dataloader_eval, _ = loaders
        limits = arguments.per_epoch_training_steps, arguments.evaluation_limit
        train = as_source(loaders.dataloader_train, sizes.total, arguments.seed, self._shard, limits[0])
        vals = evaluation_sources(
            lambda loader: as_source(loader, sizes.evaluation, arguments.seed, self._shard, limits[1]),
            loaders.dataloader_eval,
        )
        if train is None:
            raise BadArgument("Expected training data, received none. Pass dataset_train.")
        if not vals:
            check_eval_arguments(arguments)
        self.steps_per_epoch = train.batches_per_epoch
        self.max_training_steps = loaders.max_training_steps or arguments.planned_steps(self.steps_per_epoch)
        configured = TrainerConfigureModelOutput(*self.configure_model())
        self._model, self._state, self.tx, self.scheduler = configured
        functions = TrainerConfigureFunctionOutput(*self.configure_functions())
        self.train_step_fn, self.eval_step_fn = functions
        pairs = [(train, functions.train_step_fn), *((val, functions.eval_step_fn) for val in vals.values())]
        for source, function in pairs:
            source = source.source if isinstance(source, FirstBatches) else source
            source = keep_sources(source, isinstance(function, JittedStep))
            if hasattr(source, "pad_last") and not getattr(source, "drop_last", False):
                source.pad_last = isinstance(function, JittedStep) and not isinstance(function, DynamicBatchStep)
        backend = JaxBackend(
            configured.state,
            functions.train_step_fn,
            functions.eval_step_fn,
            self.mesh,
            accumulation=sizes.accumulation,
            learning_rate=configured.scheduler,
            nonfinite=arguments.nonfinite,
            # A hook that no subclass overrides costs nothing.
            on_start=checked_hook(self.on_step_start) if self._overrides("on_step_start") else None,
            on_end=checked_hook(self.on_step_end) if self._overrides("on_step_end") else None,
            steps_per_execution=self._steps_per_execution(functions.train_step_fn),
        )
        values = arguments.run_settings(sizes, self.steps_per_epoch)
        if loaders.max_training_steps is not None:
            values["max_steps"] = loaders.max_training_steps
        precision = arguments.dtype if arguments.dtype == "fp8" else self.dtype.name
        values |= {"precision": precision, "sharding_array": tuple(self.mesh.shape.values())}
        chosen = arguments.metric_for_best_model is not None
        values["monitor_metric"] = monitored_metric(values["monitor_metric"], vals, chosen)
        settings = JaxSettings(**{name: value for name, value in values.items() if name in JaxSettings.defaults()})
        console = PipeConsole()
        loggers = settings.log if isinstance(settings.log, (list, tuple)) else [settings.log]
        has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
        if self.processes.is_main and "console" in loggers and not has_bar:
            callbacks.add(ProgressBar(console))
        return JaxRun(
            self,
            settings,
            backend,
            train_source=train,
            val_sources=vals,
            callbacks=callbacks,
            data=self.dataset_train,
            passed=settings_passed(arguments.passed, values),
            console=console,
            derive=self.derive_metrics,
            summarize=self.summarize_rows if self._overrides("summarize_rows") else None,
            process_group=self.processes,
        )

    def _steps_per_execution(self, step: Any) -> int:
        """How many steps are executed together; raises if they cannot be."""
        steps = self.arguments.steps_per_execution
        if steps == 1:
            return 1
        hooks = [name for name in ("on_step_start", "on_step_end") if self._overrides(name)]
        reason = None
        if not isinstance(step, JittedStep):
            reason = "a train_step_fn of your own"
        elif not step.is_pure:
            reason = f"{type(self).__name__}, which samples on the host in each step"
        elif hooks:
            reason = f"the hook {hooks[0]} of {type(self).__name__}, which receives the state of each step"
        elif self.processes.world_size > 1:
            reason = f"{self.processes.world_size} processes"
        if reason is not None:
            raise BadArgument(expected("steps_per_execution=1", f"{steps} with {reason}"))
        return steps

    # -- data, model and steps -----------------------------------------------------------------------------------

    def create_collect_function(self, max_sequence_length: int | None = None, truncation_mode: str = "keep_end") -> Any:
        """The collate function: makes a batch of a list of samples. A list that it returns is stacked.

        This one drops `ids_to_pop_from_dataset`, truncates sequences of more than `max_sequence_length` tokens to their
        end (``keep_end``) or beginning (``keep_start``), and stacks the samples.
        """
        columns = self.arguments.ids_to_pop_from_dataset or ()
        return partial(collect, columns=columns, length=max_sequence_length, mode=truncation_mode)

    #: Further names of it in EasyDeL. A subclass may override any of them.
    create_grain_collect_function = create_tfds_collect_function = create_collect_function

    def _collate(self) -> Callable[[list[Any]], Any] | None:
        """The user's collate function, that of a subclass, or None to stack the samples as they are."""
        names = ("create_collect_function", "create_grain_collect_function", "create_tfds_collect_function")
        overridden = [name for name in names if self._overrides(name)]
        if self.data_collator is not None:
            return self.data_collator
        if not overridden and not self.arguments.ids_to_pop_from_dataset:
            return None
        return collect_function(getattr(self, (overridden or names)[0]), self.arguments.max_sequence_length)

    def configure_dataloaders(self) -> TrainerConfigureDataloaderOutput:
        """Data loaders: a training batch holds a whole optimizer step."""
        arguments, sizes = self.arguments, self.batch_sizes
        collate = stacked(self._collate())

        def source(dataset: Any, train: bool) -> Any:
            if dataset is None or isinstance(dataset, NoTrainingData):
                return dataset
            return numpy_source(
                prepared(self, dataset, train),
                sizes.total if train else sizes.evaluation,
                shuffle=train and arguments.shuffle,
                seed=arguments.seed
                if not train or arguments.shuffle_seed_train is None
                else arguments.shuffle_seed_train,
                collate=collate,
                drop_last=train and arguments.drop_last,
                shard=self._shard,
                threads=arguments.dataloader_num_workers,
                lookahead=2,  # the backend prefetches one
            )

        train = source(self.dataset_train, True)  # first: it may tell the number of classes
        evaluation: Any = evaluation_sources(lambda dataset: source(dataset, False), self.dataset_eval)
        if list(evaluation) in ([], [""]):
            evaluation = evaluation.get("")
        return TrainerConfigureDataloaderOutput(train, evaluation)

    def configure_model(self) -> TrainerConfigureModelOutput:
        """The model and its train state, sharded over the mesh."""
        arguments = self.arguments
        tx, scheduler = arguments.get_optimizer_and_scheduler(self.max_training_steps)
        if self._initial_state is not None:
            check_state(self._initial_state, self._initial_state)
            state = state_on_mesh(self._initial_state, self.mesh)
            if not hasattr(state, "tx"):
                return TrainerConfigureModelOutput(self.model, state, tx, scheduler)
            warn_unused_optimizer_arguments(arguments)
            return TrainerConfigureModelOutput(None, state, state.tx, None)  # its schedule is unknown
        model = self.load_model(self.model)
        key, frozen = jax.random.key(arguments.seed), self.frozen_patterns()

        def prepare(module: nnx.Module) -> nnx.Module:
            check_module(module)
            return cast_parameters(self.prepare_model(module), arguments)

        state = make_sharded(model, prepare, tx, key, self.mesh, frozen=frozen)
        return TrainerConfigureModelOutput(model if isinstance(model, nnx.Module) else None, state, tx, scheduler)

    def load_model(self, model: Any) -> Any:
        """A module, or a function that builds one, from the `model` argument."""
        if isinstance(model, (str, Path)):
            return self.read_folder(model)
        refuse_other_modules(model)
        if isinstance(model, nnx.Module) or (callable(model) and not isinstance(model, type)):
            return model
        do = "Pass a module, a function of nnx.Rngs that builds one, or a folder; or override configure_model."
        kind = "nothing" if model is None else type(model).__name__
        if isinstance(model, type):
            kind = f"the class {model.__name__}"
            do = f"Pass a function that builds it: lambda rngs: {model.__name__}(rngs)."
        raise BadArgument(expected("a model to train", kind, do))

    def read_folder(self, folder: str | Path, **options: Any) -> nnx.Module:
        """The model of a folder with its weights on the host, so that each device receives its own shard only."""
        from trainformer.models.jax import load_model

        dtype = resolve_dtype(self.arguments.param_dtype)
        return load_model(folder, dtype=dtype, place=lambda _, array: array, **options)

    def frozen_patterns(self) -> list[str]:
        """Regexes of the frozen parameters."""
        frozen = self.arguments.frozen_parameters
        return [frozen] if isinstance(frozen, str) else list(frozen or [])

    def prepare_model(self, model: nnx.Module) -> nnx.Module:
        """Configure remat policy, attention kernel and unrolled layers on a model that supports it."""
        arguments = self.arguments
        if hasattr(model, "configure"):
            is_single_gpu = self.mesh.size == 1 and self.mesh.devices.flat[0].platform == "gpu"
            asked = arguments.unroll_layers
            model.configure(
                remat=resolve_remat(arguments.gradient_checkpointing),
                attention=arguments.attention_kernel if arguments.use_fast_kernels else "xla",
                # All layers on a single GPU (about 30 % faster), else none, which compiles faster.
                unroll=(True if is_single_gpu else 1) if asked is None else asked,
                fp8=arguments.dtype == "fp8",
            )
        elif arguments.attention_kernel != "auto" or arguments.dtype == "fp8":
            name = "dtype" if arguments.dtype == "fp8" else "attention_kernel"
            do = "It configures the models of trainformer.models.jax only."
            raise BadArgument(expected(f"no {name} like this for {type(model).__name__}", getattr(arguments, name), do))
        return model

    def configure_functions(self) -> TrainerConfigureFunctionOutput:
        """The jitted step functions, built from `compute_loss` and `compute_metrics`."""
        if not self._overrides("compute_loss"):
            raise BadArgument(
                f"{type(self).__name__} has no loss: define compute_loss(model, batch, key), or return step functions "
                "from configure_functions."
            )
        arguments, state = self.arguments, self._state if self._state is not None else self.model_state
        shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
        has_own_remat = hasattr(type(state.model), "configure")  # of single layers
        sources = mixture_sources(self)

        def train(accumulation: int) -> Callable[..., Any]:
            step = make_train_step(
                self.compute_loss,
                accumulation=accumulation,
                compute_dtype=self.dtype,
                clip=arguments.max_grad_norm or None,
                sources=sources,
                totals=self.step_totals if self._has_step_totals else None,
                remat=None if has_own_remat else arguments.gradient_checkpointing,
            )
            return pack_metrics(step)

        evaluate = make_eval_step(self.compute_metrics, compute_dtype=self.dtype)
        mesh, sizes = self.mesh, self.batch_sizes
        if self.masks_padding:
            return TrainerConfigureFunctionOutput(
                self.jit_step(train(sizes.accumulation), shardings, train=True),
                self.jit_step(evaluate, shardings, train=False),
            )
        return TrainerConfigureFunctionOutput(
            DynamicBatchStep(train, mesh, shardings, per_device=sizes.per_device, train=True),
            DynamicBatchStep(lambda _: evaluate, mesh, shardings, per_device=sizes.per_device, train=False),
        )

    @property
    def _has_step_totals(self) -> bool:
        return self._overrides("step_totals")

    def jit_step(self, step: Callable[..., Any], shardings: Any, train: bool) -> JittedStep:
        """A step that masks padding rows, jitted on the mesh."""
        return JittedStep(step, self.mesh, shardings, train=train)

    # -- events ------------------------------------------------------------------------------------------------------

    def _overrides(self, name: str) -> bool:
        return getattr(type(self), name) is not getattr(BaseTrainer, name)

    def listeners(self) -> dict[Event, Any]:
        """Event handlers of the trainer itself, called before any callback."""

        def log(metrics: dict[str, float]) -> None:
            changed = self.on_log(metrics, self.state.step)
            if changed is not None and changed is not metrics:
                metrics.clear()
                metrics.update(changed)

        return {Event.LOG: log} if self._overrides("on_log") else {}

    # -- train, evaluate, save -------------------------------------------------------------------------------------

    def train(self, ckpt_path: str | Path | None = None) -> Any:
        """Train to the end, resuming an earlier run of the same command. Returns the final state.

        `ckpt_path` is a checkpoint, a run folder, or a folder from `save_pretrained` to resume from. It is an error if
        it cannot be loaded.
        """
        run = self._run
        if ckpt_path is not None:
            if run.folder is None:
                run.settings.resume = str(ckpt_path)
            else:
                run.load(Path(ckpt_path))
        fit(run)
        return self.model_state

    def check(self, raise_on_failure: bool = True) -> CheckReport:
        """Check in seconds whether this run will work; state, random numbers and position are left unchanged."""
        return check_run(self._run, raise_on_failure)

    def eval(self, state: Any = None) -> dict[str, float]:
        """Evaluate a state on the evaluation data. Returns metrics named ``eval_...``.

        The default is the current state, or with the callback EMA the average of its weights.
        """
        run, backend = self._run, self._run.backend
        if run.val_source is None:
            raise BadArgument("There is no evaluation data. Pass dataset_eval.")
        if state is not None:
            check_state(state, backend.state)
        metrics = {name: run.validate(name, state) for name in run.val_sources}
        return {
            "_".join(filter(None, ("eval", name, metric.removeprefix(f"val/{name}/" if name else "val/")))): value
            for name, found in metrics.items()
            for metric, value in found.items()
        }

    evaluate = eval

    def save_pretrained(self, ckpt_path: str | Path, state: Any = None) -> str:
        """Write the state, the arguments and the model's weights to a folder, atomically.

        `train(ckpt_path=...)` resumes from it. The weights of a model that came from HuggingFace open there again.
        """
        return str(save_trainer(self, Path(ckpt_path), state))

    def save(self, path: str | Path) -> str:
        """`save_pretrained` for callbacks: a relative path is one in the run folder."""
        return self.save_pretrained((self.run_folder or Path()) / Path(path).expanduser())

    def save_weights(self, folder: Path, state: Any) -> list[str]:
        """Write the weights with the model's own `save_pretrained`, or by parameter path. Returns the file names."""
        return write_weights(folder, state)

    def save_assets(self, folder: Path) -> list[str]:
        """Write the files that belong next to the state of a checkpoint. Returns their names."""
        self.arguments.save(folder / FILE_NAME)
        return [FILE_NAME, TrainerRecord.of(self).write(folder)]

    def no_options(self, options: Mapping[str, Any]) -> None:
        """Raise for options of predictions that are no generated texts."""
        if options:
            raise BadArgument(expected(f"no options for {type(self).__name__}", ", ".join(options), "Leave them out."))


def _one_of(name: str, value: Any, other: str, second: Any) -> Any:
    if value is not None and second is not None:
        raise BadArgument(f"Expected {name} or {other}, which mean the same, received both. Pass one of them.")
    return second if value is None else value
