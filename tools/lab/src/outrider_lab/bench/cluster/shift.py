"""How soon requests leave a host that another program takes half of, and how soon they come back."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import httpx

from outrider_lab.bench.cluster.served import wait_until
from outrider_lab.bench.errors import BenchError

FEW = 0.25
"""The share of the newest requests below which a replica is left, as good as."""
_AT_ONCE = 4
_NEWEST = 16
_TOKENS = 12
_WITHIN_S = 60.0
_SETTLE_S = 5.0
_ANSWER_S = 60.0
_JOIN_S = 30.0
Shift = dict[str, float]
"""Times in seconds from the competitor's start and from its end on, and shares of requests and of time."""
_BUSY = "import os, sys\nos.sched_setaffinity(0, {int(sys.argv[1])})\nwhile True: pass"


class Traffic:
    """Requests, four at a time, each with a prompt of its own, while it is entered. `newest`: the replicas that had the
    last ones. Its threads are on the host of whoever enters it."""

    def __init__(self, url: str, admin: Path, model: str) -> None:
        self._url, self._admin, self._model = url, admin, model
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._sent = 0
        self.failure = ""
        self.newest: deque[str] = deque(maxlen=_NEWEST)
        self._threads = [threading.Thread(target=self._ask, daemon=True) for _ in range(_AT_ONCE)]

    def __enter__(self) -> Traffic:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._ended.set()
        for thread in self._threads:
            thread.join(_JOIN_S)

    def share_of(self, replica: str) -> float:
        """Return the share of the newest requests that went to a replica; below 0 before there are enough. Raises
        BenchError where a request failed."""
        if self.failure:
            raise BenchError(f"a request failed: {self.failure}")
        newest = list(self.newest)
        return newest.count(replica) / len(newest) if len(newest) == _NEWEST else -1.0

    def _ask(self) -> None:
        transport = httpx.HTTPTransport(uds=str(self._admin))
        with (
            httpx.Client(base_url=self._url, timeout=_ANSWER_S) as client,
            httpx.Client(base_url="http://outrider", transport=transport, timeout=_ANSWER_S) as admin,
        ):
            while not self._ended.is_set():
                with self._lock:
                    self._sent += 1
                    number = self._sent
                body = {"model": self._model, "prompt": f"{number} sheep in the field", "max_tokens": _TOKENS}
                try:
                    answer = client.post("/completions", json={**body, "ignore_eos": True}).raise_for_status()
                    found = admin.get(f"/admin/explain/{answer.json()['id']}").raise_for_status()
                    self.newest.append(found.json()["routes"][0]["replica"])
                except (httpx.HTTPError, KeyError, ValueError) as error:
                    self.failure = repr(error)
                    return


@contextmanager
def compete(cores: Sequence[int]) -> Iterator[None]:
    """Run a busy loop on each of these cores."""
    busy = [subprocess.Popen([sys.executable, "-c", _BUSY, str(core)]) for core in cores]
    try:
        yield
    finally:
        for one in busy:
            one.kill()
            one.wait()


def measure_shift(
    traffic: Traffic, find_replica: Callable[[], str], cores: Sequence[int], read_others: Callable[[], float]
) -> Shift:
    """Return how soon requests leave a replica whose cores a competitor takes half of, and how soon they are back.
    `find_replica`: its name, which another plan may change. `read_others`: the share of these cores that the daemon
    says other programs take. Raises BenchError."""

    def share() -> float:
        return traffic.share_of(find_replica())

    wait_until(lambda: share() >= FEW, _WITHIN_S, "requests go there")
    time.sleep(_SETTLE_S)
    before, others_before = share(), read_others()
    bound = (1.0 + others_before) / 2.0 if others_before > FEW else FEW
    with compete(cores):
        began_s = time.monotonic()
        seen_s = wait_until(lambda: read_others() >= bound, _WITHIN_S, "the competitor is seen")
        wait_until(lambda: 0.0 <= share() <= FEW, _WITHIN_S, "requests leave")
        shift_s = time.monotonic() - began_s
        time.sleep(_SETTLE_S)
        during, others_during = share(), read_others()
    back_s = wait_until(lambda: share() >= FEW, _WITHIN_S, "requests come back")
    return {
        "seen_s": seen_s,
        "shift_s": shift_s,
        "back_s": back_s,
        "share_before": before,
        "share_during": during,
        "others_before": others_before,
        "others_during": others_during,
    }
