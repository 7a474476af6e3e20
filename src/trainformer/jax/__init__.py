"""Entry point for EasyDeL users on JAX: training arguments, a trainer to subclass, and trainers for text and images.

Never imports torch.

>>> from trainformer.jax import BaseTrainer, TrainingArguments
"""

from typing import Any

from trainformer.core.lazy import lazy_exports
from trainformer.core.optional import require

_lazy, __dir__, __all__ = lazy_exports(
    __name__,
    {
        "trainformer.jax.arguments": ["TrainingArguments"],
        "trainformer.jax.base_trainer": ["BaseTrainer"],
        "trainformer.jax.trainer": ["Trainer"],
        "trainformer.jax.tasks": ["make_trainer"],
        "trainformer.jax.easydel": ["AutoEasyDeLModelForCausalLM", "EasyDeLOptimizers", "EasyDeLSchedulers"],
        "trainformer.jax.trainer_protocol": [
            "BaseTrainerProtocol",
            "TrainerConfigureDataloaderOutput",
            "TrainerConfigureFunctionOutput",
            "TrainerConfigureModelOutput",
        ],
        "trainformer.jax.text_arguments": ["LoRAConfig"],
        "trainformer.jax.sft": ["SFTConfig", "SFTTrainer"],
        "trainformer.jax.masked_lm": ["MaskedLMConfig", "MaskedLMTrainer"],
        "trainformer.jax.text_classification": ["SequenceClassificationConfig", "SequenceClassificationTrainer"],
        "trainformer.jax.seq2seq": ["Seq2SeqConfig", "Seq2SeqTrainer"],
        "trainformer.jax.dpo": ["DPOConfig", "DPOTrainer", "ORPOConfig", "ORPOTrainer"],
        "trainformer.jax.grpo": ["GRPOTrainer"],
        "trainformer.jax.grpo_config": ["GRPOConfig"],
        "trainformer.jax.kto": ["KTOConfig", "KTOTrainer"],
        "trainformer.jax.reward": ["RewardConfig", "RewardTrainer"],
        "trainformer.jax.distillation": ["DistillationConfig", "DistillationTrainer"],
        "trainformer.jax.image_classification": ["ImageClassificationTrainer"],
        "trainformer.backends.jax.state": ["EasyDeLState", "TrainState"],
    },
)


def __getattr__(name: str) -> Any:
    if name in __all__:
        for package in ("jax", "flax", "optax"):
            require(package, "jax", "for trainformer.jax")
    return _lazy(name)
