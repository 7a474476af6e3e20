"""Backbones: names, true widths, and weights from files."""

import pytest
import timm
import torch
from safetensors.torch import save_file
from torch import nn

from trainformer.core.errors import BadArgument, DataError
from trainformer.models import EmbeddingModel, feature_width, load_weights
from trainformer.models.backbones import build_backbone, check_backbone, timm_name


@pytest.mark.parametrize(
    "name", ["mobilenetv3_small_050", "test_resnet", "test_vit", "test_efficientnet", "test_convnext", "resnet10t"]
)
def test_the_width_is_that_of_the_features(name):
    model = timm.create_model(name, num_classes=0).eval()
    size = timm.data.resolve_model_data_config(model)["input_size"][1:]
    with torch.no_grad():
        features = model(torch.randn(1, 3, *size))
    assert feature_width(model, 3, size) == features.shape[1]


def test_a_model_that_reports_the_wrong_width():
    model = timm.create_model("mobilenetv3_small_050", num_classes=0)
    assert feature_width(model) != model.num_features


def test_finding_the_width_leaves_the_model_as_it_was():
    model = timm.create_model("test_resnet", num_classes=0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    feature_width(model)
    assert model.training
    assert all(p.device.type == "cpu" for p in model.parameters())
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


def test_a_model_that_reads_values_is_measured_on_real_images():
    class Curious(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(12, 5)

        def forward(self, x):
            return self.linear(x.flatten(1)) * (2 if float(x.sum()) > 0 else 1)

    assert feature_width(Curious(), 3, (2, 2)) == 5


def test_feature_maps_are_rejected():
    with pytest.raises(BadArgument, match="one row of features per image"):
        feature_width(nn.Conv2d(3, 8, 3), 3, (8, 8))


def test_short_names_are_those_of_timm():
    for short in ("vit_tiny", "vit_small", "vit_base", "vit_large", "vit_huge"):
        assert timm.is_model(timm_name(short))
        check_backbone(short)
    with pytest.raises(BadArgument, match="Did you mean 'resnet18'"):
        check_backbone("resnt18")


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", "wrapped.pth"])
def test_weights_come_from_a_file(tmp_path, suffix):
    source = timm.create_model("test_resnet", num_classes=7)
    path = tmp_path / f"weights{suffix}"
    state = source.state_dict()
    if suffix == ".safetensors":
        save_file({k: v.contiguous() for k, v in state.items()}, path)
    else:
        torch.save({"state_dict": state, "epoch": 3} if "wrapped" in suffix else state, path)
    model = build_backbone("test_resnet", num_classes=4, in_chans=3, checkpoint=path)
    kept = {name for name in model.state_dict() if name.startswith(("fc.", "head."))}
    assert kept
    for name, value in model.state_dict().items():
        if name not in kept:
            assert torch.equal(value, state[name]), name
    # A head of the right size is taken too.
    whole = build_backbone("test_resnet", num_classes=7, in_chans=3, checkpoint=path)
    assert all(torch.equal(v, state[k]) for k, v in whole.state_dict().items())


@pytest.mark.parametrize("prefix", ["backbone.", "online.backbone.", "autoencoder.backbone."])
def test_weights_are_found_inside_the_checkpoint_of_another_task(prefix):
    source = timm.create_model("test_resnet", num_classes=0)
    given = {prefix + k: v for k, v in source.state_dict().items()} | {"online.head.0.weight": torch.ones(2)}
    model = timm.create_model("test_resnet", num_classes=0)
    load_weights(model, given)
    assert all(torch.equal(v, source.state_dict()[k]) for k, v in model.state_dict().items())


def test_positions_of_another_image_size_are_resampled():
    source = timm.create_model("test_vit", num_classes=0, img_size=160)
    model = timm.create_model("test_vit", num_classes=0, img_size=96)
    load_weights(model, source.state_dict())
    expected = timm.layers.resample_abs_pos_embed(source.pos_embed, new_size=[6, 6], num_prefix_tokens=1)
    torch.testing.assert_close(model.pos_embed, expected)


def test_weights_that_do_not_fit_are_rejected_and_nothing_is_loaded(tmp_path):
    model = timm.create_model("test_resnet", num_classes=0)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(DataError, match="missing"):
        load_weights(model, timm.create_model("test_vit", num_classes=0).state_dict())
    with pytest.raises(DataError, match="does not exist"):
        load_weights(model, tmp_path / "nothing.pt")
    torch.save({"a": [1, 2]}, tmp_path / "other.pt")
    with pytest.raises(DataError, match="to hold a state_dict"):
        load_weights(model, tmp_path / "other.pt")
    assert all(torch.equal(v, before[k]) for k, v in model.state_dict().items())


@pytest.mark.parametrize("name", ["test_resnet", "test_vit", "mobilenetv3_small_050"])
@pytest.mark.parametrize("pooling", [None, "gem", "avg"])
def test_embeddings_have_length_one_and_every_parameter_takes_part(name, pooling):
    options = {} if pooling is None else {"global_pool": ""}
    size = (160, 160) if name == "test_vit" else (64, 64)
    backbone = timm.create_model(name, num_classes=0, **options)
    model = EmbeddingModel(backbone, 16, pooling=pooling, neck="bn", size=size)
    embeddings = model(torch.randn(3, 3, *size))
    torch.testing.assert_close(embeddings.norm(dim=1), torch.ones(3))
    (embeddings * torch.randn(3, 16)).sum().backward()
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)


def test_no_projection_and_no_normalisation():
    backbone = timm.create_model("test_resnet", num_classes=0).eval()
    model = EmbeddingModel(backbone, None, normalize=False, size=(64, 64))
    x = torch.randn(2, 3, 64, 64)
    torch.testing.assert_close(model(x), backbone(x))
    with pytest.raises(BadArgument, match="neck to be 'bn' or None"):
        EmbeddingModel(backbone, 8, neck="batchnorm")
    with pytest.raises(BadArgument, match="one row of features"):
        EmbeddingModel(timm.create_model("test_resnet", num_classes=0, global_pool=""), 8)


def test_published_weights_under_older_names_are_loaded_and_others_are_an_error(monkeypatch):
    """torchvision renames parts of its detectors while it loads them: nothing of them stays random in silence."""
    torchvision = pytest.importorskip("torchvision")
    from trainformer.models.segmentation import load_published

    name = "fasterrcnn_mobilenet_v3_large_320_fpn"
    make = getattr(torchvision.models.detection, name)
    full = make(weights=None, weights_backbone=None, num_classes=91).state_dict()
    old = {key.replace("rpn.head.conv.0.0.", "rpn.head.conv."): value for key, value in full.items()}
    published = dict(old)

    class Weights:
        class DEFAULT:
            @staticmethod
            def get_state_dict(**options):
                return published

    monkeypatch.setattr(torchvision.models, "get_model_weights", lambda _: Weights)
    model = make(weights=None, weights_backbone=None, num_classes=5)
    load_published(model, name)
    found = model.state_dict()
    equal = [key for key, value in full.items() if found[key].shape == value.shape]
    assert "rpn.head.conv.0.0.weight" in equal
    assert all(torch.equal(found[key], full[key]) for key in equal)
    del published["backbone.fpn.inner_blocks.0.0.weight"]
    with pytest.raises(DataError, match=r"backbone\.fpn\.inner_blocks\.0\.0\.weight"):
        load_published(model, name)
