"""What users pass to a trainer and return from its `configure_*` methods: types, conversions and checks."""

from __future__ import annotations

import copy
import inspect
import logging
from collections.abc import Callable, Collection, Mapping
from typing import Any

import jax
from flax import linen, nnx
from jax.sharding import Mesh, NamedSharding

from trainformer.backends.jax.precision import cast_floating, resolve_dtype
from trainformer.backends.jax.sharding import copy_to_mesh, state_shardings
from trainformer.backends.jax.state import TrainState
from trainformer.backends.jax.step import Sources
from trainformer.core.errors import BadArgument, expected
from trainformer.data.collate import stack_samples
from trainformer.data.dataset import is_array
from trainformer.data.mixture.dataset import MixtureSource
from trainformer.data.mixture.mixture import Mixture
from trainformer.data.numpy_loader import as_data, numpy_source
from trainformer.data.sharding import Shard
from trainformer.jax.arguments import TrainingArguments
from trainformer.jax.limits import FirstBatches
from trainformer.run.validation_sets import check_monitor, default_monitor, metric_name, validation_sets

logger = logging.getLogger("trainformer")

_OPTIMIZER_ARGUMENTS = ("learning_rate", "optimizer", "optimizer_kwargs", "scheduler", "weight_decay", "warmup_steps")


def as_source(loader: Any, batch_size: int, seed: int, shard: Shard, limit: int | None = None) -> Any:
    """A source as it is, any other loader as a source of its batches; with a `limit`, the first ones of each epoch."""
    if loader is None:
        return None
    if not hasattr(loader, "batches") or not hasattr(loader, "batches_per_epoch"):
        loader = numpy_source(loader, batch_size, seed=seed, batched=True, shard=shard, lookahead=2)
    return loader if limit is None else FirstBatches(loader, limit)


def evaluation_sets(data: Any) -> dict[str, Any]:
    """Evaluation data by name. Only a dict of datasets has names: a dict of arrays is one dataset, its columns.

    >>> list(evaluation_sets({"clean": [{"x": 1}], "shifted": [{"x": 2}]})), list(evaluation_sets({"x": [1.0, 2.0]}))
    (['clean', 'shifted'], [''])
    """
    if isinstance(data, Mapping) and not all(map(_is_dataset, data.values())):
        return {"": data}
    return validation_sets(data, "dataset_eval", nests=True)


def _is_dataset(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return bool(value) and isinstance(value[0], Mapping)
    return not is_array(value)


def evaluation_sources(make: Callable[[Any], Any], data: Any) -> dict[str, Any]:
    """What `make` returns for each evaluation dataset, or loader of one; by name, and empty without any."""
    return {name: make(part) for name, part in evaluation_sets(data).items()}


def monitored_metric(metric: str, names: Collection[str], was_chosen: bool) -> str:
    """The metric to monitor. Of several evaluation datasets, one chosen as in HF's arguments, or that of the first.

    >>> monitored_metric("val/clean_loss", ["shifted", "clean"], was_chosen=True)
    'val/clean/loss'
    """
    own = metric.removeprefix("val/")
    for name in sorted(names, key=len, reverse=True):
        if name and own.startswith(f"{name}_"):
            return metric_name(own.removeprefix(f"{name}_"), name)
    if was_chosen:
        check_monitor(metric, "metric_for_best_model", names)
        return metric
    return default_monitor(metric, names)


def prepared(trainer: Any, dataset: Any, train: bool) -> Any:
    """The data as the trainer prepares them; those of a mixture source by source."""
    if not isinstance(dataset, Mixture):
        return trainer.prepare_dataset(dataset, train)
    if not train:
        do = "A mixture says how to draw training data: evaluate on each source by itself."
        raise BadArgument(expected("data to evaluate", "a Mixture", do))
    steps = trainer.arguments.per_epoch_training_steps
    if steps is not None and dataset.epoch is None:
        dataset = copy.copy(dataset)
        dataset.epoch = steps * trainer.batch_sizes.total
    return dataset.load(lambda data: as_data(trainer.prepare_dataset(data, train)))


def mixture_sources(trainer: Any) -> Sources | None:
    """The sources whose losses a train step computes, if the training data are a mixture."""
    mixture = trainer.dataset_train
    if not isinstance(mixture, Mixture) or not isinstance(trainer.dataloader_train, MixtureSource):
        return None
    return Sources(mixture.names, mixture.is_single)


def keep_sources(source: Any, keep: bool) -> Any:
    """Keep the sources of samples in the batches of a mixture, or not. Returns the source of its batches."""
    if not isinstance(source, MixtureSource):
        return source
    source.keeps_column = keep
    return source.source


def collect(samples: list[Any], columns: Collection[str], length: int | None, mode: str) -> Any:
    """A batch of samples without some columns, and with sequences truncated to `length`."""
    if mode not in ("keep_end", "keep_start"):
        raise BadArgument(expected("truncation_mode to be 'keep_end' or 'keep_start'", mode))

    def truncated(value: Any) -> Any:
        if length is None or not hasattr(value, "__len__") or isinstance(value, (str, Mapping)) or len(value) <= length:
            return value
        return value[-length:] if mode == "keep_end" else value[:length]

    if not all(isinstance(sample, Mapping) for sample in samples):
        if columns:
            raise BadArgument(expected("samples with names to drop columns of", type(samples[0]).__name__))
        return stack_samples([truncated(sample) for sample in samples])
    return stack_samples([{k: truncated(v) for k, v in sample.items() if k not in columns} for sample in samples])


def stacked(collate: Callable[[list[Any]], Any] | None) -> Callable[[list[Any]], Any] | None:
    """A collate function that may return a list of samples, which are stacked."""
    if collate is None:
        return None

    def collate_and_stack(samples: list[Any]) -> Any:
        batch = collate(samples)
        return stack_samples(batch) if isinstance(batch, list) else batch

    return collate_and_stack


def collect_function(make: Callable[..., Any], max_sequence_length: int | None) -> Any:
    """Call a `create_collect_function` with those of EasyDeL's arguments that it takes."""
    given = {"max_sequence_length": max_sequence_length, "truncation_mode": "keep_end"}
    known = inspect.signature(make).parameters.values()
    takes_any = any(parameter.kind is parameter.VAR_KEYWORD for parameter in known)
    accepted = {parameter.name for parameter in known}
    return make(**{name: value for name, value in given.items() if takes_any or name in accepted})


def check_eval_arguments(arguments: TrainingArguments) -> None:
    """For a run without evaluation data: refuse `metric_for_best_model`, warn about `evaluation_strategy`."""
    if arguments.metric_for_best_model is not None:
        what = f"evaluation data with metric_for_best_model={arguments.metric_for_best_model!r}"
        raise BadArgument(expected(what, "none", "Pass dataset_eval."))
    if arguments.evaluation_strategy != "no":
        strategy = arguments.evaluation_strategy
        logger.warning("evaluation_strategy=%r without evaluation data: pass dataset_eval", strategy)


def check_module(model: Any) -> None:
    """Raise if what a function of the user built is not a module of flax.nnx with parameters."""
    refuse_other_modules(model)
    if not isinstance(model, nnx.Module):
        do = "Return the module from the function passed as model."
        raise BadArgument(expected("a module of flax.nnx", "None" if model is None else type(model).__name__, do))


def refuse_other_modules(model: Any) -> None:
    """Raise for a torch module, or a module of flax.linen, bare or wrapped, that has seen no input yet."""
    if any(base.__module__.partition(".")[0] == "torch" for base in type(model).__mro__):
        do = "Train it with trainformer.Trainer, or pass the folder of a supported HuggingFace model."
        raise BadArgument(f"Expected a module of flax.nnx, received {type(model).__name__}, a torch module. {do}")
    wrapped = isinstance(model, nnx.bridge.ToNNX)
    if isinstance(model, linen.Module) or (wrapped and not jax.tree.leaves(nnx.state(model, nnx.Param))):
        name = type(model.to_nnx__module if wrapped else model).__name__
        given = f"{name} of flax.linen" + (", not initialised" if wrapped else "")
        do = (
            "Wrap it with flax's bridge and initialise it with an input: "
            f"nnx.bridge.ToNNX({name}(...), rngs=nnx.Rngs(0)).lazy_init(x)."
        )
        raise BadArgument(f"Expected a module of flax.nnx, received {given}. {do}")


def cast_parameters(model: nnx.Module, arguments: TrainingArguments) -> nnx.Module:
    """The model with its parameters in `param_dtype`, if the user passed it. The original is not changed."""
    if "param_dtype" not in arguments.passed:
        return model
    graph, params, *rest = nnx.split(model, nnx.Param, ...)
    return nnx.merge(graph, cast_floating(params, resolve_dtype(arguments.param_dtype)), *rest)


def state_on_mesh(state: Any, mesh: Mesh) -> Any:
    """The state as it is if it lies on the mesh, else a copy on it."""
    shardings = [getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(state)]
    is_on_mesh = all(isinstance(sharding, NamedSharding) and sharding.mesh == mesh for sharding in shardings)
    if is_on_mesh or not isinstance(state, TrainState):
        return state
    rules = getattr(state.model, "partition_rules", None)
    return copy_to_mesh(state, state_shardings(state, mesh, rules))


def warn_unused_optimizer_arguments(arguments: TrainingArguments) -> None:
    """A `model_state` has its own optimizer: warn about optimizer arguments that are not used."""
    unused = [name for name in _OPTIMIZER_ARGUMENTS if name in arguments.passed]
    if unused:
        logger.warning(
            "model_state has its own optimizer: %s not used. Pass model=state.model to start with a new one",
            f"{', '.join(unused)} {'is' if len(unused) == 1 else 'are'}",
        )


def check_state(state: Any, like: Any) -> None:
    """Raise if `state` is not a state of this run, or if a step has donated its buffers."""
    if not isinstance(state, type(like)):
        raise BadArgument(expected(f"a state ({type(like).__name__})", type(state).__name__, "train() returns one."))
    if any(isinstance(leaf, jax.Array) and leaf.is_deleted() for leaf in jax.tree.leaves(state)):
        do = "Use the state that train() returned last, or trainer.model_state."
        raise BadArgument(expected("a live state", "one whose buffers were donated to a later step", do))


def checked_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """A user's hook that must return a state, (state, metrics) or None."""

    def call(state: Any, *rest: Any) -> Any:
        returned = hook(state, *rest)
        is_pair = isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], Mapping)
        new = returned[0] if is_pair else returned
        if new is None:
            return (state, returned[1]) if is_pair else None
        if not isinstance(new, type(state)):
            what = f"{hook.__name__} to return None or a state ({type(state).__name__})"
            raise BadArgument(expected(what, type(new).__name__))
        return returned

    return call
