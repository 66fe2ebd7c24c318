"""The live streams: what was asked, what was delivered, and where each is.

History is the truth: a stream is its Submit and the tokens it has delivered, and any worker can go on from there.
Each time that a stream is sent it has another id, so that what a worker still says of a stream that was moved away
is nobody's. No effects.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import msgspec

from orchestrator.control.actions import Deliver
from orchestrator.control.crash_attribution import CrashHistory, find_culprit
from orchestrator.control.latency import RecentLatency
from orchestrator.control.overrides import NO_OVERRIDES, ActiveOverrides
from orchestrator.errors import RequestError
from orchestrator.workers.messages import Delta, RequestStats, Submit
from policies.serving.fair_order import FairAccounts, WaitingRequest, order_fairly
from policies.serving.overrides import EffectiveBound


@dataclass(slots=True, eq=False)
class Stream:
    """One request.

    `at` is the replica that has it ("": none), `sent_id` its id there. `crashes`: see crash_attribution. `kind`: of
    the replica that its first token came from, `sent_kind` of the one that has it (control.state.kind_of).
    `overrides` stood when it was opened, `speculation` holds by them where it is, and its reader was `told` of that.
    It was `opened_s` by the clock, waited here for `held_ms` until it was first sent, and its first token came at
    `first_s`.
    """

    submit: Submit
    committed: list[int]
    at: str = ""
    sent_id: str = ""
    sends: int = 0
    kind: tuple[str, ...] = ()
    sent_kind: tuple[str, ...] = ()
    crashes: CrashHistory = field(default_factory=CrashHistory)
    opened_s: float = 0.0
    held_ms: float = 0.0
    first_s: float | None = None
    last_stats: RequestStats | None = None
    overrides: ActiveOverrides = NO_OVERRIDES
    speculation: EffectiveBound | None = None
    told: EffectiveBound | None = None

    @property
    def key(self) -> str:
        """The request's id."""
        return self.submit.request_id

    def resumption(self) -> Submit:
        """Return the request as its worker is to go on with it."""
        return msgspec.structs.replace(self.submit, request_id=self.sent_id or self.key, committed=list(self.committed))


class Streams:
    """All live streams, in the order of their arrival."""

    def __init__(self) -> None:
        self._live: dict[str, Stream] = {}
        self._sent: dict[str, Stream] = {}  # by the id that its worker knows, in the order of sending
        self.counts: Counter[str] = Counter()  # live streams by the replica that has them
        self.owners: Counter[str] = Counter()  # live streams by whose they are
        self.accounts = FairAccounts()
        self.latency = RecentLatency()

    def __len__(self) -> int:
        return len(self._live)

    @property
    def takes_turns(self) -> bool:
        """Whether streams have owners, who get places in fair turns."""
        return any(self.owners)

    def open(self, submit: Submit, overrides: ActiveOverrides = NO_OVERRIDES, now_s: float = 0.0) -> Stream:
        """Take in a request, under these overrides. Raises RequestError 400 when its id is in use."""
        if submit.request_id in self._live:
            raise RequestError(f"a request with the id {submit.request_id} is running", code="duplicate_request")
        stream = Stream(submit, list(submit.committed), overrides=overrides, opened_s=now_s)
        self._live[submit.request_id] = stream
        self.owners[submit.owner] += 1
        return stream

    def find(self, key: str) -> Stream | None:
        """Return the live stream of a request."""
        return self._live.get(key)

    def deliver(self, delta: Delta, now_s: float) -> Deliver | None:
        """Commit a delta to its stream; returns what its reader gets, None when the stream is gone."""
        stream = self._sent.get(delta.request_id)
        if stream is None:
            return None
        if delta.request_id != stream.key:
            delta = msgspec.structs.replace(delta, request_id=stream.key)
        if stream.speculation is not stream.told:
            stream.told = stream.speculation
            delta = msgspec.structs.replace(delta, speculation=stream.speculation)
        if delta.stats is not None and stream.held_ms:
            waited = msgspec.structs.replace(delta.stats, queue_ms=delta.stats.queue_ms + stream.held_ms)
            delta = msgspec.structs.replace(delta, stats=waited)
        if delta.tokens and not stream.committed:
            stream.first_s = now_s
            self.latency.observe_first_token(delta.stats)
        stream.committed.extend(delta.tokens)
        stream.last_stats = delta.stats or stream.last_stats
        if delta.tokens:
            stream.crashes.observe_progress()
            stream.kind = stream.kind or stream.sent_kind
        if delta.finish:
            self.drop(stream)
            self.latency.observe_end(now_s, stream.first_s, len(stream.committed))
            if delta.stats is not None:  # a resumed request was prompted once, whatever its last worker saw
                counts = {"prompt_tokens": len(stream.submit.prompt), "generated": len(stream.committed)}
                delta = msgspec.structs.replace(delta, stats=msgspec.structs.replace(delta.stats, **counts))
        return Deliver(stream.key, delta)

    def live(self) -> list[Stream]:
        """Return all live streams, oldest first."""
        return list(self._live.values())

    def find_sent(self, sent_id: str) -> Stream | None:
        """Return the stream that a worker knows by this id."""
        return self._sent.get(sent_id)

    def at(self, replica: str) -> list[Stream]:
        """Return the streams that a replica has, in the order in which it got them."""
        return [stream for stream in self._sent.values() if stream.at == replica]

    def in_quarantine(self) -> Stream | None:
        """Return the suspect that a replica has now."""
        return next((stream for stream in self._sent.values() if stream.crashes.suspect), None)

    def due(self) -> list[Stream]:
        """Return the streams that no replica has, oldest first, and where they have owners in fair turns; of suspects
        the oldest alone, and none while one is in quarantine."""
        waiting = [stream for stream in self._live.values() if not stream.at]
        if self.takes_turns:
            order = order_fairly([self._work_of(stream) for stream in waiting], self.accounts)
            waiting = [waiting[index] for index in order]
        suspects = [stream for stream in waiting if stream.crashes.suspect]
        first = [] if self.in_quarantine() is not None else suspects[:1]
        return first + [stream for stream in waiting if not stream.crashes.suspect]

    def _work_of(self, stream: Stream) -> WaitingRequest:
        left = max(0, min(stream.submit.max_tokens, self.latency.output_tokens) - len(stream.committed))
        return WaitingRequest(stream.submit.owner, len(stream.submit.prompt) + left)

    def send(self, stream: Stream, replica: str, kind: tuple[str, ...] = ()) -> Submit:
        """Count the stream as sent to a replica of this kind; returns what is to be sent."""
        stream.sent_kind = kind
        if not stream.sends and self.takes_turns:
            self.accounts = self.accounts.charge(self._work_of(stream))
        stream.sends += 1
        stream.sent_id = stream.key if stream.sends == 1 else f"{stream.key}#{stream.sends}"
        stream.at = replica
        stream.crashes.observe_send()
        self._sent[stream.sent_id] = stream
        self.counts[replica] += 1
        return stream.resumption()

    def recall(self, stream: Stream) -> None:
        """Take a stream back from its replica: it is due again."""
        self._forget_sent(stream)
        stream.at = ""
        stream.crashes.observe_recall()

    def recall_replica(self, replica: str, places: int, *, only_one: bool = True) -> Stream | None:
        """Recall all streams from a dead replica that ran `places` at a time; returns the one to blame.

        Workers admit in order, so the oldest `places` ran, and whoever had a token. The rest merely waited.
        """
        sent = self.at(replica)
        running = [stream for index, stream in enumerate(sent) if index < places or stream.crashes.progressed]
        for stream in sent:
            self.recall(stream)
        culprit = find_culprit([stream.crashes for stream in running], only_one=only_one)
        return next((stream for stream in running if stream.crashes is culprit), None)

    def drop(self, stream: Stream) -> None:
        """Forget a stream that ends. `at` still says who has it."""
        del self._live[stream.key]
        self.owners -= Counter([stream.submit.owner])
        self._forget_sent(stream)

    def _forget_sent(self, stream: Stream) -> None:
        if self._sent.pop(stream.sent_id, None) is not None:
            self.counts[stream.at] -= 1
