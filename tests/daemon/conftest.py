"""What the tests of the daemon share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.daemon import Daemon, configuration, running


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    """A daemon over the simulated model without drafts: what it says is what every other one has to say."""
    with running(configuration(tmp_path_factory.mktemp("plain"), extra="drafts: []")) as daemon:
        yield daemon
