"""A daemon that several files of clients ask."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.daemon import Daemon, starting

START_S = 1200.0
"""Its first start, which measures numerical classes, takes minutes beside other load."""


@pytest.fixture(scope="module")
def seas(tmp_path_factory: pytest.TempPathFactory, default_model_path: Path, shared_store: Path) -> Iterator[Daemon]:
    """A daemon with the default model, which it calls `seas`."""
    directory = tmp_path_factory.mktemp("clients")
    config = directory / "cluster.yaml"
    config.write_text(
        f"model: {{source: '{default_model_path}', name: seas}}\n"
        f"api: {{port: 0, admin_socket: '{directory}/admin.sock'}}\n"
        f"store: {{directory: '{shared_store}'}}\n"
        f"state: {{directory: '{directory}/state'}}\n"
        "journal: {reserve: 1 MiB}\n"
        "logging: {format: json}\n"
    )
    with starting(config) as started:
        started.wait_ready(START_S)
        yield started
