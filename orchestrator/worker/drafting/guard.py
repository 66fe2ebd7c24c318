"""Whatever a drafter does, it costs its drafts only."""

from __future__ import annotations

import traceback
from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.port import (
    NO_HINTS,
    NOTHING,
    Ask,
    Draft,
    Drafter,
    DraftHints,
    NoDrafter,
    WorkBeside,
    describe_beside,
)
from policies.sampling import Sampling

_Result = TypeVar("_Result")


class GuardedDrafter:
    """Implements drafting.port.Drafter: one that is closed and not asked any more once it raised; its state says
    what."""

    def __init__(self, drafter: Drafter) -> None:
        self._drafter = drafter
        self._failed: list[DrafterState] | None = None

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling, hints: DraftHints = NO_HINTS) -> None:
        self._try(lambda: self._drafter.begin(key, tokens, sampling, hints), None)

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        self._try(lambda: self._drafter.extend(key, tokens), None)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        return self._try(lambda: self._propose(asks), [NOTHING] * len(asks))

    def _propose(self, asks: Sequence[Ask]) -> list[Draft]:
        drafts = self._drafter.propose(asks)
        if len(drafts) != len(asks):
            raise ValueError(f"it gave {len(drafts)} drafts for {len(asks)} asks")
        return drafts

    def end(self, key: str, *, keep: bool) -> None:
        self._try(lambda: self._drafter.end(key, keep=keep), None)

    def memory_bytes(self) -> int:
        return self._try(self._drafter.memory_bytes, 0)

    def states(self) -> list[DrafterState]:
        nothing: list[DrafterState] = []
        states = self._try(self._drafter.states, nothing)
        return states if self._failed is None else self._failed

    def describe_beside(self) -> WorkBeside:
        return self._try(lambda: describe_beside(self._drafter), WorkBeside())

    def close(self) -> None:
        if self._failed is None:
            self._drafter.close()

    def _try(self, call: Callable[[], _Result], instead: _Result) -> _Result:
        if self._failed is not None:
            return instead
        try:
            return call()
        except Exception as error:
            traceback.print_exc()  # a mistake of ours: the log has to say where
            self._fail(error)
            return instead

    def _fail(self, error: Exception) -> None:
        reason = " ".join(f"{type(error).__name__}: {error}".split())
        try:
            known = self._drafter.states()
        except Exception:
            known = []
        known = known or [DrafterState(str(getattr(self._drafter, "name", "drafter")), "unknown")]
        self._failed = [msgspec.structs.replace(state, state="failed", reason=reason) for state in known]
        try:
            self._drafter.close()
        except Exception:
            traceback.print_exc()


class FailedDrafter(NoDrafter):
    """Stands where a draft model's device failed while it was loaded; `state` says how."""

    def __init__(self, state: DrafterState) -> None:
        self._state = state

    def states(self) -> list[DrafterState]:
        return [self._state]
