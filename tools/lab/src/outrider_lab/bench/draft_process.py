"""A draft worker in a process of its own, for benchmarks that need no daemon."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import Any

import msgspec

from orchestrator.machine.cores import pin_to_cores
from orchestrator.protocol.contract import NODE_ADDRESS
from orchestrator.protocol.draft_messages import DraftReady
from orchestrator.protocol.events import Event, Failed
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.load_options import DraftWorkerOptions
from orchestrator.worker.loading.draft_worker import build_draft_engine
from outrider_lab.bench.errors import BenchError


@contextmanager
def start_draft_process(
    options: DraftWorkerOptions, cores: Sequence[int] = (), address: str = ""
) -> Iterator[LinkEndpoint]:
    """Start a draft worker on these cores (none: on all), and yield where it is. `address`: other hosts reach it there,
    over an encrypted link ("": none do). Raises BenchError where it cannot load its model."""
    options = msgspec.structs.replace(options, across_hosts=bool(address))
    with hear_process("the draft worker", _serve, msgspec.to_builtins(options), list(cores), address) as told:
        yield told


@contextmanager
def hear_process(name: str, work: Callable[..., None], *of: Any) -> Iterator[Any]:
    """Let a process of its own, which may have other cores than this one, work, and yield what it sends first over the
    pipe that is its last argument. Raises BenchError where that is a text: why it cannot."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=work, args=(*of, theirs), daemon=True)
    process.start()
    theirs.close()
    try:
        try:
            told = ours.recv()
        except EOFError:
            raise BenchError(f"{name} ended before it had anything to tell") from None
        if isinstance(told, str):
            raise BenchError(f"{name}: {told}")
        yield told
    finally:
        process.kill()
        process.join()


def _serve(options: dict[str, Any], cores: list[int], address: str, ready: Connection[Any, Any]) -> None:
    """Run the draft worker in this process, and tell where it is."""

    def tell(event: Event) -> None:
        if isinstance(event, DraftReady):
            ready.send(event.endpoint)
        elif isinstance(event, Failed):
            ready.send(event.message)

    pin_to_cores(cores)
    os.environ[NODE_ADDRESS] = address
    build_draft_engine(options).run(tell)
