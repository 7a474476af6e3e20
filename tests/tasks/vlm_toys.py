"""Tiny vision-language models with their processors, and what two processes compute with one of them.

LLaVA sees 32 x 32 pixels in 16 patches, and reads its vision tower before the last layer. Qwen2-VL and Qwen2.5-VL see
images of any size in patches of 8 x 8, of which four make a token.
"""

from __future__ import annotations

from typing import Any

import shapes
import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from transformers import (
    AddedToken,
    CLIPImageProcessor,
    CLIPVisionConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaProcessor,
    Qwen2_5_VLConfig,
    Qwen2_5_VLProcessor,
    Qwen2VLConfig,
    Qwen2VLImageProcessor,
    Qwen2VLProcessor,
    Qwen2VLVideoProcessor,
)

from trainformer.tasks.multimodal.vlm import VLM

FAMILIES = ("llava", "qwen2_vl", "qwen2_5_vl")
# As that of LLaVA 1.5: no BOS, no end of turn, contents are lists of parts.
LLAVA_CHAT = (
    "{% for m in messages %}{{ m['role'].upper() + ' : ' }}"
    "{% for part in m['content'] if part['type'] == 'image' %}{{ '<image>\n' }}{% endfor %}"
    "{% for part in m['content'] if part['type'] == 'text' %}"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ part['text'] + ' ' }}{% endgeneration %}"
    "{% else %}{{ part['text'] + ' ' }}{% endif %}{% endfor %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT :' }}{% endif %}"
)
# As that of Qwen2-VL: turns have an end, images stand where they are put.
QWEN_CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['content'] is string %}{{ m['content'] }}{% else %}{% for part in m['content'] %}"
    "{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part['text'] }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_SPECIAL = (
    *("<image>", "<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>", "<|im_start|>", "<|im_end|>"),
)
_WORDS = ("USER", "ASSISTANT", "SYSTEM", "user", "assistant", ":", ",", "and", "the", "colour", "shape", "place")
TEXT = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}


def tokenizer() -> Any:
    """Words of shapes, and special tokens of both families. Only <s> is put before a text."""
    from tokenizers import processors

    made = shapes.word_tokenizer(_WORDS)
    made.add_tokens([AddedToken(name, special=True, normalized=False) for name in _SPECIAL], special_tokens=True)
    made.backend_tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.bos_token_id)]
    )
    return made


def processor(family: str = "llava", chat: bool = True) -> Any:
    """The processor of a family, with its chat template or without."""
    words = tokenizer()
    if family == "llava":
        images = CLIPImageProcessor(size={"shortest_edge": 32}, crop_size={"height": 32, "width": 32})
        made: Any = LlavaProcessor(
            images, words, patch_size=8, vision_feature_select_strategy="default", num_additional_image_tokens=1
        )
        made.chat_template = LLAVA_CHAT if chat else None
        return made
    sizes = {"patch_size": 8, "merge_size": 2, "min_pixels": 256, "max_pixels": 64 * 64}
    kind = Qwen2VLProcessor if family == "qwen2_vl" else Qwen2_5_VLProcessor
    made = kind(Qwen2VLImageProcessor(**sizes), words, Qwen2VLVideoProcessor(**sizes))
    made.chat_template = QWEN_CHAT if chat else None
    return made


def config(family: str = "llava", **text: Any) -> Any:
    """The configuration of a tiny model."""
    words = tokenizer()
    ids = {"bos_token_id": words.bos_token_id, "eos_token_id": words.eos_token_id, "pad_token_id": words.pad_token_id}
    language = {**TEXT, "vocab_size": len(words), "num_key_value_heads": 2, "max_position_embeddings": 256, **ids}
    language |= {"initializer_range": 0.1, **text}  # a width of 64 learns several times faster with it
    if family == "llava":
        vision = CLIPVisionConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=3, num_attention_heads=4, image_size=32,
            patch_size=8,
        )  # fmt: skip
        number = words.convert_tokens_to_ids("<image>")
        return LlavaConfig(vision_config=vision, text_config=LlamaConfig(**language), image_token_index=number)
    language["rope_parameters"] = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 3, 3]}
    numbers = {
        "image_token_id": words.convert_tokens_to_ids("<|image_pad|>"),
        "video_token_id": words.convert_tokens_to_ids("<|video_pad|>"),
        "vision_start_token_id": words.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": words.convert_tokens_to_ids("<|vision_end|>"),
    }
    if family == "qwen2_vl":
        seen = {"depth": 2, "embed_dim": 64, "hidden_size": 64, "num_heads": 4, "patch_size": 8, "mlp_ratio": 2}
        return Qwen2VLConfig(text_config=language, vision_config=seen, **numbers)
    seen = {
        "depth": 2, "hidden_size": 64, "out_hidden_size": 64, "intermediate_size": 128, "num_heads": 4,
        "patch_size": 8, "window_size": 32, "fullatt_block_indexes": [1],
    }  # fmt: skip
    return Qwen2_5_VLConfig(text_config=language, vision_config=seen, **numbers)


def make(family: str = "llava", *, chat: bool = True, **options: Any) -> VLM:
    """A task with a tiny model of a family."""
    torch.manual_seed(0)
    defaults = {"processor": processor(family, chat), "max_length": 128}
    return VLM(options.pop("model", None) or config(family), **{**defaults, **options})


def records(count: int = 12) -> list[dict[str, Any]]:
    """Of every form: questions, captions, conversations, several images of several sizes, and no image."""
    made: list[dict[str, Any]] = []
    for number, scene in enumerate(shapes.scenes()[:: 200 // count][:count]):
        image, (question, answer) = scene.draw(number, side=(32, 48, 40)[number % 3]), scene.questions[number % 3]
        told = [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]
        forms: list[dict[str, Any]] = [
            {"image": image, "prompt": question, "completion": answer},
            {"image": image, "text": scene.caption},
            {"messages": told},
            {
                "images": [image, scene.draw(number + 100, side=64)],
                "conversations": [
                    {"from": "human", "value": "<image>\n<image>\nwhat colour is the shape?"},
                    {"from": "gpt", "value": scene.colour},
                    {"from": "human", "value": "which shape is it?"},
                    {"from": "gpt", "value": scene.shape},
                ],
            },
        ]
        made.append(forms[number % len(forms)])
    return made


RECORDS = records()


def examples_of(task: VLM, records: Any = RECORDS, train: bool = True) -> list[dict[str, Any]]:
    """All of them, read."""
    data = task.prepare_dataset(records, train=train)
    return [data[place] for place in range(len(data))]


def trainer_for(task: VLM, data: Any = RECORDS, **options: Any) -> Any:
    """Six steps with batches of four, quietly."""
    import text_toys

    return text_toys.trainer_for(task, data, **{"lr": 1e-3, **options})


def ask(**said: Any) -> dict[str, Any]:
    """An image, and what is said of it."""
    return {"image": shapes.scenes()[7].draw(), **said}


# -- two processes -----------------------------------------------------------------------------------------


def results(rank: int, world: int) -> dict[str, Tensor]:
    """Gradients of all of LLaVA on a batch of which a rank has its share: the second share has no image at all."""
    task = make(freeze=())
    examples = examples_of(task)
    seeing = [example for example in examples if example["pixels"]]
    blind = [example for example in examples if not example["pixels"]]
    shares = [seeing[:3], blind[:3]] if world > 1 else [seeing[:3] + blind[:3]]
    plain = task.model
    if world > 1:
        task.model = DistributedDataParallel(plain)  # which raises in the second pass if one had unused parameters
    for _ in range(2):
        plain.zero_grad()
        loss = task.train_step(task.collate_fn(shares[rank]))
        loss.sum.backward()
    return {name: p.grad for name, p in plain.named_parameters() if p.requires_grad}
