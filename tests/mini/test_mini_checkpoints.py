"""Checkpoints of mini: files, contents, and killed runs that end like uninterrupted ones."""

import json
import os
import random
import signal
from dataclasses import replace
from pathlib import Path

import mini_victim  # first: it makes the harness of tests/faults importable
import pytest
import torch
from harness import finish, output
from mini_toys import Classifier, Keeper, shuffled_loader
from mini_victim import Case
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.optim.lr_scheduler import MultiStepLR, OneCycleLR

from file_operations import last_phase
from forking import SERVER
from toys import mlp, same, weights
from trainformer.checkpointing.checkpointer import SaveFailed
from trainformer.core.errors import BadArgument, DataError
from trainformer.mini import BaseHook, CheckpointingHook, LoggingHook


def files(folder="checkpoints"):
    return sorted(p.name for p in Path(folder).iterdir())


def numbers(folder="checkpoints"):
    return sorted(int(p.stem.rpartition("_")[2]) for p in Path(folder).glob("checkpoint_step_*.pt"))


def trained(max_steps, *hooks, seed=0, **kwargs):
    """A trained trainer, on shuffled data."""
    torch.manual_seed(seed)
    trainer = Classifier(max_steps, hooks=hooks, batches=shuffled_loader(), **kwargs)
    trainer.train()
    return trainer


# -- files -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("keep_previous", "keep_interval", "kept"),
    [
        (None, None, [2, 4, 6, 8, 10, 11]),
        (2, None, [10, 11]),
        (1, 4, [4, 8, 11]),
        (1, 3, [3, 6, 9, 11]),  # saved because it is kept
        (0, None, [11]),  # the newest is always kept
        (0, 0, [11]),
        (3, 6, [6, 8, 10, 11]),
    ],
)
def test_which_files_are_kept(keep_previous, keep_interval, kept):
    trained(11, CheckpointingHook(2, keep_previous, keep_interval))
    assert numbers() == kept
    assert Path("checkpoints/checkpoint_latest.pt").readlink() == Path("checkpoint_step_11.pt")
    assert len(files()) == len(kept) + 1  # and nothing else is left behind


def test_torch_load_reads_a_checkpoint_file():
    trainer = trained(4, CheckpointingHook(4), LoggingHook(3), mixed_precision="bf16")
    state = torch.load("checkpoints/checkpoint_latest.pt")
    other = Classifier(4, batches=shuffled_loader(), hooks=[LoggingHook(3)])
    other.load_state_dict(state)
    assert other.step == 4
    assert same(weights(other), weights(trainer))
    assert state["components"].keys() == trainer.state_dict().keys()


@pytest.mark.parametrize(
    "schedule",
    [lambda o: OneCycleLR(o, 0.2, total_steps=12), lambda o: MultiStepLR(o, [3, 6])],
    ids=["onecycle", "multistep"],
)
def test_resuming_is_exact(schedule):
    whole = trained(10, schedule=schedule)
    trained(5, CheckpointingHook(3), schedule=schedule)
    again = trained(10, CheckpointingHook(3), schedule=schedule, seed=77)  # another seed: that of the run counts
    assert same(weights(again), weights(whole))
    assert again.optimizer.param_groups[0]["lr"] == whole.optimizer.param_groups[0]["lr"]


def test_a_second_call_of_train_continues():
    whole = trained(10)
    trainer = trained(4)
    trainer.max_steps = 10
    trainer.train()
    assert same(weights(trainer), weights(whole))


def test_pending_means_are_resumed():
    class Logs(BaseHook):
        def __init__(self):
            self.means = []

        def on_log(self, trainer, records, dry_run):
            self.means.append((trainer.step, records["train"]["loss"]))

    whole, first, second = Logs(), Logs(), Logs()
    trained(9, LoggingHook(5), whole)
    trained(7, LoggingHook(5), first)
    trained(7, LoggingHook(5), CheckpointingHook(7), Keeper())
    path = Path("checkpoints/checkpoint_step_7.pt")  # written before the rest is logged at the end of that run
    trained(9, LoggingHook(5), CheckpointingHook(7, load=path), second, Keeper())
    assert second.means == whole.means[1:]
    assert [step for step, _ in first.means] == [5, 7]


def test_random_numbers_drawn_after_loading_do_not_matter():
    def make(steps):
        return Classifier(steps, model=torch.nn.Sequential(mlp(), torch.nn.Dropout(0.5)))

    whole = make(6)
    whole.train()
    half = make(3)  # mlp() seeds torch
    half.train()
    state = half.state_dict()
    other = make(6)
    other.load_state_dict(state)
    torch.rand(17)
    other.train()
    assert same(weights(other), weights(whole))


def test_a_generator_continues_at_its_position():
    batches = ((torch.full((2, 4), float(i), dtype=torch.float64), torch.tensor([0, 1])) for i in range(100))
    trainer = Classifier(3, batches=batches)
    trainer.train()
    trainer.max_steps = 5
    trainer.train()
    assert [x[0, 0].item() for x in trainer.seen] == [0, 1, 2, 3, 4]


def test_a_checkpoint_contains_what_all_hooks_did_at_that_step():
    class Late(Keeper):
        def on_state_dict(self, trainer, state_dict):
            state_dict["steps"] = len(self.infos)

        def on_load_state_dict(self, trainer, state_dict):
            self.infos = [None] * state_dict["steps"]

    trained(4, CheckpointingHook(2), Late())
    states = [torch.load(f"checkpoints/checkpoint_step_{n}.pt")["components"]["callback.Late"] for n in (2, 4)]
    assert states == [{"steps": 2}, {"steps": 4}]


def test_a_damaged_file_falls_back_to_the_previous_one(caplog):
    caplog.set_level("INFO")
    whole = trained(9)
    trained(6, CheckpointingHook(2))
    newest = Path("checkpoints/checkpoint_step_6.pt")
    newest.write_bytes(newest.read_bytes()[:1000])
    again = trained(9, CheckpointingHook(2), seed=5)
    assert any("checkpoint_step_6.pt" in m and "Falling back to the previous checkpoint" in m for m in caplog.messages)
    assert any("checkpoint_step_4.pt (step 4)" in message for message in caplog.messages)
    assert same(weights(again), weights(whole))
    assert files("checkpoints/abandoned-1") == ["checkpoint_step_6.pt"]
    assert numbers() == [2, 4, 6, 8, 9]


def test_a_file_that_would_execute_code_is_not_loaded():
    class Evil:
        def __reduce__(self):
            return os.mkdir, ("executed",)

    trained(4, CheckpointingHook(2))
    torch.save({"format": 2, "components": {"run": Evil()}}, "checkpoints/checkpoint_step_4.pt")
    trainer = trained(4, CheckpointingHook(2))
    assert not Path("executed").exists()
    assert trainer.step == 4


def test_load_argument():
    first = trained(6, CheckpointingHook(2, path="a"))
    assert trained(6, CheckpointingHook(2, path="a", load=None)).step == 6
    assert files("a/abandoned-1") == ["checkpoint_step_2.pt", "checkpoint_step_4.pt", "checkpoint_step_6.pt"]
    named = "a/abandoned-1/checkpoint_step_4.pt"
    resumed = trained(6, CheckpointingHook(2, path="b", load=named), seed=9)
    assert same(weights(resumed), weights(first))
    assert numbers("b") == [6]
    # Started again, the run resumes from its own files, not from the named one.
    assert trained(8, CheckpointingHook(2, path="b", load=named)).step == 8
    assert numbers("b") == [6, 8]
    Path(named).rename("elsewhere.pt")  # and is no longer needed
    assert trained(8, CheckpointingHook(2, path="b", load=named)).step == 8
    # One that began elsewhere does not.
    trained(6, CheckpointingHook(2, path="b", load="a/abandoned-1/checkpoint_step_2.pt"))
    assert numbers("b") == [4, 6]
    with pytest.raises(BadArgument, match=r"'latest', a checkpoint's file, or None, received 'nowhere\.pt'"):
        trained(6, CheckpointingHook(2, load="nowhere.pt"))


def test_two_hooks_keep_their_own_files():
    trained(6, CheckpointingHook(2, path="often"), CheckpointingHook(3, path="seldom"))
    assert (numbers("often"), numbers("seldom")) == ([2, 4, 6], [3, 6])


@pytest.mark.parametrize("order", [1, -1])
def test_the_newest_file_of_two_hooks_is_loaded(order, caplog):
    whole = trained(9)
    trained(7, CheckpointingHook(2, path="often"), CheckpointingHook(3, path="seldom"))
    for gone in ("often/checkpoint_step_6.pt", "often/checkpoint_step_7.pt", "seldom/checkpoint_step_7.pt"):
        Path(gone).unlink()
    caplog.set_level("INFO")
    hooks = [CheckpointingHook(2, path="often"), CheckpointingHook(3, path="seldom")][::order]
    again = trained(9, *hooks, seed=3)
    assert [m.split(";")[0] for m in caplog.messages if m.startswith("resuming from")] == [
        "resuming from seldom/checkpoint_step_6.pt (step 6)"
    ]
    assert same(weights(again), weights(whole))


def test_state_options_and_optimizer_by_name():
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    whole = trained(8)
    half = trained(4, state_dict_options=options)
    state = half.state_dict()
    assert "0.weight" in state["optimizer"]["state"]  # by name, not by number
    torch.save(state, "state.pt")
    other = Classifier(8, batches=shuffled_loader(), state_dict_options=options)
    other.load_state_dict(torch.load("state.pt"))
    other.train()
    assert same(weights(other), weights(whole))


def test_mismatched_states_are_refused():
    trainer = Classifier(3)
    with pytest.raises(DataError, match=r"state of a run.*'0\.weight'.*unwrapped_model"):
        trainer.load_state_dict(trainer.model.state_dict())
    state = trained(2).state_dict()
    other = Classifier(3, model=torch.nn.Linear(4, 3).double())
    with pytest.raises(DataError, match=r"model does not fit.*Nothing was loaded"):
        other.load_state_dict(state)
    assert other.step == 0


def test_values_that_cannot_be_read_back_are_refused():
    class Keeps(BaseHook):
        def on_state_dict(self, trainer, state_dict):
            state_dict["kept"] = [1, {"a": Path("x")}]

    with pytest.raises(BadArgument, match=r"callback\.Keeps\.kept\[1\]\.a in a checkpoint to be a plain value"):
        trained(2, CheckpointingHook(1), Keeps())
    assert not Path("checkpoints").exists()


def test_a_full_disk_is_logged_and_ends_the_run_only_if_it_stays_full(monkeypatch, caplog):
    from trainformer.mini import checkpointing

    really, full = checkpointing.write_single_file, {4, 6}

    def write(path, state):
        if state["run"]["step"] in full:
            raise OSError(28, "No space left on device")
        really(path, state)

    monkeypatch.setattr(checkpointing, "write_single_file", write)
    trained(8, CheckpointingHook(2))
    assert numbers() == [2, 8]
    assert sum("could not write a checkpoint" in message for message in caplog.messages) == 2
    full |= {10, 12, 14}
    with pytest.raises(SaveFailed, match=r"Could not save step 14.*newest checkpoint is .*step_8\.pt"):
        trained(20, CheckpointingHook(2))


def test_without_a_workspace_nothing_is_on_disk():
    trained(3, LoggingHook(1))
    assert list(Path().iterdir()) == []


# -- killing -----------------------------------------------------------------------------------------------


def launch(case, folder):
    """Run a case in its own process. Returns the exit code."""
    folder.mkdir(parents=True, exist_ok=True)
    os.environ["OMP_NUM_THREADS"] = "1"
    process = SERVER.Process(target=mini_victim.start, args=(case, str(folder)))
    process.start()
    return finish(process, folder)


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    folder = tmp_path_factory.mktemp("reference")
    assert launch(Case(), folder) == 0, output(folder)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_killed_run_ends_like_an_uninterrupted_one(tmp_path, reference):
    operations = json.loads((reference / "end.json").read_text())["operations"]
    rng = random.Random(4)
    kills = 0
    for number in range(2):
        folder, first = tmp_path / str(number), True
        for _ in range(7):
            # The seed of the first process is that of the run, once there is a checkpoint.
            seed = 8 if first or not numbers(folder / "ws/checkpoints") else rng.randrange(99)
            code = launch(Case(seed=seed, die_at=rng.randint(1, operations)), folder)
            assert code in (0, -signal.SIGKILL), output(folder)
            kills, first = kills + (code != 0), False
        assert launch(Case(seed=8 if not numbers(folder / "ws/checkpoints") else 55), folder) == 0, output(folder)
        assert Case().differences(reference, folder) == []
        assert files(folder / "ws/checkpoints") == files(reference / "ws/checkpoints")
    assert kills >= 8


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_run_killed_in_an_evaluation_ends_like_an_uninterrupted_one(tmp_path, reference):
    for nth in (3, 5, 2, 6):  # the second evaluation is due at the step of no checkpoint, the fourth at that of one
        assert launch(Case(die_at=("evaluation", nth)), tmp_path) == -signal.SIGKILL, output(tmp_path)
        assert last_phase(tmp_path)[0] == "evaluation"
    assert launch(Case(), tmp_path) == 0, output(tmp_path)
    assert Case().differences(reference, tmp_path) == []


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_saves_and_exits_and_the_run_resumes(tmp_path, reference, number):
    steps = (1, 4, 7, 21)
    case = Case(signals=tuple((step, number) for step in steps))
    for step in steps:
        assert launch(case, tmp_path) == 128 + number, output(tmp_path)
        assert numbers(tmp_path / "ws/checkpoints")[-1] == step
        assert json.loads((tmp_path / "end.json").read_text())["handlers_restored"]
    assert launch(case, tmp_path) == 0, output(tmp_path)
    assert Case().differences(reference, tmp_path, retention=False) == []


@pytest.mark.slow
def test_exit_codes_and_signals_that_only_save(tmp_path):
    case = Case(signals=((3, signal.SIGTERM),), exit_code=7)
    assert launch(case, tmp_path / "a") == 7
    case = replace(case, signals=((3, signal.SIGUSR1),), keep_previous=None)
    assert launch(case, tmp_path / "b") == 0, output(tmp_path / "b")
    assert numbers(tmp_path / "b/ws/checkpoints") == [3, 4, 8, 12, 16, 20, 22]
