"""Generate text with a causal language model: prompts as tokens, stop tokens, sampling by seeds, streaming.

Nothing here changes the state of a random number generator, or the mode of the model. A sampled text depends on the
weights, its prompt, its seed and the options: not on the other prompts of a batch (see `rollouts.sampling`).
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from trainformer.adapters.base import unwrap_model
from trainformer.core.errors import BadArgument, DataError, check_count, did_you_mean, expected
from trainformer.data.order import preserved_generators, seed_generators
from trainformer.data.text.collate import pad
from trainformer.data.text.generation import Generated, GenerationPrompt, end_of_turn, row_seeds
from trainformer.models.generation import SAMPLING, SamplingOptions, stop_token_ids
from trainformer.models.modes import eval_mode
from trainformer.tasks.language.positions import longest_sequence
from trainformer.tasks.language.rollouts.sampling import InverseSampling, row_numbers, warpers

logger = logging.getLogger("trainformer")

_DEFAULTS = {"temperature": 1.0, "top_k": 50, "top_p": 1.0, "min_p": None}  # of transformers' `generate`
# With one of these, transformers samples, from generators that the seed of the first row seeds.
_OTHER_SAMPLING = ("typical_p", "epsilon_cutoff", "eta_cutoff", "top_h", "num_beams", "penalty_alpha")
_CALL_OPTIONS = (
    *("streamer", "stopping_criteria", "logits_processor", "generation_config", "assistant_model", "synced_gpus"),
    *("prefix_allowed_tokens_fn", "negative_prompt_ids", "negative_prompt_attention_mask", "custom_generate"),
)
_ONE_TEXT = "One text is returned per prompt: pass the prompt several times, with different seeds."
_OF_PROMPTS = {"num_return_sequences": _ONE_TEXT, "return_dict_in_generate": "Texts are returned: leave it out."}


def context_length(model: nn.Module) -> int | None:
    """The most tokens that a model reads: its table of positions, or what its config says; None if it has no limit."""
    inner: Any = unwrap_model(model)
    config = getattr(inner, "config", None)
    config = getattr(config, "text_config", None) or config
    stated = getattr(config, "max_position_embeddings", None)
    found = [length for length in (longest_sequence(inner), stated) if isinstance(length, int) and length > 0]
    return min(found, default=None)


def generate_texts(
    model: nn.Module,
    tokenizer: Any,
    prompts: Sequence[GenerationPrompt],
    max_new_tokens: int = 64,
    seed: int | Sequence[int] | None = None,
    **options: Any,
) -> list[Generated]:
    """Continue prompts. `options` are those of transformers' `generate`; greedy, unless they say otherwise.

    Prompts that leave less room than `max_new_tokens` in the model's context are generated one by one, as far as there
    is room, so a text does not depend on the rest of the batch. If such a text is cut, a warning says so.
    """
    check_count("max_new_tokens", max_new_tokens)
    inner: Any = unwrap_model(model)
    rows = [prompt.encode(tokenizer) for prompt in prompts]
    limits = [_limit(len(row), max_new_tokens, context_length(inner)) for row in rows]
    groups: dict[Any, list[int]] = {}
    for index, (prompt, limit) in enumerate(zip(prompts, limits, strict=True)):
        key = (prompt.text is None, limit, index if limit < max_new_tokens else None)
        groups.setdefault(key, []).append(index)
    found: dict[int, Generated] = {}
    with preserved_random():
        # Without a seed, of the number that the run would draw next.
        seeds = row_seeds(int(torch.randint(2**62, ())) if seed is None else seed, len(rows))
        for (is_chat, limit, _), places in groups.items():
            call = _Call(inner, tokenizer, is_chat, limit, [seeds[place] for place in places], options)
            texts = call([rows[place] for place in places])
            if limit < max_new_tokens and not texts[0].finished:
                size = len(rows[places[0]])
                logger.warning("a text ends after %d tokens, at the end of the model's context: its prompt has %d",
                               limit, size)  # fmt: skip
            found |= dict(zip(places, texts, strict=True))
    return [found[index] for index in range(len(rows))]


def _limit(size: int, wanted: int, context: int | None) -> int:
    """How many tokens to generate after a prompt of `size` tokens."""
    if context is None or size + wanted <= context:
        return wanted
    if size >= context:
        what = f"a prompt of fewer than {context} tokens, which is the context of the model"
        raise DataError(expected(what, f"{size} tokens", "Shorten it."))
    return context - size


def end_tokens(model: Any, tokenizer: Any, is_chat: bool = True) -> list[int]:
    """The tokens that end an answer: those of model and tokenizer and, in a chat, of the template's end of turn."""
    turn_end = end_of_turn(tokenizer) if is_chat else None
    return sorted({*stop_token_ids(model, tokenizer), *([] if turn_end is None else [turn_end])})


class _Call:
    """One call of transformers' `generate` for prompts that share stop tokens and length."""

    def __init__(
        self, model: Any, tokenizer: Any, is_chat: bool, limit: int, seeds: list[int], options: Mapping[str, Any]
    ) -> None:
        self.model, self.tokenizer, self.limit, self.seeds = model, tokenizer, limit, seeds
        self.options = dict(options)
        base = model.get_base_model() if hasattr(model, "get_base_model") else model  # of a PeftModel
        given = self.options.pop("generation_config", None)
        _check_options(self.options, given or base.generation_config)
        self._base = base
        self._config = copy.deepcopy(given or base.generation_config)
        given_stop = self.options.pop("eos_token_id", None)
        if given_stop is None:
            stops = set(end_tokens(base, tokenizer, is_chat))
        else:
            stops = {given_stop} if isinstance(given_stop, int) else set(given_stop)
        self.stops = sorted(stops)

    def __call__(self, rows: list[list[int]]) -> list[Generated]:
        # Left padding: generated tokens must follow the prompt.
        batch = pad([{"input_ids": row} for row in rows], self.tokenizer.pad_token_id, side="left", multiple_of=1)
        device = self.model.device
        inputs = {name: batch[name].to(device) for name in ("input_ids", "attention_mask")}
        width = inputs["input_ids"].shape[1]
        processors = self._sampling(width, device)
        if "stop_strings" in self.options:
            self.options.setdefault("tokenizer", self.tokenizer)
        own = self.options.pop("logits_processor", None) or []
        if streamer := self.options.get("streamer"):
            streamer.stops = frozenset(self.stops)
        with torch.no_grad(), eval_mode(self.model), self._replaced_config():
            tokens = self.model.generate(**inputs, logits_processor=[*own, *processors], **self.options)
        return [self._text(row[width:]) for row in tokens]

    def _sampling(self, width: int, device: Any) -> Any:
        """Logits processors that sample by the seeds of the rows, and what is left of the options."""
        samples = self._samples()
        given = {name: self.options.pop(name, None) for name in SAMPLING}
        values = {name: _first(given[name], getattr(self._config, name), _DEFAULTS[name]) for name in SAMPLING}
        for name in ("do_sample", *SAMPLING):
            setattr(self._config, name, None)
        if not samples:
            return []
        if any(self._used(name) for name in _OTHER_SAMPLING):
            self.options |= {"do_sample": True, **values}
            seed_generators(self.seeds[0])
            if torch.cuda.is_available():
                torch.cuda.manual_seed_all(self.seeds[0] % 2**63)
            return []
        sampling = SamplingOptions(self.limit, **{**values, "top_k": values["top_k"] or None})
        numbers = row_numbers(torch.tensor([seed % 2**63 for seed in self.seeds]), self.limit).to(device)
        return [*warpers(sampling), InverseSampling(numbers, width)]

    def _samples(self) -> bool:
        """Whether to sample: if the options say so, also by an option that is for sampling alone."""
        wanted = self.options.pop("do_sample", None)
        given = [name for name in SAMPLING if self.options.get(name) is not None]
        greedy = self.options.get("temperature") == 0
        if wanted is False and given and not greedy:
            raise BadArgument(expected(f"do_sample=True with {given[0]}", False, "Leave one of them out."))
        if wanted is True and greedy:
            raise BadArgument(expected("a positive temperature with do_sample=True", 0, "Leave do_sample out."))
        return not greedy and (bool(given) if wanted is None else bool(wanted))

    def _used(self, name: str) -> bool:
        value = _first(self.options.get(name), getattr(self._config, name, None))
        return value not in (None, 0, 1, 0.0, 1.0)

    @contextmanager
    def _replaced_config(self) -> Iterator[None]:
        """Replace the generation config of the model: what is not set in a call is taken from it."""
        before, made = self._base.generation_config, self._config
        made.eos_token_id, made.pad_token_id = self.stops or None, self.tokenizer.pad_token_id
        made.max_length, made.max_new_tokens = None, self.limit
        self._base.generation_config = made
        try:
            yield
        finally:
            self._base.generation_config = before

    def _text(self, row: Tensor) -> Generated:
        ids = row.tolist()
        end = next((place for place, token in enumerate(ids) if token in self.stops), None)
        text = self.tokenizer.decode(ids[:end], skip_special_tokens=True)
        count = len(ids) if end is None else end + 1
        return Generated(text, count, end is not None or count < self.limit)


def _check_options(options: Mapping[str, Any], config: Any) -> None:
    """Reject options that `generate` does not have, or that change what it returns."""
    for name, do in _OF_PROMPTS.items():
        if options.get(name) not in (None, False, 1):
            raise BadArgument(expected(f"no {name}", options[name], do))
    known = {*vars(config), *_CALL_OPTIONS, "tokenizer", "use_model_defaults"}
    unknown = next((name for name in options if name not in known), None)
    if unknown is not None:
        hint = did_you_mean(unknown, [name for name in known if not name.startswith("_")])
        raise BadArgument(expected("options of transformers' generate", unknown, hint))


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


@contextmanager
def preserved_random() -> Iterator[None]:
    """Restore all random number generators on exit, also those of the GPUs."""
    devices = list(range(torch.cuda.device_count())) if torch.cuda.is_initialized() else []
    with preserved_generators(), torch.random.fork_rng(devices):
        yield


class TextStream:
    """The pieces of a text while it is generated, in a thread of its own; `result` is the whole afterwards.

    `close()`, or leaving the loop over it by an exception, stops the generation after the current token; the result is
    then what was generated so far.
    """

    def __init__(
        self, model: nn.Module, tokenizer: Any, prompt: GenerationPrompt, max_new_tokens: int = 64, **options: Any
    ):
        from transformers import StoppingCriteriaList

        self.result: Generated | None = None
        self.interrupted = False
        self._error: BaseException | None = None
        self._stop = threading.Event()
        self._pieces = _streamer(tokenizer)
        criteria = StoppingCriteriaList([*(options.pop("stopping_criteria", None) or ()), self._interruption])
        given = {**options, "streamer": self._pieces, "stopping_criteria": criteria}
        self._arguments = (model, tokenizer, [prompt], max_new_tokens)
        self._thread = threading.Thread(target=self._run, kwargs=given, name="generation", daemon=True)

    def __iter__(self) -> Iterator[str]:
        if self._thread.ident is None:
            self._thread.start()
        try:
            yield from (piece for piece in self._pieces if piece)
            self._thread.join()
        finally:
            self.close()
        if self._error is not None:
            raise self._error

    def close(self) -> None:
        """Stop the generation, and wait for the token that is being computed."""
        if self._thread.is_alive():
            self._stop.set()
            self._thread.join()

    def _run(self, **options: Any) -> None:
        try:
            (self.result,) = generate_texts(*self._arguments, **options)
        except BaseException as error:  # raised where the text is read
            self._error = error
        finally:
            self.interrupted = self._stop.is_set()
            self._pieces.on_finalized_text("", stream_end=True)

    def _interruption(self, input_ids: Tensor, scores: Any, **_: Any) -> Tensor:
        return torch.full((len(input_ids),), self._stop.is_set(), device=input_ids.device)


def _streamer(tokenizer: Any) -> Any:
    from transformers import TextIteratorStreamer

    class Streamer(TextIteratorStreamer):
        """Leaves stop tokens out, which some tokenizers do not know to be special."""

        stops: frozenset[int] = frozenset()

        def put(self, value: Tensor) -> None:
            if value.ndim == 1 and len(value) == 1 and not self.next_tokens_are_prompt and int(value) in self.stops:
                return
            super().put(value)

    return Streamer(tokenizer, skip_prompt=True, skip_special_tokens=True)
