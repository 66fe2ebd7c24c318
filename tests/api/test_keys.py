"""Bearer keys: every route asks for one but the probes, the file is read with care, and SIGHUP reads it again."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import httpx
import openai
import pytest

from orchestrator.config.load import load_config
from orchestrator.daemon.api.keys import OPEN_ROUTES, Keys
from orchestrator.errors import ConfigError
from tests.api.support import ScriptedControl, app_over, serving
from tests.support.daemon import configuration, running

ASK = {"model": "toy", "prompt": "x"}


def key_file(directory: Path, text: str = "# ours\n\nalpha-1\n  beta-2  \n", mode: int = 0o640) -> Path:
    path = directory / "keys.txt"
    path.write_text(text, encoding="utf-8")
    path.chmod(mode)
    return path


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/v1/completions"),
        ("POST", "/v1/chat/completions"),
        ("POST", "/tokenize"),
        ("POST", "/detokenize"),
        ("GET", "/v1/models"),
        ("GET", "/v1/models/toy"),
        ("GET", "/v1/nothing"),
        ("GET", "/openapi.json"),
        ("GET", "/docs"),
        ("GET", "/metrics"),
        ("GET", "/version"),
        ("GET", "/v1/completions"),
    ],
)
async def test_without_a_key_every_route_is_401(tmp_path, method, path):
    control = ScriptedControl()
    async with serving(app_over(control, keys=Keys(key_file(tmp_path)))) as url, httpx.AsyncClient() as client:
        for sent in ({}, {"Authorization": "Bearer gamma"}, {"Authorization": "alpha-1"}, {"Authorization": "Bearer"}):
            answer = await client.request(method, f"{url}{path}", json=ASK, headers=sent)
            assert answer.status_code == 401
            assert answer.headers["WWW-Authenticate"] == "Bearer"
            assert answer.headers["X-Request-Id"]
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("authentication_error", "invalid_api_key")
            assert "alpha" not in answer.text
    assert control.submits == []


async def test_every_route_of_the_app_is_behind_the_gate_or_named_as_open(tmp_path):
    app = app_over(ScriptedControl(), keys=Keys(key_file(tmp_path)))
    async with serving(app) as url, httpx.AsyncClient(base_url=url) as client:
        for path, methods in app.openapi()["paths"].items():
            for method in methods:
                answer = await client.request(method, path.replace("{name}", "toy"))
                assert (answer.status_code == 401) == (path not in OPEN_ROUTES), path
    assert app.openapi()["security"] == [{"bearer": []}]


async def test_each_key_of_the_file_opens(tmp_path):
    app = app_over(ScriptedControl(), keys=Keys(key_file(tmp_path)))
    async with serving(app) as url:
        for key in ("alpha-1", "beta-2"):
            async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0) as client:
                assert (await client.completions.create(model="toy", prompt="x")).choices[0].text == "hello"
        async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="# ours", max_retries=0) as client:
            with pytest.raises(openai.AuthenticationError):
                await client.models.list()


@pytest.mark.parametrize(
    ("text", "mode", "says"),
    [
        ("a\n", 0o644, "chmod"),
        ("a\n", 0o602, "chmod"),
        ("# nothing\n\n", 0o600, "holds no key"),
        ("ok\ntwo words\n", 0o600, ":2: a key is printable"),
        ("caf\u00e9\n", 0o600, ":1: a key is printable"),
        ('{"name": "a"}\n', 0o600, ":1: is no record of a key"),
        ('{"name": "a", "hash": "v2:00"}\n', 0o600, ":1: is no record of a key"),
        ('{"name": "a", "hash": "v1:' + "0" * 64 + '", "scopes": ["all"]}\n', 0o600, ":1: is no record of a key"),
        (('{"name": "a", "hash": "v1:' + "0" * 64 + '"}\n') * 2, 0o600, ":2: line 1 has the name 'a' too"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(tmp_path, text, mode, says):
    path = key_file(tmp_path, text, mode)
    with pytest.raises(ConfigError, match=says) as refused:
        Keys(path)
    assert str(path) in str(refused.value)


def test_the_configuration_names_the_line(tmp_path):
    config = configuration(tmp_path)
    text = config.read_text().replace("api: {", "api: {keys_file: keys.txt, ")
    config.write_text(text)
    with pytest.raises(ConfigError, match=r"cluster.yaml:3: api.keys_file: .*keys.txt: No such file"):
        load_config(config)
    key_file(tmp_path)
    assert load_config(config).api.keys_file == "keys.txt"
    assert load_config(config, sources=False).api.keys_file == "keys.txt"


def test_a_running_daemon_reads_the_keys_again_on_sighup(tmp_path):
    config = configuration(tmp_path)
    config.write_text(config.read_text().replace("api: {", "api: {keys_file: keys.txt, "))
    key_file(tmp_path, "first\n")

    def status(key: str) -> int:
        return httpx.get(f"{daemon.url}/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code

    def becomes(key: str, code: int) -> bool:
        deadline = time.monotonic() + 60.0
        while status(key) != code and time.monotonic() < deadline:
            time.sleep(0.02)
        return status(key) == code

    with running(config) as daemon:
        assert (status("first"), status("second")) == (200, 401)
        key_file(tmp_path, "second\n")
        daemon.process.send_signal(signal.SIGHUP)
        assert becomes("second", 200)
        assert status("first") == 401
        key_file(tmp_path, "third\n", mode=0o644)
        daemon.process.send_signal(signal.SIGHUP)
        time.sleep(0.2)
        assert (status("second"), status("third")) == (200, 401)
        assert daemon.stop() == 0
    assert "the keys stay as they were" in daemon.log.read_text()
