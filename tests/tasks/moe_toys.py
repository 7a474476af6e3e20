"""Small mixtures of experts, and runs with them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, MixtralConfig, OlmoeConfig, Qwen2MoeConfig, Qwen3MoeConfig

from text_toys import chat_tokenizer, sentences, trainer_for
from trainformer import Trainer
from trainformer.tasks import CausalLM

_SIZES = {
    "vocab_size": 320, "hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "num_experts_per_tok": 2, "max_position_embeddings": 64, "bos_token_id": 0,
    "eos_token_id": 1, "pad_token_id": 0, "router_aux_loss_coef": 0.5,
}  # fmt: skip


def mixtral(**options: Any) -> Any:
    return MixtralConfig(**{**_SIZES, "num_local_experts": 4, **options})


def qwen2_moe(**options: Any) -> Any:
    own = {"num_experts": 4, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
    return Qwen2MoeConfig(**{**_SIZES, **own, **options})


def qwen3_moe(**options: Any) -> Any:
    """Its first layer is dense: it has no router."""
    own = {"num_experts": 4, "moe_intermediate_size": 16, "head_dim": 8, "mlp_only_layers": [0]}
    return Qwen3MoeConfig(**{**_SIZES, **own, **options})


def olmoe(**options: Any) -> Any:
    return OlmoeConfig(**{**_SIZES, "num_experts": 4, **options})


CONFIGS = {"mixtral": mixtral, "qwen2_moe": qwen2_moe, "qwen3_moe": qwen3_moe, "olmoe": olmoe}


def double_mixtral() -> Any:
    """In float64, which only the eager experts compute in."""
    torch.manual_seed(3)
    return AutoModelForCausalLM.from_config(mixtral(), experts_implementation="eager").double()


TEXTS = [" ".join(sentences()[i : i + 1 + i % 3]) for i in range(24)]


def noisy_run(name: str, **options: Any) -> Trainer:
    """Three steps of a mixture of experts in float64, with both router losses and noise on its embeddings."""
    task = CausalLM(
        double_mixtral(), max_length=32, tokenizer=chat_tokenizer(), neftune_noise_alpha=5.0, router_z_loss_coef=0.1
    )
    still = {"batch_size": 8, "max_steps": 3, "optimizer": "sgd", "precision": "no", "sampler": None, "resume": "auto"}
    return trainer_for(task, TEXTS, val_data=TEXTS[:7], run_dir=name, **{**still, **options})


def trained(rank: int, world: int) -> dict[str, Tensor]:
    """Weights and metrics of runs with batches that ranks cannot share equally, without and with accumulation."""
    found: dict[str, Tensor] = {}
    for name, sizes in (("plain", {"batch_size": 5}), ("sliced", {"batch_size": 5, "accumulation_steps": 2})):
        trainer = noisy_run(f"{name}-{world}", eval_batch_size=3, strategy="auto", **sizes).fit()
        found |= {f"{name}/{key}": value.clone() for key, value in trainer.task.model.state_dict().items()}
        found |= {f"{name}/{key}": torch.tensor(value) for key, value in trainer.evaluate().items()}
    return found
