"""Masks secrets in everything that is written or shown: files of a run, reports, logs, errors, loggers.

A secret is recognised by the name of its setting (`hub_token`, `db_password`), by its shape (a password in a URL, an
`hf_...` token), or because it was seen before: as the value of such a name, of a `!secret` in a config, or of an
environment variable. Values that were seen are masked wherever they occur again, such as in the error of a server.

All patterns are linear in the length of the text: quantifiers are possessive or bounded.
"""

from __future__ import annotations

import functools
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from typing import Any
from urllib.parse import quote

#: What stands in place of a secret. No setting may have it as its value; see `find_mask`.
MASK = "***masked***"

_MOST_SEEN = 256
_MOST_LEVELS = 200
_MOST_PASSES = 5

# -- names -----------------------------------------------------------------------------------------------------------

_WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
_PASSWORDS = {"password", "passwd", "passphrase", "passcode", "pwd", "secret"}  # these may be numbers
_SECRET = {
    *_PASSWORDS, "secrets", "credential", "credentials", "authorization", "apikey", "accesskey", "secretkey",
    "privatekey", "accesstoken", "authtoken",
}  # fmt: skip
_SECRET_KEYS = {
    "access", "account", "api", "auth", "deploy", "encryption", "private", "secret", "service", "session", "shared",
    "signing", "ssh", "subscription",
}  # fmt: skip
# `password_file` and `secret_name` say where a secret is, not what it is.
_ABOUT = {
    "algorithm", "column", "count", "dir", "enabled", "env", "field", "file", "folder", "index", "len", "length",
    "max", "min", "mode", "name", "names", "num", "path", "policy", "required", "size", "type", "var", "variable",
}  # fmt: skip
_TOKEN_OWNERS = {
    "access", "api", "auth", "aws", "azure", "bearer", "bot", "client", "csrf", "deploy", "gh", "git", "github",
    "gitlab", "google", "hf", "hub", "huggingface", "identity", "jwt", "login", "mlflow", "oauth", "personal",
    "private", "pypi", "refresh", "registry", "sas", "secret", "security", "service", "session", "slack", "tracking",
    "wandb",
}  # fmt: skip
_TOKENS_OF_TEXT = {
    "audio", "bos", "class", "cls", "decoder", "encoder", "end", "eos", "first", "image", "last", "mask", "next",
    "pad", "padding", "patch", "per", "prefix", "sep", "separator", "special", "start", "stop", "suffix", "text",
    "unk", "video",
}  # fmt: skip
_SHELL = {"PWD", "OLDPWD"}  # the working directory

_ALWAYS, _IF_TEXT, _IF_RANDOM = 3, 2, 1


@functools.lru_cache(4096)
def _rank(name: str) -> int:
    """How sure it is that the setting with this dotted name is a secret; 0 if it is not."""
    *holders, last = [part for part in re.split(r"[./]", name) if part] or [""]
    if any(_rank_of(_words(holder)[-2:], is_holder=True) for holder in holders):
        return _IF_TEXT
    return 0 if last in _SHELL else _rank_of(_words(last))


def _words(name: str) -> list[str]:
    """The words of a name in lower case, without numbers at its end."""
    words = [word.lower() for word in _WORDS.findall(name)]
    while len(words) > 1 and (words[-1].isdigit() or words[-1] in ("value", "str")):
        words.pop()
    return words


def _rank_of(words: list[str], is_holder: bool = False) -> int:
    if not words or words[-1] in _ABOUT:
        return 0
    if not _SECRET.isdisjoint(words[-1:] if is_holder else words):
        return _ALWAYS
    if any(last in ("key", "keys") and kind in _SECRET_KEYS for kind, last in pairwise(words)):
        return _ALWAYS
    owner = words[-2] if len(words) > 1 else None
    if words[-1] in ("token", "tokens") and owner in _TOKEN_OWNERS:
        return _IF_TEXT
    if words[-1] != "token" or owner in _TOKENS_OF_TEXT or is_holder:
        return 0
    return _IF_TEXT if owner is None else _IF_RANDOM


def is_secret_name(name: str) -> bool:
    """Whether a setting of this name holds a secret.

    >>> [is_secret_name(name) for name in ("hub_token", "task/apiKey", "DB_PASSWORD", "aws_access_key_id")]
    [True, True, True, True]
    >>> [is_secret_name(name) for name in ("tokenizer", "eos_token", "pad_token_id", "num_tokens", "key")]
    [False, False, False, False, False]
    """
    return _rank(name[-_LONGEST_NAME:]) >= _IF_TEXT


_REFERENCE = re.compile(r"\$\w+|\$\{[^}]*\}|\.{3}\W?")  # ${HF_TOKEN}, or ... in the text of an error
_SPECIAL_TOKEN = re.compile(r"<.*>|\[.*\]", re.S)  # <eos>, [MASK]
_NO_VALUE = {"", "true", "false", "none", "null", "auto", "yes", "no", "default"}
_NUMBER = re.compile(r"[-+]?[0-9][0-9_.,]*+(?:[eE][-+]?[0-9]+)?%?")


def _is_number(text: str, name: str) -> bool:
    """Whether the text is a number that is no password."""
    return bool(_NUMBER.fullmatch(text)) and not (text.isdigit() and _may_be_number(name))


def _may_be_number(name: str) -> bool:
    """Whether a number with this dotted name is a password."""
    last = re.split(r"[./]", name)[-1]
    return last not in _SHELL and not _PASSWORDS.isdisjoint(_words(last)[-1:])


def _is_random(text: str) -> bool:
    return len(text) >= 8 and text.isascii() and bool(re.search("[0-9]", text)) and bool(re.search("[A-Za-z]", text))


def _is_secret(text: str, rank: int) -> bool:
    """Whether the text is a secret, as the value of a setting with this rank."""
    if rank == 0 or text.lower() in _NO_VALUE or _REFERENCE.fullmatch(text):
        return False
    if rank < _ALWAYS and _SPECIAL_TOKEN.fullmatch(text):
        return False
    return rank > _IF_RANDOM or (_is_random(text) and not re.search(r"\s", text))


# -- shapes ----------------------------------------------------------------------------------------------------------

_SHAPES = re.compile(
    r"""
    -----BEGIN\ [A-Z ]{0,30}PRIVATE\ KEY-----[^-]*+(?:-(?!----)[^-]*+)*+(?:-----END\ [A-Z ]{0,30}KEY-----)?
    | (?<![\w-]) (?:
        hf_[A-Za-z0-9]{16,}+ | api_org_[A-Za-z0-9]{16,}+            # Hugging Face
        | (?:AKIA|ASIA)[A-Z0-9]{16}(?![A-Za-z0-9])                  # AWS
        | gh[pousr]_[A-Za-z0-9]{16,}+ | github_pat_\w{16,}+         # GitHub
        | glpat-[\w-]{16,}+                                         # GitLab
        | sk-(?=[A-Za-z_-]{0,40}[0-9])[\w-]{16,}+                   # OpenAI, Anthropic
        | wandb_v[0-9]_\w{16,}+                                     # W&B
        | xox[a-z]-[\w-]{10,}+                                      # Slack
        | AIza[\w-]{30,}+ | ya29\.[\w-]{16,}+                       # Google
        | eyJ[\w-]{8,}+\.eyJ[\w-]{8,}+\.[\w-]*+                     # JSON web tokens
    )
    | (?: (?<=[Bb]earer\ ) | (?<=[Bb]asic\ ) ) (?=[A-Za-z._~+/=-]{0,60}[0-9]) [\w.~+/=-]{16,}+
    """,
    re.VERBOSE,
)
_HEX_KEY = re.compile(r"[0-9a-f]{40}")  # of W&B; the commits of git look the same
_WANDB = re.compile(r"(?i:wandb)[^\n]{0,60}?(?<![0-9A-Za-z])([0-9a-f]{40})(?![0-9A-Za-z])")
_URL = re.compile(
    r"(?<![A-Za-z0-9+.-])([A-Za-z][A-Za-z0-9+.-]*+)://((?:[^\s\"'<>`\\,;|]|[,;|](?![A-Za-z+.-]{2,16}://))*+)"
)
_IMAGE = re.compile(r"(?:data:image/[\w.+-]+;base64,|iVBORw0KGgo)[A-Za-z0-9+/=]*+")  # long, and no secret
_ONLY_URL = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*+)://(.*)", re.S)
_WEB = {"http", "https", "ws", "wss", "ftp", "ssh", "git", "s3", "gs"}
_QUERY = re.compile(r"(?<=[?&;])([\w.%-]++)=([^&\s#\"'<>]++)")
_QUERY_SECRETS = {"auth", "pass", "pw", "sig", "signature", "x-amz-signature", "x-amz-credential"}
_NAME = re.compile(r"""(?<![\w./-])-*+(?P<name>[A-Za-z_][\w./-]*+)(?P<quote>\\*+["'])?\ ?(?P<sep>[=:]\s?)""")
_VALUE = re.compile(
    r"""(?:(?i:bearer|basic|token)\ )?
    (?: \\*+"(?P<double>[^"\\\n]*+(?:\\.[^"\\\n]*+)*+) | \\*+'(?P<single>[^'\\\n]*+(?:\\.[^'\\\n]*+)*+)
      | (?P<bare>[^\s"',;&]*+(?:[,;](?=[^\s"'])[^\s"',;&]*+)*+) )""",
    re.VERBOSE,
)
_OPTION = re.compile(r"(?<![\w-])(--?(?P<name>[A-Za-z][\w.-]*+)[ ]++)(?P<bare>[^\s-]\S*+)")
_LONGEST_NAME = 400
_LONGEST_VALUE = 500  # of text without a space; a longer one after the name of a secret is one
_HINT = re.compile(
    r"[=:]|--|hf_|api_org_|A[KS]IA|gh[pousr]_|github_pat_|glpat-|sk-|xox|AIza|ya29\.|eyJ|wandb|bearer |basic ", re.I
)


def _in_url(match: re.Match[str]) -> str:
    scheme, rest = match[1], match[2]
    return f"{scheme}://{_QUERY.sub(_in_query, _without_password(rest, scheme.lower() in _WEB))}"


def _without_password(rest: str, is_web: bool) -> str:
    """What follows `://`. A password ends at the last `@`; one of a database may contain `/` as well."""
    head = re.split(r"[/?#]", rest, maxsplit=1)[0]
    port = head.rpartition(":")[2]
    has_port = not port or port.isdigit() or "]" in head
    if not is_web or ("@" not in head and ":" in head and not has_port):
        head = re.split(r"\?(?=[\w.%-]{1,99}=)", rest, maxsplit=1)[0]
    user, colon, password = head.rpartition("@")[0].partition(":")
    after = rest[len(user) + len(colon) + len(password) :]
    if re.search(r"[/?#]", user) or after.startswith("@sha256:"):
        return rest
    if password:
        return f"{user}:{MASK}{after}"
    # A token in place of a user.
    return f"{MASK}{after}" if is_web and not colon and len(user) >= 20 else rest


def _in_query(match: re.Match[str]) -> str:
    name, value = match[1], match[2]
    is_secret = name.lower() in _QUERY_SECRETS or _is_secret(value, _rank(name[-_LONGEST_NAME:]))
    return f"{name}={MASK}" if is_secret else match[0]


def _mask_assigned(text: str) -> str:
    """Without the values in `name=value`, `name: value` and `'name': 'value'`."""
    done, pieces = 0, []
    for match in _NAME.finditer(text):
        rank = _rank(match["name"][-_LONGEST_NAME:])
        if rank == 0 or match.start() < done:
            continue
        value = _VALUE.match(text, match.end(), match.end() + _LONGEST_VALUE)
        if value is None or not _is_assigned(match, rank, value):
            continue
        if value.end() == match.end() + _LONGEST_VALUE:
            value = _VALUE.match(text, match.end()) or value
        pieces += [text[done : value.start(value.lastgroup or 0)], MASK]
        done = value.end()
    return "".join([*pieces, text[done:]])


def _is_assigned(name: re.Match[str], rank: int, value: re.Match[str]) -> bool:
    if value.lastgroup != "bare":
        return _is_secret(value[value.lastgroup or 0], rank)
    bare = value["bare"]
    if _is_number(bare, name["name"]):
        return False
    if ":" in name["sep"] and name["quote"] is None:
        if rank < _ALWAYS and not _is_random(bare):  # `token: text` may be prose; `token=text` is not
            return False
        if name["sep"] == ":" and (bare.replace(".", "").isalpha() or name["name"].endswith("s")):  # module:Class
            return False
    return _is_secret(bare, rank)


def _after_option(match: re.Match[str]) -> str:
    is_secret = _is_secret(match["bare"], _rank(match["name"][-_LONGEST_NAME:]))
    return f"{match[1]}{MASK}" if is_secret and not _is_number(match["bare"], match["name"]) else match[0]


# -- values seen before ----------------------------------------------------------------------------------------------

_seen: dict[str, str] = {}  # the secrets, each with the name under which a config asks for it


def remember(value: Any, name: str) -> None:
    """Mask this value from now on, wherever it occurs. `name` is that of the variable that holds it."""
    if isinstance(value, str) and value and MASK not in value and value not in MASK:
        _seen[value] = name
        while len(_seen) > _MOST_SEEN:
            del _seen[next(iter(_seen))]


def forget_all() -> None:
    """Forget the values seen so far."""
    _seen.clear()


def name_of(value: str) -> str | None:
    """The name of a value that was seen before."""
    return _seen.get(value)


def variable_name(name: str) -> str:
    """The environment variable that gives a config its secret.

    The prefix is there so that the config of a stranger cannot read any other variable.

    >>> variable_name("hf-token")
    'TRAINFORMER_VAR_HF_TOKEN'
    """
    return "TRAINFORMER_VAR_" + re.sub(r"\W", "_", name).upper()


def _seen_pattern() -> re.Pattern[str] | None:
    secrets = {*_seen, *(value for name, value in os.environ.items() if is_secret_name(name))}
    return _pattern_of(frozenset(secret for secret in secrets if _is_distinct(secret)))


def _is_distinct(value: str) -> bool:
    """Whether a value is unlikely to occur by chance: `main` is not, and neither are numbers and paths."""
    if value.isalpha() or value.isdigit():
        return len(value) >= 16
    return len(value) >= 6 and not value.startswith(("/", "~", "./")) and MASK not in value and value not in MASK


@functools.lru_cache(8)
def _pattern_of(secrets: frozenset[str]) -> re.Pattern[str] | None:
    forms = {form for secret in secrets for form in (secret, quote(secret, safe=""), repr(secret)[1:-1])}
    forms |= {json.dumps(secret)[1:-1] for secret in secrets}
    longest_first = sorted(forms, key=lambda form: (-len(form), form))
    return re.compile("|".join(map(re.escape, longest_first))) if forms else None


# -- masking ---------------------------------------------------------------------------------------------------------


def mask_text(text: str, names: bool = True) -> str:
    """The text without secrets. With `names=False`, `password=...` stays: for texts that a model wrote.

    >>> mask_text("postgresql://me:s3@cret@host/db?sslmode=require")
    'postgresql://me:***masked***@host/db?sslmode=require'
    >>> mask_text("started with --hub_token=abc --max_new_tokens=8")
    'started with --hub_token=***masked*** --max_new_tokens=8'
    """
    return _masked_text(text, _seen_pattern(), names)


def _masked_text(text: str, seen: re.Pattern[str] | None, names: bool = True) -> str:
    for _ in range(_MOST_PASSES):  # what stood next to a secret may only be recognised without it
        before = text
        if seen is not None:
            text = seen.sub(MASK, text)
        if _HINT.search(text) is None:
            return text
        text = _SHAPES.sub(MASK, text)
        if "wandb" in text.lower():
            text = _WANDB.sub(lambda match: match[0].removesuffix(match[1]) + MASK, text)
        if "://" in text:
            text = _URL.sub(_in_url, text)
        if names:
            text = _mask_assigned(text)
            text = _OPTION.sub(_after_option, text)
        if text == before:
            break
    return text


def mask(value: Any, name: str = "") -> Any:
    """The same value, with secrets in its strings masked. `name` is that of the setting, if it has one.

    >>> mask({"hub_token": "abc", "eos_token": "</s>", "steps": 3, "command": ["--var", "password=abc"]})
    {'hub_token': '***masked***', 'eos_token': '</s>', 'steps': 3, 'command': ['--var', 'password=***masked***']}
    """
    for text, path in _texts(value, name, 0):
        if text not in _seen and _is_secret_at(text, path):
            remember(text, re.split(r"[./]", path)[-1])
    return _masked(value, name[-_LONGEST_NAME:], _seen_pattern(), 0)


def _texts(value: Any, path: str, level: int) -> Iterator[tuple[str, str]]:
    """All strings in a value, with their dotted names."""
    if isinstance(value, str):
        yield value, path
    elif isinstance(value, Mapping) and level < _MOST_LEVELS:
        for key, item in value.items():
            yield from _texts(item, _join(path, key), level + 1)
    elif isinstance(value, list | tuple) and level < _MOST_LEVELS:
        for item in value:
            yield from _texts(item, path, level + 1)


def _is_secret_at(text: str, path: str) -> bool:
    """Whether the text is a secret, as the value of the setting with this dotted name."""
    return _is_secret(text, _rank(path)) or ("wandb" in path.lower() and _HEX_KEY.fullmatch(text) is not None)


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}"[-_LONGEST_NAME:]


def _masked(value: Any, path: str, seen: re.Pattern[str] | None, level: int) -> Any:
    if isinstance(value, str):
        return _masked_value(value, path, seen)
    if type(value) is int:
        return MASK if _may_be_number(path) else value
    if not isinstance(value, Mapping | list | tuple):
        return value
    if level >= _MOST_LEVELS:
        return MASK
    if isinstance(value, Mapping):
        result: dict[Any, Any] = {}
        for key, item in value.items():
            shown = _masked_text(key, seen, names=False) if isinstance(key, str) else key
            shown = f"{shown}#{len(result)}" if shown in result else shown  # two keys may look the same then
            result[shown] = _masked(item, _join(path, key), seen, level + 1)
        return result
    items = [_masked(item, path, seen, level + 1) for item in value]
    items = [_as_argument(item, before) for before, item in zip([None, *items], items, strict=False)]
    return items if isinstance(value, list) else tuple(items)


def _masked_value(text: str, path: str, seen: re.Pattern[str] | None) -> str:
    if _is_secret_at(text, path):
        return MASK
    if _IMAGE.fullmatch(text):
        return text
    url = _ONLY_URL.fullmatch(text)
    if url is not None and url[1].lower() not in _WEB:  # its password may have spaces and quotes
        text = _in_url(url)
    return _masked_text(text, seen)


def _as_argument(item: Any, before: Any) -> Any:
    """An item of a command line: `token=a b` is masked to its end, and so is what follows `--token`."""
    if not isinstance(item, str):
        return item
    name, equals, value = item.partition("=")
    if equals and re.fullmatch(r"[+-]*[\w./-]{1,200}", name):
        is_secret = _is_secret(value.strip("'\""), _rank(name)) and not _is_number(value, name)
        return f"{name}={MASK}" if is_secret else item
    if isinstance(before, str) and re.fullmatch(r"--?[A-Za-z][\w.-]{0,200}", before) and not item.startswith("-"):
        return MASK if _is_secret(item, _rank(before.lstrip("-"))) else item
    return item


def find_mask(value: Any, name: str = "") -> str | None:
    """The dotted name of the first value that holds `MASK` in place of a secret; None if there is none."""
    if isinstance(value, str):
        return name if MASK in value else None
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple):
        items = dict(enumerate(value)).items()
    else:
        return None
    return next((found for key, item in items if (found := find_mask(item, f"{name}.{key}".lstrip(".")))), None)


def _mask_record(record: logging.LogRecord) -> bool:
    """A filter of trainformer's logger: messages reach all handlers without secrets."""
    try:
        text = record.getMessage()
    except (TypeError, ValueError):  # a wrong format, which the handlers report
        return True
    if (masked := mask_text(text)) != text:
        record.msg, record.args = masked, ()
    return True


logging.getLogger("trainformer").addFilter(_mask_record)
