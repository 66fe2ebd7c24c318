"""A target worker over the toy model whose drafts come from a draft worker."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

from orchestrator.clock import SystemClock
from orchestrator.protocol.contract import WorkerSpec
from orchestrator.protocol.events import Event
from orchestrator.protocol.ready import Ready
from orchestrator.worker.drafting.remote.connection import WorkerGreeter
from orchestrator.worker.drafting.remote.drafter import RemoteDrafter, RemoteLimits
from orchestrator.worker.engine.kv_transfer.mover import KvMover
from orchestrator.worker.engine.variants import SpeculationVariants, VariantDepth
from orchestrator.worker.engine.worker_engine import LoadedEngine, WorkerEngine
from orchestrator.worker.loading.drafters import follow_attachment
from tests.support.drafters import FINGERPRINT, VOCABULARY
from tests.support.loops import loop_over, toy
from tests.support.ready import PLAIN, change_ready


def target(options: dict[str, Any]) -> WorkerEngine:
    """Return a target worker's engine: the toy model, drafted for by the draft worker "knowing"."""

    def load(emit: Callable[[Event], None]) -> LoadedEngine:
        model = toy(script=options["script"])
        drafter = RemoteDrafter(
            "knowing",
            greet=WorkerGreeter(FINGERPRINT, "SIM"),
            limits=RemoteLimits(**options["limits"]),
            clock=SystemClock(),
            report=emit,
        )
        loop = loop_over(model, drafter)
        return LoadedEngine(
            loop,
            _ready(),
            drafter.close,
            lambda command: follow_attachment(drafter, command),
            SpeculationVariants(VariantDepth(12), {}),
            KvMover(model, ""),
        )

    return WorkerEngine(load, SystemClock())


def target_spec(*, script: str = "", **limits: float) -> WorkerSpec:
    """Return a target worker that a draft worker may be attached to."""
    return WorkerSpec("target", "tests.support.drafted:target", {"script": script, "limits": limits}, cpus=0.5)


def _ready() -> Ready:
    return change_ready(
        PLAIN,
        pid=os.getpid(),
        vocabulary_size=VOCABULARY,
        vocabulary_fingerprint=FINGERPRINT,
        adapter="simulated",
        device="SIM",
        device_name="simulated",
        weights="fp32",
        activations="fp32",
        kv_cache="fp32",
        slots=8,
        kv_blocks=4096,
        block_tokens=16,
        drafters=["knowing"],
        max_depth=12,
    )
