"""Two hosts on this machine, with a cable that can be cut or slowed, and a Ray cluster whose nodes can be lost."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from outrider_lab.bench.cluster.hosts import BenchHosts, make_hosts
from outrider_lab.chaos.relay import DEVICE
from outrider_lab.chaos.relay import TUN as TUN
from outrider_lab.chaos.service import ChaosError


def order_cable(hosts: BenchHosts, order: str) -> None:
    """Tell the cable what to do: `cut`, `up` or `delay MILLISECONDS`."""
    assert hosts.cable is not None  # noqa: S101  # two_hosts has set it
    assert hosts.cable.stdin is not None  # noqa: S101  # as above
    hosts.cable.stdin.write(f"{order}\n".encode())
    hosts.cable.stdin.flush()


def restart_head(hosts: BenchHosts) -> None:
    """Start a head again. It knows nothing of the far node, which is ended before and started again behind it.

    Ray looks for a head among all processes of the machine, and would take the far node for one of the near host.
    """
    hosts.leave(1)
    hosts.join(0)
    hosts.join(1)


@contextmanager
def two_hosts(environment: Mapping[str, str]) -> Iterator[BenchHosts]:
    """Make two hosts with Ray over both, and take all of it away in the end. Raises HostsError or ChaosError."""
    with make_hosts([(), ()], _lay_cable, environment) as hosts:
        hosts.join(0)
        hosts.join(1)
        yield hosts


def _lay_cable(hosts: BenchHosts) -> None:
    near, far = hosts.hosts
    process = hosts.cable = subprocess.Popen(
        [sys.executable, "-m", "outrider_lab.chaos.relay", near.name, far.name, DEVICE],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert process.stdout is not None  # noqa: S101  # it is a pipe
    if not process.stdout.readline():
        raise ChaosError("the relay between the hosts did not start")
