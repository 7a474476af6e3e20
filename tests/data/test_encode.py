"""Encoding records as tokens and labels, checked against `apply_chat_template`'s masks, TRL and manual annotation."""

from __future__ import annotations

import pickle
from itertools import chain
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

tokenizers = pytest.importorskip("tokenizers")
transformers = pytest.importorskip("transformers")

from trainformer.core import BadArgument, DataError  # noqa: E402
from trainformer.data.text.encode import IGNORE_INDEX, Encoded, Encoder, EncodingReport  # noqa: E402

SPECIAL = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<|eot|>", "<think>", "</think>", "[INST]", "[/INST]"]
WORDS = "the cat sat on the mat and answered every question that it was asked, one two three; print(x) == 42 \n\n"

CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
LLAMA3 = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}<|im_end|>\n\n"
    "{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] | trim }}<|eot|>{% endgeneration %}"
    "{% else %}{{ m['content'] | trim }}<|eot|>{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant<|im_end|>\n\n{% endif %}"
)
LLAMA2 = (
    "{% for m in messages %}{% if m['role'] == 'user' %}{{ bos_token }}[INST] {{ m['content'] }} [/INST]"
    "{% elif m['role'] == 'assistant' %}{% generation %} {{ m['content'] }} </s>{% endgeneration %}"
    "{% else %}{{ raise_exception('no system turns') }}{% endif %}{% endfor %}"
)
# As reasoning models do it: the thoughts of all but the last answer are dropped, and the last always has some.
THINKING = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{% set answer = m['content'].split('</think>')[-1].lstrip('\n') %}"
    "{% set thought = m['content'].split('</think>')[0].split('<think>')[-1] if '</think>' in m['content'] else '' %}"
    "{% if loop.last %}<think>{{ thought }}</think>\n\n{% endif %}{{ answer }}"
    "{% else %}{{ m['content'] }}{% endif %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
# As Mistral does it: the system's message is put into the last of the user's.
SYSTEM_LAST = (
    "{% set users = messages | selectattr('role', 'equalto', 'user') | list %}"
    "{% for m in messages %}{% if m['role'] == 'user' %}[INST] "
    "{% if m == users[-1] and messages[0]['role'] == 'system' %}{{ messages[0]['content'] }}\n\n{% endif %}"
    "{{ m['content'] }}[/INST]{% elif m['role'] == 'assistant' %} {{ m['content'] }}</s>{% endif %}{% endfor %}"
)
NO_END = "{% for m in messages %}### {{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"
NO_END += "{% if add_generation_prompt %}### assistant: {% endif %}"
END_ONCE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% else %}{{ eos_token }}{% endif %}"
)


def unmarked(template: str) -> str:
    return template.replace("{% generation %}", "").replace("{% endgeneration %}", "")


def make_tokenizer(template: str | None = None, adds: str = "", **options: Any) -> Any:
    """A byte-level BPE. `adds` is what it puts around a text: "<s> $A", for instance."""
    model = tokenizers.Tokenizer(tokenizers.models.BPE())
    model.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    model.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=400,
        special_tokens=SPECIAL,
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    model.train_from_iterator([WORDS] * 20, trainer)
    if adds:
        known = [(token, SPECIAL.index(token)) for token in SPECIAL if token in adds]
        model.post_processor = tokenizers.processors.TemplateProcessing(single=adds, special_tokens=known)
    names = {"bos_token": "<s>", "eos_token": "</s>", **options}
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=model, **names)
    tokenizer.chat_template = template
    return tokenizer


def encode(tokenizer: Any, record: Any, **options: Any) -> Encoded:
    (piece,) = Encoder(tokenizer, **{"max_length": None, **options}).encode(record)
    assert piece.input_ids.dtype == piece.labels.dtype == np.int32
    kept = piece.labels != IGNORE_INDEX
    assert (piece.labels[kept] == piece.input_ids[kept]).all()
    return piece


def trained(tokenizer: Any, piece: Encoded) -> str:
    return tokenizer.decode(piece.labels[piece.labels != IGNORE_INDEX])


def whole(tokenizer: Any, piece: Encoded) -> str:
    return tokenizer.decode(piece.input_ids)


def chat(*contents: str, system: str | None = None) -> dict[str, Any]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": content} for i, content in enumerate(contents)]
    return {"messages": [*([{"role": "system", "content": system}] if system else []), *turns]}


contents = st.text(st.characters(codec="utf-8", exclude_characters="<["), max_size=30)
# A line break before an answer that begins with one becomes a token with it; then more than the answer is trained on.
answers = contents.filter(lambda text: text[:1].strip() == text[:1])
conversations = st.lists(st.tuples(contents, answers), min_size=1, max_size=4).map(
    lambda turns: chat(*(content for turn in turns for content in turn))
)
quick = settings(max_examples=40, deadline=None)

# -- conversations -----------------------------------------------------------------------------------------


def test_chatml_mask_matches_a_manual_annotation() -> None:
    tokenizer = make_tokenizer(unmarked(CHATML))
    turns = [
        (
            "<|im_start|>system\nbe brief<|im_end|>\n<|im_start|>user\nwho sat?<|im_end|>\n<|im_start|>assistant\n",
            False,
        ),
        ("the cat<|im_end|>", True),
        ("\n<|im_start|>user\nwhere?<|im_end|>\n<|im_start|>assistant\n", False),
        ("on the mat, on the mat<|im_end|>", True),
        ("\n", False),
    ]
    ids = [tokenizer(text, add_special_tokens=False)["input_ids"] for text, _ in turns]
    labels = [part if wanted else [IGNORE_INDEX] * len(part) for part, (_, wanted) in zip(ids, turns, strict=True)]
    piece = encode(tokenizer, chat("who sat?", "the cat", "where?", "on the mat, on the mat", system="be brief"))
    assert piece.input_ids.tolist() == [*chain(*ids)]
    assert piece.labels.tolist() == [*chain(*labels)]


@quick
@given(conversations)
def test_only_answers_and_end_of_turn_tokens_are_trained(conversation: dict[str, Any]) -> None:
    tokenizer = TOKENIZERS["chatml"]
    piece = encode(tokenizer, conversation)
    replies = [m["content"] for m in conversation["messages"] if m["role"] == "assistant"]
    assert trained(tokenizer, piece) == "".join(reply + "<|im_end|>" for reply in replies)


@pytest.mark.parametrize("name", ["chatml", "llama3", "llama2"])
def test_boundaries_match_the_generation_markers(name: str) -> None:
    """The mask of `apply_chat_template` over the marked template is the oracle for the one without markers."""
    plain, marked = TOKENIZERS[name], TOKENIZERS[f"{name} marked"]

    @quick
    @given(conversations)
    def check(conversation: dict[str, Any]) -> None:
        oracle = marked.apply_chat_template(
            conversation["messages"], return_dict=True, return_assistant_tokens_mask=True, tokenize=True
        )
        for tokenizer in (plain, marked):
            piece = encode(tokenizer, conversation)
            assert piece.input_ids.tolist() == oracle["input_ids"]
            assert (piece.labels != IGNORE_INDEX).astype(int).tolist() == oracle["assistant_masks"]

    check()


@pytest.mark.parametrize("adds", ["", "<s> $A", "<s> $A </s>"])
def test_a_conversation_has_the_bos_of_its_template_and_no_other(adds: str) -> None:
    piece = encode(make_tokenizer(unmarked(LLAMA3), adds), chat("who sat?", "the cat"))
    assert (piece.input_ids == 0).sum() == 1
    assert piece.input_ids[0] == 0


def test_templates_that_drop_reasoning_are_supported() -> None:
    tokenizer = make_tokenizer(THINKING)
    first, last = "<think>cats sit</think>\n\nthe cat", "<think>mats lie</think>\n\non the mat"
    piece = encode(tokenizer, chat("who sat?", first, "where?", last))
    assert "cats sit" not in whole(tokenizer, piece)
    assert trained(tokenizer, piece) == "the cat<|im_end|><think>mats lie</think>\n\non the mat<|im_end|>"
    # The template opens and closes thoughts also where there are none: the model has to write that itself.
    piece = encode(tokenizer, chat("who sat?", "the cat"))
    assert trained(tokenizer, piece) == "<think></think>\n\nthe cat<|im_end|>"


def test_templates_that_move_the_system_message_are_supported() -> None:
    tokenizer = make_tokenizer(SYSTEM_LAST)
    piece = encode(tokenizer, chat("who sat?", "the cat", "where?", "on the mat", system="be brief"))
    assert whole(tokenizer, piece).index("be brief") > whole(tokenizer, piece).index("who sat?")
    assert trained(tokenizer, piece) == " the cat</s> on the mat</s>"


def test_templates_without_an_end_of_turn() -> None:
    tokenizer = make_tokenizer(NO_END)
    # " the" is a token and " yes" is none, so that the space before it belongs to the header.
    assert trained(tokenizer, encode(tokenizer, chat("who?", "the cat", "sure?", "yes"))) == " the cat\nyes\n"
    # An EOS that ends the conversation ends no turn in its middle, and the next turn's first token does not either.
    tokenizer = make_tokenizer(END_ONCE)
    assert trained(tokenizer, encode(tokenizer, chat("who?", "the cat", "sure?", "yes"))) == "the catyes</s>"
    # What the template writes before an answer, and not into the generation prompt, the model has to write.
    thought = "{% if m['role'] == 'assistant' %}<think></think>{% endif %}"
    opened = END_ONCE.replace("{{ m['content'] }}", thought + "{{ m['content'] }}")
    tokenizer = make_tokenizer(opened)
    text = trained(tokenizer, encode(tokenizer, chat("who?", "the cat", "sure?", "yes")))
    assert text == "<think></think>the cat<think></think>yes</s>"


def test_a_turn_that_cannot_be_found_is_an_error() -> None:
    scrambled = (
        "{% for m in messages %}{{ m['role'] }} {% if loop.last %}{{ m['content'] | upper }}"
        "{% else %}{{ m['content'] | length }}{% endif %}<|im_end|>{% endfor %}"
    )
    with pytest.raises(DataError, match=r"Record 0: .*message 2 .*\{% generation %\}"):
        encode(make_tokenizer(scrambled), chat("who?", "the cat", "sure?", "yes"))
    assert len(encode(make_tokenizer(scrambled), chat("who?", "the cat"), train_on="all").labels)


def test_an_eos_after_the_markers_is_trained() -> None:
    template = CHATML.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}</s>")
    tokenizer = make_tokenizer(template)
    assert trained(tokenizer, encode(tokenizer, chat("who?", "the cat", "sure?", "yes"))) == "the cat</s>yes</s>"


@pytest.mark.parametrize("template", [CHATML, unmarked(CHATML)], ids=["marked", "unmarked"])
def test_what_to_train_on(template: str) -> None:
    tokenizer = make_tokenizer(template)
    record = chat("who?", "the cat", "where?", "on the mat")
    assert trained(tokenizer, encode(tokenizer, record, train_on="completion")) == "on the mat<|im_end|>"
    assert trained(tokenizer, encode(tokenizer, record, train_on="assistant")).count("<|im_end|>") == 2
    everything = encode(tokenizer, record, train_on="all")
    assert (everything.labels == everything.input_ids).all()
    pair = {"prompt": record["messages"][:3], "completion": record["messages"][3:]}
    assert trained(tokenizer, encode(tokenizer, pair)) == "on the mat<|im_end|>"
    assert whole(tokenizer, encode(tokenizer, pair)) == whole(tokenizer, everything)


@pytest.mark.parametrize("template", [CHATML, unmarked(CHATML)], ids=["marked", "unmarked"])
def test_messages_of_weight_0_are_not_trained_on(template: str) -> None:
    """As in OpenAI's format for fine-tuning."""
    tokenizer = make_tokenizer(template)
    record = chat("who?", "the cat", "sure?", "no", "where?", "on the mat")
    for weights, wanted in {(0, 1, None): "no<|im_end|>on the mat<|im_end|>", (1, 0, 0): "the cat<|im_end|>"}.items():
        for message, weight in zip(record["messages"][1::2], weights, strict=True):
            message["weight"] = weight
        assert trained(tokenizer, encode(tokenizer, record)) == wanted
    record["messages"][1]["weight"] = 0.5
    with pytest.raises(DataError, match="the weight of a message to be 0"):
        encode(tokenizer, record)


def test_tools_options_and_empty_columns_reach_the_template() -> None:
    template = (
        "{% for tool in tools or [] %}tool {{ tool['name'] }}{% endfor %}{{ style }}{% for m in messages %}"
        "{{ m['role'] }}: {% if 'tool_calls' in m %}call {{ m['tool_calls'][0] }}{% else %}{{ m['content'] }}"
        "{% endif %}"
        "<|im_end|>{% endfor %}{% if add_generation_prompt %}assistant: {% endif %}"
    )
    tokenizer = make_tokenizer(template)
    messages = [
        {"role": "user", "content": "who?", "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": ["look"]},
        {"role": "tool", "content": "cat", "tool_calls": None},
        {"role": "assistant", "content": "the cat", "tool_calls": None},
    ]
    record = {"messages": messages, "tools": '[{"name": "eye"}]', "chat_template_kwargs": {"style": "calm "}}
    piece = encode(tokenizer, record)
    assert whole(tokenizer, piece).startswith("tool eyecalm user: who?<|im_end|>")
    assert trained(tokenizer, piece) == "call look<|im_end|> the cat<|im_end|>"


def test_conversations_that_cannot_be_rendered() -> None:
    with pytest.raises(BadArgument, match=r"tokenizer with a chat template.*set tokenizer.chat_template"):
        encode(make_tokenizer(), chat("who?", "the cat"))
    with pytest.raises(DataError, match="no system turns"):
        encode(make_tokenizer(LLAMA2), chat("who?", "the cat", system="be brief"))
    with pytest.raises(DataError, match="no system turns"):
        encode(make_tokenizer(unmarked(LLAMA2)), chat("who?", "the cat", system="be brief"))
    with pytest.raises(DataError, match="Expected 'messages' to be a list of"):
        encode(make_tokenizer(CHATML), {"messages": ["who?"]})


def test_a_tokenizer_without_offsets_finds_the_same_boundaries() -> None:
    tokenizer = transformers.ByT5Tokenizer()
    assert not tokenizer.is_fast
    tokenizer.chat_template = unmarked(CHATML).replace("<|im_end|>", "</s>").replace("<|im_start|>", "# ")
    piece = encode(tokenizer, chat("who?", "the cat", "sûr?", "ja, née"))
    assert trained(tokenizer, piece) == "the cat</s>ja, née</s>"
    piece = encode(tokenizer, {"prompt": "who?", "completion": " the cat"})
    assert trained(tokenizer, piece) == " the cat</s>"  # ByT5 puts the EOS there itself


# -- prompts and completions -------------------------------------------------------------------------------


@quick
@given(contents, contents)
def test_the_completion_and_the_eos_are_trained(prompt: str, completion: str) -> None:
    tokenizer = TOKENIZERS["bos"]
    piece = encode(tokenizer, {"prompt": prompt, "completion": completion})
    assert piece.input_ids.tolist() == [*tokenizer(prompt + completion)["input_ids"], tokenizer.eos_token_id]
    assert piece.input_ids[0] == tokenizer.bos_token_id
    assert piece.labels[0] == IGNORE_INDEX
    # A token over the border brings the end of the prompt along: an independent count of the characters that remain.
    labels = piece.labels[piece.labels != IGNORE_INDEX]
    untrained = tokenizer.decode(piece.input_ids[1 : len(piece.labels) - len(labels)])
    assert tokenizer.decode(labels).endswith(completion + "</s>") or "�" in tokenizer.decode(labels)
    assert prompt.startswith(untrained) or "�" in untrained


def test_a_token_across_the_boundary_belongs_to_the_completion() -> None:
    tokenizer = make_tokenizer()
    assert (
        trained(tokenizer, encode(tokenizer, {"prompt": "who sat", "completion": " on the mat"})) == " on the mat</s>"
    )
    # " the" is one token.
    assert trained(tokenizer, encode(tokenizer, {"prompt": "who sat ", "completion": "the mat"})) == " the mat</s>"


@pytest.mark.parametrize("adds", ["", "<s> $A", "$A </s>", "<s> $A </s>"])
@pytest.mark.parametrize("completion", [" the cat", ""])
def test_the_eos_occurs_once_and_is_trained(adds: str, completion: str) -> None:
    tokenizer = make_tokenizer(adds=adds)
    piece = encode(tokenizer, {"prompt": "who sat?", "completion": completion})
    assert trained(tokenizer, piece) == completion + "</s>"
    assert whole(tokenizer, piece) == ("<s>" if "<s>" in adds else "") + "who sat?" + completion + "</s>"
    assert trained(tokenizer, encode(tokenizer, {"prompt": "", "completion": " the"})) == " the</s>"
    own = encode(tokenizer, {"prompt": "who sat?", "completion": completion + "</s>"})
    assert own.input_ids.tolist().count(tokenizer.eos_token_id) == 1 + ("$A </s>" in adds)


def test_alpaca_and_prompt_templates() -> None:
    tokenizer = make_tokenizer()
    record = {"instruction": "who sat?", "input": "the mat", "output": "the cat"}
    piece = encode(tokenizer, record)
    assert whole(tokenizer, piece).endswith("### Input:\nthe mat\n\n### Response:\nthe cat</s>")
    assert trained(tokenizer, piece) == "the cat</s>"
    assert "### Input" not in whole(tokenizer, encode(tokenizer, {**record, "input": ""}))
    assert "### Input" not in whole(tokenizer, encode(tokenizer, {"instruction": "who?", "output": "the cat"}))
    piece = encode(tokenizer, record, prompt_template="Q: {instruction} ({input})\nA:")
    assert whole(tokenizer, piece) == "Q: who sat? (the mat)\nA:the cat</s>"
    piece = encode(tokenizer, {"prompt": "who {x}?", "completion": " it"}, prompt_template="Q: {prompt} A:")
    assert whole(tokenizer, piece) == "Q: who {x}? A: it</s>"
    with pytest.raises(BadArgument, match="prompt_template to name fields of the record"):
        encode(tokenizer, record, prompt_template="{question}")


def test_a_system_prompt_stands_before_a_text() -> None:
    tokenizer = make_tokenizer()
    record = {"prompt": "who?", "completion": " the cat", "system": "be brief"}
    piece = encode(tokenizer, record)
    assert whole(tokenizer, piece) == "be brief\n\nwho? the cat</s>"
    assert trained(tokenizer, piece) == " the cat</s>"
    piece = encode(tokenizer, record, prompt_template="[{system}] {prompt}")
    assert whole(tokenizer, piece) == "[be brief] who? the cat</s>"
    assert whole(tokenizer, encode(tokenizer, record, prompt_template="Q: {prompt}")).startswith("be brief\n\nQ: who?")
    piece = encode(tokenizer, {"instruction": "who?", "output": "the cat", "system": "be brief"})
    assert whole(tokenizer, piece).startswith("be brief\n\nBelow is an instruction")
    chats = {
        "prompt": chat("who?")["messages"],
        "completion": chat("", "the cat")["messages"][1:],
        "system": "be brief",
    }
    piece = encode(TOKENIZERS["chatml"], chats)
    assert whole(TOKENIZERS["chatml"], piece).startswith("<|im_start|>system\nbe brief<|im_end|>")
    assert trained(TOKENIZERS["chatml"], piece) == "the cat<|im_end|>"
    for field, value in {"tools": [{"name": "eye"}], "chat_template_kwargs": {"style": "calm"}}.items():
        with pytest.raises(DataError, match=rf"Record 0: Expected a conversation as messages with '{field}'"):
            encode(tokenizer, {**record, field: value})
        piece = encode(tokenizer, {**record, field: value}, prompt_template=f"{{{field}}} {{prompt}}")
        assert str(value) in whole(tokenizer, piece)


# -- texts and tokens --------------------------------------------------------------------------------------


def test_a_text_has_one_bos_and_one_eos() -> None:
    for adds, text in [("<s> $A", "the cat"), ("<s> $A", "<s>the cat"), ("<s> $A </s>", "the cat"), ("", "<s>the cat")]:
        tokenizer = make_tokenizer(adds=adds)
        piece = encode(tokenizer, {"text": text})
        assert whole(tokenizer, piece) == "<s>the cat</s>"
        assert (piece.labels == piece.input_ids).all()
        assert whole(tokenizer, encode(tokenizer, text)) == "<s>the cat</s>"
    assert whole(tokenizer, encode(tokenizer, "the cat", add_eos=False)) == "the cat"
    pair = encode(make_tokenizer(adds="<s> $A"), {"prompt": "<s>who?", "completion": " it"})
    assert trained(tokenizer, pair) == " it</s>"
    assert (pair.input_ids == 0).sum() == 1


@quick
@given(st.lists(contents, min_size=1, max_size=5), st.integers(3, 12))
def test_splitting_loses_no_token(texts: list[str], limit: int) -> None:
    tokenizer, report = TOKENIZERS["bos"], EncodingReport()
    encoder = Encoder(tokenizer, max_length=limit)
    pieces = encoder.encode_all([{"text": text} for text in texts], report)
    for text, of_text in zip(texts, pieces, strict=True):
        expected = [*tokenizer(text)["input_ids"], tokenizer.eos_token_id] if text else []
        assert np.concatenate([[], *(piece.input_ids for piece in of_text)]).tolist() == expected
        assert all(2 <= len(piece.input_ids) <= limit for piece in of_text)
    flat = [piece for of_text in pieces for piece in of_text]
    assert report.records == len(texts)
    assert report.pieces == len(flat)
    assert report.tokens == sum(len(piece.input_ids) for piece in flat)
    assert report.supervised == report.tokens - report.pieces  # all but the first of each
    assert report.dropped == texts.count("")
    assert report.split == sum(len(of_text) > 1 for of_text in pieces)


def test_long_records_are_dropped_truncated_or_split_and_counted() -> None:
    tokenizer = make_tokenizer(unmarked(CHATML))
    long, short = chat("who?", "the cat sat on the mat " * 20), chat("who?", "the cat")
    size = len(encode(tokenizer, short).input_ids)
    unreachable = chat("who sat on the mat? " * 20, "the cat")
    for policy, pieces, counts in [
        ("auto", 2, {"truncated": 1, "dropped": 1}),
        ("truncate", 2, {"truncated": 1, "dropped": 1}),
        ("drop", 1, {"dropped": 2}),
    ]:
        report = EncodingReport()
        encoder = Encoder(tokenizer, max_length=size, truncation=policy)
        encoded = encoder.encode_all([long, short, unreachable], report)
        flat = [piece for of_record in encoded for piece in of_record]
        assert [report.pieces, len(flat)] == [pieces, pieces]
        assert {name: getattr(report, name) for name in counts} == counts
        assert all(len(piece.input_ids) == size for piece in flat)
        assert all(piece.supervised for piece in flat)
    assert report.reasons == {f"longer than {size} tokens": 2}
    report = EncodingReport()
    parts = Encoder(tokenizer, max_length=size, truncation="split").encode(long, report)
    assert sum(piece.supervised for piece in parts) > 80
    assert str(report).endswith(f"1 split (longer than {size} tokens: 1)")
    report = EncodingReport()
    assert Encoder(tokenizer, max_length=size).encode(unreachable, report) == []
    assert report.reasons == {f"nothing to train on in the first {size} tokens": 1}


def test_records_without_anything_to_train_on_are_counted_with_the_reason() -> None:
    report = EncodingReport()
    encoder = Encoder(make_tokenizer(CHATML), max_length=100, add_eos=False)
    unlabelled = {"input_ids": [1, 2], "labels": [-100, -100]}
    records = [chat("who?"), unlabelled, {"text": ""}, {"prompt": "who?", "completion": ""}]
    assert encoder.encode_all(records, report) == [[], [], [], []]
    assert (report.records, report.dropped, report.pieces) == (4, 4, 0)
    assert sum(report.reasons.values()) == 4
    assert any("no such turn" in reason for reason in report.reasons)
    other = EncodingReport(records=1, tokens=5, reasons={"all labels are -100": 2})
    report.add(other)
    assert (report.records, report.tokens, report.reasons["all labels are -100"]) == (5, 5, 3)


def test_tokens_stay_what_they_are() -> None:
    given_labels = encode_raw({"input_ids": np.array([5, 6, 7]), "labels": [-100, 9, 7]})
    assert given_labels.input_ids.tolist() == [5, 6, 7]
    assert given_labels.labels.tolist() == [-100, 9, 7]
    assert encode_raw({"input_ids": [5, 6, 7], "text": "ignored"}).labels.tolist() == [5, 6, 7]
    for record, message in [
        ({"input_ids": [5, -1]}, "input_ids from 0 on, received -1"),
        ({"input_ids": [[5]]}, r"list of integers, received 'int64 of shape \(1, 1\)'"),
        ({"input_ids": [5.5]}, "list of integers"),
        ({"input_ids": [5, 6], "labels": [5]}, r"as many labels as input_ids \(2\), received 1"),
    ]:
        with pytest.raises(DataError, match=message):
            encode_raw(record)
    tokenizer = make_tokenizer()
    with pytest.raises(DataError, match=f"below {len(tokenizer)}, the size of the vocabulary"):
        encode(tokenizer, {"input_ids": [5, len(tokenizer)]})
    with pytest.raises(BadArgument, match="a tokenizer for data that is not tokenised"):
        encode_raw({"prompt": "who?", "completion": "it"})


def encode_raw(record: dict[str, Any]) -> Encoded:
    (piece,) = Encoder(None, max_length=None).encode(record)
    return piece


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"train_on": "asistant"}, "train_on to be one of .*Did you mean 'assistant'"),
        ({"truncation": "cut"}, "truncation to be one of"),
        ({"max_length": 1}, "max_length to be None or at least 2, received 1"),
    ],
)
def test_bad_settings(options: dict[str, Any], message: str) -> None:
    with pytest.raises(BadArgument, match=message):
        Encoder(None, **{"max_length": 8, **options})


def test_an_encoder_can_be_sent_to_another_process() -> None:
    encoder = Encoder(make_tokenizer(unmarked(CHATML)), max_length=64)
    copy = pickle.loads(pickle.dumps(encoder))
    assert copy.fingerprint() == encoder.fingerprint()
    for record in (chat("who?", "the cat"), {"prompt": "who?", "completion": " it"}, "the cat"):
        assert copy.encode(record)[0].labels.tolist() == encoder.encode(record)[0].labels.tolist()


def test_bad_records() -> None:
    tokenizer = make_tokenizer()
    for record, message in [
        ({"prompt": "who?"}, r"a known schema .* received \['prompt'\]"),
        (17, "received 'int'"),
        ({"text": 17}, "'text' to be a string, received 'int'"),
        ({"prompt": ["who?"], "completion": "it"}, "two texts or two lists of messages"),
    ]:
        with pytest.raises(DataError, match=message):
            encode(tokenizer, record)
    for record in ({"text": "the cat"}, {"input_ids": [1, 2]}):
        with pytest.raises(DataError, match="train_on='completion'"):
            encode(tokenizer, record, train_on="completion")
    with pytest.raises(BadArgument, match=r"tokenizer with an EOS token.*add_eos=False"):
        encode(make_tokenizer(eos_token=None), "the cat")
    encoder = Encoder(tokenizer, max_length=8)
    with pytest.raises(DataError, match="Record 12: "):
        encoder.encode_all(["fine", {}], first=11)
    with pytest.raises(DataError, match="line 24: "):
        encoder.encode_all(["fine", {}], first=11, where=lambda number: f"line {2 * number}")
    for record in ("half \ud83d", {"prompt": "half \ud83d", "completion": "it"}):
        with pytest.raises(DataError, match=r"Record 1: Expected valid Unicode text.*errors='ignore'"):
            encoder.encode_all(["fine", record])


def test_tokenizer_errors_keep_their_type_and_get_a_location() -> None:
    tokenizer = make_tokenizer()
    encoder = Encoder(tokenizer, max_length=8)
    tokenizer._tokenizer = None
    with pytest.raises(AttributeError) as caught:
        encoder.encode({"prompt": "who?", "completion": "it"})
    assert caught.value.__notes__ == ["(while tokenising Record 0)"]


def test_the_fingerprint_depends_on_exactly_what_matters() -> None:
    def fingerprint(template: str = CHATML, adds: str = "", eos: str = "</s>", **options: Any) -> str:
        tokenizer = make_tokenizer(template, adds, eos_token=eos)
        return Encoder(tokenizer, **{"max_length": 8, **options}).fingerprint()

    variants = [
        fingerprint(),
        fingerprint(LLAMA3),
        fingerprint(adds="<s> $A"),
        fingerprint(eos="<|eot|>"),
        fingerprint(max_length=9),
        fingerprint(train_on="all"),
        fingerprint(truncation="drop"),
        fingerprint(add_eos=False),
        fingerprint(prompt_template="{prompt}"),
        Encoder(None, max_length=8).fingerprint(),
        Encoder(transformers.ByT5Tokenizer(), max_length=8).fingerprint(),
    ]
    assert len(set(variants)) == len(variants)
    tokenizer = make_tokenizer(CHATML, pad_token="</s>")
    before = Encoder(tokenizer, max_length=8).fingerprint()
    tokenizer(["the cat", "the"], padding=True, truncation=True, max_length=2)  # leaves its mark on the tokenizer
    assert Encoder(tokenizer, max_length=8).fingerprint() == before


# -- TRL ---------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_labels_are_those_of_trl(tmp_path: Any) -> None:
    trl, datasets = pytest.importorskip("trl"), pytest.importorskip("datasets")
    config = transformers.LlamaConfig(
        vocab_size=400, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1
    )
    chats = [chat("who sat?", "the cat"), chat("one", "two", "three", "", "x", "print(x)"), chat("a", "the cat " * 40)]
    pairs = [{"prompt": "who sat?", "completion": " the cat"}, {"prompt": "who sat ", "completion": "the mat " * 40}]
    texts = [{"text": "the cat sat on the mat"}, {"text": "one two three"}]
    for records, options in [(chats, {"assistant_only_loss": True}), (pairs, {}), (texts, {})]:
        tokenizer = make_tokenizer(CHATML, "<s> $A", pad_token="</s>")
        trainer = trl.SFTTrainer(
            transformers.LlamaForCausalLM(config),
            args=trl.SFTConfig(str(tmp_path), max_length=64, report_to=[], use_cpu=True, **options),
            train_dataset=datasets.Dataset.from_list(records),
            processing_class=tokenizer,
        )
        encoder = Encoder(tokenizer, max_length=64, truncation="truncate")
        pieces = [piece for of_record in encoder.encode_all(records) for piece in of_record]
        theirs = list(trainer.train_dataset)
        assert [piece.input_ids.tolist() for piece in pieces] == [row["input_ids"] for row in theirs]
        assert [piece.labels.tolist() for piece in pieces] == [row["labels"] for row in theirs]


TOKENIZERS = {
    "chatml": make_tokenizer(unmarked(CHATML)),
    "chatml marked": make_tokenizer(CHATML),
    "llama3": make_tokenizer(unmarked(LLAMA3), "<s> $A"),
    "llama3 marked": make_tokenizer(LLAMA3, "<s> $A"),
    "llama2": make_tokenizer(unmarked(LLAMA2), "<s> $A"),
    "llama2 marked": make_tokenizer(LLAMA2, "<s> $A"),
    "bos": make_tokenizer(adds="<s> $A"),
}


def test_marked_spans_that_end_in_a_space_do_not_extend():
    words = {"[UNK]": 0, "you": 1, "said": 2, "me": 3}
    plain = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="[UNK]"))
    plain.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=plain, unk_token="[UNK]", eos_token="[UNK]")
    tokenizer.chat_template = (
        "{% for m in messages %}{% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }} "
        "{% endgeneration %}{% else %}{{ m['content'] }} {% endif %}{% endfor %}"
    )
    said = [("user", "you"), ("assistant", "said me"), ("user", "you you"), ("assistant", "me")]
    messages = [{"role": role, "content": text} for role, text in said]
    ours = Encoder(tokenizer, max_length=None).encode({"messages": messages})[0].labels.tolist()
    assert ours == [-100, 2, 3, -100, -100, 3]
    # The library's own mask is the control: if it is right one day, the detour can go.
    theirs = tokenizer.apply_chat_template(messages, return_dict=True, return_assistant_tokens_mask=True)
    assert theirs["assistant_masks"] == [0, 1, 1, 1, 1, 1]
