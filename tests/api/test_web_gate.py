"""A web page cannot use the daemon: neither across sites nor under a name that leads here, unless it was allowed."""

from __future__ import annotations

from typing import Any

import httpx
import openai
import pytest

from orchestrator.config.load import load_config
from orchestrator.daemon.api.keys import Keys
from orchestrator.errors import ConfigError
from tests.api.support import ScriptedControl, app_over, serving
from tests.api.test_keys import ASK, key_file
from tests.support.daemon import configuration, outrider_process


async def ask(access: dict[str, Any], headers: dict[str, str], *, keys: Keys | None = None, method: str = "POST"):
    """Ask for a completion with these headers; returns the answer and how many requests came through."""
    control = ScriptedControl()
    async with serving(app_over(control, keys=keys, **access)) as url, httpx.AsyncClient(base_url=url) as client:
        port = url.rpartition(":")[2]
        sent = {name: value.replace("PORT", port) for name, value in headers.items()}
        return await client.request(method, "/v1/completions", json=ASK, headers=sent), len(control.submits)


@pytest.mark.parametrize(
    ("headers", "status"),
    [
        ({}, 200),
        ({"Host": "localhost:PORT"}, 200),
        ({"Host": "[::1]:PORT"}, 200),
        ({"Host": "192.0.2.7:PORT"}, 200),
        ({"Host": "attacker.example:PORT"}, 403),
        ({"Host": "localhost.attacker.example"}, 403),
        ({"Host": "127.0.0.1.attacker.example"}, 403),
        ({"Host": "attacker.example:PORT", "Origin": "http://attacker.example:PORT"}, 403),
        ({"Origin": "https://attacker.example"}, 403),
        ({"Origin": "null"}, 403),
        ({"Origin": "http://127.0.0.1:1"}, 403),
        ({"Origin": "http://127.0.0.1:PORT"}, 200),
        ({"Sec-Fetch-Site": "cross-site"}, 403),
        ({"Sec-Fetch-Site": "same-origin"}, 200),
    ],
)
async def test_what_a_browser_says_of_a_page_decides(headers, status):
    answer, submits = await ask({}, headers)
    assert answer.status_code == status
    assert submits == (status == 200)
    if status == 403:
        assert answer.json()["error"]["code"] in ("host_not_allowed", "origin_not_allowed")
        assert "access-control-allow-origin" not in answer.headers


async def test_a_form_of_another_site_does_nothing_and_a_body_has_its_type():
    answer, submits = await ask({}, {"Origin": "https://a.example", "Content-Type": "text/plain"})
    assert (answer.status_code, submits) == (403, 0)
    answer, submits = await ask({}, {"Content-Type": "text/plain"})
    assert (answer.status_code, submits) == (415, 0)


async def test_names_may_be_allowed_and_with_keys_are_looked_at_only_then(tmp_path):
    listed = {"allowed_hosts": ("llm.example.org", "*.home.arpa")}
    for host, status in (("llm.example.org", 200), ("box.home.arpa:80", 200), ("home.arpa", 403), ("other", 403)):
        answer, _ = await ask(listed, {"Host": host})
        assert answer.status_code == status, host
    keys = Keys(key_file(tmp_path))
    told = {"Host": "llm.example.net", "Authorization": "Bearer alpha-1"}
    assert (await ask({}, told, keys=keys))[0].status_code == 200
    assert (await ask(listed, told, keys=keys))[0].status_code == 403
    assert (await ask({"allowed_hosts": ("*",)}, {"Host": "any.example"}))[0].status_code == 200


async def test_an_allowed_page_gets_its_preflight_and_its_headers(tmp_path):
    access = {"allowed_origins": ("https://chat.example.org",)}
    wishes = {
        "Origin": "https://chat.example.org",
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    keys = Keys(key_file(tmp_path))
    answer, _ = await ask(access, wishes, method="OPTIONS", keys=keys)
    assert answer.status_code == 200
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.org"
    known = {"Origin": "https://chat.example.org", "Authorization": "Bearer alpha-1"}
    answer, submits = await ask(access, known, keys=keys)
    assert (answer.status_code, submits) == (200, 1)
    assert answer.headers["access-control-allow-origin"] == "https://chat.example.org"
    answer, _ = await ask(access, {**wishes, "Origin": "https://other.example"}, method="OPTIONS")
    assert answer.status_code in (400, 403)
    assert "access-control-allow-origin" not in answer.headers
    answer, submits = await ask(access, {"Origin": "https://chat.example.org.attacker.example"})
    assert (answer.status_code, submits) == (403, 0)


async def test_the_real_client_is_not_in_the_way():
    async with serving(app_over(ScriptedControl())) as url:
        for host in ("127.0.0.1", "localhost"):
            base = url.replace("127.0.0.1", host)
            async with openai.AsyncOpenAI(base_url=f"{base}/v1", api_key="none", max_retries=0) as client:
                assert (await client.completions.create(model="toy", prompt="x")).choices[0].text == "hello"


async def test_the_documents_ask_nobody_else_for_anything():
    async with serving(app_over(ScriptedControl())) as url, httpx.AsyncClient(base_url=url) as client:
        page = await client.get("/docs")
    assert page.status_code == 200
    assert "default-src 'none'" in page.headers["Content-Security-Policy"]
    assert "/v1/chat/completions" in page.text
    assert "max_completion_tokens" in page.text
    for outside in ("http://", "https://", "<script", "src="):
        assert outside not in page.text


@pytest.mark.parametrize(
    ("api", "line", "says"),
    [
        ("{host: 0.0.0.0}", 3, "api.host: '0.0.0.0' can be reached from other machines"),
        ("{host: '::'}", 3, "api.host: '::' can be reached"),
        ("{host: box.example}", 3, "api.host: 'box.example' can be reached"),
        ("{allowed_hosts: ['http://x']}", 3, "api.allowed_hosts[0]: 'http://x' is no name"),
        ("{allowed_origins: ['x.example']}", 3, "api.allowed_origins[0]: 'x.example' is no origin"),
        ("{allowed_origins: ['*']}", 3, "that needs api.keys_file"),
        ("{tls: {certificate: c.pem}}", 3, "api.tls.certificate: goes with api.tls.key"),
        ("{tls: {certificate: c.pem, key: k.pem}}", 3, "c.pem: No such file"),
    ],
)
def test_a_door_that_is_too_open_is_told_with_its_line(tmp_path, api, line, says):
    path = tmp_path / "cluster.yaml"
    path.write_text(f"model: {{source: 'simulated:toy', adapter: simulated}}\n\napi: {api}\n")
    with pytest.raises(ConfigError) as refused:
        load_config(path)
    assert f"cluster.yaml:{line}: " in str(refused.value)
    assert says in str(refused.value)


def test_a_door_may_be_opened_on_purpose(tmp_path):
    path = tmp_path / "cluster.yaml"
    for api in ("{host: 0.0.0.0, allow_keyless: true}", "{host: 127.0.0.9}", "{host: localhost}", "{host: '::1'}"):
        path.write_text(f"model: {{source: 'simulated:toy', adapter: simulated}}\napi: {api}\n")
        load_config(path)
    key_file(tmp_path)
    path.write_text("model: {source: 'simulated:toy', adapter: simulated}\napi: {host: 0.0.0.0, keys_file: keys.txt}\n")
    load_config(path)


def test_the_option_host_opens_no_more_than_the_file(tmp_path):
    told = outrider_process("serve", "--config", str(configuration(tmp_path)), "--host", "0.0.0.0")
    assert told.returncode == 1
    assert "--host: '0.0.0.0' can be reached from other machines" in told.stderr
