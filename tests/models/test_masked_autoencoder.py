"""The masked autoencoder against transformers' and lightly's, and how it behaves."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from trainformer.core.errors import BadArgument, DataError
from trainformer.models.masked_autoencoder import MaskedAutoencoder, patchify, sincos_positions, unpatchify

SIZE, PATCH, DIM, DEPTH, HEADS = 24, 6, 24, 3, 3
COUNT = (SIZE // PATCH) ** 2
DECODER = {"decoder_dim": 16, "decoder_depth": 2, "decoder_heads": 2}


def vit(**options: Any) -> Any:
    """A small timm ViT with none of its weights at zero."""
    base = {
        "num_classes": 0,
        "img_size": SIZE,
        "patch_size": PATCH,
        "embed_dim": DIM,
        "depth": DEPTH,
        "num_heads": HEADS,
    }
    model = timm.create_model("vit_tiny_patch16_224", **{**base, **options})
    for weight in model.parameters():
        nn.init.normal_(weight, std=0.2)
    return model


def images(number: int = 3, channels: int = 3, size: tuple[int, int] = (SIZE, SIZE)) -> Tensor:
    return torch.randn(number, channels, *size)


# --- oracles


def transformers_twin(norm_pix: bool, mask_ratio: float) -> tuple[Any, MaskedAutoencoder, dict[str, str]]:
    """transformers' model, ours with its weights, and {our parameter: its parameter} for those with one name each."""
    from transformers import ViTMAEConfig, ViTMAEForPreTraining

    config = ViTMAEConfig(
        hidden_size=DIM,
        num_hidden_layers=DEPTH,
        num_attention_heads=HEADS,
        intermediate_size=4 * DIM,
        image_size=SIZE,
        patch_size=PATCH,
        layer_norm_eps=1e-6,
        decoder_hidden_size=16,
        decoder_num_hidden_layers=2,
        decoder_num_attention_heads=2,
        decoder_intermediate_size=64,
        mask_ratio=mask_ratio,
        norm_pix_loss=norm_pix,
    )
    theirs = ViTMAEForPreTraining(config)
    for weight in theirs.parameters():  # also the position embeddings, which it leaves at zero
        nn.init.normal_(weight, std=0.2)
    theirs.vit.embeddings.position_embeddings.requires_grad_(True)  # timm's are learned
    ours = MaskedAutoencoder(vit(), mask_ratio=mask_ratio, norm_pix=norm_pix, **DECODER)
    names = {
        "backbone.cls_token": "vit.embeddings.cls_token",
        "backbone.pos_embed": "vit.embeddings.position_embeddings",
        "backbone.patch_embed.proj.weight": "vit.embeddings.patch_embeddings.projection.weight",
        "backbone.patch_embed.proj.bias": "vit.embeddings.patch_embeddings.projection.bias",
        "decoder.mask_token": "decoder.mask_token",
    }
    pairs = {"backbone.norm": "vit.layernorm", "decoder.norm": "decoder.decoder_norm"}
    pairs |= {"decoder.embed": "decoder.decoder_embed", "decoder.head": "decoder.decoder_pred"}
    blocks = [(f"backbone.blocks.{i}", f"vit.layers.{i}") for i in range(DEPTH)]
    blocks += [(f"decoder.blocks.{i}", f"decoder.decoder_layers.{i}") for i in range(2)]
    for mine, its in blocks:
        pairs |= {f"{mine}.norm1": f"{its}.layernorm_before", f"{mine}.norm2": f"{its}.layernorm_after"}
        pairs |= {f"{mine}.attn.proj": f"{its}.attention.o_proj"}
        pairs |= {f"{mine}.mlp.{fc}": f"{its}.mlp.{fc}" for fc in ("fc1", "fc2")}
    for mine, its in pairs.items():
        names |= {f"{mine}.{kind}": f"{its}.{kind}" for kind in ("weight", "bias")}

    weights = dict(theirs.named_parameters())
    state = {mine: weights[its].detach() for mine, its in names.items()}
    for mine, its in blocks:
        for kind in ("weight", "bias"):
            parts = [weights[f"{its}.attention.{part}_proj.{kind}"].detach() for part in "qkv"]
            state[f"{mine}.attn.qkv.{kind}"] = torch.cat(parts)
    ours.load_state_dict(state)
    with torch.no_grad():
        ours.decoder.positions.copy_(theirs.decoder.decoder_pos_embed)
    return theirs, ours, names


@pytest.mark.parametrize("norm_pix", [True, False])
@pytest.mark.parametrize("mask_ratio", [0.75, 0.4])
def test_loss_prediction_and_gradients_match_transformers(norm_pix: bool, mask_ratio: float) -> None:
    theirs, ours, names = transformers_twin(norm_pix, mask_ratio)
    pictures, noise = images(), torch.rand(3, COUNT)
    want, got = theirs(pictures, noise=noise), ours(pictures, noise)

    assert torch.equal(got.mask.float(), want.mask)
    torch.testing.assert_close(got.prediction, want.logits, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(got.loss.mean(), want.loss, rtol=1e-5, atol=0)

    want.loss.backward()
    got.loss.mean().backward()
    mine, its = dict(ours.named_parameters()), dict(theirs.named_parameters())
    for name, other in names.items():
        wanted = its[other].grad
        torch.testing.assert_close(mine[name].grad, wanted, rtol=1e-4, atol=1e-5 * wanted.abs().max().item(), msg=name)
    for i in range(DEPTH):
        parts = [its[f"vit.layers.{i}.attention.{part}_proj.weight"].grad for part in "qkv"]
        torch.testing.assert_close(
            mine[f"backbone.blocks.{i}.attn.qkv.weight"].grad, torch.cat(parts), rtol=1e-4, atol=1e-5
        )


@pytest.mark.parametrize("prefix", [0, 1])
def test_positions_match_the_published_weights(prefix: int) -> None:
    from lightly.models.utils import get_2d_sine_cosine_positional_embedding

    want = torch.from_numpy(get_2d_sine_cosine_positional_embedding(24, 4, cls_token=bool(prefix))).float()
    torch.testing.assert_close(sincos_positions(4, 4, 24, prefix)[0], want)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"no_embed_class": True},
        {"reg_tokens": 2},
        {"reg_tokens": 2, "no_embed_class": True},
        {"pre_norm": True},
        {"class_token": False, "global_pool": "avg", "fc_norm": False},
        {"dynamic_img_size": True},
        {"qk_norm": True, "init_values": 0.5},
    ],
    ids=str,
)
def test_encoder_matches_lightly(options: dict[str, Any]) -> None:
    from lightly.models.modules import MaskedVisionTransformerTIMM

    backbone = vit(**options)
    model = MaskedAutoencoder(backbone, **DECODER)
    oracle = MaskedVisionTransformerTIMM(backbone, weight_initialization="skip", pos_embed_initialization="skip")
    pictures = images()
    visible = torch.rand(3, COUNT).argsort(1)[:, :5]
    kept = torch.cat([torch.arange(backbone.num_prefix_tokens).expand(3, -1), visible + backbone.num_prefix_tokens], 1)
    torch.testing.assert_close(model.encode(pictures, visible), oracle.encode(pictures, idx_keep=kept))
    # Nothing hidden is the backbone itself.
    torch.testing.assert_close(model.encode(pictures), backbone.forward_features(pictures))


# --- behaviour


def test_predictions_depend_on_visible_pixels_only() -> None:
    model = MaskedAutoencoder(vit(), **DECODER)
    noise = torch.rand(2, COUNT)
    pictures = images(2).requires_grad_()
    output = model(pictures, noise)
    (gradient,) = torch.autograd.grad(output.prediction[output.mask].square().sum(), pictures)
    per_patch = patchify(gradient, model.patch_size).abs().amax(-1)
    assert (per_patch[output.mask] == 0).all()
    assert (per_patch[~output.mask] > 0).all()


def test_each_image_has_its_own_loss_over_its_masked_patches() -> None:
    """A loop over images and patches says the same."""
    model = MaskedAutoencoder(vit(), **DECODER)
    pictures = images(4)
    output = model(pictures)
    for i in range(4):
        errors = []
        for j in range(COUNT):
            row, column = divmod(j, SIZE // PATCH)
            patch = pictures[i, :, row * PATCH : (row + 1) * PATCH, column * PATCH : (column + 1) * PATCH]
            want = (patch - patch.mean()) / (patch.var() + 1e-6).sqrt()
            got = output.prediction[i, j].reshape(PATCH, PATCH, 3).permute(2, 0, 1)
            if output.mask[i, j]:
                errors.append((got - want).square().mean())
        assert len(errors) == 12
        torch.testing.assert_close(output.loss[i], torch.stack(errors).mean())


def test_masks_differ_between_calls_and_images() -> None:
    model = MaskedAutoencoder(vit(), **DECODER)
    one, two = model(images(8)).mask, model(images(8)).mask
    assert not torch.equal(one, two)
    assert len({tuple(row.tolist()) for row in one}) > 1


@pytest.mark.parametrize("kept", [1, 4, 9, 15])
def test_the_number_of_visible_patches_is_that_of_the_paper(kept: int) -> None:
    ratio = 1 - kept / COUNT
    assert (~MaskedAutoencoder(vit(), mask_ratio=ratio, **DECODER)(images()).mask).sum(1).tolist() == [kept] * 3


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"global_pool": "avg"},
        {"global_pool": "avg", "class_token": False},
        {"reg_tokens": 3, "no_embed_class": True},
        {"dynamic_img_size": True, "pre_norm": True},
        {"init_values": 0.1, "global_pool": "max"},
        {"final_norm": False},
    ],
    ids=str,
)
def test_every_parameter_gets_a_gradient(options: dict[str, Any]) -> None:
    model = MaskedAutoencoder(vit(**options), **DECODER)
    model(images()).loss.mean().backward()
    without = [n for n, p in model.named_parameters() if p.grad is None or not p.grad.abs().sum() > 0]
    assert not without


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_finite_and_loss_in_fp32(dtype: torch.dtype) -> None:
    model = MaskedAutoencoder(timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=0, depth=2), **DECODER)
    noise, pictures = torch.rand(2, 4), images(2, size=(32, 32))
    with torch.autocast("cpu", dtype=dtype):
        output = model(pictures, noise)
    assert output.loss.dtype == torch.float32
    torch.testing.assert_close(output.loss, model(pictures, noise).loss, rtol=0.05, atol=0)
    output.loss.mean().backward()
    assert all(torch.isfinite(p.grad).all() for p in model.parameters() if p.grad is not None)


def test_other_channels_and_oblong_images_and_patches() -> None:
    backbone = vit(img_size=(12, 24), patch_size=(4, 6), in_chans=5)
    model = MaskedAutoencoder(backbone, **DECODER)
    pictures = images(2, 5, (12, 24))
    output = model(pictures)
    assert output.prediction.shape == (2, 3 * 4, 4 * 6 * 5)
    assert torch.equal(unpatchify(patchify(pictures, model.patch_size), (12, 24), model.patch_size), pictures)


def test_patches_are_cut_row_by_row_with_channels_last() -> None:
    pictures = torch.arange(2 * 3 * 4 * 6).reshape(2, 3, 4, 6)
    patches = patchify(pictures, (2, 3))
    for index in range(4):
        row, column = divmod(index, 2)
        want = pictures[:, :, 2 * row : 2 * row + 2, 3 * column : 3 * column + 3].permute(0, 2, 3, 1).reshape(2, -1)
        assert torch.equal(patches[:, index], want)


def test_dynamic_sizes_get_the_positions_of_their_grid() -> None:
    model = MaskedAutoencoder(vit(dynamic_img_size=True), **DECODER)
    small = MaskedAutoencoder(vit(img_size=(12, 36), dynamic_img_size=True), **DECODER)
    pictures = images(2, size=(12, 36))
    assert model(pictures).prediction.shape == (2, 12, 108)
    torch.testing.assert_close(model.decoder._positions((2, 6)), small.decoder.positions)


def test_gradient_checkpointing_changes_nothing() -> None:
    model = MaskedAutoencoder(vit(), **DECODER)
    again = copy.deepcopy(model)
    again.set_grad_checkpointing()
    calls = []
    for block in (*again.backbone.blocks, *again.decoder.blocks):
        block.register_forward_pre_hook(lambda *_: calls.append(1))
    pictures, noise = images(), torch.rand(3, COUNT)
    for one in (model, again):
        one(pictures, noise).loss.mean().backward()
    assert len(calls) == 2 * (DEPTH + 2)  # each block ran twice
    for one, other in zip(model.parameters(), again.parameters(), strict=True):
        torch.testing.assert_close(one.grad, other.grad)


def test_initialising_the_encoder_as_the_paper_does() -> None:
    backbone = vit(reg_tokens=1)
    MaskedAutoencoder(backbone, init_encoder=True, **DECODER)
    assert not backbone.pos_embed.requires_grad
    torch.testing.assert_close(backbone.pos_embed, sincos_positions(4, 4, DIM, prefix=2), check_dtype=False)
    bound = (6 / (DIM + 4 * DIM)) ** 0.5
    largest = backbone.blocks[0].mlp.fc1.weight.abs().max().item()
    assert 0.95 * bound < largest <= bound
    bound = (6 / (DIM + 3 * PATCH**2)) ** 0.5
    assert 0.95 * bound < backbone.patch_embed.proj.weight.abs().max().item() <= bound


def test_state_is_the_plain_backbone_and_the_decoder() -> None:
    model = MaskedAutoencoder(vit(), **DECODER)
    fresh = vit()
    fresh.load_state_dict(model.backbone.state_dict())
    pictures = images()
    torch.testing.assert_close(model.embed(pictures), fresh(pictures))
    assert not [name for name in model.state_dict() if "positions" in name]


def test_it_learns_from_visible_pixels_and_positions() -> None:
    """New pictures in every step, ramps in colours of their own: 1.0 without the colour, 0.73 without positions."""
    torch.manual_seed(0)
    ramp = torch.linspace(-1, 1, SIZE).unsqueeze(1) - torch.linspace(-1, 1, SIZE)
    model = MaskedAutoencoder(vit(), norm_pix=False, init_encoder=True, **{**DECODER, "decoder_dim": 32})
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(120):
        loss = model(torch.randn(32, 3, 1, 1) + ramp).loss.mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert loss.item() < 0.25


# --- pictures


@pytest.mark.parametrize("norm_pix", [True, False])
def test_reconstructions(norm_pix: bool) -> None:
    model = MaskedAutoencoder(vit(), norm_pix=norm_pix, **DECODER)
    mean, std = torch.tensor([0.4, 0.5, 0.6]), torch.tensor([0.2, 0.3, 0.25])
    original = torch.rand(2, 3, SIZE, SIZE)
    normalised = (original - mean.view(1, 3, 1, 1)) / std.view(1, 3, 1, 1)
    noise = torch.rand(2, COUNT)
    mask = model(normalised, noise).mask
    got = model.reconstruct(normalised, noise, mean, std.tolist())
    torch.testing.assert_close(got.original, original)
    hidden = unpatchify(mask[..., None].expand(-1, -1, 3 * PATCH**2), (SIZE, SIZE), (PATCH, PATCH))
    assert (got.masked[hidden] == 0.5).all()
    torch.testing.assert_close(got.masked[~hidden], original[~hidden])
    torch.testing.assert_close(got.pasted[~hidden], original[~hidden])
    assert ((got.pasted >= 0) & (got.pasted <= 1)).all()
    assert not got.pasted.requires_grad


@pytest.mark.parametrize("norm_pix", [True, False])
def test_a_perfect_prediction_is_the_original_image(norm_pix: bool) -> None:
    class Oracle(nn.Module):
        """In the decoder's place: knows the answer."""

        answer: Tensor

        def forward(self, *_: Any) -> Tensor:
            return self.answer

    model = MaskedAutoencoder(vit(), norm_pix=norm_pix, **DECODER)
    pictures = torch.rand(2, 3, SIZE, SIZE)
    patches = patchify(pictures, (PATCH, PATCH))
    if norm_pix:
        patches = (patches - patches.mean(-1, keepdim=True)) / (patches.var(-1, keepdim=True) + 1e-6).sqrt()
    model.decoder = Oracle()
    model.decoder.answer = patches
    torch.testing.assert_close(model(pictures).loss, torch.zeros(2))
    torch.testing.assert_close(model.reconstruct(pictures).pasted, pictures)


# --- refusals


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: nn.Linear(2, 2), "plain timm VisionTransformer, received 'Linear'"),
        (lambda: timm.create_model("resnet18"), "plain timm VisionTransformer, received 'ResNet'"),
        (lambda: timm.create_model("deit_tiny_distilled_patch16_224", num_classes=0), "VisionTransformerDistilled"),
        (lambda: timm.create_model("beit_base_patch16_224", num_classes=0, depth=1), "received 'Beit'"),
        (lambda: timm.create_model("vit_tiny_r_s16_p8_224", num_classes=0, depth=1), "patches do not overlap"),
        (lambda: vit(num_classes=10), "head.weight.*num_classes=0"),
        (lambda: vit(global_pool="map", class_token=False), "attn_pool.*global_pool='token'"),
        (lambda: vit(patch_drop_rate=0.5), "drops no patches.*patch_drop_rate"),
        (lambda: vit(pos_embed="none"), "position embeddings"),
        (lambda: vit(img_size=26), "multiples of the patch"),
    ],
)
def test_backbones_that_do_not_fit_are_rejected(build: Any, message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        MaskedAutoencoder(build(), **DECODER)


def test_frozen_unused_parts_are_allowed() -> None:
    backbone = vit(num_classes=10)
    backbone.head.requires_grad_(False)
    assert torch.isfinite(MaskedAutoencoder(backbone, **DECODER)(images()).loss).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"mask_ratio": 0.0}, "above 0 and below 1"),
        ({"mask_ratio": 1.0}, "above 0 and below 1"),
        ({"mask_ratio": 0.99}, "leave a patch visible, received '16 patches"),
        ({"decoder_depth": 0}, "decoder_depth"),
        ({"decoder_dim": 18}, "multiple of decoder_heads and of 4"),
        ({"decoder_heads": 3}, "multiple of decoder_heads and of 4"),
    ],
)
def test_bad_arguments(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        MaskedAutoencoder(vit(), **{**DECODER, **options})


def test_bad_images() -> None:
    model = MaskedAutoencoder(vit(), **DECODER)
    with pytest.raises(DataError, match=r"\(24, 24\), as the backbone was built for, received \(30, 24\)"):
        model(images(size=(30, 24)))
    with pytest.raises(DataError, match=r"\(N, 3, H, W\), received \(3, 1, 24, 24\)"):
        model(images(channels=1))
    with pytest.raises(BadArgument, match=r"noise of shape \(3, 16\), received \(3, 15\)"):
        model(images(), torch.rand(3, 15))
    with pytest.raises(DataError, match="multiples of the patch"):
        MaskedAutoencoder(vit(dynamic_img_size=True), **DECODER)(images(size=(26, 24)))
    with pytest.raises(BadArgument, match="mean and std with 1 or 3 values"):
        model.reconstruct(images(), mean=[0.5, 0.5])
    with pytest.raises(DataError, match="patches of shape"):
        unpatchify(torch.rand(2, 15, 108), (SIZE, SIZE), (PATCH, PATCH))
    with pytest.raises(BadArgument, match="more than one pixel"):
        MaskedAutoencoder(vit(img_size=4, patch_size=1, in_chans=1), **DECODER)


@pytest.mark.slow
def test_compiled_gives_the_same() -> None:
    model = MaskedAutoencoder(vit(depth=1), **{**DECODER, "decoder_depth": 1})
    pictures, noise = images(), torch.rand(3, COUNT)
    want = model(pictures, noise)
    got = torch.compile(model, backend="aot_eager", fullgraph=True)(pictures, noise)
    torch.testing.assert_close(got.loss, want.loss)
