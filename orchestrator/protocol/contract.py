"""The contract of whatever starts a worker process, and of what runs inside one."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import msgspec

from orchestrator.protocol.commands import Command
from orchestrator.protocol.events import Event

MEMORY_SHARE = "memory_share"
"""The option of an entry that says how small its model is to be: one part in so many of its KV cache and forwards."""

NODE_ADDRESS = "OUTRIDER_NODE_ADDRESS"
"""The environment variable that says at which address other machines of the cluster reach this worker's."""


class Step(NamedTuple):
    """What an engine is at."""

    stage: str
    expected_ms: float
    """The predicted time of it, below 0 where there is no prediction."""


class Engine(Protocol):
    """What runs inside a worker process. `run` blocks in the worker's main thread until stopped.

    `emit` may be called from any thread and never blocks on the other side of the boundary.
    """

    def submit(self, command: Command) -> None:
        """Queue a command. Thread-safe; returns at once."""
        ...

    def describe_step(self) -> Step | None:
        """Return what it is at; None while it waits for commands, or where nobody is to watch it. Thread-safe."""
        ...

    def run(self, emit: Callable[[Event], None]) -> None:
        """Prepare, load, emit Ready, then run rounds until a Stop command. A failure is emitted as Failed."""
        ...


class WorkerSpec(msgspec.Struct, frozen=True):
    """What to start."""

    name: str
    entry: str
    """"package.module:function" that takes `options` and returns an Engine."""
    options: dict[str, Any]
    cpus: float = 1.0
    """What Ray counts for it without a reserved place."""
    environment: dict[str, str] = {}
    """Added to the worker's own."""
    node: str = ""
    """The address of the host that it is to run on, where the cluster has several. "": any; "here": the daemon's."""
    cores: list[int] = []
    """The CPU cores that it may run on, by their numbers on that host; none: all."""
    device: str = ""
    """That it computes on, as its runtime names it; "": none is known."""
    further_devices: list[str] = []
    """Those of its other ranks and layers, and of drafts inside it."""
    reserved_cpus: float = 0.0
    """CPUs of its host that no other tenant of a Ray cluster gets while it runs. Nor does one get its devices, if Ray
    counts such."""
    parts: list[WorkerSpec] = []
    """Workers that are started before it, and end with it."""
    endpoints_at: list[str] = []
    """The place in its options where the endpoints of its parts stand, in their order."""


class Worker(Protocol):
    """A started worker process, seen from the daemon. All methods are for the event loop that started it."""

    @property
    def where(self) -> str:
        """Name the host and process for people ("local pid 123", "ray node 10.0.0.2 pid 123")."""
        ...

    @property
    def pids(self) -> Sequence[int]:
        """Return the numbers of its processes, each on the host that it is on."""
        ...

    def send(self, command: Command) -> None:
        """Queue a command; never blocks. A lost worker drops it: its end is reported by `events`."""
        ...

    def events(self) -> AsyncIterator[Event]:
        """Yield events in order until the worker ends.

        Ends normally after a Stop command; otherwise raises WorkerLost, which says how it ended, e.g. by
        which signal. To be iterated once.
        """
        ...

    async def stop(self, grace_s: float) -> None:
        """Send Stop, wait up to `grace_s`, then kill. Idempotent; leaves no process behind."""
        ...


class ClusterMembers(msgspec.Struct, frozen=True):
    """The hosts of a Ray cluster whose head is at `address`. `alive`: addresses of those that the head knows; none
    while it is away. `lost`: of those that were there since this daemon began, and went without a leave."""

    address: str
    alive: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


class Cluster(Protocol):
    """Starts workers. One contract suite runs over every implementation."""

    @property
    def runtime(self) -> str:
        """Return "local" or "ray"."""
        ...

    async def open(self) -> None:
        """Connect or start what is needed. Raises WorkerError with the way out."""
        ...

    async def nodes(self) -> list[str]:
        """Return the addresses of the hosts that workers can be started on, for `WorkerSpec.node`; "" where there is
        this machine only. To be called after `open`."""
        ...

    @property
    def own_node(self) -> str:
        """Which of `nodes` is the daemon's own host; "" where that is not known."""
        ...

    @property
    def away(self) -> str:
        """Why no worker can be started now, where that was possible before, and may be again; "" where one can.
        Thread-safe."""
        ...

    @property
    def members(self) -> ClusterMembers | None:
        """The hosts of a cluster that others may join, as its head said last; None of this machine alone."""
        ...

    async def start(self, spec: WorkerSpec) -> Worker:
        """Start a worker process; returns before it is ready. Raises WorkerStartFailed."""
        ...

    async def close(self) -> None:
        """Stop every worker still running and whatever `open` started. Idempotent."""
        ...


@runtime_checkable
class AdoptingCluster(Cluster, Protocol):
    """A cluster whose workers may outlive their daemon."""

    def is_left_behind(self, spec: WorkerSpec) -> bool:
        """Return whether a worker that is like one of this spec waits for a daemon; to be called after `open`."""
        ...


@runtime_checkable
class AheadCluster(Cluster, Protocol):
    """A cluster that starts workers before anybody can follow them."""

    async def start_ahead(self, spec: WorkerSpec) -> None:
        """Open the cluster and start a worker. The first `start` of one of that name takes it, where it is the same,
        and else ends it. Raises WorkerError."""
        ...
