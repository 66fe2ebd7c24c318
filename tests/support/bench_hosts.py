"""Hosts with Ray for a test: network namespaces that it makes and removes itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from outrider_lab.bench.cluster.hosts import BenchHosts, HostsError, make_hosts


@contextmanager
def joined_hosts(monkeypatch: pytest.MonkeyPatch, count: int, joined: int) -> Iterator[BenchHosts]:
    """Make hosts, of which the first `joined` have Ray; skips the test where this user may not. What joins Ray finds
    its token in the environment."""
    try:
        with make_hosts([()] * count) as made:
            for name, value in made.token.items():
                monkeypatch.setenv(name, value)
            for number in range(joined):
                made.join(number)
            yield made
    except HostsError as error:
        pytest.skip(str(error))
