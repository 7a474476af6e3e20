"""The tokenizer of a GGUF file: its vocabulary, merges, special tokens and chat template, as llama.cpp reads them.

llama.cpp implements tokenizers itself: byte-level BPE with a known split of the text ("gpt2"), and SentencePiece's BPE
("llama"). Others are refused, since prompts would become other tokens.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from trainformer.core.errors import BadArgument, expected
from trainformer.core.optional import require

_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|"
# How the text is split before it is encoded: regular expressions, and llama.cpp's names for them.
_SPLITS = {_SHORT + _WORDS % "{1,3}": "llama-bpe", _SHORT + _WORDS % "": "qwen2"}
_SPACE = "▁"


def write_tokenizer(writer: Any, tokenizer: Any, rows: int) -> None:
    """Write a fast tokenizer of transformers; the model has embeddings for `rows` tokens."""
    backend = getattr(tokenizer, "backend_tokenizer", None)
    if backend is None:
        raise BadArgument(expected("a fast tokenizer (tokenizer.json) to write as GGUF", type(tokenizer).__name__))
    spec = json.loads(backend.to_str())
    model = spec["model"]
    if model.get("type") != "BPE":
        raise BadArgument(expected("a BPE tokenizer to write as GGUF", model.get("type")))
    if len(tokenizer) > rows:
        raise BadArgument(expected(f"at most {rows} tokens, as the model has embeddings", len(tokenizer)))
    kinds = require("gguf", "gguf", "to write GGUF files").TokenType
    tokens = [f"[PAD{number}]" for number in range(rows)]
    types = [kinds.UNUSED] * rows
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, kinds.NORMAL
    for added in spec.get("added_tokens") or ():
        tokens[added["id"]] = added["content"]
        types[added["id"]] = kinds.CONTROL if added["special"] else kinds.USER_DEFINED
    merges = [pair if isinstance(pair, list) else pair.split(" ") for pair in model["merges"]]
    if model.get("byte_fallback"):
        _write_sentencepiece(writer, spec, merges, tokens, types)
    else:
        _write_byte_level(writer, spec, merges)
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    _write_special(writer, tokenizer)


def _write_byte_level(writer: Any, spec: Mapping[str, Any], merges: list[list[str]]) -> None:
    split, prefix = _split_of(spec)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(split)
    writer.add_add_space_prefix(prefix)
    # Merges are separated by spaces, so that a space inside one has another code.
    writer.add_token_merges([" ".join(part.replace(" ", chr(ord(" ") + 256)) for part in pair) for pair in merges])


def _split_of(spec: Mapping[str, Any]) -> tuple[str, bool]:
    """llama.cpp's name of the way a text is split, and whether it starts with a space."""
    normalizer = spec.get("normalizer")
    if normalizer is not None and normalizer["type"] != "NFC":
        raise BadArgument(expected("a tokenizer without normalisation, or with NFC", normalizer["type"]))
    given = spec.get("pre_tokenizer") or {}
    steps = given["pretokenizers"] if given.get("type") == "Sequence" else [given]
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2", bool(steps[0].get("add_prefix_space"))
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        pattern = steps[0]["pattern"].get("Regex")
        if pattern in _SPLITS and steps[0]["behavior"] == "Isolated":
            return _SPLITS[pattern], bool(steps[1].get("add_prefix_space"))
    do = "llama.cpp would split prompts in another way."
    raise BadArgument(expected("a tokenizer that splits texts as GPT-2, Llama 3 or Qwen2 to write as GGUF", given, do))


def _write_sentencepiece(
    writer: Any, spec: Mapping[str, Any], merges: list[list[str]], tokens: list[str], types: list[Any]
) -> None:
    """A BPE of SentencePiece: llama.cpp merges by the score of the result, and transformers by the order of merges."""
    kinds = require("gguf", "gguf", "to write GGUF files").TokenType
    parts = [part for part in _parts(spec.get("normalizer")) + _parts(spec.get("pre_tokenizer")) if part]
    known = {"Prepend", "Replace", "Metaspace"}
    if (
        not parts
        or any(part["type"] not in known for part in parts)
        or _SPACE not in json.dumps(parts, ensure_ascii=False)
    ):
        raise BadArgument(
            expected("a tokenizer that writes spaces as SentencePiece does", [p.get("type") for p in parts])
        )
    prefix = any(p["type"] == "Prepend" or p.get("prepend_scheme") in ("first", "always") for p in parts)
    ranks: dict[str, int] = {}
    for rank, pair in enumerate(merges):
        ranks.setdefault("".join(pair), rank)
    writer.add_tokenizer_model("llama")
    writer.add_tokenizer_pre("default")
    writer.add_add_space_prefix(prefix)
    writer.add_token_scores([-float(ranks.get(token, len(merges))) for token in tokens])
    for number, token in enumerate(tokens):
        if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
            types[number] = kinds.BYTE
        elif token == spec["model"].get("unk_token"):
            types[number] = kinds.UNKNOWN


def _parts(step: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    if step is None:
        return []
    nested = step.get("normalizers") or step.get("pretokenizers")
    return [step] if nested is None else list(nested)


def _write_special(writer: Any, tokenizer: Any) -> None:
    for name in ("bos", "eos", "unk", "pad", "sep", "mask"):
        number = getattr(tokenizer, f"{name}_token_id", None)
        if number is not None:
            getattr(writer, f"add_{name}_token_id")(number)
    ids = tokenizer("a")["input_ids"]  # what it adds to a text
    writer.add_add_bos_token(bool(ids) and tokenizer.bos_token_id is not None and ids[0] == tokenizer.bos_token_id)
    writer.add_add_eos_token(bool(ids) and tokenizer.eos_token_id is not None and ids[-1] == tokenizer.eos_token_id)
    if isinstance(getattr(tokenizer, "chat_template", None), str):
        writer.add_chat_template(tokenizer.chat_template)
