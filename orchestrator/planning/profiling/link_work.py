"""The two workers that measure the path between their hosts (worker.measuring.link_worker)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import combinations

import msgspec

from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.links.address import LinkEndpoint
from orchestrator.protocol.measuring import ProbeOptions

THIS_HOST = "this host"
"""What stands for the only host there is, in the names of links."""


def paths(nodes: Sequence[str]) -> list[tuple[str, str]]:
    """Return every path between workers: within each host, and between every two."""
    return [(node, node) for node in nodes] + list(combinations(nodes, 2))


def echo_spec(node: str, *, across: bool) -> WorkerSpec:
    """Return the worker that opens an endpoint, for other hosts too where the path goes `across`."""
    entry = "orchestrator.worker.measuring.links:build_echo"
    return WorkerSpec(name=f"echo {name_of(node)}", entry=entry, options={"across": across}, node=node, cpus=0.0)


def probe_spec(endpoint: LinkEndpoint, left: str, right: str) -> WorkerSpec:
    """Return the worker that measures, on `left`."""
    options = msgspec.to_builtins(ProbeOptions(endpoint, name_of(left), name_of(right)), builtin_types=(bytes,))
    entry = "orchestrator.worker.measuring.links:build_probe"
    return WorkerSpec(
        name=f"link {name_of(left)} to {name_of(right)}", entry=entry, options=options, node=left, cpus=0.0
    )


def name_of(node: str) -> str:
    """Return a host's name in links."""
    return node or THIS_HOST
