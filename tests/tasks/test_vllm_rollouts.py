"""Completions from a vLLM server: what is asked of it, how weights reach it, and what happens when it fails."""

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import grpo_toys as toys
import pytest
import torch
from grpo_toys import make_task, make_trainer
from transformers import AutoModelForCausalLM

from trainformer.adapters import LoRA
from trainformer.core.errors import BadArgument, MissingDependency, TrainformerError
from trainformer.tasks.language.rollouts import VLLMEngine, VLLMServer


class Fake(ThreadingHTTPServer):
    """Answers like vLLM: greedy tokens of the weights that it was told to load, with their log probabilities."""

    def __init__(self, folder):
        super().__init__(("127.0.0.1", 0), Answer)
        self.folder = Path(folder)
        self.calls = []
        self.model = toys.model(torch.float32)
        self.names = {"base"}
        self.lacks_tokens = self.fails = False


class Answer(BaseHTTPRequestHandler):
    def log_message(self, *_):
        pass

    def reply(self, content, status=200):
        body = json.dumps(content).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def do_GET(self):
        self.reply({"data": [{"id": "base"}]})

    def do_POST(self):
        server = self.server
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server.calls.append((self.path, body))
        if server.fails:
            self.reply({"error": "no such adapter"}, 404)
        elif self.path == "/v1/completions":
            self.reply({"choices": [self.complete(body)]})
        else:
            if self.path == "/collective_rpc":
                server.model = AutoModelForCausalLM.from_pretrained(server.folder, dtype=torch.float32)
            elif self.path == "/v1/load_lora_adapter":
                assert (Path(body["lora_path"]) / "adapter_config.json").is_file()
                server.names.add(body["lora_name"])
            elif self.path == "/v1/unload_lora_adapter":
                server.names.remove(body["lora_name"])
            self.reply({})

    @torch.no_grad()
    def complete(self, body):
        assert body["model"] in self.server.names
        generator = torch.Generator().manual_seed(body["seed"] % 2**31)
        ids, tokens, logs = list(body["prompt"]), [], []
        for _ in range(body["max_tokens"]):
            probabilities = self.server.model(torch.tensor([ids])).logits[0, -1].softmax(-1)
            token = int(torch.multinomial(probabilities, 1, generator=generator))
            ids.append(token)
            tokens.append(token)
            logs.append(float(probabilities[token].log()))
            if token in body["stop_token_ids"]:
                break
        choice = {"text": "", "logprobs": {"token_logprobs": logs}}
        return choice if self.server.lacks_tokens else {**choice, "token_ids": tokens}


@pytest.fixture
def server(tmp_path):
    made = Fake(tmp_path / "served")
    thread = threading.Thread(target=made.serve_forever, daemon=True)
    thread.start()
    yield made
    made.shutdown()
    made.server_close()


def address(server):
    return f"http://127.0.0.1:{server.server_port}/"


def run(server, steps, **options):
    generator = VLLMServer(address(server), weights=server.folder, requests=4)
    task = make_task("dapo", toys.model(torch.float32), generator=generator, temperature=1.0, top_k=200, **options)
    return make_trainer("dapo", task=task, batch_size=2, max_steps=steps, lr=1e-2, run_dir="run")


def test_a_server_samples_with_the_weights_of_each_step(server):
    trainer = run(server, 3).fit()
    records = [record for record in trainer.state.log_history if "train/loss" in record]
    for record in records:  # the server has the weights of the step: its log probabilities are the model's
        assert record["train/sampling/logp_difference_max"] < 1e-4
        assert record["train/sampling/correction"] == pytest.approx(1, abs=1e-3)
    paths = [path for path, _ in server.calls]
    assert paths.count("/collective_rpc") == paths.count("/reset_prefix_cache") == 4  # three steps, and the evaluation
    asked = [body for path, body in server.calls if path == "/v1/completions"]
    assert len({body["seed"] for body in asked[:18]}) == 18
    assert asked[0]["top_k"] == 200
    assert asked[0]["max_tokens"] == 8
    assert 1 in asked[0]["stop_token_ids"]
    before = toys.model(torch.float32).state_dict()
    assert any(not torch.equal(value, before[name]) for name, value in server.model.state_dict().items())


def test_adapters_get_a_new_name_with_each_update(server):
    run(server, 2, adapter=LoRA(r=2)).fit()
    loaded = [body["lora_name"] for path, body in server.calls if path == "/v1/load_lora_adapter"]
    assert loaded == ["policy-1", "policy-2", "policy-3"]
    assert server.names == {"base", "policy-3"}
    used = [body["model"] for path, body in server.calls if path == "/v1/completions"]
    assert used[0] == "policy-1"
    assert used[-1] == "policy-3"


def test_a_server_that_fails_is_an_error_that_says_so(server):
    generator = VLLMServer(address(server), weights=server.folder)
    options = {"stop_ids": [1], "drawn": [0]}
    sampling = make_task("dapo")._sampling(1.0)
    server.lacks_tokens = True
    with pytest.raises(TrainformerError, match="token_ids"):
        generator.generate([[5]], [1], sampling, **options)
    server.fails = True
    with pytest.raises(TrainformerError, match=r"status 404.*no such adapter"):
        generator.generate([[5]], [1], sampling, **options)
    nobody = VLLMServer("http://127.0.0.1:9", weights="w", timeout=2)
    with pytest.raises(TrainformerError, match="does not answer"):
        nobody.generate([[5]], [1], sampling, **options)
    with pytest.raises(BadArgument, match="http://host:port"):
        VLLMServer("127.0.0.1:8000", weights="w")
    with pytest.raises(MissingDependency, match="vllm"):
        VLLMEngine("gpt2").generate([[5]], [1], sampling, **options)
