"""The API over several models: which one a request is for, whose room it takes, and what probes say of all."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import httpx
import pytest

from adapters.tokenizer import Tokenizer
from orchestrator.clock import SystemClock
from orchestrator.daemon.api.admin.routes import create_admin_app
from orchestrator.daemon.api.admin.targets import AdminTarget
from orchestrator.daemon.api.app import create_app
from orchestrator.daemon.api.served import ServedTarget
from orchestrator.daemon.control.port import RouteView
from orchestrator.errors import RequestError
from orchestrator.protocol.ready import Ready
from policies.serving.routing import RoutedRequest
from tests.api.support import READY, TOKENIZER, ScriptedControl, api_settings, serving
from tests.support.ready import change_ready

FULL = RequestError("full", status=429, code="queue_full", retry_after_s=3)
ASK = {"prompt": "hello", "max_tokens": 4}


def build_control(name: str, word: bytes = b"lo", **fields: Any) -> ScriptedControl:
    ready = replace_ready(name) if fields.get("phase", "ready") in ("ready", "restarting") else None
    return ScriptedControl(steps=[list(b"hel"), list(word)], ready=ready, **fields)


def replace_ready(name: str) -> Ready:
    return change_ready(READY, model=name, context_tokens=64 if name == "a" else 32)


def find_tokenizer(control: ScriptedControl) -> Tokenizer | None:
    return TOKENIZER if control.ready else None


@asynccontextmanager
async def serve_models(**controls: ScriptedControl) -> AsyncIterator[httpx.AsyncClient]:
    targets = [
        ServedTarget(control, partial(find_tokenizer, control), partial(str, name))
        for name, control in controls.items()
    ]
    app = create_app(targets, api_settings(vllm_metric_names=True), SystemClock())
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        yield client


async def post(client: httpx.AsyncClient, body: Any) -> httpx.Response:
    return await client.post("/v1/completions", json=body)


async def test_a_request_takes_the_room_of_the_model_that_it_names():
    a, b = build_control("a", no_room=FULL), build_control("b", b"p!")
    async with serve_models(a=a, b=b) as client:
        answer = (await post(client, ASK | {"model": "b"})).json()
        assert (answer["model"], answer["choices"][0]["text"]) == ("b", "help!")
        for body in (ASK, ASK | {"model": "a"}, ASK | {"model": None}):
            refused = await post(client, body)
            assert (refused.status_code, refused.headers["Retry-After"]) == (429, "3")
    assert (len(a.submits), len(b.submits)) == (0, 1)


async def test_where_no_model_has_room_a_request_is_refused_before_its_body():
    async with serve_models(a=build_control("a", no_room=FULL), b=build_control("b", no_room=FULL)) as client:
        refused = await client.post("/v1/completions", content=b"this is no JSON")
        assert refused.status_code == 429


@pytest.mark.parametrize(
    ("raw", "status", "param"),
    [
        (b"{", 400, None),
        (b'{"model": 5, "prompt": "x"}', 400, "model"),
        (b'{"model": "c", "prompt": 5}', 404, "model"),
        (b'{"prompt": "x", "model": ""}', 404, "model"),
        (b'{"model": "a", "prompt": "x", "model": "c"}', 404, "model"),
        (b"[" * 50_000, 400, None),
    ],
)
async def test_a_body_that_names_no_model_well_is_refused_as_one_model_would(raw, status, param):
    async with serve_models(a=build_control("a"), b=build_control("b")) as client:
        answer = await client.post("/v1/completions", content=raw)
        assert answer.status_code == status
        assert answer.json()["error"]["param"] == param
        if status == 404:
            assert "there are 'a' and 'b'" in answer.json()["error"]["message"]


async def test_each_model_has_its_own_context():
    async with serve_models(a=build_control("a"), b=build_control("b")) as client:
        prompt = "x" * 40
        assert (await post(client, {"model": "a", "prompt": prompt, "max_tokens": 1})).status_code == 200
        assert (await post(client, {"model": "b", "prompt": prompt, "max_tokens": 1})).status_code == 400
        found = {name: (await client.post("/tokenize", json={"model": name, "prompt": "x"})).json() for name in "ab"}
        assert [found[name]["max_model_len"] for name in "ab"] == [64, 32]


# (phases, statuses of /started, /ready, /health)
PROBES = [
    (("ready", "ready"), (200, 200, 200)),
    (("ready", "starting"), (503, 503, 200)),
    (("ready", "restarting"), (200, 200, 200)),
    (("ready", "failed"), (200, 200, 200)),
    (("failed", "ready"), (200, 200, 200)),
    (("failed", "starting"), (503, 503, 200)),
    (("restarting", "restarting"), (200, 503, 200)),
    (("failed", "failed"), (503, 503, 503)),
]


@pytest.mark.parametrize(("phases", "statuses"), PROBES)
async def test_probes_are_about_the_daemon_and_about_one_where_it_is_named(phases, statuses):
    controls = {name: build_control(name, phase=phase) for name, phase in zip("ab", phases, strict=True)}
    async with serve_models(**controls) as client:
        found = [(await client.get(path)).status_code for path in ("/started", "/ready", "/health")]
        assert tuple(found) == statuses
        for name, phase in zip("ab", phases, strict=True):
            answer = await client.get("/ready", params={"model": name})
            assert answer.status_code == (200 if phase == "ready" else 503)
        assert (await client.get("/ready", params={"model": "c"})).status_code == 404
        assert (await client.get("/live")).status_code == 200
        if statuses[2] == 200:
            health = (await client.get("/health")).json()
            assert health["models"] == dict(zip("ab", phases, strict=True))
            assert all(
                f"{name} is {phase}" in health["detail"] for name, phase in health["models"].items() if phase != "ready"
            )


async def test_metrics_have_each_family_once_under_both_names():
    async with serve_models(a=build_control("a"), b=build_control("b")) as client:
        for name in "ab":
            await post(client, ASK | {"model": name})
        for _ in range(2):
            text = (await client.get("/metrics")).text
            for name in "ab":
                assert (
                    f'outrider_request_success_total{{engine="0",finished_reason="length",model_name="{name}"}} 1.0'
                    in text
                )
                assert (
                    f'vllm:request_success_total{{engine="0",finished_reason="length",model_name="{name}"}} 1.0' in text
                )
        kinds = [line for line in text.splitlines() if line.startswith("# TYPE")]
        assert len(kinds) == len(set(kinds))


@asynccontextmanager
async def serve_admin(**controls: ScriptedControl) -> AsyncIterator[httpx.AsyncClient]:
    targets = [AdminTarget(control, partial(str, name)) for name, control in controls.items()]
    app = create_admin_app(targets, "http://127.0.0.1:8000/v1", "1")
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://admin") as client:
        yield client


async def test_what_is_asked_of_all_reaches_all_and_what_is_asked_of_one_that_one():
    a, b = build_control("a"), build_control("b")
    body = {"speculative_config": None, "asked_by": "me"}
    async with serve_admin(a=a, b=b) as client:
        told = (await client.post("/admin/speculation", json=body)).json()
        assert (told["model"], told["models"][0]["model"]) == ("a", "b")
        assert (len(a.overridden), len(b.overridden)) == (1, 1)
        assert (await client.post("/admin/speculation", json=body | {"model": "b"})).status_code == 200
        assert (len(a.overridden), len(b.overridden)) == (1, 2)
        ambiguous = await client.post("/admin/speculation", json=body | {"engine": 0})
        assert (ambiguous.status_code, ambiguous.json()["error"]["param"]) == (400, "model")
        assert (await client.post("/admin/speculation", json=body | {"engine": 0, "model": "a"})).status_code == 200
        assert (await client.post("/admin/speculation", json=body | {"model": "c"})).status_code == 404
        hold = {"kind": "device", "name": "here/CPU", "state": "cordoned"}
        assert (await client.post("/admin/hold", json=hold)).status_code == 200
        assert (len(a.held), len(b.held)) == (1, 1)
        worker = hold | {"kind": "worker", "name": "target"}
        assert (await client.post("/admin/hold", json=worker)).status_code == 400
        assert (await client.post("/admin/hold", json=worker | {"model": "b"})).status_code == 200
        assert (len(a.held), len(b.held)) == (1, 2)


class Ignorant(ScriptedControl):
    """A control that knows nothing of the request."""

    def explain(self, request_id: str) -> list[RouteView]:
        raise RequestError("nothing is known", status=404, code="request_not_found")


async def test_a_request_is_explained_by_whoever_knows_it():
    route = RouteView("x", 1, 0.0, "target", "", "alone", RoutedRequest(1, 1), ())
    async with serve_admin(a=Ignorant(), b=ScriptedControl(routes=[route])) as client:
        told = (await client.get("/admin/explain/x")).json()
        assert (told["model"], len(told["routes"])) == ("b", 1)
    async with serve_admin(a=Ignorant(), b=Ignorant()) as client:
        assert (await client.get("/admin/explain/x")).status_code == 404


async def test_the_status_of_one_model_is_as_ever():
    async with serve_admin(a=build_control("a")) as client:
        told = (await client.get("/admin/status")).json()
        assert (told["model"], told["models"]) == ("a", [])
        json.dumps(told)
