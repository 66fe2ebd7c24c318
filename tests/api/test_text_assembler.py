"""Text assembly: whatever the split into tokens, the text is the whole decode cut before the first stop string."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.tokenizer import Tokenizer
from orchestrator.api.streaming import TextAssembler
from orchestrator.api.tools.calls import Piece, Text

TOKENIZER = Tokenizer.bytes_only()
LETTERS = "ab€😀"  # few, so that stop strings overlap and contain each other
TEXT = st.text(alphabet=LETTERS, max_size=40)
STOPS = st.lists(st.text(alphabet=LETTERS, min_size=1, max_size=4), max_size=4)


def join(found: list[Piece]) -> str:
    return "".join(piece.text for piece in found if isinstance(piece, Text))


def cut_text(text: str, stops: list[str]) -> str:
    """Read letter by letter, and cut where a stop is complete: the longest of those that end there."""
    for end in range(1, len(text) + 1):
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
