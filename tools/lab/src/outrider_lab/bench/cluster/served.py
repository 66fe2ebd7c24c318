"""A daemon on the first host of several or on this machine, and the load that is put on it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from pathlib import Path
from typing import Any

import httpx
import yaml

from outrider_lab.bench.cluster.hosts import BenchHosts
from outrider_lab.bench.errors import BenchError
from outrider_lab.bench.plan.texts import prompt_text
from outrider_lab.free_port import end_server, find_free_port, wait_until_served

MODEL = "bench"
"""What the model is called, whichever it is."""
_PORT = 8000  # each host has a network of its own
_READY_WITHIN_S = 300.0
_STOP_WITHIN_S = 60.0
_POLL_S = 0.2
_ANSWER_S = 120.0
_numbers = count()  # of prompts: no two begin alike


@dataclass(frozen=True, slots=True)
class Served:
    """A daemon that is ready. To be used on its own host. `ready_s`: how long it took."""

    process: subprocess.Popen[bytes]
    directory: Path
    ready_s: float
    port: int = _PORT

    @property
    def url(self) -> str:
        """Where the API is, for whoever is on the daemon's host."""
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def admin(self) -> Path:
        return self.directory / "admin.sock"

    def query(self, route: str) -> dict[str, Any]:
        """Return what an admin route says. Raises BenchError."""
        try:
            transport = httpx.HTTPTransport(uds=str(self.admin))
            with httpx.Client(transport=transport, timeout=_ANSWER_S) as client:
                found: dict[str, Any] = client.get(f"http://outrider{route}").json()
        except (httpx.HTTPError, OSError, ValueError) as error:
            raise BenchError(f"the daemon does not answer: {error}; see {self.directory / 'log'}") from error
        return found

    def count_tokens(self) -> dict[str, int]:
        """Return how many tokens each replica has made for clients. Raises BenchError."""
        replicas = self.query("/admin/status")["replicas"]
        return {str(replica["name"]): int(replica["totals"]["generated"]) for replica in replicas}

    def places(self) -> list[str]:
        """Return the addresses of the hosts that targets run on now."""
        parts = str(self.query("/admin/status")["worker"]).split(", ")
        return [part.split()[2] for part in parts if part.startswith("ray node")]

    def find_replica(self, address: str) -> str:
        """Return the name of the replica on a host, "" where there is none. Raises BenchError."""
        for replica in self.query("/admin/status")["replicas"]:
            if replica["worker"].startswith(f"ray node {address} "):
                return str(replica["name"])
        return ""

    def read_others(self, address: str, cores: Sequence[int]) -> float:
        """Return the share of a host's cores that the daemon says other programs take; 0 where it does not say."""
        for device in self.query("/admin/status")["devices"]:
            if device["name"] == f"{address}/CPU":
                shares = [float(device["cores"][str(core)]["others"]) for core in cores if str(core) in device["cores"]]
                return sum(shares) / len(shares) if shares else 0.0
        return 0.0

    def complete(self, fields: dict[str, Any]) -> str:
        """Return the text of one completion. Raises BenchError."""
        try:
            answer = httpx.post(f"{self.url}/completions", json=fields, timeout=_ANSWER_S)
            answer.raise_for_status()
            return str(answer.json()["choices"][0]["text"])
        except (httpx.HTTPError, KeyError, ValueError) as error:
            raise BenchError(f"a request failed: {error}; see {self.directory / 'log'}") from error


@contextmanager
def serve(hosts: BenchHosts | None, directory: Path, config: dict[str, Any]) -> Iterator[Served]:
    """Run `outrider serve` on the calling thread's host until it is ready, and stop it in the end. Without hosts it is
    on this machine, with a free port and no Ray. Raises BenchError."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / "cluster.yaml"
    port = _PORT if hosts is not None else find_free_port()
    whole = {
        **config,
        "api": {"port": port, "admin_socket": str(directory / "admin.sock")},
        "state": {"directory": str(directory / "state")},
    }
    if hosts is not None:
        whole["cluster"] = {"address": hosts.address}
    path.write_text(yaml.safe_dump(whole), encoding="utf-8")
    began_s = time.monotonic()
    with (directory / "log").open("wb") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "orchestrator.cli.main", "serve", "--config", str(path)],
            stdout=log,
            stderr=log,
            env={**os.environ, **(hosts.token if hosts is not None else {})},
        )
    try:
        if not wait_until_served(process, f"http://127.0.0.1:{port}/ready", _READY_WITHIN_S):
            lines = (directory / "log").read_text(encoding="utf-8", errors="replace").splitlines()
            raise BenchError(f"the daemon does not serve: {' | '.join(lines[-3:])}; see {directory / 'log'}")
        yield Served(process, directory, time.monotonic() - began_s, port)
    finally:
        end_server(process, _STOP_WITHIN_S)


def wait_until(happened: Callable[[], bool], seconds: float, what: str) -> float:
    """Return after how many seconds something happened. Raises BenchError."""
    began_s = time.monotonic()
    while not happened():
        if time.monotonic() - began_s > seconds:
            raise BenchError(f"{what}: not within {seconds:g} s")
        time.sleep(_POLL_S)
    return time.monotonic() - began_s


def measure_tokens_per_s(
    served: Served, concurrency: int, tokens: tuple[int, int], seconds: float, groups: Sequence[str] = ("",)
) -> dict[str, float]:
    """Return the tokens that each replica made in a second for so many clients, each with its next request when one
    ends: over the last three quarters of so long, after which they hang up. `tokens`: of each prompt and of each
    answer. `groups`: whose bits are asked for, by so many clients each; "" is any. To be called on the daemon's host.
    Raises BenchError."""
    return asyncio.run(_measure(served, concurrency, tokens, seconds, groups))


async def _measure(
    served: Served, concurrency: int, tokens: tuple[int, int], seconds: float, groups: Sequence[str]
) -> dict[str, float]:
    prompt_tokens, output_tokens = tokens

    async def ask_on(client: httpx.AsyncClient, group: str) -> None:
        while True:
            fields = {
                "model": MODEL,
                "prompt": await _write_prompt(client, next(_numbers), prompt_tokens),
                "max_tokens": output_tokens,
                "ignore_eos": True,
                "temperature": 0,
                **({"system_fingerprint": group} if group else {}),
            }
            (await client.post("/v1/completions", json=fields)).raise_for_status()

    async def count_steadily() -> dict[str, float]:
        await asyncio.sleep(seconds / 4)
        before, from_s = await asyncio.to_thread(served.count_tokens), time.monotonic()
        await asyncio.sleep(3 * seconds / 4)
        after, until_s = await asyncio.to_thread(served.count_tokens), time.monotonic()
        return {name: (made - before.get(name, 0)) / (until_s - from_s) for name, made in after.items()}

    limits = httpx.Limits(max_connections=None)
    root = served.url.removesuffix("/v1")
    async with httpx.AsyncClient(base_url=root, timeout=_ANSWER_S, limits=limits) as client:
        asking = [asyncio.ensure_future(ask_on(client, group)) for group in groups for _ in range(concurrency)]
        counting = asyncio.ensure_future(count_steadily())
        try:
            await asyncio.wait([counting, *asking], return_when=asyncio.FIRST_COMPLETED)
            for failed in asking:
                if failed.done():
                    failed.result()
            return await counting
        except httpx.HTTPError as error:
            raise BenchError(f"a request failed under load: {error!r}") from error
        finally:
            for task in (counting, *asking):
                task.cancel()
            await asyncio.gather(counting, *asking, return_exceptions=True)


async def _write_prompt(client: httpx.AsyncClient, number: int, tokens: int) -> list[int]:
    """Return a prompt of so many tokens, which begins like no other one."""
    text = f"{number}: {prompt_text(number, long=False)} "
    answer = await client.post("/tokenize", json={"model": MODEL, "prompt": text, "add_special_tokens": False})
    found: list[int] = answer.raise_for_status().json()["tokens"]
    return (found * (tokens // len(found) + 1))[:tokens]
