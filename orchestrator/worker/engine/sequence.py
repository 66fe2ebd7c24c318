"""One request while it decodes: its committed tokens and its seed are the only truth, everything else is cache."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from adapters.loaded_model import Capabilities, Logits
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.rounds import DrafterShare, RequestStats
from orchestrator.worker.drafting.port import NO_SLOT
from orchestrator.worker.engine.constraints import RowConstraints
from policies.sampling import Row, require_finite
from policies.sampling.logprobs import TokenScore, score

if TYPE_CHECKING:
    from orchestrator.worker.engine.prefix_cache import StartPages

# Rows that are read behind their forward, beyond which a request's rows come whole. Not tuned.
_FEW_READS, _MOST_READ_SHARE = 4, 0.1


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
        return [score(row, token, self._top) for row, token in zip(rows, tokens, strict=False)]

    def take_prompt(self) -> list[TokenScore] | None:
        """Return the prompt's scores, from its second token on, the first time they are all there."""
        if not self.wants_prompt:
            return None
        self.wants_prompt = False
        return [self._prompt_scores[position] for position in range(1, len(self._prompt))]


@dataclass(slots=True, eq=False)
class SequenceState:
    """Times are seconds of the loop's clock."""

    submit: Submit
    tokens: list[int]
    """The prompt and all committed tokens."""
    stop_tokens: frozenset[int]
    submitted_s: float
    apart: bool = False
    """Rows behind the prompt are of a numerical class of their own: adapters.loaded_model.Capabilities.apart_tokens."""
    rewinds: bool = True
    best_logits: int = 0
    """So many of the best logits of each row are asked for, which decide its tokens; 0: rows come whole."""
    rows_read: int = 0
    """Of how many rows the best did not decide."""
    block_tokens: int = 1
    slot: int = NO_SLOT
    cached: int = 0
    """The leading positions whose KV the slot holds and may be trusted; the rest is (re)computed."""
    reused: int = 0
    sought: bool = False
    """What is kept of its beginning was looked for, once in its stay."""
    computing: bool = False
    """A row of it was computed in this slot, or its pages were taken in."""
    queued_s: float = 0.0
    """When it was queued last, at first or because it gave way."""
    admitted_s: float = 0.0
    first_token_s: float = 0.0
    pace_s: float = 0.0
    """Since when its pace is measured."""
    pace_tokens: int = 0
    """How many tokens it had then; 0: it is not measured yet."""
    turn: int = 0
    """The last round that it decoded in."""
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    predicted: int = 0
    predicted_right: int = 0
    tolerance_delta: float = -1.0
    tolerated: int = 0
    branches: int = 0
    """Of its drafts that were verified, as the next."""
    branches_taken: int = 0
    by_drafter: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Tokens that were verified, and those of them that were accepted."""
    shares: list[DrafterShare] = field(default_factory=list)
    """What its drafters did, in those rounds that tell it."""
    rules: RowConstraints | None = None
    scores: LogprobCollector | None = None
    pages: StartPages | None = None
    """What it begins with once it has a slot."""

    @classmethod
    def open(
        cls, submit: Submit, now_s: float, capabilities: Capabilities, rules: RowConstraints | None
    ) -> SequenceState:
        """Start from the prompt and what an earlier worker committed; `rules` stand behind that."""
        scores = LogprobCollector.of(submit)
        most = capabilities.best_logits if rules is None and scores is None else 0
        return cls(
            submit,
            [*submit.prompt, *submit.committed],
            frozenset(submit.stop_tokens),
            now_s,
            apart=len(submit.prompt) <= capabilities.apart_tokens,
            rewinds=capabilities.rewinds,
            best_logits=submit.sampling.count_best_logits(most),
            block_tokens=capabilities.block_tokens,
            rules=rules,
            scores=scores,
        )

    @property
    def key(self) -> str:
        return self.submit.request_id

    @property
    def generated(self) -> int:
        """Tokens committed behind the prompt, by earlier workers too."""
        return len(self.tokens) - len(self.submit.prompt)

    @property
    def best_wanted(self) -> tuple[int, float]:
        """How many of the best logits its rows want, and the temperature of their masses: see adapters' Segment."""
        sampling = self.submit.sampling
        return self.best_logits, sampling.temperature if self.best_logits and sampling.has_nucleus else 0.0

    def watch_reads(self, read_row: Callable[[int], Logits]) -> Callable[[int], Logits]:
        """Return what reads a whole row behind its forward, which waits for the device. Where it does so too often,
        rows come whole from then on."""

        def read(row: int) -> Logits:
            self.rows_read += 1
            if self.rows_read > _FEW_READS + self.generated * _MOST_READ_SHARE:
                self.best_logits = 0
            return read_row(row)

        return read

    @property
    def uncached(self) -> int:
        """Committed tokens that the next forward still has to see; 1 while decoding."""
        return len(self.tokens) - self.cached

    @property
    def replays(self) -> bool:
        """True while what it was served before is computed again: its worker died, or it gave way."""
        return self.generated > 0 and self.uncached > 1

    @property
    def prompt_left(self) -> int:
        """Tokens of the prompt that the next forward still has to see."""
        return max(0, len(self.submit.prompt) - self.cached)

    @property
    def shared_limit(self) -> int:
        """How many leading tokens have the rows that any other request computes for them, and can be given to it: the
        prompt's class; none where slots cannot be rolled back (adapters.loaded_model.Capabilities.rewinds)."""
        if not self.rewinds:
            return 0
        return len(self.submit.prompt) if self.apart else len(self.tokens)

    @property
    def scores_prompt(self) -> bool:
        """True while the log-probabilities of the prompt are still to be found."""
        return self.scores is not None and self.scores.wants_prompt

    @property
    def depth_bound(self) -> int:
        """The most drafts that can become output: one token of the rest is always the target's own."""
        return self.submit.max_tokens - self.generated - 1

    def commit(self, chosen: tuple[int, ...]) -> tuple[list[int], str]:
        """Append chosen tokens up to the first stop token or the limit; return them and why it ended ("" if not).

        Raises GrammarFailed.
        """
        if self.submit.max_tokens == 0:
            return [], "length"
        taken: list[int] = []
        finish = ""
        for token in chosen:
            taken.append(token)
            if token in self.stop_tokens:
                finish = "stop"
                break
            if self.generated + len(taken) >= self.submit.max_tokens:
                finish = "length"
                break
        self.tokens.extend(taken)
        if self.rules is not None and finish != "stop" and len(taken) == len(chosen):
            self.rules.commit(chosen)
            finish = "stop" if self.rules.ended else finish
        return taken, finish

    def stats(self) -> RequestStats:
        return RequestStats(
            prompt_tokens=len(self.submit.prompt),
            generated=self.generated,
            steps=self.steps,
            drafted=self.drafted,
            accepted=self.accepted,
            queue_ms=(self.admitted_s - self.submitted_s) * 1000.0,
            prefill_ms=(self.first_token_s - self.admitted_s) * 1000.0,
            reused=self.reused,
            tolerance_delta=self.tolerance_delta,
            predicted=self.predicted,
            predicted_right=self.predicted_right,
            drafters=self.shares,
            tolerated=self.tolerated,
            branches=self.branches,
            branches_taken=self.branches_taken,
        )
