"""A real daemon in a process of its own, over the simulated model unless told otherwise."""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any

import httpx
from openai import OpenAI

from orchestrator.cli.daemon_socket import StatusError, query_daemon
from tests.support.waiting import until
from tests.support.warm import WarmProcess, start_outrider

READY_WITHIN_S = 240.0
STOP_WITHIN_S = 120.0
COMMAND_WITHIN_S = 280.0


@dataclass(frozen=True)
class Daemon:
    """A running daemon. `client` speaks its public API and never retries."""

    process: WarmProcess | subprocess.Popen[bytes]
    url: str
    admin: Path
    log: Path
    client: OpenAI

    def status(self) -> dict[str, Any]:
        """What `outrider status --json` prints."""
        return query_daemon(self.admin)

    def wait_for(self, what: str, seconds: float = 120.0, **expected: Any) -> None:
        """Wait until the status' section `what` shows the expected values."""
        found: dict[str, Any] = {}

        def shows() -> bool:
            found.update(self.status())
            section = found if what == "" else found[what] or {}
            return all(section.get(key) == value for key, value in expected.items())

        try:
            until(shows, seconds)
        except AssertionError:
            raise AssertionError(f"{what} never showed {expected}: {found}") from None

    def wait_ready(self, seconds: float = READY_WITHIN_S) -> None:
        """Wait until it serves."""
        deadline = time.monotonic() + seconds
        while httpx.get(f"{self.url}/ready").status_code != httpx.codes.OK:
            if self.process.poll() is not None:
                raise AssertionError(f"the daemon ended with {self.process.returncode}:\n{self.log.read_text()}")
            assert time.monotonic() < deadline, f"the daemon was not ready:\n{self.log.read_text()}"
            time.sleep(0.05)

    def kill(self) -> None:
        """Send SIGKILL to the daemon alone, and wait for its end."""
        self.process.kill()
        self.process.wait()

    def stop(self) -> int:
        """Send SIGTERM and return the exit code."""
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(STOP_WITHIN_S)


def configuration(
    directory: Path, *, script: str = "", runtime: str = "local", extra: str = "", replicas: str = "1"
) -> Path:
    """Write a cluster.yaml over the simulated model. Its journal takes little of the disk: pytest keeps directories."""
    path = directory / "cluster.yaml"
    journal = "" if "journal:" in extra else "journal: {reserve: 1 MiB}\n"
    path.write_text(
        f"model: {{source: 'simulated:toy?{script}', adapter: simulated, name: toy, replicas: {replicas}}}\n"
        f"cluster: {{runtime: {runtime}}}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\n"
        f"store: {{directory: '{directory}/store'}}\n"
        f"state: {{directory: '{directory}/state'}}\n"
        f"logging: {{format: json}}\n{extra}\n{journal}",
        encoding="utf-8",
    )
    return path


def outrider_process(*arguments: str) -> subprocess.CompletedProcess[str]:
    """Run a command in a process of its own, to its end."""
    with TemporaryFile() as output, TemporaryFile() as errors:
        process = start_outrider(list(arguments), output.fileno(), errors.fileno())
        try:
            code = process.wait(COMMAND_WITHIN_S)
        finally:
            process.kill()
        output.seek(0)
        errors.seek(0)
        return subprocess.CompletedProcess(arguments, code, output.read().decode(), errors.read().decode())


@contextmanager
def running(config: Path, *arguments: str) -> Iterator[Daemon]:
    """Start `outrider serve`, wait until it is ready, and see that it is gone at the end."""
    with starting(config, *arguments) as daemon:
        daemon.wait_ready()
        yield daemon


@contextmanager
def starting(config: Path, *arguments: str) -> Iterator[Daemon]:
    """Start `outrider serve`, wait until it can be asked, and see that it is gone at the end."""
    with config.with_suffix(".log").open("wb") as output:
        process = start_outrider(["serve", "--config", str(config), *arguments], output.fileno(), output.fileno())
        with following(process, config) as daemon:
            yield daemon


@contextmanager
def following(process: WarmProcess | subprocess.Popen[bytes], config: Path) -> Iterator[Daemon]:
    """Wait until a daemon that was started with this configuration can be asked, and see that it is gone at the
    end."""
    log, admin = config.with_suffix(".log"), config.parent / "admin.sock"
    try:
        url = _wait_url(process, admin, log)
        with OpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as client:
            yield Daemon(process, url, admin, log, client)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            try:
                process.wait(STOP_WITHIN_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _wait_url(process: WarmProcess | subprocess.Popen[bytes], admin: Path, log: Path) -> str:
    """Return where the API listens, once it does."""
    deadline = time.monotonic() + READY_WITHIN_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise AssertionError(f"the daemon ended with {process.returncode}:\n{log.read_text()}")
        url = read_url(admin)
        if url:
            return url
        time.sleep(0.05)
    raise AssertionError(f"the daemon never listened:\n{log.read_text()}")


def read_url(admin: Path) -> str:
    """Where the API is, said over the admin socket; "" while none listens: it is there a moment before one does."""
    try:
        return str(query_daemon(admin)["api"]).removesuffix("/v1")
    except StatusError:
        return ""
