"""The live streams: what was asked, what was delivered, and where each is.

History is the truth: a stream is its Submit and the tokens it has delivered, and any worker can go on from there.
Each time that a stream is sent it has another id, so that what a worker still says of a stream that was moved away
is nobody's. No effects.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Callable, Set
from dataclasses import dataclass, field
from itertools import islice
from operator import attrgetter
from typing import Any, Final, NamedTuple

import msgspec

from device_profiles.units import MS_PER_S
from orchestrator.daemon.control.actions import Deliver, Notify
from orchestrator.daemon.control.health.blame import Blame, Witness, digest_request
from orchestrator.daemon.control.streams.overrides import NO_OVERRIDES, ActiveOverrides
from orchestrator.daemon.control.streams.request_history import RecentLatency, RequestHistories, RequestHistory, Running
from orchestrator.errors import RequestError
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import Delta, RequestStats
from orchestrator.protocol.trace_messages import ResumedStream
from policies.serving.failover.blame import SETTLED_TOKENS
from policies.serving.fair_order import FairAccounts, WaitingRequest, order_fairly
from policies.serving.overrides import EffectiveBound

_MOST_ANSWERED = 4096  # bounds memory. Not tuned.
# Streams, for when the first of them ends. ADR 0102: bounds time; it is for a Retry-After.
_LOOKED_AT = 32
_ARRIVAL: Final[Callable[[Any], int]] = attrgetter("number")


def tell_nobody_of(name: str, more: int) -> None:
    """Nobody wants to know of counts."""


class Interruption(NamedTuple):
    """Why a stream left a replica (see ResumedStream), which one, and when, by the clock."""

    why: str
    left: str
    at_s: float


class Sender(NamedTuple):
    """What tokens come from: a replica's group, and the digest of its model."""

    group: str
    model_digest: str


NOBODY: Final = Sender("", "")


@dataclass(slots=True, eq=False)
class Stream:
    """One request.

    `at` is the replica that has it ("": none), `sent_id` its id there. `gained`: the tokens that it had there.
    `probation`: the tokens that it must have there before anything joins it. `due_s`: since when it waits for a
    replica. `failed_at`: replicas that gave it up. `group`: of the replica that its last token came from
    (control.state.find_group), with the `model_digest` of that; `sender`: of the one that has it. `interrupted`: what
    its next token ends, where it is traced. `overrides` stood when it was opened, `speculation` holds by them where it
    is, and its reader has heard of `reported_bound`. It was the `number`-th that came, at `opened_s`, by the clock,
    waited here for `held_ms` until it was first sent, and had its first token at `first_s`. `bound_to`: where an
    operator sends it, `left`: from where; "": none does.
    """

    submit: Submit
    committed: list[int]
    history: RequestHistory
    number: int = 0
    at: str = ""
    sent_id: str = ""
    sends: int = 0
    group: str = ""
    model_digest: str = ""
    sender: Sender = NOBODY
    gained: int = 0
    probation: int = 0
    due_s: float = 0.0
    opened_s: float = 0.0
    held_ms: float = 0.0
    failed_at: list[str] = field(default_factory=list)
    first_s: float | None = None
    last_stats: RequestStats | None = None
    overrides: ActiveOverrides = NO_OVERRIDES
    speculation: EffectiveBound | None = None
    reported_bound: EffectiveBound | None = None
    interrupted: Interruption | None = None
    bound_to: str = ""
    left: str = ""
    _digest: str = ""

    @property
    def digest(self) -> str:
        """The name of what is asked for (control.health.blame)."""
        self._digest = self._digest or digest_request(self.submit)
        return self._digest

    @property
    def key(self) -> str:
        return self.submit.request_id

    def expect_left_s(self, now_s: float, usual_tokens: int) -> float:
        """Return in how many seconds it may end, at the pace that it has had since its first token. An answer is
        expected to have `usual_tokens`, or the most that it may have."""
        made = max(1, len(self.committed))
        pace_s = 0.0 if self.first_s is None else (now_s - self.first_s) / made
        return pace_s * max(1, min(self.submit.max_tokens, usual_tokens) - made)

    def resumption(self) -> Submit:
        sent_id = self.sent_id or self.key
        if sent_id == self.key and self.committed == self.submit.committed:
            return self.submit
        return msgspec.structs.replace(self.submit, request_id=sent_id, committed=list(self.committed))


class Streams:
    """All live streams, as they came. `on_count`: called with a replica's name that has one more (1) or fewer (-1)."""

    def __init__(self, blame: Blame | None = None, on_count: Callable[[str, int], object] = tell_nobody_of) -> None:
        self._blame = blame or Blame(0.0)
        self._live: dict[str, Stream] = {}
        self._waiting: dict[str, Stream] = {}  # those that no replica has, by their keys
        self._in_order = True  # whether they are in the order of arrival
        self._sent: dict[str, Stream] = {}  # by the id that its worker knows, in the order of sending
        self._at: dict[str, dict[str, Stream]] = {}  # the same, by the replica that has them
        self._tried: dict[str, Stream] = {}  # those of them that are suspects on probation
        self._begun: dict[str, int] = {}  # digests of those of them that had no token yet
        self._arrived = 0
        self._owned = 0  # those that have an owner
        self._on_count = on_count
        self.changed_groups = 0  # how often a stream went on with other bits
        self.counts: Counter[str] = Counter()  # live streams by the replica that has them
        self.owners: Counter[str] = Counter()  # live streams by whose they are
        self.accounts = FairAccounts()
        self.latency = RecentLatency()
        self._resumed: list[Notify] = []
        self.histories = RequestHistories()
        self._answered: OrderedDict[str, None] = OrderedDict()  # digests of which there was a token, the oldest first
        self._held_from: int | None = None  # those behind the stream of this number are not due

    def __len__(self) -> int:
        return len(self._live)

    def promise_place(self, now_s: float, slots: int, wanted: int = 1) -> int:
        """Return after how many seconds a refused request may find its places, of `slots` that decode at a time."""
        oldest = next(iter(self._live.values()), None)
        since_s = now_s if oldest is None else oldest.opened_s
        running = islice((stream for stream in self._live.values() if stream.first_s is not None), _LOOKED_AT)
        left_s = [stream.expect_left_s(now_s, self.latency.output_tokens) for stream in running]
        return self.latency.promise_place(now_s, Running(slots, since_s, min(left_s, default=None)), wanted)

    @property
    def waits(self) -> bool:
        return bool(self._waiting)

    @property
    def held(self) -> int:
        return len(self._live) - len(self._sent)

    @property
    def arrived(self) -> int:
        return self._arrived

    def hold_later(self) -> None:
        self._held_from = self._arrived

    def release_later(self) -> None:
        self._held_from = None

    @property
    def has_earlier(self) -> bool:
        """Whether one is left of those that came before others were held."""
        first = next(iter(self._live.values()), None)
        return first is not None and (self._held_from is None or first.number <= self._held_from)

    @property
    def takes_turns(self) -> bool:
        return self._owned > 0

    def open(self, submit: Submit, overrides: ActiveOverrides = NO_OVERRIDES, now_s: float = 0.0) -> Stream:
        """Take in a request. Raises RequestError: 400 when its id is in use, 422 when it is in quarantine."""
        if submit.request_id in self._live:
            raise RequestError(f"a request with the id {submit.request_id} is running", code="duplicate_request")
        self._blame.refuse_quarantined(submit, now_s)
        history = self.histories.open(submit, now_s)
        self._arrived += 1
        stream = Stream(submit, list(submit.committed), history, self._arrived)
        stream.overrides, stream.due_s, stream.opened_s = overrides, now_s, now_s
        stream.group = submit.committed_group
        self._live[submit.request_id] = self._waiting[submit.request_id] = stream
        self.owners[submit.owner] = self.owners.get(submit.owner, 0) + 1
        self._owned += submit.owner != ""
        return stream

    def find_live(self, key: str) -> Stream | None:
        return self._live.get(key)

    def deliver(self, delta: Delta, now_s: float) -> Deliver | None:
        """Commit a delta to its stream; returns what its reader gets, None when the stream is gone."""
        stream = self._sent.get(delta.request_id)
        if stream is None:
            return None
        stream.history.observe_delta(delta, now_s)
        delta = _address(stream, delta)
        if delta.tokens and not stream.committed:
            self._begin(stream, delta, now_s)
        if stream.interrupted is not None:
            self._note_resumed(stream, stream.interrupted, now_s)
        stream.committed.extend(delta.tokens)
        stream.last_stats = delta.stats or stream.last_stats
        if delta.tokens:
            stream.gained += len(delta.tokens)
            if stream.probation:
                stream.probation = max(0, stream.probation - len(delta.tokens))
            if stream.group != stream.sender.group:
                delta = self._begin_group(stream, delta)
            if self._blame.has_records:
                self._blame.observe_progress(stream.digest)
        return Deliver(stream.key, self._finish(stream, delta, now_s) if delta.finish else delta)

    def _begin_group(self, stream: Stream, delta: Delta) -> Delta:
        if stream.group:
            self.changed_groups += 1
            stream.history.observe_other_group(len(stream.committed) - len(delta.tokens))
        stream.group, stream.model_digest = stream.sender
        return msgspec.structs.replace(delta, group=stream.group)

    def _begin(self, stream: Stream, delta: Delta, now_s: float) -> None:
        if stream.first_s is None:
            self._count_begun(stream.digest, -1)
        stream.first_s = now_s
        stream.history.digest = stream.digest
        self._answered[stream.digest] = None
        if len(self._answered) > _MOST_ANSWERED:
            self._answered.popitem(last=False)
        self.latency.observe_first_token(delta.stats)

    def _finish(self, stream: Stream, delta: Delta, now_s: float) -> Delta:
        """A stream has its last token; returns the delta as its reader gets it."""
        self.drop(stream, delta.finish, now_s)
        if self._blame.has_records:
            self._blame.observe_end(stream.digest)
        self.latency.observe_end(now_s, stream.first_s, len(stream.committed))
        if delta.stats is None:
            return delta
        counts = (len(stream.submit.prompt), len(stream.committed))
        if counts == (delta.stats.prompt_tokens, delta.stats.generated):
            return delta  # a resumed request was prompted once, whatever its last worker saw
        stats = msgspec.structs.replace(delta.stats, prompt_tokens=counts[0], generated=counts[1])
        return msgspec.structs.replace(delta, stats=stats)

    def _note_resumed(self, stream: Stream, interrupted: Interruption, now_s: float) -> None:
        why, left, at_s = interrupted
        stream.interrupted = None
        if stream.submit.trace is not None:
            pause_ms = (now_s - at_s) * MS_PER_S
            fields = (stream.submit.trace, stream.key, why, left, stream.at, stream.sends, pause_ms)
            self._resumed.append(Notify(ResumedStream(*fields)))

    def take_resumed(self) -> list[Notify]:
        if not self._resumed:
            return []
        resumed, self._resumed = self._resumed, []
        return resumed

    def live(self) -> list[Stream]:
        return list(self._live.values())

    def find_sent(self, sent_id: str) -> Stream | None:
        return self._sent.get(sent_id)

    def at(self, replica: str) -> list[Stream]:
        return list(self._at.get(replica, {}).values())

    def list_behind(self, replica: str, places: int) -> list[Stream]:
        return list(islice(self._at.get(replica, {}).values(), places, None))

    def is_suspect(self, stream: Stream) -> bool:
        return self._blame.has_records and self._blame.is_suspect(stream.digest)

    def is_begun_elsewhere(self, stream: Stream) -> bool:
        """True where the same is asked for a first time, and a replica is at it: nobody has had a token of it yet."""
        if stream.first_s is not None or stream.digest in self._answered:
            return False
        return stream.digest in self._begun

    @property
    def has_suspects(self) -> bool:
        return self._blame.has_records

    def count_suspects(self) -> Counter[str]:
        return Counter(stream.at for stream in self._sent.values() if self.is_suspect(stream))

    def on_trial(self) -> Stream | None:
        """Return the suspect that a replica tries now. Whatever has been cleared of its deaths since is none."""
        return next((stream for stream in self._tried.values() if stream.probation and self.is_suspect(stream)), None)

    def due(self) -> list[Stream]:
        """Return the streams that no replica has, oldest first, and where they have owners in fair turns. Before them
        one suspect, unless one is tried: the most suspicious, of several the one that had the fewest tokens."""
        if not self._waiting:
            return []
        if not self._in_order:
            arrived = sorted(self._waiting.values(), key=_ARRIVAL)
            self._waiting, self._in_order = {stream.key: stream for stream in arrived}, True
        waiting = list(self._waiting.values())
        if self._held_from is not None:
            waiting = [stream for stream in waiting if stream.number <= self._held_from]
        if self.takes_turns:
            order = order_fairly([self._work_of(stream) for stream in waiting], self.accounts)
            waiting = [waiting[index] for index in order]
        if not self._blame.has_records:
            return waiting
        suspects = [stream for stream in waiting if self.is_suspect(stream)]
        innocent = [stream for stream in waiting if stream not in suspects]
        if not suspects or self.on_trial() is not None:
            return innocent
        first = min(suspects, key=lambda suspect: (-self._blame.suspicion(suspect.digest), len(suspect.committed)))
        return [first, *innocent]

    def _work_of(self, stream: Stream) -> WaitingRequest:
        left = max(0, min(stream.submit.max_tokens, self.latency.output_tokens) - len(stream.committed))
        return WaitingRequest(stream.submit.owner, len(stream.submit.prompt) + left)

    def send(self, stream: Stream, replica: str, sender: Sender = NOBODY, now_s: float = 0.0) -> Submit:
        """Count the stream as sent to a replica, whose tokens come from `sender`; returns what is to be sent."""
        stream.history.observe_sent(replica, now_s)
        stream.sender = sender
        if not stream.sends and self.takes_turns:
            self.accounts = self.accounts.charge(self._work_of(stream))
        stream.sends += 1
        stream.sent_id = stream.key if stream.sends == 1 else f"{stream.key}#{stream.sends}"
        stream.at = replica
        stream.gained = 0
        stream.probation = self._blame.probation_tokens(stream.digest) if self.is_suspect(stream) else 0
        self._sent[stream.sent_id] = stream
        self._at.setdefault(replica, {})[stream.sent_id] = stream
        if stream.probation:
            self._tried[stream.sent_id] = stream
        if stream.first_s is None:
            self._count_begun(stream.digest, 1)
        self._waiting.pop(stream.key, None)
        self._count(replica, 1)
        return stream.resumption()

    def recall(self, stream: Stream, now_s: float, why: str = "", *, kind: str = "moved") -> None:
        """Take a stream back from its replica: it is due again. `why`: for people; `kind`: as in ResumedStream."""
        sent_away = f"an operator sent it to {stream.bound_to}" if stream.bound_to else "it was wanted elsewhere"
        why = why or sent_away
        stream.history.observe_recalled(why, now_s)
        if stream.submit.trace is not None and stream.interrupted is None:
            stream.interrupted = Interruption(kind, stream.at, now_s)
        self._forget_sent(stream)
        if stream.key in self._live and stream.key not in self._waiting:
            self._waiting[stream.key], self._in_order = stream, False
        stream.at, stream.due_s = "", now_s
        stream.gained, stream.probation = 0, 0

    def recall_replica(
        self, replica: str, places: int, *, pure: bool, progressed: Set[str], now_s: float, why: str = ""
    ) -> list[Witness]:
        """Recall all streams from a dead replica that ran `places` at a time; returns those that ran.

        Workers admit in order, but first those that were served before. So the oldest `places` ran, as many of those,
        and whoever had a token. The rest merely waited. `pure`: its worker has run one stream only; `progressed`: some
        that had a token there. `why` it is dead.
        """
        sent = self.at(replica)
        served = [stream for stream in sent if stream.committed and not stream.gained][:places]
        running = [stream for index, stream in enumerate(sent) if index < places or stream.gained or stream in served]
        seen = [
            Witness(
                *(stream.submit, stream.digest, stream.gained >= SETTLED_TOKENS),
                alone=pure and len(sent) == 1,
                others_progress=bool(progressed - {stream.key}),
            )
            for stream in running
        ]
        for stream in sent:
            self.recall(stream, now_s, f"its worker was lost: {why}", kind="lost")
        return seen

    def drop(self, stream: Stream, outcome: str, now_s: float) -> None:
        """Forget a stream that ends. `at` still says who has it."""
        stream.history.digest = stream.history.digest or stream.digest
        self.histories.end(stream.key, outcome, now_s)
        del self._live[stream.key]
        self._waiting.pop(stream.key, None)
        left = self.owners[stream.submit.owner] - 1
        if left > 0:
            self.owners[stream.submit.owner] = left
        else:
            self.owners.pop(stream.submit.owner)
        self._owned -= stream.submit.owner != ""
        self._forget_sent(stream)

    def _forget_sent(self, stream: Stream) -> None:
        if self._sent.pop(stream.sent_id, None) is None:
            return
        streams = self._at[stream.at]
        del streams[stream.sent_id]
        if not streams:
            del self._at[stream.at]
        self._tried.pop(stream.sent_id, None)
        if stream.first_s is None:
            self._count_begun(stream.digest, -1)
        self._count(stream.at, -1)

    def _count(self, replica: str, more: int) -> None:
        self.counts[replica] = self.counts.get(replica, 0) + more
        self._on_count(replica, more)

    def _count_begun(self, digest: str, more: int) -> None:
        count = self._begun.get(digest, 0) + more
        if count:
            self._begun[digest] = count
        else:
            del self._begun[digest]


def _address(stream: Stream, delta: Delta) -> Delta:
    if delta.request_id != stream.key:
        delta = msgspec.structs.replace(delta, request_id=stream.key)
    if stream.speculation is not stream.reported_bound:
        stream.reported_bound = stream.speculation
        delta = msgspec.structs.replace(delta, speculation=stream.speculation)
    if delta.stats is not None and stream.held_ms:
        waited = msgspec.structs.replace(delta.stats, queue_ms=delta.stats.queue_ms + stream.held_ms)
        delta = msgspec.structs.replace(delta, stats=waited)
    return delta
