"""`task.generate` and `Trainer.predict` of causal language models: texts and conversations, stop tokens, seeds."""

import csv
import random

import numpy as np
import pytest
import torch
from tokenizers import processors

from text_toys import CHATML, chat_tokenizer, check_equal, conversations, gpt2, llama, sentences, trainer_for
from trainformer.callbacks import TextSamples
from trainformer.core.errors import BadArgument, DataError
from trainformer.data.text.generation import GenerationPrompt, end_of_turn, read_prompt
from trainformer.loggers import read_jsonl
from trainformer.tasks import CausalLM
from trainformer.tasks.language.generation import generate_texts

TURNS = [{"role": "user", "content": "the quick fox"}]
LONGER = [*TURNS, {"role": "assistant", "content": "jumps"}, {"role": "user", "content": "over a dog"}]
TOOLS = [{"type": "function", "function": {"name": "bake", "parameters": {}}}]
# It ends a turn with another token than the tokenizer's EOS, and shows its options.
OTHER_END = (
    "{{ bos_token }}{% if tools %}[{{ tools[0]['function']['name'] }}]{% endif %}{% if style %}({{ style }}){% endif %}"
    "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}<|system|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def adding_bos(template=OTHER_END):
    """A tokenizer that begins a text with BOS, as Llama's does, and so does its template."""
    made = chat_tokenizer(template)
    around = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    made.backend_tokenizer.post_processor = around
    return made


@pytest.fixture(scope="module")
def task():
    torch.manual_seed(0)
    made = CausalLM(llama(), max_length=32, tokenizer=adding_bos())
    made.model.eval()
    return made


def greedy(task, ids, count, stops=()):
    """The most likely tokens one after the other, without a cache."""
    ids, new = list(ids), []
    for _ in range(count):
        with torch.no_grad():
            token = int(task.model(torch.tensor([ids + new])).logits[0, -1].argmax())
        if token in stops:
            break
        new.append(token)
    return task.text_tokenizer.decode(new, skip_special_tokens=True)


def forcing(*tokens):
    """A logits processor that makes the model say these tokens."""

    def process(input_ids, scores):
        forcing.prompt = input_ids.shape[1] if forcing.prompt is None else forcing.prompt
        place = min(input_ids.shape[1] - forcing.prompt, len(tokens) - 1)
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([tokens[place]]), 0.0)

    forcing.prompt = None
    return [process]


def test_conversations_are_answered_from_the_tokens_of_their_template(task):
    tokenizer = task.text_tokenizer
    options = {"tools": TOOLS, "style": "short"}
    for turns in (TURNS, LONGER):
        ids = tokenizer.apply_chat_template(turns, add_generation_prompt=True, return_dict=False, **options)
        assert ids.count(tokenizer.bos_token_id) == 1
        found = task.generate(turns, max_new_tokens=6, tools=TOOLS, chat_template_kwargs={"style": "short"})
        assert found == [greedy(task, ids, 6)]
    # Texts, conversations and records in one call, padded, and one by one.
    mixed = ["the", TURNS, {"messages": LONGER, "tools": TOOLS}, "seven wizards bake pies"]
    assert task.generate(mixed, max_new_tokens=5) == [task.generate(each, max_new_tokens=5)[0] for each in mixed]
    assert task.generate("the", max_new_tokens=5) == [greedy(task, tokenizer("the")["input_ids"], 5)]
    begun = [*TURNS, {"role": "assistant", "content": "a lazy"}]
    prompt = GenerationPrompt(messages=begun, continues=True)
    assert prompt.render(tokenizer).endswith("<|assistant|>a lazy")
    found = task.generate(begun, continue_final_message=True, max_new_tokens=4)
    assert found == [greedy(task, prompt.encode(tokenizer), 4)]


def test_every_stop_token_ends_an_answer(task):
    tokenizer = task.text_tokenizer
    fox, dog, turn_end, eos = tokenizer.convert_tokens_to_ids(["fox", "dog", "<|system|>", "</s>"])
    assert end_of_turn(tokenizer) == turn_end != eos
    config = task.model.generation_config
    before, config.eos_token_id = config.eos_token_id, [eos, dog]
    try:
        for end in (turn_end, eos, dog):  # of the template, of both, of the generation config
            (made,) = generate_texts(
                task.model,
                tokenizer,
                [GenerationPrompt(messages=TURNS)],
                9,
                logits_processor=forcing(fox, fox, end, fox),
            )
            assert (made.text, made.tokens, made.finished) == ("foxfox", 3, True)
        # A turn does not end a text, and an option decides alone.
        for prompt, options in (
            (GenerationPrompt("the"), {}),
            (GenerationPrompt(messages=TURNS), {"eos_token_id": dog}),
        ):
            (made,) = generate_texts(
                task.model, tokenizer, [prompt], 5, logits_processor=forcing(fox, turn_end, fox), **options
            )
            assert (made.text, made.tokens, made.finished) == ("foxfoxfoxfox", 5, False)
    finally:
        config.eos_token_id = before
    # GLM-4 ends a turn with the beginning of the next, gpt-oss the last turn with another token.
    glm = "{% for m in messages %}<|{{ m['role'] }}|>{{ m['content'] }}{% endfor %}"
    oss = glm + "{% if messages[-1].role == 'assistant' %}</s>{% endif %}"
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    assert [end_of_turn(chat_tokenizer(each)) for each in (glm, oss, CHATML)] == [user, eos, eos]
    plain = chat_tokenizer()
    plain.chat_template = None
    assert end_of_turn(plain) is None


def state():
    return random.getstate(), np.random.get_state()[1].tolist(), torch.get_rng_state().tolist()


def test_sampling_depends_on_the_seed_and_nothing_else(task):
    options = {"max_new_tokens": 6, "temperature": 1.5, "top_k": 40}
    before = state()
    one, other = (task.generate([TURNS, "the", LONGER], seed=seed, **options) for seed in (1, 2))
    assert one != other
    # The same seeds one by one, and in another batch.
    rows = [row["text"] for row in task.predict_records([TURNS, "the", LONGER], 2, seed=1, **options)]
    assert rows == one
    assert task.generate(["the"], seed=[5], **options) == task.generate(["a", "the"], seed=[4, 5], **options)[1:]
    assert task.generate("the", do_sample=True, top_k=1, max_new_tokens=6) == task.generate("the", max_new_tokens=6)
    assert task.generate("the", temperature=0, max_new_tokens=6) == task.generate("the", max_new_tokens=6)
    assert len(task.generate("the", do_sample=True, num_beams=2, max_new_tokens=3, seed=3)) == 1
    assert state() == before
    # Without a seed: that of the global generators, whose state it does not change.
    first = task.generate("the", **options)
    assert task.generate("the", **options) == first
    torch.manual_seed(99)
    assert task.generate("the", **options) != first


class Talking:
    """Samples after every step."""

    def on_step_end(self, trainer, step, loss):
        trainer.task.generate([TURNS, "the quick"], max_new_tokens=3, temperature=1.0)
        assert trainer.task.model.training


def test_generating_does_not_affect_training(tmp_path):
    """With dropout, so that every random number counts."""

    def run(name, callbacks):
        made = CausalLM(gpt2(), max_length=32, tokenizer=chat_tokenizer(), cache_dir=tmp_path / "tokens")
        options = {"val_data": conversations()[:2], "eval_every": "3steps", "max_steps": 3}
        return trainer_for(made, conversations(), run_dir=tmp_path / name, callbacks=callbacks, **options).fit()

    samples = TextSamples(TURNS, max_new_tokens=3, options={"top_k": 5})
    check_equal(run("silent", []).task.model, run("talking", [Talking(), samples]).task.model)
    record = next(line for line in read_jsonl(tmp_path / "talking" / "metrics.jsonl") if "text/samples" in line)
    assert record["text/samples"].startswith("user: the quick fox⟶")


def test_the_context_limits_what_is_generated(task, caplog):
    size = len(GenerationPrompt("a dog " * 20).encode(task.text_tokenizer))
    room = task.model.config.max_position_embeddings - size
    assert 0 < room < 30
    alone = task.generate("a dog " * 20, max_new_tokens=30)
    assert f"{room} tokens, at the end of the model's context" in caplog.text
    assert alone == task.generate("a dog " * 20, max_new_tokens=room)
    assert task.generate(["a dog " * 20, "the"], max_new_tokens=30) == alone + task.generate("the", max_new_tokens=30)
    with pytest.raises(DataError, match="fewer than 64 tokens"):
        task.generate("a dog " * 100)


MISTAKES = [
    ("nothing", [], {}, "a text, a conversation, a record"),
    ("empty", ["x", ""], {}, "at least one character"),
    ("a number", 3, {}, "received 'int'"),
    ("answered", [*TURNS, {"role": "assistant", "content": "x"}], {}, "continue_final_message=True"),
    ("nothing to continue", TURNS, {"continue_final_message": True}, "ends with a turn of the assistant"),
    ("tools for a text", "x", {"tools": TOOLS}, "continued as they are"),
    ("an option", "x", {"tempreature": 1}, "Did you mean 'temperature'"),
    ("several texts", "x", {"num_return_sequences": 2}, "One text is returned per prompt"),
    ("greedy and not", "x", {"do_sample": False, "top_p": 0.5}, "do_sample=True with top_p"),
    ("seeds", ["x", "y"], {"do_sample": True, "seed": [1]}, "a list of 2"),
    ("temperature", "x", {"temperature": -1}, "temperature to be 0"),
    ("length", "x", {"max_new_tokens": 0}, "positive integer"),
    ("a role", [{"role": "uesr", "content": "x"}], {}, "a known role"),
    ("a record", {"words": 1}, {}, "record 0 to have a prompt, a text or messages"),
]


@pytest.mark.parametrize(("prompts", "options", "said"), [each[1:] for each in MISTAKES], ids=[m[0] for m in MISTAKES])
def test_mistakes(task, prompts, options, said):
    with pytest.raises((BadArgument, DataError), match=said):
        task.generate(prompts, **options)


def test_a_tokenizer_without_a_template():
    made = CausalLM(llama(), max_length=32, tokenizer=chat_tokenizer())
    made.text_tokenizer.chat_template = None
    with pytest.raises(BadArgument, match="a tokenizer with a chat template"):
        made.generate(TURNS)


def test_predict_answers_every_record(tmp_path):
    made = CausalLM(
        llama(),
        max_length=64,
        tokenizer=chat_tokenizer(),
        cache_dir=tmp_path / "tokens",
        prompt_template="Q {prompt} A",
    )
    trainer = trainer_for(made, sentences(), run_dir=tmp_path / "run", max_steps=2).fit()
    answered = {"id": "b", "messages": [*TURNS, {"role": "assistant", "content": "jumps"}]}
    sharegpt = {"id": "c", "conversations": [{"from": "human", "value": "the quick fox"}], "system": "be"}
    data = [
        {"id": "a", "prompt": "the fox", "completion": "is"},
        answered,
        sharegpt,
        {"id": "d", "text": "bake"},
        {"id": "e", "prompt": TURNS, "completion": [{"role": "assistant", "content": "over"}]},
    ]
    rows = trainer.predict(data, batch_size=2, max_new_tokens=4)
    assert [(row["id"], row["target"]) for row in rows] == [
        ("a", "is"), ("b", "jumps"), ("c", None), ("d", None), ("e", "over"),
    ]  # fmt: skip
    asked = "<|user|>the quick fox</s><|assistant|>"
    assert [row["prompt"] for row in rows] == [
        "Q the fox A", asked, f"<|system|>be</s>{asked}", "bake", asked,
    ]  # fmt: skip
    alpaca = read_prompt({"instruction": "bake", "input": "pies", "output": "hot"})
    assert alpaca.text.endswith("### Instruction:\nbake\n\n### Input:\npies\n\n### Response:\n")
    assert alpaca.target == "hot"
    with trainer.eval_mode():
        assert [row["text"] for row in rows[:2]] == made.generate(["Q the fox A", TURNS], max_new_tokens=4)
    path = trainer.predict(data, batch_size=3, out=tmp_path / "rows.csv", max_new_tokens=4)
    with path.open(newline="") as file:
        assert [row["text"] for row in csv.DictReader(file)] == [row["text"] for row in rows]
    with pytest.raises(DataError, match="record 1 to have a prompt"):
        trainer.predict([data[0], {"words": 3}])
    assert set(trainer.predict(["the", "a"])[0]) == {"id", "prompt", "text"}
