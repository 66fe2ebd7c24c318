"""Measures the link to a draft worker: how long a round's exchange takes beside the drafting itself.

A suffix drafter runs in this process and in another one (over a Unix socket, and over TCP on this machine); both are
asked the same. What the second takes longer is the link's.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

from orchestrator.clock import SystemClock
from orchestrator.drafting.port import Ask, Drafter
from orchestrator.drafting.remote import RemoteDrafter, RemoteLimits
from orchestrator.drafting.server import DraftEngine, HostedDrafter
from orchestrator.drafting.suffix import SuffixDrafter
from orchestrator.links.address import LinkEndpoint
from orchestrator.workers.draft_messages import DraftReady
from orchestrator.workers.messages import Event, Sampling

VOCABULARY = 49_152
PERIOD = 37
ROUNDS = 1000


def suffix() -> SuffixDrafter:
    """Return the drafter that is asked on both sides."""
    return SuffixDrafter(max_match=16, memory_bytes=0, clock=SystemClock())


def serve(ready: Connection[Any, Any]) -> None:
    """Run a draft worker in this process, and tell where it is."""

    def tell(event: Event) -> None:
        if isinstance(event, DraftReady):
            ready.send(event.door)

    hosted = HostedDrafter(suffix(), VOCABULARY, "bench", host="127.0.0.1", runs_ahead="never")
    DraftEngine(lambda emit: hosted, SystemClock()).run(tell)


@contextmanager
def worker() -> Iterator[LinkEndpoint]:
    """Start a draft worker."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=serve, args=(theirs,), daemon=True)
    process.start()
    try:
        yield ours.recv()
    finally:
        process.kill()
        process.join()


@contextmanager
def remote(door: LinkEndpoint) -> Iterator[RemoteDrafter]:
    """Connect to a draft worker."""
    connected: list[str] = []
    drafter = RemoteDrafter(
        "bench",
        fingerprint="bench",
        device="CPU",
        limits=RemoteLimits(max_wait_ms=1000.0),
        clock=SystemClock(),
        report=lambda link: connected.append(link.state),
    )
    drafter.attach(door)
    while "connected" not in connected:
        time.sleep(0.01)
    yield drafter
    drafter.close()


def exchange_us(drafter: Drafter, sequences: int, limit: int) -> list[float]:
    """Return how long `propose` took in each round that got its drafts, in microseconds. Two tokens a round are
    committed."""
    keys = [f"s{index}" for index in range(sequences)]
    for key in keys:
        drafter.begin(key, [index % PERIOD for index in range(200)], Sampling())
    took = []
    for number in range(ROUNDS):
        started = time.perf_counter()
        drafts = drafter.propose([Ask(key, limit) for key in keys])
        if all(draft.tokens for draft in drafts):
            took.append((time.perf_counter() - started) * 1e6)
        time.sleep(0.002)  # as long as a target may verify
        for key in keys:
            drafter.extend(key, [(200 + 2 * number) % PERIOD, (201 + 2 * number) % PERIOD])
    for key in keys:
        drafter.end(key, keep=False)
    return took[100:]


def row(name: str, sequences: int, took: Sequence[float]) -> str:
    """Return a line of the table."""
    centiles = statistics.quantiles(took, n=100)
    return f"{name:<14} {sequences:>9} {centiles[49]:>8.0f} {centiles[98]:>8.0f} {len(took) / (ROUNDS - 100):>11.1%}"


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--limit", type=int, default=1, help="tokens asked for, for each sequence; more are used up over rounds"
    )
    limit = parser.parse_args().limit
    print("propose        sequences   p50 us   p99 us with drafts")
    for sequences in (1, 16):
        print(row("in process", sequences, exchange_us(suffix(), sequences, limit)))
        with worker() as door:
            for name, kind in (("Unix socket", "unix"), ("TCP", "tcp")):
                addresses = [address for address in door.addresses if address.startswith(kind)]
                with remote(LinkEndpoint(addresses, door.key, door.certificate)) as drafter:
                    print(row(name, sequences, exchange_us(drafter, sequences, limit)))


if __name__ == "__main__":
    main()
