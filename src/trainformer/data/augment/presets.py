"""Augmentation recipes of published methods, by name.

Every preset takes `mean` and `std` (ImageNet's by default) and any other argument of `BatchAugment` as a keyword, which
then replaces the paper's value in every view (``flip=0.0`` for digits, ``jitter=None`` for images whose colours carry
meaning). Small images change nothing silently: the blur kernel scales with the size, everything else stays.
"""

from __future__ import annotations

import inspect
from typing import Any

from trainformer.core.errors import BadArgument, did_you_mean, expected
from trainformer.data.augment.pipeline import BatchAugment, MultiView

Size = int | tuple[int, int]
_BYOL_JITTER = (0.4, 0.4, 0.2, 0.1)


def simclr(size: Size, *, strength: float = 1.0, **overrides: Any) -> MultiView:
    """Two views as in SimCLR (Chen et al. 2020); `strength` scales the colour jitter.

    >>> len(simclr(32, flip=0.0))
    2
    """
    if not strength >= 0:
        raise BadArgument(expected("strength to be a number from 0 on", strength))
    # Half a turn covers every hue, so the paper's 0.2 cannot grow beyond 0.5.
    jitter = 0.8 * strength, 0.8 * strength, 0.8 * strength, min(0.2 * strength, 0.5)
    recipe = {"scale": (0.08, 1.0), "jitter": jitter, "jitter_p": 0.8, "grey": 0.2, "blur": 0.5}
    return MultiView([_view(size, recipe, overrides) for _ in range(2)])


def moco(size: Size, **overrides: Any) -> MultiView:
    """Two views as in MoCo v2 (Chen et al. 2020): SimCLR with weaker jitter and larger crops."""
    recipe = {"scale": (0.2, 1.0), "jitter": (0.4, 0.4, 0.4, 0.1), "jitter_p": 0.8, "grey": 0.2, "blur": 0.5}
    return MultiView([_view(size, recipe, overrides) for _ in range(2)])


def byol(size: Size, **overrides: Any) -> MultiView:
    """Two views as in BYOL (Grill et al. 2020): one always blurred, one rarely blurred and sometimes solarised."""
    recipe = {"scale": (0.08, 1.0), "jitter": _BYOL_JITTER, "jitter_p": 0.8, "grey": 0.2}
    differences = {"blur": 1.0}, {"blur": 0.1, "solarise": 0.2}
    return MultiView([_view(size, {**recipe, **own}, overrides) for own in differences])


def moco_v3(size: Size, **overrides: Any) -> MultiView:
    """Two views as in MoCo v3 (Chen et al. 2021), the same as BYOL."""
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
    """Two global and `num_local` local views as in DINO (Caron et al. 2021), the global ones first.

    >>> [view.size[0] for view in dino(num_local=2).views]
    [224, 224, 96, 96]
    """
    if not isinstance(num_local, int) or num_local < 0:
        raise BadArgument(expected("num_local to be a number of local views, at least 0", num_local))
    recipe = {"jitter": _BYOL_JITTER, "jitter_p": 0.8, "grey": 0.2}
    large = {**recipe, "scale": global_scale}
    small = {**recipe, "scale": local_scale, "blur": 0.5}
    views = [
        _view(global_size, {**large, "blur": 1.0}, overrides),
        _view(global_size, {**large, "blur": 0.1, "solarise": 0.2}, overrides),
    ]
    return MultiView(views + [_view(local_size, small, overrides) for _ in range(num_local)])


def mae(size: Size, *, scale: tuple[float, float] = (0.2, 1.0), **overrides: Any) -> MultiView:
    """The single view of MAE (He et al. 2021): crop and flip only."""
    return MultiView([_view(size, {"scale": scale}, overrides)])


def classification(size: Size, **overrides: Any) -> BatchAugment:
    """Crop and flip for supervised training, as most ImageNet recipes do.

    Shift small images instead of cropping them: ``classification(32, crop=False, shift=1 / 8)``.
    """
    return _view(size, {}, overrides)


def _view(size: Size, recipe: dict[str, Any], overrides: dict[str, Any]) -> BatchAugment:
    known = [name for name in inspect.signature(BatchAugment).parameters if name != "size"]
    for name in overrides:
        if name not in known:
            hint = did_you_mean(name, known) or f"Known are {', '.join(known)}."
            raise BadArgument(expected("arguments of BatchAugment", name, hint))
    return BatchAugment(size, **{**recipe, **overrides})
