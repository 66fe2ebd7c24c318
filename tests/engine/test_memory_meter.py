"""What a worker held is kept beside what is announced of as much use, and the next plan goes by it."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from adapters.contract import Segment
from device_profiles.memory import MeasuredMemory, MemoryPlan, MemoryUse, correct_plan
from device_profiles.store import ProfileStore
from orchestrator.protocol.rounds import RoundReport
from orchestrator.worker.loading.memory import MemoryMeter
from tests.support.loops import toy

KNOWN_BY = MeasuredMemory("mark", "simulated", "CPU", "toy", "digest", "recipe", "auto", 16)
ROW, LOGITS, WIDTH, KV = 10, 100, 1_000, 64_000
PROCESS, WEIGHTS = 5_000, 20_000


def predict(use: MemoryUse | None) -> MemoryPlan:
    """Announce what depends on rows, how many numbers of them there were, logits and the KV cache."""
    used = use or MemoryUse(256, 32, KV, widths=48)
    workspace = ROW * used.batch_rows + LOGITS * used.logits_rows + WIDTH * used.widths
    return MemoryPlan(PROCESS, WEIGHTS, used.kv_cache_bytes, workspace)


def meter_over(directory: Path, positions: int = 0) -> MemoryMeter:
    model = toy(kv_blocks=64)
    if positions:
        model.forward([Segment(0, 0, list(range(5, 5 + positions)), (0, 1))])
        model.release(0)
    return MemoryMeter(ProfileStore(directory), KNOWN_BY, predict, model)


def run(meter: MemoryMeter, rounds: int, rows: int, sequences: int) -> None:
    for _ in range(rounds):
        drafted = rows - sequences
        meter.observe_round(RoundReport([], sequences, rows, 1, drafted, 0, [], 1.0, device_ms=1.0, draft_ms=0.0))


@given(st.integers(1, 256), st.integers(0, 16), st.integers(0, 200_000))
def test_the_next_plan_is_off_by_nothing_where_the_error_is_not_of_the_use(
    tmp_path_factory: pytest.TempPathFactory, rows: int, blocks: int, more: int
) -> None:
    """A worker that is announced wrongly by a constant tells it, however little of its memory it has used."""
    directory = tmp_path_factory.mktemp("store")
    meter = meter_over(directory, 16 * blocks)
    run(meter, 16, rows, 1)
    used = predict(MemoryUse(rows, rows, KV * blocks // 64, widths=1))
    held = used.total + more - 10_000
    meter.observe_held(held, idle=True, now_s=0.0)
    last = ProfileStore(directory).find_memory(KNOWN_BY)
    assert correct_plan(predict(None), last).total == predict(None).total + more - 10_000


def test_what_a_worker_holds_that_has_hardly_worked_is_not_kept(tmp_path: Path) -> None:
    meter = meter_over(tmp_path)
    run(meter, 3, 2, 1)
    meter.observe_held(1_000, idle=True, now_s=0.0)
    assert meter.last is None
    run(meter, 13, 2, 1)
    meter.observe_held(1_000, idle=False, now_s=1.0)
    assert meter.last is None, "no file is written while requests run, but for one in 30 s"
    meter.observe_held(1_000, idle=True, now_s=2.0)
    assert meter.last is not None


def test_a_fuller_use_counts_and_one_that_held_more(tmp_path: Path) -> None:
    full = meter_over(tmp_path, 256)
    run(full, 16, 256, 4)
    full.save_held(70_000)
    little = meter_over(tmp_path)
    run(little, 16, 2, 1)
    little.save_held(3_000)
    assert ProfileStore(tmp_path).find_memory(KNOWN_BY) == full.last, "it tells less of what the full one needs"
    little.save_held(60_000)
    last = ProfileStore(tmp_path).find_memory(KNOWN_BY)
    assert last is not None
    assert last.held_bytes == 60_000, "it has held more than was announced of it"


def test_a_store_that_cannot_be_written_costs_nothing_but_the_figure(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    meter = meter_over(file / "profiles")
    run(meter, 16, 2, 1)
    meter.save_held(1_000)
    assert meter.last is not None
    assert meter.last.held_bytes == 1_000
