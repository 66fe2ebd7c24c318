"""What makes each alert fire, and end, in a real daemon over the simulated model: kills, crowds, slow devices."""

from __future__ import annotations

import contextlib
import os
import resource
import signal
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import openai

from orchestrator.cli.daemon_socket import query_daemon
from tests.support.daemon import Daemon, configuration, outrider_process, running
from tests.support.nvidia_machine import change_device, write_machine, write_machine_config
from tests.support.profiles import store_simulated_profiles

WITHIN_S = 120.0
DRIFT = "OutriderPredictionsDrift"
_SITE = "site"
_KILLS = "the @ sea"
"""A prompt that ends the worker: its script is armed by the token 64."""
_BREAKS_DRAFT = "the # sea"
"""A prompt that the draft's device is lost at: its script is armed by the token 35."""
Fires = Callable[[str], list[dict[str, str]]]
"""Returns the labels of each alert of that name that fires now."""


@dataclass
class Stage:
    """A daemon, and the files that make its models worse while they exist. `stack` ends the daemons that follow it."""

    daemon: Daemon
    directory: Path
    stack: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)

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
        """Send a signal to the target's worker, once it serves: what a lost one told stays in the status."""
        until(lambda: self.daemon.status()["phase"] == "ready", "a worker serves")
        os.kill(self.daemon.status()["ready"]["pid"], number)

    def start_again(self) -> None:
        """Start the next daemon of the same configuration, and wait until it serves."""
        self.daemon = self.stack.enter_context(running(self.directory / "cluster.yaml"))


class Cause(NamedTuple):
    """How alerts are made to fire, and to end (nothing: they end by themselves). `alerts`: with the labels that they
    must have. `work` goes on until they end; `past` is done first. `crowded`: the work itself is the cause. `watched`:
    by the daemon's own watch as well as by Prometheus."""

    what: str
    alerts: Mapping[str, dict[str, str]]
    make: Callable[[Stage], None]
    mend: Callable[[Stage], None] | None = None
    work: Callable[[Stage], None] | None = None
    past: Callable[[Stage], None] | None = None
    crowded: bool = False
    watched: bool = True


class Seen(NamedTuple):
    """An alert that fired so long after its cause was there, and ended so long after the cause was gone. Where it ends
    by itself, the second time begins when it fired."""

    alert: str
    cause: str
    labels: dict[str, str]
    fired_s: float
    cleared_s: float


class Scene(NamedTuple):
    """A configuration, and what is made to happen under it. `write` gets a directory, a port, and the time factor."""

    write: Callable[[Path, int, str], Path]
    causes: tuple[Cause, ...]


def _ask_five(stage: Stage) -> None:
    for _ in range(5):
        stage.ask()


def _change_class(stage: Stage) -> None:
    stage.spoil("kernel")
    stage.signal_worker(signal.SIGKILL)


def _crowd(stage: Stage) -> None:
    """Ask for small pieces of the cache, so that whatever one request gives back the next one takes."""
    with ThreadPoolExecutor(32) as pool:
        for number in range(64):
            pool.submit(stage.ask, 100, f"{number}" + " seas" * 8, None)


def _let_nothing_be_written(stage: Stage) -> None:
    pid = stage.daemon.process.pid
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (0, resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]))
    stage.daemon.client.completions.create(
        model="toy", prompt="the sea is", max_tokens=8, extra_headers={"Idempotency-Key": "journal"}
    )


def _let_all_be_written(stage: Stage) -> None:
    pid = stage.daemon.process.pid
    most = resource.prlimit(pid, resource.RLIMIT_FSIZE)[1]
    resource.prlimit(pid, resource.RLIMIT_FSIZE, (most, most))


def _hang(stage: Stage) -> None:
    thread = threading.Thread(target=stage.ask, args=(600, "a long way", 1), daemon=True)
    thread.start()
    until(lambda: (stage.daemon.status()["gauges"] or {}).get("running", 0) > 0, "a stream runs")
    stage.signal_worker(signal.SIGSTOP)


def _starve(stage: Stage) -> None:
    stage.spoil("full")
    stage.signal_worker(signal.SIGKILL)


def _lose_replica(stage: Stage) -> None:
    """Let the second replica have no worker any more: each of its next ones ends while it loads."""
    until(lambda: [one["phase"] for one in stage.daemon.status()["replicas"]] == ["ready"] * 2, "both replicas serve")
    stage.spoil("full")
    os.kill(stage.daemon.status()["replicas"][1]["ready"]["pid"], signal.SIGKILL)


def _feed(stage: Stage) -> None:
    stage.mend("full")
    stage.signal_worker(signal.SIGKILL)


def _change_standby(stage: Stage) -> None:
    """Take the target away while what is loaded has another kernel: that is its standby."""
    stage.spoil("kernel")
    stage.run("cordon", "worker", "target")


def _differ(**what: str) -> dict[str, dict[str, str]]:
    return {"OutriderNotAsConfigured": what}


MAIN = (
    Cause(
        "SIGKILL of the daemon",
        {"OutriderAbsent": {}},
        lambda stage: stage.daemon.kill(),
        Stage.start_again,
        watched=False,
    ),
    Cause(
        "an operator turns speculation off",
        _differ(what="override"),
        lambda stage: stage.run("speculation", "off"),
        lambda stage: stage.run("speculation", "reset"),
    ),
    Cause(
        "the draft's device is lost; then a new worker",
        _differ(what="drafter"),
        lambda stage: stage.ask(8, _BREAKS_DRAFT),
        lambda stage: stage.signal_worker(signal.SIGKILL),
        past=_ask_five,
    ),
    Cause("half of the KV cache does not fit the device; then it does", _differ(what="memory"), _starve, _feed),
    Cause(
        "SIGKILL of the worker",
        {"OutriderFailover": {"kind": "killed"}},
        lambda stage: stage.signal_worker(signal.SIGKILL),
    ),
    Cause(
        "the draft becomes another model, and then itself again",
        {"OutriderAcceptanceFell": {}, "OutriderAcceptanceLow": {}},
        lambda stage: stage.spoil("shift"),
        lambda stage: stage.mend("shift"),
        Stage.ask,
        _ask_five,
    ),
    Cause(
        "the draft's device becomes slow at a fixed depth, and then fast again",
        {"OutriderSpeculationSlower": {}, "OutriderDraftingCostsMore": {}},
        lambda stage: stage.spoil("slow_draft"),
        lambda stage: stage.mend("slow_draft"),
        Stage.ask,
        _ask_five,
    ),
    Cause(
        "a worker is killed, and the next one's kernels have other bits", {"OutriderClassChanged": {}}, _change_class
    ),
    Cause(
        "32 requests at a time, for 16 places and 1 MiB of KV cache",
        {"OutriderKvPressure": {"engine": "0"}},
        lambda stage: None,
        work=_crowd,
        crowded=True,
    ),
    Cause(
        "the target's device becomes slow, and then fast again",
        {"OutriderSloBurn": {"objective": "ttft"}},
        lambda stage: stage.spoil("slow_target"),
        lambda stage: stage.mend("slow_target"),
        lambda stage: stage.ask(1, depth=None),
    ),
    Cause(
        "a request that aborts each worker which computes it; then its release",
        {"OutriderQuarantine": {}},
        lambda stage: stage.ask(8, _KILLS, None),
        lambda stage: stage.run("quarantine", "release", "--all"),
    ),
    Cause(
        "the kernel lets the daemon write no file, as on a full disk; then it does",
        {"OutriderJournalShort": {"kind": "not_written"}},
        _let_nothing_be_written,
        _let_all_be_written,
    ),
    Cause(
        "SIGSTOP of the worker while it has a stream",
        {"OutriderWorkerHung": {}, "OutriderFailover": {"kind": "hung"}},
        _hang,
    ),
)
DRIFTING = (
    Cause(
        "a stored profile that the device is eleven times slower than; then it is not",
        {DRIFT: {}},
        lambda stage: stage.spoil("drift"),
        lambda stage: stage.mend("drift"),
        lambda stage: stage.ask(50, depth=None),
    ),
)
STANDING_BY = (
    Cause(
        "the target is cordoned, and its standby's kernels have other bits; then it is not",
        _differ(what="standby"),
        _change_standby,
        lambda stage: stage.run("uncordon", "worker", "target"),
    ),
)
LOSING = (
    Cause(
        "a replica's worker is killed, and its next ones find no room; then they do",
        {"OutriderReplicaFailed": {"reason": "restarts"}},
        _lose_replica,
        lambda stage: stage.mend("full"),
    ),
)

FAULTY = (
    Cause(
        "NVML counts errors of a device's memory that were not corrected; then it is reset",
        {"OutriderDeviceFault": {"device": "CUDA:0", "what": "memory"}},
        lambda stage: change_device(stage.directory / _SITE, 0, memory_errors=1),
        lambda stage: change_device(stage.directory / _SITE, 0, memory_errors=0),
    ),
    Cause(
        "NVML says that heat lowers a device's clocks; then nothing does",
        {"OutriderDeviceSlow": {"device": "CUDA:1"}},
        lambda stage: change_device(stage.directory / _SITE, 1, slowdowns=0x40),
        lambda stage: change_device(stage.directory / _SITE, 1, slowdowns=0),
    ),
)


def write_config(directory: Path, port: int = 0, alerts: str = "time_factor: 0.01") -> Path:
    """Write the cluster.yaml of most causes. `alerts` are keys of that section."""
    script = (
        f"base_ms=5&load_ms=1500&kernel_rows=1&kernel_while={directory}/kernel&fault=abort&arm=64&at=1"
        f"&drift_ms=1500&drift_while={directory}/slow_target&room_kib=512&room_while={directory}/full"
    )
    draft = (
        f"shift=1&shift_while={directory}/shift&drift_ms=20&drift_while={directory}/slow_draft"
        f"&fault=device_lost&arm=35&at=1"
    )
    extra = (
        f"drafts: [{{method: model, source: 'simulated:toy?{draft}', adapter: simulated}}]\n"
        f"limits: {{kv_cache: 1 MiB, max_running: 16}}\nslo: {{ttft_ms: 1200}}\n"
        f"alerts: {{every_s: 0.5, {alerts}}}"
    )
    return _set_port(configuration(directory, script=script, extra=extra), port)


def _write_drifting(directory: Path, port: int, alerts: str) -> Path:
    """Write one that plans by a stored profile."""
    script = f"base_ms=2&drift_ms=20&drift_while={directory}/drift"
    store_simulated_profiles(directory / "store" / "profiles", {"SIM": 2.0}, script=script)
    extra = f"drafts: []\nplacement: {{profile: never, drift_after_s: 3600}}\nalerts: {{every_s: 0.5, {alerts}}}"
    path = configuration(directory, script=script, extra=extra)
    path.write_text(path.read_text().replace("adapter: simulated", "adapter: auto, device: auto", 1))
    return _set_port(path, port)


def _write_standing_by(directory: Path, port: int, alerts: str) -> Path:
    """Write one with a standby that is loaded when the target is gone."""
    extra = (
        "drafts: []\nfailover: {back_after_s: 0.5, after_s: 0.5, standby: [{readiness: warm}]}\n"
        f"alerts: {{every_s: 0.5, {alerts}}}"
    )
    script = f"base_ms=5&kernel_rows=1&kernel_while={directory}/kernel"
    return _set_port(configuration(directory, script=script, extra=extra), port)


def _write_losing(directory: Path, port: int, alerts: str) -> Path:
    """Write one with two replicas, of which a lost one is out at once."""
    script = f"base_ms=5&room_kib=1&room_while={directory}/full"
    extra = f"drafts: []\nalerts: {{every_s: 0.5, {alerts}}}"
    path = configuration(directory, script=script, extra=extra, replicas="2")
    path.write_text(path.read_text().replace("runtime: local", "runtime: local, max_restarts: 0"))
    return _set_port(path, port)


def _write_faulty(directory: Path, port: int, alerts: str) -> Path:
    """Write one over devices that are not there. Daemons that are started from now on find them."""
    write_machine(directory / _SITE)
    before = [path for path in (os.environ.get("PYTHONPATH"),) if path]
    os.environ["PYTHONPATH"] = os.pathsep.join([str(directory / _SITE), *before])
    return _set_port(write_machine_config(directory, f"alerts: {{every_s: 0.5, {alerts}}}"), port)


def _set_port(path: Path, port: int) -> Path:
    path.write_text(path.read_text().replace("port: 0", f"port: {port}"))
    return path


SCENES = (
    Scene(write_config, MAIN),
    Scene(_write_drifting, DRIFTING),
    Scene(_write_standing_by, STANDING_BY),
    Scene(_write_losing, LOSING),
    Scene(_write_faulty, FAULTY),
)


def play(cause: Cause, stage: Stage, fires: Fires) -> list[Seen]:
    """Make alerts fire, and see them end. Raises TimeoutError naming what did not come."""
    stop = threading.Event()

    def work() -> None:
        while cause.work is not None and not stop.is_set():
            cause.work(stage)

    until(lambda: not any(_match(fires, *one) for one in cause.alerts.items()), f"{', '.join(cause.alerts)} are silent")
    if cause.past is not None:
        cause.past(stage)
    worker = threading.Thread(target=work)
    begun_s = time.monotonic()
    cause.make(stage)
    worker.start()
    try:
        fired = _await_each(cause.alerts, fires, begun_s, fire=True)
        ended_s = None
        if cause.mend is not None:
            ended_s = time.monotonic()
            cause.mend(stage)
        elif cause.crowded:
            ended_s = time.monotonic()
            stop.set()
        cleared = _await_each(cause.alerts, fires, ended_s, fire=False, since=fired)
    finally:
        stop.set()
        worker.join()
    return [Seen(name, cause.what, fired[name].labels, fired[name].after_s, cleared[name].after_s) for name in fired]


class _Change(NamedTuple):
    at_s: float
    after_s: float
    labels: dict[str, str]


def _await_each(
    alerts: Mapping[str, dict[str, str]],
    fires: Fires,
    begun_s: float | None,
    *,
    fire: bool,
    since: Mapping[str, _Change] | None = None,
) -> dict[str, _Change]:
    """Wait until each fires, or none does; times are since `begun_s`, or else since each fired."""
    found: dict[str, _Change] = {}

    def look() -> bool:
        for name, labels in alerts.items():
            matching = _match(fires, name, labels)
            if name not in found and bool(matching) is fire:
                now_s = time.monotonic()
                from_s = begun_s if begun_s is not None else (since or {})[name].at_s
                found[name] = _Change(now_s, now_s - from_s, matching[0] if matching else {})
        return len(found) == len(alerts)

    try:
        until(look, "")
    except TimeoutError:
        missing = ", ".join(f"{name} {labels or ''}".strip() for name, labels in alerts.items() if name not in found)
        raise TimeoutError(f"not within {WITHIN_S:g} s: {missing} {'fires' if fire else 'ends'}") from None
    return found


def _match(fires: Fires, name: str, labels: dict[str, str]) -> list[dict[str, str]]:
    return [one for one in fires(name) if labels.items() <= one.items()]


def ask_daemon(stage: Stage) -> Fires:
    """Return what asks the daemon's own watch."""

    def fires(name: str) -> list[dict[str, str]]:
        alerts: list[dict[str, Any]] = query_daemon(stage.daemon.admin, "/admin/alerts")["alerts"]
        return [one["labels"] for one in alerts if one["alert"] == name and one["state"] == "firing"]

    return fires


def until(holds: Callable[[], object], what: str) -> None:
    """Wait until it holds. Raises TimeoutError naming it."""
    deadline = time.monotonic() + WITHIN_S
    while time.monotonic() < deadline:
        if holds():
            return
        time.sleep(0.1)
    raise TimeoutError(f"not within {WITHIN_S:g} s: {what}")
