"""What llguidance says of a grammar, without the grammar's own lines: no client wrote those."""

from __future__ import annotations

import re

_OF_SCHEMA = re.compile(r"at (?P<line>\d+)\(\d+\): failed to compile JSON schema: (?P<words>.*)", re.DOTALL)
_EXCERPT = re.compile(r"\n\s*\d+ \| ")
_RULE = re.compile(r"\w+: ")


def name_rule(text: str, problem: str) -> str:
    """Return what is wrong with a JSON schema within a Lark grammar, behind its rule's name ("arguments_0: ..."). Other
    problems are returned as they are, without the lines of the grammar."""
    words = _EXCERPT.split(problem, maxsplit=1)[0]
    match = _OF_SCHEMA.fullmatch(words)
    if match is None:
        return words
    lines = text.split("\n")
    rule = _RULE.match(lines[int(match["line"]) - 1]) if 0 < int(match["line"]) <= len(lines) else None
    return match["words"] if rule is None else rule[0] + match["words"]
