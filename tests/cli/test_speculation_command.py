"""Who may say how deep to speculate: requests, sessions and engines, within the operator's bounds, in a real daemon."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import pytest

from orchestrator.cli.daemon_socket import query_daemon
from tests.support.daemon import Daemon, configuration, running

BOUNDS = "speculation: {num_speculative_tokens: 6, min_speculative_tokens: 2}"
ASK: dict[str, Any] = {"model": "toy", "prompt": "the sea is the sea is", "max_tokens": 40, "temperature": 0.0}

Outrider = Callable[..., tuple[int, str, str]]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with running(configuration(tmp_path_factory.mktemp("overrides"), replicas="2", extra=BOUNDS)) as daemon:
        until_all_serve(daemon)
        yield daemon


@pytest.fixture
def daemon(served: Daemon) -> Daemon:
    """The daemon, with no override standing."""
    query_daemon(served.admin, "/admin/speculation", {"speculative_config": None, "asked_by": "test"})
    return served


def until_all_serve(daemon: Daemon) -> None:
    deadline = time.monotonic() + 120.0
    while not all(one["phase"] == "ready" for one in daemon.status()["replicas"]):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def ask_daemon(daemon: Daemon, config: dict[str, Any] | None = None, **more: Any) -> tuple[Any, Any, Any]:
    """What held for a request (but for its method), how many tokens were drafted, and the header."""
    extra = {} if config is None else {"speculative_config": config}
    raw = daemon.client.completions.with_raw_response.create(**ASK, extra_body=extra, **more)
    figures = raw.parse().model_extra["metrics"]["speculative_decoding"]
    found = figures["effective"]
    assert (found["method"] == "off") == (0 in (found["num_speculative_tokens"], found["max_speculative_tokens"]))
    held = tuple(found[name] for name in ("num_speculative_tokens", "max_speculative_tokens", "by", "cut"))
    return held, figures["num_draft_tokens"], raw.headers["X-Outrider-Speculation"]


@pytest.mark.parametrize(
    ("config", "held", "header"),
    [
        (None, (None, 6, "default", False), "max_speculative_tokens=6; by=default"),
        ({"method": "auto"}, (None, 6, "request", False), "max_speculative_tokens=6; by=request"),
        ({"method": "off"}, (0, None, "request", False), "off; by=request"),
        ({"num_speculative_tokens": 4}, (4, None, "request", False), "num_speculative_tokens=4; by=request"),
        ({"num_speculative_tokens": 64}, (6, None, "request", True), "num_speculative_tokens=6; by=request; cut"),
        ({"num_speculative_tokens": 1}, (2, None, "request", True), "num_speculative_tokens=2; by=request; cut"),
        ({"max_speculative_tokens": 3}, (None, 3, "request", False), "max_speculative_tokens=3; by=request"),
        ({"max_speculative_tokens": 9}, (None, 6, "request", True), "max_speculative_tokens=6; by=request; cut"),
    ],
    ids=str,
)
def test_a_request_wins_within_the_operators_bounds_and_is_told(daemon, config, held, header):
    query_daemon(daemon.admin, "/admin/speculation", demand({"num_speculative_tokens": 5}, user="ada"))
    found, drafted, told = ask_daemon(daemon, config, user="ada" if config else "eve")
    assert (found, told) == (held, header)
    assert (drafted > 0) == (held[0] != 0) or held[0] is None  # what is bounded is the policy's choice


def demand(config: dict[str, Any] | None, **scope: Any) -> dict[str, Any]:
    return {"speculative_config": config, "asked_by": "ops", **scope}


def test_a_stream_is_told_too(daemon):
    stream = daemon.client.completions.create(
        **ASK,
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"speculative_config": {"num_speculative_tokens": 9}},
    )
    assert stream.response.headers["X-Outrider-Speculation"] == "num_speculative_tokens=6; by=request; cut"
    last = list(stream)[-1].model_extra["metrics"]["speculative_decoding"]
    assert last["effective"]["num_speculative_tokens"] == 6
    assert last["num_draft_tokens"] > 0


def test_a_sessions_wish_is_its_own_and_outlives_the_workers(daemon, outrider):
    code, shown, _ = outrider("speculation", "off", "--user", "ada", "--socket", daemon.admin)
    assert (code, "override for session ada: no draft tokens; asked by " in shown) == (0, True)
    ready = [one["ready"]["pid"] for one in daemon.status()["replicas"]]
    for pid in ready:
        os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 120.0
    while {one["ready"]["pid"] for one in daemon.status()["replicas"]} & set(ready):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    until_all_serve(daemon)
    assert ask_daemon(daemon, user="ada") == ((0, None, "session", False), 0, "off; by=session")
    assert ask_daemon(daemon, user="eve")[0] == (None, 6, "default", False)
    assert ask_daemon(daemon)[0] == (None, 6, "default", False)
    assert ask_daemon(daemon, {"method": "auto"}, user="ada")[0] == (None, 6, "request", False)
    found, drafted, _ = ask_daemon(daemon, {"num_speculative_tokens": 3}, user="ada")
    assert found == (3, None, "request", False)
    assert drafted > 0
    assert outrider("speculation", "reset", "--user", "ada", "--socket", daemon.admin)[0] == 0
    lines = [json.loads(line) for line in daemon.log.read_text().splitlines() if "speculation override" in line]
    assert [line["override"] for line in lines if line.get("session") == "ada"][-2:] == ["off", "taken back"]
    assert ask_daemon(daemon, user="ada")[0] == (None, 6, "default", False)


def test_an_engines_wish_holds_where_nobody_nearer_says_anything(daemon, outrider):
    at = ("--socket", daemon.admin)
    outrider("speculation", "at-most", 9, "--engine", 0, *at)
    outrider("speculation", "depth", 3, "--engine", 1, *at)
    # A lone request goes to the replica that seems faster: mostly the first.
    before = [one["totals"]["generated"] for one in daemon.status()["replicas"]]
    told = ask_daemon(daemon)[0]
    after = [one["totals"]["generated"] for one in daemon.status()["replicas"]]
    by_engine = [(None, 6, "engine", True), (3, None, "engine", False)]
    assert told == next(override for override, b, a in zip(by_engine, before, after, strict=True) if a > b)
    outrider("speculation", "auto", "--user", "ada", *at)
    assert ask_daemon(daemon, user="ada")[0] == (None, 6, "session", False)
    code, shown, _ = outrider("speculation", "status", *at)
    assert code == 0
    overrides = [line.partition(";")[0] for line in shown.splitlines()]
    assert overrides == [
        "speculation: requests may ask for 2 to 6 draft tokens, or none",
        "override for replica 0: up to 9 draft tokens",
        "override for replica 1: up to 3 draft tokens in every round",
        "override for session ada: as many draft tokens as pay",
    ]
    assert "override for replica 0" in outrider("status", *at)[1]
    outrider("speculation", "off", *at)
    assert [one["override"] for one in daemon.status()["speculation"]["engines"]] == ["off", "off"]
    assert ask_daemon(daemon)[0] == (0, None, "engine", False)
    outrider("speculation", "reset", *at)
    assert daemon.status()["speculation"] == {
        "bounds": {"enabled": True, "most": 6, "least": 2, "fixed": False},
        "canary_bounds": None,
        "engines": [],
        "sessions": [],
    }


def test_a_request_keeps_what_stood_when_it_started(daemon):
    with daemon.client.completions.create(**ASK | {"max_tokens": 200}, stream=True, user="ada") as stream:
        next(iter(stream))
        query_daemon(daemon.admin, "/admin/speculation", demand({"method": "off"}, user="ada"))
        assert stream.response.headers["X-Outrider-Speculation"] == "max_speculative_tokens=6; by=default"
    assert ask_daemon(daemon, user="ada")[0] == (0, None, "session", False)


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (("off", "--engine", "2"), "there is no engine 2; there are 0 to 1"),
        (("off", "--engine", "1", "--user", "ada"), "for a 'user' or for an 'engine', not for both"),
        (("off", "--user", "x" * 513), "'user': string should have at most 512 characters"),
    ],
)
def test_a_wish_that_cannot_be_is_refused_in_one_line(daemon, outrider, arguments, says):
    code, shown, error = outrider("speculation", *arguments, "--socket", daemon.admin)
    assert (code, shown) == (1, "")
    assert says in error
    assert len(error.splitlines()) == 1


def test_the_admin_route_names_what_is_wrong(daemon):
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(daemon.admin))) as client:
        for config, param in (
            ({"acceptance": "rejection"}, "speculative_config.acceptance"),
            ({"num_speculative_tokens": 65}, "speculative_config.num_speculative_tokens"),
            ({"depth": 3}, "speculative_config.depth"),
        ):
            refused = client.post("http://outrider/admin/speculation", json=demand(config))
            assert refused.status_code == 400
            assert refused.json()["error"]["param"] == param
