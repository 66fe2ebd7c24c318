"""Statistics that grow: what a target says while it serves is counted for the workers that come after this one.

While a worker lives, the suffix drafter has its outputs themselves, and counts of them add nothing (ADR 0126). So the
table of statistics is made anew in a thread every ten minutes and as the worker ends, and used from its next start on.
A file in the model store has the tables of all workers of a host. Entries hold up to four tokens in a row.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from hashlib import blake2b
from pathlib import Path
from typing import NamedTuple

import numpy as np
from filelock import FileLock, Timeout
from numpy.typing import NDArray

from orchestrator.clock import Clock
from orchestrator.worker.drafting.counts import build_entries, count_contexts, is_held_out, list_positions
from orchestrator.worker.drafting.mapped_file import MappedFileUnusable
from orchestrator.worker.drafting.statistics import (
    MOST_CONTEXT,
    Entries,
    Statistics,
    StatisticsCard,
    merge_entries,
    write_statistics,
)

_MOST_TOKENS = 250_000
"""Of outputs that one worker counts, four bytes each: the latest. ADR 0087: what counting brings grows by about 1 %
with each doubling."""
_MOST_ENTRIES = 300_000
"""Of the file, 13 bytes each. ADR 0087: 290,106 tokens have 120,807."""
_MIN_TOKENS = 1000  # fewer new ones are not worth a file. Not tuned.
_EVERY_S = 600.0  # what a worker that is killed loses. Counting 119,000 tokens takes 0.1 s of one core (ADR 0126).
_LOCK_S = 10.0  # another worker's turn takes a fraction of a second


class _Output(NamedTuple):
    """See counts.LabelledText. `scope`: whose it is."""

    number: int
    scope: int
    tokens: NDArray[np.int32]
    head: int

    @property
    def labels(self) -> NDArray[np.int32]:
        return self.tokens[self.head :]


class GrownFile:
    """The file of a model's grown statistics, over a vocabulary by its fingerprint."""

    def __init__(self, path: Path, *, model: str, vocabulary: str) -> None:
        self.path = path
        self._model, self._vocabulary = model, vocabulary

    def open(self) -> Statistics | None:
        """Map what is there; None for nothing. A file that cannot be used is put aside, and a line says so. Raises
        OSError."""
        if not self.path.exists():
            return None
        try:
            return Statistics(self.path, self._vocabulary)
        except MappedFileUnusable as error:
            aside = self.path.with_name(f"{self.path.name}.damaged")
            os.replace(self.path, aside)
            reason = str(error).partition("; make it")[0]
            print(f"{reason}: put aside as {aside.name}; statistics grow anew", flush=True)  # noqa: T201
            return None

    def add(self, outputs: Sequence[_Output], new_tokens: int) -> None:
        """Count outputs, `new_tokens` of which were never counted, into the file. Raises OSError, Timeout."""
        tables = [_count(outputs, scope) for scope in {output.scope for output in outputs}]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{self.path}.lock", timeout=_LOCK_S, mode=0o600, thread_local=False):
            texts = len(outputs)
            if (kept := self.open()) is not None:
                tables.append(kept.entries())
                new_tokens += kept.header.card.tokens
                kept.close()
            card = StatisticsCard("served", datetime.now(UTC).date().isoformat(), texts, new_tokens, 0, {})
            entries = merge_entries(tables, _MOST_ENTRIES)
            write_statistics(self.path, entries, model=self._model, vocabulary=self._vocabulary, card=card)


def _count(outputs: Sequence[_Output], scope: int) -> Entries:
    own = [output for output in outputs if output.scope == scope]
    others = [output for output in own if not is_held_out(output.number)]
    held_out = [output for output in own if is_held_out(output.number)]
    judged_by, judges = (others, held_out) if others else (own, [])
    return build_entries(
        *(count_contexts(list_positions(own)), count_contexts(list_positions(judged_by)), list_positions(judges)),
        most=_MOST_ENTRIES,
    ).within(scope)


class GrownStatistics:
    """What earlier workers counted, and this one counts for later ones. With `shared` each request's output helps all
    requests, else those of its owner. To be called by one thread."""

    def __init__(self, file: GrownFile, clock: Clock, *, shared: bool) -> None:
        self._file, self._clock, self._shared = file, clock, shared
        self._outputs: deque[_Output] = deque()
        self._held = self._new = self._number = 0
        self._due_s = clock.monotonic_s() + _EVERY_S
        self._writing: threading.Thread | None = None
        self.statistics: Statistics | None = None
        try:
            self.statistics = file.open()
        except OSError as error:
            self._tell(error)

    def find_scope(self, owner: str) -> int:
        """Return what keeps an owner's entries apart from all others': 64 bits; 0 of nobody's, and where all share."""
        if self._shared or not owner:
            return 0
        return int.from_bytes(blake2b(owner.encode(), digest_size=8).digest(), "little")

    def add(self, scope: int, text: Sequence[int], prompt: int) -> None:
        """Take an output in: `text` behind its first `prompt` tokens."""
        head = min(prompt, MOST_CONTEXT)
        tokens = np.array(text[prompt - head :], np.int32)
        if head < 1 or len(tokens) == head:
            return
        self._number += 1
        self._outputs.append(_Output(self._number, scope, tokens, head))
        self._new += len(tokens) - head
        self._held += len(tokens)
        while self._held > _MOST_TOKENS:
            self._held -= len(self._outputs.popleft().tokens)
        if self._clock.monotonic_s() >= self._due_s:
            self._due_s = self._clock.monotonic_s() + _EVERY_S
            self._keep()

    def memory_bytes(self) -> int:
        """Return what is held of outputs; the table is a file's pages."""
        return 4 * self._held

    def close(self) -> None:
        """Count what is not counted yet, and give the mapping back. Idempotent."""
        self._wait()
        self._keep()
        self._wait()
        if self.statistics is not None:
            self.statistics.close()

    def _wait(self) -> None:
        if self._writing is not None:
            self._writing.join()

    def _keep(self) -> None:
        if self._new < _MIN_TOKENS or not self._outputs or (self._writing is not None and self._writing.is_alive()):
            return
        new, self._new = self._new, 0
        self._writing = threading.Thread(
            target=self._write, args=(list(self._outputs), new), name="statistics", daemon=True
        )
        self._writing.start()

    def _write(self, outputs: Sequence[_Output], new_tokens: int) -> None:
        try:
            self._file.add(outputs, new_tokens)
        except (OSError, Timeout) as error:
            self._tell(error)

    def _tell(self, error: OSError) -> None:
        print(f"{self._file.path}: statistics do not grow: {error}", flush=True)  # noqa: T201
