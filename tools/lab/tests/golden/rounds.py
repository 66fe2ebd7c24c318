"""What is replayed: recorded rounds under the depth policy alone, and whole decode loops on simulated time.

`python -m tools.lab.tests.golden.rounds` writes the decisions anew, for a change that is meant to change some.
"""

from __future__ import annotations

import gzip
import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec
import numpy as np
from outrider_lab.replay.run import replay
from outrider_lab.simulation.recording import Recording

from adapters.contract import ForwardResult, Segment
from orchestrator.protocol.commands import Submit
from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.suffix import SuffixDrafter
from orchestrator.worker.engine.loop import DecodeLoop
from policies.sampling import Sampling
from policies.speculation import DraftSummary, RoundContext
from policies.speculation.adaptive import Adaptive
from policies.speculation.cost_model import TYPICAL, start_cost_model
from policies.speculation.policy import DraftLimits
from tests.support.loops import loop_over
from tests.support.simulated_time import COST, SimulatedClock, TimedModel, serve

HERE = Path(__file__).parent
KINDS = ("good", "bad", "alternating")
AT_ONCE = (1, 4, 16)
_TOKENS = 96
_PROMPT = list(b"the state of the art is the art of the state, ")


def recording() -> Recording:
    """Rounds of a real model, with three kinds of drafters."""
    return msgspec.json.decode(gzip.decompress((HERE / "recording.json.gz").read_bytes()), type=Recording)


def cases() -> Iterator[str]:
    """The names of all replays."""
    for kind in KINDS:
        for count in AT_ONCE:
            yield f"policy {kind} {count}"
            yield f"loop {kind} {count}"
        yield f"policy {kind} 1 model"  # a drafter to which each token costs time
        yield f"policy {kind} 4 model"
    yield "policy good 4 widths"


def play(case: str, recorded: Recording) -> list[str]:
    """Return the decisions of a replay, a line for each round."""
    what, kind, count, *drafter = case.split()
    if what == "loop":
        return _loop(kind, int(count))
    return _policy(recorded, kind, int(count), "".join(drafter))


class _Noted(Adaptive):
    """Notes what it decides: the tokens asked for by place, and the depths, in base 36."""

    def __init__(self, recorded: Recording) -> None:
        super().__init__(start_cost_model(recorded.known))
        self.lines: list[str] = []

    def decide_draft_limits(self, now: RoundContext) -> DraftLimits:
        found = super().decide_draft_limits(now)
        self._asked_for = _digits(found.limits) + ("-" if found.cheap_only else "")
        return found

    def decide_depths(self, now: RoundContext, proposals: Sequence[DraftSummary]) -> list[int]:
        depths = super().decide_depths(now, proposals)
        self.lines.append(f"{self._asked_for} {_digits(depths)}")
        return depths


def _digits(values: Sequence[int]) -> str:
    return "".join(np.base_repr(value, 36).lower() for value in values)


def _policy(recorded: Recording, kind: str, count: int, drafter: str) -> list[str]:
    costs = recorded.costs
    if drafter == "model":
        costs = replace(costs, draft_token_ms=0.12 * costs.forward_ms([0], 0.0))
    if drafter == "widths":
        costs = replace(costs, widths=(1, 2, 4, 8))
    policy = _Noted(recorded)
    replay(recorded.kinds[kind][: count + max(3, count // 4)], policy, costs, concurrency=count, most=recorded.most)
    return policy.lines


class _DraftModel(TimedModel):
    """The target, smaller: it takes an eighth of the time, and errs as its kind does, in every second stretch of 40
    positions if it alternates."""

    def __init__(self, clock: SimulatedClock, kind: str) -> None:
        super().__init__(clock)
        self._cost = COST.scale_by(0.125)
        self._errors = np.random.default_rng(7).normal(0.0, 1.0, (251, 272)).astype(np.float32)
        self._kind = kind

    def forward(self, batch: Sequence[Segment]) -> ForwardResult:
        result = super().forward(batch)
        rows = [(segment.start + row, segment.tokens[row]) for segment in batch for row in range(*segment.rows)]
        for index, (position, token) in enumerate(rows):
            errs = self._kind == "bad" or (self._kind == "alternating" and position // 40 % 2 == 0)
            result.logits[index] += self._errors[(31 * position + token) % 251] * np.float32(4.0 if errs else 0.3)
        return result


def _loop(kind: str, count: int) -> list[str]:
    clock = SimulatedClock()
    loop = _loop_of(clock, kind, count)
    arrivals = [(0.05 * number, _submit(number)) for number in range(count + max(3, count // 4))]
    served = serve(loop, clock, arrivals)
    return [
        f"{one.sequences} {one.rows} {one.drafted} {one.accepted} {one.round_ms:.2f} {one.draft_ms:.2f}"
        for one in served.rounds
    ]


def _loop_of(clock: SimulatedClock, kind: str, count: int) -> DecodeLoop:
    target = TimedModel(clock)
    model = ModelDrafter(
        _DraftModel(clock, kind), DrafterState("small", "model"), clock, vocabulary=272, prefill_ms=50.0
    )
    model.measure()
    drafter = ChainDrafter([SuffixDrafter(max_match=16, memory_bytes=8 << 20, clock=clock), model])
    return loop_over(
        target, drafter, running=count, clock=clock, policy=Adaptive(start_cost_model(TYPICAL)), max_itl_ms=100.0
    )


def _submit(number: int) -> Submit:
    sampling = Sampling(temperature=0.8, seed=number) if number % 3 == 2 else Sampling()
    return Submit(f"r{number}", [*_PROMPT, 97 + number], _TOKENS, sampling)


def _write() -> None:
    recorded = recording()
    text = json.dumps({case: play(case, recorded) for case in cases()}, indent=0)
    (HERE / "decisions.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    _write()
