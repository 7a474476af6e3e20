"""Exports: each file computes what the model computes, for any batch size."""

import numpy as np
import pytest
import torch

from toys import MeanTask, classes, mlp
from trainformer import Trainer
from trainformer.backends.torch.export import export_model
from trainformer.core.errors import BadArgument, MissingDependency, TrainformerError


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    task = MeanTask(
        torch.nn.Sequential(
            mlp(4, 8, dtype=torch.float32),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.5),
            mlp(8, 3, dtype=torch.float32),
        )
    )
    trainer = Trainer(
        task, classes(dtype=torch.float32), epochs=2, lr=1e-2, log="none", run_dir=tmp_path_factory.mktemp("run")
    )
    return trainer.fit()


def outputs(trainer, x):
    trainer.task.model.eval()
    with torch.no_grad():
        return trainer.task.model(x)


@pytest.mark.parametrize("n", [1, 2, 5, 64])
def test_onnx_computes_the_same_for_any_batch(trained, n):
    import onnxruntime

    path = trained.export("m", format="onnx")
    assert path == "m.onnx"
    x = torch.randn(n, 4)
    (got,) = onnxruntime.InferenceSession(path).run(None, {"input": x.numpy()})
    assert np.allclose(got, outputs(trained, x).numpy(), atol=1e-5)


def test_torchscript(trained):
    path = trained.export("script", format="torchscript", input_shape=(4,))
    x = torch.randn(7, 4)
    assert torch.allclose(torch.jit.load(path)(x), outputs(trained, x), atol=1e-6)


def test_torch_export_archive(trained):
    path = trained.export("archive", format="torch.export")
    assert path == "archive.pt2"
    x = torch.randn(9, 4)
    assert torch.allclose(torch.export.load(path).module()(x), outputs(trained, x), atol=1e-6)


def test_state_dict_under_the_models_own_names(trained):
    path = trained.export("sub/folder/weights.v1", format="pytorch")
    assert path == "sub/folder/weights.v1.pt"
    fresh = MeanTask(
        torch.nn.Sequential(
            mlp(4, 8, dtype=torch.float32),
            torch.nn.BatchNorm1d(8),
            torch.nn.Dropout(0.5),
            mlp(8, 3, dtype=torch.float32),
        )
    )
    fresh.model.load_state_dict(torch.load(path, weights_only=True))
    x = torch.randn(3, 4)
    torch.testing.assert_close(fresh.model.eval()(x), outputs(trained, x))


def test_exporting_leaves_the_model_in_training_mode_and_place(trained):
    model = trained.task.model.train()
    trained.export("m", format="onnx")
    assert model.training
    assert all(p.requires_grad for p in model.parameters())


def test_a_model_that_cannot_be_traced_faithfully_is_refused(tmp_path):
    class Branches(torch.nn.Module):
        def forward(self, x):
            return x * 2 if len(x) <= 2 else x * 3

    with pytest.raises(TrainformerError, match="does not compute what the model computes"):
        export_model(Branches(), tmp_path / "m", "torchscript", (4,))


def test_bad_requests_are_explained(trained, tmp_path, monkeypatch):
    with pytest.raises(BadArgument, match="onnx"):
        trained.export("m", format="onyx")
    with pytest.raises(BadArgument, match="input_shape"):
        export_model(trained.task.model, tmp_path / "m", "onnx", None)
    monkeypatch.setitem(__import__("sys").modules, "onnxscript", None)
    with pytest.raises(MissingDependency, match=r"pip install 'trainformer\[onnx\]'"):
        trained.export("m", format="onnx")
