"""What became of each request of late: when it was where, and by which routes, what its rounds drafted, how it ended,
and how long all that took. No effects.

Live requests have one history each. Those that have ended stay in a bounded book, for whoever asks afterwards, and so
do routes. From their times follows when the next one can be expected to begin, and when a place may be free.
"""

from __future__ import annotations

import math
from collections import OrderedDict, deque
from dataclasses import dataclass, field, fields, replace
from typing import Any, Final

from device_profiles.units import MS_PER_S
from orchestrator.daemon.control.port import RouteView
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.packed_tokens import BYTES_PER_TOKEN
from orchestrator.protocol.rounds import Delta, DrafterShare, RequestStats
from policies.running_mean import update_mean
from policies.serving.admission import expect_gap_s
from policies.serving.routing import Route
from policies.serving.slo import predict_ttft_ms

# ADR 0047, 0102: what is promised is seldom right for longer. Not tuned.
MAX_RETRY_AFTER_S = 30
# ADR 0102: what lay between the last ends. Not tuned.
_REMEMBERED_ENDS = 8
_FIRST_OUTPUT_TOKENS = 128.0  # until answers ended. Not tuned.
_NEWEST = 0.1  # weight of the newest end in running means. Not tuned.
# ADR 0067: the last 1,024. Bounds memory.
_MOST_ENDED: Final = 1024
# ADR 0067: 64, merged in pairs.
_MOST_STRETCHES: Final = 64
_MOST_MOVES: Final = 16  # of one request. Bounds memory.
_NEWEST_STRETCHES: Final = 4  # that are not merged, as they are read most. Not tuned.
_SHARE_COUNTS: Final = tuple(name for name in DrafterShare.__struct_fields__ if name != "name")
_NO_STATS: Final = RequestStats(0, 0, 0, 0, 0, 0.0, 0.0)  # nothing drafted yet
# ADR 0057: the last 2,048 requests. Bounds memory.
_MOST_REQUESTS: Final = 2048
# ADR 0057: or 16,384 candidates.
_MOST_RATED: Final = 16_384
# ADR 0057: of each request.
_MOST_ATTEMPTS: Final = 8
_MOST_SHOWN: Final = 64  # candidates of one choice. Bounds memory.


@dataclass(frozen=True, slots=True)
class TypicalTimes:
    """Running means of requests' times to their first token, and from there to their end. None before the first."""

    prefill_ms: float | None = None
    decode_ms: float | None = None

    @property
    def service_s(self) -> float | None:
        if self.decode_ms is None or self.prefill_ms is None:
            return None
        return (self.prefill_ms + self.decode_ms) / MS_PER_S

    def ttft_ms(self, live: int, places: int) -> float:
        """Return when the first token of a request can be expected that comes now, where `live` ones have `places`
        (1 or more) to run in; 0 where that is not known."""
        if self.decode_ms is None or self.prefill_ms is None:
            return 0.0
        gap_ms = (self.prefill_ms + self.decode_ms) / places
        return predict_ttft_ms(live + 1 - places, gap_ms, self.prefill_ms)


@dataclass(frozen=True, slots=True)
class Running:
    """The streams that there are: `slots` of them are decoded at a time. The oldest is there since `since_s`, by the
    clock. `left_s`: what the one that is nearest to its end needs at its own pace; None where that is not known."""

    slots: int
    since_s: float
    left_s: float | None = None


class RecentLatency:
    def __init__(self) -> None:
        self.times = TypicalTimes()
        self._output_tokens = _FIRST_OUTPUT_TOKENS
        self._ends_s: deque[float] = deque(maxlen=_REMEMBERED_ENDS)
        self._promised_s = 0.0

    @property
    def output_tokens(self) -> int:
        return max(1, round(self._output_tokens))

    def observe_first_token(self, stats: RequestStats | None) -> None:
        if stats is not None:
            self.times = replace(self.times, prefill_ms=_mean(self.times.prefill_ms, stats.prefill_ms))

    def observe_end(self, now_s: float, first_token_s: float | None, tokens: int) -> None:
        """A stream ended with so many tokens. `first_token_s`: None where its first one came from a lost worker."""
        self._ends_s.append(now_s)
        if first_token_s is not None:
            decode_ms = (now_s - first_token_s) * MS_PER_S
            self.times = replace(self.times, decode_ms=_mean(self.times.decode_ms, decode_ms))
        self._output_tokens = update_mean(self._output_tokens, tokens, _NEWEST)

    def promise_place(self, now_s: float, running: Running, wanted: int = 1) -> int:
        """Return after how many seconds a request that is refused now may find the places that it wants. Each refused
        one is promised the next places to get free, so that they do not all come back for one."""
        ended_s = self._ends_s[-1] if self._ends_s else running.since_s
        gap_s = expect_gap_s(
            ends_gap_s=self._ends_gap_s(),
            service_s=self.times.service_s,
            slots=running.slots,
            left_s=running.left_s,
            waited_s=max(0.0, now_s - max(ended_s, running.since_s)),
        )
        self._promised_s = min(max(now_s, self._promised_s) + gap_s * wanted, now_s + MAX_RETRY_AFTER_S)
        return max(1, math.ceil(self._promised_s - now_s))

    def _ends_gap_s(self) -> float | None:
        if len(self._ends_s) < 2:
            return None
        return (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)


def _mean(before: float | None, now: float) -> float:
    return update_mean(now if before is None else before, now, _NEWEST)


@dataclass(slots=True)
class RoundsView:
    """What some rounds in a row did for a request, the last of them `at_s` seconds after it came."""

    at_s: float
    rounds: int
    tokens: int
    drafted: int
    accepted: int

    def add(self, more: RoundsView) -> None:
        """Count the rounds behind them, too."""
        self.at_s = more.at_s
        self.rounds += more.rounds
        self.tokens += more.tokens
        self.drafted += more.drafted
        self.accepted += more.accepted


@dataclass(frozen=True, slots=True)
class MoveView:
    """A request left `replica`, `at_s` seconds after it came; and why."""

    at_s: float
    replica: str
    why: str


@dataclass(slots=True, kw_only=True, eq=False)
class _RequestFacts:
    """What a request's history says as it is. `owner`: of whose key, by the key's id. `digest` names what it asks for
    ("": not known yet). `outcome`: how it ended, "" while it lives. Its client brought `prediction_tokens` that it
    expected; `predicted` of them were verified, and `predicted_right` were right. `variant`: the canary's variant that
    served it. `tolerated` and `branches`: see RequestStats."""

    owner: str = ""
    prompt_tokens: int = 0
    replica: str = ""
    digest: str = ""
    outcome: str = ""
    tokens: int = 0
    prefill_ms: float = 0.0
    prediction_tokens: int = 0
    predicted: int = 0
    predicted_right: int = 0
    variant: str = ""
    tolerated: int = 0
    branches: int = 0
    branches_taken: int = 0


_FACTS: Final = tuple(fact.name for fact in fields(_RequestFacts))


@dataclass(slots=True, kw_only=True)
class RequestView(_RequestFacts):
    """A request of late. `state`: "queued" (no replica has it), "sent" (without a token yet), "decoding", "moving"
    (between two replicas) or "ended". It came `age_s` ago; `took_s` to its end (None: it lives). `depth`: draft tokens
    a round, of its newest rounds. `queue_ms`: it waited here and at its first worker. `drafters`: what each did, of
    late where it lives. It never has the text."""

    request_id: str
    state: str
    age_s: float
    took_s: float | None
    depth: float
    queue_ms: float
    first_token_ms: float | None
    rounds: tuple[RoundsView, ...]
    moves: tuple[MoveView, ...]
    other_bits_from: tuple[int, ...]
    drafters: tuple[DrafterShare, ...]


@dataclass(slots=True, eq=False, kw_only=True)
class RequestHistory(_RequestFacts):
    """One request's. By the clock: `ended_s`, `sent_s` (first sent) and `first_s` (its first token)."""

    key: str
    opened_s: float
    sent_s: float | None = None
    first_s: float | None = None
    ended_s: float | None = None
    worker_queue_ms: float = 0.0
    rounds: list[RoundsView] = field(default_factory=list)
    moves: list[MoveView] = field(default_factory=list)
    other_bits_from: list[int] = field(default_factory=list)
    _shares: dict[str, DrafterShare] = field(default_factory=dict)
    _left_shares: dict[str, DrafterShare] = field(default_factory=dict)
    _stats: RequestStats = _NO_STATS
    _a_stretch: int = 1

    def observe_sent(self, replica: str, now_s: float) -> None:
        self.replica, self._stats = replica, _NO_STATS
        self._left_shares, self._shares = _add_shares(self._left_shares, self._shares), {}
        if self.sent_s is None:
            self.sent_s = now_s

    def observe_recalled(self, why: str, now_s: float) -> None:
        if self.sent_s is not None and self.replica:
            self.moves = [*self.moves[1 - _MOST_MOVES :], MoveView(now_s - self.opened_s, self.replica, why)]
        self.replica = ""

    def observe_other_group(self, token: int) -> None:
        """From this token on, counted from 0, its bits are of another group than before."""
        self.other_bits_from = [*self.other_bits_from[1 - _MOST_MOVES :], token]

    def observe_delta(self, delta: Delta, now_s: float) -> None:
        if delta.stats is not None:
            before, self._stats = self._stats, delta.stats
            drafted, accepted = delta.stats.drafted - before.drafted, delta.stats.accepted - before.accepted
            self.predicted += delta.stats.predicted - before.predicted
            self.predicted_right += delta.stats.predicted_right - before.predicted_right
            self.tolerated += delta.stats.tolerated - before.tolerated
            self.branches += delta.stats.branches - before.branches
            self.branches_taken += delta.stats.branches_taken - before.branches_taken
            self._add(RoundsView(now_s - self.opened_s, 1, len(delta.tokens), drafted, accepted))
            if delta.stats.drafters:
                self._shares = {share.name: share for share in delta.stats.drafters}
        if delta.tokens and self.first_s is None:
            self.first_s = now_s
            if delta.stats is not None:
                self.worker_queue_ms, self.prefill_ms = delta.stats.queue_ms, delta.stats.prefill_ms
        self.tokens += len(delta.tokens)

    def _add(self, done: RoundsView) -> None:
        """Add a round. A long request has longer stretches, not more of them."""
        if self.rounds and self.rounds[-1].rounds < self._a_stretch:
            self.rounds[-1].add(done)
            return
        if len(self.rounds) >= _MOST_STRETCHES:
            for first, second in zip(self.rounds[::2], self.rounds[1::2], strict=True):
                first.add(second)
            self.rounds = self.rounds[::2]
            self._a_stretch *= 2
        self.rounds.append(done)

    def view(self, now_s: float) -> RequestView:
        newest = self.rounds[-_NEWEST_STRETCHES:]
        count = sum(stretch.rounds for stretch in newest)
        left_queue_s = self.sent_s if self.sent_s is not None else self.ended_s if self.ended_s is not None else now_s
        facts: dict[str, Any] = {name: getattr(self, name) for name in _FACTS}
        return RequestView(
            **facts,
            request_id=self.key,
            state=self._name_state(),
            age_s=now_s - self.opened_s,
            took_s=None if self.ended_s is None else self.ended_s - self.opened_s,
            depth=sum(stretch.drafted for stretch in newest) / count if count else 0.0,
            queue_ms=(left_queue_s - self.opened_s) * MS_PER_S + self.worker_queue_ms,
            first_token_ms=None if self.first_s is None else (self.first_s - self.opened_s) * MS_PER_S,
            rounds=tuple(map(replace, self.rounds)),
            moves=tuple(self.moves),
            other_bits_from=tuple(self.other_bits_from),
            drafters=tuple(_add_shares(self._left_shares, self._shares).values()),
        )

    def _name_state(self) -> str:
        if self.outcome:
            return "ended"
        if self.first_s is not None:
            return "decoding" if self.replica else "moving"
        return "sent" if self.replica else "queued"


def _add_shares(before: dict[str, DrafterShare], more: dict[str, DrafterShare]) -> dict[str, DrafterShare]:
    """Return what each drafter did by the words of two workers, one after the other."""
    shares = dict(before)
    for name, share in more.items():
        if (known := shares.get(name)) is not None:
            counts = {count: getattr(known, count) + getattr(share, count) for count in _SHARE_COUNTS}
            shares[name] = DrafterShare(name, **counts)
        else:
            shares[name] = share
    return shares


class RequestHistories:
    def __init__(self) -> None:
        self._live: dict[str, RequestHistory] = {}
        self._ended: OrderedDict[str, RequestHistory] = OrderedDict()

    def open(self, submit: Submit, now_s: float) -> RequestHistory:
        history = RequestHistory(
            key=submit.request_id,
            owner=submit.owner,
            prompt_tokens=len(submit.prompt),
            opened_s=now_s,
            tokens=len(submit.committed),
            variant=submit.variant,
            prediction_tokens=len(submit.prediction) // BYTES_PER_TOKEN,
        )
        self._live[submit.request_id] = history
        return history

    def end(self, key: str, outcome: str, now_s: float) -> None:
        history = self._live.pop(key, None)
        if history is None:
            return
        history.outcome, history.ended_s = outcome, now_s
        self._ended.pop(key, None)
        self._ended[key] = history
        if len(self._ended) > _MOST_ENDED:
            self._ended.popitem(last=False)

    def list_live(self) -> list[RequestHistory]:
        return list(self._live.values())

    def find_choices(self, request_id: str) -> list[RequestHistory]:
        every = {**self._ended, **self._live}
        return [every[key] for key in sorted(every) if belongs_to(key, request_id)]

    def find_like(self, wanted: str) -> RequestHistory | None:
        every = [*self._ended.values(), *self._live.values()]
        alike = (history for history in reversed(every) if wanted == history.digest or belongs_to(history.key, wanted))
        return next(alike, None)


def belongs_to(key: str, request_id: str) -> bool:
    """Return whether a request's key is of this answer. An answer with several choices has the id of the first."""
    answer = request_id if not request_id.endswith("-0") else request_id[:-2]
    return key == request_id or (key.startswith(f"{answer}-") and key[len(answer) + 1 :].isdecimal())


@dataclass(slots=True)
class _Noted:
    attempt: int
    route: Route
    at_s: float


class RouteBook:
    """The routes of the last requests, of each its last attempts. What it holds is bounded by its candidates, too."""

    def __init__(self) -> None:
        self._noted: OrderedDict[str, list[_Noted]] = OrderedDict()
        self._rated = 0

    def note(self, key: str, attempt: int, route: Route, now_s: float) -> None:
        """A request was sent by this route, or waits: the last reason to wait is kept until it is sent."""
        noted = _Noted(attempt, route.shorten(_MOST_SHOWN), now_s)
        self._rated += len(noted.route)
        before = self._noted.pop(key, None)
        if before is None:
            self._noted[key] = [noted]
        else:
            kept = [noted for noted in before if noted.route.replica is not None][1 - _MOST_ATTEMPTS :]
            self._rated -= _count_rated(before) - _count_rated(kept)
            self._noted[key] = [*kept, noted]
        while len(self._noted) > _MOST_REQUESTS or (self._rated > _MOST_RATED and len(self._noted) > 1):
            self._rated -= _count_rated(self._noted.popitem(last=False)[1])

    def find_routes(self, request_id: str, now_s: float) -> list[RouteView]:
        """Return the routes of a request's choices, the last first. With several, its id is the first choice's."""
        keys = [key for key in self._noted if belongs_to(key, request_id)]
        routes = [(noted, key) for key in keys for noted in self._noted[key]]
        return [
            _view(key, noted, now_s)
            for noted, key in sorted(routes, key=lambda pair: (-pair[0].at_s, pair[1], -pair[0].attempt))
        ]


def _view(key: str, noted: _Noted, now_s: float) -> RouteView:
    route = noted.route
    return RouteView(
        *(key, noted.attempt, now_s - noted.at_s, route.replica or "", route.draft, route.reason),
        request=route.request,
        rated=route.rated,
    )


def _count_rated(noted: list[_Noted]) -> int:
    return sum(len(attempt.route) for attempt in noted)


class RouteText:
    """A route in one line, with why the others were not taken: made when it is written."""

    __slots__ = ("_route",)

    def __init__(self, route: Route) -> None:
        self._route = route

    def __str__(self) -> str:
        return format_route(self._route)


def format_route(route: Route) -> str:
    others = "; ".join(f"{rated.name}: {rated.why_not}" for rated in route.rated if rated.why_not)
    return f"{route.reason}; not {others}" if others else route.reason
