"""Flights over the simulated model in shards, driven round by round."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from adapters.borrowed_slots import borrow_slots
from adapters.contract import LoadOptions, StagedModel, cut_layers, silent
from adapters.grammar import GrammarCompiler
from adapters.pipeline import PipelineModel
from adapters.simulated.adapter import SimulatedAdapter
from adapters.tokenizer import Tokenizer
from orchestrator.worker.drafting.port import Drafter
from orchestrator.worker.engine.flights import Flights
from tests.support.loops import loop_over

LAYERS = 4


def cut_toy(directory: Path, script: str = "", cuts: Sequence[int] = (2, 2), *, kv_blocks: int = 4096) -> PipelineModel:
    """The simulated model in shards of so many layers."""
    adapter = SimulatedAdapter()
    (directory / "script.txt").write_text(f"layers={LAYERS}&{script}")
    shards = []
    for layers in cut_layers(cuts, LAYERS, "toy"):
        share = (layers.end - layers.first) / LAYERS
        options = LoadOptions(
            device="SIM", slots=8, max_batch_rows=256, kv_cache_bytes=int(kv_blocks * 16 * 1024 * share)
        )
        shards.append(adapter.load_layers(directory, options, layers, silent))
    return PipelineModel(shards)


def flights_over(
    model: StagedModel, drafters: Sequence[Drafter | None], *, running: int = 8, **options: Any
) -> Flights:
    """As many flights as drafters."""
    grammars = GrammarCompiler(Tokenizer.bytes_only, model.spec.vocabulary_size)
    loops = [
        loop_over(view, drafter, running=running, grammars=grammars, **options)
        for view, drafter in zip(borrow_slots(model, len(drafters)), drafters, strict=True)
    ]
    return Flights(model, loops, max_running=running)
