"""Grammars over a tokenizer's tokens: what they allow, force and refuse, from any thread and beyond the cache."""

from __future__ import annotations

import json
import threading
from dataclasses import dataclass

import numpy as np
import pytest

from adapters.contract import GrammarFailed
from adapters.grammar import GrammarCompiler
from adapters.grammar_check import find_grammar_problem
from adapters.tokenizer import Tokenizer

TOKENIZER = Tokenizer.bytes_only()
WIDTH = 280  # rows may be wider than the vocabulary


@dataclass(frozen=True)
class Text:
    kind: str
    text: str


def compiler() -> GrammarCompiler:
    return GrammarCompiler(lambda: TOKENIZER, WIDTH)


def list_allowed(mask: np.ndarray) -> bytes:
    return bytes(token for token in np.flatnonzero(mask) if token < 256)


def test_a_state_allows_forces_and_ends_by_its_tokens_alone():
    state = compiler().start(Text("json_schema", '{"enum": ["abc", "abd"]}'))
    assert (state.mask().shape, list_allowed(state.mask())) == ((WIDTH,), b'"')
    assert state.find_forced_tokens(()) == list(b'"ab')
    assert state.find_forced_tokens(b'"abc') == list(b'"')
    assert state.fitting(b'"abx') == 3
    assert list_allowed(state.mask()) == b'"'  # asking changed nothing
    for token in b'"ab':
        state.advance(token)
    assert list_allowed(state.mask()) == b"cd"
    assert state.find_forced_tokens(()) == []
    for token in b'd"':
        assert not state.ended
        state.advance(token)
    assert state.ended
    with pytest.raises(GrammarFailed):
        state.advance(ord("x"))


def test_json_has_one_layout():
    schema = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": [1, 2]}}, "required": ["a", "b"]}
    state = compiler().start(Text("json_schema", json.dumps(schema | {"additionalProperties": False})))
    assert bytes(state.find_forced_tokens(())) == json.dumps({"a": 1, "b": [1, 2]}).encode()


@pytest.mark.parametrize(
    "start",
    [
        '{\n  "place" : ',
        '{"place":"sea","count":',
        '{"place": "sea", "more": {"b":1}}\n\n ',
        '{"count": 1, "place": "s',
    ],
    ids=["spaces", "required first", "blank behind its end", "ours"],
)
def test_json_that_another_engine_began_goes_on(start):
    parts = {"count": {"type": "integer"}, "place": {"enum": ["sea"]}}
    more = {"type": "object", "properties": {"a": {}, "b": {"type": "integer"}}, "required": ["b"]}
    schema = {"type": "object", "properties": {**parts, "more": more}, "required": ["place"]}
    state = compiler().start(Text("json_schema", json.dumps(schema)), tokens := list(start.encode()))
    for token in tokens:
        state.advance(token)
    written = bytearray(tokens)
    while not state.ended:
        allowed = np.flatnonzero(state.mask())
        token = next((token for token in b'}"sea1: ' if token in allowed), allowed[0])
        state.advance(token)
        written.append(token)
    assert json.loads(bytes(written))["place"] == "sea"


def test_answers_of_one_grammar_do_not_share_a_place_and_threads_may_prepare():
    grammars = compiler()
    grammar = Text("regex", "ab+")
    thread = threading.Thread(target=grammars.prepare, args=(grammar,))
    thread.start()
    thread.join()
    state, other = grammars.start(grammar), grammars.start(grammar)
    state.advance(ord("a"))
    assert (list_allowed(state.mask()), list_allowed(other.mask())) == (b"b", b"a")


def test_more_grammars_than_are_remembered():
    grammars = compiler()
    for _ in range(2):
        for index in range(40):
            assert bytes(grammars.start(Text("regex", f"x{index}y")).find_forced_tokens(())) == f"x{index}y".encode()


@pytest.mark.parametrize(
    ("kind", "text", "says"),
    [
        ("json_schema", '{"type": "colour"}', "colour"),
        ("json_schema", '{"not": {}}', "not"),
        ("json_schema", "{", ""),
        ("regex", "(", "regex"),
        ("lark", "start: nothing", "nothing"),
        ("yaml", "a: b", "one of json_schema, regex, lark"),
    ],
)
def test_what_cannot_be_used_is_said_in_one_line(kind, text, says):
    problem = find_grammar_problem(kind, text)
    assert problem
    assert says in problem
    assert "\n" not in problem
    with pytest.raises(GrammarFailed):
        compiler().start(Text(kind, text))


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        (
            {"anyOf": [{"type": "string"}, {"type": "integer"}], "type": "object"},
            "Unsatisfiable schema: incompatible types",
        ),
        (
            {"properties": {"a": {"type": "string", "pattern": "["}}},
            "regex parse error: [ ^ error: unclosed character class",
        ),
        ({"properties": {"a | b\n 3 | c": {"type": "any"}}}, "Invalid type: any"),
        ({"$ref": "#/nowhere"}, "Pointer '/nowhere' does not exist"),
    ],
)
def test_a_schema_within_a_grammar_is_named_by_its_rule(schema, words):
    text = f'start: before inner\nbefore: "x"\ninner: %json {json.dumps(schema)}'
    assert find_grammar_problem("lark", text) == f"inner: {words}"
    assert find_grammar_problem("json_schema", json.dumps(schema)) == words


def test_a_grammar_that_is_wrong_itself_is_told_without_its_lines():
    problem = find_grammar_problem("lark", 'start: "a" nothing\n')
    assert "nothing" in problem
    assert " | " not in problem
