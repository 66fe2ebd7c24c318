"""Words of requests are in nothing that the daemon tells of itself: there is a string for each place of a request."""

from __future__ import annotations

import json
import os
import resource
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest

from orchestrator.cli.daemon_socket import StatusError, query_daemon
from orchestrator.config.keys_change import create_key
from orchestrator.config.keys_file import SCOPES
from tests.support.archives import read_archive
from tests.support.daemon import Daemon, configuration, outrider_process, running

PLACES = (
    *("prompt", "chat", "tool", "schema", "stop", "user", "metadata", "unknown", "malformed", "model"),
    *("header", "cookie", "query", "path", "agent", "wrongkey", "batch", "late", "idempotency"),
    *("input", "instructions", "tag", "system", "session", "apikey", "tracestate"),
)
CANARIES = {place: f"zq{place}7canary" for place in PLACES}
ADMIN_PAGES = (
    "status",
    "health",
    "plan",
    "quarantine",
    "logs",
    "config",
    "configuration",
    "metrics",
    "requests",
    "alerts",
    "drafters",
    "parts",
)


@dataclass(frozen=True)
class Heard:
    """What a daemon was asked, answered and told. `key`: the valid one; `answers`: status and text of each answer."""

    daemon: Daemon
    key: str
    answers: list[httpx.Response]
    directory: Path


def build_requests(canaries: dict[str, str]) -> Iterator[tuple[str, str, dict[str, Any]]]:
    """Yield method, path and the rest of requests that have a canary in each of their places."""
    ask = {"model": "toy", "prompt": f"the {canaries['prompt']}", "max_tokens": 6}
    chat = {"model": "toy", "messages": [{"role": "user", "content": canaries["chat"]}], "max_tokens": 6}
    tool = {"type": "function", "function": {"name": canaries["tool"], "description": canaries["tool"]}}
    schema = {"type": "object", "properties": {canaries["schema"]: {"type": "integer"}}}
    shaped = {"type": "json_schema", "json_schema": {"name": canaries["schema"], "schema": schema}}
    headers = {"X-Odd": canaries["header"], "Cookie": f"a={canaries['cookie']}", "User-Agent": canaries["agent"]}
    completions, chats = "/v1/completions", "/v1/chat/completions"
    yield "POST", completions, {"json": ask, "headers": headers}
    yield "POST", f"{completions}?key={canaries['query']}", {"json": ask | {"stream": True}}
    yield "POST", completions, {"json": ask | {"stop": canaries["stop"], "user": canaries["user"]}}
    yield "POST", chats, {"json": chat | {"tools": [tool], "metadata": {"a": canaries["metadata"]}, "store": True}}
    yield "POST", chats, {"json": chat | {"response_format": shaped}}
    yield "POST", completions, {"json": ask | {"prompt": [canaries["malformed"], 1]}}
    yield "POST", completions, {"json": ask | {canaries["unknown"]: canaries["unknown"]}}
    yield "POST", completions, {"content": f'{{"prompt": "{canaries["malformed"]}'.encode()}
    yield "POST", completions, {"json": ask | {"model": canaries["model"]}}
    yield "GET", f"/v1/{canaries['path']}", {}
    yield "GET", f"/v1/models/{canaries['path']}?{canaries['query']}", {}
    yield "POST", "/tokenize", {"json": {"prompt": canaries["prompt"]}}
    yield "POST", completions, {"json": ask, "headers": {"Authorization": f"Bearer {canaries['wrongkey']}"}}
    yield "POST", completions, {"json": ask, "headers": {"Authorization": canaries["wrongkey"]}}
    line = {"custom_id": canaries["batch"], "method": "POST", "url": completions, "body": ask}
    tagged = {"input": canaries["input"], "instructions": canaries["instructions"], "metadata": {"a": canaries["tag"]}}
    yield "POST", "/v1/responses", {"json": {"model": "toy", "max_output_tokens": 6} | tagged}
    system = {"system": canaries["system"], "metadata": {"user_id": canaries["session"]}}
    other = {"x-api-key": canaries["apikey"], "tracestate": f"a={canaries['tracestate']}"}
    yield "POST", "/v1/messages", {"json": chat | system, "headers": other}
    files = {"file": ("in.jsonl", json.dumps(line).encode()), "purpose": (None, "batch")}
    yield "POST", "/v1/files", {"files": files}


@contextmanager
def dumping() -> Iterator[None]:
    """Let processes that are started meanwhile dump their memory, as far as this machine lets them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (hard, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))


@pytest.fixture(scope="module")
def heard(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Heard]:
    directory = tmp_path_factory.mktemp("canaries")
    key, _ = create_key(directory / "keys", "tester", tuple(SCOPES), 0, 0)
    config = configuration(directory, script="base_ms=1", extra="journal: {ended_s: 600}")
    text = config.read_text().replace("format: json", f"format: json, level: debug, audit_file: '{directory}/audit'")
    config.write_text(text.replace("api: {", "api: {keys_file: keys, "))
    with dumping(), running(config) as daemon:
        headers = {"Authorization": f"Bearer {key}"}
        with httpx.Client(base_url=daemon.url, headers=headers, timeout=180.0) as client:
            answers = [client.request(method, path, **rest) for method, path, rest in build_requests(CANARIES)]
            body = {"model": "toy", "prompt": CANARIES["late"], "max_tokens": 400, "stream": True, "ignore_eos": True}
            again = {"Idempotency-Key": CANARIES["idempotency"]}
            with client.stream("POST", "/v1/completions", json=body, headers=again) as stream:
                lines = stream.iter_lines()
                first = next(lines)
                os.kill(daemon.status()["ready"]["pid"], signal.SIGABRT)  # the worker dies with the prompt in memory
                rest = [first, *lines]
            assert any("[DONE]" in line for line in rest), rest[-3:]
        yield Heard(daemon, key, answers, directory)


def find_canaries(text: str, key: str) -> set[str]:
    """Return the places whose string is in a text."""
    return {place for place, word in {**CANARIES, "key": key}.items() if word in text}


def test_the_requests_were_of_all_kinds(heard):
    codes = [answer.status_code for answer in heard.answers]
    assert codes.count(200) >= 5
    assert codes.count(401) == 2
    assert codes.count(404) == 3
    assert codes.count(400) >= 3


def test_no_answer_has_a_key_or_a_header(heard):
    secret = {
        "key",
        "wrongkey",
        "header",
        "cookie",
        "agent",
        "query",
        "user",
        "metadata",
        "session",
        "apikey",
        "tracestate",
    }
    for answer in heard.answers:
        told = f"{answer.text}\n{dict(answer.headers)}"
        assert find_canaries(told, heard.key) & secret == set()


def test_no_refusal_says_the_text_that_it_refuses(heard):
    """A path, the name of a parameter and that of a model are said: whoever mistyped one looks for it."""
    refused = [answer for answer in heard.answers if answer.status_code >= 400]
    assert set().union(*(find_canaries(answer.text, heard.key) for answer in refused)) <= {"path", "unknown", "model"}


@pytest.mark.parametrize("page", ADMIN_PAGES)
def test_no_admin_page_has_any(heard, page):
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(heard.daemon.admin))) as client:
        text = client.get(f"http://outrider/admin/{page}").raise_for_status().text
    assert len(text) > 2
    assert find_canaries(text, heard.key) == set()


def test_no_request_that_is_explained_has_any(heard):
    log = query_daemon(heard.daemon.admin, "/admin/logs?most=10000")["entries"]
    ids = {entry["id"] for entry in log if entry["event"] == "request accepted"}
    assert len(ids) >= 6
    told = []
    for one in ids:
        try:
            told.append(json.dumps(query_daemon(heard.daemon.admin, f"/admin/explain/{one}")))
        except StatusError as error:
            told.append(str(error))
    assert find_canaries("\n".join(told), heard.key) == set()
    with httpx.Client(base_url=heard.daemon.url, headers={"Authorization": f"Bearer {heard.key}"}) as client:
        lives = [client.get(f"/dashboard/requests/{one}") for one in ids]
    assert {"/v1/responses", "/v1/messages"} <= {one.json()["life"]["route"] for one in lives if one.is_success}
    assert find_canaries("\n".join(one.text for one in lives), heard.key) == set()


def test_what_the_dashboard_is_sent_has_none(heard):
    headers = {"Authorization": f"Bearer {heard.key}"}
    with httpx.stream("GET", f"{heard.daemon.url}/dashboard/events", headers=headers, timeout=180.0) as events:
        assert events.status_code == 200
        sent = next(line for line in events.iter_lines() if line.startswith("data:"))
    assert "toy" in sent
    assert find_canaries(sent, heard.key) == set()


def test_no_metric_has_any(heard):
    answer = httpx.get(f"{heard.daemon.url}/metrics", headers={"Authorization": f"Bearer {heard.key}"})
    assert "outrider_" in answer.raise_for_status().text
    assert find_canaries(answer.text, heard.key) == set()


def test_neither_the_log_nor_the_audit_file_has_any(heard):
    log = heard.daemon.log.read_text(encoding="utf-8")
    assert "Aborted" in log  # what the worker printed when it died is in it
    audit = (heard.directory / "audit").read_text(encoding="utf-8")
    assert "access refused" in audit
    assert find_canaries(log + audit, heard.key) == set()


def test_the_commands_show_none(heard):
    socket = ("--socket", str(heard.daemon.admin))
    told = [outrider_process(*command, *socket) for command in (("status",), ("logs", "-n", "10000"), ("health",))]
    assert [done.returncode for done in told] == [0, 0, 0]
    assert find_canaries("".join(done.stdout + done.stderr for done in told), heard.key) == set()


def test_a_support_bundle_has_none(heard, tmp_path):
    made = tmp_path / "bundle.tar.gz"
    where = ("--socket", str(heard.daemon.admin), "--config", str(heard.directory / "cluster.yaml"))
    done = outrider_process("support-bundle", "--output", str(made), "--json", *where)
    assert done.returncode == 0, done.stderr
    files = {name: text.decode() for name, text in read_archive(made).items()}
    assert {"status.json", "config.json", "log.jsonl", "metrics.txt", "doctor.json"} <= set(files)
    digest = next(iter(line for line in (heard.directory / "keys").read_text().splitlines() if "tester" in line))
    for name, text in files.items():
        assert find_canaries(text, heard.key) == set(), name
        assert digest not in text


def test_files_that_have_prompts_on_purpose_are_the_daemons_users_alone(heard):
    """The journal has tokens, so that answers can be resumed; batches have what was uploaded."""
    state = heard.directory / "state"
    kept = {path for folder in ("journal", "batches") for path in (state / folder).rglob("*") if path.is_file()}
    assert {path.relative_to(state).parts[0] for path in kept} == {"journal", "batches"}
    for path in kept:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(state.stat().st_mode) == 0o700
    for path in state.rglob("*"):
        if path.is_file() and path not in kept:
            assert find_canaries(path.read_bytes().decode("latin-1"), heard.key) == set(), path


def test_neither_the_daemon_nor_its_workers_dump_their_memory(heard):
    workers = [int(heard.daemon.status()["ready"]["pid"])]
    for pid in (heard.daemon.process.pid, *workers):
        line = next(line for line in Path(f"/proc/{pid}/limits").read_text().splitlines() if "core file" in line)
        assert line.split()[4] in ("0", "1"), line
    assert list(Path.cwd().glob("core*")) == []


def test_a_process_that_dies_without_its_memory(tmp_path):
    """`limit_core_dumps` in a process that could dump: the kernel says whether it did."""
    code = "import os; from orchestrator.machine.core_dumps import limit_core_dumps; limit_core_dumps(); os.abort()"
    with dumping():
        process = subprocess.Popen([sys.executable, "-c", code], cwd=tmp_path)
    _, status = os.waitpid(process.pid, 0)
    process.returncode = -os.WTERMSIG(status)
    assert os.WTERMSIG(status) == signal.SIGABRT
    assert not os.WCOREDUMP(status)
    assert list(tmp_path.iterdir()) == []
