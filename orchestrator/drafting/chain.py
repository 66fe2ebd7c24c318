"""Several drafters as one, in order of cost: a later one is asked where the earlier ones have little to propose."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.cluster.port import DrafterState
from orchestrator.drafting.port import NOTHING, Ask, Draft, Drafter
from policies.acceptance import Sampling
from policies.chain import asks_on, expected_tokens, usual_after


class ChainDrafter:
    """See the module. Of several drafts for a sequence the one that promises most is taken, the cheapest of equals;
    `Draft.drafter` says whose it is."""

    name = "chain"

    def __init__(self, drafters: Sequence[Drafter]) -> None:
        self._drafters = tuple(drafters)
        self._usual: list[float | None] = [None] * len(self._drafters)

    def begin(self, key: str, tokens: Sequence[int], sampling: Sampling) -> None:
        """See the port."""
        for drafter in self._drafters:
            drafter.begin(key, tokens, sampling)

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        """See the port. Every drafter learns what was committed, whoever proposed it."""
        for drafter in self._drafters:
            drafter.extend(key, tokens)

    def propose(self, asks: Sequence[Ask]) -> list[Draft]:
        """See the port."""
        best = [NOTHING] * len(asks)
        for number, drafter in enumerate(self._drafters):
            usual = self._usual[number]
            places = [
                place
                for place, ask in enumerate(asks)
                if asks_on(best[place].confidences, limit=ask.limit, usual=ask.limit if usual is None else usual)
            ]
            found = drafter.propose([asks[place] for place in places]) if places else []
            for place, draft in zip(places, found, strict=True):
                if not draft.tokens:
                    continue
                self._usual[number] = usual_after(self._usual[number], draft.confidences)
                if expected_tokens(draft.confidences) > expected_tokens(best[place].confidences):
                    best[place] = draft
        return best

    def end(self, key: str, *, keep: bool) -> None:
        """See the port."""
        for drafter in self._drafters:
            drafter.end(key, keep=keep)

    def memory_bytes(self) -> int:
        """See the port."""
        return sum(drafter.memory_bytes() for drafter in self._drafters)

    def states(self) -> list[DrafterState]:
        """See the port."""
        return [state for drafter in self._drafters for state in drafter.states()]

    def close(self) -> None:
        """See the port."""
        for drafter in self._drafters:
            drafter.close()
