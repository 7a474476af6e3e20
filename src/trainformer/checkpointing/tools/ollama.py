"""The ``Modelfile`` of Ollama for a folder with a causal language model.

Ollama has templates of its own. One is derived from the chat template of the tokenizer by rendering conversations, and
written only if it gives the same text as the chat template.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainformer.core.optional import require

FILE = "Modelfile"
_ROLES = ("system", "user", "assistant")
_PARAMETERS = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "repetition_penalty": "repeat_penalty"}

Turn = Mapping[str, str]


@dataclass(frozen=True)
class TurnTexts:
    """What a chat template writes around the turns of each role, at the start, and before an answer."""

    start: str
    around: Mapping[str, tuple[str, str]]
    answer: str

    def render(self, turns: Sequence[Turn]) -> str:
        """A conversation up to the answer."""
        texts = (f"{self.around[t['role']][0]}{t['content']}{self.around[t['role']][1]}" for t in turns)
        return f"{self.start}{''.join(texts)}{self.answer}"

    def template(self) -> str:
        """The same in the language of Ollama, which is Go's."""
        cases = [
            f'{{{{ {"else if" if number else "if"} eq .Role "{role}" }}}}{before}{{{{ .Content }}}}{after}'
            for number, (role, (before, after)) in enumerate(self.around.items())
        ]
        return f"{self.start}{{{{- range .Messages }}}}{''.join(cases)}{{{{ end }}}}{{{{- end }}}}{self.answer}"


def write_modelfile(folder: Path, weights: str) -> str | None:
    """Write the ``Modelfile``; `weights` is what Ollama is to read. Returns a note if it has no template."""
    tokenizer = require("transformers", "text", "for this model").AutoTokenizer.from_pretrained(
        folder, trust_remote_code=False
    )
    lines, note = [f"FROM {weights}"], None
    if getattr(tokenizer, "chat_template", None) is None:
        lines.append('TEMPLATE """{{ .Prompt }}"""')
        texts = None
    else:
        texts = turn_texts(tokenizer)
        if texts is None:
            note = "Modelfile: no TEMPLATE, because the chat template does more than to join turns. Write one"
        else:
            lines.append(f'TEMPLATE """{texts.template()}"""')
    ends = [tokenizer.eos_token, texts and texts.around["assistant"][1].strip()]
    stops = [end for end in ends if end and end in tokenizer.all_special_tokens]
    lines += [f"PARAMETER stop {json.dumps(stop, ensure_ascii=False)}" for stop in dict.fromkeys(stops)]
    lines += [f"PARAMETER {name} {value}" for name, value in _parameters(folder).items()]
    (folder / FILE).write_text("\n".join(lines) + "\n", encoding="utf-8")
    return note


def _parameters(folder: Path) -> dict[str, float]:
    """Sampling parameters in ``generation_config.json``."""
    file = folder / "generation_config.json"
    given = json.loads(file.read_text("utf-8")) if file.is_file() else {}
    return {ours: given[theirs] for theirs, ours in _PARAMETERS.items() if isinstance(given.get(theirs), int | float)}


def turn_texts(tokenizer: Any) -> TurnTexts | None:
    """What the chat template writes around turns; None if it does more than that, or Ollama could not write it.

    >>> class Words:
    ...     bos_token = None
    ...     def apply_chat_template(self, turns, tokenize, add_generation_prompt):
    ...         text = "".join(f"<{t['role']}>{t['content']}</s>" for t in turns)
    ...         return text + "<assistant>" * add_generation_prompt
    ...     def __call__(self, text):
    ...         return {"input_ids": []}
    >>> turn_texts(Words()).around["user"]
    ('<user>', '</s>')
    """

    def render(*turns: Turn, answers: bool = False) -> str:
        text = tokenizer.apply_chat_template(list(turns), tokenize=False, add_generation_prompt=answers)
        return str(text)

    asked, said, again, told = (_turn(role, f"content {n}") for n, role in enumerate((*_ROLES[1:], "user", "system")))
    try:
        one, two, three = render(asked), render(asked, said), render(asked, said, again)
        around = {
            "user": _around(three.removeprefix(two), again["content"]),
            "assistant": _around(two.removeprefix(one), said["content"]),
        }
        start = one.removesuffix(f"{around['user'][0]}{asked['content']}{around['user'][1]}")
        with_system = render(told, asked).removeprefix(start).removesuffix(one.removeprefix(start))
        around = {"system": _around(with_system, told["content"]), **around}
        found = TurnTexts(start, around, render(asked, answers=True).removeprefix(one))
        turns = [told, asked, said, again, _turn("assistant", "yes"), _turn("user", "A longer text, why?")]
        if found.render(turns) != render(*turns, answers=True) or found.render(turns[1:4]) != render(
            *turns[1:4], answers=True
        ):
            return None
    except Exception:  # a template may refuse roles, or anything else
        return None
    if tokenizer.bos_token and tokenizer("a")["input_ids"][:1] == [tokenizer.bos_token_id]:
        found = TurnTexts(found.start.removeprefix(tokenizer.bos_token), found.around, found.answer)  # added anyway
    texts = [found.start, found.answer, *(text for pair in found.around.values() for text in pair)]
    return None if any("{{" in text or '"""' in text for text in texts) else found


def _turn(role: str, content: str) -> dict[str, str]:
    return {"role": role, "content": content}


def _around(text: str, content: str) -> tuple[str, str]:
    before, found, after = text.partition(content)
    if not found:
        raise ValueError(f"{content!r} is not in {text!r}")
    return before, after
