"""A drafter that is left alone, as its drafts do not pay, is said to rest; a fixed depth is told by what it came to."""

from __future__ import annotations

import msgspec
import pytest

from orchestrator.cli.status import drafter_line, drafts_line
from orchestrator.clock import SystemClock
from orchestrator.protocol.draft_messages import DrafterState, RemoteState
from orchestrator.worker.drafting.chain import ChainDrafter
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.port import NoDrafter
from policies.speculation import Rest
from tests.support.fixed_depth import FixedDepth
from tests.support.loops import loop_over, suffix, toy


class LeavesAlone(FixedDepth):
    """Says whom it leaves alone."""

    def __init__(self, rest: Rest) -> None:
        super().__init__(2)
        self.rest = rest


class FarDrafter(NoDrafter):
    """A model in another process, which has no gate here."""

    def states(self) -> list[DrafterState]:
        return [DrafterState("far", "model", remote=RemoteState())]


@pytest.mark.parametrize(
    ("rest", "resting"),
    [(Rest.NONE, set()), (Rest.DEAR, {"far"}), (Rest.ALL, {"suffix", "m", "far"})],
    ids=["", "dear", "all"],
)
def test_gauges_and_status_say_which_drafters_rest(rest: Rest, resting: set[str]) -> None:
    model = ModelDrafter(toy(), DrafterState("m", "model"), SystemClock(), vocabulary=272, prefill_ms=50.0)
    loop = loop_over(toy(), ChainDrafter([suffix(), model, FarDrafter()]), policy=LeavesAlone(rest), depth=2)
    told = loop.gauges(0).drafters
    assert {one.name for one in told if one.rests} == resting
    assert {one.state for one in told} == {"ok"}, "a drafter that rests is as it should be"
    shown = {one.name: drafter_line(msgspec.to_builtins(one)) for one in told}
    assert {name for name, line in shown.items() if line.startswith("RESTS (")} == resting


def test_a_fixed_depth_is_a_bound_and_the_status_says_what_came_of_it() -> None:
    ready = {"drafters": ["suffix"], "max_depth": 4, "fixed_depth": True}
    assert drafts_line(ready, {"drafts": 0, "drafted": 0}).endswith("as many as it proposes")
    line = drafts_line(ready, {"drafts": 10, "drafted": 13})
    assert "always" not in line
    assert line.endswith("up to 4 tokens in every round, as many as it proposes, 1.3 on the average so far")
