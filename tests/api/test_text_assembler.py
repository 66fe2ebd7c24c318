"""Text assembly: whatever the split into tokens, the text is the whole decode cut before the first stop string."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.tokenizer import Tokenizer
from orchestrator.daemon.api.streaming import TextAssembler
from orchestrator.daemon.api.tools.calls import CallArguments, CallBegins, Part, Text, ToolCallParser

TOKENIZER = Tokenizer.bytes_only()
LETTERS = "ab€😀"  # few, so that stop strings overlap and contain each other
TEXT = st.text(alphabet=LETTERS, max_size=40)
STOPS_OF_ABC = st.lists(st.text(alphabet="abc", min_size=1, max_size=4), max_size=4)
STOPS = st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=4), max_size=4)


def join(found: list[Part]) -> str:
    return "".join(piece.text for piece in found if isinstance(piece, Text))


def cut_text(text: str, stops: list[str], quiet: int = 0) -> str:
    """Read letter by letter, and cut where a stop is complete: the longest of those that end there. Only those count
    that end behind the first `quiet` characters."""
    for end in range(quiet + 1, len(text) + 1):
        ending = [len(stop) for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(ending)]
    return text


@given(TEXT, STOPS, st.lists(st.integers(0, 7), max_size=80))
def test_any_split_gives_the_whole_text_cut_at_the_first_stop(text, stops, sizes):
    ids = list(text.encode())
    assembler = TextAssembler(TOKENIZER.decoder(), stops)
    given_out = []
    for size in [*sizes, len(ids)]:
        given_out.append(join(assembler.push(ids[:size])))
        ids = ids[size:]
        so_far = "".join(given_out)
        assert cut_text(text, stops).startswith(so_far)  # nothing is ever retracted
        assert "\ufffd" not in so_far  # no half character
    given_out.append(join(assembler.finish()))
    assert "".join(given_out) == cut_text(text, stops)
    assert assembler.stopped == any(stop in text for stop in stops)


@given(st.lists(st.binary(max_size=4), max_size=20))
def test_invalid_bytes_become_replacement_characters_as_in_a_whole_decode(pieces):
    assembler = TextAssembler(TOKENIZER.decoder(), [])
    text = join([found for piece in pieces for found in assembler.push(list(piece))]) + join(assembler.finish())
    assert text == b"".join(pieces).decode("utf-8", "replace")


@pytest.mark.parametrize("sizes", [[4], [3, 1], [1, 1, 1, 1]])
def test_the_stop_that_is_complete_first_wins_however_tokens_split_it(sizes):
    assembler = TextAssembler(TOKENIZER.decoder(), ["abcX", "c"])
    ids = list(b"abcX")
    text = "".join(join(assembler.push([ids.pop(0) for _ in range(size)])) for size in sizes)
    assert text == "ab"


def test_text_is_held_back_only_while_it_could_become_a_stop():
    assembler = TextAssembler(TOKENIZER.decoder(), ["END"])
    assert join(assembler.push(list(b"xE"))) == "x"
    assert join(assembler.push(list(b"N"))) == ""
    assert join(assembler.push(list(b"T"))) == "ENT"


@given(st.text(alphabet="abc", max_size=40), STOPS_OF_ABC, st.integers(0, 12), st.lists(st.integers(0, 7), max_size=40))
def test_a_stop_may_begin_in_the_first_tokens_and_ends_the_text_behind_them(text, stops, quiet, sizes):
    """A token is a character here. Nothing that was given out is ever retracted."""
    ids = list(text.encode())
    assembler = TextAssembler(TOKENIZER.decoder(), stops, quiet)
    expected, told = cut_text(text, stops, quiet), ""
    for size in [*sizes, len(ids)]:
        told += join(assembler.push(ids[:size]))
        ids = ids[size:]
        assert expected.startswith(told)
    assert told + join(assembler.finish()) == expected
    assert assembler.stopped == (expected != text)


@pytest.mark.parametrize(
    ("text", "stop", "quiet", "expected"),
    [
        ("say END now", "END", 5, "say "),  # begins in the fifth token
        ("say END now", "END", 6, "say "),
        ("say END now", "END", 7, "say END now"),  # it ended within them
        ("END END", "END", 3, "END "),
        ("aaaa", "aa", 2, "a"),  # the first that ends behind them
        ("ab", "ab", 1, ""),
    ],
)
def test_a_stop_that_begins_within_min_tokens_is_found(text, stop, quiet, expected):
    assembler = TextAssembler(TOKENIZER.decoder(), [stop], quiet)
    told = "".join(join(assembler.push([byte])) for byte in text.encode())
    assert told + join(assembler.finish()) == expected


def tag(text: str) -> str:
    return f"<tool_call>\n{text}\n</tool_call>"


CALL = tag('{"name": "add", "arguments": {"a": "stop\\n"}}')
WITH_CALLS = st.lists(
    st.one_of(
        st.sampled_from([CALL, "<tool_call>", "stop", "st", "op", "\n", " ", "x"]), st.text("stop\n<", max_size=3)
    ),
    max_size=7,
).map("".join)


def parse(pieces: list[Part]) -> tuple[str, list[str]]:
    calls = [""] * sum(isinstance(piece, CallBegins) for piece in pieces)
    for piece in pieces:
        if isinstance(piece, CallArguments):
            calls[piece.index] += piece.text
    return join(pieces), calls


def assemble(text: str, stops: list[str], sizes: list[int]) -> tuple[str, list[str], str | None]:
    assembler = TextAssembler(TOKENIZER.decoder(), stops, 0, ToolCallParser(["add"]))
    ids, found = list(text.encode()), list[Part]()
    for size in [*sizes, len(ids)]:
        found += assembler.push(ids[:size])
        ids = ids[size:]
    return *parse([*found, *assembler.finish()]), assembler.stopped_by


@given(WITH_CALLS, st.sampled_from([["stop"], ["\n"], ["p\n", "sto"], ["<tool_call>"], ["name"]]), st.data())
def test_stops_cut_what_is_outside_of_calls_however_the_text_comes(text, stops, data):
    sizes = data.draw(st.lists(st.integers(0, 9), max_size=20))
    content, calls, stopped_by = assemble(text, stops, sizes)
    assert (content, calls, stopped_by) == assemble(text, stops, [])
    assert all(json.loads(call) == {"a": "stop\n"} for call in calls)  # no call is ever cut
    if stopped_by is None:
        without_stops = assemble(text, [], [])
        assert (content, calls) == without_stops[:2]
    else:
        assert stopped_by in stops


@given(st.text(alphabet=" \n", max_size=300), st.booleans())
def test_white_space_for_ever_is_given_out_and_stopped(space, call):
    text = f"x{space}{CALL if call else 'y'}"
    content, calls, _ = assemble(text, [], [1] * len(text))
    assert (content, len(calls)) == ((f"x{space[:-64]}", 1) if call else (text, 0))
    assembler = TextAssembler(TOKENIZER.decoder(), ["\n\n"], 0, ToolCallParser(["add"]))
    assembler.push(list(b"x" + b"\n" * 100))
    assert assembler.stopped
