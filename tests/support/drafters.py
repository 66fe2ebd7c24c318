"""A drafter that knows the outputs, with mistakes, delays and faults by script: in this process or in a worker."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from adapters.contract import DeviceLost, ModelRefused
from adapters.tokenizer import byte_texts
from device_profiles.workload import vocabulary_fingerprint
from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Stop, Submit
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.draft_messages import DrafterState, DraftReady
from orchestrator.protocol.events import Event
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.worker.draft_server.server import DraftEngine, HostedDrafter
from orchestrator.worker.drafting.port import NO_HINTS, NOTHING, Ask, Draft, DraftHints
from policies.sampling import Sampling

ENTRY = "tests.support.drafters:script_texts"
FINGERPRINT = vocabulary_fingerprint(byte_texts())
VOCABULARY = 272


class KnowingDrafter:
    """Continues `texts` (whole sequences, prompts included); every `wrong_every`-th position is another token.

    A token takes `token_ms` when it is drafted first, with those of the other sequences of its pass, and `row_ms` more
    for each of these sequences. At the `at`-th call of `propose` it does what `fault` says:
    "hang", "garbage" (tokens that no vocabulary has), "raise", "lost" (the device), "exit".
    """

    name = "knowing"

    def __init__(
        self,
        texts: Sequence[Sequence[int]],
        *,
        wrong_every: int = 0,
        token_ms: float = 0.0,
        row_ms: float = 0.0,
        fault: str = "",
        at: int = 1,
    ) -> None:
        self._texts = [list(text) for text in texts]
        self._wrong_every = wrong_every
        self._token_ms = token_ms
        self._row_ms = row_ms
        self.passes: list[list[str]] = []  # the keys of each that had any
        self._fault = fault
        self._at = at
        self._calls = 0
        self._held: dict[str, list[int]] = {}
        self._drafted: dict[str, int] = {}

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        self._held[key] = list(tokens)
        self._drafted[key] = 0

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        if key in self._held:
            self._held[key].extend(tokens)
            self._drafted[key] = max(0, self._drafted[key] - len(tokens))

    def end(self, key: str, *, keep: bool) -> None:
        self._held.pop(key, None)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        self._calls += 1
        if self._calls == self._at:
            self._misbehave()
        steps = max((ask.limit - self._drafted.get(ask.key, 0) for ask in asks), default=0)
        self._drafted |= {ask.key: ask.limit for ask in asks}
        self.passes += [[ask.key for ask in asks]] if asks else []
        if self._token_ms or self._row_ms:
            time.sleep((self._token_ms + self._row_ms * len(asks)) * max(0, steps) / 1000.0)
        return [self._draft(ask) for ask in asks]

    def memory_bytes(self) -> int:
        return 4096

    def states(self) -> list[DrafterState]:
        return [DrafterState(self.name, "scripted", adapter="scripted", device="scripted", memory_bytes=4096)]

    def close(self) -> None: ...

    def _draft(self, ask: Ask) -> Draft:
        held = self._held.get(ask.key)
        if held is None:
            return NOTHING
        if self._fault == "garbage" and self._calls >= self._at:
            return Draft((VOCABULARY + 5,) * ask.limit, (1.0,) * ask.limit)
        for text in self._texts:
            if text[: len(held)] == held:
                found = text[len(held) : len(held) + ask.limit]
                wrong = [self._wrong(len(held) + index, token) for index, token in enumerate(found)]
                return Draft(tuple(wrong), (0.9,) * len(wrong))
        return NOTHING

    def _wrong(self, position: int, token: int) -> int:
        return (token + 1) % 256 if self._wrong_every and position % self._wrong_every == 0 else token

    def _misbehave(self) -> None:
        if self._fault == "hang":
            time.sleep(3600)
        elif self._fault == "raise":
            raise RuntimeError("the script says so")
        elif self._fault == "lost":
            raise DeviceLost("the script says so")
        elif self._fault == "exit":
            os._exit(7)


def host_drafter(drafter: Any, **fields: Any) -> HostedDrafter:
    """Return a drafter as a draft worker hosts it."""
    known: dict[str, Any] = {
        "vocabulary_size": VOCABULARY,
        "vocabulary_fingerprint": FINGERPRINT,
    }
    return HostedDrafter(drafter, **(known | fields))


def script_texts(options: dict[str, Any]) -> DraftEngine:
    """Return the draft worker: `fields` are HostedDrafter's, `refused` says why it cannot be loaded, the rest is
    KnowingDrafter's."""
    fields, refused = options.pop("fields", {}), options.pop("refused", "")

    def load(emit: Callable[[Event], None]) -> HostedDrafter:
        if refused:
            raise ModelRefused(refused)
        return host_drafter(KnowingDrafter(**options), **fields)

    return DraftEngine(load, SystemClock())


def spec(texts: Sequence[Sequence[int]], **options: Any) -> WorkerSpec:
    """Return a draft worker in a process of its own."""
    return WorkerSpec("knowing", ENTRY, {"texts": [list(text) for text in texts], **options}, cpus=0.5)


@contextmanager
def in_a_thread(drafter: Any, **fields: Any) -> Iterator[LinkEndpoint]:
    """Host a drafter in a thread of this process, over a real socket."""
    engine = DraftEngine(lambda emit: host_drafter(drafter, **fields), SystemClock())
    ready: list[DraftReady] = []
    there = threading.Event()

    def emit(event: Event) -> None:
        if isinstance(event, DraftReady):
            ready.append(event)
            there.set()

    thread = threading.Thread(target=engine.run, args=(emit,), daemon=True)
    thread.start()
    try:
        assert there.wait(60.0)
        yield ready[0].endpoint
    finally:
        engine.submit(Stop())
        thread.join(60.0)
        assert not thread.is_alive()


def texts_of(submits: Sequence[Submit], outputs: dict[str, list[int]]) -> list[list[int]]:
    """Return whole sequences: prompts with their outputs."""
    return [[*submit.prompt, *outputs[submit.request_id]] for submit in submits]
