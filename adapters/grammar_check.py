"""Whether a grammar can be used, asked without a model: to be called where a crash, a hang or full memory harms nobody.

It does all that a worker will do with the grammar, over the 256 bytes in place of a vocabulary.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Final

from adapters.schema_emptiness import find_empty_part

_OF_SCHEMA = re.compile(r"at (?P<line>\d+)\(\d+\): failed to compile JSON schema: (?P<words>.*)", re.DOTALL)
_EXCERPT = re.compile(r"\n\s*\d+ \| ")
_RULE = re.compile(r"\w+: ")
KINDS: Final = ("json_schema", "regex", "lark")
OURS, SPACED, REQUIRED_FIRST = "ours", "spaced", "required first"
OTHERS: Final = (SPACED, REQUIRED_FIRST)
"""How others write JSON: with any white space, as vLLM and SGLang; the same, and keys that have to be there before all
others, as llama-server. Ours is as json.dumps writes it."""
_MOST_WORDS: Final = 1000  # characters: the library may tell the whole grammar again
_CONTROL: Final = re.compile(r"<\[\d+\]>")
_EMBEDDED: Final = re.compile(r"^(\w+): %json ", re.MULTILINE)


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


def find_grammar_problem(kind: str, text: str) -> str:
    """Return in one line why a grammar cannot be used; "" where it can. Takes milliseconds, but for texts that are made
    to take longer, or to end the process."""
    try:
        problem = _find_empty(kind, text) or _find_compile_problem(kind, text)
    except ValueError as error:
        problem = str(error)
    return " ".join(name_rule(text, problem).split())[:_MOST_WORDS]


def warm_up() -> None:
    """Load what the first check would load."""
    find_grammar_problem("json_schema", '{"type": "string"}')


def compile_text(kind: str, text: str, layout: str = OURS) -> str:
    """Return a grammar in the library's own form. `layout`: of JSON, ours or one of OTHERS. Raises ValueError."""
    import llguidance

    if kind == "json_schema":
        style: llguidance._lib.JsonCompileOptions = {"whitespace_flexible": True}
        if layout == OURS:
            style = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        elif layout == REQUIRED_FIRST:
            text = json.dumps(_put_required_first(json.loads(text)))
        return str(llguidance.LLMatcher.grammar_from_json_schema(text, overrides=style))
    if kind == "regex":
        return str(llguidance.LLMatcher.grammar_from_regex(text))
    if kind == "lark":
        return str(llguidance.LLMatcher.grammar_from_lark(text))
    raise ValueError(f"a grammar is one of {', '.join(KINDS)}, not {kind!r}")


def _put_required_first(schema: Any) -> Any:
    """Return a schema whose objects name those properties first that have to be there."""
    if isinstance(schema, list):
        return [_put_required_first(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    parts = {key: _put_required_first(part) for key, part in schema.items()}
    properties, required = parts.get("properties"), parts.get("required")
    if isinstance(properties, dict) and isinstance(required, list):
        parts["properties"] = dict(sorted(properties.items(), key=lambda item: item[0] not in required))
    return parts


def _find_compile_problem(kind: str, text: str) -> str:
    import llguidance

    compiled = compile_text(kind, _without_controls(text) if kind == "lark" else text)
    matcher = llguidance.LLMatcher(_byte_tokenizer(), compiled, log_level=0)
    if not matcher.is_error():
        matcher.compute_bitmask()
        if matcher.is_stopped() and not matcher.is_accepting():
            return "no text satisfies it"
        matcher.compute_ff_tokens()
        matcher.deep_copy()
    # What the library says of its state is left out.
    return str(matcher.get_error()).partition("<state>")[0]


def _without_controls(text: str) -> str:
    """Return a Lark grammar with the first byte for each control token: bytes have none."""
    lines = (line if "%json " in line else _CONTROL.sub("<[0]>", line) for line in text.split("\n"))
    return "\n".join(lines)


def _find_empty(kind: str, text: str) -> str:
    """Return what is wrong with a schema that no finite text satisfies; in a Lark grammar behind its rule's name."""
    for rule, schema in _list_schemas(kind, text):
        place = find_empty_part(schema)
        if place is not None:
            what = "it" if place == "#" else f"its part {place}"
            problem = f"no finite JSON satisfies {what}, which needs itself again: let the recursion end somewhere"
            return f"{rule}: {problem}" if rule else problem
    return ""


def _list_schemas(kind: str, text: str) -> Iterator[tuple[str, Any]]:
    if kind == "json_schema":
        yield "", json.loads(text)
    elif kind == "lark":
        decoder = json.JSONDecoder()
        for match in _EMBEDDED.finditer(text):
            yield match[1], decoder.raw_decode(text, match.end())[0]


@cache
def _byte_tokenizer() -> Any:
    import llguidance

    return llguidance.LLTokenizer("byte")
