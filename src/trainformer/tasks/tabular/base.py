"""Base class of the tabular tasks: numbers and categories, encoded with what the training rows tell.

Tables are read by `data.tabular`, which also owns the encoder; the networks are in `models.tabular`.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping, Sequence
from dataclasses import KW_ONLY, dataclass, field, fields
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from trainformer.core import BadArgument, DataError
from trainformer.core.errors import check_choice, check_count, expected
from trainformer.data.fetcher import unwrap_subsets
from trainformer.data.metadata import DatasetInfo
from trainformer.data.tabular.encoder import TableEncoder
from trainformer.data.tabular.table import Table, column_named, load_table
from trainformer.losses.numerics import upcast
from trainformer.models.backbones import UnbuiltModel
from trainformer.models.tabular import TABULAR_MODELS, build_tabular
from trainformer.tasks.base import TaskBase
from trainformer.tasks.export_limits import WeightsOnly

TARGET_NAMES = ("target", "label", "y", "class")  # looked for if none is named


@dataclass(eq=False)
class TabularTask(TaskBase):
    """Base class of the tabular tasks, with the arguments that they share."""

    network: str | nn.Module = "mlp"
    target: str | Sequence[str] | None = None
    _: KW_ONLY
    categorical: Sequence[str] | None = None
    ignore: Sequence[str] = ()
    width: int = 128
    depth: int = 2
    dropout: float = 0.1
    scale: bool = True

    encoder: TableEncoder | None = field(init=False, default=None, repr=False)
    several_targets: ClassVar[bool] = False

    def __post_init__(self) -> None:
        if not isinstance(self.network, nn.Module):
            check_choice("network", self.network, TABULAR_MODELS)
        check_count("width", self.width)
        check_count("depth", self.depth, least=0 if self.network == "mlp" else 1)
        if not isinstance(self.dropout, int | float) or not 0 <= self.dropout < 1:
            raise BadArgument(expected("dropout to be at least 0 and below 1", self.dropout))
        for name in ("categorical", "ignore"):
            if isinstance(getattr(self, name), str):
                raise BadArgument(expected(f"{name} to be a list of columns", getattr(self, name)))
        names = [self.target] if isinstance(self.target, str | int) else self.target or ()
        if not all(isinstance(name, str) for name in names):
            do = "Pass names of columns as text."
            raise BadArgument(expected("target to be the name of a column, or several", self.target, do))
        if not self.several_targets and self.target is not None and not isinstance(self.target, str):
            raise BadArgument(expected("target to be the name of one column", self.target))
        self._targets: list[str] = []
        # What was encoded, to encode it again after a load; weak, since predictions encode data too.
        self._prepared: list[tuple[Table, weakref.ref[TensorDataset]]] = []
        self.model = self.network if isinstance(self.network, nn.Module) else UnbuiltModel()

    # -- data ----------------------------------------------------------------------------------------------

    def load_data(self, path: str) -> Any:
        return self.convert_data(path)

    def convert_data(self, data: Any) -> Any:
        """A table from a path, a frame, arrays, an HF dataset or a list of dicts; loaders are returned as they are."""
        return load_table(data)

    def inspect_dataset(self, dataset: Any) -> None:
        """Learn the encoding of the columns from the training rows."""
        table = rows_of(dataset)
        self._targets = self._find_targets(table)
        unknown = [name for name in (*self.ignore, *(self.categorical or ())) if name not in table.columns]
        for name in unknown:
            column_named(table, name, "a name in `ignore` or `categorical`")
        taken = {*self._targets, *self.ignore}
        features = [name for name in table.columns if name not in taken]
        if not features:
            raise DataError(expected(f"columns beside the target in {table.name}", "none"))
        kinds = [n for n in features if n in (self.categorical or ()) or not table.is_numeric(n)]
        numbers = [name for name in features if name not in kinds]
        self.encoder = TableEncoder.learn(table, numbers, kinds, self.scale)

    def _find_targets(self, table: Table) -> list[str]:
        if isinstance(self.target, str):
            names = [self.target]
        elif self.target is not None:
            names = list(self.target)
        else:
            names = [name for name in TARGET_NAMES if name in table.columns][:1]
            if not names and self.several_targets:
                names = [name for name in table.columns if name.startswith("target") and name[6:].isdigit()]
            if not names:
                do = "Pass the name of the column to predict as target."
                raise BadArgument(expected(f"a column called target in {table.name}", list(table.columns), do))
        for name in names:
            column_named(table, name, "target")
        return names

    def configure(self, info: DatasetInfo) -> None:
        """Build the network for the columns. A network that exists is kept."""
        if not isinstance(self.model, UnbuiltModel):
            return
        if self.encoder is None:
            do = "Pass a table, arrays or a file, or a module as network."
            raise BadArgument(expected("data whose columns are known", "a loader of batches", do))
        assert isinstance(self.network, str)
        width, kinds = self.encoder.width, self.encoder.cardinalities
        self.model = build_tabular(
            self.network, width, kinds, self._outputs(info), self.width, self.depth, self.dropout
        )

    def _outputs(self, info: DatasetInfo) -> int:
        raise NotImplementedError

    def prepare_dataset(self, dataset: Any, train: bool) -> TensorDataset:
        """Encode the rows: numbers, category indices and, where there are any, targets."""
        table = rows_of(dataset)
        assert self.encoder is not None
        tensors = [torch.from_numpy(part) for part in self.encoder.encode(table)]
        if train or self._has_targets(table):
            tensors.append(self._encode_targets(table))
        prepared = TensorDataset(*tensors)
        self._prepared = [*self._alive(), (table, weakref.ref(prepared))]
        return prepared

    def _alive(self) -> list[tuple[Table, Any]]:
        return [pair for pair in self._prepared if pair[1]() is not None]

    def _has_targets(self, table: Table) -> bool:
        """Whether each row has its target: rows to predict may lack it."""
        raise NotImplementedError

    def _encode_targets(self, table: Table) -> Tensor:
        raise NotImplementedError

    def _forward(self, batch: Any) -> Tensor:
        """Outputs of the network in float32 or float64. A module of the user gets categories only if there are any."""
        numbers, categories = batch[0], batch[1]
        if isinstance(self.network, nn.Module) and not categories.shape[1]:
            return upcast(self.model(numbers))
        return upcast(self.model(numbers, categories))

    @staticmethod
    def _target_of(batch: Any) -> Tensor:
        if len(batch) < 3:
            raise DataError(
                "Expected rows with their target, received some without: the column is missing, or has missing values."
            )
        return batch[2]

    # -- checks, config and state --------------------------------------------------------------------------

    def check_batch(self, batch: Any) -> list[str]:
        if not isinstance(batch, tuple | list) or len(batch) < 3:
            return ["Batches should be (numbers, categories, target)."]
        problems = [] if torch.isfinite(batch[0]).all() else ["Numbers hold NaN or infinite values."]
        counts = [] if self.encoder is None else self.encoder.cardinalities
        high = [int(batch[1][:, place].max()) >= count for place, count in enumerate(counts)]
        return [*problems, *(["Category indices are out of range."] if any(high) else [])]

    def config_dict(self) -> dict[str, Any]:
        arguments = {f.name: getattr(self, f.name) for f in fields(self) if f.init}
        if isinstance(self.network, nn.Module):
            arguments["network"] = type(self.network).__qualname__
        if self.encoder is not None:
            columns = {kind: [c.name for c in getattr(self.encoder, kind)] for kind in ("numeric", "categorical")}
            arguments["columns"] = columns
        return arguments | {"target": self._targets or self.target}

    def export_module(self, model: nn.Module) -> nn.Module:
        return WeightsOnly(model, "numbers and category indices")

    def learned(self) -> dict[str, Any]:
        """The encoding of the columns, with which the network can be built again without the data."""
        return self.state_dict()

    def use_learned(self, learned: Mapping[str, Any]) -> None:
        """Take over what `learned` returned."""
        self.load_state_dict(dict(learned))

    def state_dict(self) -> dict[str, Any]:
        encoder = None if self.encoder is None else self.encoder.state_dict()
        return {"encoder": encoder, "targets": list(self._targets)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over the encoding, and encode again what was prepared with another one."""
        loaded = None if state["encoder"] is None else TableEncoder.from_state(state["encoder"])
        self._targets = list(state["targets"])
        if loaded is None or loaded == self.encoder:
            return
        self.encoder = loaded
        for table, prepared in self._alive():
            for tensor, values in zip(prepared().tensors, loaded.encode(table), strict=False):
                tensor.copy_(torch.from_numpy(values))

    def check_state(self, state: dict[str, Any]) -> None:
        """Reject a checkpoint of other columns than those of data that were encoded already."""
        if not self._alive() or state["encoder"] is None or self.encoder is None:
            return
        own, loaded = self.encoder, TableEncoder.from_state(state["encoder"])
        if (own.width, len(own.categorical)) != (loaded.width, len(loaded.categorical)):
            what = f"data with the columns of the checkpoint ({', '.join(loaded.names)})"
            do = "Pass the data that the checkpoint was trained on, and other data to evaluate()."
            raise DataError(expected(what, own.names, do))

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_prepared": []}  # a copy has no data


def rows_of(dataset: Any) -> Table:
    """The rows of a table, or of a subset of one."""
    base, chosen = unwrap_subsets(dataset)
    if not isinstance(base, Table):
        do = "Pass a DataFrame, (X, y) arrays, a .csv or .parquet file, or a list of dicts."
        raise DataError(expected("a table", type(base).__name__, do))
    return base if chosen is None else base.take(chosen)
