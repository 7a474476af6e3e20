"""Preprocessing: files, arrays, tensors and graphs give the same pixels, bit by bit, and those of Pillow."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from trainformer.core.errors import BadArgument, DataError
from trainformer.data.preprocessing import ImagePreprocessing, resized

METHODS = ("bilinear", "bicubic", "lanczos", "box", "hamming")
SIDES = st.integers(1, 70)
SIZES = st.tuples(SIDES, SIDES)


def pixels(height, width, channels, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, channels), dtype=np.uint8)


def opened(image):
    return Image.fromarray(image[..., 0] if image.shape[-1] == 1 else image)


@settings(max_examples=60, deadline=None)
@given(SIZES, SIZES, st.none() | SIZES, st.sampled_from(METHODS), st.sampled_from((1, 3)))
def test_an_image_an_array_and_a_graph_agree_bitwise(size, target, extra, method, channels):
    image = pixels(*size, channels)
    cover = None if extra is None else (target[0] + extra[0] % 9, target[1] + extra[1] % 9)
    mean, std = (0.4, 0.5, 0.6)[:channels], (0.2, 0.25, 0.3)[:channels]
    spec = ImagePreprocessing(target, cover, method, mean, std)
    wanted = spec(opened(image))
    assert wanted.shape == (channels, *target)
    assert torch.equal(spec(image), wanted)
    batch = torch.from_numpy(image).permute(2, 0, 1)[None]
    assert torch.equal(spec(batch[0]), wanted)
    assert torch.equal(spec.module()(batch.repeat(2, 1, 1, 1))[1], wanted)


@pytest.mark.parametrize("method", METHODS)
def test_what_covers_is_pillows_resize_and_a_center_crop(method):
    image = opened(pixels(60, 90, 3))
    spec = ImagePreprocessing((24, 32), (30, 40), method, (0.0,) * 3, (1.0,) * 3)
    whole = image.resize((45, 30), getattr(Image.Resampling, method.upper()))  # 60 x 90 has another aspect ratio
    wanted = np.asarray(whole)[3:27, round(13 / 2) : round(13 / 2) + 32]
    assert np.array_equal((spec(image) * 255).round().permute(1, 2, 0).numpy(), wanted)


def test_any_number_of_channels_is_resized_by_channel():
    image = torch.from_numpy(pixels(20, 30, 5)).permute(2, 0, 1)
    small = resized(image, (9, 11), "bicubic")
    for number in range(5):
        plane = Image.fromarray(image[number].numpy()).resize((11, 9), Image.Resampling.BICUBIC)
        assert np.array_equal(small[number].numpy(), np.asarray(plane))


def test_a_description_is_read_as_it_was_written_and_checked():
    spec = ImagePreprocessing((32, 48), (36, 54), "bicubic", (0.5,), (0.25,))
    text = json.loads(json.dumps(spec.as_dict()))
    assert ImagePreprocessing.from_dict(text) == spec
    assert (text["mean"], text["crop"], text["color"]) == ([0.5], {"size": [32, 48], "mode": "center"}, "L")
    for change in (
        {"mean": [0.5, 0.5]},
        {"std": [0]},
        {"input_size": [10**9, 3]},
        {"resize": {**text["resize"], "interpolation": "__class__"}},
        {"channels": 3},
        {"resize": None},
    ):
        with pytest.raises(DataError, match="description of the preprocessing"):
            ImagePreprocessing.from_dict(text | change)


def test_what_a_graph_cannot_do_is_refused():
    with pytest.raises(BadArgument, match="1 or 3 channels"):
        ImagePreprocessing((8, 8), None, "bilinear", (0.5,) * 4, (0.5,) * 4).module()
    with pytest.raises(BadArgument, match="an interpolation among"):
        ImagePreprocessing((8, 8), None, "nearest", (0.5,), (0.5,)).module()
    with pytest.raises(DataError, match="uint8 pixels"):
        ImagePreprocessing((8, 8), None, "bilinear", (0.5,), (0.5,))(torch.zeros(1, 8, 8))
