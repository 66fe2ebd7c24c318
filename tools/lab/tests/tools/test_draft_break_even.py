"""What a made-up draft model brings beside drafts from text: cases that can be computed, and the whole tool."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from device_profiles.cost import StepCost
from outrider_lab.simulation.recording import Recording, save_recording
from outrider_lab.replay.recorded import Costs, RecordedDraft, RecordedRequest
from outrider_lab.measure.draft_break_even import Model, Replay, find_agreement

FLAT = [10.0] * 4
STEEP = [10.0, 20.0, 30.0, 40.0]
SILENT = [RecordedRequest("a", (RecordedDraft(),) * 400)]


def test_a_free_draft_that_is_always_right_fills_every_row_and_one_that_costs_a_round_brings_nothing() -> None:
    replay = Replay(SILENT, FLAT)
    assert replay.count_ms(None) == pytest.approx(10.0)
    assert replay.count_ms(Model(0.0, 1.0)) == pytest.approx(10.0 / 4)
    assert replay.count_ms(Model(1.0, 1.0)) == pytest.approx((10.0 + 3.0) / 4)
    assert replay.count_ms(Model(10.0, 0.9)) == pytest.approx(10.0), "it is not asked where it does not pay"
    assert Replay(SILENT, STEEP).count_ms(Model(0.0, 0.9)) == pytest.approx(10.0), "rows cost what they save"


def test_agreement_is_the_chance_of_each_token_and_the_least_that_is_enough_is_found() -> None:
    replay = Replay(SILENT, [10.0, 10.0])
    assert replay.count_ms(Model(0.0, 0.5)) == pytest.approx(10.0 / 1.5, rel=0.05)
    least = find_agreement(replay, 0.0, 1.2)
    assert least == pytest.approx(0.2, abs=0.04)
    assert find_agreement(replay, 9.0, 1.2) is None


def test_a_model_never_takes_from_what_the_stores_bring() -> None:
    sure = [RecordedRequest("a", (RecordedDraft(3, (0.99,) * 3, 3),) * 400)]
    replay = Replay(sure, FLAT)
    assert replay.count_ms(None) == pytest.approx(2.5)
    assert replay.count_ms(None, stores=False) == pytest.approx(10.0)
    assert replay.count_ms(Model(0.1, 0.5)) == pytest.approx(2.5)


def test_the_table_of_a_recording_and_of_other_rows(tmp_path: Path) -> None:
    recording, out = tmp_path / "recording", tmp_path / "out.json"
    cost = StepCost((1.0, 8.0), (10.0, 12.0))
    save_recording(Recording({"good": SILENT}, Costs(cost), cost, 12, 2, [1]), recording)
    arguments = [str(recording), "--row-ms", "10", "20", "30", "40", "--json", str(out)]
    done = subprocess.run(
        [sys.executable, "-m", "outrider_lab.measure.draft_break_even", *arguments], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    here, other = json.loads(out.read_text())
    assert here["row_ms"][0] == pytest.approx(10.0)
    assert here["rows"][0]["least"] < 0.2
    assert other["rows"][-1]["least"] is None
    assert "never" in done.stdout
    done = subprocess.run(
        [sys.executable, "-m", "outrider_lab.measure.draft_break_even", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
