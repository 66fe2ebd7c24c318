"""Text assembly: whatever the split into tokens, the text is the whole decode cut before the first stop string."""

from hypothesis import given
from hypothesis import strategies as st

from adapters.tokenizer import Tokenizer
from orchestrator.api.streaming import TextAssembler

TOKENIZER = Tokenizer.bytes_only()
TEXT = st.text(alphabet="abcé€😀\n", max_size=60)
STOPS = st.lists(st.text(alphabet="abcé€😀\n", min_size=1, max_size=4), max_size=4)


def cut(text: str, stops: list[str]) -> str:
    places = [text.find(stop) for stop in stops if stop in text]
    return text[: min(places)] if places else text


@given(TEXT, STOPS, st.lists(st.integers(0, 7), max_size=80))
def test_any_split_gives_the_whole_text_cut_at_the_first_stop(text, stops, sizes):
    ids = list(text.encode())
    assembler = TextAssembler(TOKENIZER.decoder(), stops)
    given_out = []
    for size in [*sizes, len(ids)]:
        given_out.append(assembler.push(ids[:size]))
        ids = ids[size:]
        so_far = "".join(given_out)
        assert cut(text, stops).startswith(so_far)  # nothing is ever retracted
        assert "\ufffd" not in so_far  # no half character
    given_out.append(assembler.finish())
    assert "".join(given_out) == cut(text, stops)
    assert assembler.stopped == any(stop in text for stop in stops)


@given(st.lists(st.binary(max_size=4), max_size=20))
def test_invalid_bytes_become_replacement_characters_as_in_a_whole_decode(pieces):
    assembler = TextAssembler(TOKENIZER.decoder(), [])
    text = "".join(assembler.push(list(piece)) for piece in pieces) + assembler.finish()
    assert text == b"".join(pieces).decode("utf-8", "replace")


def test_text_is_held_back_only_while_it_could_become_a_stop():
    assembler = TextAssembler(TOKENIZER.decoder(), ["END"])
    assert assembler.push(list(b"xE")) == "x"
    assert assembler.push(list(b"N")) == ""
    assert assembler.push(list(b"T")) == "ENT"
