"""Builds the engine of a draft worker: one draft model, behind a door."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from typing import Any

import msgspec

from orchestrator.bootstrap.drafters import draft_state
from orchestrator.bootstrap.models import load_model
from orchestrator.bootstrap.options import DraftWorkerOptions
from orchestrator.clock import SystemClock
from orchestrator.cluster.cores import effective_cores
from orchestrator.cluster.port import Event, Progress
from orchestrator.cluster.worker import NODE_ADDRESS
from orchestrator.drafting.host import DraftEngine, Hosted
from orchestrator.drafting.model import ModelDrafter

Emit = Callable[[Event], None]


def build_draft_engine(options: dict[str, Any]) -> DraftEngine:
    """Return the engine of a draft worker. Called inside the worker process."""
    settings = msgspec.convert(options, DraftWorkerOptions)
    return DraftEngine(lambda emit: _load(settings, emit), SystemClock())


def _load(options: DraftWorkerOptions, emit: Emit) -> Hosted:
    started = time.perf_counter()
    draft = options.draft
    loaded = load_model(draft.model, options.slots, lambda stage, fraction: emit(Progress(stage, fraction)))
    spec = loaded.model.spec
    planned = loaded.plan.total if loaded.plan else 0  # the process is the draft's own
    drafter = ModelDrafter(
        loaded.model,
        msgspec.structs.replace(draft_state(draft, loaded), cores=effective_cores(), planned_memory_bytes=planned),
        SystemClock(),
        vocabulary=spec.vocabulary_size,
        prefill_ms=draft.prefill_ms,
    )
    return Hosted(
        drafter,
        vocabulary_size=spec.vocabulary_size,
        vocabulary_fingerprint=spec.vocabulary_fingerprint,
        host=os.environ.get(NODE_ADDRESS, "") if options.across_hosts else "",
        runs_ahead=draft.remote.overlap if draft.remote is not None else "never",
        load_s=time.perf_counter() - started,
    )
