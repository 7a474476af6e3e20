"""`trainformer chat` and `generate`: pipes and terminals, commands of the chat, rows and texts."""

import io
import json
import sys
from pathlib import Path

import pytest
import torch

from text_toys import chat_tokenizer, conversations, llama, sentences, trainer_for
from trainformer.cli import app, chat
from trainformer.data.text.generation import GenerationPrompt
from trainformer.loggers import read_jsonl
from trainformer.tasks import CausalLM

LENGTH = ["--device=cpu", "--max-new-tokens=6"]


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    """A run that learned conversations (talk), with two checkpoints, and one without a chat template (text)."""
    place = tmp_path_factory.mktemp("runs")
    torch.manual_seed(0)
    task = CausalLM(llama(), max_length=64, tokenizer=chat_tokenizer(), cache_dir=place / "tokens")
    trainer_for(task, conversations(), run_dir=place / "talk", max_steps=2, save_every="1steps", save_last=2).fit()
    tokenizer = chat_tokenizer()
    tokenizer.chat_template = None
    task = CausalLM(llama(), max_length=64, tokenizer=tokenizer, cache_dir=place / "tokens")
    trainer_for(task, sentences(), run_dir=place / "text", max_steps=1).fit()
    return place


@pytest.fixture
def talk(runs, monkeypatch, capfd):
    """Run `trainformer chat` on lines of a pipe: the exit code, the answers and the notes."""

    def call(*lines, name="talk", options=()):
        monkeypatch.setattr(sys, "stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        code = app.main(["chat", str(runs / name), *LENGTH, *options])
        out, err = capfd.readouterr()
        return code, out, " ".join(err.split())

    return call


def answers(runs, *turns, step=2, **options):
    """What the model says at the end of a conversation, and one line more."""
    task = CausalLM(str(runs / "talk" / "checkpoints" / f"step_0000000{step}"), max_length=64)
    return task.generate([dict(zip(("role", "content"), turn, strict=True)) for turn in turns], 6, **options)[0] + "\n"


def test_a_pipe_has_a_message_per_line_and_the_answers_alone(runs, talk):
    first = answers(runs, ("user", "the fox"))
    asked = [("user", "the fox"), ("assistant", first[:-1]), ("user", "/a dog")]
    code, out, err = talk("the fox", "", "//a dog")
    assert (code, out) == (0, first + answers(runs, *asked))
    assert "cut after 6 tokens" in err
    system = [("system", "be"), ("user", "the fox")]
    assert talk("the fox", options=["--system=be"])[1] == answers(runs, *system)
    other = ["--checkpoint=1", "--temperature=1", "--seed=5"]
    code, out, _ = talk("the fox", options=other)
    assert code == 0
    assert out == talk("the fox", options=other)[1] != talk("the fox", options=[*other[:2], "--seed=6"])[1]


def test_commands_of_the_chat(runs, talk):
    first = answers(runs, ("user", "the fox"))
    code, out, err = talk(
        "the fox", "/retry", "/undo", "/system be", "/set temperature 0.5", "/set top-k=3", "/set temperature none",
        "/set top_k none", "the fox", "/save said.jsonl", "/history", "/reset", "/undo", "/help", "/quit", "never",
    )  # fmt: skip
    last = answers(runs, ("system", "be"), ("user", "the fox"))
    assert (code, out) == (0, first + first + last)
    assert read_jsonl(Path("said.jsonl")) == [
        {
            "messages": [
                {"role": "system", "content": "be"},
                {"role": "user", "content": "the fox"},
                {"role": "assistant", "content": last[:-1]},
            ]
        }
    ]
    for said in ("[removed: the fox]", "system: be", "temperature 0.5", "top_k 3", "nothing to remove", "/retry"):
        assert said in err


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("/hlep", "Did you mean 'help'"),
        ("/set tmperature 1", "Did you mean 'temperature'"),
        ("/set top_p 3", "top_p to be greater than 0"),
        ("/set top_k many", "a number for top_k"),
        ("/set seed none", "a number for seed"),
        ("/save", "the name of a file"),
        ("/save x.jsonl", "no conversation yet"),
        ("/retry", "no question yet"),
        ("a dog " * 80, "fewer than 64 tokens"),
    ],
)
def test_mistakes_in_a_pipe_end_it(talk, line, said):
    code, out, err = talk(line, "the fox")
    assert (code, out) == (1, "")
    assert said in err


def test_a_model_without_a_template(runs, talk):
    code, out, err = talk("the", name="text")
    assert (code, out) == (1, "")
    assert "has no chat template" in err
    assert "--no-template" in err
    code, out, _ = talk("the", " fox", name="text", options=["--no-template"])
    task = CausalLM(str(next((runs / "text" / "checkpoints").glob("step_*"))), max_length=64)
    (first,) = task.generate("the", 6)
    (second,) = task.generate(f"the{first} fox", 6)
    assert (code, out) == (0, f"{first}\n{second}\n")
    assert talk("the", name="text", options=["--no-template", "--system=be"])[0] == 1


class Typed(chat.Terminal):
    """A terminal at which somebody types; an exception is typed, too."""

    def __init__(self, *lines):
        self.is_interactive = True
        self.lines = list(lines)
        self.written, self.noted = "", []
        self.interrupts = 0

    def _line(self, prompt):
        return self.lines.pop(0) if self.lines else None

    def write(self, text):
        self.written += text
        if self.interrupts and text.strip():
            self.interrupts -= 1
            raise KeyboardInterrupt

    def note(self, text):
        self.noted.append(text)


def test_a_terminal(runs):
    import trainformer
    from trainformer.inference.conversation import Conversation

    model = trainformer.load(runs / "talk", device="cpu")
    conversation = Conversation(model, max_new_tokens=30)
    terminal = Typed("the \\", "fox", '"""a', 'dog"""', "/nothing", "seven", "/set")
    terminal.interrupts = 1  # Ctrl-C during the first answer
    chat.Chat(conversation, terminal).run()
    assert [turn["content"] for turn in conversation.turns[::2]] == ["the \nfox", "a\ndog", "seven"]
    assert terminal.noted[0] == "[stopped]" or "cut after" in terminal.noted[0]  # it may have been faster
    assert any(noted.startswith("error: Expected a command") for noted in terminal.noted)
    assert len(conversation.turns) == 6


def test_what_a_model_writes_cannot_steer_the_terminal(monkeypatch, capsys):
    terminal = chat.Terminal()
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True, raising=False)
    terminal.write("red\x1b[2J\x07 a\tb\nüß")
    assert capsys.readouterr().out == "red�[2J� a\tb\nüß"


def generate(runs, *options):
    return app.main(["generate", str(runs / "talk"), *LENGTH, *options])


def test_generate_prints_texts_or_writes_rows(runs, capsys, monkeypatch):
    task = CausalLM(str(runs / "talk" / "checkpoints" / "step_00000002"), max_length=64)
    texts = task.generate(["the", "a dog"], 6)
    assert generate(runs, "--prompt", "the", "--prompt", "a dog") == 0
    assert capsys.readouterr().out == "".join(f"{text}\n" for text in texts)
    Path("asked.jsonl").write_text(
        '{"id": "x", "prompt": "the"}\n{"id": "y", "prompt": "a dog", "completion": "barks"}\n'
        '{"id": "z", "messages": [{"role": "user", "content": "seven"}]}\n'
    )
    sampled = ["--temperature=1.5", "--seed=4", "--file=asked.jsonl"]
    for size in ("1", "3"):
        assert generate(runs, *sampled, f"--batch-size={size}", f"--out=rows{size}.jsonl") == 0
    rows = read_jsonl(Path("rows1.jsonl"))
    assert rows == read_jsonl(Path("rows3.jsonl"))
    assert [(row["id"], row["target"]) for row in rows] == [("x", None), ("y", "barks"), ("z", None)]
    assert rows[2]["prompt"] == "<|user|>seven</s><|assistant|>"
    assert generate(runs, "--file=asked.jsonl", "--system=be") == 0
    shown = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [row["prompt"] for row in shown] == [
        f"<|system|>be</s><|user|>{said}</s><|assistant|>" for said in ("the", "a dog", "seven")
    ]
    assert [row["id"] for row in shown] == ["x", "y", "z"]
    turn = GenerationPrompt(messages=[{"role": "user", "content": "the"}])
    monkeypatch.setattr(sys, "stdin", io.StringIO("the\n\n"))
    assert generate(runs, "--file=-", "--chat", "--json") == 0
    assert json.loads(capsys.readouterr().out)["text"] == task.generate_texts([turn], 6)[0].text


@pytest.mark.parametrize(
    ("options", "code", "said"),
    [
        (["--prompt=x", "--out=rows.txt"], 2, "expected a file that ends in"),
        (["--prompt=x", "--file=y"], 2, "not allowed with"),
        ([], 2, "one of the arguments --prompt --file is required"),
        (["--prompt=x", "--top-p=3"], 1, "top_p to be greater than 0"),
        (["--prompt=x", "--chat-template-kwargs={a: 1}"], 1, "Pass --chat"),
        (["--prompt=x", "--chat-template-kwargs=[a]"], 2, "expected a mapping"),
        (["--file=nowhere.jsonl"], 1, "nowhere.jsonl"),
        (["--prompt=x", "--checkpoint=7"], 1, "a step with a checkpoint"),
        (["--prompt=x", "--temprature=1"], 2, "--temperature"),
    ],
)
def test_mistakes_of_generate(runs, capsys, options, code, said):
    try:
        found = generate(runs, *options)
    except SystemExit as error:
        found = error.code
    assert found == code
    assert said in " ".join(capsys.readouterr().err.split())
