"""Builds the two workers that measure the path between their hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from itertools import combinations
from typing import Any

import msgspec

from adapters.contract import DeviceLost
from adapters.framing import ProtocolError
from orchestrator.links.address import LinkEndpoint
from orchestrator.links.endpoint import LinkLost
from orchestrator.measuring.engine import Found, MeasuringEngine
from orchestrator.measuring.links import EchoEngine, measure_link
from orchestrator.workers.contract import WorkerSpec
from orchestrator.workers.host import NODE_ADDRESS

THIS_HOST = "this host"
"""What stands for the only host there is, in the names of links."""


class ProbeOptions(msgspec.Struct, frozen=True):
    """An endpoint, and the names of both ends."""

    door: LinkEndpoint
    left: str
    right: str


def paths(nodes: Sequence[str]) -> list[tuple[str, str]]:
    """Return every path between workers: within each host, and between every two."""
    return [(node, node) for node in nodes] + list(combinations(nodes, 2))


def echo_spec(node: str, *, across: bool) -> WorkerSpec:
    """Return the worker that opens an endpoint, for other hosts too where the path goes `across`."""
    entry = "orchestrator.profiling.link_work:build_echo"
    return WorkerSpec(name=f"echo {name_of(node)}", entry=entry, options={"across": across}, node=node, cpus=0.0)


def probe_spec(door: LinkEndpoint, left: str, right: str) -> WorkerSpec:
    """Return the worker that measures, on `left`."""
    options = msgspec.to_builtins(ProbeOptions(door, name_of(left), name_of(right)), builtin_types=(bytes,))
    entry = "orchestrator.profiling.link_work:build_probe"
    return WorkerSpec(
        name=f"link {name_of(left)} to {name_of(right)}", entry=entry, options=options, node=left, cpus=0.0
    )


def name_of(node: str) -> str:
    """Return a host's name in links."""
    return node or THIS_HOST


def build_echo(options: dict[str, Any]) -> EchoEngine:
    """Return the engine that answers. Called inside the worker process."""
    return EchoEngine(os.environ.get(NODE_ADDRESS, "") if options["across"] else "")


def build_probe(options: dict[str, Any]) -> MeasuringEngine:
    """Return the engine that measures. Called inside the worker process."""
    wanted = msgspec.convert(options, ProbeOptions)
    return MeasuringEngine(lambda _progress: _probe(wanted))


def _probe(wanted: ProbeOptions) -> Iterator[Found]:
    try:
        yield from measure_link(wanted.door, wanted.left, wanted.right)
    except (LinkLost, ProtocolError) as error:
        raise DeviceLost(f"the way from {wanted.left} to {wanted.right}: {error}") from error
