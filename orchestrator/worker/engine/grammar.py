"""What the decode loop asks of a grammar, and drafts that keep to it.

Speculation pays under a grammar because drafts are made to fit. A draft is cut at its first token that the grammar
forbids. Where the grammar leaves one continuation (braces, key names, the rest of an enum's value), those tokens are
drafts of certainty. They are verified like any other draft, by the target under the mask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from orchestrator.protocol.commands import Grammar
from orchestrator.worker.drafting.port import NOTHING, Draft

FORCED_CONFIDENCE = 0.999
"""The mask leaves one token: only a bias or a stop can be in its way. ADR 0010."""


class GrammarState(Protocol):
    """One answer's place in a grammar. Every answer depends on the tokens advanced over and on nothing else."""

    @property
    def ended(self) -> bool:
        """True when no token may follow."""
        ...

    def mask(self) -> NDArray[np.bool_]:
        """Return which tokens may follow, shape (vocabulary,). Raises GrammarFailed."""
        ...

    def advance(self, token: int) -> None:
        """Go on over a token. Raises GrammarFailed where it may not follow."""
        ...

    def fitting(self, tokens: Sequence[int]) -> int:
        """Return how many of the leading tokens may follow."""
        ...

    def find_forced_tokens(self, behind: Sequence[int]) -> list[int]:
        """Return the tokens that alone may follow behind some that fit; changes nothing."""
        ...


class Grammars(Protocol):
    def prepare(self, grammar: Grammar, prefix_tokens: Sequence[int] = ()) -> None:
        """Do what takes time ahead of `start`: from any thread. Raises GrammarFailed."""
        ...

    def start(self, grammar: Grammar, prefix_tokens: Sequence[int] = ()) -> GrammarState:
        """Return a grammar at its beginning, so that it takes `prefix_tokens`, written maybe by another engine.
        Raises GrammarFailed."""
        ...


def fit_draft(draft: Draft, state: GrammarState, bound: int) -> Draft:
    """Return the draft that the grammar makes of a drafter's: forced tokens before it, the part that fits, and
    forced tokens behind it, at most `bound` tokens."""
    forced = tuple(state.find_forced_tokens(()))
    count = min(len(forced), len(draft.tokens))
    if draft.tokens[:count] == forced[:count] and len(draft.tokens) > count:
        draft = replace(
            draft,
            confidences=(FORCED_CONFIDENCE,) * count + draft.confidences[count:],
            proposals=(None,) * count + draft.proposals[count:],
        )
    else:
        draft = _append_forced(NOTHING, forced)
    fits = min(bound, state.fitting(draft.tokens))
    if fits < bound and draft.is_drawn(fits):  # dropped for what it is, it would be no draw: it stays, and is rejected
        return draft.truncate(fits + 1)
    draft = draft.truncate(fits)
    if fits == bound or (forced and fits <= len(forced)):
        return draft
    return _append_forced(draft, state.find_forced_tokens(draft.tokens)[: bound - fits])


def _append_forced(draft: Draft, forced: Sequence[int]) -> Draft:
    return replace(
        draft,
        tokens=(*draft.tokens, *forced),
        confidences=draft.confidences + (FORCED_CONFIDENCE,) * len(forced),
        forced=draft.forced + len(forced),
    )
