"""What a drafter tells of its own rounds."""

from __future__ import annotations

from orchestrator.protocol.draft_messages import DrafterState
from orchestrator.worker.drafting.port import Meter
from tests.support.simulated_time import SimulatedClock


def test_rounds_and_their_time_add_up() -> None:
    clock = SimulatedClock()
    meter = Meter(DrafterState("m", "model"), clock)
    for took_s in (0.25, 0.5):
        with meter.round():
            clock.now_s += took_s
    assert (meter.state.rounds, meter.state.draft_ms) == (2, 750.0)
