"""Answers in the forms of models: thoughts, text and calls are the same however the stream is cut."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from adapters.output_form import FORMS, find_output_form
from orchestrator.daemon.api.tools.calls import (
    CallArguments,
    CallBegins,
    OutputParser,
    Part,
    Text,
    Thought,
    ToolCallParser,
)
from orchestrator.daemon.api.tools.harmony import HarmonyParser
from orchestrator.daemon.api.tools.syntaxes import build_syntax
from orchestrator.daemon.api.tools.thoughts import ThoughtSplitter
from tests.api.recorded_outputs import RECORDED, SCHEMAS, TEMPLATE_OUTPUTS, Recorded

MARKUP = sorted({mark for recorded in RECORDED for mark in recorded.output.split() if not mark.isalnum()})


TAGS = {"mistral": ("[THINK]", "[/THINK]"), "gemma": ("<|channel>thought", "<channel|>")}
OUTPUTS = [*RECORDED, *(output.recorded for output in TEMPLATE_OUTPUTS)]
NAMES = [
    *(recorded.form for recorded in RECORDED),
    *(f"{output.recorded.form}-{output.templates[0]}" for output in TEMPLATE_OUTPUTS),
]


def build_parser(form: str, *, single: bool = False) -> OutputParser:
    if form == "harmony":
        return HarmonyParser(SCHEMAS, single=single)
    return ToolCallParser(SCHEMAS, build_syntax(form, SCHEMAS), single=single)


def read(
    form: str, pieces: list[str], *, opened: bool = False, cut: bool = False, single: bool = False
) -> tuple[str, str, list[tuple[str, str]], bool]:
    """Text, thoughts and calls of an answer that comes in these pieces, and whether it ended within a call."""
    parser = build_parser(form, single=single)
    tags = ("<seed:think>", "</seed:think>") if "<seed:" in "".join(pieces) else TAGS.get(form, ("<think>", "</think>"))
    splitter = ThoughtSplitter(tags, opened=opened)
    parts: list[Part] = []
    for piece in pieces:
        parts += splitter.push(parser.push(piece))
        assert parser.pending <= sum(map(len, pieces))
    parts += splitter.push(parser.finish(cut=cut), last=True)
    text = "".join(part.text for part in parts if isinstance(part, Text))
    thought = "".join(part.text for part in parts if isinstance(part, Thought))
    calls: list[tuple[str, str]] = []
    for part in parts:
        match part:
            case CallBegins(index, name):
                assert index == len(calls)
                calls.append((name, ""))
            case CallArguments(index, more):
                assert index == len(calls) - 1
                calls[index] = (calls[index][0], calls[index][1] + more)
            case _:
                pass
    assert parser.calls == len(calls)
    return text, thought, calls, parser.unfinished


def cut_text(text: str, data: st.DataObject) -> list[str]:
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=6)))
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def test_every_form_is_recorded():
    assert {recorded.form for recorded in RECORDED} == set(FORMS)


@pytest.mark.parametrize(
    ("template", "form"),
    [
        ("{{ '<|tool_call>call:' + name }}<|channel>", "gemma"),
        ("List of tools: <|tool_list_start|>", "llama_pythonic"),
        ("<tool_calls>[{{ call }}]</tool_calls> in place of <tool_call>", "json_list"),
        ("respond with <|tool_call|> followed by a JSON list", "json_list"),
        ("]<]minimax[>[<tool_call>]<]minimax[>[<invoke name=", None),
        ("<tool_call>", "hermes"),
    ],
)
def test_a_template_shows_its_form(template: str, form: str | None):
    assert find_output_form(template) == form


@pytest.mark.parametrize("recorded", OUTPUTS, ids=NAMES)
def test_every_cut_of_an_output_is_read_alike(recorded: Recorded):
    text, thought, calls, unfinished = whole = read(recorded.form, [recorded.output], opened=recorded.opened)
    assert (text, thought) == (recorded.text, recorded.thought)
    assert [(name, json.loads(arguments)) for name, arguments in calls] == list(recorded.calls)
    assert not unfinished
    assert read(recorded.form, list(recorded.output), opened=recorded.opened) == whole
    for cut in range(len(recorded.output)):
        pieces = [recorded.output[:cut], recorded.output[cut:]]
        assert read(recorded.form, pieces, opened=recorded.opened) == whole


@pytest.mark.parametrize("recorded", OUTPUTS, ids=NAMES)
def test_an_output_that_is_ended_anywhere_is_read_alike(recorded: Recorded):
    for end in range(len(recorded.output)):
        text = recorded.output[:end]
        for cut in (False, True):
            whole = read(recorded.form, [text], opened=recorded.opened, cut=cut)
            assert read(recorded.form, list(text), opened=recorded.opened, cut=cut) == whole


@given(st.sampled_from(FORMS), st.lists(st.sampled_from(MARKUP) | st.text(max_size=5), max_size=8), st.data())
@settings(max_examples=300)
def test_where_any_text_is_cut_changes_nothing(form, pieces, data):
    text, opened, cut = "".join(pieces), data.draw(st.booleans()), data.draw(st.booleans())
    whole = read(form, [text], opened=opened, cut=cut)
    assert read(form, cut_text(text, data), opened=opened, cut=cut) == whole
    assert read(form, list(text), opened=opened, cut=cut) == whole


PROSE = st.text(st.characters(exclude_characters="<[{|"), max_size=40)


@given(st.sampled_from(FORMS), PROSE)
def test_text_without_markup_is_kept_to_the_letter(form, text):
    assert read(form, list(text)) == (text, "", [], False)


@pytest.mark.parametrize("form", FORMS)
def test_the_first_call_ends_an_answer_of_one_call(form):
    recorded = next(recorded for recorded in RECORDED if recorded.form == form and len(recorded.calls) > 1)
    whole = read(form, [recorded.output], opened=recorded.opened, single=True)
    assert [name for name, _ in whole[2]] == [recorded.calls[0][0]]
    assert read(form, list(recorded.output), opened=recorded.opened, single=True) == whole


JSON: Any = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=6,
)


def write_gemma(value: Any) -> str:
    """Write a value as Gemma 4's template does."""
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case list():
            return f"[{','.join(map(write_gemma, value))}]"
        case dict():
            return f"{{{','.join(f'{write_gemma(key)}:{write_gemma(inner)}' for key, inner in value.items())}}}"
        case _:
            return json.dumps(value)


WRITERS: dict[str, Any] = {
    "hermes": lambda text: f'<tool_call>{{"name": "search", "arguments": {text}}}</tool_call>',
    "llama3_json": lambda text: f'{{"name": "search", "parameters": {text}}}',
    "mistral": lambda text: f"[TOOL_CALLS]search[ARGS]{text}",
    "json_list": lambda text: f'<tool_calls>[{{"name": "search", "arguments": {text}}}]</tool_calls>',
    "gemma": lambda text: f"<|tool_call>call:search{write_gemma(json.loads(text))}<tool_call|>",
    "harmony": lambda text: f"<|channel|>commentary to=functions.search <|constrain|>json<|message|>{text}<|call|>",
}


@given(st.sampled_from(sorted(WRITERS)), st.dictionaries(st.text(), JSON, max_size=4), st.data())
def test_any_arguments_come_through(form, arguments, data):
    written = WRITERS[form](json.dumps(arguments, ensure_ascii=data.draw(st.booleans())))
    _, _, calls, _ = read(form, cut_text(written, data))
    assert [(name, json.loads(text)) for name, text in calls] == [("search", arguments)]
