"""How workers are started where nothing is left to a plan."""

from __future__ import annotations

from pathlib import Path

import msgspec

from orchestrator.config.model import ClusterConfig
from orchestrator.fitting.worker_options import draft_specs, engine_options, replica_draft_specs, worker_specs
from orchestrator.protocol.contract import WorkerSpec
from policies.speculation.state import COLD_DEPTH


def build_start_specs(
    config: ClusterConfig, base: Path, starting_depth: float = COLD_DEPTH
) -> tuple[list[WorkerSpec], list[WorkerSpec]]:
    """Return how the target's and the drafts' workers are started where nothing is left to a plan."""
    options = msgspec.structs.replace(engine_options(config, base), starting_depth=starting_depth)
    return worker_specs(options, config), draft_specs(options, config)


def build_replica_specs(config: ClusterConfig, base: Path) -> tuple[list[WorkerSpec], list[list[WorkerSpec]]]:
    """Return how the target's workers and their draft workers are started, where nothing is left to a plan."""
    options = engine_options(config, base)
    return worker_specs(options, config), replica_draft_specs(options, config)
