"""Log-probabilities on the wire: bytes of partial characters, stops, the prompt; over a scripted control."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.tokenizer import Tokenizer
from orchestrator.clock import SystemClock
from orchestrator.daemon.api.answer_stream import AnswerAssembler, AnswerReader
from orchestrator.daemon.api.follow import RequestRecord
from orchestrator.daemon.api.logprobs import Echo, chat_logprobs, completion_logprobs
from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.api.question import AnswerHead, AnswerSource
from orchestrator.daemon.api.responses import Envelope
from orchestrator.daemon.api.streaming import Answer, Choice, Piece, TextAssembler
from orchestrator.daemon.api.wire import StreamOptions
from orchestrator.protocol.rounds import Delta
from policies.sampling.logprobs import TokenScore
from tests.api.support import ScriptedControl

TOKENIZER = Tokenizer.bytes_only()


def pieces_of(data: bytes, sizes: list[int], stops: list[str], echo: Echo | None = None, quiet: int = 0) -> list[Piece]:
    """Tell an answer's bytes, a token each, in deltas of the given sizes."""
    choice = Choice(0, TextAssembler(TOKENIZER.decoder(), stops, quiet), Answer(0.0), echo=echo)
    prompt = [TokenScore(-2.0)] * (len(echo.ids) - 1) if echo is not None else None
    pieces: list[Piece] = []
    rest = list(data)
    for size in [*sizes, len(rest)]:
        now, rest = rest[:size], rest[size:]
        scores = [TokenScore(-float(token), ((token, -float(token)),)) for token in now]
        pieces += choice.push_delta(Delta("r", now, "" if rest else "length", None, scores, prompt), 0.0)
        if not rest or choice.answer.finish:
            break
    return pieces


@given(
    st.text(alphabet="ab€😀", min_size=1, max_size=12),
    st.lists(st.integers(1, 5), max_size=30),
    st.sampled_from([[], ["b"], ["€a"], ["a😀", "bb"]]),
)
def test_however_an_answer_is_split_its_tokens_are_those_of_its_text(text, sizes, stops):
    pieces = pieces_of(text.encode(), sizes, stops)
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


def test_part_of_a_character_carries_its_bytes():
    (piece,) = pieces_of("€".encode(), [], [])
    content = chat_logprobs(piece.tokens, TOKENIZER)["content"]
    assert [each["bytes"] for each in content] == [[0xE2], [0x82], [0xAC]]
    assert content[0]["token"] == r"\xe2"  # noqa: S105
    assert content[0]["top_logprobs"] == [{"token": "\\xe2", "logprob": -226.0, "bytes": [0xE2]}]
    listed = completion_logprobs(piece.tokens, TOKENIZER)
    assert listed["tokens"] == ["bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert listed["text_offset"] == [0, 0, 0]


def test_an_answer_cut_within_a_character_tells_its_tokens():
    pieces = pieces_of("a€".encode()[:3], [1, 1], [])
    assert [token.token for piece in pieces for token in piece.tokens] == list("a€".encode()[:3])
    assert "".join(piece.text for piece in pieces) == "a\ufffd"


def test_the_prompt_comes_first_and_its_first_token_has_no_score():
    echo = Echo.of(list("é!".encode()), "é!", TOKENIZER)
    pieces = pieces_of(b"ok", [1], [], echo)
    listed = completion_logprobs([token for piece in pieces for token in piece.tokens], TOKENIZER)
    assert "".join(piece.text for piece in pieces) == "é!ok"
    assert listed["text_offset"] == [0, 0, 1, 2, 3]
    assert listed["token_logprobs"] == [None, -2.0, -2.0, -111.0, -107.0]
    assert listed["top_logprobs"][0] is None


def test_an_echo_shows_control_tokens_as_they_were_written():
    assert Echo.of([256, *b"a"], "<|end|>a", TOKENIZER).text == "<|end|>a"
    assert Echo.of([256, *b"a"], "a", TOKENIZER).text == "a"  # a begin token that the model adds is not shown
    assert Echo.of([256, *b"a"], None, TOKENIZER).text == "<|end|>a"


def test_a_stop_string_in_the_first_tokens_is_text():
    pieces = pieces_of(b"xxabxx", [1, 3], ["x"], quiet=3)
    assert "".join(piece.text for piece in pieces) == "xxab"


async def test_one_source_that_fails_ends_all():
    closed = []

    async def source(index: int) -> AsyncGenerator[Delta, None]:
        try:
            yield Delta("r", [97])
            if index == 1:
                raise ValueError("no")
            while True:
                yield Delta("r", [98])
                await asyncio.sleep(0)
        finally:
            closed.append(index)

    choices = [Choice(index, TextAssembler(TOKENIZER.decoder(), []), Answer(0.0)) for index in range(3)]
    record = RequestRecord(Metrics(ScriptedControl(), SystemClock()), SystemClock(), 0.0)
    head = AnswerHead("r", 0, "toy", [[1]], lambda _engine, _group: AnswerSource(None, ""), "coupled", TOKENIZER)
    writer = Envelope("completion", head, StreamOptions(), each=3)
    assembler = AnswerAssembler(writer, choices, record, SystemClock(), stream=False)
    with pytest.raises(ValueError, match="no"):
        await AnswerReader([source(index) for index in range(3)], assembler).read_all()
    assert sorted(closed) == [0, 1, 2]
