"""Builds the engine of a draft worker: one draft model, behind an endpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from orchestrator.clock import SystemClock
from orchestrator.machine.cores import effective_cores
from orchestrator.protocol.contract import NODE_ADDRESS
from orchestrator.protocol.events import Event, Progress
from orchestrator.protocol.load_options import DraftWorkerOptions
from orchestrator.worker.draft_server.server import DraftEngine, HostedDrafter, RunsAhead
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.loading.drafters import draft_state
from orchestrator.worker.loading.models import load_model, shrink_model
from policies.speculation.draft_pass import MOST_BRANCHES

Emit = Callable[[Event], None]


def build_draft_engine(options: dict[str, Any]) -> DraftEngine:
    """Return the engine of a draft worker. Called inside the worker process."""
    settings = msgspec.convert(options, DraftWorkerOptions)
    return DraftEngine(lambda emit: _load(settings, emit), SystemClock())


def _load(options: DraftWorkerOptions, emit: Emit) -> HostedDrafter:
    started = time.perf_counter()
    draft = options.draft
    draft = msgspec.structs.replace(draft, model=shrink_model(draft.model, options.memory_share))
    runs_ahead: RunsAhead = draft.remote.overlap if draft.remote is not None else "never"
    branches = 0 if runs_ahead == "never" else MOST_BRANCHES
    slots = options.slots + branches

    def progress(stage: str, fraction: float) -> None:
        emit(Progress(stage, fraction))

    loaded = load_model(draft.model, slots, progress, logits_rows=slots)
    spec = loaded.model.spec
    planned = loaded.plan.total if loaded.plan else 0  # the process is the draft's own
    drafter = ModelDrafter(
        loaded.model,
        msgspec.structs.replace(draft_state(draft, loaded), cores=effective_cores(), planned_memory_bytes=planned),
        SystemClock(),
        vocabulary=spec.vocabulary_size,
        prefill_ms=draft.prefill_ms,
        branches=branches > 0,
    )
    drafter.measure()
    return HostedDrafter(
        drafter,
        vocabulary_size=spec.vocabulary_size,
        vocabulary_fingerprint=spec.vocabulary_fingerprint,
        host=os.environ.get(NODE_ADDRESS, "") if options.across_hosts else "",
        runs_ahead=runs_ahead,
        load_s=time.perf_counter() - started,
    )
