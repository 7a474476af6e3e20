"""Training a tokenizer: it encodes any text, keeps special tokens whole, and can be saved and loaded."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import AutoTokenizer

from trainformer.core.errors import BadArgument, DataError
from trainformer.data import train_tokenizer

TEXTS = ["the cat sat on the mat", "die Katze saß auf der Matte", "def f(x):\n    return x"] * 5


@pytest.fixture(scope="module")
def tokenizer():
    return train_tokenizer(({"text": text} for text in TEXTS), vocabulary=300, special=["<|user|>"])


@settings(max_examples=60, deadline=None)
@given(text=st.text(st.characters(exclude_categories=["Cs"]), max_size=40))
def test_any_text_can_be_encoded(tokenizer, text):
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_merges_come_from_the_texts(tokenizer):
    assert len(tokenizer) == 300
    assert len(tokenizer("the cat sat")["input_ids"]) < len("the cat sat") / 2
    assert len(train_tokenizer(TEXTS, vocabulary=270)("the cat sat")["input_ids"]) > len(
        tokenizer("the cat")["input_ids"]
    )


def test_special_tokens_stay_whole_and_nothing_is_added(tokenizer, tmp_path):
    ids = tokenizer("<|user|>the")["input_ids"]
    assert ids[0] == tokenizer.convert_tokens_to_ids("<|user|>")
    assert tokenizer.eos_token_id not in tokenizer("the cat")["input_ids"]
    tokenizer.save_pretrained(tmp_path)
    again = AutoTokenizer.from_pretrained(tmp_path)
    assert [again(text)["input_ids"] for text in TEXTS] == [tokenizer(text)["input_ids"] for text in TEXTS]
    assert (again.eos_token_id, again.pad_token_id) == (tokenizer.eos_token_id, tokenizer.pad_token_id)


def test_the_same_texts_give_the_same_tokenizer(tokenizer):
    other = train_tokenizer(TEXTS, vocabulary=300, special=["<|user|>"])
    assert other.get_vocab() == tokenizer.get_vocab()


def test_invalid_training_data():
    with pytest.raises(BadArgument, match=r"a vocabulary of at least 257 tokens.*received 100"):
        train_tokenizer(TEXTS, vocabulary=100)
    with pytest.raises(DataError, match="text"):
        train_tokenizer([{"text": 3}], vocabulary=300)
