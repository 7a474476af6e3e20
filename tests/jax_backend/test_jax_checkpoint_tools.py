"""The checkpoint tools and state files of JAX runs."""

import numpy as np
import pytest
import torch
from flax import nnx
from safetensors.torch import load_file

from trainformer import checkpoint
from trainformer.core.errors import BadArgument, DataError
from trainformer.jax import BaseTrainer, TrainingArguments
from trainformer.utils.tree_files import read_tree, write_tree


class Line(BaseTrainer):
    def compute_loss(self, model, batch, key):
        return ((model(batch["x"]) - batch["y"]) ** 2).mean()


def trained(folder, steps, **options):
    x = np.linspace(-1, 1, 32, dtype=np.float32)[:, None]
    arguments = TrainingArguments(max_steps=steps, total_batch_size=8, log="none", output_dir=str(folder), **options)
    model = nnx.Linear(1, 3, rngs=nnx.Rngs(0))
    trainer = Line(arguments, model=model, dataset_train={"x": x, "y": np.tile(2 * x, 3)})
    return trainer, trainer.train()


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    root = tmp_path_factory.mktemp("runs")
    return root, trained(root / "a", 4, save_steps=2)[1], trained(root / "b", 5)[1]


def test_inspect_counts_parameters_and_verify_reads_every_file(runs):
    root, *_ = runs
    summary = checkpoint.inspect(root / "a")
    assert (summary.step, summary.parameters, summary.dtypes) == (4, 6, {"float32": 6})
    assert "jax" in summary.versions
    assert "state/ (" in str(summary)
    assert [found.step for found in checkpoint.list_checkpoints(root / "a")] == [2, 4]
    assert checkpoint.verify(root / "a") == []


def test_exported_weights_are_those_of_the_state(runs, tmp_path):
    root, state, _ = runs
    weights = load_file(checkpoint.export_weights(root / "a", tmp_path / "line.safetensors"))
    assert sorted(weights) == ["bias", "kernel"]
    for name, tensor in weights.items():
        assert np.array_equal(tensor.numpy(), np.asarray(state.params[name]))


def test_compare_names_what_differs(runs):
    root, *_ = runs
    found = checkpoint.compare(root / "a", root / "b")
    assert "params/kernel" in str(found)
    assert "step: 4 against 5" in str(found)


def test_finalize_writes_the_weights_of_own_modules(runs, tmp_path):
    root, state, _ = runs
    made = checkpoint.finalize(root / "a", tmp_path / "out")
    assert (made.step, made.compared) == (4, "weights")
    weights = load_file(tmp_path / "out" / "model.safetensors")
    assert {name: tensor.tolist() for name, tensor in weights.items()} == {
        name: np.asarray(array).tolist() for name, array in state.params.items()
    }
    with pytest.raises(BadArgument, match="no quantize for a run on JAX"):
        checkpoint.finalize(root / "a", tmp_path / "other", quantize="int8-weight-only")
    with pytest.raises(BadArgument, match="a causal language model to write as GGUF"):
        checkpoint.finalize(root / "a", tmp_path / "other", gguf=True)
    assert not (tmp_path / "other").exists()


def test_bf16_weights_are_exported_bit_for_bit(tmp_path):
    from trainformer.checkpointing.tools.states import _tensor

    numbers = torch.tensor([1.5, -2.25, 3e-5], dtype=torch.bfloat16)
    jax_array = numbers.view(torch.uint16).numpy().view("bfloat16")
    assert torch.equal(_tensor(jax_array), numbers)


def test_trees_are_restored_with_their_arrays(tmp_path):
    tree = {"a": [1, 2.5, None, "x"], "b": {"c": np.arange(6).reshape(2, 3), "d": True}, "e": np.float32(2.0)}
    back = read_tree(tmp_path, write_tree(tmp_path, "tree", tree))
    assert back["a"] == tree["a"]
    assert back["b"]["d"] is True
    assert np.array_equal(back["b"]["c"], tree["b"]["c"])
    assert back["b"]["c"].dtype == tree["b"]["c"].dtype
    assert float(back["e"]) == 2.0


@pytest.mark.parametrize("value", [object(), {1: "a number as key"}, np.array(["text"], dtype=object)])
def test_values_that_are_not_plain_are_refused_by_name(tmp_path, value):
    with pytest.raises(BadArgument, match=r"tree\.inner"):
        write_tree(tmp_path, "tree", {"inner": value})


def test_a_damaged_tree_is_named(tmp_path):
    names = write_tree(tmp_path, "tree", {"a": np.ones(3)})
    (tmp_path / "tree.npz").write_bytes(b"no archive")
    with pytest.raises(DataError, match=r"tree\.json"):
        read_tree(tmp_path, names)
