"""The statistics behind `outrider bench serve`: properties that hold for any requests."""

from __future__ import annotations

import math
import statistics

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.traffic.drive import arrival_times_s
from outrider_lab.bench.traffic.figures import (
    TrafficRun,
    compare_endpoints,
    latencies_ms,
    output_over_time,
    running_over_time,
    summarise_traffic,
    summarise_values,
)
from outrider_lab.bench.traffic.outcome import Outcome, meets, parse_slo

from orchestrator.worker.measuring.prompts import spread

times = st.floats(0.0, 100.0)


@st.composite
def outcomes(draw, errors=("", "timeout")):
    arrival_s, *rest = sorted(draw(st.lists(times, min_size=2, max_size=8)))
    made = Outcome("k", "c", arrival_s=arrival_s, sent_s=arrival_s, chunks_s=rest, last_s=rest[-1], end_s=rest[-1])
    made.error = draw(st.sampled_from(errors))
    made.generated = draw(st.none() | st.integers(1, 50))
    return made


@given(st.lists(st.floats(0.0, 1e6), min_size=1))
def test_percentiles_are_ordered_and_inside_what_was_measured(values):
    found = summarise_values(values)
    assert found is not None
    ordered = [found[name] for name in ("median", "p90", "p95", "p99")]
    assert ordered == sorted(ordered)
    assert min(values) <= ordered[0]
    assert ordered[-1] <= max(values)
    assert found["median"] == pytest.approx(statistics.median(values))
    assert found["mean"] == pytest.approx(statistics.fmean(values))


def test_nothing_measured_is_no_distribution():
    assert summarise_values([]) is None


@given(outcomes(errors=("",)))
def test_a_latency_is_its_ttft_and_one_tpot_for_each_further_token(outcome):
    assert outcome.ttft_s >= 0.0
    assert sum(outcome.gaps_s) == pytest.approx(outcome.chunks_s[-1] - outcome.chunks_s[0], abs=1e-9)
    if outcome.tpot_s is not None:
        assert outcome.ttft_s + (outcome.generated - 1) * outcome.tpot_s == pytest.approx(outcome.latency_s)


@given(st.lists(outcomes(), min_size=1), st.floats(1.0, 1e5), st.floats(1.0, 1e5))
def test_goodput_grows_with_the_objective_and_never_passes_the_throughput(found, one_ms, other_ms):
    run = TrafficRun(found, asked=len(found), wall_s=100.0)
    strict, loose = sorted((one_ms, other_ms))
    goodputs = [summarise_traffic(run, None, {"ttft": ms, "e2e": ms})["goodput_per_s"] for ms in (strict, loose, 1e9)]
    throughput = summarise_traffic(run, None, {})["requests_per_s"]
    assert goodputs == sorted(goodputs)
    assert goodputs[-1] == throughput


@given(st.lists(outcomes(errors=("",)), min_size=1))
def test_one_missing_token_count_takes_every_figure_that_would_be_a_guess(found):
    summary = summarise_traffic(TrafficRun(found, len(found), 100.0), None, {"tpot": 1e9})
    missing = sum(outcome.generated is None for outcome in found)
    assert summary["without_token_count"] == missing
    if missing:
        assert summary["output_tok_s"] is summary["output_tokens"] is summary["goodput_per_s"] is None
    else:
        assert summary["output_tok_s"] == sum(outcome.generated for outcome in found) / 100.0
        assert summary["goodput_per_s"] == summary["requests_per_s"]


@given(st.lists(outcomes()))
def test_running_requests_begin_and_end_at_none(found):
    moments, running = running_over_time(found)
    assert moments == sorted(moments)
    assert all(0 <= count <= len(found) for count in running)
    assert not running or running[-1] == 0
    area = sum(count * (end - start) for count, start, end in zip(running, moments, moments[1:], strict=False))
    assert area == pytest.approx(sum(o.end_s - o.arrival_s for o in found), abs=1e-6)  # Little's law


@given(st.lists(outcomes(), min_size=1), st.integers(1, 20))
def test_the_plotted_throughput_holds_every_token(found, bins):
    _, rates = output_over_time(found, bins, 100.0)
    assert sum(rates) * 100.0 / bins == pytest.approx(sum(outcome.generated or 0 for outcome in found))


@given(st.lists(outcomes(), min_size=1))
def test_failed_requests_are_counted_by_kind_and_have_no_latency(found):
    summary = summarise_traffic(TrafficRun(found, len(found), 1.0), None, {})
    failed = sum(bool(outcome.error) for outcome in found)
    assert summary["failed"] == sum(summary["errors"].values()) == failed
    assert len(latencies_ms(found)["e2e_ms"]) == summary["completed"] == len(found) - failed


def test_an_objective_is_met_at_its_value_and_one_token_has_no_tpot():
    outcome = Outcome("k", "c", arrival_s=1.0, chunks_s=[1.5], last_s=1.5, end_s=1.5, generated=1)
    assert meets(outcome, {"ttft": 500.0, "tpot": 1.0, "e2e": 500.0}) is True
    assert meets(outcome, {"ttft": 499.0}) is False
    outcome.generated = None
    assert meets(outcome, {"tpot": 1.0}) is None
    assert meets(outcome, {"tpot": 1.0, "ttft": 499.0}) is False  # whatever its TPOT was


@pytest.mark.parametrize("text", ["ttft", "ttft=", "ttft=x", "ttft=-1", "ttft=inf", "tftt=5", "ttft=5,ttft=6"])
def test_a_wrong_objective_is_named(text):
    with pytest.raises(BenchError, match=r"--slo 't"):
        parse_slo(text)


def test_objectives_are_milliseconds():
    assert parse_slo(" ttft=500, tpot=50.5 ,") == {"ttft": 500.0, "tpot": 50.5}
    assert parse_slo("") == {}


@given(
    st.integers(1, 200),
    st.floats(0.01, 1000.0),
    st.sampled_from(["poisson", "constant"]),
    st.floats(0.05, 50.0),
    st.integers(0, 2**32),
)
def test_arrivals_keep_the_asked_rate_exactly(count, rate, arrival, burstiness, seed):
    found = arrival_times_s(count, rate, arrival, burstiness, seed)
    assert len(found) == count
    assert found == sorted(found)
    assert found[0] > 0.0
    assert found[-1] == pytest.approx(count / rate)
    assert found == arrival_times_s(count, rate, arrival, burstiness, seed)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_the_gaps_vary_as_asked(burstiness):
    gaps = np.diff(arrival_times_s(20_000, 10.0, "poisson", burstiness, 7))
    assert gaps.std() / gaps.mean() == pytest.approx(1.0 / math.sqrt(burstiness), rel=0.05)


@given(st.integers(1, 50), st.integers(1, 120))
def test_prompts_are_spread_evenly_or_used_in_turn(size, count):
    found = spread(range(size), count)
    assert len(found) == count
    uses = [found.count(item) for item in range(size)]
    assert max(uses) - min(uses) <= 1
    assume(count <= size)
    assert found == sorted(found)


def test_two_endpoints_are_compared_by_ratios_and_by_text():
    def run(latency_s, text):
        made = Outcome("k", "c", chunks_s=[latency_s / 2], last_s=latency_s, end_s=latency_s, generated=3, text=text)
        return TrafficRun([made], 1, latency_s)

    runs = [run(1.0, "a"), run(2.0, "a")]
    found = compare_endpoints(runs, [summarise_traffic(run, None, {}) for run in runs])
    assert found["ratios"]["e2e_ms_median"] == 0.5
    assert found["ratios"]["output_tok_s"] == 2.0
    assert (found["same_text"], found["same_text_of"]) == (1, 1)
    runs[1].outcomes[0].text = "b"
    assert compare_endpoints(runs, [summarise_traffic(run, None, {}) for run in runs])["same_text"] == 0
