"""The watch over alerts and the sender of alerts where something breaks: they say so, and go on."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from structlog.testing import capture_logs

from orchestrator.daemon.alerts.watch import AlertWatch
from orchestrator.daemon.alerts.webhook import Notice, Webhook
from tests.support.waiting import until_async


async def test_a_look_that_fails_is_logged_once_and_the_next_ones_come():
    looks: list[int] = []

    def read(_: Iterable[str]) -> list[tuple[str, dict[str, str], float]]:
        looks.append(len(looks))
        if looks[-1] in (1, 2):
            raise RuntimeError("broken")
        return []

    watch = AlertWatch(read, every_s=0.01)
    with capture_logs() as told:
        watching = asyncio.create_task(watch.run())
        await until_async(lambda: watch.view()["evaluations"] >= 2)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
    assert [one["event"] for one in told] == ["the watch over alerts failed; it goes on"]


async def test_a_url_that_the_client_refuses_is_told_for_each_alert_and_the_sender_goes_on():
    webhook = Webhook("http://hidden:abc/", first_wait_s=0.0)
    with capture_logs() as told:
        sending = asyncio.create_task(webhook.run())
        for name in ("one", "two"):
            webhook.put(Notice({"alertname": name}, {}, "2026-01-01T00:00:00Z", None))
        await until_async(lambda: len(told) == 2)
        sending.cancel()
        await asyncio.gather(sending, return_exceptions=True)
    assert [(one["alert"], one["reason"]) for one in told] == [("one", "InvalidURL"), ("two", "InvalidURL")]
