"""A cluster.yaml that is only text."""

from __future__ import annotations

from pathlib import Path

from orchestrator.config.load import parse_config as parse_text
from orchestrator.config.model import ClusterConfig


def parse_config(text: str, path: Path) -> ClusterConfig:
    """Check a cluster.yaml's text against the schema only. Raises ConfigError naming `path`."""
    return parse_text(text, path)[0]
