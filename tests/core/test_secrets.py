"""What counts as a secret, by its name and by its shape, and what does not."""

import logging

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trainformer.core.errors import BadArgument, expected
from trainformer.core.secrets import MASK, find_mask, forget_all, is_secret_name, mask, mask_text, remember

KEY = "MIIEvQIBADANBgkqhkiG9w0BAQ"
# In text, the secret part of it.
SHAPES = [
    ("postgresql://me:Zq7pw@host/db", "Zq7pw"),
    ("postgresql://me:Zq7@pw@ss@host:5432/db?x=1", "Zq7@pw@ss"),
    ("postgresql+psycopg2://me:Zq7/p?w@host/db", "Zq7/p?w"),
    ("mysql://host/db?user=me&password=Zq7pw&charset=utf8", "Zq7pw"),
    ("redis://:Zq7pw@host:6379/0", "Zq7pw"),
    ("https://me:Zq7@pw@host/path@x?q=1", "Zq7@pw"),
    ("two: https://me:Zq7pw@a/x,https://me:Zq7pw@b/y", "Zq7pw"),
    ("https://b.example/x?sv=1&sig=Zq7pw%3D&se=2", "Zq7pw"),
    ("https://s3.example/x?X-Amz-Signature=Zq7pw", "Zq7pw"),
    ("https://0123456789abcdef0123456789@github.com/a/b", "0123456789abcdef0123456789"),
    ("hf_" + "aB3" * 11, "aB3aB3"),
    ("AKIAIOSFODNN7EXAMPLE", "IOSFODNN7"),
    ("ASIAIOSFODNN7EXAMPLE", "IOSFODNN7"),
    ("ghp_" + "aB3" * 12, "aB3aB3"),
    ("github_pat_" + "aB3_" * 10, "aB3_aB3"),
    ("glpat-" + "aB3" * 7, "aB3aB3"),
    ("sk-" + "aB3" * 16, "aB3aB3"),
    ("sk-proj-" + "aB3-_" * 8, "aB3"),
    ("sk-ant-api03-" + "aB3-_" * 8, "aB3"),
    ("xoxb-1234567890-abcdefghij", "1234567890"),
    ("AIza" + "aB3-_" * 7, "aB3-_aB3"),
    ("eyJhbGciOiJIUzI1NiJ9.eyJzdWIiOiIxMjM0In0.c2lnbmF0dXJl", "c2lnbmF0dXJl"),
    ("wandb login " + "a1b2" * 10, "a1b2a1b2"),
    ("WANDB_API_KEY=" + "a1b2" * 10, "a1b2a1b2"),
    ("wandb_v1_" + "aB3" * 12, "aB3aB3"),
    (f"-----BEGIN RSA PRIVATE KEY-----\nDEK-Info: AES-128\n\n{KEY}\n-----END RSA PRIVATE KEY-----", KEY),
    ("-----BEGIN PRIVATE KEY-----\\n" + KEY, KEY),
    ("Authorization: Bearer Zq7pw", "Zq7pw"),
    ("{'Authorization': 'Basic Zq7pw=='}", "Zq7pw"),
    ("received hub_token='Zq7pw'.", "Zq7pw"),
    ("error: token=Zq7pw", "Zq7pw"),
    ("trainformer run --var token=Zq7pw --x", "Zq7pw"),
    ("trainformer run --hub-token Zq7pw --x", "Zq7pw"),
    ('{"a": "{\\"api_key\\": \\"Zq7pw\\"}"}', "Zq7pw"),
    ("password: Zq7pw", "Zq7pw"),
    ("password=Zq7,pw;x rest", "Zq7,pw;x"),
    ('secret="Zq7 pw', "Zq7 pw"),
    ("Server=x;Pwd=Zq7pw;", "Zq7pw"),
]
SECRET_NAMES = [
    "token", "hub_token", "HF_TOKEN", "hubToken", "access_token", "auth_tokens", "task/token", "logger.api_token",
    "password", "db_password", "PASSWORD_2", "passwd", "passphrase", "pwd", "secret", "client_secret", "secret_value",
    "api_key", "apiKey", "OPENAI_API_KEY", "apikey", "access_key", "aws_access_key_id", "AWSAccessKeyId",
    "secret_key", "private_key", "ssh_keys", "credentials", "credentials.user", "authorization", "password_prod",
]  # fmt: skip
HARMLESS_NAMES = [
    "tokenizer", "tokenizer_name", "num_tokens", "max_new_tokens", "eos_token", "pad_token", "pad_token_id",
    "mask_token", "image_token_index", "token_type_ids", "tokens_per_second", "tokens", "token_ids", "class_token",
    "additional_special_tokens", "key", "keys", "sort_key", "key_padding_mask", "num_key_value_heads", "monkey",
    "password_file", "secret_name", "token_file", "passed", "compass", "author", "authors", "secretary", "",
    "WANDB_IDENTITY_TOKEN_FILE", "PWD", "keyboard", "accessible", "task/tokenizer", "train/loss",
]  # fmt: skip
HARMLESS = [
    "https://example.org/a/b?page=2&email=me@example.org#x", "http://localhost:8080/users/me@example.org",
    "sqlite:////tmp/a@b/study.db", "git@github.com:me/project.git", "abfss://data@account.dfs.core.windows.net/x",
    "docker://image:tag@sha256:abcdef", "s3://bucket/key=value/part-0.parquet", "hf://datasets/me/data@main/x.csv",
    "commit a1b2c3d4a1b2c3d4a1b2c3d4a1b2c3d4a1b2c3d4", "runs/secret/config.json: No such file", "hf_internal_testing",
    "sk-learn-contrib-estimators", "facebook/opt-125m", "num_tokens=12, tokens_per_second=3.5", "next token: hello",
    "eos_token='</s>', pad_token_id=0", "token=12", "token='<s>'", "api_key=None", "password=${DB_PASSWORD}",
    "lr=0.1 epochs: 3", "key=value", "2026-01-01 12:00:00", "C:\\data\\x.csv", "***", "a:b@c", "", "Zq7pw",
    "my_secrets:Class", "lib.secrets:load_v2", "a/password.py:line", "Pass --var api_key=..., or nothing.",
    "the password is wrong", "a token that ends the text", "Basic internationalization of things", "sorted(key=len)",
]  # fmt: skip


@pytest.mark.parametrize(("text", "secret"), SHAPES)
def test_secrets_in_text(text, secret):
    assert secret in text
    for masked in (mask_text(text), mask_text(f"before ({text}"), str(mask({"note": text})), str(mask([text]))):
        assert secret not in masked
        assert MASK in masked
    assert mask_text(mask_text(text)) == mask_text(text)


def test_what_surrounds_a_secret_stays():
    assert mask_text("at postgresql://me:Zq7@pw@host/db?a=1&password=x now") == (
        f"at postgresql://me:{MASK}@host/db?a=1&password={MASK} now"
    )
    assert mask_text("hub_token='Zq7pw', lr=0.1") == f"hub_token='{MASK}', lr=0.1"


def test_passwords_with_spaces_and_quotes_in_a_url():
    assert mask("mysql://me:it's my <pass>@host/db") == f"mysql://me:{MASK}@host/db"


@pytest.mark.parametrize("name", SECRET_NAMES)
def test_names_of_secrets(name):
    assert is_secret_name(name)
    assert mask({name: "abc", "lr": 0.1}) == {name: MASK, "lr": 0.1}
    assert mask("abc", name) == MASK


@pytest.mark.parametrize("name", HARMLESS_NAMES)
def test_harmless_names(name):
    assert not is_secret_name(name)
    content = {name: "abc", "more": {name: ["abc", 3, "</s>"]}}
    assert mask(content) == content
    assert mask_text(f"{name}=abc") == f"{name}=abc"


@pytest.mark.parametrize("text", HARMLESS)
def test_harmless_text(text):
    assert mask_text(text) == text
    assert mask({"note": text, "list": [text]}) == {"note": text, "list": [text]}


def test_numbers_and_other_values_stay():
    content = {"token": 3, "hub_token": None, "use_secret": True, "secret_share": 0.5, "api_key": "none", "x": (1, 2)}
    assert mask(content) == content
    assert type(mask(content)["x"]) is tuple
    assert mask({"password": 12345678, "tokens": [1, 2]}) == {"password": MASK, "tokens": [1, 2]}
    odd = object()
    assert mask([odd])[0] is odd


def test_everything_inside_credentials_is_secret():
    content = {"credentials": {"user": "me", "port": 80, "more": ["x"]}, "secret_detection": {"labels": ["a"]}}
    assert mask(content) == {
        "credentials": {"user": MASK, "port": 80, "more": [MASK]},
        "secret_detection": {"labels": ["a"]},
    }


def test_command_lines():
    words = ["run", "--var", "token=a b", "--hub-token", "abc", "--set", "+trainer.db.password=x=y", "--lr", "0.1"]
    assert mask(words) == [
        *("run", "--var", f"token={MASK}", "--hub-token", MASK, "--set"),
        *(f"+trainer.db.password={MASK}", "--lr", "0.1"),
    ]


def test_a_wandb_key_is_recognised_by_the_name_of_the_service():
    key, commit = "a1b2" * 10, "c3d4" * 10
    assert mask({"wandb": {"key": key}, "commit": commit}) == {"wandb": {"key": MASK}, "commit": commit}


def test_values_seen_under_a_secret_name_are_masked_elsewhere():
    assert mask({"first": "run hunter2-a", "api_key": "hunter2"}) == {"first": f"run {MASK}-a", "api_key": MASK}
    assert mask_text("the server says: hunter2?") == f"the server says: {MASK}?"
    forget_all()
    remember("p@ss'w0rd", "password")
    assert mask_text("p%40ss%27w0rd") == MASK
    assert mask_text(repr({"x": "p@ss'w0rd"})) == repr({"x": "p@ss'w0rd"}).replace("p@ss'w0rd", MASK)


def test_short_words_that_were_secrets_once_stay_elsewhere():
    mask({"password": "main", "secret": "123456", "token": "abc"})
    assert mask_text("branch main, step 123456, abc") == "branch main, step 123456, abc"


def test_environment_variables_are_masked_wherever_they_occur(monkeypatch):
    monkeypatch.setenv("SOME_API_KEY", "qwe-789-rty")
    monkeypatch.setenv("SOME_SETTING", "zxc-789-vbn")
    assert mask_text("qwe-789-rty zxc-789-vbn") == f"{MASK} zxc-789-vbn"


@pytest.mark.parametrize(
    "unit",
    [
        "token:", "token='", "a://b:", "://", "@", "-----BEGIN PRIVATE KEY-----", "eyJ", "wandb", "sk-", "a.b/", "\\'",
        "http://1", "--a b ", "1", "x=", "password=token=",
    ],
)  # fmt: skip
def test_long_texts_take_linear_time(unit):
    """A quadratic pattern would take hours."""
    text = unit * (100_000 // len(unit))
    assert isinstance(mask({text: text}), dict)
    assert mask_text(mask_text(text)) == mask_text(text)


VALUES = st.recursive(
    st.one_of(
        st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(), st.binary(),
        st.sampled_from([text for text, _ in SHAPES] + HARMLESS),
    ),
    lambda inner: st.one_of(
        st.lists(inner), st.tuples(inner, inner),
        st.dictionaries(st.one_of(st.text(), st.sampled_from(SECRET_NAMES + HARMLESS_NAMES)), inner),
    ),
    max_leaves=12,
)  # fmt: skip
PIECES = st.lists(
    st.one_of(
        st.sampled_from([text for text, _ in SHAPES] + SECRET_NAMES + HARMLESS),
        st.sampled_from(["=", ":", "'", '"', " ", "@", "/", "?", "&", "\\", "\n", "--", "://", ",", MASK, "***", "x7"]),
        st.text(max_size=5),
    ),
    max_size=8,
).map("".join)


@given(VALUES)
def test_masking_twice_changes_nothing_more(value):
    once = mask(value)
    assert mask(once) == once


@given(PIECES)
def test_masking_text_twice_changes_nothing_more(text):
    forget_all()
    once = mask_text(text)
    assert mask_text(once) == once
    assert mask_text(mask_text(text, names=False)) == once or MASK in once


def test_deep_and_odd_values_do_not_raise():
    deep = []
    for _ in range(5000):
        deep = [deep]
    mask(deep)
    assert mask({1: "token=abc", None: b"x", ("a",): "\ud800"})[1] == f"token={MASK}"


def test_placeholders_are_found():
    assert find_mask({"a": [{"b": f"x{MASK}"}]}) == "a.0.b"
    assert find_mask({"a": ["***", 3, None]}) is None


def test_errors_never_contain_secrets():
    assert "Zq7pw" not in expected("api_key to be a key", "Zq7pw")
    assert "Zq7pw" not in expected("a storage", "redis://:Zq7pw@host")
    error = BadArgument("received hub_token='Zq7pw'")
    assert str(error) == f"received hub_token='{MASK}'"
    assert error.args == (str(error),)


def test_log_messages_reach_every_handler_without_secrets(caplog):
    with caplog.at_level(logging.INFO, logger="trainformer"):
        logging.getLogger("trainformer").info("opened %s, %d steps", "redis://:Zq7pw@host", 3)
        logging.getLogger("trainformer").info("%d steps", 3)
    assert caplog.messages == [f"opened redis://:{MASK}@host, 3 steps", "3 steps"]
    assert caplog.records[1].args == (3,)
