"""One sequence in the tokens of two vocabularies: the target's committed text as the draft model reads it, and the
draft model's proposals as tokens that continue the target's.

Tokens stand for bytes, so bytes are what both sides agree on. Control tokens are mapped where both vocabularies have
one of the same name; what only one of them has is text to the other.
"""

from __future__ import annotations

import codecs
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from adapters.tokenizer import Tokenizer

LONGEST_WINDOW_BYTES = 256
"""Text without a place to settle at is cut all the same behind so much of it; `KEPT_WINDOW_BYTES` stay open. ADR 0018.
Not tuned: it bounds what is encoded a round."""
# Longer than nearly any token, so that a cut costs a guess at most (ADR 0018).
KEPT_WINDOW_BYTES = 64


class Bridge:
    """Two tokenizers, and which control tokens of one are control tokens of the other."""

    def __init__(self, target: Tokenizer, draft: Tokenizer) -> None:
        self.target, self.draft = target, draft
        ours, theirs = _controls(target), _controls(draft)
        self.to_draft = {ours[name]: theirs[name] for name in ours.keys() & theirs.keys()}
        self.to_target = {theirs[name]: ours[name] for name in ours.keys() & theirs.keys()}
        self.target_controls, self.draft_controls = target.control_ids, draft.control_ids


class DraftText:
    """A target's sequence in the draft's tokens, kept up as tokens are committed.

    `tokens`: of all characters that are whole. `pending`: committed bytes of a character that is not. `end`: the
    control token that ended the last turn. Only the text behind the last place at which tokens are settled is encoded
    again: a space between words, where the tokenizers at hand never join. In text without such places the window is cut
    at `LONGEST_WINDOW_BYTES`. The tokens around the cut may differ from those of the whole text. That costs a guess,
    never a token.
    """

    def __init__(self, bridge: Bridge) -> None:
        self._bridge = bridge
        draft = bridge.draft
        self.tokens = [draft.bos_id] if draft.adds_bos and draft.bos_id is not None else []
        self.end: int | None = None
        self.settled = len(self.tokens)  # how many stay as they are, whatever is committed
        self._window = ""
        self._empty = True
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bytes:
        """Committed bytes of a character that is not whole yet; they are not in `tokens`."""
        return self._utf8.getstate()[0]

    def extend(self, committed: Iterable[int]) -> None:
        target, to_draft = self._bridge.target, self._bridge.to_draft
        run = bytearray()
        for token in committed:
            if token in target.eos_ids:
                self.end = token
            if token in to_draft and not self._begin_token(token):
                self._encode(self._utf8.decode(bytes(run), final=True))
                run.clear()
                self.tokens.append(to_draft[token])
                self._settle(len(self.tokens), "")
            elif not self._begin_token(token):
                run += target.token_bytes(token)
            self._empty = False
        self._encode(self._utf8.decode(bytes(run)))

    def _begin_token(self, token: int) -> bool:
        """True for what a target wants before a text: there the draft has its own, if it wants one."""
        target = self._bridge.target
        return self._empty and target.adds_bos and token == target.bos_id

    def _encode(self, text: str) -> None:
        if not text:
            return
        draft = self._bridge.draft
        self._window += text
        encoded = draft.encode_behind(self._window, special=False)
        self.tokens[self.settled :] = encoded
        count, window = _window_behind(self._window.encode(), [draft.token_bytes(token) for token in encoded])
        if count:
            self._settle(self.settled + count, window)

    def _settle(self, count: int, window: str) -> None:
        self.settled, self._window = count, window


@dataclass(slots=True)
class RetokenizedDraft:
    """A draft model's proposal in the target's tokens. Tokens from index `loose` on may become others if the text
    goes on: the last word may be longer."""

    tokens: list[int] = field(default_factory=list)
    confidences: list[float] = field(default_factory=list)
    loose: int = 0


def retokenize_draft(
    bridge: Bridge, text: DraftText, tokens: Sequence[int], confidences: Sequence[float]
) -> RetokenizedDraft:
    """Return the target's tokens for what a draft model proposes behind `text`: their bytes are the proposal's bytes,
    from the end of what is committed on. Fewer, or none, where the proposal does not go on so."""
    made = RetokenizedDraft()
    run = _Run()
    pending = text.pending
    for token, confidence in zip(tokens, confidences, strict=True):
        if token in bridge.draft_controls:
            control = bridge.to_target.get(token, text.end if token in bridge.draft.eos_ids else None)
            whole = run.append_to(made, bridge, pending)
            if not whole or control is None:
                return made
            made.tokens.append(control)
            made.confidences.append(confidence)
            made.loose = len(made.tokens)
            run, pending = _Run(), b""
        else:
            run.marks.append((len(run.blob), confidence))
            run.blob += bridge.draft.token_bytes(token)
    run.append_to(made, bridge, pending)
    return made


@dataclass(slots=True)
class _Run:
    """Proposed bytes between control tokens; `marks`: where each draft token begins, and its confidence."""

    blob: bytearray = field(default_factory=bytearray)
    marks: list[tuple[int, float]] = field(default_factory=list)

    def append_to(self, made: RetokenizedDraft, bridge: Bridge, pending: bytes) -> bool:
        """Append the target's tokens for these bytes behind the `pending` ones. False: not all of them."""
        target, controls = bridge.target, bridge.target_controls
        text = _whole_characters(bytes(self.blob))
        blob = text.encode()
        if not blob.startswith(pending):
            return False
        encoded = target.encode_behind(text, special=True)
        pieces = [target.token_bytes(token) for token in encoded]
        settled, _ = _last_cut(blob, pieces)
        settled = max([settled, *(index + 1 for index, token in enumerate(encoded) if token in controls)])
        made.loose = len(made.tokens)
        at = 0
        for index, (token, piece) in enumerate(zip(encoded, pieces, strict=True)):
            end = at + len(piece)
            if not piece or blob[at:end] != piece or at < len(pending) < end:
                return False  # a text that is encoded as another one, or a token over the end of what is committed
            if end > len(pending):
                made.tokens.append(token)
                made.confidences.append(self._confidence(at if at > len(pending) else 0, end))
                if index < settled:
                    made.loose = len(made.tokens)
            at = end
        return len(blob) == len(self.blob)

    def _confidence(self, start: int, end: int) -> float:
        """A target's token is right when the draft's tokens that begin inside it are."""
        return math.prod(confidence for mark, confidence in self.marks if start <= mark < end)


def _controls(tokenizer: Tokenizer) -> dict[bytes, int]:
    return {tokenizer.token_bytes(token): token for token in tokenizer.control_ids}


def _whole_characters(blob: bytes) -> str:
    try:
        return blob.decode()
    except UnicodeDecodeError as error:
        return blob[: error.start].decode()


def _cuts(text: bytes, at: int) -> bool:
    """True for a space between two words: no tokenizer at hand has tokens over its left edge."""
    return (
        0 < at < len(text) - 1
        and text[at] == 0x20
        and not text[at - 1 : at].isspace()
        and not text[at + 1 : at + 2].isspace()
    )


def _last_cut(text: bytes, pieces: Sequence[bytes]) -> tuple[int, int]:
    """Return the last place between `pieces` (whose join ends `text`) where words are cut.

    The place is how many pieces stand before it, and its offset in `text`. It is (0, 0) where there is none.
    """
    at = len(text)
    for index in range(len(pieces) - 1, -1, -1):
        start = at - len(pieces[index])
        if start < 0 or text[start:at] != pieces[index]:
            break  # encoded as another text (normalised)
        at = start
        if _cuts(text, at):
            return index, at
    return 0, 0


def _window_behind(text: bytes, pieces: Sequence[bytes]) -> tuple[int, str]:
    """Return how many of the tokens are settled, and the text behind them."""
    count, at = _last_cut(text, pieces)
    if count or len(text) <= LONGEST_WINDOW_BYTES:
        return count, text[at:].decode()
    at = len(text)
    for index in range(len(pieces) - 1, 0, -1):
        at -= len(pieces[index])
        if len(text) - at >= KEPT_WINDOW_BYTES and text[at:].startswith(pieces[index]) and text[at] & 0xC0 != 0x80:
            return index, text[at:].decode()
    return len(pieces), ""
