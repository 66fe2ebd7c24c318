"""Log-probabilities on the wire, and the prompt where it is shown before the answer (`echo`)."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from adapters.tokenizer import Tokenizer
from policies.sampling.logprobs import TokenScore


@dataclass(frozen=True, slots=True)
class ScoredToken:
    """A token of a text: `start` is the character at which it begins. `score` None: nothing stands before it."""

    token: int
    start: int
    score: TokenScore | None


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt as it is shown: its text, its tokens and the characters at which they begin."""

    text: str
    ids: tuple[int, ...]
    starts: tuple[int, ...]

    @classmethod
    def of(cls, ids: Sequence[int], given: str | None, tokenizer: Tokenizer) -> Echo:
        """Return a prompt's echo. `given`: its text, where it was text; the model's begin token is left out."""
        pieces = [tokenizer.token_bytes(token) for token in ids]
        if given is not None and b"".join(pieces[1:]) == given.encode("utf-8", "replace"):
            pieces[0] = b""
        utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        text, starts = "", []
        for piece in pieces:
            starts.append(len(text))
            text += utf8.decode(piece)
        return cls(text + utf8.decode(b"", final=True), tuple(ids), tuple(starts))

    def attach_scores(self, scores: Sequence[TokenScore] | None) -> tuple[ScoredToken, ...]:
        if scores is None:
            return ()
        return tuple(map(ScoredToken, self.ids, self.starts, (None, *scores)))


def chat_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> dict[str, Any]:
    def entry(token: int, logprob: float) -> dict[str, Any]:
        raw = tokenizer.token_bytes(token)
        return {"token": _format_token(raw, ""), "logprob": logprob, "bytes": list(raw)}

    content = [
        {
            **entry(each.token, each.score.logprob),
            "top_logprobs": [entry(token, logprob) for token, logprob in each.score.top],
        }
        for each in tokens
        if each.score is not None
    ]
    return {"content": content, "refusal": None}


def completion_logprobs(tokens: Sequence[ScoredToken], tokenizer: Tokenizer) -> dict[str, Any]:
    """Return a completion choice's `logprobs`: `top_logprobs` has the chosen token beside the likeliest."""

    def format_token(token: int) -> str:
        return _format_token(tokenizer.token_bytes(token), "bytes:")

    def top(each: ScoredToken) -> dict[str, float] | None:
        if each.score is None:
            return None
        likeliest: dict[str, float] = {}
        for token, logprob in (*each.score.top, (each.token, each.score.logprob)):
            likeliest.setdefault(format_token(token), logprob)  # two ids may have one text: the likelier counts
        return likeliest

    return {
        "tokens": [format_token(each.token) for each in tokens],
        "token_logprobs": [None if each.score is None else each.score.logprob for each in tokens],
        "top_logprobs": [top(each) for each in tokens],
        "text_offset": [each.start for each in tokens],
    }


def _format_token(raw: bytes, mark: str) -> str:
    """Return a token's text; part of a character as OpenAI shows it, every byte as \\xNN behind the mark."""
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return mark + "".join(f"\\x{value:02x}" for value in raw)
