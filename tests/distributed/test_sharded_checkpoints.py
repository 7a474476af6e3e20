"""A checkpoint of a sharded model: every tool reads it, and one process resumes from it."""

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from training_runs import kept, run_llama, wide_llama
from transformers import AutoModelForCausalLM

from ranks import named, on_ranks
from trainformer import checkpoint
from trainformer.adapters import LoRA
from trainformer.checkpointing import CheckpointStore
from trainformer.run import run_of

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("divided")
    return folder, on_ranks(kept, 2, folder)[0]


def equal(a, b):
    return a.keys() == b.keys() and all(torch.equal(a[key], b[key]) for key in a)


def test_tools_read_shards_as_one_state(run, tmp_path):
    folder, found = run
    newest = CheckpointStore(folder / "divided" / "checkpoints").newest()
    names = [record.name for record in newest.manifest.components["model"]]
    assert sum(name.endswith(".safetensors") for name in names) == 2
    assert newest.manifest.formats["callback.EMA"] == "sharded"
    checkpoint.verify(folder / "divided")
    summary = checkpoint.inspect(folder / "divided")
    model = named(found, "weight ")
    assert summary.world_size == 2
    assert summary.parameters == sum(value.numel() for value in model.values())
    exported = load_file(checkpoint.export_weights(folder / "divided", tmp_path / "weights.safetensors"))
    assert equal(exported, model)
    average = load_file(checkpoint.export_weights(folder / "divided", tmp_path / "ema.safetensors", ema=True))
    assert equal(average, named(found, "average "))
    assert not equal(average, model)


def test_a_snapshot_and_an_export_hold_the_full_model(run):
    folder, found = run
    assert equal(torch.load(folder / "all.pt", weights_only=True)["components"]["model"], named(found, "weight "))
    exported = torch.load(folder / "average.pt", weights_only=True)
    for name, value in named(found, "average ").items():
        torch.testing.assert_close(exported[name], value.float())


def test_finalize_makes_a_folder_for_from_pretrained(run, tmp_path):
    folder, found = run
    checkpoint.finalize(folder / "divided", tmp_path / "deployed", ema=False)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "deployed")
    wanted = {name: value.float() for name, value in named(found, "weight ").items()}
    assert equal({name: value.float() for name, value in model.state_dict().items()}, wanted)


def test_the_adapter_of_a_sharded_model_loads_with_peft(run, tmp_path):
    folder, found = run
    newest = CheckpointStore(folder / "adapted" / "checkpoints").newest()
    model = PeftModel.from_pretrained(wide_llama(), newest.path)
    wanted = named(found, "adapted ")
    learned = {name: value for name, value in model.state_dict().items() if "lora_B" in name}
    assert learned
    assert any(value.abs().max() > 0 for value in learned.values())
    for name, value in learned.items():
        torch.testing.assert_close(value.double(), wanted[name], rtol=0, atol=1e-7)
    alone = run_llama("single", LoRA(r=4), run_dir=tmp_path / "adapted", epochs=1).load(folder / "adapted")
    assert equal(alone.task.model.state_dict(), wanted)


@pytest.mark.parametrize("source", ["divided", "all.pt"])
def test_one_process_resumes_from_it(run, tmp_path, source):
    folder, found = run
    trainer = run_llama("single", ema=0.9, run_dir=tmp_path / "alone", epochs=2).load(folder / source)
    assert equal(trainer.task.model.state_dict(), named(found, "weight "))
    states = run_of(trainer).backend.optimizer.state_dict()["state"]
    assert all((state["step"] == 4).all() for state in states.values())
    trainer.fit()
    # The same by one process alone; the first half with the schedule of the shorter run, as above.
    alone = run_llama("single", ema=0.9, run_dir=tmp_path / "first", epochs=1).fit()
    alone.save(tmp_path / "first.pt")
    again = run_llama("single", ema=0.9, run_dir=tmp_path / "second", epochs=2).load(tmp_path / "first.pt").fit()
    assert trainer.state.step == again.state.step == 8
    for name, value in again.task.model.state_dict().items():
        assert (trainer.task.model.state_dict()[name] - value).abs().max() < 1e-8, name
