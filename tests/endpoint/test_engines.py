"""What a worker makes of other engines' frames, refusals and losses, over real sockets."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from orchestrator.clock import SystemClock
from orchestrator.protocol.commands import Stop, Submit
from orchestrator.protocol.events import Event, Failed, Progress
from orchestrator.protocol.load_options import EndpointOptions, ModelOptions
from orchestrator.protocol.ready import Ready
from orchestrator.protocol.rounds import Refused, RoundReport
from orchestrator.worker.endpoint.engine import EndpointEngine
from tests.support.fake_engines import (
    ANSWER,
    END,
    GATEWAY,
    OLLAMA,
    OVMS,
    SGLANG,
    TGI,
    TRTLLM,
    VLLM,
    FakeEngine,
    Reply,
    complete_with_ids,
    event,
    running_engine,
    say,
)
from tests.support.waiting import until

PROMPT = list(b"the sea")
WAITS_S = 60.0
MODEL = ModelOptions(
    *("simulated:toy", "/", "/nowhere", "toy", "simulated", "SIM", "kernel", "auto", "auto", "auto"),
    threads=1,
    kv_cache_bytes=1 << 20,
    max_batch_rows=64,
)


class Worker:
    """An endpoint's engine in a thread, and all that it says."""

    def __init__(self, url: str, *, key_file: str = "", name: str = "", engine: str = "auto") -> None:
        options = EndpointOptions(MODEL, url, name, engine, key_file, "kernel", max_running=2)
        self.engine = EndpointEngine(options, SystemClock())
        self.events: list[Event] = []
        self.thread = threading.Thread(target=self.engine.run, args=(self.events.append,))

    def wait_for(self, kind: type[Any]) -> Any:
        until(lambda: any(isinstance(spoken, kind) for spoken in self.events), WAITS_S)
        return next(spoken for spoken in self.events if isinstance(spoken, kind))

    def decode(self, **changes: Any) -> tuple[list[int], str]:
        """Send a request; returns its tokens and why it ended, once it has."""
        submit = Submit("r", **{"prompt": PROMPT, "max_tokens": 20, "stop_tokens": [END], **changes})
        self.engine.submit(submit)
        until(lambda: self.find_ends() or any(isinstance(spoken, Refused) for spoken in self.events), WAITS_S)
        tokens = [token for delta in self.list_deltas() for token in delta.tokens]
        return tokens, "".join(self.find_ends())

    def list_deltas(self) -> list[Any]:
        return [delta for spoken in list(self.events) if isinstance(spoken, RoundReport) for delta in spoken.deltas]

    def find_ends(self) -> list[str]:
        return [delta.finish for delta in self.list_deltas() if delta.finish]


@contextmanager
def working(url: str, **options: Any) -> Iterator[Worker]:
    worker = Worker(url, **options)
    worker.thread.start()
    try:
        yield worker
    finally:
        worker.engine.submit(Stop())
        worker.thread.join(WAITS_S)
        assert not worker.thread.is_alive()


@contextmanager
def serving(
    routes: dict[str, Callable[[dict[str, Any]], Reply]], **options: Any
) -> Iterator[tuple[FakeEngine, Worker]]:
    """A server and a worker that is ready."""
    with running_engine(routes) as server, working(f"{server.url}/v1", **options) as worker:
        worker.wait_for(Ready)
        yield server, worker


@pytest.mark.parametrize(
    ("routes", "title", "context"),
    [(VLLM, "vLLM 0.33.0", 512), (SGLANG, "SGLang 0.5.23", 512), (TRTLLM, "trtllm-serve 1.3.0", 4096)],
    ids=["vllm", "sglang", "trtllm"],
)
def test_an_engine_with_ids_gets_ours_and_its_own_are_told(routes: Any, title: str, context: int) -> None:
    with serving(routes) as (server, worker):
        ready = worker.wait_for(Ready)
        assert (ready.device.full_name, ready.model.context_tokens, ready.slots) == (title, context, 2)
        assert worker.decode() == ([*ANSWER, END], "stop")
        assert server.list_prompts("/v1/completions") == [PROMPT]
        assert server.requests[-1].body["max_tokens"] == 20


def test_a_request_that_has_tokens_goes_on_behind_them() -> None:
    with serving(VLLM) as (server, worker):
        assert worker.decode(committed=ANSWER[:2], max_tokens=4) == (ANSWER[2:4], "length")
        assert server.list_prompts("/v1/completions") == [[*PROMPT, *ANSWER[:2]]]
        assert server.requests[-1].body["max_tokens"] == 2


@pytest.mark.parametrize(
    ("routes", "title", "path", "api"),
    [
        (OLLAMA, "Ollama 0.33.0", "/api/generate", "/v1"),
        (OVMS, "OpenVINO Model Server 2026.4.0", "/v3/completions", ""),
        (TGI, "TGI 3.3.6", "/v1/completions", "/v1"),
        (GATEWAY, "an engine that is not known", "/v1/completions", "/v1"),
    ],
    ids=["ollama", "ovms", "tgi", "gateway"],
)
def test_an_engine_of_text_gets_text_and_its_answer_becomes_ids(routes: Any, title: str, path: str, api: str) -> None:
    with running_engine(routes) as server, working(server.url + api) as worker:
        ready = worker.wait_for(Ready)
        assert ready.device.full_name == title
        assert "prompts go there as text" in ready.precision.reason
        assert worker.decode() == (ANSWER, "stop")
        assert server.list_prompts(path) == ["the sea"]


@pytest.mark.parametrize(
    "lose",
    [
        lambda whole: Reply(whole[:2], breaks=True),
        lambda whole: Reply(whole[:2]),
        lambda whole: Reply([*whole[:2], event({"error": {"message": "engine died", "code": 500}})]),
        lambda whole: Reply([*whole[:2], event({"choices": [{"text": "", "finish_reason": "abort"}]})]),
    ],
    ids=["reset", "end without a finish", "error event", "abort"],
)
def test_a_lost_answer_goes_on_where_it_was_at_a_server_that_works(lose: Callable[[Any], Reply]) -> None:
    def lose_first(body: dict[str, Any]) -> Reply:
        server.routes["/v1/completions"] = complete_with_ids
        return lose(complete_with_ids(body).parts)

    with serving(VLLM) as (server, worker):
        server.routes["/v1/completions"] = lose_first
        assert worker.decode() == ([*ANSWER, END], "stop")
        assert server.list_prompts("/v1/completions") == [PROMPT, [*PROMPT, *ANSWER[:2]]]


def test_a_busy_server_is_asked_again() -> None:
    def refuse_first(body: dict[str, Any]) -> Reply:
        server.routes["/v1/completions"] = complete_with_ids
        return Reply([json.dumps({"error": {"message": "The engine is currently busy", "code": 503}})], 503)

    with serving(VLLM) as (server, worker):
        server.routes["/v1/completions"] = refuse_first
        assert worker.decode() == ([*ANSWER, END], "stop")


def test_a_server_that_does_not_work_any_more_ends_the_worker_so_that_others_go_on() -> None:
    with serving(VLLM) as (server, worker):
        server.routes["/health"] = say("", 503)
        server.routes["/v1/completions"] = lambda body: Reply(complete_with_ids(body).parts[:1], breaks=True)
        worker.engine.submit(Submit("r", PROMPT, 20, stop_tokens=[END]))
        failed = worker.wait_for(Failed)
        assert (failed.restartable, failed.kind) == (True, "endpoint")
        assert [token for delta in worker.list_deltas() for token in delta.tokens] == ANSWER[:1]


@pytest.mark.parametrize(
    ("status", "message", "kind"),
    [
        (400, "This model's maximum context length is 512 tokens. However, your prompt contains 600", "too_long"),
        (400, "top_k must be at least -1", "invalid"),
        (500, "The server had an error while processing your request.", "elsewhere"),
    ],
)
def test_a_refusal_is_told_as_what_it_is(status: int, message: str, kind: str) -> None:
    with serving(VLLM) as (server, worker):
        server.routes["/v1/completions"] = say({"error": {"message": message, "code": status}}, status)
        worker.decode()
        refused = worker.wait_for(Refused)
        assert (refused.request_id, refused.kind) == ("r", kind)
        assert message in refused.message


def test_a_server_that_loads_or_is_not_there_is_waited_for() -> None:
    loading = say({"error": {"message": "Loading model", "type": "unavailable_error", "code": 503}}, 503)
    with running_engine({**VLLM, "/v1/models": loading}) as server, working(f"{server.url}/v1") as worker:
        until(lambda: any(isinstance(spoken, Progress) and "Loading model" in spoken.stage for spoken in worker.events))
        server.routes["/v1/models"] = VLLM["/v1/models"]
        worker.wait_for(Ready)
        assert not any(isinstance(spoken, Failed) for spoken in worker.events)
    with working(server.url) as worker:
        until(lambda: any(isinstance(spoken, Progress) and "waits for" in spoken.stage for spoken in worker.events))


def test_the_key_is_sent_and_never_told(tmp_path: Path) -> None:
    key = "plainsecret"
    file = tmp_path / "key"
    file.write_text(f"{key}\n")
    with serving(VLLM, key_file=str(file)) as (server, worker):
        assert worker.decode()[1] == "stop"
        assert {request.authorization for request in server.requests} == {f"Bearer {key}"}
        server.routes["/v1/completions"] = say({"error": f"no such key: {key}"}, 401)
        worker.engine.submit(Submit("s", PROMPT, 20, stop_tokens=[END]))
        failed = worker.wait_for(Failed)
        assert (failed.restartable, failed.kind) == (False, "configuration")
        assert str(file) in failed.message
        assert key not in repr(worker.events)


def test_a_model_that_is_loaded_late_is_the_same_and_tells_its_context_then() -> None:
    loaded = OLLAMA["/api/ps"]

    def load(body: dict[str, Any]) -> Reply:
        server.routes["/api/ps"] = loaded
        return OLLAMA["/api/generate"](body)

    routes = {**OLLAMA, "/api/ps": say({"models": []}), "/api/generate": load}
    with running_engine(routes) as server, working(server.url) as worker:
        assert worker.wait_for(Ready).model.context_tokens == 512


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"/tokenize": say({"tokens": [1, 2, 3]})}, "its vocabulary is another one"),
        ({"/v1/models": say({"object": "list", "data": [{"id": "a"}, {"id": "b"}]})}, "'a', 'b'"),
        (
            {"/v1/completions": say(event({"choices": [], "usage": {"prompt_tokens": 90}}))},
            "puts a template or other tokens around",
        ),
        ({"/v1/models": say("<html>", 404)}, "no OpenAI-compatible server is there"),
    ],
    ids=["vocabulary", "several models", "template", "no API"],
)
def test_a_server_that_can_never_serve_the_target_is_refused_with_the_way_out(changes: Any, words: str) -> None:
    with running_engine({**VLLM, **changes}) as server, working(f"{server.url}/v1") as worker:
        failed = worker.wait_for(Failed)
        assert (failed.restartable, failed.kind) == (False, "configuration")
        assert words in failed.message
