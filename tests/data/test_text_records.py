"""Documents, records and conversations: the same as reading the file whole; errors name the location."""

from __future__ import annotations

import ast
import csv
import gzip
import json
import logging
import pickle
import sysconfig
import tokenize
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader, IterableDataset, Subset

from trainformer.core import BadArgument, DataError
from trainformer.data import extract_info, split_dataset
from trainformer.data.fetcher import is_in_memory
from trainformer.data.text import (
    SCHEMAS,
    ChatDataset,
    JSONLDataset,
    StandardRecords,
    TextDataset,
    TextFileDataset,
    corpus_names,
    detect_schema,
    load_corpus,
    load_text,
    tables,
)

RECORDS = [{"text": f"text {i} \u2028 é", "label": i % 3, "id": i} for i in range(20)]
MESSAGES = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello"}]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRAINFORMER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def hf_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    datasets = pytest.importorskip("datasets")
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "hf")
    datasets.disable_progress_bars()
    return datasets


def write_lines(path: Path, records: list[Any]) -> Path:
    path.write_text("".join(json.dumps(record, ensure_ascii=False) + "\n" for record in records), encoding="utf-8")
    return path


def write(path: Path, records: list[dict[str, Any]]) -> Path:
    if path.suffix == ".jsonl":
        return write_lines(path, records)
    if path.suffix == ".json":
        path.write_text(json.dumps(records))
    elif path.suffix in (".csv", ".tsv"):
        with open(path, "w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(records[0]), delimiter="\t" if path.suffix == ".tsv" else ",")
            writer.writeheader()
            writer.writerows(records)
    else:
        import pyarrow
        import pyarrow.parquet

        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(records), path)
    return path


# -- JSON Lines --------------------------------------------------------------------------------------------


def test_json_lines_as_in_the_plan(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", RECORDS)
    assert list(JSONLDataset(str(path))) == [{"text": record["text"]} for record in RECORDS]
    labelled = JSONLDataset(path, text_key="text", label_key="label")
    assert list(labelled) == [{"text": record["text"], "label": record["label"]} for record in RECORDS]
    assert labelled[-1] == labelled[19]
    assert (labelled.path, labelled.text_key, labelled.label_key) == (path, "text", "label")
    assert list(JSONLDataset(path, text_key=None)) == RECORDS
    assert list(JSONLDataset(path, label_key="stars")) == list(JSONLDataset(path))  # a label that is not there
    with pytest.raises(IndexError):
        labelled[20]


def test_json_of_every_shape_holds_the_same_records(tmp_path: Path) -> None:
    (tmp_path / "list.json").write_text(json.dumps(RECORDS, indent=1))
    (tmp_path / "wrapped.json").write_text(json.dumps({"version": "1", "data": RECORDS}, indent=1))
    (tmp_path / "one_line.json").write_text(json.dumps({"version": "1", "data": RECORDS}))
    write_lines(tmp_path / "lines.json", RECORDS)
    with gzip.open(tmp_path / "lines.jsonl.gz", "wt", encoding="utf-8") as file:
        file.writelines(json.dumps(record) + "\n\n" for record in RECORDS)
    in_memory = {}
    for name in ("list.json", "wrapped.json", "one_line.json", "lines.json", "lines.jsonl.gz"):
        data = JSONLDataset(tmp_path / name, text_key=None)
        assert list(data) == RECORDS
        assert [data[i] for i in range(len(data))] == [load_text(tmp_path / name)[i] for i in range(20)]
        in_memory[name] = is_in_memory(data)
    assert list(in_memory.values()) == [True, True, True, False, False]
    # One record that holds a list is not a list of records.
    write_lines(tmp_path / "chat.json", [{"messages": MESSAGES}])
    assert list(JSONLDataset(tmp_path / "chat.json", text_key=None)) == [{"messages": MESSAGES}]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ('{"text": "a"', r"one JSON object per line, received '\{\"text\": \"a\"' \(Expecting .* at column 13\)"),
        ("[1, 2]", r"a JSON object, received \[1, 2\]"),
        (json.dumps(["word"] * 9999), r"a JSON object, received \['word', .{,60}\.\.\.\]"),
        ('{"txt": "a", "id": 1}', r"the key 'text', received a record with: 'txt', 'id'. Did you mean 'txt'\?"),
        ('{"text": 5}', "a text in 'text', received 5"),
        ('{"text": null}', "a text in 'text', received None"),
    ],
)
def test_wrong_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "data.jsonl").write_text('{"text": "a"}\n\n' + line + "\n")
    data = JSONLDataset(tmp_path / "data.jsonl")
    assert data[0] == {"text": "a"}
    with pytest.raises(DataError, match=rf"data\.jsonl, line 3: Expected {message}"):
        data[1]


def test_json_that_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "a.jsonl").write_text(json.dumps(RECORDS, indent=1))
    with pytest.raises(DataError, match=r"a\.jsonl, line 1: .*A file that is one list must be called \.json"):
        JSONLDataset(tmp_path / "a.jsonl")[0]
    (tmp_path / "b.json").write_text('[{"text": "a"},\n{"text": }]')
    with pytest.raises(DataError, match=r"b\.json, line 2: Expected JSON"):
        JSONLDataset(tmp_path / "b.json")
    (tmp_path / "c.json").write_text('"text"')
    with pytest.raises(DataError, match="to contain a list of records, received str"):
        JSONLDataset(tmp_path / "c.json")
    (tmp_path / "d.json").write_text(json.dumps([{"text": "a"}, {"text": 1}]))
    with pytest.raises(DataError, match=r"d\.json, record 1: Expected a text"):
        JSONLDataset(tmp_path / "d.json")[1]
    (tmp_path / "e.jsonl").write_text("\n\n")
    with pytest.raises(DataError, match=r"at least one record in '.*e\.jsonl'"):
        JSONLDataset(tmp_path / "e.jsonl")
    monkeypatch.setattr(tables, "MAX_PARSED_BYTES", 10)
    with pytest.raises(DataError, match=r"at most 1 GB .*Convert it to JSON Lines"):
        JSONLDataset(tmp_path / "d.json")


# -- text files --------------------------------------------------------------------------------------------


def test_lines_of_a_text_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes("\ufeffGrüße \r\n\r\nund\n \nKüsse".encode())
    data = TextFileDataset(path)
    assert list(data) == ["Grüße ", "und", "Küsse"]
    assert data.location(2).endswith("a.txt, line 5")
    assert not hasattr(data, "in_memory")
    path.write_text("")
    for chunk_size in (None, 5):
        with pytest.raises(DataError, match="Expected some text"):
            TextFileDataset(path, chunk_size)


@settings(max_examples=50, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), min_size=1), size=st.integers(1, 9))
def test_chunks_hold_every_character_once(tmp_path_factory, text: str, size: int) -> None:
    path = tmp_path_factory.mktemp("chunks") / "a.txt"
    path.write_bytes(text.encode())
    expected = text.removeprefix("\ufeff")
    if expected:
        assert list(TextFileDataset(path, chunk_size=size)) == [
            expected[i : i + size] for i in range(0, len(expected), size)
        ]


def test_documents_of_files_and_folders(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "docs" / "sub").mkdir(parents=True)
    (tmp_path / "docs" / ".git").mkdir()
    for name, content in {
        "b.md": "B1\n\nB2\r\nB3\n",
        "a.txt": "A1\nA2",
        "sub/c.py": "c = 1\n",
        "empty.txt": "",
        ".hidden.txt": "no",
        ".git/x.txt": "no",
        "image.png": "no",
        "settings.json": "{}",
    }.items():
        (tmp_path / "docs" / name).write_bytes(content.encode())
    with caplog.at_level(logging.WARNING, logger="trainformer"):
        folder = TextDataset(tmp_path / "docs")
    assert [item["text"] for item in folder] == ["A1\nA2", "B1\n\nB2\nB3\n", "c = 1\n"]
    assert "ignoring its 1 files of records" in caplog.text
    lines = TextDataset(tmp_path / "docs", split="line")
    assert [item["text"] for item in lines] == ["A1", "A2", "B1", "B2", "B3", "c = 1"]
    paragraphs = TextDataset(tmp_path / "docs", split="paragraph")
    assert [item["text"] for item in paragraphs] == ["A1\nA2", "B1", "B2\nB3", "c = 1"]
    assert paragraphs.location(2).endswith("b.md, line 3")
    assert list(TextDataset(tmp_path / "docs" / "a.txt")) == [{"text": "A1\nA2"}]
    assert list(TextDataset(tmp_path / "docs" / "a.txt", split="document")) == [{"text": "A1\nA2"}]
    assert not is_in_memory(folder)
    (tmp_path / "docs" / "a.txt").write_bytes(b"fine\n\xff")
    with pytest.raises(DataError, match=r"a\.txt, line 2: Expected UTF-8"):
        TextDataset(tmp_path / "docs")[0]


def test_a_text_too_large_for_one_document(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "MAX_PARSED_BYTES", 10)
    (tmp_path / "a.txt").write_text("one line\nanother line")
    with pytest.raises(DataError, match="Pass split='line' or split='paragraph'"):
        TextDataset(tmp_path / "a.txt")
    assert len(TextDataset(tmp_path / "a.txt", split="line")) == 2


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "tsv", "parquet"])
@pytest.mark.parametrize("key", ["text", "Content", "document"])
def test_documents_of_tables(tmp_path: Path, hf_cache: Any, suffix: str, key: str) -> None:
    texts = ["one, 'two'", 'three "four"\n\nfive', "é\t;", "x" * 200_000]
    path = write(tmp_path / f"t.{suffix}", [{"title": "T", key: text, "id": 1} for text in texts])
    data = TextDataset(path)
    assert data.text_key == key
    assert [item["text"] for item in data] == texts
    assert [item["text"] for item in TextDataset(path, text_key="title")] == ["T"] * 4
    with pytest.raises(DataError, match=r"the key 'body', received a record with: 'title'"):
        TextDataset(path, text_key="body")


def test_documents_of_lists_iterables_and_hf(hf_cache: Any) -> None:
    texts = ["a", "b", "c"]
    assert [item["text"] for item in TextDataset(texts)] == texts
    assert [item["text"] for item in TextDataset(text for text in texts)] == texts
    assert [item["text"] for item in TextDataset({"text": text} for text in texts)] == texts
    table = hf_cache.Dataset.from_dict({"content": texts, "n": [1, 2, 3]})
    data = TextDataset(table)
    assert [item["text"] for item in data] == texts
    assert data.fingerprint == TextDataset(table).fingerprint != TextDataset(table.select([0, 1])).fingerprint
    assert [item["text"] for item in TextDataset(hf_cache.DatasetDict(train=table))] == texts
    splits = hf_cache.DatasetDict(train=table, test=table.select([1]))
    assert [item["text"] for item in TextDataset(splits, split="test")] == ["b"]
    with pytest.raises(DataError, match=r"one split, received \['train', 'test'\]"):
        TextDataset(splits)
    assert is_in_memory(TextDataset(texts))


def test_invalid_sources() -> None:
    class Stream(IterableDataset):
        def __iter__(self):
            return iter(["a"])

    with pytest.raises(DataError, match="data with a length, received 'Stream'"):
        TextDataset(Stream())
    with pytest.raises(BadArgument, match="a path, a dataset, or an iterable"):
        TextDataset(5)
    with pytest.raises(DataError, match="at least one record"):
        TextDataset([])
    with pytest.raises(BadArgument, match="split only with a path or a name"):
        TextDataset(["a"], split="line")
    with pytest.raises(DataError, match=r"record 1: Expected a text in 'text', received 5"):
        list(TextDataset(["a", 5]))
    with pytest.raises(DataError, match=r"record 0: Expected the key 'text'"):
        TextDataset([{"label": 1}])


# -- conversations -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "record",
    [
        {"messages": MESSAGES},
        {"id": 1, "conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello"}]},
        {"prompt": "Hi", "completion": "Hello"},
        {"question": "Hi", "answer": "Hello"},
        {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
        {"instruction": "Hi", "input": "", "output": "Hello"},
        {"instruction": "Hi", "context": None, "response": "Hello"},
        {"instruction": "", "input": "Hi", "output": "Hello"},
        {"messages": [{"role": "user", "content": "Hi"}, {"role": "ASSISTANT", "content": "Hello", "name": None}]},
        MESSAGES,
    ],
)
def test_every_conversation_format(tmp_path: Path, record: Any) -> None:
    assert ChatDataset([record])[0] == {"messages": MESSAGES}
    if isinstance(record, dict):
        path = write_lines(tmp_path / "c.jsonl", [record] * 3)
        assert list(ChatDataset(path)) == [{"messages": MESSAGES}] * 3


def test_parts_tools_and_systems() -> None:
    tools = [{"type": "function", "function": {"name": "clock"}}]
    call = {"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock"}}]}
    answer = {"role": "tool", "content": "12:00", "tool_call_id": "1"}
    parts = {"role": "user", "content": [{"type": "text", "text": "What "}, {"type": "text", "text": "time?"}]}
    for given_tools in (tools, json.dumps(tools)):
        item = ChatDataset([{"messages": [parts, call, answer], "tools": given_tools}])[0]
        assert item["tools"] == tools
        assert item["messages"] == [{"role": "user", "content": "What time?"}, {**call, "content": ""}, answer]
    item = ChatDataset([{"system": "Be short.", "conversations": MESSAGES}])[0]
    assert item["messages"] == [{"role": "system", "content": "Be short."}, *MESSAGES]
    assert ChatDataset([{"instruction": "Add", "input": "1, 1", "output": "2"}])[0]["messages"][0]["content"] == (
        "Add\n\n1, 1"
    )
    assert ChatDataset([{"talk": MESSAGES, "text": "a"}], messages_key="talk")[0] == {"messages": MESSAGES}


def test_hf_tables_of_conversations(tmp_path: Path, hf_cache: Any) -> None:
    """Arrow gives every message the fields of all others, filled with None."""
    odd = [{"role": "user", "content": "Hi", "name": "Ann"}, MESSAGES[1]]
    write(tmp_path / "c.parquet", [{"messages": odd}, {"messages": MESSAGES}])
    assert list(ChatDataset(tmp_path / "c.parquet")) == [{"messages": odd}, {"messages": MESSAGES}]


@pytest.mark.parametrize(
    ("messages", "reason"),
    [
        (
            [{"role": "users", "content": "Hi"}],
            r"message 0: Expected a known role, received 'users'\. Did you mean 'user",
        ),
        ([*MESSAGES, {"role": 5, "content": ""}], "message 2: Expected a known role, received 5. Known roles: system"),
        ([{"content": "Hi"}], "message 0: Expected the key 'role', received a record with: 'content'"),
        ([{"role": "user"}], "message 0: Expected a text in 'content', received None"),
        ([{"from": "gpt", "value": 3}], "message 0: Expected a text in 'value', received 3"),
        ([{"role": "user", "content": [{"type": "image"}]}], "message 0: Expected parts of the type text"),
        (["Hi"], "message 0: Expected a message with a role and a content, received 'Hi'"),
        ("Hi", "Expected a list of messages, received 'Hi'"),
        (MESSAGES[:1], r"Expected at least one assistant message, received \['user'\]"),
        ([], r"Expected at least one assistant message, received \[\]"),
    ],
)
def test_wrong_conversations_are_named(tmp_path: Path, messages: Any, reason: str) -> None:
    path = write_lines(tmp_path / "c.jsonl", [{"messages": MESSAGES}, {"messages": messages}])
    data = ChatDataset(path)
    with pytest.raises(DataError, match=rf"c\.jsonl, line 2: {reason}"):
        data[1]
    with pytest.raises(DataError, match=r"line 1: "):  # of the first, at once
        ChatDataset(write_lines(tmp_path / "d.jsonl", [{"messages": messages}]), messages_key="messages")


def test_records_that_are_no_conversations() -> None:
    with pytest.raises(DataError, match=r"received records of the schema 'text' with the keys 'text'"):
        ChatDataset([{"text": "a"}])
    with pytest.raises(DataError, match=r"record 0: Expected the key 'talk', received a record with: 'text'"):
        ChatDataset([{"text": "a"}], messages_key="talk")
    with pytest.raises(DataError, match=r"record 0: Expected a list of tools as JSON"):
        ChatDataset([{"messages": MESSAGES, "tools": "clock"}])


# -- forms -------------------------------------------------------------------------------------------------

EXAMPLES: dict[str, list[dict[str, Any]]] = {
    "text": [{"text": "a"}, {"text": "a", "label": 1}, {"id": 3, "Content": "a"}, {"url": "u", "raw_content": "a"}],
    "completion": [
        {"prompt": "a", "completion": "b"},
        {"question": "a", "answer": "b"},
        {"prompt": "a", "response": "b", "text": "ab"},
    ],
    "alpaca": [
        {"instruction": "a", "input": "b", "output": "c", "text": "abc"},
        {"instruction": "a", "context": "", "response": "c", "category": "qa"},
    ],
    "chat": [{"messages": MESSAGES, "prompt": "a"}, {"id": 1, "conversations": MESSAGES}],
    "preference": [
        {"prompt": "a", "chosen": "b", "rejected": "c", "messages": MESSAGES},
        {"chosen": MESSAGES, "rejected": MESSAGES},
    ],
    "pairs": [
        {"source": "a", "target": "b"},
        {"translation": {"de": "a", "en": "b"}},
        {"article": "a", "highlights": "b", "id": 1},
        {"dialogue": "a", "summary": "b"},
        {"document": "a", "summary": "b"},
        {"input": "a", "output": "b"},
    ],
    "tokens": [{"input_ids": [1, 2]}, {"input_ids": [1], "labels": [1], "text": "a"}],
    "tagged": [{"tokens": ["a"], "ner_tags": [0], "id": 1}],
    "similarity": [{"anchor": "a", "positive": "b"}, {"sentence1": "a", "sentence2": "b", "score": 0.5}],
}


@pytest.mark.parametrize(("form", "record"), [(form, record) for form, all_ in EXAMPLES.items() for record in all_])
def test_schemas_are_detected(form: str, record: dict[str, Any]) -> None:
    assert detect_schema([record] * 3).name == detect_schema(iter([record])).name == form
    item = StandardRecords([record], schema=form)[0]
    standard_names = {
        "text": {"text": "a"},
        "completion": {"prompt": "a", "completion": "b"},
        "alpaca": {"instruction": "a", "output": "c"},
        "chat": {"messages": MESSAGES},
        "pairs": {"source": "a", "target": "b"},
        "tagged": {"tokens": ["a"], "tags": [0]},
        "similarity": {"anchor": "a", "positive": "b"},
        "tokens": {"input_ids": record.get("input_ids")},
        "preference": {"chosen": record.get("chosen"), "rejected": record.get("rejected")},
    }
    assert standard_names[form].items() <= item.items()


def test_every_schema_has_an_example() -> None:
    assert set(EXAMPLES) == set(SCHEMAS)


def test_optional_fields_that_some_records_lack() -> None:
    records = [{"instruction": "a", "output": "b"}, {"instruction": "a", "input": "c", "output": "b"}]
    assert list(StandardRecords(records)) == [
        {"instruction": "a", "input": "", "output": "b"},
        {"instruction": "a", "input": "c", "output": "b"},
    ]
    assert detect_schema(records).keys["input"] == "input"
    assert detect_schema(["a text"]).name == "text"
    assert detect_schema([MESSAGES]).name == "chat"
    assert detect_schema([[1, 2, 3]]).name == "tokens"


TOOLS = [{"type": "function", "function": {"name": "clock"}}]
OPTIONS = {"enable_thinking": False}
PLAIN = {
    "chat": {"messages": MESSAGES},
    "completion": {"prompt": MESSAGES[:1], "completion": MESSAGES[1:]},
    "alpaca": {"instruction": "Hi", "output": "Hello"},
    "preference": {"prompt": MESSAGES[:1], "chosen": MESSAGES[1:], "rejected": MESSAGES[1:]},
}


@pytest.mark.parametrize("form", PLAIN)
def test_fields_that_appear_late_are_kept(tmp_path: Path, form: str) -> None:
    """8 records decide on the schema, and all are read for what they hold."""
    late = {"tools": TOOLS, "System": "Be short.", "chat_template_kwargs": OPTIONS}
    late |= {"context": "Now."} if form == "alpaca" else {}
    records = [PLAIN[form]] * 9 + [{**PLAIN[form], **late}] * 20
    data = StandardRecords(write_lines(tmp_path / "late.jsonl", records))
    plain, full = data[0], data[28]
    assert data.schema.name == form
    assert {"tools", "chat_template_kwargs"}.isdisjoint(plain)
    assert (full["tools"], full["chat_template_kwargs"]) == (TOOLS, OPTIONS)
    system = {"role": "system", "content": "Be short."}
    if form == "alpaca":
        assert (plain["input"], full["input"], full["system"]) == ("", "Now.", "Be short.")
        assert ChatDataset(records)[28]["messages"][:2] == [system, {"role": "user", "content": "Hi\n\nNow."}]
    else:
        first = "messages" if form == "chat" else "prompt"
        assert full[first] == [system, *plain[first]]
    if form != "preference":
        assert ChatDataset(records)[28]["chat_template_kwargs"] == OPTIONS
        assert ChatDataset(records)[28]["messages"][0] == system


def test_systems_of_texts_and_whole_conversations() -> None:
    late = {"system_prompt": "Be short."}
    pair = {"prompt": "Hi", "completion": "Hello"}
    assert StandardRecords([pair] * 8 + [pair | late])[8] == {**pair, "system": "Be short."}
    both = {"chosen": MESSAGES, "rejected": MESSAGES}
    full = StandardRecords([both] * 8 + [both | late])[8]
    assert [full[name][0]["role"] for name in ("chosen", "rejected")] == ["system", "system"]
    # The same system prompt twice is one, another one is an error.
    twice = {"system": "Be short.", "messages": [{"role": "system", "content": "Be short."}, *MESSAGES]}
    assert ChatDataset([twice])[0]["messages"] == twice["messages"]
    with pytest.raises(DataError, match="one system prompt, in the field 'system' or in the messages"):
        ChatDataset([twice | {"system": "Be long."}])
    with pytest.raises(DataError, match="a text in 'system', received 5"):
        ChatDataset([{"messages": MESSAGES, "system": 5}])


@pytest.mark.parametrize(
    ("first", "later", "message"),
    [
        ({"text": "a"}, {"messages": MESSAGES}, "the key 'text', received a record with: 'messages'"),
        (
            {"text": "a"},
            {"text": "a", "messages": MESSAGES},
            "of the schema 'text' .*received one of the schema 'chat'",
        ),
        ({"messages": MESSAGES}, {"prompt": "a", "completion": "b"}, "the key 'messages'"),
        ({"prompt": "a", "completion": "b"}, {"prompt": "a", "chosen": "b", "rejected": "c"}, "the key 'completion'"),
        (
            {"question": "a", "answer": "b"},
            {"question": "a", "answer": "b", "context": "c"},
            "received also 'context', which would be lost",
        ),
        ({"messages": MESSAGES}, MESSAGES, "a record with the key 'messages', received 'list'"),
        (MESSAGES, {"messages": MESSAGES}, "a list of messages"),
        ({"text": "a"}, "a", "a record with the key 'text', received 'str'"),
        ({"messages": MESSAGES}, {"messages": []}, "at least one assistant message"),
        ({"messages": MESSAGES}, {"messages": MESSAGES, "tools": 5}, "a list of tools, received 5"),
        ({"messages": MESSAGES}, {"messages": MESSAGES, "chat_template_kwargs": [1]}, "a mapping in 'chat_template"),
    ],
)
@pytest.mark.parametrize("place", [1, 20])
def test_a_schema_that_changes_is_an_error_with_its_line(
    tmp_path: Path, first: Any, later: Any, message: str, place: int
) -> None:
    records = [first] * place + [later]
    data: Any = StandardRecords(records)
    assert all(data[index] for index in range(place))
    with pytest.raises(DataError, match=f"record {place}: Expected .*{message}"):
        data[place]
    if isinstance(first, dict) and isinstance(later, dict):
        path = write_lines(tmp_path / "mixed.jsonl", records)
        with pytest.raises(DataError, match=rf"mixed\.jsonl, line {place + 1}: Expected .*{message}"):
            list(StandardRecords(path))


def test_empty_columns_are_no_other_schema(hf_cache: Any) -> None:
    """Arrow has a column for every field of any record."""
    table = hf_cache.Dataset.from_dict({"text": ["a", "b"], "messages": [None, None], "label": [None, 1]})
    assert [record["text"] for record in StandardRecords(table)] == ["a", "b"]
    calls = [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "clock"}}]}]
    columns = {"messages": [MESSAGES] * 9 + [calls], "tools": [None] * 9 + [TOOLS]}
    filled = hf_cache.Dataset.from_dict(columns)
    records = StandardRecords(filled)
    assert (records[0], records[9]["tools"]) == ({"messages": MESSAGES}, TOOLS)
    assert records[9]["messages"][0]["tool_calls"][0]["function"]["name"] == "clock"


def test_a_misspelled_field_is_a_warning_once(caplog: pytest.LogCaptureFixture) -> None:
    records = [{"messages": MESSAGES, "sistem": "Be short.", "id": 1}] * 3
    with caplog.at_level(logging.WARNING, logger="trainformer"):
        list(ChatDataset(records))
        list(StandardRecords(records))
    assert [record.message for record in caplog.records] == [
        "records have the field 'sistem', which is not used. Did you mean 'system'?"
    ]


def test_messages_and_calls_in_the_forms_of_the_hub() -> None:
    asked = {"messages": json.dumps(MESSAGES), "tools": json.dumps(TOOLS)}  # as in a column of a table
    assert StandardRecords([asked])[0] == {"messages": MESSAGES, "tools": TOOLS}
    old = {"role": "assistant", "content": None, "function_call": {"name": "clock", "arguments": "{}"}}
    (message,) = ChatDataset([{"messages": [old]}])[0]["messages"]
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "clock", "arguments": "{}"}}]
    assert message["content"] == ""
    with pytest.raises(DataError, match="messages as JSON, received text that is not JSON"):
        StandardRecords([asked, {"messages": "[{"}])[1]


def test_missing_keys_are_named() -> None:
    with pytest.raises(DataError, match=r"with 'prompt', 'chosen'\. The key 'rejected' is missing\."):
        StandardRecords([{"prompt": "a", "chosen": "b"}], "preference")
    with pytest.raises(DataError, match=r"The key 'rejected' is missing\. Did you mean 'reject'\?"):
        StandardRecords([{"prompt": "a", "chosen": "b", "reject": "c"}], "preference")
    with pytest.raises(DataError, match=r"received 'text', with 'text'\. The keys 'chosen' and 'rejected' are missing"):
        StandardRecords([{"text": "a"}], "preference")
    with pytest.raises(DataError, match="They would be of the schema 'preference' with 'rejected', or 'completion'"):
        StandardRecords([{"prompt": "a", "chosen": "b"}])


def test_unknown_schemas_list_the_keys_and_the_known_schemas() -> None:
    with pytest.raises(
        DataError, match=r"with the keys 'foo', 'bar'\. Known schemas are: tokens \('input_ids'\); pref"
    ):
        detect_schema([{"foo": 1, "bar": 2}])
    with pytest.raises(DataError, match="'question', 'context', 'answer'"):
        detect_schema([{"question": "a", "context": "b", "answer": "c"}])
    with pytest.raises(DataError, match="at least one record"):
        detect_schema([])
    with pytest.raises(DataError, match="mappings, texts or lists of messages, received 'int'"):
        detect_schema([3])
    with pytest.raises(DataError, match=r"of the schema 'chat', received 'text'"):
        StandardRecords([{"text": "a"}], schema="chat")
    with pytest.raises(BadArgument, match="Did you mean 'pairs'"):
        StandardRecords([{"text": "a"}], schema="pair")
    with pytest.raises(DataError, match="record 1: Expected a text in 'prompt', received 1"):
        list(StandardRecords([{"prompt": "a", "completion": "b"}, {"prompt": 1, "completion": "b"}]))


# -- by path or name ---------------------------------------------------------------------------------------


def test_folders_of_records_and_their_splits(tmp_path: Path, hf_cache: Any) -> None:
    folder = tmp_path / "shards"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("about")
    for shard in range(3):
        write(folder / "data" / f"train-0000{shard}-of-3.parquet", RECORDS[shard * 5 : shard * 5 + 5])
    assert list(load_text(folder)) == RECORDS[:15]
    write(folder / "data" / "test-00000-of-1.parquet", RECORDS[15:])
    assert list(load_text(folder, split="test")) == RECORDS[15:]
    assert list(load_text(folder, split="train")) == RECORDS[:15]
    with pytest.raises(DataError, match=r"one split, received \['test', 'train'\]"):
        load_text(folder)
    with pytest.raises(DataError, match=r"a split of '.*', received 'dev'"):
        load_text(folder, split="dev")

    lines = tmp_path / "lines"
    lines.mkdir()
    write_lines(lines / "part_1.jsonl", RECORDS[:7])
    write_lines(lines / "part_2.jsonl", RECORDS[7:])
    data = load_text(lines)
    assert list(data) == RECORDS
    assert data[-1] == RECORDS[-1]
    assert data.location(8).endswith("part_2.jsonl, line 2")
    write(lines / "part_3.csv", RECORDS)
    with pytest.raises(DataError, match="files of one kind"):
        load_text(lines)


def test_datasets_saved_by_hf(tmp_path: Path, hf_cache: Any) -> None:
    table = hf_cache.Dataset.from_list(RECORDS)
    table.save_to_disk(str(tmp_path / "one"))
    assert list(load_text(tmp_path / "one")) == RECORDS
    hf_cache.DatasetDict(train=table, test=table.select([3])).save_to_disk(str(tmp_path / "two"))
    assert list(load_text(tmp_path / "two", split="test")) == [RECORDS[3]]
    assert list(load_text(tmp_path / "two" / "train")) == RECORDS
    with pytest.raises(DataError, match=r"one split, received \['train', 'test'\]\. Pass one of them: '.*two/train'"):
        load_text(tmp_path / "two")
    with pytest.raises(DataError, match="one split, received 'dev'"):
        load_text(tmp_path / "two", split="dev")


def test_the_hub_that_cannot_be_reached(hf_cache: Any) -> None:
    with pytest.raises(DataError, match=r"'nobody/nothing', split 'train', of the Hugging Face hub, received"):
        load_text("hf:nobody/nothing:train")


def test_invalid_paths_and_names(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="Did you mean 'python-stdlib'"):
        load_text("python-stdib")
    write_lines(tmp_path / "train.jsonl", RECORDS)
    with pytest.raises(DataError, match=r"which does not exist\. Did you mean 'train\.jsonl'"):
        load_text(tmp_path / "trian.jsonl")
    with pytest.raises(BadArgument, match="no split, since a file of records has none"):
        load_text(tmp_path / "train.jsonl", split="train")
    (tmp_path / "a.txt").write_text("a")
    with pytest.raises(BadArgument, match="Did you mean 'line'"):
        load_text(tmp_path / "a.txt", split="lines")
    (tmp_path / "weights.bin").write_bytes(b"\0\1\2\3" * 100)
    with pytest.raises(DataError, match="It contains binary data"):
        load_text(tmp_path / "weights.bin")
    for text in ("A text, and no path.\n", "A text, and no path. " * 1000):
        with pytest.raises(BadArgument, match=r"a path or name, received 'A text.*Pass texts themselves as a list"):
            TextDataset(text)
    (tmp_path / "none").mkdir()
    with pytest.raises(DataError, match="received 0 files"):
        load_text(tmp_path / "none")
    (tmp_path / "CORPUS").write_text("no ending")
    assert list(load_text(tmp_path / "CORPUS")) == [{"text": "no ending"}]


def test_tables_that_are_wrong(tmp_path: Path, hf_cache: Any) -> None:
    (tmp_path / "a.csv").write_text('text,label\n"one\ntwo",1\nthree\n')
    with pytest.raises(DataError, match=r"a\.csv, line 4: Expected 2 values \(text, label\), received 1"):
        load_text(tmp_path / "a.csv")
    (tmp_path / "b.csv").write_text('text\n"never closed\n')
    with pytest.raises(DataError, match="can be read as CSV"):
        load_text(tmp_path / "b.csv")
    (tmp_path / "c.csv").write_text("text;label\na, b;1\n")
    assert list(load_text(tmp_path / "c.csv")) == [{"text": "a, b", "label": "1"}]
    (tmp_path / "d.csv").write_text("text\n")
    with pytest.raises(DataError, match="at least one record"):
        load_text(tmp_path / "d.csv")
    (tmp_path / "e.parquet").write_text("no table")
    with pytest.raises(DataError, match=r"Parquet files of one kind, received '.*e\.parquet'"):
        load_text(tmp_path / "e.parquet")
    assert csv.field_size_limit() == 131072  # as it was before


# -- the built-in corpus -----------------------------------------------------------------------------------


def test_the_standard_library() -> None:
    train, test = load_text("python-stdlib"), load_text("python-stdlib", split="test")
    assert corpus_names() == ["python-stdlib", "python-stdlib:test"]
    assert test.files == load_corpus("python-stdlib:test").files
    root = Path(sysconfig.get_path("stdlib"))
    everything = sorted(Path(path).relative_to(root).as_posix() for path in train.files + test.files)
    assert len(set(everything)) == len(everything) > 400
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(everything)
    assert not any({"test", "tests", "site-packages", "__pycache__", "idlelib"} & set(n.split("/")) for n in everything)
    assert 0.02 < len(test) / len(everything) < 0.09
    # Sorted, the same every time, and a file is in one part whatever the others are.
    assert train.files == load_text("python-stdlib").files
    names = [Path(path).relative_to(root).as_posix() for path in train.files]
    assert names == sorted(names)
    size = sum(len(item["text"]) for item in train)
    assert 5e6 < size < 40e6
    with pytest.raises(BadArgument, match="the name of a built-in corpus, received 'python-stdlib:dev'"):
        load_text("python-stdlib", split="dev")


@pytest.mark.slow
def test_the_standard_library_is_source() -> None:
    defined = set()
    for name in corpus_names():
        corpus = load_text(name)
        for path, item in zip(corpus.files, corpus, strict=True):
            with tokenize.open(path) as file:  # as Python itself decodes it
                assert item["text"] == file.read(), path
            defined |= {part.name for part in ast.parse(item["text"], path).body if isinstance(part, ast.ClassDef)}
    assert {"ArgumentParser", "JSONDecoder", "TaskGroup"} <= defined


# -- what all of them must do ------------------------------------------------------------------------------


def every_dataset(tmp_path: Path) -> dict[str, Any]:
    lines = write_lines(tmp_path / "data.jsonl", RECORDS)
    chats = write_lines(tmp_path / "chats.jsonl", [{"messages": MESSAGES}] * 20)
    text = tmp_path / "text.txt"
    text.write_text("\n\n".join(record["text"] for record in RECORDS), encoding="utf-8")
    (tmp_path / "list.json").write_text(json.dumps(RECORDS))
    return {
        "jsonl": JSONLDataset(lines, label_key="label"),
        "json": JSONLDataset(tmp_path / "list.json"),
        "lines": TextFileDataset(text),
        "chunks": TextFileDataset(text, chunk_size=13),
        "documents": TextDataset(lines),
        "paragraphs": TextDataset(text, split="paragraph"),
        "chat": ChatDataset(chats),
        "records": load_text(lines),
        "standard": StandardRecords(lines),
        "files": load_text("python-stdlib:test"),
    }


NAMES = ["jsonl", "json", "lines", "chunks", "documents", "paragraphs", "chat", "records", "standard", "files"]


@pytest.mark.parametrize("name", NAMES)
def test_all_can_be_split_pickled_and_described(tmp_path: Path, name: str) -> None:
    data = every_dataset(tmp_path)[name]
    items = [data[index] for index in range(len(data))]
    assert list(data) == items
    train, val = split_dataset(data, 0.25, seed=0)
    assert sorted(map(str, [*train, *val])) == sorted(map(str, items))
    assert list(pickle.loads(pickle.dumps(Subset(data, [3, 1])))) == [items[3], items[1]]
    assert extract_info(data).num_samples == len(items)
    assert isinstance(data.fingerprint, str)
    assert pickle.loads(pickle.dumps(data)).fingerprint == data.fingerprint
    assert data.location(1)


def test_fingerprints_tell_contents_and_settings_apart(tmp_path: Path) -> None:
    path = write_lines(tmp_path / "data.jsonl", RECORDS)
    known = [
        *(JSONLDataset(path).fingerprint, JSONLDataset(path, "id").fingerprint, JSONLDataset(path, None).fingerprint),
        *(
            TextFileDataset(path).fingerprint,
            TextFileDataset(path, 5).fingerprint,
            TextFileDataset(path, 6).fingerprint,
        ),
        *(TextDataset(path).fingerprint, StandardRecords(path).fingerprint),
    ]
    write_lines(path, RECORDS[:5])
    known += [JSONLDataset(path).fingerprint, TextDataset(path).fingerprint]
    assert len(set(known)) == len(known)
    assert TextDataset(["a"]).fingerprint is None


@pytest.mark.parametrize("start", ["fork", pytest.param("spawn", marks=pytest.mark.slow)])
def test_worker_processes_read_the_same(tmp_path: Path, start: str) -> None:
    data = JSONLDataset(write_lines(tmp_path / "data.jsonl", RECORDS), label_key="label")
    assert data[0]["label"] == 0  # the file is open in this process
    loader = DataLoader(data, batch_size=None, num_workers=1, multiprocessing_context=start)
    assert list(loader) == list(data)
