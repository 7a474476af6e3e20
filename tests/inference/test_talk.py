"""Language models from `trainformer.load` that chat and stream, from runs, folders, adapters and the hub's cache."""

import dataclasses
import json
import shutil
import signal
import threading
from pathlib import Path

import peft
import pytest
import torch
import transformers

import trainformer
from text_toys import chat_tokenizer, conversations, llama, trainer_for
from trainformer.checkpointing.manifest import Manifest
from trainformer.core.errors import BadArgument, DataError
from trainformer.inference import TextPredictor
from trainformer.inference.conversation import Conversation
from trainformer.tasks import CausalLM

TURNS = [{"role": "user", "content": "the quick fox"}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run (run), and a model of transformers that it began with (base)."""
    place = tmp_path_factory.mktemp("talk")
    torch.manual_seed(0)
    transformers.LlamaForCausalLM(llama()).save_pretrained(place / "base")
    chat_tokenizer().save_pretrained(place / "base")
    task = CausalLM(str(place / "base"), max_length=64, cache_dir=place / "tokens")
    trainer_for(task, conversations(), run_dir=place / "run", max_steps=2).fit()
    return place


@pytest.fixture(scope="module")
def model(folder):
    return trainformer.load(folder / "run", device="cpu")


def test_chatting_and_streaming(folder, model):
    assert isinstance(model, TextPredictor)
    wanted = model.task.generate(TURNS, max_new_tokens=8)[0]
    assert model.chat(TURNS, max_new_tokens=8) == model.chat("the quick fox", max_new_tokens=8) == wanted
    assert model.generate([TURNS], max_new_tokens=8)[0]["text"] == model(TURNS, max_new_tokens=8)["text"] == wanted
    for prompt in (TURNS, "the quick"):
        sampled = {"temperature": 1.0, "seed": [7], "max_new_tokens": 8}
        stream = model.stream(prompt, **sampled)
        pieces = list(stream)
        assert "".join(pieces) == stream.result.text == model.task.generate(prompt, **sampled)[0]
        assert (stream.result.tokens, stream.interrupted) == (8, False)
    (folder / "asked.jsonl").write_text(json.dumps({"messages": TURNS}) + "\n")
    assert model(folder / "asked.jsonl", max_new_tokens=8)[0]["text"] == wanted
    assert model.count_tokens(TURNS) == len(
        model.tokenizer.apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)
    )


def test_leaving_a_stream_stops_the_generation(model):
    seen = []

    def slowly(input_ids, scores):
        seen.append(input_ids.shape[1])
        return scores

    before = threading.active_count()
    stream = model.stream("the", max_new_tokens=60, logits_processor=[slowly], eos_token_id=319)
    for _ in stream:
        break
    stream.close()
    assert stream.interrupted or stream.result.tokens == 60  # it may have been faster
    assert len(seen) == stream.result.tokens
    assert threading.active_count() == before

    def failing(input_ids, scores):
        raise RuntimeError("no more tokens")

    with pytest.raises(RuntimeError, match="no more tokens"):
        list(model.stream("the", logits_processor=[failing]))
    with pytest.raises(BadArgument, match="one text or one conversation"):
        model.stream(["a", "b"])


def test_a_signal_stops_the_answer_and_not_the_program(model):
    """Ctrl-C while the main thread waits for the next piece."""

    def interrupted(input_ids, scores):
        if input_ids.shape[1] == 4:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGINT)
            assert stream._stop.wait(60)
        return scores

    stream = model.stream("the", max_new_tokens=40, logits_processor=[interrupted], eos_token_id=319)
    with pytest.raises(KeyboardInterrupt):
        list(stream)
    assert stream.interrupted
    assert 0 < stream.result.tokens < 40


def test_which_models_open(folder, model, tmp_path, monkeypatch):
    wanted = model.chat(TURNS, max_new_tokens=6)
    checkpoint = folder / "run" / "checkpoints" / "step_00000002"
    assert trainformer.load(checkpoint).chat(TURNS, max_new_tokens=6) == wanted
    base = transformers.AutoModelForCausalLM.from_pretrained(folder / "base")
    ids = torch.tensor([chat_tokenizer().apply_chat_template(TURNS, add_generation_prompt=True, return_dict=False)])
    reference = chat_tokenizer().decode(
        base.generate(ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :], skip_special_tokens=True
    )
    assert trainformer.load(folder / "base").chat(TURNS, max_new_tokens=6) == reference
    half = trainformer.load(folder / "run", dtype="bf16")
    assert {p.dtype for p in half.model.parameters()} == {torch.bfloat16}
    assert isinstance(half.chat(TURNS, max_new_tokens=3), str)
    # An adapter that peft wrote, with its base by name, or moved.
    adapted = peft.get_peft_model(base, peft.LoraConfig(task_type="CAUSAL_LM", init_lora_weights=False))
    text = chat_tokenizer().decode(
        adapted.eval().generate(input_ids=ids, max_new_tokens=6, do_sample=False)[0, ids.shape[1] :],
        skip_special_tokens=True,
    )
    adapted.save_pretrained(tmp_path / "adapter")
    assert trainformer.load(tmp_path / "adapter").chat(TURNS, max_new_tokens=6) == text != reference
    moved = shutil.copytree(folder / "base", tmp_path / "moved")
    assert trainformer.load(tmp_path / "adapter", base=moved).chat(TURNS, max_new_tokens=6) == text
    # The hub, as far as it is in the cache.
    cache = tmp_path / "cache" / "models--some--model"
    shutil.copytree(folder / "base", cache / "snapshots" / "abc")
    (cache / "refs").mkdir()
    (cache / "refs" / "main").write_text("abc")
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("transformers.utils.hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert trainformer.load("some/model").chat(TURNS, max_new_tokens=6) == reference
    assert trainformer.load("hf:some/model").chat(TURNS, max_new_tokens=6) == reference


def test_quantized_in_memory(folder, model):
    pytest.importorskip("torchao")
    small = trainformer.load(folder / "run", quantize="int8-weight-only")
    logits = [each.model(torch.arange(8)[None]).logits for each in (model, small)]
    assert 0 < (logits[0] - logits[1]).abs().max() < 0.1
    assert len(small.chat(TURNS, max_new_tokens=3)) > 0


def test_what_does_not_open(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder)
    Path("runs").mkdir(exist_ok=True)
    with pytest.raises(DataError, match="There is nothing at this path"):
        trainformer.load("runs/pest")  # a path that is mistyped is not looked for on the hub
    with pytest.raises(DataError, match="name of a model on the Hugging Face Hub"):
        trainformer.load("nobody/nothing")
    jax = shutil.copytree(folder / "run" / "checkpoints" / "step_00000002", tmp_path / "jax")
    manifest = Manifest.read(jax)
    components = {"state" if key == "model" else key: files for key, files in manifest.components.items()}
    (jax / "manifest.json").write_bytes(dataclasses.replace(manifest, components=components).to_bytes())
    with pytest.raises(DataError, match=r"trainer\.json in .*, which describes the trainer"):
        trainformer.load(jax)
    for options, said in (
        ({"dtype": "int3"}, "one of fp32"),
        ({"quantize": "int3"}, "quantize"),
        ({"base": "x"}, "a base for an adapter alone"),
    ):
        with pytest.raises(BadArgument, match=said):
            trainformer.load(folder / "run", **options)


def test_a_conversation_forgets_its_oldest_turns_aloud(model):
    talk = Conversation(model, "be brief", max_new_tokens=6, seed=3, temperature=1.0)
    shown = []
    stream = model.stream

    def spy(prompt, **options):
        shown.append([turn["content"] for turn in prompt])
        return stream(prompt, **options)

    model.stream = spy
    try:
        answers, notices = [], []
        for word in ("the fox", "a dog", "seven pies", "the wizards"):
            answers.append("".join(talk.ask(word)))
            notices += talk.notices
    finally:
        del model.stream
    assert [turn["content"] for turn in talk.turns[1::2]] == answers
    assert len(talk.messages) == 9
    assert shown[0] == ["be brief", "the fox"]
    dropped = 1 + len(talk.turns[:-1]) - len(shown[-1])
    assert dropped in (2, 4, 6)
    assert shown[-1] == ["be brief", *(turn["content"] for turn in talk.turns[dropped:-1])]
    assert any(f"the {dropped} oldest messages are left out" in notice for notice in notices)
    # The same seed answers the same; another attempt, otherwise.
    last = talk.turns[-1]["content"]
    assert talk.undo() == "the wizards"
    assert "".join(talk.ask("the wizards")) == last
    assert "".join(talk.retry()) != last
    with pytest.raises(DataError, match="fewer than 64 tokens"):
        list(talk.ask("a dog " * 60))
    assert len(talk.turns) == 8
    talk.reset()
    with pytest.raises(BadArgument, match="no question yet"):
        talk.retry()
    plain = Conversation(model, template=False, max_new_tokens=4)
    first = "".join(plain.ask("the"))
    list(plain.ask(" fox"))
    file = plain.save("texts.jsonl")
    assert json.loads(file.read_text())["text"].startswith(f"the{first} fox")
