"""Alerts in one real daemon: fired by their causes, shown by the command, and sent to a receiver."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

import pytest

from orchestrator.cli.daemon_socket import query_daemon
from orchestrator.daemon.alerts.table import ALERTS
from tests.alerts.causes import MAIN, SCENES, Stage, ask_daemon, play, write_config
from tests.support.daemon import running
from tests.support.waiting import until

HIDDEN = "hook-of-nobody-else"


class Receiver(HTTPServer):
    """Takes webhooks; the first one is answered 503, as by a receiver that is just starting."""

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Answer)
        self.tried = 0
        self.bodies: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/{HIDDEN}"

    def list_states(self, name: str) -> list[str]:
        return [body["status"] for body in self.bodies if body["commonLabels"]["alertname"] == name]


class _Answer(BaseHTTPRequestHandler):
    server: Receiver

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.tried += 1
        if self.server.tried > 1:
            self.server.bodies.append(body)
        self.send_response(200 if self.server.tried > 1 else 503)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        pass


@pytest.fixture(scope="module")
def receiver() -> Iterator[Receiver]:
    with Receiver() as one:
        thread = threading.Thread(target=one.serve_forever)
        thread.start()
        yield one
        one.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def stage(tmp_path_factory: pytest.TempPathFactory, receiver: Receiver) -> Iterator[Stage]:
    directory = tmp_path_factory.mktemp("alerts")
    with running(write_config(directory, alerts=f"time_factor: 0.01, webhook: '{receiver.url}'")) as daemon:
        yield Stage(daemon, directory)


def list_ended(stage: Stage) -> list[str]:
    return [one["alert"] for one in query_daemon(stage.daemon.admin, "/admin/alerts")["ended"]]


def test_no_worker_is_an_alert_while_the_model_is_loaded(stage: Stage, receiver: Receiver):
    until(lambda: "OutriderAbsent" in list_ended(stage))
    until(lambda: receiver.list_states("OutriderAbsent") == ["firing", "resolved"])
    assert receiver.tried == len(receiver.bodies) + 1, "the receiver that was not ready was asked again"


def test_a_killed_worker_an_override_and_a_draft_of_another_model_fire_and_end(stage: Stage, receiver: Receiver):
    fires = ask_daemon(stage)
    for alert in ("OutriderNotAsConfigured", "OutriderFailover", "OutriderAcceptanceFell"):
        play(next(one for one in MAIN if alert in one.alerts), stage, fires)
    ended = {"OutriderNotAsConfigured", "OutriderFailover", "OutriderAcceptanceFell", "OutriderAcceptanceLow"}
    assert ended <= set(list_ended(stage))
    until(lambda: all(receiver.list_states(name)[-1:] == ["resolved"] for name in ended))
    (failover, *_) = [one for one in receiver.bodies if one["commonLabels"]["alertname"] == "OutriderFailover"]
    assert (failover["version"], failover["status"]) == ("4", "firing")
    (alert,) = failover["alerts"]
    assert alert["labels"] == {
        "alertname": "OutriderFailover",
        "severity": "warning",
        "model_name": "toy",
        "kind": "killed",
    }
    assert alert["annotations"]["runbook_url"] == "docs/runbook.md#outriderfailover"


def test_a_failed_draft_and_a_device_without_room_are_not_as_configured(stage: Stage):
    fires = ask_daemon(stage)
    for what in ("drafter", "memory"):
        (cause,) = [one for one in MAIN if one.alerts.get("OutriderNotAsConfigured") == {"what": what}]
        (seen,) = play(cause, stage, fires)
        assert seen.labels == {"model_name": "toy", "what": what}


def test_the_tool_has_a_cause_for_each_alert():
    causes = [cause for scene in SCENES for cause in scene.causes]
    assert {name for cause in causes for name in cause.alerts} == {alert.name for alert in ALERTS}


def test_the_command_says_what_fires_and_what_to_do(stage: Stage, outrider):
    socket = ("--socket", str(stage.daemon.admin))
    assert outrider("speculation", "off", *socket).returncode == 0
    try:
        fires = ask_daemon(stage)
        until(lambda: fires("OutriderNotAsConfigured"))
        shown = outrider("alerts", *socket)
        assert shown.returncode == 0, shown.stderr
        assert "what override" in shown.stdout
        assert "remedy: Mend the part, or take the override back" in shown.stdout
        told = json.loads(outrider("alerts", "--json", *socket).stdout)
        assert [one["state"] for one in told["alerts"] if one["alert"] == "OutriderNotAsConfigured"] == ["firing"]
    finally:
        outrider("speculation", "reset", *socket)


def test_the_receivers_url_is_shown_nowhere(stage: Stage, outrider):
    config = stage.directory / "cluster.yaml"
    assert HIDDEN in config.read_text()
    done = outrider("config", "show", str(config))
    assert done.returncode == 0, done.stderr
    assert "webhook" in done.stdout
    assert HIDDEN not in done.stdout + done.stderr
    assert HIDDEN not in stage.daemon.log.read_text()


def test_a_url_that_is_none_is_refused_without_showing_it(stage: Stage, outrider):
    config = stage.directory / "wrong.yaml"
    text = (stage.directory / "cluster.yaml").read_text()
    config.write_text(text.replace("webhook: 'http://", "webhook: 'gopher://"))
    done = outrider("config", "check", str(config))
    assert done.returncode == 1
    assert "needs a URL that begins with http:// or https://" in done.stderr
    assert HIDDEN not in done.stderr
