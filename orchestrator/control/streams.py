"""The live streams: what was asked, what was delivered, where each is, and which a dead worker may be blamed on.

History is the truth: a stream is its Submit and the tokens it has delivered, and any worker can go on from there.
Each time that a stream is sent it has another id, so that what a worker still says of a stream that was moved away
is nobody's.

A request that kills its worker must not do so for ever, so every stream has strikes: the deaths it was running at
since its last token. Whoever is alone with two strikes is guilty. Where several are, they are sent one after the other
(a trial): the guilty one is found and the others go on. Where there are several replicas, only who dies in a trial is
guilty: two that are lost at once for another reason are no evidence.
"""

from __future__ import annotations

import asyncio
import math
from collections import Counter, deque
from dataclasses import dataclass, field, replace

import msgspec

from device_profiles.units import MS_PER_S
from orchestrator.control.overrides import NO_WISHES, ActiveOverrides
from orchestrator.errors import RequestError
from orchestrator.workers.messages import Delta, RequestStats, Submit
from policies.serving.overrides import EffectiveBound
from policies.serving.slo import predict_ttft_ms

STRIKES_OUT = 2
_REMEMBERED_ENDS = 8
MAX_RETRY_AFTER_S = 30
_FIRST_USUAL_TOKENS = 128.0
_NEWEST = 0.1  # weight of the newest end in running means


@dataclass(slots=True, eq=False)
class Stream:
    """One request. `items` holds what its reader has not taken yet: never more than `max_tokens` deltas.

    `at` is the replica that has it ("": none), `sent_id` its id there. `tried`: it was sent as a suspect. `kind`: of
    the replica that its first token came from, `sent_kind` of the one that has it (control.state.kind_of). `wishes`
    stood when it was opened, `speculation` holds by them where it is, and its reader was `told` of that. `first_s`:
    when its first token came, by the clock.
    """

    submit: Submit
    committed: list[int]
    items: asyncio.Queue[Delta | RequestError] = field(default_factory=asyncio.Queue)
    at: str = ""
    sent_id: str = ""
    sends: int = 0
    tried: bool = False
    kind: tuple[str, ...] = ()
    sent_kind: tuple[str, ...] = ()
    strikes: int = 0
    progressed: bool = False
    first_s: float | None = None
    last_stats: RequestStats | None = None
    wishes: ActiveOverrides = NO_WISHES
    speculation: EffectiveBound | None = None
    told: EffectiveBound | None = None

    @property
    def key(self) -> str:
        """The request's id."""
        return self.submit.request_id

    @property
    def suspect(self) -> bool:
        """True when it may be what kills workers."""
        return self.strikes >= STRIKES_OUT

    def resumption(self) -> Submit:
        """Return the request as its worker is to go on with it."""
        return msgspec.structs.replace(self.submit, request_id=self.sent_id or self.key, committed=list(self.committed))


@dataclass(frozen=True, slots=True)
class TypicalTimes:
    """What requests take once they run, running means: to their first token, and from there to their end. None before
    the first."""

    prefill_ms: float | None = None
    decode_ms: float | None = None

    def observe_request_start(self, stats: RequestStats | None) -> TypicalTimes:
        """A request got its first token."""
        return self if stats is None else replace(self, prefill_ms=_mean(self.prefill_ms, stats.prefill_ms))

    def observe_request_end(self, decode_ms: float) -> TypicalTimes:
        """A request ended, so long after its first token."""
        return replace(self, decode_ms=_mean(self.decode_ms, decode_ms))

    def ttft_ms(self, live: int, places: int) -> float:
        """Return when the first token of a request can be expected that comes now. `live` requests have `places` (1 or
        more) to run in. It is 0 where that is not known."""
        if self.decode_ms is None or self.prefill_ms is None:
            return 0.0
        gap_ms = (self.prefill_ms + self.decode_ms) / places
        return predict_ttft_ms(live + 1 - places, gap_ms, self.prefill_ms)


def _mean(before: float | None, now: float) -> float:
    return now if before is None else before + _NEWEST * (now - before)


class Streams:
    """All live streams, in the order of their arrival. Owned by one event loop; does no I/O."""

    def __init__(self) -> None:
        self._live: dict[str, Stream] = {}
        self._sent: dict[str, Stream] = {}  # by the id that its worker knows, in the order of sending
        self.counts: Counter[str] = Counter()  # live streams by the replica that has them
        self._usual_tokens = _FIRST_USUAL_TOKENS
        self.usual = TypicalTimes()
        self._readers = 0
        self._no_readers = asyncio.Event()
        self._no_readers.set()
        self._ends_s: deque[float] = deque(maxlen=_REMEMBERED_ENDS)

    def __len__(self) -> int:
        return len(self._live)

    @property
    def usual_tokens(self) -> int:
        """How many tokens an output has, on the mean of the last ones."""
        return max(1, round(self._usual_tokens))

    def open(self, submit: Submit, wishes: ActiveOverrides = NO_WISHES) -> Stream:
        """Take in a request, under these wishes. Raises RequestError 400 when its id is in use."""
        if submit.request_id in self._live:
            raise RequestError(f"a request with the id {submit.request_id} is running", code="duplicate_request")
        stream = self._live[submit.request_id] = Stream(submit, list(submit.committed), wishes=wishes)
        self._readers += 1
        self._no_readers.clear()
        return stream

    def close(self, stream: Stream) -> bool:
        """The reader is gone. True: the worker still has the request."""
        self._readers -= 1
        if self._readers == 0:
            self._no_readers.set()
        return self._drop(stream) and bool(stream.at)

    async def all_read(self) -> None:
        """Wait until every reader has come to its stream's end."""
        await self._no_readers.wait()

    def deliver(self, delta: Delta, now_s: float) -> int:
        """Hand a delta to its stream; returns the tokens delivered, 0 when the stream is gone."""
        stream = self._sent.get(delta.request_id)
        if stream is None:
            return 0
        if delta.request_id != stream.key:
            delta = msgspec.structs.replace(delta, request_id=stream.key)
        if stream.speculation is not stream.told:
            stream.told = stream.speculation
            delta = msgspec.structs.replace(delta, speculation=stream.speculation)
        if delta.tokens and not stream.committed:
            stream.first_s = now_s
            self.usual = self.usual.observe_request_start(delta.stats)
        stream.committed.extend(delta.tokens)
        stream.last_stats = delta.stats or stream.last_stats
        if delta.tokens:
            stream.progressed, stream.strikes = True, 0
            stream.kind = stream.kind or stream.sent_kind
        if delta.finish:
            self._drop(stream)
            self._ends_s.append(now_s)
            if stream.first_s is not None:
                self.usual = self.usual.observe_request_end((now_s - stream.first_s) * MS_PER_S)
            self._usual_tokens += _NEWEST * (len(stream.committed) - self._usual_tokens)
            if delta.stats is not None:  # a resumed request was prompted once, whatever its last worker saw
                counts = {"prompt_tokens": len(stream.submit.prompt), "generated": len(stream.committed)}
                delta = msgspec.structs.replace(delta, stats=msgspec.structs.replace(delta.stats, **counts))
        stream.items.put_nowait(delta)
        return len(delta.tokens)

    def fail(self, stream: Stream | None, error: RequestError) -> None:
        """End a stream with an error; nothing happens where it has ended, or is None."""
        if stream is not None and self._drop(stream):
            stream.items.put_nowait(error)

    def live(self) -> list[Stream]:
        """Return all live streams, oldest first."""
        return list(self._live.values())

    def find_sent(self, sent_id: str) -> Stream | None:
        """Return the stream that a worker knows by this id."""
        return self._sent.get(sent_id)

    def at(self, replica: str) -> list[Stream]:
        """Return the streams that a replica has, in the order in which it got them."""
        return [stream for stream in self._sent.values() if stream.at == replica]

    def on_trial(self) -> Stream | None:
        """Return the suspect that a replica has now."""
        return next((stream for stream in self._sent.values() if stream.suspect), None)

    def due(self) -> list[Stream]:
        """Return the streams that no replica has, oldest first; of suspects the oldest alone, and none while a trial
        is on."""
        waiting = [stream for stream in self._live.values() if not stream.at]
        suspects = [stream for stream in waiting if stream.suspect]
        tried = [] if self.on_trial() is not None else suspects[:1]
        return tried + [stream for stream in waiting if not stream.suspect]

    def send(self, stream: Stream, replica: str, kind: tuple[str, ...] = ()) -> Submit:
        """Count the stream as sent to a replica of this kind; returns what is to be sent."""
        stream.sent_kind = kind
        stream.sends += 1
        stream.sent_id = stream.key if stream.sends == 1 else f"{stream.key}#{stream.sends}"
        stream.at, stream.tried, stream.progressed = replica, stream.suspect, False
        self._sent[stream.sent_id] = stream
        self.counts[replica] += 1
        return stream.resumption()

    def recall(self, stream: Stream) -> None:
        """Take a stream back from its replica: it is due again."""
        self._forget_sent(stream)
        stream.at, stream.progressed = "", False

    def recall_replica(self, replica: str, places: int, *, only_one: bool = True) -> Stream | None:
        """Recall all streams from a dead replica that ran `places` at a time; returns the one to blame.

        Workers admit in order, so the oldest `places` ran, and whoever had a token. The rest merely waited.
        """
        sent = self.at(replica)
        running = [stream for index, stream in enumerate(sent) if index < places or stream.progressed]
        for stream in sent:
            self.recall(stream)
        for stream in running:
            stream.strikes += 1
        guilty = [stream for stream in running if stream.suspect and (only_one or stream.tried)]
        return guilty[0] if len(guilty) == 1 else None

    def retry_after_s(self) -> int:
        """Return when a place may be free: the mean time between the last ends of streams, at least 1 s."""
        if len(self._ends_s) < 2:
            return 1
        mean = (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
        return min(MAX_RETRY_AFTER_S, max(1, math.ceil(mean)))

    def _drop(self, stream: Stream) -> bool:
        if self._live.get(stream.key) is not stream:
            return False
        del self._live[stream.key]
        self._forget_sent(stream)
        return True

    def _forget_sent(self, stream: Stream) -> None:
        if self._sent.pop(stream.sent_id, None) is not None:
            self.counts[stream.at] -= 1
