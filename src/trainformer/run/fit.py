"""The course of `fit()`: open the run folder, resume, open loggers, run the loop, and close everything again."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from trainformer.checkpointing import CheckpointStore
from trainformer.checkpointing.checkpointer import Checkpointer
from trainformer.engine import Event, Loop
from trainformer.loggers.base import BaseLogger, MultiLogger
from trainformer.loggers.registry import make_loggers
from trainformer.run.cadences import warn_of_cadences
from trainformer.run.folder import NoFolder, RunFolder, choose_folder
from trainformer.run.logging import console_messages, log_resume, log_start
from trainformer.run.provenance import check_unchanged, fingerprint, record_changes
from trainformer.run.run import Run
from trainformer.run.signals import exit_after_signal, handling_signals
from trainformer.utils.console import INTERRUPTIONS

logger = logging.getLogger("trainformer")


def fit(run: Run) -> None:
    """Train from the current state to the end of the plan."""
    run.settings.validate()
    run.check_launch()
    run.check_monitored()
    run.control.reset()
    if run.folder is not None:
        run.state.stopped = []  # fit() was called again on purpose: an earlier stop no longer counts
    with ExitStack() as stack:
        if run.folder is None:
            folder = choose_folder(run, stack)
        else:
            folder = run.folder
            stack.enter_context(folder.locked())
        stack.enter_context(folder.log_file())
        shown = run.options.shows_messages or "console" in _as_list(run.settings.log)
        stack.enter_context(console_messages(run.console, enabled=shown and run.process_group.is_main))
        stack.enter_context(run.process_group.monitoring(run.settings.rank_timeout))
        if run.folder is None:
            _open(run, folder)
            run.folder = folder
        run.backend.schedule_for(run.total_steps())
        record_changes(run)
        stack.enter_context(folder.recording(run.context.config))
        stack.enter_context(run.backend.run_context())
        stack.enter_context(run.live_control.serving(folder, run.checkpointer, run.outcome))
        stack.enter_context(folder.status(run.outcome))
        stack.enter_context(run.records.recording(folder))
        stack.enter_context(_open_loggers(run))
        stack.enter_context(handling_signals(run.control, run.options.signals))
        if run.state.stopped:
            run.control.stop(run.state.stopped[1], by=run.state.stopped[0])
        log_start(run)
        stack.enter_context(_reporting_errors(run))
        run.loop = _make_loop(run)
        run.backend.has_request = run.loop.requests.has_requests
        run.loop.run()
        if run.checkpointer is not None:
            run.checkpointer.close()
    number = run.control.ending_signal
    if number is not None and run.settings.exit_on_signal:
        exit_after_signal(number, run.options.signals)


def _open(run: Run, folder: RunFolder | NoFolder) -> None:
    """On the first call of `fit`: checkpointer, loggers, and the state to resume from, if there is one."""
    settings, process_group = run.settings, run.process_group
    if isinstance(folder, NoFolder):
        run.loggers = MultiLogger([one for one in _as_list(settings.log) if isinstance(one, BaseLogger)])
        return
    run.checkpointer = checkpointer = Checkpointer(
        run.components,
        run.files,
        CheckpointStore(
            folder.checkpoints,
            run.options.checkpoint_name,
            run.options.marks_latest,
            skips_deleted=run.options.skips_deleted,
        ),
        settings.retention(),
        asynchronous=settings.save_async,
        process_group=process_group,
        timeout=settings.rank_timeout,
        assets=run.assets(),
    )
    if process_group.is_main:
        checkpointer.store.clean()
    if process_group.is_main and folder.path is not None:
        run.loggers = make_loggers(
            settings.log, project=settings.project, name=settings.name, run_dir=folder.path, console=run.console
        )
    run.loggers.load_state_dict(run.logger_state)  # of a checkpoint that was loaded before the run started
    run.backend.schedule_for(run.total_steps())
    folder.fingerprint = fingerprint(run)
    if run.state.step == 0 and settings.resume is not None:
        _resume(run, checkpointer, folder)
    if process_group.is_main:
        checkpointer.store.set_aside(after=run.state.step)
        checkpointer.prune()  # the previous process may have been killed between a save and this


def _resume(run: Run, checkpointer: Checkpointer, folder: RunFolder) -> None:
    settings = run.settings
    interrupted = settings.resume == "auto" or run.process_group.run_on_main(folder.was_interrupted)
    own = run.newest_checkpoint(checkpointer) if interrupted else None
    if own is not None:
        if settings.resume == "auto":
            run.process_group.run_on_main(lambda: check_unchanged(run, folder.path, own.path))
        # With a path, load_components applies to the first start only: an interrupted run resumes completely.
        checkpointer.load(own, settings.load_components if settings.resume == "auto" else None)
        run.records.resumed_from = str(own.path)
        log_resume(run, own, folder.path)
    elif settings.resume != "auto":
        run.load(Path(str(settings.resume)), settings.load_components)


def _make_loop(run: Run) -> Loop:
    if run.process_group.is_main and run.options.checks_cadences:
        evaluates = bool(run.val_sources)
        warn_of_cadences(run.settings, run.passed, evaluates, run.total_steps(), run.steps_per_epoch())
    return Loop(
        replace(run.settings.plan(bool(run.val_sources), run.val_sets), **run.options.plan),
        run.state,
        backend=run.backend,
        source=run.train_source,
        bus=run.bus,
        control=run.control,
        services=run,
        process_group=run.process_group,
    )


@contextmanager
def _reporting_errors(run: Run) -> Iterator[None]:
    """Around the loop: callbacks receive an error, and the log says who stopped the run."""
    try:
        yield
    except BaseException as error:
        run.backend.drop_step()
        run.bus.emit(Event.ERROR, error)
        raise
    finally:
        run.loop = None
    control = run.control
    if control.should_stop:
        resumes = control.ending_signal is not None and run.checkpointer is not None and run.settings.resume == "auto"
        again = ". The same command resumes the run." if resumes else ""
        logger.info("stopped at step %d by %s: %s%s", run.state.step, control.stopped_by, control.stop_reason, again)


@contextmanager
def _open_loggers(run: Run) -> Iterator[None]:
    """Loggers are open inside. A resumed run continues its old records."""
    if run.state.step > 0:
        run.loggers.load_state_dict(run.loggers.state_dict())
    # Also at step 0: a run that was killed before its first checkpoint starts over, its old records do not count.
    run.loggers.continue_from(run.state.step)
    run.loggers.init(run.context.config.to_wandb_config())
    try:
        yield
    except BaseException as error:
        run.loggers.finish("interrupted" if isinstance(error, INTERRUPTIONS) else "failed")
        raise
    run.loggers.finish(run.outcome())


def _as_list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, (list, tuple)) else [value]
