"""Models of transformers with data, tokenizers and collators for them, small enough for tests."""

import copy

import datasets
import torch
import transformers
from peft import LoraConfig, get_peft_model

from text_toys import bart, bert, chat_tokenizer, digit_pairs, gpt2, masking_tokenizer, reading_tokenizer, sentences, t5
from text_toys import llama as llama_config

TEXTS = sentences()
READS = masking_tokenizer(TEXTS)
WRITES = chat_tokenizer()
WRITES.pad_token = "</s>"
TRANSLATES = reading_tokenizer()


def tokenized(**columns):
    rows = [{**READS(text), "text": text, **{k: v[i] for k, v in columns.items()}} for i, text in enumerate(TEXTS)]
    return datasets.Dataset.from_list(rows)


def classes():
    return tokenized(label=[i % 3 for i in range(24)])


def tagged():
    lengths = [len(READS(text)["input_ids"]) for text in TEXTS]
    return tokenized(labels=[[-100, *(i % 3 for i in range(size - 2)), -100] for size in lengths])


def answers():
    lengths = [len(READS(text)["input_ids"]) for text in TEXTS]
    return tokenized(start_positions=[i % n for i, n in enumerate(lengths)], end_positions=[n - 1 for n in lengths])


def pairs():
    made = digit_pairs(24)
    rows = [{**TRANSLATES(p["source"]), "labels": TRANSLATES(p["target"])["input_ids"]} for p in made]
    return datasets.Dataset.from_list(rows)


def written():
    return datasets.Dataset.from_list([dict(WRITES(text)) for text in TEXTS])


def pictures():
    g = torch.Generator().manual_seed(0)
    return [{"pixel_values": torch.randn(3, 8, 8, generator=g), "labels": i % 3} for i in range(24)]


def vit():
    sizes = {"image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    no_dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
    return transformers.ViTForImageClassification(
        transformers.ViTConfig(**sizes, **no_dropout, intermediate_size=16, num_labels=3)
    )


def with_lora(model, task, target):
    adapted = get_peft_model(model, LoraConfig(r=2, lora_dropout=0.0, task_type=task, target_modules=[target]))
    for name, parameter in adapted.named_parameters():
        if "lora" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return adapted


def several():
    return tokenized(label=[[float(i % 2), float(i % 3 == 0), 1.0] for i in range(24)])


def no_dropout_gpt2():
    return transformers.GPT2LMHeadModel(gpt2(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0))


def translating(kind, config):
    def collator():
        model = kind(copy.deepcopy(config))
        return {"data_collator": transformers.DataCollatorForSeq2Seq(TRANSLATES, model=model)}

    return lambda: kind(copy.deepcopy(config)), pairs, collator


def padding():
    return {"processing_class": READS}


def tagging():
    return {"data_collator": transformers.DataCollatorForTokenClassification(READS)}


def writing():
    return {"data_collator": transformers.DataCollatorForLanguageModeling(WRITES, mlm=False)}


def regression():
    return tokenized(label=[i / 7 - 1 for i in range(24)])


def seq_cls(**options):
    return lambda: transformers.BertForSequenceClassification(bert(**options))


def causal():
    return transformers.LlamaForCausalLM(llama_config())


# name: model factory, data, and further arguments of the trainer
CASES = {
    "one label": (seq_cls(num_labels=3), classes, padding),
    "a number": (seq_cls(num_labels=1), regression, padding),
    "several labels": (seq_cls(num_labels=3, problem_type="multi_label_classification"), several, padding),
    "tokens": (lambda: transformers.BertForTokenClassification(bert(num_labels=3)), tagged, tagging),
    "answers": (lambda: transformers.BertForQuestionAnswering(bert()), answers, padding),
    "t5": translating(transformers.T5ForConditionalGeneration, t5()),
    "bart": translating(transformers.BartForConditionalGeneration, bart()),
    "llama": (causal, written, writing),
    "pictures": (vit, pictures, dict),
    "lora on bert": (lambda: with_lora(seq_cls(num_labels=3)(), "SEQ_CLS", "query"), classes, padding),
    "lora on llama": (lambda: with_lora(causal(), "CAUSAL_LM", "q_proj"), written, writing),
}
