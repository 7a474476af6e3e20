"""Masks of conversations with the chat templates of common models, token by token against TRL's assistant-only loss.

TRL ships the templates of models, and versions of them with `{% generation %}` markers. Where our mask differs from
theirs, `HEADERS` and `REASONING` say how, and docs/language.md why. Templates that TRL does not mark are compared with
versions marked by hand.
"""

from __future__ import annotations

import copy
import json
import logging
import re
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from trainformer.core import DataError  # noqa: E402
from trainformer.data.text.encode import IGNORE_INDEX, Encoder  # noqa: E402

_SPECIAL = re.compile(
    r"<\|[^|<>\s']+\|>|<｜[^｜]+｜>|\[gMASK\]|<sop>|<(?:start|end)_of_turn>|</?think>|</?tool_call>|</?tool_response>"
    r"|</?arg_(?:key|value)>|\[/?[A-Z_]+\]|</?s>"
)
# The end-of-turn tokens of each template; the first is the tokenizer's EOS.
STOPS = {
    "llama3": ["<|eot_id|>"],
    "qwen2_5": ["<|im_end|>"],
    "qwen3": ["<|im_end|>"],
    "qwen3_instruct_2507": ["<|im_end|>"],
    "qwen3_5_think": ["<|im_end|>"],
    "qwen3_6": ["<|im_end|>"],
    "gemma": ["<eos>", "<end_of_turn>"],
    "gemma3": ["<eos>", "<end_of_turn>"],
    "phi3": ["<|endoftext|>", "<|end|>"],
    "deepseekv3": ["<｜end▁of▁sentence｜>"],
    "deepseek_r1_distill": ["<｜end▁of▁sentence｜>"],
    "glm4moe": ["<|endoftext|>", "<|user|>", "<|observation|>", "<|system|>"],
    "gptoss": ["<|return|>", "<|end|>", "<|call|>"],
    "cohere2": ["<|END_OF_TURN_TOKEN|>"],
}
# What TRL trains on besides. A line break after the end-of-turn token, which no model ever generates, and:
# - parts of the turn's header, which the generation prompt writes;
HEADERS = {
    "qwen2_5": ["\n"],
    "qwen3_instruct_2507": ["\n"],
    "deepseekv3": ["<｜Assistant｜>", "<｜tool▁outputs▁end｜>"],
    "deepseek_r1_distill": ["<｜Assistant｜>"],
    "gptoss": ["<|start|>assistant"],
}
# - reasoning: its templates write a block of it, empty or not, in every turn, the models' own ones only in the last,
#   or in none. The generation prompt may open the block.
REASONING = {"qwen3", "qwen3_5_think", "qwen3_6", "deepseek_r1_distill"}
NO_CALLS = {"llama3", "gemma", "gemma3", "phi3", "cohere2", "deepseek_r1_distill"}  # TRL drops the calls, or fails too


def user(content: str) -> dict[str, Any]:
    return {"role": "user", "content": content}


def answer(content: str, **fields: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **fields}


SYSTEM = {"role": "system", "content": "be brief"}
RESULT = {"role": "tool", "name": "add", "content": "4", "tool_call_id": "call00001"}
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add",
            "description": "Add.",
            "parameters": {"type": "object", "properties": {"a": {"type": "integer", "description": "A number."}}},
        },
    }
]


def call(**arguments: Any) -> list[dict[str, Any]]:
    return [{"id": "call00001", "type": "function", "function": {"name": "add", "arguments": arguments}}]


CASES = {
    "plain": [user("who sat?"), answer("the cat")],
    "several turns": [
        user("who?"),
        answer("the cat"),
        user("where?"),
        answer("on the mat"),
        user("sure?"),
        answer("yes"),
    ],
    "tools": [user("2?"), answer("", tool_calls=call(a=2)), RESULT, answer("it is 4"), user("more?"), answer("no")],
    "a call at the end": [SYSTEM, user("2?"), answer("", tool_calls=call(a=2))],
    "a call without arguments": [user("2?"), answer("", tool_calls=call()), RESULT, answer("it is 4")],
    "system": [SYSTEM, user("who?"), answer("the cat"), user("where?"), answer("on the mat")],
    "system late": [user("who?"), answer("the cat"), SYSTEM, user("where?"), answer("on the mat")],
    "empty turns": [user(""), answer(""), user("where?"), answer("on the mat")],
    "an empty last turn": [user("who?"), answer("")],
    "long": [user("who sat? " * 30), answer("the cat sat on the mat " * 30), user("sure?"), answer("yes " * 30)],
    "unicode": [user("wër? 猫"), answer("die Katze 🐈‍⬛ naïve"), user("где?"), answer("на ковре")],
    "reasoning": [
        *(user("who?"), answer("the cat", reasoning_content="cats sit", thinking="cats sit")),
        *(user("where?"), answer("on the mat", reasoning_content="mats lie", thinking="mats lie")),
    ],
    "reasoning in the content": [
        *(user("who?"), answer("<think>\ncats sit\n</think>\n\nthe cat")),
        *(user("where?"), answer("<think>\nmats lie\n</think>\n\non the mat")),
    ],
    "a question at the end": [user("who?"), answer("the cat"), user("sure?")],
}


def make_tokenizer(template: str, eos: str) -> Any:
    """A byte-level BPE with the special tokens of a template."""
    special = sorted({*_SPECIAL.findall(template), eos, "<bos>"})
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    alphabet = tokenizers.pre_tokenizers.ByteLevel.alphabet()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=380, special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    model.train_from_iterator(["the cat sat on the mat, assistant and user\n\n"] * 5, trainer)
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, bos_token="<bos>", eos_token=eos)
    tokenizer.chat_template = template
    return tokenizer


@cache
def peer(name: str) -> tuple[Any, str]:
    """A tokenizer with the template of a model, and TRL's template for training."""
    trl = pytest.importorskip("trl")
    from trl.chat_template_utils import get_training_chat_template

    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = make_tokenizer(template, STOPS[name][0])
    return tokenizer, get_training_chat_template(tokenizer)


def encode(tokenizer: Any, messages: Any, tools: Any = None, **options: Any) -> tuple[list[int], list[bool]]:
    record = {"messages": copy.deepcopy(messages), "tools": tools}
    (piece,) = Encoder(tokenizer, **{"max_length": None, **options}).encode(record)
    return piece.input_ids.tolist(), (piece.labels != IGNORE_INDEX).tolist()


def turns(tokenizer: Any, ids: list[int], mask: list[bool]) -> list[str]:
    """The text of each stretch of tokens that is trained on."""
    edges = np.flatnonzero(np.diff([0, *map(int, mask), 0]))
    return [tokenizer.decode(ids[begin:end]) for begin, end in zip(edges[::2], edges[1::2], strict=True)]


def tools_of(case: str) -> Any:
    return TOOLS if "call" in case or case == "tools" else None


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", STOPS)
def test_masks_are_those_of_trl(name: str, case: str) -> None:
    tokenizer, training = peer(name)
    messages, tools = CASES[case], tools_of(case)
    if tools and name in NO_CALLS:
        with pytest.raises(DataError, match="a chat template that renders tool calls"):
            encode(tokenizer, messages, tools)
        return
    try:
        oracle = tokenizer.apply_chat_template(
            copy.deepcopy(messages), tools=tools, chat_template=training, return_dict=True,
            return_assistant_tokens_mask=True,
        )  # fmt: skip
    except Exception:
        with pytest.raises(DataError, match="The chat template cannot render this conversation"):
            encode(tokenizer, messages, tools)
        return
    ids, mask = encode(tokenizer, messages, tools)
    theirs, their_mask = oracle["input_ids"], [bool(flag) for flag in oracle["assistant_masks"]]
    # Every turn ends with a stop token that is trained on.
    ours = turns(tokenizer, ids, mask)
    assert len(ours) == sum(message["role"] == "assistant" for message in messages)
    assert all(turn.endswith(tuple(STOPS[name])) for turn in ours), ours
    if name in REASONING:
        without = re.compile(r"^\s*(<think>)?[^<]*</think>\s*|^\n\n")
        expected = [_without_header(name, turn) for turn in turns(tokenizer, theirs, their_mask)]
        assert [without.sub("", turn) for turn in ours] == [without.sub("", turn).rstrip("\n") for turn in expected]
        # The tokens are those of the model's own template.
        assert ids == tokenizer.apply_chat_template(messages, tools=tools, tokenize=True, return_dict=False)
        return
    assert ids == theirs
    assert not any(own and not other for own, other in zip(mask, their_mask, strict=True))
    only_theirs = turns(tokenizer, ids, [other and not own for own, other in zip(mask, their_mask, strict=True)])
    assert {*only_theirs} <= {"\n", *HEADERS.get(name, [])}


def _without_header(name: str, turn: str) -> str:
    for part in HEADERS.get(name, []):
        turn = turn.removeprefix(part)
    return turn


@pytest.mark.parametrize("name", ["llama3_1", "llama3_2"])
def test_llama_3_calls_tools(name: str) -> None:
    """TRL has these templates without markers."""
    trl = pytest.importorskip("trl")
    template = (Path(trl.__file__).parent / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8")
    tokenizer = make_tokenizer(template, "<|eot_id|>")
    ids, mask = encode(tokenizer, CASES["tools"], TOOLS)
    wanted = ['{"name": "add", "parameters": {"a": 2}}', "it is 4", "no"]
    assert turns(tokenizer, ids, mask) == [f"{text}<|eot_id|>" for text in wanted]
    assert ids == tokenizer.apply_chat_template(CASES["tools"], tools=TOOLS, tokenize=True, return_dict=False)


@pytest.mark.parametrize("name", STOPS)
def test_markers_of_trl_mean_the_same_here(name: str) -> None:
    """A user who sets TRL's template for training gets TRL's mask."""
    tokenizer, training = peer(name)
    marked = make_tokenizer(tokenizer.chat_template, STOPS[name][0])
    marked.chat_template = training
    for case in ("several turns", "empty turns", "unicode", *(["tools"] if name not in NO_CALLS else [])):
        tools = tools_of(case)
        ids, mask = encode(marked, CASES[case], tools)
        oracle = marked.apply_chat_template(
            copy.deepcopy(CASES[case]), tools=tools, return_dict=True, return_assistant_tokens_mask=True
        )
        assert ids == oracle["input_ids"], case
        assert mask == [bool(flag) for flag in oracle["assistant_masks"]], case


@pytest.mark.parametrize("name", ["qwen2_5", "glm4moe", "gptoss"])
def test_long_conversations_are_truncated_like_those_of_trl(name: str) -> None:
    tokenizer, _ = peer(name)
    ids, mask = encode(tokenizer, CASES["long"])
    for limit in (len(ids) - 1, mask.index(True) + 9):
        assert encode(tokenizer, CASES["long"], max_length=limit) == (ids[:limit], mask[:limit])


# -- templates that TRL does not mark --------------------------------------------------------------------------------

_TURN = "{% for m in messages %}{% if m.role == 'assistant' %}"
MARKED = {  # template, EOS; the markers are taken out for our side
    "mistral v3": (
        "{{ bos_token }}{% set ns = namespace(last=0) %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% set ns.last = loop.index0 %}{% endif %}{% endfor %}{% for m in messages %}{% if m.role == 'user' %}"
        "{% if tools and loop.index0 == ns.last %}[AVAILABLE_TOOLS] {{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}"
        "[INST] {% if loop.index0 == ns.last and messages[0].role == 'system' %}{{ messages[0].content + '\n\n' }}"
        "{% endif %}{{ m.content }}[/INST]{% elif m.role == 'tool' %}[TOOL_RESULTS] {{ m.content | tojson }}"
        "[/TOOL_RESULTS]{% elif m.role == 'assistant' %}{% generation %}{% if m.tool_calls %}[TOOL_CALLS] ["
        "{% for c in m.tool_calls %}{{ c.function | tojson }}{% endfor %}]</s>{% else %} {{ m.content }}</s>{% endif %}"
        "{% endgeneration %}{% endif %}{% endfor %}",
        "</s>",
    ),
    "mistral v7": (
        "{{ bos_token }}{% for m in messages %}{% if m.role == 'system' %}[SYSTEM_PROMPT]{{ m.content }}"
        "[/SYSTEM_PROMPT]{% elif m.role == 'user' %}[INST]{{ m.content }}[/INST]{% elif m.role == 'assistant' %}"
        "{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}{% endif %}{% endfor %}",
        "</s>",
    ),
    "phi 4": (
        _TURN + "<|im_start|>assistant<|im_sep|>{% generation %}{{ m.content }}<|im_end|>{% endgeneration %}{% else %}"
        "<|im_start|>{{ m.role }}<|im_sep|>{{ m.content }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant<|im_sep|>{% endif %}",
        "<|im_end|>",
    ),
    "olmo 2": (  # an EOS after every answer, a line break only between turns
        "{{ bos_token }}" + _TURN + "<|assistant|>\n{% generation %}{{ m.content }}{{ eos_token }}{% endgeneration %}"
        "{% if not loop.last %}{{ '\n' }}{% endif %}{% else %}<|{{ m.role }}|>\n{{ m.content + '\n' }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>\n{% endif %}",
        "<|endoftext|>",
    ),
    "granite": (
        _TURN + "<|start_of_role|>assistant<|end_of_role|>{% generation %}{{ m.content }}<|end_of_text|>"
        "{% endgeneration %}{{ '\n' }}{% else %}<|start_of_role|>{{ m.role }}<|end_of_role|>{{ m.content }}"
        "<|end_of_text|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|start_of_role|>assistant"
        "<|end_of_role|>{% endif %}",
        "<|end_of_text|>",
    ),
    "smollm 3": (  # reasoning only in the last turn; `enable_thinking` opens and closes it in the generation prompt
        _TURN + "<|im_start|>assistant\n{% generation %}{% if loop.last %}<think>\n\n</think>\n{% endif %}"
        "{{ m.content }}<|im_end|>{% endgeneration %}{{ '\n' }}{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}"
        "<|im_end|>\n{% endif %}{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}",
        "<|im_end|>",
    ),
    "glm 4": (  # the start of the next turn ends a turn
        "[gMASK]<sop>"
        + _TURN
        + "<|assistant|>{% generation %}{{ '\n' + m.content }}{% if loop.last %}<|user|>{% else %}"
        "<|{{ messages[loop.index0 + 1].role }}|>{% endif %}{% endgeneration %}{% else %}{% if loop.first or "
        "messages[loop.index0 - 1].role != 'assistant' %}<|{{ m.role }}|>{% endif %}{{ '\n' + m.content }}{% endif %}"
        "{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
        "<|endoftext|>",
    ),
}
# Its own template writes the token with the next turn, and not at the end.
_GLM4 = (
    "[gMASK]<sop>{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


@pytest.mark.parametrize("name", MARKED)
def test_masks_are_those_of_hand_marked_templates(name: str) -> None:
    template, eos = MARKED[name]
    marked = make_tokenizer(template + "<|user|><|system|>", eos)
    marked.chat_template = template
    plain = make_tokenizer(template + "<|user|><|system|>", eos)
    plain.chat_template = _GLM4 if name == "glm 4" else re.sub(r"\{% (end)?generation %\}", "", template)
    for case, messages in CASES.items():
        tools = tools_of(case)
        if "reasoning" in case or (tools and "tool_calls" not in template):
            continue
        oracle = marked.apply_chat_template(messages, tools=tools, return_dict=True, return_assistant_tokens_mask=True)
        ids, mask = encode(plain, messages, tools)
        assert ids == oracle["input_ids"], case
        assert mask == [bool(flag) for flag in oracle["assistant_masks"]], case


# -- tool calls, reasoning and what templates leave out --------------------------------------------------------------


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3_6", "deepseekv3", "glm4moe", "gptoss"])
def test_tool_calls_of_datasets_are_rendered_like_those_of_the_documentation(name: str) -> None:
    """Arguments as JSON text, calls as JSON text, calls without a type, and None where Arrow has no value."""
    tokenizer, _ = peer(name)
    wanted = encode(tokenizer, CASES["tools"], TOOLS)
    plain = call(a=2)[0]["function"]
    variants = {
        "arguments as text": [{**call()[0], "function": {**plain, "arguments": '{"a": 2}'}}],
        "calls as text": json.dumps(call(a=2)),
        "flat": [{**plain, "id": "call00001"}],
        "filled by Arrow": [{**call(a=2, b=None)[0], "index": None}],
        "no type": [{"id": "call00001", "function": plain}],
    }
    for form, calls in variants.items():
        messages = copy.deepcopy(CASES["tools"])
        messages[1] = answer("", tool_calls=calls, name=None)
        assert encode(tokenizer, messages, TOOLS) == wanted, form
    broken = [user("2?"), answer("", tool_calls="add(2)")]
    with pytest.raises(DataError, match="tool_calls as JSON"):
        encode(tokenizer, broken, TOOLS)


def test_calls_that_a_template_leaves_out_are_an_error() -> None:
    tokenizer, _ = peer("gptoss")  # renders the first call of a message alone
    twice = [user("2?"), answer("", tool_calls=[*call(a=2), *call(a=3)]), RESULT, answer("4")]
    with pytest.raises(DataError, match="received 'one that leaves some out'"):
        encode(tokenizer, twice, TOOLS)


def test_what_a_template_leaves_out_is_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    def warnings(name: str, messages: Any, tools: Any = None) -> str:
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="trainformer"):
            encode(peer(name)[0], messages, tools)
        return caplog.text

    assert "the reasoning of the last turn" in warnings("deepseek_r1_distill", CASES["reasoning in the content"])
    assert "the reasoning of earlier turns" in warnings("qwen3", CASES["reasoning"])
    assert "the reasoning of the last turn" not in warnings("qwen3", CASES["reasoning"])
    assert "role 'tool'" in warnings("phi3", [user("2?"), answer("let me see"), RESULT, answer("done")])
    assert "does not render the tools" in warnings("deepseekv3", CASES["tools"], TOOLS)
    for name in ("llama3", "glm4moe", "gptoss", "cohere2"):
        assert warnings(name, CASES["system"]) == ""
    endless = make_tokenizer("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}", "<eos>")
    with caplog.at_level(logging.WARNING, logger="trainformer"):
        encode(endless, CASES["plain"])
    assert "no end-of-turn token" in caplog.text


def test_options_of_a_record_reach_the_template() -> None:
    tokenizer, _ = peer("glm4moe")
    record = {"messages": CASES["plain"], "chat_template_kwargs": {"enable_thinking": False}}
    (piece,) = Encoder(tokenizer, max_length=None).encode(record)
    assert "who sat?/nothink" in tokenizer.decode(piece.input_ids)
    assert "/nothink" not in tokenizer.decode(encode(tokenizer, CASES["plain"])[0])
    with pytest.raises(DataError, match=r"options of the chat template.*received \['add_generation_prompt'\]"):
        Encoder(tokenizer, max_length=None).encode({**record, "chat_template_kwargs": {"add_generation_prompt": True}})
