"""Builds the two workers that measure the path between their hosts."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec

from adapters.contract import DeviceLost
from adapters.framing import ProtocolError
from orchestrator.protocol.contract import NODE_ADDRESS
from orchestrator.protocol.findings import Finding, ProbeOptions
from orchestrator.protocol.links.endpoint import LinkLost
from orchestrator.worker.measuring.engine import MeasuringEngine
from orchestrator.worker.measuring.links import EchoEngine, measure_link


def build_echo(options: dict[str, Any]) -> EchoEngine:
    """Return the engine that answers. Called inside the worker process."""
    return EchoEngine(os.environ.get(NODE_ADDRESS, "") if options["across"] else "")


def build_probe(options: dict[str, Any]) -> MeasuringEngine:
    """Return the engine that measures. Called inside the worker process."""
    wanted = msgspec.convert(options, ProbeOptions)
    return MeasuringEngine(lambda _progress: _probe(wanted))


def _probe(wanted: ProbeOptions) -> Iterator[Finding]:
    try:
        yield from measure_link(wanted.door, wanted.left, wanted.right)
    except (LinkLost, ProtocolError) as error:
        raise DeviceLost(f"the way from {wanted.left} to {wanted.right}: {error}") from error
