"""The log of a request: a line when it is taken in, a line at the end, its id on both, and never its text."""

from __future__ import annotations

import asyncio
import io
import json
import logging
from typing import Any

import httpx
import pytest
import structlog

from orchestrator.errors import RequestError
from orchestrator.telemetry import setup_logging
from tests.api.support import ScriptedControl, app_over, leave_hanging, serving

WORD = "xyzzy"
PLACES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"model": "toy", "prompt": f"the word is {WORD}"},
    "/v1/chat/completions": {"model": "toy", "messages": [{"role": "user", "content": f"the word is {WORD}"}]},
}
ASK = PLACES["/v1/completions"]


@pytest.fixture
def log():
    """What the log holds; logging is the process's own, so it is left as it was."""
    root = logging.getLogger()
    before, level = root.handlers[:], root.level
    out = io.StringIO()
    setup_logging("info", "json", out)
    yield out
    root.handlers[:] = before
    root.setLevel(level)
    for name in ("httpx", "httpcore", "asyncio", "uvicorn.error"):
        logging.getLogger(name).setLevel(logging.NOTSET)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def entries(log: io.StringIO, event: str = "") -> list[dict[str, Any]]:
    found = [json.loads(line) for line in log.getvalue().splitlines()]
    return [entry for entry in found if event in ("", entry["event"])]


async def ask(
    control: ScriptedControl, path: str, body: Any, *, log_words: bool = False, headers: dict[str, str] | None = None
) -> httpx.Response:
    async with serving(app_over(control, log_words=log_words)) as url, httpx.AsyncClient(base_url=url) as client:
        return await client.post(path, json=body, headers=headers)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("path", PLACES)
async def test_two_lines_with_one_id_and_the_figures(log, path, stream):
    control = ScriptedControl(steps=[list(WORD.encode()), list(b"!!")])
    response = await ask(control, path, PLACES[path] | {"stream": stream}, headers={"X-Request-Id": "mine"})
    assert response.headers["X-Request-Id"] == "mine"
    assert WORD in response.text
    first, last = entries(log)
    assert (first["event"], last["event"]) == ("request accepted", "request ended")
    assert first["request_id"] == last["request_id"] == "mine"
    assert first["id"] == last["id"] == control.submits[0].request_id
    assert (first["route"], first["stream"]) == (path, stream)
    assert (first["prompt_tokens"], first["max_tokens"]) == (
        len(control.submits[0].prompt),
        control.submits[0].max_tokens,
    )
    assert (last["status"], last["generated"], last["finish"], last["acceptance"]) == (200, 7, "length", 0.5)
    assert last["latency_ms"] >= last["ttft_ms"] > 0
    assert last["tpot_ms"] >= 0
    assert WORD not in log.getvalue()


async def test_the_texts_are_written_where_the_operator_asked_for_them(log):
    for stream in (False, True):
        await ask(ScriptedControl(), "/v1/completions", ASK | {"stream": stream}, log_words=True)
    for first, last in (entries(log)[:2], entries(log)[2:]):
        assert first["prompt"] == ASK["prompt"]
        assert last["output"] == "hello"
    await ask(ScriptedControl(), "/v1/chat/completions", PLACES["/v1/chat/completions"], log_words=True)
    assert WORD in json.dumps(entries(log)[4]["messages"])


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_the_queue_has_no_place_for(log, stream):
    full = RequestError("full", status=429, code="queue_full", retry_after_s=1)
    await ask(ScriptedControl(error=full), "/v1/completions", ASK | {"stream": stream})
    first, last = entries(log)
    assert first["event"] == "request accepted"
    assert (last["status"], last["reason"], last["generated"], last["level"]) == (429, "queue_full", 0, "info")
    assert last["ttft_ms"] is None


WRONG: list[tuple[str, Any, int]] = [
    ("/v1/completions", {"prompt": [WORD, 5]}, 400),
    ("/v1/completions", ASK | {WORD: WORD}, 400),
    ("/v1/completions", ASK | {"model": WORD}, 404),
    ("/v1/chat/completions", {"model": "toy", "messages": [{"role": WORD, "content": "x"}]}, 400),
    (f"/v1/{WORD}", {}, 404),
]


@pytest.mark.parametrize(("path", "body", "status"), WRONG)
async def test_a_refused_request_has_one_line_without_its_words(log, path, body, status):
    response = await ask(ScriptedControl(), path, body)
    (line,) = entries(log)
    assert (line["event"], line["status"], response.status_code) == ("request refused", status, status)
    assert line["request_id"] == response.headers["X-Request-Id"]
    assert WORD not in log.getvalue()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("at", [0, 1])
async def test_a_bug_is_logged_once_with_its_place_and_without_its_words(log, stream, at):
    control = ScriptedControl(error=ValueError(f"cannot read {WORD}"), error_at=at)
    response = await ask(control, "/v1/completions", ASK | {"stream": stream})
    assert response.status_code == (200 if stream and at else 500)
    (bug,) = [entry for entry in entries(log) if "exception" in entry]
    assert (bug["level"], bug["event"]) == ("error", "request failed")
    assert "ValueError" in bug["exception"]
    assert "in generate" in bug["exception"]
    assert bug["request_id"] == response.headers["X-Request-Id"]
    (end,) = entries(log, "request ended")
    assert (end["status"], end["level"]) == (500, "warning")
    assert WORD not in log.getvalue()
    assert WORD not in response.text


async def test_a_bug_says_its_words_where_texts_are_wanted(log):
    await ask(ScriptedControl(error=ValueError(f"cannot read {WORD}")), "/v1/completions", ASK, log_words=True)
    assert f"cannot read {WORD}" in entries(log, "request failed")[0]["exception"]


async def test_a_client_that_leaves_is_told_so(log):
    control = ScriptedControl(hang_at=1)
    async with serving(app_over(control)) as url, httpx.AsyncClient(base_url=url) as client:
        for stream in (False, True):
            await leave_hanging(client, "/v1/completions", ASK | {"stream": stream}, control)
            await control.until_all_ended()
    # the server has ended with all its requests
    assert [(end["status"], end["finish"]) for end in entries(log, "request ended")] == [(499, "abort")] * 2


async def test_requests_at_the_same_time_keep_their_own_ids(log):
    async with serving(app_over(ScriptedControl())) as url, httpx.AsyncClient(base_url=url) as client:
        names = [f"r{number}" for number in range(8)]
        answers = await asyncio.gather(
            *(client.post("/v1/completions", json=ASK, headers={"X-Request-Id": name}) for name in names)
        )
    assert [answer.headers["X-Request-Id"] for answer in answers] == names
    for name, answer in zip(names, answers, strict=True):
        mine = [entry for entry in entries(log) if entry["request_id"] == name]
        assert [entry["event"] for entry in mine] == ["request accepted", "request ended"]
        assert {entry["id"] for entry in mine} == {answer.json()["id"]}


@pytest.mark.parametrize("bad", ["", "x" * 201, "caf\xe9"])
async def test_an_id_that_cannot_be_used_is_replaced(log, bad):
    async with serving(app_over(ScriptedControl())) as url, httpx.AsyncClient(base_url=url) as client:
        answer = await client.get("/v1/models", headers={"X-Request-Id": bad.encode("latin-1")})
    assert answer.headers["X-Request-Id"].startswith("req-")


async def test_the_server_s_own_complaints_are_json_too(log):
    async with serving(app_over(ScriptedControl())) as url:
        reader, writer = await asyncio.open_connection(*url.removeprefix("http://").split(":"))
        writer.write(b"this is no HTTP\r\n\r\n")
        await reader.read()
        writer.close()
    (line,) = entries(log)
    assert (line["logger"], line["level"]) == ("uvicorn.error", "warning")
