"""Loads a target as its worker does: `python -m tests.support.loading CLUSTER_YAML`, what came of it as a JSON line."""

from __future__ import annotations

import sys
from pathlib import Path

import msgspec

from adapters.contract import AdapterError, silent
from orchestrator.config.load import load_config
from orchestrator.fitting.worker_options import engine_options
from orchestrator.protocol.events import Failed
from orchestrator.protocol.failures import describe_loading_failure
from orchestrator.worker.loading.models import load_target


def main() -> None:
    """Print the failure, with an empty message where there is none."""
    path = Path(sys.argv[1])
    found = Failed("", restartable=True)
    try:
        load_target(engine_options(load_config(path), path.parent), silent, slots=2)
    except AdapterError as error:
        found = describe_loading_failure(error)
    sys.stdout.write(f"\n{msgspec.json.encode(found).decode()}\n")


if __name__ == "__main__":
    main()
