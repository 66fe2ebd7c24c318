"""A real llama-server in a process of its own, out of the wheel of xllamacpp."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
from outrider_lab.free_port import find_free_port
from outrider_lab.peers import llama_wheel

from tests.support.waiting import until

_ENDS_WITHIN_S = 30.0


@dataclass
class LlamaServer:
    """`process`: the one that runs, or ran last."""

    model: Path
    port: int
    slots: int
    log: Path
    process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def start(self) -> None:
        """Start it, or start it again, and do not wait until it has loaded."""
        self.kill()
        options = ["-m", str(self.model), "--port", str(self.port), "-t", "1", "-c", "2048", "-np", str(self.slots)]
        with self.log.open("ab") as output:
            command = [sys.executable, llama_wheel.__file__, *options]
            self.process = subprocess.Popen(command, stdout=output, stderr=output)

    def wait_ready(self) -> None:
        until(self._is_ready)

    def _is_ready(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, self.log.read_text(errors="replace")
        try:
            return httpx.get(f"{self.url}/health", timeout=5.0).status_code == httpx.codes.OK
        except httpx.HTTPError:
            return False

    def send_signal(self, number: int) -> None:
        assert self.process is not None
        self.process.send_signal(number)

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait(_ENDS_WITHIN_S)

    def ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """Ask it by itself, beside whoever else does."""
        with httpx.Client(base_url=self.url, timeout=120.0) as client:
            return (client.get(path) if body is None else client.post(path, json=body)).raise_for_status().json()

    def count_busy(self) -> int:
        """Return how many of its slots work."""
        return sum(slot["is_processing"] for slot in self.ask("/slots"))


@contextmanager
def running_llama_server(model: Path, directory: Path, *, slots: int = 2, start: bool = True) -> Iterator[LlamaServer]:
    """A server, ready unless it is not to `start`, and gone afterwards."""
    server = LlamaServer(model, find_free_port(), slots, directory / "llama-server.log")
    try:
        if start:
            server.start()
            server.wait_ready()
        yield server
    finally:
        server.kill()
