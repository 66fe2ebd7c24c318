"""Fires each alert by its real cause in a real daemon over the simulated model, and sees it end.

`python -m tests.alerts.fire_alerts` asks the daemon's own watch. With `--prometheus`, a real Prometheus scrapes the
daemon and evaluates the rules that `outrider alerts rules` writes. Windows and waits are `--time-factor` of the shipped
ones. Every alert of the table can be fired on one machine; only Prometheus sees that a daemon is gone.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
from outrider_lab.free_port import find_free_port

from adapters.hardware import processor
from orchestrator.cli.daemon_socket import query_daemon
from orchestrator.daemon.alerts.rules import write_rules
from orchestrator.daemon.alerts.table import ALERTS
from tests.alerts.causes import SCENES, Cause, Fires, Scene, Seen, Stage, ask_daemon, play, until
from tests.support.daemon import running

FACTOR = 0.01
_ABSENT = "OutriderAbsent"


@dataclass
class Run:
    """What was asked for and what was seen. `prometheus`: where it answers; None: each daemon's own watch is asked."""

    factor: float
    wanted: frozenset[str]
    prometheus: Fires | None = None
    port: int = 0
    seen: list[Seen] = field(default_factory=list)
    failed: dict[str, str] = field(default_factory=dict)

    def list_causes(self, scene: Scene) -> list[Cause]:
        """Return what is to happen under a configuration."""
        watched = [one for one in scene.causes if one.watched or self.prometheus is not None]
        return [one for one in watched if self.wanted & one.alerts.keys()]

    def attempt(self, cause: str, do: Callable[[], list[Seen]]) -> None:
        """Do it, and note and print what was seen."""
        try:
            found = do()
        except (TimeoutError, RuntimeError, AssertionError, httpx.HTTPError) as error:
            self.failed[cause] = str(error)
            print(f"FAILED: {cause}: {error}", file=sys.stderr, flush=True)
            return
        self.seen += found
        for one in found:
            text = f"{one.alert} fired after {one.fired_s:.1f} s, ended after {one.cleared_s:.1f} s: {cause}"
            print(text, file=sys.stderr, flush=True)

    def play_scene(self, scene: Scene, directory: Path) -> None:
        """Make everything happen that is wanted under one configuration."""
        causes = self.list_causes(scene)
        loading = scene is SCENES[0] and self.prometheus is None and _ABSENT in self.wanted
        if not causes and not loading:
            return
        directory.mkdir()
        config = scene.write(directory, self.port, f"time_factor: {self.factor:g}")
        with contextlib.ExitStack() as stack:
            stage = Stage(stack.enter_context(running(config)), directory, stack)
            fires = self.prometheus or ask_daemon(stage)
            if loading:
                self.attempt("a model is being loaded", lambda: _see_loading(stage))
            for cause in causes:
                self.attempt(cause.what, partial(play, cause, stage, fires))


def _see_loading(stage: Stage) -> list[Seen]:
    """Return that OutriderAbsent fired while the first worker loaded. Its start is the daemon's."""

    def find() -> list[dict[str, Any]]:
        ended: list[dict[str, Any]] = query_daemon(stage.daemon.admin, "/admin/alerts")["ended"]
        return [one for one in ended if one["alert"] == _ABSENT]

    until(find, f"{_ABSENT} ended")
    return [Seen(_ABSENT, "a model is being loaded", {}, float("nan"), float("nan"))]


@contextlib.contextmanager
def running_prometheus(directory: Path, target_port: int, factor: float) -> Iterator[Fires]:
    """Run Prometheus with the shipped rules, in shorter times; yields what tells which alerts fire."""
    (directory / "rules.yaml").write_text(write_rules(factor))
    (directory / "prometheus.yaml").write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}\n"
        f"rule_files: [{directory}/rules.yaml]\n"
        f"scrape_configs: [{{job_name: outrider, static_configs: [{{targets: ['127.0.0.1:{target_port}']}}]}}]\n"
    )
    port = find_free_port()
    with (directory / "prometheus.log").open("wb") as log:
        process = subprocess.Popen(
            [
                "prometheus",
                f"--config.file={directory}/prometheus.yaml",
                f"--storage.tsdb.path={directory}/tsdb",
                f"--web.listen-address=127.0.0.1:{port}",
            ],
            stdout=log,
            stderr=log,
        )
    url = f"http://127.0.0.1:{port}"

    def fires(name: str) -> list[dict[str, str]]:
        alerts = httpx.get(f"{url}/api/v1/alerts", timeout=30).json()["data"]["alerts"]
        firing = [one["labels"] for one in alerts if one["state"] == "firing"]
        return [one for one in firing if one["alertname"] == name]

    try:
        until(lambda: _is_ready(url), "Prometheus is ready")
        yield fires
    finally:
        process.terminate()
        process.wait()


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready").is_success
    except httpx.TransportError:
        return False


def _read_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", action="store_true", help="evaluate them in a real Prometheus")
    parser.add_argument("--alerts", default="", metavar="NAME,...", help="these alone")
    parser.add_argument("--time-factor", type=float, default=FACTOR, help=f"of all windows and waits ({FACTOR:g})")
    parser.add_argument("--json", action="store_true", help="print what was seen as JSON")
    parser.add_argument("--list", action="store_true", help="print the causes of each alert, and end")
    asked = parser.parse_args()
    names = [alert.name for alert in ALERTS]
    asked.wanted = frozenset(name for name in asked.alerts.split(",") if name) or frozenset(names)
    if unknown := sorted(asked.wanted - set(names)):
        parser.error(f"--alerts: there is no {unknown[0]}; there are {', '.join(names)}")
    return asked


def _list_causes() -> str:
    causes = [one for scene in SCENES for one in scene.causes]
    return _format_rows([(name, _tell(labels), one.what) for one in causes for name, labels in one.alerts.items()])


def _format_rows(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return "\n".join("  ".join(f"{cell:<{w}}" for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows)


def _tell(labels: dict[str, str]) -> str:
    known = {"alertname", "severity", "model_name"}
    return ", ".join(f"{name} {value}" for name, value in labels.items() if name not in known)


def _report(run: Run, *, as_json: bool) -> str:
    """Return what was seen, in the order of the table."""
    order = {alert.name: number for number, alert in enumerate(ALERTS)}
    seen = sorted(run.seen, key=lambda one: order[one.alert])
    by = "the daemon's own watch" if run.prometheus is None else "Prometheus"
    if as_json:
        told = [
            {**one._asdict(), "fired_s": round(one.fired_s, 2), "cleared_s": round(one.cleared_s, 2)} for one in seen
        ]
        facts = {"processor": processor().name, "seen_by": by, "time_factor": run.factor}
        return json.dumps({**facts, "alerts": told, "failed": run.failed}, indent=1)
    rows = [("alert", "labels", "fired after", "ended after", "cause")]
    rows += [
        (one.alert, _tell(one.labels), f"{one.fired_s:.1f} s", f"{one.cleared_s:.1f} s", one.cause) for one in seen
    ]
    return f"{by}, times x {run.factor:g}, {processor().name}\n{_format_rows(rows)}"


def main() -> int:
    """Fire them, and print what was seen. Returns 1 where one did not fire or end."""
    asked = _read_arguments()
    if asked.list:
        print(_list_causes())
        return 0
    run = Run(asked.time_factor, asked.wanted)
    with tempfile.TemporaryDirectory() as kept, contextlib.ExitStack() as stack:
        if asked.prometheus:
            run.port = find_free_port()
            run.prometheus = stack.enter_context(running_prometheus(Path(kept), run.port, run.factor))
        for number, scene in enumerate(SCENES):
            run.play_scene(scene, Path(kept) / str(number))
    print(_report(run, as_json=asked.json))
    return 1 if run.failed or run.wanted - {one.alert for one in run.seen} else 0


if __name__ == "__main__":
    sys.exit(main())
