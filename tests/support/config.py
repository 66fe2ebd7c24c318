"""A cluster.yaml that is only text."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.load import _parse
from orchestrator.config.model import ClusterConfig


def parse_config(text: str, path: Path) -> ClusterConfig:
    """Check a cluster.yaml's text against the schema only. Raises ConfigError naming `path`."""
    return _parse(text, path)[0]
