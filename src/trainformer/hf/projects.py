"""What the configs of Forgather projects build besides models and trainers: other projects, files, and a script.

Configs call these by their tags; `trainformer.hf` exports them.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch

from trainformer.config.building import TRUST
from trainformer.config.project import Project
from trainformer.core.errors import BadArgument, expected
from trainformer.hf.distributed import this_process

logger = logging.getLogger("trainformer")


def from_project(
    project_dir: str,
    config_template: str | None = None,
    targets: str | Sequence[str] = "",
    pp_debug: bool = False,
    pp_kwargs: Mapping[str, Any] | None = None,
    **variables: Any,
) -> Any:
    """Build parts of another project: `main`, the target that is named, or a dictionary of several.

    `pp_kwargs` are variables of its templates, all other keyword arguments values of its `!var`. It is trusted as far
    as the config that names it. With `pp_debug` the config is logged.

    >>> folder = Path(tempfile.mkdtemp())
    >>> (folder / "templates/configs").mkdir(parents=True)
    >>> _ = (folder / "meta.yaml").write_text("name: sizes")
    >>> _ = (folder / "templates/configs/all.yaml").write_text("main: !call:len [ !var 'names' ]")
    >>> from_project(str(folder), names=["a", "b"])
    2
    """
    project = Project(config_template, project_dir, trust=TRUST.get() or (), **(pp_kwargs or {}))
    if pp_debug:
        logger.info("config %s of the project %s:\n%s", project.config_name, project_dir, project.pp_config)
    return project(targets if isinstance(targets, str) else list(targets), **variables)


def load_from_config(
    project_dir: str, config_template: str | None = None, targets: str | Sequence[str] = "", **variables: Any
) -> Any:
    """The old name of `from_project`."""
    return from_project(project_dir, config_template, targets, **variables)


def build_rule(
    target: str | os.PathLike[str],
    recipe: Callable[[], Any],
    loader: Callable[[], Any],
    prerequisites: Sequence[str | os.PathLike[str]] = (),
) -> Any:
    """What `loader` returns, after `recipe` made the file `target`.

    It is not made if it exists and no prerequisite is newer. Of several processes on a machine one makes it, and the
    others wait.

    >>> folder = Path(tempfile.mkdtemp())
    >>> recipe = lambda: print("made") or (folder / "width").write_text("8")
    >>> [build_rule(folder / "width", recipe, (folder / "width").read_text) for _ in range(2)]
    made
    ['8', '8']
    """
    file = Path(target).absolute()
    if not _is_current(file, prerequisites):
        with _locked(file):
            if not _is_current(file, prerequisites):  # another process may have made it meanwhile
                file.parent.mkdir(parents=True, exist_ok=True)
                recipe()
    return loader()


def _is_current(file: Path, prerequisites: Sequence[str | os.PathLike[str]]) -> bool:
    if not file.exists():
        return False
    made = file.stat().st_mtime
    return all(os.path.getmtime(other) <= made for other in prerequisites if os.path.exists(other))


@contextlib.contextmanager
def _locked(file: Path) -> Iterator[None]:
    import fcntl

    name = hashlib.sha256(os.fsencode(file)).hexdigest()[:16]
    lock = Path(tempfile.gettempdir()) / f"trainformer-{os.getuid()}-{name}.lock"
    with lock.open("w") as handle:
        fcntl.flock(handle, fcntl.LOCK_EX)  # released when the file is closed
        yield


def dependency_list(*values: Any) -> Any:
    """The first value; the others are only built.

    >>> dependency_list("model", "files that it needs")
    'model'
    """
    if not values:
        raise BadArgument(expected("dependency_list to get at least one value", "none"))
    return values[0]


class DistributedEnvInterface(Protocol):
    """What a `distributed_env` has."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    master_addr: str
    master_port: int
    device: str


@dataclass(kw_only=True)
class StaticDistributedEnvironment:
    """Rank and world size, as they are given.

    >>> StaticDistributedEnvironment(rank=1, world_size=2).world_size
    2
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    local_world_size: int = 1
    master_addr: str = "localhost"
    master_port: int = 29501
    device: str = "cpu"


class DistributedEnvironment(StaticDistributedEnvironment):
    """Rank, world size and device of this process, as the launcher says. The trainer joins the process group itself.

    >>> DistributedEnvironment().world_size
    1
    """

    def __init__(self) -> None:
        process = this_process()
        super().__init__(
            rank=process.rank,
            local_rank=process.local_rank,
            world_size=process.world_size,
            local_world_size=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            master_addr=os.environ.get("MASTER_ADDR", "localhost"),
            master_port=int(os.environ.get("MASTER_PORT", "29501")),
            device=f"cuda:{process.local_rank}" if torch.cuda.is_available() else "cpu",
        )


@dataclass(kw_only=True)
class TrainingScript:
    """The `main` of a project that trains: `run()` trains, evaluates and saves the model, as its fields say.

    >>> class Counter:
    ...     def train(self): print("trained")
    >>> TrainingScript(meta={"config_name": "tiny"}, trainer=Counter()).run()
    trained
    """

    trainer: Any
    meta: Mapping[str, Any] = field(default_factory=dict)
    do_train: bool = True
    do_eval: bool = False
    do_save: bool = False
    distributed_env: Any = field(default_factory=DistributedEnvironment)

    def run(self) -> None:
        """Train, evaluate and save."""
        described = ", ".join(f"{name}: {self.meta[name]}" for name in _DESCRIBED if name in self.meta)
        if self.distributed_env.local_rank == 0:
            logger.info("training script: %s", described)
        if self.do_train:
            self._say("trained", self.trainer.train())
        if self.do_eval:
            self._say("evaluated", self.trainer.evaluate())
        if self.do_save:
            self.trainer.save_model(self.meta["output_dir"])
            self._say("saved the model in", self.meta["output_dir"])

    def _say(self, what: str, result: Any) -> None:
        if self.distributed_env.local_rank == 0:
            logger.info("%s: %s", what, result)


_DESCRIBED = ("config_name", "config_description", "output_dir", "logging_dir")
