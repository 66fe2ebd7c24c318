"""Posts alerts as Alertmanager does, so that whatever receives its webhooks takes them."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import httpx

from orchestrator.telemetry import get_logger

# Notices that wait for a receiver that is away; more are dropped. Not tuned.
_QUEUE = 256
# ADR 0070: what a receiver did not take in five tries is lost.
_TRIES = 5
# ADR 0070: doubled with each try. Not tuned.
_FIRST_WAIT_S = 1.0
# ADR 0070. Not tuned.
_ANSWER_S = 5.0
_NOT_YET = "0001-01-01T00:00:00Z"
_log = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Notice:
    """An alert that began to fire, or has ended. Times are ISO 8601, UTC; `ended` None: it fires."""

    labels: Mapping[str, str]
    annotations: Mapping[str, str]
    began: str
    ended: str | None


class Webhook:
    """Sends notices one after the other. What a receiver that is down does not take in five tries is dropped, and
    logged."""

    def __init__(self, url: str, first_wait_s: float = _FIRST_WAIT_S) -> None:
        self._url = url
        self._shown = urlsplit(url).hostname or ""
        self._first_wait_s = first_wait_s
        self._queue: asyncio.Queue[Notice] = asyncio.Queue(_QUEUE)

    def put(self, notice: Notice) -> None:
        """Send it later; returns at once. Where 256 wait already it is dropped, and logged."""
        try:
            self._queue.put_nowait(notice)
        except asyncio.QueueFull:
            _log.error("an alert was not sent: too many wait", alert=notice.labels["alertname"], receiver=self._shown)

    async def run(self) -> None:
        """Send until cancelled."""
        async with httpx.AsyncClient(timeout=_ANSWER_S) as client:
            while True:
                await self._send(client, await self._queue.get())

    async def _send(self, client: httpx.AsyncClient, notice: Notice) -> None:
        body, why = describe_notice(notice), ""
        for tried in range(_TRIES):
            if tried:
                await asyncio.sleep(self._first_wait_s * 2.0 ** (tried - 1))
            try:
                answer = await client.post(self._url, json=body)
            except (httpx.HTTPError, httpx.InvalidURL, OSError, ValueError) as error:
                why = type(error).__name__  # its text may hold the URL, which is a secret
                continue
            if answer.is_success:
                return
            why = f"status {answer.status_code}"
            if answer.is_client_error and answer.status_code != httpx.codes.TOO_MANY_REQUESTS:
                break
        _log.error("an alert was not sent", alert=notice.labels["alertname"], receiver=self._shown, reason=why)


def describe_notice(notice: Notice) -> dict[str, Any]:
    """Return a notice as Alertmanager's webhook body of version 4."""
    labels, annotations = dict(notice.labels), dict(notice.annotations)
    status = "firing" if notice.ended is None else "resolved"
    name = {"alertname": labels["alertname"]}
    text = "\n".join(f"{key}={value}" for key, value in sorted(labels.items()))
    return {
        "version": "4",
        "groupKey": f'{{}}:{{alertname="{labels["alertname"]}"}}',
        "truncatedAlerts": 0,
        "status": status,
        "receiver": "outrider",
        "groupLabels": name,
        "commonLabels": labels,
        "commonAnnotations": annotations,
        "externalURL": "",
        "alerts": [
            {
                "status": status,
                "labels": labels,
                "annotations": annotations,
                "startsAt": notice.began,
                "endsAt": notice.ended or _NOT_YET,
                "generatorURL": "",
                "fingerprint": hashlib.sha256(text.encode()).hexdigest()[:16],
            }
        ],
    }
