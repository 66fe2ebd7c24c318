"""The drafter of a head: a draft model that goes on from what the target computed (adapters.contract.LoadedHead)."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.port import NO_SLOT, Ask


class HeadDrafter(ModelDrafter):
    """See ModelDrafter. What it guessed is computed again once it is committed, since the target has hidden states of
    it then. Nothing is drafted where the target has none yet: behind a prompt that the round itself reads."""

    def extend(self, key: str, tokens: Sequence[int]) -> None:
        known = self._known.get(key)
        held = known.held if known is not None else 0
        super().extend(key, tokens)
        if known is not None:
            known.held, known.guessed = min(known.held, held), []

    def _list_ready(self, asks: Sequence[Ask]) -> Sequence[Ask]:
        for ask in asks:
            if (known := self._known.get(ask.key)) is not None:
                known.source = ask.slot
        return [ask for ask in asks if ask.slot != NO_SLOT]

    def _choose_windows(self, asks: Sequence[Ask]) -> None:
        """A head reads all: what it reads is the target's, by positions of the whole text."""
