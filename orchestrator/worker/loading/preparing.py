"""A worker that prepares a standby's model in the store, while the target serves, and holds nothing afterwards."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import msgspec

from orchestrator.protocol.load_options import EngineOptions
from orchestrator.protocol.measuring import Finding
from orchestrator.side_lane import LOWEST_PRIORITY
from orchestrator.worker.loading.prepared import prepare_model, prepare_tokenizer_of
from orchestrator.worker.measuring.engine import MeasuringEngine, OnProgress


def build_preparing(options: dict[str, Any]) -> MeasuringEngine:
    """Return the engine. Called inside the worker process, which takes only the time that nothing else wants."""
    os.nice(LOWEST_PRIORITY)
    wanted = msgspec.convert(options, EngineOptions)
    return MeasuringEngine(lambda progress: _prepare(wanted, progress))


def _prepare(options: EngineOptions, progress: OnProgress) -> Iterator[Finding]:
    prepared = prepare_model(options.model, progress)
    if prepared.file is not None:
        prepare_tokenizer_of(options.model, prepared.file, progress)
    yield from ()
