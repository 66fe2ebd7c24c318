"""What the metrics say, from rounds and requests whose figures are known."""

from __future__ import annotations

from typing import Any

import httpx
import msgspec
import pytest

from orchestrator.daemon.api.metrics.collector import Metrics
from orchestrator.daemon.api.metrics.request_timing import WINDOW_S, Recent
from orchestrator.daemon.api.metrics.vllm_names import TOLD_TWICE
from orchestrator.daemon.control.port import DraftView
from orchestrator.errors import RequestError
from orchestrator.protocol.draft_messages import DrafterState, DraftReady, RemoteState
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.rounds import AcceptanceWarning, Delta, Gauges, RequestStats, RoundReport
from policies.serving.acceptance_alarm import Cause
from tests.api.support import READY, HandClock, ScriptedControl, app_over, leave_hanging, serving
from tests.support.ready import change_ready

ASK: dict[str, Any] = {"model": "toy", "prompt": "four"}
STATS = RequestStats(prompt_tokens=7, generated=3, steps=1, drafted=4, accepted=2, queue_ms=1.0, prefill_ms=2.0)
ROUND = RoundReport(
    deltas=[Delta("a", [1, 2, 3], "", STATS)],
    sequences=1,
    rows=5,
    drafts=1,
    drafted=4,
    accepted=2,
    accepted_per_position=[1, 1],
    round_ms=9.0,
    device_ms=7.0,
    draft_ms=0.5,
)


def value(text: str | bytes, name: str, **labels: str) -> float | None:
    """The value of one series, None where there is none."""
    text = text.decode() if isinstance(text, bytes) else text
    written = ",".join(f'{key}="{one}"' for key, one in sorted({"model_name": "toy", "engine": "0", **labels}.items()))
    found = [line.split(" ")[1] for line in text.splitlines() if line.startswith(f"outrider_{name}{{{written}}} ")]
    return float(found[0]) if found else None


def test_drafts_are_counted_by_the_rule_that_judged_them():
    metrics = Metrics(ScriptedControl(), HandClock())
    for drafted, accepted in ((3, 2), (5, 1)):
        metrics.observe_round(
            msgspec.structs.replace(ROUND, by_rule={"rejection": (drafted, accepted), "greedy": (1, 1)})
        )
    text = metrics.render()
    assert value(text, "acceptance_draft_tokens_total", rule="rejection") == 8
    assert value(text, "acceptance_accepted_tokens_total", rule="rejection") == 3
    assert value(text, "acceptance_accepted_tokens_total", rule="greedy") == 2
    assert value(text, "acceptance_draft_tokens_total", rule="coupled") is None


def test_the_tolerance_is_told_while_it_is_known():
    control = ScriptedControl(gauges=Gauges(0, 0, 1, 1, 0, 0, 0, 0, tolerance_deltas={"sampled": 0.75}))
    metrics = Metrics(control, HandClock())
    assert value(metrics.render(), "tolerance_delta", sampling="sampled") == 0.75
    assert value(metrics.render(), "tolerance_delta", sampling="greedy") is None
    control.gauges = Gauges(0, 0, 1, 1, 0, 0, 0, 0)
    assert value(metrics.render(), "tolerance_delta", sampling="sampled") is None


def test_warnings_of_low_acceptance_are_told_while_they_stand():
    warned = [AcceptanceWarning("d", "/r", user, 0.1, 0.12, 0.15, 300, Cause.HARD_TEXT) for user in ("", "ada")]
    control = ScriptedControl(gauges=Gauges(0, 0, 1, 1, 0, 0, 0, 0, low_acceptance=warned))
    metrics = Metrics(control, HandClock())
    for _ in range(2):
        assert value(metrics.render(), "low_acceptance", drafter="d", cause="hard_text") == 2
    control.gauges = Gauges(0, 0, 1, 1, 0, 0, 0, 0)
    assert value(metrics.render(), "low_acceptance", drafter="d", cause="hard_text") is None


def test_planned_and_peak_memory_are_told_by_worker_and_device():
    remote = DrafterState("model", "model", device="GPU.0", planned_memory_bytes=300, remote=RemoteState())
    seen = msgspec.structs.replace(remote, remote=RemoteState(peak_rss_bytes=250))
    ready = DraftReady("model", LinkEndpoint([], b""), remote, 272, "", "auto", 7, 0.1)
    control = ScriptedControl(
        ready=change_ready(READY, planned_memory_bytes=900),
        gauges=Gauges(0, 0, 1, 1, 0, 0, 0, 0, drafters=[seen], peak_rss_bytes=800),
        drafts=(DraftView("model", "ready", "", "", ready, 0, targets=("r0",)),),
    )
    metrics = Metrics(control, HandClock())
    text = metrics.render()
    target, draft = {"worker": "target", "device": READY.device.name}, {"worker": "model", "device": "GPU.0"}
    assert [value(text, "planned_memory_bytes", **one) for one in (target, draft)] == [900, 300]
    assert [value(text, "peak_memory_bytes", **one) for one in (target, draft)] == [800, 250]
    control.ready, control.drafts = READY, ()  # a new worker on a device whose costs are not known
    text = metrics.render()
    assert value(text, "planned_memory_bytes", **target) is None
    assert value(text, "peak_memory_bytes", **draft) is None


def test_a_round_is_counted_as_vllm_counts_it():
    metrics = Metrics(ScriptedControl(), HandClock())
    metrics.observe_round(ROUND)
    text = metrics.render()
    assert value(text, "spec_decode_num_drafts_total") == 1
    assert value(text, "spec_decode_num_draft_tokens_total") == 4
    assert value(text, "spec_decode_num_accepted_tokens_total") == 2
    assert [value(text, "spec_decode_num_accepted_tokens_per_pos_total", position=p) for p in "012"] == [1, 1, None]
    assert value(text, "draft_latency_ms_sum") == 0.5
    assert value(text, "verifier_latency_ms_sum") == 7.0
    assert value(text, "generation_tokens_total") == 3
    assert value(text, "prompt_tokens_total") == 7
    assert value(text, "iteration_tokens_total_sum") == 10


def test_stages_of_a_sharded_target_are_told_and_of_a_whole_one_are_not():
    metrics = Metrics(ScriptedControl(), HandClock())
    metrics.observe_round(ROUND)
    assert value(metrics.render(), "target_stage_seconds_total", stage="0") is None
    for in_flight in (1, 2):
        metrics.observe_round(msgspec.structs.replace(ROUND, stage_ms=[3.0, 5.0], in_flight=in_flight))
    text = metrics.render()
    assert [value(text, "target_stage_seconds_total", stage=one) for one in "01"] == [0.006, 0.01]
    assert value(text, "rounds_in_flight_sum") == 3


def vllm_bench_figures(text: str) -> dict[str, int]:
    """What `vllm bench serve` reads of a server's speculation: lines that begin with its names, by what they hold."""
    found = {"num_drafts": 0, "num_draft_tokens": 0, "num_accepted_tokens": 0}
    for line in text.splitlines():
        if not line.startswith("vllm:spec_decode") or "_created" in line:
            continue
        for name in found:
            if f"{name}_total" in line:
                found[name] += int(float(line.split()[-1]))
    return found


def test_vllm_s_names_are_there_where_they_are_wanted():
    metrics = Metrics(ScriptedControl(), HandClock(), vllm_names=True)
    metrics.observe_round(ROUND)
    text = metrics.render().decode()
    assert vllm_bench_figures(text) == {"num_drafts": 1, "num_draft_tokens": 4, "num_accepted_tokens": 2}
    assert 'vllm:spec_decode_num_accepted_tokens_per_pos_total{engine="0",model_name="toy",position="1"} 1.0' in text
    assert "# TYPE vllm:time_to_first_token_seconds histogram" in text
    assert "vllm:round_seconds" not in text
    families = {family.name for family in metrics.registry.collect()}
    assert families >= TOLD_TWICE
    assert "vllm:" not in Metrics(ScriptedControl(), HandClock()).render().decode()


def test_a_prompt_is_counted_once_even_when_the_request_goes_on_in_another_worker():
    metrics = Metrics(ScriptedControl(), HandClock())
    metrics.observe_round(ROUND)
    for generated in (4, 5):
        later = Delta("a", [9], "", msgspec.structs.replace(STATS, generated=generated))
        metrics.observe_round(msgspec.structs.replace(ROUND, deltas=[later]))
    assert value(metrics.render(), "prompt_tokens_total") == 7


def test_rates_look_back_a_stated_time_and_are_not_told_without_drafts():
    clock = HandClock()
    metrics = Metrics(ScriptedControl(), clock)
    assert value(metrics.render(), "tokens_per_second") == 0.0
    assert value(metrics.render(), "acceptance_rate") is None
    metrics.observe_round(ROUND)
    clock.now_s += 10.0
    metrics.observe_round(msgspec.structs.replace(ROUND, accepted=4))
    assert value(metrics.render(), "tokens_per_second") == pytest.approx(6 / 10)
    assert value(metrics.render(), "acceptance_rate") == pytest.approx(6 / 8)
    clock.now_s += WINDOW_S - 5.0
    assert value(metrics.render(), "tokens_per_second") == pytest.approx(3 / WINDOW_S)
    assert value(metrics.render(), "acceptance_rate") == pytest.approx(4 / 4)
    clock.now_s += WINDOW_S
    assert value(metrics.render(), "tokens_per_second") == 0.0
    assert value(metrics.render(), "acceptance_rate") is None


def test_recent_sums_stay_small():
    recent = Recent(30.0)
    for step in range(10_000):
        recent.add(step * 0.05, 1)
    assert recent.sum(500.0, 0) == pytest.approx(30 / 0.05, rel=0.05)
    assert len(recent._buckets) <= 32


def test_counts_of_a_worker_go_on_growing_when_it_is_replaced():
    control = ScriptedControl(gauges=Gauges(0, 0, 8, 8, 3, 0, 9, 0, prefix_queries=50, prefix_hits=20))
    metrics = Metrics(control, HandClock())
    metrics.render()
    control.ready = change_ready(READY, pid=2)
    control.gauges = Gauges(0, 0, 8, 8, 4, 0, 9, 0, prefix_queries=10, prefix_hits=5)
    text = metrics.render()
    assert value(text, "num_preemptions_total") == 7
    assert value(text, "prefix_cache_queries_total") == 60
    assert value(text, "prefix_cache_hits_total") == 25
    assert metrics.render() == text


def test_each_replica_has_series_of_its_own():
    gauges = Gauges(2, 1, 6, 8, 4, 0, 9, 0, prefix_queries=10, prefix_hits=5)
    control = ScriptedControl(gauges=gauges)
    control.others = [(change_ready(READY, pid=2), msgspec.structs.replace(gauges, running=3, preemptions=1))]
    metrics = Metrics(control, HandClock())
    for engine in (0, 1, 1):
        metrics.observe_round(msgspec.structs.replace(ROUND, engine=engine))
    text = metrics.render()
    for name, figures in {
        "generation_tokens_total": (3, 6),
        "num_requests_running": (2, 3),
        "num_preemptions_total": (4, 1),
        "prefix_cache_hits_total": (5, 5),
        "acceptance_rate": (0.5, 0.5),
    }.items():
        assert tuple(value(text, name, engine=engine) for engine in "01") == figures, name
    assert metrics.render() == text


async def after(control: ScriptedControl, **fields: Any) -> str:
    """The metrics after one request."""
    app = app_over(control)
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        await client.post("/v1/completions", json=ASK | fields)
        return (await client.get("/metrics")).text


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_ends_well(stream):
    text = await after(ScriptedControl(), stream=stream, max_tokens=9)
    assert value(text, "request_success_total", finished_reason="length") == 1
    assert value(text, "request_prompt_tokens_sum") == 4
    assert value(text, "request_generation_tokens_sum") == 5
    assert value(text, "request_params_max_tokens_sum") == 9
    assert value(text, "request_queue_time_seconds_sum") == pytest.approx(0.001)
    assert value(text, "request_prefill_time_seconds_sum") == pytest.approx(0.002)
    for name in ("time_to_first_token", "inter_token_latency", "request_time_per_output_token", "e2e_request_latency"):
        assert value(text, f"{name}_seconds_count") == 1, name
    assert value(text, "request_decode_time_seconds_count") == 1


async def test_a_stop_string_ends_it_as_stop():
    text = await after(ScriptedControl(steps=[list(b"one EN"), list(b"D two"), list(b"never")], hang_at=2), stop="END")
    assert value(text, "request_success_total", finished_reason="stop") == 1


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_is_refused_is_no_latency(stream):
    full = RequestError("full", status=429, code="queue_full", retry_after_s=1)
    text = await after(ScriptedControl(error=full), stream=stream)
    assert "request_success_total{" not in text
    assert "_seconds_count{" not in text


async def test_a_client_that_leaves_is_an_abort_and_a_failure_behind_the_first_token_an_error():
    control = ScriptedControl(hang_at=1)
    async with serving(app_over(control)) as url, httpx.AsyncClient(base_url=url) as client:
        await leave_hanging(client, "/v1/completions", ASK | {"stream": True}, control)
        await control.until_all_ended()
        control.hang_at, control.error, control.error_at = None, RequestError("lost", status=500), 1
        await client.post("/v1/completions", json=ASK | {"stream": True})
        text = (await client.get("/metrics")).text
    assert value(text, "request_success_total", finished_reason="abort") == 1
    assert value(text, "request_success_total", finished_reason="error") == 1


async def test_nothing_is_named_before_the_model_is_known():
    control = ScriptedControl(ready=None, phase="starting")
    metrics = Metrics(control, HandClock())
    metrics.observe_round(ROUND)
    assert b"model_name" not in metrics.render()
