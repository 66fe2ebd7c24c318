"""Log-probabilities on the wire: bytes of partial characters, stops, the prompt; over a scripted control."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.tokenizer import Tokenizer
from orchestrator.clock import SystemClock
from orchestrator.daemon.api.choices import merge_pieces
from orchestrator.daemon.api.logprobs import Echo, chat_logprobs, completion_logprobs
from orchestrator.daemon.api.streaming import Answer, Choice, Piece, TextAssembler, texts
from orchestrator.protocol.messages import Delta, TokenScore

TOKENIZER = Tokenizer.bytes_only()


async def pieces_of(
    data: bytes, sizes: list[int], stops: list[str], echo: Echo | None = None, quiet: int = 0
) -> list[Piece]:
    """Tell an answer's bytes, a token each, in deltas of the given sizes."""
    tokens = list(data)

    async def deltas() -> AsyncGenerator[Delta, None]:
        rest = tokens
        prompt = [TokenScore(-2.0)] * (len(echo.ids) - 1) if echo is not None else None
        for size in [*sizes, len(rest)]:
            now, rest = rest[:size], rest[size:]
            scores = [TokenScore(-float(token), ((token, -float(token)),)) for token in now]
            yield Delta("r", now, "" if rest else "length", None, scores, prompt)
            if not rest:
                return

    choice = Choice(0, TextAssembler(TOKENIZER.decoder(), stops, quiet), frozenset(), Answer(0.0), echo)
    return [piece async for piece in texts(deltas(), choice, SystemClock())]


@given(
    st.text(alphabet="ab€😀", min_size=1, max_size=12),
    st.lists(st.integers(1, 5), max_size=30),
    st.sampled_from([[], ["b"], ["€a"], ["a😀", "bb"]]),
)
async def test_however_an_answer_is_split_its_tokens_are_those_of_its_text(text, sizes, stops):
    pieces = await pieces_of(text.encode(), sizes, stops)
    told = "".join(piece.text for piece in pieces)
    tokens = [token for piece in pieces for token in piece.tokens]
    assert bytes(token.token for token in tokens) == told.encode()
    for token, place in zip(tokens, [i for i, letter in enumerate(told) for _ in letter.encode()], strict=True):
        assert token.start == place
        assert token.score == TokenScore(-float(token.token), ((token.token, -float(token.token)),))
    so_far = 0  # no piece has a token that begins behind its text
    for piece in pieces:
        so_far += len(piece.text)
        assert all(token.start < so_far for token in piece.tokens)
    assert [piece.finish for piece in pieces if piece.finish] == ["stop" if len(told) < len(text) else "length"]


async def test_part_of_a_character_carries_its_bytes():
    (piece,) = await pieces_of("€".encode(), [], [])
    content = chat_logprobs(piece.tokens, TOKENIZER)["content"]
    assert [each["bytes"] for each in content] == [[0xE2], [0x82], [0xAC]]
    assert content[0]["token"] == r"\xe2"  # noqa: S105
    assert content[0]["top_logprobs"] == [{"token": "\\xe2", "logprob": -226.0, "bytes": [0xE2]}]
    listed = completion_logprobs(piece.tokens, TOKENIZER)
    assert listed["tokens"] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert listed["text_offset"] == [0, 0, 0]


async def test_an_answer_cut_within_a_character_tells_its_tokens():
    pieces = await pieces_of("a€".encode()[:3], [1, 1], [])
    assert [token.token for piece in pieces for token in piece.tokens] == list("a€".encode()[:3])
    assert "".join(piece.text for piece in pieces) == "a\ufffd"


async def test_the_prompt_comes_first_and_its_first_token_has_no_score():
    echo = Echo.of(list("é!".encode()), "é!", TOKENIZER)
    pieces = await pieces_of(b"ok", [1], [], echo)
    listed = completion_logprobs([token for piece in pieces for token in piece.tokens], TOKENIZER)
    assert "".join(piece.text for piece in pieces) == "é!ok"
    assert listed["text_offset"] == [0, 0, 1, 2, 3]
    assert listed["token_logprobs"] == [None, -2.0, -2.0, -111.0, -107.0]
    assert listed["top_logprobs"][0] is None


def test_an_echo_shows_control_tokens_as_they_were_written():
    assert Echo.of([256, *b"a"], "<|end|>a", TOKENIZER).text == "<|end|>a"
    assert Echo.of([256, *b"a"], "a", TOKENIZER).text == "a"  # a begin token that the model adds is not shown
    assert Echo.of([256, *b"a"], None, TOKENIZER).text == "<|end|>a"


async def test_a_stop_string_in_the_first_tokens_is_text():
    pieces = await pieces_of(b"xxabxx", [1, 3], ["x"], quiet=3)
    assert "".join(piece.text for piece in pieces) == "xxab"


async def test_one_source_that_fails_ends_all():
    closed = []

    async def source(index: int) -> AsyncGenerator[Piece, None]:
        try:
            yield Piece(index, "a")
            if index == 1:
                raise ValueError("no")
            while True:
                yield Piece(index, "b")
                await asyncio.sleep(0)
        finally:
            closed.append(index)

    with pytest.raises(ValueError, match="no"):
        _ = [piece async for piece in merge_pieces([source(index) for index in range(3)])]
    assert sorted(closed) == [0, 1, 2]
