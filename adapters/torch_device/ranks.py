"""Rank 0's side of tensor parallelism: it starts the other ranks, sends them what it does itself, and finds out which
one failed.

Rank 0 alone keeps the books (slots, blocks, prefixes): the others get block numbers, in the order of rank 0's calls.
"""

from __future__ import annotations

import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from adapters.contract import AdapterError, DeviceLost, Hidden, LayerRange, LoadOptions, NumericalClass, ShardResult
from adapters.torch_device.attention import KvPool
from adapters.torch_device.model import KvMemory, PlanRunner
from adapters.torch_device.parts import LoadedPart, load_part
from adapters.torch_device.plan import ForwardPlan
from adapters.torch_device.rank_group import GroupBroken, RankGroup
from adapters.torch_device.rank_link import Call, Link, Operation, RankFailed, RankJob, RankPlace
from adapters.torch_device.runner import ForwardRunner

PATIENCE_S = 10.0
"""How long a rank waits for another within a forward. All compute the same at the same time: what one of them lags
behind is far below a forward. ADR 0081. Not tuned: a forward of a long prompt takes two seconds on a slow processor."""
_LAST_WORDS_S = 1.0
"""How long a failure of a rank may take to be known, once the others notice. ADR 0081. Not tuned."""
_ENDS_WITHIN_S = 30.0
"""How long a process may take to end whose link is closed. Not tuned: it has gigabytes to give back at most."""


class RankProcess:
    def __init__(self, rank: int) -> None:
        self.rank = rank
        ours, theirs = socket.socketpair()
        self.link = Link(ours)
        self.ended = threading.Event()
        started = threading.Event()
        # The kernel ends a process with the thread that started it: this one stays until the process has ended.
        thread = threading.Thread(target=self._keep, args=(theirs, started), name=f"rank {rank}", daemon=True)
        thread.start()
        started.wait()
        theirs.close()
        self.on_end: Callable[[], None] = lambda: None

    def _keep(self, theirs: socket.socket, started: threading.Event) -> None:
        command = [sys.executable, "-m", "adapters.torch_device.rank", "--fd", str(theirs.fileno())]
        self.process = subprocess.Popen(command, pass_fds=[theirs.fileno()], start_new_session=True)
        started.set()
        self.process.wait()
        self.ended.set()
        self.on_end()

    def receive(self) -> Any:
        """Return what the rank sends next. Raises what it failed with, DeviceLost where it is gone."""
        try:
            answer = self.link.receive()
        except OSError as error:
            raise self.describe_end(error) from error
        if isinstance(answer, RankFailed):
            raise answer.error
        return answer

    def describe_end(self, error: OSError) -> DeviceLost:
        """Return why nothing can be sent or received any more. A link that is closed says that the process ends: nobody
        else has that end of it, and on a busy machine its end takes as long as it takes."""
        if self.ended.wait(_LAST_WORDS_S if isinstance(error, TimeoutError) else _ENDS_WITHIN_S):
            code = self.process.returncode
            how = f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"
            return DeviceLost(f"rank {self.rank} of tensor parallelism (process {self.process.pid}) ended {how}")
        return DeviceLost(f"rank {self.rank} of tensor parallelism (process {self.process.pid}) is stuck: {error}")

    def end(self) -> None:
        """End the process, at once. Idempotent."""
        self.on_end = lambda: None
        self.link.close()
        with suppress(ProcessLookupError):
            self.process.kill()
        self.ended.wait()


class Ranks:
    """All ranks but rank 0. One thread calls it."""

    def __init__(self, job: RankJob, places: Sequence[RankPlace]) -> None:
        """Start a process for each place but the first. `job` is of rank 0. Raises OSError."""
        self._job, self._places = job, places
        self.group = RankGroup(0, len(places))
        self.processes = [RankProcess(rank) for rank in range(1, len(places))]
        self.page_bytes: list[int] = []

    def start(self) -> None:
        """Let all load, while rank 0 does. Raises DeviceLost."""
        for process in self.processes:
            self._send(process, replace(self._job, rank=process.rank, place=self._places[process.rank]))

    def connect(self, device: Any) -> None:
        """Wait until all have loaded, and meet them. Raises what failed there."""
        for process in self.processes:
            self.page_bytes.append(process.receive())
            process.link.set_patience(self._job.patience_s)
        self.post("connect")
        try:
            self.group.connect(self._job.meeting, device, self._job.patience_s)
        except GroupBroken as error:
            raise self.explain(error) from error
        for process in self.processes:
            process.receive()
        if device.type == "cpu":  # NCCL meets with the first sum
            shutil.rmtree(self._job.meeting.parent, ignore_errors=True)
        else:  # what waits there for a rank that has ended would wait until its patience ends
            for process in self.processes:
                process.on_end = self.group.abort

    def post(self, operation: Operation, *arguments: Any) -> None:
        """Let all do something. Raises DeviceLost."""
        for process in self.processes:
            self._send(process, Call(operation, arguments))

    def ask(self, rank: int, operation: Operation, *arguments: Any) -> Any:
        """Return a rank's answer. Raises DeviceLost."""
        self.send(rank, operation, *arguments)
        return self.processes[rank - 1].receive()

    def send(self, rank: int, operation: Operation, *arguments: Any) -> None:
        """Let one do something. Raises DeviceLost."""
        self._send(self.processes[rank - 1], Call(operation, arguments))

    def explain(self, error: AdapterError) -> AdapterError:
        """Return what a rank failed with, after others noticed: `error` is what rank 0 has seen of it. Where several
        have nothing to say yet, those that are well are waited for, but no longer than for a forward."""
        for process in self.processes:
            process.link.set_patience(_LAST_WORDS_S)
        left, until_s = self.processes, time.monotonic() + self._job.patience_s
        while True:
            ended: list[AdapterError] = []
            silent: dict[RankProcess, AdapterError] = {}
            for process in left:
                try:
                    process.receive()
                except GroupBroken:
                    continue  # it is well, and waited for another one
                except AdapterError as failure:
                    if process.ended.is_set():
                        ended.append(failure)
                    else:
                        silent[process] = failure
            left = list(silent)
            if ended or len(left) < 2 or time.monotonic() >= until_s:
                return next(iter([*ended, *silent.values()]), error)

    def close(self) -> None:
        """End all. Idempotent."""
        for process in self.processes:
            process.end()
        shutil.rmtree(self._job.meeting.parent, ignore_errors=True)

    def _send(self, process: RankProcess, command: Any) -> None:
        try:
            process.link.send(command)
        except OSError as error:
            raise process.describe_end(error) from error


class SplitMemory:
    """The KV caches of all ranks as one; see KvPool. Its caches are rank 0's, then those of each other rank."""

    def __init__(self, own: KvPool, caches: int, ranks: Ranks) -> None:
        self._own, self._caches, self._ranks = own, caches, ranks

    @property
    def layout(self) -> str:
        """Name the caches' shape, and that of the other ranks."""
        others = " + ".join(map(str, self._ranks.page_bytes))
        return f"{self._own.layout} + pages of {others} bytes"

    def list_page_bytes(self) -> tuple[int, ...]:
        return tuple(
            size for size in (self._own.list_page_bytes()[0], *self._ranks.page_bytes) for _ in range(self._caches)
        )

    def read_blocks(self, cache: int, blocks: Sequence[int]) -> Any:
        rank, own = divmod(cache, self._caches)
        if not rank:
            return self._own.read_blocks(own, blocks)
        return torch.from_numpy(self._ranks.ask(rank, "read_blocks", own, blocks))

    def write_blocks(self, cache: int, blocks: Sequence[int], pages: Any) -> None:
        rank, own = divmod(cache, self._caches)
        if rank:
            self._ranks.send(rank, "write_blocks", own, blocks, pages.numpy())
        else:
            self._own.write_blocks(own, blocks, pages)

    def copy(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        with suppress(DeviceLost):  # the next forward says so
            self._ranks.post("copy", sources, targets)
        self._own.copy(sources, targets)

    def erase(self, blocks: Sequence[int]) -> None:
        with suppress(DeviceLost):
            self._ranks.post("erase", blocks)
        self._own.erase(blocks)


class SplitRunner:
    """Runs a plan on all ranks; see ForwardRunner."""

    def __init__(self, own: ForwardRunner, ranks: Ranks) -> None:
        self.own, self.ranks = own, ranks

    def run(self, plan: ForwardPlan, hidden: Hidden | None = None) -> ShardResult:
        """See ForwardRunner. Raises what a rank failed with."""
        self.ranks.post("run", plan, hidden)
        try:
            return self.own.run(plan, hidden)
        except GroupBroken as error:
            raise self.ranks.explain(error) from error

    def take_memory_back(self) -> bool:
        """False: the other ranks are at a forward that rank 0 has no memory for."""
        return False

    def close(self) -> None:
        """End the other ranks. Idempotent."""
        self.ranks.close()


def load_ranks(
    prepared: Path,
    options: LoadOptions,
    chosen: NumericalClass,
    layers: LayerRange,
    blocks: int,
    places: Sequence[RankPlace],
) -> tuple[KvMemory, PlanRunner, LoadedPart]:
    """Load a model over places, and return what rank 0 drives all of it by, and rank 0's part. On one place that is
    this process. Raises what adapters raise, and torch's errors."""
    if len(places) == 1:
        whole = load_part(prepared, options, chosen, layers, blocks, places[0])
        return whole.memory, whole.runner, whole
    meeting = Path(tempfile.mkdtemp(prefix="outrider-ranks-")) / "ranks"
    ranks = Ranks(RankJob(prepared, options, chosen, layers, blocks, 0, places[0], meeting, PATIENCE_S), places)
    try:
        ranks.start()
        own = load_part(prepared, options, chosen, layers, blocks, places[0], ranks.group)
        ranks.connect(torch.device(places[0].device.lower()))
    except BaseException:
        ranks.close()
        raise
    caches = 2 * (layers.end - layers.first)
    return SplitMemory(own.memory, caches, ranks), SplitRunner(own.runner, ranks), own
