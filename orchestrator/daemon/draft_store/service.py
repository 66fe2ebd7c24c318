"""The daemon's side of the draft store: looks up each request within a few milliseconds, and keeps its answer later.

Whatever becomes of the store, a request only loses drafts: it waits for no more than `wait_s`, and is never refused.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from hashlib import blake2b

from device_profiles.units import MS_PER_S
from orchestrator.clock import Clock
from orchestrator.config.draft_store import DraftStoreOptions
from orchestrator.daemon.control.port import DraftStoreView
from orchestrator.daemon.draft_store.breaker import Breaker
from orchestrator.daemon.draft_store.codec import MAX_ENTRY_TOKENS, DamagedValue, decode_answer, encode_answer
from orchestrator.daemon.draft_store.port import DraftStore, Entry, StoreFailed, StoreRefused
from orchestrator.daemon.draft_store.sketch import count_least_shared, sketch_prompt
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.packed_tokens import BYTES_PER_TOKEN, pack_tokens
from orchestrator.protocol.ready import Ready
from orchestrator.telemetry import get_logger

MOST_ANSWERS = 4
"""Answers that a request is given at most. ADR 0072: four own answers were worth 8.0 %, two 7.0, one 5.8."""
MOST_TOKENS = 2048
"""Tokens of them, all together: each costs the worker about a microsecond. ADR 0072: two milliseconds."""
MIN_TOKENS = 8
"""An answer that is shorter is not kept. ADR 0072. Not tuned."""
# Of the prompt, in front of an answer: so that its first tokens can be found behind them (ADR 0072). Not tuned.
_TAIL_TOKENS = 8
# ADR 0072: that wait for the store; more go without.
_MOST_LOOKUPS = 64
# ADR 0072: answers to be written; further ones are dropped.
_MOST_WAITING = 256
_FLUSH_S = 1.0  # when the daemon closes. Not tuned.
_ID_BYTES = 12
_SCOPE_BYTES = 32
_VERSION = b"1"

_log = get_logger(__name__)


@dataclass(slots=True)
class _Counts:
    hits: int = 0
    misses: int = 0
    late: int = 0
    skipped: int = 0
    errors: int = 0
    damaged: int = 0
    written: int = 0
    dropped: int = 0
    read_bytes: int = 0
    written_bytes: int = 0


class DraftStoreService:
    """See the module. `kind` and `location` name the store. To be used in one event loop; `close` ends what runs beside
    requests."""

    def __init__(self, store: DraftStore, kind: str, location: str, options: DraftStoreOptions, clock: Clock) -> None:
        self._store = store
        self._kind, self._location, self._options = kind, location, options
        self._breaker = Breaker(clock)
        self._counts = _Counts()
        self._problem = ""
        self._asking: set[asyncio.Task[list[bytes]]] = set()
        self._waiting: asyncio.Queue[Entry] = asyncio.Queue(_MOST_WAITING)
        self._writing: asyncio.Task[None] | None = None
        self._closed = False

    def view(self) -> DraftStoreView:
        """Return how the store does."""
        return DraftStoreView(
            *(self._kind, self._location, self._options.shared),
            state="away" if self._breaker.is_open else "ok",
            problem=self._breaker.why or self._problem,
            waiting=self._waiting.qsize(),
            **{name: getattr(self._counts, name) for name in _Counts.__slots__},
        )

    def sketch(self, submit: Submit, ready: Ready) -> list[str]:
        """Return the keys by which a request's prompt is looked up, of this model's revision and numerical class."""
        return sketch_prompt(submit.prompt, self._scope(submit, ready))

    async def recall(self, blocks: Sequence[str]) -> list[bytes]:
        """Return packed answers to prompts like that of these blocks, the likeliest first. () where there are none, or
        where the store is away or too slow. Never raises."""
        if self._closed or not blocks or len(self._asking) >= _MOST_LOOKUPS or not self._breaker.may_ask():
            self._counts.skipped += 1
            return []
        asking = asyncio.create_task(self._find(blocks), name="look up drafts")
        self._asking.add(asking)
        asking.add_done_callback(self._asking.discard)
        done, _ = await asyncio.wait({asking}, timeout=self._options.wait_ms / MS_PER_S)
        if not done:  # it goes on, so that its connection can be used again
            self._counts.late += 1
            return []
        if asking.cancelled():  # by `close`: another store takes this one's place
            self._counts.skipped += 1
            return []
        if (error := asking.exception()) is not None:  # a mistake of ours costs drafts, and no answer
            self._observe_failure(StoreFailed(f"{type(error).__name__}: {error}"))
            return []
        answers = asking.result()
        self._counts.hits += bool(answers)
        self._counts.misses += not answers
        return answers

    def remember(self, blocks: Sequence[str], prompt: Sequence[int], answer: Sequence[int]) -> None:
        """Keep an answer, beside whatever else is done; where too many wait it is dropped."""
        if self._closed or not blocks or len(answer) < MIN_TOKENS:
            return
        # The prompt's end goes before it, so that its first tokens can be drafted, too.
        text = [*prompt[-_TAIL_TOKENS:], *answer][:MAX_ENTRY_TOKENS]
        named = blake2b(pack_tokens(text), digest_size=_ID_BYTES, key="".join(blocks).encode()[:64]).hexdigest()
        try:
            self._waiting.put_nowait(Entry(named, blocks, encode_answer(text)))
        except asyncio.QueueFull:
            self._counts.dropped += 1
            return
        if self._writing is None:
            self._writing = asyncio.create_task(self._write(), name="keep drafts")

    async def close(self) -> None:
        """Write what waits, for a second at most, and close the store. What is asked from now on finds nothing, and
        nothing more is kept."""
        self._closed = True
        if self._writing is not None:
            if not self._breaker.is_open:
                with suppress(TimeoutError):
                    await asyncio.wait_for(self._waiting.join(), _FLUSH_S)
            self._writing.cancel()
        for asking in [*self._asking]:
            asking.cancel()
        await self._store.close()

    def _scope(self, submit: Submit, ready: Ready) -> bytes:
        owner = "" if self._options.shared else submit.owner
        model = (ready.model.source, ready.model.digest, ready.model.vocabulary_fingerprint)
        numbers = (ready.precision.numerical_class, ready.precision.class_fingerprint, ready.precision.weights)
        parts = [_VERSION, *(text.encode() for text in (*model, *numbers, owner))]
        text = b"".join(len(part).to_bytes(4, "big") + part for part in parts)
        return blake2b(text, digest_size=_SCOPE_BYTES).digest()

    async def _find(self, blocks: Sequence[str]) -> list[bytes]:
        try:
            values = await self._store.find_answers(blocks, count_least_shared(blocks), MOST_ANSWERS)
        except StoreFailed as error:
            self._observe_failure(error)
            return []
        self._observe_success()
        answers: list[bytes] = []
        room = MOST_TOKENS * BYTES_PER_TOKEN
        for value in values:
            self._counts.read_bytes += len(value)
            try:
                answer = decode_answer(value)[:room]
            except DamagedValue as error:
                self._counts.damaged += 1
                self._problem = f"a damaged value was left out: {error}"
                continue
            if answer:
                answers.append(answer)
                room -= len(answer)
        return answers

    async def _write(self) -> None:
        while True:
            entry = await self._waiting.get()
            kept = self._breaker.may_ask() and await self._keep(entry)
            self._counts.written += kept
            self._counts.dropped += not kept
            self._counts.written_bytes += len(entry.value) * kept
            self._waiting.task_done()

    async def _keep(self, entry: Entry) -> bool:
        try:
            await self._store.keep(entry)
        except StoreFailed as error:
            self._observe_failure(error)
            return False
        self._observe_success()
        return True

    def _observe_failure(self, error: StoreFailed) -> None:
        self._counts.errors += 1
        if isinstance(error, StoreRefused):
            self._problem = str(error)
            self._observe_success()
            return
        was_open = self._breaker.is_open
        self._breaker.observe_failure(str(error))
        if self._breaker.is_open and not was_open:
            text = "the draft store is away: requests go on without it"
            _log.warning(text, store=self._location, reason=str(error))

    def _observe_success(self) -> None:
        if self._breaker.is_open:
            _log.info("the draft store is back", store=self._location)
        self._breaker.observe_success()
