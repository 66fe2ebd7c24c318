"""Tool calls in text: the same however the text is cut, nothing lost outside of them, nothing invented."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.daemon.api.tools.calls import CallArguments, CallBegins, Part, Text, ToolCallParser

NAMES = ("get_weather", "add")
WEATHER = '{"name": "get_weather", "arguments": {"city": "Oslo"}}'

ADD = '{"name":"add","arguments":{"a":1,"b":[2,{"c":3}]}}'
OTHER = '{"name": "other", "arguments": {}}'


def parse_texts(*texts: str) -> tuple[str, list[tuple[str, str]]]:
    """The text outside of calls, and each call's name and arguments."""
    parser = ToolCallParser(NAMES)
    pieces: list[Part] = []
    for text in texts:
        pieces += parser.push(text)
    pieces += parser.finish()
    outside = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    calls: list[list[str]] = []
    for piece in pieces:
        match piece:
            case CallBegins(index, name):
                assert index == len(calls)
                calls.append([name, ""])
            case CallArguments(index, text):
                assert index == len(calls) - 1
                calls[index][1] += text
            case _:
                pass
    assert parser.calls == len(calls)
    return outside, [(name, arguments) for name, arguments in calls]


def tag(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


FOUND: list[tuple[str, str, list[tuple[str, str]]]] = [
    ("no call here ", "no call here ", []),
    (tag(WEATHER), "", [("get_weather", '{"city": "Oslo"}')]),
    (f"Let me see.\n{tag(WEATHER)}\n", "Let me see.", [("get_weather", '{"city": "Oslo"}')]),
    (f"{tag(WEATHER)}\nand then ", "and then ", [("get_weather", '{"city": "Oslo"}')]),
    (
        f"a {tag(WEATHER)}\n{tag(ADD)} b",
        "ab",
        [("get_weather", '{"city": "Oslo"}'), ("add", '{"a":1,"b":[2,{"c":3}]}')],
    ),
    # A brace, a quote and a closing tag inside of a string are text.
    (tag('{"name": "add", "arguments": {"x": "}\\"</tool_call>"}}'), "", [("add", '{"x": "}\\"</tool_call>"}')]),
    # The other order, JSON inside of JSON, another name of the arguments, none at all.
    (tag('{"arguments": {"a": 1}, "name": "add"}'), "", [("add", '{"a": 1}')]),
    (tag('{"name": "add", "arguments": "{\\"a\\": 1}"}'), "", [("add", '{"a": 1}')]),
    (tag('{"name": "add", "parameters": {"a": 1}}'), "", [("add", '{"a": 1}')]),
    (tag('{"name": "add"}'), "", [("add", "{}")]),
    # More in the object, no closing tag, text where the tag should be.
    (tag('{"name": "add", "arguments": {}, "id": {"x": 1}}') + "!", "!", [("add", "{}")]),
    ('<tool_call>{"name": "add", "arguments": {}}', "", [("add", "{}")]),
    ('<tool_call>{"name": "add", "arguments": {}} so', "so", [("add", "{}")]),
    # Cut off by the limit.
    ('<tool_call>{"name": "add", "arguments": {"a": "x', "", [("add", '{"a": "x')]),
    ('<tool_call>{"name": "add", "arguments": {"a": "\\', "", [("add", '{"a": "\\')]),
    ('ok <tool_call>{"name": "ad', 'ok <tool_call>{"name": "ad', []),
    ("ok <tool_", "ok <tool_", []),
    # What looks like a call and is none.
    (f" {tag(OTHER)} ", f" {tag(OTHER)} ", []),
    ("the tag <tool_call> begins a call", "the tag <tool_call> begins a call", []),
    (tag("{}"), tag("{}"), []),
    (tag('{"name": "add", "arguments": [1]}'), tag('{"name": "add", "arguments": [1]}'), []),
    (tag('{"name": 5, "arguments": {}}'), tag('{"name": 5, "arguments": {}}'), []),
    (f"<tool_call> <tool_call>{WEATHER}</tool_call>", "<tool_call>", [("get_weather", '{"city": "Oslo"}')]),
    (f"< <tool_call{tag(WEATHER)}", "< <tool_call", [("get_weather", '{"city": "Oslo"}')]),
]


@pytest.mark.parametrize(("text", "outside", "calls"), FOUND)
def test_calls_and_text_are_told_apart_however_they_come(text, outside, calls):
    assert parse_texts(text) == (outside, calls)
    assert parse_texts(*text) == (outside, calls)
    for cut in range(len(text)):
        assert parse_texts(text[:cut], text[cut:]) == (outside, calls)


PIECES = st.one_of(
    st.sampled_from([tag(WEATHER), "<tool_call>", "</tool_call>", WEATHER, "{", "}", '"', "\\", "\n", " ", "<to"]),
    st.text(max_size=5),
)


@given(st.lists(PIECES, max_size=8).map("".join), st.data())
@settings(max_examples=200)
def test_where_the_text_is_cut_changes_nothing(text, data):
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    parts = [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert parse_texts(*parts) == parse_texts(text)


@given(st.text())
@example("<tool_call>")
def test_text_without_an_offered_call_is_kept_to_the_letter(text):
    parser = ToolCallParser([])
    assert parse_text(parser, text) == text


def parse_text(parser: ToolCallParser, text: str) -> str:
    pieces = [*parser.push(text), *parser.finish()]
    return "".join(piece.text for piece in pieces if isinstance(piece, Text))


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(st.dictionaries(st.text(), JSON, max_size=3), st.booleans())
def test_every_json_object_comes_through_as_arguments(arguments, ascii_only):
    text = json.dumps({"name": "add", "arguments": arguments}, ensure_ascii=ascii_only)
    outside, calls = parse_texts(*f"x{tag(text)}y")
    assert outside == "xy"
    assert calls == [("add", json.dumps(arguments, ensure_ascii=ascii_only))]


def test_arguments_come_as_they_are_written():
    parser = ToolCallParser(NAMES)
    parser.push('<tool_call>{"name": "get_weather", "arg')
    assert parser.push('uments": {"ci') == [CallBegins(0, "get_weather"), CallArguments(0, '{"ci')]
    assert parser.push('ty": "Os') == [CallArguments(0, 'ty": "Os')]
    assert (parser.calls, parser.ended) == (1, 0)
    assert parser.push('lo"}}') == [CallArguments(0, 'lo"}')]
    assert parser.ended == 1


CUT = f"Let me see.\n{tag(WEATHER)}\n{tag(ADD)}"


@pytest.mark.parametrize("end", range(len(CUT)))
def test_an_answer_that_is_cut_shows_no_piece_of_a_call(end):
    """Whatever comes before the first call stays, and so does text that merely looks like the beginning of a tag."""
    parser = ToolCallParser(NAMES)
    pieces = [*parser.push(CUT[:end]), *parser.finish(cut=True)]
    outside = "".join(piece.text for piece in pieces if isinstance(piece, Text))
    assert "Let me see.".startswith(outside.rstrip("\n<tol"))
    assert "<tool" not in outside
    assert "</" not in outside


@pytest.mark.parametrize("end", range(len(tag(WEATHER))))
def test_a_forced_call_that_is_cut_shows_no_text_at_all(end):
    parser = ToolCallParser(NAMES, forced=True)
    pieces = [*parser.push(tag(WEATHER)[:end]), *parser.finish(cut=True)]
    assert not [piece for piece in pieces if isinstance(piece, Text)]


def test_a_piece_of_a_closing_tag_is_never_text():
    """A model may also end there by itself."""
    for size in range(1, len("</tool_call>")):
        assert parse_texts(f"<tool_call>{WEATHER}" + "\n</tool_call>"[: size + 1])[0] == ""
