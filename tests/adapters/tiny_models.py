"""Tiny models of every architecture that adapters are tested on, built from configurations, and batches for them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

VOCAB = 64
IMAGE_TOKEN = 60
TEXT = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 64,
}


@dataclass(frozen=True)
class Tiny:
    """An architecture: how it is built, what it is fed, and which Auto class opens it."""

    kind: str
    build: Callable[[], nn.Module]
    batch: Callable[[], dict[str, Tensor]]
    auto: str

    def make(self, seed: int = 0) -> Any:
        """The model, the same one for the same seed, without dropout at work."""
        torch.manual_seed(seed)
        return self.build().eval()


def tokens(rows: int = 2, length: int = 10, limit: int = 59) -> Tensor:
    return torch.randint(3, limit, (rows, length), generator=torch.Generator().manual_seed(1))


def _text() -> dict[str, Tensor]:
    ids = tokens()
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def _pairs() -> dict[str, Tensor]:
    return {**_text(), "decoder_input_ids": tokens(length=7)}


def llama() -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    return LlamaForCausalLM(LlamaConfig(**TEXT, num_key_value_heads=2, pad_token_id=0, bos_token_id=1, eos_token_id=2))


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(vocab_size=VOCAB, n_embd=32, n_layer=2, n_head=4, n_positions=64, bos_token_id=1, eos_token_id=2)
    )


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    return T5ForConditionalGeneration(
        T5Config(
            vocab_size=VOCAB,
            d_model=32,
            d_kv=8,
            d_ff=48,
            num_layers=2,
            num_heads=4,
            pad_token_id=0,
            eos_token_id=2,
            decoder_start_token_id=0,
        )
    )


def bart() -> nn.Module:
    from transformers import BartConfig, BartForConditionalGeneration

    return BartForConditionalGeneration(
        BartConfig(
            vocab_size=VOCAB,
            d_model=32,
            encoder_layers=2,
            decoder_layers=2,
            encoder_attention_heads=4,
            decoder_attention_heads=4,
            encoder_ffn_dim=48,
            decoder_ffn_dim=48,
            max_position_embeddings=64,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            decoder_start_token_id=2,
            forced_eos_token_id=2,
        )
    )


def bert(head: str = "BertForMaskedLM", **more: Any) -> nn.Module:
    import transformers

    return getattr(transformers, head)(transformers.BertConfig(**TEXT, pad_token_id=0, **more))


def distilbert() -> nn.Module:
    from transformers import DistilBertConfig, DistilBertForSequenceClassification

    return DistilBertForSequenceClassification(
        DistilBertConfig(vocab_size=VOCAB, dim=32, hidden_dim=48, n_layers=2, n_heads=4, num_labels=3)
    )


_VISION = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 8,
}


def clip() -> nn.Module:
    from transformers import CLIPConfig, CLIPModel

    text = {**TEXT, "eos_token_id": 2, "bos_token_id": 1, "pad_token_id": 0}
    return CLIPModel(CLIPConfig(text_config=text, vision_config=_VISION, projection_dim=16))


def _clip_batch() -> dict[str, Tensor]:
    return {**_text(), "pixel_values": _pixels(2, 3, 16, 16)}


def llava() -> nn.Module:
    from transformers import CLIPVisionConfig, LlamaConfig, LlavaConfig, LlavaForConditionalGeneration

    text = LlamaConfig(**TEXT, pad_token_id=0, bos_token_id=1, eos_token_id=2)
    return LlavaForConditionalGeneration(
        LlavaConfig(vision_config=CLIPVisionConfig(**_VISION), text_config=text, image_token_index=IMAGE_TOKEN)
    )


def _llava_batch() -> dict[str, Tensor]:
    ids = tokens()
    ids[:, 1:5] = IMAGE_TOKEN  # 16 x 16 pixels in patches of 8 x 8
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "pixel_values": _pixels(2, 3, 16, 16)}


def qwen2_vl() -> nn.Module:
    from transformers import Qwen2VLConfig, Qwen2VLForConditionalGeneration

    text = {
        **TEXT,
        "num_key_value_heads": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [1, 1, 2]},
        "bos_token_id": 1,
        "eos_token_id": 2,
    }
    vision = {"depth": 2, "embed_dim": 32, "hidden_size": 32, "num_heads": 4, "patch_size": 4, "mlp_ratio": 2}
    return Qwen2VLForConditionalGeneration(
        Qwen2VLConfig(
            text_config=text,
            vision_config=vision,
            image_token_id=IMAGE_TOKEN,
            video_token_id=IMAGE_TOKEN + 1,
            vision_start_token_id=IMAGE_TOKEN + 2,
            vision_end_token_id=IMAGE_TOKEN + 3,
        )
    )


def _qwen_batch() -> dict[str, Tensor]:
    ids = tokens()
    ids[:, 1] = IMAGE_TOKEN + 2
    ids[:, 2:6] = IMAGE_TOKEN  # 4 x 4 patches, merged two by two
    ids[:, 6] = IMAGE_TOKEN + 3
    return {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "mm_token_type_ids": (ids == IMAGE_TOKEN).long(),
        "pixel_values": _pixels(2 * 16, 3 * 2 * 4 * 4),
        "image_grid_thw": torch.tensor([[1, 4, 4], [1, 4, 4]]),
    }


def _pixels(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(2))


MODELS = {
    "llama": Tiny("causal_lm", llama, _text, "AutoModelForCausalLM"),
    "gpt2": Tiny("causal_lm", gpt2, _text, "AutoModelForCausalLM"),
    "t5": Tiny("seq2seq", t5, _pairs, "AutoModelForSeq2SeqLM"),
    "bart": Tiny("seq2seq", bart, _pairs, "AutoModelForSeq2SeqLM"),
    "bert": Tiny("masked_lm", bert, _text, "AutoModelForMaskedLM"),
    "clip": Tiny("clip", clip, _clip_batch, "AutoModel"),
    "llava": Tiny("vlm", llava, _llava_batch, "AutoModelForImageTextToText"),
    "qwen2_vl": Tiny("vlm", qwen2_vl, _qwen_batch, "AutoModelForImageTextToText"),
}


def output(model: nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """What a model says, as one tensor."""
    result = model(**batch)
    if getattr(result, "logits_per_image", None) is not None:
        return result.logits_per_image
    return result.logits if getattr(result, "logits", None) is not None else result.last_hidden_state
