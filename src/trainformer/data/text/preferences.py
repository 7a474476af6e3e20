"""Preferences as tokens: pairs of answers to one prompt, the chosen one and the rejected one.

Owns what the two answers of a record are, and that a pair is kept or dropped as a whole. How a prompt and an answer
become tokens is left to `encode`, and keeping them to `store`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import numpy as np

from trainformer.core.errors import DataError, expected
from trainformer.data.text.encode import Encoded, Encoder, Naming, Report
from trainformer.data.text.store import OverStore


class Pairs(OverStore):
    """Pairs of answers over a store in which they lie side by side."""

    @property
    def lengths(self) -> np.ndarray:
        """Tokens of the longer answer of each pair, to which the other is padded."""
        return self.store.lengths.reshape(-1, 2).max(axis=1)

    def __len__(self) -> int:
        return len(self.store) // 2

    def __getitem__(self, index: int) -> dict[str, dict[str, np.ndarray]]:
        if not -len(self) <= index < len(self):
            raise IndexError(f"pair {index} of {len(self)}")
        place = 2 * (int(index) % len(self))
        return {"chosen": self.store[place], "rejected": self.store[place + 1]}


class PairEncoder(Encoder):
    """Makes two pieces of a record, the chosen answer and the rejected one, each behind the prompt; or none."""

    def _pieces_of(self, records: Sequence[Any], report: Report, naming: Naming) -> list[list[Encoded]]:
        """The pieces of each record. A pair of which one answer is dropped is dropped, and so is a pair of equals."""
        found = []
        for place, record in enumerate(records):
            reports = [Report(), Report()]
            with naming(place):
                pieces = [
                    piece
                    for answer, counted in zip(answers(record), reports, strict=True)
                    for piece in super(PairEncoder, self)._pieces_of([answer], counted, lambda _: nullcontext())[0]
                ]
            found.append(self._both(pieces, reports, report))
        return found

    def _both(self, pieces: list[Encoded], reports: list[Report], report: Report) -> list[Encoded]:
        report.records += 1
        if len(pieces) < 2:
            lost = next(counted for counted in reports if counted.dropped)
            report.blame(next(iter(lost.reasons)), "dropped")
            return []
        if np.array_equal(pieces[0].input_ids, pieces[1].input_ids):
            report.blame("both answers are the same", "dropped")
            return []
        cut = next((counted for counted in reports if counted.truncated), None)
        if cut is not None:
            report.blame(next(iter(cut.reasons)), "truncated")
        report.pieces += 2
        report.tokens += sum(len(piece.input_ids) for piece in pieces)
        report.supervised += sum(piece.supervised for piece in pieces)
        return pieces

    def fingerprint(self) -> str:
        """A digest of everything the tokens depend on but the records."""
        return f"pairs-{super().fingerprint()}"


def answers(record: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The two answers of a record, each as a prompt and its completion.

    >>> [answer["completion"] for answer in answers({"prompt": "1 + 1 =", "chosen": " 2", "rejected": " 3"})]
    [' 2', ' 3']
    >>> ask = {"role": "user", "content": "1 + 1?"}
    >>> said = [[ask, {"role": "assistant", "content": text}] for text in ("2", "3")]
    >>> [len(answer["prompt"]) for answer in answers({"chosen": said[0], "rejected": said[1]})]
    [1, 1]
    """
    prompt, chosen, rejected = record.get("prompt"), record["chosen"], record["rejected"]
    if isinstance(prompt, str) and isinstance(chosen, str) and isinstance(rejected, str):
        return [{**record, "completion": answer} for answer in (chosen, rejected)]
    if prompt is None and (isinstance(chosen, str) or isinstance(rejected, str)):
        raise DataError(expected("a prompt, or two whole conversations as messages", list(record), "Add 'prompt'."))
    asked = _as_messages(prompt, "user") if prompt is not None else []
    both = [_as_messages(answer, "assistant") for answer in (chosen, rejected)]
    shared = _common(*both)
    if prompt is None or (shared and shared[: len(asked)] == asked) or shared[-len(asked) :] == asked:
        # Whole conversations, which begin with the prompt (perhaps after a system's message).
        asked, both = shared, [answer[len(shared) :] for answer in both]
    return [{"prompt": asked, "completion": answer} for answer in both]


def _as_messages(value: Any, role: str) -> list[Any]:
    return [{"role": role, "content": value}] if isinstance(value, str) else list(value)


def _common(first: list[Any], second: list[Any]) -> list[Any]:
    """The messages with which both begin: not the last of either, which is the answer."""
    size = 0
    while size < min(len(first), len(second)) - 1 and first[size] == second[size]:
        size += 1
    return first[:size]
