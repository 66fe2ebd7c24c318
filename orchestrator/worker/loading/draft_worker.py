"""Builds the engine of a draft worker: one draft model, behind an endpoint."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from orchestrator.clock import SystemClock
from orchestrator.machine.cores import effective_cores
from orchestrator.protocol.contract import NODE_ADDRESS
from orchestrator.protocol.events import Event, Progress
from orchestrator.protocol.load_options import DraftWorkerOptions, ModelDraftOptions, SuffixOptions
from orchestrator.worker.draft_server.server import DraftEngine, HostedDrafter, RunsAhead
from orchestrator.worker.drafting.cascade import Cascade, count_draft_rows
from orchestrator.worker.drafting.model import ModelDrafter
from orchestrator.worker.drafting.suffix import SuffixDrafter
from orchestrator.worker.loading.drafters import build_suffix, draft_state
from orchestrator.worker.loading.models import LoadedSource, load_model, shrink_model
from orchestrator.worker.loading.statistics import find_statistics
from policies.speculation.draft_pass import MOST_BRANCHES

Emit = Callable[[Event], None]
# ADR 0090: the longest match of a repetition. The table of certainty ends at 12.
_MATCH = 16
# For earlier outputs. 70,000 tokens of Python lists (ADR 0086). Not tuned.
_TEXTS_BYTES = 16 * 1024 * 1024
# Tokens beyond one: a pass asks for one more. ADR 0090.
_CHECKED_AHEAD = 4


def build_draft_engine(options: dict[str, Any]) -> DraftEngine:
    """Return the engine of a draft worker. Called inside the worker process."""
    settings = msgspec.convert(options, DraftWorkerOptions)
    return DraftEngine(lambda emit: _load(settings, emit), SystemClock())


def list_cheaper(draft: ModelDraftOptions, loaded: LoadedSource) -> Sequence[SuffixDrafter]:
    """Return the drafters whose tokens the model checks: this worker knows the texts, and the statistics of its model,
    where there are some. It is the model's own choice that they have to meet."""
    if not draft.cascade:
        return []
    options = SuffixOptions("suffix", _MATCH, _TEXTS_BYTES, "auto")
    return [build_suffix(options, statistics=find_statistics(options, draft.model, loaded))]


def _load(options: DraftWorkerOptions, emit: Emit) -> HostedDrafter:
    started = time.perf_counter()
    draft = options.draft
    draft = msgspec.structs.replace(draft, model=shrink_model(draft.model, options.memory_share))
    runs_ahead: RunsAhead = draft.remote.overlap if draft.remote is not None else "never"
    branches = 0 if runs_ahead == "never" else MOST_BRANCHES
    slots = options.slots + branches

    def progress(stage: str, fraction: float) -> None:
        emit(Progress(stage, fraction))

    loaded = load_model(draft.model, slots, progress, logits_rows=count_draft_rows(slots))
    spec = loaded.model.spec
    planned = loaded.plan.total if loaded.plan else 0  # the process is the draft's own
    cheaper, clock = list_cheaper(draft, loaded), SystemClock()
    drafter = ModelDrafter(
        loaded.model,
        msgspec.structs.replace(draft_state(draft, loaded), cores=effective_cores(), planned_memory_bytes=planned),
        clock,
        vocabulary=spec.vocabulary_size,
        prefill_ms=draft.prefill_ms,
        branches=branches > 0,
        cascade=Cascade(cheaper, clock, owned=cheaper),
        ahead=_CHECKED_AHEAD,
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
