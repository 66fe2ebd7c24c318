"""What `outrider simulate --validate` makes of real and simulated runs, and the command itself on a real daemon."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.selection import select_by_name
from outrider_lab.bench.traffic.outcome import Outcome
from outrider_lab.bench.validation.compare import compare_run, summarise_runs
from outrider_lab.bench.validation.predicted import Calibration, calibrate_prompts, calibrate_rounds, predict_run
from outrider_lab.bench.validation.real import RunFigures, summarise_outcomes
from outrider_lab.bench.validation.requests import RunRequests, choose_texts, list_drafted, number_runs
from outrider_lab.bench.validation.runs import RUNS, TURNS, ValidationRun, list_turn
from outrider_lab.replay.recorded import RecordedRequest
from outrider_lab.simulation.faults import Fault
from outrider_lab.simulation.processes import Timing
from outrider_lab.simulation.run import list_unvalidated

from device_profiles.cost import StepCost
from tools.lab.tests.simulation.fleets import make_fleet, make_kind

COST = StepCost((1.0, 4.0, 8.0, 64.0), (10.0, 14.0, 20.0, 100.0), prefill=StepCost((8.0, 64.0), (20.0, 90.0)))
KNOWN = Calibration(COST, 0.1, 1.0, Timing())
FIGURES = RunFigures(100.0, 50.0, 10.0, 600.0, 800.0, 1.0)


def requests_of(run: ValidationRun, output_tokens: int = 30) -> RunRequests:
    texts = choose_texts(None, run, 0)
    recorded = [RecordedRequest(text.key, (), text.category) for text in texts]
    return RunRequests(texts, recorded, [40] * len(texts), [output_tokens] * len(texts))


def test_there_are_enough_runs_and_no_two_of_a_drafter_ask_the_same() -> None:
    assert len(RUNS) >= 12
    assert {run.place for run in RUNS} == {"one worker", "two workers", "unlike workers", "three hosts"}
    there, back = (list_turn(RUNS, turn) for turn in range(TURNS))
    faults = sum(bool(run.fault) for run in RUNS)
    assert [run.name for run in there[:-faults]] == [run.name for run in reversed(back[:-faults])]
    assert [run.name for run in there[-faults:]] == [run.name for run in back[-faults:]]
    made = there + back
    texts = [
        (run.place, text.text)
        for run, number in zip(made, number_runs(made), strict=True)
        for text in choose_texts(None, run, number)
        if run.speculates
    ]
    assert len(set(texts)) == len(texts), "a drafter remembers what it drafted for"
    with pytest.raises(BenchError, match="finds none of"):
        select_by_name("twelve workers", RUNS)


def test_a_drafter_reads_along_until_its_worker_is_lost() -> None:
    runs = [ValidationRun("one worker", drafts, 4, requests=4) for drafts in (True, False)]
    runs += [ValidationRun("one worker", True, 4, requests=4, fault="kill_worker"), replace(runs[0], turn=1)]
    texts = [choose_texts(None, run, number) for run, number in zip(runs, number_runs(runs), strict=True)]
    assert list_drafted(runs, texts) == {
        ("one worker", 0): ["0.0", "0.1", "0.2", "0.3", "1.0", "1.1"],
        ("one worker", 1): ["1.2", "1.3", "2.0", "2.1", "2.2", "2.3"],
    }


def test_errors_are_of_the_figures_that_both_have() -> None:
    run = RUNS[0]
    row = compare_run(run, [(FIGURES, replace(FIGURES, output_tok_s=110.0, tpot_ms=9.0, ttft_ms=60.0))])
    assert row["errors"]["output_tok_s"] == pytest.approx(0.1)
    assert row["errors"]["tpot_ms"] == pytest.approx(-0.1)
    assert "pause_ms" not in row["errors"]
    slower = replace(FIGURES, output_tok_s=50.0, pause_ms=300.0)
    twice = compare_run(run, [(FIGURES, FIGURES), (slower, replace(slower, output_tok_s=60.0))])
    assert twice["real"]["output_tok_s"] == pytest.approx(75.0)
    assert twice["errors"]["output_tok_s"] == pytest.approx(80.0 / 75.0 - 1.0)
    assert twice["errors"]["pause_ms"] == 0.0
    told = summarise_runs([row])
    assert told["runs"] == 1
    assert told["worst_error"] == pytest.approx(0.1)
    assert told["ttft_error"] == pytest.approx(0.2)
    assert told["pause_error"] is None


def test_a_calibration_finds_how_much_slower_rounds_are() -> None:
    slower = replace(KNOWN, pace=1.2, round_ms=0.8)
    runs = [ValidationRun("one worker", False, 1, requests=6), ValidationRun("one worker", False, 6, requests=18)]
    pairs = []
    for run in runs:
        asked = requests_of(run)
        real = predict_run(run, asked, [slower], real=None, slo_ms=1e9)
        pairs.append((real, predict_run(run, asked, [KNOWN], real=None, slo_ms=1e9)))
    found = calibrate_rounds(KNOWN, pairs)
    assert found.pace == pytest.approx(1.2, abs=0.1)  # prompts beside the rounds are as before
    again = predict_run(runs[1], requests_of(runs[1]), [found], real=None, slo_ms=1e9)
    assert again.tpot_ms == pytest.approx(pairs[1][0].tpot_ms, rel=0.02)


def test_a_calibration_finds_what_prompts_take() -> None:
    prompts = [20, 40, 80, 160]
    times = [1.3 * COST.prefill_ms(tokens) + 7.0 for tokens in prompts]
    found = calibrate_prompts(KNOWN, prompts, times)
    assert found.prefill_pace == pytest.approx(1.3)
    assert found.prompt_ms == pytest.approx(7.0 - KNOWN.timing.intake_ms - KNOWN.timing.deliver_ms)


def test_a_pause_is_of_the_requests_that_stood_still() -> None:
    steady = [0.1 * step for step in range(1, 60)]
    stopped = [at for at in steady if at < 2.0] + [at + 1.5 for at in steady if at >= 2.0]
    outcomes = [
        Outcome(name, "", arrival_s=0.0, chunks_s=chunks, last_s=chunks[-1], generated=60)
        for name, chunks in (("steady", steady), ("stopped", stopped))
    ]
    found = summarise_outcomes(outcomes, 1.95, 1e9)
    assert found.pause_ms == pytest.approx(1000 * (3.5 - 1.95))
    assert summarise_outcomes(outcomes, -1.0, 1e9).pause_ms is None


def test_what_no_real_run_was_compared_with_is_named() -> None:
    fleet = make_fleet(*[make_kind()] * 3)
    assert list_unvalidated(make_fleet(make_kind())) == []
    told = list_unvalidated(fleet, [Fault(at_s=1.0, kind="lose_device", name="target-1")])
    assert "3 replicas (validated with up to 2)" in told
    assert "faults: lose_device" in told
    unlike = make_fleet(make_kind(group="a"), make_kind(speed=0.5, group="b"))
    assert list_unvalidated(unlike) == ["drafts in groups of unlike bits"]


@pytest.mark.slow
def test_the_command_compares_a_real_run(tmp_path: Path, outrider: Callable[..., tuple[int, str, str]]) -> None:
    out = tmp_path / "validation.json"
    run = "one worker, 1 at a time, plain"
    code, shown, said = outrider("simulate", "--validate", "--only", run, "--json", str(out))
    assert code == 0, said
    assert run in " ".join(shown.split())
    found = json.loads(out.read_text())["summary"]
    assert found["runs"] == 1
    assert {"median_error", "worst_error", "ttft_error"} <= found.keys()
