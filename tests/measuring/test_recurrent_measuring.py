"""Models whose slots cannot be rolled back are measured, too: forwards go on where slots end."""

from __future__ import annotations

from pathlib import Path

import pytest

from adapters.contract import silent
from orchestrator.clock import SystemClock
from orchestrator.worker.measuring.class_trial import CostMeter, time_in_turns, try_class
from orchestrator.worker.measuring.quick import quick_cost
from orchestrator.worker.measuring.steps import follow_on, measure_steps, segment
from tests.support.hybrids import load_hybrid, prepare_hybrid


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepare_hybrid(tmp_path_factory.mktemp("hybrid"))


@pytest.mark.parametrize("kv_cache_bytes", [16 << 20, 700_000])
def test_costs_are_measured_in_whatever_room_there_is_and_slots_are_left_empty(prepared, kv_cache_bytes):
    model, clock = load_hybrid(prepared, kv_cache_bytes), SystemClock()
    free = model.free_blocks()
    steps = measure_steps(model, clock, silent, budget_s=0.5)
    assert steps.cost.ms(1) > 0.0
    assert {max(one.rows) for one in steps.samples if len(one.rows) > 1} <= {1}  # nobody drafts for it
    quick_cost(model, clock, budget_s=1.0)
    meter = CostMeter(model, clock)
    (costs,) = time_in_turns([meter.measure_ms])
    meter.release_slot()
    assert len(costs.decode_ms) == 5
    assert min(costs.prefill_ms, meter.prompt_tokens) > 0
    found = try_class(model, None, 0.0)
    assert (found.passed, found.why) == (True, "sane, bits do not depend on the batch")
    assert model.free_blocks() == free
    model.close()


def test_a_batch_follows_what_slots_hold_and_begins_anew_at_a_contexts_end(prepared):
    model = load_hybrid(prepared)
    batch = [segment(model, 0, 16, 60, prompt=True)]
    model.forward([segment(model, 0, 0, 16, prompt=True)])
    starts = []
    for _ in range(40):
        followed = follow_on(model, batch)
        model.forward(followed)
        starts.append(followed[0].start)
    whole = model.capabilities.max_context_tokens
    assert starts[:3] == [16, 76, 136]
    assert 0 in starts
    assert max(starts) + 60 <= whole
    model.close()
