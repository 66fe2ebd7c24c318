"""What shapes one request's rows beyond temperature and filters: bias, penalties, stops not yet allowed, a grammar.

A request without any of these has no RowConstraints, and its rows are judged as they are.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from orchestrator.protocol.commands import Submit
from orchestrator.worker.drafting.port import Draft
from orchestrator.worker.engine.grammar import Grammars, GrammarState, fit_draft
from policies.sampling import Row
from policies.sampling.penalties import Penalties, without


class RowConstraints:
    """Follows one request's output token by token. All that it holds can be made again from the committed tokens."""

    def __init__(self, submit: Submit, penalties: Penalties | None, grammar: GrammarState | None) -> None:
        self._penalties = penalties
        self._grammar = grammar
        self._banned_early = sorted(submit.stop_tokens)
        self._min_tokens = submit.min_tokens if submit.stop_tokens else 0
        self._counts: dict[int, int] = {}
        self._text = list(submit.prompt) if submit.sampling.dry is not None else []
        self._generated = 0
        self._ahead = 0  # drafts of the row judged last that were followed already

    @classmethod
    def of(cls, submit: Submit, grammars: Grammars) -> RowConstraints | None:
        """Return what a request asks for, behind what was committed; None where that is nothing.

        Raises GrammarFailed.
        """
        penalties = Penalties.of(submit.sampling, submit.prompt)
        grammar = None if submit.grammar is None else grammars.start(submit.grammar, submit.committed)
        if penalties is None and grammar is None and not (submit.min_tokens and submit.stop_tokens):
            return None
        rules = cls(submit, penalties, grammar)
        rules.commit(submit.committed)
        return rules

    @property
    def ended(self) -> bool:
        """True when the grammar lets nothing follow what was committed."""
        return self._grammar is not None and self._grammar.ended

    def shape(self, row: Row, taken: Sequence[int]) -> Row | None:
        """Implements policies.sampling.params.Shape, for rows in order. Raises GrammarFailed."""
        self._follow(taken[self._ahead :])
        self._ahead = len(taken)
        if self.ended:
            return None
        if self._penalties is not None:
            row = self._penalties.apply_penalties(row, self._counts, self._text)
        masked = row if self._grammar is None else np.where(self._grammar.mask(), row, np.float32(-np.inf))
        if self._generated < self._min_tokens:
            early = without(masked, self._banned_early)
            # Where a grammar has come to its end nothing but a stop may follow, however early.
            return early if np.isfinite(early.max()) else masked
        return masked

    def draft(self, draft: Draft, bound: int) -> Draft:
        """Return a drafter's proposal as the grammar makes it."""
        return draft if self._grammar is None else fit_draft(draft, self._grammar, bound)

    def commit(self, tokens: Sequence[int]) -> None:
        """The tokens of the verdict were committed. Raises GrammarFailed."""
        self._follow(tokens[self._ahead :])
        self._ahead = 0

    def _follow(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._generated += 1
            if self._penalties is not None:
                self._counts[token] = self._counts.get(token, 0) + 1
                self._text.append(token)
            if self._grammar is not None:
                self._grammar.advance(token)
