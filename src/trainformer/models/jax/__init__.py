"""Models on JAX: a decoder for many families, image classifiers, LoRA; HF folders in and out.

Never imports torch.
"""

from trainformer.core.lazy import lazy_exports

__getattr__, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.models.jax.convnext": ["ConvNext", "ConvNextConfig"],
        "trainformer.models.jax.decoder": ["Decoder", "DecoderConfig", "generate"],
        "trainformer.models.jax.huggingface": ["load_model", "model_from_config", "save_model"],
        "trainformer.models.jax.layers": ["constrain"],
        "trainformer.models.jax.lora": ["apply_lora", "load_lora", "merge_lora", "save_lora"],
        "trainformer.models.jax.moe": ["MoEConfig"],
        "trainformer.models.jax.resnet": ["ResNet", "ResNetConfig"],
        "trainformer.models.jax.vit": ["ViT", "ViTConfig"],
    },
)
