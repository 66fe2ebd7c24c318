"""Streams that are moved by plan, and their KV cache with them. No effects.

A stream that is wanted elsewhere runs on where it is, until the next replica has a place. Then its worker is asked
for its pages, writes them to shared memory behind its round, and forgets the stream. Between hosts it sends them to
the next worker while the stream goes on, and forgets the stream when few are left. The next worker begins with them.
Whatever goes wrong or lasts too long, the stream is due again as after a loss, and computed again.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum

import msgspec

from device_profiles.units import MIB, MS_PER_S, ceil_div
from orchestrator.daemon.control.actions import Action, AskPages, DropPages, LogLine, Send, WakeAfter
from orchestrator.daemon.control.port import KvMoveTotals
from orchestrator.daemon.control.replicas.replicas import Replica
from orchestrator.daemon.control.streams.streams import Stream, Streams
from orchestrator.protocol.commands import Cancel, KvPages, PageLink, Submit
from orchestrator.protocol.events import MovedIn, MovedOut
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.ready import Ready
from policies.serving.kv_move import CopyRate, MovePrice, may_begin, observe_copy, price_move
from policies.serving.replica_load import predict_prefill_ms

PLACE_PATIENCE_S = 10.0
"""So long a stream runs on where it is while the next replica has no place for it. ADR 0051."""
LINK_PATIENCE_S = 10.0
"""So long pages go over a link while their stream goes on. Then it stops, and the rest goes. ADR 0080."""
_MORE_TOKENS = 512
"""A stream may have so many more by the time that its pages are written. ADR 0051: up to 300 were seen while the next
worker loaded."""

ChooseNext = Callable[[Stream, float], tuple[Replica | None, int]]
"""Returns where a stream would go now, and how many of its tokens are remembered there."""


class _Stage(Enum):
    """Of a move. WANTED: the stream runs where it was. ASKED: it still does, for a round, or until its pages have gone
    over a link. CAME: it is due, and
    its pages are there. GIVEN: another worker has both, and has not said yet what came of them."""

    WANTED = "wanted"
    ASKED = "asked"
    CAME = "came"
    GIVEN = "given"


@dataclass(slots=True, eq=False)
class _Move:
    """One stream's. `key` names its memory, `at` and `sent_id` say where the stream is, `until_s` how long its stage
    may last. `target`: where it was to go when its worker was asked; `linked`: its pages go there over a link.
    `came_s`: when its pages were there."""

    stream: Stream
    source: Replica
    key: str
    at: str
    sent_id: str
    until_s: float
    stage: _Stage = _Stage.WANTED
    target: str = ""
    linked: bool = False
    patience_s: float = 0.0
    most_bytes: int = 0
    has_memory: bool = False
    pages: KvPages | None = None
    out_ms: float = 0.0
    came_s: float = 0.0

    @property
    def stands(self) -> bool:
        """True while nobody else has taken the stream from where this move has left it."""
        return self.stream.at == self.at and (not self.at or self.stream.sent_id == self.sent_id)


class KvMoves:
    """Moves of `streams`, where that is `enabled`. `share_memory`: all workers are on this host, and share its memory.
    `endpoints`: where other workers send pages to one, by its number. `totals` count streams that
    had a place where they were, since the beginning, by the number of the replica that they left."""

    def __init__(self, streams: Streams, choose_next: ChooseNext) -> None:
        self.enabled = False
        self.share_memory = False
        self.endpoints: dict[int, LinkEndpoint] = {}
        self.totals: dict[int, KvMoveTotals] = {}
        self._streams = streams
        self._choose_next = choose_next
        self._moves: dict[str, _Move] = {}  # by the request's id
        self._sums: dict[str, KvMoveTotals] = {}  # by the replica that gives streams away
        self._rate = CopyRate()

    def want(self, stream: Stream, source: Replica, now_s: float) -> tuple[bool, list[Action]]:
        """A stream is to leave a replica, where it has a place. True: it stays there until its pages can go along.
        False: it is to be recalled, and computed again."""
        before = self._moves.get(stream.key)
        if before is not None and before.stage in (_Stage.WANTED, _Stage.ASKED) and before.stands:
            return True, []
        ended = self._end(before) if before is not None else []
        why = self._find_obstacle(stream, source)
        target, remembered = self._choose_next(stream, now_s) if not why else (None, 0)
        if target is not None:
            why = self._price(stream, source, target, remembered)[1]
        if why:
            return False, [*ended, *self._count_recomputed(stream, source, why)]
        self._moves[stream.key] = _Move(
            stream, source, stream.sent_id, stream.at, stream.sent_id, now_s + PLACE_PATIENCE_S
        )
        return True, [*ended, WakeAfter(PLACE_PATIENCE_S)]

    @property
    def under_way(self) -> bool:
        return bool(self._moves or self._sums)

    def find_pages(self, stream: Stream) -> str:
        move = self._moves.get(stream.key)
        return move.target if move is not None and move.linked and move.stage is _Stage.CAME else ""

    def advance(self, now_s: float) -> list[Action]:
        actions: list[Action] = []
        for move in list(self._moves.values()):
            if self._streams.find_live(move.stream.key) is not move.stream:
                actions += self._end(move)
            elif not move.stands:
                actions += self._recompute(move, "the worker that had it is lost")
            elif now_s >= move.until_s:
                actions += self._give_up(move, now_s)
            elif move.stage is _Stage.WANTED:
                actions += self._ask(move, now_s)
        for name in [name for name in self._sums if not any(move.source.name == name for move in self._moves.values())]:
            actions += _tell_sum(name, self._sums.pop(name))
        return actions

    def observe_out(self, event: MovedOut, now_s: float) -> list[Action]:
        """A worker has forgotten a stream, and has written its pages or says why not."""
        stream = self._streams.find_sent(event.request_id)
        if stream is None:
            return []
        self._streams.recall(stream, now_s)
        move = self._moves.get(stream.key)
        if move is None or move.stage is not _Stage.ASKED:
            return []
        move.at = ""
        if event.pages is None:
            return self._recompute(move, event.why)
        move.stage, move.pages, move.out_ms, move.came_s = _Stage.CAME, event.pages, event.took_ms, now_s
        move.until_s = now_s + move.patience_s
        return [WakeAfter(move.patience_s)]

    def give(self, stream: Stream, sent: Submit, target: Replica, now_s: float) -> tuple[Submit, list[Action]]:
        """A stream was sent to a replica: return what its worker is to get, with pages where there are any."""
        move = self._moves.get(stream.key)
        if move is None or move.stage is not _Stage.CAME or move.pages is None:
            return sent, []
        if _format_of(target) != move.pages.format:
            return sent, self._recompute(move, f"pages of {target.name} are of another kind")
        if move.linked and target.name != move.target:
            return sent, self._recompute(move, f"its pages have gone to {move.target}, and it goes to {target.name}")
        move.stage, move.at, move.sent_id = _Stage.GIVEN, stream.at, stream.sent_id
        move.until_s = now_s + move.patience_s
        return msgspec.structs.replace(sent, pages=move.pages), [WakeAfter(move.patience_s)]

    def observe_in(self, event: MovedIn, now_s: float) -> list[Action]:
        """A worker has begun a stream with its pages, or says why not."""
        stream = self._streams.find_sent(event.request_id)
        move = self._moves.get(stream.key) if stream is not None else None
        if move is None or move.stage is not _Stage.GIVEN:
            return []
        if not event.length_bytes:
            return self._recompute(move, event.why)
        took_ms = move.out_ms + event.took_ms
        self._rate = observe_copy(self._rate, event.length_bytes, took_ms)
        seconds = move.out_ms / MS_PER_S + now_s - move.came_s
        self._add(move.source, KvMoveTotals(1, 0, event.length_bytes, seconds))
        text = "request %s went on with its KV cache: %.1f MiB, copied %s in %.0f ms"
        way = "over a link" if move.linked else "through shared memory"
        return [LogLine("debug", text, (move.stream.key, event.length_bytes / MIB, way, took_ms)), *self._end(move)]

    def _find_obstacle(self, stream: Stream, source: Replica) -> str:
        if not self.enabled:
            return "pages are not moved here"
        if not source.serving:
            return "the worker that has it does not answer"
        if not _format_of(source):
            return "its adapter cannot move pages"
        return "it may have ended its worker" if self._streams.is_suspect(stream) else ""

    def _price(self, stream: Stream, source: Replica, target: Replica, remembered: int) -> tuple[MovePrice, str]:
        ready = source.state.ready
        price = price_move(
            self._rate,
            tokens=len(stream.submit.prompt) + len(stream.committed),
            remembered_tokens=remembered,
            bytes_per_token=ready.kv.page_bytes / ready.kv.block_tokens if ready is not None else 0.0,
            prefill_ms_per_token=predict_prefill_ms(
                [(target if target.paces.plain.prefill_ms else source).paces.plain]
            ),
        )
        if _format_of(target) != _format_of(source):
            return price, f"pages of {target.name} are of another kind"
        if not self.share_memory and target.worker not in self.endpoints:
            return price, f"it shares no memory with {target.name}, which takes in no pages over links"
        if not may_begin(0, 0, _most_bytes(stream, ready)):
            return price, "its pages are more than shared memory may be"
        return price, "" if price.moves else price.reason

    def _ask(self, move: _Move, now_s: float) -> list[Action]:
        target, remembered = self._choose_next(move.stream, now_s)
        if target is None or target is move.source:
            return []
        moving = [other for other in self._moves.values() if other.stage is not _Stage.WANTED]
        coming = sum(other.target == target.name for other in moving if other.stage is _Stage.ASKED)
        length = _most_bytes(move.stream, move.source.state.ready)
        if self._streams.counts[target.name] + coming >= target.places or not may_begin(
            sum(other.most_bytes for other in moving if other.has_memory), len(moving), length
        ):
            return []
        price, why = self._price(move.stream, move.source, target, remembered)
        if why:
            return self._recompute(move, why, now_s)
        move.stage, move.target, move.most_bytes, move.has_memory = _Stage.ASKED, target.name, length, True
        move.patience_s = price.patience_s
        link, way, asked_s = None, "through shared memory", move.patience_s
        if not self.share_memory:
            link, way = PageLink(self.endpoints[target.worker], length, LINK_PATIENCE_S), "over a link"
            asked_s += LINK_PATIENCE_S
        move.linked = link is not None
        move.until_s = now_s + asked_s
        text = "request %s is to go to %s %s: %s"
        return [
            LogLine("debug", text, (move.stream.key, target.name, way, price.reason)),
            AskPages(move.source.worker, move.key, move.sent_id, length, link),
            WakeAfter(asked_s),
        ]

    def _give_up(self, move: _Move, now_s: float) -> list[Action]:
        match move.stage:
            case _Stage.WANTED:
                return self._recompute(move, "there was no place for it", now_s)
            case _Stage.ASKED:
                waited_s = move.patience_s + LINK_PATIENCE_S * move.linked
                return self._recompute(move, f"no pages after {waited_s:.1f} s", now_s)
            case _Stage.CAME:
                return self._recompute(move, "no replica took it in time")
            case _Stage.GIVEN:  # its worker has read them, or computes them again; it still is to say which
                move.until_s = math.inf
                return self._free(move)

    def _recompute(self, move: _Move, why: str, now_s: float | None = None) -> list[Action]:
        """Do without the pages. `now_s`: the stream is to be taken from its worker too."""
        cancelled: list[Action] = []
        if now_s is not None:
            cancelled = [Send(move.source.worker, Cancel(move.sent_id))]
            self._streams.recall(move.stream, now_s)
        return [*cancelled, *self._end(move), *self._count_recomputed(move.stream, move.source, why)]

    def _count_recomputed(self, stream: Stream, source: Replica, why: str) -> list[Action]:
        self._add(source, KvMoveTotals(recomputed=1))
        return [LogLine("debug", "request %s is computed again: %s", (stream.key, why))]

    def _end(self, move: _Move) -> list[Action]:
        del self._moves[move.stream.key]
        return self._free(move)

    def _free(self, move: _Move) -> list[Action]:
        had, move.has_memory = move.has_memory, False
        return [DropPages(move.key)] if had else []

    def _add(self, source: Replica, more: KvMoveTotals) -> None:
        self.totals[source.engine] = self.totals.get(source.engine, KvMoveTotals()) + more
        self._sums[source.name] = self._sums.get(source.name, KvMoveTotals()) + more


def _tell_sum(name: str, done: KvMoveTotals) -> list[Action]:
    if not done.pages and not done.recomputed:
        return []
    text = "worker %s gave away its streams: %d with their KV cache (%.1f MiB, %.2f s in all), %d are computed again"
    return [LogLine("info", text, (name, done.pages, done.bytes / MIB, done.seconds, done.recomputed))]


def _format_of(replica: Replica) -> str:
    ready = replica.state.ready
    return ready.kv.format if ready is not None else ""


def _most_bytes(stream: Stream, ready: Ready | None) -> int:
    if ready is None:
        return 0
    tokens = len(stream.submit.prompt) + len(stream.committed) + _MORE_TOKENS
    return ceil_div(min(tokens, ready.model.context_tokens), ready.kv.block_tokens) * ready.kv.page_bytes
