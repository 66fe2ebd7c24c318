"""What servers say of their load, and what of it is others'."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from orchestrator.protocol.rounds import Gauges, ServerLoad
from orchestrator.worker.endpoint.server_load import parse_load
from tests.endpoint.test_engines import working
from tests.support.fake_engines import VLLM, Reply, running_engine, say
from tests.support.waiting import until

VLLM_TEXT = """# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="m"} 5.0
vllm:num_requests_running{engine="1",model_name="m"} 2.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="m"} 3.0
vllm:num_requests_waiting{engine="1",model_name="m"} 0.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="m",reason="capacity"} 3.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="m"} 0.5
vllm:kv_cache_usage_perc{engine="1",model_name="m"} 0.25
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="m"} 9
"""
SGLANG_TEXT = """# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{model_name="m"} 4.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{model_name="m"} 1.0
# TYPE sglang:token_usage gauge
sglang:token_usage{model_name="m"} 0.28
"""
LLAMA_TEXT = """# TYPE llamacpp:requests_processing gauge
llamacpp:requests_processing 2
# TYPE llamacpp:requests_deferred gauge
llamacpp:requests_deferred 0
"""
TGI_TEXT = """# TYPE tgi_batch_current_size gauge
tgi_batch_current_size 3
# TYPE tgi_queue_size gauge
tgi_queue_size 2
"""


@pytest.mark.parametrize(
    ("text", "ours", "load"),
    [
        (VLLM_TEXT, 2, ServerLoad(7, 3, 0.375, 5, 3, 8)),
        (VLLM_TEXT, 20, ServerLoad(7, 3, 0.375, 0, 0, 8)),
        (SGLANG_TEXT, 0, ServerLoad(4, 1, 0.28, 4, 1, 8)),
        (LLAMA_TEXT, 1, ServerLoad(2, 0, -1.0, 1, 0, 8)),
        (TGI_TEXT, 4, ServerLoad(3, 2, -1.0, 0, 1, 8)),
        ("", 0, None),
        ("ovms_requests_success 4\n", 0, None),
        ("vllm:num_requests_running{ 5\n", 0, None),
        ("tgi_batch_current_size NaN\n", 0, None),
        ("tgi_batch_current_size +Inf\n", 0, None),
        ("<html>", 0, None),
    ],
)
def test_what_engines_tell_is_read_and_others_requests_are_those_that_are_not_ours(text, ours, load) -> None:
    assert parse_load(text, ours, 8) == load


def find_loads(events: Sequence[object]) -> list[ServerLoad | None]:
    return [spoken.server for spoken in events if isinstance(spoken, Gauges)]


def test_a_worker_tells_what_its_server_does_for_others_though_it_has_no_request_itself() -> None:
    routes = {**VLLM, "/metrics": lambda _: Reply([VLLM_TEXT])}
    with running_engine(routes) as server, working(f"{server.url}/v1") as worker:
        until(lambda: ServerLoad(7, 3, 0.375, 7, 3) in find_loads(worker.events))
        gauges = next(spoken for spoken in worker.events if isinstance(spoken, Gauges) and spoken.server)
        assert gauges.free_blocks == gauges.total_blocks - -(-gauges.total_blocks * 375 // 1000)
        server.routes["/metrics"] = lambda _: Reply([VLLM_TEXT.replace(" 5.0", " 0.0").replace(" 3.0", " 0.0")])
        until(lambda: ServerLoad(2, 0, 0.375, 2, 0) in find_loads(worker.events))


def test_a_server_without_metrics_serves_and_it_is_said_why_nothing_is_known() -> None:
    with running_engine({**VLLM, "/metrics": say("", 404)}) as server, working(f"{server.url}/v1") as worker:
        until(lambda: any(load and load.untold for load in find_loads(worker.events)))
        assert worker.decode()[1] == "stop"
        (told,) = {load for load in find_loads(worker.events) if load}
        assert told.untold == "its /metrics do not tell what it does for others (HTTP 404)"
