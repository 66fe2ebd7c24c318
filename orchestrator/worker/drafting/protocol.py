"""What crosses the link between a target's worker and a draft worker, and the link itself.

Token ids cross it, with a byte of confidence each. Under a rule that judges distributions, the sparse row that each was
drawn from crosses it too. The target's side speaks first (`Hello`, answered by `Welcome`), then sends draft requests:
what became of sequences, and asks for drafts. A request with asks is answered, once. Beside that the draft's side sends
what it drafts ahead, unasked: so a round whose outcome was foreseen waits for nothing, not even for the way.
"""

from __future__ import annotations

import select
import socket
import ssl
import time
from typing import TypeVar

import msgspec
import numpy as np

from adapters.framing import ProtocolError, add_header, take_frame
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.protocol.links.endpoint import LinkLost, notice_silence
from orchestrator.worker.drafting.port import NOTHING, Ask, Draft
from policies.sampling import PROPOSAL_WIDTH, DraftDistribution, Sampling

_TOKEN = np.dtype("<u4")
_SHARE = np.dtype("<f4")
VERSION = 4
MAX_FRAME_BYTES = 64 * 1024 * 1024
"""A longer frame can only be a broken stream: a prompt of a million tokens has 5 MB."""

MOST_AHEAD = 512
"""A longer line drafted ahead makes no sense. ADR 0079: eight times the longest lead."""
# Of a byte that says a confidence. ADR 0079: finer than what confidences are calibrated to.
_SURE = 255
_READ_BYTES = 256 * 1024  # of one read from the socket: more than any answer. Not tuned.
# A host that has gone without a word is noticed after half a minute. ADR 0056.
_SILENT_S, _PROBE_EVERY_S, _PROBES = 15, 5, 3
_NOT_NOW = (BlockingIOError, ssl.SSLWantReadError, ssl.SSLWantWriteError)
_T = TypeVar("_T")


class NoDistribution(Exception):
    """What came is not what a token can have been drawn from."""


class SparseRow(msgspec.Struct, frozen=True, array_like=True):
    """See policies.sampling.DraftDistribution: ids (little-endian uint32) and their shares (little-endian float32)."""

    tokens: bytes
    shares: bytes


def pack_proposal(proposal: DraftDistribution | None) -> SparseRow | None:
    """Return a proposal as it travels; None, of a token that was not drawn, is None."""
    if proposal is None:
        return None
    return SparseRow(proposal.tokens.astype(_TOKEN).tobytes(), proposal.shares.astype(_SHARE).tobytes())


def unpack_proposal(row: SparseRow | None, drawn: int, vocabulary: int) -> DraftDistribution | None:
    """Return what `drawn` was drawn from: to the bit what was packed. Raises NoDistribution."""
    if row is None:
        return None
    if len(row.tokens) != len(row.shares) or len(row.tokens) % _TOKEN.itemsize:
        raise NoDistribution("a row's tokens and shares do not go together")
    if len(row.tokens) > PROPOSAL_WIDTH * _TOKEN.itemsize:
        raise NoDistribution(f"a row is wider than {PROPOSAL_WIDTH} tokens")
    ids = np.frombuffer(row.tokens, _TOKEN).astype(np.uint32, copy=False)
    proposal = DraftDistribution(ids, np.frombuffer(row.shares, _SHARE).astype(np.float32, copy=False))
    probabilities = proposal.probabilities(vocabulary)
    if probabilities is None:
        raise NoDistribution("a row is no distribution over its vocabulary")
    if not probabilities[ids == drawn].sum() > 0.0:
        raise NoDistribution(f"token {drawn} cannot have been drawn from its row")
    return proposal


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """The target's side. `host`, `device` and `cores` say where the target runs (see `host_id`; no cores: not known).
    `target` is its own name for itself: where it connects once more, the older connection is over."""

    version: int
    host: str
    device: str
    cores: list[int] = []
    target: str = ""


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The draft's side. `refusal` is empty where it serves; its vocabulary must be the expected one. `apart`: drafting
    while the target verifies takes nothing away from it; `runs_ahead`: it does so unasked. `most_sequences`: for so
    many it drafts at a time, those that began first (0: for all)."""

    version: int
    drafter: DrafterState
    vocabulary_size: int
    vocabulary_fingerprint: str
    apart: bool = True
    runs_ahead: bool = False
    refusal: str = ""
    most_sequences: int = 0


class Begin(msgspec.Struct, frozen=True, tag="b", array_like=True):
    """See drafting.port.Drafter.begin. For a sequence that goes on: with all that was committed."""

    key: str
    tokens: list[int]
    sampling: Sampling


class Extend(msgspec.Struct, frozen=True, tag="x", array_like=True):
    """See drafting.port.Drafter.extend."""

    key: str
    tokens: list[int]


class End(msgspec.Struct, frozen=True, tag="e", array_like=True):
    """See drafting.port.Drafter.end."""

    key: str
    keep: bool


Update = Begin | Extend | End


class DraftRequest(msgspec.Struct, frozen=True, tag="turn", array_like=True):
    """Updates in their order, then asks. `number` grows by one with every turn that has asks; an answer is of
    use within `within_ms`: with what there is by then. Where the target waits for it, `round_ms` is what a round takes
    without waiting, the price of a token; else 0. `sent_s`: when it was sent, by the target's monotonic clock, which on
    one host is everybody's (0: not told). `lead`: how many tokens the link's round trip is worth, see
    policies.speculation.draft_wait."""

    number: int
    updates: list[Update]
    asks: list[Ask]
    within_ms: float = 0.0
    round_ms: float = 0.0
    sent_s: float = 0.0
    lead: int = 0


class WireDraft(msgspec.Struct, frozen=True, array_like=True):
    """See drafting.port.Draft. `sureness` is a confidence in 255ths for each token. `rows` are its proposals: one for
    each token, or none at all."""

    tokens: tuple[int, ...] = ()
    sureness: bytes = b""
    rows: tuple[SparseRow | None, ...] = ()

    @classmethod
    def of(cls, draft: Draft) -> WireDraft:
        sureness = bytes(round(confidence * _SURE) for confidence in draft.confidences)
        return cls(draft.tokens, sureness, tuple(pack_proposal(proposal) for proposal in draft.proposals))


class DraftResponse(msgspec.Struct, frozen=True, tag="answer", array_like=True):
    """One draft for each ask of a request, `took_ms` after it came; it was read `held_ms` ago. `offsets`: how many
    tokens, committed since the ask, each draft is behind (none: they all continue what was asked for). The rest counts
    since the connection began: sequences whose draft was there before it was asked for (`ahead_hits`), and those whose
    draft was not."""

    number: int
    drafts: list[WireDraft]
    took_ms: float = 0.0
    memory_bytes: int = 0
    ahead_hits: int = 0
    ahead_misses: int = 0
    peak_rss_bytes: int = 0
    offsets: list[int] = []
    held_ms: float = 0.0


class WireBranch(msgspec.Struct, frozen=True, array_like=True):
    """What is drafted for the case that the target takes the first `accepted` tokens of a line and then `token`, whose
    chance is `sureness` 255ths."""

    accepted: int
    token: int
    sureness: int
    draft: WireDraft

    @classmethod
    def of(cls, accepted: int, token: int, chance: float, draft: Draft) -> WireBranch:
        return cls(accepted, token, round(chance * _SURE), WireDraft.of(draft))


class DraftLines(msgspec.Struct, frozen=True, tag="lines", array_like=True):
    """What is drafted ahead for a sequence, sent unasked while its target verifies. `sequence` counts the Begins of the
    connection, from 1. Lines go on behind its first `base` tokens; later ones take the place of earlier ones.
    `branches` are those that have grown since lines were sent last with this base; the others stay."""

    sequence: int
    base: int
    line: WireDraft
    branches: list[WireBranch] = []


def check_guess(guess: WireDraft, limit: int, vocabulary: int, drafter: str) -> Draft:
    """Return a guess as `drafter`'s draft. Raises ProtocolError where it cannot be one."""
    tokens = guess.tokens
    if len(tokens) > limit or len(tokens) != len(guess.sureness):
        raise ProtocolError(f"a draft has {len(tokens)} tokens; {limit} were asked for")
    if not all(0 <= token < vocabulary for token in tokens):
        raise ProtocolError(f"a token is outside its vocabulary of {vocabulary}")
    if guess.rows and len(guess.rows) != len(tokens):
        raise ProtocolError(f"{len(guess.rows)} rows came for {len(tokens)} tokens")
    if not tokens:
        return NOTHING
    try:
        rows = zip(guess.rows, tokens, strict=False)
        proposals = tuple(unpack_proposal(row, token, vocabulary) for row, token in rows)
    except NoDistribution as error:
        raise ProtocolError(f"{error}") from error
    return Draft(tokens, tuple(sure / _SURE for sure in guess.sureness), drafter, proposals=proposals)


_hellos = msgspec.msgpack.Decoder(Hello)
_welcomes = msgspec.msgpack.Decoder(Welcome)
_turns = msgspec.msgpack.Decoder(DraftRequest)
_answers = msgspec.msgpack.Decoder(DraftResponse | DraftLines)
_encoder = msgspec.msgpack.Encoder()


class Link:
    """Frames over a connected socket. Nothing here waits longer than it is told to; one thread uses it. `sent_bytes`
    and `received_bytes` count frames; what encryption and the network add is not in them."""

    def __init__(self, connected: socket.socket) -> None:
        connected.setblocking(False)
        if connected.family != socket.AF_UNIX:
            connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            notice_silence(connected, silent_s=_SILENT_S, every_s=_PROBE_EVERY_S, probes=_PROBES)
        self._socket = connected
        self._in = bytearray()
        self._out = bytearray()
        self.sent_bytes = self.received_bytes = 0

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def on_one_host(self) -> bool:
        return self._socket.family == socket.AF_UNIX

    @property
    def unsent(self) -> int:
        """Bytes that the other side had no room for yet."""
        return len(self._out)

    def send(self, message: Hello | Welcome | DraftRequest | DraftResponse | DraftLines) -> None:
        """Send as much as goes without waiting; the rest goes with later calls. Raises LinkLost."""
        frame = add_header(_encoder.encode(message))
        self.sent_bytes += len(frame)
        self._out += frame
        self.flush()

    def flush(self) -> None:
        """Send what is left, as far as it goes without waiting. Raises LinkLost."""
        try:
            while self._out:
                del self._out[: self._socket.send(self._out)]
        except _NOT_NOW:
            return
        except OSError as error:
            raise LinkLost(_describe_error(error)) from error

    def hello(self, timeout_s: float) -> Hello:
        """Return the other side's first word. Raises LinkLost, ProtocolError."""
        return _decode_message(_hellos, self._receive_greeting(timeout_s))

    def welcome(self, timeout_s: float) -> Welcome:
        """Return the other side's answer to a Hello. Raises LinkLost, ProtocolError."""
        return _decode_message(_welcomes, self._receive_greeting(timeout_s))

    def turn(self) -> DraftRequest | None:
        """Return the next draft request that is there. Raises LinkLost, ProtocolError."""
        frame = self._receive(0.0)
        return None if frame is None else _decode_message(_turns, frame)

    def answer(self, timeout_s: float) -> DraftResponse | None:
        """Return the next answer, passing over what was drafted ahead; None when there is none within `timeout_s`.
        Raises LinkLost, ProtocolError."""
        end_s = time.perf_counter() + timeout_s
        while isinstance(message := self.drafts(timeout_s), DraftLines):
            timeout_s = max(0.0, end_s - time.perf_counter())
        return message

    def drafts(self, timeout_s: float) -> DraftResponse | DraftLines | None:
        """Return the draft's side's next word; None when there is none within `timeout_s`. Raises LinkLost,
        ProtocolError."""
        frame = self._receive(timeout_s)
        return None if frame is None else _decode_message(_answers, frame)

    def close(self) -> None:
        """Hang up. Idempotent."""
        self._socket.close()

    def _receive_greeting(self, timeout_s: float) -> bytes:
        frame = self._receive(timeout_s)
        if frame is None:
            raise LinkLost(f"no greeting within {timeout_s:g} s")
        return frame

    def _receive(self, timeout_s: float) -> bytes | None:
        deadline_s = time.perf_counter() + timeout_s
        while (frame := take_frame(self._in, MAX_FRAME_BYTES)) is None:
            if not self._read():
                left_s = deadline_s - time.perf_counter()
                if left_s <= 0.0:
                    return None
                self.wait(left_s)
        return frame

    def _read(self) -> bool:
        try:
            data = self._socket.recv(_READ_BYTES)
        except _NOT_NOW:
            return False
        except OSError as error:
            raise LinkLost(_describe_error(error)) from error
        if not data:
            raise LinkLost("the connection was closed")
        self.received_bytes += len(data)
        self._in += data
        return True

    def wait(self, seconds: float) -> None:
        """Wait until there is something to read, or room for what is left to send, which then goes. Raises LinkLost."""
        poll = select.poll()
        try:
            poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
        except ValueError:  # another thread has closed it
            raise LinkLost("the connection was closed") from None
        poll.poll(seconds * 1000.0)
        self.flush()


def _decode_message(decoder: msgspec.msgpack.Decoder[_T], frame: bytes) -> _T:
    try:
        return decoder.decode(frame)
    except msgspec.DecodeError as error:
        raise ProtocolError(f"{error}") from error


def _describe_error(error: OSError) -> str:
    return error.strerror or type(error).__name__
