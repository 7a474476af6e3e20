"""Augmentation of whole batches on the device, with independent random numbers for every sample."""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.data.augment.draws": ["fresh_keys", "uniforms"],
        "trainformer.data.augment.pipeline": ["BatchAugment", "MultiView"],
        "trainformer.data.augment.presets": ["byol", "classification", "dino", "mae", "moco", "moco_v3", "simclr"],
    },
)
