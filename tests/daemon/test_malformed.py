"""Thousands of malformed requests against a real daemon; `python -m tests.support.malformed` sends more."""

from __future__ import annotations

import asyncio
import socket

import httpx
import pytest

from orchestrator.cli.daemon_socket import StatusError, query_daemon
from orchestrator.config.keys_change import create_key
from orchestrator.config.keys_file import SCOPES
from tests.support.daemon import configuration, running
from tests.support.malformed import CANARY, make_request, send_requests

SHORT = "header_timeout_s: 1, body_timeout_s: 1, idle_timeout_s: 1, "


def test_a_request_is_made_again_by_its_number():
    assert make_request(3, 7, "h:1", "k") == make_request(3, 7, "h:1", "k")
    assert len({make_request(3, number, "h:1", "k") for number in range(200)}) > 190


@pytest.mark.timeout(280)
def test_malformed_requests_are_refused_quickly_and_tell_no_secret(tmp_path):
    key, _ = create_key(tmp_path / "keys", "fuzz", SCOPES, 0, 0)
    config = configuration(tmp_path, extra="logging: {level: debug, audit_file: audit.jsonl}")
    text = config.read_text().replace("logging: {format: json}\n", "")
    config.write_text(text.replace("api: {", "api: {keys_file: keys, " + SHORT))
    headers = {"Authorization": f"Bearer {key}"}
    with running(config) as daemon:
        found = asyncio.run(send_requests(daemon.url, 3000, seed=19, key=key))
        assert found.failures == []
        assert found.statuses["200"] > 100
        assert found.statuses["400"] > 500
        assert found.statuses["401"] > 50
        sane = {"model": "toy", "prompt": "x", "max_tokens": 3}
        answer = httpx.post(f"{daemon.url}/v1/completions", json=sane, headers=headers, timeout=180.0)
        assert answer.status_code == 200
        admin = asyncio.run(send_requests(str(daemon.admin), 600, seed=19))
        assert admin.failures == []
        assert admin.statuses["400"] > 50
        assert daemon.stop() == 0
    told = daemon.log.read_text() + (tmp_path / "audit.jsonl").read_text()
    for secret in (CANARY, key):
        assert secret not in told
    assert "request failed" not in told
    assert "Traceback" not in told


def test_a_body_that_turns_out_to_be_no_http_is_one_refusal_and_no_bug(tmp_path):
    with running(configuration(tmp_path)) as daemon:
        host, port = daemon.url.removeprefix("http://").split(":")
        asked = [("POST", "/v1/completions"), ("POST", "/health"), ("POST", "/nothing"), ("HEAD", "/v1/models")]
        for method, path in asked:
            with socket.create_connection((host, int(port)), 30) as client:
                head = f"{method} {path} HTTP/1.1\r\nHost: {host}\r\nTransfer-Encoding: chunked\r\n\r\nzz\r\n"
                client.sendall(head.encode())
                assert client.recv(100).startswith(b"HTTP/1.1 400 ")
        assert httpx.get(f"{daemon.url}/ready").status_code == 200
    assert "request failed" not in daemon.log.read_text()


def test_half_a_character_in_a_name_is_told_back_in_letters(tmp_path):
    with running(configuration(tmp_path)) as daemon, pytest.raises(StatusError, match=r"\\ud800"):
        query_daemon(daemon.admin, "/admin/hold", {"kind": "device", "name": "\ud800", "state": "cordoned"})
