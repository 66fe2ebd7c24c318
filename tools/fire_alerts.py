"""Fires each alert by its real cause in a real daemon over the simulated model, and sees it end. Times are a hundredth.

`python tools/fire_alerts.py` asks the daemon's own watch. With `--prometheus`, a real Prometheus scrapes the daemon and
evaluates the same rules.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import openai

from orchestrator.alerts.rules import write_rules
from orchestrator.cli.daemon_socket import query_daemon
from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.profiles import store_simulated_profiles

FACTOR = 0.01
WITHIN_S = 90.0
_KILLS = "the @ sea"
"""A prompt that ends the worker: its script is armed by the token 64."""
Fires = Callable[[str], bool]


@dataclass
class Stage:
    """A daemon, and the files that make its models worse while they exist."""

    daemon: Daemon
    directory: Path

    def spoil(self, what: str) -> None:
        """Make a model worse."""
        (self.directory / what).touch()

    def mend(self, what: str) -> None:
        """Make it as it was."""
        (self.directory / what).unlink()

    def ask(self, tokens: int = 100, prompt: str = "the sea is", depth: int | None = 8) -> None:
        """Ask for an answer at a fixed depth, and take any refusal."""
        extra = None if depth is None else {"speculative_config": {"num_speculative_tokens": depth}}
        with contextlib.suppress(openai.OpenAIError):
            self.daemon.client.completions.create(
                model="toy", prompt=prompt, max_tokens=tokens, temperature=0.0, timeout=60, extra_body=extra
            )

    def run(self, *command: str) -> None:
        """Run a command of Outrider's against the daemon. Raises RuntimeError where it fails."""
        done = outrider_process(*command, "--socket", str(self.daemon.admin))
        if done.returncode:
            raise RuntimeError(done.stderr)

    def signal_worker(self, number: signal.Signals) -> None:
        """Send a signal to the target's worker."""
        os.kill(self.daemon.status()["ready"]["pid"], number)


class Case(NamedTuple):
    """How alerts are made to fire, and to end (nothing: they end by themselves). `work` goes on until they do."""

    alerts: tuple[str, ...]
    cause: Callable[[Stage], None]
    mend: Callable[[Stage], None] | None
    work: Callable[[Stage], None] | None = Stage.ask


def _change_class(stage: Stage) -> None:
    stage.spoil("kernel")
    stage.signal_worker(signal.SIGKILL)


def _crowd(stage: Stage) -> None:
    with ThreadPoolExecutor(24) as pool:
        for number in range(48):
            pool.submit(stage.ask, 300, f"{number}" + " seas" * 40, None)


def _hang(stage: Stage) -> None:
    thread = threading.Thread(target=stage.ask, args=(600, "a long way", 1), daemon=True)
    thread.start()
    _until(lambda: (stage.daemon.status()["gauges"] or {}).get("running", 0) > 0, "a stream runs")
    stage.signal_worker(signal.SIGSTOP)


CASES = {
    "override": Case(
        ("OutriderNotAsConfigured",),
        lambda stage: stage.run("speculation", "off"),
        lambda stage: stage.run("speculation", "reset"),
        None,
    ),
    "killed": Case(("OutriderFailover",), lambda stage: stage.signal_worker(signal.SIGKILL), None, None),
    "acceptance": Case(
        ("OutriderAcceptanceFell", "OutriderAcceptanceLow"),
        lambda stage: stage.spoil("shift"),
        lambda stage: stage.mend("shift"),
    ),
    "slow draft": Case(
        ("OutriderSpeculationSlower", "OutriderDraftingCostsMore"),
        lambda stage: stage.spoil("slow_draft"),
        lambda stage: stage.mend("slow_draft"),
    ),
    "class": Case(("OutriderClassChanged",), _change_class, None, None),
    "crowd": Case(("OutriderKvPressure",), lambda stage: None, None, _crowd),
    "slo": Case(
        ("OutriderSloBurn",),
        lambda stage: stage.spoil("slow_target"),
        lambda stage: stage.mend("slow_target"),
        lambda stage: stage.ask(1, depth=None),
    ),
    "quarantine": Case(
        ("OutriderQuarantine",),
        lambda stage: stage.ask(8, _KILLS, None),
        lambda stage: stage.run("quarantine", "release", "--all"),
        None,
    ),
    "hung": Case(("OutriderWorkerHung",), _hang, None, None),
}


def write_config(directory: Path, port: int = 0, alerts: str = "") -> Path:
    """Write the cluster.yaml of the cases."""
    script = (
        f"base_ms=5&load_ms=1500&kernel_rows=1&kernel_while={directory}/kernel&fault=abort&arm=64&at=1"
        f"&drift_ms=1500&drift_while={directory}/slow_target"
    )
    draft = f"shift=1&shift_while={directory}/shift&drift_ms=20&drift_while={directory}/slow_draft"
    extra = (
        f"drafts: [{{method: model, source: 'simulated:toy?{draft}', adapter: simulated}}]\n"
        f"limits: {{kv_cache: 1 MiB, max_running: 8}}\nslo: {{ttft_ms: 1200}}\n"
        f"alerts: {{every_s: 0.5, time_factor: {FACTOR}{alerts}}}"
    )
    path = configuration(directory, script=script, extra=extra)
    path.write_text(path.read_text().replace("port: 0", f"port: {port}"))
    return path


def run_case(name: str, stage: Stage, fires: Fires) -> None:
    """Fire the alerts of a case and see them end. Raises TimeoutError naming what did not come."""
    case, stop = CASES[name], threading.Event()

    def work() -> None:
        while case.work is not None and not stop.is_set():
            case.work(stage)

    if name in ("acceptance", "slow draft"):
        for _ in range(5):
            stage.ask()  # the drafter needs a past
    worker = threading.Thread(target=work)
    case.cause(stage)
    worker.start()
    try:
        for alert in case.alerts:
            _until(partial(fires, alert), f"{alert} fires")
        if case.mend is not None:
            case.mend(stage)
        if name == "crowd":
            stop.set()  # it is the work that fires it
        for alert in case.alerts:
            _until(partial(_is_over, fires, alert), f"{alert} ends")
    finally:
        stop.set()
        worker.join()


def fire_drift(directory: Path, fires_of: Callable[[Daemon], Fires], port: int = 0) -> None:
    """Serve by a profile that is wrong, and see OutriderPredictionsDrift fire; then measure again, and see it end."""
    script = f"base_ms=2&drift_ms=20&drift_while={directory}/drift"
    store_simulated_profiles(directory / "store" / "profiles", {"SIM": 2.0}, script=script)
    extra = (
        "drafts: []\nplacement: {profile: never, drift_after_s: 3600}\n"
        f"alerts: {{every_s: 0.5, time_factor: {FACTOR}}}"
    )
    path = configuration(directory, script=script, extra=extra)
    text = path.read_text().replace("adapter: simulated", "adapter: auto, device: auto", 1)
    path.write_text(text.replace("port: 0", f"port: {port}"))
    with running(path) as daemon:
        fires, stage, name = fires_of(daemon), Stage(daemon, directory), "OutriderPredictionsDrift"
        stage.spoil("drift")
        _until(partial(_ask_and_see, stage, fires, name), f"{name} fires")
        stage.mend("drift")
        _until(lambda: not _ask_and_see(stage, fires, name), f"{name} ends")


def _is_over(fires: Fires, name: str) -> bool:
    return not fires(name)


def _ask_and_see(stage: Stage, fires: Fires, name: str) -> bool:
    stage.ask(50, depth=None)
    return fires(name)


def ask_daemon(daemon: Daemon) -> Fires:
    """Return what tells whether the daemon's own watch says that an alert fires."""

    def fires(name: str) -> bool:
        alerts: list[dict[str, Any]] = query_daemon(daemon.admin, "/admin/alerts")["alerts"]
        return any(one["alert"] == name and one["state"] == "firing" for one in alerts)

    return fires


@contextlib.contextmanager
def running_prometheus(directory: Path, target_port: int) -> Iterator[Fires]:
    """Run Prometheus with the shipped rules, in a hundredth of their times; yields what tells whether one fires."""
    (directory / "rules.yaml").write_text(write_rules(FACTOR))
    (directory / "prometheus.yaml").write_text(
        "global: {scrape_interval: 500ms, scrape_timeout: 500ms, evaluation_interval: 500ms}\n"
        f"rule_files: [{directory}/rules.yaml]\n"
        f"scrape_configs: [{{job_name: outrider, static_configs: [{{targets: ['127.0.0.1:{target_port}']}}]}}]\n"
    )
    port = find_port()
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

    def fires(name: str) -> bool:
        alerts = httpx.get(f"{url}/api/v1/alerts").json()["data"]["alerts"]
        return any(one["labels"]["alertname"] == name and one["state"] == "firing" for one in alerts)

    try:
        _until(lambda: _is_ready(url), "Prometheus is ready")
        yield fires
    finally:
        process.terminate()
        process.wait()


def find_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        return int(tried.getsockname()[1])


def _is_ready(url: str) -> bool:
    try:
        return httpx.get(f"{url}/-/ready").is_success
    except httpx.TransportError:
        return False


def _until(holds: Callable[[], object], what: str) -> None:
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        if holds():
            return
        time.sleep(0.1)
    raise TimeoutError(f"not within {WITHIN_S:g} s: {what}")


def main() -> int:
    """Fire them, and print what was seen."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", action="store_true", help="evaluate them in a real Prometheus")
    parser.add_argument("--only", choices=[*CASES, "drift"], help="this case alone")
    asked = parser.parse_args()
    failed: list[str] = []

    def attempt(name: str, do: Callable[[], None]) -> None:
        begun_s = time.monotonic()
        try:
            do()
            print(f"fired and ended: {name} ({time.monotonic() - begun_s:.0f} s)", flush=True)
        except (TimeoutError, RuntimeError, AssertionError) as error:
            failed.append(name)
            print(f"FAILED: {name}: {error}", flush=True)

    with tempfile.TemporaryDirectory() as kept, contextlib.ExitStack() as stack:
        port = find_port()
        prometheus: Fires | None = None
        if asked.prometheus:
            prometheus = stack.enter_context(running_prometheus(Path(kept), port))
            absent = prometheus
            attempt("OutriderAbsent fires", lambda: _until(lambda: absent("OutriderAbsent"), "OutriderAbsent fires"))
        one, other = Path(kept) / "one", Path(kept) / "other"
        for directory in (one, other):
            directory.mkdir()
        if asked.only != "drift":
            with running(write_config(one, port)) as daemon:
                fires = prometheus or ask_daemon(daemon)
                if prometheus is not None:
                    attempt("OutriderAbsent", lambda: _until(lambda: not fires("OutriderAbsent"), "Absent ends"))
                else:
                    attempt("OutriderAbsent", lambda: _until(lambda: _has_ended(daemon), "OutriderAbsent ended"))
                stage = Stage(daemon, one)
                for name in [asked.only] if asked.only else CASES:
                    attempt(", ".join(CASES[name].alerts), partial(run_case, name, stage, fires))
        if asked.only in (None, "drift"):
            told = (lambda daemon: prometheus) if prometheus is not None else ask_daemon
            attempt("OutriderPredictionsDrift", lambda: fire_drift(other, told, port))
    return 1 if failed else 0


def _has_ended(daemon: Daemon) -> bool:
    """Return whether OutriderAbsent fired while the model was loaded, and ended."""
    return any(one["alert"] == "OutriderAbsent" for one in query_daemon(daemon.admin, "/admin/alerts")["ended"])


if __name__ == "__main__":
    sys.exit(main())
