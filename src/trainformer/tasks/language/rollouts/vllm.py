"""Completions sampled by vLLM: through its server, or in this process where it is installed.

The weights are handed over before each step: an adapter as files that the server loads under a new name, whole models
as the files that the server was started with, which it reads again.
"""

from __future__ import annotations

import copy
import importlib
import json
import urllib.error
import urllib.request
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from trainformer.adapters.base import is_adapted
from trainformer.adapters.export import merge_adapter
from trainformer.core.errors import BadArgument, MissingDependency, TrainformerError, expected
from trainformer.models.generation import SamplingOptions
from trainformer.tasks.language.rollouts.generation import Generated
from trainformer.utils.distributed import rank, world_size

_SEEDS = 1 << 62


@dataclass
class VLLMServer:
    """Samples through the OpenAI-compatible server of vLLM.

    For whole models start it with the folder of the weights: ``VLLM_SERVER_DEV_MODE=1 vllm serve FOLDER``; `weights` is
    the same folder, which both sides can reach, and is overwritten. For adapters start it with
    ``VLLM_ALLOW_RUNTIME_LORA_UPDATING=1 vllm serve MODEL --enable-lora``; `weights` is an empty folder. Add
    ``--logprobs-mode processed_logprobs``, so that log probabilities are those of the distribution that was sampled.

    Args:
        url: Of the server, for instance ``http://127.0.0.1:8000``.
        weights: The folder for the weights.
        requests: Requests at the same time.
        timeout: Seconds to wait for an answer.

    >>> VLLMServer("http://127.0.0.1:8000", weights="weights").requests
    64
    """

    url: str
    weights: str | Path
    requests: int = 64
    timeout: float = 600.0
    _model: str | None = field(default=None, init=False)
    _versions: int = field(default=0, init=False)

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url.startswith(("http://", "https://")):
            raise BadArgument(expected("url to be the address of a server, http://host:port", self.url))
        self.url = self.url.rstrip("/")
        if self.requests < 1 or not self.timeout > 0:
            raise BadArgument(expected("requests of at least 1 and a positive timeout", (self.requests, self.timeout)))

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        options: SamplingOptions,
        *,
        stop_ids: Sequence[int],
        drawn: Sequence[int],
    ) -> Generated:
        """One request per prompt, each with its seed."""
        if self._model is None:
            self._model = self._call("/v1/models")["data"][0]["id"]
        common = {"model": self._model, "logprobs": 0, "return_token_ids": True, "skip_special_tokens": False}
        common |= {"stop_token_ids": list(stop_ids), **_sampling(options)}
        bodies = [
            {**common, "prompt": list(ids), "seed": _seed(seed, begin)}
            for ids, seed, begin in zip(prompts, seeds, drawn, strict=True)
        ]
        with ThreadPoolExecutor(min(self.requests, len(bodies))) as pool:
            found = list(pool.map(self._complete, bodies))
        return Generated([tokens for tokens, _ in found], [log_probs for _, log_probs in found])

    def _complete(self, body: dict[str, Any]) -> tuple[list[int], list[float]]:
        choice = self._call("/v1/completions", body)["choices"][0]
        tokens = choice.get("token_ids")
        log_probs = (choice.get("logprobs") or {}).get("token_logprobs")
        if not isinstance(tokens, list) or not isinstance(log_probs, list) or len(tokens) != len(log_probs):
            do = "It needs a version of vLLM with `return_token_ids` (0.10.2 or newer)."
            raise TrainformerError(expected("the server to return token_ids and their logprobs", sorted(choice), do))
        return tokens, [float("nan") if value is None else float(value) for value in log_probs]

    def update_weights(self, model: nn.Module) -> None:
        """Write the weights and make the server load them; the first process does it for all."""
        self._versions += 1
        before, folder, inner = self._model, Path(self.weights), model
        adapted = is_adapted(inner)
        name = f"policy-{self._versions}"
        if rank() == 0:
            target: Any = inner
            if adapted:
                target.save_pretrained(str(folder / name))
                self._call("/v1/load_lora_adapter", {"lora_name": name, "lora_path": str((folder / name).resolve())})
                if before is not None and before.startswith("policy-"):
                    self._call("/v1/unload_lora_adapter", {"lora_name": before})
            else:
                target.save_pretrained(str(folder))
                self._call("/collective_rpc", {"method": "reload_weights"})
            self._call("/reset_prefix_cache", {})
        if world_size() > 1:
            dist.barrier()
        if adapted:
            self._model = name

    def _call(self, path: str, body: Any = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data, {"Content-Type": "application/json"})
        try:
            with urllib.request.urlopen(request, timeout=self.timeout) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            said = error.read().decode(errors="replace")[:200]
            raise TrainformerError(f"The vLLM server refused {path} with status {error.code}: {said}") from error
        except (urllib.error.URLError, TimeoutError, ConnectionError) as error:
            do = "Is it running, and is `url` right?"
            raise TrainformerError(f"The vLLM server at {self.url} does not answer {path}: {error}. {do}") from error
        try:
            return json.loads(text)
        except ValueError:
            return text.decode(errors="replace")


@dataclass
class VLLMEngine:
    """Samples with vLLM in this process. `options` are those of `vllm.LLM`, such as ``gpu_memory_utilization=0.3``.

    Args:
        model: Name or folder of the model to start with. Its weights are replaced before the first sample.
        options: Arguments of `vllm.LLM`.
    """

    model: str
    options: dict[str, Any] = field(default_factory=dict)
    _engine: Any = field(default=None, init=False, repr=False)

    def _started(self) -> Any:
        if self._engine is None:
            vllm = _vllm()
            defaults = {"logprobs_mode": "processed_logprobs", "enable_sleep_mode": False}
            self._engine = vllm.LLM(model=self.model, **{**defaults, **self.options})
        return self._engine

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        seeds: Sequence[int],
        options: SamplingOptions,
        *,
        stop_ids: Sequence[int],
        drawn: Sequence[int],
    ) -> Generated:
        """All prompts at once, each with its seed."""
        vllm = _vllm()
        common = {"logprobs": 0, "stop_token_ids": list(stop_ids), "skip_special_tokens": False, **_sampling(options)}
        settings = [
            vllm.SamplingParams(**common, seed=_seed(seed, begin)) for seed, begin in zip(seeds, drawn, strict=True)
        ]
        inputs = [{"prompt_token_ids": list(ids)} for ids in prompts]
        outputs = [found.outputs[0] for found in self._started().generate(inputs, settings, use_tqdm=False)]
        tokens = [list(output.token_ids) for output in outputs]
        log_probs = [
            [by_token[token].logprob for token, by_token in zip(ids, output.logprobs, strict=True)]
            for ids, output in zip(tokens, outputs, strict=True)
        ]
        return Generated(tokens, log_probs)

    def update_weights(self, model: nn.Module) -> None:
        """Copy the weights, with the adapter merged, into the engine."""
        plain = merge_adapter(copy.deepcopy(model)) if is_adapted(model) else model
        worker = self._started().llm_engine.model_executor.driver_worker
        worker.model_runner.model.load_weights((name, p.detach()) for name, p in plain.named_parameters())
        self._started().reset_prefix_cache()


def _vllm() -> Any:
    try:
        return importlib.import_module("vllm")
    except ModuleNotFoundError as error:
        raise MissingDependency("'vllm' is needed to sample in this process. Install it: pip install vllm") from error


def _sampling(options: SamplingOptions) -> dict[str, Any]:
    return {
        "max_tokens": options.max_new_tokens,
        "temperature": options.temperature,
        "top_p": options.top_p,
        "top_k": options.top_k or -1,
        "min_p": options.min_p or 0.0,
        "repetition_penalty": options.repetition_penalty,
    }


def _seed(seed: int, drawn: int) -> int:
    """Another seed in each turn: the engine begins its random numbers anew."""
    return (seed + 0x9E3779B97F4A7C15 * drawn) % _SEEDS
