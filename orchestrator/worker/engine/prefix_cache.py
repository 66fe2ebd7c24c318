"""Requests that begin alike compute their beginning once, and those that come with pages do not compute it."""

from __future__ import annotations

from typing import Protocol

from adapters.loaded_model import LoadedModel
from orchestrator.worker.engine.sequence import SequenceState


class PrefixCache:
    """Lets sequences begin with what the target remembers, and counts what it saved. It does nothing where not
    `enabled`, or where slots cannot be rolled back. `queries` and `hits` are tokens that were looked up and found."""

    def __init__(self, target: LoadedModel, *, enabled: bool) -> None:
        self._target = target
        self.enable(enabled)
        self.queries = 0
        self.hits = 0

    def enable(self, enabled: bool) -> None:
        """Begin later requests with what is remembered, or do not."""
        self._enabled = enabled and self._target.capabilities.rewinds

    def attach(self, sequence: SequenceState) -> None:
        """Begin with what is remembered of the sequence's tokens.

        It is to be asked each round until the sequence's first row is computed, because a request in front of it may
        compute more of that very prefix.
        """
        # A remembered prefix brings no logits, and a prompt that is to be scored needs them.
        if self._enabled and not sequence.computing and not sequence.scores_prompt:
            self._target.release(sequence.slot)
            sequence.cached = sequence.reused = self._target.attach(
                sequence.slot, sequence.tokens[: sequence.shared_limit]
            )

    def count(self, sequence: SequenceState) -> None:
        """The sequence's next row is being computed: count, once a stay, what its prefix was good for."""
        if not sequence.computing:
            sequence.computing = True
            self.queries += len(sequence.tokens)
            self.hits += sequence.reused

    def remember(self, sequence: SequenceState) -> None:
        """Let later requests begin with what this one has computed."""
        if self._enabled:
            self._target.share(sequence.slot, sequence.tokens[: min(sequence.cached, sequence.shared_limit)])


class StartPages(Protocol):
    """KV pages that came with a request."""

    def load(self, sequence: SequenceState, prefixes: PrefixCache) -> float:
        """Let a sequence that has a slot begin with them, where they are of use; returns the ms that it took."""
        ...
