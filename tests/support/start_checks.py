"""Whether all that tells of a daemon agrees: `status`, `health`, `/ready`, `/health`, alerts, and an answer."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import httpx
import openai

from orchestrator.cli.daemon_socket import query_daemon
from tests.support.daemon import Daemon
from tests.support.waiting import until

ASK: dict[str, Any] = {"prompt": "the sea is", "max_tokens": 12, "temperature": 0}
ALERTS = {"OutriderAbsent", "OutriderFailover", "OutriderReplicaFailed", "OutriderWorkerHung"}
"""Those that tell of a worker that is not ready."""
AGREES_WITHIN_S = 60.0
_PATIENCE_S = 15.0
"""Of each of a client's tries: what was asked of a worker that is lost then waits for another one."""


@dataclass(frozen=True)
class Standing:
    """What everybody who can be asked says at one time. `answer`: a request's text; `refused`: why it had none."""

    status: dict[str, Any]
    ready: tuple[int, str]
    health: tuple[int, str]
    parts: dict[str, Any]
    alerts: frozenset[str]
    answer: str
    refused: str

    @property
    def phase(self) -> str:
        return str(self.status["phase"])

    @property
    def why(self) -> str:
        return str(self.status["detail"])

    def list_disagreements(self) -> list[str]:
        """Return, in words, who says something else than the status."""
        wrong: list[str] = []
        held = "takes requests" in self.why  # an operator keeps it from work
        serves = self.phase == "ready" and not held
        missing = self.status["serving"]["missing"]
        shown = [(one["phase"], one["detail"], one["missing"]) for one in self.parts["models"]]
        if shown != [(self.phase, self.why, missing)]:
            wrong.append(f"`health` says {shown}")
        if serves:
            degraded = ("degraded" in self.ready[1], all(line in self.ready[1] for line in missing))
            wrong += [f"/ready says {self.ready}, and the status {missing}"] * (degraded != (bool(missing), True))
            wrong += [f"/ready says {self.ready}"] * (self.ready[0] != httpx.codes.OK)
            wrong += [f"/health says {self.health}"] * (self.health[0] != httpx.codes.OK)
            if self.refused:
                wrong.append(f"a request is refused: {self.refused}")
            return wrong
        if not self.why:
            wrong.append("the status says no reason")
        for name, (code, text) in (("/ready", self.ready), ("/health", self.health)):
            if self.why not in text or (self.phase not in text and not held):
                wrong.append(f"{name} says {text}")
            if name == "/ready" and code != httpx.codes.SERVICE_UNAVAILABLE:
                wrong.append(f"{name} says {code}")
        if not self.alerts & ALERTS and not held:  # who holds it knows
            wrong.append(f"the alerts are {sorted(self.alerts)}")
        if self.phase != "restarting" and self.why not in self.refused:  # then requests wait
            wrong.append(f"a request is refused with {self.refused!r}, answered with {self.answer!r}")
        return wrong


def look(daemon: Daemon) -> Standing:
    """Ask everybody, while the status stays as it is, until all agree; returns what they say. Raises AssertionError."""
    seen: list[Standing] = []

    def agrees() -> bool:
        found = _ask_all(daemon)
        if found is not None:
            seen.append(found)
        return found is not None and not found.list_disagreements()

    try:
        until(agrees, AGREES_WITHIN_S)
    except AssertionError:
        told = seen[-1].list_disagreements() if seen else ["the status is never the same twice"]
        where = f"status: {seen[-1].phase}: {seen[-1].why}; " if seen else ""
        raise AssertionError(f"{where}{'; '.join(told)}") from None
    return seen[-1]


def _ask_all(daemon: Daemon) -> Standing | None:
    """Return what everybody says; None where the status has changed meanwhile."""
    before = daemon.status()
    ready, health = (_get(f"{daemon.url}{route}") for route in ("/ready", "/health"))
    parts = query_daemon(daemon.admin, "/admin/health")
    alerts = query_daemon(daemon.admin, "/admin/alerts")["alerts"]
    try:
        answer, refused = ask(daemon) if before["phase"] != "restarting" else ("", "")
    except openai.APITimeoutError:
        if daemon.status()["phase"] != "restarting":
            raise
        return None
    after = daemon.status()
    if (before["phase"], before["detail"]) != (after["phase"], after["detail"]):
        return None
    return Standing(after, ready, health, parts, frozenset(one["alert"] for one in alerts), answer, refused)


def ask(daemon: Daemon) -> tuple[str, str]:
    """Return what a client gets: the text, or why there is none."""
    try:
        name = str(daemon.status()["model"] or "toy")
        found = daemon.client.completions.create(model=name, **ASK, timeout=_PATIENCE_S)
    except openai.APIStatusError as error:
        return "", str(error.body["message"] if isinstance(error.body, dict) else error)
    return found.choices[0].text, ""


def _get(url: str) -> tuple[int, str]:
    """Return the status and the text that JSON has, as people read it."""
    answer = httpx.get(url)
    return answer.status_code, json.dumps(answer.json(), ensure_ascii=False).replace('\\"', '"')
