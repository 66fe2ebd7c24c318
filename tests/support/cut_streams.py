"""Clients whose daemon is killed while they read, and that read on from the next one."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

from orchestrator.launch.homes import list_homes
from tests.support.daemon import Daemon

BODY: dict[str, Any] = {
    "model": "toy",
    "prompt": "the sea is",
    "max_tokens": 120,
    "temperature": 0.8,
    "seed": 3,
    "ignore_eos": True,
}
CHAT: dict[str, Any] = {
    "model": "toy",
    "messages": [{"role": "user", "content": "the sea"}],
    "max_tokens": 100,
    "seed": 5,
    "ignore_eos": True,
    "n": 2,
}
SSE = {"Accept": "text/event-stream"}


@dataclass
class Client:
    """Reads one stream, over as many connections as it takes: each event once, in order."""

    path: str
    body: dict[str, Any]
    key: str = ""
    last: str = ""
    texts: dict[int, str] = field(default_factory=dict)
    scores: list[float | None] = field(default_factory=list)
    roles: int = 0
    finishes: list[str] = field(default_factory=list)
    ids: list[str] = field(default_factory=list)
    usage: list[dict[str, Any]] = field(default_factory=list)
    statuses: list[int] = field(default_factory=list)
    done: bool = False

    def read(self, url: str, *, events: int | None = None) -> None:
        """Read until the end, the connection's loss, or so many events."""
        headers = dict(SSE)
        if self.key:
            headers["Idempotency-Key"] = self.key
        if self.last:
            headers["Last-Event-ID"] = self.last
        body = self.body | {"stream": True, "stream_options": {"include_usage": True}}
        with (
            suppress(httpx.TransportError),
            httpx.stream("POST", f"{url}{self.path}", json=body, headers=headers, timeout=180) as response,
        ):
            self.statuses.append(response.status_code)
            if response.status_code != httpx.codes.OK:
                return
            for line in response.iter_lines():
                self.take(line)
                if self.done or (events is not None and len(self.ids) >= events):
                    return

    def take(self, line: str) -> None:
        if line.startswith("id: "):
            self.ids.append(line.removeprefix("id: "))
        elif line == "data: [DONE]":
            self.done = True
        elif line.startswith("data: "):
            self.last = self.ids[-1]
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            if event.get("usage"):
                self.usage.append(event["usage"])
            for choice in event["choices"]:
                delta = choice.get("delta") or {"content": choice.get("text")}
                self.roles += "role" in delta
                self.scores += (choice.get("logprobs") or {}).get("token_logprobs", [])
                index = choice["index"]
                self.texts[index] = self.texts.get(index, "") + (delta.get("content") or "")
                if choice["finish_reason"]:
                    self.finishes.append(choice["finish_reason"])


def workers_of(daemon: Daemon) -> list[int]:
    found = daemon.status()
    return [one["ready"]["pid"] for one in (*found["replicas"], *found["drafts"]) if one["ready"]]


def kill_in_mid_stream(daemon: Daemon, clients: list[Client], events: int) -> None:
    """Let every client have some events, and kill the daemon while they read on."""
    threads = [threading.Thread(target=client.read, args=(daemon.url,)) for client in clients]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + 240
    while any(len(client.ids) < events for client in clients):
        assert time.monotonic() < deadline
        time.sleep(0.005)
    daemon.kill()
    for thread in threads:
        thread.join(240)


def read_undisturbed(daemon: Daemon, requests: Sequence[tuple[str, dict[str, Any]]]) -> list[Client]:
    """Return a client for each path and body that has read its stream to the end, with nothing in the way."""
    clients = [Client(*request) for request in requests]
    for client in clients:
        client.read(daemon.url)
        assert client.done
    return clients


def read_on_alike(daemon: Daemon, clients: Sequence[Client], plain: Sequence[Client]) -> None:
    """Let clients that were cut off read to the end, and see that each has what an undisturbed one has, once."""
    for client, undisturbed in zip(clients, plain, strict=True):
        if not client.done:
            client.read(daemon.url)
        assert set(client.statuses) == {200}
        assert client.done
        assert client.texts == undisturbed.texts
        assert client.scores == undisturbed.scores
        assert client.roles == undisturbed.roles
        assert sorted(client.finishes) == sorted(undisturbed.finishes)
        assert len(client.ids) == len(set(client.ids))
        counts = [[one["completion_tokens"] for one in some.usage] for some in (client, undisturbed)]
        assert counts[0] == counts[1]


def workers_of_state(directory: Path) -> list[int]:
    """The workers that a daemon with its state there has, or left behind."""
    records = [home.read_record() for home in list_homes(directory / "state" / "workers")]
    return [record.pid for record in records if record is not None]
