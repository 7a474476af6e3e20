"""Forgather's line syntax for templates, translated to Jinja's own, line by line.

    -- set x = 1        {% set x = 1 %}         << endblock a    {%- endblock a %}      >> if x    {% if x -%}
    == super()          {{ super() }}           => name          {{ name }} without newlines around it
    [block]             a block up to the next `[...]` that is not indented further; `[block!]` trims its content
    ## comment          nothing
    #---- name ----     starts another template in the same file

Line numbers stay what they are, so that errors point to the right line.
"""

from __future__ import annotations

import re

_STATEMENT = re.compile(r"\s*(--|<<|>>|==|=>)\s(.*)")
_FULL_COMMENT = re.compile(r"\s*##.*")
_END_COMMENT = re.compile(r"(.*)\s##+.*")
_BLOCK = re.compile(r"(\s*)\[(\w+)(!*)\]\s*")
_TEMPLATE = re.compile(r"\n#\s*-{3,}\s*([\w./]+)\s*-{3,}\n")
_FORMS = {
    "--": "{{% {} %}}",
    "<<": "{{%- {} %}}",
    ">>": "{{% {} -%}}",
    "==": "{{{{ {} }}}}",
    "=>": "{{{{ {}|trim('\\n')}}}}",
}
_WORDS = "extends block endblock set include import from if elif else endif for endfor macro endmacro filter endfilter"
_MARK = re.compile(
    rf"^[ \t]*(?:(?:--|<<|>>)[ \t]+(?:{_WORDS.replace(' ', '|')})\b|(?:==|=>)[ \t]+[\w'\"(])", re.MULTILINE
)


def uses_line_syntax(text: str) -> bool:
    r"""Whether a text has line statements.

    >>> uses_line_syntax("-- extends 'base.yaml'\n"), uses_line_syntax("a:\n  - -- text\n<<: *b\n")
    (True, False)
    """
    return _MARK.search(text) is not None


def split_templates(text: str) -> tuple[str, dict[str, str]]:
    r"""The template of a file, and those that follow below headings `#---- name ----`.

    >>> split_templates("a: 1\n#---- other ----\nb: 2\n")
    ('a: 1', {'other': 'b: 2\n'})
    """
    main, *others = _TEMPLATE.split(text)
    return main, dict(zip(others[::2], others[1::2], strict=True))


def translate(text: str) -> str:
    r"""The same template in Jinja's syntax.

    >>> translate("-- block a\nx: 1 ## one\n<< endblock a")
    '{% block a %}\nx: 1\n{%- endblock a %}'
    """
    lines: list[str] = []
    open_blocks: list[tuple[str, int, bool]] = []  # name, indentation, whether it is trimmed
    for line in re.split(r"\r\n|\n|\r", text):
        line = _statement(line)
        block = _BLOCK.fullmatch(line)
        if block is None:
            lines.append(line)
            continue
        indentation, name, trims = len(block[1]), block[2], bool(block[3])
        _close(open_blocks, lines, indentation)
        lines.append(("{% filter trim %}" if trims else "") + f"{{% block {name} %}}")
        open_blocks.append((name, indentation, trims))
    _close(open_blocks, lines, 0)
    return "\n".join(lines)


def _statement(line: str) -> str:
    if _FULL_COMMENT.fullmatch(line):
        return "{##}"  # Jinja removes it with its line end
    comment = _END_COMMENT.fullmatch(line)
    line = line if comment is None else comment[1].rstrip()
    statement = _STATEMENT.fullmatch(line)
    return line if statement is None else _FORMS[statement[1]].format(statement[2])


def _close(open_blocks: list[tuple[str, int, bool]], lines: list[str], indentation: int) -> None:
    """End the blocks that are indented as far or further, in the line before."""
    while open_blocks and open_blocks[-1][1] >= indentation:
        name, _, trims = open_blocks.pop()
        newline = "{{'\\n'}}" if lines[-1] else ""
        lines[-1] += f"{newline}{{% endblock {name} +%}}" + ("{% endfilter %}" if trims else "")
