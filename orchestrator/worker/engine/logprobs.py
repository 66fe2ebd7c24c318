"""The log-probabilities that one request asked for, until they are handed out."""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.protocol.commands import Submit
from policies.sampling import Row, require_finite
from policies.sampling.logprobs import TokenScore, score


class LogprobCollector:
    """Scores of chosen tokens, and of the prompt's while its forwards run. A request without has no
    LogprobCollector."""

    def __init__(self, top: int, prompt: Sequence[int], *, wants_prompt: bool) -> None:
        self._top = top
        self._prompt = prompt
        self._prompt_scores: dict[int, TokenScore] = {}  # by position; a preempted prefill meets some again
        self.wants_prompt = wants_prompt

    @classmethod
    def of(cls, submit: Submit) -> LogprobCollector | None:
        """Return what a request asks for; None where that is nothing. What is committed was scored before."""
        if submit.logprobs is None:
            return None
        wants_prompt = submit.prompt_logprobs and not submit.committed
        return cls(submit.logprobs, submit.prompt, wants_prompt=wants_prompt)

    def see_prompt(self, rows: Row, position: int) -> None:
        """Score the prompt's tokens from `position` on; row i holds the logits of position `position + i`. Raises
        NotFinite."""
        for index in range(min(len(rows), len(self._prompt) - position)):
            require_finite(rows[index])
            token = self._prompt[position + index]
            self._prompt_scores[position + index] = score(rows[index], token, self._top)

    def of_tokens(self, rows: Row, tokens: Sequence[int]) -> list[TokenScore]:
        """Score tokens that were taken, each at its row."""
        return [score(row, token, self._top) for row, token in zip(rows, tokens, strict=False)]

    def take_prompt(self) -> list[TokenScore] | None:
        """Return the prompt's scores, from its second token on, the first time they are all there."""
        if not self.wants_prompt:
            return None
        self.wants_prompt = False
        return [self._prompt_scores[position] for position in range(1, len(self._prompt))]
