"""Augmentation on the device: every operation against torchvision, and independent random numbers for every sample."""

from __future__ import annotations

import copy
import math
import pickle

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as tv

from trainformer.core import BadArgument, DataError
from trainformer.data.augment import (
    BatchAugment,
    MultiView,
    byol,
    classification,
    dino,
    fresh_keys,
    mae,
    moco,
    moco_v3,
    simclr,
    uniforms,
)
from trainformer.data.augment.draws import as_keys, to_device
from trainformer.data.augment.ops import (
    CROP_DRAWS,
    LUMA,
    _blur_by_convolution,
    _blur_by_matrices,
    _sum_channels,
    blur_size,
    change_rows,
    colour_maps,
    crop_boxes,
    erase,
    erase_boxes,
    gaussian_blur,
    gaussian_kernels,
    place,
    recolour,
    resample,
    shifts,
    solarise,
    whole_boxes,
)

PLAIN = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
STILL = {"crop": False, "flip": 0.0}


def pictures(count: int = 4, channels: int = 3, height: int = 32, width: int = 32, seed: int = 0) -> Tensor:
    """Random uint8 images that are smooth enough for neighbouring pixels to resemble each other."""
    generator = torch.Generator().manual_seed(seed)
    coarse = torch.rand(count, channels, height // 4 + 1, width // 4 + 1, generator=generator)
    return (tv.resize(coarse, [height, width]) * 255).round().byte()


def keys_of(count: int, start: int = 0) -> np.ndarray:
    return np.arange(start, start + count, dtype=np.uint64)


def neutral(count: int = 1, **changed: float) -> dict[str, np.ndarray]:
    """Arguments of `colour_maps` that change nothing but what is named."""
    names = ("brightness", "contrast", "saturation")
    factors = np.array([[changed.get(name, 1.0) for name in names]] * count)
    grey = np.full(count, bool(changed.get("grey", 0)))
    return {"factors": factors, "hue": np.full(count, changed.get("hue", 0.0)), "grey": grey}


def coloured(images: Tensor, **changed: float) -> Tensor:
    maps = colour_maps(**neutral(len(images), **changed), channels=images.shape[1])
    return recolour(images, *map(torch.from_numpy, maps))


def read(images: Tensor, boxes: np.ndarray, size: tuple[int, int], **how: np.ndarray) -> Tensor:
    placement = place(boxes, (images.shape[2], images.shape[3]), size, **how)
    order = None if placement.order is None else torch.from_numpy(placement.order)
    table = torch.from_numpy(placement.table)
    return resample(images, table, size, placement, order=order, moved="moves" in how)


# -- draws -------------------------------------------------------------------------------------------------


def splitmix64(state: int) -> tuple[int, int]:
    """The published algorithm, number by number."""
    mask = (1 << 64) - 1
    state = (state + 0x9E3779B97F4A7C15) & mask
    z = state
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    return state, z ^ (z >> 31)


@pytest.mark.parametrize("stream", [0, 3])
def test_draws_are_those_of_splitmix64(stream: int) -> None:
    keys = [0, 1, 2**64 - 1, 0x0123456789ABCDEF]
    got = uniforms(np.array(keys, dtype=np.uint64), 5, stream)
    for row, key in zip(got.tolist(), keys, strict=True):
        mixed = splitmix64(key)[1]
        state = splitmix64(mixed + stream * 0x9E3779B97F4A7C15)[1]
        for value in row:
            state, bits = splitmix64(state)
            assert value == (bits >> 40) / 2**24


@pytest.mark.parametrize("keys", [keys_of(4000), np.arange(4000, dtype=np.uint64) * 0x9E3779B97F4A7C15, None])
def test_draws_are_uniform_and_unrelated(keys: np.ndarray | None) -> None:
    draws = [uniforms(fresh_keys(4000) if keys is None else keys, 24, stream).double() for stream in (0, 1)]
    for values in draws:
        assert values.min() >= 0
        assert values.max() < 1
        # Six standard errors everywhere: 24 * 24 correlations are looked at, and none may be off.
        assert (values.mean(0) - 0.5).abs().max() < 6 * math.sqrt(1 / 12 / 4000)
        assert (values.var(0) - 1 / 12).abs().max() < 6 * math.sqrt(1 / 180 / 4000)
        assert stats.kstest(values.flatten().numpy(), "uniform").pvalue > 1e-4
        between_columns = torch.corrcoef(values.T) - torch.eye(24)
        assert between_columns.abs().max() < 6 / math.sqrt(4000)
        next_key = torch.corrcoef(torch.stack([values[:-1].flatten(), values[1:].flatten()]))[0, 1]
        assert next_key.abs() < 6 / math.sqrt(4000 * 24)
    between_streams = torch.corrcoef(torch.cat([draws[0].T, draws[1].T]))[:24, 24:]
    assert between_streams.abs().max() < 6 / math.sqrt(4000)
    # Nor is the second stream the first one moved by some columns.
    assert len(torch.cat(draws, 1)[0].unique()) == 48


def test_draws_do_not_depend_on_neighbours_or_count() -> None:
    together = uniforms(keys_of(10), 8)
    assert together[3:5].equal(uniforms([3, 4], 8))
    assert together[:, :5].equal(uniforms(keys_of(10), 5))
    assert uniforms(torch.tensor([-1]), 3).equal(uniforms([2**64 - 1], 3))


def test_fresh_keys_follow_the_global_generator() -> None:
    torch.manual_seed(1)
    first, second = fresh_keys(5), fresh_keys(5)
    torch.manual_seed(1)
    assert np.array_equal(fresh_keys(5), first)
    assert not np.array_equal(first, second)
    torch.manual_seed(1)
    assert uniforms(None, 4, samples=5).equal(uniforms(first, 4))


def test_invalid_keys_raise() -> None:
    with pytest.raises(BadArgument, match="64-bit integers"):
        as_keys(np.array([0.5]))
    with pytest.raises(BadArgument, match=r"shape \(3,\), received \(2,\)"):
        as_keys([1, 2], 3)
    with pytest.raises(BadArgument, match="on the CPU"):
        as_keys(torch.zeros(3, dtype=torch.int64, device="meta"))
    with pytest.raises(BadArgument, match="neither"):
        uniforms(None, 3)
    with pytest.raises(BadArgument, match="count"):
        uniforms([1], -1)


def test_to_device_preserves_values() -> None:
    arrays = {"a": np.arange(3), "b": np.ones((2, 5), dtype=np.float32)[:, ::2], "c": np.array([True, False])}
    for name, tensor in to_device(arrays, torch.device("cpu")).items():
        assert np.array_equal(tensor.numpy(), arrays[name])
    for name, tensor in to_device(arrays, torch.device("meta")).items():  # the way over one buffer, without the values
        assert (tuple(tensor.shape), tensor.dtype) == (arrays[name].shape, torch.from_numpy(arrays[name]).dtype)


# -- geometry ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("image", "box", "size"),
    [
        ((32, 32), (0, 0, 32, 32), (32, 32)),
        ((32, 32), (3, 5, 11, 17), (32, 32)),
        ((40, 28), (0, 0, 40, 28), (24, 24)),
        ((40, 28), (7, 1, 25, 27), (16, 20)),
        ((32, 32), (31, 31, 1, 1), (8, 8)),
        ((64, 48), (10, 4, 31, 30), (16, 16)),
    ],
)
@pytest.mark.parametrize("flips", [(False, False), (False, True), (True, False), (True, True)])
def test_crop_is_torchvisions_on_the_same_box(
    image: tuple[int, int], box: tuple[int, ...], size: tuple[int, int], flips: tuple[bool, bool]
) -> None:
    images = torch.rand(2, 3, *image)  # noise: the hardest case, as every wrong place gives a wrong value
    want = tv.resized_crop(images, *box, size=list(size), antialias=False)
    want = tv.vertical_flip(want) if flips[0] else want
    want = tv.horizontal_flip(want) if flips[1] else want
    got = read(images, np.array([box] * 2, dtype=float), size, flips=np.array([flips] * 2))
    torch.testing.assert_close(got, want, atol=2e-5, rtol=0)


def test_identity_crop_returns_the_image() -> None:
    images = torch.rand(3, 3, 224, 160)
    torch.testing.assert_close(read(images, whole_boxes(3, (224, 160)), (224, 160)), images, atol=3e-5, rtol=0)


@pytest.mark.parametrize("factor", [2, 4])
def test_large_boxes_are_averaged_first(factor: int) -> None:
    images = torch.rand(2, 3, 64, 64)
    got = read(images, whole_boxes(2, (64, 64)), (64 // factor, 64 // factor))
    want = torch.nn.functional.avg_pool2d(images, factor)
    torch.testing.assert_close(got, want, atol=1e-5, rtol=0)


def test_shrinking_does_not_alias() -> None:
    """Stripes of one pixel are grey from afar; reading without averaging turns them into anything."""
    stripes = (torch.arange(230) % 2).float().expand(1, 1, 230, 230)
    errors = {}
    for size in (100, 60, 30):
        view = read(stripes, whole_boxes(1, (230, 230)), (size, size))
        errors[size] = (view - 0.5).abs().max().item()
    assert max(errors.values()) < 0.1, errors
    naive = tv.resize(stripes, [60, 60], antialias=False)
    assert (naive - 0.5).abs().max() > 0.3


def test_a_slope_stays_a_slope_where_cells_do_not_divide_the_image() -> None:
    slope = torch.arange(67.0).expand(1, 1, 67, 67)
    view = read(slope, whole_boxes(1, (67, 67)), (20, 20))
    want = (torch.arange(20) + 0.5) * 67 / 20 - 0.5
    # The last cell has one column instead of two, and lies half a pixel off.
    torch.testing.assert_close(view[0, 0, 3, :19], want[:19], atol=1e-3, rtol=0)
    assert (view[0, 0, 3, 19] - want[19]).abs() < 0.5


def test_samples_shrunk_by_different_factors_are_as_if_alone() -> None:
    images = torch.rand(5, 3, 97, 83)
    boxes = np.array([[0, 0, 97, 83], [10, 10, 20, 20], [1, 2, 90, 30], [0, 0, 40, 80], [3, 3, 41, 40]], dtype=float)
    together = read(images, boxes, (20, 20))
    placement = place(boxes, (97, 83), (20, 20))
    assert sorted(placement.cells) == [(1, 1), (2, 2), (2, 4), (4, 1), (4, 4)]
    for i in range(5):
        torch.testing.assert_close(read(images[i : i + 1], boxes[i : i + 1], (20, 20))[0], together[i])


def test_a_box_reads_nothing_from_outside() -> None:
    images = torch.ones(1, 1, 64, 64)
    images[..., 16:48, 16:48] = 0
    for size in (13, 32, 50):
        view = read(images, np.array([[16.0, 16, 32, 32]]), (size, size))
        assert view.abs().max() < 1e-5, size


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("size", [(16, 24), (32, 48)])
def test_shift_is_padding_with_black_and_cropping(size: tuple[int, int], flip: bool) -> None:
    images = torch.rand(6, 3, 16, 24)
    moves = np.array([[0, 0], [2, -3], [-2, 3], [1, 0], [0, -1], [size[0], 0]], dtype=float)
    got = read(images, whole_boxes(6, (16, 24)), size, moves=moves, flips=np.array([[False, flip]] * 6))
    resized = tv.resize(images, list(size), antialias=False)
    resized = resized.flip(-1) if flip else resized
    for view, image, (down, right) in zip(got, resized, moves.astype(int).tolist(), strict=True):
        pad = 64
        want = tv.pad(image, [pad])[:, pad - down : pad - down + size[0], pad - right : pad - right + size[1]]
        torch.testing.assert_close(view, want, atol=2e-5, rtol=0)


def test_shifts_take_every_whole_number_equally_often() -> None:
    found = shifts(uniforms(keys_of(9000), 2).numpy(), (32, 8), 1 / 8)
    values, counts = np.unique(found[:, 0], return_counts=True)
    assert values.tolist() == list(range(-4, 5))
    assert stats.chisquare(counts).pvalue > 1e-4
    assert np.unique(found[:, 1]).tolist() == [-1, 0, 1]


@pytest.mark.parametrize(
    ("image", "scale", "ratio"),
    [
        ((224, 224), (0.08, 1.0), (3 / 4, 4 / 3)),
        ((32, 32), (0.2, 1.0), (3 / 4, 4 / 3)),
        ((60, 200), (0.3, 1.0), (0.5, 2.0)),
    ],
)
def test_boxes_are_distributed_as_torchvisions(
    image: tuple[int, int], scale: tuple[float, float], ratio: tuple[float, float]
) -> None:
    boxes = crop_boxes(uniforms(keys_of(4000), CROP_DRAWS).numpy(), image, scale, ratio)
    assert (boxes >= 0).all()
    assert (boxes[:, 0] + boxes[:, 2] <= image[0]).all()
    assert (boxes[:, 1] + boxes[:, 3] <= image[1]).all()
    transform, blank = v2.RandomResizedCrop(8, scale=scale, ratio=ratio), torch.zeros(3, *image)
    names = ("top", "left", "height", "width")
    theirs = np.array([[drawn[n] for n in names] for drawn in (transform.make_params([blank]) for _ in range(4000))])
    for quantity in (
        lambda b: b[:, 2] * b[:, 3],
        lambda b: b[:, 3] / b[:, 2],
        lambda b: b[:, 0],
        lambda b: b[:, 1],
    ):
        assert stats.ks_2samp(quantity(boxes), quantity(theirs)).pvalue > 1e-3


@pytest.mark.parametrize(("image", "want"), [((10, 100), [0, 43, 10, 13]), ((100, 10), [43, 0, 13, 10])])
def test_without_a_fitting_box_the_centre_is_cropped(image: tuple[int, int], want: list[int]) -> None:
    boxes = crop_boxes(uniforms(keys_of(3), CROP_DRAWS).numpy(), image, (1.0, 1.0), (3 / 4, 4 / 3))
    drawn = v2.RandomResizedCrop(8, scale=(1.0, 1.0)).make_params([torch.zeros(3, *image)])
    assert [drawn[name] for name in ("top", "left", "height", "width")] == want
    assert boxes.tolist() == [want] * 3


# -- colour ------------------------------------------------------------------------------------------------

# torchvision weighs red with 0.2989, and its three weights sum to 0.9999: up to 1e-4 times the factor off ours.
NEARLY = {"atol": 2.5e-4, "rtol": 0}


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.8])
@pytest.mark.parametrize("channels", [1, 3])
def test_brightness_and_contrast_are_torchvisions(factor: float, channels: int) -> None:
    images = torch.rand(2, channels, 9, 7)
    torch.testing.assert_close(coloured(images, brightness=factor), tv.adjust_brightness(images, factor))
    torch.testing.assert_close(coloured(images, contrast=factor), tv.adjust_contrast(images, factor), **NEARLY)


@pytest.mark.parametrize("factor", [0.0, 0.4, 1.0, 1.8])
def test_saturation_and_grey_are_torchvisions(factor: float) -> None:
    images = torch.rand(2, 3, 9, 7)
    torch.testing.assert_close(coloured(images, saturation=factor), tv.adjust_saturation(images, factor), **NEARLY)
    greyed = tv.rgb_to_grayscale(images, num_output_channels=3)
    torch.testing.assert_close(coloured(images, grey=1, saturation=factor, hue=0.2), greyed, **NEARLY)


def test_colours_commute_where_nothing_is_cut_off() -> None:
    images = 0.4 + 0.2 * torch.rand(2, 3, 9, 7)
    steps = {"brightness": 1.2, "contrast": 0.7, "saturation": 1.3, "hue": 0.1}
    together = coloured(images, **steps)
    for names in (list(steps), list(steps)[::-1], ["hue", "brightness", "saturation", "contrast"]):
        one_by_one = images
        for name in names:
            one_by_one = coloured(one_by_one, **{name: steps[name]})
        torch.testing.assert_close(one_by_one, together, atol=2e-6, rtol=0)
    theirs = images
    for name, factor in list(steps.items())[:3]:
        theirs = getattr(tv, f"adjust_{name}")(theirs, factor)
    torch.testing.assert_close(coloured(images, **dict(list(steps.items())[:3])), theirs, **NEARLY)


def test_hue_is_a_rotation_about_the_grey_axis() -> None:
    images = 0.45 + 0.1 * torch.rand(2, 3, 9, 7)
    luma = torch.tensor(LUMA)
    for turn in (0.1, -0.25, 0.5):
        turned = coloured(images, hue=turn)
        assert not torch.allclose(turned, images, atol=1e-3)
        for a, b in ((turned, images), (coloured(turned, hue=-turn), images)):
            torch.testing.assert_close(torch.einsum("nchw,c->nhw", a, luma), torch.einsum("nchw,c->nhw", b, luma))
        torch.testing.assert_close(coloured(turned, hue=-turn), images, atol=1e-6, rtol=0)
    torch.testing.assert_close(coloured(coloured(images, hue=0.2), hue=0.13), coloured(images, hue=0.33))
    grey = torch.rand(2, 1, 5, 5).expand(-1, 3, -1, -1)
    torch.testing.assert_close(coloured(grey, hue=0.3), grey)


@pytest.mark.parametrize(("source", "target"), [(0, 1), (1, 2), (2, 0)])
def test_a_third_of_a_turn_goes_from_red_to_green_to_blue(source: int, target: int) -> None:
    image = torch.full((1, 3, 1, 1), 0.4)
    image[0, source] = 0.6
    assert coloured(image, hue=1 / 3).flatten().argmax() == target
    assert tv.adjust_hue(image, 1 / 3).flatten().argmax() == target  # the same sense of rotation


def test_neutral_colours_change_no_bit() -> None:
    images = torch.rand(4, 3, 8, 8)
    assert coloured(images).equal(images)


def test_summing_channels_equals_the_matrix_product() -> None:
    maps = colour_maps(np.random.default_rng(0).uniform(0, 2, (4, 3)), np.linspace(0, 0.5, 4), np.zeros(4, dtype=bool))
    pixels, offset = torch.rand(4, 3, 50), torch.rand(4, 1, 1)
    matrices = torch.from_numpy(maps[0])
    torch.testing.assert_close(_sum_channels(pixels, matrices, offset), torch.baddbmm(offset, matrices, pixels))


# -- filters -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("shape", [(3, 20, 31), (1, 32, 32), (3, 140, 131)])
def test_blur_is_torchvisions(shape: tuple[int, int, int]) -> None:
    images, sigma = torch.rand(4, *shape), np.array([0.1, 0.5, 1.1, 2.0])
    size = blur_size(min(shape[1:]))
    kernels = torch.from_numpy(gaussian_kernels(sigma, size))
    want = torch.stack([tv.gaussian_blur(i, size, s) for i, s in zip(images, sigma.tolist(), strict=True)])
    for blur in (gaussian_blur, _blur_by_convolution, _blur_by_matrices):
        torch.testing.assert_close(blur(images, kernels), want, atol=2e-6, rtol=0)


def test_blur_of_the_smallest_images() -> None:
    images, kernels = torch.rand(1, 3, 2, 2), torch.from_numpy(gaussian_kernels(np.array([1.0]), 3))
    want = tv.gaussian_blur(images, 3, 1.0)
    torch.testing.assert_close(_blur_by_matrices(images, kernels), want)
    torch.testing.assert_close(_blur_by_convolution(images, kernels), want)


def test_blur_width_scales_with_the_image() -> None:
    assert blur_size(224) == 23
    sizes = [blur_size(side) for side in range(1, 300)]
    assert min(sizes) == 3
    assert all(size % 2 for size in sizes)
    assert sizes == sorted(sizes)


@pytest.mark.parametrize("threshold", [0.0, 0.5, 128 / 255, 1.0])
def test_solarise_is_torchvisions(threshold: float) -> None:
    images = torch.cat([torch.rand(2, 3, 8, 8).flatten(), torch.tensor([0.5, 128 / 255, 0, 1])]).reshape(1, 1, 1, -1)
    assert solarise(images, threshold).equal(tv.solarize(images, threshold))


def test_only_the_chosen_rows_change() -> None:
    images = torch.rand(5, 1, 2, 2)
    changed = change_rows(images.clone(), torch.tensor([1, 4]), lambda part: part + 1)
    assert changed[[1, 4]].equal(images[[1, 4]] + 1)
    assert changed[[0, 2, 3]].equal(images[[0, 2, 3]])


def test_erased_rectangles_lie_within_and_have_the_wanted_area() -> None:
    boxes = erase_boxes(uniforms(keys_of(4000), 4).numpy(), (64, 48))
    top, bottom, left, right = boxes.T
    assert top.min() == left.min() == 0
    assert (bottom.max(), right.max()) == (64, 48)
    inner = (bottom - top < 64) & (right - left < 48)
    share = ((bottom - top) * (right - left) / (64 * 48))[inner]
    assert 0.015 < share.min() < 0.025
    assert 0.32 < share.max() < 0.345
    ratio = np.log((bottom - top) / (right - left))[inner]
    assert abs(ratio).max() < -math.log(0.3) + 0.15
    images = torch.ones(20, 3, 64, 48)
    erased = erase(images, torch.from_numpy(boxes[:20]))
    for image, (a, b, c, d) in zip(erased, boxes[:20].astype(int).tolist(), strict=True):
        want = torch.ones(3, 64, 48)
        want[:, a:b, c:d] = 0
        assert image.equal(want)


# -- one view ----------------------------------------------------------------------------------------------

STRONG = {
    "jitter": (0.8, 0.8, 0.8, 0.2),
    "grey": 0.2,
    "blur": 0.5,
    "solarise": 0.3,
    "erase": 0.3,
    "vflip": 0.3,
}


def test_identical_images_get_different_views() -> None:
    images = pictures(1).expand(16, -1, -1, -1)
    views = BatchAugment(32, **STRONG)(images, keys_of(16)).flatten(1)
    assert torch.cdist(views, views).add(torch.eye(16) * 1e9).min() > 1
    fresh = BatchAugment(32, **STRONG)(images).flatten(1)
    assert torch.cdist(fresh, fresh).add(torch.eye(16) * 1e9).min() > 1


@pytest.mark.parametrize("image", [32, 100])
def test_a_view_does_not_depend_on_the_batch(image: int) -> None:
    images, keys, view = pictures(12, height=image, width=image), keys_of(12, 77), BatchAugment(32, **STRONG)
    together = view(images, keys)
    order = torch.randperm(12)
    torch.testing.assert_close(view(images[order], keys[order.numpy()]), together[order], atol=2e-6, rtol=1e-6)
    for part in (slice(0, 1), slice(5, 6), slice(3, 10)):
        torch.testing.assert_close(view(images[part], keys[part]), together[part], atol=2e-6, rtol=1e-6)


def test_streams_differ_and_keys_matter() -> None:
    images, view = pictures(3), BatchAugment(32, **STRONG)
    first = view(images, keys_of(3), stream=0)
    assert first.equal(view(images, keys_of(3)))
    for other in (view(images, keys_of(3), stream=1), view(images, keys_of(3, 100))):
        assert (other - first).abs().flatten(1).amax(1).min() > 0.1


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float32, torch.float64])
def test_settings_that_do_nothing_only_normalise(dtype: torch.dtype) -> None:
    pixels = pictures(3, height=20, width=28)
    images = pixels if dtype == torch.uint8 else pixels.to(dtype) / 255
    before = images.clone()
    mean, std = (0.5, 0.4, 0.3), (0.2, 0.25, 0.3)
    got = BatchAugment((20, 28), **STILL, mean=mean, std=std)(images, keys_of(3))
    torch.testing.assert_close(got, tv.normalize(pixels.float() / 255, mean, std), atol=1e-6, rtol=1e-6)
    assert images.equal(before)


@pytest.mark.parametrize(("name", "dimension"), [("flip", -1), ("vflip", -2)])
def test_flips_mirror_the_side_they_name(name: str, dimension: int) -> None:
    images = pictures(3, height=20, width=28)
    got = BatchAugment((20, 28), **{**STILL, **PLAIN, name: 1.0})(images, keys_of(3))
    torch.testing.assert_close(got, images.flip(dimension).float() / 255, atol=1e-5, rtol=0)


def test_input_is_never_written_to() -> None:
    images = torch.rand(6, 3, 32, 32)
    before = images.clone()
    for options in (STRONG, {**STRONG, **STILL}, {**STILL, "blur": 1.0, "solarise": 0.5, "erase": 0.5}):
        MultiView([BatchAugment(32, **options)])(images, keys_of(6))
        BatchAugment(32, **options)(images, keys_of(6))
        assert images.equal(before)


def test_bytes_and_floats_agree() -> None:
    images, view = pictures(8), BatchAugment(24, **STRONG)
    want = view(images, keys_of(8))
    assert view(images.float() / 255, keys_of(8)).equal(want)
    # Half the pixels lie at most 2**-9 away in bf16; solarising makes jumps of that, so it is left out.
    calm = BatchAugment(24, jitter=(0.4, 0.4, 0.4, 0.1), **PLAIN)
    close = calm((images.float() / 255).bfloat16(), keys_of(8))
    torch.testing.assert_close(close, calm(images, keys_of(8)), atol=0.02, rtol=0)


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize(("image", "size"), [((32, 32), (32, 32)), ((40, 24), (16, 30)), ((7, 90), (12, 12))])
def test_shape_and_dtype(channels: int, image: tuple[int, int], size: tuple[int, int]) -> None:
    view = BatchAugment(size, **STRONG)(pictures(5, channels, *image), keys_of(5))
    assert view.shape == (5, channels, *size)
    assert view.dtype == torch.float32
    assert view.isfinite().all()


def test_one_channel_takes_the_average_statistics() -> None:
    images = pictures(3, 1)
    got = BatchAugment(32, **STILL, mean=(0.1, 0.2, 0.3), std=(0.2, 0.3, 0.4))(images, keys_of(3))
    torch.testing.assert_close(got, (images.float() / 255 - 0.2) / 0.3)


def test_one_channel_ignores_colour_operations() -> None:
    images = pictures(8, 1)
    still = BatchAugment(32, **STILL, jitter=(0.0, 0.0, 0.8, 0.4), grey=0.5)
    torch.testing.assert_close(still(images, keys_of(8)), BatchAugment(32, **STILL)(images, keys_of(8)))
    assert not torch.allclose(
        BatchAugment(32, **STILL, jitter=(0.5, 0.5, 0.0, 0.0))(images), BatchAugment(32, **STILL)(images), atol=0.01
    )


def test_other_channel_counts_work_without_colour_operations() -> None:
    images = torch.rand(2, 5, 16, 16)
    assert BatchAugment(8, blur=1.0, erase=1.0)(images).shape == (2, 5, 8, 8)
    with pytest.raises(DataError, match="1 or 3 channels"):
        BatchAugment(8, grey=0.1)(images)


def test_an_empty_batch_gives_an_empty_view() -> None:
    assert BatchAugment(8, **STRONG)(torch.zeros(0, 3, 32, 32, dtype=torch.uint8)).shape == (0, 3, 8, 8)


def test_disabling_one_operation_does_not_change_the_others() -> None:
    images = pictures(32)
    with_blur = BatchAugment(32, jitter=(0.4, 0.4, 0.4, 0.1), blur=0.5, **PLAIN)(images, keys_of(32))
    without = BatchAugment(32, jitter=(0.4, 0.4, 0.4, 0.1), **PLAIN)(images, keys_of(32))
    same = (with_blur == without).flatten(1).all(1)
    assert 8 < same.sum() < 24  # those that were not blurred, to the bit


RATES = {
    "flip": (0.3, {}),
    "vflip": (0.2, {}),
    "grey": (0.2, {}),
    "blur": (0.5, {"blur_sigma": (1.0, 2.0)}),
    "solarise": (0.25, {}),
    "erase": (0.4, {}),
}


@pytest.mark.parametrize("name", RATES)
def test_operations_apply_with_their_probability(name: str) -> None:
    rate, more = RATES[name]
    count = 1500
    images = pictures(1, height=8, width=8).expand(count, -1, -1, -1)
    options = {**STILL, **more, name: rate}
    views = BatchAugment(8, **options)(images, keys_of(count))
    plain = BatchAugment(8, **STILL)(images, keys_of(count))
    changed = ((views - plain).abs().flatten(1).amax(1) > 1e-4).float().mean().item()
    assert abs(changed - rate) < 4.5 * math.sqrt(rate * (1 - rate) / count)


def test_jitter_is_all_or_nothing_and_as_strong_as_torchvisions() -> None:
    count = 3000
    images = torch.full((count, 3, 2, 2), 0.25)
    views = BatchAugment(2, **STILL, **PLAIN, jitter=(0.6, 0.0, 0.0, 0.0), jitter_p=0.7)(images, keys_of(count))
    factors = (views[:, 0, 0, 0] / 0.25).double().numpy()
    changed = factors != 1
    assert abs(changed.mean() - 0.7) < 4.5 * math.sqrt(0.21 / count)
    assert stats.kstest(factors[changed], stats.uniform(0.4, 1.2).cdf).pvalue > 1e-3


def test_blur_strength_covers_its_range() -> None:
    """The middle of a blurred dot is the square of the kernel's, which gives the sigma away."""
    count = 800
    images = torch.zeros(count, 1, 81, 81)
    images[..., 40, 40] = 1
    views = BatchAugment(81, **STILL, mean=(0.0,), std=(1.0,), blur=1.0, blur_sigma=(0.5, 1.0))(images, keys_of(count))
    middle = views[:, 0, 40, 40].sqrt().double().numpy()
    sigmas = np.linspace(0.4, 1.1, 2000)
    known = gaussian_kernels(sigmas, blur_size(81))[:, blur_size(81) // 2]
    found = np.interp(middle, known[::-1], sigmas[::-1])
    assert stats.kstest(found, stats.uniform(0.5, 0.5).cdf).pvalue > 1e-3


def test_values_stay_between_black_and_white() -> None:
    views = simclr(32, strength=2.0, **PLAIN)(pictures(64), keys_of(64))
    for view in views:
        assert view.min() >= -1e-6
        assert view.max() <= 1 + 1e-6


def test_erased_pixels_are_the_mean() -> None:
    views = BatchAugment(32, **STILL, erase=1.0)(torch.full((8, 3, 32, 32), 255, dtype=torch.uint8), keys_of(8))
    zeros = (views == 0).all(1).float().mean((1, 2))
    assert (zeros > 0.01).all()
    assert (zeros < 0.4).all()


def test_keys_leave_the_global_generator_untouched() -> None:
    images = pictures(4)
    state = torch.get_rng_state()
    numpy_state = np.random.get_state()[1].copy()
    simclr(16)(images, keys_of(4))
    assert torch.get_rng_state().equal(state)
    assert np.array_equal(np.random.get_state()[1], numpy_state)
    simclr(16)(images)
    assert not torch.get_rng_state().equal(state)


def test_without_keys_the_global_generator_is_used() -> None:
    images, views = pictures(4), simclr(16)
    results = []
    for _ in range(2):
        torch.manual_seed(3)
        results.append(views(images))
    assert all(a.equal(b) for a, b in zip(*results, strict=True))
    assert not views(images)[0].equal(results[0][0])


def test_runs_without_autocast_and_gradients() -> None:
    images, view = torch.rand(4, 3, 32, 32, requires_grad=True), BatchAugment(32, **{**STRONG, "solarise": 0.0})
    want = view(images, keys_of(4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        got = view(images, keys_of(4))
    assert got.dtype == torch.float32
    assert got.equal(want)
    assert not got.requires_grad


def test_has_no_parameters_or_state() -> None:
    views = dino(32, 16, 2)
    assert not list(views.parameters())
    assert not views.state_dict()
    assert views.to(torch.float16)(pictures(2), keys_of(2))[0].dtype == torch.float32
    assert "blur=1.0" in repr(views)


def test_can_be_copied_and_pickled() -> None:
    images, views = pictures(2), byol(16)
    for other in (copy.deepcopy(views), pickle.loads(pickle.dumps(views))):
        assert other(images, keys_of(2))[1].equal(views(images, keys_of(2))[1])


def test_the_default_device_does_not_matter() -> None:
    images, views = pictures(4, height=70, width=70), simclr(16)
    want = views(images, keys_of(4))
    with torch.device("meta"):
        got = views(images, keys_of(4))
        views(images)
    assert all(a.equal(b) for a, b in zip(got, want, strict=True))


@pytest.mark.slow  # the compiler takes seconds to import
def test_works_inside_a_compiled_model() -> None:
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.views, self.layer = simclr(16), torch.nn.Conv2d(3, 4, 3)

        def forward(self, images: Tensor, keys: np.ndarray) -> list[Tensor]:
            return [self.layer(2 * view) for view in self.views(images, keys)]

    model = Model()
    compiled = torch.compile(model, backend="eager")
    for start in (0, 50):
        keys = keys_of(4, start)
        for a, b in zip(compiled(pictures(4), keys), model(pictures(4), keys), strict=True):
            torch.testing.assert_close(a, b)
            assert a.requires_grad


@pytest.mark.gpu
def test_a_gpu_gives_the_same_views_without_a_sync() -> None:
    images, keys = pictures(16, height=100, width=100), keys_of(16)
    views = dino(64, 32, 2, solarise=0.0)
    want = views(images, keys)
    there = images.cuda()
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high")
    try:
        views(there, keys)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        got = views(there, keys)
    finally:
        torch.cuda.set_sync_debug_mode("default")
        torch.set_float32_matmul_precision(precision)
    for a, b in zip(got, want, strict=True):
        assert a.is_cuda
        torch.testing.assert_close(a.cpu(), b, atol=2e-4, rtol=0)


# -- arguments ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"size": 0}, "size to be a positive integer"),
        ({"size": (8, 8, 8)}, "size to be a positive integer"),
        ({"size": 8.5}, "size to be a positive integer"),
        ({"scale": (0.5, 0.1)}, "scale to be two numbers"),
        ({"scale": (0.0, 1.0)}, "scale to be two numbers"),
        ({"scale": (0.5, 1.5)}, "at most 1"),
        ({"scale": 0.5}, "scale to be two numbers"),
        ({"ratio": (2.0, 1.0)}, "ratio to be two numbers"),
        ({"flip": 1.5}, "flip to be from 0 to 1"),
        ({"flip": True}, "flip to be from 0 to 1"),
        ({"vflip": -0.1}, "vflip to be from 0 to 1"),
        ({"grey": math.nan}, "grey to be from 0 to 1"),
        ({"blur": "yes"}, "blur to be from 0 to 1"),
        ({"solarise": 2}, "solarise to be from 0 to 1"),
        ({"solarise_threshold": 128}, "solarise_threshold to be from 0 to 1"),
        ({"erase": None}, "erase to be from 0 to 1"),
        ({"jitter_p": 7}, "jitter_p to be from 0 to 1"),
        ({"jitter": (0.4, 0.4, 0.4)}, "four strengths"),
        ({"jitter": 0.4}, "four strengths"),
        ({"jitter": (0.4, 0.4, 0.4, 0.6)}, "hue at most 0.5"),
        ({"jitter": (-0.4, 0.4, 0.4, 0.1)}, "none negative"),
        ({"blur_sigma": (0.0, 1.0)}, "blur_sigma to be two numbers"),
        ({"shift": 0.125}, "shift without a random crop"),
        ({"shift": 2.0, "crop": False}, "shift to be from 0 to 1"),
        ({"mean": (0.5,)}, "one number per channel"),
        ({"std": (0.5, 0.0, 0.5)}, "std to be above 0"),
        ({"size": 1, "blur": 0.5}, "2 x 2"),
    ],
)
def test_bad_arguments_are_named(options: dict[str, object], match: str) -> None:
    with pytest.raises(BadArgument, match=match):
        BatchAugment(**{"size": 8, **options})


@pytest.mark.parametrize(
    ("images", "match"),
    [
        (torch.zeros(3, 8, 8), r"\(N, C, H, W\)"),
        (torch.zeros(2, 3, 8, 8, dtype=torch.int64), "uint8, or floats"),
        (torch.zeros(2, 3, 0, 8), r"\(N, C, H, W\)"),
    ],
)
def test_bad_images_are_named(images: Tensor, match: str) -> None:
    for module in (BatchAugment(8), mae(8)):
        with pytest.raises(DataError, match=match):
            module(images)


def test_keys_must_match_the_batch() -> None:
    for module in (BatchAugment(8), mae(8)):
        with pytest.raises(BadArgument, match="one key per sample"):
            module(torch.rand(3, 3, 8, 8), keys_of(2))


# -- several views -----------------------------------------------------------------------------------------


def test_views_are_those_of_their_streams() -> None:
    images, keys = pictures(4), keys_of(4)
    one, two = BatchAugment(32, **STRONG), BatchAugment(16)
    got = MultiView([one, one, two])(images, keys)
    assert not got[0].equal(got[1])
    for stream, view in enumerate((one, one, two)):
        assert got[stream].equal(view(images, keys, stream=stream))
    assert MultiView.takes_keys
    assert BatchAugment.takes_keys


@pytest.mark.parametrize("views", [[], [torch.nn.Identity()]])
def test_multiview_accepts_only_batch_augments(views: list[torch.nn.Module]) -> None:
    with pytest.raises(BadArgument, match="list of BatchAugment"):
        MultiView(views)


def test_presets_are_those_of_the_papers() -> None:
    def of(module: MultiView, name: str) -> list[object]:
        return [getattr(view, name) for view in module.views]

    assert of(simclr(32), "jitter") == [(0.8, 0.8, 0.8, 0.2)] * 2
    assert of(simclr(32, strength=0.5), "jitter") == [(0.4, 0.4, 0.4, 0.1)] * 2
    assert of(simclr(32), "blur") == [0.5, 0.5]
    assert of(moco(32), "scale") == [(0.2, 1.0)] * 2
    for module in (byol(32), moco_v3(32)):
        assert of(module, "blur") == [1.0, 0.1]
        assert of(module, "solarise") == [0.0, 0.2]
    crops = dino()
    assert of(crops, "size") == [(224, 224)] * 2 + [(96, 96)] * 8
    assert of(crops, "blur") == [1.0, 0.1] + [0.5] * 8
    assert of(crops, "solarise") == [0.0, 0.2] + [0.0] * 8
    assert of(crops, "scale") == [(0.4, 1.0)] * 2 + [(0.05, 0.4)] * 8
    (only,) = mae(32).views
    assert (only.scale, only.flip, only.jitter, only.blur) == ((0.2, 1.0), 0.5, None, 0.0)


@pytest.mark.parametrize("preset", [simclr, moco, byol, moco_v3, dino, mae, classification])
def test_presets_run_and_take_overrides_for_every_view(preset: object) -> None:
    module = preset(16, flip=0.0, scale=(0.5, 0.6), mean=(0.5,) * 3, std=(0.5,) * 3)  # type: ignore[operator]
    views = [module] if isinstance(module, BatchAugment) else list(module.views)
    assert all((v.flip, v.scale, v.mean) == (0.0, (0.5, 0.6), (0.5,) * 3) for v in views)
    got = module(pictures(2), keys_of(2))
    got = [got] if isinstance(got, Tensor) else got
    assert [tuple(g.shape) for g in got] == [(2, 3, *v.size) for v in views]
    with pytest.raises(BadArgument, match="Did you mean 'solarise'"):
        preset(16, solarize=0.1)  # type: ignore[operator]


def test_presets_reject_invalid_arguments() -> None:
    with pytest.raises(BadArgument, match="num_local"):
        dino(num_local=-1)
    with pytest.raises(BadArgument, match="strength"):
        simclr(32, strength=-1.0)
