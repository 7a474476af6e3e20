"""Masked autoencoders (He et al., 2021): a vision transformer learns by reconstructing masked patches.

Owns masking, the encoder over visible patches, the decoder, the loss per image, and reconstructions. The encoder is a
plain timm `VisionTransformer`, so its weights are exported and fine-tuned under timm's names.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from trainformer.core.errors import BadArgument, DataError, expected
from trainformer.core.optional import require

_NORM_EPS = 1e-6  # of the decoder's layer norms and of the patch variance, both as in the paper's code
_USED_PARTS = ("patch_embed", "cls_token", "reg_token", "pos_embed", "norm_pre", "blocks", "norm", "fc_norm")


class MaskedOutput(NamedTuple):
    """Output of a forward pass."""

    loss: Tensor  # (N,) in float32: mean squared error over the masked patches of each image
    prediction: Tensor  # (N, L, pixels of a patch), of all patches; normalised per patch with norm_pix
    mask: Tensor  # (N, L) bool: True for masked patches


class Reconstruction(NamedTuple):
    """Images (N, C, H, W) with values from 0 to 1."""

    masked: Tensor  # the model's input: masked patches are gray
    pasted: Tensor  # visible patches, with predictions for the masked ones
    original: Tensor


class MaskedAutoencoder(nn.Module):
    """A timm `VisionTransformer` as encoder, and a small transformer as decoder.

    ``int(L * (1 - mask_ratio))`` of L patches stay visible. With `norm_pix` the targets are patches normalised to mean
    0 and variance 1, which the paper found to give better features. ``init_encoder=True`` initialises the backbone as
    in the paper (Xavier weights, fixed sine-cosine positions); omit it for pretrained weights.

    All trainable parameters contribute to the loss, so there are no unused parameters for DDP. A backbone with
    ``global_pool="avg"`` has its last norm after the pooling (`fc_norm`); here it normalises the tokens.

    >>> import timm
    >>> vit = timm.create_model("vit_tiny_patch16_224", img_size=32, patch_size=8, num_classes=0, depth=2)
    >>> model = MaskedAutoencoder(vit, decoder_dim=32, decoder_depth=1, decoder_heads=2)
    >>> output = model(torch.randn(2, 3, 32, 32))
    >>> output.loss.shape, output.prediction.shape, output.mask.sum(1)
    (torch.Size([2]), torch.Size([2, 16, 192]), tensor([12, 12]))
    """

    backbone: Any

    def __init__(
        self,
        backbone: nn.Module,
        *,
        mask_ratio: float = 0.75,
        decoder_dim: int = 512,
        decoder_depth: int = 8,
        decoder_heads: int = 16,
        norm_pix: bool = True,
        init_encoder: bool = False,
    ) -> None:
        super().__init__()
        if not 0 < mask_ratio < 1:
            raise BadArgument(expected("mask_ratio to be above 0 and below 1", mask_ratio, "The paper's is 0.75."))
        check_encoder(backbone)
        self.backbone = backbone
        self.mask_ratio = mask_ratio
        self.norm_pix = norm_pix
        self.patch_size: tuple[int, int] = tuple(self.backbone.patch_embed.patch_size)
        self.channels: int = self.backbone.patch_embed.proj.in_channels
        height, width = self.patch_size
        if norm_pix and height * width * self.channels < 2:
            do = "One pixel has no variance: norm_pix=False."
            raise BadArgument(expected("patches of more than one pixel", self.patch_size, do))
        grid = tuple(self.backbone.patch_embed.grid_size)
        self._kept(grid[0] * grid[1])  # fail now rather than in the first step
        self.decoder = MaskedDecoder(
            in_dim=self.backbone.embed_dim,
            out_dim=height * width * self.channels,
            grid=grid,
            prefix=self.backbone.num_prefix_tokens,
            dim=decoder_dim,
            depth=decoder_depth,
            heads=decoder_heads,
        )
        if init_encoder:
            initialise_encoder(backbone)

    def forward(self, images: Tensor, noise: Tensor | None = None) -> MaskedOutput:
        """Mask patches and reconstruct them. Patches with the lowest `noise` (N, L; random) stay visible."""
        grid = self._grid(images)
        count = grid[0] * grid[1]
        kept = self._kept(count)
        if noise is None:
            noise = torch.rand(images.shape[0], count, device=images.device)
        elif noise.shape != (images.shape[0], count):
            raise BadArgument(expected(f"noise of shape {(images.shape[0], count)}", tuple(noise.shape)))
        order = noise.argsort(dim=1)
        restore = order.argsort(dim=1)  # the inverse permutation
        prediction = self.decoder(self.encode(images, order[:, :kept]), restore, grid)
        mask = restore >= kept

        target, _, _ = self._target(images)
        error = (prediction.float() - target).square().mean(-1)
        loss = (error * mask).sum(1) / (count - kept)
        return MaskedOutput(loss, prediction, mask)

    def encode(self, images: Tensor, visible: Tensor | None = None) -> Tensor:
        """Class, register and patch tokens, in that order; only the patches `visible` (N, K) if given."""
        self._grid(images)
        vit = self.backbone
        # timm's own function handles the class token, registers and dynamic sizes. It adds positions to all patches
        # before any is dropped, as the method requires.
        tokens = vit._pos_embed(vit.patch_embed(images))
        if visible is not None:
            prefix, patches = tokens[:, : vit.num_prefix_tokens], tokens[:, vit.num_prefix_tokens :]
            patches = patches.gather(1, visible.unsqueeze(-1).expand(-1, -1, patches.shape[-1]))
            tokens = torch.cat([prefix, patches], dim=1)
        tokens = _run_blocks(vit.blocks, vit.norm_pre(tokens), vit.grad_checkpointing)
        return vit.fc_norm(vit.norm(tokens))  # one of the two is the identity

    def embed(self, images: Tensor) -> Tensor:
        """Features of unmasked images."""
        return self.backbone(images)

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Enable gradient checkpointing of encoder and decoder."""
        self.backbone.set_grad_checkpointing(enable)
        self.decoder.grad_checkpointing = enable

    @torch.no_grad()
    def reconstruct(
        self,
        images: Tensor,
        noise: Tensor | None = None,
        mean: Sequence[float] | Tensor | None = None,
        std: Sequence[float] | Tensor | None = None,
    ) -> Reconstruction:
        """Reconstructions for display. `mean` and `std` (per channel) undo the normalisation of `images`."""
        output = self(images, noise)
        _, mean_of_patch, spread = self._target(images)
        size = (images.shape[-2], images.shape[-1])
        predicted = unpatchify(output.prediction.float() * spread + mean_of_patch, size, self.patch_size)
        holes = unpatchify(output.mask.unsqueeze(-1).expand_as(output.prediction), size, self.patch_size)

        def denormalized(image: Tensor) -> Tensor:
            return (image.float() * _per_channel(std, 1.0, image) + _per_channel(mean, 0.0, image)).clamp(0, 1)

        original = denormalized(images)
        return Reconstruction(
            torch.where(holes, 0.5, original), torch.where(holes, denormalized(predicted), original), original
        )

    def _target(self, images: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Targets in float32, and the mean and standard deviation that turn them back into pixels."""
        patches = patchify(images, self.patch_size).float()
        if not self.norm_pix:
            return patches, patches.new_zeros(()), patches.new_ones(())
        mean = patches.mean(-1, keepdim=True)
        spread = (patches.var(-1, keepdim=True) + _NORM_EPS).sqrt()
        return (patches - mean) / spread, mean, spread

    def _kept(self, count: int) -> int:
        kept = int(count * (1 - self.mask_ratio))
        if kept < 1:
            do = "Lower mask_ratio, or use larger images or smaller patches."
            what = f"mask_ratio={self.mask_ratio} to leave a patch visible"
            raise BadArgument(expected(what, f"{count} patches per image", do))
        return kept

    def _grid(self, images: Tensor) -> tuple[int, int]:
        if images.ndim != 4 or images.shape[1] != self.channels:
            raise DataError(expected(f"images of shape (N, {self.channels}, H, W)", tuple(images.shape)))
        size = (images.shape[2], images.shape[3])
        built_for = tuple(self.backbone.patch_embed.img_size)
        if not self.backbone.dynamic_img_size and size != built_for:
            do = f"Build the backbone with img_size={size} or with dynamic_img_size=True, or resize the images."
            raise DataError(expected(f"images of size {built_for}, as the backbone was built for", size, do))
        return _grid_of(size, self.patch_size)


class MaskedDecoder(nn.Module):
    """Predicts the pixels of all patches from the encoder's tokens.

    Initialised as in the paper: Xavier for linear layers, normal with std 0.02 for the mask token, fixed positions.
    """

    positions: Tensor

    def __init__(
        self, *, in_dim: int, out_dim: int, grid: tuple[int, ...], prefix: int, dim: int, depth: int, heads: int
    ) -> None:
        super().__init__()
        if depth < 1:
            raise BadArgument(expected("decoder_depth to be at least 1", depth))
        if heads < 1 or dim < 4 or dim % heads or dim % 4:
            received = f"{dim} with {heads} heads"
            raise BadArgument(expected("decoder_dim to be a multiple of decoder_heads and of 4", received))
        block = require("timm.models.vision_transformer", "vision", "for masked autoencoders").Block
        norm = partial(nn.LayerNorm, eps=_NORM_EPS)
        self.prefix = prefix
        self.grid = grid
        self.grad_checkpointing = False
        self.embed = nn.Linear(in_dim, dim)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        self.blocks = nn.Sequential(*(block(dim, heads, qkv_bias=True, norm_layer=norm) for _ in range(depth)))
        self.norm = norm(dim)
        self.head = nn.Linear(dim, out_dim)
        # Not persistent: it follows from the shapes, and a run may resume with another image size.
        self.register_buffer("positions", sincos_positions(grid[0], grid[1], dim, prefix), persistent=False)
        nn.init.normal_(self.mask_token, std=0.02)
        self.apply(_xavier)

    def forward(self, tokens: Tensor, restore: Tensor, grid: tuple[int, int]) -> Tensor:
        """Pixels (N, L, out_dim). `restore` (N, L) is the index of each patch in (visible, masked) order."""
        tokens = self.embed(tokens)
        prefix, visible = tokens[:, : self.prefix], tokens[:, self.prefix :]
        count, width = restore.shape[1], tokens.shape[2]
        masked = self.mask_token.to(tokens.dtype).expand(tokens.shape[0], count - visible.shape[1], width)
        patches = torch.cat([visible, masked], dim=1).gather(1, restore.unsqueeze(-1).expand(-1, -1, width))
        tokens = torch.cat([prefix, patches], dim=1) + self._positions(grid)
        tokens = _run_blocks(self.blocks, tokens, self.grad_checkpointing)
        return self.head(self.norm(tokens[:, self.prefix :]))

    def _positions(self, grid: tuple[int, int]) -> Tensor:
        if grid == self.grid:
            return self.positions
        own = self.positions
        return sincos_positions(*grid, own.shape[-1], self.prefix, device=own.device).to(own.dtype)


def patchify(images: Tensor, patch_size: tuple[int, int]) -> Tensor:
    """Images (N, C, H, W) to patches (N, L, pixels): patches and pixels in row-major order, channels last.

    >>> patchify(torch.zeros(2, 3, 8, 12), (4, 4)).shape
    torch.Size([2, 6, 48])
    """
    number, channels, high, wide = images.shape
    rows, columns = _grid_of((high, wide), patch_size)
    cells = images.reshape(number, channels, rows, patch_size[0], columns, patch_size[1])
    return cells.permute(0, 2, 4, 3, 5, 1).reshape(number, rows * columns, -1)


def unpatchify(patches: Tensor, size: tuple[int, int], patch_size: tuple[int, int]) -> Tensor:
    """The inverse of `patchify`: (N, L, pixels) as images (N, C, H, W) of `size` (H, W)."""
    rows, columns = _grid_of(size, patch_size)
    area = patch_size[0] * patch_size[1]
    if patches.ndim != 3 or patches.shape[1] != rows * columns or patches.shape[2] % area:
        what = f"patches of shape (N, {rows * columns}, {area} times the channels) for images of size {size}"
        raise DataError(expected(what, tuple(patches.shape)))
    cells = patches.reshape(patches.shape[0], rows, columns, *patch_size, -1)
    return cells.permute(0, 5, 1, 3, 2, 4).reshape(patches.shape[0], -1, *size)


def sincos_positions(
    height: int, width: int, dim: int, prefix: int = 0, *, device: torch.device | str | None = None
) -> Tensor:
    """Sine-cosine position embeddings (1, prefix + height * width, dim) of a grid, row-major; zero for the prefix.

    The first half encodes the column and the second the row, as in the published weights.

    >>> sincos_positions(2, 3, 8, prefix=1).shape
    torch.Size([1, 7, 8])
    """
    if dim % 4:
        raise BadArgument(expected("the width of sine-cosine positions to be a multiple of 4", dim))
    frequencies = 10000.0 ** -(torch.arange(dim // 4, device=device) / (dim // 4))
    rows = torch.arange(height, device=device).repeat_interleave(width, output_size=height * width)
    columns = torch.arange(width, device=device).repeat(height)
    angles = [axis.float().outer(frequencies) for axis in (columns, rows)]
    table = torch.cat([part for angle in angles for part in (angle.sin(), angle.cos())], dim=1)
    return torch.cat([table.new_zeros(prefix, dim), table]).unsqueeze(0)


def check_encoder(backbone: nn.Module) -> None:
    """Reject anything but a plain timm `VisionTransformer` whose parameters are all used here."""
    timm = require("timm.models.vision_transformer", "vision", "for masked autoencoders")
    kind, plain = type(backbone), timm.VisionTransformer
    if not isinstance(backbone, plain) or any(
        getattr(kind, name) is not getattr(plain, name) for name in ("forward_features", "_pos_embed")
    ):
        do = "Pass one, for instance timm.create_model('vit_small_patch16_224', num_classes=0)."
        raise BadArgument(expected("backbone to be a plain timm VisionTransformer", kind.__name__, do))
    vit: Any = backbone
    proj = getattr(vit.patch_embed, "proj", None)
    if not (
        isinstance(vit.patch_embed, timm.PatchEmbed)
        and isinstance(proj, nn.Conv2d)
        and tuple(proj.kernel_size) == tuple(proj.stride) == tuple(vit.patch_embed.patch_size)
    ):
        # A stem of overlapping convolutions would see masked pixels.
        do = "Hybrids with a convolutional stem cannot be used."
        raise BadArgument(expected("a backbone whose patches do not overlap", type(vit.patch_embed).__name__, do))
    if vit.pos_embed is None:
        do = "Without them the encoder cannot know which patches it sees."
        raise BadArgument(expected("a backbone with position embeddings", "pos_embed=None", do))
    if not isinstance(vit.patch_drop, nn.Identity):
        do = "Build it without patch_drop_rate."
        raise BadArgument(expected("a backbone that drops no patches of its own", repr(vit.patch_drop), do))
    if not vit.dynamic_img_size:
        _grid_of(tuple(vit.patch_embed.img_size), tuple(vit.patch_embed.patch_size), BadArgument)
    unused = [n for n, p in vit.named_parameters() if p.requires_grad and n.split(".")[0] not in _USED_PARTS]
    if unused:
        do = "Build it with num_classes=0 and global_pool='token' or 'avg', or freeze these parameters."
        raise BadArgument(expected("a backbone without parts that are never trained here", unused[:4], do))


@torch.no_grad()
def initialise_encoder(backbone: nn.Module) -> None:
    """Initialise a `VisionTransformer` as in the paper, with frozen sine-cosine positions."""
    vit: Any = backbone
    vit.apply(_xavier)
    weight = vit.patch_embed.proj.weight
    nn.init.xavier_uniform_(weight.view(weight.shape[0], -1))  # as a linear layer, not as a convolution
    for token in (vit.cls_token, vit.reg_token):
        if token is not None:
            nn.init.normal_(token, std=0.02)
    prefix = 0 if vit.no_embed_class else vit.num_prefix_tokens
    rows, columns = vit.patch_embed.grid_size
    vit.pos_embed.copy_(sincos_positions(rows, columns, vit.embed_dim, prefix))
    vit.pos_embed.requires_grad_(False)


def _xavier(module: nn.Module) -> None:
    if isinstance(module, nn.Linear):
        nn.init.xavier_uniform_(module.weight)
        if module.bias is not None:
            nn.init.zeros_(module.bias)


def _run_blocks(blocks: Iterable[nn.Module], tokens: Tensor, recompute: bool) -> Tensor:
    for block in blocks:
        if recompute and torch.is_grad_enabled():
            tokens = checkpoint(block, tokens, use_reentrant=False)
        else:
            tokens = block(tokens)
    return tokens


def _grid_of(
    size: tuple[int, ...], patch_size: tuple[int, ...], error: type[BadArgument] | type[DataError] = DataError
) -> tuple[int, int]:
    if size[0] % patch_size[0] or size[1] % patch_size[1]:
        do = "Resize or crop the images."
        raise error(expected(f"images whose height and width are multiples of the patch {patch_size}", size, do))
    return size[0] // patch_size[0], size[1] // patch_size[1]


def _per_channel(values: Sequence[float] | Tensor | None, default: float, like: Tensor) -> Tensor:
    given = torch.as_tensor(default if values is None else values, dtype=torch.float32, device=like.device).reshape(-1)
    if given.numel() not in (1, like.shape[1]):
        raise BadArgument(expected(f"mean and std with 1 or {like.shape[1]} values", given.tolist()))
    return given.reshape(1, -1, 1, 1)
