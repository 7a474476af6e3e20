"""The augmentations of the papers, by name: each a few numbers given to `Augment`.

Every preset takes `mean` and `std` (ImageNet's by default) and, as keyword arguments, anything that `Augment` takes:
it then holds for every view, in place of the number of the paper (``flip=0.0`` for digits, ``jitter=None`` for images
whose colours mean something). Nothing is changed silently for small images: the width of the blur scales with the
size, the rest stays.
"""

from __future__ import annotations

import inspect
from typing import Any

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.data.augment.pipeline import Augment, MultiView

Size = int | tuple[int, int]
_BYOL_JITTER = (0.4, 0.4, 0.2, 0.1)


def simclr(size: Size, *, strength: float = 1.0, **overrides: Any) -> MultiView:
    """Two views as in SimCLR (Chen et al. 2020); `strength` is that of the colour jitter.

    >>> len(simclr(32, flip=0.0))
    2
    """
    if not strength >= 0:
        raise BadArgument(expected("strength to be a number from 0 on", strength))
    # The paper's hue of 0.2 cannot grow beyond half a turn, which is every hue there is.
    jitter = 0.8 * strength, 0.8 * strength, 0.8 * strength, min(0.2 * strength, 0.5)
    recipe = {"scale": (0.08, 1.0), "jitter": jitter, "jitter_p": 0.8, "grey": 0.2, "blur": 0.5}
    return MultiView([_view(size, recipe, overrides) for _ in range(2)])


def moco(size: Size, **overrides: Any) -> MultiView:
    """Two views as in MoCo v2 (Chen et al. 2020): those of SimCLR with weaker colours and larger crops."""
    recipe = {"scale": (0.2, 1.0), "jitter": (0.4, 0.4, 0.4, 0.1), "jitter_p": 0.8, "grey": 0.2, "blur": 0.5}
    return MultiView([_view(size, recipe, overrides) for _ in range(2)])


def byol(size: Size, **overrides: Any) -> MultiView:
    """Two views as in BYOL (Grill et al. 2020): the first always blurred, the second seldom, and solarised at times."""
    recipe = {"scale": (0.08, 1.0), "jitter": _BYOL_JITTER, "jitter_p": 0.8, "grey": 0.2}
    unlike = {"blur": 1.0}, {"blur": 0.1, "solarise": 0.2}
    return MultiView([_view(size, {**recipe, **own}, overrides) for own in unlike])


def moco_v3(size: Size, **overrides: Any) -> MultiView:
    """Two views as in MoCo v3 (Chen et al. 2021), which are those of BYOL."""
    return byol(size, **overrides)


def dino(
    global_size: Size = 224,
    local_size: Size = 96,
    num_local: int = 8,
    *,
    global_scale: tuple[float, float] = (0.4, 1.0),
    local_scale: tuple[float, float] = (0.05, 0.4),
    **overrides: Any,
) -> MultiView:
    """Two large and `num_local` small views as in DINO (Caron et al. 2021), the large ones first.

    >>> [view.size[0] for view in dino(num_local=2).views]
    [224, 224, 96, 96]
    """
    if not isinstance(num_local, int) or num_local < 0:
        raise BadArgument(expected("num_local to be a number of small views, at least 0", num_local))
    recipe = {"jitter": _BYOL_JITTER, "jitter_p": 0.8, "grey": 0.2}
    large = {**recipe, "scale": global_scale}
    small = {**recipe, "scale": local_scale, "blur": 0.5}
    views = [
        _view(global_size, {**large, "blur": 1.0}, overrides),
        _view(global_size, {**large, "blur": 0.1, "solarise": 0.2}, overrides),
    ]
    return MultiView(views + [_view(local_size, small, overrides) for _ in range(num_local)])


def mae(size: Size, *, scale: tuple[float, float] = (0.2, 1.0), **overrides: Any) -> MultiView:
    """The one view of MAE (He et al. 2021): crop and flip, nothing else."""
    return MultiView([_view(size, {"scale": scale}, overrides)])


def classification(size: Size, **overrides: Any) -> Augment:
    """Crop and flip for supervised training: the common ground of recipes for ImageNet.

    Small images are rather moved than cropped: ``classification(32, crop=False, shift=1 / 8)``.
    """
    return _view(size, {}, overrides)


def _view(size: Size, recipe: dict[str, Any], overrides: dict[str, Any]) -> Augment:
    known = [name for name in inspect.signature(Augment).parameters if name != "size"]
    for name in overrides:
        if name not in known:
            hint = did_you_mean(name, known) or f"Known are {', '.join(known)}."
            raise BadArgument(expected("arguments of Augment", name, hint))
    return Augment(size, **{**recipe, **overrides})
