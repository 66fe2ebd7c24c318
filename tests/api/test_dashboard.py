"""The dashboard's routes: what they tell, who may see it, and what looking costs."""

from __future__ import annotations

import asyncio
import hashlib
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest
from structlog.testing import capture_logs

from device_profiles.device_load import DeviceLoad
from orchestrator.clock import SystemClock
from orchestrator.config.keys_file import digest_of
from orchestrator.daemon.api.admin.targets import AdminTarget
from orchestrator.daemon.api.dashboard import viewers
from orchestrator.daemon.api.dashboard.cluster_map import build_map
from orchestrator.daemon.api.dashboard.failovers import FailoverTimeline
from orchestrator.daemon.api.dashboard.routes import Dashboard, install_dashboard
from orchestrator.daemon.api.dashboard.static_files import HEADERS, read_static_files
from orchestrator.daemon.api.dashboard.viewers import Viewers
from orchestrator.daemon.api.follow import LifeMark, RequestLives
from orchestrator.daemon.api.keys import Keys
from orchestrator.daemon.control.port import DeviceView, DraftView, ReplicaView, StateView, Totals
from tests.api.support import READY, HandClock, ScriptedControl, app_over, serving
from tests.api.test_keys import ASK, key_file
from tests.support.ready import change_ready
from tests.support.waiting import until_async

ROOT = Path(__file__).parents[2]
DEPENDENCIES = ROOT / "docs" / "dependencies.md"
VENDOR = ROOT / "orchestrator/daemon/api/dashboard/static/vendor"
KEYS = "".join(
    json.dumps({"name": name, "hash": f"v1:{digest_of(key).hex()}", "scopes": [scope]}) + "\n"
    for name, key, scope in (("one", "alpha-1", "inference"), ("two", "beta-2", "metrics"))
)


@asynccontextmanager
async def dashboard_over(
    control: ScriptedControl, *, keys: Keys | None = None, most_viewers: int = 4, **target: Any
) -> AsyncIterator[tuple[httpx.AsyncClient, Dashboard]]:
    """Serve the public app with its dashboard; gives a client and the dashboard."""
    app = app_over(control, keys=keys)
    models = list(app.state.models)
    targets = [AdminTarget(control, lambda: "toy", **target)]
    dashboard = install_dashboard(
        app, targets, models, app.state.lives, SystemClock(), keys=keys is not None, most_viewers=most_viewers
    )
    async with serving(app) as url, httpx.AsyncClient(base_url=url, timeout=180.0) as client, dashboard.follow():
        yield client, dashboard


async def read_events(response: httpx.Response, count: int) -> list[tuple[str, dict[str, Any]]]:
    found, kind = [], ""
    async for line in response.aiter_lines():
        if line.startswith("event: "):
            kind = line.removeprefix("event: ")
        if line.startswith("data: "):
            found.append((kind, json.loads(line.removeprefix("data: "))))
            if len(found) == count:
                break
    return found


async def test_a_snapshot_that_fails_is_logged_once_and_the_next_ones_come(monkeypatch):
    monkeypatch.setattr(viewers, "EVERY_S", 0.01)
    turns: list[int] = []

    def describe() -> dict[str, Any]:
        turns.append(len(turns))
        if turns[-1] in (1, 2):
            raise RuntimeError("broken")
        return {"turn": turns[-1]}

    watched = Viewers(describe, SystemClock())
    with capture_logs() as told, watched.hold_place():
        events = watched.tell()
        assert b'"turn":0' in await anext(events)
        async with asyncio.timeout(60):
            assert b'"turn":3' in await anext(events)
        await events.aclose()
        await watched.close()
    (line,) = told
    assert line["event"] == "the dashboard's snapshot failed; it goes on"
    assert "in describe" in line["exception"]


async def test_the_page_comes_from_the_daemon_alone_and_is_not_sent_twice():
    async with dashboard_over(ScriptedControl()) as (client, _):
        page = await client.get("/dashboard")
        assert page.headers["Content-Security-Policy"].startswith("default-src 'self';")
        assert 'data-keys="no"' in page.text
        wanted = re.findall(r'(?:src|href)="(dashboard/static/[^"]+)"', page.text)
        assert "dashboard/static/main.js" in wanted
        for path in wanted:
            answer = await client.get(f"/{path}")
            assert answer.status_code == 200
            assert answer.headers["X-Content-Type-Options"] == "nosniff"
        again = await client.get("/dashboard", headers={"If-None-Match": page.headers["ETag"]})
        assert (again.status_code, again.content) == (304, b"")
        plain = await client.get("/dashboard", headers={"Accept-Encoding": "identity"})
        assert plain.text == page.text
        for missing in ("nothing.js", "../routes.py", "..%2froutes.py"):
            assert (await client.get(f"/dashboard/static/{missing}")).status_code == 404
        assert "unsafe" not in HEADERS["Content-Security-Policy"]


def test_no_file_of_the_page_asks_anybody_else():
    for name, file in read_static_files(keys=False).items():
        found = re.findall(rb"""(?:src|href|from|import|fetch|url)\s*[=(]?\s*["'(](?:https?:)?//[^"')]+""", file.whole)
        assert not found, name
        assert b"innerHTML" not in file.whole or name.startswith("vendor/")


def test_what_is_checked_in_is_what_the_list_of_dependencies_says():
    listed = dict(re.findall(r"static/(vendor/[^`]+)` \|.*`([0-9a-f]{64})`", DEPENDENCIES.read_text(encoding="utf-8")))
    there = {f"vendor/{one.name}": hashlib.sha256(one.read_bytes()).hexdigest() for one in VENDOR.iterdir()}
    assert there == listed


async def test_the_state_comes_whole_and_then_what_changed_and_nothing_is_made_while_nobody_looks(monkeypatch):
    monkeypatch.setattr(viewers, "EVERY_S", 0.02)
    control = ScriptedControl(devices=(DeviceView("here/CPU", DeviceLoad(0.5, 0.1), "", 0.1),))
    async with dashboard_over(control) as (client, dashboard):
        asked = {"prompt": "a secret of mine", "max_tokens": 5}
        answer = await client.post("/v1/completions", json=ASK | asked)
        assert dashboard.viewers.snapshots == 0
        async with client.stream("GET", "/dashboard/events") as response:
            assert response.headers["Content-Type"].startswith("text/event-stream")
            ((kind, first),) = await read_events(response, 1)
            assert kind == "state"
            assert first["parts"]["about"]["models"] == ["toy"]
            assert first["parts"]["model/0/map"]["devices"][0]["utilisation"] == 0.5
            (worker,) = first["parts"]["model/0/map"]["workers"]
            assert (worker["role"], worker["device"]) == ("target", "here/CPU")
            (request,) = first["parts"]["requests"]
            assert (request["id"], request["tokens"], request["status"]) == (answer.json()["id"], 5, 200)
        async with client.stream("GET", "/dashboard/events") as response:
            stream = response.aiter_lines()
            text = ""
            control.devices = (DeviceView("here/CPU", DeviceLoad(0.7, 0.1), "", 0.1),)
            async for line in stream:
                text += line
                if '"utilisation":0.7' in line:
                    break
            assert "secret" not in text
            assert "hello" not in text
        await until_async(lambda: len(dashboard.viewers) == 0)
        made = dashboard.viewers.snapshots
        await asyncio.sleep(0.1)  # many times as long as until the next one, if one were made
        assert dashboard.viewers.snapshots == made


async def test_a_change_holds_only_what_changed_and_one_snapshot_serves_all(monkeypatch):
    monkeypatch.setattr(viewers, "EVERY_S", 0.02)
    control = ScriptedControl()
    page, events = dashboard_over(control), "/dashboard/events"
    async with page as (client, _), client.stream("GET", events) as one, client.stream("GET", events) as other:
        (mine, theirs) = await read_events(one, 30), await read_events(other, 30)
    changes = [event for kind, event in mine if kind == "change"]
    assert mine[0][0] == theirs[0][0] == "state"
    assert changes
    assert all("about" not in event["parts"] for event in changes)
    numbers = [{event["number"] for _, event in told} for told in (mine, theirs)]
    assert numbers[0] & numbers[1], "both were told of the same snapshots"


async def test_there_are_only_so_many_viewers_and_those_who_left_make_room():
    async with dashboard_over(ScriptedControl(), most_viewers=2) as (client, dashboard):
        async with client.stream("GET", "/dashboard/events") as one, client.stream("GET", "/dashboard/events") as other:
            await asyncio.gather(read_events(one, 1), read_events(other, 1))
            refused = await client.get("/dashboard/events")
            assert refused.status_code == 429
            assert refused.json()["error"]["code"] == "too_many_viewers"
            assert refused.headers["Retry-After"] == "5"
        await until_async(lambda: len(dashboard.viewers) == 0)
        async with client.stream("GET", "/dashboard/events") as again:
            assert again.status_code == 200


async def test_a_reader_that_does_not_read_is_dropped_and_holds_up_nobody(monkeypatch):
    monkeypatch.setattr(viewers, "EVERY_S", 0.05)
    monkeypatch.setattr(viewers, "SLOW_READER_S", 0.2)
    many = tuple(DeviceView(f"node/{number}", DeviceLoad(0.5, 0.1), "x" * 20_000, 0.1) for number in range(200))
    control = ScriptedControl(devices=many)
    async with dashboard_over(control) as (client, dashboard):
        host, port = client.base_url.host, client.base_url.port
        _, writer = await asyncio.open_connection(host, port, limit=1024)
        writer.write(f"GET /dashboard/events HTTP/1.1\r\nHost: {host}:{port}\r\n\r\n".encode())
        await until_async(lambda: len(dashboard.viewers) == 1)
        turn = 0

        def has_gone() -> bool:
            nonlocal turn
            turn += 1
            control.devices = (*many[:-1], DeviceView("node/199", DeviceLoad(0.5, 0.1), str(turn), 0.1))
            return len(dashboard.viewers) == 0

        await until_async(has_gone)
        writer.close()


async def test_with_keys_the_page_is_open_and_its_state_needs_the_scope_metrics(tmp_path):
    keys = Keys(key_file(tmp_path, KEYS))
    async with dashboard_over(ScriptedControl(), keys=keys) as (client, _):
        page = await client.get("/dashboard")
        assert page.status_code == 200
        assert 'data-keys="yes"' in page.text
        assert (await client.get("/dashboard/static/main.js")).status_code == 200
        for path in ("/dashboard/events", "/dashboard/requests/x", "/dashboard/", "/dashboard/nothing"):
            assert (await client.get(path)).status_code == 401, path
        wrong = await client.get("/dashboard/events", headers={"Authorization": "Bearer alpha-1"})
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (403, "key_scope")
        right = {"Authorization": "Bearer beta-2"}
        async with client.stream("GET", "/dashboard/events", headers=right) as response:
            assert response.status_code == 200
        assert (await client.get("/dashboard/requests/x", headers=right)).status_code in (200, 404)


async def test_pages_of_other_sites_do_not_see_it():
    async with dashboard_over(ScriptedControl()) as (client, _):
        for told in ({"Host": "attacker.example"}, {"Origin": "https://attacker.example"}):
            for path in ("/dashboard", "/dashboard/events", "/dashboard/requests/x"):
                assert (await client.get(path, headers=told)).status_code == 403


async def test_a_requests_life_says_how_long_what_took_and_is_bounded():
    control = ScriptedControl()
    async with dashboard_over(control) as (client, _):
        answer = await client.post("/v1/completions", json=ASK | {"max_tokens": 5, "n": 2})
        life = (await client.get(f"/dashboard/requests/{answer.json()['id']}")).json()["life"]
        assert [mark["what"] for mark in life["marks"]] == ["accepted", "first_token", "first_token", "ended"]
        assert {mark["index"] for mark in life["marks"]} == {0, 1}
        assert (life["status"], life["tokens"], life["choices"]) == (200, 10, 2)
        assert life["figures"]["latency_ms"] >= life["figures"]["ttft_ms"] > 0
        unknown = await client.get("/dashboard/requests/cmpl-0")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "request_not_found")


async def test_no_id_that_opens_a_stored_response_is_shown_and_its_life_is_still_found():
    async with dashboard_over(ScriptedControl()) as (client, _):
        answer = await client.post("/v1/responses", json={"model": "toy", "input": "hello", "max_output_tokens": 5})
        secret = answer.json()["id"]
        assert (await client.get(f"/v1/responses/{secret}")).status_code == 200
        async with client.stream("GET", "/dashboard/events") as response:
            ((_, first),) = await read_events(response, 1)
        (request,) = first["parts"]["requests"]
        assert secret not in json.dumps(first)
        found, by_own_id = [await client.get(f"/dashboard/requests/{one}") for one in (request["id"], secret)]
        assert found.json() == by_own_id.json()
        assert found.json()["life"]["tokens"] == request["tokens"] > 0
        assert secret not in found.text
        assert (await client.get(f"/v1/responses/{request['id']}")).status_code == 404


def test_only_the_last_requests_are_kept_and_of_each_so_many_moments():
    lives = RequestLives(HandClock())
    about: dict[str, Any] = {
        "route": "/v1/completions",
        "model": "",
        "stream": True,
        "prompt_tokens": 1,
        "max_tokens": 1,
    }
    for number in range(300):
        life = lives.open(f"r{number}", **about, choices=1, started_s=90.0)
    assert [one.request_id for one in lives.list_last(2)] == ["r299", "r298"]
    assert len(lives.list_last(1000)) == 200
    assert lives.find("r99") is None
    assert life.marks[0].at_ms == 10_000.0
    for engine in range(100):
        life.note(LifeMark(1.0, "moved", engine=engine))
    life.end(200, {}, 2.0)
    assert (len(life.marks), life.left_out, life.marks[-1].what) == (65, 37, "ended")


def view_of(phase: str, **more: Any) -> StateView:
    replica = ReplicaView(0, "target", phase, "", "", READY, None, Totals(restarts=more.pop("restarts", 0)), 0)
    return StateView(phase, "", "", "local", READY, None, replicas=(replica,), **more)


def test_the_timeline_tells_each_loss_once_also_where_no_phase_was_seen_to_change():
    clock = HandClock()
    timeline = FailoverTimeline(clock)
    timeline.observe(0, "toy", view_of("ready", losses={(0, "crashed"): 3}))
    assert timeline.describe() == [], "what was before it began is no event"
    lost = {(0, "crashed"): 4}
    for _ in range(2):
        timeline.observe(0, "toy", view_of("ready", losses=lost, restarts=1))
    timeline.observe(0, "toy", view_of("restarting", losses=lost, restarts=1, taken_over={"same": 1}))
    told = [(one["kind"], one["who"], one["text"]) for one in reversed(timeline.describe())]
    assert told == [
        ("loss", "target (crashed)", "was lost"),
        ("restart", "target", "is started again"),
        ("phase", "target", "ready to restarting"),
        ("takeover", "standby (same bits)", "took the target's place"),
    ]
    draft = DraftView("small", "ready", "", "", None, 0)
    timeline.observe(0, "toy", view_of("restarting", losses=lost, restarts=1, taken_over={"same": 1}, drafts=(draft,)))
    assert timeline.describe()[0]["who"] == "small 0"
    for turn in range(300):
        timeline.observe(0, "toy", view_of("ready" if turn % 2 else "restarting", drafts=(draft,)))
    assert len(timeline.describe()) == 200


def test_a_replica_that_was_refused_is_said_so_with_the_reason_and_stands_where_it_was_to_run():
    timeline, map_of = FailoverTimeline(HandClock()), []
    for phase in ("starting", "failed"):
        replica = ReplicaView(0, "target-1", phase, "no such device", "", None, None, Totals(), 0, device="here/NPU")
        view = StateView("starting", "", "", "local", None, None, replicas=(replica,))
        timeline.observe(0, "toy", view)
        shard = {"device": "here/CPU", "first_layer": 0, "end_layer": 4}
        map_of = build_map(view, {"plan": {"replicas": [{"shards": [shard]}]}}, [])["workers"]
    (told,) = timeline.describe()
    assert (told["kind"], told["who"], told["text"]) == ("phase", "target-1", "was refused: no such device")
    assert map_of[0]["device"] == "here/NPU", "another replica's place in the plan is not its own"


@pytest.mark.parametrize("phase", ["starting", "failed"])
async def test_a_model_that_never_served_is_shown_as_well(phase):
    page = dashboard_over(ScriptedControl(phase=phase, ready=None))
    async with page as (client, _), client.stream("GET", "/dashboard/events") as response:
        ((_, event),) = await read_events(response, 1)
    assert event["parts"]["model/0/state"]["phase"] == phase
    assert event["parts"]["model/0/figures"] == {"engines": {}, "percentiles": {}}


def test_a_target_that_is_cut_is_on_the_map_once_for_each_shard():
    cut = ["layers 0 to 1 on simulated SIM", "layers 2 to 3 on simulated SIM.1"]
    ready = change_ready(READY, device="SIM+SIM.1", shards=cut)
    replica = ReplicaView(0, "target", "ready", "", "", ready, None, Totals(), 0)
    view = StateView("ready", "", "", "local", ready, None, replicas=(replica,))
    found = build_map(view, None, [])
    assert [(one["device"], one["layers"]) for one in found["workers"]] == [
        ("here/SIM", "layers 0 to 1"),
        ("here/SIM.1", "layers 2 to 3"),
    ]
    assert [one["kind"] for one in found["links"]] == ["layers"]
    shards = [
        {"device": "here/SIM", "first_layer": 0, "end_layer": 2},
        {"device": "here/SIM.1", "first_layer": 2, "end_layer": 4},
    ]
    assert build_map(view, {"plan": {"replicas": [{"shards": shards}]}}, []) == found


def test_the_server_of_another_engine_is_a_node_of_its_own():
    ready = change_ready(READY, device="http://mac:8080/v1")
    replica = ReplicaView(0, "target", "ready", "", "", ready, None, Totals(), 0)
    drawn = build_map(StateView("ready", "", "", "local", ready, None, replicas=(replica,)), None, [])
    assert [worker["device"] for worker in drawn["workers"]] == ["mac:8080/server"]
    assert [node["title"] for node in drawn["nodes"]] == ["mac:8080"]
