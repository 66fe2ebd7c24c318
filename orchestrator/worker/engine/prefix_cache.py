"""Requests that begin alike compute their beginning once, and those that come with pages do not compute it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from adapters.loaded_model import LoadedModel
from orchestrator.worker.engine.sequence import SequenceState


class KeptPrefixes(Protocol):
    """Beginnings of prompts that outlive what the target remembers."""

    def load_prefix(self, slot: int, tokens: Sequence[int], held: int, lora: str) -> int:
        """Let a slot that holds `held` positions begin with the longest kept beginning of `tokens`, as it was computed
        with this LoRA adapter. Returns how many positions it has of it; 0: none, or no more than it holds."""
        ...

    def keep_prefix(self, slot: int, tokens: Sequence[int], lora: str) -> None:
        """A request begins with these tokens, which its slot holds and an earlier one had computed with the same
        adapter."""
        ...


class PrefixCache:
    """Lets sequences begin with what the target remembers, or else with what is `kept`, and counts what it saved. It
    does nothing where not `enabled`, or where slots cannot be rolled back. `queries` and `hits` are tokens that were
    looked up and found; `loaded` are those that were kept and not remembered."""

    def __init__(self, target: LoadedModel, *, enabled: bool, kept: KeptPrefixes | None = None) -> None:
        self._target = target
        self._kept = kept
        self.enable(enabled)
        self.queries = 0
        self.hits = 0
        self.loaded = 0

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
            tokens = sequence.tokens[: sequence.shared_limit]
            sequence.cached = sequence.reused = self._target.attach(sequence.slot, tokens)
            if self._kept is not None and not sequence.sought:
                sequence.sought = True
                lora = sequence.submit.lora
                if positions := self._kept.load_prefix(sequence.slot, tokens, sequence.cached, lora):
                    self.loaded += positions - sequence.cached
                    sequence.cached = sequence.reused = positions
                    self.remember(sequence)

    def count(self, sequence: SequenceState) -> None:
        """The sequence's next row is being computed: count, once a stay, what its prefix was good for."""
        if not sequence.computing:
            sequence.computing = True
            self.queries += len(sequence.tokens)
            self.hits += sequence.reused
            if self._kept is not None and sequence.reused:
                self._kept.keep_prefix(sequence.slot, sequence.tokens[: sequence.reused], sequence.submit.lora)

    def remember(self, sequence: SequenceState) -> None:
        """Let later requests begin with what this one has computed."""
        if self._enabled:
            self._target.share(sequence.slot, sequence.tokens[: min(sequence.cached, sequence.shared_limit)])


class StartPages(Protocol):
    """KV pages that came with a request."""

    def load(self, sequence: SequenceState, prefixes: PrefixCache) -> float:
        """Let a sequence that has a slot begin with them, where they are of use; returns the ms that it took."""
        ...
