"""Visits: requests decoded under one variant, counted round by round; two of them beside each other.

Prompts are read before, by a pass that is not counted. So every variant begins with them in the target's prefix cache.
Rounds that still compute prompt tokens are not counted either, neither their tokens nor their time. At a steady load
requests take each other's places, and only decoding while all places are taken is counted. Where a batch runs dry, its
slowest request decides how long it takes, whatever is gained by the other requests. The first requests get fewer
tokens, each another number, so that they do not end together.

A machine's pace wanders by a tenth from one second to the next. So what is compared is decoded in turns of a few
rounds, on the halves of one target: both see the same machine. The first round of each turn does not count: it comes
behind the other's number of rows.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from device_profiles.units import MS_PER_S
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.load_options import EngineOptions
from orchestrator.protocol.rounds import RoundReport
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.engine.loop import DecodeLoop
from orchestrator.worker.loading.engine import build_loop
from orchestrator.worker.loading.models import LoadedSource
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.policy.arms import Timed

_TURN_ROUNDS = 9
Load = Sequence[tuple[int, int]]
"""From so many output tokens on, so many requests at once: ascending, from 0."""


class RoundFigures(NamedTuple):
    """A round that only decoded. `rows` are as they are charged for, and
    `context_tokens` are those that its sequences held on average. Of its `ms`, drafting and the policy took `draft_ms`.
    The policy alone, with its learning, took `policy_us`. `changed`: the round before had another number of rows."""

    ms: float
    draft_ms: float
    sequences: int
    rows: int
    context_tokens: float
    drafted: int
    accepted: int
    tokens: int
    changed: bool
    policy_us: float = 0.0


@dataclass(slots=True)
class Visit:
    """What a visit came to."""

    outputs: dict[str, list[int]] = field(default_factory=dict)
    rounds: list[RoundFigures] = field(default_factory=list)

    @property
    def tokens(self) -> int:
        """Tokens of the rounds that count."""
        return sum(one.tokens for one in self.rounds)

    @property
    def tokens_per_s(self) -> float:
        """Tokens / seconds of rounds that only decode."""
        ms = sum(one.ms for one in self.rounds)
        return MS_PER_S * self.tokens / ms if ms else 0.0

    @property
    def acceptance(self) -> float:
        """Accepted / drafted tokens."""
        return sum(one.accepted for one in self.rounds) / max(1, sum(one.drafted for one in self.rounds))

    @property
    def mean_depth(self) -> float:
        """Drafted tokens of a sequence and round."""
        return sum(one.drafted for one in self.rounds) / max(1, sum(one.sequences for one in self.rounds))


class VisitRunner:
    """Visits on a loaded target. `advanced` hears of every output token."""

    def __init__(self, target: LoadedSource, options: EngineOptions, advanced: Callable[[int], None]) -> None:
        self.target = target
        self._options = msgspec.structs.replace(options, prefix_reuse=True)
        self._advanced = advanced

    def read(self, submits: Sequence[Submit]) -> None:
        """Read prompts, so that they are in the prefix cache."""
        first = [msgspec.structs.replace(submit, max_tokens=1) for submit in submits]
        loop = build_loop(self.target, self._options, None, None)
        alone(Visiting(loop, first, [(0, len(first))], lambda tokens: None))

    def begin(
        self, submits: Sequence[Submit], load: Load, drafter: Drafter | None = None, policy: Timed | None = None
    ) -> Visiting:
        """Return a visit that is still to be made, plain without a drafter. At a load that steps it goes to the
        requests' ends, at a steady one it lasts while all places are taken."""
        if len(load) == 1:
            submits = _stagger_lengths(submits, load[0][1])
        loop = build_loop(self.target, self._options, drafter, policy.policy if policy is not None else None)
        return Visiting(loop, submits, load, self._advanced, policy)


def _stagger_lengths(submits: Sequence[Submit], count: int) -> list[Submit]:
    first = [
        msgspec.structs.replace(submit, max_tokens=max(2, submit.max_tokens * (place + 1) // count))
        for place, submit in enumerate(submits[:count])
    ]
    return [*first, *submits[count:]]


class Visiting:
    """A visit under way: requests in order, as many at once as are due; see the module."""

    def __init__(
        self,
        loop: DecodeLoop,
        submits: Sequence[Submit],
        load: Load,
        advanced: Callable[[int], None],
        policy: Timed | None = None,
    ) -> None:
        self._loop, self._load, self._advanced = loop, load, advanced
        self._policy = policy
        self._waiting = deque(submits)
        self._prompts = {submit.request_id: len(submit.prompt) for submit in submits}
        self._made = self._running = self._rows_before = 0
        self.visit = Visit()

    @property
    def steady(self) -> bool:
        """Whether the load is the same throughout."""
        return len(self._load) == 1

    @property
    def over(self) -> bool:
        """Whether nothing is left that counts."""
        return not self._waiting and (self._running < self._due() if self.steady else not self._running)

    def _due(self) -> int:
        return [count for tokens, count in self._load if tokens <= self._made][-1]

    def round(self, *, counts: bool = True) -> None:
        """Run one round. Raises BenchError for a request that is refused."""
        due = self._due()
        while self._waiting and self._running < due:
            self._submit(self._waiting.popleft())
        full = self._running == due  # also where some of them wait for KV blocks
        policy_s = self._policy_s
        began_s = time.perf_counter()
        done = self._loop.run_round_strictly()
        took_s = time.perf_counter() - began_s
        seen = _summarise_round(self.visit, self._prompts, done)
        if seen is not None and counts and (full or not self.steady):
            changed = done.rows != self._rows_before
            policy_us = 1e6 * (self._policy_s - policy_s)
            seen = seen._replace(ms=MS_PER_S * took_s, changed=changed, policy_us=policy_us)
            self.visit.rounds.append(seen)
        self._rows_before = done.rows
        for delta in done.deltas:
            self.visit.outputs[delta.request_id] += delta.tokens
        tokens = sum(len(delta.tokens) for delta in done.deltas)
        self._made += tokens
        self._running -= sum(bool(delta.finish) for delta in done.deltas)
        self._advanced(tokens)

    @property
    def _policy_s(self) -> float:
        return self._policy.spent_s if self._policy is not None else 0.0

    def _submit(self, submit: Submit) -> None:
        refused = self._loop.submit(submit)
        if refused is not None:
            raise BenchError(f"request {submit.request_id}: {refused.message}")
        self.visit.outputs[submit.request_id] = []
        self._running += 1

    def close(self) -> None:
        """Give up what still runs. Drafters are the caller's: later visits have them, too."""
        for key in self.visit.outputs:
            self._loop.cancel(key)  # those that ended are not known any more


def alone(visiting: Visiting) -> Visit:
    while not visiting.over:
        visiting.round()
    visiting.close()
    return visiting.visit


def side_by_side(both: Sequence[Visiting]) -> None:
    """Make two visits in turns. Once one is over the other goes on, and at a steady load that does not count. Where the
    load steps everything counts."""
    turn = 0
    while not all(one.over for one in both):
        one, other = both[turn % 2], both[1 - turn % 2]
        counts = not (other.over and one.steady)
        for number in range(_TURN_ROUNDS):
            if not one.over:
                one.round(counts=counts and (number > 0 or not one.steady))
        turn += 1
    for one in both:
        one.close()


def _summarise_round(found: Visit, prompts: Mapping[str, int], done: RoundReport) -> RoundFigures | None:
    """Return what counts of a round, its times left out; None where it did more than decode."""
    # A round without a prefill has tokens for each of its sequences, and none of them is a first one.
    keys = [delta.request_id for delta in done.deltas]
    if len(keys) != done.sequences or not all(found.outputs[key] for key in keys):
        return None
    held = sum(prompts[key] + len(found.outputs[key]) - 1 for key in keys)
    tokens = sum(len(delta.tokens) for delta in done.deltas)
    return RoundFigures(
        0.0, done.draft_ms, len(keys), done.rows, held / len(keys), done.drafted, done.accepted, tokens, False
    )
