"""One visit: requests decoded under one arm, counted round by round.

Prompts are read before, by a pass that is not counted, so that every arm begins with them in the target's prefix cache;
rounds that still compute prompt tokens are not counted either, neither their tokens nor their time. At a steady load
requests take each other's places, and counted is what is decoded while all places are taken: where a batch runs dry,
its slowest request decides how long it takes, whatever is gained by the others. The first requests get fewer tokens,
each another number, so that they do not end together.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import msgspec

from device_profiles.units import MS_PER_S
from orchestrator.bootstrap import EngineOptions, Target, build_loop
from orchestrator.cli.bench_prompts import BenchError
from orchestrator.cli.policy_bench.arms import Timed
from orchestrator.cluster.port import Round, Submit
from orchestrator.decoding.loop import DecodeLoop
from orchestrator.drafting.port import Drafter
from policies.depth_policy import DepthPolicy

Load = Sequence[tuple[int, int]]
"""From so many output tokens on, so many requests at once: ascending, from 0."""


class RoundSeen(NamedTuple):
    """A round that only decoded. `end_s` from the visit's start; `rows` as they are charged for; `context_tokens` that
    its sequences held on average; of its `ms`, drafting and the policy took `draft_ms`. `changed`: the round before had
    another number of rows."""

    end_s: float
    ms: float
    draft_ms: float
    sequences: int
    rows: int
    context_tokens: float
    drafted: int
    accepted: int
    tokens: int
    changed: bool


@dataclass(slots=True)
class Visit:
    """What a visit came to. `turn`: all arms of a cell are visited in one turn, one after the other."""

    turn: int = 0
    outputs: dict[str, list[int]] = field(default_factory=dict)
    rounds: list[RoundSeen] = field(default_factory=list)

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


class Runner:
    """Visits on a loaded target. `advanced` hears of every output token."""

    def __init__(self, target: Target, options: EngineOptions, advanced: Callable[[int], None]) -> None:
        self.target = target
        self._options = msgspec.structs.replace(options, prefix_reuse=True)
        self._advanced = advanced

    def read(self, submits: Sequence[Submit]) -> None:
        """Read prompts, so that they are in the prefix cache."""
        first = [msgspec.structs.replace(submit, max_tokens=1) for submit in submits]
        counted(self._loop(None, None), first, [(0, len(first))], lambda tokens: None)

    def visit(
        self, submits: Sequence[Submit], load: Load, drafter: Drafter | None, policy: DepthPolicy | Timed | None
    ) -> Visit:
        """Decode requests, plainly without a drafter: at a load that steps to their ends, at a steady one while all
        places are taken. Raises BenchError for one that is refused."""
        if len(load) == 1:
            submits = _staggered(submits, load[0][1])
        found = counted(self._loop(drafter, policy), submits, load, self._advanced)
        if drafter is not None:
            drafter.close()
        return found

    def _loop(self, drafter: Drafter | None, policy: DepthPolicy | None) -> DecodeLoop:
        return build_loop(self.target, self._options, drafter, policy)


def _staggered(submits: Sequence[Submit], count: int) -> list[Submit]:
    first = [
        msgspec.structs.replace(submit, max_tokens=max(2, submit.max_tokens * (place + 1) // count))
        for place, submit in enumerate(submits[:count])
    ]
    return [*first, *submits[count:]]


def counted(loop: DecodeLoop, submits: Sequence[Submit], load: Load, advanced: Callable[[int], None]) -> Visit:
    """Decode requests in order, as many at once as are due; see the module."""
    waiting, found = deque(submits), Visit()
    prompts = {submit.request_id: len(submit.prompt) for submit in submits}
    made = running = rows_before = 0
    started_s = time.perf_counter()
    while waiting or running:
        due = [count for tokens, count in load if tokens <= made][-1]
        while waiting and running < due:
            submit = waiting.popleft()
            refused = loop.submit(submit)
            if refused is not None:
                raise BenchError(f"request {submit.request_id}: {refused.message}")
            found.outputs[submit.request_id] = []
            running += 1
        full = running == due  # also where some of them wait for KV blocks
        began_s = time.perf_counter()
        done = loop.run_round()
        end_s = time.perf_counter()
        seen = _seen(found, prompts, done)
        if seen is not None and (len(load) > 1 or full):
            found.rounds.append(
                seen._replace(
                    end_s=end_s - started_s, ms=MS_PER_S * (end_s - began_s), changed=done.rows != rows_before
                )
            )
        rows_before = done.rows
        for delta in done.deltas:
            found.outputs[delta.request_id] += delta.tokens
        tokens = sum(len(delta.tokens) for delta in done.deltas)
        made += tokens
        running -= sum(bool(delta.finish) for delta in done.deltas)
        advanced(tokens)
        if len(load) == 1 and not waiting and running < due:
            break
    for key in found.outputs:
        loop.cancel(key)  # those that ended are not known any more
    return found


def _seen(found: Visit, prompts: Mapping[str, int], done: Round) -> RoundSeen | None:
    """Return what counts of a round, its times left out; None where it did more than decode."""
    # A round without a prefill has tokens for each of its sequences, and none of them is a first one.
    keys = [delta.request_id for delta in done.deltas]
    if len(keys) != done.sequences or not all(found.outputs[key] for key in keys):
        return None
    held = sum(prompts[key] + len(found.outputs[key]) - 1 for key in keys)
    tokens = sum(len(delta.tokens) for delta in done.deltas)
    return RoundSeen(
        0.0, 0.0, done.draft_ms, len(keys), done.rows, held / len(keys), done.drafted, done.accepted, tokens, False
    )
