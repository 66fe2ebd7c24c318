"""The live streams: what was asked, what was delivered, and which of them a dead worker may be blamed on.

History is the truth: a stream is its Submit and the tokens it has delivered, and any new worker can go on
from there. A request that kills its worker must not do so for ever, so every stream has strikes: the deaths
it was running at since its last token. Whoever is alone with two strikes is guilty. Where several are, the
next worker gets them one after the other (a trial): the guilty one is found and the others go on.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from dataclasses import dataclass, field

import msgspec

from orchestrator.cluster.port import Delta, RequestStats, Submit
from orchestrator.errors import RequestError

STRIKES_OUT = 2
_REMEMBERED_ENDS = 8
_MAX_RETRY_AFTER_S = 30


@dataclass(slots=True, eq=False)
class Stream:
    """One request. `items` holds what its reader has not taken yet: never more than `max_tokens` deltas."""

    submit: Submit
    committed: list[int]
    items: asyncio.Queue[Delta | RequestError] = field(default_factory=asyncio.Queue)
    sent: bool = False
    strikes: int = 0
    progressed: bool = False
    last_stats: RequestStats | None = None

    @property
    def key(self) -> str:
        """The request's id."""
        return self.submit.request_id

    @property
    def suspect(self) -> bool:
        """True when it may be what kills workers."""
        return self.strikes >= STRIKES_OUT

    def resumption(self) -> Submit:
        """Return the request as a new worker is to go on with it."""
        return msgspec.structs.replace(self.submit, committed=list(self.committed))


class Streams:
    """All live streams, in the order of their arrival. Owned by one event loop; does no I/O."""

    def __init__(self) -> None:
        self._live: dict[str, Stream] = {}
        self._readers = 0
        self._no_readers = asyncio.Event()
        self._no_readers.set()
        self._ends_s: deque[float] = deque(maxlen=_REMEMBERED_ENDS)

    def __len__(self) -> int:
        return len(self._live)

    def open(self, submit: Submit) -> Stream:
        """Take in a request. Raises RequestError 400 when its id is in use."""
        if submit.request_id in self._live:
            raise RequestError(f"a request with the id {submit.request_id} is running", code="duplicate_request")
        stream = self._live[submit.request_id] = Stream(submit, list(submit.committed))
        self._readers += 1
        self._no_readers.clear()
        return stream

    def close(self, stream: Stream) -> bool:
        """The reader is gone. True: the worker still has the request."""
        self._readers -= 1
        if self._readers == 0:
            self._no_readers.set()
        return self._drop(stream) and stream.sent

    async def all_read(self) -> None:
        """Wait until every reader has come to its stream's end."""
        await self._no_readers.wait()

    def deliver(self, delta: Delta, now_s: float) -> int:
        """Hand a delta to its stream; returns the tokens delivered, 0 when the stream is gone."""
        stream = self._live.get(delta.request_id)
        if stream is None:
            return 0
        stream.committed.extend(delta.tokens)
        stream.last_stats = delta.stats or stream.last_stats
        if delta.tokens:
            stream.progressed, stream.strikes = True, 0
        if delta.finish:
            self._drop(stream)
            self._ends_s.append(now_s)
            if delta.stats is not None:  # a resumed request was prompted once, whatever its last worker saw
                counts = {"prompt_tokens": len(stream.submit.prompt), "generated": len(stream.committed)}
                delta = msgspec.structs.replace(delta, stats=msgspec.structs.replace(delta.stats, **counts))
        stream.items.put_nowait(delta)
        return len(delta.tokens)

    def fail(self, request_id: str, error: RequestError) -> None:
        """End a stream with an error. Unknown ids are ignored."""
        if (stream := self._live.get(request_id)) is not None:
            self._drop(stream)
            stream.items.put_nowait(error)

    def live(self) -> list[str]:
        """Return the ids of all live streams."""
        return list(self._live)

    def due(self) -> list[Stream]:
        """Return the streams that the worker should get now, oldest first, and count them as sent."""
        suspects = [stream for stream in self._live.values() if stream.suspect]
        if any(stream.sent for stream in suspects):
            return []  # a trial is on
        due = suspects[:1] or [stream for stream in self._live.values() if not stream.sent]
        for stream in due:
            stream.sent = True
        return due

    def worker_lost(self, places: int) -> Stream | None:
        """Recall all streams from a dead worker that ran `places` at a time; returns the one to blame.

        Workers admit in order, so the oldest `places` ran, and whoever had a token. The rest merely waited.
        """
        sent = [stream for stream in self._live.values() if stream.sent]
        running = [stream for index, stream in enumerate(sent) if index < places or stream.progressed]
        for stream in sent:
            stream.sent = stream.progressed = False
        for stream in running:
            stream.strikes += 1
        guilty = [stream for stream in running if stream.suspect]
        return guilty[0] if len(guilty) == 1 else None

    def retry_after_s(self) -> int:
        """Return when a place may be free: the mean time between the last ends of streams, at least 1 s."""
        if len(self._ends_s) < 2:
            return 1
        mean = (self._ends_s[-1] - self._ends_s[0]) / (len(self._ends_s) - 1)
        return min(_MAX_RETRY_AFTER_S, max(1, math.ceil(mean)))

    def _drop(self, stream: Stream) -> bool:
        if self._live.get(stream.key) is not stream:
            return False
        del self._live[stream.key]
        return True
