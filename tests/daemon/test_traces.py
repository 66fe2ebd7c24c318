"""Spans and metrics of a real daemon, at a real receiver of OTLP."""

from __future__ import annotations

import json
import os
import secrets
import signal
import stat
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span, Status

from orchestrator.daemon.tracing import names
from tests.support.daemon import Daemon, configuration, running
from tests.support.otlp_receiver import Receiver, SeenSpan, receiving

PROMPT = "the sea is wide and the sea is deep and the sea is "
HIDDEN = "of-the-receiver-7d1f"


def write_config(directory: Path, receiver: Receiver, *, script: str, replicas: str = "1", more: str = "") -> Path:
    headers = directory / "headers"
    headers.write_text(f"# of the receiver\nX-Receiver-Key: {HIDDEN}\n", encoding="ascii")
    headers.chmod(stat.S_IRUSR | stat.S_IWUSR)
    tracing = f"tracing: {{endpoint: '{receiver.url}', headers_file: headers, service_name: toy-service, {more}}}"
    return configuration(directory, script=script, replicas=replicas, extra=tracing)


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with receiving() as found:
        yield found


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Daemon]:
    directory = tmp_path_factory.mktemp("traced")
    with running(write_config(directory, receiver, script="base_ms=5", more="sample_rounds: 1.0")) as daemon:
        yield daemon


def body(**more: Any) -> dict[str, Any]:
    return {"model": "toy", "prompt": PROMPT * 4, "max_tokens": 40, "temperature": 0, "ignore_eos": True} | more


def ask(daemon: Daemon, *, headers: dict[str, str] | None = None, **more: Any) -> httpx.Response:
    return httpx.post(f"{daemon.url}/v1/completions", json=body(**more), headers=headers, timeout=180)


def new_parent(flags: str = "01") -> tuple[str, str, str]:
    """A client's context: its header, its trace and its span."""
    trace_id, span_id = secrets.token_hex(16), secrets.token_hex(8)
    return f"00-{trace_id}-{span_id}-{flags}", trace_id, span_id


def trace_of(response: httpx.Response) -> str:
    version, trace_id, _, _ = response.headers["traceparent"].split("-")
    assert version == "00"
    assert is_sampled(response)
    return str(trace_id)


def is_sampled(response: httpx.Response) -> bool:
    return bool(int(response.headers["traceparent"][-2:], 16) & 1)


def pick(spans: list[SeenSpan], name: str) -> list[SeenSpan]:
    return [one for one in spans if one.name == name]


def total(spans: list[SeenSpan], attribute: str) -> int:
    return sum(int(str(one.attributes[attribute])) for one in spans)


def test_a_request_is_a_tree_below_its_clients_span(daemon, receiver):
    parent, trace_id, span_id = new_parent()
    response = ask(daemon, headers={"traceparent": parent, "tracestate": "vendor=left"})
    assert trace_of(response) == trace_id
    found = receiver.wait(trace_id)
    (request,) = [one for one in found if one.span.kind == Span.SPAN_KIND_SERVER]
    assert request.span_id == response.headers["traceparent"].split("-")[2]
    assert (request.name, request.parent_id, request.service) == ("text_completion toy", span_id, "toy-service")
    assert {one.span.trace_state for one in found} == {"vendor=left"}

    below = [one for one in found if one.parent_id == request.span_id]
    rounds = pick(below, names.ROUND)
    inside = [one for one in found if one.parent_id in {each.span_id for each in rounds}]
    assert Counter(one.name for one in below if one.name != names.ROUND) == {"queue": 1, "prefill": 1, "decode": 1}
    assert {one.name for one in inside} == {names.DRAFT, names.VERIFY}
    assert len(found) == 1 + len(below) + len(inside)
    assert len(pick(inside, names.VERIFY)) == len(rounds)
    by_id = {one.span_id: one for one in found}
    assert all(by_id[one.parent_id].holds(one) for one in [*inside, *(each for each in below if each not in rounds)])

    about, usage = request.attributes, response.json()["usage"]
    assert about[names.OPERATION] == "text_completion"
    assert about[names.PROVIDER_NAME] == "outrider"
    assert about[names.RESPONSE_ID] == response.json()["id"]
    assert about[names.INPUT_TOKENS] == usage["prompt_tokens"]
    assert about[names.OUTPUT_TOKENS] == usage["completion_tokens"] == 40
    assert about[names.RESPONSE_FINISH] == ("length",)
    assert about[names.STATUS_CODE] == 200
    assert total(rounds, names.COMMITTED) == 40
    assert total(rounds, names.DRAFTED) == about[names.DRAFTED] > 0
    assert total(rounds, names.ACCEPTED) == total(pick(inside, names.VERIFY), names.ACCEPTED) == about[names.ACCEPTED]
    assert "prefill" in {one.attributes[names.PHASE] for one in rounds}
    assert {one.attributes[names.WORKER_PID] for one in rounds} == {daemon.status()["ready"]["pid"]}


def test_every_span_and_attribute_is_documented(daemon, receiver):
    receiver.wait(trace_of(ask(daemon, n=2)))
    spans = {name: set[str]() for name, *_ in names.SPANS}
    for attribute, of, _ in names.ATTRIBUTES:
        for span in of:
            spans[span].add(attribute)
    for seen in receiver.spans:
        name = names.REQUEST if seen.span.kind == Span.SPAN_KIND_SERVER else seen.name
        assert set(seen.attributes) <= spans[name], seen.name


def test_choices_have_their_own_spans(daemon, receiver):
    found = receiver.wait(trace_of(ask(daemon, n=2, temperature=1.0)))
    assert len({one.attributes[names.STREAM] for one in pick(found, names.DECODE)}) == 2
    assert len(pick(found, names.QUEUE)) == 2
    (request,) = pick(found, "text_completion toy")
    assert request.attributes[names.REQUEST_CHOICES] == 2


def test_chat_and_streams(daemon, receiver):
    parent, trace_id, _ = new_parent()
    asked = {"model": "toy", "messages": [{"role": "user", "content": "sea"}], "max_tokens": 8, "stream": True}
    with httpx.stream(
        "POST", f"{daemon.url}/v1/chat/completions", json=asked, headers={"traceparent": parent}, timeout=240
    ) as response:
        assert response.headers["traceparent"].startswith(f"00-{trace_id}-")
        response.read()
    (request,) = pick(receiver.wait(trace_id), "chat toy")
    assert request.attributes[names.REQUEST_STREAM] is True


@pytest.mark.parametrize(
    ("path", "asked"),
    [
        ("/v1/responses", {"input": "sea", "max_output_tokens": 8}),
        ("/v1/messages", {"messages": [{"role": "user", "content": "sea"}], "max_tokens": 8}),
    ],
)
def test_other_apis_are_chats(daemon, receiver, path, asked):
    response = httpx.post(f"{daemon.url}{path}", json={"model": "toy", **asked}, timeout=180)
    assert response.status_code == 200, response.text
    (request,) = pick(receiver.wait(trace_of(response)), "chat toy")
    assert request.attributes[names.OUTPUT_TOKENS] == response.json()["usage"]["output_tokens"]


@pytest.mark.parametrize(
    ("asked", "status", "error"),
    [({"max_tokens": 10**6}, 400, "context_length_exceeded"), ({"model": "nobody"}, 404, "model_not_found")],
)
def test_a_refusal_is_a_span_with_its_status(daemon, receiver, asked, status, error):
    response = ask(daemon, **asked)
    assert (response.status_code, response.json()["error"]["code"]) == (status, error)
    (request,) = receiver.wait(trace_of(response))
    assert request.attributes[names.STATUS_CODE] == status
    assert request.attributes[names.ERROR_TYPE] == str(status)
    assert request.span.status.code == Status.STATUS_CODE_UNSET  # it is the client's mistake


def test_what_the_client_does_not_sample_is_not_sent(daemon, receiver):
    parent, quiet, _ = new_parent("00")
    response = ask(daemon, headers={"traceparent": parent})
    assert response.headers["traceparent"].startswith(f"00-{quiet}-")
    assert not is_sampled(response)
    receiver.wait(trace_of(ask(daemon)))  # behind it
    assert receiver.of(quiet) == []


def test_a_broken_context_begins_a_trace(daemon, receiver):
    response = ask(daemon, headers={"traceparent": "00-nonsense-01", "tracestate": "a" * 600})
    (request,) = pick(receiver.wait(trace_of(response)), "text_completion toy")
    assert request.parent_id == ""


def test_a_client_that_comes_back_is_linked_to_its_first_span(daemon, receiver):
    key = {"Idempotency-Key": secrets.token_hex(8)}
    first, again = ask(daemon, headers=key), ask(daemon, headers=key)
    assert first.json()["id"] == again.json()["id"]
    (one,) = pick(receiver.wait(trace_of(first)), "text_completion toy")
    assert pick(receiver.of(trace_of(first)), names.DECODE)
    (two,) = receiver.wait(trace_of(again))
    assert two.trace_id != one.trace_id
    assert two.links == [one.span_id]
    assert two.attributes[names.RESUMED] is True


def test_a_lost_worker_is_a_span_that_is_linked_to_what_it_had(daemon, receiver):
    before = daemon.status()["ready"]["pid"]
    parent, trace_id, _ = new_parent()
    told = 0
    with httpx.stream(
        "POST",
        f"{daemon.url}/v1/completions",
        json=body(stream=True, max_tokens=200),
        headers={"traceparent": parent},
        timeout=280,
    ) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            told += line.startswith("data: {")
            if told == 5:
                os.kill(before, signal.SIGKILL)
                told += 1
    found = receiver.wait(trace_id)
    first, second = pick(found, names.DECODE)
    (failover,) = pick(found, names.FAILOVER)
    (request,) = pick(found, "text_completion toy")
    assert failover.links == [first.span_id]
    assert failover.parent_id == first.parent_id == second.parent_id == request.span_id
    assert failover.attributes[names.REASON] == "lost"
    assert failover.attributes[names.ATTEMPT] == 2
    assert first.span.end_time_unix_nano <= failover.span.end_time_unix_nano <= second.span.start_time_unix_nano + 10**9
    assert request.attributes[names.OUTPUT_TOKENS] == 200
    assert total([first, second], names.COMMITTED) == 200
    rounds = pick(found, names.ROUND)
    after = daemon.status()["ready"]["pid"]
    assert {one.attributes[names.WORKER_PID] for one in rounds} == {before, after}
    assert {str(one.attributes[names.STREAM])[-2:] for one in rounds if one.attributes[names.WORKER_PID] == after} == {
        "#2"
    }


def test_nothing_of_a_request_is_sent(daemon, receiver):
    canary = f"canary{secrets.token_hex(6)}"
    headers = {
        "Authorization": f"Bearer {canary}",
        "X-Request-Id": canary,
        "User-Agent": canary,
        "Baggage": f"user={canary}",
        "Idempotency-Key": canary,
    }
    response = ask(daemon, headers=headers, prompt=f"{PROMPT} {canary}", user=canary, stop=[canary], logprobs=1)
    receiver.wait(trace_of(response))
    refused = ask(daemon, headers=headers, model=canary)
    receiver.wait(trace_of(refused))
    text = response.json()["choices"][0]["text"]
    for sent in receiver.bodies:
        assert canary.encode() not in sent
        assert text.encode() not in sent
        assert HIDDEN.encode() not in sent
    assert {one.get("x-receiver-key") for one in receiver.headers} == {HIDDEN}
    assert HIDDEN not in daemon.log.read_text()


def test_sampling_a_receiver_that_fails_and_metrics(tmp_path):
    with receiving() as receiver:
        receiver.status = 500
        more = "sample_requests: 0.0, sample_rounds: 0.0"
        with running(write_config(tmp_path, receiver, script="", more=more)) as daemon:
            plain = ask(daemon)
            assert not is_sampled(plain)
            parent, lost, _ = new_parent()
            ask(daemon, headers={"traceparent": parent})
            wait_for_metric(daemon, 'outrider_trace_spans_total{engine="0",model_name="toy",outcome="failed"}')
            receiver.status = 200
            parent, trace_id, _ = new_parent()
            assert ask(daemon, headers={"traceparent": parent}).status_code == 200
            found = receiver.wait(trace_id)
            assert {one.name for one in found} == {"text_completion toy", names.QUEUE, names.PREFILL, names.DECODE}
            assert receiver.of(lost) == []
            wait_for_metric(daemon, 'outrider_trace_spans_total{engine="0",model_name="toy",outcome="exported"}')
            assert daemon.stop() == 0
            log = [json.loads(line) for line in daemon.log.read_text().splitlines() if line.startswith("{")]
        told = [entry["event"] for entry in log if entry.get("kind") == "spans"]  # metrics are told of for themselves
        assert [one.partition(";")[0] for one in told] == [
            "the receiver of OpenTelemetry takes nothing",
            "the receiver of OpenTelemetry takes data again",
        ]
        assert {one.trace_id for one in receiver.spans} == {trace_id}
        counted = {one.name: one for one in receiver.metrics}
        assert set(counted) == {name for name, *_ in names.METRICS}
        for name, _, bounds_s in names.METRICS:
            (point,) = counted[name].histogram.data_points
            assert point.count == 3  # requests without spans count
            assert tuple(point.explicit_bounds) == bounds_s
            assert {one.key for one in point.attributes} <= set(names.METRIC_ATTRIBUTES)


def wait_for_metric(daemon: Daemon, series: str) -> None:
    deadline = time.monotonic() + 240
    while f"{series} " not in (told := httpx.get(f"{daemon.url}/metrics").text) or f"{series} 0.0\n" in told:
        assert time.monotonic() < deadline, told
        time.sleep(0.05)


@pytest.mark.parametrize("wanted", [False, True])
def test_without_tracing_its_libraries_are_not_imported(tmp_path, monkeypatch, wanted):
    monkeypatch.setenv("PYTHONPROFILEIMPORTTIME", "1")  # each import is a line on standard error
    monkeypatch.setenv("FASTAPI_OTEL_AUTO_CONFIGURE", "true")
    with receiving() as receiver:
        monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.url)
        config = write_config(tmp_path, receiver, script="") if wanted else configuration(tmp_path)
        with running(config) as daemon:
            parent, _, _ = new_parent()
            response = ask(daemon, headers={"traceparent": parent})
            assert ("traceparent" in response.headers) is wanted
            imported = {line.rpartition("|")[2].strip() for line in daemon.log.read_text().splitlines()}
        assert ("opentelemetry.sdk.trace" in imported) is wanted
        assert ("opentelemetry.exporter.otlp.proto.http" in imported) is wanted
        assert "orchestrator.daemon.tracing.port" in imported
        assert bool(receiver.bodies) is wanted
