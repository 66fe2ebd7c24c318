"""Keys with names: what each opens, its own limits, and what is told of those that were refused."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import httpx
import openai
import pytest
from starlette.routing import Route

from orchestrator.config.keys_change import create_key, hash_plain_keys, revoke_key
from orchestrator.config.keys_file import SCOPES
from orchestrator.daemon.api.audit import AuditLog
from orchestrator.daemon.api.keys import OPEN_ROUTES, Keys
from orchestrator.daemon.control.port import ReplicaView, StateView, Totals
from orchestrator.errors import ConfigError
from tests.api.support import HandClock, ScriptedControl, app_over, serving
from tests.api.test_keys import ASK, key_file
from tests.support.daemon import configuration, outrider_process


async def test_every_route_that_the_app_has_refuses_missing_wrong_and_revoked_keys(tmp_path):
    path = tmp_path / "keys"
    revoked, _ = create_key(path, "gone", SCOPES, 0, 0)
    revoke_key(path, "gone")
    app = app_over(ScriptedControl(), keys=Keys(path))
    routes = [(route.path, route.methods or set()) for route in app.routes if isinstance(route, Route)]
    assert {"/docs", "/metrics", "/v1/chat/completions", "/openapi.json"} <= {route for route, _ in routes}
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        for route, methods in routes:
            for method in methods:
                for sent in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": f"Bearer {revoked}"}):
                    answer = await client.request(method, route.replace("{name:path}", "toy"), headers=sent)
                    assert (answer.status_code in (401, 403)) == (route not in OPEN_ROUTES), (method, route)


@pytest.mark.parametrize(
    ("scope", "opens"),
    [
        ("inference", {"/v1/completions": 200, "/metrics": 403, "/v1/batches": 403, "/v1/models": 200}),
        ("metrics", {"/v1/completions": 403, "/metrics": 200, "/v1/batches": 403, "/v1/models": 200}),
        ("batches", {"/v1/completions": 403, "/metrics": 403, "/v1/batches": 404, "/v1/models": 200}),
    ],
)
async def test_a_key_opens_what_its_scopes_say(tmp_path, scope, opens):
    path = tmp_path / "keys"
    key, _ = create_key(path, "one", (scope,), 0, 0)
    async with serving(app_over(ScriptedControl(), keys=Keys(path))) as url, httpx.AsyncClient(base_url=url) as client:
        for route, status in opens.items():
            headers = {"Authorization": f"Bearer {key}"}
            body = ASK if route == "/v1/completions" else None
            answer = await client.request("POST" if body else "GET", route, headers=headers, json=body)
            assert answer.status_code == status, route
            if status == 403:
                assert answer.json()["error"]["code"] == "key_scope"
        if scope != "inference":
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as typed:
                with pytest.raises(openai.PermissionDeniedError):
                    await typed.completions.create(model="toy", prompt="x")


async def test_metrics_are_open_where_that_is_configured(tmp_path):
    app = app_over(ScriptedControl(), keys=Keys(key_file(tmp_path)), metrics_without_key=True)
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        assert (await client.get("/metrics")).status_code == 200
        assert (await client.get("/version")).status_code == 200
        assert (await client.get("/v1/models")).status_code == 401


async def test_a_key_has_limits_of_its_own(tmp_path):
    path = tmp_path / "keys"
    narrow, _ = create_key(path, "narrow", SCOPES, 1, 0)
    metered, _ = create_key(path, "metered", SCOPES, 0, 3)
    control = ScriptedControl(hang_at=1)
    async with serving(app_over(control, keys=Keys(path))) as url:
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=narrow, max_retries=0) as client:
            stream = await client.completions.create(model="toy", prompt="x", stream=True)
            await anext(aiter(stream))
            with pytest.raises(openai.RateLimitError) as refused:
                await client.completions.create(model="toy", prompt="x")
            assert refused.value.code == "key_requests"
            await stream.close()
        control.hang_at = None
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=metered, max_retries=0) as client:
            await client.completions.create(model="toy", prompt="x")
            with pytest.raises(openai.RateLimitError) as refused:
                await client.completions.create(model="toy", prompt="x")
            assert refused.value.code == "key_tokens"


def test_a_change_of_the_file_holds_at_once_and_a_bad_one_changes_nothing(tmp_path):
    path = tmp_path / "keys"
    first, _ = create_key(path, "first", SCOPES, 0, 0)
    clock = HandClock()
    keys = Keys(path, clock)

    def look() -> None:
        clock.now_s += 1.5
        keys.look()

    second, _ = create_key(path, "second", SCOPES, 0, 0)
    assert (keys.hold(first), keys.hold(second)) == (True, False)
    look()
    assert (keys.hold(first), keys.hold(second)) == (True, True)
    revoke_key(path, "first")
    revoke_key(path, "second")
    look()
    assert (keys.hold(first), keys.hold(second), len(keys)) == (False, False, 0)
    text = path.read_text()
    for bad in ("", "two words\n", '{"name": "x"}\n'):
        path.write_text(bad)
        look()
        assert len(keys) == 0
    path.write_text(text)
    third, _ = create_key(path, "third", SCOPES, 0, 0)
    look()
    assert keys.hold(third)


def test_a_key_is_nowhere_in_its_file_and_plain_ones_can_be_hashed(tmp_path, capsys):
    path = key_file(tmp_path, "alpha-1\n# kept\n")
    key, record = create_key(path, "made", ("metrics",), 0, 0)
    assert key not in path.read_text()
    keys = Keys(path)
    told = capsys.readouterr().out
    assert "outrider keys hash" in told
    assert "alpha-1" not in told
    assert (keys.hold("alpha-1"), keys.hold(key), keys.hold("alpha-2")) == (True, True, False)
    before = keys.find("alpha-1")
    hash_plain_keys(path)
    assert "alpha-1" not in path.read_text()
    assert "# kept" in path.read_text()
    keys.reread()
    found = keys.find("alpha-1")
    assert before is not None
    assert found is not None
    assert found.key_id == before.key_id
    assert record.scopes == ("metrics",)
    assert path.stat().st_mode & 0o777 == 0o640


def test_two_commands_at_a_time_lose_no_key(tmp_path):
    path = tmp_path / "keys"
    with ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda number: create_key(path, f"key-{number}", SCOPES, 0, 0)[0], range(24)))
    keys = Keys(path)
    assert all(keys.hold(key) for key in made)
    with pytest.raises(ConfigError, match="has a key 'key-3' already"):
        create_key(path, "key-3", SCOPES, 0, 0)


def test_the_commands_make_list_and_revoke(tmp_path):
    config = configuration(tmp_path)
    where = ("--config", str(config))
    assert "api.keys_file is not set" in outrider_process("keys", "list", *where).stderr
    config.write_text(config.read_text().replace("api: {", "api: {keys_file: keys, "))
    made = json.loads(outrider_process("keys", "create", "ci", "--scope", "inference", *where, "--json").stdout)
    assert made["key"].startswith("outrider-")
    assert made["scopes"] == ["inference"]
    listed = outrider_process("keys", "list", *where)
    assert "ci" in listed.stdout
    assert made["key"] not in listed.stdout + listed.stderr
    assert outrider_process("keys", "create", "x", "--scope", "all", *where).returncode != 0
    assert "--yes" in outrider_process("keys", "revoke", "ci", *where).stderr
    assert json.loads(outrider_process("keys", "revoke", made["id"], "--yes", "--json", *where).stdout)["revoked"]
    assert not Keys(tmp_path / "keys").hold(made["key"])


@pytest.mark.parametrize("path", ["/health", "/ready", "/started"])
async def test_probes_without_a_key_show_no_addresses(tmp_path, path):
    control = ScriptedControl(phase="failed" if path == "/health" else "starting", ready=None)
    app = app_over(control, keys=Keys(key_file(tmp_path)), tokenizer=None)
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        assert "so says the script" not in (await client.get(path)).text
        known = await client.get(path, headers={"Authorization": "Bearer alpha-1"})
        assert "so says the script" in known.text


class OneIsOut(ScriptedControl):
    """Of two replicas one was refused."""

    def view(self) -> StateView:
        refused = ReplicaView(1, "r1", "failed", "/secret/model is refused", "", None, None, Totals(), 0)
        found = super().view()
        return replace(found, replicas=(*found.replicas, refused))


async def test_probes_say_how_much_serves_and_why_the_rest_does_not_to_those_with_a_key(tmp_path):
    app = app_over(OneIsOut(), keys=Keys(key_file(tmp_path)))
    counted = {"planned": 2, "serving": 1}
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        for path in ("/ready", "/health"):
            answer = await client.get(path)
            assert (answer.status_code, answer.json()["status"]) == (200, "degraded")
            assert answer.json()["replicas"] == counted | {"missing": ["r1 is failed"]}
            known = (await client.get(path, headers={"Authorization": "Bearer alpha-1"})).json()
            assert known["replicas"] == counted | {"missing": ["r1 is failed: /secret/model is refused"]}


async def test_refused_keys_are_in_the_audit_log_and_no_secret_is(tmp_path):
    audit = AuditLog(tmp_path / "audit.jsonl")
    path = tmp_path / "keys"
    key, _ = create_key(path, "scrape", ("metrics",), 0, 0)
    app = app_over(ScriptedControl(), keys=Keys(path), audit=audit)
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        await client.get("/v1/models")
        await client.get("/v1/canary-path", headers={"Authorization": "Bearer canary-key"})
        ask = {"prompt": "canary-prompt"}
        await client.post("/v1/completions", json=ask, headers={"Authorization": f"Bearer {key}"})
        for _ in range(200):
            await client.get("/v1/models")
    text = (tmp_path / "audit.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [line["reason"] for line in lines[:3]] == ["missing", "unknown", "scope"]
    assert (lines[2]["key"], lines[2]["scope"]) == ("scrape", "inference")
    assert "canary" not in text
    assert key not in text
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o007 == 0


def test_a_flood_of_refusals_is_counted_and_not_written(tmp_path):
    clock = HandClock()
    audit = AuditLog(tmp_path / "audit.jsonl", clock)
    scope = {"type": "http", "method": "GET", "client": ("192.0.2.1", 1)}
    for _ in range(1000):
        audit.refuse(scope, "missing", "inference", None)
    clock.now_s += 1.0
    audit.refuse(scope, "missing", "inference", None)
    lines = [json.loads(line) for line in (tmp_path / "audit.jsonl").read_text().splitlines()]
    assert len(lines) == 21
    assert lines[-1]["left_out"] == 980
